"""Delivers the updates of one type on one stream to its subscriptions.

Receivers are called one after the other, so calls of one subscription never overlap. The stream sends its ACK or
NACK after the last receiver has returned. While resources of the response are still warming, the ACK waits. So a
server can send clusters before their listeners and rely on the order. The wait ends when the next response of the
type arrives, which is applied at once. It also ends after :data:`_HELD_S`, because many servers send no further
response before an ACK.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

from xds.aio.initial_fetch import InitialFetch
from xds.protocol.client_state import ClientState, Received, Refused
from xds.protocol.delta import DeltaClient
from xds.protocol.interest import Interest
from xds.protocol.resource import Receive, Settling, SubscriptionStats, Update, UpdateRejected

logger = logging.getLogger(__name__)


#: The number of receivers called in one loop iteration. One response can cause 10,000 calls and more.
_AT_ONCE = 20

#: The number of old resources freed per loop iteration. Freeing all 200,000 resources of a mesh at once would take
#: a tenth of a second.
_FREED = 5000

#: The longest delay of an ACK for warming resources. A guess: endpoints usually arrive within milliseconds. Envoy
#: has no limit, so one cluster without endpoints stops all updates from a server that waits for the ACK.
_HELD_S = 1.0


class GrpcSubscription:
    """A :class:`xds.protocol.resource.Subscription` to resources of a stream."""

    __slots__ = ("_feed", "initial_fetch", "on_close", "receive", "stats")

    def __init__(
        self,
        feed: "Feed",
        receive: Receive,
        initial_fetch_timeout_s: float,
        on_initial_timeout: Callable[[], None] | None,
    ) -> None:
        self.stats = SubscriptionStats(update_attempt=1)
        self.receive = receive
        self.initial_fetch = InitialFetch(self.stats, on_initial_timeout, initial_fetch_timeout_s)
        self.on_close: Callable[[], object] | None = None
        self._feed = feed

    def set_names(self, names: Iterable[str]) -> None:
        """Replace the names that this subscription requests."""
        self.stats.update_attempt += 1
        self._feed.set(self, names)

    def ask(self, names: Iterable[str]) -> None:
        """Request resources of an on-demand type by name. Each name occurs in a later response, perhaps in its
        ``removed`` list.
        """
        self._feed.ask(names)

    def close(self) -> None:
        self.initial_fetch.over()
        self._feed.remove(self)
        if self.on_close is not None:
            self.on_close()


class Feed:
    """One resource type on one stream: its subscriptions, its waiting updates, and the task that delivers them."""

    def __init__(
        self,
        type_url: str,
        state: ClientState[Any, Any],
        wake_stream: Callable[[], None],
        *,
        keeps_bodies: bool = True,
    ) -> None:
        self._keeps_bodies = keeps_bodies
        self._state = state
        self._wake_stream = wake_stream
        self._interest: Interest[GrpcSubscription] = Interest(type_url)
        self._received: Received | None = None
        self._expired: list[Update] = []
        self._late: dict[GrpcSubscription, None] = {}
        self._again: set[str] = set()
        self._held: _HeldAck | None = None
        self._wake = asyncio.Event()

    def set(self, subscription: GrpcSubscription, names: Iterable[str] | None) -> None:
        """Add a subscription, or change the names that it requests."""
        wanted = None if names is None else frozenset(names)
        self._again |= wanted or set()
        self._interest.set(subscription, wanted)
        self._late[subscription] = None
        self._wake.set()
        self._wake_stream()

    def ask(self, names: Iterable[str]) -> None:
        assert isinstance(self._state, DeltaClient), "only the incremental protocol knows demand"
        self._state.ask(self._interest.type_url, names)
        self._wake_stream()

    def remove(self, subscription: GrpcSubscription) -> None:
        self._interest.remove(subscription)
        self._late.pop(subscription, None)
        self._wake_stream()

    def subscriptions(self) -> tuple[GrpcSubscription, ...]:
        return self._interest.subscribers()

    def tell(self) -> None:
        """Pass the requested names to the protocol's state machine. The stream calls this before fetching the next
        request.
        """
        change = self._interest.tell()
        type_url = self._interest.type_url
        if change.everything or (self._again and self._interest.wants_all):
            self._state.want(type_url, self._interest.union(), again=self._again)
        elif change or self._again:
            self._state.change(type_url, change.added, change.dropped, self._again)
        self._again.clear()

    def arrived(self, received: Received) -> None:
        """Queue a response for delivery. It is merged with responses that already wait."""
        self._received = received if self._received is None else self._received.then(received)
        self._wake.set()

    def expired(self, update: Update) -> None:
        """Queue the removal of resources whose time to live has passed. This has no response to acknowledge."""
        self._expired.append(update)
        self._wake.set()

    def refused(self, refused: Refused) -> None:
        """Log and count a response that broke a rule of the protocol."""
        logger.warning(
            "configuration refused type=%s version=%s error=%s", refused.type_url, refused.version, refused.reason
        )
        for subscription in self.subscriptions():
            subscription.stats.update_rejected += 1
            subscription.stats.update_attempt += 1
            subscription.initial_fetch.failed()

    async def deliver_forever(self) -> None:
        """Deliver updates by calling receivers, one at a time, until cancelled."""
        while True:
            await self._wake.wait()
            self._wake.clear()
            while self._late or self._received or self._expired:
                await self._deliver_one()

    async def _deliver_one(self) -> None:
        if self._late:
            subscription = next(iter(self._late))
            del self._late[subscription]
            known = self._interest.known(subscription)
            if known is not None:
                await self._hand_over(subscription, known, [])
        elif self._expired:
            await self._hand_out(self._expired.pop(0), [])
        elif self._received is not None:
            if self._held is not None:
                self._held.send()
            received, self._received = self._received, None
            settling: list[Settling] = []
            failures = await self._hand_out(received.update, settling)
            if failures:
                self._state.reject(received, "\n".join(dict.fromkeys(map(str, failures))), _rejected(failures))
                self._wake_stream()
            else:
                self._held = _HeldAck(partial(self._accept, received), settling)
            left = list(received.update.resources)
            del received
            while len(left) > _FREED:
                del left[-_FREED:]
                await asyncio.sleep(0)

    def _accept(self, received: Received) -> None:
        self._state.accept(received)
        self._wake_stream()

    async def _hand_out(self, update: Update, settling: list[Settling]) -> list[UpdateRejected]:
        """Deliver an update to its receivers, and return their refusals. Resources that are still warming are
        added to ``settling``.
        """
        failures = []
        for number, (subscription, part) in enumerate(self._interest.split(update), start=1):
            if number % _AT_ONCE == 0:
                await asyncio.sleep(0)
            if subscription not in self._interest:
                continue  # the subscription was closed meanwhile
            failure = await self._hand_over(subscription, part, settling)
            if failure is not None:
                failures.append(failure)
        return failures

    async def _hand_over(
        self, subscription: GrpcSubscription, update: Update, settling: list[Settling]
    ) -> UpdateRejected | None:
        """Call one receiver and return its error if it refuses the update. Add to ``settling`` if resources are
        still warming.
        """
        stats = subscription.stats
        stats.update_attempt += 1
        try:
            warming = await subscription.receive(update)
        except UpdateRejected as rejected:
            stats.update_rejected += 1
            logger.warning(
                "configuration refused type=%s version=%s error=%s", update.type_url, update.version, rejected
            )
            return rejected
        except Exception as error:  # a bug of ours must not remove the last good configuration
            stats.update_rejected += 1
            subscription.initial_fetch.failed()
            logger.exception("configuration not applied type=%s version=%s", update.type_url, update.version)
            return UpdateRejected(f"internal error: {type(error).__name__}: {error}")
        subscription.initial_fetch.over()  # a refused update does not end the wait, which continues to its limit
        stats.accepted(update.version, time.time())
        if warming is not None:
            settling.append(warming)
        if self._keeps_bodies:
            self._interest.accepted(update)
        return None


class _HeldAck:
    """An ACK that waits for warming resources. It is sent once: when no resource is warming, after a time limit,
    or by :meth:`send`.
    """

    def __init__(self, accept: Callable[[], None], settling: list[Settling]) -> None:
        self._accept: Callable[[], None] | None = accept
        self._left = len(settling)
        self._timer: asyncio.TimerHandle | None = None
        if not settling:
            self.send()
        for warming in settling:
            warming.then(self._settled)
        if self._accept is not None:
            self._timer = asyncio.get_running_loop().call_later(_HELD_S, self.send)

    def send(self) -> None:
        """Send the ACK now; idempotent."""
        accept, self._accept = self._accept, None
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if accept is not None:
            accept()

    def _settled(self) -> None:
        self._left -= 1
        if self._left == 0:
            self.send()


def _rejected(failures: Iterable[UpdateRejected]) -> set[str] | None:
    """Return the names refused by any receiver, or None if a receiver refused the whole update."""
    names: set[str] = set()
    for failure in failures:
        if failure.rejected is None:
            return None
        names |= set(failure.rejected)
    return names
