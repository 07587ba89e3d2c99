"""The server side of SOCKS5 (RFC 1928), limited to CONNECT without authentication, which applications use."""

import asyncio
import contextlib
import ipaddress
from collections.abc import Callable
from typing import Protocol

from hbone.aio.socket import PlainSocket
from xds.model.address import SocketAddress, canonical

_VERSION, _NO_AUTHENTICATION, _NONE_ACCEPTABLE = 5, 0, 0xFF
_CONNECT = 1
_IPV4, _NAME, _IPV6 = 1, 3, 4
SUCCEEDED, GENERAL_FAILURE, HOST_UNREACHABLE, COMMAND_NOT_SUPPORTED = 0, 1, 4, 7
#: At most this many unread bytes are discarded before a close. A greeting and a request are at most 257 and 262
#: bytes (RFC 1928, 3 and 4).
MOST_BYTES = 4096
_TIMEOUT_S = 5.0
#: The time limit for resolving a name. A resolver can try for longer if a name does not exist.
_LOOKUP_S = 5.0


class Resolve(Protocol):
    """Resolves a name as for a DNS query from the pod."""

    async def __call__(self, name: str, *, ipv6: bool) -> str | None:
        """Return the first address, or None if the name has no address or this proxy serves no DNS."""


class _Refused(Exception):
    """The client gets a refusal. The text says why, for the log."""

    def __init__(self, status: int, why: str) -> None:
        super().__init__(why)
        self.status = status


def reply(status: int) -> bytes:
    """Return the reply to a request, with 0.0.0.0:0 as the bound address."""
    return bytes((_VERSION, status, 0, _IPV4)) + bytes(6)


async def accept(
    client: PlainSocket, resolve: Resolve, refused: Callable[[str], object] = lambda why: None
) -> SocketAddress | None:
    """Do the SOCKS5 handshake and return the requested destination.

    Success is answered before the destination is dialled, like in the Rust ztunnel.

    Args:
        client: the client.
        resolve: resolves the name in a request.
        refused: called with the reason if the client was sent a refusal.

    Returns:
        None if the client was sent a refusal, or if it sent no request in time.

    Raises:
        OSError: the client has disconnected.
    """
    try:
        try:
            async with asyncio.timeout(_TIMEOUT_S):
                wanted = await _request(client)
        except TimeoutError as error:
            if error.errno:
                raise  # ETIMEDOUT of the socket
            return None
        destination = await _resolved(client, *wanted, resolve)
        client.send_first(reply(SUCCEEDED))
        return destination
    except _Refused as refusal:
        refused(str(refusal))
        status = refusal.status
        _refuse(client, reply(status) if status != _NONE_ACCEPTABLE else bytes((_VERSION, status)))
        return None


def _refuse(client: PlainSocket, answer: bytes) -> None:
    client.send_first(answer)
    # Closing a socket with unread bytes sends RST (RFC 2525, 2.17), which can reach the client before the answer.
    with contextlib.suppress(OSError):
        client.sock.recv(MOST_BYTES)


async def _request(client: PlainSocket) -> tuple[bytes | str, int]:
    """Return the requested host (a name as bytes, or an address) and port.

    Raises:
        _Refused: the request is not supported.
    """
    version, count = await _exactly(client, 2)
    if version != _VERSION:  # the rest of another protocol cannot be read
        raise _Refused(COMMAND_NOT_SUPPORTED, f"unsupported version {version}")
    methods = await _exactly(client, count)
    if _NO_AUTHENTICATION not in methods:
        raise _Refused(_NONE_ACCEPTABLE, "only unauthenticated is supported")
    client.send_first(bytes((_VERSION, _NO_AUTHENTICATION)))
    version, command, _, kind = await _exactly(client, 4)
    if version != _VERSION or command != _CONNECT:
        raise _Refused(COMMAND_NOT_SUPPORTED, f"unsupported command {command} of version {version}")
    host: bytes | str
    if kind == _IPV4:
        host = canonical(ipaddress.IPv4Address(await _exactly(client, 4)))
    elif kind == _IPV6:
        host = canonical(ipaddress.IPv6Address(await _exactly(client, 16)))
    elif kind == _NAME:
        (length,) = await _exactly(client, 1)
        host = await _exactly(client, length)
    else:
        raise _Refused(COMMAND_NOT_SUPPORTED, f"unsupported address type {kind}")
    port = int.from_bytes(await _exactly(client, 2), "big")
    if not port:
        raise _Refused(GENERAL_FAILURE, "the requested port is 0")
    return host, port


async def _resolved(client: PlainSocket, host: bytes | str, port: int, resolve: Resolve) -> SocketAddress:
    if isinstance(host, str):
        return SocketAddress(host, port)
    try:
        name = host.decode("ascii")
    except UnicodeDecodeError:
        raise _Refused(GENERAL_FAILURE, f"the requested name is not ASCII: {host!r}") from None
    found = None
    if name:
        # The client's own family comes first. SOCKS clients connect to 127.0.0.1 even in a pod with IPv6 only, so
        # a name without addresses of that family is looked up in the other one.
        ipv6 = ":" in canonical(client.sock.getpeername()[0])
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_LOOKUP_S):
                found = await resolve(name, ipv6=ipv6) or await resolve(name, ipv6=not ipv6)
    if found is None:
        raise _Refused(HOST_UNREACHABLE, f"no address of the requested name was found: {name!r}")
    return SocketAddress(found, port)


async def _exactly(client: PlainSocket, size: int) -> bytes:
    data = b""
    while len(data) < size:
        more = await client.read(size - len(data))
        if not more:
            raise ConnectionResetError("the client ended in the middle of a SOCKS message")
        data += more
    return data
