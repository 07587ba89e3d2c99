"""The state sent to one client of PolicySync, and the updates from one state to the next in a safe order. Pure.

A client receives an object before the objects that refer to it, and its removal afterwards: IP sets, policies,
profiles, endpoints; then removals in reverse order; service accounts and namespaces last. So it never evaluates a
rule whose set is missing.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Final, TypeVar

from xds.model import calico as c
from ztunnel.policy.calico.compile import Compiled

#: The most members in one message: gRPC's default limit of 4 MiB divided by the longest member's length, 51 bytes.
MESSAGE_MEMBERS: Final = 82_200

#: The prefixes of names in the form that releases before Calico 3.32 use, by kind.
_PREFIXES: Final = {
    "NetworkPolicy": "",
    "GlobalNetworkPolicy": "",
    "KubernetesNetworkPolicy": "knp.default.",
    "KubernetesAdminNetworkPolicy": "kanp.adminnetworkpolicy.",
    "KubernetesBaselineAdminNetworkPolicy": "kbanp.baselineadminnetworkpolicy.",
}

_Key = TypeVar("_Key")
_Value = TypeVar("_Value")


@dataclass(slots=True)
class View:
    """All objects that a client needs, by key. Accounts and namespaces are complete, because selectors can read
    their labels.
    """

    ip_sets: Mapping[str, tuple[c.IpSetType, frozenset[str]]] = field(default_factory=dict)
    policies: Mapping[c.PolicyId, c.Policy] = field(default_factory=dict)
    profiles: Mapping[str, c.Policy] = field(default_factory=dict)
    endpoints: Mapping[c.EndpointId, c.Endpoint] = field(default_factory=dict)
    accounts: Mapping[tuple[str, str], dict[str, str]] = field(default_factory=dict)
    namespaces: Mapping[str, dict[str, str]] = field(default_factory=dict)


def view_of(compiled: Compiled, endpoints: Iterable[c.EndpointId]) -> View:
    """Return the objects that a client serving these endpoints needs. Unknown endpoints are left out."""
    served = {key: compiled.endpoints[key] for key in endpoints if key in compiled.endpoints}
    policies = {
        policy: compiled.policies[policy]
        for endpoint in served.values()
        for tier in endpoint.tiers
        for policy in (*tier.ingress, *tier.egress)
    }
    profiles = {name: compiled.profiles[name] for endpoint in served.values() for name in endpoint.profiles}
    sets = {
        set_id
        for policy in (*policies.values(), *profiles.values())
        for rule in (*policy.inbound, *policy.outbound)
        for set_id in _sets_of(rule)
    }
    if c.NODE_ADDRESSES in compiled.ip_sets:
        sets.add(c.NODE_ADDRESSES)
    return View(
        {set_id: compiled.ip_sets[set_id] for set_id in sorted(sets)},
        policies,
        profiles,
        served,
        compiled.accounts,
        compiled.namespaces,
    )


def excerpt(compiled: Compiled, endpoints: Iterable[c.EndpointId]) -> Compiled:
    """Return a copy of all objects that servers of these endpoints need. Later changes of ``compiled`` do not
    affect it.

    The compiler can work in another thread than the server, because tables are copied, and their values never
    change. Service accounts and namespaces are copied whole, because selectors can read any label.
    """
    view = view_of(compiled, endpoints)
    return Compiled(
        ip_sets=dict(view.ip_sets),
        policies=dict(view.policies),
        profiles=dict(view.profiles),
        endpoints=dict(view.endpoints),
        accounts=dict(compiled.accounts),
        namespaces=dict(compiled.namespaces),
        uids={uid: key for uid, key in compiled.uids.items() if key in view.endpoints},
        nodes={key: compiled.nodes[key] for key in view.endpoints if key in compiled.nodes},
        captured=compiled.captured & view.endpoints.keys(),
    )


def by_names(view: View) -> View:
    """Return a view whose policy ids have the form that releases before Calico 3.32 use: tier and name.

    Names of Kubernetes' policies have a prefix (libcalico-go/lib/names), so that they differ from Calico's
    policies of the same name. Staged policies are left out, because the oldest releases would enforce them.
    """
    tiers = {
        policy: tier.name
        for endpoint in view.endpoints.values()
        for tier in endpoint.tiers
        for policy in (*tier.ingress, *tier.egress)
        if policy.kind not in c.STAGED_KINDS
    }

    def renamed(policy: c.PolicyId) -> c.PolicyId:
        name = _PREFIXES.get(policy.kind, f"{policy.kind}.") + policy.name
        return c.PolicyId("", tiers[policy], f"{policy.namespace}/{name}" if policy.namespace else name)

    def listed(policies: Iterable[c.PolicyId]) -> tuple[c.PolicyId, ...]:
        return tuple(renamed(policy) for policy in policies if policy in tiers)

    def tiers_of(endpoint: c.Endpoint) -> tuple[c.Tier, ...]:
        found = (
            replace(tier, ingress=listed(tier.ingress), egress=listed(tier.egress)) for tier in endpoint.tiers
        )
        return tuple(tier for tier in found if tier.ingress or tier.egress)

    return replace(
        view,
        policies={renamed(key): policy for key, policy in view.policies.items() if key in tiers},
        endpoints={key: replace(endpoint, tiers=tiers_of(endpoint)) for key, endpoint in view.endpoints.items()},
    )


def changes(old: View, new: View) -> Iterator[c.Update]:
    """Yield the updates that turn one view into another, in a safe order."""
    for set_id, (kind, members) in new.ip_sets.items():
        before = old.ip_sets.get(set_id)
        if before is None or before[0] is not kind:
            yield from _whole_set(set_id, kind, members)
        elif before[1] is not members and before[1] != members:  # sets compare themselves member by member
            yield from _delta(set_id, members - before[1], before[1] - members)
    yield from (c.PolicyUpdate(key, policy) for key, policy in _changed(old.policies, new.policies))
    yield from (c.ProfileUpdate(key, profile) for key, profile in _changed(old.profiles, new.profiles))
    yield from (c.EndpointUpdate(key, endpoint) for key, endpoint in _changed(old.endpoints, new.endpoints))
    yield from (c.EndpointUpdate(key, None) for key in _gone(old.endpoints, new.endpoints))
    yield from (c.ProfileUpdate(key, None) for key in _gone(old.profiles, new.profiles))
    yield from (c.PolicyUpdate(key, None) for key in _gone(old.policies, new.policies))
    yield from (c.IpSetRemove(key) for key in _gone(old.ip_sets, new.ip_sets))
    yield from (c.ServiceAccountUpdate(*key, labels) for key, labels in _changed(old.accounts, new.accounts))
    yield from (c.ServiceAccountUpdate(*key, None) for key in _gone(old.accounts, new.accounts))
    yield from (c.NamespaceUpdate(key, labels) for key, labels in _changed(old.namespaces, new.namespaces))
    yield from (c.NamespaceUpdate(key, None) for key in _gone(old.namespaces, new.namespaces))


def _changed(old: Mapping[_Key, _Value], new: Mapping[_Key, _Value]) -> Iterator[tuple[_Key, _Value]]:
    return ((key, value) for key, value in new.items() if old.get(key) != value)


def _gone(old: Mapping[_Key, object], new: Mapping[_Key, object]) -> Iterator[_Key]:
    return (key for key in old if key not in new)


def _sets_of(rule: c.Rule) -> Iterator[str]:
    for peer in (rule.source, rule.destination):
        yield from peer.ip_sets
        yield from peer.not_ip_sets
        yield from peer.named_ports
        yield from peer.not_named_ports
        yield from peer.ip_port_sets


def _whole_set(set_id: str, kind: c.IpSetType, members: Iterable[str]) -> Iterator[c.Update]:
    waiting = iter(sorted(members))
    yield c.IpSetUpdate(set_id, kind, tuple(islice(waiting, MESSAGE_MEMBERS)))
    while added := tuple(islice(waiting, MESSAGE_MEMBERS)):
        yield c.IpSetDelta(set_id, added, ())


def _delta(set_id: str, added: Iterable[str], removed: Iterable[str]) -> Iterator[c.Update]:
    """Yield deltas of a set, with additions first. Removals fill up the last message that has additions."""
    adding, removing = iter(sorted(added)), iter(sorted(removed))
    while True:
        some = tuple(islice(adding, MESSAGE_MEMBERS))
        others = tuple(islice(removing, MESSAGE_MEMBERS - len(some)))
        if not some and not others:
            return
        yield c.IpSetDelta(set_id, some, others)
