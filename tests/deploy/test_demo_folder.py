"""A demo leaves no process and no folder with keys, whatever way it ends."""

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from deploy.demo.folder import FolderTooDeep, demo_folder
from tests.limits import WAIT_S

ROOT = Path(__file__).parents[2]
#: A demo with one program, which ignores every signal that can be ignored.
DEMO = """
import signal, subprocess, sys, time
from deploy.demo.folder import demo_folder
# A run of the tests under nohup ignores the one, in the background of a script the other.
signal.signal(signal.SIGHUP, signal.SIG_DFL)
signal.signal(signal.SIGINT, signal.default_int_handler)
STUBBORN = '''
import signal, time
for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
    signal.signal(number, signal.SIG_IGN)
print("up", flush=True)
while True:
    time.sleep(1)
'''
with demo_folder("ztunnel-demo-test-") as folder:
    (folder / "ca.key").write_text("private")
    program = subprocess.Popen([sys.executable, "-c", STUBBORN], stdout=subprocess.PIPE, start_new_session=True)
    program.stdout.readline()
    print(folder, program.pid, flush=True)
    if sys.argv[1:] == ["ends"]:
        sys.exit()
    while True:
        time.sleep(1)
"""


@pytest.fixture(autouse=True)
def temporary(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The folder for temporary files; pytest's own leave no room for a Unix socket's name."""
    with tempfile.TemporaryDirectory(prefix="demo-") as folder:
        monkeypatch.setenv("TMPDIR", folder)
        yield Path(folder)


def started(*arguments: str) -> tuple["subprocess.Popen[str]", Path, int]:
    demo = subprocess.Popen([sys.executable, "-c", DEMO, *arguments], stdout=subprocess.PIPE, text=True, cwd=ROOT)
    assert demo.stdout is not None
    folder, pid = demo.stdout.readline().split()
    return demo, Path(folder), int(pid)


def until(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + WAIT_S
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def runs(pid: int) -> bool:
    """Return whether a process runs. A zombie, which waits for its parent, does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@pytest.mark.parametrize("number", [signal.SIGHUP, signal.SIGTERM, signal.SIGINT, signal.SIGKILL])
def test_a_signal_leaves_neither_programs_nor_keys(number: signal.Signals) -> None:
    demo, folder, program = started()
    with demo:
        demo.send_signal(number)
        try:
            demo.wait(WAIT_S)
        finally:
            demo.kill()  # otherwise a failure here would disturb the next tests
    until(lambda: not runs(program) and not folder.exists())


def test_the_usual_end_leaves_neither_programs_nor_keys() -> None:
    demo, folder, program = started("ends")
    with demo:
        assert demo.wait(WAIT_S) == 0
    assert not runs(program)
    assert not folder.exists()


def test_a_folder_that_nobody_holds_is_removed_by_the_next_demo(temporary: Path) -> None:
    abandoned, other = temporary / "ztunnel-demo-test-left", temporary / "ztunnel-policy-x"
    for folder in (abandoned, other):
        folder.mkdir()
        (folder / "ca.key").write_text("private")
    first, held, _ = started()
    with first:
        assert not abandoned.exists()
        second, _, _ = started("ends")
        with second:
            second.wait(WAIT_S)
        assert held.exists()
        first.terminate()
        first.wait(WAIT_S)
    assert os.listdir(temporary) == ["ztunnel-policy-x"]


def test_a_folder_too_deep_for_sockets_is_refused_and_named(
    temporary: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    deep = temporary / ("d" * 100)
    deep.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(deep))
    with pytest.raises(FolderTooDeep, match=f"{deep} is too long"), demo_folder("ztunnel-demo-test-"):
        pass
    assert list(deep.iterdir()) == []
