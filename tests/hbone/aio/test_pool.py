"""The pool over real connections: sharing, failing, racing GOAWAYs, cancelling."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
from collections.abc import AsyncIterator, Awaitable, Hashable
from dataclasses import replace
from typing import TypeVar

import pytest

from hbone.aio.connection import Connection, connect
from hbone.aio.connection_settings import ConnectionSettings, default_client
from hbone.aio.fiber import Fiber
from hbone.aio.poller import Poller
from hbone.aio.pool import Pool
from hbone.aio.requests import Request
from hbone.aio.server import serve_connection
from hbone.end_state import SourceState
from hbone.errors import ConnectionBroken, ConnectRefused, PoolClosed, TlsError, TunnelBroken, TunnelClosed
from hbone.frames import MAX_STREAM_ID
from hbone.pool import PoolSettings
from hbone.settings import Http2Settings, Role
from hbone.tls_context import TlsContext
from tests.hbone.aio.harness import CONNECT, contexts, identity, polling, run, tcp_pair, until
from tests.hbone.certificates import Authority

ErrorT = TypeVar("ErrorT", bound=Exception)


class Mesh:
    """Dials loopback servers. Records their connections and the requests to them."""

    def __init__(self, poller: Poller, tasks: asyncio.TaskGroup, streams: int = 200) -> None:
        self.poller = poller
        self.tasks = tasks
        self.settings = ConnectionSettings(http2=Http2Settings(max_concurrent_streams=streams))
        self.servers: list[Connection] = []
        self.dialled: list[socket.socket] = []
        self.dials = 0
        self.fail: list[Exception] = []
        self.gate = asyncio.Event()
        self.gate.set()
        self.over = asyncio.Event()
        self.status = 200

    async def dial(self, key: Hashable) -> Connection:
        self.dials += 1
        await self.gate.wait()
        if self.fail:
            raise self.fail.pop(0)
        near, far = tcp_pair()
        self.dialled.append(near)
        client_context, server_context = contexts()
        self.tasks.create_task(
            serve_connection(
                far,
                server_context,
                self.settings,
                self.poller,
                self.handle,
                on_established=self.servers.append,
            )
        )
        return await connect(near, client_context, default_client(), self.poller)

    async def handle(self, request: Request) -> None:
        if self.status != 200:
            request.refuse(self.status)
            return
        request.accept()
        await until(lambda: bool(request.gone or self.over.is_set()))


@contextlib.asynccontextmanager
async def mesh(settings: PoolSettings | None = None, streams: int = 200) -> AsyncIterator[tuple[Pool, Mesh]]:
    with polling() as poller:
        async with asyncio.TaskGroup() as tasks:
            network = Mesh(poller, tasks, streams)
            pool = Pool(network.dial, poller, settings)
            try:
                yield pool, network
            finally:
                network.over.set()
                network.gate.set()
                await pool.close()
                assert pool.statistics.connections == 0
                assert pool.statistics.waiters == 0


def test_a_storm_dials_once_and_shares() -> None:
    async def main() -> None:
        async with mesh() as (pool, network):
            network.gate.clear()
            async with asyncio.TaskGroup() as tasks:
                opening = [tasks.create_task(pool.open("k", CONNECT)) for _ in range(50)]
                await asyncio.sleep(0)
                network.gate.set()
            assert network.dials == 1
            assert pool.statistics.streams == 50
            for task in opening:
                task.result().close()
            assert pool.statistics.streams == 0
            assert pool.statistics.idle == 1
            (await pool.open("k", CONNECT)).close()
            assert network.dials == 1

    run(main)


def test_a_new_connections_first_request_leaves_with_its_settings() -> None:
    """Each segment more wakes the peer once more, and costs a way through two pods' network stacks."""
    sent: list[int] = []

    async def main() -> None:
        async with mesh() as (pool, network):

            async def ask() -> None:
                for key in "abcde":
                    tunnel = await pool.open(key, CONNECT)
                    sent.append(segments_with_data(network.dialled[-1]))
                    tunnel.close()

            await Fiber(network.poller, ask(), "ask")

    run(main)
    # If this process is interrupted before the server's SETTINGS arrive, their acknowledgement is another segment.
    assert min(sent) == len(("ClientHello", "end of the handshake", "SETTINGS and CONNECT"))


def test_a_prepared_connection_is_idle_and_takes_the_first_tunnel() -> None:
    async def main() -> None:
        async with mesh() as (pool, network):
            assert not pool.has("a")
            network.gate.clear()
            preparing = network.tasks.create_task(pool.prepare("a"))
            await until(lambda: network.dials == 1)
            assert pool.has("a")
            network.gate.set()
            await preparing
            await pool.prepare("a")  # one has room
            assert (network.dials, pool.statistics.idle) == (1, 1)
            tunnel = await pool.open("a", CONNECT)
            assert (network.dials, pool.statistics.idle) == (1, 0)
            tunnel.close()
            network.fail.append(OSError("no route"))
            with pytest.raises(OSError, match="no route"):
                await pool.prepare("b")
            assert not pool.has("b")

    run(main)


def test_keys_do_not_share() -> None:
    async def main() -> None:
        async with mesh() as (pool, network):
            for key in ("a", "b"):
                (await pool.open(key, CONNECT)).close()
            assert network.dials == 2

    run(main)


def test_a_failed_dial_fails_one_waiter_and_the_next_dials() -> None:
    async def main() -> None:
        async with mesh() as (pool, network):
            network.fail = [OSError("refused")]
            results = await asyncio.gather(*(pool.open("k", CONNECT) for _ in range(5)), return_exceptions=True)
            assert [type(result) for result in results].count(OSError) == 1
            for result in results:
                if not isinstance(result, BaseException):
                    result.close()
            assert network.dials == 2

    run(main)


def test_a_low_limit_of_the_peer_opens_more_connections() -> None:
    async def main() -> None:
        async with mesh(streams=5) as (pool, network):
            async with asyncio.timeout(20):
                tunnels = await asyncio.gather(*(pool.open("k", CONNECT) for _ in range(12)))
            assert all(server.engine.open_streams <= 5 for server in network.servers)
            assert len(network.servers) >= 3
            for tunnel in tunnels:
                tunnel.close()

    run(main)


def test_a_burst_of_tunnels_to_a_peer_with_a_low_limit_is_refused_on_its_first_connection_only() -> None:
    async def main() -> None:
        async with mesh(streams=5) as (pool, network):
            tunnels = await asyncio.gather(*(pool.open("k", CONNECT) for _ in range(60)))
            assert network.dials == 12
            assert pool.statistics.retried == 55
            for tunnel in tunnels:
                tunnel.close()

    run(main)


def test_a_connection_without_stream_identifiers_is_replaced_at_once() -> None:
    async def main() -> None:
        async with mesh() as (pool, _):
            first = await pool.open("k", CONNECT)
            engine = first.connection.engine
            engine._next_id = MAX_STREAM_ID
            second = await pool.open("k", CONNECT)
            assert engine.exhausted
            third = await pool.open("k", CONNECT)
            assert first.connection is second.connection
            assert third.connection is not first.connection
            assert pool.statistics.retried == 0
            first.close()
            second.close()
            assert pool.statistics.connections == 1
            third.close()

    run(main)


def test_refusals_are_raised_and_leave_no_stream() -> None:
    async def main() -> None:
        async with mesh() as (pool, network):
            network.status = 503
            with pytest.raises(ConnectRefused):
                await pool.open("k", CONNECT)
            assert pool.statistics.streams == 0

    run(main)


def test_a_goaway_that_crosses_the_request_is_retried_elsewhere() -> None:
    async def main() -> None:
        async with mesh() as (pool, network):
            (await pool.open("k", CONNECT)).close()
            network.servers[0].engine.goaway()
            network.poller.schedule_flush(network.servers[0])
            tunnel = await pool.open("k", CONNECT)
            assert network.dials == 2
            assert pool.statistics.retried <= 1
            tunnel.close()

    run(main)


def test_lost_connections_are_replaced() -> None:
    async def main() -> None:
        async with mesh() as (pool, network):
            tunnel = await pool.open("k", CONNECT)
            network.servers[0].abort("crash")
            await until(lambda: not pool.statistics.connections)
            assert tunnel.gone
            tunnel.close()
            (await pool.open("k", CONNECT)).close()
            assert network.dials == 2

    run(main)


def test_idle_connections_are_released() -> None:
    async def main() -> None:
        async with mesh(PoolSettings(idle_timeout_s=0.05)) as (pool, network):
            (await pool.open("k", CONNECT)).close()
            await network.servers[0].wait_closed()
            assert pool.statistics.connections == 0

    run(main)


def test_an_adopted_connection_is_released_when_it_would_have_been_elsewhere() -> None:
    async def main() -> None:
        async with mesh() as (pool, network):
            (await pool.open("k", CONNECT)).close()
            other = await network.dial("k")
            await until(lambda: len(network.servers) == 2)
            pool.adopt("k", other, [], idle_s=pool.settings.spare_timeout_s - 0.05)
            async with asyncio.timeout(20):
                await network.servers[1].wait_closed()
            assert pool.statistics.connections == 1

    run(main)


@pytest.mark.parametrize("heard", [True, False], ids=["before-the-request", "at-any-time"])
def test_a_certificate_refused_after_the_handshake_is_not_tried_again(*, heard: bool) -> None:
    # A client of TLS 1.3 is through before the server has looked at its certificate.
    async def main() -> None:
        with polling() as poller:
            async with asyncio.TaskGroup() as tasks:
                strict = TlsContext(Role.SERVER, replace(identity(), trusted_ca_pem=Authority("another").pem))
                dials = 0

                async def dial(key: Hashable) -> Connection:
                    nonlocal dials
                    dials += 1
                    near, far = tcp_pair()
                    serving = serve_connection(far, strict, ConnectionSettings(), poller, unasked)
                    tasks.create_task(raises(serving, TlsError))
                    connection = await connect(near, contexts()[0], default_client(), poller)
                    if heard:
                        await connection.wait_closed()
                    return connection

                pool = Pool(dial, poller)
                error = await raises(pool.open("k", CONNECT), TlsError)
                assert error.by_peer
                assert dials == 1
                await pool.close()

    run(main)


@pytest.mark.parametrize("heard", [True, False], ids=["before-the-request", "at-any-time"])
def test_a_server_that_closes_after_the_handshake_is_dialled_once(*, heard: bool) -> None:
    class Denied(Exception):
        """A policy of the server's."""

    def deny(connection: Connection) -> None:
        raise Denied

    async def main() -> None:
        with polling() as poller:
            async with asyncio.TaskGroup() as tasks:
                dials = 0

                async def dial(key: Hashable) -> Connection:
                    nonlocal dials
                    dials += 1
                    near, far = tcp_pair()
                    client_context, server_context = contexts()
                    serving = serve_connection(
                        far, server_context, ConnectionSettings(), poller, unasked, on_established=deny
                    )
                    tasks.create_task(raises(serving, Denied))
                    connection = await connect(near, client_context, default_client(), poller)
                    if heard:
                        await connection.wait_closed()
                    return connection

                pool = Pool(dial, poller)
                error = await raises(pool.open("k", CONNECT), ConnectionBroken)
                assert not error.unprocessed
                assert dials == 1
                await pool.close()

    run(main)


def segments_with_data(sock: socket.socket) -> int:
    """Return tcpi_data_segs_out of Linux's struct tcp_info: segments with data that were sent."""
    info = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 160)
    return int(struct.unpack_from("I", info, 156)[0])


async def unasked(request: Request) -> None:
    raise AssertionError(request)


async def raises(work: Awaitable[object], kind: type[ErrorT]) -> ErrorT:
    with pytest.raises(kind) as raised:
        await work
    return raised.value


def test_drain_fails_waiters_and_keeps_tunnels() -> None:
    async def main() -> None:
        async with mesh() as (pool, network):
            tunnel = await pool.open("k", CONNECT)
            network.gate.clear()
            waiting = asyncio.get_running_loop().create_task(pool.open("other", CONNECT))
            await asyncio.sleep(0)
            pool.drain()
            with pytest.raises(PoolClosed):
                await waiting
            with pytest.raises(PoolClosed):
                await pool.open("k", CONNECT)
            assert not tunnel.gone
            tunnel.close()
            assert pool.statistics.connections == 0

    run(main)


@pytest.mark.parametrize("turns", range(0, 40, 3))
def test_cancelling_an_open_at_any_turn_leaves_nothing(turns: int) -> None:
    async def main() -> None:
        async with mesh() as (pool, _):
            others = [asyncio.get_running_loop().create_task(pool.open("k", CONNECT)) for _ in range(3)]
            for _ in range(turns):
                await asyncio.sleep(0)
            others[0].cancel()
            results = await asyncio.gather(*others, return_exceptions=True)
            for result in results:
                if isinstance(result, BaseException):
                    assert isinstance(result, asyncio.CancelledError | TunnelBroken)
                else:
                    result.close()
            assert pool.statistics.streams == 0

    run(main)


@pytest.mark.parametrize("closes", [False, True])
def test_connection_that_left_closes_after_the_last_bytes_of_its_tunnels_have_arrived(closes: bool) -> None:
    """The server has ended the stream, and takes the rest of an upload slowly. Closing the pool does not wait."""

    async def main() -> None:
        async with mesh() as (pool, network):
            network.settings = ConnectionSettings(
                http2=Http2Settings(initial_window_bytes=1 << 20, early_bytes=1 << 20)
            )
            received: list[int] = []

            async def half_closes(request: Request) -> None:
                accepted = request.accept()
                accepted.write_eof()
                await until(lambda: accepted.source is not SourceState.OPEN or network.over.is_set())
                if accepted.source is SourceState.ENDED:
                    received.append(accepted._early_bytes)

            network.handle = half_closes  # type: ignore[method-assign]
            tunnel = await pool.open("key", CONNECT)
            (client,), (server,) = pool.connections, network.servers
            server.drain()
            await until(lambda: tunnel.source is SourceState.ENDED and client.engine.going_away)
            server.suspend()
            for end in (client, server):
                end.link.sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 16 * 1024)
                end.link.sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 16 * 1024)
            sent = client.engine.send_data(tunnel.stream_id, bytes(200_000))
            tunnel.write_eof()
            tunnel.close()
            assert not pool.connections
            for _ in range(10):
                await asyncio.sleep(0)
            assert client.error is None
            if closes:
                await pool.close()
                assert isinstance(client.error, TunnelClosed)
                network.over.set()
                server.wake_up()
            else:
                server.wake_up()
                await until(lambda: received)
                assert received == [sent]
                await client.wait_closed()

    run(main)
