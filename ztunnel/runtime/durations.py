"""Histograms of durations in seconds. An observation costs one bisection and two additions."""

from bisect import bisect_left
from collections.abc import Iterator
from typing import Final, NamedTuple

DNS_BUCKETS: Final = (0.0005, 0.001, 0.01, 0.1, 1.0, 5.0)
#: Buckets for the time from accept to a tunnel's 200 or the application's answer, up to the dial timeout.
CONNECT_BUCKETS: Final = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.5, 1.0, 5.0, 10.0)
#: Buckets for the lifetime of a connection: from one request to a day.
LENGTH_BUCKETS: Final = (0.01, 0.1, 0.5, 1.0, 5.0, 15.0, 60.0, 300.0, 1800.0, 3600.0, 21600.0, 86400.0)


class DurationCounts(NamedTuple):
    """The counts of :class:`Durations`, as a value: numbers by bucket, the last of longer ones, and the sum."""

    numbers: tuple[int, ...]
    total_s: float


class Durations:
    """One histogram.

    Args:
        bounds: the upper bounds of its buckets, in seconds.
    """

    __slots__ = ("_bounds", "_numbers", "total_s")

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self._bounds = bounds
        self._numbers = [0] * (len(bounds) + 1)
        self.total_s = 0.0

    def observe(self, seconds: float) -> None:
        """Count an observation of ``seconds``."""
        self._numbers[bisect_left(self._bounds, seconds)] += 1
        self.total_s += seconds

    @property
    def count(self) -> int:
        """The number of observations."""
        return sum(self._numbers)

    def counts(self) -> DurationCounts:
        return DurationCounts(tuple(self._numbers), self.total_s)

    def add(self, counts: DurationCounts) -> None:
        """Add the counts of another process, with the same bounds."""
        for place, number in enumerate(counts.numbers):
            self._numbers[place] += number
        self.total_s += counts.total_s

    def cumulative(self) -> Iterator[tuple[str, int]]:
        """Iterate over (upper bound, number of observations up to it)."""
        seen = 0
        for bound, number in zip((*self._bounds, "+Inf"), self._numbers, strict=True):
            seen += number
            yield str(bound), seen
