"""The old process's side (the giver) of a hand-over: offers open connections to the new process (the taker) unit
by unit.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Final, Protocol, TypeAlias

from hbone.aio.handover import Frozen, UnitState
from hbone.aio.poller import Poller
from hbone.tls import Unmovable
from ztunnel.proxy.dataplane.handover.counts import HandoverCounts
from ztunnel.proxy.dataplane.handover.messages import (
    SLICE_S,
    Declined,
    Finished,
    FromGiver,
    FromTaker,
    Go,
    Greeting,
    Keep,
    Offer,
    Ready,
    SliceBegins,
    SliceEnds,
    Taken,
    Unreadable,
    encode,
    from_taker,
)
from ztunnel.proxy.dataplane.handover.slice_size import SliceSize
from ztunnel.proxy.dataplane.rendezvous import MAX_BYTES, MAX_DESCRIPTORS, Rendezvous, RendezvousError
from ztunnel.runtime.clock import Clock

log = logging.getLogger(__name__)

#: The time limit for the taker's answer to an offer, in seconds. Meanwhile the offered unit is paused. A taker
#: usually answers within a millisecond.
ANSWER_S: Final = 2.0
#: The pause before units that could not move yet (opening requests, incomplete TLS records) are offered again, in
#: seconds.
_AGAIN_S: Final = 0.02
#: If this number of consecutive slices have an unanswered offer, the taker is considered stuck.
_MOST_UNANSWERED: Final = 3
_NO_ANSWER: Final = "no answer in time"
_NO_TAKER: Final = "no taker"
_FAILED: Final = "failed"
_TOO_LARGE: Final = "too large"


class TakerGone(Exception):
    """The process that takes over connections has ended, or does not answer."""


class _TooLarge(Exception):
    """A unit's state or sockets do not fit into a message."""


class Unit(Protocol):
    """Connections that can only move together: a tunnel connection with its relays, or a relay of two plain
    sockets.
    """

    @property
    def entries(self) -> int:
        """The number of pod connections in this unit."""

    @property
    def key(self) -> int:
        """An identifier of this unit, equal in every list that :data:`MovableUnits` returns."""

    def freeze(self) -> Frozen:
        """Stop the unit and read its state.

        Raises:
            Unmovable: the unit cannot move, or cannot move yet.
            OSError: the unit's socket is being closed.
        """

    def offer(self, number: int, state: UnitState, now_s: float) -> Offer:
        """Return the message that offers this unit, which must be frozen. ``now_s`` is monotonic."""

    def went(self) -> None:
        """Count the unit's traffic in this process. The other process continues, and writes the
        access log lines.
        """


#: Returns the units that can move now, and the number of unmovable connections, by reason.
MovableUnits: TypeAlias = Callable[[], tuple[Iterable[Unit], Counter[str]]]


@dataclass(slots=True)
class _Offering:
    """A unit that is being offered, and the outcome of the offer.

    Attributes:
        reason: why the unit stays in this process. Empty if it was handed over.
        frozen_s: the monotonic time when the unit was stopped. ``None`` before that.
        given: whether the unit has left this process.
        carrier: whether the unit has a tunnel connection.
        pause_s: the time from ``frozen_s`` until the end of the slice.
    """

    unit: Unit
    reason: str = _NO_TAKER
    frozen_s: float | None = None
    given: bool = False
    carrier: bool = False
    pause_s: float = 0.0

    @property
    def connections(self) -> int:
        """The number of the unit's pod connections, or 1 for a tunnel connection without tunnels."""
        return max(1, self.unit.entries)


@dataclass(slots=True)
class Result:
    """The result of a hand-over: which pod and tunnel connections moved, and why other connections stayed."""

    given: int = 0
    carriers: int = 0
    pauses_s: list[float] = field(default_factory=list)
    stays: Counter[str] = field(default_factory=Counter)

    def add(self, offering: _Offering) -> None:
        """Add the outcome of one offer."""
        if offering.reason:
            self.stays[offering.reason] += offering.connections
        else:
            self.given += offering.unit.entries
            self.carriers += offering.carrier
            self.pauses_s.append(offering.pause_s)

    @property
    def left(self) -> int:
        """The number of connections that stayed in this process."""
        return self.stays.total()

    def pause_ms(self, part: float) -> float:
        """Return a quantile of the moved units' pauses, in milliseconds. ``part`` is from 0 to 1; 1 returns the
        longest pause.
        """
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
        channel: the channel to the taker, whose greeting was already read.
        taker: the greeting received from the taker.
        movable_units: returns the units that can move.
        poller: serves this process's connections. It is paused during a slice.
        clock: measures ages and pauses.
        statistics: receives the counts.
    """

    def __init__(
        self,
        channel: Rendezvous,
        taker: Greeting,
        movable_units: MovableUnits,
        poller: Poller,
        clock: Clock,
        statistics: HandoverCounts,
    ) -> None:
        self.taker = taker
        self._channel = channel
        self._movable_units = movable_units
        self._poller = poller
        self._clock = clock
        self._statistics = statistics
        self._numbers = itertools.count(1)
        self._answers: dict[int, asyncio.Future[str]] = {}
        self._ready: asyncio.Future[None] | None = None
        self._size = SliceSize()
        # The keys of units that an earlier call of give() could not hand over. These units are offered outside of
        # slices, because a slice pauses all other connections.
        self._stayed: set[int] = set()
        self._failed: set[int] = set()
        self._ended_s = clock.monotonic()
        self._unanswered = 0
        self.gone = False

    def answered(self, message: FromTaker) -> None:
        """Process an answer from the taker. An answer to a withdrawn offer is ignored."""
        if isinstance(message, Taken | Declined):
            future = self._answers.pop(message.number, None)
            if future is not None and not future.done():
                future.set_result(message.reason if isinstance(message, Declined) else "")
        elif isinstance(message, Ready) and self._ready is not None and not self._ready.done():
            self._ready.set_result(None)

    def close(self) -> None:
        """Fail all pending offers, because the taker has disconnected. Idempotent."""
        self.gone = True
        for future in (*self._answers.values(), self._ready):
            if future is not None and not future.done():
                future.set_exception(TakerGone())
                future.exception()

    async def give(self, again_s: float) -> Result:
        """Offer every movable unit once. Then, for ``again_s`` seconds, repeatedly offer the units that could not
        move yet.

        This time begins after the first pass, which takes longer with many connections.

        Returns:
            Which connections moved, and which stay after the last pass.
        """
        loop, result = asyncio.get_running_loop(), Result()
        declined: dict[int, str] = {}  # why not to offer a unit again, by its key
        until_s: float | None = None
        while True:
            units, others = self._movable_units()
            result.stays = Counter(others)
            waiting: deque[_Offering] = deque()
            again: deque[_Offering] = deque()
            left = set(declined)
            for each in map(_Offering, units):
                if each.unit.key in declined:
                    result.stays[declined[each.unit.key]] += each.connections
                else:
                    (again if each.unit.key in self._stayed else waiting).append(each)
            while waiting or again:
                if waiting:
                    offers = self._next_slice(waiting)
                    await self._give_slice(offers)
                else:
                    offers = [again.popleft()]
                    await self._offer_all(offers)
                for each in offers:
                    result.add(each)
                    if each.reason:
                        left.add(each.unit.key)
                    reason = each.reason.partition(":")[0]
                    if reason in ("declined", _FAILED, _TOO_LARGE):
                        declined[each.unit.key] = reason
                await asyncio.sleep(0)
            if until_s is None:
                until_s = loop.time() + again_s
            if self.gone or not result.left or loop.time() >= until_s:
                self._stayed.update(left)
                return result
            await asyncio.sleep(_AGAIN_S)

    async def finish(self, result: Result) -> None:
        """Send :class:`Finished` to the taker, because no more offers follow for now.

        Raises:
            TakerGone: the taker has ended.
        """
        if not self.gone:
            await self._send(Finished(given=result.given, left=result.left))

    def _next_slice(self, waiting: deque[_Offering]) -> list[_Offering]:
        """Remove the offers of the next slice from the queue, at least one, and return them."""
        offers = [waiting.popleft()]
        count = offers[0].connections
        while waiting and (count := count + waiting[0].connections) <= self._size.connections:
            offers.append(waiting.popleft())
        return offers

    async def _give_slice(self, offers: list[_Offering]) -> None:
        """Offer the units of one slice, during which neither process serves other connections."""
        began_s = self._clock.monotonic()
        try:
            await self._begin_slice()
            self._poller.pause(SLICE_S)
            began_s = self._clock.monotonic()
            await self._offer_all(offers)
            if self.taker.slices and not self.gone:
                await self._send(SliceEnds())
        except TakerGone:
            self._lose()
        finally:
            self._poller.resume()
        ended_s = self._clock.monotonic()
        self._size.ended(ended_s - began_s, began_s - self._ended_s)
        self._ended_s = ended_s

    async def _offer_all(self, offers: list[_Offering]) -> None:
        """Offer units concurrently, and count the results."""
        async with asyncio.TaskGroup() as group:
            for each in offers:
                group.create_task(self._offer(each), name="offer")
        ended_s = self._clock.monotonic()
        for each in offers:
            if each.frozen_s is not None:
                result = "given" if each.given else "kept"
                each.pause_s = ended_s - each.frozen_s
                self._statistics.offered(result, each.reason, each.connections, each.pause_s)
        unanswered = any(each.reason == _NO_ANSWER for each in offers)
        self._unanswered = self._unanswered + 1 if unanswered else 0
        if self._unanswered >= _MOST_UNANSWERED:
            self._lose()

    async def _begin_slice(self) -> None:
        """Begin a slice: wait until the taker has stopped serving its connections and reads only offers. Nothing
        is paused here before that.

        Raises:
            TakerGone: the taker has disconnected, or does not answer.
        """
        if self.gone:
            raise TakerGone
        if not self.taker.slices:
            return
        self._ready = asyncio.get_running_loop().create_future()
        await self._send(SliceBegins())
        try:
            async with asyncio.timeout(ANSWER_S * _MOST_UNANSWERED):
                await self._ready
        except TimeoutError:
            raise TakerGone from None

    def _lose(self) -> None:
        """Disconnect the taker. The taker then closes its copies of descriptors whose units stay in this
        process.
        """
        self.gone = True
        self._channel.end()

    async def _offer(self, offering: _Offering) -> None:
        """Freeze one unit, offer it to the taker, and store the outcome in ``offering``."""
        unit, began_s = offering.unit, self._clock.monotonic()
        if self.gone:
            return
        try:
            frozen = unit.freeze()
        except (Unmovable, OSError) as error:
            offering.reason = str(error) if isinstance(error, Unmovable) else "about to end"
            return
        except Exception:  # noqa: BLE001  a bug, which is logged: it must neither keep other units here nor end the drain
            self._fail(offering)
            return
        offering.frozen_s = began_s
        offering.carrier = frozen.state.carrier is not None
        number = next(self._numbers)
        try:
            offer = unit.offer(number, frozen.state, began_s)
        except Exception:  # noqa: BLE001  as above
            self._fail(offering)
            frozen.thaw()
            return
        try:
            offering.reason = await self._answer_to(offer, frozen)
            if not offering.reason and frozen.unchanged:
                offering.given = True
                unit.went()
                frozen.leave()
            elif not offering.reason:
                offering.reason = "ended meanwhile"
            await self._send(Go(number) if offering.given else Keep(number))
        except TakerGone:
            offering.reason = _NO_TAKER
            self._lose()
        finally:
            if not offering.given:
                frozen.thaw()

    def _fail(self, offering: _Offering) -> None:
        """Record that a bug keeps a unit here. Called while its error is handled."""
        offering.reason = _FAILED
        key = offering.unit.key
        if key not in self._failed:  # it can be offered several times per second
            self._failed.add(key)
            log.exception("a connection cannot be handed over")

    async def _answer_to(self, offer: Offer, frozen: Frozen) -> str:
        """Return why the taker does not take a unit, or an empty text if it accepts.

        Raises:
            TakerGone: the taker has ended, or no longer reads.
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
            return _NO_ANSWER
        except _TooLarge:
            return _TOO_LARGE
        finally:
            self._answers.pop(offer.number, None)
        return f"declined: {reason}" if reason else ""

    async def _send(self, message: FromGiver, descriptors: Sequence[int] = ()) -> None:
        data = encode(message)
        if len(data) > MAX_BYTES or len(descriptors) > MAX_DESCRIPTORS:
            raise _TooLarge  # the taker would end the whole hand-over
        try:
            await self._channel.send(data, descriptors)
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
