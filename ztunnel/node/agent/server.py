"""The agent's half of ZDS: announces pods to proxies.

Each proxy that connects gets a snapshot of all pods, then changes. A request to one proxy waits for the answer
to the last one; requests to different proxies do not wait for each other. During an upgrade two proxies are
connected: new pods are announced to the newer one, removals to both.

Answers have no number. If a request has timed out, its late answer must not be taken for the answer to the next
request (istio-cni does that). So timed-out requests are counted, and the same number of answers is skipped.
"""

import asyncio
import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Self

from tproxy.aio.netns import Netns
from ztunnel.node.agent.errors import NoProxy, ProxyGone, ProxyRefused, ProxySilent
from ztunnel.proxy.istio.zds.channel import Channel, Listener
from ztunnel.proxy.istio.zds.messages import (
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
from ztunnel.proxy.istio.zds.pods import PodInfo, PodUid
from ztunnel.runtime.settings import plain_reason
from ztunnel.runtime.tasks import Tasks

log = logging.getLogger(__name__)

#: The time limit for a proxy's hello, and for each of its answers.
ANSWER_S = 5.0
# The interval between two accepted connections: a proxy that fails in a loop must not take all of the agent's
# time.
_ACCEPT_INTERVAL_S = 0.2
_NO_DESCRIPTORS_S = 1.0


@dataclass(frozen=True, slots=True)
class Announced:
    """A pod of a snapshot. Without ``info``, it is recorded but not yet examined. Proxies that serve such a pod
    keep it.
    """

    uid: PodUid
    info: PodInfo | None = None
    netns: Netns | None = None


#: Called with a proxy's answer about a pod of its snapshot: the error, or an empty text for success.
OnAnswer = Callable[[PodUid, str], object]


class _Connection:
    """The connection of one proxy. At most one request at a time awaits its answer."""

    def __init__(self, channel: Channel) -> None:
        self.turn = asyncio.Lock()
        self._channel = channel
        self._answer: asyncio.Future[str] | None = None
        self._late = 0
        self._gone = False

    async def request(self, request: Request, netns: Netns | None = None) -> str:
        """Send a request once earlier requests are answered, and wait for its answer.

        Returns:
            The error that the answer reports, empty for success.

        Raises:
            ProxyGone: the connection ended before the answer.
            ProxySilent: no answer within ``ANSWER_S``.
        """
        async with self.turn:
            return await self.exchange(request, netns)

    async def exchange(self, request: Request, netns: Netns | None = None) -> str:
        """Send a request and return its answer, like :meth:`request`. The caller holds the lock :attr:`turn`."""
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
        """Resolve awaited answers until the proxy closes the connection.

        Raises:
            ZdsError: a packet is not an answer to a request.
            OSError: the connection broke.
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
                raise Unreadable("an answer without a request")

    def end(self) -> None:
        """Fail the current request and all later ones with ProxyGone."""
        self._gone = True
        if self._answer is not None and not self._answer.done():
            self._answer.set_exception(ProxyGone())


class ZdsServer:
    """Listens for proxies while entered.

    Args:
        path: path of the socket.
        snapshot: called for each proxy that connects; returns every pod. Pods whose namespace is closed while the
            snapshot is sent are left out.
        on_answer: see :data:`OnAnswer`.
        held: send no snapshot before :meth:`release`: a proxy ends the pods that a snapshot lacks.

    Raises:
        OSError: on entering, the socket cannot be bound.
    """

    def __init__(
        self,
        path: Path,
        snapshot: Callable[[], Iterable[Announced]],
        *,
        on_answer: OnAnswer = lambda uid, error: None,
        held: bool = False,
    ) -> None:
        self.path = path
        self._snapshot = snapshot
        self._on_answer = on_answer
        self._connections: list[_Connection] = []
        self._tasks = Tasks("zds")
        self._listener: Listener | None = None
        self._released = asyncio.Event()
        if not held:
            self._released.set()

    def release(self) -> None:
        """From now on, send snapshots to proxies; idempotent."""
        self._released.set()

    @property
    def proxies(self) -> int:
        """The number of connected proxies."""
        return len(self._connections)

    async def __aenter__(self) -> Self:
        self._listener = Listener(self.path)
        self._tasks.keep(partial(self._accept, self._listener), "accept")
        return self

    async def __aexit__(self, *exception: object) -> None:
        await self._tasks.close()
        if self._listener is not None:
            self._listener.close()

    async def add(self, uid: PodUid, info: PodInfo, netns: Netns) -> None:
        """Announce a pod to the newest proxy, and return when that proxy listens in the pod.

        Raises:
            NoProxy, ProxyGone, ProxySilent, ProxyRefused: not announced; the caller retries later.
        """
        if not self._connections:
            raise NoProxy
        error = await self._connections[-1].request(AddPod(uid, info), netns)
        if error:
            raise ProxyRefused(error)

    async def delete(self, uid: PodUid) -> None:
        """Notify every proxy that a pod is gone. Failures are only logged, because the next snapshot lacks the
        pod.
        """
        deletions = [connection.request(DeletePod(uid)) for connection in self._connections]
        for answer in await asyncio.gather(*deletions, return_exceptions=True):
            if answer:
                log.warning("ztunnel did not confirm the removal of a pod uid=%s error=%s", uid, answer)

    async def _accept(self, listener: Listener) -> None:
        while True:
            try:
                channel = await listener.accept()
            except OSError as error:
                log.error("cannot accept a ztunnel error=%s", plain_reason(error))
                await asyncio.sleep(_NO_DESCRIPTORS_S)
                continue
            self._welcome(channel)
            await asyncio.sleep(_ACCEPT_INTERVAL_S)

    def _welcome(self, channel: Channel) -> None:
        # The callback closes the channel, regardless of the task's result.
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
            log.warning("not a ztunnel error=%s", plain_reason(error) or "no hello")
            return
        connection = _Connection(channel)
        # The lock is taken before the connection is in the list, so that changes are sent after the snapshot.
        await connection.turn.acquire()
        self._connections.append(connection)
        log.info("ztunnel connected ztunnels=%d", len(self._connections))
        sending = self._tasks.start(self._send_snapshot(connection, channel), "snapshot")
        sending.add_done_callback(lambda _: connection.turn.release())
        try:
            await connection.read()
            log.info("ztunnel disconnected")
        except ZdsError as error:
            log.error("the ztunnel violated the protocol error=%s", error)
        except OSError as error:
            log.info("ztunnel disconnected error=%s", plain_reason(error))
        finally:
            self._connections.remove(connection)
            connection.end()
            channel.shut_down()
            sending.cancel()
            # The lock is fair: requests that are already waiting get it first, and fail with ProxyGone.
            async with connection.turn:
                pass

    async def _send_snapshot(self, connection: _Connection, channel: Channel) -> None:
        """Send the snapshot, pod by pod. If the proxy refuses a pod, the snapshot continues. A silent proxy is
        disconnected.
        """
        await self._released.wait()
        try:
            for pod in list(self._snapshot()):
                if pod.netns is not None and pod.netns.fileno() < 0:
                    continue  # removed since; its deletion is waiting for the turn
                error = await connection.exchange(_request(pod), pod.netns)
                if error:
                    log.warning("ztunnel did not accept a pod uid=%s error=%s", pod.uid, error)
                self._on_answer(pod.uid, error)
            if error := await connection.exchange(SnapshotSent()):
                log.error("ztunnel did not accept the snapshot error=%s", error)
        except ProxyGone:
            pass  # logged by the reader
        except ProxySilent as error:
            log.error("ztunnel disconnected by the agent error=%s", error)
            channel.shut_down()


def _request(pod: Announced) -> Request:
    return KeepPod(pod.uid) if pod.info is None else AddPod(pod.uid, pod.info)
