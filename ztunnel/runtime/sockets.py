"""Waits for sockets that asyncio's streams do not support, and reads the modes of Unix sockets."""

import argparse
import asyncio
import re
import socket


def socket_mode(text: str) -> int:
    """Return the mode of a Unix socket, for ``argparse``: three octal digits.

    Raises:
        argparse.ArgumentTypeError: it is none.
    """
    if not re.fullmatch("0?[0-7]{3}", text):
        raise argparse.ArgumentTypeError(f"{text!r} is no mode such as 770")
    return int(text, 8)


async def ready(sock: socket.socket, *, writing: bool) -> None:
    """Wait until a socket is readable, or writable. At most one task can wait for each."""
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
