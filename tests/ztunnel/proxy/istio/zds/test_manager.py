"""The manager against an agent over a real socket; every namespace here is the test's own."""

import asyncio
import gc
import logging
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path

import pytest
import uvloop
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.generated import examples
from tests.ztunnel.proxy.istio.zds.agents import INFO, WAIT_S, Agent, Starts, open_descriptors
from tproxy.aio.netns import Netns
from tproxy.errors import PortTaken
from ztunnel.proxy.istio.zds import manager as manager_module
from ztunnel.proxy.istio.zds import reconcile
from ztunnel.proxy.istio.zds.manager import PodManager
from ztunnel.proxy.istio.zds.messages import DeletePod, KeepPod, SnapshotSent, request_bytes
from ztunnel.proxy.istio.zds.pods import PodInfo, PodState, PodUid
from ztunnel.runtime.backoff import Backoff

A = PodUid("uid-a")
Run = Callable[..., None]
Body = Callable[["Scene"], Awaitable[None]]


class Scene:
    """A manager, its agent, and what it started."""

    def __init__(self, agent: Agent, netns: Netns) -> None:
        self.agent = agent
        self.netns = netns
        self.starts = Starts()
        self.readiness: list[bool] = []
        self._told = asyncio.Event()
        self.manager = PodManager(agent.path, self.starts, on_ready=self._tell)

    def _tell(self, ready: bool) -> None:
        self.readiness.append(ready)
        self._told.set()

    async def until_ready(self, ready: bool) -> None:
        async with asyncio.timeout(WAIT_S):
            while self.manager.ready != ready:
                self._told.clear()
                await self._told.wait()

    def states(self) -> dict[PodUid, PodState]:
        return {uid: status.state for uid, status in self.manager.states().items()}


@pytest.fixture(scope="module", autouse=True)
def descriptors_that_uvloop_keeps() -> None:
    uvloop.run(asyncio.sleep(0))


@pytest.fixture(autouse=True)
def nothing_left_open(descriptors_that_uvloop_keeps: None) -> Iterator[None]:
    gc.collect()
    before = open_descriptors()
    yield
    assert open_descriptors() == before


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Waits in hundredths of seconds."""
    monkeypatch.setattr(reconcile, "RETRY_S", 0.05)
    monkeypatch.setattr(reconcile, "ANSWER_S", 0.05)
    monkeypatch.setattr(reconcile, "SETTLE_S", 0.2)
    monkeypatch.setattr(manager_module, "_FIRST_FAULTY_S", 0.02)


def with_manager(body: Body, run: Run = asyncio.run) -> None:
    async def main() -> None:
        with Netns.open(None) as netns:
            async with Agent() as agent:
                scene = Scene(agent, netns)
                async with scene.manager:
                    await body(scene)
                assert scene.starts.running == []
                assert [task for task in asyncio.all_tasks() if task is not asyncio.current_task()] == []

    run(main())


@pytest.mark.parametrize("run", [asyncio.run, uvloop.run], ids=["asyncio", "uvloop"])
def test_pods_are_started_acknowledged_and_stopped(run: Run) -> None:
    async def body(scene: Scene) -> None:
        agent, manager = scene.agent, scene.manager
        await agent.accept()
        assert await agent.add(A, scene.netns) == ""
        assert scene.states() == {A: PodState.UP}
        assert manager.states()[A].running is scene.starts.running[0]
        assert not manager.ready
        assert await agent.ask(SnapshotSent()) == ""
        assert manager.ready
        assert await agent.ask(DeletePod(A)) == ""
        assert scene.states() == {}
        assert (manager.active_proxies, manager.pending_proxies, manager.proxies_started) == (0, 0, 1)
        assert scene.readiness == [True]

    with_manager(body, run)


def test_leaving_stops_everything_and_closes_the_namespaces() -> None:
    async def body(scene: Scene) -> None:
        await scene.agent.snapshot("uid-a", "uid-b", netns=scene.netns)
        assert len(scene.starts.running) == 2

    with_manager(body)


def test_failed_start_is_answered_and_retried(quick: None) -> None:
    async def body(scene: Scene) -> None:
        def taken() -> None:
            raise PortTaken("::", 15008)

        scene.starts.before = taken
        await scene.agent.accept()
        answer = await scene.agent.add(A, scene.netns)
        assert answer.startswith("failure to start proxy : another process listens on [::]:15008")
        assert scene.states() == {A: PodState.PENDING}
        assert "15008" in scene.manager.states()[A].error
        assert (scene.manager.active_proxies, scene.manager.pending_proxies) == (0, 1)
        assert await scene.agent.ask(SnapshotSent()) == ""
        assert not scene.manager.ready
        scene.starts.before = lambda: None
        await scene.until_ready(True)
        assert scene.states() == {A: PodState.UP}

    with_manager(body)


def test_a_bug_in_the_start_is_answered_and_logged(caplog: pytest.LogCaptureFixture) -> None:
    async def body(scene: Scene) -> None:
        scene.starts.before = lambda: 1 // 0
        await scene.agent.accept()
        assert "ZeroDivisionError" in await scene.agent.add(A, scene.netns)
        scene.starts.before = lambda: None
        assert await scene.agent.add(A, scene.netns) == ""

    with_manager(body)
    assert any(record.exc_info for record in caplog.records)


def test_failing_pod_does_not_prevent_readiness(quick: None, caplog: pytest.LogCaptureFixture) -> None:
    async def body(scene: Scene) -> None:
        scene.starts.before = lambda: 1 // 0
        await scene.agent.accept()
        await scene.agent.add(A, scene.netns)
        await scene.agent.ask(SnapshotSent())
        assert not scene.manager.ready
        await scene.until_ready(True)
        assert scene.manager.pending_proxies == 1

    with_manager(body)
    [warning] = [record for record in caplog.records if "proxies do not start" in record.message]
    assert (warning.levelno, "uid-a" in warning.message) == (logging.WARNING, True)


def test_slow_start_is_answered_in_time_and_continues(quick: None) -> None:
    async def body(scene: Scene) -> None:
        scene.starts.blocked = asyncio.Event()
        await scene.agent.accept()
        assert "not done" in await scene.agent.add(A, scene.netns)
        assert await scene.agent.ask(SnapshotSent()) == ""
        scene.starts.blocked.set()
        await scene.until_ready(True)
        assert scene.states() == {A: PodState.UP}
        assert scene.starts.events == ["start uid-a"]

    with_manager(body)


def test_a_start_under_way_is_ended_with_its_pod(quick: None) -> None:
    async def body(scene: Scene) -> None:
        scene.starts.blocked = asyncio.Event()
        await scene.agent.accept()
        await scene.agent.add(A, scene.netns)
        assert await scene.agent.ask(DeletePod(A)) == ""
        scene.starts.blocked.set()
        assert await scene.agent.ask(SnapshotSent()) == ""
        assert scene.starts.running == []

    with_manager(body)


def test_losing_the_agent_leaves_pods_running_and_a_snapshot_follows() -> None:
    async def body(scene: Scene) -> None:
        await scene.agent.snapshot("uid-a", "uid-b", netns=scene.netns)
        scene.agent.hang_up()
        await scene.until_ready(False)
        assert len(scene.starts.running) == 2
        await scene.agent.accept()
        assert await scene.agent.ask(KeepPod(A)) == ""
        assert await scene.agent.ask(SnapshotSent()) == ""
        await scene.until_ready(True)
        assert scene.states() == {A: PodState.UP}
        assert scene.starts.events == ["start uid-a", "start uid-b", "stop uid-b"]
        assert scene.readiness == [True, False, True]

    with_manager(body)


@pytest.mark.parametrize(
    ("data", "descriptors", "answer"),
    [
        (request_bytes(SnapshotSent()), 0, "failure to process message : the snapshot is complete already"),
        (request_bytes(KeepPod(A)), 0, "failure to process message : pods are kept in a snapshot only"),
        (b"\x0a\x07\x0a\x05uid-b", 1, "failure to process message : no workload_info for 'uid-b'"),
        (b"\xff", 0, "failure to read message : "),
        (bytes(2000), 0, "failure to read message : message truncated"),
        (b"\x0a\x09\x0a\x05uid-b\x12\x00", 0, "failure to read message : No control message"),
        (b"\x0a\x09\x0a\x05uid-b\x12\x00", 2, "failure to read message : Expected 1 FD, got 2"),
        (request_bytes(DeletePod(A)), 1, "failure to read message : Unexpected control message"),
    ],
)
def test_protocol_error_is_answered_and_pods_keep_running(
    quick: None, data: bytes, descriptors: int, answer: str
) -> None:
    async def body(scene: Scene) -> None:
        await scene.agent.snapshot("uid-a", netns=scene.netns)
        told = await scene.agent.ask_bytes(data, [scene.netns.fileno()] * descriptors)
        assert told.startswith(answer)
        assert await scene.agent.closed()
        scene.agent.hang_up()
        await scene.agent.snapshot("uid-a", netns=scene.netns)
        assert scene.starts.events == ["start uid-a"]

    with_manager(body)


@settings(max_examples=examples(60), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.one_of(
        st.binary(min_size=1, max_size=1100),
        # Nearly right: a message with one byte changed.
        st.tuples(st.integers(0, 6), st.integers(0, 255)).map(lambda change: changed(*change)),
    ),
    st.integers(0, 3),
)
def test_any_agent_message_is_answered_and_pods_keep_running(quick: None, data: bytes, descriptors: int) -> None:
    async def body(scene: Scene) -> None:
        await scene.agent.snapshot("uid-z", netns=scene.netns)
        error = await scene.agent.ask_bytes(data, [scene.netns.fileno()] * descriptors)
        if error.startswith(("failure to read", "failure to process")):
            assert await scene.agent.closed()
        scene.agent.hang_up()
        await scene.agent.snapshot("uid-z", netns=scene.netns)
        assert scene.starts.events.count("start uid-z") == 1
        assert scene.manager.ready

    before = open_descriptors()
    with_manager(body)
    assert open_descriptors() == before


def changed(position: int, value: int) -> bytes:
    wire = bytearray(request_bytes(DeletePod(A)))
    wire[position] = value
    return bytes(wire)


def test_a_descriptor_that_is_no_namespace_is_refused(quick: None, tmp_path: Path) -> None:
    async def body(scene: Scene) -> None:
        await scene.agent.accept()
        with (tmp_path / "file").open("w") as file:
            add = b"\x0a\x09\x0a\x05uid-b\x12\x00"
            assert "not a network namespace" in await scene.agent.ask_bytes(add, [file.fileno()])
        assert await scene.agent.closed()

    with_manager(body)


def test_changed_identity_replaces_the_proxy_after_its_end() -> None:
    async def body(scene: Scene) -> None:
        await scene.agent.snapshot("uid-a", netns=scene.netns)
        other = PodInfo(name="a", namespace="default", service_account="other")
        assert await scene.agent.add(A, scene.netns, other) == ""
        assert scene.starts.events == ["start uid-a", "stop uid-a", "start uid-a"]
        assert scene.starts.infos == [INFO, other]

    with_manager(body)


def test_drain_reaches_all_pods_at_once_and_readiness_stays() -> None:
    async def body(scene: Scene) -> None:
        await scene.agent.snapshot("uid-a", "uid-b", netns=scene.netns)
        pods = list(scene.starts.running)
        scene.starts.drained.clear()
        draining = asyncio.get_running_loop().create_task(scene.manager.drain(7.0))
        assert await scene.agent.closed()
        while scene.starts.events[2:] != ["drain uid-a", "drain uid-b"]:
            await asyncio.sleep(0)
        assert not draining.done()
        assert scene.manager.ready
        # Draining proxies are still listed, so that their connections can be judged.
        assert [status.running for status in scene.manager.states().values()] == pods
        scene.starts.drained.set()
        await draining
        assert [pod.drained_s for pod in pods] == [7.0, 7.0]
        assert scene.starts.running == []
        assert scene.readiness == [True]

    with_manager(body)


def test_leaving_in_the_middle_of_a_drain_ends_it() -> None:
    async def body(scene: Scene) -> None:
        await scene.agent.snapshot("uid-a", netns=scene.netns)
        scene.starts.drained.clear()
        draining = asyncio.get_running_loop().create_task(scene.manager.drain(60.0))
        while "drain uid-a" not in scene.starts.events:
            await asyncio.sleep(0)
        draining.cancel()
        await asyncio.wait([draining])

    with_manager(body)


def test_internal_error_ends_only_the_agent_connection(
    quick: None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def body(scene: Scene) -> None:
        await scene.agent.snapshot("uid-a", netns=scene.netns)
        with monkeypatch.context() as patch:
            patch.setattr(manager_module, "read_request", lambda data, descriptors: 1 // 0)
            assert scene.agent.channel is not None
            await scene.agent.channel.send(request_bytes(DeletePod(A)))
            assert await scene.agent.closed()
        scene.agent.hang_up()
        await scene.agent.snapshot("uid-a", netns=scene.netns)
        assert scene.starts.events == ["start uid-a"]

    with_manager(body)
    assert "lost the node agent" in caplog.text


def test_late_agent_is_connected(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        agent = Agent()
        async with PodManager(agent.path, Starts()):
            while not any("is the node agent healthy?" in record.message for record in caplog.records):
                await asyncio.sleep(0)
            async with agent:
                await agent.accept()

    asyncio.run(main())


def test_waits_double_up_to_the_limit() -> None:
    waits = Backoff(0.02)
    assert [waits.next() for _ in range(12)] == [min(0.02 * 2**number, 15.0) for number in range(12)]
    waits.reset()
    assert waits.next(0.9) == 0.02
    spread = Backoff(0.5, spread=0.2)
    assert [round(spread.next(chance), 3) for chance in (0.0, 0.5, 1.0)] == [0.4, 1.0, 2.4]
