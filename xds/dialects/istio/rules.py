"""Authorization rules, read from wherever: what they mean, and what ``/config_dump`` shows.

A policy is a list of rules of clauses of matches. Any rule, all its clauses, any match of a clause, and every
attribute of a match: so it is no more than conditions of :mod:`xds.model.policy` nested three deep, where only the
bottom negates. That is why a part that cannot be understood may be replaced alone: put :class:`Never` for it and
the whole can only hold of less, put :class:`Always` and it can only hold of more.

Empties: no rules never match; a rule without clauses does; a clause without matches does; a match
without anything does not.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

from xds.model.address import IpNetwork
from xds.model.policy import (
    AllOf,
    Always,
    AnyOf,
    Condition,
    DestinationIp,
    DestinationPort,
    Never,
    Not,
    PeerNamespace,
    PeerPrincipal,
    PeerServiceAccount,
    SourceIp,
)
from xds.model.strings import StringMatch


class Comparison(StrEnum):
    """How a text is compared, in the words of dumps and local files."""

    EXACT = "Exact"
    PREFIX = "Prefix"
    SUFFIX = "Suffix"
    PRESENCE = "Presence"


@dataclass(frozen=True, slots=True)
class Text:
    """One string match; presence has no value."""

    comparison: Comparison
    value: str = ""


@dataclass(frozen=True, slots=True)
class Account:
    """One service account, of any trust domain."""

    namespace: str
    service_account: str


Item = Text | Account | IpNetwork | int

#: Attributes of a match in the order in which dumps show them; each also negated, as ``notNamespaces``.
ATTRIBUTES = ("namespaces", "serviceAccounts", "principals", "sourceIps", "destinationIps", "destinationPorts")

#: Values of a match's attributes; those that are not there or empty say nothing.
Match = Mapping[str, Sequence[Item]]


def negated(attribute: str) -> str:
    """The name of an attribute's other half."""
    return f"not{attribute[0].upper()}{attribute[1:]}"


def condition_of_match(match: Match) -> Condition:
    """When a match matches: every attribute that says something agrees, and at least one does."""
    conditions: list[Condition] = []
    for attribute in ATTRIBUTES:
        if wanted := match.get(attribute):
            conditions.append(_any_of(_condition(attribute, item) for item in wanted))
        if unwanted := match.get(negated(attribute)):
            conditions.append(Not(_any_of(_condition(attribute, item) for item in unwanted)))
    if not conditions:
        return Never()
    return conditions[0] if len(conditions) == 1 else AllOf(tuple(conditions))


def condition_of_clause(matches: Sequence[Condition]) -> Condition:
    """When a clause does."""
    return _any_of(matches) if matches else Always()


def condition_of_rule(clauses: Sequence[Condition]) -> Condition:
    """When a rule does."""
    return clauses[0] if len(clauses) == 1 else AllOf(tuple(clauses))


def condition_of_rules(rules: Sequence[Condition]) -> Condition:
    """When a policy does."""
    return _any_of(rules)


def never_matches(attribute: str, item: Item) -> str:
    """Why a value that is well-formed can match nothing, which is not what its author meant; empty if it can."""
    if attribute == "principals" and isinstance(item, Text) and "spiffe://" in item.value:
        return "never matches: principals are written without spiffe://"
    return ""


def shown(match: Match) -> dict[str, list[object]]:
    """A match as dumps show it: what says something, nothing else."""
    names = [name for attribute in ATTRIBUTES for name in (attribute, negated(attribute))]
    return {name: [_shown(item) for item in match[name]] for name in names if match.get(name)}


def _shown(item: Item) -> object:
    match item:
        case Text(Comparison.PRESENCE):
            return {"Presence": []}
        case Text(comparison, value):
            return {comparison.value: value}
        case Account(namespace, service_account):
            return {"namespace": namespace, "serviceAccount": service_account}
        case int():
            return item
        case _:
            return str(item)


def _any_of(conditions: Iterable[Condition]) -> Condition:
    several = tuple(conditions)
    return several[0] if len(several) == 1 else AnyOf(several)


def _condition(attribute: str, item: Item) -> Condition:
    match attribute, item:
        case "namespaces", Text():
            return PeerNamespace(_string(item))
        case "principals", Text():
            return PeerPrincipal(_string(item))
        case "serviceAccounts", Account(namespace, service_account):
            return PeerServiceAccount(namespace, service_account)
        case "destinationPorts", int():
            return DestinationPort(item, item + 1)
        case "sourceIps", _ if not isinstance(item, Text | Account | int):
            return SourceIp(item)
        case "destinationIps", _ if not isinstance(item, Text | Account | int):
            return DestinationIp(item)
        case _:
            raise TypeError(f"{attribute} holds {item!r}")


def _string(text: Text) -> StringMatch | None:
    # An identity's namespace and principal are never empty, so that presence is having an identity.
    return (
        None if text.comparison is Comparison.PRESENCE else StringMatch(text.comparison.value.lower(), text.value)
    )
