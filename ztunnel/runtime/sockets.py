"""Waits for sockets that asyncio's streams do not support, and creates Unix sockets for one user."""

import argparse
import asyncio
import contextlib
import errno
import os
import re
import socket
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Self

#: The most bytes of a path in an address of unix(7), without the final zero.
_LONGEST_PATH: Final = 107


def socket_mode(text: str) -> int:
    """Parse the mode of a Unix socket for ``argparse``: three octal digits.

    Raises:
        argparse.ArgumentTypeError: the text is not such a mode.
    """
    if not re.fullmatch("0?[0-7]{3}", text):
        raise argparse.ArgumentTypeError(f"{text!r} is no mode such as 770")
    return int(text, 8)


async def ready(sock: socket.SocketType, *, writing: bool) -> None:
    """Wait until a socket is readable, or writable. Only one task at a time can wait for each of the two."""
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


@dataclass(frozen=True, slots=True)
class PeerProcess:
    """The process at the other end of a Unix socket, as the kernel reports it (SO_PEERCRED of unix(7)).

    Attributes:
        pid: the process id, as seen in our pid namespace. 0 if the process is not visible there.
        uid: the user id, as seen in our user namespace.
    """

    pid: int
    uid: int

    @classmethod
    def of(cls, descriptor: int) -> Self:
        """Return the process that has connected. Its credentials are those at the time of the connect."""
        sock = socket.socket(fileno=descriptor)  # uvloop's socket object has no getsockopt
        try:
            pid, uid, _ = struct.unpack("3i", sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
        finally:
            sock.detach()
        return cls(pid, uid)

    def __str__(self) -> str:
        return f"uid={self.uid} pid={self.pid}"


class UnixListener:
    """A listening Unix socket of mode 0600 at a path. It replaces the socket of a predecessor without a gap.

    Args:
        path: the socket's path. Its folder exists.
        kind: SOCK_STREAM or SOCK_SEQPACKET.

    Raises:
        OSError: the path, which the error names, cannot be bound or replaced.
    """

    def __init__(self, path: Path, kind: int, backlog: int) -> None:
        self.path = path
        self.socket = socket.socket(socket.AF_UNIX, kind | socket.SOCK_NONBLOCK)
        # The new socket first gets its final mode and listens. Only then is it renamed to the path. So no client
        # connects to a socket that does not listen yet, and no other user can open the socket.
        making = path.with_name(f".{os.getpid()}")
        try:
            if len(os.fsencode(path)) > _LONGEST_PATH:  # the new name is shorter, but clients could not connect
                raise OSError(errno.ENAMETOOLONG, os.strerror(errno.ENAMETOOLONG))
            making.unlink(missing_ok=True)
            self.socket.bind(str(making))
            making.chmod(0o600)
            self.socket.listen(backlog)
            self._inode = making.stat().st_ino
            making.rename(path)
        except OSError as error:
            self.socket.close()
            with contextlib.suppress(OSError):
                making.unlink()
            raise OSError(error.errno or errno.EINVAL, error.strerror or str(error), str(path)) from error

    def remove(self) -> None:
        """Remove the path, unless it already belongs to a successor's socket. Call this before the socket is
        closed; idempotent.
        """
        # As long as the socket is open, no other file can have its inode number.
        with contextlib.suppress(FileNotFoundError):
            if self.path.stat().st_ino == self._inode:
                self.path.unlink()

    def close(self) -> None:
        """Remove the path like :meth:`remove`, and close the socket; idempotent."""
        self.remove()
        self.socket.close()
