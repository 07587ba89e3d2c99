"""The server's end of a connection with unary gRPC calls, as a state machine: bytes in, frames out.

HTTP/2 is handled by the engine of the tunnels (:class:`hbone.engine.Engine`), with its limits on repeated frames.
A call is answered in the step that reads its last byte, so calls of one connection never wait for each other.
Memory per client is bounded: :data:`HELD_BYTES` of incomplete messages, and :data:`STREAMS` answers that wait for
flow-control credit.
"""

import logging
from collections.abc import Callable, Mapping
from contextlib import suppress
from enum import IntEnum
from typing import Final, TypeAlias

from hbone.engine import Engine
from hbone.errors import ErrorCode, LocalProtocolError
from hbone.events import (
    DataReceived,
    Headers,
    RequestHead,
    RequestReceived,
    StreamEnded,
    StreamReset,
    WindowOpened,
)
from hbone.limits import Limits
from hbone.settings import Http2Settings, Role

log = logging.getLogger(__name__)

#: Answers one request message with one response message. It must not block.
Answer: TypeAlias = Callable[[bytes], bytes]

#: The longest message of a client, which is gRPC's default.
MESSAGE_BYTES: Final = 4 * 1024 * 1024
#: The most bytes of incomplete messages on a connection. The call whose message exceeds it fails.
HELD_BYTES: Final = 64 * 1024 * 1024
#: The most concurrent calls of one connection.
STREAMS: Final = 1000
#: The most bytes of a call's metadata. Envoy passes on headers from its client, up to 60 KiB by default.
METADATA_BYTES: Final = 1024 * 1024
#: The work per loop iteration, in the engine's cost units: enough for some hundred calls.
SLICE_UNITS: Final = 40_000

_PREFIX_BYTES: Final = 5
_BUFFER_BYTES: Final = 256 * 1024
_BUFFERS_KEPT: Final = 4
#: Rate limits of one connection. Clients of gRPC's libraries send a PING and two WINDOW_UPDATEs with every few
#: messages, to measure the network. The rates are the most that one core can process; above them, reading from the
#: connection pauses.
_LIMITS: Final = Limits(
    work_burst=2_000_000,
    work_rate=2_000_000.0,
    control_burst=100_000,
    control_rate=100_000.0,
    reset_burst=10_000,
    reset_rate=10_000.0,
    continuation_frames=128,
    header_block_bytes=2 * METADATA_BYTES,
)
SETTINGS: Final = Http2Settings(
    max_concurrent_streams=STREAMS,
    max_header_list_bytes=METADATA_BYTES,
    initial_window_bytes=65_536,
    limits=_LIMITS,
)

_HEADERS: Final[Headers] = ((b"content-type", b"application/grpc"),)
_OK: Final[Headers] = ((b"grpc-status", b"0"),)


class Code(IntEnum):
    """The gRPC status codes that the server itself returns."""

    RESOURCE_EXHAUSTED = 8
    UNIMPLEMENTED = 12
    INTERNAL = 13


class _Call:
    """A call whose message is not complete yet."""

    __slots__ = ("answer", "body", "path")

    def __init__(self, path: bytes, answer: Answer) -> None:
        self.path = path
        self.answer = answer
        self.body = bytearray()


class SharedBuffers:
    """Output buffers shared by connections. A connection borrows one while it has something to send.

    Allocating one for each answer would take longer than the answer, because the kernel must map its pages.
    """

    def __init__(self) -> None:
        self._free: list[memoryview] = []

    def acquire(self) -> memoryview:
        return self._free.pop() if self._free else memoryview(bytearray(_BUFFER_BYTES))

    def release(self, buffer: memoryview) -> None:
        """Take back a buffer. Only a few are kept for reuse, because slow clients can return many at once."""
        if len(self._free) < _BUFFERS_KEPT:
            self._free.append(buffer)


class UnaryConnection:
    """The state of one connection.

    Args:
        answers: the handlers by path, such as ``/package.Service/Method``.
        buffers: the buffers that all connections share. Without it, the connection has its own.

    Attributes:
        engine: the HTTP/2 engine. After each call of a method, the caller sends its output, and obeys
            :attr:`~hbone.engine.Engine.failed` and :attr:`~hbone.engine.Engine.pause_s`.
    """

    def __init__(self, answers: Mapping[bytes, Answer], buffers: SharedBuffers | None = None) -> None:
        self.engine = Engine(Role.SERVER, SETTINGS, buffers or SharedBuffers())
        self.engine.start()
        self._answers = answers
        self._calls: dict[int, _Call] = {}
        self._held = 0
        #: Unsent parts of answers that wait for the client's flow-control credit.
        self._waiting: dict[int, memoryview] = {}

    def receive_data(self, data: bytes, now_s: float) -> None:
        """Process received bytes, and answer the calls that are complete."""
        connection_opened = False
        for event in self.engine.receive_data(data, now_s, SLICE_UNITS):
            match event:
                case RequestReceived():
                    self._opened(event.stream_id, event.head, ended=event.ended)
                case DataReceived():
                    self._data(event)
                case StreamEnded():
                    call = self._forget(event.stream_id)
                    if call is not None:
                        self._complete(event.stream_id, call)
                case StreamReset():
                    self._forget(event.stream_id)
                    self._waiting.pop(event.stream_id, None)
                case WindowOpened(0):
                    # The waiting answers are searched once for all frames: a search for each frame, through a
                    # thousand answers, would take seconds.
                    connection_opened = True
                case WindowOpened():
                    self._send_rest(event.stream_id)
                case _:
                    pass
        if connection_opened:
            self.sent()

    def _forget(self, stream_id: int) -> _Call | None:
        call = self._calls.pop(stream_id, None)
        if call is not None:
            self._held -= len(call.body)
        return call

    def _opened(self, stream_id: int, head: RequestHead, *, ended: bool) -> None:
        is_grpc = any(
            name == b"content-type" and value.startswith(b"application/grpc") for name, value in head.headers
        )
        if head.method != b"POST" or not is_grpc:
            status = 405 if head.method != b"POST" else 415
            self._respond(stream_id, status, (), open_still=not ended)
            return
        path = head.path or b""
        answer = self._answers.get(path)
        if answer is None:
            reason = b"the server has no such method"
            self._fail(stream_id, Code.UNIMPLEMENTED, reason, open_still=not ended)
        else:
            self._calls[stream_id] = _Call(path, answer)

    def _data(self, event: DataReceived) -> None:
        call = self._calls.get(event.stream_id)
        if call is not None:
            for chunk in event.chunks:
                call.body += chunk
            self._held += event.size
            if len(call.body) > MESSAGE_BYTES + _PREFIX_BYTES or self._held > HELD_BYTES:
                self._forget(event.stream_id)
                reason = b"a message has at most %d bytes, all together %d" % (MESSAGE_BYTES, HELD_BYTES)
                self._fail(event.stream_id, Code.RESOURCE_EXHAUSTED, reason, open_still=True)
        self.engine.acknowledge(event.stream_id, event.size)

    def _complete(self, stream_id: int, call: _Call) -> None:
        body = call.body
        if len(body) < _PREFIX_BYTES or int.from_bytes(body[1:_PREFIX_BYTES], "big") != len(body) - _PREFIX_BYTES:
            self._fail(stream_id, Code.INTERNAL, b"a unary call has one message, with its length")
            return
        if body[0]:
            self._fail(stream_id, Code.UNIMPLEMENTED, b"messages must not be compressed")
            return
        try:
            answer = call.answer(bytes(memoryview(body)[_PREFIX_BYTES:]))
        except Exception:
            log.exception("handler failed method=%s", call.path.decode(errors="replace"))
            self._fail(stream_id, Code.INTERNAL, b"internal error of the server")
            return
        framed = memoryview(b"\0" + len(answer).to_bytes(4, "big") + answer)
        with suppress(LocalProtocolError):  # a later frame of the same read has reset the stream
            self.engine.respond(stream_id, 200, _HEADERS)
            self._send(stream_id, framed)

    def _send(self, stream_id: int, framed: memoryview) -> None:
        """Send an answer, or the rest of one, and end the stream. Bytes must wait while there is no flow-control
        credit.
        """
        sent = self.engine.send_data(stream_id, framed)
        if sent < len(framed):
            self._waiting[stream_id] = framed[sent:]
        else:
            self._waiting.pop(stream_id, None)
            self.engine.end_stream(stream_id, _OK)

    def sent(self) -> None:
        """Continue answers that did not fit into the output. Called after the output was sent."""
        for stream_id in list(self._waiting):
            self._send_rest(stream_id)

    def _send_rest(self, stream_id: int) -> None:
        rest = self._waiting.get(stream_id)
        if rest is not None:
            with suppress(LocalProtocolError):
                self._send(stream_id, rest)

    def _fail(self, stream_id: int, code: Code, reason: bytes, *, open_still: bool = False) -> None:
        headers = (*_HEADERS, (b"grpc-status", b"%d" % code), (b"grpc-message", reason))
        self._respond(stream_id, 200, headers, open_still=open_still)

    def _respond(self, stream_id: int, status: int, headers: Headers, *, open_still: bool) -> None:
        """Answer with a status and no message. If ``open_still``, the rest of the client's request is ignored."""
        with suppress(LocalProtocolError):
            code = ErrorCode.NO_ERROR if open_still else None
            self.engine.respond(stream_id, status, headers, ended=True, reset_code=code)
