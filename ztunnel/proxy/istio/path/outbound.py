"""START HERE for connections from pods: the path of a captured connection, from accept to end.

:meth:`Outbound.serve` follows a connection top to bottom: the dialling pod, the route, the tunnel or the plain
connection, the bytes. If an endpoint fails before answering, another endpoint is tried, within a limit of attempts
and time (:mod:`ztunnel.proxy.dataplane.attempts`). Meanwhile the application's first bytes stay in the kernel,
even if a copy is sent along with the CONNECT, so no bytes are lost. Once an endpoint could have received these
bytes, no other endpoint is tried, so no bytes are delivered twice.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
from collections.abc import Awaitable, Callable, Collection, Coroutine
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, assert_never

from hbone.aio.connection import Connection, connect
from hbone.aio.deadline import Deadline
from hbone.aio.end import End
from hbone.aio.fiber import current
from hbone.aio.relay import LINGER_S, ByteCounts, RelayEnd, relay
from hbone.aio.socket import PlainSocket
from hbone.errors import HboneError, TlsError, TlsReason, TunnelBroken
from hbone.events import Header, Headers
from hbone.tunnel_headers import format_forwarded, format_traceparent, parse_baggage
from tproxy.errors import TproxyError
from xds.model.address import SocketAddress, canonical, is_loopback
from xds.model.identity import SpiffeId
from xds.model.workload import WorkloadUid
from ztunnel.proxy.dataplane.attempts import ANSWER_TIMEOUT_S, RETRY_WINDOW_S, Attempts, GiveUp
from ztunnel.proxy.dataplane.life_table import ALLOWED, State, Verdict
from ztunnel.proxy.dataplane.live_table import Life, cancels_current_task
from ztunnel.proxy.dataplane.reasons import Reason
from ztunnel.proxy.dataplane.resolver import ResolveFailed
from ztunnel.proxy.dataplane.upstream import Upstream
from ztunnel.proxy.istio.accounting.access_record import Direction, Record
from ztunnel.proxy.istio.accounting.outcome import (
    RECURSIVE_CALL,
    REVOKED,
    EarlyDeny,
    Failed,
    dial_failure,
    of_reason,
    of_relay,
    worth_another_endpoint,
)
from ztunnel.proxy.istio.accounting.workload_labels import WorkloadLabels
from ztunnel.proxy.istio.certificates.manager import IdentityError
from ztunnel.proxy.istio.path import socks5
from ztunnel.proxy.istio.path.balance import Labels
from ztunnel.proxy.istio.path.node import Node
from ztunnel.proxy.istio.path.node_local import InboundHalf, NodeLocalRequest, TunnelRequest
from ztunnel.proxy.istio.path.planned import PlannedOutbound
from ztunnel.proxy.istio.path.plans import Plan, Plans, enter_route
from ztunnel.proxy.istio.path.pod_connection import PodConnection
from ztunnel.proxy.istio.path.pod_context import PodContext
from ztunnel.proxy.istio.path.pod_tunnels import PodTunnels
from ztunnel.proxy.istio.path.route import (
    Client,
    Direct,
    DoubleTunnel,
    Missing,
    Named,
    Route,
    RouteRefused,
    Tunnel,
    route_for,
)
from ztunnel.proxy.istio.settings.config import HBONE_PORT
from ztunnel.runtime.line_limit import LineLimit

if TYPE_CHECKING:
    from ztunnel.proxy.istio.path.open_ahead import OpenAhead

log = logging.getLogger(__name__)

#: How often to check whether a double tunnel's last bytes have been sent, in seconds (a guess).
_CHECK_S = 0.01
#: The largest number of on-demand requests to the control plane for one routing decision.
_MOST_QUESTIONS = 8

_DIAL_ERRORS = (HboneError, TproxyError, IdentityError, OSError)


class OutboundUpstream(Upstream[Life]):
    """The open next hop of a pod's connection: a plain connection or a tunnel.

    Attributes:
        inbound_half: the inbound half, if the tunnel is node-local.
        flush_inner: for a double tunnel, delivers the bytes that were written to ``end`` but are still in this
            process. Otherwise ``None``.
    """

    __slots__ = ("flush_inner", "inbound_half")

    def __init__(self, end: End, inbound_half: InboundHalf | None = None) -> None:
        super().__init__(end)
        self.inbound_half = inbound_half
        self.flush_inner: Callable[[], Awaitable[None]] | None = None


class Beginning(NamedTuple):
    """The decision and the attempt already made for a connection before its coroutine starts.

    Attributes:
        route: the route of the first attempt.
        error: the error of the first attempt, if it has already failed.
        opened: whether the connection's record is already opened.
        is_stale: whether the mesh has changed since the decision, so that a further attempt needs a new one.
    """

    route: Tunnel
    error: Exception | None = None
    opened: bool = False
    is_stale: bool = False

    @property
    def target(self) -> SocketAddress:
        """The address to dial first. Planned routes have an address, never an unresolved name."""
        assert isinstance(self.route.target, SocketAddress)
        return self.route.target


class PodCall(NamedTuple):
    """One outbound connection while it is being opened.

    Attributes:
        entry: the connection's entry.
        labels: the pod's labels when the connection arrived.
        client: the application's socket, whose first bytes can be sent along with a CONNECT. ``None`` if a tap
            must capture them first.
        application: the application's end.
    """

    entry: PodConnection
    labels: WorkloadLabels
    client: PlainSocket | None
    application: PlainSocket


class Outbound(PlannedOutbound):
    """Carries the connections that one pod opens.

    Args:
        pod: the shared state of the pod.
        tunnels: opens tunnels.
        resolve: resolves names for SOCKS clients.
    """

    def __init__(self, pod: PodContext, tunnels: PodTunnels, resolve: socks5.Resolve) -> None:
        self._illegal_ports = pod.node.config.illegal_ports
        super().__init__(pod, Plans(pod, self._illegal_ports), tunnels.pool)
        self._node = pod.node
        self.tunnels = tunnels
        self._resolve = resolve
        self._socks_lines = LineLimit(pod.node.clock, _socks_lines_suppressed)
        self._ahead: OpenAhead | None = None
        if pod.node.config.open_ahead:
            from ztunnel.proxy.istio.path.open_ahead import OpenAhead  # an option that is off by default

            self._ahead = OpenAhead(pod, self._plans, tunnels.pool, pod.node.config.open_ahead)

    # Accepting

    def serve_soon(
        self, client: PlainSocket, source: SocketAddress, destination: SocketAddress, plan: Plan | None
    ) -> None:
        """Check an open connection again; see :class:`~ztunnel.proxy.istio.path.planned.PlannedOutbound`."""
        self._run(self._captured(client, source, destination, plan))

    def _run(self, work: Coroutine[Any, Any, None]) -> None:
        self._pod.tasks.run(self._node.poller, work, "outbound")

    def accepted_socks(self, sock: socket.SocketType, peer: tuple[str, int]) -> None:
        """Start serving a SOCKS5 client; returns at once. Called by the listener on port 15080."""
        life = Life(self._pod.connections.arriving)
        self._pod.tasks.run(self._node.poller, self._socks(life, sock, peer), "socks5")

    def close(self) -> None:
        """Stop tracking the mesh. Idempotent. Open connections are ended by their owner, the pod's connection
        groups.
        """
        if self._ahead is not None:
            self._ahead.close()

    async def _captured(
        self, client: PlainSocket, source: SocketAddress, destination: SocketAddress, plan: Plan | None
    ) -> None:
        try:
            await self.serve(client, source, destination, Beginning(plan.route) if plan is not None else None)
        finally:
            client.close()

    async def _socks(self, life: Life, sock: socket.SocketType, peer: tuple[str, int]) -> None:
        client = PlainSocket(sock, self._node.poller)
        life.aborts_by(cancels_current_task(self._node.poller))
        try:
            destination = await socks5.accept(client, self._resolve, partial(self._socks_refused, peer))
            life.close()  # serve() registers the connection without an await, so a drain never misses it
            if destination is not None:
                await self.serve(client, SocketAddress(canonical(peer[0]), peer[1]), destination)
        except OSError as error:
            log.debug("a SOCKS client: %s", error)
        finally:
            life.close()
            client.close()

    def _socks_refused(self, peer: tuple[str, int], why: str) -> None:
        if self._socks_lines.admits():
            source = SocketAddress(canonical(peer[0]), peer[1])
            log.warning("failed to negotiate socks connection: %s src.addr=%s", why, source)

    # One connection

    async def serve(
        self,
        client: PlainSocket,
        source: SocketAddress,
        destination: SocketAddress,
        begun: Beginning | None = None,
    ) -> None:
        """Carry a connection to its destination, and complete its record. The caller closes ``client``."""
        record = Record(self._node, Direction.OUTBOUND, source, destination)
        cancel = current(self._node.poller).cancel
        entry = PodConnection(self._pod.connections.outbound, record, cancel, self.verdict)
        entry.original = str(destination)
        await self._serve(entry, client, destination, begun)

    def go_on(
        self,
        entry: PodConnection,
        client: PlainSocket,
        destination: SocketAddress,
        plan: Plan,
        error: Exception | None,
        *,
        is_stale: bool,
    ) -> None:
        """Continue in a coroutine after the planned attempt; see
        :class:`~ztunnel.proxy.istio.path.planned.PlannedOutbound`.
        """
        # If the peer has not processed the CONNECT, it is sent to the same endpoint again, perhaps on another
        # connection, as the pool also does.
        repeats = isinstance(error, TunnelBroken) and error.unprocessed
        begun = Beginning(plan.route, None if repeats else error, opened=True, is_stale=is_stale)
        self._run(self._going_on(entry, client, destination, begun))

    async def _going_on(
        self, entry: PodConnection, client: PlainSocket, destination: SocketAddress, begun: Beginning
    ) -> None:
        try:
            entry.aborts_by(cancels_current_task(self._node.poller))
            await self._serve(entry, client, destination, begun)
        finally:
            client.close()

    async def _serve(
        self, entry: PodConnection, client: PlainSocket, destination: SocketAddress, begun: Beginning | None
    ) -> None:
        """Carry a registered connection. Every error is turned into a log line, response flags and counters here,
        in one place.
        """
        node, record = self._node, entry.record
        failure: Failed | None = None
        node.count_sockets("source", +1)
        try:
            failure = await self._carry(entry, client, destination, begun)
        except EarlyDeny as denial:
            record.denied_early(denial)
        except Failed as error:
            failure = error
        except asyncio.CancelledError:
            failure = of_reason(entry.reason)
            raise
        except Exception as error:
            record.failed_by_bug(error)
            raise
        finally:
            node.count_sockets("source", -1)
            entry.close()
            record.complete(failure)

    def verdict(self, entry: PodConnection) -> Verdict:
        """Check an open connection again by the current revocation lists."""
        if entry.peer_is_revoked(self._node.revocation_lists()):
            self._node.metrics.crl_rejections["source"] += 1
            return Verdict(REVOKED)
        return ALLOWED

    async def _carry(
        self, entry: PodConnection, client: PlainSocket, destination: SocketAddress, begun: Beginning | None
    ) -> Failed | None:
        if destination.port in self._illegal_ports and is_loopback(destination.host):
            raise EarlyDeny(RECURSIVE_CALL, Reason.RECURSIVE_CALL)
        record = entry.record
        labels = await self._pod.local.get()
        entry.state = State.DIALING
        if begun is None or not begun.opened:  # an opened record already has these values
            record.source_workload, record.source_labels = labels.workload, labels.plain
        capture = self._pod.tap
        call = PodCall(entry, labels, client if capture is None else None, client)
        upstream = await self._open(call, destination, begun)
        record.settled()
        inbound_half = upstream.inbound_half
        failure = None
        try:
            near: End = client
            if capture is not None:
                from ztunnel.proxy.istio.path.tapped import (
                    observed,  # imported here to save memory: most proxies have no taps
                )

                near = observed(capture, entry, client, upstream.end, destination)
            running = relay(near, upstream.end, record.counts)
            # A node-local tunnel has two table entries and one relay. A policy or the drain of a pod can end
            # either half. The other half then ends as if CANCEL had arrived.
            entry.carried_by(running)
            if inbound_half is not None:
                inbound_half.entry.carried_by(running, state=State.JOINED)
            ended = await running
            if ended.error is not None:
                failure = of_relay(ended.error, from_client=ended.first is near)
            if upstream.flush_inner is not None and not entry.reason:
                await upstream.flush_inner()
        finally:
            # The relay has forwarded half-closes as END_STREAM or FIN, and returns once both sides have ended. A
            # side that is still open was cut short by an error, and closing it reports this to the peer.
            upstream.close()
            if inbound_half is not None:
                failure = inbound_half.finish(failure)
        return failure

    # Routing

    async def _open(self, call: PodCall, destination: SocketAddress, begun: Beginning | None) -> OutboundUpstream:
        """Route a connection and dial its next hop. If an endpoint fails, try another.

        Args:
            call: the connection.
            destination: the dialled address.
            begun: the decision or failed attempt to continue from, if any.

        Raises:
            EarlyDeny: no route exists.
            Failed: a route exists, but it could not be opened.
        """
        node, record, labels = self._node, call.entry.record, call.labels
        client = Client(workload=labels.workload, host=record.source.host, network=node.config.network)
        started_s = node.clock.monotonic()
        # The type parameter is omitted, because ``Attempts[...]()`` takes a microsecond longer.
        attempts: Attempts[WorkloadUid] = Attempts(
            node.config.connect_retries, worth_another_endpoint, until_s=started_s + RETRY_WINDOW_S
        )
        tried: frozenset[SocketAddress] = frozenset()
        failure: Failed | None = None
        prefer: tuple[Labels, ...] = ()
        opened = begun is not None and begun.opened
        if begun is not None and begun.error is not None:
            failure, tried = self._attempt_failed(attempts, begun.error, begun.route, begun.target)
        while True:
            try:
                if begun is not None and failure is None and not begun.is_stale:
                    route: Route = begun.route
                else:
                    route = await self._route(client, destination, attempts.avoid, prefer)
                target = route.target
                if not isinstance(target, SocketAddress):
                    target = await self._resolved(target, labels, destination, tried)
                    if isinstance(route, Tunnel):
                        route = route.at(target.host)
            except EarlyDeny as denial:
                if failure is not None:  # no endpoint is left, and the last attempt's error is more useful
                    raise failure from denial
                if record.asked is not None:  # addons were asked, so the connection counts as opened
                    raise Failed(str(denial), denial.reason) from denial
                raise
            if failure is not None:
                # If no other endpoint is left, an avoided one is chosen again. If this connection has already
                # tried its address, report the earlier failure.
                if target in tried:
                    raise failure
                node.metrics.connect_retries += 1
            _note(call, route, target, node)
            if not opened:
                opened = True
                record.opened(settled=False)
            if node.addons is not None:
                wanted = await node.addons.connecting(call.entry, call.application, destination)
                if wanted is not None:
                    # The route from before the wait is possibly outdated, for example if the service has got a
                    # waypoint since.
                    prefer, begun = wanted, None
                    continue
            try:
                return await self._dial(call, route, target)
            except _DIAL_ERRORS as error:
                failure, failed = self._attempt_failed(attempts, error, route, target)
                tried |= failed

    def _attempt_failed(
        self, attempts: Attempts[WorkloadUid], error: Exception, route: Route, target: SocketAddress
    ) -> tuple[Failed, frozenset[SocketAddress]]:
        """Count a failed attempt. If another attempt can follow, return the failure and the failed target.

        Raises:
            Failed: no further attempt is allowed.
        """
        node = self._node
        failure = self._failed(error, route)
        uid = route.workload.uid if route.workload is not None else None
        now_s = node.clock.monotonic()
        verdict = attempts.failed(error, now_s, uid)
        # Other connections avoid the failed endpoint, too. With retries off they do not: each choice is then
        # final, as in the Rust ztunnel.
        if uid in attempts.avoid and node.config.connect_retries:
            node.failed_endpoints.add(uid, now_s)
        if isinstance(verdict, GiveUp):
            raise failure from error
        log.debug("%s failed, another endpoint is tried: %s", target, failure)
        return failure, frozenset((target,))

    def _failed(self, error: Exception, route: Route) -> Failed:
        if isinstance(error, TlsError) and error.reason is TlsReason.REVOKED and not error.by_peer:
            self._node.metrics.crl_rejections["source"] += 1
        return dial_failure(error, tunnel=not isinstance(route, Direct))

    async def _route(
        self,
        client: Client,
        destination: SocketAddress,
        own: Collection[WorkloadUid],
        prefer: tuple[Labels, ...] = (),
    ) -> Route:
        node = self._node
        known = node.asked.__contains__ if node.ask is not None else None
        unreachable: frozenset[WorkloadUid] = frozenset()
        last: RouteRefused | None = None
        for _ in range(_MOST_QUESTIONS):
            if unreachable:
                # Prefer a recently failed endpoint to an unreachable one.
                avoid: Collection[WorkloadUid] = unreachable.union(own)
            else:
                avoid = node.failed_endpoints.current(node.clock.monotonic(), own)
            try:
                return route_for(
                    client, destination, node.mesh, node.rng.randrange, avoid=avoid, known=known, prefer=prefer
                )
            except RouteRefused as refused:
                uid = refused.workload.uid if refused.workload is not None else None
                # With retries off, each choice is final, as in the Rust ztunnel.
                if uid is None or uid in unreachable or not node.config.connect_retries:
                    raise
                unreachable |= {uid}
                last = refused
            except Missing as missing:
                try:
                    await node.ask_about(missing.key)
                except TimeoutError as error:
                    raise EarlyDeny(
                        f"the control plane did not answer about {missing.key} in time", Reason.CONTROL_PLANE
                    ) from error
        if last is not None:
            raise last
        raise EarlyDeny(f"no valid routing destination for workload: {destination}", Reason.NO_ROUTE)

    async def _resolved(
        self, target: Named, labels: WorkloadLabels, dialled: SocketAddress, tried: frozenset[SocketAddress]
    ) -> SocketAddress:
        """Resolve a target's name, and choose one of its addresses: one that this connection has not tried yet if
        possible, and one of the dialled address's family if possible.

        Raises:
            EarlyDeny: the name has no addresses.
        """
        node = self._node
        key = (*(value or "unknown" for value in labels.secured[:8]), target.hostname)
        node.metrics.on_demand_dns.count(key)
        try:
            addresses = await node.names.resolve(target.hostname, target.families)
        except ResolveFailed as error:
            raise EarlyDeny(f"dns lookup: {error}", Reason.DNS) from error
        if not addresses:
            raise EarlyDeny(f"no ip addresses were resolved for workload: {target.workload.uid}", Reason.DNS)
        found = [SocketAddress(address, target.port) for address in addresses]
        found = [address for address in found if address not in tried] or found
        same = [address for address in found if (":" in address.host) == (":" in dialled.host)]
        return node.rng.choice(same or found)

    # Dialling

    async def _dial(self, call: PodCall, route: Route, target: SocketAddress) -> OutboundUpstream:
        match route:
            case Direct():
                return OutboundUpstream(await self._pod.sockets.dial(target))
            case Tunnel():
                inbound_half = await self._open_node_local(call, route, target)
                if inbound_half is not None:
                    return OutboundUpstream(inbound_half.end, inbound_half)
                return OutboundUpstream(await self._tunnel(call, route, target, call.client))
            case DoubleTunnel():
                return await self._double(call, route, target)
            case _:
                assert_never(route)

    async def _tunnel(
        self, call: PodCall, route: Tunnel | DoubleTunnel, target: SocketAddress, early_from: PlainSocket | None
    ) -> End:
        """Open a tunnel. Return once the peer has answered 200.

        Args:
            early_from: the end whose first bytes can be sent along with the CONNECT. They are peeked at and stay
                in the kernel, so that after a refusal the next endpoint gets them. They are sent only to a peer
                that announces support for this.
        """
        request = _request(route.authority, call, self._node)
        certificate = await self._pod.certificate(call.labels.workload)
        with Deadline(self._node.poller, ANSWER_TIMEOUT_S):
            tunnel = await self.tunnels.open(target, route.identities, certificate, request, early_from)
        connection = call.entry.connection = tunnel.connection
        if connection.handshake_s:
            node = self._node
            node.metrics.first_request(connection, call.entry.record.trace, node.clock.wall())
        return tunnel

    async def _double(self, call: PodCall, route: DoubleTunnel, target: SocketAddress) -> OutboundUpstream:
        """Open a tunnel inside a tunnel. The inner HTTP/2 connection has its own TLS with the far side, and
        carries only this tunnel.

        The inner connection uses one end of a socket pair, and a relay copies between the other end and the outer
        tunnel. The extra copy through the kernel is acceptable for traffic between networks.
        """
        node, entry = self._node, call.entry
        # The outer CONNECT carries none of the client's first bytes: they belong in the inner tunnel, after its
        # TLS handshake.
        owned = contextlib.ExitStack()
        with contextlib.ExitStack() as undo:
            undo.push(owned)
            outer = await self._tunnel(call, route, target, early_from=None)
            owned.callback(outer.close)
            near, far = socket.socketpair()
            owned.callback(near.close)  # the inner connection, once it exists, closes this socket first
            carrier = PlainSocket(far, node.poller)
            owned.callback(carrier.close)
            for sock in (near, far):
                sock.setblocking(False)
            carried: asyncio.Future[None] = node.poller.loop.create_future()

            def carrying_ended(_: RelayEnd) -> None:
                # Without this close, the inner connection would notice a reset of the outer tunnel only by its
                # keepalive. The close is scheduled, because this callback can run in the middle of a read.
                node.poller.loop.call_soon(carrier.close)
                if not carried.done():  # its waiter was cancelled
                    carried.set_result(None)

            carrying = relay(carrier, outer, ByteCounts(), on_end=carrying_ended)
            owned.callback(carrying.abort, "the inner tunnel ended")
            certificate = await self._pod.certificate(call.labels.workload)
            context = certificate.client_context(route.inner_identities)
            inner = await connect(near, context, self._pod.client_settings, node.poller)
            owned.callback(inner.close)
            entry.inner = inner
            # A review of open connections, if one ran during the handshake, did not see the peer's certificate.
            if entry.peer_is_revoked(node.revocation_lists()):
                raise TlsError(TlsReason.REVOKED, "certificate revoked during the handshake")
            network = (b"x-forwarded-network", node.config.network.encode())
            with Deadline(node.poller, ANSWER_TIMEOUT_S):
                tunnel = await inner.open((*_request(route.authority, call, node), network))
            undo.pop_all()
        _learned(self._node, entry.record, inner, tunnel.headers)

        async def flush_inner() -> None:
            entry.aborts_by(carrying.abort)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(LINGER_S):
                    await _flush_before_close(inner, near, carried)

        upstream = OutboundUpstream(tunnel)
        upstream.on_close(owned.close)
        upstream.flush_inner = flush_inner
        return upstream

    async def _open_node_local(self, call: PodCall, route: Tunnel, target: SocketAddress) -> InboundHalf | None:
        """Open a node-local tunnel to a pod of this node. Return ``None`` to connect over the network instead."""
        node = self._node
        if not node.config.node_local_shortcut or target.port != HBONE_PORT:
            return None
        workload = route.workload
        pod = node.pods.get((workload.namespace, workload.name, workload.service_account))
        if pod is None or target.host not in workload.addresses:
            return None
        certificate = await self._pod.certificate(call.labels.workload)
        service = route.service.hostname if route.service is not None else None
        tunnel = TunnelRequest(route.authority, service)
        return await pod.open_node_local(
            NodeLocalRequest(call.entry, call.labels, certificate, route.identities, target, tunnel)
        )


def _socks_lines_suppressed(count: int) -> None:
    log.warning("log lines about refused SOCKS clients were suppressed count=%d", count)


async def _flush_before_close(inner: Connection, near: socket.SocketType, carried: asyncio.Future[None]) -> None:
    """Deliver the last bytes of an ended inner connection before closing the outer tunnel.

    Closing at once, like the Rust ztunnel, would lose the bytes in the socket pair, and a gateway drops
    unforwarded bytes on a reset. No further bytes are sent, but bytes from the far side are read until it ends.
    """
    inner.engine.goaway()
    inner.flush()
    # This polls, because a connection has no callback for its last sent byte. The inner connection carries only
    # this tunnel.
    while inner.error is None and (inner.link.unsent_bytes or inner.engine.output.borrows):  # noqa: ASYNC110
        await asyncio.sleep(_CHECK_S)
    if inner.error is None:
        with contextlib.suppress(OSError, TlsError):  # the outer tunnel broke meanwhile
            if inner.link.tls is not None:
                inner.link.tls.close()  # without close_notify, the far side would detect a truncation
                inner.link.send_tls()
            near.shutdown(socket.SHUT_WR)
    await carried


def _note(call: PodCall, route: Route, target: SocketAddress, node: Node) -> None:
    """Write a routing decision to the record and the connection-table entry, over the previous
    attempt's values.
    """
    entry = call.entry
    enter_route(entry.record, route, target, call.labels, node)
    entry.connection = entry.inner = entry.peer = None
    entry.protocol = (
        "TCP" if isinstance(route, Direct) else "DOUBLEHBONE" if isinstance(route, DoubleTunnel) else "HBONE"
    )


def _learned(node: Node, record: Record, inner: Connection, headers: Headers) -> None:
    """Record the destination of a double tunnel, as described in the response headers of the inner CONNECT."""
    names = inner.facts.uri_sans if inner.facts is not None else ()
    record.destination_workload = None
    record.destination_identity = SpiffeId.parse(names[0]) if names else None
    record.destination_labels = node.baggage_labels.labels(
        parse_baggage(headers), record.destination_identity, node.clock.monotonic()
    )


def _request(authority: str, call: PodCall, node: Node) -> tuple[Header, ...]:
    """Return the header fields of a CONNECT, in the Rust ztunnel's order."""
    record = call.entry.record
    service = record.service
    record.trace = format_traceparent(node.rng.getrandbits(192), node.sampled_below)
    return (
        (b":method", b"CONNECT"),
        (b":authority", authority.encode()),
        (b"baggage", call.labels.baggage),
        (b"forwarded", format_forwarded(str(record.source), service.hostname if service is not None else None)),
        (b"traceparent", record.trace),
    )
