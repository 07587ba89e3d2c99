"""Carries a tunnel request to this pod in an event-driven object instead of a coroutine, as long as it only waits
for the application.

======  =================================================  ================================================
step    called when                                        what it does
======  =================================================  ================================================
begin   the request has arrived, and has a plan            creates record and entry, asks addons, dials the
                                                           application
dialled the application has accepted, possibly at once     answers 200, starts the relay
failed  the application cannot be reached, or an addon     answers 503 or 403, writes the access line
        denies the request
end     the relay has ended                                closes both ends, writes the access line
abort   a policy, a revocation list, a drain, a stop or    like end, with the reason; 401 for a policy
        the client ended the request before its answer
======  =================================================  ================================================

If the application does not accept at once, or an addon must decide, a coroutine waits and reports the result as an
event.
"""

from __future__ import annotations

import logging
from collections.abc import Coroutine
from typing import TYPE_CHECKING, Any, Final, final

from hbone.aio.fiber import Fiber
from hbone.aio.poller import Poller
from hbone.aio.relay import RelayEnd, relay
from hbone.aio.requests import Request
from hbone.aio.socket import PlainSocket
from hbone.errors import HboneError
from hbone.native import mypyc_attr
from tproxy.errors import TproxyError
from ztunnel.policy.ledger import Use
from ztunnel.proxy.dataplane.life_table import State, Verdict
from ztunnel.proxy.dataplane.live_table import Lives
from ztunnel.proxy.dataplane.reported import reported
from ztunnel.proxy.istio.accounting.access_record import Direction, Record
from ztunnel.proxy.istio.accounting.outcome import (
    POLICY_CHANGE,
    Failed,
    broken,
    gave_up,
    internal,
    of_reason,
    of_relay,
    unreachable,
)
from ztunnel.proxy.istio.path.authorizer import Authorizer
from ztunnel.proxy.istio.path.node import Node
from ztunnel.proxy.istio.path.pod_connection import PodConnection
from ztunnel.proxy.istio.path.pod_context import PodContext
from ztunnel.proxy.istio.path.pod_dials import PodDials
from ztunnel.proxy.istio.path.request_plans import Peer, RequestPlan, RequestPlans, enter_trace

if TYPE_CHECKING:
    from ztunnel.proxy.istio.path.addons import PodAddons  # most proxies have no addons, which saves memory

_DIAL_ERRORS: Final = (Failed, TproxyError, OSError)
#: Copied to module constants, which compiled code reads without an attribute look-up.
_CLOSED: Final = State.CLOSED
_DIALING: Final = State.DIALING
_IDENTIFIED: Final = State.IDENTIFIED


@mypyc_attr(allow_interpreted_subclasses=True)
class PlannedInbound:
    """Starts the requests to one pod, without a coroutine if there is a plan for the request.

    The base class of :class:`~ztunnel.proxy.istio.path.inbound.Inbound`, which carries all other requests.

    Args:
        pod: the shared state of the pod.
        authorizer: checks the requests against policy.
        plans: the plans of the requests.

    Attributes:
        pod, authorizer: see the arguments.
        node, poller: the pod's node and poller.
        group: the entries of the requests.
        sockets: dials the application.
    """

    def __init__(self, pod: PodContext, authorizer: Authorizer, plans: RequestPlans) -> None:
        self.pod = pod
        self.authorizer = authorizer
        self.node: Node = pod.node
        self.poller: Poller = pod.node.poller
        self.group: Lives[PodConnection] = pod.connections.inbound
        self.sockets: PodDials = pod.sockets
        self._plans = plans

    def verdict(self, entry: PodConnection) -> Verdict:
        """Check an open connection again, after a change of policies or revocation lists. Implemented by the
        subclass.
        """
        raise NotImplementedError

    def take(self, peer: Peer, request: Request) -> PlannedRequest | None:
        """Start carrying a request without a coroutine. Return ``None`` if it needs one.

        Subclasses whose decisions depend on facts outside plans override this.
        """
        node = self.node
        if node.logs.access_level <= logging.DEBUG or (node.taps is not None and self.pod.is_tapped):
            return None
        plan = self._plans.plan(peer, request.head)
        if plan is None or request.gone:
            return None
        taken = PlannedRequest(self, plan, peer, request)
        taken.begin()
        return taken


@final
class PlannedRequest(PodConnection):
    """One request with a plan, carried in the steps of the module's table. It owns and closes the application's
    socket.
    """

    __slots__ = (
        "_aborted",
        "_application",
        "_dialling",
        "_ended",
        "_error",
        "_owner",
        "_plan",
        "_request",
    )

    def __init__(self, owner: PlannedInbound, plan: RequestPlan, peer: Peer, request: Request) -> None:
        record = Record(owner.node, Direction.INBOUND, peer.source, peer.local)
        record.describe(plan.described)
        super().__init__(owner.group, record, self._abort_soon)
        self.connection = peer.connection
        self.original, self.actual, self.protocol = plan.meant, plan.decision.address, "HBONE"
        self.facts = plan.facts
        self._owner = owner
        self._plan = plan
        self._request = request
        self._application: PlainSocket | None = None
        self._dialling: Fiber | None = None
        self._error: Exception | None = None
        self._ended: RelayEnd | None = None
        self._aborted = False

    def judge(self) -> Verdict:
        return self._owner.verdict(self)

    def begin(self) -> None:
        """Count the request, and dial its application."""
        try:
            self._begin()
        except Exception as error:
            self.on_bug(error)
            raise

    def _begin(self) -> None:
        node, record, plan = self._owner.node, self.record, self._plan
        enter_trace(record, self._request, node)
        record.opened()
        policy = plan.decision.policy
        if policy:
            node.metrics.ledger.own.note(policy, Use.ALLOWED, node.clock.wall())
        self.state = _IDENTIFIED
        if node.addons is not None and not node.addons.accepting_now(self):
            self._wait_for(self._asked_addons(node.addons))
            return
        try:
            dialled = self._dialled()
        except (TproxyError, OSError) as error:
            self._error = error
            self.step()
            return
        if isinstance(dialled, PlainSocket):
            self._application = dialled
            self.step()
        else:
            self._wait_for(dialled)

    def _dialled(self) -> PlainSocket | Coroutine[Any, Any, PlainSocket]:
        """Dial the application. Return the connection if it is accepted at once, else a coroutine that returns it.

        Raises:
            TproxyError, OSError: the application cannot be reached.
        """
        self.state = _DIALING
        return self._owner.sockets.dial_now(self._plan.decision.address, source=self._plan.source)

    async def _asked_addons(self, addons: PodAddons) -> PlainSocket:
        """Wait for the addons' verdicts, then dial the application.

        Raises:
            Failed: an addon denies the request.
            TproxyError, OSError: see :meth:`_dialled`.
        """
        await addons.accepting(self)
        dialled = self._dialled()
        return dialled if isinstance(dialled, PlainSocket) else await dialled

    def _wait_for(self, opening: Coroutine[Any, Any, PlainSocket]) -> None:
        work = reported(opening, _DIAL_ERRORS, self._opened)
        self._dialling = self._owner.pod.tasks.run(self._owner.poller, work, "inbound dial")

    def _opened(self, application: PlainSocket | None, error: Exception | None) -> None:
        self._dialling = None
        if application is not None:
            self._application = application
        elif error is not None:
            self._error = error
        else:
            self._aborted = True
        self.step()

    # Event callbacks, which can run in the middle of a read

    def cancel(self, msg: str | None = None) -> None:
        """End the request, because the client reset it or its connection ended; see
        :class:`hbone.aio.requests.Cancellable`.
        """
        self._abort_soon("")

    def _abort_soon(self, reason: str) -> None:
        self._aborted = True
        self._owner.poller.call_soon(self)

    def _relay_ended(self, ended: RelayEnd) -> None:
        self._ended = ended
        self._owner.poller.call_soon(self)

    # Steps

    def step(self) -> None:
        """Handle the last event; see :class:`hbone.aio.poller.Steppable`."""
        if self.state is _CLOSED:
            return
        ended, application = self._ended, self._application
        if ended is not None:
            failure = None
            if self.reason:
                failure = of_reason(self.reason)
            elif ended.error is not None:
                failure = of_relay(ended.error, from_client=ended.first is not application)
            self._end(failure)
        elif self._aborted:
            self._give_up()
        elif isinstance(self._error, Failed):
            self._request.refuse(403)
            self._end(self._error)
        elif self._error is not None:
            self._request.refuse(503)
            self._end(unreachable(self._error))
        elif application is not None and self.state is _DIALING:
            self._accept(application)

    def _accept(self, application: PlainSocket) -> None:
        baggage = self._plan.decision.labels.baggage
        try:
            accepted = self._request.accept(((b"baggage", baggage),) if self._owner.node.config.baggage else ())
        except HboneError as error:
            # The stream ended before the request was accepted. If this proxy ended it on purpose, there is a
            # reason.
            self._end(of_reason(self.reason) if self.reason else broken(error))
            return
        running = relay(accepted, application, self.record.counts, on_end=self._relay_ended)
        self.carried_by(running)

    def _give_up(self) -> None:
        # If a policy that arrived during the dial denies the request, answer 401. The client then does not try
        # another endpoint. In all other cases the unanswered stream is reset, and the client can retry elsewhere.
        if self.reason == POLICY_CHANGE and not self._request.answered:
            self._request.refuse(401)
        self._end(of_reason(self.reason) if self.reason else gave_up())

    def _end(self, failure: Failed | None) -> None:
        dialling, self._dialling = self._dialling, None
        if self._application is not None:
            self._application.close()
        self.close()
        self.record.complete(failure)
        self._request.over()
        if dialling is not None:
            dialling.cancel()

    def on_bug(self, error: Exception) -> None:
        """End after an unexpected error in a step; see :class:`hbone.aio.poller.Handler`."""
        if self.state is not _CLOSED:
            self._end(internal(error))
