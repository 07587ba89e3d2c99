"""The tests that ``make check`` runs are those of the pure core, whole."""

from pathlib import Path

import pytest

from tests.selection import is_core

TESTS = Path(__file__).parent


@pytest.mark.parametrize(
    ("file", "core"),
    [
        ("hbone/test_engine.py", True),
        ("ztunnel/proxy/istio/path/test_balance.py", True),
        ("hbone/aio/test_relay.py", False),
        ("ztunnel/proxy/envoy/test_proxy.py", False),
        ("netns/test_lab.py", False),
    ],
)
def test_a_file_is_judged_by_what_it_and_its_helpers_import(file: str, core: bool) -> None:
    assert is_core(TESTS / file) is core


def test_most_files_of_the_core_are_chosen() -> None:
    """A helper that begins to open sockets takes all its users out: that is a reason to divide it."""
    chosen = [path for path in TESTS.rglob("test_*.py") if is_core(path)]
    assert len(chosen) > 150
