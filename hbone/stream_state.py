"""Defines which frames a stream allows in each state, and the next state (RFC 9113, 5.1).

:data:`RECEIVED` is for frames of the peer, :data:`SENT` for our frames. :mod:`hbone.engine` uses both tables, and
``docs/streams.md`` prints them. Push is not implemented, so the reserved states are missing. The RFC's state
*closed* is two states here, because the RFC requires two behaviours: frames in flight when we sent RST_STREAM must
be ignored, while a peer that has closed a stream itself violates the protocol by sending more frames.

The tables check only the order of frames. The engine makes all other checks (header fields, windows, sizes, a
second response head) after the table has allowed a frame.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Final, TypeAlias

from hbone.enums import Key
from hbone.errors import ErrorCode
from hbone.settings import Role


class StreamState(Key):
    """The states of a stream (RFC 9113, 5.1), without push."""

    IDLE = "idle"
    OPEN = "open"
    HALF_CLOSED_LOCAL = "half-closed (local)"
    """We have sent END_STREAM."""
    HALF_CLOSED_REMOTE = "half-closed (remote)"
    """The peer has sent END_STREAM."""
    CLOSED = "closed"
    """Both sides have sent END_STREAM, or the peer has sent RST_STREAM."""
    RESET = "closed (reset by us)"
    """We have sent RST_STREAM, which the peer might not have received yet."""


class StreamFrame(Key):
    """The kinds of frames on a stream. A frame with END_STREAM is a separate kind."""

    HEADERS = "HEADERS"
    HEADERS_END = "HEADERS, END_STREAM"
    DATA = "DATA"
    DATA_END = "DATA, END_STREAM"
    RST_STREAM = "RST_STREAM"
    WINDOW_UPDATE = "WINDOW_UPDATE"


class Scope(Enum):
    """The scope of a protocol violation, which ends the stream or the connection (RFC 9113, 5.4)."""

    STREAM = "stream error"
    """We send RST_STREAM."""
    CONNECTION = "connection error"
    """We send GOAWAY and close."""


@dataclass(frozen=True, slots=True)
class Violation:
    """The verdict that a frame is not allowed in this state."""

    scope: Scope
    code: ErrorCode


class Ignored(Enum):
    """The verdict that a frame has no effect on the stream. If a peer can repeat it, the engine
    charges a budget.
    """

    IGNORED = "ignored"


Verdict: TypeAlias = StreamState | Violation | Ignored

_S: Final = StreamState
_F: Final = StreamFrame
_UNEXPECTED: Final = Violation(Scope.CONNECTION, ErrorCode.PROTOCOL_ERROR)
_CLOSED: Final = Violation(Scope.STREAM, ErrorCode.STREAM_CLOSED)
_LATE_HEADERS: Final = Violation(Scope.CONNECTION, ErrorCode.STREAM_CLOSED)
_NO_TRAILERS: Final = Violation(Scope.STREAM, ErrorCode.PROTOCOL_ERROR)
_IGNORED: Final = Ignored.IGNORED

_BY_SERVER: Final[dict[StreamState, dict[StreamFrame, Verdict]]] = {
    _S.IDLE: {
        _F.HEADERS: _S.OPEN,
        _F.HEADERS_END: _S.HALF_CLOSED_REMOTE,
        _F.DATA: _UNEXPECTED,
        _F.DATA_END: _UNEXPECTED,
        _F.RST_STREAM: _UNEXPECTED,
        _F.WINDOW_UPDATE: _UNEXPECTED,
    },
    # A second header block of a request is its trailers, which end the request (RFC 9113, 8.1).
    _S.OPEN: {
        _F.HEADERS: _NO_TRAILERS,
        _F.HEADERS_END: _S.HALF_CLOSED_REMOTE,
        _F.DATA: _S.OPEN,
        _F.DATA_END: _S.HALF_CLOSED_REMOTE,
        _F.RST_STREAM: _S.CLOSED,
        _F.WINDOW_UPDATE: _S.OPEN,
    },
    _S.HALF_CLOSED_LOCAL: {
        _F.HEADERS: _NO_TRAILERS,
        _F.HEADERS_END: _S.CLOSED,
        _F.DATA: _S.HALF_CLOSED_LOCAL,
        _F.DATA_END: _S.CLOSED,
        _F.RST_STREAM: _S.CLOSED,
        _F.WINDOW_UPDATE: _S.HALF_CLOSED_LOCAL,
    },
    _S.HALF_CLOSED_REMOTE: {
        _F.HEADERS: _CLOSED,
        _F.HEADERS_END: _CLOSED,
        _F.DATA: _CLOSED,
        _F.DATA_END: _CLOSED,
        _F.RST_STREAM: _S.CLOSED,
        _F.WINDOW_UPDATE: _S.HALF_CLOSED_REMOTE,
    },
    # On a closed stream, RST_STREAM and WINDOW_UPDATE can have crossed our END_STREAM (RFC 9113, 5.1). HEADERS
    # would reuse a stream identifier, which ends the connection (5.1.1). Late DATA is answered only by RST_STREAM:
    # it can belong to a stream whose reset by us is no longer remembered, and one faulty stream must not end a
    # hundred tunnels.
    _S.CLOSED: {
        _F.HEADERS: _LATE_HEADERS,
        _F.HEADERS_END: _LATE_HEADERS,
        _F.DATA: _CLOSED,
        _F.DATA_END: _CLOSED,
        _F.RST_STREAM: _IGNORED,
        _F.WINDOW_UPDATE: _IGNORED,
    },
    _S.RESET: dict.fromkeys(_F, _IGNORED),
}

RECEIVED: Final[dict[Role, dict[StreamState, dict[StreamFrame, Verdict]]]] = {
    Role.SERVER: _BY_SERVER,
    # Without push, a server opens no streams. It can send informational heads before the final head. HEADERS on a
    # stream that we have ended are the answer to an abandoned request.
    Role.CLIENT: {
        **_BY_SERVER,
        _S.IDLE: dict.fromkeys(_F, _UNEXPECTED),
        _S.OPEN: {**_BY_SERVER[_S.OPEN], _F.HEADERS: _S.OPEN},
        _S.HALF_CLOSED_LOCAL: {**_BY_SERVER[_S.HALF_CLOSED_LOCAL], _F.HEADERS: _S.HALF_CLOSED_LOCAL},
        _S.CLOSED: {**_BY_SERVER[_S.CLOSED], _F.HEADERS: _IGNORED, _F.HEADERS_END: _IGNORED},
    },
}
"""The state of a stream after each frame of the peer, by our role."""

SENT: Final[dict[StreamState, dict[StreamFrame, StreamState]]] = {
    _S.IDLE: {_F.HEADERS: _S.OPEN, _F.HEADERS_END: _S.HALF_CLOSED_LOCAL},
    _S.OPEN: {
        _F.HEADERS: _S.OPEN,
        _F.HEADERS_END: _S.HALF_CLOSED_LOCAL,
        _F.DATA: _S.OPEN,
        _F.DATA_END: _S.HALF_CLOSED_LOCAL,
        _F.RST_STREAM: _S.RESET,
        _F.WINDOW_UPDATE: _S.OPEN,
    },
    _S.HALF_CLOSED_LOCAL: {_F.RST_STREAM: _S.RESET, _F.WINDOW_UPDATE: _S.HALF_CLOSED_LOCAL},
    # WINDOW_UPDATE is not in this state's row, because the peer does not send any more bytes on this stream.
    _S.HALF_CLOSED_REMOTE: {
        _F.HEADERS: _S.HALF_CLOSED_REMOTE,
        _F.HEADERS_END: _S.CLOSED,
        _F.DATA: _S.HALF_CLOSED_REMOTE,
        _F.DATA_END: _S.CLOSED,
        _F.RST_STREAM: _S.RESET,
    },
    _S.CLOSED: {_F.RST_STREAM: _S.RESET},
    _S.RESET: {},
}
"""The state of a stream after a frame of ours. Frames that are missing here must not be sent (LocalProtocolError).
A server does not send HEADERS on an idle stream.
"""

#: The states that permit DATA in at least one direction, for fast comparisons by identity on the data path.
OPEN: Final = StreamState.OPEN
HALF_CLOSED_LOCAL: Final = StreamState.HALF_CLOSED_LOCAL
HALF_CLOSED_REMOTE: Final = StreamState.HALF_CLOSED_REMOTE
