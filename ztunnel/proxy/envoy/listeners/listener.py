"""Listeners at run time: sockets, filters, chains and counters.

Updates work like in Envoy. If only filter chains or the matcher change, the listener is updated in place:
unchanged chains keep their connections, and changed chains drain. Any other change creates a new listener, which
takes over the sockets while the old listener drains.
"""

import logging
import socket
from collections.abc import Callable, Iterable, Iterator

from hbone.aio.poller import Poller
from tproxy.aio import sockets
from xds.dialects.envoy.reading import at
from xds.errors import ConfigError
from xds.model.address import SocketAddress
from xds.model.facts import ConnectionFacts
from xds.model.http import HttpConnectionManager
from xds.model.listener import DiscoveredFilter, FilterChain, Listener, ListenerFilter, ListenerFilterEntry
from xds.proto.well_known import Any as AnyMessage
from ztunnel.proxy.envoy.listeners.chains import LiveChain, LiveSsl
from ztunnel.proxy.envoy.listeners.filters import InspectorCounts, ReadsBytes
from ztunnel.proxy.envoy.secrets.store import SecretStore
from ztunnel.proxy.envoy.stats.stats import Stats, listener_scope
from ztunnel.proxy.envoy.telemetry.access_log import AccessLogs
from ztunnel.proxy.envoy.telemetry.decisions import Decisions
from ztunnel.runtime.accepting import Gate, ListeningSocket
from ztunnel.runtime.clock import Clock

log = logging.getLogger(__name__)

Accepted = Callable[["LiveListener", socket.SocketType, tuple[str, int]], None]


def bind(model: Listener, address: SocketAddress, poller: Poller, gate: Gate | None = None) -> ListeningSocket:
    """Bind a socket to a listener's address. The socket starts to listen later, and accepts while the gate permits
    it.

    Raises:
        tproxy.errors.TproxyError: the port is in use, or a capability is missing.
    """
    early = [
        (option.level, option.name, option.value) for option in model.socket_options if option.state == "prebind"
    ]
    if ":" in address.host:
        # Like in Envoy, a listener on an IPv6 address accepts IPv4 connections only if ``ipv4_compat`` is set.
        early.append((socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0 if model.ipv4_compat else 1))
    sock = sockets.listen(
        address.host,
        address.port,
        transparent=model.transparent,
        reuse_port=model.reuse_port,
        freebind=model.freebind,
        socket_options=early,
        # Bind now, so that the listener is refused if the port is in use. The socket listens once all resources of
        # the listener have arrived.
        backlog=0,
    )
    for option in model.socket_options:
        if option.state != "prebind":
            if isinstance(option.value, int):
                sock.setsockopt(option.level, option.name, option.value)
            else:
                sock.setsockopt(option.level, option.name, option.value)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)  # accepted sockets inherit it
    bound = sock.getsockname()
    return ListeningSocket(sock, SocketAddress(address.host, bound[1]), model.backlog, poller, gate=gate)


def chain_places(model: Listener) -> Iterator[tuple[str, FilterChain]]:
    """Yield each filter chain of a listener with the chain's field path in the listener's message."""
    for index, chain in enumerate(model.chains):
        yield f"filter_chains[{index}]", chain
    if model.default_chain is not None:
        yield "default_filter_chain", model.default_chain


class LiveListener:
    """One version of one listener.

    Attributes:
        body: the message as received, for dumps.
        sockets: the accepting sockets. They move to the successor on an update.
        draining: whether it was replaced or removed. Its open connections continue.
        successor: the version that has replaced this version. ``None`` if there is none, or the listener was
            removed.
        filters: listener filters in order. ``None`` stands for a filter not yet delivered by ECDS.
        reads_bytes: whether a filter waits for bytes of the client.
        ends_tunnels: whether a filter chain terminates tunnels. The clients are then other nodes.

    Raises:
        ConfigError: a chain's TLS context cannot be built. The error has the chain's path.
    """

    def __init__(
        self,
        model: Listener,
        body: AnyMessage,
        *,
        version: str,
        stats: Stats,
        logs: AccessLogs,
        secrets: SecretStore,
        clock: Clock,
        decisions: Decisions,
        keep: Iterable[LiveChain] = (),
        on_secret: Callable[[LiveChain], object] | None = None,
    ) -> None:
        self.model = model
        self.name = model.name
        self.body = body
        self.version = version
        self.last_updated = clock.wall()
        self.sockets: list[ListeningSocket] = []
        self.draining = False
        self.successor: LiveListener | None = None
        self._discovered: dict[str, ListenerFilter] = {}
        self._prepare_filters()
        self.sinks = logs.sinks(model.access_log)
        scope = self.scope = listener_scope(stats, _stat_address(model))
        self.cx_total = scope.counter("downstream_cx_total")
        self.cx_active = scope.gauge("downstream_cx_active")
        self.cx_destroy = scope.counter("downstream_cx_destroy")
        self.no_filter_chain_match = scope.counter("no_filter_chain_match")
        self.cx_length = scope.histogram("downstream_cx_length_ms")
        self.pre_cx_active = scope.gauge("downstream_pre_cx_active")
        self.pre_cx_timeout = scope.counter("downstream_pre_cx_timeout")
        self.overload_reject = scope.counter("downstream_cx_overload_reject")
        self.network_extension_config_missing = scope.counter("network_extension_config_missing")
        self.extension_config_missing = scope.counter("extension_config_missing")
        self.node_local = scope.counter("node_local_shortcut")
        self.ssl = LiveSsl(scope)
        self.inspected = InspectorCounts(stats.scope("tls_inspector"))
        kept = {chain.model.content: chain for chain in keep}

        def live(chain: FilterChain, place: str) -> LiveChain:
            found = kept.get(chain.content)
            if found is not None:
                return found
            owner = f"listener {model.name}: {place}.transport_socket.typed_config"
            with at(place, "transport_socket", "typed_config"):
                return LiveChain(
                    chain,
                    stats=stats,
                    logs=logs,
                    secrets=secrets,
                    ssl=self.ssl,
                    owner=owner,
                    now=clock.monotonic,
                    decisions=decisions,
                    listener_logs=bool(self.sinks),
                    on_secret=on_secret,
                )

        self.ends_tunnels = any(isinstance(chain.terminal, HttpConnectionManager) for chain in model.all_chains)
        self.chains: dict[int, LiveChain] = {}
        try:
            for place, chain in chain_places(model):
                self.chains[id(chain)] = live(chain, place)
        except ConfigError:
            shared = set(map(id, kept.values()))
            for made in self.live_chains:
                if id(made) not in shared:
                    made.close()
            self.scope.close()
            raise

    @property
    def latest(self) -> "LiveListener":
        """The active version of this listener, or the last one if the listener was removed."""
        latest = self
        while latest.successor is not None:
            latest = latest.successor
        return latest

    @property
    def live_chains(self) -> list[LiveChain]:
        """All filter chains, the default chain last."""
        return list(self.chains.values())

    def chain_for(self, facts: ConnectionFacts) -> LiveChain | None:
        """Return the filter chain that matches a connection, or None."""
        chain = self.model.chain_for(facts)
        return self.chains[id(chain)] if chain is not None else None

    def filter_of(self, entry: ListenerFilterEntry) -> ListenerFilter | None:
        """Return a listener filter's configuration: inline, delivered by ECDS, or the default. Return ``None`` if
        ECDS has not delivered it and there is no default.
        """
        if isinstance(entry.filter, DiscoveredFilter):
            return self._discovered.get(entry.name, entry.filter.default)
        return entry.filter

    def discover(self, place: str, found: ListenerFilter | None) -> None:
        """Apply a listener filter's configuration from ECDS, or its removal."""
        if found is None:
            self._discovered.pop(place, None)
        else:
            self._discovered[place] = found
        self._prepare_filters()

    def _prepare_filters(self) -> None:
        self.filters = [(entry, self.filter_of(entry)) for entry in self.model.listener_filters]
        self.reads_bytes = any(isinstance(found, ReadsBytes) for _, found in self.filters)

    def opened(self, *, moved: bool = False) -> None:
        """Count an open connection. ``moved``: it came from another process, which has counted it as new."""
        self.cx_total.value += not moved
        self.cx_active.stored += 1

    def closed(self, *, moved: bool = False) -> None:
        """Remove a connection from the gauge, and count its end. ``moved``: another process will count its end."""
        self.cx_active.stored -= 1
        self.cx_destroy.value += not moved

    async def settled(self) -> None:
        """Wait for the secrets of every chain."""
        for chain in self.live_chains:
            await chain.settled()

    @property
    def address_text(self) -> str:
        """Return the listener's address in the form of ``/listeners``."""
        if self.model.internal:
            return f"envoy://{self.name}/"
        addresses = [sock.address for sock in self.sockets] or list(self.model.addresses)
        return ",".join(map(str, addresses))

    def stop(self) -> None:
        """Accept the connections that are still queued, then close the listening sockets. Open connections
        continue. Idempotent.
        """
        for sock in self.sockets:
            sock.accept_queued()
            sock.close()
        self.sockets = []


def _stat_address(model: Listener) -> str:
    if model.stat_prefix:
        return model.stat_prefix
    if model.internal:
        return f"envoy_internal_{model.name}"
    host, port = model.addresses[0]
    return f"[{host}]_{port}" if ":" in host else f"{host}_{port}"
