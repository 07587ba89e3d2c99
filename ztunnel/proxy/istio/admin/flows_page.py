"""``/flows``: the flight recorder as JSON lines, each a GetFlowsResponse of Hubble's API, the oldest first."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from itertools import islice
from typing import Final

from ztunnel.proxy.istio.accounting import flows
from ztunnel.proxy.istio.admin.inspected import InspectedProxy
from ztunnel.runtime.http.page import PLAIN, Page, PageRequest, text

JSON_LINES: Final = "application/jsonlines"
#: Lines between two turns of the loop; one takes 0.1 ms.
_SLICE: Final = 8
_MOST: Final = 1 << 62


async def flows_page(proxy: InspectedProxy, request: PageRequest) -> Page:
    """Return the entries that a request wants: ``last`` of them, ``after`` a time in nanoseconds."""
    numbers = []
    for name, default in (("after", 0), ("last", _MOST)):
        value = request.query.get(name)
        if value is not None and not (value.isascii() and value.isdigit() and len(value) <= 19):
            return text(f"{name}: must be a whole number, not negative: {value!r}\n", 400, PLAIN)
        numbers.append(default if value is None else min(int(value), _MOST))
    after_ns, last = numbers
    ring, name = proxy.metrics.flows, flows.flow_node(proxy.config)
    found = [each async for each in _slices(flows.lines(ring, name, after_ns, last))]
    lost = ring.lost(after_ns)
    if proxy.workers is not None:
        found = sorted([*found, *await proxy.workers.flows(after_ns, last)])[-last:]
    body = "".join(f"{line}\n" for _, line in found)
    if lost:
        body = f'{{"lost_events":{{"source":"HUBBLE_RING_BUFFER","num_events_lost":"{lost}"}}}}\n{body}'
    return Page(content_type=JSON_LINES, body=(body,))


async def _slices(lines: Iterator[tuple[int, str]]) -> AsyncIterator[tuple[int, str]]:
    while part := list(islice(lines, _SLICE)):
        for line in part:
            yield line
        await asyncio.sleep(0)
