"""When the controller applies its table and checks open connections."""

import asyncio
import socket
from collections.abc import Callable
from ipaddress import ip_address
from typing import Any, TypeVar, cast

import pytest

from tests.limits import WAIT_S
from tests.ztunnel.policy.calico.cluster import compiled, global_policy
from tproxy.aio.table import KeptTable
from tproxy.conntrack import Flow
from tproxy.errors import KernelRefused
from tproxy.expressions import TCP
from tproxy.packets import Decision, Interpreter, Packet
from ztunnel.kube.objects import Changes
from ztunnel.policy.netpol import controller as module
from ztunnel.policy.netpol.controller import Controller, end_connections
from ztunnel.policy.netpol.table_builder import TableBuilder
from ztunnel.policy.policysync.problems import LoggedEvents

T = TypeVar("T")
LONG_S = 10 * WAIT_S


class Source:
    """All objects at once, and no further change."""

    def __init__(self) -> None:
        self._told = False

    async def next(self) -> Changes:
        if self._told:
            await asyncio.Event().wait()
        self._told = True
        return Changes({}, synced=True)


class Table:
    """A kernel's table. ``answers`` has the number of steps of each transaction, or None for a refusal. The last
    answer repeats.
    """

    def __init__(self, *answers: int | None) -> None:
        self.disturbed = asyncio.Event()
        self.applied = 0
        self._answers = answers

    async def in_thread(self, work: Callable[[], T]) -> T:
        return work()

    async def apply(self, wanted: object) -> tuple[object, ...]:
        answer = self._answers[min(self.applied, len(self._answers) - 1)]
        self.applied += 1
        if answer is None:
            raise KernelRefused("to change the table", 12)
        return ("step",) * answer


@pytest.mark.parametrize(("clause", "judged"), [("", 2), ("source: {ports: [1000]}", 5)])
def test_open_connections_that_no_rule_tells_apart_are_judged_once(
    monkeypatch: pytest.MonkeyPatch, clause: str, judged: int
) -> None:
    rule = f"{{action: Allow, protocol: TCP, destination: {{ports: [8080]}}, {clause}}}"
    policy = global_policy("closed", f"{{selector: all(), types: [Ingress], ingress: [{rule}]}}")
    made = TableBuilder().build(compiled(policy), "n1")
    ports = [(source, 8080) for source in (1000, 1001, 1002)] + [(1003, 8081), (1004, 8081)]
    flows = [
        Flow(socket.AF_INET, ip_address("10.0.0.1"), ip_address("10.0.0.2"), TCP, source, destination, b"")
        for source, destination in ports
    ]
    seen: list[Packet] = []
    judge = Interpreter.judge

    def judging(self: Interpreter, packet: Packet) -> Decision:
        seen.append(packet)
        return judge(self, packet)

    monkeypatch.setattr(Interpreter, "judge", judging)
    monkeypatch.setattr(module, "local_addresses", lambda _: set())
    monkeypatch.setattr(module, "forget_flows", lambda unwanted, _: [each for each in flows if unwanted(each)])
    refused = flows[1:] if clause else flows[3:]
    assert end_connections(made) == refused
    assert len(seen) == judged


def running(table: Table) -> Controller:
    return Controller(Source(), cast(KeptTable, table), "n1", LoggedEvents())


def test_open_connections_are_checked_after_a_start_that_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    checked = asyncio.Event()

    def end_connections(*_: Any) -> list[Any]:
        checked.set()
        return []

    monkeypatch.setattr(module, "end_connections", end_connections)

    async def main() -> None:
        async with asyncio.timeout(WAIT_S), asyncio.TaskGroup() as group:
            controller = group.create_task(running(Table(0)).run(), name="controller")
            await checked.wait()
            controller.cancel()

    asyncio.run(main())


class Clock:
    """Replaces the module ``time`` in the controller."""

    def __init__(self) -> None:
        self.now_s = 10 * LONG_S

    def monotonic(self) -> float:
        return self.now_s


def test_a_refusal_while_a_check_of_connections_is_due_is_not_retried_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = Clock()
    monkeypatch.setattr(module, "time", clock)
    # Longer than this test waits, so that only the events below let the controller continue.
    monkeypatch.setattr(module, "_RETRY_S", LONG_S)
    monkeypatch.setattr(module, "_JUDGE_S", LONG_S)
    monkeypatch.setattr(module, "end_connections", lambda *_: [])
    table = Table(1, 1, None)
    controller = running(table)

    async def until(check: Callable[[], bool]) -> None:
        while not check():
            await asyncio.sleep(0)

    async def main() -> None:
        async with asyncio.timeout(WAIT_S), asyncio.TaskGroup() as group:
            task = group.create_task(controller.run(), name="controller")
            await until(lambda: controller.counts.applied == 1)
            table.disturbed.set()
            await until(lambda: controller.counts.applied == 2)  # too early for the second check
            clock.now_s += 2 * LONG_S
            table.disturbed.set()
            await until(lambda: controller.counts.failed == 1)
            for _ in range(100):
                await asyncio.sleep(0)
            assert table.applied == 3
            task.cancel()

    asyncio.run(main())


def test_it_is_ready_while_the_kernel_has_the_table_of_all_objects(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_RETRY_S", LONG_S)
    monkeypatch.setattr(module, "_JUDGE_S", LONG_S)
    monkeypatch.setattr(module, "end_connections", lambda *_: [])
    table = Table(1, None)
    controller = running(table)
    assert controller.unready({}) == "not all objects have been read yet"
    assert controller.unready({"pods": "forbidden"}) == "pods: forbidden"

    async def until(check: Callable[[], bool]) -> None:
        while not check():
            await asyncio.sleep(0)

    async def main() -> None:
        async with asyncio.timeout(WAIT_S), asyncio.TaskGroup() as group:
            task = group.create_task(controller.run(), name="controller")
            await until(lambda: controller.counts.applied == 1)
            assert controller.unready({}) == ""
            # The last known objects are enforced while the API server is unreachable.
            assert controller.unready({"pods": "unreachable"}) == ""
            table.disturbed.set()
            await until(lambda: controller.counts.failed == 1)
            assert "to change the table" in controller.unready({})
            task.cancel()

    asyncio.run(main())
