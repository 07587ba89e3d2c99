"""Converts members of IP sets, which are texts, to elements of the kernel's sets. Pure."""

from collections.abc import Iterable
from functools import lru_cache
from ipaddress import ip_address, ip_network
from typing import TypeAlias

from tproxy.expressions import port_key
from tproxy.resources import Element
from xds.digits import whole_number
from xds.model import calico as c
from ztunnel.policy.calico.ip_sets import MalformedMember
from ztunnel.policy.netpol.intervals import Interval, merged

#: An IP version, and the first and last address of a range.
_Network: TypeAlias = tuple[int, int, int]


def addresses_of(members: Iterable[str], version: int) -> tuple[frozenset[Element], bool]:
    """Return the elements of one IP version. Also return whether networks are among them; if so, the elements are
    intervals.

    Raises:
        MalformedMember: a member is not an address or network.
    """
    ranges = [(first, last) for found, first, last in map(_network, members) if found == version]
    octets = 4 if version == 4 else 16
    if all(first == last for first, last in ranges):
        return frozenset(_single(first, octets) for first, _ in ranges), False
    return frozenset(_between(interval, octets) for interval in merged(ranges)), True


def ports_of(members: Iterable[str], version: int) -> frozenset[Element]:
    """Return the elements of one IP version for a set of addresses with ports (``10.0.0.1,tcp:80``).

    Raises:
        MalformedMember: a member has another form.
    """
    return frozenset(element for found, element in map(_port, members) if found == version)


@lru_cache(maxsize=65536)  # a pod's address is in many sets
def _network(member: str) -> _Network:
    try:
        network = ip_network(member, strict=False)
    except ValueError as error:
        raise MalformedMember(member) from error
    return network.version, int(network.network_address), int(network.broadcast_address)


@lru_cache(maxsize=65536)
def _single(address: int, octets: int) -> Element:
    return Element(address.to_bytes(octets, "big"))


def _between(interval: Interval, octets: int) -> Element:
    first, last = interval
    return Element(first.to_bytes(octets, "big"), last=last.to_bytes(octets, "big"))


@lru_cache(maxsize=65536)
def _port(member: str) -> tuple[int, Element]:
    text, _, rest = member.partition(",")
    name, _, digits = rest.partition(":")
    protocol = c.PROTOCOLS.get(name.lower()) or whole_number(name, 255)
    port = whole_number(digits, 65535)
    try:
        address = ip_address(text)
    except ValueError as error:
        raise MalformedMember(member) from error
    if not protocol or port is None:
        raise MalformedMember(member)
    return address.version, Element(port_key(address, protocol, port))
