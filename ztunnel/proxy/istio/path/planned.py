"""Carries a captured connection as an event-driven object instead of a coroutine, as long as it waits only for its
peer.

===========  =======================================  ==================================================
step         called when                              what it does
===========  =======================================  ==================================================
begin        it was accepted, a tunnel connection     record, entry, addons, CONNECT. If an addon decides
             of its plan has room                     something or waits, a coroutine continues
answer       the 200 came                             counts it, starts the relay
refusal      another answer came, or none in time,    a coroutine continues with the remaining
             or the tunnel broke                      attempts (:class:`Owner`)
end          the relay is over                        closes, writes the line
abort        a policy, a list, a drain or a stop has  the same, with the reason
             ended it before its answer
===========  =======================================  ==================================================

The poller runs each step after a loop iteration's reads, like a fiber, so no scratch buffer is in use.
"""

from __future__ import annotations

from typing import Protocol

from hbone.aio.relay import RelayEnd, relay
from hbone.aio.socket import PlainSocket
from hbone.aio.tunnel import Tunnel
from hbone.pool import ConnectionId
from xds.model.address import SocketAddress
from ztunnel.proxy.dataplane.attempts import ANSWER_TIMEOUT_S
from ztunnel.proxy.dataplane.life_table import State, Verdict
from ztunnel.proxy.istio.accounting.access_record import Direction, Record
from ztunnel.proxy.istio.accounting.outcome import Failed, internal, of_reason, of_relay
from ztunnel.proxy.istio.path.connections import PodConnection
from ztunnel.proxy.istio.path.plans import Plan
from ztunnel.proxy.istio.path.pod_context import PodContext
from ztunnel.proxy.istio.path.pod_tunnels import PodTunnels


class Owner(Protocol):
    """The part of :class:`~ztunnel.proxy.istio.path.outbound.Outbound` that a planned connection uses."""

    @property
    def tunnels(self) -> PodTunnels:
        """Opens tunnels."""

    def verdict(self, entry: PodConnection) -> Verdict:
        """Judge a live connection again."""

    def go_on(
        self,
        entry: PodConnection,
        client: PlainSocket,
        destination: SocketAddress,
        plan: Plan,
        error: Exception | None,
    ) -> None:
        """Continue with further attempts, in a coroutine that owns ``entry`` and ``client`` from now on.

        Without an error, the first attempt has not been made yet: an addon must decide before.
        """


class PlannedConnection(PodConnection):
    """One planned connection; see the module's table of steps. It owns and closes the client's socket."""

    __slots__ = ("_aborted", "_client", "_destination", "_ended", "_error", "_owner", "_plan", "_pod", "_tunnel")

    def __init__(
        self,
        owner: Owner,
        pod: PodContext,
        plan: Plan,
        client: PlainSocket,
        source: SocketAddress,
        destination: SocketAddress,
    ) -> None:
        record = Record(pod.node, Direction.OUTBOUND, source, destination)
        record.describe(plan.described)
        super().__init__(pod.connections.outbound, record, self._abort_soon, owner.verdict)
        self.original = plan.original
        self.protocol = "HBONE"
        self._owner = owner
        self._pod = pod
        self._plan = plan
        self._client = client
        self._destination = destination
        self._tunnel: Tunnel | None = None
        self._error: Exception | None = None
        self._ended: RelayEnd | None = None
        self._aborted = False

    def begin(self, place: ConnectionId) -> None:
        """Send the CONNECT on the reserved stream of the tunnel connection."""
        self._pod.node.count_sockets("source", +1)
        try:
            self._request(place)
        except Exception as error:
            if self._tunnel is None:
                self._owner.tunnels.pool.release(place)
            self._end(internal(error))
            raise

    def _request(self, place: ConnectionId) -> None:
        node, record = self._pod.node, self.record
        self.state = State.DIALING
        record.opened(settled=False)
        if node.addons is not None and not node.addons.connecting_now(self, self._destination):
            self._owner.tunnels.pool.release(place)
            self._give_to_coroutine(None)
            return
        block, record.trace = self._plan.request(record.source, node.rng.getrandbits(192), node.sampled_below)
        tunnel = self._owner.tunnels.pool.open_on(place, block, self._client, self._answered)
        self._tunnel, self.connection = tunnel, tunnel.connection
        poller = node.poller
        poller.interval_timer(ANSWER_TIMEOUT_S).register(self, poller.now_s)

    # Events, possibly in the middle of a read

    def _answered(self, tunnel: Tunnel | None, error: Exception | None) -> None:
        self._error = error
        self._pod.node.poller.call_soon(self)

    def on_interval(self) -> None:
        """End the wait for an answer that did not arrive in time; see :class:`hbone.aio.interval_timer.Member`."""
        self._error = TimeoutError()
        self._pod.node.poller.call_soon(self)

    def _relay_ended(self, ended: RelayEnd) -> None:
        self._ended = ended
        self._pod.node.poller.call_soon(self)

    def _abort_soon(self, reason: str) -> None:
        self._aborted = True
        self._pod.node.poller.call_soon(self)

    # Steps

    def step(self) -> None:
        """Handle the last event; see :class:`hbone.aio.poller.Steppable`."""
        if self.state is State.CLOSED or self._tunnel is None:
            return  # already over, or handed to a coroutine
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
        elif self.state is State.DIALING:
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
        self._pod.node.count_sockets("source", -1)
        self._owner.go_on(self, self._client, self._destination, self._plan, error)

    def _stop_waiting(self) -> None:
        self._pod.node.poller.interval_timer(ANSWER_TIMEOUT_S).unregister(self)

    def _end(self, failure: Failed | None) -> None:
        if self._tunnel is not None:
            self._tunnel.close()
        self._pod.node.count_sockets("source", -1)
        self.close()
        self.record.complete(failure)
        self._client.close()

    def on_bug(self, error: Exception) -> None:
        """End after an unexpected error in a step; see :class:`hbone.aio.poller.Handler`."""
        if self.state is not State.CLOSED and self._tunnel is not None:
            self._stop_waiting()
            self._end(internal(error))
