"""``/stats`` against what Envoy 1.40 printed for the same values."""

import json

import pytest

from xds.model.re2 import Pattern
from ztunnel.proxy.envoy.stats.stats import Stats
from ztunnel.proxy.envoy.stats.stats_page import (
    Buckets,
    Choice,
    Kind,
    chosen,
    html_pieces,
    json_pieces,
    text_pieces,
)


@pytest.fixture
def stats() -> Stats:
    stats = Stats()
    scope = stats.scope("cluster_manager.cds")
    scope.counter("update_success").value = 1
    scope.counter("update_failure")
    scope.gauge("version", lambda: 13237225503670494420)
    scope.text("version_text", lambda: "1")
    scope.histogram("update_duration")
    server = stats.scope("server")
    server.histogram("initialization_time_ms").record(27.5)
    server.gauge("live", lambda: 1.0)
    return stats


def shown(stats: Stats, **choice: object) -> str:
    made = Choice(**choice)  # type: ignore[arg-type]
    return "".join(text_pieces(chosen(stats, made), made.buckets))


def test_order_and_form_of_lines(stats: Stats) -> None:
    assert shown(stats) == (
        'cluster_manager.cds.version_text: "1"\n'
        "cluster_manager.cds.update_failure: 0\n"
        "cluster_manager.cds.update_success: 1\n"
        "cluster_manager.cds.version: 13237225503670494420\n"
        "server.live: 1\n"
        "cluster_manager.cds.update_duration: No recorded values\n"
        "server.initialization_time_ms: P0(nan,27.5) P25(nan,27.5) P50(nan,27.5) P75(nan,27.5) P90(nan,27.5) "
        "P95(nan,27.5) P99(nan,27.5) P99.5(nan,27.5) P99.9(nan,27.5) P100(nan,27.5)\n"
    )


def test_histogram_buckets_of_the_text_page(stats: Stats) -> None:
    only = {"kind": Kind.HISTOGRAMS, "pattern": Pattern("initialization")}
    assert shown(stats, **only, buckets=Buckets.CUMULATIVE) == (
        "server.initialization_time_ms: B0.5(0,0) B1(0,0) B5(0,0) B10(0,0) B25(0,0) B50(0,1) B100(0,1) B250(0,1) "
        "B500(0,1) B1000(0,1) B2500(0,1) B5000(0,1) B10000(0,1) B30000(0,1) B60000(0,1) B300000(0,1) "
        "B600000(0,1) B1.8e+06(0,1) B3.6e+06(0,1)\n"
    )
    assert "B50(0,1) B100(0,0)" in shown(stats, **only, buckets=Buckets.DISJOINT)
    assert shown(stats, **only, buckets=Buckets.DETAILED).startswith(
        "server.initialization_time_ms:\n  totals=25,25:1\n  intervals=\n  summary=P0(nan,27.5) "
    )


def test_stats_page_filters_by_kind_use_and_name(stats: Stats) -> None:
    assert shown(stats, kind=Kind.TEXT_READOUTS) == 'cluster_manager.cds.version_text: "1"\n'
    assert shown(stats, kind=Kind.COUNTERS, used_only=True) == "cluster_manager.cds.update_success: 1\n"
    assert shown(stats, kind=Kind.GAUGES, pattern=Pattern("cds"), invert=True) == "server.live: 1\n"
    assert shown(stats, hidden_only=True) == ""


def as_json(stats: Stats, buckets: Buckets = Buckets.UNSET, pattern: str = "") -> str:
    found = chosen(stats, Choice(pattern=Pattern(pattern), buckets=buckets))
    return "".join(json_pieces(found, buckets))


def test_json_is_one_line(stats: Stats) -> None:
    text = as_json(stats, pattern="cds")
    assert text.startswith(
        '{"stats":[{"name":"cluster_manager.cds.version_text","value":"1"},'
        '{"name":"cluster_manager.cds.update_failure","value":0},'
    )
    assert '"value":13237225503670494420}' in text
    assert (
        '{"histograms":{"supported_quantiles":[0,25,50,75,90,95,99,99.5,99.9,100],"computed_quantiles":[' in text
    )
    assert '{"cumulative":null,"interval":null}' in text
    assert "\n" not in text
    assert '{"cumulative":27.5,"interval":null}' in as_json(stats, pattern="init")


def test_json_of_buckets(stats: Stats) -> None:
    cumulative = json.loads(as_json(stats, Buckets.CUMULATIVE, "init"))["stats"][0]["histograms"]
    assert cumulative[0]["name"] == "server.initialization_time_ms"
    assert cumulative[0]["buckets"][5] == {"upper_bound": 50, "interval": 0, "cumulative": 1}
    assert cumulative[0]["buckets"][6]["cumulative"] == 1
    disjoint = json.loads(as_json(stats, Buckets.DISJOINT, "init"))["stats"][0]["histograms"]
    assert disjoint[0]["buckets"][6]["cumulative"] == 0
    detailed = json.loads(as_json(stats, Buckets.DETAILED, "init"))["stats"][0]["histograms"]
    assert list(detailed) == ["supported_percentiles", "details"]
    assert detailed["details"][0]["totals"] == [{"lower_bound": 25, "width": 25, "count": 1}]


def test_empty_selection_is_a_valid_page(stats: Stats) -> None:
    assert as_json(stats, pattern="nothing") == '{"stats":[]}'
    assert shown(stats, pattern=Pattern("nothing")) == ""


def test_names_and_texts_cannot_forge_lines() -> None:
    stats = Stats()
    stats.scope("a\nforged: 1\x1b[1m").counter("b")
    stats.scope("c").text("d", lambda: "x\ny: 1")
    found = chosen(stats, Choice())
    assert "".join(text_pieces(found)).splitlines() == ['c.d: "x\\ny: 1"', "a\\nforged_ 1\\x1b[1m.b: 0"]
    assert "<script>" not in "".join(html_pieces(["<script>"]))
