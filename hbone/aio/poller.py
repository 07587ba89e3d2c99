"""Watches the data path's sockets by a private edge-triggered epoll, which the asyncio loop watches itself.

One wake-up of the loop serves every ready socket, by plain callbacks. An iteration runs, in this order: the
sockets in the run queue (which stopped with bytes left to read), the events of epoll, the resumable coroutines
(:mod:`hbone.aio.fiber`, within a time limit), and one flush for each object on the dirty list. These objects are
also flushed after each :data:`EVENTS_PER_FLUSH` events. Code that queues output outside an iteration (a task, a
timer) also puts its object on the dirty list, and schedules an iteration. This works on uvloop and on asyncio's
own loop, because it only needs ``add_reader``.

An exception in a callback does not end the iteration, because each edge is reported only once: if an error ended
the iteration, other sockets of the batch would lose their event. The error is reported only to the handler that
raised it.

Each read is processed completely before the next one, so that one set of scratch buffers serves all sockets
(:attr:`Poller.ciphertext`, :attr:`Poller.plaintext`, :attr:`Poller.sealed`). Connections borrow output buffers
only while they have output.

For a short time after activity the poller polls again instead of sleeping (adaptive spin), because a wake-up costs
more than a small request. :class:`hbone.aio.spin.Spin` decides whether it spins.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import select
import socket
import time
from collections import deque
from typing import Any, Final, Protocol

from hbone.aio.core_speed import unit_s
from hbone.aio.interval_timer import IntervalTimer
from hbone.aio.lingering import Lingering
from hbone.aio.spin import Spin, SpinSettings
from hbone.cost_budget import UnitPrice
from hbone.errors import ConnectionBroken
from hbone.flow import PeerQuotas
from hbone.output import BUFFER_BYTES
from hbone.tls import sealed_bytes

logger = logging.getLogger(__name__)

READS_PER_TURN: Final = 4  # reads of one socket before others are read
REQUEUED_S: Final = 0.001
"""The time per loop iteration that all sockets with much to read share."""
BULK_BYTES: Final = 32 * 1024
"""A socket that has read this much in an iteration must wait in the run queue at its next event, once
:data:`REQUEUED_S` is used up.
"""
STEPS_S: Final = 0.002
"""The time per iteration for coroutines. Further coroutines wait for the next iteration. Without this limit, a
flood of connections, or the end of a connection with hundreds of tunnels, would delay small flows.
"""
_BATCH: Final = 256
#: The number of events after which output is flushed. If two proxies handle all events before sending, they work
#: alternately, and each core is idle half of the time. Of 8, 16, 32 and no limit, 16 had the most requests a
#: second over 64 connections: 1.12 times the rate without a limit, at 1.05 times the CPU time each (more TLS
#: records), with 7 instead of 21 % of the cores idle.
EVENTS_PER_FLUSH: Final = 16
#: The number of coroutine steps after which output is flushed. A step takes about 50 microseconds, during which
#: the receivers of earlier steps' output are idle. Of 4, 8, 16 and no limit, 8 had the highest rate of new
#: connections (``bench.compare --only "crr, 32"``).
_STEPS_PER_FLUSH: Final = 8
_KEPT_BUFFERS: Final = 64
_FEW_BUFFERS: Final = 4  # always kept, because the next write would allocate them again
READABLE: Final = select.EPOLLIN | select.EPOLLHUP | select.EPOLLRDHUP | select.EPOLLERR
FAILED: Final = select.EPOLLERR
HUNG_UP: Final = select.EPOLLHUP | select.EPOLLRDHUP | select.EPOLLERR
WRITABLE: Final = select.EPOLLOUT | select.EPOLLHUP | select.EPOLLERR
_INTEREST: Final = select.EPOLLIN | select.EPOLLRDHUP | select.EPOLLET
_ANYTHING: Final = select.EPOLLIN | select.EPOLLOUT | select.EPOLLRDHUP


class Handler(Protocol):
    """An object that handles the events of a watched file descriptor."""

    def on_event(self, mask: int) -> None:
        """Handle ``mask`` of EPOLL bits. 0 means that :meth:`Poller.requeue` has requested this call."""

    def on_bug(self, error: Exception) -> None:
        """Release all resources, because a callback of this handler raised an unexpected error."""


class Flushable(Protocol):
    """An object whose queued output is written at the end of an iteration."""

    dirty: bool

    def flush(self) -> None:
        """Write the queued output and clear ``dirty``."""


class Steppable(Protocol):
    """A coroutine that resumes after an iteration's events: a :class:`hbone.aio.fiber.Fiber`."""

    def step(self) -> None:
        """Run until the next await."""


class Running(Protocol):
    """An object that runs a coroutine: a :class:`hbone.aio.fiber.Fiber` or an asyncio task."""

    def cancel(self, msg: Any | None = None) -> bool:
        """Cancel the coroutine; see :meth:`asyncio.Task.cancel`."""

    def cancelling(self) -> int:
        """Return the number of pending cancellations; see :meth:`asyncio.Task.cancelling`."""

    def uncancel(self) -> int:
        """Withdraw one cancellation; see :meth:`asyncio.Task.uncancel`."""


class Poller:
    """Watches the sockets of one event loop. Create it inside the loop, and close it last."""

    def __init__(self, spin: SpinSettings | None = None) -> None:
        self._loop = asyncio.get_running_loop()
        self._epoll = select.epoll()
        self._handlers: dict[int, Handler] = {}
        self._most = 0
        self._filled: set[int] = set()
        self._fresh: set[int] = set()  # descriptors registered since the last poll
        self._requeued: deque[Handler] = deque()
        self._in_line: set[Handler] = set()
        self._bulk_until_s = 0.0  # end of this iteration's time for bulk; 0: no bulk socket was served yet
        self._edges_lost = False
        self._steps: deque[Steppable] = deque()
        self._dirty: list[Flushable] = []
        self._scheduled = False
        self._turning = False
        self._closed = False
        self._pause: asyncio.TimerHandle | None = None
        self._free: list[memoryview] = []
        self._unused = 0
        self._timers: dict[float, IntervalTimer] = {}
        self._spin = Spin(spin) if spin is not None and spin.limit_s > 0 else None
        self.ciphertext = memoryview(bytearray(BUFFER_BYTES))
        # The buffer has room for one more TLS record, which can be left over from the previous read.
        self.plaintext = memoryview(bytearray(BUFFER_BYTES + 32 * 1024))
        self.sealed = memoryview(bytearray(sealed_bytes(BUFFER_BYTES)))
        self.lent = False
        """Whether a connection is processing a read whose frames are still in the scratch buffers. Then no other
        connection is allowed to read.
        """
        self.now_s = self._loop.time()
        """The monotonic time at which the current iteration began."""
        self.running: Running | None = None
        """The fiber that runs now. Each fiber's step sets this."""
        self.handshake_s = 0.0
        """When the last iteration that ran a handshake step for an event has started; see
        :meth:`Connection.on_event`.
        """
        self.peers = PeerQuotas()
        """The quotas of each peer, shared by all of its connections."""
        self.unit_price = UnitPrice(unit_s)
        """The price of a unit of a peer's work on this core, shared by all connections."""
        self.read_bytes = 0
        """Bytes read since the last decision about spinning; every reader of a socket adds to it."""
        self.lingering = Lingering(self._loop)
        """The sockets of connections that were ended for violating a protocol limit."""
        self._loop.add_reader(self._epoll.fileno(), self._turn)

    @property
    def loop(self) -> asyncio.AbstractEventLoop:
        return self._loop

    @property
    def registered(self) -> int:
        """The number of watched sockets."""
        return len(self._handlers)

    def peak(self) -> int:
        """Return the highest number of watched sockets since the last call, and restart the count."""
        most, self._most = self._most, len(self._handlers)
        return most

    def register(self, fd: int, handler: Handler) -> None:
        """Watch ``fd``, which must be non-blocking, for received bytes and for its end.

        Edge-triggered: an event is reported once per arrival, so a handler reads until the socket is empty, or
        calls :meth:`requeue`. Bytes that have already arrived are an event of the next iteration. For room to
        write, see :meth:`watch_writable`.
        """
        self._epoll.register(fd, _INTEREST)
        self._handlers[fd] = handler
        self._fresh.add(fd)
        if len(self._handlers) > self._most:
            self._most = len(self._handlers)

    def adopt(self, sock: socket.SocketType, handler: Handler) -> None:
        """Watch a socket, for ``handler``. If it cannot be watched, close it.

        Raises:
            ConnectionBroken: epoll has no room (fs.epoll.max_user_watches), or the kernel no memory.
        """
        try:
            self.register(sock.fileno(), handler)
        except OSError as error:
            sock.close()
            raise ConnectionBroken(f"the socket cannot be watched: {error.strerror}") from error

    def watch_writable(self, fd: int) -> None:
        """From now on, also report when the socket is writable. Called after a write that sent only a part.
        Idempotent.

        A new socket has room, so it is not watched for this from the start.
        """
        if fd not in self._filled:
            self._filled.add(fd)
            self._epoll.modify(fd, _INTEREST | select.EPOLLOUT)

    def unregister(self, fd: int) -> None:
        """Stop watching a descriptor. Call this before closing it."""
        self._filled.discard(fd)
        if self._handlers.pop(fd, None) is not None and not self._closed:
            self._epoll.unregister(fd)

    def suspend(self, fd: int, handler: Handler) -> None:
        """Stop watching, and do not call ``handler`` before :meth:`register` or :meth:`requeue`. Received bytes
        stay in the kernel.
        """
        self.unregister(fd)
        if handler in self._in_line:
            self._in_line.discard(handler)
            self._requeued.remove(handler)

    def unregister_closing(self, fd: int) -> None:
        """Stop watching a descriptor that is closed next. This saves a system call compared with
        :meth:`unregister`.

        The kernel drops a closed descriptor from an epoll by itself, unless it was duplicated (epoll(7)).
        """
        self._filled.discard(fd)
        self._handlers.pop(fd, None)

    def requeue(self, handler: Handler) -> None:
        """Call ``handler.on_event(0)`` in the next iteration, because it stopped before its socket was empty.

        epoll reports no further edge for bytes that have already arrived. A socket gets at most one call per
        iteration, no matter how often its peer sends. Handlers are called in the order of their requests, for at
        most :data:`REQUEUED_S` per iteration. The remaining handlers come first in the next iteration.
        """
        if handler not in self._in_line:
            self._in_line.add(handler)
            self._requeued.append(handler)
            self._schedule()

    def defers_bulk(self) -> bool:
        """Whether a socket with much to read must now wait in the run queue. If so, the caller calls
        :meth:`requeue`.

        Events of small flows are served at once. Without this limit, twenty bulk flows with an event each would
        extend an iteration by twenty slices.
        """
        if self._requeued:
            return True
        if not self._bulk_until_s:
            self._bulk_until_s = time.monotonic() + REQUEUED_S
            return False
        return time.monotonic() >= self._bulk_until_s

    def call_soon(self, waiting: Steppable) -> None:
        """Call ``waiting.step()`` once the iteration's events are handled and no scratch buffer is in use.

        Steps run in the order of these calls. When :data:`STEPS_S` is used up, further steps run in later
        iterations.
        """
        if self._closed:
            self._loop.call_soon(waiting.step)
        else:
            self._steps.append(waiting)
            self._schedule()

    def schedule_flush(self, flushable: Flushable) -> None:
        """Call ``flushable.flush()`` at the end of this iteration. Further calls until then have no effect."""
        if not flushable.dirty:
            flushable.dirty = True
            self._dirty.append(flushable)
            self._schedule()

    def pause(self, seconds: float) -> None:
        """Stop serving sockets and coroutines until :meth:`resume`, but at most for ``seconds``. Received bytes
        wait in the kernel.
        """
        if self._closed:
            return
        if self._pause is None:
            self._loop.remove_reader(self._epoll.fileno())
        else:
            self._pause.cancel()
        self._pause = self._loop.call_later(seconds, self.resume)

    def resume(self) -> None:
        """End a pause; idempotent."""
        if self._pause is not None:
            self._pause.cancel()
            self._pause = None
            self._loop.add_reader(self._epoll.fileno(), self._turn)
            self._schedule()

    def interval_timer(self, interval_s: float) -> IntervalTimer:
        """Return the timer shared by all checks with this interval. There are few timers, because intervals come
        from the configuration.
        """
        known = self._timers.get(interval_s)
        if known is None:
            known = self._timers[interval_s] = IntervalTimer(self._loop, interval_s)
        return known

    def acquire(self) -> memoryview:
        """Borrow a buffer of 256 KiB."""
        if not self._free:
            return memoryview(bytearray(BUFFER_BYTES))
        buffer = self._free.pop()
        if len(self._free) < self._unused:
            self._unused = len(self._free)
        return buffer

    def release(self, buffer: memoryview) -> None:
        """Take back a buffer that :meth:`acquire` has returned."""
        if len(self._free) < _KEPT_BUFFERS:
            self._free.append(buffer)

    def drop_buffers(self) -> int:
        """Free the buffers that were not used since the last call, except for a few. Return the number of freed
        buffers.
        """
        dropped = max(0, self._unused - _FEW_BUFFERS)
        del self._free[:dropped]  # acquire() takes the last one, so the first are the unused ones
        self._unused = len(self._free)
        return dropped

    def close(self) -> None:
        """Stop watching all sockets. Idempotent. The owners keep the sockets."""
        if not self._closed:
            self._closed = True
            if self._pause is not None:
                self._pause.cancel()
                self._pause = None
            self._loop.remove_reader(self._epoll.fileno())
            self._epoll.close()
            self.lingering.close()
            self._handlers.clear()
            self._filled.clear()
            self._fresh.clear()
            self._requeued.clear()
            self._in_line.clear()
            self._dirty.clear()
            self._free.clear()
            for each in self._timers.values():
                each.close()
            self._timers.clear()
            # Fibers can outlive their poller, because a program that ends cancels them in any order. The loop then
            # runs their steps, so that they can still clean up.
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
        if self._pause is not None:
            return
        self._turning = True
        try:
            more = self._serve()
        finally:
            self._turning = False
        if more:
            self._schedule()

    def _serve(self) -> bool:
        """Run one iteration. Return whether there is already work for the next iteration."""
        self.now_s = self._loop.time()
        # The run queue is served before new events, so that sockets with much to read do not starve behind sockets
        # with little to read. Each socket gets READS_PER_TURN reads per iteration, so that the reverse cannot
        # happen either.
        requeued = self._requeued
        left = len(requeued)
        self._bulk_until_s = 0.0
        if left:
            until_s = self._bulk_until_s = time.monotonic() + REQUEUED_S
            while left:
                left -= 1
                handler = requeued.popleft()
                self._in_line.discard(handler)
                try:
                    handler.on_event(0)
                except BaseException as error:  # noqa: BLE001  see _failed
                    self._failed(handler, error)
                if self._is_closed():
                    return False
                if left and time.monotonic() >= until_s:
                    break
        spin = self._spin
        ready = self._poll()
        handlers, fresh = self._handlers, self._fresh
        fresh.clear()
        for number, (fd, mask) in enumerate(ready, start=1):
            # An earlier event of this batch can have closed this socket. A newly accepted socket can already have
            # the same descriptor number, and must not get the closed socket's hang-up.
            handler_at = handlers.get(fd)
            if handler_at is not None and not (fresh and fd in fresh):
                try:
                    handler_at.on_event(mask)
                except BaseException as error:  # noqa: BLE001  one socket's bug must not end the others
                    self._failed(handler_at, error)
                if self._is_closed():
                    return False
            if not number % EVENTS_PER_FLUSH:
                self._flush()
        # Coroutines run before the flush, so that their output is sent in the same iteration. Flushes between
        # slices of steps keep the network busy. A step can queue further steps. Output produced by a flush (of a
        # tunnel that has room again) is flushed in the next round of this loop.
        steps = self._steps
        until_s = 0.0
        while steps or self._dirty:
            left = _STEPS_PER_FLUSH
            while steps and left:
                waiting = steps.popleft()
                try:
                    waiting.step()
                except BaseException as error:  # noqa: BLE001
                    self._failed(waiting, error)
                left -= 1
            if self._is_closed():
                return False
            self._flush()
            if steps:
                now_s = time.monotonic()
                if not until_s:
                    until_s = now_s + STEPS_S
                elif now_s >= until_s:
                    break
        if spin is not None and ready:
            spin.worked(self.now_s, self.read_bytes)
            self.read_bytes = 0
        # After a full batch, epoll can have further events. The loop would call this method again, because it
        # watches our epoll level-triggered, but that costs one more wake-up.
        return bool(
            steps
            or self._dirty
            or self._requeued
            or self._edges_lost
            or len(ready) >= _BATCH
            or (spin is not None and spin.on)
        )

    def _flush(self) -> None:
        """Flush the objects on the dirty list. Objects added meanwhile wait for the next flush."""
        dirty, self._dirty = self._dirty, []
        for flushable in dirty:
            try:
                flushable.flush()
            except BaseException as error:  # noqa: BLE001
                self._failed(flushable, error)

    def _poll(self) -> list[tuple[int, int]]:
        """Poll, and return the events of this iteration: descriptors and their epoll masks."""
        spin = self._spin
        try:
            if self._edges_lost:
                ready = [(fd, _ANYTHING) for fd in self._handlers]
                self._edges_lost = False
                return ready
            if spin is not None and spin.on:
                ready = spin.poll(self._epoll, _BATCH)
            else:
                ready = self._epoll.poll(0, _BATCH)
        except Exception as error:  # noqa: BLE001
            # If there was no memory for the list, the events are lost, and epoll does not report them again. So in
            # the next iteration every socket gets an event, even if most do not need it.
            self._edges_lost = True
            self._report(self, error)
            return []
        return ready

    def _is_closed(self) -> bool:
        return self._closed  # a method, because type checkers assume an attribute unchanged after calls

    def _failed(self, owner: object, error: BaseException) -> None:
        """Report a callback's error to the handler that raised it. Only errors that end the process are raised
        again.
        """
        if isinstance(error, (KeyboardInterrupt, SystemExit)):
            raise error
        self._report(owner, error)
        on_bug = getattr(owner, "on_bug", None)
        if on_bug is None:
            return
        try:
            on_bug(error if isinstance(error, Exception) else RuntimeError(f"callback raised {error!r}"))
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException as second:  # noqa: BLE001  clean-up fails first when memory is short
            self._report(owner, second)

    def _report(self, owner: object, error: BaseException) -> None:
        # Logging must not end the iteration: without memory, or with a log that cannot be written, the
        # line is omitted.
        with contextlib.suppress(Exception):
            logger.error("data path callback of %s failed", type(owner).__name__, exc_info=error)
