"""The memory available to this process: its cgroup's limit, or the machine's memory."""

from __future__ import annotations

from pathlib import Path
from typing import Final

_CGROUPS: Final = Path("/sys/fs/cgroup")
_PROC: Final = Path("/proc")
#: The fractions of the memory limit that bytes waiting for applications may use: for all connections, and for one
#: pod's connections.
_WAITING: Final = 4
_WAITING_OF_POD: Final = 4
_LEAST_WAITING: Final = 16 * 1024 * 1024


def memory_limit_bytes(cgroups: Path = _CGROUPS, proc: Path = _PROC) -> int:
    """Return the smallest memory limit: of this process's cgroup, of its parents, or the machine's memory.

    This reads cgroups of version 2 (``memory.max``) and version 1 (``memory.limit_in_bytes``). A file that cannot
    be read sets no limit.
    """
    limits = [_machine_bytes(proc)]
    for line in _text(proc / "self/cgroup").splitlines():
        _, controllers, path = [*line.split(":", 2), "", ""][:3]
        if controllers and "memory" not in controllers.split(","):
            continue
        root = cgroups / "memory" if controllers else cgroups
        name = "memory.limit_in_bytes" if controllers else "memory.max"
        # Inside a container, the path can be the host's, which does not exist there. Then the container's own
        # limit is at the root.
        folder = root / path.strip("/")
        for each in (folder, *folder.parents):
            limit = _text(each / name).strip()
            if limit.isdigit():
                limits.append(int(limit))
            if each == root:
                break
    return min(limits)


def waiting_bytes(limit: int) -> tuple[int, int]:
    """Return how many bytes are allowed to wait for applications in a process with a memory limit of ``limit``
    bytes, and how many in one pod.
    """
    in_all = max(_LEAST_WAITING, limit // _WAITING)
    return in_all, max(_LEAST_WAITING // 2, in_all // _WAITING_OF_POD)


def _machine_bytes(proc: Path) -> int:
    for line in _text(proc / "meminfo").splitlines():
        if line.startswith("MemTotal:"):
            return int(line.split()[1]) * 1024
    return 1 << 40


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""
