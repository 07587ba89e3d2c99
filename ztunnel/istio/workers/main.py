"""The main process's half: starts workers, keeps them told, and gives them the pods.

**Listeners.** The main process binds a pod's ports and hands the same sockets to every worker. Workers with
sockets of their own (SO_REUSEPORT) would each have a queue that dies with them, and of several sockets of a
predecessor and of a successor the kernel cannot be told which to prefer
(:func:`tproxy.aio.sockets.leave_to_newer`). Connections that wait while a worker dies, or all of them, are taken
by whoever is there next. ``shares.py`` spreads them.

**State.** A worker that starts gets everything that is in force at one instant, then each change, in order. What
it is told is kept as references to the values until it can be sent. One that does not read, or does not do within
:data:`_ANSWER_S` what it is asked, is ended and replaced.

**Counters** of a worker that died are kept as they were last heard of; those of one that is late are shown so: a
counter that goes down would be taken for that of a new process.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import os
import signal
import socket
import sys
from asyncio.subprocess import DEVNULL, Process, create_subprocess_exec
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import replace
from typing import Final, Self

from tproxy.aio.netns import Netns
from tproxy.errors import TproxyError
from xds.model.identity import SpiffeId
from xds.model.mesh import Changes
from ztunnel.istio.certificates.manager import CertificateManager, WorkloadCertificate
from ztunnel.istio.config import PodName
from ztunnel.istio.logs import LogStream
from ztunnel.istio.metrics import Counts, Gauge, Metrics
from ztunnel.istio.node import Node
from ztunnel.istio.pod import BACKLOG, Bound, PodProxy, bind
from ztunnel.istio.workers.conversation import Conversation, Descriptors, Gone, Outgoing, Refused
from ztunnel.istio.workers.link import (
    AddressWanted,
    Begin,
    Caught,
    CertificateIssued,
    CertificateWanted,
    ConnectionsPart,
    ConnectionsWanted,
    Corrupt,
    CountsWanted,
    DrainPod,
    KeyWanted,
    Listening,
    LogFilterChanged,
    Question,
    RevocationsChanged,
    StartPod,
    StopPod,
    Told,
)
from ztunnel.istio.workers.mirror import everything, since
from ztunnel.istio.workers.shares import Shares
from ztunnel.istio.zds.pods import RunningPod
from ztunnel.runtime.backoff import Backoff
from ztunnel.runtime.tasks import Tasks

log = logging.getLogger(__name__)

_FIRST_RESTART_S: Final = 0.1
#: What a worker may take for anything but draining; starting a pod takes it a millisecond.
_ANSWER_S: Final = 10.0
#: A page waits no longer for numbers.
_PAGE_S: Final = 1.0
#: After its last pod has ended, a worker ends at once; then it is killed.
_END_S: Final = 3.0
#: What putting a mesh in force may take: 200,000 workloads take ten.
_SYNC_S: Final = 300.0
_READ_BYTES: Final = 64 * 1024

#: Entries of the dump: ``inbound`` and ``outbound`` connections.
Connections = dict[str, list[dict[str, object]]]


class _Lines:
    """What one worker prints: whole lines of it go to our log, whoever else writes there."""

    def __init__(self, descriptor: int, logs: LogStream) -> None:
        self._descriptor = descriptor
        self._logs = logs
        self._begun = b""
        self.ended = asyncio.Event()
        os.set_blocking(descriptor, False)
        asyncio.get_running_loop().add_reader(descriptor, self._readable)

    def _readable(self) -> None:
        try:
            data = os.read(self._descriptor, _READ_BYTES)
        except BlockingIOError:
            return
        whole, newline, rest = data.rpartition(b"\n")
        if newline:
            self._logs.pass_on(self._begun + whole + newline)
            self._begun = rest
        else:
            self._begun += rest
        if not data:
            self.close()

    def close(self) -> None:
        """Read no more."""
        if self.ended.is_set():
            return
        self.ended.set()
        if self._begun:  # it died in the middle of a line
            self._logs.pass_on(self._begun + b"\n")
        asyncio.get_running_loop().remove_reader(self._descriptor)
        os.close(self._descriptor)


class _Worker:
    """One worker process, from its start to its end."""

    def __init__(self, index: int, conversation: Conversation, process: Process) -> None:
        self.index = index
        self.conversation = conversation
        self.process = process
        #: It is told changes, for it has been told what was before.
        self.told = False
        #: All of that is in force there: it gets pods.
        self.synced = False
        #: It has every pod.
        self.serves = False
        self.counts: Sequence[Counts] = ()

    async def ask(self, question: Question, descriptors: Sequence[int] = (), within_s: float = _ANSWER_S) -> None:
        """Have something done.

        Raises:
            Refused: it cannot be.
            Gone: the worker is, or had to be ended because it did not answer.
        """
        try:
            async with asyncio.timeout(within_s):
                await self.conversation.ask(question, descriptors)
        except TimeoutError:
            log.error(
                "worker does not answer, ending it worker=%d question=%s", self.index, type(question).__name__
            )
            self.kill()
            raise Gone from None
        except Gone:
            self.synced = False
            raise

    def kill(self) -> None:
        """End it now."""
        self.synced = False
        if self.process.returncode is None:
            self.process.kill()
        self.conversation.hang_up()


class WorkerPod:
    """A pod whose connections workers carry; see :class:`ztunnel.istio.zds.pods.RunningPod`."""

    def __init__(
        self, workers: Workers, number: int, name: PodName, netns: Netns | None, bound: list[Bound]
    ) -> None:
        self.number = number
        self.name = name
        #: Serves the pod's names, here; ``None`` without a DNS proxy.
        self.local: PodProxy | None = None
        self._workers = workers
        self._netns = netns
        self._bound = bound
        self.leaving = False

    def start(self) -> tuple[StartPod, list[int]]:
        """What a worker is asked for it, and the descriptors that it needs."""
        listening = tuple(
            Listening(port=each.address.port, host=each.address.host, transparent=each.transparent)
            for each in self._bound
        )
        question = StartPod(
            number=self.number, name=self.name, has_namespace=self._netns is not None, listening=listening
        )
        namespace = [self._netns.fileno()] if self._netns is not None else []
        return question, namespace + [each.sock.fileno() for each in self._bound]

    def close_listeners(self) -> None:
        """Leave the sockets to the workers that have them."""
        for each in self._bound:
            each.sock.close()

    async def resolve(self, name: str, *, ipv6: bool) -> str | None:
        """As the pod's DNS proxy says."""
        return None if self.local is None else await self.local.resolve_name(name, ipv6=ipv6)

    async def stop(self) -> None:
        """End at once; again is fine."""
        self._workers.leaves(self)
        self.close_listeners()
        await self._workers.everybody(StopPod(self.number))
        if self.local is not None:
            await self.local.stop()

    async def drain(self, timeout_s: float) -> None:
        """As :meth:`ztunnel.istio.pod.PodProxy.drain`, in all workers at once."""
        self.leaving = True
        self.close_listeners()
        await self._workers.everybody(DrainPod(self.number, timeout_s), timeout_s + _ANSWER_S)
        await self.stop()


class Workers:
    """Runs while entered.

    Args:
        count: how many.
        node: whose mesh, certificates, metrics and log the main process has.
        certificates: the manager that the node's are of.
        on_serving: called with whether at least one worker serves, when that changes.
    """

    def __init__(
        self,
        count: int,
        node: Node,
        certificates: CertificateManager,
        *,
        on_serving: Callable[[bool], object] = lambda serving: None,
    ) -> None:
        self.count = count
        self._node = node
        self._certificates = certificates
        self._on_serving = on_serving
        self._shares, self._memory = Shares.make(count)
        self._running: dict[int, _Worker] = {}
        self._pods: dict[int, WorkerPod] = {}
        self._numbers = itertools.count(1)
        self._settled = asyncio.Event()
        self._changed = asyncio.Event()
        self._served = False
        self._late = 0
        self._restarts = 0
        self._stop_watching: Callable[[], None] = lambda: None
        self._tasks = Tasks("workers")
        self._config = replace(node.config, auth_token=None, xds_headers=(), ca_headers=())

    @property
    def serving(self) -> int:
        """Workers that have every pod."""
        return sum(worker.serves for worker in self._running.values())

    def gauges(self) -> dict[str, Gauge]:
        """For the metrics page."""
        return {
            "ztunnel_workers": Gauge(
                "gauge", "Processes that carry connections of pods (unstable)", lambda: self.serving
            ),
            "ztunnel_worker_restarts": Gauge(
                "counter", "Worker processes that ended and were replaced (unstable)", lambda: self._restarts
            ),
            "ztunnel_workers_late": Gauge(
                "counter",
                "Times that a worker was late for a page, which shows what it had counted before (unstable)",
                lambda: self._late,
            ),
        }

    async def __aenter__(self) -> Self:
        self._stop_watching = self._node.mesh.watch(self._mesh_changed)
        self._certificates.watch(self._certificate_changed)
        if self._node.revocations is not None:
            self._node.revocations.watch(self._revocations_changed)
        self._node.metrics.processes = lambda: [worker.process.pid for worker in self._running.values()]
        for index in range(self.count):
            self._tasks.start(self._keep(index), f"worker {index}")
        return self

    async def __aexit__(self, *exception: object) -> None:
        self._stop_watching()
        await self._tasks.close()
        self._shares.close()
        os.close(self._memory)

    def settle(self) -> None:
        """The mesh is as the control plane first described it: from now on a worker that has it can serve."""
        self._settled.set()

    # One worker

    async def _keep(self, index: int) -> None:
        loop = asyncio.get_running_loop()
        backoff = Backoff(_FIRST_RESTART_S)
        while True:
            began_s = loop.time()
            try:
                await self._run(index)
            except OSError as error:
                log.error("worker not started worker=%d error=%s", index, error)
            if loop.time() - began_s > backoff.limit_s:
                backoff.reset()
            wait_s = backoff.next()
            self._restarts += 1
            log.error("worker is replaced worker=%d serving=%d in=%.1fs", index, self.serving, wait_s)
            await asyncio.sleep(wait_s)

    async def _run(self, index: int) -> None:
        """A worker's life; returns when it has died."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        reading, writing = os.pipe2(os.O_CLOEXEC)
        try:
            process = await create_subprocess_exec(
                *(sys.executable, "-m", "ztunnel", "worker", str(theirs.fileno())),
                stdin=DEVNULL,
                stdout=writing,
                stderr=writing,
                pass_fds=(theirs.fileno(),),
                env=_environment(os.environ),
            )
        except BaseException:
            ours.close()
            os.close(reading)
            raise
        finally:
            theirs.close()
            os.close(writing)
        lines = _Lines(reading, self._node.logs)
        ours.setblocking(False)

        async def asked(question: Question, descriptors: Descriptors) -> AsyncIterator[object]:
            async for part in self._asked(conversation, question):
                yield part

        conversation = Conversation(ours, _tells_nothing, asked)
        worker = _Worker(index, conversation, process)
        self._running[index] = worker
        syncing = self._tasks.start(self._sync(worker), f"worker {index} sync")
        try:
            await conversation.run()
        except Corrupt as error:
            log.error("worker broke the link worker=%d error=%s", index, error)
        finally:
            syncing.cancel()
            self._shares.leave(index)
            self._running.pop(index, None)
            await conversation.close()
            await self._ended(worker, lines)
            self._lost(worker)
            self._tell_serving()

    async def _ended(self, worker: _Worker, lines: _Lines) -> None:
        """It sees the end of the link, and ends."""
        process = worker.process
        try:
            async with asyncio.timeout(_END_S):
                status = await process.wait()
        except TimeoutError:
            process.kill()
            status = await process.wait()
        try:
            async with asyncio.timeout(_END_S):
                await lines.ended.wait()
        except TimeoutError:
            lines.close()
        if status:
            how = f"signal {signal.Signals(-status).name}" if status < 0 else f"status {status}"
            log.error("worker ended worker=%d pid=%d by=%r", worker.index, process.pid, how)

    def _lost(self, worker: _Worker) -> None:
        now_s = self._node.clock.monotonic()
        for part in worker.counts:
            self._node.metrics.add(part, lost=True, now_s=now_s)

    async def _sync(self, worker: _Worker) -> None:
        """Tell a new worker everything, then give it the pods."""
        node, conversation = self._node, worker.conversation
        conversation.tell(
            Begin(config=self._config, index=worker.index, workers=self.count, log_filter=str(node.logs.levels)),
            [self._memory],
        )
        if node.revocations is not None:
            conversation.tell(RevocationsChanged(node.revocations.current.encoded()))
        # In one go: from here on changes queue behind.
        for message in everything(node.mesh):
            conversation.tell(message)
        for wanted, state in self._certificates.states().items():
            if isinstance(state, WorkloadCertificate):
                conversation.tell(_certificate(wanted, state))
        worker.told = True
        await self._settled.wait()
        try:
            await worker.ask(Caught(), within_s=_SYNC_S)
            worker.synced = True
            self._changed.set()
            for pod in list(self._pods.values()):
                if not pod.leaving:
                    await self._give(worker, pod)
        except Gone:
            return
        except OSError as error:
            log.error("worker cannot be given the pods, ending it worker=%d error=%s", worker.index, error)
            worker.kill()
            return
        worker.serves = True
        log.info("worker serves worker=%d pid=%d pods=%d", worker.index, worker.process.pid, len(self._pods))
        self._tell_serving()

    @staticmethod
    async def _give(worker: _Worker, pod: WorkerPod) -> None:
        try:
            await worker.ask(*pod.start())
        except Refused as refused:
            # Others have it, or it would not be here.
            log.error("worker lacks a pod worker=%d pod=%s error=%s", worker.index, _named(pod.name), refused)

    def _tell_serving(self) -> None:
        serves = self.serving > 0
        if serves != self._served:
            self._served = serves
            self._on_serving(serves)

    async def _asked(self, worker: Conversation, question: Question) -> AsyncIterator[object]:
        """What a worker wants to know."""
        match question:
            case CertificateWanted(identity):
                certificate = await self._certificates.fetch(identity)
                worker.tell(_certificate(identity, certificate))
            case KeyWanted(key):
                try:
                    await self._node.told(key)
                except TimeoutError:
                    yield False
                else:
                    yield True
            case AddressWanted():
                pod = self._pods.get(question.number)
                yield None if pod is None else await pod.resolve(question.name, ipv6=question.ipv6)
            case _:
                raise Refused(f"{type(question).__name__} is for workers")

    # All of them

    def _tell(self, message: Told) -> None:
        outgoing = Outgoing(message)
        for worker in self._running.values():
            if worker.told:
                worker.conversation.send(outgoing)

    def _mesh_changed(self, changed: Changes) -> None:
        for message in since(changed, self._node.mesh):
            self._tell(message)

    def _certificate_changed(self, wanted: SpiffeId, certificate: WorkloadCertificate) -> None:
        self._tell(_certificate(wanted, certificate))

    def _revocations_changed(self) -> None:
        assert self._node.revocations is not None
        self._tell(RevocationsChanged(self._node.revocations.current.encoded()))

    def log_filter_changed(self) -> None:
        """The log has another filter."""
        self._tell(LogFilterChanged(str(self._node.logs.levels)))

    async def everybody(self, question: Question, within_s: float = _ANSWER_S) -> None:
        """Have something done by every worker that is there."""
        asking = [worker.ask(question, within_s=within_s) for worker in self._running.values() if worker.synced]
        for outcome in await asyncio.gather(*asking, return_exceptions=True):
            if isinstance(outcome, Refused):
                log.error("worker refused question=%s error=%s", type(question).__name__, outcome)
            elif isinstance(outcome, BaseException) and not isinstance(outcome, Gone):
                raise outcome

    # Pods

    async def start_pod(self, name: PodName, netns: Netns | None) -> WorkerPod:
        """Have a pod's connections carried; returns when every worker that is there takes them, at least one.

        Raises:
            TproxyError: a port is taken, or a worker could not.
        """
        bound = bind(self._node, netns)
        pod = WorkerPod(self, next(self._numbers), name, netns, bound)
        try:
            if self._node.config.dns_proxy:
                from ztunnel.istio.dns.pod_dns import PodDns  # 2 MiB that nobody else needs

                pod.local = PodProxy(self._node, name, netns)
                pod.local.closing.append(PodDns(pod.local).close)
            for each in bound:
                each.sock.listen(BACKLOG)
            self._pods[pod.number] = pod
            await self._started(pod)
        except BaseException:
            await pod.stop()
            raise
        return pod

    async def _started(self, pod: WorkerPod) -> None:
        while True:
            asking = [worker.ask(*pod.start()) for worker in self._running.values() if worker.synced]
            if not asking:
                self._changed.clear()
                await self._changed.wait()
                continue
            outcomes = await asyncio.gather(*asking, return_exceptions=True)
            for outcome in outcomes:
                if isinstance(outcome, Refused):
                    raise TproxyError(str(outcome))
                if isinstance(outcome, BaseException) and not isinstance(outcome, Gone):
                    raise outcome
            if any(outcome is None for outcome in outcomes):
                return

    def leaves(self, pod: WorkerPod) -> None:
        """A pod is not given to new workers any more."""
        pod.leaving = True
        self._pods.pop(pod.number, None)

    # Pages

    async def metrics(self) -> Metrics:
        """Everything that this process and the workers have counted, for one page."""
        await asyncio.gather(*(self._count(worker) for worker in self._running.values() if worker.synced))
        # At one instant, so that a worker that dies now is counted once.
        page = self._node.metrics.page_with()
        parts = [part for worker in self._running.values() for part in worker.counts]
        for part in parts:
            page.add(part)
            await asyncio.sleep(0)
        return page

    async def _count(self, worker: _Worker) -> None:
        try:
            async with asyncio.timeout(_PAGE_S):
                found = await worker.conversation.ask(CountsWanted())
        except TimeoutError:
            self._late += 1
        except (Gone, Refused):
            pass
        else:
            worker.counts = [part for part in found if isinstance(part, Counts)]

    async def connections(self) -> dict[RunningPod, Connections]:
        """Live connections by pod; of a worker that is late, none."""
        found: dict[int, Connections] = {number: {"inbound": [], "outbound": []} for number in self._pods}
        pods = dict(self._pods)

        async def of(worker: _Worker) -> None:
            try:
                async with asyncio.timeout(_PAGE_S):
                    parts = await worker.conversation.ask(ConnectionsWanted())
            except TimeoutError:
                self._late += 1
                return
            except (Gone, Refused):
                return
            for part in parts:
                if isinstance(part, ConnectionsPart) and part.number in found:
                    found[part.number][part.direction].extend(part.entries)

        await asyncio.gather(*(of(worker) for worker in self._running.values() if worker.synced))
        return {pods[number]: connections for number, connections in found.items()}


async def _tells_nothing(message: Told, descriptors: Descriptors) -> None:
    raise Corrupt(f"{type(message).__name__} from a worker")


def _environment(env: Mapping[str, str]) -> dict[str, str]:
    """Of this process, without what might be a credential: workers are told their configuration."""
    return {
        name: value
        for name, value in env.items()
        if name != "AUTH_TOKEN" and not name.startswith(("XDS_HEADER_", "CA_HEADER_"))
    }


def _certificate(wanted: SpiffeId, certificate: WorkloadCertificate) -> CertificateIssued:
    issued = certificate.issued
    return CertificateIssued(
        wanted=wanted,
        identity=issued.identity,
        chain_pem=issued.chain_pem,
        roots_pem=issued.roots_pem,
        key_pem=issued.key_pem,
    )


def _named(name: PodName) -> str:
    return f"{name.namespace}/{name.name}"
