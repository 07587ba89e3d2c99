"""Builds a node's nftables table from compiled policies. Pure.

Each direction has a base chain at the forward hook, egress before ingress. An accept only ends the base chain that
it is in, so both must accept a connection. A map leads from a local pod's address to the chain of its tiers. Pods
without policies are not in the map. Pods with the same policies share that chain, and every policy has one chain
per direction, which all chains of tiers call. Rules with action Pass are in the tier's chain, because they leave
it. If each tier jumped to the next one, the kernel's limit on nested jumps would soon be exceeded (16,
NFT_JUMP_STACK_SIZE)::

    egress, ingress        established, neighbour discovery, the pod to itself; then the map
    pod-in-HASH            calls each tier, then the profiles
    tier-in-HASH           calls each policy of a tier, then the tier's end: drop, or back
    in-HASH                the rules of one policy
    s4-HASH, r4-HASH       addresses that a selector selects; r4 if networks are among them
    n4-HASH, p-HASH        networks without their exceptions, ports of a rule
    a4-HASH                addresses with protocol and port, of named ports and services
    not-as-written         comments about objects with faults, for operators; no packet gets there

Names contain hashes, and comments name what was hashed. A new or removed member only changes elements of sets.

The kernel cannot see some conditions (HTTP). An allowing rule with such a condition is left out, and any other
rule drops the packets matched by its other conditions. :attr:`Built.unseen` names both.
"""

import base64
import hashlib
import textwrap
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from ipaddress import IPv4Address, IPv6Address, summarize_address_range
from itertools import groupby, islice
from typing import Final, TypeAlias

from tproxy import expressions as e
from tproxy.expressions import Family, Phrase, Verdict, VerdictCode
from tproxy.resources import Chain, Element, Hook, HookPoint, Rule, Set, SetKey, Table
from xds.model import calico as c
from xds.model.address import IpNetwork
from ztunnel.policy.calico.compile import Compiled
from ztunnel.policy.calico.ip_sets import MalformedMember
from ztunnel.policy.netpol.intervals import Interval, merged, ranges_of, without
from ztunnel.policy.netpol.members import addresses_of, ports_of

TABLE: Final = "ztunnel-netpol"
#: The port of tunnels between pods of a mesh.
TUNNEL_PORT: Final = 15008
_MAX_COMMENT: Final = 120
#: The chain with the notes, their maximum number, and the prefix of a comment that continues the one before.
_NOTES: Final = "not-as-written"
_MAX_NOTES: Final = 100
_CONTINUED: Final = "... "
_WITH_PORTS: Final = (6, 17, 132, 136)  # TCP, UDP, SCTP, UDP-Lite
#: Protocols whose packets have a type and a code (ICMP).
_ICMP: Final = tuple(c.ICMP_PROTOCOLS.values())
_FAMILIES: Final = (Family.IPV4, Family.IPV6)
_VERSIONS: Final = {Family.IPV4: 4, Family.IPV6: 6}
_WAYS: Final = {c.Direction.INGRESS: "in", c.Direction.EGRESS: "out"}
_EGRESS_PRIORITY: Final = -2
_INGRESS_PRIORITY: Final = -1

IpAddress: TypeAlias = IPv4Address | IPv6Address


@dataclass(frozen=True, slots=True)
class Unseen:
    """A rule that the kernel cannot apply as it is written. ``index`` -1 stands for the whole policy."""

    policy: c.PolicyId
    direction: c.Direction
    index: int
    reason: str

    def __str__(self) -> str:
        rule = f" rule {self.index}" if self.index >= 0 else ""
        return f"{self.policy} {self.direction}{rule}: {self.reason}"


@dataclass(frozen=True, slots=True)
class Built:
    """A desired table, with data for metrics and messages about it.

    Attributes:
        owners: the policy and direction whose rules a chain has.
        passing: by its comment, the policy and direction of each passing rule, which is in the chain of its tier.
        policed: local pods whose traffic the table filters, by direction.
        unseen: rules that are stricter here than written.
    """

    table: Table
    owners: dict[str, tuple[c.PolicyId, c.Direction]]
    passing: dict[str, tuple[c.PolicyId, c.Direction]]
    policed: dict[c.Direction, frozenset[c.EndpointId]]
    unseen: tuple[Unseen, ...]


@dataclass(frozen=True, slots=True)
class _Policy:
    """The chains and rules of one policy in one direction.

    Attributes:
        source: the compiled policy, compared by identity.
        parts: chains of deciding rules, and between them the passing rules, which leave the tier's chain.
        shapes: the shapes of the IP sets that it names. The rules depend on these shapes.
        sets: the names of these sets in the table, and of the policy's own sets.
    """

    source: c.Policy
    shapes: tuple[tuple[str, object], ...]
    parts: tuple[Chain | Rule, ...]
    sets: tuple[Set, ...]
    named: frozenset[str]
    unseen: tuple[Unseen, ...]


@dataclass(frozen=True, slots=True)
class _IpSet:
    """The nftables sets that represent an IP set, by address family. If ``shape`` changes, rules must refer to
    different sets.
    """

    members: frozenset[str]
    sets: dict[Family, Set]
    shape: tuple[str, ...]
    broken: str = ""


@dataclass(slots=True)
class _Parts:
    """The chains, sets and maps of one table, collected from the node's pods."""

    chains: dict[str, Chain] = field(default_factory=dict)
    sets: dict[str, Set] = field(default_factory=dict)
    owners: dict[str, tuple[c.PolicyId, c.Direction]] = field(default_factory=dict)
    passing: dict[str, tuple[c.PolicyId, c.Direction]] = field(default_factory=dict)
    unseen: dict[Unseen, None] = field(default_factory=dict)
    #: The verdict of a map's element: it starts the evaluation of a pod's policies by tiers and profiles.
    starts: dict[object, Verdict] = field(default_factory=dict)


class TableBuilder:
    """Builds one node's table, and rebuilds it after every change. Unchanged parts are the same objects as before.

    Args:
        tunnels: whether tunnels to and from captured pods are let through, because the node's proxy filters their
            content.
        pod_cidrs: the node's ranges of pod addresses. If no pod is known for an address in them, its traffic is
            dropped, because the pod's policies might not be known yet.
    """

    def __init__(self, *, tunnels: bool = False, pod_cidrs: tuple[IpNetwork, ...] = ()) -> None:
        self._tunnels = tunnels
        self._pod_cidrs = pod_cidrs
        self._ip_sets: dict[str, _IpSet] = {}
        self._policies: dict[tuple[c.PolicyId, c.Direction], _Policy] = {}
        self._tier_chains: dict[str, Chain] = {}
        self._families: tuple[Family, ...] = ()

    def build(self, compiled: Compiled, node: str, notes: Iterable[str] = ()) -> Built:
        """Return the table for the pods of one node.

        Args:
            notes: texts for operators, which the table contains beside the rules; see :func:`notes_of`.
        """
        local = {key: compiled.endpoints[key] for key in sorted(local_endpoints(compiled, node), key=str)}
        versions = {net.version for endpoint in local.values() for net in endpoint.addresses}
        versions |= {network.version for network in self._pod_cidrs}
        families = tuple(family for family in _FAMILIES if _VERSIONS[family] in versions)
        if families != self._families:
            self._families = families
            self._policies.clear()
        parts = _Parts()
        heads: dict[c.Direction, dict[c.EndpointId, Verdict]] = {}
        for direction in (c.Direction.EGRESS, c.Direction.INGRESS):
            found = heads[direction] = {}
            for key, endpoint in local.items():
                verdict = self._start(compiled, endpoint, direction, parts)
                if verdict.code != VerdictCode.ACCEPT:
                    found[key] = verdict
        self._forget(compiled, parts)
        captured = {key for key in local if key in compiled.captured} if self._tunnels else set()
        sets = [*self._pod_sets(local, heads, captured), *parts.sets.values()]
        chains = [*self._base_chains(bool(captured)), *parts.chains.values(), *_noted(notes)]
        table = Table(TABLE, Family.INET, tuple(chains), tuple(sets))
        policed = {direction: frozenset(found) for direction, found in heads.items()}
        return Built(table, parts.owners, parts.passing, policed, tuple(parts.unseen))

    def _forget(self, compiled: Compiled, parts: _Parts) -> None:
        self._tier_chains = {name: chain for name, chain in self._tier_chains.items() if name in parts.chains}
        self._ip_sets = {key: value for key, value in self._ip_sets.items() if key in compiled.ip_sets}
        used = {*parts.owners.values(), *parts.passing.values()}
        self._policies = {key: value for key, value in self._policies.items() if key in used}

    # Pods

    def _pod_sets(
        self,
        local: dict[c.EndpointId, c.Endpoint],
        heads: dict[c.Direction, dict[c.EndpointId, Verdict]],
        captured: set[c.EndpointId],
    ) -> Iterator[Set]:
        policed = set().union(*heads.values())
        for family in self._families:
            version = _VERSIONS[family]
            key = SetKey.IPV4_ADDRESS if version == 4 else SetKey.IPV6_ADDRESS
            pair = SetKey.IPV4_PAIR if version == 4 else SetKey.IPV6_PAIR
            for direction, found in heads.items():
                elements = {
                    address: Element(address, comment(str(pod.workload)), verdict=verdict)
                    for pod, verdict in found.items()
                    for address in _packed(local[pod], version)
                }
                yield Set(f"{direction}{version}", key, frozenset(elements.values()), verdicts=True)
            ours = {address for pod in policed for address in _packed(local[pod], version)}
            yield Set(f"policed{version}", key, frozenset(map(Element, ours)))
            yield Set(f"self{version}", pair, frozenset(Element(address * 2) for address in ours))
            if self._pod_cidrs:
                yield Set(f"unknown{version}", key, frozenset(self._unknown(local, version)), interval=True)
            if captured:
                theirs = {address for pod in captured for address in _packed(local[pod], version)}
                yield Set(f"captured{version}", key, frozenset(map(Element, theirs)))

    def _unknown(self, local: dict[c.EndpointId, c.Endpoint], version: int) -> Iterator[Element]:
        taken = ranges_of((net for endpoint in local.values() for net in endpoint.addresses), version)
        octets = 4 if version == 4 else 16
        for first, last in without(ranges_of(self._pod_cidrs, version), taken):
            yield Element(first.to_bytes(octets, "big"), last=last.to_bytes(octets, "big"))

    def _base_chains(self, captured: bool) -> Iterator[Chain]:
        for direction, priority in (
            (c.Direction.EGRESS, _EGRESS_PRIORITY),
            (c.Direction.INGRESS, _INGRESS_PRIORITY),
        ):
            out = direction is c.Direction.EGRESS
            rules = [
                Rule((*e.connection_state(e.CT_ESTABLISHED | e.CT_RELATED), *e.accept()), "judged when it opened"),
            ]
            if Family.IPV6 in self._families:
                rules.append(Rule((*e.neighbour_discovery(), *e.accept()), "neighbour discovery"))
            for family in self._families:
                version = _VERSIONS[family]
                if self._pod_cidrs:
                    whose = e.address_in(family, f"unknown{version}", source=out)
                    rules.append(Rule((*whose, e.Counter(), *e.drop()), "no pod that is known"))
                itself = (*e.addresses_in(family, f"self{version}"), *e.accept())
                rules.append(Rule(itself, "a pod to itself"))
                if out:
                    # Drop a connection whose conntrack entry was deleted because it is no longer allowed. Its next
                    # packet, in either direction, would make conntrack track it as a new connection
                    # (nf_conntrack_tcp_loose).
                    for source in (True, False):
                        middle = (*e.connection_state(e.CT_NEW), *e.continues_unknown_connection())
                        whose = e.address_in(family, f"policed{version}", source=source)
                        text = "no connection that is known"
                        rules.append(Rule((*middle, *whose, e.Counter(), *e.drop()), text))
                if captured:
                    tunnels = (*e.destination_port(e.TCP, TUNNEL_PORT),)
                    whose = e.address_in(family, f"captured{version}", source=out)
                    rules.append(Rule((*tunnels, *whose, *e.accept()), "the proxy judges what is inside"))
            for family in self._families:
                lookup = e.verdict_by_address(family, f"{direction}{_VERSIONS[family]}", source=out)
                rules.append(Rule(lookup))
            hook = Hook(kind="filter", point=HookPoint.FORWARD, priority=priority)
            yield Chain(str(direction), tuple(rules), hook)

    # Tiers

    def _start(self, compiled: Compiled, endpoint: c.Endpoint, direction: c.Direction, parts: _Parts) -> Verdict:
        """Return the verdict that starts the evaluation of a pod's tiers, then of its profiles: a jump to a chain,
        or accept.
        """
        tiers = tuple(
            (tier.name, enforced, tier.passes)
            for tier in endpoint.tiers
            if (enforced := tuple(p for p in tier.policies(direction) if p.kind not in c.STAGED_KINDS))
        )
        key = (direction, tiers, endpoint.profiles)
        known = parts.starts.get(key)
        if known is not None:
            return known
        calls: list[Rule] = []
        goes_on = True
        for name, policies, passes in tiers:
            if goes_on:
                chain, goes_on = self._tier(compiled, name, policies, passes, direction, parts)
                calls.append(Rule(e.jump(chain.name), comment(f"tier {name}")))
        if goes_on:
            calls += self._profiles(compiled, endpoint.profiles, direction, parts)
        if len(calls) == 1 and calls[0].phrase == e.accept():
            verdict = parts.starts[key] = Verdict(VerdictCode.ACCEPT)
            return verdict
        chain = self._named("pod", direction, calls, parts)
        verdict = parts.starts[key] = Verdict(VerdictCode.GOTO, chain.name)
        return verdict

    def _tier(
        self,
        compiled: Compiled,
        name: str,
        policies: tuple[c.PolicyId, ...],
        passes: bool,
        direction: c.Direction,
        parts: _Parts,
    ) -> tuple[Chain, bool]:
        """Return the chain of a tier, and whether a packet can leave it without a decision."""
        found = {policy_id: compiled.policies.get(policy_id) for policy_id in policies}
        calls = [
            rule
            for policy_id, policy in found.items()
            for rule in self._calls(compiled, policy_id, policy, direction, parts)
        ]
        if not passes:
            calls.append(Rule((e.Counter(), *e.drop()), comment(f"end of tier {name}")))
        goes_on = passes or any(policy and _passes(policy.rules(direction)) for policy in found.values())
        return self._named("tier", direction, calls, parts), goes_on

    def _profiles(
        self, compiled: Compiled, profiles: tuple[str, ...], direction: c.Direction, parts: _Parts
    ) -> list[Rule]:
        calls: list[Rule] = []
        for name in profiles:
            profile = compiled.profiles.get(name)
            if profile is not None and not calls and _allows_all(profile.rules(direction)):
                return [Rule(e.accept(), comment(f"profile {name}"))]
            calls += self._calls(compiled, c.PolicyId("Profile", "", name), profile, direction, parts)
        return [*calls, Rule((e.Counter(), *e.drop()), "no profile allows it")]

    def _named(self, prefix: str, direction: c.Direction, calls: list[Rule], parts: _Parts) -> Chain:
        """Return the chain that consists of these rules.

        Its name is derived from the rules: pods with the same policies share the chain, and a change of policies
        creates another chain. The map's element or the calling rule then refers to the new chain.
        """
        name = f"{prefix}-{_WAYS[direction]}-{hashed(repr(calls))}"
        chain = parts.chains[name] = self._tier_chains.setdefault(name, Chain(name, tuple(calls)))
        return chain

    def _calls(
        self,
        compiled: Compiled,
        policy_id: c.PolicyId,
        policy: c.Policy | None,
        direction: c.Direction,
        parts: _Parts,
    ) -> list[Rule]:
        """Return the rules that evaluate a policy in a tier's chain or a pods' chain."""
        if policy is None:
            parts.unseen[
                Unseen(policy_id, direction, -1, "is missing, so everything that reaches it is dropped")
            ] = None
            return [Rule((e.Counter(), *e.drop()), comment(f"{policy_id} is missing"))]
        key = (policy_id, direction)
        known = self._policies.get(key)
        if known is None or known.source is not policy or known.shapes != self._shapes(compiled, known.shapes):
            known = self._policies[key] = self._policy(compiled, policy_id, policy, direction)
        calls: list[Rule] = []
        for part in known.parts:
            if isinstance(part, Rule):
                calls.append(part)
                parts.passing[part.comment] = key
            else:
                parts.chains[part.name] = part
                parts.owners[part.name] = key
                calls.append(Rule(e.jump(part.name), comment(str(policy_id))))
        parts.unseen.update(dict.fromkeys(known.unseen))
        for item in known.sets:
            parts.sets[item.name] = item
        for set_id, _ in known.shapes:
            for item in self._ip_set(compiled, set_id).sets.values():
                if item.name in known.named:
                    parts.sets[item.name] = item
        return calls

    def _shapes(self, compiled: Compiled, shapes: Iterable[tuple[str, object]]) -> tuple[tuple[str, object], ...]:
        return tuple((set_id, self._ip_set(compiled, set_id).shape) for set_id, _ in shapes)

    # Policies

    def _policy(
        self, compiled: Compiled, policy_id: c.PolicyId, policy: c.Policy, direction: c.Direction
    ) -> _Policy:
        compiler = _RuleCompiler(self._families, lambda set_id: self._ip_set(compiled, set_id))
        #: The parts of a policy: chains of deciding rules, and between them passing rules. The first part is
        #: always a chain.
        parts: list[list[Rule] | Rule] = [[]]
        unseen: list[Unseen] = []
        in_tier = policy_id.kind != "Profile"  # no tier follows the profiles
        for indexes, rule in _united(policy.rules(direction)):
            if rule.action is c.Action.LOG:
                continue
            compiler.reasons = []
            phrases = list(compiler.phrases(rule))
            reasons = dict.fromkeys(compiler.reasons)
            unseen += [Unseen(policy_id, direction, index, reason) for index in indexes for reason in reasons]
            if reasons and rule.action is c.Action.ALLOW:
                continue
            place = f"{indexes[0]}-{indexes[-1]}" if len(indexes) > 1 else f"{indexes[0]}"
            text = comment(f"{policy_id} {direction} {place}")
            if rule.action is c.Action.PASS and in_tier and not compiler.reasons:
                parts += [Rule((*phrase, e.Counter(), *e.return_()), text) for phrase in phrases]
                continue
            end = e.accept() if rule.action is c.Action.ALLOW else e.drop()
            last = parts[-1]
            if isinstance(last, Rule):
                parts.append(last := [])
            last += [Rule((*phrase, e.Counter(), *end), text) for phrase in phrases]
        shapes = tuple((set_id, self._ip_set(compiled, set_id).shape) for set_id in compiler.used)
        return _Policy(
            policy,
            shapes,
            tuple(_policy_parts(policy_id, direction, parts)),
            tuple(compiler.own.values()),
            frozenset(compiler.named),
            tuple(unseen),
        )

    def _ip_set(self, compiled: Compiled, set_id: str) -> _IpSet:
        found = compiled.ip_sets.get(set_id)
        if found is None:
            return _IpSet(frozenset(), {}, (), f"IP set {set_id} is missing")
        known = self._ip_sets.get(set_id)
        if known is None or known.members is not found[1]:
            known = self._ip_sets[set_id] = _made(set_id, *found, known)
        return known


def _policy_parts(
    policy_id: c.PolicyId, direction: c.Direction, parts: list[list[Rule] | Rule]
) -> Iterator[Chain | Rule]:
    """Yield the parts of a policy in order. Consecutive rules that allow or deny form a chain. A rule that passes
    to the next tier is a part by itself.
    """
    for index, part in enumerate(parts):
        if isinstance(part, Rule):
            yield part
        elif part or len(parts) == 1:
            place = f" {index}" if index else ""
            yield Chain(f"{_WAYS[direction]}-{hashed(f'{policy_id}{place}')}", tuple(part))


def _united(rules: Iterable[c.Rule]) -> Iterator[tuple[range, c.Rule]]:
    """Yield the rules with their indexes. Consecutive rules that differ only in their networks become a single
    rule. A policy can list thousands of networks, and the compiled policy has a rule for each network.
    """
    for alike, group in groupby(enumerate(rules), key=lambda pair: _without_networks(*pair)):
        found = list(group)
        first, rule = found[0]
        if len(found) == 1 or isinstance(alike, int):
            yield range(first, first + 1), rule
            continue
        side, rest = alike
        peers: list[c.PeerMatch] = [getattr(each, side) for _, each in found]
        networks = tuple(network for version in _VERSIONS.values() for network in _networks_of(peers, version))
        if networks:  # otherwise no address is left, and the rules match no packet
            yield range(first, first + len(found)), _with_networks(rest, side, networks)


def _without_networks(index: int, rule: c.Rule) -> tuple[str, c.Rule] | int:
    """Return a side of a rule that lists networks, and the rule without them. The rule's index if there is no such
    side, or if the rule must stay separate.
    """
    if rule.action in (c.Action.ALLOW, c.Action.DENY):
        for side, peer in (("source", rule.source), ("destination", rule.destination)):
            if peer.nets and None not in (*peer.nets, *peer.not_nets):
                return side, _with_networks(rule, side, ())
    return index


def _with_networks(rule: c.Rule, side: str, networks: tuple[IpNetwork, ...]) -> c.Rule:
    if side == "source":
        return replace(rule, source=replace(rule.source, nets=networks, not_nets=()))
    return replace(rule, destination=replace(rule.destination, nets=networks, not_nets=()))


def _networks_of(peers: Iterable[c.PeerMatch], version: int) -> Iterator[IpNetwork]:
    """Yield the networks of one IP version that at least one of the peers matches."""
    address: Callable[[int], IpAddress] = IPv4Address if version == 4 else IPv6Address
    for first, last in merged(
        interval
        for peer in peers
        for interval in without(
            ranges_of(filter(None, peer.nets), version), ranges_of(filter(None, peer.not_nets), version)
        )
    ):
        yield from summarize_address_range(address(first), address(last))


def _made(set_id: str, kind: c.IpSetType, members: frozenset[str], before: _IpSet | None) -> _IpSet:
    name = hashed(set_id)
    sets: dict[Family, Set] = {}
    try:
        for family in _FAMILIES:
            version = _VERSIONS[family]
            if kind is c.IpSetType.IP_AND_PORT:
                key = SetKey.IPV4_PORT if version == 4 else SetKey.IPV6_PORT
                sets[family] = Set(f"a{version}-{name}", key, ports_of(members, version))
                continue
            key = SetKey.IPV4_ADDRESS if version == 4 else SetKey.IPV6_ADDRESS
            elements, interval = addresses_of(members, version)
            sets[family] = Set(f"{'r' if interval else 's'}{version}-{name}", key, elements, interval)
    except MalformedMember as error:
        return _IpSet(members, {}, (), f"IP set {set_id} has a member that cannot be read: {error}")
    if before is not None:
        # If a set's members are unchanged, the old object is kept, so that comparing tables is cheap.
        sets = {
            family: before.sets[family] if before.sets.get(family) == new else new for family, new in sets.items()
        }
    return _IpSet(members, sets, tuple(item.name for item in sets.values()))


class _RuleCompiler:
    """Compiles rules of one policy to expressions.

    Attributes:
        used: ids of the IP sets that the rules name.
        named: the names of these sets in the table.
        own: sets of networks and ports that the rules need.
        reasons: the parts of the last compiled rule that the kernel cannot see, as texts with reasons.
    """

    def __init__(self, families: tuple[Family, ...], ip_set: Callable[[str], _IpSet]) -> None:
        self._all_families = families
        self._ip_set = ip_set
        self.used: dict[str, None] = {}
        self.named: set[str] = set()
        self.own: dict[str, Set] = {}
        self.reasons: list[str] = []

    def phrases(self, rule: c.Rule) -> Iterator[Phrase]:
        """Yield nftables expressions for a rule. If the rule matches a packet, at least one does, as far as the
        kernel can see.
        """
        if rule.http.methods or rule.http.paths:
            self.reasons.append("the kernel sees no HTTP")
        for side, peer in (("source", rule.source), ("destination", rule.destination)):
            selected = peer.ip_sets or peer.named_ports or peer.ip_port_sets
            if (peer.account_names or peer.account_selector) and not selected:
                self.reasons.append(f"the kernel sees no service accounts ({side})")
            if None in peer.nets or None in peer.not_nets:
                self.reasons.append(f"a network of the {side} cannot be read")
        for protocol in self._protocols(rule):
            for family in self._families(rule):
                yield from self._with(rule, protocol, family)

    def _protocols(self, rule: c.Rule) -> Iterator[tuple[Phrase, bool]]:
        """Yield tests of the protocol, and with each whether the protocols that it matches have ports."""
        excluded = _number(rule.not_protocol)
        unless = e.protocol_is(excluded, negate=True) if excluded is not None else ()
        number = _number(rule.protocol)
        if rule.protocol is not None:
            numbers: tuple[int, ...] = (number,) if number is not None else ()
        elif rule.icmp is not None:
            numbers = _ICMP
        else:
            yield from self._any_protocol(rule, excluded, unless)
            return
        for each in numbers:
            if each == excluded or (rule.icmp is not None and each not in _ICMP):
                continue
            test = e.protocol_is(each)
            if each in _ICMP:
                for match, negate in ((rule.icmp, False), (rule.not_icmp, True)):
                    if match is not None:
                        test += e.icmp_is(match.type, match.code, negate=negate)
            yield test, each in _WITH_PORTS

    def _any_protocol(self, rule: c.Rule, excluded: int | None, unless: Phrase) -> Iterator[tuple[Phrase, bool]]:
        ported = any(peer.ports or peer.not_ports for peer in (rule.source, rule.destination))
        apart = [*(_WITH_PORTS if ported else ()), *(_ICMP if rule.not_icmp is not None else ())]
        for number in apart:
            if number == excluded:
                continue
            test = e.protocol_is(number)
            if number in _ICMP and rule.not_icmp is not None:
                test += e.icmp_is(rule.not_icmp.type, rule.not_icmp.code, negate=True)
            yield test, number in _WITH_PORTS
        others = [word for number in apart for word in e.protocol_is(number, negate=True)]
        yield (*others, *unless), not ported

    def _families(self, rule: c.Rule) -> Iterator[Family | None]:
        addressed = any(
            peer.nets or peer.not_nets or peer.ip_sets or peer.not_ip_sets
            or peer.named_ports or peer.not_named_ports or peer.ip_port_sets
            for peer in (rule.source, rule.destination)
        )  # fmt: skip
        if not rule.ip_version and not addressed:
            yield None
            return
        yield from (family for family in self._all_families if rule.ip_version in (0, _VERSIONS[family]))

    def _with(self, rule: c.Rule, protocol: tuple[Phrase, bool], family: Family | None) -> Iterator[Phrase]:
        test, ported = protocol
        start = (*(e.family_is(family) if family is not None else ()), *test)
        choices: list[Phrase] = [()]
        for peer, source in ((rule.source, True), (rule.destination, False)):
            addresses = self._addresses(peer, family, source=source)
            if addresses is None:
                return
            ports = list(self._ports(peer, family, source=source, ported=ported))
            choices = [(*before, *choice, *addresses) for before in choices for choice in ports]
        for choice in choices:
            yield _tidy((*start, *choice))

    def _ports(self, peer: c.PeerMatch, family: Family | None, *, source: bool, ported: bool) -> Iterator[Phrase]:
        """Yield alternative expressions for the rule's clauses about ports."""
        offset = 0 if source else 2
        common: list[Phrase] = []
        if peer.not_ports and ported:
            common.append(e.port_in(offset, self._port_set(peer.not_ports), negate=True))
        if family is not None:
            for negate, ids in ((True, peer.not_named_ports), (False, peer.ip_port_sets)):
                common += [
                    e.address_and_port_in(family, name, source=source, negate=negate)
                    for name in self._names(ids, family)
                ]
        rest = tuple(word for phrase in common for word in phrase)
        if not peer.ports and not peer.named_ports:
            yield rest
            return
        named = list(self._names(peer.named_ports, family)) if family is not None else []
        if family is not None and len(named) < len(peer.named_ports):
            # A named-port set is missing or unreadable, which has been recorded. An allowing rule is left out, and
            # any other rule drops packets to all ports.
            if ported:
                yield rest
            return
        if peer.ports and ported:
            if len(peer.ports) == 1:
                yield (*e.ports_between(offset, *peer.ports[0]), *rest)
            else:
                yield (*e.port_in(offset, self._port_set(peer.ports)), *rest)
        if family is not None:
            for name in named:
                yield (*e.address_and_port_in(family, name, source=source), *rest)

    def _addresses(self, peer: c.PeerMatch, family: Family | None, *, source: bool) -> Phrase | None:
        """Return the address conditions for one side of a rule. None if no address of this family can match."""
        if family is None:
            return ()
        version = _VERSIONS[family]
        found: list[Phrase] = []
        holes = [] if None in peer.not_nets else ranges_of(filter(None, peer.not_nets), version)
        # A text that is not a network has already been recorded. An allowing rule is then left out, and any other
        # rule drops all packets that the text could have matched.
        if peer.nets and None not in peer.nets:
            left = list(without(ranges_of(filter(None, peer.nets), version), holes))
            if not left:
                return None
            found.append(e.address_in(family, self._net_set(left, family), source=source))
        elif holes:
            found.append(e.address_in(family, self._net_set(holes, family), source=source, negate=True))
        for negate, ids in ((False, peer.ip_sets), (True, peer.not_ip_sets)):
            found += [
                e.address_in(family, name, source=source, negate=negate) for name in self._names(ids, family)
            ]
        return tuple(word for phrase in found for word in phrase)

    def _names(self, ids: Iterable[str], family: Family) -> Iterator[str]:
        """Yield the names of IP sets in the table, and record missing sets."""
        for set_id in ids:
            self.used[set_id] = None
            found = self._ip_set(set_id)
            if found.broken:
                self.reasons.append(found.broken)
                continue
            self.named.add(found.sets[family].name)
            yield found.sets[family].name

    def _net_set(self, intervals: list[Interval], family: Family) -> str:
        octets = 4 if family is Family.IPV4 else 16
        elements = frozenset(
            Element(first.to_bytes(octets, "big"), last=last.to_bytes(octets, "big")) for first, last in intervals
        )
        name = f"n{_VERSIONS[family]}-{hashed(repr(intervals))}"
        key = SetKey.IPV4_ADDRESS if family is Family.IPV4 else SetKey.IPV6_ADDRESS
        self.own.setdefault(name, Set(name, key, elements, interval=True))
        return name

    def _port_set(self, ranges: tuple[tuple[int, int], ...]) -> str:
        found = merged(ranges)
        elements = frozenset(
            Element(first.to_bytes(2, "big"), last=last.to_bytes(2, "big")) for first, last in found
        )
        name = f"p-{hashed(repr(found))}"
        self.own.setdefault(name, Set(name, SetKey.PORT, elements, interval=True))
        return name


def _tidy(phrase: Phrase) -> Phrase:
    """Return the expressions without repetitions of the first test of the address family."""
    words: list[e.Expression] = []
    seen: set[Phrase] = set()
    at = 0
    while at < len(phrase):
        pair = phrase[at : at + 2]
        if pair in _FAMILY_TESTS:
            if pair not in seen:
                words += pair
                seen.add(pair)
            at += 2
        else:
            words.append(phrase[at])
            at += 1
    return tuple(words)


_FAMILY_TESTS: Final = frozenset(e.family_is(family) for family in _FAMILIES)


def _number(protocol: int | str | None) -> int | None:
    if isinstance(protocol, str):
        return c.PROTOCOLS.get(protocol.lower())
    return protocol


def _passes(rules: Iterable[c.Rule]) -> bool:
    return any(rule.action is c.Action.PASS for rule in rules)


def _allows_all(rules: tuple[c.Rule, ...]) -> bool:
    return bool(rules) and rules[0] == c.Rule(c.Action.ALLOW)


def local_endpoints(compiled: Compiled, node: str) -> Iterator[c.EndpointId]:
    """Yield the pods of one node."""
    return (key for key, where in compiled.nodes.items() if where == node)


def _noted(notes: Iterable[str]) -> Iterator[Chain]:
    """Yield the chain whose comments are the notes. No packet ever gets there."""
    rules: list[Rule] = []
    for note in islice(notes, _MAX_NOTES):
        first, *rest = textwrap.wrap(comment(note, _MAX_COMMENT * 4), _MAX_COMMENT - len(_CONTINUED)) or [""]
        rules += [Rule(e.return_(), text) for text in (first, *(_CONTINUED + part for part in rest))]
    if rules:
        yield Chain(_NOTES, tuple(rules))


def notes_of(table: Table) -> list[str]:
    """Return the notes of a table, which name the objects that are not enforced as written."""
    found: list[str] = []
    for rule in (rule for chain in table.chains if chain.name == _NOTES for rule in chain.rules):
        if rule.comment.startswith(_CONTINUED) and found:
            found[-1] += " " + rule.comment.removeprefix(_CONTINUED)
        else:
            found.append(rule.comment)
    return found


def _packed(endpoint: c.Endpoint, version: int) -> Iterator[bytes]:
    return (net.network_address.packed for net in endpoint.addresses if net.version == version)


def hashed(text: str) -> str:
    """Return a hash of a text for names of chains and sets: 16 characters of base 32."""
    return base64.b32encode(hashlib.sha256(text.encode()).digest())[:16].decode().lower()


def comment(text: str, limit: int = _MAX_COMMENT) -> str:
    """Return a text as a comment. If it is too long, it is cut, and a hash is added."""
    # These characters are replaced, because nft prints comments in quotes and has no escapes.
    plain = text.replace('"', "'").encode("ascii", "replace").decode()
    return plain if len(plain) <= limit else f"{plain[: limit - 17]} {hashed(text)}"
