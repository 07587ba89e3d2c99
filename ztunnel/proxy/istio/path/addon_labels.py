"""The labels of a workload as addons see them. Pure.

The control plane sends no pod labels, only values that Istio derived: canonical name, revision and locality. Each
value is given under the name of the pod label that Istio usually derives it from.
"""

from collections.abc import Mapping
from functools import lru_cache
from types import MappingProxyType

from xds.model.workload import Locality, Workload


def addon_labels(workload: Workload) -> Mapping[str, str]:
    """Return the labels of a workload, leaving out those with an empty value."""
    return _labels(workload.canonical_name, workload.canonical_revision, workload.node, workload.locality)


@lru_cache(maxsize=4096)  # called for every connection, but a node has few workloads
def _labels(name: str, revision: str, node: str, place: Locality) -> Mapping[str, str]:
    labels = {
        "app": name,
        "version": revision,
        "kubernetes.io/hostname": node,
        "topology.kubernetes.io/region": place.region,
        "topology.kubernetes.io/zone": place.zone,
    }
    return MappingProxyType({key: value for key, value in labels.items() if value})
