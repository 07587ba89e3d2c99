"""Calls to the kernel for the pods that kubelet can probe: how many, and with which pods."""

import asyncio
from collections.abc import Iterable
from ipaddress import ip_address

import pytest

from tproxy.inpod import Probed
from ztunnel.node.agent import probed_pods
from ztunnel.node.agent.kernel_thread import KernelThread
from ztunnel.node.agent.probed_pods import ProbedPods


def pod(uid: str, address: str = "10.0.0.1") -> Probed:
    return Probed(uid=uid, addresses=(ip_address(address),))


@pytest.fixture
def applied(monkeypatch: pytest.MonkeyPatch) -> list[list[str] | None]:
    """The uids of each change of the table; None for its removal. A pod named ``bad`` is refused."""
    calls: list[list[str] | None] = []

    def apply(pods: Iterable[Probed], user: int) -> None:
        uids = [each.uid for each in pods]
        calls.append(uids)
        assert user == 7
        if "bad" in uids:
            raise OSError(16, "Device or resource busy")

    monkeypatch.setattr(probed_pods, "apply_probes", apply)
    monkeypatch.setattr(probed_pods, "remove_probes", lambda: calls.append(None))
    return calls


def test_each_change_is_applied_once_and_changes_during_an_update_together(
    applied: list[list[str] | None],
) -> None:
    async def main() -> None:
        pods = ProbedPods(KernelThread(), 7)
        await pods.expect([pod("a"), pod("b")])
        await pods.add(pod("a"))
        await pods.remove("c")
        assert applied == [["a", "b"]]
        await asyncio.gather(*(pods.add(pod(uid)) for uid in ("c", "d", "e")), pods.remove("a"))
        assert applied[1:] == [["a", "b", "c"], ["b", "c", "d", "e"]]
        await pods.add(pod("b", "10.0.0.9"))
        await pods.repair()
        assert len(applied) == 5
        await pods.end()
        await pods.repair()
        assert applied[5:] == [None]

    asyncio.run(main())


def test_a_refused_change_is_reported_and_repeated_with_the_next_call(applied: list[list[str] | None]) -> None:
    async def main() -> None:
        pods = ProbedPods(KernelThread(), 7)
        await pods.add(pod("bad"))
        assert "device or resource busy" in pods.fault
        await pods.add(pod("bad"))
        await pods.repair()
        assert len(applied) == 3
        await pods.remove("bad")
        assert pods.fault == ""

    asyncio.run(main())


def test_without_a_kubelet_the_kernel_is_not_called(applied: list[list[str] | None]) -> None:
    async def main() -> None:
        pods = ProbedPods(KernelThread(), None)
        await pods.expect([pod("a")])
        await pods.add(pod("b"))
        await pods.repair()
        await pods.end()
        assert applied == []

    asyncio.run(main())
