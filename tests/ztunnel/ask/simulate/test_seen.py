"""Parses connections from access logs, plain and JSON, and from the page of live ones."""

import pytest

from xds.model.address import SocketAddress
from ztunnel.ask.simulate.seen import Seen, open_now, read_log
from ztunnel.proxy.istio.accounting.line_rendering import Field
from ztunnel.proxy.istio.accounting.logs import Bare, json_line, plain_line

IDENTITY = "spiffe://cluster.local/ns/shop/sa/client"
TUNNELLED: list[Field] = [
    ("src.addr", Bare("10.0.0.1:4000")),
    ("src.workload", 'a "quoted" name'),
    ("src.identity", IDENTITY),
    ("dst.addr", Bare("10.0.0.2:15008")),
    ("dst.hbone_addr", Bare("10.0.0.2:8080")),
    ("direction", "inbound"),
    ("bytes_sent", 1),
]
PLAIN: list[Field] = [
    ("src.addr", Bare("[2001:db8::1]:4000")),
    ("dst.addr", Bare("[2001:db8::2]:80")),
    ("direction", "inbound"),
]
NAMED: list[Field] = [*TUNNELLED[:4], ("dst.hbone_addr", Bare("cart.shop:9000")), ("direction", "inbound")]
DENIED: list[Field] = [
    *TUNNELLED,
    ("error", "connection closed due to policy rejection: explicitly denied by: a/b"),
]

BACK = Seen("10.0.0.1", IDENTITY, SocketAddress("10.0.0.2", 8080))


@pytest.mark.parametrize("line", [plain_line, json_line])
def test_access_lines_of_both_forms(line: object) -> None:
    assert callable(line)

    def write(fields: list[Field], message: str = "connection complete") -> str:
        return str(line("2026-11-23T00:00:00Z", "info", "access", message, fields))

    outbound = [*TUNNELLED[:5], ("direction", "outbound")]
    lines = [write(each) for each in (TUNNELLED, TUNNELLED, PLAIN, NAMED, DENIED, outbound)]
    lines += [write(TUNNELLED, "connection opened"), "nonsense\n", '{"message": "connection complete"']
    log = read_log(lines)
    assert log.seen == {
        BACK: 3,
        Seen("2001:db8::1", "", SocketAddress("2001:db8::2", 80)): 1,
        Seen("10.0.0.1", IDENTITY, SocketAddress("10.0.0.2", 9000)): 1,
    }
    assert not log.unread


def test_a_line_that_says_too_little_is_counted() -> None:
    short = plain_line("t", "info", "access", "connection complete", [("direction", "inbound")])
    odd = plain_line("t", "info", "access", "connection complete", [("src.addr", "x"), *TUNNELLED[3:]])
    assert read_log([short, odd]).unread == 2


def test_live_connections_have_the_identity_of_their_address() -> None:
    carried = [
        {"actualDst": "10.0.0.2:80", "originalDst": None, "protocol": "HBONE", "src": "10.0.0.1:4000"},
        {"actualDst": "10.0.0.2:80", "originalDst": None, "protocol": "TCP", "src": "10.0.0.1:4001"},
    ]
    pods = {"uid": {"connections": {"inbound": carried, "outbound": []}}, "pending": {"state": "Pending"}}
    proven = {**carried[0], "srcIdentity": "spiffe://td/ns/a/sa/b"}
    shown = {"uid": {"connections": {"inbound": [proven, {**carried[0], "srcIdentity": None}]}}}
    assert [seen.identity for seen in open_now(shown, {"10.0.0.1": IDENTITY})] == ["spiffe://td/ns/a/sa/b", ""]
    target = SocketAddress("10.0.0.2", 80)
    assert list(open_now(pods, {"10.0.0.1": IDENTITY})) == [
        Seen("10.0.0.1", IDENTITY, target),
        Seen("10.0.0.1", "", target),
    ]
