"""gRPC servers on TCP addresses and Unix sockets. They replace stale sockets, and log exceptions of handlers.

This module uses the gRPC library, because hardening against hostile clients matters here more than the library's
13 MiB and its thread. The server of ``ext_authz``, where speed matters, does not use the library. No proxy imports
this module. It works with the event loops of asyncio and uvloop. Messages are bytes.
"""

import asyncio
import ctypes
import errno
import logging
import os
import socket
import stat
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Final, Self, TypeAlias, cast

import grpc
import grpc.aio

from xds.grpc.address import host_and_port
from xds.grpc.serve_error import ServeError

logger = logging.getLogger(__name__)

OPTIONS: Final = (
    ("grpc.max_concurrent_streams", 1000),
    # Disabled, because gRPC by default lets two servers share a port, which would split the clients between them.
    ("grpc.so_reuseport", 0),
    # Permits a PING every 10 s (our own clients send one every 30 s), with or without open calls. By default, gRPC
    # treats intervals below 5 minutes as an attack and answers with GOAWAY too_many_pings.
    ("grpc.http2.min_ping_interval_without_data_ms", 10_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.keepalive_time_ms", 60_000),
    ("grpc.keepalive_timeout_ms", 20_000),
)

#: The time that cancelled streams have to end.
_ENDED_S: Final = 1.0

Context: TypeAlias = grpc.aio.ServicerContext[bytes, bytes]

#: The handler of a call, which reads and writes messages through the context.
Serve: TypeAlias = Callable[[Context], Awaitable[None]]

#: Returns the handler of a method such as ``/package.Service/Method``, or None for an unknown method.
Route: TypeAlias = Callable[[str], Serve | None]

#: Answers a unary call: one request message, one response message. It must not block.
Answer: TypeAlias = Callable[[bytes], bytes]


class GrpcServer:
    """A gRPC server, which serves inside ``async with``.

    Args:
        addresses: ``host:port`` (port 0 picks one) and ``unix:/path``; :attr:`addresses` has the chosen ports.
            gRPC treats ``0.0.0.0`` and ``[::]`` alike: both accept IPv4 and IPv6.
        route: returns the handlers of streaming methods.
        unary: methods with one request message and one response message, by path. Unary methods are three times as
            fast as streams.
        tls: credentials of :func:`server_tls` for TCP addresses. Unix sockets always use plain text.
        socket_mode: file mode of Unix sockets. None leaves the mode given by the umask.
        options: further options of grpcio, beside :data:`OPTIONS`.
        stop_grace_s: the time for open calls to end after the server stops. None ends them at once.

    Raises:
        ServeError: raised on entering, if an address cannot be used. The server then listens on no address.
    """

    def __init__(
        self,
        addresses: Sequence[str],
        *,
        route: Route = lambda path: None,
        unary: Mapping[str, Answer] | None = None,
        tls: grpc.ServerCredentials | None = None,
        socket_mode: int | None = None,
        options: Sequence[tuple[str, Any]] = (),
        stop_grace_s: float | None = None,
    ) -> None:
        self.addresses: tuple[str, ...] = tuple(addresses)
        self._handler = _Methods(route, unary or {})
        self._tls = tls
        self._socket_mode = socket_mode
        self._options = (*OPTIONS, *options)
        self._stop_grace_s = stop_grace_s
        self._server: grpc.aio.Server | None = None
        self._sockets: dict[str, int] = {}

    async def __aenter__(self) -> Self:
        server = new_server(self._options)
        server.add_generic_rpc_handlers([self._handler])
        try:
            bound = []
            for address in self.addresses:
                try:
                    bound.append(self._listen(server, address))
                except (OSError, ValueError, RuntimeError) as error:
                    raise ServeError(address, _words(error)) from error
            await server.start()
        except BaseException:
            self._remove_sockets()
            await server.stop(None)
            del server  # the error's traceback refers to this frame: see __aexit__
            raise
        self.addresses = tuple(bound)
        self._server = server
        return self

    async def __aexit__(self, *exception: object) -> None:
        self._remove_sockets()
        # This breaks a reference cycle: gRPC's server refers to our handlers, and they refer to this object.
        # Otherwise the garbage collector would finalize gRPC's server at an arbitrary time, which has crashed an
        # interpreter.
        server, self._server = self._server, None
        if server is not None:
            await server.stop(self._stop_grace_s)
            # Wait for the streams that gRPC has cancelled. If the event loop ended first, it would cancel them a
            # second time, and gRPC would report each as an error with a traceback.
            if self._handler.running:
                await asyncio.wait(self._handler.running, timeout=_ENDED_S)

    def _listen(self, server: grpc.aio.Server, address: str) -> str:
        if address.startswith("unix:"):
            self._listen_on_path(server, address.removeprefix("unix:"))
            return address
        for each in _resolved(*host_and_port(address, least_port=0)):
            _probe(*each)
        if self._tls is None:
            port = server.add_insecure_port(address)
        else:
            port = server.add_secure_port(address, self._tls)
        return f"{address.rpartition(':')[0]}:{port}"

    def _listen_on_path(self, server: grpc.aio.Server, path: str) -> None:
        """Listen on a Unix socket. A stale socket at the path is replaced, any other file is not.

        gRPC removes its bound path when it stops, even if another server has replaced the file. So gRPC binds
        another name in the same folder, and that socket is then renamed to the path. Another benefit is that the
        socket at the path always has the right mode.
        """
        with suppress(FileNotFoundError):
            if not stat.S_ISSOCK(os.stat(path).st_mode):
                raise FileExistsError(errno.EEXIST, "not a socket")
        beside = f"{path}.new"
        with suppress(FileNotFoundError):
            os.unlink(beside)
        _probe(socket.AF_UNIX, beside)
        os.unlink(beside)
        server.add_insecure_port(f"unix:{beside}")
        if self._socket_mode is not None:
            os.chmod(beside, self._socket_mode)
        os.rename(beside, path)
        self._sockets[path] = os.stat(path).st_ino

    def _remove_sockets(self) -> None:
        for path, inode in self._sockets.items():
            with suppress(OSError):
                if os.stat(path).st_ino == inode:
                    os.unlink(path)
        self._sockets.clear()


class _Methods(grpc.GenericRpcHandler):
    """Tells gRPC which methods the server offers. Requests and responses are bytes."""

    def __init__(self, route: Route, unary: Mapping[str, Answer]) -> None:
        self._route = route
        self._unary = unary
        self.running: set[asyncio.Task[Any]] = set()

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> Any:
        """Return the handler of a method. None makes gRPC answer UNIMPLEMENTED."""
        path = handler_call_details.method
        answer = self._unary.get(path)
        if answer is not None:
            return _unary_handler(path, answer)
        serve = self._route(path)
        return None if serve is None else _stream_handler(path, serve, self.running)


def _unary_handler(path: str, answer: Answer) -> Any:
    async def handle(message: bytes, context: Context) -> bytes:
        try:
            return answer(message)
        except Exception:
            logger.exception("handler failed method=%s", path)
            await context.abort(grpc.StatusCode.INTERNAL, "internal error of the server")

    return grpc.unary_unary_rpc_method_handler(cast(Any, handle))


def _stream_handler(path: str, serve: Serve, running: set[asyncio.Task[Any]]) -> Any:
    async def handle(_: object, context: Context) -> None:
        task = asyncio.current_task()
        if task is not None:
            running.add(task)
            task.add_done_callback(running.discard)
        try:
            await serve(context)
        except grpc.aio.AbortError:
            raise  # the call already has its status
        except grpc.aio.BaseError:
            # A read or write failed because the call has ended: the client has disconnected, or the deadline has
            # passed. gRPC also cancels this handler then, before or after this error.
            logger.debug("call ended by its client method=%s", path)
        except Exception:
            # This exception is a bug of ours. It is not passed on, because gRPC would send its text to the client.
            logger.exception("handler failed method=%s", path)
            await context.abort(grpc.StatusCode.INTERNAL, "internal error of the server")

    return grpc.stream_stream_rpc_method_handler(cast(Any, handle))


def new_server(options: Sequence[tuple[str, Any]] = ()) -> grpc.aio.Server:
    """Return a server of gRPC's library that can be stopped and dropped safely.

    At the end of a busy server, grpcio (1.85) sometimes releases its C object once too often. Another object can
    then occupy the same memory and be finalized as a server, which has crashed an interpreter. One additional
    reference, never released, prevents that. A process has only a few such servers.
    """
    server = grpc.aio.server(options=tuple(options))
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(vars(server)["_server"]))
    return server


def server_tls(key_pem: bytes, chain_pem: bytes) -> grpc.ServerCredentials:
    """Return server credentials with the certificates ``chain_pem``, leaf first. Client certificates are not
    requested.
    """
    return grpc.ssl_server_credentials([(key_pem, chain_pem)])


def mutual_tls(folder: Path) -> grpc.ServerCredentials:
    """Return server credentials from a folder with the files of a mounted Secret: ``tls.key``, ``tls.crt``, and
    ``ca.crt`` for clients.

    Each handshake reads the files again. While they are unusable, the last good ones stay in use.

    Raises:
        OSError: a file cannot be read.
    """

    def configured() -> grpc.ServerCertificateConfiguration:
        key, chain, clients = ((folder / name).read_bytes() for name in ("tls.key", "tls.crt", "ca.crt"))
        return grpc.ssl_server_certificate_configuration([(key, chain)], root_certificates=clients)

    last = configured()

    def current() -> grpc.ServerCertificateConfiguration:
        nonlocal last
        try:
            last = configured()
        except OSError as error:
            logger.error("certificates are not read again folder=%s error=%s", folder, _words(error))
        return last

    return grpc.dynamic_ssl_server_credentials(last, current, require_client_authentication=True)


async def read(context: Context) -> bytes | None:
    """Return the client's next message, or None after the last one."""
    message: object = await context.read()
    return message if isinstance(message, bytes) else None  # grpc.aio.EOF


def _resolved(host: str, port: int) -> list[tuple[int, Any]]:
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    return [(family, address) for family, _, _, _, address in found]


def _probe(family: int, address: Any) -> None:
    """Bind an address and close it again, because gRPC does not report why it cannot bind.

    Raises:
        OSError: the kernel's reason.
    """
    with socket.socket(family, socket.SOCK_STREAM) as sock:
        if family != socket.AF_UNIX:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(address)


def _words(error: OSError | ValueError | RuntimeError) -> str:
    return os.strerror(error.errno) if isinstance(error, OSError) and error.errno else str(error)
