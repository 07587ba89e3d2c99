"""Encodes and decodes netlink attributes: nested type-length-value, padded to four bytes (``linux/netlink.h``).

This module uses no sockets. ``aio/netlink.py`` adds the header with length and sequence number to a
:class:`Message`.
"""

import struct
from collections.abc import Iterator
from dataclasses import dataclass

_ATTRIBUTE = struct.Struct("=HH")
_TYPE_MASK = 0x3FFF
_NESTED = 0x8000


class MalformedDump(Exception):
    """A netlink message does not have the layout that the kernel's headers define. The bytes are in ``args``."""


@dataclass(frozen=True, slots=True)
class Message:
    """One netlink message without its header.

    Attributes:
        kind: nlmsg_type.
        flags: NLM_F_*.
        body: the family's header and its attributes.
        about: describes the request in error messages.
    """

    kind: int
    flags: int
    body: bytes
    about: str = ""


def attribute(kind: int, payload: bytes) -> bytes:
    """Encode one attribute, padded to four bytes."""
    length = 4 + len(payload)
    return _ATTRIBUTE.pack(length, kind) + payload + bytes(-length % 4)


def nest(kind: int, *attributes: bytes) -> bytes:
    """Encode an attribute that contains attributes, flagged NLA_F_NESTED."""
    return attribute(kind | _NESTED, b"".join(attributes))


def text(kind: int, value: str) -> bytes:
    """Encode a string with its terminating zero."""
    return attribute(kind, value.encode() + b"\0")


def be32(kind: int, value: int) -> bytes:
    """Encode four bytes in network order, like nftables. A negative value is encoded as its two's complement."""
    return attribute(kind, struct.pack("!I", value & 0xFFFFFFFF))


def attributes(data: bytes) -> Iterator[tuple[int, bytes]]:
    """Iterate over the attributes in ``data`` as (type without flags, payload).

    Raises:
        MalformedDump: an attribute's length exceeds ``data``, or is smaller than the attribute's header.
    """
    offset = 0
    while offset < len(data):
        if len(data) - offset < 4:
            raise MalformedDump(data)
        length, kind = _ATTRIBUTE.unpack_from(data, offset)
        if length < 4 or offset + length > len(data):
            raise MalformedDump(data)
        yield kind & _TYPE_MASK, data[offset + 4 : offset + length]
        offset += length + (-length % 4)


def attribute_map(data: bytes) -> dict[int, bytes]:
    """Return the payloads of attributes by type. Of repeated attributes, the last one wins.

    Raises:
        MalformedDump: see :func:`attributes`.
    """
    return dict(attributes(data))


def read_text(payload: bytes) -> str:
    """Decode a string, with or without a terminating zero."""
    return payload.rstrip(b"\0").decode(errors="replace")


def read_be32(payload: bytes) -> int:
    """Decode four bytes in network order.

    Raises:
        MalformedDump: the length is not four bytes.
    """
    if len(payload) != 4:
        raise MalformedDump(payload)
    return int(struct.unpack("!I", payload)[0])
