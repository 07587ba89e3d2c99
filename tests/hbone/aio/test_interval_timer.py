"""The shared timer: which members are called, when, and which are not."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable
from typing import Any

import pytest

from hbone.aio.interval_timer import CHECKS_PER_TURN, IntervalTimer


class Clockwork(asyncio.AbstractEventLoop):
    """A loop with timers only, whose time moves by :meth:`advance`."""

    def __init__(self) -> None:
        self.now_s = 1000.0
        self.turns = 0
        self._timers: list[asyncio.TimerHandle] = []

    def time(self) -> float:
        return self.now_s

    def get_debug(self) -> bool:
        return False

    def _timer_handle_cancelled(self, handle: asyncio.TimerHandle) -> None:
        self._timers.remove(handle)

    def call_at(self, when: float, callback: Callable[..., object], *args: Any, context: Any = None) -> Any:
        timer = asyncio.TimerHandle(when, callback, args, self, context)
        self._timers.append(timer)
        return timer

    @property
    def timers(self) -> int:
        return len(self._timers)

    def advance(self, seconds: float) -> None:
        """Advance the time. Each timer fires at its time, in a separate turn."""
        until_s = self.now_s + seconds
        while due := [timer for timer in self._timers if timer.when() <= until_s]:
            timer = min(due, key=asyncio.TimerHandle.when)
            self._timers.remove(timer)
            self.now_s = max(self.now_s, timer.when())
            self.turns += 1
            timer._callback(*timer._args)  # type: ignore[attr-defined]
        self.now_s = until_s


class Seen:
    """Records the times of its calls. ``then`` is called each time, too."""

    def __init__(self, loop: Clockwork, then: Callable[[Seen], None] | None = None) -> None:
        self.at: list[float] = []
        self._loop = loop
        self._then = then

    def on_interval(self) -> None:
        self.at.append(self._loop.now_s)
        if self._then is not None:
            self._then(self)


def test_each_member_is_called_once_per_interval_from_its_registration() -> None:
    loop = Clockwork()
    every = IntervalTimer(loop, 64.0)  # which may be late by a 64th
    members, registered = [], []
    for _ in range(3):
        members.append(Seen(loop))
        registered.append(loop.now_s)
        every.register(members[-1], loop.now_s)
        loop.advance(20.0)
    loop.advance(600.0)
    for start, member in zip(registered, members, strict=True):
        assert len(member.at) >= 9
        assert all(64 <= later - earlier <= 65 for earlier, later in itertools.pairwise([start, *member.at]))
    assert loop.timers == 1


def test_calls_that_are_due_close_to_each_other_share_a_timer() -> None:
    loop = Clockwork()
    every = IntervalTimer(loop, 64.0)
    members = [Seen(loop) for _ in range(100)]
    for member in members:
        every.register(member, loop.now_s)
        loop.advance(0.009)
    loop.advance(70.0)
    assert loop.turns == 1
    assert all(len(member.at) == 1 for member in members)


def test_an_unregistered_member_is_not_called_and_an_empty_timer_does_not_run() -> None:
    loop = Clockwork()
    every = IntervalTimer(loop, 10.0)
    stays, leaves = Seen(loop), Seen(loop)
    every.register(leaves, loop.now_s)
    every.register(stays, loop.now_s)
    every.unregister(leaves)
    every.unregister(leaves)
    loop.advance(11.0)
    assert (len(leaves.at), len(stays.at), len(every)) == (0, 1, 1)
    every.unregister(stays)
    loop.advance(20.0)
    assert (loop.timers, len(every)) == (0, 0)
    every.register(stays, loop.now_s)
    loop.advance(11.0)
    assert len(stays.at) == 2
    every.close()
    assert (loop.timers, len(every)) == (0, 0)


def test_a_call_may_unregister_its_member_and_others_and_fail() -> None:
    loop = Clockwork()
    every = IntervalTimer(loop, 10.0)

    def end_both(member: Seen) -> None:
        every.unregister(member)
        every.unregister(victim)

    def fail(member: Seen) -> None:
        every.unregister(member)
        raise ZeroDivisionError

    first, victim, broken, last = Seen(loop, end_both), Seen(loop), Seen(loop, fail), Seen(loop)
    for member in (first, victim, broken, last):
        every.register(member, loop.now_s)
    with pytest.raises(ZeroDivisionError):  # which a loop logs
        loop.advance(11.0)
    assert loop.timers == 1
    loop.advance(15.0)
    assert [len(member.at) for member in (first, victim, broken)] == [1, 0, 1]
    assert len(last.at) == 2


def test_many_at_once_leave_room_for_others() -> None:
    loop = Clockwork()
    every = IntervalTimer(loop, 10.0)
    turns: list[int] = []
    members = [Seen(loop, lambda _: turns.append(loop.turns)) for _ in range(3 * CHECKS_PER_TURN)]
    for member in members:
        every.register(member, loop.now_s)
    loop.advance(15.0)
    assert all(len(member.at) == 1 for member in members)
    assert {turn: turns.count(turn) for turn in turns} == {
        1: CHECKS_PER_TURN,
        2: CHECKS_PER_TURN,
        3: CHECKS_PER_TURN,
    }


def test_the_clock_of_an_earlier_turn_keeps_the_order() -> None:
    loop = Clockwork()
    every = IntervalTimer(loop, 10.0)
    early, late = Seen(loop), Seen(loop)
    turn_s = loop.now_s
    every.register(early, turn_s)
    loop.advance(11.0)
    every.register(late, turn_s)
    loop.advance(11.0)
    assert [len(early.at), len(late.at)] == [2, 1]
