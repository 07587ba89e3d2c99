"""The file that remembers sysctls: what it takes, what it survives."""

from pathlib import Path

import pytest

from tproxy.aio.sysctl_memory import SysctlMemory
from tproxy.resources import SysctlKey

ALL = SysctlKey("ipv4", "all", "rp_filter")
DEVICE = SysctlKey("ipv4", "eth0.5", "rp_filter")


def test_the_first_value_of_a_key_stays_until_it_is_forgotten(tmp_path: Path) -> None:
    memory = SysctlMemory(7, tmp_path / "run")
    assert memory.load() == {}
    memory.save({ALL: "1"})
    memory.save({ALL: "0", DEVICE: "2"})
    assert SysctlMemory(7, tmp_path / "run").load() == {ALL: "1", DEVICE: "2"}
    assert SysctlMemory(8, tmp_path / "run").load() == {}
    memory.forget([ALL])
    assert memory.load() == {DEVICE: "2"}
    memory.forget([DEVICE])
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("content", ["", "{}", "[1]", '[["ipv4"]]', "\\x00"])
def test_a_damaged_file_is_none(tmp_path: Path, content: str, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "7.json").write_text(content)
    memory = SysctlMemory(7, tmp_path)
    assert memory.load() == {}
    memory.save({ALL: "1"})
    assert memory.load() == {ALL: "1"}


def test_without_a_cookie_or_a_folder_there_is_no_memory(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for memory in (SysctlMemory(None, tmp_path), SysctlMemory(7, tmp_path / "file" / "run")):
        memory.save({ALL: "1"})
        assert memory.load() == {}
        memory.forget([ALL])
