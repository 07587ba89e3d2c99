"""Go's own parsers as a process: returns the value that Kubernetes, Istio and container runtimes would read.

Built once from main.go beside this file, with modules from the Go proxy, checked by go.sum; the program stays in
the cache. Without Go or the proxy, tests that need it are skipped with a message.
"""

import functools
import hashlib
import json
import os
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import pytest

from tests.apiserver.programs import cache

_SOURCE = Path(__file__).parent


class Refused(Exception):
    """Go's reader returned an error."""


class Oracle:
    """Sends questions to the program, one at a time."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [_program()], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, encoding="utf-8"
        )

    def ask(self, do: str, text: str = "", **more: Any) -> Any:
        """Return Go's value.

        Raises:
            Refused: with Go's error.
        """
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps({"do": do, "text": text, **more}) + "\n")
        self._process.stdin.flush()
        answer = json.loads(self._process.stdout.readline())
        if answer["error"]:
            raise Refused(answer["error"])
        return answer["value"]

    def close(self) -> None:
        """End the program."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        self._process.wait(10)
        self._process.stdout.close()


@functools.cache
def _program() -> str:
    go = shutil.which("go") or shutil.which("go", path="/usr/local/go/bin")
    sources = [_SOURCE / name for name in ("go.mod", "go.sum", "main.go")]
    digest = hashlib.sha256(b"\0".join(source.read_bytes() for source in sources)).hexdigest()[:16]
    program = cache().parent / "go" / digest
    if program.exists():
        return str(program)
    if go is None:
        pytest.skip("NOT TESTED beside Go's readers: there is no go on PATH or in /usr/local/go/bin")
    program.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=program.parent) as work:
        made = subprocess.run(
            [go, "build", "-mod=readonly", "-trimpath", "-o", f"{work}/oracle", "."],
            cwd=_SOURCE,
            env={**os.environ, "CGO_ENABLED": "0"},
            capture_output=True,
            text=True,
            check=False,
        )
        if made.returncode:
            pytest.skip(f"NOT TESTED beside Go's readers: {(made.stderr.strip() or 'no error').splitlines()[-1]}")
        os.replace(f"{work}/oracle", program)
    return str(program)
