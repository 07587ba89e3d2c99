"""deploy/kustomize/injector on a real API server: it is accepted, its role is enough, its selectors hold."""

import asyncio
import base64
import contextlib
import socket
import ssl
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import yaml
from cryptography import x509

from tests.apiserver.server import ApiServer
from ztunnel.kube.client import Client, connect
from ztunnel.kube.errors import ApiRefused
from ztunnel.kube.kinds import MUTATING_WEBHOOK, NAMESPACE, POD, SECRET, Kind
from ztunnel.runtime.tasks import Tasks
from ztunnel.sidecar.inject.authority import BadAuthority, OwnCertificates, service_names
from ztunnel.sidecar.inject.bundle_sync import keep_bundle
from ztunnel.sidecar.inject.command import _listener
from ztunnel.sidecar.inject.server import InjectServer

FOLDER = Path(__file__).parents[2] / "deploy" / "kustomize" / "injector"
RBAC = "rbac.authorization.k8s.io/v1"
KINDS = {
    "ServiceAccount": Kind("ServiceAccount", "v1", "serviceaccounts"),
    "ClusterRole": Kind("ClusterRole", RBAC, "clusterroles", namespaced=False),
    "ClusterRoleBinding": Kind("ClusterRoleBinding", RBAC, "clusterrolebindings", namespaced=False),
    "Role": Kind("Role", RBAC, "roles"),
    "RoleBinding": Kind("RoleBinding", RBAC, "rolebindings"),
    "ConfigMap": Kind("ConfigMap", "v1", "configmaps"),
    "Deployment": Kind("Deployment", "apps/v1", "deployments"),
    "Service": Kind("Service", "v1", "services"),
    "PodDisruptionBudget": Kind("PodDisruptionBudget", "policy/v1", "poddisruptionbudgets"),
    "MutatingWebhookConfiguration": MUTATING_WEBHOOK,
}
WAIT_S = 60
SYSTEM = "istio-system"


async def namespace(client: Client, name: str, **labels: str) -> None:
    metadata = {"name": name, "labels": {key.replace("_", "-"): value for key, value in labels.items()}}
    with contextlib.suppress(ApiRefused):
        await client.create(NAMESPACE, "", {"apiVersion": "v1", "kind": "Namespace", "metadata": metadata})


async def apply(client: Client, port: int) -> None:
    for name in yaml.safe_load((FOLDER / "kustomization.yaml").read_text())["resources"]:
        for document in yaml.safe_load_all((FOLDER / name).read_text()):
            if document["kind"] == "MutatingWebhookConfiguration":
                # The test has no service network. The rest of the entry is as deployed.
                for entry in document["webhooks"]:
                    assert entry["clientConfig"]["service"]["name"] == "ztunnel-injector"
                    entry["clientConfig"] = {"url": f"https://localhost:{port}/inject"}
            await client.create(KINDS[document["kind"]], document["metadata"].get("namespace", ""), document)


def pod(name: str, mode: str | None, inject: str | None, **spec: Any) -> dict[str, Any]:
    labels = {"istio.io/dataplane-mode": mode, "sidecar.istio.io/inject": inject}
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": name, "labels": {key: value for key, value in labels.items() if value}},
        "spec": {"containers": [{"name": "app", "image": "app"}], **spec},
    }


async def gated(client: Client, where: str, document: dict[str, Any]) -> bool:
    made = await client.create(POD, where, document, dry_run=True)
    return any(each["name"] == "mesh-gate" for each in made["spec"].get("initContainers", []))


def serves_by_the_command(kubeconfig: Path, ca: Path, said: Path) -> None:
    """Run the deployed command line, and shake hands as an API server would: by the name of the service."""
    container = next(iter(yaml.safe_load_all((FOLDER / "deployment.yaml").read_text())))
    arguments = container["spec"]["template"]["spec"]["containers"][0]["args"]
    arguments = [each for each in arguments if not each.startswith(("--port", "--config"))]
    with said.open("w") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "ztunnel", *arguments, "--port=0", f"--kubeconfig={kubeconfig}"], stderr=log
        )
    try:
        deadline_s = time.monotonic() + WAIT_S
        while "serving on port" not in (text := said.read_text()):
            assert process.poll() is None, text
            assert time.monotonic() < deadline_s, text
            time.sleep(0.05)
        port = int(text.partition("serving on port ")[2].split()[0])
        trust = ssl.create_default_context(cafile=ca)
        for address in ("127.0.0.1", "::1"):
            with (
                socket.create_connection((address, port), timeout=WAIT_S) as plain,
                trust.wrap_socket(plain, server_hostname=f"ztunnel-injector.{SYSTEM}.svc") as secure,
            ):
                assert secure.version() == "TLSv1.3"
    finally:
        process.terminate()
        assert process.wait(20) == 0


def test_as_deployed_with_its_own_token_and_ca(cluster: ApiServer, tmp_path: Path) -> None:
    async def check() -> None:
        listener = _listener("127.0.0.1", 0)
        tasks = Tasks("test")
        async with contextlib.AsyncExitStack() as stack:
            stack.callback(listener.close)
            admin = await stack.enter_async_context(connect(cluster.kubeconfig()))
            await namespace(admin, SYSTEM)
            await apply(admin, listener.getsockname()[1])
            account = Kind("TokenRequest", "v1", "serviceaccounts/ztunnel-injector/token")
            request = {"apiVersion": "authentication.k8s.io/v1", "kind": "TokenRequest", "spec": {}}
            token = (await admin.create(account, SYSTEM, request))["status"]["token"]
            client = await stack.enter_async_context(connect(cluster.kubeconfig(token)))
            with pytest.raises(ApiRefused, match=r"its role lacks this \(RBAC\)"):
                await client.get(SECRET, SYSTEM, "another")

            folders = [tmp_path / name for name in ("a", "b")]
            names = ("localhost", *service_names("ztunnel-injector", SYSTEM))
            replicas = []
            for folder in folders:
                folder.mkdir()
                replicas.append(OwnCertificates(client, SYSTEM, "ztunnel-injector-ca", names, folder))
            # Both replicas find no CA. One creates it, and the other reads it.
            await asyncio.gather(*(replica.refresh() for replica in replicas))
            first, second = (folder / "ca.crt" for folder in folders)
            assert first.read_bytes() == second.read_bytes()
            assert (folders[0] / "tls.crt").read_bytes() != (folders[1] / "tls.crt").read_bytes()
            assert (folders[0] / "tls.key").stat().st_mode & 0o777 == 0o600
            before = (folders[0] / "tls.crt").read_bytes()
            await replicas[0].refresh()
            assert (folders[0] / "tls.crt").read_bytes() == before

            config = yaml.safe_load((FOLDER / "config.yaml").read_text())["data"]["config.yaml"]
            (tmp_path / "config.yaml").write_text(config)
            files = folders[0] / "tls.crt", folders[0] / "tls.key", tmp_path / "config.yaml"
            await stack.enter_async_context(InjectServer(listener, *files))
            stack.push_async_callback(tasks.close)
            tasks.start(keep_bundle(client, "ztunnel-injector", first), "bundle")

            await namespace(admin, "asked")
            await admin.merge_patch(
                NAMESPACE, "", "asked", {"metadata": {"labels": {"istio.io/dataplane-mode": "ambient"}}}
            )
            await namespace(admin, "silent")
            async with asyncio.timeout(WAIT_S):
                while True:
                    with contextlib.suppress(ApiRefused):
                        if await gated(admin, "asked", pod("ready", None, None)):
                            break
                    await asyncio.sleep(0.1)
            cases = {
                ("asked", None, None): True,
                ("asked", "none", None): False,
                ("asked", None, "false"): False,
                ("asked", "ambient", "true"): True,
                ("silent", None, None): False,
                ("silent", None, "true"): False,
                ("silent", "ambient", None): True,
                ("silent", "ambient", "false"): False,
                (SYSTEM, "ambient", None): False,
                ("kube-system", "ambient", None): False,
            }
            await namespace(admin, "kube-system")
            for (where, mode, inject), expected in cases.items():
                found = await gated(admin, where, pod("case", mode, inject))
                assert found is expected, (where, mode, inject)
            assert not await gated(admin, "asked", pod("host", None, None, hostNetwork=True))
            await admin.delete(MUTATING_WEBHOOK, "", "ztunnel-injector")

            await asyncio.to_thread(serves_by_the_command, cluster.kubeconfig(token), first, tmp_path / "log")

            # A Secret that holds no CA is said, and the files stay.
            broken = {"data": {"ca.key": base64.b64encode(b"no key").decode()}}
            await admin.merge_patch(SECRET, SYSTEM, "ztunnel-injector-ca", broken)
            with pytest.raises(BadAuthority, match=r"ca\.key"):
                await replicas[0].refresh()
            assert (folders[0] / "tls.crt").read_bytes() == before
            leaf = x509.load_pem_x509_certificate(before)
            assert leaf.extensions.get_extension_for_class(x509.SubjectAlternativeName) is not None

    asyncio.run(check())
