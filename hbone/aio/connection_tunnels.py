"""The sending half of a connection: opens its tunnels, and sends their payload.

:class:`ConnectionTunnels` is the base of :class:`hbone.aio.connection.Connection`, which reads from the network.
A tunnel writes into the engine's output. All output of a loop iteration is sent in one TLS write
(:meth:`ConnectionTunnels.flush`). Then tunnels that ran out of room continue: the first to run out continues
first.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Coroutine, Iterable

from hbone.aio import waits
from hbone.aio.answers import OnAnswer, PendingAnswers
from hbone.aio.connection_settings import ConnectionSettings
from hbone.aio.fiber import OneShotFuture
from hbone.aio.link import Link
from hbone.aio.poller import Poller
from hbone.aio.tunnel import EarlySource, Tunnel, TunnelCarrier
from hbone.engine import Engine
from hbone.errors import ConnectionBroken, TlsError
from hbone.events import Header
from hbone.settings import Role


class ConnectionTunnels(TunnelCarrier):
    """Opens the tunnels of a connection and sends their payload."""

    __slots__ = (
        "_answers",
        "_closing",
        "_established",
        "_flushing",
        "_room",
        "_to_flush",
        "_tunnels",
        "_unsent_from",
        "_waiting",
        "link",
        "settings",
        "write_error",
    )

    def __init__(
        self, role: Role, settings: ConnectionSettings, poller: Poller, engine: Engine, link: Link
    ) -> None:
        self.role = role
        self.settings = settings
        self.poller = poller
        self.engine = engine
        self.link = link
        self.facts = None
        self.handshake_s = 0.0
        self.error = None
        name = link.sock.getsockname()  # two elements for IPv4, four for IPv6, a path for a Unix socket pair
        self.local_name = (name[0], name[1]) if isinstance(name, tuple) else ("", 0)
        self.dirty = False
        self.write_error: Exception | None = None
        """Why the network accepts no more bytes. The connection ends with this error once the bytes that have
        already arrived are read.
        """
        self._tunnels: dict[int, Tunnel] = {}
        self._answers = PendingAnswers(poller)
        self._waiting: dict[int, Tunnel] = {}
        self._to_flush: list[Tunnel] = []
        self._unsent_from = 0  # client: the first stream whose CONNECT was not passed to the network; 0: none
        self._room = False
        self._flushing = False
        self._closing = False
        self._established: OneShotFuture[None] = OneShotFuture(poller)

    @abstractmethod
    def _end(self, error: Exception) -> None:
        """End the connection. Idempotent."""

    @abstractmethod
    def _write_failed(self, error: OSError | TlsError) -> None:
        """End the connection: at once, or if the peer has closed it, after the bytes that have already arrived.
        Idempotent.
        """

    @abstractmethod
    def _changed(self) -> None:
        """Call the owner's callback for changes, and close the connection if it is drained."""

    # Output

    def flush(self) -> None:
        """Send all queued output as one TLS write, then resume the tunnels that waited for room."""
        self.dirty = False
        if self.error is not None or self._flushing:
            return
        self._flushing = True
        try:
            self._write()
            if self._room and self._waiting and not self.link.blocked:
                self._room = False
                # The tunnel that ran out of room first continues first. If a tunnel runs out again, it goes to the
                # end of the queue. So all tunnels share a small window fairly.
                waiting, self._waiting = self._waiting, {}
                for tunnel in waiting.values():
                    if self.link.unsent_bytes:
                        self._waiting.setdefault(tunnel.stream_id, tunnel)
                    else:
                        tunnel.on_room()
                self._write()
        finally:
            self._flushing = False

    def _write(self) -> None:
        if self.write_error is not None or not self._established.done():
            return
        output = self.engine.output
        if output.borrows and not self.link.blocked and self.error is None:
            views = output.views()
            try:
                self.link.send(views)
            except (OSError, TlsError) as error:
                if len(views) > 1:
                    self._unsent_from = 0  # the first unsent CONNECT can now have been sent
                self._write_failed(error)
                return
            output.taken()
            self._unsent_from = 0

    def _unblock(self) -> None:
        try:
            if self.link.retry():
                self._room = True
                self.flush()
        except OSError as error:
            self._write_failed(error)

    # For tunnels

    @property
    def early_limit(self) -> int:
        """How many bytes are buffered for a stream before its relay starts, at most. A server buffers few, because
        it has not accepted the stream yet.
        """
        http2 = self.settings.http2
        return http2.early_bytes if self.role is Role.SERVER else http2.stream_window_bytes

    def reserve(self, tunnel: Tunnel, limit: int) -> memoryview | None:
        if not self.link.blocked:
            if not self.dirty:
                # The flush is needed even if the following read returns no bytes, because it releases the borrowed
                # buffer.
                self.poller.schedule_flush(self)
            room = self.engine.reserve(tunnel.stream_id, limit)
            if room is None and self._made_room():
                room = self.engine.reserve(tunnel.stream_id, limit)
            if room is not None:
                return room
        self._waiting[tunnel.stream_id] = tunnel
        return None

    def reserve_many(self, tunnel: Tunnel, limit: int) -> list[memoryview] | None:
        if not self.link.blocked:
            if not self.dirty:
                self.poller.schedule_flush(self)
            rooms = self.engine.reserve_many(tunnel.stream_id, limit)
            if rooms is None and self._made_room():
                rooms = self.engine.reserve_many(tunnel.stream_id, limit)
            if rooms is not None:
                return rooms
        self._waiting[tunnel.stream_id] = tunnel
        return None

    def _made_room(self) -> bool:
        """Send the output at once if its buffer is full, before the end of the iteration. Return whether there is
        room then.
        """
        if not self.engine.output.full:
            return False
        self._write()
        return self.error is None and not self.link.blocked

    def flush_after_read(self, tunnel: Tunnel) -> None:
        self._to_flush.append(tunnel)

    def acknowledge(self, stream_id: int, size: int) -> None:
        if self.error is None:
            self.engine.acknowledge(stream_id, size)
            if self.engine.output and not self.dirty:
                self.poller.schedule_flush(self)

    def end_stream(self, tunnel: Tunnel) -> None:
        if self.error is None:
            self.engine.end_stream(tunnel.stream_id)
            self.poller.schedule_flush(self)

    def reset(self, tunnel: Tunnel, code: int) -> None:
        if self.error is None:
            self.engine.reset_stream(tunnel.stream_id, code)
            self.poller.schedule_flush(self)

    def release(self, tunnel: Tunnel) -> None:
        self._tunnels.pop(tunnel.stream_id, None)
        self._waiting.pop(tunnel.stream_id, None)
        if self._answers.expects(tunnel.stream_id):
            self._answers.broken(tunnel.stream_id, ConnectionBroken("connection closed"))
        if self._closing or self.error is not None or self.engine.exhausted:
            self._changed()

    # Requests

    @property
    def open_streams(self) -> int:
        """The number of tunnels that still have an owner or a stream."""
        return max(len(self._tunnels), self.engine.open_streams)

    @property
    def accepts_streams(self) -> bool:
        """Whether :meth:`open` can open a stream now. For clients."""
        usable = self.error is None and self.write_error is None
        return usable and not self._closing and self.engine.accepts_streams

    def open(
        self, headers: Iterable[Header], client: EarlySource | None = None
    ) -> Coroutine[object, object, Tunnel]:
        """Send a CONNECT and wait for its 200. For clients.

        Args:
            headers: the request's headers.
            client: the source of early data. Its first bytes are sent with the request if the peer has announced
                that it buffers them until it answers (Setting.EARLY_BYTES). This saves one round trip. The bytes
                are consumed when the 200 arrives. Without a 200 they stay for another attempt.

        Raises:
            ConnectRefused: the peer answered with another status than 200.
            TunnelBroken: the stream or the connection ended before the answer. ``unprocessed`` is also set if no
                stream could be opened (see :attr:`accepts_streams`), or if the connection had ended before the
                CONNECT was sent, except for the first stream of a connection.
            TlsError: the peer refused our certificate. With TLS 1.3, this error arrives after the handshake.
        """
        if not self.accepts_streams:
            if isinstance(self.error, TlsError):
                raise self.error
            if self.error is not None and self.engine.unused:
                # This looks like a server that refuses us after the handshake. It would refuse a retry, too, so
                # ``unprocessed`` is not set.
                raise ConnectionBroken(f"connection ended: {self.error}")
            raise ConnectionBroken("connection takes no new streams", unprocessed=True)
        tunnel = self._requested(self.engine.open_stream(headers), client)
        return waits.answer(tunnel, self._answers.expect(tunnel))

    def open_now(self, block: bytes, client: EarlySource | None, on_answer: OnAnswer) -> Tunnel:
        """Open a tunnel like :meth:`open`, but without a coroutine. The caller closes the tunnel, with or without
        an answer. For clients.

        Args:
            block: the CONNECT, an argument of :meth:`hbone.engine.Engine.open_tunnel`.
            client: see :meth:`open`.
            on_answer: gets the errors that :meth:`open` raises. It is not called for a tunnel that was closed
                before.

        Raises:
            LocalProtocolError: no stream can be opened, see :attr:`accepts_streams`.
        """
        tunnel = self._requested(self.engine.open_tunnel(block), client)
        self._answers.tell(tunnel, on_answer)
        return tunnel

    def _requested(self, stream_id: int, client: EarlySource | None) -> Tunnel:
        tunnel = self._tunnels[stream_id] = Tunnel(self, stream_id)
        if not self._unsent_from:
            self._unsent_from = stream_id
        if client is not None and self.engine.peer_early_bytes:
            self._send_early(tunnel, client)
        self.poller.schedule_flush(self)
        if self.engine.exhausted:
            self._changed()  # the pool must not assign further tunnels to this connection
        return tunnel

    def _send_early(self, tunnel: Tunnel, client: EarlySource) -> None:
        room = self.engine.reserve(tunnel.stream_id, self.engine.peer_early_bytes)
        if room is not None and (size := client.peek_into(room)):
            self.engine.commit(tunnel.stream_id, size)
            tunnel.early_sent = (client, size)
