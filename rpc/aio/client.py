"""The calling side: a channel to one address, connected when it is used and again when it has to be."""

import asyncio
import os
import socket
from collections.abc import Iterable
from contextlib import suppress
from types import TracebackType
from typing import Any, Final, Self

from hbone.errors import ErrorCode, TlsError
from hbone.events import Headers, ResponseReceived
from hbone.settings import Role
from hbone.tls_context import TlsContext
from rpc.address import host_and_port
from rpc.aio.connection import Connection, Keepalive, Stream
from rpc.aio.tls import TLS_S, Secured
from rpc.heads import failure_of_answer, request_fields
from rpc.status import RpcFailed, Status, failure_of_fields

CONNECT_S: Final = 20.0
_EACH_S: Final = 5.0  # of a name's addresses, but for the last: one that does not answer must not use up the time
_USER_AGENT: Final = "grpc-python-ztunnel"

#: Servers end connections that ask too often: those of Go by default below 5 minutes, istiod below 15 s.
KEEPALIVE: Final = Keepalive(interval_s=30.0, timeout_s=10.0)


class Call(Stream):
    """One call: write, read until None or RpcFailed, and cancel what is not over by then."""

    _only_head: Headers | None = None

    def cancel(self) -> None:
        """Give the call up; nothing if it is over."""
        if not self.ended:
            self.abandon(RpcFailed(Status.CANCELLED, "given up by us"))

    def answered(self, event: ResponseReceived) -> None:
        """See :class:`~rpc.aio.connection.Stream`."""
        failure = failure_of_answer(event.status, event.headers)
        if failure is not None:
            self.abandon(failure)
        elif event.ended:  # "Trailers-Only": the head is the status, too
            self._only_head = event.headers

    def over(self, trailers: Headers) -> None:
        """See :class:`~rpc.aio.connection.Stream`."""
        failure = failure_of_fields(trailers if self._only_head is None else self._only_head)
        if failure is not None and self.failure is None:
            self.failure = failure
        super().over(trailers)
        self.leave(ErrorCode.NO_ERROR)  # whether or not we were done: the server is


class Channel:
    """Calls to one address, over one connection at a time; ``async with`` closes it.

    Args:
        target: ``host:port``, IPv6 hosts in brackets, or ``unix:/path``.
        tls: from :func:`rpc.tls.client_tls`, which knows the server's names; None is plain text.
        message_limit_bytes: of one message that comes; None: any length, up to the protocol's 4 GiB.
        keepalive: None: never ask.

    Raises:
        ValueError: the target is neither.
    """

    def __init__(
        self,
        target: str,
        *,
        tls: TlsContext | None = None,
        message_limit_bytes: int | None = None,
        keepalive: Keepalive | None = KEEPALIVE,
    ) -> None:
        self.target = target
        self._path = target.removeprefix("unix:") if target.startswith("unix:") else ""
        self._host, self._port = ("localhost", 0) if self._path else host_and_port(target)
        self._tls = tls
        self._message_limit_bytes = message_limit_bytes
        self._keepalive = keepalive
        self._connection: Connection | None = None
        self._retired: set[Connection] = set()
        self._dialling = asyncio.Lock()
        self._closed = False

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self, grace_s: float = 0.0) -> None:
        """End the connection; calls under way have ``grace_s`` to end first. Returns when it is gone."""
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

        ``timeout_s`` is told to the server, and is the caller's to keep.

        Raises:
            RpcFailed: UNAVAILABLE, there is no connection; INVALID_ARGUMENT, the metadata cannot be sent.
        """
        call = Call(self._message_limit_bytes)
        try:
            headers = request_fields(
                path,
                "localhost" if self._path else self.target,
                secure=self._tls is not None,
                metadata=metadata,
                timeout_s=timeout_s,
                user_agent=_USER_AGENT,
            )
        except ValueError as error:
            raise RpcFailed(Status.INVALID_ARGUMENT, str(error)) from error
        (await self._connected()).open(call, headers)
        return call

    async def unary(
        self, path: str, message: bytes, *, metadata: Iterable[tuple[str, str]] = (), timeout_s: float
    ) -> bytes:
        """One message there, one back, within ``timeout_s`` including the connection.

        Raises:
            RpcFailed: as the server says, or DEADLINE_EXCEEDED.
        """
        call: Call | None = None
        try:
            async with asyncio.timeout(timeout_s):
                call = await self.call(path, metadata=metadata, timeout_s=timeout_s)
                with suppress(RpcFailed):  # what ended it is for the reader
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

    async def _connected(self) -> Connection:
        async with self._dialling:
            if self._closed:
                raise RpcFailed(Status.CANCELLED, "channel closed")
            connection = self._connection
            if connection is None or not connection.usable:
                dialled = await self._dial()
                if self._closed:
                    dialled.close("channel closed")
                    raise RpcFailed(Status.CANCELLED, "channel closed")
                self._connection = dialled
                if connection is not None and not connection.closed.done():
                    self._retired.add(connection)
                    connection.closed.add_done_callback(lambda _: self._retired.discard(connection))
                    connection.retire()
                return dialled
            return connection

    async def _dial(self) -> Connection:
        try:
            async with asyncio.timeout(CONNECT_S):
                return await self._over(await self._socket())
        except TimeoutError:
            raise RpcFailed(Status.UNAVAILABLE, f"cannot connect to {self.target}: no answer in time") from None
        except (OSError, TlsError) as error:
            raise RpcFailed(Status.UNAVAILABLE, f"cannot connect to {self.target}: {_words(error)}") from error

    async def _over(self, sock: socket.socket) -> Connection:
        loop = asyncio.get_running_loop()
        connection = Connection(Role.CLIENT, keepalive=self._keepalive)
        if self._tls is None:
            await loop.create_connection(lambda: connection, sock=sock)
            return connection
        secured = Secured(self._tls, connection, TLS_S)
        await loop.create_connection(lambda: secured, sock=sock)
        try:
            await secured.established
        except BaseException:
            secured.abort()
            raise
        return connection

    async def _socket(self) -> socket.socket:
        """A connected socket to the first address that takes us; the last one's error if none does."""
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
                    await loop.sock_connect(sock, address)
            except OSError:  # TimeoutError is one
                sock.close()
                if index == len(addresses):
                    raise
            except BaseException:
                sock.close()
                raise
            else:
                if not self._path:
                    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                return sock
        raise OSError("the name has no addresses")


def _words(error: OSError | TlsError) -> str:
    """The kernel's words, where asyncio's say the address again."""
    if isinstance(error, (TlsError, socket.gaierror)) or not error.errno:
        return getattr(error, "strerror", None) or str(error) or type(error).__name__
    return os.strerror(error.errno)
