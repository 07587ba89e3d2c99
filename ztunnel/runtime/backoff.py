"""Waiting longer each time, as ztunnels wait for the node agent."""

from dataclasses import dataclass


@dataclass(slots=True)
class Backoff:
    """Waits that double up to a limit.

    Attributes:
        first_s: the first wait.
        spread: how far a wait may be off either way, as a fraction.
    """

    first_s: float
    limit_s: float = 15.0
    spread: float = 0.0
    _next_s: float = 0.0

    def next(self, random: float = 0.5) -> float:
        """The next wait in seconds, for a random number from [0, 1); one half is no deviation."""
        wait = min(max(self._next_s, self.first_s), self.limit_s)
        self._next_s = wait * 2
        return wait * (1 + self.spread * (2 * random - 1))

    def reset(self) -> None:
        """Begin again at the first."""
        self._next_s = 0.0
