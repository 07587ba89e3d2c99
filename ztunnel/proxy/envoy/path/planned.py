"""Carries a connection with a plan as an event-driven object instead of a coroutine, as long as it only waits for
the tunnel's far end.

===========  =======================================  ==================================================
step         called when                              what it does
===========  =======================================  ==================================================
begin        a connection with a plan was accepted    creates the entry, checks policies, chooses cluster
                                                      and host, sends the CONNECT. Without an open tunnel
                                                      connection a coroutine continues
answer       the 200 has arrived                      counts the connection, starts the relay
refusal      another answer arrived, or none in time, a coroutine continues with the failed attempt
             or the tunnel broke
end          the relay has ended                      closes both ends, writes the access line
abort        a policy, a revocation list, a drain or  a coroutine ends the attempt
             a stop ended it before its answer
===========  =======================================  ==================================================

The poller runs each step after a loop iteration's reads, like a fiber, so no scratch buffer is in use.
"""

from __future__ import annotations

import asyncio
import math
from asyncio import CancelledError
from typing import Protocol

from hbone.aio.interval_timer import IntervalTimer
from hbone.aio.poller import Poller
from hbone.aio.relay import ByteCounts, RelayEnd, relay
from hbone.aio.socket import PlainSocket
from hbone.aio.tunnel import Tunnel
from hbone.errors import TunnelBroken
from ztunnel.proxy.dataplane.life_table import State
from ztunnel.proxy.envoy.listeners.chains import LiveTcpProxy
from ztunnel.proxy.envoy.listeners.connections import Connections, LiveConnection
from ztunnel.proxy.envoy.listeners.listener import LiveListener
from ztunnel.proxy.envoy.listeners.plans import Plan
from ztunnel.proxy.envoy.path.dial import ClusterUpstream
from ztunnel.proxy.envoy.path.opening import Opening
from ztunnel.proxy.envoy.path.tcp_proxy import TcpProxies, idle_timeout_s
from ztunnel.proxy.envoy.stream.outcome import Refused
from ztunnel.proxy.envoy.stream.stream_info import StreamInfo
from ztunnel.runtime.clock import Clock


class Owner(Protocol):
    """The interface of :class:`~ztunnel.proxy.envoy.path.datapath.Datapath` for planned connections."""

    def go_on(self, connection: LiveConnection, client: PlainSocket, opening: Opening | None) -> None:
        """Carry the connection on in a coroutine, which owns the connection from now on.

        Args:
            connection: the connection.
            client: the client's socket.
            opening: the first attempt. ``None``: it has not begun.
        """


class PlannedConnection(LiveConnection):
    """One connection with a plan; see the table of steps above. This object owns and closes the client's
    socket.
    """

    __slots__ = (
        "_aborted",
        "_client",
        "_ended",
        "_error",
        "_limit",
        "_opening",
        "_owner",
        "_plan",
        "_poller",
        "_proxies",
        "_proxy",
        "_timer",
    )

    def __init__(
        self,
        owner: Owner,
        proxies: TcpProxies,
        group: Connections,
        info: StreamInfo,
        accepting: LiveListener,
        plan: Plan,
        client: PlainSocket,
        clock: Clock,
    ) -> None:
        super().__init__(group, info, accepting, clock, self._abort_soon, plan.host, client.close)
        assert plan.chain.proxy is not None
        self._owner = owner
        self._proxies = proxies
        self._proxy: LiveTcpProxy = plan.chain.proxy
        self._plan = plan
        self._client = client
        self._poller: Poller = client.poller
        self._opening: Opening | None = None
        self._error: Exception | None = None
        self._ended: RelayEnd | None = None
        self._aborted = False
        self._timer: IntervalTimer | None = None
        self._limit: asyncio.TimerHandle | None = None

    @classmethod
    def begin(
        cls,
        owner: Owner,
        proxies: TcpProxies,
        group: Connections,
        info: StreamInfo,
        accepting: LiveListener,
        plan: Plan,
        client: PlainSocket,
        clock: Clock,
    ) -> None:
        """Register the connection, check its policies, and request its tunnel.

        Args:
            owner: continues in a coroutine; see :class:`Owner`.
            proxies: provides the steps shared with coroutines.
            group: the group to register in.
            info: the facts about the connection, see :meth:`~ztunnel.proxy.envoy.listeners.plans.Plan.info`.
            accepting: the listener that has accepted the connection.
            plan: the connection's plan.
            client: the client's socket.
            clock: measures the connection's duration.
        """
        self = cls(owner, proxies, group, info, accepting, plan, client, clock)
        chain, proxy = plan.chain, self._proxy
        try:
            if plan.listener is not accepting:
                self.move_to(plan.listener)
            self.choose(chain)
            self.admit()
            # With RBAC policies, the plan's stored request is not used: policies can write metadata, and a request
            # can contain metadata.
            known = None if chain.rbac else plan
            opening = proxies.connector.begin(self, proxy, client, self._answered, self._abort_soon, known)
            if opening is None or not opening.requested:
                owner.go_on(self, client, opening)
                return
            self._opening = opening
            if proxy.opening_limit_s != math.inf:
                self._timer = self._poller.interval_timer(proxy.opening_limit_s)
                began_s = opening.began_s = self._poller.now_s
                self._timer.register(self, began_s)
        except Refused as error:
            self.refused(error)
            self.close()
        except Exception as error:
            self.on_bug(error)
            raise

    # Event callbacks, which can be called in the middle of a read

    def _answered(self, tunnel: Tunnel | None, error: Exception | None) -> None:
        self._error = error
        self._poller.call_soon(self)

    def on_interval(self) -> None:
        """Give up the request, because its answer did not arrive in time; see
        :class:`hbone.aio.interval_timer.Member`.
        """
        assert self._opening is not None
        self._opening.timed_out = True
        self._error = TimeoutError()
        self._poller.call_soon(self)

    def _relay_ended(self, ended: RelayEnd) -> None:
        self._ended = ended
        self._poller.call_soon(self)

    def _abort_soon(self, reason: str) -> None:
        self._aborted = True
        self._poller.call_soon(self)

    # Steps

    def step(self) -> None:
        """Run the step for the latest event; see :class:`hbone.aio.poller.Steppable`."""
        if self.state is State.CLOSED:
            return
        upstream, ended, opening = self.upstream, self._ended, self._opening
        if ended is not None and upstream is not None:
            self._ended = None
            self._end(upstream, ended)
        elif opening is None:
            return  # it already relays, or a coroutine has taken over
        elif self._aborted:
            self._leave_to_coroutine(opening, CancelledError())
        elif self._error is not None:
            # If the peer has not processed the tunnel request, it is sent again, perhaps on another connection.
            error = self._error
            repeats = isinstance(error, TunnelBroken) and error.unprocessed
            self._leave_to_coroutine(opening, None if repeats else error)
        else:
            self._relay(opening)

    def _relay(self, opening: Opening) -> None:
        self._stop_waiting()
        proxy, counts = self._proxy, ByteCounts()
        upstream = self._proxies.connector.opened(opening)
        self._opening, self.upstream = None, upstream
        idle_s = idle_timeout_s(proxy, upstream.hops)
        running = relay(self._client, upstream.end, counts, idle_timeout_s=idle_s, on_end=self._relay_ended)
        self._proxies.relays(self, upstream, running)
        self._limit = self._proxies.limit_duration(self, proxy, upstream, running)

    def _end(self, upstream: ClusterUpstream, ended: RelayEnd) -> None:
        if self._limit is not None:
            self._limit.cancel()
        proxy = self._proxy
        try:
            self._proxies.relayed(self, proxy, self._client, upstream, ended)
            upstream.close()
        finally:
            self.close()

    def _leave_to_coroutine(self, opening: Opening, error: BaseException | None) -> None:
        self._stop_waiting()
        self._opening = None
        self._proxies.connector.stop(opening, error)
        self._owner.go_on(self, self._client, opening)

    def _stop_waiting(self) -> None:
        if self._timer is not None:
            self._timer.unregister(self)
            self._timer = None

    def on_bug(self, error: Exception) -> None:
        """End the connection after an unexpected error in a step; see :class:`hbone.aio.poller.Handler`."""
        if self.state is State.CLOSED:
            return
        opening, upstream = self._opening, self.upstream
        if opening is not None:
            self._leave_to_coroutine(opening, error)
        else:
            if upstream is not None:
                upstream.close()
            self.close()
