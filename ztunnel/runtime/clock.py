"""The time, as an object that tests can replace."""

import time
from typing import Protocol


class Clock(Protocol):
    """A monotonic clock for durations, and the wall clock."""

    def monotonic(self) -> float:
        """Return monotonic seconds, for durations."""

    def wall(self) -> float:
        """Return seconds since the epoch."""


class SystemClock:
    """The clocks of the system."""

    # Without wrappers, because each connection reads the clocks some ten times.
    monotonic = staticmethod(time.monotonic)
    wall = staticmethod(time.time)


def utc(pattern: str, second: int) -> str:
    """Format seconds since the epoch by ``strftime``, in UTC; names are English, as long as no locale is set.

    Code that formats every second uses this, not ``datetime``. An aware ``datetime`` looks up its zone's offset by
    a newly created name. Python keeps that name in its method cache, and the allocator keeps the megabyte around
    it (see :mod:`ztunnel.runtime.heap`).
    """
    return time.strftime(pattern, time.gmtime(second))
