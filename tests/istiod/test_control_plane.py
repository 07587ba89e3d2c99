"""What a proxy gets from a real istiod: workloads, services, policies and certificates, complete or on demand."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest

from tests.apiserver.server import ADMIN, ApiServer, api_server
from tests.istiod.server import HOST, POLICY, SYSTEM, Istiod
from tests.netns.istio import eventually
from xds.model.identity import SpiffeId
from xds.model.mesh import Mesh
from xds.model.workload import Protocol, Workload
from ztunnel.kube.client import connect
from ztunnel.kube.kinds import POD
from ztunnel.proxy.istio.accounting.metrics import Metrics
from ztunnel.proxy.istio.certificates.ca_client import IstioCertificateAuthority
from ztunnel.proxy.istio.certificates.credentials import Credentials, Endpoint, Roots, Token
from ztunnel.proxy.istio.certificates.manager import IdentityError
from ztunnel.proxy.istio.environment import config_from
from ztunnel.proxy.istio.settings.config import IstioConfig
from ztunnel.proxy.istio.xds.control import ControlPlane

pytestmark = pytest.mark.timeout(300)
CLIENT = SpiffeId("cluster.local", "shop", "client")


@contextlib.asynccontextmanager
async def running(cluster: ApiServer, folder: Path) -> AsyncIterator[Istiod]:
    """An istiod whose cluster has two nodes, and in the namespace shop the pods client and back, and a service."""
    async with connect(cluster.kubeconfig(ADMIN)) as client:
        istiod = Istiod(cluster, client, folder)
        try:
            await istiod.prepare()
            await istiod.namespace("shop")
            await istiod.account("shop", "client")
            for node in ("n1", "n2"):
                await istiod.node(node)
            (folder / "token").write_text(await istiod.ztunnel_token("n1", "10.9.0.1"))
            await istiod.pod("shop", "client", ["10.0.0.1"], node="n1", account="client")
            await istiod.pod("shop", "back", ["10.0.0.2"], node="n2", account="default")
            await istiod.service("shop", "back", "10.96.0.10", app="back", port=80, target=8080)
            await istiod.start()
            yield istiod
        finally:
            istiod.kill()


def config_of(istiod: Istiod, folder: Path, **more: str) -> IstioConfig:
    address = f"https://127.0.0.1:{istiod.port}"
    given = {
        "XDS_ADDRESS": address,
        "CA_ADDRESS": address,
        "XDS_ROOT_CA": str(istiod.root),
        "CA_ROOT_CA": str(istiod.root),
        "ALT_XDS_HOSTNAME": HOST,
        "ALT_CA_HOSTNAME": HOST,
        "AUTH_TOKEN": str(folder / "token"),
        "NODE_NAME": "n1",
        "POD_NAME": "ztunnel-n1",
        "POD_NAMESPACE": SYSTEM,
        "SERVICE_ACCOUNT": "ztunnel",
        "CLUSTER_ID": "Kubernetes",
        "ISTIO_META_DNS_CAPTURE": "false",
    }
    return config_from({**given, **more}, cpus=1, read_file=lambda path: None)


@contextlib.asynccontextmanager
async def follower(config: IstioConfig) -> AsyncIterator[tuple[ControlPlane, Mesh]]:
    mesh = Mesh(node="n1")
    async with ControlPlane(config, mesh, Metrics("v", 100)) as control:
        await eventually(control.ready.is_set, "ready")
        yield control, mesh


@contextlib.asynccontextmanager
async def authority_of(config: IstioConfig) -> AsyncIterator[IstioCertificateAuthority]:
    authority = IstioCertificateAuthority(
        Endpoint.parse(config.ca_address),
        Credentials(token=Token(config.auth_token), cluster_id=config.cluster_id, headers=()),
        Roots(config.ca_root_ca),
        impersonate=True,
        alternative_name=config.alt_ca_hostname,
    )
    try:
        yield authority
    finally:
        await authority.close()


def at(mesh: Mesh, address: str) -> Callable[[], Workload | None]:
    return lambda: mesh.workload_at("", address)


def gone(mesh: Mesh, address: str) -> Callable[[], bool]:
    return lambda: mesh.workload_at("", address) is None


def run(main: Callable[[Istiod], Any], folder: Path) -> None:
    with api_server(folder) as cluster:

        async def all_of_it() -> None:
            async with running(cluster, folder) as istiod:
                await main(istiod)

        asyncio.run(all_of_it())


def test_changes_are_followed_also_after_a_crash_of_istiod(tmp_path: Path) -> None:
    async def main(istiod: Istiod) -> None:
        config = config_of(istiod, tmp_path)
        async with follower(config) as (control, mesh):
            client = mesh.workload_at("", "10.0.0.1")
            assert client is not None
            assert (client.identity, client.protocol, client.node) == (CLIENT, Protocol.HBONE, "n1")
            assert [*mesh.local_identities] == [CLIENT]
            service = mesh.service_at("", "10.96.0.10")
            assert service is not None
            assert [endpoint.ports for endpoint in mesh.endpoints(service.key).values()] == [{80: 8080}]

            await istiod.policy("shop", "p", "back", "cluster.local/ns/shop/sa/client")
            await eventually(lambda: mesh.policy("shop/p"), "the policy")
            back = await eventually(at(mesh, "10.0.0.2"), "the pod back")
            assert back.authorization_policies == ("shop/p",)
            await istiod.pod("shop", "third", ["10.0.0.3"], node="n2", account="default")
            await eventually(at(mesh, "10.0.0.3"), "a new pod")
            await istiod.client.delete(POD, "shop", "third", grace_s=0)
            await eventually(gone(mesh, "10.0.0.3"), "a pod removed")

            istiod.kill()
            await eventually(lambda: control.staleness_s > 0, "stale")
            await istiod.pod("shop", "fourth", ["10.0.0.4"], node="n2", account="default")
            await istiod.client.delete(POD, "shop", "client", grace_s=0)
            await istiod.client.delete(POLICY, "shop", "p")
            await istiod.start()
            await eventually(at(mesh, "10.0.0.4"), "a pod created meanwhile")
            await eventually(gone(mesh, "10.0.0.1"), "a pod removed meanwhile")
            await eventually(lambda: mesh.policy("shop/p") is None, "a policy removed meanwhile")
            assert control.staleness_s == 0
            assert list(control.refused()) == []

    run(main, tmp_path)


def test_resources_on_demand_are_found_whenever_they_appear(tmp_path: Path) -> None:
    async def main(istiod: Istiod) -> None:
        async with follower(config_of(istiod, tmp_path, XDS_ON_DEMAND="true")) as (control, mesh):
            await control.ask("/10.0.0.2")
            assert mesh.workload_at("", "10.0.0.2") is not None
            await control.ask("/10.96.0.10")
            assert mesh.service_at("", "10.96.0.10") is not None
            await control.ask("/10.0.0.7")
            assert mesh.workload_at("", "10.0.0.7") is None
            await istiod.pod("shop", "late", ["10.0.0.7"], node="n2", account="default")
            async with asyncio.timeout(20):
                while mesh.workload_at("", "10.0.0.7") is None:
                    await control.ask("/10.0.0.7")

            istiod.kill()
            await istiod.client.delete(POD, "shop", "late", grace_s=0)
            await istiod.start()
            await eventually(gone(mesh, "10.0.0.7"), "a requested pod that was removed meanwhile")
            assert mesh.workload_at("", "10.0.0.2") is not None
            assert mesh.service_at("", "10.96.0.10") is not None

    run(main, tmp_path)


def test_certificates_are_issued_for_identities_of_the_own_node_only(tmp_path: Path) -> None:
    async def main(istiod: Istiod) -> None:
        async with authority_of(config_of(istiod, tmp_path)) as authority:
            issued = await authority.issue(CLIENT)
            assert issued.identity == CLIENT
            with pytest.raises(IdentityError, match="impersonation"):
                await authority.issue(SpiffeId("cluster.local", "shop", "nobody"))
            with pytest.raises(IdentityError, match="impersonation"):
                await authority.issue(SpiffeId("cluster.local", "shop", "default"))  # only on node n2

    run(main, tmp_path)
