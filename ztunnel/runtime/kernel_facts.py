"""Reads facts about the node's kernel and this process for the page ``/check``, which ``ztunnel check`` evaluates.

Facts about the network describe this process's network namespace. A value that cannot be read is ``None``.
"""

from __future__ import annotations

import os
import resource
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from ztunnel.runtime.memory import memory_limit_bytes

_PROC: Final = Path("/proc")
_CGROUPS: Final = Path("/sys/fs/cgroup")
#: The most network devices that are listed. A node has one per pod.
_MOST_DEVICES: Final = 512


def kernel_facts(proc: Path = _PROC, cgroups: Path = _CGROUPS) -> dict[str, Any]:
    """Return the facts as JSON values.

    Args:
        proc: the folder where the kernel shows processes.
        cgroups: the root of control groups.
    """
    net = proc / "sys/net"
    return {
        "release": _text(proc / "sys/kernel/osrelease"),
        "ipForward": _number(net / "ipv4/ip_forward"),
        "rpFilter": dict(_of_devices(net / "ipv4/conf", "rp_filter")),
        "disableIpv6": dict(_of_devices(net / "ipv6/conf", "disable_ipv6")),
        "localPortRange": _numbers(net / "ipv4/ip_local_port_range"),
        "reservedPorts": _text(net / "ipv4/ip_local_reserved_ports"),
        "conntrack": {
            "count": _number(net / "netfilter/nf_conntrack_count"),
            "maximum": _number(net / "netfilter/nf_conntrack_max"),
        },
        "sockets": _sockets(proc / "self/net/sockstat"),
        "listening": sorted(_listening(proc / "self/net/tcp") | _listening(proc / "self/net/tcp6")),
        "mtu": dict(_mtus(Path("/sys/class/net"))),
        "cgroupVersion": 2 if (cgroups / "cgroup.controllers").exists() else 1,
        "process": process_facts(proc, cgroups),
    }


def process_facts(proc: Path = _PROC, cgroups: Path = _CGROUPS) -> dict[str, Any]:
    """Return the resources that this process uses, with their limits."""
    status = {name: value for name, _, value in _fields(proc / "self/status")}
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    resident = status.get("VmRSS", "").split()
    return {
        "descriptors": _entries(proc / "self/fd"),
        "descriptorLimit": soft,
        "memoryBytes": int(resident[0]) * 1024 if resident[:1] and resident[0].isdigit() else None,
        "memoryLimitBytes": memory_limit_bytes(cgroups, proc),
        "capabilities": status.get("CapEff"),
        "throttling": _throttling(proc, cgroups),
    }


def _throttling(proc: Path, cgroups: Path) -> dict[str, int | None]:
    """Return how many periods of this cgroup's CPU limit have passed, and in how many it was throttled."""
    path = next((line.split("::", 1)[1] for line in _lines(proc / "self/cgroup") if "::" in line), "/")
    for folder in (cgroups / path.strip("/"), cgroups):
        found = dict(line.split() for line in _lines(folder / "cpu.stat") if len(line.split()) == 2)
        if "nr_periods" in found:
            return {"periods": int(found["nr_periods"]), "throttled": int(found["nr_throttled"])}
    return {"periods": None, "throttled": None}


def _of_devices(folder: Path, name: str) -> Iterator[tuple[str, int]]:
    try:
        devices = sorted(os.listdir(folder))[:_MOST_DEVICES]
    except OSError:
        return
    for device in devices:
        value = _number(folder / device / name)
        if value is not None:
            yield device, value


def _mtus(folder: Path) -> Iterator[tuple[str, int]]:
    try:
        devices = sorted(os.listdir(folder))[:_MOST_DEVICES]
    except OSError:
        return
    for device in devices:
        value = _number(folder / device / "mtu")
        if value is not None:
            yield device, value


def _sockets(path: Path) -> dict[str, int]:
    """Return the numbers of TCP sockets by state, as ``/proc/net/sockstat`` counts them for the namespace."""
    for line in _lines(path):
        words = line.split()
        if words[:1] == ["TCP:"]:
            return {name: int(value) for name, value in zip(words[1::2], words[2::2], strict=False)}
    return {}


def _listening(path: Path) -> set[int]:
    """Return the ports with a listening socket (state 0A in ``/proc/net/tcp``)."""
    found = set()
    for line in _lines(path)[1:]:
        words = line.split()
        if len(words) > 3 and words[3] == "0A":
            found.add(int(words[1].rpartition(":")[2], 16))
    return found


def _fields(path: Path) -> Iterator[tuple[str, str, str]]:
    for line in _lines(path):
        name, colon, value = line.partition(":")
        yield name, colon, value.strip()


def _entries(folder: Path) -> int | None:
    try:
        return len(os.listdir(folder)) - 1  # without the descriptor of this listing
    except OSError:
        return None


def _numbers(path: Path) -> list[int] | None:
    words = (_text(path) or "").split()
    return [int(word) for word in words] if words and all(word.isdigit() for word in words) else None


def _number(path: Path) -> int | None:
    found = _text(path)
    return int(found) if found is not None and found.lstrip("-").isdigit() else None


def _text(path: Path) -> str | None:
    try:
        return path.read_text().strip()
    except OSError:
        return None


def _lines(path: Path) -> list[str]:
    return (_text(path) or "").splitlines()
