"""The state machine of an HTTP/2 connection, for both roles, limited to CONNECT tunnels and gRPC calls (RFC 9113).

The caller passes received bytes to :meth:`Engine.receive_data`, which returns events. Every other method changes
the state and can queue frames. Frames wait in :attr:`Engine.output` and are sent together, once per iteration of
the caller's loop.

The engine makes no objects for DATA frames. Received payload is passed on as views of the received bytes, even
while the frame is incomplete. To send payload, the caller reads from its socket straight into the output buffer
(:meth:`Engine.reserve`), and :meth:`Engine.commit` writes the frame header in front of the payload. These and all
other methods that send are in :mod:`hbone.sender`; this module handles the peer's frames.

Flow control follows delivery. A received byte counts against the windows of its stream and of the connection until
:meth:`Engine.acknowledge` reports that this proxy has sent the byte. A stream's credit is returned when half of
its window was used, and the connection's credit when the credit due exceeds the peer's remaining window. This
takes few frames and never stops a sender. :mod:`hbone.windows` sets the sizes of the windows. A stream without a
reader pins only its own window.

A stream has an entry from its first frame until both sides have ended it or one side has reset it. A table lists
the frames that each state allows (:mod:`hbone.stream_state`). Whatever a peer can repeat is either limited in
number (streams, header bytes, unsent frames) or charged to a budget (:mod:`hbone.flow`). If a peer overdraws its
work budget, its bytes are not read until the budget has recovered (:attr:`Engine.pause_s`). A peer that is paused
for too long, or overdraws another budget, is sent ENHANCE_YOUR_CALM. :mod:`hbone.limits` has the numbers.

The engine does not wait for the peer's SETTINGS: until they arrive, the defaults of RFC 9113, 6.5.2 apply. Push
and priorities are not implemented. Field sections are validated in :mod:`hbone.head`.
"""

from __future__ import annotations

from typing import Final

from hbone import frames
from hbone.cost_budget import UnitPrice
from hbone.errors import ErrorCode
from hbone.events import (
    ConnectionFailed,
    DataReceived,
    Event,
    GoawayReceived,
    Headers,
    PingAcknowledged,
    RequestHead,
    RequestReceived,
    ResponseReceived,
    SettingsReceived,
    StreamEnded,
    StreamReset,
    WindowOpened,
)
from hbone.flow import Budget, PeerQuota, WindowPool
from hbone.frame_costs import (
    DROPPED_DATA_UNITS,
    FIELD_UNITS,
    HEADERS_UNITS,
    IDLE_STREAM_UNITS,
    OCTETS_PER_UNIT,
    RECORD_BYTES,
    REFUND_UNITS,
    REQUEST_UNITS,
)
from hbone.frames import MAX_STREAM_ID, MAX_WINDOW, Setting
from hbone.head import Malformed, ResponseHead, Trailers, parse_request, parse_response
from hbone.hpack_cache import EMPTY_TABLE, LONG_BLOCK_BYTES, BlockDecoder, HeaderBlockError
from hbone.output import Buffers
from hbone.reader import Failure
from hbone.sender import DEFAULT_FRAME, DEFAULT_WINDOW, DRAIN_PING, Sender, Stream
from hbone.settings import Http2Settings, Role
from hbone.stream_state import HALF_CLOSED_LOCAL, OPEN, RECEIVED, Scope, StreamFrame, StreamState, Violation

_EARNED_SHIFT: Final = 10  # one WINDOW_UPDATE of the peer is free for each KiB that we have sent
_NO_LIMIT: Final = 1 << 62

_OVERSIZED: Final = Malformed("header list over the limit")


def _block_units(fields: int, octets: int) -> int:
    """Return the cost of decoding a header block with this many fields and octets, in units of work."""
    return HEADERS_UNITS + fields * FIELD_UNITS + octets // OCTETS_PER_UNIT


class _LongBlock:
    """A long header block that is being decoded in pieces."""

    __slots__ = ("cost", "ended", "stream_id")

    def __init__(self, stream_id: int, ended: bool) -> None:
        self.stream_id = stream_id
        self.ended = ended
        self.cost = 0


def _failure(error: HeaderBlockError) -> Failure:
    return Failure(ErrorCode.ENHANCE_YOUR_CALM if error.oversized else ErrorCode.COMPRESSION_ERROR, str(error))


class Engine(Sender):
    """The state of one HTTP/2 connection. ``buffers`` lends output buffers. Without it, the engine allocates its
    own.
    """

    def __init__(self, role: Role, settings: Http2Settings, buffers: Buffers | None = None) -> None:
        super().__init__(role, settings, buffers)
        self.pause_s = 0.0
        """How long to stop reading from the peer, because it caused more work than its budget allows."""
        limits = settings.limits
        self.slice_units = limits.slice_units
        """The limit of work for :meth:`receive_data`: ``slice_units`` of the limits, divided by the price of a
        unit, so that a slice takes about the same time on any core.
        """
        self._received = RECEIVED[role]
        self._control = Budget(burst=limits.control_burst, rate=limits.control_rate)
        self._resets = Budget(burst=limits.reset_burst, rate=limits.reset_rate)
        self._settings_acked = False
        """Whether the peer has acknowledged our SETTINGS. Until then, a client can use the defaults instead."""
        self._unparsed: memoryview | None = None
        self._slice_units = _NO_LIMIT
        self._long_block: _LongBlock | None = None
        self._requests: BlockDecoder[RequestHead | Trailers | Malformed] = BlockDecoder(
            settings.max_header_list_bytes, parse_request, _OVERSIZED
        )
        self._responses: BlockDecoder[ResponseHead | Trailers | Malformed] = BlockDecoder(
            settings.max_header_list_bytes, parse_response, _OVERSIZED
        )
        self._data_stream_id = 0
        self._data_ended = False
        self._events: list[Event] = []

    # Bytes in

    def receive_data(
        self, data: bytes | bytearray | memoryview, now_s: float = 0.0, slice_units: int = _NO_LIMIT
    ) -> list[Event]:
        """Process received bytes, however the network has split them, and return the events.

        Args:
            data: received bytes. Events hold views of this buffer, valid until the caller changes it.
            now_s: monotonic seconds, for the budgets.
            slice_units: the limit of work for this call. It stops after the frame, or the piece of a long header
                block, that exceeds the limit, and keeps the rest of ``data`` (:attr:`unparsed`). Further calls,
                even without data, process this rest first.

        Returns:
            The events, in order. The last can be :class:`ConnectionFailed`, after which further data is ignored.
        """
        if self.failed:
            return []
        self._now = now_s
        self.pause_s = 0.0
        events: list[Event] = []
        self._events = events
        view = data if type(data) is memoryview else memoryview(data)
        unparsed = self._unparsed
        if unparsed is not None:
            view = memoryview(bytes(unparsed) + bytes(view)) if len(view) else unparsed
            self._unparsed = None
        reader = self._reader
        self._slice_units = slice_units
        try:
            if self._long_block is not None:
                self._continue_block()
            used = reader.feed(view, self, slice_units) if self._long_block is None else 0
            if used < len(view):
                # The rest of ``data`` is copied once, because the caller can reuse the buffer when this returns.
                self._unparsed = view[used:] if unparsed is not None else memoryview(bytes(view[used:]))
                self._fit_slice()  # not needed elsewhere, because the price matters only for more than a slice
            if reader.work:
                self.pause_s = self._costs.charge(reader.work, now_s)
                reader.work = 0
        except Failure as failure:
            self._costs.leave_debt(reader.work, now_s)
            self.goaway(failure.code)
            self.failed = True
            self._unparsed = self._long_block = None
            events.append(ConnectionFailed(failure.code, failure.detail))
        self._events = []
        return events

    @property
    def has_requests(self) -> bool:
        """Whether a server's peer has opened a stream, in this process or before the connection moved."""
        return self._last_peer_id > 0

    @property
    def unparsed(self) -> bool:
        """Whether :meth:`receive_data` has kept bytes that the last slice did not process."""
        return self._unparsed is not None or self._long_block is not None

    def follow_price(self, price: UnitPrice) -> None:
        """Charge work at ``price``, which all connections of the process share. Without this call,
        a unit costs 1.
        """
        self._costs.price = price
        self._fit_slice()

    def _fit_slice(self) -> None:
        self.slice_units = int(self.settings.limits.slice_units / self._costs.price.value)

    def share(self, share: PeerQuota, pod: WindowPool | None = None) -> None:
        """Charge costs and window growth to ``share``, the quota of all the peer's connections.

        Window growth is also charged to ``pod``, if there is one. Called before the first stream, or after the
        move from another process. :meth:`leave_share` undoes this.
        """
        self._costs.shared = share.work
        self._window.join(share, pod)

    def leave_share(self) -> None:
        """Return this connection's window growth to the peer's quota. Idempotent, and without effect if the
        connection has no quota.

        Tunnels that carried no bytes are charged here, too: opening tunnels and then dropping the connection
        causes the same work as resetting the tunnels.
        """
        self._window.leave()
        account = self._costs
        if account.shared is not None and self._server:
            idle = sum(stream.answered and stream.tunnel and not stream.used for stream in self._streams.values())
            account.leave_debt(idle * IDLE_STREAM_UNITS, self._now)
        account.shared = None

    def charge_records(self, overhead: int) -> None:
        """In the next :meth:`receive_data`, also charge for ``overhead`` octets of TLS records without payload."""
        self._reader.work += overhead // RECORD_BYTES

    def overdrawn_s(self, now_s: float) -> float:
        """Return for how many more seconds to stop reading. A 200 that was sent can have shortened the pause."""
        return self._costs.overdrawn_s(now_s)

    # Handling of received frames, called by FrameReader

    def control(self, kind: int, flags: int, stream_id: int, payload: bytes) -> None:
        if kind == frames.WINDOW_UPDATE:
            self._window_update(stream_id, frames.U32.unpack(payload)[0] & MAX_WINDOW)
        elif kind == frames.RST_STREAM:
            self._reset_frame(stream_id, frames.U32.unpack(payload)[0])
        elif kind == frames.SETTINGS:
            self._settings_frame(flags, payload)
        elif kind == frames.PING:
            self._ping_frame(flags, payload)
        elif kind == frames.GOAWAY:
            self._goaway_frame(payload)
        else:
            self._charge()
            if kind == frames.PRIORITY and frames.U32.unpack_from(payload)[0] & MAX_STREAM_ID == stream_id:
                raise Failure(ErrorCode.PROTOCOL_ERROR, "stream depends on itself")

    def full_data(self, stream_id: int, payload: memoryview, size: int, *, ended: bool) -> None:
        """Account for a DATA frame. Nearly all frames are handled here, so the checks are written inline."""
        stream = self._streams.get(stream_id)
        if (
            stream is None
            or (stream.state is not OPEN and stream.state is not HALF_CLOSED_LOCAL)
            or not (stream.answered or self._server)
            or size > stream.credit
            or size > self._window.credit
        ):
            self.data_started(stream_id, size, size, ended=ended)
            self.data_chunk(payload, size)
            self.data_done()
            return
        window = self._window
        window.credit -= size
        if window.credit < window.unacknowledged:
            self._renew_connection()
        stream.credit -= size
        self._deliver(stream_id, payload, size)
        if ended:
            self._remote_ended(stream_id, stream)

    def data_started(self, stream_id: int, length: int, payload: int, *, ended: bool) -> None:
        window = self._window
        window.credit -= length
        if window.credit < 0:
            raise Failure(ErrorCode.FLOW_CONTROL_ERROR, "connection window exceeded")
        if window.credit < window.unacknowledged:
            self._renew_connection()
        stream = self._streams.get(stream_id)
        if self._admit(stream_id, StreamFrame.DATA_END if ended else StreamFrame.DATA) is None:
            stream = None
        elif stream is not None:
            stream.credit -= length
            if stream.credit < 0 and stream.credit < self._least_credit():
                self._stream_error(stream_id, ErrorCode.FLOW_CONTROL_ERROR)
                stream = None
            elif not self._server and not stream.answered:
                self._stream_error(stream_id, ErrorCode.PROTOCOL_ERROR)
                stream = None
            elif not payload and not ended:
                self._charge()
        # Padding and its length byte count against the windows (RFC 9113, 6.1). Their credit is returned at once.
        if length > payload:
            self.acknowledge(stream_id, length - payload)
        self._data_stream_id = stream_id
        self._data_stream = stream
        self._data_ended = ended

    def _least_credit(self) -> int:
        """Return the lowest credit of a stream that is not an error.

        A client can send :data:`DEFAULT_WINDOW` bytes on a stream before it has received our SETTINGS with a
        smaller window, and these bytes must be accepted (RFC 9113, 6.9.3). The stream's credit is then negative,
        like the client's window once it has applied our SETTINGS. A server has our SETTINGS before it can send
        DATA.
        """
        if self._settings_acked or not self._server:
            return 0
        return self._window.initial - DEFAULT_WINDOW

    def data_chunk(self, chunk: memoryview, size: int) -> None:
        stream_id = self._data_stream_id
        if self._data_stream is None:
            self._reader.work += DROPPED_DATA_UNITS
            self.acknowledge(stream_id, size)
        else:
            self._deliver(stream_id, chunk, size)

    def _deliver(self, stream_id: int, chunk: memoryview, size: int) -> None:
        events = self._events
        if events:
            last = events[-1]
            if type(last) is DataReceived and last.stream_id == stream_id:
                last.chunks.append(chunk)
                last.size += size
                return
        events.append(DataReceived(stream_id, [chunk], size))

    def data_done(self) -> None:
        stream, self._data_stream = self._data_stream, None
        if self._data_ended and stream is not None:
            self._remote_ended(self._data_stream_id, stream)

    def header_block(self, stream_id: int, block: bytes, *, ended: bool) -> None:
        # Every header block is decoded, even if unused, because our dynamic table must stay equal to the peer's
        # (RFC 7541, 2.2).
        if len(block) > LONG_BLOCK_BYTES:
            (self._requests if self._server else self._responses).begin(block)
            self._long_block = _LongBlock(stream_id, ended)
            self._continue_block()
            return
        try:
            if self._server:
                requests = self._requests
                request = requests.decode(block)
                cost = _block_units(requests.decoded_fields, requests.decoded_octets)
                self._reader.work += cost
                self._request(stream_id, request, ended=ended, cost=cost)
            else:
                responses = self._responses
                response = responses.decode(block)
                self._reader.work += _block_units(responses.decoded_fields, responses.decoded_octets)
                self._response(stream_id, response, ended=ended)
        except HeaderBlockError as error:
            raise _failure(error) from error

    def _continue_block(self) -> None:
        """Decode a long block until it is complete or the slice is over. No other frame is read before the block
        is complete.
        """
        reader, block = self._reader, self._long_block
        assert block is not None
        decoder = self._requests if self._server else self._responses
        while reader.work <= self._slice_units:
            try:
                complete = decoder.advance()
            except HeaderBlockError as error:
                raise _failure(error) from error
            units = _block_units(decoder.decoded_fields, decoder.decoded_octets)
            reader.work += units
            block.cost += units
            if complete:
                self._long_block = None
                if self._server:
                    self._request(block.stream_id, self._requests.finish(), ended=block.ended, cost=block.cost)
                else:
                    self._response(block.stream_id, self._responses.finish(), ended=block.ended)
                return

    def _admit(self, stream_id: int, frame: StreamFrame) -> StreamState | None:
        """Look up a received frame in the table of stream states.

        Returns:
            The state after the frame. None if it has no effect on the stream, or was answered by RST_STREAM.

        Raises:
            Failure: the frame ends the connection.
        """
        state = self.stream_state(stream_id)
        verdict = self._received[state][frame]
        if isinstance(verdict, StreamState):
            return verdict
        if isinstance(verdict, Violation):
            if verdict.scope is Scope.CONNECTION:
                raise Failure(verdict.code, f"{frame.value} on a stream that is {state.value}")
            self._stream_error(stream_id, verdict.code)
        elif frame is StreamFrame.HEADERS or frame is StreamFrame.HEADERS_END or frame is StreamFrame.RST_STREAM:
            # Only these frames are charged here: the windows limit DATA in flight, and WINDOW_UPDATE is charged in
            # any state.
            self._charge()
        return None

    def _request(
        self, stream_id: int, head: RequestHead | Trailers | Malformed, *, ended: bool, cost: int
    ) -> None:
        stream = self._streams.get(stream_id)
        if stream is None and not stream_id & 1:
            raise Failure(ErrorCode.PROTOCOL_ERROR, "even stream id from a client")
        state = self._admit(stream_id, StreamFrame.HEADERS_END if ended else StreamFrame.HEADERS)
        if state is None:
            return
        if stream is not None:
            self._trailers(stream_id, stream, head, ended=ended)
            return
        self._last_peer_id = stream_id
        most = self.settings.max_concurrent_streams
        if most is not None and len(self._streams) >= most:
            # A client that has not received our limit yet can exceed it. Envoy opens all waiting tunnels at once
            # on a new connection. If they were charged like resets, the tunnels below the limit would end, too.
            if self._settings_acked:
                self._charge_reset()
            else:
                self._charge()
            self._send_reset(stream_id, ErrorCode.REFUSED_STREAM)
            return
        if not isinstance(head, RequestHead):
            self._charge_reset()
            self._send_reset(stream_id, ErrorCode.PROTOCOL_ERROR)
            return
        stream = Stream(state, self._peer_initial_window, self._window.initial, self._now)
        stream.tunnel = head.is_tunnel
        self._reader.work += REQUEST_UNITS
        stream.cost = min(cost + REQUEST_UNITS, REFUND_UNITS)
        self._streams[stream_id] = stream
        self._window.opened(len(self._streams))
        self._events.append(RequestReceived(stream_id, head, ended))
        if ended:
            self._events.append(StreamEnded(stream_id))

    def _response(self, stream_id: int, head: ResponseHead | Trailers | Malformed, *, ended: bool) -> None:
        stream = self._streams.get(stream_id)
        if self._admit(stream_id, StreamFrame.HEADERS_END if ended else StreamFrame.HEADERS) is None:
            return
        assert stream is not None  # without push a server opens none
        if stream.answered:
            self._trailers(stream_id, stream, head, ended=ended)
        elif not isinstance(head, ResponseHead) or (head.status < 200 and ended) or head.status == 101:
            self._stream_error(stream_id, ErrorCode.PROTOCOL_ERROR)
        elif head.status < 200:
            self._charge()  # an informational response, which tunnels do not need
        else:
            stream.answered = True
            stream.tunnel = stream.tunnel and head.status == 200
            self._events.append(ResponseReceived(stream_id, head.status, head.headers, ended))
            if ended:
                self._remote_ended(stream_id, stream)

    def _trailers(self, stream_id: int, stream: Stream, head: object, *, ended: bool) -> None:
        """Handle a second header block: trailers. On a tunnel they are an error, as only DATA can follow (8.5)."""
        if stream.tunnel or not ended or not isinstance(head, Trailers):
            self._stream_error(stream_id, ErrorCode.PROTOCOL_ERROR)
        else:
            self._remote_ended(stream_id, stream, head.headers)

    # Other frames

    def _window_update(self, stream_id: int, increment: int) -> None:
        # Each KiB that we send gives the peer one free WINDOW_UPDATE. A fixed limit would be too low for a fast
        # transfer or too high for an idle one, because peers return credit at different rates (nginx per frame,
        # others per half window).
        if self._earned >= 1 << _EARNED_SHIFT:
            self._earned -= 1 << _EARNED_SHIFT
        else:
            self._charge()
        if stream_id:
            stream = self._streams.get(stream_id)
            if self._admit(stream_id, StreamFrame.WINDOW_UPDATE) is None or stream is None:
                return
            if not increment:
                self._stream_error(stream_id, ErrorCode.PROTOCOL_ERROR)
                return
            stream.send_window += increment
            if stream.send_window > MAX_WINDOW:
                self._stream_error(stream_id, ErrorCode.FLOW_CONTROL_ERROR)
            elif stream.blocked and stream.send_window > 0:
                stream.blocked = False
                self._events.append(WindowOpened(stream_id))
            return
        if not increment:
            raise Failure(ErrorCode.PROTOCOL_ERROR, "WINDOW_UPDATE of 0")
        self._send_window += increment
        if self._send_window > MAX_WINDOW:
            raise Failure(ErrorCode.FLOW_CONTROL_ERROR, "connection window over 2^31-1")
        if self._send_blocked:
            self._send_blocked = False
            self._events.append(WindowOpened(0))

    def _reset_frame(self, stream_id: int, code: int) -> None:
        stream = self._streams.get(stream_id)
        if self._admit(stream_id, StreamFrame.RST_STREAM) is None or stream is None:
            return
        self._forget(stream_id, stream)
        # Rapid reset, CVE-2023-44487: to open and abandon a stream costs the client hardly any work, but costs us
        # a handler, a dial and a log line. MAX_CONCURRENT_STREAMS does not limit this.
        if self._server and not stream.answered:
            self._charge_reset()
        unprocessed = code == ErrorCode.REFUSED_STREAM and not stream.answered
        self._events.append(StreamReset(stream_id, code, unprocessed=unprocessed))

    def _settings_frame(self, flags: int, payload: bytes) -> None:
        if flags & frames.ACK:
            if payload:
                raise Failure(ErrorCode.FRAME_SIZE_ERROR, "SETTINGS ACK with content")
            self._settings_acked = True
            self._charge()
            return
        if len(payload) % frames.SETTING.size:
            raise Failure(ErrorCode.FRAME_SIZE_ERROR, "SETTINGS of wrong length")
        self._charge(1 + len(payload) // 64)
        self._reader.work += len(payload) // frames.SETTING.size
        window = self._peer_initial_window
        for key, value in frames.SETTING.iter_unpack(payload):
            if key == Setting.INITIAL_WINDOW_SIZE:
                if value > MAX_WINDOW:
                    raise Failure(ErrorCode.FLOW_CONTROL_ERROR, "INITIAL_WINDOW_SIZE over 2^31-1")
                window = value
            else:
                self._apply_setting(key, value)
        # If SETTINGS_INITIAL_WINDOW_SIZE occurs several times, only the last value is applied, because this
        # updates every open stream.
        if window != self._peer_initial_window:
            self._move_windows(window)
        self.output.append(frames.frame(frames.SETTINGS, frames.ACK, 0))
        self.peer_settings_seen = True
        self._events.append(SettingsReceived())

    def _move_windows(self, window: int) -> None:
        """Apply SETTINGS_INITIAL_WINDOW_SIZE.

        This also changes the windows of open streams by the difference. If a window becomes negative, its stream
        waits for WINDOW_UPDATEs (RFC 9113, 6.9.2).
        """
        change = window - self._peer_initial_window
        self._peer_initial_window = window
        self._reader.work += len(self._streams) // 8
        for stream_id, stream in self._streams.items():
            stream.send_window += change
            if stream.send_window > MAX_WINDOW:
                raise Failure(ErrorCode.FLOW_CONTROL_ERROR, "stream window over 2^31-1")
            if stream.blocked and stream.send_window > 0:
                stream.blocked = False
                self._events.append(WindowOpened(stream_id))

    def _apply_setting(self, key: int, value: int) -> None:
        if key == Setting.HEADER_TABLE_SIZE:
            # The next header block must begin with a dynamic table size update if the peer's limit falls below the
            # last size of our encoder's table (RFC 7541, 4.2; Envoy answers GOAWAY(COMPRESSION_ERROR) without it).
            # The encoder never uses the table, so it sets the table's size to 0 at once: 0 is the smallest and
            # the final size of any series of changes, and no later limit can be lower.
            if value < self._encoder_table_bytes:
                self._encoder_table_bytes = 0
                self._block_prefix = EMPTY_TABLE
        elif key == Setting.MAX_FRAME_SIZE:
            if not DEFAULT_FRAME <= value < 2**24:
                raise Failure(ErrorCode.PROTOCOL_ERROR, "MAX_FRAME_SIZE out of range")
            self.peer_max_frame_bytes = value
        elif key == Setting.MAX_CONCURRENT_STREAMS:
            self.peer_max_streams = value
        elif key == Setting.EARLY_BYTES:
            self.peer_early_bytes = value if self.settings.early_data and not self._server else 0
        elif key == Setting.ENABLE_PUSH and (value > 1 or (value == 1 and not self._server)):
            raise Failure(ErrorCode.PROTOCOL_ERROR, "ENABLE_PUSH out of range")
        elif key == Setting.ENABLE_CONNECT_PROTOCOL and value > 1:
            raise Failure(ErrorCode.PROTOCOL_ERROR, "ENABLE_CONNECT_PROTOCOL out of range")

    def _ping_frame(self, flags: int, payload: bytes) -> None:
        self._charge()
        if not flags & frames.ACK:
            self.output.append(frames.frame(frames.PING, frames.ACK, 0, payload))
            return
        if payload == DRAIN_PING and self.draining:
            self.drain_seen = True
        self._events.append(PingAcknowledged(payload))

    def _goaway_frame(self, payload: bytes) -> None:
        if len(payload) < 8:
            raise Failure(ErrorCode.FRAME_SIZE_ERROR, "GOAWAY too short")
        self._charge()
        last, code = frames.TWO_U32.unpack_from(payload)
        last &= MAX_STREAM_ID
        self.going_away = True
        if not self._server:
            for stream_id in [key for key in self._streams if key > last]:
                self._window.closed(self._streams.pop(stream_id), len(self._streams))
                self._events.append(StreamReset(stream_id, ErrorCode.REFUSED_STREAM, unprocessed=True))
        self._events.append(GoawayReceived(last, code, payload[8:264]))

    # Shared

    def stream_state(self, stream_id: int) -> StreamState:
        """Return the state of a stream, open or not. A stream that we have reset is RESET only while the reset is
        remembered.
        """
        stream = self._streams.get(stream_id)
        if stream is not None:
            return stream.state
        # Streams with even identifiers do not exist: these are for server push, which is not implemented.
        last = self._last_peer_id if self._server else self._next_id - 1
        if not stream_id & 1:
            return StreamState.IDLE
        if self._goaway_limit is not None and stream_id > self._goaway_limit:
            # A server ignores frames on streams above its final GOAWAY, as if it had reset these streams (RFC
            # 9113, 6.8). A client has only the streams that it has opened, and all other streams are idle.
            return StreamState.RESET if self._server or stream_id <= last else StreamState.IDLE
        if stream_id > last:
            return StreamState.IDLE
        return StreamState.RESET if stream_id in self._reset_here else StreamState.CLOSED

    def _remote_ended(self, stream_id: int, stream: Stream, trailers: Headers = ()) -> None:
        verdict = self._received[stream.state][StreamFrame.DATA_END]
        assert isinstance(verdict, StreamState)
        stream.state = verdict
        if verdict is StreamState.CLOSED:
            self._forget(stream_id, stream)
        self._events.append(StreamEnded(stream_id, trailers))

    def _stream_error(self, stream_id: int, code: ErrorCode) -> None:
        """Reset a stream on which the peer has made an error."""
        # MadeYouReset, CVE-2025-8671: a rapid reset with exchanged roles. A peer can provoke our RST_STREAM as
        # cheaply as it can send its own.
        self._charge_reset()
        stream = self._streams.pop(stream_id, None)
        if stream is not None:
            self._window.closed(stream, len(self._streams))
            self._events.append(StreamReset(stream_id, code, by_peer=False))
        self._send_reset(stream_id, code)

    def _charge(self, tokens: float = 1.0) -> None:
        # This limits two floods: a high rate of control frames, and answers (ACKs, resets) that are queued here
        # because the peer sends but does not read.
        if not self._control.spend(self._now, tokens):
            raise Failure(ErrorCode.ENHANCE_YOUR_CALM, "too many control frames")
        if self.output.frames > self.settings.limits.unsent_frames:
            raise Failure(ErrorCode.ENHANCE_YOUR_CALM, "too many unsent frames")

    def _charge_reset(self) -> None:
        if not self._resets.spend(self._now):
            raise Failure(ErrorCode.ENHANCE_YOUR_CALM, "too many stream resets")
        if self.output.frames > self.settings.limits.unsent_frames:
            raise Failure(ErrorCode.ENHANCE_YOUR_CALM, "too many unsent frames")
