"""Active policies: new connections that wait for their pod, and live ones that are judged again."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import uvloop

from tests.ztunnel.policy.calico.felix import Felix
from tests.ztunnel.policy.calico.stores import ALLOW, DB, DB_HOST, DENY, FLOW, ONE, both, endpoint, snapshot
from xds.model import calico as c
from ztunnel.policy.calico import live as module
from ztunnel.policy.calico.follower import Follower
from ztunnel.policy.calico.guard import results
from ztunnel.policy.calico.live import LivePolicies
from ztunnel.policy.calico.verdict import Code
from ztunnel.runtime.backoff import Backoff
from ztunnel.runtime.clock import SystemClock

LIMIT_S = 20.0
INGRESS = c.Direction.INGRESS


@asynccontextmanager
async def live(target: str, waits: list[float]) -> AsyncIterator[LivePolicies]:
    clock = SystemClock()
    policies = LivePolicies(
        lambda changed: Follower(
            target, clock, connections_only=True, changed=changed, backoff=Backoff(0.01, 0.02)
        ),
        clock,
        waited=waits.append,
    )
    async with asyncio.TaskGroup() as tasks:
        task = tasks.create_task(policies.run())
        try:
            yield policies
        finally:
            task.cancel()


async def until(condition: Callable[[], bool]) -> None:
    while not condition():
        await asyncio.sleep(0.005)


def run(body: Callable[[Felix, LivePolicies], Awaitable[None]], folder: Path) -> list[float]:
    """Return the seconds that connections have waited."""
    waits: list[float] = []

    async def main() -> None:
        async with asyncio.timeout(LIMIT_S), Felix(folder) as felix, live(felix.target, waits) as policies:
            await body(felix, policies)

    uvloop.run(main())
    return waits


def test_a_new_connection_waits_for_the_first_store(tmp_path: Path) -> None:
    async def body(felix: Felix, policies: LivePolicies) -> None:
        async with asyncio.TaskGroup() as tasks:
            asked = tasks.create_task(policies.admit(INGRESS, FLOW))
            complete = tasks.create_task(policies.complete())
            stream = await felix.stream(*snapshot(ALLOW)[:-1])
            source = policies.source
            assert isinstance(source, Follower)
            await until(lambda: source.counts.updates == 3)
            assert not asked.done()
            assert not complete.done()
            stream.put_nowait(c.InSync())
            assert (await asked).allowed
            await complete
        assert dict(results(policies.guard.uses)) == {("default", str(ONE), "allowed"): 1}

    (waited_s,) = run(body, tmp_path)
    assert waited_s > 0


def test_a_new_connection_waits_for_its_pod_and_then_is_denied(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def body(felix: Felix, policies: LivePolicies) -> None:
        stream = await felix.stream(both(ONE, ALLOW), c.InSync())
        await until(lambda: policies.source.in_sync)
        async with asyncio.TaskGroup() as tasks:
            asked = tasks.create_task(policies.admit(INGRESS, FLOW))
            stream.put_nowait(endpoint(DB, DB_HOST, ONE))
            assert (await asked).allowed
        stream.put_nowait(c.EndpointUpdate(DB, None))
        await until(lambda: not policies.guard.knows(DB_HOST))
        monkeypatch.setattr(module, "GRACE_S", 0.01)
        decision = await policies.admit(INGRESS, FLOW)
        assert decision.verdict.code is Code.PERMISSION_DENIED

    run(body, tmp_path)


def test_live_connections_are_reviewed_after_a_change_until_they_are_not_watched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_REVIEW_S", 0.0)
    judged: list[bool] = []

    async def body(felix: Felix, policies: LivePolicies) -> None:
        def review() -> None:
            judged.append(policies.guard.check(INGRESS, FLOW, counted=False).allowed)

        policies.watch(review)
        stream = await felix.stream(*snapshot(ALLOW))
        await until(lambda: judged == [True])
        stream.put_nowait(both(ONE, DENY))
        await until(lambda: judged == [True, False])
        policies.unwatch(review)
        policies.unwatch(review)
        changes = policies.changes
        stream.put_nowait(both(ONE, ALLOW))
        await until(lambda: policies.changes > changes)
        assert (await policies.admit(INGRESS, FLOW)).allowed
        assert judged == [True, False]

    run(body, tmp_path)


def test_many_changes_at_once_are_few_reviews(tmp_path: Path) -> None:
    async def body(felix: Felix, policies: LivePolicies) -> None:
        many = [both(ONE, ALLOW, *[DENY] * (number % 2)) for number in range(500)]
        await felix.stream(*snapshot(ALLOW), *many, both(ONE, DENY))
        await until(lambda: policies.source.in_sync and not policies.guard.check(INGRESS, FLOW).allowed)
        assert policies.changes < 500

    assert run(body, tmp_path) == []
