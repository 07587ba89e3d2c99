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
