"""Bytes between applications arrive completely and in order, whichever way either side ends."""

import asyncio
import contextlib
import hashlib
import socket
import struct
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import pytest

from tests.netns.istio import AmbientMesh, mesh_of
from tproxy.aio.sockets import connect, listen

pytestmark = [pytest.mark.netns, pytest.mark.timeout(90)]
MIB = 1024 * 1024
BIG_BYTES = 50 * MIB
NODES = {"w1": ["client", "near"], "w2": ["far", "outside"]}
CAPTURED = ["client", "near", "far"]
#: Who talks to whom: within the node, from node to node, to and from outside the mesh.
PATHS = [("client", "near"), ("client", "far"), ("client", "outside"), ("outside", "far")]


@contextlib.asynccontextmanager
async def pairs(
    mesh: AmbientMesh, client: str, server: str, wait_s: float = 8.0
) -> AsyncIterator[tuple[socket.socket, socket.socket]]:
    """The two applications' ends of one connection."""
    loop, to = asyncio.get_running_loop(), mesh.lab.pod(server)
    with listen("::", 8080, netns=to.netns) as listener:
        async with asyncio.timeout(wait_s):
            near = await connect((to.ipv4, 8080), netns=mesh.lab.pod(client).netns)
            with near:
                await loop.sock_sendall(near, b"!")  # a proxy may wait for the first byte
                far, _ = await loop.sock_accept(listener)
                far.setblocking(False)
                with far:
                    assert await loop.sock_recv(far, 1) == b"!"
                    yield near, far


def on_every_path(check: Callable[[socket.socket, socket.socket], Awaitable[None]], tmp_path: Path) -> None:
    async def main() -> None:
        async with mesh_of(NODES, tmp_path, captured=CAPTURED) as mesh:
            for client, server in PATHS:
                async with pairs(mesh, client, server) as (near, far):
                    await check(near, far)

    asyncio.run(main())


async def everything(sock: socket.socket) -> bytes:
    received = b""
    async with asyncio.timeout(20):
        while data := await asyncio.get_running_loop().sock_recv(sock, 65536):
            received += data
    return received


def test_half_closes_are_passed_on(tmp_path: Path) -> None:
    async def check(near: socket.socket, far: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        await loop.sock_sendall(near, b"question")
        near.shutdown(socket.SHUT_WR)
        assert await everything(far) == b"question"
        # Long after the question has ended, the answer goes on.
        for word in (b"the ", b"answer"):
            await loop.sock_sendall(far, word)
            assert await loop.sock_recv(near, 100) == word
        far.shutdown(socket.SHUT_WR)
        assert await everything(near) == b""

    on_every_path(check, tmp_path)


def test_the_server_ends_first(tmp_path: Path) -> None:
    async def check(near: socket.socket, far: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        await loop.sock_sendall(far, b"goodbye")
        far.shutdown(socket.SHUT_WR)
        assert await everything(near) == b"goodbye"
        await loop.sock_sendall(near, b"still here")
        near.shutdown(socket.SHUT_WR)
        assert await everything(far) == b"still here"

    on_every_path(check, tmp_path)


def reset(sock: socket.socket) -> None:
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    sock.close()


@pytest.mark.parametrize("by_server", [False, True], ids=["client", "server"])
def test_resets_are_no_ends(tmp_path: Path, *, by_server: bool) -> None:
    async def check(near: socket.socket, far: socket.socket) -> None:
        resets, sees = (far, near) if by_server else (near, far)
        await asyncio.get_running_loop().sock_sendall(resets, b"half of it")
        assert await asyncio.get_running_loop().sock_recv(sees, 100) == b"half of it"
        reset(resets)
        # A reset and not an end, which would make the received bytes look complete.
        with pytest.raises(ConnectionResetError):
            await everything(sees)

    on_every_path(check, tmp_path)


def block(number: int) -> bytes:
    """A mebibyte that is like no other."""
    return hashlib.sha256(number.to_bytes(8, "big")).digest() * (MIB // 32)


async def send_big(sock: socket.socket, first: int) -> str:
    checksum = hashlib.sha256()
    for number in range(first, first + BIG_BYTES // MIB):
        data = block(number)
        checksum.update(data)
        await asyncio.get_running_loop().sock_sendall(sock, data)
    sock.shutdown(socket.SHUT_WR)
    return checksum.hexdigest()


async def receive_big(sock: socket.socket) -> tuple[str, int]:
    checksum, size, room = hashlib.sha256(), 0, bytearray(MIB)
    while count := await asyncio.get_running_loop().sock_recv_into(sock, room):
        checksum.update(memoryview(room)[:count])
        size += count
    return checksum.hexdigest(), size


def test_big_transfers_both_ways_at_once(tmp_path: Path) -> None:
    async def main() -> None:
        async with mesh_of(NODES, tmp_path, captured=CAPTURED) as mesh:
            for client, server in PATHS:
                async with pairs(mesh, client, server, wait_s=30) as (near, far):
                    up, down, arrived, returned = await asyncio.gather(
                        send_big(near, 0), send_big(far, 1000), receive_big(far), receive_big(near)
                    )
                    assert arrived == (up, BIG_BYTES), (client, server)
                    assert returned == (down, BIG_BYTES), (client, server)
            lines = await mesh.node_of("client").lines("outbound", 2, bytes_recv=BIG_BYTES)
            assert {line["dst.workload"] for line in lines} >= {"near", "far"}
            (inbound,) = await mesh.node_of("far").lines("inbound", 1, src_workload="client", bytes_sent=BIG_BYTES)
            assert inbound["bytes_recv"] == BIG_BYTES + 1

    asyncio.run(main())
