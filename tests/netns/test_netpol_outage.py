"""An API server that goes away while pods come and go, and controllers that die: nothing opens that was closed."""

import asyncio
import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.netns.dumps import everything, without_generation
from tests.netns.foreign import foreign_tables
from tests.netns.netpol_nodes import VICTIM, Node, passes, until, watched
from tests.ztunnel.kube.fake_api import FakeApi
from tproxy.aio.netns import Netns
from tproxy.aio.table import BlockingTable
from tproxy.packets import Interpreter
from ztunnel.kube.kinds import NAMESPACE, NETWORK_POLICY, POD
from ztunnel.kube.objects import Object, ObjectKey
from ztunnel.policy.calico.incremental import Compiler
from ztunnel.policy.calico.objects import PolicyObjects
from ztunnel.policy.netpol.table_builder import TABLE

pytestmark = [pytest.mark.netns, pytest.mark.timeout(120)]
KINDS = {kind.plural: kind for kind in (NAMESPACE, POD, NETWORK_POLICY)}


@pytest.fixture
def netns() -> Iterator[Netns]:
    with Netns.create(f"pt-{os.getpid()}-outage") as netns:
        try:
            yield netns
        finally:
            netns.remove_name()


async def pod(api: FakeApi, name: str, address: str, **labels: str) -> None:
    status = {"phase": "Running", "podIPs": [{"ip": address}]}
    await api.put("pods", "x", name, labels=labels, spec={"nodeName": "n1"}, status=status)


async def only(api: FakeApi, name: str, *apps: str) -> None:
    """A policy: the victim takes connections from pods of these applications."""
    peers = [{"podSelector": {"matchLabels": {"app": app}}} for app in apps]
    spec = {"podSelector": {"matchLabels": {"app": "victim"}}, "ingress": [{"from": peers}] if peers else []}
    await api.put("networkpolicies", "x", name, spec=spec)


def wanted(api: FakeApi) -> Compiler:
    """Compile what the API server has, from nothing."""
    objects: dict[ObjectKey, Object | None] = {}
    for (plural, namespace, name), body in api.objects.items():
        kind = KINDS[plural]
        objects[ObjectKey(kind.name, namespace, name)] = {
            **body, "apiVersion": kind.api_version, "kind": kind.name
        }  # fmt: skip
    compiler = Compiler()
    compiler.apply(PolicyObjects().changes(objects))
    return compiler


async def churn(api: FakeApi, round_: int) -> None:
    """Create, delete and change pods, and replace the policies of the victim, adding new ones first."""
    for number in range(40):
        await pod(api, f"p{number}", f"10.0.{1 + round_}.{number}", app=f"app-{(number + round_) % 7}")
    for number in range(0, 40, 3):
        await api.remove("pods", "x", f"p{number}")
    await only(api, f"allow-{round_ + 1}", "friend", f"app-{round_}")
    await api.remove("networkpolicies", "x", f"allow-{round_}")
    # The friend goes, and a stranger gets its address.
    await api.remove("pods", "x", f"friend-{round_}")
    await pod(api, f"heir-{round_}", f"10.0.8.{round_}", app="stranger")
    await pod(api, f"friend-{round_ + 1}", f"10.0.8.{round_ + 1}", app="friend")


def test_nothing_opens_while_the_api_server_is_away_and_controllers_die(netns: Netns, tmp_path: Path) -> None:
    async def main() -> None:
        api = FakeApi()
        node: Node | None = None
        foreign_tables(netns)
        before = without_generation(everything(netns))
        try:
            async with api.serve():
                await api.put("namespaces", "", "x")
                await pod(api, "victim", VICTIM, app="victim")
                await pod(api, "friend-0", "10.0.8.0", app="friend")
                await only(api, "allow-0", "friend")
                node = Node(netns, api.kubeconfig(tmp_path))
                first = node.start()
                await until(lambda: node is not None and node.is_as(wanted(api).compiled))
                second = node.start()
                async with watched(netns) as watch:
                    for round_ in range(4):
                        await churn(api, round_)
                        await until(lambda: node.is_as(wanted(api).compiled))
                    assert first.poll() is None
                    assert second.poll() is None
            # The API server is down meanwhile, and returns with its history, then without. In some rounds the
            # controller is killed before it catches up.
            for round_, (dies, compacted) in enumerate(((False, False), (True, False), (True, True)), start=4):
                async with watched(netns) as during:
                    await churn(api, round_)
                    await during.more()
                    if compacted:
                        api.compacted = api.version
                    async with api.serve():
                        if dies:
                            node.kill()
                            node.start()
                        # Like an API server every minute. Otherwise a stream without events would not count as a
                        # success, and waits after failures would keep growing.
                        for plural in KINDS:
                            await api.bookmark(plural)
                        await until(lambda: node.is_as(wanted(api).compiled))
                assert (during.opened, watch.opened) == (0, 0)
                with contextlib.closing(BlockingTable(TABLE, netns)) as table:
                    found = table.read()
                assert found is not None
                made = Interpreter(found)
                assert passes(made, f"10.0.8.{round_ + 1}")
                assert not passes(made, f"10.0.8.{round_}")
                assert not passes(made, f"10.0.8.{round_ - 1}")
            while node.running:
                node.kill()
            with contextlib.closing(BlockingTable(TABLE, netns)) as table:
                table.apply(None)
            assert without_generation(everything(netns)) == before
        finally:
            while node is not None and node.running:
                node.kill()

    asyncio.run(main())
