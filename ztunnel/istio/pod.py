"""The proxy of one pod: its listeners, its tunnels, the table of its connections.

Every socket is made in the pod's network namespace and stays there; the process is in it only for the moment of
making one. In dedicated mode there is no namespace to enter, and the one workload is the "pod".
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import socket
from collections.abc import Awaitable, Callable, Collection, Hashable, Sequence
from typing import TYPE_CHECKING, NamedTuple, Protocol

from cryptography import x509

from hbone.aio.connection import Connection, connect
from hbone.aio.pool import Pool
from hbone.aio.tunnel import TunnelCarrier
from hbone.pool import PoolSettings
from tproxy.aio import sockets
from tproxy.aio.netns import Netns
from tproxy.errors import KernelRefused, NeedCapability, TproxyError
from xds.model.address import SocketAddress
from xds.model.facts import ConnectionFacts
from xds.model.mesh import Changes, WorkloadPolicies
from xds.model.workload import Workload
from ztunnel.identity.crl import RevocationLists
from ztunnel.istio import socks5
from ztunnel.istio.certificates.manager import WorkloadCertificate
from ztunnel.istio.config import (
    HBONE_PORT,
    OUTBOUND_PORT,
    PLAINTEXT_PORT,
    SOCKS_PORT,
    AmbientConfig,
    OriginalSource,
    PodName,
)
from ztunnel.istio.node import Described, Node
from ztunnel.istio.outcome import DRAINED, REVOKED, EarlyDeny
from ztunnel.istio.record import Record
from ztunnel.runtime.accepting import ListeningSocket, hand_over
from ztunnel.runtime.tasks import Tasks

if TYPE_CHECKING:
    from ztunnel.istio.inbound import Joined

log = logging.getLogger(__name__)

#: How long the control plane may take to tell about a pod that just came.
_WORKLOAD_WAIT_S = 5.0
BACKLOG = 1024
#: How long idle tunnels may take to hear that there will be no more: some round trips; a guess.
_GOODBYE_S = 1.0


class PoolKey(NamedTuple):
    """What two tunnels must have in common to share a connection."""

    address: SocketAddress
    identities: tuple[str, ...]
    certificate: WorkloadCertificate
    generation: int


class Live:
    """One connection in the table.

    Attributes:
        original: what was dialled (outbound), or the service the client meant (inbound), for the dump.
        actual: the application's address (inbound).
        protocol: ``TCP``, ``HBONE`` or ``DOUBLEHBONE``.
        facts: inbound: what policies judge.
        admitted: inbound: it has been let in, so that a change of policies is its concern.
        connection: the tunnel connection that carries it.
        inner: of a double tunnel, the connection within.
        peer: whose certificate the other end has, where no TLS is in between to prove it.
        reason: why it was ended by us.
    """

    __slots__ = (
        "_end",
        "actual",
        "admitted",
        "connection",
        "facts",
        "inner",
        "original",
        "peer",
        "protocol",
        "reason",
        "record",
    )

    def __init__(self, record: Record, end: Callable[[str], object]) -> None:
        self.record = record
        self.original: str | None = None
        self.actual: SocketAddress | None = None
        self.protocol = "TCP"
        self.facts: ConnectionFacts | None = None
        self.admitted = False
        self.connection: TunnelCarrier | None = None
        self.inner: Connection | None = None
        self.peer: WorkloadCertificate | None = None
        self.reason = ""
        self._end = end

    def ends_by(self, end: Callable[[str], object]) -> None:
        """From now on the connection is ended by calling this with a reason."""
        self._end = end
        if self.reason:
            end(self.reason)

    def end(self, reason: str) -> None:
        """End the connection."""
        if not self.reason:
            self.reason = reason
            self._end(reason)


class LocalWorkload:
    """The workload a pod is, as soon and as long as the control plane says so."""

    def __init__(self, node: Node, name: PodName) -> None:
        self._node = node
        self._name = name
        self._current = node.mesh.local_workload(name.name, name.namespace, name.service_account)
        self._waiting: set[asyncio.Future[None]] = set()

    @property
    def current(self) -> Workload | None:
        """What is known now."""
        return self._current

    def changed(self, changes: Changes) -> bool:
        """The mesh changed; whether this workload did."""
        before = self._current
        if before is None or before.uid in changes.workloads:
            name = self._name
            self._current = self._node.mesh.local_workload(name.name, name.namespace, name.service_account)
        if self._current is not None:
            for future in self._waiting:
                if not future.done():
                    future.set_result(None)
        return self._current is not before

    async def get(self) -> Described:
        """The workload, waiting for it.

        Raises:
            EarlyDeny: the control plane does not know it.
        """
        if self._current is None:
            future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._waiting.add(future)
            try:
                async with asyncio.timeout(_WORKLOAD_WAIT_S):
                    await future
            except TimeoutError:
                pass
            finally:
                self._waiting.discard(future)
        if self._current is None:
            name = self._name
            raise EarlyDeny(
                "failed to fetch information about local workload: "
                f"{name.service_account}.{name.namespace} ({name.name})"
            )
        return self._node.described(self._current)


class Join(Protocol):
    """See :meth:`ztunnel.istio.inbound.Inbound.join`."""

    async def __call__(
        self,
        outer: Live,
        who: Described,
        own: WorkloadCertificate,
        local: SocketAddress,
        authority: str,
        service: str | None,
    ) -> Joined | None:
        """The inbound half, or ``None`` when the tunnel must go over the wire."""


def is_revoked(lists: RevocationLists, certificate: WorkloadCertificate) -> bool:
    """What a handshake would find of a certificate of this node."""
    issued = certificate.issued
    return any(lists.is_revoked((*issued.chain, root)) for root in issued.roots)


def ends_this_task() -> Callable[[str], object]:
    """How to end a connection while nothing flows yet: cancel what it waits for."""
    task = asyncio.current_task()
    assert task is not None
    return task.cancel


class Bound(NamedTuple):
    """A socket for one of a pod's ports, bound and not yet listening.

    Attributes:
        transparent: what it accepts can go on in the client's name.
    """

    sock: socket.socket
    address: SocketAddress
    transparent: bool


def ports(config: AmbientConfig, *, only_tunnels: bool = False) -> dict[int, str]:
    """Ports of a pod to listen on and what they are for, in the order of binding."""
    if not config.proxy:
        return {}
    if only_tunnels:
        return {HBONE_PORT: "inbound"}
    found = {HBONE_PORT: "inbound", PLAINTEXT_PORT: "inbound plaintext", OUTBOUND_PORT: "outbound"}
    if config.socks5:
        found[SOCKS_PORT] = "socks5"
    return found


def bind(node: Node, netns: Netns | None, *, only_tunnels: bool = False) -> list[Bound]:
    """Bind every port of a pod.

    Raises:
        TproxyError: a port is taken, or a capability is missing.
    """
    bound: list[Bound] = []
    try:
        for port, component in ports(node.config, only_tunnels=only_tunnels).items():
            try:
                each = _bound(node, netns, port, only_tunnels=only_tunnels)
            except TproxyError as error:
                raise TproxyError(f"failed to bind to port {port} ({component}): {error}") from error
            bound.append(each)
            log.info(
                "listener established address=%s component=%s transparent=%s",
                each.address,
                component,
                str(each.transparent).lower(),
            )
    except BaseException:
        for each in bound:
            each.sock.close()
        raise
    return bound


def _bound(node: Node, netns: Netns | None, port: int, *, only_tunnels: bool) -> Bound:
    config = node.config
    hosts = ("127.0.0.1",) if port == SOCKS_PORT else ("::", "0.0.0.0") if config.ipv6 else ("0.0.0.0",)
    wanted = config.original_source is not OriginalSource.OFF and not only_tunnels
    for host in hosts:
        try:
            try:
                sock, transparent = _unheard(config, netns, host, port, transparent=wanted), wanted
            except NeedCapability:
                if config.original_source is OriginalSource.REQUIRED or not wanted:
                    raise
                sock, transparent = _unheard(config, netns, host, port, transparent=False), False
        except KernelRefused as error:
            if host == "::" and error.code in (errno.EAFNOSUPPORT, errno.EADDRNOTAVAIL):
                continue  # a pod without IPv6
            raise
        if port in (OUTBOUND_PORT, PLAINTEXT_PORT) and node.keepalive is not None:
            sockets.set_keepalive(sock, node.keepalive)  # what it accepts inherits it
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return Bound(sock, SocketAddress(host, port), transparent)
    raise AssertionError("the last host of the list raises")


def _unheard(
    config: AmbientConfig, netns: Netns | None, host: str, port: int, *, transparent: bool
) -> socket.socket:
    shared = netns is not None
    return sockets.listen(
        host,
        port,
        transparent=transparent,
        mark=config.packet_mark if shared else None,
        reuse_port=shared and config.inpod_port_reuse,
        netns=netns,
        backlog=0,
    )


class PodProxy:
    """See the module.

    Args:
        node: what pods share.
        name: which pod.
        netns: where its sockets are made; ``None``: here.
        only_tunnels: the proxy's own pod: it takes tunnels to itself and captures nothing.
    """

    def __init__(self, node: Node, name: PodName, netns: Netns | None, *, only_tunnels: bool = False) -> None:
        self.node = node
        self.name = name
        self.netns = netns
        self.local = LocalWorkload(node, name)
        self.pool = Pool(
            self._dial,
            PoolSettings(
                max_streams_per_connection=node.config.pool_max_streams,
                idle_timeout_s=node.config.pool_unused_release_s,
            ),
        )
        self.tasks = Tasks(f"{name.namespace}/{name.name}")
        self.outbound: dict[Live, None] = {}
        self.inbound: dict[Live, None] = {}
        #: Accepted and in no table yet: TLS or SOCKS is being negotiated, or a certificate is awaited.
        self.arriving: set[socket.socket] = set()
        #: Tunnel connections that end here, with the peer's chain: drained, and re-checked for revocation.
        self.tunnels: dict[Connection, tuple[x509.Certificate, ...]] = {}
        self.preserves_source = {HBONE_PORT: False, PLAINTEXT_PORT: False}
        #: The inbound side's way in for tunnels that never leave the node.
        self.join: Join | None = None
        #: Looks names up as the pod would; ``None`` without a DNS proxy.
        self.resolver: socks5.Resolve | None = None
        #: What else ends with the pod.
        self.closing: list[Callable[[], Awaitable[None]]] = []
        #: Told when other policies judge connections to this pod than did before.
        self.on_policies: Callable[[Workload, WorkloadPolicies], None] | None = None
        #: No new tunnels: connections that bring some are told so as soon as there are any.
        self.draining = False
        self._only_tunnels = only_tunnels
        self._listeners: list[ListeningSocket] = []
        self._judged_by: WorkloadPolicies | None = None
        self._stop_watching = node.mesh.watch(self._changed)
        self._one_left = asyncio.Event()

    # Sockets

    def bind(
        self,
        accepted: dict[int, Callable[[socket.socket, tuple[str, int]], None]],
        bound: Sequence[Bound] | None = None,
    ) -> None:
        """Listen on every port.

        Args:
            bound: sockets that somebody else has bound, ours from now on.

        Raises:
            TproxyError: a port is taken, or a capability is missing.
        """
        if bound is None:
            bound = bind(self.node, self.netns, only_tunnels=self._only_tunnels)
        for each in bound:
            listener = ListeningSocket(
                each.sock, each.address, BACKLOG, self.node.poller, is_ours=self.node.is_ours
            )
            listener.accepted = accepted[each.address.port]
            self._listeners.append(listener)
            if each.address.port in self.preserves_source:
                self.preserves_source[each.address.port] = each.transparent and not self._only_tunnels
        for listener in self._listeners:
            listener.start()

    async def connect(self, address: SocketAddress, *, source: str | None = None) -> socket.socket:
        """A TCP connection out of the pod, as ``source`` if that is not where it goes to.

        Raises:
            TproxyError: refused, unreachable, not within the time limit.
        """
        config, node = self.node.config, self.node
        if source == address.host:
            source = None  # a pod that talks to itself cannot be impersonated
        mark = config.packet_mark if not self._only_tunnels else None
        options: tuple[sockets.SocketOption, ...] = ()
        if config.socket.user_timeout and config.socket.keepalive_time_s is not None:
            limit_s = (
                config.socket.keepalive_time_s
                + config.socket.keepalive_retries * config.socket.keepalive_interval_s
            )
            options = ((socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(limit_s * 1000)),)
        return await sockets.connect(
            (address.host, address.port),
            source=source,
            mark=mark,
            timeout_s=config.connect_timeout_s,
            netns=self.netns,
            keepalive=node.keepalive,
            socket_options=options,
        )

    # Tunnels

    async def certificate(self, workload: Workload) -> WorkloadCertificate:
        """The workload's certificate.

        Raises:
            IdentityError: none can be had.
        """
        identity = workload.identity
        certificates = self.node.certificates
        return certificates.current(identity) or await certificates.fetch(identity)

    async def _dial(self, key: Hashable) -> Connection:
        assert isinstance(key, PoolKey)
        sock = await self.connect(key.address)
        context = key.certificate.client_context(key.identities)
        return await connect(sock, context, self.node.client_settings, self.node.poller)

    async def resolve_name(self, name: str, *, ipv6: bool) -> str | None:
        """The first address of a name, as the pod's DNS proxy says."""
        return None if self.resolver is None else await self.resolver(name, ipv6=ipv6)

    # The table

    def left(self, live: Live, table: dict[Live, None]) -> None:
        """A connection is over; it need not have been in the table."""
        table.pop(live, None)
        self._one_left.set()

    def arrived(self, sock: socket.socket) -> None:
        """What was accepted is in a table now, or will never be; again is fine."""
        self.arriving.discard(sock)
        self._one_left.set()

    def tunnel_left(self, connection: Connection) -> None:
        """A tunnel connection is over."""
        self.tunnels.pop(connection, None)
        self._one_left.set()

    # Change

    def _changed(self, changes: Changes) -> None:
        self.local.changed(changes)
        workload = self.local.current
        if workload is None:
            return
        policies = self.node.mesh.policies_for(workload)
        if policies is not self._judged_by:
            self._judged_by = policies
            if self.on_policies is not None:
                self.on_policies(workload, policies)

    def end_revoked(self, lists: RevocationLists) -> None:
        """End every connection whose peer is on a list now."""
        rejections = self.node.metrics.crl_rejections
        for connection, chain in list(self.tunnels.items()):
            if chain and lists.is_revoked(chain):
                rejections["destination"] += 1
                for live in [live for live in self.inbound if live.connection is connection]:
                    live.end(REVOKED)
                connection.close()
        for connection in self.pool.connections:
            if connection.facts is not None and lists.is_revoked(connection.facts.chain):
                rejections["source"] += 1
                for live in [live for live in self.outbound if live.connection is connection]:
                    live.end(REVOKED)
                connection.abort(REVOKED)
        for reporter, table in (("destination", self.inbound), ("source", self.outbound)):
            for live in list(table):
                inner = live.inner.facts if live.inner is not None else None
                if (inner is not None and lists.is_revoked(inner.chain)) or (
                    live.peer is not None and is_revoked(lists, live.peer)
                ):
                    rejections[reporter] += 1
                    live.end(REVOKED)

    # The end

    def _close_listeners(self) -> None:
        for listener in self._listeners:
            listener.close()
        self._listeners = []

    async def stop(self) -> None:
        """End at once; again is fine."""
        self.join = None  # what came in from now on nobody would end
        self._close_listeners()
        self._stop_watching()
        for connection in list(self.tunnels):
            connection.abort("pod removed")
        for live in (*self.inbound, *self.outbound):
            live.end(DRAINED)
        await self.tasks.close()
        await self.pool.close()
        while self.closing:
            await self.closing.pop()()

    async def drain(self, timeout_s: float) -> None:
        """Stop accepting, say GOAWAY, give what runs until the deadline, then abort.

        What was connected before is accepted before: closing a listener resets whatever waits there. A successor
        takes what is new meanwhile. Handshakes under way get the time to become tunnels, and their peers hear
        GOAWAY instead of a reset.
        """
        self.draining = True
        deadline_s = self.node.poller.loop.time() + timeout_s
        await hand_over(self._listeners)
        self._close_listeners()
        await asyncio.sleep(0)  # what was accepted just now enters the tables
        for connection in list(self.tunnels):
            connection.drain()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout_at(deadline_s):
                # A peer may have asked for a tunnel before it heard of the end, or may be about to hear.
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(_GOODBYE_S):
                        await self._all_left(self.arriving, self.inbound, self.outbound, self.tunnels)
                await self._all_left(self.inbound, self.outbound)
        left = len(self.inbound) + len(self.outbound)
        if left:
            log.warning("drain duration expired with pending connections, forcefully shutting down")
        await self.stop()

    async def _all_left(self, *tables: Collection[object]) -> None:
        while any(tables):
            self._one_left.clear()
            await self._one_left.wait()

    def dump(self) -> dict[str, list[dict[str, str | None]]]:
        """``connections`` of the dump; equal inbound ones collapse, as upstream's table is keyed by them."""
        inbound = {
            (str(live.record.source), live.original, str(live.actual), live.protocol): None
            for live in self.inbound
        }
        return {
            "inbound": [
                {"actualDst": actual, "originalDst": original, "protocol": protocol, "src": src}
                for src, original, actual, protocol in inbound
            ],
            "outbound": [
                {
                    "actualDst": str(live.record.destination),
                    "originalDst": live.original,
                    "protocol": live.protocol,
                    "src": str(live.record.source),
                }
                for live in self.outbound
            ],
        }
