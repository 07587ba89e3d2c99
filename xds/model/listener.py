"""Listeners, filter chains and network filters, as values."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from functools import cached_property

from xds.model.access_log import AnyAccessLog
from xds.model.address import SocketAddress
from xds.model.chain_match import ChainMatch, ChainSelector
from xds.model.facts import ConnectionFacts
from xds.model.format_string import FormatString
from xds.model.http import HttpConnectionManager
from xds.model.matcher import InputKind, Matcher, input_kinds
from xds.model.metadata import NO_METADATA, Metadata
from xds.model.policy import PolicyList
from xds.model.tls import ConfigSource, SecretRef, TlsContext
from xds.model.weighted_cluster import WeightedCluster


@dataclass(frozen=True, slots=True)
class SocketOption:
    """A socket option, set by ``setsockopt(level, name, value)`` before bind, after bind or after listen."""

    level: int
    name: int
    value: int | bytes
    state: str = "prebind"


# Listener filters as values. Module ztunnel.proxy.envoy.listeners.filters applies them to connections.


@dataclass(frozen=True, slots=True)
class OriginalDst:
    """``envoy.filters.listener.original_dst``: restores the destination that the client dialled."""


@dataclass(frozen=True, slots=True)
class OriginalSrc:
    """``envoy.filters.listener.original_src``: upstream sockets use the client's address as source, and the socket
    mark ``mark``.
    """

    mark: int = 0


@dataclass(frozen=True, slots=True)
class SetDstAddress:
    """``istio.set_internal_dst_address.v1.Config``: takes the addresses from the ``tunnel`` metadata."""


@dataclass(frozen=True, slots=True)
class TlsInspector:
    """``envoy.filters.listener.tls_inspector``: detects TLS, and reads server name and ALPN."""


@dataclass(frozen=True, slots=True)
class HttpInspector:
    """``envoy.filters.listener.http_inspector``: detects cleartext HTTP."""


@dataclass(frozen=True, slots=True)
class ProxyProtocol:
    """``envoy.filters.listener.proxy_protocol``: reads a PROXY header."""

    allow_without: bool = False
    disallowed_versions: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class WorkloadMetadata:
    """``envoy.filters.listener.workload_metadata``: looks up the client's baggage by its address.

    ``baggage`` maps an address to the value of the header ``baggage`` in its tunnel requests.
    """

    baggage: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Discovered:
    """A filter whose configuration arrives by ECDS under ``name``.

    Attributes:
        type_urls: full names of the accepted message types.
        without_warming: whether the listener uses the default until the configuration arrives, instead of waiting
            for the configuration.
    """

    name: str
    source: ConfigSource
    type_urls: tuple[str, ...]
    initial_fetch_timeout_s: float = 15.0
    without_warming: bool = False


@dataclass(frozen=True, slots=True)
class DiscoveredFilter(Discovered):
    """A listener filter from ECDS. Without a default, connections are closed until its configuration arrives."""

    default: "ListenerFilter | None" = None


ListenerFilter = (
    OriginalDst
    | OriginalSrc
    | SetDstAddress
    | TlsInspector
    | HttpInspector
    | ProxyProtocol
    | WorkloadMetadata
    | DiscoveredFilter
)


@dataclass(frozen=True, slots=True)
class FilterDisabled:
    """A predicate that disables a listener filter: a port range, or a combination of predicates."""

    kind: str  # "port", "any", "or", "and", "not"
    inner: "tuple[FilterDisabled, ...]" = ()
    start: int = 0
    end: int = 0

    def holds(self, destination_port: int) -> bool:
        """Return whether the filter is disabled for connections to this port."""
        match self.kind:
            case "port":
                return self.start <= destination_port < self.end
            case "or":
                return any(rule.holds(destination_port) for rule in self.inner)
            case "and":
                return all(rule.holds(destination_port) for rule in self.inner)
            case "not":
                return not self.inner[0].holds(destination_port)
            case _:
                return True


@dataclass(frozen=True, slots=True)
class ListenerFilterEntry:
    """An entry in a listener's list of listener filters."""

    name: str
    filter: ListenerFilter
    disabled: FilterDisabled | None = None


# Network filters.


@dataclass(frozen=True, slots=True, kw_only=True)
class Rbac:
    """``envoy.filters.network.rbac``.

    Attributes:
        rules: the enforced rules. ``None`` permits every connection.
        shadow: rules that are evaluated and counted, but not enforced.
        log_only: whether the action is LOG: permit the connection, and set the access log hint.
    """

    stat_prefix: str
    rules: PolicyList | None
    shadow: PolicyList | None = None
    shadow_prefix: str = ""
    log_only: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ConnectionLimit:
    """``envoy.filters.network.connection_limit``: limits the open connections of a chain.

    Attributes:
        delay_s: the time from accepting a connection above the limit to closing it.
    """

    stat_prefix: str
    most: int
    delay_s: float = 0.0
    enabled: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalRateLimit:
    """``envoy.filters.network.local_ratelimit``: limits a chain's rate of new connections by a token bucket, which
    is full at first.
    """

    stat_prefix: str
    most_tokens: int
    tokens_per_fill: int
    fill_interval_s: float
    enabled: bool = True


class SharedWithUpstream(StrEnum):
    """Whether internal connections inherit a filter state object: never, once, or through any number of
    connections.
    """

    NONE = "none"
    ONCE = "once"
    TRANSITIVE = "transitive"


@dataclass(frozen=True, slots=True)
class FilterStateValue:
    """One filter state object that ``set_filter_state`` sets when a connection begins.

    With ``omit_empty_values``, a missing value is an empty text. Otherwise it is ``-``.
    """

    key: str
    value: FormatString
    shared: SharedWithUpstream = SharedWithUpstream.NONE
    skip_if_empty: bool = False
    omit_empty_values: bool = False


@dataclass(frozen=True, slots=True)
class SetFilterState:
    """``envoy.filters.network.set_filter_state``: sets filter state objects when a connection begins."""

    values: tuple[FilterStateValue, ...]


class AppendAction(StrEnum):
    """What to do if a header that should be added already exists."""

    APPEND_IF_EXISTS_OR_ADD = "append"
    ADD_IF_ABSENT = "add_if_absent"
    OVERWRITE_IF_EXISTS_OR_ADD = "overwrite"
    OVERWRITE_IF_EXISTS = "overwrite_if_exists"


@dataclass(frozen=True, slots=True)
class HeaderToAdd:
    """One header to add to a tunnel request. The name is lower case."""

    name: str
    value: FormatString
    action: AppendAction = AppendAction.APPEND_IF_EXISTS_OR_ADD
    keep_empty: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Tunneling:
    """``TcpProxy.tunneling_config``: the filter carries the bytes in a CONNECT request."""

    hostname: FormatString
    headers: tuple[HeaderToAdd, ...] = ()
    propagate_response_headers: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class TcpProxy:
    """``envoy.filters.network.tcp_proxy``. A single cluster is stored as one weighted cluster.

    An ``idle_timeout_s`` of 0 means no timeout.
    """

    stat_prefix: str
    clusters: tuple[WeightedCluster, ...]
    tunneling: Tunneling | None = None
    max_connect_attempts: int = 1
    backoff_base_s: float = 0.0
    backoff_max_s: float = 0.0
    idle_timeout_s: float = 3600.0
    max_duration_s: float = 0.0
    hash_source_ip: bool = False
    metadata_match: Mapping[str, object] = field(default_factory=dict, hash=False)
    access_log: tuple[AnyAccessLog, ...] = ()


#: Network filters that allow, deny or annotate a connection, and leave its bytes to the terminal filter.
ChainFilter = Rbac | ConnectionLimit | LocalRateLimit | SetFilterState


@dataclass(frozen=True, slots=True)
class DiscoveredChainFilter(Discovered):
    """A network filter from ECDS. Without a default, connections are closed until its configuration arrives."""

    default: ChainFilter | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class FilterChain:
    """One filter chain: a transport socket, filters that authorise or annotate connections, and the terminal
    filter, which receives the bytes.

    Attributes:
        discovered: filters from ECDS. They run after the inline filters of their kind.
        content: digest of the message: an unchanged chain keeps its connections through an update.
    """

    name: str
    match: ChainMatch
    tls: TlsContext | None
    rbac: tuple[Rbac, ...]
    filter_state: tuple[SetFilterState, ...]
    terminal: TcpProxy | HttpConnectionManager
    content: str
    limits: tuple[ConnectionLimit | LocalRateLimit, ...] = ()
    discovered: tuple[DiscoveredChainFilter, ...] = ()
    transport_connect_timeout_s: float = 0.0
    metadata: Metadata = field(default=NO_METADATA, hash=False)

    @property
    def secret_refs(self) -> tuple[SecretRef, ...]:
        return self.tls.secret_refs if self.tls is not None else ()


@dataclass(frozen=True, kw_only=True)
class Listener:
    """One listener: a socket, or an internal listener that only ``envoy_internal_address`` endpoints reach.

    Attributes:
        addresses: the addresses to bind. Empty for an internal listener.
        matcher: if present, it chooses the chain instead of the chains' ``match``.
        content: digest of the message without chains and matcher. A change of the digest needs a new listener;
            other changes are made in place.
    """

    name: str
    addresses: tuple[SocketAddress, ...]
    internal: bool
    chains: tuple[FilterChain, ...]
    default_chain: FilterChain | None
    matcher: Matcher | None
    use_original_dst: bool = False
    transparent: bool = False
    freebind: bool = False
    bind_to_port: bool = True
    ipv4_compat: bool = False
    reuse_port: bool = True
    backlog: int = 4096
    socket_options: tuple[SocketOption, ...] = ()
    listener_filters: tuple[ListenerFilterEntry, ...] = ()
    listener_filters_timeout_s: float = 15.0
    continue_on_filter_timeout: bool = False
    access_log: tuple[AnyAccessLog, ...] = ()
    direction: str = "unspecified"
    stat_prefix: str = ""
    content: str = ""
    metadata: Metadata = field(default=NO_METADATA, hash=False)

    @cached_property
    def _selector(self) -> ChainSelector:
        return ChainSelector([chain.match for chain in self.chains])

    @cached_property
    def _by_name(self) -> dict[str, FilterChain]:
        return {chain.name: chain for chain in self.chains}

    @cached_property
    def chosen_by_addresses(self) -> bool:
        """Whether the choice of a chain never depends on the client's port."""
        if self.matcher is not None:
            return InputKind.SOURCE_PORT not in input_kinds(self.matcher)
        return not any(chain.match.source_ports for chain in self.chains)

    def chain_for(self, facts: ConnectionFacts) -> FilterChain | None:
        """Return the filter chain for a connection, or ``None`` if the connection must be closed.

        If a matcher's action names no existing chain, the connection is closed, without a fallback to the default
        chain, like in Envoy.
        """
        if self.matcher is not None:
            name = self.matcher.evaluate(facts)
            return self._by_name.get(name) if name is not None else self.default_chain
        index = self._selector.select(facts)
        return self.chains[index] if index is not None else self.default_chain

    def serves(self, host: str) -> bool:
        """Return whether a chain names this exact address as its destination (an inbound chain of a pod)."""
        return self._selector.names(host)

    @property
    def all_chains(self) -> tuple[FilterChain, ...]:
        """All chains, the default chain last."""
        return self.chains if self.default_chain is None else (*self.chains, self.default_chain)
