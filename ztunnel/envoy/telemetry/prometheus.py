"""Metrics for Prometheus, in two forms.

* :func:`envoy_text`: what Envoy's ``/stats/prometheus`` prints, byte for byte, filters included.
* :func:`negotiated`: what a scraper asks for by ``Accept``, text or OpenMetrics, by the Prometheus client library.

Metric names are Envoy's in every form, so that dashboards made for Envoy work and a name does not depend on what
the scraper accepts. OpenMetrics wants counters to end in ``_total``; those of Envoy that do not are typed
``unknown`` there.

Everything is given out family by family: a page of many thousand samples is made in slices.
"""

from collections.abc import Callable, Iterable, Iterator

from prometheus_client import ProcessCollector
from prometheus_client.core import Metric
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector

from ztunnel.envoy.telemetry.stats import (
    BUCKETS,
    Counter,
    Gauge,
    Histogram,
    Labels,
    Stats,
    TextReadout,
    prometheus_name,
)
from ztunnel.http.exposition import number

_OPENMETRICS = "application/openmetrics-text"
_EOF = b"# EOF\n"
_QUANTILES = (0.0, 0.25, 0.5, 0.75, 0.9, 0.95, 0.99, 0.995, 0.999, 1.0)

AnyMetric = Counter | Gauge | Histogram


def families(metrics: Iterable[AnyMetric]) -> dict[tuple[str, str], list[AnyMetric]]:
    """Metrics by (family, kind), sorted; the family without ``envoy_``."""
    found: dict[tuple[str, str], list[AnyMetric]] = {}
    for metric in metrics:
        found.setdefault((metric.family, type(metric).__name__.lower()), []).append(metric)
    for members in found.values():
        members.sort(key=lambda metric: metric.labels)
    return dict(sorted(found.items()))


# What Envoy prints


def envoy_text(
    metrics: Iterable[AnyMetric], texts: Iterable[TextReadout] = (), *, summaries: bool = False
) -> Iterator[str]:
    """Pieces of Envoy's ``/stats/prometheus``: counters, gauges, text readouts (as gauges of 0), histograms.

    Args:
        metrics: what to print.
        texts: printed as gauges whose label ``text_value`` holds the text.
        summaries: histograms as summaries of quantiles instead of buckets.
    """
    kinds = ("counter", "gauge", "histogram")
    grouped = families(metrics)
    for kind in kinds:
        if kind == "histogram":
            for readout in sorted(texts, key=lambda each: each.name):
                family = f"envoy_{prometheus_name(readout.name)}"
                labels = _labels((("text_value", readout.read()),))
                yield f"# TYPE {family} gauge\n{family}{labels} 0\n"
        for (name, of_kind), members in grouped.items():
            if of_kind == kind:
                yield from _family(f"envoy_{name}", kind, members, summaries)


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
    """(upper bound, values up to it); bounds as Envoy prints them, or as OpenMetrics wants them (``1.0``)."""
    seen = 0
    for bound, count in zip(BUCKETS, metric.counts, strict=False):
        seen += count
        yield (number(bound) if short else str(bound)), seen
    yield "+Inf", metric.count


def _labels(labels: Labels) -> str:
    """``{a="b"}``; an empty set prints as ``{}``, as Envoy's does."""
    return "{" + ",".join(f'{name}="{_escaped(value)}"' for name, value in labels) + "}"


def _escaped(value: str) -> str:
    return value.replace("\\", "\\\\").replace("\n", "\\n").replace('"', '\\"').replace("\r", "\\\\r")


# What the client library prints


class StatsCollector(Collector):
    """:class:`Stats` for a ``prometheus_client`` registry.

    Args:
        openmetrics: only name as counters what OpenMetrics lets be one.
    """

    def __init__(self, stats: Stats, *, openmetrics: bool = False) -> None:
        self._stats = stats
        self._openmetrics = openmetrics

    def collect(self) -> Iterator[Metric]:
        """One family after the other."""
        for (name, kind), members in families(self._stats).items():
            yield self._metric(f"envoy_{name}", kind, members)

    def _metric(self, name: str, kind: str, members: Iterable[AnyMetric]) -> Metric:
        exposed = name
        if kind == "counter":
            if name.endswith("_total"):
                exposed = name.removesuffix("_total")
            elif self._openmetrics:
                kind = "unknown"
        metric = Metric(exposed, f"Envoy's {name.removeprefix('envoy_')}.", kind)
        for member in members:
            labels = {prometheus_name(key): value for key, value in member.labels}
            if isinstance(member, Histogram):
                for bound, count in _cumulative(member, short=False):
                    metric.add_sample(f"{name}_bucket", labels | {"le": bound}, count)
                metric.add_sample(f"{name}_sum", labels, member.total)
                metric.add_sample(f"{name}_count", labels, member.count)
            else:
                metric.add_sample(name, labels, member.value)
        return metric


class _Family:
    """A registry of one family, which is all that an encoder asks of it."""

    def __init__(self, metric: Metric) -> None:
        self._metric = metric

    def collect(self) -> Iterator[Metric]:
        """The family."""
        yield self._metric


def negotiated(stats: Stats, accept: str) -> tuple[str, Iterator[str]]:
    """Content type and pieces of the page for a scraper that accepts ``accept``.

    Counters, gauges and histograms of the proxy, then the process's own (``process_*``).
    """
    encode, content_type = choose_encoder(accept)
    openmetrics = content_type.startswith(_OPENMETRICS)
    collectors = [StatsCollector(stats, openmetrics=openmetrics), ProcessCollector(registry=None)]
    return content_type, _encoded(collectors, encode, openmetrics)


def _encoded(collectors: Iterable[Collector], encode: Callable[..., bytes], openmetrics: bool) -> Iterator[str]:
    for collector in collectors:
        for metric in collector.collect():
            yield encode(_Family(metric)).removesuffix(_EOF).decode()
    if openmetrics:
        yield _EOF.decode()
