"""Decides whether the poller polls again instead of sleeping (adaptive spin).

Sleeping costs a wake-up: the scheduler's work, cold caches and a pass through the event loop. Spinning costs
processor time for the duration of the wait. Which is cheaper depends on the machine, on the distance of peers and
on the load. If a client waits for each answer before its next request, a proxy that spins can double the client's
rate. If requests arrive at a fixed rate, spinning has no benefit.

So the poller measures which is cheaper. At any time the proxy has one of two habits, sleeping or spinning.
Sometimes it tries the other habit for some iterations. The cost of a habit is the product of CPU time per byte and
the third power of elapsed time per byte. If the other habit is cheaper in two trials in a row, the proxy adopts
it. (Circuit design weighs energy against delay with such products.) The third power sets the value of faster
answers: 2.3 times the CPU time for two thirds of the elapsed time is a gain, and a tenth less elapsed time is
worth 1.15 times the CPU time. At a fixed rate of requests, both habits take equal time per byte, so the habit with
less CPU time wins. While the other habit does not win and the load does not change, it is tried less and less
often.

In a chain of proxies on one machine, each wait is short only while the other proxies are awake. So trials start at
the same time in all processes of a machine: at multiples of the period on the monotonic clock.
"""

from __future__ import annotations

import os
import select
import time
from dataclasses import dataclass
from typing import Final

_POLLS: Final = 8  # polls in a row, before the loop's other callbacks run: some 5 microseconds
_LATE_S: Final = 500e-6  # a longer time between two polls means that another process had the processor for long
_HOLD_S: Final = 0.005  # the first pause, doubled each time up to the next constant
_LONGEST_HOLD_S: Final = 3.2
_WINDOW_TURNS: Final = 64
"""The number of iterations of a measurement. A trial is one measurement."""
_ENOUGH_TURNS: Final = 32  # fewest iterations of a measurement that the next period cut short
_PERIOD_S: Final = 0.064
_MOST_FAILURES: Final = 7  # failed trials that double the time to the next one: at most 8 seconds
_MOST_CONFIRMED: Final = 4  # the same limit while spinning, where the time is at most one second
_SLOWEST_TURN_S: Final = 0.002  # slower iterations do not benefit from spinning
_BETTER: Final = 0.85
"""The cost of a tried habit, relative to the current habit, below which a trial is won."""
_WINS: Final = 2
"""The number of consecutive trials that a habit must win, because randomly arriving requests can be uneven within
one trial.
"""
_CHANGED: Final = 1.6  # a rate that is higher or lower by this factor counts as a different load


@dataclass(frozen=True, slots=True, kw_only=True)
class SpinSettings:
    """The settings of adaptive spin. ``limit_s`` is how long to spin after the last activity, at
    most. 0: never.
    """

    limit_s: float = 0.0


class Spin:
    """Decides after each iteration whether to poll again at once; see the module for the rule.

    Between polls the processor is yielded to other processes (sched_yield), because the poller mostly waits for
    their answers. If the yield returns late, the cores are contended, and spinning pauses, because the scheduler
    favours sleeping processes over yielding processes.
    """

    __slots__ = (
        "_began_s",
        "_bytes",
        "_cost",
        "_cpu_s",
        "_due_s",
        "_failures",
        "_held_until_s",
        "_hold_s",
        "_limit_s",
        "_rate",
        "_rate_tried",
        "_spinning",
        "_trial",
        "_turns",
        "_until_s",
        "_wins",
        "on",
    )

    def __init__(self, settings: SpinSettings) -> None:
        self.on = False
        """Whether to poll again instead of sleeping."""
        self._limit_s = settings.limit_s
        self._until_s = 0.0
        self._held_until_s = 0.0
        self._hold_s = _HOLD_S
        self._spinning = False
        self._trial = False
        self._cost = 0.0  # the cost of the current habit; 0: not known
        self._rate = 0.0  # bytes a second
        self._rate_tried = 0.0  # the rate at the last trial
        self._wins = 0
        self._failures = 0
        self._due_s = 0.0
        self._turns = self._bytes = 0
        self._began_s = time.perf_counter()
        self._cpu_s = time.thread_time()

    def poll(self, epoll: select.epoll, most: int) -> list[tuple[int, int]]:
        """Poll a few times, until there are events. Return up to ``most`` events, or an empty list."""
        last_s = time.perf_counter()
        for _ in range(_POLLS):
            ready = epoll.poll(0, most)
            if ready:
                return ready
            os.sched_yield()
            now_s = time.perf_counter()
            # After the yield, another process had the processor for half a millisecond. If cores are scarce,
            # yielding takes longer than sleeping. So stop spinning, for a period that grows each time this
            # happens.
            if now_s - last_s > _LATE_S:
                self._hold_s = min(_LONGEST_HOLD_S, 2 * self._hold_s)
                self._held_until_s = now_s + self._hold_s
                self.on = False
                break
            if now_s > self._until_s:
                self.on = False
                break
            last_s = now_s
        return []

    def worked(self, now_s: float, read_bytes: int) -> None:
        """Record the bytes read in an iteration, and set :attr:`on` for the following wait.

        Args:
            now_s: monotonic time, the same in all processes of the machine; milliseconds are exact enough.
            read_bytes: the number of bytes that the iteration read.
        """
        self._turns += 1
        self._bytes += read_bytes
        if self._turns >= _WINDOW_TURNS or now_s >= self._due_s:
            self._measured(now_s)
        self.on = False
        if self._spinning:
            now_s = time.perf_counter()
            idle_s = now_s - self._held_until_s
            if idle_s >= 0.0:
                if idle_s > 2 * self._hold_s:
                    self._hold_s = _HOLD_S
                self._until_s = now_s + self._limit_s
                self.on = True

    def _measured(self, now_s: float) -> None:
        """End a measurement of the current habit, and decide whether to spin during the next one."""
        at_s, cpu_s = time.perf_counter(), time.thread_time()
        elapsed_s, used_s = at_s - self._began_s, cpu_s - self._cpu_s
        turns, moved = self._turns, self._bytes
        self._began_s, self._cpu_s = at_s, cpu_s
        self._turns = self._bytes = 0
        busy = moved > 0 and elapsed_s < turns * _SLOWEST_TURN_S
        cost = used_s * elapsed_s**3 / moved**4 if busy else 0.0
        if self._trial:
            self._trial = False
            won = busy and cost < _BETTER * self._cost
            self._wins = self._wins + 1 if won else 0
            if self._wins == _WINS:
                self._wins = 0
                self._cost = cost
            else:
                self._spinning = not self._spinning
            most = _MOST_CONFIRMED if self._spinning else _MOST_FAILURES
            self._failures = 0 if won else min(self._failures + 1, most)
        elif not busy:
            self._spinning = False
            self._wins = 0
            self._cost = self._rate = 0.0
        elif turns >= _ENOUGH_TURNS:
            rate = moved / elapsed_s
            if self._rate / _CHANGED < rate < self._rate * _CHANGED:
                self._cost = (3 * self._cost + cost) / 4
                self._rate = (3 * self._rate + rate) / 4
            else:
                self._cost, self._rate = cost, rate
            if not self._rate_tried / _CHANGED < self._rate < self._rate_tried * _CHANGED:
                self._failures = 0
        if now_s >= self._due_s:
            period = int(now_s / _PERIOD_S)
            self._due_s = (period + 1) * _PERIOD_S
            if self._cost and not period % (1 << self._failures):
                self._trial = True
                self._spinning = not self._spinning
                self._rate_tried = self._rate
