"""Authorization rules from any source: their meaning, and their form in ``/config_dump``.

A policy is a list of rules. A rule has clauses, and a clause has matches. A policy matches if one of its rules
matches. A rule matches if each of its clauses has a match whose attributes all match. So conditions of
:mod:`xds.model.policy` are nested three deep, with negations only at the bottom. This allows replacing only the
part that cannot be understood: :class:`Never` in its place can only make the policy match less, and
:class:`Always` only more.

A policy without rules never matches. A rule without clauses and a clause without matches always match. A match
without attributes never does.
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
from xds.model.string_match import StringMatch


class Comparison(StrEnum):
    """The kinds of string matches, with their names in dumps and local files."""

    EXACT = "Exact"
    PREFIX = "Prefix"
    SUFFIX = "Suffix"
    PRESENCE = "Presence"


@dataclass(frozen=True, slots=True)
class Text:
    """A condition on a text, such as exact or prefix. A presence match has no value."""

    comparison: Comparison
    value: str = ""


@dataclass(frozen=True, slots=True)
class Account:
    """One service account, which matches identities of any trust domain."""

    namespace: str
    service_account: str


Item = Text | Account | IpNetwork | int

#: The attributes of a match, in the order that dumps show. Each has a negated form, such as ``notNamespaces``.
ATTRIBUTES = ("namespaces", "serviceAccounts", "principals", "sourceIps", "destinationIps", "destinationPorts")

#: The attributes of a match with their values. Missing and empty attributes do not restrict the match.
Match = Mapping[str, Sequence[Item]]


def negated(attribute: str) -> str:
    """Return the name of the negated form of an attribute."""
    return f"not{attribute[0].upper()}{attribute[1:]}"


def condition_of_match(match: Match) -> Condition:
    """Return the condition of a match: every attribute that is set matches, and at least one is set."""
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
    """Return the condition of a clause: at least one of its matches holds."""
    return _any_of(matches) if matches else Always()


def condition_of_rule(clauses: Sequence[Condition]) -> Condition:
    """Return the condition of a rule: all of its clauses hold."""
    return clauses[0] if len(clauses) == 1 else AllOf(tuple(clauses))


def condition_of_rules(rules: Sequence[Condition]) -> Condition:
    """Return the condition of a policy: at least one of its rules holds."""
    return _any_of(rules)


def never_matches(attribute: str, item: Item) -> str:
    """Return why a well-formed value can never match (an author's mistake), or an empty text if it can match."""
    if attribute == "principals" and isinstance(item, Text) and "spiffe://" in item.value:
        return "never matches: principals are written without spiffe://"
    return ""


def shown(match: Match) -> dict[str, list[object]]:
    """Return a match in the form of dumps: only the attributes that restrict."""
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
    # A presence match is true for every peer with an identity, because namespace and principal of an identity are
    # never empty.
    return (
        None if text.comparison is Comparison.PRESENCE else StringMatch(text.comparison.value.lower(), text.value)
    )
