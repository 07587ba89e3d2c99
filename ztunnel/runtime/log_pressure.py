"""Pauses accepting connections, for a limited time, if the log cannot be written fast enough. Pure.

Lines beyond :data:`~ztunnel.runtime.log_writer.MAX_PENDING` are dropped. A proxy configured to lose no lines stops
accepting at half of that, and clients wait in the accept queue. A blocked log must not stop the node, so after a
time limit connections are accepted and lines are dropped, until the log has caught up.
"""

import logging
from collections.abc import Callable

log = logging.getLogger(__name__)


class LogPressure:
    """A :class:`~ztunnel.runtime.accepting.Gate` that is closed while the log is behind.

    Args:
        is_behind: returns whether too many log lines are unwritten.
        limit_s: the longest time without accepting.
        now: a monotonic clock.
    """

    def __init__(self, is_behind: Callable[[], bool], limit_s: float, now: Callable[[], float]) -> None:
        self._is_behind = is_behind
        self._limit_s = limit_s
        self._now = now
        self._since_s: float | None = None
        self._given_up = False

    def admits(self) -> bool:
        """Return whether to accept a connection now."""
        if not self._is_behind():
            if self._since_s is not None:
                self._since_s, self._given_up = None, False
                log.info("the log has caught up, connections do not wait any longer")
            return True
        if self._since_s is None:
            self._since_s = self._now()
            log.warning("the log is behind, new connections wait limit=%gs", self._limit_s)
        if not self._given_up and self._now() - self._since_s >= self._limit_s:
            self._given_up = True
            log.error("the log is behind for %gs, new connections are accepted and lines dropped", self._limit_s)
        return self._given_up

    def accepted(self, number: int) -> None:
        """Has no effect, because only the state of the log decides (:class:`~ztunnel.runtime.accepting.Gate`)."""
