"""Counts lines of code by package, of two revisions: ``python -m tests.lines REV [REV]``.

Lines of ``.py`` files count that are neither blank nor only comments, docstrings included; generated messages are
left out. Without a second revision the files of the working tree that git tracks are counted.
"""

from __future__ import annotations

import argparse
import io
import subprocess
import tarfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
#: How many folders deep packages are shown one by one, by the folder that they are in.
_DEPTH = {"ztunnel/proxy": 3, "tests/ztunnel": 3, "ztunnel": 2, "xds": 2, "hbone": 2, "tests": 2}


def _git(*arguments: str) -> bytes:
    return subprocess.run(("git", "-C", str(ROOT), *arguments), check=True, stdout=subprocess.PIPE).stdout


def files_of(revision: str | None) -> Iterator[tuple[str, str]]:
    """Yield path and text of each Python file of a revision; ``None``: of the working tree."""
    if revision is None:
        for name in _git("ls-files", "-z", "--", "*.py").decode().split("\0"):
            path = ROOT / name
            if name and path.is_file():
                yield name, path.read_text()
        return
    with tarfile.open(fileobj=io.BytesIO(_git("archive", "--format=tar", revision))) as archive:
        for member in archive:
            if member.name.endswith(".py") and (file := archive.extractfile(member)) is not None:
                yield member.name, file.read().decode()


def package_of(path: str) -> str | None:
    """Return the package that a file counts for; ``None``: it is generated."""
    if path.startswith("xds/proto/") and path.endswith(("_pb2.py", "_pb2_grpc.py")):
        return None
    folders = path.split("/")[:-1]
    depth = _DEPTH.get("/".join(folders[:2]), _DEPTH.get("/".join(folders[:1]), 1))
    return "/".join(folders[:depth]) or "(top)"


def lines_of(text: str) -> int:
    """Return the number of lines that are neither blank nor only a comment."""
    return sum(bool(line.strip()) and not line.lstrip().startswith("#") for line in text.splitlines())


def counted(files: Iterator[tuple[str, str]]) -> Counter[str]:
    """Return lines by package."""
    lines: Counter[str] = Counter()
    for path, text in files:
        package = package_of(path)
        if package is not None:
            lines[package] += lines_of(text)
    return lines


def table(before: Counter[str], after: Counter[str]) -> Iterator[str]:
    """Yield a row for each package: before, after, difference; then the product's, the tests' and all lines."""

    def row(name: str, first: int, second: int) -> str:
        return f"{name:32} {first:8} {second:8} {second - first:+8}"

    yield f"{'package':32} {'before':>8} {'after':>8} {'change':>8}"
    names = sorted({*before, *after})
    for name in names:
        yield row(name, before[name], after[name])
    tests = [name for name in names if name.split("/")[0] == "tests"]
    product = [name for name in names if name.split("/")[0] in ("hbone", "xds", "tproxy", "ztunnel")]
    for title, group in (("product", product), ("tests", tests), ("all", names)):
        yield row(title, sum(before[each] for each in group), sum(after[each] for each in group))


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("before", metavar="REV")
    parser.add_argument("after", metavar="REV", nargs="?")
    chosen = parser.parse_args()
    for line in table(counted(files_of(chosen.before)), counted(files_of(chosen.after))):
        print(line)


if __name__ == "__main__":
    main()
