"""One table of all connections of this process that are open or being opened. Each entry, called a life, owns the
resources that it opened.

:class:`LiveTable` consists of groups (:class:`Lives`), for example one pod's connections by direction. Changes
reach connections only through :meth:`LiveTable.review` and :meth:`Lives.review`. For each life, a review looks up
the action in :data:`~ztunnel.proxy.dataplane.life_table.TABLE` and carries it out. A front end supplies only
:meth:`Life.judge` and the functions that end a life.

A life is registered on construction, before policies are checked, so a policy change in between still finds it.
The way to end a life changes over time (first by cancelling the dialling fiber, later by aborting the relay), so
the entry stores the current function. If a life is ended while no function is set, the entry stores the reason,
and the next function is called with it at once.
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

#: Ends a life now, with a reason for its log line.
Abort = Callable[[str], object]

LifeT = TypeVar("LifeT", bound="Life")

#: The number of lives that a review checks per loop iteration, which delays other connections by about a
#: millisecond (``bench/review.py``).
SLICE: Final = 128
#: The reason for ending a connection whose policy check raised an unexpected error (fail closed).
UNJUDGED: Final = "connection closed: it could not be judged by the current policies"
#: Compiled code reads these constants without a look-up.
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
        leaving: whether the peer is to be sent GOAWAY. During a handshake, GOAWAY is sent once it is complete.
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
        """Return whether the current policies allow this life. Called only in states with complete facts.

        The front end's method also counts and logs a refusal. The caller then ends the life.
        """
        return ALLOWED

    # The end

    def own(self, release: Callable[[], object]) -> None:
        """Call ``release`` when the life closes, in reverse order of registration."""
        if self._owned is None:
            self._owned = []
        self._owned.append(release)

    def aborts_by(self, abort: Abort | None) -> None:
        """Use ``abort`` to end the connection from now on. If it has already ended, call ``abort`` at once."""
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

        If :meth:`leave` or :meth:`end` was called earlier, it takes effect now.

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
        """End the connection at once. The first reason is kept, and later calls have no effect."""
        if self.reason or self.state is _CLOSED:
            return
        self.reason = reason
        if self._abort is not None:
            self._abort(reason)

    def finish(self, reason: str) -> None:
        """End the connection gracefully, or like :meth:`end` if it cannot be ended gracefully."""
        if self._finish is not None:
            self._abort = self._finish
        self.end(reason)

    def close(self) -> None:
        """Release all owned resources and unregister this life. Idempotent."""
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
    """Return an abort function for a connection that does not relay yet: it cancels the current fiber or task."""
    return current(poller).cancel


@mypyc_attr(allow_interpreted_subclasses=True)
class Lives(Generic[LifeT]):
    """A group of lives, in the order of registration.

    Args:
        table: the table that contains this group.

    Attributes:
        on_close: called with each life that closes, unless it is None.
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
        """Iterate over a copy, because ending an entry can remove it."""
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
        """Apply the table's action for an event to each entry. The first :data:`SLICE` entries are handled before
        this returns.

        Args:
            event: the event that occurred.
            reason: the reason for connections that the event itself ends. A verdict has its own reason.
            concerned: returns whether the event concerns a life. ``None``: the event concerns all lives.
        """
        self._table._start(self._walk(event, reason, concerned))

    def _walk(self, event: Event, reason: str, concerned: Callable[[LifeT], bool] | None) -> Iterator[None]:
        for life in self:
            try:
                if concerned is None or concerned(life):
                    self._meet(life, event, reason)
            except Exception:
                # Continue after any error, for example a lack of memory: policies can deny other connections.
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
        """Judge one life by the current policies, like a review."""
        self._judge(life)

    def _judge(self, life: LifeT) -> None:
        if life.reason:
            return  # already ended, but its own task has not run yet
        try:
            verdict = life.judge()
        except Exception:
            log.exception("a connection cannot be judged, and is closed")
            verdict = Verdict(UNJUDGED)
        if verdict.reason:
            life.end(verdict.reason)
        elif verdict.until_s < self._until_s:
            self._look_again(verdict.until_s)

    def _look_again(self, until_s: float) -> None:
        """Schedule a review of all entries at ``until_s``, replacing the scheduled time."""
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
        """Remove the group of a removed pod from the table. Idempotent."""
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
        """Iterate over a snapshot of all groups."""
        for group in list(self._groups):
            yield from group

    def review(self, event: Event, reason: str = "") -> None:
        """Apply the table's action for an event to every life; see :meth:`Lives.review`."""
        for group in list(self._groups):
            group.review(event, reason)

    async def reviewed(self) -> None:
        """Wait until every running review has visited all its lives."""
        while self._walks:  # noqa: ASYNC110  each sleep lets the review continue
            await asyncio.sleep(0)

    def _start(self, walk: Iterator[None]) -> None:
        # The first slice runs at once: in a small mesh, ended lives are closed before the update is acknowledged.
        # Earlier reviews finish first, so that each life receives events in order.
        self._walks.append(walk)
        # If a review is already scheduled or running, it also processes this walk.
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
        """Handle the next life of a running review. Return whether there was one."""
        while self._walks:
            try:
                next(self._walks[0])
            except StopIteration:
                self._walks.popleft()
            else:
                return True
        return False


async def all_emptied(*groups: Lives[Any]) -> None:
    """Wait until all groups are empty at once. A life in one group can create a life in another group."""
    while any(groups):
        for group in groups:
            await group.emptied()
