"""Configuration from a control plane over gRPC: one aggregated stream, or one stream per subscription.

:class:`AdsClient` carries all types on one stream. :class:`PerTypeClient` opens the type's own service once per
subscription, like Envoy does for SDS from a local agent. Both are sources as described in
:mod:`xds.protocol.resource`. The rules of the protocol are in :mod:`xds.protocol.sotw` and
:mod:`xds.protocol.delta`.

``async with`` owns the tasks. One task keeps the stream open (connect, read, write, wait, repeat). One task per
type delivers updates to receivers, so a warming receiver delays the ACK of its own type only. Responses for a busy
type are merged, and need no more memory than the configuration itself.

These tasks raise no exception except for cancellation. If the control plane is unreachable or breaks its protocol,
they try again after a back-off. They do the same after a bug of our own, which is logged with its traceback.
Meanwhile the proxy serves with its current configuration.

While the control plane is unreachable, the last configuration stays current. One log line reports the loss and
what to check, and a second line the recovery.
"""

import asyncio
import logging
import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from typing import Any, Self

from google.protobuf.message import DecodeError

from xds.aio.channel import Call, Channel, Keepalive
from xds.aio.feed import Feed, GrpcSubscription
from xds.errors import XdsError
from xds.grpc.status import RpcFailed, Status
from xds.proto.envoy.config.core.v3.core_pb2 import Node
from xds.proto.envoy.service.discovery.v3.discovery_pb2 import DeltaDiscoveryResponse, DiscoveryResponse
from xds.protocol.backoff import JitteredBackoff, StreamEnd, stream_end
from xds.protocol.client_state import ENVOY, ClientOptions, ClientState, Dialect, Received, Refused
from xds.protocol.delta import DeltaClient
from xds.protocol.resource import Receive
from xds.protocol.sotw import SotwClient
from xds.protocol.types import method_path

logger = logging.getLogger(__name__)

#: Makes a gRPC channel. The caller's ``async with`` opens and closes it.
Connect = Callable[[], AbstractAsyncContextManager[Channel]]

#: Returns the metadata of a new stream, such as a bearer token read from its file.
Metadata = Callable[[], Sequence[tuple[str, str]]]

#: Responses longer than this are unpacked in steps. Unpacking this many bytes takes a few milliseconds.
_BIG_BYTES = 2**20

#: A stream that was open for this long has worked, even without a response. Servers refuse a stream sooner.
_QUIET_S = 60.0


class StreamBroken(XdsError):
    """The stream to the control plane has ended.

    Attributes:
        reason: gRPC's status and its text, or our own text.
        answered: whether the stream had received a message.
        end: the reason in the form of metrics and back-off.
    """

    def __init__(self, reason: str, *, answered: bool, end: StreamEnd = StreamEnd.ERROR) -> None:
        super().__init__(reason, answered)
        self.reason = reason
        self.answered = answered
        self.end = end

    def __str__(self) -> str:
        return self.reason


@dataclass(slots=True)
class ControlPlaneStats:
    """The statistics that Envoy publishes as ``control_plane.*``. Its counter of rate limiting stays 0 here.

    Attributes:
        connected_state: 1 while a stream is open, even if the server does not answer and then refuses it.
        working: whether the current stream has received a response.
        lost_at_s: the loop's time when the last working stream ended, or a stream that was open for a minute. None
            before the first of these, and while a stream works.
        received_at_s: the loop's time of the last response. None before the first one.
        ended: the number of ended streams, by reason.
    """

    connected_state: int = 0
    pending_requests: int = 0
    rate_limit_enforced: int = 0
    identifier: str = ""
    lost_at_s: float | None = None
    working: bool = False
    received_at_s: float | None = None
    ended: dict[StreamEnd, int] = field(default_factory=lambda: dict.fromkeys(StreamEnd, 0))


def connect_to(target: str, *, response_limit_bytes: int | None = None) -> Connect:
    """Return a function that opens a plain-text channel to ``host:port`` or ``unix:/path``.

    By default, the size of responses is not limited, like in Envoy.

    Raises:
        ValueError: the target has another form.
    """

    keepalive = Keepalive()

    def connect() -> Channel:
        return Channel(target, message_limit_bytes=response_limit_bytes, keepalive=keepalive)

    connect()  # report an invalid target now, not at the first attempt
    return connect


class _Stream:
    """One xDS stream, reopened after each failure, and the feeds that deliver the updates of its types."""

    def __init__(
        self,
        connect: Connect,
        path: str,
        state: ClientState[Any, Any],
        response_type: type[DiscoveryResponse] | type[DeltaDiscoveryResponse],
        name: str,
        metadata: Metadata | None,
        backoff: JitteredBackoff,
        *,
        keeps_bodies: bool = True,
    ) -> None:
        self._keeps_bodies = keeps_bodies
        self.state = state
        self.stats = ControlPlaneStats()
        self._connect = connect
        self._path = path
        self._response_type = response_type
        self._name = name
        self._metadata = metadata
        self._backoff = backoff
        self._feeds: dict[str, Feed] = {}
        self._tasks: asyncio.TaskGroup | None = None
        self._wake = asyncio.Event()
        self._expiry: asyncio.TimerHandle | None = None
        self._away_since_s: float | None = None
        self._away_because = ""
        self._answered = False
        self._opened_s = 0.0
        self._call: Call | None = None

    def subscribe(
        self,
        type_url: str,
        names: Iterable[str] | None,
        receive: Receive,
        initial_fetch_timeout_s: float,
        on_initial_timeout: Callable[[], None] | None,
    ) -> GrpcSubscription:
        feed = self._feeds.get(type_url)
        if feed is None:
            feed = self._feeds[type_url] = Feed(type_url, self.state, self.wake, keeps_bodies=self._keeps_bodies)
            if self._tasks is not None:
                self._tasks.create_task(self._deliver(feed), name=f"xds {self._name} {type_url}")
        subscription = GrpcSubscription(feed, receive, initial_fetch_timeout_s, on_initial_timeout)
        feed.set(subscription, names)
        return subscription

    def ask(self, type_url: str, names: Iterable[str]) -> None:
        assert isinstance(self.state, DeltaClient)
        self.state.ask(type_url, names)
        self.wake()

    def wake(self) -> None:
        """Wake the task that sends requests, because requested names have changed or a receiver has returned."""
        self._wake.set()
        self._arm_expiry()

    async def run(self) -> None:
        """Keep the stream open, with a new one after each failure, until cancelled."""
        try:
            async with asyncio.TaskGroup() as self._tasks:
                for type_url, feed in self._feeds.items():
                    self._tasks.create_task(self._deliver(feed), name=f"xds {self._name} {type_url}")
                await self._keep_connected()
        finally:
            self._tasks = None
            if self._expiry is not None:
                self._expiry.cancel()
            for feed in self._feeds.values():
                for subscription in feed.subscriptions():
                    subscription.initial_fetch.over()

    async def _deliver(self, feed: Feed) -> None:
        while True:
            try:
                await feed.deliver_forever()
            except Exception:
                # This error is a bug of ours. The current response got neither an ACK nor a NACK, and the server
                # can be waiting for one. So a new stream is opened after a back-off, beginning with the current
                # state.
                logger.exception("delivery of configuration failed target=%s", self._name)
                if self._call is not None:
                    self._call.cancel()

    async def _keep_connected(self) -> None:
        while True:
            await self._wake.wait()  # without subscriptions no stream is opened
            try:
                await self._stream_until_it_ends()
            except Exception:
                # This error is a bug of ours in the handling of a stream's end. It must not leave this task: the
                # task group and then the process would end, instead of continuing with the current configuration.
                logger.exception("the end of a stream was not handled target=%s", self._name)
            self._wake.set()
            await asyncio.sleep(self._backoff.next(random.random()))

    async def _stream_until_it_ends(self) -> None:
        try:
            await self._one_stream()
        except Exception as error:
            task = asyncio.current_task()
            if task is not None and task.cancelling():
                # If the task is cancelled and the call fails in the same loop iteration, the read raises only the
                # failure.
                raise asyncio.CancelledError from error
            broken = self._why(error)
            self.stats.ended[broken.end] += 1
            self._backoff.ended(broken.end)
            self._lost(broken)
        finally:
            self.state.stream_closed()
            self.stats.working = False
            if self.stats.connected_state:
                self.stats.connected_state = 0
                # A stream that the server refuses at once, for example because of an expired token, does not end
                # the time without a control plane. A server without news can send no response at all.
                now_s = asyncio.get_running_loop().time()
                if self._answered or now_s - self._opened_s >= _QUIET_S:
                    self.stats.lost_at_s = now_s

    def _why(self, error: Exception) -> StreamBroken:
        if isinstance(error, StreamBroken):
            return error
        if isinstance(error, XdsError):
            return _unreachable(error)
        # This error is a bug of ours or of a library. It is logged, because a control plane client must never end
        # the process.
        logger.error("stream to the control plane failed target=%s", self._name, exc_info=error)
        return StreamBroken(f"internal error: {type(error).__name__}", answered=self._answered)

    async def _one_stream(self) -> None:
        self._answered = False
        async with self._connect() as channel:
            try:
                metadata = () if self._metadata is None else tuple(self._metadata())
            except (OSError, XdsError) as error:  # a token file that is unreadable now can be readable later
                raise _unreachable(error) from error
            try:
                call = await channel.call(self._path, metadata=metadata)
            except RpcFailed as failure:
                raise self._broken(failure) from failure
            self._call = call
            self._opened_s = asyncio.get_running_loop().time()
            self.state.stream_opened()
            # A TaskGroup is not used here. Before Python 3.13, if a child fails, the parent can stay marked as
            # cancelled (Task.cancelling), and the caller relies on this mark.
            writer = asyncio.get_running_loop().create_task(self._write(call), name=f"xds {self._name} write")
            writer.add_done_callback(lambda _: call.cancel())  # a writer that failed ends the reader
            try:
                await self._read(call)
            except RpcFailed as failure:
                raise self._broken(failure) from failure
            except DecodeError as error:
                raise StreamBroken("the server sent a malformed response", answered=self._answered) from error
            finally:
                self._call = None
                call.cancel()
                writer.cancel()
                await asyncio.wait([writer])
                if not writer.cancelled():
                    writer.result()

    async def _read(self, call: Call) -> None:
        while (data := await call.read()) is not None:
            self._answered = self.stats.working = True
            self.stats.lost_at_s = None
            self._back()
            if len(data) > _BIG_BYTES and isinstance(self.state, DeltaClient):
                await self._receive_big(data, self.state)
            else:
                self._receive(data)
        raise self._broken(RpcFailed(Status.OK))

    def _broken(self, failure: RpcFailed) -> StreamBroken:
        end = stream_end(failure.status.name, failure.details, answered=self._answered)
        return StreamBroken(str(failure), answered=self._answered, end=end)

    async def _write(self, call: Call) -> None:
        while True:
            self._wake.clear()
            for feed in self._feeds.values():
                feed.tell()
            requests = self.state.requests_to_send()
            self.stats.pending_requests = len(requests)
            for request in requests:
                logger.debug("> %s", _Shown(request))
                try:
                    await call.write(request.SerializeToString())
                except RpcFailed:
                    await asyncio.Event().wait()  # the call has ended; the reader finds out why and cancels this
                self.stats.pending_requests -= 1
                self.stats.connected_state = 1
            await self._wake.wait()

    def _receive(self, data: bytes) -> None:
        response = self._response_type.FromString(data)
        logger.debug("< %s", _Shown(response))
        self._happened(self.state.receive(response, asyncio.get_running_loop().time()))

    async def _receive_big(self, data: bytes, state: DeltaClient) -> None:
        """Unpack a large response in steps. Between the steps, the event loop runs other tasks."""
        event: Received | Refused | None = None
        for event in state.receive_in_steps(data, asyncio.get_running_loop().time()):  # noqa: B007 - the last
            await asyncio.sleep(0)
        self._happened(event)

    def _happened(self, event: Received | Refused | None) -> None:
        self.stats.identifier = self.state.control_plane
        self.stats.received_at_s = asyncio.get_running_loop().time()
        if isinstance(event, Received) and event.update.type_url in self._feeds:
            self._feeds[event.update.type_url].arrived(event)
        elif isinstance(event, Refused) and event.type_url in self._feeds:
            self._feeds[event.type_url].refused(event)
        self.wake()

    def _arm_expiry(self) -> None:
        if self._expiry is not None:
            self._expiry.cancel()
        at_s = self.state.next_expiry_s()
        self._expiry = None if at_s is None else asyncio.get_running_loop().call_at(at_s, self._expire)

    def _expire(self) -> None:
        self._expiry = None
        for update in self.state.expire(asyncio.get_running_loop().time()):
            self._feeds[update.type_url].expired(update)
        self._arm_expiry()

    def _lost(self, broken: StreamBroken) -> None:
        for feed in self._feeds.values():
            for subscription in feed.subscriptions():
                subscription.stats.update_failure += 1
                subscription.stats.update_attempt += 1
        if broken.answered:
            # The first end of a stream gets only a short log line, because servers end streams to spread their
            # load. A second failure is logged in detail.
            logger.info("control plane ended the stream target=%s reason=%s", self._name, broken)
        elif self._away_since_s is None:
            self._away_since_s = asyncio.get_running_loop().time()
            logger.warning(
                "control plane does not answer target=%s error=%s; the last configuration stays active and "
                "attempts continue. Check that it runs, that name and port are right, and that its certificate or "
                "the socket's permissions let this node in",
                self._name,
                broken,
            )
        elif str(broken) != self._away_because:
            # The error differs from the last logged one. It is logged, too: after one fault is fixed, the next
            # must be visible.
            logger.warning("control plane still does not answer target=%s error=%s", self._name, broken)
        self._away_because = str(broken)

    def _back(self) -> None:
        self._backoff.reset()
        if self._away_since_s is not None:
            away_s = asyncio.get_running_loop().time() - self._away_since_s
            self._away_since_s = None
            logger.info("control plane is back target=%s away=%.1fs", self._name, away_s)


def _unreachable(error: Exception) -> StreamBroken:
    return StreamBroken(str(error), answered=False, end=StreamEnd.CONNECTION_ERROR)


class _Shown:
    """Describes a request or response for the debug log, without resource bodies. Formatted only if the line is
    written.
    """

    def __init__(self, message: Any) -> None:
        self._message = message

    def __str__(self) -> str:
        shown = [f"{type(self._message).__name__} type={self._message.type_url}"]
        for descriptor, value in self._message.ListFields():
            if descriptor.name in ("type_url", "node"):
                continue
            if descriptor.name == "error_detail":
                value = repr(value.message)
            elif descriptor.is_repeated:
                value = len(value)
            shown.append(f"{descriptor.name}={value}")
        return " ".join(shown).replace("\n", " ")


def _state(
    options: ClientOptions, *, delta: bool
) -> tuple[ClientState[Any, Any], type[DiscoveryResponse] | type[DeltaDiscoveryResponse]]:
    if delta:
        return DeltaClient(options), DeltaDiscoveryResponse
    return SotwClient(options), DiscoveryResponse


class AdsClient:
    """A client that requests all resource types on one aggregated stream. Implements
    :class:`xds.protocol.resource.ResourceSource`.

    Subscribe before or inside ``async with``, but always with a running event loop. Leaving ``async with`` cancels
    the stream, and no receiver is called afterwards.

    Args:
        target: ``host:port`` or ``unix:/path``.
        node: sent in the first request of each stream, or in every request with ``node_on_first_only=False``.
        delta: whether to use the incremental variant.
        metadata: called for each new stream. Its errors (``OSError``, ``XdsError``) count as errors of the
            connection.
        dialect: the control plane's dialect. :data:`xds.protocol.client_state.ISTIO` needs ``delta``.
        connect: opens the channel if it is not plain text. It is called for each attempt. Its ``XdsError`` counts
            as an error of the connection.
    """

    def __init__(
        self,
        target: str,
        node: Node,
        *,
        delta: bool = False,
        metadata: Metadata | None = None,
        node_on_first_only: bool = True,
        backoff: JitteredBackoff | None = None,
        dialect: Dialect = ENVOY,
        connect: Connect | None = None,
    ) -> None:
        options = ClientOptions(node=node, node_on_first_only=node_on_first_only, dialect=dialect)
        state, response_type = _state(options, delta=delta)
        self._stream = _Stream(
            connect or connect_to(target, response_limit_bytes=dialect.response_limit_bytes),
            method_path(None, delta=delta),
            state,
            response_type,
            target,
            metadata,
            backoff or JitteredBackoff(),
            keeps_bodies=dialect.keeps_bodies,
        )
        self._tasks = asyncio.TaskGroup()
        self._task: asyncio.Task[None] | None = None

    @property
    def stats(self) -> ControlPlaneStats:
        """The statistics ``control_plane.*`` of this stream."""
        return self._stream.stats

    async def __aenter__(self) -> Self:
        await self._tasks.__aenter__()
        self._task = self._tasks.create_task(self._stream.run(), name="xds ads")
        return self

    async def __aexit__(self, *exception: Any) -> None:
        if self._task is not None:
            self._task.cancel()
        await self._tasks.__aexit__(*exception)

    def subscribe(
        self,
        type_url: str,
        names: Iterable[str] | None,
        receive: Receive,
        *,
        initial_fetch_timeout_s: float = 15.0,
        on_initial_timeout: Callable[[], None] | None = None,
    ) -> GrpcSubscription:
        return self._stream.subscribe(type_url, names, receive, initial_fetch_timeout_s, on_initial_timeout)

    def resume(self, type_url: str, versions: Mapping[str, str]) -> None:
        """Store the versions, by name, of the resources that an earlier process has received (delta only).

        Called before :meth:`subscribe`. The receiver already has the resources.
        """
        assert isinstance(self._stream.state, DeltaClient)
        self._stream.state.resume(type_url, versions)

    def ask(self, type_url: str, names: Iterable[str]) -> None:
        """Request resources of an on-demand type by name. Those that exist are delivered to the receiver of the
        wildcard.
        """
        self._stream.ask(type_url, names)


class PerTypeClient:
    """A client with one stream per subscription, to the resource type's own service, such as SDS from an agent's
    Unix socket.

    Arguments and rules are the same as in :class:`AdsClient`, but ``subscribe`` must be called inside ``async
    with``.
    """

    def __init__(
        self,
        target: str,
        node: Node,
        *,
        delta: bool = False,
        metadata: Metadata | None = None,
        node_on_first_only: bool = True,
        backoff: Callable[[], JitteredBackoff] = JitteredBackoff,
        connect: Connect | None = None,
    ) -> None:
        self._target = target
        self._options = ClientOptions(node=node, node_on_first_only=node_on_first_only)
        self._delta = delta
        self._connect = connect or connect_to(target)
        self._metadata = metadata
        self._backoff = backoff
        self._tasks = asyncio.TaskGroup()
        self._running: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> Self:
        await self._tasks.__aenter__()
        return self

    async def __aexit__(self, *exception: Any) -> None:
        for task in self._running:
            task.cancel()
        await self._tasks.__aexit__(*exception)

    def subscribe(
        self,
        type_url: str,
        names: Iterable[str] | None,
        receive: Receive,
        *,
        initial_fetch_timeout_s: float = 15.0,
        on_initial_timeout: Callable[[], None] | None = None,
    ) -> GrpcSubscription:
        """Subscribe, as :class:`~xds.protocol.resource.ResourceSource` defines.

        Raises:
            ConfigError: the type has no service of its own.
        """
        path = method_path(type_url, delta=self._delta)
        state, response_type = _state(self._options, delta=self._delta)
        stream = _Stream(self._connect, path, state, response_type, self._target, self._metadata, self._backoff())
        subscription = stream.subscribe(type_url, names, receive, initial_fetch_timeout_s, on_initial_timeout)
        task = self._tasks.create_task(stream.run(), name=f"xds {type_url}")
        self._running.add(task)
        task.add_done_callback(self._running.discard)
        subscription.on_close = task.cancel
        return subscription
