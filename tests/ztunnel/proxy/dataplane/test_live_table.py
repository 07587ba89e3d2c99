"""The table of everything alive: ending, draining and judging lives, ownership, and reviews in slices."""

import asyncio
import logging
from collections.abc import Callable
from typing import Any

import pytest

from hbone.aio.poller import Poller
from ztunnel.proxy.dataplane.life_table import ALLOWED, TABLE, Action, Event, State, Verdict
from ztunnel.proxy.dataplane.live_table import SLICE, Life, Lives, LiveTable, all_emptied, cancels_current_task


class Judged(Life):
    """A life whose verdict is the test's."""

    def __init__(self, group: Lives[Any], verdict: Verdict = ALLOWED) -> None:
        self.ended: list[str] = []
        self.finished: list[str] = []
        self.left = 0
        self.asked = 0
        self.verdict: Verdict | Exception = verdict
        super().__init__(group, self.ended.append)

    def judge(self) -> Verdict:
        self.asked += 1
        if isinstance(self.verdict, Exception):
            raise self.verdict
        return self.verdict

    def open(self) -> None:
        def leave() -> None:
            self.left += 1

        self.opened(self.ended.append, leave=leave, finish=self.finished.append)


def group() -> Lives[Judged]:
    return Lives(LiveTable())


def test_first_end_reason_is_kept() -> None:
    life = Judged(group())
    life.end("policy")
    life.end("drain")
    assert life.ended == ["policy"]
    assert life.reason == "policy"


def test_life_that_opens_after_its_end_is_aborted_at_once() -> None:
    dial, relay = list[str](), list[str]()
    life = Life(group(), dial.append)
    life.end("policy")
    life.opened(relay.append)
    assert (dial, relay) == (["policy"], ["policy"])


def test_end_calls_only_the_current_abort() -> None:
    dial, relay = list[str](), list[str]()
    life = Life(group(), dial.append)
    life.opened(relay.append)
    life.end("drain")
    assert (dial, relay) == ([], ["drain"])


def test_close_releases_owned_resources_once_in_reverse_order() -> None:
    lives, released = group(), list[int]()
    life = Judged(lives)
    for number in range(3):
        life.own(lambda number=number: released.append(number))
    life.close()
    life.close()
    life.end("late")
    assert released == [2, 1, 0]
    assert (life.ended, life.reason, life.state) == ([], "", State.CLOSED)
    assert not len(lives)


def test_a_release_that_fails_still_unregisters_the_life() -> None:
    lives = group()
    life = Judged(lives)

    def broken() -> None:
        raise OSError

    life.own(broken)
    with pytest.raises(OSError):
        life.close()
    assert not len(lives)


def test_leave_request_during_a_handshake_takes_effect_on_open() -> None:
    life = Judged(group())
    life.leave()
    assert (life.left, life.state) == (0, State.ACCEPTED)
    life.open()
    assert (life.left, life.state) == (1, State.DRAINING)
    life.leave()
    assert life.left == 1


@pytest.mark.parametrize("event", Event)
@pytest.mark.parametrize("state", State)
def test_review_applies_the_action_of_the_table(state: State, event: Event) -> None:
    lives = group()
    life = Judged(lives, Verdict("denied"))
    if state in (State.OPEN, State.JOINED, State.DRAINING):
        life.open()
    if state is State.CLOSED:
        life.close()
    else:
        life.state = state
    lives.review(event, "because")
    told = {
        Action.KEEP: (0, [], [], False),
        Action.AWAIT_FACTS: (0, [], [], False),
        Action.JUDGE: (1, ["denied"], [], False),
        Action.LEAVE: (0, [], [], True),
        Action.FINISH: (0, [], ["because"], False),
        Action.CLOSE: (0, ["because"], [], False),
    }
    assert (life.asked, life.ended, life.finished, life.leaving) == told[TABLE[state, event]]


def test_a_life_that_cannot_be_judged_is_closed(caplog: pytest.LogCaptureFixture) -> None:
    lives = group()
    broken, other = Judged(lives), Judged(lives, Verdict("denied"))
    for life in (broken, other):
        life.open()
    broken.verdict = ValueError("a bug")
    with caplog.at_level(logging.ERROR):
        lives.review(Event.POLICIES)
    assert broken.reason == "connection closed: the evaluation of its policies failed"
    assert other.ended == ["denied"]
    assert "a bug" in caplog.text


@pytest.mark.parametrize("event", [Event.POLICIES, Event.DRAIN, Event.DEADLINE, Event.STOP])
def test_review_goes_on_after_a_life_whose_end_fails(event: Event, caplog: pytest.LogCaptureFixture) -> None:
    """An error must not let a review skip other connections, which a policy can have denied."""

    def fails(reason: str = "") -> None:
        raise MemoryError

    lives = group()
    broken, other = Judged(lives, Verdict("denied")), Judged(lives, Verdict("denied"))
    broken.opened(fails, leave=fails, finish=fails)
    other.open()
    lives.review(event, "over")
    assert (other.ended, other.finished, other.left) == {
        Event.POLICIES: (["denied"], [], 0),
        Event.DRAIN: ([], [], 1),
        Event.DEADLINE: ([], ["over"], 0),
        Event.STOP: (["over"], [], 0),
    }[event]
    assert "cannot be ended" in caplog.text


def test_a_life_that_is_ended_already_is_not_judged() -> None:
    lives = group()
    life = Judged(lives, Verdict("denied"))
    life.open()
    life.end("drain")
    lives.review(Event.POLICIES)
    assert (life.asked, life.ended) == (0, ["drain"])


def test_review_visits_only_concerned_lives() -> None:
    lives = group()
    one, two = Judged(lives, Verdict("denied")), Judged(lives, Verdict("denied"))
    for life in (one, two):
        life.open()
    lives.review(Event.POLICIES, concerned=lambda life: life is two)
    assert (one.ended, two.ended) == ([], ["denied"])


def run(body: Callable[[], Any]) -> None:
    asyncio.run(body())


def test_verdict_with_a_time_is_judged_again_then() -> None:
    async def body() -> None:
        lives, loop = group(), asyncio.get_running_loop()
        life = Judged(lives, Verdict(until_s=loop.time() + 0.05))
        life.open()
        lives.review(Event.POLICIES)
        # A later time of another verdict does not move the first one.
        life.verdict = Verdict(until_s=loop.time() + 100)
        lives.review(Event.POLICIES)
        assert (life.asked, life.ended) == (2, [])
        life.verdict = Verdict("its time is over")
        while not life.ended:
            await asyncio.sleep(0.01)
        assert life.asked == 3

    run(body)


def test_a_group_without_lives_has_no_timer() -> None:
    async def body() -> None:
        lives, loop = group(), asyncio.get_running_loop()
        life = Judged(lives, Verdict(until_s=loop.time() + 100))
        life.open()
        lives.review(Event.POLICIES)
        assert lives._timer is not None
        life.close()
        assert lives._timer is None

    run(body)


def test_the_loop_runs_between_the_slices_of_a_review() -> None:
    async def body() -> None:
        lives = group()
        many = [Judged(lives, Verdict("denied")) for _ in range(3 * SLICE + 1)]
        for life in many:
            life.open()
        steps: list[int] = []

        async def other() -> None:
            while len(steps) < 4:
                steps.append(sum(bool(life.ended) for life in many))
                await asyncio.sleep(0)

        lives.review(Event.POLICIES)
        await other()
        assert steps == [SLICE, 2 * SLICE, 3 * SLICE, 3 * SLICE + 1]

    run(body)


def test_reviews_reach_a_life_in_order() -> None:
    """A drain that follows a long review of policies does not overtake it."""

    async def body() -> None:
        table = LiveTable()
        lives: Lives[Judged] = Lives(table)
        many = [Judged(lives) for _ in range(2 * SLICE)]
        for life in many:
            life.open()
        many[-1].verdict = Verdict("denied")
        lives.review(Event.POLICIES)
        table.review(Event.DEADLINE, "drained")
        await table.reviewed()
        assert (many[-1].ended, many[-1].finished) == (["denied"], [])
        assert all(life.finished == ["drained"] for life in many[:-1])

    run(body)


def test_a_life_that_ends_others_while_it_is_reviewed_does_not_disturb_the_review() -> None:
    lives = group()
    first, second = Judged(lives, Verdict("denied")), Judged(lives, Verdict("denied"))
    first.opened(lambda reason: (second.close(), lives.review(Event.STOP, "stop")))
    second.open()
    lives.review(Event.POLICIES)
    assert (first.reason, second.ended) == ("denied", [])


def test_a_waiting_life_is_ended_by_cancelling_its_task() -> None:
    async def main() -> list[str]:
        lives, seen = group(), list[str]()
        poller = Poller()

        async def connection() -> None:
            Judged(lives).aborts_by(cancels_current_task(poller))
            try:
                await asyncio.get_running_loop().create_future()
            except asyncio.CancelledError as error:
                seen.append(str(error))

        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(connection())
            await asyncio.sleep(0)
            lives.review(Event.STOP, "pod removed")
        poller.close()
        return seen

    assert asyncio.run(main()) == ["pod removed"]


def test_waiting_for_an_empty_group_ends_with_the_last_life() -> None:
    async def body() -> None:
        lives = group()
        one, two = Judged(lives), Judged(lives)
        async with asyncio.TaskGroup() as tasks:
            waiting = tasks.create_task(lives.emptied())
            await asyncio.sleep(0)
            one.close()
            await asyncio.sleep(0)
            assert not waiting.done()
            two.close()

    run(body)


def test_waiting_for_several_groups_follows_a_life_from_one_to_another() -> None:
    async def body() -> None:
        table = LiveTable()
        arriving, live = Lives[Judged](table), Lives[Judged](table)
        first = Judged(arriving)
        async with asyncio.TaskGroup() as tasks:
            waiting = tasks.create_task(all_emptied(live, arriving))
            await asyncio.sleep(0)
            second = Judged(live)
            first.close()
            for _ in range(3):
                await asyncio.sleep(0)
            assert not waiting.done()
            second.close()

    run(body)


def test_the_table_is_all_groups_and_a_dissolved_group_is_in_none() -> None:
    table = LiveTable()
    here, there = Lives[Judged](table), Lives[Judged](table)
    one, two = Judged(here), Judged(there)
    for life in (one, two):
        life.open()
    assert list(table) == [one, two]
    here.dissolve()
    table.review(Event.STOP, "stop")
    assert (len(table), one.ended, two.ended) == (1, [], ["stop"])
