"""The client's end of an HTTP/2 connection that carries gRPC calls, as a state machine on ``h2``: bytes in, events
out.

The caller passes received bytes to :meth:`ClientConnection.receive_data`, passes each event to its call, and sends
:meth:`ClientConnection.data_to_send` after every other method.

States of a connection::

    OPENING  the server's SETTINGS have not arrived: no calls yet
    OPEN     up to :attr:`ClientConnection.calls_possible` more calls can be opened
    DRAINING the server sent GOAWAY: calls up to its last stream continue, new calls need a new connection
    CLOSED   the connection is of no more use; :attr:`ClientConnection.reason` says why

The server is trusted, so its frames are not charged to a budget, which a busy control plane could exceed. Memory
is bounded nevertheless. Flow control limits the unread bytes: credit returns when bytes are part of an unfinished
message, which the message limit bounds, or when the caller has read what came before. ``h2`` bounds header lists
and CONTINUATION frames.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from struct import Struct
from typing import Final, TypeAlias

from h2.config import H2Configuration
from h2.connection import H2Connection
from h2.errors import ErrorCodes
from h2.events import (
    DataReceived,
    Event,
    RemoteSettingsChanged,
    ResponseReceived,
    StreamEnded,
    StreamReset,
    TrailersReceived,
    WindowUpdated,
)
from h2.exceptions import ProtocolError
from h2.settings import SettingCodes, Settings

from xds.grpc.heads import failure_of_answer
from xds.grpc.messages import MessageReader
from xds.grpc.status import Headers, RpcFailed, Status, code_name, failure_of_fields, failure_of_reset

STREAM_WINDOW_BYTES: Final = 4 * 1024 * 1024
CONNECTION_WINDOW_BYTES: Final = 16 * 1024 * 1024
#: The longest DATA frame that we accept. Larger frames cost h2 less per byte, but a frame is handled in one piece,
#: so its length must be limited.
MAX_FRAME_BYTES: Final = 64 * 1024
#: The largest number of bytes per call of :meth:`ClientConnection.send`, so that callers then check whether the
#: network accepts more.
_SEND_BYTES: Final = 256 * 1024
_PING: Final = b"keepaliv"

_FRAME_HEAD_BYTES: Final = 9
_GOAWAY_TYPE: Final = 7
_GOAWAY: Final = Struct(">LL")
_GOAWAY_BYTES: Final = 16 * 1024


class State(Enum):
    """The states of a connection; see the module's docstring."""

    OPENING = "opening"
    OPEN = "open"
    DRAINING = "draining"
    CLOSED = "closed"


@dataclass(slots=True)
class Opened:
    """The server's SETTINGS arrived: the state is no longer OPENING."""


@dataclass(slots=True)
class CallsPossible:
    """:attr:`ClientConnection.calls_possible` or the state can have changed. Callers that wait must check both
    again.
    """


@dataclass(slots=True)
class MessageReceived:
    """A message of a call. When all received messages are read, call :meth:`ClientConnection.consumed`."""

    call_id: int
    message: bytes


@dataclass(slots=True)
class WritePossible:
    """Flow control now allows more bytes for one call, or for all calls if ``call_id`` is None."""

    call_id: int | None


@dataclass(slots=True)
class CallEnded:
    """The last event of a call, which has ended in order or with ``failure``. The call's id is no longer valid."""

    call_id: int
    failure: RpcFailed | None


CallEvent: TypeAlias = Opened | CallsPossible | MessageReceived | WritePossible | CallEnded


@dataclass(slots=True)
class _Call:
    reader: MessageReader
    unread_bytes: int = 0
    """The number of received bytes whose flow control credit is not given back yet, because messages wait for
    their reader.
    """
    waiting_messages: bool = False
    trailers: Headers | None = None


class ClientConnection:
    """The protocol state of one client connection; see the module's docstring. Call :meth:`start` first.

    Attributes:
        state: see :class:`State`.
        reason: the reason for DRAINING or CLOSED, as text.
        too_many_pings: the server ended the connection because of our PINGs.
    """

    def __init__(self) -> None:
        # Header fields stay bytes, because gRPC's statuses and messages are decoded by gRPC's rules.
        self._h2 = H2Connection(H2Configuration(client_side=True, header_encoding=None))
        self._h2.local_settings = Settings(
            client=True,
            initial_values={
                SettingCodes.ENABLE_PUSH: 0,
                SettingCodes.INITIAL_WINDOW_SIZE: STREAM_WINDOW_BYTES,
                SettingCodes.MAX_FRAME_SIZE: MAX_FRAME_BYTES,
                SettingCodes.MAX_HEADER_LIST_SIZE: H2Connection.DEFAULT_MAX_HEADER_LIST_SIZE,
            },
        )
        self._h2.max_inbound_frame_size = MAX_FRAME_BYTES
        self._frames = FrameCutter()
        self._calls: dict[int, _Call] = {}
        self._goodbye = ""
        self.state = State.OPENING
        self.reason = ""
        self.too_many_pings = False

    def start(self) -> None:
        """Queue the connection preface, SETTINGS, and the WINDOW_UPDATE for the connection's window."""
        self._h2.initiate_connection()
        # SETTINGS_INITIAL_WINDOW_SIZE changes only stream windows (RFC 9113, 6.9.2), so a WINDOW_UPDATE is needed.
        self._h2.increment_flow_control_window(CONNECTION_WINDOW_BYTES - 65_535)

    @property
    def calls_possible(self) -> int:
        """The number of calls that can be opened now; 0 unless the state is OPEN."""
        if self.state is not State.OPEN:
            return 0
        return max(self._h2.remote_settings.max_concurrent_streams - self._h2.open_outbound_streams, 0)

    @property
    def calls(self) -> int:
        """The number of open calls."""
        return len(self._calls)

    def data_to_send(self) -> bytes:
        """Return the queued bytes, which the caller must send now."""
        return self._h2.data_to_send()

    # Calls of the owner

    def open_call(self, fields: Headers, message_limit_bytes: int | None) -> int:
        """Queue a request and return its call's id.

        Raises:
            RpcFailed: UNAVAILABLE, the connection takes no call now; see :attr:`calls_possible`.
        """
        if not self.calls_possible:
            raise RpcFailed(Status.UNAVAILABLE, self.reason or "the server allows no more calls at once")
        try:
            call_id = self._h2.get_next_available_stream_id()
            self._h2.send_headers(call_id, fields)
        except ProtocolError as error:
            # Either all 2^31 stream ids are used up (RFC 9113, 5.1.1), or HTTP/2 does not permit these header
            # fields.
            self._drain(f"no more calls on this connection: {error}")
            raise RpcFailed(Status.UNAVAILABLE, self.reason) from error
        self._calls[call_id] = _Call(MessageReader(message_limit_bytes))
        return call_id

    def send(self, call_id: int, data: memoryview) -> int:
        """Queue ``data`` up to the limit of flow control, and return the number of queued bytes. It is 0 if the
        call has ended.

        If fewer bytes were queued, try again after :class:`WritePossible`, or at once if the limit per call was
        reached.
        """
        if call_id not in self._calls:
            return 0
        most = min(len(data), _SEND_BYTES, self._h2.local_flow_control_window(call_id))
        sent = 0
        while sent < most:
            size = min(most - sent, self._h2.max_outbound_frame_size)
            self._h2.send_data(call_id, data[sent : sent + size])
            sent += size
        return sent

    def end(self, call_id: int) -> None:
        """Queue END_STREAM: there are no more messages from us. No effect on a call that has ended."""
        if call_id in self._calls:
            self._h2.end_stream(call_id)

    def consumed(self, call_id: int) -> None:
        """Give back the flow-control credit for all messages received so far, because the caller has read them."""
        call = self._calls.get(call_id)
        if call is not None:
            call.waiting_messages = False
            self._credit(call_id, call)

    def cancel(self, call_id: int) -> None:
        """Cancel a call with RST_STREAM(CANCEL). The call has no more events. Idempotent."""
        call = self._calls.get(call_id)
        if call is not None:
            self._forget(call_id, call, ErrorCodes.CANCEL)

    def ping(self) -> None:
        """Queue a PING. The caller can treat any received byte as its answer."""
        if self.state is not State.CLOSED:
            self._h2.ping(_PING)

    def close(self, reason: str) -> list[CallEvent]:
        """Queue GOAWAY and end all calls with ``reason``. Idempotent."""
        if self.state is State.CLOSED:
            return []
        self._h2.close_connection()
        return self.lost(reason)

    # Network

    def lost(self, reason: str) -> list[CallEvent]:
        """Record that the connection is lost, and end all calls with ``reason`` or an earlier reason.
        Idempotent.
        """
        if self.state is State.CLOSED:
            return []
        self.state = State.CLOSED
        self.reason = f"{reason} after {self._goodbye}" if self._goodbye else reason
        ended: list[CallEvent] = [CallsPossible()]
        ended += (CallEnded(call_id, RpcFailed(Status.UNAVAILABLE, self.reason)) for call_id in self._calls)
        self._calls.clear()
        return ended

    def receive_data(self, data: bytes | bytearray | memoryview) -> list[CallEvent]:
        """Process received bytes, split at any point, and return the resulting events.

        A violation of HTTP/2 closes the connection. Send the rest of :meth:`data_to_send` (the GOAWAY), then
        close.
        """
        events: list[CallEvent] = []
        # h2 gets one frame at a time. After several frames, it would be in the state after the last one. An answer
        # to the first (a reset, or credit) would then fail if a later frame had ended the stream.
        for part in self._frames.cut(memoryview(data)):
            if self.state is State.CLOSED:
                break
            if isinstance(part, Goaway):
                self._goaway(part, events)
                continue
            try:
                happened = self._h2.receive_data(part)
            except ProtocolError as error:
                code = code_name(error.error_code)
                events += self.lost(f"the peer broke HTTP/2: {code}, {error}")
                break
            for event in happened:
                self._advance(event, events)
        return events

    def _advance(self, event: Event, events: list[CallEvent]) -> None:
        match event:
            case DataReceived():
                self._data(event, events)
            case ResponseReceived():
                self._answered(event, events)
            case TrailersReceived():
                call = self._calls.get(event.stream_id)
                if call is not None:
                    call.trailers = _fields(event.headers)
            case StreamEnded():
                self._stream_ended(event.stream_id, events)
            case StreamReset():
                self._fail(event.stream_id, failure_of_reset(event.error_code), None, events)
            case WindowUpdated():
                events.append(WritePossible(event.stream_id or None))
            case RemoteSettingsChanged():
                if self.state is State.OPENING:
                    self.state = State.OPEN
                    events.append(Opened())
                events.append(WritePossible(None))
                events.append(CallsPossible())
            case _:
                pass  # 1xx responses, PING, PONG and the ACK of SETTINGS: h2 handles them

    def _data(self, event: DataReceived, events: list[CallEvent]) -> None:
        call_id, size = event.stream_id, event.flow_controlled_length
        call = self._calls.get(call_id)
        if call is None:
            self._h2.acknowledge_received_data(size, call_id)
            return
        call.unread_bytes += size
        try:
            messages = call.reader.feed(event.data)
        except RpcFailed as failure:
            self._fail(call_id, failure, ErrorCodes.CANCEL, events)
            return
        for message in messages:
            events.append(MessageReceived(call_id, message))
            call.waiting_messages = True
        if not call.waiting_messages:
            self._credit(call_id, call)

    def _answered(self, event: ResponseReceived, events: list[CallEvent]) -> None:
        call = self._calls.get(event.stream_id)
        if call is None:
            return
        fields = _fields(event.headers)
        status = dict(fields)[b":status"]
        failure = failure_of_answer(int(status), fields)
        if failure is not None:
            self._fail(event.stream_id, failure, ErrorCodes.CANCEL, events)
        elif event.stream_ended is not None:
            call.trailers = fields  # "Trailers-Only": the head carries the status

    def _stream_ended(self, call_id: int, events: list[CallEvent]) -> None:
        call = self._calls.get(call_id)
        if call is None:
            return
        failure = failure_of_fields(call.trailers)
        if not call.reader.between:
            failure = failure or RpcFailed(Status.INTERNAL, "the stream ended inside a message")
        # The server has ended the call and no longer reads. If our side is still open, a reset with NO_ERROR
        # closes it.
        self._fail(call_id, failure, ErrorCodes.NO_ERROR, events)

    def _fail(
        self, call_id: int, failure: RpcFailed | None, reset: ErrorCodes | None, events: list[CallEvent]
    ) -> None:
        call = self._calls.get(call_id)
        if call is not None:
            self._forget(call_id, call, reset)
            events.append(CallEnded(call_id, failure))
        events.append(CallsPossible())

    def _forget(self, call_id: int, call: _Call, reset: ErrorCodes | None) -> None:
        self._credit(call_id, call)
        del self._calls[call_id]
        #         A stream that both sides have ended needs no reset. h2 can already have dropped its state.
        stream = self._h2.streams.get(call_id)
        if reset is not None and stream is not None and not stream.closed:
            self._h2.reset_stream(call_id, reset)

    def _credit(self, call_id: int, call: _Call) -> None:
        size, call.unread_bytes = call.unread_bytes, 0
        if size:
            self._h2.acknowledge_received_data(size, call_id)

    def _goaway(self, goaway: "Goaway", events: list[CallEvent]) -> None:
        words = goaway.debug.decode("ascii", "replace")
        self._goodbye = " ".join(filter(None, ("GOAWAY", code_name(goaway.code), words)))
        self.too_many_pings = goaway.code == ErrorCodes.ENHANCE_YOUR_CALM and words == "too_many_pings"
        self._drain(self._goodbye)
        events.append(CallsPossible())
        for call_id in [each for each in self._calls if each > goaway.last_stream_id]:
            # Calls above the GOAWAY's last stream id: the server has not processed them, and will not (RFC 9113,
            # 6.8).
            self._fail(call_id, failure_of_reset(ErrorCodes.REFUSED_STREAM), ErrorCodes.CANCEL, events)

    def _drain(self, reason: str) -> None:
        self.state = State.DRAINING
        self.reason = reason


@dataclass(slots=True)
class Goaway:
    """A GOAWAY frame (RFC 9113, 6.8)."""

    last_stream_id: int
    code: int
    debug: bytes


class FrameCutter:
    """Splits received bytes at frame boundaries, and removes GOAWAY frames.

    ``h2`` must not see GOAWAY: it closes its connection at once, refuses every later frame and drops queued data
    (python-hyper/h2, issue 1181), although RFC 9113 lets open streams end in order. Servers drain in this way:
    istiod when it balances its clients, Go's and C's gRPC when they stop or when a connection has reached its age.
    """

    __slots__ = ("_goaway", "_head", "_left")

    def __init__(self) -> None:
        self._head = b""
        self._left = 0
        self._goaway: bytearray | None = None

    def cut(self, data: memoryview) -> Iterator[memoryview | bytes | Goaway]:
        """Yield GOAWAY frames as :class:`Goaway`, and the bytes of other frames, possibly in several parts per
        frame.
        """
        position, size = 0, len(data)
        while position < size:
            if self._left:
                part = data[position : position + self._left]
                position += len(part)
                self._left -= len(part)
                if self._goaway is None:
                    yield part
                else:
                    # Keep only the error code and the beginning of the debug text, because a server can send up to
                    # 16 MiB.
                    self._goaway += part[: _GOAWAY_BYTES - len(self._goaway)]
                    if not self._left:
                        yield self._taken()
                continue
            if not self._head and size - position >= _FRAME_HEAD_BYTES:
                length = int.from_bytes(data[position : position + 3], "big")
                if data[position + 3] != _GOAWAY_TYPE:
                    # In the common case, a whole frame or its first part is passed on without a copy.
                    part = data[position : position + _FRAME_HEAD_BYTES + length]
                    position += len(part)
                    self._left = _FRAME_HEAD_BYTES + length - len(part)
                    yield part
                    continue
            take = data[position : position + _FRAME_HEAD_BYTES - len(self._head)]
            position += len(take)
            self._head += bytes(take)
            if len(self._head) == _FRAME_HEAD_BYTES:
                head, self._head = self._head, b""
                self._left = int.from_bytes(head[:3], "big")
                stream_id = int.from_bytes(head[5:], "big") & 0x7FFF_FFFF
                # A malformed GOAWAY frame (too short, or on a stream) is passed to h2, which refuses it.
                if head[3] == _GOAWAY_TYPE and self._left >= _GOAWAY.size and stream_id == 0:
                    self._goaway = bytearray()
                else:
                    yield head

    def _taken(self) -> Goaway:
        assert self._goaway is not None
        frame, self._goaway = bytes(self._goaway), None
        last_stream_id, code = _GOAWAY.unpack_from(frame)
        return Goaway(last_stream_id & 0x7FFF_FFFF, code, frame[_GOAWAY.size :])


def _fields(headers: object) -> Headers:
    # h2's type annotations allow str or bytes. With header_encoding=None, header fields are always bytes.
    return tuple((bytes(name), bytes(value)) for name, value in headers)  # type: ignore[attr-defined]
