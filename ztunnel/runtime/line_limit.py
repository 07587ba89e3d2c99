"""A limit on log lines that strangers can cause: who has proved nothing yet can connect as fast as it likes."""

from __future__ import annotations

from collections.abc import Callable

from hbone.flow import Budget
from ztunnel.runtime.clock import Clock

#: Lines at once and per second. A person reads the first few; the count says what the others would.
BURST = 50
RATE = 5.0


class LineLimit:
    """Admits lines at a rate, and counts the others.

    One for each kind of line and each pod that it is about, so that what one pod is sent hides no line of another.

    Args:
        clock: for durations.
        suppressed: called with the number of lines left out since the last one, before the next that is admitted.
    """

    def __init__(
        self, clock: Clock, suppressed: Callable[[int], None], *, burst: float = BURST, rate: float = RATE
    ) -> None:
        self._clock = clock
        self._suppressed = suppressed
        self._budget = Budget(burst=burst, rate=rate)
        self._left_out = 0

    def admits(self) -> bool:
        """Return whether to write a line now; call it once for each."""
        if not self._budget.affords(self._clock.monotonic()):
            self._left_out += 1
            return False
        left_out, self._left_out = self._left_out, 0
        if left_out:
            self._suppressed(left_out)
        return True
