"""Makes a folder like ``/proc``, with processes of pods in real namespaces, without a container runtime."""

import os
from pathlib import Path

from tproxy.aio.netns import Netns


class Proc:
    """A folder with processes, for ``ztunnel agent --proc``."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def add(
        self, pid: int | str, netns: Netns | None, pod: str = "", started: int = 100, name: str = "a b) c"
    ) -> None:
        """Add a process. If ``netns`` is None, it is in this process's own namespace."""
        path = self.folder / str(pid)
        (path / "ns").mkdir(parents=True)
        space = f"/proc/{os.getpid()}/fd/{netns.fileno()}" if netns is not None else f"/proc/{os.getpid()}/ns/net"
        (path / "ns/net").symlink_to(space)
        (path / "cgroup").write_text(f"0::/kubepods/pod{pod}/{'e' * 64}\n" if pod else "0::/init.scope\n")
        (path / "comm").write_text(f"{name}\n")
        (path / "stat").write_text(f"{pid} ({name}) S " + " ".join(["0"] * 18 + [str(started)] + ["0"] * 30))
        (path / "status").write_text("Name:\tx\nUid:\t7\t8\t9\t10\n")
