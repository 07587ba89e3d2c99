"""Reads the pod out of a process's cgroups. Pure.

A kubelet puts a pod's processes below a directory whose name has the pod's uid. Its form depends on the cgroup
driver, the cgroup version and the container runtime::

    kubepods/besteffort/pod2b1c...-...-...-...-.../<container>                              cgroupfs
    kubepods.slice/kubepods-burstable.slice/kubepods-burstable-pod2b1c..._..._.slice/cri-containerd-<id>.scope
    kubepods/pod<32 hexadecimal digits>/<container>                                         a static pod
"""

import re
from typing import Final

_POD: Final = re.compile(
    r"pod([0-9a-f]{8}[-_][0-9a-f]{4}[-_][0-9a-f]{4}[-_][0-9a-f]{4}[-_][0-9a-f]{12}|[0-9a-f]{32})(?:\.slice)?(?=[/:]|$)"
)


def pod_of(cgroups: str) -> str | None:
    """Return the pod that a process belongs to, None if it belongs to none.

    Args:
        cgroups: the text of ``/proc/<pid>/cgroup``.

    Returns:
        The pod's uid, or for a static pod the kubelet's hash. None also if the lines name different pods, which is
        possible for a container runtime inside a pod.
    """
    found = set()
    for line in cgroups.splitlines():
        path = line.split(":", 2)[-1]
        # Only the outermost match counts, because a process of the pod can create directories with any name below
        # it.
        if (match := _POD.search(path)) is not None:
            found.add(match[1].replace("_", "-"))
    return found.pop() if len(found) == 1 else None
