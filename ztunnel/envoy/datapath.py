"""START HERE: the life of one connection, from accept to its last log line.

:meth:`Datapath.accepted` is called for each socket; what follows reads top to bottom: listener filters, filter
chain, then either :meth:`_proxy` (bytes go to a cluster, plainly or in a tunnel) or :meth:`_terminate` (bytes are
tunnels that end here). Policies are judged before anything is opened on behalf of the client. Leaving
``_serve`` is the only place where an error becomes flags, counters and log lines.
"""

from __future__ import annotations

import asyncio
import logging
import math
import socket
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import TYPE_CHECKING

from hbone.aio.connection import Connection, ConnectionSettings
from hbone.aio.deadline import Deadline
from hbone.aio.end import End
from hbone.aio.poller import Poller
from hbone.aio.relay import ByteCounts, RelayEnd, relay
from hbone.aio.server import Request, serve_connection
from hbone.aio.socket import PlainSocket
from hbone.aio.tls_socket import TlsSocket
from hbone.aio.tunnel import Tunnel
from hbone.end_state import SourceState
from hbone.errors import HboneError, RemoteProtocolError, TlsError, TlsReason, TunnelBroken, TunnelClosed
from hbone.tls import PeerFacts
from tproxy.aio.sockets import is_transparent
from xds.model import listener as model
from xds.model.facts import ConnectionFacts, PeerCertificate
from ztunnel.dataplane.connection_entry import Abort, cancels_current_task
from ztunnel.envoy.connections import Connections, LiveConnection
from ztunnel.envoy.crowd import Crowd, pod_of
from ztunnel.envoy.listeners.chains import LiveChain, LiveConnectionManager, LiveTcpProxy
from ztunnel.envoy.listeners.filters import (
    FilterClosed,
    annotate,
    inspect_http,
    inspect_tls,
    plain_address,
    restore,
    take_proxy_header,
)
from ztunnel.envoy.listeners.handshakes import Handshakes, TurnedAway
from ztunnel.envoy.listeners.listener import LiveListener
from ztunnel.envoy.listeners.table import ListenerTable
from ztunnel.envoy.outcome import Hop, Incomplete, NoFilterChain, Refused, TooMany, UpstreamFailed
from ztunnel.envoy.secrets.verify import subject_alt_names
from ztunnel.envoy.stream_info import Flag, StreamInfo, TlsFacts
from ztunnel.envoy.terminate import Answer, RequestRefused, Terminator
from ztunnel.envoy.upstream.connect import Connector
from ztunnel.envoy.upstream.dial import ClusterUpstream
from ztunnel.runtime.clock import Clock, utc
from ztunnel.runtime.half_open import Arrival
from ztunnel.runtime.tasks import Tasks

if TYPE_CHECKING:
    from ztunnel.tap.taps import Taps

log = logging.getLogger(__name__)

_HANDSHAKE_S = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeouts:
    """Envoy's default timeouts, which cut tunnels; ``None`` disables one unless the configuration sets it."""

    route_s: float | None = None
    stream_idle_s: float | None = None


class Datapath:
    """Carries accepted connections to their end; its owner closes it.

    Args:
        listeners: for hand-off between listeners.
        connector: opens upstreams.
        terminator: ends tunnels.
        handshakes: their turns and limits.
        crowd: connections by pod.
        connections: the table that every connection is registered in.
        poller: of this loop.
        clock: for times in logs.
        timeouts: see there.
        tunnel_settings: HTTP/2 settings of connections that bring tunnels.
        taps: of pods, by address; ``None``: the configuration permits none.
    """

    def __init__(
        self,
        listeners: ListenerTable,
        connector: Connector,
        terminator: Terminator,
        handshakes: Handshakes,
        crowd: Crowd,
        *,
        connections: Connections,
        poller: Poller,
        clock: Clock,
        timeouts: Timeouts,
        tunnel_settings: ConnectionSettings,
        taps: Taps | None = None,
    ) -> None:
        self._listeners = listeners
        self._connector = connector
        self._terminator = terminator
        self._handshakes = handshakes
        self._crowd = crowd
        self._connections = connections
        self._poller = poller
        self._clock = clock
        self._timeouts = timeouts
        self._tunnel_settings = tunnel_settings
        self._taps = taps
        self._tasks = Tasks("connections")

    # Accepting

    def accepted(self, listener: LiveListener, sock: socket.socket, peer: tuple[str, int]) -> None:
        """Carry an accepted socket, which this object closes; returns at once."""
        try:
            source, local = plain_address(peer), plain_address(sock.getsockname())
        except (OSError, ValueError):
            sock.close()  # the client is gone already
            return
        info = StreamInfo(
            connection_id=self._connections.next_id(),
            facts=ConnectionFacts(source=source, direct_source=source, destination=local),
            started=self._clock.monotonic(),
            started_at=self._clock.wall(),
            listener=listener.name,
            listener_metadata=listener.model.metadata,
            direct_local=local,
        )
        pod = pod_of(listener, info)
        if not self._crowd.admits(pod):
            listener.overload_reject.value += 1
            sock.close()
            return
        self._tasks.run(self._poller, self._serve(listener, sock, info, pod), f"{info.connection_id}")

    async def _serve(self, listener: LiveListener, sock: socket.socket, info: StreamInfo, pod: str) -> None:
        end = PlainSocket(sock, self._poller)
        self._crowd.enter(pod)
        connection = LiveConnection(info, listener, self._cancel_current(info))
        self._connections.add(connection)
        owner = listener
        owner.opened()
        hop = Hop(info, self._clock, listener_sinks=listener.sinks)
        try:
            listener = await self._filter(listener, end, info)
            if listener is not owner:
                owner.closed()
                owner = connection.owner = listener
                owner.opened()
                hop.listener_sinks = listener.sinks
                info.listener = listener.name
                info.listener_metadata = listener.model.metadata
            chain = self._choose_chain(listener, info)
            connection.chain = chain
            if chain.manager is None:
                hop.filter_sinks = chain.sinks
            if chain.gated:
                await self._admit(chain, info)
            if chain.manager is not None:
                # As in Envoy, a manager's loggers write a line per request and none for the connection.
                info.protocol = "HTTP/2"
                await self._terminate(hop, connection, listener, chain, end)
            else:
                await self._proxy(hop, connection, listener, chain, end)
        except Refused as error:
            hop.refused(error)
            if isinstance(error, NoFilterChain):
                listener.no_filter_chain_match.value += 1
            elif isinstance(error, Incomplete):
                listener.network_extension_config_missing.value += 1
        except FilterClosed as error:
            info.termination_details = str(error)
        except OSError as error:
            info.flags.add(Flag.DOWNSTREAM_TERMINATED)
            log.debug("connection %d: %s", info.connection_id, error)
        finally:
            end.close()
            self._crowd.leave(pod)
            self._connections.remove(connection)
            connection.release()
            connection.drain = None
            owner.closed()
            hop.finish()
            owner.cx_length.record((info.duration_s or 0.0) * 1000)

    @staticmethod
    async def _admit(chain: LiveChain, info: StreamInfo) -> None:
        """Apply the chain's limits of connections; one too many is held for a while first if that is wanted."""
        try:
            chain.admit(info)
        except TooMany as error:
            await asyncio.sleep(error.delay_s)
            raise

    def _cancel_current(self, info: StreamInfo) -> Abort:
        """Return a function that ends a connection before its relay runs; the log line has the reason."""
        cancel = cancels_current_task(self._poller)

        def abort(reason: str) -> None:
            info.termination_details = reason
            cancel(reason)

        return abort

    async def _filter(self, listener: LiveListener, end: PlainSocket, info: StreamInfo) -> LiveListener:
        """Run the listener filters, and hand the connection to another listener if they say so."""
        transparent = listener.model.transparent or is_transparent(end.sock)
        if listener.model.use_original_dst:
            restore(end, info, transparent=transparent)
            listener = self._listeners.hand_off(info.destination, listener)
        if not listener.reads_bytes:
            await self._run_filters(listener, end, info, transparent=transparent)
            return listener
        listener.pre_cx_active.stored += 1
        try:
            if listener.model.listener_filters_timeout_s:
                async with asyncio.timeout(listener.model.listener_filters_timeout_s):
                    await self._run_filters(listener, end, info, transparent=transparent)
            else:
                await self._run_filters(listener, end, info, transparent=transparent)
        except TimeoutError:
            listener.pre_cx_timeout.value += 1
            if not listener.model.continue_on_filter_timeout:
                raise FilterClosed("listener filters timed out") from None
        finally:
            listener.pre_cx_active.stored -= 1
        return listener

    @staticmethod
    async def _run_filters(
        listener: LiveListener, end: PlainSocket, info: StreamInfo, *, transparent: bool
    ) -> None:
        for entry, found in listener.filters:
            if entry.disabled is not None and entry.disabled.holds(info.destination.port):
                continue
            match found:
                case None:
                    listener.extension_config_missing.value += 1
                    raise FilterClosed(f"the configuration of filter {entry.name} has not arrived")
                case model.OriginalDst():
                    if not info.restored:
                        restore(end, info, transparent=transparent)
                case model.TlsInspector():
                    await inspect_tls(end, info)
                    listener.inspected.count(info.facts)
                case model.HttpInspector():
                    await inspect_http(end, info)
                case model.ProxyProtocol():
                    await take_proxy_header(found, end, info)
                case _:
                    annotate(found, info)

    @staticmethod
    def _choose_chain(listener: LiveListener, info: StreamInfo) -> LiveChain:
        chain = listener.chain_for(info.facts)
        if chain is None:
            raise NoFilterChain()
        info.chain = chain.name
        info.chain_metadata = chain.model.metadata
        return chain

    # Outbound, passthrough and plaintext inbound: bytes to a cluster

    async def _proxy(
        self, hop: Hop, connection: LiveConnection, listener: LiveListener, chain: LiveChain, end: PlainSocket
    ) -> None:
        proxy = chain.proxy
        assert proxy is not None
        downstream: End = end
        if chain.tls is not None:
            downstream = await self._accept_tls(connection, listener, chain, end)
        try:
            chain.judge(hop.info)
            chain.set_filter_state(hop.info)
            proxy.cx_total.value += 1
            capture = self._taps.of(hop.info.source.host) if self._taps is not None else None
            # First bytes that leave along with a CONNECT pass no relay, where the tap would see them.
            upstream = await self._open_in_time(hop, proxy, downstream if capture is None else None)
            try:
                client = downstream
                if capture is not None:
                    from ztunnel.envoy.tapped import observed_client  # see _application

                    client = observed_client(capture, hop.info, upstream, downstream)
                await self._carry(hop, connection, proxy, client, upstream)
            finally:
                upstream.close()
                for inner in upstream.hops:
                    inner.finish()
        finally:
            downstream.close()

    def _application(self, info: StreamInfo, upstream: ClusterUpstream, tunnel: Tunnel | None = None) -> End:
        """Return the end of an upstream, or what shows its bytes to a tap of the pod that it leads to."""
        if self._taps is None:
            return upstream.end
        from ztunnel.envoy.tapped import observed_application  # most proxies have no taps, and save the memory

        return observed_application(self._taps, info, upstream.end, tunnel)

    async def _open_in_time(self, hop: Hop, proxy: LiveTcpProxy, downstream: End | None) -> ClusterUpstream:
        """Open the upstream within the filter's idle timeout and longest duration, which run from the accept.

        In Envoy both timers run while the upstream connects. They bound the wait for a CONNECT's answer, which
        no connect timeout of a cluster does.

        Raises:
            Refused: no attempt succeeded, or not in time (flag UF; DT, too, for the duration).
        """
        settings = proxy.model
        idle, longest = settings.idle_timeout_s or math.inf, settings.max_duration_s or math.inf
        limit = min(idle, longest)
        if limit == math.inf:
            return await self._connector.open(hop, proxy, downstream)
        deadline = Deadline(self._poller, limit)
        try:
            with deadline:
                return await self._connector.open(hop, proxy, downstream)
        except TimeoutError:
            if not deadline.passed:
                raise
        if longest <= idle:
            proxy.max_duration.value += 1
            hop.info.flags.add(Flag.DURATION_TIMEOUT)
            raise _too_late("max_downstream_connection_duration") from None
        proxy.idle_timeout.value += 1
        raise _too_late("tcp_session_idle_timeout") from None

    async def _carry(
        self,
        hop: Hop,
        connection: LiveConnection,
        proxy: LiveTcpProxy,
        downstream: End,
        upstream: ClusterUpstream,
    ) -> None:
        """Relay until both directions have ended, then count the bytes of every hop."""
        counts = ByteCounts()
        settings = proxy.model
        last = upstream.hops[-1].info if upstream.hops else hop.info
        application = self._application(last, upstream)
        running = relay(downstream, application, counts, idle_timeout_s=settings.idle_timeout_s or None)
        connection.aborts_by(running.abort)
        connection.counts = counts
        connection.inner = [inner.info for inner in upstream.hops]
        limit = None
        if settings.max_duration_s:
            limit = self._poller.loop.call_later(settings.max_duration_s, running.abort, "max duration")
        try:
            ended = await running
        finally:
            if limit is not None:
                limit.cancel()
            received, sent = counts.sent, counts.received
            for each in (hop, *upstream.hops):
                each.info.bytes_received = received
                each.info.bytes_sent = sent
                cluster = self._connector.cluster(each.info.cluster)
                if cluster is not None:
                    cluster.stats.cx_tx_bytes.value += received
                    cluster.stats.cx_rx_bytes.value += sent
            proxy.rx_bytes.value += received
            proxy.tx_bytes.value += sent
        upstream.ended_by_peer = _by_peer(ended, downstream, upstream)
        self._note_end(hop, proxy, ended, upstream)

    @staticmethod
    def _note_end(hop: Hop, proxy: LiveTcpProxy, ended: RelayEnd, upstream: ClusterUpstream) -> None:
        """Set flags and details of an ended relay."""
        infos = [hop.info, *(inner.info for inner in upstream.hops)]
        flag: Flag | None = None
        details = ""
        if ended.timed_out:
            proxy.idle_timeout.value += 1
            details = "tcp_session_idle_timeout"
        elif isinstance(ended.error, TunnelClosed):
            details = str(ended.error)
            if details == "max duration":
                proxy.max_duration.value += 1
                flag, details = Flag.DURATION_TIMEOUT, "max_downstream_connection_duration"
        elif upstream.end.source is SourceState.CUT:
            # Which end was cut, not which stopped first: after the client's half-close that is always the client.
            lost = isinstance(ended.error, TunnelBroken) and ended.error.code is None
            flag = Flag.UPSTREAM_TERMINATED if lost else Flag.UPSTREAM_RESET
        elif ended.error is not None:
            # A lost client has no flag, as one that resets plain TCP; the reason is its transport's.
            hop.info.downstream_failure = str(ended.error)
        for info in infos:
            if flag is not None:
                info.flags.add(flag)
            if details:
                info.termination_details = details

    async def _handshake_turn(self, connection: LiveConnection, chain: LiveChain, sock: socket.socket) -> Arrival:
        """Wait for the turn of a handshake; closes the socket if it does not come to that.

        Raises:
            TurnedAway: one of the limits on half-open connections is reached.
        """
        facts = connection.info.facts
        return await self._handshakes.turn(
            sock,
            connection,
            facts.direct_source.host,
            facts.destination.host,
            chain.model.transport_connect_timeout_s or _HANDSHAKE_S,
        )

    async def _accept_tls(
        self, connection: LiveConnection, listener: LiveListener, chain: LiveChain, end: PlainSocket
    ) -> TlsSocket:
        """Do the server's handshake, for chains that do not carry tunnels."""
        assert chain.tls is not None
        info = connection.info
        context = chain.tls.current
        if context is None:
            listener.ssl.not_ready.value += 1
            raise Refused("downstream_context_secrets_not_ready")
        sock = end.detach()
        try:
            arrival = await self._handshake_turn(connection, chain, sock)
        except TurnedAway as error:
            raise _handshake_failed(info, listener, error) from error
        secured = TlsSocket(sock, context, self._poller)
        try:
            facts = await secured.establish(chain.model.transport_connect_timeout_s or _HANDSHAKE_S)
        except BaseException as error:
            arrival.ended()
            secured.close()
            if isinstance(error, HboneError):
                raise _handshake_failed(info, listener, error) from error
            raise
        arrival.proved()
        _note_peer(info, facts, chain)
        listener.ssl.negotiated(facts)
        return secured

    # Inbound: tunnels that end here

    async def _terminate(
        self, hop: Hop, connection: LiveConnection, listener: LiveListener, chain: LiveChain, end: PlainSocket
    ) -> None:
        manager = chain.manager
        assert manager is not None
        info = hop.info
        context = None
        if chain.tls is not None:
            context = chain.tls.current
            if context is None:
                listener.ssl.not_ready.value += 1
                raise Refused("downstream_context_secrets_not_ready")
        denied: list[Refused] = []
        served: list[Connection] = []
        arrival: Arrival | None = None

        def established(tunnels: Connection) -> None:
            """Authorize the peer, before any HTTP/2 frame is answered."""
            served.append(tunnels)
            if arrival is not None:
                arrival.proved()
            if tunnels.facts is not None:
                _note_peer(info, tunnels.facts, chain)
                listener.ssl.negotiated(tunnels.facts)
            try:
                chain.judge(info, port_known=not self._terminator.judges_ports)
            except Refused as error:
                denied.append(error)
                raise
            chain.set_filter_state(info)
            manager.cx_total.value += 1
            manager.cx_http2.value += 1
            manager.cx_active.stored += 1
            secured = tunnels.facts is not None
            manager.cx_ssl_total.value += secured
            manager.cx_ssl_active.stored += secured
            connection.aborts_by(tunnels.abort)
            connection.drain = tunnels.drain
            if connection.leaving:
                connection.leave()

        sock = end.detach()
        try:
            if context is not None:
                arrival = await self._handshake_turn(connection, chain, sock)
            await serve_connection(
                sock,
                context,
                self._settings_for(chain, manager),
                self._poller,
                lambda request: self._request(hop, chain, request),
                on_established=established,
            )
        except HboneError as error:
            if not denied:
                raise _handshake_failed(info, listener, error) from error
        finally:
            if arrival is not None:
                arrival.ended()
            if connection.drain is not None:
                manager.connection_ended(by_peer=served[0].ended_by_peer, in_use=served[0].engine.open_streams > 0)
                manager.cx_ssl_active.stored -= info.tls is not None
                manager.cx_length.record((self._clock.monotonic() - info.started) * 1000)
                manager.cx_protocol_error.value += isinstance(served[0].error, RemoteProtocolError)
        if denied:
            raise denied[0]

    def _settings_for(self, chain: LiveChain, manager: LiveConnectionManager) -> ConnectionSettings:
        wanted = manager.model.http2
        settings = self._tunnel_settings
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

    async def _request(self, outer: Hop, chain: LiveChain, request: Request) -> None:
        """Answer one request of a tunnel connection: usually a CONNECT, carried to the application."""
        head, base, manager = request.head, outer.info, chain.manager
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
        hop = Hop(info, self._clock, filter_sinks=manager.sinks)
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
            answer = refusal.answer
            info.response_code, info.response_details = answer.status, answer.details
            info.bytes_sent = len(answer.body)
            headers = [(b"content-length", str(len(answer.body)).encode()), (b"content-type", b"text/plain")]
            request.refuse(
                answer.status,
                [*(headers if answer.body else ()), *self._response_headers(manager)],
                answer.body,
                answer.reset_code,
            )
        except TunnelBroken as error:
            info.flags.add(Flag.DOWNSTREAM_TERMINATED)
            info.response_details = f"downstream_remote_disconnect: {error}"
        except asyncio.CancelledError:
            info.flags.add(Flag.DOWNSTREAM_TERMINATED)
            raise
        finally:
            if info.response_code:
                manager.rq_by_class[min(5, max(2, info.response_code // 100))].value += 1
            manager.rq_active.stored -= 1
            hop.finish()
            manager.rq_time.record((info.duration_s or 0.0) * 1000)

    async def _carry_tunnel(
        self,
        hop: Hop,
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
        application = self._application(info, upstream, tunnel)
        running = relay(tunnel, application, counts, idle_timeout_s=idle or None)
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
            cluster = self._connector.cluster(info.cluster)
            if cluster is not None:
                cluster.stats.cx_tx_bytes.value += received
                cluster.stats.cx_rx_bytes.value += sent
        upstream.ended_by_peer = _by_peer(ended, tunnel, upstream)
        upstream.in_use = upstream.end.source is SourceState.CUT or not _in_order(ended, tunnel)
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
            manager.rq_reset.value += not lost
            info.response_details = "downstream_remote_disconnect" if lost else "http2.remote_reset"

    def _response_headers(self, manager: LiveConnectionManager) -> list[tuple[bytes, bytes]]:
        return [_date_header(int(self._clock.wall())), manager.server_header]

    # Life

    def __len__(self) -> int:
        return len(self._tasks)

    async def close(self) -> None:
        """End every connection; idempotent."""
        await self._tasks.close()


def _by_peer(ended: RelayEnd, downstream: End, upstream: ClusterUpstream) -> bool:
    """Return whether the host closed its connection, as Envoy counts it: by a reset, or by ending after we did."""
    if upstream.end.source is SourceState.CUT:
        return True
    return _in_order(ended, downstream) and ended.first is downstream


def _in_order(ended: RelayEnd, downstream: End) -> bool:
    """Return whether the client and we ended both directions, and did not leave the host with one open."""
    return ended.error is None and not ended.timed_out and downstream.source is not SourceState.CUT


@lru_cache(maxsize=1)
def _date_header(second: int) -> tuple[bytes, bytes]:
    """Return the ``date`` of answers; it is the same for a whole second."""
    return b"date", utc("%a, %d %b %Y %H:%M:%S GMT", second).encode()


def _too_late(details: str) -> UpstreamFailed:
    error = UpstreamFailed("")
    error.details = details
    return error


def _note_peer(info: StreamInfo, facts: PeerFacts, chain: LiveChain) -> None:
    """Store the peer's identity from a handshake."""
    dns: tuple[str, ...] = ()
    subject = ""
    if facts.certificate is not None:
        with suppress(ValueError):
            dns = tuple(text for kind, text in subject_alt_names(facts.certificate) if kind == "dns")
        subject = facts.certificate.subject.rfc4514_string()
        if facts.chain:
            info.facts.peer = PeerCertificate(uri_sans=facts.uri_sans, dns_sans=dns, subject=subject)
    own = chain.tls.presented_in(facts) if chain.tls is not None else None
    info.tls = TlsFacts(
        version=facts.version,
        cipher=facts.cipher,
        peer_subject=subject,
        peer_chain=facts.chain or ((facts.certificate,) if facts.certificate is not None else ()),
        local=own.certificate if own is not None else None,
        peer_uri_sans=facts.uri_sans,
        peer_dns_sans=dns,
        local_uri_sans=own.uri_sans if own is not None else (),
    )
    info.facts.transport_protocol = "tls"


def _handshake_failed(info: StreamInfo, listener: LiveListener, error: HboneError) -> Refused:
    """Count a failed handshake by its reason."""
    ssl = listener.ssl
    info.downstream_failure = f"TLS_error: {error}"
    if isinstance(error, TlsError) and not error.by_peer:
        if error.reason is TlsReason.NO_CERT:
            ssl.fail_verify_no_cert.value += 1
        elif error.reason is TlsReason.SAN:
            ssl.fail_verify_san.value += 1
            log.info("verify cert failed: %s", error.detail)
        elif error.reason in (TlsReason.CHAIN, TlsReason.EXPIRED, TlsReason.REVOKED):
            ssl.fail_verify_error.value += 1
        else:
            ssl.connection_error.value += 1
    elif info.tls is None:
        ssl.connection_error.value += 1
    return Refused()
