"""One shared timer per interval, for keepalive and idle checks.

A loop timer per relay would cost 450 bytes while it runs, a microsecond to create and a microsecond to cancel.
uvloop keeps some cancelled timers in memory, and each of these keeps an allocator arena of up to a megabyte in
use.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from typing import Final, Protocol

#: The largest delay of a check, as a fraction of its interval. Checks that are due within this time share a timer.
_SLACK: Final = 1 / 64
#: The number of checks in one loop iteration, which take some hundred microseconds. Then other callbacks run.
CHECKS_PER_TURN: Final = 256


class Member(Protocol):
    """An object that is called once per interval."""

    def on_interval(self) -> None:
        """Check whether anything is due. Can unregister itself and other members."""


class IntervalTimer:
    """Calls each of its members once per interval, by one timer of the event loop."""

    def __init__(self, loop: asyncio.AbstractEventLoop, interval_s: float) -> None:
        self._loop = loop
        self._interval_s = interval_s
        #: The time of each member's next call (the loop's clock), soonest first.
        self._due: OrderedDict[Member, float] = OrderedDict()
        self._checked_s = 0.0
        self._timer: asyncio.TimerHandle | None = None

    def __len__(self) -> int:
        return len(self._due)

    def register(self, member: Member, now_s: float) -> None:
        """Call ``member`` from now on. ``now_s`` is the loop's time, or the time of an earlier iteration."""
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
                # Look up the first member again, because the last call can have removed any member.
                member = next(iter(due), None)
                if member is None or due[member] > now_s:
                    break
                due.move_to_end(member)
                due[member] = now_s + self._interval_s
                member.on_interval()
        finally:
            # This also runs after a member has raised an error (the loop logs it), because the other members must
            # still be called.
            if due:
                next_s = due[next(iter(due))]
                # An overdue member was left over by the limit per iteration, so the timer is set without slack.
                self._timer = self._loop.call_at(next_s if next_s <= now_s else self._late(next_s), self._check)

    def _late(self, due_s: float) -> float:
        return due_s + self._interval_s * _SLACK

    def close(self) -> None:
        """Unregister every member and cancel the timer; idempotent."""
        self._due.clear()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
