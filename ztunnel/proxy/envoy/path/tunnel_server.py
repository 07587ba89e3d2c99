"""Tunnels that end here: an HTTP/2 connection that carries them, and each of its requests.

:meth:`TunnelServer.serve` is the life of a connection: handshake, verdict, requests, GOAWAY. ``_request`` is the
life of a request: route, verdict, application, bytes. Policies are judged before anything is opened for the
client.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from typing import TYPE_CHECKING

from hbone.aio.connection import Connection, ConnectionSettings
from hbone.aio.end import End
from hbone.aio.fiber import current
from hbone.aio.poller import Poller
from hbone.aio.relay import ByteCounts, relay
from hbone.aio.server import Request, serve_connection
from hbone.aio.socket import PlainSocket
from hbone.aio.tunnel import Tunnel
from hbone.end_state import SourceState
from hbone.errors import HboneError, RemoteProtocolError, TunnelBroken, TunnelClosed
from ztunnel.proxy.dataplane.half_open import PendingHandshake
from ztunnel.proxy.dataplane.reasons import Reason
from ztunnel.proxy.envoy.listeners.chains import LiveChain, LiveConnectionManager
from ztunnel.proxy.envoy.listeners.connections import Connections, LiveConnection, LiveRequest
from ztunnel.proxy.envoy.listeners.handshakes import Handshakes
from ztunnel.proxy.envoy.listeners.listener import LiveListener
from ztunnel.proxy.envoy.path.dial import ClusterUpstream
from ztunnel.proxy.envoy.path.downstream_tls import context_of, handshake_failed, handshake_turn, note_peer
from ztunnel.proxy.envoy.path.tcp_proxy import application_of
from ztunnel.proxy.envoy.path.terminate import DENIED, Answer, RequestRefused, Terminator
from ztunnel.proxy.envoy.stream.outcome import POLICY_CHANGE, Refused
from ztunnel.proxy.envoy.stream.stream_info import Flag, StreamInfo
from ztunnel.runtime.clock import Clock, utc

if TYPE_CHECKING:
    from ztunnel.proxy.tap.taps import Taps


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeouts:
    """Envoy's default timeouts, which cut tunnels; ``None`` disables one unless the configuration sets it."""

    route_s: float | None = None
    stream_idle_s: float | None = None


class TunnelServer:
    """Serves connections of chains that end in an HTTP connection manager.

    Args:
        connections: the table that every request is registered in.
        terminator: finds the application of a request.
        handshakes: their turns and limits.
        poller: of this loop.
        clock: for times in logs.
        timeouts: of handshakes and requests.
        settings: HTTP/2 settings of the connections.
        taps: of pods, by address; ``None``: the configuration permits none.
    """

    def __init__(
        self,
        connections: Connections,
        terminator: Terminator,
        handshakes: Handshakes,
        *,
        poller: Poller,
        clock: Clock,
        timeouts: Timeouts,
        settings: ConnectionSettings,
        taps: Taps | None,
    ) -> None:
        self._connections = connections
        self._terminator = terminator
        self._handshakes = handshakes
        self._poller = poller
        self._clock = clock
        self._timeouts = timeouts
        self._settings = settings
        self._taps = taps

    # A connection

    async def serve(
        self, connection: LiveConnection, listener: LiveListener, chain: LiveChain, end: PlainSocket
    ) -> None:
        """Serve one connection until it and its requests are over.

        Raises:
            Refused: it ended before its first request could be answered.
        """
        manager, info = chain.manager, connection.info
        assert manager is not None
        connection.port_known = not self._terminator.rules.judge_ports
        context = context_of(listener, chain)
        denied: list[Refused] = []
        served: list[Connection] = []
        carried: dict[LiveRequest, None] = {}
        pending: PendingHandshake | None = None

        def established(tunnels: Connection) -> None:
            """Authorize the peer, before any HTTP/2 frame is answered."""
            if pending is not None:
                pending.proved()
            if tunnels.facts is not None:
                note_peer(connection, tunnels.facts, chain)
                listener.ssl.negotiated(tunnels.facts)
            try:
                connection.require()
            except Refused as error:
                denied.append(error)
                raise
            chain.set_filter_state(info)
            served.append(tunnels)
            connection.account = None  # its requests have their own
            manager.connection_began(secured=tunnels.facts is not None)

            def ended(reason: str, *, finish: bool = False) -> None:
                """End the connection, and what it carries for the same reason."""
                for life in list(carried):
                    life.end(reason)
                tunnels.close() if finish else tunnels.abort(reason)

            connection.opened(ended, leave=tunnels.drain, finish=partial(ended, finish=True))

        sock = end.detach()
        try:
            if context is not None:
                pending = await handshake_turn(self._handshakes, connection, chain, sock)
            await serve_connection(
                sock,
                context,
                self._settings_for(chain, manager),
                self._poller,
                lambda request: self._request(connection, carried, chain, request),
                on_established=established,
            )
        except HboneError as error:
            if not denied:
                raise handshake_failed(info, listener, error) from error
        finally:
            if pending is not None:
                pending.ended()
            for tunnels in served:
                if pending is not None and tunnels.ended_by_limit:
                    pending.offended()
                manager.connection_ended(by_peer=tunnels.ended_by_peer, in_use=tunnels.engine.open_streams > 0)
                manager.cx_ssl_active.stored -= info.tls is not None
                manager.cx_length.record((self._clock.monotonic() - info.started) * 1000)
                manager.cx_protocol_error.value += isinstance(tunnels.error, RemoteProtocolError)
        if denied:
            raise denied[0]

    def _settings_for(self, chain: LiveChain, manager: LiveConnectionManager) -> ConnectionSettings:
        wanted = manager.model.http2
        settings = self._settings
        if chain.model.transport_connect_timeout_s:
            settings = replace(settings, handshake_timeout_s=chain.model.transport_connect_timeout_s)
        http2 = settings.http2
        if wanted.max_concurrent_streams is not None:
            http2 = replace(http2, max_concurrent_streams=wanted.max_concurrent_streams)
        if wanted.initial_stream_window is not None:
            http2 = replace(http2, stream_window_bytes=wanted.initial_stream_window)
        if wanted.initial_connection_window is not None:
            http2 = replace(http2, connection_window_bytes=wanted.initial_connection_window)
        if manager.model.max_request_headers_kb is not None:
            http2 = replace(http2, max_header_list_bytes=manager.model.max_request_headers_kb * 1024)
        return settings if http2 is settings.http2 else replace(settings, http2=http2)

    # A request

    async def _request(
        self,
        connection: LiveConnection,
        carried: dict[LiveRequest, None],
        chain: LiveChain,
        request: Request,
    ) -> None:
        """Answer one request of a tunnel connection: usually a CONNECT, carried to the application."""
        head, base, manager = request.head, connection.info, chain.manager
        assert manager is not None
        info = StreamInfo(
            connection_id=base.connection_id,
            facts=base.facts,
            started=self._clock.monotonic(),
            started_at=self._clock.wall(),
            listener=base.listener,
            listener_metadata=base.listener_metadata,
            chain_metadata=base.chain_metadata,
            direct_local=base.direct_local,
            restored=base.restored,
            options=base.options,
            chain=base.chain,
            tls=base.tls,
            protocol="HTTP/2",
            method=head.method.decode("latin-1"),
            authority=(head.authority or b"").decode("latin-1"),
            path=(head.path or b"").decode("latin-1"),
            request_headers=tuple([(n.decode("latin-1"), v.decode("latin-1")) for n, v in head.headers]),
            manager=manager.model,
        )
        cancel = current(self._poller).cancel
        hop = LiveRequest(self._connections.hops, info, connection.owner, self._clock, cancel)
        hop.chain = chain
        hop.filter_sinks = manager.sinks
        hop.addons, hop.account = self._connections.addons, self._connections.account
        carried[hop] = None
        hop.own(partial(carried.pop, hop))
        manager.rq_total.value += 1
        manager.rq_active.stored += 1
        try:
            if head.protocol is not None:
                raise RequestRefused(Answer(404, "route_not_found"))
            route, upstream = await self._terminator.open(hop, chain)
            try:
                tunnel = request.accept(self._response_headers(manager))
                info.response_code, info.response_details = 200, "via_upstream"
                await self._carry_tunnel(hop, manager, route.timeout_s, route.idle_timeout_s, tunnel, upstream)
            finally:
                upstream.close()
        except RequestRefused as refusal:
            self._refuse(request, info, manager, refusal.answer)
        except TunnelBroken as error:
            info.flags.add(Flag.DOWNSTREAM_TERMINATED)
            info.response_details = f"downstream_remote_disconnect: {error}"
            info.failure = Reason.CLIENT_GONE
        except asyncio.CancelledError:
            if hop.reason.startswith(POLICY_CHANGE) and not request.answered:
                # A verdict while the application was dialled, handled like one before it.
                self._refuse(request, info, manager, Answer(403, hop.reason, DENIED, failure=Reason.POLICY_CHANGE))
            elif hop.reason:
                info.response_details = hop.reason
            else:
                info.flags.add(Flag.DOWNSTREAM_TERMINATED)
                info.failure = Reason.CLIENT_GONE
            raise
        finally:
            hop.close()
            if info.response_code:
                manager.rq_by_class[min(5, max(2, info.response_code // 100))].value += 1
            manager.rq_active.stored -= 1
            manager.rq_time.record((info.duration_s or 0.0) * 1000)

    def _refuse(self, request: Request, info: StreamInfo, manager: LiveConnectionManager, answer: Answer) -> None:
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

    async def _carry_tunnel(
        self,
        hop: LiveRequest,
        manager: LiveConnectionManager,
        route_timeout_s: float | None,
        route_idle_s: float | None,
        tunnel: Tunnel,
        upstream: ClusterUpstream,
    ) -> None:
        info = hop.info
        idle = route_idle_s if route_idle_s is not None else manager.model.stream_idle_timeout_s
        if idle is None:
            idle = self._timeouts.stream_idle_s
        limit = route_timeout_s if route_timeout_s is not None else self._timeouts.route_s
        counts = ByteCounts()
        manager.cx_upgrades_total.value += 1
        manager.cx_upgrades_active.stored += 1
        application = upstream.end
        if self._taps is not None:
            application = application_of(self._taps, info, upstream, tunnel)
        running = relay(tunnel, application, counts, idle_timeout_s=idle or None)
        hop.opened(running.abort, finish=running.finish)
        if hop.asked is not None:
            hop.asked.opened(hop, counts)
        timers: list[asyncio.TimerHandle] = []
        if limit:

            def half_closed(end: End, limit_s: float = limit) -> None:
                """Start the route timeout, which in Envoy runs from the request's END_STREAM."""
                if end is tunnel:
                    timers.append(self._poller.loop.call_later(limit_s, running.abort, "response_timeout"))

            running.on_half_close = half_closed
        try:
            ended = await running
        finally:
            for timer in timers:
                timer.cancel()
            manager.cx_upgrades_active.stored -= 1
            info.bytes_received, info.bytes_sent = received, sent = counts.sent, counts.received
            manager.cx_rx_bytes.value += received
            manager.cx_tx_bytes.value += sent
            if hop.cluster is not None:
                hop.cluster.stats.cx_tx_bytes.value += received
                hop.cluster.stats.cx_rx_bytes.value += sent
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
            # A client that leaves after the application has answered in full has lost nothing.
            lost = isinstance(tunnel.error, TunnelBroken) and tunnel.error.code is None
            info.flags.add(Flag.DOWNSTREAM_TERMINATED if lost else Flag.DOWNSTREAM_RESET)
            info.failure = Reason.BROKEN if lost else None
            manager.rq_reset.value += not lost
            info.response_details = "downstream_remote_disconnect" if lost else "http2.remote_reset"

    def _response_headers(self, manager: LiveConnectionManager) -> list[tuple[bytes, bytes]]:
        return [_date_header(int(self._clock.wall())), manager.server_header]


@lru_cache(maxsize=1)
def _date_header(second: int) -> tuple[bytes, bytes]:
    """Return the ``date`` of answers, which is cached for a second."""
    return b"date", utc("%a, %d %b %Y %H:%M:%S GMT", second).encode()
