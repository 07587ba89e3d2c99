"""The node proxy of an Istio mesh: creates and owns its components, and starts and stops them in order.

The order is the same as in the Rust ztunnel. Admin, readiness and metrics pages are served from the start. Once
the control plane has described the mesh, the proxy connects to the node agent and serves pods. When the process
ends, all listeners close at once, so that a successor on the same ports accepts new connections. Open connections
can continue until a deadline.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import random
import signal
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import AsyncExitStack
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ztunnel
from hbone.aio.poller import Poller
from hbone.aio.spin import SpinSettings
from tproxy.aio import held_sockets
from tproxy.aio.netns import Netns
from xds.model.mesh import Changes, Mesh
from ztunnel.proxy.dataplane.gauges import Gauge, configuration_gauges
from ztunnel.proxy.dataplane.life_table import Event
from ztunnel.proxy.dataplane.resolver import Resolver
from ztunnel.proxy.identity.crl import RevocationFile
from ztunnel.proxy.istio.accounting.flows import flow_node, peers_in, ring_of, shape
from ztunnel.proxy.istio.accounting.logs import LogStream
from ztunnel.proxy.istio.accounting.metrics import Metrics
from ztunnel.proxy.istio.accounting.outcome import EarlyDeny
from ztunnel.proxy.istio.accounting.sweep import sweep
from ztunnel.proxy.istio.admin.config_dump import build_info, logged_config
from ztunnel.proxy.istio.admin.server import Servers
from ztunnel.proxy.istio.certificates.ca_client import IstioCertificateAuthority
from ztunnel.proxy.istio.certificates.credentials import Credentials, Endpoint, Roots, Token
from ztunnel.proxy.istio.certificates.fake_ca import FakeCertificateAuthority
from ztunnel.proxy.istio.certificates.manager import CertificateAuthority, CertificateManager
from ztunnel.proxy.istio.path.names import Names
from ztunnel.proxy.istio.path.node import (
    Node,
    addons_of,
    check_addons,
    log_pressure,
    node_gauges,
    policies_in_force,
    taps_permitted,
)
from ztunnel.proxy.istio.path.pod import PodProxy
from ztunnel.proxy.istio.path.pod_sockets import PodSockets
from ztunnel.proxy.istio.readiness import Readiness
from ztunnel.proxy.istio.settings.config import IstioConfig, PodName, ProxyMode
from ztunnel.proxy.istio.xds.control import ControlPlane
from ztunnel.proxy.istio.xds.mesh_dump import Ineffective
from ztunnel.proxy.istio.zds.manager import PodManager, check_privileges
from ztunnel.proxy.istio.zds.pods import PodInfo, PodUid
from ztunnel.proxy.istio.zds.reconcile import SETTLE_S
from ztunnel.runtime import heap
from ztunnel.runtime.clock import Clock, SystemClock
from ztunnel.runtime.descriptors import limit_of_process
from ztunnel.runtime.log_rotation import reopen_on_rotation
from ztunnel.runtime.log_writer import LogWriter
from ztunnel.runtime.tasks import Tasks
from ztunnel.runtime.watchdog import Watchdog

if TYPE_CHECKING:
    from ztunnel.policy.calico.live import LivePolicies
    from ztunnel.proxy.addons.process import AddonProcess
    from ztunnel.proxy.dataplane.handover.service import Handover
    from ztunnel.proxy.flows.settings import HubbleSettings
    from ztunnel.proxy.istio.accounting.exports import Exports
    from ztunnel.proxy.istio.workers.main import WorkerPod, Workers
    from ztunnel.proxy.istio.xds.last_configuration import LastConfiguration
    from ztunnel.proxy.otlp.settings import OtlpSettings
    from ztunnel.proxy.tap.server import TapServer

log = logging.getLogger(__name__)

STATE_MANAGER, PROXY, DNS_PROXY, POD_MANAGER = "state manager", "proxy", "dns proxy", "workload proxy manager"
WORKERS, CERTIFICATES, POLICIES, REVOCATIONS = "workers", "certificates", "policies", "revocation lists"
#: How often to check whether all pods are captured, in seconds.
_READY_S = 0.02


class IstioProxy:
    """One proxy process; :meth:`run` serves until :meth:`shut_down`.

    Public attributes are for the admin pages and tests.

    Args:
        config: the proxy's configuration.
        clock: the clock. Tests pass their own.
    """

    def __init__(self, config: IstioConfig, *, clock: Clock | None = None) -> None:
        self.config = config
        self.clock: Clock = clock or SystemClock()
        self.started_s = self.clock.monotonic()
        self.writer = LogWriter()
        self.logs = LogStream(
            self.writer, self.writer.file("/dev/stdout"), config.log_filter, json_lines=config.log_json
        )
        self.metrics = Metrics(
            config.version_tag,
            config.metric_series,
            expiry_s=config.metric_expiry_s,
            removed=config.metric_labels_removed,
            flows=ring_of(config.flows),
            ports=config.metric_ports,
        )
        self.mesh = Mesh(node=config.node)
        self._ineffective = Ineffective(self.mesh)
        self.poller = Poller(SpinSettings(limit_s=config.spin_us / 1e6))
        self._memory_trimmer = heap.MemoryTrimmer(self.poller)
        self.revocations = RevocationFile(Path(config.crl_path)) if config.crl_path else None
        self.authority = self._authority()
        self._last = self._last_configuration()
        self.certificates = CertificateManager(
            self.authority if self._last is None else self._last.before(self.authority),
            now=partial(datetime.now, UTC),
            jitter=random.random,
            policy=config.tls_policy,
            revocations=self.revocations,
        )
        self.control = ControlPlane(config, self.mesh, self.metrics, self._last)
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
            log_pressure=log_pressure(config, self.writer, self.clock),
            ask=self.control.ask if self.control.on_demand else None,
        )
        self._addons: AddonProcess | None = None
        self.node.predecessor_ports.begin()
        if config.worker_threads > 1:
            check_addons(config)
        else:
            self._addons = addons_of(self.node)
        self.pods = PodManager(Path(config.inpod_uds), self.start_pod, on_ready=self._pods_ready)
        awaited = {STATE_MANAGER}
        if config.proxy or config.proxy_mode is ProxyMode.SHARED:
            awaited.add(CERTIFICATES)
        if self.node.policies is not None:
            awaited.add(POLICIES)
        if self.revocations is not None:
            awaited.add(REVOCATIONS)
        if config.proxy_mode is ProxyMode.SHARED:
            awaited.add(POD_MANAGER)  # this task also stands for the proxies of all pods
        else:
            awaited |= {task for task, on in ((PROXY, config.proxy), (DNS_PROXY, config.dns_proxy)) if on}
        self.workers: Workers | None = None
        if config.worker_threads > 1:
            from ztunnel.proxy.istio.workers.main import Workers  # most nodes have one process

            self.workers = Workers(
                config.worker_threads, self.node, self.certificates, on_serving=self._workers_serve
            )
            awaited.add(WORKERS)
            if config.addons is not None:
                self.node.names_answered = self.workers.names_given
        self._handover: Handover | None = None
        self._successor: int | None = None
        if config.moves:
            from ztunnel.proxy.dataplane.handover.service import (
                Handover,  # imported here: most proxies have no hand-over folder
                protect_secrets,
            )
            from ztunnel.proxy.istio.handover.kinds import kinds_of

            protect_secrets()

            self._handover = Handover(
                Path(config.handover_dir),
                kinds_of(lambda: (pod for pod in self.carried() if isinstance(pod, PodProxy))),
                self.node.poller,
                self.clock,
                version=ztunnel.__version__,
                replace=config.replace,
                on_take_now=self.shut_down,
                statistics=self.metrics.handovers,
            )
        descriptors = self.node.descriptors
        self.readiness = Readiness(awaited, lambda: descriptors.short)
        self._own: list[PodProxy | WorkerPod] = []
        self._tasks = Tasks("proxy")
        self._stop = asyncio.Event()
        self._gauges()

    @property
    def handover(self) -> Handover | None:
        """The object that hands open connections over to a successor; ``None`` if this is not configured."""
        return self._handover

    @property
    def policies(self) -> LivePolicies | None:
        """Calico's policies, or ``None`` if they are disabled."""
        return self.node.policies

    def _authority(self) -> CertificateAuthority:
        config = self.config
        if config.fake_ca:
            return FakeCertificateAuthority(now=lambda: datetime.now(UTC), lifetime_s=config.secret_ttl_s)
        return IstioCertificateAuthority(
            Endpoint.parse(config.ca_address),
            Credentials(token=Token(config.auth_token), cluster_id=config.cluster_id, headers=config.ca_headers),
            Roots(config.ca_root_ca),
            impersonate=config.proxy_mode is ProxyMode.SHARED,
            lifetime_s=config.secret_ttl_s,
            alternative_name=config.alt_ca_hostname,
            tls_1_2=config.tls_policy.tls_1_2,
            groups=config.tls_policy.groups,
        )

    def _last_configuration(self) -> LastConfiguration | None:
        holder = held_sockets.holder()
        # With on-demand xDS, this process would not know which resources the previous process had requested.
        if holder is None or self.config.xds_on_demand:
            return None
        # Imported only here to save memory: most proxies have no socket holder.
        from ztunnel.proxy.istio.xds.last_configuration import LastConfiguration

        return LastConfiguration(holder, self.clock)

    def _gauges(self) -> None:
        node, pods, control = self.node, self.pods, self.control
        rows: list[tuple[str, str, str, Callable[[], float]]] = []
        if self.config.proxy_mode is ProxyMode.SHARED:
            current, total = "The total number current workloads with", "The total number of proxies that were"
            rows += [
                ("workload_manager_active_proxy_count", "gauge", f"{current} active proxies",
                 lambda: pods.active_proxies),
                ("workload_manager_pending_proxy_count", "gauge", f"{current} pending proxies",
                 lambda: pods.pending_proxies),
                ("workload_manager_proxies_started", "counter", f"{total} started", lambda: pods.proxies_started),
                ("workload_manager_proxies_stopped", "counter", f"{total} stopped", lambda: pods.proxies_stopped),
            ]  # fmt: skip
        if self.workers is None:
            rows.append(("ztunnel_workers", "gauge", "Processes that carry connections of pods", lambda: 1))
        rows += [
            ("ztunnel_policies_without_effect", "gauge",
             "Policies that can deny nothing, such as a DENY of HTTP attributes", self._ineffective.__len__),
        ]  # fmt: skip
        self.metrics.certificates = self.certificates.moments
        self.metrics.objects = self.mesh.counts
        self.metrics.refused = control.refused_counts
        gauges = self.metrics.gauges
        if self.workers is not None:
            gauges |= self.workers.gauges()
        gauges |= {name: Gauge(kind, f"{text} (unstable)", read) for name, kind, text, read in rows}
        gauges |= node_gauges(node, self.writer, self.handover)
        gauges |= configuration_gauges(self.clock, lambda: control.staleness_s, lambda: control.updated_ago_s)

    # Pods

    async def start_pod(self, uid: PodUid, info: PodInfo, netns: Netns) -> PodProxy | WorkerPod:
        """Start the proxy of a pod; see :class:`ztunnel.proxy.istio.zds.pods.StartPod`."""
        name = PodName(name=info.name, namespace=info.namespace, service_account=info.service_account)
        return await self._start(name, netns)

    async def _start(self, name: PodName, netns: Netns | None) -> PodProxy | WorkerPod:
        if self.workers is not None:
            return await self.workers.start_pod(name, netns)
        dns = None
        if self.config.dns_proxy:
            from ztunnel.proxy.istio.dns.pod_dns import PodDns  # 2 MiB that a proxy without DNS does not need

            dns = PodDns(self.node, name, netns)
        pod = PodProxy(self.node, name, PodSockets(self.node, netns), dns=dns)
        await pod.start()
        return pod

    def carried(self) -> list[PodProxy | WorkerPod]:
        """Return all pods that this proxy serves, including its own."""
        from ztunnel.proxy.istio.workers.main import WorkerPod

        running = [status.running for status in self.pods.states().values()]
        return [*self._own, *(each for each in running if isinstance(each, PodProxy | WorkerPod))]

    def _workers_serve(self, serve: bool) -> None:
        if serve:
            self._complete(WORKERS)
        else:
            self.readiness.set(WORKERS, ready=False)

    def _pods_ready(self, ready: bool) -> None:
        self.readiness.set(POD_MANAGER, ready)

    # Changes

    def _mesh_changed(self, changes: Changes) -> None:
        self.node.forget(changes.workloads)
        self.metrics.changed(changes, [uid for uid in changes.workloads if self.mesh.workload(uid) is not None])
        if self.config.proxy_mode is ProxyMode.SHARED:
            if changes.local_identities_removed:
                self.certificates.forget(changes.local_identities_removed)
                if self._last is not None:
                    self._last.forget(changes.local_identities_removed)
            if changes.local_identities_added:
                self.certificates.prefetch(changes.local_identities_added)
        self._memory_trimmer.changed()
        if self.node.addons is not None:
            self.node.addons.mesh_changed(self.mesh)

    def _revocations_changed(self) -> None:
        self._revocations_readable()
        self.node.live.review(Event.REVOCATIONS)

    def _revocations_readable(self) -> None:
        """Become ready only once the revocation lists can be read. Until then, every peer is refused."""
        assert self.revocations is not None
        if not self.revocations.current.unreadable:
            self._complete(REVOCATIONS)

    def _complete(self, task: str) -> None:
        self.readiness.done(task)
        if not self.readiness.pending & {WORKERS, CERTIFICATES, POLICIES, REVOCATIONS}:
            self.node.predecessor_ports.take()

    def change_log_filter(self, text: str, *, reset: bool) -> None:
        """Change the log filter here and in workers; see ``LogStream.change``."""
        self.logs.change(text, reset=reset)
        if self.workers is not None:
            self.workers.log_filter_changed()

    # Running

    def shut_down(self) -> None:
        """Make :meth:`run` drain all connections and return. Idempotent. SIGTERM, SIGINT and ``/quitquitquit``
        call it.
        """
        self._stop.set()

    def send_goaway(self) -> int:
        """Send GOAWAY to a dedicated proxy's peers, so that they open new connections elsewhere. The proxy
        continues to serve. Idempotent.

        Returns:
            The number of open connections.
        """
        # A sidecar has no workers.
        return sum(pod.send_goaway() for pod in self._own if isinstance(pod, PodProxy))

    def _interrupted(self) -> None:
        """Handle SIGINT: the first signal drains, the second signal exits at once."""
        if not self._stop.is_set():
            self.shut_down()
            return
        log.warning("interrupted again, exiting without waiting for connections")
        self.logs.flush()
        self.writer.drain()
        os._exit(0)

    def _replace_asked(self) -> None:
        """Handle SIGUSR2: start a successor process."""
        from ztunnel.runtime.process import start_successor

        self._successor = start_successor(self._successor, moves=self._handover is not None)

    async def run(self) -> None:
        """Serve until :meth:`shut_down`.

        Raises:
            TproxyError: a port that the process needs is in use, or a capability is missing.
            ConfigError: the local file, or an addon, cannot be used.
        """
        config = self.config
        heap.expect_growth()
        self.logs.install()
        self._log_start()
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGTERM, self.shut_down)
        loop.add_signal_handler(signal.SIGINT, self._interrupted)
        loop.add_signal_handler(signal.SIGUSR2, self._replace_asked)
        reopen_on_rotation(self.writer.reopen)
        async with AsyncExitStack() as stack:
            stack.enter_context(heap.growing())
            stack.callback(self.writer.close)
            addons = self.node.addons
            named = addons.host.current.name if addons is not None else None
            stack.enter_context(Watchdog(self.metrics.loop, flush=self.logs.flush, culprit=named))
            if self._addons is not None:
                await stack.enter_async_context(self._addons)
            if config.otlp is not None:
                stack.push_async_callback(self._exports(config.otlp).close)
            stack.callback(self.poller.close)
            stack.callback(self._memory_trimmer.close)
            if isinstance(self.authority, IstioCertificateAuthority):
                stack.push_async_callback(self.authority.close)
            if self._last is not None:
                stack.callback(self._last.close)
            stack.push_async_callback(self.certificates.close)
            if self.handover is not None:
                stack.push_async_callback(self.handover.close)
            stack.push_async_callback(self._tasks.close)
            servers = await stack.enter_async_context(Servers(self))
            if self.config.tap_socket:
                await stack.enter_async_context(self._taps())
            if self.revocations is not None:
                await stack.enter_async_context(self.revocations)
                self.revocations.watch(self._revocations_changed)
                self._revocations_readable()
            stack.callback(self.mesh.watch(self._mesh_changed))
            if self.workers is not None:
                await stack.enter_async_context(self.workers)
            await stack.enter_async_context(self.control)
            self._tasks.keep(partial(sweep, self.metrics, self.clock), "metrics sweep")
            if self.node.policies is not None:
                self._tasks.keep(self.node.policies.run, "policies")
                self._tasks.start(self._await_policies(self.node.policies), "first policies")
            if self.config.hubble is not None:
                self._tasks.keep(self._hubble(self.config.hubble), "Hubble's API")
            start = self._tasks.start(self._start_serving(stack), "start")
            start.add_done_callback(
                lambda done: None if done.cancelled() or not done.exception() else self.shut_down()
            )
            await self._stop.wait()
            start.cancel()
            await self._drain(servers)
            if start.done() and not start.cancelled():
                start.result()

    def _exports(self, settings: OtlpSettings) -> Exports:
        from ztunnel.proxy.istio.accounting.exports import Exports  # most proxies have no collector

        async def page() -> Metrics:
            return await self.workers.metrics() if self.workers is not None else self.metrics

        return Exports(settings, self.config, self.logs, self.metrics, page, self.clock)

    def _hubble(self, settings: HubbleSettings) -> Callable[[], Coroutine[Any, Any, None]]:
        from ztunnel.proxy.flows.observer import Observer, serve  # grpcio takes 13 MiB

        more = self.workers.flows if self.workers is not None else None
        make, node = shape(self.config), flow_node(self.config)
        found = partial(peers_in, self.mesh, self.config, settings.port)
        observer = Observer(self.metrics.flows, make, more, node=node, settings=settings, found=found)
        return lambda: serve(observer, settings)

    def _taps(self) -> TapServer:
        from ztunnel.proxy.istio.admin.tapped_pods import (
            TappedPods,  # imported here to save memory: most proxies permit no taps
        )
        from ztunnel.proxy.tap.server import TapServer

        return TapServer(Path(self.config.tap_socket), TappedPods(self), self.clock)

    def _log_start(self) -> None:
        log.info("version: %s", build_info(self.config.version_tag))
        mode = self.config.proxy_mode.value.lower()
        log.info("starting mode=%s node=%s files=%d", mode, self.config.node, limit_of_process())
        # The log line has the configuration as JSON, which is also valid YAML.
        log.info("running with config: %s", json.dumps(logged_config(self.config), sort_keys=True))
        for warning in self.config.warnings:
            log.warning("%s", warning)

    async def _start_serving(self, stack: AsyncExitStack) -> None:
        """Start capturing the pods' connections, once the control plane has described the mesh."""
        config = self.config
        if config.proxy_mode is ProxyMode.SHARED:
            check_privileges()
        await self.control.ready.wait()
        self.readiness.done(STATE_MANAGER)
        heap.settle()
        if self.workers is not None:
            self.workers.settle()
        if config.proxy_mode is ProxyMode.DEDICATED:
            assert config.workload is not None
            self._own.append(await self._start(config.workload, None))
        else:
            if config.own_pod is not None:
                sockets = PodSockets(self.node, None, only_tunnels=True)
                own = PodProxy(self.node, config.own_pod, sockets)
                self._own.append(own)
                await own.start()
            await stack.enter_async_context(self.pods)
        if CERTIFICATES in self.readiness.pending:
            self._tasks.start(self._await_certificates(), "first certificates")
        self.readiness.done(PROXY)
        self.readiness.done(DNS_PROXY)
        holder = held_sockets.holder()
        if holder is not None or self.handover is not None:
            # Wait until all pods are captured: the sockets and connections to take over belong to pods.
            while self.readiness.pending:  # noqa: ASYNC110  readiness has no event, and this runs once
                await asyncio.sleep(_READY_S)
        if holder is not None:
            holder.settle()
        if self.handover is not None:
            if self.workers is not None:
                await self.workers.meet_successor()
            self.handover.begin()

    async def _await_certificates(self) -> None:
        """Delay readiness until the workloads of this node have certificates.

        Otherwise a rollout could replace a proxy with valid certificates by a proxy that cannot get any.
        """
        if self.config.proxy_mode is ProxyMode.DEDICATED:
            for pod in self._own:
                if isinstance(pod, PodProxy):
                    # The control plane sometimes describes a new pod later than the rest of the mesh.
                    with contextlib.suppress(EarlyDeny):
                        self.certificates.prefetch({(await pod.context.local.get()).identity})
        lacking = await self.certificates.first_certificates(SETTLE_S)
        if lacking:
            log.warning("ready without certificates of %s", ", ".join(sorted(map(str, lacking))))
        self._complete(CERTIFICATES)

    async def _await_policies(self, policies: LivePolicies) -> None:
        """Delay readiness until all policies have arrived, for the reason given in :meth:`_await_certificates`."""
        await policies.complete()
        self._complete(POLICIES)

    async def _drain(self, servers: Servers) -> None:
        """Close all listeners, and wait until open connections end or the deadline passes."""
        deadline_s = self.config.drain_s
        log.info("draining, at most %gs", deadline_s)
        late = await self._hand_over()
        async with asyncio.TaskGroup() as group:
            group.create_task(servers.stop_listening(), name="stop servers")
            group.create_task(self.pods.drain(deadline_s), name="drain pods")
            for pod in self._own:
                group.create_task(pod.drain(deadline_s), name="drain own")
        if late is not None:
            late.cancel()
        log.info("shutdown complete component=proxy")

    async def _hand_over(self) -> asyncio.Task[None] | None:
        """Hand open connections over to the successor. Return a task that later hands over the remaining ones."""
        handover = self.handover
        if handover is None:
            return None
        from ztunnel.proxy.dataplane.handover.service import GIVE_S

        if handover.successor_waits:
            pods = [pod for pod in self.carried() if isinstance(pod, PodProxy)]
            async with asyncio.TaskGroup() as group:
                for pod in pods:
                    group.create_task(pod.leave_ports(), name="leave ports")
            giving: list[Awaitable[object]] = [handover.give()]
            if self.workers is not None:
                giving.append(self.workers.hand_over(GIVE_S))
            await asyncio.gather(*giving)
        elif self.workers is not None:
            await self.workers.hand_over(0.0)  # to a successor that connects later
        return self._tasks.start(handover.give_late(), "late hand-over")
