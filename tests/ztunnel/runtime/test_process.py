"""What a process says to the kernel of itself, seen from outside."""

import os
import subprocess
import sys

import pytest

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
