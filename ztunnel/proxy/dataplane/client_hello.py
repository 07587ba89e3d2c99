"""Parses the server name (SNI) and ALPN protocols of a TLS ClientHello (RFC 8446, 4.1.2; RFC 6066; RFC 7301)."""

from dataclasses import dataclass

MAX_BYTES = 64 * 1024
_HANDSHAKE, _CLIENT_HELLO = 22, 1
_SERVER_NAME, _ALPN = 0, 16


@dataclass(frozen=True, slots=True)
class ClientHello:
    """The ClientHello extensions that select filter chains."""

    server_name: str = ""
    alpn: tuple[str, ...] = ()


class NotTls(Exception):
    """The bytes are not a ClientHello."""


class NeedMore(Exception):
    """The bytes are the beginning of a ClientHello. Its end has not arrived."""


def parse_client_hello(data: bytes) -> ClientHello:
    """Parse a ClientHello from the first bytes of a connection.

    Raises:
        NeedMore: the bytes are the beginning of a ClientHello.
        NotTls: the bytes are not a ClientHello, or there are more than :data:`MAX_BYTES`.
    """
    return _hello(_Reader(_handshake(data)))


def _handshake(data: bytes) -> bytes:
    """Return the ClientHello message, reassembled from its TLS records."""
    message = b""
    position = 0
    while True:
        if len(message) >= 4:
            length = int.from_bytes(message[1:4], "big")
            if message[0] != _CLIENT_HELLO or length > MAX_BYTES:
                raise NotTls("no ClientHello")
            if len(message) >= 4 + length:
                return message[4 : 4 + length]
        header = data[position : position + 5]
        if (header[:1] and header[0] != _HANDSHAKE) or (header[1:2] and header[1] != 3):
            raise NotTls("no TLS record")
        if len(header) < 5:
            raise NeedMore
        length = int.from_bytes(header[3:5], "big")
        if not 0 < length <= 16384 + 256:
            raise NotTls("bad record length")
        piece = data[position + 5 : position + 5 + length]
        if message == b"" and piece and piece[0] != _CLIENT_HELLO:
            raise NotTls("no ClientHello")
        if len(piece) < length:
            raise NeedMore
        message += piece
        position += 5 + length


class _Reader:
    def __init__(self, data: bytes) -> None:
        self._data = data
        self._at = 0

    @property
    def left(self) -> int:
        return len(self._data) - self._at

    def take(self, count: int) -> bytes:
        if count > self.left:
            raise NotTls("truncated ClientHello")
        self._at += count
        return self._data[self._at - count : self._at]

    def number(self, size: int) -> int:
        return int.from_bytes(self.take(size), "big")

    def vector(self, size: int) -> "_Reader":
        return _Reader(self.take(self.number(size)))


def _hello(reader: _Reader) -> ClientHello:
    reader.take(2 + 32)  # version, random
    reader.vector(1)  # session id
    reader.vector(2)  # cipher suites
    reader.vector(1)  # compression methods
    name = ""
    alpn: tuple[str, ...] = ()
    if reader.left:
        extensions = reader.vector(2)
        while extensions.left:
            kind = extensions.number(2)
            body = extensions.vector(2)
            if kind == _SERVER_NAME:
                name = _server_name(body)
            elif kind == _ALPN:
                alpn = _protocols(body.vector(2))
    return ClientHello(name, alpn)


def _server_name(body: _Reader) -> str:
    names = body.vector(2)
    while names.left:
        kind, name = names.number(1), names.vector(2)
        if kind == 0:
            return name.take(name.left).decode("ascii", "replace").lower()
    return ""


def _protocols(body: _Reader) -> tuple[str, ...]:
    protocols = []
    while body.left:
        entry = body.vector(1)
        protocols.append(entry.take(entry.left).decode("latin-1"))
    return tuple(protocols)
