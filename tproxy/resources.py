"""Kernel resources as values. A :class:`State` holds the desired or the found resources, and states can be
compared.

A state covers several network namespaces, named by the caller ("host", "ztunnel"), and the veth pairs
between them. All values are frozen. They have an order only where it matters to the kernel, so two states are
equal if and only if the kernel behaves in the same way for both. ``diff.py`` computes the operations that turn one
state into another.

Ownership is explicit: :class:`Ownership` names our nftables tables and devices, and each of our rules and routes
carries its ``protocol`` number. Foreign resources are neither read nor touched.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import IntEnum
from ipaddress import IPv4Address, IPv4Interface, IPv4Network, IPv6Address, IPv6Interface, IPv6Network
from types import MappingProxyType
from typing import Literal, NewType, TypeAlias

from tproxy.expressions import Family, Phrase, Verdict

NamespaceName = NewType("NamespaceName", str)
IpAddress: TypeAlias = IPv4Address | IPv6Address
IpInterface: TypeAlias = IPv4Interface | IPv6Interface
IpNetwork: TypeAlias = IPv4Network | IPv6Network
Version: TypeAlias = Literal[4, 6]


class HookPoint(IntEnum):
    """The hooks of netfilter, numbered as ``NF_INET_*``."""

    PREROUTING = 0
    INPUT = 1
    FORWARD = 2
    OUTPUT = 3
    POSTROUTING = 4
    INGRESS = 5


ChainKind: TypeAlias = Literal["filter", "nat", "route"]

RAW, MANGLE, DSTNAT, SRCNAT = -300, -150, -100, 100


@dataclass(frozen=True, slots=True, kw_only=True)
class Hook:
    """Where and how a base chain is attached. Our own chains have the policy ``accept``. The policy ``drop``
    occurs only in chains read from the kernel.
    """

    kind: ChainKind
    point: HookPoint
    priority: int
    drop: bool = False


@dataclass(frozen=True, slots=True)
class Rule:
    """One nftables rule. Its comment (at most 120 bytes of ASCII) is stored in the kernel and shown by nft."""

    phrase: Phrase
    comment: str = ""


@dataclass(frozen=True, slots=True)
class Chain:
    """An nftables chain. With a hook, it is a base chain."""

    name: str
    rules: tuple[Rule, ...] = ()
    hook: Hook | None = None


class SetKey(IntEnum):
    """The type of a set's keys, numbered as nft writes it into NFTA_SET_KEY_TYPE."""

    IPV4_ADDRESS = 7
    IPV6_ADDRESS = 8
    PORT = 13
    INTERFACE = 41
    # Concatenations have six bits per type: two addresses, or an address, a protocol (12) and a port (13).
    IPV4_PAIR = 7 << 6 | 7
    IPV6_PAIR = 8 << 6 | 8
    IPV4_PORT = 7 << 12 | 12 << 6 | 13
    IPV6_PORT = 8 << 12 | 12 << 6 | 13

    @property
    def octets(self) -> int:
        """The length of a set's keys in bytes."""
        return _KEY_OCTETS[self]


_KEY_OCTETS = {
    SetKey.IPV4_ADDRESS: 4,
    SetKey.IPV6_ADDRESS: 16,
    SetKey.PORT: 2,
    SetKey.INTERFACE: 16,
    SetKey.IPV4_PAIR: 8,
    SetKey.IPV6_PAIR: 32,
    SetKey.IPV4_PORT: 12,
    SetKey.IPV6_PORT: 24,
}


@dataclass(frozen=True, slots=True)
class Element:
    """One member of a set.

    Attributes:
        key: the bytes that a register must have, for example ``address.packed``. For an interval, the first key.
        last: an interval's last key, inclusive. For a single key in a set of intervals, the same as ``key``.
        verdict: the verdict of a verdict map for this key.
    """

    key: bytes
    comment: str = ""
    last: bytes = b""
    verdict: Verdict | None = None


@dataclass(frozen=True, slots=True)
class Set:
    """A named set of keys.

    Attributes:
        interval: whether the members are intervals, which neither overlap nor touch one another.
        verdicts: whether the set is a map from keys to verdicts.
    """

    name: str
    key: SetKey
    elements: frozenset[Element] = frozenset()
    interval: bool = False
    verdicts: bool = False

    @property
    def shape(self) -> tuple[SetKey, bool, bool]:
        """The attributes that must be equal to change a set in place, because the kernel cannot change them."""
        return (self.key, self.interval, self.verdicts)


@dataclass(frozen=True, slots=True)
class Table:
    """An nftables table with all its chains and sets. The table should contain no other objects."""

    name: str
    family: Family = Family.INET
    chains: tuple[Chain, ...] = ()
    sets: tuple[Set, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class IpRule:
    """A policy routing rule: look up the routing table ``table``, or continue with the rules from priority
    ``goto``.
    """

    version: Version
    priority: int
    table: int | None = None
    goto: int | None = None
    mark: int | None = None
    mask: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Route:
    """One route. The other attributes determine its scope: host for local routes, link for routes without a
    gateway, otherwise universe.
    """

    table: int
    destination: IpNetwork
    device: str
    gateway: IpAddress | None = None
    source: IpAddress | None = None
    local: bool = False
    onlink: bool = False

    @property
    def version(self) -> Version:
        """4 or 6."""
        return self.destination.version

    @property
    def slot(self) -> tuple[int, IpNetwork]:
        """The values that identify a route in the kernel: table and destination (metrics are not used here)."""
        return (self.table, self.destination)


@dataclass(frozen=True, slots=True)
class Address:
    """An address on one of our devices. IPv6 addresses skip duplicate address detection, because there is no other
    host on a veth pair.
    """

    device: str
    interface: IpInterface


@dataclass(frozen=True, slots=True)
class End:
    """One end of a veth pair."""

    namespace: NamespaceName
    device: str


@dataclass(frozen=True, slots=True)
class VethPair:
    """A veth pair. ``right`` is None if a device was found in the kernel whose other end is unknown."""

    left: End
    right: End | None

    @property
    def ends(self) -> tuple[End, ...]:
        """The known ends."""
        return (self.left,) if self.right is None else (self.left, self.right)


@dataclass(frozen=True, slots=True)
class SysctlKey:
    """The name of a sysctl, ``net.<family>.conf.<device>.<leaf>``."""

    family: Literal["ipv4", "ipv6"]
    device: str
    leaf: str

    @property
    def path(self) -> str:
        """The path below /proc/sys. A device name may contain dots but no slashes, so it needs no escaping."""
        return f"net/{self.family}/conf/{self.device}/{self.leaf}"


@dataclass(frozen=True, slots=True)
class Namespace:
    """Our resources in one network namespace.

    ``remembered`` has the values that sysctls had before we changed them. Only states read from the kernel have
    it. The values are stored in the kernel, in an nftables table, so that any later process can restore them, even
    after a crash. A file has a copy in case another program flushes the ruleset.
    """

    tables: tuple[Table, ...] = ()
    rules: frozenset[IpRule] = frozenset()
    routes: frozenset[Route] = frozenset()
    addresses: frozenset[Address] = frozenset()
    up: frozenset[str] = frozenset()
    sysctls: Mapping[SysctlKey, str] = field(default_factory=lambda: MappingProxyType({}))
    remembered: Mapping[SysctlKey, str] = field(default_factory=lambda: MappingProxyType({}))


@dataclass(frozen=True, slots=True)
class Ownership:
    """How our resources are recognised in every namespace of a state: by names of tables and devices, and by a
    protocol number.

    ``protocol`` is written to FRA_PROTOCOL and rtm_protocol. We know no ``rt_protos`` file that contains 162.
    """

    tables: frozenset[str]
    memory_table: str
    devices: frozenset[str] = frozenset()
    protocol: int = 162


@dataclass(frozen=True, slots=True)
class State:
    """The resources of all namespaces, and the veth pairs between these.

    Namespaces are set up in this order and cleared in reverse, because later ones send traffic into earlier ones.
    """

    namespaces: Mapping[NamespaceName, Namespace]
    pairs: frozenset[VethPair] = frozenset()


def nothing(state: State) -> State:
    """Return a state with the same namespaces and no resources. Applying it removes all our resources."""
    return State({name: Namespace() for name in state.namespaces})
