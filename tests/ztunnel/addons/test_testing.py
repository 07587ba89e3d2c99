"""Tests of the kit with which third-party addons are tested."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest

from ztunnel.addons import Addon, Deny, Direction, Facts, MeshSummary, Metric, Record, Verdict, Workload
from ztunnel.addons.testing import AddonError, HookFault, Playbook, inbound, outbound, record, workload


class Gate(Addon):
    @dataclass(frozen=True)
    class Options:
        allowed: tuple[str, ...] = ("frontend",)

    def configured(self, options: Options) -> None:
        self.allowed = options.allowed
        self.told: list[object] = []

    def connecting(self, facts: Facts) -> Verdict | None:
        return None if facts.source.name in self.allowed else Deny("stranger")

    async def accepting(self, facts: Facts) -> Deny | None:
        await asyncio.sleep(0)
        return Deny("stranger") if facts.source.name == "stranger" else None

    def opened(self, facts: Facts) -> None:
        self.told.append(facts)

    def closed(self, record: Record) -> None:
        self.told.append(record)

    def mesh_changed(self, summary: MeshSummary) -> None:
        self.told.append(summary)

    def metrics(self) -> Iterator[Metric]:
        yield Metric("told", "Values", {(): float(len(self.told))})


def test_a_playbook_calls_hooks() -> None:
    play = Playbook(Gate, allowed=("frontend", "backend"))
    play.connecting(outbound("backend.shop"), expect=None)
    play.connecting(outbound("stranger"), expect=Deny)
    play.accepting(inbound("stranger"), expect=Deny("stranger"))
    play.accepting(expect=None)
    play.opened()
    play.closed()
    play.refused()
    play.mesh_changed()
    assert [dict(each.values) for each in play.metrics()] == [{(): 3.0}]
    assert isinstance(play.addon, Gate)
    assert play.slowest_us > 0
    play.done()


def test_another_verdict_than_the_expected_one_fails_the_test() -> None:
    with pytest.raises(HookFault, match=r"connecting said Deny\(reason='stranger'\), expected None"):
        Playbook(Gate).connecting(outbound("stranger"), expect=None)


class Bad(Addon):
    time_limit_s = 0.01

    def connecting(self, facts: Facts) -> Any:
        if facts.source_port == 2:
            raise SystemExit(3)
        return 1 / 0 if facts.source_port == 1 else True

    async def accepting(self, facts: Facts) -> Deny | None:
        await asyncio.sleep(60)
        return None


def test_what_would_suspend_an_addon_fails_the_test() -> None:
    play = Playbook(Bad)
    with pytest.raises(HookFault, match=r"raised .*ZeroDivisionError"):
        play.connecting(outbound(source_port=1))
    with pytest.raises(HookFault, match=r"raised .*SystemExit: 3"):
        play.connecting(outbound(source_port=2))
    with pytest.raises(HookFault, match="returned a value of type bool"):
        play.connecting()
    with pytest.raises(HookFault, match=r"did not answer within 0\.01 s"):
        play.accepting()


def test_wrong_options_fail_the_test() -> None:
    with pytest.raises(AddonError, match="option allow: not an option of this addon; did you mean allowed"):
        Playbook(Gate, allow="x")


def test_facts_are_built_from_names() -> None:
    facts = outbound("a.one", workload("b", labels={"version": "v2"}), source_port=5)
    assert facts.source == Workload("a", "one", "a", "node1", "", {"app": "a"})
    assert facts.destination.labels == {"version": "v2"}
    assert (facts.source_identity, facts.source_port) == ("spiffe://cluster.local/ns/one/sa/a", 5)
    assert facts.service == "b.default.svc.cluster.local"
    assert inbound().direction is Direction.INBOUND
    assert record(bytes_sent=1).bytes_sent == 1
