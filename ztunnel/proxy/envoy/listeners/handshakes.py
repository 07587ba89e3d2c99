"""Handshakes of listeners wait for their turn: see :mod:`ztunnel.proxy.dataplane.half_open` for limits and
fairness.

A connection has passed its listener filters by then, and its filter chain requires TLS. The dialled address stands
for the pod. Envoy has no such limits: there, clients of one pod that never finish a handshake use up the memory
and descriptors of all.
"""

from __future__ import annotations

import socket
from typing import Final

from hbone.aio.fiber import OneShotFuture
from hbone.errors import HboneError
from ztunnel.proxy.dataplane.half_open import (
    STANDS_STILL,
    Arrival,
    Entrance,
    HalfOpen,
)
from ztunnel.proxy.dataplane.lives import Life

#: Addresses without half-open connections whose debts are remembered.
_KEPT: Final = 256


class TurnedAway(HboneError):
    """A connection ends before its handshake; the text is the reason."""


class _Waiting:
    """One connection on its way through an entrance; ends the connection while its handshake runs."""

    __slots__ = ("connection", "turn")

    def __init__(self, connection: Life, turn: OneShotFuture[Arrival]) -> None:
        self.connection = connection
        self.turn = turn

    def cancel(self) -> None:
        self.connection.end(STANDS_STILL)


class Handshakes:
    """Those of a process.

    Args:
        half_open: their limits; its owner closes it.
    """

    def __init__(self, half_open: HalfOpen) -> None:
        self._half_open = half_open
        self._entrances: dict[tuple[str, float], Entrance] = {}

    async def turn(
        self, sock: socket.socket, connection: Life, source: str, destination: str, timeout_s: float
    ) -> Arrival:
        """Wait until a connection's ClientHello is there and its handshake may begin.

        Args:
            sock: closed if it does not come to that.
            connection: ended if its handshake has to give way to another.
            source: the client's address.
            destination: the address that it dialled.
            timeout_s: the longest wait for the ClientHello.

        Returns:
            The object to notify of the handshake's end.

        Raises:
            TurnedAway: one of the limits is reached, or the client hung up.
        """
        waiting = _Waiting(connection, OneShotFuture(self._half_open.poller))
        entrance = self._entrance(destination, timeout_s)
        arrival = entrance.enter(sock, (source, 0), waiting)
        try:
            return await waiting.turn
        except BaseException:
            # Cancelled, perhaps after its handshake was to begin; or turned away, which is no news.
            entrance.turn_away(arrival, "")
            sock.close()
            if waiting.turn.done() and not waiting.turn.cancelled():
                waiting.turn.exception()  # asyncio complains of one that nobody has seen
            raise

    def _entrance(self, destination: str, timeout_s: float) -> Entrance:
        key = (destination, timeout_s)
        entrance = self._entrances.pop(key, None)
        if entrance is None:
            if len(self._entrances) >= _KEPT:
                self._forget_one()
            entrance = self._half_open.entrance(self._begins, self._turned_away, timeout_s=timeout_s)
        self._entrances[key] = entrance  # the last to be forgotten
        return entrance

    def _forget_one(self) -> None:
        for key, entrance in self._entrances.items():
            if not len(entrance):
                del self._entrances[key]
                entrance.close()
                return

    @staticmethod
    def _begins(arrival: Arrival) -> _Waiting:
        waiting: _Waiting = arrival.owner
        waiting.turn.set_result(arrival)
        return waiting

    @staticmethod
    def _turned_away(arrival: Arrival, reason: str) -> None:
        waiting: _Waiting = arrival.owner
        if not waiting.turn.done():
            waiting.turn.set_exception(TurnedAway(reason))
