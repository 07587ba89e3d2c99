"""Fibers: coroutines that resume in the poller's turn, and otherwise behave like tasks."""

from __future__ import annotations

import asyncio
import gc
import logging
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import uvloop
from hypothesis import given, settings
from hypothesis import strategies as st

from hbone.aio.fiber import Fiber, OneShotFuture
from hbone.aio.poller import Poller
from hbone.aio.started_task import StartedTask
from tests.generated import examples

Main = Callable[[Poller], Coroutine[Any, Any, None]]


@contextmanager
def poller() -> Iterator[Poller]:
    made = Poller()
    try:
        yield made
    finally:
        made.close()


@pytest.fixture(params=[asyncio.run, uvloop.run], ids=["asyncio", "uvloop"])
def run(request: pytest.FixtureRequest) -> Callable[[Main], None]:
    def with_poller(main: Main) -> None:
        async def whole() -> None:
            with poller() as made:
                await main(made)

        request.param(whole())

    return with_poller


Run = Callable[[Main], None]


async def turn(poller: Poller) -> None:
    """Return after a turn of the poller in which all fibers and tasks that can resume now have resumed."""

    async def nothing() -> None:
        return

    await Fiber(poller, nothing(), "a turn")
    await asyncio.sleep(0)


class Turns:
    """Notes, as something to be flushed, when turns of a poller end."""

    def __init__(self, poller: Poller, notes: list[str]) -> None:
        self.dirty = False
        self._notes = notes
        poller.schedule_flush(self)

    def flush(self) -> None:
        self.dirty = False
        self._notes.append("flushed")


def test_fiber_resumes_in_the_loop_iteration_of_its_result_before_the_flush(run: Run) -> None:
    async def main(poller: Poller) -> None:
        notes: list[str] = []
        moment: OneShotFuture[int] = OneShotFuture(poller)

        async def work() -> None:
            notes.append("begun")
            notes.append(f"got {await moment}")

        class Settles:
            """Stands for the event that brings an answer."""

            def step(self) -> None:
                Turns(poller, notes)
                moment.set_result(7)
                notes.append("settled")

        fiber = Fiber(poller, work(), "a fiber")
        assert notes == []  # not in the caller's hands, whose buffers may be in use
        await turn(poller)
        assert notes == ["begun"]
        poller.call_soon(Settles())
        await fiber
        assert notes == ["begun", "settled", "got 7", "flushed"]

    run(main)


def test_future_wakes_every_waiter_whether_fiber_or_task(run: Run) -> None:
    async def main(poller: Poller) -> None:
        moment: OneShotFuture[str] = OneShotFuture(poller)
        heard: list[str] = []

        async def listen() -> None:
            heard.append(await moment)

        waiting = [Fiber(poller, listen(), "first"), Fiber(poller, listen(), "second")]
        async with asyncio.TaskGroup() as group:
            group.create_task(listen())
            await turn(poller)
            moment.set_result("news")
        await asyncio.gather(*waiting)
        await Fiber(poller, listen(), "late")
        assert heard == ["news"] * 4

    run(main)


def test_errors_reach_the_fiber_and_those_who_wait_for_it(run: Run) -> None:
    async def main(poller: Poller) -> None:
        moment: OneShotFuture[None] = OneShotFuture(poller)
        fiber = Fiber(poller, wait_for(moment), "a fiber")
        await turn(poller)
        moment.set_exception(LookupError("gone"))
        with pytest.raises(LookupError, match="gone"):
            await fiber

    run(main)


async def wait_for(what: Awaitable[Any]) -> None:
    await what


def test_timeouts_sleep_and_the_current_task_work_inside(run: Run) -> None:
    async def main(poller: Poller) -> None:
        never: OneShotFuture[None] = OneShotFuture(poller)
        seen: list[object] = []

        async def work() -> None:
            seen.append(asyncio.current_task())
            await asyncio.sleep(0)
            try:
                async with asyncio.timeout(0.01):
                    await never
            except TimeoutError:
                seen.append("timed out")
            async with asyncio.TaskGroup() as group:
                group.create_task(asyncio.sleep(0))
            seen.append(await asyncio.to_thread(lambda: "from a thread"))

        fiber = Fiber(poller, work(), "a fiber")
        assert fiber in asyncio.all_tasks()
        await fiber
        assert seen == [fiber, "timed out", "from a thread"]
        assert fiber not in asyncio.all_tasks()
        assert asyncio.current_task() is not fiber
        assert (fiber.get_name(), fiber.cancelling()) == ("a fiber", 0)
        assert "a fiber" in repr(fiber)

    run(main)


@pytest.mark.parametrize("when", ["before it began", "while it waits", "when what it waits for is there"])
def test_a_cancelled_fiber_cleans_up_before_during_and_after_its_wait(run: Run, when: str) -> None:
    async def main(poller: Poller) -> None:
        moment: OneShotFuture[None] = OneShotFuture(poller)
        ended: list[Fiber] = []
        tidied: list[str] = []

        async def work() -> None:
            try:
                await moment
            finally:
                tidied.append("tidied")

        fiber = Fiber(poller, work(), "a fiber", ended.append)
        if when != "before it began":
            await turn(poller)
        if when == "when what it waits for is there":
            moment.set_result(None)
        assert fiber.cancel("enough")
        with pytest.raises(asyncio.CancelledError, match="enough"):
            await fiber
        assert fiber.cancelled()
        assert not fiber.cancel()
        assert ended == [fiber]
        assert tidied == ["tidied"]

    run(main)


Start = Callable[[Poller, Coroutine[Any, Any, None]], asyncio.Future[None]]
STARTS: dict[str, Start] = {
    "fiber": lambda poller, work: Fiber(poller, work, "work"),
    "task": lambda poller, work: StartedTask(work, loop=poller.loop, name="work"),
}


@pytest.mark.parametrize("start", STARTS.values(), ids=STARTS)
@pytest.mark.parametrize("first", ["future", "sleep(0)", "nothing", "fails", "refuses"])
def test_cancelled_before_its_first_step_it_still_reaches_its_first_await(
    run: Run, start: Start, first: str
) -> None:
    """What a coroutine was given (a socket, a place in a table) is its own to clean up from the start."""

    async def main(poller: Poller) -> None:
        never: asyncio.Future[None] = poller.loop.create_future()
        noted: list[str] = []

        async def work() -> None:
            noted.append("begun")
            try:
                match first:
                    case "future":
                        await never
                    case "sleep(0)":
                        await asyncio.sleep(0)
                        noted.append("slept")
                    case "refuses":
                        try:
                            await never
                        except asyncio.CancelledError as error:
                            noted.append(str(error))
                        await asyncio.sleep(0)
                    case "fails":
                        raise LookupError("failed")
            finally:
                noted.append("tidied")

        running = start(poller, work())
        assert noted == []
        assert running.cancel("enough")
        await asyncio.wait([running])
        middle = {"refuses": ["enough"]}.get(first, [])
        assert noted == ["begun", *middle, "tidied"]
        assert running.cancelled() == (first not in ("fails", "refuses"))
        if first == "fails":
            with pytest.raises(LookupError):
                await running
        elif running.cancelled():
            with pytest.raises(asyncio.CancelledError):
                await running
        assert not running.cancel()

    run(main)


@pytest.mark.parametrize("start", STARTS.values(), ids=STARTS)
def test_cancelled_twice_before_its_first_step(run: Run, start: Start) -> None:
    async def main(poller: Poller) -> None:
        counts: list[int] = []

        async def work() -> None:
            task = asyncio.current_task()
            assert task is not None
            try:
                await asyncio.sleep(0)
            finally:
                counts.append(task.cancelling())

        running = start(poller, work())
        running.cancel()
        running.cancel()
        await asyncio.wait([running])
        assert counts == [2]
        assert running.cancelled()

    run(main)


@pytest.mark.parametrize("start", STARTS.values(), ids=STARTS)
def test_a_fiber_without_a_first_step_cleans_up_when_the_loop_ends(start: Start) -> None:
    """``asyncio.run`` cancels remaining fibers, even those that have not begun. Such a fiber runs to its first
    await and ends.
    """
    noted: list[str] = []

    async def work() -> None:
        try:
            await asyncio.sleep(3600)
        finally:
            noted.append("tidied")

    async def main() -> None:
        with poller() as made:
            running.append(start(made, work()))

    running: list[asyncio.Future[None]] = []
    for runner in (asyncio.run, uvloop.run):
        runner(main())
    assert noted == ["tidied", "tidied"]


def test_a_fiber_may_cancel_itself_and_may_refuse(run: Run) -> None:
    async def main(poller: Poller) -> None:
        moment: OneShotFuture[None] = OneShotFuture(poller)

        async def work() -> None:
            task = asyncio.current_task()
            assert task is not None
            task.cancel()
            try:
                await moment
            except asyncio.CancelledError:
                assert task.uncancel() == 0
            await asyncio.sleep(0)

        await Fiber(poller, work(), "a fiber")

    run(main)


def test_a_fiber_that_cancels_itself_in_its_last_step_is_cancelled(run: Run) -> None:
    async def main(poller: Poller) -> None:
        async def work() -> None:
            task = asyncio.current_task()
            assert task is not None
            task.cancel("too late to be thrown")

        fiber = Fiber(poller, work(), "a fiber")
        with pytest.raises(asyncio.CancelledError):
            await fiber

    run(main)


def test_an_error_that_nobody_fetches_is_logged_at_once(run: Run, caplog: pytest.LogCaptureFixture) -> None:
    async def main(poller: Poller) -> None:
        async def work() -> None:
            raise LookupError("nobody asked")

        gc.disable()  # nothing of a fiber waits for the collector
        try:
            Fiber(poller, work(), "a fiber")
            await turn(poller)
            assert "nobody asked" in caplog.text
        finally:
            gc.enable()

    with caplog.at_level(logging.ERROR, logger="asyncio"):
        run(main)


def test_fibers_outlive_their_poller(run: Run) -> None:
    """A program that ends cancels running fibers, whatever the order in which its objects close."""

    async def main(poller: Poller) -> None:
        never: OneShotFuture[None] = OneShotFuture(poller)
        waiting = Fiber(poller, wait_for(never), "waiting")
        await turn(poller)
        beginning = Fiber(poller, wait_for(asyncio.sleep(0)), "beginning")
        poller.close()
        await asyncio.wait_for(beginning, 1)
        waiting.cancel()
        await asyncio.wait([waiting], timeout=1)
        assert waiting.cancelled()

    run(main)


def test_closing_the_poller_in_a_step_loses_none(run: Run) -> None:
    async def main(poller: Poller) -> None:
        async def close() -> None:
            poller.close()

        first = Fiber(poller, close(), "closes")
        second = Fiber(poller, wait_for(asyncio.sleep(0)), "the next")
        await asyncio.wait_for(asyncio.gather(first, second), 1)

    run(main)


# Whatever a program does, it does the same as a fiber and as a task.

STEPS = ["sleep", "settled", "future", "timeout", "fail", "cancelled waiting", "cancelled before it waits"]
STEPS += ["settled, then cancelled", "cancelled, then settled"]


async def run_step(step: str, awaited: asyncio.Future[None]) -> None:
    loop, task = asyncio.get_running_loop(), asyncio.current_task()
    assert task is not None

    def settle() -> None:
        if not awaited.done():
            awaited.set_result(None)

    match step:
        case "sleep":
            await asyncio.sleep(0)
        case "settled":
            loop.call_soon(settle)
            await awaited
        case "future":
            plain: asyncio.Future[None] = loop.create_future()
            loop.call_soon(plain.set_result, None)
            await plain
        case "timeout":
            async with asyncio.timeout(0):
                await awaited
        case "fail":
            raise LookupError("failed")
        case "cancelled waiting":
            loop.call_soon(task.cancel, step)
            await awaited
        case "cancelled before it waits":
            task.cancel(step)
            await awaited
        case "settled, then cancelled":
            loop.call_soon(lambda: (settle(), task.cancel(step)))
            await awaited
        case "cancelled, then settled":
            loop.call_soon(lambda: (task.cancel(step), settle()))
            await awaited


@settings(max_examples=examples(100), deadline=None)
@given(steps=st.lists(st.tuples(st.sampled_from(STEPS), st.booleans()), max_size=6))
def test_a_fiber_ends_like_a_task_in_any_sequence_of_steps(steps: list[tuple[str, bool]]) -> None:
    def outcome(*, as_fiber: bool) -> list[str]:
        noted: list[str] = []

        async def program(future: Callable[[], asyncio.Future[None]]) -> None:
            for step, swallows in steps:
                try:
                    await run_step(step, future())
                except (asyncio.CancelledError, TimeoutError, LookupError) as error:
                    noted.append(f"{step}: {error!r}")
                    if not swallows:
                        raise
                else:
                    noted.append(step)

        async def main() -> None:
            loop = asyncio.get_running_loop()
            with poller() as made:
                running: asyncio.Future[None]
                if as_fiber:
                    running = Fiber(made, program(lambda: OneShotFuture(made)), "as a fiber")
                else:
                    running = loop.create_task(program(loop.create_future))
                await asyncio.wait([running])
            try:
                running.result()
            except BaseException as error:  # noqa: BLE001
                noted.append(f"ended: {error!r}")

        asyncio.run(main())
        return noted

    assert outcome(as_fiber=True) == outcome(as_fiber=False)
