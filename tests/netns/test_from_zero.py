"""Runs the commands of ``docs/from-zero.md`` line by line, and compares their outputs with the page."""

import contextlib
import os
import pty
import re
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping
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


@pytest.fixture
def environment(tmp_path: Path) -> Mapping[str, str]:
    """Return the environment of a shell in which ``sudo`` and ``make`` do nothing, because the test is root and
    packages are installed.
    """
    programs = tmp_path / "bin"
    programs.mkdir()
    (programs / "sudo").write_text('#!/bin/sh\nexec "$@"\n')
    (programs / "make").write_text("#!/bin/sh\n")
    for path in programs.iterdir():
        path.chmod(0o755)
    return {**os.environ, "PATH": f"{programs}:{os.environ['PATH']}"}


def here(commands: str) -> str:
    """Return commands of the page with the virtual environment of this test."""
    return commands.replace(". .venv/bin/activate", f". {Path(sys.prefix) / 'bin' / 'activate'}")


class Terminal:
    """An interactive shell on a pseudo-terminal, in mounts of its own: nothing here can reach the machine's."""

    def __init__(self, env: Mapping[str, str]) -> None:
        self._pid, self._fd = pty.fork()
        if not self._pid:
            os.chdir(ROOT)
            command = ("unshare", "--mount", "--fork", "bash", "--norc", "-i")
            os.execvpe(command[0], command, {**env, "PS1": "$ ", "TERM": "xterm"})
        self.seen = ""

    def paste(self, text: str) -> None:
        """Insert text as a terminal does, in one piece, and press Enter."""
        os.write(self._fd, f"\x1b[200~{text}\x1b[201~\n".encode())

    def type(self, line: str) -> None:
        """Type a line."""
        os.write(self._fd, f"{line}\n".encode())

    def until(self, text: str) -> str:
        """Read until the output contains a text. Return the output before it."""
        deadline_s = time.monotonic() + 30
        while text not in self.seen:
            assert time.monotonic() < deadline_s, self.seen
            if select.select([self._fd], [], [], 1)[0]:
                self.seen += os.read(self._fd, 65536).decode(errors="replace")
        before, _, self.seen = self.seen.partition(text)
        return before

    def close(self) -> None:
        os.kill(self._pid, signal.SIGKILL)
        os.waitpid(self._pid, 0)
        os.close(self._fd)


def test_the_first_block_is_harmless_when_it_is_pasted_whole(environment: Mapping[str, str]) -> None:
    """Pasted lines run one by one in the shell that they were pasted into, unless one command holds them all."""
    needed("unshare")
    own_run = "stat -f -c '%T run' /run; echo net $(readlink /proc/self/ns/net) e''nd"
    terminal = Terminal(environment)
    try:
        terminal.until("$ ")
        terminal.type(own_run)
        outer = terminal.until("end")
        terminal.paste(here(next(blocks()).commands).rstrip("\n"))
        terminal.type(own_run)
        inner = terminal.until("end")
        assert "tmpfs run" in inner
        assert network(inner) != network(outer)
        terminal.type("exit")
        terminal.type(own_run)
        after = terminal.until("end")
        assert network(after) == network(outer)
        assert file_system(after) == file_system(outer)
    finally:
        terminal.close()


def network(output: str) -> str:
    (found,) = re.findall(r"net (net:\[\d+\])", output)
    return found


def file_system(output: str) -> str:
    """The last one that was printed: an interactive shell shows the command as well."""
    return re.findall(r"(\w+) run\b", output)[-1]


def test_the_page_is_true(environment: Mapping[str, str]) -> None:
    for program in ("ip", "curl", "unshare"):
        needed(program)
    script = ""
    page = list(blocks())
    for number, block in enumerate(page):
        script += f"{here(block.commands)}echo {MARK.format(number)}\n"
    output, status = played(script, environment)
    for number, block in enumerate(page[:-1]):
        before, mark, output = output.partition(MARK.format(number) + "\n")
        assert mark, f"{block.commands}\n{before}"
        if block.shown:
            assert re.fullmatch(pattern(block.shown), before.strip()), f"{block.commands}\n{before}"
        else:
            assert not before.strip(), f"{block.commands}\n{before}"
    assert status == 0, output


def played(script: str, env: Mapping[str, str]) -> tuple[str, int]:
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
