"""Makes metrics for Prometheus, in two formats.

* :func:`envoy_text`: the text of Envoy's ``/stats/prometheus`` on the admin port, byte for byte, with its filters.
* :func:`scraped`: families for the scrape port, where :mod:`ztunnel.runtime.http.exposition` negotiates the
  format.

Both formats use Envoy's metric names, so that dashboards made for Envoy work and names do not depend on the
negotiated format.

Pages are made family by family, so that many thousands of samples do not block the event loop.
"""

import math
from collections.abc import Generator, Iterable, Iterator
from typing import TypeVar

from ztunnel.proxy.envoy.stats.stats import (
    BUCKETS,
    Counter,
    Gauge,
    Histogram,
    Labels,
    Stats,
    TextReadout,
    prometheus_name,
)
from ztunnel.proxy.flows.families import time_families
from ztunnel.proxy.flows.times import ConnectionTimes
from ztunnel.runtime.http.exposition import Family, UnsuffixedCounter, process_families
from ztunnel.runtime.http.prometheus import Metric, Sample

_QUANTILES = (0.0, 0.25, 0.5, 0.75, 0.9, 0.95, 0.99, 0.995, 0.999, 1.0)

AnyMetric = Counter | Gauge | Histogram


#: The number of metrics handled per step of a page, which takes about 2 ms.
_AT_ONCE = 1000
_PAUSE = Family(Metric("pause", "", "gauge"), ())
Step = TypeVar("Step")
Families = dict[tuple[str, str], list[AnyMetric]]


def families(metrics: Iterable[AnyMetric], pause: Step) -> Generator[Step, None, Families]:
    """Group metrics by (family, kind), sorted. Family names do not have the prefix ``envoy_``.

    Yields ``pause`` between steps, so that the metrics of many thousands of clusters do not block the event loop.
    """
    found: Families = {}
    for count, metric in enumerate(metrics, start=1):
        found.setdefault((metric.family, type(metric).__name__.lower()), []).append(metric)
        if count % _AT_ONCE == 0:
            yield pause
    for members in found.values():
        members.sort(key=lambda metric: metric.labels)
        yield pause
    return dict(sorted(found.items()))


# What Envoy prints


def envoy_text(
    metrics: Iterable[AnyMetric], texts: Iterable[TextReadout] = (), *, summaries: bool = False
) -> Iterator[str]:
    """Yield the text of Envoy's ``/stats/prometheus``: counters, gauges, text readouts (as gauges with the value
    0), histograms.

    Args:
        metrics: the metrics to print.
        texts: the text readouts, printed as gauges with the text in the label ``text_value``.
        summaries: whether histograms are printed as summaries of quantiles instead of buckets.
    """
    kinds = ("counter", "gauge", "histogram")
    grouped = yield from families(metrics, "")
    for kind in kinds:
        if kind == "histogram":
            for readout in sorted(texts, key=lambda each: each.name):
                family = f"envoy_{prometheus_name(readout.name)}"
                labels = _labels((("text_value", readout.read()),))
                yield f"# TYPE {family} gauge\n{family}{labels} 0\n"
        for (name, of_kind), members in grouped.items():
            if of_kind == kind:
                yield from _family(f"envoy_{name}", kind, members, summaries)


def number(value: float) -> str:
    """Return a value in Envoy's form: whole numbers without a fraction."""
    if isinstance(value, float):
        if not math.isfinite(value):
            return "nan" if math.isnan(value) else "+Inf" if value > 0 else "-Inf"
        if not value.is_integer():
            return repr(value)
    return str(int(value))


def _family(name: str, kind: str, members: Iterable[AnyMetric], summaries: bool) -> Iterator[str]:
    yield f"# TYPE {name} {'summary' if kind == 'histogram' and summaries else kind}\n"
    for metric in members:
        if not isinstance(metric, Histogram):
            yield f"{name}{_labels(metric.labels)} {number(metric.value)}\n"
        elif summaries:
            yield _summary(name, metric)
        else:
            yield _buckets(name, metric)


def _buckets(name: str, metric: Histogram) -> str:
    lines = [
        f"{name}_bucket{_labels((*metric.labels, ('le', bound)))} {count}\n"
        for bound, count in _cumulative(metric, short=True)
    ]
    labels = _labels(metric.labels)
    lines.append(f"{name}_sum{labels} {number(metric.total)}\n{name}_count{labels} {metric.count}\n")
    return "".join(lines)


def _summary(name: str, metric: Histogram) -> str:
    lines = [
        f"{name}{_labels((*metric.labels, ('quantile', f'{share:g}')))} {number(metric.quantile(share))}\n"
        for share in _QUANTILES
    ]
    labels = _labels(metric.labels)
    lines.append(f"{name}_sum{labels} {number(metric.total)}\n{name}_count{labels} {metric.count}\n")
    return "".join(lines)


def _cumulative(metric: Histogram, *, short: bool) -> Iterator[tuple[str, int]]:
    """Yield each bucket of a histogram as its upper bound and the number of values up to this bound. Bounds have
    Envoy's form, or OpenMetrics' form (``1.0``).
    """
    seen = 0
    for bound, count in zip(BUCKETS, metric.counts, strict=False):
        seen += count
        yield (number(bound) if short else str(bound)), seen
    yield "+Inf", metric.count


def _labels(labels: Labels) -> str:
    """Return labels as ``{a="b"}``. An empty set is ``{}``, like in Envoy."""
    return "{" + ",".join(f'{name}="{_escaped(value)}"' for name, value in labels) + "}"


def _escaped(value: str) -> str:
    return value.replace("\\", "\\\\").replace("\n", "\\n").replace('"', '\\"').replace("\r", "\\\\r")


# The scraper's page


def scraped(stats: Stats, times: ConnectionTimes) -> Iterator[Family]:
    """Yield the proxy's metrics, then connection times, then process metrics (``process_*``). Families without
    samples come first, and pages omit them; see :func:`families`.
    """
    grouped = yield from families(stats, _PAUSE)
    for (name, kind), members in grouped.items():
        yield Family(_described(f"envoy_{name}", kind), _samples(f"envoy_{name}", members))
    yield from time_families(times)
    yield from process_families()


def _described(name: str, kind: str) -> Metric:
    text = f"Envoy's {name.removeprefix('envoy_')}."
    if kind == "counter" and not name.endswith("_total"):
        return UnsuffixedCounter(name, text)
    return Metric(name.removesuffix("_total") if kind == "counter" else name, text, kind)


def _samples(name: str, members: Iterable[AnyMetric]) -> Iterator[Sample]:
    for member in members:
        labels = {prometheus_name(key): value for key, value in member.labels}
        if isinstance(member, Histogram):
            for bound, count in _cumulative(member, short=False):
                yield Sample(f"{name}_bucket", labels | {"le": bound}, count)
            yield Sample(f"{name}_sum", labels, member.total)
            yield Sample(f"{name}_count", labels, member.count)
        else:
            yield Sample(name, labels, member.value)
