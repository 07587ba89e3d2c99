"""Tracks a client's CONNECT requests that have no response yet, by stream."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

from hbone.aio.fiber import OneShotFuture
from hbone.aio.poller import Poller
from hbone.aio.tunnel import Tunnel
from hbone.errors import ConnectRefused, TlsError, TunnelBroken
from hbone.events import Headers

#: A callback that gets the tunnel after its 200, or the error if the request failed. It is called once, in the
#: middle of a read. So it only records the result and schedules further work with the poller.
OnAnswer: TypeAlias = Callable[[Tunnel | None, Exception | None], None]


class _Waiter:
    """The waiter for the response to one CONNECT: a coroutine that awaits a future, or an object
    with a callback.
    """

    __slots__ = ("_future", "_on_answer", "tunnel")

    def __init__(self, tunnel: Tunnel, future: OneShotFuture[Tunnel] | None, on_answer: OnAnswer | None) -> None:
        self.tunnel = tunnel
        self._future = future
        self._on_answer = on_answer

    @property
    def is_gone(self) -> bool:
        """Whether the coroutine that waits for the response was cancelled."""
        return self._future is not None and self._future.done()

    def settle(self, tunnel: Tunnel | None, error: Exception | None) -> None:
        future, on_answer = self._future, self._on_answer
        if on_answer is not None:
            on_answer(tunnel, error)
        elif future is not None and not future.done():
            if tunnel is not None:
                future.set_result(tunnel)
            elif error is not None:
                future.set_exception(error)


class PendingAnswers:
    """The waiters for responses, one for each request. Each waiter is notified once and then removed."""

    __slots__ = ("_poller", "_waiting")

    def __init__(self, poller: Poller) -> None:
        self._poller = poller
        self._waiting: dict[int, _Waiter] = {}

    def expect(self, tunnel: Tunnel) -> OneShotFuture[Tunnel]:
        """Return a future for the response to a request that was just sent."""
        answer: OneShotFuture[Tunnel] = OneShotFuture(self._poller)
        self._waiting[tunnel.stream_id] = _Waiter(tunnel, answer, None)
        return answer

    def tell(self, tunnel: Tunnel, on_answer: OnAnswer) -> None:
        """Register ``on_answer`` for the response to a request that was just sent."""
        self._waiting[tunnel.stream_id] = _Waiter(tunnel, None, on_answer)

    def __bool__(self) -> bool:
        return bool(self._waiting)

    def expects(self, stream_id: int) -> bool:
        """Return whether the request on a stream still waits for its response."""
        return stream_id in self._waiting

    def answered(self, stream_id: int, status: int, headers: Headers) -> None:
        """After a 200, pass the tunnel to the waiter of its request. After another status, close the tunnel and
        pass :class:`ConnectRefused`.
        """
        waiter = self._waiting.pop(stream_id, None)
        if waiter is None or waiter.is_gone:
            return
        tunnel = waiter.tunnel
        if status == 200:
            tunnel.headers = headers
            # The server has received the early data, so discard it from the source: it must not be sent again.
            if tunnel.early_sent is not None:
                source, size = tunnel.early_sent
                source.discard(size)
            waiter.settle(tunnel, None)
        else:
            waiter.settle(None, ConnectRefused(status, headers))
            tunnel.close()

    def broken(self, stream_id: int, error: TunnelBroken) -> None:
        """Pass ``error`` to the waiter, because there will be no response. No effect on an answered request."""
        waiter = self._waiting.pop(stream_id, None)
        if waiter is not None:
            early = waiter.tunnel.early_sent is not None
            waiter.settle(None, error.after_early_data() if early else error)

    def refused_by_tls(self, error: TlsError) -> None:
        """Report ``error`` to the waiters of all requests on which the peer cannot have acted.

        A TLS 1.3 server refuses our certificate after our side of the handshake, when requests can already be in
        flight. The peer has not read these requests, so their early data can be sent again. If we have refused the
        peer instead, requests with early data are left out, because the peer has possibly read them.
        """
        for stream_id, waiter in list(self._waiting.items()):
            if error.by_peer or waiter.tunnel.early_sent is None:
                del self._waiting[stream_id]
                waiter.settle(None, error)
