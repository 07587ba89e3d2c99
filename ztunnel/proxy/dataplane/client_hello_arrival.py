"""Detects whether a complete TLS ClientHello has arrived on a connection (RFC 8446, 4.1.2 and 5.1)."""

from __future__ import annotations

from enum import Enum
from typing import Final

_HANDSHAKE_RECORD: Final = 22
_CLIENT_HELLO: Final = 1
_RECORD_HEADER: Final = 5
_MESSAGE_HEADER: Final = 4


class FirstBytes(Enum):
    """The kind of a connection's first bytes.

    ``OTHER`` is any kind except a TLS ClientHello, and will fail in the handshake.
    """

    PART = "part"
    WHOLE = "whole"
    OTHER = "other"
    TOO_LONG = "too long"


def first_bytes(data: bytes | memoryview, most_bytes: int) -> FirstBytes:
    """Classify the bytes that a client has sent so far, which can be empty.

    Args:
        data: the first bytes of the connection. They are not consumed.
        most_bytes: the longest accepted ClientHello. The result for a longer ClientHello is ``TOO_LONG``, as soon
            as its header has arrived.
    """
    size, position, found = len(data), 0, 0
    header = bytearray()
    wanted: int | None = None
    while position < size:
        if data[position] != _HANDSHAKE_RECORD:
            return FirstBytes.OTHER
        if size - position < _RECORD_HEADER:
            return FirstBytes.PART
        length = data[position + 3] << 8 | data[position + 4]
        if not length:
            return FirstBytes.OTHER  # RFC 8446, 5.1: no empty fragments of handshake messages
        position += _RECORD_HEADER
        here = min(length, size - position)
        if wanted is None:
            # A message, and even its header of four octets, can be split over several records.
            header += data[position : position + min(here, _MESSAGE_HEADER - len(header))]
            if header and header[0] != _CLIENT_HELLO:
                return FirstBytes.OTHER
            if len(header) == _MESSAGE_HEADER:
                wanted = _MESSAGE_HEADER + int.from_bytes(header[1:])
                if wanted > most_bytes:
                    return FirstBytes.TOO_LONG
        found += here
        position += length
        if wanted is not None and found >= wanted:
            return FirstBytes.WHOLE
    return FirstBytes.PART
