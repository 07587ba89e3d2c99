"""The table of live connections, which drains, policy checks and closes iterate over."""

import itertools
from collections.abc import Callable, Sequence

from hbone.aio.relay import ByteCounts
from ztunnel.dataplane.connection_entry import Abort, ConnectionEntry, ConnectionTable
from ztunnel.envoy.stream_info import StreamInfo


class LiveConnection(ConnectionEntry):
    """One accepted connection.

    Attributes:
        id: unique in the process.
        info: its first hop.
        owner: the listener that counts it.
        chain: its filter chain; ``None`` until one is chosen.
        leaving: it ends as soon as its tunnels have ended.
        drain: sends the peer GOAWAY; ``None`` where the protocol has none, or the handshake is not over.
        counts: bytes moved so far, while bytes are relayed.
        inner: the hops behind internal listeners, outermost first.
    """

    __slots__ = ("chain", "counts", "drain", "id", "info", "inner", "leaving", "owner")

    def __init__(self, info: StreamInfo, owner: object, abort: Abort) -> None:
        super().__init__(abort)
        self.id = info.connection_id
        self.info = info
        self.owner = owner
        self.chain: object = None
        self.leaving = False
        self.drain: Callable[[], None] | None = None
        self.counts: ByteCounts | None = None
        self.inner: Sequence[StreamInfo] = ()

    def leave(self) -> None:
        """Drain the connection; during a handshake GOAWAY is sent after it. Idempotent."""
        self.leaving = True
        if self.drain is not None:
            self.drain()


class Connections(ConnectionTable[LiveConnection]):
    """All live connections, oldest first, and the counter of their ids.

    Attributes:
        watcher: called with each connection that ends, while somebody looks at the live page; else None.
    """

    __slots__ = ("_numbers", "watcher")

    def __init__(self) -> None:
        super().__init__()
        self._numbers = itertools.count(1)
        self.watcher: Callable[[LiveConnection], None] | None = None

    def remove(self, entry: LiveConnection) -> None:
        """Unregister a connection that is over; called once for each."""
        super().remove(entry)
        if self.watcher is not None:
            self.watcher(entry)

    def next_id(self) -> int:
        """Return a number that no other connection has."""
        return next(self._numbers)
