"""What one addon with every hook costs a connection: ``python -m bench.addons``.

Runs the calls to addons during an outbound connection's life in an Istio mesh, without sockets: facts,
``connecting``, ``opened`` and ``closed``, with timing and counts. ``without`` is the same life in a process
without addons. The difference is the cost of one connection. Both are measured alternately in short rounds, and
the minimum of each is printed, because other work on the machine only adds time.
"""

import argparse
import asyncio
import time
from types import SimpleNamespace
from typing import Any, cast

from bench.every_hook import Every
from xds.model.address import SocketAddress
from xds.model.workload import Locality, Protocol, Workload, WorkloadUid
from ztunnel.proxy.addons.host import AddonHost
from ztunnel.proxy.addons.load import load_class
from ztunnel.proxy.dataplane.life_table import ALLOWED
from ztunnel.proxy.dataplane.live_table import Lives, LiveTable
from ztunnel.proxy.istio.accounting.access_record import Direction
from ztunnel.proxy.istio.accounting.access_record import Record as Account
from ztunnel.proxy.istio.accounting.workload_labels import labels_of
from ztunnel.proxy.istio.path.addons import PodAddons
from ztunnel.proxy.istio.path.pod_connection import PodConnection


def _workload(name: str, host: str) -> Workload:
    return Workload(
        uid=WorkloadUid(f"Kubernetes//Pod/default/{name}"),
        namespace="default",
        name=name,
        addresses=(host,),
        protocol=Protocol.HBONE,
        canonical_name=name,
        canonical_revision="v1",
        node="n1",
        locality=Locality("r", "z"),
    )


async def _least(rounds: int, number: int) -> tuple[float, float]:
    """Return the minimum over all rounds, in microseconds: a life without addons, and one with an addon."""
    with_one = PodAddons(AddonHost([load_class(Every, {})]))
    without, cost = float("inf"), float("inf")
    for _ in range(rounds):
        without = min(without, await _life_us(number, None))
        cost = min(cost, await _life_us(number, with_one))
    return without, cost


async def _life_us(number: int, addons: PodAddons | None) -> float:
    """Return the microseconds of one of ``number`` lives."""
    client, server = (labels_of(_workload(name, host)) for name, host in (("a", "10.0.0.1"), ("b", "10.0.0.2")))
    node = cast(Any, SimpleNamespace(clock=SimpleNamespace(monotonic=time.monotonic), addons=addons))
    group: Lives[PodConnection] = Lives(LiveTable())
    source, target = SocketAddress("10.0.0.1", 40000), SocketAddress("10.0.0.2", 15008)
    dialled = SocketAddress("10.96.0.1", 80)
    began = time.perf_counter()
    for _ in range(number):
        record = Account(node, Direction.OUTBOUND, source, target)
        record.source_workload, record.source_labels = client.workload, client.secured
        record.destination_workload, record.destination_labels = server.workload, server.secured
        record.source_identity, record.destination_identity = client.identity, server.identity
        record.secured = True
        entry = PodConnection(group, record, _abort, _judge)
        entry.protocol = "HBONE"
        if node.addons is not None and record.asked is None:
            await node.addons.connecting(entry, cast(Any, None), dialled)
        entry.opened(_abort)
        if record.addons is not None:
            entry.tell_addons()
        if node.addons is not None:
            node.addons.ended(record, "", 0.1)
        entry.close()
    return (time.perf_counter() - began) / number * 1e6


def _abort(reason: str) -> None:
    """No-op: the measured lives have no connection to abort."""


def _judge(entry: PodConnection) -> Any:
    return ALLOWED


def main() -> None:
    """Measure, and print the cost per connection."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=1000)
    parser.add_argument("--number", type=int, default=100, help="lives per round")
    args = parser.parse_args()
    without, with_one = asyncio.run(_least(args.rounds, args.number))
    print(f"without                    {without:.2f} us")
    print(f"one addon with every hook  {with_one:.2f} us")
    print(f"its cost                   {with_one - without:.2f} us")


if __name__ == "__main__":
    main()
