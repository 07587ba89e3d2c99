"""Serves incoming tunnel connections (HTTP/2), and the requests on each connection.

:meth:`TunnelServer.serve` handles a connection: handshake, policy check, requests, GOAWAY. ``_request`` handles a
request: route, policy check, application, bytes. Policies are evaluated before the proxy opens a connection for
the client.
"""

from __future__ import annotations

import asyncio
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Final

from hbone.aio.connection import Connection
from hbone.aio.connection_settings import ConnectionSettings
from hbone.aio.fiber import current
from hbone.aio.poller import Poller
from hbone.aio.relay import ByteCounts, Relay, relay
from hbone.aio.requests import Request, Requests
from hbone.aio.server import serve_connection, serve_to_end
from hbone.aio.socket import PlainSocket
from hbone.aio.tunnel import Tunnel
from hbone.errors import HboneError, RemoteProtocolError, TunnelBroken
from hbone.events import Headers, RequestHead
from xds.model.http import Route
from ztunnel.proxy.dataplane.handshake_limiter import PendingHandshake
from ztunnel.proxy.dataplane.live_table import Abort
from ztunnel.proxy.envoy.listeners.chains import LiveChain, LiveConnectionManager
from ztunnel.proxy.envoy.listeners.connections import Connections, LiveConnection, LiveRequest
from ztunnel.proxy.envoy.listeners.handshakes import Handshakes
from ztunnel.proxy.envoy.listeners.listener import LiveListener
from ztunnel.proxy.envoy.path.dial import ClusterUpstream
from ztunnel.proxy.envoy.path.downstream_tls import context_of, handshake_failed, handshake_turn, note_peer
from ztunnel.proxy.envoy.path.planned_request import PlannedRequest
from ztunnel.proxy.envoy.path.tcp_proxy import application_of
from ztunnel.proxy.envoy.path.terminate import Answer, RequestPlan, RequestRefused, Terminator
from ztunnel.proxy.envoy.path.tunnel_requests import Timeouts, TunnelRequests
from ztunnel.proxy.envoy.stream.outcome import Refused
from ztunnel.proxy.envoy.stream.stream_info import StreamInfo
from ztunnel.runtime.clock import Clock

if TYPE_CHECKING:
    from ztunnel.proxy.tap.taps import Taps


#: The largest number of plans per tunnel connection. A bound is needed because the peer chooses the request heads.
_MOST_PLANS: Final = 64


class Served:
    """A tunnel connection, with the state shared by its requests.

    Args:
        chain: the connection's filter chain.

    Attributes:
        connection: the connection's table entry, set before the first request.
        carried: the connection's open requests.
    """

    __slots__ = ("_plans", "carried", "chain", "connection")

    def __init__(self, chain: LiveChain) -> None:
        self.chain = chain
        self.connection: LiveConnection | None = None
        self.carried: dict[LiveRequest, None] = {}
        self._plans: dict[tuple[bytes | None, Headers], RequestPlan] = {}

    @property
    def manager(self) -> LiveConnectionManager:
        """The connection manager of the filter chain."""
        assert self.chain.manager is not None
        return self.chain.manager

    def plan(self, head: RequestHead) -> RequestPlan:
        """Return the plan for tunnel requests with this head, made on first use."""
        key = head.authority, head.headers
        found = self._plans.get(key)
        if found is None:
            if len(self._plans) >= _MOST_PLANS:
                self._plans.clear()
            found = self._plans[key] = RequestPlan(head)
        return found

    def opened(self, tunnels: Connection) -> None:
        """Make the end of the connection's table entry also end ``tunnels`` and all its requests, with the same
        reason.
        """

        def ended(reason: str, *, finish: bool = False) -> None:
            for life in list(self.carried):
                life.end(reason)
            tunnels.close() if finish else tunnels.abort(reason)

        assert self.connection is not None
        self.connection.tunnels = tunnels
        self.connection.account = None  # the requests are counted instead of the connection
        self.connection.opened(ended, leave=tunnels.drain, finish=partial(ended, finish=True))


class TunnelServer(TunnelRequests):
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
        super().__init__(terminator, poller, clock, timeouts)
        self._connections = connections
        self._handshakes = handshakes
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
        connection.port_known = not self.terminator.rules.judge_ports
        context = context_of(listener, chain)
        denied: list[Refused] = []
        admitted: list[Connection] = []
        pending: PendingHandshake | None = None

        def established(tunnels: Connection) -> None:
            """Check whether policies allow the peer, before any HTTP/2 frame is answered."""
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
                partial(self._request, served),
                take_now=partial(self._take_now, served),
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
        """Return the HTTP/2 settings for tunnel connections accepted by a filter chain."""
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

    # Taking over a connection from another process: see ztunnel.proxy.envoy.handover

    def requests_of(self, served: Served) -> Requests:
        """Return the object that handles the requests of a tunnel connection."""
        return Requests(partial(self._request, served), partial(self._take_now, served))

    async def serve_moved(self, served: Served, requests: Requests, tunnels: Connection) -> None:
        """Serve a connection that another process has accepted and admitted, until it ends.

        Args:
            served: the connection. Its table entry is registered and open, and the caller closes the entry.
            requests: the handler from :meth:`requests_of` that ``tunnels`` was created with.
            tunnels: the HTTP/2 connection, which this call closes. Its already open tunnels are closed elsewhere.
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
        """Carry a request that came from another process, with a running relay, to its end.

        Args:
            served: the request's connection.
            hop: the request, whose ``upstream`` is the relay's upstream. This call closes the request.
            tunnel: the client's end of the relay.
            running: the relay.
            route: the request's route. ``None`` if it was removed.
        """
        upstream = hop.upstream
        assert upstream is not None
        try:
            try:
                await self._follow(hop, served.manager, route, tunnel, upstream, running)
            finally:
                upstream.close()
        except asyncio.CancelledError:
            self.note_cancelled(hop)
            raise
        finally:
            hop.close()

    # A request

    def register(
        self, served: Served, info: StreamInfo, abort: Abort | None, *, came: bool = False
    ) -> LiveRequest:
        """Create the connection table's entry for a request, and register it with the tunnel connection.

        Args:
            came: whether the request came from another process, which has counted it as new.
        """
        connection, hops, account = served.connection, self._connections.hops, self._connections.account
        assert connection is not None
        return LiveRequest(
            hops, info, connection.owner, self._clock, abort, served.chain, account, served.carried, came=came
        )

    def _info(self, served: Served, request: Request, plan: RequestPlan) -> StreamInfo:
        """Return the facts about a tunnel request, from its head and its connection."""
        connection, manager = served.connection, served.chain.manager
        assert connection is not None
        assert manager is not None
        head, base = request.head, connection.info
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
            method="CONNECT" if head.is_tunnel else head.method.decode("latin-1"),
            authority=plan.authority,
            path=head.path.decode("latin-1") if head.path else "",
            request_headers=plan.headers,
            trace=plan.trace,
            manager=manager.model,
        )
        account = self._connections.account
        if account is not None and request.connection.handshake_s:
            account.first_request(request.connection, info.trace)
        return info

    def _take_now(self, served: Served, request: Request) -> PlannedRequest | None:
        """Begin to carry a request without a coroutine. Return ``None`` if the request needs a coroutine, because
        addons or policies must decide about it.
        """
        head = request.head
        if (
            not head.is_tunnel
            or head.path
            or request.gone
            or self.terminator.waits
            or self._connections.addons is not None
            or self._taps
        ):
            return None
        connection, connections = served.connection, self._connections
        assert connection is not None
        plan = served.plan(head)
        info = self._info(served, request, plan)
        return PlannedRequest.begin(
            self,
            connections.hops,
            info,
            connection.owner,
            self._clock,
            served.chain,
            connections.account,
            served.carried,
            plan,
            request,
        )

    async def _request(self, served: Served, request: Request) -> None:
        """Answer one request on a tunnel connection. It is usually a CONNECT, whose bytes are carried to the
        application.
        """
        manager = served.manager
        info = self._info(served, request, RequestPlan(request.head))
        hop = self.register(served, info, current(self._poller).cancel)
        hop.addons = self._connections.addons
        try:
            if request.head.protocol is not None:
                raise RequestRefused(Answer(404, "route_not_found"))
            route, upstream = await self.terminator.open(hop, served.chain)
            try:
                tunnel = self.accepted(request, hop, manager)
                await self._carry_tunnel(hop, manager, route, tunnel, upstream)
            finally:
                upstream.close()
        except RequestRefused as refusal:
            self.refuse(request, info, manager, refusal.answer)
        except TunnelBroken as error:
            self.broken(info, error)
        except asyncio.CancelledError:
            self.gave_up(request, hop, manager)
            raise
        finally:
            hop.close()

    async def _carry_tunnel(
        self,
        hop: LiveRequest,
        manager: LiveConnectionManager,
        route: Route,
        tunnel: Tunnel,
        upstream: ClusterUpstream,
    ) -> None:
        info, counts = hop.info, ByteCounts()
        application = upstream.end
        if self._taps is not None:
            application = application_of(self._taps, info, upstream, tunnel)
        running = relay(tunnel, application, counts, idle_timeout_s=self.idle_timeout_s(manager, route))
        await self._follow(hop, manager, route, tunnel, upstream, running)

    async def _follow(
        self,
        hop: LiveRequest,
        manager: LiveConnectionManager,
        route: Route | None,
        tunnel: Tunnel,
        upstream: ClusterUpstream,
        running: Relay,
    ) -> None:
        """Wait until the relay of a request has ended."""
        timers = self.relays(hop, manager, route, tunnel, upstream, running)
        ended = None
        try:
            ended = await running
        finally:
            self.relayed(hop, manager, tunnel, upstream, timers, ended)
