"""Runs in a worker process, which carries the connections of pods, with replicas of the main process's state.

A worker has its own mesh, pools, certificates and counters, and carries connections of every pod of the node. It
never writes to disk, and ends with the main process.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Final, Literal, assert_never

import ztunnel
from hbone.aio.poller import Poller
from hbone.aio.spin import SpinSettings
from tproxy.aio.netns import Netns
from xds.model.address import SocketAddress
from xds.model.mesh import Changes, Mesh
from ztunnel.proxy.dataplane.life_table import Event
from ztunnel.proxy.dataplane.resolver import Resolver
from ztunnel.proxy.flows import page as flow_page
from ztunnel.proxy.identity.crl import RevocationLists
from ztunnel.proxy.istio.accounting.flows import ring_of, shape
from ztunnel.proxy.istio.accounting.logs import LogStream
from ztunnel.proxy.istio.accounting.metrics import Metrics
from ztunnel.proxy.istio.accounting.sweep import sweep
from ztunnel.proxy.istio.path.connections import Shown
from ztunnel.proxy.istio.path.names import Names
from ztunnel.proxy.istio.path.node import (
    Node,
    addons_of,
    log_pressure,
    node_gauges,
    policies_in_force,
    taps_permitted,
)
from ztunnel.proxy.istio.path.pod import PodProxy
from ztunnel.proxy.istio.path.pod_sockets import Bound, PodSockets
from ztunnel.proxy.istio.settings.config import ProxyMode
from ztunnel.proxy.istio.workers.certificate_replica import ReplicatedCertificates, ReplicatedRevocations
from ztunnel.proxy.istio.workers.channel import ChannelClosed, Descriptors, IpcChannel, Refused, RequestBody
from ztunnel.proxy.istio.workers.connection_counts import ConnectionCounts
from ztunnel.proxy.istio.workers.mesh_replica import MeshReplica
from ztunnel.proxy.istio.workers.messages import (
    Barrier,
    Begin,
    CertificateIssued,
    ConnectionsPart,
    CountsPart,
    DrainPod,
    FetchResource,
    FlowsPart,
    GetConnections,
    GetCounts,
    GetFlows,
    HandOver,
    LogFilterChanged,
    MeetSuccessor,
    MeshChange,
    NamesGiven,
    Notification,
    ResolveName,
    RevocationsChanged,
    StartPod,
    StopPod,
    TapPod,
    TapTotals,
    Turn,
    Value,
)
from ztunnel.proxy.tap.request import TapRequest, Totals
from ztunnel.runtime import descriptors, heap
from ztunnel.runtime.clock import SystemClock
from ztunnel.runtime.log_rotation import ignore_rotation
from ztunnel.runtime.log_writer import LogWriter
from ztunnel.runtime.parts import split
from ztunnel.runtime.tasks import Tasks
from ztunnel.runtime.turns import turned
from ztunnel.runtime.watchdog import Watchdog

if TYPE_CHECKING:
    from ztunnel.proxy.dataplane.handover.service import Handover
    from ztunnel.proxy.istio.accounting.exports import Exports
    from ztunnel.proxy.otlp.settings import OtlpSettings

log = logging.getLogger(__name__)


#: The most connections in one part of an answer, and the most characters of their texts. Peers choose some of the
#: texts, and the main process ends a worker that sends a frame of more than 4 MiB.
_PART_ENTRIES: Final = 500
_PART_CHARACTERS: Final = 256 * 1024


class _MainDns:
    """Resolves names for a pod by asking the main process."""

    def __init__(self, channel: IpcChannel, number: int) -> None:
        self._channel = channel
        self._number = number

    async def resolve(self, name: str, *, ipv6: bool) -> str | None:
        try:
            (address,) = await self._channel.request(ResolveName(number=self._number, name=name, ipv6=ipv6))
        except (Refused, ChannelClosed):
            return None
        return str(address) if address is not None else None

    def leave(self) -> None:
        """No-op, because the main process answers the pod's DNS queries."""

    async def finish(self, limit_s: float) -> None:
        """No-op, like :meth:`leave`."""

    async def close(self) -> None:
        """No-op, like :meth:`leave`."""


@dataclass(slots=True)
class _Pod:
    proxy: PodProxy
    netns: Netns | None


class _Carrier:
    """A worker's state and pods. Created once the configuration has arrived."""

    def __init__(self, begin: Begin, connection_counts: ConnectionCounts, channel: IpcChannel) -> None:
        config = self.config = begin.config
        self._channel = channel
        self._writer = LogWriter()
        # The main process reads this worker's output, and writes it to the common log.
        file = self._writer.file("/dev/stdout")
        self.logs = LogStream(self._writer, file, config.log_filter, json_lines=config.log_json)
        self.logs.install()
        self.change_log_filter(begin.log_filter)
        self.metrics = Metrics(
            config.version_tag,
            config.metric_series,
            expiry_s=config.metric_expiry_s,
            removed=config.metric_labels_removed,
            flows=ring_of(config.flows),
            ports=config.metric_ports,
        )
        self.mesh = Mesh(node=config.node)
        self.revocations = ReplicatedRevocations() if config.crl_path else None
        self.certificates = ReplicatedCertificates(channel, config.tls_policy, self.revocations)
        self.poller = Poller(SpinSettings(limit_s=config.spin_us / 1e6))
        self._memory_trimmer = heap.MemoryTrimmer(self.poller)
        self._connection_counts = connection_counts
        self.clock = SystemClock()
        self.node = Node(
            config=config,
            mesh=self.mesh,
            certificates=self.certificates,
            poller=self.poller,
            clock=self.clock,
            metrics=self.metrics,
            logs=self.logs,
            names=Names(Resolver(), self.clock),
            revocations=self.revocations,
            policies=policies_in_force(config, self.clock, self.metrics),
            taps=taps_permitted(config, self.clock),
            log_pressure=log_pressure(config, self._writer, self.clock),
            is_ours=partial(connection_counts.is_turn_of, begin.index),
            tell_open=partial(connection_counts.set, begin.index),
            ask=self._ask_about if config.xds_on_demand else None,
        )
        self.metrics.gauges = node_gauges(self.node, self._writer, None)
        self._addons = addons_of(self.node)
        self.pods: dict[int, _Pod] = {}
        self.replica = MeshReplica(self.mesh)
        self._stack = ExitStack()
        addons = self.node.addons
        named = addons.host.current.name if addons is not None else None
        self._stack.enter_context(Watchdog(self.metrics.loop, flush=self.logs.flush, culprit=named))
        self._exports = self._exported(config.otlp) if config.otlp is not None else None
        self._tasks = Tasks("worker")
        self._met = False
        self._handover: Handover | None = None
        if config.moves:
            from ztunnel.proxy.dataplane.handover.service import Handover, protect_secrets
            from ztunnel.proxy.istio.handover.kinds import kinds_of

            protect_secrets()
            self._handover = Handover(
                Path(config.handover_dir),
                kinds_of(lambda: [pod.proxy for pod in self.pods.values()]),
                self.node.poller,
                self.clock,
                version=ztunnel.__version__,
                statistics=self.metrics.handovers,
                worker=begin.index,
            )
        self._tasks.keep(partial(sweep, self.metrics, self.clock), "metrics sweep")
        if self.node.policies is not None:
            self._tasks.keep(self.node.policies.run, "policies")
        self.mesh.watch(self._mesh_changed)
        self._index = begin.index
        self._accepts = False

    async def start(self) -> None:
        """Start the addons, which need a running event loop."""
        if self._addons is not None:
            await self._addons.__aenter__()

    async def _ask_about(self, key: str) -> None:
        try:
            (in_time,) = await self._channel.request(FetchResource(key))
        except (Refused, ChannelClosed) as error:
            raise TimeoutError from error
        if not in_time:
            raise TimeoutError

    def _exported(self, settings: OtlpSettings) -> Exports:
        from ztunnel.proxy.istio.accounting.exports import Exports  # most proxies have no collector

        async def page() -> Metrics:
            return self.metrics  # never called: the main process exports the metrics of all processes

        return Exports(settings, self.config, self.logs, self.metrics, page, self.clock)

    # Notifications

    def _mesh_changed(self, changes: Changes) -> None:
        self.node.forget(changes.workloads)
        self.metrics.changed(changes, [uid for uid in changes.workloads if self.mesh.workload(uid) is not None])
        if self.config.proxy_mode is ProxyMode.SHARED:
            self.certificates.forget(changes.local_identities_removed)
        self._memory_trimmer.changed()
        if self.node.addons is not None:
            self.node.addons.mesh_changed(self.mesh)

    async def change_revocations(self, encoded: tuple[bytes, ...]) -> None:
        """Replace the revocation lists, and end the connections of revoked peers."""
        if self.revocations is None:
            return
        # Parse in a thread, because the revocation lists of a large CA take seconds.
        lists = await asyncio.to_thread(RevocationLists.decoded, encoded)
        self.revocations.change(lists)
        self.node.live.review(Event.REVOCATIONS)

    def change_log_filter(self, text: str) -> None:
        """Replace the log filter."""
        self.logs.change(text, reset=True)

    # Requests

    async def start_pod(self, request: StartPod, descriptors: Descriptors) -> None:
        """Start carrying a pod's connections. Idempotent, because a newly started worker can get the request
        twice.
        """
        if request.number in self.pods:
            return
        netns = Netns.from_fd(descriptors.take(), f"pod {request.name.name}") if request.has_namespace else None
        bound: list[Bound] = []
        try:
            for each in request.listening:
                sock = socket.socket(fileno=descriptors.take())
                sock.setblocking(False)
                bound.append(Bound(sock, SocketAddress(each.host, each.port), each.transparent))
            dns = _MainDns(self._channel, request.number) if self.config.dns_proxy else None
            pod = PodProxy(self.node, request.name, PodSockets(self.node, netns), dns=dns)
            await pod.start(bound)
        except BaseException:
            for each_bound in bound:
                each_bound.sock.close()
            if netns is not None:
                netns.close()
            raise
        self.pods[request.number] = _Pod(pod, netns)
        if not self._accepts:
            # Announced only now: a worker with 0 connections makes the others wait before each accept.
            self._accepts = True
            self._connection_counts.set(self._index, 0)

    async def stop_pod(self, number: int) -> None:
        """End a pod's connections, if the pod is known."""
        pod = self.pods.pop(number, None)
        if pod is not None:
            await pod.proxy.stop()
            if pod.netns is not None:
                pod.netns.close()

    async def drain_pod(self, number: int, timeout_s: float) -> None:
        """Drain a pod's connections, if the pod is known."""
        pod = self.pods.get(number)
        if pod is not None:
            await pod.proxy.drain(timeout_s)
            await self.stop_pod(number)

    def meet_successor(self) -> None:
        """If connections can move between processes, take over the connections of the predecessor's worker, then
        wait for the successor's worker. Idempotent.
        """
        if self._handover is not None and not self._met:
            self._met = True
            self._handover.begin()

    async def hand_over(self, seconds: float) -> None:
        """Hand open connections over to the successor's worker now. Those that cannot move yet are offered again
        until this process ends.
        """
        handover = self._handover
        if handover is None:
            return
        if handover.successor_waits:
            await asyncio.gather(*(pod.proxy.leave_ports() for pod in list(self.pods.values())))
            await handover.give(seconds)
        self._tasks.start(handover.give_late(), "late hand-over")

    async def tap(self, wanted: TapRequest, descriptors: Descriptors) -> Totals:
        """Capture a pod's new connections; see :meth:`ztunnel.proxy.tap.taps.Taps.carry`."""
        sink = socket.socket(fileno=descriptors.take())
        sink.setblocking(False)
        taps = self.node.taps
        if taps is None:
            sink.close()
            raise Refused("the configuration permits no taps")
        from ztunnel.proxy.tap.taps import CannotTap

        try:
            return await taps.carry(wanted, sink)
        except CannotTap as error:
            raise Refused(str(error)) from error

    # The end

    async def close(self) -> None:
        """End all pods."""
        if self._handover is not None:
            await self._handover.close()
        for number in list(self.pods):
            await self.stop_pod(number)
        await self._tasks.close()
        if self._addons is not None:
            await self._addons.__aexit__()
        if self._exports is not None:
            await self._exports.close()
        self._memory_trimmer.close()
        self.poller.close()
        self._connection_counts.close()
        self._stack.close()
        self.logs.flush()
        self._writer.close()


class Worker:
    """Serves the channel to the main process until it closes.

    Args:
        sock: the worker's end of the socket pair.
    """

    def __init__(self, sock: socket.socket) -> None:
        self._channel = IpcChannel(sock, self._notified, self._requested, to_main=True)
        self._carrier: _Carrier | None = None

    async def run(self) -> None:
        """Serve until the main process closes the channel."""
        try:
            await self._channel.run()
        finally:
            await self._channel.close()
            if self._carrier is not None:
                await self._carrier.close()

    @property
    def _begun(self) -> _Carrier:
        if self._carrier is None:
            raise Refused("the configuration has not arrived")
        return self._carrier

    async def _notified(self, message: Notification, descriptors: Descriptors) -> None:
        match message:
            case Begin():
                memory = descriptors.take()
                try:
                    connection_counts = ConnectionCounts(memory, message.workers)
                finally:
                    os.close(memory)
                self._carrier = _Carrier(message, connection_counts, self._channel)
                await self._carrier.start()
            case MeshChange():
                self._begun.replica.receive(message)
            case CertificateIssued():
                self._begun.certificates.put(message)
            case RevocationsChanged(lists):
                await self._begun.change_revocations(lists)
            case LogFilterChanged(text):
                self._begun.change_log_filter(text)
            case NamesGiven():
                given = self._begun.node.names_answered
                if given is not None:
                    given((message.namespace, message.pod), message.name, message.addresses)
            case _:
                assert_never(message)

    async def _requested(self, request: RequestBody, descriptors: Descriptors) -> AsyncIterator[Value]:
        carrier = self._begun
        match request:
            case Barrier():
                heap.settle()
            case Turn():
                await turned(carrier.poller)
            case StartPod():
                await carrier.start_pod(request, descriptors)
            case StopPod(number):
                await carrier.stop_pod(number)
            case DrainPod(number, timeout_s):
                await carrier.drain_pod(number, timeout_s)
            case MeetSuccessor():
                carrier.meet_successor()
            case HandOver(seconds):
                await carrier.hand_over(seconds)
            case GetCounts():
                for part in carrier.metrics.counts():
                    yield CountsPart(part)
            case GetConnections():
                for entries in _connections(dict(carrier.pods)):
                    yield entries
            case GetFlows(after_ns=after_ns, last=last):
                ring = carrier.metrics.flows
                yield FlowsPart(ring=ring.counts(after_ns))
                found = flow_page.lines(ring, shape(carrier.config), after_ns, last)
                for some in split(
                    found, lambda line: len(line[1]), most_items=_PART_ENTRIES, most_size=_PART_CHARACTERS
                ):
                    yield FlowsPart(some)
            case TapPod(wanted):
                yield TapTotals(await carrier.tap(wanted, descriptors))
            case _:
                raise Refused(f"{type(request).__name__} is for the main process")


def _connections(pods: dict[int, _Pod]) -> Iterator[ConnectionsPart]:
    """Yield the open connections of all pods, as parts of the answer to :class:`GetConnections`."""
    directions: tuple[Literal["inbound", "outbound"], ...] = ("inbound", "outbound")
    for number, pod in pods.items():
        dump = pod.proxy.dump()
        for direction in directions:
            entries = dump[direction]
            for part in split(entries, _characters, most_items=_PART_ENTRIES, most_size=_PART_CHARACTERS):
                yield ConnectionsPart(number=number, direction=direction, entries=part)


def _characters(shown: Shown) -> int:
    return sum(len(value) for value in shown.values() if isinstance(value, str))


def run(descriptor: int) -> int:
    """Run a worker on an inherited socket. Return the process's exit status."""
    import uvloop

    # Ignore these signals, which a terminal sends to the whole process group. Only the main process handles them.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    ignore_rotation()  # a worker's log lines are written by the main process
    descriptors.raise_limit()
    heap.expect_growth()

    async def serve() -> None:
        sock = socket.socket(fileno=descriptor)
        sock.setblocking(False)
        sock.set_inheritable(False)
        await Worker(sock).run()

    uvloop.run(serve())
    return 0
