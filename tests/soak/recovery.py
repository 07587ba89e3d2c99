"""``python -m tests.soak.recovery [COUNT]``: kills a node's proxy, starts it again, prints how long pods wait.

Times are seconds from exec: to the first line of the log (the imports are over), to the last pod's listeners, to
the first connection that an application gets through its tunnel, and the processor time of the process up to
then, which depends less on what else the machine does.
"""

from __future__ import annotations

import asyncio
import json
import statistics
import sys
import tempfile
import time
from datetime import datetime
from pathlib import Path

from deploy.lab import Place
from tests.netns.istio import HELLO, AmbientMesh, NodeProxy, ask
from tests.netns.toys import app
from tproxy.errors import TproxyError

_MOST_S = 30.0


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
    processor_s = (int(fields[11]) + int(fields[12])) / 100

    def lines() -> list[dict[str, str]]:
        text = proxy.log_path.read_bytes()[mark:].decode().splitlines()
        return [json.loads(line) for line in text if line.startswith("{")]

    while not any("pod snapshot complete" in line["message"] for line in lines()):
        await asyncio.sleep(0.01)
    pods = next(line for line in lines() if "pod snapshot complete" in line["message"])
    first, last = (datetime.fromisoformat(line["time"]).timestamp() - began_at for line in (lines()[0], pods))
    return {"imports": first, "pods": last, "served": took_s, "processor": processor_s}


async def _served(client: Place, host: object) -> bool:
    try:
        return (await ask(client, host, 8080, wait_s=1.0)).endswith(HELLO)
    except (OSError, TproxyError, TimeoutError):
        return False


async def measured(folder: Path, count: int) -> list[dict[str, float]]:
    """Return the times of so many recoveries."""
    async with AmbientMesh({"w1": ["client"], "w2": ["far"]}, folder) as mesh, app(mesh.lab.pod("far")):
        client, host = mesh.lab.pod("client"), mesh.lab.pod("far").ipv4
        assert await _served(client, host)
        return [await recover(mesh, mesh.proxies["w1"], client, host) for _ in range(count)]


def main() -> None:
    count = int(sys.argv[1]) if len(sys.argv) > 1 else 9
    with tempfile.TemporaryDirectory(prefix="recovery-") as folder:
        found = asyncio.run(measured(Path(folder), count))
    for name in found[0]:
        values = sorted(times[name] for times in found)
        median = statistics.median(values)
        print(f"{name:<10} median {median:.3f} s   best {values[0]:.3f}   worst {values[-1]:.3f}")


if __name__ == "__main__":
    main()
