"""Copies bytes in both directions between two ends, until both directions are over."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Generator
from dataclasses import dataclass
from typing import TypeAlias

from hbone.aio import waits
from hbone.aio.end import End, RelayObserver
from hbone.aio.fiber import OneShotFuture
from hbone.aio.interval_timer import IntervalTimer
from hbone.errors import TunnelClosed

LINGER_S = 30.0
"""How long an application can continue to write after the other end of its relay has closed. A guess."""


_CHECKS_PER_TIMEOUT = (
    8  # checks of the counters per idle time: a timer restarted with each chunk would cost more than the copy
)


class ByteCounts:
    """The live byte counters of a relay: ``sent`` counts from ``a`` to ``b``, ``received`` from ``b`` to ``a``.

    Args:
        sent_before, received_before: the bytes that the relay moved in earlier processes.
    """

    __slots__ = ("_a", "_b", "_received", "_received_before", "_sent", "_sent_before")

    def __init__(self, sent_before: int = 0, received_before: int = 0) -> None:
        self._a: End | None = None
        self._b: End | None = None
        self._sent = 0
        self._received = 0
        self._sent_before = sent_before
        self._received_before = received_before

    @property
    def sent(self) -> int:
        """The number of bytes that the first end has read, in all processes."""
        return self._sent_before + self.sent_here

    @property
    def received(self) -> int:
        """The number of bytes that the second end has read, in all processes."""
        return self._received_before + self.received_here

    @property
    def sent_here(self) -> int:
        """The number of bytes that the first end has read in this process."""
        return self._a.read_bytes if self._a is not None else self._sent

    @property
    def received_here(self) -> int:
        """The number of bytes that the second end has read in this process."""
        return self._b.read_bytes if self._b is not None else self._received

    def follow(self, a: End, b: End) -> None:
        """From now on, read the counters of the two ends, so that the relay does not have to count each chunk."""
        self._a, self._b = a, b

    def freeze(self) -> None:
        """Store the current numbers and release the ends."""
        self._sent, self._received = self.sent_here, self.received_here
        self._a = self._b = None


class RelayEnd:
    """The result of a relay.

    Attributes:
        first: the end that stopped first, as given to :func:`relay`. None if this process ended the relay.
        error: the failure that an end reported. None if both directions ended in order.
        timed_out: whether the relay ended because no bytes moved for the idle time.
    """

    __slots__ = ("error", "first", "timed_out")

    def __init__(self, *, first: End | None, error: Exception | None, timed_out: bool = False) -> None:
        self.first = first
        self.error = error
        self.timed_out = timed_out


#: A callback that is called once, when a relay ends. This can be in the middle of a read, so the callback only
#: records the result and schedules further work with the poller.
OnRelayEnd: TypeAlias = Callable[[RelayEnd], None]


@dataclass(slots=True, kw_only=True)
class MovedRelay:
    """The progress of a relay in another process.

    Attributes:
        first: the end that stopped first. ``None``: both ends are running.
        open_sinks: the ends whose output is not over.
        quiet: how many eighths of the idle timeout have passed without bytes.
        seen: the number of bytes moved in both directions until the last check. -1 before the first check.
    """

    first: End | None
    open_sinks: tuple[End, ...]
    quiet: int = 0
    seen: int = -1


class Relay(RelayObserver):
    """A running relay. It calls ``on_end`` when it ends. Without ``on_end``, await it once for its
    :class:`RelayEnd`; cancelling this await aborts the relay.
    """

    __slots__ = (
        "_a",
        "_b",
        "_counts",
        "_done",
        "_error",
        "_first",
        "_idle_timer",
        "_linger",
        "_loop",
        "_on_end",
        "_open_sinks",
        "_quiet",
        "_seen",
        "on_half_close",
    )

    def __init__(
        self,
        a: End,
        b: End,
        counts: ByteCounts,
        idle_timeout_s: float | None,
        on_end: OnRelayEnd | None,
        moved: MovedRelay | None = None,
    ) -> None:
        self._a: End | None = a
        self._b: End | None = b
        self._counts = counts
        self._loop = a.poller.loop
        self._on_end = on_end
        self._done: OneShotFuture[RelayEnd] | None = OneShotFuture(a.poller) if on_end is None else None
        self._first: End | None = None
        self._error: Exception | None = None
        self._open_sinks = {a, b}
        self._linger: asyncio.TimerHandle | None = None
        self._idle_timer: IntervalTimer | None = None
        self._seen = -1
        self._quiet = 0
        self.on_half_close: Callable[[End], None] | None = None
        """Called for each end that has no more bytes to read, while the relay runs."""
        counts.follow(a, b)
        a.join_relay(self, b)
        b.join_relay(self, a)
        if idle_timeout_s is not None:
            self._idle_timer = a.poller.interval_timer(idle_timeout_s / _CHECKS_PER_TIMEOUT)
            self._idle_timer.register(self, a.poller.now_s)
        if moved is not None:
            self._first = moved.first
            self._open_sinks = set(moved.open_sinks)
            self._quiet, self._seen = moved.quiet, moved.seen
            a.restart()
            if self._is_running():
                b.restart()
            return
        a.start()
        if self._is_running():
            b.start()

    def _is_running(self) -> bool:
        # This is a method, because type checkers would assume that an attribute does not change during calls.
        return self._a is not None

    def __await__(self) -> Generator[object, None, RelayEnd]:
        assert self._done is not None
        return waits.relay_end(self, self._done).__await__()

    def abort(self, reason: str) -> None:
        """End both directions now. The owner then closes both ends, and thereby their network connections.
        Idempotent.
        """
        if self._error is None:
            self._error = TunnelClosed(reason)
            self._first = None
        self._finish()

    def finish(self, reason: str) -> None:
        """End both directions like :meth:`abort`, but by :meth:`End.end_in_order`, so that the remote sides do not
        see a failure.
        """
        a, b = self._a, self._b
        self.abort(reason)
        for end in (a, b):
            if end is not None:
                end.end_in_order()

    # Moving the relay to another process: see hbone.aio.handover

    @property
    def ends(self) -> tuple[End, End] | None:
        """The two ends of the relay, or ``None`` when the relay is over."""
        a, b = self._a, self._b
        return None if a is None or b is None else (a, b)

    @property
    def counts(self) -> ByteCounts:
        return self._counts

    @property
    def progress(self) -> MovedRelay | None:
        """The relay's progress, without idle time and :attr:`on_half_close`. ``None`` if it is about to end."""
        if self._error is not None or self._linger is not None or not self._is_running():
            return None
        return MovedRelay(
            first=self._first, open_sinks=tuple(self._open_sinks), quiet=self._quiet, seen=self._seen
        )

    def move_away(self) -> None:
        """Stop the relay here and leave its ends as they are, because another process continues it. Idempotent."""
        self._first = None
        self._finish()

    # Called by the ends

    def read_ended(self, end: End, error: Exception | None, *, clean: bool) -> None:
        if self._first is None:
            self._first = end
        if error is not None and not clean and self._error is None:
            self._error = error
        if self.on_half_close is not None:
            self.on_half_close(end)

    def write_ended(self, end: End) -> None:
        """Record that all bytes for one end were sent. The relay ends when this is true for both ends."""
        self._open_sinks.discard(end)
        if not self._open_sinks:
            self._finish()

    def reset_sent(self) -> None:
        self._finish()

    def sink_broken(self, end: End, error: Exception) -> None:
        if self._first is None:
            self._first = end
        # The time for the other direction is limited. It can end in order, if an application is writing its last
        # bytes, or never, because a remote side whose bytes are discarded has no reason to stop.
        if self._linger is None and self._a is not None:
            self._linger = self._loop.call_later(LINGER_S, self._lingered)

    def _lingered(self) -> None:
        for end in (self._a, self._b):
            if end is not None:
                end.lingered()
        self.abort("peer gone")

    def fail(self, end: End, error: Exception) -> None:
        if self._first is None:
            self._first = end
        if self._error is None:
            self._error = error
        self._finish()

    def on_interval(self) -> None:
        """End the relay if no bytes have moved for the whole idle time. The timer calls it eight times per idle
        time.
        """
        moved = self._counts.sent + self._counts.received
        self._quiet = self._quiet + 1 if moved == self._seen else 0
        self._seen = moved
        if self._quiet == _CHECKS_PER_TIMEOUT:
            self._finish(timed_out=True)

    def _finish(self, *, timed_out: bool = False) -> None:
        a, b = self._a, self._b
        if a is None or b is None:
            return
        self._a = self._b = None
        if self._idle_timer is not None:
            self._idle_timer.unregister(self)
        if self._linger is not None:
            self._linger.cancel()
        self._idle_timer = self._linger = None
        self._counts.freeze()
        a.leave_relay()
        b.leave_relay()
        self._open_sinks.clear()
        self.on_half_close = None
        ended = RelayEnd(first=self._first, error=self._error, timed_out=timed_out)
        self._first = None
        on_end, self._on_end = self._on_end, None
        if on_end is not None:
            on_end(ended)
        elif self._done is not None and not self._done.done():
            self._done.set_result(ended)


def relay(
    a: End,
    b: End,
    counts: ByteCounts,
    *,
    idle_timeout_s: float | None = None,
    on_end: OnRelayEnd | None = None,
) -> Relay:
    """Start to copy between two ends, including half-closes. Return the running relay.

    Args:
        a: by convention the client's side.
        b: the other end.
        counts: follows the bytes from now on.
        idle_timeout_s: the relay ends if neither side has sent a byte for this time, or up to a seventh longer.
        on_end: called at the end, possibly before this returns. ``None``: the caller awaits the relay.
    """
    return Relay(a, b, counts, idle_timeout_s, on_end)


def continued(a: End, b: End, counts: ByteCounts, moved: MovedRelay, idle_timeout_s: float | None = None) -> Relay:
    """Continue a relay that another process has started. The states of both ends were already restored."""
    return Relay(a, b, counts, idle_timeout_s, None, moved)
