"""Enrols many pods at once, and enrols and releases pods for hours: the time, and the resources that remain.

``python -m bench.enrol [--pods 250] [--cycles 10000]``. Pods are network namespaces with an address, found in a
folder like /proc. The rules are real, but the API and the proxy are replaced by simple objects in this process, so
only the agent's own work is measured. The first table has the time from the label of the pods' namespace until the
last pod is annotated ``enabled``. The second table lists the process's descriptors, memory, elements of the node's
set of probed pods, and tasks, after the first hundred cycles of enrolment and release and after the last.
"""

import argparse
import asyncio
import contextlib
import logging
import os
import resource
import tempfile
import time
from collections.abc import AsyncIterator, Mapping
from ipaddress import IPv4Interface
from pathlib import Path
from typing import Any

from tproxy.aio import rtnetlink
from tproxy.aio.netlink import NETLINK_ROUTE, NetlinkSocket
from tproxy.aio.netns import Netns
from tproxy.aio.table import BlockingTable
from tproxy.inpod import PROBE_TABLE
from tproxy.resources import Address
from ztunnel.kube.objects import Changes, Object, ObjectKey
from ztunnel.node.agent.enroller import Enroller
from ztunnel.node.agent.enrolment import MODE, REDIRECTION, Pod, Settings, read_pod
from ztunnel.proxy.istio.zds.manager import PodManager
from ztunnel.proxy.istio.zds.pods import PodInfo, PodUid

_SPACE = "shop"
_WARM_UP = 100


class Cluster:
    """A simulated API server: objects in memory. Annotations are written at once."""

    def __init__(self) -> None:
        self.objects: dict[ObjectKey, Object] = {}
        self.enabled: set[str] = set()
        self._news: dict[ObjectKey, Object | None] = {}
        self._changed = asyncio.Event()

    def put(self, key: ObjectKey, value: Object | None) -> None:
        """Create, replace or delete an object."""
        self._news[key] = value
        if value is None:
            self.objects.pop(key, None)
        else:
            self.objects[key] = value
        self._changed.set()

    def label(self, labels: Mapping[str, str]) -> None:
        """Label the namespace of all pods."""
        self.put(ObjectKey("Namespace", "", _SPACE), {"metadata": {"name": _SPACE, "labels": labels}})

    async def next(self) -> Changes:
        await self._changed.wait()
        self._changed.clear()
        news, self._news = self._news, {}
        return Changes(news, synced=True)

    async def __call__(self, pod: Pod, value: str | None) -> Pod | None:
        await asyncio.sleep(0)
        key = ObjectKey("Pod", pod.info.namespace, pod.info.name)
        found: Any = self.objects.get(key)
        if found is None:
            return None
        annotations = {} if value is None else {REDIRECTION: value}
        changed = {**found, "metadata": {**found["metadata"], "annotations": annotations}}
        self.put(key, changed)
        (self.enabled.add if value == "enabled" else self.enabled.discard)(pod.info.name)
        return read_pod(changed)

    def event(self, key: ObjectKey, reason: str, message: str) -> None:
        print(f"{key} {reason} {message}")


class _Proxy:
    async def stop(self) -> None:
        """See RunningPod."""

    async def drain(self, timeout_s: float) -> None:
        """See RunningPod."""


async def _start(uid: PodUid, info: PodInfo, netns: Netns) -> Any:
    return _Proxy()


def _make(number: int, proc: Path, started: int) -> tuple[Netns, dict[str, Any]]:
    """Make a pod: a namespace, a process in it, and its object."""
    netns = Netns.create()
    address = IPv4Interface(f"10.{number >> 16 & 255}.{number >> 8 & 255}.{number & 255}/32")
    with NetlinkSocket(NETLINK_ROUTE, netns) as link:
        link.request(rtnetlink.create_bridge("eth0"))
        links = [rtnetlink.read_link(body) for body in link.dump(rtnetlink.dump_request(rtnetlink.RTM_GETLINK))]
        index = {item.name: item.index for item in links}
        for name in ("lo", "eth0"):
            link.request(rtnetlink.set_up(index[name]))
        wanted = Address("eth0", address)
        link.request(rtnetlink.address_message(rtnetlink.RTM_NEWADDR, wanted, index["eth0"]))
    uid = f"00000000-0000-0000-0000-{number:012x}"
    path = proc / str(1000 + number)
    (path / "ns").mkdir(parents=True)
    (path / "ns/net").symlink_to(f"/proc/{os.getpid()}/fd/{netns.fileno()}")
    (path / "cgroup").write_text(f"0::/kubepods/pod{uid}/{'e' * 64}\n")
    (path / "stat").write_text(f"{1000 + number} (pause) S " + " ".join(["0"] * 18 + [str(started)] + ["0"] * 30))
    metadata = {"name": f"p{number}", "namespace": _SPACE, "uid": uid}
    return netns, {"metadata": metadata, "spec": {}, "status": {"phase": "Running", "podIP": str(address.ip)}}


@contextlib.asynccontextmanager
async def _stage(folder: Path, cluster: Cluster) -> AsyncIterator[Enroller]:
    enroller = Enroller(
        folder / "zds", cluster, cluster, cluster, Settings(),
        proc=folder / "proc", record=folder / "record.json", grace_s=0, probe_user=os.getuid(),
    )  # fmt: skip
    async with enroller, PodManager(folder / "zds", _start) as manager:
        while not manager.ready:
            await asyncio.sleep(0.01)
        yield enroller


async def _until(condition: Any) -> None:
    while not condition():
        await asyncio.sleep(0.002)


async def together(folder: Path, count: int) -> tuple[float, float]:
    """Enrol many pods at once and release them. Return the seconds of both."""
    cluster = Cluster()
    (folder / "proc").mkdir()
    spaces = []
    for number in range(1, count + 1):
        netns, value = _make(number, folder / "proc", number)
        spaces.append(netns)
        cluster.put(ObjectKey("Pod", _SPACE, value["metadata"]["name"]), value)
    cluster.label({})
    async with _stage(folder, cluster) as enroller:
        await _until(lambda: enroller.synced)
        began = time.monotonic()
        cluster.label({MODE: "ambient"})
        await _until(lambda: len(cluster.enabled) == count)
        enrolled_s = time.monotonic() - began
        began = time.monotonic()
        cluster.label({})
        await _until(lambda: not cluster.enabled and not enroller.agent.pods())
        released_s = time.monotonic() - began
    for netns in spaces:
        netns.close()
    return enrolled_s, released_s


def _left() -> dict[str, int]:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    with contextlib.closing(BlockingTable(PROBE_TABLE)) as table:
        found = table.read()
    return {
        "descriptors": len(os.listdir("/proc/self/fd")),
        "resident KiB": pages * resource.getpagesize() >> 10,
        "probed pods": 0 if found is None else sum(len(item.elements) for item in found.sets),
        "tasks": len(asyncio.all_tasks()),
    }


async def come_and_go(folder: Path, cycles: int) -> tuple[dict[str, int], dict[str, int], float]:
    """Enrol and delete pods one after the other; return the counts near the start and at the end, and the time."""
    cluster = Cluster()
    (folder / "proc").mkdir()
    cluster.label({MODE: "ambient"})
    netns, value = _make(1, folder / "proc", 1)
    first = {}
    began = time.monotonic()
    async with _stage(folder, cluster) as enroller:
        for cycle in range(cycles):
            # A new pod each time, in the namespace of the previous one.
            uid = f"00000000-0000-0000-0000-{cycle:012x}"
            (folder / "proc/1001/cgroup").write_text(f"0::/kubepods/pod{uid}/{'e' * 64}\n")
            name = f"c{cycle}"
            key = ObjectKey("Pod", _SPACE, name)
            cluster.put(key, {**value, "metadata": {**value["metadata"], "name": name, "uid": uid}})
            await _until(lambda name=name: name in cluster.enabled)
            cluster.enabled.discard(name)
            cluster.put(key, None)
            await _until(lambda: not enroller.agent.pods() and not enroller.pods())
            if cycle + 1 == min(_WARM_UP, cycles):
                first = _left()
        last = _left()
    netns.close()
    return first, last, time.monotonic() - began


def main() -> None:
    """Run the bench in a network namespace of its own, which leaves this machine's rules alone."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pods", type=int, default=250)
    parser.add_argument("--cycles", type=int, default=10_000)
    args = parser.parse_args()
    logging.getLogger("ztunnel").setLevel(logging.ERROR)
    with Netns.create() as node, node.entered():
        # A thread inherits the namespace of its creator.
        if args.pods:
            with tempfile.TemporaryDirectory() as folder:
                enrolled_s, released_s = asyncio.run(together(Path(folder), args.pods))
            print(f"{args.pods} pods enrolled in {enrolled_s:.2f} s, released in {released_s:.2f} s")
        if args.cycles:
            with tempfile.TemporaryDirectory() as folder:
                first, last, took_s = asyncio.run(come_and_go(Path(folder), args.cycles))
            print(f"{args.cycles} cycles in {took_s:.0f} s, {1000 * took_s / args.cycles:.1f} ms each")
            for name, count in last.items():
                print(f"{name:<14} {first[name]:>8} after {_WARM_UP} {count:>8} at the end")


if __name__ == "__main__":
    main()
