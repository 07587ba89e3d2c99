"""A list of 20,000 pods in pages from a server on loopback: time, longest stall of the loop, memory.

``python -m bench.kube [--pods N]``. The server is a separate process with prepared pages. Pods have the size of
real ones, about 6 KB; the reader keeps name, labels and addresses. The stall is the longest time between two steps
of a task that is always ready to run.
"""

import argparse
import asyncio
import json
import multiprocessing
import os
import tempfile
import time
from collections.abc import Mapping
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from ztunnel.kube.client import PAGE, connect
from ztunnel.kube.informer import Informer
from ztunnel.kube.kinds import POD, Selection
from ztunnel.kube.objects import Object

_LINE = "{:<34} {:>10}"


def _pod(number: int) -> dict[str, Any]:
    name = f"web-{number}"
    padding = {f"example.com/annotation-{index}": "x" * 180 for index in range(12)}
    environment = [{"name": f"VARIABLE_{index}", "value": f"value {index}"} for index in range(25)]
    container = {
        "name": "app",
        "image": "registry.example/app:1",
        "env": environment,
        "ports": [{"containerPort": 80}],
    }
    return {
        "metadata": {
            "name": name,
            "namespace": f"team-{number % 100}",
            "uid": f"00000000-0000-0000-0000-{number:012}",
            "resourceVersion": str(number + 1),
            "labels": {"app": f"app-{number % 500}", "tier": "web"},
            "annotations": padding,
        },
        "spec": {"nodeName": f"node-{number % 80}", "containers": [container, {**container, "name": "beside"}]},
        "status": {"phase": "Running", "podIP": "10.0.0.1", "podIPs": [{"ip": "10.0.0.1"}]},
    }


def _keep(pod: Object) -> Object:
    metadata: Mapping[str, Any] = pod["metadata"]
    return {
        "metadata": {name: metadata[name] for name in ("name", "namespace", "labels")},
        "status": pod["status"],
    }


def _resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def _serve(count: int, told: Connection) -> None:
    pages = []
    for begin in range(0, count, PAGE):
        end = min(begin + PAGE, count)
        metadata = {"resourceVersion": str(count + 1)} | ({"continue": str(end)} if end < count else {})
        body = json.dumps({"metadata": metadata, "items": [_pod(number) for number in range(begin, end)]}).encode()
        head = f"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
        pages.append(head.encode() + body)

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while head := await reader.readuntil(b"\r\n\r\n"):
            target = head.split(b" ")[1].decode()
            if "watch=true" in target:
                await asyncio.Event().wait()
            begin = int(target.partition("&continue=")[2] or 0)
            writer.write(pages[begin // PAGE])
            await writer.drain()

    async def run() -> None:
        server = await asyncio.start_server(answer, "127.0.0.1", 0)
        told.send((server.sockets[0].getsockname()[1], sum(map(len, pages))))
        await server.serve_forever()

    asyncio.run(run())


async def _measure(port: int, count: int) -> tuple[float, float]:
    longest_s = 0.0

    async def turns() -> None:
        nonlocal longest_s
        last_s = time.perf_counter()
        while True:
            await asyncio.sleep(0)
            now_s = time.perf_counter()
            longest_s = max(longest_s, now_s - last_s)
            last_s = now_s

    described = {
        "current-context": "it",
        "contexts": [{"name": "it", "context": {"cluster": "it", "user": "me"}}],
        "clusters": [{"name": "it", "cluster": {"server": f"http://127.0.0.1:{port}"}}],
        "users": [{"name": "me", "user": {"token": "x"}}],
    }
    objects: dict[Any, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kubeconfig"
        path.write_text(json.dumps(described))
        async with connect(path) as client, Informer(client, (Selection(POD, keep=_keep),)) as informer:
            began_s = time.perf_counter()
            beside = asyncio.get_running_loop().create_task(turns())
            while not informer.synced or len(objects) < count:
                objects |= (await informer.next()).objects
            took_s = time.perf_counter() - began_s
            beside.cancel()
    return took_s, longest_s


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pods", type=int, default=20_000)
    count: int = parser.parse_args().pods
    ours, theirs = multiprocessing.Pipe()
    server = multiprocessing.get_context("spawn").Process(target=_serve, args=(count, theirs), daemon=True)
    server.start()
    port, size = ours.recv()
    before = _resident_bytes()
    took_s, longest_s = asyncio.run(_measure(port, count))
    print(_LINE.format("pods", f"{count:,}"), _LINE.format("MiB on the wire", f"{size >> 20:,}"), sep="\n")
    print(
        _LINE.format("until synced, s", f"{took_s:.2f}"),
        _LINE.format("longest stall, ms", f"{longest_s * 1e3:.1f}"),
        sep="\n",
    )
    print(_LINE.format("memory grew by, MiB", f"{(_resident_bytes() - before) / 2**20:.0f}"))
    server.terminate()


if __name__ == "__main__":
    main()
