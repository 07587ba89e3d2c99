"""Reasons of failures against the page about them, and the times and reasons that a connection leaves behind."""

import re
from contextlib import suppress
from pathlib import Path

import pytest

from tests.ztunnel.proxy.istio.accounting.test_access_record import a_record, with_node
from tests.ztunnel.proxy.istio.nodes import Lines, StoppedClock
from tests.ztunnel.proxy.istio.pages import samples
from ztunnel.proxy.dataplane.reasons import Reason
from ztunnel.proxy.flows.times import HISTOGRAMS
from ztunnel.proxy.istio.accounting.access_record import Direction
from ztunnel.proxy.istio.accounting.metrics import Metrics
from ztunnel.proxy.istio.accounting.outcome import POLICY_CHANGE, EarlyDeny, Failed, of_reason
from ztunnel.proxy.istio.certificates.manager import Moments
from ztunnel.proxy.istio.path.node import Node

PAGE = (Path(__file__).parents[5] / "docs" / "troubleshooting.md").read_text()


def test_documentation_lists_every_failure_reason() -> None:
    listed = PAGE.partition("## Reasons in metrics")[2].partition("\n## ")[0]
    assert set(re.findall(r"^\| `(\w+)`", listed, re.MULTILINE)) == set(Reason)


def test_times_and_reasons_of_connections(tmp_path: Path) -> None:
    def check(node: Node, clock: StoppedClock, lines: Lines) -> None:
        good, refused, denied = (a_record(node) for _ in range(3))
        application = a_record(node, direction=Direction.INBOUND)
        reset, moved = a_record(node), a_record(node)
        for record in (good, refused, reset):
            record.opened(settled=False)
        application.opened()
        moved.came(100.0)
        clock.passed_s = 0.002
        good.settled()
        reset.settled()
        clock.passed_s = 3.0
        good.complete(of_reason(POLICY_CHANGE))
        refused.complete(Failed("io error: Connection refused (os error 111)", Reason.REFUSED))
        application.complete(Failed("connection failed: deadline has elapsed", Reason.TIMEOUT))
        denied.denied_early(EarlyDeny("dns lookup: x", Reason.DNS))
        reset.complete()  # an ordinary end
        moved.complete()
        assert node.metrics.errors == {
            ("source", "relay", "policy_change"): 1,
            ("source", "connect", "refused"): 1,
            ("destination", "connect", "timeout"): 1,
            ("source", "early", "dns"): 1,
        }
        connects = node.metrics.connects
        assert connects["hbone", "ok"].count == 2
        assert connects["hbone", "ok"].total_s == pytest.approx(0.004)
        assert connects["hbone", "failed"].total_s == pytest.approx(3.0)
        assert dict(connects["hbone", "ok"].cumulative())["0.001"] == 0
        assert dict(connects["hbone", "ok"].cumulative())["0.0025"] == 2
        assert node.metrics.lengths["source", "hbone"].total_s == pytest.approx(3.0 * 3 + 103.0)
        assert node.metrics.lengths["destination", "hbone"].count == 1
        # Workers' counts add up on the page.
        page = node.metrics.page_with()
        for part in node.metrics.counts():
            page.add(part, lost=True)
        text = samples(page, "ztunnel_connection_errors_total")
        assert sorted(text.values()) == [2, 2, 2, 2]
        assert sum(samples(page, "ztunnel_connect_seconds_count").values()) == 6

    with_node(tmp_path, check)


def test_expiry_times_are_on_the_metrics_page() -> None:
    metrics = Metrics("v", 10)
    assert samples(metrics, "ztunnel_root_expiry_seconds") == {}
    metrics.certificates = lambda: Moments({"spiffe://t/ns/n/sa/a": 1e9}, 2e9, {"ok": 3, "failed": 4})
    page = metrics.page_with()
    assert list(samples(page, "istio_cert_expiry_seconds").values()) == [1e9]
    assert list(samples(page, "ztunnel_root_expiry_seconds").values()) == [2e9]
    assert sorted(samples(page, "ztunnel_certificate_fetches_total").values()) == [3, 4]


def test_the_series_of_times_do_not_grow_with_the_mesh() -> None:
    metrics = Metrics("v", 10)
    number = 0
    for family in HISTOGRAMS:
        for times in metrics.histograms(family).values():
            times.observe(0.1)
            number += 1
    found = [samples(metrics, each.name + end) for each in HISTOGRAMS for end in ("_bucket", "_sum", "_count")]
    assert sum(len(each) for each in found) == number * (13 + 2)
    assert number == 16


def test_the_configuration_is_on_the_page() -> None:
    metrics = Metrics("v", 10)
    metrics.objects = lambda: {"workloads": 3, "services": 2, "policies": 1}
    metrics.refused = lambda: {"address": 0, "policy": 4}
    page = metrics.page_with()
    assert sorted(samples(page, "ztunnel_mesh_objects").values()) == [1, 2, 3]
    assert sorted(samples(page, "ztunnel_xds_refused_resources").values()) == [0, 4]


def test_failed_waits_are_counted(tmp_path: Path) -> None:
    def check(node: Node, clock: StoppedClock, lines: Lines) -> None:
        with suppress(TimeoutError), node.waiting("policy"):
            clock.passed_s = 5.0
            raise TimeoutError
        assert node.metrics.waits["policy",].total_s == 5.0
        node.half_open.finished(0.25, False)
        assert node.metrics.handshakes["server", "failed"].total_s == 0.25

    with_node(tmp_path, check)
