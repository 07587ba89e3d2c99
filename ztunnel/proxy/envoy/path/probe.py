"""Runs active health checks on a cluster's hosts: by TCP, HTTP/1.1 or gRPC's health service, with the cluster's
TLS.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
from collections.abc import AsyncIterator
from typing import Final, assert_never

from hbone.aio.poller import Poller
from hbone.aio.relay import ByteCounts, RelayEnd, relay
from hbone.aio.socket import PlainSocket
from hbone.aio.tls_socket import TlsSocket
from hbone.errors import HboneError
from hbone.tls_context import TlsContext
from tproxy.errors import TproxyError
from xds.aio.channel import Channel
from xds.aio.health import serves
from xds.errors import XdsError
from xds.grpc.status import RpcFailed, Status
from xds.model.address import PipeAddress, SocketAddress
from xds.model.cluster import InternalUpstream, RawBuffer, proxy_version_of, security_of
from xds.model.health_check import GrpcCheck, HealthCheck, HttpCheck, TcpCheck
from ztunnel.proxy.dataplane.proxy_protocol import LOCAL_HEADER, header_of_version
from ztunnel.proxy.envoy.path.dial import Dialler, secrets_not_ready
from ztunnel.proxy.envoy.stream.outcome import UpstreamFailed
from ztunnel.proxy.envoy.stream.stream_info import UpstreamOptions
from ztunnel.proxy.envoy.upstream.cluster import LiveCluster
from ztunnel.proxy.envoy.upstream.health_state import CheckResult
from ztunnel.proxy.envoy.upstream.host import Host
from ztunnel.runtime.http import client
from ztunnel.runtime.http.client import BadAnswer

log = logging.getLogger(__name__)

_READ: Final = 8 * 1024
#: The expected bytes must occur within this many bytes from the beginning of an answer.
_MOST_READ: Final = 1 << 20
#: Methods whose requests get ``content-length: 0`` if they have no body, like in Envoy.
_WITH_BODY: Final = ("POST", "PUT", "PATCH", "OPTIONS")
_NO_OPTIONS: Final = UpstreamOptions()
#: If a health check raises one of these errors, the host counts as not answering.
_SILENCE = (OSError, HboneError, TproxyError, XdsError, RpcFailed, UpstreamFailed, BadAnswer)


class Prober:
    """Runs health checks on hosts.

    Args:
        poller: this loop's poller.
    """

    def __init__(self, poller: Poller) -> None:
        self._poller = poller
        self._dialler = Dialler(poller)

    async def ask(self, cluster: LiveCluster, host: Host) -> CheckResult:
        """Run one health check within its time limit, and return the outcome."""
        settings = cluster.model.health_check
        assert settings is not None
        try:
            async with asyncio.timeout(settings.timeout_s):
                return await self._ask(cluster, host, settings)
        except _SILENCE as error:  # TimeoutError is an OSError
            log.debug("cluster %s: check of host %s: %s", cluster.model.name, host, error or "no answer in time")
            return CheckResult.NO_ANSWER

    async def _ask(self, cluster: LiveCluster, host: Host, settings: HealthCheck) -> CheckResult:
        match settings.check:
            case GrpcCheck(service):
                return await self._grpc(cluster, host, service, settings.timeout_s)
            case TcpCheck() as check:
                async with self._connection(cluster, host) as connection:
                    return await _tcp(connection, check)
            case HttpCheck() as check:
                own = host.endpoint.check.host if host.endpoint.check is not None else ""
                async with self._connection(cluster, host) as connection:
                    return await _http(connection, check, own or check.host or cluster.model.name)
            case _:
                assert_never(settings.check)

    @contextlib.asynccontextmanager
    async def _connection(self, cluster: LiveCluster, host: Host) -> AsyncIterator[PlainSocket]:
        """Connect to a host for a health check. With TLS, a relay connects a socket pair to the TLS connection."""
        async with contextlib.AsyncExitStack() as stack:
            context = _context(cluster, host)
            sock = await self._dialler.connect(cluster, checked_address(host), _NO_OPTIONS)
            header = _header(cluster, host, sock)
            if header:
                await self._dialler.send_first(sock, header)
            if context is None:
                plain = PlainSocket(sock, self._poller, fresh=True)
                stack.callback(plain.close)
                yield plain
                return
            sealed = TlsSocket(sock, context, self._poller)
            stack.callback(sealed.close)
            await sealed.establish()
            near, far = socket.socketpair()
            near.setblocking(False)
            far.setblocking(False)
            plain, inner = PlainSocket(near, self._poller), PlainSocket(far, self._poller)
            stack.callback(plain.close)
            stack.callback(inner.close)

            def ended(_: RelayEnd) -> None:
                # When the TLS connection ends, close the inner socket, so that the reader of ``plain`` gets EOF.
                self._poller.loop.call_soon(inner.close)

            running = relay(inner, sealed, ByteCounts(), on_end=ended)
            stack.callback(running.abort, "checked")
            yield plain

    async def _grpc(self, cluster: LiveCluster, host: Host, service: str, timeout_s: float) -> CheckResult:
        address = checked_address(host)
        target = str(address) if isinstance(address, SocketAddress) else f"unix:{address.path}"
        async with Channel(target, tls=_context(cluster, host), keepalive=None) as channel:
            try:
                healthy = await serves(channel, service, timeout_s)
            except RpcFailed as error:
                if error.status in (Status.UNAVAILABLE, Status.DEADLINE_EXCEEDED):
                    raise
                return CheckResult.REFUSED
        return CheckResult.PASSED if healthy else CheckResult.REFUSED


def checked_address(host: Host) -> SocketAddress | PipeAddress:
    """Return the address to check. It is never an internal listener, because clusters with internal endpoints have
    no health checks.
    """
    address, own = host.endpoint.address, host.endpoint.check
    assert isinstance(address, (SocketAddress, PipeAddress))
    if own is None:
        return address
    if own.address is not None:
        address = own.address
    if own.port and isinstance(address, SocketAddress):
        return SocketAddress(address.host, own.port)
    return address


def _context(cluster: LiveCluster, host: Host) -> TlsContext | None:
    """Return the TLS context for a host. ``None``: plain text.

    Raises:
        UpstreamFailed: a secret has not arrived.
    """
    _, transport = cluster.model.transport_socket_for(host.endpoint.metadata)
    assert not isinstance(transport, InternalUpstream)
    security = security_of(transport)
    if isinstance(security, RawBuffer):
        return None
    current = cluster.context(security).current
    if current is None:
        raise secrets_not_ready(cluster)
    return current


def _header(cluster: LiveCluster, host: Host, sock: socket.SocketType) -> bytes:
    """Return the PROXY header of a check, or no bytes if the cluster uses none.

    A check has no client. Like in Envoy, the header has the socket's own addresses in version 1, and LOCAL in
    version 2.
    """
    _, transport = cluster.model.transport_socket_for(host.endpoint.metadata)
    version = proxy_version_of(transport)
    if version is None:
        return b""
    if version == 2:
        return LOCAL_HEADER
    if sock.family == socket.AF_UNIX:
        return b"PROXY UNKNOWN\r\n"
    return header_of_version(1, SocketAddress.of(sock.getsockname()), SocketAddress.of(sock.getpeername()))


async def _tcp(connection: PlainSocket, check: TcpCheck) -> CheckResult:
    if check.send:
        connection.send_first(check.send)
    seen, begin = b"", 0
    for wanted in check.receive:
        while (found := seen.find(wanted, begin)) < 0:
            more = await connection.read(_READ)
            if not more or len(seen) > _MOST_READ:
                return CheckResult.NO_ANSWER
            seen += more
        begin = found + len(wanted)
    return CheckResult.PASSED


async def _http(connection: PlainSocket, check: HttpCheck, host: str) -> CheckResult:
    headers = [("Host", host), ("User-Agent", "Envoy/HC"), ("Connection", "close"), *check.headers]
    if check.method in _WITH_BODY:
        headers.append(("Content-Length", "0"))
    status, _ = await client.ask(connection.send_first, connection.read, check.method, check.path, headers)
    if any(start <= status < end for start, end in check.expected):
        return CheckResult.PASSED
    if any(start <= status < end for start, end in check.retriable):
        return CheckResult.NO_ANSWER
    return CheckResult.REFUSED
