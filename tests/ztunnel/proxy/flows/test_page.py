"""``/flows`` of a proxy with several processes."""

import asyncio
import json
import time
from typing import Any

from ztunnel.proxy.flows.page import OtherFlows, flows_page, lines
from ztunnel.proxy.flows.ring import Entry, FlowRing
from ztunnel.runtime.http.page import Query


def end_connection(ring: FlowRing, in_s: float = 0.0) -> None:
    ends = (("10.0.0.1", 4000), ("10.0.0.2", 80))
    ring.add(time.time() + in_s, 0.1, 0.1, (0, 0), ends, b"", 0, ("",) * 8)


def shape(entry: Entry) -> dict[str, Any]:
    return {"ended": entry.ended_ns}


def test_follower_gets_entries_written_between_the_answers_of_two_processes() -> None:
    first, second = FlowRing(), FlowRing()

    async def of_workers(after_ns: int, last: int) -> OtherFlows:
        found = list(lines(first, shape, after_ns, last))
        if not first.total:
            end_connection(first)
            end_connection(second)
        return OtherFlows([*found, *lines(second, shape, after_ns, last)])

    async def follow() -> list[int]:
        got = [0]
        for _ in range(2):
            page = await flows_page(Query((("after", str(max(got))),)), FlowRing(), shape, of_workers)
            got += (json.loads(line)["ended"] for line in "".join(map(str, page.body)).splitlines())
        return got[1:]

    got = asyncio.run(follow())
    assert got == sorted(each.ended_ns for ring in (first, second) for each in ring.entries())


def test_lost_entries_of_a_worker_are_reported() -> None:
    worker = FlowRing(2)
    for _ in range(3):
        end_connection(worker)

    async def of_worker(after_ns: int, last: int) -> OtherFlows:
        return OtherFlows(list(lines(worker, shape, after_ns, last)), worker.counts(after_ns))

    page = asyncio.run(flows_page(Query((("after", "1"),)), FlowRing(), shape, of_worker))
    first, *others = "".join(map(str, page.body)).splitlines()
    assert json.loads(first)["lost_events"]["num_events_lost"] == "1"
    assert len(others) == 2


def test_entries_of_the_time_before_the_clock_was_set_back_are_shown() -> None:
    worker = FlowRing()
    end_connection(worker, in_s=3600.0)
    end_connection(worker)

    async def of_worker(after_ns: int, last: int) -> OtherFlows:
        return OtherFlows(list(lines(worker, shape, after_ns, last)))

    page = asyncio.run(flows_page(Query(), FlowRing(), shape, of_worker))
    assert len("".join(map(str, page.body)).splitlines()) == 2
