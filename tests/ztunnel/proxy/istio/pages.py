"""Samples of the metrics page, by name and labels, and exemplars of histograms."""

from ztunnel.proxy.istio.accounting.families import families
from ztunnel.proxy.istio.accounting.metrics import Metrics
from ztunnel.runtime.durations import Durations


def samples(metrics: Metrics, name: str) -> dict[str, float]:
    """Values by labels, ``{a="b",...}`` in the order of the family's labels."""
    return {
        "{" + ",".join(f'{key}="{value}"' for key, value in sample.labels.items()) + "}": sample.value
        for family in families(metrics)
        for sample in family.samples
        if sample.name == name
    }


def traces(durations: Durations) -> list[str]:
    """Return the traceparents of the exemplars, by bucket."""
    return [found.trace.decode() for found in durations.exemplars() if found is not None]
