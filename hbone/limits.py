"""Defines all limits on the peer of a connection, with their units and the reasons for their defaults.

There are three responses to a peer, from mild to final. If a peer overdraws its work budget, its bytes are not
read until the budget has recovered (backpressure). A stream that exceeds its limits is reset. If the peer
continues, the connection is closed with GOAWAY(ENHANCE_YOUR_CALM). ``docs/reliability.md`` compares the limits
with those of other proxies.

Work is counted in units: :mod:`hbone.frame_costs` has the costs of a peer's actions.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

HANDSHAKE_TIMEOUT_S: Final = 10.0
"""The time limit for a TLS handshake, in seconds. It is the default of all settings of this limit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Limits on the memory and the work that one connection can cause.

    The work budget is a quarter of a core per connection. 10,000 requests of 1 KiB per second in its tunnels cost
    10,000 units. 2,500 new tunnels per second that carry bytes cost no more, because each 200 refunds its request.
    1,000 refused requests per second cost 300,000 units, so the peer is slowed down. The burst has room for 600
    requests at once, before the first answer. Frames of 1 KiB or more are free. The other rates are guesses:
    higher than busy honest peers were observed to need, and far lower than harmful rates.
    """

    work_burst: int = 200_000
    work_rate: float = 250_000.0
    """The work budget of one connection: units of work at once, and per second, at a price of 1. If it is
    overdrawn, reading stops until it has recovered.
    """
    peer_work_burst: int = 400_000
    peer_work_rate: float = 500_000.0
    """The work budget of all connections of one peer, known by its certificate: half of a core."""
    stall_burst_s: float = 3.0
    stall_rate: float = 0.05
    """The budget for pauses in reading: seconds at once, and per second, at a price of 1. A peer that overdraws
    this budget is disconnected.
    """
    slice_units: int = 1000
    """How much work is done for one connection, at a price of 1, before other sockets are served."""
    slice_s: float = 0.001
    """For how many seconds one connection is served before other sockets. Checked between reads."""

    peer_window_bytes: int = 32 * 1024 * 1024
    """The largest number of received bytes that can wait here for all connections of one peer, beyond the first
    window of each connection.
    """

    control_burst: int = 1000
    control_rate: float = 500.0
    """The allowed rate per second of frames that cause wasted work: SETTINGS, PING, PRIORITY, empty DATA, unearned
    WINDOW_UPDATE, frames on closed streams, unknown frames.
    """
    reset_burst: int = 200
    reset_rate: float = 100.0
    """How many streams per second the peer may abandon before our response, or make us reset."""
    unsent_frames: int = 1000
    """How many control frames may wait for a peer that does not read."""
    continuation_frames: int = 64
    settings_bytes: int = 4096
    goaway_bytes: int = 16_384
    header_block_bytes: int = 131_072
    """The largest number of encoded bytes of one header section. This is twice the longest list, so that a list
    over its limit ends only its stream.
    """
