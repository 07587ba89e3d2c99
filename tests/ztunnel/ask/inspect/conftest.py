"""Saved dumps and configuration that the commands of this folder read."""

import json
from pathlib import Path

import pytest

from tests.ztunnel.ask.inspect.harness import RUST
from tests.ztunnel.proxy.envoy.admin.reference import Reference, write_reference


@pytest.fixture
def saved(tmp_path: Path) -> str:
    (tmp_path / "dump.json").write_text(json.dumps(RUST))
    return str(tmp_path / "dump.json")


@pytest.fixture
def reference(tmp_path: Path) -> Reference:
    return write_reference(tmp_path)
