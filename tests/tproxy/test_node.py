"""The desired resources of a node with its own namespace for the ztunnel."""

from dataclasses import replace
from ipaddress import ip_address

from tests.tproxy.nodes import member
from tproxy.node import member_sets
from tproxy.resources import Element


def test_a_reused_address_is_one_element_of_the_later_pod() -> None:
    """The kernel keeps one element per key, so two would be a difference that no apply removes."""
    address = ip_address("10.244.1.7")
    earlier, later = member(7), replace(member(8), addresses=(address,))
    pods4, pods6 = member_sets([earlier, later])
    assert pods4.elements == {Element(address.packed, "uid-8")}
    assert pods6.elements == {Element(ip_address("fd00:10:244:1::7").packed, "uid-7")}
