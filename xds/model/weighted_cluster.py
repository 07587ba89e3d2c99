"""Weighted clusters of TCP proxies and routes: connections are distributed among the clusters by weight."""

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class WeightedCluster:
    """One of the clusters in ``weighted_clusters``, with its weight."""

    name: str
    weight: int
    metadata_match: Mapping[str, object] = field(default_factory=dict, hash=False)
