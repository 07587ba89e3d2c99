"""Defines the errors of the tunnel library: refusals, and the ends of tunnels.

::

    HboneError
    ├── LocalProtocolError          our bug: a call that the protocol does not allow now
    ├── RemoteProtocolError         the peer broke RFC 9113 or a limit; the connection ends
    ├── InvalidHeader               a header value that its parser refuses; callers answer 400 or ignore it
    ├── TlsError                    the handshake or a record failed, for ``reason``
    ├── ConnectRefused              the peer answered CONNECT with another status than 200
    ├── TunnelClosed                ended by us: abort, drain, a closed pool
    │   └── PoolClosed
    └── TunnelBroken                ended by the network or the peer
        └── ConnectionBroken        ... with the whole connection that carried it
            └── PeerSilent          ... because no PONG, or no end of a handshake, came in time
"""

from __future__ import annotations

from enum import IntEnum, StrEnum
from typing import TypeVar

ErrorT = TypeVar("ErrorT", bound=BaseException)


class ErrorCode(IntEnum):
    """HTTP/2 error codes (RFC 9113, 7)."""

    NO_ERROR = 0
    PROTOCOL_ERROR = 1
    INTERNAL_ERROR = 2
    FLOW_CONTROL_ERROR = 3
    SETTINGS_TIMEOUT = 4
    STREAM_CLOSED = 5
    FRAME_SIZE_ERROR = 6
    REFUSED_STREAM = 7
    CANCEL = 8
    COMPRESSION_ERROR = 9
    CONNECT_ERROR = 10
    ENHANCE_YOUR_CALM = 11
    INADEQUATE_SECURITY = 12
    HTTP_1_1_REQUIRED = 13


class TlsReason(StrEnum):
    """The reason for a TLS failure, as metrics and logs print it."""

    NO_CERT = "no_cert"
    SAN = "san"
    EXPIRED = "expired"
    CHAIN = "chain"
    REVOKED = "revoked"
    VERSION = "version"
    ALPN = "alpn"
    OTHER = "other"


def code_name(code: int) -> str:
    """Return the name of an HTTP/2 error code: ``CANCEL`` for 8, ``0x63`` for an unknown code."""
    try:
        return ErrorCode(code).name
    except ValueError:
        return hex(code)


class HboneError(Exception):
    """The base class of this package's errors."""


class LocalProtocolError(HboneError):
    """A call that the protocol does not allow in this state, which is a bug of the caller."""


class RemoteProtocolError(HboneError):
    """The peer violated RFC 9113, or exceeded a limit against floods."""

    def __init__(self, code: int, detail: str) -> None:
        super().__init__(code, detail)
        self.code = code
        self.detail = detail

    def __str__(self) -> str:
        return f"{code_name(self.code)}: {self.detail}"


class InvalidHeader(HboneError):
    """A header value that violates its grammar."""

    def __init__(self, name: str, value: bytes) -> None:
        super().__init__(name, value)
        self.name = name
        self.value = value

    def __str__(self) -> str:
        return f"no valid {self.name}: {self.value[:256]!r}"


class TlsError(HboneError):
    """The handshake or a record was refused, by us or by the peer.

    Attributes:
        reason: the class of the failure.
        detail: the text of OpenSSL or of the verify hook.
        by_peer: whether ``reason`` is taken from an alert that the peer sent.
    """

    def __init__(self, reason: TlsReason, detail: str, *, by_peer: bool = False) -> None:
        super().__init__(reason, detail)
        self.reason = reason
        self.detail = detail
        self.by_peer = by_peer

    def __str__(self) -> str:
        return f"{'peer refused TLS' if self.by_peer else 'TLS failed'} ({self.reason}): {self.detail}"


class ConnectRefused(HboneError):
    """The peer answered CONNECT with a status other than 200; no tunnel exists (RFC 9110, 9.3.6)."""

    def __init__(self, status: int, headers: tuple[tuple[bytes, bytes], ...] = ()) -> None:
        super().__init__(status, headers)
        self.status = status
        self.headers = headers

    def __str__(self) -> str:
        return f"CONNECT answered with status {self.status}"


class TunnelClosed(HboneError):
    """The tunnel was closed by this side, for example after a policy change, by a drain or at shutdown."""


class PoolClosed(TunnelClosed):
    """The pool was drained or closed before the tunnel was open."""


class TunnelBroken(HboneError):
    """The tunnel was ended by the network or by the peer.

    Attributes:
        code: the HTTP/2 error code that the peer sent, if any.
        unprocessed: whether the peer certainly did not process the request, so that it can be repeated elsewhere
            (REFUSED_STREAM, or a GOAWAY below its stream id; RFC 9113, 8.7).
        perhaps_delivered: whether the application has possibly received bytes that were sent along with the
            request. Repeating the request would deliver these bytes twice.
    """

    def __init__(
        self, detail: str, *, code: int | None = None, unprocessed: bool = False, perhaps_delivered: bool = False
    ) -> None:
        super().__init__(detail, code, unprocessed)
        self.detail = detail
        self.code = code
        self.unprocessed = unprocessed
        self.perhaps_delivered = perhaps_delivered

    def after_early_data(self) -> TunnelBroken:
        """Return this error with ``perhaps_delivered`` set, unless it is ``unprocessed``. For requests with early
        data.
        """
        if self.unprocessed:
            return self
        return type(self)(self.detail, code=self.code, perhaps_delivered=True)

    def __str__(self) -> str:
        return self.detail if self.code is None else f"{self.detail} ({code_name(self.code)})"


class ConnectionBroken(TunnelBroken):
    """The tunnel has ended, because the connection that carried it has ended."""


class PeerSilent(ConnectionBroken):
    """The peer did not answer a PING, or did not finish a handshake, in time."""


def bare(error: ErrorT) -> ErrorT:
    """Return an error without traceback, cause and context, so that a long-lived object can keep it.

    A traceback refers to frames, and frames refer to the object that keeps the error. So without this, each failed
    connection would leave a reference cycle, which contains views of large buffers.
    """
    error.__cause__ = error.__context__ = None
    return error.with_traceback(None)
