"""The taps of one process that carries connections.

A process has a :class:`Taps` only if the configuration permits taps. The data path looks up a pod once per
connection, when the connection begins. So a tap does not capture older connections.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Awaitable
from typing import Final, Protocol

from ztunnel.proxy.tap.capture import Capture
from ztunnel.proxy.tap.request import MOST_TAPS, Direction, TapRequest, Totals
from ztunnel.runtime.clock import Clock

#: The time limit for reading the rest of the queue after the end of a capture.
FLUSH_S: Final = 5.0


class CannotTap(Exception):
    """A tap cannot start or cannot continue; the text says why."""


class TapSource(Protocol):
    """A proxy with pods that can be tapped."""

    async def open_connections(self, pod: str) -> int:
        """Return the number of a pod's open connections.

        Raises:
            CannotTap: this proxy does not carry the pod.
        """

    def carriers(self) -> list[Carry]:
        """Return a capture function (``Carry``) for each process that carries connections."""


class Carry(Protocol):
    """Captures connections in one process; see :meth:`Taps.carry`."""

    def __call__(self, request: TapRequest, sink: socket.socket) -> Awaitable[Totals]:
        """Write packets to ``sink`` until its other end sends EOF, then close it."""


class Taps:
    """The taps of this process, by pod."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._captures: dict[str, Capture] = {}

    def __bool__(self) -> bool:
        return bool(self._captures)

    def of(self, pod: str) -> Capture | None:
        """Return the current tap of a pod, or None. The data path calls this for each new connection."""
        return self._captures.get(pod)

    async def carry(self, request: TapRequest, sink: socket.socket) -> Totals:
        """Capture a pod's new connections until the other end of ``sink`` sends EOF.

        Args:
            request: what to capture.
            sink: receives packet blocks of pcapng. A non-blocking stream socket, closed here.

        Raises:
            CannotTap: the pod has a tap, or there are too many.
        """
        with sink:
            if request.pod in self._captures:
                raise CannotTap(f"{request.pod} has a tap already")
            if len(self._captures) >= MOST_TAPS:
                raise CannotTap(f"there are {MOST_TAPS} taps already")
            wake = asyncio.Event()
            capture = self._captures[request.pod] = Capture(request, self._now_us, wake.set)
            try:
                async with asyncio.TaskGroup() as group:
                    watching = group.create_task(_watch(capture, sink, wake), name="tap: end")
                    await _write(capture, sink, wake)
                    watching.cancel()
            finally:
                del self._captures[request.pod]
                capture.discard()
            return _totals(capture)

    def _now_us(self) -> int:
        return int(self._clock.wall() * 1e6)


async def _watch(capture: Capture, sink: socket.socket, wake: asyncio.Event) -> None:
    """End a capture when its reader sends EOF. After that, the queued packets must be read within a time limit."""
    with contextlib.suppress(OSError):
        while await asyncio.get_running_loop().sock_recv(sink, 64):
            pass
    capture.end()
    wake.set()
    await asyncio.sleep(FLUSH_S)
    with contextlib.suppress(OSError):
        sink.shutdown(socket.SHUT_RDWR)  # the writer fails, and so ends


async def _write(capture: Capture, sink: socket.socket, wake: asyncio.Event) -> None:
    """Write packets until the capture has ended and its queue is empty, or its reader has disconnected.

    This is cancelled only when the process ends, because a truncated block would make the rest unreadable.
    """
    loop = asyncio.get_running_loop()
    with contextlib.suppress(OSError):
        while True:
            await wake.wait()
            wake.clear()
            while data := capture.take():
                await loop.sock_sendall(sink, data)
                capture.taken(len(data))
            if capture.ended:
                return


def _totals(capture: Capture) -> Totals:
    packets, dropped = capture.packets, capture.dropped
    return Totals(
        streams=capture.streams,
        outbound=packets[Direction.OUTBOUND],
        inbound=packets[Direction.INBOUND],
        outbound_dropped=dropped[Direction.OUTBOUND],
        inbound_dropped=dropped[Direction.INBOUND],
        dropped_bytes=capture.dropped_bytes,
    )
