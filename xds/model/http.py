"""The HTTP connection manager, as far as it terminates CONNECT tunnels."""

from dataclasses import dataclass, field

from xds.model.access_log import AnyAccessLog
from xds.model.metadata import NO_METADATA, Metadata
from xds.model.string_match import StringMatch
from xds.model.tls import ConfigSource
from xds.model.weighted_cluster import WeightedCluster


@dataclass(frozen=True, slots=True)
class HeaderMatch:
    """A header predicate; ``match`` ``None`` means present."""

    name: str
    match: StringMatch | None
    invert: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Route:
    """One route. ``connect`` routes match CONNECT and only CONNECT; path routes never match it.

    Attributes:
        path: ``None`` for a ``connect_matcher``.
        clusters: empty with ``direct_status``.
        tunnel: ``connect_config`` is present and CONNECT enabled: the payload goes to the cluster as raw TCP.
        timeout_s: route timeout, measured from the client's half-close. 0 disables it; ``None`` is unset (Envoy:
            15 s).
        idle_timeout_s: replaces the connection manager's stream idle timeout; ``None`` keeps that.
    """

    name: str
    path: StringMatch | None
    headers: tuple[HeaderMatch, ...] = ()
    clusters: tuple[WeightedCluster, ...] = ()
    tunnel: bool = False
    timeout_s: float | None = None
    idle_timeout_s: float | None = None
    cluster_not_found_status: int = 503
    direct_status: int = 0
    direct_body: bytes = b""
    metadata: Metadata = field(default=NO_METADATA, hash=False)


@dataclass(frozen=True, slots=True)
class VirtualHost:
    """Routes for some authorities: exact, ``*.suffix``, ``prefix.*`` or ``*``; lower case."""

    name: str
    domains: tuple[str, ...]
    routes: tuple[Route, ...]
    metadata: Metadata = field(default=NO_METADATA, hash=False)


@dataclass(frozen=True, slots=True)
class RouteTable:
    """``envoy.config.route.v3.RouteConfiguration``."""

    name: str
    virtual_hosts: tuple[VirtualHost, ...]

    @property
    def chosen_by_heads(self) -> bool:
        """Whether equal requests have equal routes. This is false if routes match headers, because the proxy can
        write other header values for each request.
        """
        return not any(route.headers for host in self.virtual_hosts for route in host.routes)


@dataclass(frozen=True, slots=True)
class RouteTableRef:
    """A route table that comes by RDS."""

    name: str
    source: ConfigSource
    initial_fetch_timeout_s: float = 15.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Http2Settings:
    """``Http2ProtocolOptions``; ``None`` keeps this proxy's own default."""

    allow_connect: bool = False
    max_concurrent_streams: int | None = None
    initial_stream_window: int | None = None
    initial_connection_window: int | None = None
    keepalive_interval_s: float | None = None
    keepalive_timeout_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class HttpConnectionManager:
    """``envoy.filters.network.http_connection_manager`` in front of CONNECT routes.

    Attributes:
        allows_connect: ``upgrade_configs`` has CONNECT and HTTP/2 has ``allow_connect``.
        stream_idle_timeout_s: 0 disables it; ``None`` is unset (Envoy: 300 s).
        max_request_headers_kb: the limit of one request's headers; ``None`` is unset (Envoy: 60, this proxy: 64).
        generates_request_id: a request without ``x-request-id`` is given one.
        preserves_request_id: keep the client's request id also if ``uses_remote_address``.
        uses_remote_address: the manager is at the edge of a mesh, and trusts no header about a request's origin.
    """

    stat_prefix: str
    routes: RouteTable | RouteTableRef
    http2: Http2Settings
    allows_connect: bool
    server_name: str = "envoy"
    stream_idle_timeout_s: float | None = None
    idle_timeout_s: float = 3600.0
    max_request_headers_kb: int | None = None
    generates_request_id: bool = True
    preserves_request_id: bool = False
    uses_remote_address: bool = False
    access_log: tuple[AnyAccessLog, ...] = ()
