"""Interrupts a hook that blocks the loop, and names the running hook for the watchdog.

Code on the event loop cannot stop a function that does not return. So a thread checks every :data:`_LOOK_S`
seconds how long the current call has run, and signals the main thread once it has run for :data:`LIMIT_S`. Python
runs the signal handler in the main thread between two instructions, and interrupts a blocking system call to run
it. The handler raises :class:`Blocked` if a hook is still running. If the hook has returned meanwhile, the handler
returns without effect: its check and its raise run in the hook's thread.

Three cases cannot be interrupted: a C function holding the interpreter's lock, a hook that catches
``BaseException`` and continues, and a process whose handler of SIGALRM an addon has replaced. The watchdog
(:mod:`ztunnel.runtime.watchdog`) reports them with the name of the addon.
"""

from __future__ import annotations

import logging
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from time import perf_counter_ns
from types import FrameType
from typing import Any, Final, Self

log = logging.getLogger(__name__)

#: The longest time that one call may block the event loop, in seconds.
LIMIT_S: Final = 0.1
#: The time between two checks, in seconds. A call is interrupted at most this much too late.
_LOOK_S: Final = 0.05
#: The signal that interrupts a hook. This process does not use it otherwise. Its default action would end the
#: process.
_SIGNAL: Final = signal.SIGALRM


class Blocked(BaseException):
    """Raised in a hook that has blocked the event loop for too long. Not an ``Exception``, because hooks often
    catch those.
    """

    def __str__(self) -> str:
        return f"it blocked the loop for more than {LIMIT_S:g} s and was interrupted"


class CurrentCall:
    """The hook that is running on this process's event loop.

    Attributes:
        hook: the running hook, or ``None``. Its text names the addon and the hook.
        began_ns: when the hook began, by ``perf_counter_ns``.
        interrupted: whether a signal has interrupted the call. Further signals are ignored.
    """

    __slots__ = ("began_ns", "hook", "interrupted")

    def __init__(self) -> None:
        self.hook: object | None = None
        self.began_ns = 0
        self.interrupted = False

    @property
    def is_blocking(self) -> bool:
        """Whether the running hook has exceeded the limit, and was not interrupted yet."""
        too_long = perf_counter_ns() - self.began_ns > LIMIT_S * 1e9
        return self.hook is not None and too_long and not self.interrupted

    @contextmanager
    def calling(self, hook: object) -> Iterator[None]:
        """A context manager around a call of a hook outside of the data path, so that it is interrupted as well.

        Args:
            hook: its text names the addon and the hook.
        """
        self.began_ns = perf_counter_ns()
        try:
            self.hook = hook
            yield
        finally:
            self.hook = None
            self.interrupted = False

    def name(self) -> str:
        """Return the names of the running addon and hook, for the watchdog's report. Empty if none runs."""
        hook = self.hook
        return str(hook) if hook is not None else ""


class Interrupter:
    """A context manager that runs the checking thread and installs the signal handler.

    Outside the process's main thread it has no effect, because Python handles signals only there. Tests use it
    that way.
    """

    def __init__(self, current: CurrentCall) -> None:
        self._current = current
        self._main = threading.get_ident()
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="addon watch", daemon=True)
        self._works = threading.current_thread() is threading.main_thread()
        self._before: Any = None

    def __enter__(self) -> Self:
        if self._works:
            self._before = signal.signal(_SIGNAL, self._handle)
            self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        if self._works:
            self._stopped.set()
            self._thread.join()
            signal.signal(_SIGNAL, self._before)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        current = self._current
        if current.is_blocking:
            current.interrupted = True
            raise Blocked

    def _watch(self) -> None:
        while not self._stopped.wait(_LOOK_S):
            if not self._current.is_blocking:
                continue
            if signal.getsignal(_SIGNAL) != self._handle:
                # An addon has replaced the signal handler. Without one, the signal would end the process.
                log.error(
                    "%s blocks the loop, and cannot be interrupted: an addon uses SIGALRM", self._current.name()
                )
                return
            signal.pthread_kill(self._main, _SIGNAL)
