"""Names why connections failed by a closed list, for ``ztunnel_connection_errors_total``.

The list follows the texts of docs/troubleshooting.md. A new text that none of these describes is ``other``.
"""

import re
from enum import StrEnum
from typing import Final

from ztunnel.proxy.istio.accounting.outcome import Flags


class Stage(StrEnum):
    """How far a connection came."""

    EARLY = "early"  # before it counted as opened
    CONNECT = "connect"
    RELAY = "relay"


_BY_FLAGS: Final = {
    Flags.CERT_REVOKED: "revoked",
    Flags.IDENTITY_ERROR: "certificate",
    Flags.NETWORK_POLICY: "timeout",
    Flags.TLS_FAILURE: "tls",
}
#: What a text begins with or contains, and the reason; the first that is found counts.
_BY_TEXT: Final = (
    (r"connection closed due to connection drain|pool draining", "drain"),
    (r"connection (refused|cut) by addon", "addon"),
    (r"connection closed due to policy change", "policy_change"),
    (r"connection closed due to policy rejection|.*policy .* has not arrived", "policy"),
    (r"tls handshake error", "tls"),
    (r"no healthy upstream", "no_endpoint"),
    (r"no valid routing destination|no service for target address", "no_route"),
    (r"unknown waypoint", "no_waypoint"),
    (r"unknown network gateway", "no_gateway"),
    (r"failed to fetch information about local workload", "unknown_workload"),
    (r"the control plane did not answer", "control_plane"),
    (r"dns lookup|no ip addresses were resolved", "dns"),
    (r"attempted recursive call", "recursive_call"),
    (r"expected method CONNECT|ip mismatch|no service or workload for hostname|requested service|no valid auth",
     "bad_request"),
    (r"http status: 40[13]", "peer_denied"),
    (r"http status: [0-9]", "peer_status"),
    (r".*(deadline has elapsed|in time$)", "timeout"),
    (r"h2 failed: the client gave up", "client_gone"),
    (r"h2 failed|http2 handshake failed", "http2"),
    (r".*Connection refused", "refused"),
    (r".*(No route to host|Network is unreachable)", "unreachable"),
    (r"internal error", "internal"),
    (r"send: |receive: ", "broken"),
)  # fmt: skip
_TEXTS: Final = tuple((re.compile(pattern), reason) for pattern, reason in _BY_TEXT)
OTHER: Final = "other"
#: Every value of the label ``reason``.
REASONS: Final = frozenset((*_BY_FLAGS.values(), *(reason for _, reason in _BY_TEXT), OTHER))


def reason_of(text: str, flags: Flags = Flags.NONE) -> str:
    """Return the reason of a failure, one of :data:`REASONS`, from the words and flags of its access line."""
    known = _BY_FLAGS.get(flags)
    if known is not None:
        return known
    return next((reason for pattern, reason in _TEXTS if pattern.match(text)), OTHER)
