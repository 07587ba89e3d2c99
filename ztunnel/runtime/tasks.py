"""Gives background tasks and fibers an owner, which closes them."""

import asyncio
import logging
from collections.abc import Coroutine, Iterator
from typing import Any

from hbone.aio.fiber import Fiber
from hbone.aio.poller import Poller
from hbone.aio.started_task import StartedTask

log = logging.getLogger(__name__)


class Tasks:
    """The tasks and fibers of one object, which closes them when it ends.

    A task that fails is a bug of ours: it is logged with its traceback, and the others continue. Each task reaches
    its first await before it can be cancelled, so that its ``finally`` releases the resources it was given.
    """

    def __init__(self, owner: str) -> None:
        self._owner = owner
        self._running: set[asyncio.Task[Any] | Fiber] = set()
        self._closed = False

    def __len__(self) -> int:
        return len(self._running)

    def start(self, work: Coroutine[Any, Any, Any], name: str) -> asyncio.Task[Any]:
        """Run ``work`` as a task until it ends or the owner closes."""
        task = StartedTask(work, loop=asyncio.get_running_loop(), name=f"{self._owner}: {name}")
        if self._closed:
            task.cancel()
        self._running.add(task)
        task.add_done_callback(self._done)
        return task

    def run(self, poller: Poller, work: Coroutine[Any, Any, None], name: str) -> Fiber:
        """Run ``work`` as a fiber, which resumes in the turns of ``poller``; for work on connections."""
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
        """Cancel every task without waiting, and all that start later; idempotent."""
        self._closed = True
        for task in list(self._running):
            task.cancel()

    async def close(self) -> None:
        """Cancel every task and wait until all have ended; idempotent."""
        self.cancel()
        while self._running:
            await asyncio.wait(list(self._running))


def errors_of(error: BaseException) -> Iterator[BaseException]:
    """Iterate over the errors in an exception group, and in the groups inside it."""
    if isinstance(error, BaseExceptionGroup):
        for inner in error.exceptions:
            yield from errors_of(inner)
    else:
        yield error
