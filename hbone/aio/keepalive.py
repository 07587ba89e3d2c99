"""Keeps a connection alive: sends a PING every interval, which must be answered within a time limit.

Received bytes extend the time limit, like in Envoy (``connection_keepalive.timeout``). On a slow link, the answer
waits behind the data that the peer has already sent, and this data can need more time than the limit.
"""

from __future__ import annotations

import os
from typing import Protocol

from hbone.aio.interval_timer import IntervalTimer
from hbone.aio.poller import Poller

_CHECKS_PER_PERIOD = 4
"""The number of checks per ping interval or timeout, whichever is shorter. More checks make both more accurate."""


class Pinged(Protocol):
    """The connection on which :class:`Keepalive` sends PINGs."""

    @property
    def received_bytes(self) -> int:
        """The number of bytes received until now."""

    def send_ping(self, payload: bytes) -> None:
        """Send a PING with 8 bytes of ``payload``."""

    def on_silence(self) -> None:
        """Close the connection, because the last PING was not answered in time, and no bytes were received."""


class Keepalive:
    """The keepalive of one connection, called by a shared timer (:mod:`hbone.aio.interval_timer`) until
    :meth:`stop`.

    A timer per connection, restarted with each PONG, would cost more than these checks.
    """

    __slots__ = (
        "_connection",
        "_heard_s",
        "_interval_s",
        "_payload",
        "_poller",
        "_received",
        "_sent_s",
        "_timeout_s",
        "_timer",
    )

    def __init__(self, connection: Pinged, poller: Poller, *, interval_s: float, timeout_s: float) -> None:
        self._connection: Pinged | None = connection
        self._poller = poller
        self._interval_s = interval_s
        self._timeout_s = timeout_s
        self._payload = b""  # the payload of the PING that has no answer yet
        self._sent_s = poller.loop.time()
        self._received = 0  # the number of received bytes at the last check while a PING has no answer
        self._heard_s = 0.0  # when the PING was sent, or when a later check found that bytes were received
        self._timer: IntervalTimer = poller.interval_timer(min(interval_s, timeout_s) / _CHECKS_PER_PERIOD)
        self._timer.register(self, poller.now_s)

    def answered(self, payload: bytes) -> bool:
        """Process a PONG. Return False if it does not answer a PING of this keepalive."""
        # The payload is random, so that a peer cannot answer in advance and appear to be alive.
        if not self._payload or payload != self._payload:
            return False
        self._payload = b""
        return True

    def on_interval(self) -> None:
        connection = self._connection
        if connection is None:
            return
        now_s = self._poller.loop.time()
        since_s = now_s - self._sent_s
        if self._payload:
            if connection.received_bytes != self._received:
                self._received = connection.received_bytes
                self._heard_s = now_s
            elif now_s - self._heard_s >= self._timeout_s:
                connection.on_silence()
        elif since_s >= self._interval_s:
            self._payload = os.urandom(8)
            self._sent_s = self._heard_s = now_s
            self._received = connection.received_bytes
            connection.send_ping(self._payload)

    def stop(self) -> None:
        """Unregister from the timer and drop the reference to the connection; idempotent."""
        self._timer.unregister(self)
        self._connection = None
