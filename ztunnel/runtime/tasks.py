"""Groups background tasks and fibers under an owner, which closes them."""

import asyncio
import logging
import weakref
from collections.abc import Callable, Coroutine, Iterator
from typing import Any, Final

from hbone.aio.fiber import Fiber
from hbone.aio.poller import Poller
from hbone.aio.started_task import StartedTask
from ztunnel.runtime.backoff import Backoff
from ztunnel.runtime.log_writer import PlainCount

log = logging.getLogger(__name__)

#: The waits before a failed task restarts. They are guesses: short enough for a proxy that depends on the task,
#: and long enough not to fill the log.
_FIRST_RESTART_S: Final = 0.1
_LONGEST_RESTART_S: Final = 15.0
#: How often kept tasks of this process have failed and were restarted.
restarts: Final = PlainCount()
_owners: Final[weakref.WeakSet["Tasks"]] = weakref.WeakSet()


class Tasks:
    """The tasks and fibers of one object, which closes them when it ends.

    A task that fails is a bug of ours: it is logged with its traceback, and other tasks continue. Tasks that the
    process needs until it ends, such as a connection to the control plane or an accept loop, are started by
    :meth:`keep`, and restarted after a failure. A task cannot be cancelled before its first await, so that its
    ``finally`` releases its resources.
    """

    def __init__(self, owner: str) -> None:
        self._owner = owner
        self._running: set[asyncio.Task[Any] | Fiber] = set()
        self._closed = False
        _owners.add(self)

    def __len__(self) -> int:
        return len(self._running)

    @property
    def fibers(self) -> int:
        """The number of fibers that have not ended."""
        return sum(isinstance(each, Fiber) for each in self._running)

    def start(self, work: Coroutine[Any, Any, Any], name: str) -> asyncio.Task[Any]:
        """Run ``work`` as a task, until it ends or the owner closes."""
        task = StartedTask(work, loop=asyncio.get_running_loop(), name=f"{self._owner}: {name}")
        if self._closed:
            task.cancel()
        self._running.add(task)
        task.add_done_callback(self._done)
        return task

    def keep(
        self,
        work: Callable[[], Coroutine[Any, Any, Any]],
        name: str,
        *,
        first_s: float = _FIRST_RESTART_S,
    ) -> asyncio.Task[Any]:
        """Run ``work()`` as a task, and again after each failure, until it returns or the owner closes.

        This is not for tasks that carry connections, because a second attempt cannot continue with half of a
        connection's state.

        Args:
            work: called for each attempt. Its ``finally`` releases the resources of the attempt.
            name: for logs.
            first_s: the wait before the second attempt. Later waits double up to 15 s. After an attempt that has
                lasted longer than 15 s, the first wait applies again.
        """
        return self.start(self._kept(work, name, Backoff(first_s, _LONGEST_RESTART_S)), name)

    async def _kept(self, work: Callable[[], Coroutine[Any, Any, Any]], name: str, backoff: Backoff) -> None:
        loop = asyncio.get_running_loop()
        while True:
            began_s = loop.time()
            try:
                await work()
            except Exception as error:
                if loop.time() - began_s > backoff.limit_s:
                    backoff.reset()
                wait_s = backoff.next()
                restarts.value += 1
                log.error("task %s: %s failed and starts again in %gs", self._owner, name, wait_s, exc_info=error)
                await asyncio.sleep(wait_s)
            else:
                return

    def run(self, poller: Poller, work: Coroutine[Any, Any, None], name: str) -> Fiber:
        """Run ``work`` as a fiber that ``poller`` resumes. This is for work on connections."""
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
        """Cancel every task without waiting, and also tasks that start later; idempotent."""
        self._closed = True
        for task in list(self._running):
            task.cancel()

    async def close(self) -> None:
        """Cancel every task and wait until all have ended; idempotent."""
        self.cancel()
        while self._running:
            await asyncio.wait(list(self._running))


def fibers_running() -> int:
    """Return how many fibers of this process have not ended, for metrics. This iterates over all fibers."""
    return sum(owner.fibers for owner in _owners)


def errors_of(error: BaseException) -> Iterator[BaseException]:
    """Iterate over the errors in an exception group, including those in nested groups."""
    if isinstance(error, BaseExceptionGroup):
        for inner in error.exceptions:
            yield from errors_of(inner)
    else:
        yield error
