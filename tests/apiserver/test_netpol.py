"""Network policy from a real API server in the kernel's table: new policies take effect, after an outage too."""

import asyncio
import contextlib
import os
import signal
import statistics
import time
from collections.abc import AsyncIterator
from typing import Any

import pytest

from deploy.lab import may_make_namespaces
from tests.apiserver.server import ApiServer
from tests.netns.netpol_nodes import FRIEND, VICTIM, Node, passes, until, watched
from tproxy.aio.netns import Netns
from tproxy.aio.table import BlockingTable, KeptTable
from tproxy.packets import Interpreter
from xds.model import calico as c
from ztunnel.kube.client import Client, connect
from ztunnel.kube.events import EventWriter
from ztunnel.kube.informer import Informer
from ztunnel.kube.kinds import NAMESPACE, NETWORK_POLICY, POD, Selection
from ztunnel.kube.objects import Object, ObjectKey
from ztunnel.policy.calico.compile import Compiled
from ztunnel.policy.calico.incremental import Compiler
from ztunnel.policy.calico.objects import PolicyObjects
from ztunnel.policy.netpol.controller import Controller
from ztunnel.policy.netpol.table_builder import TABLE
from ztunnel.policy.policysync.kinds import SELECTIONS

pytestmark = [
    pytest.mark.netns,
    pytest.mark.skipif(not may_make_namespaces(), reason="NOT TESTED: network namespaces need root"),
]
WAIT_S = 60
SPACE = "netpol"


def policy(name: str, *rules: dict[str, Any]) -> dict[str, Any]:
    spec = {"podSelector": {"matchLabels": {"app": "web"}}, "policyTypes": ["Ingress"], "ingress": list(rules)}
    return {
        "apiVersion": "networking.k8s.io/v1", "kind": "NetworkPolicy", "metadata": {"name": name}, "spec": spec
    }  # fmt: skip


async def web(client: Client) -> None:
    await client.create(NAMESPACE, "", {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": SPACE}})
    metadata = {"name": "web", "labels": {"app": "web"}}
    spec = {"nodeName": "n1", "containers": [{"name": "app", "image": "app"}]}
    await client.create(POD, SPACE, {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": spec})
    status = {"status": {"phase": "Running", "podIP": "10.0.0.9", "podIPs": [{"ip": "10.0.0.9"}]}}
    await client.merge_patch(POD, SPACE, "web", status, subresource="status")


@contextlib.asynccontextmanager
async def controlled(client: Client, netns: Netns) -> AsyncIterator[tuple[Controller, KeptTable]]:
    async with (
        Informer(client, SELECTIONS) as informer,
        EventWriter(client, "ztunnel-netpol", "n1", informer.known) as events,
        KeptTable(TABLE, netns) as table,
        asyncio.TaskGroup() as group,
    ):
        controller = Controller(informer, table, "n1", events, netns=netns)
        running = group.create_task(controller.run(), name="netpol")
        yield controller, table
        running.cancel()


def test_policies_of_the_api_are_in_the_kernel(cluster: ApiServer) -> None:
    async def until(check: Any) -> None:
        async with asyncio.timeout(WAIT_S):
            while not check():
                await asyncio.sleep(0.002)

    async def main(netns: Netns) -> None:
        async with connect(cluster.kubeconfig()) as client:
            await web(client)
            async with controlled(client, netns) as (controller, table):
                await until(lambda: controller.in_force)
                delays = []
                for number in range(8):
                    before = controller.counts.applied
                    began = time.monotonic()
                    body = policy(f"p{number}", {"ports": [{"port": 8000 + number}]})
                    await client.create(NETWORK_POLICY, SPACE, body)
                    await until(lambda before=before: controller.counts.applied > before and controller.in_force)
                    delays.append((time.monotonic() - began) * 1000)
                print(f"from the API's create to the kernel, read back: median {statistics.median(delays):.0f} ms")
                assert controller.built is not None
                assert len(controller.built.policed[c.Direction.INGRESS]) == 1
                found = await table.read()
                assert found is not None
                comments = {rule.comment for chain in found.chains for rule in chain.rules}
                wanted = {f"KubernetesNetworkPolicy/{SPACE}/p{number} ingress 0" for number in range(8)}
                assert wanted <= comments
                # While the API server is down the last table stays. Afterwards the table follows the changes made
                # meanwhile.
                cluster.stop_api()
                try:
                    assert await table.read() == found
                finally:
                    cluster.start_api()
                await client.delete(NETWORK_POLICY, SPACE, "p0")
                await until(lambda: controller.built is not None and "p0 " not in str(controller.built.table))

    with Netns.create(f"pt-{os.getpid()}-netpol") as netns:
        try:
            asyncio.run(main(netns))
        finally:
            netns.remove_name()


async def compiled(client: Client) -> Compiled:
    """Compile the API server's objects anew."""
    objects: dict[ObjectKey, Object | None] = {}
    for kind in (NAMESPACE, POD, NETWORK_POLICY):
        for item in (await client.list_page(Selection(kind), limit=5000)).items:
            key = ObjectKey(kind.name, item["metadata"].get("namespace", ""), item["metadata"]["name"])
            objects[key] = {**item, "apiVersion": kind.api_version, "kind": kind.name}
    compiler = Compiler()
    compiler.apply(PolicyObjects().changes(objects))
    return compiler.compiled


async def running_pod(client: Client, space: str, name: str, address: str, app: str) -> None:
    body = {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": name, "labels": {"app": app}},
        "spec": {"nodeName": "outage", "containers": [{"name": "app", "image": "app"}]},
    }
    await client.create(POD, space, body)
    status = {"status": {"phase": "Running", "podIP": address, "podIPs": [{"ip": address}]}}
    await client.merge_patch(POD, space, name, status, subresource="status")


async def only(client: Client, space: str, name: str, app: str) -> None:
    body = policy(name, {"from": [{"podSelector": {"matchLabels": {"app": app}}}]})
    body["spec"]["podSelector"] = {"matchLabels": {"app": "victim"}}
    await client.create(NETWORK_POLICY, space, body)


def test_controllers_that_missed_history_catch_up_and_open_nothing(cluster: ApiServer) -> None:
    """Two controllers are stopped while the API server restarts, objects change and etcd compacts. Then the owner
    is killed.
    """

    async def main(netns: Netns, node: Node) -> None:
        loop = asyncio.get_running_loop()
        async with connect(cluster.kubeconfig()) as client:
            space = {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": "outage"}}
            await client.create(NAMESPACE, "", space)
            await running_pod(client, "outage", "victim", VICTIM, "victim")
            await running_pod(client, "outage", "friend", FRIEND, "friend")
            await only(client, "outage", "allow-0", "friend")
            node.start()
            wanted = await compiled(client)
            await until(lambda: node.is_as(wanted))
            node.start()
            async with watched(netns) as watch:
                for process in node.running:
                    process.send_signal(signal.SIGSTOP)
                await loop.run_in_executor(None, cluster.stop_api)
                await loop.run_in_executor(None, cluster.start_api)
                # The friend is deleted, a stranger gets its address, and another policy replaces the previous one.
                await client.delete(POD, "outage", "friend", grace_s=0)
                await running_pod(client, "outage", "heir", FRIEND, "stranger")
                await running_pod(client, "outage", "friend-1", "10.0.8.1", "friend")
                await only(client, "outage", "allow-1", "friend")
                await client.delete(NETWORK_POLICY, "outage", "allow-0")
                newest = (await client.list_page(Selection(POD))).resource_version
                await loop.run_in_executor(None, cluster.compact, newest)
                await watch.more()
                wanted = await compiled(client)
                assert not node.is_as(wanted)
                node.kill()
                for process in node.running:
                    process.send_signal(signal.SIGCONT)
                node.start()
                await until(lambda: node.is_as(wanted))
            assert watch.opened == 0
            with contextlib.closing(BlockingTable(TABLE, netns)) as table:
                found = table.read()
            assert found is not None
            assert passes(Interpreter(found), "10.0.8.1")
            assert not passes(Interpreter(found), FRIEND)

    with Netns.create(f"pt-{os.getpid()}-away") as netns:
        node = Node(netns, cluster.kubeconfig(), "outage")
        try:
            asyncio.run(main(netns, node))
        finally:
            while node.running:
                node.kill()
            netns.remove_name()
