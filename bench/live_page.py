"""What one event of the live page costs a proxy of a large Istio mesh: CPU, bytes, and the longest iteration of
the loop.

Without an open page there is no such cost. ``python -m bench.live_page``
"""

import argparse
import asyncio
import json
import statistics
import time

from hbone.aio.relay import ByteCounts
from ztunnel.proxy.istio.accounting.metrics import PeerLabels, traffic_labels
from ztunnel.proxy.istio.admin import live_page
from ztunnel.proxy.istio.app import IstioProxy
from ztunnel.proxy.istio.environment import config_from
from ztunnel.proxy.ui.pages import INTERVAL_S
from ztunnel.proxy.ui.view import Rates, event
from ztunnel.runtime import heap

_ENV = {"XDS_ADDRESS": "", "FAKE_CA": "true", "INPOD_UDS": "/nowhere/ztunnel.sock"}
_EVENTS = 20


def _peer(number: int) -> PeerLabels:
    return PeerLabels(
        workload=f"workload-{number}",
        canonical_service=f"service-{number}",
        namespace=f"team-{number % 50}",
        principal=f"spiffe://cluster.local/ns/team-{number % 50}/sa/account-{number}",
        known=True,
    )


async def _longest_turn(done: asyncio.Event) -> float:
    """Return the loop's longest iteration, in milliseconds of its thread's CPU time, which excludes other
    programs.
    """
    longest = 0.0
    while not done.is_set():
        began = time.thread_time()
        await asyncio.sleep(0)
        longest = max(longest, time.thread_time() - began)
    return longest * 1000


async def _measure(series: int) -> str:
    config = config_from(_ENV, cpus=1, read_file=lambda path: None)
    proxy = IstioProxy(config)
    for number in range(series):
        labels = traffic_labels("source", _peer(number % 200), _peer(number), None, secured=True)
        proxy.metrics.opened(labels, [], ByteCounts(), 0.0)
    rates, spent, size = Rates(), [], 0
    done = asyncio.Event()
    async with asyncio.TaskGroup() as tasks:
        watch = tasks.create_task(_longest_turn(done))
        for _ in range(_EVENTS):
            began = time.process_time()
            found = await live_page.seen(proxy)
            made = await asyncio.to_thread(event, found, rates, time.monotonic(), time.time())
            size = len(json.dumps(made))
            spent.append((time.process_time() - began) * 1000)
        done.set()
        longest = await watch
    proxy.poller.close()
    proxy.writer.close()
    median = statistics.median(spent)
    share = min(2.0, median / 10 / INTERVAL_S)  # the interval grows with the cost of an event
    return (
        f"{series:>7} pairs  {median:7.1f} ms per event ({share:.2f} % of a CPU)  {size / 1000:6.1f} kB  "
        f"longest turn {longest:.1f} ms"
    )


def main() -> None:
    """Print a line for each size of mesh."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pairs", type=int, nargs="+", default=[10, 1_000, 20_000])
    heap.expect_growth()  # as the proxy's start does
    for series in parser.parse_args().pairs:
        print(asyncio.run(_measure(series)))


if __name__ == "__main__":
    main()
