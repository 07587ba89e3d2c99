"""``/flows``: the flight recorder as JSON lines, each a GetFlowsResponse of Hubble's API, the oldest first."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from itertools import islice
from typing import Any, Final

from ztunnel.proxy.flows.ring import Entry, FlowRing
from ztunnel.runtime.http.page import PLAIN, Page, Query, text

JSON_LINES: Final = "application/jsonlines"
#: The number of lines made per loop iteration. One line takes 0.1 ms.
_SLICE: Final = 8
_MOST: Final = 1 << 62


#: Returns an entry as a GetFlowsResponse in JSON's types.
Shape = Callable[[Entry], dict[str, Any]]
#: Returns the flow lines of other processes, selected by ``after`` and ``last``.
More = Callable[[int, int], Awaitable[list[tuple[int, str]]]]


def lines(ring: FlowRing, shape: Shape, after_ns: int = 0, last: int | None = None) -> Iterator[tuple[int, str]]:
    """Yield the entries as (time in nanoseconds, JSON line), oldest first."""
    for entry in ring.entries(after_ns, last):
        yield entry.ended_ns, json.dumps(shape(entry), separators=(",", ":"))


async def flows_page(query: Query, ring: FlowRing, shape: Shape, more: More | None = None) -> Page:
    """Return the requested entries: the ``last`` N, or those ``after`` a time in nanoseconds.

    Processes answer at slightly different times. Entries that ended during the request are left to the next one.
    Otherwise a follower, which requests what ended after its newest entry, would miss slightly older entries that
    another process wrote after its answer.
    """
    began_ns = time.time_ns()
    numbers = []
    for name, default in (("after", 0), ("last", _MOST)):
        value = query.get(name)
        if value is not None and not (value.isascii() and value.isdigit() and len(value) <= 19):
            return text(f"{name}: must be a whole number, not negative: {value!r}\n", 400, PLAIN)
        numbers.append(default if value is None else min(int(value), _MOST))
    after_ns, last = numbers
    found = [each async for each in _slices(lines(ring, shape, after_ns, last))]
    lost = ring.lost(after_ns)
    if more is not None:
        found = [each for each in sorted([*found, *await more(after_ns, last)]) if each[0] <= began_ns][-last:]
    body = "".join(f"{line}\n" for _, line in found)
    if lost:
        body = f'{{"lost_events":{{"source":"HUBBLE_RING_BUFFER","num_events_lost":"{lost}"}}}}\n{body}'
    return Page(content_type=JSON_LINES, body=(body,))


async def _slices(lines: Iterator[tuple[int, str]]) -> AsyncIterator[tuple[int, str]]:
    while part := list(islice(lines, _SLICE)):
        for line in part:
            yield line
        await asyncio.sleep(0)
