"""The taking side of a hand-over: rebuilds offered units, and continues them once the giver has released them."""

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
    """An offered unit that has been rebuilt but not started. Either :meth:`start` or :meth:`discard` is called,
    once.
    """

    @property
    def entries(self) -> int:
        """The number of pod connections in this unit."""

    def start(self) -> None:
        """Continue the unit: it belongs to this process from now on."""

    def discard(self) -> None:
        """Discard the unit, because the other process keeps it."""


#: Builds the unit described by an offer from its non-blocking sockets. The unit owns them, unless this raises
#: ``Declining``, ``ValueError``, ``OSError`` or ``KeyError``.
Make: TypeAlias = Callable[[Offer, list[socket.socket]], Awaitable[Pending]]


class Taker:
    """Answers the offers of one giver.

    Args:
        make: builds the unit described by an offer.
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
        """Build the unit described by an offer. The unit then waits until the giver releases it.

        Returns:
            The reason why the unit cannot be built, or an empty string if it was built.
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
        return ""

    def begin(self, number: int) -> None:
        """Continue a unit, because the giver has released it."""
        pending = self._pending.pop(number, None)
        if pending is not None:
            self.taken += pending.entries
            self._statistics.count("taken", "", max(1, pending.entries))
            pending.start()

    def forget(self, number: int) -> None:
        """Discard a unit, because the giver keeps it."""
        pending = self._pending.pop(number, None)
        if pending is not None:
            pending.discard()

    def close(self) -> None:
        """Discard the units that the giver has not released. Idempotent."""
        for number in list(self._pending):
            self.forget(number)
