"""Opens the upstream of a hop and its TCP proxy: picks a cluster and a host, opens a socket or a tunnel.

An endpoint that is an internal listener continues in-process: the inner hop is a second :class:`LiveHop` with its
own counters and log line, but no bytes pass between the two. With the node-local shortcut, a tunnel to a pod of
this node continues in-process at that pod's inbound chain. The chain checks it like a tunnel from the network.
"""

from __future__ import annotations

import asyncio
import logging
import math
import random
from collections.abc import Awaitable, Callable, Hashable, Iterable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple, assert_never

from hbone.aio.connection import Connection
from hbone.aio.connection_settings import ConnectionSettings, default_client
from hbone.aio.end import End
from hbone.aio.poller import Poller
from hbone.aio.pool import Pool
from hbone.aio.socket import PlainSocket
from hbone.aio.tunnel import Tunnel
from hbone.errors import ConnectRefused, HboneError
from hbone.pool import PoolFull, PoolSettings
from tproxy.errors import TproxyError
from xds.model.address import InternalAddress, NamedAddress, PipeAddress, SocketAddress
from xds.model.cluster import InternalUpstream, TransportSocket
from xds.model.facts import ConnectionFacts
from xds.model.listener import AppendAction
from ztunnel.proxy.dataplane.attempts import Attempts, GiveUp
from ztunnel.proxy.dataplane.attempts import Reason as GivenUp
from ztunnel.proxy.dataplane.pool_key import PoolKey, dial_connection
from ztunnel.proxy.dataplane.reasons import Reason
from ztunnel.proxy.dataplane.upstream import Upstream
from ztunnel.proxy.envoy.listeners.chains import LiveTcpProxy
from ztunnel.proxy.envoy.listeners.connections import LiveHop
from ztunnel.proxy.envoy.path.dial import (
    ClusterUpstream,
    CountedConnection,
    Dialler,
    count_end,
    count_failure,
    count_request,
    failure_of,
    secrets_not_ready,
    with_header,
)
from ztunnel.proxy.envoy.path.internal import InternalListeners
from ztunnel.proxy.envoy.secrets.contexts import LiveContext
from ztunnel.proxy.envoy.stream.outcome import Denied, NoCluster, NoHealthyHost, Overflow, Refused, UpstreamFailed
from ztunnel.proxy.envoy.stream.request_headers import traceparent
from ztunnel.proxy.envoy.stream.stream_info import Flag, StreamInfo, UpstreamOptions
from ztunnel.proxy.envoy.upstream.cluster import LiveCluster, LiveTransport
from ztunnel.proxy.envoy.upstream.host import Host
from ztunnel.proxy.envoy.upstream.manager import ClusterManager
from ztunnel.proxy.envoy.upstream.outlier import Result
from ztunnel.proxy.flows.times import ConnectionTimes

log = logging.getLogger(__name__)

INVALID_ARGUMENT = "Invalid argument"
NO_ADDRESS = "endpoint has no address yet"
NO_HTTP2 = "tunnels need HTTP/2, which the cluster does not speak"
CLUSTER_OVERRIDE = "envoy.tcp_proxy.cluster"
DISABLE_TUNNELING = "envoy.tcp_proxy.disable_tunneling"
RESPONSE_HEADERS = "envoy.tcp_proxy.propagate_response_headers"
_CLIENT_ADDRESS = "envoy://internal_client_address/"


#: The key of a pooled tunnel connection in Envoy's dialect, with the source of its TLS context and its socket
#: options.
TunnelKey = PoolKey[LiveContext | None, UpstreamOptions]
#: Labels that a host must have all of, see :mod:`ztunnel.proxy.addons.decide`.
Labels = frozenset[tuple[str, str]]
#: A further decision about a host before the connection is opened. It raises ``Denied``.
AdmitsHost = Callable[[LiveHop, LiveTcpProxy, Host], Awaitable[None]]


class Dialled(NamedTuple):
    """An open tunnel connection: its cluster, its key in the cluster's pool, and its statistics."""

    cluster: LiveCluster
    key: TunnelKey
    counted: CountedConnection


class Connector:
    """Opens upstreams.

    Args:
        clusters: looks up clusters by name.
        dialler: opens sockets.
        internal: enters internal listeners and, for node-local tunnels, inbound chains.
        poller: this loop's poller.
        rng: picks among weighted clusters.
        keep_client_address: tunnels behind an internal listener keep the client's address too, which Envoy
            loses there (``tunnel_source``).
        times: records the durations of handshakes.
        early_data: send the first bytes of a connection along with its CONNECT if the peer announces that it holds
            them.
        admit: a further decision about a host. ``None`` disables it.
    """

    def __init__(
        self,
        clusters: ClusterManager,
        dialler: Dialler,
        internal: InternalListeners,
        poller: Poller,
        rng: random.Random,
        *,
        times: ConnectionTimes,
        keep_client_address: bool,
        early_data: bool,
        admit: AdmitsHost | None = None,
    ) -> None:
        self._clusters = clusters
        self._dialler = dialler
        self._internal = internal
        self._poller = poller
        self._rng = rng
        self._times = times
        self._keep_client_address = keep_client_address
        self._early_data = early_data
        self._admit = admit
        self._pools: dict[LiveCluster, Pool] = {}
        self._dialled: dict[Connection, Dialled] = {}

    # The steps of a TCP proxy

    async def open(self, hop: LiveHop, proxy: LiveTcpProxy, client: End | None = None) -> ClusterUpstream:
        """Connect a hop to a host of its cluster, with at most the number of attempts configured in the filter.

        Args:
            hop: the connection.
            proxy: its filter.
            client: the downstream end, for sending its first bytes along with a CONNECT.

        Raises:
            Refused: no attempt succeeded. ``hop`` has the flags.
        """
        info, model = hop.info, proxy.model
        tunnelled = info.tunnelled = tunnels(proxy, info)
        override = info.facts.filter_state.get(CLUSTER_OVERRIDE)
        if override:
            name, cluster = override, self._clusters.get(override)
        else:
            name, cluster = self._clusters.pick(model.clusters, self._rng)
        info.cluster, hop.cluster = name, cluster
        if cluster is None:
            proxy.cx_no_route.value += 1
            raise NoCluster()
        info.cluster_metadata = cluster.model.metadata
        info.upstream_cluster = cluster.model.alt_stat_name or name
        subset = proxy.subsets.get(name, model.metadata_match)
        # Like Envoy's ``max_connect_attempts``: a number and a back-off, without a time limit.
        attempts: Attempts[Host] = Attempts(model.max_connect_attempts - 1, _is_repeatable)
        prefer: tuple[Labels, ...] = ()
        while True:
            avoid = attempts.avoid
            if prefer:
                avoid = _not_preferred(prefer, cluster, subset, avoid)
            host = cluster.choose(info, subset=subset, hash_source=model.hash_source_ip, avoid=avoid, drops=False)
            if host is None:
                cluster.stats.cx_none_healthy.value += 1
                raise NoHealthyHost()
            if hop.addons is not None:
                if hop.asked is not None:
                    hop.addons.rehosted(hop, host, tunnelled=tunnelled)
                else:
                    info.upstream_host = str(host.endpoint.address)
                    wanted = await hop.addons.connecting(hop, host, tunnelled=tunnelled)
                    if wanted is not None:
                        prefer = wanted
                        continue
            transport = cluster.transport(host)
            info.attempts += 1
            try:
                upstream = await self._attempt(hop, proxy, cluster, host, transport, client, tunnelled=tunnelled)
            except UpstreamFailed as error:
                count_failure(cluster, host, error)
                verdict = attempts.failed(error, 0.0, host)
                if isinstance(verdict, GiveUp):
                    if verdict.reason is GivenUp.NO_RETRIES:
                        cluster.stats.cx_attempts_exceeded.value += 1
                        info.flags.add(Flag.UPSTREAM_RETRY_EXHAUSTED)
                    raise
                hop.refused(error)  # as in Envoy, logs report this even if a later attempt succeeds
            else:
                info.connected, info.failure = True, None
                return upstream
            finally:
                info.ready_s = hop.clock.monotonic() - info.started
            info.failed = (*info.failed, host.endpoint)
            await self._back_off(proxy, verdict.failures)

    async def _back_off(self, proxy: LiveTcpProxy, failures: int) -> None:
        """Wait before the next attempt, exponentially with full jitter, like Envoy's ``backoff_options``."""
        base = proxy.model.backoff_base_s
        if base:
            longest = proxy.model.backoff_max_s or base * 10
            await asyncio.sleep(self._rng.random() * min(longest, base * 2 ** (failures - 1)))

    async def _attempt(
        self,
        hop: LiveHop,
        proxy: LiveTcpProxy,
        cluster: LiveCluster,
        host: Host,
        transport: LiveTransport,
        client: End | None,
        *,
        tunnelled: bool,
    ) -> ClusterUpstream:
        info = hop.info
        endpoint = host.endpoint
        info.upstream_host = str(endpoint.address)
        info.endpoint, info.behind = endpoint, None
        info.upstream_metadata = endpoint.metadata
        if self._admit is not None:
            await self._admit(hop, proxy, host)
        match endpoint.address:
            case InternalAddress() as address:
                upstream = await self._enter(hop, cluster, host, address, transport, client)
            case SocketAddress() as address if tunnelled:
                upstream = await self._tunnel(hop, proxy, cluster, host, address, transport, client)
            case PipeAddress() if tunnelled:
                raise UpstreamFailed("a tunnel needs a host with an IP address")
            case SocketAddress() | PipeAddress() as address:
                upstream = await self._dialler.dial(info, cluster, host, address, transport)
            case NamedAddress():
                raise UpstreamFailed(NO_ADDRESS, failure=Reason.DNS)
            case _:
                assert_never(endpoint.address)
        if cluster.outlier is not None:
            cluster.report(host, Result.SUCCESS)
        return upstream

    # Internal listeners

    async def _enter(
        self,
        hop: LiveHop,
        cluster: LiveCluster,
        host: Host,
        address: InternalAddress,
        transport: LiveTransport,
        client: End | None,
    ) -> ClusterUpstream:
        """Continue at an internal listener. Its failures read ``Invalid argument``, like in Envoy."""
        if transport.context is not None:
            raise UpstreamFailed("connections to an internal listener have no TLS")
        outer = hop.info
        version = transport.proxy_version
        header = b"" if version is None else with_header(outer, version).first_bytes
        metadata, shared = passed_on(outer.facts, cluster, host, transport.model)
        outer.upstream_local = _CLIENT_ADDRESS
        inner = self._internal.enter(address, outer, metadata, shared, keep_options=self._keep_client_address)
        counted = CountedConnection(cluster, self._poller)
        if inner is None:
            behind = outer.behind.failure if outer.behind is not None else None
            failed = UpstreamFailed(INVALID_ARGUMENT, failure=behind or Reason.NO_ROUTE)
            counted.failed(failed)
            raise failed
        counted.connected()  # before the inner hop is connected, like in Envoy
        proxy = inner.proxy
        proxy.cx_total.value += 1
        try:
            # Data sent along with the CONNECT would arrive before the PROXY header.
            upstream = await self.open(inner.hop, proxy, None if header else client)
        except Refused as error:
            inner.hop.refused(error)
            inner.hop.close()
            counted.ended(by_peer=True, in_use=True)
            if isinstance(error, Denied):
                raise  # not a failure of this host: another attempt would be denied as well
            final = isinstance(error, UpstreamFailed) and error.final
            raise UpstreamFailed(INVALID_ARGUMENT, final=final, failure=error.failure) from error
        except BaseException:
            inner.hop.close()
            counted.ended(by_peer=False, in_use=True)
            raise
        if header:
            upstream.end.write([memoryview(header)], len(header))
            upstream.end.flush()
        upstream.hops = (inner.hop, *upstream.hops)
        upstream.on_close(inner.hop.close)
        count_request(cluster, host)
        upstream.on_close(lambda: count_end(cluster, host, counted, upstream))
        return upstream

    # Tunnels

    async def _tunnel(
        self,
        hop: LiveHop,
        proxy: LiveTcpProxy,
        cluster: LiveCluster,
        host: Host,
        address: SocketAddress,
        transport: LiveTransport,
        client: End | None,
    ) -> ClusterUpstream:
        """Open a CONNECT stream, and wait for its 200."""
        info = hop.info
        if cluster.model.http2 is None:
            raise UpstreamFailed(NO_HTTP2)
        breaker = cluster.breaker
        if breaker.requests >= breaker.limits.max_requests:
            cluster.stats.rq_pending_overflow.value += 1
            raise Overflow()
        authority, headers = tunnel_request(proxy, info)
        info.tunnel_authority, info.trace = authority, traceparent(headers)
        context, version = transport.context, transport.proxy_version
        if context is not None and context.current is None:
            raise secrets_not_ready(cluster)
        info.upstream_own_uri_sans = context.local_uri_sans if context is not None else ()
        options = info.options if version is None else with_header(info, version)
        # A PROXY header is for a listener filter, and the node-local tunnel begins behind those.
        if not options.first_bytes and address.port in self._internal.shortcut_ports:
            local = await self._internal.shortcut(hop, context, address, authority, headers)
            if local is not None:
                local.on_close(self._account_request(cluster, host))
                return local
        generation = context.generation if context is not None else 0
        key = PoolKey(address, context, generation, options)
        breaker.requests += 1
        try:
            pool = self._pools.get(cluster) or self._new_pool(cluster)
            fields = [(b":method", b"CONNECT"), (b":authority", authority.encode())]
            for name, value in headers:
                fields.append((name.encode(), value.encode("utf-8", "replace")))
            tunnel = await pool.open(
                key,
                fields,
                client if type(client) is PlainSocket else None,
            )
        except ConnectRefused as error:
            raise UpstreamFailed(f"tunnel_response:{error.status}", status=error.status) from error
        except PoolFull:
            cluster.stats.rq_pending_overflow.value += 1
            raise Overflow() from None
        except (HboneError, TproxyError, UpstreamFailed) as error:
            raise failure_of(cluster, error) from error
        finally:
            breaker.requests -= 1
        if tunnel.connection.handshake_s:
            self._times.first_request(tunnel.connection, info.trace.encode(), hop.clock.wall())
        info.upstream_local = str(SocketAddress.of(tunnel.connection.local_name))
        facts = tunnel.connection.facts
        info.upstream_uri_sans = facts.uri_sans if facts is not None else ()
        info.upstream_tls = facts
        info.upstream_certificate = context.presented.certificate if context is not None else None
        info.upstream_sni = context.model.sni if context is not None else ""
        if proxy.model.tunneling is not None and proxy.model.tunneling.propagate_response_headers:
            text = ",".join(f"{name.decode()}:{value.decode('latin-1')}" for name, value in tunnel.headers)
            info.facts.filter_state[RESPONSE_HEADERS] = text
        return Upstream(tunnel, self._account_request(cluster, host))

    @staticmethod
    def _account_request(cluster: LiveCluster, host: Host) -> Callable[[], None]:
        """Count an open request of a cluster and its host. Return a function that counts its end."""
        cluster.stats.rq_total.value += 1
        host.rq_total += 1
        host.rq_success += 1
        return request_open(cluster, host)

    def _new_pool(self, cluster: LiveCluster) -> Pool:
        settings = self.settings_for(cluster)

        async def dial(key: Hashable) -> Connection:
            assert isinstance(key, PoolKey)
            return await self._dial_tunnel(cluster, key, settings)

        limits = PoolSettings(
            idle_timeout_s=cluster.model.connection_idle_timeout_s or math.inf,  # 0: never, as in Envoy
            max_tunnels_per_connection=cluster.model.max_requests_per_connection,
            max_waiters=cluster.breaker.limits.max_pending_requests,
        )
        pool = self._pools[cluster] = Pool(dial, self._poller, limits)
        return pool

    async def _dial_tunnel(self, cluster: LiveCluster, key: TunnelKey, settings: ConnectionSettings) -> Connection:
        """Dial one tunnel connection; called by the connection pool."""
        context = key.credentials
        counted = CountedConnection(cluster, self._poller)
        try:
            async with asyncio.timeout(cluster.model.connect_timeout_s):
                connection = await dial_connection(
                    lambda: context.current if context is not None else None,
                    lambda: self._dialler.connect(cluster, key.address, key.options),
                    settings,
                    self._poller,
                    partial(self._times.shook_hands, "client"),
                )
        except TimeoutError as error:
            counted.failed(error)
            raise UpstreamFailed("connection timeout", timed_out=True) from None
        except BaseException as error:
            counted.failed(error)
            raise
        counted.connected()
        self._follow(cluster, key, connection, counted)
        cluster.stats.cx_http2.value += 1
        if connection.facts is not None:
            cluster.stats.negotiated(connection.facts)
        return connection

    def _follow(
        self, cluster: LiveCluster, key: TunnelKey, connection: Connection, counted: CountedConnection
    ) -> None:
        self._dialled[connection] = Dialled(cluster, key, counted)

        def ended(_: object) -> None:
            if self._dialled.pop(connection, None) is not None:
                counted.ended(by_peer=connection.ended_by_peer, in_use=connection.engine.open_streams > 0)

        connection.wait_closed().add_done_callback(ended)

    # Connections of another process: see ztunnel.proxy.envoy.handover

    @property
    def dialled(self) -> Mapping[Connection, Dialled]:
        """The open tunnel connections."""
        return self._dialled

    def idle_s(self, connection: Connection) -> float | None:
        """Return how long a tunnel connection has been idle, in seconds. ``None`` if its cluster was replaced."""
        pool = self._pools.get(self._dialled[connection].cluster)
        return None if pool is None else pool.idle_s(connection)

    def went(self, connection: Connection) -> None:
        """Update the counts for a connection that moved to another process, which will count its end."""
        self._dialled.pop(connection).counted.went()

    def settings_for(self, cluster: LiveCluster) -> ConnectionSettings:
        """Return the settings of tunnel connections to a cluster."""
        return client_settings(cluster, early_data=self._early_data)

    def adopt(
        self,
        connection: Connection,
        cluster: LiveCluster,
        key: TunnelKey,
        tunnels: Iterable[Tunnel],
        *,
        idle_s: float,
        age_s: float,
    ) -> None:
        """Share a connection that another process has dialled; see :meth:`hbone.aio.pool.Pool.adopt`."""
        self._follow(cluster, key, connection, CountedConnection(cluster, self._poller, age_s))
        pool = self._pools.get(cluster) or self._new_pool(cluster)
        pool.adopt(key, connection, tunnels, idle_s=idle_s)

    def retire(self, cluster: LiveCluster) -> Pool | None:
        """Remove and return a cluster's pool. The caller drains it."""
        return self._pools.pop(cluster, None)

    @property
    def pools(self) -> dict[LiveCluster, Pool]:
        """Return the pools in use, for statistics and drain."""
        return self._pools


def request_open(cluster: LiveCluster, host: Host) -> Callable[[], None]:
    """Count an open request in the gauges. Return a function that reverts this."""
    stats = cluster.stats
    stats.rq_active.stored += 1
    host.rq_active += 1
    cluster.breaker.requests += 1

    def closed() -> None:
        stats.rq_active.stored -= 1
        host.rq_active -= 1
        cluster.breaker.requests -= 1

    return closed


def client_settings(cluster: LiveCluster, *, early_data: bool) -> ConnectionSettings:
    """Return the HTTP/2 settings for a cluster: our defaults with the configuration's changes."""
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


def passed_on(
    outer: ConnectionFacts, cluster: LiveCluster, host: Host, transport: TransportSocket
) -> tuple[dict[str, Mapping[str, Any]], tuple[tuple[str, bool], ...]]:
    """Return the metadata and shared filter state that a transport socket passes on to an internal listener."""
    if not isinstance(transport, InternalUpstream):
        return {}, ()
    of_host, of_cluster = host.endpoint.metadata, cluster.model.metadata
    metadata = {name: of_host[name] for name in transport.host if name in of_host}
    metadata |= {name: of_cluster[name] for name in transport.cluster if name in of_cluster}
    return metadata, outer.shared_state


def tunnels(proxy: LiveTcpProxy, info: StreamInfo) -> bool:
    """Return whether a TCP proxy filter opens a tunnel for a connection."""
    return proxy.hostname is not None and DISABLE_TUNNELING not in info.facts.filter_state


def tunnel_request(proxy: LiveTcpProxy, info: StreamInfo) -> tuple[str, list[tuple[str, str]]]:
    """Return the ``:authority`` and the added headers of a tunnel request, in order.

    Raises:
        UpstreamFailed: the host name evaluates to the empty string.
    """
    assert proxy.hostname is not None
    authority = proxy.hostname(info)
    if not authority:
        raise UpstreamFailed("tunnel hostname is empty")
    # Like Envoy: "exists" means in the original request, which has no such headers. Headers that overwrite are set
    # first, and then headers are added.
    overwritten: dict[str, str] = {}
    added: list[tuple[str, str]] = []
    for header in proxy.headers:
        value = header.render(info)
        if not value and not header.keep_empty:
            continue
        if header.action == AppendAction.OVERWRITE_IF_EXISTS_OR_ADD:
            overwritten[header.name] = value
        elif header.action != AppendAction.OVERWRITE_IF_EXISTS:
            added.append((header.name, value))
    return authority, [*overwritten.items(), *added]


def _not_preferred(
    prefer: tuple[Labels, ...],
    cluster: LiveCluster,
    subset: Mapping[str, object] | None,
    failed: frozenset[Host],
) -> frozenset[Host]:
    """Return the hosts to avoid: the hosts that addons do not prefer, unless all preferred hosts have failed."""
    from ztunnel.proxy.envoy.path.addons import without_labels  # most proxies have no addons

    candidates = cluster.candidates(subset)
    avoid = failed | without_labels(prefer, candidates)
    return failed if avoid.issuperset(candidates) else avoid


def _is_repeatable(error: Exception) -> bool:
    return not (isinstance(error, UpstreamFailed) and error.final)
