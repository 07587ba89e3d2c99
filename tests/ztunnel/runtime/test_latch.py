import asyncio

import pytest

from ztunnel.runtime.latch import Latch


def test_a_latch_wakes_all_waiters_and_lets_later_ones_pass() -> None:
    async def main() -> None:
        latch, calls = Latch(), []
        waiting = [asyncio.get_running_loop().create_task(latch.wait()) for _ in range(3)]
        await asyncio.sleep(0)
        latch.then(lambda: calls.append("then"))
        assert not latch.is_set()
        latch.set()
        latch.set()
        await asyncio.gather(*waiting)
        await latch.wait()
        latch.then(lambda: calls.append("late"))
        assert calls == ["then", "late"]

    asyncio.run(main())


def test_a_cancelled_waiter_is_removed() -> None:
    async def main() -> None:
        latch = Latch()
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0):
                await latch.wait()
        assert latch._then == ()
        latch.set()
        assert latch.is_set()

    asyncio.run(main())
