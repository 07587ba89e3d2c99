"""The price of a unit of work on slow and fast cores, with a simulated core as the clock."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hbone import frames
from hbone.aio.core_speed import unit_s
from hbone.cost_budget import HIGHEST_PRICE, UNIT_S, UnitPrice
from hbone.engine import Engine
from hbone.errors import ErrorCode
from hbone.events import ConnectionFailed, DataReceived
from hbone.flow import PeerQuota
from hbone.frame_costs import RECORD_BYTES
from hbone.frames import frame
from hbone.limits import Limits
from tests.hbone.wire import OPENING, request, server, take

#: A tenth of the default rates and sizes, on cores that are ten times slower than real ones: the same course of
#: events, with a tenth of the frames to read.
_UNIT_S = 1e-5  # a unit with its decryption, read and delivery, at a price of 1
_LIMITS = Limits(work_burst=20_000, work_rate=25_000.0, slice_units=100)


def small(stream_id: int = 1, size: int = 1) -> bytes:
    return frame(frames.DATA, 0, stream_id, bytes(size))


def opened(price: UnitPrice, *streams: int, limits: Limits = _LIMITS) -> Engine:
    """A server with tunnels, at a price."""
    engine = server(limits=limits, max_concurrent_streams=2000)
    engine.follow_price(price)
    for stream_id in streams or (1,):
        engine.receive_data((b"" if stream_id > 1 else OPENING) + request(stream_id))
        engine.respond(stream_id, 200)
        take(engine)
    return engine


@dataclass
class Core:
    """One core that serves one connection, in simulated time; an idle core jumps to the next event.

    Attributes:
        slowness: the time for a unit, relative to the reference.
        now_s, busy_s: the time, and the part of it in which the core worked.
        paused_s: the sum of pauses.
        frames: the number of frames read.
    """

    engine: Engine
    slowness: float
    now_s: float = 0.0
    busy_s: float = 0.0
    paused_s: float = 0.0
    frames: int = 0

    def read(self, data: bytes) -> ConnectionFailed | None:
        """Process ``data`` in slices as a connection does, with a pause after each slice that needs one."""
        engine = self.engine
        rest: bytes = data
        while rest or engine.unparsed:
            units = 0
            for event in engine.receive_data(rest, self.now_s, engine.slice_units):
                if isinstance(event, ConnectionFailed):
                    return event
                if isinstance(event, DataReceived):
                    units += len(event.chunks)
                    engine.acknowledge(event.stream_id, event.size)
            rest = b""
            take(engine)
            self.frames += units
            self.busy_s += units * self.slowness * _UNIT_S
            self.now_s += units * self.slowness * _UNIT_S
            pause_s = engine.pause_s and engine.overdrawn_s(self.now_s)
            self.paused_s += pause_s
            self.now_s += pause_s
        return None


def core(slowness: float, *streams: int, follows: bool = True) -> Core:
    """A core with tunnels, whose price was measured as a connection of another peer would have it measured."""
    price = UnitPrice((lambda: slowness * UNIT_S) if follows else None)
    work(price, 20_000)
    return Core(opened(price, *streams), slowness)


def work(price: UnitPrice, units: int) -> None:
    """Do work of other connections of the process."""
    other = server()
    other.follow_price(price)
    other.charge_records(units * RECORD_BYTES)
    other.receive_data(b"", 0.0)


# The price


def test_a_price_is_measured_after_work_and_not_before() -> None:
    measured: list[float] = []

    def measure() -> float:
        measured.append(0.0)
        return 3 * UNIT_S

    price = UnitPrice(measure)
    work(price, 10_000)
    assert price.value == 1.0
    work(price, 1)
    assert price.value == pytest.approx(3.0)
    work(price, 100_000)
    assert len(measured) == 1
    work(price, 1)
    assert len(measured) == 2


def test_later_measurements_change_it_by_half() -> None:
    values = iter((2.0, 4.0, 4.0))
    price = UnitPrice(lambda: next(values) * UNIT_S)
    seen = []
    for _ in range(3):
        work(price, 300_000)
        seen.append(price.value)
    assert seen == pytest.approx([2.0, 3.0, 3.5])


@pytest.mark.parametrize("wrong", [0.0, -1.0, math.nan, -math.inf])
def test_a_measurement_without_meaning_changes_nothing(wrong: float) -> None:
    values = iter((4 * UNIT_S, wrong))
    price = UnitPrice(lambda: next(values))
    work(price, 300_000)
    work(price, 300_000)
    assert price.value == pytest.approx(4.0)


@given(st.lists(st.tuples(st.integers(0, 1_000_000), st.floats())))
def test_a_price_stays_within_its_bounds_whatever_is_measured(steps: list[tuple[int, float]]) -> None:
    now = [0.0]
    price = UnitPrice(lambda: now[0])
    for units, now[0] in steps:
        work(price, units)
        assert 1.0 <= price.value <= HIGHEST_PRICE


def test_this_core_has_a_speed() -> None:
    """Between a hundredth of the reference's time and a thousand times as much: no mistake of scale."""
    assert UNIT_S / 100 < unit_s() < UNIT_S * 1000


# Charges


def test_work_is_charged_at_the_price_and_refunded_at_it() -> None:
    price = UnitPrice(lambda: 4 * UNIT_S)
    work(price, 20_000)
    engine = opened(price, limits=Limits(work_burst=1000, work_rate=1000.0))
    engine.receive_data(b"", 1.0)
    engine.receive_data(small() * 300, 1.0)
    assert engine.pause_s == pytest.approx(0.2)
    engine.receive_data(request(3), 1.0)
    assert engine.pause_s > 1.0
    engine.respond(3, 200)
    assert engine.overdrawn_s(1.0) < 0.25


def test_all_connections_of_a_peer_are_charged_at_the_price() -> None:
    price = UnitPrice(lambda: 4 * UNIT_S)
    work(price, 20_000)
    share = PeerQuota(Limits(peer_work_burst=1000, peer_work_rate=1000.0))
    engine = opened(price)
    engine.share(share)
    engine.receive_data(small() * 500, 1.0)
    assert engine.pause_s == pytest.approx(1.0)


@pytest.mark.parametrize(("slowness", "most"), [(0.2, 100), (1.0, 100), (4.0, 25), (100.0, 12)])
def test_a_slice_takes_the_same_time_on_any_core(slowness: float, most: int) -> None:
    engine = core(slowness).engine
    assert engine.slice_units == most
    engine.receive_data(small() * 3000, 1.0, engine.slice_units)
    assert engine.unparsed
    assert engine.slice_units == most


def test_slices_follow_a_price_that_changes() -> None:
    price = UnitPrice(lambda: 4 * UNIT_S)
    engine = opened(price)
    assert engine.slice_units == 100
    work(price, 20_000)
    engine.receive_data(small() * 3000, 1.0, engine.slice_units)
    assert engine.slice_units == 25


# Slow and fast cores. An attacker always has a full buffer for us.


def attacked(attacked_core: Core, until_s: float) -> ConnectionFailed | None:
    while attacked_core.now_s < until_s:
        end = attacked_core.read(_FLOOD)
        if end is not None:
            return end
    return None


_FLOOD = small() * 1000


@pytest.mark.parametrize(("slowness", "within_s"), [(0.3, 4.0), (1.0, 4.0), (2.0, 8.0), (4.0, 17.0), (8.0, 45.0)])
def test_an_attacker_is_ended_and_held_to_a_quarter_of_the_core_until_then(
    slowness: float, within_s: float
) -> None:
    attack = core(slowness)
    end = attacked(attack, within_s)
    assert end is not None
    assert end.code == ErrorCode.ENHANCE_YOUR_CALM
    burst_s = 0.2
    assert attack.busy_s <= burst_s + 0.25 * attack.now_s + 0.01


@pytest.mark.parametrize("slowness", [2.0, 4.0])
def test_an_attacker_takes_no_more_of_a_slow_core_than_of_a_fast_one(slowness: float) -> None:
    """At a fixed price it took half of a core that is twice as slow, and all of one that is four times as slow."""
    fixed, following = core(slowness, follows=False), core(slowness)
    attacked(fixed, 3.0)
    attacked(following, 3.0)
    assert fixed.busy_s > 0.24 * slowness * fixed.now_s
    assert following.busy_s < 0.2 + 0.26 * following.now_s


# What honest peers do on a slow core


def offered(honest: Core, seconds: float, every_s: float, pieces: Callable[[int], bytes], number: int) -> None:
    """Offer ``number`` frames in each interval. Frames of a time in which we did not read arrive together."""
    sent, begun_s = 0, honest.now_s
    while honest.now_s < begun_s + seconds:
        due = (int((honest.now_s - begun_s) / every_s) + 1) * number - sent
        if due:
            assert honest.read(pieces(due)) is None
            sent += due
        else:
            honest.now_s += every_s / 10


def test_interactive_streams_are_never_paused_on_a_slow_core() -> None:
    honest = core(8.0)
    offered(honest, 30.0, 0.1, lambda due: small() * due, 10)
    assert honest.frames >= 2900
    assert honest.paused_s == 0.0


def test_a_thousand_streams_are_never_paused_on_a_slow_core() -> None:
    """Two hundred times a second a hundred of them have something, here a tenth of that."""
    streams = range(1, 2001, 2)
    honest = core(8.0, *streams)
    honest.now_s = 1.0  # their requests were charged at the beginning
    offered(honest, 10.0, 0.05, lambda due: b"".join(small(streams[n % 1000], 100) for n in range(due)), 100)
    assert honest.frames >= 19_000
    assert honest.paused_s == 0.0


@pytest.mark.parametrize("slowness", [4.0, 8.0])
def test_bursts_of_an_honest_peer_are_slowed_down_by_a_slow_core_but_never_end_it(slowness: float) -> None:
    """80,000 small frames every ten seconds, here a tenth: no pause on the reference, up to two seconds here."""
    fast, honest = core(1.0), core(slowness)
    for each in (fast, honest):
        offered(each, 100.0, 10.0, lambda due: small() * due, 8000)
    assert fast.paused_s == 0.0
    assert honest.paused_s > 1.5


def test_a_peer_is_not_ended_for_a_core_that_becomes_slow_for_some_time() -> None:
    """50,000 small frames a second, here a tenth, are four tenths of a core that other work has made slow."""
    slowness = [1.0]
    price = UnitPrice(lambda: slowness[0] * UNIT_S)
    honest = Core(opened(price), 1.0)
    paused_s = []
    for slowness[0] in (1.0, 8.0, 1.0):
        for _ in range(3):
            work(price, 100_001)  # work of other connections
        honest.slowness = slowness[0]
        before_s = honest.paused_s
        offered(honest, 20.0, 0.01, lambda due: small() * due, 50)
        paused_s.append(honest.paused_s - before_s)
    assert paused_s[0] == 0.0
    assert paused_s[1] > 5.0
    assert paused_s[2] < 1.0


def test_a_clock_that_jumps_ends_no_honest_connection() -> None:
    honest = core(4.0)
    for now_s in (1000.0, 5.0, 1e9, 1e9 + 0.001, 0.0, 2e9):
        honest.now_s = now_s
        assert honest.read(small() * 500) is None
        assert honest.paused_s == 0.0
