"""The compiled build: same source, same tests; and the rule that keeps mypyc's mistake with coroutines away."""

import ast
import asyncio
import importlib.util
import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

from tests.generated import at_night, every_example
from tests.handover.__main__ import shown
from tests.handover.generations import run

ROOT = Path(__file__).parents[1]
#: A fifth of the engine's tests with three quarters of their time: rates and sizes, which both builds share. Only
#: ``make nightly`` runs them compiled.
LONG = ("test_work.py", "test_windows.py", "test_spin.py", "test_frame_pairs.py")


def compiled_modules() -> tuple[str, ...]:
    spec = importlib.util.spec_from_file_location("setup_file", ROOT / "setup.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    found: tuple[str, ...] = module.COMPILED
    return found


@pytest.mark.parametrize("path", compiled_modules())
def test_no_compiled_coroutine_waits_inside_try(path: str) -> None:
    waits = (ast.Await, ast.Yield, ast.YieldFrom, ast.AsyncWith, ast.AsyncFor)
    guards = (ast.Try, ast.TryStar, ast.With, ast.AsyncWith)
    tree = ast.parse((ROOT / path).read_text())
    guarded = [node for node in ast.walk(tree) if isinstance(node, guards)]
    wrong = [node.lineno for node in guarded if any(isinstance(inner, waits) for inner in ast.walk(node))]
    assert wrong == []


@pytest.fixture(scope="module")
def compiled_tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the engine and its tests, compiled."""
    if shutil.which("cc") is None or not Path(sysconfig.get_path("include"), "Python.h").exists():
        pytest.skip("needs a C compiler and Python's headers")
    tree = tmp_path_factory.mktemp("compiled")
    for name in ("hbone", "tests/hbone", "docs"):
        ignore = shutil.ignore_patterns("__pycache__", "*.so")
        shutil.copytree(ROOT / name, tree / name, ignore=ignore)
    support = ("tests/conftest.py", "tests/generated.py", "tests/lanes.py", "tests/selection.py")
    for name in ("setup.py", "pyproject.toml", "README.md", "LICENSE", *support):
        shutil.copy(ROOT / name, tree / name)
    run_in(tree, "setup.py", "-q", "build_ext", "--inplace")
    return tree


def run_in(tree: Path, *command: str) -> None:
    # mypyc's part is the same at any level; the C compiler takes a minute longer for the optimised build.
    level = "3" if every_example() else "0"
    env = {**os.environ, "ZTUNNEL_COMPILE": "1", "ZTUNNEL_COMPILE_LEVEL": level, "PYTHONPATH": str(tree)}
    done = subprocess.run([sys.executable, *command], cwd=tree, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]


@pytest.mark.compiled
@pytest.mark.timeout(1200)
def test_the_engines_own_tests_pass_compiled(compiled_tree: Path) -> None:
    run_in(compiled_tree, "-c", "import hbone; assert hbone.build() == 'compiled'")
    left_out = [f"--ignore-glob=*/{name}" for name in at_night((), LONG)]
    plain = ("-p", "no:cacheprovider", "-p", "no:xdist")
    run_in(compiled_tree, "-m", "pytest", "-q", *plain, *left_out, "tests/hbone")
    # Files beside the packages are not part of an editable install.
    assert list(compiled_tree.glob("*.so")) == []


@pytest.mark.compiled
@pytest.mark.netns
@pytest.mark.timeout(1200)
def test_connections_move_between_compiled_and_pure_builds(compiled_tree: Path, tmp_path: Path) -> None:
    builds = (f"{compiled_tree}:{ROOT}", str(ROOT))
    report = asyncio.run(run(tmp_path, connections=31, replacements=4, pause_s=0.2, builds=builds))
    text = "\n".join(shown(report))
    assert report.outcome.failures == [], text
    assert all(each.given >= 10 and each.stayed == 0 for each in report.replacements), text
    assert {each.builds for each in report.replacements} >= {("pure", "compiled"), ("compiled", "pure")}, text
