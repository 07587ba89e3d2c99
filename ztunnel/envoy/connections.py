"""The table of live connections: what drains, re-checks and closes go through."""

import asyncio
import contextlib
import itertools
from collections.abc import Callable, Iterator, Sequence

from hbone.aio.relay import ByteCounts
from ztunnel.envoy.stream_info import StreamInfo


class LiveConnection:
    """One accepted connection.

    Attributes:
        id: unique in the process.
        info: its first hop.
        chain: name of the filter chain that took it, empty until one did.
        leaving: it is to end as soon as what it carries has.
        drain: tells the peer so, where the protocol can (GOAWAY); ``None`` where it cannot, or cannot yet.
        abort: ends it now, with a reason for the log.
        counts: bytes moved so far, while bytes are relayed.
        inner: the hops behind internal listeners, outermost first.
    """

    __slots__ = ("abort", "chain", "counts", "drain", "id", "info", "inner", "leaving", "owner")

    def __init__(self, number: int, info: StreamInfo, owner: object) -> None:
        self.id = number
        self.info = info
        self.owner = owner
        self.chain: object = None
        self.leaving = False
        self.drain: Callable[[], None] | None = None
        self.abort: Callable[[str], None] | None = None
        self.counts: ByteCounts | None = None
        self.inner: Sequence[StreamInfo] = ()

    def leave(self) -> None:
        """Have it end in order; one that is still at its handshake hears of it then."""
        self.leaving = True
        if self.drain is not None:
            self.drain()


class Connections:
    """All live connections, by id."""

    def __init__(self) -> None:
        self._live: dict[int, LiveConnection] = {}
        self._numbers = itertools.count(1)
        self._empty = asyncio.Event()

    def __len__(self) -> int:
        return len(self._live)

    def __iter__(self) -> Iterator[LiveConnection]:
        return iter(list(self._live.values()))

    def next_id(self) -> int:
        """A number no other connection has."""
        return next(self._numbers)

    def add(self, info: StreamInfo, owner: object) -> LiveConnection:
        """Enter a connection, before anything judges it: a change in between must still find it."""
        connection = LiveConnection(info.connection_id, info, owner)
        self._live[connection.id] = connection
        return connection

    def remove(self, connection: LiveConnection) -> None:
        """The connection is over."""
        self._live.pop(connection.id, None)
        if not self._live:
            self._empty.set()

    async def drained(self, timeout_s: float) -> None:
        """Wait until none is left, at most ``timeout_s``."""
        self._empty.clear()
        if self._live:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._empty.wait(), timeout_s)
