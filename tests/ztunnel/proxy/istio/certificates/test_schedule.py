"""When certificates are fetched: by values, and by a machine that holds any history to the rules."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from tests.generated import examples
from xds.model.identity import SpiffeId
from ztunnel.proxy.istio.certificates.schedule import Fetch, Phase, Priority, Schedule

A, B, C, D = (SpiffeId("td", "ns", name) for name in "abcd")
DAY = 86400.0
NOW = 1_000_000.0


def names(fetches: list[Fetch]) -> list[SpiffeId]:
    return [fetch.identity for fetch in fetches]


def test_fetches_start_in_order_of_priority() -> None:
    schedule = Schedule(concurrency=1)
    schedule.want(A, Priority.BACKGROUND)
    schedule.want(B, Priority.WARMUP)
    schedule.want(C, Priority.REAL_TIME)
    schedule.want(D, Priority.WARMUP)
    order = []
    for _ in range(4):
        (fetch,) = schedule.start(NOW)
        order.append(fetch.identity)
        assert schedule.next_due_s(NOW) is None
        schedule.succeeded(fetch, NOW, NOW + DAY, NOW, 0.0)
    assert order == [C, B, D, A]


def test_later_request_can_only_raise_the_priority() -> None:
    schedule = Schedule(concurrency=1)
    for identity in (A, B, C):
        schedule.want(identity, Priority.WARMUP)
    schedule.want(C, Priority.REAL_TIME)
    schedule.want(C, Priority.WARMUP)
    assert names(schedule.start(NOW)) == [C]


def test_concurrent_fetches_are_limited() -> None:
    schedule = Schedule(concurrency=2)
    for identity in (A, B, C):
        schedule.want(identity, Priority.WARMUP)
    first, _ = schedule.start(NOW)
    assert schedule.start(NOW) == []
    schedule.failed(first, "no", NOW, 0.5)
    assert names(schedule.start(NOW)) == [C]


@pytest.mark.parametrize(("jitter", "share"), [(0.0, 0.5), (0.5, 0.475), (1.0, 0.45)])
def test_renewal_is_due_at_half_lifetime_or_slightly_earlier(jitter: float, share: float) -> None:
    schedule = Schedule()
    schedule.want(A, Priority.WARMUP)
    (fetch,) = schedule.start(NOW)
    schedule.succeeded(fetch, NOW - 120, NOW - 120 + DAY, NOW, jitter)
    assert schedule.next_due_s(NOW) == pytest.approx(NOW - 120 + DAY * share)
    assert schedule.start(NOW + DAY * 0.44) == []
    assert names(schedule.start(NOW + DAY * 0.5)) == [A]


def test_backoff_doubles_to_its_maximum_and_resets_after_success() -> None:
    schedule = Schedule()
    schedule.want(A, Priority.REAL_TIME)
    now_s, waits = NOW, []
    for _ in range(11):
        (fetch,) = schedule.start(now_s)
        schedule.failed(fetch, "no", now_s, 0.5)
        due_s = schedule.next_due_s(now_s)
        assert due_s is not None
        waits.append(round(due_s - now_s, 3))
        now_s = due_s
    assert waits == [1, 2, 4, 8, 16, 32, 64, 128, 150, 150, 150]
    (fetch,) = schedule.start(now_s)
    schedule.succeeded(fetch, now_s, now_s + 600, now_s, 0.0)
    now_s += 300
    (fetch,) = schedule.start(now_s)
    schedule.failed(fetch, "no", now_s, 1.0)
    assert schedule.next_due_s(now_s) == pytest.approx(now_s + 1.2)


def test_failed_renewal_is_retried_at_expiry_at_the_latest() -> None:
    schedule = Schedule()
    schedule.want(A, Priority.REAL_TIME)
    (fetch,) = schedule.start(NOW)
    schedule.succeeded(fetch, NOW, NOW + 100, NOW, 0.0)
    now_s = NOW + 99.5
    (fetch,) = schedule.start(now_s)
    schedule.failed(fetch, "away", now_s, 0.5)
    assert schedule.phase(A, now_s) is Phase.AVAILABLE
    assert schedule.next_due_s(now_s) == NOW + 100
    assert schedule.phase(A, NOW + 100) is Phase.UNAVAILABLE
    assert schedule.error(A) == "away"


def test_an_authority_that_answers_again_is_asked_at_once() -> None:
    schedule = Schedule()
    for identity in (A, B, C):
        schedule.want(identity, Priority.REAL_TIME)
    first, second, third = schedule.start(NOW)
    schedule.failed(first, "away", NOW, 0.5, unreachable=True)
    schedule.failed(second, "no", NOW, 0.5)
    schedule.succeeded(third, NOW, NOW + DAY, NOW, 0.0)
    assert [schedule.is_refused(identity) for identity in (A, B, C, D)] == [False, True, False, False]
    schedule.authority_answered()
    assert names(schedule.start(NOW)) == [A]


def test_renewal_on_request_is_due_at_once_and_then_backs_off() -> None:
    schedule = Schedule()
    for identity in (A, B):
        schedule.want(identity, Priority.REAL_TIME)
    for fetch in schedule.start(NOW):
        schedule.succeeded(fetch, NOW, NOW + DAY, NOW, 0.0)
    schedule.renew(A)
    (fetch,) = schedule.start(NOW)
    assert fetch.identity == A
    schedule.renew(A)
    assert schedule.start(NOW) == [], "one fetch at a time"
    schedule.failed(fetch, "revoked", NOW, 0.5)
    assert schedule.start(NOW) == []
    assert names(schedule.start(NOW + 1)) == [A]
    schedule.renew(C)
    assert schedule.phase(C, NOW) is None


def test_result_of_a_forgotten_fetch_is_ignored() -> None:
    schedule = Schedule()
    schedule.want(A, Priority.REAL_TIME)
    (old,) = schedule.start(NOW)
    schedule.forget(A)
    assert schedule.phase(A, NOW) is None
    assert not schedule.succeeded(old, NOW, NOW + DAY, NOW, 0.0)
    schedule.want(A, Priority.WARMUP)
    (new,) = schedule.start(NOW)
    assert not schedule.failed(old, "late", NOW, 0.0)
    assert schedule.phase(A, NOW) is Phase.INITIALIZING
    assert schedule.succeeded(new, NOW, NOW + DAY, NOW, 0.0)


def test_clock_ahead_of_the_authority_causes_no_renewal_loop() -> None:
    schedule = Schedule()
    schedule.want(A, Priority.REAL_TIME)
    (fetch,) = schedule.start(NOW)
    schedule.succeeded(fetch, NOW - 0.9 * DAY, NOW + 0.1 * DAY, NOW, 0.0)
    assert schedule.start(NOW + 59) == []
    assert names(schedule.start(NOW + 60)) == [A]


def test_a_clock_set_back_does_not_stop_retries() -> None:
    schedule = Schedule()
    schedule.want(A, Priority.REAL_TIME)
    schedule.want(B, Priority.REAL_TIME)
    first, second = schedule.start(NOW)
    schedule.failed(first, "no", NOW, 0.5)
    schedule.forget(second.identity)
    schedule.want(B, Priority.REAL_TIME)
    assert set(names(schedule.start(NOW - 3600))) == {A, B}


class Histories(RuleBasedStateMachine):
    """Any order of wishes, outcomes and clock changes."""

    CONCURRENCY = 2

    def __init__(self) -> None:
        super().__init__()
        self.schedule = Schedule(concurrency=self.CONCURRENCY)
        self.now_s = NOW
        self.wanted: dict[SpiffeId, Priority] = {}
        self.running: list[Fetch] = []
        self.abandoned: list[Fetch] = []
        self.expires: dict[SpiffeId, float] = {}
        self.errors: dict[SpiffeId, str] = {}

    @rule(identity=st.sampled_from([A, B, C, D]), priority=st.sampled_from(Priority))
    def want(self, identity: SpiffeId, priority: Priority) -> None:
        self.schedule.want(identity, priority)
        self.wanted[identity] = min(priority, self.wanted.get(identity, priority))

    @rule(identity=st.sampled_from([A, B, C, D]))
    def forget(self, identity: SpiffeId) -> None:
        self.schedule.forget(identity)
        self.abandoned += [fetch for fetch in self.running if fetch.identity == identity]
        self.running = [fetch for fetch in self.running if fetch.identity != identity]
        for table in (self.wanted, self.expires, self.errors):
            table.pop(identity, None)

    @rule(seconds=st.sampled_from([-7200.0, 0.1, 1.0, 31.0, 200.0, 2000.0]))
    def clock(self, seconds: float) -> None:
        self.now_s += seconds

    @rule()
    def start(self) -> None:
        free = self.CONCURRENCY - len(self.running)
        busy = {fetch.identity for fetch in self.running}
        fresh = {i for i in self.wanted if i not in busy and i not in self.expires and i not in self.errors}
        begun = self.schedule.start(self.now_s)
        started = [fetch.identity for fetch in begun]
        assert len(started) == len(set(started)) <= free
        assert not busy & set(started)
        assert set(started) <= set(self.wanted)
        ranks = [self.wanted[identity] for identity in started]
        assert ranks == sorted(ranks)
        for identity in fresh - set(started):  # what never was fetched waits for room only
            assert len(started) == free
            assert all(rank <= self.wanted[identity] for rank in ranks)
        self.running += begun

    @precondition(lambda self: self.running)
    @rule(data=st.data(), life=st.sampled_from([3.0, 100.0, 5000.0]), jitter=st.floats(0, 0.99))
    def succeed(self, data: st.DataObject, life: float, jitter: float) -> None:
        fetch = self.running.pop(data.draw(st.integers(0, len(self.running) - 1)))
        assert self.schedule.succeeded(fetch, self.now_s, self.now_s + life, self.now_s, jitter)
        self.expires[fetch.identity] = self.now_s + life
        self.errors.pop(fetch.identity, None)
        self.wanted[fetch.identity] = Priority.BACKGROUND

    @precondition(lambda self: self.running)
    @rule(data=st.data(), jitter=st.floats(0, 0.99), unreachable=st.booleans())
    def fail(self, data: st.DataObject, jitter: float, unreachable: bool) -> None:
        fetch = self.running.pop(data.draw(st.integers(0, len(self.running) - 1)))
        assert self.schedule.failed(fetch, "away", self.now_s, jitter, unreachable=unreachable)
        assert self.schedule.is_refused(fetch.identity) is not unreachable
        self.errors[fetch.identity] = "away"
        self.wanted[fetch.identity] = Priority.BACKGROUND

    @rule()
    def answered(self) -> None:
        self.schedule.authority_answered()

    @precondition(lambda self: self.abandoned)
    @rule()
    def late_outcome(self) -> None:
        assert not self.schedule.succeeded(self.abandoned.pop(), self.now_s, self.now_s + DAY, self.now_s, 0.0)

    @invariant()
    def a_certificate_is_kept_until_it_expires(self) -> None:
        for identity in (A, B, C, D):
            phase = self.schedule.phase(identity, self.now_s)
            if identity not in self.wanted:
                assert phase is None
            elif self.expires.get(identity, 0.0) > self.now_s:
                assert phase is Phase.AVAILABLE
            elif identity in self.errors:
                assert phase is Phase.UNAVAILABLE
            else:
                assert phase is Phase.INITIALIZING

    @invariant()
    def nothing_wanted_is_ever_left_without_a_next_step(self) -> None:
        due_s = self.schedule.next_due_s(self.now_s)
        waiting = set(self.wanted) - {fetch.identity for fetch in self.running}
        if waiting and len(self.running) < self.CONCURRENCY:
            assert due_s is not None
            assert due_s >= self.now_s
        else:
            assert due_s is None


TestHistories = Histories.TestCase
TestHistories.settings = settings(max_examples=examples(150), stateful_step_count=40, deadline=None)
