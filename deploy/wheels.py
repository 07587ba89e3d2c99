"""Builds the wheels: one of pure Python, and a compiled one for each interpreter of this machine.

    python -m deploy.wheels [--output DIR] [PYTHON ...]

Interpreters are programs or paths. By default all of python3.11 to python3.14 that are found are used. A compiled
wheel has the interpreter's and the platform's tag, so pip prefers it where it fits, and installs the pure one
elsewhere. Its tunnel engine is compiled by mypyc from the same source (``setup.py``), which needs a C compiler and
Python's headers.
"""

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PYTHONS = ("python3.11", "python3.12", "python3.13", "python3.14")
#: The sources of a wheel.
SOURCES = ("hbone", "xds", "tproxy", "ztunnel", "pyproject.toml", "setup.py", "README.md", "LICENSE")


class NotAsWanted(Exception):
    """A wheel is pure although it should be compiled, or the reverse."""


def build(python: str, output: Path, *, compiled: bool) -> Path:
    """Build a wheel and return its path.

    Args:
        python: the interpreter that builds the wheel. A compiled wheel only works with this interpreter's version.
        output: the folder for the wheel.
        compiled: whether the tunnel engine is compiled.

    Raises:
        subprocess.CalledProcessError: a step failed. Its output is on standard error.
        NotAsWanted: the installed wheel is pure although it should be compiled, or the reverse.
    """
    with tempfile.TemporaryDirectory(prefix="ztunnel-wheel-") as folder:
        tree, venv, made = Path(folder) / "tree", Path(folder) / "venv", Path(folder) / "made"
        copy_sources(tree)
        _run(python, "-m", "venv", str(venv))
        inside = str(venv / "bin" / "python")
        # The packages that the engine imports are installed as well, because mypyc reads their types.
        locks = [ROOT / "requirements" / f"{name}.lock" for name in ("runtime", "compile")]
        given = [word for lock in locks for word in ("-r", str(lock))]
        _run(inside, "-m", "pip", "install", "-q", "--disable-pip-version-check", "--require-hashes", *given)
        environment = {**os.environ, "ZTUNNEL_COMPILE": "1" if compiled else "0"}
        wheel = ["wheel", "-q", "--disable-pip-version-check", "--no-deps", "--no-build-isolation"]
        _run(inside, "-m", "pip", *wheel, "-w", str(made), str(tree), env=environment)
        (path,) = made.iterdir()
        _run(inside, "-m", "pip", "install", "-q", "--disable-pip-version-check", "--no-deps", str(path))
        said = subprocess.run(
            [venv / "bin" / "ztunnel", "version"], check=True, capture_output=True, text=True
        ).stdout
        wanted = "compiled" if compiled else "pure"
        if f'BuildProfile:"{wanted}"' not in said:
            raise NotAsWanted(f"{path.name} is not {wanted}: {said.strip()}")
        output.mkdir(parents=True, exist_ok=True)
        return Path(shutil.move(path, output / path.name))


def copy_sources(tree: Path) -> None:
    """Create a folder and copy the sources of a wheel into it.

    Building in the repository would put leftovers of setuptools and compiled modules into the pure wheel.
    """
    tree.mkdir()
    for name in SOURCES:
        source = ROOT / name
        if source.is_dir():
            shutil.copytree(source, tree / name, ignore=shutil.ignore_patterns("__pycache__", "*.so"))
        else:
            shutil.copy(source, tree / name)


def _run(*command: str, env: dict[str, str] | None = None) -> None:
    subprocess.run(command, check=True, stdout=sys.stderr, env=env)


def main(argv: Sequence[str] | None = None) -> int:
    """Build the wheels; the exit status is 1 if one could not be built."""
    parser = argparse.ArgumentParser(description="Build the wheels.")
    parser.add_argument("--output", type=Path, default=ROOT / "dist", metavar="DIR", help="(default dist)")
    parser.add_argument("pythons", nargs="*", metavar="PYTHON", help="(default: python3.11 to 3.14, as found)")
    args = parser.parse_args(argv)
    pythons = args.pythons or [found for name in PYTHONS if (found := shutil.which(name)) is not None]
    if not pythons:
        print(f"deploy.wheels: none of {', '.join(PYTHONS)} is here; name an interpreter", file=sys.stderr)
        return 1
    try:
        print(build(pythons[0], args.output, compiled=False), flush=True)
        for python in pythons:
            print(build(python, args.output, compiled=True), flush=True)
    except (OSError, subprocess.CalledProcessError, NotAsWanted) as error:
        print(f"deploy.wheels: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
