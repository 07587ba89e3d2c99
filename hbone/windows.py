"""Sizes the receive windows of a connection and of its streams, which limit how much received payload waits in
this process.

A stream whose receiver does not read pins its window: the bytes have arrived, but cannot be delivered. To let
other streams make progress, the windows of all streams together stay within the connection's window. A stream
therefore starts with a small window (``initial_window_bytes``), which grows on demand: if half a window was
delivered within :data:`FAST_S` and few bytes wait, the peer waited for credit and not for the reader. A stream
that slows down releases the growth of its window.

Growth is taken from two pools of the connection. Delivered bytes do not prove that an application reads, because
the kernel buffers some megabytes of a stream without a reader. Therefore streams that have delivered less than
:data:`PROVEN_BYTES` share a small pool, and each can take a quarter of the bytes left in it. A stream that has
delivered more has a live reader, and can take half of the bytes left in the large pool. So there is always credit
for the next stream, no matter how many streams are pinned.

The connection's own window depends on the number of streams: with few streams it uses little of the peer's window
quota (:class:`hbone.flow.PeerQuota`), and of the window budgets of its pod and of the process
(:class:`hbone.flow.WindowPool`). When one of these is used up, windows stop growing. This is backpressure, not an
error.
"""

from __future__ import annotations

from typing import Final

from hbone.flow import PeerQuota, WindowPool
from hbone.settings import Http2Settings

FAST_S: Final = 0.05
"""A stream that delivers half a window within this time is slowed down by its window, at round
trips up to 100 ms.
"""
SLOW_S: Final = 0.5
"""If delivering half a window takes longer than this, the window is larger than the stream needs."""
PROVEN_BYTES: Final = 8 * 1024 * 1024
"""A stream that has delivered more than this has a live reader: socket buffers cannot hold so much (tcp_wmem and
tcp_rmem of Linux end at 4 and 6 MiB).
"""
_UNPROVEN_BYTES: Final = 3 * 1024 * 1024
_QUICK_BYTES: Final = 256 * 1024  # a smaller window grows fourfold at once, a larger window doubles
_KEPT_BYTES: Final = 64 * 1024  # the growth that a slow stream keeps
_LEAST_GROWTH: Final = 8192
_STREAM_STEP: Final = 32  # the number of streams for which the connection's window is enlarged at once
_MOST_STREAMS: Final = 200  # the assumed number of streams if we announce no limit, as a client


class StreamWindow:
    """The receive window of one stream; ``credit + unacknowledged + waiting bytes == size``."""

    __slots__ = ("borrowed", "credit", "delivered", "granted_s", "size", "step", "unacknowledged")

    def __init__(self, size: int, now_s: float) -> None:
        self.size = size
        self.step = size >> 1
        self.credit = size
        """Bytes that the peer may send."""
        self.unacknowledged = 0
        """Delivered bytes whose credit was not yet returned to the peer."""
        self.delivered = 0
        self.borrowed = 0  # taken from the pool of streams without a proven reader
        self.granted_s = now_s

    @property
    def used(self) -> bool:
        """Whether the peer has sent payload on this stream."""
        return self.delivered > 0 or self.credit < self.size


class ConnectionWindow:
    """A connection's receive window, and the pools for the growth of its streams' windows."""

    __slots__ = (
        "_grown",
        "_pod",
        "_proven",
        "_share",
        "_unproven",
        "credit",
        "first",
        "initial",
        "most_bytes",
        "most_stream_bytes",
        "size",
        "unacknowledged",
    )

    def __init__(self, settings: Http2Settings) -> None:
        self.most_bytes = settings.connection_window_bytes
        self.most_stream_bytes = settings.stream_window_bytes
        self.initial = settings.first_window_bytes
        """The window that every stream starts with."""
        streams = settings.max_concurrent_streams or _MOST_STREAMS
        # If the configured connection window is too small for the first windows of all streams, half of the
        # connection window is kept for growth.
        kept = min(self.initial * streams, self.most_bytes >> 1)
        self._unproven = min(_UNPROVEN_BYTES, (self.most_bytes - kept) >> 1)
        self._proven = self.most_bytes - kept - self._unproven
        self._grown = 0  # growth of all streams beyond their initial windows
        self._share: PeerQuota | None = None
        self._pod: WindowPool | None = None
        self.first = settings.first_connection_window_bytes
        """The connection's initial window, for any peer."""
        self.size = self.first
        self.credit = self.size
        """The number of bytes that the peer may still send on all streams."""
        self.unacknowledged = 0
        """Delivered bytes whose credit was not yet returned to the peer; negative if the window has shrunk."""

    def join(self, share: PeerQuota, pod: WindowPool | None = None) -> None:
        """From now on, take window growth beyond the first window from the quotas ``share`` and ``pod``.

        Called before any stream is open, or after the connection has moved here. Windows that have grown in
        another process are counted even above the limits, because granted credit cannot be withdrawn. While
        windows exceed the limits, no window grows.
        """
        self._share = share
        self._pod = pod
        grown = self.size - self.first
        if grown:
            share.add_moved(grown)
            if pod is not None:
                pod.used += grown

    def leave(self) -> None:
        """Return all window growth to the quotas, because the connection is closed. Idempotent."""
        if self._share is not None:
            self._return_window(self._share, self.size - self.first)
            self._share = None

    def _return_window(self, share: PeerQuota, size: int) -> None:
        share.return_window(size)
        if self._pod is not None:
            self._pod.release(size)

    def opened(self, streams: int) -> None:
        """Record that a stream was opened. ``streams`` is the number of open streams."""
        if not streams % _STREAM_STEP:
            self._fit(streams, self._grown)

    def closed(self, stream: StreamWindow, streams: int) -> None:
        """Reclaim the window growth of a closed stream. ``streams`` is the number of remaining streams."""
        grown = stream.size - self.initial
        if grown or not streams % _STREAM_STEP:
            self._return(stream, grown)
            self._fit(streams, self._grown)

    def renew(self, stream: StreamWindow, now_s: float, streams: int) -> int:
        """Resize a stream's window after the stream has used half of the window. Return the credit to grant to the
        stream.
        """
        consumed, size = stream.unacknowledged, stream.size
        elapsed_s = now_s - stream.granted_s
        waiting = size - stream.credit - consumed
        stream.delivered += consumed
        stream.granted_s = now_s
        stream.unacknowledged = 0
        if elapsed_s <= FAST_S and waiting <= size >> 2:
            self._grow(stream, streams)
        elif elapsed_s > SLOW_S and size > _KEPT_BYTES and size > self.initial:
            # A window shrinks by withholding new credit. Granted credit cannot be withdrawn, except by SETTINGS
            # from all streams at once.
            self._return(stream, size - max(size >> 1, _KEPT_BYTES, self.initial, size - consumed))
            self._fit(streams, self._grown)
        stream.step = stream.size >> 1
        credit = stream.size - waiting - stream.credit
        stream.credit += credit
        return credit

    def _grow(self, stream: StreamWindow, streams: int) -> None:
        proven = stream.delivered >= PROVEN_BYTES
        if proven and stream.borrowed and self._proven >= stream.borrowed:
            self._proven -= stream.borrowed
            self._unproven += stream.borrowed
            stream.borrowed = 0
        size = stream.size
        if proven:
            held = size - self.initial - stream.borrowed
            allowed = (self._proven + held >> 1) - held
        else:
            allowed = (self._unproven + stream.borrowed >> 2) - stream.borrowed
        more = min(size * 3 if size < _QUICK_BYTES else size, self.most_stream_bytes - size, allowed)
        if more < _LEAST_GROWTH or not self._fit(streams, self._grown + more):
            return
        if proven:
            self._proven -= more
        else:
            self._unproven -= more
            stream.borrowed += more
        stream.size += more
        self._grown += more

    def _return(self, stream: StreamWindow, size: int) -> None:
        of_borrowed = min(size, stream.borrowed)
        stream.borrowed -= of_borrowed
        self._unproven += of_borrowed
        self._proven += size - of_borrowed
        stream.size -= size
        self._grown -= size

    def _fit(self, streams: int, grown: int) -> bool:
        """Resize the connection's window for ``streams`` streams with a total growth of ``grown``. Return False if
        a quota does not allow it.
        """
        wanted = self.initial * (streams // _STREAM_STEP + 2) * _STREAM_STEP + grown
        wanted = min(max(wanted, self.first), self.most_bytes)
        change = wanted - self.size
        if self._share is not None and change:
            if change < 0:
                self._return_window(self._share, -change)
            elif not self._share.take_window(change):
                return False
            elif self._pod is not None and not self._pod.take(change):
                self._share.return_window(change)
                return False
        self.size = wanted
        self.unacknowledged += change
        return True
