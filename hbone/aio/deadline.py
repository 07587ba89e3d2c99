"""A time limit for part of a coroutine, at a tenth of the cost of :func:`asyncio.timeout`.

Each connection has one or two time limits, and few of them expire. Most of their cost would be creating and
cancelling a timer of the loop per connection. Deadlines of one length share a timer
(:mod:`hbone.aio.interval_timer`), and expire up to a 64th of their length late.

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

    Like with :func:`asyncio.timeout`, a cancellation by someone else remains a CancelledError. Enter each object
    once.

    Args:
        poller: the fiber's poller.
        after_s: the limit. Use few different values, such as a configuration's, because each has a timer.
        began_s: the start of the limit, by the loop's clock, if it is earlier than the entry of the block. Such a
            deadline has a timer of its own.
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
        """Cancel what the block awaits, because its time limit has passed."""
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
