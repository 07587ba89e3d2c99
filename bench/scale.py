"""``make bench-scale``: measures configuration, memory and look-up as the mesh grows.

    python -m bench.scale [--quick] [--json FILE] [--services N ...] [--endpoints N] [--variant sotw|delta ...]

Environment: ``QUICK=1`` (stops at 1,000 services), ``JSON=file``.
"""

import argparse
import asyncio
import contextlib
import datetime
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bench.chain import version
from bench.scale_mesh import ScaleMesh, packed_bytes
from deploy.lab import become_root_of_own_namespaces
from xds.aio.server import SnapshotServer
from xds.protocol.snapshot import Answered

_ROOT = Path(__file__).resolve().parent.parent
_SIZES = (10, 1000, 20_000)
_VARIANTS = ("sotw", "delta")
_REPEATS = 5
_LIMIT_S = 600.0
_CALM_S = 3.0  # seconds until a proxy returns free pages to the system
_KEY = "node"


@dataclass(slots=True)
class Measured:
    """A running proxy and the control plane that it is connected to."""

    mesh: ScaleMesh
    server: SnapshotServer
    process: asyncio.subprocess.Process
    answers: "asyncio.Queue[Answered]"
    values: dict[str, Any] = field(default_factory=dict)

    def cpu_s(self) -> float:
        """Return the CPU seconds of the proxy so far, to the nanosecond (``schedstat`` counts per thread)."""
        threads = Path(f"/proc/{self.process.pid}/task").glob("*/schedstat")
        return sum(int(path.read_text().split()[0]) for path in threads) / 1e9

    async def ask(self, question: str) -> dict[str, Any]:
        """Send one line to the proxy and return its answer."""
        assert self.process.stdin is not None
        self.process.stdin.write(f"{question}\n".encode())
        return await self.next_line()

    async def next_line(self) -> dict[str, Any]:
        """Return the proxy's next line."""
        assert self.process.stdout is not None
        async with asyncio.timeout(_LIMIT_S):
            line = await self.process.stdout.readline()
        if not line:
            raise RuntimeError("the proxy has ended")
        values: dict[str, Any] = json.loads(line)
        return values

    async def settled(self) -> None:
        """Wait until the proxy uses no more CPU than its ticker does."""
        before = self.cpu_s()
        while True:
            await asyncio.sleep(0.2)
            now = self.cpu_s()
            if now - before < 0.02:
                return
            before = now

    async def apply(self, change: Callable[[int], str], step: int) -> dict[str, float]:
        """Publish one change; return the proxy's CPU time, the time to its ACK and its loop's longest stall."""
        await self.settled()
        await self.ask("stall")
        while not self.answers.empty():
            self.answers.get_nowait()
        type_url = change(step)
        snapshot = self.mesh.snapshot()
        cpu_s, begun_s = self.cpu_s(), time.monotonic()
        self.server.publish(_KEY, snapshot)
        async with asyncio.timeout(_LIMIT_S):
            while (answered := await self.answers.get()).type_url != type_url:
                pass
        if answered.error is not None:
            raise RuntimeError(answered.error)
        wall_s = time.monotonic() - begun_s
        await self.settled()
        used_s = self.cpu_s() - cpu_s
        return {"cpu": used_s, "wall": wall_s, "stall": (await self.ask("stall"))["stall_s"]}


@contextlib.asynccontextmanager
async def running(mesh: ScaleMesh, folder: Path, *, delta: bool) -> AsyncIterator[Measured]:
    """Run a proxy with a mesh while entered."""
    answers: asyncio.Queue[Answered] = asyncio.Queue()
    address = f"unix:{folder}/xds-{'delta' if delta else 'sotw'}.sock"
    server = SnapshotServer(
        [address], key_of=lambda _: _KEY, on_answer=lambda _, answer: answers.put_nowait(answer)
    )
    async with server:
        server.publish(_KEY, mesh.snapshot())
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "bench.scale_proxy", "--xds", address, *(["--delta"] if delta else [])),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            cwd=_ROOT,
        )
        try:
            measured = Measured(mesh, server, process, answers)
            measured.values = await measured.next_line()
            yield measured
        finally:
            if process.returncode is None:
                process.kill()
            await process.wait()


async def measure(services: int, endpoints: int, variant: str, repeats: int) -> dict[str, Any]:
    """Measure one size and variant."""
    with tempfile.TemporaryDirectory(prefix="bench-scale-") as text:
        mesh = ScaleMesh(services, endpoints, Path(text))
        record: dict[str, Any] = {"services": services, "endpoints": services * endpoints, "variant": variant}
        record |= {f"wire_{name}_bytes": size for name, size in packed_bytes(mesh).items()}
        async with running(mesh, Path(text), delta=variant == "delta") as proxy:
            values = proxy.values
            grown = values["rss"] - values["before"]
            record |= {
                "ready_s": round(values["ready_s"], 2),
                "ready_cpu_s": round(values["cpu_s"], 2),
                "ready_stall_s": round(values["stall_s"], 3),
                "rss_before": values["before"],
                "rss": values["rss"],
                "rss_peak": values["peak"],
                "bytes_per_service": round(grown / services),
                "bytes_per_endpoint": round(grown / services / endpoints),
            }
            record |= await proxy.ask("tasks")
            found = await proxy.ask(f"look-up {services}")
            record |= {f"lookup_{name}": round(value, 2) for name, value in found.items()}
            changes = {
                "endpoint": mesh.change_endpoint,
                "cluster": mesh.add_cluster,
                "listener": mesh.add_to_listener,
            }
            for name, change in changes.items():
                samples = [await proxy.apply(change, step) for step in range(repeats)]
                for key in ("cpu", "wall", "stall"):
                    median = statistics.median(sample[key] for sample in samples)
                    record[f"{name}_{key}_ms"] = round(median * 1000, 2)
            await asyncio.sleep(_CALM_S)
            record["rss_after"] = (await proxy.ask("stall"))["rss"]
        return record


_ROWS: tuple[tuple[str, str, float], ...] = (
    ("time to ready, s", "ready_s", 1),
    ("  CPU of it, s", "ready_cpu_s", 1),
    ("  longest stall of the loop, s", "ready_stall_s", 1),
    ("RSS before configuration, MiB", "rss_before", 2**20),
    ("RSS when ready, MiB", "rss", 2**20),
    ("RSS at its peak, MiB", "rss_peak", 2**20),
    ("RSS after the changes below, MiB", "rss_after", 2**20),
    ("bytes per service, endpoints included", "bytes_per_service", 1),
    ("bytes per endpoint, service included", "bytes_per_endpoint", 1),
    ("asyncio tasks", "tasks", 1),
    ("look-up, ten services in use, us", "lookup_us", 1),
    ("  all in use, at random, us", "lookup_all_us", 1),
    ("  the first of each, us", "lookup_first_us", 1),
    ("one endpoint changed: CPU, ms", "endpoint_cpu_ms", 1),
    ("  until the ACK, ms", "endpoint_wall_ms", 1),
    ("  longest stall, ms", "endpoint_stall_ms", 1),
    ("one cluster added: CPU, ms", "cluster_cpu_ms", 1),
    ("  until the ACK, ms", "cluster_wall_ms", 1),
    ("  longest stall, ms", "cluster_stall_ms", 1),
    ("one service added to a listener: CPU, ms", "listener_cpu_ms", 1),
    ("  until the ACK, ms", "listener_wall_ms", 1),
    ("  longest stall, ms", "listener_stall_ms", 1),
)


def show(records: list[dict[str, Any]], heading: str) -> None:
    """Print the table, a column per size and variant."""
    print(f"\n{heading}\n")
    width = 14
    print(f"{'services':42}" + "".join(f"{record['services']:>{width},}" for record in records))
    print(f"{'variant':42}" + "".join(f"{record['variant']:>{width}}" for record in records))
    for title, key, unit in _ROWS:
        values = "".join(
            f"{record[key] / unit:>{width},.0f}"
            if record[key] / unit >= 100
            else f"{record[key] / unit:>{width},.2f}"
            for record in records
        )
        print(f"{title:42}{values}")


def main() -> int:
    """Run the sizes."""
    parser = argparse.ArgumentParser(prog="make bench-scale", description=__doc__)
    parser.add_argument("--quick", action="store_true", default=bool(os.environ.get("QUICK")))
    parser.add_argument("--json", type=Path, default=os.environ.get("JSON") or None)
    parser.add_argument("--services", type=int, nargs="+")
    parser.add_argument("--endpoints", type=int, default=10, help="of each service (default 10)")
    parser.add_argument("--variant", choices=_VARIANTS, action="append")
    parser.add_argument("--repeats", type=int, default=_REPEATS, help=f"of each change (default {_REPEATS})")
    args = parser.parse_args()
    become_root_of_own_namespaces()
    sizes = args.services or (_SIZES[:2] if args.quick else _SIZES)
    records = []
    for services in sizes:
        for variant in args.variant or _VARIANTS:
            print(f"{services:,} services, {variant}", file=sys.stderr)
            records.append(asyncio.run(measure(services, args.endpoints, variant, args.repeats)))
    now = datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d")
    show(records, f"{now}, {version()}, {args.endpoints} endpoints per service, medians of {args.repeats}")
    if args.json:
        Path(args.json).write_text(json.dumps(records, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
