"""The new process's side (the taker) of a hand-over: rebuilds offered connections, and continues them once the old
process (the giver) has released them.
"""

from __future__ import annotations

import logging
import socket
from collections.abc import Awaitable, Callable
from typing import Protocol, TypeAlias

from ztunnel.proxy.dataplane.handover.counts import HandoverCounts
from ztunnel.proxy.dataplane.handover.messages import Offer
from ztunnel.proxy.dataplane.rendezvous import Parcel

log = logging.getLogger(__name__)


class Declining(Exception):
    """This process cannot continue an offered unit. The text states the reason."""


class Pending(Protocol):
    """An offered unit, rebuilt but not started. The caller calls either :meth:`start` or :meth:`discard`, once."""

    @property
    def entries(self) -> int:
        """The number of pod connections in this unit."""

    def start(self) -> None:
        """Start to carry the unit's connections, which belong to this process from now on."""

    def discard(self) -> None:
        """Discard the rebuilt connections, because the giver keeps the unit."""


#: A function that rebuilds the unit described by an offer, from the offer's non-blocking sockets. The unit becomes
#: their owner, unless this raises ``Declining``, ``ValueError``, ``OSError`` or ``KeyError``.
Make: TypeAlias = Callable[[Offer, list[socket.socket]], Awaitable[Pending]]


class Taker:
    """Answers the offers of one giver.

    Args:
        make: rebuilds the unit described by an offer.
        statistics: receives the counts.

    Attributes:
        taken: the number of pod connections that this process has taken over.
    """

    def __init__(self, make: Make, statistics: HandoverCounts) -> None:
        self._make = make
        self._statistics = statistics
        self._pending: dict[int, Pending] = {}
        self.taken = 0

    async def consider(self, offer: Offer, parcel: Parcel) -> str:
        """Rebuild the unit described by an offer. It is started only when the giver has released it.

        Returns:
            The reason why the unit cannot be rebuilt, or an empty string if it was rebuilt.
        """
        socks: list[socket.socket] = []
        try:
            socks = [socket.socket(fileno=each) for each in parcel.take_all()]
            for sock in socks:
                sock.setblocking(False)
            self._pending[offer.number] = await self._make(offer, socks)
        except (Declining, ValueError, OSError, KeyError) as error:
            for sock in socks:
                sock.close()
            reason = str(error) if isinstance(error, Declining) else f"unusable state: {error}"
            if not isinstance(error, Declining):
                log.warning("an offered connection cannot be continued error=%s", reason)
            self._statistics.count("declined", reason, offer.connections)
            return reason
        except Exception:  # a bug, which must not keep the predecessor's other units from moving
            for sock in socks:
                sock.close()
            log.exception("an offered connection cannot be continued")
            self._statistics.count("declined", "failed", offer.connections)
            return "failed"
        return ""

    def begin(self, number: int) -> None:
        """Start a rebuilt unit, because the giver has released it."""
        pending = self._pending.pop(number, None)
        if pending is not None:
            self.taken += pending.entries
            self._statistics.count("taken", "", max(1, pending.entries))
            pending.start()

    def forget(self, number: int) -> None:
        """Discard a rebuilt unit, because the giver keeps it."""
        pending = self._pending.pop(number, None)
        if pending is not None:
            pending.discard()

    def close(self) -> None:
        """Discard all rebuilt units that the giver has not released. Idempotent."""
        for number in list(self._pending):
            self.forget(number)
