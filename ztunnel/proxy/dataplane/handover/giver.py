"""The giving side of a hand-over: offers the open connections one by one, and releases each accepted one."""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Final, Protocol, TypeAlias

from hbone.aio.handover import Frozen, UnitState
from hbone.tls import Unmovable
from ztunnel.proxy.dataplane.handover.counts import HandoverCounts
from ztunnel.proxy.dataplane.handover.messages import (
    Declined,
    Finished,
    FromGiver,
    FromTaker,
    Go,
    Greeting,
    Keep,
    Offer,
    Taken,
    Unreadable,
    encode,
    from_taker,
)
from ztunnel.proxy.dataplane.rendezvous import Rendezvous, RendezvousError
from ztunnel.runtime.clock import Clock

log = logging.getLogger(__name__)

#: The time limit for the taker's answer to an offer, in seconds. The unit is paused meanwhile. A taker needs about
#: a millisecond.
ANSWER_S: Final = 2.0
#: The pause before units that could not move yet (opening requests, incomplete TLS records) are offered again, in
#: seconds.
_AGAIN_S: Final = 0.02
#: The number of unanswered offers after which the taker is considered stuck.
_MOST_UNANSWERED: Final = 3


class TakerGone(Exception):
    """The other process has ended, or does not answer."""


class Unit(Protocol):
    """Connections that can only move together: a tunnel connection with its relays, or a relay of two plain
    sockets.
    """

    @property
    def entries(self) -> int:
        """The number of pod connections in this unit."""

    @property
    def key(self) -> int:
        """A key that identifies the unit in every survey while it exists."""

    def freeze(self) -> Frozen:
        """Stop it and read its state.

        Raises:
            Unmovable: the unit cannot move, or not now.
            OSError: the unit's socket is being closed.
        """

    def offer(self, number: int, state: UnitState, now_s: float) -> Offer:
        """Return the offer of a frozen unit; ``now_s`` is monotonic."""

    def went(self) -> None:
        """Complete this process's share of the accounting. The other process writes the access log lines."""


#: Returns the current units, and the number of connections without a unit, by reason.
Survey: TypeAlias = Callable[[], tuple[Iterable[Unit], Counter[str]]]


@dataclass(slots=True)
class Result:
    """The result of a hand-over: which pod and tunnel connections moved, and why the rest stayed."""

    given: int = 0
    carriers: int = 0
    pauses_s: list[float] = field(default_factory=list)
    stays: Counter[str] = field(default_factory=Counter)

    @property
    def left(self) -> int:
        """The number of connections that stayed."""
        return self.stays.total()

    def pause_ms(self, part: float) -> float:
        """Return a quantile of the moved units' pauses, in milliseconds. 1 is the longest."""
        ordered = sorted(self.pauses_s)
        return ordered[min(len(ordered) - 1, int(len(ordered) * part))] * 1000 if ordered else 0.0

    def __str__(self) -> str:
        reasons = ", ".join(f"{count} {reason}" for reason, count in sorted(self.stays.items()))
        return f"given={self.given} tunnel_connections={self.carriers} stayed={self.left}" + (
            f" ({reasons})" if reasons else ""
        )


class Giver:
    """Offers connections to one taker.

    Args:
        channel: the channel to the taker, whose greeting was read.
        taker: its greeting.
        survey: returns the units that can move.
        clock: measures ages and pauses.
        statistics: receives the counts.
    """

    def __init__(
        self,
        channel: Rendezvous,
        taker: Greeting,
        survey: Survey,
        clock: Clock,
        statistics: HandoverCounts,
    ) -> None:
        self.taker = taker
        self._channel = channel
        self._survey = survey
        self._clock = clock
        self._statistics = statistics
        self._numbers = itertools.count(1)
        self._answers: dict[int, asyncio.Future[str]] = {}
        self._unanswered = 0
        self.gone = False

    def answered(self, message: FromTaker) -> None:
        """Process an answer from the taker. An answer to a withdrawn offer is ignored."""
        if isinstance(message, Taken | Declined):
            future = self._answers.pop(message.number, None)
            if future is not None and not future.done():
                future.set_result(message.reason if isinstance(message, Declined) else "")

    def close(self) -> None:
        """Fail all pending offers, because the taker is gone. Idempotent."""
        self.gone = True
        for future in self._answers.values():
            if not future.done():
                future.set_exception(TakerGone())
                future.exception()

    async def give(self, again_s: float) -> Result:
        """Offer every movable unit once, then offer the rest repeatedly for ``again_s``.

        The time is counted from the end of the first pass, which takes longer with many connections.

        Returns:
            Which connections moved, and which stay after the last pass.
        """
        loop, result = asyncio.get_running_loop(), Result()
        declined: set[int] = set()
        until_s: float | None = None
        while True:
            result.stays.clear()
            units, others = self._survey()
            result.stays += others
            for unit in units:
                if unit.key in declined:
                    result.stays["declined"] += max(1, unit.entries)
                    continue
                if self.gone:
                    result.stays["no taker"] += max(1, unit.entries)
                    continue
                try:
                    reason = await self._offer(unit, result)
                except TakerGone:
                    self.gone = True
                    # The taker can hold descriptors of units that stay here. It closes them when it reads EOF.
                    self._channel.end()
                    reason = "no taker"
                if reason:
                    result.stays[reason] += max(1, unit.entries)
                    if reason.startswith("declined"):
                        declined.add(unit.key)
                await asyncio.sleep(0)
            if until_s is None:
                until_s = loop.time() + again_s
            if self.gone or not result.left or loop.time() >= until_s:
                return result
            await asyncio.sleep(_AGAIN_S)

    async def finish(self, result: Result) -> None:
        """Tell the taker that no more offers follow for now."""
        if not self.gone:
            await self._send(Finished(given=result.given, left=result.left))

    async def _offer(self, unit: Unit, result: Result) -> str:
        """Offer one unit to the taker. Return why the unit stays, or an empty text if it was handed over.

        Raises:
            TakerGone: the taker is gone. This unit and all others stay.
        """
        began_s = self._clock.monotonic()
        try:
            frozen = unit.freeze()
        except (Unmovable, OSError) as error:
            return str(error) if isinstance(error, Unmovable) else "about to end"
        given = False
        number = next(self._numbers)
        try:
            reason = await self._answer_to(unit.offer(number, frozen.state, began_s), frozen)
            if not reason and frozen.unchanged:
                given = True
                unit.went()
                frozen.leave()
            elif not reason:
                reason = "ended meanwhile"
        finally:
            if not given:
                frozen.thaw()
        await self._send(Go(number) if given else Keep(number))
        pause_s = self._clock.monotonic() - began_s
        self._statistics.offered("given" if given else "kept", reason, max(1, unit.entries), pause_s)
        if given:
            result.given += unit.entries
            result.carriers += frozen.state.carrier is not None
            result.pauses_s.append(pause_s)
        return reason

    async def _answer_to(self, offer: Offer, frozen: Frozen) -> str:
        """Return why the taker declines a unit, or an empty text if it accepts.

        Raises:
            TakerGone: the taker has ended, or reads no more.
        """
        future: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._answers[offer.number] = future
        sent = False
        try:
            async with asyncio.timeout(ANSWER_S):
                await self._send(offer, frozen.descriptors)
                sent = True
                reason = await future
        except TimeoutError:
            if not sent:
                raise TakerGone from None  # the taker has received only a part of a message
            self._unanswered += 1
            if self._unanswered >= _MOST_UNANSWERED:
                raise TakerGone from None
            return "no answer in time"
        finally:
            self._answers.pop(offer.number, None)
        self._unanswered = 0
        return f"declined: {reason}" if reason else ""

    async def _send(self, message: FromGiver, descriptors: Iterable[int] = ()) -> None:
        try:
            await self._channel.send(encode(message), list(descriptors))
        except OSError:
            self.gone = True
            raise TakerGone from None


async def read_message(channel: Rendezvous) -> FromTaker | None:
    """Return the next message from the taker, or ``None`` if it has disconnected.

    Raises:
        RendezvousError: the bytes are not a message from a taker.
    """
    parcel = await channel.receive()
    if parcel is None:
        return None
    parcel.close()  # a taker has no descriptors to send
    try:
        return from_taker(parcel.data)
    except Unreadable as error:
        raise RendezvousError(f"not a message of a taker: {error}") from error
