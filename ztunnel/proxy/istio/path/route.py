"""Decides where a pod's connection goes in an Istio mesh. Pure.

Follows the Rust ztunnel's routing of outbound connections. The caller resolves host names and dials. If an
endpoint fails without an answer, the caller calls :func:`route_for` again with this endpoint in ``avoid``.

:func:`route_for` is the table of decisions, row by row. The functions below it find the object at an address,
choose a service's endpoint (``balance.py``) with its port and address, and find waypoints and gateways. If an
address belongs to a workload and to a service, the check for a waypoint uses the workload, but the choice of an
endpoint uses the service. This difference is on purpose.
"""

from collections.abc import Callable, Collection
from dataclasses import dataclass, replace

from xds.model.address import SocketAddress
from xds.model.identity import SpiffeId
from xds.model.mesh import Mesh
from xds.model.service import BalancerMode, IpFamilies, Service
from xds.model.workload import GatewayAddress, NamespacedHostname, NetworkAddress, Protocol, Workload, WorkloadUid
from ztunnel.proxy.dataplane.reasons import Reason
from ztunnel.proxy.istio.accounting.outcome import EarlyDeny
from ztunnel.proxy.istio.path.balance import Choose, Labels, Question, pick, question_of

#: The port of tunnels.
HBONE_PORT = 15008

_FAMILIES = {
    None: (4, 6),
    IpFamilies.IPV4: (4,),
    IpFamilies.IPV6: (6,),
    IpFamilies.DUAL: (4, 6),
}


@dataclass(frozen=True, slots=True)
class Named:
    """A workload without addresses: the caller resolves ``hostname``, and prefers addresses of the dialled family.

    ``families`` holds 4, 6 or both: the IP versions that the service permits.
    """

    workload: Workload
    hostname: str
    port: int
    families: tuple[int, ...] = (4, 6)


Target = SocketAddress | Named


@dataclass(slots=True, kw_only=True)
class Direct:
    """A plain TCP connection, to an unknown address (passthrough) or to a workload outside the mesh."""

    target: Target
    workload: Workload | None = None
    service: Service | None = None


@dataclass(slots=True, kw_only=True)
class Tunnel:
    """One HBONE tunnel.

    Attributes:
        target: the address of the tunnel's far end.
        authority: the CONNECT's authority, ``host:port``. If ``target`` is an unresolved name and the tunnel ends
            there, the host is that name, and :meth:`at` replaces it by the address.
        identities: the accepted SPIFFE identities of the peer, in order (part of the pool's key).
        workload: the workload at the tunnel's end: an application, or a waypoint.
        service: the dialled service, if any.
        waypoint: whether the tunnel ends at a waypoint.
    """

    target: Target
    authority: str
    identities: tuple[str, ...]
    workload: Workload
    service: Service | None = None
    waypoint: bool = False

    def at(self, host: str) -> "Tunnel":
        """Return this tunnel with its target's name resolved to ``host``. A tunnel to an address is returned
        unchanged.
        """
        if not isinstance(self.target, Named):
            return self
        authority = self.authority
        if not self.waypoint:
            authority = str(SocketAddress(host, int(authority.rpartition(":")[2])))
        return replace(self, target=SocketAddress(host, self.target.port), authority=authority)


@dataclass(slots=True, kw_only=True)
class DoubleTunnel:
    """A tunnel inside a tunnel, through another network's gateway.

    Attributes:
        target, identities: the gateway's address and accepted identities, for the outer tunnel.
        authority: the authority of both CONNECTs, ``hostname:port`` of the service.
        inner_identities: the accepted identities of the far end. Empty accepts no peer.
        gateway: the gateway's workload.
        workload: the remote workload.
        service: the dialled service.
    """

    target: Target
    authority: str
    identities: tuple[str, ...]
    inner_identities: tuple[str, ...]
    gateway: Workload
    workload: Workload
    service: Service


Route = Direct | Tunnel | DoubleTunnel

#: A function that chooses the endpoint of a service for a connection, or returns None if there is none.
Draw = Callable[[Question], WorkloadUid | None]


class RouteRefused(EarlyDeny):
    """No route exists.

    Attributes:
        workload: the unreachable workload, if one was chosen. Other endpoints of the service can be reachable.
        because: a more precise reason, shown only by ``ztunnel explain``.
    """

    def __init__(self, text: str, reason: Reason, workload: Workload | None = None, because: str = "") -> None:
        super().__init__(text, reason)
        self.workload = workload
        self.because = because


class Missing(Exception):
    """With on-demand xDS, the caller must first request the resource ``key`` (``network/ip``, uid or
    ``ns/hostname``).
    """

    def __init__(self, key: str) -> None:
        super().__init__(key)
        self.key = key


@dataclass(slots=True, kw_only=True)
class Client:
    """The pod that dials: its workload, its socket's local address, and the proxy's own network."""

    workload: Workload
    host: str
    network: str = ""


def source_host(workload: Workload, seen: str, towards: str) -> str | None:
    """Return a workload's source address for dialling ``towards``, or ``None`` if no address has its family.

    Args:
        workload: the pod's workload.
        seen: the local address of the application's socket. Preferred if it belongs to the pod and has the family
            of ``towards``.
        towards: an address of the next hop.
    """
    same_family = [host for host in workload.addresses if _family(host) == _family(towards)]
    return seen if seen in same_family else next(iter(same_family), None)


def route_for(
    client: Client,
    destination: SocketAddress,
    mesh: Mesh,
    choose: Choose,
    *,
    avoid: Collection[WorkloadUid] = (),
    known: Callable[[str], bool] | None = None,
    prefer: tuple[Labels, ...] = (),
    draw: Draw | None = None,
) -> Route:
    """Decide where a connection goes. The data path calls it for each attempt.

    Args:
        client: the pod that dials.
        destination: the dialled address.
        mesh: the current mesh.
        choose: returns a random number below its argument.
        avoid: recently failed endpoints, used only if there are no others.
        known: with on-demand xDS, returns whether a key was requested lately. ``None`` if the mesh is complete.
        prefer: restricts the choice among the dialled service's endpoints; see
            :func:`~ztunnel.proxy.istio.path.balance.pick`.
        draw: chooses the endpoint for each question, instead of a random choice by ``choose`` and ``avoid``.

    Raises:
        RouteRefused: no route exists.
        Missing: with on-demand xDS, a resource must be requested first.
    """
    search = _Search(client, destination, mesh, choose, avoid, known, prefer, draw)
    source = client.workload

    # Rows 1 to 3: a service with a waypoint. The waypoint decides for all workloads of the service. The exception
    # is a captured waypoint that dials its own service, because it has already decided. (The Rust ztunnel would
    # send this connection back to the waypoint in an endless loop.)
    dialled = search.at(client.network, destination.host)
    if dialled is None and source.network != client.network:
        # The proxy's NETWORK is older than the cluster's. (The Rust ztunnel then bypasses waypoints of services.)
        dialled = search.at(source.network, destination.host)
    gateway = search.waypoint_of(dialled) if isinstance(dialled, Service) else None
    if isinstance(dialled, Service) and gateway is not None and not search.is_client(gateway):
        waypoint = search.waypoint(gateway)
        if waypoint.workload.network != source.network:
            return search.through_gateway(waypoint, dialled)
        return _to_waypoint(waypoint, destination, dialled)

    # Rows 4 and 5: no workload is found. Connections to a service without endpoints fail. An address without a
    # service is outside the mesh, and connections to it pass through.
    found, service = search.upstream()
    if found is None:
        service = service or (dialled if isinstance(dialled, Service) else None)
        if service is not None and service.mode is not BalancerMode.PASSTHROUGH:
            because = "" if destination.port in service.ports else f"the service has no port {destination.port}"
            raise RouteRefused(f"no healthy upstream: {destination}", Reason.NO_ENDPOINT, because=because)
        return Direct(target=destination)

    # Row 6: a workload in another network is reached through that network's gateway, which accepts only services.
    if found.workload.network != source.network:
        if found.service is None:
            raise RouteRefused(f"no service for target address: {destination}", Reason.NO_ROUTE, found.workload)
        return search.through_gateway(found, found.service)

    # Row 7: a workload with a waypoint, which is used only by clients that dial the workload itself. Traffic to a
    # service uses only the service's waypoint. A service that has the address of a workload does not change what
    # the client dialled.
    gateway = found.workload.waypoint
    if not isinstance(dialled, Service) and gateway is not None and not search.is_client(gateway):
        waypoint = search.waypoint(gateway)
        if waypoint.workload.network != source.network:
            raise RouteRefused(f"no service for target address: {destination}", Reason.NO_ROUTE, waypoint.workload)
        return _to_waypoint(waypoint, destination, found.service)

    # Rows 8 and 9: connect to the workload itself.
    target = found.target()
    if found.workload.protocol is not Protocol.HBONE:
        return Direct(target=target, workload=found.workload, service=found.service)
    return Tunnel(
        target=_with_port(target, HBONE_PORT),
        authority=f"{target.hostname}:{target.port}" if isinstance(target, Named) else str(target),
        identities=found.identities,
        workload=found.workload,
        service=found.service,
    )


def _to_waypoint(waypoint: "_Upstream", destination: SocketAddress, service: Service | None) -> Tunnel:
    return Tunnel(
        target=waypoint.target(),
        authority=str(destination),
        identities=waypoint.identities,
        workload=waypoint.workload,
        service=service,
        waypoint=True,
    )


def _with_port(target: Target, port: int) -> Target:
    return replace(target, port=port) if isinstance(target, Named) else SocketAddress(target.host, port)


@dataclass(slots=True)
class _Upstream:
    """The workload to connect to.

    Attributes:
        service: the service whose endpoint was chosen, if any.
        like: the preferred address. If the workload does not have it, an address of the same family is preferred.
    """

    workload: Workload
    port: int
    service: Service | None
    like: str

    @property
    def service_identities(self) -> tuple[str, ...]:
        """The identities that the service allows for its endpoints. Invalid SPIFFE ids are left out."""
        return tuple(_identities(self.service.subject_alt_names)) if self.service is not None else ()

    @property
    def identities(self) -> tuple[str, ...]:
        """The identities accepted from the workload: its own, and the identities that the service allows."""
        return (*self.service_identities, str(self.workload.identity))

    def target(self) -> Target:
        """Return the workload's address and port, or its host name.

        Raises:
            RouteRefused: the workload has neither a usable address nor a name.
        """
        workload = self.workload
        if self.like in workload.addresses:
            return SocketAddress(self.like, self.port)
        families = _FAMILIES[self.service.ip_families if self.service is not None else None]
        allowed = [host for host in workload.addresses if _family(host) in families]
        same = [host for host in allowed if _family(host) == _family(self.like)]
        if allowed:
            return SocketAddress((same or allowed)[0], self.port)
        if workload.hostname:
            return Named(workload, workload.hostname, self.port, families)
        raise _no_way(workload)


def _no_way(workload: Workload) -> RouteRefused:
    """Return the error for a connection to a workload that cannot be reached."""
    shown = workload.name or workload.uid
    return RouteRefused(f"no valid routing destination for workload: {shown}", Reason.NO_ROUTE, workload)


def _identities(names: Collection[str]) -> list[str]:
    found = []
    for name in names:
        try:
            found.append(str(SpiffeId.parse(name)))
        except ValueError:
            continue  # one malformed name must not invalidate the others
    return found


def _family(host: str) -> int:
    return 6 if ":" in host else 4


@dataclass(slots=True)
class _Search:
    """Looks up the mesh's resources for one routing decision."""

    client: Client
    destination: SocketAddress
    mesh: Mesh
    choose: Choose
    avoid: Collection[WorkloadUid]
    known: Callable[[str], bool] | None
    prefer: tuple[Labels, ...]
    draw: Draw | None

    def at(self, network: str, host: str) -> Workload | Service | None:
        """Return the workload at an address, or else the service at this address.

        Raises:
            RouteRefused: the address belongs to a workload or service that could not be read. It may require a
                tunnel or a waypoint.
            Missing: with on-demand xDS, the address must be requested first.
        """
        refused = self.mesh.refused_at(network, host)
        if refused is not None:
            raise RouteRefused(
                f"configuration of {refused.name} was refused: {refused.reason}", Reason.CONTROL_PLANE
            )
        found = self.mesh.workload_at(network, host) or self._service_at(network, host)
        if found is None:
            self._ask(f"{network}/{host}")
        return found

    def _service_at(self, network: str, host: str) -> Service | None:
        return self.mesh.service_at(network, host, self.client.workload.namespace)

    def _ask(self, key: str) -> None:
        if self.known is not None and not self.known(key):
            raise Missing(key)

    # The workload to connect to

    def upstream(self) -> "tuple[_Upstream | None, Service | None]":
        """Return the workload that a connection to the dialled address goes to, and the service at this address,
        if any.
        """
        network, destination = self.client.workload.network, self.destination
        if network != self.client.network:
            self.at(network, destination.host)  # raises Missing if the address must be requested first
        service = self._service_at(network, destination.host)
        return self._at_address(network, destination, destination.host, waypoint=False), service

    def _at_address(
        self, network: str, address: SocketAddress, like: str, *, waypoint: bool
    ) -> "_Upstream | None":
        """Return an endpoint of the service at an address, or else the workload at that address."""
        service = self._service_at(network, address.host)
        if service is not None:
            if service.mode is BalancerMode.PASSTHROUGH:
                return None
            return self._endpoint(service, address.port, like, waypoint=waypoint, by_name=False)
        workload = self.mesh.workload_at(network, address.host)
        return None if workload is None else _Upstream(workload, address.port, None, like)

    def _endpoint(
        self, service: Service, port: int, like: str, *, waypoint: bool, by_name: bool
    ) -> "_Upstream | None":
        question = question_of(service, port, self.client.workload, waypoint=waypoint, by_name=by_name)
        if not waypoint and port not in service.ports:
            return None
        if self.draw is not None:
            uid = self.draw(question)
        else:
            # Addons' preferences do not apply to waypoints and gateways, whose instances are interchangeable.
            prefer = () if waypoint or by_name else self.prefer
            uid = pick(self.mesh, question, self.choose, self.avoid, prefer)
        workload = self.mesh.workload(uid) if uid is not None else None
        if uid is None or workload is None:
            return None
        target = self.mesh.endpoints(service.key)[uid].ports.get(port) or service.ports.get(port)
        if not target and workload.application_tunnel is not None and workload.application_tunnel.port:
            target = port
        if not target and workload.network != self.client.workload.network:
            target = port  # unused: the gateway gets the service's port, and the other network maps it
        return _Upstream(workload, target, service, like) if target else None

    # Waypoints and gateways

    def waypoint_of(self, service: Service) -> GatewayAddress | None:
        """Return a reference to the service's waypoint, chosen by weight if there are several."""
        weighted = service.weighted_waypoints
        total = sum(waypoint.weight for waypoint in weighted)
        if not total:
            return service.waypoint
        left = self.choose(total)
        for waypoint in weighted:
            if left < waypoint.weight:
                return waypoint.destination
            left -= waypoint.weight
        raise AssertionError("a draw lies below the sum of the weights")

    def waypoint(self, gateway: GatewayAddress) -> _Upstream:
        """Return a waypoint's workload, which is the tunnel's destination.

        Raises:
            RouteRefused: the waypoint has no usable workload.
        """
        found = self._resolved(gateway, waypoint=True)
        if found is None:
            name = gateway.destination
            shown = name.hostname if isinstance(name, NamespacedHostname) else name
            raise RouteRefused(f"unknown waypoint: waypoint {shown} not found", Reason.NO_WAYPOINT)
        return found

    def through_gateway(self, remote: _Upstream, service: Service) -> DoubleTunnel:
        """Return the double tunnel through another network's gateway.

        Args:
            remote: the workload in the other network.
            service: the service to request from the gateway.

        Raises:
            RouteRefused: there is no gateway, or the gateway has no workload.
        """
        workload = remote.workload
        if workload.network_gateway is None:
            raise _no_way(workload)
        gateway = self._resolved(workload.network_gateway, waypoint=False)
        if gateway is None:
            shown = workload.network_gateway.destination
            raise RouteRefused(f"unknown network gateway: {shown} not found", Reason.NO_GATEWAY, workload)
        try:
            target = gateway.target()
        except RouteRefused as refused:
            raise RouteRefused(str(refused), refused.reason, workload) from refused
        return DoubleTunnel(
            target=target,
            authority=f"{service.hostname}:{self.destination.port}",
            identities=gateway.identities,
            inner_identities=remote.service_identities,
            gateway=gateway.workload,
            workload=workload,
            service=service,
        )

    def _resolved(self, gateway: GatewayAddress, *, waypoint: bool) -> _Upstream | None:
        destination, port = gateway.destination, gateway.hbone_mtls_port
        if isinstance(destination, NetworkAddress):
            self.at(destination.network, destination.host)
            address = SocketAddress(destination.host, port)
            return self._at_address(destination.network, address, destination.host, waypoint=waypoint)
        found = self._named(destination)
        if isinstance(found, Service):
            return self._endpoint(found, port, self.destination.host, waypoint=waypoint, by_name=True)
        return None if found is None else _Upstream(found, port, None, self.destination.host)

    def _named(self, name: NamespacedHostname) -> Service | Workload | None:
        found = self.mesh.service(str(name)) or self.mesh.workload_named(name)
        if found is None:
            self._ask(str(name))
        return found

    def is_client(self, gateway: GatewayAddress) -> bool:
        """Return whether the client is itself an instance of this waypoint, by its identity and its address."""
        client = self.client
        own = [self.mesh.workload_at(client.workload.network, client.host)]
        if client.host in client.workload.addresses:
            own.append(client.workload)
        destination = gateway.destination
        found = (
            self.at(destination.network, destination.host)
            if isinstance(destination, NetworkAddress)
            else self._named(destination)
        )
        for workload in own:
            if workload is None or workload.identity != client.workload.identity:
                continue
            if isinstance(found, Service):
                # An instance that is unhealthy or terminating is not among the endpoints, but still has requests.
                if found.key in workload.services:
                    return True
            elif found is not None and found.uid == workload.uid:
                return True
        return False
