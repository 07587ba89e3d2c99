"""Waits for sockets that asyncio's streams do not support, such as those that carry packets and descriptors."""

import asyncio
import socket


async def ready(sock: socket.socket, *, writing: bool) -> None:
    """Wait until a socket is readable, or writable; at most one task may wait for each."""
    loop = asyncio.get_running_loop()
    woken: asyncio.Future[None] = loop.create_future()

    def wake() -> None:
        if not woken.done():
            woken.set_result(None)

    descriptor = sock.fileno()
    watch, unwatch = (loop.add_writer, loop.remove_writer) if writing else (loop.add_reader, loop.remove_reader)
    watch(descriptor, wake)
    try:
        await woken
    finally:
        unwatch(descriptor)
