"""Makes one CONNECT stream of a connection an end of a relay."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Protocol

from hbone.aio.end import CHUNK_BYTES, End
from hbone.aio.poller import Poller
from hbone.end_state import SINK_BROKEN, SINK_OPEN, EndEvent, SinkState, SourceState
from hbone.engine import Engine
from hbone.errors import ErrorCode, TunnelBroken, TunnelClosed
from hbone.events import Headers
from hbone.settings import Role
from hbone.tls import PeerFacts

_CLEAN_CODES = (ErrorCode.NO_ERROR, ErrorCode.CANCEL)
_SMALL_FRAME = 64 * 1024


class EarlySource(Protocol):
    """The source of early data: the first bytes, which a client sends along with its CONNECT. Another attempt can
    read them again.
    """

    def peek_into(self, room: memoryview) -> int:
        """Copy the received bytes into ``room`` without consuming them, and return their number."""

    def discard(self, size: int) -> None:
        """Consume ``size`` bytes that :meth:`peek_into` has shown."""


class TunnelCarrier(ABC):
    """The connection that carries a tunnel. It is a base class and not a Protocol for faster compiled calls."""

    __slots__ = ("dirty", "engine", "error", "facts", "handshake_s", "local_name", "poller", "role")

    engine: Engine
    poller: Poller
    role: Role
    dirty: bool
    error: Exception | None
    """The reason why the connection ended; None while it is open."""
    facts: PeerFacts | None
    """The peer facts proven by TLS. None without TLS, and before the end of the handshake."""
    handshake_s: float
    """The duration of the TLS handshake, set and reset by the owner. Initially 0."""
    local_name: tuple[str, int]
    """The address and port of our end of the connection, or ("", 0) for a socket pair. Read once
    for all tunnels.
    """

    @abstractmethod
    def flush(self) -> None:
        """Send all queued output; see :class:`hbone.aio.poller.Flushable`."""

    @property
    @abstractmethod
    def early_limit(self) -> int:
        """How many bytes are buffered for a stream before its relay starts, at most."""

    @abstractmethod
    def reserve(self, tunnel: Tunnel, limit: int) -> memoryview | None:
        """Return room for payload of ``tunnel``. If there is no room, return None, and later call
        :meth:`Tunnel.on_room`.
        """

    @abstractmethod
    def reserve_many(self, tunnel: Tunnel, limit: int) -> list[memoryview] | None:
        """Return room like :meth:`reserve`, but with one view per frame."""

    @abstractmethod
    def flush_after_read(self, tunnel: Tunnel) -> None:
        """Call the flush of the tunnel's relay peer after this read, before the read's buffers are used again."""

    @abstractmethod
    def acknowledge(self, stream_id: int, size: int) -> None:
        """Return credit for ``size`` received bytes."""

    @abstractmethod
    def end_stream(self, tunnel: Tunnel) -> None:
        """Send END_STREAM."""

    @abstractmethod
    def reset(self, tunnel: Tunnel, code: int) -> None:
        """Send RST_STREAM, unless the stream is gone."""

    @abstractmethod
    def release(self, tunnel: Tunnel) -> None:
        """Remove the tunnel, because the code that owns it has closed it."""


class Tunnel(End):
    """One CONNECT stream, of a client or of a server.

    Bytes that arrive before the relay starts are buffered: from a server up to a full window, and from a client
    before the answer up to ``early_bytes`` of the connection's HTTP/2 settings. More bytes reset the stream.
    """

    __slots__ = (
        "_early",
        "_early_bytes",
        "_owed",
        "_pending",
        "_started",
        "connection",
        "early_sent",
        "error",
        "headers",
        "on_close",
        "stream_id",
    )

    def __init__(self, connection: TunnelCarrier, stream_id: int) -> None:
        self.connection = connection
        self.poller = connection.poller
        self.stream_id = stream_id
        self.peer = None
        self.relay = None
        self.source = SourceState.OPEN
        self.sink = SinkState.OPEN
        self.read_bytes = 0
        self.headers: Headers = ()
        """The response's header fields. For clients."""
        self.on_close: Callable[[], None] | None = None
        """Called once, when the owner has closed the tunnel."""
        self.early_sent: tuple[EarlySource, int] | None = None
        """The source of the early data that was sent with the request, and the number of bytes. For clients."""
        self.error: Exception | None = None
        """The error that ended the stream; None after an orderly end."""
        self._early: list[bytes] = []
        self._early_bytes = 0
        self._owed = 0  # bytes given to the peer whose credit is not returned to the connection yet
        self._pending = bytearray()
        self._started = False

    @property
    def gone(self) -> bool:
        """Whether the stream accepts no more bytes, because either side has reset it or the
        connection has ended.
        """
        return self.sink is SINK_BROKEN or self.sink is SinkState.RESET_SENT

    # Calls by the connection

    def on_data(self, chunks: list[memoryview], size: int) -> None:
        """Pass received payload to the other end of the relay.

        The connection flushes that end once it has processed the whole read.
        """
        peer = self.peer
        if peer is not None and self._started:
            self.read_bytes += size
            self._owed += size
            peer.write(chunks, size)
            self.connection.flush_after_read(self)
        elif self._early_bytes + size > self.connection.early_limit:
            self.connection.acknowledge(self.stream_id, size + self._early_bytes)
            self._early.clear()
            self._early_bytes = 0
            self.connection.reset(self, ErrorCode.ENHANCE_YOUR_CALM)
            self.on_reset(TunnelBroken("too much data before the answer", code=ErrorCode.ENHANCE_YOUR_CALM))
        else:
            self._early += map(bytes, chunks)
            self._early_bytes += size

    def on_end(self) -> None:
        """Record that the peer sent END_STREAM."""
        if self._started:
            self.advance(EndEvent.READ_EOF)
        elif self.source is SourceState.OPEN:
            self.source = SourceState.ENDED  # start() reports it

    def on_reset(self, error: TunnelBroken) -> None:
        """Record that the peer has reset the stream, or the connection has ended. Idempotent."""
        if self.gone:
            return
        # As in the Rust ztunnel, a stream that ends by NO_ERROR or CANCEL counts as complete: a server has
        # answered in full before the end of the request (RFC 9113, 8.1), or a client's application has closed. So
        # the application gets a FIN. After any other code, it gets a RST.
        clean = error.code in _CLEAN_CODES
        if not clean:
            self.error = error
        if not self._started:
            if self.source is SourceState.OPEN:
                self.source = SourceState.ENDED if clean else SourceState.CUT
            self.sink = SINK_BROKEN  # start() reports both
        elif clean:
            self.advance(EndEvent.READ_EOF, error)
            self.advance(EndEvent.BREAK, error)
        else:
            self.advance(EndEvent.READ_RESET, error, clean=False)

    def end_discarding(self) -> None:
        """Tell the relay, after the connection has ended, that it can end as soon as the received bytes are
        delivered.
        """
        if self.gone and self.relay is not None:
            self.relay.write_ended(self)

    # As a source

    def start(self) -> None:
        """Start the relay: deliver early bytes, and report the stream's earlier events."""
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
        source, gone = self.source, self.gone
        if gone:
            relay.sink_broken(self, self.error or TunnelClosed("stream was reset"))
        if source is not SourceState.OPEN:
            relay.read_ended(self, self.error, clean=self.error is None)
            if source is SourceState.CUT:
                peer.write_reset()
            else:
                peer.write_eof()
        if gone:
            self._both_over()

    def restart(self) -> None:
        self._started = True

    def resume(self) -> None:
        """No-op, because the connection pushes received bytes, limited by the flow-control window."""

    def delivered(self, size: int) -> None:
        """Return the credit of delivered bytes to the peer."""
        self._owed -= size
        self.connection.acknowledge(self.stream_id, size)

    # As a sink

    def reserve(self, limit: int) -> memoryview | None:
        if self.sink is not SINK_OPEN and self.gone:
            return self.poller.plaintext[:CHUNK_BYTES]  # discarded by commit
        if self._pending:
            return None
        return self.connection.reserve(self, limit)

    @property
    def scatters(self) -> bool:
        """Whether the remote side accepts only small frames, so that one read from a socket should fill several
        frames.
        """
        return self.connection.engine.peer_max_frame_bytes < _SMALL_FRAME and self.sink is SINK_OPEN

    def reserve_many(self, limit: int) -> list[memoryview] | None:
        return None if self._pending else self.connection.reserve_many(self, limit)

    def commit(self, size: int) -> None:
        if self.sink is SINK_OPEN or not self.gone:
            connection = self.connection
            connection.engine.commit(self.stream_id, size)
            if not connection.dirty:
                connection.poller.schedule_flush(connection)

    def write(self, chunks: list[memoryview], size: int) -> None:
        """Copy the chunks into the output buffer, or into a queue when the buffer is full."""
        if self.sink is not SINK_OPEN and self.gone:
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
        """No-op, because the connection flushes at the end of the iteration."""

    def write_eof(self) -> None:
        self.advance(EndEvent.WRITE_EOF)
        if not self._pending:
            self.advance(EndEvent.DRAINED)

    def write_reset(self) -> None:
        self.advance(EndEvent.WRITE_RESET)
        if not self._pending:
            self.advance(EndEvent.DRAINED)

    def on_room(self) -> None:
        """Continue to send, because the connection possibly has room again."""
        while self._pending:
            sent = self._copy(memoryview(bytes(self._pending[:CHUNK_BYTES])))
            if not sent:
                return
            del self._pending[:sent]
            if self.peer is not None:
                self.peer.delivered(sent)
        if self.sink is not SINK_OPEN:
            self.advance(EndEvent.DRAINED)
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

    def _drop_pending(self) -> int:
        dropped, self._pending = len(self._pending), bytearray()
        return dropped

    def _send_eof(self) -> None:
        self.connection.end_stream(self)

    def _send_reset(self) -> None:
        self.connection.reset(self, ErrorCode.CONNECT_ERROR)

    def _both_over(self) -> None:
        # The server's last bytes can still be on their way through the kernel to our application. Closing the
        # application's socket with unread bytes would reset it, and these last bytes would be lost. So the client
        # side of a closed stream discards the application's bytes until the application ends, or the relay's
        # linger time is over.
        if self.connection.role is Role.SERVER:
            super()._both_over()

    def close(self, error: Exception | None = None) -> None:
        """Release the stream, with RST_STREAM unless both sides have ended it. The codes are the Rust ztunnel's.
        Idempotent.
        """
        early, self._early_bytes = self._early_bytes, 0
        self._early.clear()
        # Bytes that the relay's other end has not sent by now are lost. Their credit must be returned: otherwise
        # every aborted tunnel would shrink the connection's window, until the connection stalls.
        lost, self._owed = early + self._owed, 0
        if lost:
            self.connection.acknowledge(self.stream_id, lost)
        if not self.gone:
            # Report the failure to the relay before the reset. The relay detaches its ends, so later events do not
            # reach the other end.
            if self.relay is not None:
                self.relay.fail(self, error or TunnelClosed("tunnel closed during a relay"))
            code = self._close_code()
            if code is not None:
                self.connection.reset(self, code)
            self.advance(EndEvent.BREAK)
        self.connection.release(self)
        if self.on_close is not None:
            closed, self.on_close = self.on_close, None
            closed()

    def _close_code(self) -> ErrorCode | None:
        """Return the code of the RST_STREAM that releases the stream, or None if both sides have ended it."""
        if self.sink is SinkState.RESET_PENDING:
            return ErrorCode.CONNECT_ERROR
        if self.sink is not SinkState.EOF_SENT:
            return ErrorCode.CANCEL
        if self.source is not SourceState.OPEN:
            return None
        # A server that has answered in full stops the client with NO_ERROR (RFC 9113, 8.1). A client sends CANCEL.
        return ErrorCode.NO_ERROR if self.connection.role is Role.SERVER else ErrorCode.CANCEL
