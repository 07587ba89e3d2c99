"""Addons of a process: a changed file replaces its addon, and a faulty one does not."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from tests.ztunnel.proxy.addons.test_host import connecting
from ztunnel.proxy.addons import process
from ztunnel.proxy.addons.load import AddonError
from ztunnel.proxy.addons.process import AddonProcess
from ztunnel.proxy.addons.settings import AddonSettings, parse_spec

ADDON = """
from ztunnel.addons import Deny

class Gate:
    def configured(self, options):
        {configured}

    def connecting(self, facts):
        return Deny("{version}")
"""


def write(path: Path, version: str, configured: str = "pass") -> str:
    path.write_text(ADDON.format(version=version, configured=configured))
    return str(path)


@pytest.fixture(autouse=True)
def looks_often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process, "CHECK_EVERY_S", 0.05)


def running(path: str, body: Callable[[AddonProcess], Awaitable[None]]) -> None:
    async def main() -> None:
        async with AddonProcess(AddonSettings(specs=(parse_spec(path),))) as entered:
            await body(entered)

    # Not in virtual time, which does not wait for the thread that loads files.
    asyncio.run(main())


async def until(ready: Callable[[], object]) -> None:
    async with asyncio.timeout(30):
        while not ready():
            await asyncio.sleep(0.02)


def test_a_changed_file_replaces_its_addon(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "gate.py"

    async def body(running: AddonProcess) -> None:
        host = running.host
        assert (await connecting(host)).outcome.denied.endswith(": first")
        before = host.addons[0]
        write(path, "the second")
        await until(lambda: host.addons[0] is not before)
        assert (await connecting(host)).outcome.denied.endswith(": the second")
        assert dict(next(each for each in host.counts() if each.hook == "connecting").results) == {"deny": 2}

    running(write(path, "first"), body)


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("class Gate:\n  def connecting(self, facts: return", "SyntaxError"),
        (ADDON.format(version="x", configured="raise ValueError('no')"), "ValueError: no"),
        ("class Other:\n  def connecting(self, facts): pass", "its name has changed from gate to other"),
        (None, "no such file or directory"),
    ],
)
def test_last_good_version_stays_if_a_changed_file_cannot_be_loaded(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, text: str | None, fault: str
) -> None:
    path = tmp_path / "gate.py"

    async def body(running: AddonProcess) -> None:
        host = running.host
        if text is None:
            path.unlink()
        else:
            path.write_text(text)
        await until(lambda: host.problems)
        assert fault in host.states()[0].problem
        assert (await connecting(host)).outcome.denied.endswith(": first")
        write(path, "the repaired one")
        await until(lambda: not host.problems)
        assert (await connecting(host)).outcome.denied.endswith(": the repaired one")

    with caplog.at_level(logging.ERROR):
        running(write(path, "first"), body)
    (line,) = [each.getMessage() for each in caplog.records]
    assert line.startswith("addon gate: its changed file is not used: ")


def test_file_that_is_written_in_place_is_loaded_once_it_is_complete(tmp_path: Path) -> None:
    path = tmp_path / "gate.py"
    write(path, "first")

    async def main() -> None:
        process = AddonProcess(AddonSettings(specs=(parse_spec(str(path)),)))
        before = process.host.addons[0]
        with path.open("w") as file:  # the first part is an addon by itself, which denies no connection
            file.write("class Gate:\n  def opened(self, facts): pass\n")
            file.flush()
            await process.look()
            assert process.host.addons[0] is before
            file.write("  def connecting(self, facts):\n    return Deny('the second')\n")
            file.write("from ztunnel.addons import Deny\n")
        await process.look()
        assert (await connecting(process.host)).outcome.denied.endswith(": first")
        await process.look()
        assert (await connecting(process.host)).outcome.denied.endswith(": the second")
        other = tmp_path / "other.py"
        write(other, "the third")
        other.replace(path)  # a complete file
        await process.look()
        assert (await connecting(process.host)).outcome.denied.endswith(": the third")

    asyncio.run(main())


def test_started_version_with_another_name_is_ended(tmp_path: Path) -> None:
    path, ended = tmp_path / "gate.py", tmp_path / "ended"

    async def body(running: AddonProcess) -> None:
        path.write_text(
            "from pathlib import Path\n"
            "class Other:\n"
            "  def connecting(self, facts): pass\n"
            f"  def done(self): Path({str(ended)!r}).touch()"
        )
        await until(lambda: running.host.problems)
        assert ended.exists()

    running(write(path, "first"), body)


def test_a_changed_file_ends_a_suspension(tmp_path: Path) -> None:
    path = tmp_path / "gate.py"
    path.write_text("class Gate:\n  def connecting(self, facts): 1 / 0")

    async def body(running: AddonProcess) -> None:
        host = running.host
        await connecting(host)
        assert host.states()[0].suspended
        write(path, "repaired")
        await until(lambda: not host.states()[0].suspended)
        assert (await connecting(host)).outcome.denied.endswith(": repaired")

    running(str(path), body)


def test_an_addon_that_cannot_be_loaded_prevents_the_start(tmp_path: Path) -> None:
    with pytest.raises(AddonError, match="ValueError: no"):
        AddonProcess(AddonSettings(specs=(parse_spec(write(tmp_path / "a.py", "x", "raise ValueError('no')")),)))
