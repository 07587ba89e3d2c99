"""From a hop and its TCP proxy to an open upstream: pick a cluster, pick a host, open a socket or a tunnel.

An endpoint that is an internal listener continues in-process: the inner hop is a second :class:`Hop` with its
own counters and log line, but no byte ever passes between the two. A tunnel whose far end is a pod of this
very node is, with the short cut on, joined to that pod's inbound chain in-process as well, and judged there
exactly as if it had arrived on the wire.
"""

from __future__ import annotations

import asyncio
import logging
import math
import random
import socket
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, NamedTuple, assert_never

from hbone.aio.connection import Connection, ConnectionSettings, connect, default_client
from hbone.aio.end import End
from hbone.aio.poller import Poller
from hbone.aio.pool import Pool
from hbone.aio.socket import PlainSocket
from hbone.aio.tls_socket import TlsSocket
from hbone.errors import ConnectRefused, HboneError, PeerSilent, PoolClosed, TlsError, TunnelBroken
from hbone.pool import PoolFull, PoolSettings
from tproxy.aio import sockets
from tproxy.errors import ConnectTimedOut, TproxyError
from xds.model.address import InternalAddress, NamedAddress, PipeAddress, SocketAddress, canonical
from xds.model.cluster import InternalUpstream, RawBuffer, TransportSocket
from xds.model.listener import AppendAction, WeightedCluster
from xds.model.tls import TlsContext as ContextModel
from ztunnel.envoy.listeners.chains import LiveTcpProxy
from ztunnel.envoy.outcome import Hop, NoCluster, NoHealthyHost, Overflow, Refused, UpstreamFailed
from ztunnel.envoy.secrets.contexts import LiveContext
from ztunnel.envoy.stream_info import Flag, StreamInfo, UpstreamOptions
from ztunnel.envoy.upstream.cluster import LiveCluster
from ztunnel.envoy.upstream.host import Host
from ztunnel.envoy.upstream.manager import ClusterManager
from ztunnel.envoy.upstream.outlier import Result

if TYPE_CHECKING:
    from ztunnel.envoy.internal import InternalListeners

log = logging.getLogger(__name__)

INVALID_ARGUMENT = "Invalid argument"
CLUSTER_OVERRIDE = "envoy.tcp_proxy.cluster"
DISABLE_TUNNELING = "envoy.tcp_proxy.disable_tunneling"
RESPONSE_HEADERS = "envoy.tcp_proxy.propagate_response_headers"
_CLIENT_ADDRESS = "envoy://internal_client_address/"


class PoolKey(NamedTuple):
    """What two tunnels must have in common to share a connection.

    ``generation`` makes a rotated certificate open new connections while tunnels on old ones live on. A tuple,
    because it is made and hashed for every connection.
    """

    address: SocketAddress
    options: UpstreamOptions
    context: LiveContext | None
    generation: int


@dataclass(slots=True, eq=False)
class Upstream:
    """An open upstream: one end for the relay, and what must be settled when it closes.

    ``hops`` are the in-process hops behind the one that asked, outermost first; they end with it.
    """

    end: End
    hops: list[Hop] = field(default_factory=list)
    on_close: list[Callable[[], None]] = field(default_factory=list)

    def close(self, error: Exception | None = None) -> None:
        """Close the end and give back what was counted."""
        self.end.close(error)
        while self.on_close:
            self.on_close.pop()()


class Connector:
    """Opens upstreams.

    Args:
        clusters: by name.
        internal: internal listeners and, for the short cut, inbound chains.
        poller: of this loop.
        rng: picks among weighted clusters.
        keep_client_address: tunnels behind an internal listener keep the client's address too, which Envoy
            loses there (``tunnel_source``).
        early_data: send the first bytes of a connection along with its CONNECT where the peer says it holds them.
    """

    def __init__(
        self,
        clusters: ClusterManager,
        internal: InternalListeners,
        poller: Poller,
        rng: random.Random,
        *,
        keep_client_address: bool,
        early_data: bool,
    ) -> None:
        self._clusters = clusters
        self._internal = internal
        self._poller = poller
        self._rng = rng
        self._keep_client_address = keep_client_address
        self._early_data = early_data
        self._pools: dict[LiveCluster, Pool] = {}

    # What a TCP proxy does

    async def open(self, hop: Hop, proxy: LiveTcpProxy, client: End | None = None) -> Upstream:
        """Connect a hop to its cluster, trying again as often as the filter says.

        Args:
            hop: who asks.
            proxy: its filter.
            client: whose first bytes a tunnel may take along.

        Raises:
            Refused: nothing could be opened; ``hop`` has the flags.
        """
        info, model = hop.info, proxy.model
        name = info.facts.filter_state.get(CLUSTER_OVERRIDE) or self.pick(model.clusters)
        info.cluster = name
        cluster = self._clusters.get(name)
        if cluster is None:
            proxy.cx_no_route.value += 1
            raise NoCluster()
        info.cluster_metadata = cluster.model.metadata
        subset = proxy.subsets.get(name, model.metadata_match)
        failed: UpstreamFailed | None = None
        avoid: frozenset[Host] = frozenset()
        for attempt in range(model.max_connect_attempts):
            if attempt:
                await self._back_off(proxy, attempt)
            host = cluster.choose(info, subset=subset, hash_source=model.hash_source_ip, avoid=avoid)
            if host is None:
                cluster.stats.cx_none_healthy.value += 1
                raise NoHealthyHost()
            info.attempts += 1
            try:
                return await self._attempt(hop, proxy, cluster, host, client)
            except UpstreamFailed as error:
                failed = error
                avoid |= {host}
                self.count_failure(cluster, host, error)
                if error.final:
                    raise
        assert failed is not None
        info.flags.add(Flag.UPSTREAM_RETRY_EXHAUSTED)
        raise failed

    def pick(self, choices: tuple[WeightedCluster, ...]) -> str:
        """One of weighted clusters; most chains have one."""
        if len(choices) == 1:
            return choices[0].name
        return self._rng.choices(choices, [choice.weight for choice in choices])[0].name

    async def _back_off(self, proxy: LiveTcpProxy, attempt: int) -> None:
        base = proxy.model.backoff_base_s
        if base:
            longest = proxy.model.backoff_max_s or base * 10
            await asyncio.sleep(self._rng.random() * min(longest, base * 2 ** (attempt - 1)))

    @staticmethod
    def count_failure(cluster: LiveCluster, host: Host, error: UpstreamFailed) -> None:
        """Count a failed attempt and tell outlier detection."""
        host.cx_connect_fail += 1
        cluster.stats.cx_connect_fail.value += 1
        if error.timed_out:
            cluster.stats.cx_connect_timeout.value += 1
        gateway = error.status in (502, 503, 504)
        cluster.report(host, Result.GATEWAY_FAILURE if gateway else Result.CONNECT_FAILURE)

    async def _attempt(
        self, hop: Hop, proxy: LiveTcpProxy, cluster: LiveCluster, host: Host, client: End | None
    ) -> Upstream:
        info = hop.info
        endpoint = host.endpoint
        info.upstream_host = str(endpoint.address)
        info.upstream_metadata = endpoint.metadata
        transport = cluster.transport_socket(host)
        match endpoint.address:
            case InternalAddress() as address:
                upstream = await self._enter(hop, cluster, host, address, transport, client)
            case SocketAddress() as address:
                tunnels = proxy.hostname is not None and DISABLE_TUNNELING not in info.facts.filter_state
                if tunnels:
                    upstream = await self._tunnel(hop, proxy, cluster, host, address, transport, client)
                else:
                    upstream = await self.dial(info, cluster, host, address, transport)
            case PipeAddress() as address:
                upstream = await self._dial_pipe(cluster, host, address.path)
            case NamedAddress():
                raise UpstreamFailed("endpoint has no address yet")
            case _:
                assert_never(endpoint.address)
        cluster.report(host, Result.SUCCESS)
        return upstream

    # Internal listeners

    async def _enter(
        self,
        hop: Hop,
        cluster: LiveCluster,
        host: Host,
        address: InternalAddress,
        transport: TransportSocket,
        client: End | None,
    ) -> Upstream:
        """Continue at an internal listener. Whatever goes wrong behind it reads ``Invalid argument`` here."""
        outer = hop.info
        metadata = {}
        shared: tuple[tuple[str, bool], ...] = ()
        if isinstance(transport, InternalUpstream):
            shared = outer.facts.shared_state
            host_metadata, cluster_metadata = host.endpoint.metadata, cluster.model.metadata
            metadata = {name: host_metadata[name] for name in transport.host if name in host_metadata}
            metadata |= {name: cluster_metadata[name] for name in transport.cluster if name in cluster_metadata}
        outer.upstream_local = _CLIENT_ADDRESS
        inner = self._internal.enter(address, outer, metadata, shared, keep_options=self._keep_client_address)
        if inner is None:
            raise UpstreamFailed(INVALID_ARGUMENT)
        proxy = inner.proxy
        proxy.cx_total.value += 1
        try:
            upstream = await self.open(inner.hop, proxy, client)
        except Refused as error:
            inner.hop.refused(error)
            inner.close()
            inner.hop.finish()
            final = isinstance(error, UpstreamFailed) and error.final
            raise UpstreamFailed(INVALID_ARGUMENT, final=final) from error
        except BaseException:
            inner.close()
            inner.hop.finish()
            raise
        upstream.hops.insert(0, inner.hop)
        upstream.on_close.append(inner.close)
        self._account_connection(cluster, host, upstream)
        return upstream

    # Plain sockets

    async def dial(
        self,
        info: StreamInfo,
        cluster: LiveCluster,
        host: Host,
        address: SocketAddress,
        transport: TransportSocket,
    ) -> Upstream:
        """Open a TCP connection to a host, with TLS where the cluster says so.

        Raises:
            Overflow: the cluster has too many connections.
            UpstreamFailed: it could not be opened.
        """
        breaker = cluster.breaker
        if breaker.connections >= breaker.limits.max_connections:
            cluster.stats.cx_overflow.value += 1
            raise Overflow()
        if breaker.pending >= breaker.limits.max_pending_requests:
            cluster.stats.rq_pending_overflow.value += 1
            raise Overflow()
        inner = transport.inner if isinstance(transport, InternalUpstream) else transport
        # Before the first await: a burst must not slip past the limits.
        breaker.connections += 1
        breaker.pending += 1
        try:
            end = await self._open_socket(info, cluster, address, inner)
        finally:
            breaker.connections -= 1
            breaker.pending -= 1
        upstream = Upstream(end)
        self._account_connection(cluster, host, upstream)
        return upstream

    async def _open_socket(
        self, info: StreamInfo, cluster: LiveCluster, address: SocketAddress, transport: RawBuffer | ContextModel
    ) -> End:
        context = self._ready(cluster, transport)
        try:
            if context is None:
                sock = await self._connect(cluster, address, info.options)
                info.upstream_local = str(_address(sock.getsockname()))
                return PlainSocket(sock, self._poller, fresh=True)
            assert context.current is not None
            async with asyncio.timeout(cluster.model.connect_timeout_s):
                sock = await self._connect(cluster, address, info.options)
                info.upstream_local = str(_address(sock.getsockname()))
                end = TlsSocket(sock, context.current, self._poller)
                try:
                    await end.establish(cluster.model.connect_timeout_s)
                except BaseException:
                    end.close()
                    raise
                cluster.stats.handshakes.value += 1
                return end
        except TimeoutError:
            raise UpstreamFailed("connection timeout", timed_out=True) from None
        except (ConnectTimedOut, TproxyError, HboneError) as error:
            raise self._failure(cluster, error) from error

    async def _connect(
        self, cluster: LiveCluster, address: SocketAddress, options: UpstreamOptions
    ) -> socket.socket:
        keepalive = cluster.model.keepalive
        # A pod that talks to itself cannot be impersonated: source and destination would be one address.
        source = options.source if options.source != address.host else None
        return await sockets.connect(
            (address.host, address.port),
            source=source or cluster.model.bind_source or None,
            mark=options.mark or None,
            timeout_s=cluster.model.connect_timeout_s,
            keepalive=None
            if keepalive is None
            else sockets.Keepalive(
                idle_s=keepalive.time_s or 7200,
                interval_s=keepalive.interval_s or 75,
                probes=keepalive.probes or 9,
            ),
        )

    async def _dial_pipe(self, cluster: LiveCluster, host: Host, path: str) -> Upstream:
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        sock.setblocking(False)
        try:
            async with asyncio.timeout(cluster.model.connect_timeout_s):
                await self._poller.loop.sock_connect(sock, path)
        except OSError as error:  # TimeoutError is one
            sock.close()
            raise UpstreamFailed(f"{path}: {error.strerror or 'connection timeout'}") from error
        except BaseException:
            sock.close()
            raise
        upstream = Upstream(PlainSocket(sock, self._poller, fresh=True))
        self._account_connection(cluster, host, upstream)
        return upstream

    @staticmethod
    def _account_connection(cluster: LiveCluster, host: Host, upstream: Upstream) -> None:
        stats = cluster.stats
        stats.cx_total.value += 1
        stats.cx_active.stored += 1
        host.cx_total += 1
        host.cx_active += 1
        cluster.breaker.connections += 1

        def closed() -> None:
            stats.cx_active.stored -= 1
            host.cx_active -= 1
            cluster.breaker.connections -= 1

        upstream.on_close.append(closed)

    # Tunnels

    async def _tunnel(
        self,
        hop: Hop,
        proxy: LiveTcpProxy,
        cluster: LiveCluster,
        host: Host,
        address: SocketAddress,
        transport: TransportSocket,
        client: End | None,
    ) -> Upstream:
        """Open a CONNECT stream; waits for its 200."""
        info = hop.info
        if cluster.model.http2 is None:
            raise UpstreamFailed("tunnels need HTTP/2, which the cluster does not speak")
        if cluster.breaker.requests >= cluster.breaker.limits.max_requests:
            cluster.stats.rq_pending_overflow.value += 1
            raise Overflow()
        authority, headers = tunnel_request(proxy, info)
        inner = transport.inner if isinstance(transport, InternalUpstream) else transport
        context = self._ready(cluster, inner)
        local = await self._internal.shortcut(hop, context, address, authority, headers)
        if local is not None:
            self._account_request(cluster, host, local)
            return local
        key = PoolKey(address, info.options, context, context.generation if context is not None else 0)
        cluster.breaker.requests += 1
        try:
            tunnel = await self._pool(cluster).open(
                key,
                [(b":method", b"CONNECT"), (b":authority", authority.encode()), *encoded(headers)],
                client if type(client) is PlainSocket else None,
            )
        except ConnectRefused as error:
            raise UpstreamFailed(f"tunnel_response:{error.status}", status=error.status) from error
        except PoolFull:
            cluster.stats.rq_pending_overflow.value += 1
            raise Overflow() from None
        except (HboneError, TproxyError, UpstreamFailed) as error:
            raise self._failure(cluster, error) from error
        finally:
            cluster.breaker.requests -= 1
        info.upstream_local = str(_address(tunnel.connection.local_name))
        facts = tunnel.connection.facts
        info.upstream_uri_sans = facts.uri_sans if facts is not None else ()
        if proxy.model.tunneling is not None and proxy.model.tunneling.propagate_response_headers:
            text = ",".join(f"{name.decode()}:{value.decode('latin-1')}" for name, value in tunnel.headers)
            info.facts.filter_state[RESPONSE_HEADERS] = text
        upstream = Upstream(tunnel)
        self._account_request(cluster, host, upstream)
        return upstream

    @staticmethod
    def _account_request(cluster: LiveCluster, host: Host, upstream: Upstream) -> None:
        stats = cluster.stats
        stats.rq_total.value += 1
        stats.rq_active.stored += 1
        host.rq_total += 1
        host.rq_success += 1
        host.rq_active += 1
        cluster.breaker.requests += 1

        def closed() -> None:
            stats.rq_active.stored -= 1
            host.rq_active -= 1
            cluster.breaker.requests -= 1

        upstream.on_close.append(closed)

    def _pool(self, cluster: LiveCluster) -> Pool:
        pool = self._pools.get(cluster)
        if pool is None:
            settings = client_settings(cluster, early_data=self._early_data)

            async def dial(key: Hashable) -> Connection:
                assert isinstance(key, PoolKey)
                return await self._dial_tunnel(cluster, key, settings)

            limits = PoolSettings(
                idle_timeout_s=cluster.model.connection_idle_timeout_s or math.inf,  # 0: never, as in Envoy
                max_tunnels_per_connection=cluster.model.max_requests_per_connection,
                max_waiters=cluster.breaker.limits.max_pending_requests,
            )
            pool = self._pools[cluster] = Pool(dial, limits)
        return pool

    async def _dial_tunnel(self, cluster: LiveCluster, key: PoolKey, settings: ConnectionSettings) -> Connection:
        """One connection for tunnels: TCP, TLS and the client's side of HTTP/2."""
        context = key.context.current if key.context is not None else None
        try:
            async with asyncio.timeout(cluster.model.connect_timeout_s):
                sock = await self._connect(cluster, key.address, key.options)
                connection = await connect(sock, context, settings, self._poller)
        except TimeoutError:
            raise UpstreamFailed("connection timeout", timed_out=True) from None
        if context is not None:
            cluster.stats.handshakes.value += 1
        return connection

    # Shared

    @staticmethod
    def _ready(cluster: LiveCluster, transport: RawBuffer | ContextModel) -> LiveContext | None:
        """The TLS context to use now; ``None`` for plain TCP."""
        if isinstance(transport, RawBuffer):
            return None
        context = cluster.context(transport)
        if context.current is None:
            cluster.stats.secrets_not_ready.value += 1
            raise UpstreamFailed("TLS_error: Secret is not supplied by SDS")
        return context

    @staticmethod
    def _failure(cluster: LiveCluster, error: Exception) -> UpstreamFailed:
        """An error of a library in the words of logs."""
        if isinstance(error, UpstreamFailed):
            return error
        if isinstance(error, TlsError):
            cluster.stats.ssl_errors.value += 1
            return UpstreamFailed(f"TLS_error: {error}")
        timed_out = isinstance(error, ConnectTimedOut | PeerSilent)
        if timed_out:
            return UpstreamFailed("connection timeout", timed_out=True)
        if isinstance(error, PoolClosed):
            return UpstreamFailed("the cluster is going away")
        if isinstance(error, TunnelBroken):
            return UpstreamFailed(f"tunnel failed: {error}", final=error.perhaps_delivered)
        return UpstreamFailed(f"delayed_connect_error: {_reason(error)}")

    def cluster(self, name: str) -> LiveCluster | None:
        """The cluster that serves under a name."""
        return self._clusters.get(name)

    def retire(self, cluster: LiveCluster) -> Pool | None:
        """Give up a cluster's pool; the caller drains it."""
        return self._pools.pop(cluster, None)

    @property
    def pools(self) -> dict[LiveCluster, Pool]:
        """Pools in use, for statistics and drain."""
        return self._pools


def client_settings(cluster: LiveCluster, *, early_data: bool) -> ConnectionSettings:
    """HTTP/2 settings towards a cluster: ours, with what the configuration changes."""
    settings = default_client()
    wanted = cluster.model.http2
    http2 = replace(settings.http2, early_data=early_data)
    if wanted is None:
        return replace(settings, http2=http2)
    if wanted.initial_stream_window is not None:
        http2 = replace(http2, stream_window_bytes=wanted.initial_stream_window)
    if wanted.initial_connection_window is not None:
        http2 = replace(http2, connection_window_bytes=wanted.initial_connection_window)
    return replace(
        settings,
        http2=http2,
        handshake_timeout_s=cluster.model.connect_timeout_s,
        ping_interval_s=wanted.keepalive_interval_s or settings.ping_interval_s,
        ping_timeout_s=wanted.keepalive_timeout_s or settings.ping_timeout_s,
    )


def tunnel_request(proxy: LiveTcpProxy, info: StreamInfo) -> tuple[str, list[tuple[str, str]]]:
    """The ``:authority`` and the added headers of a tunnel request, in order.

    Raises:
        UpstreamFailed: the host name evaluates to nothing.
    """
    assert proxy.hostname is not None
    authority = proxy.hostname(info)
    if not authority:
        raise UpstreamFailed("tunnel hostname is empty")
    headers: list[tuple[str, str]] = []
    for header in proxy.headers:
        value = header.render(info)
        if not value and not header.keep_empty:
            continue
        if header.action != AppendAction.APPEND_IF_EXISTS_OR_ADD:
            others = [(name, old) for name, old in headers if name != header.name]
            exists = len(others) < len(headers)
            if header.action == AppendAction.ADD_IF_ABSENT:
                if exists:
                    continue
            elif header.action == AppendAction.OVERWRITE_IF_EXISTS and not exists:
                continue
            headers = others
        headers.append((header.name, value))
    return authority, headers


def encoded(headers: list[tuple[str, str]]) -> list[tuple[bytes, bytes]]:
    """Headers as bytes for the wire."""
    return [(name.encode(), value.encode("utf-8", "replace")) for name, value in headers]


def _address(name: tuple[str, int]) -> SocketAddress:
    return SocketAddress(canonical(name[0]), name[1])


def _reason(error: Exception) -> str:
    cause = getattr(error, "error", None)
    return cause.strerror if isinstance(cause, OSError) and cause.strerror else str(error)
