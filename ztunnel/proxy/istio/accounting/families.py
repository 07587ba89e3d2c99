"""Makes the metric families of the metrics page: the counts of
:class:`~ztunnel.proxy.istio.accounting.metrics.Metrics` under the Rust ztunnel's names.

Import this module only at the first scrape: see :mod:`ztunnel.runtime.http.exposition`.
"""

import platform
from collections.abc import Callable, Iterable, Iterator, Mapping

import hbone
from ztunnel import __version__
from ztunnel.policy.calico.guard import results
from ztunnel.policy.ledger import Use
from ztunnel.proxy.addons.families import addon_families
from ztunnel.proxy.dataplane.handover.families import handover_families
from ztunnel.proxy.flows.families import histograms, time_families
from ztunnel.proxy.istio.accounting.metrics import DECISIONS, PORT_LABELS, SIDE_LABELS, TRAFFIC_LABELS, Metrics
from ztunnel.proxy.istio.accounting.traffic_series import TrafficSeries
from ztunnel.runtime.http.exposition import Family, LabelledValue, family, process_families

#: The metric labels ``action`` and ``result`` of a dry-run policy's decision, by kind of decision.
_DRY_RUNS = {
    Use.WOULD_ALLOW: ("ALLOW", "allowed"),
    Use.WOULD_DENY: ("DENY", "denied"),
    Use.WOULD_NOT_ALLOW: ("ALLOW", "denied"),
}
_FLAGS = TRAFFIC_LABELS.index("response_flags")


def families(metrics: Metrics) -> Iterator[Family]:
    """Yield every metric family, even those without samples."""
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
    # The page is rendered while connections open and close, so this copies the list of series for all families.
    every = list(metrics.series)
    kept = [place for place, name in enumerate(TRAFFIC_LABELS) if name not in metrics.removed]
    names = tuple(TRAFFIC_LABELS[place] for place in kept)

    def traffic(name: str, text: str, samples: Iterable[LabelledValue], unit: str = "") -> Family:
        if metrics.removed:  # the last labels are absent if neither side is known
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
    received = ((series.labels, series.received_now) for series in every)
    yield traffic("istio_tcp_received_bytes", size.format("received during request"), received, "bytes")
    sent = ((series.labels, series.sent_now) for series in every)
    yield traffic("istio_tcp_sent_bytes", size.format("sent during response"), sent, "bytes")


def _closed(every: Iterable[TrafficSeries]) -> Iterator[LabelledValue]:
    """Iterate over the samples of closed connections, with the label ``response_flags`` filled in."""
    for series in every:
        for flags, count in list(series.closed.items()):
            yield (*series.labels[:_FLAGS], flags, *series.labels[_FLAGS + 1 :]), count


_Samples = Callable[[Metrics], Iterable[LabelledValue]]
#: One row of the table: a metric's name, kind, help text without the final "(unstable)", labels and samples.
_Row = tuple[str, str, str, tuple[str, ...], _Samples]
_REPORTER = ("reporter",)
_DNS = ("request_query_type", "request_protocol", "source_canonical_service", "source_canonical_revision")
_ON_DEMAND = (*(f"source_{name}" for name in SIDE_LABELS), "hostname")
_DURATION = "istio_dns_upstream_request_duration_seconds"


def _by_one(read: Callable[[Metrics], Mapping[str, float]], *, zeros: bool = True) -> _Samples:
    return lambda metrics: [((label,), value) for label, value in read(metrics).items() if value or zeros]


def _one(read: Callable[[Metrics], float]) -> _Samples:
    return lambda metrics: [((), read(metrics))]


def _tallies(uses: Mapping[Use, tuple[str, ...]]) -> _Samples:
    return lambda metrics: [
        ((name, *labels), count)
        for name, tally, _ in list(metrics.ledger.own)
        for use, labels in uses.items()
        if (count := tally[use])
    ]


_BEFORE_DURATIONS: tuple[_Row, ...] = (
    ("istio_tcp_sockets_open", "gauge", "The current number of open TCP sockets", _REPORTER,
     _by_one(lambda m: m.sockets_open)),
    ("istio_on_demand_dns", "counter", "The total number of on-demand DNS requests made", _ON_DEMAND,
     lambda m: list(m.on_demand_dns.items())),
    ("ztunnel_connections_by_port", "counter", "Ended connections by the port of the application", PORT_LABELS,
     lambda m: list((m.ports or {}).items())),
    ("istio_crl_policy_rejections", "counter", "The total number of connections rejected by revocation lists",
     _REPORTER, _by_one(lambda m: m.crl_rejections, zeros=False)),
    ("istio_crl_untracked_connections", "counter", "The total number of connections that revocation cannot end",
     _REPORTER, _by_one(lambda m: m.crl_untracked, zeros=False)),
    ("istio_xds_connection_terminations", "counter",
     "The total number of completed connections to the control plane", ("reason",),
     _by_one(lambda m: m.xds_terminations())),
    ("istio_xds_message", "counter", "The total number of messages received", ("url",),
     _by_one(lambda m: m.xds_messages)),
    ("istio_xds_message_bytes", "counter", "The total number of bytes received", ("url",),
     _by_one(lambda m: m.xds_bytes)),
    ("istio_dns_requests", "counter", "The total number of DNS requests", _DNS,
     lambda m: list(m.dns_requests.items())),
    ("istio_dns_upstream_requests", "counter", "The total number of DNS requests forwarded to upstream", _DNS,
     lambda m: list(m.dns_forwarded.items())),
    ("istio_dns_upstream_failures", "counter", "The total number of DNS requests that upstream failed", _DNS,
     lambda m: list(m.dns_failures.items())),
    ("ztunnel_dns_dropped", "counter",
     "DNS datagrams of pods that were not answered, and pauses for a pod's rate", ("reason",),
     _by_one(lambda m: m.dns_dropped)),
)  # fmt: skip
_AFTER_DURATIONS: tuple[_Row, ...] = (
    ("ztunnel_authorization_decisions", "counter",
     "Connections that authorization policies decided about; policy -: no ALLOW policy matched",
     ("policy", "result"), _tallies({use: (result,) for use, result in DECISIONS.items()})),
    ("ztunnel_authorization_dry_run", "counter", "Connections that dry-run policies would have decided about",
     ("policy", "action", "result"), _tallies(_DRY_RUNS)),
    ("ztunnel_policy_decisions", "counter", "Connections that Calico's policies decided about",
     ("tier", "policy", "result"), lambda m: results(m.ledger.calico)),
    ("ztunnel_early_denials", "counter", "Connections that ended before they counted as opened", ("direction",),
     lambda m: [((use.policy,), use.tally.refused_early) for use in m.ledger.early]),
    ("ztunnel_connect_retries", "counter", "Further endpoints tried after one failed", (),
     _one(lambda m: m.connect_retries)),
    ("ztunnel_calmed_connections", "counter", "Tunnel connections ended by a limit of the protocol", (),
     _one(lambda m: m.closed_for_abuse)),
    ("istio_cert_expiry_seconds", "gauge", "When the certificate of an identity ends, in Unix seconds",
     ("identity",), _by_one(lambda m: m.certificates().ends)),
    ("ztunnel_root_expiry_seconds", "gauge", "When the first root of the mesh ends, in Unix seconds", (),
     lambda m: [((), ends_s)] if (ends_s := m.certificates().root_s) is not None else []),
    ("ztunnel_mesh_objects", "gauge", "Objects that the control plane has described", ("kind",),
     _by_one(lambda m: m.objects())),
    ("ztunnel_xds_refused_resources", "gauge",
     "Resources that could not be read and have no later version", ("kind",), _by_one(lambda m: m.refused())),
    ("ztunnel_certificate_fetches", "counter", "Finished requests to the authority", ("result",),
     _by_one(lambda m: m.certificates().fetches)),
    ("ztunnel_metric_series", "gauge", "Traffic label sets in use", (), _one(lambda m: len(m.series))),
    ("ztunnel_metric_series_over_budget", "counter", "Label sets counted as unknown", (),
     _one(lambda m: m.over_budget)),
    ("ztunnel_otlp_dropped", "counter",
     "What no OpenTelemetry collector got: access lines, spans, and requests of metrics", ("signal",),
     _by_one(lambda m: m.exports_dropped)),
    ("ztunnel_loop_stalls", "counter", "Times that an event loop stood still for more than a second", (),
     _one(lambda m: m.loop.stalls.value)),
    ("ztunnel_loop_late_seconds", "counter", "Seconds that a timer of two beats a second was late, in all", (),
     _one(lambda m: round(m.loop.late_s, 6))),
)  # fmt: skip


def _other_families(metrics: Metrics) -> Iterator[Family]:
    text = "The time Istio takes to get DNS response from upstream (unstable)."
    yield from _of_rows(_BEFORE_DURATIONS, metrics)
    yield histograms(_DURATION, text, _DNS, metrics.dns_durations)
    yield from _of_rows(_AFTER_DURATIONS, metrics)
    yield from time_families(metrics)
    yield from handover_families(metrics.handovers)
    for name, gauge in metrics.gauges.items():
        yield family(name, gauge.kind, gauge.help, [((), gauge.read())], ())
    yield from addon_families(metrics.addons)


def _of_rows(rows: Iterable[_Row], metrics: Metrics) -> Iterator[Family]:
    for name, kind, text, labels, samples in rows:
        unit = next((unit for unit in ("bytes", "seconds") if name.endswith(f"_{unit}")), "")
        yield family(name, kind, f"{text} (unstable)", samples(metrics), labels, unit)
