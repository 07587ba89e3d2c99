"""The proxy of Envoy's dialect: builds and owns every object, starts them in Envoy's order, and ends them."""

import asyncio
import logging
import os
import random
import signal
from collections.abc import Callable, Coroutine, Iterable
from contextlib import AbstractAsyncContextManager, AsyncExitStack, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ztunnel
from hbone.aio.connection_settings import ConnectionSettings
from hbone.aio.poller import Poller
from hbone.aio.spin import SpinSettings
from hbone.settings import server_settings
from tproxy.aio import held_sockets
from xds.aio.client import AdsClient, PerTypeClient
from xds.aio.file import FileSource as FileWatcher
from xds.dialects.envoy import Surroundings
from xds.dialects.envoy.reading import at
from xds.model.tls import FileSource, GrpcSource
from xds.proto import registry
from xds.protocol.resource import Receive, ResourceSource, Settling, Update
from ztunnel.policy.calico.settings import live_policies
from ztunnel.proxy.dataplane.handshake_limiter import HalfOpen, HalfOpenLimits
from ztunnel.proxy.dataplane.life_table import Event
from ztunnel.proxy.dataplane.resolver import Resolver
from ztunnel.proxy.envoy.admin.server import AdminServer
from ztunnel.proxy.envoy.config.bootstrap import BootstrapConfig, Discovery
from ztunnel.proxy.envoy.config.settings import Settings, TunnelSource
from ztunnel.proxy.envoy.config.sources import Sources
from ztunnel.proxy.envoy.config.state import State
from ztunnel.proxy.envoy.listeners import manager as listener_manager
from ztunnel.proxy.envoy.listeners.connections import Connections, PodQuota
from ztunnel.proxy.envoy.listeners.handshakes import Handshakes
from ztunnel.proxy.envoy.listeners.manager import ListenerManager
from ztunnel.proxy.envoy.listeners.table import ListenerTable
from ztunnel.proxy.envoy.path.account import Account
from ztunnel.proxy.envoy.path.connect import AdmitsHost, Connector
from ztunnel.proxy.envoy.path.datapath import Datapath
from ztunnel.proxy.envoy.path.dial import Dialler
from ztunnel.proxy.envoy.path.internal import InternalListeners
from ztunnel.proxy.envoy.path.probe import Prober
from ztunnel.proxy.envoy.path.tcp_proxy import TcpProxies
from ztunnel.proxy.envoy.path.terminate import AdmitsApplication, Terminator, TunnelRules
from ztunnel.proxy.envoy.path.tunnel_requests import Timeouts
from ztunnel.proxy.envoy.path.tunnel_server import TunnelServer
from ztunnel.proxy.envoy.secrets.store import SecretStore
from ztunnel.proxy.envoy.stats.stats import Stats
from ztunnel.proxy.envoy.stream.outcome import DRAINED
from ztunnel.proxy.envoy.telemetry.access_log import AccessLogs
from ztunnel.proxy.envoy.telemetry.decisions import Decisions
from ztunnel.proxy.envoy.telemetry.log_stream import LogStreams
from ztunnel.proxy.envoy.upstream import manager as cluster_manager
from ztunnel.proxy.envoy.upstream.cluster import LiveCluster, Surround
from ztunnel.proxy.envoy.upstream.grpc import GrpcClusters, tls_of
from ztunnel.proxy.envoy.upstream.manager import ClusterManager
from ztunnel.runtime import heap
from ztunnel.runtime.clock import Clock, SystemClock
from ztunnel.runtime.descriptors import Descriptors, limit_of_process
from ztunnel.runtime.log_rotation import reopen_on_rotation
from ztunnel.runtime.memory import memory_limit_bytes, waiting_bytes
from ztunnel.runtime.tasks import Tasks
from ztunnel.runtime.watchdog import LoopDelays, Watchdog

if TYPE_CHECKING:
    from ztunnel.policy.calico.live import LivePolicies
    from ztunnel.proxy.addons.process import AddonProcess
    from ztunnel.proxy.dataplane.handover.service import Handover
    from ztunnel.proxy.envoy.path.calico import Enforcer
    from ztunnel.proxy.flows.settings import HubbleSettings
    from ztunnel.proxy.otlp.settings import OtlpSettings
    from ztunnel.proxy.tap.taps import Taps
    from ztunnel.runtime.http.exposition import Family

log = logging.getLogger(__name__)

#: Envoy's default timeouts. Disabled unless a switch enables them, because they end tunnels.
_ENVOY_TIMEOUTS = Timeouts(route_s=15.0, stream_idle_s=300.0)
#: Maps the destination ports of tunnels that arrive at this proxy (15008, and 15088, which the node's NAT rule
#: redirects) to its listening port.
_SHORTCUT_PORTS = {15008: 15008, 15088: 15008}


class Proxy:
    """One proxy process; :meth:`run` serves until :meth:`shut_down`.

    Its public attributes serve the admin pages and tests.
    """

    def __init__(self, settings: Settings, bootstrap: BootstrapConfig, *, clock: Clock | None = None) -> None:
        self.settings = settings
        self.bootstrap = bootstrap
        self.clock: Clock = clock or SystemClock()
        self.started = self.clock.monotonic()
        self.started_at = self.clock.wall()
        self.stats = Stats()
        self._joins = Tasks("joined tunnels")
        self.failing_health_checks = False
        self.policies: LivePolicies | None = None
        self.taps: Taps | None = None
        self.addons: AddonProcess | None = None
        self._state = State.PRE_INITIALIZING
        self._stop = asyncio.Event()
        self._tasks = Tasks("proxy")
        self._discovered: dict[str, asyncio.Event] = {"lds": asyncio.Event(), "cds": asyncio.Event()}
        self._build()

    def _build(self) -> None:
        """Create all objects of the proxy, each after the objects that it needs."""
        fields = self.bootstrap.message.node.metadata.fields
        cluster_id = fields["CLUSTER_ID"].string_value if "CLUSTER_ID" in fields else ""
        self._surroundings = Surroundings(
            read_file=lambda path: Path(path).read_bytes(),
            environment=os.environ,
            cluster_id=cluster_id or "Kubernetes",
        )
        self._rng = random.Random()
        self._build_limits()
        self._build_sources()
        self._build_clusters()
        table = ListenerTable()
        self._build_data_path(table)
        self._build_addons()
        self._build_listeners(table)
        self.handover = self._build_handover(table)
        self._successor: int | None = None
        self._server_stats()

    def _build_limits(self) -> None:
        self.poller = Poller(SpinSettings(limit_s=self.settings.spin_us / 1e6))
        self.poller.peers.windows.limit, _ = waiting_bytes(memory_limit_bytes())
        most = limit_of_process()
        node = self.settings.node or self.bootstrap.message.node.id or "node"
        self.account = Account(self.settings.flows, self.clock, node, self._surroundings.cluster_id)
        shook_hands = partial(self.account.times.shook_hands, "server")
        self.half_open = HalfOpen(self.poller, HalfOpenLimits.of_descriptors(most), shook_hands)
        self.descriptors = Descriptors(most, self.half_open.shed)
        self.connections = Connections(PodQuota(self.descriptors))
        self.connections.account = self.account
        self._memory_trimmer = heap.MemoryTrimmer(self.poller)

    def _build_sources(self) -> None:
        node = self.bootstrap.message.node
        self._files = FileWatcher(on_unknown_fields=self._count_unknown_fields)
        self.unknown_fields = self.stats.scope("server").counter("dynamic_unknown_fields")
        # Each xDS subscription has its own stream. No connection is opened before the first subscription.
        targets = self.bootstrap.targets
        self._grpc = GrpcClusters(targets, self._surroundings, self.stats, lambda: self.secrets)
        self._log_streams = LogStreams(self._grpc.connect, node, self.stats)
        self.logs = AccessLogs(self.stats, self.settings.log_flush_s, self._log_streams)
        self.decisions = Decisions(self.stats, self.clock)
        self._streams = {
            GrpcSource(name, delta): PerTypeClient(
                target.address, node, delta=delta, connect=self._grpc.connect(name)
            )
            for name, target in targets.items()
            for delta in (False, True)
        }
        self.ads = self._ads_client()
        self.sources = Sources(self.ads, self._open_file, self._open_stream)
        movable = bool(self.settings.handover_dir)
        self.secrets = SecretStore(
            self.sources,
            self._surroundings,
            self.stats,
            self.clock,
            movable=movable,
            waited=partial(self.account.times.waited, "secret"),
        )

    def _build_clusters(self) -> None:
        surround = Surround(
            sources=self.sources,
            secrets=self.secrets,
            stats=self.stats,
            clock=self.clock,
            rng=self._rng,
            resolver=Resolver(settings=self.bootstrap.dns_resolver),
            prober=Prober(self.poller),
            strict_tls=self.settings.switches.strict_tls,
        )
        self.clusters = ClusterManager(surround, self._surroundings, self._retire_cluster)

    def _build_data_path(self, table: ListenerTable) -> None:
        settings, switches, rng, dialler = self.settings, self.settings.switches, self._rng, Dialler(self.poller)
        if settings.tap_socket:
            from ztunnel.proxy.tap.taps import Taps  # imported here to save memory: most proxies permit no taps

            self.taps = Taps(self.clock)
        self._enforcer: Enforcer | None = None
        admit_application: AdmitsApplication | None = None
        admit_host: AdmitsHost | None = None
        if settings.policies is not None:
            from ztunnel.proxy.envoy.path import (
                calico,  # imported here to save memory: most proxies have no Calico policies
            )

            waited = partial(self.account.times.waited, "policy")
            self.policies = live_policies(settings.policies, self.clock, self.decisions.ledger.calico, waited)
            enforcer = self._enforcer = calico.Enforcer(self.policies, self.decisions, self.connections)
            admit_application, admit_host = enforcer.admit_application, enforcer.admit_host
        self.tunnel_rules = TunnelRules(
            own_ports=lambda: table.own_ports,
            check_authority=switches.check_authority,
            judge_ports=switches.judge_ports,
        )
        terminator = Terminator(self.clusters, dialler, rng, self.tunnel_rules, admit_application)
        internal = InternalListeners(
            table,
            self.connections,
            terminator,
            self.clock,
            self.poller,
            self._joins,
            _SHORTCUT_PORTS if switches.node_local_shortcut else {},
        )
        self.connector = Connector(
            self.clusters,
            dialler,
            internal,
            self.poller,
            rng,
            times=self.account.times,
            keep_client_address=switches.tunnel_source is TunnelSource.CLIENT_POD,
            early_data=switches.early_data,
            admit=admit_host,
        )
        handshakes = Handshakes(self.half_open)
        self._proxies = TcpProxies(self.connector, handshakes, self.poller, self.taps)
        self._tunnels = TunnelServer(
            self.connections,
            terminator,
            handshakes,
            poller=self.poller,
            clock=self.clock,
            timeouts=_ENVOY_TIMEOUTS if switches.route_timeouts else Timeouts(),
            settings=ConnectionSettings(http2=replace(server_settings(), early_data=switches.early_data)),
            taps=self.taps,
        )
        self.datapath = Datapath(
            table,
            self._proxies,
            self._tunnels,
            connections=self.connections,
            poller=self.poller,
            clock=self.clock,
        )

    def _build_addons(self) -> None:
        if self.settings.addons is None:
            return
        # The addons package is imported only if needed, to save memory: most proxies have no addons.
        from ztunnel.proxy.addons.process import AddonProcess
        from ztunnel.proxy.envoy.path.addons import StreamAddons

        self.addons = AddonProcess(self.settings.addons)
        self.connections.addons = StreamAddons(self.addons.host, self.decisions)

    def _build_listeners(self, table: ListenerTable) -> None:
        self.listeners = ListenerManager(
            table,
            surroundings=self._surroundings,
            sources=self.sources,
            secrets=self.secrets,
            stats=self.stats,
            logs=self.logs,
            clock=self.clock,
            decisions=self.decisions,
            poller=self.poller,
            connections=self.connections,
            accepted=self.datapath.accepted,
            # Descriptors are not shared by pod here, because the pod is known only after accept(2); see PodQuota.
            gate=self.descriptors.share("the proxy", lambda: 0),
            drain_s=self.settings.drain_s,
        )

    def _build_handover(self, table: ListenerTable) -> "Handover | None":
        settings, enforcer = self.settings, self._enforcer
        if not settings.handover_dir:
            return None
        # The hand-over package is imported only if needed, to save memory: most proxies have no hand-over folder.
        from ztunnel.proxy.dataplane.handover.service import Handover, protect_secrets
        from ztunnel.proxy.envoy.handover.kinds import kinds_of
        from ztunnel.proxy.envoy.handover.taker import Parts

        protect_secrets()
        parts = Parts(
            listeners=table,
            clusters=self.clusters,
            connections=self.connections,
            connector=self.connector,
            proxies=self._proxies,
            tunnels=self._tunnels,
            rules=self.tunnel_rules,
            poller=self.poller,
            clock=self.clock,
            run=self.datapath.run,
            objection=lambda: "" if enforcer is None or enforcer.in_sync else "policies have not arrived",
            watch=enforcer.watch if enforcer is not None else None,
        )
        return Handover(
            Path(settings.handover_dir),
            kinds_of(parts),
            self.poller,
            self.clock,
            version=ztunnel.__version__,
            replace=settings.replace,
            on_take_now=self.shut_down,
        )

    def _replace_asked(self) -> None:
        """Handle SIGUSR2: start a successor process."""
        from ztunnel.runtime.process import start_successor

        self._successor = start_successor(self._successor, moves=self.handover is not None)

    def _server_stats(self) -> None:
        scope = self.stats.scope("server")
        self.delays = LoopDelays(misses=scope.counter("watchdog_miss"), stalls=scope.counter("watchdog_mega_miss"))
        states = {State.LIVE: 0, State.DRAINING: 1, State.PRE_INITIALIZING: 2, State.INITIALIZING: 3}
        scope.gauge("live", lambda: float(self.state is State.LIVE))
        scope.gauge("state", lambda: float(states[self.state]))
        scope.gauge("uptime", lambda: float(int(self.clock.monotonic() - self.started)))
        scope.gauge("concurrency", lambda: 1.0)
        scope.gauge("total_connections", lambda: float(len(self.connections)))
        scope.gauge("hot_restart_epoch", lambda: float(self.settings.restart_epoch))
        holder = held_sockets.holder()
        if holder is not None:
            scope.gauge("crashes", lambda: float(holder.crashes))
        scope.gauge("half_open_connections", lambda: float(len(self.half_open)))
        scope.gauge("half_open_turned_away", lambda: float(self.half_open.rejected))
        if self.ads is not None:
            plane, stats = self.ads.stats, self.stats.scope("control_plane")
            stats.gauge("connected_state", lambda: float(plane.connected_state))
            stats.gauge("pending_requests", lambda: float(plane.pending_requests))
            stats.gauge("rate_limit_enforced", lambda: float(plane.rate_limit_enforced))
            stats.text("identifier", lambda: plane.identifier)

    # Sources

    def _ads_client(self) -> AdsClient | None:
        ads = self.bootstrap.ads
        if ads is None:
            return None
        target = self.bootstrap.targets[ads.cluster]
        tls_of(target, self._surroundings)  # raises an error now, not at the first connection attempt
        return AdsClient(
            target.address,
            self.bootstrap.message.node,
            delta=ads.delta,
            node_on_first_only=self.bootstrap.node_on_first_only,
            connect=self._grpc.connect(ads.cluster),
        )

    def _open_file(self, source: FileSource) -> ResourceSource:
        return self._files.at(source.path, source.watched_directory or None)

    def _open_stream(self, source: GrpcSource) -> ResourceSource:
        self.bootstrap.check(source)
        return self._streams[source]

    def _count_unknown_fields(self, count: int) -> None:
        self.unknown_fields.value += count

    def _retire_cluster(self, cluster: LiveCluster) -> None:
        """Retire a replaced or removed cluster. It gets no new connections, and its open connections continue."""
        self._tasks.start(self._close_cluster(cluster), f"retiring {cluster.model.name}")

    async def _close_cluster(self, cluster: LiveCluster) -> None:
        pool = self.connector.tunnels.retire(cluster)
        if pool is not None:
            pool.drain()
        await cluster.close()

    # State

    @property
    def state(self) -> State:
        """The state of the proxy that ``/ready`` shows."""
        return State.DRAINING if self.failing_health_checks or self._stop.is_set() else self._state

    def shut_down(self) -> None:
        """Make :meth:`run` drain all connections and return. Idempotent. Called on SIGTERM, SIGINT and
        ``/quitquitquit``.
        """
        self._stop.set()

    # Running

    async def run(self) -> None:
        """Serve until :meth:`shut_down`.

        Raises:
            ConfigError, TproxyError: a static resource is unusable, or a port is taken.
            Exception: a bug of this program during the start.
        """
        heap.expect_growth()
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self.shut_down)
        loop.add_signal_handler(signal.SIGUSR2, self._replace_asked)
        reopen_on_rotation(self.logs.writer.reopen)
        async with AsyncExitStack() as stack:
            stack.enter_context(heap.growing())
            stack.callback(self.logs.writer.close)
            named = self.addons.host.current.name if self.addons is not None else None
            stack.enter_context(Watchdog(self.delays, culprit=named))
            if self.addons is not None:
                await stack.enter_async_context(self.addons)
            if self.settings.otlp is not None:
                await stack.enter_async_context(self._exported(self.settings.otlp))
            stack.callback(self.poller.close)
            stack.callback(self.half_open.close)
            stack.callback(self._memory_trimmer.close)
            stack.push_async_callback(self._close_pools)
            stack.push_async_callback(self._joins.close)
            stack.push_async_callback(self.datapath.close)
            stack.push_async_callback(self.clusters.close)
            stack.push_async_callback(self.listeners.close)
            if self.handover is not None:
                stack.push_async_callback(self.handover.close)
            stack.push_async_callback(self._tasks.close)
            await stack.enter_async_context(AdminServer(self))
            if self.taps is not None:
                from ztunnel.proxy.envoy.path.tapped import TappedAddresses
                from ztunnel.proxy.tap.server import TapServer

                source = TappedAddresses(self.taps, self.connections)
                await stack.enter_async_context(TapServer(Path(self.settings.tap_socket), source, self.clock))
            await stack.enter_async_context(self._files)
            self._tasks.keep(self._flush_logs, "access log flush and samples")
            self._tasks.keep(self.secrets.files.run, "files of secrets")
            if self.policies is not None:
                self._tasks.keep(self.policies.run, "policies")
            if self.settings.hubble is not None:
                self._tasks.keep(self._hubble(self.settings.hubble), "Hubble's API")
            stack.callback(self._grpc.close)
            stack.push_async_callback(self._log_streams.close)
            for stream in self._streams.values():
                await stack.enter_async_context(stream)
            if self.ads is not None:
                await stack.enter_async_context(self.ads)
            self._add_static()
            start = self._tasks.start(self._start(), "start")
            # After this error the process would never become ready. It ends instead, so that a supervisor restarts
            # it.
            start.add_done_callback(
                lambda done: None if done.cancelled() or not done.exception() else self.shut_down()
            )
            await self._stop.wait()
            start.cancel()
            await self._drain()
            if start.done() and not start.cancelled():
                start.result()

    def _hubble(self, settings: "HubbleSettings") -> Callable[[], Coroutine[Any, Any, None]]:
        from ztunnel.proxy.flows.observer import Observer, serve  # grpcio takes 13 MiB

        account = self.account
        observer = Observer(account.ring, account.shape, None, node=account.node, settings=settings)
        return lambda: serve(observer, settings)

    def _exported(self, settings: "OtlpSettings") -> AbstractAsyncContextManager[None]:
        from ztunnel.proxy.envoy.stats.export import exported  # most proxies have no collector

        def families() -> "Iterable[Family]":
            from ztunnel.proxy.envoy.admin.families import families  # with the first export

            return families(self)

        return exported(settings, self.bootstrap.message.node, families, self.stats, self.clock)

    def _add_static(self) -> None:
        static = self.bootstrap.message.static_resources
        for index, secret in enumerate(static.secrets):
            with at("static_resources", "secrets", index):
                self.secrets.add_static(registry.pack(secret))
        for index, cluster in enumerate(static.clusters):
            with at("static_resources", "clusters", index):
                self.clusters.add_static(registry.pack(cluster))
        for index, listener in enumerate(static.listeners):
            with at("static_resources", "listeners", index):
                self.listeners.add_static(registry.pack(listener))

    async def _start(self) -> None:
        """Start clusters, then listeners. No listener opens before all resources and policies have arrived."""
        self._discover(
            "cds", self.bootstrap.cds, cluster_manager.TYPE_URL, self.clusters.receive, "cluster_manager"
        )
        await self._discovered["cds"].wait()
        await self.clusters.initialised()
        self._state = State.INITIALIZING
        log.info("clusters are ready; requesting listeners")
        self._discover(
            "lds", self.bootstrap.lds, listener_manager.TYPE_URL, self.listeners.receive, "listener_manager"
        )
        await self._discovered["lds"].wait()
        await self.listeners.warmed()
        if self.policies is not None:
            # Listeners accept no connection before all policies have arrived. Until then a predecessor process on
            # the same ports gets all connections.
            await self.policies.complete()
        self.listeners.start()
        heap.settle()
        self._state = State.LIVE
        holder = held_sockets.holder()
        if holder is not None:
            holder.settle()
        startup_ms = int((self.clock.monotonic() - self.started) * 1000)
        self.stats.scope("server").histogram("initialization_time_ms").record(startup_ms)
        log.info("live after %d ms, %d listeners", startup_ms, len(self.listeners.active))
        if self.handover is not None:
            self.handover.begin()
        if not self.listeners.active and not self.bootstrap.message.static_resources.listeners:
            node = self.bootstrap.message.node.id or "(no name)"
            log.warning("the control plane has no listener for node %s; check that it serves this node name", node)

    def _discover(
        self,
        kind: str,
        discovery: Discovery | None,
        type_url: str,
        receive: Receive,
        scope: str,
    ) -> None:
        done = self._discovered[kind]
        if discovery is None:
            done.set()
            return

        async def received(update: Update) -> Settling | None:
            try:
                return await receive(update)
            finally:
                done.set()
                self._memory_trimmer.changed()

        subscription = self.sources.of(discovery.source).subscribe(
            type_url,
            None,
            received,
            initial_fetch_timeout_s=discovery.timeout_s,
            on_initial_timeout=done.set,
        )
        self.sources.count(self.stats.scope(f"{scope}.{kind}"), subscription)

    async def _flush_logs(self) -> None:
        """Flush access logs and sample the traffic totals, both at the same interval."""
        while True:
            await self.account.sample(self.connections)
            await asyncio.sleep(self.settings.log_flush_s)
            self.logs.writer.flush()

    async def _drain(self) -> None:
        """Drain: leave new connections to a successor process, stop accepting, send GOAWAY, wait until the
        deadline.
        """
        log.info("draining %d connections, at most %g s", len(self.connections), self.settings.shutdown_s)
        await self.listeners.hand_over()
        self.listeners.stop()
        await asyncio.sleep(0)  # connections accepted just now enter the table
        handover = self.handover
        if handover is not None:
            await handover.give()
            self._tasks.start(handover.give_late(), "late hand-over")
        deadline_s = self.clock.monotonic() + self.settings.shutdown_s  # for the connections that were not moved
        self.connections.review_all(Event.DRAIN)
        with suppress(TimeoutError):
            async with asyncio.timeout(max(deadline_s - self.clock.monotonic(), 0.0)):
                await self.connections.emptied()
        left = len(self.connections)
        if left:
            log.warning("drain duration expired with %d connections, closing them", left)
        self.connections.review_all(Event.DEADLINE, DRAINED)
        await self.connections.table.reviewed()
        await asyncio.sleep(0)

    async def _close_pools(self) -> None:
        for pool in list(self.connector.tunnels.pools.values()):
            await pool.close()
