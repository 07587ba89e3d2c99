"""Records the growth of a process's totals per ten seconds, for the last 15 minutes, in a ring of 3 KiB.
Pure.

A timer samples existing totals, so connections have no additional cost. The monotonic clock numbers the steps. All
processes of a node share it, so the rings of workers can be added. If no sample was taken for several steps (a
process was stopped), the growth is spread evenly over them.
"""

from __future__ import annotations

from array import array
from typing import Final, NamedTuple

STEP_S: Final = 10.0
STEPS: Final = 90
#: The largest growth per step that is accepted. It is limited, because counts that workers report are not trusted.
_MOST: Final = 1 << 56


class Totals(NamedTuple):
    """The counts of one process since its start.

    Attributes:
        connections: opened connections. A connection between two pods of this node counts at both ends.
        failures: failed connections, even if they never opened.
        denials: the failures that are refusals, here or by the peer
            (:data:`~ztunnel.proxy.dataplane.reasons.REFUSALS`).
        moved: the bytes moved in both directions.
    """

    connections: int = 0
    failures: int = 0
    denials: int = 0
    moved: int = 0


_WIDTH: Final = len(Totals._fields)


class Steps(NamedTuple):
    """The recorded growth, to send to another process: the number of the first step, and a row like
    :class:`Totals` per step.
    """

    first: int
    rows: tuple[tuple[int, ...], ...]


class History:
    """The history of one process's totals."""

    def __init__(self) -> None:
        self._grown = array("q", bytes(8 * _WIDTH * STEPS))
        # The range of steps with known growth, from the first up to the next one, which is not included.
        self._first = self._next = 0
        self._before: Totals | None = None

    def is_due(self, now_s: float) -> bool:
        """Return whether a step has ended since the last sample."""
        return self._before is None or int(now_s // STEP_S) > self._next

    def sample(self, now_s: float, totals: Totals) -> None:
        """Store the growth since the previous sample. The first sample is the base of later ones.

        Args:
            now_s: monotonic seconds.
            totals: the current totals. A decreased total counts as unchanged.
        """
        step, before = int(now_s // STEP_S), self._before
        if before is None:
            self._first = self._next = step
        elif step <= self._next:
            return
        else:
            grown = [max(0, now - then) for now, then in zip(totals, before, strict=True)]
            begin, parts = self._next, step - self._next
            self._advance(step)
            for place in range(max(0, parts - STEPS), parts):
                row = [each * (place + 1) // parts - each * place // parts for each in grown]
                self._add(begin + place, row)
        self._before = totals

    def absorb(self, totals: Totals) -> None:
        """Exclude the counts that the next totals contain from another process. That process's steps are added
        instead.
        """
        if self._before is not None:
            self._before = Totals(*map(sum, zip(self._before, totals, strict=True)))

    def _advance(self, to: int) -> None:
        for step in range(max(self._next, to - STEPS), to):
            place = step % STEPS * _WIDTH
            self._grown[place : place + _WIDTH] = array("q", bytes(8 * _WIDTH))
        self._next = to
        self._first = max(self._first, to - STEPS)

    def _add(self, step: int, row: list[int] | tuple[int, ...]) -> None:
        place = step % STEPS * _WIDTH
        for index, grown in enumerate(row[:_WIDTH], place):
            self._grown[index] = min(_MOST, self._grown[index] + min(_MOST, max(0, grown)))

    def steps(self) -> Steps:
        """Return the range of steps whose growth is known."""
        places = (step % STEPS * _WIDTH for step in range(self._first, self._next))
        return Steps(self._first, tuple(tuple(self._grown[place : place + _WIDTH]) for place in places))

    def add(self, steps: Steps) -> None:
        """Add the growth counted by another process. If this history has no samples, it takes over the other's
        steps. Otherwise only the steps within its own range are added.
        """
        end = steps.first + len(steps.rows)
        if self._before is None and self._first == self._next:
            self._first = self._next = max(steps.first, end - STEPS)
            self._advance(end)
        for step, row in enumerate(steps.rows, steps.first):
            if self._first <= step < self._next:
                self._add(step, row)

    def shown(self, now_s: float, wall_s: float) -> dict[str, object]:
        """Return the history for the live page: ``step_s``, ``ended_s`` (wall time of the newest step's end), and
        the list of each total. A list has at most :data:`STEPS` numbers, the oldest first.

        Args:
            now_s, wall_s: the current time, by the monotonic and the wall clock.
        """
        rows = self.steps().rows
        return {
            "step_s": STEP_S,
            "ended_s": wall_s - (now_s - self._next * STEP_S),
            **{name: [row[place] for row in rows] for place, name in enumerate(Totals._fields)},
        }
