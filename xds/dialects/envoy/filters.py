"""Compiles network filters: TCP proxy, HTTP connection manager, RBAC, filter state."""

from collections.abc import Iterable
from dataclasses import replace
from sys import intern

from google.protobuf.message import Message

from xds.dialects.envoy.access_log import compile_access_logs
from xds.dialects.envoy.rbac import compile_rbac
from xds.dialects.envoy.reading import (
    NEVER_IN_HEADERS,
    Shared,
    Surroundings,
    at,
    config_source,
    constraint,
    enum_name,
    fetch_timeout,
    format_text,
    metadata,
    only,
    required,
    seconds,
    unpack,
    wrapped,
)
from xds.dialects.envoy.route import compile_route_table
from xds.errors import ConfigError, Unsupported
from xds.model import http as http_model
from xds.model import listener as model
from xds.model.format_string import parse_format
from xds.model.weighted_cluster import WeightedCluster
from xds.proto.envoy.config.core.v3 import core_pb2 as core
from xds.proto.envoy.extensions.filters.common.set_filter_state.v3 import set_filter_state_pb2 as state
from xds.proto.envoy.extensions.filters.http.router.v3.router_pb2 import Router
from xds.proto.envoy.extensions.filters.network.connection_limit.v3.connection_limit_pb2 import ConnectionLimit
from xds.proto.envoy.extensions.filters.network.http_connection_manager.v3 import (
    http_connection_manager_pb2 as hcm,
)
from xds.proto.envoy.extensions.filters.network.local_ratelimit.v3.local_rate_limit_pb2 import LocalRateLimit
from xds.proto.envoy.extensions.filters.network.rbac.v3.rbac_pb2 import RBAC
from xds.proto.envoy.extensions.filters.network.set_filter_state.v3.set_filter_state_pb2 import (
    Config as SetFilterState,
)
from xds.proto.envoy.extensions.filters.network.tcp_proxy.v3 import tcp_proxy_pb2 as tcp

#: The shortest permitted fill interval of a token bucket, like in Envoy.
_LEAST_FILL_S = 0.05

NetworkFilter = (
    model.Rbac
    | model.ConnectionLimit
    | model.LocalRateLimit
    | model.SetFilterState
    | model.TcpProxy
    | http_model.HttpConnectionManager
)


def compile_filter(message: Message, surroundings: Surroundings) -> NetworkFilter:
    """Compile a network filter from its configuration message.

    Raises:
        Unsupported: the type is not a network filter that we support.
    """
    match message:
        case RBAC():
            return compile_rbac(message)
        case ConnectionLimit():
            return _connection_limit(message)
        case LocalRateLimit():
            return _local_rate_limit(message)
        case SetFilterState():
            return _set_filter_state(message, surroundings)
        case tcp.TcpProxy():
            return _tcp_proxy(message, surroundings)
        case hcm.HttpConnectionManager():
            return _connection_manager(message, surroundings)
        case _:
            raise Unsupported(f"no such network filter: {message.DESCRIPTOR.full_name}")


def compile_chain_filter(message: Message, surroundings: Surroundings) -> model.ChainFilter:
    """Compile a network filter that ECDS delivers. Terminal filters, which receive the bytes, must be inline.

    Raises:
        Unsupported: the filter has another kind.
    """
    found = compile_filter(message, surroundings)
    if isinstance(found, model.TcpProxy | http_model.HttpConnectionManager):
        raise Unsupported("the terminal filter of a chain is configured inline only")
    return found


def _connection_limit(message: ConnectionLimit) -> model.ConnectionLimit:
    only(message, "stat_prefix", "max_connections", "delay", "runtime_enabled")
    required(message, "stat_prefix")
    most = wrapped(message, "max_connections", 0)
    if most < 1:
        raise constraint(message, "max_connections", "value must be greater than or equal to 1")
    return model.ConnectionLimit(
        stat_prefix=message.stat_prefix,
        most=most,
        delay_s=seconds(message, "delay", 0.0),
        enabled=_enabled(message),
    )


def _local_rate_limit(message: LocalRateLimit) -> model.LocalRateLimit:
    only(message, "stat_prefix", "token_bucket", "runtime_enabled")
    required(message, "stat_prefix")
    required(message, "token_bucket")
    bucket = message.token_bucket
    with at("token_bucket"):
        only(bucket, "max_tokens", "tokens_per_fill", "fill_interval")
        per_fill = wrapped(bucket, "tokens_per_fill", 1)
        for field, value in (("max_tokens", bucket.max_tokens), ("tokens_per_fill", per_fill)):
            if value < 1:
                raise constraint(bucket, field, "value must be greater than 0")
        interval_s = seconds(bucket, "fill_interval", 0.0)
        if interval_s < _LEAST_FILL_S:
            raise ConfigError("local rate limit token bucket fill timer must be >= 50ms", "fill_interval")
    return model.LocalRateLimit(
        stat_prefix=message.stat_prefix,
        most_tokens=bucket.max_tokens,
        tokens_per_fill=per_fill,
        fill_interval_s=interval_s,
        enabled=_enabled(message),
    )


def _enabled(message: ConnectionLimit | LocalRateLimit) -> bool:
    """Return whether a filter is enabled by default. Runtime keys cannot be set here, so the default applies."""
    if not message.HasField("runtime_enabled"):
        return True
    with at("runtime_enabled"):
        required(message.runtime_enabled, "default_value")
        required(message.runtime_enabled, "runtime_key")
    return message.runtime_enabled.default_value.value


def _set_filter_state(message: SetFilterState, surroundings: Surroundings) -> model.SetFilterState:
    shared = {
        state.FilterStateValue.NONE: model.SharedWithUpstream.NONE,
        state.FilterStateValue.ONCE: model.SharedWithUpstream.ONCE,
        state.FilterStateValue.TRANSITIVE: model.SharedWithUpstream.TRANSITIVE,
    }
    values = []
    for index, value in enumerate(message.on_new_connection):
        with at("on_new_connection", index):
            # read_only has no effect: this proxy sets each filter state once, so every value is read-only.
            only(value, "object_key", "format_string", "read_only", "shared_with_upstream", "skip_if_empty")
            required(value, "object_key")
            with at("format_string"):
                text = format_text(value.format_string, surroundings)
            enum_name(value, "shared_with_upstream")
            sharing = shared[value.shared_with_upstream]
            omit = value.format_string.omit_empty_values
            values.append(model.FilterStateValue(value.object_key, text, sharing, value.skip_if_empty, omit))
    return model.SetFilterState(tuple(values))


_tcp_proxies: Shared[model.TcpProxy] = Shared()


def _tcp_proxy(message: tcp.TcpProxy, surroundings: Surroundings) -> model.TcpProxy:
    """Compile a TCP proxy. TCP proxies that differ only in names are compiled once and share their values."""
    bare = tcp.TcpProxy()
    bare.CopyFrom(message)
    bare.ClearField("stat_prefix")
    bare.ClearField("cluster")
    packed = bare.SerializeToString(deterministic=True)
    found = _tcp_proxies.get(packed)
    if found is not None:
        required(message, "stat_prefix")
        return replace(found, stat_prefix=intern(message.stat_prefix), clusters=_clusters(message))
    noted, asked = surroundings.noted()
    found = _compiled_tcp_proxy(message, noted)
    if not asked:
        _tcp_proxies.keep(packed, found)
    return found


def _compiled_tcp_proxy(message: tcp.TcpProxy, surroundings: Surroundings) -> model.TcpProxy:
    only(
        message,
        "stat_prefix",
        "cluster",
        "weighted_clusters",
        "access_log",
        "max_connect_attempts",
        "idle_timeout",
        "metadata_match",
        "hash_policy",
        "tunneling_config",
        "max_downstream_connection_duration",
        "backoff_options",
    )
    required(message, "stat_prefix")
    attempts = wrapped(message, "max_connect_attempts", 1)
    if attempts < 1:
        raise constraint(message, "max_connect_attempts", "value must be greater than or equal to 1")
    tunneling = None
    if message.HasField("tunneling_config"):
        with at("tunneling_config"):
            tunneling = _tunneling(message.tunneling_config)
    if len(message.hash_policy) > 1:
        raise constraint(message, "hash_policy", "value must contain no more than 1 item(s)")
    for index, policy in enumerate(message.hash_policy):
        if policy.WhichOneof("policy_specifier") != "source_ip":
            raise Unsupported("only source_ip is supported", f"hash_policy[{index}]")
    backoff_base_s, backoff_max_s = _backoff(message)
    return model.TcpProxy(
        stat_prefix=message.stat_prefix,
        clusters=_clusters(message),
        tunneling=tunneling,
        max_connect_attempts=attempts,
        backoff_base_s=backoff_base_s,
        backoff_max_s=backoff_max_s,
        idle_timeout_s=seconds(message, "idle_timeout", 3600.0),
        max_duration_s=_at_least_1ms(message, "max_downstream_connection_duration"),
        hash_source_ip=bool(message.hash_policy),
        metadata_match=metadata(message.metadata_match).get("envoy.lb", {}),
        access_log=compile_access_logs(message.access_log, surroundings),
    )


def _at_least_1ms(message: Message, field: str) -> float:
    """Return a duration in seconds, and 0 if the field is not set."""
    value_s = seconds(message, field, 0.0)
    if message.HasField(field) and value_s < 0.001:
        raise constraint(message, field, "value must be greater than or equal to 1ms")
    return value_s


def _backoff(message: tcp.TcpProxy) -> tuple[float, float]:
    """Return the base interval and the longest interval of the back-off between attempts to connect, or 0."""
    if not message.HasField("backoff_options"):
        return 0.0, 0.0
    with at("backoff_options"):
        if not message.backoff_options.HasField("base_interval"):
            raise constraint(message.backoff_options, "base_interval", "value is required")
        base_s = _at_least_1ms(message.backoff_options, "base_interval")
        longest_s = seconds(message.backoff_options, "max_interval", 0.0)
        if message.backoff_options.HasField("max_interval") and longest_s < base_s:
            raise ConfigError(
                "max_backoff_interval must be greater or equal to base_backoff_interval", "max_interval"
            )
    return base_s, longest_s


def _clusters(message: tcp.TcpProxy) -> tuple[WeightedCluster, ...]:
    kind = message.WhichOneof("cluster_specifier")
    if kind == "cluster":
        required(message, "cluster")
        return (WeightedCluster(intern(message.cluster), 1),)
    if kind == "weighted_clusters":
        choices = []
        with at(kind):
            if not message.weighted_clusters.clusters:
                raise constraint(message.weighted_clusters, "clusters", "value must contain at least 1 item(s)")
            for index, choice in enumerate(message.weighted_clusters.clusters):
                with at("clusters", index):
                    required(choice, "name")
                    if choice.weight < 1:
                        raise constraint(choice, "weight", "value must be greater than or equal to 1")
                    subset = metadata(choice.metadata_match).get("envoy.lb", {})
                    choices.append(WeightedCluster(choice.name, choice.weight, subset))
        return tuple(choices)
    raise constraint(message, "cluster_specifier", "value is required")


def _tunneling(message: tcp.TcpProxy.TunnelingConfig) -> model.Tunneling:
    only(message, "hostname", "headers_to_add", "propagate_response_headers")
    required(message, "hostname")
    with at("hostname"):
        hostname = parse_format(message.hostname)
    return model.Tunneling(
        hostname=hostname,
        headers=tuple(_headers(message.headers_to_add)),
        propagate_response_headers=message.propagate_response_headers,
    )


def _headers(messages: Iterable[core.HeaderValueOption]) -> Iterable[model.HeaderToAdd]:
    actions = {
        core.HeaderValueOption.APPEND_IF_EXISTS_OR_ADD: model.AppendAction.APPEND_IF_EXISTS_OR_ADD,
        core.HeaderValueOption.ADD_IF_ABSENT: model.AppendAction.ADD_IF_ABSENT,
        core.HeaderValueOption.OVERWRITE_IF_EXISTS_OR_ADD: model.AppendAction.OVERWRITE_IF_EXISTS_OR_ADD,
        core.HeaderValueOption.OVERWRITE_IF_EXISTS: model.AppendAction.OVERWRITE_IF_EXISTS,
    }
    for index, option in enumerate(messages):
        with at("headers_to_add", index):
            with at("header"):
                only(option.header, "key", "value")
                required(option.header, "key")
                name = option.header.key.lower()
                if name.startswith(":") or name == "host":
                    raise ConfigError(":-prefixed or host headers may not be modified", "key")
                if not name.isascii() or any(char <= " " or char in ':"(),/;<=>?@[\\]{}\x7f' for char in name):
                    raise ConfigError(f"not a header name: {option.header.key!r}", "key")
                if set(option.header.value) & NEVER_IN_HEADERS:
                    raise constraint(option.header, "value", "value must have no NUL, CR or LF")
                with at("value"):
                    value = parse_format(option.header.value)
            enum_name(option, "append_action")
            if option.HasField("append") and option.append_action:
                raise ConfigError("Both append and append_action are set and it's not allowed", "append")
            action = actions[option.append_action]
            if option.HasField("append") and not option.append.value:
                action = model.AppendAction.OVERWRITE_IF_EXISTS_OR_ADD
            yield model.HeaderToAdd(name, value, action, option.keep_empty_value)


def _connection_manager(
    message: hcm.HttpConnectionManager, surroundings: Surroundings
) -> http_model.HttpConnectionManager:
    only(
        message,
        "codec_type",
        "stat_prefix",
        "rds",
        "route_config",
        "http_filters",
        "http_protocol_options",  # settings of HTTP/1.1, which is not served
        "http2_protocol_options",
        "server_name",
        "drain_timeout",  # the final GOAWAY follows once a PONG shows that the peer has seen the first one
        "access_log",
        "use_remote_address",  # for logs and routes; policies never trust x-forwarded-for
        "generate_request_id",
        "preserve_external_request_id",
        # no effect: tunnel requests end at this proxy, so a header for the next proxy would not be read
        "forward_client_cert_details",
        "set_current_client_cert_details",
        "upgrade_configs",
        "stream_idle_timeout",
        "delayed_close_timeout",  # for HTTP/1.1 and protocol errors; sent data is flushed in both
        "request_timeout",
        "max_request_headers_kb",
        "server_header_transformation",
        "common_http_protocol_options",
        "request_headers_timeout",
    )
    required(message, "stat_prefix")
    for field in ("request_timeout", "request_headers_timeout"):
        if seconds(message, field, 0.0):
            raise Unsupported("this proxy does not support this field", field)
    if set(message.server_name) & NEVER_IN_HEADERS:
        raise constraint(message, "server_name", "value must have no NUL, CR or LF")
    enum_name(message, "server_header_transformation")
    if message.server_header_transformation == hcm.HttpConnectionManager.PASS_THROUGH:
        raise Unsupported("an answer of this proxy always names it", "server_header_transformation")
    if message.codec_type not in (hcm.HttpConnectionManager.AUTO, hcm.HttpConnectionManager.HTTP2):
        raise Unsupported("tunnels are HTTP/2; only AUTO and HTTP2 are supported", "codec_type")
    _http_filters(message.http_filters)
    upgrade = False
    for index, config in enumerate(message.upgrade_configs):
        with at("upgrade_configs", index):
            only(config, "upgrade_type", "enabled")
            if config.upgrade_type.upper() == "CONNECT":
                upgrade = wrapped(config, "enabled", True)
    with at("http2_protocol_options"):
        http2 = compile_http2(message.http2_protocol_options)
    common = message.common_http_protocol_options
    with at("common_http_protocol_options"):
        only(common, "idle_timeout")
    routes = _routes(message, surroundings)
    access_log = compile_access_logs(message.access_log, surroundings)
    return http_model.HttpConnectionManager(
        stat_prefix=message.stat_prefix,
        routes=routes,
        http2=http2,
        allows_connect=upgrade and http2.allow_connect,
        server_name=message.server_name or "envoy",
        stream_idle_timeout_s=(
            seconds(message, "stream_idle_timeout", 0.0) if message.HasField("stream_idle_timeout") else None
        ),
        idle_timeout_s=seconds(common, "idle_timeout", 3600.0),
        max_request_headers_kb=_request_headers_kb(message),
        generates_request_id=wrapped(message, "generate_request_id", True),
        preserves_request_id=message.preserve_external_request_id,
        uses_remote_address=wrapped(message, "use_remote_address", False),
        access_log=access_log,
    )


def _request_headers_kb(message: hcm.HttpConnectionManager) -> int | None:
    limit: int | None = wrapped(message, "max_request_headers_kb", None)
    if limit is not None and not 0 < limit <= 8192:
        raise constraint(message, "max_request_headers_kb", "value must be inside range (0, 8192]")
    return limit


def _routes(
    message: hcm.HttpConnectionManager, surroundings: Surroundings
) -> http_model.RouteTable | http_model.RouteTableRef:
    kind = message.WhichOneof("route_specifier")
    if kind == "route_config":
        with at(kind):
            return compile_route_table(message.route_config, surroundings)
    if kind == "rds":
        with at(kind):
            required(message.rds, "route_config_name")
            with at("config_source"):
                source = config_source(message.rds.config_source)
                timeout = fetch_timeout(message.rds.config_source)
        return http_model.RouteTableRef(message.rds.route_config_name, source, timeout)
    raise constraint(message, "route_specifier", "value is required")


def _http_filters(filters: Iterable[hcm.HttpFilter]) -> None:
    """Refuse all HTTP filters except the router, because the purpose of an unknown filter can be authorization."""
    present = [(index, config) for index, config in enumerate(filters) if not config.disabled]
    for index, config in present:
        with at("http_filters", index, "typed_config"):
            if config.is_optional and config.WhichOneof("config_type") is None:
                continue
            message = unpack(config.typed_config, config.name)
            if not isinstance(message, Router):
                raise Unsupported(f"no such HTTP filter: {message.DESCRIPTOR.full_name}")
    if not present:
        with at("http_filters"):
            raise ConfigError("no terminal HTTP filter (envoy.filters.http.router)")


def compile_http2(message: core.Http2ProtocolOptions) -> http_model.Http2Settings:
    """Compile HTTP/2 options, with the ranges of RFC 9113 and Envoy."""
    only(
        message,
        "max_concurrent_streams",
        "initial_stream_window_size",
        "initial_connection_window_size",
        "allow_connect",
        "connection_keepalive",
    )
    streams = wrapped(message, "max_concurrent_streams", None)
    stream_window = wrapped(message, "initial_stream_window_size", None)
    connection_window = wrapped(message, "initial_connection_window_size", None)
    if streams is not None and not 1 <= streams <= 0x7FFFFFFF:
        raise constraint(message, "max_concurrent_streams", "value must be inside range [1, 2147483647]")
    for field, window in (
        ("initial_stream_window_size", stream_window),
        ("initial_connection_window_size", connection_window),
    ):
        if window is not None and not 65535 <= window <= 0x7FFFFFFF:
            raise constraint(message, field, "value must be inside range [65535, 2147483647]")
    keepalive = message.connection_keepalive
    with at("connection_keepalive"):
        only(keepalive, "interval", "timeout")
        interval_s, timeout_s = _at_least_1ms(keepalive, "interval"), _at_least_1ms(keepalive, "timeout")
        if interval_s and not timeout_s:
            raise constraint(keepalive, "timeout", "value is required")
    return http_model.Http2Settings(
        allow_connect=message.allow_connect,
        max_concurrent_streams=streams,
        initial_stream_window=stream_window,
        initial_connection_window=connection_window,
        keepalive_interval_s=interval_s or None,
        keepalive_timeout_s=timeout_s or None,
    )
