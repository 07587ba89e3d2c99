"""Calico's policies in proxies of two nodes with two workers each: each process follows PolicySync itself."""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.netns.istio import AmbientMesh, NodeProxy, ask, eventually, refused
from tests.netns.test_istio_policy import ends, lives
from tests.netns.test_istio_workers import many, running, shares
from ztunnel.policy.calico.compile import Compiled, compile_resources
from ztunnel.policy.calico.read import read_resources
from ztunnel.policy.policysync.server import NODE_STREAMS, PolicySyncServer

pytestmark = [pytest.mark.netns, pytest.mark.timeout(120)]

POD = """
apiVersion: v1
kind: Pod
metadata: {{name: {name}, namespace: default, uid: {name}, labels: {{app: {name}}}}}
spec: {{serviceAccountName: {name}, nodeName: node}}
status: {{podIPs: [{ips}]}}
---
"""
POLICY = """
apiVersion: projectcalico.org/v3
kind: GlobalNetworkPolicy
metadata: {{name: servers}}
spec:
  selector: app in {{'near', 'far'}}
  types: [Ingress]
  ingress:
  - action: {action}
    protocol: TCP
    source: {{serviceAccounts: {{names: [client]}}}}
    destination: {{ports: [8080]}}
"""


def compiled(mesh: AmbientMesh, action: str) -> Compiled:
    pods = [mesh.lab.pod(name) for name in ("client", "near", "far")]
    listed = (
        POD.format(name=pod.name, ips=", ".join(f"{{ip: '{address}'}}" for address in pod.addresses))
        for pod in pods
    )
    return compile_resources(read_resources({"all.yaml": "".join(listed) + POLICY.format(action=action)}))


@contextlib.asynccontextmanager
async def with_policies(folder: Path) -> AsyncIterator[tuple[AmbientMesh, PolicySyncServer]]:
    path = f"{folder}/node.sock"
    async with PolicySyncServer() as server:
        await server.open(path, lambda found: found.endpoints, streams=NODE_STREAMS)
        server.publish(Compiled())  # proxies are ready once they have policies; the pods' addresses are known then
        async with running(folder, POLICY_SYNC=path) as mesh:
            server.publish(compiled(mesh, "Allow"))
            yield mesh, server


def test_policies_reach_every_worker_and_end_what_they_do_not_allow_any_more(tmp_path: Path) -> None:
    async def main() -> None:
        async with with_policies(tmp_path) as (mesh, server), contextlib.AsyncExitStack() as stack:
            near, far = mesh.proxies["w1"], mesh.proxies["w2"]
            client, host = mesh.lab.pod("client"), mesh.lab.pod("far").ipv4
            assert await ask(client, host, 8080)
            live = [*await many(stack, mesh, 6, "client", "near"), *await many(stack, mesh, 6, "client", "far")]
            assert 0 not in shares(mesh, near, "client", 15001)
            # Nothing else that changes ends a connection.
            server.publish(compiled(mesh, "Allow"))
            for sock in live:
                await lives(sock)
            server.publish(compiled(mesh, "Deny"))
            for sock in live:
                await ends(sock)
            assert await refused(client, host, 8080)
            line = await far.failed("denied by", "inbound")
            assert (line["policy.tier"], line["policy.name"], line["policy.rule"]) == (
                "default",
                "GlobalNetworkPolicy/servers",
                "0",
            )
            decisions = {"tier": "default", "policy": "GlobalNetworkPolicy/servers"}
            assert far.metric("ztunnel_policy_decisions_total", **decisions, result="denied") == 1
            assert near.metric("ztunnel_policy_decisions_total", **decisions, result="allowed") == 6
            told = json.loads(far.get(15000, "/policies")[1])
            (policy,) = told["tiers"][0]["policies"]
            assert (policy["policy"], policy["allowed"], policy["denied"]) == (decisions["policy"], 7, 1)
            asked = f"/policies/explain?from=default/client&to={host}&port=8080"
            assert json.loads(near.get(15000, asked)[1])["allowed"] is False
            server.publish(compiled(mesh, "Allow"))

            async def again() -> None:
                while await refused(client, host, 8080):
                    pass

            await asyncio.wait_for(again(), 10)

    asyncio.run(main())


def test_a_successor_without_policies_is_not_ready(tmp_path: Path) -> None:
    """The running proxy has all policies; a rollout ends it as soon as its successor is ready."""

    async def main() -> None:
        async with with_policies(tmp_path) as (mesh, server):
            client, host = mesh.lab.pod("client"), mesh.lab.pod("far").ipv4
            assert await ask(client, host, 8080)
            worker, before = mesh.lab.worker("w2"), mesh.proxies["w2"]
            path = f"{tmp_path}/next.sock"
            process = mesh.start_proxy(worker, worker.ztunnel, POLICY_SYNC=path)
            after = NodeProxy(worker.ztunnel, mesh.folder, process, before.agent, before.pods)

            await eventually(lambda: after.readiness() == "not ready, pending: policies\n", "all else is complete")
            for _ in range(8):  # both listen, and the kernel would give the successor half of them
                assert await ask(client, host, 8080)
            await server.open(path, lambda found: found.endpoints, streams=NODE_STREAMS)
            await eventually(after.ready, "ready")

    asyncio.run(main())


def test_the_last_policies_hold_while_their_server_is_away(tmp_path: Path) -> None:
    async def main() -> None:
        async with with_policies(tmp_path) as (mesh, server):
            client, host = mesh.lab.pod("client"), mesh.lab.pod("far").ipv4
            far = mesh.proxies["w2"]
            assert await ask(client, host, 8080)
            assert await refused(mesh.lab.pod("near"), host, 8080)
            await server.close(f"{tmp_path}/node.sock")

            def stale() -> bool:
                return not json.loads(far.get(15000, "/policies")[1])["source"]["in_sync"]

            await eventually(stale, "the end of the stream")
            assert await ask(client, host, 8080)
            assert await refused(mesh.lab.pod("near"), host, 8080)

    asyncio.run(main())
