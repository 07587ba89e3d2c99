"""Small servers and clients that report their peer: the other half of every interception test."""

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from ipaddress import IPv4Address, IPv6Address

from deploy.lab import Place
from tests.limits import WAIT_S
from tproxy.aio.sockets import SocketAddress, canonical, connect, listen, original_destination
from tproxy.node import (
    INBOUND_LISTENER_MARK,
    INBOUND_PLAINTEXT_PORT,
    INBOUND_PORT,
    OUTBOUND_LISTENER_MARK,
    OUTBOUND_PORT,
)

SHORT_S = 0.5
IpAddress = IPv4Address | IPv6Address
Handler = Callable[[socket.socket], Awaitable[bytes]]


def peer_address(sock: socket.socket) -> SocketAddress:
    """Return the peer's address and port."""
    name = sock.getpeername()
    return SocketAddress(canonical(name[0]), name[1])


@contextlib.asynccontextmanager
async def serving(sock: socket.socket, handler: Handler) -> AsyncIterator[None]:
    """Accept on ``sock``; each connection gets the handler's bytes, then echoes until it ends."""
    loop = asyncio.get_running_loop()

    async def one(client: socket.socket) -> None:
        with client, contextlib.suppress(OSError):
            await loop.sock_sendall(client, await handler(client))
            while data := await loop.sock_recv(client, 65536):
                await loop.sock_sendall(client, data)

    async def accept(group: asyncio.TaskGroup) -> None:
        while True:
            client, _ = await loop.sock_accept(sock)
            client.setblocking(False)
            # Cancelled before its first step, a task never reaches its `with`.
            group.create_task(one(client)).add_done_callback(lambda _, sock=client: sock.close())

    with sock:
        async with asyncio.TaskGroup() as group:
            accepting = group.create_task(accept(group))
            try:
                yield
            finally:
                accepting.cancel()
                for task in asyncio.all_tasks():
                    coroutine = task.get_coro()
                    if getattr(coroutine, "__qualname__", "").startswith("serving.<locals>.one"):
                        task.cancel()


def app(place: Place, port: int = 8080) -> contextlib.AbstractAsyncContextManager[None]:
    """Run an application in a pod. It sends its name and its client's address."""

    async def answer(client: socket.socket) -> bytes:
        return f"app {place.name} peer {peer_address(client).ip}\n".encode()

    return serving(listen("::", port, netns=place.netns), answer)


@contextlib.asynccontextmanager
async def toy_ztunnel(ztunnel: Place) -> AsyncIterator[None]:
    """Run the three listeners. Each sends its port, its client's address, and the connection's original
    destination.
    """
    async with contextlib.AsyncExitStack() as stack:
        for port, mark in (
            (OUTBOUND_PORT, OUTBOUND_LISTENER_MARK),
            (INBOUND_PLAINTEXT_PORT, INBOUND_LISTENER_MARK),
            (INBOUND_PORT, INBOUND_LISTENER_MARK),
        ):

            async def answer(client: socket.socket, port: int = port) -> bytes:
                wanted, peer = original_destination(client), peer_address(client)
                return f"{port} from {peer.ip} to {wanted.ip} {wanted.port} {wanted.restored}\n".encode()

            sock = listen("::", port, transparent=True, mark=mark, netns=ztunnel.netns)
            await stack.enter_async_context(serving(sock, answer))
        yield


async def ask(place: Place, address: IpAddress | str, port: int = 8080, **options: object) -> str:
    """Dial from a place, return the first line that comes back."""
    loop = asyncio.get_running_loop()
    sock = await connect((address, port), netns=place.netns, timeout_s=WAIT_S, **options)  # type: ignore[arg-type]
    with sock:
        data = b""
        async with asyncio.timeout(WAIT_S):
            while not data.endswith(b"\n"):
                more = await loop.sock_recv(sock, 4096)
                if not more:
                    break
                data += more
    return data.decode().strip()
