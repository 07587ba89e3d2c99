"""One HTTP/2 connection of calls: the tunnel's engine behind an asyncio transport, plain or TLS.

The connection carries bytes and knows which stream they belong to; a :class:`Stream` makes messages of them. What
both hold is bounded by windows: credit for bytes goes back when they are part of a message that is still coming,
or when what came before was read, so that who does not read stops the peer instead of filling memory.
"""

import asyncio
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Final, cast

from hbone.engine import Engine
from hbone.errors import ErrorCode, code_name
from hbone.events import (
    ConnectionFailed,
    DataReceived,
    Event,
    GoawayReceived,
    Headers,
    RequestReceived,
    ResponseReceived,
    StreamEnded,
    StreamReset,
    WindowOpened,
)
from hbone.settings import Http2Settings, Limits, Role
from rpc.messages import MessageReader, prefix
from rpc.status import RpcFailed, Status, failure_of_reset

SETTINGS: Final = Http2Settings(
    max_concurrent_streams=1000,
    stream_window_bytes=1024 * 1024,
    connection_window_bytes=4 * 1024 * 1024,
    max_frame_bytes=1024 * 1024,
    # Calls are cancelled without bad intent: Envoy ends a stream per subscription when their listener goes.
    limits=Limits(reset_burst=1000, reset_rate=500.0),
)
_PING: Final = b"keepaliv"
_UNSENT_BYTES: Final = 4 * 1024 * 1024
_CLOSE_S: Final = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Keepalive:
    """A peer that was quiet for ``interval_s`` is asked, and has ``timeout_s`` to say anything."""

    interval_s: float
    timeout_s: float


class Stream:
    """One call on a connection, either role: messages in, messages out.

    Reading gives what came before a failure first. One task may read while another writes.
    """

    def __init__(self, message_limit_bytes: int | None) -> None:
        self.failure: RpcFailed | None = None
        """Why there will be no more; None while the call goes on, and after a good end."""
        self.ended = False
        """The peer sends no more messages."""
        self._connection: Connection | None = None
        self._id = 0
        self._reader = MessageReader(message_limit_bytes)
        self._messages: deque[bytes] = deque()
        self._held_bytes = 0
        self._arrived = asyncio.Event()
        self._room = asyncio.Event()

    async def read(self) -> bytes | None:
        """Return the next message; None when the peer has ended its side well.

        Raises:
            RpcFailed: the call has failed, and all messages before that are read.
        """
        while not self._messages:
            self._raise_failure()
            if self.ended:
                return None
            self._arrived.clear()
            await self._arrived.wait()
        message = self._messages.popleft()
        if not self._messages:
            self._give_back(flush=True)
        return message

    async def write(self, message: bytes, *, ended: bool = False) -> None:
        """Send a message; returns when the connection has taken all of it. ``ended``: it is our last.

        Raises:
            RpcFailed: the call has failed.
        """
        first = prefix(message)
        if len(message) < 1024:  # one copy costs less than one more frame
            await self._send(first + message)
        else:
            await self._send(first)
            await self._send(message)
        if ended and self._connection is not None:
            self._connection.end(self._id)

    async def _send(self, data: bytes) -> None:
        left = memoryview(data)
        while left:
            self._raise_failure()
            connection = self._connection
            if connection is None:
                raise RpcFailed(Status.CANCELLED, "the call is over")
            self._room.clear()
            sent = connection.send(self._id, left)
            left = left[sent:]
            if left:
                await self._room.wait()

    def _give_back(self, *, flush: bool) -> None:
        held, self._held_bytes = self._held_bytes, 0
        if held and self._connection is not None:
            self._connection.acknowledge(self._id, held, flush=flush)

    def _raise_failure(self) -> None:
        if self.failure is not None:
            raise RpcFailed(self.failure.status, self.failure.details)

    # Called by the connection

    def opened(self, connection: "Connection", stream_id: int) -> None:
        """The stream is open on ``connection``."""
        self._connection, self._id = connection, stream_id

    def answered(self, event: ResponseReceived) -> None:
        """The head of the answer came; of no meaning to a server."""

    def data(self, event: DataReceived) -> None:
        """Payload came."""
        self._held_bytes += event.size
        if self.failure is None:
            try:
                self._messages += self._reader.feed(event.chunks)
            except RpcFailed as failure:
                self.refused(failure)
        if self._messages:
            self._arrived.set()
        else:
            self._give_back(flush=False)

    def over(self, trailers: Headers) -> None:
        """The peer has ended its side."""
        if self._reader.between:
            self.ended = True
        elif self.failure is None:
            self.failure = RpcFailed(Status.INTERNAL, "the stream ended inside a message")
        self._arrived.set()

    def room(self) -> None:
        """Writing may go on."""
        self._room.set()

    def failed(self, failure: RpcFailed) -> None:
        """The stream is gone; the first reason stays."""
        if self.failure is None and not self.ended:
            self.failure = failure
        self.leave(None)

    # Ends by us

    def refused(self, failure: RpcFailed) -> None:
        """What came is no message, or too much of one."""
        self.abandon(failure)

    def abandon(self, failure: RpcFailed) -> None:
        """Give the call up with CANCEL; reading and writing raise ``failure``."""
        if self.failure is None:
            self.failure = failure
        self.leave(ErrorCode.CANCEL)

    def leave(self, code: int | None) -> None:
        """Be done with the connection, which resets the stream with ``code``, if any."""
        self._give_back(flush=False)
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.forget(self._id, code)
        self._arrived.set()
        self._room.set()


class Connection(asyncio.Protocol):
    """The shell around one engine.

    Args:
        role: which end this is.
        keepalive: None: a silent peer is never asked.
        accept: server: given every request, returns its stream, or None after answering it itself.
        opened: server: told when the connection is there, past any handshake.
    """

    def __init__(
        self,
        role: Role,
        *,
        keepalive: Keepalive | None = None,
        accept: "Callable[[Connection, RequestReceived], Stream | None] | None" = None,
        opened: "Callable[[Connection], None] | None" = None,
    ) -> None:
        self.engine = Engine(role, SETTINGS)
        self.closed: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        """Done when the transport is gone, with the reason; calls may have failed before."""
        self._accept = accept
        self._opened = opened
        self._keepalive = keepalive
        self._streams: dict[int, Stream] = {}
        self._idle = asyncio.Event()
        self._transport: asyncio.Transport | None = None
        self._paused = False
        self._reason = ""
        self._goodbye = ""
        self._over = False
        self._retired = False
        self._heard = True
        self._timer: asyncio.TimerHandle | None = None

    @property
    def usable(self) -> bool:
        """Client: whether a call may be opened."""
        return self._transport is not None and not self._over and self.engine.accepts_streams

    # What streams do

    def open(self, stream: Stream, headers: Headers) -> None:
        """Client: send a request.

        Raises:
            hbone.errors.LocalProtocolError: the connection takes no streams, see :attr:`usable`.
        """
        stream_id = self.engine.open_stream(headers, tunnel=False)
        self._take(stream_id, stream)
        self.flush()

    def send(self, stream_id: int, data: memoryview) -> int:
        """Take what windows and the network allow; after less than all :meth:`Stream.room` will be called."""
        sent = 0
        while sent < len(data) and not self._paused:
            taken = self.engine.send_data(stream_id, data[sent:])
            if not taken:
                break
            sent += taken
            self.flush()  # may pause us
        return sent

    def end(self, stream_id: int, trailers: Headers = ()) -> None:
        """Our side of the stream is over, after all that was sent."""
        self.engine.end_stream(stream_id, trailers)
        self.flush()

    def forget(self, stream_id: int, code: int | None) -> None:
        """The stream wants no more events; with ``code`` it ends at once, unless it has."""
        self._drop(stream_id)
        if code is not None:
            self.engine.reset_stream(stream_id, code)
        self.flush()

    def acknowledge(self, stream_id: int, size: int, *, flush: bool = True) -> None:
        """``size`` received bytes are dealt with: the peer may send as many more."""
        self.engine.acknowledge(stream_id, size)
        if flush:
            self.flush()

    def flush(self) -> None:
        """Give everything queued to the network."""
        output = self.engine.output
        if output and self._transport is not None:
            # The buffers are the engine's own and fresh each time: the transport may keep them.
            self._transport.writelines(output.views())
            output.taken()

    def close(self, reason: str) -> None:
        """Say GOAWAY and close; calls fail with ``reason``."""
        if self._transport is None or self._over:
            return
        self._reason = self._reason or reason
        if not self.engine.failed:
            self.engine.goaway()
        self.flush()
        self._transport.close()
        self._lose()

    def retire(self) -> None:
        """Close when no call is open any more: another connection has taken its place."""
        self._retired = True
        if not self._streams:
            self.close("retired")

    async def wait_idle(self, limit_s: float) -> None:
        """Wait until no call is open, at most ``limit_s``."""
        if self._streams:
            with suppress(TimeoutError):
                await asyncio.wait_for(self._idle.wait(), limit_s)

    async def wait_closed(self) -> None:
        """Wait until the transport is gone; one whose peer does not let go is cut."""
        await asyncio.wait([self.closed], timeout=_CLOSE_S)
        if not self.closed.done() and self._transport is not None:
            self._transport.abort()
            await self.closed

    # What asyncio calls

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """See :class:`asyncio.Protocol`."""
        self._transport = cast(asyncio.Transport, transport)  # uvloop's are of other classes
        if self._opened is not None:
            self._opened(self)
        self.engine.start()
        self.flush()
        if self._keepalive is not None:
            self._timer = asyncio.get_running_loop().call_later(self._keepalive.interval_s, self._look)

    def data_received(self, data: bytes) -> None:
        """See :class:`asyncio.Protocol`."""
        assert self._transport is not None
        self._heard = True
        for event in self.engine.receive_data(data, asyncio.get_running_loop().time()):
            self._happened(event)
        self.flush()
        if self.engine.failed:
            self._transport.close()
            self._lose()
        elif self._transport.get_write_buffer_size() > _UNSENT_BYTES:
            # Streams stop long before; what grows is answers to a peer that asks and does not read.
            self._reason = "the peer does not read what it asked for"
            self._transport.abort()

    def pause_writing(self) -> None:
        """See :class:`asyncio.BaseProtocol`."""
        self._paused = True

    def resume_writing(self) -> None:
        """See :class:`asyncio.BaseProtocol`."""
        self._paused = False
        for stream in list(self._streams.values()):
            stream.room()

    def connection_lost(self, exc: Exception | None) -> None:
        """See :class:`asyncio.Protocol`."""
        if not self._reason:
            # EOF and reset are what control planes end streams by; xDS clients know the words.
            text = "socket closed" if exc is None else (getattr(exc, "strerror", None) or str(exc)).lower()
            self._reason = f"{text} after {self._goodbye}" if self._goodbye else text
        self._lose()
        if not self.closed.done():
            self.closed.set_result(self._reason)

    # Inside

    def _happened(self, event: Event) -> None:
        match event:
            case DataReceived():
                stream = self._streams.get(event.stream_id)
                if stream is None:
                    self.engine.acknowledge(event.stream_id, event.size)
                else:
                    stream.data(event)
            case RequestReceived():
                assert self._accept is not None
                accepted = self._accept(self, event)
                if accepted is not None:
                    self._take(event.stream_id, accepted)
            case ResponseReceived():
                stream = self._streams.get(event.stream_id)
                if stream is not None:
                    stream.answered(event)
            case StreamEnded():
                stream = self._streams.get(event.stream_id)
                if stream is not None:
                    stream.over(event.trailers)
            case StreamReset():
                stream = self._drop(event.stream_id)
                if stream is not None:
                    stream.failed(failure_of_reset(event.code, unprocessed=event.unprocessed))
            case WindowOpened():
                opened = self._streams.values() if event.stream_id == 0 else (self._streams.get(event.stream_id),)
                for stream in list(opened):
                    if stream is not None:
                        stream.room()
            case GoawayReceived():
                words = event.debug.decode("ascii", "replace")
                self._goodbye = " ".join(filter(None, ("GOAWAY", code_name(event.code), words)))
            case ConnectionFailed():
                self._reason = f"the peer broke HTTP/2: {code_name(event.code)}, {event.detail}"

    def _take(self, stream_id: int, stream: Stream) -> None:
        self._streams[stream_id] = stream
        self._idle.clear()
        stream.opened(self, stream_id)

    def _drop(self, stream_id: int) -> Stream | None:
        stream = self._streams.pop(stream_id, None)
        if not self._streams:
            self._idle.set()
            if self._retired:
                # Not at once: whoever drops the last one may have a last frame to send.
                asyncio.get_running_loop().call_soon(self.retire)
        return stream

    def _look(self) -> None:
        assert self._keepalive is not None
        loop = asyncio.get_running_loop()
        if self._heard:
            self._heard = False
            self._timer = loop.call_later(self._keepalive.interval_s, self._look)
            return
        self.engine.ping(_PING)
        self.flush()
        self._timer = loop.call_later(self._keepalive.timeout_s, self._give_up)

    def _give_up(self) -> None:
        assert self._keepalive is not None
        if self._heard:
            self._look()
            return
        self._reason = f"no answer to a PING within {self._keepalive.timeout_s:g} s"
        if self._transport is not None:
            self._transport.abort()
        self._lose()

    def _lose(self) -> None:
        self._over = True
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        streams, self._streams = self._streams, {}
        self._idle.set()
        failure = RpcFailed(Status.UNAVAILABLE, self._reason)
        for stream in streams.values():
            stream.failed(failure)
