"""Controllers of one node as processes, and a watcher that reads their table repeatedly."""

import asyncio
import contextlib
import os
import subprocess
from collections.abc import AsyncIterator, Callable
from ipaddress import ip_address
from pathlib import Path

from tests.commands import Ztunnel
from tests.limits import WAIT_S
from tproxy.aio.netlink import NETLINK_NETFILTER, NetlinkSocket
from tproxy.aio.netns import Netns
from tproxy.aio.table import BlockingTable
from tproxy.diff import table_steps
from tproxy.errors import KernelRefused
from tproxy.packets import Interpreter, Packet
from tproxy.render import nftables
from ztunnel.policy.calico.compile import Compiled
from ztunnel.policy.netpol.table_builder import TABLE, TableBuilder

ROOT = Path(__file__).parents[2]
VICTIM, FRIEND, STRANGER = "10.0.0.1", "10.0.0.2", "10.0.9.9"


class Watch:
    """Reads the node's table repeatedly, and records when it allowed traffic that must never pass."""

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
                with contextlib.suppress(KernelRefused):  # an object listed before has been deleted
                    before = generation(self._netns)
                    found = await asyncio.to_thread(table.read)
                    # Reading takes many requests. The table is consistent if the generation has not changed in
                    # between.
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

    def __init__(self, netns: Netns, config: Path, name: str = "n1") -> None:
        self.netns = netns
        self.name = name
        self._config = config
        self.running: list[subprocess.Popen[bytes]] = []

    def start(self) -> "subprocess.Popen[bytes]":
        command = ["netpol", "run", "--kubeconfig", str(self._config)]
        with open(os.devnull, "wb") as null:
            process = Ztunnel([*command, "--node", self.name, "--netns", self.netns.name], cwd=ROOT, stderr=null)
        self.running.append(process)
        return process

    def kill(self) -> None:
        """Kill the oldest process, which has the table."""
        process = self.running.pop(0)
        process.kill()
        process.wait(WAIT_S)

    def is_as(self, wanted: Compiled) -> bool:
        """Return whether the kernel's table equals the one wanted by the policies."""
        table = TableBuilder().build(wanted, self.name).table
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
