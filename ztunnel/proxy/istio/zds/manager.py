"""Keeps the connection to the node agent, and starts and stops a proxy for each pod that the agent announces.

``reconcile.py`` makes all decisions. This module owns the connection, the tasks that start and stop proxies, one
timer, and the pods' network namespaces. A namespace stays open until the proxy that uses it has stopped.
"""

import asyncio
import logging
import os
import random
import socket
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Self, assert_never

from tproxy.aio.netns import Netns
from tproxy.aio.sockets import SO_MARK
from tproxy.errors import NeedCapability, TproxyError
from ztunnel.proxy.istio.zds.channel import Channel, Packet, connect
from ztunnel.proxy.istio.zds.messages import (
    AddPod,
    SnapshotSent,
    ZdsError,
    answer_bytes,
    hello_bytes,
    read_request,
)
from ztunnel.proxy.istio.zds.pods import PodInfo, PodState, PodUid, RunningPod, StartPod
from ztunnel.proxy.istio.zds.reconcile import (
    Action,
    Answer,
    End,
    Generation,
    NetnsId,
    ReadyWithout,
    Reconciler,
    Retry,
    Start,
)
from ztunnel.runtime.backoff import Backoff
from ztunnel.runtime.latch import Latch
from ztunnel.runtime.settings import plain_reason
from ztunnel.runtime.tasks import Tasks

log = logging.getLogger(__name__)

#: The mark set on every socket of the proxy in a pod. The pod's nftables rules do not redirect marked packets.
PACKET_MARK = 0x539
_FIRST_UNREACHABLE_S = 0.02
_FIRST_FAULTY_S = 0.5
_SPREAD = 0.2


def check_privileges() -> None:
    """Check the required privileges by entering a network namespace and marking a socket; called once at the
    start.

    Raises:
        NeedCapability: a capability is missing. The error names it and its purpose.
    """
    with Netns.open(None) as own, own.entered():
        pass
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM | socket.SOCK_CLOEXEC) as sock:
        try:
            sock.setsockopt(socket.SOL_SOCKET, SO_MARK, PACKET_MARK)
        except PermissionError as error:
            raise NeedCapability("CAP_NET_ADMIN", "mark packets (SO_MARK), as the pods' rules demand") from error


@dataclass(frozen=True, slots=True, kw_only=True)
class PodStatus:
    """A pod's status for the config dump. ``running`` is its proxy while it is up, and ``error`` is why its start
    failed.
    """

    info: PodInfo
    state: PodState
    running: RunningPod | None
    error: str = ""


class _Proxy:
    """One generation of a pod's proxy: its network namespace, and the tasks that start and drain it."""

    __slots__ = ("draining", "gone", "info", "netns", "netns_id", "running", "starting", "uid")

    def __init__(self, uid: PodUid, info: PodInfo, netns: Netns, netns_id: NetnsId) -> None:
        self.uid = uid
        self.info = info
        self.netns = netns
        self.netns_id = netns_id
        self.running: RunningPod | None = None
        self.starting: asyncio.Task[None] | None = None
        self.draining: asyncio.Task[None] | None = None
        self.gone = Latch()


class PodManager:
    """A context manager that starts and stops the pods' proxies. Leaving it stops all proxies at once, unless
    :meth:`drain` was called.

    Args:
        path: the agent's socket.
        start: starts the proxy of a pod. It should be quick, because the agent waits at most 5 s.
        on_ready: called with every change of :attr:`ready`.

    Attributes:
        proxies_started: the total number of proxies started.
        proxies_stopped: the total number of proxies stopped.
    """

    def __init__(
        self, path: Path, start: StartPod, *, on_ready: Callable[[bool], object] = lambda ready: None
    ) -> None:
        self.proxies_started = 0
        self.proxies_stopped = 0
        self._path = path
        self._start = start
        self._on_ready = on_ready
        self._reconciler = Reconciler()
        self._proxies: dict[Generation, _Proxy] = {}
        self._ending: dict[NetnsId, set[_Proxy]] = {}
        self._tasks = Tasks("pods")
        self._connecting: asyncio.Task[None] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._answer: asyncio.Future[str] | None = None
        self._announced_ready = False
        self._draining = False

    @property
    def ready(self) -> bool:
        """Whether the agent is connected and every pod in its snapshot has a proxy."""
        return self._announced_ready

    @property
    def active_proxies(self) -> int:
        """The number of pods whose proxy listens."""
        return self._reconciler.active

    @property
    def pending_proxies(self) -> int:
        """The number of pods whose proxy starts, or failed to start."""
        return self._reconciler.pending

    def states(self) -> Mapping[PodUid, PodStatus]:
        """Return the status of every pod."""
        errors = self._reconciler.errors()
        found = {}
        for uid, generation, info, state in self._reconciler.pods():
            proxy = self._proxies.get(generation)  # None after it has drained
            running = None if proxy is None else proxy.running
            found[uid] = PodStatus(info=info, state=state, running=running, error=errors.get(uid, ""))
        return found

    async def __aenter__(self) -> Self:
        self._connecting = self._tasks.keep(self._keep_connected, "agent")
        return self

    async def __aexit__(self, *exception: object) -> None:
        await self._leave()
        for generation, proxy in list(self._proxies.items()):
            if proxy.draining is not None:
                proxy.draining.cancel()
            else:
                self._end(generation)
        await self._all_gone()
        await self._tasks.close()

    async def drain(self, timeout_s: float) -> None:
        """Disconnect from the agent, and drain the connections of all pods within ``timeout_s``. Return when all
        connections have ended.

        :attr:`ready` does not change. While a pod drains, it stays in :meth:`states`, and changed policies still
        end its connections.
        """
        self._draining = True
        await self._leave()
        for generation, proxy in list(self._proxies.items()):
            self._drain_one(generation, proxy, timeout_s)
        await self._all_gone()

    async def _leave(self) -> None:
        if self._connecting is not None:
            self._connecting.cancel()
            await asyncio.wait([self._connecting])
        if self._timer is not None:
            self._timer.cancel()

    async def _all_gone(self) -> None:
        ending = [proxy for proxies in self._ending.values() for proxy in proxies]
        for proxy in (*self._proxies.values(), *ending):
            await proxy.gone.wait()

    # The agent

    async def _keep_connected(self) -> None:
        unreachable = Backoff(_FIRST_UNREACHABLE_S)
        faulty = Backoff(_FIRST_FAULTY_S, spread=_SPREAD)
        while True:
            try:
                channel = connect(self._path)
            except OSError as error:
                wait_s = unreachable.next()
                log.warning(
                    'failed to connect to the Istio CNI node agent over "%s", is the node agent healthy? '
                    "details: %s, retrying in %.2fs",
                    self._path,
                    plain_reason(error),
                    wait_s,
                )
                await asyncio.sleep(wait_s)
                continue
            unreachable.reset()
            began = asyncio.get_running_loop().time()
            served = False
            try:
                served = await self._serve(channel)
            except Exception:
                # A bug in this program. The pods' proxies keep running, and the next connection's snapshot makes
                # up for missed changes.
                log.exception("lost the node agent path=%s", self._path)
            finally:
                channel.close()
                if not self._draining:
                    self._reconciler.disconnected()
                    self._changed()
            if served or asyncio.get_running_loop().time() - began >= faulty.limit_s:
                faulty.reset()
            if not served:
                # Wait, because an agent that accepts and closes connections would cause a tight loop.
                await asyncio.sleep(faulty.next(random.random()))

    async def _serve(self, channel: Channel) -> bool:
        """Serve one connection of the agent until it ends.

        Returns:
            True if at least one request was answered and the agent did not violate the protocol.
        """
        served = False
        try:
            await channel.send(hello_bytes())
            self._reconciler.connected()
            log.info("connected to the node agent path=%s", self._path)
            while (packet := await channel.receive()) is not None:
                with packet:
                    error = await self._process(packet)
                await channel.send(answer_bytes(error))
                served = True
            log.info("disconnected from the node agent path=%s", self._path)
        except ZdsError as fault:
            log.error("the node agent violated the protocol, connecting again; pods keep running error=%s", fault)
            try:
                await channel.send(answer_bytes(str(fault)))
            except OSError:
                pass  # the connection has ended, which the agent notices as well
            return False
        except OSError as error:
            log.info("disconnected from the node agent path=%s error=%s", self._path, plain_reason(error))
        return served

    async def _process(self, packet: Packet) -> str:
        """Handle one request.

        Returns:
            The answer: an error, or empty for success. The reconciler answers within the agent's limit of 5 s,
            even if the proxy is still starting.

        Raises:
            ZdsError: the packet is not a request, or is not allowed in the current state.
        """
        request = read_request(packet.data, packet.descriptors)
        log.debug("< %s", request)
        loop = asyncio.get_running_loop()
        netns = packet.pop_namespace(f"pod {request.uid}") if isinstance(request, AddPod) else None
        adopted = False
        self._answer = loop.create_future()
        try:
            actions = self._reconciler.handle(request, None if netns is None else _id_of(netns), loop.time())
            adopted = any(isinstance(action, Start) for action in actions)
            self._apply(actions, netns)
            if isinstance(request, SnapshotSent):
                log.info("pod snapshot complete pods=%d pending=%d", self.active_proxies, self.pending_proxies)
            answer = await self._answer
        finally:
            self._answer = None
            if netns is not None and not adopted:
                netns.close()
        log.debug("> %s", answer or "ok")
        return answer

    # Actions

    def _apply(self, actions: list[Action], netns: Netns | None = None) -> None:
        for action in actions:
            match action:
                case Start(generation, uid, info):
                    assert netns is not None
                    self._proxies[generation] = _Proxy(uid, info, netns, _id_of(netns))
                    self._begin(generation)
                case Retry(generation):
                    self._begin(generation)
                case End(generation):
                    self._end(generation)
                case Answer(error):
                    if self._answer is not None and not self._answer.done():
                        self._answer.set_result(error)
                case ReadyWithout(pods):
                    log.warning("ready, but some pods' proxies do not start pods=%s", ",".join(pods))
                case _:
                    assert_never(action)
        self._changed()

    def _changed(self) -> None:
        """Set the timer for the reconciler's next due time, and call ``on_ready`` if readiness changed."""
        due = self._reconciler.next_due
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if due is not None and not self._draining:
            self._timer = asyncio.get_running_loop().call_at(due, self._due)
        if self._reconciler.ready != self._announced_ready and not self._draining:
            self._announced_ready = self._reconciler.ready
            self._on_ready(self._announced_ready)

    def _due(self) -> None:
        self._apply(self._reconciler.advance(asyncio.get_running_loop().time()))

    def _begin(self, generation: Generation) -> None:
        proxy = self._proxies[generation]
        proxy.starting = self._tasks.start(self._started(generation, proxy), f"start {proxy.uid}")

    async def _started(self, generation: Generation, proxy: _Proxy) -> None:
        # An earlier proxy in the same network namespace holds the ports until it has stopped.
        for before in list(self._ending.get(proxy.netns_id, ())):
            await before.gone.wait()
        try:
            running = await self._start(proxy.uid, proxy.info, proxy.netns)
        except (TproxyError, OSError) as error:
            log.warning(
                "pod proxy not started uid=%s pod=%s error=%s", proxy.uid, _named(proxy.info), plain_reason(error)
            )
            failure = plain_reason(error)
        except Exception as error:
            # A bug in this program. Even so, the agent must get an answer.
            log.exception("pod proxy not started uid=%s pod=%s", proxy.uid, _named(proxy.info))
            failure = repr(error)
        else:
            proxy.running = running
            self.proxies_started += 1
            log.info(
                "pod proxy started uid=%s pod=%s netns=%d", proxy.uid, _named(proxy.info), proxy.netns_id.inode
            )
            self._apply(self._reconciler.started(generation, asyncio.get_running_loop().time()))
            return
        self._apply(self._reconciler.failed(generation, failure, asyncio.get_running_loop().time()))

    def _end(self, generation: Generation) -> None:
        proxy = self._proxies.pop(generation)
        # Log this before the proxy has stopped, because a new proxy in another namespace does not wait for that.
        log.info("pod proxy ends uid=%s pod=%s netns=%d", proxy.uid, _named(proxy.info), proxy.netns_id.inode)
        self._ending.setdefault(proxy.netns_id, set()).add(proxy)
        self._tasks.start(self._ended(proxy), f"end {proxy.uid}")

    def _drain_one(self, generation: Generation, proxy: _Proxy, timeout_s: float) -> None:
        if proxy.draining is None:
            proxy.draining = self._tasks.start(self._drained(proxy, timeout_s), f"drain {proxy.uid}")
            proxy.draining.add_done_callback(lambda _: self._end(generation))

    async def _drained(self, proxy: _Proxy, timeout_s: float) -> None:
        await self._not_starting(proxy)
        if proxy.running is not None:
            await proxy.running.drain(timeout_s)

    @staticmethod
    async def _not_starting(proxy: _Proxy) -> None:
        if proxy.starting is not None and not proxy.starting.done():
            proxy.starting.cancel()
            await asyncio.wait([proxy.starting])

    async def _ended(self, proxy: _Proxy) -> None:
        try:
            await self._not_starting(proxy)
            if proxy.running is not None:
                await proxy.running.stop()
                self.proxies_stopped += 1
                log.info(
                    "pod proxy stopped uid=%s pod=%s netns=%d", proxy.uid, _named(proxy.info), proxy.netns_id.inode
                )
        finally:
            proxy.netns.close()
            ending = self._ending[proxy.netns_id]
            ending.discard(proxy)
            if not ending:
                del self._ending[proxy.netns_id]
            proxy.gone.set()


def _id_of(netns: Netns) -> NetnsId:
    status = os.fstat(netns.fileno())
    return NetnsId(status.st_dev, status.st_ino)


def _named(info: PodInfo) -> str:
    return f"{info.namespace}/{info.name}"
