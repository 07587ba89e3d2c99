"""Feeds a pod's connections to a tap (a packet capture) in Envoy's dialect. Imported only where taps are
permitted.

A tap names its pod by address, because Envoy's dialect knows pods only by address. A connection belongs to the
tapped pod if its client or its application has the pod's address. A connection between two pods of the node can
match at both ends. Each end is then captured at its own socket.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Iterator

from hbone.aio.end import End
from hbone.aio.observed import ObservedEnd
from hbone.aio.tunnel import Tunnel
from xds.model.address import SocketAddress, canonical
from ztunnel.proxy.envoy.listeners.connections import Connections
from ztunnel.proxy.envoy.path.dial import ClusterUpstream
from ztunnel.proxy.envoy.stream.stream_info import StreamInfo
from ztunnel.proxy.tap.capture import Capture
from ztunnel.proxy.tap.request import Direction, StreamFacts
from ztunnel.proxy.tap.taps import CannotTap, Carry, Taps


class TappedAddresses:
    """Implements :class:`ztunnel.proxy.tap.taps.TapSource` for Envoy's dialect."""

    def __init__(self, taps: Taps, connections: Connections) -> None:
        self._taps = taps
        self._connections = connections

    async def open_connections(self, pod: str) -> int:
        """Return the number of a pod's open connections. ``pod`` is an address."""
        try:
            host = canonical(ipaddress.ip_address(pod))
        except ValueError:
            raise CannotTap(f"{pod}: in Envoy's dialect a pod is named by its address") from None
        infos = (each.info for each in self._connections)
        return sum(host in (info.source.host, info.destination.host) for info in infos)

    def carriers(self) -> list[Carry]:
        return [self._taps.carry]


def observed_client(capture: Capture, info: StreamInfo, upstream: ClusterUpstream, client: End) -> End:
    """Return the client's end wrapped by a tap, or unchanged if no tap captures the connection.

    Args:
        capture: the tap of the client's pod.
        info: the first hop.
        upstream: the open upstream, with the hops behind internal listeners.
        client: the client's end.
    """
    last = upstream.hops[-1].info if upstream.hops else info
    names = {info.destination.host, _dialled_host(info), _dialled_host(last), *last.upstream_uri_sans}
    ports = {address.port for each in (info, last) if (address := _dialled(each)) is not None}
    _, _, port = last.tunnel_authority.rpartition(":")
    facts = StreamFacts(
        direction=Direction.OUTBOUND,
        client=info.source,
        server=info.destination,
        peers=frozenset(names - {""}),
        ports=frozenset(ports | ({int(port)} if port.isascii() and port.isdigit() else set())),
        notes=tuple(_outbound_notes(info, last, upstream.end)),
    )
    stream = capture.stream(facts)
    return ObservedEnd(client, stream) if stream is not None else client


def observed_application(taps: Taps, info: StreamInfo, application: End, tunnel: End | None = None) -> End:
    """Return the application's end wrapped by a tap, or unchanged if no tap captures the connection.

    Args:
        taps: this process's taps.
        info: the last hop, whose endpoint is the application.
        application: the application's end. A tunnel is not wrapped, because it leads to another proxy.
        tunnel: the other end, if the connection arrived in a tunnel.
    """
    address = _dialled(info)
    if address is None or isinstance(application, Tunnel):
        return application
    capture = taps.of(address.host)
    if capture is None:
        return application
    facts = StreamFacts(
        direction=Direction.INBOUND,
        client=info.source,
        server=address,
        peers=frozenset({info.source.host, *_peers(info)}),
        notes=tuple(_inbound_notes(info, address, tunnel)),
    )
    stream = capture.stream(facts)
    return ObservedEnd(application, stream) if stream is not None else application


def _outbound_notes(info: StreamInfo, last: StreamInfo, end: End) -> Iterator[str]:
    shown = ", ".join(last.upstream_uri_sans)
    yield f"{info.source} -> {info.destination}{f' ({shown})' if shown else ''}"
    yield f"listener {info.listener}, cluster {info.cluster}{f', then {last.cluster}' if last is not info else ''}"
    if isinstance(end, Tunnel):
        own = SocketAddress(*end.connection.local_name)
        authority = last.tunnel_authority
        yield f"HBONE connection {own} -> {last.upstream_host}, stream {end.stream_id}, authority {authority}"
    elif last.authority:
        yield f"node-local tunnel, nothing sent over the network, authority {last.authority}"
    else:
        yield f"plain TCP, no tunnel; to {last.upstream_host}"


def _inbound_notes(info: StreamInfo, address: SocketAddress, tunnel: End | None) -> Iterator[str]:
    own = ", ".join(info.tls.local_uri_sans) if info.tls is not None else ""
    client = ", ".join(_peers(info))
    yield f"{info.source}{f' ({client})' if client else ''} -> {address}{f' ({own})' if own else ''}"
    yield f"listener {info.listener}, filter chain {info.chain or '-'}, cluster {info.cluster}"
    if isinstance(tunnel, Tunnel):
        ends = f"{info.source} -> {SocketAddress(*tunnel.connection.local_name)}"
        yield f"HBONE connection {ends}, stream {tunnel.stream_id}, authority {info.authority}"
    elif info.authority:
        yield f"node-local tunnel, nothing sent over the network, authority {info.authority}"
    else:
        yield "plain TCP, no tunnel"


def _peers(info: StreamInfo) -> tuple[str, ...]:
    return info.facts.peer.uri_sans if info.facts.peer is not None else ()


def _dialled(info: StreamInfo) -> SocketAddress | None:
    address = info.endpoint.address if info.endpoint is not None else None
    return address if isinstance(address, SocketAddress) else None


def _dialled_host(info: StreamInfo) -> str:
    address = _dialled(info)
    return address.host if address is not None else ""
