"""Scans all processes of the node for the network namespaces of pods, and for kubelet's user.

For pods older than the agent, no container runtime reports their namespaces. A process's cgroup names its pod, and
its ``ns/net`` the namespace. A process of another pod or of the node can have entered that namespace, and a
process of the pod can have created its own. So only a namespace with one of the pod's addresses counts.

The functions block; the agent's thread runs them.
"""

import contextlib
import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from tproxy.aio.netns import Netns
from tproxy.errors import TproxyError, UnknownNamespace
from tproxy.resources import IpAddress
from ztunnel.node.agent.cgroup import pod_of
from ztunnel.node.agent.namespaces import addresses

PROC: Final = Path("/proc")
#: Names of programs that are or contain a kubelet.
_KUBELETS: Final = {"kubelet", "kubelite", "k3s", "k3s-server", "k3s-agent"}


@dataclass(frozen=True, slots=True)
class Found:
    """A pod's network namespace, found by a process in it.

    Attributes:
        path: the path to open, below the process that was found.
        inode: its number.
    """

    path: str
    inode: int


@dataclass(frozen=True, slots=True)
class _Process:
    path: Path
    started: int
    inode: int
    device: int


def pod_namespaces(
    wanted: Mapping[str, frozenset[IpAddress]], proc: Path = PROC, *, taken: Iterable[int] = ()
) -> dict[str, Found]:
    """Return the network namespaces of these pods. Pods without a match are left out.

    Args:
        wanted: the addresses of each pod, by uid or static hash. A pod without addresses is not found.
        proc: the folder that shows the node's processes.
        taken: the inodes of namespaces that belong to other pods.
    """
    others = set(taken)
    candidates: dict[str, dict[int, _Process]] = {}
    own = _own(proc)
    for process in _processes(proc):
        if (process.inode, process.device) in own or process.inode in others:
            continue
        pod = _read_pod(process.path)
        if pod is None or not wanted.get(pod):
            continue
        # The oldest process in a namespace is the sandbox's, which lives as long as the pod.
        known = candidates.setdefault(pod, {}).get(process.inode)
        if known is None or process.started < known.started:
            candidates[pod][process.inode] = process
    found = {}
    for pod, processes in candidates.items():
        for process in sorted(processes.values(), key=lambda each: each.started):
            # The namespace is checked again after opening, because the process can have ended, and its id can be
            # reused.
            if is_pods(str(process.path / "ns/net"), process.inode, wanted[pod]):
                found[pod] = Found(str(process.path / "ns/net"), process.inode)
                break
    return found


def is_pods(where: str | int, inode: int, wanted: frozenset[IpAddress]) -> bool:
    """Return whether a path still leads to the same namespace, and whether the namespace has one of these
    addresses.
    """
    try:
        with Netns.open(where) as netns:
            return netns.inode == inode and not wanted.isdisjoint(addresses(netns))
    except (TproxyError, OSError):
        return False


def is_namespace(where: str | int, inode: int) -> bool:
    """Return whether a name, path or process id leads to this namespace.

    Raises:
        TproxyError: it cannot be opened now.
    """
    try:
        with Netns.open(where) as netns:
            return netns.inode == inode
    except UnknownNamespace:
        return False


def reopened(where: str | int, inode: int, proc: Path = PROC) -> Netns | None:
    """Open a namespace with this number, at its earlier place or below a process in it. The caller closes it.

    Returns:
        None if no such namespace is found.

    Raises:
        TproxyError, OSError: that cannot be known now.
    """
    if is_namespace(where, inode):
        return Netns.open(where)
    for path in _numbered(proc):
        with contextlib.suppress(OSError):  # the process has ended
            if (path / "ns/net").stat().st_ino != inode:
                continue
            netns = Netns.open(path / "ns/net")
            if netns.inode == inode:
                return netns
            netns.close()
    return None


def kubelet_user(proc: Path = PROC) -> int | None:
    """Return the user id of the node's kubelet. None if there is no kubelet."""
    for entry in _numbered(proc):
        with contextlib.suppress(OSError, IndexError, ValueError):
            if (entry / "comm").read_text().strip() in _KUBELETS:
                for line in (entry / "status").read_text().splitlines():
                    if line.startswith("Uid:"):
                        return int(line.split()[2])  # the effective one, which sockets have
    return None


def _own(proc: Path) -> set[tuple[int, int]]:
    """Return the namespaces of the node and of this process. Pods in these namespaces must not be enrolled."""
    found = set()
    for name in ("1", "self"):
        with contextlib.suppress(OSError):
            status = (proc / name / "ns/net").stat()
            found.add((status.st_ino, status.st_dev))
    return found


def _numbered(proc: Path) -> Iterator[Path]:
    with os.scandir(proc) as entries:
        for entry in entries:
            if entry.name.isdigit():
                yield proc / entry.name


def _processes(proc: Path) -> Iterator[_Process]:
    for path in _numbered(proc):
        # A process can end while it is read.
        with contextlib.suppress(OSError, ValueError, IndexError):
            status = (path / "ns/net").stat()
            # Split after the last parenthesis, because the program's name in parentheses can contain any
            # character. starttime is field 22 (proc_pid_stat(5)).
            fields = (path / "stat").read_text().rpartition(")")[2].split()
            yield _Process(path, int(fields[19]), status.st_ino, status.st_dev)


def _read_pod(path: Path) -> str | None:
    try:
        return pod_of((path / "cgroup").read_text(errors="replace"))
    except OSError:
        return None
