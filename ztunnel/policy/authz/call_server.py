"""Serves unary gRPC calls on asyncio's loop without the gRPC library.

In Python, the library's server takes 250 us for a call, and a tenth of this time is our handler's. This server
takes 80 us, or half of that if several calls arrive in one read (``make bench-authz``). Unlike
:class:`~xds.aio.grpc_server.GrpcServer` it has no streams, no TLS and no compression.
"""

import asyncio
import errno
import os
import socket
import stat
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any, Final, Self

from xds.grpc.address import host_and_port
from xds.grpc.serve_error import ServeError
from ztunnel.policy.authz.calls import Answer, SharedBuffers, UnaryConnection

#: A connection that has been silent for this time is sent a PING. It is closed if it does not answer.
KEEPALIVE_S: Final = 60.0
KEEPALIVE_TIMEOUT_S: Final = 20.0
_PING: Final = b"unaryaio"
_BACKLOG: Final = 1024


class UnaryServer:
    """A server of unary calls; ``async with`` serves.

    Args:
        addresses: ``host:port`` (port 0 picks one; ``0.0.0.0`` and ``[::]`` serve both IP versions) and
            ``unix:/path``; see :attr:`addresses` for the outcome.
        answers: the handlers by path. A handler runs in the loop iteration that reads the call.
        socket_mode: file mode of Unix sockets. None leaves the mode given by the umask.
        replace_files: whether a regular file at a Unix socket's path is replaced. If not, only a stale socket is.
        stop_grace_s: the time for answers to leave after serving stops.

    Raises:
        ServeError: raised on entering. No address is served then.
    """

    def __init__(
        self,
        addresses: Sequence[str],
        answers: Mapping[str, Answer],
        *,
        socket_mode: int | None = None,
        replace_files: bool = False,
        stop_grace_s: float = 1.0,
    ) -> None:
        self.addresses: tuple[str, ...] = tuple(addresses)
        self._answers = {path.encode(): answer for path, answer in answers.items()}
        self._socket_mode = socket_mode
        self._replace_files = replace_files
        self._stop_grace_s = stop_grace_s
        self._servers: list[asyncio.Server] = []
        self._sockets: dict[str, int] = {}
        self._connections: set[_Connection] = set()
        self._buffers = SharedBuffers()

    async def __aenter__(self) -> Self:
        bound = []
        try:
            for address in self.addresses:
                try:
                    bound.append(await self._listen(address))
                except (OSError, ValueError) as error:
                    raise ServeError(address, _words(error)) from error
        except BaseException:
            self._stop_listening()
            raise
        self.addresses = tuple(bound)
        return self

    async def __aexit__(self, *exception: object) -> None:
        self._stop_listening()
        for connection in list(self._connections):
            connection.end()
        if self._connections:
            await asyncio.wait({each.closed for each in self._connections}, timeout=self._stop_grace_s)
        for connection in list(self._connections):
            connection.abort()

    def _stop_listening(self) -> None:
        for server in self._servers:
            server.close()
        self._servers.clear()
        for path, inode in self._sockets.items():
            with suppress(OSError):
                if os.stat(path).st_ino == inode:
                    os.unlink(path)
        self._sockets.clear()

    async def _listen(self, address: str) -> str:
        loop = asyncio.get_running_loop()
        if address.startswith("unix:"):
            sock = self._bound_path(address.removeprefix("unix:"))
            self._servers.append(await loop.create_unix_server(self._connection, sock=sock, backlog=_BACKLOG))
            return address
        host, port = host_and_port(address, least_port=0)
        sock = _bound_port(host, port)
        self._servers.append(await loop.create_server(self._connection, sock=sock, backlog=_BACKLOG))
        return f"{address.rpartition(':')[0]}:{sock.getsockname()[1]}"

    def _bound_path(self, path: str) -> socket.socket:
        """Return a socket that is bound to a path, in place of a stale socket. Another file is replaced only if
        that is configured.

        The socket is first bound to another name in the same folder. That file is then moved to the path. Thus the
        path always has a socket with the right mode.
        """
        with suppress(FileNotFoundError):
            mode = os.stat(path).st_mode
            if not stat.S_ISSOCK(mode) and not (self._replace_files and stat.S_ISREG(mode)):
                raise FileExistsError(errno.EEXIST, "not a socket")
        beside = f"{path}.new"
        with suppress(FileNotFoundError):
            os.unlink(beside)
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            sock.bind(beside)
            if self._socket_mode is not None:
                os.chmod(beside, self._socket_mode)
            sock.listen(_BACKLOG)
            os.rename(beside, path)
            self._sockets[path] = os.stat(path).st_ino
        except BaseException:
            sock.close()
            raise
        return sock

    def _connection(self) -> "_Connection":
        return _Connection(UnaryConnection(self._answers, self._buffers), self._connections)


class _Connection(asyncio.Protocol):
    """The asyncio protocol of one client connection. It moves bytes between the socket and the state machine.

    Attributes:
        closed: done once the socket is closed.
    """

    def __init__(self, machine: UnaryConnection, all_of_them: "set[_Connection]") -> None:
        self.closed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._machine = machine
        self._all = all_of_them
        self._transport: Any = None
        self._writable = True
        self._held = False
        self._reading = True
        self._heard_at = time.monotonic()
        self._timer: asyncio.TimerHandle | None = None
        self._resume: asyncio.Handle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport
        self._all.add(self)
        self._flush()
        self._wait(KEEPALIVE_S)

    def data_received(self, data: bytes) -> None:
        self._advance(data)

    def pause_writing(self) -> None:
        """Stop reading calls, because the client does not read its answers."""
        self._writable = False
        self._set_reading()

    def resume_writing(self) -> None:
        """Read calls again, because the client has read answers."""
        self._writable = True
        self._machine.sent()
        self._flush()
        self._set_reading()

    def connection_lost(self, error: Exception | None) -> None:
        self._all.discard(self)
        for handle in (self._timer, self._resume):
            if handle is not None:
                handle.cancel()
        if not self.closed.done():
            self.closed.set_result(None)

    def end(self) -> None:
        """Send a GOAWAY, so that no more calls are accepted, and close the connection once it was sent."""
        self._machine.engine.goaway()
        self._flush()
        self._transport.close()

    def abort(self) -> None:
        """Close the connection at once, without sending more data."""
        self._transport.abort()

    def _advance(self, data: bytes = b"") -> None:
        engine = self._machine.engine
        self._resume = None
        now_s = time.monotonic()
        if data:
            self._heard_at = now_s
        self._machine.receive_data(data, now_s)
        self._flush()
        if engine.failed:
            self._transport.close()
            return
        # Pause reading from a client that has used up its work budget. Calls beyond the limit of a step wait for
        # the next step.
        self._held = engine.unparsed or engine.pause_s > 0
        if self._held:
            loop = asyncio.get_running_loop()
            self._resume = loop.call_later(engine.pause_s, self._advance)
        self._set_reading()

    def _set_reading(self) -> None:
        reading = self._writable and not self._held
        if reading is self._reading or self._transport.is_closing():
            return
        self._reading = reading
        if reading:
            self._transport.resume_reading()
        else:
            self._transport.pause_reading()

    def _flush(self) -> None:
        output = self._machine.engine.output
        while output:
            views = output.views()
            self._transport.write(bytes(views[0]) if len(views) == 1 else b"".join(views))
            full = output.full
            output.taken()
            if not full:
                return
            self._machine.sent()

    def _wait(self, seconds: float) -> None:
        self._timer = asyncio.get_running_loop().call_later(seconds, self._tick)

    def _tick(self) -> None:
        silent_s = time.monotonic() - self._heard_at
        if silent_s >= KEEPALIVE_S + KEEPALIVE_TIMEOUT_S:
            self._transport.abort()
            return
        if silent_s >= KEEPALIVE_S:
            self._machine.engine.ping(_PING)
            self._flush()
            self._wait(KEEPALIVE_TIMEOUT_S)
            return
        self._wait(KEEPALIVE_S - silent_s)


def _bound_port(host: str, port: int) -> socket.socket:
    """Return a listening socket on the first address of a host, or for ``0.0.0.0`` and ``::`` on every address of
    both IP versions.
    """
    if host in ("0.0.0.0", "::") and socket.has_dualstack_ipv6():
        return socket.create_server(("::", port), family=socket.AF_INET6, backlog=_BACKLOG, dualstack_ipv6=True)
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    family, _, _, _, address = found[0]
    return socket.create_server(address[:2], family=family, backlog=_BACKLOG)


def _words(error: OSError | ValueError) -> str:
    return os.strerror(error.errno) if isinstance(error, OSError) and error.errno else str(error)
