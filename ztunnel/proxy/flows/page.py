"""``/flows``: the flight recorder as JSON lines, each a GetFlowsResponse of Hubble's API, the oldest first."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator
from itertools import islice
from operator import itemgetter
from typing import Any, Final, NamedTuple, TypeVar

from ztunnel.proxy.flows.ring import Entry, FlowRing, RingCounts
from ztunnel.runtime.http.page import PLAIN, Page, Query, text

JSON_LINES: Final = "application/jsonlines"
#: The number of lines made per loop iteration. One line takes 0.1 ms.
_SLICE: Final = 8
_MOST: Final = 1 << 62
LineT = TypeVar("LineT")

#: Converts an entry of the ring to a GetFlowsResponse in JSON's types.
Shape = Callable[[Entry], dict[str, Any]]


class OtherFlows(NamedTuple):
    """The flows that other processes have recorded.

    Attributes:
        lines: entries as (time in nanoseconds, JSON line).
        ring: the sum of their rings' counts.
    """

    lines: list[tuple[int, str]]
    ring: RingCounts = RingCounts()


#: Returns the flows of other processes. ``after`` and ``last`` select them.
More = Callable[[int, int], Awaitable[OtherFlows]]


def lines(ring: FlowRing, shape: Shape, after_ns: int = 0, last: int | None = None) -> Iterator[tuple[int, str]]:
    """Yield the entries as (time in nanoseconds, JSON line), oldest first."""
    for entry in ring.entries(after_ns, last):
        yield entry.ended_ns, json.dumps(shape(entry), separators=(",", ":"))


async def flows_page(query: Query, ring: FlowRing, shape: Shape, more: More | None = None) -> Page:
    """Return the requested entries: the ``last`` N, or those ``after`` a time in nanoseconds."""
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
        others = await more(after_ns, last)
        found = before([*found, *others.lines], began_ns)[-last:]
        lost += others.ring.lost
    body = "".join(f"{line}\n" for _, line in found)
    if lost:
        body = f'{{"lost_events":{{"source":"HUBBLE_RING_BUFFER","num_events_lost":"{lost}"}}}}\n{body}'
    return Page(content_type=JSON_LINES, body=(body,))


def before(found: Iterable[tuple[int, LineT]], began_ns: int) -> list[tuple[int, LineT]]:
    """Return the entries of several processes in order, without entries that ended during the request.

    Processes answer at slightly different times. A follower requests the entries that ended after its newest one.
    If entries of the last moment were returned, it would miss slightly older ones that another process wrote after
    its answer. An entry with a time in the future is from before the clock was set back, and is returned.

    Args:
        found: times in nanoseconds and entries.
        began_ns: when the request began.
    """
    now_ns = time.time_ns()
    return sorted((each for each in found if not began_ns < each[0] <= now_ns), key=itemgetter(0))


async def _slices(lines: Iterator[tuple[int, str]]) -> AsyncIterator[tuple[int, str]]:
    while part := list(islice(lines, _SLICE)):
        for line in part:
            yield line
        await asyncio.sleep(0)
