"""How a connection ends, in the Rust ztunnel's words: errors become a text and response flags, in one place."""

import errno
import os
from enum import StrEnum

from hbone.errors import (
    ConnectionBroken,
    ConnectRefused,
    ErrorCode,
    HboneError,
    PeerSilent,
    PoolClosed,
    TlsError,
    TlsReason,
    TunnelBroken,
    TunnelClosed,
)
from tproxy.errors import ConnectFailed, ConnectTimedOut, TproxyError
from ztunnel.istio.certificates.manager import IdentityError

POLICY_CHANGE = "connection closed due to policy change"
REVOKED = "connection closed: peer certificate revoked by CRL"
DRAINED = "connection closed due to connection drain"
RECURSIVE_CALL = "attempted recursive call to ourselves"
#: Of RFC 9110, those a peer may answer with.
_STATUS = {
    400: "Bad Request",
    401: "Unauthorized",
    403: "Forbidden",
    404: "Not Found",
    405: "Method Not Allowed",
    429: "Too Many Requests",
    500: "Internal Server Error",
    502: "Bad Gateway",
    503: "Service Unavailable",
    504: "Gateway Timeout",
}


class Flags(StrEnum):
    """Response flags of metrics."""

    NONE = "-"
    DENY = "DENY"
    CONNECT = "CONNECT"
    H2_HANDSHAKE_FAILURE = "H2_HANDSHAKE_FAILURE"
    NETWORK_POLICY = "NETWORK_POLICY"
    IDENTITY_ERROR = "IDENTITY_ERROR"
    CERT_REVOKED = "CERT_REVOKED"


class EarlyDeny(Exception):
    """The connection ends before it counts as opened: one warning, no metrics."""


class Failed(Exception):
    """An opened connection ends with an error.

    Attributes:
        flags: for metrics.
    """

    def __init__(self, text: str, flags: Flags = Flags.CONNECT) -> None:
        super().__init__(text)
        self.flags = flags


def io_text(error: OSError | None) -> str:
    """Return an error as Rust prints it: ``Connection refused (os error 111)``."""
    if error is None or error.errno is None:
        return str(error)
    return f"{os.strerror(error.errno)} (os error {error.errno})"


def dial_failure(error: BaseException, *, tunnel: bool) -> Failed:
    """Return an error of dialling in the words of access logs.

    Args:
        error: as raised.
        tunnel: what was dialled is port 15008 of a peer.

    Raises:
        BaseException: ``error`` itself, when it is none that dialling documents: a bug of ours.
    """
    match error:
        case Failed():
            return error
        case IdentityError():
            return Failed(f"identity error: {error}", Flags.IDENTITY_ERROR)
        case ConnectTimedOut() if tunnel:
            return Failed(
                "connection timed out, maybe a NetworkPolicy is blocking HBONE port 15008: deadline has elapsed",
                Flags.NETWORK_POLICY,
            )
        case ConnectTimedOut():
            return Failed("io error: deadline has elapsed")
        case ConnectFailed():
            return Failed(f"io error: {io_text(error.error)}")
        case TlsError():
            return Failed(f"io error: {error.detail or error}")
        case PeerSilent():
            return Failed("io error: the peer did not finish the handshake in time")
        case ConnectRefused():
            return Failed(answered(error.status))
        case PoolClosed():
            return Failed("pool draining")
        case ConnectionBroken() | TunnelBroken():
            return Failed(f"h2 failed: {error}", Flags.H2_HANDSHAKE_FAILURE)
        case HboneError():
            return Failed(f"http2 handshake failed: {error}", Flags.H2_HANDSHAKE_FAILURE)
        case TproxyError():
            return Failed(f"io error: {error}")
        case TimeoutError() if error.errno is None:
            return Failed("http status: the peer did not answer in time")
        case OSError():
            return Failed(f"io error: {io_text(error)}")
        case _:
            raise error


def worth_another_endpoint(error: BaseException) -> bool:
    """Return whether another endpoint may do better: nothing was answered, and no peer had a wrong identity.

    A 401 is the peer's verdict on us, as is its alert, and a wrong identity must not be shopped around for. After
    an answer that did not come in time (``TimeoutError``) the application may have got first bytes that went along
    with the CONNECT, as after a tunnel that broke (``perhaps_delivered``): they must not be sent twice.
    """
    match error:
        case ConnectRefused():
            return error.status in (502, 503, 504)
        case TlsError():
            return error.reason is not TlsReason.SAN and not error.by_peer
        case IdentityError() | PoolClosed() | TunnelClosed():
            return False
        case TunnelBroken(perhaps_delivered=True):
            return False
        case TproxyError() | HboneError():
            return True
        case _:
            return False


#: What ends one direction of an application's connection in order, as far as logs go (as upstream).
_ORDINARY = (errno.ECONNRESET, errno.EPIPE, errno.ENOTCONN)


def of_relay(error: Exception, *, from_client: bool) -> Failed | None:
    """Return what ended a relay; ``None``: nothing worth an error.

    Args:
        error: as the relay reports it.
        from_client: the side that asked for the connection stopped first.
    """
    if isinstance(error, TunnelClosed):
        return of_reason(str(error))
    if isinstance(error, OSError):
        if error.errno in _ORDINARY:
            return None
        text = io_text(error)
    elif isinstance(error, TunnelBroken) and error.code == ErrorCode.CONNECT_ERROR:
        return None  # the same, at the other end of the tunnel
    else:
        text = str(error)
    return Failed(f"{'send' if from_client else 'receive'}: {text}")


def of_reason(reason: str) -> Failed:
    """Return the failure of a connection that this side ended, by its reason."""
    flags = {POLICY_CHANGE: Flags.DENY, REVOKED: Flags.CERT_REVOKED}
    return Failed(reason or DRAINED, flags.get(reason, Flags.NONE))


def answered(status: int) -> str:
    """Return an answer as the Rust ztunnel prints it: ``http status: 401 Unauthorized``."""
    return f"http status: {status} {_STATUS.get(status, '')}".rstrip()
