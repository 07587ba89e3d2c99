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

#: The time limit for an answer. The unit is paused meanwhile. A taker needs about a millisecond.
ANSWER_S: Final = 2.0
#: The pause between two walks over units that could not move yet: opening requests, incomplete TLS records.
_AGAIN_S: Final = 0.02
#: Unanswered offers after which the taker counts as stuck.
_MOST_UNANSWERED: Final = 3


class TakerGone(Exception):
    """The other process has ended, or does not answer."""


class Unit(Protocol):
    """The connections that move together: a tunnel connection with its relays, or a relay of two plain sockets."""

    @property
    def entries(self) -> int:
        """How many connections of pods it has."""

    @property
    def key(self) -> int:
        """The same in each survey while it lives."""

    def freeze(self) -> Frozen:
        """Stop it and read its state.

        Raises:
            Unmovable: it cannot move, or not now.
            OSError: its socket is about to end.
        """

    def offer(self, number: int, state: UnitState, now_s: float) -> Offer:
        """Return the offer of a frozen unit; ``now_s`` is monotonic."""

    def went(self) -> None:
        """Complete the accounting of this process's share. The other process writes the lines."""


#: Returns the current units, and the number of connections without a unit, by reason.
Survey: TypeAlias = Callable[[], tuple[Iterable[Unit], Counter[str]]]


@dataclass(slots=True)
class Result:
    """The result of an offer: moved pod connections and tunnel connections, and why the rest stayed."""

    given: int = 0
    carriers: int = 0
    pauses_s: list[float] = field(default_factory=list)
    stays: Counter[str] = field(default_factory=Counter)

    @property
    def left(self) -> int:
        """How many stayed."""
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
        """Process the taker's answer. An answer to a withdrawn offer is ignored."""
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

        The time begins after the first walk, which takes longer with many connections.

        Returns:
            The moved connections, and the ones that stay after the last walk.
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
                    # The taker can hold descriptors of units that stay here. It closes them when it reads the end.
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
        """Say that no offer follows for now."""
        if not self.gone:
            await self._send(Finished(given=result.given, left=result.left))

    async def _offer(self, unit: Unit, result: Result) -> str:
        """Offer one unit. Return why it stays, or an empty text if it was given.

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
                raise TakerGone from None  # it has a part of a message
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
    """Return the next message of a taker, or ``None`` at its end.

    Raises:
        RendezvousError: it is none.
    """
    parcel = await channel.receive()
    if parcel is None:
        return None
    parcel.close()  # a taker has no descriptors to send
    try:
        return from_taker(parcel.data)
    except Unreadable as error:
        raise RendezvousError(f"not a message of a taker: {error}") from error
