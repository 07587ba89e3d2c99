"""The traffic counters of one label set. A connection looks its counters up once, and then only adds to them."""

from hbone.aio.relay import ByteCounts
from ztunnel.proxy.flows.times import PathTimes


class TrafficSeries:
    """Counters of one label set.

    Attributes:
        times: the duration histograms for this series' reporter and kind of path.
        opened: the number of opened connections.
        moved: the number of connections taken over from another process, minus the number handed over.
        closed: numbers of closed connections, by response flags.
        received: bytes carried from client to server by finished relays. The direction does not depend on the
            reporter.
        sent: bytes carried from server to client by finished relays. The direction does not depend on the
            reporter.
        refused: the number of connections refused by the peer's policy.
        running: the byte counts of relays still running.
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
        """Count an opened connection. The caller has checked that the connection has this series' labels.

        Args:
            counts: the byte counts of the connection's relay.
            now_s: monotonic seconds.
        """
        self.opened += 1
        self.used_s = now_s
        self.running.add(counts)

    def moved_here(self, counts: ByteCounts, now_s: float) -> None:
        """Take over a connection that another process has already counted as opened; otherwise like
        :meth:`opened_now`.
        """
        self.moved += 1
        self.used_s = now_s
        self.running.add(counts)

    @property
    def idle(self) -> bool:
        """Whether no connection of this series is open."""
        return not self.open

    @property
    def open(self) -> int:
        """The number of open connections in this series."""
        return self.opened + self.moved - sum(self.closed.values())

    @property
    def received_now(self) -> int:
        """The number of bytes from client to server, including the bytes of running relays."""
        return self.received + sum([counts.sent_here for counts in self.running])

    @property
    def sent_now(self) -> int:
        """The number of bytes from server to client, including the bytes of running relays."""
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
