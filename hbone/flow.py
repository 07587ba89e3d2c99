"""Budgets against floods, which limit how much work a peer can cause at once and per second. Time is an argument.

A limit on the rate alone would refuse honest bursts (a hundred tunnels that close together), and a limit on the
total would eventually refuse a long-lived connection. Therefore each budget is a token bucket, which allows a
burst and then a rate.
"""

from __future__ import annotations

from typing import Final

from hbone.limits import Limits

_WINDOW_BYTES: Final = 256 * 1024 * 1024  # the default for a whole process
_MOST_PEERS: Final = 4096  # peers remembered, with or without a connection: a guess, at some 300 bytes each
PEER_BULK_BYTES: Final = 64 * 1024
"""The number of bytes that one peer's connections can read in an iteration of the poller. Then the peer's other
connections are queued.
"""


class Budget:
    """A token bucket, which allows ``burst`` tokens at once, and ``rate`` per second after that."""

    __slots__ = ("_burst", "_left", "_rate", "_seen_s")

    def __init__(self, *, burst: float, rate: float) -> None:
        self._burst = burst
        self._rate = rate
        self._left = burst
        self._seen_s: float | None = None

    def spend(self, now_s: float, tokens: float = 1.0) -> bool:
        """Take ``tokens`` at ``now_s`` (monotonic seconds), even if too few are left. Return False if the budget
        is then overdrawn.
        """
        self._refill(now_s)
        self._left -= tokens
        return self._left >= 0

    def affords(self, now_s: float, tokens: float = 1.0) -> bool:
        """Take ``tokens`` and return True. If too few are left, take none and return False."""
        self._refill(now_s)
        if self._left < tokens:
            return False
        self._left -= tokens
        return True

    def _refill(self, now_s: float) -> None:
        if self._seen_s is None:
            self._seen_s = now_s
        elif now_s > self._seen_s:
            self._left = min(self._burst, self._left + (now_s - self._seen_s) * self._rate)
            self._seen_s = now_s

    def refund(self, tokens: float) -> None:
        """Put ``tokens`` back, up to the burst size."""
        self._left = min(self._burst, self._left + tokens)

    @property
    def overdrawn_s(self) -> float:
        """The number of seconds until the budget is no longer overdrawn; 0.0 if it is not overdrawn."""
        return -self._left / self._rate if self._left < 0 and self._rate > 0 else 0.0


class WindowPool:
    """A budget in bytes for the growth of receive windows, shared by the connections of one pod or of one
    process.
    """

    __slots__ = ("limit", "used")

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.used = 0

    def take(self, size: int) -> bool:
        """Take ``size`` bytes and return True. If fewer are left, take none and return False."""
        if self.used + size > self.limit:
            return False
        self.used += size
        return True

    def release(self, size: int) -> None:
        """Put ``size`` bytes back."""
        self.used -= size


class PeerQuota:
    """The budgets that all connections of one peer share.

    Args:
        limits: the peer's limits.
        windows: the process's window budget. The peer's windows are also taken from this budget.
    """

    __slots__ = (
        "_most_window_bytes",
        "_turn_bytes",
        "_turn_s",
        "_windows",
        "bulk_s",
        "connections",
        "window_bytes",
        "work",
    )

    def __init__(self, limits: Limits, windows: WindowPool | None = None) -> None:
        self._most_window_bytes = limits.peer_window_bytes
        self._windows = windows
        self.window_bytes = 0
        """The growth of the connections' receive windows beyond their initial sizes."""
        self.work = Budget(burst=limits.peer_work_burst, rate=limits.peer_work_rate)
        self.connections = 0
        self.bulk_s = -1.0
        """The start time of the poller's iteration in which the connections have read :data:`PEER_BULK_BYTES`."""
        self._turn_s = -1.0
        self._turn_bytes = 0

    def note_read(self, turn_s: float, size: int) -> None:
        """Record that a connection of the peer has read ``size`` bytes. ``turn_s`` is the start time of the loop
        iteration.
        """
        if self._turn_s != turn_s:
            self._turn_s, self._turn_bytes = turn_s, 0
        self._turn_bytes += size
        if self._turn_bytes >= PEER_BULK_BYTES:
            self.bulk_s = turn_s

    def take_window(self, size: int) -> bool:
        """Let a connection's receive window grow by ``size``. Return False if the windows of the peer, or of the
        process, have reached their limit.
        """
        if self.window_bytes + size > self._most_window_bytes:
            return False
        if self._windows is not None and not self._windows.take(size):
            return False
        self.window_bytes += size
        return True

    def add_moved(self, size: int) -> None:
        """Count the windows of a connection taken over from another process, even above the limit."""
        self.window_bytes += size
        if self._windows is not None:
            self._windows.used += size

    def return_window(self, size: int) -> None:
        """Record that a connection's window has shrunk by ``size``, or a connection with a window of this size has
        closed.
        """
        self.window_bytes -= size
        if self._windows is not None:
            self._windows.release(size)


class PeerQuotas:
    """The quotas of all peers of a process, by the name in the peer's verified certificate.

    A quota outlives its connections, so that a peer cannot clear its deficit by reconnecting. If there are more
    than ``_MOST_PEERS`` quotas, the oldest one without a connection is dropped.

    Attributes:
        windows: the windows of all peers together. The owner sets their limit.
    """

    __slots__ = ("_shares", "windows")

    def __init__(self) -> None:
        self._shares: dict[str, PeerQuota] = {}
        self.windows = WindowPool(_WINDOW_BYTES)

    def __len__(self) -> int:
        return len(self._shares)

    def join(self, peer: str, limits: Limits) -> PeerQuota:
        """Return the quota of ``peer`` and count one more connection that uses it, until :meth:`leave`."""
        share = self._shares.pop(peer, None)
        if share is None:
            share = PeerQuota(limits, self.windows)
            if len(self._shares) >= _MOST_PEERS:
                self._forget_one()
        self._shares[peer] = share
        share.connections += 1
        return share

    def leave(self, share: PeerQuota) -> None:
        """Record that a connection has ended; call this once for each :meth:`join`."""
        share.connections -= 1

    def _forget_one(self) -> None:
        for peer, share in self._shares.items():
            if not share.connections:
                del self._shares[peer]
                return
