"""Turns errors into response flags and details, and counts and logs each hop exactly once.

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

from collections.abc import Sequence
from dataclasses import dataclass, field

from ztunnel.envoy.stream_info import Flag, StreamInfo
from ztunnel.envoy.telemetry.access_log import Sink, write_all
from ztunnel.runtime.clock import Clock

#: Begin of ``CONNECTION_TERMINATION_DETAILS`` of a live connection that a new policy does not allow.
POLICY_CHANGE = "connection closed due to policy change"


class Refused(Exception):
    """The connection ends before bytes flow.

    Attributes:
        flag: response flag, ``None`` when the reference prints none.
        details: ``CONNECTION_TERMINATION_DETAILS``.
    """

    flag: Flag | None = None

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
        final: no other host may be tried, whatever the filter's attempts.
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


@dataclass(slots=True, eq=False)
class Hop:
    """One hop, until its log line is written.

    Attributes:
        info: the facts about it.
        filter_sinks: loggers of the TCP proxy or connection manager; ``listener_sinks`` follow them.
    """

    info: StreamInfo
    clock: Clock
    listener_sinks: Sequence[Sink] = ()
    filter_sinks: Sequence[Sink] = ()
    finished: bool = field(default=False)

    def refused(self, error: Refused) -> None:
        """Record the reason why the connection ends before bytes flow."""
        if error.flag is not None:
            self.info.flags.add(error.flag)
        if error.details:
            self.info.termination_details = error.details
        if isinstance(error, UpstreamFailed):
            self.info.upstream_failure = error.reason

    def finish(self) -> None:
        """Give back what the hop held, and write its log lines; idempotent."""
        if self.finished:
            return
        self.finished = True
        for give_back in self.info.held:
            give_back()
        self.info.duration_s = self.clock.monotonic() - self.info.started
        write_all((*self.filter_sinks, *self.listener_sinks), self.info)
