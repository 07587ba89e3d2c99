"""``docs/from-zero.md`` does what it says: its commands are run line by line, and its outputs are theirs."""

import contextlib
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.programs import needed

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "from-zero.md"
#: Printed between the outputs of blocks.
MARK = "---- block {} ----"

pytestmark = pytest.mark.netns


class Block(NamedTuple):
    """Commands of the page, and the output that it shows."""

    commands: str
    shown: str


def blocks() -> Iterator[Block]:
    found = re.findall(r"```(sh|text)\n(.*?)```", PAGE.read_text(), re.DOTALL)
    for index, (kind, text) in enumerate(found):
        if kind == "sh":
            after = found[index + 1] if index + 1 < len(found) else ("", "")
            yield Block(text, after[1] if after[0] == "text" else "")


def pattern(shown: str) -> str:
    """Return the output as a regular expression; an ellipsis is anything on its line."""
    return re.escape(shown.rstrip("\n")).replace("…", ".*")


def test_the_page_is_true(tmp_path: Path) -> None:
    for program in ("ip", "curl", "unshare"):
        needed(program)
    programs = tmp_path / "bin"
    programs.mkdir()
    # Root is here already, and the environment is that of this test.
    (programs / "sudo").write_text('#!/bin/sh\nexec "$@"\n')
    (programs / "make").write_text("#!/bin/sh\n")
    for path in programs.iterdir():
        path.chmod(0o755)
    activate = f". {Path(sys.prefix) / 'bin' / 'activate'}"
    script = ""
    page = list(blocks())
    for number, block in enumerate(page):
        commands = block.commands.replace(". .venv/bin/activate", activate)
        script += f"{commands}echo {MARK.format(number)}\n"
    output, status = played(script, {**os.environ, "PATH": f"{programs}:{os.environ['PATH']}"})
    for number, block in enumerate(page[:-1]):
        before, mark, output = output.partition(MARK.format(number) + "\n")
        assert mark, f"{block.commands}\n{before}"
        if block.shown:
            assert re.fullmatch(pattern(block.shown), before.strip()), f"{block.commands}\n{before}"
        else:
            assert not before.strip(), f"{block.commands}\n{before}"
    assert status == 0, output


def played(script: str, env: dict[str, str]) -> tuple[str, int]:
    """Run a script in a shell; return its output and status. What it has left running is ended."""
    # From a pipe bash reads no further than it runs, so that the shell which is started inside has the rest.
    shell = subprocess.Popen(
        ["bash"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        cwd=ROOT,
        env=env,
        start_new_session=True,
    )
    late = threading.Timer(60, os.killpg, (shell.pid, signal.SIGKILL))
    late.start()
    try:
        output, _ = shell.communicate(script.encode())
        return output.decode(), shell.returncode
    finally:
        late.cancel()
        with contextlib.suppress(ProcessLookupError):
            os.killpg(shell.pid, signal.SIGKILL)
