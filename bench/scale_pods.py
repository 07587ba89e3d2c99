"""The pods' part of ``make bench-scale``: measures the cost of starting and stopping pods.

    python -m bench.scale_pods [--quick] [--json FILE] [--cycles N] [--pods N]

The proxy is a process as Istio's chart starts it, with a certificate authority of its own and an empty mesh; this
script is its node agent. Memory, descriptors and processor time are the proxy's, from /proc. Needs root, or user
namespaces.

Environment: ``QUICK=1`` (a tenth of the cycles).
"""

import argparse
import asyncio
import json
import os
import statistics
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from bench.chain import version
from deploy.lab import Lab, Place, become_root_of_own_namespaces
from tproxy.aio.netns import Netns
from ztunnel.proxy.istio.zds.channel import Channel, Listener
from ztunnel.proxy.istio.zds.messages import (
    AddPod,
    DeletePod,
    Request,
    SnapshotSent,
    read_answer,
    read_hello,
    request_bytes,
)
from ztunnel.proxy.istio.zds.pods import PodInfo, PodUid

_CYCLES, _PODS = 10_000, 250
#: Cycles after which caches and the allocator have grown to their steady size.
_WARM_UP = 500
_SPACES = 4
_WAIT_S = 60.0
#: Time for the last page's connection to close after its answer.
_SETTLE_S = 0.2
ROOT = Path(__file__).parents[1]


class Proxy:
    """The proxy's process, and the agent's end of its socket."""

    def __init__(self, place: Place, folder: Path) -> None:
        self._place = place
        self._listener = Listener(folder / "zds.sock")
        self._channel: Channel | None = None
        env = {
            **{key: os.environ[key] for key in ("PATH", "HOME") if key in os.environ},
            "PYTHONPATH": str(ROOT),
            "XDS_ADDRESS": "",
            "FAKE_CA": "true",
            "INPOD_UDS": str(folder / "zds.sock"),
            "NODE_NAME": "w1",
            "RUST_LOG": "error",
        }
        self._process = place.popen([sys.executable, "-m", "ztunnel", "proxy"], env=env)

    async def connected(self) -> None:
        async with asyncio.timeout(_WAIT_S):
            self._channel = await self._listener.accept()
            packet = await self._channel.receive()
        assert packet is not None
        read_hello(packet.data)
        await self.say(SnapshotSent())

    async def say(self, request: Request, netns: Netns | None = None) -> float:
        """Send a request to the proxy, and return the time until its answer."""
        assert self._channel is not None
        began_s = time.perf_counter()
        async with asyncio.timeout(_WAIT_S):
            await self._channel.send(request_bytes(request), [] if netns is None else [netns.fileno()])
            packet = await self._channel.receive()
        took_s = time.perf_counter() - began_s
        if packet is None:
            sys.exit("the proxy has hung up")
        error = read_answer(packet.data)
        if error:
            sys.exit(f"the proxy refused: {error}")
        return took_s

    async def add(self, number: int, netns: Netns) -> float:
        info = PodInfo(name=f"pod-{number}", namespace="default", service_account="default")
        return await self.say(AddPod(PodUid(f"uid-{number}"), info), netns)

    async def remove(self, number: int) -> float:
        return await self.say(DeletePod(PodUid(f"uid-{number}")))

    def page(self, port: int, path: str) -> str:
        def fetch() -> str:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=_WAIT_S) as answer:
                text: str = answer.read().decode()
                return text

        fetched: str = self._place.run(fetch)
        return fetched

    async def stopped(self, count: int) -> None:
        """Wait until this number of pods' proxies have ended."""
        async with asyncio.timeout(_WAIT_S):
            while f"\nworkload_manager_proxies_stopped_total {count}\n" not in self.page(15020, "/metrics"):
                await asyncio.sleep(0.05)

    @property
    def descriptors(self) -> int:
        return len(os.listdir(f"/proc/{self._process.pid}/fd"))

    @property
    def resident_bytes(self) -> int:
        pages = Path(f"/proc/{self._process.pid}/statm").read_text().split()[1]
        return int(pages) * os.sysconf("SC_PAGE_SIZE")

    @property
    def cpu_s(self) -> float:
        fields = Path(f"/proc/{self._process.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def close(self) -> None:
        if self._channel is not None:
            self._channel.close()
        self._listener.close()


def in_ms(times_s: Iterable[float]) -> dict[str, float]:
    ordered = sorted(times_s)
    return {
        "median_ms": round(statistics.median(ordered) * 1000, 2),
        "p99_ms": round(ordered[int(len(ordered) * 0.99)] * 1000, 2),
        "longest_ms": round(ordered[-1] * 1000, 2),
    }


async def cycles(proxy: Proxy, spaces: list[Netns], count: int) -> dict[str, Any]:
    """Measure pods that start and stop one after the other."""
    for number in range(_WARM_UP):
        await proxy.add(number, spaces[number % len(spaces)])
        await proxy.remove(number)
    await proxy.stopped(_WARM_UP)
    descriptors, memory, cpu_s = proxy.descriptors, proxy.resident_bytes, proxy.cpu_s
    began_s, added = time.perf_counter(), []
    for number in range(_WARM_UP, _WARM_UP + count):
        added.append(await proxy.add(number, spaces[number % len(spaces)]))
        await proxy.remove(number)
    took_s = time.perf_counter() - began_s
    await proxy.stopped(_WARM_UP + count)
    await asyncio.sleep(_SETTLE_S)
    return {
        "cycles": count,
        "per_s": round(count / took_s),
        "cpu_ms_per_cycle": round((proxy.cpu_s - cpu_s) * 1000 / count, 2),
        "descriptors_left": proxy.descriptors - descriptors,
        "kib_left": (proxy.resident_bytes - memory) // 1024,
        **in_ms(added),
    }


async def at_once(proxy: Proxy, spaces: list[Netns], stopped: int) -> dict[str, Any]:
    """Measure a node with all its pods from the start, as after a restart of the proxy."""
    descriptors, memory = proxy.descriptors, proxy.resident_bytes
    began_s = time.perf_counter()
    added = [await proxy.add(1_000_000 + number, space) for number, space in enumerate(spaces)]
    took_s = time.perf_counter() - began_s
    states = json.loads(proxy.page(15000, "/config_dump"))["workloadState"]
    up = sum(state["state"] == "Up" for state in states.values())
    if up != len(spaces):
        sys.exit(f"{up} of {len(spaces)} pods are up")
    record = {
        "pods": up,
        "up_s": round(took_s, 2),
        "kib_per_pod": round((proxy.resident_bytes - memory) / 1024 / up, 1),
        "descriptors_per_pod": round((proxy.descriptors - descriptors) / up, 1),
        **in_ms(added),
    }
    began_s = time.perf_counter()
    for number in range(len(spaces)):
        await proxy.remove(1_000_000 + number)
    await proxy.stopped(stopped + len(spaces))
    return {**record, "gone_s": round(time.perf_counter() - began_s, 2)}


async def measured(count: int, pods: int) -> list[dict[str, Any]]:
    with ExitStack() as stack:
        lab = stack.enter_context(Lab({"w1": []}))
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        proxy = Proxy(lab.worker("w1").place, folder)
        stack.callback(proxy.close)
        spaces = [stack.enter_context(Netns.create()) for _ in range(max(pods, _SPACES))]
        await proxy.connected()
        return [
            await cycles(proxy, spaces[:_SPACES], count),
            await at_once(proxy, spaces[:pods], _WARM_UP + count),
        ]


def main() -> int:
    become_root_of_own_namespaces()
    parser = argparse.ArgumentParser(prog="python -m bench.scale_pods", description=__doc__)
    parser.add_argument("--quick", action="store_true", default=bool(os.environ.get("QUICK")))
    parser.add_argument("--json", type=Path)
    parser.add_argument("--cycles", type=int, metavar="N", help=f"pods that come and go (default {_CYCLES:,})")
    parser.add_argument("--pods", type=int, default=_PODS, metavar="N", help="pods at once (default %(default)s)")
    args = parser.parse_args()
    count = args.cycles or (_CYCLES // 10 if args.quick else _CYCLES)
    print(f"\nPods of a node proxy, {version()}\n")
    come_and_go, full = asyncio.run(measured(count, args.pods))
    print(
        f"{come_and_go['cycles']:>7,} pods came and went: {come_and_go['per_s']} per second, "
        f"{come_and_go['cpu_ms_per_cycle']} ms of processor each; answered in {come_and_go['median_ms']} ms, "
        f"99 % in {come_and_go['p99_ms']} ms; left over: {come_and_go['descriptors_left']} descriptors, "
        f"{come_and_go['kib_left']} KiB"
    )
    print(
        f"{full['pods']:>7,} pods at once: all listen after {full['up_s']} s, 99 % answered in {full['p99_ms']} "
        f"ms; {full['kib_per_pod']} KiB and {full['descriptors_per_pod']} descriptors per pod; gone after "
        f"{full['gone_s']} s"
    )
    if args.json:
        args.json.write_text(json.dumps([come_and_go, full], indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
