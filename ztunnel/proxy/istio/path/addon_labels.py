"""Builds the workload labels that are passed to addons. Pure.

The control plane sends no pod labels, only values that Istio derived: canonical name, revision and locality. Istio
usually derives each value from one pod label, and the value is passed under this label's name.
"""

from collections.abc import Mapping
from functools import lru_cache
from types import MappingProxyType

from xds.model.workload import Locality, Workload


def addon_labels(workload: Workload) -> Mapping[str, str]:
    """Return a workload's labels for addons, without empty values."""
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
