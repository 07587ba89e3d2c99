"""Provides asyncio tasks that always run to their first await, even if they are cancelled before.

If an asyncio task is cancelled before its first step, neither the coroutine nor its ``finally`` runs. An argument
that the coroutine owns (a socket, an entry in a table) would leak. A :class:`StartedTask` always starts, and its
first await raises the CancelledError. :class:`hbone.aio.fiber.Fiber` works in the same way. Python 3.12's eager
tasks are no alternative: they start inside the caller, whose buffers can be in use.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


class _Start:
    """Records whether a task has started, and the messages of cancellations before that."""

    __slots__ = ("begun", "cancellations")

    def __init__(self) -> None:
        self.begun = False
        self.cancellations: list[Any | None] = []


class StartedTask(asyncio.Task[T]):
    """Runs ``coroutine`` as an :class:`asyncio.Task`, without cancelling it before its first await."""

    def __init__(self, coroutine: Coroutine[Any, Any, T], *, loop: asyncio.AbstractEventLoop, name: str) -> None:
        self._start = _Start()
        super().__init__(_begin(coroutine, self._start), loop=loop, name=name)

    def cancel(self, msg: Any | None = None) -> bool:
        """Cancel the task. A task that has not run yet runs until its first await, and is cancelled there."""
        if self._start.begun or self.done():
            return super().cancel(msg)
        self._start.cancellations.append(msg)
        return True


async def _begin(coroutine: Coroutine[Any, Any, T], start: _Start) -> T:
    # The task is not an argument: it would be in a reference cycle of task, error, traceback and this frame.
    start.begun = True
    if start.cancellations:
        _cancel_now(start)
    return await coroutine


def _cancel_now(start: _Start) -> None:
    """Cancel the task from its own coroutine, where a cancellation takes effect at the next await."""
    task = asyncio.current_task()
    assert task is not None
    for message in start.cancellations:
        task.cancel(message)
