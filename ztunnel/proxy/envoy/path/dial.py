"""Opens connections to the hosts of clusters (TCP or Unix socket, with TLS if configured), and counts and limits
them.

Used by ``connect.py`` for TCP proxies, and by ``terminate.py`` for terminated tunnels.
"""

from __future__ import annotations

import asyncio
import errno
import socket
from collections.abc import Coroutine
from typing import Any, TypeAlias

from hbone.aio.end import End
from hbone.aio.poller import Poller
from hbone.aio.socket import PlainSocket
from hbone.aio.tls_socket import TlsSocket
from hbone.errors import HboneError, PeerSilent, PoolClosed, TlsError, TunnelBroken
from tproxy.aio import sockets
from tproxy.errors import ConnectTimedOut, KernelRefused, TproxyError
from xds.model.address import PipeAddress, SocketAddress
from ztunnel.proxy.dataplane.proxy_protocol import header_of_version
from ztunnel.proxy.dataplane.reasons import Reason, reason_of
from ztunnel.proxy.dataplane.upstream import Upstream
from ztunnel.proxy.envoy.listeners.connections import LiveHop
from ztunnel.proxy.envoy.stream.outcome import Overflow, UpstreamFailed
from ztunnel.proxy.envoy.stream.stream_info import StreamInfo, UpstreamOptions
from ztunnel.proxy.envoy.upstream.cluster import LiveCluster, LiveTransport
from ztunnel.proxy.envoy.upstream.host import Host
from ztunnel.proxy.envoy.upstream.outlier import Result

#: An open connection or tunnel to a cluster's host.
ClusterUpstream: TypeAlias = Upstream[LiveHop]


class Dialler:
    """Opens connections to the hosts of clusters.

    Args:
        poller: this loop's poller.
    """

    def __init__(self, poller: Poller) -> None:
        self._poller = poller

    async def dial(
        self,
        info: StreamInfo,
        cluster: LiveCluster,
        host: Host,
        address: SocketAddress | PipeAddress,
        transport: LiveTransport,
    ) -> ClusterUpstream:
        """Open a connection to a host by TCP or a Unix socket, with its PROXY header and TLS.

        Raises:
            Overflow: the cluster has too many connections.
            UpstreamFailed: the connection could not be opened.
        """
        counted = self._began(cluster)
        try:
            end = await self._open_socket(info, cluster, address, transport)
        except BaseException as error:
            counted.failed(error)
            raise
        finally:
            self._over(cluster)
        return self._opened(cluster, host, counted, end)

    def dial_now(
        self, info: StreamInfo, cluster: LiveCluster, host: Host, address: SocketAddress, transport: LiveTransport
    ) -> ClusterUpstream | Coroutine[Any, Any, ClusterUpstream]:
        """Open a connection like :meth:`dial`, but without a coroutine if the host accepts before this method
        returns.

        This is usual within one machine, where the SYN-ACK arrives before connect(2) returns.

        Raises:
            Overflow, UpstreamFailed: see :meth:`dial`.
        """
        options = info.options
        if transport.context is not None or transport.proxy_version is not None or options.first_bytes:
            return self.dial(info, cluster, host, address, transport)
        counted = self._began(cluster)
        try:
            try:
                sock, connected = _connect_now(cluster, address, options)
            except TproxyError as error:
                raise failure_of(cluster, error) from error
        except BaseException as error:
            self._over(cluster)
            counted.failed(error)
            raise
        if not connected:
            return self._finished(info, cluster, host, address, counted, sock)
        self._over(cluster)
        info.upstream_local = str(SocketAddress.of(sock.getsockname()))
        return self._opened(cluster, host, counted, PlainSocket(sock, self._poller, fresh=True))

    async def _finished(
        self,
        info: StreamInfo,
        cluster: LiveCluster,
        host: Host,
        address: SocketAddress,
        counted: CountedConnection,
        sock: socket.SocketType,
    ) -> ClusterUpstream:
        try:
            try:
                await sockets.finish_connect(sock, address, cluster.model.connect_timeout_s)
            except TproxyError as error:
                raise failure_of(cluster, error) from error
            info.upstream_local = str(SocketAddress.of(sock.getsockname()))
        except BaseException as error:
            sock.close()
            counted.failed(error)
            raise
        finally:
            self._over(cluster)
        return self._opened(cluster, host, counted, PlainSocket(sock, self._poller, fresh=True))

    def _began(self, cluster: LiveCluster) -> CountedConnection:
        """Count a connection that is being opened. Called before the first await, so that a burst of connections
        cannot exceed the limits.

        Raises:
            Overflow: the cluster has too many connections.
        """
        breaker = cluster.breaker
        if breaker.connections >= breaker.limits.max_connections:
            cluster.stats.cx_overflow.value += 1
            raise Overflow()
        if breaker.pending >= breaker.limits.max_pending_requests:
            cluster.stats.rq_pending_overflow.value += 1
            raise Overflow()
        breaker.connections += 1
        breaker.pending += 1
        return CountedConnection(cluster, self._poller)

    @staticmethod
    def _over(cluster: LiveCluster) -> None:
        """Undo :meth:`_began`."""
        cluster.breaker.connections -= 1
        cluster.breaker.pending -= 1

    @staticmethod
    def _opened(cluster: LiveCluster, host: Host, counted: CountedConnection, end: End) -> ClusterUpstream:
        count_request(cluster, host)
        counted.connected()
        upstream: ClusterUpstream = Upstream(end, lambda: count_end(cluster, host, counted, upstream))
        return upstream

    async def _open_socket(
        self,
        info: StreamInfo,
        cluster: LiveCluster,
        address: SocketAddress | PipeAddress,
        transport: LiveTransport,
    ) -> End:
        context, version = transport.context, transport.proxy_version
        if context is not None and context.current is None:
            raise secrets_not_ready(cluster)
        options = info.options if version is None else with_header(info, version)
        if context is not None:
            info.upstream_own_uri_sans = context.local_uri_sans
        try:
            if context is None:
                sock = await self.connect(cluster, address, options)
                info.upstream_local = _local_text(sock)
                return PlainSocket(sock, self._poller, fresh=True)
            assert context.current is not None
            async with asyncio.timeout(cluster.model.connect_timeout_s):
                sock = await self.connect(cluster, address, options)
                info.upstream_local = _local_text(sock)
                end = TlsSocket(sock, context.current, self._poller)
                try:
                    facts = await end.establish(cluster.model.connect_timeout_s)
                except BaseException:
                    end.close()
                    raise
                info.upstream_uri_sans = facts.uri_sans
                info.upstream_tls, info.upstream_certificate = facts, context.presented.certificate
                info.upstream_sni = context.model.sni
                cluster.stats.negotiated(facts)
                return end
        except TimeoutError:
            raise UpstreamFailed("connection timeout", timed_out=True) from None
        except (ConnectTimedOut, TproxyError, HboneError) as error:
            raise failure_of(cluster, error) from error

    async def connect(
        self, cluster: LiveCluster, address: SocketAddress | PipeAddress, options: UpstreamOptions
    ) -> socket.socket:
        """Connect a socket to a host, and send the first bytes given in ``options``.

        A TCP socket has the cluster's socket options, and the client's address if ``options`` contain this
        address.

        Raises:
            TproxyError: the connection was refused or reset, or the host is unreachable or did not answer within
                the cluster's connect timeout.
            UpstreamFailed: a Unix socket could not be connected.
        """
        if isinstance(address, PipeAddress):
            sock = await self._connect_pipe(cluster, address.path)
        else:
            sock = await self._connect_tcp(cluster, address, options)
        if options.first_bytes:
            await self.send_first(sock, options.first_bytes)
        return sock

    async def send_first(self, sock: socket.socket, data: bytes) -> None:
        """Send the first bytes of a connection. Closes the socket on failure.

        Raises:
            KernelRefused: the peer has disconnected.
        """
        try:
            await self._poller.loop.sock_sendall(sock, data)
        except OSError as error:
            sock.close()
            raise KernelRefused("a PROXY header", error.errno or errno.ECONNRESET) from error
        except BaseException:
            sock.close()
            raise

    async def _connect_pipe(self, cluster: LiveCluster, path: str) -> socket.socket:
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        sock.setblocking(False)
        try:
            async with asyncio.timeout(cluster.model.connect_timeout_s):
                await self._poller.loop.sock_connect(sock, path)
        except OSError as error:  # includes TimeoutError
            sock.close()
            text = f"{path}: {error.strerror or 'connection timeout'}"
            raise UpstreamFailed(text, failure=reason_of(error)) from error
        except BaseException:
            sock.close()
            raise
        return sock

    async def _connect_tcp(
        self, cluster: LiveCluster, address: SocketAddress, options: UpstreamOptions
    ) -> socket.socket:
        source, own = _source_of(cluster, address, options)
        return await sockets.connect(
            (address.host, address.port),
            source=source,
            own_source=own,
            mark=options.mark or None,
            timeout_s=cluster.model.connect_timeout_s,
            keepalive=_keepalive_of(cluster),
        )


def _source_of(cluster: LiveCluster, address: SocketAddress, options: UpstreamOptions) -> tuple[str | None, bool]:
    """Return the source address from ``upstream_bind_config``, and whether it belongs to this host."""
    # The client's address is not used if a pod connects to itself, because source and destination would be equal.
    source = options.source if options.source != address.host else None
    return source or cluster.model.bind_source or None, source is None


def _keepalive_of(cluster: LiveCluster) -> sockets.Keepalive | None:
    keepalive = cluster.model.keepalive
    if keepalive is None:
        return None
    return sockets.Keepalive(
        idle_s=keepalive.time_s or 7200,
        interval_s=keepalive.interval_s or 75,
        probes=keepalive.probes or 9,
    )


def _connect_now(
    cluster: LiveCluster, address: SocketAddress, options: UpstreamOptions
) -> tuple[socket.SocketType, bool]:
    """Return a socket, and whether it is already connected. If not, the connect is in progress.

    Raises:
        TproxyError: the connection was refused at once, or the host is unreachable.
    """
    source, own = _source_of(cluster, address, options)
    tries = 0 if own else sockets.FOREIGN_PORTS_TRIED
    version, mark, keepalive = 6 if ":" in address.host else 4, options.mark or None, None
    if cluster.model.keepalive is not None:
        keepalive = _keepalive_of(cluster)
    while True:
        (sock,) = sockets.prepared(1, version, mark=mark, keepalive=keepalive)
        try:
            connected = sockets.connect_at_once(
                sock, address, source=source, own_source=own, kernel_port=not tries
            )
        except BaseException as error:
            sock.close()
            if not (tries and sockets.port_is_taken(error)):
                raise
            tries -= 1
        else:
            return sock, connected


class CountedConnection:
    """Counts one upstream connection in its cluster's statistics, from the first SYN to its end.

    Args:
        age_s: for a connection that came from another process, its age there. That process has counted it as new.
            ``None`` for a new connection.
    """

    __slots__ = ("_began_s", "_now_s", "_stats")

    def __init__(self, cluster: LiveCluster, poller: Poller, age_s: float | None = None) -> None:
        self._stats = cluster.stats
        self._now_s = poller.loop.time
        self._began_s = self._now_s() - (age_s or 0.0)
        self._stats.cx_total.value += age_s is None
        self._stats.cx_active.stored += 1

    @property
    def age_s(self) -> float:
        """The connection's age: seconds since its first SYN."""
        return self._now_s() - self._began_s

    def connected(self) -> None:
        """Count the connection as established, after the TCP handshake and, if the cluster uses TLS, the TLS
        handshake.
        """
        self._stats.cx_connect_ms.record((self._now_s() - self._began_s) * 1000)

    def failed(self, error: BaseException) -> None:
        """Count a connection that could not be established.

        Statistics blame the host, unless this proxy timed out, could not bind the source address, or was
        cancelled.
        """
        cause = error.__cause__ if isinstance(error, UpstreamFailed) else error
        bind = isinstance(cause, KernelRefused) and cause.code in _OF_BIND
        self._stats.bind_errors.value += bind
        late = isinstance(error, TimeoutError | ConnectTimedOut | PeerSilent)
        late = late or (isinstance(error, UpstreamFailed) and error.timed_out)
        self.ended(by_peer=isinstance(error, Exception) and not (bind or late), in_use=False)

    def went(self) -> None:
        """Update the counts for a connection that moved to another process, which will count its end."""
        self._stats.cx_active.stored -= 1

    def ended(self, *, by_peer: bool, in_use: bool) -> None:
        """Count the connection's end."""
        stats = self._stats
        stats.cx_active.stored -= 1
        stats.cx_destroy.value += 1
        (stats.cx_destroy_remote if by_peer else stats.cx_destroy_local).value += 1
        if in_use:
            stats.cx_destroy_active.value += 1
            (stats.cx_destroy_remote_active if by_peer else stats.cx_destroy_local_active).value += 1
        stats.cx_length_ms.record((self._now_s() - self._began_s) * 1000)


#: The errors of bind(2) for an address that is not local, or whose ports are all in use.
_OF_BIND = (errno.EADDRNOTAVAIL, errno.EADDRINUSE)


def count_request(cluster: LiveCluster, host: Host) -> None:
    """Count an open connection of a cluster and host. Like in Envoy, it also counts as one request."""
    cluster.stats.rq_total.value += 1
    host.cx_total += 1
    count_open(cluster, host)


def count_open(cluster: LiveCluster, host: Host) -> None:
    """Count an open connection in the gauges only. Another process has opened it, and counted it as new."""
    cluster.stats.rq_active.stored += 1
    host.cx_active += 1
    cluster.breaker.connections += 1


def count_end(cluster: LiveCluster, host: Host, counted: CountedConnection, upstream: ClusterUpstream) -> None:
    """Count the end of a connection that :func:`count_request` has counted."""
    cluster.stats.rq_active.stored -= 1
    host.cx_active -= 1
    cluster.breaker.connections -= 1
    if upstream.moved:
        counted.went()
    else:
        counted.ended(by_peer=upstream.ended_by_peer, in_use=upstream.in_use)


def count_failure(cluster: LiveCluster, host: Host, error: UpstreamFailed) -> None:
    """Count a failed attempt, and report it to outlier detection."""
    host.cx_connect_fail += 1
    cluster.stats.cx_connect_fail.value += 1
    if error.timed_out:
        cluster.stats.cx_connect_timeout.value += 1
    cluster.report(host, Result.FAILURE)


def secrets_not_ready(cluster: LiveCluster) -> UpstreamFailed:
    """Count and return the failure of an attempt that needs a TLS secret which has not arrived."""
    cluster.stats.secrets_not_ready.value += 1
    return UpstreamFailed("TLS_error: Secret is not supplied by SDS", failure=Reason.CERTIFICATE)


def failure_of(cluster: LiveCluster, error: Exception) -> UpstreamFailed:
    """Count an error that a library raised, and return it as an UpstreamFailed with a text for logs."""
    if isinstance(error, UpstreamFailed):
        return error
    if isinstance(error, TlsError):
        cluster.stats.ssl_failed(error)
        return UpstreamFailed(f"TLS_error: {error}", failure=Reason.TLS)
    timed_out = isinstance(error, ConnectTimedOut | PeerSilent)
    if timed_out:
        return UpstreamFailed("connection timeout", timed_out=True)
    if isinstance(error, PoolClosed):
        return UpstreamFailed("the cluster is going away", failure=Reason.DRAIN)
    if isinstance(error, TunnelBroken):
        return UpstreamFailed(f"tunnel failed: {error}", final=error.perhaps_delivered, failure=Reason.HTTP2)
    return UpstreamFailed(f"delayed connect error: {_reason(error)}", failure=reason_of(error))


def with_header(info: StreamInfo, version: int) -> UpstreamOptions:
    """Return the socket options of a connection with a PROXY header of ``version``."""
    return info.options._replace(first_bytes=header_of_version(version, info.source, info.facts.destination))


def _local_text(sock: socket.socket) -> str:
    return "" if sock.family == socket.AF_UNIX else str(SocketAddress.of(sock.getsockname()))


def _reason(error: Exception) -> str:
    cause = getattr(error, "error", None)
    return cause.strerror if isinstance(cause, OSError) and cause.strerror else str(error)
