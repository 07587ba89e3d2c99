"""Looking at many things at the same interval, with one timer for all of them.

A timer of the loop per relay is 450 bytes for as long as it runs, a microsecond to make and one to cancel; uvloop
keeps some that were cancelled, and with each a megabyte of what was around it from the system.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from typing import Final, Protocol

#: Of an interval, what may pass until one is looked at together with those after it: fewer timers.
_TOGETHER: Final = 1 / 64
#: Looks in one turn of the loop, before others get theirs: some hundred microseconds.
_AT_ONCE: Final = 256


class Member(Protocol):
    """What is looked at."""

    def look(self) -> None:
        """Once per interval, until it leaves; it may leave, and others may."""


class Round:
    """See the module; :meth:`hbone.aio.poller.Poller.round` has one per interval.

    The first look comes one interval after :meth:`join`, each other one interval after the last; up to a 64th of
    an interval late.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, interval_s: float) -> None:
        self._loop = loop
        self._interval_s = interval_s
        #: When it is whose turn (the loop's time), soonest first.
        self._due: OrderedDict[Member, float] = OrderedDict()
        self._looked_s = 0.0
        self._timer: asyncio.TimerHandle | None = None

    def __len__(self) -> int:
        return len(self._due)

    def join(self, member: Member, now_s: float) -> None:
        """Look at it from now on; ``now_s`` is the loop's time or that of an earlier turn; it never goes back."""
        self._due[member] = max(now_s, self._looked_s) + self._interval_s
        if self._timer is None:
            self._timer = self._loop.call_at(self._late(self._due[member]), self._look)

    def leave(self, member: Member) -> None:
        """No more; nothing if it has left."""
        self._due.pop(member, None)

    def _look(self) -> None:
        now_s = self._looked_s = self._loop.time()
        self._timer = None
        due = self._due
        try:
            for _ in range(min(len(due), _AT_ONCE)):
                member = next(iter(due), None)
                if member is None or due[member] > now_s:
                    break
                due.move_to_end(member)
                due[member] = now_s + self._interval_s
                member.look()
        finally:
            if due:
                next_s = due[next(iter(due))]
                # Whoever is due already was left for the next turn.
                self._timer = self._loop.call_at(next_s if next_s <= now_s else self._late(next_s), self._look)

    def _late(self, due_s: float) -> float:
        return due_s + self._interval_s * _TOGETHER

    def close(self) -> None:
        """Look at nobody any more."""
        self._due.clear()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
