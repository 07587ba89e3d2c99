"""Time, as one object that tests can replace."""

import time
from typing import Protocol


class Clock(Protocol):
    """Two clocks: one for durations, one for people."""

    def monotonic(self) -> float:
        """Seconds that only go forward."""

    def wall(self) -> float:
        """Seconds since the epoch."""


class SystemClock:
    """The real ones."""

    def monotonic(self) -> float:
        """Seconds that only go forward."""
        return time.monotonic()

    def wall(self) -> float:
        """Seconds since the epoch."""
        return time.time()


def utc(pattern: str, second: int) -> str:
    """``strftime`` of a second since the epoch; names are English, as in every process that sets no locale.

    For what is printed every second: aware ``datetime`` objects ask their zone for its offset by a name made anew,
    which Python keeps in its cache of methods, and with it a megabyte of what was around it (see
    :mod:`ztunnel.runtime.heap`).
    """
    return time.strftime(pattern, time.gmtime(second))
