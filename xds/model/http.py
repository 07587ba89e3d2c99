"""The HTTP connection manager, as far as it terminates CONNECT tunnels."""

from dataclasses import dataclass, field

from xds.model.access_log import AnyAccessLog
from xds.model.metadata import NO_METADATA, Metadata
from xds.model.string_match import StringMatch
from xds.model.tls import ConfigSource
from xds.model.weighted_cluster import WeightedCluster


@dataclass(frozen=True, slots=True)
class HeaderMatch:
    """A condition on a request header. If ``match`` is ``None``, the header must only be present."""

    name: str
    match: StringMatch | None
    invert: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Route:
    """One route. ``connect`` routes match CONNECT and only CONNECT; path routes never match it.

    Attributes:
        path: ``None`` for a ``connect_matcher``.
        clusters: empty with ``direct_status``.
        tunnel: whether CONNECT is enabled with a ``connect_config``, so that the payload goes to the cluster as
            raw TCP.
        timeout_s: route timeout, measured from the client's half-close. 0 disables it; ``None`` is unset (Envoy:
            15 s).
        idle_timeout_s: replaces the connection manager's stream idle timeout, unless it is ``None``.
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
    """Routes for some authorities. Domains are lower case, in the form exact, ``*.suffix``, ``prefix.*`` or
    ``*``.
    """

    name: str
    domains: tuple[str, ...]
    routes: tuple[Route, ...]
    metadata: Metadata = field(default=NO_METADATA, hash=False)


@dataclass(frozen=True, slots=True)
class RouteTable:
    """A route table (``envoy.config.route.v3.RouteConfiguration``)."""

    name: str
    virtual_hosts: tuple[VirtualHost, ...]

    @property
    def chosen_by_heads(self) -> bool:
        """Whether equal requests always get the same route. This is false if routes match headers, because the
        proxy can write different header values for each request.
        """
        return not any(route.headers for host in self.virtual_hosts for route in host.routes)


@dataclass(frozen=True, slots=True)
class RouteTableRef:
    """A reference to a route table that RDS delivers."""

    name: str
    source: ConfigSource
    initial_fetch_timeout_s: float = 15.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Http2Settings:
    """HTTP/2 settings (``Http2ProtocolOptions``). ``None`` keeps this proxy's default."""

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
        allows_connect: whether ``upgrade_configs`` has CONNECT and the HTTP/2 options have ``allow_connect``.
        stream_idle_timeout_s: 0 disables it; ``None`` is unset (Envoy: 300 s).
        max_request_headers_kb: the limit of one request's headers; ``None`` is unset (Envoy: 60, this proxy: 64).
        generates_request_id: whether a request without ``x-request-id`` gets one.
        preserves_request_id: whether to keep the client's request id even with ``uses_remote_address``.
        uses_remote_address: whether the manager is at the edge of a mesh, and trusts no header about a request's
            origin.
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
