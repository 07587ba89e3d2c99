"""The record of one user connection, from accept to its access log line.

A record is either opened once and completed once, or denied without being opened. A connection between two pods of
the node has two records, one per reporter, which count the same bytes.
"""

from collections.abc import Iterable, Iterator
from enum import StrEnum
from functools import lru_cache
from typing import Any, Final, Protocol

from hbone.aio.relay import ByteCounts
from xds.model.address import SocketAddress
from xds.model.identity import SpiffeId
from xds.model.service import Service
from xds.model.workload import Workload
from ztunnel.policy.ledger import Use
from ztunnel.proxy.dataplane.live_table import Life
from ztunnel.proxy.dataplane.reasons import Reason, Stage
from ztunnel.proxy.flows.hubble import BY_ITSELF, Ended
from ztunnel.proxy.flows.ring import FlowRing
from ztunnel.proxy.flows.times import RESULTS
from ztunnel.proxy.istio.accounting import flows
from ztunnel.proxy.istio.accounting.denials import Pair
from ztunnel.proxy.istio.accounting.line_rendering import Field, Recurring, completion
from ztunnel.proxy.istio.accounting.logs import Bare, LogStream
from ztunnel.proxy.istio.accounting.metrics import UNKNOWN, Metrics, PeerLabels, traffic_labels
from ztunnel.proxy.istio.accounting.outcome import EarlyDeny, Failed, Flags, internal
from ztunnel.proxy.istio.accounting.traffic_series import TrafficSeries
from ztunnel.runtime.clock import Clock

_UNKNOWN: Final = PeerLabels()
_DEBUG, _INFO, _WARN, _ERROR = 10, 20, 30, 40
#: The failure reasons that can only occur before a request is answered.
_BEFORE_ANSWER = frozenset(
    {
        *(Reason.POLICY, Reason.POLICY_MISSING, Reason.HTTP2, Reason.CLIENT_GONE),
        *(Reason.REFUSED, Reason.UNREACHABLE, Reason.TIMEOUT, Reason.OTHER),
    }
)


class Direction(StrEnum):
    """The side of a connection that an access record reports, as named in access log lines."""

    OUTBOUND = "outbound"
    INBOUND = "inbound"

    @property
    def reporter(self) -> str:
        """The value of the metrics' label ``reporter``: ``source`` or ``destination``."""
        return "source" if self is Direction.OUTBOUND else "destination"


class Reporter(Protocol):
    """An object that counts and logs access records. :class:`ztunnel.proxy.istio.path.node.Node` is one."""

    @property
    def clock(self) -> Clock:
        """The clock for times and durations."""

    @property
    def metrics(self) -> Metrics:
        """The process's metrics."""

    @property
    def logs(self) -> LogStream:
        """The log of access lines."""

    @property
    def warns_unmatched(self) -> bool:
        """Whether the access line of a connection that matches no service or workload is logged at level warn."""

    @property
    def addons(self) -> "Observer | None":
        """The addons to inform when connections end. ``None`` without addons."""


class Asked(Protocol):
    """The addons' verdicts on a connection: :class:`ztunnel.proxy.addons.host.Asked`."""

    @property
    def addon(self) -> str:
        """The addons that returned a verdict, joined by commas."""

    is_open: bool
    """Whether the relay has run."""

    def opened(self, life: Life, counts: ByteCounts) -> None:
        """Notify the addons that the connection's relay has started. ``life`` is the connection's table entry."""


class Observer(Protocol):
    """The addons of this process: :class:`ztunnel.proxy.istio.path.addons.PodAddons`."""

    def taken_over(self, record: "Record") -> Asked:
        """Return an empty set of verdicts for a connection taken over from another process, whose addons were
        asked.
        """

    def ended(self, record: "Record", reason: str, duration_s: float) -> None:
        """Notify the addons that a connection has ended. ``reason`` is the error text of its access line."""


class Described:
    """The attributes that are equal in the records of many connections, computed only once.

    Attributes:
        shown: the fields in access lines after the source's address.
        references: see :func:`ztunnel.proxy.istio.accounting.flows.references`.
        series: the metric series that counts these connections. ``None`` until the first one is counted.
        forgotten: the value of :attr:`Metrics.forgotten` when ``series`` was looked up. If that value has changed
            since, the series has possibly expired, and is looked up again.

    The other attributes have the meaning given in :class:`Record`.
    """

    __slots__ = (
        "destination",
        "destination_identity",
        "destination_labels",
        "destination_workload",
        "forgotten",
        "hbone_authority",
        "references",
        "secured",
        "series",
        "service",
        "shown",
        "source_identity",
        "source_labels",
        "source_workload",
    )

    def __init__(self, record: "Record") -> None:
        self.destination = record.destination
        self.destination_identity = record.destination_identity
        self.destination_labels = record.destination_labels
        self.destination_workload = record.destination_workload
        self.hbone_authority = record.hbone_authority
        self.secured = record.secured
        self.service = record.service
        self.source_identity = record.source_identity
        self.source_labels = record.source_labels
        self.source_workload = record.source_workload
        self.shown = Recurring(_flattened(record.fields()[1:]))
        self.references = flows.references(record, _unchanged)
        self.series: TrafficSeries | None = None
        self.forgotten = 0


class Record:
    """One connection, opened once and completed once, or denied early.

    Args:
        counts: the byte counts of a node-local tunnel's other half. ``None`` creates new ones.

    Attributes:
        source, destination: addresses for the log. The destination becomes the next hop once it is known.
        hbone_authority: the ``:authority`` of the tunnel's CONNECT. Empty without a tunnel.
        source_workload, destination_workload: the workloads as described by the control plane.
        source_labels, destination_labels: the two sides' labels in metrics and logs.
        source_identity, destination_identity: the remote side's authenticated identity, and this pod's own.
        dry_run: the decision that dry-run policies would make, if it differs from the actual decision.
        http_left: text naming a policy rule about HTTP requests, which ztunnel cannot evaluate, and the waypoint
            that evaluates the rule. Usually empty.
        described: the shared attributes that :meth:`describe` copied into this record. Code that changes one of
            the copies sets this to ``None``.
        opened_s: when the connection was counted as opened, in monotonic seconds. 0 before that time.
        trace: the ``traceparent`` header of the tunnel's CONNECT, whichever side sent it. Empty without one.
        addons: this process's addons, if any.
        asked: the addons' verdicts. ``None`` if no addon was asked.
        counts: bytes moved, from the requesting side to the answering side and back.
    """

    __slots__ = (
        "_node",
        "_opened",
        "_series",
        "addons",
        "asked",
        "counts",
        "described",
        "destination",
        "destination_identity",
        "destination_labels",
        "destination_workload",
        "direction",
        "dry_run",
        "hbone_authority",
        "http_left",
        "opened_s",
        "secured",
        "service",
        "source",
        "source_identity",
        "source_labels",
        "source_workload",
        "started_s",
        "trace",
    )

    def __init__(
        self,
        node: Reporter,
        direction: Direction,
        source: SocketAddress,
        destination: SocketAddress,
        counts: ByteCounts | None = None,
    ) -> None:
        self._node = node
        self._opened = False
        self._series: TrafficSeries | None = None
        self.described: Described | None = None
        self.direction = direction
        self.source = source
        self.destination = destination
        self.hbone_authority = ""
        self.source_workload: Workload | None = None
        self.destination_workload: Workload | None = None
        self.source_labels = self.destination_labels = _UNKNOWN
        self.source_identity: SpiffeId | None = None
        self.destination_identity: SpiffeId | None = None
        self.service: Service | None = None
        self.secured = False
        self.dry_run = ""
        self.trace = b""
        self.http_left = ""
        self.asked: Asked | None = None
        self.addons: Observer | None = node.addons
        self.counts = counts if counts is not None else ByteCounts()
        self.started_s = node.clock.monotonic()
        self.opened_s = 0.0

    def describe(self, described: Described) -> None:
        """Copy the shared attributes of a :class:`Described` into this record."""
        self.described = described
        self.destination = described.destination
        self.destination_identity = described.destination_identity
        self.destination_labels = described.destination_labels
        self.destination_workload = described.destination_workload
        self.hbone_authority = described.hbone_authority
        self.secured = described.secured
        self.service = described.service
        self.source_identity = described.source_identity
        self.source_labels = described.source_labels
        self.source_workload = described.source_workload

    # Start and end

    def opened(self, *, settled: bool = True) -> None:
        """Count the connection as opened, and log the opening at debug level. Called once.

        Args:
            settled: whether the destination is final. If it can still change, the connection is counted later, by
                :meth:`settled` or at its end, because a counter cannot be corrected downwards.
        """
        node = self._node
        self._opened = True
        if settled:
            self.settled()
        if node.logs.access_level <= _DEBUG:
            node.logs.write_access(node.clock.wall(), "debug", "connection opened", self.fields(), self.trace)

    def _labels(self) -> tuple[str, ...]:
        return traffic_labels(
            self.direction.reporter,
            self.source_labels,
            self.destination_labels,
            self.service,
            secured=self.secured,
        )

    def _workloads(self) -> list[str]:
        both = (self.source_workload, self.destination_workload)
        return [workload.uid for workload in both if workload is not None]

    def _has_foreign_labels(self) -> bool:
        """Whether the labels of one side come from the peer's baggage, because the mesh has no workload for this
        side.
        """
        return (self.source_workload is None and self.source_labels.known) or (
            self.destination_workload is None and self.destination_labels.known
        )

    def settled(self) -> None:
        """Count the connection as opened, now that its destination is final. Idempotent."""
        if self._series is not None:
            return
        node, described = self._node, self.described
        metrics, now_s = node.metrics, node.clock.monotonic()
        self.opened_s = now_s
        if described is not None and described.series is not None and described.forgotten == metrics.forgotten:
            self._series = described.series
            described.series.opened_now(self.counts, now_s)
            return
        workloads, foreign = self._workloads(), self._has_foreign_labels()
        self._series = metrics.opened(self._labels(), workloads, self.counts, now_s, foreign=foreign)
        if described is not None:
            described.series, described.forgotten = self._series, metrics.forgotten

    def taken_over(self) -> Asked | None:
        """Register the connection, which another process opened, with this process's addons. Return their
        verdicts, or ``None`` without addons.
        """
        addons = self.addons
        if addons is not None:
            self.asked = addons.taken_over(self)
        return self.asked

    def complete(self, failure: Failed | None = None) -> None:
        """Count the end of an opened connection and write its access log line. No effect if it is not open."""
        if not self._opened:
            return
        self._opened = False
        connected = self._series is not None
        if not connected:
            self.settled()
        series, self._series = self._series, None
        assert series is not None
        node = self._node
        now_s, wall_s, trace = node.clock.monotonic(), node.clock.wall(), self.trace
        length, answered, unanswered = series.times
        length.observe(now_s - self.started_s, trace, wall_s)
        connect = answered if connected else unanswered
        if connect is not None and self.opened_s:  # 0 if another process has opened the connection
            connect.observe(self.opened_s - self.started_s, trace, wall_s)
        if failure is not None:
            self._count_failure(failure, connected=connected)
            series.refused += failure.reason is Reason.PEER_DENIED
        flags = failure.flags if failure is not None else Flags.NONE
        unmatched = failure is None and node.warns_unmatched and self._is_unmatched
        logged = node.logs.access_level <= (_ERROR if failure is not None else _WARN if unmatched else _INFO)
        series.used_s = now_s
        series.finished(flags, self.counts)
        if node.metrics.ports is not None:
            node.metrics.ports.count(self._port_labels(failed=failure is not None))
        if flags is Flags.DENY and failure is not None:
            node.metrics.ledger.denials.note(self._pair(str(failure)), str(self.source), wall_s)
        self._note(node.metrics.flows, wall_s, now_s, failure)
        if self.addons is not None:
            self.addons.ended(self, str(failure) if failure is not None else "", now_s - self.started_s)
        if not logged:
            return
        counts = self.counts
        sent, received = counts.sent, counts.received
        if self.direction is Direction.INBOUND:
            sent, received = received, sent
        duration_ms = int((now_s - self.started_s) * 1000)
        described, logs = self.described, node.logs
        addon = self.asked.addon if self.asked is not None else ""
        is_usual = failure is None and not (self.dry_run or self.http_left or addon)
        if described is not None and is_usual and logs.export is None:
            line = completion(
                wall_s, self.source, described.shown, sent, received, duration_ms, plain=logs.is_plain
            )
            logs.queue.pass_on(line)
            return
        fields = [*self.fields(), ("bytes_sent", sent), ("bytes_recv", received)]
        if self.dry_run:
            fields.append(("policy.dry_run", self.dry_run))
        if self.http_left:
            fields.append(("policy.http", self.http_left))
        if addon:
            fields.append(("addon", addon))
        fields.append(("duration", f"{duration_ms}ms"))
        if failure is not None:
            fields += (*failure.fields, ("error", str(failure)))
        level = "error" if failure is not None else "warn" if unmatched else "info"
        logs.write_access(wall_s, level, "connection complete", fields, self.trace)

    def _port_labels(self, *, failed: bool) -> tuple[str, ...]:
        there = self.destination_labels
        service = self.service.name if self.service is not None else UNKNOWN
        port = self.hbone_authority.rpartition(":")[2] or str(self.destination.port)
        names = (there.workload or UNKNOWN, there.namespace or UNKNOWN, service)
        return (self.direction.reporter, *names, port if port.isdigit() else UNKNOWN, RESULTS[failed])

    def _count_failure(self, failure: Failed, *, connected: bool) -> None:
        denied = failure.reason is Reason.ADDON and self.asked is not None and not self.asked.is_open
        if self.direction is Direction.INBOUND and (denied or failure.reason in _BEFORE_ANSWER):
            connected = False  # a destination counts the connection as opened before it dials the application
        stage = Stage.RELAY if connected else Stage.CONNECT
        self._node.metrics.failed(self.direction.reporter, stage, failure.reason)

    @property
    def _is_unmatched(self) -> bool:
        outbound = self.direction is Direction.OUTBOUND
        return outbound and self.destination_workload is None and self.service is None and not self.secured

    # Moving a connection to another process, which then writes its access line: see ztunnel.proxy.istio.handover

    def went(self) -> None:
        """Count the bytes carried so far, because the connection moves to another process. A later
        :meth:`complete` has no effect.
        """
        if self._opened:
            self.settled()
            series, self._series = self._series, None
            assert series is not None
            self._opened = False
            series.used_s = self._node.clock.monotonic()
            series.went(self.counts)

    def came(self, age_s: float) -> None:
        """Open the record of a connection taken over from another process, which accepted it ``age_s`` seconds
        ago.
        """
        node, now_s = self._node, self._node.clock.monotonic()
        self.started_s = now_s - age_s
        self._opened = True
        self._series = node.metrics.opened(
            self._labels(), self._workloads(), self.counts, now_s, foreign=self._has_foreign_labels(), moved=True
        )

    def denied_early(self, denial: EarlyDeny) -> None:
        """Count a connection that failed before being opened, and write its log line."""
        node, reason = self._node, str(denial)
        node.metrics.ledger.early.note(str(self.direction), Use.REFUSED_EARLY, node.clock.wall())
        node.metrics.failed(self.direction.reporter, Stage.EARLY, denial.reason)
        clock = node.clock
        self._note(node.metrics.flows, clock.wall(), clock.monotonic(), denial)
        if self.addons is not None:
            self.addons.ended(self, reason, node.clock.monotonic() - self.started_s)
        if node.logs.access_level <= _WARN:
            fields: list[Field] = [
                ("src.addr", Bare(self.source)),
                ("dst.addr", Bare(self.destination)),
                ("direction", str(self.direction)),
                ("error", reason),
            ]
            node.logs.write_access(node.clock.wall(), "warn", "connection failed", fields, self.trace)

    def failed_by_bug(self, error: Exception) -> None:
        """Count and log a connection that ends because of a bug in this program, even if it was not opened yet."""
        failure = internal(error)
        if self._opened:
            self.complete(failure)
        else:
            self.denied_early(EarlyDeny(str(failure), failure.reason))

    def _note(self, ring: FlowRing, ended_s: float, now_s: float, failure: Failed | EarlyDeny | None) -> None:
        """Record the end of this connection in the flight recorder.

        Args:
            ring: the process's flight recorder.
            ended_s: the time of the end on the wall clock.
            now_s: the same time in monotonic seconds.
            failure: the failure, or None for a normal end.
        """
        if not ring.capacity:
            return
        counts, described, asked = self.counts, self.described, self.asked
        ended = BY_ITSELF
        if failure is not None:
            ended = ring.text(Ended(failure.reason, str(failure), failure.policy, failure.flags))
        ring.add(
            ended_s,
            now_s - self.started_s,
            self.opened_s - self.started_s if self.opened_s else -1.0,
            (counts.sent, counts.received),
            (self.source, self.destination),
            self.trace,
            (1 if self.direction is Direction.OUTBOUND else 0) | (2 if self.secured else 0),
            (
                *(flows.references(self, ring.text) if described is None else described.references),
                ended,
                ring.text(asked.addon) if asked is not None and asked.addon else "",
            ),
        )

    def _pair(self, reason: str) -> Pair:
        """Return the key under which this connection is counted as denied by policy."""
        wanted = self.hbone_authority or str(self.destination)
        destination = self.destination_workload
        return Pair(
            direction=str(self.direction),
            source=_called(self.source_workload) or self.source.host,
            identity=str(self.source_identity) if self.secured and self.source_identity is not None else "",
            destination=f"{_called(destination)}:{wanted.rpartition(':')[2]}"
            if destination is not None
            else wanted,
            reason=reason,
        )

    def fields(self) -> list[Field | Recurring]:
        """Return the access line's fields that are known before the connection ends, source address first."""
        if self.described is not None:
            return [("src.addr", Bare(self.source)), self.described.shown]
        source, destination = self.source_labels, self.destination_labels
        source_name = self.source_workload.name if self.source_workload is not None else source.canonical_service
        destination_name = (
            self.destination_workload.name if self.destination_workload is not None else destination.workload
        )
        service = self.service.hostname if self.service is not None else ""
        fields: list[Field | Recurring] = [("src.addr", Bare(self.source))]
        shown = _source_fields(source_name, source, self.source_identity if self.secured else None)
        if shown.fields:
            fields.append(shown)
        fields.append(("dst.addr", Bare(self.destination)))
        if self.hbone_authority:
            fields.append(("dst.hbone_addr", Bare(self.hbone_authority)))
        identity = self.destination_identity if self.secured else None
        fields.append(_destination_fields(service, destination_name, destination, identity, self.direction))
        return fields


def _unchanged(value: Any) -> Any:
    return value


def _flattened(fields: Iterable[Field | Recurring]) -> Iterator[Field]:
    for each in fields:
        if isinstance(each, Recurring):
            yield from each.fields
        else:
            yield each


@lru_cache(maxsize=4096)  # called for every connection, but a node has few workloads
def _source_fields(name: str, labels: PeerLabels, identity: SpiffeId | None) -> Recurring:
    return Recurring(_peer_fields("src", name, labels, identity))


@lru_cache(maxsize=4096)
def _destination_fields(
    service: str, name: str, labels: PeerLabels, identity: SpiffeId | None, direction: Direction
) -> Recurring:
    named = [("dst.service", service)] if service else []
    return Recurring([*named, *_peer_fields("dst", name, labels, identity), ("direction", str(direction))])


def _peer_fields(prefix: str, name: str, labels: PeerLabels, identity: SpiffeId | None) -> Iterator[Field]:
    if name:
        yield f"{prefix}.workload", name
    if labels.namespace:
        yield f"{prefix}.namespace", labels.namespace
    if identity is not None:
        yield f"{prefix}.identity", str(identity)
    if labels.cluster:
        yield f"{prefix}.cluster", labels.cluster


def _called(workload: Workload | None) -> str:
    return f"{workload.name}.{workload.namespace}" if workload is not None else ""
