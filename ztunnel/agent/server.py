"""ZDS, the agent's half: tells proxies which pods there are.

Each proxy that connects is told every pod first, and then what changes. Requests to one proxy wait for each
other's answers; requests to different proxies do not. While an upgrade lasts two proxies are connected: pods that
come are for the newer one, pods that go concern both.

An answer that comes too late belongs to the request that gave up on it: late ones are counted, so that they are
never taken for the answer to a later request, which is what istio-cni would do.
"""

import asyncio
import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from tproxy.aio.netns import Netns
from ztunnel.agent.errors import NoProxy, ProxyGone, ProxyRefused, ProxySilent
from ztunnel.istio.zds.channel import Channel, Listener
from ztunnel.istio.zds.messages import (
    AddPod,
    DeletePod,
    KeepPod,
    Request,
    SnapshotSent,
    Unreadable,
    ZdsError,
    read_answer,
    read_hello,
    request_bytes,
)
from ztunnel.istio.zds.pods import PodInfo, PodUid
from ztunnel.runtime.tasks import Tasks

log = logging.getLogger(__name__)

#: For a hello, and for each answer.
ANSWER_S = 5.0
# At most five connections a second: a proxy that fails over and over must not take all our time.
_ACCEPT_INTERVAL_S = 0.2
_NO_DESCRIPTORS_S = 1.0


@dataclass(frozen=True, slots=True)
class Announced:
    """A pod of a snapshot; one that only has its name proxies are asked to keep, if they have it."""

    uid: PodUid
    info: PodInfo | None = None
    netns: Netns | None = None


#: Called with what a proxy said about a pod of its snapshot, empty for success.
OnAnswer = Callable[[PodUid, str], object]


class _Connection:
    """One proxy."""

    def __init__(self, channel: Channel) -> None:
        self.turn = asyncio.Lock()
        self._channel = channel
        self._answer: asyncio.Future[str] | None = None
        self._late = 0
        self._gone = False

    async def ask(self, request: Request, netns: Netns | None = None) -> str:
        """Wait for the turn, send, wait for the answer.

        Returns:
            The error it reports, empty for success.

        Raises:
            ProxyGone: before the answer.
            ProxySilent: no answer in time.
        """
        async with self.turn:
            return await self.exchange(request, netns)

    async def exchange(self, request: Request, netns: Netns | None = None) -> str:
        """As :meth:`ask`, for who has the turn."""
        if self._gone:
            raise ProxyGone
        data = request_bytes(request)
        answer: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._answer = answer
        sent = False
        try:
            async with asyncio.timeout(ANSWER_S):
                await self._channel.send(data, () if netns is None else (netns.fileno(),))
                sent = True
                return await answer
        except TimeoutError:
            raise ProxySilent(ANSWER_S) from None
        except OSError as error:
            raise ProxyGone from error
        finally:
            self._answer = None
            if sent and (answer.cancelled() or not answer.done()):
                self._late += 1

    async def read(self) -> None:
        """Hand answers to who waits for them, until the proxy goes.

        Raises:
            ZdsError: it said something that nobody asked for.
        """
        while (packet := await self._channel.receive()) is not None:
            with packet:
                if packet.descriptors:
                    raise Unreadable("a descriptor in an answer")
                error = read_answer(packet.data)
            if self._late:
                self._late -= 1
                log.warning("late answer from the ztunnel error=%s", error or "none")
            elif self._answer is not None and not self._answer.done():
                self._answer.set_result(error)
            else:
                raise Unreadable("an answer to nothing")

    def end(self) -> None:
        """Tell who waits that nothing will come."""
        self._gone = True
        if self._answer is not None and not self._answer.done():
            self._answer.set_exception(ProxyGone())


class ZdsServer:
    """Serves while entered.

    Args:
        path: of the socket.
        snapshot: every pod there is, asked for each proxy that connects; a pod that goes while it is told may be
            left out, if its namespace is closed.
        on_answer: see there.

    Raises:
        OSError: on entering: the socket cannot be had.
    """

    def __init__(
        self,
        path: Path,
        snapshot: Callable[[], Iterable[Announced]],
        *,
        on_answer: OnAnswer = lambda uid, error: None,
    ) -> None:
        self.path = path
        self._snapshot = snapshot
        self._on_answer = on_answer
        self._connections: list[_Connection] = []
        self._tasks = Tasks("zds")
        self._listener: Listener | None = None

    @property
    def proxies(self) -> int:
        """How many proxies are connected."""
        return len(self._connections)

    async def __aenter__(self) -> Self:
        self._listener = Listener(self.path)
        self._tasks.start(self._accept(self._listener), "accept")
        return self

    async def __aexit__(self, *exception: object) -> None:
        await self._tasks.close()
        if self._listener is not None:
            self._listener.close()

    async def add(self, uid: PodUid, info: PodInfo, netns: Netns) -> None:
        """Announce a pod to the newest proxy; returns when its proxy listens.

        Raises:
            NoProxy, ProxyGone, ProxySilent, ProxyRefused: try again later.
        """
        if not self._connections:
            raise NoProxy
        error = await self._connections[-1].ask(AddPod(uid, info), netns)
        if error:
            raise ProxyRefused(error)

    async def delete(self, uid: PodUid) -> None:
        """Tell every proxy that a pod is gone; one that cannot be told will see it in its next snapshot."""
        asked = [connection.ask(DeletePod(uid)) for connection in self._connections]
        for answer in await asyncio.gather(*asked, return_exceptions=True):
            if answer:
                log.warning("ztunnel did not take a pod's end uid=%s error=%s", uid, answer)

    async def _accept(self, listener: Listener) -> None:
        while True:
            try:
                channel = await listener.accept()
            except OSError as error:
                log.error("cannot accept a ztunnel error=%s", error)
                await asyncio.sleep(_NO_DESCRIPTORS_S)
                continue
            self._welcome(channel)
            await asyncio.sleep(_ACCEPT_INTERVAL_S)

    def _welcome(self, channel: Channel) -> None:
        # A task that is cancelled before its first step never reaches a `finally` of its own.
        self._tasks.start(self._serve(channel), "proxy").add_done_callback(lambda _: channel.close())

    async def _serve(self, channel: Channel) -> None:
        try:
            async with asyncio.timeout(ANSWER_S):
                packet = await channel.receive()
            if packet is None:
                return
            with packet:
                read_hello(packet.data)
        except (ZdsError, OSError) as error:
            log.warning("not a ztunnel error=%s", str(error) or "no hello")
            return
        connection = _Connection(channel)
        # Changes queue up behind the snapshot: its turn is taken before anybody knows the connection.
        await connection.turn.acquire()
        self._connections.append(connection)
        log.info("ztunnel connected ztunnels=%d", len(self._connections))
        telling = self._tasks.start(self._tell(connection, channel), "snapshot")
        telling.add_done_callback(lambda _: connection.turn.release())
        try:
            await connection.read()
            log.info("ztunnel disconnected")
        except ZdsError as error:
            log.error("the ztunnel broke the protocol error=%s", error)
        except OSError as error:
            log.info("ztunnel disconnected error=%s", error)
        finally:
            self._connections.remove(connection)
            connection.end()
            channel.shut_down()
            telling.cancel()
            # Whoever still waits gets the turn before this does, and learns that it is over.
            async with connection.turn:
                pass

    async def _tell(self, connection: _Connection, channel: Channel) -> None:
        """The snapshot, pod by pod. An error about one is that pod's; a proxy that says nothing is let go."""
        try:
            for pod in list(self._snapshot()):
                if pod.netns is not None and pod.netns.fileno() < 0:
                    continue  # gone since; its end is waiting for the turn
                error = await connection.exchange(_request(pod), pod.netns)
                if error:
                    log.warning("ztunnel did not take a pod uid=%s error=%s", pod.uid, error)
                self._on_answer(pod.uid, error)
            if error := await connection.exchange(SnapshotSent()):
                log.error("ztunnel did not take the snapshot error=%s", error)
        except ProxyGone:
            pass  # said by who reads
        except ProxySilent as error:
            log.error("ztunnel let go error=%s", error)
            channel.shut_down()


def _request(pod: Announced) -> Request:
    return KeepPod(pod.uid) if pod.info is None else AddPod(pod.uid, pod.info)
