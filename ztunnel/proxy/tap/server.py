"""The local socket that taps are asked for at, and through which captures leave.

It is a Unix socket of mode 0600, and the kernel additionally reports the peer's user (SO_PEERCRED of unix(7)),
which must be root. The protocol is HTTP/1.1, one request per connection: ``GET /tap?pod=...``
(:class:`ztunnel.proxy.tap.request.TapRequest`), answered by a capture in chunks for the duration of the tap, with
trailers that report how it ended. ``curl --unix-socket`` works as well as ``ztunnel tap``.

A tap ends when its time is over or its size is reached, when its reader closes its side of the connection (what
was captured until then still comes), and with the proxy. Its beginning and its end are lines of the log at level
warning, which name the reader.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
import stat
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Self

import h11

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
from ztunnel.proxy.tap.taps import (
    FLUSH_S,
    CannotTap,
    Carry,
    TapSource,
)
from ztunnel.runtime.clock import Clock
from ztunnel.runtime.http.page import Query
from ztunnel.runtime.tasks import Tasks

log = logging.getLogger(__name__)

_CONNECTIONS: Final = 16
_REQUEST_S: Final = 5.0
_READ_BYTES: Final = 64 * 1024
_PRIVACY: Final = "Decrypted streams of a pod: whoever has this file can read what its applications said."


@dataclass(frozen=True, slots=True)
class Reader:
    """The process at the other end of the socket, by the kernel's word.

    Attributes:
        pid: in our process namespace. 0 if it is not visible there.
        uid: in our namespace of users.
    """

    pid: int
    uid: int

    @classmethod
    def of(cls, descriptor: int) -> Reader:
        """Return the connected process. Its credentials are those at the time of the connect."""
        # A duplicate, because uvloop's socket object has no getsockopt.
        with socket.socket(fileno=os.dup(descriptor)) as sock:
            pid, uid, _ = struct.unpack("3i", sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
        return cls(pid, uid)

    def __str__(self) -> str:
        return f"uid={self.uid} pid={self.pid}"


class _Refusal(Exception):
    """A request gets an answer instead of a capture.

    Attributes:
        status: of the answer.
    """

    def __init__(self, status: int, text: str) -> None:
        super().__init__(text)
        self.status = status


class TapServer:
    """Listens while entered.

    Args:
        path: of the socket; its folder is made if need be. A successor's socket takes its place, and this one
            removes no other than its own.
        source: the proxy.
        clock: for times in captures.
        root: the user that may ask.

    Raises:
        TproxyError: from ``async with``: the socket cannot be made.
    """

    def __init__(self, path: Path, source: TapSource, clock: Clock, *, root: int = 0) -> None:
        self._path = path
        self._source = source
        self._clock = clock
        self._root = root
        self._tasks = Tasks("tap")
        self._taps: set[str] = set()
        self._server: asyncio.Server | None = None
        self._made: tuple[int, int] | None = None

    async def __aenter__(self) -> Self:
        path = self._path
        # Created under another name with its final mode, and then moved: others can never connect, and a successor
        # takes over without a gap.
        making = path.with_name(f".{os.getpid()}")  # short: an address of unix(7) has 107 bytes
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            if path.exists() and not stat.S_ISSOCK(path.lstat().st_mode):
                raise TproxyError(f"cannot listen for taps at {path}: it exists and is no socket")
            making.unlink(missing_ok=True)
            sock.bind(str(making))
            making.chmod(0o600)
            self._server = await asyncio.start_unix_server(self._accepted, sock=sock, backlog=_CONNECTIONS)
            found = making.stat()
            making.rename(path)
        except OSError as error:
            sock.close()
            raise TproxyError(f"cannot listen for taps at {path}: {error.strerror or error}") from error
        except TproxyError:
            sock.close()
            raise
        self._made = found.st_dev, found.st_ino
        log.warning("taps are permitted to root address=%s", path)
        return self

    async def __aexit__(self, *exception: object) -> None:
        if self._server is not None:
            self._server.close()
        await self._tasks.close()
        await asyncio.sleep(0)  # in which transports that were closed just now close their sockets
        with contextlib.suppress(OSError):
            found = self._path.stat()
            if (found.st_dev, found.st_ino) == self._made:
                self._path.unlink()

    def _accepted(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if len(self._tasks) >= _CONNECTIONS:
            writer.close()
            return
        self._tasks.start(self._serve(reader, writer), "request")

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Answer the one request of a connection."""
        answer = _Answer(reader, writer)
        try:
            try:
                asking = Reader.of(writer.get_extra_info("socket").fileno())
                # Read before it is judged: an answer that overtakes the request could be lost with the connection.
                async with asyncio.timeout(_REQUEST_S):
                    head = await answer.request()
                if asking.uid != self._root:
                    log.warning("tap refused %s: not root", asking)
                    raise _Refusal(403, "a tap is for root only")
                await self._tap(self._asked(head), asking, answer)
            except _Refusal as refusal:
                await answer.refuse(refusal.status, str(refusal))
            except h11.RemoteProtocolError as error:
                await answer.refuse(error.error_status_hint, str(error))
            except TimeoutError:
                await answer.refuse(408, "the request is not complete")
        except (OSError, h11.LocalProtocolError) as error:
            log.debug("a reader of a capture is gone: %s", error)
        finally:
            if answer.stuck:
                writer.transport.abort()
            else:
                writer.close()

    @staticmethod
    def _asked(head: h11.Request) -> TapRequest:
        path, _, query = head.target.decode("latin-1").partition("?")
        if path != PATH:
            raise _Refusal(404, f"no such page; this socket has {PATH}")
        if head.method != b"GET":
            raise _Refusal(405, f"GET {PATH}")
        try:
            return TapRequest.parse(dict(Query.parse(query).pairs))
        except BadRequest as error:
            raise _Refusal(400, str(error)) from None

    async def _tap(self, request: TapRequest, asking: Reader, answer: _Answer) -> None:
        if request.pod in self._taps:
            raise _Refusal(409, f"{request.pod} has a tap already")
        if len(self._taps) >= MOST_TAPS:
            raise _Refusal(503, f"there are {MOST_TAPS} taps already")
        # Before the first await: of two requests at once one has it.
        self._taps.add(request.pod)
        try:
            number = await self._source.open_connections(request.pod)
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
        running = _Running(request, self._source.carriers(), self._clock, answer)
        began_s = self._clock.monotonic()
        try:
            await answer.begin(number)
            await running.run()
            await answer.end(running.ended, running.totals)
        finally:
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


class _Running:
    """One tap, from its first byte to its last.

    Attributes:
        ended: why it has ended. Empty while it runs.
        totals: known at the end.
        written_bytes: of the capture.
    """

    def __init__(self, request: TapRequest, carriers: list[Carry], clock: Clock, answer: _Answer) -> None:
        self.ended = ""
        self.totals = Totals()
        self.written_bytes = 0
        self._request = request
        self._carriers = carriers
        self._clock = clock
        self._answer = answer
        self._over = asyncio.Event()
        self._full = False  # nothing more goes to the reader
        self._started_us = self._now_us()

    def _now_us(self) -> int:
        return int(self._clock.wall() * 1e6)

    def _end(self, reason: str) -> None:
        self.ended = self.ended or reason
        self._over.set()

    async def run(self) -> None:
        """Write the capture until the tap is over."""
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
                self._end("the time is over")
                for near in ours:
                    with contextlib.suppress(OSError):
                        near.shutdown(socket.SHUT_WR)
                # The packets captured so far are still written, if they are read in time.
                _, late = await asyncio.wait([*carrying, *copying], timeout=2 * FLUSH_S)
                for task in (*late, watching):
                    task.cancel()
        for task in carrying:
            if not task.cancelled():
                self.totals += task.result()
        async with asyncio.timeout(FLUSH_S):
            await self._write(self._tail())  # also beyond the limit: a reader learns from it what was dropped

    async def _carry(self, carry: Carry, sink: socket.socket) -> Totals:
        try:
            return await carry(self._request, sink)
        except CannotTap as error:
            self._end(str(error))
            return Totals()
        finally:
            sink.close()

    async def _copy(self, near: socket.socket) -> None:
        """Pass the blocks of one process on, until it has written its last; read away what cannot be passed on."""
        loop = asyncio.get_running_loop()
        blocks = pcapng.PacketBlocks()
        try:
            while data := await loop.sock_recv(near, _READ_BYTES):
                if not self._full:
                    await self._write(b"".join(self._fitting(blocks.receive(data))))
            self._end("the process that carries the pod has ended")
        except pcapng.BadBlock as error:
            log.error("a process that captures sent what is no packet: %s", error)
            self._end("a process that captures sent what is no packet")

    def _fitting(self, blocks: Iterator[bytes]) -> Iterator[bytes]:
        size = self.written_bytes
        for block in blocks:
            size += len(block)
            if size > self._request.limit_bytes:
                self._full = True
                self._end("the limit of its size is reached")
                return
            yield block

    async def _watch_reader(self) -> None:
        await self._answer.left()
        self._end("its reader has ended it")

    async def _write(self, data: bytes) -> None:
        if not data:
            return
        self.written_bytes += len(data)
        try:
            await self._answer.data(data)
        except OSError:
            self._full = True
            self._end("its reader is gone")

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


class _Answer:
    """One HTTP connection, which has one request and one answer.

    Attributes:
        stuck: its reader does not read, so a close would wait for it.
    """

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.stuck = False
        self._reader = reader
        self._writer = writer
        self._http = h11.Connection(h11.SERVER, max_incomplete_event_size=16 * 1024)

    async def request(self) -> h11.Request:
        """Return the request.

        Raises:
            h11.RemoteProtocolError: it is none, or too large.
        """
        request: h11.Request | None = None
        while True:
            event: Any = self._http.next_event()
            if event is h11.NEED_DATA:
                self._http.receive_data(await self._reader.read(_READ_BYTES))
            elif isinstance(event, h11.Request):
                request = event
            elif isinstance(event, h11.EndOfMessage) and request is not None:
                return request
            else:
                raise h11.RemoteProtocolError("a request without a body is expected")

    async def begin(self, number: int) -> None:
        """Send the head of a capture."""
        trailers = ", ".join((ENDED, STREAMS, PACKETS, DROPPED, DROPPED_BYTES))
        headers = [
            ("content-type", CONTENT_TYPE),
            (OPEN, str(number)),
            ("trailer", trailers),
            ("connection", "close"),
        ]
        self._writer.write(self._http.send(h11.Response(status_code=200, headers=headers)) or b"")

    async def data(self, data: bytes) -> None:
        """Send a part of a capture; returns when there is room for more.

        Raises:
            OSError: the reader is gone.
        """
        self.stuck = True
        self._writer.write(self._http.send(h11.Data(data=data)) or b"")
        await self._writer.drain()
        self.stuck = False

    async def left(self) -> None:
        """Return when the reader has closed the connection."""
        with contextlib.suppress(OSError):
            while await self._reader.read(_READ_BYTES):
                pass

    async def end(self, reason: str, totals: Totals) -> None:
        """Send the trailers."""
        values = (reason, totals.streams, totals.packets, totals.dropped, totals.dropped_bytes)
        names = (ENDED, STREAMS, PACKETS, DROPPED, DROPPED_BYTES)
        trailers = [(name, str(value)) for name, value in zip(names, values, strict=True)]
        self._writer.write(self._http.send(h11.EndOfMessage(headers=trailers)) or b"")
        async with asyncio.timeout(FLUSH_S):
            await self._writer.drain()

    async def refuse(self, status: int, text: str) -> None:
        """Send an answer without a capture, unless one has started."""
        if self._http.our_state not in (h11.IDLE, h11.SEND_RESPONSE):
            return
        data = text.encode() + b"\n"
        headers = [("content-type", "text/plain"), ("content-length", str(len(data))), ("connection", "close")]
        for event in (h11.Response(status_code=status, headers=headers), h11.Data(data=data), h11.EndOfMessage()):
            self._writer.write(self._http.send(event) or b"")
        await self._writer.drain()
