"""Opens tunnels over shared connections. :class:`hbone.pool.PoolState` decides; this module dials and closes."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Hashable, Iterable
from functools import partial
from typing import TypeAlias

from hbone.aio.connection import Connection
from hbone.aio.fiber import OneShotFuture
from hbone.aio.poller import Poller
from hbone.aio.pool_connections import Assigned, PoolConnections
from hbone.aio.socket import PlainSocket
from hbone.aio.tunnel import Tunnel
from hbone.errors import TlsError, TunnelBroken
from hbone.events import Header
from hbone.pool import PoolSettings

DialFunction: TypeAlias = Callable[[Hashable], Awaitable[Connection]]
_MOST_ATTEMPTS = 4


class Pool(PoolConnections):
    """Shares connections between tunnels with equal keys. Close the pool before the poller.

    Args:
        dial: opens a connection for a key. Its errors are raised unchanged by the :meth:`open` that caused the
            dial.
        poller: runs the dials, and resumes waiting fibers in the iteration that has their connection ready.
        settings: limits.
    """

    def __init__(self, dial: DialFunction, poller: Poller, settings: PoolSettings | None = None) -> None:
        super().__init__(poller, settings)
        self._dial = dial

    async def open(self, key: Hashable, request: Iterable[Header], client: PlainSocket | None = None) -> Tunnel:
        """Return a tunnel on a connection of ``key``, after the tunnel's 200. The caller closes the tunnel.

        A request that the peer has certainly not processed (after REFUSED_STREAM, or if a GOAWAY crossed the
        request) is repeated on another connection (RFC 9113, 8.7). Cancelling is safe at any point.

        Args:
            key: tunnels with equal keys share connections.
            request: the request's header fields.
            client: see :meth:`Connection.open <hbone.aio.connection.Connection.open>`.

        Raises:
            ConnectRefused: the peer answered with another status than 200.
            TunnelBroken: the stream or the connection ended before the answer.
            PoolClosed: the pool was drained or closed meanwhile.
            PoolFull: too many tunnels are waiting.
            Exception: the error of ``dial``, if this call caused the dial.
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

    async def prepare(self, key: Hashable) -> None:
        """Open an idle connection of ``key`` for later tunnels. Return at once if a connection already has room.

        Raises:
            PoolClosed, PoolFull, Exception: see :meth:`open`.
        """
        connection_id = self._state.reserve(key)
        if connection_id is None:
            connection_id, _ = await self._assigned(key)
        self._released(connection_id)

    async def close(self) -> None:
        """Drain the pool, and close every connection without waiting (RST_STREAM, GOAWAY, close_notify)."""
        self.drain()
        for connection in [*self._connections.values(), *self._leaving]:
            connection.close()
        dials = [*self._dials.values(), *self._ending]
        if dials:
            await asyncio.wait(dials)
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    async def _assigned(self, key: Hashable) -> Assigned:
        waiter, actions = self._state.request(key, self._loop.time())
        future: OneShotFuture[Assigned] = OneShotFuture(self._poller)
        self._waiting[waiter] = future
        self._execute(actions)
        try:
            return await future
        except asyncio.CancelledError:
            if future.done() and not future.cancelled() and future.exception() is None:
                self._released(future.result()[0])  # a slot was assigned and the call cancelled in one iteration
            raise
        finally:
            self._waiting.pop(waiter, None)
            self._execute(self._state.cancel_wait(waiter, self._loop.time()))

    async def _dialling(self, key: Hashable) -> None:
        task: object = asyncio.current_task()  # the fiber, for which typeshed has no name
        try:
            connection = await self._dial(key)
        except asyncio.CancelledError:
            if self._dials.get(key) is not task:
                return  # CancelDial: no tunnel waits for this dial any more
            self._dial_over(key, TunnelBroken("dial was cancelled"))
            raise
        except Exception as error:  # noqa: BLE001  passed to the caller that caused the dial
            self._dial_over(key, error)
            return
        if self._dials.get(key) is not task:
            connection.close()
            return
        if isinstance(connection.error, TlsError):
            # A TLS 1.3 client finishes its handshake before the server checks the client's certificate, so the
            # server's refusal can already have arrived. If the pool used the connection, each waiter would cause
            # one more dial, with the same result.
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
