"""One of several clusters that share connections by weight, for TCP proxies and routes."""

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class WeightedCluster:
    """One choice of ``weighted_clusters``."""

    name: str
    weight: int
    metadata_match: Mapping[str, object] = field(default_factory=dict, hash=False)
