"""Readiness for the data path: a private edge-triggered epoll, itself watched by the asyncio loop.

One wake-up of the loop serves every socket that is ready, by plain callbacks. Theory of a turn: sockets that
were left readable by the fairness rule go first, then what epoll reports; whatever has output puts itself on
the dirty list and is flushed once, at the end. Code that queues output outside a turn (a coroutine, a timer)
uses the same list; a turn is then scheduled. Works on uvloop and on asyncio's own loop, because it only
needs ``add_reader``.

Buffers: a turn handles one read at a time to its end, so that one set of scratch buffers serves all sockets
(:attr:`Poller.ciphertext`, :attr:`Poller.plaintext`, :attr:`Poller.sealed`); output buffers are borrowed
while there is something to write. Idle connections hold none.

Optional adaptive spin: for a short time after activity the poller asks again instead of sleeping, because a
wake-up costs more than the request it is for. Bounded by a share of the processor, and off when the kernel
took the processor away from us (involuntary context switches).
"""

from __future__ import annotations

import asyncio
import logging
import resource
import select
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, Protocol

from hbone.output import BUFFER_BYTES
from hbone.tls import sealed_bytes

logger = logging.getLogger(__name__)

READS_PER_TURN: Final = 4  # of one socket, before others get theirs
_BATCH: Final = 256
_KEPT_BUFFERS: Final = 64
READABLE: Final = select.EPOLLIN | select.EPOLLHUP | select.EPOLLRDHUP | select.EPOLLERR
HUNG_UP: Final = select.EPOLLHUP | select.EPOLLRDHUP | select.EPOLLERR
WRITABLE: Final = select.EPOLLOUT | select.EPOLLHUP | select.EPOLLERR
_INTEREST: Final = select.EPOLLIN | select.EPOLLOUT | select.EPOLLRDHUP | select.EPOLLET


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


@dataclass(frozen=True, slots=True, kw_only=True)
class SpinSettings:
    """Adaptive spin: off while ``limit_s`` is 0.

    ``limit_s`` bounds one spin after the last activity; ``share`` the part of wall time spent spinning
    without finding work, over windows of a second.
    """

    limit_s: float = 0.0
    share: float = 0.25


class Poller:
    """One per event loop; create it inside the loop, close it last."""

    def __init__(self, spin: SpinSettings = SpinSettings()) -> None:
        self._loop = asyncio.get_running_loop()
        self._epoll = select.epoll()
        self._handlers: dict[int, Handler] = {}
        self._again: list[Handler] = []
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
        """Watch ``fd``, edge-triggered, for everything; it must be non-blocking."""
        self._epoll.register(fd, _INTEREST)
        self._handlers[fd] = handler

    def unregister(self, fd: int) -> None:
        """Stop watching; call before closing the descriptor."""
        if self._handlers.pop(fd, None) is not None and not self._closed:
            self._epoll.unregister(fd)

    def again(self, handler: Handler) -> None:
        """Call ``handler.on_event(0)`` in the next turn: it stopped before its socket was empty."""
        self._again.append(handler)
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
            self._again.clear()
            self._dirty.clear()
            self._free.clear()

    def _schedule(self) -> None:
        if not (self._scheduled or self._turning or self._closed):
            self._scheduled = True
            self._loop.call_soon(self._turn)

    def _turn(self) -> None:
        if self._closed:
            return
        self._scheduled = False
        self._turning = True
        self.now_s = self._loop.time()
        again, self._again = self._again, []
        for handler in again:
            self._call(handler.on_event, 0, handler)
        ready = self._epoll.poll(0, _BATCH)
        handlers = self._handlers
        for fd, mask in ready:
            handler_at = handlers.get(fd)
            if handler_at is not None:
                try:
                    handler_at.on_event(mask)
                except Exception as error:  # noqa: BLE001  one socket's bug must not end the others
                    self._report(handler_at, error)
                if self._closed:
                    return
        while self._dirty:
            dirty, self._dirty = self._dirty, []
            for flushable in dirty:
                try:
                    flushable.flush()
                except Exception as error:  # noqa: BLE001
                    self._report(flushable, error)
        self._turning = False
        if self._again or len(ready) == _BATCH or (self._spin is not None and self._spin.on(self, bool(ready))):
            self._schedule()

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


class _Spin:
    """Decides after each turn whether to ask again at once."""

    def __init__(self, settings: SpinSettings) -> None:
        self._settings = settings
        self._active_s = 0.0
        self._window_s = 0.0
        self._idle_s = 0.0
        self._last_s = 0.0
        self._preempted = 0
        self._held = False

    def on(self, poller: Poller, worked: bool) -> bool:
        now = poller.loop.time()
        if now - self._window_s >= 1.0:
            preempted = resource.getrusage(resource.RUSAGE_SELF).ru_nivcsw
            self._held = preempted - self._preempted > 50  # a guess: the cores are contended
            self._preempted = preempted
            self._window_s, self._idle_s = now, 0.0
        if worked:
            self._active_s = self._last_s = now
            return not self._held
        self._idle_s += now - self._last_s
        self._last_s = now
        return (
            not self._held
            and now - self._active_s < self._settings.limit_s
            and self._idle_s < self._settings.share
        )
