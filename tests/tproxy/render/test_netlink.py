"""Our bytes as pyroute2 reads them: an independent implementation of the same headers."""

from ipaddress import ip_address, ip_interface, ip_network
from typing import Any

import pytest
from pyroute2.netlink.nfnetlink.nftsocket import nft_chain_msg, nft_rule_msg, nft_set_elem_list_msg, nft_set_msg
from pyroute2.netlink.rtnl.fibmsg import fibmsg
from pyroute2.netlink.rtnl.ifaddrmsg import ifaddrmsg
from pyroute2.netlink.rtnl.ifinfmsg import ifinfmsg
from pyroute2.netlink.rtnl.rtmsg import rtmsg

from tproxy.expressions import Family, jump
from tproxy.operations import AddChain, AddElements, AddSet, AppendRule
from tproxy.render import dump, netlink
from tproxy.resources import (
    Address,
    Chain,
    Element,
    End,
    Hook,
    HookPoint,
    IpRule,
    NamespaceName,
    Route,
    Rule,
    Set,
    SetKey,
    SysctlKey,
    VethPair,
)
from tproxy.wire import Message

PROTOCOL = 162


def read(kind: Any, message: Message) -> Any:
    length = 16 + len(message.body)
    header = (
        length.to_bytes(4, "little") + message.kind.to_bytes(2, "little") + message.flags.to_bytes(2, "little")
    )
    decoded = kind(header + bytes(8) + message.body)
    decoded.decode()
    return decoded


ROUTES = [
    Route(table=100, destination=ip_network("0.0.0.0/0"), device="lo", local=True),
    Route(table=100, destination=ip_network("::/0"), device="lo", local=True),
    Route(
        table=100,
        destination=ip_network("10.244.1.9/32"),
        device="istioin",
        gateway=ip_address("192.168.126.2"),
        source=ip_address("172.18.0.2"),
    ),
    Route(table=1000, destination=ip_network("::/0"), device="veth", gateway=ip_address("fd00::5"), onlink=True),
]


@pytest.mark.parametrize("route", ROUTES)
def test_routes(route: Route) -> None:
    message = netlink.route_message(netlink.RTM_NEWROUTE, route, PROTOCOL, lambda name: 7)
    assert dump.read_route(message.body, PROTOCOL, {7: route.device}) == route
    assert dump.read_route(message.body, PROTOCOL + 1, {7: route.device}) is None
    seen = read(rtmsg, message)
    assert seen.get_attr("RTA_TABLE") == route.table
    assert seen.get_attr("RTA_OIF") == 7
    assert seen.get_attr("RTA_GATEWAY") == (str(route.gateway) if route.gateway else None)
    assert seen.get_attr("RTA_PREFSRC") == (str(route.source) if route.source else None)
    assert seen["dst_len"] == route.destination.prefixlen
    assert seen["proto"] == PROTOCOL


RULES = [
    IpRule(version=4, priority=100, mark=0x200, mask=0x200, goto=32766),
    IpRule(version=6, priority=103, table=100),
    IpRule(version=4, priority=20000, mark=0x400, mask=0xFFF, table=1000),
]


@pytest.mark.parametrize("rule", RULES)
def test_rules(rule: IpRule) -> None:
    message = netlink.rule_message(netlink.RTM_NEWRULE, rule, PROTOCOL)
    assert dump.read_rule(message.body, PROTOCOL) == rule
    assert dump.read_rule(message.body, 0) is None
    seen = read(fibmsg, message)
    assert seen.get_attr("FRA_PRIORITY") == rule.priority
    assert seen.get_attr("FRA_FWMARK") == rule.mark
    assert seen.get_attr("FRA_FWMASK") == rule.mask
    assert seen.get_attr("FRA_GOTO") == rule.goto
    assert seen.get_attr("FRA_TABLE") == rule.table
    assert seen.get_attr("FRA_PROTOCOL") == PROTOCOL


def test_veth_pair() -> None:
    pair = VethPair(End(NamespaceName("a"), "left"), End(NamespaceName("b"), "right"))
    seen = read(ifinfmsg, netlink.create_pair(pair, 12))
    assert seen.get_attr("IFLA_IFNAME") == "left"
    info = seen.get_attr("IFLA_LINKINFO")
    assert info.get_attr("IFLA_INFO_KIND") == "veth"
    peer = info.get_attr("IFLA_INFO_DATA").get_attr("VETH_INFO_PEER")
    assert peer.get_attr("IFLA_IFNAME") == "right"
    assert peer.get_attr("IFLA_NET_NS_FD") == 12


@pytest.mark.parametrize("text", ["192.168.126.1/30", "fd16:9254:7126:126::1/64"])
def test_addresses(text: str) -> None:
    address = Address("istioin", ip_interface(text))
    message = netlink.address_message(netlink.RTM_NEWADDR, address, 3)
    assert dump.read_address(message.body, {3: "istioin"}) == address
    seen = read(ifaddrmsg, message)
    assert (seen.get_attr("IFA_LOCAL"), seen["prefixlen"], seen["index"]) == (
        str(address.interface.ip),
        address.interface.network.prefixlen,
        3,
    )


def steps(*items: Any) -> list[Message]:
    messages = list(netlink.nft_batch(items))
    assert (messages[0].kind, messages[-1].kind) == (16, 17)
    return messages[1:-1]


def test_chain_rule_and_set() -> None:
    where = (Family.INET, "ztunnel")
    hook = Hook(kind="nat", point=HookPoint.PREROUTING, priority=-110)
    chain, rule, item = steps(
        AddChain(*where, Chain("keepvip", hook=hook)),
        AppendRule(*where, "forward", Rule(jump("save"), "why")),
        AddSet(*where, Set("mesh_pods4", SetKey.IPV4_ADDRESS)),
    )
    seen = read(nft_chain_msg, chain)
    assert (seen.get_attr("NFTA_CHAIN_NAME"), seen.get_attr("NFTA_CHAIN_TYPE")) == ("keepvip", "nat")
    assert seen.get_attr("NFTA_CHAIN_HOOK").get_attr("NFTA_HOOK_PRIORITY") == -110
    seen = read(nft_rule_msg, rule)
    [expression] = seen.get_attr("NFTA_RULE_EXPRESSIONS")
    verdict = expression.get_attr("NFTA_EXPR_DATA").get_attr("NFTA_IMMEDIATE_DATA").get_attr("NFTA_DATA_VERDICT")
    assert (verdict.get_attr("NFTA_VERDICT_CODE"), verdict.get_attr("NFTA_VERDICT_CHAIN")) == ("NFT_JUMP", "save")
    seen = read(nft_set_msg, item)
    assert (seen.get_attr("NFTA_SET_KEY_TYPE"), seen.get_attr("NFTA_SET_KEY_LEN")) == (7, 4)


def test_elements_are_split_below_the_size_of_an_attribute() -> None:
    elements = tuple(Element(number.to_bytes(4, "big"), "u" * 120) for number in range(1000))
    messages = steps(AddElements(Family.INET, "ztunnel", "mesh_pods4", elements))
    assert all(len(message.body) < 65536 for message in messages)
    seen = [read(nft_set_elem_list_msg, message) for message in messages]
    keys = [
        item.get_attr("NFTA_SET_ELEM_KEY").get_attr("NFTA_DATA_VALUE")
        for message in seen
        for item in message.get_attr("NFTA_SET_ELEM_LIST_ELEMENTS")
    ]
    assert keys == [element.key for element in elements]


def test_a_comment_that_does_not_fit_is_refused() -> None:
    with pytest.raises(ValueError, match="120"):
        steps(AppendRule(Family.INET, "t", "c", Rule(jump("x"), "y" * 121)))


def test_what_is_remembered_can_be_read_again() -> None:
    values = {
        SysctlKey("ipv4", "all", "rp_filter"): "1",
        SysctlKey("ipv4", "veth1", "rp_filter"): "2",
        SysctlKey("ipv6", "x", "y"): "0",
    }
    assert netlink.memory_elements(values) == {
        "ipv4-rp_filter": (Element(b"all".ljust(16, b"\0"), "1"), Element(b"veth1".ljust(16, b"\0"), "2")),
        "ipv6-y": (Element(b"x".ljust(16, b"\0"), "0"),),
    }
    sets = [
        Set(name, SetKey.INTERFACE, frozenset(elements))
        for name, elements in netlink.memory_elements(values).items()
    ]
    assert dump._remembered(sets) == values
