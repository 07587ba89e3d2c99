"""A cluster at run time: its hosts, balancers, circuit breaker, TLS contexts and statistics."""

import asyncio
import logging
import random
from collections.abc import Coroutine, Hashable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import zip_longest
from typing import Any, NamedTuple, Protocol

from hbone.settings import Role
from xds.dialects.envoy import compile_assignment
from xds.dialects.envoy.endpoint import Member, plain_members
from xds.dialects.envoy.reading import at
from xds.errors import ConfigError
from xds.model.address import InternalAddress, NamedAddress
from xds.model.cluster import (
    Cluster,
    Discovery,
    Endpoint,
    InternalUpstream,
    LoadAssignment,
    Locality,
    LocalityGroup,
    ProxyHeader,
    RawBuffer,
    TransportSocket,
    proxy_version_of,
    security_of,
)
from xds.model.metadata import value_key
from xds.model.tls import TlsContext as ContextModel
from xds.proto import registry
from xds.proto.envoy.config.endpoint.v3 import endpoint_pb2
from xds.proto.well_known import Any as AnyMessage
from xds.protocol.backoff import JitteredBackoff
from xds.protocol.resource import Subscription, SubscriptionStats, Update, UpdateRejected
from ztunnel.proxy.dataplane.resolver import ResolveFailed, Resolver
from ztunnel.proxy.envoy.config.sources import Sources
from ztunnel.proxy.envoy.secrets.contexts import LiveContext, hardened
from ztunnel.proxy.envoy.secrets.store import SecretStore
from ztunnel.proxy.envoy.stats.stats import Counter, Stats
from ztunnel.proxy.envoy.stream.outcome import NoHealthyHost
from ztunnel.proxy.envoy.stream.stream_info import StreamInfo
from ztunnel.proxy.envoy.upstream.assignments import resolved, with_hosts
from ztunnel.proxy.envoy.upstream.balancer import Balancer, in_subset, source_hash
from ztunnel.proxy.envoy.upstream.cluster_stats import STATE, UPDATES, WARMING, Breaker, ClusterStats, remaining
from ztunnel.proxy.envoy.upstream.health_checker import HealthChecker
from ztunnel.proxy.envoy.upstream.health_state import CheckResult
from ztunnel.proxy.envoy.upstream.host import Host, HostSet
from ztunnel.proxy.envoy.upstream.original_dst import OriginalHosts
from ztunnel.proxy.envoy.upstream.outlier import OutlierDetector, Result
from ztunnel.runtime.clock import Clock
from ztunnel.runtime.latch import Latch
from ztunnel.runtime.tasks import Tasks

log = logging.getLogger(__name__)
EDS_URL = registry.type_url(endpoint_pb2.ClusterLoadAssignment)


class Asks(Protocol):
    """Makes health checks of hosts. :class:`ztunnel.proxy.envoy.path.probe.Prober` implements it."""

    async def ask(self, cluster: "LiveCluster", host: Host) -> CheckResult:
        """Check a host once, and return the outcome."""
        ...


@dataclass(frozen=True, slots=True)
class Surround:
    """Process-wide objects that all clusters use."""

    sources: Sources
    secrets: SecretStore
    stats: Stats
    clock: Clock
    rng: random.Random
    resolver: Resolver
    prober: Asks
    strict_tls: bool


class LiveTransport(NamedTuple):
    """The settings of a cluster's transport socket, read from the configuration once.

    Attributes:
        model: the configured transport socket, with its wrappers.
        context: the TLS context. ``None``: plain TCP.
        proxy_version: the version of the PROXY header to send first. ``None``: no header.
    """

    model: TransportSocket
    context: LiveContext | None
    proxy_version: int | None


class LiveCluster:
    """A configured cluster at run time, with its hosts, limits and statistics.

    Attributes:
        warm: set when the cluster can serve: secrets and endpoints have arrived, or their time limit has passed.
        only_transport: the transport socket of all hosts. ``None``: unknown, or it depends on the host; see
            :meth:`transport`.

    Raises:
        ConfigError: a TLS context cannot be built. The error contains the context's field path.
    """

    __slots__ = (
        "__weakref__",
        "_assigned",
        "_balancer",
        "_contexts",
        "_dropping",
        "_have_endpoints",
        "_hosts",
        "_matched",
        "_subscription",
        "_subsets",
        "_surround",
        "_tasks",
        "_transports",
        "_unmade",
        "_wanted",
        "added_via_api",
        "body",
        "breaker",
        "checker",
        "empty_updates",
        "last_updated",
        "model",
        "only_transport",
        "original",
        "outlier",
        "stats",
        "unchanged_updates",
        "updates",
        "version",
        "warm",
    )

    def __init__(
        self,
        model: Cluster,
        body: AnyMessage,
        surround: Surround,
        *,
        version: str = "",
        added_via_api: bool = True,
    ) -> None:
        self.model = model
        self.body = body
        self.version = version
        self.added_via_api = added_via_api
        self.last_updated = surround.clock.wall()
        self.stats = ClusterStats(surround.stats, model)
        self._contexts: dict[int, LiveContext] = {}  # by id of the model's value, which the model keeps alive
        # The TLS contexts are built before this version publishes statistics. If it is refused, the statistics of
        # the active version must stay.
        self._build_contexts(surround)
        self._matched: dict[str, Counter] = {}
        self._transports: dict[int, LiveTransport] = {}  # also by id; has only transports in use
        self.only_transport: LiveTransport | None = None
        self.stats.declare()
        self.breaker = Breaker(model)
        self._hosts = HostSet()
        #: The number of assigned hosts whose objects are not created yet. ``None`` once the objects exist.
        self._unmade: int | None = None
        self.warm = Latch()
        self._surround = surround
        self._tasks: Tasks | None = None
        self._balancer = Balancer(model.balancing, self._hosts, surround.rng)
        self._subsets: dict[Hashable, Balancer] = {}
        self.original = OriginalHosts(model, self._hosts, self.stats)
        self._have_endpoints = Latch()
        self._assigned: AnyMessage | None = None
        self._dropping: tuple[tuple[str, float], ...] = ()
        self._subscription: Subscription | None = None
        self.outlier: OutlierDetector | None = None
        if model.outlier is not None:
            self.outlier = OutlierDetector(
                model.outlier, self._health_changed, lambda: surround.rng.random() * 100
            )
        self._wanted: LoadAssignment | None = None
        self.checker: HealthChecker | None = None
        if model.health_check is not None:
            self.checker = HealthChecker(
                model.health_check,
                partial(surround.prober.ask, self),
                name=model.name,
                changed=self._check_changed,
                passed=self._passed_check,
                has_traffic=lambda: self.stats.cx_total.value > 0,
                chance=surround.rng.random,
                scope=self.stats.scope,
            )
        self.stats.scope.declare(WARMING, self)
        self.empty_updates = self.unchanged_updates = 0
        self.updates = _NO_UPDATES
        if model.discovery in (Discovery.STRICT_DNS, Discovery.LOGICAL_DNS):
            self.updates = SubscriptionStats()

    def show_state(self) -> None:
        """Make pages show this version's hosts and limits, in place of an earlier version's. While a new version
        warms, pages show the version in use.
        """
        self.stats.scope.declare(STATE, self)
        for priority, limits in zip(("default", "high"), self.model.breakers, strict=True):
            if limits.track_remaining:
                self.stats.scope.declare(remaining(priority), self)

    def _build_contexts(self, surround: Surround) -> None:
        try:
            for place, context in tls_contexts(self.model):
                chosen = hardened(context) if surround.strict_tls else context
                with at(place):
                    self._contexts[id(context)] = LiveContext(
                        Role.CLIENT,
                        chosen,
                        surround.secrets,
                        self._updated_by_sds,
                        owner=f"cluster {self.model.name}: {place}",
                    )
        except ConfigError:
            for made in self._contexts.values():
                made.close()
            raise

    def _updated_by_sds(self) -> None:
        self.stats.sds_updates.value += 1

    # Life

    def start(self) -> None:
        """Start discovering endpoints and waiting for secrets. :attr:`warm` is set when both have finished."""
        model = self.model
        if model.discovery is not Discovery.EDS:
            self.stats.scope.declare(UPDATES, self)
        match model.discovery:
            case Discovery.STATIC:
                assert model.assignment is not None
                self._assign(model.assignment)
            case Discovery.EDS:
                assert model.eds_source is not None
                self._subscription = self._surround.sources.of(model.eds_source).subscribe(
                    EDS_URL,
                    [model.eds_name],
                    self._receive_endpoints,
                    initial_fetch_timeout_s=model.eds_initial_fetch_timeout_s,
                    on_initial_timeout=self._have_endpoints.set,
                )
                self._surround.sources.count(self.stats.scope, self._subscription)
            case Discovery.STRICT_DNS | Discovery.LOGICAL_DNS:
                self._resolve_names()
            case Discovery.ORIGINAL_DST:
                self._have_endpoints.set()
                self._run(self._clean_up_for_ever(), "cleanup")
        if self.outlier is not None:
            self._run(self._watch_outliers(), "outlier detection")
        if self._contexts or self.checker is not None:
            self._run(self._warm_up(), "warming")
        else:
            self._have_endpoints.then(self.warm.set)

    def _run(self, work: Coroutine[Any, Any, None], name: str) -> None:
        if self._tasks is None:
            self._tasks = Tasks(f"cluster {self.model.name}")
        self._tasks.start(work, name)

    async def _warm_up(self) -> None:
        for context in self._contexts.values():
            await context.settled()
        await self._have_endpoints.wait()
        if self.checker is not None:
            self.checker.begin()
            await self.checker.settled.wait()
        self.warm.set()

    async def close(self) -> None:
        """Stop discovering endpoints and release secrets. The owner drains connections. Idempotent."""
        if self._subscription is not None:
            self._subscription.close()
            self._subscription = None  # avoids a reference cycle, so that both objects are freed at once
        if self._tasks is not None:
            await self._tasks.close()
        if self.checker is not None:
            await self.checker.close()
            self.checker = None  # avoids a reference cycle, too
        for context in self._contexts.values():
            context.close()

    # Endpoints

    async def _receive_endpoints(self, update: Update) -> None:
        for resource in update.resources:
            if resource.name != self.model.eds_name:
                continue
            if self._assigned is not None and self._assigned == resource.body:
                # A state-of-the-world response repeats every assignment when one changes. Of two equal bodies, the
                # new one is stored, because a stored body keeps its whole response in memory.
                self._assigned = resource.body
                self.unchanged_updates += 1
                continue
            try:
                message = _unpacked(resource.body)
                if self._leaves_unmade(message, resource.body):
                    continue
                assignment = compile_assignment(message)
                if self.checker is not None and any(
                    isinstance(each.address, InternalAddress) for each in assignment.endpoints
                ):
                    raise ConfigError("endpoints that are internal listeners cannot be checked", "endpoints")
            except (ConfigError, registry.UnknownType, registry.MalformedMessage) as error:
                raise UpdateRejected(f"{self.model.eds_name}: {error}") from error
            self._make_hosts()  # hosts of the previous assignment, if they do not exist yet
            self._assigned = resource.body
            self._assign(assignment)
        if not update.resources:
            # The control plane does not know this cluster, or a file does not have its endpoints. The hosts of an
            # earlier assignment stay.
            self.empty_updates += 1
            self._have_endpoints.set()

    def _leaves_unmade(self, message: endpoint_pb2.ClusterLoadAssignment, body: AnyMessage) -> bool:
        """Accept an assignment without creating its hosts, if possible. Return whether it was accepted.
        :meth:`_make_hosts` creates the hosts later.

        This saves memory and time: a node receives the endpoints of every service, but uses only a few services.
        """
        made = self._unmade is None and self._hosts.levels
        if (
            made
            or self.checker is not None
            or self.outlier is not None
            or self.model.balancing.slow_start.window_s
        ):
            return False
        members = plain_members(message, body)
        if members is None or sum(map(len, members)) > _MOST_UNMADE:
            return False
        before: tuple[set[Member], ...] | None = ()
        if self._unmade is not None:
            assert self._assigned is not None
            before = plain_members(_unpacked(self._assigned))
        assert before is not None
        nobody: set[Member] = set()
        self._hosts.changes += sum(old != new for old, new in zip_longest(before, members, fillvalue=nobody))
        self._unmade, self._assigned = sum(map(len, members)), body
        self._dropping = ()  # a plain assignment has no drop_overloads
        self._have_endpoints.set()
        return True

    @property
    def hosts(self) -> HostSet:
        """The cluster's current hosts. Their objects are created on first use."""
        self._make_hosts()
        return self._hosts

    def _make_hosts(self) -> None:
        if self._unmade is None:
            return
        assignment, changes = self._unmade_assignment(), self._hosts.changes
        self._unmade = None
        self._assign(assignment)
        self._hosts.changes = changes  # counted by _leaves_unmade

    @property
    def hosts_shown(self) -> HostSet:
        """The hosts to show on a page. If no connection has needed the hosts yet, they are created for this page
        only.
        """
        if self._unmade is None:
            return self._hosts
        hosts = HostSet()
        hosts.assign(self._unmade_assignment(), self._surround.clock.monotonic())
        return hosts

    def _unmade_assignment(self) -> LoadAssignment:
        assert self._assigned is not None
        return compile_assignment(_unpacked(self._assigned))

    def _assign(self, assignment: LoadAssignment) -> None:
        self._dropping = assignment.drop
        leaving: list[Host] = []
        if self.checker is not None and not self.model.ignore_health_on_removal:
            # A removed host stays in use while it passes its health checks, because discovery can be temporarily
            # wrong.
            self._wanted = assignment
            wanted = {endpoint.address for endpoint in assignment.endpoints}
            gone = [host for host in self.hosts.hosts if host.endpoint.address not in wanted]
            leaving = [host for host in gone if self.checker.checks(host) and not host.failed_check]
            assignment = with_hosts(assignment, leaving)
        for host in self.hosts.assign(assignment, self._surround.clock.monotonic()):
            if self.outlier is not None:
                self.outlier.forget(host)
        if self.checker is not None:
            for host in self.hosts.hosts:
                host.leaving = False
            for host in leaving:
                host.leaving = True
            self.checker.follow(self.hosts.hosts)
        self._health_changed()
        self._have_endpoints.set()

    def preset(self, assignment: LoadAssignment) -> None:
        """Use the hosts of a saved config dump, without discovery or health checks."""
        self.hosts.assign(assignment, self._surround.clock.monotonic())
        self._health_changed()

    def _health_changed(self) -> None:
        self.hosts.refresh()
        self._balancer.update()
        self._subsets.clear()

    def _check_changed(self, host: Host) -> None:
        if host.leaving and host.failed_check and self._wanted is not None:
            self._assign(self._wanted)
        else:
            self._health_changed()

    def _passed_check(self, host: Host) -> None:
        if self.outlier is not None:
            self.outlier.passed_check(host)

    def _resolve_names(self) -> None:
        """Resolve each name separately, so that one slow name server does not delay other names' addresses."""
        assert self.model.assignment is not None
        endpoints = self.model.assignment.endpoints
        names = dict.fromkeys(each.address.name for each in endpoints if isinstance(each.address, NamedAddress))
        known: dict[str, tuple[str, ...] | None] = dict.fromkeys(names)
        self._resolved_names(known)
        resolver = self._surround.resolver
        if self.model.dns_resolver is not None:
            resolver = resolver.with_settings(self.model.dns_resolver)
        for name in names:
            self._run(self._resolve_for_ever(name, known, resolver), f"dns {name}")

    def _resolved_names(self, known: Mapping[str, tuple[str, ...] | None]) -> None:
        """Assign the addresses of all names as hosts, once every name has been looked up."""
        assert self.model.assignment is not None
        found = {name: addresses for name, addresses in known.items() if addresses is not None}
        if len(found) == len(known):
            self._assign(resolved(self.model.assignment, found))

    async def _resolve_for_ever(
        self, name: str, known: dict[str, tuple[str, ...] | None], resolver: Resolver
    ) -> None:
        model = self.model
        backoff = None if model.dns_failure_backoff is None else JitteredBackoff(*model.dns_failure_backoff)
        while True:
            wait_s = model.dns_refresh_s
            before = known[name]
            self.updates.update_attempt += 1
            try:
                answer = await resolver.resolve(name, model.dns_family)
            except ResolveFailed as error:
                log.debug("cluster %s: %s", model.name, error)
                self.updates.update_failure += 1
                # Like in Envoy, hosts of a STRICT_DNS cluster are removed if the DNS server answers that the name
                # does not exist. If it does not answer, the hosts stay.
                gone = error.absent and model.discovery is Discovery.STRICT_DNS
                known[name] = () if gone or before is None else before
                if backoff is not None:
                    wait_s = backoff.next(self._surround.rng.random())
            else:
                self.updates.update_success += 1
                addresses = answer.addresses
                if model.discovery is Discovery.LOGICAL_DNS:
                    addresses = self._logical_address(before, addresses)
                if before == addresses:
                    self.unchanged_updates += 1
                known[name] = addresses
                if model.respect_dns_ttl and answer.ttl_s:  # like in Envoy, 0 does not replace dns_refresh_rate
                    wait_s = max(1.0, answer.ttl_s)
                wait_s += self._surround.rng.random() * model.dns_jitter_s
                if backoff is not None:
                    backoff.reset()
            self._resolved_names(known)
            await asyncio.sleep(wait_s)

    def _logical_address(self, before: tuple[str, ...] | None, addresses: tuple[str, ...]) -> tuple[str, ...]:
        """Return the address that a LOGICAL_DNS cluster uses after an answer, as a tuple of one.

        Like in Envoy, the first address of each answer gets the next connections. So a name server can spread
        connections by the order of addresses, and no cluster stays at an address that does not answer. With health
        checks a healthy host stays, because a new host is unhealthy until its first check.
        """
        if self.checker is None or not before or before[0] not in addresses:
            return addresses[:1]
        return addresses[:1] if any(host.failed_check for host in self._hosts.hosts) else before

    async def _watch_outliers(self) -> None:
        assert self.outlier is not None
        assert self.model.outlier is not None
        while True:
            await asyncio.sleep(self.model.outlier.interval_s)
            self.outlier.tick(self.hosts.hosts, self._surround.clock.monotonic())

    async def _clean_up_for_ever(self) -> None:
        """Remove the hosts of an ORIGINAL_DST cluster that were unused for one to two intervals and have no open
        connection.
        """
        while True:
            await asyncio.sleep(self.model.cleanup_interval_s)
            self.original.remove_unused(self._surround.clock.monotonic())

    @property
    def healthy_count(self) -> int:
        """The number of healthy hosts of the cluster, for ``membership_healthy``. Hosts of ORIGINAL_DST count as
        healthy.
        """
        healthy = self._hosts.healthy_count if self._unmade is None else self._unmade
        return healthy or len(self.original)

    @property
    def degraded_count(self) -> int:
        """The number of degraded hosts of the cluster, for ``membership_degraded``."""
        return self._hosts.degraded_count  # none before hosts are made

    @property
    def host_count(self) -> int:
        """The number of hosts in the cluster, for ``membership_total``."""
        return (len(self._hosts) if self._unmade is None else self._unmade) + len(self.original)

    @property
    def host_changes(self) -> int:
        """How often hosts of the cluster were added or removed, for ``membership_change``."""
        return self._hosts.changes

    # Choice

    @property
    def all_hosts(self) -> list[Host]:
        """Return all hosts for a page, including ORIGINAL_DST hosts."""
        return [*self.hosts_shown.hosts, *self.original]

    def context(self, model: ContextModel) -> LiveContext:
        """Return the TLS context at run time that belongs to a configured transport socket."""
        return self._contexts[id(model)]

    @property
    def contexts(self) -> list[LiveContext]:
        """All TLS contexts of the cluster."""
        return list(self._contexts.values())

    def choose(
        self,
        info: StreamInfo,
        *,
        subset: Mapping[str, object] | None = None,
        hash_source: bool = False,
        avoid: frozenset[Host] = frozenset(),
        drops: bool = True,
    ) -> Host:
        """Choose the host for a connection.

        Args:
            info: the hop. ORIGINAL_DST reads its destination.
            subset: the endpoint metadata to require, if the cluster is divided into subsets.
            hash_source: whether to hash the client's address, for RING_HASH and MAGLEV.
            avoid: hosts that already failed for this connection.
            drops: whether to apply ``drop_overloads``. Envoy does so for requests, but not in ``tcp_proxy``.

        Raises:
            NoHealthyHost: there is no usable host. The failure is counted here.
        """
        now = self._surround.clock.monotonic()
        host: Host | None = None
        if self.model.discovery is Discovery.ORIGINAL_DST:
            host = self.original.choose(info, now)
        elif not (drops and self._dropping and self._drops()):
            if self._unmade is not None:
                self._make_hosts()
            balancer = self._balancer if self.model.subsets is None else self._balancer_for(subset)
            if balancer is not None:
                key = source_hash(info.facts.source.host) if hash_source else None
                panics = balancer.panics
                host = balancer.choose(now, hash_key=key, avoid=avoid)
                if balancer.panics != panics:
                    self.stats.lb_healthy_panic.value += 1
        if host is None:
            self.stats.cx_none_healthy.value += 1
            raise NoHealthyHost()
        return host

    def _drops(self) -> bool:
        """Return whether ``drop_overloads`` drops the next request, and count a dropped request."""
        for _category, share in self._dropping:
            if self._surround.rng.random() < share:
                self.stats.drop_overload.value += 1
                return True
        return False

    def candidates(self, subset: Mapping[str, object] | None) -> list[Host]:
        """Return every host that :meth:`choose` can return, for a cluster other than ORIGINAL_DST."""
        balancer = self._balancer_for(subset)
        return balancer.candidates() if balancer is not None else []

    def _balancer_for(self, subset: Mapping[str, object] | None) -> Balancer | None:
        """Return the balancer that ``lb_subset_config`` selects: for a subset of the hosts, or for all hosts."""
        self._make_hosts()
        division = self.model.subsets
        if division is None:
            return self._balancer
        wanted: Mapping[str, object] | None = subset or None
        if wanted is None or frozenset(wanted) not in division.selectors or not self._any_in(wanted):
            if division.fallback == "ANY_ENDPOINT":
                return self._balancer
            wanted = division.default if division.fallback == "DEFAULT_SUBSET" else None
            if wanted is None:
                return None
        key = value_key(wanted)
        balancer = self._subsets.get(key)
        if balancer is None:
            chosen = wanted
            hosts = self.hosts.filtered(lambda host: in_subset(host, chosen))
            balancer = self._subsets[key] = Balancer(self.model.balancing, hosts, self._surround.rng)
            balancer.update()
        return balancer

    def _any_in(self, subset: Mapping[str, object]) -> bool:
        return any(in_subset(host, subset) for host in self.hosts.hosts)

    def host_at(self, endpoint: Endpoint) -> Host:
        """Return the host of a connection that came from another process. For an unknown address, a new host is
        created.
        """
        if self.model.discovery is not Discovery.ORIGINAL_DST:
            return self.hosts.get(endpoint.address) or Host(endpoint)
        return self.original.host_at(endpoint, self._surround.clock.monotonic())

    def transport(self, host: Host) -> LiveTransport:
        """Return the transport socket for a host, and count the transport socket match that selected it."""
        if not self.model.socket_matches:
            self.only_transport = self._live(self.model.transport_socket)
            return self.only_transport
        name, model = self.model.transport_socket_for(host.endpoint.metadata)
        if name:
            counter = self._matched.get(name)
            if counter is None:
                counter = self._matched[name] = self.stats.scope.counter(f"{name}.total_match_count")
            counter.value += 1
        return self._live(model)

    def transport_of(self, host: Host) -> LiveTransport:
        """Return the result of :meth:`transport` without counting, for a connection that another process has
        counted.
        """
        return self._live(self.model.transport_socket_for(host.endpoint.metadata)[1])

    def _live(self, model: TransportSocket) -> LiveTransport:
        found = self._transports.get(id(model))
        if found is None:
            security = security_of(model)
            context = None if isinstance(security, RawBuffer) else self.context(security)
            found = self._transports[id(model)] = LiveTransport(model, context, proxy_version_of(model))
        return found

    def report(self, host: Host, result: Result) -> None:
        """Pass the outcome of an attempt on a host to outlier detection.

        Like in Envoy, the outcome is ignored if the host was removed meanwhile. Otherwise an ejection of this host
        would count towards the limit of ejections, and its state would stay in memory.
        """
        if self.outlier is not None and self.hosts.get(host.endpoint.address) is host:
            self.outlier.report(host, result, self.hosts.hosts, self._surround.clock.monotonic())


_NO_UPDATES = SubscriptionStats()
#: Up to this size, the hosts of an assignment are created only when a connection needs them. Creating 100 hosts
#: delays the connection by 2 ms.
_MOST_UNMADE = 100


def _unpacked(body: AnyMessage) -> endpoint_pb2.ClusterLoadAssignment:
    message = registry.unpack(body)
    if not isinstance(message, endpoint_pb2.ClusterLoadAssignment):
        raise ConfigError(f"not a ClusterLoadAssignment: {body.type_url}")
    return message


def tls_contexts(model: Cluster) -> Iterator[tuple[str, ContextModel]]:
    """Yield each TLS context of a cluster with its field path in the cluster's message."""
    sockets: list[tuple[str, TransportSocket]] = [("transport_socket", model.transport_socket)]
    for index, match in enumerate(model.socket_matches):
        sockets.append((f"transport_socket_matches[{index}].transport_socket", match.socket))
    for place, socket in sockets:
        # Wrapping transport sockets have the nested one in a field that is also called ``transport_socket``.
        while isinstance(socket, InternalUpstream | ProxyHeader):
            place, socket = f"{place}.typed_config.transport_socket", socket.inner
        if isinstance(socket, ContextModel):
            yield f"{place}.typed_config", socket


def live_assignment(cluster: LiveCluster, hosts: HostSet) -> LoadAssignment:
    """Return ``hosts_shown`` as a load assignment for dumps. With ORIGINAL_DST, each address is a locality of its
    own.
    """
    groups = []
    for priority, level in enumerate(hosts.levels):
        for group in level.groups:
            endpoints = tuple(host.endpoint for host in group.hosts)
            groups.append(
                LocalityGroup(locality=group.locality, priority=priority, weight=group.weight, endpoints=endpoints)
            )
    groups.extend(
        LocalityGroup(locality=Locality(), priority=0, weight=0, endpoints=(host.endpoint,))
        for host in cluster.original
        if hosts.get(host.endpoint.address) is None
    )
    return LoadAssignment(cluster_name=cluster.model.name, groups=tuple(groups))
