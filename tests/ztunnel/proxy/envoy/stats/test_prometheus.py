"""Both forms of the metrics page."""

import re

import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics
from prometheus_client.parser import text_string_to_metric_families as parse_text

from ztunnel.proxy.envoy.stats import prometheus
from ztunnel.proxy.envoy.stats.prometheus import envoy_text, scraped
from ztunnel.proxy.envoy.stats.stats import Stats, cluster_scope
from ztunnel.proxy.flows.times import ConnectionTimes
from ztunnel.runtime.http.exposition import page
from ztunnel.runtime.http.page import PageRequest

OPENMETRICS = "application/openmetrics-text; version=1.0.0"


@pytest.fixture
def stats() -> Stats:
    stats = Stats()
    for name in ("spiffe://b/x", 'quote"back\\slash\nline'):
        scope = cluster_scope(stats, name)
        scope.counter("upstream_cx_total").value = 3
        scope.counter("upstream_cx_connect_fail").value = 1
        scope.gauge("upstream_cx_active").value = 2.0
    stats.scope("server").gauge("live", lambda: 1.0)
    histogram = stats.scope("server").histogram("initialization_time_ms")
    histogram.record(27.5)
    histogram.record(0.1)
    stats.scope("cluster_manager.cds").text("version_text", lambda: 'v"1')
    return stats


def text_of(stats: Stats, accept: str) -> str:
    answer = page(scraped(stats, ConnectionTimes()), PageRequest(method="GET", path="/metrics", accept=accept))
    return b"".join(piece for piece in answer.body if isinstance(piece, bytes)).decode()


def test_prometheus_page_equals_envoys_text(stats: Stats) -> None:
    text = "".join(envoy_text(stats, stats.texts))
    assert "# TYPE envoy_server_live gauge\nenvoy_server_live{} 1\n" in text
    assert 'envoy_cluster_upstream_cx_total{envoy_cluster_name="spiffe://b/x"} 3\n' in text
    assert 'envoy_cluster_manager_cds_version_text{text_value="v\\"1"} 0\n' in text
    lines = [line for line in text.splitlines() if line.startswith("envoy_server_initialization_time_ms")]
    assert lines[0] == 'envoy_server_initialization_time_ms_bucket{le="0.5"} 1'
    assert lines[5] == 'envoy_server_initialization_time_ms_bucket{le="50"} 2'
    assert lines[-4:] == [
        'envoy_server_initialization_time_ms_bucket{le="3600000"} 2',
        'envoy_server_initialization_time_ms_bucket{le="+Inf"} 2',
        "envoy_server_initialization_time_ms_sum{} 27.6",
        "envoy_server_initialization_time_ms_count{} 2",
    ]
    kinds = [line.split()[-1] for line in text.splitlines() if line.startswith("# TYPE")]
    assert kinds == sorted(kinds)


def test_envoys_text_is_prometheus_text(stats: Stats) -> None:
    found = {family.name: family for family in parse_text("".join(envoy_text(stats)))}
    labels = [sample.labels for sample in found["envoy_cluster_upstream_cx_active"].samples]
    assert {"envoy_cluster_name": 'quote"back\\slash\nline'} in labels


def test_summaries_of_histograms(stats: Stats) -> None:
    text = "".join(envoy_text([m for m in stats if "initialization" in m.name], summaries=True))
    assert text.startswith("# TYPE envoy_server_initialization_time_ms summary\n")
    assert 'envoy_server_initialization_time_ms{quantile="0.995"}' in text
    assert text.endswith("_count{} 2\n")


def test_many_metrics_are_grouped_in_steps(stats: Stats, monkeypatch: pytest.MonkeyPatch) -> None:
    text, scrape = "".join(envoy_text(stats)), text_of(stats, "")
    monkeypatch.setattr(prometheus, "_AT_ONCE", 1)
    pieces = list(envoy_text(stats))
    grouped = next(number for number, piece in enumerate(pieces) if piece)
    assert grouped >= len(list(stats)) == 8
    assert "".join(pieces) == text
    answer = page(scraped(stats, ConnectionTimes()), PageRequest(method="GET", path="/metrics"))
    assert [piece for piece, _ in zip(answer.body, range(8), strict=False)] == [b""] * 8
    assert text_of(stats, "").partition("# HELP process")[0] == scrape.partition("# HELP process")[0]


GAUGES = ("envoy_cluster_upstream_cx_active", "envoy_server_live")


def test_names_do_not_depend_on_the_format(stats: Stats) -> None:
    plain, openmetrics = text_of(stats, "text/plain"), text_of(stats, OPENMETRICS)

    def samples(text: str) -> set[str]:
        return {re.split(r"[{ ]", line)[0] for line in text.splitlines() if line.startswith("envoy")}

    assert samples(plain) == samples(openmetrics)
    types = {family.name: family.type for family in parse_openmetrics(openmetrics)}
    assert types["envoy_cluster_upstream_cx"] == "counter"
    assert types["envoy_cluster_upstream_cx_connect_fail"] == "unknown"
    assert types["envoy_server_initialization_time_ms"] == "histogram"
    assert "process_resident_memory_bytes" in types
    for name in samples(plain):
        if not name.endswith(("_bucket", "_sum", "_count")):
            assert f"# TYPE {name} {'gauge' if name in GAUGES else 'counter'}\n" in plain
