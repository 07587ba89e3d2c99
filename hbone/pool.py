"""Decides which pooled connection carries the next tunnel, without using sockets or a clock.

A key is any hashable value, and all connections with the same key are interchangeable. A tunnel uses the oldest
connection of its key that has room. If no connection has room and the limits allow it, exactly one connection per
key is dialled, no matter how many tunnels wait, because a burst of clients must not become a burst of handshakes.
When the dial succeeds, waiting tunnels open on the new connection in order, and the next dial starts only if
tunnels still wait. When the dial fails, the waiter that caused it gets the error, and the next waiter causes a new
dial. So no waiter depends on an event that never occurs.

A connection has room while it has fewer streams than our limit and the peer's SETTINGS_MAX_CONCURRENT_STREAMS. A
limit received later applies from then on. A draining connection (GOAWAY, our drain, evicted) keeps its streams and
gets no new streams. Idle connections are released after ``idle_timeout_s``, and above ``max_idle`` the least
recently used first. A connection that becomes idle while its key has other connections is a spare, left over from
a peak, and is released after ``spare_timeout_s``. One connection per key is never a spare.

The methods return actions. The caller executes these in order and reports the results to this object.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable
from dataclasses import dataclass
from typing import NewType, TypeAlias

from hbone.errors import HboneError, PoolClosed, TunnelBroken

ConnectionId = NewType("ConnectionId", int)
WaiterId = NewType("WaiterId", int)


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolSettings:
    """Limits, with the Rust ztunnel's defaults.

    ``max_connections_per_key``, ``max_waiters`` and ``spare_timeout_s`` are our additions. ``spare_timeout_s``
    closes idle connections left over from a peak early, because even a few idle connections fragment the heap, and
    freed memory then cannot return to the system.
    """

    max_streams_per_connection: int = 100
    max_tunnels_per_connection: int = 0
    """A connection drains after this number of tunnels; 0: no limit."""
    max_connections_per_key: int = 1024
    max_idle: int = 500
    idle_timeout_s: float = 300.0
    spare_timeout_s: float = 20.0
    max_waiters: int = 65_536


@dataclass(frozen=True, slots=True)
class Dial:
    """Dial a connection for ``key``, and report the result by :meth:`PoolState.dialled` or
    :meth:`PoolState.dial_failed`.
    """

    key: Hashable
    waiter: WaiterId
    """The waiter that gets the dial's error if it fails."""


@dataclass(frozen=True, slots=True)
class Assign:
    """Let ``waiter`` open its stream on ``connection``, where a slot is reserved for this stream."""

    waiter: WaiterId
    connection: ConnectionId


@dataclass(frozen=True, slots=True)
class Fail:
    """Raise ``error`` in ``waiter``."""

    waiter: WaiterId
    error: Exception


@dataclass(frozen=True, slots=True)
class Close:
    """Close ``connection``, which has no streams and gets no new streams."""

    connection: ConnectionId


@dataclass(frozen=True, slots=True)
class CancelDial:
    """Cancel the dial of ``key``, because its last waiter has gone."""

    key: Hashable


Action: TypeAlias = Dial | Assign | Fail | Close | CancelDial


class PoolFull(HboneError):
    """Too many tunnels (``max_waiters``) are already waiting for a connection."""


@dataclass(slots=True)
class _Member:
    key: Hashable
    limit: int
    left: int = 0
    streams: int = 0
    draining: bool = False
    idle_since_s: float = 0.0


class _Key:
    __slots__ = ("dialling", "members", "peer_limit", "waiters")

    def __init__(self) -> None:
        self.members: dict[ConnectionId, _Member] = {}
        self.waiters: OrderedDict[WaiterId, None] = OrderedDict()
        self.dialling: WaiterId | None = None
        self.peer_limit: int | None = None  # the peer's last known limit of streams


class PoolState:
    """The state of one pool, which follows the rules in the module's docstring. ``now_s`` is monotonic."""

    def __init__(self, settings: PoolSettings) -> None:
        self._settings = settings
        self._keys: dict[Hashable, _Key] = {}
        self._members: dict[ConnectionId, _Member] = {}
        #: The connections without streams, the longest idle first. A connection is also in ``_spare`` if its key
        #: has another connection, so that this one is not needed.
        self._idle: OrderedDict[ConnectionId, None] = OrderedDict()
        self._spare: OrderedDict[ConnectionId, None] = OrderedDict()
        self._waiting: dict[WaiterId, Hashable] = {}
        self._next_connection = 0
        self._next_waiter = 0
        self._closed = False

    @property
    def connections(self) -> int:
        """The number of open connections, including draining connections."""
        return len(self._members)

    @property
    def idle(self) -> int:
        """The number of open connections without streams."""
        return len(self._idle)

    @property
    def streams(self) -> int:
        """The number of tunnels assigned to connections and not released."""
        return sum(member.streams for member in self._members.values())

    @property
    def waiters(self) -> int:
        """The number of tunnels that wait for a connection."""
        return len(self._waiting)

    @property
    def dialling(self) -> int:
        """The number of keys with a dial in progress."""
        return sum(entry.dialling is not None for entry in self._keys.values())

    def has(self, key: Hashable) -> bool:
        """Return whether ``key`` has a connection, or a dial in progress."""
        return key in self._keys

    def reserve(self, key: Hashable) -> ConnectionId | None:
        """Reserve a slot on an existing connection. Return the connection, or None if no connection has a free
        slot.

        This is the usual case of :meth:`request` without a waiter, which saves 6 of 30 microseconds per tunnel.
        """
        # Tunnels that already wait get a free slot before this one.
        entry = self._keys.get(key)
        if entry is not None and not entry.waiters and not self._closed:
            for connection, member in entry.members.items():
                if member.streams < member.limit and not member.draining:
                    self._assign(connection, member)
                    return connection
        return None

    def request(self, key: Hashable, now_s: float) -> tuple[WaiterId, list[Action]]:
        """Request a slot for a tunnel. The returned waiter gets an :class:`Assign` or :class:`Fail`, now or later.

        Raises:
            PoolFull: too many tunnels are waiting.
            PoolClosed: the pool was closed by :meth:`close`.
        """
        if self._closed:
            raise PoolClosed("the pool is closed")
        if len(self._waiting) >= self._settings.max_waiters:
            raise PoolFull("too many tunnels wait for a connection")
        waiter = WaiterId(self._next_waiter)
        self._next_waiter += 1
        entry = self._keys.get(key)
        if entry is None:
            entry = self._keys[key] = _Key()
        entry.waiters[waiter] = None
        self._waiting[waiter] = key
        return waiter, self._assign_waiters(key, entry, now_s)

    def cancel_wait(self, waiter: WaiterId, now_s: float) -> list[Action]:
        """Remove a waiter from the queue. No effect if it is not in the queue any more."""
        key = self._waiting.pop(waiter, None)
        if key is None:
            return []
        entry = self._keys[key]
        del entry.waiters[waiter]
        if entry.dialling is None:
            return self._assign_waiters(key, entry, now_s)
        if entry.waiters:
            if entry.dialling == waiter:
                entry.dialling = next(iter(entry.waiters))  # if the dial fails, the next waiter gets the error
            return []
        entry.dialling = None
        self._drop_if_empty(key, entry)
        return [CancelDial(key)]

    def dialled(self, key: Hashable, peer_limit: int | None, now_s: float) -> tuple[ConnectionId, list[Action]]:
        """Add the connection opened by the dial of ``key``.

        ``peer_limit`` is the peer's limit of streams, or None while it is unknown. Then the last known limit of
        ``key`` is used, because without a limit, a peer with a low limit would refuse most of the waiting tunnels
        on each new connection.
        """
        connection = ConnectionId(self._next_connection)
        self._next_connection += 1
        entry = self._keys.setdefault(key, _Key())
        limit = self._limit(entry.peer_limit if peer_limit is None else peer_limit)
        member = _Member(key, limit, self._settings.max_tunnels_per_connection)
        entry.dialling = None
        entry.members[connection] = member
        self._members[connection] = member
        self._became_idle(connection, member, now_s)
        if self._closed:
            member.draining = True
            return connection, self._close_if_unused(connection, member)
        if member.limit < 1:
            return connection, self._refuse_waiter(connection, member, now_s)
        return connection, [*self._assign_waiters(key, entry, now_s), *self._evict()]

    def adopted(
        self, key: Hashable, peer_limit: int | None, streams: int, now_s: float, *, idle_s: float = 0.0
    ) -> ConnectionId:
        """Add a connection taken over from another process.

        Args:
            key: the connection's key.
            peer_limit: the peer's limit of streams. None while it is not known.
            streams: the number of the connection's open streams.
            now_s: the time.
            idle_s: how long the connection has had no streams. The idle timeouts continue from this time.
        """
        connection = ConnectionId(self._next_connection)
        self._next_connection += 1
        settings = self._settings
        left = settings.max_tunnels_per_connection and max(1, settings.max_tunnels_per_connection - streams)
        member = _Member(key, self._limit(peer_limit), left)
        self._keys.setdefault(key, _Key()).members[connection] = member
        self._members[connection] = member
        member.streams = streams
        member.draining = self._closed
        if not streams:
            self._became_idle(connection, member, now_s - idle_s)
            for waiting, _ in self._timeouts():
                for each in sorted(waiting, key=lambda other: self._members[other].idle_since_s):
                    waiting.move_to_end(each)
        return connection

    def idle_s(self, connection: ConnectionId, now_s: float) -> float:
        """Return for how many seconds a connection has had no streams, or 0 if it has streams."""
        return now_s - self._members[connection].idle_since_s if connection in self._idle else 0.0

    def dial_failed(self, key: Hashable, error: Exception, now_s: float) -> list[Action]:
        """Fail the waiter that caused the dial of ``key``, and dial again for the next waiter."""
        entry = self._keys.get(key)
        if entry is None or entry.dialling is None:
            return []
        waiter, entry.dialling = entry.dialling, None
        actions: list[Action] = []
        if waiter in self._waiting:
            del self._waiting[waiter]
            del entry.waiters[waiter]
            actions.append(Fail(waiter, error))
        return actions + self._assign_waiters(key, entry, now_s)

    def limit_learned(self, connection: ConnectionId, peer_limit: int | None, now_s: float) -> list[Action]:
        """Apply the peer's limit of streams. Open streams above a lower limit continue."""
        member = self._members.get(connection)
        if member is None:
            return []
        member.limit = self._limit(peer_limit)
        if member.limit < 1 and not member.draining:
            return self._refuse_waiter(connection, member, now_s)
        self._keys[member.key].peer_limit = peer_limit or None
        return self._assign_waiters(member.key, self._keys[member.key], now_s)

    def released(self, connection: ConnectionId, now_s: float) -> list[Action]:
        """Free the slot of a tunnel that has ended, or was never opened."""
        member = self._members.get(connection)
        if member is None:
            return []
        member.streams -= 1
        if not member.streams:
            self._became_idle(connection, member, now_s)
        if member.draining:
            return self._close_if_unused(connection, member)
        entry = self._keys[member.key]
        served = self._assign_waiters(member.key, entry, now_s) if entry.waiters else []
        return served + self._evict() if len(self._idle) > self._settings.max_idle else served

    def draining(self, connection: ConnectionId, now_s: float) -> list[Action]:
        """Assign no new tunnels to the connection (GOAWAY, an owner's drain); idempotent."""
        member = self._members.get(connection)
        if member is None or member.draining:
            return []
        member.draining = True
        actions = self._close_if_unused(connection, member)
        entry = self._keys.get(member.key)
        return actions + (self._assign_waiters(member.key, entry, now_s) if entry is not None else [])

    def lost(self, connection: ConnectionId, now_s: float) -> list[Action]:
        """Remove a connection that has ended; idempotent."""
        member = self._members.get(connection)
        if member is None:
            return []
        self._remove(connection, member)
        entry = self._keys.get(member.key)
        return self._assign_waiters(member.key, entry, now_s) if entry is not None else []

    def advance(self, now_s: float) -> list[Action]:
        """Release connections idle for ``idle_timeout_s``, and spare connections idle for ``spare_timeout_s``."""
        actions: list[Action] = []
        for waiting, timeout_s in self._timeouts():
            while waiting:
                connection = next(iter(waiting))
                member = self._members[connection]
                if now_s - member.idle_since_s < timeout_s:
                    break
                if waiting is self._spare and len(self._keys[member.key].members) == 1:
                    del self._spare[connection]  # the other connections of its key have ended
                    continue
                member.draining = True
                actions += self._close_if_unused(connection, member)
        return actions

    def next_deadline_s(self) -> float | None:
        """Return when :meth:`advance` must be called next, or None if there is no idle connection to release."""
        return min(
            (
                self._members[next(iter(waiting))].idle_since_s + timeout_s
                for waiting, timeout_s in self._timeouts()
                if waiting
            ),
            default=None,
        )

    def close(self, error: Exception) -> list[Action]:
        """Fail every waiter and drain every connection. If a dial ends later, its connection is closed at once."""
        self._closed = True
        actions: list[Action] = []
        for key, entry in list(self._keys.items()):
            if entry.dialling is not None:
                entry.dialling = None
                actions.append(CancelDial(key))
            for waiter in entry.waiters:
                del self._waiting[waiter]
                actions.append(Fail(waiter, error))
            entry.waiters.clear()
            self._drop_if_empty(key, entry)
        for connection, member in list(self._members.items()):
            member.draining = True
            actions += self._close_if_unused(connection, member)
        return actions

    def _timeouts(self) -> tuple[tuple[OrderedDict[ConnectionId, None], float], ...]:
        settings = self._settings
        return (self._spare, min(settings.spare_timeout_s, settings.idle_timeout_s)), (
            self._idle,
            settings.idle_timeout_s,
        )

    def _became_idle(self, connection: ConnectionId, member: _Member, now_s: float) -> None:
        """Add a connection to the idle connections, and to the spare connections if its key has others."""
        member.idle_since_s = now_s
        self._idle[connection] = None
        others = self._keys[member.key].members
        if len(others) > 1 and any(
            other != connection and not others[other].draining and other not in self._spare for other in others
        ):
            self._spare[connection] = None

    def _assign(self, connection: ConnectionId, member: _Member) -> None:
        member.streams += 1
        if member.streams == 1:
            self._became_busy(connection)
        if member.left:
            member.left -= 1
            member.draining = not member.left

    def _became_busy(self, connection: ConnectionId) -> None:
        """Remove a connection from the idle and the spare connections, because it got a stream or has ended."""
        self._idle.pop(connection, None)
        if self._spare:
            self._spare.pop(connection, None)

    def _limit(self, peer_limit: int | None) -> int:
        own = self._settings.max_streams_per_connection
        return own if peer_limit is None else min(own, peer_limit)

    def _assign_waiters(self, key: Hashable, entry: _Key, now_s: float) -> list[Action]:
        actions: list[Action] = []
        for connection, member in entry.members.items():
            while entry.waiters and not member.draining and member.streams < member.limit:
                waiter, _ = entry.waiters.popitem(last=False)
                del self._waiting[waiter]
                self._assign(connection, member)
                actions.append(Assign(waiter, connection))
            if not entry.waiters:
                break
        if (
            entry.waiters
            and entry.dialling is None
            and not self._closed
            and len(entry.members) < self._settings.max_connections_per_key
        ):
            entry.dialling = next(iter(entry.waiters))
            actions.append(Dial(key, entry.dialling))
        self._drop_if_empty(key, entry)
        return actions

    def _refuse_waiter(self, connection: ConnectionId, member: _Member, now_s: float) -> list[Action]:
        """Drain a connection whose peer does not allow streams, and fail one waiter.

        With SETTINGS_MAX_CONCURRENT_STREAMS of 0, further connections would be useless, too. Each connection fails
        one waiter, so dialling ends after the last waiter.
        """
        entry = self._keys[member.key]
        actions: list[Action] = []
        if entry.waiters:
            waiter, _ = entry.waiters.popitem(last=False)
            del self._waiting[waiter]
            actions.append(Fail(waiter, TunnelBroken("peer allows no streams")))
        return actions + self.draining(connection, now_s)

    def _close_if_unused(self, connection: ConnectionId, member: _Member) -> list[Action]:
        if member.streams:
            return []
        self._remove(connection, member)
        return [Close(connection)]

    def _evict(self) -> list[Action]:
        actions: list[Action] = []
        while len(self._idle) > self._settings.max_idle:
            connection = next(iter(self._idle))
            member = self._members[connection]
            member.draining = True
            actions += self._close_if_unused(connection, member)
        return actions

    def _remove(self, connection: ConnectionId, member: _Member) -> None:
        del self._members[connection]
        self._became_busy(connection)
        entry = self._keys[member.key]
        del entry.members[connection]
        self._drop_if_empty(member.key, entry)

    def _drop_if_empty(self, key: Hashable, entry: _Key) -> None:
        if not entry.members and not entry.waiters and entry.dialling is None:
            self._keys.pop(key, None)
