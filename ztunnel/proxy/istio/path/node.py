"""The state shared by a node's pods: mesh, certificates, metrics, failed endpoints, and a table of the pods."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING

from hbone.aio.connection_settings import ConnectionSettings
from hbone.aio.poller import Poller
from hbone.settings import Http2Settings, client_settings, server_settings
from tproxy.aio import sockets
from xds.model.mesh import Mesh
from xds.model.workload import Workload, WorkloadUid
from ztunnel.policy.calico.settings import live_policies
from ztunnel.proxy.dataplane.gauges import Gauge, Generations, process_gauges
from ztunnel.proxy.dataplane.handshake_limiter import HalfOpen, HalfOpenLimits
from ztunnel.proxy.dataplane.live_table import LiveTable
from ztunnel.proxy.identity.crl import RevocationLists
from ztunnel.proxy.istio.accounting.logs import LogStream
from ztunnel.proxy.istio.accounting.metrics import Metrics
from ztunnel.proxy.istio.accounting.peer_baggage_labels import BaggageLabels
from ztunnel.proxy.istio.accounting.workload_labels import WorkloadLabels, labels_of
from ztunnel.proxy.istio.certificates.manager import Certificates, Revocations
from ztunnel.proxy.istio.path.answered_keys import AnsweredKeys
from ztunnel.proxy.istio.path.failed_endpoints import FailedEndpoints
from ztunnel.proxy.istio.path.names import Names
from ztunnel.proxy.istio.path.node_local import NodeLocalTarget
from ztunnel.proxy.istio.settings.config import IstioConfig, PodName
from ztunnel.runtime.clock import Clock
from ztunnel.runtime.descriptors import Descriptors, limit_of_process
from ztunnel.runtime.log_pressure import LogPressure
from ztunnel.runtime.log_writer import LogWriter
from ztunnel.runtime.memory import memory_limit_bytes, waiting_bytes
from ztunnel.runtime.predecessor_ports import PredecessorPorts

if TYPE_CHECKING:
    from ztunnel.policy.calico.live import LivePolicies
    from ztunnel.proxy.addons.process import AddonProcess
    from ztunnel.proxy.istio.path.addons import PodAddons
    from ztunnel.proxy.tap.taps import Taps

#: The largest number of concurrently forwarded DNS queries of all pods together; each uses two sockets.
DNS_QUERIES = 512

#: Namespace, name and service account of a pod. These are known from both ZDS and xDS, so pods can be matched with
#: workloads.
PodKey = tuple[str, str, str]


def pod_key(name: PodName) -> PodKey:
    """Return the key of a pod."""
    return name.namespace, name.name, name.service_account


@dataclass(slots=True, kw_only=True, eq=False)
class Node:
    """The state shared by pods. Created once per process.

    Attributes:
        names: resolves the host names of workloads without addresses.
        revocations: the source of revocation lists, if one is configured.
        policies: Calico's policies. ``None`` if only the mesh's policies decide.
        taps: the taps of this process's pods. ``None`` if taps are not permitted.
        addons: the addons of this process, if any.
        names_answered: called with a pod's namespace and name, a name, and the addresses in our DNS answer.
            ``None`` if no addon needs names.
        log_pressure: delays new connections while the log is behind. ``None`` if lines are dropped instead.
        is_ours: see :class:`ztunnel.runtime.accepting.ListeningSocket`.
        tell_open: reports the number of open sockets after each change, to other processes that accept on the same
            ports.
        ask: requests a resource from the control plane, with on-demand xDS. ``None`` if the control plane sends
            the whole mesh.
        pods: the pods of this node, for node-local tunnels; see :meth:`register`.
        pod_window_bytes: the budget in bytes for enlarging the windows of a pod's tunnel connections.
        predecessor_ports: lets a predecessor accept new connections as long as this process cannot serve them.
        half_open: connections to pods whose handshake has not finished.
        descriptors: limits the file descriptors that each pod may use.
        baggage_labels: labels received in peers' baggage, limited per peer.
        dns_places: limits the pods' queries that wait for name servers.
        asked: the on-demand resource names that the control plane has answered lately, including "does not exist".
        live: the table of all open connections of these pods.
        sampled_below: the threshold of trace sampling for :func:`hbone.tunnel_headers.format_traceparent`.
        warns_unmatched: whether access lines of connections that match no service or workload are logged as
            warnings.
    """

    config: IstioConfig
    mesh: Mesh
    certificates: Certificates
    poller: Poller
    clock: Clock
    metrics: Metrics
    logs: LogStream
    names: Names
    revocations: Revocations | None = None
    policies: LivePolicies | None = None
    taps: Taps | None = None
    addons: PodAddons | None = None
    names_answered: Callable[[tuple[str, str], str, Sequence[str]], None] | None = None
    log_pressure: LogPressure | None = None
    is_ours: Callable[[], bool] | None = None
    tell_open: Callable[[int], None] | None = None
    ask: Callable[[str], Awaitable[None]] | None = None
    rng: random.Random = field(default_factory=random.Random)
    failed_endpoints: FailedEndpoints = field(init=False, default_factory=FailedEndpoints)
    pods: dict[PodKey, NodeLocalTarget] = field(init=False, default_factory=dict)
    predecessor_ports: PredecessorPorts = field(init=False, default_factory=PredecessorPorts)
    asked: AnsweredKeys = field(init=False)
    live: LiveTable = field(init=False, default_factory=LiveTable)
    sampled_below: int = field(init=False)
    warns_unmatched: bool = field(init=False)
    client_settings: ConnectionSettings = field(init=False)
    server_settings: ConnectionSettings = field(init=False)
    keepalive: sockets.Keepalive | None = field(init=False)
    pod_window_bytes: int = field(init=False)
    half_open: HalfOpen = field(init=False)
    descriptors: Descriptors = field(init=False)
    baggage_labels: BaggageLabels = field(init=False, default_factory=BaggageLabels)
    dns_places: asyncio.Semaphore = field(init=False, default_factory=lambda: asyncio.Semaphore(DNS_QUERIES))
    _labels: dict[WorkloadUid, WorkloadLabels] = field(init=False, default_factory=dict)

    @contextmanager
    def waiting(self, what: str) -> Iterator[None]:
        """A context manager that measures how long a connection waits for ``what``, even if the wait fails."""
        began_s = self.clock.monotonic()
        try:
            yield
        finally:
            self.metrics.waited(what, self.clock.monotonic() - began_s)

    def __post_init__(self) -> None:
        config = self.config
        self.asked = AnsweredKeys(self.clock.monotonic)
        self.sampled_below = config.otlp.sampled_below if config.otlp is not None else 0
        self.warns_unmatched = config.warns_unmatched
        self.client_settings = self._settings(client_settings())
        self.server_settings = self._settings(server_settings())
        wanted = config.socket
        in_all, self.pod_window_bytes = waiting_bytes(memory_limit_bytes() // max(1, config.worker_threads))
        self.poller.peers.windows.limit = in_all
        most = limit_of_process()
        limits = HalfOpenLimits.of_descriptors(most, timeout_s=config.handshake_timeout_s)
        self.half_open = HalfOpen(self.poller, limits, partial(self.metrics.shook_hands, "server"))
        self.descriptors = Descriptors(most, self.half_open.shed)
        self.keepalive = (
            None
            if wanted.keepalive_time_s is None
            else sockets.Keepalive(
                idle_s=max(1, int(wanted.keepalive_time_s)),
                interval_s=max(1, int(wanted.keepalive_interval_s)),
                probes=wanted.keepalive_retries,
            )
        )

    def _settings(self, http2: Http2Settings) -> ConnectionSettings:
        config = self.config
        return ConnectionSettings(
            http2=replace(
                http2,
                stream_window_bytes=config.stream_window,
                connection_window_bytes=config.connection_window,
                max_frame_bytes=config.frame_size,
                early_data=config.early_data,
            ),
            handshake_timeout_s=config.handshake_timeout_s,
        )

    def labels_of(self, workload: Workload) -> WorkloadLabels:
        """Return the labels of a workload, cached until the workload changes."""
        known = self._labels.get(workload.uid)
        if known is None or known.workload is not workload:
            known = self._labels[workload.uid] = labels_of(workload)
        return known

    def count_sockets(self, reporter: str, change: int) -> None:
        """Change the number of open application sockets by ``change``, which can be negative."""
        number = self.metrics.sockets_open
        number[reporter] += change
        if self.tell_open is not None:
            self.tell_open(number["source"] + number["destination"])

    def forget(self, uids: Iterable[WorkloadUid]) -> None:
        """Drop the cached labels and recorded failures of changed or removed workloads. Idempotent."""
        for uid in uids:
            self._labels.pop(uid, None)
            self.failed_endpoints.clear(uid)

    def revocation_lists(self) -> RevocationLists | None:
        """Return the current revocation lists, or ``None`` if none are configured."""
        return self.revocations.current if self.revocations is not None else None

    # Pods

    def register(self, name: PodName, pod: NodeLocalTarget) -> None:
        """Let other pods of this node open node-local tunnels to ``pod``."""
        self.pods[pod_key(name)] = pod

    def unregister(self, name: PodName, pod: NodeLocalTarget) -> None:
        """Remove a pod from :attr:`pods`, but not a newer pod with the same name. Idempotent."""
        if self.pods.get(pod_key(name)) is pod:
            del self.pods[pod_key(name)]

    # Resources on demand

    async def ask_about(self, key: str) -> bool:
        """Request a resource from the control plane, unless it has answered for this key lately. Return whether it
        was requested.

        Raises:
            TimeoutError: no answer arrived. The next call requests the key again. The caller must not treat the
                address as outside the mesh.
        """
        if self.ask is None or key in self.asked:
            return False
        await self.ask(key)
        self.asked.add(key)
        return True


def taps_permitted(config: IstioConfig, clock: Clock) -> Taps | None:
    """Return the taps of this process for its data path, or None: see :mod:`ztunnel.proxy.tap.taps`."""
    if not config.tap_socket:
        return None
    from ztunnel.proxy.tap.taps import Taps  # imported here to save memory: most proxies permit no taps

    return Taps(clock)


def addons_of(node: Node) -> AddonProcess | None:
    """Load the configuration's addons for a node, and return the object that runs them, or None without addons.

    Raises:
        AddonError: an addon cannot be loaded.
    """
    if node.config.addons is None:
        return None
    # Imported here to save memory: most proxies have no addons.
    from ztunnel.proxy.addons.process import AddonProcess
    from ztunnel.proxy.istio.path.addons import PodAddons

    process = AddonProcess(node.config.addons)
    node.addons = PodAddons(process.host)
    node.names_answered = node.addons.names.note
    node.metrics.addons_here = process.host.report
    return process


def check_addons(config: IstioConfig) -> None:
    """Check that the configured addons can be loaded. Called in the main process if workers carry the connections.

    Loads the addons once and stops them again, so that a faulty addon prevents the start instead of failing in
    every worker.

    Raises:
        AddonError: an addon cannot be loaded.
    """
    if config.addons is None:
        return
    from ztunnel.proxy.addons.load import end, load_all

    for loaded in load_all(config.addons):
        end(loaded)


def node_gauges(node: Node, writer: LogWriter, handover: Generations | None) -> dict[str, Gauge]:
    """Return the gauges of a process that carries connections; see
    :func:`ztunnel.proxy.dataplane.gauges.process_gauges`.
    """
    refused = "Connections whose peer has described itself in too many ways (unstable)"
    return {
        **process_gauges(node.half_open, node.descriptors, writer, handover),
        "ztunnel_baggage_refused": Gauge("counter", refused, lambda: node.baggage_labels.refused),
    }


def log_pressure(config: IstioConfig, writer: LogWriter, clock: Clock) -> LogPressure | None:
    """Return the object that delays new connections while the log is behind, or None if disabled."""
    if not config.log_wait_s:
        return None
    return LogPressure(lambda: writer.is_behind, config.log_wait_s, clock.monotonic)


def policies_in_force(config: IstioConfig, clock: Clock, metrics: Metrics) -> LivePolicies | None:
    """Return Calico's policies, if this process enforces them, or None. Each process watches the policies' source
    itself.
    """
    if config.policies is None:
        return None
    return live_policies(config.policies, clock, metrics.ledger.calico, partial(metrics.waited, "policy"))
