"""The current mesh: workloads, services and authorization, indexed for a node proxy's questions.

A mutable store that values are put into; every change costs in proportion to the change, every look-up the same
however large the mesh is. Nothing here waits, reads a clock or draws a random number.

How it is laid out, since memory is most of what a big mesh costs:

* A workload is the value its dialect made; indexes hold that value itself, not its name. A key that one value
  has, which is nearly every address, holds it bare (:class:`_Shared`).
* A service and its endpoints share one :class:`_Entry`, which exists as soon as either came. Endpoints of a
  service that is not (or no longer) known are called staged in dumps.
* Unhealthy endpoints are stored beside the healthy ones, so that a service can start to accept unhealthy endpoints
  at once (the Rust ztunnel drops them until their workloads are sent again).
"""

import ipaddress
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from types import MappingProxyType
from typing import Generic, TypeVar

from xds.model.address import IpAddress, IpNetwork
from xds.model.authorization import Action, AuthorizationPolicy, PolicyScope
from xds.model.identity import SpiffeId
from xds.model.policy import Always, Policy, PolicyList, Tier, Verdict
from xds.model.service import HealthPolicy, Service, Visibility
from xds.model.workload import (
    Health,
    NamespacedHostname,
    NetworkMode,
    PolicyKey,
    Protocol,
    ServiceKey,
    Workload,
    WorkloadUid,
)

Key = TypeVar("Key", bound=Hashable)
Value = TypeVar("Value", Workload, Service)

#: Different (namespace, selected policies) pairs whose policies are remembered. Workloads of one node ask, a few
#: hundred at most; the limit only keeps a mesh that renames its policies for ever from growing this.
_REMEMBERED_POLICIES = 4096

_NOTHING: Mapping[WorkloadUid, "Endpoint"] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class Endpoint:
    """One workload behind one service.

    Attributes:
        ports: service port to target port, of this endpoint's entry.
    """

    uid: WorkloadUid
    ports: Mapping[int, int]
    status: Health


@dataclass(slots=True)
class Changes:
    """What one batch changed, for those who watch.

    Attributes:
        workloads, services, policies: put or removed.
        endpoints: by service, the endpoints that were added or removed or whose workload changed.
    """

    workloads: set[WorkloadUid] = field(default_factory=set)
    services: set[ServiceKey] = field(default_factory=set)
    endpoints: dict[ServiceKey, set[WorkloadUid]] = field(default_factory=dict)
    policies: set[PolicyKey] = field(default_factory=set)
    local_identities_added: set[SpiffeId] = field(default_factory=set)
    local_identities_removed: set[SpiffeId] = field(default_factory=set)

    def __bool__(self) -> bool:
        return bool(self.workloads or self.services or self.policies)


@dataclass(frozen=True, slots=True)
class WorkloadPolicies:
    """Everything that judges connections to one workload.

    Attributes:
        enforced: deny policies, then allow policies, in Istio's order. A missing policy denies every connection,
        in its own name. dry_run_deny, dry_run_allow: policies that are only reported. missing: policies named by
        the workload but not yet received. Until they arrive, no connection is
            allowed.
    """

    enforced: PolicyList
    dry_run_deny: tuple[AuthorizationPolicy, ...] = ()
    dry_run_allow: tuple[AuthorizationPolicy, ...] = ()
    missing: tuple[PolicyKey, ...] = ()

    @property
    def arrived(self) -> PolicyList:
        """``enforced`` without what stands for missing policies.

        The policies that have arrived. A DENY among them applies whether or not a policy is missing. Their end
        verdict does not.
        """
        if not self.missing:
            return self.enforced
        return PolicyList(self.enforced.tiers[1:], self.enforced.end)


class _Shared(Generic[Key, Value]):
    """Values by a key that is nearly always used by a single value, which is then stored without a list. Several
    values are stored in order of arrival.
    """

    __slots__ = ("_found",)

    def __init__(self) -> None:
        self._found: dict[Key, Value | list[Value]] = {}

    def put(self, key: Key, value: Value, before: Value | None) -> None:
        """Add a value, replacing ``before`` if it is present."""
        found = self._found.get(key)
        if found is None or found is before:
            self._found[key] = value
        elif isinstance(found, list):
            for place, other in enumerate(found):
                if other is before:
                    found[place] = value
                    return
            found.append(value)
        else:
            self._found[key] = [found, value]

    def remove(self, key: Key, value: Value) -> None:
        """Remove a value that is present."""
        found = self._found[key]
        if not isinstance(found, list):
            del self._found[key]
            return
        # By identity: comparing values of this size takes longer than finding the one.
        found[:] = [other for other in found if other is not value]
        if len(found) == 1:
            self._found[key] = found[0]

    def get(self, key: Key) -> Value | list[Value] | None:
        return self._found.get(key)

    def each(self, key: Key) -> Collection[Value]:
        """All values of a key, first come first."""
        found = self._found.get(key)
        if found is None:
            return ()
        return found if isinstance(found, list) else (found,)

    def __bool__(self) -> bool:
        return bool(self._found)


@dataclass(slots=True)
class _Entry:
    """A service, or the place one would take, and its endpoints.

    ``serving`` are the endpoints that can be chosen. ``unhealthy`` are all unhealthy endpoints, whether or not
    they can be chosen.
    """

    key: ServiceKey
    service: Service | None = None
    serving: dict[WorkloadUid, Endpoint] = field(default_factory=dict)
    unhealthy: dict[WorkloadUid, Endpoint] | None = None

    @property
    def serves_unhealthy(self) -> bool:
        balancing = self.service.load_balancing if self.service is not None else None
        return balancing is not None and balancing.health is HealthPolicy.ALLOW_ALL

    def put(self, endpoint: Endpoint) -> None:
        if endpoint.status is Health.UNHEALTHY:
            if self.unhealthy is None:
                self.unhealthy = {}
            self.unhealthy[endpoint.uid] = endpoint
            if not self.serves_unhealthy:
                return
        self.serving[endpoint.uid] = endpoint

    def remove(self, uid: WorkloadUid) -> None:
        self.serving.pop(uid, None)
        if self.unhealthy is not None:
            self.unhealthy.pop(uid, None)
            if not self.unhealthy:
                self.unhealthy = None

    def become(self, service: Service | None) -> None:
        before = self.serves_unhealthy
        self.service = service
        if self.unhealthy is None or before is self.serves_unhealthy:
            return
        if before:
            for uid in self.unhealthy:
                del self.serving[uid]
        else:
            self.serving.update(self.unhealthy)

    def all(self) -> Mapping[WorkloadUid, Endpoint]:
        return self.serving if self.unhealthy is None else {**self.serving, **self.unhealthy}

    @property
    def is_empty(self) -> bool:
        return self.service is None and not self.serving and self.unhealthy is None


class _Blocks:
    """Services by address blocks of one network, with a dictionary for each prefix length in use."""

    __slots__ = ("_lengths",)

    def __init__(self) -> None:
        self._lengths: dict[tuple[int, int], _Shared[int, Service]] = {}

    def put(self, block: IpNetwork, value: Service, old: Service | None) -> None:
        length = (block.version, block.prefixlen)
        self._lengths.setdefault(length, _Shared()).put(int(block.network_address), value, old)

    def remove(self, block: IpNetwork, value: Service) -> None:
        length = (block.version, block.prefixlen)
        self._lengths[length].remove(int(block.network_address), value)
        if not self._lengths[length]:
            del self._lengths[length]

    def holding(self, address: IpAddress) -> Iterator[tuple[int, Service]]:
        """Yield each service whose block contains the address, with the block's prefix length."""
        number = int(address)
        for (version, length), blocks in self._lengths.items():
            if version == address.version:
                spare = address.max_prefixlen - length
                for service in blocks.each(number >> spare << spare):
                    yield length, service

    def __bool__(self) -> bool:
        return bool(self._lengths)


#: A workload's namespace and the policies it names: all that decides which policies apply to it.
_Pair = tuple[str, tuple[PolicyKey, ...]]


class _Authorization:
    """The policies by scope, and their compiled values."""

    def __init__(self) -> None:
        self.policies: dict[PolicyKey, AuthorizationPolicy] = {}
        self._judged: dict[PolicyKey, Policy] = {}
        self._by_scope: dict[str | None, dict[PolicyKey, AuthorizationPolicy]] = {}
        self._shared: dict[str | None, tuple[Tier, Tier]] = {}
        self._remembered: dict[_Pair, WorkloadPolicies] = {}
        self._by_namespace: dict[str, set[_Pair]] = {}
        self._by_name: dict[PolicyKey, set[_Pair]] = {}

    def put(self, policy: AuthorizationPolicy) -> bool:
        key = policy.key
        before = self.policies.get(key)
        if before == policy:
            return False
        if before is not None:
            self._forget(before)
            if (before.scope, _reach(before)) != (policy.scope, _reach(policy)):
                self._leave(before)
        self.policies[key] = policy
        if policy.scope is not PolicyScope.WORKLOAD_SELECTOR:
            self._by_scope.setdefault(_reach(policy), {})[key] = policy
        verdict = Verdict.DENY if policy.action is Action.DENY else Verdict.ALLOW
        self._judged[key] = Policy(key, verdict, policy.condition)
        self._forget(policy)
        return True

    def remove(self, key: PolicyKey) -> bool:
        policy = self.policies.pop(key, None)
        if policy is None:
            return False
        del self._judged[key]
        self._leave(policy)
        self._forget(policy)
        return True

    def _leave(self, policy: AuthorizationPolicy) -> None:
        reach = _reach(policy)
        if policy.scope is not PolicyScope.WORKLOAD_SELECTOR:
            del self._by_scope[reach][policy.key]
            if not self._by_scope[reach]:
                del self._by_scope[reach]

    def _forget(self, policy: AuthorizationPolicy) -> None:
        """Drop the values compiled from a policy."""
        reach = _reach(policy)
        if policy.scope is not PolicyScope.WORKLOAD_SELECTOR and reach is None:
            self._shared.pop(reach, None)
            self._forget_all()
            return
        gone = set(self._by_name.get(policy.key, ()))
        if policy.scope is PolicyScope.NAMESPACE:
            self._shared.pop(reach, None)
            gone |= self._by_namespace.get(policy.namespace, set())
        for pair in gone:
            del self._remembered[pair]
            _discard(self._by_namespace, pair[0], pair)
            for name in set(pair[1]):
                _discard(self._by_name, name, pair)

    def _forget_all(self) -> None:
        self._remembered.clear()
        self._by_namespace.clear()
        self._by_name.clear()

    def policies_for(self, workload: Workload) -> WorkloadPolicies:
        pair = (workload.namespace, workload.authorization_policies)
        found = self._remembered.get(pair)
        if found is None:
            if len(self._remembered) >= _REMEMBERED_POLICIES:
                self._forget_all()
            found = self._remembered[pair] = self._collect(*pair)
            self._by_namespace.setdefault(pair[0], set()).add(pair)
            for name in pair[1]:
                self._by_name.setdefault(name, set()).add(pair)
        return found

    def _collect(self, namespace: str, names: tuple[PolicyKey, ...]) -> WorkloadPolicies:
        scopes = (None, namespace)
        everywhere = [self._by_scope.get(scope, {}) for scope in scopes]
        named: dict[PolicyKey, AuthorizationPolicy] = {}
        missing = []
        for name in dict.fromkeys(names):
            policy = self.policies.get(name)
            if policy is None:
                missing.append(name)
            elif not any(name in policies for policies in everywhere):
                named[name] = policy
        tiers = [self._tiers(scope) for scope in scopes] + [self._made(named.values())]
        closed = Tier(tuple(Policy(name, Verdict.DENY, Always()) for name in missing))
        chosen = [closed, *(deny for deny, _ in tiers), *(allow for _, allow in tiers)]
        allows = any(allow.policies for _, allow in tiers)
        all_policies = [policy for group in (*everywhere, named) for policy in group.values() if policy.dry_run]
        return WorkloadPolicies(
            enforced=PolicyList(
                tuple(tier for tier in chosen if tier.policies), Verdict.DENY if allows else Verdict.ALLOW
            ),
            dry_run_deny=tuple(policy for policy in all_policies if policy.action is Action.DENY),
            dry_run_allow=tuple(policy for policy in all_policies if policy.action is Action.ALLOW),
            missing=tuple(missing),
        )

    def _tiers(self, scope: str | None) -> tuple[Tier, Tier]:
        """The deny and the allow tier of a scope, the same objects for every workload in it."""
        found = self._shared.get(scope)
        if found is None:
            policies = self._by_scope.get(scope)
            found = self._made(policies.values() if policies is not None else ())
            if policies is not None:
                self._shared[scope] = found
        return found

    def _made(self, policies: Iterable[AuthorizationPolicy]) -> tuple[Tier, Tier]:
        enforced = [policy for policy in policies if not policy.dry_run]
        deny = tuple(self._judged[policy.key] for policy in enforced if policy.action is Action.DENY)
        allow = tuple(self._judged[policy.key] for policy in enforced if policy.action is Action.ALLOW)
        return Tier(deny), Tier(allow)


def _discard(index: dict[Key, set[_Pair]], key: Key, pair: _Pair) -> None:
    index[key].discard(pair)
    if not index[key]:
        del index[key]


def _reach(policy: AuthorizationPolicy) -> str | None:
    """Return the namespace whose workloads the policy applies to. None means all, like in the Rust ztunnel also
    for an empty namespace.
    """
    return None if policy.scope is PolicyScope.GLOBAL else policy.namespace or None


class Mesh:
    """See the module.

    Args:
        node: the name of this node. Empty means that every workload counts as local.
    """

    def __init__(self, *, node: str = "") -> None:
        self._node = node
        self._workloads: dict[WorkloadUid, Workload] = {}
        self._by_address: dict[str, _Shared[str, Workload]] = {}
        self._by_name: _Shared[tuple[str, str], Workload] = _Shared()
        self._local: _Shared[tuple[str, str, str], Workload] = _Shared()
        self._local_identities: dict[SpiffeId, int] = {}
        self._entries: dict[ServiceKey, _Entry] = {}
        self._services: dict[ServiceKey, Service] = {}
        self._staged: dict[ServiceKey, _Entry] = {}
        self._by_hostname: _Shared[str, Service] = _Shared()
        self._by_vip: dict[str, _Shared[str, Service]] = {}
        self._by_block: dict[str, _Blocks] = {}
        self._authorization = _Authorization()
        self._watchers: dict[int, Callable[[Changes], None]] = {}
        self._watched = 0
        #: Of the whole mesh: a new number after each batch that changed it.
        self.version = 0

    # Changes

    def apply(
        self,
        put: Iterable[Workload | Service | AuthorizationPolicy] = (),
        removed: Iterable[str] = (),
        *,
        removed_policies: Iterable[str] = (),
    ) -> Changes:
        """Put values in place of their namesakes and take names away, as one batch: one change for watchers.

        Args:
            put: values.
            removed: uids of workloads and ``namespace/hostname`` of services; absent names are skipped.
            removed_policies: keys of removed policies. They are separate from other removed keys, because a
                service and a policy can have the same name.
        """
        changes = Changes()
        for key in removed_policies:
            if self._authorization.remove(PolicyKey(key)):
                changes.policies.add(PolicyKey(key))
        for name in removed:
            if name in self._workloads:
                self._remove_workload(self._workloads[WorkloadUid(name)], changes)
            elif name in self._services:
                self._remove_service(ServiceKey(name), changes)
        for value in put:
            if isinstance(value, Workload):
                self._put_workload(value, changes)
            elif isinstance(value, Service):
                self._put_service(value, changes)
            elif self._authorization.put(value):
                changes.policies.add(value.key)
        self._tell(changes)
        return changes

    def remove_policies(self, keys: Iterable[str]) -> Changes:
        """Take policies away."""
        return self.apply(removed_policies=keys)

    def watch(self, changed: Callable[[Changes], None]) -> Callable[[], None]:
        """Call ``changed`` after each batch that changed the mesh. Return a function that stops this."""
        self._watched += 1
        number = self._watched
        self._watchers[number] = changed

        def stop() -> None:
            self._watchers.pop(number, None)

        return stop

    def _tell(self, changes: Changes) -> None:
        if changes:
            self.version += 1
            for changed in tuple(self._watchers.values()):
                changed(changes)

    def _put_workload(self, workload: Workload, changes: Changes) -> None:
        before = self._workloads.get(workload.uid)
        if before == workload:
            return
        uid = workload.uid
        changes.workloads.add(uid)
        if before is not None:
            self._unindex(before, workload, changes)
        self._workloads[uid] = workload
        if workload.network_mode is not NetworkMode.HOST_NETWORK:
            for host in dict.fromkeys(workload.addresses):
                self._by_address.setdefault(workload.network, _Shared()).put(host, workload, before)
        if workload.hostname:
            self._by_name.put((workload.namespace, workload.hostname), workload, before)
        if self._is_local(workload):
            self._local.put(_pod_of(workload), workload, before)
            if _wants_certificate(workload):
                identity = workload.identity
                count = self._local_identities.get(identity, 0)
                self._local_identities[identity] = count + 1
                if not count:
                    _turn(identity, changes.local_identities_added, changes.local_identities_removed)
        for key, ports in workload.services.items():
            entry = self._entries.get(key)
            if entry is None:
                entry = self._entries[key] = self._staged[key] = _Entry(key)
            entry.put(Endpoint(uid, ports, workload.status))
            changes.endpoints.setdefault(key, set()).add(uid)

    def _remove_workload(self, workload: Workload, changes: Changes) -> None:
        changes.workloads.add(workload.uid)
        self._unindex(workload, None, changes)
        del self._workloads[workload.uid]

    def _unindex(self, old: Workload, new: Workload | None, changes: Changes) -> None:
        """Take a workload out of every place that ``new`` will not take over."""
        has_address = new is not None and new.network_mode is not NetworkMode.HOST_NETWORK
        if old.network_mode is not NetworkMode.HOST_NETWORK:
            kept = new.addresses if new is not None and has_address and new.network == old.network else ()
            of_network = self._by_address[old.network] if old.addresses else None
            for host in dict.fromkeys(old.addresses):
                if of_network is not None and host not in kept:
                    of_network.remove(host, old)
            if of_network is not None and not of_network:
                del self._by_address[old.network]
        name = (old.namespace, old.hostname)
        if old.hostname and (new is None or (new.namespace, new.hostname) != name):
            self._by_name.remove(name, old)
        if self._is_local(old):
            if new is None or not self._is_local(new) or _pod_of(new) != _pod_of(old):
                self._local.remove(_pod_of(old), old)
            if _wants_certificate(old):
                identity = old.identity
                self._local_identities[identity] -= 1
                if not self._local_identities[identity]:
                    del self._local_identities[identity]
                    _turn(identity, changes.local_identities_removed, changes.local_identities_added)
        for key in old.services:
            changes.endpoints.setdefault(key, set()).add(old.uid)
            entry = self._entries[key]
            if new is not None and key in new.services and (new.status is old.status):
                continue  # replaced in place
            entry.remove(old.uid)
            if entry.is_empty:
                del self._entries[key]
                del self._staged[key]

    def _put_service(self, service: Service, changes: Changes) -> None:
        key = service.key
        entry = self._entries.get(key)
        before = None if entry is None else entry.service
        if before == service:
            return
        changes.services.add(key)
        if before is not None:
            self._unindex_service(before, service)
        if entry is None:
            entry = self._entries[key] = _Entry(key)
        self._staged.pop(key, None)
        self._services[entry.key] = service
        entry.become(service)
        self._by_hostname.put(service.hostname, service, before)
        for vip in dict.fromkeys(service.vips):
            self._by_vip.setdefault(vip.network, _Shared()).put(vip.host, service, before)
        for cidr in dict.fromkeys(service.cidr_vips):
            self._by_block.setdefault(cidr.network, _Blocks()).put(cidr.block, service, before)

    def _remove_service(self, key: ServiceKey, changes: Changes) -> None:
        changes.services.add(key)
        entry = self._entries[key]
        self._unindex_service(self._services.pop(key), None)
        entry.become(None)
        if entry.is_empty:
            del self._entries[key]
        else:
            self._staged[key] = entry

    def _unindex_service(self, old: Service, new: Service | None) -> None:
        """Take a service out of every place that ``new``, of the same key, will not take over."""
        if new is None:
            self._by_hostname.remove(old.hostname, old)
        for vip in dict.fromkeys(old.vips):
            if new is None or vip not in new.vips:
                self._by_vip[vip.network].remove(vip.host, old)
                if not self._by_vip[vip.network]:
                    del self._by_vip[vip.network]
        for cidr in dict.fromkeys(old.cidr_vips):
            if new is None or cidr not in new.cidr_vips:
                self._by_block[cidr.network].remove(cidr.block, old)
                if not self._by_block[cidr.network]:
                    del self._by_block[cidr.network]

    def _is_local(self, workload: Workload) -> bool:
        return not self._node or workload.node == self._node

    # Look-ups

    def workload(self, uid: str) -> Workload | None:
        """By uid."""
        return self._workloads.get(WorkloadUid(uid))

    def workload_at(self, network: str, host: str) -> Workload | None:
        """By address; if several share it, the most specific one, of equal ones the newest."""
        of_network = self._by_address.get(network)
        found = of_network.get(host) if of_network is not None else None
        if not isinstance(found, list):
            return found
        return max(reversed(found), key=_specificity)

    def local_workload(self, name: str, namespace: str, service_account: str) -> Workload | None:
        """The workload of this node that a pod is."""
        found = self._local.each((namespace, service_account, name))
        return next(iter(found), None)

    def service(self, key: str) -> Service | None:
        """Return the service named ``namespace/hostname``, without checking its visibility."""
        return self._services.get(ServiceKey(key))

    def policy(self, key: str) -> AuthorizationPolicy | None:
        """By ``namespace/name``."""
        return self._authorization.policies.get(PolicyKey(key))

    def service_at(self, network: str, host: str, namespace: str | None = None) -> Service | None:
        """By virtual address, exact before CIDR, as a client of ``namespace`` sees it."""
        of_network = self._by_vip.get(network)
        found = of_network.get(host) if of_network is not None else None
        if found is not None:
            best = _best((found,) if isinstance(found, Service) else found, namespace)
            if best is not None:
                return best
        blocks = self._by_block.get(network)
        if blocks is None:
            return None
        best_rank: tuple[bool, int, bool] | None = None
        chosen: Service | None = None
        for length, service in blocks.holding(_address(host)):
            if _visible(service, namespace):
                rank = (service.namespace == namespace, length, service.canonical)
                if best_rank is None or rank > best_rank:
                    best_rank, chosen = rank, service
        return chosen

    def service_named(self, hostname: str, namespace: str | None = None, preferred: str = "") -> Service | None:
        """By host name alone, as a client of ``namespace`` sees it; exact match only, no wildcards."""
        return _best(self._by_hostname.each(hostname), namespace, preferred)

    def workload_named(self, name: NamespacedHostname) -> Workload | None:
        """A workload whose host name and namespace are these."""
        return next(iter(self._by_name.each((name.namespace, name.hostname))), None)

    def endpoints(self, key: str) -> Mapping[WorkloadUid, Endpoint]:
        """Return the endpoints of a service. Unhealthy endpoints are included only if the service accepts them.

        The result is a view of the current state, not a copy. Use it before the next change.
        """
        entry = self._entries.get(ServiceKey(key))
        return _NOTHING if entry is None or entry.service is None else entry.serving

    def all_endpoints(self, key: str) -> Mapping[WorkloadUid, Endpoint]:
        """The endpoints of a service, unhealthy ones among them."""
        entry = self._entries.get(ServiceKey(key))
        return _NOTHING if entry is None else entry.all()

    def policies_for(self, workload: Workload) -> WorkloadPolicies:
        """Return the policies for connections to a workload. The result is cached until one of its policies
        changes.
        """
        return self._authorization.policies_for(workload)

    # For dumps and metrics

    def workloads(self) -> Iterator[Workload]:
        """All, in no order."""
        return iter(self._workloads.values())

    def services(self) -> Iterator[Service]:
        """All, in no order."""
        return iter(self._services.values())

    def policies(self) -> Iterator[AuthorizationPolicy]:
        """All, in no order."""
        return iter(self._authorization.policies.values())

    def counts(self) -> Mapping[str, int]:
        """Return how many workloads, services and policies there are."""
        return {
            "workloads": len(self._workloads),
            "services": len(self._services),
            "policies": len(self._authorization.policies),
        }

    def staged(self) -> Mapping[ServiceKey, Mapping[WorkloadUid, Endpoint]]:
        """Endpoints of services that have not come."""
        return {key: entry.all() for key, entry in self._staged.items()}

    @property
    def local_identities(self) -> Collection[SpiffeId]:
        """Identities of tunnel-capable workloads on this node: those worth a certificate in advance."""
        return self._local_identities.keys()


def _turn(identity: SpiffeId, there: set[SpiffeId], back: set[SpiffeId]) -> None:
    """Record that an identity was added or removed. Both within one batch cancel each other."""
    if identity in back:
        back.remove(identity)
    else:
        there.add(identity)


def _pod_of(workload: Workload) -> tuple[str, str, str]:
    return workload.namespace, workload.service_account, workload.name


def _wants_certificate(workload: Workload) -> bool:
    """Return whether this proxy terminates tunnels for the workload. A workload that terminates them itself has
    its own certificate.
    """
    return workload.protocol is Protocol.HBONE and not workload.native_tunnel


def _specificity(workload: Workload) -> tuple[bool, bool]:
    """Pods before what only points at their address, such as an entry of a registry."""
    return "//Pod/" in workload.uid, workload.protocol is Protocol.HBONE


def _visible(service: Service, namespace: str | None) -> bool:
    return namespace is None or service.visibility is Visibility.PUBLIC or service.namespace == namespace


def _best(candidates: Iterable[Service], namespace: str | None, preferred: str = "") -> Service | None:
    """Of services that share a name or an address: the client's own namespace, canonical, preferred, first."""
    first = canonical = wished = None
    for service in candidates:
        if not _visible(service, namespace):
            continue
        if service.namespace == namespace:
            return service
        if service.canonical:
            canonical = service
        if preferred and wished is None and service.namespace == preferred:
            wished = service
        if first is None:
            first = service
    return canonical or wished or first


@lru_cache(maxsize=16384)
def _address(host: str) -> IpAddress:
    return ipaddress.ip_address(host)
