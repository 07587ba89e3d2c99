"""Queues items for a collector, up to a limit, and sends them in its own thread.

OpenTelemetry's exporters block and retry until their timeout, so only this thread waits for a slow or unreachable
collector. Callers never wait. If the queue is full, the oldest entry is dropped.
"""

import logging
import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

log = logging.getLogger(__name__)

ItemT = TypeVar("ItemT")


class ExportFailed(Exception):
    """The collector did not accept a batch within the time limit."""


class Outbox(Generic[ItemT]):
    """Collects items into batches and sends them in order, until :meth:`close`.

    Args:
        name: the kind of data, for logs and for the thread's name.
        send: sends one batch in the thread. Raises :class:`ExportFailed`. After any other error, which is a bug
            and logged, the batch also counts as dropped.
        most: the queue's limit. Above it the oldest items are dropped.
        batch: the largest number of items per batch.
        delay_s: how long the first item of a batch waits for others.

    Attributes:
        sent, dropped: the numbers of items since the start.
    """

    def __init__(
        self, name: str, send: Callable[[Sequence[ItemT]], None], *, most: int, batch: int, delay_s: float
    ) -> None:
        self._name = name
        self._send = send
        self._most = most
        self._batch = batch
        self._delay_s = delay_s
        self._items: deque[ItemT] = deque()
        self._some = threading.Event()
        self._enough = threading.Event()
        self._closing = False
        self._failing = False
        self._overflowed = 0  # written by the thread that queues
        self._failed = 0  # written by the sending thread
        self.sent = 0
        self._thread = threading.Thread(target=self._run, name=f"otlp {name}", daemon=True)
        self._thread.start()

    @property
    def dropped(self) -> int:
        """The number of dropped items since the start."""
        return self._overflowed + self._failed

    def put(self, item: ItemT) -> None:
        """Queue an item; called by one thread only, which never waits."""
        items = self._items
        if len(items) >= self._most:
            try:
                items.popleft()
            except IndexError:
                pass  # the sending thread has emptied the queue meanwhile
            else:
                self._overflowed += 1
        items.append(item)
        count = len(items)
        if count <= 1:
            self._some.set()
        elif count == self._batch:
            self._enough.set()

    def close(self, within_s: float) -> None:
        """Send queued items for at most ``within_s``, then drop the rest. Blocks. Idempotent."""
        self._closing = True
        self._enough.set()
        self._some.set()
        if self._thread.is_alive():
            self._thread.join(within_s)
        left = len(self._items)
        if left:
            log.warning("otlp: %d %s were not sent before the end", left, self._name)

    def _run(self) -> None:
        while not (self._closing and not self._items):
            self._some.wait()
            self._enough.wait(self._delay_s)
            self._some.clear()
            self._enough.clear()
            while batch := self._next():
                self._try(batch)

    def _next(self) -> list[ItemT]:
        taken: list[ItemT] = []
        while len(taken) < self._batch:
            try:
                taken.append(self._items.popleft())
            except IndexError:
                break
        return taken

    def _try(self, batch: list[ItemT]) -> None:
        try:
            self._send(batch)
        except Exception as error:
            self._failed += len(batch)
            if not isinstance(error, ExportFailed):
                log.exception("otlp: a bug in sending %s", self._name)
            elif not self._failing:
                log.warning("otlp: %s are dropped, the collector does not accept them: %s", self._name, error)
            self._failing = True
        else:
            self.sent += len(batch)
            if self._failing:
                log.info("otlp: %s are accepted again dropped=%d", self._name, self.dropped)
            self._failing = False
