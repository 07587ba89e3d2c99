"""Sends data with OpenTelemetry's library, which only this module imports. Its functions block, so they must not
be called in the event loop's thread.

The library takes 9 MiB and 0.1 s to import, so the sending thread imports it first.
"""

import logging
import math
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import groupby
from typing import Any, Final

from opentelemetry._logs import LogRecord, SeverityNumber
from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.http import Compression
from opentelemetry.exporter.otlp.proto.http._log_exporter import OTLPLogExporter
from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk._logs import ReadableLogRecord
from opentelemetry.sdk._logs.export import LogRecordExportResult
from opentelemetry.sdk.metrics.export import (
    AggregationTemporality,
    Gauge,
    Histogram,
    HistogramDataPoint,
    Metric,
    MetricExportResult,
    MetricsData,
    NumberDataPoint,
    ResourceMetrics,
    ScopeMetrics,
    Sum,
)
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExportResult
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import NonRecordingSpan, SpanContext, SpanKind, Status, StatusCode, TraceFlags
from opentelemetry.trace import set_span_in_context as context_of

from ztunnel import __version__
from ztunnel.proxy.otlp.line import Line
from ztunnel.proxy.otlp.outbox import ExportFailed
from ztunnel.proxy.otlp.samples import Slice
from ztunnel.proxy.otlp.settings import Destination
from ztunnel.proxy.otlp.spans import Kind, Span
from ztunnel.proxy.otlp.trace import Trace
from ztunnel.runtime.http.prometheus import Sample

_SCOPE: Final = InstrumentationScope("ztunnel", __version__)
_CUMULATIVE: Final = AggregationTemporality.CUMULATIVE
#: Units in OpenMetrics, and the same units in UCUM, which OpenTelemetry uses.
_UNITS: Final = {"seconds": "s", "bytes": "By"}
_SEVERITIES: Final = {
    "trace": SeverityNumber.TRACE,
    "debug": SeverityNumber.DEBUG,
    "info": SeverityNumber.INFO,
    "warn": SeverityNumber.WARN,
    "error": SeverityNumber.ERROR,
}
_KINDS: Final = {Kind.CLIENT: SpanKind.CLIENT, Kind.SERVER: SpanKind.SERVER}


class _Reasons(logging.Handler):
    """Keeps the library's last log messages in each thread. The library writes the reason of a failure only to its
    log, and the same reason at most once a minute.
    """

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self._of_thread = threading.local()

    def emit(self, record: logging.LogRecord) -> None:
        words = record.getMessage()
        known: list[str] = getattr(self._of_thread, "words", [])
        self._of_thread.words = [*(each for each in known if each != words), words][-2:]

    def last(self) -> str:
        """Return the last message that the library has logged in this thread."""
        return "; ".join(getattr(self._of_thread, "words", [])) or "no reason given"


_REASONS: Final = _Reasons()
_LIBRARY: Final = logging.getLogger("opentelemetry")
_LIBRARY.propagate = False
_LIBRARY.handlers = [_REASONS]


def _arguments(destination: Destination) -> dict[str, Any]:
    return {
        "endpoint": destination.url,
        "headers": dict(destination.headers),
        "timeout": destination.timeout_s,
        "certificate_file": destination.certificate or None,
        "client_certificate_file": destination.client_certificate or None,
        "client_key_file": destination.client_key or None,
        "compression": Compression(destination.compression),
    }


class LogClient:
    """Sends access lines.

    Args:
        destination: the collector.
        attributes: the resource's attributes.
    """

    def __init__(self, destination: Destination, attributes: Mapping[str, str]) -> None:
        self._exporter = OTLPLogExporter(**_arguments(destination))
        self._resource = Resource(attributes)

    def send(self, lines: Sequence[Line]) -> None:
        """Send one batch, with retries until the destination's timeout.

        Raises:
            ExportFailed: the collector did not accept it.
        """
        records = [_record(line, self._resource) for line in lines]
        if self._exporter.export(records) is not LogRecordExportResult.SUCCESS:
            raise ExportFailed(_REASONS.last())

    def close(self) -> None:
        """Close the client, and abort a running attempt."""
        self._exporter.shutdown()  # type: ignore[no-untyped-call]


class SpanClient:
    """Sends spans; see :class:`LogClient`."""

    def __init__(self, destination: Destination, attributes: Mapping[str, str]) -> None:
        self._exporter = OTLPSpanExporter(**_arguments(destination))
        self._resource = Resource(attributes)

    def send(self, spans: Sequence[Span]) -> None:
        """Send one batch; see :meth:`LogClient.send`."""
        if self._exporter.export([_span(each, self._resource) for each in spans]) is not SpanExportResult.SUCCESS:
            raise ExportFailed(_REASONS.last())

    def close(self) -> None:
        """Close the client, and abort a running attempt."""
        self._exporter.shutdown()  # type: ignore[no-untyped-call]


class MetricClient:
    """Sends metrics; see :class:`LogClient`.

    Args:
        start_ns: when all counters were 0, in nanoseconds since the epoch.
    """

    def __init__(self, destination: Destination, attributes: Mapping[str, str], start_ns: int) -> None:
        self._exporter = OTLPMetricExporter(**_arguments(destination))
        self._resource = Resource(attributes)
        self._start_ns = start_ns

    def send(self, now_ns: int, slices: Iterable[Slice]) -> None:
        """Send the values as of ``now_ns`` in one request; see :meth:`LogClient.send`."""
        found = [
            _metric(list(group), self._start_ns, now_ns) for _, group in groupby(slices, key=lambda each: each[:4])
        ]
        data = MetricsData([ResourceMetrics(self._resource, [ScopeMetrics(_SCOPE, found, "")], "")])
        if self._exporter.export(data) is not MetricExportResult.SUCCESS:
            raise ExportFailed(_REASONS.last())

    def close(self) -> None:
        """Close the client, and abort a running attempt."""
        self._exporter.shutdown()


def _record(line: Line, resource: Resource) -> ReadableLogRecord:
    nanoseconds = round(line.time_s * 1e9)
    return ReadableLogRecord(
        LogRecord(
            timestamp=nanoseconds,
            observed_timestamp=nanoseconds,
            context=_context(line),
            severity_text=line.level,
            severity_number=_SEVERITIES[line.level],
            body=line.message,
            attributes=_attributes(line),
            event_name="access",
        ),
        resource,
        _SCOPE,
    )


def _context(line: Line) -> Context:
    """Return the span that a line belongs to: the connection's own span, or else the span named by
    ``traceparent``.
    """
    if line.trace is None:
        return Context()
    found = _span_context(line.trace, line.span_id or line.trace.span_id, remote=not line.span_id)
    return context_of(NonRecordingSpan(found), Context())


def _span(span: Span, resource: Resource) -> ReadableSpan:
    line, trace = span.line, span.trace
    error = line.fields().get("error")
    end_ns = round(line.time_s * 1e9)
    return ReadableSpan(
        name="CONNECT",
        context=_span_context(trace, line.span_id, remote=False),
        parent=_span_context(trace, trace.span_id, remote=True) if span.kind is Kind.SERVER else None,
        resource=resource,
        attributes=_attributes(line),
        kind=_KINDS[span.kind],
        status=Status() if error is None else Status(StatusCode.ERROR, str(error)),
        start_time=end_ns - round(span.duration_s * 1e9),
        end_time=end_ns,
        instrumentation_scope=_SCOPE,
    )


def _span_context(trace: Trace, span_id: int, *, remote: bool) -> SpanContext:
    return SpanContext(trace.trace_id, span_id, is_remote=remote, trace_flags=TraceFlags(trace.flags))


def _attributes(line: Line) -> Mapping[str, str | int]:
    return {name: str(value) if isinstance(value, str) else value for name, value in line.fields().items()}


def _metric(slices: Sequence[Slice], start_ns: int, now_ns: int) -> Metric:
    """Return neighbouring slices of one family as one metric with the same name, labels and values."""
    first = slices[0]
    samples = [sample for each in slices for sample in each.samples]
    data: Gauge | Sum | Histogram
    if first.kind == "histogram":
        data = Histogram(list(_histograms(samples, start_ns, now_ns)), _CUMULATIVE)
    elif first.kind == "counter":
        points = [NumberDataPoint(each.labels, start_ns, now_ns, _number(each.value)) for each in samples]
        data = Sum(points, _CUMULATIVE, is_monotonic=True)
    else:
        data = Gauge([NumberDataPoint(each.labels, 0, now_ns, _number(each.value)) for each in samples])
    return Metric(first.name, first.text, _UNITS.get(first.unit, first.unit), data)


def _number(value: float) -> float:
    """Return a value in a form that a data point can have: a float, or a signed int of 64 bits. If a value is a
    bool or any other int, the library refuses the whole request.
    """
    return value if type(value) is int and -(2**63) <= value < 2**63 else float(value)


def _histograms(samples: Iterable[Sample], start_ns: int, now_ns: int) -> Iterator[HistogramDataPoint]:
    """Make one data point per histogram. Its samples are the buckets in ascending order up to +Inf, the sum, and
    the count.

    Buckets are cumulative on the page, but not in OpenTelemetry.
    """
    bounds: list[float] = []
    counts: list[int] = []
    labels: dict[str, str] = {}
    seen, total = 0, 0.0
    for sample in samples:
        if sample.name.endswith("_bucket"):
            bound = float(sample.labels["le"])
            if math.isfinite(bound):
                bounds.append(bound)
            counts.append(int(sample.value) - seen)
            seen = int(sample.value)
        elif sample.name.endswith("_sum"):
            total = sample.value
        else:
            labels = dict(sample.labels)
            none: Any = None  # least and largest value: optional in OTLP, and the page has neither
            yield HistogramDataPoint(
                attributes=labels,
                start_time_unix_nano=start_ns,
                time_unix_nano=now_ns,
                count=int(sample.value),
                sum=total,
                bucket_counts=counts,
                explicit_bounds=bounds,
                min=none,
                max=none,
            )
            bounds, counts, seen, total = [], [], 0, 0.0
