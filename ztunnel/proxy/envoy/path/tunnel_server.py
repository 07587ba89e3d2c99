"""Serves tunnels: an HTTP/2 connection and each of its requests.

:meth:`TunnelServer.serve` is the life of a connection: handshake, verdict, requests, GOAWAY. ``_request`` is the
life of a request: route, verdict, application, bytes. Policies are evaluated before the proxy opens a connection
for the client.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from typing import TYPE_CHECKING

from hbone.aio.connection import Connection
from hbone.aio.connection_settings import ConnectionSettings
from hbone.aio.end import End
from hbone.aio.fiber import current
from hbone.aio.poller import Poller
from hbone.aio.relay import ByteCounts, Relay, relay
from hbone.aio.server import Request, Requests, serve_connection, serve_to_end
from hbone.aio.socket import PlainSocket
from hbone.aio.tunnel import Tunnel
from hbone.end_state import SourceState
from hbone.errors import HboneError, RemoteProtocolError, TunnelBroken, TunnelClosed
from xds.model.http import Route
from ztunnel.proxy.dataplane.half_open import PendingHandshake
from ztunnel.proxy.dataplane.live_table import Abort
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
from ztunnel.proxy.envoy.stream.request_headers import traceparent
from ztunnel.proxy.envoy.stream.stream_info import Flag, StreamInfo
from ztunnel.runtime.clock import Clock, utc

if TYPE_CHECKING:
    from ztunnel.proxy.tap.taps import Taps


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeouts:
    """Envoy's default timeouts, which end tunnels. ``None`` disables one, unless the configuration sets it."""

    route_s: float | None = None
    stream_idle_s: float | None = None


class Served:
    """A tunnel connection, with the state shared by its requests.

    Args:
        chain: its filter chain.

    Attributes:
        connection: its entry in the connection table; set before the first request.
        carried: its open requests.
    """

    __slots__ = ("carried", "chain", "connection")

    def __init__(self, chain: LiveChain) -> None:
        self.chain = chain
        self.connection: LiveConnection | None = None
        self.carried: dict[LiveRequest, None] = {}

    @property
    def manager(self) -> LiveConnectionManager:
        """The connection manager of its chain."""
        assert self.chain.manager is not None
        return self.chain.manager

    def opened(self, tunnels: Connection) -> None:
        """Have the connection's life end with ``tunnels``, and its requests for the same reason."""

        def ended(reason: str, *, finish: bool = False) -> None:
            for life in list(self.carried):
                life.end(reason)
            tunnels.close() if finish else tunnels.abort(reason)

        assert self.connection is not None
        self.connection.tunnels = tunnels
        self.connection.account = None  # its requests are counted instead
        self.connection.opened(ended, leave=tunnels.drain, finish=partial(ended, finish=True))


class TunnelServer:
    """Serves connections of chains that end in an HTTP connection manager.

    Args:
        connections: the table that every request is registered in.
        terminator: finds the application of a request.
        handshakes: schedules and limits handshakes.
        poller: this loop's poller.
        clock: the clock of log times.
        timeouts: the timeouts of handshakes and requests.
        settings: HTTP/2 settings of the connections.
        taps: taps by pod address. ``None`` if taps are not permitted.
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
        """Serve one tunnel connection until it and all its requests have ended.

        Raises:
            Refused: the connection ended before its first request could be answered.
        """
        served, info = Served(chain), connection.info
        served.connection = connection
        connection.port_known = not self._terminator.rules.judge_ports
        context = context_of(listener, chain)
        denied: list[Refused] = []
        admitted: list[Connection] = []
        pending: PendingHandshake | None = None

        def established(tunnels: Connection) -> None:
            """Authorize the peer, before any HTTP/2 frame is answered."""
            if pending is not None:
                tunnels.handshake_s = pending.proved()
            if tunnels.facts is not None:
                note_peer(connection, tunnels.facts, chain)
                listener.ssl.negotiated(tunnels.facts)
            try:
                connection.require()
            except Refused as error:
                denied.append(error)
                raise
            chain.set_filter_state(info)
            admitted.append(tunnels)
            served.manager.connection_began(secured=tunnels.facts is not None)
            served.opened(tunnels)

        sock = end.detach()
        try:
            if context is not None:
                pending = await handshake_turn(self._handshakes, connection, chain, sock)
            await serve_connection(
                sock,
                context,
                self.settings_for(chain),
                self._poller,
                lambda request: self._request(served, request),
                on_established=established,
            )
        except HboneError as error:
            if not denied:
                raise handshake_failed(info, listener, error) from error
        finally:
            if pending is not None:
                pending.ended()
            for tunnels in admitted:
                if pending is not None and tunnels.ended_by_limit:
                    pending.offended()
                self._count_end(served, tunnels)
        if denied:
            raise denied[0]

    def _count_end(self, served: Served, tunnels: Connection) -> None:
        connection, manager = served.connection, served.manager
        assert connection is not None
        manager.connection_went(secured=connection.info.tls is not None)
        if not connection.moved:
            manager.connection_ended(by_peer=tunnels.ended_by_peer, in_use=tunnels.engine.open_streams > 0)
            manager.cx_length.record((self._clock.monotonic() - connection.info.started) * 1000)
            manager.cx_protocol_error.value += isinstance(tunnels.error, RemoteProtocolError)

    def settings_for(self, chain: LiveChain) -> ConnectionSettings:
        """Return the settings of tunnel connections to a chain."""
        manager = chain.manager
        assert manager is not None
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

    # A connection of another process: see ztunnel.proxy.envoy.handover

    def requests_of(self, served: Served) -> Requests:
        """Return the handler of a connection's requests."""
        return Requests(lambda request: self._request(served, request))

    async def serve_moved(self, served: Served, requests: Requests, tunnels: Connection) -> None:
        """Serve a connection that another process has accepted and admitted, until it ends.

        Args:
            served: its life is registered and open, and closed by the caller.
            requests: the handler from :meth:`requests_of` that ``tunnels`` was created with.
            tunnels: belongs to this call. Its open tunnels have other owners.
        """
        assert served.connection is not None
        served.manager.connection_came(secured=served.connection.info.tls is not None)
        try:
            await serve_to_end(tunnels, requests)
        finally:
            self._count_end(served, tunnels)

    async def carry_moved(
        self, served: Served, hop: LiveRequest, tunnel: Tunnel, running: Relay, route: Route | None
    ) -> None:
        """Carry a moved request with a running relay to its end.

        Args:
            served: its connection.
            hop: its ``upstream`` is that of the relay. Closed by this call.
            tunnel: the client's end of the relay.
            running: the relay.
            route: the request's route. ``None`` if it was removed.
        """
        upstream = hop.upstream
        assert upstream is not None
        served.manager.rq_active.stored += 1
        try:
            try:
                await self._follow(hop, served.manager, route, tunnel, upstream, running)
            finally:
                upstream.close()
        except asyncio.CancelledError:
            self._note_cancelled(hop)
            raise
        finally:
            self._request_ended(hop, served.manager)

    # A request

    def register(self, served: Served, info: StreamInfo, abort: Abort | None) -> LiveRequest:
        """Create a request's connection-table entry, registered with its tunnel connection."""
        assert served.connection is not None
        hop = LiveRequest(self._connections.hops, info, served.connection.owner, self._clock, abort)
        hop.chain = served.chain
        hop.filter_sinks, hop.account = served.manager.sinks, self._connections.account
        served.carried[hop] = None
        hop.own(partial(served.carried.pop, hop))
        return hop

    async def _request(self, served: Served, request: Request) -> None:
        """Answer one request of a tunnel connection: usually a CONNECT, carried to the application."""
        assert served.connection is not None
        head, base, manager = request.head, served.connection.info, served.manager
        headers = tuple([(n.decode("latin-1"), v.decode("latin-1")) for n, v in head.headers])
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
            request_headers=headers,
            trace=traceparent(headers),
            manager=manager.model,
        )
        account = self._connections.account
        if account is not None and request.connection.handshake_s:
            account.first_request(request.connection, info.trace)
        hop = self.register(served, info, current(self._poller).cancel)
        hop.addons = self._connections.addons
        manager.rq_total.value += 1
        manager.rq_active.stored += 1
        try:
            if head.protocol is not None:
                raise RequestRefused(Answer(404, "route_not_found"))
            route, upstream = await self._terminator.open(hop, served.chain)
            try:
                tunnel = request.accept(self._response_headers(manager))
                info.response_code, info.response_details = 200, "via_upstream"
                await self._carry_tunnel(hop, manager, route, tunnel, upstream)
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
                # Policy denied the request while the application was dialled. It is refused like before dialling.
                self._refuse(request, info, manager, Answer(403, hop.reason, DENIED, failure=Reason.POLICY_CHANGE))
            else:
                self._note_cancelled(hop)
            raise
        finally:
            self._request_ended(hop, manager)

    @staticmethod
    def _note_cancelled(hop: LiveRequest) -> None:
        if hop.reason:
            hop.info.response_details = hop.reason
        else:
            hop.info.flags.add(Flag.DOWNSTREAM_TERMINATED)
            hop.info.failure = Reason.CLIENT_GONE

    @staticmethod
    def _request_ended(hop: LiveRequest, manager: LiveConnectionManager) -> None:
        """Close a request's life and count its end."""
        info = hop.info
        hop.close()
        manager.rq_active.stored -= 1
        if hop.moved:
            return
        if info.response_code:
            manager.rq_by_class[min(5, max(2, info.response_code // 100))].value += 1
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
        route: Route,
        tunnel: Tunnel,
        upstream: ClusterUpstream,
    ) -> None:
        info, counts = hop.info, ByteCounts()
        manager.cx_upgrades_total.value += 1
        application = upstream.end
        if self._taps is not None:
            application = application_of(self._taps, info, upstream, tunnel)
        running = relay(tunnel, application, counts, idle_timeout_s=self.idle_timeout_s(manager, route))
        await self._follow(hop, manager, route, tunnel, upstream, running)

    def idle_timeout_s(self, manager: LiveConnectionManager, route: Route | None) -> float | None:
        """Return how long a request's relay can be idle. ``None``: for ever."""
        idle_s = route.idle_timeout_s if route is not None else None
        if idle_s is None:
            idle_s = manager.model.stream_idle_timeout_s
        return (idle_s if idle_s is not None else self._timeouts.stream_idle_s) or None

    async def _follow(
        self,
        hop: LiveRequest,
        manager: LiveConnectionManager,
        route: Route | None,
        tunnel: Tunnel,
        upstream: ClusterUpstream,
        running: Relay,
    ) -> None:
        """Wait for the end of a request's relay."""
        info, counts = hop.info, running.counts
        limit = route.timeout_s if route is not None and route.timeout_s is not None else self._timeouts.route_s
        hop.relay, hop.upstream = running, upstream
        manager.cx_upgrades_active.stored += 1
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
            info.bytes_received, info.bytes_sent = counts.sent, counts.received
            received, sent = counts.sent_here, counts.received_here
            manager.cx_rx_bytes.value += received
            manager.cx_tx_bytes.value += sent
            if hop.account is not None:
                hop.account.moved(counts)
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
            # A client that leaves after the application's complete answer has lost no data.
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
