"""Tracks the tasks that must be complete before a proxy in an Istio mesh is ready."""

import asyncio
import logging
from collections.abc import Callable

log = logging.getLogger(__name__)

DESCRIPTORS = "descriptors"


class Readiness:
    """The set of tasks that must be complete before the proxy reports itself ready.

    Args:
        pending: the tasks at the start.
        short: returns whether pods are waiting for free file descriptors before accepting connections. While this
            is the case, the proxy is not ready.
    """

    def __init__(self, pending: set[str], short: Callable[[], bool] = lambda: False) -> None:
        self._pending = pending
        self._short = short
        self._since_s = asyncio.get_running_loop().time()

    @property
    def pending(self) -> set[str]:
        """The tasks that the proxy waits for. Empty when it is ready."""
        return self._pending | {DESCRIPTORS} if self._short() else self._pending

    def done(self, task: str) -> None:
        """Mark a task as complete; idempotent."""
        if task in self._pending:
            self._pending.discard(task)
            took_s = asyncio.get_running_loop().time() - self._since_s
            if self._pending:
                log.info("Task '%s' complete (%.3fs), still awaiting %d tasks", task, took_s, len(self._pending))
            else:
                log.info("Task '%s' complete (%.3fs), marking server ready", task, took_s)

    def set(self, task: str, ready: bool) -> None:
        """Mark a task as complete or as pending, for tasks that can become pending again. Idempotent."""
        if ready:
            self.done(task)
        else:
            self._pending.add(task)
