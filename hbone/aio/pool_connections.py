"""Manages the open connections of a pool, and opens tunnels on these. :class:`hbone.pool.PoolState` decides; this
module opens and closes.

All methods return at once. :class:`hbone.aio.pool.Pool` adds the coroutines, which dial and wait.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Hashable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias, assert_never

from hbone.aio.answers import OnAnswer
from hbone.aio.connection import Connection
from hbone.aio.fiber import Fiber, OneShotFuture
from hbone.aio.poller import Poller
from hbone.aio.socket import PlainSocket
from hbone.aio.tunnel import Tunnel
from hbone.errors import PoolClosed
from hbone.native import mypyc_attr
from hbone.pool import (
    Action,
    Assign,
    CancelDial,
    Close,
    ConnectionId,
    Dial,
    Fail,
    PoolSettings,
    PoolState,
    WaiterId,
)

#: The id of a connection with a reserved slot, and the connection itself, or None if it has ended in the meantime.
Assigned: TypeAlias = tuple[ConnectionId, Connection | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolStatistics:
    """Statistics of a pool: current numbers, and counts since its start."""

    connections: int
    idle: int
    streams: int
    waiters: int
    dialling: int
    dialled: int
    dial_failures: int
    reused: int
    retried: int


@mypyc_attr(allow_interpreted_subclasses=True)
class PoolConnections:
    """The base of :class:`hbone.aio.pool.Pool`.

    Args:
        poller: sends and receives for the connections.
        settings: limits of the pool. None stands for the defaults.
    """

    def __init__(self, poller: Poller, settings: PoolSettings | None = None) -> None:
        self._poller = poller
        self.settings = settings if settings is not None else PoolSettings()
        self._state = PoolState(self.settings)
        self._loop = poller.loop
        self._waiting: dict[WaiterId, OneShotFuture[Assigned]] = {}
        self._connections: dict[ConnectionId, Connection] = {}
        self._limits: dict[ConnectionId, int | None] = {}
        self._leaving: set[Connection] = set()
        self._dials: dict[Hashable, Fiber] = {}
        self._ending: set[asyncio.Future[None]] = set()
        self._timer: asyncio.TimerHandle | None = None
        self._dialled = self._failures = self._opened = self._retried = 0

    @property
    def statistics(self) -> PoolStatistics:
        state = self._state
        return PoolStatistics(
            connections=state.connections,
            idle=state.idle,
            streams=state.streams,
            waiters=state.waiters,
            dialling=state.dialling,
            dialled=self._dialled,
            dial_failures=self._failures,
            reused=max(0, self._opened - self._dialled),
            retried=self._retried,
        )

    @property
    def connections(self) -> tuple[Connection, ...]:
        """All open connections of the pool, for revocation checks and dumps."""
        return tuple(self._connections.values())

    def has(self, key: Hashable) -> bool:
        """Return whether the pool has a connection for ``key``, or is dialling one."""
        return self._state.has(key)

    def reserve(self, key: Hashable) -> ConnectionId | None:
        """Reserve a slot on an open connection of ``key``. The caller must call :meth:`open_on` or :meth:`release`
        next.

        Returns:
            The connection with the slot. None: no open connection has room, so a tunnel would have to wait.
        """
        connection_id = self._state.reserve(key)
        if connection_id is None:
            return None
        connection = self._connections.get(connection_id)
        if connection is None or not connection.accepts_streams:
            self._released(connection_id)
            return None
        return connection_id

    def release(self, connection_id: ConnectionId) -> None:
        """Release a slot reserved by :meth:`reserve` on which no tunnel was opened."""
        self._released(connection_id)

    def open_on(
        self, connection_id: ConnectionId, block: bytes, client: PlainSocket | None, on_answer: OnAnswer
    ) -> Tunnel:
        """Request a tunnel on a reserved slot, without a coroutine. The caller closes the tunnel, with or without
        a response.

        Args:
            connection_id: from :meth:`reserve`.
            block: the CONNECT, see :meth:`hbone.engine.Engine.open_tunnel`.
            client: see :meth:`open`.
            on_answer: see :meth:`hbone.aio.connection.Connection.open_now`. Here a request that the peer did not
                process is not repeated.
        """
        tunnel = self._connections[connection_id].open_now(block, client, on_answer)
        self._opened += 1
        tunnel.on_close = partial(self._released, connection_id)
        return tunnel

    def adopt(
        self, key: Hashable, connection: Connection, tunnels: Iterable[Tunnel], *, idle_s: float = 0.0
    ) -> None:
        """Add a connection that was taken over from another process to the pool. It can have open ``tunnels``.

        Args:
            key: the connection's key.
            connection: the connection that was taken over.
            tunnels: the connection's open tunnels.
            idle_s: the result of :meth:`idle_s` in the other process.
        """
        opened = list(tunnels)
        limit = connection.engine.peer_max_streams
        connection_id = self._state.adopted(key, limit, len(opened), self._loop.time(), idle_s=idle_s)
        self._connections[connection_id] = connection
        self._limits[connection_id] = limit
        for tunnel in opened:
            tunnel.on_close = partial(self._released, connection_id)
        connection.on_change(partial(self._changed, connection_id))
        self._changed(connection_id, connection)
        if self._timer is not None:  # restart it, because the adopted connection can be due earlier
            self._timer.cancel()
            self._timer = None
        self._schedule()

    def idle_s(self, connection: Connection) -> float:
        """Return how many seconds a connection has had no tunnels. 0 if it has tunnels or is in another pool."""
        for connection_id, each in self._connections.items():
            if each is connection:
                return self._state.idle_s(connection_id, self._loop.time())
        return 0.0

    def drain(self) -> None:
        """Drain the pool: open no new tunnels, fail waiting calls, and close each connection when its last stream
        has ended.
        """
        self._execute(self._state.close(PoolClosed("the pool was drained")))

    def _dialling(self, key: Hashable) -> Coroutine[Any, Any, None]:
        """Return a coroutine that dials a connection and reports the result."""
        raise NotImplementedError

    def _execute(self, actions: list[Action]) -> None:
        for action in actions:
            match action:
                case Dial(key=key):
                    name = f"dial {key!r}"[:200]
                    self._dials[key] = Fiber(self._poller, self._dialling(key), name)
                case Assign(waiter=waiter, connection=connection_id):
                    future = self._waiting.pop(waiter)
                    # The waiter was cancelled, but its ``finally`` has not run yet. The slot is returned only
                    # after this list of actions is finished.
                    if future.done():
                        self._loop.call_soon(self._released, connection_id)
                    else:
                        # If the connection ends before the waiter runs, the connection's ``error`` has the reason.
                        future.set_result((connection_id, self._connections.get(connection_id)))
                case Fail(waiter=waiter, error=error):
                    future = self._waiting.pop(waiter)
                    if not future.done():
                        future.set_exception(error)
                case Close(connection=connection_id):
                    connection = self._connections.pop(connection_id, None)
                    self._limits.pop(connection_id, None)
                    if connection is not None:
                        self._leave(connection)
                case CancelDial(key=key):
                    task = self._dials.pop(key)
                    self._ending.add(task)
                    task.add_done_callback(self._ending.discard)
                    task.cancel()
                case _:
                    assert_never(action)
        self._schedule()

    def _leave(self, connection: Connection) -> None:
        """Close a connection that has no tunnels left, once the peer has acknowledged the last bytes of these
        tunnels.
        """
        connection.flush()
        if connection.link.in_flight:
            self._leaving.add(connection)
            connection.on_change(self._left)
            connection.drain()
        else:
            connection.on_change(None)
            connection.close()

    def _left(self, connection: Connection) -> None:
        if connection.error is not None:
            self._leaving.discard(connection)

    def _dial_over(self, key: Hashable, error: Exception) -> None:
        if self._dials.pop(key, None) is not None:
            self._failures += 1
            self._execute(self._state.dial_failed(key, error, self._loop.time()))

    def _changed(self, connection_id: ConnectionId, connection: Connection) -> None:
        if connection_id not in self._connections:
            return
        now_s, engine = self._loop.time(), connection.engine
        if connection.error is not None:
            del self._connections[connection_id]
            self._limits.pop(connection_id, None)
            self._execute(self._state.lost(connection_id, now_s))
        elif engine.going_away or engine.draining or engine.exhausted or connection.write_error is not None:
            self._execute(self._state.draining(connection_id, now_s))
        elif engine.peer_max_streams != self._limits[connection_id]:
            self._limits[connection_id] = engine.peer_max_streams
            self._execute(self._state.limit_learned(connection_id, engine.peer_max_streams, now_s))

    def _released(self, connection_id: ConnectionId) -> None:
        actions = self._state.released(connection_id, self._loop.time())
        if actions or self._timer is None:
            self._execute(actions)

    def _schedule(self) -> None:
        if self._timer is None:
            deadline_s = self._state.next_deadline_s()
            if deadline_s is not None:
                # There is only one timer. A connection that becomes spare after this call can be due before the
                # idle connections, but not sooner than the spare timeout from now. So the timer is set to this
                # time at the latest.
                soonest_s = self._loop.time() + self.settings.spare_timeout_s
                self._timer = self._loop.call_at(min(deadline_s, soonest_s), self._advance)

    def _advance(self) -> None:
        self._timer = None
        self._execute(self._state.advance(self._loop.time()))
