"""Errors that end a connection before bytes flow, with their response flags and details.

::

    Refused                 the connection ends before bytes flow; has flag and details
    ├── NoFilterChain       no filter chain of the listener matches
    ├── Denied              a policy denies the connection
    ├── TooMany             a limit of the chain is reached
    ├── Incomplete          a filter of the chain has not been configured yet by ECDS
    ├── NoCluster           the chain names a cluster that does not exist (NC)
    ├── NoHealthyHost       the cluster has no usable host (UH)
    ├── Overflow            a circuit breaker is full (UO)
    └── UpstreamFailed      every attempt to reach a host failed (UF, and URX when no attempt is left)
"""

from __future__ import annotations

from ztunnel.proxy.dataplane.handshake_limiter import STALLED
from ztunnel.proxy.dataplane.live_table import UNJUDGED
from ztunnel.proxy.dataplane.reasons import CUT_BY_ADDON, Reason
from ztunnel.proxy.envoy.stream.stream_info import Flag

#: ``CONNECTION_TERMINATION_DETAILS`` of a connection that was open at the end of a grace period.
DRAINED = "connection closed due to connection drain"
#: ``CONNECTION_TERMINATION_DETAILS`` of a connection that was open when the proxy stopped without a grace period.
STOPPED = "connection closed: the proxy stops"
#: The prefix of ``CONNECTION_TERMINATION_DETAILS`` if a new policy ends a live connection.
POLICY_CHANGE = "connection closed due to policy change"
#: The termination details of a connection that ends because no filter chain of its listener matches any longer.
NOT_SERVED = "connection closed: its destination is no longer served"
#: The termination details of a connection that ends because a new revocation list has the peer's certificate.
REVOKED = "connection closed: peer certificate revoked by CRL"
_ENDED = {
    DRAINED: Reason.DRAIN,
    STOPPED: Reason.DRAIN,
    NOT_SERVED: Reason.NO_ROUTE,
    REVOKED: Reason.REVOKED,
    UNJUDGED: Reason.INTERNAL,
    STALLED: Reason.LIMIT,
}


def reason_of_end(text: str) -> Reason:
    """Return the metrics label for a text which states why this proxy ended a connection."""
    if text.startswith(POLICY_CHANGE):
        return Reason.POLICY_CHANGE
    return _ENDED.get(text) or (Reason.ADDON if text.startswith(CUT_BY_ADDON) else Reason.OTHER)


class Refused(Exception):
    """The connection ends before any bytes are relayed.

    Attributes:
        flag: the response flag, or ``None`` if Envoy prints none.
        details: ``CONNECTION_TERMINATION_DETAILS``.
        response_details: ``RESPONSE_CODE_DETAILS``.
        failure: the reason in metrics.
    """

    flag: Flag | None = None
    response_details: str = ""
    failure: Reason = Reason.OTHER

    def __init__(self, details: str = "", failure: Reason | None = None) -> None:
        super().__init__(details)
        self.details = details
        if failure is not None:
            self.failure = failure


class TooMany(Refused):
    """A filter chain's connection limit or rate limit is reached.

    Attributes:
        delay_s: the delay before the connection is closed.
    """

    failure = Reason.LIMIT

    def __init__(self, details: str = "", delay_s: float = 0.0) -> None:
        super().__init__(details)
        self.delay_s = delay_s


class Incomplete(Refused):
    """A filter of the chain has not been configured yet by ECDS."""

    failure = Reason.CONTROL_PLANE


class NoFilterChain(Refused):
    """No filter chain matches the connection."""

    flag = Flag.NO_ROUTE
    failure = Reason.NO_ROUTE
    response_details = "filter_chain_not_found"


class Denied(Refused):
    """A policy or an addon does not allow the connection.

    Attributes:
        policy: the policy that denies the connection. Empty if no policy allows it.
    """

    failure = Reason.POLICY

    def __init__(self, details: str = "", policy: str = "", failure: Reason | None = None) -> None:
        super().__init__(details, failure)
        self.policy = policy


class NoCluster(Refused):
    """The cluster does not exist."""

    flag = Flag.NO_CLUSTER
    failure = Reason.NO_ROUTE


class NoHealthyHost(Refused):
    """The cluster has no usable host."""

    flag = Flag.NO_HEALTHY_UPSTREAM
    failure = Reason.NO_ENDPOINT


class Overflow(Refused):
    """A circuit breaker is full."""

    flag = Flag.UPSTREAM_OVERFLOW
    failure = Reason.LIMIT


class UpstreamFailed(Refused):
    """A host could not be reached, or it refused the tunnel.

    Attributes:
        reason: ``UPSTREAM_TRANSPORT_FAILURE_REASON``.
        status: the HTTP status of a refused tunnel, else 0.
        timed_out: whether the connect timeout passed.
        final: whether the connection must fail now, even if the filter permits more attempts.
    """

    flag = Flag.UPSTREAM_CONNECT_FAILURE

    def __init__(
        self,
        reason: str,
        *,
        status: int = 0,
        timed_out: bool = False,
        final: bool = False,
        failure: Reason | None = None,
    ) -> None:
        if failure is None and status:
            failure = Reason.PEER_DENIED if status in (401, 403) else Reason.PEER_STATUS
        super().__init__(failure=Reason.TIMEOUT if timed_out and failure is None else failure)
        self.reason = reason
        self.status = status
        self.timed_out = timed_out
        self.final = final

    def __str__(self) -> str:
        return self.reason
