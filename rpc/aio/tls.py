"""The tunnels' TLS for calls: between an asyncio transport and a protocol that sees it as its transport."""

import asyncio
from collections.abc import Sequence
from typing import Final, cast

from hbone.errors import TlsError, TlsReason
from hbone.tls import TlsSession, sealed_bytes
from hbone.tls_context import TlsContext

TLS_S: Final = 10.0
"""For a handshake, on either side."""

_PLAIN_BYTES: Final = 64 * 1024


class Secured(asyncio.Protocol):
    """One TLS connection.

    ``inner`` hears of its connection when the handshake is done, and then of plaintext only; for it this is the
    transport, as far as an :class:`asyncio.Transport` with TLS is one.

    Attributes:
        established: done when the handshake is; its exception is ``TlsError``, or ``OSError`` of the network.
    """

    def __init__(self, context: TlsContext, inner: asyncio.Protocol, handshake_timeout_s: float) -> None:
        loop = asyncio.get_running_loop()
        self.established: asyncio.Future[None] = loop.create_future()
        # Who accepts asks nobody how it went.
        self.established.add_done_callback(lambda done: done.cancelled() or done.exception())
        self._session = TlsSession(context)
        self._inner = inner
        self._transport: asyncio.Transport | None = None
        self._timer: asyncio.TimerHandle | None = loop.call_later(handshake_timeout_s, self._too_slow)
        self._error: Exception | None = None
        self._closing = False

    # For the network

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """See :class:`asyncio.Protocol`."""
        self._transport = cast(asyncio.Transport, transport)  # uvloop's are of other classes
        self._shake()

    def data_received(self, data: bytes) -> None:
        """See :class:`asyncio.Protocol`."""
        self._session.receive(memoryview(data))
        if not self._session.established:
            self._shake()
        if self._session.established and not self._closing:
            self._decrypt()

    def connection_lost(self, exc: Exception | None) -> None:
        """See :class:`asyncio.Protocol`."""
        self._stop_timer()
        if self._session.established:
            self._inner.connection_lost(self._error or exc)
        elif not self.established.done():
            error = self._error or exc or ConnectionResetError("closed during the TLS handshake")
            self.established.set_exception(error)

    def pause_writing(self) -> None:
        """See :class:`asyncio.BaseProtocol`."""
        if self._session.established:
            self._inner.pause_writing()

    def resume_writing(self) -> None:
        """See :class:`asyncio.BaseProtocol`."""
        if self._session.established:
            self._inner.resume_writing()

    def _shake(self) -> None:
        try:
            done = self._session.handshake()
        except TlsError as error:
            self._send(b"")  # the alert
            self._fail(error)
            return
        self._send(b"")
        if done:
            self._stop_timer()
            self._inner.connection_made(cast(asyncio.BaseTransport, self))
            if not self.established.done():
                self.established.set_result(None)

    def _decrypt(self) -> None:
        plain = memoryview(bytearray(_PLAIN_BYTES))
        try:
            count = len(plain)
            while count == len(plain) and not self._closing:
                count = self._session.read_into(plain)
                if count:
                    self._inner.data_received(bytes(plain[:count]))
        except TlsError as error:
            self._fail(error)
            return
        if not self._closing:
            self._send(b"")  # an answer to a key update
            if self._session.peer_closed:
                self.close()

    def _send(self, plain: bytes) -> None:
        out = memoryview(bytearray(sealed_bytes(len(plain))))
        filled = self._session.seal(plain, out)
        if filled and self._transport is not None:
            self._transport.write(out[:filled])

    def _fail(self, error: Exception) -> None:
        self._error = self._error or error
        self._closing = True
        if self._transport is not None:
            self._transport.close()

    def _too_slow(self) -> None:
        self._timer = None
        self._error = TlsError(TlsReason.OTHER, "the handshake took too long")
        self.abort()

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    # For the protocol inside

    def writelines(self, views: Sequence[bytes | memoryview]) -> None:
        """See :class:`asyncio.WriteTransport`."""
        if self._closing:
            return
        try:
            self._send(b"".join(views))
        except TlsError as error:
            self._fail(error)

    def close(self) -> None:
        """See :class:`asyncio.BaseTransport`; says close_notify."""
        if not self._closing and self._transport is not None:
            self._closing = True
            self._session.close()
            self._send(b"")
            self._transport.close()

    def abort(self) -> None:
        """See :class:`asyncio.WriteTransport`."""
        self._closing = True
        if self._transport is not None:
            self._transport.abort()

    def get_write_buffer_size(self) -> int:
        """See :class:`asyncio.WriteTransport`."""
        return 0 if self._transport is None else self._transport.get_write_buffer_size()
