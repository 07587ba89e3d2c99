"""Adaptive spin: whether the poller asks again instead of sleeping."""

from __future__ import annotations

import os
import select
import time
from dataclasses import dataclass
from typing import Final

_CROWD: Final = 3.0  # sockets ready per turn, on average; more are busy enough to be served in batches
_BULK_BYTES: Final = 8 * 1024  # read per turn, on average: work enough to make up for a wake-up
_POLLS: Final = 8  # at a stretch, before the loop's other work gets its turn: some 5 microseconds
_LATE_S: Final = 500e-6  # between two polls of a stretch: somebody else had the processor for long
_HOLD_S: Final = 0.005  # at first; doubled each time up to
_LONGEST_HOLD_S: Final = 3.2
_MOST_SKIPPED: Final = 256
_WASTE: Final = 0.03  # of a processor, at most, for spins that end without work; saved up to
_SAVED_S: Final = 0.01


@dataclass(frozen=True, slots=True, kw_only=True)
class SpinSettings:
    """Adaptive spin: off while ``limit_s`` is 0; that bounds one spin after the last activity."""

    limit_s: float = 0.0


class Spin:
    """Decides after each turn whether to ask again at once.

    Between polls the processor is offered to whoever else wants it (sched_yield): mostly that is the very process
    whose answer is waited for. Never where it cannot pay: not while many sockets are busy (sleeping collects their
    work) or much is moved, not for a while after the processor came back late (cores are contended, and who sleeps
    is served sooner than who yields), and ever more rarely when spins end without work, down to one activity in
    256, so that a trickle of traffic costs no more than sleeping would. What spins in vain have cost is bounded
    besides.
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
        """Ask a few times; what is ready, if anything, at most so many."""
        last_s = time.perf_counter()
        for _ in range(_POLLS):
            os.sched_yield()
            ready = epoll.poll(0, most)
            now_s = time.perf_counter()
            if now_s - last_s > _LATE_S:
                self._hold_s = min(_LONGEST_HOLD_S, 2 * self._hold_s)
                self._held_until_s = now_s + self._hold_s
                self.on = False
                return ready
            if ready:
                self._failures = 0
                return ready
            if now_s > self._until_s:
                self._skip = min(_MOST_SKIPPED, 1 << self._failures) - 1
                self._failures += 1
                self._saved_s -= self._limit_s
                self.on = False
                break
            last_s = now_s
        return []

    def worked(self, ready: int, read_bytes: int) -> None:
        """A turn has served ``ready`` sockets: begin to spin after it, or go on."""
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
