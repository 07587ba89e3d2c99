"""Pods talk through our proxies with the certificates, services and policies of a real istiod."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from deploy.lab import may_make_namespaces
from tests.apiserver.server import ApiServer, api_server
from tests.istiod.mesh import MeshOfIstiod, known
from tests.istiod.server import POLICY
from tests.netns.istio import HELLO, ask, mesh_of, refused
from tests.netns.toys import app

pytestmark = [
    pytest.mark.netns,
    pytest.mark.timeout(300),
    pytest.mark.skipif(not may_make_namespaces(), reason="NOT TESTED: network namespaces need root"),
]
VIP = "10.96.0.10"


def test_tunnels_services_and_policies_as_istiod_describes_them(tmp_path: Path) -> None:
    async def main(cluster: ApiServer) -> None:
        nodes = {"w1": ["client", "other"], "w2": ["server"]}
        async with mesh_of(nodes, tmp_path, cluster, kind=MeshOfIstiod) as mesh:
            istiod = mesh.istiod
            assert istiod is not None
            client, other, server = map(mesh.lab.pod, ("client", "other", "server"))
            async with app(server):
                assert HELLO in await ask(client, server.ipv4, 8080)
                line: dict[str, Any] = await mesh.node_of("server").ended("inbound", "server")
                assert line["src.identity"] == "spiffe://cluster.local/ns/default/sa/client"
                assert line["dst.identity"] == "spiffe://cluster.local/ns/default/sa/server"
                assert line["dst.addr"] == f"{server.ipv4}:15008"

                await istiod.service("default", "front", VIP, app="server", port=80, target=8080)
                await known(mesh, "services", "front")
                assert HELLO in await ask(client, VIP, 80)

                await istiod.policy("default", "p", "server", "cluster.local/ns/default/sa/client")
                await known(mesh, "policies", "p")
                assert HELLO in await ask(client, VIP, 80)
                assert await refused(other, VIP, 80)
                assert await refused(other, server.ipv4, 8080)

                istiod.kill()
                assert HELLO in await ask(client, VIP, 80)
                assert await refused(other, VIP, 80)
                await istiod.client.delete(POLICY, "default", "p")
                await istiod.start()
                await known(mesh, "policies", "p", there=False)
                assert HELLO in await ask(other, VIP, 80)

    with api_server(tmp_path) as cluster:
        asyncio.run(main(cluster))
