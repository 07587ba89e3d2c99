"""Samples of the metrics page, by name and labels."""

from ztunnel.proxy.istio.accounting.metrics import Metrics
from ztunnel.proxy.istio.accounting.metrics_page import families


def samples(metrics: Metrics, name: str) -> dict[str, float]:
    """Values by labels, ``{a="b",...}`` in the order of the family's labels."""
    return {
        "{" + ",".join(f'{key}="{value}"' for key, value in sample.labels.items()) + "}": sample.value
        for family in families(metrics)
        for sample in family.samples
        if sample.name == name
    }
