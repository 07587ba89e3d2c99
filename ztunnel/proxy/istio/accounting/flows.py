"""Writes connections of an Istio mesh into the flight recorder, and its entries as Hubble's flows."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, Final, Protocol

from hbone.aio.relay import ByteCounts
from xds.model.address import SocketAddress
from xds.model.identity import SpiffeId
from xds.model.service import Service
from xds.model.workload import Workload
from ztunnel import __version__
from ztunnel.proxy.flows.hubble import (
    DROP,
    POLICY,
    TO_ENDPOINT,
    TO_NETWORK,
    TO_STACK,
    TRACE,
    Outcome,
    Side,
    response,
)
from ztunnel.proxy.flows.ring import Entry, FlowRing
from ztunnel.proxy.istio.accounting.metrics import PeerLabels
from ztunnel.proxy.istio.accounting.outcome import DRAINED, POLICY_CHANGE, REJECTED, REVOKED, Flags

#: References of an entry, in the order of :func:`note`.
WIDTH: Final = 11
_DENIED_BY: Final = re.compile(r"explicitly denied by: (\S+)")
_NONE_ALLOWED: Final = "allow policies exist, but none allowed"
_NOT_ARRIVED: Final = re.compile(r"policy (\S+) has not arrived")


class NamedNode(Protocol):
    """The settings that name this node."""

    @property
    def cluster_id(self) -> str:
        """Of the cluster."""

    @property
    def node(self) -> str:
        """Of the node."""


class Asked(Protocol):
    """What addons have said of a connection."""

    @property
    def addon(self) -> str:
        """The addons that returned a verdict, joined by commas."""


class Recorded(Protocol):
    """What is written of a :class:`ztunnel.proxy.istio.accounting.record.Record`."""

    direction: Any
    source: SocketAddress
    destination: SocketAddress
    hbone_authority: str
    source_workload: Workload | None
    destination_workload: Workload | None
    source_labels: PeerLabels
    destination_labels: PeerLabels
    source_identity: SpiffeId | None
    destination_identity: SpiffeId | None
    service: Service | None
    secured: bool
    trace: bytes
    counts: ByteCounts
    started_s: float
    opened_s: float

    @property
    def asked(self) -> Asked | None:
        """What addons have said, or None."""

    @property
    def described(self) -> object:
        """What many connections have in common, or None."""


def note(ring: FlowRing, record: Recorded, ended_s: float, now_s: float, reason: str, flags: Flags) -> None:
    """Write a connection that has ended.

    Args:
        ring: of the process.
        record: the connection.
        ended_s: wall time.
        now_s: monotonic seconds.
        reason: the error in the words of the access line. Empty without one.
        flags: the response flags.
    """
    if not ring.capacity:
        return
    counts = record.counts
    # What comes from a description recurs, and is shared already.
    text = ring.text if record.described is None else _same
    source, destination = record.source_workload, record.destination_workload
    outbound = record.direction == "outbound"
    duration_s = now_s - record.started_s
    ring.add(
        ended_s,
        duration_s,
        record.opened_s - record.started_s if record.opened_s else -1.0,
        (counts.sent, counts.received),
        (record.source, record.destination),
        record.trace,
        (1 if outbound else 0) | (2 if record.secured else 0),
        (
            source,
            destination,
            text(record.source_labels) if source is None else None,
            text(record.destination_labels) if destination is None else None,
            text(record.source_identity) if record.source_identity is not None else None,
            text(record.destination_identity) if record.destination_identity is not None else None,
            record.service,
            text(record.hbone_authority) if record.hbone_authority else "",
            ring.text(reason) if reason else "",
            flags,
            ring.text(record.asked.addon) if record.asked is not None and record.asked.addon else "",
        ),
    )


def _same(value: Any) -> Any:
    return value


def outcome_of(reason: str, flags: Flags, *, outbound: bool, tunnel: bool) -> Outcome:
    """Return how a connection ended, from the words and flags of its access line."""
    trace = (TRACE, (TO_NETWORK if tunnel else TO_STACK) if outbound else TO_ENDPOINT)
    shown = str(flags)
    if not reason:
        return Outcome(verdict="FORWARDED", event=trace, flags=shown)

    def dropped(event: tuple[int, int], drop: int, policy: str = "") -> Outcome:
        return Outcome(
            verdict="DROPPED", event=event, drop=drop, reason=reason, policy=policy, flags=shown, reset=True
        )

    if found := _DENIED_BY.search(reason):
        return dropped((POLICY, 0), 181, found[1])
    if found := _NOT_ARRIVED.search(reason):
        return dropped((POLICY, 0), 133, found[1])
    if reason in (_NONE_ALLOWED, REJECTED):
        return dropped((POLICY, 0), 133)
    if reason == REVOKED:
        return dropped((DROP, 189), 189)
    if reason == POLICY_CHANGE or flags is Flags.DENY:
        return dropped((DROP, 133), 133)
    if reason == DRAINED:
        return Outcome(verdict="FORWARDED", event=trace, reason=reason, flags=shown, reset=True)
    return Outcome(verdict="ERROR", event=trace, reason=reason, flags=shown, reset=True)


def lines(ring: FlowRing, node: str, after_ns: int = 0, last: int | None = None) -> Iterator[tuple[int, str]]:
    """Yield time and JSON line of entries, the oldest first."""
    for entry in ring.entries(after_ns, last):
        yield entry.ended_ns, json.dumps(_response(entry, node), separators=(",", ":"))


def _response(entry: Entry, node: str) -> dict[str, Any]:
    source, destination, source_labels, destination_labels, source_id, destination_id = entry.refs[:6]
    service, authority, reason, flags, addon = entry.refs[6:]
    tunnel = ""
    if authority:
        # The application's address on both sides, never the port of the tunnel.
        tunnel = f"{entry.destination[0]}:{entry.destination[1]}" if entry.outbound else ""
        entry = entry._replace(destination=_address(authority) or entry.destination)
    outcome = replace(outcome_of(reason, flags, outbound=entry.outbound, tunnel=bool(authority)), addon=addon)
    return response(
        entry,
        node,
        side(source, source_labels, source_id),
        side(destination, destination_labels, destination_id),
        outcome,
        service=(service.name, service.namespace) if isinstance(service, Service) else None,
        tunnel=tunnel,
        emitter=__version__,
    )


def flow_node(config: NamedNode) -> str:
    """Return the name of this node in flows: ``CLUSTER/NODE``."""
    return f"{config.cluster_id or 'default'}/{config.node or 'node'}"


def ring_of(capacity: int) -> FlowRing:
    """Return the ring of a process."""
    return FlowRing(capacity, WIDTH)


def _address(authority: str) -> tuple[str, int] | None:
    host, _, port = authority.rpartition(":")
    host = host.strip("[]")
    if not port.isdigit() or not host or host[0].isalpha():
        return None
    return host, int(port)


def side(workload: Workload | None, labels: PeerLabels | None, identity: SpiffeId | None) -> Side:
    """Return a side of a connection: the workload of the mesh, else what the peer said of itself."""
    if workload is not None:
        return Side(
            namespace=workload.namespace,
            pod=workload.name,
            workload=workload.workload_name,
            kind=(workload.workload_type or "Pod").capitalize(),
            cluster=workload.cluster_id,
            account=workload.service_account,
            app=workload.canonical_name,
            version=workload.canonical_revision,
            spiffe=str(identity or workload.identity),
        )
    labels = labels or PeerLabels()
    return Side(
        namespace=labels.namespace,
        workload=labels.workload if labels.known else "",
        kind="Deployment",
        cluster=labels.cluster,
        app=labels.canonical_service if labels.known else "",
        spiffe=str(identity) if identity is not None else "",
    )
