"""One controller per network namespace: who waits for whom, and for how long."""

import asyncio
import os
import socket
import subprocess
import sys

import pytest

from tests.limits import WAIT_S
from ztunnel.policy.netpol import lock
from ztunnel.policy.netpol.lock import Held, NodeLock

NAME = f"test-netpol-lock-{os.getpid()}"
HOLD = f"""
import asyncio
from ztunnel.policy.netpol.lock import NodeLock
async def main():
    async with NodeLock({NAME!r}):
        print("held", flush=True)
        await asyncio.Event().wait()
asyncio.run(main())
"""


def test_a_second_holder_waits_until_the_first_releases_the_lock() -> None:
    order = []

    async def main() -> None:
        async def second(number: int) -> None:
            async with NodeLock(NAME):
                order.append(number)

        async with asyncio.timeout(WAIT_S), asyncio.TaskGroup() as group, NodeLock(NAME):
            # More than its queue takes.
            tasks = [group.create_task(second(number), name="waiter") for number in range(20)]
            for _ in range(50):
                await asyncio.sleep(0)
            assert not any(task.done() for task in tasks)
            assert order == []

    asyncio.run(main())
    assert sorted(order) == list(range(20))


def test_the_lock_is_released_when_its_owner_is_killed() -> None:
    with subprocess.Popen([sys.executable, "-c", HOLD], stdout=subprocess.PIPE, text=True) as owner:
        assert owner.stdout is not None
        assert owner.stdout.readline() == "held\n"

        async def main() -> None:
            with pytest.raises(Held, match=f"another process \\(pid {owner.pid}\\) keeps table {NAME}"):
                async with NodeLock(NAME, wait=False):
                    pass
            async with asyncio.timeout(WAIT_S), asyncio.TaskGroup() as group:
                waiting = group.create_task(_taken(), name="waiter")
                await asyncio.sleep(0)
                assert not waiting.done()
                owner.kill()

        asyncio.run(main())


async def _taken() -> None:
    async with NodeLock(NAME):
        pass


def test_a_waiter_can_be_cancelled_and_names_do_not_meet() -> None:
    async def main() -> None:
        async with NodeLock(NAME), NodeLock(NAME + "-other"):
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.05):
                    await _taken()
        await _taken()

    asyncio.run(main())


def test_a_name_that_another_user_has_taken_does_not_keep_policies_from_their_table(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)

    async def main() -> None:
        with socket.socket(socket.AF_UNIX) as stranger:
            stranger.bind(b"\0" + NAME.encode())
            stranger.listen()
            async with asyncio.timeout(WAIT_S):
                await _taken()

    asyncio.run(main())
    assert f"held by pid {os.getpid()} of user {os.getuid()}: ignored" in caplog.text


def test_a_name_on_which_its_owner_does_not_listen_does_not_keep_policies_from_their_table(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(lock, "_AGAIN_S", 0)
    turns = 0

    async def main() -> None:
        async def others() -> None:
            nonlocal turns
            while True:
                turns += 1
                await asyncio.sleep(0)

        with socket.socket(socket.AF_UNIX) as stranger:
            stranger.bind(b"\0" + NAME.encode())
            async with asyncio.TaskGroup() as group:
                running = group.create_task(others(), name="others")
                async with asyncio.timeout(WAIT_S):
                    await _taken()
                running.cancel()

    asyncio.run(main())
    assert turns > 1  # signals and other tasks are served meanwhile
    assert f"lock of table {NAME} is held by a program that does not listen on it: ignored" in caplog.text


def test_a_full_queue_of_waiting_processes_is_an_answer_too() -> None:
    async def main() -> None:
        with socket.socket(socket.AF_UNIX) as owner, socket.socket(socket.AF_UNIX) as waiting:
            owner.bind(b"\0" + NAME.encode())
            owner.listen(0)
            waiting.connect(owner.getsockname())
            async with asyncio.timeout(WAIT_S):
                with pytest.raises(Held, match="other processes keep table"):
                    async with NodeLock(NAME, wait=False):
                        pass

    asyncio.run(main())
