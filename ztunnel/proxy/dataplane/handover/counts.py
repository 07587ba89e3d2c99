"""Counts the connections that moved between processes, for the metrics page and ``ztunnel handover``."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Final

PAUSE_BUCKETS: Final = (0.001, 0.002, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5)
"""Upper bounds of the histogram of pauses, in seconds."""


class HandoverCounts:
    """The numbers of connections that moved to another process or stayed, since this process started.

    Attributes:
        connections: the number of pod connections, and of tunnel connections without tunnels, by result and
            reason. The result is ``given`` or ``kept`` for connections offered by this process, and ``taken`` or
            ``declined`` for connections offered to this process.
        paused_s: the total pause of moved connections, in seconds.
    """

    def __init__(self) -> None:
        self.connections: dict[tuple[str, str], int] = {}
        self.paused_s = 0.0
        self._pauses = [0] * (len(PAUSE_BUCKETS) + 1)  # the last bucket counts longer pauses

    def count(self, result: str, reason: str, number: int) -> None:
        """Count connections by result and reason. A reason is cut at its first colon, so that there are few label
        values.
        """
        key = result, reason.partition(":")[0]
        self.connections[key] = self.connections.get(key, 0) + number

    def offered(self, result: str, reason: str, number: int, pause_s: float) -> None:
        """Count the connections of one answered offer, and their pause of ``pause_s`` seconds."""
        self.count(result, reason, number)
        self.paused_s += pause_s
        self._pauses[sum(pause_s > bound for bound in PAUSE_BUCKETS)] += 1

    def add(self, connections: Mapping[tuple[str, str], int], pauses: Sequence[int], paused_s: float) -> None:
        """Add the counts of another process."""
        for key, number in connections.items():
            self.connections[key] = self.connections.get(key, 0) + number
        for place, number in enumerate(pauses[: len(self._pauses)]):
            self._pauses[place] += number
        self.paused_s += paused_s

    @property
    def pauses(self) -> tuple[int, ...]:
        """The number of pauses per histogram bucket, not cumulative. The last bucket has no upper bound."""
        return tuple(self._pauses)

    @property
    def offers(self) -> int:
        """The number of offers that were answered."""
        return sum(self._pauses)

    def cumulative(self) -> Iterator[tuple[str, int]]:
        """Iterate over the histogram's buckets: an upper bound, and the number of pauses up to this bound."""
        seen = 0
        for bound, count in zip(PAUSE_BUCKETS, self._pauses, strict=False):
            seen += count
            yield str(bound), seen
        yield "+Inf", self.offers
