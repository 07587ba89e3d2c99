"""What people read: golden files, reviewed once against the interception tables, and loaded by nft then."""

from ipaddress import ip_address, ip_network
from pathlib import Path

import pytest

from tests.tproxy.nodes import described, member
from tproxy import expressions as e
from tproxy.diff import diff
from tproxy.expressions import SCTP, TCP, UDP, Family, Phrase
from tproxy.node import HOST, ZTUNNEL, node
from tproxy.render.text import ip_rule_text, operation_text, route_text, rule_text, state_text, table_text
from tproxy.resources import Element, IpRule, Namespace, Route, Set, SetKey, State, Table, nothing

HERE = Path(__file__).parent


def test_node_reads_as_reviewed() -> None:
    text = state_text(node(described(member(10), member(11))))
    assert text + "\n" == (HERE / "node.golden").read_text()


@pytest.mark.parametrize(
    ("phrase", "text"),
    [
        (e.mark_is(0x539, 0xFFF, negate=True), "meta mark & 0xfff != 0x539"),
        (e.set_ct_mark(0x111, 0xFFF), "ct mark set ct mark & 0xfffff000 | 0x111"),
        (e.copy_ct_mark_to_mark(), "meta mark set ct mark"),
        (e.destination_port(TCP, 15008, negate=True), "tcp dport != 15008"),
        (e.source_port(UDP, 53), "udp sport 53"),
        (e.redirect_to(15006), "redirect to :15006"),
        (e.tproxy_to(Family.IPV6, 15001), "tproxy ip6 to :15001"),
        (e.user_is(1000), "meta skuid 0x3e8"),
        (e.translate_source(ip_address("fd00::1")), "snat ip6 to fd00::1"),
        (e.opens_connection(), "tcp flags & (fin | syn | rst | ack) == syn"),
        (e.set_ct_zone(1), "ct zone set 0x1"),
        (e.destination_in(Family.IPV6, "mesh_pods6"), "ip6 daddr @mesh_pods6"),
        (e.output_interface("lo", negate=True), 'oifname != "lo"'),
        (e.input_interface_like("tap+"), 'iifname "tap*"'),
        (e.output_interface_like("lo"), 'oifname "lo"'),
        (e.connection_state(e.CT_ESTABLISHED | e.CT_RELATED), "ct state & 0x6 != 0x0"),
        (e.neighbour_discovery(), "icmpv6 type >= 133 icmpv6 type <= 137"),
        ((*e.protocol_is(1), *e.icmp_is(8)), "icmp type 8"),
        ((*e.protocol_is(58), *e.icmp_is(128, negate=True)), "icmpv6 type != 128"),
        ((*e.protocol_is(1), *e.icmp_is(3, 4)), "meta l4proto icmp @th,0,16 0x304"),
        ((*e.protocol_is(SCTP), *e.ports_between(2, 80, 90)), "sctp dport >= 80 sctp dport <= 90"),
        ((*e.protocol_is(UDP), *e.port_in(0, "p", negate=True), *e.drop()), "udp sport != @p drop"),
        (e.verdict_by_address(Family.IPV4, "egress4", source=True), "ip saddr vmap @egress4"),
        (e.address_in(Family.IPV6, "s", source=True, negate=True), "ip6 saddr != @s"),
        (e.addresses_in(Family.IPV4, "self4"), "ip saddr . ip daddr @self4"),
        (e.address_and_port_in(Family.IPV6, "n", source=False), "ip6 daddr . meta l4proto . th dport @n"),
        ((e.Immediate(b"\1"), e.Meta(e.MetaKey.NFTRACE, sreg=1)), "meta nftrace set 0x1"),
        ((e.Counter(), *e.goto("c")), "counter goto c"),
        ((e.Counter(3, 180), *e.accept()), "counter packets 3 bytes 180 accept"),
        ((e.Lookup("x", flags=1),), "[ Lookup(set_name='x', sreg=1, flags=1, dreg=None) ]"),
        ((e.Opaque("limit", b"\1"),), "[ limit 01 ]"),
        ((e.Meta(99, dreg=1),), "[ Meta(key=99, dreg=1, sreg=None) ]"),
    ],
)
def test_rule_text(phrase: Phrase, text: str) -> None:
    assert rule_text(phrase) == text


def test_rules_and_routes_read_as_ip_prints_them() -> None:
    assert ip_rule_text(IpRule(version=6, priority=100, mark=0x200, mask=0x200, goto=32766)) == (
        "-6 rule priority 100 fwmark 0x200/0x200 goto 32766"
    )
    route = Route(table=100, destination=ip_network("0.0.0.0/0"), device="lo", local=True)
    assert route_text(route) == "route local default dev lo table 100"


def test_every_operation_has_words() -> None:
    wanted = node(described(member(10)))
    empty = State({ZTUNNEL: Namespace(), HOST: Namespace()})
    for operations in (diff(empty, wanted), diff(wanted, nothing(wanted))):
        for operation in operations:
            lines = operation_text(operation)
            assert lines
            assert all(line.startswith(("host: ", "ztunnel: ")) for line in lines)


def test_sets_of_every_shape_read_as_nft_prints_them() -> None:
    sets = (
        Set("nets", SetKey.IPV4_ADDRESS, frozenset({Element(bytes(4), last=b"\xff" * 4)}), interval=True),
        Set("ports", SetKey.PORT, frozenset({Element(b"\0\x50", last=b"\0\x51")}), interval=True),
        Set("named", SetKey.IPV4_PORT, frozenset({Element(e.port_key(ip_address("10.0.0.1"), TCP, 80))})),
        Set("self", SetKey.IPV4_PAIR, frozenset({Element(bytes((10, 0, 0, 1)) * 2)})),
        Set(
            "egress4",
            SetKey.IPV4_ADDRESS,
            frozenset({Element(bytes((10, 0, 0, 1)), "shop/web", verdict=e.goto("pod")[0])}),
            verdicts=True,
        ),
    )
    assert table_text(Table("t", sets=sets)).replace("\t", "").splitlines() == [
        "table inet t {",
        *("set nets {", "type ipv4_addr", "flags interval", "elements = { 0.0.0.0-255.255.255.255 }", "}", ""),
        *("set ports {", "type inet_service", "flags interval", "elements = { 80-81 }", "}", ""),
        *(
            "set named {",
            "type ipv4_addr . inet_proto . inet_service",
            "elements = { 10.0.0.1 . tcp . 80 }",
            "}",
            "",
        ),
        *("set self {", "type ipv4_addr . ipv4_addr", "elements = { 10.0.0.1 . 10.0.0.1 }", "}", ""),
        *("map egress4 {", "type ipv4_addr : verdict"),
        'elements = { 10.0.0.1 comment "shop/web" : goto pod }',
        *("}", "}"),
    ]
