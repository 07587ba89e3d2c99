"""The content of the live page, as values that a front end creates for each event. Pure.

Texts come from control planes, certificates and peers, which are not trusted. So they are clipped, and shown as
plain text.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum


class Security(StrEnum):
    """How a connection's bytes are protected. The page shows the values."""

    MUTUAL_TLS = "mTLS"
    PLAIN = "plain"
    NONE = "none"
    """The connection ended before its destination was known, and nothing was sent."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """A node of the graph.

    Attributes:
        key: flows refer to the workload by this key.
        identity: its SPIFFE id. Empty if none is known.
        address: its address, if it has only one or the dialect identifies workloads by address.
        here: whether it runs on this proxy's node.
        state: why it is not served, or empty.
    """

    key: str
    name: str
    namespace: str = ""
    identity: str = ""
    address: str = ""
    here: bool = False
    state: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Flow:
    """An edge of the graph: the connections between two workloads, counted since the proxy began to count.

    Attributes:
        source, destination: keys of workloads.
        service: the service that the client addressed, by host name, or by address if no name is known. Empty
            without one.
        service_namespace: the service's namespace. Empty if unknown.
        reporter: ``source`` if the proxy carries the client's side, ``destination`` for the server's side.
        open: currently open connections.
        opened, failed: the connections opened and failed since the proxy began to count.
        denied: failed connections that a policy of this proxy denied.
        refused: failed connections that the peer's policy refused, as reported by the source's side.
        bytes_sent: bytes from client to server. ``bytes_received``: bytes back.
    """

    source: str
    destination: str
    service: str
    reporter: str
    security: Security
    open: int
    opened: int
    failed: int
    denied: int
    bytes_sent: int
    bytes_received: int
    refused: int = 0
    service_namespace: str = ""

    @property
    def key(self) -> tuple[str, ...]:
        """The flow's identity."""
        return (self.source, self.destination, self.service, self.reporter, self.security)


@dataclass(frozen=True, slots=True, kw_only=True)
class Connection:
    """A live connection. Unknown values are None or empty.

    Attributes:
        id: a text that is unique among the live connections.
        direction: ``outbound`` or ``inbound``, or the name of its listener.
        source, destination: addresses. The destination is the dialled address.
        next_hop: the address that the proxy dialled.
        identity: the identity in the other side's verified certificate.
    """

    id: str
    direction: str
    source: str
    source_name: str = ""
    destination: str
    destination_name: str = ""
    next_hop: str = ""
    protocol: str = ""
    security: Security
    identity: str = ""
    age_s: float | None = None
    bytes_sent: int | None = None
    bytes_received: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """A policy with the counts of its decisions, which are None if its decisions are not counted.

    Attributes:
        mode: ``enforced``, ``dry run``, or Envoy's ``shadow`` or ``both``.
        faults: parts that could not be read.
    """

    name: str
    action: str
    scope: str = ""
    mode: str = "enforced"
    allowed: int | None = None
    denied: int | None = None
    ended: int | None = None
    last_s: float | None = None
    faults: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Denied:
    """The connections between a pair that policies denied. Times are seconds of the wall clock."""

    place: str
    source: str
    identity: str
    destination: str
    reason: str
    count: int
    last_s: float
    address: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Certificate:
    """A certificate that the proxy presents or waits for. Times are seconds of the wall clock."""

    identity: str
    state: str
    used_by: str = ""
    serial: str = ""
    valid_from_s: float | None = None
    expires_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """A source of configuration.

    Attributes:
        connected: whether it is connected. None for a file, which has no connection.
        away_s: the seconds since it was last connected, or 0 while it is connected.
        updates: the number of updates received, with ``updated_s`` as the time of the last one (wall clock). None
            if unknown.
    """

    name: str
    address: str
    connected: bool | None
    away_s: float = 0.0
    updates: int | None = None
    updated_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Refusal:
    """A refused resource, whose previous version stays in use."""

    kind: str
    name: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """The proxy itself.

    Attributes:
        dialect: ``istio`` or ``envoy``.
        state: one line: ready, or what is missing.
        totals: the numbers of objects by name, such as ``workloads``.
        counted_since_s: when flows began to be counted, by the wall clock. 0 means the proxy's start.
        question: example values for the form of the explain page, by parameter.
        flows_kept: the number of connections in the flight recorder. 0 if it is off.
    """

    dialect: str
    version: str
    node: str
    ready: bool
    state: str
    uptime_s: float
    totals: Mapping[str, int] = field(default_factory=dict)
    counted_since_s: float = 0.0
    question: Mapping[str, str] = field(default_factory=dict)
    flows_kept: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """The full content of one event. :mod:`ztunnel.proxy.ui.view` cuts it to its bounds.

    Attributes:
        connections: a selection, those with the most bytes first. ``connections_open`` counts all.
        denials: the newest first.
        past: the last 15 minutes, see :meth:`ztunnel.proxy.flows.history.History.shown`.
    """

    facts: Facts
    workloads: Sequence[Workload]
    flows: Sequence[Flow]
    connections: Sequence[Connection]
    connections_open: int
    policies: Sequence[Policy]
    denials: Sequence[Denied]
    certificates: Sequence[Certificate]
    sources: Sequence[Source]
    refusals: Sequence[Refusal]
    past: Mapping[str, object] = field(default_factory=dict)
