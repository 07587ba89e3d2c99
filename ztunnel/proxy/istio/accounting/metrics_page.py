"""Makes the families of the metrics page: :class:`~ztunnel.proxy.istio.accounting.metrics.Metrics` under Rust
ztunnel's names.

Import this module with the first scrape, see :mod:`ztunnel.runtime.http.exposition`.
"""

import platform
from collections.abc import Iterable, Iterator, Mapping

from prometheus_client.metrics_core import Metric
from prometheus_client.samples import Sample

import hbone
from ztunnel import __version__
from ztunnel.policy.calico.guard import results
from ztunnel.policy.ledger import Use
from ztunnel.proxy.istio.accounting.metrics import (
    DECISIONS,
    SIDE_LABELS,
    TRAFFIC_LABELS,
    DnsDurations,
    Metrics,
    TrafficSeries,
)
from ztunnel.runtime.http.exposition import Family, LabelledValue, family, process_families

#: The labels ``action`` and ``result`` of dry runs, by use.
_DRY_RUNS = {
    Use.WOULD_ALLOW: ("ALLOW", "allowed"),
    Use.WOULD_DENY: ("DENY", "denied"),
    Use.WOULD_NOT_ALLOW: ("ALLOW", "denied"),
}
_FLAGS = TRAFFIC_LABELS.index("response_flags")


def families(metrics: Metrics) -> Iterator[Family]:
    """Yield every family; some have no samples."""
    yield family(
        "istio_build",
        "gauge",
        "Istio component build info",
        [(("ztunnel", metrics.version), 1.0)],
        ("component", "tag"),
    )
    yield family(
        "ztunnel_build",
        "gauge",
        "What runs: a pure or a compiled tunnel engine (unstable)",
        [((__version__, hbone.build(), platform.python_version()), 1.0)],
        ("version", "build", "python"),
    )
    yield from _traffic_families(metrics)
    yield from _other_families(metrics)
    yield from process_families(metrics.processes())


def _traffic_families(metrics: Metrics) -> Iterator[Family]:
    # Connections open and close while the page is made. Each family reads the series that exist when it begins.
    every = list(metrics.series)
    kept = [place for place, name in enumerate(TRAFFIC_LABELS) if name not in metrics.removed]
    names = tuple(TRAFFIC_LABELS[place] for place in kept)

    def traffic(name: str, text: str, samples: Iterable[LabelledValue], unit: str = "") -> Family:
        if metrics.removed:  # the last labels are not there where neither side is known
            samples = (
                (tuple(values[place] for place in kept if place < len(values)), count) for values, count in samples
            )
        return family(name, "counter", text, samples, names, unit)

    connections = "The total number of TCP connections "
    opened = ((series.labels, series.opened) for series in every)
    yield traffic("istio_tcp_connections_opened", connections + "opened", opened)
    yield traffic("istio_tcp_connections_closed", connections + "closed", _closed(every))
    failed = (sample for sample in _closed(every) if sample[0][_FLAGS] != "-")
    yield traffic("istio_tcp_connections_failed", connections + "that failed (unstable)", failed)
    size = "The size of total bytes {} in case of a TCP connection"
    received = (
        (series.labels, series.received + sum(counts.sent for counts in series.running)) for series in every
    )
    yield traffic("istio_tcp_received_bytes", size.format("received during request"), received, "bytes")
    sent = ((series.labels, series.sent + sum(counts.received for counts in series.running)) for series in every)
    yield traffic("istio_tcp_sent_bytes", size.format("sent during response"), sent, "bytes")


def _closed(every: Iterable[TrafficSeries]) -> Iterator[LabelledValue]:
    """Iterate over the closed connections' samples, whose flags replace the ``-`` of open connections."""
    for series in every:
        for flags, count in list(series.closed.items()):
            yield (*series.labels[:_FLAGS], flags, *series.labels[_FLAGS + 1 :]), count


def _other_families(metrics: Metrics) -> Iterator[Family]:
    reporter = ("reporter",)
    yield family(
        "istio_tcp_sockets_open",
        "gauge",
        "The current number of open TCP sockets (unstable)",
        _by_one(metrics.sockets_open),
        reporter,
    )
    yield family(
        "istio_on_demand_dns",
        "counter",
        "The total number of on-demand DNS requests made (unstable)",
        list(metrics.on_demand_dns.items()),
        (*(f"source_{name}" for name in SIDE_LABELS), "hostname"),
    )
    crl = "The total number of connections {} (unstable)"
    yield family(
        "istio_crl_policy_rejections",
        "counter",
        crl.format("rejected by revocation lists"),
        _nonzero(metrics.crl_rejections),
        reporter,
    )
    yield family(
        "istio_crl_untracked_connections",
        "counter",
        crl.format("that revocation cannot end"),
        _nonzero(metrics.crl_untracked),
        reporter,
    )
    yield family(
        "istio_xds_connection_terminations",
        "counter",
        "The total number of completed connections to the control plane (unstable)",
        _by_one(metrics.xds_terminations()),
        ("reason",),
    )
    yield family(
        "istio_xds_message",
        "counter",
        "The total number of messages received (unstable)",
        _by_one(metrics.xds_messages),
        ("url",),
    )
    yield family(
        "istio_xds_message_bytes",
        "counter",
        "The total number of bytes received (unstable)",
        _by_one(metrics.xds_bytes),
        ("url",),
        "bytes",
    )
    yield from _dns_families(metrics)
    own = list(metrics.ledger.own)
    yield family(
        "ztunnel_authorization_decisions",
        "counter",
        "Connections that authorization policies decided about; policy -: no ALLOW policy matched (unstable)",
        [((name, result), n) for name, tally, _ in own for use, result in DECISIONS.items() if (n := tally[use])],
        ("policy", "result"),
    )
    yield family(
        "ztunnel_authorization_dry_run",
        "counter",
        "Connections that dry-run policies would have decided about (unstable)",
        [((name, *labels), n) for name, tally, _ in own for use, labels in _DRY_RUNS.items() if (n := tally[use])],
        ("policy", "action", "result"),
    )
    yield family(
        "ztunnel_policy_decisions",
        "counter",
        "Connections that Calico's policies decided about (unstable)",
        results(metrics.ledger.calico),
        ("tier", "policy", "result"),
    )
    yield family(
        "ztunnel_early_denials",
        "counter",
        "Connections that ended before they counted as opened (unstable)",
        [((use.policy,), use.tally.refused_early) for use in metrics.ledger.early],
        ("direction",),
    )
    yield family(
        "ztunnel_connect_retries",
        "counter",
        "Further endpoints tried after one failed (unstable)",
        [((), metrics.connect_retries)],
        (),
    )
    yield family(
        "ztunnel_calmed_connections",
        "counter",
        "Tunnel connections ended by a limit of the protocol (unstable)",
        [((), metrics.calmed)],
        (),
    )
    yield family(
        "ztunnel_metric_series", "gauge", "Traffic label sets in use (unstable)", [((), len(metrics.series))], ()
    )
    yield family(
        "ztunnel_metric_series_over_budget",
        "counter",
        "Label sets counted as unknown (unstable)",
        [((), metrics.over_budget)],
        (),
    )
    yield family(
        "ztunnel_otlp_dropped",
        "counter",
        "What no OpenTelemetry collector got: access lines, spans, and requests of metrics (unstable)",
        [((signal,), count) for signal, count in metrics.exports_dropped.items()],
        ("signal",),
    )
    yield family(
        "ztunnel_loop_stalls",
        "counter",
        "Times that an event loop stood still for more than a second (unstable)",
        [((), metrics.loop.stalls.value)],
        (),
    )
    yield family(
        "ztunnel_loop_late_seconds",
        "counter",
        "Seconds that a timer of two beats a second was late, in all (unstable)",
        [((), round(metrics.loop.late_s, 6))],
        (),
        "seconds",
    )
    for name, gauge in metrics.gauges.items():
        yield family(name, gauge.kind, gauge.help, [((), gauge.read())], ())


def _dns_families(metrics: Metrics) -> Iterator[Family]:
    labels = (
        "request_query_type",
        "request_protocol",
        "source_canonical_service",
        "source_canonical_revision",
    )
    upstream = "The total number of DNS requests forwarded to upstream (unstable)"
    yield family(
        "istio_dns_requests",
        "counter",
        "The total number of DNS requests (unstable)",
        list(metrics.dns_requests.items()),
        labels,
    )
    yield family("istio_dns_upstream_requests", "counter", upstream, list(metrics.dns_forwarded.items()), labels)
    yield family(
        "istio_dns_upstream_failures",
        "counter",
        "The total number of DNS requests that upstream failed (unstable)",
        list(metrics.dns_failures.items()),
        labels,
    )
    yield family(
        "ztunnel_dns_dropped",
        "counter",
        "DNS datagrams of pods that were not answered, and pauses for a pod's rate (unstable)",
        [((reason,), count) for reason, count in metrics.dns_dropped.items()],
        ("reason",),
    )
    name = "istio_dns_upstream_request_duration_seconds"
    text = "The time Istio takes to get DNS response from upstream (unstable)."
    yield Family(Metric(name, text, "histogram", "seconds"), _durations(name, labels, metrics.dns_durations))


def _durations(
    name: str, labels: tuple[str, ...], found: Mapping[tuple[str, ...], DnsDurations]
) -> Iterator[Sample]:
    for values, durations in list(found.items()):
        shared = dict(zip(labels, values, strict=True))
        for bound, count in durations.cumulative():
            yield Sample(f"{name}_bucket", shared | {"le": bound}, count)
        yield Sample(f"{name}_sum", shared, durations.total_s)
        yield Sample(f"{name}_count", shared, durations.count)


def _by_one(values: dict[str, int]) -> list[LabelledValue]:
    return [((label,), value) for label, value in values.items()]


def _nonzero(values: dict[str, int]) -> list[LabelledValue]:
    return [((label,), value) for label, value in values.items() if value]
