"""Names are asked for once while their answer holds."""

import asyncio

import pytest

from tests.ztunnel.proxy.istio.nodes import StoppedClock
from ztunnel.proxy.dataplane.resolver import Answer, ResolveFailed, Resolver
from ztunnel.proxy.istio.path import names as module
from ztunnel.proxy.istio.path.names import Names


class Asked(Resolver):
    def __init__(self) -> None:
        self.questions: list[tuple[str, str]] = []
        self.ttl_s = 30.0

    async def resolve(self, name: str, family: str) -> Answer:
        self.questions.append((name, family))
        if name == "nobody":
            raise ResolveFailed("cannot resolve nobody")
        return Answer(("192.0.2.1",), self.ttl_s)


def test_answer_is_cached_for_its_ttl() -> None:
    resolver, clock = Asked(), StoppedClock()
    names = Names(resolver, clock)

    async def main() -> None:
        for passed_s, asked in ((0.0, 1), (29.0, 1), (31.0, 2)):
            clock.passed_s = passed_s
            assert await names.resolve("a", (4,)) == ("192.0.2.1",)
            assert len(resolver.questions) == asked

    asyncio.run(main())


def test_address_families_are_cached_separately() -> None:
    resolver = Asked()
    names = Names(resolver, StoppedClock())

    async def main() -> None:
        for families in ((4,), (6,), (4, 6)):
            await names.resolve("a", families)

    asyncio.run(main())
    assert resolver.questions == [("a", "V4_ONLY"), ("a", "V6_ONLY"), ("a", "ALL")]


def test_answer_with_ttl_0_is_cached_for_a_second() -> None:
    resolver, clock = Asked(), StoppedClock()
    resolver.ttl_s = 0.0
    names = Names(resolver, clock)

    async def main() -> None:
        for passed_s, asked in ((0.0, 1), (0.9, 1), (1.1, 2)):
            clock.passed_s = passed_s
            await names.resolve("a", (4,))
            assert len(resolver.questions) == asked

    asyncio.run(main())


def test_failed_lookups_are_not_cached() -> None:
    resolver = Asked()
    names = Names(resolver, StoppedClock())

    async def main() -> None:
        for _ in range(2):
            with pytest.raises(ResolveFailed):
                await names.resolve("nobody", (4,))

    asyncio.run(main())
    assert len(resolver.questions) == 2


def test_least_recently_used_name_is_evicted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_MOST", 2)
    resolver = Asked()
    names = Names(resolver, StoppedClock())

    async def main() -> None:
        for name in ("a", "b", "a", "c", "a", "b"):
            await names.resolve(name, (4,))

    asyncio.run(main())
    assert [name for name, _ in resolver.questions] == ["a", "b", "c", "b"]


class Slow(Asked):
    """Answers once the test says so."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = asyncio.Event()

    async def resolve(self, name: str, family: str) -> Answer:
        self.questions.append((name, family))
        await self.gate.wait()
        if name == "nobody":
            raise ResolveFailed("cannot resolve nobody", absent=True)
        return Answer(("192.0.2.1",), self.ttl_s)


def test_connections_that_wait_for_a_name_share_one_query() -> None:
    async def main() -> None:
        resolver, clock = Slow(), StoppedClock()
        names = Names(resolver, clock)
        async with asyncio.TaskGroup() as tasks:
            found = [tasks.create_task(names.resolve("a", (4,))) for _ in range(100)]
            other = tasks.create_task(names.resolve("b", (4,)))
            await asyncio.sleep(0)
            clock.passed_s = resolver.ttl_s + 1  # the query takes longer than its answer is valid
            resolver.gate.set()
        assert {each.result() for each in (*found, other)} == {("192.0.2.1",)}
        assert sorted(resolver.questions) == [("a", "V4_ONLY"), ("b", "V4_ONLY")]

    asyncio.run(main())


def test_connections_that_share_a_query_share_its_failure() -> None:
    async def main() -> None:
        resolver = Slow()
        names = Names(resolver, StoppedClock())
        calls = asyncio.gather(*(names.resolve("nobody", (4,)) for _ in range(3)), return_exceptions=True)
        await asyncio.sleep(0)
        resolver.gate.set()
        errors = await calls
        assert [(type(each), str(each)) for each in errors] == 3 * [(ResolveFailed, "cannot resolve nobody")]
        assert all(isinstance(each, ResolveFailed) and each.absent for each in errors)
        assert len({id(each) for each in errors}) == 3
        assert len(resolver.questions) == 1
        with pytest.raises(ResolveFailed):
            await names.resolve("nobody", (4,))
        assert len(resolver.questions) == 2  # failures are not cached

    asyncio.run(main())


def test_another_connection_repeats_a_query_whose_connection_has_ended() -> None:
    async def main() -> None:
        resolver = Slow()
        names = Names(resolver, StoppedClock())
        async with asyncio.TaskGroup() as tasks:
            first, second, third = (tasks.create_task(names.resolve("a", (4,))) for _ in range(3))
            await asyncio.sleep(0)
            first.cancel()
            await asyncio.wait([first])
            resolver.gate.set()
        assert second.result() == third.result() == ("192.0.2.1",)
        assert len(resolver.questions) == 2

    asyncio.run(main())
