"""The part of the Prometheus client library that makes pages; see :mod:`ztunnel.runtime.http.exposition`."""

from ztunnel.runtime.unused_imports import without_servers

with without_servers():
    from prometheus_client.exposition import choose_encoder
    from prometheus_client.metrics_core import Metric
    from prometheus_client.samples import Exemplar, Sample

__all__ = ["Exemplar", "Metric", "Sample", "choose_encoder"]
