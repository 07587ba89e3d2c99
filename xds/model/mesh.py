"""The current mesh: workloads, services and authorization policies, with the indexes that a node proxy needs.

:class:`Mesh` is a mutable store. A change costs in proportion to its size. The cost of a look-up does not depend
on the size of the mesh. Nothing here waits, reads a clock or draws a random number.

Its layout saves memory, which is the main cost of a large mesh:

* A workload is stored as the value that the dialect's compiler made. Indexes refer to this value, not to its name.
  Nearly all keys of an index have a single value, which is stored without a list
  (:class:`xds.model.mesh_index.Shared`).
* A service and its endpoints share one :class:`xds.model.mesh_index.ServiceEntry`. The entry exists as soon as the
  service or an endpoint has arrived. Dumps call the endpoints of an unknown service staged.
* Unhealthy endpoints are stored beside the healthy ones, so that a service can start to accept unhealthy endpoints
  at once (the Rust ztunnel drops them until their workloads are sent again).
* A refused workload or service is stored as a name and its addresses only, so that connections to it fail. Other
  look-ups do not find it.
"""

import ipaddress
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from types import MappingProxyType

from xds.model.address import IpAddress
from xds.model.authorization import AuthorizationPolicy
from xds.model.identity import SpiffeId
from xds.model.mesh_index import Blocks, Endpoint, RefusedAddresses, ServiceEntry, Shared
from xds.model.mesh_policies import Authorization, WorkloadPolicies
from xds.model.refused import RefusedResource
from xds.model.service import Service, Visibility
from xds.model.workload import (
    NamespacedHostname,
    NetworkMode,
    PolicyKey,
    Protocol,
    ServiceKey,
    Workload,
    WorkloadUid,
)

_NOTHING: Mapping[WorkloadUid, "Endpoint"] = MappingProxyType({})


@dataclass(slots=True)
class Changes:
    """The changes that one batch of updates made to the mesh, passed to watchers.

    Attributes:
        workloads, services, policies: the keys that were put or removed.
        refused: the names of refused resources that were put or removed.
        endpoints: by service, the endpoints that were added or removed, or whose workload changed.
    """

    workloads: set[WorkloadUid] = field(default_factory=set)
    services: set[ServiceKey] = field(default_factory=set)
    endpoints: dict[ServiceKey, set[WorkloadUid]] = field(default_factory=dict)
    policies: set[PolicyKey] = field(default_factory=set)
    refused: set[str] = field(default_factory=set)
    local_identities_added: set[SpiffeId] = field(default_factory=set)
    local_identities_removed: set[SpiffeId] = field(default_factory=set)

    def __bool__(self) -> bool:
        return bool(self.workloads or self.services or self.policies or self.refused)


class Mesh:
    """The current mesh.

    Args:
        node: the name of this node. Empty means that every workload counts as local.
    """

    def __init__(self, *, node: str = "") -> None:
        self._node = node
        self._workloads: dict[WorkloadUid, Workload] = {}
        self._by_address: dict[str, Shared[str, Workload]] = {}
        self._by_name: Shared[tuple[str, str], Workload] = Shared()
        self._local: Shared[tuple[str, str, str], Workload] = Shared()
        self._local_identities: dict[SpiffeId, int] = {}
        self._entries: dict[ServiceKey, ServiceEntry] = {}
        self._services: dict[ServiceKey, Service] = {}
        self._staged: dict[ServiceKey, ServiceEntry] = {}
        self._by_hostname: Shared[str, Service] = Shared()
        self._by_vip: dict[str, Shared[str, Service]] = {}
        self._by_block: dict[str, Blocks[Service]] = {}
        self._refused = RefusedAddresses()
        self._authorization = Authorization()
        self._watchers: dict[int, Callable[[Changes], None]] = {}
        self._watched = 0
        #: The version of the whole mesh. It increases with each batch that changed the mesh.
        self.version = 0

    # Changes

    def apply(
        self,
        put: Iterable[Workload | Service | AuthorizationPolicy | RefusedResource] = (),
        removed: Iterable[str] = (),
        *,
        removed_policies: Iterable[str] = (),
    ) -> Changes:
        """Add, replace and remove values in one batch. Watchers are called once for the batch.

        Args:
            put: new values. Each replaces the value with the same name, except that a refused resource replaces
                no workload or service: its last readable version stays in use.
            removed: uids of workloads, ``namespace/hostname`` of services, and names of refused resources; absent
                names are skipped.
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
            elif self._refused.remove(name):
                changes.refused.add(name)
        for value in put:
            if isinstance(value, Workload):
                self._put_workload(value, changes)
            elif isinstance(value, Service):
                self._put_service(value, changes)
            elif isinstance(value, RefusedResource):
                if not self._has(value.name) and self._refused.put(value):
                    changes.refused.add(value.name)
            elif self._authorization.put(value):
                changes.policies.add(value.key)
        self._tell(changes)
        return changes

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
        if self._refused and self._refused.remove(uid):
            changes.refused.add(uid)
        if before is not None:
            self._unindex(before, workload, changes)
        self._workloads[uid] = workload
        if workload.network_mode is not NetworkMode.HOST_NETWORK:
            for host in dict.fromkeys(workload.addresses):
                self._by_address.setdefault(workload.network, Shared()).put(host, workload, before)
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
                entry = self._entries[key] = self._staged[key] = ServiceEntry(key)
            entry.put(Endpoint(uid, ports, workload.status))
            changes.endpoints.setdefault(key, set()).add(uid)

    def _remove_workload(self, workload: Workload, changes: Changes) -> None:
        changes.workloads.add(workload.uid)
        self._unindex(workload, None, changes)
        del self._workloads[workload.uid]

    def _unindex(self, old: Workload, new: Workload | None, changes: Changes) -> None:
        """Remove a workload from the indexes, except from entries that ``new`` will replace."""
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
        if self._refused and self._refused.remove(key):
            changes.refused.add(key)
        if before is not None:
            self._unindex_service(before, service)
        if entry is None:
            entry = self._entries[key] = ServiceEntry(key)
        self._staged.pop(key, None)
        self._services[entry.key] = service
        entry.become(service)
        self._by_hostname.put(_folded(service.hostname), service, before)
        for vip in dict.fromkeys(service.vips):
            self._by_vip.setdefault(vip.network, Shared()).put(vip.host, service, before)
        for cidr in dict.fromkeys(service.cidr_vips):
            self._by_block.setdefault(cidr.network, Blocks()).put(cidr.block, service, before)

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
        """Remove a service from the indexes, except from entries that ``new`` (with the same key) will replace."""
        if new is None:
            self._by_hostname.remove(_folded(old.hostname), old)
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

    def _has(self, name: str) -> bool:
        return name in self._workloads or name in self._services

    # Look-ups

    def workload(self, uid: str) -> Workload | None:
        """Return the workload with a uid."""
        return self._workloads.get(WorkloadUid(uid))

    def workload_at(self, network: str, host: str) -> Workload | None:
        """Return the workload at an address. If several workloads share it, the most specific one wins, then the
        newest.
        """
        of_network = self._by_address.get(network)
        found = of_network.get(host) if of_network is not None else None
        if not isinstance(found, list):
            return found
        return max(reversed(found), key=_specificity)

    def local_workload(self, name: str, namespace: str, service_account: str) -> Workload | None:
        """Return the workload of a pod on this node."""
        found = self._local.each((namespace, service_account, name))
        return next(iter(found), None)

    def service(self, key: str) -> Service | None:
        """Return the service named ``namespace/hostname``, without checking its visibility."""
        return self._services.get(ServiceKey(key))

    def policy(self, key: str) -> AuthorizationPolicy | None:
        """Return the policy named ``namespace/name``."""
        return self._authorization.policies.get(PolicyKey(key))

    def service_at(self, network: str, host: str, namespace: str | None = None) -> Service | None:
        """Return the service at a virtual address that a client of ``namespace`` can see. Exact addresses win over
        CIDR blocks.
        """
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

    def service_named(
        self, hostname: str, namespace: str | None = None, preferred: str = "", *, addressed: bool = False
    ) -> Service | None:
        """Return the service with a host name, in any case, that a client of ``namespace`` can see. Wildcards do
        not match. With ``addressed``, only services with virtual addresses are considered.
        """
        found: Iterable[Service] = self._by_hostname.each(_folded(hostname))
        if addressed:
            found = (service for service in found if service.vips)
        return _best(found, namespace, preferred)

    def workload_named(self, name: NamespacedHostname) -> Workload | None:
        """Return a workload with this host name and namespace."""
        return next(iter(self._by_name.each((name.namespace, name.hostname))), None)

    def refused(self, name: str) -> RefusedResource | None:
        """Return the refused resource with a name."""
        return self._refused.get(name)

    def refused_at(self, network: str, host: str) -> RefusedResource | None:
        """Return the refused resource at an address. A readable workload or service with exactly this address wins
        over it, and any readable one wins over a refused block.
        """
        if not self._refused:
            return None
        if self.workload_at(network, host) is not None:
            return None
        of_network = self._by_vip.get(network)
        if of_network is not None and of_network.get(host) is not None:
            return None
        exact = self._refused.at(network, host)
        if exact is not None or self.service_at(network, host) is not None:
            return exact
        return self._refused.holding(network, _address(host))

    def endpoints(self, key: str) -> Mapping[WorkloadUid, Endpoint]:
        """Return the endpoints of a service. Unhealthy endpoints are included only if the service accepts them.

        The result is a view of the current state, not a copy. Use it before the next change.
        """
        entry = self._entries.get(ServiceKey(key))
        return _NOTHING if entry is None or entry.service is None else entry.serving

    def all_endpoints(self, key: str) -> Mapping[WorkloadUid, Endpoint]:
        """Return all endpoints of a service, including unhealthy ones."""
        entry = self._entries.get(ServiceKey(key))
        return _NOTHING if entry is None else entry.all()

    def policies_for(self, workload: Workload) -> WorkloadPolicies:
        """Return the policies for connections to a workload. The result is cached until one of its policies
        changes.
        """
        return self._authorization.policies_for(workload)

    # For dumps and metrics

    def workloads(self) -> Iterator[Workload]:
        """Iterate over all workloads, in no particular order."""
        return iter(self._workloads.values())

    def services(self) -> Iterator[Service]:
        """Iterate over all services, in no particular order."""
        return iter(self._services.values())

    def policies(self) -> Iterator[AuthorizationPolicy]:
        """Iterate over all policies, in no particular order."""
        return iter(self._authorization.policies.values())

    def refused_resources(self) -> Iterator[RefusedResource]:
        """Iterate over all refused resources without a readable version, in no particular order."""
        return iter(self._refused.values())

    def counts(self) -> Mapping[str, int]:
        """Return the numbers of workloads, services and policies."""
        return {
            "workloads": len(self._workloads),
            "services": len(self._services),
            "policies": len(self._authorization.policies),
        }

    def staged(self) -> Mapping[ServiceKey, Mapping[WorkloadUid, Endpoint]]:
        """Return the endpoints whose service has not been received."""
        return {key: entry.all() for key, entry in self._staged.items()}

    @property
    def local_identities(self) -> Collection[SpiffeId]:
        """Return the identities of workloads on this node that use tunnels. Their certificates are worth
        requesting in advance.
        """
        return self._local_identities.keys()


def _turn(identity: SpiffeId, there: set[SpiffeId], back: set[SpiffeId]) -> None:
    """Record the change of an identity in ``there``. If ``back`` has the opposite change, the two cancel out."""
    if identity in back:
        back.remove(identity)
    else:
        there.add(identity)


def _folded(hostname: str) -> str:
    """Return a host name in lower case (RFC 4343). A name in lower case stays the same object, to save memory."""
    lower = hostname.lower()
    return hostname if lower == hostname else lower


def _pod_of(workload: Workload) -> tuple[str, str, str]:
    return workload.namespace, workload.service_account, workload.name


def _wants_certificate(workload: Workload) -> bool:
    """Return whether this proxy terminates tunnels for the workload. A workload that terminates its tunnels itself
    has its own certificate.
    """
    return workload.protocol is Protocol.HBONE and not workload.native_tunnel


def _specificity(workload: Workload) -> tuple[bool, bool]:
    """Return the rank of a workload among workloads with the same address. A pod outranks an entry that only
    refers to the pod's address.
    """
    return "//Pod/" in workload.uid, workload.protocol is Protocol.HBONE


def _visible(service: Service, namespace: str | None) -> bool:
    return namespace is None or service.visibility is Visibility.PUBLIC or service.namespace == namespace


def _best(candidates: Iterable[Service], namespace: str | None, preferred: str = "") -> Service | None:
    """Return the best of several services with the same name or address. The order is: in the client's namespace,
    canonical, in the preferred namespace, first.
    """
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
