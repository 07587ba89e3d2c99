"""The steps that ``diff.py`` decides on and ``aio/kernel.py`` carries out, as values that read aloud."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeAlias

from tproxy.expressions import Family
from tproxy.resources import (
    Address,
    Chain,
    Element,
    IpRule,
    NamespaceName,
    Route,
    Rule,
    Set,
    SysctlKey,
    VethPair,
)


@dataclass(frozen=True, slots=True)
class AddTable:
    """An empty table."""

    family: Family
    table: str


@dataclass(frozen=True, slots=True)
class DeleteTable:
    """A table with all it holds."""

    family: Family
    table: str


@dataclass(frozen=True, slots=True)
class AddChain:
    """A chain without its rules."""

    family: Family
    table: str
    chain: Chain


@dataclass(frozen=True, slots=True)
class FlushChain:
    """All rules of a chain."""

    family: Family
    table: str
    chain: str


@dataclass(frozen=True, slots=True)
class DeleteChain:
    """A chain that is empty by now."""

    family: Family
    table: str
    chain: str


@dataclass(frozen=True, slots=True)
class AppendRule:
    """A rule at the end of its chain."""

    family: Family
    table: str
    chain: str
    rule: Rule


@dataclass(frozen=True, slots=True)
class AddSet:
    """A set without its elements."""

    family: Family
    table: str
    set: Set


@dataclass(frozen=True, slots=True)
class DeleteSet:
    """A set no rule refers to."""

    family: Family
    table: str
    set_name: str


@dataclass(frozen=True, slots=True)
class AddElements:
    """Members of a set, sorted by key."""

    family: Family
    table: str
    set_name: str
    elements: tuple[Element, ...]


@dataclass(frozen=True, slots=True)
class DeleteElements:
    """Members of a set, sorted by key."""

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
    """All of it or none: packets see the rules before or the rules after."""

    namespace: NamespaceName
    steps: tuple[NftStep, ...]


@dataclass(frozen=True, slots=True)
class CreatePair:
    """A veth pair; both ends are known."""

    pair: VethPair


@dataclass(frozen=True, slots=True)
class DeletePair:
    """A device of ours, its other end with it; routes and addresses of both go too."""

    pair: VethPair


@dataclass(frozen=True, slots=True)
class SetUp:
    """A device of ours, up."""

    namespace: NamespaceName
    device: str


@dataclass(frozen=True, slots=True)
class AddAddress:
    """An address."""

    namespace: NamespaceName
    address: Address


@dataclass(frozen=True, slots=True)
class DeleteAddress:
    """An address."""

    namespace: NamespaceName
    address: Address


@dataclass(frozen=True, slots=True)
class AddRoute:
    """A route; with ``replace`` instead of the one of ours in the same slot."""

    namespace: NamespaceName
    route: Route
    replace: bool = False


@dataclass(frozen=True, slots=True)
class DeleteRoute:
    """A route."""

    namespace: NamespaceName
    route: Route


@dataclass(frozen=True, slots=True)
class AddIpRule:
    """A policy routing rule."""

    namespace: NamespaceName
    rule: IpRule


@dataclass(frozen=True, slots=True)
class DeleteIpRule:
    """A policy routing rule."""

    namespace: NamespaceName
    rule: IpRule


@dataclass(frozen=True, slots=True)
class Remember:
    """Write down what sysctls are before they change; always precedes :class:`SetSysctl`."""

    namespace: NamespaceName
    values: Mapping[SysctlKey, str]


@dataclass(frozen=True, slots=True)
class SetSysctl:
    """Set a sysctl, or with ``restore`` put it back; a device that is gone needs no restoring."""

    namespace: NamespaceName
    key: SysctlKey
    value: str
    restore: bool = False


@dataclass(frozen=True, slots=True)
class Forget:
    """Drop what :class:`Remember` wrote; ``all`` says that nothing stays remembered."""

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
