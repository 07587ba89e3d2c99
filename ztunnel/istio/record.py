"""One user's connection from accept to its log line: opened once, completed once, or denied early."""

from collections.abc import Iterator
from enum import StrEnum
from functools import lru_cache
from typing import TYPE_CHECKING

from hbone.aio.relay import ByteCounts
from xds.model.address import SocketAddress
from xds.model.identity import SpiffeId
from xds.model.service import Service
from xds.model.workload import Workload
from ztunnel.istio.logs import Bare, Field, Recurring
from ztunnel.istio.metrics import Side, TrafficSeries, traffic_labels
from ztunnel.istio.outcome import Failed, Flags

if TYPE_CHECKING:
    from ztunnel.istio.node import Node

_DEBUG, _INFO, _WARN, _ERROR = 10, 20, 30, 40


class Direction(StrEnum):
    """Who reports, in access lines."""

    OUTBOUND = "outbound"
    INBOUND = "inbound"

    @property
    def reporter(self) -> str:
        """The same in metrics."""
        return "source" if self is Direction.OUTBOUND else "destination"


class Record:
    """See the module.

    Attributes:
        source, destination: addresses for the log; the destination becomes the next hop once it is known.
        hbone_authority: of the tunnel, if there is one.
        source_workload, destination_workload: as the control plane describes them.
        source_side, destination_side: labels.
        source_identity, destination_identity: proven or, for ourselves, ours.
        dry_run: what dry-run policies would have decided, if not as the others.
        counts: bytes moved, from the side that asked to the one that answers and back.
    """

    __slots__ = (
        "_node",
        "_opened",
        "_series",
        "counts",
        "destination",
        "destination_identity",
        "destination_side",
        "destination_workload",
        "direction",
        "dry_run",
        "hbone_authority",
        "secured",
        "service",
        "source",
        "source_identity",
        "source_side",
        "source_workload",
        "started_s",
    )

    def __init__(
        self, node: "Node", direction: Direction, source: SocketAddress, destination: SocketAddress
    ) -> None:
        self._node = node
        self._opened = False
        self._series: TrafficSeries | None = None
        self.direction = direction
        self.source = source
        self.destination = destination
        self.hbone_authority = ""
        self.source_workload: Workload | None = None
        self.destination_workload: Workload | None = None
        self.source_side = Side()
        self.destination_side = Side()
        self.source_identity: SpiffeId | None = None
        self.destination_identity: SpiffeId | None = None
        self.service: Service | None = None
        self.secured = False
        self.dry_run = ""
        self.counts = ByteCounts()
        self.started_s = node.clock.monotonic()

    # Life

    def opened(self, *, settled: bool = True) -> None:
        """The connection will be accounted for from now on.

        Args:
            settled: it is known who it is with. If not, it counts once :meth:`settled` says so or at its end:
                counters that go down again would be taken for those of a new process.
        """
        node = self._node
        self._opened = True
        if settled:
            self.settled()
        if node.logs.access_level <= _DEBUG:
            node.logs.write(node.clock.wall(), "debug", "access", "connection opened", self._fields())

    def _labels(self) -> tuple[str, ...]:
        return traffic_labels(
            self.direction.reporter,
            self.source_side,
            self.destination_side,
            self.service,
            secured=self.secured,
        )

    def _workloads(self) -> list[str]:
        both = (self.source_workload, self.destination_workload)
        return [workload.uid for workload in both if workload is not None]

    def _has_foreign_labels(self) -> bool:
        """Whether a side's labels are the peer's own words (baggage), with no workload of the mesh behind them."""
        return (self.source_workload is None and self.source_side.known) or (
            self.destination_workload is None and self.destination_side.known
        )

    def settled(self) -> None:
        """Who the connection is with does not change any more."""
        if self._series is None:
            now_s = self._node.clock.monotonic()
            self._series = self._node.metrics.opened(
                self._labels(), self._workloads(), self.counts, now_s, foreign=self._has_foreign_labels()
            )

    def complete(self, failure: Failed | None = None) -> None:
        """The connection is over."""
        if not self._opened:
            return
        self._opened = False
        self.settled()
        series, self._series = self._series, None
        assert series is not None
        node = self._node
        now_s = node.clock.monotonic()
        flags = failure.flags if failure is not None else Flags.NONE
        series.used_s = now_s
        series.finished(flags, self.counts)
        if node.logs.access_level > (_INFO if failure is None else _ERROR):
            return
        counts = self.counts
        sent, received = counts.sent, counts.received
        if self.direction is Direction.INBOUND:
            sent, received = received, sent
        fields = self._fields()
        fields += (("bytes_sent", sent), ("bytes_recv", received))
        if self.dry_run:
            fields.append(("policy.dry_run", self.dry_run))
        fields.append(("duration", f"{int((now_s - self.started_s) * 1000)}ms"))
        if failure is not None:
            fields.append(("error", str(failure)))
        level = "info" if failure is None else "error"
        node.logs.write(node.clock.wall(), level, "access", "connection complete", fields)

    def denied_early(self, reason: str) -> None:
        """The connection ends before it counted."""
        node = self._node
        if node.logs.access_level <= _WARN:
            fields: list[Field] = [
                ("src.addr", Bare(self.source)),
                ("dst.addr", Bare(self.destination)),
                ("direction", str(self.direction)),
                ("error", reason),
            ]
            node.logs.write(node.clock.wall(), "warn", "access", "connection failed", fields)

    def _fields(self) -> list[Field | Recurring]:
        source, destination = self.source_side, self.destination_side
        source_name = self.source_workload.name if self.source_workload is not None else source.canonical_service
        destination_name = (
            self.destination_workload.name
            if self.destination_workload is not None
            else destination.canonical_service
        )
        service = self.service.hostname if self.service is not None else ""
        fields: list[Field | Recurring] = [("src.addr", Bare(self.source))]
        who = _source_fields(source_name, source, self.source_identity if self.secured else None)
        if who.fields:
            fields.append(who)
        fields.append(("dst.addr", Bare(self.destination)))
        if self.hbone_authority:
            fields.append(("dst.hbone_addr", Bare(self.hbone_authority)))
        identity = self.destination_identity if self.secured else None
        fields.append(_destination_fields(service, destination_name, destination, identity, self.direction))
        return fields


@lru_cache(maxsize=4096)  # once or twice per connection, about few workloads
def _source_fields(name: str, side: Side, identity: SpiffeId | None) -> Recurring:
    return Recurring(_side_fields("src", name, side, identity))


@lru_cache(maxsize=4096)
def _destination_fields(
    service: str, name: str, side: Side, identity: SpiffeId | None, direction: Direction
) -> Recurring:
    named = [("dst.service", service)] if service else []
    return Recurring([*named, *_side_fields("dst", name, side, identity), ("direction", str(direction))])


def _side_fields(prefix: str, name: str, side: Side, identity: SpiffeId | None) -> Iterator[Field]:
    if name:
        yield f"{prefix}.workload", name
    if side.namespace:
        yield f"{prefix}.namespace", side.namespace
    if identity is not None:
        yield f"{prefix}.identity", str(identity)
    if side.cluster:
        yield f"{prefix}.cluster", side.cluster
