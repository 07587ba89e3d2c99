"""Evaluates flows by a store's policies. For speed, rules are compiled when they arrive, and indexed by the values
that they require.

The answers are the same as from :mod:`ztunnel.policy.calico.walk`, which reads every rule; tests compare the two.
Even with 20,000 rules, it only reads those whose rarest clause the flow could satisfy (an IP set that contains its
address, a network, a service account, a port), in the order of tiers, policies and rules. An answer that did not
depend on HTTP is cached for connections with the same ends, until the next change.

It is not thread-safe. Code in asyncio needs no lock, because neither updating nor evaluating awaits.
"""

from bisect import bisect_left, insort
from collections.abc import Hashable, Iterable, Iterator
from operator import attrgetter
from typing import Final, TypeAlias
from weakref import WeakValueDictionary

from xds.model import calico as c
from ztunnel.policy.calico.clauses import Check, all_hold, connection_clauses, http_clause, unseen_http_clause
from ztunnel.policy.calico.ip_sets import address_number
from ztunnel.policy.calico.store import Store
from ztunnel.policy.calico.verdict import (
    PROFILE_TIER,
    Code,
    Facts,
    RuleRef,
    Undecidable,
    Verdict,
    identity_of,
    with_unseen,
)

#: The most cached answers of all endpoints together. Above it all are dropped. One answer takes half a kilobyte.
CACHED_VERDICTS: Final = 65_536
#: Answers are cached up to this total length of both principals. Real principals have less than a hundred
#: characters, but a client of a policy server can send any text.
_CACHED_CHARACTERS: Final = 512

#: A value that a rule requires of a flow, and the kind of look-up for this value.
_Need: TypeAlias = tuple[str, Hashable]

#: Stands for the network or port on a side of a flow that has no address.
_NO_ADDRESS: Final = "no address"

#: Longer port ranges are checked by comparison instead of being indexed port by port.
_PORTS_LISTED: Final = 16


class _Rule:
    """A compiled rule, with the position of its policy in the tier and its own in the policy."""

    __slots__ = ("action", "checks", "http", "index", "place", "policy")

    def __init__(
        self, policy: "_Policy", index: int, rule: c.Rule, namespace: str, tier: str, *, connections_only: bool
    ) -> None:
        self.policy = policy
        self.index = index
        self.action = rule.action
        clauses = connection_clauses(rule, namespace, connections_only=connections_only)
        self.checks: tuple[Check, ...] = tuple(clause.check for clause in clauses)
        self.http = (
            unseen_http_clause(rule, RuleRef(tier, policy.id, index)) if connections_only else http_clause(rule)
        )
        self.place = (policy.place, index)

    def matches(self, facts: Facts) -> bool:
        # The HTTP clause is checked last, because an answer that did not need it can be cached for other requests.
        return all_hold(self.checks, facts) and (self.http is None or self.http(facts))


class _Policy:
    """A policy in a tier. A policy that the store lacks has a single rule, which reports this."""

    __slots__ = ("id", "needs", "place", "rules", "staged")

    def __init__(self, policy_id: c.PolicyId, place: int, policy: c.Policy, tier: "_Tier") -> None:
        self.id = policy_id
        self.place = place
        self.staged = policy_id.kind in c.STAGED_KINDS
        self.rules: list[_Rule] = []
        self.needs: list[tuple[_Need, ...]] = []
        only = tier.connections_only
        for index, rule in enumerate(policy.rules(tier.direction)):
            if rule.action is not c.Action.LOG:  # a LOG rule does not decide
                self.rules.append(_Rule(self, index, rule, policy.namespace, tier.name, connections_only=only))
                self.needs.append(_needs(rule))


class _Missing(_Rule):
    """Takes the place of a policy that the store does not have. Reaching it raises an error."""

    __slots__ = ("tier",)

    def __init__(self, policy: _Policy, tier: str) -> None:
        self.policy = policy
        self.index = 0
        self.action = c.Action.DENY
        self.checks = ()
        self.http = None
        self.place = (policy.place, 0)
        self.tier = tier

    def matches(self, facts: Facts) -> bool:
        raise Undecidable(Code.INTERNAL, f"policy {self.policy.id} of tier {self.tier} is not in the store")


_place = attrgetter("place")


class _Tier:
    """The rules of one tier in one direction, indexed by the values that they require. Endpoints with the same
    policies share this object.
    """

    def __init__(
        self,
        name: str,
        policies: tuple[c.PolicyId, ...],
        passes: bool,
        direction: c.Direction,
        *,
        connections_only: bool,
    ) -> None:
        self.name = name
        self.connections_only = connections_only
        self.policies = policies
        self.passes = passes
        self.direction = direction
        self.first = {
            enforced: next((p for p in policies if not enforced or p.kind not in c.STAGED_KINDS), None)
            for enforced in (True, False)
        }
        self.reads_source_port = False
        # If a policy is listed twice in the tier, its first position counts.
        self.places = {policy: place for place, policy in reversed(list(enumerate(policies)))}
        self._compiled: dict[c.PolicyId, _Policy] = {}
        self._always: list[_Rule] = []
        self._by_need: dict[str, dict[Hashable, list[_Rule]]] = {}
        #: How many networks of each prefix length are in use, by kind of look-up.
        self._lengths: dict[str, dict[tuple[int, int], int]] = {}

    def put(self, policy_id: c.PolicyId, policy: c.Policy | None) -> None:
        """Recompile a policy of this tier. None means that the store does not have the policy."""
        old = self._compiled.pop(policy_id, None)
        if old is not None:
            for rule, needs in zip(old.rules, old.needs, strict=True):
                self._remove(rule, needs)
        new = _Policy(policy_id, self.places[policy_id], policy or c.Policy(), self)
        if policy is None:
            new.rules.append(_Missing(new, self.name))
            new.needs.append(())
        elif any(_reads_port(rule.source) for rule in policy.rules(self.direction)):
            self.reads_source_port = True
        self._compiled[policy_id] = new
        for rule, needs in zip(new.rules, new.needs, strict=True):
            self._add(rule, needs)

    def decide(self, facts: Facts, *, enforced: bool) -> _Rule | None:
        """Return the first rule that matches, or None.

        Args:
            enforced: whether to leave out staged policies.

        Raises:
            Undecidable: a rule was reached that cannot be evaluated.
        """
        for rule in self._candidates(facts):
            if (not enforced or not rule.policy.staged) and rule.matches(facts):
                return rule
        return None

    def _candidates(self, facts: Facts) -> Iterable[_Rule]:
        found: list[_Rule] = []
        for kind, table in self._by_need.items():
            for value in self._values(kind, facts):
                rules = table.get(value)
                if rules is not None:
                    found += rules
        if not found:
            return self._always
        # If a rule lists two networks that contain the address, it is found twice. The second match has no effect.
        found += self._always
        found.sort(key=_place)
        return found

    def _values(self, kind: str, facts: Facts) -> Iterable[Hashable]:
        """Return the values of a flow that are looked up in the index ``kind``."""
        side, _, what = kind.partition(".")
        if side == "protocol":
            return (facts.protocol,)
        peer = facts.source if side == "source" else facts.destination
        if what == "set":
            return peer.sets
        if what == "port_set":
            return peer.port_sets
        if what == "account":
            return (peer.identity.account,)
        if what == "port":
            return (peer.port,) if peer.address is not None or peer.port else (peer.port, _NO_ADDRESS)
        return self._prefixes(kind, peer.address)

    def _prefixes(self, kind: str, address: str | None) -> Iterator[Hashable]:
        if address is None:
            yield _NO_ADDRESS
            return
        version, number = address_number(address)
        for found, length in self._lengths[kind]:
            if found == version:
                yield (version, length, number >> ((32 if version == 4 else 128) - length))

    def _add(self, rule: _Rule, needs: tuple[_Need, ...]) -> None:
        if not needs:
            insort(self._always, rule, key=_place)
        for kind, value in needs:
            self._by_need.setdefault(kind, {}).setdefault(value, []).append(rule)
            if isinstance(value, tuple):
                lengths = self._lengths.setdefault(kind, {})
                lengths[value[:2]] = lengths.get(value[:2], 0) + 1

    def _remove(self, rule: _Rule, needs: tuple[_Need, ...]) -> None:
        if not needs:
            del self._always[bisect_left(self._always, rule.place, key=_place)]
        for kind, value in needs:
            table = self._by_need[kind]
            table[value].remove(rule)
            if not table[value]:
                del table[value]
            if isinstance(value, tuple):
                lengths = self._lengths[kind]
                lengths[value[:2]] -= 1
                if not lengths[value[:2]]:
                    del lengths[value[:2]]


def _reads_port(peer: c.PeerMatch) -> bool:
    return bool(peer.ports or peer.not_ports or peer.named_ports or peer.not_named_ports)


def _needs(rule: c.Rule) -> tuple[_Need, ...]:
    """Return the values that a rule's rarest clause requires. Only a flow with one of these values can match; if
    there are none, any flow can match.

    Denying rules are not indexed by IP sets, because every flow must notice a missing set.
    An end without an address must reach rules that need its network or port.
    """
    unknown = _NO_ADDRESS if rule.action.may_deny else None
    sides = (("source", rule.source), ("destination", rule.destination))
    if not rule.action.may_deny:
        for side, peer in sides:
            if peer.ip_port_sets:
                return ((f"{side}.port_set", peer.ip_port_sets[0]),)
            if peer.ip_sets:
                return ((f"{side}.set", peer.ip_sets[0]),)
    for side, peer in sides:
        if peer.account_names:
            # A plaintext client has an empty account, and satisfies the clause.
            return tuple((f"{side}.account", name) for name in {*peer.account_names, ""})
    for side, peer in sides:
        if peer.nets and None not in peer.nets:
            networks = [
                (net.version, net.prefixlen, int(net.network_address) >> (net.max_prefixlen - net.prefixlen))
                for net in dict.fromkeys(peer.nets)
                if net is not None
            ]
            return tuple((f"{side}.net", value) for value in (*networks, unknown) if value is not None)
    for side, peer in reversed(sides):
        if (
            peer.ports
            and not peer.named_ports
            and sum(max(0, last - first + 1) for first, last in peer.ports) <= _PORTS_LISTED
        ):
            ports = {port for first, last in peer.ports for port in range(first, last + 1)}
            return tuple((f"{side}.port", value) for value in (*ports, unknown) if value is not None)
    if isinstance(rule.protocol, int):
        return (("protocol", rule.protocol),)
    if rule.protocol is not None:
        number = c.PROTOCOLS.get(rule.protocol.lower())
        return (("protocol", -1 if number is None else number),)
    return ()


class _Plan:
    """The rules for one endpoint and direction, and cached answers about its flows."""

    __slots__ = ("answers", "generation", "has_staged", "profiles", "reads_source_port", "tiers")

    def __init__(self, tiers: list[_Tier], profiles: _Tier | None) -> None:
        self.tiers = tiers
        self.profiles = profiles
        self.has_staged = any(policy.kind in c.STAGED_KINDS for tier in tiers for policy in tier.policies)
        self.answers: dict[Hashable, Verdict] = {}
        self.generation = -1
        self.reads_source_port = True


class Evaluator:
    """Evaluates flows by a store's policies, which it keeps compiled.

    Args:
        store: the store. From now on only :meth:`apply` may change it.
        trust_domains: the trust domains of accepted principals. Empty accepts all, like Calico.
        connections_only: whether no HTTP will be seen; see :mod:`ztunnel.policy.calico.clauses`.
    """

    def __init__(
        self, store: Store, trust_domains: frozenset[str] = frozenset(), *, connections_only: bool = False
    ) -> None:
        self.store = store
        self.connections_only = connections_only
        self._trust_domains = trust_domains
        # The dictionary is weak, because endpoints with the same policies share a tier. A tier is freed with the
        # last endpoint that uses it.
        self._tiers: WeakValueDictionary[Hashable, _Tier] = WeakValueDictionary()
        self._plans: dict[tuple[c.EndpointId, c.Direction], _Plan] = {}
        self._kept = 0

    def apply(self, update: c.Update) -> None:
        """Apply one update to the store, and compile what it changes."""
        self.store.apply(update)
        match update:
            case c.PolicyUpdate(id=policy_id, policy=policy):
                self._put(policy_id, policy)
            case c.ProfileUpdate(name=name, profile=profile):
                self._put(profile_id(name), profile)
            case c.EndpointUpdate(id=endpoint_id):
                for direction in c.Direction:
                    plan = self._plans.pop((endpoint_id, direction), None)
                    if plan is not None:
                        self._kept -= len(plan.answers)
            case _:
                pass

    def check(
        self,
        endpoint: c.EndpointId | None,
        flow: c.Flow,
        direction: c.Direction = c.Direction.INGRESS,
        *,
        enforced: bool = True,
    ) -> Verdict:
        """Return the answer about a flow to or from an endpoint.

        Args:
            endpoint: None if the caller could not find it, which denies.
            enforced: False also evaluates staged policies, as if they were enforced, to find their effect.
        """
        if not self.store.in_sync:
            return Verdict(Code.UNAVAILABLE, "no policy has been received yet")
        if endpoint is None or endpoint not in self.store.endpoints:
            return Verdict(Code.PERMISSION_DENIED, f"no policy is known for endpoint {endpoint or '(unknown)'}")
        trusted = self._trust_domains
        source = identity_of(flow.source_principal, trusted)
        destination = identity_of(flow.destination_principal, trusted)
        if source is None or destination is None:
            wrong = flow.source_principal if source is None else flow.destination_principal
            return Verdict(Code.PERMISSION_DENIED, f"not a principal of a trusted mesh: {wrong!r}")
        if not 0 < flow.protocol < 256:
            return Verdict(Code.PERMISSION_DENIED, f"no rule is about IP protocol {flow.protocol}")
        plan = self._plan(endpoint, direction)
        key = _cache_key(flow, plan, enforced=enforced)
        found = plan.answers.get(key) if key is not None else None
        if found is not None:
            return found
        facts = Facts(self.store, flow, source, destination)
        try:
            verdict = with_unseen(_evaluate(plan, facts, enforced=enforced), facts)
        except Undecidable as error:
            verdict = Verdict(error.code, str(error))
        if key is not None and not facts.read_http:
            if self._kept >= CACHED_VERDICTS:
                for each in self._plans.values():
                    each.answers.clear()
                self._kept = 0
            plan.answers[key] = verdict
            self._kept += 1
        return verdict

    def has_staged(self, endpoint: c.EndpointId, direction: c.Direction) -> bool:
        """Return whether an endpoint of the store has staged policies in a direction."""
        return self._plan(endpoint, direction).has_staged

    def reads_source_port(self, endpoint: c.EndpointId, direction: c.Direction) -> bool:
        """Return whether the evaluation for an endpoint can depend on the source's port."""
        return self._plan(endpoint, direction).reads_source_port

    def _put(self, policy_id: c.PolicyId, policy: c.Policy | None) -> None:
        for tier in list(self._tiers.values()):
            if policy_id in tier.places:
                tier.put(policy_id, policy)

    def _plan(self, endpoint_id: c.EndpointId, direction: c.Direction) -> _Plan:
        key = (endpoint_id, direction)
        plan = self._plans.get(key)
        if plan is None:
            endpoint = self.store.endpoints[endpoint_id]
            tiers = [
                self._tier(tier.name, policies, tier.passes, direction)
                for tier in endpoint.tiers
                if (policies := tier.policies(direction))
            ]
            profiles = tuple(map(profile_id, endpoint.profiles))
            last = self._tier(PROFILE_TIER, profiles, False, direction) if profiles else None
            plan = self._plans[key] = _Plan(tiers, last)
        if plan.generation != self.store.generation:
            plan.generation = self.store.generation
            self._kept -= len(plan.answers)
            plan.answers.clear()
            plan.reads_source_port = any(tier.reads_source_port for tier in (*plan.tiers, plan.profiles) if tier)
        return plan

    def _tier(self, name: str, policies: tuple[c.PolicyId, ...], passes: bool, direction: c.Direction) -> _Tier:
        key = (name, policies, passes, direction)
        tier = self._tiers.get(key)
        if tier is None:
            tier = self._tiers[key] = _Tier(*key, connections_only=self.connections_only)
            find = self._find
            for policy_id in dict.fromkeys(policies):
                tier.put(policy_id, find(policy_id))
        return tier

    def _find(self, policy_id: c.PolicyId) -> c.Policy | None:
        if policy_id.kind == _PROFILE_KIND:
            return self.store.profiles.get(policy_id.name)
        return self.store.policies.get(policy_id)


_PROFILE_KIND: Final = "Profile"


def profile_id(name: str) -> c.PolicyId:
    """Return the policy id that stands for a profile in reports of decisions."""
    return c.PolicyId(_PROFILE_KIND, "", name)


def _evaluate(plan: _Plan, facts: Facts, *, enforced: bool) -> Verdict:
    for tier in plan.tiers:
        first = tier.first[enforced]
        if first is None:  # only staged policies: the tier decides nothing, not even at its end
            continue
        rule = tier.decide(facts, enforced=enforced)
        if rule is None:
            if tier.passes:
                continue
            return denied(RuleRef(tier.name, first, -1))
        if rule.action is c.Action.PASS:
            continue
        return decided(RuleRef(tier.name, rule.policy.id, rule.index), rule.action)
    if plan.profiles is None:
        return denied(RuleRef(PROFILE_TIER, None, -1))
    rule = plan.profiles.decide(facts, enforced=enforced)
    if rule is None:
        return denied(RuleRef(PROFILE_TIER, plan.profiles.policies[0], -1))
    return decided(RuleRef(PROFILE_TIER, rule.policy.id, rule.index), rule.action)


def decided(place: RuleRef, action: c.Action) -> Verdict:
    """Return the verdict of a matching rule. A profile's rule with action Pass denies, because no step follows."""
    if action is c.Action.ALLOW:
        return Verdict(Code.OK, rule=place)
    if action is c.Action.UNKNOWN:
        return Verdict(Code.INVALID_ARGUMENT, f"{place} has an action or a clause that is not known", place)
    return denied(place)


def denied(place: RuleRef) -> Verdict:
    """Return the verdict of a rule, or of a tier's end, that denies."""
    return Verdict(Code.PERMISSION_DENIED, f"denied by {place}", place)


def _cache_key(flow: c.Flow, plan: _Plan, *, enforced: bool) -> Hashable:
    """Return the facts on which an answer without HTTP depends, as a key for the cache. None if they are too large
    for the cache.
    """
    if flow.source_labels or flow.destination_labels:
        return None
    if len(flow.source_principal) + len(flow.destination_principal) > _CACHED_CHARACTERS:
        return None
    return (
        enforced,
        flow.source_ip,
        flow.source_port if plan.reads_source_port else 0,
        flow.destination_ip,
        flow.destination_port,
        flow.protocol,
        flow.icmp,
        flow.source_principal,
        flow.destination_principal,
        flow.requests_left_to,
    )
