"""When the poller polls again instead of sleeping."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from random import Random

import pytest

from hbone.aio.spin import _PERIOD_S, Spin, SpinSettings

LIMIT_S = 200e-6
EVENT = [(7, 1)]
WORK_S = 40e-6  # of a turn
WAKE_S = 40e-6  # of a processor, to wake up
REQUEST_BYTES = 1000


class Machine:
    """The clocks of one process, and what epoll reports."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, now_s: float = 1000.0) -> None:
        self.now_s = now_s
        self.cpu_s = 0.0
        self.poll_s = 1e-6
        self.event_at_s = float("inf")
        monkeypatch.setattr(time, "perf_counter", lambda: self.now_s)
        monkeypatch.setattr(time, "thread_time", lambda: self.cpu_s)
        # Beside busy processes a real one lasts milliseconds, and here are a million.
        monkeypatch.setattr(os, "sched_yield", lambda: None)
        self.spin = Spin(SpinSettings(limit_s=LIMIT_S))

    def poll(self, timeout: float, maxevents: int) -> list[tuple[int, int]]:
        self.now_s += self.poll_s
        self.cpu_s += self.poll_s
        return EVENT if self.now_s >= self.event_at_s else []

    def works(self) -> bool:
        """Take one turn. Return whether the poller spins afterwards."""
        self.now_s += WORK_S
        self.cpu_s += WORK_S
        self.spin.worked(self.now_s, REQUEST_BYTES)
        return self.spin.on

    def spins(self) -> None:
        while self.spin.on and not self.spin.poll(self, 16):  # type: ignore[arg-type]
            pass

    def waits(self, event_at_s: float) -> None:
        """Spin and sleep until an event."""
        self.event_at_s = event_at_s
        self.spins()
        if self.now_s < event_at_s:
            self.now_s = event_at_s + WAKE_S
            self.cpu_s += WAKE_S

    def serves(self, rest: Callable[[bool], float], until_s: float) -> float:
        """Handle events that arrive ``rest(spins)`` seconds after each turn. Return the share of turns that
        spun.
        """
        spun = turns = 0
        while self.now_s < until_s:
            spins = self.works()
            spun += spins
            turns += 1
            self.waits(self.now_s + rest(spins))
        return spun / turns

    def paced(self, rest: Callable[[], float], until_s: float) -> float:
        """Handle events that arrive at a fixed rate, ``rest()`` seconds apart. Return the processor time per
        event.
        """
        cpu_s, events, due_s = self.cpu_s, 0, self.now_s
        while self.now_s < until_s:
            self.works()
            events += 1
            due_s += rest()
            self.waits(max(due_s, self.now_s))
        return (self.cpu_s - cpu_s) / events


def closed_loop(spins: bool) -> float:
    """A client waits for each answer, and the proxy at the other end spins when this one does."""
    return 45e-6 if spins else 110e-6


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    return Machine(monkeypatch)


def trying(machine: Machine) -> Machine:
    """Return the machine while it spins."""
    while not machine.works():
        machine.waits(machine.now_s + closed_loop(False))
    return machine


def test_a_spin_ends_at_its_limit(machine: Machine) -> None:
    assert not machine.spin.on
    trying(machine).event_at_s = float("inf")
    began_s = machine.now_s
    machine.spins()
    assert LIMIT_S <= machine.now_s - began_s < LIMIT_S + 2e-5
    assert not machine.spin.on


def test_a_closed_loop_is_spun_after_a_trial(machine: Machine) -> None:
    machine.serves(closed_loop, until_s=1000.25)
    assert machine.serves(closed_loop, until_s=1010) > 0.98


def test_a_client_that_waits_may_cost_twice_the_processor_time_if_it_gains_enough(machine: Machine) -> None:
    def rest(spins: bool) -> float:  # 2.2 times the processor time per turn, and 0.6 of the elapsed time
        return 130e-6 if spins else 205e-6

    machine.serves(rest, until_s=1001)
    assert machine.serves(rest, until_s=1010) > 0.9


def test_a_client_that_hardly_gains_may_not_cost_more_processor_time(machine: Machine) -> None:
    def rest(spins: bool) -> float:  # 2.2 times the processor time per turn, and 0.8 of the elapsed time
        return 130e-6 if spins else 135e-6

    machine.serves(rest, until_s=1001)
    assert machine.serves(rest, until_s=1010) < 0.1


@pytest.mark.parametrize("every_s", [100e-6, 200e-6, 1e-3, 10e-3])
def test_requests_at_a_fixed_rate_cost_what_they_would_cost_to_sleep(machine: Machine, every_s: float) -> None:
    machine.paced(lambda: every_s, until_s=1002)
    asleep_s = WORK_S + WAKE_S
    assert machine.paced(lambda: every_s, until_s=1030) < 1.05 * asleep_s


@pytest.mark.parametrize("every_s", [200e-6, 1e-3])
def test_requests_at_random_times_cost_what_they_would_cost_to_sleep(machine: Machine, every_s: float) -> None:
    rng = Random(4)
    machine.paced(lambda: rng.expovariate(1 / every_s), until_s=1002)
    asleep_s = WORK_S + WAKE_S
    assert machine.paced(lambda: rng.expovariate(1 / every_s), until_s=1100) < 1.1 * asleep_s


def test_spinning_stops_when_it_no_longer_gains(machine: Machine) -> None:
    machine.serves(closed_loop, until_s=1002)
    assert machine.spin.on
    machine.paced(lambda: 120e-6, until_s=1004)
    assert machine.paced(lambda: 120e-6, until_s=1010) < 1.05 * (WORK_S + WAKE_S)


def test_another_load_is_tried_soon(machine: Machine) -> None:
    machine.paced(lambda: 400e-6, until_s=1020)  # the next trial would be seconds away
    machine.serves(closed_loop, until_s=1020.5)
    assert machine.serves(closed_loop, until_s=1022) > 0.98


def test_processes_of_one_machine_try_at_the_same_time(monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[set[int]] = []
    for phase_s in (0.0, 0.05):
        machine, moments, was_on = Machine(monkeypatch, 1000 + phase_s), set(), False
        while machine.now_s < 1030:
            if machine.works() and not was_on:
                moments.add(int(machine.now_s / _PERIOD_S))
                assert machine.now_s % _PERIOD_S < 0.005
            was_on = machine.spin.on
            machine.waits(machine.now_s + 300e-6)
        tried.append({moment for moment in moments if moment * _PERIOD_S > 1010})
    assert tried[0] == tried[1] != set()


def test_a_poll_that_finds_work_at_once_ends_the_wait(machine: Machine) -> None:
    trying(machine).event_at_s = machine.now_s
    assert machine.spin.poll(machine, 16) == EVENT  # type: ignore[arg-type]


def test_spinning_pauses_longer_each_time_the_processor_is_preempted(machine: Machine) -> None:
    machine.serves(closed_loop, until_s=1002)
    holds: list[float] = []
    for _ in range(4):
        while not machine.works():
            machine.waits(machine.now_s + closed_loop(False))
        machine.poll_s = 5e-3
        machine.event_at_s = float("inf")
        machine.spins()
        machine.poll_s = 1e-6
        held_from = machine.now_s
        while not machine.works():
            machine.waits(machine.now_s + closed_loop(False))
        holds.append(machine.now_s - held_from)
    assert holds[0] >= 0.005
    assert holds == sorted(holds)
