"""Compiles CDS clusters."""

from sys import intern
from typing import Any

from google.protobuf.message import Message

from xds.dialects.envoy.balancing import compile_balancing
from xds.dialects.envoy.dns import compile_cluster_resolver
from xds.dialects.envoy.endpoint import compile_assignment
from xds.dialects.envoy.filters import compile_http2
from xds.dialects.envoy.health_check import compile_health_check
from xds.dialects.envoy.reading import (
    Renamed,
    Surroundings,
    at,
    config_source,
    constraint,
    digest,
    digest_of,
    enum_name,
    fetch_timeout,
    metadata,
    nothing_unknown,
    only,
    required,
    seconds,
    socket_address,
    struct,
    unpack,
    unpack_as,
    with_values,
    wrapped,
)
from xds.dialects.envoy.tls import compile_upstream
from xds.errors import ConfigError, Unsupported
from xds.model import cluster as model
from xds.model.http import Http2Settings
from xds.model.tls import TlsContext
from xds.proto.envoy.config.cluster.v3 import cluster_pb2 as proto
from xds.proto.envoy.config.core.v3 import core_pb2 as core
from xds.proto.envoy.extensions.transport_sockets.internal_upstream.v3.internal_upstream_pb2 import (
    InternalUpstreamTransport,
)
from xds.proto.envoy.extensions.transport_sockets.proxy_protocol.v3.upstream_proxy_protocol_pb2 import (
    ProxyProtocolUpstreamTransport,
)
from xds.proto.envoy.extensions.transport_sockets.raw_buffer.v3.raw_buffer_pb2 import RawBuffer
from xds.proto.envoy.extensions.transport_sockets.tls.v3.tls_pb2 import UpstreamTlsContext
from xds.proto.envoy.extensions.upstreams.http.v3.http_pb2 import HttpProtocolOptions
from xds.proto.well_known import Any as AnyMessage

_HTTP_OPTIONS = "envoy.extensions.upstreams.http.v3.HttpProtocolOptions"
_DNS = (model.Discovery.STRICT_DNS, model.Discovery.LOGICAL_DNS)


_named: Renamed[model.Cluster] = Renamed()


def compile_cluster(
    message: proto.Cluster, surroundings: Surroundings, packed: AnyMessage | None = None
) -> model.Cluster:
    """Compile one cluster. Clusters that differ only in their names are compiled once and share their values.

    Args:
        message: the cluster.
        surroundings: the files and environment variables that the message can refer to.
        packed: the packed form that the message was parsed from.

    Raises:
        ConfigError: with the path of the first field that is not supported or not valid.
    """
    nothing_unknown(message, packed)
    wire = message.SerializeToString(deterministic=True)
    found = renamed_cluster(wire, message.name)
    if found is None:
        found = _compile(message, surroundings)
        if _follows_from_shape(found):
            same = message.eds_cluster_config.service_name == found.name
            _named.keep_named(_named.key(wire, found.name), found.name, 1 + same, found)
    return found


def renamed_cluster(packed: bytes, name: str) -> model.Cluster | None:
    """Return the compiled cluster for ``packed``, if a cluster with another name but equal fields was compiled
    before.

    Return None for bytes with unknown fields, or bytes that are not a deterministic encoding.
    """
    key = _named.key(packed, name)
    found = None if key is None else _named.get(key)
    if found is None:
        return None
    name = intern(name)
    return with_values(found, name=name, eds_name=name, content=digest_of(packed))


def _follows_from_shape(compiled: model.Cluster) -> bool:
    """Return whether a cluster message that differs only in its name compiles to the same values.

    False with a TLS context, because it can read files whose contents change.
    """
    secured = any(isinstance(model.security_of(socket), TlsContext) for socket in compiled.sockets)
    eds = compiled.discovery is model.Discovery.EDS and compiled.eds_name == compiled.name
    return eds and compiled.health_check is None and not secured


def _compile(message: proto.Cluster, surroundings: Surroundings) -> model.Cluster:
    only(
        message,
        "name",
        "type",
        "eds_cluster_config",
        "connect_timeout",
        "per_connection_buffer_limit_bytes",  # a soft limit of Envoy's buffers; ours hold less than its default
        "lb_policy",
        "load_balancing_policy",
        "max_requests_per_connection",
        "circuit_breakers",
        "http_protocol_options",  # settings of HTTP/1.1, which carries no tunnels
        "http2_protocol_options",
        "dns_refresh_rate",
        "dns_failure_refresh_rate",
        "dns_lookup_family",
        "dns_resolvers",
        "use_tcp_for_dns_lookups",
        "dns_resolution_config",
        "typed_dns_resolver_config",
        "dns_jitter",
        "outlier_detection",
        "cleanup_interval",
        "upstream_bind_config",
        "lb_subset_config",
        "transport_socket",
        "metadata",
        "common_lb_config",
        "alt_stat_name",
        "common_http_protocol_options",
        "upstream_connection_options",
        "ignore_health_on_host_removal",
        "health_checks",
        "load_assignment",
        "original_dst_lb_config",
        "least_request_lb_config",
        "round_robin_lb_config",
        "typed_extension_protocol_options",
        "respect_dns_ttl",
        "transport_socket_matches",
    )
    required(message, "name")
    if message.WhichOneof("cluster_discovery_type") == "cluster_type":
        raise Unsupported("custom cluster types are not supported", "cluster_type")
    discovery = model.Discovery(enum_name(message, "type"))
    with at("common_lb_config"):
        only(
            message.common_lb_config,
            "healthy_panic_threshold",
            "zone_aware_lb_config",  # like in Envoy without a local cluster, of this only fail_traffic_on_panic
            "locality_weighted_lb_config",
            "update_merge_window",  # changes are applied at once; their cost is proportional to the change
        )
    eds = message.eds_cluster_config
    eds_source = None
    if discovery is model.Discovery.EDS:
        with at("eds_cluster_config", "eds_config"):
            eds_source = config_source(eds.eds_config)
    elif message.HasField("eds_cluster_config"):
        raise ConfigError("eds_cluster_config set in a non-EDS cluster", "eds_cluster_config")
    http2, idle_s, requests = _http(message)
    health_check = compile_health_check(message)
    if health_check is not None:
        _check_can_be_checked(message, discovery)
    return model.Cluster(
        name=message.name,
        discovery=discovery,
        connect_timeout_s=_positive(message, "connect_timeout", 5.0),
        balancing=compile_balancing(message, discovery),
        subsets=_subsets(message, discovery),
        transport_socket=_own_socket(message, surroundings),
        socket_matches=_socket_matches(message, surroundings),
        http2=http2,
        assignment=_assignment(message, discovery),
        eds_source=eds_source,
        eds_name=eds.service_name or message.name,
        eds_initial_fetch_timeout_s=fetch_timeout(eds.eds_config),
        original_dst=_original_dst(message, discovery),
        breakers=_breakers(message),
        outlier=_outlier(message.outlier_detection) if message.HasField("outlier_detection") else None,
        health_check=health_check,
        ignore_health_on_removal=message.ignore_health_on_host_removal,
        cleanup_interval_s=_positive(message, "cleanup_interval", 5.0),
        dns_refresh_s=_dns_refresh_s(message),
        dns_failure_backoff=_dns_failure_backoff(message),
        respect_dns_ttl=message.respect_dns_ttl,
        dns_family=enum_name(message, "dns_lookup_family"),
        dns_resolver=compile_cluster_resolver(message),
        dns_jitter_s=seconds(message, "dns_jitter", 0.0),
        max_requests_per_connection=requests,
        connection_idle_timeout_s=idle_s,
        keepalive=_keepalive(message),
        bind_source=_bind_source(message),
        alt_stat_name=message.alt_stat_name,
        metadata=metadata(message.metadata),
        content=digest(message),
    )


def _check_can_be_checked(message: proto.Cluster, discovery: model.Discovery) -> None:
    """Raise if the hosts of a cluster cannot be health-checked.

    Raises:
        Unsupported: the hosts exist only during connections (ORIGINAL_DST), or are internal listeners.
    """
    with at("health_checks"):
        if discovery is model.Discovery.ORIGINAL_DST:
            raise Unsupported("an ORIGINAL_DST cluster has no endpoints to check")
        sockets = [
            message.transport_socket,
            *(match.transport_socket for match in message.transport_socket_matches),
        ]
        if any(socket.typed_config.Is(InternalUpstreamTransport.DESCRIPTOR) for socket in sockets):
            raise Unsupported("endpoints that are internal listeners cannot be checked")
        by_grpc = any(check.HasField("grpc_health_check") for check in message.health_checks)
        if by_grpc and any(
            socket.typed_config.Is(ProxyProtocolUpstreamTransport.DESCRIPTOR) for socket in sockets
        ):
            raise Unsupported("a check by gRPC sends no PROXY header")
        endpoints = (each for group in message.load_assignment.endpoints for each in group.lb_endpoints)
        if any(each.endpoint.address.HasField("envoy_internal_address") for each in endpoints):
            raise Unsupported("endpoints that are internal listeners cannot be checked")


def _positive(message: Message, field: str, default: float) -> float:
    value = seconds(message, field, default)
    if value <= 0:
        raise constraint(message, field, "value must be greater than 0s")
    return value


def _dns_refresh_s(message: proto.Cluster) -> float:
    refresh_s = seconds(message, "dns_refresh_rate", 5.0)
    if refresh_s <= 0.001:
        raise constraint(message, "dns_refresh_rate", "value must be greater than 1ms")
    return refresh_s


def _dns_failure_backoff(message: proto.Cluster) -> tuple[float, float] | None:
    if not message.HasField("dns_failure_refresh_rate"):
        return None
    with at("dns_failure_refresh_rate"):
        rate = message.dns_failure_refresh_rate
        base = seconds(rate, "base_interval", 0.0)
        if base < 0.001:
            raise constraint(rate, "base_interval", "value must be greater than or equal to 1ms")
        longest = seconds(rate, "max_interval", 10 * base)
        if longest < base:
            raise ConfigError("must have max_interval greater than or equal to the base_interval")
    return base, longest


def _subsets(message: proto.Cluster, discovery: model.Discovery) -> model.Subsets | None:
    if not message.HasField("lb_subset_config"):
        return None
    if discovery is model.Discovery.ORIGINAL_DST and message.lb_subset_config.subset_selectors:
        raise ConfigError(
            "cluster: LB policy CLUSTER_PROVIDED cannot be combined with lb_subset_config", "lb_subset_config"
        )
    with at("lb_subset_config"):
        config = message.lb_subset_config
        return model.Subsets(
            selectors=tuple(frozenset(selector.keys) for selector in config.subset_selectors),
            fallback=enum_name(config, "fallback_policy"),
            default=struct(config.default_subset),
        )


def _assignment(message: proto.Cluster, discovery: model.Discovery) -> model.LoadAssignment | None:
    if not message.HasField("load_assignment"):
        if discovery in _DNS:
            raise ConfigError(f"a {discovery} cluster needs a load_assignment", "load_assignment")
        if discovery is model.Discovery.STATIC:
            return model.LoadAssignment(cluster_name=message.name, groups=())
        return None
    if discovery in (model.Discovery.EDS, model.Discovery.ORIGINAL_DST):
        raise ConfigError(f"cluster: load assignment is not valid for Cluster type {discovery}", "load_assignment")
    with at("load_assignment"):
        assignment = compile_assignment(message.load_assignment, names=discovery in _DNS)
    if discovery is model.Discovery.LOGICAL_DNS and (len(assignment.groups), len(assignment.endpoints)) != (1, 1):
        raise ConfigError(
            "LOGICAL_DNS clusters must have a single locality_lb_endpoint and a single lb_endpoint",
            "load_assignment",
        )
    return assignment


def _original_dst(message: proto.Cluster, discovery: model.Discovery) -> model.OriginalDst | None:
    if discovery is not model.Discovery.ORIGINAL_DST:
        return None
    config = message.original_dst_lb_config
    with at("original_dst_lb_config"):
        port = wrapped(config, "upstream_port_override", 0)
        if port > 65535:
            raise constraint(config, "upstream_port_override", "value must be less than or equal to 65535")
        if config.http_header_name and not config.use_http_header:
            raise ConfigError(
                f"ORIGINAL_DST cluster: invalid config http_header_name={config.http_header_name} and "
                "use_http_header is false. Set use_http_header to true if http_header_name is desired."
            )
        key = None
        if config.HasField("metadata_key"):
            with at("metadata_key"):
                required(config.metadata_key, "key")
                if not config.metadata_key.path:
                    raise constraint(config.metadata_key, "path", "value must contain at least 1 item(s)")
            key = (config.metadata_key.key, tuple(segment.key for segment in config.metadata_key.path))
    return model.OriginalDst(
        use_http_header=config.use_http_header,
        http_header_name=config.http_header_name.lower() or "x-envoy-original-dst-host",
        port_override=port,
        metadata_key=key,
    )


def _own_socket(message: proto.Cluster, surroundings: Surroundings) -> model.TransportSocket:
    if not message.HasField("transport_socket"):
        return model.RawBuffer()
    with at("transport_socket"):
        return _socket(message.transport_socket, surroundings)


def _socket_matches(message: proto.Cluster, surroundings: Surroundings) -> tuple[model.TransportSocketMatch, ...]:
    matches = []
    for index, match in enumerate(message.transport_socket_matches):
        with at("transport_socket_matches", index):
            required(match, "name")
            with at("transport_socket"):
                socket = _socket(match.transport_socket, surroundings)
            matches.append(model.TransportSocketMatch(match.name, struct(match.match), socket))
    return tuple(matches)


def _socket(message: core.TransportSocket, surroundings: Surroundings) -> model.TransportSocket:
    if not message.HasField("typed_config") and message.name == "envoy.transport_sockets.raw_buffer":
        return model.RawBuffer()
    with at("typed_config"):
        config = unpack(message.typed_config, message.name)
        match config:
            case RawBuffer():
                return model.RawBuffer()
            case UpstreamTlsContext():
                return compile_upstream(config, surroundings)
            case InternalUpstreamTransport():
                return _internal(config, surroundings)
            case ProxyProtocolUpstreamTransport():
                return _proxy_header(config, surroundings)
            case _:
                raise Unsupported(f"no such transport socket: {config.DESCRIPTOR.full_name}")


def _internal(message: InternalUpstreamTransport, surroundings: Surroundings) -> model.InternalUpstream:
    namespaces: dict[str, list[str]] = {"host": [], "cluster": []}
    for index, source in enumerate(message.passthrough_metadata):
        kind = source.kind.WhichOneof("kind")
        if kind not in namespaces:
            raise Unsupported(
                f"metadata of kind '{kind}' cannot be passed on", f"passthrough_metadata[{index}].kind"
            )
        namespaces[kind].append(source.name)
    with at("transport_socket"):
        inner = _socket(message.transport_socket, surroundings)
    if isinstance(inner, model.InternalUpstream):
        raise ConfigError("internal_upstream inside internal_upstream", "transport_socket")
    return model.InternalUpstream(tuple(namespaces["host"]), tuple(namespaces["cluster"]), inner)


def _proxy_header(
    message: ProxyProtocolUpstreamTransport, surroundings: Surroundings
) -> model.ProxyHeader | model.InternalUpstream:
    """Compile a PROXY header that precedes another transport socket's bytes.

    The header can be configured around ``internal_upstream`` or inside it. The bytes are the same, so the compiled
    header is always inside.
    """
    required(message, "transport_socket")
    with at("config"):
        version = {"V1": 1, "V2": 2}[enum_name(message.config, "version")]
    with at("transport_socket"):
        inner = _socket(message.transport_socket, surroundings)
        if model.proxy_version_of(inner) is not None:
            raise Unsupported("a second PROXY header is not sent")
    if isinstance(inner, model.InternalUpstream):
        header = model.ProxyHeader(version, model.security_of(inner))
        return model.InternalUpstream(inner.host, inner.cluster, header)
    assert not isinstance(inner, model.ProxyHeader)
    return model.ProxyHeader(version, inner)


def _http(message: proto.Cluster) -> tuple[Http2Settings | None, float, int]:
    """Return the HTTP/2 settings (if requests are sent by HTTP/2), the idle timeout of connections, and their
    maximum number of requests.
    """
    http2 = None
    requests = wrapped(message, "max_requests_per_connection", 0)
    if message.HasField("http2_protocol_options"):
        with at("http2_protocol_options"):
            http2 = compile_http2(message.http2_protocol_options)
    with at("common_http_protocol_options"):
        idle_s, requests = _connection_limits(message.common_http_protocol_options, 3600.0, requests)
    for key, packed in message.typed_extension_protocol_options.items():
        with at(f"typed_extension_protocol_options[{key!r}]"):
            if key != _HTTP_OPTIONS:
                raise Unsupported(
                    f"Didn't find a registered network or http filter or protocol options "
                    f"implementation for name: '{key}'"
                )
            options = unpack_as(packed, HttpProtocolOptions, key)
            only(
                options,
                "common_http_protocol_options",
                "explicit_http_config",
                "use_downstream_protocol_config",
                "auto_config",
            )
            with at("common_http_protocol_options"):
                idle_s, requests = _connection_limits(options.common_http_protocol_options, idle_s, requests)
            # use_downstream_protocol_config has no effect, because it concerns only HTTP traffic, which this proxy
            # does not carry. Its content is still checked.
            with at("use_downstream_protocol_config", "http2_protocol_options"):
                compile_http2(options.use_downstream_protocol_config.http2_protocol_options)
            if options.explicit_http_config.HasField("http2_protocol_options"):
                with at("explicit_http_config", "http2_protocol_options"):
                    http2 = compile_http2(options.explicit_http_config.http2_protocol_options)
            elif options.auto_config.HasField("http2_protocol_options"):
                with at("auto_config", "http2_protocol_options"):
                    http2 = compile_http2(options.auto_config.http2_protocol_options)
    return http2, idle_s, requests


def _connection_limits(message: core.HttpProtocolOptions, idle_s: float, requests: int) -> tuple[float, int]:
    only(message, "idle_timeout", "max_requests_per_connection")
    return seconds(message, "idle_timeout", idle_s), wrapped(message, "max_requests_per_connection", requests)


def _breakers(message: proto.Cluster) -> tuple[model.CircuitBreakers, model.CircuitBreakers]:
    if message.circuit_breakers.per_host_thresholds:
        raise Unsupported("per_host_thresholds are not supported", "circuit_breakers.per_host_thresholds")
    limits: dict[int, model.CircuitBreakers] = {}
    for index, threshold in enumerate(message.circuit_breakers.thresholds):
        with at("circuit_breakers", "thresholds", index):
            only(
                threshold,
                "priority",
                "max_connections",
                "max_pending_requests",
                "max_requests",
                "max_retries",
                "track_remaining",
            )
            enum_name(threshold, "priority")
            limits.setdefault(  # like in Envoy, the first entry of a priority applies
                threshold.priority,
                model.CircuitBreakers(
                    max_connections=wrapped(threshold, "max_connections", 1024),
                    max_pending_requests=wrapped(threshold, "max_pending_requests", 1024),
                    max_requests=wrapped(threshold, "max_requests", 1024),
                    max_retries=wrapped(threshold, "max_retries", 3),
                    track_remaining=threshold.track_remaining,
                ),
            )
    default, high = (limits.get(priority, model.CircuitBreakers()) for priority in (core.DEFAULT, core.HIGH))
    return default, high


_OUTLIER_INTEGERS = (
    "consecutive_5xx",
    "enforcing_consecutive_5xx",
    "consecutive_gateway_failure",
    "enforcing_consecutive_gateway_failure",
    "consecutive_local_origin_failure",
    "enforcing_consecutive_local_origin_failure",
    "max_ejection_percent",
    "enforcing_success_rate",
    "enforcing_local_origin_success_rate",
    "success_rate_minimum_hosts",
    "success_rate_request_volume",
    "success_rate_stdev_factor",
    "failure_percentage_threshold",
    "enforcing_failure_percentage",
    "enforcing_failure_percentage_local_origin",
    "failure_percentage_minimum_hosts",
    "failure_percentage_request_volume",
)


def _outlier(message: proto.OutlierDetection) -> model.OutlierDetection:
    values: dict[str, Any] = {}
    with at("outlier_detection"):
        for field in _OUTLIER_INTEGERS:
            if message.HasField(field):  # type: ignore[arg-type]  # the stub wants a literal
                value = getattr(message, field).value
                if ("percent" in field or "enforcing" in field) and value > 100:
                    raise constraint(message, field, "value must be less than or equal to 100")
                values[field] = value
        only(
            message,
            *_OUTLIER_INTEGERS,
            "interval",
            "base_ejection_time",
            "max_ejection_time",
            "max_ejection_time_jitter",
            "split_external_local_origin_errors",
            "always_eject_one_host",
            "successful_active_health_check_uneject_host",
        )
        base_s = _positive(message, "base_ejection_time", 30.0)
        longest_s = _positive(message, "max_ejection_time", max(300.0, base_s))
        if longest_s < base_s:
            raise ConfigError(
                "outlier detector's max_ejection_time cannot be smaller than base_ejection_time",
                "max_ejection_time",
            )
        return model.OutlierDetection(
            interval_s=_positive(message, "interval", 10.0),
            base_ejection_time_s=base_s,
            max_ejection_time_s=longest_s,
            max_ejection_jitter_s=seconds(message, "max_ejection_time_jitter", 0.0),
            split_external_local_origin_errors=message.split_external_local_origin_errors,
            always_eject_one_host=wrapped(message, "always_eject_one_host", False),
            uneject_on_check=wrapped(message, "successful_active_health_check_uneject_host", True),
            **values,
        )


def _keepalive(message: proto.Cluster) -> model.Keepalive | None:
    options = message.upstream_connection_options
    with at("upstream_connection_options"):
        only(options, "tcp_keepalive")
    if not options.HasField("tcp_keepalive"):
        return None
    keepalive = options.tcp_keepalive
    return model.Keepalive(
        probes=wrapped(keepalive, "keepalive_probes", None),
        time_s=wrapped(keepalive, "keepalive_time", None),
        interval_s=wrapped(keepalive, "keepalive_interval", None),
    )


def _bind_source(message: proto.Cluster) -> str:
    if not message.HasField("upstream_bind_config"):
        return ""
    with at("upstream_bind_config"):
        only(message.upstream_bind_config, "source_address")
        with at("source_address"):
            if message.upstream_bind_config.source_address.port_value:
                raise Unsupported("connections leave from any free port", "port_value")
            return socket_address(message.upstream_bind_config.source_address).host
