"""Turns the errors that end a connection into the Rust ztunnel's error texts and response flags."""

import os
from enum import StrEnum

from hbone.errors import (
    ConnectionBroken,
    ConnectRefused,
    HboneError,
    PeerSilent,
    PoolClosed,
    TlsError,
    TlsReason,
    TunnelBroken,
    TunnelClosed,
)
from tproxy.errors import ConnectFailed, ConnectTimedOut, TproxyError
from ztunnel.proxy.dataplane.live_table import UNJUDGED
from ztunnel.proxy.dataplane.reasons import CUT_BY_ADDON, Reason, is_ordinary, reason_of
from ztunnel.proxy.istio.certificates.manager import IdentityError

POLICY_CHANGE = "connection closed due to policy change"
REVOKED = "connection closed: peer certificate revoked by CRL"
DRAINED = "connection closed due to connection drain"
REJECTED = "connection closed due to policy rejection"
RECURSIVE_CALL = "attempted recursive call to ourselves"
#: The reason phrases (RFC 9110) of HTTP statuses that peers send to refuse a CONNECT.
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
    """The values of the metrics' label ``response_flags``."""

    NONE = "-"
    DENY = "DENY"
    CONNECT = "CONNECT"
    TLS_FAILURE = "TLS_FAILURE"
    H2_HANDSHAKE_FAILURE = "H2_HANDSHAKE_FAILURE"
    NETWORK_POLICY = "NETWORK_POLICY"
    IDENTITY_ERROR = "IDENTITY_ERROR"
    CERT_REVOKED = "CERT_REVOKED"


#: The response flags of failures, by reason. Failures for other reasons have :attr:`Flags.CONNECT`.
_FLAGS = {
    Reason.POLICY: Flags.DENY,
    Reason.POLICY_MISSING: Flags.DENY,
    Reason.POLICY_CHANGE: Flags.DENY,
    Reason.ADDON: Flags.DENY,
    Reason.REVOKED: Flags.CERT_REVOKED,
    Reason.CERTIFICATE: Flags.IDENTITY_ERROR,
    Reason.TLS: Flags.TLS_FAILURE,
    Reason.HTTP2: Flags.H2_HANDSHAKE_FAILURE,
}


class Failure(Exception):
    """The error that ends a connection. Its text is printed in the access line.

    Attributes:
        reason: the cause, as a metrics label.
        policy: ``NAMESPACE/NAME`` of the policy that denies the connection. Empty if no policy does.
    """

    def __init__(self, text: str, reason: Reason, policy: str = "") -> None:
        super().__init__(text)
        self.reason = reason
        self.policy = policy


class EarlyDeny(Failure):
    """A connection failed too early to count as opened. It is logged as a warning and counted only as an error."""

    flags = Flags.NONE


class Failed(Failure):
    """An opened connection has ended with an error.

    Attributes:
        flags: the response flags for metrics.
        fields: further access line fields, printed before the field ``error``.
    """

    def __init__(
        self,
        text: str,
        reason: Reason = Reason.OTHER,
        flags: Flags | None = None,
        fields: tuple[tuple[str, str], ...] = (),
        policy: str = "",
    ) -> None:
        super().__init__(text, reason, policy)
        self.flags = _FLAGS.get(reason, Flags.CONNECT) if flags is None else flags
        self.fields = fields


def io_text(error: OSError | None) -> str:
    """Return the text of an OS error in Rust's form: ``Connection refused (os error 111)``."""
    if error is None or error.errno is None:
        return str(error)
    return f"{os.strerror(error.errno)} (os error {error.errno})"


def dial_failure(error: BaseException, *, tunnel: bool) -> Failed:
    """Return the failure for an error raised while dialling, with the text for the access log.

    Args:
        error: the error as raised.
        tunnel: whether the connection was to a peer's port 15008.

    Raises:
        BaseException: ``error`` itself, if dialling is not documented to raise it, which means a bug.
    """
    reason = reason_of(error)
    match error:
        case Failed():
            return error
        case IdentityError():
            return Failed(f"identity error: {error}", Reason.CERTIFICATE)
        case ConnectTimedOut() if tunnel:
            return Failed(
                "connection timed out, maybe a NetworkPolicy is blocking HBONE port 15008: deadline has elapsed",
                reason,
                Flags.NETWORK_POLICY,
            )
        case ConnectTimedOut():
            return Failed("io error: deadline has elapsed", reason)
        case ConnectFailed():
            return Failed(f"io error: {io_text(error.error)}", reason)
        case TlsError():
            return Failed(f"io error: {error.detail or error}", reason)
        case PeerSilent():
            return Failed("io error: the peer did not finish the handshake in time", reason)
        case ConnectRefused():
            return Failed(answered(error.status), reason)
        case PoolClosed():
            return Failed("pool draining", reason)
        case ConnectionBroken() | TunnelBroken():
            return Failed(f"h2 failed: {error}", reason)
        case HboneError():
            return Failed(f"http2 handshake failed: {error}", reason, Flags.H2_HANDSHAKE_FAILURE)
        case TproxyError():
            return Failed(f"io error: {error}", reason)
        case TimeoutError() if error.errno is None:
            return Failed("http status: the peer did not answer in time", reason)
        case OSError():
            return Failed(f"io error: {io_text(error)}", reason)
        case _:
            raise error


def worth_another_endpoint(error: BaseException) -> bool:
    """Return whether another endpoint can be tried after this error.

    The result is False in three cases. After a 401 or a TLS alert, because the peer refuses our identity, and
    other endpoints would do the same. After a wrong identity, because the peer could belong to an attacker, and
    trying other endpoints would hide this. After a missing answer (``TimeoutError``) or a broken tunnel
    (``perhaps_delivered``), because the application's first bytes could have been delivered along with the
    CONNECT, and must not be sent twice.
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


def of_relay(error: Exception, *, from_client: bool) -> Failed | None:
    """Return the failure that ended a relay, or None if the error is an ordinary way for connections to end.

    Args:
        error: the relay's error.
        from_client: whether the client's side of the connection stopped first.
    """
    if isinstance(error, TunnelClosed):
        return of_reason(str(error))
    if is_ordinary(error):
        return None
    text = io_text(error) if isinstance(error, OSError) else str(error)
    return Failed(f"{'send' if from_client else 'receive'}: {text}", Reason.BROKEN)


_ENDED = {
    "": Reason.DRAIN,
    DRAINED: Reason.DRAIN,
    POLICY_CHANGE: Reason.POLICY_CHANGE,
    REVOKED: Reason.REVOKED,
    UNJUDGED: Reason.INTERNAL,
}


def of_reason(text: str) -> Failed:
    """Return the failure for a connection ended by this proxy. ``text`` is the reason, empty for a drain."""
    reason = _ENDED.get(text) or (Reason.ADDON if text.startswith(CUT_BY_ADDON) else Reason.OTHER)
    denied = reason in (Reason.POLICY_CHANGE, Reason.REVOKED)
    return Failed(text or DRAINED, reason, None if denied else Flags.NONE)


def answered(status: int) -> str:
    """Return the text for a refused CONNECT in the Rust ztunnel's form: ``http status: 401 Unauthorized``."""
    return f"http status: {status} {_STATUS.get(status, '')}".rstrip()


def broken(error: HboneError) -> Failed:
    """Return the failure for a request whose stream ended before its answer."""
    return Failed(f"h2 failed: {error}", Reason.HTTP2)


def gave_up() -> Failed:
    """Return the failure for a request whose client left before the application accepted."""
    return Failed("h2 failed: the client gave up", Reason.CLIENT_GONE)


def internal(error: Exception) -> Failed:
    """Return the failure for a connection that ends because of a bug in this program."""
    return Failed(f"internal error: {error!r}", Reason.INTERNAL)


def unreachable(error: Exception) -> Failed:
    """Return the failure for an application that could not be dialled."""
    if isinstance(error, ConnectTimedOut):
        text = "deadline has elapsed"
    elif isinstance(error, ConnectFailed):
        text = io_text(error.error)
    else:
        text = io_text(error) if isinstance(error, OSError) else str(error)
    return Failed(f"connection failed: {text}", reason_of(error))
