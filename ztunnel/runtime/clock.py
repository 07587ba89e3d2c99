"""Provides the time as an object that tests can replace."""

import time
from typing import Protocol


class Clock(Protocol):
    """Two clocks: a monotonic one for durations, and the wall clock."""

    def monotonic(self) -> float:
        """Return monotonic seconds, for durations."""

    def wall(self) -> float:
        """Return the wall clock, in seconds since the epoch."""


class SystemClock:
    """The clocks of the system."""

    # These are the functions themselves, without wrappers, because each connection reads the clocks some ten
    # times.
    monotonic = staticmethod(time.monotonic)
    wall = staticmethod(time.time)


def utc(pattern: str, second: int) -> str:
    """Format seconds since the epoch by ``strftime``, in UTC. Names are English as long as no locale is set.

    Code that formats a time every second uses this instead of ``datetime``. An aware ``datetime`` looks up its
    zone's offset by a newly created name. Python keeps that name in its method cache, so the allocator keeps the
    megabyte around it (see :mod:`ztunnel.runtime.heap`).
    """
    return time.strftime(pattern, time.gmtime(second))
