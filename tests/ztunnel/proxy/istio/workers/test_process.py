"""What the main process makes of a worker's output and silence, and what it hands down."""

import asyncio
import os
import signal
import socket
from asyncio.subprocess import DEVNULL, create_subprocess_exec
from collections.abc import AsyncIterator
from pathlib import Path
from unittest import mock

import pytest

from tests.limits import WAIT_S
from tests.ztunnel.proxy.istio.nodes import Lines
from ztunnel.proxy.istio.workers.channel import Descriptors, IpcChannel, RequestBody
from ztunnel.proxy.istio.workers.messages import Notification, Turn, Value
from ztunnel.proxy.istio.workers.process import OutputReader, WorkerProcess, without_credentials
from ztunnel.runtime.log_pressure import LogPressure


def test_lines_of_several_workers_stay_whole(tmp_path: Path) -> None:
    lines = Lines(tmp_path, "info", json_lines=False)

    async def main() -> None:
        pipes = [os.pipe() for _ in range(2)]
        read = [OutputReader(reading, lines.stream) for reading, _ in pipes]
        loop = asyncio.get_running_loop()
        for number in range(200):
            # Cut anywhere, and larger than a pipe writes in one piece.
            for worker, (_, writing) in enumerate(pipes):
                data = b"%d %d " % (worker, number) + b"x" * 9000 + b"\n"
                cut = (number * 37) % len(data)
                for part in (data[:cut], data[cut:]):
                    await loop.run_in_executor(None, os.write, writing, part)
        os.write(pipes[0][1], b"0 last, and it died in the midd")
        for _, writing in pipes:
            os.close(writing)
        async with asyncio.timeout(20):
            for each in read:
                await each.ended.wait()

    asyncio.run(main())
    found = list(lines)
    lines.close()
    assert [line for line in found if "last" in line] == ["0 last, and it died in the midd"]
    whole = [line for line in found if "last" not in line]
    assert len(whole) == 400
    for worker in range(2):
        own = [line for line in whole if line.startswith(f"{worker} ")]
        assert own == [f"{worker} {number} " + "x" * 9000 for number in range(200)]


def test_output_without_line_ends_is_cut(tmp_path: Path) -> None:
    lines = Lines(tmp_path, "info", json_lines=False)

    async def main() -> None:
        reading, writing = os.pipe()
        read = OutputReader(reading, lines.stream)
        loop = asyncio.get_running_loop()
        for _ in range(40):
            await loop.run_in_executor(None, os.write, writing, b"x" * 65_536)
            assert len(read._begun) < 1024 * 1024
        os.close(writing)
        async with asyncio.timeout(WAIT_S):
            await read.ended.wait()

    asyncio.run(main())
    found = [line for line in lines if line.startswith("xx")]
    lines.close()
    assert sum(map(len, found)) == 40 * 65_536
    assert len(found) == 3


def test_a_worker_that_ended_by_a_signal_without_name_is_reported(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def main() -> None:
        lines = Lines(tmp_path, "info", json_lines=False)
        ours, theirs = socket.socketpair()
        ours.setblocking(False)
        reading, writing = os.pipe()
        os.close(writing)
        child = await create_subprocess_exec("sleep", "60", stdin=DEVNULL, stdout=DEVNULL)
        channel = IpcChannel(ours, mock.Mock(), mock.Mock())
        worker = WorkerProcess(7, channel, child, OutputReader(reading, lines.stream))
        child.send_signal(signal.SIGRTMIN + 5)
        await worker.ended()
        await channel.close()
        theirs.close()
        lines.close()

    asyncio.run(main())
    assert f"by='signal {signal.SIGRTMIN + 5}'" in caplog.text


def test_output_of_a_worker_waits_while_the_log_is_behind(tmp_path: Path) -> None:
    lines = Lines(tmp_path, "info", json_lines=False)
    behind = True

    async def main() -> None:
        nonlocal behind
        reading, writing = os.pipe()
        read = OutputReader(reading, lines.stream, LogPressure(lambda: behind, 60.0, lambda: 0.0))
        os.write(writing, b"a line\n")
        os.close(writing)
        await asyncio.sleep(0.2)
        assert list(lines) == []
        behind = False
        async with asyncio.timeout(20):
            await read.ended.wait()

    asyncio.run(main())
    found = list(lines)
    lines.close()
    assert "a line" in found


def test_workers_are_not_handed_credentials() -> None:
    env = {"PATH": "/bin", "AUTH_TOKEN": "t", "XDS_HEADER_X": "h", "CA_HEADER_Y": "h", "NODE_NAME": "n"}
    env |= {"OTEL_EXPORTER_OTLP_HEADERS": "key=h", "OTEL_EXPORTER_OTLP_LOGS_HEADERS": "key=h"}
    assert without_credentials(env) == {"PATH": "/bin", "NODE_NAME": "n"}


def test_hanging_worker_is_killed(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """It answers while its poller runs. From the third time on it hangs."""
    asked = 0

    async def nothing(message: Notification, descriptors: Descriptors) -> None:
        raise AssertionError(message)

    async def answers_twice(body: RequestBody, descriptors: Descriptors) -> AsyncIterator[Value]:
        nonlocal asked
        assert body == Turn()
        asked += 1
        if asked > 2:
            await asyncio.Event().wait()
        return
        yield None

    async def main() -> None:
        ours, theirs = socket.socketpair()
        for sock in (ours, theirs):
            sock.setblocking(False)
        lines = Lines(tmp_path, "info", json_lines=False)
        reading, writing = os.pipe()
        here = IpcChannel(ours, nothing, answers_twice)
        there = IpcChannel(theirs, nothing, answers_twice, to_main=True)
        process = await create_subprocess_exec("sleep", "60", stdout=writing)
        os.close(writing)
        worker = WorkerProcess(0, here, process, OutputReader(reading, lines.stream))
        worker.synced = True
        async with asyncio.timeout(30), asyncio.TaskGroup() as group:
            runs = [group.create_task(each.run()) for each in (here, there)]
            await worker.watch(beat_s=0.001, hung_s=0.05)
            assert not worker.synced, "it gets nothing more"
            await asyncio.gather(*runs)
            await here.close()
            await there.close()
            await worker.ended()
        assert process.returncode == -signal.SIGKILL
        lines.close()

    asyncio.run(main())
    assert asked == 3
    assert "worker does not answer, ending it worker=0 request=Turn" in caplog.text
