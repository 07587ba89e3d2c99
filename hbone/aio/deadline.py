"""Sets a time limit for part of a coroutine, at a tenth of the cost of :func:`asyncio.timeout`.

Each connection has one or two time limits, and few of these expire. With a loop timer per connection, creating and
cancelling timers would be most of the cost. So deadlines of equal length share a timer
(:mod:`hbone.aio.interval_timer`), and can expire up to a 64th of their length late.

Not compiled: see :mod:`hbone.aio.waits`.
"""

from __future__ import annotations

import asyncio
from asyncio import CancelledError
from types import TracebackType
from typing import Self

from hbone.aio.fiber import current
from hbone.aio.interval_timer import IntervalTimer
from hbone.aio.poller import Poller


class Deadline:
    """Raises TimeoutError out of ``with Deadline(poller, after_s):`` by cancelling the fiber or task inside.

    As with :func:`asyncio.timeout`, a cancellation by other code remains a CancelledError. Enter each object only
    once.

    Args:
        poller: the fiber's poller.
        after_s: the limit. Use few different values, for example from a configuration, because each has a timer.
        began_s: the start of the time limit, by the loop's clock, if it began before the block was entered. Such a
            deadline has a separate timer.
    """

    __slots__ = ("_after_s", "_began_s", "_cancelling", "_own", "_poller", "_task", "_timer", "passed")

    _timer: IntervalTimer
    _own: asyncio.TimerHandle

    def __init__(self, poller: Poller, after_s: float, began_s: float | None = None) -> None:
        self._poller = poller
        self._after_s = after_s
        self._began_s = began_s
        self.passed = False
        """Whether the time limit passed before the block was left."""

    def __enter__(self) -> Self:
        poller = self._poller
        task = self._task = current(poller)
        self._cancelling = task.cancelling()
        if self._began_s is None:
            self._timer = poller.interval_timer(self._after_s)
            self._timer.register(self, poller.loop.time())
        else:
            self._own = poller.loop.call_at(self._began_s + self._after_s, self.on_interval)
        return self

    def on_interval(self) -> None:
        """Cancel what the block currently awaits, because the time limit has passed."""
        self.passed = True
        if self._began_s is None:
            self._timer.unregister(self)
        self._task.cancel()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if not self.passed:
            if self._began_s is None:
                self._timer.unregister(self)
            else:
                self._own.cancel()
        elif self._task.uncancel() <= self._cancelling and kind is not None and issubclass(kind, CancelledError):
            raise TimeoutError from error
