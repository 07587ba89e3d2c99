"""Carries a captured connection in an event-driven object instead of a coroutine, as long as it only waits for its
tunnel.

===========  =======================================  ==================================================
step         called when                              what it does
===========  =======================================  ==================================================
begin        the connection was accepted, and its     creates record and entry, asks addons, sends the
             plan's tunnel connection has room        CONNECT. If an addon decides something or waits, a
                                                      coroutine continues
answer       the 200 has arrived                      counts the connection, starts the relay
refusal      another answer arrived, or none in time, a coroutine continues with the remaining
             or the tunnel broke                      attempts (:class:`PlannedOutbound`)
end          the relay has ended                      closes both ends, writes the access line
abort        a policy, a revocation list, a drain or  like end, with the reason
             a stop ended it before its answer
===========  =======================================  ==================================================

The poller runs each step after a loop iteration's reads, like a fiber, so no scratch buffer is in use.
"""

from __future__ import annotations

import logging
import socket
from typing import Final, final

from hbone.aio.interval_timer import IntervalTimer
from hbone.aio.poller import Poller
from hbone.aio.pool_connections import PoolConnections
from hbone.aio.relay import RelayEnd, relay
from hbone.aio.socket import PlainSocket
from hbone.aio.tunnel import Tunnel
from hbone.native import mypyc_attr
from hbone.pool import ConnectionId
from xds.model.address import SocketAddress
from ztunnel.proxy.dataplane.attempts import ANSWER_TIMEOUT_S
from ztunnel.proxy.dataplane.life_table import State, Verdict
from ztunnel.proxy.dataplane.live_table import Lives
from ztunnel.proxy.istio.accounting.access_record import Direction, Record
from ztunnel.proxy.istio.accounting.outcome import Failed, internal, of_reason, of_relay
from ztunnel.proxy.istio.path.node import Node
from ztunnel.proxy.istio.path.plans import Plan, Plans
from ztunnel.proxy.istio.path.pod_connection import PodConnection
from ztunnel.proxy.istio.path.pod_context import PodContext
from ztunnel.proxy.istio.path.pod_dials import PodDials

log = logging.getLogger("ztunnel.proxy.istio.path.outbound")
#: Copied to module constants, which compiled code reads without an attribute look-up.
_CLOSED: Final = State.CLOSED
_DIALING: Final = State.DIALING


@mypyc_attr(allow_interpreted_subclasses=True)
class PlannedOutbound:
    """Accepts the captured connections of one pod. A connection with a plan and a free tunnel starts without a
    coroutine.

    The base class of :class:`~ztunnel.proxy.istio.path.outbound.Outbound`, which carries all other connections.

    Args:
        pod: the shared state of the pod.
        plans: the plans of the pod's connections.
        pool: the connection pool of the pod's tunnels.

    Attributes:
        node, poller: the pod's node and poller.
        pool: see the argument.
        group: the entries of the connections.
        answers: limits the wait for each answer.
    """

    def __init__(self, pod: PodContext, plans: Plans, pool: PoolConnections) -> None:
        self.node: Node = pod.node
        self.poller: Poller = pod.node.poller
        self.pool = pool
        self.group: Lives[PodConnection] = pod.connections.outbound
        self.answers: IntervalTimer = self.poller.interval_timer(ANSWER_TIMEOUT_S)
        self._pod = pod
        self._plans = plans
        self._sockets: PodDials = pod.sockets

    # Methods that the subclass implements

    def verdict(self, entry: PodConnection) -> Verdict:
        """Check an open connection again, after a change of policies or revocation lists."""
        raise NotImplementedError

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
        """Continue with further attempts, in a coroutine that owns ``entry`` and ``client`` from now on.

        ``error`` is the failure of the first attempt. ``None``: it has not been made yet, because an addon must
        decide first. ``is_stale`` is whether the mesh has changed since the plan was chosen.
        """
        raise NotImplementedError

    def serve_soon(
        self, client: PlainSocket, source: SocketAddress, destination: SocketAddress, plan: Plan | None
    ) -> None:
        """Serve a connection in a coroutine, which owns ``client`` from now on."""
        raise NotImplementedError

    # Accepting

    def accepted(self, sock: socket.SocketType, peer: tuple[str, int]) -> None:
        """Start serving a captured connection; returns at once. Called by the listener on port 15001."""
        client = PlainSocket(sock, self.poller)
        source = SocketAddress.of(peer)
        try:
            destination = self._sockets.original_destination(sock, source)
        except OSError as error:
            log.debug("a client disconnected before its connection was served: %s", error)
            client.close()
            return
        plan = self.plan(source, destination)
        place: ConnectionId | None = None
        if plan is not None:
            certificate = self.node.certificates.current(plan.labels.identity)
            if certificate is not None:
                place = self.pool.reserve(plan.key(certificate))
        if plan is None or place is None:
            self.serve_soon(client, source, destination, plan)
        else:
            PlannedConnection(self, plan, client, source, destination).begin(place)

    def plan(self, source: SocketAddress, destination: SocketAddress) -> Plan | None:
        """Return the plan for a connection, or ``None`` if it needs a coroutine.

        Subclasses whose decisions depend on facts outside plans override this.
        """
        node = self.node
        if node.logs.access_level <= logging.DEBUG or (node.taps is not None and self._pod.is_tapped):
            return None
        plan = self._plans.plan(source.host, destination)
        if plan is None or (plan.here is not None and plan.here in node.pods):
            return None
        return plan


@final
class PlannedConnection(PodConnection):
    """One connection with a plan, carried in the steps of the module's table. It owns and closes the client's
    socket.
    """

    __slots__ = (
        "_aborted",
        "_client",
        "_destination",
        "_ended",
        "_error",
        "_owner",
        "_plan",
        "_tunnel",
        "_version",
    )

    def __init__(
        self,
        owner: PlannedOutbound,
        plan: Plan,
        client: PlainSocket,
        source: SocketAddress,
        destination: SocketAddress,
    ) -> None:
        record = Record(owner.node, Direction.OUTBOUND, source, destination)
        record.describe(plan.described)
        super().__init__(owner.group, record, self._abort_soon)
        self.original = plan.original
        self.protocol = "HBONE"
        self._owner = owner
        self._plan = plan
        self._version = owner.node.mesh.version
        self._client = client
        self._destination = destination
        self._tunnel: Tunnel | None = None
        self._error: Exception | None = None
        self._ended: RelayEnd | None = None
        self._aborted = False

    def judge(self) -> Verdict:
        return self._owner.verdict(self)

    def begin(self, place: ConnectionId) -> None:
        """Send the CONNECT on the reserved stream of the tunnel connection."""
        self._owner.node.count_sockets("source", +1)
        try:
            self._request(place)
        except Exception as error:
            if self._tunnel is None:
                self._owner.pool.release(place)
            self._end(internal(error))
            raise

    def _request(self, place: ConnectionId) -> None:
        owner, record = self._owner, self.record
        node = owner.node
        self.state = _DIALING
        record.opened(settled=False)
        if node.addons is not None and not node.addons.connecting_now(self, self._destination):
            self._owner.pool.release(place)
            self._give_to_coroutine(None)
            return
        block, record.trace = self._plan.request(record.source, node.rng.getrandbits(192), node.sampled_below)
        tunnel = owner.pool.open_on(place, block, self._client, self._answered)
        self._tunnel, self.connection = tunnel, tunnel.connection
        owner.answers.register(self, owner.poller.now_s)

    # Event callbacks, which can run in the middle of a read

    def _answered(self, tunnel: Tunnel | None, error: Exception | None) -> None:
        self._error = error
        self._owner.poller.call_soon(self)

    def on_interval(self) -> None:
        """End the wait for an answer that did not arrive in time; see :class:`hbone.aio.interval_timer.Member`."""
        self._error = TimeoutError()
        self._owner.poller.call_soon(self)

    def _relay_ended(self, ended: RelayEnd) -> None:
        self._ended = ended
        self._owner.poller.call_soon(self)

    def _abort_soon(self, reason: str) -> None:
        self._aborted = True
        self._owner.poller.call_soon(self)

    # Steps

    def step(self) -> None:
        """Handle the last event: an answer, an error or the end of the relay; see
        :class:`hbone.aio.poller.Steppable`.
        """
        if self.state is _CLOSED or self._tunnel is None:
            return  # already closed, or a coroutine has taken over
        ended = self._ended
        if ended is not None:
            failure = None
            if ended.error is not None:
                failure = of_relay(ended.error, from_client=ended.first is self._client)
            self._end(failure)
        elif self._aborted:
            self._stop_waiting()
            self._end(of_reason(self.reason))
        elif self._error is not None:
            self._leave_to_coroutine(self._error)
        elif self.state is _DIALING:
            self._relay(self._tunnel)

    def _relay(self, tunnel: Tunnel) -> None:
        self._stop_waiting()
        record = self.record
        record.settled()
        running = relay(self._client, tunnel, record.counts, on_end=self._relay_ended)
        self.carried_by(running)

    def _leave_to_coroutine(self, error: Exception) -> None:
        self._stop_waiting()
        tunnel, self._tunnel = self._tunnel, None
        assert tunnel is not None
        tunnel.close()
        self._give_to_coroutine(error)

    def _give_to_coroutine(self, error: Exception | None) -> None:
        node = self._owner.node
        node.count_sockets("source", -1)
        is_stale = node.mesh.version != self._version
        self._owner.go_on(self, self._client, self._destination, self._plan, error, is_stale=is_stale)

    def _stop_waiting(self) -> None:
        self._owner.answers.unregister(self)

    def _end(self, failure: Failed | None) -> None:
        if self._tunnel is not None:
            self._tunnel.close()
        self._owner.node.count_sockets("source", -1)
        self.close()
        self.record.complete(failure)
        self._client.close()

    def on_bug(self, error: Exception) -> None:
        """End after an unexpected error in a step; see :class:`hbone.aio.poller.Handler`."""
        if self.state is not _CLOSED and self._tunnel is not None:
            self._stop_waiting()
            self._end(internal(error))
