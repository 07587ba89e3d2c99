"""The table of limits: complete, as documented, and with the values of the environment."""

import json
import re
from dataclasses import fields
from pathlib import Path

import pytest

from hbone.limits import Limits
from ztunnel.ask.limits.command import markdown
from ztunnel.ask.limits.table import limits
from ztunnel.cli import main
from ztunnel.proxy.dataplane.half_open import HalfOpenLimits
from ztunnel.proxy.istio.environment import config_from

PAGE = Path(__file__).parents[4] / "docs" / "reliability.md"
DESCRIPTORS, MEMORY = 1_000_000, 4 << 30


def test_the_page_has_the_table() -> None:
    config = config_from({}, cpus=1, read_file=lambda path: None)
    table = "\n".join(markdown(limits(config, descriptors=DESCRIPTORS, memory_bytes=MEMORY)))
    assert table in PAGE.read_text()


def test_every_limit_is_in_the_table() -> None:
    config = config_from({}, cpus=1, read_file=lambda path: None)
    found = list(limits(config, descriptors=DESCRIPTORS, memory_bytes=MEMORY))
    named = {name for limit in found for name in re.findall(r"`(\w+)`", limit.name)}
    assert named == {field.name for field in fields(Limits)}
    values = [limit.value for limit in found]
    for field in fields(HalfOpenLimits):
        value = getattr(HalfOpenLimits(), field.name)
        assert (value if isinstance(value, tuple) else (value,)) in values, field.name


def test_the_command_prints_what_is_in_force(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("ZTUNNEL_HANDSHAKE_TIMEOUT", "3s")
    monkeypatch.setenv("ZTUNNEL_METRIC_SERIES", "777")
    assert main(["limits", "-o", "json"]) == 0
    rows = {row["name"]: row for row in json.loads(capsys.readouterr().out)["items"]}
    assert rows["handshake"]["value"] == [3.0]
    assert rows["metric series"]["value"] == [777]
    assert main(["limits"]) == 0
    table = capsys.readouterr().out
    assert table.startswith("LIMIT ")
    assert "`" not in table, "marks of the documentation"


def test_settings_that_cannot_be_used_are_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("ZTUNNEL_METRIC_SERIES", "many")
    assert main(["limits"]) == 2
    assert "ZTUNNEL_METRIC_SERIES" in capsys.readouterr().err
