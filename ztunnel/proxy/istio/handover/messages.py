"""The messages that offer connections of an Istio mesh to a successor process. Pure.

Messages for both front ends (Istio and Envoy) are in :mod:`ztunnel.proxy.dataplane.handover.messages`.
"""

from __future__ import annotations

from typing import Final, TypeAlias

from msgspec import Struct

from xds.model.address import SocketAddress
from xds.model.calico import Flow
from xds.model.identity import SpiffeId
from ztunnel.proxy.dataplane.handover import messages
from ztunnel.proxy.istio.accounting.metrics import PeerLabels

PodKey: TypeAlias = tuple[str, str, str]
"""Namespace, name and service account."""


class FactsValue(Struct, frozen=True, kw_only=True):
    """The facts about an inbound connection that policies evaluate. ``names`` is ``None`` for a
    plain-text client.
    """

    source: SocketAddress
    destination: SocketAddress
    names: tuple[str, ...] | None


class PeerValue(Struct, frozen=True, kw_only=True):
    """The certificate of the pod at the other end of a node-local tunnel, in DER, without its private key."""

    identity: SpiffeId
    chain: tuple[bytes, ...]
    roots: tuple[bytes, ...]


class RecordValue(Struct, frozen=True, kw_only=True):
    """A connection's :class:`~ztunnel.proxy.istio.accounting.access_record.Record` without its byte counts."""

    direction: str
    source: SocketAddress
    destination: SocketAddress
    age_s: float
    hbone_authority: str = ""
    source_workload: str = ""
    destination_workload: str = ""
    source_labels: PeerLabels = PeerLabels()
    destination_labels: PeerLabels = PeerLabels()
    source_identity: SpiffeId | None = None
    destination_identity: SpiffeId | None = None
    service: str = ""
    secured: bool = False
    dry_run: str = ""
    http_left: str = ""
    trace: bytes = b""


class EntryValue(Struct, frozen=True, kw_only=True):
    """A connection of a pod (:class:`ztunnel.proxy.istio.path.pod_connection.PodConnection`)."""

    pod: PodKey
    record: RecordValue
    original: str | None = None
    actual: SocketAddress | None = None
    protocol: str = "TCP"
    facts: FactsValue | None = None
    flow: Flow | None = None
    peer: PeerValue | None = None


class CarrierValue(Struct, frozen=True, kw_only=True):
    """A pod's tunnel connection.

    Attributes:
        pod: the pod of the connection.
        dialled: the address and the accepted identities, if the pod's proxy dialled the connection. ``None`` if it
            accepted the connection.
        idle_s: how long a dialled connection has had no tunnels, in seconds. Sent so that the idle timeout
            continues. If it restarted with each process, idle connections could stay open for ever.
        source, local: for an accepted connection, the peer's address and the local address.
    """

    pod: PodKey
    dialled: tuple[SocketAddress, tuple[str, ...]] | None = None
    idle_s: float = 0.0
    source: SocketAddress | None = None
    local: SocketAddress | None = None


class Offer(messages.Offer, frozen=True, kw_only=True, tag=True):
    """The offer of one hand-over unit: a tunnel connection with its relays, or a relay without a tunnel.

    Attributes:
        carrier: the state of the unit's tunnel connection, if it has one.
        entries: for each relay its connection-table entries: one, or the two halves of a node-local tunnel.
    """

    carrier: CarrierValue | None
    entries: tuple[tuple[EntryValue, ...], ...]

    @property
    def connections(self) -> int:
        return max(1, sum(map(len, self.entries)))


from_giver: Final = messages.reader_of(Offer)
