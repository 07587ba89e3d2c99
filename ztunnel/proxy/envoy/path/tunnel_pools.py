"""The pools of tunnel connections, one for each cluster."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Hashable, Iterable, Mapping
from dataclasses import replace
from functools import partial
from typing import NamedTuple

from hbone.aio.connection import Connection
from hbone.aio.connection_settings import ConnectionSettings, default_client
from hbone.aio.poller import Poller
from hbone.aio.pool import Pool
from hbone.aio.tunnel import Tunnel
from hbone.pool import ConnectionId, PoolSettings
from xds.model.address import SocketAddress
from ztunnel.proxy.dataplane.pool_key import PoolKey, dial_connection
from ztunnel.proxy.envoy.path.dial import CountedConnection, Dialler, secrets_not_ready, with_header
from ztunnel.proxy.envoy.secrets.contexts import LiveContext
from ztunnel.proxy.envoy.stream.outcome import UpstreamFailed
from ztunnel.proxy.envoy.stream.stream_info import StreamInfo, UpstreamOptions
from ztunnel.proxy.envoy.upstream.cluster import LiveCluster, LiveTransport
from ztunnel.proxy.flows.times import ConnectionTimes

#: The key of a pooled tunnel connection in Envoy's dialect. It contains the TLS context's source and the socket
#: options.
TunnelKey = PoolKey[LiveContext | None, UpstreamOptions]


class Dialled(NamedTuple):
    """An open tunnel connection of a pool: the cluster, the key in the cluster's pool, and the statistics."""

    cluster: LiveCluster
    key: TunnelKey
    counted: CountedConnection


class TunnelPools:
    """The tunnel connection pools of all clusters, with their connections: dialled, or taken over from another
    process.

    Args:
        dialler: opens sockets.
        poller: this loop's poller.
        times: records the durations of handshakes.
        early_data: whether to send the first bytes of a connection along with its CONNECT, if the peer announces
            that it buffers these bytes.
    """

    def __init__(self, dialler: Dialler, poller: Poller, times: ConnectionTimes, *, early_data: bool) -> None:
        self._dialler = dialler
        self._poller = poller
        self._times = times
        self._early_data = early_data
        self._pools: dict[LiveCluster, Pool] = {}
        self._dialled: dict[Connection, Dialled] = {}

    def of(self, cluster: LiveCluster) -> Pool | None:
        """Return a cluster's pool. ``None`` if no tunnel was opened yet."""
        return self._pools.get(cluster)

    def key_of(
        self, info: StreamInfo, cluster: LiveCluster, transport: LiveTransport, address: SocketAddress
    ) -> TunnelKey:
        """Return the pool key of connections that can carry a tunnel, and store the identities we present on these
        connections.

        Raises:
            UpstreamFailed: the cluster's certificate has not arrived.
        """
        context, version = transport.context, transport.proxy_version
        if context is not None and context.current is None:
            raise secrets_not_ready(cluster)
        info.upstream_own_uri_sans = context.presented.uri_sans if context is not None else ()
        options = info.options if version is None else with_header(info, version)
        return PoolKey(address, context, context.generation if context is not None else 0, options)

    def reserve(
        self, info: StreamInfo, cluster: LiveCluster, transport: LiveTransport, address: SocketAddress
    ) -> tuple[Pool, ConnectionId] | None:
        """Reserve a place for a tunnel on an open connection; see :meth:`hbone.aio.pool.Pool.reserve`.

        Returns:
            The pool and the place, or ``None`` if no open connection has room.

        Raises:
            UpstreamFailed: see :meth:`key_of`.
        """
        key = self.key_of(info, cluster, transport, address)
        pool = self._pools.get(cluster)
        place = pool.reserve(key) if pool is not None else None
        return (pool, place) if pool is not None and place is not None else None

    def new(self, cluster: LiveCluster) -> Pool:
        """Add a cluster's pool."""
        settings = self.settings_for(cluster)

        async def dial(key: Hashable) -> Connection:
            assert isinstance(key, PoolKey)
            return await self._dial_tunnel(cluster, key, settings)

        limits = PoolSettings(
            idle_timeout_s=cluster.model.connection_idle_timeout_s or math.inf,  # 0: never, as in Envoy
            max_tunnels_per_connection=cluster.model.max_requests_per_connection,
            max_waiters=cluster.breaker.limits.max_pending_requests,
        )
        http2 = cluster.model.http2
        if http2 is not None and http2.max_concurrent_streams is not None:
            limits = replace(limits, max_streams_per_connection=http2.max_concurrent_streams)
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

    # Hand-over of connections to and from another process: see ztunnel.proxy.envoy.handover

    @property
    def dialled(self) -> Mapping[Connection, Dialled]:
        """The open tunnel connections of all pools."""
        return self._dialled

    def idle_s(self, connection: Connection) -> float | None:
        """Return how long a tunnel connection has been idle, in seconds. ``None`` if its cluster was replaced."""
        pool = self._pools.get(self._dialled[connection].cluster)
        return None if pool is None else pool.idle_s(connection)

    def went(self, connection: Connection) -> None:
        """Update the counts for a connection that moved to another process, which will count its end."""
        self._dialled.pop(connection).counted.went()

    def settings_for(self, cluster: LiveCluster) -> ConnectionSettings:
        """Return the HTTP/2 settings for tunnel connections to a cluster."""
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
        """Add a connection that another process has dialled to its pool; see :meth:`hbone.aio.pool.Pool.adopt`."""
        self._follow(cluster, key, connection, CountedConnection(cluster, self._poller, age_s))
        pool = self._pools.get(cluster) or self.new(cluster)
        pool.adopt(key, connection, tunnels, idle_s=idle_s)

    def retire(self, cluster: LiveCluster) -> Pool | None:
        """Remove and return a cluster's pool. The caller drains it."""
        return self._pools.pop(cluster, None)

    @property
    def pools(self) -> Mapping[LiveCluster, Pool]:
        """All tunnel connection pools, for statistics and draining."""
        return self._pools


def client_settings(cluster: LiveCluster, *, early_data: bool) -> ConnectionSettings:
    """Return the HTTP/2 settings for a cluster: our defaults, changed by the configuration."""
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
