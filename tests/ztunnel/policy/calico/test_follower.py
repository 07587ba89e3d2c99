"""Following a PolicySync server: which store answers, when."""

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import uvloop

from tests.ztunnel.policy.calico.felix import Felix
from xds.model import calico as c
from ztunnel.policy.calico import follower as module
from ztunnel.policy.calico.follower import Follower
from ztunnel.policy.calico.verdict import Code
from ztunnel.runtime.backoff import Backoff
from ztunnel.runtime.clock import SystemClock

LIMIT_S = 60.0  # for a hang
LOOPS = pytest.mark.parametrize("loop", ["asyncio", "uvloop"])
POD = c.EndpointId("k8s", "shop/web-0", "eth0")
FLOW = c.Flow(source_ip="10.0.0.1", destination_ip="10.0.0.2", destination_port=80)
ONE = c.PolicyId("GlobalNetworkPolicy", "", "one")
ALLOW = c.PolicyUpdate(ONE, c.Policy("", (c.Rule(c.Action.ALLOW),)))
DENY = c.PolicyUpdate(ONE, c.Policy("", (c.Rule(c.Action.DENY),)))
ENDPOINT = c.EndpointUpdate(POD, c.Endpoint("", (), (c.Tier("default", (ONE,)),)))
SNAPSHOT = (ALLOW, ENDPOINT, c.InSync())


def run(main: Callable[[], Coroutine[Any, Any, None]], loop: str = "uvloop") -> None:
    async def limited() -> None:
        async with asyncio.timeout(LIMIT_S):
            await main()

    (uvloop.run if loop == "uvloop" else asyncio.run)(limited())


async def until(condition: Callable[[], bool]) -> None:
    while not condition():
        await asyncio.sleep(0.005)


@asynccontextmanager
async def following(target: str) -> AsyncIterator[Follower]:
    follower = Follower(target, SystemClock(), backoff=Backoff(0.01, 0.02))
    async with asyncio.TaskGroup() as tasks:
        task = tasks.create_task(follower.run())
        try:
            yield follower
        finally:
            task.cancel()


def code(follower: Follower) -> Code:
    return follower.evaluator.check(POD, FLOW).code


@LOOPS
def test_the_first_snapshot_answers_once_it_is_complete(loop: str, tmp_path: Path) -> None:
    async def main() -> None:
        async with Felix(tmp_path) as felix, following(felix.target) as follower:
            stream = await felix.stream(ALLOW, ENDPOINT)
            await until(lambda: follower.counts.updates == 2)
            assert (code(follower), follower.in_sync) == (Code.UNAVAILABLE, False)
            stream.put_nowait(c.InSync())
            await until(lambda: follower.in_sync)
            assert code(follower) is Code.OK
            stream.put_nowait(DENY)
            await until(lambda: code(follower) is Code.PERMISSION_DENIED)
            stream.put_nowait(c.InSync())
            stream.put_nowait(ALLOW)
            await until(lambda: code(follower) is Code.OK)

    run(main, loop)


@LOOPS
def test_the_old_store_answers_until_the_new_one_is_complete_and_nothing_of_it_lives_on(
    loop: str, tmp_path: Path
) -> None:
    async def main() -> None:
        async with Felix(tmp_path) as felix, following(felix.target) as follower:
            stream = await felix.stream(*SNAPSHOT, c.NamespaceUpdate("gone", {}))
            await until(lambda: "gone" in follower.evaluator.store.namespaces)
            stream.put_nowait(None)
            stream = await felix.stream(DENY, ENDPOINT)
            assert (code(follower), follower.in_sync) == (Code.OK, False)
            assert follower.age_s > 0
            stream.put_nowait(c.InSync())
            await until(lambda: follower.in_sync)
            assert code(follower) is Code.PERMISSION_DENIED
            assert follower.evaluator.store.namespaces == {}
            assert follower.age_s == 0

    run(main, loop)


def test_a_server_that_goes_and_comes_back(tmp_path: Path) -> None:
    async def main() -> None:
        async with following(f"unix:{tmp_path}/felix.sock") as follower:
            await until(lambda: follower.error != "")
            assert (code(follower), follower.in_sync, follower.age_s) == (Code.UNAVAILABLE, False, 0)
            async with Felix(tmp_path) as felix:
                await felix.stream(*SNAPSHOT)
                await until(lambda: follower.in_sync)
            await until(lambda: not follower.in_sync)
            assert code(follower) is Code.OK
            async with Felix(tmp_path) as felix:
                await felix.stream(None)  # ends before it is complete
                await felix.stream(*SNAPSHOT)
                await until(lambda: follower.in_sync)

    run(main)


def test_messages_that_cannot_be_read_are_left_out_and_too_many_end_the_stream(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "FAULTS", 3)

    async def main() -> None:
        async with Felix(tmp_path) as felix, following(felix.target) as follower:
            stream = await felix.stream(b"\xff", *SNAPSHOT, bytes.fromhex("8a0100"))
            await until(lambda: follower.counts.ignored == 1)
            assert (follower.counts.faults, code(follower)) == (1, Code.OK)
            stream.put_nowait(b"\xff")
            stream.put_nowait(b"\x0a")
            await until(lambda: not follower.in_sync)
            assert "3 messages cannot be read" in follower.error
            assert code(follower) is Code.OK

    run(main)


def test_a_snapshot_that_never_ends_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "OBJECTS", 1_000)

    async def main() -> None:
        async with Felix(tmp_path) as felix, following(felix.target) as follower:
            stream = await felix.stream(*SNAPSHOT)
            await until(lambda: follower.in_sync)
            stream.put_nowait(None)
            members = tuple(f"10.0.{index >> 8}.{index & 255}" for index in range(1_001))
            await felix.stream(c.IpSetUpdate("s:a", c.IpSetType.NET, members))
            await until(lambda: "more than 1,000 objects" in follower.error)
            assert code(follower) is Code.OK

    run(main)


def test_a_server_is_tried_again_within_a_second(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Until it is there every check is refused, or answered by policies that may be out of date."""

    async def main() -> None:
        follower = Follower(f"unix:{tmp_path}/none", SystemClock())
        async with asyncio.TaskGroup() as tasks:
            task = tasks.create_task(follower.run())
            await until(lambda: sum("stream ended" in record.message for record in caplog.records) >= 4)
            task.cancel()

    run(main)
    waits = [
        float(record.message.rpartition("wait_s=")[2]) for record in caplog.records if "wait_s" in record.message
    ]
    assert max(waits) <= 1.0
