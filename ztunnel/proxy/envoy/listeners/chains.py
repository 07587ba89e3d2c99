"""Filter chains at run time: a chain of the configuration with its TLS context, loggers and counters resolved."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import NamedTuple

from hbone.settings import Role
from hbone.tls import PeerFacts
from xds.errors import ConfigError
from xds.model.address import SocketAddress
from xds.model.facts import ConnectionFacts
from xds.model.http import HttpConnectionManager, RouteTable, RouteTableRef
from xds.model.listener import (
    ChainFilter,
    ConnectionLimit,
    FilterChain,
    LocalRateLimit,
    Rbac,
    SetFilterState,
    SharedWithUpstream,
    TcpProxy,
)
from xds.model.weighted_cluster import WeightedCluster
from ztunnel.policy.engine import Decision, judge, reads_port
from ztunnel.policy.ledger import Use
from ztunnel.proxy.envoy.listeners.limits import LiveConnectionLimit, LiveRateLimit, live_limit
from ztunnel.proxy.envoy.secrets.contexts import LiveContext
from ztunnel.proxy.envoy.secrets.store import SecretStore
from ztunnel.proxy.envoy.stats.stats import (
    Counter,
    Declared,
    Gauge,
    OnTouch,
    Scope,
    Scopes,
    Stats,
    count_parameters,
    declared_in,
    http_scope,
    tcp_scope,
)
from ztunnel.proxy.envoy.stream.outcome import POLICY_CHANGE, Denied, Incomplete
from ztunnel.proxy.envoy.stream.stream_info import StreamInfo
from ztunnel.proxy.envoy.telemetry.access_log import AccessLogs, Sink
from ztunnel.proxy.envoy.telemetry.decisions import Decisions
from ztunnel.proxy.envoy.telemetry.format import Renderer, renderer
from ztunnel.runtime.line_limit import LineLimit


class RbacDecision(NamedTuple):
    """An RBAC filter's decision about a connection.

    Attributes:
        shadow: the shadow rules' decision. ``None`` without shadow rules.
        rules: the rules' decision. ``None`` without rules.
        denied: Envoy's termination details if the connection must end, otherwise empty.
    """

    shadow: Decision | None
    rules: Decision | None
    denied: str


class LiveRbac:
    """An RBAC filter at run time, with its counters."""

    def __init__(self, model: Rbac, stats: Stats | Scopes, decisions: Decisions) -> None:
        self.model = model
        self._decisions = decisions
        name = f"{model.stat_prefix.removesuffix('.')}.rbac"
        scope = stats.scope(name)
        shadow = stats.scope(f"{name}.{model.shadow_prefix}".rstrip("."))
        self._allowed = scope.counter("allowed")
        self._denied = scope.counter("denied")
        self._shadow_allowed = shadow.counter("shadow_allowed")
        self._shadow_denied = shadow.counter("shadow_denied")
        lists = (rules for rules in (model.rules, model.shadow) if rules is not None)
        self.reads_port = any(reads_port(rules) for rules in lists)

    def decide(self, facts: ConnectionFacts) -> RbacDecision:
        """Return the decision about a connection, and write metadata into the connection's facts. Change no
        counter.
        """
        model = self.model
        shadow = rules = None
        if model.shadow is not None:
            shadow = judge(model.shadow, facts)
            facts.metadata["envoy.filters.network.rbac"] = {
                f"{model.shadow_prefix}shadow_effective_policy_id": shadow.policy,
                f"{model.shadow_prefix}shadow_engine_result": "allowed" if shadow.allowed else "denied",
            }
        denied = ""
        if model.rules is not None:
            rules = judge(model.rules, facts)
            if model.log_only:
                facts.metadata["envoy.common"] = {"access_log_hint": bool(rules.policy)}
            elif not rules.allowed:
                denied = f"rbac_access_denied_matched_policy[{rules.policy or 'none'}]"
        return RbacDecision(shadow, rules, denied)

    def check(
        self, info: StreamInfo, facts: ConnectionFacts, lines: LineLimit | None, *, live: bool = False
    ) -> None:
        """Check a connection against the policy, and count the result.

        Args:
            info: the connection.
            facts: the policy's input: the connection's facts. For a tunnel, the destination is the application.
            lines: limits log lines about denials. ``None``: log no line, because an access log reports denials.
            live: whether the connection is already open, and is checked again after a policy change.

        Raises:
            Denied: the policy denies the connection. The error contains Envoy's termination details.
        """
        decisions = self._decisions
        shadow, rules, denied = self.decide(facts)
        if shadow is not None:
            (self._shadow_allowed if shadow.allowed else self._shadow_denied).value += 1
            if not live and (shadow.policy or not shadow.allowed):
                decisions.count(shadow.policy, Use.WOULD_ALLOW if shadow.allowed else Use.WOULD_DENY)
        if self.model.rules is None or rules is None or self.model.log_only:
            return
        if not denied:
            self._allowed.value += 1
            if rules.policy and not live:
                decisions.count(rules.policy, Use.ALLOWED)
            return
        self._denied.value += 1
        decisions.count(rules.policy, Use.ENDED if live else Use.DENIED)
        decisions.denied(info, facts, f"{POLICY_CHANGE}: {denied}" if live else denied)
        if lines is not None and lines.admits():
            decisions.log_denial(info, facts, self.model.rules, rules.policy, live=live)
        raise Denied(denied, rules.policy)


@dataclass(frozen=True, slots=True)
class LiveHeader:
    """A header to add to tunnel requests, with the function that renders its value."""

    name: str
    render: Renderer
    action: str
    keep_empty: bool


@dataclass(frozen=True, slots=True)
class LiveState:
    """One entry of a ``set_filter_state`` filter, with the function that renders its value."""

    key: str
    render: Renderer
    skip_if_empty: bool
    shared: SharedWithUpstream


#: Access log commands whose values are equal for all connections that share a plan.
_PLANNED = frozenset(
    (
        "DOWNSTREAM_LOCAL_ADDRESS",
        "DOWNSTREAM_LOCAL_ADDRESS_WITHOUT_PORT",
        "DOWNSTREAM_LOCAL_PORT",
        "DOWNSTREAM_REMOTE_ADDRESS_WITHOUT_PORT",
        "DYNAMIC_METADATA",
    )
)


class LiveTcpProxy:
    """A TCP proxy filter with its counters (``tcp.<stat prefix>.``), each created on first use."""

    cx_total = OnTouch(Counter, "downstream_cx_total")
    cx_no_route = OnTouch(Counter, "downstream_cx_no_route")
    rx_bytes = OnTouch(Counter, "downstream_cx_rx_bytes_total")
    tx_bytes = OnTouch(Counter, "downstream_cx_tx_bytes_total")
    idle_timeout = OnTouch(Counter, "idle_timeout")
    max_duration = OnTouch(Counter, "max_downstream_connection_duration")

    def __init__(self, model: TcpProxy, stats: Stats, logs: AccessLogs) -> None:
        self.model = model
        #: The time limit for opening an upstream. Like in Envoy, the idle timer and the duration timer already run
        #: during this time. They also limit the wait for the answer to a CONNECT, which a cluster's connect
        #: timeout does not limit.
        self.opening_limit_s = min(model.idle_timeout_s or math.inf, model.max_duration_s or math.inf)
        self.sinks: tuple[Sink, ...] = logs.sinks(model.access_log)
        self.scope = tcp_scope(stats, model.stat_prefix)
        self.scope.declare(_TCP_COUNTED, None)
        self.hostname: Renderer | None = None
        self.headers: tuple[LiveHeader, ...] = ()
        #: Whether all connections of a plan (:mod:`ztunnel.proxy.envoy.listeners.plans`) request the same tunnel.
        self.same_request = model.tunneling is not None and _PLANNED.issuperset(
            part.name
            for text in (model.tunneling.hostname, *(header.value for header in model.tunneling.headers))
            for part in text.parts
            if not isinstance(part, str)
        )
        if model.tunneling is not None:
            # In tunnel requests, a missing value is an empty text, not "-". If the hostname is empty, the tunnel
            # is refused. An empty header is omitted.
            self.hostname = renderer(model.tunneling.hostname, missing="")
            self.headers = tuple(
                LiveHeader(header.name, renderer(header.value, missing=""), header.action, header.keep_empty)
                for header in model.tunneling.headers
            )

    def subset_of(self, choice: WeightedCluster) -> Mapping[str, object]:
        """Return the metadata that a host must have if ``choice`` is chosen. The entry's own values win."""
        every = self.model.metadata_match
        return {**every, **choice.metadata_match} if choice.metadata_match else every


#: Envoy's gauges of buffered bytes, which stay 0, because this proxy does not count these bytes.
_BUFFERED = tuple(Declared(f"downstream_cx_{way}_bytes_buffered", Gauge) for way in ("rx", "tx"))
_TCP_COUNTED = (*declared_in(LiveTcpProxy), *_BUFFERED)


class _Counted(NamedTuple):
    """The counters of a connection manager that are needed to compute other statistics."""

    requests: Counter
    connections: Gauge
    by_class: tuple[Counter, ...]


#: Statistics computed from other counters. All connections and requests here are HTTP/2, so several are equal.
_DERIVED = (
    Declared("rq_total", Counter, lambda counted: counted.requests.value),
    Declared("downstream_rq_http2_total", Counter, lambda counted: counted.requests.value),
    Declared("downstream_rq_completed", Counter, lambda counted: sum(each.value for each in counted.by_class)),
    Declared("downstream_cx_http2_active", Gauge, lambda counted: counted.connections.value),
)


class LiveConnectionManager:
    """An HTTP connection manager with its counters (``http.<stat prefix>.``)."""

    def __init__(self, model: HttpConnectionManager, stats: Stats, logs: AccessLogs) -> None:
        self.model = model
        self.sinks: tuple[Sink, ...] = logs.sinks(model.access_log)
        self.routes: RouteTable | None = model.routes if isinstance(model.routes, RouteTable) else None
        scope = self.scope = http_scope(stats, model.stat_prefix)
        self.server_header = b"server", model.server_name.encode()
        self.cx_total = scope.counter("downstream_cx_total")
        self.cx_active = scope.gauge("downstream_cx_active")
        self.cx_http2 = scope.counter("downstream_cx_http2_total")
        self.cx_destroy = scope.counter("downstream_cx_destroy")
        self.cx_destroy_local = scope.counter("downstream_cx_destroy_local")
        self.cx_destroy_remote = scope.counter("downstream_cx_destroy_remote")
        self.cx_destroy_active = scope.counter("downstream_cx_destroy_active_rq")
        self.cx_destroy_local_active = scope.counter("downstream_cx_destroy_local_active_rq")
        self.cx_destroy_remote_active = scope.counter("downstream_cx_destroy_remote_active_rq")
        self.cx_rx_bytes = scope.counter("downstream_cx_rx_bytes_total")
        self.cx_tx_bytes = scope.counter("downstream_cx_tx_bytes_total")
        self.cx_protocol_error = scope.counter("downstream_cx_protocol_error")
        self.cx_upgrades_total = scope.counter("downstream_cx_upgrades_total")
        self.cx_upgrades_active = scope.gauge("downstream_cx_upgrades_active")
        self.rq_total = scope.counter("downstream_rq_total")
        self.rq_active = scope.gauge("downstream_rq_active")
        self.rq_idle_timeout = scope.counter("downstream_rq_idle_timeout")
        self.rq_timeout = scope.counter("downstream_rq_timeout")
        self.rq_by_class = {n: scope.counter(f"downstream_rq_{n}xx") for n in (2, 3, 4, 5)}
        self.rq_reset = scope.counter("downstream_rq_rx_reset")
        self.rq_time = scope.histogram("downstream_rq_time")
        self.no_route = scope.counter("no_route")
        self.no_cluster = scope.counter("no_cluster")
        self.cx_ssl_total = scope.counter("downstream_cx_ssl_total")
        self.cx_ssl_active = scope.gauge("downstream_cx_ssl_active")
        self.cx_length = scope.histogram("downstream_cx_length_ms")
        counted = _Counted(self.rq_total, self.cx_active, tuple(self.rq_by_class.values()))
        scope.declare(_DERIVED, counted)

    def request_ended(self) -> None:
        """Count the end of an active request of this connection manager."""
        self.rq_active.stored -= 1

    def connection_began(self, *, secured: bool) -> None:
        """Count a connection that the filter chain has admitted."""
        self.cx_total.value += 1
        self.cx_http2.value += 1
        self.cx_ssl_total.value += secured
        self.connection_came(secured=secured)

    def connection_came(self, *, secured: bool) -> None:
        """Add a connection to the gauges only, because it came from another process, which has counted it as
        new.
        """
        self.cx_active.stored += 1
        self.cx_ssl_active.stored += secured

    def connection_went(self, *, secured: bool) -> None:
        """Remove a connection from the gauges, because it has ended or moved to another process."""
        self.cx_active.stored -= 1
        self.cx_ssl_active.stored -= secured

    def connection_ended(self, *, by_peer: bool, in_use: bool) -> None:
        """Count the end of a connection, which can have open requests. The caller must also call
        :meth:`connection_went`.
        """
        self.cx_destroy.value += 1
        (self.cx_destroy_remote if by_peer else self.cx_destroy_local).value += 1
        if in_use:
            self.cx_destroy_active.value += 1
            (self.cx_destroy_remote_active if by_peer else self.cx_destroy_local_active).value += 1

    @property
    def wanted_routes(self) -> RouteTableRef | None:
        """The name of the route table to request by RDS, if any."""
        return self.model.routes if isinstance(self.model.routes, RouteTableRef) else None


class LiveSsl:
    """Handshake counters of a listener (``listener.<address>.ssl.``)."""

    def __init__(self, scope: Scope) -> None:
        self._scope = scope.scope("ssl")
        self.handshake = self._scope.counter("handshake")
        self.connection_error = self._scope.counter("connection_error")
        self.fail_verify_error = self._scope.counter("fail_verify_error")
        self.fail_verify_san = self._scope.counter("fail_verify_san")
        self.no_certificate = self._scope.counter("no_certificate")
        self.fail_verify_no_cert = self._scope.counter("fail_verify_no_cert")
        self.not_ready = scope.counter("server_ssl_socket_factory.downstream_context_secrets_not_ready")
        self.sds_updates = scope.counter("server_ssl_socket_factory.ssl_context_update_by_sds")

    def updated_by_sds(self) -> None:
        """Count the rebuild of a TLS context after a secret has changed."""
        self.sds_updates.value += 1

    def negotiated(self, facts: PeerFacts) -> None:
        """Count a finished TLS handshake by its negotiated parameters."""
        self.handshake.value += 1
        self.no_certificate.value += facts.certificate is None
        count_parameters(self._scope, facts.version, facts.cipher, facts.group)


@dataclass(frozen=True, slots=True)
class _Filters:
    """The run-time objects of a filter chain's filters, by kind."""

    rbac: tuple[LiveRbac, ...]
    limits: tuple[LiveConnectionLimit | LiveRateLimit, ...]
    state: tuple[LiveState, ...]
    scopes: Scopes | None = None

    @classmethod
    def of(
        cls, models: Iterable[ChainFilter], stats: Stats, now: Callable[[], float], decisions: Decisions
    ) -> _Filters:
        """Create the run-time objects of the configured filters."""
        listed = list(models)
        if not listed:
            return _NO_FILTERS  # most chains of a mesh
        scopes = Scopes(stats)
        return cls(
            tuple(LiveRbac(each, scopes, decisions) for each in listed if isinstance(each, Rbac)),
            tuple(
                live_limit(each, scopes, now)
                for each in listed
                if isinstance(each, ConnectionLimit | LocalRateLimit)
            ),
            tuple(
                LiveState(
                    value.key,
                    renderer(value.value, missing="" if value.omit_empty_values else "-"),
                    value.skip_if_empty,
                    value.shared,
                )
                for each in listed
                if isinstance(each, SetFilterState)
                for value in each.values
            ),
            scopes,
        )

    def close(self) -> None:
        """Close the scopes of the filters' metrics. Idempotent."""
        if self.scopes is not None:
            self.scopes.close()


_NO_FILTERS = _Filters((), (), ())


class LiveChain:
    """One filter chain.

    Attributes:
        rbac, limits, filter_state: the chain's filters by kind. Filters from ECDS come after inline filters.
        sinks: the loggers of the terminal filter.
        takes_internal: whether the chain can serve an internal listener, because it has a TCP proxy and no TLS.
        is_complete: whether each filter from ECDS has received its configuration, or has a default.

    Args:
        on_secret: called after a secret of the chain's TLS context was replaced.

    Raises:
        ConfigError: the chain's TLS context cannot be built; see
            :class:`~ztunnel.proxy.envoy.secrets.contexts.LiveContext`.
    """

    def __init__(
        self,
        model: FilterChain,
        *,
        stats: Stats,
        logs: AccessLogs,
        secrets: SecretStore,
        ssl: LiveSsl,
        owner: str,
        now: Callable[[], float],
        decisions: Decisions,
        listener_logs: bool = False,
        on_secret: Callable[[LiveChain], object] | None = None,
    ) -> None:
        self.model = model
        self.name = model.name
        self._decisions = decisions
        self._listener_logs = listener_logs
        self._inline = _Filters.of((*model.rbac, *model.limits, *model.filter_state), stats, now, decisions)
        self._make = partial(_Filters.of, stats=stats, now=now, decisions=decisions)
        self._found: list[ChainFilter | None] = [None] * len(model.discovered)
        self._discovered: list[_Filters | None] = [None] * len(model.discovered)
        for place in range(len(model.discovered)):
            self.discover(place, None)
        self._put_together()
        self.proxy: LiveTcpProxy | None = None
        self.manager: LiveConnectionManager | None = None
        if isinstance(model.terminal, TcpProxy):
            self.proxy = LiveTcpProxy(model.terminal, stats, logs)
            self.sinks = self.proxy.sinks
        else:
            self.manager = LiveConnectionManager(model.terminal, stats, logs)
            self.sinks = self.manager.sinks
        self.tls: LiveContext | None = None
        if model.tls is not None:

            def updated() -> None:
                ssl.updated_by_sds()
                if on_secret is not None:
                    on_secret(self)

            try:
                self.tls = LiveContext(Role.SERVER, model.tls, secrets, updated, owner=owner)
            except ConfigError:
                self.close()
                raise
        self.takes_internal = self.proxy is not None and self.tls is None

    def discover(self, place: int, found: ChainFilter | None) -> None:
        """Apply a filter's configuration from ECDS. ``None`` means that it was removed, so the default applies."""
        found = found if found is not None else self.model.discovered[place].default
        # If an equal configuration is delivered again, keep the filter, so that the counts of a limit are not
        # reset.
        if found != self._found[place]:
            self._found[place] = found
            before = self._discovered[place]
            self._discovered[place] = self._make((found,)) if found is not None else None
            if before is not None:
                before.close()  # after the new filter is made, so that shared counters stay
            self._put_together()

    def lacks(self, place: int) -> bool:
        """Return whether a filter has neither a configuration nor a default."""
        return self._discovered[place] is None

    def _put_together(self) -> None:
        """Combine inline filters and filters from ECDS into the lists used for new connections."""
        all_filters = [self._inline, *(each for each in self._discovered if each is not None)]
        self.rbac = tuple(rbac for each in all_filters for rbac in each.rbac)
        self.limits = tuple(limit for each in all_filters for limit in each.limits)
        self.filter_state = [state for each in all_filters for state in each.state]
        self.is_complete = all(each is not None for each in self._discovered)
        #: Whether a filter reads the port of a tunnel's application; see :meth:`judge_port`.
        self.reads_port = any(rbac.reads_port for rbac in self.rbac)
        #: Whether :meth:`admit` can refuse a connection.
        self.gated = bool(self.limits) or not self.is_complete

    @cached_property
    def _lines(self) -> LineLimit:
        """Limits log lines about denials. Each chain has its own limit, so that denials at one pod do not suppress
        log lines about another pod.
        """
        return self._decisions.line_limit()

    def admit(self, info: StreamInfo) -> None:
        """Run the connection-limiting filters. Like in Envoy, this happens before any byte is read, even of a
        handshake.

        Raises:
            TooMany: a limit is reached.
            Incomplete: a filter's configuration has not arrived. The filter could deny the connection.
        """
        if not self.is_complete:
            raise Incomplete()
        for limit in self.limits:
            limit.check(info)

    def hold(self, info: StreamInfo) -> None:
        """Count a connection that another process has admitted towards the chain's limits."""
        for limit in self.limits:
            limit.hold(info)

    def judge(self, info: StreamInfo, *, port_known: bool = True, live: bool = False) -> None:
        """Run the RBAC filters in order.

        Envoy waits for the client's first byte before that. Here the filters run at once, because none depends on
        a byte. With a server-first protocol, waiting would send the server's bytes to a denied client.

        Args:
            info: the connection.
            port_known: whether the destination port is the application's port. For a tunnel connection this is
                false: filters that read the port run later, in :meth:`judge_port`.
            live: whether the connection is already open, and is checked again after a policy change.

        Raises:
            Denied: a filter denies the connection.
        """
        if not self.rbac:
            return
        # A connection manager's access loggers write one line per request, so a connection without requests has no
        # line there.
        logged = self._listener_logs or (self.proxy is not None and self.proxy.sinks)
        lines = None if logged else self._lines
        for rbac, facts in self.asked(info.facts, port_known=port_known):
            rbac.check(info, facts, lines, live=live)

    def judge_port(self, info: StreamInfo, application: SocketAddress, *, live: bool = False) -> None:
        """Run the filters skipped by :meth:`judge`, for a tunnel to ``application``.

        Args:
            info: the request.
            application: the address named by the request.
            live: whether the request is already open, and is checked again after a policy change.

        Raises:
            Denied: a filter denies the request.
        """
        for rbac, facts in self.asked_about(info.facts, application):
            rbac.check(info, facts, None if self.sinks else self._lines, live=live)

    def asked(self, facts: ConnectionFacts, *, port_known: bool) -> Iterator[tuple[LiveRbac, ConnectionFacts]]:
        """Yield the RBAC filters that apply to a connection, in order, with its facts; see :meth:`judge`."""
        for rbac in self.rbac:
            if port_known or not rbac.reads_port:
                yield rbac, facts

    def asked_about(
        self, facts: ConnectionFacts, application: SocketAddress
    ) -> Iterator[tuple[LiveRbac, ConnectionFacts]]:
        """Yield the RBAC filters for a tunnel's application in order, each with its facts."""
        for rbac in self.rbac:
            if rbac.reads_port:
                yield rbac, replace(facts, destination=application)

    def set_filter_state(self, info: StreamInfo) -> None:
        """Run the ``set_filter_state`` filters."""
        facts = info.facts
        for state in self.filter_state:
            value = state.render(info)
            if value or not state.skip_if_empty:
                facts.filter_state[state.key] = value
                if facts.shared_state or state.shared is not SharedWithUpstream.NONE:
                    facts.shared_state = _shared(facts.shared_state, state)

    async def settled(self) -> None:
        """Wait for the chain's secrets."""
        if self.tls is not None:
            await self.tls.settled()

    def close(self) -> None:
        """Unsubscribe from the chain's secrets, and close the scopes of its metrics. Idempotent."""
        if self.tls is not None:
            self.tls.close()
        for terminal in (self.proxy, self.manager):
            if terminal is not None:
                terminal.scope.close()
        for filters in (self._inline, *self._discovered):
            if filters is not None:
                filters.close()


def _shared(before: tuple[tuple[str, bool], ...], state: LiveState) -> tuple[tuple[str, bool], ...]:
    """Return the filter state that internal connections inherit if ``state`` is set; see ``ConnectionFacts``."""
    others = tuple([entry for entry in before if entry[0] != state.key])
    if state.shared is SharedWithUpstream.NONE:
        return others
    return (*others, (state.key, state.shared is SharedWithUpstream.TRANSITIVE))
