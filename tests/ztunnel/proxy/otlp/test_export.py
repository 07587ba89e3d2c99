"""A collector receives the contents of the metrics page and the log. A failing collector affects no connection."""

import asyncio
import logging
import random
import re
import socket
from collections.abc import Iterable
from typing import Any

import pytest
from opentelemetry.proto.metrics.v1.metrics_pb2 import AggregationTemporality
from opentelemetry.proto.trace.v1.trace_pb2 import Span, Status
from prometheus_client.openmetrics.parser import text_string_to_metric_families

from tests.ztunnel.proxy.istio.nodes import WALL_S, StoppedClock
from tests.ztunnel.proxy.otlp.collector import Collector, attributes, collecting
from ztunnel.proxy.dataplane.gauges import Gauge
from ztunnel.proxy.envoy.stats.prometheus import scraped
from ztunnel.proxy.envoy.stats.stats import Stats
from ztunnel.proxy.flows.times import ConnectionTimes
from ztunnel.proxy.istio.accounting.families import families
from ztunnel.proxy.istio.accounting.line_rendering import Recurring
from ztunnel.proxy.istio.accounting.logs import Bare
from ztunnel.proxy.istio.accounting.metrics import Metrics
from ztunnel.proxy.otlp.exporter import AccessExport, LogExport, MetricExport
from ztunnel.proxy.otlp.line import Line
from ztunnel.proxy.otlp.settings import OtlpSettings, otlp_settings
from ztunnel.proxy.otlp.trace import parse_traceparent
from ztunnel.runtime.http.exposition import Family, family, page
from ztunnel.runtime.http.page import PageRequest

START_NS = round(WALL_S * 1e9)


def settings(collector: Collector, **env: str) -> OtlpSettings:
    found = otlp_settings(
        {
            "OTEL_EXPORTER_OTLP_ENDPOINT": f"http://127.0.0.1:{collector.port}",
            "OTEL_EXPORTER_OTLP_TIMEOUT": "500",
            "OTEL_BLRP_SCHEDULE_DELAY": "1",
            **env,
        }
    )
    assert found is not None
    return found


def istio() -> Metrics:
    metrics = Metrics("1.30.1", 20_000)
    metrics.connect_retries = 7
    metrics.xds_messages["type.googleapis.com/istio.workload.Address"] = 3
    metrics.gauges["some_gauge"] = Gauge("gauge", "A gauge", lambda: 2.5)
    metrics.dns_requests["A", "udp", 'quoted "app"', "v1"] = 9
    return metrics


def envoy() -> Stats:
    stats = Stats()
    scope = stats.scope("cluster.c", family="cluster", labels=(("envoy.cluster_name", "c"),))
    scope.counter("upstream_cx_total").value = 12
    scope.counter("membership_change").value = 3
    scope.gauge("membership_healthy").value = 2
    histogram = scope.histogram("upstream_cx_length_ms")
    rng = random.Random(1)
    for _ in range(200):
        histogram.record(rng.randrange(100_000))
    return stats


def many() -> Metrics:
    """More samples than one request and one slice have."""
    metrics = Metrics("1.30.1", 20_000)
    for number in range(2500):
        metrics.dns_requests["A", "udp", f"app-{number}", "v1"] = number
    return metrics


SOURCES = {
    "istio": (istio, families),
    "envoy": (envoy, lambda stats: scraped(stats, ConnectionTimes())),
    "many": (many, families),
}


@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize("compression", ["none", "gzip"])
def test_points_are_the_samples_of_the_page(source: str, compression: str) -> None:
    make, read = SOURCES[source]
    counted = make()
    clock = StoppedClock()

    async def pages() -> Iterable[Family]:
        return read(counted)  # type: ignore[arg-type]

    async def main(collector: Collector) -> None:
        found = settings(collector, OTEL_EXPORTER_OTLP_COMPRESSION=compression, OTEL_SERVICE_NAME="named")
        export = MetricExport(found, {"service.name": "ztunnel", "k8s.node.name": "n1"}, pages, clock)
        clock.passed_s = 60.0
        await export.close()
        assert export.dropped == 0

    with collecting() as collector:
        asyncio.run(main(collector))
    assert set(collector.paths) == {"/v1/metrics"}
    resource = attributes(collector.metrics[0].resource_metrics[0].resource)
    assert resource == {"service.name": "named", "k8s.node.name": "n1"}
    sent = samples_of(collector)
    shown = samples_of_page(read(counted))  # type: ignore[arg-type]
    changing = {name for name, _ in shown if name.startswith("process_")}
    assert {each: value for each, value in sent.items() if each[0] not in changing} == {
        each: value for each, value in shown.items() if each[0] not in changing
    }
    assert {name for name, _ in sent} >= changing
    assert len(collector.metrics) == (2 if source == "many" else 1)


def samples_of_page(made: Iterable[Family]) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    body = page(
        made, PageRequest(method="GET", path="/metrics", accept="application/openmetrics-text; version=1.0.0")
    ).body
    text = b"".join(body if not isinstance(body, bytes) else [body]).decode()
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def samples_of(collector: Collector) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    """Return the samples that a Prometheus page would have for the points."""
    found: dict[tuple[str, tuple[tuple[str, str], ...]], float] = {}

    def add(name: str, labels: dict[str, Any], value: float) -> None:
        key = name, tuple(sorted(labels.items()))
        assert key not in found
        found[key] = value

    now_ns = START_NS + 60 * 10**9
    for metric in collector.families():
        kind = metric.WhichOneof("data")
        assert kind is not None
        data = getattr(metric, kind)
        if kind != "gauge":
            assert data.aggregation_temporality == AggregationTemporality.AGGREGATION_TEMPORALITY_CUMULATIVE
        for point in data.data_points:
            assert abs(point.time_unix_nano - now_ns) < 1000
            labels = attributes(point)
            if kind == "histogram":
                assert abs(point.start_time_unix_nano - START_NS) < 1000
                below = 0
                for bound, count in zip([*point.explicit_bounds, None], point.bucket_counts, strict=True):
                    below += count
                    add(f"{metric.name}_bucket", labels | {"le": "+Inf" if bound is None else str(bound)}, below)
                add(f"{metric.name}_count", labels, point.count)
                add(f"{metric.name}_sum", labels, point.sum)
            else:
                if kind == "sum":
                    assert data.is_monotonic
                    assert abs(point.start_time_unix_nano - START_NS) < 1000
                add(metric.name, labels, getattr(point, point.WhichOneof("value")))
    return found


@pytest.mark.parametrize(
    ("value", "sent"), [(2**63, 2.0**63), (-(2**63) - 1, -(2.0**63)), (True, 1), (2**63 - 1, 2**63 - 1)]
)
def test_numbers_that_a_point_cannot_have_are_converted(value: float, sent: float) -> None:
    async def pages() -> Iterable[Family]:
        samples = [((name,), number) for name, number in (("a", value), ("b", 2))]
        return [family("sizes", kind, "Sizes", samples, ("name",)) for kind in ("counter", "gauge")]

    async def main(collector: Collector) -> None:
        export = MetricExport(settings(collector), {}, pages, StoppedClock())
        await export.close()
        assert export.dropped == 0

    with collecting() as collector:
        asyncio.run(main(collector))
    found = {
        (metric.name, attributes(point)["name"]): getattr(point, point.WhichOneof("value"))
        for metric in collector.families()
        for point in getattr(metric, str(metric.WhichOneof("data"))).data_points
    }
    assert found == {
        (name, label): number for name in ("sizes_total", "sizes") for label, number in (("a", sent), ("b", 2))
    }


def test_units_are_ucums_and_kinds_the_pages() -> None:
    async def pages() -> Iterable[Family]:
        return families(istio())

    async def main(collector: Collector) -> None:
        await MetricExport(settings(collector), {}, pages, StoppedClock()).close()

    with collecting() as collector:
        asyncio.run(main(collector))
    found = {each.name: (each.WhichOneof("data"), each.unit) for each in collector.families()}
    assert found["ztunnel_loop_late_seconds_total"] == ("sum", "s")
    assert found["ztunnel_connect_retries_total"] == ("sum", "")
    assert found["some_gauge"] == ("gauge", "")


TRACE = b"00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


def write(export: LogExport, count: int, trace: bytes = b"") -> None:
    for number in range(count):
        fields = [("src.addr", Bare("10.0.0.1:5")), Recurring([("dst.workload", "cart")]), ("bytes_sent", number)]
        export.write(Line(WALL_S, "info", "connection complete", fields, parse_traceparent(trace)))


def test_access_line_becomes_a_log_record_with_fields_time_and_trace() -> None:
    async def main(collector: Collector) -> None:
        export = LogExport(settings(collector), {"service.name": "ztunnel"})
        write(export, 1, TRACE)
        fields = [("error", "denied")]
        export.write(Line(WALL_S, "error", "connection complete", fields, parse_traceparent(b"00-nonsense")))
        await export.close()

    with collecting() as collector:
        asyncio.run(main(collector))
    first, second = collector.records()
    assert first.body.string_value == "connection complete"
    assert (first.severity_text, first.severity_number) == ("info", 9)
    assert abs(first.time_unix_nano - START_NS) < 1000
    assert attributes(first) == {"src.addr": "10.0.0.1:5", "dst.workload": "cart", "bytes_sent": 0}
    assert first.trace_id.hex() == "0af7651916cd43dd8448eb211c80319c"
    assert first.span_id.hex() == "b7ad6b7169203331"
    assert first.flags == 1
    assert (second.severity_text, second.severity_number) == ("error", 17)
    assert attributes(second) == {"error": "denied"}
    assert (second.trace_id, second.span_id) == (b"", b"")
    assert attributes(collector.logs[0].resource_logs[0].resource) == {"service.name": "ztunnel"}


@pytest.mark.parametrize("status", [400, 503])
def test_refusing_collector_is_logged_and_used_again_after_recovery(
    status: int, caplog: pytest.LogCaptureFixture
) -> None:
    async def main(collector: Collector) -> None:
        collector.status = status
        export = LogExport(settings(collector), {})
        write(export, 3)
        await until(lambda: export.dropped == 3)
        collector.status = 200
        write(export, 2)
        await export.close()
        assert export.dropped == 3

    with collecting() as collector:
        asyncio.run(main(collector))
    assert len(collector.records()) == 2
    (told,) = [each for each in caplog.messages if "are dropped" in each]
    assert re.search(
        "access lines for .*/v1/logs are dropped, the collector does not accept them: .*(Bad Req|due to timeout)",
        told,
    )


def test_export_resumes_when_the_collector_is_reachable_again(caplog: pytest.LogCaptureFixture) -> None:
    with collecting() as collector:
        found = settings(collector)

    async def main() -> None:
        export = LogExport(found, {})
        write(export, 1)
        await until(lambda: export.dropped == 1)
        with collecting(socket.create_server(("127.0.0.1", collector.port))) as back:
            write(export, 1)
            await asyncio.to_thread(back.wait, lambda: len(back.records()) == 1)
            await export.close()

    with caplog.at_level(logging.INFO):
        asyncio.run(main())
    assert "/v1/logs are accepted again dropped=1" in caplog.text


def test_slow_collector_drops_lines_without_blocking() -> None:
    async def main(collector: Collector) -> None:
        collector.hold.clear()
        queue = {"OTEL_BLRP_MAX_QUEUE_SIZE": "100", "OTEL_BLRP_MAX_EXPORT_BATCH_SIZE": "10"}
        export = LogExport(settings(collector, OTEL_EXPORTER_OTLP_TIMEOUT="60000", **queue), {})
        write(export, 10)
        await asyncio.to_thread(collector.wait, lambda: collector.paths)
        write(export, 1000)
        assert export.dropped == 900
        collector.hold.set()
        await export.close()

    with collecting() as collector:
        asyncio.run(main(collector))
    assert [attributes(each)["bytes_sent"] for each in collector.records()] == [*range(10), *range(900, 1000)]


def test_headers_of_the_settings_are_sent() -> None:
    async def main(collector: Collector) -> None:
        export = LogExport(settings(collector, OTEL_EXPORTER_OTLP_HEADERS="api-key=s%3D1"), {})
        write(export, 1)
        await export.close()

    with collecting() as collector:
        asyncio.run(main(collector))
    assert collector.headers[0]["api-key"] == "s=1"
    assert collector.headers[0]["content-type"] == "application/x-protobuf"


SAMPLED = b"00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
NOT_SAMPLED = SAMPLED[:-1] + b"0"
INBOUND = Recurring([("dst.workload", "cart"), ("direction", "inbound")])
ONLY_SPANS = {"OTEL_LOGS_EXPORTER": "none", "OTEL_BSP_SCHEDULE_DELAY": "1"}


def accesses(found: OtlpSettings) -> AccessExport:
    return AccessExport(found, {"service.name": "ztunnel"}, random.Random(1))


def complete(export: AccessExport, traceparent: bytes, *fields: Any, message: str = "connection complete") -> None:
    export.write(WALL_S, "info", message, [("src.addr", Bare("10.0.0.1:5")), *fields], traceparent)


def test_sampled_inbound_tunnel_is_a_child_span_of_the_sender() -> None:
    async def main(collector: Collector) -> None:
        export = accesses(settings(collector))
        complete(export, SAMPLED, INBOUND, ("duration", "1500ms"))
        await export.close()

    with collecting() as collector:
        asyncio.run(main(collector))
    (span,) = collector.spans()
    assert span.name == "CONNECT"
    assert span.kind == Span.SPAN_KIND_SERVER
    assert span.trace_id.hex() == "0af7651916cd43dd8448eb211c80319c"
    assert span.parent_span_id.hex() == "b7ad6b7169203331"
    assert len(span.span_id) == 8
    assert span.span_id not in (bytes(8), span.parent_span_id)
    assert span.flags == 0x300  # the parent is known to be remote; the library leaves the sampled flag out
    assert abs(span.end_time_unix_nano - START_NS) < 1000
    assert span.end_time_unix_nano - span.start_time_unix_nano == 1_500_000_000
    assert attributes(span) == {
        "src.addr": "10.0.0.1:5",
        "dst.workload": "cart",
        "direction": "inbound",
        "duration": "1500ms",
    }
    assert span.status.code == Status.STATUS_CODE_UNSET
    assert attributes(collector.traces[0].resource_spans[0].resource) == {"service.name": "ztunnel"}
    (record,) = collector.records()
    assert (record.trace_id, record.span_id) == (span.trace_id, span.span_id)


def test_sender_of_the_traceparent_exports_the_named_client_span() -> None:
    async def main(collector: Collector) -> None:
        export = accesses(settings(collector, **ONLY_SPANS))
        complete(export, SAMPLED, ("direction", "outbound"), ("duration", "0ms"))
        await export.close()

    with collecting() as collector:
        asyncio.run(main(collector))
    (span,) = collector.spans()
    assert span.kind == Span.SPAN_KIND_CLIENT
    assert span.span_id.hex() == "b7ad6b7169203331"
    assert span.parent_span_id == b""
    assert collector.paths == ["/v1/traces"]


def test_a_failure_is_the_spans_status() -> None:
    async def main(collector: Collector) -> None:
        export = accesses(settings(collector, **ONLY_SPANS))
        complete(export, SAMPLED, INBOUND, ("error", "ip mismatch: a != b"), message="connection failed")
        await export.close()

    with collecting() as collector:
        asyncio.run(main(collector))
    (span,) = collector.spans()
    assert (span.status.code, span.status.message) == (Status.STATUS_CODE_ERROR, "ip mismatch: a != b")
    assert span.start_time_unix_nano == span.end_time_unix_nano


@pytest.mark.parametrize("trace", [b"", NOT_SAMPLED, b"00-nonsense", SAMPLED + b"-more"])
def test_no_sampled_trace_no_span(trace: bytes) -> None:
    async def main(collector: Collector) -> None:
        export = accesses(settings(collector))
        complete(export, trace, INBOUND, ("duration", "1ms"))
        await export.close()

    with collecting() as collector:
        asyncio.run(main(collector))
    assert len(collector.records()) == 1
    assert not collector.traces


def test_a_connection_that_opens_has_no_span_yet() -> None:
    async def main(collector: Collector) -> None:
        export = accesses(settings(collector))
        complete(export, SAMPLED, INBOUND, message="connection opened")
        await export.close()

    with collecting() as collector:
        asyncio.run(main(collector))
    (record,) = collector.records()
    assert record.span_id.hex() == "b7ad6b7169203331"
    assert not collector.traces


def test_spans_that_no_collector_takes_are_counted() -> None:
    async def main(collector: Collector) -> None:
        collector.status = 400
        export = accesses(settings(collector, **ONLY_SPANS))
        for _ in range(3):
            complete(export, SAMPLED, INBOUND)
        await until(lambda: export.dropped == {"traces": 3})
        await export.close()

    with collecting() as collector:
        asyncio.run(main(collector))


async def until(condition: Any) -> None:
    async with asyncio.timeout(60):
        while not condition():
            await asyncio.sleep(0.01)
