"""The operations that ``diff.py`` returns and ``aio/kernel.py`` carries out, as values."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeAlias

from tproxy.expressions import Family
from tproxy.resources import Address, Chain, Element, IpRule, NamespaceName, Route, Rule, Set, SysctlKey, VethPair


@dataclass(frozen=True, slots=True)
class AddTable:
    """Create an empty table."""

    family: Family
    table: str


@dataclass(frozen=True, slots=True)
class DeleteTable:
    """Delete a table with its chains and sets."""

    family: Family
    table: str


@dataclass(frozen=True, slots=True)
class AddChain:
    """Create a chain without its rules."""

    family: Family
    table: str
    chain: Chain


@dataclass(frozen=True, slots=True)
class FlushChain:
    """Delete all rules of a chain."""

    family: Family
    table: str
    chain: str


@dataclass(frozen=True, slots=True)
class DeleteChain:
    """Delete a chain that an earlier step has flushed."""

    family: Family
    table: str
    chain: str


@dataclass(frozen=True, slots=True)
class AppendRule:
    """Append a rule to its chain."""

    family: Family
    table: str
    chain: str
    rule: Rule


@dataclass(frozen=True, slots=True)
class AddSet:
    """Create a set without its elements."""

    family: Family
    table: str
    set: Set


@dataclass(frozen=True, slots=True)
class DeleteSet:
    """Delete a set that no rule refers to."""

    family: Family
    table: str
    set_name: str


@dataclass(frozen=True, slots=True)
class AddElements:
    """Add elements, sorted by key, to a set. Whether they have ``last`` and ``verdict`` depends on the set's
    type.
    """

    family: Family
    table: str
    set_name: str
    elements: tuple[Element, ...]


@dataclass(frozen=True, slots=True)
class DeleteElements:
    """Delete elements, sorted by key, from a set."""

    family: Family
    table: str
    set_name: str
    elements: tuple[Element, ...]


NftStep: TypeAlias = (
    AddTable
    | DeleteTable
    | AddChain
    | FlushChain
    | DeleteChain
    | AppendRule
    | AddSet
    | DeleteSet
    | AddElements
    | DeleteElements
)


@dataclass(frozen=True, slots=True)
class NftTransaction:
    """Change nftables in one transaction: the kernel applies all steps or none, and every packet sees either the
    old or the new rules.
    """

    namespace: NamespaceName
    steps: tuple[NftStep, ...]


@dataclass(frozen=True, slots=True)
class CreatePair:
    """Create a veth pair. Both of its ends are known."""

    pair: VethPair


@dataclass(frozen=True, slots=True)
class DeletePair:
    """Delete one of our devices, with its other end, and the routes and addresses of both."""

    pair: VethPair


@dataclass(frozen=True, slots=True)
class SetUp:
    """Bring one of our devices up."""

    namespace: NamespaceName
    device: str


@dataclass(frozen=True, slots=True)
class AddAddress:
    """Add an address to one of our devices."""

    namespace: NamespaceName
    address: Address


@dataclass(frozen=True, slots=True)
class DeleteAddress:
    """Delete an address from one of our devices."""

    namespace: NamespaceName
    address: Address


@dataclass(frozen=True, slots=True)
class AddRoute:
    """Add a route. ``replace`` replaces our route in the same slot."""

    namespace: NamespaceName
    route: Route
    replace: bool = False


@dataclass(frozen=True, slots=True)
class DeleteRoute:
    """Delete a route."""

    namespace: NamespaceName
    route: Route


@dataclass(frozen=True, slots=True)
class AddIpRule:
    """Add a policy routing rule."""

    namespace: NamespaceName
    rule: IpRule


@dataclass(frozen=True, slots=True)
class DeleteIpRule:
    """Delete a policy routing rule."""

    namespace: NamespaceName
    rule: IpRule


@dataclass(frozen=True, slots=True)
class Remember:
    """Save the current values of sysctls in the memory table. This always precedes their :class:`SetSysctl`."""

    namespace: NamespaceName
    values: Mapping[SysctlKey, str]


@dataclass(frozen=True, slots=True)
class SetSysctl:
    """Set a sysctl. ``restore`` means that the value is the saved one, and a missing device is ignored."""

    namespace: NamespaceName
    key: SysctlKey
    value: str
    restore: bool = False


@dataclass(frozen=True, slots=True)
class Forget:
    """Delete sysctl values that :class:`Remember` saved. If ``all`` is set, no saved value is left, and the memory
    table is deleted.
    """

    namespace: NamespaceName
    values: Mapping[SysctlKey, str]
    all: bool


Operation: TypeAlias = (
    NftTransaction
    | CreatePair
    | DeletePair
    | SetUp
    | AddAddress
    | DeleteAddress
    | AddRoute
    | DeleteRoute
    | AddIpRule
    | DeleteIpRule
    | Remember
    | SetSysctl
    | Forget
)
