"""A real istiod for a test, beside a real API server; without its programs the test is skipped, loudly."""

import asyncio
import base64
import subprocess
import tempfile
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.apiserver.programs import cache, needed
from tests.apiserver.server import ApiServer
from tests.istiod.build import DEFINITIONS, GATEWAY_DEFINITIONS, PROGRAM
from tests.limits import WAIT_S
from tests.ports import free_port
from ztunnel.kube.client import Client
from ztunnel.kube.errors import ApiRefused
from ztunnel.kube.kinds import NAMESPACE, NODE, POD, SECRET, SERVICE, SERVICE_ACCOUNT, Kind

SYSTEM = "istio-system"
#: The name in istiod's certificate.
HOST = "istiod.istio-system.svc"
POLICY = Kind("AuthorizationPolicy", "security.istio.io/v1", "authorizationpolicies")
PEER_AUTHENTICATION = Kind("PeerAuthentication", "security.istio.io/v1", "peerauthentications")
SERVICE_ENTRY = Kind("ServiceEntry", "networking.istio.io/v1", "serviceentries")
WORKLOAD_ENTRY = Kind("WorkloadEntry", "networking.istio.io/v1", "workloadentries")
GATEWAY = Kind("Gateway", "gateway.networking.k8s.io/v1", "gateways")
_DEFINITION = Kind(
    "CustomResourceDefinition", "apiextensions.k8s.io/v1", "customresourcedefinitions", namespaced=False
)
_START_S = 60.0
#: The setting with the folder of a plugged-in certificate authority: the files of the secret ``cacerts``.
PLUGGED_IN = "ROOT_CA_DIR"


def root_file(folder: Path) -> Path:
    """Return the file with istiod's root certificates, for proxies whose configuration is made before istiod."""
    return folder / "istio-ca-root-cert" / "root-cert.pem"


class Istiod:
    """One istiod, with the objects of its cluster.

    Args:
        cluster: the API server.
        client: a client of it, with all rights.
        folder: the folder for its files and its log.
        settings: further environment variables of istiod.

    Attributes:
        port: the port of xDS and of the certificate authority, with TLS, on loopback.
        root: the file with the root certificates, once it has started. It is replaced like kubelet replaces the
            files of a mounted ConfigMap.
    """

    def __init__(
        self, cluster: ApiServer, client: Client, folder: Path, settings: Mapping[str, str] | None = None
    ) -> None:
        self.client = client
        self.port = free_port()
        self.root = root_file(folder)
        self._program = needed(PROGRAM, "`make istiod`")
        self._cluster = cluster
        self._folder = folder
        self._settings = dict(settings or {})
        self._ports = [free_port() for _ in range(4)]
        self._process: subprocess.Popen[bytes] | None = None

    async def prepare(self, *, network: str = "") -> None:
        """Create the objects of Istio's charts: resource definitions, the system namespace with the cluster's
        network, ztunnel's account.
        """
        for name in (DEFINITIONS, GATEWAY_DEFINITIONS):
            for body in yaml.load_all(_definitions(name), yaml.CSafeLoader):
                if body is not None and body["kind"] == _DEFINITION.name:
                    await self.client.create(_DEFINITION, "", body)
        labels = {"topology.istio.io/network": network} if network else {}
        await self.namespace(SYSTEM, **labels)
        await self.account(SYSTEM, "ztunnel")

    async def start(self) -> None:
        """Start it, and return once it is ready.

        Raises:
            AssertionError: it does not start; the text has the end of its log.
        """
        plain, monitoring, webhooks, pages = self._ports
        command = [
            self._program, "discovery", f"--kubeconfig={self._cluster.kubeconfig()}", "--domain=cluster.local",
            f"--secureGRPCAddr=127.0.0.1:{self.port}", f"--grpcAddr=127.0.0.1:{plain}",
            f"--monitoringAddr=127.0.0.1:{monitoring}", f"--httpsAddr=127.0.0.1:{webhooks}",
            f"--httpAddr=127.0.0.1:{pages}",
        ]  # fmt: skip
        settings = {
            "HOME": str(self._folder),
            "PILOT_ENABLE_AMBIENT": "true",
            "POD_NAMESPACE": SYSTEM,
            "POD_NAME": "istiod",
            "CLUSTER_ID": "Kubernetes",
            "ISTIOD_ADDR": f"{HOST}:15012",
            "CA_TRUSTED_NODE_ACCOUNTS": f"{SYSTEM}/ztunnel",
            **self._settings,
        }
        with (self._folder / "istiod.log").open("ab") as log:
            self._process = subprocess.Popen(command, env=settings, cwd=self._folder, stdout=log, stderr=log)
        try:
            async with asyncio.timeout(_START_S):
                while not await asyncio.to_thread(self._ready, pages):
                    assert self._process.poll() is None, self.log()
                    await asyncio.sleep(0.1)
        except TimeoutError:
            raise AssertionError(f"istiod is not ready: {self.log()}") from None
        plugged_in = self._settings.get(PLUGGED_IN)
        if plugged_in is None:
            secret = await self.client.get(SECRET, SYSTEM, "istio-ca-secret")
            self._publish_root(base64.b64decode(secret["data"]["ca-cert.pem"]))
        else:
            self._publish_root(Path(plugged_in, "root-cert.pem").read_bytes())

    def _publish_root(self, pem: bytes) -> None:
        volume = self.root.parent
        volume.mkdir(exist_ok=True)
        data = Path(tempfile.mkdtemp(prefix="..", dir=volume))
        (data / self.root.name).write_bytes(pem)
        link = volume / "..data_tmp"
        link.symlink_to(data.name)
        link.rename(volume / "..data")
        if not self.root.is_symlink():
            self.root.symlink_to(f"..data/{self.root.name}")

    def kill(self) -> None:
        """End it like a crash; idempotent."""
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.wait(WAIT_S)

    def log(self) -> str:
        """Return the end of its log."""
        return (self._folder / "istiod.log").read_text()[-3000:]

    @staticmethod
    def _ready(port: int) -> bool:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/ready", timeout=5) as answer:
                return bool(answer.status == 200)
        except (OSError, urllib.error.URLError):
            return False

    # Objects

    async def namespace(self, name: str, **labels: str) -> None:
        """Create a namespace with its default account."""
        body = {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name, "labels": labels}}
        try:
            await self.client.create(NAMESPACE, "", body)
        except ApiRefused as error:  # the API server itself creates "default"
            if error.status != 409:
                raise

    async def account(self, namespace: str, name: str) -> None:
        await self.client.create(SERVICE_ACCOUNT, namespace, _object("ServiceAccount", name))

    async def node(self, name: str) -> None:
        await self.client.create(NODE, "", _object("Node", name))

    async def put(
        self,
        kind: Kind,
        namespace: str,
        name: str,
        *,
        labels: Mapping[str, str] | None = None,
        annotations: Mapping[str, str] | None = None,
        **fields: Any,
    ) -> None:
        """Create an object, or replace one that has this name."""
        body = _object(kind.name, name, kind.api_version) | fields
        body["metadata"] |= {"labels": dict(labels or {}), "annotations": dict(annotations or {})}
        try:
            before = await self.client.get(kind, namespace, name)
        except ApiRefused as error:
            if error.status != 404:
                raise
            await self.client.create(kind, namespace, body)
        else:
            body["metadata"]["resourceVersion"] = before["metadata"]["resourceVersion"]
            await self.client.replace(kind, namespace, name, body)

    async def label(self, kind: Kind, namespace: str, name: str, labels: Mapping[str, str | None]) -> None:
        """Change labels of an object. None removes a label."""
        await self.client.merge_patch(kind, namespace, name, {"metadata": {"labels": dict(labels)}})

    async def set_ready(self, namespace: str, name: str, *, ready: bool) -> None:
        """Report a pod as ready or not, as kubelet does."""
        conditions = [{"type": "Ready", "status": str(ready)}]
        await self.client.merge_patch(
            POD, namespace, name, {"status": {"conditions": conditions}}, subresource="status"
        )

    async def gateway(
        self,
        namespace: str,
        name: str,
        gateway_class: str,
        *,
        addresses: Sequence[str],
        port: int = 15008,
        routes_from: str = "Same",
        labels: Mapping[str, str] | None = None,
        annotations: Mapping[str, str] | None = None,
    ) -> None:
        """Create a Gateway with one HBONE listener. Without addresses it is not ready yet. istiod takes addresses
        of another network's gateway from the specification.
        """
        listener = {
            "name": "mesh",
            "port": port,
            "protocol": "HBONE",
            "allowedRoutes": {"namespaces": {"from": routes_from}},
        }
        spec: dict[str, Any] = {"gatewayClassName": gateway_class, "listeners": [listener]}
        if gateway_class == "istio-remote":
            spec["addresses"] = _addresses(addresses)
        await self.put(GATEWAY, namespace, name, labels=labels, annotations=annotations, spec=spec)
        await self.gateway_ready(namespace, name, addresses)

    async def gateway_ready(self, namespace: str, name: str, addresses: Sequence[str]) -> None:
        """Write the addresses of a Gateway's status, as istiod does once the Gateway's Service has ready pods."""
        async with asyncio.timeout(WAIT_S):
            # Until istiod has written the status for this version, it can overwrite the addresses.
            while not _accepted(await self.client.get(GATEWAY, namespace, name)):
                await asyncio.sleep(0.05)
        status = {"addresses": _addresses(addresses)}
        await self.client.merge_patch(GATEWAY, namespace, name, {"status": status}, subresource="status")

    async def pod(
        self,
        namespace: str,
        name: str,
        addresses: list[str],
        *,
        node: str,
        account: str,
        enrolled: bool = True,
        labels: Mapping[str, str] | None = None,
    ) -> str:
        """Create a running pod, as scheduler, kubelet and the node agent do. Return its uid."""
        body = _object("Pod", name)
        body["metadata"]["labels"] = {"app": name, **(labels or {})}
        if enrolled:
            body["metadata"]["annotations"] = {"ambient.istio.io/redirection": "enabled"}
        body["spec"] = {
            "nodeName": node, "serviceAccountName": account, "containers": [{"name": "a", "image": "a"}]
        }  # fmt: skip
        made = await self.client.create(POD, namespace, body)
        status = {
            "phase": "Running",
            "podIP": addresses[0],
            "podIPs": [{"ip": address} for address in addresses],
            "conditions": [{"type": "Ready", "status": "True"}],
        }
        await self.client.merge_patch(POD, namespace, name, {"status": status}, subresource="status")
        return str(made["metadata"]["uid"])

    async def service(self, namespace: str, name: str, address: str, *, app: str, port: int, target: int) -> None:
        body = _object("Service", name)
        ports = [{"name": "tcp", "port": port, "targetPort": target}]
        body["spec"] = {"clusterIP": address, "selector": {"app": app}, "ports": ports}
        await self.client.create(SERVICE, namespace, body)

    async def policy(self, namespace: str, name: str, app: str, *principals: str) -> None:
        """Create a policy that allows only these principals to connect to pods with the label ``app``."""
        body = {
            **_object("AuthorizationPolicy", name, POLICY.api_version),
            "spec": {
                "selector": {"matchLabels": {"app": app}},
                "rules": [{"from": [{"source": {"principals": list(principals)}}]}],
            },
        }
        await self.client.create(POLICY, namespace, body)

    async def ztunnel_token(self, node: str, address: str) -> str:
        """Create a ztunnel's pod on a node, and return a token that is bound to it, as kubelet mounts it."""
        name = f"ztunnel-{node}"
        uid = await self.pod(SYSTEM, name, [address], node=node, account="ztunnel", enrolled=False)
        bound = {"kind": "Pod", "apiVersion": "v1", "name": name, "uid": uid}
        requests = Kind("TokenRequest", "v1", "serviceaccounts/ztunnel/token")
        body = {
            "apiVersion": "authentication.k8s.io/v1",
            "kind": "TokenRequest",
            "spec": {"audiences": ["istio-ca"], "expirationSeconds": 3600, "boundObjectRef": bound},
        }
        return str((await self.client.create(requests, SYSTEM, body))["status"]["token"])


def _addresses(addresses: Sequence[str]) -> list[dict[str, str]]:
    return [
        {"type": "IPAddress" if address[0].isdigit() else "Hostname", "value": address} for address in addresses
    ]


def _accepted(gateway: Mapping[str, Any]) -> bool:
    conditions = gateway.get("status", {}).get("conditions", [])
    generation = gateway["metadata"]["generation"]
    return any(
        (each["type"], each["status"], each.get("observedGeneration")) == ("Accepted", "True", generation)
        for each in conditions
    )


def _definitions(name: str) -> str:
    path = cache() / name
    if not path.exists():
        pytest.skip(f"NOT TESTED: no {path}; `make istiod` makes it")
    return path.read_text()


def _object(kind: str, name: str, api_version: str = "v1") -> dict[str, Any]:
    return {"apiVersion": api_version, "kind": kind, "metadata": {"name": name}}
