"""``make bench-start [COUNT=n]``: kills a node's proxy, starts it again, prints how long its pods wait.

Times are seconds from exec: to the first line of the log (the imports are over), to the last pod's listeners, to
the first connection that an application gets through its tunnel, and the processor time of the process up to
then, which depends less on what else the machine does; and the memory of the process then. The same with
``--hold-sockets`` follows: from the kill to the first connection, and how many connections were refused. Meshes
have 10, 1,000 and 10,000 workloads; 10,000 are read from a local file.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import statistics
import tempfile
import time
from datetime import datetime
from ipaddress import ip_address
from pathlib import Path
from typing import Any

import yaml

from deploy.lab import Place
from tests.netns.istio import HELLO, AmbientMesh, NodeProxy, ask
from tests.netns.toys import app
from tproxy.errors import TproxyError
from ztunnel.runtime.holder import MOST_CRASHES

_MOST_S = 30.0
_MOST_SENT = 2000
_HELD_S = 3.0
_FIRST_OTHER = ip_address("10.128.0.1")


async def recover(mesh: AmbientMesh, proxy: NodeProxy, client: Place, host: object) -> dict[str, float]:
    """Kill the proxy, start its successor, and return the times until it has done what."""
    proxy.process.kill()
    proxy.process.wait()
    mark = len(proxy.log_path.read_bytes())
    began_s, began_at = time.monotonic(), time.time()
    proxy.process = mesh.start_proxy(mesh.lab.worker(proxy.place.name))
    while not await _served(client, host):
        if time.monotonic() - began_s > _MOST_S:
            raise AssertionError(f"no connection served within {_MOST_S:g} s")
        await asyncio.sleep(0.002)
    took_s = time.monotonic() - began_s
    fields = Path(f"/proc/{proxy.process.pid}/stat").read_text().rpartition(")")[2].split()
    processor_s = (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    resident = int(Path(f"/proc/{proxy.process.pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    def lines() -> list[dict[str, str]]:
        text = proxy.log_path.read_bytes()[mark:].decode().splitlines()
        return [json.loads(line) for line in text if line.startswith("{")]

    while not any("pod snapshot complete" in line["message"] for line in lines()):
        await asyncio.sleep(0.01)
    pods = next(line for line in lines() if "pod snapshot complete" in line["message"])
    first, last = (datetime.fromisoformat(line["time"]).timestamp() - began_at for line in (lines()[0], pods))
    return {
        "imports, s": first,
        "pods listening, s": last,
        "first connection served, s": took_s,
        "processor until then, s": processor_s,
        "memory then, MiB": resident / 2**20,
    }


async def recover_held(mesh: AmbientMesh, proxy: NodeProxy, client: Place, host: object) -> dict[str, float]:
    """Kill the process under a holder, and return the time until the next one has served a connection."""
    holder = proxy.process.pid
    children = Path(f"/proc/{holder}/task/{holder}/children")
    began_s = time.monotonic()
    os.kill(int(children.read_text()), signal.SIGKILL)
    refused = 0
    while not await _served(client, host, _MOST_S):
        refused += 1
        if time.monotonic() - began_s > _MOST_S:
            raise AssertionError(f"no connection served within {_MOST_S:g} s")
    took_s = time.monotonic() - began_s
    await asyncio.sleep(_HELD_S)  # it writes its configuration to the holder once that is calm
    return {"under a holder: first connection served, s": took_s, "under a holder: refused": refused}


async def _served(client: Place, host: object, wait_s: float = 1.0) -> bool:
    try:
        return (await ask(client, host, 8080, wait_s=wait_s)).endswith(HELLO)
    except (OSError, TproxyError, TimeoutError):
        return False


def crowd(workloads: int) -> dict[str, Any]:
    """Return ``workloads`` pods of other nodes, in the form of a mesh file."""
    return {
        f"ns-{number % 100}/other-{number}": {
            "node": "other",
            "addresses": [str(_FIRST_OTHER + number)],
            "service_account": f"account-{number // 10}",
        }
        for number in range(workloads)
    }


class CrowdedMesh(AmbientMesh):
    """Two nodes with a pod each, in a mesh with many other workloads.

    Many come from a local file: the embedded control plane, which is for a laptop, takes minutes to describe them.
    """

    def __init__(self, folder: Path, workloads: int, **env: str) -> None:
        self._others = crowd(workloads - 2)
        local = self._described if workloads > _MOST_SENT else None
        super().__init__({"w1": ["client"], "w2": ["far"]}, folder, local=local, env=env, forks=False)

    def write_mesh(self, **changes: object) -> None:
        """Write the mesh file like the base class, with the additional workloads."""
        super().write_mesh(**changes)
        if self.local is None:
            path = self.folder / "mesh.yaml"
            described = yaml.safe_load(path.read_text())
            described["pods"] |= self._others
            described["nodes"]["other"] = {}
            path.write_text(yaml.safe_dump(described))

    def _described(self, mesh: AmbientMesh) -> dict[str, Any]:
        others = [
            {
                "uid": f"Kubernetes//Pod/{name}",
                "name": name.partition("/")[2],
                "namespace": name.partition("/")[0],
                "serviceAccount": pod["service_account"],
                "workloadIps": pod["addresses"],
                "protocol": "HBONE",
                "node": pod["node"],
                "services": {},
            }
            for name, pod in self._others.items()
        ]
        return {"workloads": [*self.workloads(), *others]}


async def measured(folder: Path, count: int, workloads: int) -> list[dict[str, float]]:
    """Return the times of so many recoveries."""
    async with CrowdedMesh(folder, workloads) as mesh, app(mesh.lab.pod("far")):
        client, host = mesh.lab.pod("client"), mesh.lab.pod("far").ipv4
        assert await _served(client, host)
        found = [await recover(mesh, mesh.proxies["w1"], client, host) for _ in range(count)]
    held: list[dict[str, float]] = []
    while len(held) < count:
        # A holder ends at the last crash of those that it allows within a minute.
        part = min(count - len(held), MOST_CRASHES - 1)
        (place := folder / f"held-{len(held)}").mkdir()
        async with CrowdedMesh(place, workloads, ZTUNNEL_HOLD_SOCKETS="true") as mesh:
            client, far = mesh.lab.pod("client"), mesh.lab.pod("far")
            async with app(far):
                assert await _served(client, far.ipv4)
                await asyncio.sleep(_HELD_S)
                held += [await recover_held(mesh, mesh.proxies["w1"], client, far.ipv4) for _ in range(part)]
    return [{**one, **other} for one, other in zip(found, held, strict=True)]


def main() -> None:
    """Run and print the table."""
    parser = argparse.ArgumentParser(prog="make bench-start", description=__doc__)
    parser.add_argument("--count", type=int, default=9, help="of each size")
    parser.add_argument("--workloads", type=int, nargs="+", default=(10, 1000, 10_000))
    options = parser.parse_args()
    print("| workloads | | median | best | worst |\n|---|---|---|---|---|")
    for workloads in options.workloads:
        with tempfile.TemporaryDirectory(prefix="recovery-") as folder:
            found = asyncio.run(measured(Path(folder), options.count, workloads))
        for name in found[0]:
            values = sorted(times[name] for times in found)
            cells = (f"{value:.2f}" for value in (statistics.median(values), values[0], values[-1]))
            print(f"| {workloads:,} | {name} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
