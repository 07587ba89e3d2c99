"""Prepares connections of an Istio mesh for a pod's packet capture (tap): addresses, names and comments in its
packets.

Imported only for the first tapped connection: the callers check for a tap first
(:attr:`ztunnel.proxy.istio.path.pod_context.PodContext.tap`).
"""

from __future__ import annotations

from collections.abc import Iterator

from hbone.aio.end import End
from hbone.aio.observed import ObservedEnd
from hbone.aio.tunnel import Tunnel
from hbone.events import Headers
from hbone.tunnel_headers import first
from xds.model.address import SocketAddress
from xds.model.service import Service
from xds.model.workload import Workload
from ztunnel.proxy.istio.accounting.access_record import Direction, Record
from ztunnel.proxy.istio.path.pod_connection import PodConnection
from ztunnel.proxy.tap import request as tap
from ztunnel.proxy.tap.capture import Capture


def observed(
    capture: Capture,
    entry: PodConnection,
    application: End,
    tunnel: End | None,
    dialled: SocketAddress,
    headers: Headers = (),
) -> End:
    """Return the application's end wrapped by the tap, or unchanged if the tap does not capture this connection.

    Args:
        capture: the tap.
        entry: the connection's entry, with the far side already known.
        application: the connection's end towards the pod's own application.
        tunnel: the connection's other end, which is shown in comments if it is a tunnel.
        dialled: the address that the client dialled (outbound), or the application's (inbound).
        headers: the CONNECT's headers (inbound).
    """
    stream = capture.stream(_facts(entry, tunnel, dialled, _client(entry.record.source, headers)))
    return ObservedEnd(application, stream) if stream is not None else application


def _client(source: SocketAddress, headers: Headers) -> SocketAddress:
    """Return the client's address and port.

    A tunnel connection has the client's address, but a port of the client's proxy. If that proxy sends the
    client's own port in a header field, this port is used. The address in the field is ignored, because the kernel
    reports the address.
    """
    for part in (first(headers, b"forwarded") or b"").decode("latin-1").split(";"):
        name, _, value = part.strip().partition("=")
        if name == "for":
            try:
                told = SocketAddress.parse(value.strip('"'))
            except ValueError:
                return source
            return told if told.host == source.host else source
    return source


def _facts(
    entry: PodConnection, tunnel: End | None, dialled: SocketAddress, client: SocketAddress
) -> tap.StreamFacts:
    record = entry.record
    outbound = record.direction is Direction.OUTBOUND
    peers, ports = set[str](), set[int]()
    if outbound:
        peers |= {dialled.host, record.destination.host}
        peers |= _names(record.destination_workload) | _service_names(record.service)
        host, _, port = record.hbone_authority.rpartition(":")
        peers.add(host.strip("[]"))
        ports.add(int(port) if port.isascii() and port.isdigit() else record.destination.port)
        identity = record.destination_identity
    else:
        peers |= {record.source.host} | _names(record.source_workload)
        identity = record.source_identity
    if identity is not None and record.secured:
        peers.add(str(identity))
    return tap.StreamFacts(
        direction=tap.Direction.OUTBOUND if outbound else tap.Direction.INBOUND,
        client=client,
        server=dialled,
        peers=frozenset(peers - {""}),
        ports=frozenset(ports),
        notes=tuple(_notes(entry, tunnel)),
    )


def _notes(entry: PodConnection, tunnel: End | None) -> Iterator[str]:
    record = entry.record
    yield f"{_side(record, source=True)} -> {_side(record, source=False)}"
    if record.service is not None:
        yield f"service {record.service.namespace}/{record.service.hostname}"
    if isinstance(tunnel, Tunnel):
        yield _wire(record, tunnel)
    elif record.hbone_authority:
        yield f"node-local tunnel, nothing sent over the network, authority {record.hbone_authority}"
    else:
        yield f"plain TCP, no tunnel; {_towards(record)}"


def _wire(record: Record, tunnel: Tunnel) -> str:
    own = SocketAddress(*tunnel.connection.local_name)
    ends = (
        f"{own} -> {record.destination}" if record.direction is Direction.OUTBOUND else f"{record.source} -> {own}"
    )
    return f"HBONE connection {ends}, stream {tunnel.stream_id}, authority {record.hbone_authority}"


def _towards(record: Record) -> str:
    return f"from {record.source}" if record.direction is Direction.INBOUND else f"to {record.destination}"


def _side(record: Record, *, source: bool) -> str:
    workload = record.source_workload if source else record.destination_workload
    identity = record.source_identity if source else record.destination_identity
    address = record.source if source else record.destination
    shown = f"{workload.namespace}/{workload.name}" if workload is not None else str(address)
    return f"{shown} ({identity})" if identity is not None and record.secured else shown


def _names(workload: Workload | None) -> set[str]:
    if workload is None:
        return set()
    return {workload.name, f"{workload.namespace}/{workload.name}", workload.uid}


def _service_names(service: Service | None) -> set[str]:
    if service is None:
        return set()
    return {service.hostname, service.name, f"{service.namespace}/{service.name}"}
