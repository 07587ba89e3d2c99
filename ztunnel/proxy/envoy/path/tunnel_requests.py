"""The last steps of a tunnel request: answer, relay and end. Coroutines and planned requests share this code."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from hbone.aio.end import End
from hbone.aio.fiber import Fiber
from hbone.aio.poller import Poller
from hbone.aio.relay import Relay, RelayEnd
from hbone.aio.requests import Request
from hbone.aio.tunnel import Tunnel
from hbone.end_state import SourceState
from hbone.errors import TunnelBroken, TunnelClosed
from xds.model.http import Route
from ztunnel.proxy.dataplane.reasons import Reason
from ztunnel.proxy.envoy.listeners.chains import LiveConnectionManager
from ztunnel.proxy.envoy.listeners.connections import LiveRequest
from ztunnel.proxy.envoy.path.dial import ClusterUpstream
from ztunnel.proxy.envoy.path.terminate import DENIED, Answer, Terminator
from ztunnel.proxy.envoy.stream.outcome import POLICY_CHANGE
from ztunnel.proxy.envoy.stream.stream_info import Flag, StreamInfo
from ztunnel.runtime.clock import Clock, utc


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeouts:
    """Envoy's default timeouts, which end tunnels. ``None`` disables a timeout that the configuration does not
    set.
    """

    route_s: float | None = None
    stream_idle_s: float | None = None


class TunnelRequests:
    """The steps that coroutines and planned requests share.

    Args:
        terminator: finds the application of a request.
        poller: this loop's poller.
        clock: the clock of log times.
        timeouts: the timeouts of requests.

    Attributes:
        terminator: see above.
    """

    def __init__(self, terminator: Terminator, poller: Poller, clock: Clock, timeouts: Timeouts) -> None:
        self.terminator = terminator
        self._poller = poller
        self._clock = clock
        self._timeouts = timeouts

    def accepted(self, request: Request, hop: LiveRequest, manager: LiveConnectionManager) -> Tunnel:
        """Answer a tunnel request with 200, and return the opened tunnel.

        Raises:
            TunnelBroken: the client has disconnected.
        """
        tunnel = request.accept(self._response_headers(manager))
        hop.info.response_code, hop.info.response_details = 200, "via_upstream"
        manager.cx_upgrades_total.value += 1
        return tunnel

    @staticmethod
    def broken(info: StreamInfo, error: TunnelBroken) -> None:
        """Record that the client disconnected before its tunnel request was answered."""
        info.flags.add(Flag.DOWNSTREAM_TERMINATED)
        info.response_details = f"downstream_remote_disconnect: {error}"
        info.failure = Reason.CLIENT_GONE

    def gave_up(self, request: Request, hop: LiveRequest, manager: LiveConnectionManager) -> None:
        """Record that a request was cancelled. If a policy change was the cause, answer 403, as for any denial."""
        if hop.reason.startswith(POLICY_CHANGE) and not request.answered:
            answer = Answer(403, hop.reason, DENIED, failure=Reason.POLICY_CHANGE)
            self.refuse(request, hop.info, manager, answer)
        else:
            self.note_cancelled(hop)

    def wait(self, work: Coroutine[Any, Any, None]) -> Fiber:
        """Run a coroutine for a request. The request's tunnel connection ends only after this coroutine."""
        return Fiber(self._poller, work, "inbound dial")

    @staticmethod
    def note_cancelled(hop: LiveRequest) -> None:
        """Record for the access log that a request was cancelled, and why."""
        if hop.reason:
            hop.info.response_details = hop.reason
        else:
            hop.info.flags.add(Flag.DOWNSTREAM_TERMINATED)
            hop.info.failure = Reason.CLIENT_GONE

    def refuse(self, request: Request, info: StreamInfo, manager: LiveConnectionManager, answer: Answer) -> None:
        info.response_code, info.response_details = answer.status, answer.details
        info.failure = info.failure or answer.failure
        info.bytes_sent = len(answer.body)
        headers = [(b"content-length", str(len(answer.body)).encode()), (b"content-type", b"text/plain")]
        request.refuse(
            answer.status,
            [*(headers if answer.body else ()), *self._response_headers(manager)],
            answer.body,
            answer.reset_code,
        )

    def idle_timeout_s(self, manager: LiveConnectionManager, route: Route | None) -> float | None:
        """Return how long a request's relay can be idle. ``None`` means no limit."""
        idle_s = route.idle_timeout_s if route is not None else None
        if idle_s is None:
            idle_s = manager.model.stream_idle_timeout_s
        return (idle_s if idle_s is not None else self._timeouts.stream_idle_s) or None

    def relays(
        self,
        hop: LiveRequest,
        manager: LiveConnectionManager,
        route: Route | None,
        tunnel: Tunnel,
        upstream: ClusterUpstream,
        running: Relay,
    ) -> list[asyncio.TimerHandle]:
        """Store a running relay in a request's table entry. Return a list that gets the route timeout's timer when
        the timer starts.
        """
        limit = route.timeout_s if route is not None and route.timeout_s is not None else self._timeouts.route_s
        hop.relay, hop.upstream = running, upstream
        manager.cx_upgrades_active.stored += 1
        hop.opened(running.abort, finish=running.finish)
        if hop.asked is not None:
            hop.asked.opened(hop, running.counts)
        timers: list[asyncio.TimerHandle] = []
        if limit:

            def half_closed(end: End, limit_s: float = limit) -> None:
                """Start the route timeout when the client half-closes. In Envoy, it runs from the request's
                END_STREAM.
                """
                if end is tunnel:
                    timers.append(self._poller.loop.call_later(limit_s, running.abort, "response_timeout"))

            running.on_half_close = half_closed
        return timers

    @staticmethod
    def relayed(
        hop: LiveRequest,
        manager: LiveConnectionManager,
        tunnel: Tunnel,
        upstream: ClusterUpstream,
        timers: list[asyncio.TimerHandle],
        ended: RelayEnd | None,
    ) -> None:
        """After the end of a relay, count its bytes, and record how it ended.

        Args:
            hop: the request.
            manager: the request's connection manager.
            tunnel: the client's end.
            upstream: the application's side, which the caller closes.
            timers: from :meth:`relays`.
            ended: the relay's end. ``None``: it was cancelled.
        """
        assert hop.relay is not None
        info, counts = hop.info, hop.relay.counts
        for timer in timers:
            timer.cancel()
        manager.cx_upgrades_active.stored -= 1
        info.bytes_received, info.bytes_sent = counts.sent, counts.received
        received, sent = counts.sent_here, counts.received_here
        manager.cx_rx_bytes.value += received
        manager.cx_tx_bytes.value += sent
        if hop.account is not None:
            hop.account.moved_bytes += received + sent
        if hop.cluster is not None:
            hop.cluster.stats.cx_tx_bytes.value += received
            hop.cluster.stats.cx_rx_bytes.value += sent
        if ended is None:
            return
        upstream.in_use = upstream.relayed(ended, tunnel)
        if ended.timed_out:
            manager.rq_idle_timeout.value += 1
            info.flags.add(Flag.STREAM_IDLE)
            info.response_details = "stream_idle_timeout"
        elif isinstance(ended.error, TunnelClosed):
            info.response_details = str(ended.error)
            if info.response_details == "response_timeout":
                manager.rq_timeout.value += 1
                info.flags.add(Flag.UPSTREAM_TIMEOUT)
        elif upstream.end.source is SourceState.CUT:
            info.flags.add(Flag.UPSTREAM_TERMINATED)
            info.response_details = "upstream_reset_after_response_started{connection_termination}"
        elif tunnel.gone and ended.first is tunnel:
            # If the client disconnects after the application has sent all its data, no data is lost.
            lost = isinstance(tunnel.error, TunnelBroken) and tunnel.error.code is None
            info.flags.add(Flag.DOWNSTREAM_TERMINATED if lost else Flag.DOWNSTREAM_RESET)
            info.failure = Reason.BROKEN if lost else None
            manager.rq_reset.value += not lost
            info.response_details = "downstream_remote_disconnect" if lost else "http2.remote_reset"

    def _response_headers(self, manager: LiveConnectionManager) -> list[tuple[bytes, bytes]]:
        return [_date_header(int(self._clock.wall())), manager.server_header]


@lru_cache(maxsize=1)
def _date_header(second: int) -> tuple[bytes, bytes]:
    """Return the ``date`` header of HTTP answers. The text is cached for a second."""
    return b"date", utc("%a, %d %b %Y %H:%M:%S GMT", second).encode()
