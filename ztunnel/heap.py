"""The process's heap while a configuration comes, and when it is there (``bench/scale.py``)."""

import ctypes
import functools
import gc
from collections.abc import Callable


def expect_growth() -> None:
    """Before the start of a mesh that may be big.

    It makes millions of objects that stay; the collector's default is to look through all of them each time a
    quarter more has come.
    """
    gc.set_threshold(100_000, 50, 1000)


def settle() -> None:
    """What the start has made stays: let the collector pass it over, and look at young objects less often.

    Connections make no reference cycles (``tests/ztunnel/test_cycles.py``), so that the collector finds nothing
    in its passes, which took 5 % of a connection's time.
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
