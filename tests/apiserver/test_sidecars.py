"""Sidecars through a real API server: which pods it selects, which ones it accepts or refuses, and its error
texts.
"""

import asyncio
import base64
import contextlib
import json
import socket
import ssl
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest

from tests.apiserver.server import ApiServer
from tests.ztunnel.kube.certificates import Pair, self_signed
from tests.ztunnel.sidecar.inject.test_webhooks import NAMESPACES, PODS
from ztunnel.kube.client import Client, connect
from ztunnel.kube.errors import ApiRefused
from ztunnel.kube.kinds import MUTATING_WEBHOOK, NAMESPACE, POD
from ztunnel.sidecar.inject.server import InjectServer
from ztunnel.sidecar.inject.webhooks import ambient, sidecars, tag

WAIT_S = 60


def pod(labels: Any = None, annotations: Any = None, **spec: Any) -> dict[str, Any]:
    container = {"name": "app", "image": "app", "readinessProbe": {"httpGet": {"port": 8080}}}
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": "web", "labels": labels or {}, "annotations": annotations or {}},
        "spec": {
            "containers": [container],
            "initContainers": [{"name": "own", "image": "app"}],
            "serviceAccountName": "default",  # else by an admission plugin that this server does not run
            **spec,
        },
    }


def names(made: Any, kind: str) -> list[str]:
    return [each["name"] for each in made["spec"].get(kind, [])]


async def namespace(client: Client, name: str, labels: dict[str, str]) -> None:
    body = {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name, "labels": labels}}
    await client.create(NAMESPACE, "", body)


async def register(client: Client, made: dict[str, Any], port: int, ca: bytes, **changes: Any) -> None:
    """Create a webhook configuration that calls a URL, because the test has no service network."""
    for entry in made["webhooks"]:
        path = entry["clientConfig"]["service"]["path"]
        url = f"https://127.0.0.1:{port}{path}"
        entry["clientConfig"] = {"url": url, "caBundle": base64.b64encode(ca).decode()}
        entry.update(changes)
    await client.create(MUTATING_WEBHOOK, "", made)


@contextlib.asynccontextmanager
async def injector(pair: Pair) -> AsyncIterator[int]:
    listener = socket.create_server(("127.0.0.1", 0))
    with listener:
        async with InjectServer(listener, pair.certificate, pair.key, None) as server:
            yield server.port


async def tried(client: Client, where: str, document: dict[str, Any]) -> Any:
    return await client.create(POD, where, document, dry_run=True)


async def until(client: Client, where: str, document: dict[str, Any], condition: Callable[[Any], bool]) -> Any:
    """Create as a dry run until the API server has taken up the configuration."""
    async with asyncio.timeout(WAIT_S):
        while not condition(made := await tried(client, where, document)):
            await asyncio.sleep(0.1)
    return made


def test_the_four_entries_and_a_tag_and_what_the_api_server_makes_of_sidecars(
    cluster: ApiServer, tmp_path: Path
) -> None:
    async def main() -> None:
        pair = self_signed(tmp_path / "pair")
        async with connect(cluster.kubeconfig()) as client, injector(pair) as port:
            for number, (labels, _) in enumerate(NAMESPACES):
                await namespace(client, f"sidecars-{number}", labels)
            await namespace(client, "sidecars-tag", {"istio.io/rev": "prod"})
            where = ("ztunnel-injector", "istio-system")
            ca = pair.certificate.read_bytes()
            await register(client, ambient(*where), port, ca)
            await register(client, sidecars("default", *where), port, ca)
            await register(client, tag("prod", "default", *where, template="sidecar-classic"), port, ca)
            await until(client, "sidecars-1", pod(), lambda made: "istio-proxy" in names(made, "initContainers"))
            classic = await until(
                client, "sidecars-tag", pod(), lambda made: "istio-proxy" in names(made, "containers")
            )
            assert names(classic, "initContainers") == ["own", "mesh-init"]
            for number, (_, expected) in enumerate(NAMESPACES):
                found = ""
                for labels in PODS:
                    made = await tried(client, f"sidecars-{number}", pod(labels))
                    found += "I" if "istio-proxy" in names(made, "initContainers") else "."
                assert found == expected, NAMESPACES[number]
            # Two configurations are for this one: the gate of the first makes way for the second's sidecar.
            both = await tried(client, "sidecars-1", pod({"istio.io/dataplane-mode": "ambient"}))
            assert names(both, "initContainers") == ["mesh-init", "istio-proxy", "own"]
            gated = await tried(client, "sidecars-0", pod({"istio.io/dataplane-mode": "ambient"}))
            assert names(gated, "initContainers") == ["mesh-gate", "own"]
            # Stored, not only tried: the API server validates every field.
            stored = await client.create(POD, "sidecars-1", pod())
            assert names(stored, "initContainers") == ["mesh-init", "istio-proxy", "own"]
            assert stored["spec"]["initContainers"][1]["restartPolicy"] == "Always"
            probe = stored["spec"]["containers"][0]["readinessProbe"]["httpGet"]
            assert (probe["path"], probe["port"]) == ("/app-health/app/readyz", 15020)
            status = json.loads(stored["metadata"]["annotations"]["sidecar.istio.io/status"])
            assert status["injector"] == "ztunnel-py"
            # What was stored can be created anew elsewhere: nothing of it is doubled.
            fresh = {"name": "web", **{key: stored["metadata"][key] for key in ("labels", "annotations")}}
            again = await tried(client, "sidecars-3", {**stored, "metadata": fresh})
            for kind in ("initContainers", "containers", "volumes"):
                assert names(again, kind) == names(stored, kind)
            await client.delete(POD, "sidecars-1", "web", grace_s=0)
            assert names(await tried(client, "sidecars-1", pod(hostNetwork=True)), "initContainers") == ["own"]

            bad = {
                "traffic.sidecar.istio.io/excludeOutboundPorts": "smtp",
                "sidecar.istio.io/proxyCPU": "lots",
            }
            with pytest.raises(ApiRefused) as raised:
                await tried(client, "sidecars-1", pod(annotations=bad))
            said = str(raised.value)
            assert 'admission webhook "namespace.sidecar.inject.ztunnel-py.io" denied the request: ' in said
            assert "annotation traffic.sidecar.istio.io/excludeOutboundPorts: 'smtp' is no port" in said
            assert "annotation sidecar.istio.io/proxyCPU: must be a quantity" in said
            # The same pod in a namespace without a label for injection.
            assert names(await tried(client, "sidecars-0", pod(annotations=bad)), "initContainers") == ["own"]
            for name in ("ztunnel-injector", "ztunnel-sidecar-injector", "ztunnel-revision-tag-prod"):
                await client.delete(MUTATING_WEBHOOK, "", name)

    asyncio.run(main())


@contextlib.asynccontextmanager
async def misbehaving(pair: Pair, respond: Callable[[dict[str, Any]], bytes | None]) -> AsyncIterator[int]:
    """Run a webhook with arbitrary answers. None: it never answers."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(pair.certificate, pair.key)
    running: set[asyncio.Task[Any] | None] = set()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        running.add(asyncio.current_task())
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
            head = (await reader.readuntil(b"\r\n\r\n")).lower()
            length = int(head.partition(b"content-length:")[2].split(b"\r\n")[0])
            answer = respond(json.loads(await reader.readexactly(length)))
            if answer is None:
                await reader.read()
            else:
                writer.write(answer)
                await writer.drain()
        writer.close()
        with contextlib.suppress(ConnectionError, ssl.SSLError):
            await writer.wait_closed()

    async with await asyncio.start_server(serve, "127.0.0.1", 0, ssl=context) as server:
        yield server.sockets[0].getsockname()[1]
        while left := [task for task in running if task is not None and not task.done()]:
            await asyncio.wait(left)


def http(status: str, body: object) -> bytes:
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    head = (
        f"HTTP/1.1 {status}\r\ncontent-type: application/json\r\ncontent-length: {len(data)}\r\nconnection: close"
    )
    return f"{head}\r\n\r\n".encode() + data


def review(version: str = "v1", **response: Any) -> dict[str, Any]:
    return {"apiVersion": f"admission.k8s.io/{version}", "kind": "AdmissionReview", "response": response}


def patch(operations: object) -> str:
    return base64.b64encode(json.dumps(operations).encode()).decode()


def test_what_goes_wrong_has_the_text_that_the_documentation_names(cluster: ApiServer, tmp_path: Path) -> None:
    pair, other = self_signed(tmp_path / "pair"), self_signed(tmp_path / "other")
    replace = [{"op": "replace", "path": "/spec/nothing/here", "value": 1}]

    def of(request: dict[str, Any], **more: Any) -> bytes:
        return http("200 OK", review(uid=request["request"]["uid"], allowed=True, **more))

    faults: dict[str, tuple[Callable[[dict[str, Any]], bytes | None], str]] = {
        "uid": (lambda _: http("200 OK", review(uid="x", allowed=True)), "expected response.uid="),
        "patch": (
            lambda asked: of(asked, patchType="JSONPatch", patch=patch(replace)),
            "replace operation does not apply",
        ),
        "type": (lambda asked: of(asked, patch=patch([])), "patch"),
        "status": (lambda _: http("500 Internal Server Error", b"broken"), "an error on the server"),
        "slow": (lambda _: None, "context deadline exceeded"),
    }

    async def main() -> None:
        async with connect(cluster.kubeconfig()) as client:
            await namespace(client, "wrong", {"istio-injection": "enabled"})
            await namespace(client, "bystander", {})
            ca = pair.certificate.read_bytes()

            async def text(port: int, bundle: bytes = ca) -> str:
                made = sidecars("default", "x", "istio-system")
                await register(client, made, port, bundle, timeoutSeconds=1)
                try:
                    async with asyncio.timeout(WAIT_S):
                        while True:
                            try:
                                await tried(client, "wrong", pod())
                            except ApiRefused as error:
                                # Pods that did not ask for a sidecar are created as usual.
                                await tried(client, "bystander", pod())
                                return str(error)
                            await asyncio.sleep(0.05)
                finally:
                    await client.delete(MUTATING_WEBHOOK, "", "ztunnel-sidecar-injector")

            async def gone() -> None:
                """Wait until the API server no longer applies the configuration."""
                async with asyncio.timeout(WAIT_S):
                    while True:
                        with contextlib.suppress(ApiRefused):
                            await tried(client, "wrong", pod())
                            return
                        await asyncio.sleep(0.05)

            for name, (respond, expected) in faults.items():
                async with misbehaving(pair, respond) as port:
                    assert expected in await text(port), name
                    await gone()
            async with misbehaving(pair, lambda asked: of(asked)) as port:
                assert "failed to verify certificate" in await text(port, other.certificate.read_bytes())
                await gone()
            assert "connection refused" in await text(port)
            await gone()

    asyncio.run(main())
