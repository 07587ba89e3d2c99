"""Finds the commit that this program was built from."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Final, NamedTuple

#: The file in the package ``ztunnel`` that is written when the package is built (see ``setup.py``). It contains
#: ``COMMIT`` or ``COMMIT-dirty``.
RECORD: Final = "revision.txt"
_DIRTY: Final = "-dirty"


class Revision(NamedTuple):
    """A commit, and whether the tree had uncommitted changes.

    Attributes:
        commit: the commit's hash; ``unknown`` without a record or a repository.
        status: ``Clean`` or ``Modified``, as the record says; ``unknown`` in a checkout, whose files can change.
    """

    commit: str
    status: str


@cache
def revision() -> Revision:
    """Return the revision of the running program. It is looked up once."""
    return revision_of(Path(__file__).parents[1])


def revision_of(package: Path) -> Revision:
    """Return the revision of a package in a folder: the recorded one, or the revision of the surrounding
    checkout."""
    recorded = _text(package / RECORD)
    if recorded:
        return Revision(recorded.removesuffix(_DIRTY), "Modified" if recorded.endswith(_DIRTY) else "Clean")
    return Revision(_checked_out(package.parent / ".git") or "unknown", "unknown")


def _checked_out(git: Path) -> str:
    """Return the commit at HEAD of a repository, or the empty string without one.

    The files are read as gitrepository-layout(5) describes them: a proxy starts no other program for its version.
    """
    pointer = _text(git)
    if pointer.startswith("gitdir: "):  # a worktree
        git = (git.parent / pointer.removeprefix("gitdir: ")).resolve()
    head = _text(git / "HEAD")
    if not head.startswith("ref: "):
        return head
    name = head.removeprefix("ref: ")
    common = git / (_text(git / "commondir") or ".")
    for folder in (git, common):
        if commit := _text(folder / name):
            return commit
    packed = (line.split(" ", 1) for line in _text(common / "packed-refs").splitlines() if " " in line)
    return next((commit for commit, ref in packed if ref == name), "")


def _text(path: Path) -> str:
    """Return a file's text without surrounding whitespace, or an empty string if it is unreadable."""
    try:
        return path.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError):
        return ""
