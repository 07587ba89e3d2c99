"""Which worker begins with which tests."""

from pathlib import Path

import pytest

from tests.lanes import APART, COMPUTING, WAITING, order, unit_of

ROOT = Path(__file__).parents[1]


@pytest.mark.parametrize(
    ("node_id", "unit"),
    [
        ("tests/a/test_b.py::test_c", "tests/a/test_b.py"),
        ("tests/a/test_b.py::test_c[x::y]", "tests/a/test_b.py"),
        ("tests/a/test_b.py::test_c[user@host]", "tests/a/test_b.py"),
        ("tests/a/test_b.py::test_c[user@host]@Tunnels-native", "Tunnels-native"),
        ("tests/a/test_b.py::test_c@Tunnels-native", "Tunnels-native"),
        (f"{APART[0]}::test_c[x]", f"{APART[0]}::test_c[x]"),
    ],
)
def test_a_test_stays_with_its_group_or_its_file_unless_it_shares_nothing(node_id: str, unit: str) -> None:
    assert unit_of(node_id) == unit


@pytest.mark.parametrize("name", [*WAITING, *COMPUTING, *APART])
def test_every_named_test_file_exists(name: str) -> None:
    assert (ROOT / name).exists()


def test_a_worker_takes_its_own_kind_first_and_of_each_kind_the_longest() -> None:
    short = "tests/hbone/test_engine.py::test_a"
    waiting, computing = (
        [f"{start}test_b.py::test_c" if start.endswith("/") else f"{start}::test_c" for start in kind]
        for kind in (WAITING, COMPUTING)
    )
    units = [short, *reversed(waiting), *reversed(computing)]
    assert sorted(units, key=lambda unit: order(unit, waits=True)) == [*waiting, *computing, short]
    assert sorted(units, key=lambda unit: order(unit, waits=False)) == [*computing, short, *waiting]
