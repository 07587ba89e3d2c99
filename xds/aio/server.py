"""The embedded control plane. It serves snapshots over gRPC, on aggregated and per-type streams, in both variants.

Each stream has one task per direction. A response is computed when it can be written, and never queued. So a slow
client costs the memory of one response, and gets the newest state when it reads again. The rules of the protocol
are in :mod:`xds.protocol.snapshot`.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Self

import grpc
from google.protobuf.message import DecodeError

from xds.aio.grpc_server import Context, GrpcServer, Serve, read
from xds.errors import ConfigError, XdsError
from xds.proto.envoy.config.core.v3.core_pb2 import Node
from xds.proto.envoy.service.discovery.v3.discovery_pb2 import DeltaDiscoveryRequest, DiscoveryRequest
from xds.protocol.snapshot import Answered, DeltaServer, ServerState, Snapshot, SotwServer
from xds.protocol.types import type_of_method

logger = logging.getLogger(__name__)

REQUEST_BYTES: Final = 64 * 1024 * 1024
"""The size limit of one request. A request with 200,000 names takes a third of it."""

#: Returns the key of a client's snapshot; see :meth:`SnapshotServer.publish`. The default is the node id.
KeyOf = Callable[[Node], str]

#: Called with each ACK or NACK, and the key of the client that sent it.
OnAnswer = Callable[[str, Answered], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Caller:
    """What gRPC reports about the client of a call.

    Attributes:
        metadata: the call's metadata, names in lower case; values under one name are joined with commas.
        local: whether the call arrived on a Unix socket, or on a plain-text address that only processes of this
            host can reach.
    """

    metadata: Mapping[str, str]
    local: bool


class NotAdmitted(XdsError):
    """The caller is not authorised for its request. The error's text is sent to the caller."""


#: Authorises a client by its first request, which names its node. Raises :class:`NotAdmitted` to end the stream.
Admit = Callable[[Node, Caller], Awaitable[None] | None]

#: Handles a request to another service on the same addresses. Raises :class:`NotAdmitted` to refuse it.
Answer = Callable[[bytes, Caller], Awaitable[bytes] | bytes]


@dataclass(eq=False, slots=True)
class _Client:
    """The server's state for one stream."""

    state: ServerState[Any, Any]
    key: str | None = None
    changed: asyncio.Event = field(default_factory=asyncio.Event)


class SnapshotServer:
    """Serves each node the snapshot that was published under the node's key.

    Args:
        addresses: ``host:port`` (port 0 picks one) and ``unix:/path``; :attr:`addresses` has the chosen ports.
            gRPC treats ``0.0.0.0`` and ``[::]`` alike: both accept IPv4 and IPv6.
        tls: credentials of :func:`~xds.aio.grpc_server.server_tls` for TCP addresses. Unix sockets always use
            plain text.
        identifier: the server's name, which clients print as ``control_plane.identifier``.
        key_of: see :data:`KeyOf`. It can raise ``ConfigError`` for a node without a snapshot.
        on_answer: see :data:`OnAnswer`.
        admit: see :data:`Admit`.
        unary: additional unary methods by gRPC path.
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
        self._secure = tls is not None
        self._server = GrpcServer(
            addresses,
            route=self._route,
            tls=tls,
            options=(("grpc.max_receive_message_length", REQUEST_BYTES),),
        )
        self._identifier = identifier
        self._key_of = key_of
        self._on_answer = on_answer
        self._admit = admit
        self._unary = unary or {}
        self._snapshots: dict[str, Snapshot] = {}
        self._clients: set[_Client] = set()

    @property
    def addresses(self) -> tuple[str, ...]:
        """The addresses of the server, with the ports that the kernel chose."""
        return self._server.addresses

    async def __aenter__(self) -> Self:
        await self._server.__aenter__()
        return self

    async def __aexit__(self, *exception: object) -> None:
        await self._server.__aexit__(*exception)

    def publish(self, key: str, snapshot: Snapshot) -> None:
        """Replace the snapshot of the nodes with this ``key``. Connected nodes get the differences."""
        self._snapshots[key] = snapshot
        self._tell(key, snapshot)

    def withdraw(self, key: str) -> None:
        """Remove the snapshot of a key. Connected clients then get empty responses for types with complete
        responses.
        """
        self._snapshots.pop(key, None)
        self._tell(key, Snapshot())

    def connected(self) -> tuple[str, ...]:
        """Return one key for each stream whose client has sent its node."""
        return tuple(client.key for client in self._clients if client.key is not None)

    def _tell(self, key: str, snapshot: Snapshot) -> None:
        for client in self._clients:
            if client.key == key:
                client.state.update(snapshot)
                client.changed.set()

    def _route(self, path: str) -> Serve | None:
        method = type_of_method(path)
        if method is not None:
            only, delta = method
            return lambda context: self._serve(only, delta, context)
        answer = self._unary.get(path)
        return None if answer is None else lambda context: self._answer(path, answer, context)

    async def _answer(self, path: str, answer: Answer, context: Context) -> None:
        request = await read(context)
        if request is None or await read(context) is not None:
            await context.abort(grpc.StatusCode.UNIMPLEMENTED, "this method takes exactly one message")
        try:
            answered = answer(request, self._caller(context))
            response = answered if isinstance(answered, bytes) else await answered
        except (ConfigError, NotAdmitted) as error:
            logger.warning("request refused method=%s error=%s", path, error)
            await _refuse(context, error)
        await context.write(response)

    async def _serve(self, only: str | None, delta: bool, context: Context) -> None:
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

    async def _read(self, client: _Client, only: str | None, delta: bool, context: Context) -> None:
        while (data := await read(context)) is not None:
            request = _request(data, delta)
            if only is not None:
                if request.type_url not in ("", only):
                    raise ConfigError(f"this service carries {only}, not {request.type_url}")
                request.type_url = only
            answered = client.state.receive(request)
            if client.key is None and client.state.node is not None:
                if self._admit is not None:
                    judged = self._admit(client.state.node, self._caller(context))
                    if judged is not None:
                        await judged
                client.key = self._key_of(client.state.node)
                client.state.update(self._snapshots.get(client.key, Snapshot()))
            if answered is not None:
                self._note(client.key or "", answered)
            client.changed.set()
        client.changed.set()

    def _caller(self, context: Context) -> Caller:
        metadata: dict[str, str] = {}
        for name, value in context.invocation_metadata() or ():
            text = value if isinstance(value, str) else value.decode("utf-8", "replace")
            metadata[name] = f"{metadata[name]},{text}" if name in metadata else text
        return Caller(metadata=metadata, local=not self._secure or context.peer().startswith("unix:"))

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


async def _refuse(context: Context, error: ConfigError | NotAdmitted) -> None:
    admitted = not isinstance(error, NotAdmitted)
    code = grpc.StatusCode.INVALID_ARGUMENT if admitted else grpc.StatusCode.UNAUTHENTICATED
    await context.abort(code, str(error))
