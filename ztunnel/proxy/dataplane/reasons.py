"""Defines the reasons and stages of connection failures, which are labels of ``ztunnel_connection_errors_total``.

The front ends' own errors have a reason. For errors raised by libraries, :func:`reason_of` returns it.
docs/troubleshooting.md explains each value.
"""

import errno
from enum import StrEnum
from typing import Final

from hbone.errors import ConnectRefused, ErrorCode, HboneError, PeerSilent, PoolClosed, TlsError, TunnelBroken
from hbone.pool import PoolFull
from tproxy.errors import ConnectFailed, ConnectTimedOut, KernelRefused


class Stage(StrEnum):
    """The stage at which a connection failed."""

    EARLY = "early"  # before it counted as opened
    CONNECT = "connect"
    RELAY = "relay"


class Reason(StrEnum):
    """Why a connection failed."""

    POLICY = "policy"
    POLICY_MISSING = "policy_missing"
    POLICY_CHANGE = "policy_change"
    ADDON = "addon"
    REVOKED = "revoked"
    CERTIFICATE = "certificate"
    TLS = "tls"
    TIMEOUT = "timeout"
    REFUSED = "refused"
    UNREACHABLE = "unreachable"
    PEER_DENIED = "peer_denied"
    PEER_STATUS = "peer_status"
    HTTP2 = "http2"
    CLIENT_GONE = "client_gone"
    BAD_REQUEST = "bad_request"
    NO_ROUTE = "no_route"
    NO_ENDPOINT = "no_endpoint"
    NO_WAYPOINT = "no_waypoint"
    NO_GATEWAY = "no_gateway"
    UNKNOWN_WORKLOAD = "unknown_workload"
    CONTROL_PLANE = "control_plane"
    DNS = "dns"
    RECURSIVE_CALL = "recursive_call"
    LIMIT = "limit"
    DRAIN = "drain"
    BROKEN = "broken"
    INTERNAL = "internal"
    OTHER = "other"


#: The reasons that mean a deliberate refusal, by this proxy or by the peer.
REFUSALS: Final = frozenset(
    {
        *(Reason.POLICY, Reason.POLICY_MISSING, Reason.POLICY_CHANGE, Reason.PEER_DENIED),
        *(Reason.ADDON, Reason.REVOKED),
    }
)
#: Begins the reason of each connection that an addon has ended.
CUT_BY_ADDON: Final = "connection cut by addon"
_BY_CODE: Final = {
    errno.ECONNREFUSED: Reason.REFUSED,
    errno.EHOSTUNREACH: Reason.UNREACHABLE,
    errno.ENETUNREACH: Reason.UNREACHABLE,
    errno.ETIMEDOUT: Reason.TIMEOUT,
}


#: The errors that count as an ordinary end of an application's connection, as in the Rust ztunnel.
_ORDINARY: Final = (errno.ECONNRESET, errno.EPIPE, errno.ENOTCONN)


def is_ordinary(error: Exception) -> bool:
    """Return whether an error that ended a relay is ordinary: a reset by the application on either side."""
    if isinstance(error, OSError):
        return error.errno in _ORDINARY
    return isinstance(error, TunnelBroken) and error.code == ErrorCode.CONNECT_ERROR


def reason_of(error: BaseException | None) -> Reason:
    """Return the reason for an error that a library raised when dialling or opening a tunnel."""
    match error:
        case ConnectTimedOut() | PeerSilent():
            return Reason.TIMEOUT
        case ConnectFailed():
            return reason_of(error.error)
        case KernelRefused():
            return _BY_CODE.get(error.code, Reason.OTHER)
        case TlsError():
            return Reason.TLS
        case ConnectRefused():
            return Reason.PEER_DENIED if error.status in (401, 403) else Reason.PEER_STATUS
        case PoolFull():
            return Reason.LIMIT
        case PoolClosed():
            return Reason.DRAIN
        case HboneError():
            return Reason.HTTP2
        case TimeoutError() if error.errno is None:
            return Reason.TIMEOUT
        case OSError():
            return _BY_CODE.get(error.errno or 0, Reason.OTHER)
    return Reason.OTHER
