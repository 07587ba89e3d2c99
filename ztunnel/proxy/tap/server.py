"""The local socket that accepts requests for taps and sends captures.

It is a Unix socket of mode 0600, and the kernel additionally reports the peer's user (SO_PEERCRED of unix(7)),
which must be root. The protocol is HTTP/1.1, one request per connection: ``GET /tap?pod=...``
(:class:`ztunnel.proxy.tap.request.TapRequest`), answered by a capture in chunks for the duration of the tap, with
trailers that report how it ended. ``curl --unix-socket`` works as well as ``ztunnel tap``.

A tap ends at its time or size limit, with the proxy, or when its reader closes its side of the connection (packets
captured until then are still sent). The log has a line at level warning for its beginning and for its end, which
names the reader.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Final, Self

from tproxy.errors import TproxyError
from ztunnel import __version__
from ztunnel.proxy.tap import pcapng
from ztunnel.proxy.tap.capture import interface_of
from ztunnel.proxy.tap.request import (
    CONTENT_TYPE,
    DROPPED,
    DROPPED_BYTES,
    ENDED,
    MOST_TAPS,
    OPEN,
    PACKETS,
    PATH,
    STREAMS,
    BadRequest,
    Direction,
    TapRequest,
    Totals,
)
from ztunnel.proxy.tap.taps import FLUSH_S, CannotTap, Carry, TapSource
from ztunnel.runtime.clock import Clock
from ztunnel.runtime.http.page import PLAIN, Page, PageRequest, Sink, Streamed, text
from ztunnel.runtime.http.server import LocalServer
from ztunnel.runtime.sockets import PeerProcess

log = logging.getLogger(__name__)

_CONNECTIONS: Final = 16
_READ_BYTES: Final = 64 * 1024
_TRAILERS: Final = (ENDED, STREAMS, PACKETS, DROPPED, DROPPED_BYTES)
_PRIVACY: Final = "Decrypted streams of a pod: this file contains its applications' data in plain text."


class _Refusal(Exception):
    """A request is refused. The text is the response's body.

    Attributes:
        status: the HTTP status of the answer.
    """

    def __init__(self, status: int, text: str) -> None:
        super().__init__(text)
        self.status = status


class TapServer(LocalServer):
    """Listens while entered.

    Args:
        path: the socket's path. Its folder is created if it is missing. A successor's socket can replace this one
            at the path; this process removes only its own.
        source: the proxy.
        clock: the clock of capture times.
        root: the id of the user that can request taps.

    Raises:
        TproxyError: raised by ``async with``: the socket cannot be created.
    """

    def __init__(self, path: Path, source: TapSource, clock: Clock, *, root: int = 0) -> None:
        super().__init__("tap", path, self._answer, clock, max_connections=_CONNECTIONS)
        self._source = source
        self._root = root
        self._taps: set[str] = set()

    async def __aenter__(self) -> Self:
        path = self.path
        try:
            if path.exists() and not stat.S_ISSOCK(path.lstat().st_mode):
                raise TproxyError(f"cannot listen for taps at {path}: it exists and is no socket")
            await super().__aenter__()
        except OSError as error:
            raise TproxyError(f"cannot listen for taps at {path}: {error.strerror or error}") from error
        log.warning("taps are permitted to root address=%s", path)
        return self

    async def _answer(self, request: PageRequest) -> Page:
        asking = request.process
        assert asking is not None
        try:
            if asking.uid != self._root:
                log.warning("tap refused %s: not root", asking)
                raise _Refusal(403, "a tap is for root only")
            return await self._tap(self._asked(request), asking)
        except _Refusal as refusal:
            return text(f"{refusal}\n", refusal.status, PLAIN)

    @staticmethod
    def _asked(request: PageRequest) -> TapRequest:
        if request.path != PATH:
            raise _Refusal(404, f"no such page; this socket has {PATH}")
        if request.method != "GET":
            raise _Refusal(405, f"GET {PATH}")
        if request.body:
            raise _Refusal(400, "a request without a body is expected")
        try:
            return TapRequest.parse(dict(request.query.pairs))
        except BadRequest as error:
            raise _Refusal(400, str(error)) from None

    async def _tap(self, request: TapRequest, asking: PeerProcess) -> Page:
        if request.pod in self._taps:
            raise _Refusal(409, f"{request.pod} has a tap already")
        if len(self._taps) >= MOST_TAPS:
            raise _Refusal(503, f"there are {MOST_TAPS} taps already")
        # The pod is added before the first await, so that two simultaneous requests cannot both tap it.
        self._taps.add(request.pod)
        try:
            number = await self._source.open_connections(request.pod)
            carriers = self._source.carriers()
        except BaseException as error:
            self._taps.discard(request.pod)
            if isinstance(error, CannotTap):
                raise _Refusal(404, str(error)) from None
            raise
        shown = f"pod={request.pod} port={request.port or 'any'} peer={request.peer or 'any'} {asking}"
        log.warning(
            "tap begins %s for=%gs limit=%d open_connections=%d",
            shown,
            request.for_s,
            request.limit_bytes,
            number,
        )
        running = _Running(request, carriers, self._clock)
        began_s = self._clock.monotonic()

        def ended() -> None:
            self._taps.discard(request.pod)
            log.warning(
                "tap ends %s reason=%r duration=%.1fs bytes=%d streams=%d packets=%d dropped=%d",
                shown,
                running.ended or "the proxy stops",
                self._clock.monotonic() - began_s,
                running.written_bytes,
                running.totals.streams,
                running.totals.packets,
                running.totals.dropped,
            )

        headers = ((OPEN, str(number)), ("trailer", ", ".join(_TRAILERS)))
        return Page(content_type=CONTENT_TYPE, headers=headers, rest=Streamed(send=running.run, ended=ended))


class _Running:
    """One tap, from its first byte to its last.

    Attributes:
        ended: why it has ended. Empty while it runs.
        totals: the capture's totals, known at its end.
        written_bytes: the bytes written so far.
    """

    def __init__(self, request: TapRequest, carriers: list[Carry], clock: Clock) -> None:
        self.ended = ""
        self.totals = Totals()
        self.written_bytes = 0
        self._request = request
        self._carriers = carriers
        self._clock = clock
        self._over = asyncio.Event()
        self._full = False  # whether the size limit is reached, so that no more packets are written
        self._started_us = self._now_us()

    def _now_us(self) -> int:
        return int(self._clock.wall() * 1e6)

    def _end(self, reason: str) -> None:
        self.ended = self.ended or reason
        self._over.set()

    async def run(self, reader: Sink) -> list[tuple[str, str]]:
        """Write the capture until the tap has ended, and return the trailers."""
        self._reader = reader
        await self._write(self._head())
        async with contextlib.AsyncExitStack() as sockets:
            ours = []
            async with asyncio.TaskGroup() as group:
                carrying, copying = [], []
                for carry in self._carriers:
                    near, far = socket.socketpair()
                    near.setblocking(False)
                    far.setblocking(False)
                    ours.append(sockets.enter_context(near))
                    carrying.append(group.create_task(self._carry(carry, far), name="tap: carry"))
                    copying.append(group.create_task(self._copy(near), name="tap: copy"))
                watching = group.create_task(self._watch_reader(), name="tap: reader")
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(self._request.for_s):
                        await self._over.wait()
                self._end("the time limit is reached")
                for near in ours:
                    with contextlib.suppress(OSError):
                        near.shutdown(socket.SHUT_WR)
                # The packets captured so far are still written, if the reader takes them in time.
                _, late = await asyncio.wait([*carrying, *copying], timeout=2 * FLUSH_S)
                for task in (*late, watching):
                    task.cancel()
        for task in carrying:
            if not task.cancelled():
                self.totals += task.result()
        async with asyncio.timeout(FLUSH_S):
            await self._write(self._tail())  # even beyond the size limit: it counts dropped packets
        totals = self.totals
        values = (self.ended, totals.streams, totals.packets, totals.dropped, totals.dropped_bytes)
        return [(name, str(value)) for name, value in zip(_TRAILERS, values, strict=True)]

    async def _carry(self, carry: Carry, sink: socket.socket) -> Totals:
        try:
            return await carry(self._request, sink)
        except CannotTap as error:
            self._end(str(error))
            return Totals()
        finally:
            sink.close()

    async def _copy(self, near: socket.socket) -> None:
        """Forward one process's blocks until it sends no more. Blocks that cannot be forwarded are discarded."""
        loop = asyncio.get_running_loop()
        blocks = pcapng.PacketBlocks()
        try:
            while data := await loop.sock_recv(near, _READ_BYTES):
                if not self._full:
                    await self._write(b"".join(self._fitting(blocks.receive(data))))
            self._end("the process that carries the pod has ended")
        except pcapng.BadBlock as error:
            log.error("a capturing process sent an invalid packet block: %s", error)
            self._end("a capturing process sent an invalid packet block")

    def _fitting(self, blocks: Iterator[bytes]) -> Iterator[bytes]:
        size = self.written_bytes
        for block in blocks:
            size += len(block)
            if size > self._request.limit_bytes:
                self._full = True
                self._end("the size limit is reached")
                return
            yield block

    async def _watch_reader(self) -> None:
        await self._reader.left()
        self._end("the reader has ended it")

    async def _write(self, data: bytes) -> None:
        if not data:
            return
        self.written_bytes += len(data)
        try:
            await self._reader.data(data)
        except OSError:
            self._full = True
            self._end("the reader has disconnected")

    def _head(self) -> bytes:
        request = self._request
        head = pcapng.section(f"ztunnel {__version__}", f"Tap of {request}. {_PRIVACY}")
        for direction in Direction:
            towards = "that the pod opened" if direction is Direction.OUTBOUND else "that the pod accepted"
            head += pcapng.interface(f"{request.pod} {direction}", f"Connections {towards}, decrypted")
        return head

    def _tail(self) -> bytes:
        totals, now_us = self.totals, self._now_us()
        counts = {
            Direction.OUTBOUND: (totals.outbound, totals.outbound_dropped),
            Direction.INBOUND: (totals.inbound, totals.inbound_dropped),
        }
        comment = f"{totals.streams} connections; {self.ended}"
        if totals.dropped:
            dropped = f"{totals.dropped} packets with {totals.dropped_bytes} bytes were dropped"
            comment += f"; {dropped}: the reader was too slow"
        return b"".join(
            pcapng.statistics(
                interface_of(direction),
                started_us=self._started_us,
                ended_us=now_us,
                packets=packets,
                dropped=dropped,
                comment=comment,
            )
            for direction, (packets, dropped) in counts.items()
        )
