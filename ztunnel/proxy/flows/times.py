"""Counts one process's failed connections, and measures how long the steps of connections take, in both dialects.

The size is bounded: each label has a fixed list of values, and none names a workload.
"""

from collections.abc import Mapping
from typing import Final, NamedTuple, Protocol

from hbone.settings import Role
from ztunnel.proxy.dataplane.reasons import REFUSALS, Reason, Stage
from ztunnel.proxy.flows.history import History
from ztunnel.runtime.durations import CONNECT_BUCKETS, LENGTH_BUCKETS, DurationCounts, Durations

#: The label ``path``.
PATHS: Final = ("hbone", "plain")
REPORTERS: Final = ("source", "destination")
RESULTS: Final = ("ok", "failed")


class PathTimes(NamedTuple):
    """The histograms of durations for connections with the same labels.

    Attributes:
        length: from accept to end.
        connected: from accept to the far side's answer. None if the reporter is the destination.
        failed: from accept to the failure. None if the reporter is the destination.
    """

    length: Durations
    connected: Durations | None
    failed: Durations | None


class Family(NamedTuple):
    """A family of histograms: its attribute of :class:`ConnectionTimes`, its name, help and labels."""

    attribute: str
    name: str
    help: str
    labels: tuple[str, ...]


HISTOGRAMS: Final = (
    Family("connects", "ztunnel_connect_seconds", "From accept to the far side's answer", ("path", "result")),
    Family("lengths", "ztunnel_connection_seconds", "From accept to the end of connections", ("reporter", "path")),
    Family(
        "handshakes",
        "ztunnel_handshake_seconds",
        "TLS handshakes of tunnel connections, from the TCP connection or the ClientHello",
        ("role", "result"),
    ),
    Family(
        "waits",
        "ztunnel_wait_seconds",
        "Waits of connections for what had not arrived, and of TLS contexts for secrets (Envoy's dialect)",
        ("what",),
    ),
)
#: The values of the label ``what`` in the histogram of waits.
WAITS: Final = ("workload", "policy", "certificate", "secret")
#: Histograms by attribute and labels, in a form that can be sent to another process.
TimeCounts = Mapping[str, Mapping[tuple[str, ...], DurationCounts]]


class TunnelConnection(Protocol):
    """The parts of :class:`hbone.aio.connection.Connection` that are used here."""

    role: Role
    handshake_s: float


class ConnectionTimes:
    """The counts of one process.

    Attributes:
        errors: failed connections by reporter, stage and reason.
        connects: the times from accept to the far side's answer, measured by sources, by path and result.
        lengths: the times from accept to end, by reporter and path.
        handshakes: the durations of tunnel connections' TLS handshakes, by role (client, server) and result.
        waits: how long connections had to wait, by cause. Connections that need not wait are not counted.
        history: growth of the counts in the last 15 minutes.
    """

    def __init__(self) -> None:
        self.history = History()
        self.errors: dict[tuple[str, str, str], int] = {}
        self.connects = {(path, result): Durations(CONNECT_BUCKETS) for path in PATHS for result in RESULTS}
        self.lengths = {(reporter, path): Durations(LENGTH_BUCKETS) for reporter in REPORTERS for path in PATHS}

        self.handshakes = {
            (role, result): Durations(CONNECT_BUCKETS) for role in ("client", "server") for result in RESULTS
        }
        self.waits = {(what,): Durations(CONNECT_BUCKETS) for what in WAITS}

    def shook_hands(self, role: str, seconds: float, succeeded: bool) -> None:
        """Count a finished TLS handshake."""
        self.handshakes[role, RESULTS[0] if succeeded else RESULTS[1]].observe(seconds)

    def first_request(self, connection: TunnelConnection, trace: bytes, wall_s: float) -> None:
        """Make the trace of a tunnel connection's first request the exemplar of its handshake.

        Later requests have no effect, because this resets ``handshake_s``.
        """
        seconds, connection.handshake_s = connection.handshake_s, 0.0
        if seconds and trace:
            role = "client" if connection.role is Role.CLIENT else "server"
            self.handshakes[role, RESULTS[0]].exemplify(seconds, trace, wall_s)

    def waited(self, what: str, seconds: float) -> None:
        """Record how long a connection waited. ``what`` is one of :data:`WAITS`."""
        self.waits[what,].observe(seconds)

    def failed(self, reporter: str, stage: Stage, reason: Reason) -> None:
        """Count a failed connection."""
        key = (reporter, str(stage), str(reason))
        self.errors[key] = self.errors.get(key, 0) + 1

    def failures(self) -> tuple[int, int]:
        """Return the numbers of failed and of refused connections. Refusals are included in the failures."""
        return failures_in(self.errors)

    def histograms(self, family: Family) -> Mapping[tuple[str, ...], Durations]:
        """Return the histograms of a family by the values of its labels."""
        found: Mapping[tuple[str, ...], Durations] = getattr(self, family.attribute)
        return found

    def time_counts(self) -> TimeCounts:
        """Return the histograms as plain values, to send them to another process."""
        return {
            each.attribute: {key: times.counts() for key, times in self.histograms(each).items()}
            for each in HISTOGRAMS
        }

    def add_times(self, counts: TimeCounts) -> None:
        """Add the histograms that another process has sent."""
        for family in HISTOGRAMS:
            own = self.histograms(family)
            for key, found in counts.get(family.attribute, {}).items():
                own[key].add(found)


def failures_in(errors: Mapping[tuple[str, str, str], int]) -> tuple[int, int]:
    """Return the numbers of failed and refused connections, like :meth:`ConnectionTimes.failures`.

    Args:
        errors: failed connections by reporter, stage and reason.
    """
    refused = sum(count for (_, _, reason), count in errors.items() if reason in REFUSALS)
    return sum(errors.values()), refused
