"""Profiles a process: where the event loop's thread spends its time, or where memory was allocated and kept.

Sampling the thread's stack holds the interpreter's lock for microseconds, a hundred times a second. Time spent
waiting for events in the loop appears as a separate stack. A heap profile traces every allocation, which makes
allocations two to four times as slow.
"""

import asyncio
import sys
import threading
import time
import tracemalloc
from collections import Counter
from types import FrameType
from typing import Final

from ztunnel.runtime.http.page import PLAIN, Page, Query, text

#: The longest profile, and the default, in seconds.
MOST_S: Final = 60.0
_DEFAULT_S: Final = 5.0
_BETWEEN_S: Final = 0.01
#: The number of innermost stack frames that are recorded for an allocation.
_FRAMES: Final = 12
_running = threading.Lock()


async def page(query: Query) -> Page:
    """Return folded stacks for flame graphs, one per line, for a request ``?seconds=N&of=heap``.

    A line ends with the number of samples. For the heap it ends with the number of bytes that were allocated
    during the profile and are still in use.
    """
    of = query.get("of") or "cpu"
    if of not in ("cpu", "heap"):
        return text("of: must be cpu or heap\n", 400, PLAIN)
    try:
        seconds = float(query.get("seconds") or _DEFAULT_S)
    except ValueError:
        seconds = 0.0
    if not 0.0 < seconds <= MOST_S:
        return text(f"seconds: must be a number up to {MOST_S:g}\n", 400, PLAIN)
    if not _running.acquire(blocking=False):
        return text("a profile is made already\n", 409, PLAIN)
    try:
        if of == "heap":
            found = await asyncio.to_thread(allocated, seconds)
        else:
            found = await asyncio.to_thread(sampled, threading.get_ident(), seconds)
    finally:
        _running.release()
    return Page(content_type=PLAIN, body=tuple(f"{stack} {count}\n" for stack, count in found.most_common()))


def sampled(thread: int, seconds: float) -> Counter[str]:
    """Return how often a thread was seen in each stack. Must be called in another thread."""
    found: Counter[str] = Counter()
    until_s = time.monotonic() + seconds
    while time.monotonic() < until_s:
        frame = sys._current_frames().get(thread)
        if frame is None:
            break
        found[_folded(frame)] += 1
        del frame  # a frame keeps everything that it refers to alive
        time.sleep(_BETWEEN_S)
    return found


def allocated(seconds: float) -> Counter[str]:
    """Return, by stack, the bytes that were allocated during a profile and are still in use. Blocks its thread."""
    began_here = not tracemalloc.is_tracing()  # otherwise PYTHONTRACEMALLOC has begun it
    if began_here:
        tracemalloc.start(_FRAMES)
    try:
        time.sleep(seconds)
        snapshot = tracemalloc.take_snapshot()
    finally:
        if began_here:
            tracemalloc.stop()
    found: Counter[str] = Counter()
    for each in snapshot.statistics("traceback"):
        found[";".join(f"{frame.filename}:{frame.lineno}" for frame in each.traceback)] = each.size
    return found


def _folded(frame: FrameType | None) -> str:
    names = []
    while frame is not None:
        names.append(f"{frame.f_globals.get('__name__', '?')}:{frame.f_code.co_qualname}")
        frame = frame.f_back
    return ";".join(reversed(names))
