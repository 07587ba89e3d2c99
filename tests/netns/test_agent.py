"""Pods enrolled by the agent, served by the real manager with toy proxies."""

import asyncio
import contextlib
import errno
import os
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import TypeVar

import pytest
import yaml

from deploy.lab import Lab, Place
from tests.generated import at_night
from tests.netns.dumps import everything, without_generation
from tests.netns.toys import WAIT_S, app, ask, peer_address
from tests.programs import needed
from tests.ztunnel.proxy.istio.zds.agents import open_descriptors
from tproxy.aio.kernel import BlockingKernel
from tproxy.aio.netns import Netns
from tproxy.aio.sockets import connect, listen, original_destination
from tproxy.errors import ConnectFailed, KernelRefused
from tproxy.inpod import OWNERSHIP, POD, PROBE_SOURCES, Capture, pod
from ztunnel.node.agent import node as node_module
from ztunnel.node.agent import scan
from ztunnel.node.agent.description import PodDescription, PodFaults
from ztunnel.node.agent.errors import EnrolFailed
from ztunnel.node.agent.namespaces import proxied_connections, remove_rules, versions
from ztunnel.node.agent.node import NodeAgent, Phase
from ztunnel.node.agent.record import Enrolled, read_record, write_record
from ztunnel.proxy.istio.zds.manager import PACKET_MARK, PodManager
from ztunnel.proxy.istio.zds.pods import PodInfo, PodUid
from ztunnel.runtime.tasks import Tasks

pytestmark = [pytest.mark.netns, pytest.mark.timeout(60)]
T = TypeVar("T")
ROOT = Path(__file__).parents[2]
MEMBER, NEIGHBOUR = PodUid("default/member"), PodUid("default/neighbour")


class ToyPod:
    """Sends its port, the client's address and its original destination, then echoes."""

    def __init__(self, netns: Netns) -> None:
        self._tasks = Tasks("toy")
        self._listeners = [
            listen("::", port, mark=PACKET_MARK, reuse_port=True, netns=netns) for port in (15008, 15006, 15001)
        ]
        for sock in self._listeners:
            self._tasks.start(self._accept(sock), "accept")

    async def _accept(self, sock: socket.socket) -> None:
        port = sock.getsockname()[1]
        loop = asyncio.get_running_loop()
        while True:
            client, _ = await loop.sock_accept(sock)
            client.setblocking(False)
            wanted, peer = original_destination(client), peer_address(client)
            line = f"{port} from {peer.ip} to {wanted.ip} {wanted.port}\n"
            self._tasks.start(self._echo(client, line), "echo").add_done_callback(
                lambda _, sock=client: sock.close()
            )

    async def _echo(self, client: socket.socket, line: str) -> None:
        loop = asyncio.get_running_loop()
        await loop.sock_sendall(client, line.encode())
        while data := await loop.sock_recv(client, 65536):
            await loop.sock_sendall(client, data)

    async def stop(self) -> None:
        await self._tasks.close()
        for sock in self._listeners:
            sock.close()

    async def drain(self, timeout_s: float) -> None:
        pass


class Toys:
    """A StartPod that remembers."""

    def __init__(self) -> None:
        self.started: list[tuple[PodUid, PodInfo]] = []
        self.pods: list[ToyPod] = []

    async def __call__(self, uid: PodUid, info: PodInfo, netns: Netns) -> ToyPod:
        self.started.append((uid, info))
        self.pods.append(ToyPod(netns))
        return self.pods[-1]


@pytest.fixture
def lab() -> Iterator[Lab]:
    with Lab({"w1": ["member", "neighbour"]}) as lab:
        yield lab


@pytest.fixture
def socket_path(tmp_path: Path) -> Path:
    return tmp_path / "zds.sock"


def described(place: Place, **options: object) -> PodDescription:
    info = PodInfo(name=place.name, namespace="default", service_account="default")
    uid = PodUid(f"default/{place.name}")
    return PodDescription(uid=uid, info=info, netns=place.netns.name, **options)  # type: ignore[arg-type]


@contextlib.contextmanager
def namespace(name: str) -> Iterator[Netns]:
    """Yield a namespace of its own, with ``lo`` up as in every pod. Its name is removed at the end if it still
    exists.
    """
    with Netns.create(name) as space:
        subprocess.run([needed("ip"), "-n", name, "link", "set", "lo", "up"], check=True)
        try:
            yield space
        finally:
            space.remove_name()


@contextlib.contextmanager
def process(netns: Netns) -> Iterator[int]:
    """Yield the id of a process in a namespace, which ends at the end."""
    with netns.entered():
        running = subprocess.Popen(["sleep", "infinity"])
    try:
        yield running.pid
    finally:
        running.kill()
        running.wait()


def file_of(*places: Place, **extra: object) -> str:
    return yaml.safe_dump({"pods": {place.name: {"netns": place.netns.name, **extra} for place in places}})


def has_rules(netns: Netns) -> bool:
    with contextlib.closing(BlockingKernel({POD: netns}, OWNERSHIP)) as kernel:
        found = kernel.read().namespaces[POD]
    return bool(found.tables or found.rules or found.routes)


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(WAIT_S):
        while not condition():
            await asyncio.sleep(0.01)


@contextlib.asynccontextmanager
async def following(agent: NodeAgent, path: Path) -> AsyncIterator[None]:
    task = asyncio.get_running_loop().create_task(agent.follow(path))
    try:
        yield
    finally:
        task.cancel()
        await asyncio.wait([task])


def on_loop(body: Callable[[], Awaitable[None]]) -> None:
    async def main() -> None:
        await body()
        assert [task for task in asyncio.all_tasks() if task is not asyncio.current_task()] == []

    asyncio.run(main())


def test_a_pod_has_no_network_until_a_proxy_takes_it(lab: Lab, socket_path: Path) -> None:
    async def body() -> None:
        member, neighbour = lab.pod("member"), lab.pod("neighbour")
        target = neighbour.ipv4
        async with app(neighbour), NodeAgent(socket_path) as agent:
            assert (await ask(member, target)).startswith("app neighbour")
            assert await agent.enrol(described(member)) is Phase.PENDING
            assert agent.pods()[MEMBER].error == "no ztunnel connection"
            with pytest.raises(ConnectFailed):
                await ask(member, target)
            toys = Toys()
            async with PodManager(socket_path, toys):
                async with asyncio.timeout(WAIT_S):
                    await agent.until_enabled(MEMBER)
                assert await ask(member, target) == f"15001 from {member.ipv4} to {target} 8080"
                assert toys.started == [(MEMBER, described(member).info)]
            # The proxy has ended, but the rules are still there.
            with pytest.raises(ConnectFailed):
                await ask(member, target)
        assert has_rules(member.netns)

    on_loop(body)


def test_enrolled_with_a_proxy_at_hand_a_pod_is_enabled_at_once(lab: Lab, socket_path: Path) -> None:
    async def body() -> None:
        member, toys = lab.pod("member"), Toys()
        async with NodeAgent(socket_path, remove_on_exit=True) as agent, PodManager(socket_path, toys) as manager:
            await until(lambda: manager.ready)
            assert await agent.enrol(described(member)) is Phase.ENABLED
            # Again is nothing; other options change the rules and nothing else.
            assert await agent.enrol(described(member)) is Phase.ENABLED
            assert await agent.enrol(described(member, inbound=False)) is Phase.ENABLED
            assert len(toys.started) == 1
            async with app(member):
                assert (await ask(lab.pod("neighbour"), member.ipv4)).startswith("app member")
            # Another identity is another pod.
            other = PodInfo(name="member", namespace="default", service_account="other")
            assert (
                await agent.enrol(PodDescription(uid=MEMBER, info=other, netns=member.netns.name)) is Phase.ENABLED
            )
            assert toys.started[1:] == [(MEMBER, other)]
        assert not has_rules(member.netns)

    on_loop(body)


def test_a_pod_that_leaves_lets_its_connections_end(lab: Lab, socket_path: Path) -> None:
    async def body() -> None:
        member, neighbour = lab.pod("member"), lab.pod("neighbour")
        loop = asyncio.get_running_loop()
        async with app(neighbour), NodeAgent(socket_path) as agent, PodManager(socket_path, Toys()):
            await agent.enrol(described(member))
            async with asyncio.timeout(WAIT_S):
                await agent.until_enabled(MEMBER)
            sock = await connect((neighbour.ipv4, 8080), netns=member.netns)
            with sock:
                assert (await loop.sock_recv(sock, 100)).startswith(b"15001")
                assert proxied_connections(member.netns) == 1
                leaving = loop.create_task(agent.remove(MEMBER, grace_s=WAIT_S))
                await until(lambda: agent.pods()[MEMBER].phase is Phase.LEAVING)
                async with asyncio.timeout(WAIT_S):
                    while not (await ask(member, neighbour.ipv4)).startswith("app neighbour"):
                        pass
                await loop.sock_sendall(sock, b"still")
                assert await loop.sock_recv(sock, 100) == b"still"
                assert not leaving.done()
            began = loop.time()
            await leaving
            assert loop.time() - began < WAIT_S / 2
            assert agent.pods() == {}
        assert not has_rules(member.netns)

    on_loop(body)


def test_a_leaving_pod_that_is_wanted_again_keeps_its_connections(lab: Lab, socket_path: Path) -> None:
    async def body() -> None:
        member, neighbour = lab.pod("member"), lab.pod("neighbour")
        loop, toys = asyncio.get_running_loop(), Toys()
        changed: list[PodUid] = []
        async with (
            app(neighbour),
            NodeAgent(socket_path, grace_s=3600, on_change=changed.append) as agent,
            PodManager(socket_path, toys) as manager,
        ):
            await until(lambda: manager.ready)
            await agent.enrol(described(member))
            sock = await connect((neighbour.ipv4, 8080), netns=member.netns)
            with sock:
                assert (await loop.sock_recv(sock, 100)).startswith(b"15001")
                leaving = loop.create_task(agent.remove(MEMBER))
                await until(lambda: agent.pods()[MEMBER].phase is Phase.LEAVING)
                changed.clear()
                assert await agent.enrol(described(member)) is Phase.ENABLED
                await leaving
                assert changed == [MEMBER, MEMBER]  # pending, enabled
                assert (await ask(member, neighbour.ipv4)).startswith("15001")
                await loop.sock_sendall(sock, b"still")
                assert await loop.sock_recv(sock, 100) == b"still"
                assert len(toys.started) == 1
                # The pod leaves with a grace period of an hour, and then its processes end.
                leaving = loop.create_task(agent.remove(MEMBER))
                await until(lambda: agent.pods()[MEMBER].phase is Phase.LEAVING)
                async with asyncio.timeout(WAIT_S):
                    await agent.remove(MEMBER, grace_s=0)
                    await leaving
                assert agent.pods() == {}
        assert not has_rules(member.netns)

    on_loop(body)


def test_a_pod_that_an_earlier_agent_left_can_be_forgotten(lab: Lab, socket_path: Path, tmp_path: Path) -> None:
    record = tmp_path / "record.json"

    async def body() -> None:
        member = lab.pod("member")
        async with NodeAgent(socket_path, record=record) as agent:
            await agent.enrol(described(member))
        assert has_rules(member.netns)
        async with NodeAgent(socket_path, record=record) as agent:
            assert set(agent.left_over) == {MEMBER}
            await agent.forget(NEIGHBOUR)
            await agent.forget(MEMBER)
            await agent.forget(MEMBER)
            assert set(agent.left_over) == set()
        assert not has_rules(member.netns)
        assert "member" not in record.read_text()

    on_loop(body)


def test_an_agent_that_removes_all_pods_at_its_end_removes_those_of_an_earlier_agent(
    lab: Lab, socket_path: Path, tmp_path: Path
) -> None:
    record = tmp_path / "record.json"

    async def body() -> None:
        member = lab.pod("member")
        async with NodeAgent(socket_path, record=record) as agent:
            await agent.enrol(described(member))
        async with NodeAgent(socket_path, record=record, remove_on_exit=True):
            assert has_rules(member.netns)
        assert not has_rules(member.netns)
        assert read_record(record) == {}

    on_loop(body)


def test_a_pod_that_leaves_has_only_so_much_time(lab: Lab, socket_path: Path) -> None:
    async def body() -> None:
        member = lab.pod("member")
        async with NodeAgent(socket_path, grace_s=0.2) as agent, PodManager(socket_path, Toys()) as manager:
            await agent.enrol(described(member))
            async with asyncio.timeout(WAIT_S):
                await agent.until_enabled(MEMBER)
            sock = await connect((lab.pod("neighbour").ipv4, 8080), netns=member.netns)
            with sock:
                await agent.remove(MEMBER)
                await until(lambda: manager.active_proxies == 0)
        assert not has_rules(member.netns)

    on_loop(body)


def test_pods_come_and_go_and_leave_nothing(lab: Lab, socket_path: Path, tmp_path: Path) -> None:
    record = tmp_path / "record.json"

    async def body() -> None:
        member = lab.pod("member")
        before = without_generation(everything(member.netns))
        async with (
            NodeAgent(socket_path, record=record, grace_s=0) as agent,
            PodManager(socket_path, Toys()) as manager,
        ):
            await until(lambda: manager.ready)

            async def come_and_go() -> None:
                assert await agent.enrol(described(member)) is Phase.ENABLED
                await agent.remove(MEMBER)
                await until(lambda: manager.proxies_started == manager.proxies_stopped)

            await come_and_go()
            descriptors, tasks = open_descriptors(), len(asyncio.all_tasks())
            for _ in range(at_night(100, 25)):
                await come_and_go()
            # Fewer may be there: gRPC's library, used by earlier tests, closes its own by and by.
            assert open_descriptors() - descriptors == set()
            assert len(asyncio.all_tasks()) == tasks
        assert without_generation(everything(member.netns)) == before
        assert "member" not in record.read_text()

    on_loop(body)


def test_a_file_is_followed_and_faults_leave_the_last_good_state(
    lab: Lab, socket_path: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "pods.yaml"

    async def body() -> None:
        member, neighbour = lab.pod("member"), lab.pod("neighbour")
        path.write_text(file_of(member))
        async with NodeAgent(socket_path, grace_s=0.2) as agent, PodManager(socket_path, Toys()):
            async with following(agent, path):
                async with asyncio.timeout(WAIT_S):
                    await agent.until_enabled(MEMBER)
                    path.write_text(file_of(member, neighbour))
                    await agent.until_enabled(MEMBER, NEIGHBOUR)
                path.write_text("pods: {member: {netns: 1, dns: x}, other: {}}")
                await until(lambda: "3 faults; the last good state stays active" in caplog.text)
                assert "pods.other: needs netns or pid" in caplog.text
                path.unlink()
                await until(lambda: "No such file" in caplog.text)
                assert {status.phase for status in agent.pods().values()} == {Phase.ENABLED}
                path.write_text(file_of(neighbour, dns=False))
                await until(lambda: set(agent.pods()) == {NEIGHBOUR} and not has_rules(member.netns))
                await until(lambda: not agent.pods()[NEIGHBOUR].description.dns)
            path.write_text("pods: 1")
            with pytest.raises(PodFaults):
                await agent.follow(path)

    on_loop(body)


def test_a_pod_whose_namespace_comes_later_is_enrolled_then(
    lab: Lab, socket_path: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "pods.yaml"
    name = f"{lab.prefix}later"
    path.write_text(f"pods: {{later: {{netns: {name}}}}}")
    uid = PodUid("default/later")

    async def body() -> None:
        async with NodeAgent(socket_path) as agent, PodManager(socket_path, Toys()), following(agent, path):
            await until(lambda: "no network namespace" in caplog.text)
            with namespace(name) as space:
                async with asyncio.timeout(WAIT_S):
                    await agent.until_enabled(uid)
                assert has_rules(space)

    on_loop(body)


def test_what_a_successor_finds(lab: Lab, socket_path: Path, tmp_path: Path) -> None:
    """Rules stay, proxies are kept, and a pod that left the file in the meantime is released."""
    path, record = tmp_path / "pods.yaml", tmp_path / "record.json"

    async def body() -> None:
        member, neighbour, toys = lab.pod("member"), lab.pod("neighbour"), Toys()
        async with PodManager(socket_path, toys) as manager:
            path.write_text(file_of(member, neighbour))
            async with NodeAgent(socket_path, record=record) as agent, following(agent, path):
                async with asyncio.timeout(WAIT_S):
                    await agent.until_enabled(MEMBER, NEIGHBOUR)
            assert (await ask(member, neighbour.ipv4)).startswith("15001")
            path.write_text(file_of(member))
            async with NodeAgent(socket_path, record=record) as agent:
                # Before it knows any pod it has a snapshot to send.
                await until(lambda: manager.ready)
                assert manager.active_proxies == 2
                async with following(agent, path):
                    async with asyncio.timeout(WAIT_S):
                        await agent.until_enabled(MEMBER)
                    await until(lambda: manager.active_proxies == 1)
            assert len(toys.started) == 2
            assert set(manager.states()) == {MEMBER}
        assert has_rules(member.netns)
        assert not has_rules(neighbour.netns)

    on_loop(body)


@pytest.mark.parametrize("reused", [False, True], ids=["ended", "reused"])
def test_a_pod_whose_recorded_process_has_ended_is_released(
    lab: Lab, socket_path: Path, tmp_path: Path, reused: bool
) -> None:
    path, record = tmp_path / "pods.yaml", tmp_path / "record.json"

    async def body() -> None:
        member, neighbour = lab.pod("member"), lab.pod("neighbour")
        async with PodManager(socket_path, Toys()) as manager:
            with process(member.netns), process(member.netns) as recorded:
                path.write_text(f"pods: {{member: {{pid: {recorded}}}}}")
                async with NodeAgent(socket_path, record=record) as agent, following(agent, path):
                    async with asyncio.timeout(WAIT_S):
                        await agent.until_enabled(MEMBER)
                os.kill(recorded, signal.SIGKILL)
                os.waitid(os.P_PID, recorded, os.WEXITED | os.WNOWAIT)  # reaped at the end
                if reused:
                    entry = Enrolled(str(Path("/run/netns", str(neighbour.netns.name))), member.netns.inode)
                    write_record(record, {MEMBER: entry})
                path.write_text("pods: {}")
                async with NodeAgent(socket_path, record=record) as agent, following(agent, path):
                    await until(lambda: not agent.left_over)
                    await until(lambda: not manager.active_proxies)
        assert not has_rules(member.netns)

    on_loop(body)


def test_a_pod_described_by_another_of_its_processes_keeps_its_proxy(
    lab: Lab, socket_path: Path, tmp_path: Path
) -> None:
    path, record = tmp_path / "pods.yaml", tmp_path / "record.json"

    async def body() -> None:
        member, toys = lab.pod("member"), Toys()
        async with PodManager(socket_path, toys):
            with process(member.netns) as second, process(member.netns) as first:
                for pid in (first, second):
                    path.write_text(f"pods: {{member: {{pid: {pid}}}}}")
                    async with NodeAgent(socket_path, record=record) as agent, following(agent, path):
                        async with asyncio.timeout(WAIT_S):
                            await agent.until_enabled(MEMBER)
                    assert read_record(record) == {MEMBER: Enrolled(pid, member.netns.inode)}
        assert len(toys.started) == 1

    on_loop(body)


def test_a_broken_record_is_reported_and_no_reason_not_to_start(
    lab: Lab, socket_path: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    record = tmp_path / "record.json"
    record.write_text('{"pods": [1]}')

    async def body() -> None:
        async with NodeAgent(socket_path, record=record) as agent:
            assert "not a record of pods" in caplog.text
            await agent.enrol(described(lab.pod("member")))
        assert str(lab.pod("member").netns.inode) in record.read_text()

    on_loop(body)


def test_the_nodes_own_namespace_and_a_taken_one_are_refused(lab: Lab, socket_path: Path) -> None:
    async def body() -> None:
        member = lab.pod("member")
        info = PodInfo(name="x", namespace="default", service_account="default")
        async with NodeAgent(socket_path) as agent:
            with pytest.raises(EnrolFailed, match="the node's own network namespace"):
                await agent.enrol(PodDescription(uid=PodUid("x"), info=info, netns="/proc/self/ns/net"))
            with pytest.raises(EnrolFailed, match="no network namespace 'nowhere'"):
                await agent.enrol(PodDescription(uid=PodUid("x"), info=info, netns="nowhere"))
            await agent.enrol(described(member))
            with pytest.raises(EnrolFailed, match="is the namespace of default/member"):
                await agent.enrol(PodDescription(uid=PodUid("x"), info=info, netns=member.netns.name))
            assert set(agent.pods()) == {MEMBER}

    on_loop(body)


def test_rules_that_somebody_takes_away_come_back(
    lab: Lab, socket_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(node_module, "RETRY_S", 0.05)
    monkeypatch.setattr(node_module, "RECHECK_S", 0.0)

    async def body() -> None:
        member = lab.pod("member")
        async with NodeAgent(socket_path) as agent:
            await agent.enrol(described(member))
            assert remove_rules(member.netns)
            await until(lambda: has_rules(member.netns))

    on_loop(body)


def refusing(times: int, work: Callable[..., T]) -> Callable[..., T]:
    """Return a function that has no descriptor left for its first calls, and then does the work."""
    left = [times]

    def refused(*arguments: object) -> T:
        if left[0]:
            left[0] -= 1
            raise KernelRefused("open a namespace", errno.EMFILE)
        return work(*arguments)

    return refused


def test_a_namespace_that_cannot_be_opened_now_is_not_taken_for_a_missing_one(
    lab: Lab, socket_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(node_module, "RETRY_S", 0.01)
    checks = 0

    def opened(where: str | int) -> Netns:
        nonlocal checks
        checks += 1
        raise KernelRefused("open a namespace", errno.EMFILE)

    async def body() -> None:
        member = lab.pod("member")
        async with NodeAgent(socket_path, grace_s=0) as agent:
            await agent.enrol(described(member))
            monkeypatch.setattr(scan, "Netns", SimpleNamespace(open=opened))
            await until(lambda: checks > 2 or not agent.pods())
            assert set(agent.pods()) == {MEMBER}
        assert has_rules(member.netns)

    on_loop(body)


def test_a_pod_leaves_although_its_connections_cannot_be_counted(
    lab: Lab, socket_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(node_module, "proxied_connections", refusing(1, proxied_connections))

    async def body() -> None:
        async with NodeAgent(socket_path) as agent:
            await agent.enrol(described(lab.pod("member")))
            await agent.remove(MEMBER, grace_s=WAIT_S)
            assert agent.pods() == {}
        assert not has_rules(lab.pod("member").netns)

    on_loop(body)


@pytest.mark.parametrize("earlier", [False, True], ids=["own", "of an earlier agent"])
def test_rules_that_the_kernel_does_not_remove_at_once_are_removed_later(
    lab: Lab, socket_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, earlier: bool
) -> None:
    monkeypatch.setattr(node_module, "RETRY_S", 0.01)
    monkeypatch.setattr(node_module, "remove_rules", refusing(2, remove_rules))
    record = tmp_path / "record.json"

    async def body() -> None:
        member = lab.pod("member")
        async with contextlib.AsyncExitStack() as stack:
            agent = await stack.enter_async_context(NodeAgent(socket_path, record=record))
            await agent.enrol(described(member))
            if earlier:
                await stack.aclose()
                agent = await stack.enter_async_context(NodeAgent(socket_path, record=record))
            await (agent.forget(MEMBER) if earlier else agent.remove(MEMBER, grace_s=0))
            assert has_rules(member.netns)
            assert set(read_record(record)) == {MEMBER}  # for the next agent, if this one ends before
            await until(lambda: not read_record(record))
            assert not has_rules(member.netns)

    on_loop(body)


def test_a_pod_that_is_enrolled_again_keeps_rules_that_could_not_be_removed_before(
    lab: Lab, socket_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(node_module, "RETRY_S", 0.01)
    monkeypatch.setattr(node_module, "remove_rules", refusing(1, remove_rules))
    rounds = 0

    async def maintain(uid: PodUid, *, repair: bool) -> None:
        nonlocal rounds
        rounds += 1

    async def body() -> None:
        member = lab.pod("member")
        async with NodeAgent(socket_path) as agent:
            await agent.enrol(described(member))
            await agent.remove(MEMBER, grace_s=0)
            await agent.enrol(described(member))
            monkeypatch.setattr(agent, "_maintain", maintain)
            await until(lambda: rounds > 2)
            assert has_rules(member.netns)

    on_loop(body)


def test_a_namespace_with_the_reused_number_of_a_forgotten_pods_keeps_its_rules(
    lab: Lab, socket_path: Path, tmp_path: Path
) -> None:
    record = tmp_path / "record.json"
    member = lab.pod("member")
    gone = PodUid("default/gone")
    write_record(record, {gone: Enrolled("/run/netns/gone", member.netns.inode)})

    async def body() -> None:
        with process(member.netns):
            async with NodeAgent(socket_path, record=record) as agent:
                await agent.enrol(described(member))
                await agent.forget(gone)
                assert has_rules(member.netns)
                assert set(read_record(record)) == {MEMBER}

    on_loop(body)


def test_a_release_that_is_cancelled_is_finished_at_the_end(
    lab: Lab, socket_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    record = tmp_path / "record.json"

    async def body() -> None:
        member, begun = lab.pod("member"), asyncio.Event()

        async def delete(uid: PodUid) -> None:
            begun.set()
            await asyncio.get_running_loop().create_future()

        async with NodeAgent(socket_path, record=record) as agent:
            await agent.enrol(described(member))
        async with NodeAgent(socket_path, record=record, remove_on_exit=True) as agent:
            with monkeypatch.context() as patched:
                patched.setattr(agent._server, "delete", delete)
                releasing = asyncio.get_running_loop().create_task(agent.forget(MEMBER))
                await begun.wait()
                releasing.cancel()
                await asyncio.wait((releasing,))
            assert set(agent.left_over) == {MEMBER}
        assert not has_rules(member.netns)

    on_loop(body)


def test_a_name_that_means_another_namespace_now_is_enrolled_anew(
    lab: Lab, socket_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(node_module, "RETRY_S", 0.05)
    name, path = f"{lab.prefix}again", tmp_path / "pods.yaml"
    path.write_text(f"pods: {{again: {{netns: {name}}}}}")

    async def body() -> None:
        toys = Toys()
        async with NodeAgent(socket_path) as agent, PodManager(socket_path, toys), following(agent, path):
            with namespace(name) as first:
                async with asyncio.timeout(WAIT_S):
                    await agent.until_enabled(PodUid("default/again"))
                first.remove_name()
                with namespace(name) as second:
                    await until(lambda: has_rules(second) and len(toys.started) == 2)
                    assert not has_rules(first)

    on_loop(body)


def test_the_nodes_probes_reach_pods_as_long_as_they_are_captured(lab: Lab, tmp_path: Path) -> None:
    """In a process of its own: the agent's node is the namespace it runs in."""
    member, node = lab.pod("member"), lab.worker("w1").place
    for probe in PROBE_SOURCES:
        assert node.popen([needed("ip"), "address", "add", str(probe), "dev", "lo"]).wait(WAIT_S) == 0
    path = tmp_path / "pods.yaml"
    # Requests in flight at the moment of enrolment must not hang.
    path.write_text(file_of(member, new_connections_only=True))
    before = without_generation(everything(node.netns))
    options = ["--probe-user", str(os.getuid()), "--remove"]
    agent = node.popen(
        [sys.executable, "-m", "ztunnel", "agent", "--socket", tmp_path / "zds.sock", "--state", path, *options],
        cwd=ROOT,
    )

    async def body() -> None:
        async with app(member):
            # No probe fails from now until the pod is captured without any proxy.
            captured = False
            async with asyncio.timeout(20):
                while not captured:
                    assert (await ask(node, member.ipv4)).startswith("app member")
                    try:
                        await ask(lab.pod("neighbour"), member.ipv4)
                    except ConnectFailed:
                        captured = True
            assert await ask(node, member.ipv4) == f"app member peer {PROBE_SOURCES[0]}"
            assert await ask(node, member.ipv6) == f"app member peer {PROBE_SOURCES[1]}"

    try:
        asyncio.run(body())
    finally:
        agent.terminate()
        assert agent.wait(WAIT_S) == 0
    assert without_generation(everything(node.netns)) == before


@pytest.mark.parametrize("disabled", ["1", "2"])
def test_without_ipv6_on_lo_only_ipv4_is_captured(lab: Lab, socket_path: Path, disabled: str) -> None:
    async def body() -> None:
        with namespace(f"{lab.prefix}four") as space:
            assert versions(space) == (4, 6)
            with space.entered():
                Path("/proc/sys/net/ipv6/conf/lo/disable_ipv6").write_text(disabled)
            assert versions(space) == (4,)
            info = PodInfo(name="four", namespace="default", service_account="default")
            async with NodeAgent(socket_path, remove_on_exit=True) as agent:
                await agent.enrol(PodDescription(uid=PodUid("four"), info=info, netns=space.name))
                with contextlib.closing(BlockingKernel({POD: space}, OWNERSHIP)) as kernel:
                    found = kernel.read().namespaces[POD]
            assert {rule.version for rule in found.rules} == {route.version for route in found.routes} == {4}
            assert set(found.tables) == set(pod(Capture(versions=(4,))).namespaces[POD].tables)

    on_loop(body)


@pytest.mark.parametrize("remove", [False, True], ids=["upgrade", "remove"])
def test_the_command_leaves_rules_unless_told(lab: Lab, socket_path: Path, tmp_path: Path, remove: bool) -> None:
    path = tmp_path / "pods.yaml"
    member = lab.pod("member")
    path.write_text(file_of(member))
    command = [sys.executable, "-m", "ztunnel", "agent", "--socket", str(socket_path), "--state", str(path)]
    with subprocess.Popen(
        [*command, *(["--remove"] if remove else [])], stderr=subprocess.PIPE, text=True, cwd=ROOT
    ) as agent:

        async def body() -> None:
            async with PodManager(socket_path, Toys()) as manager:
                async with asyncio.timeout(20):
                    while not (manager.ready and manager.active_proxies):
                        await asyncio.sleep(0.01)
                assert (await ask(member, lab.pod("neighbour").ipv4)).startswith("15001")
                agent.send_signal(signal.SIGTERM)
                await until(lambda: agent.poll() is not None)
                assert manager.active_proxies == (0 if remove else 1)

        asyncio.run(body())
    assert agent.returncode == 0
    assert has_rules(member.netns) != remove
