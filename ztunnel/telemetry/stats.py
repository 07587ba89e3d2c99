"""Counters, gauges, histograms and text readouts, named as Envoy names them.

A :class:`Scope` is looked up once (per cluster, listener, stat prefix) and hands out the objects; on the data path
there is only ``counter.value += 1``. Each object knows two names: the dotted one of ``/stats`` and, for
Prometheus, a family with labels. Unlike Envoy's default tag extraction, which cuts SPIFFE cluster names at their
first dot, a label holds the whole name.
"""

import re
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field

Labels = tuple[tuple[str, str], ...]

#: Upper bounds of histogram buckets, as Envoy prints them (milliseconds).
BUCKETS = (
    *(0.5, 1.0, 5.0, 10.0, 25.0, 50.0, 100.0, 250.0, 500.0),
    *(1000.0, 2500.0, 5000.0, 10000.0, 30000.0, 60000.0, 300000.0, 600000.0, 1800000.0, 3600000.0),
)


@dataclass(slots=True, eq=False)
class Counter:
    """Goes up. Add to :attr:`value` directly."""

    name: str
    family: str
    labels: Labels
    value: int = 0
    latched: int = 0

    @property
    def used(self) -> bool:
        """Whether it was ever touched (``usedonly``)."""
        return self.value != 0


@dataclass(slots=True, eq=False)
class Gauge:
    """Goes up and down. ``read``, when there is one, is asked at each look instead."""

    name: str
    family: str
    labels: Labels
    stored: float = 0
    read: Callable[[], float] | None = None

    @property
    def value(self) -> float:
        """The value now."""
        return self.read() if self.read is not None else self.stored

    @value.setter
    def value(self, value: float) -> None:
        self.stored = value

    @property
    def used(self) -> bool:
        """Whether it is not zero (``usedonly``)."""
        return self.value != 0


@dataclass(slots=True, eq=False)
class TextReadout:
    """A text, read when asked for."""

    name: str
    read: Callable[[], str]


@dataclass(slots=True, eq=False)
class Histogram:
    """Distribution of values, by the buckets above."""

    name: str
    family: str
    labels: Labels
    counts: list[int] = field(default_factory=lambda: [0] * (len(BUCKETS) + 1))
    total: float = 0.0
    smallest: float = float("inf")
    largest: float = float("-inf")

    def record(self, value: float) -> None:
        """Count one value."""
        self.counts[bisect_left(BUCKETS, value)] += 1
        self.total += value
        self.smallest = min(self.smallest, value)
        self.largest = max(self.largest, value)

    @property
    def count(self) -> int:
        """How many values were recorded."""
        return sum(self.counts)

    @property
    def used(self) -> bool:
        """Whether anything was recorded."""
        return self.count != 0

    def quantile(self, share: float) -> float:
        """Value at ``share`` (0 to 1), interpolated inside its bucket; NaN when empty."""
        count = self.count
        if not count:
            return float("nan")
        rank = share * count
        seen = 0.0
        for index, inside in enumerate(self.counts):
            if inside and seen + inside >= rank:
                low = max(self.smallest, BUCKETS[index - 1] if index else 0.0)
                high = min(self.largest, BUCKETS[index] if index < len(BUCKETS) else self.largest)
                return low + (high - low) * max(0.0, rank - seen) / inside
            seen += inside
        return self.largest


Metric = Counter | Gauge | Histogram


class Stats:
    """Every metric of the process, by dotted name."""

    def __init__(self) -> None:
        self._metrics: dict[str, Metric] = {}
        self._texts: dict[str, TextReadout] = {}

    def scope(self, prefix: str, *, family: str = "", labels: Labels = ()) -> "Scope":
        """A scope whose dotted names begin with ``prefix.``.

        Args:
            prefix: dotted; colons are replaced as Envoy does (``spiffe://x`` becomes ``spiffe_x``).
            family: begin of the Prometheus names, when the prefix holds what the labels say.
            labels: of every metric in the scope.
        """
        clean = sanitised(prefix)
        return Scope(self, f"{clean}." if clean else "", family or clean.replace(".", "_"), labels)

    def __iter__(self) -> Iterator[Metric]:
        return iter(list(self._metrics.values()))

    @property
    def texts(self) -> list[TextReadout]:
        """Text readouts, by name."""
        return [self._texts[name] for name in sorted(self._texts)]

    def add(self, metric: Metric) -> Metric:
        """Register a metric; the one already there of the same name and kind wins."""
        found = self._metrics.get(metric.name)
        if type(found) is type(metric):
            return found
        self._metrics[metric.name] = metric
        return metric

    def add_text(self, text: TextReadout) -> None:
        """Register a text readout."""
        self._texts[text.name] = text

    def remove(self, names: Iterable[str]) -> None:
        """Forget metrics and texts (of a cluster or listener that is gone)."""
        for name in names:
            self._metrics.pop(name, None)
            self._texts.pop(name, None)

    def reset_counters(self) -> None:
        """``POST /reset_counters``."""
        for metric in self._metrics.values():
            if isinstance(metric, Counter):
                metric.value = 0


class Scope:
    """Metrics with a common prefix and labels; knows which they are, so that :meth:`close` removes no others."""

    __slots__ = ("_family", "_labels", "_names", "_prefix", "_stats")

    def __init__(
        self, stats: Stats, prefix: str, family: str, labels: Labels, names: set[str] | None = None
    ) -> None:
        self._stats = stats
        self._prefix = prefix
        self._family = family
        self._labels = labels
        self._names: set[str] = set() if names is None else names

    def counter(self, name: str) -> Counter:
        """The counter ``<prefix>.<name>``."""
        metric = self._add(Counter(self._prefix + name, self._family_of(name), self._labels))
        assert isinstance(metric, Counter)
        return metric

    def gauge(self, name: str, read: Callable[[], float] | None = None) -> Gauge:
        """The gauge ``<prefix>.<name>``; ``read`` replaces an earlier one."""
        metric = self._add(Gauge(self._prefix + name, self._family_of(name), self._labels))
        assert isinstance(metric, Gauge)
        if read is not None:
            metric.read = read
        return metric

    def histogram(self, name: str) -> Histogram:
        """The histogram ``<prefix>.<name>``."""
        metric = self._add(Histogram(self._prefix + name, self._family_of(name), self._labels))
        assert isinstance(metric, Histogram)
        return metric

    def text(self, name: str, read: Callable[[], str]) -> None:
        """A text readout ``<prefix>.<name>``."""
        self._names.add(self._prefix + name)
        self._stats.add_text(TextReadout(self._prefix + name, read))

    def scope(self, name: str) -> "Scope":
        """A scope below this one, with the same labels; it closes with this one."""
        clean = sanitised(name)
        return Scope(self._stats, f"{self._prefix}{clean}.", self._family_of(clean), self._labels, self._names)

    def close(self) -> None:
        """Forget everything made through the scope."""
        self._stats.remove(self._names)

    def _add(self, metric: Metric) -> Metric:
        self._names.add(metric.name)
        return self._stats.add(metric)

    def _family_of(self, name: str) -> str:
        return prometheus_name(f"{self._family}_{name}" if self._family else name)


def sanitised(name: str) -> str:
    """A name as part of a dotted name: ``://`` and ``:`` become ``_`` (as Envoy)."""
    return name.replace("://", "_").replace(":", "_")


def prometheus_name(name: str) -> str:
    """A dotted name as a Prometheus metric name, without Envoy's prefix."""
    return re.sub(r"[^a-zA-Z0-9_:]", "_", name)


def cluster_scope(stats: Stats, name: str) -> Scope:
    """``cluster.<name>.``."""
    return stats.scope(f"cluster.{name}", family="cluster", labels=(("envoy_cluster_name", name),))


def listener_scope(stats: Stats, address: str) -> Scope:
    """``listener.<ip>_<port>.``, or ``listener.envoy_internal_<name>.`` for an internal listener."""
    return stats.scope(f"listener.{address}", family="listener", labels=(("envoy_listener_address", address),))


def tcp_scope(stats: Stats, prefix: str) -> Scope:
    """``tcp.<stat prefix>.``."""
    return stats.scope(f"tcp.{prefix}", family="tcp", labels=(("envoy_tcp_prefix", prefix),))


def http_scope(stats: Stats, prefix: str) -> Scope:
    """``http.<stat prefix>.``."""
    return stats.scope(f"http.{prefix}", family="http", labels=(("envoy_http_conn_manager_prefix", prefix),))
