"""Computes the labels and the baggage of a workload, once per version of the workload. Pure."""

from typing import NamedTuple

from hbone.tunnel_headers import Baggage, format_baggage
from xds.model.identity import SpiffeId
from xds.model.workload import Workload
from ztunnel.proxy.istio.accounting.metrics import PeerLabels


class WorkloadLabels(NamedTuple):
    """A workload with the labels printed for each of its connections.

    Attributes:
        workload: the workload, in the version used to compute the labels.
        identity: the identity in the workload's certificate.
        plain: the labels for an unauthenticated connection.
        secured: the labels for an authenticated connection, including the principal.
        baggage: the header that describes the workload to the peer's proxy.
    """

    workload: Workload
    identity: SpiffeId
    plain: PeerLabels
    secured: PeerLabels
    baggage: bytes


def labels_of(workload: Workload) -> WorkloadLabels:
    """Compute the labels for one version of a workload."""
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
