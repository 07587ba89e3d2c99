"""The server against proxies that a test plays packet by packet, and against the real client."""

import asyncio
import gc
import tempfile
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path

import pytest
import uvloop

from tests.ztunnel.proxy.istio.zds.agents import INFO, WAIT_S, Starts, open_descriptors
from tproxy.aio.netns import Netns
from ztunnel.node.agent import server as server_module
from ztunnel.node.agent.errors import NoProxy, ProxyGone, ProxyRefused, ProxySilent
from ztunnel.node.agent.server import Announced, ZdsServer
from ztunnel.proxy.istio.zds.channel import Channel, connect
from ztunnel.proxy.istio.zds.manager import PodManager
from ztunnel.proxy.istio.zds.messages import (
    AddPod,
    DeletePod,
    KeepPod,
    Request,
    SnapshotSent,
    answer_bytes,
    hello_bytes,
    read_request,
)
from ztunnel.proxy.istio.zds.pods import PodUid

A, B = PodUid("uid-a"), PodUid("uid-b")


class Proxy:
    """One proxy, as seen from its socket."""

    def __init__(self, channel: Channel) -> None:
        self.channel = channel

    async def next(self) -> Request:
        """The next request, with its descriptor checked and not answered yet."""
        async with asyncio.timeout(WAIT_S):
            packet = await self.channel.receive()
        assert packet is not None
        with packet:
            request = read_request(packet.data, packet.descriptors)
            if isinstance(request, AddPod):
                packet.pop_namespace("").close()
        return request

    async def answer(self, error: str = "") -> None:
        await self.channel.send(answer_bytes(error))

    async def expect(self, request: Request, error: str = "") -> None:
        assert await self.next() == request
        await self.answer(error)

    async def closed(self) -> bool:
        async with asyncio.timeout(WAIT_S):
            return await self.channel.receive() is None


class Scene:
    """A server, the pods it announces, and the connected proxies."""

    def __init__(self, path: Path, netns: Netns) -> None:
        self.netns = netns
        self.pods: list[Announced] = []
        self.answers: list[tuple[PodUid, str]] = []
        self.server = ZdsServer(
            path, lambda: self.pods, on_answer=lambda uid, error: self.answers.append((uid, error))
        )
        self.proxies: list[Proxy] = []

    def pod(self, uid: PodUid) -> Announced:
        return Announced(uid, INFO, self.netns)

    async def add(self, uid: PodUid) -> None:
        await self.server.add(uid, INFO, self.netns)

    def dial(self) -> Proxy:
        proxy = Proxy(connect(self.server.path))
        self.proxies.append(proxy)
        return proxy

    async def proxy(self) -> Proxy:
        """One more, past its snapshot."""
        proxy = self.dial()
        await proxy.channel.send(hello_bytes())
        for pod in self.pods:
            assert pod.info is not None
            await proxy.expect(AddPod(pod.uid, pod.info))
        await proxy.expect(SnapshotSent())
        return proxy

    async def until_proxies(self, count: int) -> None:
        async with asyncio.timeout(WAIT_S):
            while self.server.proxies != count:
                await asyncio.sleep(0)


@pytest.fixture(autouse=True)
def nothing_left_open(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(server_module, "_ACCEPT_INTERVAL_S", 0.0)
    uvloop.run(asyncio.sleep(0))
    gc.collect()
    before = open_descriptors()
    yield
    assert open_descriptors() == before


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_module, "ANSWER_S", 0.1)


def with_server(body: Callable[[Scene], Awaitable[None]], run: Callable[..., None] = asyncio.run) -> None:
    async def main() -> None:
        with Netns.open(None) as netns, tempfile.TemporaryDirectory() as directory:
            scene = Scene(Path(directory) / "zds.sock", netns)
            try:
                async with scene.server:
                    await body(scene)
            finally:
                for proxy in scene.proxies:
                    proxy.channel.close()
            assert [task for task in asyncio.all_tasks() if task is not asyncio.current_task()] == []

    run(main())


@pytest.mark.parametrize("run", [asyncio.run, uvloop.run], ids=["asyncio", "uvloop"])
def test_a_hello_is_answered_with_every_pod_then_the_end_of_the_snapshot(run: Callable[..., None]) -> None:
    async def body(scene: Scene) -> None:
        scene.pods = [scene.pod(A), Announced(B)]
        proxy = scene.dial()
        await proxy.channel.send(hello_bytes())
        await proxy.expect(AddPod(A, INFO))
        await proxy.expect(KeepPod(B), "no such pod")
        # An error about one pod does not stop the announcement of others.
        await proxy.expect(SnapshotSent())
        assert scene.answers == [(A, ""), (B, "no such pod")]

    with_server(body, run)


def test_add_waits_for_the_proxy_and_reports_what_it_says() -> None:
    async def body(scene: Scene) -> None:
        with pytest.raises(NoProxy):
            await scene.add(A)
        proxy = await scene.proxy()
        adding = asyncio.get_running_loop().create_task(scene.add(A))
        assert await proxy.next() == AddPod(A, INFO)
        assert not adding.done()
        await proxy.answer()
        await adding
        adding = asyncio.get_running_loop().create_task(scene.add(B))
        await proxy.expect(AddPod(B, INFO), "failure to start proxy : port taken")
        with pytest.raises(ProxyRefused, match="port taken"):
            await adding

    with_server(body)


def test_adds_go_to_the_newest_and_deletes_to_all() -> None:
    async def body(scene: Scene) -> None:
        old = await scene.proxy()
        new = await scene.proxy()
        await scene.until_proxies(2)
        loop = asyncio.get_running_loop()
        adding = loop.create_task(scene.add(A))
        await new.expect(AddPod(A, INFO))
        await adding
        deleting = loop.create_task(scene.server.delete(A))
        await old.expect(DeletePod(A))
        await new.expect(DeletePod(A))
        await deleting
        new.channel.shut_down()
        await scene.until_proxies(1)
        adding = loop.create_task(scene.add(B))
        await old.expect(AddPod(B, INFO))
        await adding

    with_server(body)


def test_changes_wait_for_the_end_of_the_snapshot() -> None:
    async def body(scene: Scene) -> None:
        scene.pods = [scene.pod(A)]
        proxy = scene.dial()
        await proxy.channel.send(hello_bytes())
        await scene.until_proxies(1)
        deleting = asyncio.get_running_loop().create_task(scene.server.delete(A))
        await proxy.expect(AddPod(A, INFO))
        await proxy.expect(SnapshotSent())
        await proxy.expect(DeletePod(A))
        await deleting

    with_server(body)


def test_requests_wait_for_each_other() -> None:
    async def body(scene: Scene) -> None:
        proxy = await scene.proxy()
        adding = [
            asyncio.get_running_loop().create_task(scene.add(PodUid(f"uid-{number}"))) for number in range(5)
        ]
        for number in range(5):
            await proxy.expect(AddPod(PodUid(f"uid-{number}"), INFO))
        await asyncio.gather(*adding)

    with_server(body)


@pytest.mark.usefixtures("impatient")
def test_a_late_answer_is_not_taken_for_the_next_one() -> None:
    async def body(scene: Scene) -> None:
        proxy = await scene.proxy()
        adding = asyncio.get_running_loop().create_task(scene.add(A))
        assert await proxy.next() == AddPod(A, INFO)
        with pytest.raises(ProxySilent):
            await adding
        adding = asyncio.get_running_loop().create_task(scene.add(B))
        assert await proxy.next() == AddPod(B, INFO)
        await proxy.answer("about a, and late")
        await proxy.answer()
        await adding

    with_server(body)


def test_the_answer_of_a_cancelled_request_is_dropped() -> None:
    async def body(scene: Scene) -> None:
        proxy = await scene.proxy()
        adding = asyncio.get_running_loop().create_task(scene.add(A))
        assert await proxy.next() == AddPod(A, INFO)
        adding.cancel()
        await asyncio.wait([adding])
        adding = asyncio.get_running_loop().create_task(scene.add(B))
        assert await proxy.next() == AddPod(B, INFO)
        await proxy.answer("about a")
        await proxy.answer()
        await adding

    with_server(body)


@pytest.mark.usefixtures("impatient")
def test_a_proxy_silent_during_its_snapshot_is_disconnected() -> None:
    async def body(scene: Scene) -> None:
        scene.pods = [scene.pod(A)]
        proxy = scene.dial()
        await proxy.channel.send(hello_bytes())
        assert await proxy.next() == AddPod(A, INFO)
        assert await proxy.closed()

    with_server(body)


@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize("hello", [b"", b"\x08\x02", b"\xff\xff", bytes(1500)])
def test_a_proxy_without_a_hello_is_disconnected(hello: bytes) -> None:
    async def body(scene: Scene) -> None:
        stranger = scene.dial()
        if hello:
            await stranger.channel.send(hello)
        assert await stranger.closed()
        assert scene.server.proxies == 0
        await scene.proxy()

    with_server(body)


@pytest.mark.parametrize("said", [answer_bytes(), hello_bytes(), b"\xff"])
def test_an_unasked_message_ends_the_connection(said: bytes) -> None:
    async def body(scene: Scene) -> None:
        proxy = await scene.proxy()
        await proxy.channel.send(said)
        assert await proxy.closed()
        await scene.until_proxies(0)

    with_server(body)


def test_losing_a_proxy_fails_every_waiting_request() -> None:
    async def body(scene: Scene) -> None:
        proxy = await scene.proxy()
        loop = asyncio.get_running_loop()
        adding = [loop.create_task(scene.add(uid)) for uid in (A, B)]
        deleting = loop.create_task(scene.server.delete(A))
        assert await proxy.next() == AddPod(A, INFO)
        proxy.channel.shut_down()
        for task in adding:
            with pytest.raises(ProxyGone):
                await task
        await deleting
        await scene.until_proxies(0)

    with_server(body)


def test_the_real_client_is_served() -> None:
    async def body(scene: Scene) -> None:
        scene.pods = [scene.pod(A)]
        starts = Starts()
        ready = asyncio.Event()
        async with PodManager(scene.server.path, starts, on_ready=lambda now: ready.set() if now else None):
            async with asyncio.timeout(WAIT_S):
                await ready.wait()
            await scene.add(B)
            assert [pod.uid for pod in starts.running] == [A, B]
            await scene.server.delete(A)
            async with asyncio.timeout(WAIT_S):
                while "stop uid-a" not in starts.events:
                    await asyncio.sleep(0)
            starts.before = lambda: 1 // 0
            with pytest.raises(ProxyRefused, match="failure to start proxy"):
                await scene.add(PodUid("uid-c"))
        await scene.until_proxies(0)

    with_server(body)


def test_connections_are_accepted_at_most_five_times_a_second(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_module, "_ACCEPT_INTERVAL_S", 0.2)

    async def body(scene: Scene) -> None:
        loop = asyncio.get_running_loop()
        began = loop.time()
        for _ in range(3):
            await scene.proxy()
        assert loop.time() - began >= 0.4

    with_server(body)
