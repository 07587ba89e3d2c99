"""The page of port 15020: every family of :class:`~ztunnel.istio.metrics.Metrics` under upstream's names."""

import zlib
from collections.abc import Iterable, Iterator

from ztunnel.http.exposition import Family, lines, process_families
from ztunnel.http.page import Page
from ztunnel.istio.metrics import SIDE_LABELS, TRAFFIC_LABELS, Metrics

OPENMETRICS = "application/openmetrics-text;charset=utf-8;version=1.0.0"
PLAIN = "text/plain; charset=utf-8"
_FLAGS = TRAFFIC_LABELS.index("response_flags")

Sample = tuple[tuple[str, ...], float]


def page(metrics: Metrics, accept: str, accept_encoding: str) -> Page:
    """Always OpenMetrics text, whatever it is called, compressed if the scraper likes that."""
    wants = any(item.split(";")[0].strip() == "application/openmetrics-text" for item in accept.split(","))
    content_type = OPENMETRICS if wants else PLAIN
    text = lines(families(metrics))
    headers = [("vary", "accept-encoding")]
    for coding, bits in (("gzip", 31), ("deflate", 15)):
        if accepts(accept_encoding, coding):
            headers.append(("content-encoding", coding))
            return Page(content_type=content_type, headers=tuple(headers), body=_compressed(text, bits))
    return Page(content_type=content_type, headers=tuple(headers), body=text)


def families(metrics: Metrics) -> Iterator[Family]:
    """Every family that has samples."""
    yield _family(
        "istio_build",
        "gauge",
        "Istio component build info",
        [(("ztunnel", metrics.version), 1.0)],
        ("component", "tag"),
    )
    yield from filter(lambda family: bool(family.samples), _traffic_families(metrics))
    yield from filter(lambda family: bool(family.samples), _other_families(metrics))
    yield from process_families(metrics.processes())


def _traffic_families(metrics: Metrics) -> Iterator[Family]:
    opened: list[Sample] = []
    closed: list[Sample] = []
    failed: list[Sample] = []
    received: list[Sample] = []
    sent: list[Sample] = []
    for series in metrics.series:
        labels = series.labels
        opened.append((labels, series.opened))
        received.append((labels, series.received + sum(counts.sent for counts in series.running)))
        sent.append((labels, series.sent + sum(counts.received for counts in series.running)))
        for flags, count in series.closed.items():
            final = (*labels[:_FLAGS], flags, *labels[_FLAGS + 1 :])
            closed.append((final, count))
            if flags != "-":
                failed.append((final, count))
    connections = "The total number of TCP connections "
    yield _family("istio_tcp_connections_opened", "counter", connections + "opened", opened, TRAFFIC_LABELS)
    yield _family("istio_tcp_connections_closed", "counter", connections + "closed", closed, TRAFFIC_LABELS)
    yield _family(
        "istio_tcp_connections_failed",
        "counter",
        connections + "that failed (unstable)",
        failed,
        TRAFFIC_LABELS,
    )
    size = "The size of total bytes {} in case of a TCP connection"
    yield _family(
        "istio_tcp_received_bytes",
        "counter",
        size.format("received during request"),
        received,
        TRAFFIC_LABELS,
        "bytes",
    )
    yield _family(
        "istio_tcp_sent_bytes", "counter", size.format("sent during response"), sent, TRAFFIC_LABELS, "bytes"
    )


def _other_families(metrics: Metrics) -> Iterator[Family]:
    reporter = ("reporter",)
    yield _family(
        "istio_tcp_sockets_open",
        "gauge",
        "The current number of open TCP sockets (unstable)",
        _by_one(metrics.sockets_open),
        reporter,
    )
    yield _family(
        "istio_on_demand_dns",
        "counter",
        "The total number of on-demand DNS requests made (unstable)",
        list(metrics.on_demand_dns.items()),
        (*(f"source_{name}" for name in SIDE_LABELS), "hostname"),
    )
    crl = "The total number of connections {} (unstable)"
    yield _family(
        "istio_crl_policy_rejections",
        "counter",
        crl.format("rejected by revocation lists"),
        _nonzero(metrics.crl_rejections),
        reporter,
    )
    yield _family(
        "istio_crl_untracked_connections",
        "counter",
        crl.format("that revocation cannot end"),
        _nonzero(metrics.crl_untracked),
        reporter,
    )
    yield _family(
        "istio_xds_connection_terminations",
        "counter",
        "The total number of completed connections to the control plane (unstable)",
        _by_one(metrics.xds_terminations()),
        ("reason",),
    )
    yield _family(
        "istio_xds_message",
        "counter",
        "The total number of messages received (unstable)",
        _by_one(metrics.xds_messages),
        ("url",),
    )
    yield _family(
        "istio_xds_message_bytes",
        "counter",
        "The total number of bytes received (unstable)",
        _by_one(metrics.xds_bytes),
        ("url",),
        "bytes",
    )
    yield from _dns_families(metrics)
    yield _family(
        "ztunnel_authorization_dry_run",
        "counter",
        "Connections that dry-run policies would have decided about (unstable)",
        list(metrics.authorization_dry_run.items()),
        ("policy", "action", "result"),
    )
    yield _family(
        "ztunnel_connect_retries",
        "counter",
        "Further endpoints tried after one failed (unstable)",
        [((), metrics.connect_retries)],
        (),
    )
    yield _family(
        "ztunnel_metric_series", "gauge", "Traffic label sets in use (unstable)", [((), len(metrics.series))], ()
    )
    yield _family(
        "ztunnel_metric_series_over_budget",
        "counter",
        "Label sets counted as unknown (unstable)",
        [((), metrics.over_budget)],
        (),
    )
    for name, gauge in metrics.gauges.items():
        yield _family(name, gauge.kind, gauge.help, [((), gauge.read())], ())


def _dns_families(metrics: Metrics) -> Iterator[Family]:
    labels = (
        "request_query_type",
        "request_protocol",
        "source_canonical_service",
        "source_canonical_revision",
    )
    upstream = "The total number of DNS requests forwarded to upstream (unstable)"
    yield _family(
        "istio_dns_requests",
        "counter",
        "The total number of DNS requests (unstable)",
        list(metrics.dns_requests.items()),
        labels,
    )
    yield _family("istio_dns_upstream_requests", "counter", upstream, list(metrics.dns_forwarded.items()), labels)
    yield _family(
        "istio_dns_upstream_failures",
        "counter",
        "The total number of DNS requests that upstream failed (unstable)",
        list(metrics.dns_failures.items()),
        labels,
    )
    name = "istio_dns_upstream_request_duration_seconds"
    metric = Family(
        name, "The time Istio takes to get DNS response from upstream (unstable).", "histogram", "seconds"
    )
    for values, durations in metrics.dns_durations.items():
        shared = dict(zip(labels, values, strict=True))
        for bound, count in durations.cumulative():
            metric.add(f"{name}_bucket", shared | {"le": bound}, count)
        metric.add(f"{name}_sum", shared, durations.total_s)
        metric.add(f"{name}_count", shared, durations.count)
    yield metric


def _by_one(values: dict[str, int]) -> list[Sample]:
    return [((label,), value) for label, value in values.items()]


def _nonzero(values: dict[str, int]) -> list[Sample]:
    return [((label,), value) for label, value in values.items() if value]


def _family(
    name: str, kind: str, text: str, samples: Iterable[Sample], labels: tuple[str, ...], unit: str = ""
) -> Family:
    """A family from counters by label values; names of counters without ``_total``."""
    metric = Family(name, text + ".", kind, unit)
    sample_name = f"{name}_total" if kind == "counter" else name
    for values, value in samples:
        metric.add(sample_name, dict(zip(labels, values, strict=False)), value)
    return metric


def accepts(accept_encoding: str, coding: str) -> bool:
    """Whether a content coding is acceptable (RFC 9110, 12.5.3); only what is named counts."""
    for item in accept_encoding.split(","):
        name, _, weight = item.replace(" ", "").partition(";q=")
        if name.lower() == coding:
            return not weight or weight.strip("0.") != ""
    return False


def _compressed(pieces: Iterable[str], window_bits: int) -> Iterator[bytes]:
    compressor = zlib.compressobj(1, zlib.DEFLATED, window_bits)
    for piece in pieces:
        yield compressor.compress(piece.encode())
    yield compressor.flush()
