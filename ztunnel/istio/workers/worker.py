"""One worker: a process that carries connections of pods, and knows only what the main process tells it.

It has its own mesh, pools, certificates and counters, and every pod of the node; nothing of it is on a disk. When
the main process goes, it goes too.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import Final, assert_never

from cryptography import x509

from hbone.aio.poller import Poller
from hbone.aio.spin import SpinSettings
from tproxy.aio.netns import Netns
from xds.model.address import SocketAddress
from xds.model.identity import SpiffeId
from xds.model.mesh import Changes, Mesh
from ztunnel.identity.crl import RevocationLists
from ztunnel.identity.csr import IdentityError, IssuedCertificate
from ztunnel.istio import serving
from ztunnel.istio.certificates.manager import TlsPolicy, WorkloadCertificate
from ztunnel.istio.config import ProxyMode
from ztunnel.istio.logs import LogStream
from ztunnel.istio.metrics import Metrics
from ztunnel.istio.node import Node
from ztunnel.istio.pod import Bound, PodProxy
from ztunnel.istio.workers.conversation import Conversation, Descriptors, Gone, Refused
from ztunnel.istio.workers.link import (
    AddressWanted,
    Begin,
    Caught,
    CertificateIssued,
    CertificateWanted,
    ConnectionsPart,
    ConnectionsWanted,
    CountsWanted,
    DrainPod,
    KeyWanted,
    LogFilterChanged,
    MeshChange,
    Question,
    RevocationsChanged,
    StartPod,
    StopPod,
    Told,
)
from ztunnel.istio.workers.mirror import Mirror
from ztunnel.istio.workers.shares import Shares
from ztunnel.runtime import heap
from ztunnel.runtime.clock import SystemClock
from ztunnel.runtime.log_writer import LogWriter
from ztunnel.runtime.tasks import Tasks

log = logging.getLogger(__name__)

#: See :mod:`ztunnel.istio.app`.
_SWEEP_S: Final = 60.0
#: Entries of the dump in one part of an answer.
_ENTRIES_PER_PART: Final = 500


class ToldRevocations:
    """See :class:`ztunnel.istio.certificates.manager.Revocations`; the main process reads the file."""

    def __init__(self) -> None:
        self.current = RevocationLists()
        self._watchers: list[Callable[[], None]] = []

    def watch(self, changed: Callable[[], None]) -> None:
        """Call ``changed`` after each change."""
        self._watchers.append(changed)

    def change(self, lists: RevocationLists) -> None:
        """Others are in force."""
        self.current = lists
        for changed in self._watchers:
            changed()


class ToldCertificates:
    """Certificates replicated from the main process, which requests and renews them.

    Same contract as :class:`ztunnel.istio.certificates.manager.Certificates`.

    Args:
        conversation: with it.
        policy: what tunnels negotiate.
        revocations: ``None``: nobody is revoked.
    """

    def __init__(self, conversation: Conversation, policy: TlsPolicy, revocations: ToldRevocations | None) -> None:
        self._conversation = conversation
        self._policy = policy
        self._revocations = revocations
        self._certificates: dict[SpiffeId, WorkloadCertificate] = {}
        self._generation = 0
        self._clock = SystemClock()
        if revocations is not None:
            revocations.watch(self._revocations_changed)

    def current(self, identity: SpiffeId) -> WorkloadCertificate | None:
        """What is valid now."""
        certificate = self._certificates.get(identity)
        if certificate is None or certificate.issued.not_after.timestamp() <= self._clock.wall():
            return None
        return certificate

    async def fetch(self, identity: SpiffeId) -> WorkloadCertificate:
        """What is valid now, else what the main process gets.

        Raises:
            IdentityError: none can be had.
        """
        certificate = self.current(identity)
        if certificate is None:
            try:
                await self._conversation.ask(CertificateWanted(identity))
            except Refused as refused:
                raise IdentityError(str(refused)) from refused
            except Gone:
                raise IdentityError("the proxy ends") from None
            certificate = self.current(identity)
        if certificate is None:
            raise IdentityError("the identity is no longer needed")
        return certificate

    def put(self, told: CertificateIssued) -> None:
        """A new or renewed one; one that is here already changes nothing."""
        known = self._certificates.get(told.wanted)
        if known is not None and known.issued.chain_pem == told.chain_pem:
            return
        issued = IssuedCertificate(
            identity=told.identity,
            chain=tuple(x509.load_pem_x509_certificates(told.chain_pem)),
            roots=tuple(x509.load_pem_x509_certificates(told.roots_pem)),
            chain_pem=told.chain_pem,
            roots_pem=told.roots_pem,
            key_pem=told.key_pem,
        )
        self._put(told.wanted, issued)

    def _put(self, wanted: SpiffeId, issued: IssuedCertificate) -> None:
        self._generation += 1
        revoked = self._revocations.current if self._revocations is not None else None
        self._certificates[wanted] = WorkloadCertificate(issued, self._generation, self._policy, revoked)

    def forget(self, identities: set[SpiffeId]) -> None:
        """Nobody here is them any more."""
        for identity in identities:
            self._certificates.pop(identity, None)

    def _revocations_changed(self) -> None:
        # Contexts hold the lists that they were made with.
        for wanted, certificate in list(self._certificates.items()):
            self._put(wanted, certificate.issued)


@dataclass(slots=True)
class _Pod:
    proxy: PodProxy
    netns: Netns | None


class _Carrier:
    """What a worker is once it knows its configuration."""

    def __init__(self, begin: Begin, shares: Shares, conversation: Conversation) -> None:
        config = self.config = begin.config
        self._conversation = conversation
        self._writer = LogWriter()
        # The main process reads this end to end and writes it: one log.
        file = self._writer.file("/dev/stdout")
        self.logs = LogStream(self._writer, file, config.log_filter, json_lines=config.log_json)
        self.logs.install()
        self.change_log_filter(begin.log_filter)
        self.metrics = Metrics(config.version_tag, config.metric_series)
        self.mesh = Mesh(node=config.node)
        self.revocations = ToldRevocations() if config.crl_path else None
        self.certificates = ToldCertificates(conversation, config.tls_policy, self.revocations)
        self.poller = Poller(SpinSettings(limit_s=config.spin_us / 1e6))
        self._housekeeper = heap.Housekeeper(self.poller)
        self._shares = shares
        self.clock = SystemClock()
        self.node = Node(
            config=config,
            mesh=self.mesh,
            certificates=self.certificates,
            poller=self.poller,
            clock=self.clock,
            metrics=self.metrics,
            logs=self.logs,
            revocations=self.revocations,
            is_ours=partial(shares.is_turn_of, begin.index),
            tell_open=partial(shares.tell, begin.index),
            ask=self._ask_about if config.xds_on_demand else None,
        )
        self.pods: dict[int, _Pod] = {}
        self.mirror = Mirror(self.mesh)
        self._tasks = Tasks("worker")
        self._tasks.start(self._sweep(), "metrics sweep")
        self.mesh.watch(self._mesh_changed)
        shares.tell(begin.index, 0)

    async def _ask_about(self, key: str) -> None:
        try:
            (in_time,) = await self._conversation.ask(KeyWanted(key))
        except (Refused, Gone) as error:
            raise TimeoutError from error
        if not in_time:
            raise TimeoutError

    async def _resolve(self, number: int, name: str, *, ipv6: bool) -> str | None:
        try:
            (address,) = await self._conversation.ask(AddressWanted(number=number, name=name, ipv6=ipv6))
        except (Refused, Gone):
            return None
        return str(address) if address is not None else None

    async def _sweep(self) -> None:
        while True:
            await asyncio.sleep(_SWEEP_S)
            self.metrics.expire(self.clock.monotonic())

    # Told

    def _mesh_changed(self, changes: Changes) -> None:
        self.node.forget(changes.workloads)
        self.metrics.changed(changes, [uid for uid in changes.workloads if self.mesh.workload(uid) is not None])
        if self.config.proxy_mode is ProxyMode.SHARED:
            self.certificates.forget(changes.local_identities_removed)
        self._housekeeper.changed()

    async def change_revocations(self, encoded: tuple[bytes, ...]) -> None:
        """Other lists; connections of whoever is on them end."""
        if self.revocations is None:
            return
        # In a thread: lists of large authorities take seconds to read.
        lists = await asyncio.to_thread(RevocationLists.decoded, encoded)
        self.revocations.change(lists)
        for pod in self.pods.values():
            pod.proxy.end_revoked(lists)

    def change_log_filter(self, text: str) -> None:
        """The whole filter, as the main process has it."""
        self.logs.change(text, reset=True)

    # Asked

    async def start_pod(self, asked: StartPod, descriptors: Descriptors) -> None:
        """Take a pod's connections; again is fine: a worker that has just come may be asked twice."""
        if asked.number in self.pods:
            return
        netns = Netns.from_fd(descriptors.take(), f"pod {asked.name.name}") if asked.has_namespace else None
        bound: list[Bound] = []
        try:
            for each in asked.listening:
                sock = socket.socket(fileno=descriptors.take())
                sock.setblocking(False)
                bound.append(Bound(sock, SocketAddress(each.host, each.port), each.transparent))
            pod = await serving.start(self.node, asked.name, netns, bound)
        except BaseException:
            for each_bound in bound:
                each_bound.sock.close()
            if netns is not None:
                netns.close()
            raise
        if self.config.dns_proxy:
            pod.resolver = partial(self._resolve, asked.number)
        self.pods[asked.number] = _Pod(pod, netns)

    async def stop_pod(self, number: int) -> None:
        """End a pod's connections; none is fine."""
        pod = self.pods.pop(number, None)
        if pod is not None:
            await pod.proxy.stop()
            if pod.netns is not None:
                pod.netns.close()

    async def drain_pod(self, number: int, timeout_s: float) -> None:
        """Let a pod's connections end; none is fine."""
        pod = self.pods.get(number)
        if pod is not None:
            await pod.proxy.drain(timeout_s)
            await self.stop_pod(number)

    # The end

    async def close(self) -> None:
        """End everything."""
        for number in list(self.pods):
            await self.stop_pod(number)
        await self._tasks.close()
        self._housekeeper.close()
        self.poller.close()
        self._shares.close()
        self.logs.flush()
        self._writer.close()


class Worker:
    """Does what the main process says, until it is gone.

    Args:
        sock: our end of the pair.
    """

    def __init__(self, sock: socket.socket) -> None:
        self._conversation = Conversation(sock, self._told, self._asked, with_main=True)
        self._carrier: _Carrier | None = None

    async def run(self) -> None:
        """Until the main process hangs up."""
        try:
            await self._conversation.run()
        finally:
            await self._conversation.close()
            if self._carrier is not None:
                await self._carrier.close()

    @property
    def _begun(self) -> _Carrier:
        if self._carrier is None:
            raise Refused("nothing has been said of the configuration")
        return self._carrier

    async def _told(self, message: Told, descriptors: Descriptors) -> None:
        match message:
            case Begin():
                memory = descriptors.take()
                try:
                    shares = Shares(memory, message.workers)
                finally:
                    os.close(memory)
                self._carrier = _Carrier(message, shares, self._conversation)
            case MeshChange():
                self._begun.mirror.receive(message)
            case CertificateIssued():
                self._begun.certificates.put(message)
            case RevocationsChanged(lists):
                await self._begun.change_revocations(lists)
            case LogFilterChanged(text):
                self._begun.change_log_filter(text)
            case _:
                assert_never(message)

    async def _asked(self, question: Question, descriptors: Descriptors) -> AsyncIterator[object]:
        carrier = self._begun
        match question:
            case Caught():
                heap.settle()
            case StartPod():
                await carrier.start_pod(question, descriptors)
            case StopPod(number):
                await carrier.stop_pod(number)
            case DrainPod(number, timeout_s):
                await carrier.drain_pod(number, timeout_s)
            case CountsWanted():
                for part in carrier.metrics.counts():
                    yield part
            case ConnectionsWanted():
                for entries in _connections(dict(carrier.pods)):
                    yield entries
            case _:
                raise Refused(f"{type(question).__name__} is for the main process")


def _connections(pods: dict[int, _Pod]) -> Iterator[ConnectionsPart]:
    """See :class:`ConnectionsWanted`."""
    for number, pod in pods.items():
        for direction, entries in pod.proxy.dump().items():
            left = iter(entries)
            while part := tuple(islice(left, _ENTRIES_PER_PART)):
                yield ConnectionsPart(number=number, direction=direction, entries=part)


def run(descriptor: int) -> int:
    """Be a worker on an inherited socket; the process's exit status."""
    import uvloop

    # Both reach everybody in the foreground or in a process group; the main process decides what they mean.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    heap.expect_growth()

    async def serve() -> None:
        sock = socket.socket(fileno=descriptor)
        sock.setblocking(False)
        sock.set_inheritable(False)
        await Worker(sock).run()

    uvloop.run(serve())
    return 0
