"""How addons are called: in order, timed, suspended when they fail, and never waited for too long."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import time
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import pytest

from tests.hbone import virtual_time
from tests.limits import WAIT_S
from ztunnel.addons import Addon, Delay, Deny, Facts, MeshSummary, Metric, Prefer, Record, Verdict
from ztunnel.proxy.addons.host import AddonHost, Asked
from ztunnel.proxy.addons.interrupt import LIMIT_S, Interrupter
from ztunnel.proxy.addons.load import load_class
from ztunnel.proxy.addons.settings import Given
from ztunnel.proxy.dataplane.life_table import State
from ztunnel.proxy.dataplane.live_table import Life, Lives, LiveTable


def host(*classes: type, **options: str) -> AddonHost:
    """A host of addons; options are of each."""
    given = {key: Given(value, "here") for key, value in options.items()}
    return AddonHost([load_class(each, {each.__name__.lower(): given}) for each in classes])


async def connecting(addons: AddonHost, facts: Facts | None = None) -> Asked:
    lives: Lives[Life] = Lives(LiveTable())
    life = Life(lives)
    try:
        asked = Asked(addons, facts or Facts())
        await addons.decide(addons.connecting, life, asked)
        return asked
    finally:
        life.close()


def played(body: Callable[[], Awaitable[None]]) -> None:
    virtual_time.run(body)


class First(Addon):
    def connecting(self, facts: Facts) -> Verdict | None:
        return Prefer({"version": "v2"})


class Second(Addon):
    def connecting(self, facts: Facts) -> Verdict | None:
        return Deny("no") if facts.service == "closed" else Delay(2)


class Third(Addon):
    def __init__(self) -> None:
        self.calls = 0

    def connecting(self, facts: Facts) -> Verdict | None:
        self.calls += 1
        return None


def test_hooks_are_called_in_order_until_an_addon_denies() -> None:
    async def body() -> None:
        addons = host(First, Second, Third)
        loop = asyncio.get_running_loop()
        began_s = loop.time()
        asked = await connecting(addons)
        assert loop.time() - began_s == pytest.approx(2, abs=0.5)
        assert (asked.addon, asked.outcome.denied) == ("first,second", "")
        assert asked.prefer == (frozenset({("version", "v2")}),)
        asked = await connecting(addons, Facts(service="closed"))
        assert asked.outcome.denied == "connection refused by addon second: no"
        assert addons.addons[2].loaded.instance.calls == 1
        results = {(each.addon, each.hook): dict(each.results) for each in addons.counts()}
        assert results["second", "connecting"] == {"delay": 1, "deny": 1}
        assert results["third", "connecting"] == {"none": 1}

    played(body)


class Raises(Addon):
    def connecting(self, facts: Facts) -> Verdict | None:
        raise RuntimeError("my fault")


class Exits(Addon):
    def connecting(self, facts: Facts) -> Verdict | None:
        raise SystemExit(1)


class Quits(Addon):
    async def connecting(self, facts: Facts) -> Verdict | None:
        raise SystemExit(1)


class StopsTheLoop(Addon):
    def connecting(self, facts: Facts) -> Verdict | None:
        asyncio.get_running_loop().stop()
        return None


class Nonsense(Addon):
    def connecting(self, facts: Facts) -> Any:
        return True


class Changes(Addon):
    def connecting(self, facts: Facts) -> Verdict | None:
        facts.source_identity = "spiffe://other"  # type: ignore[misc]
        return None


class Relabels(Addon):
    def connecting(self, facts: Facts) -> Verdict | None:
        facts.source.labels["app"] = "other"  # type: ignore[index]
        return None


@pytest.mark.parametrize(
    ("cls", "said"),
    [
        (Raises, "RuntimeError: my fault"),
        (Exits, "SystemExit: 1"),
        (Quits, "SystemExit: 1"),
        (StopsTheLoop, "RuntimeError: no running event loop"),
        (Nonsense, "returned a value of type bool"),
        (Changes, "AttributeError"),
        (Relabels, "TypeError"),
    ],
)
def test_a_fault_suspends_and_denies(cls: type, said: str, caplog: pytest.LogCaptureFixture) -> None:
    async def body() -> None:
        addons = host(cls)
        first = await connecting(addons)
        assert said in first.outcome.denied
        second = await connecting(addons)
        assert ": it is suspended: its hook connecting" in second.outcome.denied
        (state,) = addons.states()
        assert said in state.suspended
        (counts,) = addons.counts()
        assert dict(counts.results) == {"fault": 1, "suspended": 1}

    with caplog.at_level(logging.ERROR):
        played(body)
    (line,) = [each.getMessage() for each in caplog.records if "suspended" in each.getMessage()]
    assert said in line
    assert line.endswith("connections that it would decide about are denied")


@pytest.mark.parametrize("cls", [Raises, Nonsense])
def test_a_fault_can_be_ignored(cls: type) -> None:
    async def body() -> None:
        addons = host(cls, on_error="ignore")
        for _ in range(2):
            asked = await connecting(addons)
            assert (asked.outcome.denied, asked.addon) == ("", "")
        assert addons.states()[0].suspended

    played(body)


class Observes(Addon):
    def __init__(self) -> None:
        self.seen: list[object] = []

    def opened(self, facts: Facts) -> None:
        self.seen.append(facts)

    def closed(self, record: Record) -> None:
        self.seen.append(record)

    def refused(self, record: Record) -> None:
        raise ValueError("not mine")

    def mesh_changed(self, summary: MeshSummary) -> None:
        self.seen.append(summary)

    def metrics(self) -> Iterator[Metric]:
        yield Metric("seen", "Values seen", {(): len(self.seen)})


def test_fault_of_an_observing_hook_denies_no_connection() -> None:
    async def body() -> None:
        addons = host(Observes)
        seen = addons.addons[0].loaded.instance.seen
        addons.opened(Facts(connection=1))
        addons.ended(Record(Facts(connection=1)), was_open=True)
        assert [(each.addon, each.values) for each in addons.families()] == [("observes", {(): 2})]
        for number in range(5):
            addons.mesh_changed(lambda number=number: MeshSummary(workloads=number))  # type: ignore[misc]
        await asyncio.sleep(1.5)
        addons.mesh_changed(lambda: MeshSummary(workloads=9))
        await asyncio.sleep(1.5)
        assert [each for each in seen if isinstance(each, MeshSummary)] == [MeshSummary(0), MeshSummary(9)]
        addons.ended(Record(Facts()), was_open=False)
        assert "ValueError: not mine" in addons.states()[0].suspended
        before = len(seen)
        addons.opened(Facts())
        assert len(seen) == before
        assert list(addons.families()) == []
        assert (await connecting(addons)).outcome.denied == ""

    played(body)


class Waits(Addon):
    time_limit_s = 3.0

    def __init__(self) -> None:
        self.ended: list[str] = []

    async def connecting(self, facts: Facts) -> Verdict | None:
        try:
            await asyncio.sleep(facts.source_port)
        except asyncio.CancelledError:
            self.ended.append("cancelled")
            raise
        return Deny("late")


def test_async_hook_is_cancelled_at_its_time_limit() -> None:
    async def body() -> None:
        addons = host(Waits)
        assert "late" in (await connecting(addons, Facts(source_port=2))).outcome.denied
        asked = await connecting(addons, Facts(source_port=9))
        assert "its hook connecting did not answer within 3 s" in asked.outcome.denied
        await asyncio.sleep(0)
        assert addons.addons[0].loaded.instance.ended == ["cancelled"]
        assert not addons.addons[0].suspended
        assert dict(next(addons.counts()).results) == {"deny": 1, "timeout": 1}

    played(body)


def test_a_hook_is_cancelled_with_its_connection() -> None:
    async def body() -> None:
        addons = host(Waits)
        lives: Lives[Life] = Lives(LiveTable())
        life = Life(lives)
        life.state = State.DIALING
        task = asyncio.get_running_loop().create_task(
            addons.decide(addons.connecting, life, Asked(addons, Facts(source_port=2)))
        )
        await asyncio.sleep(1)
        assert life.state is State.HELD
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await asyncio.sleep(0)
        assert addons.addons[0].loaded.instance.ended == ["cancelled"]
        assert life.state is State.DIALING
        life.close()

    played(body)


class NeverEnds(Addon):
    async def connecting(self, facts: Facts) -> Verdict | None:
        while True:
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.sleep(3600)


def test_addon_with_a_hook_that_survives_cancellation_is_suspended() -> None:
    async def body() -> None:
        addons = host(NeverEnds)
        loop = asyncio.get_running_loop()
        began_s = loop.time()
        asked = await connecting(addons)
        assert "did not answer within 1 s" in asked.outcome.denied
        assert loop.time() - began_s == pytest.approx(1, abs=0.5)
        await asyncio.sleep(1.5)
        assert "did not end within 1 s of its cancellation" in addons.states()[0].suspended
        assert addons.addons[0].waiting == 0

        other = host(NeverEnds)
        asking = asyncio.get_running_loop().create_task(connecting(other))
        await asyncio.sleep(0.5)
        running = other.addons[0]
        assert running.waiting == 1
        other.close()  # the end of the process does not wait for it either
        await asyncio.sleep(0.01)
        assert running.waiting == 0
        await asking

    played(body)


class Tricks(Addon):
    async def connecting(self, facts: Facts) -> Verdict | None:
        task = asyncio.current_task()
        assert task is not None
        task.cancel()
        await asyncio.sleep(0)
        return None


def test_a_hook_that_cancels_itself_has_failed() -> None:
    async def body() -> None:
        addons = host(Tricks)
        assert "the hook cancelled itself" in (await connecting(addons)).outcome.denied
        assert addons.states()[0].suspended

    played(body)


class Blocks(Addon):
    def connecting(self, facts: Facts) -> Verdict | None:
        time.sleep(facts.source_port)
        return None


class Spins(Addon):
    async def connecting(self, facts: Facts) -> Verdict | None:
        while True:
            pass


@pytest.mark.parametrize("cls", [Blocks, Spins])
def test_a_hook_that_blocks_is_interrupted(cls: type) -> None:
    async def body() -> None:
        addons = host(cls)
        began_s = time.monotonic()
        with Interrupter(addons.current):
            asked = await connecting(addons, Facts(source_port=30))
        assert time.monotonic() - began_s < 20  # not 30 s
        assert f"blocked the loop for more than {LIMIT_S:g} s" in asked.outcome.denied
        assert "blocked the loop" in addons.states()[0].suspended

    asyncio.run(_as_coroutine(body))


def test_a_replaced_signal_handler_ends_no_process(caplog: pytest.LogCaptureFixture) -> None:
    received: list[int] = []

    class Replaces(Addon):
        def connecting(self, facts: Facts) -> Verdict | None:
            signal.signal(signal.SIGALRM, lambda number, frame: received.append(number))
            assert until_true(lambda: "cannot be interrupted" in caplog.text)
            return None

    async def body() -> None:
        addons = host(Replaces)
        with Interrupter(addons.current):
            await connecting(addons)

    asyncio.run(_as_coroutine(body))
    assert "addon replaces, hook connecting blocks the loop, and cannot be interrupted" in caplog.text
    assert received == []


def until_true(ready: Callable[[], bool]) -> bool:
    ends_s = time.monotonic() + WAIT_S
    while not ready() and time.monotonic() < ends_s:
        time.sleep(0.01)
    return ready()


class Changing(dict[tuple[str, ...], float]):
    """Values that another thread changes while their items are read."""

    def items(self) -> Any:
        raise RuntimeError("dictionary changed size during iteration")


def test_values_of_a_metric_are_copied_before_they_are_checked() -> None:
    class Counts(Addon):
        def metrics(self) -> Iterator[Metric]:
            yield Metric("seen", "Values seen", Changing({(): 2.0}))

    addons = host(Counts)
    assert [each.values for each in addons.families()] == [{(): 2.0}]
    assert addons.states()[0].suspended == ""


async def _as_coroutine(body: Callable[[], Awaitable[None]]) -> None:
    await body()


class Slow(Addon):
    budget_us = 1.0

    def connecting(self, facts: Facts) -> Verdict | None:
        time.sleep(0.001)
        return None


def test_calls_over_the_budget_are_counted_and_logged_once_a_minute(caplog: pytest.LogCaptureFixture) -> None:
    async def body() -> None:
        addons = host(Slow)
        for _ in range(3):
            await connecting(addons)
        assert next(addons.counts()).over_budget == 3
        assert not addons.states()[0].suspended

    with caplog.at_level(logging.WARNING):
        played(body)
    (line,) = [each.getMessage() for each in caplog.records]
    assert line.startswith("addon slow: hook connecting took ")
    assert "more than its budget of 1 us" in line


def test_replacing_version_continues_the_counters() -> None:
    class Versioned(Addon):
        def __init__(self) -> None:
            self.is_done = False

        def connecting(self, facts: Facts) -> Verdict | None:
            return None

        def done(self) -> None:
            self.is_done = True

    async def body() -> None:
        addons = host(Raises, Versioned, on_error="ignore")
        await connecting(addons)
        old = addons.addons[1]
        addons.replace(old, load_class(Versioned, {}))
        assert addons.addons[1] is not old
        assert old.loaded.instance.is_done
        await connecting(addons)
        counts = {each.addon: dict(each.results) for each in addons.counts() if each.hook == "connecting"}
        assert counts["versioned"] == {"none": 2}
        new = addons.addons[1]
        addons.close()
        addons.close()
        assert new.loaded.instance.is_done

    played(body)


class Opens(Addon):
    """Waits until :attr:`gate` is set."""

    gate: asyncio.Event

    async def connecting(self, facts: Facts) -> Verdict | None:
        await self.gate.wait()
        return None


class Closes(Addon):
    """Fails once its resources are released."""

    name = "versioned"
    is_done = False

    def connecting(self, facts: Facts) -> Verdict | None:
        return Deny("called after done") if self.is_done else Prefer({"version": "old"})

    def done(self) -> None:
        self.is_done = True


class Newer(Addon):
    name = "versioned"

    async def connecting(self, facts: Facts) -> Verdict | None:
        return Prefer({"version": "new"})


class WithoutHook(Addon):
    name = "versioned"

    def opened(self, facts: Facts) -> None:
        raise AssertionError


@pytest.mark.parametrize(
    ("versions", "prefer"),
    [([Newer], {("version", "new")}), ([WithoutHook], None), ([WithoutHook, Newer], {("version", "new")})],
)
def test_addon_replaced_while_a_connection_waits_is_called_in_its_new_version(
    versions: list[type], prefer: set[tuple[str, str]] | None
) -> None:
    async def body() -> None:
        Opens.gate = asyncio.Event()
        addons = host(Opens, Closes)
        asking = asyncio.get_running_loop().create_task(connecting(addons))
        await asyncio.sleep(0.1)
        assert addons.addons[0].waiting == 1
        for version in versions:
            addons.replace(addons.addons[1], load_class(version, {}))
        Opens.gate.set()
        asked = await asking
        assert asked.outcome.denied == ""
        assert asked.prefer == (() if prefer is None else (frozenset(prefer),))

    played(body)
