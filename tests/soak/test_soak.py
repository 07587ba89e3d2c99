"""A soak of a few seconds, too short for slopes: each kind of change happens once, and no application fails."""

import asyncio
from pathlib import Path

import pytest

from tests.soak.__main__ import soak
from tests.soak.recovery import measured

pytestmark = [pytest.mark.netns, pytest.mark.timeout(180)]


def test_every_kind_of_change_under_load(tmp_path: Path) -> None:
    run, of = asyncio.run(soak(0.2, tmp_path, every_s=4.0))
    assert of.failures == []
    kinds = {"requests", "bulk", "held", "pods", "policies", "endpoints", "control plane", "replaced"}
    assert kinds <= of.done.keys(), of.done
    assert run.restarts == 0


@pytest.mark.parametrize("workloads", [10, 3000], ids=["told by a control plane", "of a local file"])
def test_a_proxy_that_was_killed_serves_again(tmp_path: Path, workloads: int) -> None:
    (times,) = asyncio.run(measured(tmp_path, 1, workloads))
    assert 0.0 < times["imports, s"] < times["pods listening, s"]
    assert times["processor until then, s"] > 0.0
    assert times["memory then, MiB"] > 20.0
