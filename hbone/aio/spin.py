"""Adaptive spin: whether the poller polls again instead of sleeping."""

from __future__ import annotations

import os
import select
import time
from dataclasses import dataclass
from typing import Final

_CROWD: Final = 3.0  # sockets ready per turn, on average; with more, a wake-up serves many
_BULK_BYTES: Final = 8 * 1024  # read per turn, on average: enough work to make up for a wake-up
_POLLS: Final = 8  # in a row, before the loop's other callbacks run: some 5 microseconds
_LATE_S: Final = 500e-6  # between two polls in a row: another process had the processor for long
_HOLD_S: Final = 0.005  # at first; doubled each time up to
_LONGEST_HOLD_S: Final = 3.2
_MOST_SKIPPED: Final = 256
_WASTE: Final = 0.03  # of a processor, at most, for spins that end without work
_SAVED_S: Final = 0.01  # of such time that may be saved up while idle


@dataclass(frozen=True, slots=True, kw_only=True)
class SpinSettings:
    """Adaptive spin: off while ``limit_s`` is 0; that bounds one spin after the last activity."""

    limit_s: float = 0.0


class Spin:
    """Decides after each turn whether to poll again at once.

    Between polls the processor is offered to other processes (sched_yield), because mostly it is their answer that
    the poller waits for. There is no spin where it cannot pay:

    - while many sockets are busy, or much is moved: sleeping collects their work into one wake-up;
    - for a while after the processor came back late: the cores are contended, and the scheduler serves a process
      that sleeps sooner than one that yields;
    - ever more rarely while spins end without work, down to one activity in 256, so that a trickle of traffic
      costs no more than sleeping would.

    Besides, the time of spins in vain is bounded to a share of the processor.
    """

    __slots__ = (
        "_crowd",
        "_failures",
        "_held_until_s",
        "_hold_s",
        "_limit_s",
        "_moved",
        "_saved_at_s",
        "_saved_s",
        "_skip",
        "_until_s",
        "on",
    )

    def __init__(self, settings: SpinSettings) -> None:
        self.on = False
        """Poll again instead of sleeping."""
        self._limit_s = settings.limit_s
        self._until_s = 0.0
        self._crowd = 0.0
        self._moved = 0.0
        self._failures = 0
        self._skip = 0
        self._held_until_s = 0.0
        self._hold_s = _HOLD_S
        self._saved_s = _SAVED_S
        self._saved_at_s = time.perf_counter()

    def poll(self, epoll: select.epoll, most: int) -> list[tuple[int, int]]:
        """Poll a few times; return up to ``most`` events, as soon as there are any."""
        last_s = time.perf_counter()
        for _ in range(_POLLS):
            os.sched_yield()
            ready = epoll.poll(0, most)
            now_s = time.perf_counter()
            # Another process had the processor for half a millisecond: where cores are scarce, a yield is a long
            # sleep, and a real sleep would be the shorter one. Hold off, longer each time it happens again.
            if now_s - last_s > _LATE_S:
                self._hold_s = min(_LONGEST_HOLD_S, 2 * self._hold_s)
                self._held_until_s = now_s + self._hold_s
                self.on = False
                return ready
            if ready:
                self._failures = 0
                return ready
            if now_s > self._until_s:
                # In vain: skip the next 0, 1, 3, ... 255 occasions, and pay for the time.
                self._skip = min(_MOST_SKIPPED, 1 << self._failures) - 1
                self._failures += 1
                self._saved_s -= self._limit_s
                self.on = False
                break
            last_s = now_s
        return []

    def worked(self, ready: int, read_bytes: int) -> None:
        """Take note of a turn that served ``ready`` sockets; sets :attr:`on` for what follows it."""
        # Moving averages over some 16 turns: a burst neither starts nor ends the regime by itself.
        self._crowd += (ready - self._crowd) / 16
        self._moved += (read_bytes - self._moved) / 16
        self.on = False
        if self._skip:
            self._skip -= 1
        elif self._crowd < _CROWD and self._moved < _BULK_BYTES:
            now_s = time.perf_counter()
            self._saved_s = min(_SAVED_S, self._saved_s + _WASTE * (now_s - self._saved_at_s))
            self._saved_at_s = now_s
            idle_s = now_s - self._held_until_s
            if idle_s >= 0.0 and self._saved_s > 0.0:
                if idle_s > 2 * self._hold_s:
                    self._hold_s = _HOLD_S
                self._until_s = now_s + self._limit_s
                self.on = True
