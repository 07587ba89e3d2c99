"""The events that :class:`hbone.engine.Engine` reports. They are built for each read, so they are not frozen:
frozen dataclasses take twice as long to build.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TypeAlias

Header: TypeAlias = tuple[bytes, bytes]
Headers: TypeAlias = tuple[Header, ...]


@dataclass(slots=True, kw_only=True)
class RequestHead:
    """A valid request header section (RFC 9113, 8.3), pseudo-header fields apart from the rest.

    ``path`` and ``scheme`` are None for CONNECT; ``protocol`` is set for extended CONNECT only (RFC 8441).
    """

    method: bytes
    authority: bytes | None = None
    path: bytes | None = None
    scheme: bytes | None = None
    protocol: bytes | None = None
    headers: Headers = ()

    @property
    def is_tunnel(self) -> bool:
        """A CONNECT as in RFC 9113, 8.5: with method and authority only."""
        return self.method == b"CONNECT" and self.protocol is None


@dataclass(slots=True)
class RequestReceived:
    """Server: a stream was opened. ``ended``: the peer will send no DATA (StreamEnded follows)."""

    stream_id: int
    head: RequestHead
    ended: bool = False


@dataclass(slots=True)
class ResponseReceived:
    """Client: the final answer. ``ended``: no DATA follows (StreamEnded does)."""

    stream_id: int
    status: int
    headers: Headers = ()
    ended: bool = False


@dataclass(slots=True)
class DataReceived:
    """Payload of one stream, gathered from consecutive DATA frames.

    ``chunks`` are views of the bytes given to ``receive_data``: use or copy them before that buffer is used
    again. ``size`` bytes, padding apart, count against both windows until ``acknowledge``.
    """

    stream_id: int
    chunks: list[memoryview] = field(default_factory=list)
    size: int = 0


@dataclass(slots=True)
class StreamEnded:
    """The peer sent END_STREAM: it will send no more, but can still receive. Tunnels have no ``trailers``."""

    stream_id: int
    trailers: Headers = ()


@dataclass(slots=True)
class StreamReset:
    """The stream is gone: the peer's RST_STREAM, our answer to a stream error (not ``by_peer``), or a GOAWAY.

    ``unprocessed``: the peer certainly did not act on the request (RFC 9113, 8.7).
    """

    stream_id: int
    code: int
    by_peer: bool = True
    unprocessed: bool = False


@dataclass(slots=True)
class WindowOpened:
    """``reserve`` may succeed again on this stream; stream 0 means on any stream of the connection."""

    stream_id: int


@dataclass(slots=True)
class SettingsReceived:
    """The peer's SETTINGS were applied; the engine's attributes hold their values."""


@dataclass(slots=True)
class PingAcknowledged:
    """The peer acknowledged one of our PINGs."""

    payload: bytes


@dataclass(slots=True)
class GoawayReceived:
    """The peer takes no new streams. Those above ``last_stream_id`` were reported as reset before this."""

    last_stream_id: int
    code: int
    debug: bytes = b""


@dataclass(slots=True)
class ConnectionFailed:
    """The peer broke the protocol or a limit. Send the output (a GOAWAY), then close.

    This is an event and not an exception, so that earlier events of the same read are not lost, and the result
    does not depend on how the network split the bytes.
    """

    code: int
    detail: str


Event: TypeAlias = (
    RequestReceived
    | ResponseReceived
    | DataReceived
    | StreamEnded
    | StreamReset
    | WindowOpened
    | SettingsReceived
    | PingAcknowledged
    | GoawayReceived
    | ConnectionFailed
)
