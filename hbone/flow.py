"""Budgets against floods: how much work a peer may cause per second and at once. Time is an argument.

A limit on a rate alone would refuse honest bursts (a hundred tunnels that close together), one on a number alone
would refuse a long-lived connection in the end. A token bucket allows a burst and then a rate.
"""

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
        """Take ``tokens`` at ``now_s`` (monotonic seconds); return False when the budget is overdrawn."""
        if self._seen_s is None:
            self._seen_s = now_s
        elif now_s > self._seen_s:
            self._left = min(self._burst, self._left + (now_s - self._seen_s) * self._rate)
            self._seen_s = now_s
        self._left -= tokens
        return self._left >= 0
