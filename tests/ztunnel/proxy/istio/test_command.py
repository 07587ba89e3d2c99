"""How many CPUs there are to use."""

import os
from pathlib import Path

import pytest

from ztunnel.proxy.istio import command


@pytest.mark.parametrize(
    ("text", "cpus"),
    [
        ("max 100000\n", 8),
        ("200000 100000\n", 2),
        ("150000 100000\n", 2),
        ("50000 100000\n", 1),
        ("6400000 100000\n", 8),
        ("", 8),
        (None, 8),
    ],
)
def test_cpus_are_what_affinity_and_control_group_leave(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str | None, cpus: int
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)))
    limit = tmp_path / "cpu.max"
    if text is not None:
        limit.write_text(text)
    assert command.cpus_available(limit) == cpus


def _described(env: dict[str, str]) -> str:
    return command.described(command.check(env, ""), "", 0, 0)


def test_the_source_of_calicos_policies_is_described() -> None:
    env = {"XDS_ADDRESS": "", "FAKE_CA": "true"}
    assert "policies" not in _described(env)
    described = _described({**env, "POLICY_SYNC": "/run/node.sock"})
    assert described == "Calico's policies from unix:/run/node.sock"
