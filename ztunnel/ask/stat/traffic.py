"""Traffic by pair of workloads, from two readings of each proxy's metrics and from its flight recorder. Pure.

The counters are the ``istio_tcp_*`` of source and destination. If both proxies report a pair, the report with more
connections is used. The flight recorder adds connect times, and denials, which these counters leave out.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from ztunnel.ask.inspect.kinds import age_cell
from ztunnel.runtime.console.output import Column, Item, Kind

_SAMPLE: Final = re.compile(r"(istio_tcp_\w+?)(?:_total)?\{([^}]*)\} ([0-9.eE+-]+)")
_LABEL: Final = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')
_OPENED, _CLOSED, _FAILED = (f"istio_tcp_connections_{word}" for word in ("opened", "closed", "failed"))
#: Istio's names take the server's view ("sent during response"). Here, and in flows and connections, "sent" means
#: from the client to the server.
_SENT, _RECEIVED = "istio_tcp_received_bytes", "istio_tcp_sent_bytes"
_COUNTED: Final = (_OPENED, _CLOSED, _FAILED, _SENT, _RECEIVED)
UNKNOWN: Final = "unknown"

#: Namespace and name.
Name = tuple[str, str]


@dataclass(frozen=True, slots=True)
class PairKey:
    """A pair of workloads, and whether it uses mTLS."""

    source: Name
    destination: Name
    secured: bool


@dataclass(slots=True)
class Counted:
    """The traffic of a pair. ``sent`` are the bytes from the source to the destination, ``received`` those back.
    ``connects`` are the times of its connections until they were established, in seconds.
    """

    opened: float = 0.0
    closed: float = 0.0
    failed: float = 0.0
    denied: int = 0
    sent: float = 0.0
    received: float = 0.0
    open_now: float = 0.0
    connects: list[float] = field(default_factory=list)

    def add(self, other: Counted) -> None:
        """Add the numbers of another pair or reporter to these."""
        self.opened += other.opened
        self.closed += other.closed
        self.failed += other.failed
        self.denied += other.denied
        self.sent += other.sent
        self.received += other.received
        self.open_now += other.open_now
        self.connects += other.connects


Reading = Mapping[tuple[str, PairKey, str], float]


def reading(page: str) -> Reading:
    """Return the traffic counters of a metrics page: by reporter, pair and name."""
    found: dict[tuple[str, PairKey, str], float] = defaultdict(float)
    for line in page.splitlines():
        sample = _SAMPLE.match(line)
        if sample is None or sample[1] not in _COUNTED:
            continue
        labels = dict(_LABEL.findall(sample[2]))
        key = PairKey(
            _name(labels, "source"),
            _name(labels, "destination"),
            labels.get("connection_security_policy") == "mutual_tls",
        )
        found[labels.get("reporter", ""), key, sample[1]] += float(sample[3])
    return found


def _name(labels: Mapping[str, str], side: str) -> Name:
    return labels.get(f"{side}_workload_namespace", UNKNOWN), labels.get(f"{side}_workload", UNKNOWN)


#: A flow's reporter and pair, and the numbers to add to the pair's traffic.
CountedFlow = tuple[str, PairKey, Counted]


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeReadings:
    """Two readings of one proxy's metrics, and the flows that its flight recorder got in between."""

    before: Reading
    after: Reading
    flows: Sequence[CountedFlow] = ()


def pairs(nodes: Iterable[NodeReadings]) -> dict[PairKey, Counted]:
    """Return the traffic of each pair between the two readings of all nodes. Pairs without connections are left
    out.
    """
    by_reporter: dict[tuple[str, PairKey], Counted] = defaultdict(Counted)
    drops: dict[tuple[str, PairKey], Counted] = defaultdict(Counted)
    for node in nodes:
        for (reporter, key, name), value in node.after.items():
            counted = by_reporter[reporter, key]
            before = node.before.get((reporter, key, name), 0.0)
            # A counter that went down belongs to a new process, all of whose connections are new.
            change = value - before if value >= before else value
            if name == _OPENED:
                counted.opened += change
                counted.open_now += value
            elif name == _CLOSED:
                counted.closed += change
                counted.open_now -= value
            elif name == _FAILED:
                counted.failed += change
            elif name == _SENT:
                counted.sent += change
            else:
                counted.received += change
        for reporter, key, counted in node.flows:
            drops[reporter, key].add(counted)
    found: dict[PairKey, Counted] = {}
    for key in {key for _, key in (*by_reporter, *drops)}:
        ways = [
            by_reporter[reporter, key] for reporter in ("source", "destination") if (reporter, key) in by_reporter
        ]
        best = max(ways, key=lambda way: (way.opened, way.open_now), default=Counted())
        recorded = [drops[reporter, key] for reporter in ("source", "destination") if (reporter, key) in drops]
        # Denials are counted by the destination's proxy. Connect times come from the source's proxy, if it has
        # one.
        best.denied = max((each.denied for each in recorded), default=0)
        best.connects = next((each.connects for each in recorded if each.connects), [])
        if best.opened or best.open_now > 0 or best.denied or best.failed:
            found[key] = best
    return found


def flow_of(line: Mapping[str, Any]) -> CountedFlow:
    """Return the numbers that a line of ``/flows`` adds to its pair.

    Raises:
        TypeError, ValueError, AttributeError: the line has another form.
    """
    flow = line["flow"]
    more = (flow.get("extensions") or {}).get("value") or {}
    key = PairKey(
        _side(flow.get("source") or {}),
        _side(flow.get("destination") or {}),
        bool((flow.get("IP") or {}).get("encrypted")),
    )
    counted = Counted(denied=int(flow.get("verdict") == "DROPPED"))
    connect = more.get("connect_seconds")
    if connect is not None and flow.get("verdict") == "FORWARDED":
        counted.connects.append(float(connect))
    return "source" if flow.get("traffic_direction") == "EGRESS" else "destination", key, counted


def _side(endpoint: Mapping[str, Any]) -> Name:
    name = next((str(each.get("name")) for each in endpoint.get("workloads") or ()), "")
    return (str(endpoint.get("namespace") or UNKNOWN), name) if name else (UNKNOWN, UNKNOWN)


def quantile(values: Sequence[float], share: float) -> float | None:
    """Return the quantile of the values by nearest rank, or None without values."""
    if not values:
        return None
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


# Items


class Stat(Item, frozen=True, kw_only=True):
    """A workload's traffic within a window, as the server of connections or as their client.

    ``encrypted`` is the share of its new connections that had mTLS; ``connect_*`` are the times until connections
    were established. They include only connections that ended within the window.
    """

    namespace: str
    workload: str
    window_seconds: float
    connections: int
    per_second: float
    failed: int
    denied: int
    open: int
    bytes_sent: int
    bytes_received: int
    encrypted: float | None = None
    connect_p50_seconds: float | None = None
    connect_p99_seconds: float | None = None


class Edge(Item, frozen=True, kw_only=True):
    """The traffic between two workloads within a window. ``security`` is mTLS or plain, and ``because`` says why
    it is plain.
    """

    source: str
    destination: str
    security: str
    because: str | None = None
    window_seconds: float
    connections: int
    failed: int
    denied: int
    open: int
    bytes_sent: int
    bytes_received: int
    connect_p50_seconds: float | None = None
    connect_p99_seconds: float | None = None


def _ms(seconds: float | None) -> str | None:
    return None if seconds is None else f"{seconds * 1000:.1f}ms"


STAT: Final[Kind[Stat]] = Kind(
    name="Stat",
    several="workloads with connections",
    item=Stat,
    identity=lambda item: f"{item.namespace}/{item.workload}",
    columns=(
        Column("NAMESPACE", "namespace"),
        Column("WORKLOAD", "workload"),
        Column("CONNECTIONS", "connections"),
        Column("RATE", lambda item: f"{item.per_second:.1f}/s"),
        Column("FAILED", "failed"),
        Column("DENIED", lambda item: str(item.denied)),
        Column("OPEN", lambda item: str(item.open)),
        Column("SENT", lambda item: str(item.bytes_sent)),
        Column("RECEIVED", lambda item: str(item.bytes_received)),
        Column("CONNECT P50", lambda item: _ms(item.connect_p50_seconds)),
        Column("P99", lambda item: _ms(item.connect_p99_seconds)),
        Column("MTLS", lambda item: None if item.encrypted is None else f"{item.encrypted:.0%}"),
        Column("WINDOW", lambda item: age_cell(item.window_seconds), wide=True),
    ),
)
EDGE: Final[Kind[Edge]] = Kind(
    name="Edge",
    several="pairs with connections",
    item=Edge,
    identity=lambda item: f"{item.source}-{item.destination}",
    columns=(
        Column("SOURCE", "source"),
        Column("DESTINATION", "destination"),
        Column("SECURITY", "security"),
        Column("CONNECTIONS", lambda item: str(item.connections)),
        Column("FAILED", lambda item: str(item.failed)),
        Column("DENIED", lambda item: str(item.denied)),
        Column("OPEN", lambda item: str(item.open)),
        Column("SENT", lambda item: str(item.bytes_sent)),
        Column("RECEIVED", lambda item: str(item.bytes_received)),
        Column("CONNECT P50", lambda item: _ms(item.connect_p50_seconds)),
        Column("P99", lambda item: _ms(item.connect_p99_seconds)),
        Column("BECAUSE", "because"),
    ),
)


def stats(found: Mapping[PairKey, Counted], window_s: float, *, by: str) -> Iterator[Stat]:
    """Yield the workloads, those with most connections first. ``by`` is the side to list: destination or
    source.
    """
    summed: dict[Name, Counted] = defaultdict(Counted)
    secured: dict[Name, float] = defaultdict(float)
    for key, counted in found.items():
        name = key.destination if by == "destination" else key.source
        summed[name].add(counted)
        secured[name] += counted.opened if key.secured else 0.0
    for (namespace, workload), each in sorted(summed.items(), key=lambda one: (-one[1].opened, one[0])):
        yield Stat(
            namespace=namespace,
            workload=workload,
            window_seconds=window_s,
            connections=int(each.opened),
            per_second=round(each.opened / window_s, 3) if window_s else 0.0,
            failed=int(each.failed),
            denied=each.denied,
            open=max(0, int(each.open_now)),
            bytes_sent=int(each.sent),
            bytes_received=int(each.received),
            encrypted=round(secured[namespace, workload] / each.opened, 4) if each.opened else None,
            connect_p50_seconds=quantile(each.connects, 0.5),
            connect_p99_seconds=quantile(each.connects, 0.99),
        )


def edges(found: Mapping[PairKey, Counted], window_s: float, why: Callable[[PairKey], str]) -> Iterator[Edge]:
    """Yield the pairs, plain ones first. ``why`` returns the reason why a pair is plain."""
    for key, each in sorted(found.items(), key=lambda one: (one[0].secured, one[0].source, one[0].destination)):
        yield Edge(
            source="/".join(key.source) if key.source[1] != UNKNOWN else UNKNOWN,
            destination="/".join(key.destination) if key.destination[1] != UNKNOWN else UNKNOWN,
            security="mTLS" if key.secured else "plain",
            because=None if key.secured else why(key) or None,
            window_seconds=window_s,
            connections=int(each.opened),
            failed=int(each.failed),
            denied=each.denied,
            open=max(0, int(each.open_now)),
            bytes_sent=int(each.sent),
            bytes_received=int(each.received),
            connect_p50_seconds=quantile(each.connects, 0.5),
            connect_p99_seconds=quantile(each.connects, 0.99),
        )


def plain_because(dump: Mapping[str, Any]) -> Callable[[PairKey], str]:
    """Return a function that explains why a pair uses plain text, from the dump of one proxy."""
    protocols: dict[Name, set[str]] = defaultdict(set)
    for each in dump.get("workloads") or ():
        name = str(each.get("workloadName") or each.get("name"))
        protocols[str(each.get("namespace")), name].add(str(each.get("protocol")))

    def why(key: PairKey) -> str:
        if key.destination[1] == UNKNOWN:
            return "the destination is outside the mesh"
        if "HBONE" not in protocols.get(key.destination, set()):
            return "the destination takes no tunnels: enrol it"
        if key.source[1] == UNKNOWN or "HBONE" not in protocols.get(key.source, set()):
            return "the source is not in the mesh: enrol it"
        return "both are in the mesh: the address that was called is of neither a workload nor a service"

    return why
