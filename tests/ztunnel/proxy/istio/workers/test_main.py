"""What the main process does when a worker ends."""

import asyncio
import os
import socket
from asyncio.subprocess import DEVNULL, PIPE, Process, create_subprocess_exec
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from tests.hbone.aio.harness import until
from tests.limits import WAIT_S
from tests.ztunnel.proxy.istio.nodes import Lines, StoppedClock
from ztunnel.proxy.istio.accounting.metrics import Metrics
from ztunnel.proxy.istio.workers import main, process
from ztunnel.proxy.istio.workers.channel import ChannelClosed, Descriptors, IpcChannel, RequestBody
from ztunnel.proxy.istio.workers.connection_counts import ConnectionCounts
from ztunnel.proxy.istio.workers.main import Workers
from ztunnel.proxy.istio.workers.messages import Barrier, HandOver, Value
from ztunnel.proxy.istio.workers.process import OutputReader, WorkerProcess
from ztunnel.runtime.tasks import Tasks


class Ending:
    """Workers, one of which has closed its channel, while its process has not ended."""

    def __init__(self, workers: Workers, worker: WorkerProcess, counts: ConnectionCounts) -> None:
        self.workers, self.worker, self.counts = workers, worker, counts
        self.end: Callable[[], object] = lambda: None


@asynccontextmanager
async def ending(folder: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Ending]:
    lines = Lines(folder, "info", json_lines=False)
    monkeypatch.setattr(process, "_END_S", WAIT_S)
    ours, theirs = socket.socketpair()
    ours.setblocking(False)
    reading, writing = os.pipe()
    child = await create_subprocess_exec("cat", stdin=PIPE, stdout=DEVNULL)
    os.close(writing)

    async def spawn(*_: object) -> tuple[socket.socket, Process, OutputReader]:
        return ours, child, OutputReader(reading, lines.stream)

    async def no_sync(*_: object) -> None:
        """Without a snapshot."""

    monkeypatch.setattr(main, "spawn", spawn)
    monkeypatch.setattr(Workers, "_sync", no_sync)
    made: Any = Workers.__new__(Workers)
    made._node = mock.Mock(metrics=Metrics("v", 100), clock=StoppedClock())
    made._connection_counts, memory = ConnectionCounts.create(2)
    made._running, made._served, made._tasks = {}, False, Tasks("workers")
    async with asyncio.TaskGroup() as group:
        group.create_task(made._run(0))
        await until(lambda: made._running)
        found = Ending(made, made._running[0], made._connection_counts)
        assert child.stdin is not None
        found.end = child.stdin.close
        counted = Metrics("v", 100)
        counted.errors["source", "connect", "refused"] = 7
        found.worker.counts = list(counted.counts())
        found.counts.set(0, 3)
        found.counts.set(1, 1)
        theirs.close()
        await until(lambda: not made._running)
        yield found
        found.end()
    await made._tasks.close()
    made._connection_counts.close()
    os.close(memory)
    lines.close()


def test_counters_of_a_worker_stay_while_its_process_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def body() -> None:
        async with ending(tmp_path, monkeypatch) as found:
            for _ in range(2):  # a smaller value would look like a restart of the proxy
                assert (await found.workers.metrics()).errors["source", "connect", "refused"] == 7
        assert (await found.workers.metrics()).errors["source", "connect", "refused"] == 7

    asyncio.run(body())


def test_a_worker_that_has_ended_is_never_next(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def body() -> None:
        async with ending(tmp_path, monkeypatch) as found:
            found.counts.set(0, 0)  # it closes its connections after its channel
            found.end()
            await found.worker.process.wait()
            await until(lambda: found.counts.is_turn_of(1))

    asyncio.run(body())


def test_a_worker_that_cannot_be_sent_its_state_is_ended(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async def body() -> None:
        lines = Lines(tmp_path, "info", json_lines=False)
        ours, theirs = socket.socketpair()
        ours.setblocking(False)
        reading, writing = os.pipe()
        os.close(writing)
        child = await create_subprocess_exec("sleep", "60", stdin=DEVNULL, stdout=DEVNULL)
        channel = IpcChannel(ours, mock.Mock(), mock.Mock())
        worker = WorkerProcess(0, channel, child, OutputReader(reading, lines.stream))
        made: Any = Workers.__new__(Workers)
        made._node, made._config, made.count = mock.Mock(revocations=None), (), 1
        made._memory = -1  # duplicating it fails, as when no descriptor is free
        await made._sync(worker)
        await child.wait()
        with pytest.raises(ChannelClosed):
            await channel.request(Barrier())
        await channel.close()
        theirs.close()
        await worker.ended()
        lines.close()

    asyncio.run(body())
    assert "a worker cannot get its configuration or pods, ending it" in caplog.text


def test_a_worker_that_hands_over_many_connections_is_not_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The time limit passes at once, and the worker answers after that."""
    monkeypatch.setattr(main, "ANSWER_S", 0.0)
    given: list[float] = []

    async def answer(body: RequestBody, descriptors: Descriptors) -> AsyncIterator[Value]:
        if isinstance(body, HandOver):
            await asyncio.sleep(0.02)
            given.append(body.seconds)
        yield None

    async def body() -> None:
        lines = Lines(tmp_path, "info", json_lines=False)
        ours, theirs = socket.socketpair()
        for sock in (ours, theirs):
            sock.setblocking(False)
        reading, writing = os.pipe()
        os.close(writing)
        child = await create_subprocess_exec("sleep", "60", stdin=DEVNULL, stdout=DEVNULL)
        there = IpcChannel(theirs, mock.Mock(), answer, to_main=True)
        worker = WorkerProcess(
            0, IpcChannel(ours, mock.Mock(), mock.Mock()), child, OutputReader(reading, lines.stream)
        )
        worker.synced = True
        made: Any = Workers.__new__(Workers)
        made._running, made._pods = {0: worker}, {}
        async with asyncio.TaskGroup() as group:
            runs = [group.create_task(each.run()) for each in (worker.channel, there)]
            await made.hand_over(0.0)
            assert given == [0.0]
            await worker.request(Barrier())
            worker.kill()
            await asyncio.gather(*runs)
        for each in (worker.channel, there):
            await each.close()
        await worker.ended()
        lines.close()

    asyncio.run(body())
