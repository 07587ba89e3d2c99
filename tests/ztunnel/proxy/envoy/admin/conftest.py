"""The proxy of the reference configuration, for the tests of its admin server."""

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.ztunnel.proxy.envoy.admin.harness import Answer, serve
from tests.ztunnel.proxy.envoy.admin.reference import Reference, write_reference


@pytest.fixture
def reference(tmp_path: Path) -> Reference:
    return write_reference(tmp_path)


@pytest.fixture
def answers(reference: Reference) -> Callable[..., list[Answer]]:
    """Answers of one running proxy to several GETs."""

    def ask(*paths: str) -> list[Answer]:
        found: list[Answer] = []
        serve(reference, lambda running: found.extend(running.admin.get(path) for path in paths))
        return found

    return ask
