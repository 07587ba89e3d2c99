"""The embedded control plane: serves snapshots over gRPC, aggregated and per type, both variants.

One task per stream and direction; what a stream must send is computed when it can be written, never queued,
so a slow client costs one response of memory and gets the newest state when it catches up. Rules of the
protocol: :mod:`xds.protocol.snapshot`.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Self

from google.protobuf.message import DecodeError

from xds.errors import ConfigError, XdsError
from xds.proto.envoy.config.core.v3.core_pb2 import Node
from xds.proto.envoy.service.discovery.v3.discovery_pb2 import DeltaDiscoveryRequest, DiscoveryRequest
from xds.protocol.snapshot import Answered, DeltaServer, ServerState, Snapshot, SotwServer
from xds.protocol.types import type_of_method

logger = logging.getLogger(__name__)

#: Chooses the key of :meth:`SnapshotServer.publish` for a client; the default is its node id.
KeyOf = Callable[[Node], str]

#: Told each verdict with the key of the client that gave it.
OnAnswer = Callable[[str, Answered], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Caller:
    """Who is at the other end of a call, as far as gRPC knows.

    Attributes:
        metadata: of the call, names in lower case.
        local: it came over a Unix socket, or where only this host's processes can connect in plain text.
    """

    metadata: Mapping[str, str]
    local: bool


class NotAdmitted(XdsError):
    """A caller may not have what it asks for; the text is told to it."""


#: Judges a client when its first request said which node it is; raises :class:`NotAdmitted` to end the stream.
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
        credentials: ``grpc.ssl_server_credentials(...)`` for TCP addresses; Unix sockets stay in plain text.
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
        credentials: Any = None,
        identifier: str = "",
        key_of: KeyOf = lambda node: node.id,
        on_answer: OnAnswer | None = None,
        admit: Admit | None = None,
        unary: Mapping[str, Answer] | None = None,
    ) -> None:
        self.addresses: tuple[str, ...] = tuple(addresses)
        self._credentials = credentials
        self._identifier = identifier
        self._key_of = key_of
        self._on_answer = on_answer
        self._admit = admit
        self._unary = unary or {}
        self._snapshots: dict[str, Snapshot] = {}
        self._clients: set[_Client] = set()
        self._server: Any = None

    async def __aenter__(self) -> Self:
        import grpc.aio

        self._server = grpc.aio.server(
            handlers=[_handlers(self._serve, self._unary, self._caller)],
            options=(
                ("grpc.max_receive_message_length", -1),
                ("grpc.so_reuseport", 0),  # a second server on the port is a mistake, not a second half
                # Clients ping every 30 s; the default takes that for an attack.
                ("grpc.http2.min_recv_ping_interval_without_data_ms", 10_000),
            ),
        )
        self.addresses = tuple(self._bind(address) for address in self.addresses)
        await self._server.start()
        return self

    async def __aexit__(self, *exception: object) -> None:
        await self._server.stop(0)

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

    def _bind(self, address: str) -> str:
        try:
            if self._credentials is None or address.startswith("unix:"):
                port = self._server.add_insecure_port(address)
            else:
                port = self._server.add_secure_port(address, self._credentials)
        except RuntimeError as error:
            raise ServeError(address, str(error)) from error
        return address if address.startswith("unix:") else f"{address.rpartition(':')[0]}:{port}"

    async def _serve(self, only: str | None, delta: bool, requests: AsyncIterator[bytes], context: Any) -> None:
        state: ServerState[Any, Any] = DeltaServer(self._identifier) if delta else SotwServer(self._identifier)
        client = _Client(state)
        self._clients.add(client)
        try:
            async with asyncio.TaskGroup() as reading:
                reading_all = self._read(client, only, delta, requests, self._caller(context))
                reader = reading.create_task(reading_all, name="xds serve read")
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
            import grpc

            logger.warning("xDS client dropped node=%s error=%s", client.key, error)
            refused = isinstance(error, NotAdmitted)
            status = grpc.StatusCode.UNAUTHENTICATED if refused else grpc.StatusCode.INVALID_ARGUMENT
            await context.abort(status, str(error))
        finally:
            self._clients.discard(client)

    def _caller(self, context: Any) -> Caller:
        metadata = {name: value for name, value in context.invocation_metadata() if isinstance(value, str)}
        # Plain text is for addresses that need no proof; where there are credentials, all of TCP has them.
        local = self._credentials is None or context.peer().startswith("unix:")
        return Caller(metadata=metadata, local=local)

    async def _read(
        self, client: _Client, only: str | None, delta: bool, requests: AsyncIterator[bytes], caller: Caller
    ) -> None:
        async for data in requests:
            request = _request(data, delta)
            if only is not None:
                if request.type_url not in ("", only):
                    raise ConfigError(f"this service carries {only}, not {request.type_url}")
                request.type_url = only
            answered = client.state.receive(request)
            if client.key is None and client.state.node is not None:
                if self._admit is not None:
                    self._admit(client.state.node, caller)
                client.key = self._key_of(client.state.node)
                client.state.update(self._snapshots.get(client.key, Snapshot()))
            if answered is not None:
                self._note(client.key or "", answered)
            client.changed.set()
        client.changed.set()

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


def _handlers(
    serve: Callable[[str | None, bool, AsyncIterator[bytes], Any], Awaitable[None]],
    unary: Mapping[str, Answer],
    caller_of: Callable[[Any], Caller],
) -> Any:
    import grpc

    class Handlers(grpc.GenericRpcHandler):  # type: ignore[misc]  # grpc has no annotations
        """Routes the methods of :func:`type_of_method` and the unary ones; others are UNIMPLEMENTED."""

        def service(self, details: Any) -> Any:
            method = type_of_method(details.method)
            if method is None:
                return self._unary(details.method)
            only, delta = method

            async def stream(requests: AsyncIterator[bytes], context: Any) -> None:
                await serve(only, delta, requests, context)

            return grpc.stream_stream_rpc_method_handler(stream)

        @staticmethod
        def _unary(path: str) -> Any:
            answer = unary.get(path)
            if answer is None:
                return None

            async def respond(request: bytes, context: Any) -> bytes:
                try:
                    return answer(request, caller_of(context))
                except NotAdmitted as error:
                    logger.warning("request refused method=%s error=%s", path, error)
                    status, text = grpc.StatusCode.UNAUTHENTICATED, str(error)
                except ConfigError as error:
                    status, text = grpc.StatusCode.INVALID_ARGUMENT, str(error)
                await context.abort(status, text)
                raise AssertionError("abort raises")

            return grpc.unary_unary_rpc_method_handler(respond)

    return Handlers()
