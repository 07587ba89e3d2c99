"""A wire between two sockets that holds back what one of them sends."""

import asyncio
import contextlib
import socket


async def both_ways(
    one: socket.socket, other: socket.socket, *, held_by: asyncio.Event, after_first: bool = False
) -> None:
    """Copy between two sockets until both have ended, and close them.

    Args:
        one: what it sends is held until the event.
        other: at the other end.
        held_by: the event.
        after_first: the first bytes pass at once, a ClientHello.
    """
    loop = asyncio.get_running_loop()

    async def pass_on(source: socket.socket, sink: socket.socket, *, held: bool, passes: bool) -> None:
        with contextlib.suppress(OSError):
            while data := await loop.sock_recv(source, 65536):
                if held and not passes:
                    await held_by.wait()
                passes = False
                await loop.sock_sendall(sink, data)
            sink.shutdown(socket.SHUT_WR)

    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(pass_on(one, other, held=True, passes=after_first))
        tasks.create_task(pass_on(other, one, held=False, passes=False))
    one.close()
    other.close()
