"""Serializes a pod's connection for another process, and restores a connection received from another process."""

from __future__ import annotations

from collections.abc import Callable

from cryptography import x509
from cryptography.hazmat.primitives.serialization import Encoding

from hbone.aio.relay import ByteCounts
from xds.model.facts import ConnectionFacts, PeerCertificate
from ztunnel.proxy.dataplane.live_table import Abort
from ztunnel.proxy.identity.csr import IssuedCertificate
from ztunnel.proxy.istio.accounting.access_record import Direction, Record
from ztunnel.proxy.istio.certificates.manager import TlsPolicy, WorkloadCertificate
from ztunnel.proxy.istio.handover.messages import EntryValue, FactsValue, PeerValue, PodKey, RecordValue
from ztunnel.proxy.istio.path.inbound_target import inbound_facts
from ztunnel.proxy.istio.path.node import Node
from ztunnel.proxy.istio.path.pod import PodProxy
from ztunnel.proxy.istio.path.pod_connection import PodConnection


def entry_value(pod: PodKey, entry: PodConnection, now_s: float) -> EntryValue:
    """Return a connection as a serializable value.

    Args:
        pod: the connection's pod.
        entry: the connection's entry in the connection table.
        now_s: monotonic seconds.
    """
    return EntryValue(
        pod=pod,
        record=record_value(entry.record, now_s),
        original=entry.original,
        actual=entry.actual,
        protocol=entry.protocol,
        facts=None if entry.facts is None else _facts_value(entry.facts),
        flow=entry.flow,
        peer=None if entry.peer is None else _peer_value(entry.peer),
    )


def record_value(record: Record, now_s: float) -> RecordValue:
    """Return a record as a serializable value. Its byte counts are not included: they are sent with the relay."""
    source, destination = record.source_workload, record.destination_workload
    return RecordValue(
        direction=str(record.direction),
        source=record.source,
        destination=record.destination,
        age_s=now_s - record.started_s,
        hbone_authority=record.hbone_authority,
        source_workload=source.uid if source is not None else "",
        destination_workload=destination.uid if destination is not None else "",
        source_labels=record.source_labels,
        destination_labels=record.destination_labels,
        source_identity=record.source_identity,
        destination_identity=record.destination_identity,
        service=record.service.key if record.service is not None else "",
        secured=record.secured,
        dry_run=record.dry_run,
        http_left=record.http_left,
        trace=record.trace,
    )


def _facts_value(facts: ConnectionFacts) -> FactsValue:
    return FactsValue(
        source=facts.source,
        destination=facts.destination,
        names=facts.peer.uri_sans if facts.peer is not None else None,
    )


def _peer_value(certificate: WorkloadCertificate) -> PeerValue:
    issued = certificate.issued
    return PeerValue(
        identity=issued.identity,
        chain=tuple(each.public_bytes(Encoding.DER) for each in issued.chain),
        roots=tuple(each.public_bytes(Encoding.DER) for each in issued.roots),
    )


def record_of(value: RecordValue, node: Node, counts: ByteCounts) -> Record:
    """Restore a record received from another process. Workloads and the service are looked up in this process's
    mesh.

    Raises:
        ValueError: an identity, a direction or labels cannot be read.
    """
    record = Record(node, Direction(value.direction), value.source, value.destination, counts)
    record.hbone_authority = value.hbone_authority
    record.source_workload = node.mesh.workload(value.source_workload) if value.source_workload else None
    record.destination_workload = (
        node.mesh.workload(value.destination_workload) if value.destination_workload else None
    )
    record.source_labels = value.source_labels
    record.destination_labels = value.destination_labels
    record.source_identity = value.source_identity
    record.destination_identity = value.destination_identity
    record.service = node.mesh.service(value.service) if value.service else None
    record.secured = value.secured
    record.dry_run = value.dry_run
    record.http_left = value.http_left
    record.trace = value.trace
    return record


def prepared(value: EntryValue, pod: PodProxy, counts: ByteCounts) -> Callable[[Abort], PodConnection]:
    """Prepare to take over a connection. All steps that can fail are done here.

    Args:
        value: the connection as serialized by the previous process.
        pod: the connection's pod.
        counts: the relay's byte counts.

    Returns:
        A function that registers the connection in the pod's table, continues its record and returns it. Its
        argument is called to abort the connection while the relay does not run yet.

    Raises:
        ValueError: the value cannot be read.
    """
    record = record_of(value.record, pod.context.node, counts)
    facts = None if value.facts is None else _facts_of(value.facts)
    peer = None if value.peer is None else _peer_of(value.peer)
    if facts is None and record.direction is Direction.INBOUND:
        raise ValueError("an inbound connection without the facts that policies evaluate")

    def register(abort: Abort) -> PodConnection:
        group, judged_by = (
            (pod.connections.outbound, pod.outbound.verdict)
            if record.direction is Direction.OUTBOUND
            else (pod.connections.inbound, pod.inbound.verdict)
        )
        entry = PodConnection(group, record, abort, judged_by)
        entry.original, entry.actual, entry.protocol = value.original, value.actual, value.protocol
        entry.facts, entry.flow, entry.peer = facts, value.flow, peer
        record.came(value.record.age_s)
        return entry

    return register


def _facts_of(value: FactsValue) -> ConnectionFacts:
    peer = None if value.names is None else PeerCertificate(uri_sans=value.names)
    return inbound_facts(value.source, value.destination, peer)


def _peer_of(value: PeerValue) -> WorkloadCertificate:
    """Restore a peer's certificate, only to check it against revocation lists. It has no private key."""
    issued = IssuedCertificate(
        identity=value.identity,
        chain=tuple(map(x509.load_der_x509_certificate, value.chain)),
        roots=tuple(map(x509.load_der_x509_certificate, value.roots)),
        chain_pem=b"",
        roots_pem=b"",
        key_pem=b"",
    )
    return WorkloadCertificate(issued, 0, TlsPolicy())
