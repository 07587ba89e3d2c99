"""The events that :class:`hbone.engine.Engine` reports. They are created for each read, so they are not frozen:
frozen dataclasses take twice as long to create.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TypeAlias

Header: TypeAlias = tuple[bytes, bytes]
Headers: TypeAlias = tuple[Header, ...]


@dataclass(slots=True, kw_only=True)
class RequestHead:
    """The valid header section of a request (RFC 9113, 8.3), with its pseudo-header fields as attributes.

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
        """Whether this is a plain CONNECT (RFC 9113, 8.5), with no pseudo-header fields but method
        and authority.
        """
        return self.method == b"CONNECT" and self.protocol is None


@dataclass(slots=True)
class RequestReceived:
    """The client has opened a stream (event of a server). If ``ended``, it will send no DATA, and StreamEnded
    follows.
    """

    stream_id: int
    head: RequestHead
    ended: bool = False


@dataclass(slots=True)
class ResponseReceived:
    """The final response has arrived (event of a client). If ``ended``, the server will send no DATA, and
    StreamEnded follows.
    """

    stream_id: int
    status: int
    headers: Headers = ()
    ended: bool = False


@dataclass(slots=True)
class DataReceived:
    """Payload of one stream was received, in one or several consecutive DATA frames.

    ``chunks`` are views of the bytes given to ``receive_data``. The caller must use or copy the views before
    reusing this buffer. ``size`` bytes (without padding) count against both windows until ``acknowledge``.
    """

    stream_id: int
    chunks: list[memoryview] = field(default_factory=list)
    size: int = 0


@dataclass(slots=True)
class StreamEnded:
    """The peer sent END_STREAM. It sends no more bytes, but can still receive. Tunnels have no ``trailers``."""

    stream_id: int
    trailers: Headers = ()


@dataclass(slots=True)
class StreamReset:
    """The stream was ended: by the peer's RST_STREAM, by our own after a stream error (``by_peer`` is false), or
    by GOAWAY.

    If ``unprocessed``, the peer certainly did not act on the request (RFC 9113, 8.7).
    """

    stream_id: int
    code: int
    by_peer: bool = True
    unprocessed: bool = False


@dataclass(slots=True)
class WindowOpened:
    """A stream has room again, so its ``reserve`` can succeed. Stream 0 means all streams of the connection."""

    stream_id: int


@dataclass(slots=True)
class SettingsReceived:
    """The peer's SETTINGS were applied. Their values are in the engine's attributes."""


@dataclass(slots=True)
class PingAcknowledged:
    """The peer acknowledged one of our PINGs."""

    payload: bytes


@dataclass(slots=True)
class GoawayReceived:
    """The peer accepts no new streams. Streams above ``last_stream_id`` were already reported as reset."""

    last_stream_id: int
    code: int
    debug: bytes = b""


@dataclass(slots=True)
class ConnectionFailed:
    """The peer violated the protocol or a limit. The caller must send the output, which has a GOAWAY, and then
    close.

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
