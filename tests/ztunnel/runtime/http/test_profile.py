"""Profiles of the loop's thread and of the heap."""

import asyncio
import time
import tracemalloc
from typing import Any, cast

import pytest

from ztunnel.runtime.http.page import Query
from ztunnel.runtime.http.profile import page


def busy(until_s: float) -> None:
    while time.monotonic() < until_s:
        pass


def test_a_profile_shows_what_keeps_the_loop_busy() -> None:
    async def main() -> None:
        asked = asyncio.ensure_future(page(Query.parse("seconds=0.3")))  # noqa: TID251
        await asyncio.sleep(0.05)
        second = await page(Query.parse(""))
        assert second.status == 409
        while not asked.done():
            busy(time.monotonic() + 0.05)
            await asyncio.sleep(0)
        found = await asked
        lines = [line for piece in cast(Any, found.body) for line in piece.splitlines()]
        (mine,) = [line for line in lines if ":busy " in line]
        assert int(mine.rpartition(" ")[2]) >= 1
        assert mine.startswith("__main__:") or ";tests.ztunnel.runtime.http.test_profile:" in mine

    asyncio.run(main())


def test_a_profile_of_the_heap_shows_where_memory_was_allocated_and_kept() -> None:
    async def main() -> None:
        asked = asyncio.ensure_future(page(Query.parse("seconds=0.3&of=heap")))  # noqa: TID251
        while not tracemalloc.is_tracing():
            await asyncio.sleep(0.01)
        kept, dropped = bytearray(1_000_000), [bytearray(2_000_000)]
        dropped.clear()
        found = await asked
        assert not tracemalloc.is_tracing()
        lines = [line for piece in cast(Any, found.body) for line in piece.splitlines()]
        stack, _, size = next(line for line in lines if "test_profile.py:" in line).rpartition(" ")
        assert int(size) - len(kept) in range(1000)
        assert "test_profile.py:" in stack.rpartition(";")[2]

    asyncio.run(main())


def test_an_unknown_kind_is_refused() -> None:
    assert asyncio.run(page(Query.parse("of=gpu"))).status == 400


@pytest.mark.parametrize("seconds", ["0", "61", "x", "-1", "nan"])
def test_wrong_lengths_are_refused(seconds: str) -> None:
    assert asyncio.run(page(Query.parse(f"seconds={seconds}"))).status == 400
