"""The server side of a connection. A fiber handles each request, and the connection owns the fibers."""

from __future__ import annotations

import socket
from collections.abc import Callable

from hbone.aio.connection import Connection
from hbone.aio.connection_settings import ConnectionSettings
from hbone.aio.poller import Poller
from hbone.aio.relay import LINGER_S
from hbone.aio.requests import Handler, Requests, TakeNow
from hbone.settings import Role
from hbone.tls_context import TlsContext


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
        sock: the accepted socket, which belongs to this call.
        tls_context: the server's TLS parameters. None means cleartext HTTP/2 with prior knowledge.
        settings: the connection's timeouts and windows.
        poller: this loop's poller.
        on_request: the handler, which runs as a fiber per request, and must answer the request. The handler owns
            the accepted tunnel, which is closed when the handler returns. It is cancelled if the stream ends
            before the answer.
        take_now: called first for each request. If it accepts the request, ``on_request`` is not called.
        on_established: called with the connection (which has ``facts``) before any HTTP/2 frame is read, or sent
            except SETTINGS. It can store the connection for ``drain``, ``abort`` or ``close``. It can raise an
            error to close the connection without an answer.

    Raises:
        TlsError, PeerSilent, ConnectionBroken: the handshake failed.
        Exception: the error raised by ``on_established``.
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
    """Wait until an established connection and all its handlers have ended. Cancelling this call ends both."""
    try:
        await connection.wait_closed()
        # The connection has ended, but its relays can still hold received bytes for an application that reads
        # slowly. The relays end within their linger time.
        await requests.wait(cancel=False, timeout_s=LINGER_S)
    finally:
        connection.abort("no longer served")
        await requests.wait(cancel=True)
