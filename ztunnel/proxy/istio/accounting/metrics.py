"""The counters behind Rust ztunnel's metrics on port 15020, with the same names and labels.

A connection looks up its :class:`TrafficSeries` once, when it opens. From then on, counting only adds integers.
The bytes of open connections are counted when the metrics page is requested, by adding up the byte counts of
running relays.

Unlike in Rust ztunnel, series are limited in two ways. A series of workloads that no longer exist expires when it
has been unused for :data:`EXPIRY_S` (``ZTUNNEL_METRIC_EXPIRY``). Once a budget of series is used up, new label
sets are counted with unknown workloads, so that a scan of the mesh cannot use up the node's memory.
"""

import logging
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache, partial
from typing import Final, NamedTuple, TypeVar

from hbone.aio.relay import ByteCounts
from hbone.tunnel_headers import Baggage
from xds.model.mesh import Changes
from xds.model.service import Service
from xds.model.workload import Workload
from ztunnel.policy.ledger import Ledger, LedgerCopy, Use
from ztunnel.proxy.addons.budget import HookCounts
from ztunnel.proxy.addons.report import AddonFamily, AddonReport, AddonState
from ztunnel.proxy.dataplane.gauges import Gauge
from ztunnel.proxy.dataplane.handover.counts import HandoverCounts
from ztunnel.proxy.flows.history import Steps, Totals
from ztunnel.proxy.flows.ring import FlowRing
from ztunnel.proxy.flows.times import PATHS, ConnectionTimes, PathTimes, TimeCounts, failures_in
from ztunnel.proxy.istio.accounting.denials import Pair
from ztunnel.proxy.istio.accounting.traffic_series import TrafficSeries
from ztunnel.proxy.istio.certificates.manager import Moments
from ztunnel.runtime.bounded_counts import BoundedCounts
from ztunnel.runtime.durations import Durations
from ztunnel.runtime.parts import split
from ztunnel.runtime.watchdog import LoopDelays

log = logging.getLogger(__name__)

UNKNOWN = "unknown"
LabelsT = TypeVar("LabelsT", str, tuple[str, ...], tuple[str, str, str])
EXPIRY_S = 900.0

SIDE_LABELS = (
    "workload",
    "canonical_service",
    "canonical_revision",
    "workload_namespace",
    "principal",
    "app",
    "version",
    "cluster",
)
TRAFFIC_LABELS = (
    "reporter",
    *(f"source_{name}" for name in SIDE_LABELS),
    "destination_service",
    "destination_service_namespace",
    "destination_service_name",
    *(f"destination_{name}" for name in SIDE_LABELS),
    "request_protocol",
    "response_flags",
    "connection_security_policy",
    "source_region",
    "source_zone",
    "destination_region",
    "destination_zone",
)
#: The labels of the counter for ended connections by port. Its label ``result`` is ``ok`` or ``failed``.
PORT_LABELS: Final = (
    *("reporter", "destination_workload", "destination_workload_namespace"),
    *("destination_service_name", "destination_port", "result"),
)
_SECURITY: Final = TRAFFIC_LABELS.index("connection_security_policy")
_MUTUAL_TLS: Final = "mutual_tls"
#: The labels that operators can remove from metrics: all except the reporter, the response flags and mTLS use.
REMOVABLE_LABELS = frozenset(TRAFFIC_LABELS) - {"reporter", "response_flags", "connection_security_policy"}


class PeerLabels(NamedTuple):
    """Labels of a connection's source or destination. Empty values are printed as unknown."""

    workload: str = ""
    canonical_service: str = ""
    canonical_revision: str = ""
    namespace: str = ""
    principal: str = ""
    app: str = ""
    version: str = ""
    cluster: str = ""
    region: str = ""
    zone: str = ""
    known: bool = False

    @classmethod
    def of(cls, workload: Workload, principal: str = "") -> "PeerLabels":
        """Return the labels of a workload as the control plane describes it."""
        place = workload.locality
        return cls(
            workload.workload_name,
            workload.canonical_name,
            workload.canonical_revision,
            workload.namespace,
            principal,
            workload.canonical_name,
            workload.canonical_revision,
            workload.cluster_id,
            place.region,
            place.zone,
            known=True,
        )

    @classmethod
    def of_baggage(cls, baggage: Baggage, principal: str = "") -> "PeerLabels":
        """Return the labels of a peer as it describes itself in its baggage."""
        return cls(
            baggage.workload_name,
            baggage.service_name,
            baggage.revision,
            baggage.namespace,
            principal,
            baggage.workload_name,
            baggage.revision,
            baggage.cluster_id,
            baggage.region,
            baggage.zone,
            known=baggage != Baggage(),
        )


def traffic_labels(
    reporter: str, source: PeerLabels, destination: PeerLabels, service: Service | None, *, secured: bool
) -> tuple[str, ...]:
    """Return the values of :data:`TRAFFIC_LABELS` for a connection, without the last four if neither side is
    known.
    """
    named = (service.hostname, service.namespace, service.name) if service is not None else (UNKNOWN,) * 3
    return _labels(reporter, source, destination, named, secured)


@lru_cache(maxsize=4096)  # called twice per connection, for few pairs
def _labels(
    reporter: str, source: PeerLabels, destination: PeerLabels, named: tuple[str, ...], secured: bool
) -> tuple[str, ...]:
    labels = (
        reporter,
        *(value or UNKNOWN for value in source[:8]),
        *named,
        *(value or UNKNOWN for value in destination[:8]),
        "tcp",
        "-",
        _MUTUAL_TLS if secured else UNKNOWN,
    )
    if not (source.known or destination.known):
        return labels
    return (
        *labels,
        *(value or UNKNOWN for value in (source.region, source.zone, destination.region, destination.zone)),
    )


@lru_cache(maxsize=4096)
def without(labels: tuple[str, ...], removed: frozenset[str]) -> tuple[str, ...]:
    """Return the label values (of :data:`TRAFFIC_LABELS`), with the labels removed by the operator set to
    unknown.
    """
    return tuple(
        UNKNOWN if name in removed else value for name, value in zip(TRAFFIC_LABELS, labels, strict=False)
    )


class TrafficCounts(NamedTuple):
    """A snapshot of the counts in a :class:`TrafficSeries`. ``expires`` is whether the series is dropped once
    unused.
    """

    labels: tuple[str, ...]
    opened: int
    closed: tuple[tuple[str, int], ...]
    received: int
    sent: int
    workloads: tuple[str, ...]
    moved: int = 0
    refused: int = 0
    expires: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Counts:
    """One part of another process's counts, as sent between processes. All parts together are the process's total.

    Attributes:
        sockets_open: sockets that are open now, by reporter.
        gauges: the values of some gauges, by name.
    """

    traffic: tuple[TrafficCounts, ...] = ()
    crl_rejections: Mapping[str, int] = field(default_factory=dict)
    crl_untracked: Mapping[str, int] = field(default_factory=dict)
    on_demand_dns: Mapping[tuple[str, ...], int] = field(default_factory=dict)
    ports: Mapping[tuple[str, ...], int] = field(default_factory=dict)
    errors: Mapping[tuple[str, str, str], int] = field(default_factory=dict)
    times: TimeCounts = field(default_factory=dict)
    history: Steps | None = None
    decisions: LedgerCopy[Pair] | None = None
    sockets_open: Mapping[str, int] = field(default_factory=dict)
    gauges: Mapping[str, float] = field(default_factory=dict)
    connect_retries: int = 0
    closed_for_abuse: int = 0
    over_budget: int = 0
    exports_dropped: Mapping[str, int] = field(default_factory=dict)
    handovers: Mapping[tuple[str, str], int] = field(default_factory=dict)
    handover_pauses: tuple[int, ...] = ()
    handover_paused_s: float = 0.0
    loop_stalls: int = 0
    loop_late_s: float = 0.0
    addon_hooks: tuple[HookCounts, ...] = ()
    addon_families: tuple[AddonFamily, ...] = ()
    addon_states: tuple[AddonState, ...] = ()


#: The counters that only the main process increments.
_OF_MAIN = (
    "xds_terminations",
    "xds_messages",
    "xds_bytes",
    "dns_requests",
    "dns_forwarded",
    "dns_failures",
    "dns_durations",
    "dns_dropped",
    "certificates",
    "objects",
    "refused",
    "processes",
)
#: The :attr:`Metrics.gauges` that connections change in every process. The page shows the sum over all processes.
_SUMMED: Final = (
    "ztunnel_half_open_connections",
    "ztunnel_half_open_turned_away",
    "ztunnel_accepts_paused",
    "ztunnel_log_lines_dropped",
    "ztunnel_baggage_refused",
)
#: The only entry of ``_SUMMED`` that is a gauge, which can decrease; all other entries are counters.
_HALF_OPEN: Final = _SUMMED[0]
#: The metric label ``result`` of a policy decision, by kind of decision.
DECISIONS: Final = {Use.ALLOWED: "allowed", Use.DENIED: "denied", Use.ENDED: "ended"}
#: The policy name under which a denial is counted if ALLOW policies exist but none matched.
NONE_MATCHED: Final = "-"
#: The number of series in each part that a process sends. Decoding one part takes two milliseconds.
_SERIES_PER_PART: Final = 50
#: The number of workloads in each part. A series has a uid of about 80 characters for each pod that it was seen
#: with, and the main process ends a worker that sends more than 4 MiB at once.
_WORKLOADS_PER_PART: Final = 4000


class Metrics(ConnectionTimes):
    """All counters of one process.

    Args:
        version: Istio's version, for ``istio_build``.
        series_budget: the largest number of traffic series.
        expiry_s: how long an unused series of removed workloads is kept. 0: for ever.
        removed: labels to omit from traffic series, a subset of :data:`REMOVABLE_LABELS`. Connections that differ
        only in these labels share one series from the start. So no counter decreases.
        flows: the flight recorder. None disables it.
        ports: whether to count connections by port, too.
    """

    def __init__(
        self,
        version: str,
        series_budget: int,
        *,
        expiry_s: float = EXPIRY_S,
        removed: frozenset[str] = frozenset(),
        flows: FlowRing | None = None,
        ports: bool = False,
    ) -> None:
        super().__init__()
        self.version = version
        self.removed = removed
        self._budget = series_budget
        self._expiry_s = expiry_s
        self._traffic: dict[tuple[str, ...], TrafficSeries] = {}
        self._by_workload: dict[str, set[TrafficSeries]] = defaultdict(set)
        self._gone: set[TrafficSeries] = set()
        self.over_budget = 0
        #: The number of series dropped so far. ``forgotten_traffic`` holds the connections and bytes that they
        #: counted.
        self.forgotten = 0
        self.forgotten_traffic = (0, 0)
        self.sockets_open = {"source": 0, "destination": 0}
        self.crl_rejections = {"source": 0, "destination": 0}
        self.crl_untracked = {"source": 0, "destination": 0}
        self.on_demand_dns: BoundedCounts[tuple[str, ...]] = BoundedCounts()
        #: The number of ended connections by :data:`PORT_LABELS`. None if counting by port is disabled.
        self.ports: BoundedCounts[tuple[str, ...]] | None = BoundedCounts() if ports else None
        #: Returns the number of ended xDS streams by reason; called at each scrape of the metrics page.
        self.xds_terminations: Callable[[], dict[str, int]] = dict
        self.xds_messages: dict[str, int] = {}
        self.xds_bytes: dict[str, int] = {}
        self.dns_requests: BoundedCounts[tuple[str, ...]] = BoundedCounts()
        self.dns_forwarded: BoundedCounts[tuple[str, ...]] = BoundedCounts()
        self.dns_failures: dict[tuple[str, ...], int] = {}
        self.dns_durations: dict[tuple[str, ...], Durations] = {}
        #: The number of dropped DNS queries by :class:`ztunnel.proxy.istio.dns.server.Drop`.
        self.dns_dropped: dict[str, int] = {}
        self.ledger = Ledger[Pair]()
        #: The flight recorder, which keeps the latest ended connections. It stays empty if disabled.
        self.flows = flows if flows is not None else FlowRing(0)
        self.connect_retries = 0
        self.loop = LoopDelays()
        #: The number of tunnel connections closed because the peer exceeded a protocol limit.
        self.closed_for_abuse = 0
        #: Returns the number of items dropped by this process's export, by signal.
        self.dropped_here: Callable[[], Mapping[str, int]] = dict
        self._dropped_elsewhere: dict[str, int] = {}
        #: Returns the counts of this process's addons.
        self.addons_here: Callable[[], AddonReport] = AddonReport
        self._addons_elsewhere = AddonReport()
        self.handovers = HandoverCounts()
        self.gauges: dict[str, Gauge] = {}
        self._gauges_elsewhere: dict[str, float] = defaultdict(float)
        #: Returns when certificates expire; called at each scrape of the metrics page.
        self.certificates: Callable[[], Moments] = Moments
        #: Returns the number of objects received from the control plane, by kind; called at each scrape.
        self.objects: Callable[[], Mapping[str, int]] = dict
        #: Returns the number of resources that could not be parsed, by kind; called at each scrape.
        self.refused: Callable[[], Mapping[str, int]] = dict
        #: Returns the ids of the other processes that the ``process_*`` metrics include.
        self.processes: Callable[[], Sequence[int]] = tuple

    # Traffic

    def opened(
        self,
        labels: tuple[str, ...],
        workloads: Iterable[str],
        counts: ByteCounts,
        now_s: float,
        *,
        foreign: bool = False,
        moved: bool = False,
    ) -> TrafficSeries:
        """Count an opened connection, and return its series, on which the caller counts its end.

        Args:
            labels: see :func:`traffic_labels`.
            workloads: the uids of the source and destination workloads, if the mesh has them.
            counts: the byte counts of the connection's relay.
            now_s: monotonic seconds.
            foreign: whether some labels come from a peer's baggage instead of the mesh. Such a series expires once
                it is unused; other series only after their workloads were removed.
            moved: whether another process has already counted the connection as opened, along with its earlier
                bytes.
        """
        if self.removed:
            labels = without(labels, self.removed)
        series = self._traffic.get(labels)
        if series is None:
            series = self._new(labels)
        if moved:
            series.moved_here(counts, now_s)
        else:
            series.opened_now(counts, now_s)
        for uid in workloads:
            if uid not in series.workloads:
                series.workloads.add(uid)
                self._by_workload[uid].add(series)
                self._gone.discard(series)
        if foreign:
            self._gone.add(series)
        return series

    def _times(self, labels: tuple[str, ...]) -> PathTimes:
        path = PATHS[0] if labels[_SECURITY : _SECURITY + 1] == (_MUTUAL_TLS,) else PATHS[1]
        if labels[:1] != ("source",):
            return PathTimes(self.lengths["destination", path], None, None)
        return PathTimes(self.lengths["source", path], self.connects[path, "ok"], self.connects[path, "failed"])

    def _new(self, labels: tuple[str, ...]) -> TrafficSeries:
        if len(self._traffic) >= self._budget:
            if not self.over_budget:
                log.warning(
                    "%d metric series are in use; further ones are counted with unknown workloads "
                    "(ZTUNNEL_METRIC_SERIES)",
                    self._budget,
                )
            self.over_budget += 1
            labels = tuple(
                value
                if name in ("reporter", "request_protocol", "response_flags", "connection_security_policy")
                else UNKNOWN
                for name, value in zip(TRAFFIC_LABELS, labels, strict=False)
            )
            known = self._traffic.get(labels)
            if known is not None:
                return known
        series = self._traffic[labels] = TrafficSeries(labels, self._times(labels))
        return series

    def changed(self, changes: Changes, exists: Iterable[str]) -> None:
        """Let the series of removed workloads expire: those in ``changes`` but not in ``exists``."""
        for uid in changes.workloads.difference(exists):
            for series in self._by_workload.pop(uid, ()):
                series.workloads.discard(uid)
                if not series.workloads:
                    self._gone.add(series)

    def expire(self, now_s: float) -> int:
        """Drop the series of removed workloads that were unused for ``expiry_s``. Return how many were dropped."""
        if not self._expiry_s:
            return 0
        old = [series for series in self._gone if series.idle and now_s - series.used_s > self._expiry_s]
        self.forgotten += len(old)
        opened, moved = self.forgotten_traffic
        self.forgotten_traffic = (
            opened + sum(series.opened for series in old),
            moved + sum(series.received + series.sent for series in old),
        )
        for series in old:
            self._gone.discard(series)
            self._traffic.pop(series.labels, None)
            for uid in series.workloads:
                users = self._by_workload.get(uid)
                if users is not None:
                    users.discard(series)
                    if not users:
                        del self._by_workload[uid]
        return len(old)

    @property
    def series(self) -> Collection[TrafficSeries]:
        """Every traffic series."""
        return self._traffic.values()

    @property
    def exports_dropped(self) -> dict[str, int]:
        """The number of items lost by exports, by signal: ``logs`` (lines) and ``metrics`` (requests)."""
        found = dict(self.dropped_here())
        _add(found, self._dropped_elsewhere)
        return found

    @property
    def addons(self) -> AddonReport:
        """The addons' counts. Reading this calls the addons' ``metrics`` hooks, so a page reads it only once."""
        report = self._addons_elsewhere.copy()
        here = self.addons_here()
        report.add(here.hooks.values(), here.families.values(), here.states)
        return report

    # Several processes

    def counts(self) -> Iterator[Counts]:
        """Yield all counts of this process in parts, to send them to another process."""
        yield Counts(
            crl_rejections=dict(self.crl_rejections),
            crl_untracked=dict(self.crl_untracked),
            on_demand_dns=dict(self.on_demand_dns),
            ports=dict(self.ports or {}),
            errors=dict(self.errors),
            times=self.time_counts(),
            history=self.history.steps(),
            decisions=self.ledger.copy(),
            sockets_open=dict(self.sockets_open),
            gauges={
                name: gauge.read() + self._gauges_elsewhere[name]
                for name in _SUMMED
                if (gauge := self.gauges.get(name)) is not None
            },
            connect_retries=self.connect_retries,
            closed_for_abuse=self.closed_for_abuse,
            over_budget=self.over_budget,
            exports_dropped=self.exports_dropped,
            handovers=dict(self.handovers.connections),
            handover_pauses=self.handovers.pauses,
            handover_paused_s=self.handovers.paused_s,
            loop_stalls=self.loop.stalls.value,
            loop_late_s=self.loop.late_s,
        )
        addons = self.addons
        if addons.states or addons.hooks:
            yield Counts(addon_hooks=tuple(addons.hooks.values()), addon_states=tuple(addons.states))
        for family in addons.families.values():
            yield Counts(addon_families=(family,))
        for part in split(
            list(self._traffic.values()),
            lambda series: len(series.workloads),
            most_items=_SERIES_PER_PART,
            most_size=_WORKLOADS_PER_PART,
        ):
            yield Counts(
                traffic=tuple(
                    TrafficCounts(
                        series.labels,
                        series.opened,
                        tuple((str(flags), count) for flags, count in series.closed.items()),
                        series.received_now,
                        series.sent_now,
                        tuple(series.workloads),
                        series.moved,
                        series.refused,
                        series in self._gone,
                    )
                    for series in part
                )
            )

    def add(self, part: Counts, *, lost: bool = False, now_s: float = 0.0) -> None:
        """Add the counts of another process.

        Args:
            part: some of the other process's counts.
            lost: whether the process has died. Its open connections then count as closed with flags ``-``, because
                their end cannot be reported.
            now_s: monotonic seconds.
        """
        if lost:
            self.history.absorb(_totals(part))
        for labels, opened, closed, received, sent, workloads, moved, refused, expires in part.traffic:
            series = self._traffic.get(labels)
            if series is None:
                series = self._traffic[labels] = TrafficSeries(labels, self._times(labels))
            series.opened += opened
            series.moved += moved
            series.refused += refused
            opened += moved
            series.received += received
            series.sent += sent
            for flags, count in closed:
                series.closed[flags] = series.closed.get(flags, 0) + count
                opened -= count
            series.used_s = max(series.used_s, now_s)
            if lost:
                if opened:
                    series.closed["-"] = series.closed.get("-", 0) + opened
                for uid in workloads:
                    series.workloads.add(uid)
                    self._by_workload[uid].add(series)
                if expires:
                    self._gone.add(series)
        _add(self.crl_rejections, part.crl_rejections)
        _add(self.crl_untracked, part.crl_untracked)
        _add(self.on_demand_dns, part.on_demand_dns)
        if self.ports is not None:
            _add(self.ports, part.ports)
        _add(self.errors, part.errors)
        self.add_times(part.times)
        if part.history is not None:
            self.history.add(part.history)
        if part.decisions is not None:
            self.ledger.add(part.decisions)
        if not lost:
            for reporter, count in part.sockets_open.items():
                self.sockets_open[reporter] += count
        for name, value in part.gauges.items():
            if name in _SUMMED and not (lost and name == _HALF_OPEN):
                self._gauges_elsewhere[name] += value
        self.connect_retries += part.connect_retries
        self.closed_for_abuse += part.closed_for_abuse
        self.over_budget += part.over_budget
        _add(self._dropped_elsewhere, part.exports_dropped)
        self.handovers.add(part.handovers, part.handover_pauses, part.handover_paused_s)
        self.loop.stalls.value += part.loop_stalls
        self.loop.late_s += part.loop_late_s
        # A dead process has no current gauges and states, so only its counters are added.
        families = [each for each in part.addon_families if each.kind == "counter" or not lost]
        self._addons_elsewhere.add(part.addon_hooks, families, () if lost else part.addon_states)

    def page_with(self) -> "Metrics":
        """Return the sum of this process's and other processes' counts, for one page."""
        ports = self.ports is not None
        page = Metrics(self.version, self._budget, expiry_s=self._expiry_s, removed=self.removed, ports=ports)
        for name in _OF_MAIN:
            setattr(page, name, getattr(self, name))
        summed = page._gauges_elsewhere
        page.gauges = {
            name: gauge._replace(read=partial(summed.__getitem__, name)) if name in _SUMMED else gauge
            for name, gauge in self.gauges.items()
        }
        for part in self.counts():
            page.add(part)
        return page


def _totals(part: Counts) -> Totals:
    return Totals(
        sum(counts.opened for counts in part.traffic),
        *failures_in(part.errors),
        sum(counts.received + counts.sent for counts in part.traffic),
    )


def _add(own: dict[LabelsT, int], others: Mapping[LabelsT, int]) -> None:
    for labels, count in others.items():
        own[labels] = own.get(labels, 0) + count
