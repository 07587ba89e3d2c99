"""Compiles resources as they change. The work for a change is proportional to the affected resources. Pure.

The result equals that of :func:`~ztunnel.policy.calico.compile.compile_resources` after every change; property
tests compare the two. Selectors are found by labels. Each has an anchor: a label, with its value if it requires
one, which every selected object has. A pod is compared with the selectors whose anchors it has, and a selector
with the pods that have its anchor, so 5,000 policies and 10,000 pods do not need 50 million comparisons.
"""

from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, fields
from itertools import chain
from typing import Any, Final, TypeAlias

from xds.model import calico as c
from xds.model.selector import All, And, Compare, Has, In, Node, Or, Selector
from ztunnel.policy.calico.compile import (
    Compiled,
    IpAddress,
    PodKey,
    RuleCompiler,
    Selectable,
    account_profile,
    endpoint_id,
    host_selectable,
    named_port_id,
    named_port_members,
    namespace_labels,
    namespace_profile,
    network_selectable,
    node_selectable,
    node_set_id,
    own_labels,
    place_of,
    pod_selectable,
    policy_selector,
    port_protocol,
    profiles_of,
    service_id,
    service_members,
    with_addresses,
)
from ztunnel.policy.calico.resources import (
    BUILT_IN_TIERS,
    NAMESPACE_LABEL,
    ORCHESTRATOR_LABEL,
    ApiPolicy,
    ApiProfile,
    Pod,
    Resources,
)

#: A label and its value. None matches any value. A selector that requires no label has the empty anchor.
_Term: TypeAlias = tuple[str, str | None]
_ANY: Final[_Term] = ("", None)


@dataclass(slots=True)
class Delta:
    """The keys of the ``Compiled`` entries that changed or were removed."""

    ip_sets: set[str] = field(default_factory=set)
    policies: set[c.PolicyId] = field(default_factory=set)
    profiles: set[str] = field(default_factory=set)
    endpoints: set[c.EndpointId] = field(default_factory=set)
    accounts: set[tuple[str, str]] = field(default_factory=set)
    namespaces: set[str] = field(default_factory=set)

    def __bool__(self) -> bool:
        """Whether the delta has any entry."""
        return any(getattr(self, item.name) for item in fields(self))


class _Things:
    """All objects that selectors can select, by key and by label."""

    def __init__(self) -> None:
        self.all: dict[Hashable, Selectable] = {}
        self._by_term: dict[_Term, set[Hashable]] = {}

    def put(self, key: Hashable, thing: Selectable | None) -> None:
        before = self.all.pop(key, None)
        for term in _terms(before):
            found = self._by_term[term]
            found.discard(key)
            if not found:
                del self._by_term[term]
        if thing is not None:
            self.all[key] = thing
            for term in _terms(thing):
                self._by_term.setdefault(term, set()).add(key)

    def count(self, terms: Iterable[_Term]) -> int:
        return sum(len(self._by_term.get(term, ())) for term in terms)

    def having(self, terms: Iterable[_Term]) -> Iterator[Hashable]:
        return iter(set().union(*(self._by_term.get(term, ()) for term in terms)))


def _terms(thing: Selectable | None) -> Iterator[_Term]:
    if thing is not None:
        yield _ANY
        for label, value in thing.labels.items():
            if label:  # no selector can name an empty label, and its term would be _ANY
                yield label, value
                yield label, None


@dataclass(frozen=True, slots=True)
class _NodeKey:
    """The key of a node among the selectable objects. Endpoint selectors never select nodes, even if the labels
    match.
    """

    name: str


@dataclass(slots=True)
class _Watch:
    """A selector that a set or a policy uses.

    Attributes:
        selected: the selected objects with the set members that they add. For a policy these are empty.
    """

    terms: tuple[_Term, ...]
    matches: Callable[[Hashable, Selectable], bool]
    members: Callable[[Selectable], tuple[str, ...]]
    kind: c.IpSetType | None = None
    selected: dict[Hashable, tuple[str, ...]] = field(default_factory=dict)


class Compiler(RuleCompiler):
    """Compiles resources incrementally: holds resources and their compiled form.

    Attributes:
        resources: the current ones; changed by :meth:`apply` only.
        compiled: the result. Its values are replaced, never modified.
    """

    def __init__(self) -> None:
        self.resources = Resources()
        self.compiled = Compiled()
        self._things = _Things()
        self._watches: dict[Hashable, _Watch] = {}
        self._by_term: dict[_Term, set[Hashable]] = {}
        self._owners: dict[str, set[Hashable]] = {}
        self._sets_of: dict[Hashable, set[str]] = {}
        self._needed: set[str] = set()
        self._profiles: dict[str, ApiProfile] = {}
        self._policies_of: dict[Hashable, set[c.PolicyId]] = {}
        self._pods_in: dict[str, set[tuple[str, str]]] = {}
        self._namespace_uses: Counter[str] = Counter()
        self._account_uses: Counter[tuple[str, str]] = Counter()
        self._claims: dict[IpAddress, set[PodKey]] = {}
        self._by_uid: dict[str, dict[c.EndpointId, None]] = {}
        self._tiers: dict[str, tuple[bool, float, str, bool]] = {}
        self._dirty_sets: set[str] = set()
        self._delta = Delta()

    def apply(self, changes: Iterable[tuple[str, Any, Any]]) -> Delta:
        """Change resources, and return the compiled objects that this has changed.

        Args:
            changes: name of a table of :class:`~ztunnel.policy.calico.resources.Resources`, key, and the new
                value. None removes.
        """
        self._delta = Delta()
        by_table: dict[str, dict[Any, Any]] = {}
        for table, key, value in changes:
            by_table.setdefault(table, {})[key] = value
        changed: dict[str, dict[Any, Any]] = {}
        for table, values in by_table.items():
            found: dict[Any, Any] = getattr(self.resources, table)
            for key, value in values.items():
                before = found.get(key)
                if before == value:
                    continue
                changed.setdefault(table, {})[key] = before
                if value is None:
                    del found[key]
                else:
                    found[key] = value
        self._changed(changed)
        self._rebuild_sets()
        return self._delta

    def _changed(self, changed: Mapping[str, Mapping[Any, Any]]) -> None:
        """Propagate changes of profiles to the objects that inherit them; ``changed`` has the previous values."""
        pods = set(changed.get("pods", ()))
        networks = set(changed.get("network_sets", ()))
        hosts = set(changed.get("host_endpoints", ()))
        for key in list(pods):
            before, after = changed["pods"][key], self.resources.pods.get(key)
            self._count(before, after)
            # Any pod with one of these addresses can have a new owner of the address.
            pods |= self._claim(key, before, after)
        namespaces = set(changed.get("namespaces", ())) | {namespace for namespace, _ in pods}
        accounts = set(changed.get("accounts", ()))
        for key in changed.get("pods", ()):
            for pod in (changed["pods"][key], self.resources.pods.get(key)):
                if pod is not None:
                    accounts.add((pod.namespace, pod.account))
        relabelled = self._update_profiles(namespaces, accounts, set(changed.get("profiles", ())))
        if relabelled:
            known = self.resources.host_endpoints.items()
            hosts |= {name for name, host in known if not relabelled.isdisjoint(host.profiles)}
        for profile in relabelled:
            kind, _, rest = profile.partition(".")
            if kind == "kns":
                pods |= self._pods_in.get(rest, set())
                networks |= {key for key in self.resources.network_sets if key[0] == rest}
            elif kind == "ksa":
                namespace, _, account = rest.partition(".")
                pods |= {
                    key for key in self._pods_in.get(namespace, ()) if self.resources.pods[key].account == account
                }
        # Update pods, network sets, hosts and nodes. This comes before selectors, whose anchor labels are chosen
        # by the number of objects that have them.
        for key in pods:
            self._put_pod(key, changed.get("pods", {}).get(key, self.resources.pods.get(key)))
        for key in networks:
            self._put_thing(("set", *key), self._network(key))
        for name in hosts:
            host = self.resources.host_endpoints.get(name)
            self._put_thing(("host", name), host_selectable(host, self._labels_of) if host is not None else None)
        for name in changed.get("nodes", ()):
            node = self.resources.nodes.get(name)
            self._put_thing(_NodeKey(name), node_selectable(node) if node is not None else None)
        for service in changed.get("services", ()):
            self._put_service(service)
        for policy_id in changed.get("policies", ()):
            self._put_policy(policy_id)
        if "tiers" in changed:
            self._tiers.clear()
            for key in self._policies_of:
                if isinstance(key, c.EndpointId):
                    self._delta.endpoints.add(key)
        for key in self._delta.endpoints:
            self._put_endpoint(key)

    def _count(self, before: Pod | None, after: Pod | None) -> None:
        for pod, step in ((before, -1), (after, 1)):
            if pod is None:
                continue
            key = (pod.namespace, pod.name)
            if step > 0:
                self._pods_in.setdefault(pod.namespace, set()).add(key)
            elif after is None or after.namespace != pod.namespace:
                self._pods_in[pod.namespace].discard(key)
            if pod.is_endpoint:
                self._namespace_uses[pod.namespace] += step
                self._account_uses[pod.namespace, pod.account] += step

    def _claim(self, key: PodKey, before: Pod | None, after: Pod | None) -> set[PodKey]:
        """Record a pod's current addresses. Return all pods that have one of its current or previous addresses."""
        found: set[PodKey] = set()
        for pod, has in ((before, False), (after, True)):
            for address in pod.addresses if pod is not None and pod.is_endpoint else ():
                claims = self._claims.setdefault(address, set())
                (claims.add if has else claims.discard)(key)
                found |= claims
                if not claims:
                    del self._claims[address]
        return found

    def _holding(self, pod: Pod) -> Pod:
        """Return a pod with only the addresses that it owns, as ``with_own_addresses`` does for all pods."""
        if not pod.is_endpoint:
            return pod
        pods = self.resources.pods
        others = ((address, (pods[key].claim for key in self._claims[address])) for address in pod.addresses)
        return with_addresses(pod, [address for address, claims in others if max(claims) == pod.claim])

    # Profiles

    def _update_profiles(
        self, namespaces: Iterable[str], accounts: Iterable[tuple[str, str]], written: Iterable[str]
    ) -> set[str]:
        """Update profiles, and return those whose inherited labels have changed."""
        wanted: dict[str, ApiProfile | None] = {}
        result = self.compiled
        for name in namespaces:
            known = self.resources.namespaces.get(name)
            labels = namespace_labels(known, name) if known is not None or self._namespace_uses[name] else None
            if _put(result.namespaces, name, labels):
                self._delta.namespaces.add(name)
            wanted[f"kns.{name}"] = namespace_profile(name, labels) if labels is not None else None
        for key in accounts:
            account = self.resources.accounts.get(key)
            labels = own_labels(account, key[1]) if account is not None or self._account_uses[key] else None
            if _put(result.accounts, key, labels):
                self._delta.accounts.add(key)
            wanted[f"ksa.{key[0]}.{key[1]}"] = account_profile(*key, labels) if labels is not None else None
        for name in written:
            if name not in wanted:
                wanted[name] = self._implied(name)
        relabelled = set()
        for name, implied in wanted.items():
            profile = self.resources.profiles.get(name, implied)
            before = self._profiles.get(name)
            if profile == before:
                continue
            _put(self._profiles, name, profile)
            if (before.labels if before else {}) != (profile.labels if profile else {}):
                relabelled.add(name)
            owner = ("profile", name)
            self._needed = set()
            compiled = None
            if profile is not None:
                inbound, outbound = (
                    tuple(self.rule(rule, "") for rule in part) for part in (profile.inbound, profile.outbound)
                )
                compiled = c.Policy("", inbound, outbound)
            self._own(owner, self._needed)
            if _put(result.profiles, name, compiled):
                self._delta.profiles.add(name)
        return relabelled

    def _implied(self, name: str) -> ApiProfile | None:
        """Return the profile that a namespace or account implies under this name. An explicit profile can replace
        it.
        """
        kind, _, rest = name.partition(".")
        if kind == "kns" and rest in self.compiled.namespaces:
            return namespace_profile(rest, self.compiled.namespaces[rest])
        namespace, _, account = rest.partition(".")
        if kind == "ksa" and (namespace, account) in self.compiled.accounts:
            return account_profile(namespace, account, self.compiled.accounts[namespace, account])
        return None

    def _labels_of(self, profile: str) -> Mapping[str, str]:
        found = self._profiles.get(profile)
        return found.labels if found is not None else {}

    # Adding and removing selected objects

    def _put_pod(self, key: tuple[str, str], before: Pod | None) -> None:
        pod = self.resources.pods.get(key)
        pod = self._holding(pod) if pod is not None else None
        result = self.compiled
        if before is not None and before.uid and (pod is None or pod.uid != before.uid or not pod.is_endpoint):
            self._put_uid(before.uid, endpoint_id(before), add=False)
        if pod is None or not pod.is_endpoint:
            gone = endpoint_id(pod or Pod(namespace=key[0], name=key[1]))
            self._put_thing(gone, None)
            if result.endpoints.pop(gone, None) is not None:
                self._delta.endpoints.add(gone)
            result.nodes.pop(gone, None)
            result.captured.discard(gone)
            return
        where = endpoint_id(pod)
        self._delta.endpoints.add(where)
        result.nodes[where] = pod.node
        if pod.captured:
            result.captured.add(where)
        else:
            result.captured.discard(where)
        if pod.uid:
            self._put_uid(pod.uid, where, add=True)
        self._put_thing(where, pod_selectable(pod, self._labels_of))

    def _put_uid(self, uid: str, where: c.EndpointId, *, add: bool) -> None:
        claims = self._by_uid.setdefault(uid, {})
        claims.pop(where, None)
        if add:
            claims[where] = None
        if claims:
            self.compiled.uids[uid] = next(reversed(claims))
        else:
            self.compiled.uids.pop(uid, None)
            del self._by_uid[uid]

    def _network(self, key: tuple[str, str]) -> Selectable | None:
        found = self.resources.network_sets.get(key)
        return network_selectable(found, self._labels_of) if found is not None else None

    def _put_thing(self, key: Hashable, thing: Selectable | None) -> None:
        before = self._things.all.get(key)
        if before == thing:
            return
        affected: set[Hashable] = set()
        for term in {*_terms(before), *_terms(thing)}:
            affected |= self._by_term.get(term, set())
        self._things.put(key, thing)
        for watch_id in affected:
            self._select(watch_id, self._watches[watch_id], key, thing)

    def _select(self, watch_id: Hashable, watch: _Watch, key: Hashable, thing: Selectable | None) -> None:
        """Add an object to the selection of a selector, or remove it from there."""
        before = watch.selected.get(key)
        after = watch.members(thing) if thing is not None and watch.matches(key, thing) else None
        if before == after:
            return
        if after is None:
            del watch.selected[key]
        else:
            watch.selected[key] = after
        if isinstance(watch_id, str):
            self._dirty_sets.add(watch_id)
        elif isinstance(watch_id, c.PolicyId):
            self._note(key, watch_id, selected=after is not None)

    def _note(self, key: Hashable, policy_id: c.PolicyId, *, selected: bool) -> None:
        if not isinstance(key, c.EndpointId):
            return
        found = self._policies_of.setdefault(key, set())
        if selected:
            found.add(policy_id)
        else:
            found.discard(policy_id)
            if not found:
                del self._policies_of[key]
        self._delta.endpoints.add(key)

    # Selectors

    def _watch(self, watch_id: Hashable, watch: _Watch) -> None:
        self._watches[watch_id] = watch
        for term in watch.terms:
            self._by_term.setdefault(term, set()).add(watch_id)
        for key in self._things.having(watch.terms):
            self._select(watch_id, watch, key, self._things.all[key])

    def _unwatch(self, watch_id: Hashable) -> None:
        watch = self._watches.pop(watch_id, None)
        for term in watch.terms if watch is not None else ():
            found = self._by_term[term]
            found.discard(watch_id)
            if not found:
                del self._by_term[term]
        if watch is not None and isinstance(watch_id, c.PolicyId):
            for key in watch.selected:
                self._note(key, watch_id, selected=False)

    def _anchor(self, node: Node) -> tuple[_Term, ...]:
        """Return a selector's anchor, as label terms. Every object that it selects matches at least one term."""
        match node:
            case Compare(label, "==", value):
                return ((label, value),)
            case Compare(label, operator, _) if operator != "!=":
                return ((label, None),)
            case In(label, values, False):
                return tuple((label, value) for value in values)
            case Has(label):
                return ((label, None),)
            case And(operands):
                return min(map(self._anchor, operands), key=self._cost)
            case Or(operands):
                found = tuple(dict.fromkeys(chain.from_iterable(map(self._anchor, operands))))
                return (_ANY,) if _ANY in found else found
            case _:
                return (_ANY,)

    def _cost(self, terms: tuple[_Term, ...]) -> tuple[bool, bool, int]:
        common = any(label == ORCHESTRATOR_LABEL for label, _ in terms)
        return _ANY in terms, common, self._things.count(terms)

    # Policies and sets

    def _put_policy(self, policy_id: c.PolicyId) -> None:
        policy = self.resources.policies.get(policy_id)
        self._needed = set()
        compiled = None
        if policy is not None:
            inbound, outbound = (
                tuple(self.rule(rule, policy_id.namespace) for rule in part)
                for part in (policy.inbound, policy.outbound)
            )
            compiled = c.Policy(policy_id.namespace, inbound, outbound)
        self._own(policy_id, self._needed)
        if _put(self.compiled.policies, policy_id, compiled):
            self._delta.policies.add(policy_id)
        # The policy's order, tier or types can have changed, so the endpoints that it selects are always
        # rebuilt.
        self._unwatch(policy_id)
        if policy is not None:
            selector = policy_selector(policy)
            self._watch(policy_id, _Watch(self._anchor(selector.root), _by(selector), _no_members))

    def _own(self, owner: Hashable, needed: set[str]) -> None:
        """Record which sets a policy or profile needs, and drop sets that are no longer needed."""
        before = self._sets_of.get(owner, set())
        for set_id in needed - before:
            self._owners.setdefault(set_id, set()).add(owner)
        for set_id in before - needed:
            owners = self._owners[set_id]
            owners.discard(owner)
            if not owners:
                del self._owners[set_id]
                self._unwatch(set_id)
                self._dirty_sets.add(set_id)
        _put(self._sets_of, owner, needed or None)

    def _rebuild_sets(self) -> None:
        for set_id in self._dirty_sets:
            watch = self._watches.get(set_id)
            value = None
            if watch is not None and watch.kind is not None:
                value = (watch.kind, frozenset(chain.from_iterable(watch.selected.values())))
            if _put(self.compiled.ip_sets, set_id, value):
                self._delta.ip_sets.add(set_id)
        self._dirty_sets.clear()

    def _set(self, set_id: str, watch: Callable[[], _Watch]) -> str:
        self._needed.add(set_id)
        if set_id not in self._watches:
            self._dirty_sets.add(set_id)
            self._watch(set_id, watch())
        return set_id

    def selector_set(self, selector: Selector) -> str:
        """Return the id of the set with the addresses that a selector selects."""
        return self._set(
            selector.identity,
            lambda: _Watch(self._anchor(selector.root), _by(selector), _networks, c.IpSetType.NET),
        )

    def named_port_set(self, selector: Selector | None, protocol: int | str | None, name: str) -> str:
        """Return the id of the set with a named port of the selected endpoints. If the selector is None, it
        selects all.
        """
        chosen = selector or Selector(All())
        text = port_protocol(protocol)
        return self._set(
            named_port_id(chosen, text, name),
            lambda: _Watch(
                self._anchor(chosen.root),
                _by(chosen),
                lambda thing: tuple(named_port_members(thing, text, name)),
                c.IpSetType.IP_AND_PORT,
            ),
        )

    def service_set(self, service: tuple[str, str], *, ports: bool) -> str:
        """Return the id of the set with a service's addresses, with or without its ports."""
        return self._set(service_id(service, ports=ports), lambda: self._service_watch(service, ports=ports))

    def node_set(self, selector: Selector) -> str:
        """Return the id of the set with the addresses of selected nodes."""
        matches = selector.matches
        return self._set(
            node_set_id(selector),
            lambda: _Watch(
                self._anchor(selector.root),
                lambda key, thing: isinstance(key, _NodeKey) and matches(thing.labels),
                _networks,
                c.IpSetType.NET,
            ),
        )

    def _service_watch(self, service: tuple[str, str], *, ports: bool) -> _Watch:
        found = self.resources.services.get(service)

        def matches(key: Hashable, thing: Selectable) -> bool:
            return (
                found is not None
                and bool(found.selector)
                and isinstance(key, c.EndpointId)
                and key.workload.partition("/")[0] == service[0]
                and found.selector.items() <= thing.labels.items()
            )

        return _Watch(
            ((NAMESPACE_LABEL, service[0]), (NAMESPACE_LABEL, None)),
            matches,
            (lambda thing: tuple(service_members(thing, found))) if ports else _networks,
            c.IpSetType.IP_AND_PORT if ports else c.IpSetType.NET,
        )

    def _put_service(self, service: tuple[str, str]) -> None:
        for ports in (False, True):
            set_id = service_id(service, ports=ports)
            if set_id in self._watches:
                self._unwatch(set_id)
                self._dirty_sets.add(set_id)
                self._watch(set_id, self._service_watch(service, ports=ports))

    # Endpoints

    def _put_endpoint(self, key: c.EndpointId) -> None:
        thing = self._things.all.get(key)
        if thing is None:
            return
        namespace, _, name = key.workload.partition("/")
        pod = self.resources.pods[namespace, name]
        endpoint = c.Endpoint("", thing.nets, tuple(self._tiers_of(key)), profiles_of(pod))
        self.compiled.endpoints[key] = endpoint

    def _tiers_of(self, key: Hashable) -> Iterator[c.Tier]:
        by_tier: dict[str, list[ApiPolicy]] = {}
        for policy_id in self._policies_of.get(key, ()):
            policy = self.resources.policies[policy_id]
            by_tier.setdefault(policy.tier, []).append(policy)
        for name in sorted(by_tier, key=lambda name: self._tier(name)[:3]):
            policies = sorted(by_tier[name], key=place_of)
            ingress = tuple(policy.id for policy in policies if policy.ingress)
            egress = tuple(policy.id for policy in policies if policy.egress)
            if ingress or egress:
                yield c.Tier(name, ingress, egress, self._tier(name)[3])

    def _tier(self, name: str) -> tuple[bool, float, str, bool]:
        """Return the sort key of a tier, and whether flows without a match pass at its end."""
        known = self._tiers.get(name)
        if known is None:
            tier = self.resources.tiers.get(name)
            if tier is not None:
                known = (False, tier.order, name, tier.passes)
            elif name in BUILT_IN_TIERS:
                known = (False, BUILT_IN_TIERS[name][0], name, BUILT_IN_TIERS[name][1])
            else:
                known = (True, 0.0, name, False)
            self._tiers[name] = known
        return known


def differences(before: Resources, after: Resources) -> Iterator[tuple[str, Any, Any]]:
    """Yield changes for :meth:`Compiler.apply` that turn some resources into others."""
    for item in fields(Resources):
        old, new = getattr(before, item.name), getattr(after, item.name)
        for key in old.keys() - new.keys():
            yield item.name, key, None
        for key, value in new.items():
            if old.get(key) != value:
                yield item.name, key, value


def _by(selector: Selector) -> Callable[[Hashable, Selectable], bool]:
    matches = selector.matches
    return lambda key, thing: matches(thing.labels) and not isinstance(key, _NodeKey)


def _networks(thing: Selectable) -> tuple[str, ...]:
    return tuple(map(str, thing.nets))


def _no_members(_: Selectable) -> tuple[str, ...]:
    return ()


def _put(table: dict[Any, Any], key: Any, value: Any) -> bool:
    """Put a value into a table, or remove the entry if the value is None. Return whether the table changed."""
    before = table.get(key)
    if value is None:
        return table.pop(key, None) is not None
    if before == value:
        return False
    table[key] = value
    return True
