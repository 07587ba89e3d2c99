"""The sending half of an HTTP/2 connection: opens, answers, ends and resets streams, and sends their payload.

:class:`Sender` is the base of :class:`hbone.engine.Engine`, which handles the peer's frames. Its state is the
table of open streams, the windows in both directions, and the limits announced by the peer. Methods queue frames
in :attr:`Sender.output` and never wait.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from hbone import frames
from hbone.cost_budget import CostBudget
from hbone.errors import ErrorCode, LocalProtocolError
from hbone.events import Header, Headers
from hbone.frame_costs import IDLE_STREAM_UNITS
from hbone.frames import DATA, END_STREAM, MAX_STREAM_ID, PREFACE
from hbone.hpack_cache import BlockEncoder
from hbone.output import Buffers, Output, OwnBuffers
from hbone.reader import FrameReader
from hbone.settings import Http2Settings, Role
from hbone.stream_state import HALF_CLOSED_LOCAL, HALF_CLOSED_REMOTE, OPEN, SENT, StreamFrame, StreamState
from hbone.windows import ConnectionWindow, StreamWindow

DEFAULT_FRAME: Final = 16_384
"""The initial and the smallest allowed value of SETTINGS_MAX_FRAME_SIZE (RFC 9113, 6.5.2)."""
DRAIN_PING: Final = bytes.fromhex("0b7ba2f08b9bfe54")
"""The payload of the PING that :meth:`Sender.drain` sends."""
DEFAULT_WINDOW: Final = 65_535
"""The initial window of a connection and of each stream, in bytes (RFC 9113, 6.9.2)."""
_DEFAULT_TABLE: Final = 4096  # RFC 9113, 6.5.2
_REMEMBERED_RESETS: Final = 512

_ENCODER: Final = BlockEncoder()  # shared, because it has no state of a connection


def field(name: bytes, value: bytes) -> bytes:
    """Return an encoded header field, for :meth:`Engine.open_tunnel` of any connection.

    Args:
        name: the field's name in lower case.
    """
    return _ENCODER.field((name, value))


def fields(headers: Iterable[Header]) -> bytes:
    """Return encoded header fields in the given order; see :func:`field`."""
    return b"".join([_ENCODER.field(header) for header in headers])


class Stream(StreamWindow):
    """An open stream. ``send_window`` is the number of bytes that the peer still accepts. A ``tunnel`` can have
    any amount of DATA, but no trailers.
    """

    __slots__ = ("answered", "blocked", "cost", "send_window", "state", "tunnel")

    def __init__(self, state: StreamState, send_window: int, receive_window: int, now_s: float) -> None:
        super().__init__(receive_window, now_s)
        self.state = state
        self.send_window = send_window
        self.answered = False
        self.tunnel = True
        self.blocked = False
        self.cost = 0  # the units of work that a 200 refunds


class Sender:
    """The sending half of one connection; see :class:`hbone.engine.Engine`."""

    def __init__(self, role: Role, settings: Http2Settings, buffers: Buffers | None = None) -> None:
        self.role = role
        self.settings = settings
        self.output = Output(buffers if buffers is not None else OwnBuffers())
        self.failed = False
        """Whether the connection has failed. It accepts no more input. The caller sends the output and closes."""
        self.going_away = False
        """Whether the peer sent GOAWAY."""
        self.draining = False
        """Whether we announced or sent GOAWAY, so that no new streams are opened."""
        self.drain_seen = False
        """Whether the peer has acknowledged the PING of :meth:`drain`. It can still open streams."""
        self.peer_max_frame_bytes = DEFAULT_FRAME
        self.peer_max_streams: int | None = None
        """The peer's SETTINGS_MAX_CONCURRENT_STREAMS. None: the peer has sent no limit."""
        self.peer_early_bytes = 0
        """How many bytes of early data per stream the server buffers until its answer. 0: none announced. For
        clients.
        """
        self.peer_settings_seen = False
        self._server = role is Role.SERVER
        self._streams: dict[int, Stream] = {}
        self._next_id = 1
        self._last_peer_id = 0
        self._goaway_limit: int | None = None
        self._reset_here: dict[int, None] = {}
        self._encoder_table_bytes = _DEFAULT_TABLE
        self._block_prefix = b""
        self._peer_initial_window = DEFAULT_WINDOW
        self._send_window = DEFAULT_WINDOW
        self._send_blocked = False
        self._window = ConnectionWindow(settings)
        self._earned = 0
        self._costs = CostBudget(settings.limits)
        self._reader = FrameReader(settings, expect_preface=self._server)
        self._data_stream: Stream | None = None  # the stream of the DATA frame that is being received
        self._now = 0.0

    # Streams

    @property
    def opening(self) -> bytes:
        """The first bytes of the connection: the preface of a client, SETTINGS, WINDOW_UPDATE."""
        opening = b"" if self._server else PREFACE
        opening += frames.settings_frame(self.settings.wire(self.role))
        raise_by = self.settings.first_connection_window_bytes - DEFAULT_WINDOW
        if raise_by:
            # The connection's window needs a WINDOW_UPDATE: SETTINGS_INITIAL_WINDOW_SIZE changes only stream
            # windows (RFC 9113, 6.9.2).
            opening += frames.frame(frames.WINDOW_UPDATE, 0, 0, frames.U32.pack(raise_by))
        return opening

    def start(self) -> None:
        """Queue :attr:`opening`."""
        self.output.append(self.opening)

    @property
    def goaway_sent(self) -> bool:
        """Whether the final GOAWAY was sent. Always true for a client, which can close without a GOAWAY."""
        return not self._server or self._goaway_limit is not None

    @property
    def open_streams(self) -> int:
        """The number of streams that are not closed."""
        return len(self._streams)

    @property
    def unused(self) -> bool:
        """Whether this client has never opened a stream."""
        return self._next_id == 1

    @property
    def exhausted(self) -> bool:
        """Whether this client has no stream identifier left."""
        return self._next_id > MAX_STREAM_ID

    @property
    def accepts_streams(self) -> bool:
        """Whether this client can call :meth:`open_stream` now."""
        return (
            not (self.failed or self.going_away or self.draining)
            and self._next_id <= MAX_STREAM_ID
            and (self.peer_max_streams is None or len(self._streams) < self.peer_max_streams)
        )

    def open_stream(self, headers: Iterable[Header], *, ended: bool = False, tunnel: bool = True) -> int:
        """Send a request, as a client. ``headers`` begin with the pseudo-header fields. A CONNECT opens a
        ``tunnel``.

        Raises:
            LocalProtocolError: no stream can be opened now, see :attr:`accepts_streams`.
        """
        if self._server or not self.accepts_streams:
            raise LocalProtocolError("no stream may be opened on this connection")
        return self._open(_ENCODER.encode(headers), ended=ended, tunnel=tunnel)

    def open_tunnel(self, block: bytes) -> int:
        """Send a CONNECT, as a client, like :meth:`open_stream`, but with a header block made by :func:`field` and
        :func:`fields`.

        Raises:
            LocalProtocolError: no stream can be opened now, see :attr:`accepts_streams`.
        """
        if self._server or not self.accepts_streams:
            raise LocalProtocolError("no stream may be opened on this connection")
        return self._open(block, ended=False, tunnel=True)

    def _open(self, block: bytes, *, ended: bool, tunnel: bool) -> int:
        stream_id = self._next_id
        self._next_id += 2
        state = SENT[StreamState.IDLE][StreamFrame.HEADERS_END if ended else StreamFrame.HEADERS]
        stream = Stream(state, self._peer_initial_window, self._window.initial, self._now)
        stream.tunnel = tunnel
        self._streams[stream_id] = stream
        self._window.opened(len(self._streams))
        self._send_block(stream_id, block, ended=ended)
        return stream_id

    def respond(
        self,
        stream_id: int,
        status: int,
        headers: Iterable[Header] = (),
        *,
        body: bytes = b"",
        ended: bool = False,
        reset_code: int | None = None,
    ) -> None:
        """Answer a request, as a server.

        ``ended`` without a body puts END_STREAM on the HEADERS. ``body`` (within the windows: a few hundred bytes)
        is one DATA frame that ends the stream. ``reset_code`` then resets a stream whose request side is still
        open. Without any of these arguments, the stream becomes a tunnel.

        Raises:
            LocalProtocolError: the stream is closed or already answered.
        """
        stream = self._known(stream_id)
        if not self._server or stream.answered or StreamFrame.HEADERS not in SENT[stream.state]:
            raise LocalProtocolError(f"stream {stream_id} cannot be answered")
        stream.answered = True
        if status == 200:
            self._costs.refund(stream.cost)
        ends = ended and not body
        self._send_headers(stream_id, ((b":status", b"%d" % status), *headers), ended=ends)
        if body:
            size = min(len(body), stream.send_window, self._send_window, self.peer_max_frame_bytes)
            if size == len(body):
                stream.send_window -= size
                self._send_window -= size
                self.output.append(frames.frame(DATA, END_STREAM, stream_id, body))
            else:  # there is no room; omit the body, which only explains the status
                self.output.append(frames.frame(DATA, END_STREAM, stream_id))
        if ended or body:
            self._local_ended(stream_id, stream)
        if reset_code is not None and stream_id in self._streams:
            self.reset_stream(stream_id, reset_code)

    def reset_stream(self, stream_id: int, code: int) -> None:
        """Send RST_STREAM. Idempotent, and without effect on a closed stream."""
        stream = self._streams.pop(stream_id, None)
        if stream is not None:
            # If a DATA frame of this stream has arrived only in part, its rest is dropped and its credit returned,
            # as for later frames.
            if stream is self._data_stream:
                self._data_stream = None
            self._window.closed(stream, len(self._streams))
            self._send_reset(stream_id, code)

    def end_stream(self, stream_id: int, trailers: Headers = ()) -> None:
        """Send END_STREAM on an empty DATA frame, or on ``trailers``. The other direction stays open.

        Raises:
            LocalProtocolError: the stream is closed, or was ended before.
        """
        stream = self._known(stream_id)
        if StreamFrame.DATA_END not in SENT[stream.state]:
            raise LocalProtocolError(f"stream {stream_id} has been ended")
        if trailers:
            self._send_headers(stream_id, trailers, ended=True)
        else:
            self.output.append(frames.frame(DATA, END_STREAM, stream_id))
        self._local_ended(stream_id, stream)

    def ping(self, payload: bytes) -> None:
        """Send a PING with 8 bytes of ``payload``. :class:`PingAcknowledged` reports the answer."""
        self.output.append(frames.frame(frames.PING, 0, 0, payload))

    def drain(self) -> None:
        """Announce the drain, as a server, with a GOAWAY for the highest stream identifier and a PING (RFC 9113,
        6.8). Idempotent.

        Requests that cross this GOAWAY are still accepted. The PONG shows that the peer has seen it
        (:attr:`drain_seen`). The caller sends the final GOAWAY later, by :meth:`goaway`.
        """
        if not self.draining and not self.failed:
            self.draining = True
            self.output.append(
                frames.frame(frames.GOAWAY, 0, 0, frames.TWO_U32.pack(MAX_STREAM_ID, ErrorCode.NO_ERROR))
                + frames.frame(frames.PING, 0, 0, DRAIN_PING)
            )

    def goaway(self, code: int = ErrorCode.NO_ERROR) -> None:
        """Send the final GOAWAY, with the identifier of the peer's last accepted stream. Later streams get no
        answer.
        """
        self.draining = True
        if self._goaway_limit is None or code != ErrorCode.NO_ERROR:
            self._goaway_limit = self._last_peer_id
            self.output.append(frames.frame(frames.GOAWAY, 0, 0, frames.TWO_U32.pack(self._last_peer_id, code)))

    # Payload

    def reserve(self, stream_id: int, limit: int) -> memoryview | None:
        """Return room in the output for up to ``limit`` bytes of the stream's payload.

        If there is no room, return None. There can be room after a :class:`WindowOpened` of this stream or of
        stream 0 or, if ``output.full``, once the output was sent. No other method can be called between this and
        :meth:`commit`. A reservation without commit has no effect.

        Raises:
            LocalProtocolError: the stream is closed, or we have ended it.
        """
        allowed = self._allowed(stream_id, limit)
        if allowed == 0:
            return None
        return self.output.reserve(allowed if allowed < self.peer_max_frame_bytes else self.peer_max_frame_bytes)

    def reserve_many(self, stream_id: int, limit: int) -> list[memoryview] | None:
        """Like :meth:`reserve`, but with one view per frame, so that one read can fill several frames.

        Used for peers with small frames, because a single view would need one system call per 16 KiB.
        """
        allowed = self._allowed(stream_id, limit)
        return self.output.reserve_many(allowed, self.peer_max_frame_bytes) if allowed else None

    def commit(self, stream_id: int, size: int) -> None:
        """Send the first ``size`` bytes (at least 1) of the reserved room, which the caller has filled."""
        stream = self._streams[stream_id]
        stream.send_window -= size
        self._send_window -= size
        self._earned += size
        self.output.commit(stream_id, size, self.peer_max_frame_bytes)

    def send_data(self, stream_id: int, data: bytes | memoryview) -> int:
        """Copy ``data`` into the output, as far as windows and room permit. Return the number of copied bytes."""
        sent = 0
        while sent < len(data):
            room = self.reserve(stream_id, len(data) - sent)
            if room is None:
                break
            size = len(room)
            room[:] = data[sent : sent + size]
            self.commit(stream_id, size)
            sent += size
        return sent

    def acknowledge(self, stream_id: int, size: int) -> None:
        """Return the credit of ``size`` received bytes of the stream, which were delivered or dropped.

        Also called for closed streams, because their bytes count against the connection's window. Without this
        call the window would shrink with every aborted stream.
        """
        window = self._window
        window.unacknowledged += size
        if window.unacknowledged >= window.credit:
            self._renew_connection()
        stream = self._streams.get(stream_id)
        # A peer that has ended the stream does not need more credit on this stream. The connection's credit was
        # already returned.
        if stream is not None and (stream.state is OPEN or stream.state is HALF_CLOSED_LOCAL):
            stream.unacknowledged += size
            if stream.unacknowledged >= stream.step:
                credit = window.renew(stream, self._now, len(self._streams))
                if credit > 0:
                    self._grant(stream_id, credit)
                if window.unacknowledged >= window.credit:
                    self._renew_connection()

    def _renew_connection(self) -> None:
        """Return the connection's credit by a WINDOW_UPDATE. Called when the credit due is at least as large as
        the peer's remaining window.

        It is not compared with the whole window, because slow streams can pin most of that window, and other
        streams must still be able to use the small rest. So the comparison is also made when bytes arrive.
        """
        window = self._window
        if window.unacknowledged > 0:
            self._grant(0, window.unacknowledged)
            window.credit += window.unacknowledged
            window.unacknowledged = 0

    # Methods that the receiving half uses, too

    def _known(self, stream_id: int) -> Stream:
        stream = self._streams.get(stream_id)
        if stream is None:
            raise LocalProtocolError(f"stream {stream_id} is not open")
        return stream

    def _allowed(self, stream_id: int, limit: int) -> int:
        stream = self._streams.get(stream_id)
        # The states that the table SENT allows are written out here, because this code runs for each chunk.
        if stream is None or (stream.state is not OPEN and stream.state is not HALF_CLOSED_REMOTE):
            raise LocalProtocolError(f"stream {stream_id} cannot send")
        # Remember which window is exhausted (the stream's or the connection's), so that its WINDOW_UPDATE is
        # reported by WindowOpened. Only senders that have requested room are notified, so idle streams cause no
        # work.
        allowed = stream.send_window
        if allowed <= 0:
            stream.blocked = True
            return 0
        if self._send_window < allowed:
            allowed = self._send_window
            if allowed <= 0:
                self._send_blocked = True
                return 0
        return limit if limit < allowed else allowed

    def _send_headers(self, stream_id: int, headers: Iterable[Header], *, ended: bool) -> None:
        self._send_block(stream_id, _ENCODER.encode(headers), ended=ended)

    def _send_block(self, stream_id: int, block: bytes, *, ended: bool) -> None:
        # The prefix (a table size update) is only for this connection, while header blocks are shared by all
        # connections.
        if self._block_prefix:
            block, self._block_prefix = self._block_prefix + block, b""
        self.output.append(
            frames.header_frames(stream_id, block, ended=ended, max_frame_bytes=self.peer_max_frame_bytes)
        )

    def _grant(self, stream_id: int, size: int) -> None:
        self.output.append(frames.frame(frames.WINDOW_UPDATE, 0, stream_id, frames.U32.pack(size)))

    def _send_reset(self, stream_id: int, code: int) -> None:
        self.output.append(frames.frame(frames.RST_STREAM, 0, stream_id, frames.U32.pack(code)))
        self._reset_here[stream_id] = None
        if len(self._reset_here) > _REMEMBERED_RESETS:
            del self._reset_here[next(iter(self._reset_here))]

    def _local_ended(self, stream_id: int, stream: Stream) -> None:
        stream.state = SENT[stream.state][StreamFrame.DATA_END]
        if stream.state is StreamState.CLOSED:
            self._forget(stream_id, stream)

    def _forget(self, stream_id: int, stream: Stream) -> None:
        """Remove a stream that both sides have ended or the peer has reset."""
        del self._streams[stream_id]
        self._window.closed(stream, len(self._streams))
        if self._server and stream.tunnel and stream.answered and not stream.used:
            self._reader.work += IDLE_STREAM_UNITS
