"""Evaluates lists of policies on the facts of a connection. Pure. No other module decides about policy.

:func:`holds` defines the meaning of a condition. :func:`judge` returns the same results faster. It prepares
policies on first use, and stores the result in them:

* A tier becomes an index. Most policies can match only for a peer, namespace, address or port that they name,
  completely or by a prefix or suffix. Such policies are looked up by the connection's values, and only the
  remaining policies are evaluated one by one. Of 10,000 policies with principals, only the policies for the
  connection's principal are evaluated (``bench/scale_istio.py``).
* A condition becomes a closure when it is first evaluated, so that only facts are inspected per connection.
"""

import ipaddress
from collections.abc import Callable, Hashable, Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, assert_never

from xds.model import policy as p
from xds.model.address import IpNetwork
from xds.model.facts import ConnectionFacts

_Test = Callable[[ConnectionFacts], bool]


@dataclass(frozen=True, slots=True)
class Decision:
    """The verdict, and the name of the policy that decided. The name is empty if no policy matched."""

    allowed: bool
    policy: str = ""


#: The shape of a look-up: the type of the condition, the kind of comparison (for networks the IP version), and the
#: number of characters or bits that are compared.
_Shape = tuple[type[Any], str | int, int]

#: A value that a connection must have for a policy to match, and the shape of the look-up for this value.
_Need = tuple[_Shape, Hashable]


class _Prepared:
    """A policy prepared for evaluation.

    Attributes:
        needs: the policy can match only if the connection has one of these values. None means any connection.
    """

    __slots__ = ("_condition", "_test", "needs")

    def __init__(self, condition: p.Condition) -> None:
        self._condition = condition
        self._test: _Test | None = None
        self.needs = _needs(condition)

    def test(self, facts: ConnectionFacts) -> bool:
        """Return whether the policy's condition holds for a connection."""
        if self._test is None:
            self._test = compiled(self._condition)
        return self._test(facts)


class _Index:
    """The index of a tier: the positions of policies by the values that they require, and the positions of all
    others.
    """

    __slots__ = ("always", "by_shape", "prepared")

    def __init__(self, tier: p.Tier) -> None:
        self.prepared: list[_Prepared] = []
        self.by_shape: dict[_Shape, dict[Hashable, list[int]]] = {}
        self.always: list[int] = []
        by_shape = self.by_shape
        for place, policy in enumerate(tier.policies):
            prepared = policy.prepared
            if not isinstance(prepared, _Prepared):
                prepared = _Prepared(policy.condition)
                object.__setattr__(policy, "prepared", prepared)  # a cache in a frozen value
            self.prepared.append(prepared)
            if prepared.needs is None:
                self.always.append(place)
                continue
            for shape, value in prepared.needs:
                places = by_shape.get(shape)
                if places is None:
                    places = by_shape[shape] = {}
                if value in places:
                    places[value].append(place)
                else:
                    places[value] = [place]

    def candidates(self, facts: ConnectionFacts) -> Iterable[int]:
        """Return the positions of the policies that can match a connection, in order."""
        found = [
            places[value]
            for shape, places in self.by_shape.items()
            for value in _values(shape, facts)
            if value in places
        ]
        if not found:
            return self.always
        return sorted({*self.always}.union(*found))


def judge(rules: p.PolicyList, facts: ConnectionFacts) -> Decision:
    """Return the decision of one policy list about a connection.

    Tiers are evaluated in order. Inside a tier the first policy whose condition holds decides; if there is none,
    the tier's default does. ``PASS`` continues with the next tier. After the last tier, the list's end verdict
    decides.
    """
    for tier in rules.tiers:
        index = tier.prepared
        if not isinstance(index, _Index):
            index = _Index(tier)
            object.__setattr__(tier, "prepared", index)
        verdict, name = tier.default, ""
        for place in index.candidates(facts):
            if index.prepared[place].test(facts):
                policy = tier.policies[place]
                verdict, name = policy.verdict, policy.name
                break
        if verdict is not p.Verdict.PASS:
            return Decision(verdict is p.Verdict.ALLOW, name)
    return Decision(rules.end is p.Verdict.ALLOW)


def _values(shape: _Shape, facts: ConnectionFacts) -> Iterable[Hashable]:
    """Return the values of a connection for one kind of look-up."""
    kind, how, length = shape
    if kind is p.SourceIp or kind is p.DestinationIp:
        version, number = _number((facts.source if kind is p.SourceIp else facts.destination).host)
        return (number >> ((32 if version == 4 else 128) - length),) if version == how else ()
    if kind is p.DestinationPort:
        return (facts.destination.port,)
    peer = facts.peer
    identity = peer.identity if peer is not None else None
    if kind is p.PeerServiceAccount:
        return ((identity.namespace, identity.service_account),) if identity is not None else ()
    texts: tuple[str, ...]
    if kind is p.Authenticated:
        certificate = facts.certificate
        texts = certificate.principals if certificate is not None else ()
    elif kind is p.PeerPrincipal:
        texts = (peer.principal,) if peer is not None and identity is not None else ()
    else:
        texts = (identity.namespace if identity is not None else "",)
    if how == "prefix":
        return [text[:length] for text in texts]
    return [text[-length:] for text in texts] if how == "suffix" else texts


def _needs(condition: p.Condition) -> list[_Need] | None:
    """Return values such that only connections with one of these values can satisfy a condition. ``None`` means
    any connection.
    """
    reader = _NEEDS.get(type(condition))
    return reader(condition) if reader is not None else None


def _needs_of_any(condition: p.AnyOf) -> list[_Need] | None:
    needs: list[_Need] = []
    for inner in condition.conditions:
        some = _needs(inner)
        if some is None:
            return None
        needs += some
    return needs


def _needs_of_all(condition: p.AllOf) -> list[_Need] | None:
    known = [some for some in map(_needs, condition.conditions) if some is not None]
    return min(known, key=len, default=None)


def _needs_of_name(condition: p.Authenticated | p.PeerPrincipal | p.PeerNamespace) -> list[_Need] | None:
    match = condition.name if isinstance(condition, p.Authenticated) else condition.match
    # An empty prefix or suffix matches every text, and ``text[-0:]`` would be the whole text.
    if match is None or match.ignore_case or not (match.value or match.kind == "exact"):
        return None
    if match.kind not in ("exact", "prefix", "suffix"):
        return None
    length = 0 if match.kind == "exact" else len(match.value)
    return [((type(condition), match.kind, length), match.value)]


def _needs_of_network(condition: p.SourceIp | p.DestinationIp) -> list[_Need] | None:
    if isinstance(condition, p.SourceIp) and condition.direct:
        return None
    network = condition.network
    value = int(network.network_address) >> (network.max_prefixlen - network.prefixlen)
    return [((type(condition), network.version, network.prefixlen), value)]


def _needs_of_port(condition: p.DestinationPort) -> list[_Need] | None:
    if condition.end != condition.start + 1:
        return None
    return [((p.DestinationPort, "", 0), condition.start)]


def _needs_of_account(condition: p.PeerServiceAccount) -> list[_Need]:
    value = (condition.namespace, condition.service_account)
    return [((p.PeerServiceAccount, "", 0), value)]


#: A table by type instead of a ``match`` statement, for speed: the look-up runs for every part of every policy
#: when a mesh's policies arrive.
_NEEDS: Mapping[type[Any], Callable[[Any], list[_Need] | None]] = {
    p.Never: lambda _: [],
    p.AnyOf: _needs_of_any,
    p.AllOf: _needs_of_all,
    p.Authenticated: _needs_of_name,
    p.PeerPrincipal: _needs_of_name,
    p.PeerNamespace: _needs_of_name,
    p.PeerServiceAccount: _needs_of_account,
    p.SourceIp: _needs_of_network,
    p.DestinationIp: _needs_of_network,
    p.DestinationPort: _needs_of_port,
}


def reads_port(rules: p.PolicyList) -> bool:
    """Return whether any policy of a list depends on the destination port."""
    return any(_reads_port(policy.condition) for tier in rules.tiers for policy in tier.policies)


def _reads_port(condition: p.Condition) -> bool:
    match condition:
        case p.AllOf(conditions) | p.AnyOf(conditions):
            return any(_reads_port(inner) for inner in conditions)
        case p.Not(inner):
            return _reads_port(inner)
        case p.Expression():
            return not {"destination.port", "destination.address"}.isdisjoint(condition.read)
        case _:
            return isinstance(condition, p.DestinationPort)


def holds(condition: p.Condition, facts: ConnectionFacts) -> bool:
    """Return whether a condition is true of a connection. This is the reference for :func:`compiled`."""
    match condition:
        case p.Always():
            return True
        case p.Never():
            return False
        case p.AllOf():
            return all(holds(inner, facts) for inner in condition.conditions)
        case p.AnyOf():
            return any(holds(inner, facts) for inner in condition.conditions)
        case p.Not():
            return not holds(condition.condition, facts)
        case p.Authenticated(name=name):
            certificate = facts.certificate
            if certificate is None:
                return False
            return name is None or any(name.matches(text) for text in certificate.principals)
        case p.PeerPrincipal(match=match):
            if facts.peer is None or facts.peer.identity is None:
                return False
            return match is None or match.matches(facts.peer.principal)
        case p.PeerNamespace(match=match):
            identity = facts.peer.identity if facts.peer is not None else None
            if match is None:
                return identity is not None
            return match.matches(identity.namespace if identity is not None else "")
        case p.PeerServiceAccount(namespace=namespace, service_account=service_account):
            identity = facts.peer.identity if facts.peer is not None else None
            return identity is not None and (identity.namespace, identity.service_account) == (
                namespace,
                service_account,
            )
        case p.SourceIp(network=network, direct=direct):
            source = facts.direct_source if direct else facts.source
            return ipaddress.ip_address(source.host) in network
        case p.DestinationIp(network=network):
            return ipaddress.ip_address(facts.destination.host) in network
        case p.DestinationPort(start=start, end=end):
            return start <= facts.destination.port < end
        case p.ServerName(match=match):
            return match.matches(facts.server_name)
        case p.DynamicMetadata(namespace=namespace, path=path, match=match):
            value: object = facts.metadata.get(namespace)
            for step in path:
                value = value.get(step) if isinstance(value, Mapping) else None
            return isinstance(value, str) and match.matches(value)
        case p.Expression(evaluate=evaluate):
            return evaluate(attributes(facts))
        case _:
            assert_never(condition)


def attributes(facts: ConnectionFacts) -> p.Attributes:
    """Return the connection's attributes for CEL expressions. Missing attributes are absent, like in Envoy."""
    connection: dict[str, str | int | bool] = {
        "mtls": facts.peer is not None,
        "requested_server_name": facts.server_name,
    }
    certificate = facts.certificate
    if certificate is not None:
        if certificate.uri_sans:
            connection["uri_san_peer_certificate"] = certificate.uri_sans[0]
        if certificate.dns_sans:
            connection["dns_san_peer_certificate"] = certificate.dns_sans[0]
        connection["subject_peer_certificate"] = certificate.subject  # empty if the certificate has no subject
    return {
        "source": {"address": str(facts.source), "port": facts.source.port},
        "destination": {"address": str(facts.destination), "port": facts.destination.port},
        "connection": connection,
    }


def compiled(condition: p.Condition) -> _Test:
    """Return a function for one condition. It returns the result of :func:`holds`."""
    match condition:
        case p.Always():
            return lambda facts: True
        case p.Never():
            return lambda facts: False
        case p.AllOf(conditions):
            return _all_of([compiled(inner) for inner in conditions])
        case p.AnyOf(conditions):
            return _any_of([compiled(inner) for inner in conditions])
        case p.Not(inner):
            test = compiled(inner)
            return lambda facts: not test(facts)
        case p.PeerPrincipal(match):
            if match is None:
                return lambda facts: facts.peer is not None and facts.peer.identity is not None
            matches = match.matches
            # The principal of a connection without an identity is the empty string. It can match, because a suffix
            # can be empty.
            return lambda facts: (
                facts.peer is not None and (principal := facts.peer.principal) != "" and matches(principal)
            )
        case p.SourceIp(network, direct):
            contains = _contains(network)
            if direct:
                return lambda facts: contains(facts.direct_source.host)
            return lambda facts: contains(facts.source.host)
        case p.DestinationIp(network):
            contains = _contains(network)
            return lambda facts: contains(facts.destination.host)
        case p.DestinationPort(start, end):
            return lambda facts: start <= facts.destination.port < end
        case _:
            return lambda facts: holds(condition, facts)


def _all_of(tests: list[_Test]) -> _Test:
    if len(tests) == 1:
        return tests[0]
    if len(tests) == 2:
        first, second = tests
        return lambda facts: first(facts) and second(facts)

    def all_of(facts: ConnectionFacts) -> bool:
        for test in tests:  # noqa: SIM110 - a generator would cost more than most tests
            if not test(facts):
                return False
        return True

    return all_of


def _any_of(tests: list[_Test]) -> _Test:
    if len(tests) == 1:
        return tests[0]
    if len(tests) == 2:
        first, second = tests
        return lambda facts: first(facts) or second(facts)

    def any_of(facts: ConnectionFacts) -> bool:
        for test in tests:  # noqa: SIM110 - as above
            if test(facts):
                return True
        return False

    return any_of


def _contains(network: IpNetwork) -> Callable[[str], bool]:
    """Return a test whether an address, given as text, is in a network. It is 20 times as fast as
    :mod:`ipaddress`.
    """
    version, start, mask = network.version, int(network.network_address), int(network.netmask)

    def contains(host: str) -> bool:
        address = _number(host)
        return address[0] == version and address[1] & mask == start

    return contains


# The two addresses of a connection are parsed once for all policies.
@lru_cache(maxsize=16384)
def _number(host: str) -> tuple[int, int]:
    address = ipaddress.ip_address(host)
    return address.version, int(address)
