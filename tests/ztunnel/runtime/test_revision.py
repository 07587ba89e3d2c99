"""The commit of a package that was built, of a checkout, and of neither."""

import subprocess
import sys
from pathlib import Path

import pytest

from ztunnel.runtime.revision import RECORD, Revision, revision, revision_of

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@pytest.mark.parametrize(
    ("recorded", "expected"),
    [(COMMIT, Revision(COMMIT, "Clean")), (f"{COMMIT}-dirty\n", Revision(COMMIT, "Modified"))],
)
def test_a_built_package_has_it_on_record(tmp_path: Path, recorded: str, expected: Revision) -> None:
    (tmp_path / RECORD).write_text(recorded)
    assert revision_of(tmp_path) == expected


def git(*arguments: str, folder: Path) -> str:
    who = ["-c", "user.name=a", "-c", "user.email=a@b", "-c", "commit.gpgsign=false"]
    return subprocess.run(
        ["git", *who, *arguments], cwd=folder, check=True, capture_output=True, text=True
    ).stdout.strip()


def repository(folder: Path) -> str:
    git("init", "--quiet", folder=folder)
    (folder / "ztunnel").mkdir()
    (folder / "ztunnel" / "__init__.py").touch()
    git("add", ".", folder=folder)
    git("commit", "--quiet", "-m", "a", folder=folder)
    return git("rev-parse", "HEAD", folder=folder)


def test_a_checkout_is_asked_however_its_head_is_kept(tmp_path: Path) -> None:
    main = tmp_path / "main"
    main.mkdir()
    commit = repository(main)
    assert revision_of(main / "ztunnel") == Revision(commit, "unknown")
    git("worktree", "add", "--quiet", "-b", "other", "../other", folder=main)
    assert revision_of(tmp_path / "other" / "ztunnel").commit == commit
    git("pack-refs", "--all", folder=main)
    assert revision_of(main / "ztunnel").commit == commit
    assert revision_of(tmp_path / "other" / "ztunnel").commit == commit
    git("checkout", "--quiet", "--detach", folder=main)
    assert revision_of(main / "ztunnel").commit == commit


@pytest.mark.parametrize("damage", ["absent", "empty", "binary"])
def test_without_either_it_is_unknown(tmp_path: Path, damage: str) -> None:
    if damage != "absent":
        (tmp_path / ".git").mkdir()
        (tmp_path / ".git" / "HEAD").write_bytes(b"" if damage == "empty" else b"\xff\xfe")
    assert revision_of(tmp_path / "ztunnel") == Revision("unknown", "unknown")


def test_this_tree_has_one() -> None:
    here = Path(__file__).parents[3]
    if not (here / ".git").exists():
        pytest.skip("NOT TESTED: no repository here")
    assert revision().commit == git("rev-parse", "HEAD", folder=here)


def test_the_build_records_it(tmp_path: Path) -> None:
    """setup.py's own build step records it, on a tree of one package."""
    commit = repository(tmp_path)
    setup = (Path(__file__).parents[3] / "setup.py").read_text()
    (tmp_path / "setup.py").write_text(setup)
    (tmp_path / "pyproject.toml").write_text(
        '[project]\nname = "a"\nversion = "1"\n[tool.setuptools]\npackages = ["ztunnel"]\n'
    )
    (tmp_path / "ztunnel" / "__init__.py").write_text("changed = True\n")
    subprocess.run([sys.executable, "setup.py", "--quiet", "build"], cwd=tmp_path, check=True, capture_output=True)
    assert revision_of(tmp_path / "build" / "lib" / "ztunnel") == Revision(commit, "Modified")
