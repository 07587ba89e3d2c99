"""A peer's cost budget for the work that its bytes cause: one per connection, and one for all its connections."""

from __future__ import annotations

from hbone.errors import ErrorCode
from hbone.flow import Budget
from hbone.limits import Limits
from hbone.reader import Failure


class CostBudget:
    """The work budget of one connection.

    Attributes:
        shared: the budget of all connections of the same peer. None until the peer is known.
    """

    __slots__ = ("_stalls", "_work", "shared")

    def __init__(self, limits: Limits) -> None:
        self._work = Budget(burst=limits.work_burst, rate=limits.work_rate)
        self._stalls = Budget(burst=limits.stall_burst_s, rate=limits.stall_rate)
        self.shared: Budget | None = None

    def charge(self, units: int, now_s: float) -> float:
        """Charge ``units`` of work and return how long to stop reading, in seconds.

        Backpressure comes first: an honest peer with many small frames sends fewer and larger ones when it must
        wait, and a busy peer does not notice. A peer that needs to be slowed down for many seconds has caused
        wasted work for as long.

        Raises:
            Failure: the peer has been slowed down for too long; the connection ends.
        """
        self._work.spend(now_s, units)
        pause_s = self._work.overdrawn_s
        # A pause that the peer's other connections have caused is no reason to end this one: a hundred workloads
        # can share one name.
        if pause_s and not self._stalls.spend(now_s, pause_s):
            raise Failure(ErrorCode.ENHANCE_YOUR_CALM, "too much work for what it carries")
        shared = self.shared
        if shared is not None:
            shared.spend(now_s, units)
            pause_s = max(pause_s, shared.overdrawn_s)
        return pause_s

    def overdrawn_s(self, now_s: float) -> float:
        """Return how long to stop reading from now. :meth:`refund` can have shortened the pause since."""
        self._work.spend(now_s, 0.0)
        pause_s = self._work.overdrawn_s
        if self.shared is not None:
            self.shared.spend(now_s, 0.0)
            pause_s = max(pause_s, self.shared.overdrawn_s)
        return pause_s

    def refund(self, units: int) -> None:
        """Refund ``units``, because the work was useful."""
        self._work.refund(units)
        if self.shared is not None:
            self.shared.refund(units)

    def leave_debt(self, units: int, now_s: float) -> None:
        """Charge work to the peer's shared budget, not to this connection, which is over."""
        if self.shared is not None:
            self.shared.spend(now_s, units)
