"""Each mutant changes one thing, and code that no test could check is not changed."""

import ast
import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.mutation.__main__ import TARGETS
from tests.mutation.mutants import mutant, places

SOURCE = '''"""Doc 1."""

LIMIT: "Literal[3]" = 3


def f(a: int, b: int = 1) -> bool:
    """Doc 2."""
    if a < b and not (a == 0):
        return True
    return a + b in (4,)
'''


def test_every_place_is_one_change() -> None:
    found = places(SOURCE)
    assert len(found) == 11
    original = ast.dump(ast.parse(SOURCE))
    mutants = [ast.dump(mutant(SOURCE, number)) for number in range(len(found))]
    assert original not in mutants
    assert len(set(mutants)) == len(found)


def test_the_place_is_what_changes() -> None:
    number = places(SOURCE).index("line 8: Lt becomes LtE")
    assert "if a <= b and" in ast.unparse(mutant(SOURCE, number))


@pytest.mark.parametrize(("number", "status"), [(-1, 0), (0, 1), (1, 0)])
def test_tests_run_against_the_mutant(tmp_path: Path, number: int, status: int) -> None:
    (tmp_path / "subject.py").write_text("def f(a): return a > 2\n")
    test = tmp_path / "test_it.py"
    test.write_text("import subject\n\n\ndef test_it() -> None: assert subject.f(9) and not subject.f(2)\n")
    assert places("def f(a): return a > 2\n") == ["line 1: Gt becomes GtE", "line 1: 2 becomes 3"]
    done = subprocess.run(
        [sys.executable, "-m", "tests.mutation.child", "subject", str(number), str(test)],
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        capture_output=True,
        check=False,
    )
    assert done.returncode == status, done.stdout


@pytest.mark.parametrize("module", TARGETS)
def test_modules_and_their_tests_exist(module: str) -> None:
    assert importlib.util.find_spec(module) is not None
    root = Path(__file__).parents[2]
    assert [path for path in TARGETS[module] if not (root / path).exists()] == []
