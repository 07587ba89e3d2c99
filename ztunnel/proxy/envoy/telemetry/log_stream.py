"""Streams to access log services (``envoy.service.accesslog.v3``). Like in Envoy, entries are sent in batches, and
can be lost.

The end of a connection only appends an entry to a list. One task per stream sends the collected entries when they
reach the configured size, or after the configured time. While the service is unreachable or does not read, one
batch is kept, and later entries are dropped and counted.
"""

import asyncio
import logging
import random
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager, suppress
from dataclasses import dataclass
from typing import Final

from xds.aio.channel import Call, Channel
from xds.errors import XdsError
from xds.grpc.status import RpcFailed
from xds.model.access_log import LogStream
from xds.proto.envoy.config.core.v3.core_pb2 import Node
from xds.protocol.backoff import JitteredBackoff
from ztunnel.proxy.envoy.stats.stats import Counter, Stats
from ztunnel.proxy.envoy.telemetry.log_entries import Entry, Identifier, packed
from ztunnel.runtime.tasks import Tasks

log = logging.getLogger(__name__)

_METHOD: Final = "/envoy.service.accesslog.v3.AccessLogService/StreamAccessLogs"
#: A stream without entries for this time is closed, and the next entry opens a new stream. Envoy keeps streams
#: open.
IDLE_S: Final = 60.0
#: The time limit for sending the last entries at shutdown, and for the service to end a call after we have ended
#: our side.
_LAST_S: Final = 1.0

#: Connects to a cluster by name; see :meth:`ztunnel.proxy.envoy.upstream.grpc.GrpcClusters.connect`.
ConnectTo = Callable[[str], Callable[[], AbstractAsyncContextManager[Channel]]]


class Batch:
    """The log entries that wait to be sent on one stream. Pure.

    Attributes:
        full: whether the batch has reached the configured size.
    """

    def __init__(self, limit_bytes: int) -> None:
        self._limit_bytes = limit_bytes
        self._entries: list[Entry] = []
        self._size = 0

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def full(self) -> bool:
        """Whether to send the batch now. With a limit of 0, each entry is sent at once."""
        return bool(self._entries) and self._size >= self._limit_bytes

    def add(self, entry: Entry) -> bool:
        """Add an entry unless the batch is full. Return whether the entry was added."""
        if self.full:
            return False
        self._entries.append(entry)
        self._size += entry.ByteSize()
        return True

    def take(self) -> list[Entry]:
        """Return all entries and clear the list."""
        entries, self._entries, self._size = self._entries, [], 0
        return entries


@dataclass(frozen=True, slots=True)
class EntryCounts:
    """Envoy's counters of all gRPC access logs.

    Attributes:
        written: entries added to a batch.
        dropped: entries dropped because the batch was full, or (not counted in Envoy) because the stream broke.
    """

    written: Counter
    dropped: Counter


class Sender:
    """One stream to an access log service. It opens when entries are queued, and opens again if it ends."""

    def __init__(
        self,
        model: LogStream,
        connect: Callable[[], AbstractAsyncContextManager[Channel]],
        identifier: Identifier,
        counts: EntryCounts,
        tasks: Tasks,
    ) -> None:
        self.model = model
        self._connect = connect
        self._identifier = identifier
        self._counts = counts
        self._tasks = tasks
        self._batch = Batch(model.buffer_bytes)
        self._some, self._full = asyncio.Event(), asyncio.Event()
        self._running: asyncio.Task[None] | None = None
        self._closing = False

    def add(self, entry: Entry) -> None:
        """Queue a log entry for sending. Called once per finished hop."""
        if not self._batch.add(entry):
            self._counts.dropped.value += 1
            return
        self._counts.written.value += 1
        self._some.set()
        if self._batch.full:
            self._full.set()
        if self._running is None:
            self._running = self._tasks.start(self._run(), f"log stream {self.model.log_name}")

    async def close(self) -> None:
        """Send the remaining entries, for at most a second."""
        self._closing = True
        self._some.set()
        self._full.set()
        if self._running is not None:
            await asyncio.wait([self._running], timeout=_LAST_S)

    async def _run(self) -> None:
        backoff = JitteredBackoff()
        told = ""
        try:
            while await self._due():
                try:
                    async with self._connect() as channel:
                        call = await channel.call(_METHOD)
                        try:
                            await self._send(call, backoff)
                        finally:
                            call.cancel()
                    told = ""
                except XdsError as error:
                    if self._closing:
                        break
                    if str(error) != told:
                        told = str(error)
                        log.warning("access log service %s: %s", self.model.cluster, told)
                    await asyncio.sleep(backoff.next(random.random()))
        finally:
            self._counts.dropped.value += len(self._batch.take())
            self._running = None

    async def _due(self) -> bool:
        """Wait until a batch must be sent. Return False if no entry arrived for a long time, or the stream was
        closed.
        """
        if self._closing:
            return bool(self._batch)
        with suppress(TimeoutError):
            async with asyncio.timeout(IDLE_S):
                await self._some.wait()
        if self._batch and not self._closing:
            with suppress(TimeoutError):
                async with asyncio.timeout(self.model.flush_interval_s):
                    await self._full.wait()
        return bool(self._batch)

    async def _send(self, call: Call, backoff: JitteredBackoff) -> None:
        """Send batches until the service ends the call, or no entry arrives in time.

        Raises:
            RpcFailed: the call failed.
        """
        identifier: Identifier | None = self._identifier
        while not call.over:
            entries = self._batch.take()
            if not self._closing:
                self._some.clear()
                self._full.clear()
            try:
                await call.write(packed(entries, http=self.model.http, identifier=identifier))
            except BaseException:
                self._counts.dropped.value += len(entries)
                raise
            backoff.reset()
            identifier = None
            if not await self._due():
                call.end()
                with suppress(TimeoutError):
                    async with asyncio.timeout(_LAST_S):
                        await call.read()
                return
        if call.failure is not None:
            raise RpcFailed(call.failure.status, call.failure.details)


class LogStreams:
    """All streams of the process to access log services, by their settings."""

    def __init__(self, connect: ConnectTo, node: Node, stats: Stats) -> None:
        self._connect = connect
        self._node = node
        scope = stats.scope("access_logs.grpc_access_log")
        self._counts = EntryCounts(scope.counter("logs_written"), scope.counter("logs_dropped"))
        self._tasks = Tasks("access logs")
        self._senders: dict[LogStream, Sender] = {}

    def sender(self, model: LogStream) -> Sender:
        """Return the stream for these settings, created on first use."""
        sender = self._senders.get(model)
        if sender is None:
            identifier = Identifier(node=self._node, log_name=model.log_name)
            connect = self._connect(model.cluster)
            sender = Sender(model, connect, identifier, self._counts, self._tasks)
            self._senders[model] = sender
        return sender

    async def close(self) -> None:
        """Send remaining entries, for at most a second, and end all streams."""
        await asyncio.gather(*(sender.close() for sender in self._senders.values()))
        await self._tasks.close()
