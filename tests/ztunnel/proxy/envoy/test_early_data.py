"""First bytes along with a CONNECT, as this proxy's clients and peers see them (Envoy's dialect)."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from hbone.aio.connection import Connection
from hbone.aio.connection_settings import ConnectionSettings
from hbone.aio.poller import Poller
from hbone.aio.relay import ByteCounts, relay
from hbone.aio.requests import Request
from hbone.aio.server import serve_connection
from hbone.aio.socket import PlainSocket
from hbone.settings import Http2Settings
from tests.hbone.aio.harness import tcp_pair
from tests.ztunnel.proxy.envoy.harness import (
    WAIT_S,
    Harness,
    Open,
    access_log,
    chain,
    cluster,
    http2,
    listener,
    run,
    tcp,
)
from ztunnel.proxy.envoy.config.settings import Switches


class Peer:
    """A server of plaintext tunnels that announces early data, and answers on request of the test.

    Attributes:
        requests: the unanswered requests.
        connections: the connections in order of arrival.
    """

    def __init__(self, poller: Poller, tasks: asyncio.TaskGroup) -> None:
        self.poller = poller
        self.requests: asyncio.Queue[Request] = asyncio.Queue()
        self.connections: list[Connection] = []
        self._tasks = tasks

    async def accept(self, server: socket.socket) -> None:
        settings = ConnectionSettings(http2=Http2Settings(early_data=True))
        while True:
            sock, _ = await asyncio.get_running_loop().sock_accept(server)
            sock.setblocking(False)
            serving = serve_connection(
                sock, None, settings, self.poller, self._held, on_established=self.connections.append
            )
            self._tasks.create_task(serving)

    async def _held(self, request: Request) -> None:
        self.requests.put_nowait(request)
        while not request.gone:
            await asyncio.sleep(0.01)

    async def request(self) -> tuple[Request, int]:
        """The next request, and how many bytes came along with it."""
        request = await asyncio.wait_for(self.requests.get(), WAIT_S)
        return request, request._tunnel._early_bytes

    async def echo(self, request: Request) -> bytes:
        """Answer, and echo the client's bytes until it ends. Return the bytes."""
        near, inner = tcp_pair()
        received = b""
        with near, PlainSocket(inner, self.poller) as end, request.accept() as tunnel:
            running = relay(tunnel, end, ByteCounts())
            loop = asyncio.get_running_loop()
            while data := await asyncio.wait_for(loop.sock_recv(near, 65536), WAIT_S):
                received += data
                await loop.sock_sendall(near, data)
            near.shutdown(socket.SHUT_WR)
            await running
        return received


@contextlib.asynccontextmanager
async def peers(number: int) -> AsyncIterator[tuple[list[Peer], list[int]]]:
    """Peers and their ports."""
    poller = Poller()
    try:
        async with asyncio.TaskGroup() as tasks:
            made, ports, accepting = [], [], []
            for _ in range(number):
                server = socket.create_server(("127.0.0.1", 0))
                server.setblocking(False)
                made.append(Peer(poller, tasks))
                ports.append(server.getsockname()[1])
                accepting.append((server, tasks.create_task(made[-1].accept(server))))
            yield made, ports
            for server, task in accepting:
                task.cancel()
                server.close()
            for peer in made:
                for connection in peer.connections:
                    connection.close()
    finally:
        poller.close()


def ask(port: int, question: bytes) -> asyncio.Task[bytes]:
    """Send before the proxy has accepted. The task's result is everything received, up to a reset."""
    sock = socket.create_connection(("127.0.0.1", port))
    sock.sendall(question)
    sock.shutdown(socket.SHUT_WR)
    sock.setblocking(False)

    async def answer() -> bytes:
        received = b""
        with sock, contextlib.suppress(ConnectionResetError):
            while data := await asyncio.wait_for(asyncio.get_running_loop().sock_recv(sock, 65536), WAIT_S):
                received += data
        return received

    return asyncio.get_running_loop().create_task(answer())


async def tunnelling(harness: Harness, *ports: int) -> int:
    """Publish a listener that tunnels to peers, and tries a second one when the first fails."""
    log = access_log(harness.folder)
    proxy = tcp("tunnel", tunneling_config={"hostname": "app:80"}, max_connect_attempts=2, access_log=log)
    await harness.published(
        listener(chain(proxy)), cluster(*ports, name="tunnel", typed_extension_protocol_options=http2())
    )
    await harness.until(lambda: harness.proxy.listeners.active)
    return harness.port("l")


@pytest.mark.parametrize("early_data", [True, False])
def test_first_bytes_are_sent_with_the_connect_unless_disabled(tmp_path: Path, *, early_data: bool) -> None:
    async def body(harness: Harness) -> None:
        async with peers(1) as ([peer], ports):
            port = await tunnelling(harness, *ports)
            for number in range(3):
                asking = ask(port, b"question")
                request, early = await peer.request()
                # Before the first answer of a connection its peer's settings need not have come.
                assert early == (8 if early_data else 0) or (number == 0 and early == 0)
                assert await peer.echo(request) == b"question"
                assert await asking == b"question"
            assert harness.count("cluster.tunnel.upstream_cx_tx_bytes_total") == 24

    run(tmp_path, body, switches=Switches(early_data=early_data))


def test_early_data_is_retried_only_if_the_peer_cannot_have_delivered_it(tmp_path: Path) -> None:
    async def body(harness: Harness) -> None:
        async with peers(2) as (both, ports):
            port = await tunnelling(harness, *ports)
            for _ in both:  # alternately; each has its own bytes
                asking = ask(port, b"hello")
                await answered(both)
                assert await asking == b"hello"

            asking = ask(port, b"question")
            refusing, request = await asked(both, early=8)
            request.refuse(503)
            other, request = await asked(both, early=8)
            assert other is not refusing
            assert await other.echo(request) == b"question"
            assert await asking == b"question"

            asking = ask(port, b"question")
            broken, _ = await asked(both, early=8)
            broken.connections[0].abort("crash")
            assert await asking == b""
            assert all(peer.requests.empty() for peer in both)
            assert (await harness.log(4))[-1]["flags"] == "UF", "an attempt was left, and not to be made"

            # A client that has said nothing yet can be connected elsewhere.
            silent = await Open.to(port)
            broken, _ = await asked(both, early=0)
            broken.connections[-1].abort("crash")
            other, request = await asked(both, early=0)
            assert other is not broken
            echoing = asyncio.get_running_loop().create_task(other.echo(request))
            assert await silent.say(b"late") == b"late"
            await silent.close()
            assert await echoing == b"late"

    async def asked(both: list[Peer], early: int) -> tuple[Peer, Request]:
        await until_asked(both)
        [peer] = [peer for peer in both if not peer.requests.empty()]
        request, size = await peer.request()
        assert size == early
        return peer, request

    async def answered(both: list[Peer]) -> None:
        await until_asked(both)
        [peer] = [peer for peer in both if not peer.requests.empty()]
        await peer.echo((await peer.request())[0])

    async def until_asked(both: list[Peer]) -> None:
        async with asyncio.timeout(WAIT_S):
            while all(peer.requests.empty() for peer in both):
                await asyncio.sleep(0.005)

    run(tmp_path, body)
