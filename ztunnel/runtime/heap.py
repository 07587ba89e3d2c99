"""The process's heap: while a configuration comes, when it is there, and when load has gone (``bench/scale.py``,
``bench/idle.py``).
"""

import asyncio
import ctypes
import functools
import gc
import time
from collections.abc import Callable
from typing import Final

from hbone.aio.poller import Poller

#: Without changes for so long, free pages go back to the system; a guess.
_CALM_S: Final = 2.0
#: Between looks at what load has left; a guess.
_LOOK_S: Final = 5.0
#: Load has gone when of so many sockets at least so large a part has; fewer hold too little to look for.
_MANY: Final = 32
_GONE: Final = 0.75
#: With so many sockets left a collection takes some 3 ms. It finds nothing (see :func:`settle`), but empties the
#: interpreter's lists of free objects, each of which may be the last one in a megabyte.
_FEW: Final = 500
#: Of the time, what giving back may take: where a mesh has changed much a collection takes longer.
_SHARE: Final = 0.001


def expect_growth() -> None:
    """Before the start of a mesh that may be big.

    It makes millions of objects that stay; the collector's default is to look through all of them each time a
    quarter more has come.
    """
    gc.set_threshold(100_000, 50, 1000)


def settle() -> None:
    """What the start has made stays: let the collector pass it over, and look at young objects less often.

    Connections make no reference cycles (``tests/ztunnel/envoy/test_cycles.py``), so that the collector finds
    nothing in its passes, which took 5 % of a connection's time.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(10_000, 20, 20)
    give_back()


@functools.cache
def _malloc_trim() -> Callable[[int], int] | None:
    try:
        trim = ctypes.CDLL(None).malloc_trim
    except (OSError, AttributeError):  # not glibc
        return None
    return lambda pad: int(trim(pad))


def give_back() -> bool:
    """Return free pages to the system, where the C library can; whether there were any.

    Responses and messages of a big mesh come and go by the ten megabytes, and what is between the small blocks
    that stay is kept for ever. It takes 8 ms after the start of 20,000 services, which gives back 127 of 811 MiB.
    """
    trim = _malloc_trim()
    return trim is not None and bool(trim(0))


class Housekeeper:
    """Gives memory back to the system when it is calm: after changes of the configuration, and when load has gone.

    Made inside the loop; :meth:`close` it before the poller.

    Args:
        poller: whose sockets are the load.
    """

    def __init__(self, poller: Poller) -> None:
        self._poller = poller
        self._loop = asyncio.get_running_loop()
        self._calm: asyncio.TimerHandle | None = None
        self._peak = 0
        self._not_before_s = 0.0
        self._freed = False
        self._next = self._loop.call_later(_LOOK_S, self._look)

    def changed(self) -> None:
        """Something was put in force; more may come at once."""
        if self._calm is not None:
            self._calm.cancel()
        self._calm = self._loop.call_later(_CALM_S, give_back)

    def _look(self) -> None:
        self._next = self._loop.call_later(_LOOK_S, self._look)
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
        give_back()
        self._freed = False
        ended_s = time.monotonic()
        self._not_before_s = ended_s + (ended_s - began_s) / _SHARE

    def close(self) -> None:
        """Look no more."""
        self._next.cancel()
        if self._calm is not None:
            self._calm.cancel()
