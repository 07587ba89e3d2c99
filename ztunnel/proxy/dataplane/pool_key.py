"""Which tunnels may share a connection, and how such a connection is dialled."""

import socket
from collections.abc import Awaitable, Callable
from typing import Generic, NamedTuple, TypeVar

from hbone.aio.connection import Connection, ConnectionSettings, connect
from hbone.aio.poller import Poller
from hbone.tls_context import TlsContext
from xds.model.address import SocketAddress

CredentialsT = TypeVar("CredentialsT")
OptionsT = TypeVar("OptionsT")


class PoolKey(NamedTuple, Generic[CredentialsT, OptionsT]):
    """What two tunnels must have in common to share a connection.

    A tuple, because one is made and hashed for every connection.

    Attributes:
        address: where the connection goes.
        credentials: the source of its TLS context, compared by identity; ``None`` for cleartext.
        generation: of the credentials: a rotated certificate opens new connections, and tunnels on old ones stay.
        options: what else distinguishes connections: expected identities (Istio), socket options (Envoy).
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
    """Open one connection for tunnels: TCP, TLS, the client's side of HTTP/2. The pools' dial functions call it.

    Args:
        context_for: makes the TLS context, or ``None`` for cleartext.
        open_socket: connects by TCP; its socket belongs to this call.
        settings: of the connection.
        poller: of this loop.
        finished: called with the seconds of the TLS handshake, and whether it succeeded.

    Raises:
        Exception: what ``context_for`` and ``open_socket`` raise.
        TlsError, PeerSilent, ConnectionBroken: the handshake failed.
    """
    # The context first: making one can fail (a key that OpenSSL refuses), and then there is no socket to leak.
    context = context_for()
    sock = await open_socket()
    began_s, secured = poller.loop.time(), False
    try:
        connection = await connect(sock, context, settings, poller)
        secured = True
    finally:
        if context is not None:
            finished(poller.loop.time() - began_s, secured)
    return connection
