"""Histograms of durations in seconds. An observation costs one bisection and two additions.

Each bucket keeps an exemplar (OpenMetrics 1.0): the duration, time and ``traceparent`` of a recent connection. All
exemplars are packed into one buffer, because many small objects with long lives would fragment memory. The buffer
is created with the first trace.
"""

import struct
from bisect import bisect_left
from collections.abc import Iterator
from typing import Final, NamedTuple

DNS_BUCKETS: Final = (0.0005, 0.001, 0.01, 0.1, 1.0, 5.0)
#: Bucket bounds for the time from accept to a tunnel's 200 or the application's answer, up to the dial timeout.
CONNECT_BUCKETS: Final = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.5, 1.0, 5.0, 10.0)
#: Bucket bounds for the lifetime of a connection: from one request to a day.
LENGTH_BUCKETS: Final = (0.01, 0.1, 0.5, 1.0, 5.0, 15.0, 60.0, 300.0, 1800.0, 3600.0, 21600.0, 86400.0)
#: An exemplar's layout: duration and wall time in seconds, and a ``traceparent``. A ``traceparent`` has 55 octets
#: in version 00 of W3C trace context. The 56th octet shows that a longer text is invalid.
_EXEMPLAR: Final = struct.Struct("<dd56s")
#: The index of the last flag digit in a ``traceparent``, and the digits of sampled traces.
_FLAG: Final = 54
_SAMPLED: Final = b"13"
_NOT_SAMPLED: Final = ord("0")
#: The time that an exemplar is kept before an unsampled trace can replace it. A sampled one stays for a few
#: scrapes, and others so briefly that a scrape finds a recent one. So most observations of a busy proxy cost only
#: a comparison.
_SAMPLED_KEPT_S: Final = 60.0
_KEPT_S: Final = 1.0


class DurationCounts(NamedTuple):
    """The counts of :class:`Durations`, as a value.

    Attributes:
        numbers: the number of observations in each bucket. The last bucket is for longer ones.
        total_s: their sum.
        exemplars: the packed exemplars of all buckets, or empty.
    """

    numbers: tuple[int, ...]
    total_s: float
    exemplars: bytes = b""


class Exemplar(NamedTuple):
    """A recent observation of one bucket.

    Attributes:
        seconds: the duration.
        wall_s: when it was observed.
        trace: the connection's ``traceparent``, unchecked, since peers send it.
    """

    seconds: float
    wall_s: float
    trace: bytes


class Durations:
    """One histogram of durations.

    Args:
        bounds: the upper bounds of its buckets, in seconds.
    """

    __slots__ = ("_bounds", "_exemplars", "_kept_until_s", "_numbers", "total_s")

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self._bounds = bounds
        self._numbers = [0] * (len(bounds) + 1)
        self.total_s = 0.0
        self._exemplars = bytearray()
        self._kept_until_s = [0.0] * len(self._numbers)  # wall time

    def observe(self, seconds: float, trace: bytes = b"", wall_s: float = 0.0) -> None:
        """Count an observation of ``seconds``.

        Args:
            trace: the ``traceparent`` of the connection, or empty.
            wall_s: the wall time, required if there is a trace.
        """
        place = bisect_left(self._bounds, seconds)
        self._numbers[place] += 1
        self.total_s += seconds
        if trace and (trace[-1] != _NOT_SAMPLED or not 0 < self._kept_until_s[place] - wall_s <= _SAMPLED_KEPT_S):
            self._keep(place, seconds, wall_s, trace)

    def exemplify(self, seconds: float, trace: bytes, wall_s: float) -> None:
        """Store the trace of an observation that was already counted without it."""
        self._keep(bisect_left(self._bounds, seconds), seconds, wall_s, trace)

    def _keep(self, place: int, seconds: float, wall_s: float, trace: bytes) -> None:
        if len(trace) <= _FLAG:
            return
        sampled = trace[_FLAG] in _SAMPLED
        # The upper limit matters after the clock was set back: it must not keep an exemplar for longer.
        if not sampled and 0 < self._kept_until_s[place] - wall_s <= _SAMPLED_KEPT_S:
            return
        self._kept_until_s[place] = wall_s + (_SAMPLED_KEPT_S if sampled else _KEPT_S)
        self._put(place, seconds, wall_s, trace)

    def _put(self, place: int, seconds: float, wall_s: float, trace: bytes) -> None:
        if not self._exemplars:
            self._exemplars.extend(bytes(_EXEMPLAR.size * len(self._numbers)))
        _EXEMPLAR.pack_into(self._exemplars, place * _EXEMPLAR.size, seconds, wall_s, trace)

    def exemplars(self) -> Iterator[Exemplar | None]:
        """Iterate over the buckets' exemplars, in the order of :meth:`cumulative`."""
        if not self._exemplars:
            yield from [None] * len(self._numbers)
        yield from _unpacked(self._exemplars)

    @property
    def count(self) -> int:
        """The number of observations."""
        return sum(self._numbers)

    def counts(self) -> DurationCounts:
        return DurationCounts(tuple(self._numbers), self.total_s, bytes(self._exemplars))

    def add(self, counts: DurationCounts) -> None:
        """Add the counts of another process's histogram, which has the same bounds."""
        for place, number in enumerate(counts.numbers):
            self._numbers[place] += number
        self.total_s += counts.total_s
        if len(counts.exemplars) != _EXEMPLAR.size * len(self._numbers):
            return
        own = list(self.exemplars())
        for place, found in enumerate(_unpacked(counts.exemplars)):
            known = own[place]
            if found is not None and (known is None or known.wall_s < found.wall_s):
                self._put(place, *found)

    def cumulative(self) -> Iterator[tuple[str, int]]:
        """Iterate over pairs of an upper bound and the number of observations up to it."""
        seen = 0
        for bound, number in zip((*self._bounds, "+Inf"), self._numbers, strict=True):
            seen += number
            yield str(bound), seen


def _unpacked(packed: bytes | bytearray) -> Iterator[Exemplar | None]:
    for seconds, wall_s, padded in _EXEMPLAR.iter_unpack(packed):
        trace = padded.rstrip(b"\0")
        yield Exemplar(seconds, wall_s, trace) if trace else None
