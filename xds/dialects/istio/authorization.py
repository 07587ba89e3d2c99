"""Compiles ``istio.security.Authorization`` to a policy that fails closed.

A policy is never refused because of its content, because the control plane would still believe that it is
enforced. Each unsupported part is replaced, at the smallest level, by the condition that admits no connection:
:class:`Never` in an allow policy and :class:`Always` in a deny policy (:mod:`xds.dialects.istio.rules` has the
reason why this is sound). The part is listed with its place. Other policies are not affected.

An unknown action or scope concerns the whole policy:

* An unknown *action* is treated as a deny of all connections in the policy's scope. Policies restrict traffic, and
  an action newer than this proxy restricts it in an unknown way.
* An unknown *scope* is treated as the whole mesh, the widest possible scope. A deny keeps its rules there. An
  allow gets no matching rules there: its rules could admit peers to workloads outside their scope, while its
  presence alone excludes peers.

The Rust ztunnel drops unreadable list entries, which turns a list of one bad address into an empty, unrestricting
list. It also ignores extensions.
"""

from collections.abc import Iterable, Sequence

from google.protobuf.message import DecodeError, Message

from xds.dialects.istio.reading import network_of, unknown_field
from xds.dialects.istio.rules import (
    ATTRIBUTES,
    Account,
    Comparison,
    Item,
    Text,
    condition_of_clause,
    condition_of_match,
    condition_of_rule,
    condition_of_rules,
    negated,
    never_matches,
    shown,
)
from xds.errors import ConfigError
from xds.model.authorization import Action, AuthorizationPolicy, PolicyScope
from xds.model.policy import Always, Condition, Never
from xds.proto.istio.security import authorization_pb2 as security

_ACTIONS = {security.ALLOW: Action.ALLOW, security.DENY: Action.DENY}
_SCOPES = {
    security.GLOBAL: PolicyScope.GLOBAL,
    security.NAMESPACE: PolicyScope.NAMESPACE,
    security.WORKLOAD_SELECTOR: PolicyScope.WORKLOAD_SELECTOR,
}
_COMPARISONS = {"exact": Comparison.EXACT, "prefix": Comparison.PREFIX, "suffix": Comparison.SUFFIX}
_FIELDS = {
    "namespaces": "namespaces",
    "serviceAccounts": "service_accounts",
    "principals": "principals",
    "sourceIps": "source_ips",
    "destinationIps": "destination_ips",
    "destinationPorts": "destination_ports",
}


def compile_authorization(data: bytes) -> AuthorizationPolicy:
    """Compile one packed ``Authorization``.

    Raises:
        ConfigError: the bytes are not an ``Authorization``, or the policy has no name.
    """
    try:
        message = security.Authorization.FromString(data)
    except DecodeError as error:
        raise ConfigError(f"decode: failed to decode Protobuf message: {error}") from None
    if not message.name:
        raise ConfigError("a policy needs a name")
    faults: list[str] = []
    action = _ACTIONS.get(message.action)
    if action is None:
        faults.append(f"action: unknown enumeration value {message.action}; everything is denied")
    scope = _SCOPES.get(message.scope)
    if scope is None:
        faults.append(f"scope: unknown enumeration value {message.scope}; taken for the whole mesh")
    compiler = _Compiler(action or Action.DENY, faults)
    condition, rules = compiler.policy(message)
    if action is None:
        condition = Always()
    elif scope is None and action is Action.ALLOW:
        condition = Never()
    return AuthorizationPolicy(
        name=message.name,
        namespace=message.namespace,
        scope=scope or PolicyScope.GLOBAL,
        action=action or Action.DENY,
        condition=condition,
        dry_run=message.dry_run,
        rules=tuple(rules),
        faults=tuple(faults),
    )


class _Compiler:
    """Compiles one policy: its conditions, its form in dumps, and its faults."""

    def __init__(self, action: Action, faults: list[str]) -> None:
        self._closed: Condition = Always() if action is Action.DENY else Never()
        self._faults = faults

    def policy(self, message: security.Authorization) -> tuple[Condition, list[object]]:
        understood = self._understood(message, "") and self._without_extensions(message, "")
        compiled = [self._rule(rule, f"rules[{index}]") for index, rule in enumerate(message.rules)]
        condition = condition_of_rules([condition for condition, _ in compiled])
        return condition if understood else self._closed, [rules for _, rules in compiled]

    def _rule(self, message: security.Rule, place: str) -> tuple[Condition, object]:
        understood = self._understood(message, place)
        compiled = [self._clause(each, f"{place}.clauses[{n}]") for n, each in enumerate(message.clauses)]
        condition = condition_of_rule([condition for condition, _ in compiled])
        return condition if understood else self._closed, [clause for _, clause in compiled]

    def _clause(self, message: security.Clause, place: str) -> tuple[Condition, object]:
        understood = self._understood(message, place)
        compiled = [self._match(each, f"{place}.matches[{n}]") for n, each in enumerate(message.matches)]
        condition = condition_of_clause([condition for condition, _ in compiled])
        return condition if understood else self._closed, [match for _, match in compiled]

    def _match(self, message: security.Match, place: str) -> tuple[Condition, object]:
        understood = self._understood(message, place) and self._without_extensions(message, place)
        match: dict[str, Sequence[Item]] = {}
        for attribute in ATTRIBUTES:
            for name, field in (
                (attribute, _FIELDS[attribute]),
                (negated(attribute), f"not_{_FIELDS[attribute]}"),
            ):
                values = getattr(message, field)
                if not values:
                    continue
                items = list(self._items(attribute, values, f"{place}.{field}"))
                understood = understood and len(items) == len(values)
                match[name] = items
        return condition_of_match(match) if understood else self._closed, shown(match)

    def _items(self, attribute: str, values: Iterable[object], place: str) -> Iterable[Item]:
        """Return the supported values of a list. Unsupported ones become faults."""
        for index, value in enumerate(values):
            where = f"{place}[{index}]"
            if isinstance(value, Message) and not self._understood(value, where):
                continue
            try:
                item = _item(value)
            except ConfigError as error:
                self._faults.append(f"{where}: {error.reason}")
                continue
            if reason := never_matches(attribute, item):
                self._faults.append(f"{where}: {reason}")
            yield item

    def _understood(self, message: Message, place: str) -> bool:
        number = unknown_field(message)
        if number is not None:
            self._faults.append(_at(place, f"unknown field number {number}"))
        return number is None

    def _without_extensions(self, message: security.Authorization | security.Match, place: str) -> bool:
        for index, extension in enumerate(message.extensions):
            self._faults.append(_at(place, f"extensions[{index}]: {extension.name!r} is not supported"))
        return not message.extensions


def _at(place: str, what: str) -> str:
    if not place:
        return what
    return f"{place}.{what}" if what.startswith("extensions") else f"{place}: {what}"


def _item(value: object) -> Item:
    match value:
        case int():
            if value > 65535:
                raise ConfigError(f"{value} is no port")
            return value
        case security.StringMatch():
            kind = value.WhichOneof("match_type")
            if kind is None:
                raise ConfigError("a string match without a kind")
            if kind == "presence":
                return Text(Comparison.PRESENCE)
            return Text(_COMPARISONS[kind], getattr(value, kind))
        case security.ServiceAccountMatch():
            return Account(value.namespace, value.serviceAccount)
        case security.Address():
            return network_of(value.address, value.length)
        case _:
            raise TypeError(f"{value!r} is in no match")
