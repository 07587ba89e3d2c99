"""The server's side of a connection: each request is handled by a fiber, and the connection owns them."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Awaitable, Callable, Coroutine, Iterable
from typing import Any, Protocol, TypeAlias

from hbone.aio.connection import Connection
from hbone.aio.connection_settings import ConnectionSettings
from hbone.aio.fiber import Fiber
from hbone.aio.poller import Poller
from hbone.aio.relay import LINGER_S
from hbone.aio.tunnel import Tunnel
from hbone.errors import ErrorCode, LocalProtocolError, TunnelBroken
from hbone.events import Header, RequestHead
from hbone.settings import Role
from hbone.tls_context import TlsContext

logger = logging.getLogger(__name__)


class Request:
    """A request that waits for its answer. It need not be CONNECT: the handler answers 404 or 400 to other
    methods.
    """

    __slots__ = ("_requests", "_tunnel", "answered", "connection", "ended", "head")

    def __init__(
        self, requests: Requests, connection: Connection, tunnel: Tunnel, head: RequestHead, *, ended: bool
    ) -> None:
        self._requests = requests
        self.connection = connection
        self.head = head
        self.ended = ended
        """Whether the client sent END_STREAM with the request."""
        self.answered = False
        self._tunnel = tunnel

    @property
    def gone(self) -> bool:
        """Whether the client reset the stream, or the connection ended."""
        return self._tunnel.gone

    def accept(self, headers: Iterable[Header] = ()) -> Tunnel:
        """Answer 200 and return the stream as a tunnel, which the caller closes.

        Raises:
            TunnelBroken: the stream has ended.
            LocalProtocolError: the request was already answered, or is not a CONNECT.
        """
        if not self.head.is_tunnel:
            raise LocalProtocolError("only CONNECT can become a tunnel")
        self._answer()
        self.connection.engine.respond(self._tunnel.stream_id, 200, headers)
        self.connection.poller.schedule_flush(self.connection)
        return self._tunnel

    def refuse(
        self,
        status: int,
        headers: Iterable[Header] = (),
        body: bytes = b"",
        reset_code: int = ErrorCode.NO_ERROR,
    ) -> None:
        """Answer and end the stream; reset it as well when the client has not ended it.

        The default is the Rust ztunnel's answer (END_STREAM, RST_STREAM(NO_ERROR)). Envoy's 503 has a body and
        CONNECT_ERROR. Has no effect on a closed stream.
        """
        if self.gone:
            self.answered = True
            return
        self._answer()
        connection, stream_id = self.connection, self._tunnel.stream_id
        connection.engine.respond(stream_id, status, headers, body=body, ended=True, reset_code=reset_code)
        connection.poller.schedule_flush(connection)
        self._tunnel.close()

    def reset(self, code: int) -> None:
        """Send RST_STREAM instead of an answer."""
        self.answered = True
        self.connection.reset(self._tunnel, code)
        self._tunnel.close()

    def over(self) -> None:
        """Release the stream. Whoever took the request by :data:`TakeNow` calls this once, as its last step."""
        self._requests._over(self, self._tunnel)

    def _answer(self) -> None:
        if self.answered:
            raise LocalProtocolError("the request was answered before")
        self.answered = True
        if self.gone:
            raise TunnelBroken("the client gave up before the answer")


Handler: TypeAlias = Callable[[Request], Awaitable[None]]


class Cancellable(Protocol):
    """The owner of a request: a fiber, or an object that accepted it by :data:`TakeNow`."""

    def cancel(self, msg: str | None = None) -> object:
        """Cancel the work: the stream ended before its response, or the connection is over."""


#: Accepts a request without a coroutine, and calls :meth:`Request.over` at its end, possibly at once.
#: ``None`` leaves the request to the handler.
TakeNow: TypeAlias = Callable[[Request], Cancellable | None]


class _Waiting:
    """A request of the current read. Its work begins when the poller has handled the turn's events."""

    __slots__ = ("_request", "_requests", "_tunnel", "cancelled")

    def __init__(self, requests: Requests, request: Request, tunnel: Tunnel) -> None:
        self._requests = requests
        self._request = request
        self._tunnel = tunnel
        self.cancelled: str | None = None

    def cancel(self, msg: str | None = None) -> None:
        self.cancelled = msg or "cancelled"

    def step(self) -> None:
        self._requests._begin(self._request, self._tunnel, self.cancelled)


class Requests:
    """The requests of one connection that are in progress."""

    def __init__(self, handler: Handler, take_now: TakeNow | None = None) -> None:
        self._handler = handler
        self._take_now = take_now
        self._running: dict[Tunnel, tuple[Request | None, Cancellable]] = {}
        self._emptied: asyncio.Future[None] | None = None

    def start(self, connection: Connection, tunnel: Tunnel, head: RequestHead, *, ended: bool) -> None:
        request = Request(self, connection, tunnel, head, ended=ended)
        if self._take_now is None:
            self._handle(request, tunnel)
        else:
            waiting = _Waiting(self, request, tunnel)
            self._running[tunnel] = request, waiting
            connection.poller.call_soon(waiting)

    def _begin(self, request: Request, tunnel: Tunnel, cancelled: str | None) -> None:
        if cancelled is not None:
            self._handle(request, tunnel).cancel(cancelled)
            return
        assert self._take_now is not None
        try:
            taken = self._take_now(request)
        except Exception:
            logger.exception("request handler failed")
            self._over(request, tunnel)
            return
        if taken is None:
            self._handle(request, tunnel)
        elif tunnel in self._running:
            self._running[tunnel] = request, taken

    def _handle(self, request: Request, tunnel: Tunnel) -> Fiber:
        fiber = Fiber(request.connection.poller, self._run(request, tunnel), f"request {tunnel.stream_id}")
        self._running[tunnel] = request, fiber
        return fiber

    def adopt(self, tunnel: Tunnel, work: Coroutine[Any, Any, None]) -> None:
        """Run ``work`` for a tunnel that another process accepted; ``work`` must not raise."""
        fiber = Fiber(tunnel.poller, self._run_adopted(tunnel, work), f"request {tunnel.stream_id}")
        self._running[tunnel] = None, fiber

    async def _run_adopted(self, tunnel: Tunnel, work: Coroutine[Any, Any, None]) -> None:
        try:
            await work
        except asyncio.CancelledError:
            pass  # by wait(), as in _run
        except Exception:
            logger.exception("a moved tunnel failed")
        finally:
            tunnel.close()
            self._forget(tunnel)

    def cancel(self, tunnel: Tunnel) -> None:
        """Cancel the handler of a request that the peer has reset.

        After the answer the stream is the handler's tunnel, whose relay still delivers what was received.
        """
        entry = self._running.get(tunnel)
        if entry is not None and entry[0] is not None and not entry[0].answered:
            entry[1].cancel("the client gave up")

    async def _run(self, request: Request, tunnel: Tunnel) -> None:
        try:
            await self._handler(request)
        except asyncio.CancelledError:
            pass  # cancelled by cancel() or wait(); no other caller needs the CancelledError
        except TunnelBroken as error:
            # HEADERS and RST_STREAM can arrive in one read: then the stream is closed before the first step of
            # this fiber, and a handler without an await was not cancelled.
            if not request.gone:
                logger.exception("request handler failed")
            else:
                logger.debug("request handler met a stream that is gone: %s", error)
        except Exception:
            logger.exception("request handler failed")
        finally:
            self._over(request, tunnel)

    def _over(self, request: Request, tunnel: Tunnel) -> None:
        if not (request.answered or request.gone):
            request.reset(ErrorCode.INTERNAL_ERROR)
        else:
            tunnel.close()
        self._forget(tunnel)

    def _forget(self, tunnel: Tunnel) -> None:
        self._running.pop(tunnel, None)
        if self._emptied is not None and not self._running and not self._emptied.done():
            self._emptied.set_result(None)

    async def wait(self, *, cancel: bool, timeout_s: float | None = None) -> None:
        """Wait until every request is over. ``cancel`` cancels them; otherwise they deliver received bytes
        first.
        """
        for tunnel, (_, work) in list(self._running.items()):
            tunnel.end_discarding()
            if cancel:
                work.cancel()
        if self._running:
            self._emptied = asyncio.get_running_loop().create_future()
            await asyncio.wait([self._emptied], timeout=timeout_s)


async def serve_connection(
    sock: socket.SocketType,
    tls_context: TlsContext | None,
    settings: ConnectionSettings,
    poller: Poller,
    on_request: Handler,
    *,
    take_now: TakeNow | None = None,
    on_established: Callable[[Connection], None] | None = None,
) -> None:
    """Serve one accepted, non-blocking socket until the connection and all its handlers are over.

    Args:
        sock: belongs to this call.
        tls_context: None: cleartext HTTP/2 with prior knowledge.
        settings: times and windows.
        poller: this loop's poller.
        on_request: runs as a fiber per request, and must answer it. Owns the accepted tunnel, which is closed when
            the handler returns. Cancelled when the stream ends before the answer.
        take_now: called first for each request. If it accepts the request, ``on_request`` is not called.
        on_established: gets the connection (and its ``facts``) before any HTTP/2 frame is read, or sent except
            SETTINGS. It can keep the connection for ``drain``, ``abort`` or ``close``, and can raise to close the
            connection without an answer.

    Raises:
        TlsError, PeerSilent, ConnectionBroken: the handshake failed.
        Exception: what ``on_established`` raised.
    """
    requests = Requests(on_request, take_now)
    connection = Connection(
        Role.SERVER, sock, tls_context, settings, poller, requests=requests, on_established=on_established
    )
    try:
        await connection.establish()
        await serve_to_end(connection, requests)
    finally:
        connection.abort("no longer served")
        await requests.wait(cancel=True)


async def serve_to_end(connection: Connection, requests: Requests) -> None:
    """Wait until an established connection and all its handlers are over. Cancelling ends both."""
    try:
        await connection.wait_closed()
        # The connection has ended, but its received bytes are not all delivered. An application that reads slowly
        # still gets them. Relays without a tunnel end within their linger time.
        await requests.wait(cancel=False, timeout_s=LINGER_S)
    finally:
        connection.abort("no longer served")
        await requests.wait(cancel=True)
