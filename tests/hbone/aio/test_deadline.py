"""Time limits of parts of coroutines: as asyncio.timeout, in fibers and in tasks."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable

import pytest

from hbone.aio.deadline import Deadline
from hbone.aio.fiber import Fiber, OneShotFuture, current
from hbone.aio.poller import Poller
from tests.hbone import virtual_time

LIMIT_S = 8.0


async def in_fiber(poller: Poller, work: Callable[[], Awaitable[None]]) -> None:
    async def run() -> None:
        await work()

    await Fiber(poller, run(), "deadline")


async def in_task(poller: Poller, work: Callable[[], Awaitable[None]]) -> None:
    await work()


@pytest.fixture(params=[in_fiber, in_task], ids=["fiber", "task"])
def play(request: pytest.FixtureRequest) -> Callable[[Callable[[Poller], Awaitable[None]]], None]:
    def run(work: Callable[[Poller], Awaitable[None]]) -> None:
        async def main() -> None:
            poller = Poller()
            try:
                await request.param(poller, lambda: work(poller))
            finally:
                poller.close()

        virtual_time.run(main)

    return run


Play = Callable[[Callable[[Poller], Awaitable[None]]], None]


@pytest.mark.parametrize("before_s", [LIMIT_S / 4, LIMIT_S, 2 * LIMIT_S])
def test_a_deadline_that_began_earlier_passes_earlier(play: Play, before_s: float) -> None:
    async def body(poller: Poller) -> None:
        entered_s = poller.loop.time()
        deadline = Deadline(poller, LIMIT_S, entered_s - before_s)
        with pytest.raises(TimeoutError), deadline:
            await OneShotFuture[None](poller)
        assert deadline.passed
        left_s = max(0.0, LIMIT_S - before_s)
        assert left_s <= poller.loop.time() - entered_s <= left_s + LIMIT_S * 0.1
        in_time = Deadline(poller, LIMIT_S, poller.loop.time() - LIMIT_S / 2)
        with in_time:
            await asyncio.sleep(LIMIT_S / 4)
        assert not in_time.passed
        await asyncio.sleep(2 * LIMIT_S)  # no timer is left that would cancel the following code

    play(body)


def test_a_block_that_is_late_ends_with_a_timeout_error(play: Play) -> None:
    async def body(poller: Poller) -> None:
        began_s = poller.loop.time()
        deadline = Deadline(poller, LIMIT_S)
        with pytest.raises(TimeoutError), deadline:
            await OneShotFuture[None](poller)
        assert deadline.passed
        assert LIMIT_S <= poller.loop.time() - began_s <= LIMIT_S * 1.1
        assert not len(poller.interval_timer(LIMIT_S))
        await asyncio.sleep(2 * LIMIT_S)  # no timer is left that would cancel the following code

    play(body)


def test_a_block_in_time_is_not_interrupted(play: Play) -> None:
    async def body(poller: Poller) -> None:
        with Deadline(poller, LIMIT_S) as deadline:
            await asyncio.sleep(LIMIT_S / 2)
        assert not deadline.passed
        with contextlib.suppress(KeyError), Deadline(poller, LIMIT_S):
            raise KeyError
        assert not len(poller.interval_timer(LIMIT_S))
        await asyncio.sleep(2 * LIMIT_S)

    play(body)


def test_an_error_after_the_time_stays_that_error(play: Play) -> None:
    async def body(poller: Poller) -> None:
        async def fails() -> None:
            try:
                await OneShotFuture[None](poller)
            except asyncio.CancelledError:
                raise KeyError from None

        with pytest.raises(KeyError), Deadline(poller, LIMIT_S):
            await fails()
        await asyncio.sleep(0)  # the cancellation has been taken back

    play(body)


def test_the_inner_of_two_may_be_the_sooner(play: Play) -> None:
    async def body(poller: Poller) -> None:
        with Deadline(poller, LIMIT_S) as outer:
            with pytest.raises(TimeoutError), Deadline(poller, LIMIT_S / 4):
                await OneShotFuture[None](poller)
            await asyncio.sleep(LIMIT_S / 4)
        assert not outer.passed

    play(body)


def test_the_outer_of_two_may_be_the_sooner(play: Play) -> None:
    async def body(poller: Poller) -> None:
        inner = Deadline(poller, LIMIT_S)
        with pytest.raises(TimeoutError), Deadline(poller, LIMIT_S / 4), inner:
            await OneShotFuture[None](poller)
        assert not inner.passed

    play(body)


def test_another_cancellation_is_not_turned_into_a_timeout() -> None:
    async def main() -> None:
        poller = Poller()
        seen: list[BaseException] = []

        async def work(*, wait_s: float) -> None:
            try:
                with Deadline(poller, LIMIT_S):
                    try:
                        await OneShotFuture[None](poller)
                    finally:
                        # The second case: the time is over, too, before the block is left.
                        with contextlib.suppress(asyncio.CancelledError):
                            await asyncio.sleep(wait_s)
            except BaseException as error:
                seen.append(error)
                raise

        for wait_s in (0.0, 2 * LIMIT_S):
            fiber = Fiber(poller, work(wait_s=wait_s), "cancelled")
            await asyncio.sleep(1.0)
            fiber.cancel("policy")
            await asyncio.wait([fiber])
            assert fiber.cancelled()
        assert [type(error) for error in seen] == [asyncio.CancelledError, asyncio.CancelledError]
        poller.close()

    virtual_time.run(main)


def test_current_raises_outside_of_fibers_and_tasks() -> None:
    async def main() -> None:
        poller = Poller()
        assert current(poller) is asyncio.current_task()
        seen: list[object] = []

        async def work() -> None:
            seen.append(current(poller))

        fiber = Fiber(poller, work(), "current")
        await fiber
        assert seen == [fiber]

        def callback() -> None:
            with pytest.raises(RuntimeError):
                current(poller)
            seen.clear()

        poller.loop.call_soon(callback)
        await asyncio.sleep(0.1)
        assert seen == []
        poller.close()

    virtual_time.run(main)
