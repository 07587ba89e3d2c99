"""What a process says to the kernel of itself, seen from outside."""

import os
import subprocess
import sys

import pytest

from ztunnel.runtime import process

_FORBIDS = """
import ctypes
from ztunnel.runtime.process import forbid_core_dumps
prctl = ctypes.CDLL(None).prctl
assert prctl(3) == 1, "dumpable at first"
forbid_core_dumps()
assert prctl(3) == 0
"""


_LIMITS = """
import os, resource
from ztunnel.runtime.process import forbid_core_dumps
os.setgid(65534)
os.setuid(65534)
forbid_core_dumps()
assert resource.getrlimit(resource.RLIMIT_CORE) == (1, 1)
os.listdir("/proc/self/fd")
"""


@pytest.mark.parametrize("program", [_FORBIDS, _LIMITS], ids=["root", "another user"])
def test_core_dumps_are_forbidden(program: str) -> None:
    if os.geteuid():
        pytest.skip("needs root")
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_a_program_starts_itself_again_with_more_arguments() -> None:
    program = (
        "import sys\n"
        "from ztunnel.runtime.process import start_again\n"
        "print(sys.argv[1:], flush=True)\n"
        "if '--again' not in sys.argv: start_again('--again', 'one')\n"
    )
    command = [sys.executable, "-c", program, "one"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=30)  # to the end of both
    assert done.stdout.splitlines() == ["['one']", "['one', '--again']"], done.stderr


@pytest.mark.parametrize("reaped", [False, True])
def test_after_a_successor_that_failed_another_can_be_started(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, reaped: bool
) -> None:
    fails = subprocess.Popen([sys.executable, "-S", "-c", "raise SystemExit(3)"])
    if reaped:
        fails.wait()
    else:
        os.waitid(os.P_PID, fails.pid, os.WEXITED | os.WNOWAIT)  # it stays a zombie
    with subprocess.Popen(["cat"], stdin=subprocess.PIPE) as runs:
        monkeypatch.setattr(process, "start_again", lambda flag: runs.pid)
        assert process.start_successor(fails.pid, moves=True) == runs.pid
        assert "starts already" not in caplog.text
        assert process.start_successor(runs.pid, moves=True) == runs.pid
        assert "a successor starts already" in caplog.text
        runs.communicate()
    fails.wait()
