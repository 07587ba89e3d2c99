"""A mesh whose proxies have a real istiod, and waypoints and gateways with certificates of this istiod."""

import asyncio
import contextlib
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

from tests.apiserver.server import ADMIN, ApiServer
from tests.istiod.server import HOST, Istiod, root_file
from tests.netns.hbone_ends import HboneEnds
from tests.netns.istio import AmbientMesh, NodeProxy, eventually
from tproxy.aio.sockets import listen
from xds.model.identity import SpiffeId
from ztunnel.kube.client import connect
from ztunnel.proxy.istio.certificates.ca_client import IstioCertificateAuthority
from ztunnel.proxy.istio.certificates.credentials import Credentials, Endpoint, Roots, Token
from ztunnel.proxy.istio.certificates.manager import TlsPolicy, WorkloadCertificate

PORT = 15012


class MeshOfIstiod(AmbientMesh):
    """A mesh whose proxies connect to a real istiod, through a port of loopback in the namespace of each node.

    Args:
        cluster: the API server. Each pod of the lab becomes a pod of the namespace default, with its own account.
        captured: as in :class:`AmbientMesh`. istiod expects tunnels only to these pods.
        later: pods that the test itself creates in the API server.
        env: further environment of the proxies.
        settings: further environment of istiod.
        network: the network of this cluster.
    """

    def __init__(
        self,
        nodes: dict[str, list[str]],
        folder: Path,
        cluster: ApiServer,
        *,
        captured: list[str] | None = None,
        later: Collection[str] = (),
        env: Mapping[str, str] | None = None,
        settings: Mapping[str, str] | None = None,
        network: str = "",
    ) -> None:
        address, root = f"https://127.0.0.1:{PORT}", str(root_file(folder))
        given = {
            "XDS_ADDRESS": address,
            "CA_ADDRESS": address,
            "XDS_ROOT_CA": root,
            "CA_ROOT_CA": root,
            "ALT_XDS_HOSTNAME": HOST,
            "ALT_CA_HOSTNAME": HOST,
            "AUTH_TOKEN": f"{folder}/token-{{node}}",
            "NETWORK": network,
            **(env or {}),
        }
        super().__init__(nodes, folder, env=given, captured=captured)
        self.cluster = cluster
        self.later = later
        self.network = network
        self.settings = dict(settings or {})
        self.istiod: Istiod | None = None
        self._of_istiod = contextlib.AsyncExitStack()
        self._connections: set[asyncio.Task[None]] = set()

    async def start_control_plane(self) -> None:
        async with contextlib.AsyncExitStack() as stack:
            client = await stack.enter_async_context(connect(self.cluster.kubeconfig(ADMIN)))
            istiod = self.istiod = Istiod(self.cluster, client, self.folder, self.settings)
            stack.callback(istiod.kill)
            stack.push_async_callback(self._end_connections)
            await istiod.prepare(network=self.network)
            await istiod.namespace("default")
            for name, worker in self.lab.workers.items():
                await istiod.node(name)
                token = await istiod.ztunnel_token(name, str(worker.place.ipv4))
                (self.folder / f"token-{name}").write_text(token)
                for pod in worker.pods.values():
                    await istiod.account("default", pod.name)
                    if pod.name not in self.later:
                        await self.create_pod(pod.name)
                listening = listen("127.0.0.1", PORT, netns=worker.place.netns)
                server = await asyncio.start_server(self._forward, sock=listening)
                stack.callback(server.close)
            await istiod.start()
            self._of_istiod = stack.pop_all()

    async def create_pod(self, name: str, *, account: str = "", labels: Mapping[str, str] | None = None) -> None:
        """Create a pod of the lab in the API server, running and ready."""
        assert self.istiod is not None
        (node,) = [each for each, worker in self.lab.workers.items() if name in worker.pods]
        await self.istiod.pod(
            "default",
            name,
            [str(address) for address in self.lab.pod(name).addresses],
            node=node,
            account=account or name,
            enrolled=name in self.captured,
            labels=labels,
        )

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


class Ends(HboneEnds):
    """Waypoints and gateways with certificates of the mesh's istiod; see :class:`HboneEnds`."""

    def __init__(self, mesh: MeshOfIstiod) -> None:
        super().__init__(mesh.folder)
        self._mesh = mesh
        self._issued: dict[str, WorkloadCertificate] = {}

    async def enrol(self, account: str, *, node: str, namespace: str = "default") -> None:
        """Request the certificate of an account, which needs a pod on this node."""
        istiod = self._mesh.istiod
        assert istiod is not None
        authority = IstioCertificateAuthority(
            Endpoint.parse(f"https://127.0.0.1:{istiod.port}"),
            Credentials(token=Token(f"{self._mesh.folder}/token-{node}"), cluster_id="Kubernetes", headers=()),
            Roots(str(istiod.root)),
            impersonate=True,
            alternative_name=HOST,
        )
        try:
            issued = await authority.issue(SpiffeId("cluster.local", namespace, account))
        finally:
            await authority.close()
        self._issued[account] = WorkloadCertificate(issued, 0, TlsPolicy())

    def certificate(self, account: str, trust_domain: str = "cluster.local") -> WorkloadCertificate:
        return self._issued[account]


async def shown(
    mesh: AmbientMesh, part: str, name: str, condition: Callable[[Mapping[str, Any] | None], object]
) -> None:
    """Wait until the entry of a name in every proxy's dump meets a condition. The entry is None while missing."""
    for proxy in mesh.proxies.values():

        def agrees(proxy: NodeProxy = proxy) -> object:
            return condition(next((each for each in proxy.dump()[part] if each["name"] == name), None))

        await eventually(agrees, f"{part} {name} in {proxy.place.name}")


async def known(mesh: AmbientMesh, part: str, name: str, *, there: bool = True) -> None:
    """Wait until every proxy has an object, or no longer has it."""
    await shown(mesh, part, name, lambda entry: (entry is not None) is there)
