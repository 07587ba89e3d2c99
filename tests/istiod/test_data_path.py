"""Pods talk through our proxies with the certificates, services and policies of a real istiod."""

import asyncio
import contextlib
from pathlib import Path
from typing import Any

import pytest

from deploy.lab import may_make_namespaces
from tests.apiserver.server import ADMIN, ApiServer, api_server
from tests.istiod.server import HOST, POLICY, Istiod
from tests.netns.istio import HELLO, AmbientMesh, ask, eventually, mesh_of, refused
from tests.netns.toys import app
from tproxy.aio.sockets import listen
from ztunnel.kube.client import connect

pytestmark = [
    pytest.mark.netns,
    pytest.mark.timeout(300),
    pytest.mark.skipif(not may_make_namespaces(), reason="NOT TESTED: network namespaces need root"),
]
PORT = 15012
VIP = "10.96.0.10"


class MeshOfIstiod(AmbientMesh):
    """A mesh whose proxies connect to a real istiod, through a port of loopback in the namespace of each node.

    Args:
        cluster: the API server. Each pod of the lab becomes a pod of the namespace default, with its own account.
    """

    def __init__(self, nodes: dict[str, list[str]], folder: Path, cluster: ApiServer) -> None:
        address, root = f"https://127.0.0.1:{PORT}", str(folder / "istiod-root.pem")
        env = {
            "XDS_ADDRESS": address,
            "CA_ADDRESS": address,
            "XDS_ROOT_CA": root,
            "CA_ROOT_CA": root,
            "ALT_XDS_HOSTNAME": HOST,
            "ALT_CA_HOSTNAME": HOST,
            "AUTH_TOKEN": f"{folder}/token-{{node}}",
        }
        super().__init__(nodes, folder, env=env)
        self.cluster = cluster
        self.istiod: Istiod | None = None
        self._of_istiod = contextlib.AsyncExitStack()
        self._connections: set[asyncio.Task[None]] = set()

    async def start_control_plane(self) -> None:
        async with contextlib.AsyncExitStack() as stack:
            client = await stack.enter_async_context(connect(self.cluster.kubeconfig(ADMIN)))
            istiod = self.istiod = Istiod(self.cluster, client, self.folder)
            stack.callback(istiod.kill)
            stack.push_async_callback(self._end_connections)
            await istiod.prepare()
            await istiod.namespace("default")
            for name, worker in self.lab.workers.items():
                await istiod.node(name)
                token = await istiod.ztunnel_token(name, str(worker.place.ipv4))
                (self.folder / f"token-{name}").write_text(token)
                for pod in worker.pods.values():
                    await istiod.account("default", pod.name)
                    addresses = [str(address) for address in pod.addresses]
                    await istiod.pod("default", pod.name, addresses, node=name, account=pod.name)
                listening = listen("127.0.0.1", PORT, netns=worker.place.netns)
                server = await asyncio.start_server(self._forward, sock=listening)
                stack.callback(server.close)
            await istiod.start()
            self._of_istiod = stack.pop_all()

    async def stop_control_plane(self) -> None:
        await self._of_istiod.aclose()

    async def _end_connections(self) -> None:
        for task in self._connections:
            task.cancel()
        await asyncio.gather(*self._connections, return_exceptions=True)

    async def _forward(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        assert self.istiod is not None
        task = asyncio.current_task()
        assert task is not None
        self._connections.add(task)
        async with contextlib.AsyncExitStack() as stack:
            stack.push_async_callback(_close, writer)
            with contextlib.suppress(OSError):
                far_reader, far_writer = await asyncio.open_connection("127.0.0.1", self.istiod.port)
                stack.push_async_callback(_close, far_writer)
                await asyncio.gather(_copy(reader, far_writer), _copy(far_reader, writer))
        self._connections.discard(task)


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(OSError):
        while data := await reader.read(65536):
            writer.write(data)
            await writer.drain()
    writer.close()


async def _close(writer: asyncio.StreamWriter) -> None:
    writer.close()
    with contextlib.suppress(OSError):
        await writer.wait_closed()


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


async def known(mesh: AmbientMesh, part: str, name: str, *, there: bool = True) -> None:
    """Wait until every proxy has an object, or no longer has it."""
    for proxy in mesh.proxies.values():

        def agrees(proxy: Any = proxy) -> bool:
            return any(each["name"] == name for each in proxy.dump()[part]) is there

        await eventually(agrees, f"{part} {name} in {proxy.place.name}: {there}")
