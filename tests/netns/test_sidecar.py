"""An injected pod: rules by ``ztunnel init``, our proxy as a user without capabilities, and all it talks to."""

import asyncio
import contextlib
import re
import socket
import subprocess
import sys
import tempfile
import urllib.error
import urllib.request
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import dns.message
import dns.rrset
import pytest

from deploy.lab import Place
from hbone.aio.connection_settings import ConnectionSettings
from hbone.settings import server_settings
from tests.netns.hbone_ends import HboneEnds, greeting
from tests.netns.istio import HELLO, ROOT, AmbientMesh, NodeProxy, ask, eventually, mesh_of, refused
from tests.netns.toys import app, peer_address, serving
from tests.programs import needed
from tproxy.aio.sockets import listen
from tproxy.sidecar import PASSTHROUGH, USER
from ztunnel.sidecar.inject.config import InjectConfig, SidecarConfig
from ztunnel.sidecar.inject.inject import inject

pytestmark = [pytest.mark.netns, pytest.mark.timeout(120)]
IDENTITY = "spiffe://cluster.local/ns/default/sa/{}"
NATIVE = InjectConfig(templates=("sidecar",))
CLASSIC = InjectConfig(templates=("sidecar-classic",))
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


def template(name: str, config: InjectConfig, **container: Any) -> dict[str, Any]:
    """A pod as the injector makes it."""
    written = {
        "metadata": {"name": name, "labels": {"app": name}},
        "spec": {"containers": [{"name": "app", **container}], "serviceAccountName": name},
    }
    return dict(inject(written, "default", config).pod)


def part(pod: dict[str, Any], name: str) -> dict[str, Any]:
    spec = pod["spec"]
    return next(each for each in (*spec["initContainers"], *spec["containers"]) if each["name"] == name)


def variables(container: dict[str, Any], place: Place, node: str) -> dict[str, str]:
    """The environment of a container, as kubelet makes it."""
    fields = {
        "metadata.name": place.name,
        "metadata.namespace": "default",
        "metadata.uid": f"uid-{place.name}",
        "spec.serviceAccountName": place.name,
        "spec.nodeName": node,
        "status.podIP": str(place.ipv4),
        "status.hostIP": "10.0.0.1",
    }
    made: dict[str, str] = {}
    for each in container["env"]:
        text = each["value"] if "value" in each else fields[each["valueFrom"]["fieldRef"]["fieldPath"]]
        made[each["name"]] = re.sub(r"\$\((\w+)\)", lambda found: made[found[1]], text)
    return made


@contextlib.asynccontextmanager
async def injected(
    mesh: AmbientMesh, name: str, config: InjectConfig = NATIVE, **container: Any
) -> AsyncIterator[Sidecar]:
    """Run a pod's init container and its sidecar as the injector has written them."""
    place = mesh.lab.pod(name)
    node = next(worker for worker in mesh.lab.workers.values() if name in worker.pods)
    pod = template(name, config, **container)
    ran(place, *part(pod, "mesh-init")["args"])
    given = variables(part(pod, "istio-proxy"), place, node.place.name)
    # A sidecar of a cluster has TCP to its control plane; here the socket is root's.
    (mesh.folder / "xds.sock").chmod(0o777)
    socket = dict.fromkeys(("XDS_ADDRESS", "CA_ADDRESS"), f"unix:{mesh.folder}/xds.sock")
    process = mesh.start_proxy(
        node, place, prefix=(needed("setpriv"), *AS_PROXY), **{**given, **socket, "RUST_LOG": "info"}
    )
    proxy = Sidecar(place, mesh.folder, process, mesh.proxies[node.place.name].agent, [name])
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


def test_a_sidecar_drains_its_peers_and_ends_with_its_pod(folder: Path) -> None:
    async def main() -> None:
        async with contextlib.AsyncExitStack() as stack:
            harness = mesh_of({"w1": ["sidecar"], "w2": ["rust", "plain"]}, folder, captured=[], pods=MESH)
            mesh = await stack.enter_async_context(harness)
            pod, rust = mesh.lab.pod("sidecar"), mesh.lab.pod("rust")
            await stack.enter_async_context(app(pod))
            proxy = await stack.enter_async_context(injected(mesh, "sidecar"))
            ends = await stack.enter_async_context(HboneEnds(folder))
            dialled = ends.connection(rust, pod.ipv4, "rust", expect="sidecar")
            connection = await stack.enter_async_context(dialled)
            loop = asyncio.get_running_loop()
            with await ends.tunnel(connection, f"{pod.ipv4}:8080") as tunnel:
                first = await loop.sock_recv(tunnel, 100)
                # Clients outside the mesh can connect, in plain text and through a tunnel, whose last part comes
                # from loopback.
                request = (
                    b"POST /quitquitquit HTTP/1.1\r\nHost: x\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"
                )
                said = await ask(mesh.lab.pod("plain"), pod.ipv4, 15020, request)
                assert said.startswith(b"HTTP/1.1 403 ")
                with await ends.tunnel(connection, f"{pod.ipv4}:15020") as stranger:
                    await loop.sock_sendall(stranger, request)
                    assert (await loop.sock_recv(stranger, 100)).startswith(b"HTTP/1.1 403 ")
                # The preStop hook: the peer gets GOAWAY, open connections continue, and new ones are still
                # accepted.
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


def fetched(place: Place, url: str) -> tuple[int, str]:
    """A page, as kubelet asks for it."""

    def fetch() -> tuple[int, str]:
        try:
            with urllib.request.urlopen(url, timeout=10) as answer:
                return answer.status, answer.read().decode()
        except urllib.error.HTTPError as error:
            return error.code, error.read().decode()

    return place.run(fetch)


def test_kubelets_probes_pass_where_the_mesh_takes_tunnels_only(folder: Path) -> None:
    async def main() -> None:
        strict = {
            "strict": {
                "service_account": "sidecar",
                "rules": [{"from": {"principals": [IDENTITY.format("other")]}}],
            }
        }
        async with contextlib.AsyncExitStack() as stack:
            harness = mesh_of(
                {"w1": ["sidecar"], "w2": ["plain"]}, folder, captured=[], pods=MESH, mesh={"policies": strict}
            )
            mesh = await stack.enter_async_context(harness)
            pod, node = mesh.lab.pod("sidecar"), mesh.lab.worker("w1").place
            probes = {
                "readinessProbe": {"httpGet": {"path": "/ready", "port": 8080}},
                "livenessProbe": {"tcpSocket": {"port": 8080}},
                "startupProbe": {"httpGet": {"path": "/", "port": 9}},
            }
            seen: list[str] = []

            async def ready(client: socket.socket) -> bytes:
                seen.append(str(peer_address(client).ip))
                return b"HTTP/1.0 200 OK\r\ncontent-length: 3\r\n\r\nyes"

            listener = listen("0.0.0.0", 8080, netns=pod.netns)
            await stack.enter_async_context(serving(listener, ready))
            proxy = await stack.enter_async_context(injected(mesh, "sidecar", CLASSIC, **probes))
            injected_pod = template("sidecar", CLASSIC, **probes)
            app_container = part(injected_pod, "app")
            # The application's port itself is closed to who has no certificate, kubelet included.
            assert await refused(node, pod.ipv4, 8080)
            for key, expected in (("readinessProbe", (200, "yes")), ("livenessProbe", (200, ""))):
                asked = app_container[key]["httpGet"]
                url = f"http://{pod.ipv4}:{asked['port']}{asked['path']}"
                assert await asyncio.to_thread(fetched, node, url) == expected
            asked = app_container["startupProbe"]["httpGet"]
            status, said = await asyncio.to_thread(
                fetched, node, f"http://{pod.ipv4}:{asked['port']}{asked['path']}"
            )
            assert (status, "the application cannot be asked" in said) == (500, True)
            assert set(seen) == {str(PASSTHROUGH[4])}
            # The hooks of an ordinary container: it delays the other containers at the start, and drains at the
            # end.
            hooks = part(injected_pod, "istio-proxy")["lifecycle"]
            for hook in ("postStart", "preStop"):
                program, *words = hooks[hook]["exec"]["command"]
                assert program == "ztunnel"
                await asyncio.to_thread(ran, pod, *words, *(["--least=0"] if hook == "preStop" else []))
            proxy.process.terminate()
            assert await proxy.drained() == 0

    asyncio.run(main())


def test_names_of_the_mesh_are_answered_in_the_pod_and_others_asked_elsewhere(folder: Path) -> None:
    async def main() -> None:
        shop = {"addresses": ["10.96.0.10"], "ports": {"http": 80}, "pods": ["sidecar"]}
        config = InjectConfig(templates=("sidecar",), sidecar=SidecarConfig(dns_capture=True))
        async with contextlib.AsyncExitStack() as stack:
            resolver = "10.244.2.10"  # the other pod
            harness = mesh_of(
                {"w1": ["sidecar"], "w2": ["plain"]},
                folder,
                captured=[],
                pods=MESH,
                mesh={"services": {"shop": shop}},
                resolv_conf=lambda mesh: f"nameserver {mesh.lab.pod('plain').ipv4}\n",
            )
            mesh = await stack.enter_async_context(harness)
            pod, plain = mesh.lab.pod("sidecar"), mesh.lab.pod("plain")
            assert str(plain.ipv4) == resolver
            await stack.enter_async_context(injected(mesh, "sidecar", config))
            server = stack.enter_context(plain.socket(kind=socket.SOCK_DGRAM))
            server.bind((resolver, 53))
            server.settimeout(10)

            def elsewhere() -> None:
                query, peer = server.recvfrom(4096)
                asked = dns.message.from_wire(query)
                answer = dns.message.make_response(asked)
                name = str(asked.question[0].name)
                answer.answer.append(dns.rrset.from_text(name, 60, "IN", "A", "192.0.2.9"))
                server.sendto(answer.to_wire(), peer)

            def resolved(name: str) -> str:
                with pod.socket(kind=socket.SOCK_DGRAM) as client:
                    client.settimeout(10)
                    # From a new port, like an application. Both flows have the same resolver.
                    client.sendto(dns.message.make_query(name, "A").to_wire(), (resolver, 53))
                    data, peer = client.recvfrom(4096)
                    assert peer == (resolver, 53)
                    return str(dns.message.from_wire(data).answer[0][0])

            assert await asyncio.to_thread(resolved, "shop.default.svc.cluster.local.") == "10.96.0.10"
            serving_elsewhere = asyncio.to_thread(elsewhere)
            found, _ = await asyncio.gather(asyncio.to_thread(resolved, "example.com."), serving_elsewhere)
            assert found == "192.0.2.9"

    asyncio.run(main())


def test_an_injected_pod_talks_to_every_other_kind(folder: Path) -> None:
    async def main() -> None:
        nodes = {"w1": ["sidecar", "enrolled"], "w2": ["other", "plain", "far", "rust"]}
        shop = {"addresses": ["10.96.0.10"], "ports": {"http": {"port": 80, "target": 8080}}, "pods": ["sidecar"]}
        async with contextlib.AsyncExitStack() as stack:
            harness = mesh_of(
                nodes, folder, captured=["enrolled", "far"], pods=MESH, mesh={"services": {"shop": shop}}
            )
            mesh = await stack.enter_async_context(harness)
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
                # The pod also reaches itself by its own address.
                await hello(pod, pod, version, own)
            # Through its own service it leaves its proxy and comes back in, like any other client.
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
