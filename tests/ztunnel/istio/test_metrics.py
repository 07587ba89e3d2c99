"""Pages against section and order of upstream's, and what is bounded."""

import gzip
import zlib

import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families

from hbone.aio.relay import ByteCounts
from hbone.headers import Baggage
from tests.ztunnel.istio.nodes import LOCAL
from xds.model.mesh import Changes
from xds.model.service import Service
from xds.model.workload import WorkloadUid
from ztunnel.istio.admin.metrics_page import OPENMETRICS, PLAIN, accepts, page
from ztunnel.istio.metrics import (
    EXPIRY_S,
    DnsDurations,
    Gauge,
    Metrics,
    Side,
    TrafficSeries,
    traffic_labels,
)

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


def text_of(metrics: Metrics, accept: str = "", encoding: str = "") -> str:
    return "".join(str(piece) for piece in page(metrics, accept, encoding).body)


def opened(
    metrics: Metrics, labels: tuple[str, ...] | None = None, *uids: str, now_s: float = 0.0
) -> TrafficSeries:
    return metrics.opened(labels or full(), uids, ByteCounts(), now_s)


def full(reporter: str = "source") -> tuple[str, ...]:
    side = Side.of(LOCAL, str(LOCAL.identity))
    return traffic_labels(reporter, side, side, Service(name="n", namespace="ns", hostname="h"), secured=True)


def test_every_traffic_metric_with_its_labels() -> None:
    metrics = Metrics("1.30", 100)
    series = opened(metrics)
    series.finished("-", None)
    opened(metrics).finished("DENY", None)
    side = (
        '{0}_workload="local-deployment",{0}_canonical_service="local-app",{0}_canonical_revision="v1",'
        '{0}_workload_namespace="default",{0}_principal="spiffe://cluster.local/ns/default/sa/default",'
        '{0}_app="local-app",{0}_version="v1",{0}_cluster="unknown"'
    )
    labels = (
        f'{{reporter="source",{side.format("source")},destination_service="h",'
        f'destination_service_namespace="ns",destination_service_name="n",{side.format("destination")},'
        'request_protocol="tcp",response_flags="FLAGS",connection_security_policy="mutual_tls",'
        'source_region="eu",source_zone="eu-1",destination_region="eu",destination_zone="eu-1"}'
    )
    none, deny = labels.replace("FLAGS", "-"), labels.replace("FLAGS", "DENY")
    connections = "The total number of TCP connections"
    size = "The size of total bytes {} in case of a TCP connection."
    expected = f"""# HELP istio_build Istio component build info.
# TYPE istio_build gauge
istio_build{{component="ztunnel",tag="1.30"}} 1
# HELP istio_tcp_connections_opened {connections} opened.
# TYPE istio_tcp_connections_opened counter
istio_tcp_connections_opened_total{none} 2
# HELP istio_tcp_connections_closed {connections} closed.
# TYPE istio_tcp_connections_closed counter
istio_tcp_connections_closed_total{none} 1
istio_tcp_connections_closed_total{deny} 1
# HELP istio_tcp_connections_failed {connections} that failed (unstable).
# TYPE istio_tcp_connections_failed counter
istio_tcp_connections_failed_total{deny} 1
# HELP istio_tcp_received_bytes {size.format("received during request")}
# TYPE istio_tcp_received_bytes counter
# UNIT istio_tcp_received_bytes bytes
istio_tcp_received_bytes_total{none} 0
# HELP istio_tcp_sent_bytes {size.format("sent during response")}
# TYPE istio_tcp_sent_bytes counter
# UNIT istio_tcp_sent_bytes bytes
istio_tcp_sent_bytes_total{none} 0
"""
    assert text_of(metrics).startswith(expected)


def test_labels_are_in_upstreams_order() -> None:
    metrics = Metrics("v", 100)
    opened(metrics)
    line = next(
        line for line in text_of(metrics).splitlines() if line.startswith("istio_tcp_connections_opened_total")
    )
    names = [pair.partition("=")[0] for pair in line.partition("{")[2].rpartition("}")[0].split(",")]
    assert names == ORDER


def test_without_anybody_known_there_are_no_places() -> None:
    labels = traffic_labels("destination", Side(), Side(), None, secured=False)
    assert len(labels) == len(ORDER) - 4
    assert set(labels) == {"destination", "unknown", "tcp", "-"}


def test_the_application_of_baggage_is_the_workload() -> None:
    baggage = Baggage(
        cluster_id="c", namespace="n", workload_name="w", service_name="s", revision="v", region="r", zone="z"
    )
    side = Side.of_baggage(baggage, "p")
    assert side == Side("w", "s", "v", "n", "p", "w", "v", "c", "r", "z", known=True)
    assert not Side.of_baggage(Baggage()).known


def test_the_page_is_openmetrics_that_parses() -> None:
    metrics = Metrics('we"ird\\\n', 100)
    opened(metrics)
    metrics.dns_requests[("a", "udp", "x", "y")] = 2
    metrics.dns_durations[("a", "udp", "x", "y")] = DnsDurations()
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


def test_only_what_is_stable_says_nothing_about_it() -> None:
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


def test_buckets_are_upstreams() -> None:
    durations = DnsDurations()
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


@pytest.mark.parametrize(
    ("accept", "content_type"),
    [
        ("", PLAIN),
        ("text/plain", PLAIN),
        ("*/*", PLAIN),
        ("application/openmetrics-text", OPENMETRICS),
        ("application/openmetrics-text;version=1.0.0;q=0.5,text/plain;q=0.2", OPENMETRICS),
        ("text/plain, application/openmetrics-text; version=0.0.1", OPENMETRICS),
        ("application/openmetrics-textual", PLAIN),
    ],
)
def test_content_types(accept: str, content_type: str) -> None:
    answer = page(Metrics("v", 100), accept, "")
    assert answer.content_type == content_type
    assert ("vary", "accept-encoding") in answer.headers
    assert "".join(str(piece) for piece in answer.body).endswith("# EOF\n")


@pytest.mark.parametrize(("encoding", "unpack"), [("gzip", gzip.decompress), ("deflate", zlib.decompress)])
def test_compression(encoding: str, unpack: object) -> None:
    metrics = Metrics("v", 100)
    opened(metrics)
    answer = page(metrics, "", f"br, {encoding};q=0.5")
    assert ("content-encoding", encoding) in answer.headers
    packed = b"".join(piece for piece in answer.body if isinstance(piece, bytes))
    assert callable(unpack)
    assert unpack(packed).startswith(b"# HELP istio_build")
    assert unpack(packed).endswith(b"# EOF\n")


@pytest.mark.parametrize(
    ("header", "accepted"),
    [
        ("gzip", True),
        ("GZIP", True),
        ("br, gzip", True),
        ("gzip;q=0", False),
        ("gzip; q=0.0", False),
        ("gzip;q=0.001", True),
        ("", False),
        ("x-gzip", False),
        ("*", False),
    ],
)
def test_codings(header: str, accepted: bool) -> None:
    assert accepts(header, "gzip") is accepted


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


def test_series_in_use_or_used_again_do_not() -> None:
    metrics = Metrics("v", 100)
    series = opened(metrics, full(), "a")
    metrics.changed(gone("a"), [])
    assert metrics.expire(10 * EXPIRY_S) == 0  # its connection lives
    series.finished("-", None)
    opened(metrics, full(), "a", now_s=EXPIRY_S).finished("-", None)  # the workload came back
    assert metrics.expire(10 * EXPIRY_S) == 0


def test_a_changed_workload_is_still_there() -> None:
    metrics = Metrics("v", 100)
    opened(metrics, full(), "a").finished("-", None)
    metrics.changed(gone("a"), ["a"])
    assert metrics.expire(10 * EXPIRY_S) == 0


def test_beyond_the_budget_strangers_share() -> None:
    metrics = Metrics("v", 2)
    labels = [
        traffic_labels("source", Side(workload=str(number), known=True), Side(), None, secured=True)
        for number in range(5)
    ]
    series = [opened(metrics, each) for each in labels]
    assert series[2] is series[3] is series[4]
    assert (len(metrics.series), metrics.over_budget) == (3, 3)
    shared = dict(zip(ORDER, series[4].labels, strict=True))
    assert shared["reporter"] == "source"
    assert shared["connection_security_policy"] == "mutual_tls"
    assert shared["source_workload"] == shared["source_region"] == "unknown"
    assert "ztunnel_metric_series_over_budget_total 3\n" in text_of(metrics)


def test_running_relays_are_counted_when_somebody_asks() -> None:
    metrics = Metrics("v", 100)
    counts = ByteCounts()
    series = metrics.opened(full(), (), counts, 0.0)
    counts._sent, counts._received = 10, 20
    text = text_of(metrics)
    assert "istio_tcp_received_bytes_total" in text
    assert [line.rpartition(" ")[2] for line in text.splitlines() if "bytes_total{" in line] == ["10", "20"]
    series.finished("-", counts)
    assert [line.rpartition(" ")[2] for line in text_of(metrics).splitlines() if "bytes_total{" in line] == [
        "10",
        "20",
    ]


def test_one_page_is_the_sum_of_processes() -> None:
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
        worker.authorization_dry_run[("p", "DENY", "match")] = number
        worker.connect_retries = worker.over_budget = number
    main.opened(full("destination"), (), ByteCounts(), 0.0)
    summed = main.page_with()
    for worker in others:
        for part in worker.counts():
            summed.add(part)
    text = text_of(summed)
    for line in (
        'istio_tcp_sockets_open{reporter="source"} 3',
        'istio_crl_policy_rejections_total{reporter="source"} 3',
        'ztunnel_authorization_dry_run_total{policy="p",action="DENY",result="match"} 3',
        "ztunnel_connect_retries_total 3",
        "ztunnel_metric_series_over_budget_total 3",
        "ztunnel_metric_series 2",
        'istio_xds_message_total{url="t"} 1',
        "g 7",
    ):
        assert f"{line}\n" in text
    traffic = {
        line.partition("{")[0]: line.rpartition(" ")[2]
        for line in text.splitlines()
        if 'reporter="source"' in line
    }
    assert traffic["istio_tcp_connections_opened_total"] == "4"
    assert traffic["istio_tcp_connections_closed_total"] == traffic["istio_tcp_connections_failed_total"] == "2"
    assert (traffic["istio_tcp_received_bytes_total"], traffic["istio_tcp_sent_bytes_total"]) == ("30", "3")
    assert 'hostname="host"} 3\n' in text
    # The page is apart: what it adds up changes nobody's numbers.
    assert main.sockets_open["source"] == 0
    assert len(others[0].series) == len(main.series) == 1


def test_many_series_come_in_parts() -> None:
    metrics, summed = Metrics("v", 5000), Metrics("v", 10)
    for number in range(123):
        opened(
            metrics, traffic_labels("source", Side(workload=str(number), known=True), Side(), None, secured=True)
        )
    parts = list(metrics.counts())
    assert [len(part.traffic) for part in parts] == [0, 50, 50, 23]
    for part in parts:
        summed.add(part)
    assert len(summed.series) == 123  # each process has its budget
    assert summed.over_budget == 0


def test_what_a_lost_process_counted_stays_and_its_connections_are_closed() -> None:
    main, lost = Metrics("v", 100), Metrics("v", 100)
    for _ in range(3):
        series = opened(lost, full(), "a")
    series.finished("DENY", None)
    lost.sockets_open["source"] = 2
    for part in lost.counts():
        main.add(part, lost=True, now_s=100.0)
    text = text_of(main)
    closed = [line for line in text.splitlines() if line.startswith("istio_tcp_connections_closed_total")]
    assert sorted(line.rpartition(" ")[2] for line in closed) == ["1", "2"]
    assert 'istio_tcp_sockets_open{reporter="source"} 0\n' in text
    # Its series expire as any other.
    assert main.expire(100.0 + 10 * EXPIRY_S) == 0
    main.changed(gone("a"), [])
    assert main.expire(100.0 + EXPIRY_S - 1) == 0
    assert main.expire(100.0 + EXPIRY_S + 1) == 1
