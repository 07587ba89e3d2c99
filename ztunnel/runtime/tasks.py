"""Background tasks with an owner."""

import asyncio
import logging
from collections.abc import Coroutine, Iterator
from typing import Any

from hbone.aio.fiber import Fiber
from hbone.aio.poller import Poller
from hbone.aio.started_task import StartedTask

log = logging.getLogger(__name__)


class Tasks:
    """Tasks that live as long as one object does; that object closes them.

    A task that fails is a bug of ours: it is logged with its traceback, and its siblings go on. Each reaches its
    first await before it can be cancelled, so that it cleans up what it was given.
    """

    def __init__(self, owner: str) -> None:
        self._owner = owner
        self._running: set[asyncio.Task[Any] | Fiber] = set()
        self._closed = False

    def __len__(self) -> int:
        return len(self._running)

    def start(self, work: Coroutine[Any, Any, Any], name: str) -> asyncio.Task[Any]:
        """Run ``work`` until it ends or the owner closes."""
        task = StartedTask(work, loop=asyncio.get_running_loop(), name=f"{self._owner}: {name}")
        if self._closed:
            task.cancel()
        self._running.add(task)
        task.add_done_callback(self._done)
        return task

    def run(self, poller: Poller, work: Coroutine[Any, Any, None], name: str) -> Fiber:
        """As :meth:`start`, for what moves bytes: as a fiber, which goes on in the turns of ``poller``."""
        fiber = Fiber(poller, work, f"{self._owner}: {name}", self._done)
        if self._closed:
            fiber.cancel()
        self._running.add(fiber)
        return fiber

    def _done(self, task: asyncio.Task[Any] | Fiber) -> None:
        self._running.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("task %s failed", task.get_name(), exc_info=error)

    def cancel(self) -> None:
        """Cancel every task, without waiting."""
        self._closed = True
        for task in list(self._running):
            task.cancel()

    async def close(self) -> None:
        """Cancel every task and wait until all are gone."""
        self.cancel()
        while self._running:
            await asyncio.wait(list(self._running))


def errors_of(error: BaseException) -> Iterator[BaseException]:
    """What stopped the tasks of a group, out of the groups within it too."""
    if isinstance(error, BaseExceptionGroup):
        for inner in error.exceptions:
            yield from errors_of(inner)
    else:
        yield error
