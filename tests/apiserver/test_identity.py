"""Certificates by real tokens: a sidecar and a node proxy show theirs, the API server reviews them."""

import asyncio
import contextlib
import re
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest
import yaml

from tests.apiserver.server import ApiServer
from tests.ztunnel.control_plane.meshes import document
from tests.ztunnel.control_plane.test_istio import ADDRESS, Stream
from xds.model.identity import SpiffeId
from xds.proto.envoy.config.core.v3.core_pb2 import Node
from ztunnel.kube.client import Client, connect
from ztunnel.kube.errors import ApiRefused
from ztunnel.kube.kinds import NAMESPACE, NODE, POD, SERVICE_ACCOUNT, Kind
from ztunnel.proxy.identity.csr import IdentityError
from ztunnel.proxy.istio.certificates.ca_client import IstioCertificateAuthority
from ztunnel.proxy.istio.certificates.credentials import Credentials, Endpoint, Roots, Token

WAIT_S = 60
REVIEWS = SpiffeId("cluster.local", "identity", "reviews")
PRODUCTPAGE = SpiffeId("cluster.local", "identity", "productpage")
RBAC = "rbac.authorization.k8s.io/v1"
BINDING = Kind("ClusterRoleBinding", RBAC, "clusterrolebindings", namespaced=False)


async def account(client: Client, namespace: str, name: str, node: str) -> None:
    """An account with a pod of its name, bound to a node."""
    for kind, where, body in (
        (NAMESPACE, "", {"metadata": {"name": namespace}}),
        (NODE, "", {"metadata": {"name": node}}),
        (SERVICE_ACCOUNT, namespace, {"metadata": {"name": name}}),
    ):
        with contextlib.suppress(ApiRefused):
            await client.create(kind, where, {"apiVersion": kind.api_version, "kind": kind.name, **body})
    spec = {"serviceAccountName": name, "nodeName": node, "containers": [{"name": "app", "image": "app"}]}
    pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": name}, "spec": spec}
    await client.create(POD, namespace, pod)


async def token(client: Client, namespace: str, name: str, audience: str = "istio-ca") -> str:
    """Return a token as kubelet gets it for the projected volume of a pod."""
    kind = Kind("TokenRequest", "v1", f"serviceaccounts/{name}/token")
    uid = (await client.get(POD, namespace, name))["metadata"]["uid"]
    bound = {"apiVersion": "v1", "kind": "Pod", "name": name, "uid": uid}
    spec = {"audiences": [audience], "expirationSeconds": 3600, "boundObjectRef": bound}
    body = {"apiVersion": "authentication.k8s.io/v1", "kind": kind.name, "spec": spec}
    made = await client.create(kind, namespace, body)
    return str(made["status"]["token"])


async def own_token(client: Client) -> str:
    """Return a token of the control plane's own account, which has the documented role."""
    await account(client, "istio-system", "ztunnel-control-plane", "worker")
    subject = {"kind": "ServiceAccount", "name": "ztunnel-control-plane", "namespace": "istio-system"}
    role = {"apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": "system:auth-delegator"}
    name = {"name": "ztunnel-control-plane"}
    binding = {"apiVersion": RBAC, "kind": "ClusterRoleBinding", "metadata": name}
    await client.create(BINDING, "", {**binding, "roleRef": role, "subjects": [subject]})
    kind = Kind("TokenRequest", "v1", "serviceaccounts/ztunnel-control-plane/token")
    made = await client.create(
        kind, "istio-system", {"kind": kind.name, "apiVersion": "authentication.k8s.io/v1", "spec": {}}
    )
    return str(made["status"]["token"])


@contextlib.asynccontextmanager
async def control_plane(mesh: Path, folder: Path, kubeconfig: Path) -> AsyncIterator[str]:
    """Start the documented command. Return the address that it serves."""
    words = [
        "control-plane",
        str(mesh),
        "--listen=127.0.0.1:0",
        "--tls-host=127.0.0.1",
        f"--ca-dir={folder / 'ca'}",
    ]
    said = folder / "control-plane.log"
    with said.open("w") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "ztunnel", *words, "--kube", f"--kubeconfig={kubeconfig}"], stderr=log
        )
    try:
        async with asyncio.timeout(WAIT_S):
            while (found := re.search(r"serving \S+ on (\S+)", said.read_text())) is None:
                assert process.poll() is None, said.read_text()
                await asyncio.sleep(0.05)
        yield found[1]
    finally:
        process.terminate()
        assert process.wait(20) == 0


def test_accounts_get_their_own_and_node_proxies_those_of_their_node(cluster: ApiServer, tmp_path: Path) -> None:
    pods: dict[str, Any] = {
        "identity/reviews": {"node": "worker", "addresses": ["10.244.1.23"], "service_account": "reviews"},
        "identity/productpage": {"node": "worker2", "addresses": ["10.244.2.3"], "service_account": "productpage"},
    }
    path = tmp_path / "mesh.yaml"
    path.write_text(yaml.safe_dump(document(pods=pods, services={}, policies={})))

    async def main() -> None:
        async with contextlib.AsyncExitStack() as stack:
            admin = await stack.enter_async_context(connect(cluster.kubeconfig()))
            await account(admin, "identity", "reviews", "worker")
            await account(admin, "istio-system", "ztunnel", "worker")
            address = await stack.enter_async_context(
                control_plane(path, tmp_path, cluster.kubeconfig(await own_token(admin)))
            )
            roots = Roots(str(tmp_path / "ca/root-cert.pem"))
            target = Endpoint.parse(f"https://{address}")

            async def issued(shown: str, identity: SpiffeId, *, impersonate: bool = False) -> None:
                file = tmp_path / "token"
                file.write_text(shown)
                secret = Credentials(token=Token(str(file)))
                authority = IstioCertificateAuthority(target, secret, roots, impersonate=impersonate)
                try:
                    found = await authority.issue(identity)
                    assert found.identity == identity
                finally:
                    await authority.close()

            async def followed(shown: str, pod: str, node: str) -> int:
                """Return how many workloads the control plane has sent to a proxy."""
                message = Node(id=f"ztunnel~10.0.0.1~{pod}~svc.cluster.local")
                message.metadata.update({"NODE_NAME": node})
                credentials = grpc.ssl_channel_credentials(roots.read())
                async with grpc.aio.secure_channel(address, credentials) as channel:
                    stream = Stream(channel, (("authorization", f"Bearer {shown}"),))
                    await stream.send(ADDRESS, node=message)
                    return len((await stream.next()).resources)

            sidecar = await token(admin, "identity", "reviews")
            await issued(sidecar, REVIEWS)
            assert await followed(sidecar, "reviews.identity", "worker") == 2
            with pytest.raises(grpc.aio.AioRpcError, match="the token is for identity/reviews, the caller says"):
                await followed(sidecar, "productpage.identity", "worker2")
            with pytest.raises(IdentityError, match="may not have the certificate of"):
                await issued(sidecar, PRODUCTPAGE, impersonate=True)
            # The token names the node: API servers from 1.30 on include it.
            node_proxy = await token(admin, "istio-system", "ztunnel")
            await issued(node_proxy, REVIEWS, impersonate=True)
            assert await followed(node_proxy, "ztunnel.proxy.istio-system", "worker") == 2
            with pytest.raises(grpc.aio.AioRpcError, match="the token is for node worker, the caller says"):
                await followed(node_proxy, "ztunnel.proxy.istio-system", "worker2")
            with pytest.raises(IdentityError, match="no pod on node worker is"):
                await issued(node_proxy, PRODUCTPAGE, impersonate=True)
            other = await token(admin, "identity", "reviews", "vault")
            with pytest.raises(IdentityError, match=r"the API server refuses the token: .*audience"):
                await issued(other, REVIEWS)
            with pytest.raises(IdentityError, match="the API server refuses the token"):
                await issued(sidecar[:-8] + "AAAAAAAA", REVIEWS)
            # The tokens of a deleted pod become invalid. This token is new, because the API server caches recent
            # reviews.
            fresh = await token(admin, "identity", "reviews")
            await admin.delete(POD, "identity", "reviews", grace_s=0)
            with pytest.raises(IdentityError, match="the API server refuses the token"):
                await issued(fresh, REVIEWS)

    asyncio.run(main())
