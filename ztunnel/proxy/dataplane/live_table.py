"""The table of all connections of this process that are open or being opened. Each entry, called a life, owns the
resources that it opened.

:class:`LiveTable` consists of groups (:class:`Lives`), for example one pod's connections by direction. Changes
reach connections only through :meth:`LiveTable.review` and :meth:`Lives.review`. For each life, a review looks up
the action in :data:`~ztunnel.proxy.dataplane.life_table.TABLE` and carries it out. A front end supplies only
:meth:`Life.judge` and the functions that end a life.

A life is registered when it is constructed, before policies are checked, so that no policy change misses it. The
way to end a life changes over time (first by cancelling the dialling fiber, later by aborting the relay), so the
entry stores the current function. If a life is ended while no function is set, the entry stores the reason, and
the next function is called at once with this reason.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any, Final, Generic, TypeVar

from hbone.aio.fiber import current
from hbone.aio.poller import Poller
from hbone.native import mypyc_attr
from ztunnel.proxy.dataplane.life_table import ALLOWED, TABLE, Action, Event, State, Verdict

log = logging.getLogger(__name__)

#: A function that ends a connection now. Its argument is the reason for the log line.
Abort = Callable[[str], object]

LifeT = TypeVar("LifeT", bound="Life")

#: The number of connections that a review checks per event loop iteration. This delays other connections by about
#: a millisecond (``bench/review.py``).
SLICE: Final = 128
#: The reason for ending a connection whose policy check raised an unexpected error (fail closed).
UNJUDGED: Final = "connection closed: the evaluation of its policies failed"
#: Copied to module constants, which compiled code reads without an attribute look-up.
_ACCEPTED: Final = State.ACCEPTED
_CLOSED: Final = State.CLOSED
_DRAINING: Final = State.DRAINING
_JOINED: Final = State.JOINED
_OPEN: Final = State.OPEN


@mypyc_attr(allow_interpreted_subclasses=True)
class Life:
    """One connection's entry in a :class:`LiveTable`, registered from construction until :meth:`close`.

    Args:
        group: the group to register in.
        abort: ends the connection, until :meth:`opened` sets another function.

    Attributes:
        state: the state that the connection has reached. Front ends advance it.
        reason: why this proxy ended the connection. Empty otherwise.
        leaving: whether GOAWAY was requested. It is sent at once, or after the handshake if this is not complete.
    """

    __slots__ = ("_abort", "_finish", "_group", "_leave", "_owned", "leaving", "reason", "state")

    def __init__(self, group: Lives[Any], abort: Abort | None = None) -> None:
        self.state = _ACCEPTED
        self.reason = ""
        self.leaving = False
        self._abort = abort
        self._finish: Abort | None = None
        self._leave: Callable[[], object] | None = None
        self._owned: list[Callable[[], object]] | None = None
        self._group: Lives[Any] | None = group
        group._entries[self] = None

    # Supplied by front ends

    def judge(self) -> Verdict:
        """Check this connection against the current policies. Called only when all facts for this check are known.

        Front ends override this, and count and log a refusal. The caller then ends the connection.
        """
        return ALLOWED

    # The end

    def own(self, release: Callable[[], object]) -> None:
        """Call ``release`` when this entry closes. Registered functions are called in reverse order."""
        if self._owned is None:
            self._owned = []
        self._owned.append(release)

    def aborts_by(self, abort: Abort | None) -> None:
        """From now on, end the connection by ``abort``. If :meth:`end` was called earlier, call
        ``abort`` at once.
        """
        self._abort = abort
        if self.reason and abort is not None:
            abort(self.reason)

    def opened(
        self,
        abort: Abort,
        *,
        state: State = _OPEN,
        leave: Callable[[], object] | None = None,
        finish: Abort | None = None,
    ) -> None:
        """Enter :attr:`State.OPEN` or :attr:`State.JOINED`.

        An earlier call of :meth:`leave` or :meth:`end` takes effect now.

        Args:
            abort: ends the connection at once.
            state: the state to enter.
            leave: asks the peer to end the connection. ``None`` if the protocol cannot do this.
            finish: ends the connection gracefully. ``None`` uses ``abort``.
        """
        self.state = _DRAINING if self.leaving else state
        self._finish, self._leave = finish, leave
        if self.leaving and leave is not None:
            leave()
        self._abort = abort
        if self.reason:
            abort(self.reason)

    def leave(self) -> None:
        """Ask the peer to end the connection (GOAWAY), now or once it is open; idempotent."""
        if self.leaving:
            return
        self.leaving = True
        if self.state is _OPEN or self.state is _JOINED:
            self.state = _DRAINING
        if self._leave is not None:
            self._leave()

    def end(self, reason: str) -> None:
        """End the connection at once. The first call's reason is recorded, and later calls have no effect."""
        if self.reason or self.state is _CLOSED:
            return
        self.reason = reason
        if self._abort is not None:
            self._abort(reason)

    def finish(self, reason: str) -> None:
        """End the connection gracefully if the protocol can do this, otherwise like :meth:`end`."""
        if self._finish is not None:
            self._abort = self._finish
        self.end(reason)

    def close(self) -> None:
        """Release all owned resources, and remove this entry from the table. Idempotent."""
        if self.state is _CLOSED:
            return
        self.state = _CLOSED
        self._abort = self._finish = self._leave = None
        owned, self._owned = self._owned, None
        group, self._group = self._group, None
        try:
            while owned:
                owned.pop()()
        finally:
            if group is not None:
                group._remove(self)


def cancels_current_task(poller: Poller) -> Abort:
    """Return a function that ends a connection before its relay runs, by cancelling the current fiber or task."""
    return current(poller).cancel


@mypyc_attr(allow_interpreted_subclasses=True)
class Lives(Generic[LifeT]):
    """A group of connection-table entries (lives), in the order of registration.

    Args:
        table: the table that contains this group.

    Attributes:
        on_close: called with each entry that closes. None: not called.
    """

    __slots__ = ("_emptied", "_entries", "_table", "_timer", "_until_s", "on_close")

    def __init__(self, table: LiveTable) -> None:
        self._entries: dict[LifeT, None] = {}
        self._emptied = asyncio.Event()
        self._table = table
        self._timer: asyncio.TimerHandle | None = None
        self._until_s = math.inf
        self.on_close: Callable[[LifeT], None] | None = None
        table._groups[self] = None

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[LifeT]:
        """Iterate over a copy of the group, because ending an entry can remove it."""
        return iter(list(self._entries))

    def _remove(self, life: LifeT) -> None:
        self._entries.pop(life, None)
        if not self._entries:
            self._emptied.set()
            self._stop_timer()
        if self.on_close is not None:
            self.on_close(life)

    async def emptied(self) -> None:
        """Wait until the group is empty."""
        while self._entries:
            self._emptied.clear()
            await self._emptied.wait()

    def review(self, event: Event, reason: str = "", *, concerned: Callable[[LifeT], bool] | None = None) -> None:
        """Apply the action of :data:`TABLE` for an event to each entry. The first :data:`SLICE` entries are
        handled before this returns.

        Args:
            event: the event that occurred.
            reason: the reason recorded for connections that the event itself ends. A policy's verdict has its own
                reason.
            concerned: returns whether the event concerns an entry. ``None``: it concerns all entries.
        """
        self._table._start(self._walk(event, reason, concerned))

    def _walk(self, event: Event, reason: str, concerned: Callable[[LifeT], bool] | None) -> Iterator[None]:
        for life in self:
            try:
                if concerned is None or concerned(life):
                    self._meet(life, event, reason)
            except Exception:
                # Continue after any error, even a lack of memory, because the event must still end other
                # connections.
                log.exception("a connection cannot be ended")
            yield

    def _meet(self, life: LifeT, event: Event, reason: str) -> None:
        action = TABLE[life.state, event]
        if action is Action.JUDGE:
            self._judge(life)
        elif action is Action.LEAVE:
            life.leave()
        elif action is Action.FINISH:
            life.finish(reason)
        elif action is Action.CLOSE:
            life.end(reason)

    def judge(self, life: LifeT) -> None:
        """Check one connection against the current policies, like a review does."""
        self._judge(life)

    def _judge(self, life: LifeT) -> None:
        if life.reason:
            return  # already ended, but its own task has not run yet
        try:
            verdict = life.judge()
        except Exception:
            log.exception("closing a connection, because the evaluation of its policies failed")
            verdict = Verdict(UNJUDGED)
        if verdict.reason:
            life.end(verdict.reason)
        elif verdict.until_s < self._until_s:
            self._look_again(verdict.until_s)

    def _look_again(self, until_s: float) -> None:
        """Schedule a review of all entries at ``until_s``. This replaces an earlier schedule."""
        self._stop_timer()
        self._until_s = until_s
        self._timer = asyncio.get_running_loop().call_at(until_s, self._time_is_over)

    def _time_is_over(self) -> None:
        self._timer = None
        self._until_s = math.inf
        self.review(Event.POLICIES)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = None
        self._until_s = math.inf

    def dissolve(self) -> None:
        """Remove this group from the table, because its pod was removed. Idempotent."""
        self._stop_timer()
        self._table._groups.pop(self, None)


class LiveTable:
    """The table of all connections of one process."""

    def __init__(self) -> None:
        self._groups: dict[Lives[Any], None] = {}
        self._walks: deque[Iterator[None]] = deque()
        self._handle: asyncio.Handle | None = None
        self._walking = False

    def __len__(self) -> int:
        return sum(map(len, self._groups))

    def __iter__(self) -> Iterator[Life]:
        """Iterate over all entries, in a snapshot of the groups."""
        for group in list(self._groups):
            yield from group

    def review(self, event: Event, reason: str = "") -> None:
        """Apply the action of :data:`TABLE` for an event to every connection; see :meth:`Lives.review`."""
        for group in list(self._groups):
            group.review(event, reason)

    async def reviewed(self) -> None:
        """Wait until every running review has visited all its entries."""
        while self._walks:  # noqa: ASYNC110  each sleep lets the review continue
            await asyncio.sleep(0)

    def _start(self, walk: Iterator[None]) -> None:
        # The first slice runs at once, so that in a small mesh connections are ended before the update is
        # acknowledged. Earlier reviews finish first, so that each connection meets events in order.
        self._walks.append(walk)
        # If a review is already scheduled or running, it also processes this one.
        if self._handle is None and not self._walking:
            self._continue()

    def _continue(self) -> None:
        self._handle = None
        self._walking = True
        try:
            for _ in range(SLICE):
                if not self._step():
                    return
        finally:
            self._walking = False
        self._handle = asyncio.get_running_loop().call_soon(self._continue)

    def _step(self) -> bool:
        """Handle the next entry of the oldest unfinished review. Return False if all reviews are finished."""
        while self._walks:
            try:
                next(self._walks[0])
            except StopIteration:
                self._walks.popleft()
            else:
                return True
        return False


async def all_emptied(*groups: Lives[Any]) -> None:
    """Wait until all groups are empty at the same time: an entry in one group can create an entry in another
    group.
    """
    while any(groups):
        for group in groups:
            await group.emptied()
