"""One CONNECT stream of a connection, as one end of a relay."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from hbone.aio.end import CHUNK_BYTES, End
from hbone.errors import ErrorCode, TunnelBroken, TunnelClosed
from hbone.events import Headers
from hbone.settings import Role

if TYPE_CHECKING:
    from hbone.aio.connection import Connection
    from hbone.aio.socket import PlainSocket

_CLEAN_CODES = (ErrorCode.NO_ERROR, ErrorCode.CANCEL)
_SMALL_FRAME = 64 * 1024


class Tunnel(End):
    """A stream after its 200; both roles.

    What the peer sends before the relay starts is held: of a server all that its window allows, of a client, which
    has no answer yet, at most ``early_bytes`` of the connection's HTTP/2 settings; more resets the stream.
    """

    __slots__ = (
        "_cut",
        "_early",
        "_early_bytes",
        "_eof",
        "_local_ended",
        "_owed",
        "_pending",
        "_remote_ended",
        "_started",
        "connection",
        "early_sent",
        "error",
        "headers",
        "on_close",
        "reset_seen",
        "stream_id",
    )

    def __init__(self, connection: Connection, stream_id: int) -> None:
        self.connection = connection
        self.poller = connection.poller
        self.stream_id = stream_id
        self.peer = None
        self.relay = None
        self.read_bytes = 0
        self.headers: Headers = ()
        """Client: the response's header fields."""
        self.on_close: Callable[[], None] | None = None
        """Called once, when the owner has closed the tunnel."""
        self.reset_seen = False
        """The stream is gone, by the peer or with the connection."""
        self.early_sent: tuple[PlainSocket, int] | None = None
        """Client: whose bytes went along with the request, and how many."""
        self.error: Exception | None = None
        """Why, when that was no ordinary end."""
        self._early: list[bytes] = []
        self._early_bytes = 0
        self._owed = 0  # bytes given to the peer whose credit the connection has not got back
        self._pending = bytearray()
        self._eof = False
        self._cut = False
        self._local_ended = False
        self._remote_ended = False
        self._started = False

    # From the connection

    def on_data(self, chunks: list[memoryview], size: int) -> None:
        """Payload; the connection flushes the peer when the read is processed."""
        peer = self.peer
        if peer is not None and self._started:
            self.read_bytes += size
            self._owed += size
            peer.write(chunks, size)
            self.connection.flush_after_read(self)
        elif self._early_bytes + size > self._most_early:
            self.connection.acknowledge(self.stream_id, size + self._early_bytes)
            self._early.clear()
            self._early_bytes = 0
            self.connection.reset(self, ErrorCode.ENHANCE_YOUR_CALM)
            self.on_reset(TunnelBroken("too much data before the answer", code=ErrorCode.ENHANCE_YOUR_CALM))
        else:
            self._early += map(bytes, chunks)
            self._early_bytes += size

    def on_end(self) -> None:
        """END_STREAM of the peer."""
        self._remote_ended = True
        relay, peer = self.relay, self.peer
        if self._started and relay is not None and peer is not None:
            peer.flush()
            relay.read_ended(self, None, clean=True)
            peer.write_eof()

    def on_reset(self, error: TunnelBroken) -> None:
        """RST_STREAM, or the end of the connection."""
        if self.reset_seen:
            return
        self.reset_seen = True
        ended = self._remote_ended
        self._remote_ended = True
        clean = error.code in _CLEAN_CODES
        if not clean:
            self.error = error
        relay, peer = self.relay, self.peer
        dropped, self._pending = len(self._pending), bytearray()
        if not self._started or relay is None or peer is None:
            return
        if not ended:
            peer.flush()
            relay.read_ended(self, error, clean=clean)
        relay.sink_broken(self, error)
        if dropped:
            peer.delivered(dropped)
        if not ended and not clean:
            peer.write_reset()
            return
        if not ended:
            peer.write_eof()
        # What the application still writes is swallowed until it ends (see End).
        peer = self.peer
        if peer is not None:
            # A client that gave up is told nothing more; a server's last words may still be on their way through
            # our application's socket, which closing under its unread bytes would reset.
            if self._eof or self.connection.role is Role.SERVER:
                relay.write_ended(self)
            else:
                peer.resume()

    def end_discarding(self) -> None:
        """The connection is gone: the relay ends as soon as the peer has got what was received."""
        if self.reset_seen and self.relay is not None:
            self.relay.write_ended(self)

    @property
    def _most_early(self) -> int:
        http2 = self.connection.settings.http2
        return http2.early_bytes if self.connection.role is Role.SERVER else http2.stream_window_bytes

    # As a source

    def start(self) -> None:
        """See :class:`End`."""
        peer, relay = self.peer, self.relay
        assert peer is not None
        assert relay is not None
        self._started = True
        if self._early:
            chunks, self._early = [memoryview(chunk) for chunk in self._early], []
            self.read_bytes += self._early_bytes
            self._owed += self._early_bytes
            peer.write(chunks, self._early_bytes)
            self._early_bytes = 0
            peer.flush()
        if self.reset_seen:
            relay.sink_broken(self, self.error or TunnelClosed("stream was reset"))
        if self._remote_ended:
            relay.read_ended(self, self.error, clean=self.error is None)
            if self.error is None:
                peer.write_eof()
            else:
                peer.write_reset()

    def resume(self) -> None:
        """Nothing: what arrives is pushed, and bounded by the window."""

    def delivered(self, size: int) -> None:
        """See :class:`End`; returns the credit."""
        self._owed -= size
        self.connection.acknowledge(self.stream_id, size)

    # As a sink

    def reserve(self, limit: int) -> memoryview | None:
        """See :class:`End`."""
        if self.reset_seen:
            return self.connection.poller.plaintext[:CHUNK_BYTES]  # swallowed by commit
        if self._pending:
            return None
        return self.connection.reserve(self, limit)

    @property
    def scatters(self) -> bool:
        """The peer takes small frames only: fill several with one system call."""
        return self.connection.engine.peer_max_frame_bytes < _SMALL_FRAME and not self.reset_seen

    def reserve_many(self, limit: int) -> list[memoryview] | None:
        """See :class:`End`."""
        return None if self._pending else self.connection.reserve_many(self, limit)

    def commit(self, size: int) -> None:
        """See :class:`End`."""
        if not self.reset_seen:
            connection = self.connection
            connection.engine.commit(self.stream_id, size)
            if not connection.dirty:
                connection.poller.schedule_flush(connection)

    def write(self, chunks: list[memoryview], size: int) -> None:
        """See :class:`End`; copies into the output buffer, or when that is full into a queue."""
        if self.reset_seen:
            peer = self.peer
            if peer is not None:
                peer.delivered(size)
            return
        sent = 0
        for chunk in chunks:
            taken = 0 if self._pending else self._copy(chunk)
            sent += taken
            if taken < len(chunk):
                self._pending += chunk[taken:]
        peer = self.peer
        if sent and peer is not None:
            peer.delivered(sent)

    def flush(self) -> None:
        """See :class:`End`; the connection flushes at the end of the turn."""

    def write_eof(self) -> None:
        """See :class:`End`."""
        self._eof = True
        if not self._pending:
            self._end_stream()

    def write_reset(self) -> None:
        """See :class:`End`."""
        self._cut = True
        self.write_eof()

    def on_room(self) -> None:
        """The connection has room again, perhaps."""
        while self._pending:
            sent = self._copy(memoryview(bytes(self._pending[:CHUNK_BYTES])))
            if not sent:
                return
            del self._pending[:sent]
            if self.peer is not None:
                self.peer.delivered(sent)
        if self._eof:
            self._end_stream()
        elif self.peer is not None:
            self.peer.resume()

    def _copy(self, chunk: memoryview) -> int:
        sent = 0
        while sent < len(chunk):
            room = self.connection.reserve(self, len(chunk) - sent)
            if room is None:
                break
            size = len(room)
            room[:] = chunk[sent : sent + size]
            self.commit(size)
            sent += size
        return sent

    def _end_stream(self) -> None:
        if not self._local_ended:
            self._local_ended = True
            if self._cut and not self.reset_seen:
                self.reset_seen = True
                self.connection.reset(self, ErrorCode.CONNECT_ERROR)
            elif not self.reset_seen:
                self.connection.end_stream(self)
            if self.relay is not None:
                if self._cut:
                    self.relay.cut()
                else:
                    self.relay.write_ended(self)

    def close(self, error: Exception | None = None) -> None:
        """Let go of the stream: RST_STREAM unless both sides ended it (codes as Rust ztunnel)."""
        early, self._early_bytes = self._early_bytes, 0
        self._early.clear()
        # What the peer still held when the relay ended is lost; its credit must not be, or a connection would
        # stand still after so many tunnels cut off.
        lost, self._owed = early + self._owed, 0
        if lost:
            self.connection.acknowledge(self.stream_id, lost)
        if not self.reset_seen:
            self.reset_seen = True
            if self.relay is not None:
                self.relay.fail(self, error or TunnelClosed("tunnel closed during a relay"))
            finished = self._local_ended and self._remote_ended
            if not finished:
                served = self.connection.role is Role.SERVER and self._local_ended
                code = ErrorCode.NO_ERROR if served else ErrorCode.CANCEL
                self.connection.reset(self, ErrorCode.CONNECT_ERROR if self._cut else code)
        self.connection.release(self)
        if self.on_close is not None:
            closed, self.on_close = self.on_close, None
            closed()
