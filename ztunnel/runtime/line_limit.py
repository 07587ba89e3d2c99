"""A rate limit on log lines caused by unauthenticated clients, which can connect as fast as they like."""

from __future__ import annotations

from collections.abc import Callable

from hbone.flow import Budget
from ztunnel.runtime.clock import Clock

#: The burst of lines and their rate per second. A person reads the first few lines; for the rest the count
#: suffices.
BURST = 50
RATE = 5.0


class LineLimit:
    """Admits lines at a rate, and counts the suppressed ones.

    Use one limit per kind of line and per pod, so that traffic of one pod does not suppress lines about another.

    Args:
        clock: for durations.
        suppressed: called before a line is admitted, with the number of lines suppressed since the previous one.
    """

    def __init__(
        self, clock: Clock, suppressed: Callable[[int], None], *, burst: float = BURST, rate: float = RATE
    ) -> None:
        self._clock = clock
        self._suppressed = suppressed
        self._budget = Budget(burst=burst, rate=rate)
        self._left_out = 0

    def admits(self) -> bool:
        """Return whether to write a line now. Call this once for each line."""
        if not self._budget.affords(self._clock.monotonic()):
            self._left_out += 1
            return False
        left_out, self._left_out = self._left_out, 0
        if left_out:
            self._suppressed(left_out)
        return True
