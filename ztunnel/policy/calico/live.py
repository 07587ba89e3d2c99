"""Calico's active policies in one process of the tunnel proxy: their source, and the reviews of open connections
after a change.

A change of the store starts a review: every live connection is evaluated again, and ended if it is no longer
allowed. Changes shortly after a review share one further review.
"""

import asyncio
from collections.abc import Callable
from typing import Any, Final, Protocol

from xds.model import calico as c
from ztunnel.policy.calico.evaluator import Evaluator
from ztunnel.policy.calico.guard import Decision, Guard
from ztunnel.policy.calico.report import state_of
from ztunnel.policy.ledger import TierPolicy, Uses
from ztunnel.runtime.clock import Clock

#: Seconds that a new connection waits for the policies of an unknown pod, which can start before its endpoint is
#: announced. An Istio mesh's policies have the same limit.
GRACE_S: Final = 5.0
#: The shortest time between two reviews. With 10,000 connections one review takes about 0.1 s of the loop's time
#: (a guess).
_REVIEW_S: Final = 0.1

#: Evaluates all live connections again: :meth:`ztunnel.proxy.dataplane.live_table.Lives.review`, which shares the
#: loop.
Review = Callable[[], object]


class PolicySource(Protocol):
    """The source of policies: :class:`~ztunnel.policy.calico.follower.Follower`,
    :class:`~ztunnel.policy.calico.files.Files`.

    Attributes:
        in_sync: the policies in use are known to be current.
        error: why the source is out of sync. Empty if it is in sync, or if that is not known yet.
    """

    in_sync: bool
    error: str

    @property
    def name(self) -> str:
        """A description of the policies' source, for people."""

    @property
    def evaluator(self) -> Evaluator:
        """The evaluator that uses the last complete store."""

    @property
    def age_s(self) -> float:
        """Seconds since the active policies were last known to be current; 0 while they are."""

    async def run(self) -> None:
        """Keep the evaluator current until cancelled."""


class LivePolicies:
    """The active policies; the process keeps :meth:`run` running.

    Args:
        source: makes the source. Its argument is a callback for each change of the evaluator or its store.
        clock: for counters.
        uses: where decisions are counted.
        allow_unknown: see :mod:`ztunnel.policy.calico.guard`.
        http_waypoints: see :class:`~ztunnel.policy.calico.settings.PolicySettings`.
        waited: called with the seconds that a connection has waited for the policies of its pod.
    """

    def __init__(
        self,
        source: Callable[[Callable[[], None]], PolicySource],
        clock: Clock,
        *,
        uses: Uses[TierPolicy] | None = None,
        allow_unknown: bool = False,
        http_waypoints: frozenset[str] = frozenset(),
        waited: Callable[[float], object] = lambda _: None,
    ) -> None:
        self.http_waypoints = http_waypoints
        self._changed = asyncio.Event()
        self.source = source(self._changed.set)
        self.guard = Guard(lambda: self.source.evaluator, clock.wall, uses=uses, allow_unknown=allow_unknown)
        self._reviews: dict[Review, None] = {}
        self._waiting: set[asyncio.Event] = set()
        self._clock = clock
        self._waited = waited
        #: The number of reviews begun so far. Tests and callers of :meth:`admit` compare it.
        self.changes = 0

    @property
    def state(self) -> dict[str, Any]:
        """The state of the source, for :func:`ztunnel.policy.calico.report.in_force`."""
        source = self.source
        return state_of(source.name, source.error, source.age_s, in_sync=source.in_sync)

    def watch(self, review: Review) -> None:
        """Review live connections after each change, until :meth:`unwatch`; idempotent."""
        self._reviews[review] = None

    def unwatch(self, review: Review) -> None:
        """Stop the reviews begun by :meth:`watch`; idempotent."""
        self._reviews.pop(review, None)

    @property
    def are_complete(self) -> bool:
        """Whether all policies that existed at the start have arrived by now."""
        return self.source.evaluator.store.in_sync

    async def complete(self) -> None:
        """Return once all policies that existed at the start have arrived. Until then, no connection is
        admitted.
        """
        arrived = asyncio.Event()
        self._waiting.add(arrived)
        try:
            while not self.are_complete:
                await arrived.wait()
                arrived.clear()
        finally:
            self._waiting.discard(arrived)

    async def admit(self, direction: c.Direction, flow: c.Flow) -> Decision:
        """Decide about a new connection. It waits at most :data:`GRACE_S` for a pod that is not known yet.

        So that no change during the wait is missed, the caller first registers the connection for reviews, or
        evaluates it again afterwards.
        """
        guard = self.guard
        if guard.knows((flow.destination_ip if direction is c.Direction.INGRESS else flow.source_ip) or ""):
            return guard.check(direction, flow)
        if not guard.check(direction, flow, counted=False).pending:
            return guard.check(direction, flow)
        arrived, began_s = asyncio.Event(), self._clock.monotonic()
        self._waiting.add(arrived)
        try:
            async with asyncio.timeout(GRACE_S):
                while guard.check(direction, flow, counted=False).pending:
                    await arrived.wait()
                    arrived.clear()
        except TimeoutError:
            pass
        finally:
            self._waiting.discard(arrived)
            self._waited(self._clock.monotonic() - began_s)
        return guard.check(direction, flow)

    async def run(self) -> None:
        """Follow the source and review connections until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self.source.run(), name="policy source")
            tasks.create_task(self._review_all(), name="policy reviews")

    async def _review_all(self) -> None:
        while True:
            await self._changed.wait()
            self._changed.clear()
            self.changes += 1
            for arrived in self._waiting:
                arrived.set()
            for review in list(self._reviews):
                review()
            await asyncio.sleep(_REVIEW_S)
