"""The demo of addons, and ``docs/addons.md``: its walk-through is typed, as root and as an ordinary user."""

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.generated import every_example
from tests.programs import needed

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "addons.md"

pytestmark = pytest.mark.netns


def commands() -> list[str]:
    """The walk-through's, a line each."""
    (block,) = re.findall(r"```sh\n(.*?)```", PAGE.read_text(), re.DOTALL)
    return str(block).splitlines()


@pytest.fixture
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Return a checkout that other users can read, in which files can be created."""
    path = Path("/tmp") / f"ztunnel-walk-{os.getpid()}"
    path.mkdir(mode=0o777)
    path.chmod(0o777)
    for name in ("deploy", "examples", "ztunnel", "hbone", "xds", "tproxy", "Makefile"):
        (path / name).symlink_to(ROOT / name)
    yield path
    shutil.rmtree(path)


def test_the_page_has_five_commands() -> None:
    assert len(commands()) == 5


def walked(folder: Path, *prefix: str) -> subprocess.CompletedProcess[str]:
    typed = [
        line.replace(". .venv/bin/activate", f". {Path(sys.prefix) / 'bin' / 'activate'}").replace(
            "make demo", f"make -o .venv/stamp PY={sys.executable} STAMP= demo"
        )
        for line in commands()
    ]
    script = "set -e\n" + "\n".join(typed) + "\n"
    return subprocess.run(
        [*prefix, "bash", "-c", script],
        cwd=folder,
        env={"PATH": os.environ["PATH"], "HOME": str(folder), "TMPDIR": "/tmp", "PYTHONDONTWRITEBYTECODE": "1"},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )


def judge(done: subprocess.CompletedProcess[str]) -> None:
    said = done.stdout + done.stderr
    assert done.returncode == 0, said
    assert "2 passed" in said
    assert "first_addon.py: no faults" in said
    assert "worker2: it is active" in said
    assert re.search(r"connecting +[1-9]\d* calls, [\d.]+ us each: none [1-9]", said), said


@pytest.mark.skipif(not every_example(), reason="as an ordinary user in each run: make nightly")
def test_the_walk_through_as_root(folder: Path) -> None:
    needed("make")
    judge(walked(folder))


def test_the_walk_through_as_an_ordinary_user(folder: Path) -> None:
    """A user namespace in which we are user 1000 and have no capability, as far as any program can see."""
    needed("make")
    needed("unshare")
    user = ("unshare", "--user", "--map-user=1000", "--map-group=1000")
    seen = subprocess.run(
        [*user, "grep", "CapEff", "/proc/self/status"], capture_output=True, text=True, check=False
    )
    if seen.returncode:
        pytest.skip("NOT TESTED: no user namespaces here")
    assert int(seen.stdout.split()[1], 16) == 0
    judge(walked(folder, *user))


def test_the_five_examples_in_the_mesh() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "deploy.demo", "--mode", "addons"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "FAIL" not in done.stdout
