"""Counters, gauges, histograms and text readouts, with Envoy's names.

A :class:`Scope` is looked up once (per cluster, listener, stat prefix) and returns metric objects, so that the
data path only does ``counter.value += 1``. Some metrics exist thousands of times and are mostly unused, for
example the metrics of clusters. Such metrics are declared for their scope and created on first use, but pages
always show them. Each metric has two names: the dotted name of ``/stats`` and, for Prometheus, a family with
labels. Envoy's default tag extraction cuts SPIFFE cluster names at their first dot, while labels here have the
whole name.
"""

import re
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import lru_cache, partial
from typing import Any, Generic, TypeVar, cast

Labels = tuple[tuple[str, str], ...]
M = TypeVar("M", "Counter", "Gauge", "Histogram")

#: The upper bounds of histogram buckets, in milliseconds, the same as in Envoy.
BUCKETS = (
    *(0.5, 1.0, 5.0, 10.0, 25.0, 50.0, 100.0, 250.0, 500.0),
    *(1000.0, 2500.0, 5000.0, 10000.0, 30000.0, 60000.0, 300000.0, 600000.0, 1800000.0, 3600000.0),
)


@dataclass(slots=True, eq=False)
class Counter:
    """A counter: a number that only increases. Callers add to :attr:`value` directly."""

    name: str
    family: str
    labels: Labels
    value: int = 0

    @property
    def used(self) -> bool:
        """Whether the counter is not zero, so that pages show it with ``usedonly``."""
        return self.value != 0


@dataclass(slots=True, eq=False)
class Gauge:
    """A gauge: a number that can also decrease. If ``read`` is set, each page calls it to get the number."""

    name: str
    family: str
    labels: Labels
    stored: float = 0
    read: Callable[[], float] | None = None

    @property
    def value(self) -> float:
        """The current value."""
        return self.read() if self.read is not None else self.stored

    @value.setter
    def value(self, value: float) -> None:
        self.stored = value

    @property
    def used(self) -> bool:
        """Whether the gauge is not zero, so that pages show it with ``usedonly``."""
        return self.value != 0


@dataclass(slots=True, eq=False)
class TextReadout:
    """A statistic whose value is a text, which is read each time a page is made."""

    name: str
    read: Callable[[], str]


@dataclass(slots=True, eq=False)
class Histogram:
    """A histogram: the distribution of recorded values over :data:`BUCKETS`."""

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
        if value < self.smallest:
            self.smallest = value
        if value > self.largest:
            self.largest = value

    @property
    def count(self) -> int:
        """The number of recorded values."""
        return sum(self.counts)

    @property
    def used(self) -> bool:
        """Whether a value was recorded."""
        return self.count != 0

    def quantile(self, share: float) -> float:
        """Return the quantile ``share`` (0 to 1), interpolated inside its bucket. NaN without values."""
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


@dataclass(frozen=True, slots=True)
class Declared:
    """A metric that pages show for every scope of a kind, even before the metric is created.

    Attributes:
        name: the metric's name below the scope's prefix.
        read: returns the value, given the owner passed to :meth:`Scope.declare`. ``None`` if the metric itself
            counts.
    """

    name: str
    kind: type[Counter] | type[Gauge] | type[TextReadout]
    read: Callable[[Any], Any] | None = None


class OnTouch(Generic[M]):
    """A descriptor that creates a metric on first use. The owner must have a ``scope`` and a ``__dict__``."""

    def __init__(self, kind: type[M], name: str) -> None:
        self.kind: type[Counter] | type[Gauge] | type[Histogram] = kind
        self.name = name
        self._attribute = ""

    def __set_name__(self, owner: type, name: str) -> None:
        self._attribute = name

    def __get__(self, owner: Any, kind: type) -> M:
        scope: Scope = owner.scope
        metric: Metric
        if self.kind is Histogram:
            metric = scope.histogram(self.name)
        else:
            metric = scope.counter(self.name) if self.kind is Counter else scope.gauge(self.name)
        owner.__dict__[self._attribute] = metric  # from now on, look-ups find the metric before this descriptor
        return cast(M, metric)


def declared_in(owner: type) -> tuple[Declared, ...]:
    """Return the counters and gauges that a class defines with :class:`OnTouch`, for :meth:`Scope.declare`.

    Histograms appear with their first value, because an empty histogram would take 22 lines of Prometheus' text.
    """
    touched = [each for each in vars(owner).values() if isinstance(each, OnTouch)]
    return tuple(Declared(each.name, each.kind) for each in touched if each.kind is Counter or each.kind is Gauge)


class Stats:
    """All metrics of the process, by dotted name."""

    def __init__(self) -> None:
        self._metrics: dict[str, Metric] = {}
        self._texts: dict[str, TextReadout] = {}
        #: By the scope at the top that declared them; without an owner by the prefix.
        self._declared: dict[Scope | _Prefix, tuple[_Declaration, ...]] = {}
        self._prefixes: dict[str, _Prefix] = {}
        self._tables: list[tuple[Callable[[], Iterable[Counter]], Callable[[], None]]] = []

    def scope(self, prefix: str, *, family: str = "", labels: Labels = ()) -> "Scope":
        """Return a scope with the name prefix ``prefix.``.

        Args:
            prefix: the dotted prefix. Colons are replaced like in Envoy (``spiffe://x`` becomes ``spiffe_x``).
            family: the prefix of Prometheus names, if ``labels`` replace a part of the dotted prefix.
            labels: the labels of every metric in the scope.
        """
        clean = sanitised(prefix)
        return Scope(self, f"{clean}." if clean else "", family or clean.replace(".", "_"), labels)

    def __iter__(self) -> Iterator[Metric]:
        yield from list(self._metrics.values())
        shown: set[str] = set()
        for scope, declared, owner in self._declarations():
            is_shared = scope.is_shared
            for each in declared:
                name = scope.prefix + each.name
                if each.kind is TextReadout or name in self._metrics or name in shown:
                    continue
                if is_shared:
                    shown.add(name)
                yield scope.untouched(each, owner)
        for read, _ in self._tables:
            yield from read()

    def show(self, read: Callable[[], Iterable[Counter]], reset: Callable[[], None]) -> None:
        """Make pages also show counters that another object keeps.

        Args:
            read: creates the counters for each page.
            reset: sets the counters to 0, for :meth:`reset_counters`.
        """
        self._tables.append((read, reset))

    @property
    def texts(self) -> list[TextReadout]:
        """All text readouts, sorted by name."""
        texts = dict(self._texts)
        for scope, declared, owner in reversed(self._declarations()):
            for each in declared:
                if each.kind is TextReadout and each.read is not None:
                    name = scope.prefix + each.name
                    texts[name] = TextReadout(name, partial(each.read, owner))
        return [texts[name] for name in sorted(texts)]

    def add(self, metric: Metric) -> Metric:
        """Register a metric and return it, or return the existing metric of the same name and kind."""
        found = self._metrics.get(metric.name)
        if type(found) is type(metric):
            return found
        self._metrics[metric.name] = metric
        return metric

    def add_text(self, text: TextReadout) -> None:
        """Register a text readout."""
        self._texts[text.name] = text

    def _declarations(self) -> list["_Declaration"]:
        """Return all declarations, the latest first."""
        return [each for declared in reversed(self._declared.values()) for each in reversed(declared)]

    def declare(self, by: "Scope | _Prefix", new: "_Declaration") -> None:
        """Show a scope's declared metrics until :meth:`withdraw`, in place of an earlier owner's metrics."""
        others = [each for each in self._declared.get(by, ()) if _place(each) != _place(new)]
        self._declared[by] = (*others, new)

    def withdraw(self, by: "Scope | _Prefix") -> None:
        """Hide the metrics declared by a scope, or without an owner. Idempotent."""
        self._declared.pop(by, None)

    def hold(self, prefix: str) -> "_Prefix":
        """Return the registered names of a prefix, with one more holder."""
        held = self._prefixes.get(prefix)
        if held is None:
            held = self._prefixes[prefix] = _Prefix()
        held.holders += 1
        return held

    def release(self, prefix: str, held: "_Prefix") -> None:
        """Undo :meth:`hold`. The last holder's release removes the metrics and texts of the prefix."""
        held.holders -= 1
        if held.holders:
            return
        del self._prefixes[prefix]
        self.withdraw(held)
        for name in held.names or ():
            self._metrics.pop(name, None)
            self._texts.pop(name, None)
        held.names = None

    def reset_counters(self) -> None:
        """Set all counters to 0, for ``POST /reset_counters``."""
        for metric in self._metrics.values():
            if isinstance(metric, Counter):
                metric.value = 0
        for _, reset in self._tables:
            reset()


class _Prefix:
    """The names of metrics and texts that the open scopes with one prefix share, and the names of scopes below."""

    __slots__ = ("holders", "names")

    def __init__(self) -> None:
        self.holders = 0
        self.names: set[str] | None = None

    def add(self, name: str) -> None:
        """Register a metric or text."""
        if self.names is None:
            self.names = {name}
        else:
            self.names.add(name)


class Scope:
    """Metrics with a common prefix and labels.

    Scopes with the same prefix share their metrics, like in Envoy. Examples are two versions of a cluster during
    its update, and clusters with the same ``alt_stat_name``. The metrics are removed once all these scopes are
    closed. A scope that never created or declared a metric need not be closed.
    """

    __slots__ = ("_ended", "_family", "_held", "_labels", "_parent", "_stats", "prefix")

    def __init__(
        self,
        stats: Stats,
        prefix: str,
        family: str,
        labels: Labels,
        parent: "Scope | None" = None,
    ) -> None:
        self._stats = stats
        self.prefix = prefix
        self._family = family
        self._labels = labels
        self._parent = parent._top if parent is not None else None  # not itself: it would be freed late
        self._held: _Prefix | None = None
        self._ended = False

    def counter(self, name: str) -> Counter:
        """Return the counter ``<prefix>.<name>``."""
        metric = self._add(Counter(self.prefix + name, self._family_of(name), self._labels))
        assert isinstance(metric, Counter)
        return metric

    def gauge(self, name: str, read: Callable[[], float] | None = None) -> Gauge:
        """Return the gauge ``<prefix>.<name>``. ``read`` replaces the gauge's earlier function."""
        metric = self._add(Gauge(self.prefix + name, self._family_of(name), self._labels))
        assert isinstance(metric, Gauge)
        if read is not None:
            metric.read = read
        return metric

    def histogram(self, name: str) -> Histogram:
        """Return the histogram ``<prefix>.<name>``."""
        metric = self._add(Histogram(self.prefix + name, self._family_of(name), self._labels))
        assert isinstance(metric, Histogram)
        return metric

    def text(self, name: str, read: Callable[[], str]) -> None:
        """Register the text readout ``<prefix>.<name>``."""
        held = self._prefix()
        if held is None:
            return
        held.add(self.prefix + name)
        self._stats.add_text(TextReadout(self.prefix + name, read))

    def scope(self, name: str) -> "Scope":
        """Return a scope whose prefix extends the prefix of this scope, with the same labels. Closing this scope
        also closes the new scope.
        """
        clean = sanitised(name)
        return Scope(self._stats, f"{self.prefix}{clean}.", self._family_of(clean), self._labels, self)

    def declare(self, declared: tuple[Declared, ...], owner: object) -> None:
        """Declare metrics that are created on first use. If several scopes of this prefix declare the same names,
        pages show the values of the latest declaration.
        """
        top, held = self._top, self._prefix()
        if held is not None and not top._ended:
            self._stats.declare(top if owner is not None else held, (self, declared, owner))

    @property
    def _top(self) -> "Scope":
        return self._parent or self

    @property
    def is_shared(self) -> bool:
        """Whether another open scope has the same prefix."""
        held = self._top._held
        return held is not None and held.holders > 1

    def untouched(self, declared: Declared, owner: object) -> Metric:
        """Return a declared but not yet created metric, for a page. The metric is not stored."""
        name, family = self.prefix + declared.name, self._family_of(declared.name)
        read = None if declared.read is None else partial(declared.read, owner)
        if declared.kind is Counter:
            return Counter(name, family, self._labels, 0 if read is None else int(read()))
        return Gauge(name, family, self._labels, read=read)

    def close(self) -> None:
        """Withdraw this scope's declarations. Its metrics are removed with the last scope of the prefix.

        Connections can outlive their cluster or listener. Their later counts appear on pages only if another scope
        of the prefix is open. Idempotent.
        """
        if self._ended:
            return
        self._ended = True
        self._stats.withdraw(self)
        if self._held is not None:
            self._stats.release(self.prefix, self._held)

    def _prefix(self) -> _Prefix | None:
        """Return the prefix's registered names, and hold them from now on. None if all scopes are closed."""
        top = self._top
        held = top._held
        if held is not None:
            return held if held.holders else None
        if top._ended:
            return None
        held = top._held = self._stats.hold(top.prefix)
        return held

    def _add(self, metric: Metric) -> Metric:
        held = self._prefix()
        if held is None:
            return metric
        held.add(metric.name)
        return self._stats.add(metric)

    def _family_of(self, name: str) -> str:
        return prometheus_name(f"{self._family}_{name}" if self._family else name)


#: The scope, its declared metrics, and the owner whose values they show.
_Declaration = tuple[Scope, tuple[Declared, ...], object]


def _place(declaration: _Declaration) -> tuple[str, tuple[Declared, ...]]:
    scope, declared, _ = declaration
    return scope.prefix, declared


class Scopes:
    """Creates scopes, and closes them together."""

    __slots__ = ("_made", "_stats")

    def __init__(self, stats: Stats) -> None:
        self._stats = stats
        self._made: list[Scope] = []

    def scope(self, prefix: str, *, family: str = "", labels: Labels = ()) -> Scope:
        """Return a new scope; see :meth:`Stats.scope`."""
        made = self._stats.scope(prefix, family=family, labels=labels)
        self._made.append(made)
        return made

    def close(self) -> None:
        """Close all scopes. Idempotent."""
        for made in self._made:
            made.close()


def labelled(prefix: str, name: str, value: int, family: str, labels: Labels) -> Counter:
    """Return a counter ``<prefix>.<name>`` for a page. Its names follow the rules of :class:`Scope`."""
    return Counter(f"{sanitised(prefix)}.{name}", prometheus_name(f"{family}_{name}"), labels, value)


def sanitised(name: str) -> str:
    """Return a name in the form for dotted names: ``://`` and ``:`` become ``_``, like in Envoy."""
    return name.replace("://", "_").replace(":", "_")


@lru_cache(maxsize=4096)
def prometheus_name(name: str) -> str:
    """Return a dotted name as a Prometheus metric name, without Envoy's prefix."""
    return re.sub(r"[^a-zA-Z0-9_:]", "_", name)


#: Key exchange groups whose OpenSSL name differs from BoringSSL's name. Envoy prints BoringSSL's name.
_GROUPS = {"x25519": "X25519", "secp256r1": "P-256", "secp384r1": "P-384", "secp521r1": "P-521"}


def count_parameters(scope: Scope, version: str, cipher: str, group: str | None) -> None:
    """Count the negotiated parameters of a handshake: ``<scope>.versions.TLSv1.3`` and the like."""
    curve = _GROUPS.get(group, group) if group is not None else ""
    for kind, name in (("versions", version), ("ciphers", cipher), ("curves", curve)):
        if name:
            scope.counter(f"{kind}.{name}").value += 1


def cluster_scope(stats: Stats, name: str) -> Scope:
    """Return the scope ``cluster.<name>.``."""
    return stats.scope(f"cluster.{name}", family="cluster", labels=(("envoy_cluster_name", name),))


def listener_scope(stats: Stats, address: str) -> Scope:
    """Return the scope ``listener.<ip>_<port>.`` (internal listeners: ``listener.envoy_internal_<name>.``)."""
    return stats.scope(f"listener.{address}", family="listener", labels=(("envoy_listener_address", address),))


def tcp_scope(stats: Stats, prefix: str) -> Scope:
    """Return the scope ``tcp.<stat prefix>.``."""
    return stats.scope(f"tcp.{prefix}", family="tcp", labels=(("envoy_tcp_prefix", prefix),))


def http_scope(stats: Stats, prefix: str) -> Scope:
    """Return the scope ``http.<stat prefix>.``."""
    return stats.scope(f"http.{prefix}", family="http", labels=(("envoy_http_conn_manager_prefix", prefix),))
