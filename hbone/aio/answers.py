"""Answers that a client's CONNECTs wait for, by stream."""

from __future__ import annotations

from hbone.aio.fiber import OneShotFuture
from hbone.aio.poller import Poller
from hbone.aio.tunnel import Tunnel
from hbone.errors import ConnectRefused, TlsError, TunnelBroken
from hbone.events import Headers


class PendingAnswers:
    """One future per request that has no answer yet; each is resolved once, and forgotten then."""

    __slots__ = ("_poller", "_waiting")

    def __init__(self, poller: Poller) -> None:
        self._poller = poller
        self._waiting: dict[int, tuple[Tunnel, OneShotFuture[Tunnel]]] = {}

    def expect(self, tunnel: Tunnel) -> OneShotFuture[Tunnel]:
        """Return the future of a request that was just sent."""
        answer: OneShotFuture[Tunnel] = OneShotFuture(self._poller)
        self._waiting[tunnel.stream_id] = tunnel, answer
        return answer

    def answered(self, stream_id: int, status: int, headers: Headers) -> None:
        """Resolve with the tunnel for a 200. Otherwise fail with :class:`ConnectRefused` and close the tunnel."""
        entry = self._waiting.pop(stream_id, None)
        if entry is None or entry[1].done():
            return  # the caller was cancelled meanwhile
        tunnel, answer = entry
        if status == 200:
            tunnel.headers = headers
            # From here on the server has the early data for good: no other attempt may send it again.
            if tunnel.early_sent is not None:
                source, size = tunnel.early_sent
                source.discard(size)
            answer.set_result(tunnel)
        else:
            answer.set_exception(ConnectRefused(status, headers))
            tunnel.close()

    def broken(self, stream_id: int, error: TunnelBroken) -> None:
        """Raise ``error`` in the waiter: there will be no answer. Nothing for a request that has its answer."""
        entry = self._waiting.pop(stream_id, None)
        if entry is not None and not entry[1].done():
            early = entry[0].early_sent is not None
            entry[1].set_exception(error.after_early_data() if early else error)

    def refused_by_tls(self, error: TlsError) -> None:
        """Raise ``error`` in every waiter whose request the peer cannot have acted on.

        A TLS 1.3 server refuses our certificate after our side of the handshake, when requests can already be
        under way. It has not read them, so early data is not lost with them, unless the failure is ours.
        """
        for tunnel, answer in self._waiting.values():
            if not answer.done() and (error.by_peer or tunnel.early_sent is None):
                answer.set_exception(error)
