"""Tunnels over shared connections: :class:`hbone.pool.PoolState` decides, this dials, opens and closes."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Hashable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import TypeAlias, assert_never

from hbone.aio.answers import OnAnswer
from hbone.aio.connection import Connection
from hbone.aio.fiber import Fiber, OneShotFuture
from hbone.aio.poller import Poller
from hbone.aio.socket import PlainSocket
from hbone.aio.tunnel import Tunnel
from hbone.errors import PoolClosed, TlsError, TunnelBroken
from hbone.events import Header
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

DialFunction: TypeAlias = Callable[[Hashable], Awaitable[Connection]]
_Assigned: TypeAlias = tuple[ConnectionId, Connection | None]
_MOST_ATTEMPTS = 4


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


class Pool:
    """Shares connections between tunnels of one key. Close it before the poller.

    Args:
        dial: opens a connection for a key. Its errors are raised unchanged by the :meth:`open` that caused the
            dial.
        poller: runs the dials, and resumes waiting fibers in the iteration that has their connection ready.
        settings: limits.
    """

    def __init__(self, dial: DialFunction, poller: Poller, settings: PoolSettings | None = None) -> None:
        self._dial = dial
        self._poller = poller
        self.settings = settings if settings is not None else PoolSettings()
        self._state = PoolState(self.settings)
        self._loop = poller.loop
        self._waiting: dict[WaiterId, OneShotFuture[_Assigned]] = {}
        self._connections: dict[ConnectionId, Connection] = {}
        self._limits: dict[ConnectionId, int | None] = {}
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
        """Every open connection, for re-checks (revocation) and dumps."""
        return tuple(self._connections.values())

    async def open(self, key: Hashable, request: Iterable[Header], client: PlainSocket | None = None) -> Tunnel:
        """Return a tunnel on a connection of ``key``, after its 200; the caller closes it.

        A request certainly not processed by the peer (REFUSED_STREAM, a GOAWAY that crossed it) is repeated on
        another connection (RFC 9113, 8.7). Cancelling is safe at any point.

        Args:
            key: tunnels with equal keys share connections.
            request: its fields.
            client: see :meth:`Connection.open <hbone.aio.connection.Connection.open>`.

        Raises:
            ConnectRefused: answered with something else than 200.
            TunnelBroken: the stream or the connection ended before the answer.
            PoolClosed: drained or closed meanwhile.
            PoolFull: too many wait already.
            Exception: what ``dial`` raised, if it dialled for this caller.
        """
        headers = tuple(request)
        for attempt in range(1, _MOST_ATTEMPTS + 1):
            connection_id = self._state.reserve(key)
            if connection_id is None:
                connection_id, connection = await self._assigned(key)
            else:
                connection = self._connections.get(connection_id)
            try:
                if connection is None:
                    raise TunnelBroken("connection ended", unprocessed=True)
                tunnel = await connection.open(headers, client)
            except TunnelBroken as error:
                self._released(connection_id)
                if not error.unprocessed or attempt == _MOST_ATTEMPTS:
                    raise
                self._retried += 1
            except BaseException:
                self._released(connection_id)
                raise
            else:
                self._opened += 1
                tunnel.on_close = partial(self._released, connection_id)
                return tunnel
        raise AssertionError("unreachable")

    def has(self, key: Hashable) -> bool:
        """Return whether ``key`` has a connection, or is being dialled."""
        return self._state.has(key)

    async def prepare(self, key: Hashable) -> None:
        """Open a connection of ``key`` for later tunnels. The connection is idle then. Returns at once if one has
        room.

        Raises:
            PoolClosed, PoolFull, Exception: see :meth:`open`.
        """
        connection_id = self._state.reserve(key)
        if connection_id is None:
            connection_id, _ = await self._assigned(key)
        self._released(connection_id)

    def reserve(self, key: Hashable) -> ConnectionId | None:
        """Reserve a place on an open connection of ``key`` for :meth:`open_on`, which follows at once, or else
        :meth:`release`.

        Returns:
            None: no open connection has room, so a tunnel would have to wait.
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
        """Release a place reserved by :meth:`reserve` on which no tunnel was opened."""
        self._released(connection_id)

    def open_on(
        self, connection_id: ConnectionId, block: bytes, client: PlainSocket | None, on_answer: OnAnswer
    ) -> Tunnel:
        """Request a tunnel on a reserved place, without a coroutine; the caller closes it, answered or not.

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
        """Share a connection that another process has dialled, whose ``tunnels`` are open.

        Args:
            key: the connection's key.
            connection: it continues here.
            tunnels: the open ones.
            idle_s: from :meth:`idle_s` of the other process's pool.
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
        if self._timer is not None:  # set for this process's connections, which have been idle for a shorter time
            self._timer.cancel()
            self._timer = None
        self._schedule()

    def idle_s(self, connection: Connection) -> float:
        """Return how many seconds a connection has had no tunnels; 0 if it has some or is not of this pool."""
        for connection_id, each in self._connections.items():
            if each is connection:
                return self._state.idle_s(connection_id, self._loop.time())
        return 0.0

    def drain(self) -> None:
        """Open no new tunnels, fail the waiting ones, and close each connection with its last stream."""
        self._execute(self._state.close(PoolClosed("the pool was drained")))

    async def close(self) -> None:
        """Drain, then close every connection without waiting (RST_STREAM, GOAWAY, close_notify)."""
        self.drain()
        for connection in list(self._connections.values()):
            connection.close()
        dials = [*self._dials.values(), *self._ending]
        if dials:
            await asyncio.wait(dials)
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    async def _assigned(self, key: Hashable) -> _Assigned:
        waiter, actions = self._state.request(key, self._loop.time())
        future: OneShotFuture[_Assigned] = OneShotFuture(self._poller)
        self._waiting[waiter] = future
        self._execute(actions)
        try:
            return await future
        except asyncio.CancelledError:
            if future.done() and not future.cancelled() and future.exception() is None:
                self._released(future.result()[0])  # assigned and cancelled in the same turn
            raise
        finally:
            self._waiting.pop(waiter, None)
            self._execute(self._state.cancel_wait(waiter, self._loop.time()))

    def _execute(self, actions: list[Action]) -> None:
        for action in actions:
            match action:
                case Dial(key=key):
                    name = f"dial {key!r}"[:200]
                    self._dials[key] = Fiber(self._poller, self._run_dial(key), name)
                case Assign(waiter=waiter, connection=connection_id):
                    future = self._waiting.pop(waiter)
                    # The waiter was cancelled, but its ``finally`` has not run yet. The slot is returned later,
                    # because this list of actions is not finished.
                    if future.done():
                        self._loop.call_soon(self._released, connection_id)
                    else:
                        # Should the connection end before the waiter runs, its ``error``
                        # still says why.
                        future.set_result((connection_id, self._connections.get(connection_id)))
                case Fail(waiter=waiter, error=error):
                    future = self._waiting.pop(waiter)
                    if not future.done():
                        future.set_exception(error)
                case Close(connection=connection_id):
                    connection = self._connections.pop(connection_id, None)
                    self._limits.pop(connection_id, None)
                    if connection is not None:
                        connection.on_change(None)
                        connection.close()
                case CancelDial(key=key):
                    task = self._dials.pop(key)
                    self._ending.add(task)
                    task.add_done_callback(self._ending.discard)
                    task.cancel()
                case _:
                    assert_never(action)
        self._schedule()

    async def _run_dial(self, key: Hashable) -> None:
        task: object = asyncio.current_task()  # the fiber, for which typeshed has no name
        try:
            connection = await self._dial(key)
        except asyncio.CancelledError:
            if self._dials.get(key) is not task:
                return  # CancelDial: no tunnel waits for this dial any more
            self._dial_over(key, TunnelBroken("dial was cancelled"))
            raise
        except Exception as error:  # noqa: BLE001  any error of a dial is the caller's that asked for it
            self._dial_over(key, error)
            return
        if self._dials.get(key) is not task:
            connection.close()
            return
        if isinstance(connection.error, TlsError):
            # A TLS 1.3 client has finished its handshake before the server judges its certificate, so a refusal
            # can have arrived already. Using the connection would cause one more dial for each waiter, with the
            # same result.
            self._dial_over(key, connection.error)
            return
        del self._dials[key]
        self._dialled += 1
        limit = connection.engine.peer_max_streams
        connection_id, actions = self._state.dialled(key, limit, self._loop.time())
        self._connections[connection_id] = connection
        self._limits[connection_id] = limit
        connection.on_change(partial(self._changed, connection_id))
        self._execute(actions)
        self._changed(connection_id, connection)

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
        elif engine.going_away or engine.draining or engine.exhausted:
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
                # There is one timer at a time, and it must not be late for an earlier deadline: a connection that
                # becomes spare after this call is due before the idle ones, but never sooner than the spare
                # timeout.
                soonest_s = self._loop.time() + self.settings.spare_timeout_s
                self._timer = self._loop.call_at(min(deadline_s, soonest_s), self._advance)

    def _advance(self) -> None:
        self._timer = None
        self._execute(self._state.advance(self._loop.time()))
