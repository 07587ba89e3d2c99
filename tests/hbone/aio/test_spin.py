"""When the poller asks again instead of sleeping."""

from __future__ import annotations

import os
import time

import pytest

from hbone.aio.spin import Spin, SpinSettings

LIMIT_S = 100e-6
EVENT = [(7, 1)]


class Machine:
    """A clock that moves with every poll, and what epoll reports."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now_s = 1000.0
        self.poll_s = 1e-6
        self.events: list[list[tuple[int, int]]] = []
        monkeypatch.setattr(time, "perf_counter", lambda: self.now_s)
        # Beside busy processes a real one lasts milliseconds, and here are a million.
        monkeypatch.setattr(os, "sched_yield", lambda: None)
        self.spin = Spin(SpinSettings(limit_s=LIMIT_S))

    def poll(self, timeout: float, maxevents: int) -> list[tuple[int, int]]:
        self.now_s += self.poll_s
        return self.events.pop(0) if self.events else []

    def spun_s(self) -> float:
        """Spin until it ends; how long."""
        began = self.now_s
        while self.spin.on and not self.spin.poll(self, 16):  # type: ignore[arg-type]
            pass
        return self.now_s - began


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    return Machine(monkeypatch)


def test_it_sleeps_until_there_was_work_and_again_after_its_limit(machine: Machine) -> None:
    assert not machine.spin.on
    machine.spin.worked(1, 1000)
    assert LIMIT_S <= machine.spun_s() < 2 * LIMIT_S
    assert not machine.spin.on


def test_work_found_begins_anew(machine: Machine) -> None:
    for _ in range(1000):
        machine.spin.worked(1, 1000)
        machine.events = [[], [], EVENT]
        assert machine.spun_s() < LIMIT_S
        assert machine.spin.on


def test_spins_that_find_nothing_become_rare(machine: Machine) -> None:
    spins = 0
    for _ in range(10_000):  # a trickle: one event, then silence
        machine.now_s += 0.01
        machine.spin.worked(1, 1000)
        spins += machine.spin.on
        machine.spun_s()
    assert spins < 60


def test_spins_in_vain_have_a_budget(machine: Machine) -> None:
    began_s, vain_s = machine.now_s, 0.0
    for _ in range(5_000):  # each request is answered at once, and then there is silence
        machine.now_s += 1e-3
        machine.spin.worked(1, 1000)
        machine.events = [[], EVENT]
        machine.spun_s()
        machine.spin.worked(1, 1000)
        vain_s += machine.spun_s()
    assert vain_s > 0.02 * (machine.now_s - began_s)  # most of the budget was there to be used
    assert vain_s < 0.04 * (machine.now_s - began_s)


def test_many_busy_sockets_are_served_in_batches(machine: Machine) -> None:
    for _ in range(100):
        machine.spin.worked(8, 1000)
    assert not machine.spin.on
    for _ in range(100):
        machine.spin.worked(1, 1000)
    assert machine.spin.on


def test_work_that_was_found_late_shows_a_contended_processor(machine: Machine) -> None:
    machine.spin.worked(1, 1000)
    machine.poll_s = 5e-3
    machine.events = [EVENT]
    assert machine.spin.poll(machine, 16) == EVENT  # type: ignore[arg-type]
    machine.spin.worked(1, 1000)
    assert not machine.spin.on


def test_who_moves_much_sleeps(machine: Machine) -> None:
    machine.spin.worked(1, 1000)
    assert machine.spin.on
    machine.spin.worked(1, 1 << 20)
    assert not machine.spin.on
    machine.spin.worked(1, 30)  # bulk has small turns too
    assert not machine.spin.on
    for _ in range(100):
        machine.spin.worked(1, 1000)
    assert machine.spin.on


def test_a_processor_taken_away_ends_it_for_longer_each_time(machine: Machine) -> None:
    holds: list[float] = []
    for _ in range(4):
        machine.spin.worked(1, 1000)
        assert machine.spin.on
        machine.poll_s = 5e-3
        machine.spun_s()
        assert not machine.spin.on
        machine.poll_s = 1e-6
        held_from = machine.now_s
        while not machine.spin.on:
            machine.now_s += 1e-3
            machine.spin.worked(1, 1000)
        holds.append(machine.now_s - held_from)
    assert holds == sorted(holds)
    assert holds[-1] > 2 * holds[0]
