"""One timer for many: who is looked at, when, and who is not."""

from __future__ import annotations

import asyncio
import itertools
from collections import Counter
from collections.abc import Callable

from hbone.aio.poller import Poller
from hbone.aio.rounds import _AT_ONCE, Round
from tests.hbone.aio.harness import polling, run


async def until(true: Callable[[], object]) -> None:
    while not true():
        await asyncio.sleep(0.005)


class Seen:
    """Notes its looks; ``then`` says what one does besides."""

    def __init__(self, then: Callable[[Seen], None] | None = None) -> None:
        self.at: list[float] = []
        self._then = then

    def look(self) -> None:
        self.at.append(asyncio.get_running_loop().time())
        if self._then is not None:
            self._then(self)


def test_each_is_looked_at_once_per_interval_from_when_it_joined() -> None:
    async def main() -> None:
        loop = asyncio.get_running_loop()
        every = Round(loop, 0.08)
        began, members = [], [Seen() for _ in range(3)]
        for member in members:
            began.append(loop.time())
            every.join(member, loop.time())
            await asyncio.sleep(0.03)
        await until(lambda: all(len(member.at) >= 3 for member in members))
        every.close()
        for start, member in zip(began, members, strict=True):
            moments = [start, *member.at]
            assert all(later - earlier >= 0.079 for earlier, later in itertools.pairwise(moments))

    run(main)


def test_who_has_left_is_not_looked_at_and_an_empty_round_has_no_timer() -> None:
    async def main() -> None:
        loop = asyncio.get_running_loop()
        every = Round(loop, 0.02)
        stays, leaves = Seen(), Seen()
        every.join(leaves, loop.time())
        every.join(stays, loop.time())
        every.leave(leaves)
        every.leave(leaves)
        await until(lambda: stays.at)
        assert not leaves.at
        every.leave(stays)
        await until(lambda: every._timer is None)
        assert not len(every)
        before = len(stays.at)
        every.join(stays, loop.time())
        await until(lambda: len(stays.at) > before)
        every.close()

    run(main)


def test_a_look_may_end_its_member_and_others_and_fail() -> None:
    async def main() -> None:
        loop = asyncio.get_running_loop()
        failures: list[object] = []
        loop.set_exception_handler(lambda _, context: failures.append(context["exception"]))
        every = Round(loop, 0.02)

        def end_both(member: Seen) -> None:
            every.leave(member)
            every.leave(victim)

        def fail(member: Seen) -> None:
            every.leave(member)
            raise ZeroDivisionError

        first, victim, broken, last = Seen(end_both), Seen(), Seen(fail), Seen()
        for member in (first, victim, broken, last):
            every.join(member, loop.time())
        await until(lambda: len(last.at) >= 2)
        assert [len(first.at), len(victim.at), len(broken.at)] == [1, 0, 1]
        assert [type(failure) for failure in failures] == [ZeroDivisionError]
        every.close()

    run(main)


def test_many_at_once_leave_room_for_others() -> None:
    async def main() -> None:
        loop = asyncio.get_running_loop()
        turns: Counter[int] = Counter()
        turn = 0
        every = Round(loop, 0.02)
        members = [Seen(lambda _: turns.update([turn])) for _ in range(3 * _AT_ONCE)]
        for member in members:
            every.join(member, loop.time())
        while not all(member.at for member in members):
            turn += 1
            await asyncio.sleep(0)
        every.close()
        assert max(turns.values()) <= _AT_ONCE

    run(main)


def test_a_poller_has_one_per_interval_and_ends_them() -> None:
    async def main() -> None:
        member = Seen()
        with polling() as poller:
            assert isinstance(poller, Poller)
            assert poller.round(0.02) is poller.round(0.02)
            assert poller.round(0.02) is not poller.round(0.03)
            poller.round(0.02).join(member, poller.now_s)
        await asyncio.sleep(0.05)
        assert not member.at

    run(main)
