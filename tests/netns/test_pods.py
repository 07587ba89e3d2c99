"""The pod manager with real listeners in real namespaces: no leaks, and a full node starts at once."""

import asyncio
import gc
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
import uvloop

from tests.generated import at_night
from tests.programs import needed
from tests.ztunnel.proxy.istio.zds.agents import INFO, Agent, open_descriptors
from tproxy.aio.netns import Netns
from tproxy.aio.sockets import listen
from ztunnel.proxy.istio.zds.manager import PACKET_MARK, PodManager, check_privileges
from ztunnel.proxy.istio.zds.messages import DeletePod, SnapshotSent
from ztunnel.proxy.istio.zds.pods import PodInfo, PodState, PodUid

pytestmark = [pytest.mark.netns, pytest.mark.timeout(120)]
ROOT = Path(__file__).parents[2]
PORTS = (15008, 15006, 15001)
PODS = at_night(10_000, 3_000)
PAGE = os.sysconf("SC_PAGE_SIZE")


class Listening:
    """Opens the listeners of one pod."""

    def __init__(self, netns: Netns) -> None:
        with ExitStack() as stack:
            self.sockets = [
                stack.enter_context(listen("::", port, mark=PACKET_MARK, reuse_port=True, netns=netns))
                for port in PORTS
            ]
            stack.pop_all()

    async def stop(self) -> None:
        for sock in self.sockets:
            sock.close()

    async def drain(self, timeout_s: float) -> None:
        pass


async def start(uid: PodUid, info: PodInfo, netns: Netns) -> Listening:
    return Listening(netns)


@contextmanager
def four_namespaces() -> Iterator[list[Netns]]:
    with ExitStack() as stack:
        yield [stack.enter_context(Netns.create()) for _ in range(4)]


@pytest.fixture
def spaces() -> Iterator[list[Netns]]:
    with four_namespaces() as spaces:
        yield spaces


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * PAGE


def ports_bound(netns: Netns) -> set[int]:
    """Local ports of what listens (state 0A) in a namespace."""
    with netns.entered():
        lines = Path("/proc/thread-self/net/tcp6").read_text().splitlines()[1:]
    return {int(fields[1].rpartition(":")[2], 16) for fields in map(str.split, lines) if fields[3] == "0A"}


def test_this_process_may_do_what_pods_need() -> None:
    check_privileges()


@pytest.mark.parametrize(
    ("dropped", "missing"), [("-sys_admin", "CAP_SYS_ADMIN"), ("-net_admin,-net_raw", "CAP_NET_ADMIN")]
)
def test_a_missing_capability_is_named(dropped: str, missing: str) -> None:
    program = "from ztunnel.proxy.istio.zds.manager import check_privileges; check_privileges()"
    done = subprocess.run(
        [needed("setpriv"), f"--bounding-set={dropped}", sys.executable, "-c", program],
        capture_output=True,
        text=True,
        cwd=ROOT,
        timeout=30,
        check=False,
    )
    assert f"needs {missing}; run as root, or add {missing}" in done.stderr.splitlines()[-1]


def test_thousands_of_pods_come_and_go_and_leave_nothing() -> None:
    # In a separate process, because in this one the allocator has the arenas of earlier tests, with their gaps.
    program = "from tests.netns.test_pods import come_and_go; come_and_go()"
    subprocess.run([sys.executable, "-c", program], cwd=ROOT, timeout=110, check=True)


def come_and_go() -> None:
    """Add and remove :data:`PODS` pods one after the other. Fail if resources remain afterwards."""

    async def main(spaces: list[Netns]) -> None:
        async with Agent() as agent, PodManager(agent.path, start) as manager:
            await agent.accept()
            assert await agent.ask(SnapshotSent()) == ""

            async def pods(first: int, last: int) -> None:
                for number in range(first, last):
                    uid = f"uid-{number}"
                    assert await agent.add(uid, spaces[number % len(spaces)]) == ""
                    assert await agent.ask(DeletePod(PodUid(uid))) == ""

            await pods(0, 1_000)  # caches and the allocator reach their steady size
            gc.collect()
            descriptors, tasks, memory = open_descriptors(), len(asyncio.all_tasks()), resident_bytes()
            await pods(1_000, PODS)
            while manager.proxies_stopped < PODS:
                await asyncio.sleep(0)
            gc.collect()
            # Fewer may be there: gRPC's library, used by earlier tests, closes its own by and by.
            assert open_descriptors() - descriptors == set()
            assert len(asyncio.all_tasks()) == tasks
            assert resident_bytes() - memory < 4 << 20
            assert manager.proxies_started == manager.proxies_stopped == PODS
            assert manager.states() == {}
            assert [ports_bound(space) for space in spaces] == [set()] * len(spaces)

    with four_namespaces() as spaces:
        uvloop.run(main(spaces))


def test_a_node_of_250_pods_is_served() -> None:
    async def main() -> None:
        with ExitStack() as stack:
            spaces = [stack.enter_context(Netns.create()) for _ in range(250)]
            async with Agent() as agent, PodManager(agent.path, start) as manager:
                await agent.accept()
                for number, space in enumerate(spaces):
                    assert await agent.add(f"uid-{number}", space) == ""
                assert await agent.ask(SnapshotSent()) == ""
                assert manager.ready
                assert {status.state for status in manager.states().values()} == {PodState.UP}
                assert all(ports_bound(space) == set(PORTS) for space in spaces)
                for number in range(len(spaces)):
                    assert await agent.ask(DeletePod(PodUid(f"uid-{number}"))) == ""
                while manager.proxies_stopped < len(spaces):
                    await asyncio.sleep(0)

    uvloop.run(main())


def test_the_same_pod_in_another_namespace_moves(spaces: list[Netns]) -> None:
    async def main() -> None:
        async with Agent() as agent, PodManager(agent.path, start) as manager:
            await agent.snapshot("uid-a", netns=spaces[0])
            assert await agent.add("uid-a", spaces[0]) == ""
            assert manager.proxies_started == 1
            assert await agent.add("uid-a", spaces[1]) == ""
            while manager.proxies_stopped < 1:
                await asyncio.sleep(0)
            assert [ports_bound(space) for space in spaces[:2]] == [set(), set(PORTS)]
            assert manager.states()["uid-a"].info == INFO

    uvloop.run(main())


def test_log_of_a_pod_that_moves_tells_its_namespaces_apart(
    spaces: list[Netns], caplog: pytest.LogCaptureFixture
) -> None:
    async def main() -> None:
        async with Agent() as agent, PodManager(agent.path, start) as manager:
            await agent.snapshot("uid-a", netns=spaces[0])
            assert await agent.add("uid-a", spaces[1]) == ""
            while manager.proxies_stopped < 1:
                await asyncio.sleep(0)
            said = [record.getMessage() for record in caplog.records if "pod proxy" in record.getMessage()]
            old, new = (f"netns={space.inode}" for space in spaces[:2])
            assert [line.split(" uid=")[0].removeprefix("pod proxy ") for line in said if line.endswith(old)] == [
                "started",
                "ends",
                "stopped",
            ]
            assert [line.endswith(new) for line in said if "started" in line] == [False, True]
            # The old one ends before the new one starts, and may take longer to stop.
            assert said.index(next(line for line in said if "ends" in line)) == 1

    caplog.set_level("INFO")
    uvloop.run(main())


def test_a_port_that_the_pod_uses_itself_keeps_only_that_pod_pending(spaces: list[Netns]) -> None:
    async def main() -> None:
        with listen("::", 15008, netns=spaces[0]):
            async with Agent() as agent, PodManager(agent.path, start) as manager:
                await agent.accept()
                assert "[::]:15008" in await agent.add("uid-a", spaces[0])
                assert await agent.add("uid-b", spaces[1]) == ""
                states = {uid: status.state for uid, status in manager.states().items()}
                assert states == {"uid-a": PodState.PENDING, "uid-b": PodState.UP}
                assert ports_bound(spaces[0]) == {15008}

    uvloop.run(main())
