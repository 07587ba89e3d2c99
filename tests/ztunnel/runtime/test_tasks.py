"""Background tasks: whatever is started runs its clean-up, whenever its owner closes."""

import asyncio
from collections.abc import Callable

import pytest
import uvloop

from hbone.aio.poller import Poller
from ztunnel.runtime.tasks import Tasks, fibers_running, restarts

RUNNERS = pytest.mark.parametrize("run", [asyncio.run, uvloop.run])


@RUNNERS
@pytest.mark.parametrize("kind", ["task", "fiber"])
@pytest.mark.parametrize("when", ["before", "between", "after"])
def test_what_is_started_begins_and_cleans_up(run: Callable[..., None], kind: str, when: str) -> None:
    """The owner closes before the start, between it and the first step, or later."""
    noted: list[str] = []

    async def work() -> None:
        noted.append("begun")
        try:
            await asyncio.get_running_loop().create_future()
        finally:
            noted.append("cleaned up")

    async def main() -> None:
        poller = Poller()
        tasks = Tasks("owner")
        if when == "before":
            tasks.cancel()
        if kind == "task":
            tasks.start(work(), "work")
        else:
            tasks.run(poller, work(), "work")
        while when == "after" and not noted:
            await asyncio.sleep(0)
        await tasks.close()
        assert noted == ["begun", "cleaned up"]
        assert len(tasks) == 0
        poller.close()

    run(main())


@RUNNERS
def test_a_task_that_fails_is_logged_and_the_others_go_on(
    run: Callable[..., None], caplog: pytest.LogCaptureFixture
) -> None:
    async def main() -> None:
        async def fail() -> None:
            raise LookupError("a bug")

        tasks = Tasks("owner")
        other = tasks.start(asyncio.Event().wait(), "waits")
        await asyncio.wait([tasks.start(fail(), "fails")])
        assert not other.done()
        assert len(tasks) == 1
        await tasks.close()

    run(main())
    assert "task owner: fails failed" in caplog.text
    assert "a bug" in caplog.text


@RUNNERS
def test_a_kept_task_that_fails_starts_again(run: Callable[..., None], caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        attempts = 0
        again = asyncio.Event()

        async def work() -> None:
            nonlocal attempts
            attempts += 1
            if attempts < 4:
                raise LookupError("a bug")
            again.set()
            await asyncio.Event().wait()

        before = restarts.value
        tasks = Tasks("owner")
        kept = tasks.keep(work, "works", first_s=0.001)
        async with asyncio.timeout(30):
            await again.wait()
        assert restarts.value - before == 3
        assert not kept.done()
        await tasks.close()
        assert kept.cancelled()

    run(main())
    assert "task owner: works failed and starts again" in caplog.text


@RUNNERS
def test_a_kept_task_that_returns_is_over(run: Callable[..., None]) -> None:
    async def main() -> None:
        tasks = Tasks("owner")

        async def work() -> None:
            pass

        await tasks.keep(work, "returns")
        await asyncio.sleep(0)
        assert len(tasks) == 0

    run(main())


def test_fibers_are_counted_while_they_run() -> None:
    async def main() -> None:
        before = fibers_running()
        poller, tasks = Poller(), Tasks("owner")
        tasks.run(poller, asyncio.sleep(0), "ends")
        waits: asyncio.Future[None] = asyncio.get_running_loop().create_future()

        async def wait() -> None:
            await waits

        tasks.run(poller, wait(), "waits")
        tasks.start(asyncio.Event().wait(), "a task")
        assert fibers_running() - before == 2
        async with asyncio.timeout(30):
            while fibers_running() - before > 1:
                await asyncio.sleep(0)
        await tasks.close()
        assert fibers_running() == before
        poller.close()

    asyncio.run(main())
