"""How many CPUs there are to use."""

import os
from pathlib import Path

import pytest

from ztunnel.proxy.addons.load import AddonError
from ztunnel.proxy.istio import command
from ztunnel.proxy.istio.path.node import check_addons
from ztunnel.runtime.settings import SettingsError


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


def test_addons_are_described_and_checked(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    addon = tmp_path / "gate.py"
    addon.write_text("class Gate:\n    def connecting(self, facts):\n        return None\n")
    env = {"XDS_ADDRESS": "", "FAKE_CA": "true", "ZTUNNEL_ADDONS": str(addon)}
    assert command.validate(command.check(env, "")) == 0
    assert "addons 1" in capsys.readouterr().err
    wrong = {**env, "ZTUNNEL_ADDON_OPTION": "gate.rate=5"}
    assert command.validate(command.check(wrong, "")) == 1
    said = capsys.readouterr().err
    assert "Error: addon gate: option rate: the addon has no options (ZTUNNEL_ADDON_OPTION)" in said


def test_options_of_addons_come_from_a_file(tmp_path: Path) -> None:
    options = tmp_path / "options.yaml"
    options.write_text("gate:\n  rate: 5\n")
    env = {
        "XDS_ADDRESS": "",
        "FAKE_CA": "true",
        "ZTUNNEL_ADDONS": "gate.py",
        "ZTUNNEL_ADDON_OPTIONS": str(options),
    }
    addons = command.check(env, "").addons
    assert addons is not None
    assert addons.options["gate"]["rate"].value == 5
    options.write_text("gate: [")
    with pytest.raises(SettingsError, match=f"ZTUNNEL_ADDON_OPTIONS: {options}"):
        command.check(env, "")
    with pytest.raises(SettingsError, match="no such file"):
        command.check({**env, "ZTUNNEL_ADDON_OPTIONS": "/nowhere"}, "")


def test_main_process_reports_addon_faults_before_starting_workers(tmp_path: Path) -> None:
    addon = tmp_path / "gate.py"
    done = tmp_path / "done"
    env = {"XDS_ADDRESS": "", "FAKE_CA": "true", "ZTUNNEL_ADDONS": str(addon)}
    text = "from pathlib import Path\nclass Gate:\n    def configured(self, options):\n        {}\n"
    addon.write_text(text.format("raise ValueError('no')"))
    with pytest.raises(AddonError, match="ValueError: no"):
        check_addons(command.check(env, ""))
    addon.write_text(text.format("pass") + f"    def done(self):\n        Path({str(done)!r}).touch()\n")
    check_addons(command.check(env, ""))
    assert done.exists()
