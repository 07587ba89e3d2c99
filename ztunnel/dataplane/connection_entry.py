"""Live connections in a table, so that a drain, a policy change or a revocation finds them and ends them.

A connection is registered *before* its policy is checked: a change in between must still find it. What ends it
changes during its life (cancel the task that dials, then abort the relay), so the entry holds the current way and
remembers a reason that came while there was none.
"""

import asyncio
from collections.abc import Callable, Iterator
from typing import Any, Generic, TypeVar

from hbone.aio.fiber import current
from hbone.aio.poller import Poller

#: Ends a connection now, with a reason for its log line.
Abort = Callable[[str], object]

EntryT = TypeVar("EntryT")


class ConnectionEntry:
    """One connection in a :class:`ConnectionTable`.

    Attributes:
        reason: why this side ended it; empty while it has not.
    """

    __slots__ = ("_abort", "reason")

    def __init__(self, abort: Abort) -> None:
        self._abort: Abort | None = abort
        self.reason = ""

    def aborts_by(self, abort: Abort) -> None:
        """Have :meth:`end` call ``abort`` from now on; calls it at once if the connection was ended before."""
        self._abort = abort
        if self.reason:
            abort(self.reason)

    def end(self, reason: str) -> None:
        """End the connection. The first reason wins; later calls do nothing."""
        if self.reason:
            return
        self.reason = reason
        if self._abort is not None:
            self._abort(reason)

    def release(self) -> None:
        """Drop the way to abort, because the connection is over; idempotent."""
        self._abort = None


def cancels_current_task(poller: Poller) -> Abort:
    """Return what ends a connection that does not relay yet: cancelling the fiber or task that works for it."""
    return current(poller).cancel


class ConnectionTable(Generic[EntryT]):
    """Entries in the order of registration; any hashable object can be one."""

    __slots__ = ("_emptied", "_entries")

    def __init__(self) -> None:
        self._entries: dict[EntryT, None] = {}
        self._emptied = asyncio.Event()

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[EntryT]:
        """Iterate over a snapshot: ending an entry may remove it."""
        return iter(list(self._entries))

    def add(self, entry: EntryT) -> None:
        """Register an entry; idempotent."""
        self._entries[entry] = None

    def remove(self, entry: EntryT) -> None:
        """Unregister an entry; idempotent, and nothing for one that never was registered."""
        self._entries.pop(entry, None)
        if not self._entries:
            self._emptied.set()

    async def emptied(self) -> None:
        """Wait until no entry is left; returns at once when there is none."""
        while self._entries:
            self._emptied.clear()
            await self._emptied.wait()


async def all_emptied(*tables: ConnectionTable[Any]) -> None:
    """Wait until all tables are empty at the same time: an entry may move from one to another meanwhile."""
    while any(tables):
        for table in tables:
            await table.emptied()
