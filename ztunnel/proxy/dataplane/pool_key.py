"""Defines the key of pooled tunnel connections, and dials one. Tunnels with equal keys can share a connection."""

import socket
from collections.abc import Awaitable, Callable
from typing import Generic, NamedTuple, TypeVar

from hbone.aio.connection import Connection, connect
from hbone.aio.connection_settings import ConnectionSettings
from hbone.aio.poller import Poller
from hbone.tls_context import TlsContext
from xds.model.address import SocketAddress

CredentialsT = TypeVar("CredentialsT")
OptionsT = TypeVar("OptionsT")


class PoolKey(NamedTuple, Generic[CredentialsT, OptionsT]):
    """The key of a pooled connection. Tunnels with equal keys can use the same connection.

    It is a tuple for speed, because a key is created and hashed for every connection.

    Attributes:
        address: the address of the far end.
        credentials: the source of the connection's TLS context, compared by identity. ``None`` for cleartext.
        generation: the credentials' generation. After a certificate rotation, new tunnels use a new connection,
            while existing tunnels stay on theirs.
        options: further properties: expected identities (Istio), socket options (Envoy).
    """

    address: SocketAddress
    credentials: CredentialsT
    generation: int
    options: OptionsT


async def dial_connection(
    context_for: Callable[[], TlsContext | None],
    open_socket: Callable[[], Awaitable[socket.SocketType]],
    settings: ConnectionSettings,
    poller: Poller,
    finished: Callable[[float, bool], object],
) -> Connection:
    """Open one tunnel connection: TCP, TLS, the client side of HTTP/2. Called by the pools' dial functions.

    Args:
        context_for: makes the TLS context, or ``None`` for cleartext.
        open_socket: connects by TCP. This call becomes the socket's owner.
        settings: the connection's settings.
        poller: this loop's poller.
        finished: called with the seconds of the TLS handshake, and whether it succeeded.

    Raises:
        Exception: any error of ``context_for`` and ``open_socket``. TlsError, PeerSilent, ConnectionBroken: the
        handshake failed.
    """
    # The TLS context is created before the socket. If OpenSSL refuses the key, there is then no socket to close.
    context = context_for()
    sock = await open_socket()
    began_s = poller.loop.time()
    connection: Connection | None = None
    try:
        connection = await connect(sock, context, settings, poller)
    finally:
        if context is not None:
            seconds = poller.loop.time() - began_s
            finished(seconds, connection is not None)
            if connection is not None:
                connection.handshake_s = seconds
    return connection
