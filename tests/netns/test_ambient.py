"""Pods of an Istio mesh, announced over ZDS, talk through our node proxies."""

import asyncio
from pathlib import Path

import pytest

from tests.netns.ambient import HELLO, ask, mesh_of
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
                outbound = await mesh.node_of("client").ended("outbound", name)
                inbound = await mesh.node_of(name).ended("inbound", name)
                for line in (outbound, inbound):
                    assert line["src.identity"] == "spiffe://cluster.local/ns/default/sa/client"
                    assert line["dst.identity"] == f"spiffe://cluster.local/ns/default/sa/{name}"
                    assert line["dst.hbone_addr"] == f"{server.ipv4}:8080"
                assert (outbound["bytes_sent"], outbound["bytes_recv"]) == (len(HELLO), len(answer))
                assert (inbound["bytes_sent"], inbound["bytes_recv"]) == (len(answer), len(HELLO))

    asyncio.run(main())
