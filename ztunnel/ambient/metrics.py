"""What today's Rust ztunnel publishes on port 15020, under the same names and labels.

A connection finds its :class:`TrafficSeries` once, when it is opened; from then on counting is adding integers,
and bytes are not counted at all before somebody asks: a page adds what running relays have moved so far.

Two things are bounded that upstream's are not. Series of workloads that no longer exist go away when nothing has
used them for :data:`EXPIRY_S`; and beyond a budget of series new ones are counted with unknown workloads, so that
a scan of the mesh cannot take the node's memory.
"""

import logging
import zlib
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from hbone.aio.relay import ByteCounts
from hbone.headers import Baggage
from xds.model.mesh import Changes
from xds.model.service import Service
from xds.model.workload import Workload
from ztunnel.admin.page import Page
from ztunnel.telemetry.exposition import Family, lines, process_families

log = logging.getLogger(__name__)

UNKNOWN = "unknown"
EXPIRY_S = 900.0
OPENMETRICS = "application/openmetrics-text;charset=utf-8;version=1.0.0"
PLAIN = "text/plain; charset=utf-8"
DNS_BUCKETS = (0.0005, 0.001, 0.01, 0.1, 1.0, 5.0)

_SIDE = (
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
    *(f"source_{name}" for name in _SIDE),
    "destination_service",
    "destination_service_namespace",
    "destination_service_name",
    *(f"destination_{name}" for name in _SIDE),
    "request_protocol",
    "response_flags",
    "connection_security_policy",
    "source_region",
    "source_zone",
    "destination_region",
    "destination_zone",
)
_FLAGS = TRAFFIC_LABELS.index("response_flags")


class Side(NamedTuple):
    """One side of a connection, as labels say it; empty is unknown."""

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
    def of(cls, workload: Workload, principal: str = "") -> "Side":
        """From the control plane's description."""
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
    def of_baggage(cls, baggage: Baggage, principal: str = "") -> "Side":
        """From what the peer says of itself."""
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
    reporter: str, source: Side, destination: Side, service: Service | None, *, secured: bool
) -> tuple[str, ...]:
    """Values of :data:`TRAFFIC_LABELS`; the last four are left out while nobody is known."""
    named = (service.hostname, service.namespace, service.name) if service is not None else (UNKNOWN,) * 3
    labels = (
        reporter,
        *(value or UNKNOWN for value in source[:8]),
        *named,
        *(value or UNKNOWN for value in destination[:8]),
        "tcp",
        "-",
        "mutual_tls" if secured else UNKNOWN,
    )
    if not (source.known or destination.known):
        return labels
    return (
        *labels,
        *(value or UNKNOWN for value in (source.region, source.zone, destination.region, destination.zone)),
    )


class TrafficSeries:
    """Counters of one label set.

    Attributes:
        closed: connections by response flags.
        running: byte counts of relays under way; ``received`` and ``sent`` are those of finished ones, client to
            server and back, whoever reports.
        workloads: uids that used it.
    """

    __slots__ = ("closed", "labels", "opened", "received", "running", "sent", "used_s", "workloads")

    def __init__(self, labels: tuple[str, ...]) -> None:
        self.labels = labels
        self.opened = 0
        self.closed: dict[str, int] = {}
        self.received = 0
        self.sent = 0
        self.running: set[ByteCounts] = set()
        self.used_s = 0.0
        self.workloads: set[str] = set()

    @property
    def idle(self) -> bool:
        """Nothing counts here now."""
        return self.opened == sum(self.closed.values())

    def finished(self, flags: str, counts: ByteCounts | None) -> None:
        """A connection ended."""
        self.closed[flags] = self.closed.get(flags, 0) + 1
        if counts is not None:
            self.running.discard(counts)
            self.received += counts.sent
            self.sent += counts.received


class TrafficCounts(NamedTuple):
    """What a :class:`TrafficSeries` has counted, as a value."""

    labels: tuple[str, ...]
    opened: int
    closed: tuple[tuple[str, int], ...]
    received: int
    sent: int
    workloads: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Counts:
    """A part of what another process has counted; parts add up.

    Attributes:
        named: counters by name and labels, see :data:`_NAMED`.
        sockets_open: now, by reporter.
    """

    traffic: tuple[TrafficCounts, ...] = ()
    named: Mapping[str, Mapping[Any, int]] = field(default_factory=dict)
    sockets_open: Mapping[str, int] = field(default_factory=dict)
    connect_retries: int = 0
    over_budget: int = 0


#: Counters that workers have too; what they have not is the main process's.
_NAMED = ("crl_rejections", "crl_untracked", "on_demand_dns", "authorization_dry_run")
_OF_MAIN = (
    "xds_terminations",
    "xds_messages",
    "xds_bytes",
    "dns_requests",
    "dns_forwarded",
    "dns_failures",
    "dns_durations",
    "gauges",
    "processes",
)
#: Series of one part: a millisecond.
_SERIES_PER_PART = 500


class Metrics:
    """All of them.

    Args:
        version: of Istio, for ``istio_build``.
        series_budget: most traffic series.
    """

    def __init__(self, version: str, series_budget: int) -> None:
        self._version = version
        self._budget = series_budget
        self._traffic: dict[tuple[str, ...], TrafficSeries] = {}
        self._by_workload: dict[str, set[TrafficSeries]] = defaultdict(set)
        self._gone: set[TrafficSeries] = set()
        self.over_budget = 0
        self.sockets_open = {"source": 0, "destination": 0}
        self.crl_rejections = {"source": 0, "destination": 0}
        self.crl_untracked = {"source": 0, "destination": 0}
        self.on_demand_dns: dict[tuple[str, ...], int] = {}
        #: By reason, asked for when a page is.
        self.xds_terminations: Callable[[], dict[str, int]] = dict
        self.xds_messages: dict[str, int] = {}
        self.xds_bytes: dict[str, int] = {}
        self.dns_requests: dict[tuple[str, ...], int] = {}
        self.dns_forwarded: dict[tuple[str, ...], int] = {}
        self.dns_failures: dict[tuple[str, ...], int] = {}
        self.dns_durations: dict[tuple[str, ...], DnsDurations] = {}
        self.authorization_dry_run: dict[tuple[str, str, str], int] = {}
        self.connect_retries = 0
        self.gauges: dict[str, Gauge] = {}
        #: Ids of further processes that ``process_*`` is about.
        self.processes: Callable[[], Sequence[int]] = tuple

    # Traffic

    def opened(
        self, labels: tuple[str, ...], workloads: Iterable[str], counts: ByteCounts, now_s: float
    ) -> TrafficSeries:
        """Count a connection; its relay moves ``counts``."""
        series = self._traffic.get(labels)
        if series is None:
            series = self._new(labels)
        series.opened += 1
        series.used_s = now_s
        series.running.add(counts)
        for uid in workloads:
            if uid not in series.workloads:
                series.workloads.add(uid)
                self._by_workload[uid].add(series)
                self._gone.discard(series)
        return series

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
        series = self._traffic[labels] = TrafficSeries(labels)
        return series

    def changed(self, changes: Changes, exists: Iterable[str]) -> None:
        """Workloads came or went; ``exists``: those of ``changes`` that are still there."""
        for uid in changes.workloads.difference(exists):
            for series in self._by_workload.pop(uid, ()):
                series.workloads.discard(uid)
                if not series.workloads:
                    self._gone.add(series)

    def expire(self, now_s: float) -> int:
        """Drop series that nothing has used for long and whose workloads are gone; how many."""
        old = [series for series in self._gone if series.idle and now_s - series.used_s > EXPIRY_S]
        for series in old:
            self._gone.discard(series)
            self._traffic.pop(series.labels, None)
        return len(old)

    @property
    def series(self) -> int:
        """Traffic series there are."""
        return len(self._traffic)

    # Several processes

    def counts(self) -> Iterator[Counts]:
        """Everything counted here, for another process, in parts."""
        yield Counts(
            named={
                name: {_plain(labels): count for labels, count in getattr(self, name).items()} for name in _NAMED
            },
            sockets_open=dict(self.sockets_open),
            connect_retries=self.connect_retries,
            over_budget=self.over_budget,
        )
        every = list(self._traffic.values())
        for start in range(0, len(every), _SERIES_PER_PART):
            yield Counts(
                traffic=tuple(
                    TrafficCounts(
                        series.labels,
                        series.opened,
                        tuple((str(flags), count) for flags, count in series.closed.items()),
                        series.received + sum(counts.sent for counts in series.running),
                        series.sent + sum(counts.received for counts in series.running),
                        tuple(series.workloads),
                    )
                    for series in every[start : start + _SERIES_PER_PART]
                )
            )

    def add(self, part: Counts, *, lost: bool = False, now_s: float = 0.0) -> None:
        """Count what another process has counted.

        Args:
            lost: that process is no more, and its connections with it: whatever was open there is closed, with
                nobody left to say how.
        """
        for labels, opened, closed, received, sent, workloads in part.traffic:
            series = self._traffic.get(labels)
            if series is None:
                series = self._traffic[labels] = TrafficSeries(labels)
            series.opened += opened
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
        for name, values in part.named.items():
            own = getattr(self, name)
            for labels, count in values.items():
                own[labels] = own.get(labels, 0) + count
        if not lost:
            for reporter, count in part.sockets_open.items():
                self.sockets_open[reporter] += count
        self.connect_retries += part.connect_retries
        self.over_budget += part.over_budget

    def page_with(self) -> "Metrics":
        """The same numbers apart, to add those of other processes to for one page."""
        page = Metrics(self._version, self._budget)
        for name in _OF_MAIN:
            setattr(page, name, getattr(self, name))
        for part in self.counts():
            page.add(part)
        return page

    # Pages

    def collect(self) -> Iterator[Family]:
        """Every family that has samples."""
        yield _family(
            "istio_build",
            "gauge",
            "Istio component build info",
            [(("ztunnel", self._version), 1.0)],
            ("component", "tag"),
        )
        yield from filter(lambda family: bool(family.samples), self._traffic_families())
        yield from filter(lambda family: bool(family.samples), self._other_families())
        yield from process_families(self.processes())

    def _traffic_families(self) -> Iterator[Family]:
        opened: list[Sample] = []
        closed: list[Sample] = []
        failed: list[Sample] = []
        received: list[Sample] = []
        sent: list[Sample] = []
        for labels, series in self._traffic.items():
            opened.append((labels, series.opened))
            received.append((labels, series.received + sum(counts.sent for counts in series.running)))
            sent.append((labels, series.sent + sum(counts.received for counts in series.running)))
            for flags, count in series.closed.items():
                final = (*labels[:_FLAGS], flags, *labels[_FLAGS + 1 :])
                closed.append((final, count))
                if flags != "-":
                    failed.append((final, count))
        connections = "The total number of TCP connections "
        yield _family("istio_tcp_connections_opened", "counter", connections + "opened", opened, TRAFFIC_LABELS)
        yield _family("istio_tcp_connections_closed", "counter", connections + "closed", closed, TRAFFIC_LABELS)
        yield _family(
            "istio_tcp_connections_failed",
            "counter",
            connections + "that failed (unstable)",
            failed,
            TRAFFIC_LABELS,
        )
        size = "The size of total bytes {} in case of a TCP connection"
        yield _family(
            "istio_tcp_received_bytes",
            "counter",
            size.format("received during request"),
            received,
            TRAFFIC_LABELS,
            "bytes",
        )
        yield _family(
            "istio_tcp_sent_bytes", "counter", size.format("sent during response"), sent, TRAFFIC_LABELS, "bytes"
        )

    def _other_families(self) -> Iterator[Family]:
        reporter = ("reporter",)
        yield _family(
            "istio_tcp_sockets_open",
            "gauge",
            "The current number of open TCP sockets (unstable)",
            _by_one(self.sockets_open),
            reporter,
        )
        yield _family(
            "istio_on_demand_dns",
            "counter",
            "The total number of on-demand DNS requests made (unstable)",
            list(self.on_demand_dns.items()),
            (*(f"source_{name}" for name in _SIDE), "hostname"),
        )
        crl = "The total number of connections {} (unstable)"
        yield _family(
            "istio_crl_policy_rejections",
            "counter",
            crl.format("rejected by revocation lists"),
            _nonzero(self.crl_rejections),
            reporter,
        )
        yield _family(
            "istio_crl_untracked_connections",
            "counter",
            crl.format("that revocation cannot end"),
            _nonzero(self.crl_untracked),
            reporter,
        )
        yield _family(
            "istio_xds_connection_terminations",
            "counter",
            "The total number of completed connections to the control plane (unstable)",
            _by_one(self.xds_terminations()),
            ("reason",),
        )
        yield _family(
            "istio_xds_message",
            "counter",
            "The total number of messages received (unstable)",
            _by_one(self.xds_messages),
            ("url",),
        )
        yield _family(
            "istio_xds_message_bytes",
            "counter",
            "The total number of bytes received (unstable)",
            _by_one(self.xds_bytes),
            ("url",),
            "bytes",
        )
        yield from self._dns_families()
        yield _family(
            "ztunnel_authorization_dry_run",
            "counter",
            "Connections that dry-run policies would have decided about (unstable)",
            list(self.authorization_dry_run.items()),
            ("policy", "action", "result"),
        )
        yield _family(
            "ztunnel_connect_retries",
            "counter",
            "Further endpoints tried after one failed (unstable)",
            [((), self.connect_retries)],
            (),
        )
        yield _family(
            "ztunnel_metric_series", "gauge", "Traffic label sets in use (unstable)", [((), self.series)], ()
        )
        yield _family(
            "ztunnel_metric_series_over_budget",
            "counter",
            "Label sets counted as unknown (unstable)",
            [((), self.over_budget)],
            (),
        )
        for name, gauge in self.gauges.items():
            yield _family(name, gauge.kind, gauge.help, [((), gauge.read())], ())

    def _dns_families(self) -> Iterator[Family]:
        labels = (
            "request_query_type",
            "request_protocol",
            "source_canonical_service",
            "source_canonical_revision",
        )
        upstream = "The total number of DNS requests forwarded to upstream (unstable)"
        yield _family(
            "istio_dns_requests",
            "counter",
            "The total number of DNS requests (unstable)",
            list(self.dns_requests.items()),
            labels,
        )
        yield _family("istio_dns_upstream_requests", "counter", upstream, list(self.dns_forwarded.items()), labels)
        yield _family(
            "istio_dns_upstream_failures",
            "counter",
            "The total number of DNS requests that upstream failed (unstable)",
            list(self.dns_failures.items()),
            labels,
        )
        name = "istio_dns_upstream_request_duration_seconds"
        metric = Family(
            name, "The time Istio takes to get DNS response from upstream (unstable).", "histogram", "seconds"
        )
        for values, durations in self.dns_durations.items():
            shared = dict(zip(labels, values, strict=True))
            for bound, count in durations.cumulative():
                metric.add(f"{name}_bucket", shared | {"le": bound}, count)
            metric.add(f"{name}_sum", shared, durations.total_s)
            metric.add(f"{name}_count", shared, durations.count)
        yield metric


class Gauge(NamedTuple):
    """A number read when somebody asks; ``kind`` is ``gauge`` or ``counter``."""

    kind: str
    help: str
    read: Callable[[], float]


class DnsDurations:
    """A histogram of :data:`DNS_BUCKETS`."""

    __slots__ = ("_counts", "count", "total_s")

    def __init__(self) -> None:
        self._counts = [0] * len(DNS_BUCKETS)
        self.count = 0
        self.total_s = 0.0

    def observe(self, seconds: float) -> None:
        """Count one answer."""
        self.count += 1
        self.total_s += seconds
        for index, bound in enumerate(DNS_BUCKETS):
            if seconds <= bound:
                self._counts[index] += 1
                break

    def cumulative(self) -> Iterator[tuple[str, int]]:
        """(upper bound, answers up to it)."""
        seen = 0
        for bound, count in zip(DNS_BUCKETS, self._counts, strict=True):
            seen += count
            yield str(bound), seen
        yield "+Inf", self.count


def _plain(labels: str | tuple[str, ...]) -> str | tuple[str, ...]:
    """Texts alone, where they may be members of enumerations."""
    return str(labels) if isinstance(labels, str) else tuple(str(label) for label in labels)


Sample = tuple[tuple[str, ...], float]


def _by_one(values: dict[str, int]) -> list[Sample]:
    return [((label,), value) for label, value in values.items()]


def _nonzero(values: dict[str, int]) -> list[Sample]:
    return [((label,), value) for label, value in values.items() if value]


def _family(
    name: str, kind: str, text: str, samples: Iterable[Sample], labels: tuple[str, ...], unit: str = ""
) -> Family:
    """A family from counters by label values; names of counters without ``_total``."""
    metric = Family(name, text + ".", kind, unit)
    sample_name = f"{name}_total" if kind == "counter" else name
    for values, value in samples:
        metric.add(sample_name, dict(zip(labels, values, strict=False)), value)
    return metric


def page(metrics: Metrics, accept: str, accept_encoding: str) -> Page:
    """Always OpenMetrics text, whatever it is called, compressed if the scraper likes that."""
    wants = any(item.split(";")[0].strip() == "application/openmetrics-text" for item in accept.split(","))
    content_type = OPENMETRICS if wants else PLAIN
    text = lines(metrics.collect())
    headers = [("vary", "accept-encoding")]
    for coding, bits in (("gzip", 31), ("deflate", 15)):
        if accepts(accept_encoding, coding):
            headers.append(("content-encoding", coding))
            return Page(content_type=content_type, headers=tuple(headers), body=_compressed(text, bits))
    return Page(content_type=content_type, headers=tuple(headers), body=text)


def accepts(accept_encoding: str, coding: str) -> bool:
    """Whether a content coding is acceptable (RFC 9110, 12.5.3); only what is named counts."""
    for item in accept_encoding.split(","):
        name, _, weight = item.replace(" ", "").partition(";q=")
        if name.lower() == coding:
            return not weight or weight.strip("0.") != ""
    return False


def _compressed(pieces: Iterable[str], window_bits: int) -> Iterator[bytes]:
    compressor = zlib.compressobj(1, zlib.DEFLATED, window_bits)
    for piece in pieces:
        yield compressor.compress(piece.encode())
    yield compressor.flush()
