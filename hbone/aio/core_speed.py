"""Measures how fast this CPU core does the tunnel engine's work, for :class:`hbone.cost_budget.UnitPrice`.

Two kinds of work are measured: reading DATA frames of one byte, and decoding header fields that enter the dynamic
table. A compiled build does the first kind several times faster. The ``hpack`` library does the second kind. It is
interpreted in any build, like the handlers of requests.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final

from hbone import frames
from hbone.engine import Engine
from hbone.frame_costs import FIELD_UNITS, HEADERS_UNITS, OCTETS_PER_UNIT, SMALL_DATA_UNITS
from hbone.frames import frame
from hbone.hpack_cache import BlockDecoder, BlockEncoder
from hbone.settings import Http2Settings, Role

_RUNS: Final = 3
_FRAMES: Final = 64
_FIELDS: Final = 16
_CONNECT: Final = BlockEncoder().encode(((b":method", b"CONNECT"), (b":authority", b"a:1")))
_OPENING: Final = (
    frames.PREFACE + frame(frames.SETTINGS, 0, 0) + frame(frames.HEADERS, frames.END_HEADERS, 1, _CONNECT)
)
_SMALL_DATA: Final = frame(frames.DATA, 0, 1, b"x") * _FRAMES
_INSERTS: Final = b"\x40\x01a\x00" * _FIELDS
_INSERT_UNITS: Final = HEADERS_UNITS + _FIELDS * FIELD_UNITS + len(_INSERTS) // OCTETS_PER_UNIT


def unit_s() -> float:
    """Return the processor time in seconds that a unit of work takes now, for the slower of the two kinds of work.

    A call takes half a millisecond in pure Python. The median of three runs is used, to exclude a garbage
    collection or an interrupt. The running time of other processes does not count. But their use of shared caches
    and of the core's other thread slows down a measurement and the work for peers equally.
    """
    engine = Engine(Role.SERVER, Http2Settings())
    engine.receive_data(_OPENING)
    engine.respond(1, 200)
    decoder = BlockDecoder(len(_INSERTS) * 64, len, 0)
    return max(
        _median_s(lambda: engine.receive_data(_SMALL_DATA)) / (_FRAMES * SMALL_DATA_UNITS),
        _median_s(lambda: decoder.decode(_INSERTS)) / _INSERT_UNITS,
    )


def _median_s(work: Callable[[], object]) -> float:
    seconds = []
    for _ in range(_RUNS):
        begun_s = time.thread_time()
        work()
        seconds.append(time.thread_time() - begun_s)
    return sorted(seconds)[_RUNS // 2]
