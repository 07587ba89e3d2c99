"""Blocks of pcapng, the file format of Wireshark (draft-ietf-opsawg-pcapng), as bytes. Pure.

A file is one section block, then interface blocks, then any number of packets. An interface can be described at
any time before its first packet, and its statistics come at the end. All numbers are little-endian, and times are
microseconds (the format's default resolution). Packets are bare IP packets (``LINKTYPE_RAW``) of IPv4 and IPv6,
because no Ethernet frames exist.
"""

import struct
from collections.abc import Iterator
from typing import Final

LINKTYPE_RAW: Final = 101
#: The longest packet: an IPv6 header and 65,535 bytes.
SNAPLEN: Final = 65_575
#: The longest text of one option. The format limits it to 16 bits of length, and a reader shows it as one line.
MOST_TEXT_BYTES: Final = 4096

_SECTION, _INTERFACE, _PACKET, _STATISTICS = 0x0A0D0D0A, 1, 6, 5
_BYTE_ORDER: Final = 0x1A2B3C4D
_COMMENT: Final = 1
_SECTION_APPLICATION: Final = 4
_INTERFACE_NAME, _INTERFACE_DESCRIPTION = 2, 3
_PACKET_FLAGS: Final = 2
_STATISTICS_START, _STATISTICS_END, _STATISTICS_RECEIVED, _STATISTICS_DROPPED = 2, 3, 4, 5
_INBOUND, _OUTBOUND = 1, 2

_BLOCK: Final = struct.Struct("<II")
_LENGTH: Final = struct.Struct("<I")
#: The least and the greatest length of a packet block. The greatest has the longest packet and the longest text.
_LEAST_BLOCK, _MOST_BLOCK = 32, SNAPLEN + MOST_TEXT_BYTES + 256
_PACKET_HEAD: Final = struct.Struct("<IIIII")


def section(application: str, comment: str = "") -> bytes:
    """Return the block at the beginning of a file.

    Args:
        application: the name of the program that wrote the file.
        comment: a comment on the whole file.
    """
    # The section's length is -1 (unknown), because it is written while it grows.
    body = struct.pack("<IHHq", _BYTE_ORDER, 1, 0, -1)
    return _block(_SECTION, body + _options((_COMMENT, comment), (_SECTION_APPLICATION, application)))


def interface(name: str, description: str = "", comment: str = "") -> bytes:
    """Return the block that describes an interface. Interfaces get the ids 0, 1, ... in order."""
    body = struct.pack("<HHI", LINKTYPE_RAW, 0, SNAPLEN)
    options = _options((_COMMENT, comment), (_INTERFACE_NAME, name), (_INTERFACE_DESCRIPTION, description))
    return _block(_INTERFACE, body + options)


def packet(interface_id: int, at_us: int, data: bytes, *, inbound: bool, comment: str = "") -> bytes:
    """Return an enhanced packet block.

    Args:
        interface_id: the id of the packet's interface.
        at_us: the time, in microseconds since 1970.
        data: the packet, which begins with the IP header.
        inbound: whether the packet goes to the interface's pod.
        comment: shown beside the packet.
    """
    head = _PACKET_HEAD.pack(interface_id, at_us >> 32, at_us & 0xFFFF_FFFF, len(data), len(data))
    flags = struct.pack("<I", _INBOUND if inbound else _OUTBOUND)
    return _block(_PACKET, head + _padded(data) + _options((_COMMENT, comment), (_PACKET_FLAGS, flags)))


def statistics(
    interface_id: int, *, started_us: int, ended_us: int, packets: int, dropped: int, comment: str = ""
) -> bytes:
    """Return an interface's statistics block: its packets, and how many are missing from the file.

    Args:
        interface_id: see :func:`packet`.
        started_us, ended_us: when the capture began and ended, in microseconds since 1970.
        packets: the number of packets, including dropped ones.
        dropped: the number of packets missing from the file.
        comment: shown beside the statistics.
    """
    body = _PACKET_HEAD.pack(interface_id, ended_us >> 32, ended_us & 0xFFFF_FFFF, 0, 0)[:12]
    options = _options(
        (_COMMENT, comment),
        (_STATISTICS_START, _halves(started_us)),
        (_STATISTICS_END, _halves(ended_us)),
        (_STATISTICS_RECEIVED, struct.pack("<Q", packets)),
        (_STATISTICS_DROPPED, struct.pack("<Q", dropped)),
    )
    return _block(_STATISTICS, body + options)


def _halves(at_us: int) -> bytes:
    """Return a time in pcapng's form: two words of 32 bits, the upper one first in either byte order."""
    return struct.pack("<II", at_us >> 32, at_us & 0xFFFF_FFFF)


def _block(kind: int, body: bytes) -> bytes:
    size = 12 + len(body)  # written at both ends of the block, so that a reader can go backwards
    return _BLOCK.pack(kind, size) + body + _LENGTH.pack(size)


def _options(*options: tuple[int, str | bytes]) -> bytes:
    """Return the options that are not empty, followed by the end mark if there are any."""
    found = [_option(code, value) for code, value in options if value]
    return b"".join(found) + b"\0\0\0\0" if found else b""


def _option(code: int, value: str | bytes) -> bytes:
    if isinstance(value, str):
        # Cut the text between characters, because half a character would make the whole text unreadable.
        value = value.encode(errors="replace")[:MOST_TEXT_BYTES].decode(errors="ignore").encode()
    return struct.pack("<HH", code, len(value)) + _padded(value)


def _padded(data: bytes) -> bytes:
    """Return data padded to whole words of 32 bits."""
    return data + b"\0" * (-len(data) % 4)


class BadBlock(Exception):
    """Another process sent bytes that are not a packet block."""


class PacketBlocks:
    """Splits a stream of packet blocks, as it is read from another process, into whole blocks."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def receive(self, data: bytes) -> Iterator[bytes]:
        """Append received bytes, and yield the complete blocks.

        Raises:
            BadBlock: the bytes are not a packet block, and no more blocks can be read.
        """
        self._buffer += data
        at = 0
        try:
            while len(self._buffer) - at >= _BLOCK.size:
                kind, size = _BLOCK.unpack_from(self._buffer, at)
                if kind != _PACKET or size % 4 or not _LEAST_BLOCK <= size <= _MOST_BLOCK:
                    raise BadBlock(f"a block of type {kind} and {size} bytes")
                if len(self._buffer) - at < size:
                    return
                yield bytes(self._buffer[at : at + size])
                at += size
        finally:
            del self._buffer[:at]
