"""Defines the costs of frames and of a peer's other actions, in units of work.

A unit is about a microsecond of a fast core in pure Python. The costs were measured. Work is not timed, because a
clock would also charge a peer for other processes on the machine. The price of a unit depends on the speed of this
core (:class:`hbone.cost_budget.UnitPrice`), so that a budget is the same share of any core.
"""

from __future__ import annotations

from typing import Final

SMALL_DATA_BYTES: Final = 1024
"""DATA frames of at least this length are free: sending their bytes costs more than reading their header."""
SMALL_DATA_UNITS: Final = 1
"""The cost of a shorter DATA frame that arrived in one piece."""
SPLIT_DATA_UNITS: Final = 4
"""The cost of a shorter DATA frame that has padding, or arrived in pieces."""
DROPPED_DATA_UNITS: Final = 3
"""The additional cost of a DATA frame for a closed stream, whose bytes are not delivered."""
FRAME_UNITS: Final = 2
"""The cost of any other frame."""
HEADERS_UNITS: Final = 15
"""The additional cost of a frame that completes a header block."""
FIELD_UNITS: Final = 4
"""The cost of each field of an uncached header block: an insert into the dynamic table takes that long."""
OCTETS_PER_UNIT: Final = 4
"""How many octets of an uncached header block cost one unit, because decoding Huffman codes takes that long."""
REQUEST_UNITS: Final = 200
"""The cost of a request: a handler, a response and a log line. A 200 refunds this and the cost of its header
block.
"""
IDLE_STREAM_UNITS: Final = 200
"""The cost of a closed tunnel that has received no bytes, because opening the tunnel was wasted work."""
REFUND_UNITS: Final = 500
"""The most that a 200 refunds."""
RECORD_BYTES: Final = 24
"""How many TLS octets without payload (the overhead of records) cost one unit. Bulk data, with a thousandth of
overhead, is free.
"""
