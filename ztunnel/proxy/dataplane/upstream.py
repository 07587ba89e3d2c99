"""Holds an open connection to an upstream host: the relay's endpoint, and the resources to release
when it closes.
"""

from collections.abc import Callable
from typing import Generic, TypeVar

from hbone.aio.end import End
from hbone.aio.relay import RelayEnd
from hbone.end_state import SourceState
from ztunnel.proxy.dataplane.live_table import Life

LifeT = TypeVar("LifeT", bound=Life)


class Upstream(Generic[LifeT]):
    """The upstream side of one proxied connection. The function that opened it closes it.

    Closing works like ``contextlib.ExitStack``: the connection to the host is closed first, then the callbacks of
    :meth:`on_close` run in reverse order.

    Args:
        closing: the first callbacks, see :meth:`on_close`.

    Attributes:
        end: the endpoint that the relay reads and writes.
        hops: further entries of the same connection in this process's connection table, outermost first. They end
            together with this upstream.
        ended_by_peer: whether the host closed the connection, not this proxy: by a reset, or by ending its
            direction last. Set before the upstream closes.
        in_use: whether the upstream was still carrying a request when it ended.
        moved: whether the connection continues in another process, which counts its end.
    """

    __slots__ = ("_closed", "_closing", "end", "ended_by_peer", "hops", "in_use", "moved")

    def __init__(self, end: End, *closing: Callable[[], object]) -> None:
        self.end = end
        self.hops: tuple[LifeT, ...] = ()
        self.ended_by_peer = False
        self.in_use = True
        self.moved = False
        self._closed = False
        self._closing: list[Callable[[], object]] = list(closing)

    def on_close(self, callback: Callable[[], object]) -> None:
        """Register ``callback``, which is called once, after ``end`` has closed."""
        self._closing.append(callback)

    def relayed(self, ended: RelayEnd, downstream: End) -> bool:
        """Record which side ended the relay with ``downstream``. Return whether a request was still in progress.

        The host has closed the connection if it reset the connection, or ended its direction after the client.
        Envoy's counters use the same rule. A request is complete if both directions ended without a reset, error
        or time-out.
        """
        cut = self.end.source is SourceState.CUT
        in_order = ended.error is None and not ended.timed_out and downstream.source is not SourceState.CUT
        self.ended_by_peer = cut or (in_order and ended.first is downstream)
        return cut or not in_order

    def close(self, error: Exception | None = None) -> None:
        """Close the connection to the host, optionally with ``error`` as the reason, and run the callbacks.
        Idempotent.
        """
        if self._closed:
            return
        self._closed = True
        self.end.close(error)
        while self._closing:
            self._closing.pop()()
