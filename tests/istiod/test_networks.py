"""Workloads on another network, as a real istiod describes them: reached by double tunnels through its gateway."""

import contextlib
from pathlib import Path

import pytest

from deploy.lab import may_make_namespaces
from tests.istiod.mesh import Ends, MeshOfIstiod, shown
from tests.istiod.server import GATEWAY, SERVICE_ENTRY, SYSTEM, WORKLOAD_ENTRY
from tests.istiod.test_waypoints import run, through
from tests.netns.istio import refused
from tests.netns.toys import app
from ztunnel.kube.kinds import SERVICE, Kind

pytestmark = [
    pytest.mark.netns,
    pytest.mark.timeout(300),
    pytest.mark.skipif(not may_make_namespaces(), reason="NOT TESTED: network namespaces need root"),
]
VIP = "240.240.0.1"
CONFIG_MAP = Kind("ConfigMap", "v1", "configmaps")
REMOTE = "spiffe://cluster.local/ns/default/sa/remote"


async def gateway(mesh: MeshOfIstiod) -> None:
    """Create the gateway of the network ``far``, which is the pod ``gateway``."""
    assert mesh.istiod is not None
    await mesh.istiod.gateway(
        SYSTEM,
        "far",
        "istio-remote",
        addresses=[str(mesh.lab.pod("gateway").ipv4)],
        labels={"topology.istio.io/network": "far"},
        annotations={"gateway.istio.io/service-account": "gateway"},
    )


async def serve(mesh: MeshOfIstiod, ends: Ends, stack: contextlib.AsyncExitStack) -> None:
    """Run the gateway, with the remote workload behind it."""
    istiod, place = mesh.istiod, mesh.lab.pod("gateway")
    assert istiod is not None
    # istiod signs for accounts with a pod on the node: the gateway's in the system namespace, and the remote one.
    for namespace, account in ((SYSTEM, "gateway"), ("default", "remote")):
        await istiod.account(namespace, account)
        await istiod.pod(
            namespace, f"of-{account}", ["192.0.2.1"], node="w2", account=account, enrolled=False,
            labels={"app": "other"},
        )  # fmt: skip
        await ends.enrol(account, node="w2", namespace=namespace)
    await stack.enter_async_context(ends.serving(place, "gateway", ends.gateway("remote", first=b"remote\n")))


def test_endpoint_on_another_network_is_reached_through_its_gateway_only(tmp_path: Path) -> None:
    async def main(mesh: MeshOfIstiod) -> None:
        istiod, proxy = mesh.istiod, mesh.node_of("client")
        assert istiod is not None
        client, server = map(mesh.lab.pod, ("client", "server"))
        async with contextlib.AsyncExitStack() as stack:
            ends = await stack.enter_async_context(Ends(mesh))
            await stack.enter_async_context(app(server))
            await serve(mesh, ends, stack)
            # The address of the remote workload is that of a local pod, which must not get its connections.
            await istiod.put(
                WORKLOAD_ENTRY, "default", "remote", labels={"app": "shop"},
                annotations={"ambient.istio.io/redirection": "enabled"},
                spec={"address": str(server.ipv4), "network": "far", "serviceAccount": "remote"},
            )  # fmt: skip
            spec = {
                "hosts": ["shop.example.com"],
                "addresses": [VIP],
                "ports": [{"number": 80, "name": "tcp", "protocol": "TCP", "targetPort": 8080}],
                "resolution": "STATIC",
                "workloadSelector": {"labels": {"app": "shop"}},
                "subjectAltNames": [REMOTE],
            }
            await istiod.put(SERVICE_ENTRY, "default", "shop", spec=spec)
            await shown(mesh, "services", "shop", lambda entry: entry is not None and entry["endpoints"])
            assert await refused(client, VIP, 80)
            await proxy.failed("no valid routing destination for workload: remote", "outbound")

            await gateway(mesh)
            await shown(mesh, "workloads", "remote", lambda entry: entry is not None and "networkGateway" in entry)
            assert await through(client, VIP, 80) == b"remote"
            outer, inner = ends.requests
            assert outer.head.authority == inner.head.authority == b"shop.example.com:80"
            assert dict(inner.head.headers)[b"x-forwarded-network"] == b"home"
            line = (await proxy.lines("outbound", 1, dst_hbone_addr="shop.example.com:80"))[0]
            assert line["dst.identity"] == REMOTE
            # The pod at the same address on this network is another workload.
            assert await through(client, server.ipv4, 8080) == f"app server peer {client.ipv4}".encode()

            # Without the identity, and without the gateway, no connection is made, in particular not a plain one.
            await istiod.put(SERVICE_ENTRY, "default", "shop", spec=spec | {"subjectAltNames": []})
            await shown(mesh, "services", "shop", lambda entry: entry is not None and not entry["subjectAltNames"])
            assert await refused(client, VIP, 80)
            await istiod.put(SERVICE_ENTRY, "default", "shop", spec=spec)
            await shown(mesh, "services", "shop", lambda entry: entry is not None and entry["subjectAltNames"])
            await istiod.client.delete(GATEWAY, SYSTEM, "far")
            await shown(
                mesh, "workloads", "remote", lambda entry: entry is not None and "networkGateway" not in entry
            )
            count = len(ends.requests)
            assert await refused(client, VIP, 80)
            assert len(ends.requests) == count

    run(tmp_path, main, {"w1": ["client"], "w2": ["server", "gateway"]}, captured=["client", "server"],
        later=["gateway"], network="home")  # fmt: skip


def test_endpoints_of_a_global_service_on_another_network_are_one_workload(tmp_path: Path) -> None:
    async def main(mesh: MeshOfIstiod) -> None:
        istiod = mesh.istiod
        assert istiod is not None
        client, server = map(mesh.lab.pod, ("client", "server"))
        vip = "10.96.0.10"
        async with contextlib.AsyncExitStack() as stack:
            ends = await stack.enter_async_context(Ends(mesh))
            await stack.enter_async_context(app(server))
            await serve(mesh, ends, stack)
            scopes = (
                "serviceScopeConfigs: [{servicesSelector: {matchLabels: {istio.io/global: yes}}, scope: GLOBAL}]"
            )
            await istiod.put(CONFIG_MAP, SYSTEM, "istio", data={"mesh": scopes.replace("yes", '"true"')})
            await gateway(mesh)
            for name in ("remote-1", "remote-2"):
                await istiod.put(
                    WORKLOAD_ENTRY, "default", name, labels={"app": "server"},
                    annotations={"ambient.istio.io/redirection": "enabled"},
                    spec={"address": "192.0.2.7", "network": "far", "serviceAccount": "remote"},
                )  # fmt: skip
            spec = {
                "clusterIP": vip,
                "selector": {"app": "server"},
                "ports": [{"name": "tcp", "port": 80, "targetPort": 8080}],
                "trafficDistribution": "PreferClose",
            }
            await istiod.put(SERVICE, "default", "shop", labels={"istio.io/global": "true"}, spec=spec)
            far = "far/SplitHorizonWorkload/istio-system/far/"

            def both(entry: object) -> bool:
                assert entry is None or isinstance(entry, dict)
                return entry is not None and any(uid.startswith(far) for uid in entry["endpoints"])

            await shown(mesh, "services", "shop", both)
            direct = f"app server peer {client.ipv4}".encode()
            assert {await through(client, vip, 80) for _ in range(10)} == {direct}  # the own network is closer
            await istiod.set_ready("default", "server", ready=False)
            await shown(mesh, "services", "shop", lambda entry: entry is not None and len(entry["endpoints"]) == 1)
            assert await through(client, vip, 80) == b"remote"
            await istiod.set_ready("default", "server", ready=True)
            await shown(mesh, "services", "shop", lambda entry: entry is not None and len(entry["endpoints"]) == 2)
            assert await through(client, vip, 80) == direct
            await istiod.client.delete(WORKLOAD_ENTRY, "default", "remote-1")
            await istiod.client.delete(WORKLOAD_ENTRY, "default", "remote-2")
            await shown(mesh, "services", "shop", lambda entry: entry is not None and len(entry["endpoints"]) == 1)
            await istiod.set_ready("default", "server", ready=False)
            await shown(mesh, "services", "shop", lambda entry: entry is not None and not entry["endpoints"])
            assert await refused(client, vip, 80)

    run(tmp_path, main, {"w1": ["client"], "w2": ["server", "gateway"]}, captured=["client", "server"],
        later=["gateway"], network="home", settings={"AMBIENT_ENABLE_MULTI_NETWORK": "true"})  # fmt: skip
