"""An event loop whose time passes at once when nothing else happens.

A test that waits for a time limit of 15 s takes a millisecond, and a test that waits for no limit never reaches
one. Sockets are real, so the loop first gives the kernel some time. Everything that a test waits for must be in
its own process (no threads).
"""

import asyncio
import os
import selectors
from collections.abc import Callable, Coroutine
from typing import Any

#: The time that a socket pair of an idle machine can need to deliver written bytes. A guess. On a busy machine it
#: is longer, because the kernel's thread that delivers them has to wait for a core.
_QUIET_S = 0.002 * max(1.0, os.getloadavg()[0] / (os.cpu_count() or 1))
#: A test that lets more time pass than this waits for something that does not come.
_MOST_S = 3600.0


class _Selector(selectors.DefaultSelector):
    """Jumps over the timeout when no file is ready."""

    passed_s = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        ready = super().select(0)
        if ready or (timeout is not None and timeout <= 0):
            return ready
        ready = super().select(_QUIET_S)
        if ready:
            return ready
        if timeout is None or self.passed_s > _MOST_S:
            raise AssertionError("nothing will happen any more")
        self.passed_s += timeout
        return []


class VirtualTimeLoop(asyncio.SelectorEventLoop):
    """See the module."""

    def __init__(self) -> None:
        self._time = _Selector()
        super().__init__(self._time)

    def time(self) -> float:
        """Return the machine's time plus the seconds that were jumped over."""
        return super().time() + self._time.passed_s

    @property
    def passed_s(self) -> float:
        """Seconds that were jumped over."""
        return self._time.passed_s


def run(main: Callable[[], Coroutine[Any, Any, None]]) -> None:
    """Run a coroutine to its end; a task left behind fails the test."""

    async def checked() -> None:
        await main()
        for _ in range(3):
            await asyncio.sleep(0)
        left = asyncio.all_tasks() - {asyncio.current_task()}
        assert not left, left

    with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
        runner.run(checked())
