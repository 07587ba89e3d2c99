"""Every limit that a peer of a connection can meet, with its unit and the reason for its default.

Three kinds of answers, from mild to final. A peer that causes more work than its share is not read from for a
while (backpressure). A stream that exceeds its bounds is reset. A connection that does not stop there is ended
with GOAWAY(ENHANCE_YOUR_CALM). ``docs/reliability.md`` has the table of limits with what other proxies do.

Work is counted in units of about a microsecond of one core in pure Python, by what was measured for each kind of
frame. It is counted and not timed: a clock would charge a peer for what the machine does meanwhile.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

# What work costs, in units.

SMALL_DATA_BYTES: Final = 1024
"""DATA of this length on is free: its bytes cost more to send than its header to read."""
SMALL_DATA_UNITS: Final = 1
"""A DATA frame below that which arrived in one piece."""
SPLIT_DATA_UNITS: Final = 4
"""A DATA frame below that with padding, or in pieces."""
DROPPED_DATA_UNITS: Final = 3
"""A DATA frame for a stream that is gone, in addition: nothing is delivered for it."""
FRAME_UNITS: Final = 2
"""Any other frame."""
HEADERS_UNITS: Final = 15
"""A header block, in addition."""
FIELD_UNITS: Final = 4
"""Each field of a header block that no cache knows: an insert into the dynamic table takes that long."""
OCTETS_PER_UNIT: Final = 4
"""Octets of a header block that no cache knows: Huffman codes take that long."""
REQUEST_UNITS: Final = 200
"""A request: a handler, an answer and a log line. An answer of 200 returns it, with what its head cost."""
IDLE_STREAM_UNITS: Final = 200
"""A tunnel that is over and has received nothing: what opened it was work for nothing."""
REFUND_UNITS: Final = 500
"""The most that an answer of 200 returns."""
RECORD_BYTES: Final = 24
"""TLS octets that carry no payload, per unit: what a record adds. Bulk, with a thousandth, pays nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Bounds on what one connection can make us hold or do.

    The arithmetic of the work budget: a quarter of a core for one connection. 10,000 requests of 1 KiB a second in
    its tunnels cost 10,000 units; 2,500 new tunnels a second that carry bytes cost as little, for their 200 pays
    them back; 1,000 refused requests a second cost 300,000 and are slowed down. The burst has room for 600
    requests at once, before the first of them is answered. Whatever a peer sends in frames of 1 KiB or more is
    free. The other rates are guesses: above what busy honest peers were seen to need, and far below what hurts.
    """

    work_burst: int = 200_000
    work_rate: float = 250_000.0
    """Units of work at once, and per second; beyond that the connection is not read from until they are back."""
    peer_work_burst: int = 400_000
    peer_work_rate: float = 500_000.0
    """The same for all connections of one peer, known by its certificate: half of a core."""
    stall_burst_s: float = 3.0
    stall_rate: float = 0.05
    """Seconds of such pauses at once, and per second; beyond that the connection ends."""
    slice_units: int = 1000
    """Work for one connection before the other sockets get their turn."""
    slice_s: float = 0.001
    """The same in seconds, checked between reads."""

    peer_window_bytes: int = 32 * 1024 * 1024
    """Bytes that all connections of one peer may have waiting here, beyond the first window of each."""

    control_burst: int = 1000
    control_rate: float = 500.0
    """Frames per second that make us work for nothing: SETTINGS, PING, PRIORITY, empty DATA, unearned
    WINDOW_UPDATE, frames on closed streams, unknown frames."""
    reset_burst: int = 200
    reset_rate: float = 100.0
    """Streams per second which the peer abandons before our answer, or makes us reset."""
    unsent_frames: int = 1000
    """Control frames waiting for a connection that does not drain."""
    continuation_frames: int = 64
    settings_bytes: int = 4096
    goaway_bytes: int = 16_384
    header_block_bytes: int = 131_072
    """Encoded size of one header section: twice the longest list, so that a longer one ends its stream alone."""
