"""Trace events: the matched rules and the packet's header. Other messages can arrive on the group."""

from ipaddress import ip_address

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tproxy.expressions import Verdict, VerdictCode
from tproxy.render.trace import Header, read_event, verdict_text
from tproxy.wire import MalformedDump, attribute, be32, nest, text

TRACE = 10 << 8 | 17
V4 = bytes((0x45,)) + bytes(8) + bytes((6, 0, 0)) + bytes((10, 0, 0, 1, 10, 0, 0, 2))
V6 = bytes((0x60,)) + bytes(5) + bytes((17, 64)) + ip_address("fd00::1").packed + ip_address("fd00::2").packed
PORTS = (40000).to_bytes(2, "big") + (80).to_bytes(2, "big") + bytes(4)


def event(*more: bytes, kind: int = 3) -> bytes:
    where = text(1, "t"), text(2, "c"), attribute(3, (7).to_bytes(8, "big")), be32(4, kind), be32(6, 99)
    return bytes((1, 0, 0, 0)) + b"".join((*where, *more))


@pytest.mark.parametrize(
    ("network", "header"),
    [
        (V4, Header(ip_address("10.0.0.1"), ip_address("10.0.0.2"), 6, 40000, 80)),
        (V6, Header(ip_address("fd00::1"), ip_address("fd00::2"), 17, 40000, 80)),
        (V4[:10], None),
        (b"", None),
    ],
)
def test_a_rule_that_matched(network: bytes, header: Header | None) -> None:
    verdict = nest(5, be32(1, VerdictCode.JUMP), text(2, "other"))
    found = read_event(TRACE, event(verdict, attribute(8, network), attribute(9, PORTS)))
    assert found is not None
    assert (found.packet, found.table, found.chain, found.handle) == (99, "t", "c", 7)
    assert found.verdict == Verdict(VerdictCode.JUMP, "other")
    assert found.header == header


def test_a_protocol_without_ports_has_none() -> None:
    icmp = V4[:9] + bytes((1,)) + V4[10:]
    found = read_event(TRACE, event(attribute(8, icmp), attribute(9, PORTS)))
    assert found is not None
    assert found.header is not None
    assert (found.header.source_port, found.header.destination_port) == (0, 0)


def test_trace_events_without_a_match_are_ignored() -> None:
    assert read_event(10 << 8 | 6, event()) is None
    assert read_event(TRACE, event(kind=2)) is None


@given(st.binary(max_size=60))
def test_any_bytes_are_an_event_or_malformed(body: bytes) -> None:
    try:
        read_event(TRACE, body)
    except MalformedDump:
        pass


def test_verdicts_in_words() -> None:
    verdicts = (None, Verdict(-1), Verdict(0), Verdict(-4, "c"), Verdict(77))
    assert list(map(verdict_text, verdicts)) == ["continue", "continue", "drop", "goto c", "77"]
