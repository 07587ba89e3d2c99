"""Links, addresses, routes and rules: bytes that the kernel has accepted, written and read back."""

import struct
from ipaddress import ip_address, ip_interface, ip_network

import pytest
from pyroute2.netlink.rtnl.ifinfmsg import ifinfmsg

from tproxy.aio import rtnetlink
from tproxy.aio.netlink import NETLINK_ROUTE, NetlinkSocket
from tproxy.resources import Address, End, IpRule, NamespaceName, Route, VethPair
from tproxy.wire import MalformedDump, attribute

PROTOCOL = 162

ROUTES = [
    (
        Route(table=100, destination=ip_network("0.0.0.0/0"), device="lo", local=True),
        "0200000064a2fe020000000008000f00640000000800040007000000",
    ),
    (
        Route(table=100, destination=ip_network("::/0"), device="lo", local=True),
        "0a00000064a200020000000008000f00640000000800040007000000",
    ),
    (
        Route(
            table=100,
            destination=ip_network("10.244.1.9/32"),
            device="istioin",
            gateway=ip_address("192.168.126.2"),
            source=ip_address("172.18.0.2"),
        ),
        "0220000064a200010000000008000f0064000000080001000af4010908000500c0a87e0208000700ac1200020800040007000000",
    ),
    (
        Route(
            table=1000, destination=ip_network("::/0"), device="veth", gateway=ip_address("fd00::5"), onlink=True
        ),
        "0a00000000a200010400000008000f00e803000014000500fd0000000000000000000000000000050800040007000000",
    ),
]


@pytest.mark.parametrize(("route", "wire"), ROUTES)
def test_routes(route: Route, wire: str) -> None:
    message = rtnetlink.route_message(rtnetlink.RTM_NEWROUTE, route, PROTOCOL, lambda name: 7)
    assert message.body.hex() == wire
    assert message.flags == 0x601  # request, create, exclusively
    assert rtnetlink.read_route(message.body, PROTOCOL, {7: route.device}) == route
    assert rtnetlink.read_route(message.body, PROTOCOL + 1, {7: route.device}) is None
    replacing = rtnetlink.route_message(rtnetlink.RTM_NEWROUTE, route, PROTOCOL, lambda name: 7, replace=True)
    assert (replacing.flags, replacing.body) == (0x501, message.body)


def test_deleting_an_ipv4_route_matches_any_scope() -> None:
    scopes = [
        rtnetlink.route_message(rtnetlink.RTM_DELROUTE, route, PROTOCOL, lambda name: 7).body[6]
        for route, _ in ROUTES
    ]
    assert scopes == [255, 0, 255, 0]


RULES = [
    (
        IpRule(version=4, priority=100, mark=0x200, mask=0x200, goto=32766),
        "020000000000000200000000080006006400000005001500a200000008000400fe7f000008000a00000200000800100000020000",
    ),
    (
        IpRule(version=6, priority=103, table=100),
        "0a0000006400000100000000080006006700000005001500a200000008000f0064000000",
    ),
    (
        IpRule(version=4, priority=20000, mark=0x400, mask=0xFFF, table=1000),
        "02000000000000010000000008000600204e000005001500a200000008000f00e803000008000a000004000008001000ff0f0000",
    ),
]


@pytest.mark.parametrize(("rule", "wire"), RULES)
def test_rules(rule: IpRule, wire: str) -> None:
    message = rtnetlink.rule_message(rtnetlink.RTM_NEWRULE, rule, PROTOCOL)
    assert message.body.hex() == wire
    assert rtnetlink.read_rule(message.body, PROTOCOL) == rule
    assert rtnetlink.read_rule(message.body, 0) is None


def test_a_veth_pair_has_its_far_end_in_another_namespace() -> None:
    pair = VethPair(End(NamespaceName("a"), "left"), End(NamespaceName("b"), "right"))
    message = rtnetlink.create_pair(pair, 12, peer_index=5)
    far_end = "000000000500000000000000000000000a000300726967687400000008001c000c000000"
    assert far_end in message.body.hex()
    assert rtnetlink.read_link(message.body).name == "left"
    assert rtnetlink.read_link(message.body).kind == "veth"
    with pytest.raises(ValueError, match="two ends"):
        rtnetlink.create_pair(VethPair(pair.left, None), 12)


@pytest.mark.parametrize("text", ["192.168.126.1/30", "fd16:9254:7126:126::1/64"])
def test_addresses(text: str) -> None:
    address = Address("istioin", ip_interface(text))
    message = rtnetlink.address_message(rtnetlink.RTM_NEWADDR, address, 3)
    assert rtnetlink.read_address(message.body, {3: "istioin"}) == address
    assert rtnetlink.read_address(message.body, {4: "other"}) is None
    assert message.body[:8] == bytes(
        (10 if ":" in text else 2, address.interface.network.prefixlen, 0, 0, 3, 0, 0, 0)
    )


def test_link_local_addresses_are_the_kernels() -> None:
    address = Address("istioin", ip_interface("fe80::1/64"))
    message = rtnetlink.address_message(rtnetlink.RTM_NEWADDR, address, 3)
    assert rtnetlink.read_address(message.body, {3: "istioin"}) is None


@pytest.mark.parametrize("cut", range(28))
def test_a_message_that_is_cut_is_malformed_or_has_less(cut: int) -> None:
    whole = rtnetlink.route_message(rtnetlink.RTM_NEWROUTE, ROUTES[2][0], PROTOCOL, lambda name: 7).body
    try:
        found = rtnetlink.read_route(whole[:cut], PROTOCOL, {})
    except MalformedDump:
        return
    assert found != ROUTES[2][0]


@pytest.mark.parametrize("cut", [0, 15, 28, 31])
def test_a_link_that_is_cut_is_malformed(cut: int) -> None:
    with pytest.raises(MalformedDump):
        rtnetlink.read_link(rtnetlink.create_bridge("br0").body[:cut])


def test_links_of_this_machine_are_read_as_pyroute2_reads_them() -> None:
    with NetlinkSocket(NETLINK_ROUTE) as route:
        bodies = route.dump(rtnetlink.dump_request(rtnetlink.RTM_GETLINK))
    assert bodies
    for body in bodies:
        theirs = ifinfmsg(struct.pack("=IHHII", 16 + len(body), 0, 0, 0, 0) + body)
        theirs.decode()
        info = theirs.get_attr("IFLA_LINKINFO")
        assert rtnetlink.read_link(body) == rtnetlink.Link(
            index=theirs["index"],
            name=theirs.get_attr("IFLA_IFNAME"),
            up=bool(theirs["flags"] & 1),
            running=theirs.get_attr("IFLA_OPERSTATE") == "UP",
            kind=info.get_attr("IFLA_INFO_KIND") if info is not None else "",
            peer_index=theirs.get_attr("IFLA_LINK"),
        )


def test_a_route_with_an_encapsulation_is_not_ours() -> None:
    """pyroute2 would look for the encapsulation's type in attributes of length 0, without end."""
    ours = bytes((2, 8, 0, 0, 254, PROTOCOL, 0, 1, 0, 0, 0, 0))
    assert (
        rtnetlink.read_route(ours + attribute(22, b"\0" * 4) + attribute(1, b"\x0a\0\0\0"), PROTOCOL, {}) is None
    )
    assert rtnetlink.read_route(ours + b"\x06\0\x16\0\x05\0\0\0" + b"\0\0\x16\0", PROTOCOL, {}) is None
    with pytest.raises(MalformedDump):
        rtnetlink.read_route(ours[:11], PROTOCOL, {})
