"""Sends messages with file descriptors over a Unix stream socket, between a proxy process and its successor.

A frame is its length (4 bytes), the number of its descriptors (2 bytes) and the message. Descriptors are sent as
ancillary data, and arrive in order with their frame. The kernel passes at most 253 descriptors per call, so a
frame with more descriptors needs several calls.
"""

from __future__ import annotations

import array
import asyncio
import contextlib
import os
import socket
import struct
from collections import deque
from collections.abc import Sequence
from typing import Final

from ztunnel.runtime.sockets import PeerProcess, ready

MAX_BYTES: Final = 64 * 1024 * 1024
"""The longest message in bytes: more than a connection's flow-control windows and output buffer together."""
MAX_DESCRIPTORS: Final = 4096
_HEADER: Final = struct.Struct("!IH")
_PER_CALL: Final = 250
_READ_BYTES: Final = 256 * 1024
_ANCILLARY: Final = socket.CMSG_SPACE(_PER_CALL * array.array("i").itemsize)


class RendezvousError(Exception):
    """The other process is not trusted, or sent an invalid message. The connection to it must end."""


class Parcel:
    """A received message with its file descriptors. :meth:`close` closes the descriptors that were not taken."""

    def __init__(self, data: bytes, descriptors: Sequence[int]) -> None:
        self.data = data
        self._descriptors = list(descriptors)

    def take_all(self) -> list[int]:
        """Return the descriptors, which the caller owns from now on."""
        taken, self._descriptors = self._descriptors, []
        return taken

    def close(self) -> None:
        """Close the descriptors that were not taken; idempotent."""
        for each in self.take_all():
            os.close(each)


class Rendezvous:
    """Exchanges messages over a connected, non-blocking Unix stream socket, which it owns.

    Args:
        sock: the socket.

    Raises:
        RendezvousError: the process at the other end runs as another user.
    """

    def __init__(self, sock: socket.socket) -> None:
        self._socket = sock
        self.peer = PeerProcess.of(sock.fileno())
        if self.peer.uid != os.geteuid():
            sock.close()
            raise RendezvousError(f"a process of another user ({self.peer})")
        self._received = bytearray()
        self._descriptors: deque[int] = deque()
        self._sending = asyncio.Lock()

    async def send(self, message: bytes, descriptors: Sequence[int] = ()) -> None:
        """Send a message with duplicates of the descriptors. If the call is cancelled, it leaves an incomplete
        frame, and the connection must be closed.

        Raises:
            OSError: the other process is gone.
        """
        async with self._sending:
            left = memoryview(_HEADER.pack(len(message), len(descriptors)) + message)
            waiting = list(descriptors)
            while left:
                batch, size = waiting[:_PER_CALL], len(left)
                if len(waiting) > len(batch):
                    size = 1  # leave bytes of this frame for the calls that send the remaining descriptors
                try:
                    if batch:
                        sent = socket.send_fds(self._socket, [left[:size]], batch, socket.MSG_NOSIGNAL)
                        del waiting[: len(batch)]
                    else:
                        sent = self._socket.send(left, socket.MSG_NOSIGNAL)
                except BlockingIOError:
                    await ready(self._socket, writing=True)
                    continue
                left = left[sent:]

    async def receive(self) -> Parcel | None:
        """Return the next message, or ``None`` when the other process is gone.

        Raises:
            RendezvousError: the frame is invalid, or descriptors were lost.
        """
        while True:
            parcel = self._parse()
            if parcel is not None:
                return parcel
            try:
                data, ancillary, flags, _ = self._socket.recvmsg(_READ_BYTES, _ANCILLARY, socket.MSG_CMSG_CLOEXEC)
            except BlockingIOError:
                await ready(self._socket, writing=False)
                continue
            except ConnectionError:
                return None
            for level, kind, payload in ancillary:
                if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                    found = array.array("i")
                    found.frombytes(payload[: len(payload) - len(payload) % found.itemsize])
                    self._descriptors.extend(found)
            if flags & socket.MSG_CTRUNC:
                raise RendezvousError("descriptors were lost on the way (is the limit of open files reached?)")
            if not data:
                return None
            self._received += data

    def _parse(self) -> Parcel | None:
        received = self._received
        if len(received) < _HEADER.size:
            return None
        size, count = _HEADER.unpack_from(received)
        if size > MAX_BYTES or count > MAX_DESCRIPTORS:
            raise RendezvousError(f"a message of {size} bytes and {count} descriptors")
        stop = _HEADER.size + size
        if len(received) < stop:
            return None
        if len(self._descriptors) < count:
            raise RendezvousError("a message without its descriptors")
        data = bytes(received[_HEADER.size : stop])
        del received[:stop]
        return Parcel(data, [self._descriptors.popleft() for _ in range(count)])

    def end(self) -> None:
        """Shut the connection down, so that both sides read EOF. :meth:`close` releases the socket. Idempotent."""
        with contextlib.suppress(OSError):  # the other side has closed it already
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Close the socket and the descriptors of incomplete messages; idempotent."""
        self._socket.close()
        while self._descriptors:
            os.close(self._descriptors.popleft())
