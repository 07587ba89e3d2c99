"""The pool's decisions: rules as examples, then a machine of everything that can happen."""

from __future__ import annotations

import hypothesis.strategies as st
import pytest
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from hbone.errors import PoolClosed, TunnelBroken
from hbone.pool import (
    Action,
    Assign,
    CancelDial,
    Close,
    ConnectionId,
    Dial,
    Fail,
    PoolFull,
    PoolSettings,
    PoolState,
    WaiterId,
)
from tests.generated import examples

BOOM = OSError("boom")


def test_one_dial_for_all_who_wait() -> None:
    pool = PoolState(PoolSettings())
    first, actions = pool.request("k", 0)
    assert actions == [Dial("k", first)]
    second, actions = pool.request("k", 0)
    assert actions == []
    connection, actions = pool.dialled("k", None, 0)
    assert actions == [Assign(first, connection), Assign(second, connection)]


def test_an_adopted_connection_has_been_idle_for_as_long_as_elsewhere() -> None:
    pool = PoolState(PoolSettings(idle_timeout_s=300.0, spare_timeout_s=20.0))
    first = pool.adopted("k", None, 0, 1000, idle_s=290)
    assert pool.idle_s(first, 1000) == 290
    spare = pool.adopted("k", None, 0, 1000, idle_s=5)
    older = pool.adopted("k", None, 0, 1000, idle_s=15)
    busy = pool.adopted("other", None, 1, 1000, idle_s=0)
    assert pool.idle_s(busy, 1000) == 0
    assert pool.next_deadline_s() == 1005
    assert pool.advance(1005) == [Close(older)]
    assert pool.advance(1010) == [Close(first)]
    assert pool.advance(1300) == [Close(spare)]


def test_an_adopted_connection_takes_part_with_the_streams_that_it_has() -> None:
    pool = PoolState(PoolSettings(max_streams_per_connection=3, max_tunnels_per_connection=5))
    connection = pool.adopted("k", None, 2, 0)
    assert (pool.streams, pool.idle) == (2, 0)
    assert pool.reserve("k") == connection
    assert pool.reserve("k") is None  # full
    for _ in range(3):
        pool.released(connection, 0)
    assert pool.idle == 1
    assert pool.reserve("k") == connection
    assert pool.reserve("k") == connection
    assert pool.reserve("k") is None  # five tunnels in all
    idle = PoolState(PoolSettings(idle_timeout_s=10))
    connection = idle.adopted("k", 100, 0, 0)
    assert idle.next_deadline_s() == 10
    assert idle.advance(11) == [Close(connection)]
    closed = PoolState(PoolSettings())
    closed.close(BOOM)
    connection = closed.adopted("k", None, 1, 0)
    assert closed.released(connection, 0) == [Close(connection)]


def test_a_failed_dial_is_told_to_one_and_the_next_tries() -> None:
    pool = PoolState(PoolSettings())
    first, _ = pool.request("k", 0)
    second, _ = pool.request("k", 0)
    assert pool.dial_failed("k", BOOM, 0) == [Fail(first, BOOM), Dial("k", second)]
    assert pool.dial_failed("k", BOOM, 0) == [Fail(second, BOOM)]
    assert pool.waiters == 0


def test_a_limit_learned_later_counts_from_then_on() -> None:
    pool = PoolState(PoolSettings())
    waiters = [pool.request("k", 0)[0] for _ in range(3)]
    connection, actions = pool.dialled("k", None, 0)
    assert actions == [Assign(waiter, connection) for waiter in waiters]
    assert pool.limit_learned(connection, 2, 0) == []
    fourth, actions = pool.request("k", 0)
    assert actions == [Dial("k", fourth)]
    assert pool.released(connection, 0) == []
    assert pool.released(connection, 0) == [Assign(fourth, connection)]


def test_a_connection_that_has_carried_its_number_takes_no_more() -> None:
    pool = PoolState(PoolSettings(max_tunnels_per_connection=2))
    waiters = [pool.request("k", 0)[0] for _ in range(3)]
    first, actions = pool.dialled("k", None, 0)
    assert actions == [Assign(waiters[0], first), Assign(waiters[1], first), Dial("k", waiters[2])]
    second, actions = pool.dialled("k", None, 0)
    assert actions == [Assign(waiters[2], second)]
    assert pool.released(first, 0) == []
    assert pool.released(first, 0) == [Close(first)]
    assert pool.released(second, 0) == []
    assert pool.reserve("k") == second
    assert pool.reserve("k") is None
    assert pool.released(second, 0) == [Close(second)]


def test_giving_up_hands_the_dial_on_or_cancels_it() -> None:
    pool = PoolState(PoolSettings())
    first, _ = pool.request("k", 0)
    second, _ = pool.request("k", 0)
    assert pool.cancel_wait(first, 0) == []
    assert pool.dial_failed("k", BOOM, 0) == [Fail(second, BOOM)]
    third, _ = pool.request("k", 0)
    assert pool.cancel_wait(third, 0) == [CancelDial("k")]
    assert pool.cancel_wait(third, 0) == []


def test_draining_connections_finish_their_streams() -> None:
    pool = PoolState(PoolSettings())
    pool.request("k", 0)
    connection, _ = pool.dialled("k", None, 0)
    assert pool.draining(connection, 0) == []
    waiter, actions = pool.request("k", 0)
    assert actions == [Dial("k", waiter)]
    assert pool.released(connection, 0) == [Close(connection)]


def test_idle_connections_go_after_their_time_or_the_oldest_first() -> None:
    pool = PoolState(PoolSettings(idle_timeout_s=10, max_idle=2))
    connections = []
    for key in range(3):
        pool.request(key, key)
        connections.append(pool.dialled(key, None, key)[0])
    assert pool.released(connections[1], 5) == []
    assert pool.released(connections[0], 6) == []
    assert pool.released(connections[2], 7) == [Close(connections[1])]
    assert pool.next_deadline_s() == 16
    assert pool.advance(15.9) == []
    assert pool.advance(16) == [Close(connections[0])]


def test_what_a_peak_left_idle_beside_another_goes_soon() -> None:
    pool = PoolState(PoolSettings(max_streams_per_connection=1, idle_timeout_s=100, spare_timeout_s=10))
    connections = []
    for second in range(3):
        pool.request("k", second)
        connections.append(pool.dialled("k", None, second)[0])
    oldest, middle, newest = connections
    for connection, at in ((newest, 20), (oldest, 21), (middle, 22)):
        assert pool.released(connection, at) == []
    assert pool.next_deadline_s() == 30
    assert pool.advance(30) == [Close(newest)]
    assert pool.reserve("k") == oldest
    assert pool.released(oldest, 30.5) == []  # an idle time starts again with each use
    assert pool.advance(31) == []
    assert pool.advance(40.5) == [Close(oldest)]
    assert pool.next_deadline_s() == 122
    assert pool.advance(122) == [Close(middle)]


def test_the_last_connection_of_a_peer_is_not_spare() -> None:
    pool = PoolState(PoolSettings(max_streams_per_connection=1, idle_timeout_s=100, spare_timeout_s=10))
    busy, spare = [(pool.request("k", 0), pool.dialled("k", None, 0)[0])[1] for _ in range(2)]
    pool.released(spare, 1)
    pool.lost(busy, 2)
    assert pool.advance(11) == []
    assert pool.next_deadline_s() == 101
    assert pool.advance(101) == [Close(spare)]


def test_a_peer_that_allows_no_streams_is_not_dialled_for_ever() -> None:
    pool = PoolState(PoolSettings())
    pool.request("k", 0)
    connection, actions = pool.dialled("k", 0, 0)
    assert isinstance(actions[0], Fail)
    assert isinstance(actions[0].error, TunnelBroken)
    assert actions[1:] == [Close(connection)]


def test_pool_limits_and_close() -> None:
    pool = PoolState(PoolSettings(max_waiters=1))
    waiter, _ = pool.request("k", 0)
    with pytest.raises(PoolFull):
        pool.request("k", 0)
    error = PoolClosed("over")
    assert pool.close(error) == [CancelDial("k"), Fail(waiter, error)]
    with pytest.raises(PoolClosed):
        pool.request("k", 0)
    connection, actions = pool.dialled("k", None, 0)
    assert actions == [Close(connection)]


class PoolMachine(RuleBasedStateMachine):
    """Random actions of peers and time. A model of the shell's connections checks every result."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.pool = PoolState(
            PoolSettings(
                max_streams_per_connection=3, max_idle=2, idle_timeout_s=5, spare_timeout_s=2, max_waiters=20
            )
        )
        self.waiting: dict[WaiterId, str] = {}
        self.dials: set[object] = set()
        self.open: dict[ConnectionId, str] = {}
        self.limit: dict[ConnectionId, int] = {}
        self.streams: dict[ConnectionId, int] = {}
        self.drained: set[ConnectionId] = set()
        self.idle_since: dict[ConnectionId, float] = {}
        self.over = False

    def apply(self, actions: list[Action]) -> None:
        for action in actions:
            match action:
                case Dial(key, waiter):
                    assert not self.over
                    assert key not in self.dials, "two dials for one key"
                    assert self.waiting[waiter] == key
                    self.dials.add(key)
                case Assign(waiter, connection):
                    assert self.waiting.pop(waiter) == self.open[connection]
                    assert connection not in self.drained
                    assert self.streams[connection] < self.limit[connection], "overfull"
                    self.streams[connection] += 1
                case Fail(waiter, _):
                    del self.waiting[waiter]
                case Close(connection):
                    assert self.streams.pop(connection) == 0, "closed under its streams"
                    del self.open[connection]
                    self.drained.discard(connection)
                case CancelDial(key):
                    self.dials.remove(key)

    @precondition(lambda self: not self.over and len(self.waiting) < 20)
    @rule(key=st.sampled_from("ab"))
    def request(self, key: str) -> None:
        expected = WaiterId(self.pool._next_waiter)
        self.waiting[expected] = key
        waiter, actions = self.pool.request(key, self.now)
        assert waiter == expected
        self.apply(actions)

    @precondition(lambda self: not self.over)
    @rule(key=st.sampled_from("ab"))
    def reserve(self, key: str) -> None:
        room = [
            connection
            for connection, at in self.open.items()
            if at == key and connection not in self.drained and self.streams[connection] < self.limit[connection]
        ]
        connection = self.pool.reserve(key)
        if key in self.waiting.values():
            assert connection is None, "overtook one that waits"
        else:
            assert connection == min(room, default=None)
        if connection is not None:
            self.streams[connection] += 1

    @precondition(lambda self: self.waiting)
    @rule(data=st.data())
    def cancel_wait(self, data: st.DataObject) -> None:
        waiter = data.draw(st.sampled_from(sorted(self.waiting)))
        del self.waiting[waiter]
        self.apply(self.pool.cancel_wait(waiter, self.now))

    @precondition(lambda self: self.dials)
    @rule(data=st.data(), limit=st.one_of(st.none(), st.integers(0, 5)))
    def dial_succeeds(self, data: st.DataObject, limit: int | None) -> None:
        key = data.draw(st.sampled_from(sorted(map(str, self.dials))))
        self.dials.remove(key)
        expected = ConnectionId(self.pool._next_connection)
        self.open[expected], self.streams[expected] = key, 0
        self.limit[expected] = 3 if limit is None else min(3, limit)
        self.idle_since[expected] = self.now
        connection, actions = self.pool.dialled(key, limit, self.now)
        assert connection == expected
        self.apply(actions)

    @precondition(lambda self: self.dials)
    @rule(data=st.data())
    def dial_fails(self, data: st.DataObject) -> None:
        key = data.draw(st.sampled_from(sorted(map(str, self.dials))))
        self.dials.remove(key)
        self.apply(self.pool.dial_failed(key, BOOM, self.now))

    @precondition(lambda self: any(self.streams.values()))
    @rule(data=st.data())
    def stream_ends(self, data: st.DataObject) -> None:
        busy = sorted(connection for connection, count in self.streams.items() if count)
        connection = data.draw(st.sampled_from(busy))
        self.streams[connection] -= 1
        self.idle_since[connection] = self.now
        self.apply(self.pool.released(connection, self.now))

    @precondition(lambda self: self.open)
    @rule(data=st.data(), limit=st.one_of(st.none(), st.integers(0, 5)))
    def settings_arrive(self, data: st.DataObject, limit: int | None) -> None:
        connection = data.draw(st.sampled_from(sorted(self.open)))
        self.limit[connection] = 3 if limit is None else min(3, limit)
        if limit == 0:
            self.drained.add(connection)  # for good: whether the peer will have it again is not waited for
        self.apply(self.pool.limit_learned(connection, limit, self.now))

    @precondition(lambda self: self.open)
    @rule(data=st.data())
    def goaway(self, data: st.DataObject) -> None:
        connection = data.draw(st.sampled_from(sorted(self.open)))
        self.drained.add(connection)
        self.apply(self.pool.draining(connection, self.now))

    @precondition(lambda self: self.open)
    @rule(data=st.data())
    def connection_is_lost(self, data: st.DataObject) -> None:
        connection = data.draw(st.sampled_from(sorted(self.open)))
        del self.open[connection], self.streams[connection]
        self.drained.discard(connection)
        self.apply(self.pool.lost(connection, self.now))

    @rule(seconds=st.floats(0, 6))
    def clock_advances(self, seconds: float) -> None:
        self.now += seconds
        self.apply(self.pool.advance(self.now))
        resting = [
            key
            for connection, key in self.open.items()
            if not self.streams[connection] and self.now - self.idle_since[connection] >= 2
        ]
        assert len(resting) == len(set(resting)), "spare ones stayed"

    @precondition(lambda self: not self.over)
    @rule()
    def close(self) -> None:
        self.over = True
        self.apply(self.pool.close(PoolClosed("over")))

    @invariant()
    def numbers_agree(self) -> None:
        assert self.pool.connections == len(self.open)
        assert self.pool.streams == sum(self.streams.values())
        assert self.pool.waiters == len(self.waiting)
        assert self.pool.dialling == len(self.dials)
        assert self.pool.idle == sum(not count for count in self.streams.values()) <= 2

    @invariant()
    def whoever_waits_has_a_dial(self) -> None:
        assert set(self.waiting.values()) <= set(map(str, self.dials))

    @invariant()
    def nothing_is_remembered_for_nothing(self) -> None:
        assert set(self.pool._keys) == set(self.open.values()) | set(map(str, self.dials))


PoolMachine.TestCase.settings = settings(max_examples=examples(60), stateful_step_count=40, deadline=None)
TestPoolMachine = PoolMachine.TestCase
