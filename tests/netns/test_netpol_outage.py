"""An API server that goes away while pods come and go, and controllers that die: nothing opens that was closed."""

import asyncio
import contextlib
import os
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from ipaddress import ip_address
from pathlib import Path

import pytest

from tests.netns.dumps import everything, without_generation
from tests.netns.foreign import foreign_tables
from tests.ztunnel.kube.fake_api import FakeApi
from tproxy.aio.netlink import NETLINK_NETFILTER, NetlinkSocket
from tproxy.aio.netns import Netns
from tproxy.aio.table import BlockingTable
from tproxy.diff import table_steps
from tproxy.errors import KernelRefused
from tproxy.packets import Interpreter, Packet
from tproxy.render import nftables
from ztunnel.calico.incremental import Compiler
from ztunnel.kube.kinds import NAMESPACE, NETWORK_POLICY, POD
from ztunnel.kube.objects import Object, ObjectKey
from ztunnel.netpol.table import TABLE, TableBuilder
from ztunnel.policysync.objects import PolicyObjects

pytestmark = [pytest.mark.netns, pytest.mark.timeout(120)]
ROOT = Path(__file__).parents[2]
WAIT_S = 60.0
KINDS = {kind.plural: kind for kind in (NAMESPACE, POD, NETWORK_POLICY)}
VICTIM, FRIEND, STRANGER = "10.0.0.1", "10.0.0.2", "10.0.9.9"


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


class Watch:
    """Reads the node's table over and over, and remembers when it let through what must never pass."""

    def __init__(self, netns: Netns) -> None:
        self._netns = netns
        self.reads = 0
        self.opened = 0

    async def more(self) -> None:
        """Wait until it has read the table again some times, from begin to end."""
        wanted = self.reads + 3
        await until(lambda: self.reads >= wanted)

    async def run(self) -> None:
        with contextlib.closing(BlockingTable(TABLE, self._netns)) as table:
            while True:
                with contextlib.suppress(KernelRefused):  # what was listed a moment ago is gone
                    before = generation(self._netns)
                    found = await asyncio.to_thread(table.read)
                    # Reading takes many requests; one state of the table is what no change came between.
                    if generation(self._netns) == before:
                        self.reads += 1
                        self.opened += found is None or passes(Interpreter(found), STRANGER)
                await asyncio.sleep(0)


def generation(netns: Netns) -> bytes:
    """Return the number of the ruleset's state, which every message about it has in its header (nfgenmsg)."""
    with NetlinkSocket(NETLINK_NETFILTER, netns) as nft:
        return nft.dump(nftables.nft_message(nftables.NFT_GETTABLE, 0, nftables.DUMP))[0][2:4]


def passes(made: Interpreter, source: str) -> bool:
    ends = {"source": ip_address(source), "destination": ip_address(VICTIM)}
    return made.judge(Packet(**ends, protocol=6, destination_port=80)).accepted


class Node:
    """Controllers of one node, as processes."""

    def __init__(self, netns: Netns, config: Path) -> None:
        self.netns = netns
        self._config = config
        self.running: list[subprocess.Popen[bytes]] = []

    def start(self) -> "subprocess.Popen[bytes]":
        command = [sys.executable, "-m", "ztunnel", "netpol", "run", "--kubeconfig", str(self._config)]
        process = subprocess.Popen(
            [*command, "--node", "n1", "--netns", self.netns.name], cwd=ROOT, stderr=subprocess.DEVNULL
        )
        self.running.append(process)
        return process

    def kill(self) -> None:
        """Kill the oldest process, which has the table."""
        process = self.running.pop(0)
        process.kill()
        process.wait(WAIT_S)

    def is_as(self, api: FakeApi) -> bool:
        """Whether the kernel holds what the API server's objects want."""
        table = TableBuilder().build(wanted(api).compiled, "n1").table
        with contextlib.closing(BlockingTable(TABLE, self.netns)) as kept, contextlib.suppress(KernelRefused):
            found = kept.read()
            return found is not None and not table_steps(found, table)
        return False


async def until(check: Callable[[], bool]) -> None:
    async with asyncio.timeout(WAIT_S):
        while not check():
            await asyncio.sleep(0.02)


@contextlib.asynccontextmanager
async def watched(netns: Netns) -> AsyncIterator[Watch]:
    watch = Watch(netns)
    async with asyncio.TaskGroup() as group:
        running = group.create_task(watch.run(), name="watch")
        yield watch
        await watch.more()
        running.cancel()


async def churn(api: FakeApi, round_: int) -> None:
    """Pods come and go and change, and the policies of the victim are replaced, new ones first."""
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
                await until(lambda: node is not None and node.is_as(api))
                second = node.start()
                async with watched(netns) as watch:
                    for round_ in range(4):
                        await churn(api, round_)
                        await until(lambda: node.is_as(api))
                    assert first.poll() is None
                    assert second.poll() is None
            # Away: with its history, then without; the one that follows dies in the midst of what it does then.
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
                        # As an API server does every minute; without, a stream that nothing happens on does not
                        # count as a success, and waits after failures go on growing.
                        for plural in KINDS:
                            await api.bookmark(plural)
                        await until(lambda: node.is_as(api))
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
