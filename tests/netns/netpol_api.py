"""Objects on their way through a real API server: written by a client, and read back by the informer.

For ``make netpol``. What the API refuses (scenario 50 has a policy that its validation refuses) is passed by.
"""

import asyncio
import contextlib
import tempfile
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Final, Self

from deploy import apiserver
from tests.ports import free_port
from ztunnel.kube.client import Client, connect
from ztunnel.kube.errors import ApiRefused
from ztunnel.kube.informer import Informer
from ztunnel.kube.kinds import CLUSTER_NETWORK_POLICY, NAMESPACE, NETWORK_POLICY, POD, Kind
from ztunnel.kube.objects import Object, ObjectKey
from ztunnel.policy.policysync.kinds import SELECTIONS, kept_pod

_WAIT_S: Final = 60.0
_KINDS: Final = {kind.name: kind for kind in (NAMESPACE, POD, NETWORK_POLICY, CLUSTER_NETWORK_POLICY)}
_DEFINITION: Final = Kind(
    "CustomResourceDefinition", "apiextensions.k8s.io/v1", "customresourcedefinitions", namespaced=False
)
_CLUSTER_NETWORK_POLICIES: Final = {
    "apiVersion": "apiextensions.k8s.io/v1",
    "kind": "CustomResourceDefinition",
    "metadata": {
        "name": "clusternetworkpolicies.policy.networking.k8s.io",
        # The API server keeps others from this group's names.
        "annotations": {
            "api-approved.kubernetes.io": "https://github.com/kubernetes-sigs/network-policy-api/pull/30"
        },
    },
    "spec": {
        "group": "policy.networking.k8s.io",
        "scope": "Cluster",
        "names": {"kind": "ClusterNetworkPolicy", "plural": "clusternetworkpolicies"},
        "versions": [
            {
                "name": "v1alpha2",
                "served": True,
                "storage": True,
                "schema": {"openAPIV3Schema": {"type": "object", "x-kubernetes-preserve-unknown-fields": True}},
            }
        ],
    },
}


class ApiObjects:
    """An API server with the objects of one step; ``with ApiObjects() as objects``.

    Attributes:
        refused: the API server's answers about objects that it refused.
    """

    def __init__(self) -> None:
        self.refused: dict[ObjectKey, str] = {}
        self._loop = asyncio.new_event_loop()
        self._stack = contextlib.ExitStack()
        self._life = contextlib.AsyncExitStack()
        self._wanted: dict[ObjectKey, Object] = {}
        self._written: dict[ObjectKey, str] = {}
        self._seen: dict[ObjectKey, Object] = {}

    @staticmethod
    def available() -> bool:
        """Return whether this machine has the API server's programs."""
        return all(apiserver.found(name) for name in apiserver.PROGRAMS)

    def __enter__(self) -> Self:
        with contextlib.ExitStack() as stack:
            folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="netpol-api-"))
            programs = {name: str(apiserver.found(name)) for name in apiserver.PROGRAMS}
            server = apiserver.ApiServer(Path(folder), programs, [free_port() for _ in range(3)])
            stack.callback(server.stop)
            server.start()
            stack.callback(self._loop.close)
            stack.callback(lambda: self._loop.run_until_complete(self._life.aclose()))
            self._loop.run_until_complete(self._begin(server.kubeconfig()))
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *exception: object) -> None:
        self._stack.close()

    async def _begin(self, kubeconfig: Path) -> None:
        self._client: Client = await self._life.enter_async_context(connect(kubeconfig))
        await self._client.create(_DEFINITION, "", _CLUSTER_NETWORK_POLICIES)
        async with asyncio.timeout(_WAIT_S):
            while True:
                with contextlib.suppress(ApiRefused):  # 404 until the definition is established
                    await self._client.get(CLUSTER_NETWORK_POLICY, "", "none")
                found = await self._client.get(_DEFINITION, "", str(_CLUSTER_NETWORK_POLICIES["metadata"]["name"]))
                conditions = {
                    each["type"]: each["status"] for each in found.get("status", {}).get("conditions", ())
                }
                if conditions.get("Established") == "True":
                    break
                await asyncio.sleep(0.05)
        # Whole, since the versions are what is waited for.
        selections = [replace(selection, keep=None) for selection in SELECTIONS]
        self._informer = await self._life.enter_async_context(Informer(self._client, selections))

    def through(self, objects: Mapping[ObjectKey, Object]) -> dict[ObjectKey, Any]:
        """Make these the API server's objects, and return them as the informer has them."""
        return self._loop.run_until_complete(self._through(objects))

    async def _through(self, objects: Mapping[ObjectKey, Object]) -> dict[ObjectKey, Any]:
        for key in self._wanted.keys() - objects.keys():
            await self._remove(key)
        for key in sorted(objects, key=lambda key: list(_KINDS).index(key.kind)):
            if self._wanted.get(key) != objects[key]:
                await self._write(key, objects[key])
        self._wanted = dict(objects)
        async with asyncio.timeout(_WAIT_S):
            while not self._caught_up():
                changes = await self._informer.next()
                for key, value in changes.objects.items():
                    if value is None:
                        self._seen.pop(key, None)
                    else:
                        self._seen[key] = value
        passed_by = {key: objects[key] for key in self.refused.keys() & objects.keys()}
        found = {key: kept_pod(seen) if key.kind == "Pod" else seen for key, seen in self._seen.items()}
        return {key: found[key] for key in self._written} | passed_by

    def _caught_up(self) -> bool:
        """Return whether the informer has told every object in its last version, and none that was deleted."""
        versions = {key: seen["metadata"]["resourceVersion"] for key, seen in self._seen.items()}
        return self._written.items() <= versions.items() and all(
            key in self._written
            for key in versions
            if key.kind != "Namespace"  # the API server has its own
        )

    async def _write(self, key: ObjectKey, body: Object) -> None:
        if key.kind == "Namespace" and key in self._written:
            before = self._wanted[key]["metadata"]["labels"]
            labels = dict.fromkeys(before) | dict(body["metadata"]["labels"])
            made = await self._client.merge_patch(NAMESPACE, "", key.name, {"metadata": {"labels": labels}})
            self._written[key] = made["metadata"]["resourceVersion"]
            return
        await self._remove(key)
        kind = _KINDS[key.kind]
        try:
            made = await self._client.create(kind, key.namespace, _complete(body))
        except ApiRefused as error:
            if error.status != 422:
                raise
            self.refused[key] = error.message
            return
        if key.kind == "Pod":
            made = await self._client.merge_patch(
                POD, key.namespace, key.name, {"status": body["status"]}, subresource="status"
            )
        self._written[key] = made["metadata"]["resourceVersion"]

    async def _remove(self, key: ObjectKey) -> None:
        if self._written.pop(key, None) is not None:
            grace_s = 0 if key.kind == "Pod" else None
            await self._client.delete(_KINDS[key.kind], key.namespace, key.name, grace_s=grace_s)


def _complete(body: Object) -> Object:
    """Return an object with the fields that the API requires. The API server chooses the uid of a pod."""
    if body["kind"] != "Pod":
        return body
    containers = [{**each, "image": "serve"} for each in body["spec"]["containers"]]
    metadata = {key: value for key, value in body["metadata"].items() if key != "uid"}
    spec = {**body["spec"], "containers": containers}
    return {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": spec}
