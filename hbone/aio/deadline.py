"""A time limit for part of a coroutine, at a tenth of what :func:`asyncio.timeout` costs.

Each connection has one or two, and nearly none passes: a timer of the loop, made and cancelled per connection,
is most of their cost. These share one timer per length (:mod:`hbone.aio.interval_timer`), and are up to a 64th of
their length late.

Not compiled: see :mod:`hbone.aio.waits`.
"""

from __future__ import annotations

from asyncio import CancelledError
from types import TracebackType
from typing import Self

from hbone.aio.fiber import current
from hbone.aio.interval_timer import IntervalTimer
from hbone.aio.poller import Poller


class Deadline:
    """Raises TimeoutError out of ``with Deadline(poller, after_s):`` by cancelling the fiber or task inside.

    As with :func:`asyncio.timeout`, a cancellation from elsewhere stays one. To be entered once.

    Args:
        poller: the fiber's poller.
        after_s: the limit. Few different ones, such as a configuration's, because each has a timer.
    """

    __slots__ = ("_after_s", "_cancelling", "_poller", "_task", "_timer", "passed")

    _timer: IntervalTimer

    def __init__(self, poller: Poller, after_s: float) -> None:
        self._poller = poller
        self._after_s = after_s
        self.passed = False
        """Whether the time limit passed before the block was left."""

    def __enter__(self) -> Self:
        poller = self._poller
        task = self._task = current(poller)
        self._cancelling = task.cancelling()
        self._timer = poller.interval_timer(self._after_s)
        self._timer.register(self, poller.loop.time())
        return self

    def on_interval(self) -> None:
        """Cancel what the block awaits, because its time limit has passed."""
        self.passed = True
        self._timer.unregister(self)
        self._task.cancel()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if not self.passed:
            self._timer.unregister(self)
        elif self._task.uncancel() <= self._cancelling and kind is not None and issubclass(kind, CancelledError):
            raise TimeoutError from error
