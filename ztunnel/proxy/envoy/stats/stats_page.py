"""Makes Envoy's ``/stats``, as text, JSON and HTML. Pure: metrics in, pieces of text out."""

import json
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from enum import StrEnum
from html import escape

from xds.model.re2 import Pattern
from ztunnel.proxy.envoy.stats.stats import BUCKETS, Counter, Gauge, Histogram, Stats, TextReadout

QUANTILES = (0, 25, 50, 75, 90, 95, 99, 99.5, 99.9, 100)
_SLICE = 200  # lines per piece


class Kind(StrEnum):
    """The values of ``type=``."""

    ALL = "All"
    COUNTERS = "Counters"
    GAUGES = "Gauges"
    HISTOGRAMS = "Histograms"
    TEXT_READOUTS = "TextReadouts"


class Buckets(StrEnum):
    """The values of the parameter ``histogram_buckets``. ``UNSET`` prints a summary."""

    UNSET = ""
    CUMULATIVE = "cumulative"
    DISJOINT = "disjoint"
    DETAILED = "detailed"
    SUMMARY = "summary"


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """The parameters of ``/stats``, which select metrics and the format."""

    kind: Kind = Kind.ALL
    pattern: Pattern | None = None
    invert: bool = False
    used_only: bool = False
    buckets: Buckets = Buckets.UNSET
    hidden_only: bool = False

    def takes(self, name: str) -> bool:
        """Return whether the page shows a metric with this name. In this proxy, no metric is hidden."""
        if self.hidden_only:
            return False
        return self.pattern is None or self.pattern.search(name) != self.invert


@dataclass(frozen=True, slots=True)
class Chosen:
    """The selected metrics, sorted by name."""

    texts: list[TextReadout]
    numbers: list[Counter | Gauge]
    histograms: list[Histogram]


def chosen(stats: Stats, choice: Choice) -> Chosen:
    """Return the metrics that the request's parameters select."""
    texts = [readout for readout in stats.texts if choice.takes(readout.name)]
    numbers: list[Counter | Gauge] = []
    histograms: list[Histogram] = []
    for metric in stats:
        if choice.takes(metric.name) and (not choice.used_only or metric.used):
            if isinstance(metric, Histogram):
                histograms.append(metric)
            else:
                numbers.append(metric)
    match choice.kind:
        case Kind.COUNTERS:
            texts, histograms = [], []
            numbers = [metric for metric in numbers if isinstance(metric, Counter)]
        case Kind.GAUGES:
            texts, histograms = [], []
            numbers = [metric for metric in numbers if isinstance(metric, Gauge)]
        case Kind.HISTOGRAMS:
            texts, numbers = [], []
        case Kind.TEXT_READOUTS:
            numbers, histograms = [], []
    numbers.sort(key=lambda metric: metric.name)
    histograms.sort(key=lambda metric: metric.name)
    return Chosen(texts, numbers, histograms)


# Text


def text_pieces(found: Chosen, buckets: Buckets = Buckets.UNSET) -> Iterator[str]:
    """Yield the lines ``name: value``: first text readouts, then counters and gauges, then histograms."""
    yield from _joined(_lines(found, buckets))


def _lines(found: Chosen, buckets: Buckets) -> Iterator[str]:
    for readout in found.texts:
        yield f"{_line_safe(readout.name)}: {json.dumps(readout.read(), ensure_ascii=False)}\n"
    for metric in found.numbers:
        yield f"{_line_safe(metric.name)}: {_whole(metric.value)}\n"
    for histogram in found.histograms:
        yield f"{_line_safe(histogram.name)}:{_histogram_text(histogram, buckets)}\n"


def _line_safe(name: str) -> str:
    return name if name.isprintable() else name.encode("unicode_escape").decode()


def _histogram_text(metric: Histogram, buckets: Buckets) -> str:
    if not metric.used:
        return " No recorded values"
    match buckets:
        case Buckets.CUMULATIVE:
            return "".join(f" B{bound:g}(0,{count})" for bound, count in _counts(metric, cumulative=True))
        case Buckets.DISJOINT:
            return "".join(f" B{bound:g}(0,{count})" for bound, count in _counts(metric, cumulative=False))
        case Buckets.DETAILED:
            totals = ", ".join(f"{low:g},{width:g}:{count}" for low, width, count in _filled(metric))
            return f"\n  totals={totals}\n  intervals=\n  summary={_summary(metric)}"
        case _:
            return f" {_summary(metric)}"


def _summary(metric: Histogram) -> str:
    # Values per flush interval are always ``nan``, because this proxy has no stats sink that is flushed.
    return " ".join(f"P{quantile:g}(nan,{metric.quantile(quantile / 100):g})" for quantile in QUANTILES)


def _counts(metric: Histogram, *, cumulative: bool) -> Iterator[tuple[float, int]]:
    seen = 0
    for bound, count in zip(BUCKETS, metric.counts, strict=False):
        seen += count
        yield bound, seen if cumulative else count


def _filled(metric: Histogram) -> Iterator[tuple[float, float, int]]:
    """Return the non-empty buckets of a histogram as (lower bound, width, count)."""
    for index, count in enumerate(metric.counts):
        if count:
            low = BUCKETS[index - 1] if index else 0.0
            high = BUCKETS[index] if index < len(BUCKETS) else max(metric.largest, low)
            yield low, high - low, count


def _joined(parts: Iterable[str]) -> Iterator[str]:
    waiting: list[str] = []
    for part in parts:
        waiting.append(part)
        if len(waiting) >= _SLICE:
            yield "".join(waiting)
            waiting.clear()
    yield "".join(waiting)


def _whole(value: float) -> str:
    """Return a metric's value as an unsigned integer, because Envoy's counters and gauges are unsigned."""
    return str(value) if isinstance(value, int) else str(int(value)) if math.isfinite(value) else "0"


# JSON


def json_pieces(found: Chosen, buckets: Buckets = Buckets.UNSET) -> Iterator[str]:
    """Yield the JSON page ``{"stats":[...]}`` in pieces. It is one line without a newline at the end."""
    yield '{"stats":['
    yield from _joined(_with_commas(_entries(found, buckets)))
    yield "]}"


def _entries(found: Chosen, buckets: Buckets) -> Iterator[str]:
    for readout in found.texts:
        yield _compact({"name": readout.name, "value": readout.read()})
    for metric in found.numbers:
        yield f'{{"name":{json.dumps(metric.name, ensure_ascii=False)},"value":{_whole(metric.value)}}}'
    if not found.histograms:
        return
    match buckets:
        case Buckets.CUMULATIVE | Buckets.DISJOINT:
            yield _compact({"histograms": [_bucket_entry(metric, buckets) for metric in found.histograms]})
        case Buckets.DETAILED:
            details = [_detail_entry(metric) for metric in found.histograms]
            yield _compact({"histograms": {"supported_percentiles": QUANTILES, "details": details}})
        case _:
            computed = [{"name": metric.name, "values": _quantiles(metric)} for metric in found.histograms]
            yield _compact({"histograms": {"supported_quantiles": QUANTILES, "computed_quantiles": computed}})


def _bucket_entry(metric: Histogram, buckets: Buckets) -> dict[str, object]:
    counts = _counts(metric, cumulative=buckets is Buckets.CUMULATIVE)
    shown = [{"upper_bound": _number(bound), "interval": 0, "cumulative": count} for bound, count in counts]
    return {"name": metric.name, "buckets": shown}


def _detail_entry(metric: Histogram) -> dict[str, object]:
    totals = [
        {"lower_bound": _number(low), "width": _number(width), "count": count}
        for low, width, count in _filled(metric)
    ]
    return {"name": metric.name, "totals": totals, "intervals": [], "percentiles": _quantiles(metric)}


def _quantiles(metric: Histogram) -> list[dict[str, float | None]]:
    values = (metric.quantile(quantile / 100) for quantile in QUANTILES)
    return [{"cumulative": None if math.isnan(value) else _number(value), "interval": None} for value in values]


def _number(value: float) -> float:
    return int(value) if value.is_integer() else value


def _compact(value: object) -> str:
    return json.dumps(value, separators=(",", ":"), ensure_ascii=False)


def _with_commas(parts: Iterable[str]) -> Iterator[str]:
    before = ""
    for part in parts:
        yield before + part
        before = ","


# HTML


def html_pieces(lines: Iterable[str]) -> Iterator[str]:
    """Yield the HTML page in pieces."""
    yield "<!DOCTYPE html>\n<html lang='en'><head><meta charset='UTF-8'><title>stats</title></head><body><pre>\n"
    for piece in lines:
        yield escape(piece)
    yield "</pre></body></html>\n"
