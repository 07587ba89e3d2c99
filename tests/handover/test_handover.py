"""The quick part of ``make handover``."""

import asyncio
from pathlib import Path

import pytest

from tests.handover.__main__ import shown
from tests.handover.generations import run
from tests.handover.traffic import KINDS

pytestmark = [pytest.mark.netns, pytest.mark.timeout(90)]


def test_connections_of_every_kind_survive_replacements_under_load(tmp_path: Path) -> None:
    report = asyncio.run(run(tmp_path, connections=25, replacements=2, pause_s=0.2))
    text = "\n".join(shown(report))
    assert report.outcome.failures == [], text
    assert all(report.outcome.done[kind] >= 5 for kind in KINDS), text
    assert all(each.given >= 10 and each.stayed == 0 for each in report.replacements), text
