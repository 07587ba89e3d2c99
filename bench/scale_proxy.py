"""The proxy that :mod:`bench.scale` measures, in its own process; answers requests on a pipe.

    python -m bench.scale_proxy --xds unix:/path [--delta]

Prints one JSON object when it is ready, then one per line read: ``look-up N`` and ``stall``.
"""

import argparse
import asyncio
import gc
import json
import logging
import random
import sys
import time
from pathlib import Path
from typing import Any

import uvloop

from bench.scale_mesh import CLIENT, NODE, PORT, service_address
from tproxy.aio.netns import CLONE_NEWNET, unshare
from xds.model.address import SocketAddress
from xds.model.facts import ConnectionFacts
from ztunnel.proxy.envoy.app import Proxy
from ztunnel.proxy.envoy.config.bootstrap import bootstrap_for, read_bootstrap
from ztunnel.proxy.envoy.config.settings import Settings
from ztunnel.proxy.envoy.config.state import State
from ztunnel.proxy.envoy.stream.stream_info import StreamInfo
from ztunnel.runtime import heap

_TICK_S = 0.005
_CONNECTIONS = 5000
_IN_USE = 10
_ROUNDS = 5


def memory() -> dict[str, int]:
    """Return the resident bytes now and at their peak."""
    lines = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return {name: int(lines[key].split()[0]) * 1024 for name, key in (("rss", "VmRSS"), ("peak", "VmHWM"))}


class Stall:
    """Measures the longest time without other work in the loop. Connections wait this long."""

    def __init__(self) -> None:
        self.longest_s = 0.0
        self._due = 0.0

    def start(self) -> None:
        """Start the ticker, which runs until the process ends."""
        self._tick()

    def _tick(self) -> None:
        loop = asyncio.get_running_loop()
        if self._due:
            self.longest_s = max(self.longest_s, loop.time() - self._due)
        self._due = loop.time() + _TICK_S
        loop.call_at(self._due, self._tick)


def look_up_us(proxy: Proxy, services: int) -> dict[str, float]:
    """Return the microseconds to route a connection: chain, cluster and host.

    ``us``: ten services are in use. ``all_us``: all services are in use, in random order, so the processor's
    caches have little of the needed data. ``first_us``: like ``all_us``, but the first connection of each cluster,
    which creates its hosts.
    """
    dice = random.Random(1)
    few = [dice.randrange(services) for _ in range(_IN_USE)]
    first_us = _routed_us(proxy, dice.choices(range(services), k=_CONNECTIONS))
    everywhere = [_routed_us(proxy, dice.choices(range(services), k=_CONNECTIONS)) for _ in range(_ROUNDS)]
    return {
        "us": min(_routed_us(proxy, dice.choices(few, k=_CONNECTIONS)) for _ in range(_ROUNDS)),
        "all_us": min(everywhere),
        "first_us": first_us,
    }


def _routed_us(proxy: Proxy, numbers: list[int]) -> float:
    listener = next(found for found in proxy.listeners.active if found.name == "ztunnel_outbound")
    source = SocketAddress(CLIENT, 40000)
    infos = []
    for number in numbers:
        destination = SocketAddress(service_address(number), PORT)
        facts = ConnectionFacts(source=source, direct_source=source, destination=destination)
        infos.append(StreamInfo(connection_id=number, facts=facts, started=0.0, started_at=0.0))
    before = time.perf_counter()
    for info in infos:
        chain = listener.chain_for(info.facts)
        assert chain is not None
        assert chain.proxy is not None
        cluster = proxy.clusters.get(chain.proxy.model.clusters[0].name)
        assert cluster is not None
        host = cluster.choose(info)
        assert host is not None
    return (time.perf_counter() - before) / len(infos) * 1e6


async def _main(target: str, *, delta: bool) -> None:
    begun_s, cpu_s = time.monotonic(), time.process_time()
    before = memory()
    settings = Settings(control_plane=target, node=NODE, admin=None, readiness=None, metrics=None)
    proxy = Proxy(settings, read_bootstrap(bootstrap_for(target, NODE, delta=delta, admin=None)))
    stall = Stall()
    async with asyncio.TaskGroup() as tasks:
        running = tasks.create_task(proxy.run())
        stall.start()
        while proxy.state is not State.LIVE:
            await asyncio.sleep(0.01)
        ready = {"ready_s": time.monotonic() - begun_s, "cpu_s": time.process_time() - cpu_s}
        await asyncio.sleep(0.2)
        _say({**ready, **memory(), "before": before["rss"], "stall_s": stall.longest_s})
        reader = asyncio.StreamReader()
        await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
        while line := await reader.readline():
            words = line.decode().split()
            if words[0] == "look-up":
                _say(look_up_us(proxy, int(words[1])))
            elif words[0] == "tasks":
                _say({"tasks": len(asyncio.all_tasks()), "objects": len(gc.get_objects()) + gc.get_freeze_count()})
            else:
                _say({"stall_s": stall.longest_s, **memory()})
                stall.longest_s = 0.0
        proxy.shut_down()
        await running


def _say(values: dict[str, Any]) -> None:
    print(json.dumps(values), flush=True)


def main() -> None:
    """Run the proxy."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--xds", required=True)
    parser.add_argument("--delta", action="store_true")
    args = parser.parse_args()
    heap.expect_growth()  # as the proxy's start does
    unshare(CLONE_NEWNET)  # its ports are fixed, so it needs a network namespace of its own
    logging.basicConfig(level=logging.WARNING, stream=sys.stderr)
    uvloop.run(_main(args.xds, delta=args.delta))


if __name__ == "__main__":
    main()
