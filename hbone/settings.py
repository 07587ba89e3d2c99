"""Defines the HTTP/2 SETTINGS and flow-control windows that one side of a connection announces."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import Final

from hbone.frames import Setting
from hbone.limits import Limits

_FIRST_CONNECTION_WINDOW: Final = 1024 * 1024


class Role(Enum):
    """The side of a connection that an engine implements: client or server."""

    CLIENT = "client"
    SERVER = "server"


@dataclass(frozen=True, slots=True, kw_only=True)
class Http2Settings:
    """The SETTINGS that we send, and the windows we grant.

    Defaults and order are the same as in the Rust ztunnel. ``max_concurrent_streams`` and
    ``max_header_list_bytes`` differ between its two roles, see :func:`client_settings`. Windows start smaller and
    grow up to ``stream_window_bytes`` and ``connection_window_bytes`` with use (:mod:`hbone.windows`).
    """

    max_concurrent_streams: int | None = 200
    stream_window_bytes: int = 4 * 1024 * 1024
    connection_window_bytes: int = 16 * 1024 * 1024
    initial_window_bytes: int = 16_384
    """A stream's announced window: the bytes that it can pin before it has shown that it needs a larger window."""
    max_frame_bytes: int = 1024 * 1024
    max_header_list_bytes: int = 65_536
    early_bytes: int = 64 * 1024
    """How many bytes of one stream a server buffers before its response."""
    early_data: bool = False
    """Whether a server announces ``early_bytes``, and a client makes use of this announcement."""
    extra: tuple[tuple[int, int], ...] = ()
    """Further (identifier, value) pairs, sent first, to imitate another implementation."""
    limits: Limits = field(default_factory=Limits)

    def __post_init__(self) -> None:
        if not 65_535 <= self.connection_window_bytes < 2**31:
            raise ValueError("connection_window_bytes must be 65,535 to 2^31-1: it can only be raised")
        if not 0 < self.initial_window_bytes < 2**31:
            raise ValueError("initial_window_bytes must be 1 to 2^31-1")
        if not 0 < self.stream_window_bytes < 2**31:
            raise ValueError("stream_window_bytes must be 1 to 2^31-1")
        if not 16_384 <= self.max_frame_bytes < 2**24:
            raise ValueError("max_frame_bytes must be 16,384 to 2^24-1 (RFC 9113, 6.5.2)")

    @property
    def first_window_bytes(self) -> int:
        """The size of a stream's window at its start, in bytes."""
        return min(self.initial_window_bytes, self.stream_window_bytes)

    @property
    def first_connection_window_bytes(self) -> int:
        """The size of a connection's window at its start, in bytes."""
        return min(_FIRST_CONNECTION_WINDOW, self.connection_window_bytes)

    def wire(self, role: Role) -> dict[int, int]:
        """The SETTINGS to announce: identifiers and values, in the order of sending."""
        values: dict[int, int] = {}
        if role is Role.CLIENT:
            values[Setting.ENABLE_PUSH] = 0
        values.update(self.extra)
        if role is Role.SERVER and self.max_concurrent_streams is not None:
            values[Setting.MAX_CONCURRENT_STREAMS] = self.max_concurrent_streams
        values[Setting.INITIAL_WINDOW_SIZE] = self.first_window_bytes
        values[Setting.MAX_FRAME_SIZE] = self.max_frame_bytes
        values[Setting.MAX_HEADER_LIST_SIZE] = self.max_header_list_bytes
        if role is Role.SERVER and self.early_data:
            values[Setting.EARLY_BYTES] = self.early_bytes
        return values


def client_settings() -> Http2Settings:
    """Return the default settings of outbound connections."""
    return Http2Settings(max_concurrent_streams=None, max_header_list_bytes=16_384)


def server_settings() -> Http2Settings:
    """Return the default settings of inbound connections."""
    return Http2Settings()
