"""Runs in the main process: starts the worker processes, keeps their state current, and starts the pods in them.

**Listeners.** The main process binds a pod's ports and passes the same sockets to every worker. So when a worker
dies, another worker accepts the queued connections. With one socket per worker (SO_REUSEPORT), a dying worker's
queue would be lost, and new connections could not be directed to a successor's sockets
(:func:`tproxy.aio.sockets.leave_to_newer`). ``connection_counts.py`` distributes connections over workers.

**State.** A new worker gets a snapshot of the state, then each later change, in order. Queued messages refer to
values of the mesh, and are encoded only when they can be sent. A worker that does not read, or does not answer
within :data:`ztunnel.proxy.istio.workers.process.ANSWER_S`, is killed and replaced.

**Counters** of a dead or late worker keep their last values, because Prometheus would interpret a decreased
counter as a restart.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import os
import socket
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Final, Self

from tproxy.aio.netns import Netns
from tproxy.errors import TproxyError
from xds.model.identity import SpiffeId
from xds.model.mesh import Changes
from ztunnel.proxy.dataplane.gauges import Gauge
from ztunnel.proxy.flows.page import OtherFlows
from ztunnel.proxy.flows.ring import RingCounts
from ztunnel.proxy.istio.accounting.metrics import Metrics
from ztunnel.proxy.istio.admin.inspected import Connections
from ztunnel.proxy.istio.certificates.manager import CertificateManager, WorkloadCertificate
from ztunnel.proxy.istio.path.node import Node
from ztunnel.proxy.istio.path.pod import Dns, answering_s
from ztunnel.proxy.istio.path.pod_sockets import BACKLOG, Bound, bind
from ztunnel.proxy.istio.settings.config import PodName
from ztunnel.proxy.istio.workers.channel import (
    ChannelClosed,
    Descriptors,
    IpcChannel,
    Outgoing,
    Refused,
    RequestBody,
)
from ztunnel.proxy.istio.workers.connection_counts import ConnectionCounts
from ztunnel.proxy.istio.workers.mesh_replica import delta, snapshot
from ztunnel.proxy.istio.workers.messages import (
    Barrier,
    Begin,
    CertificateIssued,
    ConnectionsPart,
    CountsPart,
    DrainPod,
    FetchResource,
    FlowsPart,
    GetCertificate,
    GetConnections,
    GetCounts,
    GetFlows,
    HandOver,
    Listening,
    LogFilterChanged,
    MeetSuccessor,
    NamesGiven,
    Notification,
    ProtocolViolation,
    ResolveName,
    RevocationsChanged,
    StartPod,
    StopPod,
    TapPod,
    TapTotals,
    Value,
    pickled,
)
from ztunnel.proxy.istio.workers.process import ANSWER_S, WorkerProcess, spawn
from ztunnel.proxy.istio.zds.pods import RunningPod
from ztunnel.proxy.tap.request import TapRequest, Totals
from ztunnel.runtime.backoff import Backoff
from ztunnel.runtime.settings import plain_reason
from ztunnel.runtime.tasks import Tasks

if TYPE_CHECKING:
    from ztunnel.proxy.tap.taps import Carry

log = logging.getLogger(__name__)

_FIRST_RESTART_S: Final = 0.1
#: The longest time that an admin page waits for a worker's answer, in seconds.
_PAGE_S: Final = 1.0
#: The time limit for a worker to apply its first snapshot, in seconds. A mesh of 200,000 workloads takes ten
#: seconds.
_SYNC_S: Final = 300.0


class WorkerPod:
    """A pod whose connections the workers carry; see :class:`ztunnel.proxy.istio.zds.pods.RunningPod`.

    Args:
        workers: all workers.
        number: identifies the pod in messages to workers.
        bound: the pod's sockets. This object becomes the owner.
        dns: serves the pod's DNS in this process. ``None`` without a DNS proxy.
    """

    def __init__(
        self,
        workers: Workers,
        number: int,
        name: PodName,
        netns: Netns | None,
        bound: list[Bound],
        dns: Dns | None,
    ) -> None:
        self.number = number
        self.name = name
        self.dns = dns
        self._workers = workers
        self._netns = netns
        self._bound = bound
        self.leaving = False

    def start(self) -> tuple[StartPod, list[int]]:
        """Return the request that starts this pod in a worker, and the file descriptors to send along."""
        listening = tuple(
            Listening(port=each.address.port, host=each.address.host, transparent=each.transparent)
            for each in self._bound
        )
        request = StartPod(
            number=self.number, name=self.name, has_namespace=self._netns is not None, listening=listening
        )
        namespace = [self._netns.fileno()] if self._netns is not None else []
        return request, namespace + [each.sock.fileno() for each in self._bound]

    def close_listeners(self) -> None:
        """Close the main process's copies of the pod's listening sockets; the workers keep theirs."""
        for each in self._bound:
            each.sock.close()

    async def resolve(self, name: str, *, ipv6: bool) -> str | None:
        """Resolve a name like the pod's DNS proxy. Used for SOCKS clients in workers."""
        return None if self.dns is None else await self.dns.resolve(name, ipv6=ipv6)

    async def stop(self) -> None:
        """End the pod's proxy in all workers, without a drain; idempotent."""
        self._workers.forget(self)
        self.close_listeners()
        await self._workers.request_of_all(StopPod(self.number))
        if self.dns is not None:
            await self.dns.close()

    async def drain(self, timeout_s: float) -> None:
        """Drain the pod's connections in all workers concurrently; see
        :meth:`ztunnel.proxy.istio.path.pod.PodProxy.drain`.
        """
        time = asyncio.get_running_loop().time
        deadline_s = time() + timeout_s
        self.leaving = True
        self.close_listeners()
        if self.dns is not None:
            self.dns.leave()
        await self._workers.request_of_all(DrainPod(self.number, timeout_s), timeout_s + ANSWER_S)
        if self.dns is not None:
            await self.dns.finish(answering_s(deadline_s - time()))
        await self.stop()


class Workers:
    """A context manager that runs the worker processes.

    Args:
        count: the number of workers.
        node: the main process's state: mesh, certificates, metrics and log.
        certificates: the manager of the node's certificates.
        on_serving: called when the first worker begins to serve, and when the last serving worker is gone.
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
        self._connection_counts, self._memory = ConnectionCounts.create(count)
        self._running: dict[int, WorkerProcess] = {}
        self._pods: dict[int, WorkerPod] = {}
        self._numbers = itertools.count(1)
        self._settled = asyncio.Event()
        self._changed = asyncio.Event()
        self._served = False
        self._meeting = False
        self._late = 0
        self._restarts = 0
        self._stop_watching: Callable[[], None] = lambda: None
        self._tasks = Tasks("workers")
        # Each process exports its own access lines and spans, so every worker gets these settings.
        otlp = node.config.otlp
        own = replace(otlp, metrics=None) if otlp is not None and (otlp.logs or otlp.traces) else None
        self._config = replace(node.config, auth_token=None, xds_headers=(), ca_headers=(), otlp=own)

    @property
    def serving(self) -> int:
        """The number of serving workers. A worker serves once it has received all pods."""
        return sum(worker.serves for worker in self._running.values())

    def gauges(self) -> dict[str, Gauge]:
        """Return the gauges about the workers, for the metrics page."""
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
            self._tasks.keep(partial(self._keep, index), f"worker {index}")
        return self

    async def __aexit__(self, *exception: object) -> None:
        self._stop_watching()
        await self._tasks.close()
        self._connection_counts.close()
        os.close(self._memory)

    def settle(self) -> None:
        """Allow the workers to receive pods. Called once the control plane has described the whole mesh."""
        self._settled.set()

    async def meet_successor(self) -> None:
        """Make all workers, including those started later, take over open connections from the predecessor's
        workers, and then wait for a successor's workers.
        """
        self._meeting = True
        await self.request_of_all(MeetSuccessor())

    async def hand_over(self, seconds: float) -> None:
        """Stop accepting, because a successor now accepts, and make the workers hand over their
        open connections.
        """
        for pod in self._pods.values():
            pod.leaving = True
            pod.close_listeners()
        # A worker that is late is killed, and many connections on a busy node take minutes. Liveness checks end a
        # worker that hangs meanwhile.
        await self.request_of_all(HandOver(seconds), None)

    # One worker

    async def _keep(self, index: int) -> None:
        loop = asyncio.get_running_loop()
        backoff = Backoff(_FIRST_RESTART_S)
        while True:
            began_s = loop.time()
            try:
                await self._run(index)
            except OSError as error:
                log.error("worker not started worker=%d error=%s", index, plain_reason(error))
            if loop.time() - began_s > backoff.limit_s:
                backoff.reset()
            wait_s = backoff.next()
            self._restarts += 1
            log.error("worker is replaced worker=%d serving=%d in=%.1fs", index, self.serving, wait_s)
            await asyncio.sleep(wait_s)

    async def _run(self, index: int) -> None:
        """Start one worker and serve its channel. Return when the worker has ended.

        Raises:
            OSError: the worker process cannot be started.
        """
        ours, process, output = await spawn(self._node.logs, self._node.log_pressure)

        async def requested(body: RequestBody, descriptors: Descriptors) -> AsyncIterator[Value]:
            async for part in self._requested(channel, body):
                yield part

        channel = IpcChannel(ours, _refuse_notification, requested)
        worker = WorkerProcess(index, channel, process, output)
        self._running[index] = worker
        syncing = self._tasks.start(self._sync(worker), f"worker {index} sync")
        try:
            await channel.run()
        except ProtocolViolation as error:
            log.error("worker violated the protocol worker=%d error=%s", index, error)
        finally:
            syncing.cancel()
            self._connection_counts.remove(index)
            self._running.pop(index, None)
            self._lost(worker)  # without an await in between, so that every page counts it
            await channel.close()
            await worker.ended()
            self._connection_counts.remove(index)  # again: until its end, the process could publish a number
            self._report_serving()

    def _lost(self, worker: WorkerProcess) -> None:
        now_s = self._node.clock.monotonic()
        for part in worker.counts:
            self._node.metrics.add(part, lost=True, now_s=now_s)

    async def _sync(self, worker: WorkerProcess) -> None:
        """Send a new worker a snapshot of the state, and then the pods. After that, monitor the worker, and kill
        it if it hangs.
        """
        try:
            self._send_snapshot(worker)
            await self._settled.wait()
            await worker.request(Barrier(), within_s=_SYNC_S)
            worker.synced = True
            self._changed.set()
            for pod in list(self._pods.values()):
                if not pod.leaving:
                    await self._give(worker, pod)
            if self._meeting:
                await worker.request(MeetSuccessor())
        except ChannelClosed:
            return
        except OSError as error:  # out of descriptors
            log.error(
                "a worker cannot get its configuration or pods, ending it worker=%d error=%s",
                worker.index,
                plain_reason(error),
            )
            worker.kill()
            return
        except Exception:  # a bug in this program; the worker would wait for ever
            worker.kill()
            raise
        worker.serves = True
        self._report_serving()
        log.info("worker serves worker=%d pid=%d pods=%d", worker.index, worker.process.pid, len(self._pods))
        await worker.watch()

    def _send_snapshot(self, worker: WorkerProcess) -> None:
        """Queue the configuration and the state. Later changes are queued after them.

        Raises:
            OSError: no descriptor is free.
        """
        node, channel = self._node, worker.channel
        channel.notify(
            Begin(
                pickled_config=pickled(self._config),
                index=worker.index,
                workers=self.count,
                log_filter=str(node.logs.levels),
            ),
            [self._memory],
        )
        if node.revocations is not None:
            channel.notify(RevocationsChanged(node.revocations.current.encoded()))
        for message in snapshot(node.mesh):
            channel.notify(message)
        for wanted, state in self._certificates.states().items():
            if isinstance(state, WorkloadCertificate):
                channel.notify(_certificate(wanted, state))
        worker.notified = True

    def _carries(self, identity: SpiffeId) -> bool:
        """Return whether an identity belongs to a pod of this node."""
        mesh = self._node.mesh
        if identity in mesh.local_identities:
            return True
        names = [pod.name for pod in self._pods.values()]
        local = (mesh.local_workload(name.name, name.namespace, name.service_account) for name in names)
        return any(workload is not None and workload.identity == identity for workload in local)

    @staticmethod
    async def _give(worker: WorkerProcess, pod: WorkerPod) -> None:
        try:
            await worker.request(*pod.start())
        except Refused as refused:
            # Other workers carry the pod: it counts as started only if at least one worker has started it.
            log.error(
                "pod not started in a worker worker=%d pod=%s error=%s", worker.index, _named(pod.name), refused
            )

    def _report_serving(self) -> None:
        serves = self.serving > 0
        if serves != self._served:
            self._served = serves
            self._on_serving(serves)

    async def _requested(self, worker: IpcChannel, request: RequestBody) -> AsyncIterator[Value]:
        """Answer a worker's request."""
        match request:
            case GetCertificate(identity):
                if not self._carries(identity):
                    # A compromised worker must not obtain certificates of other nodes' workloads.
                    raise Refused(f"no pod of this node has the identity {identity}")
                certificate = await self._certificates.fetch(identity)
                worker.notify(_certificate(identity, certificate))
            case FetchResource(key):
                try:
                    await self._node.ask_about(key)
                except TimeoutError:
                    yield False
                else:
                    yield True
            case ResolveName():
                pod = self._pods.get(request.number)
                yield None if pod is None else await pod.resolve(request.name, ipv6=request.ipv6)
            case _:
                raise Refused(f"{type(request).__name__} is for workers")

    # All workers

    def _notify(self, message: Notification) -> None:
        outgoing = Outgoing(message)
        for worker in self._running.values():
            if worker.notified:
                worker.channel.send(outgoing)

    def _mesh_changed(self, changed: Changes) -> None:
        for message in delta(changed, self._node.mesh):
            self._notify(message)

    def _certificate_changed(self, wanted: SpiffeId, certificate: WorkloadCertificate) -> None:
        self._notify(_certificate(wanted, certificate))

    def _revocations_changed(self) -> None:
        assert self._node.revocations is not None
        self._notify(RevocationsChanged(self._node.revocations.current.encoded()))

    def names_given(self, pod: tuple[str, str], name: str, addresses: Sequence[str]) -> None:
        """Send the workers the addresses that answered a pod's DNS query, for their addons."""
        self._notify(NamesGiven(namespace=pod[0], pod=pod[1], name=name, addresses=tuple(addresses)))

    def log_filter_changed(self) -> None:
        """Send the changed log filter to the workers."""
        self._notify(LogFilterChanged(str(self._node.logs.levels)))

    async def request_of_all(self, request: RequestBody, within_s: float | None = ANSWER_S) -> None:
        """Send a request to every worker that has applied its snapshot, and wait for all answers. ``None`` sets no
        time limit.
        """
        asking = [worker.request(request, within_s=within_s) for worker in self._running.values() if worker.synced]
        for outcome in await asyncio.gather(*asking, return_exceptions=True):
            if isinstance(outcome, Refused):
                log.error("worker refused request=%s error=%s", type(request).__name__, outcome)
            elif isinstance(outcome, BaseException) and not isinstance(outcome, ChannelClosed):
                raise outcome

    def carriers(self) -> list[Carry]:
        """Return one packet-capture function (``Carry``) per serving worker. Workers started later are not
        captured.
        """
        return [partial(self._tap, worker) for worker in self._running.values() if worker.serves]

    @staticmethod
    async def _tap(worker: WorkerProcess, request: TapRequest, sink: socket.socket) -> Totals:
        """Capture packets of connections in one worker; see :meth:`ztunnel.proxy.tap.taps.Taps.carry`."""
        from ztunnel.proxy.tap.taps import CannotTap

        with sink:
            try:
                # There is no time limit, because the worker answers only when the capture has ended.
                (found,) = await worker.channel.request(TapPod(request), [sink.fileno()])
            except ChannelClosed:
                raise CannotTap("a worker has ended") from None
            except Refused as error:
                raise CannotTap(str(error)) from None
        if not isinstance(found, TapTotals):
            raise CannotTap("a worker answered something else")
        return found.totals.bounded

    # Pods

    async def start_pod(self, name: PodName, netns: Netns | None) -> WorkerPod:
        """Start a pod in every worker that has applied its snapshot, after waiting for at least one such worker.
        Return when these workers accept the pod's connections.

        Raises:
            TproxyError: a port is in use, or a worker could not start the pod.
        """
        bound = bind(self._node, netns)
        try:
            dns = self._serve_dns(name, netns)
        except BaseException:
            for each in bound:
                each.sock.close()
            raise
        pod = WorkerPod(self, next(self._numbers), name, netns, bound, dns)
        try:
            for each in bound:
                each.sock.listen(BACKLOG)
                self._node.predecessor_ports.listening(each.sock)
            self._pods[pod.number] = pod
            await self._started(pod)
        except BaseException:
            await pod.stop()
            raise
        return pod

    def _serve_dns(self, name: PodName, netns: Netns | None) -> Dns | None:
        if not self._node.config.dns_proxy:
            return None
        from ztunnel.proxy.istio.dns.pod_dns import PodDns  # takes 2 MiB, which a node without DNS saves

        return PodDns(self._node, name, netns)

    async def _started(self, pod: WorkerPod) -> None:
        while True:
            asking = [worker.request(*pod.start()) for worker in self._running.values() if worker.synced]
            if not asking:
                self._changed.clear()
                await self._changed.wait()
                continue
            outcomes = await asyncio.gather(*asking, return_exceptions=True)
            for outcome in outcomes:
                if isinstance(outcome, Refused):
                    raise TproxyError(str(outcome))
                if isinstance(outcome, BaseException) and not isinstance(outcome, ChannelClosed):
                    raise outcome
            if any(outcome is None for outcome in outcomes):
                return

    def forget(self, pod: WorkerPod) -> None:
        """Forget a pod, so that it is not started in new workers. Idempotent."""
        pod.leaving = True
        self._pods.pop(pod.number, None)

    # Pages

    async def metrics(self) -> Metrics:
        """Return the sum of this process's and the workers' counts, for one page."""
        await asyncio.gather(*(self._count(worker) for worker in self._running.values() if worker.synced))
        # There must be no await between the next two lines, so that a dying worker is counted exactly once.
        page = self._node.metrics.page_with()
        parts = [part for worker in self._running.values() for part in worker.counts]
        for part in parts:
            page.add(part)
            await asyncio.sleep(0)
        return page

    async def _count(self, worker: WorkerProcess) -> None:
        try:
            async with asyncio.timeout(_PAGE_S):
                found = await worker.channel.request(GetCounts())
        except TimeoutError:
            self._late += 1
        except (ChannelClosed, Refused):
            pass
        else:
            worker.counts = [part.counts for part in found if isinstance(part, CountsPart)]

    async def flows(self, after_ns: int, last: int) -> OtherFlows:
        """Return the connections that ended last in workers, oldest first."""
        wanted = GetFlows(after_ns=after_ns, last=last)
        running = [worker for worker in self._running.values() if worker.synced]
        found = await asyncio.gather(*(_flows_of(worker, wanted) for worker in running))
        return OtherFlows(
            sorted(line for each in found for line in each.lines),
            RingCounts.added(each.ring for each in found),
        )

    async def connections(self) -> dict[RunningPod, Connections]:
        """Return the workers' open connections by pod. Workers that do not answer in time are left out."""
        found: dict[int, Connections] = {number: {"inbound": [], "outbound": []} for number in self._pods}
        pods = dict(self._pods)

        async def of(worker: WorkerProcess) -> None:
            try:
                async with asyncio.timeout(_PAGE_S):
                    parts = await worker.channel.request(GetConnections())
            except TimeoutError:
                self._late += 1
                return
            except (ChannelClosed, Refused):
                return
            for part in parts:
                if isinstance(part, ConnectionsPart) and part.number in found:
                    found[part.number][part.direction].extend(part.entries)

        await asyncio.gather(*(of(worker) for worker in self._running.values() if worker.synced))
        return {pods[number]: connections for number, connections in found.items()}


async def _flows_of(worker: WorkerProcess, request: GetFlows) -> OtherFlows:
    """Return a worker's flow records. Empty if the worker does not answer in time or has ended."""
    try:
        async with asyncio.timeout(_PAGE_S):
            parts = await worker.channel.request(request)
    except (TimeoutError, ChannelClosed, Refused):
        return OtherFlows([])
    found = [part for part in parts if isinstance(part, FlowsPart)]
    return OtherFlows(
        # A compromised worker could inject lines into the output, so values with a line break are dropped.
        [line for part in found for line in part.lines if "\n" not in line[1]],
        RingCounts.added(part.ring for part in found),
    )


async def _refuse_notification(message: Notification, descriptors: Descriptors) -> None:
    raise ProtocolViolation(f"{type(message).__name__} from a worker")


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
