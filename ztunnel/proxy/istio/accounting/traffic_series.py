"""The counters of one label set of the traffic metrics, which connections look up once and then add to."""

from hbone.aio.relay import ByteCounts
from ztunnel.proxy.flows.times import PathTimes


class TrafficSeries:
    """Counters of one label set.

    Attributes:
        times: the duration histograms of this series' reporter and path.
        opened: the number of opened connections.
        moved: the number of connections taken over from another process, minus the number handed over.
        closed: numbers of closed connections, by response flags.
        received: bytes from client to server of finished relays, whichever side reports.
        sent: bytes from server to client of finished relays, whichever side reports.
        refused: connections that the peer's policy has refused.
        running: byte counts of running relays.
        workloads: uids of workloads whose connections are counted here.
    """

    __slots__ = (
        "closed",
        "labels",
        "moved",
        "opened",
        "received",
        "refused",
        "running",
        "sent",
        "times",
        "used_s",
        "workloads",
    )

    def __init__(self, labels: tuple[str, ...], times: PathTimes) -> None:
        self.labels = labels
        self.times = times
        self.opened = 0
        self.moved = 0
        self.closed: dict[str, int] = {}
        self.received = 0
        self.sent = 0
        self.refused = 0
        self.running: set[ByteCounts] = set()
        self.used_s = 0.0
        self.workloads: set[str] = set()

    def opened_now(self, counts: ByteCounts, now_s: float) -> None:
        """Count an opened connection whose labels are known to be those of this series.

        Args:
            counts: the byte counts of the connection's relay.
            now_s: monotonic seconds.
        """
        self.opened += 1
        self.used_s = now_s
        self.running.add(counts)

    def moved_here(self, counts: ByteCounts, now_s: float) -> None:
        """Like :meth:`opened_now`, for a connection that another process has counted as opened."""
        self.moved += 1
        self.used_s = now_s
        self.running.add(counts)

    @property
    def idle(self) -> bool:
        """Whether no connection of this series is open."""
        return not self.open

    @property
    def open(self) -> int:
        """Number of open connections."""
        return self.opened + self.moved - sum(self.closed.values())

    @property
    def received_now(self) -> int:
        """Bytes from client to server, including running relays."""
        return self.received + sum([counts.sent_here for counts in self.running])

    @property
    def sent_now(self) -> int:
        """Bytes from server to client, including running relays."""
        return self.sent + sum([counts.received_here for counts in self.running])

    def went(self, counts: ByteCounts) -> None:
        """Add the bytes carried so far by a relay that continues in another process."""
        self.moved -= 1
        self._add_bytes(counts)

    def _add_bytes(self, counts: ByteCounts) -> None:
        self.running.discard(counts)
        self.received += counts.sent_here
        self.sent += counts.received_here

    def finished(self, flags: str, counts: ByteCounts | None) -> None:
        """Count the end of a connection, and add the bytes of its relay."""
        closed = self.closed
        closed[flags] = closed.get(flags, 0) + 1
        if counts is not None:
            self._add_bytes(counts)
