"""Budgets against floods: what a peer may make us do, per second and at once. Time is an argument."""

from __future__ import annotations


class Budget:
    """A token bucket: ``burst`` at once, then ``rate`` per second."""

    __slots__ = ("_burst", "_left", "_rate", "_seen_s")

    def __init__(self, *, burst: int, rate: float) -> None:
        self._burst = float(burst)
        self._rate = rate
        self._left = float(burst)
        self._seen_s: float | None = None

    def spend(self, now_s: float, tokens: float = 1.0) -> bool:
        """Take ``tokens`` at ``now_s`` (monotonic seconds); False: the budget is overdrawn."""
        if self._seen_s is None:
            self._seen_s = now_s
        elif now_s > self._seen_s:
            self._left = min(self._burst, self._left + (now_s - self._seen_s) * self._rate)
            self._seen_s = now_s
        self._left -= tokens
        return self._left >= 0
