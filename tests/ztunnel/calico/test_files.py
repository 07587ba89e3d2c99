"""Policies from files, followed while they change."""

import asyncio
from collections.abc import Callable
from ipaddress import ip_network
from pathlib import Path

import uvloop

from tests.ztunnel.calico.stores import FLOW
from xds.model import calico as c
from ztunnel.calico.compile import compile_resources
from ztunnel.calico.evaluator import Evaluator
from ztunnel.calico.files import Files, read_files, updates_of
from ztunnel.calico.guard import Guard
from ztunnel.calico.store import Store
from ztunnel.runtime.clock import SystemClock

PODS = """
apiVersion: v1
kind: Pod
metadata: {name: web, namespace: shop, uid: u-web, labels: {app: web}}
spec: {serviceAccountName: web, nodeName: node}
status: {podIPs: [{ip: 10.0.0.1}]}
---
apiVersion: v1
kind: Pod
metadata: {name: db, namespace: shop, uid: u-db, labels: {app: db}}
spec: {serviceAccountName: db, nodeName: node}
status: {podIPs: [{ip: 10.0.0.2}]}
"""
POLICY = """
apiVersion: projectcalico.org/v3
kind: GlobalNetworkPolicy
metadata: {{name: to-db}}
spec:
  selector: app == 'db'
  ingress: [{{action: {action}, source: {{selector: app == 'web'}}}}]
"""


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(20):
        while not condition():
            await asyncio.sleep(0.005)


def test_a_change_is_followed_and_a_fault_leaves_the_last_good_policies_in_force(tmp_path: Path) -> None:
    policy = tmp_path / "policy.yaml"
    changes: list[None] = []

    async def main() -> None:
        files = Files(tmp_path, SystemClock(), lambda: changes.append(None))
        guard = Guard(lambda: files.evaluator, lambda: 0.0)

        def allowed() -> bool:
            return guard.check(c.Direction.INGRESS, FLOW).allowed

        async with asyncio.TaskGroup() as tasks:
            running = tasks.create_task(files.run())
            (tmp_path / "pods.yaml").write_text(PODS)
            policy.write_text("kind: Nonsense")
            await until(lambda: files.error != "")
            assert "policy.yaml" in files.error
            assert (allowed(), files.in_sync, files.age_s) == (False, False, 0.0)
            policy.write_text(POLICY.format(action="Allow"))
            await until(lambda: files.in_sync)
            assert (allowed(), files.error, files.age_s) == (True, "", 0.0)
            policy.write_text(POLICY.format(action="Perhaps"))
            await until(lambda: not files.in_sync)
            assert allowed()
            await until(lambda: files.age_s > 0)
            policy.write_text(POLICY.format(action="Deny"))
            await until(lambda: files.in_sync)
            assert not allowed()
            running.cancel()
        assert len(changes) == 2

    uvloop.run(main())


def test_a_store_filled_from_what_was_compiled_has_all_of_it(tmp_path: Path) -> None:
    (tmp_path / "all.yaml").write_text(PODS + "---" + POLICY.format(action="Allow"))
    compiled = compile_resources(read_files([tmp_path]))
    evaluator = Evaluator(Store())
    for update in updates_of(compiled):
        evaluator.apply(update)
    store = evaluator.store
    assert (store.policies, store.profiles, store.endpoints) == (
        compiled.policies,
        compiled.profiles,
        compiled.endpoints,
    )
    assert (store.service_accounts, store.namespaces) == (compiled.accounts, compiled.namespaces)
    assert len(store.ip_sets) == len(compiled.ip_sets)
    assert store.endpoint_at("10.0.0.2") is not None
    assert store.endpoints[c.EndpointId("k8s", "shop/db", "eth0")].addresses == (ip_network("10.0.0.2"),)
