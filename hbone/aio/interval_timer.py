"""A timer that all checks with the same interval share, for keepalive and idle timeouts.

A loop timer per relay would cost 450 bytes while it runs, a microsecond to create and a microsecond to cancel.
uvloop keeps some cancelled timers in memory, and each of these keeps an allocator arena of up to a megabyte in
use.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from typing import Final, Protocol

#: How late a check can be, as a fraction of its interval. Checks that are due within this time run together.
_SLACK: Final = 1 / 64
#: The largest number of checks per loop iteration, which take some hundred microseconds. Other callbacks run in
#: between.
CHECKS_PER_TURN: Final = 256


class Member(Protocol):
    """An object that is called once per interval."""

    def on_interval(self) -> None:
        """Check whether something is due. This can unregister the member itself and other members."""


class IntervalTimer:
    """Calls each of its members once per interval, by one timer of the event loop."""

    def __init__(self, loop: asyncio.AbstractEventLoop, interval_s: float) -> None:
        self._loop = loop
        self._interval_s = interval_s
        #: The time of each member's next call, on the loop's clock, soonest first.
        self._due: OrderedDict[Member, float] = OrderedDict()
        self._checked_s = 0.0
        self._timer: asyncio.TimerHandle | None = None

    def __len__(self) -> int:
        return len(self._due)

    def register(self, member: Member, now_s: float) -> None:
        """Call ``member`` once per interval from now on. ``now_s`` is the loop's time, or the time of an earlier
        iteration.
        """
        # ``now_s`` can be the start of the poller's iteration, and a check can have run since then. Without the
        # maximum, this member would come after members with later times in ``_due``, which must be sorted, because
        # only its first entry sets the timer.
        self._due[member] = max(now_s, self._checked_s) + self._interval_s
        if self._timer is None:
            self._timer = self._loop.call_at(self._late(self._due[member]), self._check)

    def unregister(self, member: Member) -> None:
        """Stop calling ``member``. Idempotent. The timer keeps running without effect."""
        self._due.pop(member, None)

    def _check(self) -> None:
        now_s = self._checked_s = self._loop.time()
        self._timer = None
        due = self._due
        try:
            for _ in range(min(len(due), CHECKS_PER_TURN)):
                # The first member is looked up again in each round, because the last call can have removed any
                # member.
                member = next(iter(due), None)
                if member is None or due[member] > now_s:
                    break
                due.move_to_end(member)
                due[member] = now_s + self._interval_s
                member.on_interval()
        finally:
            # The timer is set even if a member has raised an error (which the loop logs), because the other
            # members must still be called.
            if due:
                next_s = due[next(iter(due))]
                # A member is overdue if the limit per iteration was reached. The timer is then set without slack.
                self._timer = self._loop.call_at(next_s if next_s <= now_s else self._late(next_s), self._check)

    def _late(self, due_s: float) -> float:
        return due_s + self._interval_s * _SLACK

    def close(self) -> None:
        """Unregister every member and cancel the timer; idempotent."""
        self._due.clear()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
