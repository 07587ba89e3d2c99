"""Hubble's gRPC service over the flight recorder: Observer, Peer and Health, for ``hubble`` and ``hubble-relay``.

Import this module only where the service is configured: grpcio takes 13 MiB and a thread. A call reads the ring in
slices, one per loop iteration, filters entries in JSON's types, and creates messages only for matching flows. A
client that follows the flows too slowly gets a LostEvent, and never delays the proxy.
"""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, Final, Literal

import grpc
from google.protobuf.json_format import ParseDict
from google.protobuf.message import DecodeError, Message

from xds.aio.grpc_server import Context, GrpcServer, Serve, mutual_tls, read
from xds.grpc.serve_error import ServeError
from xds.proto.hubble.flow.flow_pb2 import HUBBLE_RING_BUFFER
from xds.proto.hubble.health.health_pb2 import HealthCheckResponse
from xds.proto.hubble.observer.observer_pb2 import (
    GetFlowsRequest,
    GetFlowsResponse,
    GetNamespacesResponse,
    GetNodesResponse,
    Node,
    ServerStatusResponse,
)
from xds.proto.hubble.peer.peer_pb2 import (
    PEER_ADDED,
    PEER_DELETED,
    PEER_UPDATED,
    ChangeNotification,
    ChangeNotificationType,
)
from xds.proto.hubble.relay.relay_pb2 import NODE_CONNECTED
from xds.proto.pool import POOL
from ztunnel import __version__
from ztunnel.proxy.flows.filters import BadFilter, compiled
from ztunnel.proxy.flows.page import More, Shape, before
from ztunnel.proxy.flows.ring import FlowRing, RingCounts
from ztunnel.proxy.flows.settings import HubbleSettings, Peer

log = logging.getLogger(__name__)

#: The most concurrent GetFlows calls. Further calls are refused.
MOST_CALLS: Final = 8
#: The number of newest entries that a call for the newest flows examines first.
_FIRST_LOOK: Final = 64
#: The number of entries handled per loop iteration. One entry takes 0.1 ms.
_SLICE: Final = 8
#: Seconds between two looks for new entries by a call that follows the flows.
_AGAIN_S: Final = 0.25
#: Seconds between two checks whether the list of peers has changed.
_PEERS_S: Final = 2.0
#: Seconds until listening on an address is tried again.
_RETRY_S: Final = 5.0
#: The time within which a client must read a message, in seconds.
_WRITE_S: Final = 30.0
_MOST: Final = 1 << 62
_HOUR_NS: Final = 3600 * 10**9
_MINUTE_NS: Final = 60 * 10**9

Response = Mapping[str, Any]


class Observer:
    """The gRPC service, which :func:`serve` runs.

    Args:
        ring: this process's flight recorder.
        shape: converts an entry to a GetFlowsResponse in JSON's types.
        more: returns the lines of other processes, if there are any.
        node: ``CLUSTER/NODE``.
        settings: the addresses to serve.
        found: returns the discovered peers, in addition to the configured ones.

    Attributes:
        address: the address on which Hubble Relay reaches this node.
    """

    def __init__(
        self,
        ring: FlowRing,
        shape: Shape,
        more: More | None,
        *,
        node: str,
        settings: HubbleSettings,
        found: Callable[[], Iterable[Peer]] = tuple,
    ) -> None:
        self._ring = ring
        self._shape = shape
        self._more = more
        self._settings = settings
        self._found = found
        self.address = settings.address
        self._began_s = time.monotonic()
        self._calls = 0
        self._node = node
        self._methods: dict[str, Callable[[bytes, Context], Awaitable[None]]] = {
            "/observer.Observer/GetFlows": self._get_flows,
            "/observer.Observer/ServerStatus": _answers(self._status),
            "/observer.Observer/GetNodes": _answers(self._nodes),
            "/observer.Observer/GetNamespaces": _answers(self._namespaces),
            "/peer.Peer/Notify": self._notify,
            "/grpc.health.v1.Health/Check": _answers(_health),
        }

    def route(self, method: str) -> Serve | None:
        """Return a method's handler, or None if the method is unknown."""
        serve = self._methods.get(method)
        if serve is None:
            return None

        async def handle(context: Context) -> None:
            await serve(await read(context) or b"", context)

        return handle

    # Flows

    async def _get_flows(self, message: bytes, context: Context) -> None:
        if self._calls >= MOST_CALLS:
            await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, f"{MOST_CALLS} calls for flows are open")
        self._calls += 1
        try:
            request = GetFlowsRequest.FromString(message)
            if request.first and request.follow:
                raise BadFilter("first and follow exclude each other")
            test = compiled(request.whitelist, request.blacklist)
            since_ns, until_ns = _nanoseconds(request, "since"), _nanoseconds(request, "until")
        except (BadFilter, DecodeError) as error:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))
        else:
            await self._serve_flows(request, since_ns, until_ns, test, context)
        finally:
            self._calls -= 1

    async def _serve_flows(
        self,
        request: GetFlowsRequest,
        since_ns: int | None,
        until_ns: int | None,
        test: Callable[[Response], bool],
        context: Context,
    ) -> None:
        number, newest_ns = request.number, time.time_ns()
        until_ns = _MOST if until_ns is None else until_ns
        found: list[Response] = []
        if since_ns is not None or request.first or not (number or request.follow):
            async for time_ns, each in self._read((since_ns or 1) - 1):
                if time_ns > until_ns or (number and len(found) >= number and not request.follow):
                    break
                newest_ns = max(newest_ns, time_ns)
                if test(each["flow"]):
                    found.append(each)
        elif number:
            found, newest_ns = await self._newest(number, until_ns, test)
        for each in found:
            await _write(context, _message(each))

        async def report(lost: int) -> None:
            event = GetFlowsResponse(node_name=self._node)
            event.lost_events.source, event.lost_events.num_events_lost = HUBBLE_RING_BUFFER, lost
            event.time.FromNanoseconds(time.time_ns())
            await _write(context, event)

        while request.follow:
            await asyncio.sleep(_AGAIN_S)
            async for time_ns, each in self._read(newest_ns, report=report):
                newest_ns = max(newest_ns, time_ns)
                if test(each["flow"]):
                    await _write(context, _message(each))

    async def _newest(
        self, number: int, until_ns: int, test: Callable[[Response], bool]
    ) -> tuple[list[Response], int]:
        """Return the newest matching flows, oldest first, and the time of the ring's newest flow.

        Only a few of the newest entries are read first, because they usually suffice.
        """
        last = max(_FIRST_LOOK, number)
        while True:
            newest_ns, seen = time.time_ns(), 0
            found: list[Response] = []
            async for time_ns, each in self._read(0, min(last, _MOST)):
                newest_ns, seen = time_ns, seen + 1
                if time_ns <= until_ns and test(each["flow"]):
                    found.append(each)
            if len(found) >= number or seen < last:
                return found[-number:], newest_ns
            last *= 8

    async def _read(
        self, after_ns: int, last: int = _MOST, report: Callable[[int], Awaitable[None]] | None = None
    ) -> AsyncIterator[tuple[int, Response]]:
        """Yield at most ``last`` connections that ended after a time, oldest first. Lets the event loop run in
        between. If some were overwritten, ``report`` is called with their number: before the first connection
        (the number is then a lower bound), or while the caller reads.
        """
        missed = 0

        def overwritten() -> None:
            nonlocal missed
            missed += 1

        entries = self._ring.entries(after_ns, last, overwritten)
        began_ns, lost = time.time_ns(), self._ring.lost(after_ns)
        lines: list[tuple[int, str]] = []
        if self._more is not None:
            lines, others = await self._more(after_ns, last)
            lost += others.lost
        if lost and report is not None:
            await report(lost)
        if self._more is not None:
            own = [(entry.ended_ns, self._shape(entry)) for entry in entries]
            for both in before([*own, *((at, json.loads(line)) for at, line in lines)], began_ns)[-last:]:
                yield both
            return
        for count, entry in enumerate(entries):
            if count % _SLICE == _SLICE - 1:
                await asyncio.sleep(0)
            number, missed = missed, 0
            if number and report is not None:
                await report(number)
            yield entry.ended_ns, self._shape(entry)
        if missed and report is not None:
            await report(missed)

    # About the service

    async def _status(self) -> Message:
        recent = len([each async for each in self._read(time.time_ns() - _MINUTE_NS)])
        answer = ServerStatusResponse(version=__version__, flows_rate=recent / 60)
        await self._number(answer)
        answer.num_connected_nodes.value = 1
        answer.num_unavailable_nodes.SetInParent()
        return answer

    async def _number(self, answer: ServerStatusResponse | Node) -> None:
        counts = self._ring.counts()
        if self._more is not None:
            counts = RingCounts.added((counts, (await self._more(time.time_ns(), 1)).ring))
        answer.num_flows, answer.max_flows, answer.seen_flows = counts.held, counts.capacity, counts.total
        answer.uptime_ns = int((time.monotonic() - self._began_s) * 1e9)

    async def _nodes(self) -> Message:
        node = Node(name=self._node, version=__version__, address=self.address)
        await self._number(node)
        node.state = NODE_CONNECTED
        node.tls.enabled = bool(self._settings.tls)
        if self._settings.tls:
            node.tls.server_name = self._own.server_name
        return GetNodesResponse(nodes=[node])

    async def _namespaces(self) -> Message:
        found = set()
        async for _, each in self._read(time.time_ns() - _HOUR_NS):
            for side in (each["flow"]["source"], each["flow"]["destination"]):
                if side.get("namespace"):
                    found.add((side.get("cluster_name", ""), side["namespace"]))
        answer = GetNamespacesResponse()
        for cluster, namespace in sorted(found):
            answer.namespaces.add(cluster=cluster, namespace=namespace)
        return answer

    # Peers

    @property
    def _own(self) -> Peer:
        return Peer(name=self._node, address=self.address)

    async def _notify(self, message: bytes, context: Context) -> None:
        """Send all peers, then their changes. The call stays open, because Hubble Relay would reconnect only half
        a minute after its end.
        """
        known: dict[str, Peer] = {}
        while True:
            # A configured peer replaces a discovered peer of the same name.
            found = {each.name: each for each in (self._own, *self._found(), *self._settings.peers)}
            for name, peer in found.items():
                if known.get(name) != peer:
                    await self._announce(context, peer, PEER_UPDATED if name in known else PEER_ADDED)
            for name, peer in known.items():
                if name not in found:
                    await self._announce(context, peer, PEER_DELETED)
            known = found
            await asyncio.sleep(_PEERS_S)

    async def _announce(self, context: Context, peer: Peer, kind: ChangeNotificationType.ValueType) -> None:
        change = ChangeNotification(name=peer.name, address=peer.address, type=kind)
        if self._settings.tls:
            change.tls.server_name = peer.server_name
        await _write(context, change)


def _nanoseconds(request: GetFlowsRequest, name: Literal["since", "until"]) -> int | None:
    """Return a time in a request, or None if it is not set.

    Raises:
        BadFilter: it is outside protobuf's range.
    """
    if not request.HasField(name):
        return None
    try:
        return int(getattr(request, name).ToNanoseconds())
    except ValueError as error:
        raise BadFilter(f"{name}: {error}") from None


def _answers(make: Callable[[], Awaitable[Message]]) -> Callable[[bytes, Context], Awaitable[None]]:
    async def serve(message: bytes, context: Context) -> None:
        await _write(context, await make())

    return serve


async def _health() -> Message:
    return HealthCheckResponse(status=HealthCheckResponse.SERVING)


def _message(found: Response) -> GetFlowsResponse:
    return ParseDict(dict(found), GetFlowsResponse(), descriptor_pool=POOL)


async def _write(context: Context, message: Message) -> None:
    """Send a message.

    Raises:
        TimeoutError: the client did not read the message in time.
    """
    async with asyncio.timeout(_WRITE_S):
        await context.write(message.SerializeToString())


async def serve(observer: Observer, settings: HubbleSettings) -> None:
    """Serve until cancelled. If the address is in use, for example by a predecessor, try again later."""
    reason = ""
    while True:
        try:
            tls = mutual_tls(Path(settings.tls)) if settings.tls else None
            async with GrpcServer([settings.address], route=observer.route, tls=tls, socket_mode=0o600) as server:
                observer.address, reason = server.addresses[0], ""
                log.info("Hubble's API is served address=%s tls=%s", observer.address, tls is not None)
                await asyncio.Event().wait()
        except (ServeError, OSError) as error:
            if str(error) != reason:
                reason = str(error)
                log.error("Hubble's API is not served, retrying error=%s", reason)
            await asyncio.sleep(_RETRY_S)
