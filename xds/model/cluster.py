"""Clusters, endpoints, and the settings that decide which endpoint is chosen next."""

from dataclasses import dataclass, field
from enum import StrEnum

from xds.model.address import EndpointAddress
from xds.model.dns import DnsResolver
from xds.model.health_check import EndpointCheck, HealthCheck
from xds.model.http import Http2Settings
from xds.model.metadata import Metadata, Struct, has_values
from xds.model.tls import ConfigSource, SecretRef, TlsContext


class Discovery(StrEnum):
    """The discovery type of a cluster: the source of its hosts."""

    STATIC = "STATIC"
    STRICT_DNS = "STRICT_DNS"
    LOGICAL_DNS = "LOGICAL_DNS"
    EDS = "EDS"
    ORIGINAL_DST = "ORIGINAL_DST"


class LbPolicy(StrEnum):
    """The load balancing policy: how a host is chosen."""

    ROUND_ROBIN = "ROUND_ROBIN"
    LEAST_REQUEST = "LEAST_REQUEST"
    RANDOM = "RANDOM"
    RING_HASH = "RING_HASH"
    MAGLEV = "MAGLEV"
    CLUSTER_PROVIDED = "CLUSTER_PROVIDED"


class Health(StrEnum):
    """The health of an endpoint as reported by EDS (``envoy.config.core.v3.HealthStatus``)."""

    UNKNOWN = "UNKNOWN"
    HEALTHY = "HEALTHY"
    UNHEALTHY = "UNHEALTHY"
    DRAINING = "DRAINING"
    TIMEOUT = "TIMEOUT"
    DEGRADED = "DEGRADED"


@dataclass(frozen=True, slots=True)
class Locality:
    """The locality of an endpoint: region, zone and sub-zone."""

    region: str = ""
    zone: str = ""
    sub_zone: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Endpoint:
    """One endpoint as configured. ``key`` identifies the endpoint within its cluster."""

    address: EndpointAddress
    hostname: str = ""
    health: Health = Health.UNKNOWN
    weight: int = 1
    priority: int = 0
    locality: Locality = Locality()
    metadata: Metadata = field(default_factory=dict, hash=False)
    check: EndpointCheck | None = None
    """How this endpoint's health check differs from the cluster's."""

    @property
    def key(self) -> str:
        """The address as text. EDS updates are compared by this key."""
        return str(self.address)


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalityGroup:
    """Endpoints of one locality at one priority. ``weight`` 0 means unset."""

    locality: Locality
    priority: int
    weight: int
    endpoints: tuple[Endpoint, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadAssignment:
    """All endpoints of a cluster, and the overprovisioning factor that decides when a priority level passes load
    to the next.

    ``drop`` has the categories of ``policy.drop_overloads`` with their shares, 0 to 1. With
    ``weighted_priority_health``, hosts count by weight in the usable share of a priority level.
    """

    cluster_name: str
    groups: tuple[LocalityGroup, ...]
    overprovisioning_factor: int = 140
    drop: tuple[tuple[str, float], ...] = ()
    weighted_priority_health: bool = False

    @property
    def endpoints(self) -> tuple[Endpoint, ...]:
        """All endpoints of the assignment, in order."""
        return tuple(endpoint for group in self.groups for endpoint in group.endpoints)


# Transport sockets: how the bytes to a cluster's hosts are protected and wrapped


@dataclass(frozen=True, slots=True)
class RawBuffer:
    """The transport socket for plain TCP."""


@dataclass(frozen=True, slots=True)
class InternalUpstream:
    """``envoy.transport_sockets.internal_upstream``: hands metadata to an internal listener.

    ``host`` and ``cluster`` are the metadata namespaces copied from the chosen host and from the cluster.
    """

    host: tuple[str, ...]
    cluster: tuple[str, ...]
    inner: "RawBuffer | TlsContext | ProxyHeader"


@dataclass(frozen=True, slots=True)
class ProxyHeader:
    """``envoy.transport_sockets.upstream_proxy_protocol``: a PROXY header precedes all other bytes.

    Attributes:
        version: 1 or 2.
        inner: the socket for the bytes after the header.
    """

    version: int
    inner: RawBuffer | TlsContext


TransportSocket = RawBuffer | InternalUpstream | TlsContext | ProxyHeader


def security_of(transport: TransportSocket) -> RawBuffer | TlsContext:
    """Return the innermost transport socket, which protects the bytes, without the sockets that wrap it."""
    if isinstance(transport, InternalUpstream):
        transport = transport.inner
    return transport.inner if isinstance(transport, ProxyHeader) else transport


def proxy_version_of(transport: TransportSocket) -> int | None:
    """Return the version of the PROXY header that a transport socket sends first, or ``None`` if it sends no
    header.
    """
    if isinstance(transport, InternalUpstream):
        transport = transport.inner
    return transport.version if isinstance(transport, ProxyHeader) else None


@dataclass(frozen=True, slots=True)
class TransportSocketMatch:
    """Selects ``socket`` for hosts whose ``envoy.transport_socket_match`` metadata contains all of
    ``criteria``.
    """

    name: str
    criteria: Struct = field(hash=False)
    socket: TransportSocket = RawBuffer()


@dataclass(frozen=True, slots=True, kw_only=True)
class CircuitBreakers:
    """The circuit breaker limits of one priority, with Envoy's defaults. ``max_retries`` applies to HTTP requests
    only, so it has no effect here.

    Attributes:
        track_remaining: whether statistics show how much of each limit remains.
    """

    max_connections: int = 1024
    max_pending_requests: int = 1024
    max_requests: int = 1024
    max_retries: int = 3
    track_remaining: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class OutlierDetection:
    """The settings of outlier detection: when a host is ejected for some seconds. Percentages are 0 to 100, and
    the defaults are Envoy's.
    """

    consecutive_5xx: int = 5
    enforcing_consecutive_5xx: int = 100
    consecutive_gateway_failure: int = 5
    enforcing_consecutive_gateway_failure: int = 0
    consecutive_local_origin_failure: int = 5
    enforcing_consecutive_local_origin_failure: int = 100
    split_external_local_origin_errors: bool = False
    interval_s: float = 10.0
    base_ejection_time_s: float = 30.0
    max_ejection_time_s: float = 300.0
    max_ejection_jitter_s: float = 0.0
    max_ejection_percent: int = 10
    always_eject_one_host: bool = False
    uneject_on_check: bool = True
    enforcing_success_rate: int = 100
    enforcing_local_origin_success_rate: int = 100
    success_rate_minimum_hosts: int = 5
    success_rate_request_volume: int = 100
    success_rate_stdev_factor: int = 1900
    failure_percentage_threshold: int = 85
    enforcing_failure_percentage: int = 0
    enforcing_failure_percentage_local_origin: int = 0
    failure_percentage_minimum_hosts: int = 5
    failure_percentage_request_volume: int = 50


@dataclass(frozen=True, slots=True, kw_only=True)
class OriginalDst:
    """The settings of an ORIGINAL_DST cluster (``OriginalDstLbConfig``). ``metadata_key`` is (namespace, path)."""

    use_http_header: bool = False
    http_header_name: str = "x-envoy-original-dst-host"
    port_override: int = 0
    metadata_key: tuple[str, tuple[str, ...]] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class SlowStart:
    """The settings of slow start: the weight of a new host grows over ``window_s`` seconds. 0 disables it."""

    window_s: float = 0.0
    aggression: float = 1.0
    min_weight_percent: float = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Balancing:
    """The settings of load balancing: the policy's parameters, and how a priority and a locality are chosen.

    Attributes:
        fail_in_panic: whether a priority level in panic gets no connections, instead of ignoring health. Like in
            Envoy, this does not apply to RING_HASH and MAGLEV.
    """

    policy: LbPolicy = LbPolicy.ROUND_ROBIN
    choice_count: int = 2
    active_request_bias: float = 1.0
    slow_start: SlowStart = SlowStart()
    ring_size_min: int = 1024
    ring_size_max: int = 8_388_608
    maglev_table_size: int = 65_537
    panic_threshold: float = 50.0
    locality_weighted: bool = False
    fail_in_panic: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Subsets:
    """``lb_subset_config``: the metadata keys that form subsets, and the fallback if no subset matches.

    ``fallback`` is ``NO_FALLBACK``, ``ANY_ENDPOINT`` or ``DEFAULT_SUBSET`` (then ``default``).
    """

    selectors: tuple[frozenset[str], ...]
    fallback: str = "NO_FALLBACK"
    default: Struct = field(default_factory=dict, hash=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class Keepalive:
    """TCP keepalive settings for connections to hosts. ``None`` keeps the kernel's value."""

    probes: int | None = None
    time_s: int | None = None
    interval_s: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """One cluster.

    Attributes:
        http2: present if requests to the cluster use HTTP/2 (``explicit_http_config.http2_protocol_options``).
        eds_source: the source of endpoints, requested by :attr:`eds_name`.
        assignment: inline endpoints (STATIC and DNS clusters).
        breakers: limits of priority DEFAULT and HIGH.
        dns_failure_backoff: base and maximum, in seconds, of the jittered wait after a failed resolution. None
            uses ``dns_refresh_s``.
        dns_resolver: resolves names. ``None`` means the bootstrap's resolver.
        dns_jitter_s: each resolution is delayed by a random time below this.
        max_requests_per_connection: the number of tunnels after which a connection takes no more. 0 means no
            limit.
        connection_idle_timeout_s: closes a connection that has had no tunnels for this time. 0 means never.
        ignore_health_on_removal: remove endpoints as soon as discovery drops them. Otherwise endpoints with a
            health check stay until they fail it.
        content: digest of the message. An unchanged cluster is not compiled again.
    """

    name: str
    discovery: Discovery
    connect_timeout_s: float = 5.0
    balancing: Balancing = Balancing()
    subsets: Subsets | None = None
    transport_socket: TransportSocket = RawBuffer()
    socket_matches: tuple[TransportSocketMatch, ...] = ()
    http2: Http2Settings | None = None
    assignment: LoadAssignment | None = None
    eds_source: ConfigSource | None = None
    eds_name: str = ""
    eds_initial_fetch_timeout_s: float = 15.0
    original_dst: OriginalDst | None = None
    breakers: tuple[CircuitBreakers, CircuitBreakers] = (CircuitBreakers(), CircuitBreakers())
    outlier: OutlierDetection | None = None
    health_check: HealthCheck | None = None
    ignore_health_on_removal: bool = False
    cleanup_interval_s: float = 5.0
    dns_refresh_s: float = 5.0
    dns_failure_backoff: tuple[float, float] | None = None
    respect_dns_ttl: bool = False
    dns_family: str = "AUTO"
    dns_resolver: DnsResolver | None = None
    dns_jitter_s: float = 0.0
    max_requests_per_connection: int = 0
    connection_idle_timeout_s: float = 3600.0
    keepalive: Keepalive | None = None
    bind_source: str = ""
    alt_stat_name: str = ""
    metadata: Metadata = field(default_factory=dict, hash=False)
    content: str = ""

    @property
    def sockets(self) -> tuple[TransportSocket, ...]:
        """All transport sockets that hosts of this cluster can use."""
        return (*(match.socket for match in self.socket_matches), self.transport_socket)

    @property
    def secret_refs(self) -> tuple[SecretRef, ...]:
        refs: list[SecretRef] = []
        for socket in self.sockets:
            security = security_of(socket)
            if isinstance(security, TlsContext):
                refs.extend(security.secret_refs)
        return tuple(dict.fromkeys(refs))

    def transport_socket_for(self, metadata: Metadata) -> tuple[str, TransportSocket]:
        """Return the name and the transport socket of the first transport socket match for a host. An empty name
        stands for the cluster's own transport socket.
        """
        host = metadata.get("envoy.transport_socket_match", {})
        for candidate in self.socket_matches:
            if has_values(host, candidate.criteria):
                return candidate.name, candidate.socket
        return "", self.transport_socket
