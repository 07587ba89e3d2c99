"""The embedded control plane: serves snapshots over gRPC, aggregated and per type, both variants.

gRPC's own library (``grpc.aio``) serves: its hardening against hostile clients counts here, and its 13 MiB and its
thread do not. No proxy imports this module. It runs on asyncio's loop and on uvloop's.

One task per stream and direction; what a stream must send is computed when it can be written, never queued,
so a slow client costs one response of memory and gets the newest state when it catches up. Rules of the
protocol: :mod:`xds.protocol.snapshot`.
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
from dataclasses import dataclass, field
from typing import Any, Final, Self, TypeAlias, cast

import grpc
import grpc.aio
from google.protobuf.message import DecodeError

from xds.errors import ConfigError, XdsError
from xds.grpc.address import host_and_port
from xds.proto.envoy.config.core.v3.core_pb2 import Node
from xds.proto.envoy.service.discovery.v3.discovery_pb2 import DeltaDiscoveryRequest, DiscoveryRequest
from xds.protocol.snapshot import Answered, DeltaServer, ServerState, Snapshot, SotwServer
from xds.protocol.types import type_of_method

logger = logging.getLogger(__name__)

REQUEST_BYTES: Final = 64 * 1024 * 1024
"""Limit of one request: a client that names 200,000 resources sends a third of it."""

_OPTIONS: Final = (
    ("grpc.max_receive_message_length", REQUEST_BYTES),
    ("grpc.max_concurrent_streams", 1000),
    # By default two servers may share a port and get every other client each.
    ("grpc.so_reuseport", 0),
    # Clients ask at most every 10 s whether the server is there (ours every 30 s), with calls or without: the
    # default takes less than 5 minutes for an attack and answers GOAWAY too_many_pings.
    ("grpc.http2.min_ping_interval_without_data_ms", 10_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.keepalive_time_ms", 60_000),
    ("grpc.keepalive_timeout_ms", 20_000),
)

_Context: TypeAlias = grpc.aio.ServicerContext[bytes, bytes]
_Serve: TypeAlias = Callable[[_Context], Awaitable[None]]

#: Chooses the key of :meth:`SnapshotServer.publish` for a client; the default is its node id.
KeyOf = Callable[[Node], str]

#: Called with each verdict and the key of the client that gave it.
OnAnswer = Callable[[str, Answered], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Caller:
    """The other end of a call, as far as gRPC knows it.

    Attributes:
        metadata: of the call, names in lower case; values under one name are joined with commas.
        local: it came over a Unix socket, or where only this host's processes can connect in plain text.
    """

    metadata: Mapping[str, str]
    local: bool


class NotAdmitted(XdsError):
    """A caller may not have what it asks for; the text is sent to it."""


#: Judges a client when its first request names its node; raises :class:`NotAdmitted` to end the stream.
Admit = Callable[[Node, Caller], None]

#: Answers a request of another service on the same addresses; raises :class:`NotAdmitted` to refuse.
Answer = Callable[[bytes, Caller], bytes]


class ServeError(XdsError):
    """An address cannot be served.

    Attributes:
        address: as given.
    """

    def __init__(self, address: str, reason: str) -> None:
        super().__init__(address, reason)
        self.address = address
        self.reason = reason

    def __str__(self) -> str:
        return f"cannot serve xDS on {self.address}: {self.reason}"


@dataclass(eq=False, slots=True)
class _Client:
    """One stream."""

    state: ServerState[Any, Any]
    key: str | None = None
    changed: asyncio.Event = field(default_factory=asyncio.Event)


class SnapshotServer:
    """Serves each node the snapshot published under its key.

    Args:
        addresses: ``host:port`` (port 0 picks one) and ``unix:/path``; see :attr:`addresses` for the outcome.
            gRPC takes ``0.0.0.0`` and ``[::]`` for one another: either serves IPv4 and IPv6.
        tls: such as :func:`server_tls`, for TCP addresses; Unix sockets stay in plain text.
        identifier: what clients show as ``control_plane.identifier``.
        key_of: may raise ``ConfigError`` for a node it cannot serve.
        on_answer: see :data:`OnAnswer`.
        admit: see :data:`Admit`.
        unary: more methods by gRPC path, each one message in and one out.
    """

    def __init__(
        self,
        addresses: Sequence[str],
        *,
        tls: grpc.ServerCredentials | None = None,
        identifier: str = "",
        key_of: KeyOf = lambda node: node.id,
        on_answer: OnAnswer | None = None,
        admit: Admit | None = None,
        unary: Mapping[str, Answer] | None = None,
    ) -> None:
        self.addresses: tuple[str, ...] = tuple(addresses)
        self._tls = tls
        self._identifier = identifier
        self._key_of = key_of
        self._on_answer = on_answer
        self._admit = admit
        self._unary = unary or {}
        self._snapshots: dict[str, Snapshot] = {}
        self._clients: set[_Client] = set()
        self._server: grpc.aio.Server | None = None
        self._sockets: dict[str, int] = {}

    async def __aenter__(self) -> Self:
        server = new_server(_OPTIONS)
        server.add_generic_rpc_handlers([_Methods(self._route)])
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
            del server  # the error's traceback holds this frame: see __aexit__
            raise
        self.addresses = tuple(bound)
        self._server = server
        return self

    async def __aexit__(self, *exception: object) -> None:
        self._remove_sockets()
        # gRPC's server holds our handlers, and these hold us: without this line the garbage collector would
        # finalize it some time later, in the middle of anything, and gRPC's finalizer has crashed an interpreter
        # so.
        server, self._server = self._server, None
        if server is not None:
            await server.stop(None)

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
        """Serve a Unix socket in place of a stale one; refuse to replace any other file.

        gRPC removes the path it has bound when it stops, even if another server has replaced the file by then.
        So it binds a name beside, which is moved over the wanted one: that also leaves no moment without a
        socket.
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
        os.rename(beside, path)
        self._sockets[path] = os.stat(path).st_ino

    def _remove_sockets(self) -> None:
        for path, inode in self._sockets.items():
            with suppress(OSError):
                if os.stat(path).st_ino == inode:
                    os.unlink(path)
        self._sockets.clear()

    def publish(self, key: str, snapshot: Snapshot) -> None:
        """Replace what the nodes of ``key`` should have; connected ones are sent the difference."""
        self._snapshots[key] = snapshot
        self._tell(key, snapshot)

    def withdraw(self, key: str) -> None:
        """Forget a node; if it is connected its complete types become empty."""
        self._snapshots.pop(key, None)
        self._tell(key, Snapshot())

    def connected(self) -> tuple[str, ...]:
        """Return the keys of all streams that sent a node, one per stream."""
        return tuple(client.key for client in self._clients if client.key is not None)

    def _tell(self, key: str, snapshot: Snapshot) -> None:
        for client in self._clients:
            if client.key == key:
                client.state.update(snapshot)
                client.changed.set()

    def _route(self, path: str) -> _Serve | None:
        method = type_of_method(path)
        if method is not None:
            only, delta = method
            return lambda context: self._serve(only, delta, context)
        answer = self._unary.get(path)
        return None if answer is None else lambda context: self._answer(path, answer, context)

    async def _answer(self, path: str, answer: Answer, context: _Context) -> None:
        request = await _read(context)
        if request is None or await _read(context) is not None:
            await context.abort(grpc.StatusCode.UNIMPLEMENTED, "this method takes exactly one message")
        try:
            response = answer(request, self._caller(context))
        except (ConfigError, NotAdmitted) as error:
            logger.warning("request refused method=%s error=%s", path, error)
            await _refuse(context, error)
        await context.write(response)

    async def _serve(self, only: str | None, delta: bool, context: _Context) -> None:
        state: ServerState[Any, Any] = DeltaServer(self._identifier) if delta else SotwServer(self._identifier)
        client = _Client(state)
        self._clients.add(client)
        try:
            async with asyncio.TaskGroup() as reading:
                reader = reading.create_task(self._read(client, only, delta, context), name="xds serve read")
                while not reader.done():
                    await client.changed.wait()
                    client.changed.clear()
                    while responses := state.responses_to_send():
                        for response in responses:
                            await context.write(response.SerializeToString())
        except ExceptionGroup as failures:
            error = failures.exceptions[0]
            if not isinstance(error, (ConfigError, NotAdmitted)):
                raise error from failures
            logger.warning("xDS client dropped node=%s error=%s", client.key, error)
            await _refuse(context, error)
        finally:
            self._clients.discard(client)

    async def _read(self, client: _Client, only: str | None, delta: bool, context: _Context) -> None:
        while (data := await _read(context)) is not None:
            request = _request(data, delta)
            if only is not None:
                if request.type_url not in ("", only):
                    raise ConfigError(f"this service carries {only}, not {request.type_url}")
                request.type_url = only
            answered = client.state.receive(request)
            if client.key is None and client.state.node is not None:
                if self._admit is not None:
                    self._admit(client.state.node, self._caller(context))
                client.key = self._key_of(client.state.node)
                client.state.update(self._snapshots.get(client.key, Snapshot()))
            if answered is not None:
                self._note(client.key or "", answered)
            client.changed.set()
        client.changed.set()

    def _caller(self, context: _Context) -> Caller:
        metadata: dict[str, str] = {}
        for name, value in context.invocation_metadata() or ():
            text = value if isinstance(value, str) else value.decode("utf-8", "replace")
            metadata[name] = f"{metadata[name]},{text}" if name in metadata else text
        return Caller(metadata=metadata, local=self._tls is None or context.peer().startswith("unix:"))

    def _note(self, key: str, answered: Answered) -> None:
        if answered.error is not None:
            logger.warning(
                "node refused configuration node=%s type=%s version=%s error=%s",
                key,
                answered.type_url,
                answered.version,
                answered.error,
            )
        if self._on_answer is not None:
            self._on_answer(key, answered)


def _request(data: bytes, delta: bool) -> Any:
    try:
        return (DeltaDiscoveryRequest if delta else DiscoveryRequest).FromString(data)
    except DecodeError:
        raise ConfigError("malformed request") from None


class _Methods(grpc.GenericRpcHandler):
    """Every method of the addresses, as streams of bytes both ways."""

    def __init__(self, route: Callable[[str], _Serve | None]) -> None:
        self._route = route

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> Any:
        """See :class:`grpc.GenericRpcHandler`: the handler of a method, None for UNIMPLEMENTED."""
        path = handler_call_details.method
        serve = self._route(path)
        if serve is None:
            return None

        async def handle(_: object, context: _Context) -> None:
            try:
                await serve(context)
            except grpc.aio.AbortError:
                raise  # the call has its status
            except grpc.aio.BaseError:
                # A read or write met the end of its call: the client is gone, or its deadline is over. gRPC
                # cancels this handler for that, too, and which of the two comes first is chance.
                logger.debug("call ended by its client method=%s", path)
            except Exception:
                # Our bug. gRPC would send the exception's text to the client.
                logger.exception("handler failed method=%s", path)
                await context.abort(grpc.StatusCode.INTERNAL, "internal error of the server")

        return grpc.stream_stream_rpc_method_handler(cast(Any, handle))


def new_server(options: Sequence[tuple[str, Any]] = ()) -> grpc.aio.Server:
    """Return a server of gRPC's library that may be stopped and dropped safely.

    At the end of a busy server, grpcio (1.85) sometimes releases its C object once too often. Whatever took that
    place in memory was then finalized as a server: an interpreter crashed, and another found a future there. One
    reference more, which is never released, makes that harmless; a process has one such server, or a few.
    """
    server = grpc.aio.server(options=tuple(options))
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(vars(server)["_server"]))
    return server


def server_tls(key_pem: bytes, chain_pem: bytes) -> grpc.ServerCredentials:
    """Return what a server shows: ``chain_pem``, the leaf first. Its clients prove themselves otherwise."""
    return grpc.ssl_server_credentials([(key_pem, chain_pem)])


async def _read(context: _Context) -> bytes | None:
    """Return the client's next message, None after its last."""
    message: object = await context.read()
    return message if isinstance(message, bytes) else None  # grpc.aio.EOF


async def _refuse(context: _Context, error: ConfigError | NotAdmitted) -> None:
    admitted = not isinstance(error, NotAdmitted)
    code = grpc.StatusCode.INVALID_ARGUMENT if admitted else grpc.StatusCode.UNAUTHENTICATED
    await context.abort(code, str(error))


def _resolved(host: str, port: int) -> list[tuple[int, Any]]:
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    return [(family, address) for family, _, _, _, address in found]


def _probe(family: int, address: Any) -> None:
    """Bind and close: gRPC says that it cannot bind, but not why.

    Raises:
        OSError: the kernel's reason.
    """
    with socket.socket(family, socket.SOCK_STREAM) as sock:
        if family != socket.AF_UNIX:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(address)


def _words(error: OSError | ValueError | RuntimeError) -> str:
    return os.strerror(error.errno) if isinstance(error, OSError) and error.errno else str(error)
