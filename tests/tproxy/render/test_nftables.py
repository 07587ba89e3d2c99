"""Our bytes as pyroute2 reads them: an independent implementation of the same headers."""

from typing import Any

import pytest
from hypothesis import given
from pyroute2.netlink.nfnetlink.nftsocket import nft_chain_msg, nft_rule_msg, nft_set_elem_list_msg, nft_set_msg

from tests.tproxy.tables import tables
from tproxy.expressions import Family, jump
from tproxy.operations import AddChain, AddElements, AddSet, AppendRule
from tproxy.render import nf_tables as nf
from tproxy.render import nftables, nftables_dump
from tproxy.render.nftables_dump import NftDump, read_tables
from tproxy.resources import Chain, Element, Hook, HookPoint, Ownership, Rule, Set, SetKey, SysctlKey, Table
from tproxy.wire import MalformedDump, Message, be32, nest, text

PROTOCOL = 162


def read(kind: Any, message: Message) -> Any:
    length = 16 + len(message.body)
    header = (
        length.to_bytes(4, "little") + message.kind.to_bytes(2, "little") + message.flags.to_bytes(2, "little")
    )
    decoded = kind(header + bytes(8) + message.body)
    decoded.decode()
    return decoded


def steps(*items: Any) -> list[Message]:
    messages = list(nftables.nft_batch(items))
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
    assert nftables.memory_elements(values) == {
        "ipv4-rp_filter": (Element(b"all".ljust(16, b"\0"), "1"), Element(b"veth1".ljust(16, b"\0"), "2")),
        "ipv6-y": (Element(b"x".ljust(16, b"\0"), "0"),),
    }
    sets = [
        Set(name, SetKey.INTERFACE, frozenset(elements))
        for name, elements in nftables.memory_elements(values).items()
    ]
    assert nftables_dump._remembered(sets) == values


_HEADER = bytes((2, 0, 0, 0))
_CHAIN = _HEADER + text(nf.NFTA_CHAIN_TABLE, "ours") + text(nf.NFTA_CHAIN_NAME, "c")


@pytest.mark.parametrize(
    "bodies",
    [
        {"tables": [b"\2"]},
        {"tables": [_HEADER]},
        {"chains": [_HEADER + text(nf.NFTA_CHAIN_NAME, "c")]},
        {"chains": [_CHAIN + nest(nf.NFTA_CHAIN_HOOK, be32(nf.NFTA_HOOK_HOOKNUM, 119), be32(2, 0))]},
        {"rules": [_HEADER + text(nf.NFTA_RULE_TABLE, "ours")]},
        {"sets": [_HEADER + text(nf.NFTA_SET_NAME, "s")]},
    ],
)
def test_a_dump_without_what_all_have_is_malformed(bodies: dict[str, list[bytes]]) -> None:
    nothing: dict[str, Any] = {"tables": (), "chains": (), "rules": (), "sets": (), "elements": {}}
    with pytest.raises(MalformedDump):
        read_tables(NftDump(**(nothing | bodies)), Ownership(frozenset({"ours"}), "memory"))


@given(tables())
def test_elements_come_back_as_they_went(table: Table) -> None:
    """A message that adds elements has the layout of a dump of them."""
    for item in table.sets:
        elements = tuple(sorted(item.elements, key=lambda element: element.key))
        bodies = [message.body for message in steps(AddElements(table.family, table.name, item.name, elements))]
        assert nftables_dump.read_elements(bodies, interval=item.interval) == item.elements


@given(tables())
def test_sets_come_back_in_their_shape(table: Table) -> None:
    bodies = [message.body for item in table.sets for message in steps(AddSet(table.family, table.name, item))]
    header = _HEADER + text(nf.NFTA_TABLE_NAME, table.name)
    dump = NftDump((bytes((table.family,)) + header[1:],), (), (), bodies, {})
    [[found], _] = read_tables(dump, Ownership(frozenset({table.name}), "memory"))
    assert [(item.name, item.shape) for item in found.sets] == [(item.name, item.shape) for item in table.sets]


def test_an_interval_up_to_the_highest_key_has_no_end() -> None:
    everything = Element(bytes(4), last=b"\xff" * 4)
    [message] = steps(AddElements(Family.INET, "t", "s", (everything,)))
    seen = read(nft_set_elem_list_msg, message)
    [element] = seen.get_attr("NFTA_SET_ELEM_LIST_ELEMENTS")
    assert element.get_attr("NFTA_SET_ELEM_FLAGS") is None
    assert nftables_dump.read_elements([message.body], interval=True) == {everything}
