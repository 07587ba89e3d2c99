"""Schedules and limits listeners' handshakes; see :mod:`ztunnel.proxy.dataplane.handshake_limiter`.

A connection enters the limiter after its listener filters, if its filter chain requires TLS. For the limits per
pod, a pod is the address that the client dialled. Envoy has no such limits: clients that never finish a handshake
with one pod can use up all its memory and descriptors.
"""

from __future__ import annotations

import socket
from typing import Final

from hbone.aio.fiber import OneShotFuture
from hbone.errors import HboneError
from ztunnel.proxy.dataplane.handshake_limiter import STALLED, HalfOpen, HandshakeLimiter, PendingHandshake
from ztunnel.proxy.dataplane.live_table import Life

#: If there are more limiters than this (one per dialled address and timeout), unused limiters are dropped.
_KEPT: Final = 256


class Rejected(HboneError):
    """A connection was closed before its handshake. The error's text is the reason."""


class _Waiting:
    """One connection in a handshake limiter. Through this object, the limiter can end the connection during its
    handshake.
    """

    __slots__ = ("connection", "turn")

    def __init__(self, connection: Life, turn: OneShotFuture[PendingHandshake]) -> None:
        self.connection = connection
        self.turn = turn

    def cancel(self) -> None:
        self.connection.end(STALLED)


class Handshakes:
    """Schedules all listener handshakes of a process.

    Args:
        half_open: limits the connections that are in their handshake. The caller closes it.
    """

    def __init__(self, half_open: HalfOpen) -> None:
        self._half_open = half_open
        self._limiters: dict[tuple[str, float], HandshakeLimiter] = {}

    async def turn(
        self, sock: socket.SocketType, connection: Life, source: str, destination: str, timeout_s: float
    ) -> PendingHandshake:
        """Wait until a connection's ClientHello has arrived and the limiter allows its handshake to begin.

        Args:
            sock: the socket, closed if the handshake is refused.
            connection: the connection's table entry. It ends if the limiter drops this handshake in favour of
                another.
            source: the client's address.
            destination: the address that the client dialled.
            timeout_s: the longest wait for the ClientHello.

        Returns:
            The object to notify of the handshake's end.

        Raises:
            Rejected: one of the limits is reached, or the client hung up.
        """
        waiting = _Waiting(connection, OneShotFuture(self._half_open.poller))
        limiter = self._limiter(destination, timeout_s)
        pending = limiter.enter(sock, (source, 0), waiting)
        try:
            return await waiting.turn
        except BaseException:
            # The wait was cancelled (perhaps after the handshake was scheduled), or the connection was rejected.
            limiter.reject(pending, "")
            sock.close()
            if waiting.turn.done() and not waiting.turn.cancelled():
                waiting.turn.exception()  # retrieved, so that asyncio does not log it as unhandled
            raise

    def _limiter(self, destination: str, timeout_s: float) -> HandshakeLimiter:
        key = (destination, timeout_s)
        limiter = self._limiters.pop(key, None)
        if limiter is None:
            if len(self._limiters) >= _KEPT:
                self._forget_one()
            limiter = self._half_open.limiter(self._begins, self._rejected, timeout_s=timeout_s)
        self._limiters[key] = limiter  # moves it to the end, because the first unused ones are dropped
        return limiter

    def _forget_one(self) -> None:
        for key, limiter in self._limiters.items():
            if not len(limiter):
                del self._limiters[key]
                limiter.close()
                return

    @staticmethod
    def _begins(pending: PendingHandshake) -> _Waiting:
        waiting: _Waiting = pending.owner
        waiting.turn.set_result(pending)
        return waiting

    @staticmethod
    def _rejected(pending: PendingHandshake, reason: str) -> None:
        waiting: _Waiting = pending.owner
        if not waiting.turn.done():
            waiting.turn.set_exception(Rejected(reason))
