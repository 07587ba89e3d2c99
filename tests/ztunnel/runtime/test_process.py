"""What a process says to the kernel of itself, seen from outside."""

import subprocess
import sys

_FORBIDS = """
import ctypes
from ztunnel.runtime.process import forbid_core_dumps
prctl = ctypes.CDLL(None).prctl
assert prctl(3) == 1, "dumpable at first"
forbid_core_dumps()
assert prctl(3) == 0
"""


def test_core_dumps_are_forbidden() -> None:
    done = subprocess.run([sys.executable, "-c", _FORBIDS], capture_output=True, text=True)
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
