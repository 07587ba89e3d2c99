"""Makes the families of :class:`~ztunnel.proxy.flows.times.ConnectionTimes` for the metrics pages.

Import this module only at the first scrape: see :mod:`ztunnel.runtime.http.exposition`.
"""

from collections.abc import Iterator, Mapping
from typing import TypeVar

from ztunnel.proxy.flows.ring import trace_id
from ztunnel.proxy.flows.times import HISTOGRAMS, ConnectionTimes
from ztunnel.runtime.durations import Durations
from ztunnel.runtime.durations import Exemplar as Observed
from ztunnel.runtime.http.exposition import Family, family
from ztunnel.runtime.http.prometheus import Exemplar, Metric, Sample

_LabelsT = TypeVar("_LabelsT", bound=tuple[str, ...])


def time_families(times: ConnectionTimes) -> Iterator[Family]:
    """Yield the metric family of failed connections, and every histogram that has a value."""
    yield family(
        "ztunnel_connection_errors",
        "counter",
        "Connections that failed, by how far they came (early: before they counted as opened) and why (unstable)",
        list(times.errors.items()),
        ("reporter", "stage", "reason"),
    )
    for each in HISTOGRAMS:
        yield histograms(each.name, f"{each.help} (unstable).", each.labels, times.histograms(each))


def histograms(name: str, text: str, labels: tuple[str, ...], found: Mapping[_LabelsT, Durations]) -> Family:
    """Return a family of histograms in seconds, without empty ones. Exemplars appear in the OpenMetrics format."""
    return Family(Metric(name, text, "histogram", "seconds"), _samples(name, labels, found))


def _samples(name: str, labels: tuple[str, ...], found: Mapping[_LabelsT, Durations]) -> Iterator[Sample]:
    for values, durations in list(found.items()):
        if not durations.count:
            continue
        shared = dict(zip(labels, values, strict=True))
        for (bound, count), observed in zip(durations.cumulative(), durations.exemplars(), strict=True):
            exemplar = _exemplar(observed) if observed is not None else None
            yield Sample(f"{name}_bucket", shared | {"le": bound}, count, exemplar=exemplar)
        yield Sample(f"{name}_sum", shared, durations.total_s)
        yield Sample(f"{name}_count", shared, durations.count)


def _exemplar(observed: Observed) -> Exemplar | None:
    found = trace_id(observed.trace)
    if not any(found):
        return None
    return Exemplar({"trace_id": found.hex()}, observed.seconds, round(observed.wall_s, 3))
