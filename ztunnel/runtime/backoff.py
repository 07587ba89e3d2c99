"""Exponential back-off with random deviation, like that of the Rust ztunnel towards the node agent."""

from dataclasses import dataclass


@dataclass(slots=True)
class Backoff:
    """A sequence of waits that double up to a limit.

    Attributes:
        first_s: the first wait.
        limit_s: the longest wait.
        spread: the largest random deviation of a wait, as a fraction of the wait.
    """

    first_s: float
    limit_s: float = 15.0
    spread: float = 0.0
    _next_s: float = 0.0

    def next(self, random: float = 0.5) -> float:
        """Return the next wait in seconds. ``random`` in [0, 1) varies it; 0.5 causes no deviation."""
        wait = min(max(self._next_s, self.first_s), self.limit_s)
        self._next_s = wait * 2
        return wait * (1 + self.spread * (2 * random - 1))

    def reset(self) -> None:
        """Start again with the first wait; idempotent."""
        self._next_s = 0.0
