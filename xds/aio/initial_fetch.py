"""Limits the wait for a subscription's first update (``initial_fetch_timeout``)."""

import asyncio
from collections.abc import Callable

from xds.protocol.resource import SubscriptionStats


class InitialFetch:
    """The wait between a subscription and its first accepted update. A timeout is reported at most once."""

    __slots__ = ("_on_timeout", "_stats", "_timer")

    def __init__(self, stats: SubscriptionStats, on_timeout: Callable[[], None] | None, timeout_s: float) -> None:
        self._stats = stats
        self._on_timeout = on_timeout
        self._timer: asyncio.TimerHandle | None = None
        if timeout_s > 0:
            self._timer = asyncio.get_running_loop().call_later(timeout_s, self._timed_out)

    def over(self) -> None:
        """End the wait, because the first update arrived or the subscription was closed. Idempotent."""
        self._on_timeout = None
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def failed(self) -> None:
        """End the wait, because the received update could not be passed to the receiver. Like in Envoy, this acts
        like a timeout, but is not counted as one.
        """
        on_timeout = self._on_timeout
        self.over()
        if on_timeout is not None:
            on_timeout()

    def _timed_out(self) -> None:
        self._stats.init_fetch_timeout += 1
        self._stats.update_attempt += 1
        self.failed()
