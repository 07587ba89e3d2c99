"""Makes the folder of a demo, which contains private keys, and a watcher process that removes it however the demo
ends.

Leaving the ``with`` removes the folder, also after SIGTERM and SIGHUP (a closed terminal). ``kill -9`` cannot be
caught, so a second process in its own session waits for the end of a pipe held open by the demo only. Then it ends
every process with the folder's name in its environment, and removes the folder. If both processes were killed, the
next demo removes the folder, because its lock is free.
"""

import contextlib
import fcntl
import os
import shutil
import signal
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import FrameType
from typing import NoReturn

from deploy.lab import sweep

#: The variable that marks the demo's programs and their children for the watcher.
MARK = "DEMO_FOLDER"
_SIGNALS = (signal.SIGTERM, signal.SIGHUP)
#: How long the watcher sends SIGKILL to a process. A process that survives this hangs in a system call.
_END_S = 5.0
#: The longest address of a Unix socket (unix(7)), and the longest name of a demo's socket, in bytes.
_LONGEST_ADDRESS = 107
_LONGEST_NAME = 24


class FolderTooDeep(Exception):
    """The path of the folder for temporary files is too long for Unix sockets in the demo's folder."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.folder = folder

    def __str__(self) -> str:
        return f"the path of {self.folder.parent} is too long for Unix sockets in it: set TMPDIR to a shorter one"


@contextlib.contextmanager
def demo_folder(prefix: str) -> Iterator[Path]:
    """Yield a new folder. When this process ends, for any reason, the folder and every marked process are removed.

    Enter this in the main thread before another thread exists, because it forks.

    Args:
        prefix: the start of the folder's name. Folders left by killed demos with this prefix are removed first.

    Raises:
        FolderTooDeep: its path is too long for Unix sockets.
    """
    _remove_abandoned(prefix)
    path, lock = _locked(prefix)
    handlers = {number: signal.getsignal(number) for number in _SIGNALS}
    for number, handler in handlers.items():
        if handler is signal.SIG_DFL:  # keep SIGHUP ignored if nohup has started the demo
            signal.signal(number, _exit)
    before = os.environ.get(MARK)
    os.environ[MARK] = str(path)
    watcher, pipe = _watched(path, lock)
    try:
        yield path
    finally:
        os.close(pipe)
        os.waitpid(watcher, 0)
        shutil.rmtree(path, ignore_errors=True)
        os.close(lock)
        if before is None:
            del os.environ[MARK]
        else:
            os.environ[MARK] = before
        for number, handler in handlers.items():
            signal.signal(number, handler)


def marked(environment: Mapping[str, str]) -> dict[str, str]:
    """Return an environment with the mark of the running demo, for programs that do not inherit this process's
    environment.
    """
    return {**environment, **({MARK: os.environ[MARK]} if MARK in os.environ else {})}


def _exit(number: int, frame: FrameType | None) -> NoReturn:
    raise SystemExit(128 + number)


def _locked(prefix: str) -> tuple[Path, int]:
    """Make a folder and take its lock, which the kernel releases when this process ends."""
    while True:
        path = Path(tempfile.mkdtemp(prefix=prefix))
        if len(os.fsencode(path)) + 1 + _LONGEST_NAME > _LONGEST_ADDRESS:
            path.rmdir()
            raise FolderTooDeep(path)
        lock = _lock(path)
        if lock is not None and path.exists():
            return path, lock
        if lock is not None:  # another demo found it unlocked, and removed it
            os.close(lock)


def _lock(path: Path) -> int | None:
    """Return a descriptor that holds a folder's lock. None if the folder is gone, belongs to another user, or is
    locked.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(descriptor)
        return None
    return descriptor


def _remove_abandoned(prefix: str) -> None:
    """Remove this user's folders whose demo is gone."""
    for path in Path(tempfile.gettempdir()).glob(f"{prefix}*"):
        with contextlib.suppress(OSError):
            if path.lstat().st_uid == os.getuid() and (lock := _lock(path)) is not None:
                shutil.rmtree(path, ignore_errors=True)
                os.close(lock)


def _watched(path: Path, lock: int) -> tuple[int, int]:
    """Fork the watcher. Return its process id, and the end of the pipe that keeps it waiting."""
    ended, pipe = os.pipe()
    child = os.fork()
    if child:
        os.close(ended)
        return child, pipe
    try:
        os.setsid()  # a new session gets no signals from the terminal or to the demo's process group
        for number in (signal.SIGINT, *_SIGNALS):
            signal.signal(number, signal.SIG_IGN)
        null = os.open(os.devnull, os.O_RDWR)
        for descriptor in range(3):  # otherwise a reader of the demo's output would not see its end
            os.dup2(null, descriptor)
        os.close(pipe)
        os.close(lock)
        os.read(ended, 1)
        _end_marked(path)
        shutil.rmtree(path, ignore_errors=True)
        with contextlib.suppress(Exception):  # fails after a demo that was not permitted to create namespaces
            sweep()
    finally:
        os._exit(0)


def _end_marked(path: Path) -> None:
    """End all processes that have the folder's mark, except the demo and this process."""
    mark = f"{MARK}={path}".encode()
    deadline = time.monotonic() + _END_S
    while time.monotonic() < deadline:
        found = [pid for pid in _processes() if mark in _environment(pid)]
        if not found:
            return
        for pid in found:
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.01)


def _processes() -> list[int]:
    return [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit()]


def _environment(pid: int) -> list[bytes]:
    """Return the environment that a process was started with. Empty if the process has ended or belongs to another
    user.
    """
    try:
        return Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:
        return []
