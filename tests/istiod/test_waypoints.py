"""Waypoints as a real istiod describes them: the way of connections while waypoints come, fail and go."""

import asyncio
import contextlib
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest

from deploy.lab import Place, may_make_namespaces
from tests.apiserver.server import api_server
from tests.istiod.mesh import Ends, MeshOfIstiod, known, shown
from tests.istiod.server import GATEWAY, Istiod
from tests.limits import WAIT_S
from tests.netns.hbone_ends import greeting
from tests.netns.istio import HELLO, ask, mesh_of, refused
from tests.netns.test_istio_waypoints import read_proxy_header
from tests.netns.toys import app, serving
from tproxy.aio.sockets import connect, listen
from ztunnel.kube.kinds import NAMESPACE, POD, SERVICE

pytestmark = [
    pytest.mark.netns,
    pytest.mark.timeout(300),
    pytest.mark.skipif(not may_make_namespaces(), reason="NOT TESTED: network namespaces need root"),
]
VIP, WAYPOINT_VIP = "10.96.0.10", "10.96.0.20"
USE, USE_NAMESPACE, KIND = "istio.io/use-waypoint", "istio.io/use-waypoint-namespace", "istio.io/waypoint-for"
#: Labels of a waypoint's pods: they terminate tunnels themselves.
INSTANCE = {"app": "wp", "gateway.networking.k8s.io/gateway-name": "wp", "networking.istio.io/tunnel": "http"}


def hostname(name: str, namespace: str = "default") -> str:
    return f"{name}.{namespace}.svc.cluster.local"


async def waypoint_service(istiod: Istiod, **more: str) -> None:
    """Create the Service of the waypoint ``wp``, as Istio's gateway controller does."""
    spec = {
        "clusterIP": WAYPOINT_VIP,
        "selector": {"app": "wp"},
        "ports": [{"name": "mesh", "port": 15008, "targetPort": 15008}],
    }
    labels = {"gateway.istio.io/managed": "istio.io-mesh-controller", **more}
    await istiod.put(SERVICE, "default", "wp", labels=labels, spec=spec)


def run(
    folder: Path, main: Callable[[MeshOfIstiod], Coroutine[Any, Any, None]], *args: Any, **options: Any
) -> None:
    async def all_of_it() -> None:
        with api_server(folder) as cluster:
            async with mesh_of(*args, folder, cluster, kind=MeshOfIstiod, **options) as mesh:
                assert isinstance(mesh, MeshOfIstiod)
                await main(mesh)

    asyncio.run(all_of_it())


async def through(place: Place, host: object, port: int) -> bytes:
    """Return who answers a connection: the first line."""
    return (await ask(place, host, port)).partition(b"\n")[0]


def test_service_waypoint_becomes_ready_fails_is_replaced_and_removed(tmp_path: Path) -> None:
    async def main(mesh: MeshOfIstiod) -> None:
        istiod, proxy = mesh.istiod, mesh.node_of("client")
        assert istiod is not None
        client, server, wp1, wp2 = map(mesh.lab.pod, ("client", "server", "wp1", "wp2"))
        direct = f"app server peer {client.ipv4}".encode()
        async with contextlib.AsyncExitStack() as stack:
            ends = await stack.enter_async_context(Ends(mesh))
            await stack.enter_async_context(app(server))
            await istiod.service("default", "front", VIP, app="server", port=80, target=8080)
            await istiod.label(SERVICE, "default", "front", {USE: "wp"})
            await waypoint_service(istiod)
            await istiod.gateway("default", "wp", "istio-waypoint", addresses=[])
            await known(mesh, "services", "wp")
            # istiod names a waypoint once its Gateway is ready.
            assert await through(client, VIP, 80) == direct

            await mesh.create_pod("wp1", account="wp", labels=INSTANCE)
            await ends.enrol("wp", node="w2")
            for place in (wp1, wp2):
                first = f"{place.name}\n".encode()
                await stack.enter_async_context(ends.serving(place, "wp", greeting(first)))
            await istiod.gateway_ready("default", "wp", [hostname("wp")])
            await shown(mesh, "services", "front", lambda entry: entry is not None and "waypoint" in entry)
            await shown(mesh, "services", "wp", lambda entry: entry is not None and entry["endpoints"])
            assert await through(client, VIP, 80) == b"wp1"
            assert ends.requests[-1].head.authority == f"{VIP}:80".encode()
            assert await through(client, server.ipv4, 8080) == direct  # only the service has a waypoint

            kept = await connect((VIP, 80), netns=client.netns)
            loop = asyncio.get_running_loop()
            with kept:
                assert await loop.sock_recv(kept, 100) == b"wp1\n"
                await istiod.set_ready("default", "wp1", ready=False)
                await shown(mesh, "services", "wp", lambda entry: entry is not None and not entry["endpoints"])
                answered = len(ends.requests)
                assert await refused(client, VIP, 80)
                await proxy.failed(f"unknown waypoint: waypoint {hostname('wp')} not found", "outbound")
                assert len(ends.requests) == answered

                await mesh.create_pod("wp2", account="wp", labels=INSTANCE)
                await shown(mesh, "services", "wp", lambda entry: entry is not None and entry["endpoints"])
                assert await through(client, VIP, 80) == b"wp2"
                await istiod.client.delete(POD, "default", "wp1", grace_s=0)
                await known(mesh, "workloads", "wp1", there=False)
                # The connection through the removed pod stays, because its tunnel does.
                await loop.sock_sendall(kept, HELLO)
                async with asyncio.timeout(WAIT_S):
                    assert await loop.sock_recv(kept, 100) == HELLO

            await istiod.label(SERVICE, "default", "front", {USE: "none"})
            await shown(mesh, "services", "front", lambda entry: entry is not None and "waypoint" not in entry)
            assert await through(client, VIP, 80) == direct
            await istiod.label(SERVICE, "default", "front", {USE: None})
            await istiod.label(NAMESPACE, "", "default", {USE: "wp"})
            await shown(mesh, "services", "front", lambda entry: entry is not None and "waypoint" in entry)
            assert await through(client, VIP, 80) == b"wp2"
            await istiod.client.delete(GATEWAY, "default", "wp")
            await shown(mesh, "services", "front", lambda entry: entry is not None and "waypoint" not in entry)
            assert await through(client, VIP, 80) == direct

    nodes = {"w1": ["client"], "w2": ["server", "wp1", "wp2"]}
    run(tmp_path, main, nodes, captured=["client", "server"], later=["wp1", "wp2"])


def test_waypoint_for_workloads_for_all_and_from_another_namespace(tmp_path: Path) -> None:
    async def main(mesh: MeshOfIstiod) -> None:
        istiod = mesh.istiod
        assert istiod is not None
        client, server, wp = map(mesh.lab.pod, ("client", "server", "wp"))
        direct = f"app server peer {client.ipv4}".encode()
        async with Ends(mesh) as ends, app(server):
            await mesh.create_pod("wp", labels=INSTANCE)
            await ends.enrol("wp", node="w2")
            async with ends.serving(wp, "wp", greeting(b"wp\n")):
                await waypoint_service(istiod)
                await istiod.service("default", "front", VIP, app="server", port=80, target=8080)
                for which, service, workload in (
                    ("workload", direct, b"wp"), ("all", b"wp", b"wp"), ("none", direct, direct),
                    ("service", b"wp", direct),
                ):  # fmt: skip
                    labels = {KIND: which}
                    address = [hostname("wp")]
                    await istiod.gateway("default", "wp", "istio-waypoint", addresses=address, labels=labels)
                    await istiod.label(SERVICE, "default", "front", {USE: "wp"})
                    await istiod.label(POD, "default", "server", {USE: "wp"})
                    for part, name, way in (("services", "front", service), ("workloads", "server", workload)):
                        uses = way == b"wp"
                        await shown(
                            mesh, part, name, lambda entry: entry is not None and ("waypoint" in entry) is uses  # noqa: B023  awaited before the next
                        )  # fmt: skip
                    assert await through(client, VIP, 80) == service, which
                    assert await through(client, server.ipv4, 8080) == workload, which
                    if workload == b"wp":
                        assert ends.requests[-1].head.authority == f"{server.ipv4}:8080".encode()

                # A waypoint of another namespace, which admits this namespace only later.
                await istiod.client.delete(GATEWAY, "default", "wp")
                await istiod.namespace("gateways")
                using = {USE: "far", USE_NAMESPACE: "gateways"}
                await istiod.label(SERVICE, "default", "front", using)
                await istiod.gateway("gateways", "far", "istio-waypoint", addresses=[WAYPOINT_VIP])
                await istiod.service("default", "marker", "10.96.0.99", app="none", port=1, target=1)
                await known(mesh, "services", "marker")
                assert await through(client, VIP, 80) == direct
                await istiod.gateway(
                    "gateways", "far", "istio-waypoint", addresses=[WAYPOINT_VIP], routes_from="All"
                )
                await shown(mesh, "services", "front", lambda entry: entry is not None and "waypoint" in entry)
                assert await through(client, VIP, 80) == b"wp"

    nodes = {"w1": ["client"], "w2": ["server", "wp"]}
    run(tmp_path, main, nodes, captured=["client", "server"], later=["wp"])


@pytest.mark.parametrize("node", ["w1", "w2"], ids=["same_node", "other_node"])
def test_captured_waypoint_gets_the_tunnel_behind_a_proxy_header(tmp_path: Path, node: str) -> None:
    async def main(mesh: MeshOfIstiod) -> None:
        istiod = mesh.istiod
        assert istiod is not None
        client, server, wp = map(mesh.lab.pod, ("client", "server", "wp"))
        headers: list[Any] = []

        async def pass_on(sock: Any) -> bytes:
            headers.append(await read_proxy_header(sock))
            # Its own call of the service goes to the server, not to itself again.
            return b"waypoint " + await through(wp, VIP, 80) + b"\n"

        async with app(server), serving(listen("::", 15088, netns=wp.netns), pass_on):
            await mesh.create_pod("wp", labels={"app": "wp", "gateway.networking.k8s.io/gateway-name": "wp"})
            await waypoint_service(istiod)
            await istiod.service("default", "front", VIP, app="server", port=80, target=8080)
            await istiod.label(SERVICE, "default", "front", {USE: "wp"})
            await istiod.gateway(
                "default", "wp", "istio-waypoint", addresses=[hostname("wp")],
                annotations={"ambient.istio.io/waypoint-inbound-binding": "PROXY/15088"},
            )  # fmt: skip
            await shown(mesh, "services", "front", lambda entry: entry is not None and "waypoint" in entry)
            await shown(mesh, "workloads", "wp", lambda entry: entry is not None and "applicationTunnel" in entry)
            assert await through(client, VIP, 80) == f"waypoint app server peer {wp.ipv4}".encode()
            ((source, destination, values),) = headers
            assert (source, destination) == (str(client.ipv4), f"{VIP}:80")
            assert values == {0xD0: b"spiffe://cluster.local/ns/default/sa/client"}

    nodes: dict[str, list[str]] = {"w1": ["client"], "w2": ["server"]}
    nodes[node].append("wp")
    run(tmp_path, main, nodes, later=["wp"])
