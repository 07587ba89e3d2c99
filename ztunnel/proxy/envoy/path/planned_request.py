"""Carries a tunnel request to its application as an event-driven object instead of a coroutine, as long as it only
waits for the application.

======  =================================================  ================================================
step    called when                                        what it does
======  =================================================  ================================================
begin   the request has arrived                            creates the entry, chooses the route, checks
                                                           policies, chooses the host, dials the application
dialled the application has accepted, possibly at once     answers 200, starts the relay
failed  the application has not accepted                   answers 503, writes the access line
end     the relay has ended                                closes both ends, writes the access line
abort   a policy, a revocation list, a drain, a stop or    like end, with the reason; 403 for a policy
        the client ended the request before its answer
======  =================================================  ================================================

If the application does not accept at once, a coroutine waits and reports the result as an event.
"""

from __future__ import annotations

import asyncio
from typing import Final

from hbone.aio.fiber import Fiber
from hbone.aio.poller import Poller
from hbone.aio.relay import ByteCounts, RelayEnd, relay
from hbone.aio.requests import Request
from hbone.aio.tunnel import Tunnel
from hbone.errors import TunnelBroken
from xds.model.http import Route
from ztunnel.proxy.dataplane.life_table import State
from ztunnel.proxy.dataplane.live_table import Lives
from ztunnel.proxy.dataplane.reported import reported
from ztunnel.proxy.dataplane.upstream import Upstream
from ztunnel.proxy.envoy.listeners.chains import LiveChain
from ztunnel.proxy.envoy.listeners.connections import HopAccount, LiveHop, LiveRequest
from ztunnel.proxy.envoy.listeners.listener import LiveListener
from ztunnel.proxy.envoy.path.dial import ClusterUpstream
from ztunnel.proxy.envoy.path.terminate import Answer, RequestPlan, RequestRefused
from ztunnel.proxy.envoy.path.tunnel_requests import TunnelRequests
from ztunnel.proxy.envoy.stream.stream_info import StreamInfo
from ztunnel.runtime.clock import Clock

_DIAL_ERRORS: Final = (RequestRefused,)


class PlannedRequest(LiveRequest):
    """One tunnel request carried without a coroutine; see the table of steps above. This object closes the
    connection to the application.
    """

    __slots__ = (
        "_aborted",
        "_dialling",
        "_ended",
        "_opened",
        "_poller",
        "_refusal",
        "_request",
        "_route",
        "_server",
        "_timers",
        "_tunnel",
    )

    def __init__(
        self,
        server: TunnelRequests,
        group: Lives[LiveHop],
        info: StreamInfo,
        owner: LiveListener,
        clock: Clock,
        chain: LiveChain,
        account: HopAccount | None,
        carried: dict[LiveRequest, None],
        request: Request,
    ) -> None:
        super().__init__(group, info, owner, clock, self._abort_soon, chain, account, carried)
        self._server = server
        self._request = request
        self._poller: Poller = request.connection.poller
        self._route: Route | None = None
        self._dialling: Fiber | None = None
        self._opened: ClusterUpstream | None = None
        self._refusal: Answer | None = None
        self._tunnel: Tunnel | None = None
        self._ended: RelayEnd | None = None
        self._timers: list[asyncio.TimerHandle] = []
        self._aborted = False

    @classmethod
    def begin(
        cls,
        server: TunnelRequests,
        group: Lives[LiveHop],
        info: StreamInfo,
        owner: LiveListener,
        clock: Clock,
        chain: LiveChain,
        account: HopAccount | None,
        carried: dict[LiveRequest, None],
        plan: RequestPlan,
        request: Request,
    ) -> PlannedRequest:
        """Register the request, check its policies, and dial its application.

        Args:
            server: provides the steps shared with coroutines.
            group: the group to register in.
            info: the facts about the request.
            owner: the listener of the request's connection.
            clock: measures the request's duration.
            chain, account, carried: see :class:`LiveRequest`.
            plan: the plan for the request's head.
            request: the request to answer.
        """
        self = cls(server, group, info, owner, clock, chain, account, carried, request)
        terminator = server.terminator
        try:
            chosen = terminator.choose(self, chain, plan)
            self._route = chosen.route
            dialled = terminator.dial_now(self, chosen)
            if isinstance(dialled, Upstream):
                self._opened = dialled
                self.step()
            else:
                self._dialling = server.wait(reported(dialled, _DIAL_ERRORS, self._dialled))
        except RequestRefused as refusal:
            self._refusal = refusal.answer
            self.step()
        except Exception as error:
            self.on_bug(error)
            raise
        return self

    def _dialled(self, upstream: ClusterUpstream | None, error: Exception | None) -> None:
        self._dialling = None
        if upstream is not None:
            self._opened = upstream
        elif isinstance(error, RequestRefused):
            self._refusal = error.answer
        else:
            self._aborted = True
        self.step()

    # Event callbacks, which can be called in the middle of a read

    def cancel(self, msg: str | None = None) -> None:
        """End the request, because the client reset it or its connection ended; see
        :class:`hbone.aio.requests.Cancellable`.
        """
        self._abort_soon("")

    def _abort_soon(self, reason: str) -> None:
        self._aborted = True
        if self._dialling is not None:
            self._dialling.cancel()
        else:
            self._poller.call_soon(self)

    def _relay_ended(self, ended: RelayEnd) -> None:
        self._ended = ended
        self._poller.call_soon(self)

    # Steps

    def step(self) -> None:
        """Run the step for the latest event; see :class:`hbone.aio.poller.Steppable`."""
        if self.state is State.CLOSED or self._dialling is not None:
            return
        upstream, tunnel = self._opened, self._tunnel
        if upstream is not None and tunnel is not None:
            if self._ended is None and not self._aborted:
                return
            self._relay_over(tunnel, upstream)
        elif self._aborted:
            self._server.gave_up(self._request, self, self.manager)
        elif self._refusal is not None:
            self._server.refuse(self._request, self.info, self.manager, self._refusal)
        elif upstream is not None:
            try:
                self._accept(upstream)
                return
            except TunnelBroken as error:
                self._server.broken(self.info, error)
        else:
            return
        self._end()

    def _accept(self, upstream: ClusterUpstream) -> None:
        """Answer the CONNECT with 200, and start the relay.

        Raises:
            TunnelBroken: the client has disconnected.
        """
        manager, server = self.manager, self._server
        tunnel = self._tunnel = server.accepted(self._request, self, manager)
        idle_s, counts = server.idle_timeout_s(manager, self._route), ByteCounts()
        running = relay(tunnel, upstream.end, counts, idle_timeout_s=idle_s, on_end=self._relay_ended)
        self._timers = server.relays(self, manager, self._route, tunnel, upstream, running)

    def _relay_over(self, tunnel: Tunnel, upstream: ClusterUpstream) -> None:
        cancelled = self._ended is None
        if cancelled and self.relay is not None:
            self.relay.abort("cancelled")
        ended = None if cancelled else self._ended
        self._server.relayed(self, self.manager, tunnel, upstream, self._timers, ended)
        if cancelled:
            self._server.gave_up(self._request, self, self.manager)

    def _end(self) -> None:
        upstream, self._opened = self._opened, None
        try:
            if upstream is not None:
                upstream.close()
        finally:
            self.close()
            self._request.over()

    def on_bug(self, error: Exception) -> None:
        """End the request after an unexpected error in a step; see :class:`hbone.aio.poller.Handler`."""
        if self.state is State.CLOSED:
            return
        try:
            if self._tunnel is not None and self._opened is not None:
                self._server.relayed(self, self.manager, self._tunnel, self._opened, self._timers, None)
        finally:
            self._end()
