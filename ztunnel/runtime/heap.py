"""Tunes the garbage collector and returns free memory to the system (``bench/scale.py``, ``bench/idle.py``).

It acts at three moments: while the first configuration arrives, when it has arrived, and after a peak of load.
"""

import asyncio
import contextlib
import ctypes
import functools
import gc
import time
from collections.abc import Callable, Iterator
from typing import Final

from hbone.aio.poller import Poller

_M_ARENA_MAX: Final = -8  # malloc.h
#: The longest time without garbage collection. A longer start is waiting for a control plane, and its retries can
#: create garbage.
_GROWTH_S: Final = 30.0
#: Free pages are returned after this time without a change. A guess.
_CALM_S: Final = 2.0
#: The time between two checks whether load has dropped. A guess.
_CHECK_S: Final = 5.0
#: Load has dropped if this fraction of the peak's sockets is closed, and the peak had at least this many. A
#: smaller peak leaves too little memory to return.
_MANY: Final = 32
_GONE: Final = 0.75
#: With at most this number of open sockets, a full collection takes about 3 ms. It finds no garbage (see
#: :func:`settle`), but it empties the interpreter's free lists, whose objects can be the last ones that keep a
#: megabyte in use.
_FEW: Final = 500
#: The largest fraction of time that trimming is allowed to take. Collections take longer in a mesh that has
#: changed much.
_SHARE: Final = 0.001


def expect_growth() -> None:
    """Make the garbage collector run rarely, and keep one heap; called before the first configuration is read.

    A big mesh creates millions of permanent objects. By default the collector traverses every object whenever the
    number of objects has grown by a quarter. glibc gives each thread a heap of its own. The threads that parse big
    messages leave gaps there which no other thread fills: 17 of 151 MiB with 4,000 services.
    """
    gc.set_threshold(100_000, 50, 1000)
    with contextlib.suppress(OSError, AttributeError):  # not glibc
        ctypes.CDLL(None).mallopt(_M_ARENA_MAX, 1)


@contextlib.contextmanager
def growing() -> Iterator[None]:
    """Suspend garbage collection until :func:`settle`, for at most ``_GROWTH_S``; entered once the loop runs.

    A collection of young objects visits each permanent object once: 0.6 of 8 s of a start with 20,000 services.
    """
    gc.disable()
    limit = asyncio.get_running_loop().call_later(_GROWTH_S, gc.enable)
    try:
        yield
    finally:
        limit.cancel()
        gc.enable()


def settle() -> None:
    """Exclude existing objects from garbage collection, and collect young ones less often; called after the start.

    There is no collection before this: it would take 16 to 60 ms of a start, longer in a big mesh, during which no
    pod is served. It would find 9 objects in an Istio mesh, and some 400 in Envoy's dialect.

    Connections create no reference cycles (``tests/ztunnel/proxy/envoy/test_cycles.py``), so collections find no
    garbage. With the default thresholds they took 5 % of a connection's time.
    """
    gc.freeze()
    gc.enable()
    gc.set_threshold(10_000, 20, 20)
    trim()


@functools.cache
def _malloc_trim() -> Callable[[int], int] | None:
    try:
        trim = ctypes.CDLL(None).malloc_trim
    except (OSError, AttributeError):  # not glibc
        return None
    return lambda pad: int(trim(pad))


def trim() -> bool:
    """Give free pages back to the system if the C library can. Return whether there were any.

    glibc by itself returns only memory at the top of the heap. Messages of a big mesh temporarily take tens of
    megabytes, and the gaps between small blocks would stay. malloc_trim(3) returns their pages. After the start
    with 20,000 services it takes 8 ms and returns 127 of 811 MiB.
    """
    trim = _malloc_trim()
    return trim is not None and bool(trim(0))


class MemoryTrimmer:
    """Returns free memory to the system when the load is low: after changes of the configuration, and after a
    peak.

    Made on a running loop. The owner closes it before the poller.

    Args:
        poller: the number of its sockets is the load.
    """

    def __init__(self, poller: Poller) -> None:
        self._poller = poller
        self._loop = asyncio.get_running_loop()
        self._calm: asyncio.TimerHandle | None = None
        self._peak = 0
        self._not_before_s = 0.0
        self._freed = False
        self._next = self._loop.call_later(_CHECK_S, self._check)

    def changed(self) -> None:
        """Trim after ``_CALM_S`` without a further call. Called after each change of the configuration."""
        if self._calm is not None:
            self._calm.cancel()
        self._calm = self._loop.call_later(_CALM_S, trim)

    def _check(self) -> None:
        self._next = self._loop.call_later(_CHECK_S, self._check)
        self._freed |= self._poller.drop_buffers() > 0
        now = self._poller.registered
        self._peak = max(self._peak, self._poller.peak())
        ebbed = self._peak >= _MANY and now <= self._peak * (1 - _GONE)
        began_s = time.monotonic()
        if not (ebbed or self._freed) or began_s < self._not_before_s:
            return
        if ebbed:
            self._peak = now
            if now <= _FEW:
                gc.collect()
        trim()
        self._freed = False
        ended_s = time.monotonic()
        self._not_before_s = ended_s + (ended_s - began_s) / _SHARE

    def close(self) -> None:
        """Stop the timers; idempotent."""
        self._next.cancel()
        if self._calm is not None:
            self._calm.cancel()
