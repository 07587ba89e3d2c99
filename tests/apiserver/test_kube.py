"""The client, the informer and the writer of events against a real API server."""

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.apiserver.server import NOBODY, ApiServer
from tests.ztunnel.kube.certificates import self_signed
from ztunnel.kube.client import Client, connect
from ztunnel.kube.errors import ApiRefused, ApiUnreachable
from ztunnel.kube.events import EventWriter
from ztunnel.kube.informer import Informer
from ztunnel.kube.kinds import ADMIN_NETWORK_POLICY, EVENT, NAMESPACE, NETWORK_POLICY, POD, Selection
from ztunnel.kube.objects import Object, ObjectKey

WAIT_S = 60


def pod(name: str, node: str = "n1", **labels: str) -> dict[str, Any]:
    spec = {"nodeName": node, "containers": [{"name": "app", "image": "app"}]}
    return {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": name, "labels": labels}, "spec": spec}


async def namespace(client: Client, name: str) -> str:
    await client.create(NAMESPACE, "", {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name}})
    return name


async def follow(informer: Informer, objects: dict[ObjectKey, Object], condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(WAIT_S):
        while not condition():
            for key, value in (await informer.next()).objects.items():
                if value is None:
                    del objects[key]
                else:
                    objects[key] = value


def test_pages_selectors_status_and_deletion(cluster: ApiServer) -> None:
    async def check() -> None:
        async with connect(cluster.kubeconfig()) as client:
            await namespace(client, "pages")
            for number in range(30):
                await client.create(POD, "pages", pod(f"p{number}", "n1" if number % 3 else "n2", app="web"))
            mine = Selection(POD, namespace="pages", fields="spec.nodeName=n1", labels="app=web")
            kinds = (mine, NAMESPACE, NETWORK_POLICY, Selection(ADMIN_NETWORK_POLICY, optional=True))
            async with Informer(client, kinds, page=7) as informer:
                seen: dict[ObjectKey, Object] = {}
                await follow(informer, seen, lambda: informer.synced and len(seen) >= 20)
                pods = {key.name: value for key, value in seen.items() if key.kind == "Pod"}
                assert set(pods) == {f"p{number}" for number in range(30) if number % 3}
                assert pods["p1"]["apiVersion"] == "v1"
                key = ObjectKey("Pod", "pages", "p1")
                status = {"status": {"phase": "Running", "podIP": "10.0.0.9", "podIPs": [{"ip": "10.0.0.9"}]}}
                await client.merge_patch(POD, "pages", "p1", status, subresource="status")
                await follow(informer, seen, lambda: seen[key]["status"].get("podIP") == "10.0.0.9")
                await client.delete(POD, "pages", "p1", grace_s=0)
                await follow(informer, seen, lambda: key not in seen)
                # A label that no longer matches is a deletion for this selection.
                away = {"metadata": {"labels": {"app": None}}}
                await client.merge_patch(POD, "pages", "p2", away)
                await follow(informer, seen, lambda: ObjectKey("Pod", "pages", "p2") not in seen)
                assert informer.faults == {}

    asyncio.run(check())


def test_the_informer_lives_through_restarts_and_compaction(cluster: ApiServer) -> None:
    async def check() -> None:
        loop = asyncio.get_running_loop()
        async with connect(cluster.kubeconfig()) as client:
            await namespace(client, "away")
            await client.create(POD, "away", pod("a"))
            await client.create(POD, "away", pod("b"))
            chosen = Selection(POD, namespace="away")
            async with Informer(client, (chosen,)) as informer:
                seen: dict[ObjectKey, Object] = {}
                await follow(informer, seen, lambda: informer.synced and len(seen) == 2)
                old = (await client.list_page(chosen)).resource_version
                await loop.run_in_executor(None, cluster.stop_api)
                async with asyncio.timeout(WAIT_S):
                    while not informer.faults:
                        await asyncio.sleep(0.02)
                assert cluster.url in informer.faults["pods"]
                assert len(seen) == 2
                await loop.run_in_executor(None, cluster.start_api)
                await client.delete(POD, "away", "a", grace_s=0)
                await client.create(POD, "away", pod("c"))
                await follow(informer, seen, lambda: {key.name for key in seen} == {"b", "c"})
                newest = (await client.list_page(chosen)).resource_version
                await loop.run_in_executor(None, cluster.compact, newest)
                await loop.run_in_executor(None, cluster.stop_api)
                await loop.run_in_executor(None, cluster.start_api)
                with pytest.raises(ApiRefused) as raised:
                    await anext(client.watch(chosen, old, 5))
                assert raised.value.status == 410
                await client.create(POD, "away", pod("d"))
                await follow(informer, seen, lambda: {key.name for key in seen} == {"b", "c", "d"})

    asyncio.run(check())


def test_what_is_wrong_is_one_line(cluster: ApiServer, tmp_path: Path) -> None:
    async def refused(path: Path) -> str:
        async with connect(path) as client:
            with pytest.raises((ApiRefused, ApiUnreachable)) as raised:
                await client.list_page(Selection(POD))
        assert "\n" not in str(raised.value)
        return str(raised.value)

    async def check() -> None:
        said = await refused(cluster.kubeconfig(NOBODY))
        assert 'User "nobody" cannot list resource "pods"' in said
        assert said.endswith("its role lacks this (RBAC)")
        assert "the token or certificate is expired" in await refused(cluster.kubeconfig("no-such-token"))
        other = self_signed(tmp_path / "other")
        said = await refused(cluster.kubeconfig(ca=other.certificate))
        assert "is not trusted by the CA of the kubeconfig" in said

    asyncio.run(check())


def test_events_are_where_describe_looks(cluster: ApiServer) -> None:
    async def check() -> None:
        async with connect(cluster.kubeconfig()) as client:
            await namespace(client, "events")
            made = await client.create(POD, "events", pod("web"))
            key = ObjectKey("Pod", "events", "web")
            async with (
                Informer(client, (Selection(POD, namespace="events"),)) as informer,
                EventWriter(client, "ztunnel-netpol", "n1", informer.known, interval_s=0, repeat_s=0) as sink,
            ):
                await follow(informer, seen := {}, lambda: key in seen)
                uid = made["metadata"]["uid"]
                chosen = Selection(EVENT, namespace="events", fields=f"involvedObject.uid={uid}")

                async def count(expected: int) -> None:
                    async with asyncio.timeout(WAIT_S):
                        while True:
                            found = (await client.list_page(chosen)).items
                            if [event["count"] for event in found] == [expected]:
                                return
                            await asyncio.sleep(0.02)

                sink.event(key, "PolicyNotApplied", "a selector cannot be read")
                await count(1)
                sink.event(key, "PolicyNotApplied", "a selector cannot be read")
                await count(2)

    asyncio.run(check())
