"""How a workload shows in labels and baggage, made once per version of it. Pure."""

from typing import NamedTuple

from hbone.headers import Baggage, format_baggage
from xds.model.identity import SpiffeId
from xds.model.workload import Workload
from ztunnel.proxy.istio.accounting.metrics import PeerLabels


class WorkloadLabels(NamedTuple):
    """A workload and what is printed of it for each of its connections.

    Attributes:
        workload: this version of it.
        identity: what its certificate says.
        plain: its labels on a connection that proves no identity.
        secured: its labels, the principal included, on one that does.
        baggage: the header by which its proxy describes it to the peer's.
    """

    workload: Workload
    identity: SpiffeId
    plain: PeerLabels
    secured: PeerLabels
    baggage: bytes


def labels_of(workload: Workload) -> WorkloadLabels:
    """Make the labels of one version of a workload."""
    plain = PeerLabels.of(workload)
    identity, place = workload.identity, workload.locality
    return WorkloadLabels(
        workload,
        identity,
        plain,
        plain._replace(principal=str(identity)),
        format_baggage(
            Baggage(
                cluster_id=workload.cluster_id,
                namespace=workload.namespace,
                workload_type=workload.workload_type,
                workload_name=workload.workload_name,
                service_name=workload.canonical_name,
                revision=workload.canonical_revision,
                region=place.region,
                zone=place.zone,
            )
        ),
    )
