"""Limits the work that a peer's bytes cause, by a budget for each connection and one for all connections of the
peer.

Work is counted in units (:mod:`hbone.frame_costs`), which take about a microsecond of a fast core. A budget is a
share of a core, so a unit has a price (:class:`UnitPrice`): on a core that needs twice the time for equal work,
each unit is charged twice.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from hbone.errors import ErrorCode
from hbone.flow import Budget
from hbone.limits import Limits
from hbone.reader import Failure

UNIT_S: Final = 0.7e-6
"""The processor time of the engine for one unit, at a price of 1. Reads, decryption, delivery and pauses take the
rest of a microsecond: 0.2 to 0.45 of the engine's time (``python -m tests.hostile``, DATA of 1 byte).
"""
HIGHEST_PRICE: Final = 8.0
"""The largest price, which limits the effect of a disturbed measurement. A guess: no core in use is this slow."""
_FIRST_UNITS: Final = 10_000  # charged before the first measurement: 46 requests
_UNITS_BETWEEN: Final = 100_000  # a measurement takes a two hundredth of their time
_WEIGHT: Final = 0.5  # weight of a new measurement: the load of the core's caches changes within seconds


class UnitPrice:
    """The price per unit of work on this core, shared by all connections of a process.

    A measurement runs a fixed piece of the engine's work and takes its processor time. So neither a peer's frames
    nor other processes influence the price. The measurement is repeated after each 100,000 units of charged work.
    A process whose peers cause little work never measures.

    Args:
        measure: returns the processor time in seconds that the engine needs for a unit now. None: the price is
            always 1.

    Attributes:
        value: the charge for one unit of work, from 1 to :data:`HIGHEST_PRICE`. A core faster than the reference,
            or a compiled build, does not get larger budgets.
        due: how many units of work remain until the next measurement.
    """

    __slots__ = ("_measure", "_measured", "due", "value")

    def __init__(self, measure: Callable[[], float] | None = None) -> None:
        self._measure = measure
        self._measured = False
        self.due = _FIRST_UNITS
        self.value = 1.0

    def renew(self) -> None:
        """Measure the speed of this core and update :attr:`value`. Called when :attr:`due` is negative."""
        self.due = _UNITS_BETWEEN
        if self._measure is None:
            return
        price = self._measure() / UNIT_S
        if not price > 0.0:
            return  # the clock stood still or went back, or it is not a number: the last price stays
        price = min(max(price, 1.0), HIGHEST_PRICE)
        self.value = self.value + (price - self.value) * _WEIGHT if self._measured else price
        self._measured = True


FIXED_PRICE: Final = UnitPrice()
"""A price that is always 1, for engines whose owner does not measure."""


class CostBudget:
    """The work budget of one connection.

    Attributes:
        price: the price of a unit, shared by all connections of the process. 1 until the owner sets a price.
        shared: the budget of all connections of the same peer. None until the peer is known.
    """

    __slots__ = ("_stalls", "_work", "price", "shared")

    def __init__(self, limits: Limits) -> None:
        self._work = Budget(burst=limits.work_burst, rate=limits.work_rate)
        self._stalls = Budget(burst=limits.stall_burst_s, rate=limits.stall_rate)
        self.price = FIXED_PRICE
        self.shared: Budget | None = None

    def charge(self, units: int, now_s: float) -> float:
        """Charge ``units`` of work at the current price. Return for how many seconds to stop reading.

        The first response is to pause reading (backpressure): an honest peer with many small frames sends fewer
        and larger frames when it must wait. Only a peer whose pauses add up to many seconds is disconnected.

        A higher price makes pauses longer, but the limit on pauses counts them as if the price were 1. So a slow
        core slows down honest peers, but does not end their connections sooner.

        Raises:
            Failure: the peer has been slowed down for too long; the connection ends.
        """
        price = self.price
        price.due -= units
        if price.due < 0:
            price.renew()
        cost = units * price.value
        work = self._work
        pause_s = 0.0 if work.spend(now_s, cost) else work.overdrawn_s
        # Only pauses caused by this connection itself count towards ending it. A hundred workloads can share one
        # name, and thus the peer's shared budget.
        if pause_s and not self._stalls.spend(now_s, pause_s / price.value):
            raise Failure(ErrorCode.ENHANCE_YOUR_CALM, "too much work for its payload")
        shared = self.shared
        if shared is not None and not shared.spend(now_s, cost):
            pause_s = max(pause_s, shared.overdrawn_s)
        return pause_s

    def overdrawn_s(self, now_s: float) -> float:
        """Return for how many more seconds to stop reading. A :meth:`refund` can have shortened the pause."""
        self._work.spend(now_s, 0.0)
        pause_s = self._work.overdrawn_s
        if self.shared is not None:
            self.shared.spend(now_s, 0.0)
            pause_s = max(pause_s, self.shared.overdrawn_s)
        return pause_s

    def refund(self, units: int) -> None:
        """Refund ``units`` of work, because the work turned out to be useful, such as an accepted tunnel."""
        cost = units * self.price.value
        self._work.refund(cost)
        if self.shared is not None:
            self.shared.refund(cost)

    def leave_debt(self, units: int, now_s: float) -> None:
        """Charge work to the peer's shared budget only, because this connection has ended."""
        if self.shared is not None:
            self.shared.spend(now_s, units * self.price.value)
