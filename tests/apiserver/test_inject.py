"""The injector end to end: a real API server calls it, and the API server's answers contain its messages."""

import asyncio
import base64
import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.apiserver.server import ApiServer
from tests.ztunnel.kube.certificates import Pair, self_signed
from ztunnel.kube.client import Client, connect
from ztunnel.kube.errors import ApiRefused
from ztunnel.kube.kinds import MUTATING_WEBHOOK, NAMESPACE, POD

WAIT_S = 60
RULE = {"apiGroups": [""], "apiVersions": ["v1"], "operations": ["CREATE"], "resources": ["pods"]}


def pod(name: str, labels: Any = None, annotations: Any = None, **spec: Any) -> dict[str, Any]:
    metadata = {"name": name, "labels": labels or {}, "annotations": annotations or {}}
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": metadata,
        "spec": {"containers": [{"name": "app", "image": "app"}], **spec},
    }


def inits(made: Any) -> list[str]:
    return [each["name"] for each in made["spec"].get("initContainers", [])]


@dataclass
class Injector:
    """A process of ours, and the files it reads."""

    process: subprocess.Popen[str]
    port: int
    folder: Path
    name: str

    def use(self, pair: Pair) -> None:
        for source, name in ((pair.certificate, "tls.crt"), (pair.key, "tls.key")):
            fresh = self.folder / f"{name}.new"
            fresh.write_bytes(source.read_bytes())
            fresh.rename(self.folder / name)

    def ca(self, *pairs: Pair) -> None:
        (self.folder / "ca.new").write_bytes(b"".join(pair.certificate.read_bytes() for pair in pairs))
        (self.folder / "ca.new").rename(self.folder / "ca.crt")


@contextlib.asynccontextmanager
async def injector(cluster: ApiServer, folder: Path, pair: Pair, name: str) -> AsyncIterator[Injector]:
    folder.mkdir()
    files = Injector(None, 0, folder, name)  # type: ignore[arg-type]
    files.use(pair)
    files.ca(pair)
    (folder / "config.yaml").write_text("image: example/ztunnel:1\n")
    arguments = [
        "--address=127.0.0.1",
        "--port=0",
        f"--certificate={folder / 'tls.crt'}",
        f"--key={folder / 'tls.key'}",
    ]
    arguments += [f"--config={folder / 'config.yaml'}", f"--ca={folder / 'ca.crt'}", f"--webhook-config={name}"]
    with (folder / "log").open("w") as log:
        process = subprocess.Popen(
            [
                sys.executable,
                "-m",
                "ztunnel",
                "inject",
                "serve",
                *arguments,
                f"--kubeconfig={cluster.kubeconfig()}",
            ],
            stderr=log,
            text=True,
            env={**os.environ, "PYTHONUNBUFFERED": "1"},
        )
    try:
        async with asyncio.timeout(WAIT_S):
            while "serving on port" not in (said := (folder / "log").read_text()):
                assert process.poll() is None, said
                await asyncio.sleep(0.05)
        files.process, files.port = process, int(said.partition("serving on port ")[2].split()[0])
        yield files
    finally:
        process.send_signal(signal.SIGTERM)
        assert process.wait(20) == 0


async def register(client: Client, name: str, port: int, label: str) -> None:
    entry = {
        "name": "namespace.inject.example.com",
        "clientConfig": {"url": f"https://127.0.0.1:{port}/inject"},
        "rules": [RULE],
        "namespaceSelector": {"matchLabels": {"mesh": label}},
        "admissionReviewVersions": ["v1"],
        "sideEffects": "None",
        "failurePolicy": "Fail",
        "timeoutSeconds": 5,
        "matchConditions": [
            {
                "name": "not-host-network",
                "expression": "!has(object.spec.hostNetwork) || !object.spec.hostNetwork",
            }
        ],
    }
    other = {
        **entry,
        "name": "object.inject.example.com",
        "namespaceSelector": {"matchLabels": {"mesh": "no-one"}},
    }
    document = {
        "apiVersion": "admissionregistration.k8s.io/v1",
        "kind": "MutatingWebhookConfiguration",
        "metadata": {"name": name},
        "webhooks": [entry, other],
    }
    await client.create(MUTATING_WEBHOOK, "", document)


async def bundle(client: Client, name: str) -> list[int]:
    """Return how many certificates each entry has."""
    found = await client.get(MUTATING_WEBHOOK, "", name)
    decoded = [base64.b64decode(each["clientConfig"].get("caBundle", "")) for each in found["webhooks"]]
    return [each.count(b"BEGIN CERTIFICATE") for each in decoded]


async def until_bundle(client: Client, name: str, expected: list[int]) -> None:
    async with asyncio.timeout(WAIT_S):
        while await bundle(client, name) != expected:
            await asyncio.sleep(0.05)


async def created(client: Client, namespace: str, document: dict[str, Any]) -> Any:
    """Create as a dry run, once the API server has taken up the configuration."""
    async with asyncio.timeout(WAIT_S):
        while True:
            try:
                return await client.create(POD, namespace, document, dry_run=True)
            except ApiRefused as error:
                if "failed to verify certificate" not in str(error):
                    raise
                await asyncio.sleep(0.1)


async def until_injected(client: Client, namespace: str) -> None:
    async with asyncio.timeout(WAIT_S):
        while not inits(await created(client, namespace, pod("probe"))):
            await asyncio.sleep(0.1)


async def namespace(client: Client, name: str, **labels: str) -> None:
    metadata = {"name": name, "labels": labels}
    await client.create(NAMESPACE, "", {"apiVersion": "v1", "kind": "Namespace", "metadata": metadata})


def test_pods_are_injected_refused_and_left_alone(cluster: ApiServer, tmp_path: Path) -> None:
    async def check() -> None:
        pair = self_signed(tmp_path / "one")
        async with connect(cluster.kubeconfig()) as client:
            await namespace(client, "inject-in", mesh="first")
            await namespace(client, "inject-out")
            async with injector(cluster, tmp_path / "run", pair, "first") as running:
                # A configuration created after the injector, without a CA bundle, gets the bundle in both entries.
                await register(client, "first", running.port, "first")
                await until_bundle(client, "first", [1, 1])
                await until_injected(client, "inject-in")
                made = await client.create(POD, "inject-in", pod("web"))
                assert inits(made) == ["mesh-gate"]
                assert made["metadata"]["labels"]["istio.io/dataplane-mode"] == "ambient"
                assert made["spec"]["initContainers"][0]["image"] == "example/ztunnel:1"
                assert inits(await created(client, "inject-out", pod("web"))) == []
                assert inits(await created(client, "inject-in", pod("host", hostNetwork=True))) == []
                out = pod("out", labels={"sidecar.istio.io/inject": "false"})
                assert inits(await created(client, "inject-in", out)) == []
                bad = pod("bad", annotations={"inject.istio.io/templates": "nope"})
                with pytest.raises(ApiRefused) as raised:
                    await client.create(POD, "inject-in", bad)
                assert "denied the request: annotation inject.istio.io/templates names 'nope'" in str(raised.value)

                # A faulty configuration changes nothing, a good one does.
                config = running.folder / "config.yaml"
                config.write_text("policy: maybe\n")
                async with asyncio.timeout(WAIT_S):
                    while "the last good config stays" not in (running.folder / "log").read_text():
                        await asyncio.sleep(0.05)
                assert inits(await created(client, "inject-in", pod("still"))) == ["mesh-gate"]
                config.write_text("policy: disabled\n")
                async with asyncio.timeout(WAIT_S):
                    while inits(await created(client, "inject-in", pod("now"))):
                        await asyncio.sleep(0.1)
            # While the injector is not running, pods that request injection are refused. Other pods are created.
            with pytest.raises(ApiRefused, match="connection refused"):
                await client.create(POD, "inject-in", pod("away"))
            await client.create(POD, "inject-out", pod("away"))
            await client.delete(MUTATING_WEBHOOK, "", "first")

    asyncio.run(check())


def test_the_certificate_and_its_ca_rotate_under_two_replicas(cluster: ApiServer, tmp_path: Path) -> None:
    async def check() -> None:
        old, new = self_signed(tmp_path / "old"), self_signed(tmp_path / "new")
        async with connect(cluster.kubeconfig()) as client:
            await namespace(client, "rotate", mesh="second")
            async with (
                injector(cluster, tmp_path / "a", old, "second") as first,
                injector(cluster, tmp_path / "b", old, "second") as other,
            ):
                await register(client, "second", first.port, "second")
                await until_bundle(client, "second", [1, 1])
                await until_injected(client, "rotate")
                for replica in (first, other):
                    replica.ca(old, new)
                await until_bundle(client, "second", [2, 2])
                first.use(new)
                async with asyncio.timeout(WAIT_S):
                    while "a new certificate is in use" not in (first.folder / "log").read_text():
                        # Pods go on being created through all of it.
                        assert inits(await created(client, "rotate", pod("during"))) == ["mesh-gate"]
                for replica in (first, other):
                    replica.ca(new)
                await until_bundle(client, "second", [1, 1])
                assert inits(await created(client, "rotate", pod("after"))) == ["mesh-gate"]

                # Somebody applies the manifest again, without a bundle; replicas do not fight about it.
                emptied = [{"op": "remove", "path": f"/webhooks/{at}/clientConfig/caBundle"} for at in (0, 1)]
                await client.json_patch(MUTATING_WEBHOOK, "", "second", emptied)
                await until_bundle(client, "second", [1, 1])
                settled = (await client.get(MUTATING_WEBHOOK, "", "second"))["metadata"]["resourceVersion"]
                # A CA file that holds none is never written.
                (first.folder / "ca.crt").write_text("no certificate\n")
                async with asyncio.timeout(WAIT_S):
                    while "holds no certificates" not in (first.folder / "log").read_text():
                        await asyncio.sleep(0.05)
                found = await client.get(MUTATING_WEBHOOK, "", "second")
                assert found["metadata"]["resourceVersion"] == settled
            await client.delete(MUTATING_WEBHOOK, "", "second")

    asyncio.run(check())
