"""Errors in upstream's words, with the flags of metrics."""

import errno

import pytest

from hbone.errors import (
    ConnectionBroken,
    ConnectRefused,
    PeerSilent,
    PoolClosed,
    TlsError,
    TlsReason,
    TunnelBroken,
    TunnelClosed,
)
from tproxy.errors import ConnectFailed, ConnectTimedOut
from ztunnel.addons import Cut
from ztunnel.proxy.addons.decide import cut_reason
from ztunnel.proxy.dataplane.live_table import UNJUDGED
from ztunnel.proxy.istio.accounting.outcome import (
    DRAINED,
    POLICY_CHANGE,
    REVOKED,
    Failed,
    Flags,
    answered,
    dial_failure,
    io_text,
    of_reason,
    of_relay,
    worth_another_endpoint,
)
from ztunnel.proxy.istio.certificates.manager import IdentityError

REFUSED = OSError(errno.ECONNREFUSED, "x")
NAME = ("10.0.0.1", 15008)


@pytest.mark.parametrize(
    ("error", "tunnel", "text", "flags", "reason"),
    [
        (IdentityError("no"), True, "identity error: no", Flags.IDENTITY_ERROR, "certificate"),
        (
            ConnectTimedOut(NAME, 10.0),
            True,
            "connection timed out, maybe a NetworkPolicy is blocking HBONE port 15008: deadline has elapsed",
            Flags.NETWORK_POLICY,
            "timeout",
        ),
        (ConnectTimedOut(NAME, 10.0), False, "io error: deadline has elapsed", Flags.CONNECT, "timeout"),
        (
            ConnectFailed(NAME, REFUSED),
            True,
            "io error: Connection refused (os error 111)",
            Flags.CONNECT,
            "refused",
        ),
        (TlsError(TlsReason.SAN, "wrong name"), True, "io error: wrong name", Flags.TLS_FAILURE, "tls"),
        (
            PeerSilent("quiet"),
            True,
            "io error: the peer did not finish the handshake in time",
            Flags.CONNECT,
            "timeout",
        ),
        (ConnectRefused(401), True, "http status: 401 Unauthorized", Flags.CONNECT, "peer_denied"),
        (ConnectRefused(503), True, "http status: 503 Service Unavailable", Flags.CONNECT, "peer_status"),
        (PoolClosed("x"), True, "pool draining", Flags.CONNECT, "drain"),
        (ConnectionBroken("gone"), True, "h2 failed: gone", Flags.H2_HANDSHAKE_FAILURE, "http2"),
        (TunnelBroken("gone", code=8), True, "h2 failed: gone (CANCEL)", Flags.H2_HANDSHAKE_FAILURE, "http2"),
        (TunnelClosed("x"), True, "http2 handshake failed: x", Flags.H2_HANDSHAKE_FAILURE, "http2"),
        (TimeoutError(), True, "http status: the peer did not answer in time", Flags.CONNECT, "timeout"),
        (
            OSError(errno.ETIMEDOUT, "x"),
            False,
            "io error: Connection timed out (os error 110)",
            Flags.CONNECT,
            "timeout",
        ),
        (REFUSED, False, "io error: Connection refused (os error 111)", Flags.CONNECT, "refused"),
        (OSError("odd"), False, "io error: odd", Flags.CONNECT, "other"),
    ],
)
def test_dial_errors_have_texts_and_flags(
    error: BaseException, tunnel: bool, text: str, flags: Flags, reason: str
) -> None:
    failure = dial_failure(error, tunnel=tunnel)
    assert (str(failure), failure.flags, failure.reason) == (text, flags, reason)


@pytest.mark.parametrize(
    ("text", "flags", "reason"),
    [
        ("", Flags.NONE, "drain"),
        (POLICY_CHANGE, Flags.DENY, "policy_change"),
        (REVOKED, Flags.CERT_REVOKED, "revoked"),
        (UNJUDGED, Flags.NONE, "internal"),
        (cut_reason(["limit"], Cut("too long")), Flags.NONE, "addon"),
        ("something new", Flags.NONE, "other"),
    ],
)
def test_deliberate_end_reasons_have_flags(text: str, flags: Flags, reason: str) -> None:
    failure = of_reason(text)
    assert (str(failure), failure.flags, failure.reason) == (text or DRAINED, flags, reason)


def test_unexpected_errors_are_not_translated() -> None:
    with pytest.raises(KeyError):
        dial_failure(KeyError("bug"), tunnel=True)


@pytest.mark.parametrize(
    ("error", "worth"),
    [
        (ConnectFailed(NAME, REFUSED), True),
        (ConnectTimedOut(NAME, 10.0), True),
        (ConnectRefused(503), True),
        (ConnectRefused(401), False),
        (ConnectRefused(400), False),
        (TlsError(TlsReason.SAN, "x"), False),
        (TlsError(TlsReason.EXPIRED, "x"), True),
        (IdentityError("x"), False),
        (PoolClosed("x"), False),
        (TunnelClosed("x"), False),
        (ConnectionBroken("x"), True),
        (TimeoutError(), False),  # the application may have first bytes
        (KeyError("x"), False),
        (TlsError(TlsReason.OTHER, "tls alert certificate unknown", by_peer=True), False),
    ],
)
def test_errors_worth_another_endpoint(error: BaseException, worth: bool) -> None:
    assert worth_another_endpoint(error) is worth


@pytest.mark.parametrize("code", [errno.ECONNRESET, errno.EPIPE, errno.ENOTCONN])
def test_resets_are_ordinary_ends(code: int) -> None:
    assert of_relay(OSError(code, "x"), from_client=True) is None


@pytest.mark.parametrize(("from_client", "verb"), [(True, "send"), (False, "receive")])
def test_relay_errors_name_the_failed_direction(from_client: bool, verb: str) -> None:
    broken = of_relay(ConnectionBroken("gone"), from_client=from_client)
    unreachable = of_relay(OSError(errno.EHOSTUNREACH, "x"), from_client=from_client)
    assert str(broken) == f"{verb}: gone"
    assert str(unreachable) == f"{verb}: No route to host (os error 113)"


@pytest.mark.parametrize(
    ("reason", "flags"),
    [(POLICY_CHANGE, Flags.DENY), (REVOKED, Flags.CERT_REVOKED), (DRAINED, Flags.NONE), ("", Flags.NONE)],
)
def test_own_end_reasons_have_the_same_flags_in_a_relay(reason: str, flags: Flags) -> None:
    for failure in (of_reason(reason), of_relay(TunnelClosed(reason), from_client=True)):
        assert isinstance(failure, Failed)
        assert (str(failure), failure.flags) == (reason or DRAINED, flags)


def test_texts_of_statuses_and_io_errors() -> None:
    assert answered(503) == "http status: 503 Service Unavailable"
    assert answered(299) == "http status: 299"
    assert io_text(None) == "None"
