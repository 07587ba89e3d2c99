"""The embedded control plane: serves snapshots over gRPC, aggregated and per type, both variants.

One task per stream and direction; what a stream must send is computed when it can be written, never queued,
so a slow client costs one response of memory and gets the newest state when it catches up. Rules of the
protocol: :mod:`xds.protocol.snapshot`.
"""

import asyncio
import logging
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from typing import Any, Self

from google.protobuf.message import DecodeError

from rpc.aio.server import Handler, Server, ServerCall, unary
from rpc.status import RpcFailed, Status
from rpc.tls import TlsContext
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
        tls: from :func:`rpc.tls.server_tls`, for TCP addresses; Unix sockets stay in plain text.
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
        tls: TlsContext | None = None,
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
        self._stack = AsyncExitStack()

    async def __aenter__(self) -> Self:
        async with AsyncExitStack() as stack:
            server = await stack.enter_async_context(Server(self._route, tls=self._tls))
            bound = []
            for address in self.addresses:
                try:
                    bound.append(await server.listen(address))
                except (OSError, ValueError) as error:
                    raise ServeError(address, _words(error)) from error
            self.addresses = tuple(bound)
            self._stack = stack.pop_all()
        return self

    async def __aexit__(self, *exception: object) -> None:
        await self._stack.aclose()

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

    def _route(self, path: str) -> Handler | None:
        method = type_of_method(path)
        if method is None:
            answer = self._unary.get(path)
            return None if answer is None else _unary(path, answer)
        only, delta = method

        async def stream(call: ServerCall) -> None:
            await self._serve(only, delta, call)

        return stream

    async def _serve(self, only: str | None, delta: bool, call: ServerCall) -> None:
        state: ServerState[Any, Any] = DeltaServer(self._identifier) if delta else SotwServer(self._identifier)
        client = _Client(state)
        self._clients.add(client)
        try:
            async with asyncio.TaskGroup() as reading:
                reader = reading.create_task(self._read(client, only, delta, call), name="xds serve read")
                while not reader.done():
                    await client.changed.wait()
                    client.changed.clear()
                    while responses := state.responses_to_send():
                        for response in responses:
                            await call.write(response.SerializeToString())
        except ExceptionGroup as failures:
            error = failures.exceptions[0]
            if not isinstance(error, (ConfigError, NotAdmitted)):
                raise error from failures
            logger.warning("xDS client dropped node=%s error=%s", client.key, error)
            raise _refusal(error) from failures
        finally:
            self._clients.discard(client)

    async def _read(self, client: _Client, only: str | None, delta: bool, call: ServerCall) -> None:
        while (data := await call.read()) is not None:
            request = _request(data, delta)
            if only is not None:
                if request.type_url not in ("", only):
                    raise ConfigError(f"this service carries {only}, not {request.type_url}")
                request.type_url = only
            answered = client.state.receive(request)
            if client.key is None and client.state.node is not None:
                if self._admit is not None:
                    self._admit(client.state.node, _caller(call))
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


def _words(error: OSError | ValueError) -> str:
    # asyncio's own texts say the address again.
    return os.strerror(error.errno) if isinstance(error, OSError) and error.errno else str(error)


def _caller(call: ServerCall) -> Caller:
    return Caller(metadata=call.head.metadata, local=call.local)


def _refusal(error: ConfigError | NotAdmitted) -> RpcFailed:
    status = Status.UNAUTHENTICATED if isinstance(error, NotAdmitted) else Status.INVALID_ARGUMENT
    return RpcFailed(status, str(error))


def _unary(path: str, answer: Answer) -> Handler:
    def respond(request: bytes, call: ServerCall) -> bytes:
        try:
            return answer(request, _caller(call))
        except NotAdmitted as error:
            logger.warning("request refused method=%s error=%s", path, error)
            raise _refusal(error) from error
        except ConfigError as error:
            raise _refusal(error) from error

    return unary(respond)
