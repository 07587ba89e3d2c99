"""Keeps a socket open for a second, without reading, after its connection was ended for violating a protocol
limit.

A peer whose connection is closed after GOAWAY can reconnect at once, and each reconnect costs a handshake. While
the old connection seems to be open, the peer waits, and the bytes that it sends only fill the kernel's buffer.
Envoy does the same.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections import deque
from typing import Final

LINGER_S: Final = 1.0
#: The largest number of kept sockets in a process. Above this number, the oldest socket is closed.
MOST: Final = 256


class Lingering:
    """The sockets of one poller that are kept open before they are closed. This object owns them."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._kept: deque[tuple[float, socket.SocketType]] = deque()
        self._timer: asyncio.TimerHandle | None = None

    def __len__(self) -> int:
        return len(self._kept)

    def keep(self, sock: socket.SocketType) -> None:
        """Take over a socket that the poller does not watch: send FIN now, and close it later."""
        with contextlib.suppress(OSError):  # the peer has reset it
            sock.shutdown(socket.SHUT_WR)
        if len(self._kept) >= MOST:
            self._kept.popleft()[1].close()
        self._kept.append((self._loop.time() + LINGER_S, sock))
        if self._timer is None:
            self._timer = self._loop.call_later(LINGER_S, self._close_due)

    def _close_due(self) -> None:
        self._timer = None
        now_s = self._loop.time()
        while self._kept and self._kept[0][0] <= now_s:
            self._kept.popleft()[1].close()
        if self._kept:
            self._timer = self._loop.call_at(self._kept[0][0], self._close_due)

    def close(self) -> None:
        """Close all kept sockets; idempotent."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        while self._kept:
            self._kept.popleft()[1].close()
