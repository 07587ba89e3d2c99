"""Readiness for the data path: a private edge-triggered epoll, itself watched by the asyncio loop.

One wake-up of the loop serves every socket that is ready, by plain callbacks. Theory of a turn: sockets that
were left readable by the fairness rule go first, then what epoll reports; then the coroutines that can go on
(:mod:`hbone.aio.fiber`); whatever has output puts itself on the dirty list and is flushed once, at the end. Code
that queues output outside a turn (a task, a timer) uses the same list; a turn is then scheduled. Works on uvloop
and on asyncio's own loop, because it only needs ``add_reader``.

Buffers: a turn handles one read at a time to its end, so that one set of scratch buffers serves all sockets
(:attr:`Poller.ciphertext`, :attr:`Poller.plaintext`, :attr:`Poller.sealed`); output buffers are borrowed
while there is something to write. Idle connections hold none.

Adaptive spin: for a short time after activity the poller asks again instead of sleeping, because a wake-up
costs more than the request it is for. See :class:`_Spin` for when it does not.
"""

from __future__ import annotations

import asyncio
import logging
import os
import select
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, Protocol

from hbone.output import BUFFER_BYTES
from hbone.tls import sealed_bytes

logger = logging.getLogger(__name__)

READS_PER_TURN: Final = 4  # of one socket, before others get theirs
_BATCH: Final = 256
#: A step is some 50 microseconds, and who gets what it sends is idle meanwhile: of 4, 8, 16 and no limit 8 had the
#: highest rate of new connections (``bench.compare --only "crr, 32"``).
_STEPS_PER_FLUSH: Final = 8
_KEPT_BUFFERS: Final = 64
READABLE: Final = select.EPOLLIN | select.EPOLLHUP | select.EPOLLRDHUP | select.EPOLLERR
HUNG_UP: Final = select.EPOLLHUP | select.EPOLLRDHUP | select.EPOLLERR
WRITABLE: Final = select.EPOLLOUT | select.EPOLLHUP | select.EPOLLERR
_INTEREST: Final = select.EPOLLIN | select.EPOLLRDHUP | select.EPOLLET


class Handler(Protocol):
    """What sits on a file descriptor."""

    def on_event(self, mask: int) -> None:
        """``mask`` of EPOLL bits; 0 when this asked to be called again."""

    def on_bug(self, error: Exception) -> None:
        """A callback raised what it should not: release everything."""


class Flushable(Protocol):
    """What has output at the end of a turn."""

    dirty: bool

    def flush(self) -> None:
        """Write; clears ``dirty``."""


class Steps(Protocol):
    """What goes on after the events of a turn; a :class:`hbone.aio.fiber.Fiber`."""

    def step(self) -> None:
        """Go on until it waits again; raises nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SpinSettings:
    """Adaptive spin: off while ``limit_s`` is 0; that bounds one spin after the last activity."""

    limit_s: float = 0.0


class Poller:
    """One per event loop; create it inside the loop, close it last."""

    def __init__(self, spin: SpinSettings = SpinSettings()) -> None:
        self._loop = asyncio.get_running_loop()
        self._epoll = select.epoll()
        self._handlers: dict[int, Handler] = {}
        self._filled: set[int] = set()
        self._again: list[Handler] = []
        self._steps: deque[Steps] = deque()
        self._dirty: list[Flushable] = []
        self._scheduled = False
        self._turning = False
        self._closed = False
        self._free: list[memoryview] = []
        self._spin = _Spin(spin) if spin.limit_s > 0 else None
        self.ciphertext = memoryview(bytearray(BUFFER_BYTES))
        # One record may have been left from the read before.
        self.plaintext = memoryview(bytearray(BUFFER_BYTES + 32 * 1024))
        self.sealed = memoryview(bytearray(sealed_bytes(BUFFER_BYTES)))
        self.now_s = self._loop.time()
        """Monotonic time of the current turn."""
        self.read_bytes = 0
        """What was read from sockets in this turn; who reads adds to it."""
        self._loop.add_reader(self._epoll.fileno(), self._turn)

    @property
    def loop(self) -> asyncio.AbstractEventLoop:
        """The loop this belongs to."""
        return self._loop

    @property
    def registered(self) -> int:
        """Sockets under watch."""
        return len(self._handlers)

    def register(self, fd: int, handler: Handler) -> None:
        """Watch ``fd``, edge-triggered, for bytes and ends; it must be non-blocking.

        What is there already is an event of the next turn. Room is not: see :meth:`await_room`.
        """
        self._epoll.register(fd, _INTEREST)
        self._handlers[fd] = handler

    def await_room(self, fd: int) -> None:
        """The network took less than it was given: from now on room in it is an event too.

        Not from the beginning, since every new socket has room: a turn for each to say so.
        """
        if fd not in self._filled:
            self._filled.add(fd)
            self._epoll.modify(fd, _INTEREST | select.EPOLLOUT)

    def unregister(self, fd: int) -> None:
        """Stop watching; call before closing the descriptor."""
        self._filled.discard(fd)
        if self._handlers.pop(fd, None) is not None and not self._closed:
            self._epoll.unregister(fd)

    def forget(self, fd: int) -> None:
        """As :meth:`unregister`, for a descriptor that is closed next: the kernel does its part by itself then.

        One system call less per socket, which must not have been duplicated.
        """
        self._filled.discard(fd)
        self._handlers.pop(fd, None)

    def again(self, handler: Handler) -> None:
        """Call ``handler.on_event(0)`` in the next turn: it stopped before its socket was empty."""
        self._again.append(handler)
        self._schedule()

    def soon(self, waiting: Steps) -> None:
        """Call ``waiting.step()`` in this turn, when its events have been handled and no buffer is in use."""
        if self._closed:
            self._loop.call_soon(waiting.step)
        else:
            self._steps.append(waiting)
            self._schedule()

    def mark(self, flushable: Flushable) -> None:
        """Flush at the end of this turn."""
        if not flushable.dirty:
            flushable.dirty = True
            self._dirty.append(flushable)
            self._schedule()

    def take(self) -> memoryview:
        """A buffer of 256 KiB."""
        return self._free.pop() if self._free else memoryview(bytearray(BUFFER_BYTES))

    def give(self, buffer: memoryview) -> None:
        """Return a buffer of :meth:`take`."""
        if len(self._free) < _KEPT_BUFFERS:
            self._free.append(buffer)

    def close(self) -> None:
        """Stop watching everything; the sockets stay with their owners."""
        if not self._closed:
            self._closed = True
            self._loop.remove_reader(self._epoll.fileno())
            self._epoll.close()
            self._handlers.clear()
            self._filled.clear()
            self._again.clear()
            self._dirty.clear()
            self._free.clear()
            for waiting in self._steps:
                self._loop.call_soon(waiting.step)
            self._steps.clear()

    def _schedule(self) -> None:
        if not (self._scheduled or self._turning or self._closed):
            self._scheduled = True
            self._loop.call_soon(self._turn)

    def _turn(self) -> None:
        if self._closed:
            return
        self._scheduled = False
        self._turning = True
        try:
            self.now_s = self._loop.time()
            again, self._again = self._again, []
            for handler in again:
                self._call(handler.on_event, 0, handler)
            ready = self._epoll.poll(0, _BATCH)
            spin = self._spin
            if spin is not None and spin.on and not ready:
                ready = spin.poll(self._epoll)
            handlers = self._handlers
            for fd, mask in ready:
                handler_at = handlers.get(fd)
                if handler_at is not None:
                    try:
                        handler_at.on_event(mask)
                    except Exception as error:  # noqa: BLE001  one socket's bug must not end the others
                        self._report(handler_at, error)
                    if self._is_closed():
                        return
            steps = self._steps
            while steps or self._dirty:
                left = _STEPS_PER_FLUSH
                while steps and left:
                    steps.popleft().step()
                    left -= 1
                if self._is_closed():
                    return
                dirty, self._dirty = self._dirty, []
                for flushable in dirty:
                    try:
                        flushable.flush()
                    except Exception as error:  # noqa: BLE001
                        self._report(flushable, error)
            if spin is not None and ready:
                spin.worked(len(ready), self.read_bytes)
                self.read_bytes = 0
        finally:
            self._turning = False
        if self._again or len(ready) == _BATCH or (spin is not None and spin.on):
            self._schedule()

    def _is_closed(self) -> bool:
        return self._closed  # a call may have closed it; type checkers remember what an attribute was

    def _call(self, function: Callable[[int], None], mask: int, owner: Handler) -> None:
        try:
            function(mask)
        except Exception as error:  # noqa: BLE001
            self._report(owner, error)

    def _report(self, owner: object, error: Exception) -> None:
        logger.error("data path callback failed", exc_info=error)
        on_bug = getattr(owner, "on_bug", None)
        if on_bug is not None:
            on_bug(error)


_CROWD: Final = 3.0  # sockets ready per turn, on average; more are busy enough to be served in batches
_BULK_BYTES: Final = 8 * 1024  # read per turn, on average: work enough to make up for a wake-up
_POLLS: Final = 8  # at a stretch, before the loop's other work gets its turn: some 5 microseconds
_LATE_S: Final = 500e-6  # between two polls of a stretch: somebody else had the processor for long
_HOLD_S: Final = 0.005  # at first; doubled each time up to
_LONGEST_HOLD_S: Final = 3.2
_MOST_SKIPPED: Final = 256
_WASTE: Final = 0.03  # of a processor, at most, for spins that end without work; saved up to
_SAVED_S: Final = 0.01


class _Spin:
    """Decides after each turn whether to ask again at once.

    Between polls the processor is offered to whoever else wants it (sched_yield): mostly that is the very process
    whose answer is waited for. Never where it cannot pay: not while many sockets are busy (sleeping collects their
    work) or much is moved, not for a while after the processor came back late (cores are contended, and who sleeps
    is served sooner than who yields), and ever more rarely when spins end without work, down to one activity in
    256, so that a trickle of traffic costs no more than sleeping would. What spins in vain have cost is bounded
    besides.
    """

    __slots__ = (
        "_crowd",
        "_failures",
        "_held_until_s",
        "_hold_s",
        "_limit_s",
        "_moved",
        "_saved_at_s",
        "_saved_s",
        "_skip",
        "_until_s",
        "on",
    )

    def __init__(self, settings: SpinSettings) -> None:
        self.on = False
        """Poll again instead of sleeping."""
        self._limit_s = settings.limit_s
        self._until_s = 0.0
        self._crowd = 0.0
        self._moved = 0.0
        self._failures = 0
        self._skip = 0
        self._held_until_s = 0.0
        self._hold_s = _HOLD_S
        self._saved_s = _SAVED_S
        self._saved_at_s = time.perf_counter()

    def poll(self, epoll: select.epoll) -> list[tuple[int, int]]:
        """Ask a few times; what is ready, if anything."""
        last_s = time.perf_counter()
        for _ in range(_POLLS):
            os.sched_yield()
            ready = epoll.poll(0, _BATCH)
            now_s = time.perf_counter()
            if now_s - last_s > _LATE_S:
                self._hold_s = min(_LONGEST_HOLD_S, 2 * self._hold_s)
                self._held_until_s = now_s + self._hold_s
                self.on = False
                return ready
            if ready:
                self._failures = 0
                return ready
            if now_s > self._until_s:
                self._skip = min(_MOST_SKIPPED, 1 << self._failures) - 1
                self._failures += 1
                self._saved_s -= self._limit_s
                self.on = False
                break
            last_s = now_s
        return []

    def worked(self, ready: int, read_bytes: int) -> None:
        """A turn has served ``ready`` sockets: begin to spin after it, or go on."""
        self._crowd += (ready - self._crowd) / 16
        self._moved += (read_bytes - self._moved) / 16
        self.on = False
        if self._skip:
            self._skip -= 1
        elif self._crowd < _CROWD and self._moved < _BULK_BYTES:
            now_s = time.perf_counter()
            self._saved_s = min(_SAVED_S, self._saved_s + _WASTE * (now_s - self._saved_at_s))
            self._saved_at_s = now_s
            idle_s = now_s - self._held_until_s
            if idle_s >= 0.0 and self._saved_s > 0.0:
                if idle_s > 2 * self._hold_s:
                    self._hold_s = _HOLD_S
                self._until_s = now_s + self._limit_s
                self.on = True
