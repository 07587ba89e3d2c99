"""The serving side: addresses, and a handler per method."""

import asyncio
import logging
import os
import stat
from collections.abc import Awaitable, Callable
from contextlib import suppress
from types import TracebackType
from typing import Final, Self, TypeAlias

from hbone.errors import ErrorCode
from hbone.events import RequestReceived
from hbone.settings import Role
from hbone.tls_context import TlsContext
from rpc.address import host_and_port
from rpc.aio.connection import Connection, Keepalive, Stream
from rpc.aio.tls import TLS_S, Secured
from rpc.heads import CONTENT_TYPE, CallHead, NotGrpc, call_head
from rpc.status import RpcFailed, Status, status_fields

log = logging.getLogger(__name__)

REQUEST_BYTES: Final = 64 * 1024 * 1024
"""Default limit of one message: a client that names 200,000 resources sends a third of it."""

_KEEPALIVE: Final = Keepalive(interval_s=60.0, timeout_s=20.0)


class ServerCall(Stream):
    """One call, as its handler sees it.

    Attributes:
        head: what is asked.
        local: it came over a Unix socket, or in plain text where that is all that is served.
    """

    def __init__(self, head: CallHead, message_limit_bytes: int | None, *, local: bool) -> None:
        super().__init__(message_limit_bytes)
        self.head = head
        self.local = local
        self.task: asyncio.Task[None] | None = None
        self._said_head = False

    async def write(self, message: bytes, *, ended: bool = False) -> None:
        """See :class:`~rpc.aio.connection.Stream`; the end is said by returning from the handler."""
        assert not ended
        if not self._said_head and self._connection is not None:
            self._said_head = True
            self._connection.engine.respond(self._id, 200, (CONTENT_TYPE,))
        await super().write(message)

    def refused(self, failure: RpcFailed) -> None:
        """See :class:`~rpc.aio.connection.Stream`: the handler is told, and its end tells the client."""
        self.failure = failure
        self._arrived.set()
        self._room.set()

    def failed(self, failure: RpcFailed) -> None:
        """See :class:`~rpc.aio.connection.Stream`: nobody waits for the answer, so the handler stops."""
        super().failed(failure)
        if self.task is not None:
            self.task.cancel()

    def finish(self, status: Status, details: str = "") -> None:
        """Say how the call ended; nothing if the client is gone."""
        if self._connection is None:
            return
        fields = status_fields(status, details)
        if self._said_head:
            self._connection.end(self._id, fields)
        else:
            self._connection.engine.respond(self._id, 200, (CONTENT_TYPE, *fields), ended=True)
        # RFC 9113, 8.1: who has answered may ask the client to stop sending, without an error.
        self.leave(None if self.ended else ErrorCode.NO_ERROR)


#: Serves one call: returning is OK, RpcFailed any other status. Cancelled when the client goes.
Handler: TypeAlias = Callable[[ServerCall], Awaitable[None]]


class Server:
    """Serves methods on addresses; ``async with`` owns its tasks, and leaving it ends every call.

    Args:
        route: the handler of a path, None for UNIMPLEMENTED.
        tls: from :func:`rpc.tls.server_tls`, for TCP addresses; Unix sockets stay in plain text.
        message_limit_bytes: of one message that comes.
    """

    def __init__(
        self,
        route: Callable[[str], Handler | None],
        *,
        tls: TlsContext | None = None,
        message_limit_bytes: int | None = REQUEST_BYTES,
    ) -> None:
        self._route = route
        self._tls = tls
        self._message_limit_bytes = message_limit_bytes
        self._servers: list[asyncio.Server] = []
        self._sockets: dict[str, int] = {}
        self._handshakes: set[Secured] = set()
        self._connections: set[Connection] = set()
        self._calls: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for server in self._servers:
            server.close()
        for path, inode in self._sockets.items():
            with suppress(OSError):
                if os.stat(path).st_ino == inode:
                    os.unlink(path)
        for handshake in list(self._handshakes):
            handshake.abort()
        connections = list(self._connections)
        for connection in connections:
            connection.close("server stopped")
        calls = list(self._calls)
        for task in calls:
            task.cancel()
        for connection in connections:
            await connection.wait_closed()
        await asyncio.gather(*calls, return_exceptions=True)

    @property
    def peers(self) -> int:
        """Connections that are there, those in their handshakes included."""
        return len(self._handshakes) + len(self._connections)

    async def listen(self, address: str) -> str:
        """Serve ``host:port`` (port 0 picks one) or ``unix:/path``; returns it with the port it got.

        A socket file in the way is replaced, anything else is not.

        Raises:
            OSError: the address cannot be had.
            ValueError: it is neither.
        """
        loop = asyncio.get_running_loop()
        if address.startswith("unix:"):
            path = address.removeprefix("unix:")
            with suppress(FileNotFoundError):
                if stat.S_ISSOCK(os.stat(path).st_mode):
                    os.unlink(path)
            server = await loop.create_unix_server(lambda: self._connection(local=True), path)
            self._sockets[path] = os.stat(path).st_ino
            self._servers.append(server)
            return address
        host, port = host_and_port(address, least_port=0)
        server = await loop.create_server(self._accepted, host, port)
        self._servers.append(server)
        return f"{address.rpartition(':')[0]}:{server.sockets[0].getsockname()[1]}"

    def _accepted(self) -> asyncio.Protocol:
        if self._tls is None:
            return self._connection(local=True)
        secured = Secured(self._tls, self._connection(local=False), TLS_S)
        self._handshakes.add(secured)
        secured.established.add_done_callback(lambda _: self._handshakes.discard(secured))
        return secured

    def _connection(self, *, local: bool) -> Connection:
        def accept(connection: Connection, event: RequestReceived) -> Stream | None:
            return self._accept(connection, event, local=local)

        def opened(connection: Connection) -> None:
            self._connections.add(connection)
            connection.closed.add_done_callback(lambda _: self._connections.discard(connection))

        return Connection(Role.SERVER, keepalive=_KEEPALIVE, accept=accept, opened=opened)

    def _accept(self, connection: Connection, event: RequestReceived, *, local: bool) -> Stream | None:
        code = None if event.ended else ErrorCode.NO_ERROR
        respond = connection.engine.respond
        try:
            head = call_head(event.head)
            handler = self._route(head.path)
            if handler is None:
                raise RpcFailed(Status.UNIMPLEMENTED, f"no method {head.path}")
        except NotGrpc as error:
            respond(event.stream_id, error.http_status, ended=True, reset_code=code)
            return None
        except RpcFailed as failure:
            fields = status_fields(failure.status, failure.details)
            respond(event.stream_id, 200, (CONTENT_TYPE, *fields), ended=True, reset_code=code)
            return None
        call = ServerCall(head, self._message_limit_bytes, local=local)
        # No TaskGroup: an error of whoever runs the server is to come out as it is.
        serving = self._serve(handler, call)
        call.task = asyncio.get_running_loop().create_task(serving, name=f"rpc {head.path}")
        self._calls.add(call.task)
        call.task.add_done_callback(self._calls.discard)
        return call

    async def _serve(self, handler: Handler, call: ServerCall) -> None:
        try:
            async with asyncio.timeout(call.head.timeout_s) as limit:
                await handler(call)
        except RpcFailed as failure:
            call.finish(failure.status, failure.details)
        except Exception as error:
            if isinstance(error, TimeoutError) and limit.expired():
                call.finish(Status.DEADLINE_EXCEEDED, "the caller's time is over")
                return
            # Our bug; the other calls of this server have nothing to do with it.
            log.exception("handler failed method=%s", call.head.path)
            call.finish(Status.INTERNAL, "internal error of the server")
        else:
            call.finish(Status.OK)


def unary(answer: Callable[[bytes, ServerCall], bytes]) -> Handler:
    """A handler of one message in and one out, which ``answer`` makes; its RpcFailed ends the call."""

    async def serve(call: ServerCall) -> None:
        message = await call.read()
        if message is None or await call.read() is not None:
            raise RpcFailed(Status.UNIMPLEMENTED, "this method takes exactly one message")
        await call.write(answer(message, call))

    return serve
