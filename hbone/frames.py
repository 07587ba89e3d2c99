"""Constants of HTTP/2, and functions that write frames (RFC 9113, 4 and 6). :mod:`hbone.reader` reads frames."""

from __future__ import annotations

from enum import IntEnum
from struct import Struct
from typing import Final

PREFACE: Final = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
HEADER_BYTES: Final = 9
MAX_WINDOW: Final = 2**31 - 1
MAX_STREAM_ID: Final = 2**31 - 1

DATA: Final = 0
HEADERS: Final = 1
PRIORITY: Final = 2
RST_STREAM: Final = 3
SETTINGS: Final = 4
PUSH_PROMISE: Final = 5
PING: Final = 6
GOAWAY: Final = 7
WINDOW_UPDATE: Final = 8
CONTINUATION: Final = 9

END_STREAM: Final = 0x1
ACK: Final = 0x1
END_HEADERS: Final = 0x4
PADDED: Final = 0x8
PRIORITY_FLAG: Final = 0x20

# A frame header: length (24 bits, packed as 16 + 8), type, flags, stream id.
HEADER: Final = Struct(">HBBBL")
SETTING: Final = Struct(">HL")
U32: Final = Struct(">L")
TWO_U32: Final = Struct(">LL")


class Setting(IntEnum):
    """The identifiers of SETTINGS (RFC 9113, 6.5.2; RFC 8441), and an experimental one of this project."""

    HEADER_TABLE_SIZE = 1
    ENABLE_PUSH = 2
    MAX_CONCURRENT_STREAMS = 3
    INITIAL_WINDOW_SIZE = 4
    MAX_FRAME_SIZE = 5
    MAX_HEADER_LIST_SIZE = 6
    ENABLE_CONNECT_PROTOCOL = 8
    #: Sent by a server: how many bytes of a stream it buffers if they arrive before its answer to the CONNECT. The
    #: identifier is from the range for experiments. Other implementations ignore it (RFC 9113, 6.5.2).
    EARLY_BYTES = 0xF0EB


def frame(kind: int, flags: int, stream_id: int, payload: bytes = b"") -> bytes:
    """Return a complete frame."""
    size = len(payload)
    return HEADER.pack(size >> 8, size & 0xFF, kind, flags, stream_id) + payload


def settings_frame(values: dict[int, int]) -> bytes:
    """Return a SETTINGS frame with ``values`` in the order of the dictionary."""
    return frame(SETTINGS, 0, 0, b"".join(SETTING.pack(key, value) for key, value in values.items()))


def header_frames(stream_id: int, block: bytes, *, ended: bool, max_frame_bytes: int) -> bytes:
    """Return HEADERS, followed by CONTINUATION if the block is longer than the peer's frame size."""
    first, rest = block[:max_frame_bytes], block[max_frame_bytes:]
    flags = (END_STREAM if ended else 0) | (0 if rest else END_HEADERS)
    out = frame(HEADERS, flags, stream_id, first)
    while rest:
        fragment, rest = rest[:max_frame_bytes], rest[max_frame_bytes:]
        out += frame(CONTINUATION, 0 if rest else END_HEADERS, stream_id, fragment)
    return out
