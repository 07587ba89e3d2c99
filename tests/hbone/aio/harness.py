"""Ends over real loopback sockets, and applications behind them."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from typing import Any

import uvloop

from hbone import frames
from hbone.aio.connection import Connection, connect
from hbone.aio.connection_settings import ConnectionSettings, default_client
from hbone.aio.end import End
from hbone.aio.poller import Poller
from hbone.aio.requests import Request
from hbone.aio.server import serve_connection
from hbone.aio.socket import PlainSocket
from hbone.aio.tls_socket import TlsSocket
from hbone.aio.tunnel import Tunnel
from hbone.hpack_cache import BlockEncoder
from hbone.settings import Role
from hbone.tls_context import TlsContext, TlsSettings
from tests.hbone.certificates import Authority

WAIT_S = 10.0
LOOPS = ("asyncio", "uvloop")
CONNECT = ((b":method", b"CONNECT"), (b":authority", b"10.0.0.2:8080"))


def run(main: Callable[[], Coroutine[Any, Any, None]], loop: str = "uvloop") -> None:
    """Run a coroutine to its end, within the limit of time; a task left behind fails the test."""

    async def bounded() -> None:
        async with asyncio.timeout(WAIT_S * 3):
            await main()
        for _ in range(3):
            await asyncio.sleep(0)
        left = asyncio.all_tasks() - {asyncio.current_task()}
        assert not left, left

    if loop == "uvloop":
        uvloop.run(bounded())
    else:
        asyncio.run(bounded())


async def until(condition: Callable[[], object]) -> None:
    """Wait until ``condition`` holds, within the test's time limit. For conditions that no future reports."""
    async with asyncio.timeout(WAIT_S):
        while not condition():
            await asyncio.sleep(0.001)


@functools.cache
def identity() -> TlsSettings:
    authority = Authority()
    leaf = authority.issue("spiffe://cluster.local/ns/a/sa/b")
    return TlsSettings(
        certificate_chain_pem=leaf.chain_pem,
        private_key_pem=leaf.key_pem,
        trusted_ca_pem=authority.pem,
        movable=True,
    )


@functools.cache
def contexts() -> tuple[TlsContext, TlsContext]:
    return TlsContext(Role.CLIENT, identity()), TlsContext(Role.SERVER, identity())


@contextlib.contextmanager
def polling() -> Any:
    poller = Poller()
    try:
        yield poller
        assert poller.registered == 0, "a socket was left behind"
    finally:
        poller.close()


def tcp_pair() -> tuple[socket.socket, socket.socket]:
    """Return two connected, non-blocking sockets; without await, so that no cancellation can lose them."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        one = socket.create_connection(listener.getsockname())
        two, _ = listener.accept()
    for sock in (one, two):
        sock.setblocking(False)
        for buffer in (socket.SO_SNDBUF, socket.SO_RCVBUF):  # fixed, not the sizes that this machine would choose
            sock.setsockopt(socket.SOL_SOCKET, buffer, 256 * 1024)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return one, two


class App:
    """An application's socket: the far side of a :class:`PlainSocket`."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self.loop = asyncio.get_running_loop()

    async def send(self, data: bytes) -> None:
        await self.loop.sock_sendall(self.sock, data)

    def eof(self) -> None:
        self.sock.shutdown(socket.SHUT_WR)

    async def read(self, size: int) -> bytes:
        data = b""
        while len(data) < size:
            piece = await asyncio.wait_for(self.loop.sock_recv(self.sock, size - len(data)), WAIT_S)
            if not piece:
                break
            data += piece
        return data

    async def read_all(self) -> bytes:
        data = bytearray()
        while piece := await asyncio.wait_for(self.loop.sock_recv(self.sock, 1 << 20), WAIT_S):
            data += piece
        return bytes(data)

    def reset(self) -> None:
        self.sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
        self.sock.close()

    def close(self) -> None:
        self.sock.close()


class Pair:
    """A client and a server connection; requests wait in a queue."""

    def __init__(self, client: Connection, server: Connection, requests: asyncio.Queue[Request]) -> None:
        self.client = client
        self.server = server
        self.requests = requests

    async def tunnel(self) -> tuple[Tunnel, Tunnel]:
        opening = asyncio.get_running_loop().create_task(self.client.open(CONNECT))
        request = await self.requests.get()
        accepted = request.accept()
        return await opening, accepted


@contextlib.asynccontextmanager
async def connected(
    poller: Poller,
    *,
    tls: bool = True,
    client_settings: ConnectionSettings | None = None,
    server_settings: ConnectionSettings | None = None,
    on_request: Callable[[Request], Awaitable[None]] | None = None,
) -> AsyncIterator[Pair]:
    near, far = tcp_pair()
    requests: asyncio.Queue[Request] = asyncio.Queue()
    servers: asyncio.Queue[Connection] = asyncio.Queue()
    over = asyncio.Event()

    async def hold(request: Request) -> None:
        requests.put_nowait(request)
        await over.wait()

    client_context, server_context = contexts() if tls else (None, None)
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(
            serve_connection(
                far,
                server_context,
                server_settings or ConnectionSettings(),
                poller,
                on_request or hold,
                on_established=servers.put_nowait,
            )
        )
        client = await connect(near, client_context, client_settings or default_client(), poller)
        try:
            yield Pair(client, await servers.get(), requests)
        finally:
            over.set()
            client.close()


def request_frame(stream_id: int, *, ended: bool = False) -> bytes:
    """HEADERS of a CONNECT."""
    flags = frames.END_HEADERS | (frames.END_STREAM if ended else 0)
    return frames.frame(frames.HEADERS, flags, stream_id, BlockEncoder().encode(CONNECT))


class RawPeer:
    """The other side of a connection without TLS, as frames: sends given frames, and stores received ones."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self.received: list[tuple[int, int, int, bytes]] = []
        """(type, flags, stream, payload), in order."""
        self._loop = asyncio.get_running_loop()
        self._rest = b""
        self._pings = 0

    async def send(self, data: bytes) -> None:
        """Send ``data`` with one call. If it is small, the other side gets it in one read."""
        await self._loop.sock_sendall(self.sock, data)

    async def read(self) -> bool:
        """Read once; return False at the end of the connection."""
        data = await asyncio.wait_for(self._loop.sock_recv(self.sock, 1 << 20), WAIT_S)
        self._rest += data
        while len(self._rest) >= frames.HEADER_BYTES:
            high, low, kind, flags, stream_id = frames.HEADER.unpack_from(self._rest)
            end = frames.HEADER_BYTES + (high << 8 | low)
            if len(self._rest) < end:
                break
            self.received.append((kind, flags, stream_id, self._rest[frames.HEADER_BYTES : end]))
            self._rest = self._rest[end:]
        return bool(data)

    async def skip(self, size: int) -> None:
        """Skip the bytes before the first frame."""
        while len(self._rest) < size:
            self._rest += await asyncio.wait_for(self._loop.sock_recv(self.sock, size - len(self._rest)), WAIT_S)
        self._rest = b""

    async def settle(self, data: bytes) -> bool:
        """Send ``data`` and wait until the other side has processed it. Return False if that ended the connection.

        The other side's PONG to a PING proves it. Fibers that the data started or cancelled have run by then, too,
        because they run before the PONG is flushed.
        """
        self._pings += 1
        payload = self._pings.to_bytes(8)
        try:
            await self.send(data + frames.frame(frames.PING, 0, 0, payload))
            while (frames.PING, frames.ACK, 0, payload) not in self.received:
                if not await self.read():
                    return False
        except ConnectionError:
            return False
        return True

    async def barrier(self) -> None:
        """Return when the other side has acted on everything sent before."""
        assert await self.settle(b""), "the connection ended"


@contextlib.asynccontextmanager
async def raw_client(
    poller: Poller, on_request: Callable[[Request], Awaitable[None]], settings: ConnectionSettings | None = None
) -> AsyncIterator[RawPeer]:
    """A server of ours without TLS, and its client as frames, whose SETTINGS it has got."""
    near, far = tcp_pair()
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(serve_connection(far, None, settings or ConnectionSettings(), poller, on_request))
        with near:
            peer = RawPeer(near)
            await peer.send(frames.PREFACE + frames.frame(frames.SETTINGS, 0, 0))
            yield peer


@contextlib.asynccontextmanager
async def ends(kind: str, poller: Poller) -> AsyncIterator[tuple[End, End]]:
    """Return two ends of one kind, connected by a network: bytes written into one come out of the other."""
    if kind == "plain":
        one, two = tcp_pair()
        near, far = PlainSocket(one, poller), PlainSocket(two, poller)
        with near, far:
            yield near, far
    elif kind == "tls":
        one, two = tcp_pair()
        client_context, server_context = contexts()
        client = TlsSocket(one, client_context, poller)
        server = TlsSocket(two, server_context, poller)
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(client.establish())
            tasks.create_task(server.establish())
        with client, server:
            yield client, server
    else:
        async with connected(poller, tls=kind == "tunnel") as pair:
            opened, accepted = await pair.tunnel()
            with opened, accepted:
                yield opened, accepted
