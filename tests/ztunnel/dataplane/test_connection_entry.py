"""Ending table entries, and waiting until tables are empty."""

import asyncio

from hbone.aio.poller import Poller
from ztunnel.dataplane.connection_entry import (
    ConnectionEntry,
    ConnectionTable,
    all_emptied,
    cancels_current_task,
)


def test_the_first_reason_wins() -> None:
    reasons: list[str] = []
    entry = ConnectionEntry(reasons.append)
    assert entry.reason == ""
    entry.end("policy")
    entry.end("drain")
    assert reasons == ["policy"]
    assert entry.reason == "policy"


def test_what_begins_after_the_end_is_aborted_at_once() -> None:
    dial, relay = list[str](), list[str]()
    entry = ConnectionEntry(dial.append)
    entry.end("policy")
    entry.aborts_by(relay.append)
    assert (dial, relay) == (["policy"], ["policy"])


def test_a_change_of_means_leaves_the_earlier_alone() -> None:
    dial, relay = list[str](), list[str]()
    entry = ConnectionEntry(dial.append)
    entry.aborts_by(relay.append)
    entry.end("drain")
    assert (dial, relay) == ([], ["drain"])


def test_a_released_entry_keeps_its_reason_and_calls_nothing() -> None:
    reasons: list[str] = []
    entry = ConnectionEntry(reasons.append)
    entry.release()
    entry.release()
    entry.end("late")
    assert reasons == []
    assert entry.reason == "late"


def test_an_entry_that_waits_is_ended_by_cancelling_its_task() -> None:
    async def main() -> list[str]:
        entries: list[ConnectionEntry] = []
        seen: list[str] = []

        poller = Poller()

        async def connection() -> None:
            entries.append(ConnectionEntry(cancels_current_task(poller)))
            try:
                await asyncio.get_running_loop().create_future()
            except asyncio.CancelledError as error:
                seen.append(error.args[0])
                raise

        task = asyncio.ensure_future(connection())  # noqa: TID251  awaited below
        await asyncio.sleep(0)
        entries[0].end("policy")
        await asyncio.wait([task])
        assert task.cancelled()
        poller.close()
        return seen

    assert asyncio.run(main()) == ["policy"]


def test_tables_keep_the_order_and_iterate_over_snapshots() -> None:
    async def main() -> None:
        table = ConnectionTable[str]()
        for name in ("a", "b", "a", "c"):
            table.add(name)
        seen = []
        for name in table:
            table.remove(name)
            table.remove(name)
            seen.append(name)
        assert seen == ["a", "b", "c"]
        assert len(table) == 0

    asyncio.run(main())


def test_waiting_ends_with_the_last_entry() -> None:
    async def main() -> None:
        table = ConnectionTable[str]()
        await table.emptied()
        table.add("a")
        table.add("b")
        async with asyncio.TaskGroup() as tasks:
            waiting = [tasks.create_task(table.emptied()) for _ in range(2)]
            await asyncio.sleep(0)
            table.remove("a")
            await asyncio.sleep(0)
            assert not any(task.done() for task in waiting)
            table.remove("b")

    asyncio.run(main())


def test_an_entry_that_moves_between_tables_is_waited_for() -> None:
    async def main() -> None:
        arriving, live = ConnectionTable[str](), ConnectionTable[str]()
        arriving.add("a")
        async with asyncio.TaskGroup() as tasks:
            waiting = tasks.create_task(all_emptied(live, arriving))
            await asyncio.sleep(0)
            live.add("a")
            arriving.remove("a")
            for _ in range(3):
                await asyncio.sleep(0)
            assert not waiting.done()
            live.remove("a")

    asyncio.run(main())
