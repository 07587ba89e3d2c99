"""Netlink attributes: nested type-length-value, padded to four bytes, both ways (``linux/netlink.h``).

No sockets here. A :class:`Message` still lacks its sequence number; ``aio/netlink.py`` adds it.
"""

import struct
from collections.abc import Iterator
from dataclasses import dataclass

_ATTRIBUTE = struct.Struct("=HH")
_TYPE_MASK = 0x3FFF
_NESTED = 0x8000


class MalformedDump(Exception):
    """A netlink answer does not have the layout of its headers; the offending bytes are in ``args``."""


@dataclass(frozen=True, slots=True)
class Message:
    """One netlink message: type, NLM_F_* flags, family header with attributes, and a word for errors."""

    kind: int
    flags: int
    body: bytes
    about: str = ""


def attribute(kind: int, payload: bytes) -> bytes:
    """One attribute, padded."""
    length = 4 + len(payload)
    return _ATTRIBUTE.pack(length, kind) + payload + bytes(-length % 4)


def nest(kind: int, *attributes: bytes) -> bytes:
    """An attribute that holds attributes."""
    return attribute(kind | _NESTED, b"".join(attributes))


def text(kind: int, value: str) -> bytes:
    """A zero-terminated string."""
    return attribute(kind, value.encode() + b"\0")


def u8(kind: int, value: int) -> bytes:
    """One byte."""
    return attribute(kind, bytes((value,)))


def u32(kind: int, value: int) -> bytes:
    """Four bytes in host order, as rtnetlink has them."""
    return attribute(kind, struct.pack("=I", value))


def be32(kind: int, value: int) -> bytes:
    """Four bytes in network order, as nftables has them; negative values wrap."""
    return attribute(kind, struct.pack("!I", value & 0xFFFFFFFF))


def attributes(data: bytes) -> Iterator[tuple[int, bytes]]:
    """The attributes in ``data``, nesting flags removed.

    Raises:
        MalformedDump: a length points outside ``data`` or is smaller than its own header.
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
    """The attributes by type; of repeated ones the last."""
    return dict(attributes(data))


def read_text(payload: bytes) -> str:
    """A string, with or without its terminator."""
    return payload.rstrip(b"\0").decode(errors="replace")


def read_u32(payload: bytes) -> int:
    """Four bytes in host order.

    Raises:
        MalformedDump: another length.
    """
    if len(payload) != 4:
        raise MalformedDump(payload)
    return int(struct.unpack("=I", payload)[0])


def read_be32(payload: bytes) -> int:
    """Four bytes in network order.

    Raises:
        MalformedDump: another length.
    """
    if len(payload) != 4:
        raise MalformedDump(payload)
    return int(struct.unpack("!I", payload)[0])
