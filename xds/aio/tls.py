"""TLS for gRPC connections, placed between an asyncio transport and the connection. Uses the TLS code of
tunnels.
"""

import asyncio
from typing import Final, Protocol, cast

from hbone.errors import TlsError
from hbone.tls import TlsSession, sealed_bytes
from hbone.tls_context import TlsContext

READ_BYTES: Final = 64 * 1024
"""The number of bytes handled in one loop iteration. They take 1 ms in long answers, and 10 ms in small
messages.
"""


class Transport(Protocol):
    """The part of :class:`asyncio.Transport` that a connection uses, with TLS or without."""

    def write(self, data: bytes | memoryview) -> None: ...

    def close(self) -> None: ...

    def abort(self) -> None: ...

    def get_write_buffer_size(self) -> int: ...


class Inner(Protocol):
    """A connection on top of the transport, with callbacks like in :class:`asyncio.BaseProtocol`."""

    def opened(self, transport: Transport) -> None:
        """Called when the connection is open, and its handshake, if any, is done."""

    def received(self, data: memoryview) -> None:
        """Called with at most :data:`READ_BYTES` of plaintext. The memoryview is valid only during the call."""

    def connection_lost(self, exc: Exception | None) -> None: ...

    def pause_writing(self) -> None: ...

    def resume_writing(self) -> None: ...


class Plain(asyncio.BufferedProtocol):
    """A plain-text connection, read in slices.

    A slice bounds the work of one loop iteration. A transport alone has no such bound: libuv, and therefore
    uvloop, reads up to 32 times in a row while bytes keep arriving. After a full slice, reading pauses until the
    next iteration.
    """

    def __init__(self, inner: Inner) -> None:
        self._inner = inner
        self._buffer = bytearray(READ_BYTES)
        self._transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's are of other classes
        self._inner.opened(self._transport)

    def get_buffer(self, sizehint: int) -> bytearray:
        return self._buffer

    def buffer_updated(self, nbytes: int) -> None:
        self._slice(memoryview(self._buffer)[:nbytes])
        transport = self._transport
        if nbytes == READ_BYTES and transport is not None and not transport.is_closing():
            transport.pause_reading()
            asyncio.get_running_loop().call_soon(self._resume)

    def connection_lost(self, exc: Exception | None) -> None:
        self._inner.connection_lost(exc)

    def pause_writing(self) -> None:
        self._inner.pause_writing()

    def resume_writing(self) -> None:
        self._inner.resume_writing()

    def _slice(self, data: memoryview) -> None:
        self._inner.received(data)

    def _resume(self) -> None:
        if self._transport is not None and not self._transport.is_closing():
            self._transport.resume_reading()


class Secured(Plain):
    """A connection over TLS. ``inner`` is notified when the handshake is done, and gets plaintext only.

    The dial limits the duration of the handshake, and aborts the transport at the limit.

    Attributes:
        established: resolves at the end of the handshake. Its exception is ``TlsError``, or an ``OSError`` of the
            network.
    """

    def __init__(self, context: TlsContext, inner: Inner) -> None:
        super().__init__(inner)
        self.established: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        # The callback retrieves the exception. A cancelled dial does not, and asyncio would log an unretrieved
        # one.
        self.established.add_done_callback(lambda done: done.cancelled() or done.exception())
        self._session = TlsSession(context)
        self._plain = memoryview(bytearray(READ_BYTES))
        self._error: Exception | None = None
        self._closing = False

    # For the network

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._shake()

    def connection_lost(self, exc: Exception | None) -> None:
        # Drop the transport first: the inner connection closes its transport when notified, but uvloop's transport
        # accepts no write after its loss.
        self._closing, self._transport = True, None
        if self._session.established:
            self._inner.connection_lost(self._error or exc)
        elif not self.established.done():
            error = self._error or exc or ConnectionResetError("closed during the TLS handshake")
            self.established.set_exception(error)

    def pause_writing(self) -> None:
        if self._session.established:
            self._inner.pause_writing()

    def resume_writing(self) -> None:
        if self._session.established:
            self._inner.resume_writing()

    def _slice(self, data: memoryview) -> None:
        self._session.receive(data)
        if not self._session.established:
            self._shake()
        if self._session.established and not self._closing:
            self._decrypt()

    def _shake(self) -> None:
        try:
            done = self._session.handshake()
        except TlsError as error:
            self._send(b"")  # sends the alert
            self._fail(error)
            return
        self._send(b"")
        if done:
            self._inner.opened(self)
            if not self.established.done():
                self.established.set_result(None)

    def _decrypt(self) -> None:
        try:
            count = len(self._plain)
            while count == len(self._plain) and not self._closing:
                count = self._session.read_into(self._plain)
                if count:
                    self._inner.received(self._plain[:count])
        except TlsError as error:
            self._fail(error)
            return
        if not self._closing:
            self._send(b"")  # sends the answer to a key update
            if self._session.peer_closed:
                self.close()

    def _send(self, plain: bytes | memoryview) -> None:
        out = memoryview(bytearray(sealed_bytes(len(plain))))
        filled = self._session.seal(plain, out)
        if filled and self._transport is not None:
            self._transport.write(out[:filled])

    def _fail(self, error: Exception) -> None:
        self._error = self._error or error
        self._closing = True
        if self._transport is not None:
            self._transport.close()

    # For the connection inside

    def write(self, data: bytes | memoryview) -> None:
        if self._closing:
            return
        try:
            self._send(data)
        except TlsError as error:
            self._fail(error)

    def close(self) -> None:
        """Send TLS's close_notify, then close the connection; see :class:`Transport`."""
        if not self._closing and self._transport is not None:
            self._closing = True
            self._session.close()
            self._send(b"")
            self._transport.close()

    def abort(self) -> None:
        self._closing = True
        if self._transport is not None:
            self._transport.abort()

    def get_write_buffer_size(self) -> int:
        return 0 if self._transport is None else self._transport.get_write_buffer_size()
