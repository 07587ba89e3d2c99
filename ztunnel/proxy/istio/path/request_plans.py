"""Caches decisions about tunnel requests as plans: all requests of a tunnel connection to one authority share a
plan, per version of the mesh.

All requests of a tunnel connection have the same source address and peer identity. So two requests with equal
authority, service and network have the same target, policy verdict, labels and metric series. A plan holds these
values. After each change of the mesh the decision is made again, and the plan is kept if the result is equal.

There is no plan for refusals, missing or dry-run policies, clients unknown to the mesh, and applications that need
a PROXY header or a tunnel.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Final, NamedTuple, TypeAlias

from hbone.aio.connection import Connection
from hbone.aio.requests import Request
from hbone.events import RequestHead
from hbone.tunnel_headers import first, forwarded_host
from xds.model.address import SocketAddress
from xds.model.facts import ConnectionFacts, PeerCertificate
from xds.model.identity import SpiffeId
from xds.model.service import Service
from xds.model.workload import Workload
from ztunnel.proxy.istio.accounting.access_record import Described, Direction, Record
from ztunnel.proxy.istio.accounting.workload_labels import WorkloadLabels
from ztunnel.proxy.istio.path.authorizer import Authorizer
from ztunnel.proxy.istio.path.inbound_target import RequestRefused, inbound_facts, inbound_service, inbound_target
from ztunnel.proxy.istio.path.node import Node
from ztunnel.proxy.istio.path.pod_context import PodContext
from ztunnel.proxy.istio.settings.config import HBONE_PORT

_NO_CERTIFICATE: Final = PeerCertificate()
#: The largest number of plans per tunnel connection. A bound is needed because the peer chooses the authorities.
_MOST: Final = 64


#: The parts of a request on which a plan depends: authority, service and network.
_Asked: TypeAlias = tuple[bytes | None, str | None, bytes | None]


class _Decision(NamedTuple):
    """The decision about a request. Its parts are compared one by one with the parts of a later decision."""

    address: SocketAddress
    service: Service | None
    client: Workload
    labels: WorkloadLabels
    policy: str

    def is_same(self, other: _Decision) -> bool:
        return (
            self.address == other.address
            and self.service is other.service
            and self.client is other.client
            and self.labels is other.labels
        )


class RequestPlan:
    """The values shared by all requests with the same target.

    Attributes:
        version: the mesh's version at the decision.
        decision: the target, the service, the two workloads, and the policy that allows the requests.
        facts: the facts that policies evaluate.
        described: the attributes that are equal in the records of all these requests.
        meant: the host name of the service that the client dialled, for the config dump.
        source: the source address for dialling the application. ``None``: the kernel chooses.
    """

    __slots__ = ("decision", "described", "facts", "meant", "source", "version")

    def __init__(
        self, decision: _Decision, facts: ConnectionFacts, described: Described, asked: _Asked, source: str | None
    ) -> None:
        self.version = -1
        self.decision = decision
        self.facts = facts
        self.described = described
        self.meant = asked[1]
        self.source = source


@dataclass(slots=True, eq=False)
class Peer:
    """The other end of a tunnel connection.

    Attributes:
        source: the peer's address.
        local: this pod's address of the connection.
        connection: the connection that carries the peer's tunnels. ``None`` for a node-local tunnel.
        certificate: the names in the peer's certificate. Empty without a certificate.
        identity: the first name that is a valid identity.
        plans: the plans of the peer's requests.
    """

    source: SocketAddress
    local: SocketAddress
    connection: Connection | None = None
    certificate: PeerCertificate = _NO_CERTIFICATE
    identity: SpiffeId | None = None
    plans: dict[_Asked, RequestPlan] = field(default_factory=dict)


class RequestPlans:
    """Makes and caches the plans for requests to one pod.

    Args:
        pod: the shared state of the pod.
        authorizer: checks the requests against policy.
        illegal_ports: the proxy's own ports in the pod.
    """

    def __init__(self, pod: PodContext, authorizer: Authorizer, illegal_ports: Collection[int]) -> None:
        self._pod = pod
        self._node = pod.node
        self._authorizer = authorizer
        self._illegal_ports = illegal_ports

    def plan(self, peer: Peer, head: RequestHead) -> RequestPlan | None:
        """Return the plan for a request, or ``None`` if the request has to be decided on its own."""
        if head.method != b"CONNECT" or head.protocol is not None:
            return None
        labels = self._pod.local.known()
        if labels is None:
            return None
        asked = _asked(head)
        known = peer.plans.get(asked)
        if known is not None and known.version == self._node.mesh.version and known.decision.labels is labels:
            return known
        decided = self._decide(peer, asked, labels)
        if decided is None:
            peer.plans.pop(asked, None)
            return None
        decision, facts = decided
        if known is None or not known.decision.is_same(decision):
            known = self._made(peer, asked, decision, facts)
            if len(peer.plans) >= _MOST:
                peer.plans.clear()
            peer.plans[asked] = known
        known.decision, known.version = decision, self._node.mesh.version
        return known

    def _decide(
        self, peer: Peer, asked: _Asked, labels: WorkloadLabels
    ) -> tuple[_Decision, ConnectionFacts] | None:
        node, workload = self._node, labels.workload
        authority, meant, network = asked
        client = workload_of(peer, network, node)
        if client is None or workload.application_tunnel is not None:
            return None
        try:
            target = inbound_target(
                authority,
                workload,
                peer.local.host,
                node.mesh,
                network=node.config.network,
                illegal_ports=self._illegal_ports,
            )
        except RequestRefused:
            return None
        facts = inbound_facts(peer.source, target.address, peer.certificate)
        policy = self._authorizer.plan(workload, facts)
        if policy is None or target.proxy_destination is not None:
            return None
        service = inbound_service(target, workload, node.mesh, meant)
        return _Decision(target.address, service, client, labels, policy), facts

    def _made(self, peer: Peer, asked: _Asked, decision: _Decision, facts: ConnectionFacts) -> RequestPlan:
        node, sockets = self._node, self._pod.sockets
        sample = Record(node, Direction.INBOUND, peer.source, peer.local)
        enter_client(sample, decision.client, peer.identity, node)
        enter_pod(sample, decision.labels)
        sample.hbone_authority = (asked[0] or b"").decode("latin-1")
        sample.service = decision.service
        source = sockets.application_source(HBONE_PORT, peer.source.host, decision.address.host)
        return RequestPlan(decision, facts, Described(sample), asked, source)


def _asked(head: RequestHead) -> _Asked:
    network = None
    for name, value in head.headers:
        if name == b"x-forwarded-network":
            network = value
            break
    return head.authority, forwarded_host(head.headers), network


def workload_of(peer: Peer, forwarded_network: bytes | None, node: Node) -> Workload | None:
    """Return the client's workload, or ``None`` if it is not known.

    Usually the client is the workload at the peer's address. It is not if a gateway forwarded the request from
    another network: then the client is not known. A peer whose certificate belongs to the workload at its address
    is that workload and no gateway, even if its headers claim otherwise.

    Args:
        peer: the other end of the tunnel connection.
        forwarded_network: the field ``x-forwarded-network``.
        node: the shared state of the node's pods.
    """
    network = node.config.network
    workload = node.mesh.workload_at(network, peer.source.host)
    if workload is None or workload.identity == peer.identity or forwarded_network is None:
        return workload
    return workload if forwarded_network.decode("latin-1").lower() == network.lower() else None


def enter_client(record: Record, workload: Workload, identity: SpiffeId | None, node: Node) -> None:
    """Write the client's attributes to a request's record.

    Args:
        record: the request's record.
        workload: the client, as the control plane describes it.
        identity: the client's authenticated identity.
        node: the shared state of the node's pods.
    """
    there = node.labels_of(workload)
    principal = str(identity) if identity is not None else ""
    known = there.secured.principal == principal
    record.source_workload = workload
    record.source_labels = there.secured if known else there.plain._replace(principal=principal)
    record.source_identity = identity


def enter_pod(record: Record, labels: WorkloadLabels) -> None:
    """Write this pod's attributes to a record, as the destination of a tunnel."""
    record.secured = True
    record.destination_workload = labels.workload
    record.destination_labels = labels.secured
    record.destination_identity = labels.identity


def enter_trace(record: Record, request: Request, node: Node) -> None:
    """Write a request's trace to its record. The trace of a connection's first request also becomes the exemplar
    of its handshake duration.
    """
    record.trace = first(request.head.headers, b"traceparent") or b""
    connection = request.connection
    if connection.handshake_s:
        node.metrics.first_request(connection, record.trace, node.clock.wall())
