"""First bytes that are sent along with a CONNECT: which bytes are sent and consumed, and which requests can be
retried.
"""

from __future__ import annotations

import asyncio
import contextlib
import select
import socket
import struct
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace

import pytest

from hbone.aio.connection_settings import ConnectionSettings, default_client
from hbone.aio.poller import Poller
from hbone.aio.relay import ByteCounts, relay
from hbone.aio.requests import Request
from hbone.aio.socket import PlainSocket
from hbone.aio.tunnel import Tunnel
from hbone.errors import ConnectionBroken, ConnectRefused, TunnelBroken
from hbone.settings import Http2Settings, client_settings
from tests.hbone.aio.harness import CONNECT, LOOPS, App, Pair, connected, polling, run, tcp_pair

CLIENT = replace(default_client(), http2=replace(client_settings(), early_data=True))


def server(early_bytes: int = 64 * 1024, window_bytes: int = 16 * 1024 * 1024) -> ConnectionSettings:
    http2 = Http2Settings(early_data=True, early_bytes=early_bytes, connection_window_bytes=window_bytes)
    return ConnectionSettings(http2=http2)


@contextlib.asynccontextmanager
async def pair_of(
    poller: Poller,
    client_settings: ConnectionSettings = CLIENT,
    server_settings: ConnectionSettings | None = None,
    *,
    refuse: bool = False,
) -> AsyncIterator[Pair]:
    """Return a pair of connections whose client has received its server's SETTINGS, including an announcement of
    early data.
    """

    async def refused(request: Request) -> None:
        request.refuse(503)

    async with connected(
        poller,
        client_settings=client_settings,
        server_settings=server_settings or server(),
        on_request=refused if refuse else None,
    ) as pair:
        announced = pair.server.settings.http2.early_data
        async with asyncio.timeout(20):
            while not pair.client.engine.peer_settings_seen:
                assert not announced
                await asyncio.sleep(0.001)
        yield pair


@contextlib.contextmanager
def application(poller: Poller, first: bytes) -> Iterator[tuple[App, PlainSocket]]:
    """A client's application that has sent something, and our end of it."""
    near, inner = tcp_pair()
    near.sendall(first)
    with near, PlainSocket(inner, poller) as end:
        yield App(near), end


async def received(poller: Poller, tunnel: Tunnel, size: int | None = None) -> bytes:
    """What the application behind a server's tunnel gets, up to the end or to ``size``; it answers nothing."""
    near, inner = tcp_pair()

    async def application() -> bytes:
        app = App(near)
        if size is None:
            data = await app.read_all()
            app.eof()
        else:
            data = await app.read(size)
            running.abort("seen")
        return data

    with near:
        with PlainSocket(inner, poller) as end, tunnel:
            running = relay(tunnel, end, ByteCounts())
            reading = asyncio.get_running_loop().create_task(application())
            await running
        return await reading


@pytest.mark.parametrize("loop", LOOPS)
def test_early_bytes_arrive_before_the_response(loop: str) -> None:
    async def main() -> None:
        with polling() as poller:
            async with pair_of(poller) as pair:
                with application(poller, b"question") as (_, end):
                    opening = asyncio.get_running_loop().create_task(pair.client.open(CONNECT, end))
                    request = await pair.requests.get()
                    assert end.read_bytes == 0
                    accepted = request.accept()
                    # No relay of the client's runs that could have sent them.
                    assert await received(poller, accepted, 8) == b"question"
                    with await opening:
                        assert end.read_bytes == 8  # consumed, and counted

    run(main, loop)


@pytest.mark.parametrize("watched", [False, True])
@pytest.mark.parametrize("pushed", [b"", b"pushed back, "])
@pytest.mark.parametrize("later", [b"", b"and later"])
@pytest.mark.parametrize("size", [0, 1, 7, 8, 9, 1000])
def test_every_byte_arrives_once_and_in_order(size: int, later: bytes, pushed: bytes, *, watched: bool) -> None:
    # The server holds eight.
    async def main() -> None:
        first = bytes(number % 251 for number in range(size))
        with polling() as poller:
            async with pair_of(poller, server_settings=server(8)) as pair:
                with application(poller, b"" if watched else first) as (app, end):
                    if watched and size:
                        waiting = asyncio.get_running_loop().create_task(end.peek(1))
                        await asyncio.sleep(0)
                        await app.send(first)
                        await waiting
                    end.push_back(pushed)
                    opening = asyncio.get_running_loop().create_task(pair.client.open(CONNECT, end))
                    request = await pair.requests.get()
                    accepted = request.accept()
                    with await opening as opened:
                        counts = ByteCounts()
                        running = relay(end, opened, counts)
                        await app.send(later)
                        app.eof()
                        assert await received(poller, accepted) == pushed + first + later
                        assert (await running).error is None
                        assert counts.sent == len(pushed + first + later)

    run(main)


def test_bytes_beyond_the_early_limit_follow_without_another_event() -> None:
    async def main() -> None:
        with polling() as poller:
            async with pair_of(poller, server_settings=server(8)) as pair:
                with application(poller, b"") as (app, end):
                    waiting = asyncio.get_running_loop().create_task(end.peek(1))
                    await asyncio.sleep(0)
                    await app.send(bytes(1000))
                    await waiting
                    opening = asyncio.get_running_loop().create_task(pair.client.open(CONNECT, end))
                    accepted = (await pair.requests.get()).accept()
                    with await opening as opened:
                        running = relay(end, opened, ByteCounts())
                        assert await received(poller, accepted, 1000) == bytes(1000)
                        running.abort("seen")

    run(main)


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        (default_client(), server()),
        (CLIENT, ConnectionSettings()),
        (CLIENT, server(0)),
    ],
    ids=["switched-off", "not-announced", "none"],
)
def test_early_bytes_need_both_sides_settings(ours: ConnectionSettings, theirs: ConnectionSettings) -> None:
    async def main() -> None:
        with polling() as poller:
            async with pair_of(poller, ours, theirs) as pair:
                with application(poller, b"question") as (_, end):
                    opening = asyncio.get_running_loop().create_task(pair.client.open(CONNECT, end))
                    accepted = (await pair.requests.get()).accept()
                    with accepted, await opening:
                        assert end.read_bytes == 0
                        room = memoryview(bytearray(100))
                        assert bytes(room[: end.peek_into(room)]) == b"question"

    run(main)


def test_refused_early_bytes_stay_for_another_attempt() -> None:
    async def main() -> None:
        with polling() as poller:
            async with pair_of(poller, refuse=True) as refusing, pair_of(poller) as pair:
                with application(poller, b"question") as (_, end):
                    with pytest.raises(ConnectRefused):
                        await refusing.client.open(CONNECT, end)
                    opening = asyncio.get_running_loop().create_task(pair.client.open(CONNECT, end))
                    accepted = (await pair.requests.get()).accept()
                    assert await received(poller, accepted, 8) == b"question"
                    (await opening).close()

    run(main)


def test_refusals_leave_the_connection_its_window() -> None:
    async def main() -> None:
        with polling() as poller:
            small = server(30_000, window_bytes=100_000)
            async with pair_of(poller, server_settings=small, refuse=True) as pair:
                with application(poller, bytes(30_000)) as (_, end):
                    for _ in range(20):
                        async with asyncio.timeout(20):
                            with pytest.raises(ConnectRefused):
                                await pair.client.open(CONNECT, end)
                            while pair.client.engine._send_window < 50_000:  # half of it is given back at once
                                await asyncio.sleep(0.001)

    run(main)


@pytest.mark.parametrize("first", [b"", b"question"])
@pytest.mark.parametrize("cause", ["abort", "reset", "garbage", "close"])
def test_broken_tunnels_report_whether_early_bytes_were_possibly_delivered(first: bytes, cause: str) -> None:
    async def main() -> None:
        with polling() as poller, contextlib.suppress(ExceptionGroup):  # of the server, whose end is rough
            async with pair_of(poller) as pair:
                with application(poller, first) as (_, end):
                    opening = asyncio.get_running_loop().create_task(pair.client.open(CONNECT, end))
                    request = await pair.requests.get()
                    if cause == "abort":
                        pair.server.abort("crash")
                    elif cause == "reset":
                        request.reset(2)
                    elif cause == "close":
                        pair.client.close()
                    else:
                        pair.server.link.sock.send(b"\x17\x03\x03\x00\x20" + bytes(32))
                    with pytest.raises(Exception) as caught:
                        await opening
                    seen.append(caught.value)

    seen: list[BaseException] = []
    run(main)
    [error] = seen
    assert getattr(error, "perhaps_delivered", False) is bool(first)
    if first:
        assert isinstance(error, TunnelBroken if cause == "reset" else ConnectionBroken)
        assert not isinstance(error, ConnectRefused)


@pytest.mark.parametrize("first", [b"", b"question"])
@pytest.mark.parametrize("read", [False, True])
def test_a_request_that_never_left_can_be_repeated(first: bytes, *, read: bool) -> None:
    """The peer's reset came before the request was written, whether we read it before or find it by writing."""

    async def main() -> None:
        with polling() as poller:
            async with pair_of(poller) as pair:
                opened, _ = await pair.tunnel()
                with opened, application(poller, first) as (_, end):
                    pair.server.link.sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                    pair.server.abort("crash")
                    opening = pair.client.open(CONNECT, end)
                    if read:
                        pair.client.on_event(select.EPOLLIN | select.EPOLLERR | select.EPOLLHUP)
                    with pytest.raises(ConnectionBroken) as caught:
                        await opening
                    assert caught.value.unprocessed
                    assert not caught.value.perhaps_delivered
                    assert end.peek_into(memoryview(bytearray(100))) == len(first)

    run(main)


def test_unprocessed_streams_have_not_delivered_early_bytes() -> None:
    async def main() -> None:
        with polling() as poller:
            async with pair_of(poller) as pair:
                with application(poller, b"question") as (_, end):
                    pair.server.engine.goaway()
                    poller.schedule_flush(pair.server)
                    with pytest.raises(TunnelBroken) as caught:
                        await pair.client.open(CONNECT, end)
                    assert caught.value.unprocessed
                    assert not caught.value.perhaps_delivered

    run(main)


@pytest.mark.parametrize("looked", [False, True])
@pytest.mark.parametrize("first", [b"", b"question"])
def test_a_reset_before_the_request_is_passed_on_as_a_reset(first: bytes, *, looked: bool) -> None:
    # The kernel reports the reset once.
    async def main() -> None:
        with polling() as poller:
            async with pair_of(poller) as pair:
                with application(poller, first) as (app, end):
                    app.reset()
                    if looked:
                        end.peek_into(memoryview(bytearray(1)))
                    opening = asyncio.get_running_loop().create_task(pair.client.open(CONNECT, end))
                    accepted = (await pair.requests.get()).accept()
                    with await opening as opened:
                        running = relay(end, opened, ByteCounts())
                        with pytest.raises(ConnectionResetError):
                            await received(poller, accepted)
                        await running

    run(main)
