"""The metrics page against the Rust ztunnel's names and labels, and the bounds of what it holds."""

import asyncio
from functools import partial
from types import SimpleNamespace
from typing import Any, cast

from prometheus_client.openmetrics.parser import text_string_to_metric_families

from hbone.aio.relay import ByteCounts
from hbone.tunnel_headers import Baggage
from tests.programs import metrics_lint
from tests.ztunnel.proxy.istio.nodes import LOCAL, StoppedClock
from xds.model.mesh import Changes
from xds.model.service import Service
from xds.model.workload import WorkloadUid
from ztunnel.policy.ledger import TierPolicy, Use
from ztunnel.proxy.dataplane.gauges import Gauge
from ztunnel.proxy.dataplane.reasons import Reason, Stage
from ztunnel.proxy.flows.history import STEP_S
from ztunnel.proxy.istio.accounting.denials import Pair
from ztunnel.proxy.istio.accounting.families import families
from ztunnel.proxy.istio.accounting.metrics import EXPIRY_S, Metrics, PeerLabels, traffic_labels
from ztunnel.proxy.istio.accounting.sweep import sample
from ztunnel.proxy.istio.accounting.traffic_series import TrafficSeries
from ztunnel.runtime.durations import DNS_BUCKETS, Durations
from ztunnel.runtime.http.exposition import page
from ztunnel.runtime.http.page import Page, PageRequest

#: In this order, as observed of upstream.
ORDER = [
    "reporter",
    "source_workload",
    "source_canonical_service",
    "source_canonical_revision",
    "source_workload_namespace",
    "source_principal",
    "source_app",
    "source_version",
    "source_cluster",
    "destination_service",
    "destination_service_namespace",
    "destination_service_name",
    "destination_workload",
    "destination_canonical_service",
    "destination_canonical_revision",
    "destination_workload_namespace",
    "destination_principal",
    "destination_app",
    "destination_version",
    "destination_cluster",
    "request_protocol",
    "response_flags",
    "connection_security_policy",
    "source_region",
    "source_zone",
    "destination_region",
    "destination_zone",
]


def page_of(metrics: Metrics, accept: str = "", encoding: str = "") -> Page:
    request = PageRequest(method="GET", path="/metrics", accept=accept, accept_encoding=encoding)
    return page(families(metrics), request)


def text_of(metrics: Metrics, accept: str = "application/openmetrics-text") -> str:
    return b"".join(piece for piece in page_of(metrics, accept).body if isinstance(piece, bytes)).decode()


def values_of(text: str, name: str, **labels: str) -> list[float]:
    """Values of the samples of that name that have these labels."""
    return [
        sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if sample.name == name and sample.labels.items() >= labels.items()
    ]


def opened(
    metrics: Metrics, labels: tuple[str, ...] | None = None, *uids: str, now_s: float = 0.0
) -> TrafficSeries:
    return metrics.opened(labels or full(), uids, ByteCounts(), now_s)


def full(reporter: str = "source") -> tuple[str, ...]:
    side = PeerLabels.of(LOCAL, str(LOCAL.identity))
    return traffic_labels(reporter, side, side, Service(name="n", namespace="ns", hostname="h"), secured=True)


def test_every_traffic_metric_with_its_labels() -> None:
    metrics = Metrics("1.30", 100)
    series = opened(metrics)
    series.finished("-", None)
    opened(metrics).finished("DENY", None)
    found = {family.name: family for family in text_string_to_metric_families(text_of(metrics))}
    labels = dict(zip(ORDER, full(), strict=True))
    assert list(labels)[:1] == ["reporter"]
    connections = "The total number of TCP connections"
    size = "The size of total bytes {} in case of a TCP connection."
    expected = [
        ("istio_build", "gauge", "Istio component build info.", {}, 1),
        ("istio_tcp_connections_opened", "counter", f"{connections} opened.", {}, 2),
        ("istio_tcp_connections_closed", "counter", f"{connections} closed.", {}, 1),
        ("istio_tcp_connections_closed", "counter", f"{connections} closed.", {"response_flags": "DENY"}, 1),
        (
            "istio_tcp_connections_failed",
            "counter",
            f"{connections} that failed (unstable).",
            {"response_flags": "DENY"},
            1,
        ),
        ("istio_tcp_received_bytes", "counter", size.format("received during request"), {}, 0),
        ("istio_tcp_sent_bytes", "counter", size.format("sent during response"), {}, 0),
    ]
    for name, kind, text, other, value in expected:
        family = found[name]
        assert (family.type, family.documentation) == (kind, text)
        wanted = {"component": "ztunnel", "tag": "1.30"} if name == "istio_build" else labels | other
        assert [sample.value for sample in family.samples if sample.labels == wanted] == [value]
    assert found["istio_tcp_received_bytes"].unit == found["istio_tcp_sent_bytes"].unit == "bytes"
    assert not [sample for sample in found["istio_tcp_connections_failed"].samples if sample.value != 1]


def test_locality_labels_are_omitted_if_both_sides_are_unknown() -> None:
    labels = traffic_labels("destination", PeerLabels(), PeerLabels(), None, secured=False)
    assert len(labels) == len(ORDER) - 4
    assert set(labels) == {"destination", "unknown", "tcp", "-"}


def test_the_application_of_baggage_is_the_workload() -> None:
    baggage = Baggage(
        cluster_id="c", namespace="n", workload_name="w", service_name="s", revision="v", region="r", zone="z"
    )
    side = PeerLabels.of_baggage(baggage, "p")
    assert side == PeerLabels("w", "s", "v", "n", "p", "w", "v", "c", "r", "z", known=True)
    assert not PeerLabels.of_baggage(Baggage()).known


def test_the_page_is_openmetrics_that_parses() -> None:
    metrics = Metrics('we"ird\\\n', 100)
    opened(metrics)
    metrics.dns_requests[("a", "udp", "x", "y")] = 2
    metrics.dns_durations[("a", "udp", "x", "y")] = Durations(DNS_BUCKETS)
    metrics.dns_durations[("a", "udp", "x", "y")].observe(0.0005)
    metrics.xds_messages["url"] = 3
    metrics.xds_bytes["url"] = 4
    metrics.xds_terminations = lambda: {"Reconnect": 5}
    metrics.on_demand_dns[("w",) * 8 + ("h",)] = 6
    metrics.crl_rejections["source"] = 7
    metrics.gauges["workload_manager_proxies_started"] = Gauge("counter", "Help (unstable)", lambda: 8)
    text = text_of(metrics)
    assert text.endswith("# EOF\n")
    families = {family.name: family for family in text_string_to_metric_families(text)}
    values = {
        sample.name: sample.value
        for family in families.values()
        for sample in family.samples
        if not sample.name.endswith("_bucket")
    }
    assert values["istio_dns_requests_total"] == 2
    assert values["istio_xds_message_total"] == 3
    assert values["istio_xds_message_bytes_total"] == 4
    assert values["istio_xds_connection_terminations_total"] == 5
    assert values["istio_on_demand_dns_total"] == 6
    assert values["istio_crl_policy_rejections_total"] == 7
    assert values["workload_manager_proxies_started_total"] == 8
    assert values["istio_dns_upstream_request_duration_seconds_count"] == 1
    assert values["process_open_fds"] > 0
    assert values["process_max_fds"] > 0
    assert families["istio_dns_upstream_request_duration_seconds"].unit == "seconds"
    assert families["istio_build"].samples[0].labels["tag"] == 'we"ird\\\n'


def test_metrics_page_passes_promtool() -> None:
    metrics = Metrics("1.30", 100)
    opened(metrics).finished("DENY", None)
    metrics.dns_requests[("a", "udp", "x", "y")] = 2
    metrics.dns_durations[("a", "udp", "x", "y")] = Durations(DNS_BUCKETS)
    metrics.xds_messages["url"] = 3
    metrics.xds_bytes["url"] = 4
    metrics.on_demand_dns[("w",) * 8 + ("h",)] = 6
    metrics.crl_rejections["source"] = 7
    metrics.gauges["workload_manager_proxies_started"] = Gauge("counter", "Help (unstable)", lambda: 8)
    assert metrics_lint(text_of(metrics, "text/plain")) == []


def test_only_stable_metrics_have_no_stability_note_in_their_help() -> None:
    metrics = Metrics("v", 100)
    opened(metrics).finished("DENY", None)
    metrics.dns_requests[("a", "udp", "x", "y")] = 1
    stable = set()
    for line in text_of(metrics).splitlines():
        if line.startswith("# HELP ") and "(unstable)" not in line:
            stable.add(line.split()[2])
        assert not line.startswith("# HELP istio_") or line.endswith(".")
    assert {name for name in stable if not name.startswith("process_")} == {
        "istio_build",
        "istio_tcp_connections_opened",
        "istio_tcp_connections_closed",
        "istio_tcp_received_bytes",
        "istio_tcp_sent_bytes",
    }


def test_families_without_samples_are_left_out() -> None:
    text = text_of(Metrics("v", 100))
    for name in (
        "istio_tcp_connections",
        "istio_dns",
        "istio_xds",
        "istio_crl",
        "istio_on_demand",
        "ztunnel_authorization",
    ):
        assert name not in text


def test_histogram_buckets_equal_upstreams() -> None:
    durations = Durations(DNS_BUCKETS)
    for seconds in (0.0001, 0.0005, 0.002, 2.0, 7.0):
        durations.observe(seconds)
    assert list(durations.cumulative()) == [
        ("0.0005", 2),
        ("0.001", 2),
        ("0.01", 3),
        ("0.1", 3),
        ("1.0", 3),
        ("5.0", 4),
        ("+Inf", 5),
    ]


# What is bounded


def gone(*uids: str) -> Changes:
    return Changes(workloads={WorkloadUid(uid) for uid in uids})


def test_series_of_vanished_workloads_expire() -> None:
    metrics = Metrics("v", 100)
    series = opened(metrics, full(), "a", "b")
    series.finished("-", None)
    metrics.changed(gone("a"), [])
    assert metrics.expire(EXPIRY_S + 1) == 0  # b is still there
    metrics.changed(gone("b"), [])
    assert metrics.expire(EXPIRY_S - 1) == 0
    assert metrics.expire(EXPIRY_S + 1) == 1
    assert not metrics.series


def test_series_in_use_or_used_again_do_not_expire() -> None:
    metrics = Metrics("v", 100)
    series = opened(metrics, full(), "a")
    metrics.changed(gone("a"), [])
    assert metrics.expire(10 * EXPIRY_S) == 0  # its connection lives
    series.finished("-", None)
    opened(metrics, full(), "a", now_s=EXPIRY_S).finished("-", None)  # the workload came back
    assert metrics.expire(10 * EXPIRY_S) == 0


def test_series_of_baggage_labels_expire_when_unused() -> None:
    metrics = Metrics("v", 100)
    for now_s in (0.0, 10.0):  # the local workload lives all the time
        series = metrics.opened(full(), ("local",), ByteCounts(), now_s, foreign=True)
    assert metrics.expire(10 * EXPIRY_S) == 0  # it is used
    series.finished("-", None)
    series.finished("-", None)
    assert metrics.expire(EXPIRY_S) == 0
    assert metrics.expire(10 + EXPIRY_S + 1) == 1
    assert not metrics.series
    metrics.changed(gone("local"), [])  # which knows nothing of it any more, and must not mind
    assert metrics.expire(10 * EXPIRY_S) == 0


def test_the_history_counts_on_when_series_expire() -> None:
    clock, metrics = StoppedClock(), Metrics("v", 100)

    def connect(name: str, moved: int) -> None:
        counts = ByteCounts()
        counts.follow(*(cast(Any, SimpleNamespace(read_bytes=each)) for each in (moved, 1)))
        opened(metrics, full(), name).finished("-", counts)

    async def main() -> None:
        await sample(metrics, clock)
        connect("a", 99)
        clock.passed_s = STEP_S
        await sample(metrics, clock)
        metrics.changed(gone("a"), [])
        assert metrics.expire(10 * EXPIRY_S) == 1
        connect("b", 9)
        metrics.failed("source", Stage.CONNECT, Reason.PEER_DENIED)
        metrics.failed("source", Stage.CONNECT, Reason.REFUSED)
        clock.passed_s = 2 * STEP_S
        await sample(metrics, clock)

    asyncio.run(main())
    assert metrics.page_with().history.steps().rows == ((1, 0, 0, 100), (1, 2, 1, 10))


def test_the_time_until_series_expire_is_configured() -> None:
    for expiry_s, dropped in ((10.0, 1), (0.0, 0)):
        metrics = Metrics("v", 100, expiry_s=expiry_s)
        opened(metrics, full(), "a").finished("-", None)
        metrics.changed(gone("a"), [])
        assert metrics.expire(9.0) == 0
        assert metrics.expire(11.0) == dropped
        assert metrics.expire(1e9) == 0


def test_removed_labels_merge_series() -> None:
    metrics = Metrics("v", 100, removed=frozenset({"source_workload", "source_principal", "destination_zone"}))
    first, second = (
        opened(
            metrics,
            traffic_labels(
                "source",
                PeerLabels(workload=name, canonical_service="s", known=True),
                PeerLabels(),
                None,
                secured=True,
            ),
        )
        for name in ("a", "b")
    )
    assert first is second
    first.finished("DENY", None)
    text = text_of(metrics)
    assert values_of(text, "istio_tcp_connections_opened_total", source_canonical_service="s") == [2]
    assert values_of(text, "istio_tcp_connections_closed_total", response_flags="DENY") == [1]
    (sample,) = [
        sample
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if sample.name == "istio_tcp_connections_opened_total"
    ]
    left = [name for name in ORDER if name not in ("source_workload", "source_principal", "destination_zone")]
    assert sample.labels.keys() == set(left)


def test_removed_labels_apply_to_all_processes_and_unknown_peers() -> None:
    removed = frozenset({"destination_service", "source_region"})
    metrics, worker = Metrics("v", 100, removed=removed), Metrics("v", 100, removed=removed)
    for each in (metrics, worker):
        opened(each)
        opened(each, traffic_labels("source", PeerLabels(), PeerLabels(), None, secured=False))
    summed = metrics.page_with()
    for part in worker.counts():
        summed.add(part)
    text = text_of(summed)
    assert sorted(values_of(text, "istio_tcp_connections_opened_total")) == [2, 2]
    assert "destination_service=" not in text
    assert 'connection_security_policy="mutual_tls"' in text


def test_changed_workload_keeps_its_series() -> None:
    metrics = Metrics("v", 100)
    opened(metrics, full(), "a").finished("-", None)
    metrics.changed(gone("a"), ["a"])
    assert metrics.expire(10 * EXPIRY_S) == 0


def test_connections_over_the_series_budget_share_unknown_labels() -> None:
    metrics = Metrics("v", 2)
    labels = [
        traffic_labels("source", PeerLabels(workload=str(number), known=True), PeerLabels(), None, secured=True)
        for number in range(5)
    ]
    series = [opened(metrics, each) for each in labels]
    assert series[2] is series[3] is series[4]
    assert (len(metrics.series), metrics.over_budget) == (3, 3)
    shared = dict(zip(ORDER, series[4].labels, strict=True))
    assert shared["reporter"] == "source"
    assert shared["connection_security_policy"] == "mutual_tls"
    assert shared["source_workload"] == shared["source_region"] == "unknown"
    assert values_of(text_of(metrics), "ztunnel_metric_series_over_budget_total") == [3]


def test_bytes_of_running_relays_are_on_each_page() -> None:
    metrics = Metrics("v", 100)
    counts = ByteCounts()
    series = metrics.opened(full(), (), counts, 0.0)
    counts._sent, counts._received = 10, 20
    received, sent = "istio_tcp_received_bytes_total", "istio_tcp_sent_bytes_total"
    text = text_of(metrics)
    assert (values_of(text, received), values_of(text, sent)) == ([10], [20])
    series.finished("-", counts)
    text = text_of(metrics)
    assert (values_of(text, received), values_of(text, sent)) == ([10], [20])


def test_metrics_page_sums_all_processes() -> None:
    main, others = Metrics("v", 100), [Metrics("v", 100), Metrics("v", 100)]
    main.xds_messages["t"] = 1
    main.gauges["g"] = Gauge("gauge", "G", lambda: 7)
    for number, worker in enumerate(others, start=1):
        counts = ByteCounts()
        series = worker.opened(full(), (), counts, 0.0)
        worker.opened(full(), (), ByteCounts(), 0.0)
        counts._sent, counts._received = 10 * number, number
        series.finished("DENY", counts)
        worker.sockets_open["source"] = number
        worker.crl_rejections["source"] = number
        worker.on_demand_dns[("a",) * 8 + ("host",)] = number
        ledger = worker.ledger
        for _ in range(number):
            ledger.own.note("p", Use.WOULD_DENY, 1.0)
            ledger.calico.note(TierPolicy("default", "p"), Use.DENIED, 10.0 - number)
            ledger.early.note("inbound", Use.REFUSED_EARLY, 1.0)
        ledger.denials.note(Pair("inbound", "a", "", "b:80", "no"), f"10.0.0.{number}:1", 10.0 - number)
        ledger.own.note("shop/p", Use.DENIED, 10.0 - number)
        worker.connect_retries = worker.over_budget = worker.closed_for_abuse = number
    main.opened(full("destination"), (), ByteCounts(), 0.0)
    summed = main.page_with()
    for worker in others:
        for part in worker.counts():
            summed.add(part)
    text = text_of(summed)
    for name, labels, value in (
        ("istio_tcp_sockets_open", {"reporter": "source"}, 3),
        ("istio_crl_policy_rejections_total", {"reporter": "source"}, 3),
        ("ztunnel_authorization_dry_run_total", {"policy": "p", "action": "DENY", "result": "denied"}, 3),
        ("ztunnel_early_denials_total", {"direction": "inbound"}, 3),
        ("ztunnel_authorization_decisions_total", {"policy": "shop/p", "result": "denied"}, 2),
        ("ztunnel_policy_decisions_total", {"tier": "default", "policy": "p", "result": "denied"}, 3),
        ("ztunnel_connect_retries_total", {}, 3),
        ("ztunnel_calmed_connections_total", {}, 3),
        ("ztunnel_metric_series_over_budget_total", {}, 3),
        ("ztunnel_metric_series", {}, 2),
        ("istio_xds_message_total", {"url": "t"}, 1),
        ("g", {}, 7),
        ("istio_tcp_connections_opened_total", {"reporter": "source"}, 4),
        ("istio_tcp_connections_closed_total", {"reporter": "source"}, 2),
        ("istio_tcp_connections_failed_total", {"reporter": "source"}, 2),
        ("istio_tcp_received_bytes_total", {"reporter": "source"}, 30),
        ("istio_tcp_sent_bytes_total", {"reporter": "source"}, 3),
        ("istio_on_demand_dns_total", {"hostname": "host"}, 3),
    ):
        assert values_of(text, name, **labels) == [value], name
    (use,) = summed.ledger.calico
    assert use.last_s == 9.0, "the latest"
    (denial,) = summed.ledger.denials
    assert (denial.times, denial.last_s, denial.address) == (2, 9.0, "10.0.0.1:1")
    # The page is apart: what it adds up changes nobody's numbers.
    assert main.sockets_open["source"] == 0
    assert len(others[0].series) == len(main.series) == 1


def test_counts_with_many_series_are_sent_in_parts() -> None:
    metrics, summed = Metrics("v", 5000), Metrics("v", 10)
    for number in range(123):
        opened(
            metrics,
            traffic_labels(
                "source", PeerLabels(workload=str(number), known=True), PeerLabels(), None, secured=True
            ),
        )
    parts = list(metrics.counts())
    assert [len(part.traffic) for part in parts] == [0, 50, 50, 23]
    for part in parts:
        summed.add(part)
    assert len(summed.series) == 123  # each process has its budget
    assert summed.over_budget == 0


def test_counts_of_a_lost_process_stay_and_its_connections_count_as_closed() -> None:
    main, lost = Metrics("v", 100), Metrics("v", 100)
    for _ in range(3):
        series = opened(lost, full(), "a")
    series.finished("DENY", None)
    lost.sockets_open["source"] = 2
    for part in lost.counts():
        main.add(part, lost=True, now_s=100.0)
    text = text_of(main)
    assert sorted(values_of(text, "istio_tcp_connections_closed_total")) == [1, 2]
    assert values_of(text, "istio_tcp_sockets_open", reporter="source") == [0]
    # Its series expire as any other.
    assert main.expire(100.0 + 10 * EXPIRY_S) == 0
    main.changed(gone("a"), [])
    assert main.expire(100.0 + EXPIRY_S - 1) == 0
    assert main.expire(100.0 + EXPIRY_S + 1) == 1


def test_series_of_a_lost_process_expire_if_they_did_so_there() -> None:
    main, lost = Metrics("v", 100), Metrics("v", 100)
    foreign = traffic_labels("destination", PeerLabels(workload="f", known=True), PeerLabels(), None, secured=True)
    lost.opened(foreign, ["local"], ByteCounts(), 1.0, foreign=True)
    opened(lost, full(), "a")
    lost.changed(gone("a"), [])
    for part in lost.counts():
        main.add(part, lost=True, now_s=100.0)
    assert main.expire(100.0 + EXPIRY_S - 1) == 0
    assert main.expire(100.0 + EXPIRY_S + 1) == 2


def test_the_history_counts_a_lost_process_once() -> None:
    async def main() -> None:
        main, lost = Metrics("v", 100), Metrics("v", 100)
        clock = StoppedClock()
        for metrics in (main, lost):
            await sample(metrics, clock)
        for _ in range(3):
            lost.failed("source", Stage.CONNECT, Reason.POLICY)
            series = opened(lost, full(), "a")
        series.received = 70
        clock.passed_s += STEP_S
        for metrics in (main, lost):
            await sample(metrics, clock)
        for part in lost.counts():
            main.add(part, lost=True, now_s=clock.monotonic())
        opened(main, full(), "a")
        clock.passed_s += STEP_S
        await sample(main, clock)
        assert main.history.steps().rows == ((3, 3, 3, 70), (1, 0, 0, 0))

    asyncio.run(main())


def test_the_limits_that_workers_enforce_are_counted() -> None:
    main, worker, lost = (Metrics("v", 10) for _ in range(3))
    names = ("ztunnel_half_open_connections", "ztunnel_half_open_turned_away", "ztunnel_generations")
    for metrics, values in ((main, (1.0, 2.0, 1.0)), (worker, (10.0, 20.0, 1.0)), (lost, (100.0, 200.0, 1.0))):
        metrics.gauges = {
            name: Gauge("gauge", "", partial(float, value)) for name, value in zip(names, values, strict=True)
        }
    for part in lost.counts():
        main.add(part, lost=True)
    page = main.page_with()
    for part in worker.counts():
        page.add(part)
    assert [page.gauges[name].read() for name in names] == [11.0, 222.0, 1.0]
    assert [main.gauges[name].read() for name in names] == [1.0, 2.0, 1.0]


def test_the_stalls_of_every_process_are_added() -> None:
    main, worker = Metrics("1.0", 10), Metrics("1.0", 10)
    main.loop.stalls.value, main.loop.late_s = 1, 0.5
    worker.loop.stalls.value, worker.loop.late_s = 2, 3.0
    page = main.page_with()
    for part in worker.counts():
        page.add(part)
    assert (page.loop.stalls.value, page.loop.late_s) == (3, 3.5)
    assert main.loop.stalls.value == 1
