"""The judge: a connection's facts against policy lists. Pure, and the only place that decides.

:func:`holds` says what a condition means. :func:`judge` gives the same answers faster, in two steps that are made
when a policy is first needed and kept with it:

* A condition becomes a closure, so that nothing is looked at per connection but facts.
* A tier becomes an index. Most policies can only hold of a peer, namespace, address or port they name; those are
  looked up by what the connection has, and only the rest is tried one by one. Of 10,000 policies that name
  principals a connection tries none that does not concern it (``bench/scale_istio.py``).
"""

import ipaddress
from collections.abc import Callable, Hashable, Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import assert_never

from xds.model import policy as p
from xds.model.address import IpNetwork
from xds.model.facts import ConnectionFacts

_Test = Callable[[ConnectionFacts], bool]


@dataclass(frozen=True, slots=True)
class Decision:
    """The verdict and the name of the policy that decided; an empty name when none matched."""

    allowed: bool
    policy: str = ""


@dataclass(frozen=True, slots=True)
class _Prepared:
    """A policy made ready.

    Attributes:
        test: whether its condition holds.
        needs: it can only hold of a connection that has one of these (see :func:`_has`); None: of any.
    """

    test: _Test
    needs: frozenset[Hashable] | None


@dataclass(frozen=True, slots=True)
class _Index:
    """A tier made ready: places of policies, by what they need, and of those that may hold of anything."""

    tests: tuple[_Test, ...]
    by_need: Mapping[Hashable, tuple[int, ...]]
    always: tuple[int, ...]


def judge(rules: p.PolicyList, facts: ConnectionFacts) -> Decision:
    """Judge a connection by one list.

    Tiers are asked in order; inside a tier the first policy whose condition holds decides. ``PASS`` hands on
    to the next tier, the last one to the list's end verdict.
    """
    has: tuple[Hashable, ...] | None = None
    for tier in rules.tiers:
        index = tier.prepared
        if not isinstance(index, _Index):
            index = _index(tier)
            object.__setattr__(tier, "prepared", index)  # frozen for everybody else
        places = index.always
        if index.by_need:
            if has is None:
                has = _has(facts)
            found = [index.by_need[need] for need in has if need in index.by_need]
            if found:
                places = tuple(sorted({*places}.union(*found))) if places or len(found) > 1 else found[0]
        verdict, name = tier.default, ""
        for place in places:
            if index.tests[place](facts):
                policy = tier.policies[place]
                verdict, name = policy.verdict, policy.name
                break
        if verdict is not p.Verdict.PASS:
            return Decision(verdict is p.Verdict.ALLOW, name)
    return Decision(rules.end is p.Verdict.ALLOW)


def _index(tier: p.Tier) -> _Index:
    by_need: dict[Hashable, list[int]] = {}
    always: list[int] = []
    tests: list[_Test] = []
    for place, policy in enumerate(tier.policies):
        prepared = policy.prepared
        if not isinstance(prepared, _Prepared):
            prepared = _Prepared(compiled(policy.condition), _needs(policy.condition))
            object.__setattr__(policy, "prepared", prepared)
        tests.append(prepared.test)
        if prepared.needs is None:
            always.append(place)
        else:
            for need in prepared.needs:
                by_need.setdefault(need, []).append(place)
    return _Index(tuple(tests), {need: tuple(places) for need, places in by_need.items()}, tuple(always))


def _has(facts: ConnectionFacts) -> tuple[Hashable, ...]:
    """What a connection has that a policy may need."""
    has: list[Hashable] = [
        (p.SourceIp, facts.source.host),
        (p.DestinationIp, facts.destination.host),
        (p.DestinationPort, facts.destination.port),
    ]
    if facts.peer is None:
        return (*has, (p.PeerNamespace, ""))
    has.extend((p.Authenticated, name) for name in facts.peer.names)
    identity = facts.peer.identity
    if identity is None:
        return (*has, (p.PeerNamespace, ""))
    has.append((p.PeerPrincipal, facts.peer.principal))
    has.append((p.PeerNamespace, identity.namespace))
    has.append((p.PeerServiceAccount, identity.namespace, identity.service_account))
    return tuple(has)


def _needs(condition: p.Condition) -> frozenset[Hashable] | None:
    """What a connection must have one of for a condition to hold; None if that cannot be told."""
    match condition:
        case p.Never():
            return frozenset()
        case p.AnyOf(conditions):
            needs: set[Hashable] = set()
            for inner in conditions:
                some = _needs(inner)
                if some is None:
                    return None
                needs |= some
            return frozenset(needs)
        case p.AllOf(conditions):
            known = [some for some in map(_needs, conditions) if some is not None]
            return min(known, key=len, default=None)
        case p.Authenticated(match) | p.PeerPrincipal(match) | p.PeerNamespace(match):
            if match is None or match.kind != "exact" or match.ignore_case:
                return None
            return frozenset(((type(condition), match.value),))
        case p.PeerServiceAccount(namespace, service_account):
            return frozenset(((p.PeerServiceAccount, namespace, service_account),))
        case p.DestinationPort(start, end):
            return frozenset(((p.DestinationPort, start),)) if end == start + 1 else None
        case p.SourceIp(network, False) | p.DestinationIp(network):
            if network.num_addresses > 1:
                return None
            return frozenset(((type(condition), str(network.network_address)),))
        case _:
            return None


def judge_all(lists: Iterable[p.PolicyList], facts: ConnectionFacts) -> Decision:
    """Judge by several lists; all must allow, the first that does not is the answer."""
    decision = Decision(True)
    for rules in lists:
        decision = judge(rules, facts)
        if not decision.allowed:
            return decision
    return decision


def reads_port(rules: p.PolicyList) -> bool:
    """Whether any policy of a list depends on the destination port."""
    return any(_reads_port(policy.condition) for tier in rules.tiers for policy in tier.policies)


def _reads_port(condition: p.Condition) -> bool:
    match condition:
        case p.AllOf(conditions) | p.AnyOf(conditions):
            return any(_reads_port(inner) for inner in conditions)
        case p.Not(inner):
            return _reads_port(inner)
        case _:
            return isinstance(condition, p.DestinationPort)


def holds(condition: p.Condition, facts: ConnectionFacts) -> bool:
    """Whether a condition is true of the connection: the reference that :func:`compiled` must agree with."""
    match condition:
        case p.Always():
            return True
        case p.Never():
            return False
        case p.AllOf(conditions):
            return all(holds(inner, facts) for inner in conditions)
        case p.AnyOf(conditions):
            return any(holds(inner, facts) for inner in conditions)
        case p.Not(inner):
            return not holds(inner, facts)
        case p.Authenticated(name):
            if facts.peer is None:
                return False
            return name is None or any(name.matches(text) for text in facts.peer.names)
        case p.PeerPrincipal(match):
            if facts.peer is None or facts.peer.identity is None:
                return False
            return match is None or match.matches(facts.peer.principal)
        case p.PeerNamespace(match):
            identity = facts.peer.identity if facts.peer is not None else None
            if match is None:
                return identity is not None
            return match.matches(identity.namespace if identity is not None else "")
        case p.PeerServiceAccount(namespace, service_account):
            identity = facts.peer.identity if facts.peer is not None else None
            return identity is not None and (identity.namespace, identity.service_account) == (
                namespace,
                service_account,
            )
        case p.SourceIp(network, direct):
            source = facts.direct_source if direct else facts.source
            return ipaddress.ip_address(source.host) in network
        case p.DestinationIp(network):
            return ipaddress.ip_address(facts.destination.host) in network
        case p.DestinationPort(start, end):
            return start <= facts.destination.port < end
        case p.ServerName(match):
            return match.matches(facts.server_name)
        case p.DynamicMetadata(namespace, path, match):
            value: object = facts.metadata.get(namespace)
            for step in path:
                value = value.get(step) if isinstance(value, Mapping) else None
            return isinstance(value, str) and match.matches(value)
        case _:
            assert_never(condition)


def compiled(condition: p.Condition) -> _Test:
    """A function that answers as :func:`holds` would."""
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
            # Without an identity the principal is the empty string, which may match: a suffix may be empty.
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
    """Whether the text of an address is in a network, by integers: twenty times as fast as :mod:`ipaddress`."""
    version, start, mask = network.version, int(network.network_address), int(network.netmask)

    def contains(host: str) -> bool:
        address = _number(host)
        return address[0] == version and address[1] & mask == start

    return contains


# Every policy asks for the same two addresses of a connection.
@lru_cache(maxsize=16384)
def _number(host: str) -> tuple[int, int]:
    address = ipaddress.ip_address(host)
    return address.version, int(address)
