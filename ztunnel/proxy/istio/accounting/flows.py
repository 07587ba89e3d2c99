"""Records connections of an Istio mesh in the flight recorder, and converts its entries to Hubble flows."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Final, Protocol

from xds.model.address import SocketAddress
from xds.model.identity import SpiffeId
from xds.model.mesh import Mesh
from xds.model.service import Service
from xds.model.workload import Workload
from ztunnel import __version__
from ztunnel.proxy.flows.hubble import Side, response
from ztunnel.proxy.flows.ring import Entry, FlowRing
from ztunnel.proxy.flows.settings import Peer
from ztunnel.proxy.istio.accounting.metrics import PeerLabels

#: The number of object references per recorder entry: 8 from :func:`references`, and 2 about the connection's end.
WIDTH: Final = 10
#: Kubernetes' kinds, by :attr:`xds.model.workload.Workload.workload_type`.
_KINDS: Final = {"deployment": "Deployment", "cronjob": "CronJob", "pod": "Pod", "job": "Job"}


class NamedNode(Protocol):
    """The settings that name this node."""

    @property
    def cluster_id(self) -> str:
        """The cluster's id."""

    @property
    def node(self) -> str:
        """The node's name."""


class NamedProxy(Protocol):
    """The settings that name this proxy's pod."""

    @property
    def pod_name(self) -> str:
        """The name of the proxy's pod."""

    @property
    def pod_namespace(self) -> str:
        """The namespace of the proxy's pod."""


class Recorded(Protocol):
    """The recorded attributes of a :class:`ztunnel.proxy.istio.accounting.access_record.Record`."""

    hbone_authority: str
    source_workload: Workload | None
    destination_workload: Workload | None
    source_labels: PeerLabels
    destination_labels: PeerLabels
    source_identity: SpiffeId | None
    destination_identity: SpiffeId | None
    service: Service | None


def references(record: Recorded, text: Callable[[Any], Any]) -> tuple[Any, ...]:
    """Return the object references of a connection's recorder entry, except the last two, which describe its end.

    Args:
        record: the connection.
        text: replaces a value by an equal object that other entries already use, to save memory.
    """
    source, destination = record.source_workload, record.destination_workload
    return (
        source,
        destination,
        text(record.source_labels) if source is None else None,
        text(record.destination_labels) if destination is None else None,
        text(record.source_identity) if record.source_identity is not None else None,
        text(record.destination_identity) if record.destination_identity is not None else None,
        record.service,
        text(record.hbone_authority) if record.hbone_authority else "",
    )


def shape(config: NamedNode) -> Callable[[Entry], dict[str, Any]]:
    """Return a function that converts a recorder entry to a GetFlowsResponse."""
    node = flow_node(config)
    return lambda entry: _response(entry, node)


def flow_node(config: NamedNode) -> str:
    """Return the name of this node in flows: ``CLUSTER/NODE``."""
    return f"{config.cluster_id or 'default'}/{config.node or 'node'}"


def _response(entry: Entry, node: str) -> dict[str, Any]:
    source, destination, source_labels, destination_labels, source_id, destination_id = entry.refs[:6]
    service, authority, ended, addon = entry.refs[6:]
    tunnel = ""
    if authority:
        # The flow's destination is the application's address and port on both sides, not port 15008 of the tunnel.
        tunnel = str(SocketAddress(*entry.destination)) if entry.outbound else ""
        entry = entry._replace(destination=SocketAddress.parse_or_none(authority) or entry.destination)
    return response(
        entry,
        node,
        side(source, source_labels, source_id),
        side(destination, destination_labels, destination_id),
        ended,
        addon=addon,
        tunnelled=bool(authority),
        service=(service.name, service.namespace) if isinstance(service, Service) else None,
        tunnel=tunnel,
        emitter=__version__,
    )


def peers_in(mesh: Mesh, config: NamedProxy, port: int) -> Iterator[Peer]:
    """Yield the proxies of all nodes for Hubble Relay: the workloads of this proxy's own DaemonSet.

    Yields no peers if the control plane does not describe this proxy's pod. In a mesh of several clusters, the
    proxies of other clusters have their own relay, and this cluster's relay might not reach them.
    """
    every = [each for each in mesh.workloads() if each.namespace == config.pod_namespace and port]
    own = {(each.cluster_id, each.workload_name) for each in every if each.name == config.pod_name}
    for each in every:
        if (each.cluster_id, each.workload_name) in own and each.node and each.addresses:
            host = each.addresses[0]
            name = f"{each.cluster_id or 'default'}/{each.node}"
            yield Peer(name=name, address=f"[{host}]:{port}" if ":" in host else f"{host}:{port}")


def ring_of(capacity: int) -> FlowRing:
    """Return the flight recorder of a process, which holds the latest ``capacity`` connections."""
    return FlowRing(capacity, WIDTH)


def side(workload: Workload | None, labels: PeerLabels | None, identity: SpiffeId | None) -> Side:
    """Describe one side of a connection, from the mesh's workload or else from the peer's own baggage."""
    if workload is not None:
        return Side(
            namespace=workload.namespace,
            pod=workload.name,
            workload=workload.workload_name,
            kind=_KINDS.get(workload.workload_type, "Pod"),
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
