"""Where connections go by the services, ServiceEntries and waypoints of a real istiod."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.apiserver.server import ADMIN, ApiServer, api_server
from tests.istiod.server import SERVICE_ENTRY, SYSTEM, WORKLOAD_ENTRY, Istiod
from tests.istiod.test_control_plane import config_of, follower
from tests.istiod.test_networks import CONFIG_MAP
from tests.limits import WAIT_S
from tests.netns.istio import eventually
from xds.model.address import SocketAddress
from xds.model.identity import SpiffeId
from xds.model.mesh import Mesh
from ztunnel.kube.client import connect
from ztunnel.kube.kinds import NAMESPACE, NODE, POD, SERVICE
from ztunnel.proxy.istio.path.route import Client, Direct, Named, RouteRefused, Tunnel, route_for

pytestmark = pytest.mark.timeout(300)
VIP, ENTRY = "10.96.0.10", "240.240.0.1"
#: The nodes, and their zones in the region r.
ZONES = {"n1": "z1", "n2": "z1", "n3": "z2"}
PORTS = [{"name": "tcp", "port": 80, "targetPort": 8080}]
ENTRY_PORTS = [{"name": "tcp", "number": 80, "protocol": "TCP", "targetPort": 8080}]


class Cluster:
    """An istiod with a client on the node n1 and pods on each node, and the mesh that n1's proxy gets from it."""

    def __init__(self, istiod: Istiod, mesh: Mesh) -> None:
        self.istiod = istiod
        self.mesh = mesh

    def routes(self, destination: str) -> set[str]:
        """Return where connections of the client can go."""
        client = self.mesh.workload("Kubernetes//Pod/shop/client")
        assert client is not None
        found = set()
        for part in range(12):
            try:
                route = route_for(
                    Client(workload=client, host="10.0.0.1"),
                    SocketAddress.parse(destination),
                    self.mesh,
                    lambda below: part * below // 12,  # noqa: B023  called within the iteration
                )
            except RouteRefused as refused:
                found.add(str(refused))
                continue
            assert isinstance(route, Tunnel | Direct)
            name = route.workload.name if route.workload is not None else "no workload"
            if isinstance(route, Direct):
                target = route.target
                name += f" in plain text at {target.hostname if isinstance(target, Named) else target}"
            found.add(name)
        return found

    async def leads(self, destination: str, *expected: str) -> None:
        """Wait until connections can go to these workloads, and no others."""
        try:
            async with asyncio.timeout(WAIT_S):
                while self.routes(destination) != set(expected):
                    await asyncio.sleep(0.05)
        except TimeoutError:
            assert self.routes(destination) == set(expected)


@contextlib.asynccontextmanager
async def running(folder: Path, server: ApiServer) -> AsyncIterator[Cluster]:
    async with connect(server.kubeconfig(ADMIN)) as client:
        istiod = Istiod(server, client, folder)
        try:
            await istiod.prepare()
            await istiod.namespace("shop")
            for node, zone in ZONES.items():
                await istiod.node(node)
                labels = {"topology.kubernetes.io/region": "r", "topology.kubernetes.io/zone": zone}
                await istiod.label(NODE, "", node, labels)
            (folder / "token").write_text(await istiod.ztunnel_token("n1", "10.9.0.1"))
            await istiod.pod("shop", "client", ["10.0.0.1"], node="n1", account="client")
            for number, node in enumerate(ZONES, 1):
                await istiod.pod(
                    "shop", f"back-{number}", [f"10.0.1.{number}"], node=node, account="back",
                    labels={"app": "back"},
                )  # fmt: skip
            await istiod.start()
            async with follower(config_of(istiod, folder)) as (_, mesh):
                yield Cluster(istiod, mesh)
        finally:
            istiod.kill()


def run(folder: Path, main: Callable[[Cluster], Coroutine[Any, Any, None]]) -> None:
    async def all_of_it() -> None:
        with api_server(folder) as server:
            async with running(folder, server) as made:
                await main(made)

    asyncio.run(all_of_it())


async def entry(istiod: Istiod, resolution: str, hosts: list[str], **fields: Any) -> None:
    labels = fields.pop("labels", {})
    spec = {"hosts": hosts, "resolution": resolution, "ports": ENTRY_PORTS, "addresses": [ENTRY], **fields}
    await istiod.put(SERVICE_ENTRY, "shop", "entry", labels=labels, spec=spec)


def test_endpoints_of_services(tmp_path: Path) -> None:
    async def main(at: Cluster) -> None:
        async def service(distribution: str = "", **fields: Any) -> None:
            spec = {"clusterIP": VIP, "selector": {"app": "back"}, "ports": PORTS, **fields}
            annotations = {"networking.istio.io/traffic-distribution": distribution} if distribution else {}
            await at.istiod.put(SERVICE, "shop", "back", annotations=annotations, spec=spec)

        every = {"back-1", "back-2", "back-3"}
        await service()
        await at.leads(f"{VIP}:80", *every)
        await at.leads(f"{VIP}:81", f"no healthy upstream: {VIP}:81")
        await service(trafficDistribution="PreferClose")
        await at.leads(f"{VIP}:80", "back-1", "back-2")
        await service("PreferSameNode")
        await at.leads(f"{VIP}:80", "back-1")
        await at.istiod.set_ready("shop", "back-1", ready=False)
        await at.leads(f"{VIP}:80", "back-2")
        await service(internalTrafficPolicy="Local")
        await at.leads(f"{VIP}:80", f"no healthy upstream: {VIP}:80")
        await at.istiod.set_ready("shop", "back-1", ready=True)
        await at.leads(f"{VIP}:80", "back-1")
        await at.istiod.set_ready("shop", "back-3", ready=False)
        await service(publishNotReadyAddresses=True)
        await at.leads(f"{VIP}:80", *every)
        await service("PreferSameZone")
        await at.leads(f"{VIP}:80", "back-1", "back-2")
        await at.istiod.set_ready("shop", "back-1", ready=False)
        await at.istiod.set_ready("shop", "back-2", ready=False)
        await at.istiod.set_ready("shop", "back-3", ready=True)
        await at.leads(f"{VIP}:80", "back-3")

        await at.istiod.client.delete(SERVICE, "shop", "back")
        await service(clusterIP="None")
        await at.leads(f"{VIP}:80", f"no workload in plain text at {VIP}:80")
        name = "shop/back.shop.svc.cluster.local"
        headless = await eventually(lambda: at.mesh.service(name), "the headless service")
        assert (headless.vips, len(at.mesh.endpoints(headless.key))) == ((), 1)
        await at.leads("10.0.1.2:8080", "back-2")

    run(tmp_path, main)


def test_endpoints_of_service_entries(tmp_path: Path) -> None:
    async def main(at: Cluster) -> None:
        hosts = ["entry.example.com"]
        outside = [{"address": "192.0.2.1"}, {"address": "192.0.2.2", "weight": 0}]
        await entry(at.istiod, "STATIC", hosts, endpoints=outside)
        plain = [f"entry in plain text at 192.0.2.{number}:8080" for number in (1, 2)]
        await at.leads(f"{ENTRY}:80", *plain)
        # A selector finds pods and WorkloadEntries.
        await entry(at.istiod, "STATIC", hosts, workloadSelector={"labels": {"app": "back"}})
        await at.leads(f"{ENTRY}:80", "back-1", "back-2", "back-3")
        await at.istiod.put(
            WORKLOAD_ENTRY, "shop", "machine", labels={"app": "back"}, spec={"address": "192.0.2.3"}
        )
        machine = "machine in plain text at 192.0.2.3:8080"
        await at.leads(f"{ENTRY}:80", "back-1", "back-2", "back-3", machine)
        for number in (1, 2, 3):
            await at.istiod.client.delete(POD, "shop", f"back-{number}", grace_s=0)
        await at.leads(f"{ENTRY}:80", machine)
        await at.istiod.client.delete(WORKLOAD_ENTRY, "shop", "machine")
        await at.leads(f"{ENTRY}:80", f"no healthy upstream: {ENTRY}:80")

        await entry(at.istiod, "DNS", hosts)
        await at.leads(f"{ENTRY}:80", "entry in plain text at entry.example.com")
        await entry(at.istiod, "NONE", hosts)
        await at.leads(f"{ENTRY}:80", f"no workload in plain text at {ENTRY}:80")
        await entry(at.istiod, "NONE", ["*.example.com"], addresses=["240.240.0.0/16"])
        await at.leads("240.240.9.9:80", "no workload in plain text at 240.240.9.9:80")
        blocked = await eventually(lambda: at.mesh.service_at("", "240.240.9.9"), "the service of the block")
        assert blocked.hostname == "*.example.com"

        # A waypoint takes the connections of each of them.
        await at.istiod.pod(
            "shop", "wp", ["10.0.2.1"], node="n2", account="wp",
            labels={"gateway.networking.k8s.io/gateway-name": "wp", "networking.istio.io/tunnel": "http"},
        )  # fmt: skip
        await at.istiod.gateway("shop", "wp", "istio-waypoint", addresses=["10.0.2.1"])
        use = {"istio.io/use-waypoint": "wp"}
        for resolution, names in (("NONE", ["*.example.com"]), ("DYNAMIC_DNS", ["*.example.com"]), ("DNS", hosts)):
            await entry(at.istiod, resolution, names, labels=use)
            await at.leads(f"{ENTRY}:80", "wp")
        await entry(at.istiod, "STATIC", hosts, endpoints=outside, labels=use)
        await at.leads(f"{ENTRY}:80", "wp")
        await at.istiod.client.delete(POD, "shop", "wp", grace_s=0)
        await at.leads(f"{ENTRY}:80", "unknown waypoint: waypoint /10.0.2.1 not found")
        await entry(at.istiod, "STATIC", hosts, endpoints=outside, labels={"istio.io/use-waypoint": "none"})
        await at.leads(f"{ENTRY}:80", *plain)

    run(tmp_path, main)


def test_waypoint_and_its_canary(tmp_path: Path) -> None:
    async def main(at: Cluster) -> None:
        for number, name in enumerate(("wp", "next"), 1):
            await at.istiod.pod("shop", name, [f"10.0.2.{number}"], node="n2", account=name)
            await at.istiod.gateway("shop", name, "istio-waypoint", addresses=[f"10.0.2.{number}"])
        labels = {"istio.io/use-waypoint": "wp", "istio.io/use-waypoint-canary": "next"}
        weights: Mapping[str, set[str]] = {
            "0": {"wp"}, "50": {"wp", "next"}, "100": {"next"}, "much": {"wp"}
        }  # fmt: skip
        for weight, expected in weights.items():
            await at.istiod.put(
                SERVICE, "shop", "back", labels=labels,
                annotations={"istio.io/use-waypoint-canary-weight": weight},
                spec={"clusterIP": VIP, "selector": {"app": "back"}, "ports": PORTS},
            )  # fmt: skip
            await at.leads(f"{VIP}:80", *expected)

    run(tmp_path, main)


def test_network_of_the_cluster_is_set_before_that_of_the_proxy(tmp_path: Path) -> None:
    async def main(at: Cluster) -> None:
        await at.istiod.pod("shop", "wp", ["10.0.2.1"], node="n2", account="wp", labels={"app": "wp"})
        await at.istiod.service("shop", "wp", "10.96.0.20", app="wp", port=15008, target=15008)
        await at.istiod.gateway("shop", "wp", "istio-waypoint", addresses=["wp.shop.svc.cluster.local"])
        await at.istiod.service("shop", "back", VIP, app="back", port=80, target=8080)
        await at.istiod.label(SERVICE, "shop", "back", {"istio.io/use-waypoint": "wp"})
        await at.leads(f"{VIP}:80", "wp")
        await at.istiod.label(NAMESPACE, "", SYSTEM, {"topology.istio.io/network": "home"})
        await eventually(lambda: at.mesh.service_at("home", VIP), "the service in the network")
        await at.leads(f"{VIP}:80", "wp")

    run(tmp_path, main)


def test_trust_domain_of_the_mesh_and_its_aliases(tmp_path: Path) -> None:
    async def main(at: Cluster) -> None:
        client = at.mesh.workload_at("", "10.0.0.1")
        assert client is not None
        assert client.identity == SpiffeId("cluster.local", "shop", "client")
        config = yaml.safe_dump({"trustDomain": "mesh.example", "trustDomainAliases": ["cluster.local"]})
        await at.istiod.put(CONFIG_MAP, SYSTEM, "istio", data={"mesh": config})

        def identities() -> set[str]:
            return {workload.trust_domain for workload in at.mesh.workloads()}

        await eventually(lambda: identities() == {"mesh.example"}, "the new trust domain")
        local = {SpiffeId("mesh.example", "shop", account) for account in ("client", "back")}
        assert set(at.mesh.local_identities) == local

    run(tmp_path, main)
