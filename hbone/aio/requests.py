"""Manages the requests of a server's connection, from their arrival until their streams are released. Each request
is handled by a fiber, or by an object without a coroutine (:data:`TakeNow`).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine, Iterable
from functools import partial
from typing import Any, Protocol, TypeAlias

from hbone.aio import waits
from hbone.aio.connection import Connection
from hbone.aio.fiber import Fiber
from hbone.aio.tunnel import Tunnel
from hbone.errors import ErrorCode, LocalProtocolError, TunnelBroken
from hbone.events import Header, RequestHead

logger = logging.getLogger(__name__)


class Request:
    """A request that waits for its answer, with any method. The handler answers 404 or 400 to methods other than
    CONNECT.
    """

    __slots__ = ("_cancelled", "_requests", "_tunnel", "answered", "connection", "ended", "head")

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
        self._cancelled: str | None = None

    # Methods used before the handler begins, which the poller starts after the iteration's events

    def cancel(self, msg: str | None = None) -> None:
        """Cancel the handler as soon as it begins; see :class:`Cancellable`."""
        self._cancelled = msg or "cancelled"

    def step(self) -> None:
        """Begin to handle the request; see :class:`hbone.aio.poller.Steppable`."""
        self._requests._begin(self, self._tunnel, self._cancelled)

    # Its answer

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
        """Answer the request with an error status and end the stream. If the client has not ended the stream,
        reset it as well.

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
        """Release the stream. An object that accepted the request by :data:`TakeNow` calls this once, as its last
        step.
        """
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
        """Cancel the handler, because the stream ended before its response, or the connection has ended."""


#: A function that can take a request without a coroutine. It returns the request's owner, which calls
#: :meth:`Request.over` at the end. ``None`` leaves the request to the handler.
TakeNow: TypeAlias = Callable[[Request], Cancellable | None]


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
            self._running[tunnel] = request, request
            connection.poller.call_soon(request)

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
        work = waits.handled(
            partial(self._handler, request), partial(self._failed, request), partial(self._over, request, tunnel)
        )
        fiber = Fiber(request.connection.poller, work, f"request {tunnel.stream_id}")
        self._running[tunnel] = request, fiber
        return fiber

    def adopt(self, tunnel: Tunnel, work: Coroutine[Any, Any, None]) -> None:
        """Run ``work`` for a tunnel that another process accepted; ``work`` must not raise."""
        handled = waits.handled(lambda: work, _moved_failed, partial(self._moved_over, tunnel))
        fiber = Fiber(tunnel.poller, handled, f"request {tunnel.stream_id}")
        self._running[tunnel] = None, fiber

    def cancel(self, tunnel: Tunnel) -> None:
        """Cancel the handler of a request that the peer has reset.

        No effect after a response: the stream is then the handler's tunnel, whose relay still delivers received
        bytes.
        """
        entry = self._running.get(tunnel)
        if entry is not None and entry[0] is not None and not entry[0].answered:
            entry[1].cancel("the client gave up")

    def _failed(self, request: Request, error: Exception) -> None:
        # HEADERS and RST_STREAM can arrive in one read. Then the stream is closed before its fiber's first step,
        # and a handler without an await is not cancelled.
        if isinstance(error, TunnelBroken) and request.gone:
            logger.debug("request handler used a closed stream: %s", error)
        else:
            logger.error("request handler failed", exc_info=error)

    def _moved_over(self, tunnel: Tunnel) -> None:
        tunnel.close()
        self._forget(tunnel)

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
        """Wait until every request is over. With ``cancel``, all requests are cancelled. Otherwise they first
        deliver received bytes.
        """
        for tunnel, (_, work) in list(self._running.items()):
            tunnel.end_discarding()
            if cancel:
                work.cancel()
        if self._running:
            self._emptied = asyncio.get_running_loop().create_future()
            await asyncio.wait([self._emptied], timeout=timeout_s)


def _moved_failed(error: Exception) -> None:
    logger.error("a moved tunnel failed", exc_info=error)
