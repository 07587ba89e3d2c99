"""Determines the target of an inbound tunnel request: the application's address, and the service.

A CONNECT can name this pod's address or a service's hostname. The proxy dials only this pod. It refuses a request
for an address other than the tunnel's own destination, unless this pod is the waypoint of the requested address.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from hbone.errors import InvalidHeader
from hbone.tunnel_headers import parse_authority
from xds.model.address import SocketAddress, canonical
from xds.model.facts import ConnectionFacts, PeerCertificate
from xds.model.mesh import Mesh
from xds.model.service import Service
from xds.model.workload import AppProtocol, GatewayAddress, NamespacedHostname, ServiceKey, Workload
from ztunnel.proxy.dataplane.reasons import Reason
from ztunnel.proxy.istio.accounting.outcome import RECURSIVE_CALL, EarlyDeny


class RequestRefused(EarlyDeny):
    """The proxy refuses a request, and answers with ``status``."""

    def __init__(self, status: int, text: str, reason: Reason = Reason.BAD_REQUEST) -> None:
        super().__init__(text, reason)
        self.status = status


@dataclass(slots=True)
class InboundTarget:
    """The destination of a request.

    Attributes:
        address: the application's address, which policies evaluate.
        proxy_destination: the requested address, sent in a PROXY header. None: send no header.
        service: the service named by the request's authority, if any.
    """

    address: SocketAddress
    proxy_destination: SocketAddress | None = None
    service: Service | None = None


def inbound_target(
    authority: str | bytes | None,
    workload: Workload,
    host: str,
    mesh: Mesh,
    *,
    network: str,
    illegal_ports: Collection[int],
) -> InboundTarget:
    """Decide which address a CONNECT request is forwarded to.

    Args:
        authority: the request's authority. None if it was missing.
        workload: the destination pod's workload.
        host: the pod's address, which is the destination of the tunnel connection.
        mesh: the current mesh.
        network: the proxy's own network.
        illegal_ports: the proxy's own ports in the pod.

    Raises:
        RequestRefused: the request is refused, with the Rust ztunnel's status and text.
    """
    raw = authority.encode() if isinstance(authority, str) else authority
    try:
        wanted = parse_authority(raw)
    except InvalidHeader:
        shown = raw.decode("ascii", "backslashreplace") if raw is not None else ""
        raise RequestRefused(400, f"no valid authority pseudo header: {shown}") from None
    if isinstance(wanted.host, str):
        target = _by_name(wanted.host, wanted.port, workload, host, mesh, network)
    else:
        address = SocketAddress(canonical(wanted.host), wanted.port)
        if not _may_name(address.host, workload, host, mesh, network):
            raise RequestRefused(400, f"ip mismatch: {host} != {address.host}")
        target = InboundTarget(SocketAddress(host, wanted.port), address)
    # Only the requested port is checked. The port of an application tunnel comes from configuration.
    if target.address.port in illegal_ports:
        raise RequestRefused(503, RECURSIVE_CALL, Reason.RECURSIVE_CALL)
    tunnel = workload.application_tunnel
    port = tunnel.port if tunnel is not None and tunnel.port else target.address.port
    has_header = tunnel is not None and tunnel.protocol is AppProtocol.PROXY
    return InboundTarget(
        SocketAddress(host, port), target.proxy_destination if has_header else None, target.service
    )


def plain_target(destination: SocketAddress, illegal_ports: Collection[int]) -> InboundTarget:
    """Return the target of a captured plain connection: its original destination.

    Raises:
        RequestRefused: the destination is a port of the proxy itself. A plain client gets no answer, so the status
            is unused.
    """
    if destination.port in illegal_ports:
        raise RequestRefused(503, RECURSIVE_CALL, Reason.RECURSIVE_CALL)
    return InboundTarget(destination)


def inbound_facts(
    source: SocketAddress, application: SocketAddress, peer: PeerCertificate | None
) -> ConnectionFacts:
    """Collect the facts that policies evaluate about a connection to a pod.

    Args:
        source: the client's address.
        application: the application's address.
        peer: the client's certificate from its tunnel's handshake. ``None`` for plain text.
    """
    facts = ConnectionFacts(source=source, direct_source=source, destination=application, peer=peer)
    if peer is not None:
        facts.transport_protocol = "tls"
    return facts


def _by_name(hostname: str, port: int, workload: Workload, host: str, mesh: Mesh, network: str) -> InboundTarget:
    service = mesh.service_named(hostname, workload.namespace)
    if service is None:
        raise RequestRefused(503, f"no service or workload for hostname: {hostname}")
    endpoint = mesh.endpoints(service.key).get(workload.uid)
    if not (
        endpoint is not None
        or service.key in workload.services
        or workload.application_tunnel is not None
        or _is_waypoint_of(service, workload, host, mesh, network)
    ):
        # Without this check, a client could have its connections counted in the metrics of any service.
        raise RequestRefused(503, f"requested service {hostname} found, but this workload is no endpoint of it")
    mapped = endpoint.ports.get(port) if endpoint is not None else workload.services.get(service.key, {}).get(port)
    target = mapped or service.ports.get(port)
    if not target:
        raise RequestRefused(503, f"requested service {hostname}:{port} found, but cannot resolve port")
    address = None
    if workload.application_tunnel is not None:
        vips = sorted(service.vips, key=lambda vip: (vip.network != network, ":" in vip.host))
        if not vips:
            raise RequestRefused(503, f"requested service {hostname} found, but has no IP addresses")
        address = SocketAddress(vips[0].host, port)
    return InboundTarget(SocketAddress(host, target), address, service)


def _may_name(wanted: str, workload: Workload, host: str, mesh: Mesh, network: str) -> bool:
    """Return whether a tunnel to ``host`` can request another address, ``wanted``. Always true if the application
    terminates tunnels itself, because it then decides.
    """
    if wanted == host or workload.application_tunnel is not None:
        return True
    there = mesh.workload_at(network, wanted) or mesh.service_at(network, wanted)
    return there is not None and _is_waypoint_of(there, workload, host, mesh, network)


def _is_waypoint_of(there: Workload | Service, workload: Workload, host: str, mesh: Mesh, network: str) -> bool:
    waypoints = [there.waypoint] if there.waypoint is not None else []
    if isinstance(there, Service):
        waypoints.extend(weighted.destination for weighted in there.weighted_waypoints)
    return any(_is_waypoint(waypoint, workload, host, mesh, network) for waypoint in waypoints)


def _is_waypoint(gateway: GatewayAddress, workload: Workload, host: str, mesh: Mesh, network: str) -> bool:
    destination = gateway.destination
    found: Workload | Service | None
    if isinstance(destination, NamespacedHostname):
        found = mesh.service(str(destination)) or mesh.workload_named(destination)
    else:
        found = mesh.workload_at(destination.network, destination.host) or mesh.service_at(
            destination.network, destination.host
        )
    if isinstance(found, Service):
        return workload.uid in mesh.endpoints(found.key) or found.key in workload.services
    return found is not None and found.network == network and host in found.addresses


def inbound_service(target: InboundTarget, workload: Workload, mesh: Mesh, meant: str | None) -> Service | None:
    """Return the service that a connection is attributed to: the requested service, or else a service of the
    workload with the dialled port.

    Args:
        target: the application's address.
        workload: the pod's workload.
        mesh: the current mesh.
        meant: the host in the request's ``forwarded`` header, if any.
    """
    if target.service is not None:
        candidates = [target.service]
    else:
        candidates = [found for key in workload.services if (found := mesh.service(key)) is not None]
    if meant is not None:
        for service in candidates:
            if service.hostname == meant:
                return service
    for service in candidates:
        if _has_port(service, workload.services.get(ServiceKey(service.key), {}), target.address.port):
            return service
    return None


def _has_port(service: Service, endpoint: Mapping[int, int], port: int) -> bool:
    return any((endpoint.get(number) or target) == port for number, target in service.ports.items())
