"""An injected pod: rules by ``ztunnel init``, our proxy as a user without capabilities, and all it talks to."""

import asyncio
import contextlib
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from deploy.lab import Place
from hbone.aio.connection import ConnectionSettings
from hbone.settings import server_settings
from tests.netns.hbone_ends import HboneEnds, greeting
from tests.netns.istio import HELLO, ROOT, AmbientMesh, NodeProxy, ask, eventually, mesh_of
from tests.netns.toys import app
from tests.programs import needed
from tproxy.sidecar import PASSTHROUGH, USER

pytestmark = [pytest.mark.netns, pytest.mark.timeout(120)]
IDENTITY = "spiffe://cluster.local/ns/default/sa/{}"
MESH = {name: {"mesh": True} for name in ("sidecar", "other", "rust")}
AS_PROXY = (f"--reuid={USER}", f"--regid={USER}", "--clear-groups", "--bounding-set=-all")


def ran(place: Place, *words: str) -> None:
    process = place.popen(
        [sys.executable, "-m", "ztunnel", *words],
        env={"PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    said, _ = process.communicate(timeout=30)
    assert process.returncode == 0, said


class Sidecar(NodeProxy):
    """A pod's own proxy."""

    async def drained(self) -> int:
        """Wait for its end; the exit status."""
        return await asyncio.to_thread(self.process.wait, 30)


@contextlib.asynccontextmanager
async def injected(mesh: AmbientMesh, name: str, **env: str) -> AsyncIterator[Sidecar]:
    """Run a pod's init container and its sidecar, as the injector's templates say."""
    pod = mesh.lab.pod(name)
    node = next(worker for worker in mesh.lab.workers.values() if name in worker.pods)
    ran(pod, "init", "-d", "15090,15021,15020")
    # A sidecar of a cluster has TCP to its control plane; here the socket is root's.
    (mesh.folder / "xds.sock").chmod(0o777)
    process = mesh.start_proxy(
        node,
        pod,
        prefix=(needed("setpriv"), *AS_PROXY),
        PROXY_MODE="dedicated",
        PROXY_WORKLOAD_INFO=f"default/{name}/{name}",
        ZTUNNEL_SIDECAR="true",
        INSTANCE_IP=str(pod.ipv4),
        **env,
    )
    proxy = Sidecar(pod, mesh.folder, process, mesh.proxies[node.place.name].agent, [name])
    await eventually(proxy.ready, f"the sidecar of {name} is ready")
    mesh.proxies[name] = proxy
    yield proxy


async def hello(client: Place, server: Place, version: int, seen: object) -> None:
    """Talk to the application of a pod, and check whom it sees."""
    answer = await ask(client, server.address(version), 8080)
    assert answer == f"app {server.name} peer {seen}\n".encode() + HELLO


@pytest.fixture
def folder() -> Iterator[Path]:
    """A folder through which any user reaches the control plane's socket, unlike pytest's."""
    with tempfile.TemporaryDirectory() as made:
        Path(made).chmod(0o711)
        yield Path(made)


def test_it_sends_its_peers_away_and_ends_when_its_own_pod_says_so(folder: Path) -> None:
    async def main() -> None:
        async with contextlib.AsyncExitStack() as stack:
            rig = mesh_of({"w1": ["sidecar"], "w2": ["rust", "plain"]}, folder, captured=[], pods=MESH)
            mesh = await stack.enter_async_context(rig)
            pod, rust = mesh.lab.pod("sidecar"), mesh.lab.pod("rust")
            await stack.enter_async_context(app(pod))
            proxy = await stack.enter_async_context(injected(mesh, "sidecar"))
            ends = await stack.enter_async_context(HboneEnds(folder))
            dialled = ends.connection(rust, pod.ipv4, "rust", expect="sidecar")
            connection = await stack.enter_async_context(dialled)
            loop = asyncio.get_running_loop()
            with await ends.tunnel(connection, f"{pod.ipv4}:8080") as tunnel:
                first = await loop.sock_recv(tunnel, 100)
                # Strangers may ask, in the clear and through a tunnel, whose last part comes from loopback.
                request = (
                    b"POST /quitquitquit HTTP/1.1\r\nHost: x\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"
                )
                said = await ask(mesh.lab.pod("plain"), pod.ipv4, 15020, request)
                assert said.startswith(b"HTTP/1.1 403 ")
                with await ends.tunnel(connection, f"{pod.ipv4}:15020") as stranger:
                    await loop.sock_sendall(stranger, request)
                    assert (await loop.sock_recv(stranger, 100)).startswith(b"HTTP/1.1 403 ")
                # The preStop hook: the peer hears GOAWAY, what runs goes on, new connections are taken still.
                waiting = pod.popen(
                    [sys.executable, "-m", "ztunnel", "drain", "--wait=60", "--least=0"],
                    env={"PYTHONPATH": str(ROOT)},
                )
                await eventually(lambda: not connection.accepts_streams, "the peer is sent away")
                assert waiting.poll() is None
                await loop.sock_sendall(tunnel, HELLO)
                assert await loop.sock_recv(tunnel, 100) == HELLO
                again = ends.connection(rust, pod.ipv4, "rust", expect="sidecar")
                other = await stack.enter_async_context(again)
                with await ends.tunnel(other, f"{pod.ipv4}:8080") as late:
                    assert await loop.sock_recv(late, 100) == first
            assert await asyncio.to_thread(waiting.wait, 30) == 0
            # A job's own container: the proxy ends in order.
            status, _ = proxy.get(15020, "/quitquitquit", "POST")
            assert status == 200
            assert await proxy.drained() == 0

    asyncio.run(main())


def test_an_injected_pod_talks_to_every_other_kind(folder: Path) -> None:
    async def main() -> None:
        nodes = {"w1": ["sidecar", "enrolled"], "w2": ["other", "plain", "far", "rust"]}
        shop = {"addresses": ["10.96.0.10"], "ports": {"http": {"port": 80, "target": 8080}}, "pods": ["sidecar"]}
        async with contextlib.AsyncExitStack() as stack:
            rig = mesh_of(
                nodes, folder, captured=["enrolled", "far"], pods=MESH, mesh={"services": {"shop": shop}}
            )
            mesh = await stack.enter_async_context(rig)
            places = {name: mesh.lab.pod(name) for names in nodes.values() for name in names}
            for place in places.values():
                await stack.enter_async_context(app(place))
            first = await stack.enter_async_context(injected(mesh, "sidecar"))
            second = await stack.enter_async_context(injected(mesh, "other"))
            pod = places["sidecar"]
            for version in (4, 6):
                own, passthrough = pod.address(version), PASSTHROUGH[4 if version == 4 else 6]
                # Out: to another injected pod, to enrolled ones of both nodes, to a plain one.
                await hello(pod, places["other"], version, passthrough)
                for name in ("enrolled", "far"):
                    await hello(pod, places[name], version, own)
                await hello(pod, places["plain"], version, own)
                # In: from all of these.
                for name in ("other", "enrolled", "far", "plain"):
                    await hello(places[name], pod, version, passthrough)
                # And itself, by its own address.
                await hello(pod, pod, version, own)
            # By its own service: out of its proxy, and in again, as from anywhere else.
            assert await ask(pod, "10.96.0.10", 80) == f"app sidecar peer {PASSTHROUGH[4]}\n".encode() + HELLO
            assert (await first.ended("outbound", "sidecar"))["dst.service"] == "shop.default.svc.cluster.local"
            # A workload that ends tunnels by itself and announces nothing that is ours alone, as Rust ztunnel.
            ends = await stack.enter_async_context(HboneEnds(mesh.folder))
            plainly = ConnectionSettings(http2=replace(server_settings(), early_data=False))
            rust = places["rust"]
            await stack.enter_async_context(ends.serving(rust, "rust", greeting(b"rust "), settings=plainly))
            assert await ask(pod, rust.ipv4, 8080) == b"rust " + HELLO
            connection = await stack.enter_async_context(ends.connection(rust, pod.ipv4, "rust", expect="sidecar"))
            with await ends.tunnel(connection, f"{pod.ipv4}:8080") as tunnel:
                loop = asyncio.get_running_loop()
                assert await loop.sock_recv(tunnel, 100) == f"app sidecar peer {PASSTHROUGH[4]}\n".encode()
            for name in ("other", "enrolled", "far", "rust"):
                line = await first.ended("outbound", name)
                assert (line["src.identity"], line["dst.identity"]) == (
                    IDENTITY.format("sidecar"),
                    IDENTITY.format(name),
                )
            assert "dst.identity" not in await first.ended("outbound", "plain")
            lines = await first.lines("inbound", 10, dst_workload="sidecar")
            secured = {line["src.workload"] for line in lines if "src.identity" in line}
            assert secured == {"other", "enrolled", "far", "sidecar", "rust"}
            assert (await second.ended("inbound", "other"))["src.identity"] == IDENTITY.format("sidecar")

    asyncio.run(main())
