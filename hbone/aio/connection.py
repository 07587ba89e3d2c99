"""Runs one HTTP/2 connection over a TCP socket, with or without TLS: the poller calls, and the engine processes
the bytes.

Callbacks process each chunk. Coroutines only wait for the handshake, for the response to CONNECT and for the
connection to close. All output of a loop iteration is sent in one TLS write (:meth:`Connection.flush`). The owner
calls :meth:`Connection.close` or :meth:`Connection.abort`. If the network or the peer ends the connection, its
tunnels and :meth:`Connection.wait_closed` report this.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import time
from collections.abc import Callable, Coroutine, Iterable
from typing import Final, Protocol

from hbone.aio import waits
from hbone.aio.connection_settings import ConnectionSettings, MovedConnection, Progress
from hbone.aio.connection_tunnels import ConnectionTunnels
from hbone.aio.keepalive import Keepalive
from hbone.aio.link import Link, LinkClosed, network_error
from hbone.aio.poller import BULK_BYTES, HUNG_UP, READABLE, READS_PER_TURN, WRITABLE, Poller
from hbone.aio.tunnel import Tunnel
from hbone.engine import Engine
from hbone.errors import (
    ConnectionBroken,
    ErrorCode,
    HboneError,
    PeerSilent,
    RemoteProtocolError,
    TlsError,
    TunnelBroken,
    TunnelClosed,
    bare,
)
from hbone.events import (
    ConnectionFailed,
    DataReceived,
    Event,
    GoawayReceived,
    PingAcknowledged,
    RequestHead,
    RequestReceived,
    ResponseReceived,
    SettingsReceived,
    StreamEnded,
    StreamReset,
    WindowOpened,
)
from hbone.flow import PeerQuota
from hbone.settings import Role
from hbone.tls import TlsSession, TlsStream, Unmovable
from hbone.tls_context import TlsContext

logger = logging.getLogger(__name__)

_IN_HANDSHAKE: Final = "during the TLS handshake"
_NOTHING: Final = memoryview(b"")
_DELIVERY_CHECK_S: Final = 0.02
"""How often a drained connection checks whether the last bytes of its streams have arrived; a guess."""
_SMALL_BYTES: Final = 4096  # the cost of a shorter read does not depend on its bytes
_LONGEST_PAUSE_S: Final = 0.05
"""The longest single pause in reading. After it the remaining pause is computed again, because a 200 refunds the
cost of its request.
"""


class RequestSink(Protocol):
    """Handles the requests that a server's connection receives."""

    def start(self, connection: Connection, tunnel: Tunnel, head: RequestHead, *, ended: bool) -> None:
        """Handle a new stream. ``ended`` is whether END_STREAM was sent with the request."""

    def cancel(self, tunnel: Tunnel) -> None:
        """Stop handling a request, because its stream is closed. Idempotent, without effect after the answer."""


class Connection(ConnectionTunnels):
    """One HTTP/2 connection, made by :func:`connect` or :func:`hbone.aio.server.serve_connection`."""

    __slots__ = (
        "_bulk",
        "_closed",
        "_delivery",
        "_first",
        "_grace",
        "_keepalive",
        "_on_change",
        "_on_established",
        "_pause",
        "_recent_bytes",
        "_requests",
        "_share",
    )

    def __init__(
        self,
        role: Role,
        sock: socket.SocketType,
        tls_context: TlsContext | None,
        settings: ConnectionSettings,
        poller: Poller,
        *,
        requests: RequestSink | None = None,
        on_established: Callable[[Connection], None] | None = None,
        moved: MovedConnection | None = None,
    ) -> None:
        engine = Engine(role, settings.http2, poller) if moved is None else moved.engine
        engine.follow_price(poller.unit_price)
        tls: TlsStream | None = None
        if moved is not None:
            tls = moved.tls
        elif tls_context is not None:
            # A server's SETTINGS announce support for early data, and must reach the client before its first
            # CONNECT. So they are sent with the server's first TLS flight (0.5-RTT data, RFC 8446, 4.4.4). They
            # contain no secrets.
            early = role is Role.SERVER and settings.http2.early_data
            tls = TlsSession(tls_context, engine.opening if early else b"")
        super().__init__(role, settings, poller, engine, Link(sock, tls, poller))
        self._requests = requests
        self._on_established = on_established
        self._on_change: Callable[[Connection], None] | None = None
        self._bulk = role is Role.SERVER  # until the end of the handshake
        self._recent_bytes = 0
        self._closed: asyncio.Future[None] = poller.loop.create_future()
        self._keepalive: Keepalive | None = None
        self._first: asyncio.TimerHandle | None = None
        self._pause: asyncio.TimerHandle | None = None
        self._grace: asyncio.TimerHandle | None = None
        self._delivery: asyncio.Handle | None = None
        self._share: PeerQuota | None = None
        if moved is None:
            poller.adopt(sock, self)
        else:
            self.facts = tls.facts() if tls is not None else None
            self._established.set_result(None)

    # Opening

    def establish(self) -> Coroutine[object, object, None]:
        """Finish the TLS handshake and start HTTP/2, without waiting for the peer's SETTINGS.

        Raises:
            TlsError: either side refused the handshake.
            PeerSilent: the handshake did not finish within ``handshake_timeout_s``.
            ConnectionBroken: the network ended the connection.
            Exception: raised by ``on_established``. Then no HTTP/2 frame was sent, except for the SETTINGS of a
                server that announces early data.
        """
        return waits.handshake(self._begin, self._established, self.settings.handshake_timeout_s, self._end)

    def _begin(self) -> None:
        """Begin the handshake. The client sends the first bytes; at the server these have often
        already arrived.
        """
        if self.error is not None:
            return
        if self.role is Role.CLIENT or self.link.tls is None:
            self._handshake_step(None)
        elif self._joins_line():
            self.poller.requeue(self)
        else:
            self._take_turn()

    def _handshake_step(self, received: int | None) -> None:
        tls = self.link.tls
        if self._established.done():
            return
        try:
            if tls is not None:
                finished = False
                try:
                    finished = tls.handshake()
                finally:
                    # A client's last TLS flight must be sent at once, because the server waits for this flight. A
                    # server's last flight contains only session tickets, which our clients do not use, so it is
                    # sent in one segment with the first frames.
                    if not finished or self.role is Role.CLIENT:
                        self._send_handshake()
                if not finished:
                    return
                self.facts = tls.facts()
            if self._on_established is not None:
                self._on_established(self)
        except Exception as error:  # noqa: BLE001  the hook raises the application's own types to refuse
            self._end(error)
            return
        self._established.set_result(None)
        if self.facts is not None and self.facts.uri_sans:
            self._share = self.poller.peers.join(self.facts.uri_sans[0], self.settings.http2.limits)
            self.engine.share(self._share, self.settings.windows)
        if tls is None or not tls.half_rtt_sent:
            self.engine.start()
        if self._closing and self.role is Role.SERVER:
            self.engine.drain()  # requested during the handshake; GOAWAY must not precede SETTINGS
        if self.role is Role.SERVER:
            self.flush()
        else:
            # Flush only at the end of this loop iteration, because the tunnel that caused the dial opens in the
            # same iteration. The tunnel's CONNECT, our SETTINGS and our ACK of the server's SETTINGS are then sent
            # in one segment.
            self.poller.schedule_flush(self)
        self._keep_alive()
        self._limit_first_request()
        if tls is not None and received is not None and self.error is None:
            self._receive(self.link.left_over)
            if self.engine.unparsed and not self._has_ended():
                self.poller.requeue(self)

    def _limit_first_request(self) -> None:
        """If this is a server's connection, close it unless its first request arrives in time."""
        limit_s = self.settings.first_request_timeout_s
        if self.role is not Role.SERVER or self.engine.has_requests:
            return
        if limit_s is not None and self.error is None:
            self._first = self.poller.loop.call_later(limit_s, self.close)

    def _send_handshake(self) -> None:
        try:
            self.link.send_tls()
        except OSError as error:  # the peer has sent RST meanwhile
            raise network_error(error, _IN_HANDSHAKE) from error

    # Events of the poller

    def on_event(self, mask: int) -> None:
        if self.error is not None:
            return
        if mask & WRITABLE and self.link.blocked and self.write_error is None:
            self._unblock()
        if mask & HUNG_UP:
            self.link.hang_up_seen()
        if mask & READABLE or not mask:
            self.link.readable = True
            # A bulk connection always has more bytes to read, so epoll would report it in every iteration of the
            # event loop. Therefore bulk connections wait in the run queue, which gets only a part of each
            # iteration, and events of small flows are served at once. A connection in a handshake, or of a peer
            # whose connections have read much in this iteration, counts as bulk.
            share = self._share
            bulk = self._bulk or (share is not None and share.bulk_s == self.poller.now_s)
            if mask and bulk and self._joins_line():
                self.poller.requeue(self)
            else:
                self._take_turn()
                if self.write_error is not None:
                    self._end_when_read(self.write_error)

    def _write_failed(self, error: OSError | TlsError) -> None:
        failure = network_error(error, "while sending")
        if not isinstance(error, ConnectionError):
            self._end(failure)
        elif self.error is None and self.write_error is None:
            # The peer can have sent its last frames before it closed, such as the end of a response, a GOAWAY, or
            # the alert that refuses our certificate.
            self.write_error = bare(failure)
            self.poller.requeue(self)
            self._changed()

    def _end_when_read(self, error: Exception) -> None:
        if self._pause is None and not (self.link.readable or self.engine.unparsed):
            self._end(error)

    def _joins_line(self) -> bool:
        """Return whether this event's work must wait in the run queue, because other connections are waiting
        there.

        A handshake step takes a millisecond, so each loop iteration runs only one, and further steps wait.
        """
        poller = self.poller
        if self._established.done():
            return poller.defers_bulk()
        if poller.handshake_s == poller.now_s:
            return True
        poller.handshake_s = poller.now_s
        return False

    def _take_turn(self) -> None:
        """Read and process one slice of the received bytes. The rest waits in the run queue behind other
        connections.

        A slice ends when the engine has counted enough work for its frames, or after a time limit, which is
        checked only between reads. Reads of a bulk connection are sized to take about one slice. A connection with
        less than a slice to read never reads the clock.
        """
        link, engine = self.link, self.engine
        limits = self.settings.http2.limits
        read_before = link.read_bytes
        begun_s = time.monotonic() if self._bulk else 0.0
        until_s = begun_s and begun_s + limits.slice_s
        for _ in range(READS_PER_TURN):
            if self._pause is not None:
                return  # _resume continues later
            if not self._established.done():
                self._receive_handshake()
                if not (self._established.done() or link.readable or self._has_ended()):
                    return
            elif engine.unparsed:
                self._process(_NOTHING)
            else:
                before = link.read_bytes
                self._receive(link.receive)
                if begun_s:
                    now_s = time.monotonic()
                    link.fit(link.read_bytes - before, now_s - begun_s, limits.slice_s)
                    begun_s = now_s
            if self._has_ended() or not (link.readable or engine.unparsed):
                size = link.read_bytes - read_before
                if self._bulk or size >= _SMALL_BYTES:
                    self._note_read(size)
                return
            if engine.unparsed:
                break
            now_s = time.monotonic()
            if not until_s:
                begun_s, until_s = now_s, now_s + limits.slice_s
            elif now_s >= until_s:
                break
        self._note_read(link.read_bytes - read_before)
        self._bulk = True
        if self._pause is None:
            self.poller.requeue(self)

    def _note_read(self, size: int) -> None:
        # Earlier reads are only halved, so that a bulk flow still counts as bulk after one small read, such as a
        # PONG.
        self._recent_bytes = (self._recent_bytes >> 1) + size
        self._bulk = self._recent_bytes >= BULK_BYTES
        if self._share is not None:
            self._share.note_read(self.poller.now_s, size)

    def _rest(self, pause_s: float) -> None:
        """Stop reading for ``pause_s``, so that the work budget recovers. TCP flow control stops the peer."""
        if self._pause is None and self.error is None:
            self._pause = self.poller.loop.call_later(min(pause_s, _LONGEST_PAUSE_S), self._resume)

    def _resume(self) -> None:
        self._pause = None
        if self.error is None:
            pause_s = self.engine.overdrawn_s(time.monotonic())
            if pause_s:
                self._rest(pause_s)
            else:
                self.poller.requeue(self)

    def on_bug(self, error: Exception) -> None:
        self._end(error)

    def _receive_handshake(self) -> None:
        link, buffer = self.link, self.poller.ciphertext
        try:
            size = link.receive_raw(buffer)
        except (OSError, LinkClosed) as error:
            self._end(network_error(error, _IN_HANDSHAKE))
            return
        if size and link.tls is not None:
            link.tls.receive(buffer[:size])
            self._handshake_step(size)

    def _receive(self, read: Callable[[], memoryview | None]) -> None:
        try:
            data = read()
        except TlsError as error:
            self._end(error)
            return
        except (OSError, LinkClosed) as error:
            self._end(self.write_error or network_error(error, ""))
            return
        if data is not None:
            if self.link.overhead:
                self.engine.charge_records(self.link.overhead)
            self._process(data)

    def _process(self, data: memoryview) -> None:
        """Process the bytes left over from the last slice, and then ``data``. Do at most one slice of work."""
        engine, poller = self.engine, self.poller
        poller.lent = True
        try:
            for event in engine.receive_data(data, poller.now_s, engine.slice_units):
                if type(event) is DataReceived:
                    tunnel = self._tunnels.get(event.stream_id)
                    if tunnel is not None:
                        tunnel.on_data(event.chunks, event.size)
                    else:
                        self.engine.acknowledge(event.stream_id, event.size)
                else:
                    self._dispatch(event)
            if self._to_flush:
                to_flush, self._to_flush = self._to_flush, []
                for tunnel in to_flush:
                    if tunnel.peer is not None:
                        tunnel.peer.flush()
        finally:
            poller.lent = False
        if engine.output and not self.dirty:
            self.poller.schedule_flush(self)
        if engine.pause_s:
            self._rest(engine.pause_s)

    def _dispatch(self, event: Event) -> None:
        match event:  # without positional patterns: see ARCHITECTURE.md, "Nothing outlives its connection"
            case RequestReceived():
                assert self._requests is not None
                if self._first is not None:
                    self._first.cancel()
                    self._first = None
                self._tunnels[event.stream_id] = tunnel = Tunnel(self, event.stream_id)
                self._requests.start(self, tunnel, event.head, ended=event.ended)
            case ResponseReceived():
                self._answers.answered(event.stream_id, event.status, event.headers)
            case StreamEnded():
                tunnel_at = self._tunnels.get(event.stream_id)
                if tunnel_at is not None:
                    tunnel_at.on_end()
            case StreamReset():
                what = "peer reset the stream" if event.by_peer else "peer violated the protocol on the stream"
                error = TunnelBroken(what, code=event.code, unprocessed=event.unprocessed)
                self._stream_gone(event.stream_id, error)
            case WindowOpened():
                if event.stream_id == 0 or event.stream_id in self._waiting:
                    # Tunnels that can send again resume only in flush(), because the scratch buffers still hold
                    # the rest of this read.
                    self._room = True
                    self.poller.schedule_flush(self)
            case PingAcknowledged():
                ours = self._keepalive is not None and self._keepalive.answered(event.payload)
                if self.engine.drain_seen and not ours and self._grace is None:
                    self._grace = self.poller.loop.call_later(self.settings.drain_grace_s, self._end_grace)
            case GoawayReceived():
                self._changed()
            case SettingsReceived():
                self._changed()
            case ConnectionFailed():
                self.flush()
                self._end(RemoteProtocolError(event.code, event.detail))

    def _stream_gone(self, stream_id: int, error: TunnelBroken) -> None:
        tunnel = self._tunnels.pop(stream_id, None)
        self._waiting.pop(stream_id, None)
        self._answers.broken(stream_id, error)
        if tunnel is not None:
            tunnel.on_reset(error)
            if self._requests is not None:
                self._requests.cancel(tunnel)
        self._changed()

    # Methods for the owner of the connection

    def on_change(self, callback: Callable[[Connection], None] | None) -> None:
        """Set the callback for changes: SETTINGS or GOAWAY arrived, a stream was reset, the connection drains or
        has ended. An ordinary end of a stream is reported only if the connection drains or has no stream
        identifiers left.
        """
        self._on_change = callback

    @property
    def ended_by_peer(self) -> bool:
        """Whether the peer or the network ended the connection. False if we ended it on purpose, because of the
        peer's silence, or because of a protocol error.
        """
        ours = (TunnelClosed, PeerSilent, RemoteProtocolError)
        return self.error is not None and not isinstance(self.error, ours)

    @property
    def ended_by_limit(self) -> bool:
        """Whether we closed the connection because the peer exceeded a budget (ENHANCE_YOUR_CALM)."""
        return isinstance(self.error, RemoteProtocolError) and self.error.code == ErrorCode.ENHANCE_YOUR_CALM

    def drain(self) -> None:
        """Accept no new streams, and close when the last open stream has ended. Idempotent.

        A server announces the drain in two steps (RFC 9113, 6.8): a GOAWAY with the highest identifier and a PING,
        and shortly after the PONG the final GOAWAY. So requests that crossed the first GOAWAY are not lost. The
        delay is for multi-threaded clients, where one thread can answer the PING while another has chosen this
        connection for a request but not sent it. (The Rust ztunnel's pool checks for GOAWAY only when it chooses a
        connection, and a request beyond the final GOAWAY fails.)
        """
        if self.error is None and not self._closing:
            self._closing = True
            if self.role is Role.SERVER and self._established.done():  # otherwise GOAWAY follows our SETTINGS
                self.engine.drain()
                self.poller.schedule_flush(self)
            self._changed()

    def _end_grace(self) -> None:
        if self.error is None:
            self.engine.goaway()
            self.flush()
            self._changed()

    def close(self) -> None:
        """Reset open streams, send GOAWAY and close_notify, and close, without waiting for the network.
        Idempotent.
        """
        if self.error is not None:
            return
        if self._established.done():
            for tunnel in list(self._tunnels.values()):
                tunnel.close(TunnelClosed("connection closed"))
            self.engine.goaway()
            self.flush()
        if self.link.tls is not None and not self._has_ended():
            self.link.tls.close()
            try:
                self.link.send_tls()
            except (OSError, TlsError) as error:
                logger.debug("closing: %s", error)
        self._end(TunnelClosed("connection closed"))

    def abort(self, reason: str) -> None:
        """Close at once without sending. The Rust ztunnel does this for a deleted pod and after its drain.
        Idempotent.
        """
        self._end(TunnelClosed(reason))

    def _has_ended(self) -> bool:
        """Whether the connection has ended. This is a method, because type checkers assume that an attribute does
        not change during calls.
        """
        return self.error is not None

    def wait_closed(self) -> asyncio.Future[None]:
        """Return a future that resolves when the connection has ended. The reason is in :attr:`error`."""
        return asyncio.shield(self._closed)

    # Moving the connection to another process: see hbone.aio.handover

    def settle(self) -> dict[int, Tunnel]:
        """Make the connection ready to move to another process, with no half-read frame and with all output
        encrypted. Return the tunnels.

        Raises:
            Unmovable: the connection cannot move, or cannot move yet.
        """
        tls = self.link.tls
        if self.error is not None or not self._established.done():
            raise Unmovable("in its handshake" if self.error is None else "ended")
        while self.engine.unparsed and not self._has_ended():
            self._process(_NOTHING)
        while tls is not None and tls.missing and not self._has_ended():
            before = self.link.read_bytes
            self._receive(self.link.receive_missing)
            if self.link.read_bytes == before:
                raise Unmovable("within a record")
        self.flush()
        if not self._has_ended() and not self.link.blocked:
            self._send_pending_tls()
        if self._has_ended() or self.write_error is not None or self.engine.failed:
            raise Unmovable("ended")
        if self._answers:
            raise Unmovable("a request waits for its answer")
        return self._tunnels

    def _send_pending_tls(self) -> None:
        try:
            self.link.send_tls()
        except (OSError, TlsError) as error:
            self._end(network_error(error, "while sending"))

    @property
    def progress(self) -> Progress:
        """The connection's state outside its engine, TLS and tunnels, for another process."""
        return Progress(
            waiting=tuple(self._waiting),
            room=self._room,
            closing=self._closing,
            grace=self._grace is not None,
            unsent=self.link.unsent,
        )

    def suspend(self) -> None:
        """Stop reading and writing until :meth:`wake_up` or :meth:`move_away`."""
        self.link.held = True
        if self._pause is not None:
            self._pause.cancel()
            self._pause = None
        self.poller.suspend(self.link.sock.fileno(), self)

    def wake_up(self) -> None:
        """Read and write again after :meth:`suspend`."""
        if self.error is None:
            self.link.held = False
            fd = self.link.sock.fileno()
            try:
                self.poller.register(fd, self)
            except OSError as error:  # meanwhile other sockets have used up the watches: epoll_ctl(2), ENOSPC
                self._end(network_error(error, "when it was watched again"))
                return
            if self.link.blocked:
                self.poller.watch_writable(fd)
            self.poller.requeue(self)

    def move_away(self) -> None:
        """End this object silently, because another process continues the connection. Idempotent."""
        if self.error is None:
            self._tunnels.clear()
            self._end(TunnelClosed("moved to another process"))

    def continue_with(self, progress: Progress, tunnels: Iterable[Tunnel]) -> None:
        """Load the state of a connection from another process; :meth:`restart` starts it."""
        self._tunnels = {tunnel.stream_id: tunnel for tunnel in tunnels}
        self._waiting = {stream_id: self._tunnels[stream_id] for stream_id in progress.waiting}
        self._room = progress.room
        self._closing = progress.closing
        if progress.grace:
            self._grace = self.poller.loop.call_later(self.settings.drain_grace_s, self._end_grace)
        self.link.continue_with(progress.unsent)

    def restart(self) -> None:
        """Start to read and write on a connection taken over from another process.

        Raises:
            ConnectionBroken: the socket cannot be watched, and is closed.
        """
        self.poller.adopt(self.link.sock, self)
        if self.link.blocked:
            self.poller.watch_writable(self.link.sock.fileno())
        if self.facts is not None and self.facts.uri_sans:
            self._share = self.poller.peers.join(self.facts.uri_sans[0], self.engine.settings.limits)
            self.engine.share(self._share, self.settings.windows)
        self._keep_alive()
        self._limit_first_request()
        pause_s = self.engine.overdrawn_s(time.monotonic())
        if pause_s:
            self._rest(pause_s)
        self.poller.schedule_flush(self)
        if self.engine.unparsed:
            self.poller.requeue(self)
        self._changed()

    def _end(self, error: Exception) -> None:
        if self.error is not None:
            return
        self.error = bare(error)
        if self._keepalive is not None:
            self._keepalive.stop()
        if self._first is not None:
            self._first.cancel()
        if self._pause is not None:
            self._pause.cancel()
        if self._grace is not None:
            self._grace.cancel()
        if self._delivery is not None:
            self._delivery.cancel()
        if self._share is not None:
            self.engine.leave_share()
            self.poller.peers.leave(self._share)
        self._keepalive = self._first = self._pause = self._grace = self._delivery = self._share = None
        self.link.close(lingers=self.role is Role.SERVER and isinstance(error, RemoteProtocolError))
        self.engine.output.taken()
        broken = error if isinstance(error, HboneError) else ConnectionBroken(f"connection ended: {error}")
        if not self._established.done():
            self._established.set_exception(error)
            self._established.exception()  # retrieved here, because there can be no waiter
        if isinstance(error, TlsError):
            self._answers.refused_by_tls(error)
        if not isinstance(broken, TunnelBroken):
            broken = ConnectionBroken(f"connection ended: {error}")
        # The first stream's request never counts as unprocessed: if a server refuses us after the handshake, a
        # retry is useless.
        unsent_from = 0 if isinstance(error, TunnelClosed) else self._unsent_from
        for stream_id in list(self._tunnels):
            unprocessed = 1 < unsent_from <= stream_id
            self._stream_gone(
                stream_id, ConnectionBroken(broken.detail, unprocessed=True) if unprocessed else broken
            )
        self._waiting.clear()
        self._to_flush.clear()
        self._on_established = None
        if not self._closed.done():
            self._closed.set_result(None)
        self._changed()
        self._on_change = None

    def _changed(self) -> None:
        # A drained connection is closed in the next loop iteration, because this can be called in the middle of a
        # read.
        is_drained = self._closing and not self.open_streams and self.engine.goaway_sent
        if is_drained and self.error is None and self._delivery is None:
            self._delivery = self.poller.loop.call_soon(self._close_delivered)
        if self._on_change is not None:
            self._on_change(self)

    def _close_delivered(self) -> None:
        """Close the drained connection when its peer has acknowledged the last bytes of its streams.

        If the peer is gone, keepalive ends the wait.
        """
        self._delivery = None
        self.flush()
        if self.error is not None:
            return
        if self.link.in_flight:
            self._delivery = self.poller.loop.call_later(_DELIVERY_CHECK_S, self._close_delivered)
        else:
            self.close()

    # Keepalive

    def _keep_alive(self) -> None:
        settings = self.settings
        if settings.ping_interval_s is not None and self.error is None:
            self._keepalive = Keepalive(
                self, self.poller, interval_s=settings.ping_interval_s, timeout_s=settings.ping_timeout_s
            )

    @property
    def received_bytes(self) -> int:
        return self.link.read_bytes

    def send_ping(self, payload: bytes) -> None:
        self.engine.ping(payload)
        self.poller.schedule_flush(self)

    def on_silence(self) -> None:
        if self.role is Role.SERVER:
            self.engine.goaway(ErrorCode.NO_ERROR)
            self.flush()
        self._end(PeerSilent("HBONE ping timeout"))


async def connect(
    sock: socket.SocketType, tls_context: TlsContext | None, settings: ConnectionSettings, poller: Poller
) -> Connection:
    """Open the client side of TLS and HTTP/2 over a connected, non-blocking socket, which the result then owns.

    Raises:
        TlsError, PeerSilent, ConnectionBroken: see :meth:`Connection.establish`; the socket is closed then.
    """
    connection = Connection(Role.CLIENT, sock, tls_context, settings, poller)
    await connection.establish()
    return connection
