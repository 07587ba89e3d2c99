"""Pods of an Istio mesh, announced over ZDS, talk through our node proxies."""

import asyncio
from pathlib import Path

import pytest

from tests.netns.ambient import HELLO, ask, eventually, mesh_of
from tests.netns.toys import app

pytestmark = [pytest.mark.netns, pytest.mark.timeout(90)]


def test_captured_pods_of_one_node_and_of_two(tmp_path: Path) -> None:
    async def main() -> None:
        nodes = {"w1": ["client", "near"], "w2": ["far"]}
        async with mesh_of(nodes, tmp_path) as mesh:
            client = mesh.lab.pod("client")
            for name in ("near", "far"):
                server = mesh.lab.pod(name)
                async with app(server):
                    answer = await ask(client, server.ipv4, 8080)
                assert answer == f"app {name} peer {client.ipv4}\n".encode() + HELLO
                source, destination = mesh.node_of("client"), mesh.node_of(name)
                outbound = await eventually(lambda proxy=source: proxy.access("outbound"), "outbound log")
                inbound = await eventually(lambda proxy=destination: proxy.access("inbound"), "inbound log")
                assert outbound[-1]["src.identity"] == "spiffe://cluster.local/ns/default/sa/client"
                assert inbound[-1]["dst.identity"] == f"spiffe://cluster.local/ns/default/sa/{name}"
                assert outbound[-1]["bytes_sent"] == len(answer)
                assert inbound[-1]["bytes_recv"] == len(HELLO)

    asyncio.run(main())
