"""Watches the event loop of a process: a stall is logged with the stack that caused it, and counted.

A timer on the loop ticks every :data:`BEAT_S`, and a thread checks that it did. Only the thread can report a stall
while the loop is still blocked, so that the stack shows the cause. The loop itself counts stalls: a tick that is
late was delayed by one. When a stall has ended, a further log line has its length.

A whole process can be stopped (SIGSTOP, a frozen control group, a machine without a free core). The function at
the top of the stack is not the cause then. In this case the thread was late, too, and the process used no
processor time, so the thread reports no stack. A C function that keeps the interpreter's lock also delays the
thread, but it uses processor time, and its caller is still at the top of the stack.
"""

from __future__ import annotations

import asyncio
import logging
import sys
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final, Self

from ztunnel.runtime.log_writer import Count, PlainCount

log = logging.getLogger(__name__)

#: Seconds between two beats of the loop, and between two checks by the thread.
BEAT_S: Final = 0.5
#: The shortest delay that is reported as a stall. Envoy calls this a mega miss, and has the same default.
STALL_S: Final = 1.0
#: The shortest delay that is counted as a miss, like Envoy's watchdog_miss.
MISS_S: Final = 0.2
#: The number of innermost stack frames that a report shows.
_FRAMES: Final = 25
#: If the thread was delayed, the process counts as running if it used a processor for at least this fraction of
#: the delay.
_RAN: Final = 0.5


@dataclass(slots=True)
class LoopDelays:
    """Counts and sums the delays of one loop's beats.

    Attributes:
        misses: the number of beats that were more than ``MISS_S`` late.
        stalls: the number of beats that were more than ``STALL_S`` late.
        late_s: the sum of all beats' delays, in seconds.
    """

    misses: Count = field(default_factory=PlainCount)
    stalls: Count = field(default_factory=PlainCount)
    late_s: float = 0.0


class Watchdog:
    """Watches the loop on which it is entered. Use each object for one ``with`` only.

    Args:
        delays: receives the counts.
        flush: called by the thread after a report. Log lines that wait for a timer of the loop would wait for the
            end of the stall, which might never come.
        culprit: returns the name of foreign code that is running on the loop, such as an addon. Empty if there is
            none.
        stall_s, beat_s: see the constants; tests give shorter ones.
    """

    def __init__(
        self,
        delays: LoopDelays,
        *,
        flush: Callable[[], object] = lambda: None,
        culprit: Callable[[], str] | None = None,
        stall_s: float = STALL_S,
        beat_s: float = BEAT_S,
    ) -> None:
        self._delays = delays
        self._flush = flush
        self._culprit = culprit
        self._stall_s = stall_s
        self._beat_s = beat_s
        self._timer: asyncio.TimerHandle | None = None
        self._stopped = threading.Event()
        self._check = _Check(stall_s=stall_s, beat_s=beat_s)
        self._due_s = 0.0
        self._cpu_s = 0.0
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)
        self._watched = 0

    def __enter__(self) -> Self:
        self._loop = asyncio.get_running_loop()
        self._watched = threading.get_ident()
        now_s = time.monotonic()
        self._check.begin(now_s, time.process_time())
        self._arm(now_s)
        self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        """Stop the timer and the thread."""
        self._stopped.set()
        if self._timer is not None:
            self._timer.cancel()
        self._thread.join()

    # In the loop

    def _arm(self, now_s: float) -> None:
        self._due_s, self._cpu_s = now_s + self._beat_s, time.process_time()
        self._timer = self._loop.call_later(self._beat_s, self._beat)

    def _beat(self) -> None:
        now_s = time.monotonic()
        self._check.beat_s_at = now_s
        late_s = max(0.0, now_s - self._due_s)
        delays = self._delays
        delays.late_s += late_s
        if late_s > MISS_S:
            delays.misses.value += 1
        if late_s > self._stall_s:
            delays.stalls.value += 1
            log.warning(
                "event loop stood still for %.2fs without serving connections, process ran for %.2fs of it",
                late_s,
                time.process_time() - self._cpu_s,
            )
        self._arm(now_s)

    # In the thread

    def _watch(self) -> None:
        while not self._stopped.wait(self._beat_s):
            if self._check.stalled(time.monotonic(), time.process_time()):
                self._report()

    def _report(self) -> None:
        frame = sys._current_frames().get(self._watched)
        stack = "".join(traceback.format_stack(frame)[-_FRAMES:]) if frame is not None else "no frame\n"
        named = self._culprit() if self._culprit is not None else ""
        where = f"{named}, in" if named else "in"
        log.error("event loop stands still for more than %gs, %s:\n%s", self._stall_s, where, stack.rstrip())
        self._flush()


class _Check:
    """Decides, each time the thread checks the loop, whether to report a new stall. Pure.

    Attributes:
        beat_s_at: the time of the last beat. The loop writes it.
    """

    def __init__(self, *, stall_s: float, beat_s: float) -> None:
        self.beat_s_at = 0.0
        self._stall_s = stall_s
        self._beat_s = beat_s
        self._reported_at_s: float | None = None
        self._last_s = self._last_cpu_s = 0.0

    def begin(self, now_s: float, cpu_s: float) -> None:
        """Start with ``now_s`` as the time of the first beat and the first check."""
        self.beat_s_at = self._last_s = now_s
        self._last_cpu_s = cpu_s

    def stalled(self, now_s: float, cpu_s: float) -> bool:
        """Return True at the first check that detects a stall, and then False until the stall has ended.

        Args:
            now_s: monotonic seconds.
            cpu_s: processor seconds of the process so far.
        """
        last_s, self._last_s = self._last_s, now_s
        last_cpu_s, self._last_cpu_s = self._last_cpu_s, cpu_s
        beat_s = self.beat_s_at
        if now_s - beat_s <= self._beat_s + self._stall_s or beat_s == self._reported_at_s:
            return False
        gap_s = now_s - last_s
        if gap_s > self._beat_s + self._stall_s and cpu_s - last_cpu_s < _RAN * gap_s:
            return False  # the process was stopped; if the loop is still blocked, the next check reports it
        self._reported_at_s = beat_s
        return True
