"""Coroutines of connections, run by the poller. A fiber resumes in the loop iteration that resolves its future.

An asyncio task resumes in the next loop iteration, and its output is sent in the iteration after that. This costs
two system calls, two scheduled callbacks and most of an iteration for each step of each connection. A
:class:`Fiber` that awaits a :class:`OneShotFuture` resumes in the same iteration, after the sockets were read and
before the output is flushed.

All other awaitables, including asyncio's futures and timeouts, work as in a task, because a fiber implements the
protocol for foreign tasks (Python's documentation, "Extending asyncio"). Context variables are the exception: a
fiber has the variables of the callback that resumes it.

Not compiled: see :mod:`hbone.aio.waits`.
"""

from __future__ import annotations

import asyncio
from asyncio import CancelledError
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from hbone.aio.poller import Poller, Running

T = TypeVar("T")

# These functions are asyncio's protocol for foreign tasks, on which current_task() and timeouts rely. typeshed
# lacks them.
_enter: Callable[[asyncio.AbstractEventLoop, Any], None] = asyncio._enter_task
_leave: Callable[[asyncio.AbstractEventLoop, Any], None] = asyncio._leave_task
_register: Callable[[Any], None] = asyncio._register_task


class OneShotFuture(asyncio.Future[T]):
    """A future for one waiter. The awaiting fiber resumes in the same poller iteration that resolves it.

    Further waiters, and waiters that are not fibers, are woken up as by any :class:`asyncio.Future`.
    """

    __slots__ = ("fiber",)

    def __init__(self, poller: Poller) -> None:
        super().__init__(loop=poller.loop)
        self.fiber: Fiber | None = None

    def set_result(self, result: T, /) -> None:
        super().set_result(result)
        self._wake()

    def set_exception(self, exception: type | BaseException, /) -> None:
        super().set_exception(exception)
        self._wake()

    def cancel(self, msg: Any | None = None) -> bool:
        cancelled = super().cancel(msg)
        self._wake()
        return cancelled

    def _wake(self) -> None:
        # The fiber does not continue at once, because the caller can be in the middle of a read, whose scratch
        # buffers a fiber must not touch. The poller runs the fiber's step after all sockets have been read.
        fiber, self.fiber = self.fiber, None
        if fiber is not None:
            fiber.poller.call_soon(fiber)


class Fiber(asyncio.Future[None]):
    """Runs a coroutine. It begins in the current iteration of the poller, or in the next iteration if none is
    running.

    A fiber that is cancelled before its first step runs to its first await, which raises the CancelledError.

    Args:
        poller: runs the fiber's steps.
        coroutine: the coroutine to run.
        name: the fiber's name, for debugging.
        ended: called with the fiber as soon as it is done, before its waiters are woken up.
    """

    __slots__ = (
        "_begun",
        "_cancelling",
        "_coroutine",
        "_ended",
        "_message",
        "_must_cancel",
        "_name",
        "_waiting",
        "poller",
    )

    def __init__(
        self,
        poller: Poller,
        coroutine: Coroutine[Any, Any, None],
        name: str,
        ended: Callable[[Fiber], None] | None = None,
    ) -> None:
        super().__init__(loop=poller.loop)
        self.poller = poller
        self._coroutine = coroutine
        self._name = name
        self._ended = ended
        self._waiting: asyncio.Future[Any] | None = None
        self._begun = False
        self._must_cancel = False
        self._message: Any | None = None
        self._cancelling = 0
        _register(self)
        poller.call_soon(self)

    # Interface of asyncio.Task

    def get_name(self) -> str:
        return self._name

    def get_coro(self) -> Coroutine[Any, Any, None]:
        return self._coroutine

    def cancel(self, msg: Any | None = None) -> bool:
        if self.done():
            return False
        self._cancelling += 1
        if self._waiting is None or not self._waiting.cancel(msg):
            self._must_cancel = True
            self._message = msg
        return True

    def cancelling(self) -> int:
        return self._cancelling

    def uncancel(self) -> int:
        self._cancelling = max(0, self._cancelling - 1)
        return self._cancelling

    def __repr__(self) -> str:
        state = "done" if self.done() else "waiting" if self._waiting is not None else "to be run"
        return f"<Fiber {self._name!r} {state} {self._coroutine!r}>"

    # Running

    def step(self) -> None:
        """Resume the coroutine until its next await; called by the poller and by the loop."""
        if self.done():
            return  # the second of two wake-ups, by the awaited future and by cancel()
        self._waiting = None
        poller, loop = self.poller, self.poller.loop
        _enter(loop, self)
        poller.running = self
        try:
            if self._must_cancel and self._begun:
                self._must_cancel = False
                waits_for = self._coroutine.throw(
                    CancelledError(*(() if self._message is None else (self._message,)))
                )
            else:
                # A coroutine that is cancelled before its first step still starts, and its first await raises (see
                # _wait). An error thrown into it here would skip its ``finally`` and leak its arguments (a socket,
                # an entry in a table of running handlers). A peer that sends HEADERS and RST_STREAM at once would
                # cause this. asyncio.Task throws at once; the task in hbone.aio.started_task does not.
                self._begun = True
                waits_for = self._coroutine.send(None)
        except StopIteration:
            if self._must_cancel:
                super().cancel(self._message)
            else:
                super().set_result(None)
        except CancelledError as error:
            super().cancel(error.args[0] if error.args else None)
        except (KeyboardInterrupt, SystemExit) as error:
            super().set_exception(error)
            raise
        except BaseException as error:  # noqa: BLE001  the waiters of the fiber get it
            # Remove this frame from the error's traceback. Otherwise fiber and error would form a reference cycle,
            # and with every reset objects would outlive their connection.
            super().set_exception(error.with_traceback(error.__traceback__ and error.__traceback__.tb_next))
        else:
            self._wait(waits_for)
            return
        finally:
            poller.running = None
            _leave(loop, self)
        ended, self._ended = self._ended, None
        if ended is not None:
            ended(self)
        # From Python 3.12 on, the frames in an error's traceback would keep this frame and this object alive.
        del self

    def _wait(self, future: Any) -> None:
        if future is None:  # asyncio.sleep(0): a bare yield asks for one iteration of the loop
            self.poller.loop.call_soon(self.step)
            return
        future._asyncio_future_blocking = False
        self._waiting = future
        # The only difference from a task is that a OneShotFuture stores the fiber, to pass it to the poller. A
        # done callback would be scheduled in the loop, and resume the fiber one iteration later. The class is
        # compared by identity, because a subclass can resolve differently.
        if type(future) is OneShotFuture and future.fiber is None and not future.done():
            future.fiber = self
        else:
            future.add_done_callback(self._woken)
        # A fiber that was cancelled while it ran, or before its first step, is cancelled here, at its await, like
        # an asyncio task. If the awaited future is already done, the next step raises the CancelledError.
        if self._must_cancel and future.cancel(self._message):
            self._must_cancel = False

    def _woken(self, _: asyncio.Future[Any]) -> None:
        self.step()


def current(poller: Poller) -> Running:
    """Return the running fiber, otherwise asyncio's current task. Faster than :func:`asyncio.current_task`.

    Raises:
        RuntimeError: no fiber or task is running.
    """
    running = poller.running
    if running is not None:
        return running
    task = asyncio.current_task(poller.loop)
    if task is None:
        raise RuntimeError("no fiber and no task is running")
    return task
