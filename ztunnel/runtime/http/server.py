"""A small HTTP/1.1 server on TCP and Unix sockets: h11 parses and formats, asyncio's streams carry bytes.

It runs beside the data path and must not disturb it. The number of connections and the size and time of requests
are bounded, long pages are sent piece by piece, and a client that does not read is disconnected.
"""

import asyncio
import contextlib
import errno
import logging
import socket
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable
from email.utils import formatdate
from enum import IntEnum
from pathlib import Path
from typing import Any, Self

import h11

from tproxy.aio import sockets
from tproxy.errors import PortTaken
from xds.model.address import SocketAddress, canonical, is_loopback
from ztunnel.runtime.clock import Clock
from ztunnel.runtime.http.page import TEXT, Deferred, Page, PageRequest, Piece, Query, Repeated, Streamed, text
from ztunnel.runtime.line_limit import LineLimit
from ztunnel.runtime.sockets import PeerProcess, UnixListener
from ztunnel.runtime.tasks import Tasks

log = logging.getLogger(__name__)

Pages = Callable[[PageRequest], Page | Awaitable[Page]]

CONNECTIONS = 64
_MAX_HEAD = 16 * 1024
MAX_BODY = 64 * 1024
#: The time limit for a request's head after its first byte, like in the Rust ztunnel's servers.
_HEAD_TIMEOUT_S = 2.0
#: Idle connections are closed after this time. It is longer than usual scrape intervals, so that scrapers keep
#: their connections.
_IDLE_TIMEOUT_S = 75.0
#: The time limit for a whole request on a Unix socket, from the connect.
_LOCAL_REQUEST_S = 5.0
_WRITE_TIMEOUT_S = 30.0
_CLOSE_TIMEOUT_S = 1.0
_READ_BYTES = 8 * 1024
#: Pieces of a body are joined up to this size before they are written.
_WRITE_BYTES = 32 * 1024
#: The longest time for making pieces without yielding. It is about that of a busy iteration of the data path.
_SLICE_S = 0.002


class _Server(ABC):
    """Serves pages while entered.

    Args:
        name: name in logs: ``admin``, ``readiness``, ``metrics``.
        pages: called in the event loop with each request. Returns the page, or an awaitable with the page. It must
            not block; pieces of the body are made later.
        clock: the clock for the ``date`` header.
        max_connections: the largest number of connections. Above it a connection of the address with the most
            connections is closed, so that probes and scrapers are answered beside any number of slow clients. Its
            connections are closed in this order: idle, following an endless page, slow to send its request, slow
            to read its answer, with a streamed body. Among connections in the same state, the least recently
            active one is closed first.
        product: value of the ``server`` header.

    Attributes:
        answers: how often each status was the answer.
        request_s: if set, a connection has one request, which must be complete within this time. If None,
            connections are kept.
    """

    request_s: float | None = None

    def __init__(
        self,
        name: str,
        pages: Pages,
        clock: Clock,
        *,
        max_connections: int = CONNECTIONS,
        product: str = "ztunnel",
    ) -> None:
        self.name = name
        self.product = product
        self.answers: Counter[int] = Counter()
        self._pages = pages
        self._clock = clock
        self._max_connections = max_connections
        self._tasks = Tasks(name)
        self._connections: dict[_Connection, None] = {}  # in order of their last activity
        self._server: asyncio.Server | None = None
        self.connections_total = 0
        self._lines = LineLimit(
            clock, lambda count: log.warning("%s: further lines about closed connections left_out=%d", name, count)
        )

    @abstractmethod
    async def _listen(self) -> asyncio.Server:
        """Return a listening asyncio server that calls :meth:`accepted` for each connection."""

    async def __aenter__(self) -> Self:
        self._server = await self._listen()
        return self

    async def __aexit__(self, *exc: object) -> None:
        assert self._server is not None
        self._server.close()
        for connection in list(self._connections):
            connection.finish()
        # Answers can still be in progress, such as the one to /quitquitquit.
        answering = [connection.task for connection in self._connections if connection.task is not None]
        if answering:
            await asyncio.wait(answering, timeout=_CLOSE_TIMEOUT_S)
        await self._tasks.close()

    @property
    def connections(self) -> int:
        """The number of open connections."""
        return len(self._connections)

    def accepted(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Serve a connection. asyncio's servers call this."""
        self.connections_total += 1
        if len(self._connections) >= self._max_connections:
            self._make_room()
        connection = _Connection(self, reader, writer)
        self._connections[connection] = None
        connection.task = self._tasks.start(self._serve(connection), "connection")

    def _make_room(self) -> None:
        sources = Counter(connection.source for connection in self._connections)
        source, number = sources.most_common(1)[0]
        # Connections are in the order of their last activity. Of those at the lowest stage, min() returns the
        # first.
        oldest = min((c for c in self._connections if c.source == source), key=lambda c: c.stage)
        if oldest.stage is not Stage.IDLE and self._lines.admits():
            log.warning("%s: %d connections of %s are open, closing one", self.name, number, source)
        oldest.abort()
        self._connections.pop(oldest, None)

    async def _serve(self, connection: "_Connection") -> None:
        try:
            await connection.serve(self._pages)
        finally:
            self._connections.pop(connection, None)

    def active(self, connection: "_Connection") -> None:
        """Record a connection's activity. If one must be closed, the least recently active one is chosen."""
        if connection in self._connections:
            del self._connections[connection]
            self._connections[connection] = None

    def date(self) -> str:
        """Return the value of the ``date`` header."""
        return formatdate(self._clock.wall(), usegmt=True)


class PageServer(_Server):
    """Serves pages on one address while entered.

    Args:
        address: address to bind; port 0 lets the kernel choose.
        reuse_port: whether to share the port with another process of this program (SO_REUSEPORT). The newer
            process serves.
        alone: with ``reuse_port``, whether to fail if another socket is bound to the port, even if that socket
            shares it.

    Attributes:
        address: the bound address. Once entered, it has the actual port.

    Raises:
        PortTaken: on entering, another socket is bound to the port.
        tproxy.errors.TproxyError: on entering, any other refusal of the kernel.
    """

    def __init__(
        self,
        name: str,
        address: SocketAddress,
        pages: Pages,
        clock: Clock,
        *,
        max_connections: int = CONNECTIONS,
        product: str = "envoy",
        reuse_port: bool = False,
        alone: bool = False,
    ) -> None:
        super().__init__(name, pages, clock, max_connections=max_connections, product=product)
        self._reuse_port = reuse_port
        self._alone = alone
        self.address = address

    async def _listen(self) -> asyncio.Server:
        if self._alone:
            # Without SO_REUSEPORT, this bind fails even if the socket that is bound there has the option.
            sockets.listen(self.address.host, self.address.port, backlog=0).close()
        sock = sockets.listen(self.address.host, self.address.port, reuse_port=self._reuse_port)
        self.address = SocketAddress(self.address.host, sock.getsockname()[1])
        try:
            server = await asyncio.start_server(self.accepted, sock=sock, limit=_MAX_HEAD)
        except OSError as error:
            sock.close()
            if error.errno == errno.EADDRINUSE:
                raise PortTaken(self.address.host, self.address.port) from None
            raise
        if self._reuse_port:
            sockets.leave_to_newer(sock)
        log.info("%s on %s", self.name, self.address)
        return server


class LocalServer(_Server):
    """Serves one request per connection on a Unix socket of mode 0600 while entered.

    Args:
        path: the socket's path. Its folder is created if it is missing. A successor's socket can replace this one.

    Raises:
        OSError: on entering, the socket cannot be made.
    """

    request_s = _LOCAL_REQUEST_S

    def __init__(
        self, name: str, path: Path, pages: Pages, clock: Clock, *, max_connections: int = CONNECTIONS
    ) -> None:
        super().__init__(name, pages, clock, max_connections=max_connections)
        self.path = path
        self._listener: UnixListener | None = None

    async def _listen(self) -> asyncio.Server:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        backlog = self._max_connections
        listener = self._listener = UnixListener(self.path, socket.SOCK_STREAM, backlog)
        try:
            return await asyncio.start_unix_server(
                self.accepted, sock=listener.socket, limit=_MAX_HEAD, backlog=backlog
            )
        except BaseException:
            listener.close()
            raise

    async def __aexit__(self, *exc: object) -> None:
        assert self._listener is not None
        self._listener.remove()
        await super().__aexit__(*exc)


class Stage(IntEnum):
    """The state of a connection. Connections at lower stages are closed first, because that loses less."""

    IDLE = 0
    FOLLOWING = 1
    RECEIVING = 2
    ANSWERING = 3
    STREAMING = 4


class _Connection:
    """The connection of one client. If a body is streamed, it is also the
    :class:`~ztunnel.runtime.http.page.Sink`.
    """

    def __init__(self, server: _Server, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._server = server
        self._reader = reader
        self._writer = writer
        self._http = h11.Connection(h11.SERVER, max_incomplete_event_size=_MAX_HEAD)
        self._unsent: list[bytes] = []
        self._finishing = server.request_s is not None
        self.stage = Stage.IDLE
        # With this limit, drain() waits until the kernel has taken all bytes, so drain's time limit also covers
        # the end of an answer.
        writer.transport.set_write_buffer_limits(high=0)
        peer = writer.get_extra_info("peername")
        self.source = str(peer[0]) if peer else ""
        self.task: asyncio.Task[Any] | None = None

    def finish(self) -> None:
        """Close the connection after the current response, or at once if there is none or it is endless.
        Idempotent.
        """
        self._finishing = True
        if self.stage in (Stage.IDLE, Stage.FOLLOWING, Stage.STREAMING) and self.task is not None:
            self.task.cancel()

    def abort(self) -> None:
        """Close the connection at once; idempotent."""
        self._finishing = True
        if self.stage is not Stage.IDLE:
            self._writer.transport.abort()  # close() would wait for bytes that the client does not read
        if self.task is not None:
            self.task.cancel()

    async def serve(self, pages: Pages) -> None:
        """Answer requests until either side closes the connection."""
        try:
            while (request := await self._request()) is not None:
                self._server.active(self)
                self.stage = Stage.ANSWERING
                page = await self._page(pages, request)
                try:
                    await self._answer(request, page)
                finally:
                    if page.rest is not None:
                        page.rest.ended()
                if self._finishing or (self._http.our_state, self._http.their_state) != (h11.DONE, h11.DONE):
                    return
                self._http.start_next_cycle()
        except h11.RemoteProtocolError as error:
            await self._refuse(error)
        except TimeoutError:
            self._writer.transport.abort()
        except OSError as error:
            log.debug("%s: %s", self._server.name, error)
        finally:
            if self._writer.transport.get_write_buffer_size():
                self._writer.transport.abort()  # the client does not read, and close() would wait for it
            self._writer.close()

    async def _page(self, pages: Pages, request: PageRequest) -> Page:
        try:
            page = pages(request)
            return page if isinstance(page, Page) else await page
        except Exception:
            # A bug in one page must neither end the proxy nor the connection.
            log.exception("%s: %s %r failed", self._server.name, request.method, request.path)
            return text("internal error\n", 500)

    # Reading

    async def _event(self) -> Any:
        while (event := self._http.next_event()) is h11.NEED_DATA:
            self._http.receive_data(await self._reader.read(_READ_BYTES))
        return event

    async def _request(self) -> PageRequest | None:
        """Return the next request, or None if the client has closed the connection.

        Raises:
            TimeoutError: the client was idle for too long, or sent its request too slowly.
            h11.RemoteProtocolError: the request is not HTTP, is too large, or is not complete within
                ``request_s``.
        """
        if self._server.request_s is None:
            return await self._next_request(_HEAD_TIMEOUT_S)
        try:
            async with asyncio.timeout(self._server.request_s):
                return await self._next_request(None)
        except TimeoutError:
            raise h11.RemoteProtocolError("the request is not complete", error_status_hint=408) from None

    async def _next_request(self, head_timeout_s: float | None) -> PageRequest | None:
        self.stage = Stage.RECEIVING if self._http.trailing_data[0] else Stage.IDLE
        if self.stage is Stage.IDLE:
            async with asyncio.timeout(_IDLE_TIMEOUT_S):
                data = await self._reader.read(_READ_BYTES)
            self.stage = Stage.RECEIVING
            self._http.receive_data(data)
        async with asyncio.timeout(head_timeout_s):
            head = await self._event()
            if not isinstance(head, h11.Request):
                return None
            if self._http.they_are_waiting_for_100_continue:
                self._send(h11.InformationalResponse(status_code=100, headers=[], reason=b"Continue"))
                await self._drain()
            body = b""
            while isinstance(event := await self._event(), h11.Data):
                body += event.data
                if len(body) > MAX_BODY:
                    raise h11.RemoteProtocolError(f"a body of more than {MAX_BODY} bytes", error_status_hint=413)
        return _page_request(head, body, local=self._is_local(), process=self._process())

    def _is_local(self) -> bool:
        # Check the addresses of both ends, because a sidecar proxy forwards external connections from a loopback
        # address.
        names = [self._writer.get_extra_info(end) for end in ("peername", "sockname")]
        return all(isinstance(name, tuple) and is_loopback(canonical(str(name[0]))) for name in names)

    def _process(self) -> PeerProcess | None:
        if not isinstance(self._server, LocalServer):
            return None
        return PeerProcess.of(self._writer.get_extra_info("socket").fileno())

    # Writing

    async def _answer(self, request: PageRequest, page: Page) -> None:
        headers = [
            ("content-type", page.content_type),
            ("cache-control", "no-cache, max-age=0"),
            ("x-content-type-options", "nosniff"),
            *page.headers,
            ("date", self._server.date()),
            ("server", self._server.product),
        ]
        if self._finishing:
            headers.append(("connection", "close"))
        self._respond(page.status, headers)
        trailers: list[tuple[str, str]] = []
        if request.method != "HEAD":
            await self._send_body(page.body)
            match page.rest:
                case Repeated():
                    await self._follow(page.rest)
                    return
                case Streamed():
                    await self._drain()
                    self.stage = Stage.STREAMING
                    trailers = await page.rest.send(self)
        self._send(h11.EndOfMessage(headers=trailers))
        await self._drain()

    async def data(self, data: bytes) -> None:
        """Send one piece of a streamed body."""
        self._writer.write(self._http.send(h11.Data(data=data)) or b"")
        await self._writer.drain()

    async def left(self) -> None:
        """Return when the client has closed its side of the connection."""
        with contextlib.suppress(OSError):
            while await self._reader.read(_READ_BYTES):
                pass

    async def _send_body(self, pieces: Iterable[Piece]) -> None:
        loop = asyncio.get_running_loop()
        slice_ends = loop.time() + _SLICE_S
        waiting: list[bytes] = []
        size = 0
        for piece in pieces:
            made = await asyncio.to_thread(piece.make) if isinstance(piece, Deferred) else piece
            # A lone surrogate must not make the encoding fail.
            data = made.encode(errors="backslashreplace") if isinstance(made, str) else made
            waiting.append(data)
            size += len(data)
            if size >= _WRITE_BYTES or loop.time() >= slice_ends:
                self._send_data(waiting)
                await self._drain()
                await asyncio.sleep(0)
                slice_ends = loop.time() + _SLICE_S
                waiting, size = [], 0
        self._send_data(waiting)

    async def _follow(self, repeated: Repeated) -> None:
        """Send pieces until the client leaves, or until the server ends, which cancels this.

        A client that sends bytes during the answer is not a browser, and is treated as if it had closed.
        """
        self.stage = Stage.FOLLOWING
        await self._drain()  # send the head now, because the first piece can take long
        while not self._finishing:
            try:
                piece = await repeated.make()
            except Exception:
                # A bug in one page must not end the proxy. A browser connects again later.
                log.exception("%s: an endless page failed", self._server.name)
                return
            self._send_data([piece.encode(errors="backslashreplace")])
            await self._drain()
            try:
                async with asyncio.timeout(repeated.every_s()):
                    await self._reader.read(1)
                return
            except TimeoutError:
                self._server.active(self)

    def _send_data(self, waiting: list[bytes]) -> None:
        data = b"".join(waiting)
        if data:
            self._send(h11.Data(data=data))

    def _respond(self, status: int, headers: list[tuple[str, str]]) -> None:
        self._server.answers[status] += 1
        # Header values are passed as bytes, because h11 encodes texts as ASCII: a probed application's content
        # type can have other characters.
        encoded = [(name.encode(), value.encode("latin-1", "replace")) for name, value in headers]
        self._send(h11.Response(status_code=status, headers=encoded, reason=_REASONS.get(status, b"")))

    def _send(self, event: Any) -> None:
        data = self._http.send(event)
        if data:
            self._unsent.append(data)

    async def _drain(self) -> None:
        # The head and the body of a short page are written together, so that they are sent in one segment.
        self._writer.write(b"".join(self._unsent))
        self._unsent.clear()
        async with asyncio.timeout(_WRITE_TIMEOUT_S):
            await self._writer.drain()

    async def _refuse(self, error: h11.RemoteProtocolError) -> None:
        """Answer a request that is not HTTP with an error. If an answer was already started, send no error."""
        if self._http.our_state not in (h11.IDLE, h11.SEND_RESPONSE):
            return
        headers = [("content-type", TEXT), ("date", self._server.date()), ("connection", "close")]
        with contextlib.suppress(h11.LocalProtocolError, OSError, TimeoutError):
            self._respond(error.error_status_hint, headers)
            self._send(h11.Data(data=f"{error}\n".encode(errors="backslashreplace")))
            self._send(h11.EndOfMessage())
            await self._drain()


_REASONS = {
    200: b"OK",
    400: b"Bad Request",
    403: b"Forbidden",
    404: b"Not Found",
    405: b"Method Not Allowed",
    408: b"Request Timeout",
    409: b"Conflict",
    413: b"Payload Too Large",
    431: b"Request Header Fields Too Large",
    500: b"Internal Server Error",
    503: b"Service Unavailable",
}


def _page_request(head: h11.Request, body: bytes, *, local: bool, process: PeerProcess | None) -> PageRequest:
    target = head.target.decode("latin-1")
    if "://" in target.partition("?")[0]:  # absolute form (RFC 9112, 3.2.2)
        target = "/" + target.partition("://")[2].partition("/")[2]
    target = target.partition("#")[0]
    path, _, query = target.partition("?")
    fields = {name.decode("latin-1"): value.decode("latin-1") for name, value in head.headers}
    parameters = Query.parse(query)
    if head.method == b"POST" and fields.get("content-type", "").startswith("application/x-www-form-urlencoded"):
        # The forms of the home page send parameters in the body, like Envoy's.
        parameters = Query(parameters.pairs + Query.parse(body.decode(errors="replace")).pairs)
    return PageRequest(
        method=head.method.decode("latin-1"),
        path=path,
        target=target,
        query=parameters,
        accept=fields.get("accept", ""),
        accept_encoding=fields.get("accept-encoding", ""),
        local=local,
        host=fields.get("host", ""),
        fetch_site=fields.get("sec-fetch-site", ""),
        body=body,
        process=process,
    )
