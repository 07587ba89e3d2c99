"""A mesh whose pods are objects of a real API server: the test is the kubelet, and the control plane's eyes.

Pods are namespaces of a lab. What istiod reads of annotations, :func:`told_control_plane` writes into the
mesh file of the embedded control plane.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

from deploy.lab import Place
from deploy.processes import Proc
from tests.netns.istio import AmbientMesh
from ztunnel.kube.client import Client
from ztunnel.kube.kinds import NAMESPACE, POD
from ztunnel.node.agent.enrolment import REDIRECTION


async def create_namespace(client: Client, name: str, **labels: str) -> None:
    metadata = {"name": name, "labels": labels}
    await client.create(NAMESPACE, "", {"apiVersion": "v1", "kind": "Namespace", "metadata": metadata})


async def label(client: Client, name: str, **labels: str | None) -> None:
    """Change labels of a namespace; None removes one. In a keyword, two underscores stand for a slash, one for a
    dot.
    """
    wanted = {key.replace("__", "/").replace("_", "."): value for key, value in labels.items()}
    await client.merge_patch(NAMESPACE, "", name, {"metadata": {"labels": wanted}})


async def run_pod(client: Client, namespace: str, place: Place, node: str, proc: Proc | None = None) -> str:
    """Create a pod, bind it and run it, as scheduler and kubelet do; return its uid."""
    body = {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": place.name},
        "spec": {"nodeName": node, "serviceAccountName": place.name, "containers": [{"name": "a", "image": "a"}]},
    }
    made = await client.create(POD, namespace, body)
    uid = str(made["metadata"]["uid"])
    if proc is not None:
        proc.add(1000 + len(list(proc.folder.iterdir())), place.netns, uid)
    ips = [{"ip": str(address)} for address in place.addresses]
    status = {"status": {"phase": "Running", "podIP": ips[0]["ip"], "podIPs": ips}}
    await client.merge_patch(POD, namespace, place.name, status, subresource="status")
    return uid


async def annotation(client: Client, namespace: str, name: str) -> str | None:
    metadata: dict[str, Any] = (await client.get(POD, namespace, name))["metadata"]
    value: str | None = metadata.get("annotations", {}).get(REDIRECTION)
    return value


@contextlib.asynccontextmanager
async def told_control_plane(client: Client, namespace: str, mesh: AmbientMesh) -> AsyncIterator[None]:
    """While entered, the mesh file says which pods are in the mesh, as their annotations say it."""

    async def follow() -> None:
        while True:
            names = [place.name for worker in mesh.lab.workers.values() for place in worker.pods.values()]
            found = [name for name in names if await annotation(client, namespace, name) == "enabled"]
            if sorted(found) != sorted(mesh.captured):
                mesh.captured[:] = found
                mesh.write_mesh()
            await asyncio.sleep(0.05)

    task = asyncio.get_running_loop().create_task(follow())
    try:
        yield
    finally:
        task.cancel()
        await asyncio.wait([task])


def proc_of(folder: Path) -> Proc:
    proc = Proc(folder)
    proc.add(1, None)
    return proc
