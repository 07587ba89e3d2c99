"""A scripted node agent, and a pod's proxy that only counts."""

import asyncio
import gc
import os
import tempfile
from collections.abc import Callable
from pathlib import Path

from tests.limits import WAIT_S
from tproxy.aio.netns import Netns
from ztunnel.proxy.istio.zds.channel import Channel, Listener
from ztunnel.proxy.istio.zds.messages import AddPod, Request, SnapshotSent, read_answer, read_hello, request_bytes
from ztunnel.proxy.istio.zds.pods import PodInfo, PodUid, RunningPod

INFO = PodInfo(name="a", namespace="default", service_account="a")


def open_descriptors() -> set[str]:
    """Descriptors that are open, with what they are, except for what the loop itself keeps."""
    gc.collect()  # otherwise cycles of earlier tests would be freed at an arbitrary time
    found = set()
    for name in os.listdir("/proc/self/fd"):
        try:
            found.add(f"{name} {os.readlink(f'/proc/self/fd/{name}')}")
        except FileNotFoundError:
            pass  # the one of this listing
    return found


class Agent:
    """Speaks packet by packet; ``async with`` has a path with a listening socket."""

    def __init__(self) -> None:
        self._directory = tempfile.TemporaryDirectory()
        self.path = Path(self._directory.name) / "zds.sock"
        self.channel: Channel | None = None

    async def __aenter__(self) -> "Agent":
        self.listener = Listener(self.path)
        return self

    async def __aexit__(self, *exception: object) -> None:
        self.hang_up()
        self.listener.close()
        self._directory.cleanup()

    def hang_up(self) -> None:
        if self.channel is not None:
            self.channel.close()
            self.channel = None

    async def accept(self) -> None:
        """Take the next connection, with its hello."""
        async with asyncio.timeout(WAIT_S):
            self.channel = await self.listener.accept()
            packet = await self.channel.receive()
        assert packet is not None
        read_hello(packet.data)

    async def ask_bytes(self, data: bytes, descriptors: list[int] | None = None) -> str:
        assert self.channel is not None
        async with asyncio.timeout(WAIT_S):
            await self.channel.send(data, descriptors or ())
            packet = await self.channel.receive()
        assert packet is not None
        return read_answer(packet.data)

    async def ask(self, request: Request, netns: Netns | None = None) -> str:
        return await self.ask_bytes(request_bytes(request), [] if netns is None else [netns.fileno()])

    async def add(self, uid: str, netns: Netns, info: PodInfo = INFO) -> str:
        return await self.ask(AddPod(PodUid(uid), info), netns)

    async def snapshot(self, *uids: str, netns: Netns) -> None:
        """Accept, and name these pods."""
        await self.accept()
        for uid in uids:
            assert await self.add(uid, netns) == ""
        assert await self.ask(SnapshotSent()) == ""

    async def closed(self) -> bool:
        """Return whether the next action of the peer is to close the connection."""
        assert self.channel is not None
        async with asyncio.timeout(WAIT_S):
            return await self.channel.receive() is None


class CountingPod:
    """What a start made."""

    def __init__(self, starts: "Starts", uid: PodUid, netns: Netns) -> None:
        self._starts = starts
        self.uid = uid
        self.netns = netns
        self.drained_s: float | None = None

    async def stop(self) -> None:
        # The namespace must still exist for clean-up work in it.
        os.fstat(self.netns.fileno())
        await asyncio.sleep(0)
        self._starts.running.remove(self)
        self._starts.events.append(f"stop {self.uid}")

    async def drain(self, timeout_s: float) -> None:
        self._starts.events.append(f"drain {self.uid}")
        await self._starts.drained.wait()
        self.drained_s = timeout_s


class Starts:
    """A StartPod; ``before`` runs first, and may raise or wait."""

    def __init__(self) -> None:
        self.running: list[CountingPod] = []
        self.events: list[str] = []
        self.infos: list[PodInfo] = []
        self.before: Callable[[], object] = lambda: None
        self.blocked: asyncio.Event | None = None
        self.drained = asyncio.Event()
        self.drained.set()

    async def __call__(self, uid: PodUid, info: PodInfo, netns: Netns) -> RunningPod:
        self.events.append(f"start {uid}")
        self.infos.append(info)
        if self.blocked is not None:
            await self.blocked.wait()
        self.before()
        pod = CountingPod(self, uid, netns)
        self.running.append(pod)
        return pod
