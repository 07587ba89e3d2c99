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
