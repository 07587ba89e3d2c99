"""Counts the files that one connection visits, and its returns to a file.

    python -m tests.life.walks [--steps]

Each call of a function of ``ztunnel/`` in the life of one connection is a step; a step into a file that it has
left before is a return. Code that is easy to follow has few returns. Modules that only keep counts or format lines
count as well, because a reader follows them, too. Calls are printed for Python functions in ``ztunnel/``, and for
all. Calls that the harness makes to observe the end of a connection are left out. ``--steps`` prints each step
with its functions; ``*`` marks a return.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import tempfile
from collections.abc import Awaitable, Callable
from pathlib import Path
from types import FrameType
from typing import Any

from tests.hbone import virtual_time
from tests.ztunnel.proxy.envoy import harness as envoy
from tests.ztunnel.proxy.envoy.test_proxy import internal_cluster
from tests.ztunnel.proxy.istio import pods as istio
from tests.ztunnel.proxy.istio.inbound_case import NEAR, POD, TunnelClient, fields
from ztunnel.proxy.dataplane.live_table import LiveTable

PACKAGE = str(Path(__file__).parents[2] / "ztunnel") + "/"


class Walk:
    """Files in the order in which calls enter them, each with the functions called there."""

    def __init__(self) -> None:
        self.steps: list[str] = []
        self.functions: list[list[str]] = []
        self.calls = self.all_calls = 0

    def _profiled(self, frame: FrameType, event: str, _argument: Any) -> None:
        if event != "call":
            return
        name = frame.f_code.co_filename
        self.all_calls += 1
        if name.startswith(PACKAGE):
            self.calls += 1
            file = name[len(PACKAGE) :]
            if not self.steps or self.steps[-1] != file:
                self.steps.append(file)
                self.functions.append([])
            self.functions[-1].append(frame.f_code.co_qualname)

    def __enter__(self) -> Walk:
        sys.setprofile(self._profiled)
        return self

    def __exit__(self, *_: object) -> None:
        sys.setprofile(None)

    def __str__(self) -> str:
        seen: set[str] = set()
        returns = 0
        for file in self.steps:
            returns += file in seen
            seen.add(file)
        counts = f"{len(seen)} files, {returns} returns, {self.calls} of {self.all_calls} calls"
        return f"{counts}; most often " + ", ".join(
            f"{file} {self.steps.count(file)}" for file in sorted(seen, key=self.steps.count, reverse=True)[:4]
        )

    def lines(self) -> list[str]:
        """Return a line for each step: the returns so far, a mark, the file and the functions."""
        seen: set[str] = set()
        returns, lines = 0, []
        for file, functions in zip(self.steps, self.functions, strict=True):
            returns += file in seen
            lines.append(f"{returns:4} {'*' if file in seen else ' '} {file:44} {', '.join(functions)}")
            seen.add(file)
        return lines


async def _over(table: LiveTable) -> None:
    """Wait until only the tunnel connection is alive; reads the groups, so that no call is of the harness."""
    while sum(len(group._entries) for group in table._groups) > 1:
        await asyncio.sleep(0)


async def _istio_outbound(cluster: istio.Cluster) -> Walk:
    far = istio.workload("far", istio.OTHER, node=istio.ELSEWHERE)
    await cluster.start(NEAR)
    cluster.mesh.apply([far])
    cluster.peer("far", istio.OTHER)

    async def once() -> None:
        assert await cluster.dial(f"{istio.OTHER}:{istio.APP_PORT}").ask() == b"ping"
        await _over(cluster.node.live)

    await once()  # the first one dials the tunnel connection
    with Walk() as walk:
        await once()
    return walk


async def _istio_inbound(cluster: istio.Cluster) -> Walk:
    await cluster.start(POD)
    cluster.application(istio.SERVER)
    connection = await cluster.tunnels_to("server")

    async def once() -> None:
        assert await TunnelClient(cluster, await connection.open(fields())).end.ask() == b"ping"
        await _over(cluster.node.live)

    await once()
    with Walk() as walk:
        await once()
    connection.close()
    return walk


def _istio(body: Callable[[istio.Cluster], Awaitable[Walk]]) -> Walk:
    walks: list[Walk] = []

    async def main() -> None:
        with tempfile.TemporaryDirectory() as folder:
            async with istio.cluster(Path(folder)) as cluster:
                walks.append(await body(cluster))

    virtual_time.run(main)
    return walks[0]


async def _to_service(harness: envoy.Harness, everything: list[tuple[str, envoy.Json]]) -> None:
    """Put the listener of a tunnel behind another one, like the services of a mesh."""
    tunnelling = envoy.tcp("tunnel", tunneling_config={"hostname": "app:80"})
    _, inner = envoy.listener(envoy.chain(tunnelling), name="inner", internal_listener={})
    del inner["address"]
    rest = [entry for entry in everything if entry[1].get("name") != "l"]
    outer = envoy.listener(envoy.chain(envoy.tcp("service")))
    harness.publish(*rest, outer, ("listener", inner), internal_cluster("service", "inner"))
    await harness.until(lambda: len(harness.proxy.listeners.active) == 3)
    await harness.until(lambda: harness.count("listener_manager.total_listeners_draining") == 0)


def _envoy(*, earlier: int = 1, service: bool = False) -> Walk:
    """Run both directions of one tunnel in one proxy, over the network.

    Args:
        earlier: the number of connections before it. The first one dials the tunnel connection and makes plans.
        service: the client dials a service, behind an internal listener.
    """
    walks: list[Walk] = []

    async def body(harness: envoy.Harness) -> None:
        async with envoy.application() as port:
            everything = await envoy.tunnel(harness, port, envoy.Identities(), envoy.rbac(envoy.CLIENT))
            if service:
                await _to_service(harness, everything)
            listening, table = harness.port("l"), harness.proxy.connections.table

            async def once() -> None:
                assert await envoy.ask(listening) == b"ping"
                await _over(table)

            for _ in range(earlier):
                await once()
            with Walk() as walk:
                await once()
            walks.append(walk)

    with tempfile.TemporaryDirectory() as folder:
        envoy.run(Path(folder), body)
    return walks[0]


def main() -> None:
    """Print each walk."""
    parser = argparse.ArgumentParser(prog="python -m tests.life.walks", description=__doc__)
    parser.add_argument("--steps", action="store_true", help="print each step")
    steps = parser.parse_args().steps
    for name, walk in (
        ("Istio, outbound", _istio(_istio_outbound)),
        ("Istio, inbound", _istio(_istio_inbound)),
        ("Envoy, both directions", _envoy()),
        ("Envoy, the first one", _envoy(earlier=0)),
        ("Envoy, to a service", _envoy(earlier=2, service=True)),
    ):
        print(f"{name:23}{walk}")
        for line in walk.lines() if steps else ():
            print(line)


if __name__ == "__main__":
    main()
