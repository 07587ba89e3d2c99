"""Errors that end a connection before bytes flow, with their response flags and details.

::

    Refused                 the connection ends before bytes flow; carries flag and details
    ├── NoFilterChain       no filter chain of the listener matches
    ├── Denied              a policy denies it
    ├── TooMany             one of the chain's limits is reached
    ├── Incomplete          the configuration of one of the chain's filters has not arrived
    ├── NoCluster           the chain names a cluster that does not exist (NC)
    ├── NoHealthyHost       the cluster has no host for it (UH)
    ├── Overflow            a circuit breaker is full (UO)
    └── UpstreamFailed      every attempt to reach a host failed (UF, and URX when no attempt is left)
"""

from __future__ import annotations

from ztunnel.proxy.envoy.stream.stream_info import Flag

#: ``CONNECTION_TERMINATION_DETAILS`` of a connection that was open at the end of a grace period.
DRAINED = "connection closed due to connection drain"
#: The same of a connection that was open when the proxy stopped without a grace period.
STOPPED = "connection closed: the proxy stops"
#: Begin of ``CONNECTION_TERMINATION_DETAILS`` of a live connection that a new policy does not allow.
POLICY_CHANGE = "connection closed due to policy change"


class Refused(Exception):
    """The connection ends before bytes flow.

    Attributes:
        flag: response flag, ``None`` when the reference prints none.
        details: ``CONNECTION_TERMINATION_DETAILS``.
        response_details: ``RESPONSE_CODE_DETAILS``.
    """

    flag: Flag | None = None
    response_details: str = ""

    def __init__(self, details: str = "") -> None:
        super().__init__(details)
        self.details = details


class TooMany(Refused):
    """A chain's limit of connections is reached.

    Attributes:
        delay_s: how long the connection is held before it is closed.
    """

    def __init__(self, details: str = "", delay_s: float = 0.0) -> None:
        super().__init__(details)
        self.delay_s = delay_s


class Incomplete(Refused):
    """The configuration of one of the chain's filters has not arrived by ECDS."""


class NoFilterChain(Refused):
    """No filter chain matches the connection."""

    flag = Flag.NO_ROUTE
    response_details = "filter_chain_not_found"


class Denied(Refused):
    """A policy does not allow the connection."""


class NoCluster(Refused):
    """The cluster does not exist."""

    flag = Flag.NO_CLUSTER


class NoHealthyHost(Refused):
    """The cluster has no usable host."""

    flag = Flag.NO_HEALTHY_UPSTREAM


class Overflow(Refused):
    """A circuit breaker is full."""

    flag = Flag.UPSTREAM_OVERFLOW


class UpstreamFailed(Refused):
    """A host could not be reached, or it refused the tunnel.

    Attributes:
        reason: ``UPSTREAM_TRANSPORT_FAILURE_REASON``.
        status: of a refused tunnel, else 0.
        timed_out: the connect timeout passed.
        final: no other host can be tried, whatever the filter's attempts.
    """

    flag = Flag.UPSTREAM_CONNECT_FAILURE

    def __init__(self, reason: str, *, status: int = 0, timed_out: bool = False, final: bool = False) -> None:
        super().__init__()
        self.reason = reason
        self.status = status
        self.timed_out = timed_out
        self.final = final

    def __str__(self) -> str:
        return self.reason
