"""The compiled build: same source, same tests; and the rule that keeps mypyc's mistake with coroutines away.

Compiled code does not look up names of its own modules, and the attributes of its classes cannot be replaced. So
tests that replace them run against the pure build only.
"""

import ast
import asyncio
import contextlib
import hashlib
import importlib.metadata
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Iterable
from pathlib import Path
from types import ModuleType

import pytest

from tests.apiserver.programs import cache
from tests.generated import at_night
from tests.handover.__main__ import shown
from tests.handover.generations import run

ROOT = Path(__file__).parents[1]
#: A fifth of the engine's tests with three quarters of their time: rates and sizes, which both builds share. Only
#: ``make nightly`` runs them compiled.
LONG = ("test_work.py", "test_windows.py", "test_spin.py", "test_frame_pairs.py")
#: How many builds the cache keeps: of a branch and of the one beside it, as commits and as nightly runs make them.
KEPT = 4
PLAIN = ("-p", "no:cacheprovider")
#: The packages with compiled modules, and those that they import.
PACKAGES = ("hbone", "tproxy", "xds", "ztunnel")
#: Tests of the steps that carry a connection in an Istio mesh, and of what they are made of, without those that
#: replace parts of compiled modules.
STEPS = (
    "tests/life/test_istio_walk.py",
    "tests/ztunnel/proxy/dataplane/test_live_table.py",
    "tests/ztunnel/proxy/flows/test_ring.py",
    "tests/ztunnel/proxy/istio/accounting/test_access_record.py",
    "tests/ztunnel/proxy/istio/accounting/test_flows.py",
    "tests/ztunnel/proxy/istio/path/test_inbound.py",
    "tests/ztunnel/proxy/istio/path/test_outbound.py",
    "tests/ztunnel/proxy/istio/path/test_planned.py",
    "--deselect=tests/ztunnel/proxy/istio/path/test_planned.py::test_error_in_a_step_ends_only_its_connection",
    "--deselect=tests/ztunnel/proxy/istio/path/test_planned.py::test_error_at_the_start_leaves_no_connection",
    "tests/ztunnel/proxy/istio/path/test_plans.py",
    "--deselect=tests/ztunnel/proxy/istio/path/test_plans.py::test_the_number_of_plans_is_bounded",
    "tests/ztunnel/proxy/istio/path/test_pod_sockets.py",
    "tests/ztunnel/proxy/istio/path/test_request_plans.py",
    "tests/ztunnel/runtime/test_accepting.py",
    "tests/ztunnel/runtime/test_descriptors.py",
    "tests/ztunnel/runtime/test_durations.py",
)


def setup_file() -> ModuleType:
    spec = importlib.util.spec_from_file_location("setup_file", ROOT / "setup.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


SETUP = setup_file()


def test_no_compiled_module_imports_a_package_whose_types_the_build_skips() -> None:
    """Its values would have no types, so that code with them would be compiled slower."""
    nodes = [node for path in SETUP.COMPILED for node in ast.walk(ast.parse((ROOT / path).read_text()))]
    found = {node.module or "" for node in nodes if isinstance(node, ast.ImportFrom)}
    found |= {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    packages = {name.partition(".")[0] for name in found}
    assert {"OpenSSL", "hbone"} <= packages
    assert packages.isdisjoint(SETUP.UNCOMPILED)


def test_images_and_wheels_are_built_with_the_types_of_all_packages_that_mypy_reads() -> None:
    """Without them the build fails, although it succeeds in an environment for development."""
    locks = [(ROOT / "requirements" / f"{name}.lock").read_text() for name in ("runtime", "compile")]
    locked = set(re.findall(r"^([\w-]+)==", "\n".join(locks), re.MULTILINE))
    installed = importlib.metadata.packages_distributions()
    read = {name.partition(".")[0] for name in imported_by(ROOT / path for path in SETUP.COMPILED)}
    stubs = {name for each in read.difference(SETUP.UNCOMPILED) for name in installed.get(f"{each}-stubs", ())}
    assert "types-protobuf" in stubs
    assert stubs <= locked


def imported_by(paths: Iterable[Path]) -> set[str]:
    """Return the names of all modules that files import, and that those of this project import in turn."""
    left, seen, names = list(paths), set[Path](), set[str]()
    while left:
        path = left.pop()
        if path in seen or not path.exists():
            continue
        seen.add(path)
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                found = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                found = [node.module or "", *(f"{node.module}.{alias.name}" for alias in node.names)]
            else:
                continue
            names.update(found)
            for name in found:
                place = ROOT.joinpath(*name.split("."))
                if "xds/proto/" not in str(place):  # generated files, of which each imports protobuf
                    left += (place.with_suffix(".py"), place / "__init__.py")
    return names


@pytest.mark.parametrize("path", SETUP.COMPILED)
def test_no_compiled_coroutine_waits_inside_try(path: str) -> None:
    waits = (ast.Await, ast.Yield, ast.YieldFrom, ast.AsyncWith, ast.AsyncFor)
    guards = (ast.Try, ast.TryStar, ast.With, ast.AsyncWith)
    tree = ast.parse((ROOT / path).read_text())
    guarded = [node for node in ast.walk(tree) if isinstance(node, guards)]
    wrong = [node.lineno for node in guarded if any(isinstance(inner, waits) for inner in ast.walk(node))]
    assert wrong == []


@pytest.mark.parametrize("path", SETUP.COMPILED)
def test_no_compiled_slice_has_a_call_with_an_effect_as_its_bound(path: str) -> None:
    """mypyc evaluates the bounds of a slice twice, unless the type of the object is built in."""
    tree = ast.parse((ROOT / path).read_text())
    bounds = [
        bound for node in ast.walk(tree) if isinstance(node, ast.Slice) for bound in (node.lower, node.upper)
    ]
    effects = (ast.Call, ast.Await, ast.NamedExpr, ast.Yield)
    found = [
        inner for bound in bounds if bound is not None for inner in ast.walk(bound) if isinstance(inner, effects)
    ]
    assert [ast.unparse(each) for each in found if not is_pure(each)] == []


def is_pure(call: ast.expr) -> bool:
    """Return whether a call of a built-in function can be repeated without an effect."""
    return isinstance(call, ast.Call) and isinstance(call.func, ast.Name) and call.func.id in ("len", "max", "min")


@pytest.fixture(scope="module")
def compiled_tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the packages and their tests, compiled. Builds are kept in the user's cache by their sources."""
    if shutil.which("cc") is None or not Path(sysconfig.get_path("include"), "Python.h").exists():
        pytest.skip("needs a C compiler and Python's headers")
    tree = tmp_path_factory.mktemp("compiled")
    for name in (*PACKAGES, "tests", "docs"):
        # With their bytecode: to rewrite the assertions of these tests takes 2 s for each call of pytest.
        shutil.copytree(ROOT / name, tree / name, ignore=shutil.ignore_patterns("*.so"))
    for name in ("setup.py", "pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, tree / name)
    built = cache().parent / "compiled" / build_key()
    if built.exists():
        built.touch()
        shutil.copytree(built, tree, dirs_exist_ok=True)
    else:
        run_in(tree, "setup.py", "-q", "build_ext", "--inplace")
        keep(tree, built)
    return tree


def build_key() -> str:
    """Return a digest of all that a build is made from: sources, locked packages, Python and C compiler."""
    digest = hashlib.sha256(optimisation().encode())
    inputs = ("setup.py", "pyproject.toml", "requirements/dev.lock")
    sources = (path for package in PACKAGES for path in sorted((ROOT / package).rglob("*.py")))
    for path in (*sources, *(ROOT / name for name in inputs)):
        text = path.read_bytes()
        digest.update(f"{path.relative_to(ROOT)} {len(text)} ".encode() + text)
    cc = compiler().get("CC", "cc")
    digest.update(subprocess.run([cc, "-v"], capture_output=True, check=True).stderr)
    flags = (*sysconfig.get_config_vars("CC", "CFLAGS", "LDSHARED"), *map(os.environ.get, ("CC", "CFLAGS")))
    digest.update(f"{sys.version} {flags}".encode())
    return digest.hexdigest()[:16]


def keep(tree: Path, built: Path) -> None:
    """Copy the shared libraries of a tree to a folder of the cache, and delete those used longest ago."""
    built.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=built.parent) as work:
        for library in (each for package in PACKAGES for each in (tree / package).rglob("*.so")):
            copy = Path(work, "new", library.relative_to(tree))
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(library, copy)
        with contextlib.suppress(OSError):  # another run was first
            Path(work, "new").rename(built)
    for old in sorted(built.parent.glob("*"), key=lambda path: path.stat().st_mtime)[:-KEPT]:
        shutil.rmtree(old, ignore_errors=True)


def compiler() -> dict[str, str]:
    """Return the variables that choose a compiler: without optimisation, clang takes half of gcc's time."""
    quick = optimisation() == "0" and "CC" not in os.environ and shutil.which("clang") is not None
    return {"CC": "clang"} if quick else {}


def optimisation() -> str:
    """Return the C compiler's level. mypyc's part is the same at any; an optimised build takes a minute longer."""
    return at_night("3", "0")


def run_in(tree: Path, *command: str) -> None:
    env = {
        **os.environ,
        **compiler(),
        "ZTUNNEL_COMPILE": "1",
        "ZTUNNEL_COMPILE_LEVEL": optimisation(),
        "PYTHONPATH": str(tree),
    }
    done = subprocess.run([sys.executable, *command], cwd=tree, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]


@pytest.mark.compiled
@pytest.mark.timeout(1200)
def test_the_engines_own_tests_pass_compiled(compiled_tree: Path) -> None:
    run_in(compiled_tree, "-c", "import hbone; assert hbone.build() == 'compiled'")
    left_out = [f"--ignore-glob=*/{name}" for name in at_night((), LONG)]
    run_in(compiled_tree, "-m", "pytest", "-q", *PLAIN, *left_out, "tests/hbone")
    # Files beside the packages are not part of an editable install.
    assert list(compiled_tree.glob("*.so")) == []


@pytest.mark.compiled
@pytest.mark.timeout(1200)
def test_the_tests_of_the_steps_pass_compiled(compiled_tree: Path) -> None:
    module = "ztunnel.proxy.istio.path.planned"
    run_in(compiled_tree, "-c", f"import {module} as module; assert module.__file__.endswith('.so')")
    run_in(compiled_tree, "-m", "pytest", "-q", *PLAIN, *STEPS)


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
