"""A gRPC channel to one address, which connects on first use and reconnects when necessary.

:class:`Channel` owns its current connection, and replaced connections until their calls have ended.
:mod:`xds.grpc.connection` implements the protocol; this module has the sockets, timers and waiting tasks.

No HTTP proxy is used, and ``http_proxy``, ``grpc_proxy`` and ``no_proxy`` are ignored: a node proxy must not reach
its control plane through a proxy served by itself. ``GRPC_*`` variables have no effect either.
"""

import asyncio
import logging
import os
import socket
from collections import deque
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Final, Self, assert_never

from hbone.errors import TlsError
from hbone.tls_context import TlsContext
from xds.aio.tls import Plain, Secured, Transport
from xds.grpc.address import host_and_port
from xds.grpc.connection import (
    CallEnded,
    CallEvent,
    CallsPossible,
    ClientConnection,
    MessageReceived,
    Opened,
    State,
    WritePossible,
)
from xds.grpc.heads import request_fields
from xds.grpc.messages import prefix
from xds.grpc.status import Headers, RpcFailed, Status

logger = logging.getLogger(__name__)

CONNECT_S: Final = 20.0  # the same as in gRPC's own clients
# The time for each address of a name except the last, so that an unreachable address does not use up CONNECT_S.
_EACH_S: Final = 5.0
_USER_AGENT: Final = "grpc-python-ztunnel"
_UNSENT_BYTES: Final = 4 * 1024 * 1024
_CLOSE_S: Final = 1.0


#: By default, gRPC servers count PINGs at intervals below 5 minutes as abuse, and end the connection at the third
#: (proposal A8). The extra tenth allows for varying network delays.
_DEFAULT_PING_S: Final = 330.0
#: TCP keepalive probes detect a lost host, and gRPC servers do not count them as PINGs. The values are seconds
#: until the first probe, seconds between probes, and their number. Probes pause while sent bytes are
#: unacknowledged; the last value limits that time, in milliseconds.
_TCP_PROBES: Final = (
    (socket.TCP_KEEPIDLE, 30),
    (socket.TCP_KEEPINTVL, 10),
    (socket.TCP_KEEPCNT, 3),
    (socket.TCP_USER_TIMEOUT, 60_000),
)


@dataclass(slots=True, kw_only=True, eq=False)
class Keepalive:
    """The keepalive settings for one server, shared by all connections to it.

    If the server sends no bytes for ``interval_s`` during a call, it gets a PING, and must send at least one byte
    within ``timeout_s``. After the error ``too_many_pings`` the interval is doubled, as in gRPC's proposal A8. A
    client that reconnects to a server keeps this object for the new connection.
    """

    interval_s: float = _DEFAULT_PING_S
    timeout_s: float = 20.0

    def back_off(self) -> None:
        """Double the interval."""
        self.interval_s *= 2


class Call:
    """One gRPC call. Its owner writes, and reads until None or RpcFailed, or cancels the call before that.

    Messages received before a failure are returned first. One task can read while another writes.

    Attributes:
        failure: why the call failed. None while it is open and after an orderly end.
        over: no more messages will arrive.
    """

    def __init__(self, connection: "_Connection", call_id: int) -> None:
        self.failure: RpcFailed | None = None
        self.over = False
        self._connection = connection
        self._id = call_id
        self._messages: deque[bytes] = deque()
        self._arrived = asyncio.Event()
        self._room = asyncio.Event()

    async def read(self) -> bytes | None:
        """Return the next message, or None after the orderly end of the call.

        Raises:
            RpcFailed: the call has failed, and all messages before that are read.
        """
        while not self._messages:
            self._raise_failure()
            if self.over:
                return None
            self._arrived.clear()
            await self._arrived.wait()
        message = self._messages.popleft()
        if not self._messages:
            self._connection.consumed(self._id)
        return message

    async def write(self, message: bytes, *, ended: bool = False) -> None:
        """Send a message. Return when the connection has accepted the whole message.

        Args:
            message: any length up to 4 GiB.
            ended: whether it is our last message.

        Raises:
            RpcFailed: the call has ended. The status is that of its failure, or CANCELLED.
        """
        first = prefix(message)
        if len(message) < 1024:  # one copy costs less than one more frame
            await self._send(first + message)
        else:
            await self._send(first)
            await self._send(message)
        if ended:
            self.end()

    def end(self) -> None:
        """Send END_STREAM: there are no more messages from us. No effect after the call's end."""
        if not self.over:
            self._connection.end(self._id)

    def cancel(self) -> None:
        """Reset the call's stream with the code CANCEL. Idempotent, and without effect after the call's end."""
        if not self.over:
            self._connection.cancel(self._id)
            self.ended(RpcFailed(Status.CANCELLED, "given up by us"))

    async def _send(self, data: bytes) -> None:
        left = memoryview(data)
        while left:
            self._raise_failure()
            if self.over:
                raise RpcFailed(Status.CANCELLED, "the call is over")
            self._room.clear()
            left = left[self._connection.send(self._id, left) :]
            if left:
                await self._room.wait()

    def _raise_failure(self) -> None:
        if self.failure is not None:
            raise RpcFailed(self.failure.status, self.failure.details)

    # Called by the connection

    def received(self, message: bytes) -> None:
        """Queue a received message of the call for its reader."""
        self._messages.append(message)
        self._arrived.set()

    def room(self) -> None:
        """Wake the task that waits to send, because the connection might accept more bytes."""
        self._room.set()

    def ended(self, failure: RpcFailed | None) -> None:
        """End the call's messages: wake the reading and the sending task, because no more messages will arrive."""
        self.over = True
        self.failure = failure
        self._arrived.set()
        self._room.set()


class _Connection:
    """One connection to the server: a socket that feeds a :class:`~xds.grpc.connection.ClientConnection`.
    Implements :class:`xds.aio.tls.Inner`.
    """

    def __init__(self, keepalive: Keepalive | None) -> None:
        loop = asyncio.get_running_loop()
        self.opening: asyncio.Future[None] = loop.create_future()
        """Resolves when calls can be opened, or when it is certain that they never can."""
        self.closed: asyncio.Future[None] = loop.create_future()
        """Resolves when the transport is closed. Calls can have failed before that."""
        self._core = ClientConnection()
        self._keepalive = keepalive
        self._calls: dict[int, Call] = {}
        self._calls_possible = asyncio.Event()
        self._idle = asyncio.Event()
        self._transport: Transport | None = None
        self._paused = False
        self._retired = False
        self._heard = True
        self._cut_because = ""
        self._timer: asyncio.TimerHandle | None = None

    @property
    def usable(self) -> bool:
        """Whether the connection can take new calls, now or after others have ended."""
        return self._core.state is State.OPEN

    @property
    def reason(self) -> str:
        """The reason why the connection is not usable."""
        return self._core.reason

    async def open(self, fields: Headers, message_limit_bytes: int | None, limit_s: float) -> Call | None:
        """Open a call as soon as the server's stream limit allows it. Return None if the connection takes no more
        calls.

        Raises:
            RpcFailed: UNAVAILABLE, the server allowed no further call for ``limit_s``.
        """
        try:
            async with asyncio.timeout(limit_s):
                while self.usable and not self._core.calls_possible:
                    self._calls_possible.clear()
                    await self._calls_possible.wait()
        except TimeoutError:
            text = f"the server allows no more than {self._core.calls} calls at once"
            raise RpcFailed(Status.UNAVAILABLE, text) from None
        if not self.usable:
            return None
        call_id = self._core.open_call(fields, message_limit_bytes)
        call = self._calls[call_id] = Call(self, call_id)
        self._idle.clear()
        self._flush()
        return call

    # Calls

    def send(self, call_id: int, data: memoryview) -> int:
        """Send the bytes that flow control and the network accept. If some are left, :meth:`Call.room` is called
        later.
        """
        sent = 0
        while sent < len(data) and not self._paused:
            taken = self._core.send(call_id, data[sent:])
            if not taken:
                break
            sent += taken
            self._flush()  # the transport may pause our writing
        return sent

    def end(self, call_id: int) -> None:
        """Send END_STREAM for a call: there are no more messages from us."""
        self._core.end(call_id)
        self._flush()

    def consumed(self, call_id: int) -> None:
        """Give back flow control credit for the messages of a call that were read."""
        self._core.consumed(call_id)
        self._flush()

    def cancel(self, call_id: int) -> None:
        """End a call; idempotent."""
        self._core.cancel(call_id)
        self._flush()
        self._drop(call_id)
        self._calls_possible.set()

    # Life

    def close(self, reason: str) -> None:
        """Send GOAWAY and close the connection. Open calls fail with ``reason``. Idempotent."""
        if self._transport is None:
            return
        self._dispatch(self._core.close(reason))
        self._flush()
        self._transport.close()

    def retire(self) -> None:
        """Close the connection when its last call ends, because another connection has replaced it. Idempotent."""
        self._retired = True
        if not self._calls:
            self.close("retired")

    async def wait_idle(self, limit_s: float) -> None:
        """Wait until no call is open, but at most ``limit_s`` seconds."""
        if self._calls:
            with suppress(TimeoutError):
                async with asyncio.timeout(limit_s):
                    await self._idle.wait()

    async def wait_closed(self) -> None:
        """Wait until the transport is closed. Abort it if the peer does not close in time."""
        await asyncio.wait([self.closed], timeout=_CLOSE_S)
        if not self.closed.done() and self._transport is not None:
            self._transport.abort()
            await self.closed

    # Transport

    def opened(self, transport: Transport) -> None:
        self._transport = transport
        self._core.start()
        self._flush()
        if self._keepalive is not None:
            self._timer = asyncio.get_running_loop().call_later(self._keepalive.interval_s, self._check)

    def received(self, data: memoryview) -> None:
        assert self._transport is not None
        self._heard = True
        self._dispatch(self._core.receive_data(data))
        self._flush()
        if self._core.too_many_pings and self._keepalive is not None:
            self._keepalive.back_off()
            logger.warning("server complains of too many PINGs; now one in %g s", self._keepalive.interval_s)
            self._keepalive = None  # stop PINGs on a closing connection
        if self._core.state is State.CLOSED:
            self._transport.close()
        elif self._transport.get_write_buffer_size() > _UNSENT_BYTES:
            # Flow control stops messages long before this limit. So most of these bytes are replies to a server
            # that sends PING or SETTINGS frames and does not read.
            self._cut("the server does not read our requests")

    def pause_writing(self) -> None:
        self._paused = True

    def resume_writing(self) -> None:
        self._paused = False
        for call in list(self._calls.values()):
            call.room()

    def connection_lost(self, exc: Exception | None) -> None:
        # The texts for an EOF or a reset by the control plane are familiar to operators of xDS clients.
        text = "socket closed" if exc is None else (getattr(exc, "strerror", None) or str(exc)).lower()
        self._dispatch(self._core.lost(text))
        self._stop_timer()
        if not self.closed.done():
            self.closed.set_result(None)

    def _dispatch(self, events: Iterable[CallEvent]) -> None:
        for event in events:
            match event:
                case MessageReceived():
                    call = self._calls.get(event.call_id)
                    if call is not None:
                        call.received(event.message)
                case CallEnded():
                    call = self._drop(event.call_id)
                    if call is not None:
                        call.ended(event.failure)
                case WritePossible():
                    woken = self._calls.values() if event.call_id is None else (self._calls.get(event.call_id),)
                    for call in list(woken):
                        if call is not None:
                            call.room()
                case CallsPossible():
                    self._calls_possible.set()
                case Opened():
                    pass
                case _:
                    assert_never(event)
        if self._core.state is not State.OPENING and not self.opening.done():
            self.opening.set_result(None)

    def _drop(self, call_id: int) -> Call | None:
        call = self._calls.pop(call_id, None)
        if not self._calls:
            self._idle.set()
            if self._retired:
                # Close the connection in the next loop iteration, because the caller can still have a frame to
                # send.
                asyncio.get_running_loop().call_soon(self.retire)
        return call

    def _flush(self) -> None:
        data = self._core.data_to_send()
        if data and self._transport is not None:
            self._transport.write(data)

    # Keepalive

    def _check(self) -> None:
        if self._core.state is State.CLOSED or self._keepalive is None:
            return
        loop = asyncio.get_running_loop()
        if self._heard or not self._calls:
            self._heard = False
            self._timer = loop.call_later(self._keepalive.interval_s, self._check)
            return
        self._core.ping()
        self._flush()
        self._timer = loop.call_later(self._keepalive.timeout_s, self._give_up)

    def _give_up(self) -> None:
        if self._heard or self._keepalive is None:
            self._check()
            return
        self._cut(f"no answer to a PING within {self._keepalive.timeout_s:g} s")

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _cut(self, reason: str) -> None:
        self._dispatch(self._core.lost(reason))
        if self._transport is not None:
            self._transport.abort()


class _Own:
    """The default of the argument ``keepalive``, which stands for a new :class:`Keepalive`."""


_OWN: Final = _Own()


class Channel:
    """A gRPC channel to one address, with one connection at a time. ``async with`` closes it.

    Args:
        target: ``host:port``, IPv6 hosts in brackets, or ``unix:/path``.
        tls: a context of :func:`xds.grpc.tls.client_tls`, which includes the server's names. None means plain
            text.
        message_limit_bytes: the longest received message. None allows the protocol's maximum of 4 GiB.
        keepalive: the keepalive that several channels to one server share. The default is a separate one. None
            sends no PING.
        connect_timeout_s: the time limit for connecting, including TLS and the server's SETTINGS, and then for
            waiting until the server allows one more call.
        source: the local address to connect from. None leaves the choice to the kernel.

    Raises:
        ValueError: the target has another form.
    """

    def __init__(
        self,
        target: str,
        *,
        tls: TlsContext | None = None,
        message_limit_bytes: int | None = None,
        keepalive: Keepalive | _Own | None = _OWN,
        connect_timeout_s: float = CONNECT_S,
        source: str | None = None,
    ) -> None:
        self.target = target
        self._source = source
        self._path = target.removeprefix("unix:") if target.startswith("unix:") else ""
        self._host, self._port = ("localhost", 0) if self._path else host_and_port(target)
        self._tls = tls
        self._message_limit_bytes = message_limit_bytes
        self._keepalive = Keepalive() if isinstance(keepalive, _Own) else keepalive
        self._connect_timeout_s = connect_timeout_s
        self._connection: _Connection | None = None
        self._retired: set[_Connection] = set()
        self._dialling = asyncio.Lock()
        self._closed = False

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self, grace_s: float = 0.0) -> None:
        """Close all connections. Before that, open calls have ``grace_s`` to end. Returns when all connections are
        closed.
        """
        self._closed = True
        connections = [*self._retired, *filter(None, [self._connection])]
        self._connection = None
        until_s = asyncio.get_running_loop().time() + grace_s
        for connection in connections:
            await connection.wait_idle(until_s - asyncio.get_running_loop().time())
            connection.close("channel closed")
            await connection.wait_closed()

    async def call(
        self, path: str, *, metadata: Iterable[tuple[str, str]] = (), timeout_s: float | None = None
    ) -> Call:
        """Begin a call of ``/package.Service/Method``; the caller ends or cancels it.

        If the server allows no more calls at once, this waits for another call to end.

        Args:
            path: the method's path.
            metadata: names in lower case and printable values.
            timeout_s: sent to the server. The caller must enforce it.

        Raises:
            RpcFailed: UNAVAILABLE, no connection accepts calls; INVALID_ARGUMENT, the metadata cannot be sent.
        """
        try:
            fields = request_fields(
                path,
                "localhost" if self._path else self.target,
                secure=self._tls is not None,
                metadata=metadata,
                timeout_s=timeout_s,
                user_agent=_USER_AGENT,
            )
        except ValueError as error:
            raise RpcFailed(Status.INVALID_ARGUMENT, str(error)) from error
        while True:
            connection, fresh = await self._connected()
            call = await connection.open(fields, self._message_limit_bytes, self._connect_timeout_s)
            if call is not None:
                return call
            if fresh:
                # A server that ends each connection right after accepting it is overloaded or stopping. Fail
                # instead of dialling again at once, so that the caller backs off.
                raise RpcFailed(Status.UNAVAILABLE, f"{self.target} took no calls: {connection.reason}")

    async def unary(
        self, path: str, message: bytes, *, metadata: Iterable[tuple[str, str]] = (), timeout_s: float
    ) -> bytes:
        """Send one message and return the response message. ``timeout_s`` limits the whole call, including the
        connect.

        Raises:
            RpcFailed: the server's status, or DEADLINE_EXCEEDED.
        """
        call: Call | None = None
        try:
            async with asyncio.timeout(timeout_s):
                call = await self.call(path, metadata=metadata, timeout_s=timeout_s)
                with suppress(RpcFailed):  # read() raises the error that ended the call
                    await call.write(message, ended=True)
                answer = await call.read()
                if answer is None or await call.read() is not None:
                    count = "no message" if answer is None else "more than one message"
                    raise RpcFailed(Status.UNIMPLEMENTED, f"the server answered with {count}")
                return answer
        except TimeoutError:
            raise RpcFailed(Status.DEADLINE_EXCEEDED, f"no answer within {timeout_s:g} s") from None
        finally:
            if call is not None:
                call.cancel()

    async def _connected(self) -> tuple[_Connection, bool]:
        """Return a connection, and whether it was dialled for this call. Even a new connection can already be
        unusable.
        """
        async with self._dialling:
            if self._closed:
                raise RpcFailed(Status.CANCELLED, "channel closed")
            connection = self._connection
            if connection is not None and connection.usable:
                return connection, False
            dialled = await self._dial()
            if self._closed:
                dialled.close("channel closed")
                raise RpcFailed(Status.CANCELLED, "channel closed")
            self._connection = dialled
            if connection is not None and not connection.closed.done():
                self._retired.add(connection)
                connection.closed.add_done_callback(lambda _: self._retired.discard(connection))
                connection.retire()
            return dialled, True

    async def _dial(self) -> _Connection:
        try:
            async with asyncio.timeout(self._connect_timeout_s):
                return await self._over(await self._socket())
        except TimeoutError:
            raise RpcFailed(Status.UNAVAILABLE, f"cannot connect to {self.target}: no answer in time") from None
        except (OSError, TlsError) as error:
            raise RpcFailed(Status.UNAVAILABLE, f"cannot connect to {self.target}: {_words(error)}") from error

    async def _over(self, sock: socket.socket) -> _Connection:
        loop = asyncio.get_running_loop()
        connection = _Connection(self._keepalive)
        outer = Plain(connection) if self._tls is None else Secured(self._tls, connection)
        transport, _ = await loop.create_connection(lambda: outer, sock=sock)
        try:
            if isinstance(outer, Secured):
                await outer.established
            # Wait for the server's first frame, its SETTINGS (RFC 9113, 3.4). Until then it is unknown how many
            # calls the server allows, and whether it speaks HTTP/2 at all.
            await connection.opening
        except BaseException:
            transport.abort()
            raise
        return connection

    async def _socket(self) -> socket.socket:
        """Return a socket connected to the first address that accepts. If none does, raise the last address's
        error.
        """
        loop = asyncio.get_running_loop()
        addresses: list[tuple[int, int, str | tuple[Any, ...]]]
        if self._path:
            addresses = [(socket.AF_UNIX, 0, self._path)]
        else:
            found = await loop.getaddrinfo(self._host, self._port, type=socket.SOCK_STREAM)
            addresses = [(family, protocol, address) for family, _, protocol, _, address in found]
        for index, (family, protocol, address) in enumerate(addresses, 1):
            sock = socket.socket(family, socket.SOCK_STREAM | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC, protocol)
            try:
                async with asyncio.timeout(None if index == len(addresses) else _EACH_S):
                    if self._source is not None and not self._path:
                        sock.bind((self._source, 0))
                    await loop.sock_connect(sock, address)
            except OSError:  # TimeoutError is a subclass
                sock.close()
                if index == len(addresses):
                    raise
            except BaseException:
                sock.close()
                raise
            else:
                if not self._path:
                    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
                    for option, value in _TCP_PROBES:
                        sock.setsockopt(socket.IPPROTO_TCP, option, value)
                return sock
        raise OSError("the name has no addresses")


def _words(error: OSError | TlsError) -> str:
    """Return the kernel's message for an error. asyncio's message would repeat the address."""
    if isinstance(error, (TlsError, socket.gaierror)) or not error.errno:
        return getattr(error, "strerror", None) or str(error) or type(error).__name__
    return os.strerror(error.errno)
