"""The reconciler: its rules as examples, then a machine of everything agent, starts and time may do."""

from __future__ import annotations

from dataclasses import dataclass

import hypothesis.strategies as st
import pytest
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from tests.generated import examples
from ztunnel.proxy.istio.zds.messages import AddPod, DeletePod, KeepPod, SnapshotSent, Unexpected
from ztunnel.proxy.istio.zds.pods import PodInfo, PodState, PodUid
from ztunnel.proxy.istio.zds.reconcile import (
    ANSWER_S,
    RETRY_S,
    SETTLE_S,
    Action,
    Answer,
    End,
    Generation,
    NetnsId,
    ReadyWithout,
    Reconciler,
    Retry,
    Start,
)

A, B = PodUid("uid-a"), PodUid("uid-b")
INFO = PodInfo(name="a", namespace="default", service_account="a")
OTHER_INFO = PodInfo(name="a", namespace="default", service_account="somebody-else")
NETNS, OTHER_NETNS = NetnsId(4, 1), NetnsId(4, 2)
REFUSED = "Address already in use"


def connected() -> Reconciler:
    pods = Reconciler()
    pods.connected()
    return pods


def with_pod(uid: PodUid = A, *, snapshot: bool = True) -> tuple[Reconciler, Generation]:
    """Return a connected reconciler with one running pod."""
    pods = connected()
    generation = add(pods, uid)
    assert pods.started(generation, 0) == [Answer()]
    if snapshot:
        assert pods.handle(SnapshotSent(), None, 0) == [Answer()]
    return pods, generation


def add(pods: Reconciler, uid: PodUid, netns: NetnsId = NETNS, now: float = 0) -> Generation:
    [action] = pods.handle(AddPod(uid, INFO), netns, now)
    assert isinstance(action, Start)
    assert (action.uid, action.info) == (uid, INFO)
    return action.generation


def states(pods: Reconciler) -> dict[PodUid, PodState]:
    return {uid: state for uid, _, _, state in pods.pods()}


def test_add_is_answered_when_the_proxy_listens() -> None:
    pods = connected()
    generation = add(pods, A)
    assert states(pods) == {A: PodState.PENDING}
    assert pods.started(generation, 1) == [Answer()]
    assert states(pods) == {A: PodState.UP}
    assert (pods.active, pods.pending) == (1, 0)


def test_repeated_add_succeeds_without_effect() -> None:
    pods, _ = with_pod()
    assert pods.handle(AddPod(A, INFO), NETNS, 1) == [Answer()]


@pytest.mark.parametrize(("info", "netns"), [(INFO, OTHER_NETNS), (OTHER_INFO, NETNS)])
def test_another_namespace_or_identity_replaces_the_proxy(info: PodInfo, netns: NetnsId) -> None:
    pods, old = with_pod()
    ended, started = pods.handle(AddPod(A, info), netns, 1)
    assert ended == End(old)
    assert isinstance(started, Start)
    assert started.info == info
    assert pods.started(started.generation, 1) == [Answer()]
    assert pods.started(old, 1) == []


def test_failed_start_is_answered_and_retried_every_five_seconds() -> None:
    pods = connected()
    generation = add(pods, A)
    assert pods.failed(generation, REFUSED, 1) == [Answer(f"failure to start proxy : {REFUSED}")]
    assert pods.errors() == {A: REFUSED}
    assert pods.next_due == 1 + RETRY_S
    assert pods.advance(5.9) == []
    assert pods.advance(6) == [Retry(generation)]
    assert pods.failed(generation, REFUSED, 7) == []
    assert pods.advance(7 + RETRY_S) == [Retry(generation)]
    assert pods.started(generation, 13) == []
    assert (pods.errors(), states(pods)) == ({}, {A: PodState.UP})


def test_add_of_a_pending_pod_tries_at_once() -> None:
    pods = connected()
    generation = add(pods, A)
    pods.failed(generation, REFUSED, 0)
    assert pods.handle(AddPod(A, INFO), NETNS, 1) == [Retry(generation)]
    assert pods.started(generation, 1) == [Answer()]


def test_slow_start_is_answered_in_time_and_continues() -> None:
    pods = connected()
    generation = add(pods, A)
    assert pods.next_due == ANSWER_S
    [answer] = pods.advance(ANSWER_S)
    assert isinstance(answer, Answer)
    assert answer.error.startswith("failure to start proxy : ")
    assert pods.handle(DeletePod(B), None, 4.5) == [Answer()]
    # Add again while it starts: nothing new begins, and this time it is soon enough.
    assert pods.handle(AddPod(A, INFO), NETNS, 5) == []
    assert pods.started(generation, 6) == [Answer()]


def test_delete_ends_the_proxy_and_an_unknown_pod_is_fine() -> None:
    pods, generation = with_pod()
    assert pods.handle(DeletePod(B), None, 1) == [Answer()]
    assert pods.handle(DeletePod(A), None, 1) == [End(generation), Answer()]
    assert states(pods) == {}


def test_delete_of_a_pending_pod_ends_its_retries() -> None:
    pods = connected()
    generation = add(pods, A)
    pods.failed(generation, REFUSED, 0)
    assert pods.handle(DeletePod(A), None, 1) == [End(generation), Answer()]
    assert pods.next_due is None
    assert pods.advance(100) == []


def test_delete_before_the_snapshot_takes_effect_with_it() -> None:
    pods, generation = with_pod(snapshot=False)
    assert pods.handle(DeletePod(A), None, 1) == [Answer()]
    assert states(pods) == {A: PodState.UP}
    assert pods.handle(SnapshotSent(), None, 1) == [End(generation), Answer()]


def test_add_delete_add_before_the_snapshot_keeps_the_proxy() -> None:
    pods, _ = with_pod(snapshot=False)
    pods.handle(DeletePod(A), None, 1)
    assert pods.handle(AddPod(A, INFO), NETNS, 1) == [Answer()]
    assert pods.handle(SnapshotSent(), None, 1) == [Answer()]


def test_snapshot_of_a_new_connection_ends_unnamed_pods() -> None:
    pods, first = with_pod(A)
    second = add(pods, B)
    pods.started(second, 0)
    pods.disconnected()
    pods.connected()
    assert pods.handle(KeepPod(B), None, 1) == [Answer()]
    assert pods.handle(SnapshotSent(), None, 1) == [End(first), Answer()]
    assert states(pods) == {B: PodState.UP}


@pytest.mark.parametrize("request_", [KeepPod(A), SnapshotSent()])
def test_snapshot_message_after_the_snapshot_is_refused_without_effect(
    request_: KeepPod | SnapshotSent,
) -> None:
    pods, _ = with_pod()
    with pytest.raises(Unexpected, match="snapshot"):
        pods.handle(request_, None, 1)
    assert states(pods) == {A: PodState.UP}
    pods.disconnected()
    pods.connected()
    assert pods.handle(request_, None, 2)[-1] == Answer()


def test_an_add_without_namespace_changes_nothing() -> None:
    pods = connected()
    with pytest.raises(Unexpected):
        pods.handle(AddPod(A, INFO), None, 0)
    assert states(pods) == {}


def test_ready_from_the_snapshot_until_the_agent_is_lost() -> None:
    pods = connected()
    assert not pods.ready
    pods.handle(SnapshotSent(), None, 0)
    assert pods.ready
    pods.disconnected()
    assert not pods.ready
    pods.connected()
    assert not pods.ready


def test_pending_pods_of_the_snapshot_delay_readiness() -> None:
    pods = connected()
    generation = add(pods, A)
    pods.failed(generation, REFUSED, 0)
    pods.handle(SnapshotSent(), None, 0)
    assert not pods.ready
    pods.advance(RETRY_S)
    pods.started(generation, 6)
    assert pods.ready


def test_deleting_the_last_pending_pod_makes_us_ready() -> None:
    pods = connected()
    pods.failed(add(pods, A), REFUSED, 0)
    pods.handle(SnapshotSent(), None, 0)
    pods.handle(DeletePod(A), None, 1)
    assert pods.ready


def test_pending_pod_delays_readiness_for_a_limited_time() -> None:
    pods = connected()
    pods.failed(add(pods, A), REFUSED, 0)
    pods.handle(SnapshotSent(), None, 10)
    pods.advance(RETRY_S)
    assert pods.next_due == 10 + SETTLE_S
    assert pods.advance(10 + SETTLE_S) == [ReadyWithout((A,))]
    assert pods.ready
    assert pods.pending == 1
    assert pods.advance(500) == []


def test_later_failure_of_a_pod_keeps_readiness() -> None:
    pods, _ = with_pod()
    pods.failed(add(pods, B), REFUSED, 100)
    assert pods.ready


def test_pending_pods_are_retried_without_an_agent() -> None:
    pods = connected()
    generation = add(pods, A)
    pods.failed(generation, REFUSED, 0)
    pods.disconnected()
    assert pods.advance(RETRY_S) == [Retry(generation)]


def test_start_finished_after_losing_the_agent_is_not_answered() -> None:
    pods = connected()
    generation = add(pods, A)
    pods.disconnected()
    assert pods.next_due is None
    assert pods.started(generation, 1) == []
    assert states(pods) == {A: PodState.UP}


@dataclass
class Modelled:
    info: PodInfo
    netns: NetnsId
    state: str  # starting, pending, up
    generation: Generation


uids = st.sampled_from([PodUid(f"uid-{letter}") for letter in "abcd"])
netnses = st.sampled_from([NetnsId(4, number) for number in range(3)])
infos = st.sampled_from([INFO, OTHER_INFO])


class ReconcilerMachine(RuleBasedStateMachine):
    """Against a model that is a dictionary and three flags."""

    def __init__(self) -> None:
        super().__init__()
        self.pods = Reconciler()
        self.now = 0.0
        self.model: dict[PodUid, Modelled] = {}
        self.named: set[PodUid] = set()
        self.online = self.complete = self.was_ready = False
        self.complete_at = 0.0
        self.asked_at: float | None = None
        self.ended: set[Generation] = set()

    def apply(self, actions: list[Action], starting: Modelled | None = None, uid: PodUid | None = None) -> None:
        for action in actions:
            match action:
                case Start(generation, who, info):
                    assert starting is not None
                    assert (who, info) == (uid, starting.info)
                    assert generation not in self.ended
                    starting.generation = generation
                case Retry(generation):
                    [pod] = [pod for pod in self.model.values() if pod.generation == generation]
                    assert pod.state == "pending"
                    pod.state = "starting"
                case End(generation):
                    assert generation not in self.ended
                    self.ended.add(generation)
                case Answer():
                    assert self.asked_at is not None, "an answer to nothing"
                    self.asked_at = None
                case ReadyWithout(late):
                    assert late == tuple(sorted(uid for uid, pod in self.model.items() if pod.state != "up"))
                    assert self.now >= self.complete_at + SETTLE_S
        if self.online and self.complete:
            up = all(pod.state == "up" for pod in self.model.values())
            self.was_ready |= up or self.now >= self.complete_at + SETTLE_S

    @precondition(lambda self: not self.online)
    @rule()
    def connect(self) -> None:
        self.pods.connected()
        self.online, self.named = True, set()

    @precondition(lambda self: self.online)
    @rule()
    def disconnect(self) -> None:
        self.pods.disconnected()
        self.online = self.complete = self.was_ready = False
        self.named, self.asked_at = set(), None

    @precondition(lambda self: self.online and self.asked_at is None)
    @rule(uid=uids, info=infos, netns=netnses)
    def add(self, uid: PodUid, info: PodInfo, netns: NetnsId) -> None:
        self.asked_at = self.now
        self.named |= set() if self.complete else {uid}
        old = self.model.get(uid)
        if old is not None and (old.info, old.netns) == (info, netns):
            self.apply(self.pods.handle(AddPod(uid, info), netns, self.now))
            assert (self.asked_at is None) == (old.state == "up")
            assert old.generation not in self.ended
            return
        new = self.model[uid] = Modelled(info, netns, "starting", Generation(0))
        self.apply(self.pods.handle(AddPod(uid, info), netns, self.now), new, uid)
        assert new.generation
        assert old is None or old.generation in self.ended

    @precondition(lambda self: self.online and self.asked_at is None and not self.complete)
    @rule(uid=uids)
    def keep(self, uid: PodUid) -> None:
        self.asked_at = self.now
        self.named.add(uid)
        self.apply(self.pods.handle(KeepPod(uid), None, self.now))

    @precondition(lambda self: self.online and self.asked_at is None)
    @rule(uid=uids)
    def delete(self, uid: PodUid) -> None:
        self.asked_at = self.now
        self.named.discard(uid)
        pod = self.model.get(uid)
        if pod is not None and (self.complete or pod.state != "up"):
            del self.model[uid]
        self.apply(self.pods.handle(DeletePod(uid), None, self.now))

    @precondition(lambda self: self.online and self.asked_at is None and not self.complete)
    @rule()
    def snapshot(self) -> None:
        self.asked_at = self.now
        self.complete, self.complete_at = True, self.now
        self.model = {uid: pod for uid, pod in self.model.items() if uid in self.named}
        self.apply(self.pods.handle(SnapshotSent(), None, self.now))

    @precondition(lambda self: self.online and self.asked_at is None and self.complete)
    @rule(request=st.one_of(st.builds(KeepPod, uids), st.just(SnapshotSent())))
    def out_of_place(self, request: KeepPod | SnapshotSent) -> None:
        with pytest.raises(Unexpected):
            self.pods.handle(request, None, self.now)

    def starting(self) -> list[Modelled]:
        return [pod for pod in self.model.values() if pod.state == "starting"]

    @precondition(lambda self: self.starting())
    @rule(data=st.data(), well=st.booleans())
    def start_ends(self, data: st.DataObject, well: bool) -> None:
        pod = data.draw(st.sampled_from(self.starting()))
        pod.state = "up" if well else "pending"
        self.apply(
            self.pods.started(pod.generation, self.now)
            if well
            else self.pods.failed(pod.generation, REFUSED, self.now)
        )

    @precondition(lambda self: self.ended)
    @rule(data=st.data())
    def news_of_the_dead(self, data: st.DataObject) -> None:
        generation = data.draw(st.sampled_from(sorted(self.ended)))
        assert self.pods.started(generation, self.now) == []
        assert self.pods.failed(generation, REFUSED, self.now) == []

    @rule(seconds=st.sampled_from([0.5, 3.9, 5.0, SETTLE_S]))
    def clock_advances(self, seconds: float) -> None:
        self.now += seconds
        self.apply(self.pods.advance(self.now))
        assert self.asked_at is None or self.now - self.asked_at < ANSWER_S
        due = self.pods.next_due
        assert due is None or due > self.now

    @invariant()
    def states_agree(self) -> None:
        expected = {
            uid: (pod.generation, pod.info, PodState.UP if pod.state == "up" else PodState.PENDING)
            for uid, pod in self.model.items()
        }
        assert {uid: (generation, info, state) for uid, generation, info, state in self.pods.pods()} == expected
        assert self.pods.pending == sum(pod.state != "up" for pod in self.model.values())
        assert self.pods.active + self.pods.pending == len(self.model)

    @invariant()
    def readiness_agrees(self) -> None:
        assert self.pods.ready == (self.online and self.was_ready)

    @invariant()
    def whatever_ended_is_nobodys(self) -> None:
        assert not self.ended & {pod.generation for pod in self.model.values()}

    @invariant()
    def nothing_is_remembered_for_nothing(self) -> None:
        assert set(self.pods._uids) == {pod.generation for pod in self.model.values()}
        assert self.pods._not_up <= set(self.model)


ReconcilerMachine.TestCase.settings = settings(max_examples=examples(80), stateful_step_count=50, deadline=None)
TestReconcilerMachine = ReconcilerMachine.TestCase
