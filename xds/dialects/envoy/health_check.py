"""Compiles active health checks of clusters and endpoints."""

import re

from xds.dialects.envoy.reading import at, constraint, enum_name, only, seconds, socket_address, wrapped
from xds.errors import ConfigError, Unsupported
from xds.model.health_check import EndpointCheck, GrpcCheck, HealthCheck, HttpCheck, TcpCheck
from xds.proto.envoy.config.cluster.v3 import cluster_pb2 as cluster
from xds.proto.envoy.config.core.v3 import core_pb2 as core
from xds.proto.envoy.config.endpoint.v3 import endpoint_pb2 as endpoint

#: Matches lower-case header names (RFC 9110, 5.6.2).
_HEADER_NAME = re.compile(r"[-!#$%&'*+.^_`|~0-9a-z]+")


def compile_health_check(message: cluster.Cluster) -> HealthCheck | None:
    """Compile the health check of a cluster. ``None`` if the cluster has no health check.

    Raises:
        ConfigError: the check is not supported. The error contains the field path.
    """
    if not message.health_checks:
        return None
    with at("health_checks"):
        if len(message.health_checks) > 1:
            raise ConfigError("Multiple health checks not supported")
    with at("health_checks", 0):
        return _compile(message.health_checks[0])


def _compile(message: core.HealthCheck) -> HealthCheck:
    only(
        message,
        "timeout",
        "interval",
        "interval_jitter",
        "unhealthy_threshold",
        "healthy_threshold",
        "reuse_connection",  # an optimization; here each check opens its own connection
        "http_health_check",
        "tcp_health_check",
        "grpc_health_check",
        "no_traffic_interval",
        "unhealthy_interval",
        "unhealthy_edge_interval",
        "healthy_edge_interval",
        "interval_jitter_percent",
        "initial_jitter",
        "no_traffic_healthy_interval",
    )
    timeout_s, interval_s = _wait(message, "timeout"), _wait(message, "interval")
    unhealthy_s = _wait(message, "unhealthy_interval", interval_s)
    no_traffic_s = _wait(message, "no_traffic_interval", 60.0)
    return HealthCheck(
        check=_check(message),
        timeout_s=timeout_s,
        interval_s=interval_s,
        unhealthy_threshold=_threshold(message, "unhealthy_threshold"),
        healthy_threshold=_threshold(message, "healthy_threshold"),
        unhealthy_interval_s=unhealthy_s,
        unhealthy_edge_s=_wait(message, "unhealthy_edge_interval", unhealthy_s),
        healthy_edge_s=_wait(message, "healthy_edge_interval", interval_s),
        no_traffic_s=no_traffic_s,
        no_traffic_healthy_s=_wait(message, "no_traffic_healthy_interval", no_traffic_s),
        initial_jitter_s=seconds(message, "initial_jitter", 0.0),
        jitter_s=seconds(message, "interval_jitter", 0.0),
        jitter_share=message.interval_jitter_percent / 100,
    )


def _wait(message: core.HealthCheck, field: str, default: float | None = None) -> float:
    if not message.HasField(field):  # type: ignore[arg-type]  # the stub wants a literal
        if default is None:
            raise constraint(message, field, "value is required")
        return default
    value = seconds(message, field, 0.0)
    if value <= 0:
        raise constraint(message, field, "value must be greater than 0s")
    return value


def _threshold(message: core.HealthCheck, field: str) -> int:
    value: int | None = wrapped(message, field, None)
    if value is None:
        raise constraint(message, field, "value is required")
    return max(1, value)


def _check(message: core.HealthCheck) -> TcpCheck | HttpCheck | GrpcCheck:
    match message.WhichOneof("health_checker"):
        case "tcp_health_check":
            with at("tcp_health_check"):
                return _tcp(message.tcp_health_check)
        case "http_health_check":
            with at("http_health_check"):
                return _http(message.http_health_check)
        case "grpc_health_check":
            with at("grpc_health_check"):
                only(message.grpc_health_check, "service_name")
                return GrpcCheck(message.grpc_health_check.service_name)
        case _:
            raise constraint(message, "health_checker", "is required")


def _tcp(message: core.HealthCheck.TcpHealthCheck) -> TcpCheck:
    only(message, "send", "receive")
    send = b""
    if message.HasField("send"):
        with at("send"):
            send = _payload(message.send)
    receive = []
    for index, payload in enumerate(message.receive):
        with at("receive", index):
            receive.append(_payload(payload))
    return TcpCheck(send, tuple(receive))


def _payload(message: core.HealthCheck.Payload) -> bytes:
    if message.WhichOneof("payload") == "binary":
        return message.binary
    try:
        found = bytes.fromhex(message.text)
    except ValueError:
        raise ConfigError(f"invalid hex string {message.text!r}", "text") from None
    if not found:
        raise constraint(message, "text", "value length must be at least 1 characters")
    return found


def _http(message: core.HealthCheck.HttpHealthCheck) -> HttpCheck:
    only(
        message,
        "host",
        "path",
        "request_headers_to_add",
        "expected_statuses",
        "codec_client_type",
        "retriable_statuses",
        "method",
    )
    if enum_name(message, "codec_client_type") != "HTTP1":
        raise Unsupported("checks are requests of HTTP/1.1", "codec_client_type")
    if not message.path:
        raise constraint(message, "path", "value length must be at least 1 characters")
    for field in ("host", "path"):
        text: str = getattr(message, field)
        if not text.isascii() or not text.isprintable() or " " in text:
            raise ConfigError(f"cannot be written into a request: {text!r}", field)
    return HttpCheck(
        path=message.path,
        host=message.host,
        method=_method(message),
        headers=_headers(message),
        expected=_statuses(message, "expected_statuses") or ((200, 201),),
        retriable=_statuses(message, "retriable_statuses"),
    )


def _method(message: core.HealthCheck.HttpHealthCheck) -> str:
    method = enum_name(message, "method")
    if method == "CONNECT":
        raise constraint(message, "method", "value must not be in list [6]")
    return "GET" if method == "METHOD_UNSPECIFIED" else method


def _headers(message: core.HealthCheck.HttpHealthCheck) -> tuple[tuple[str, str], ...]:
    """Return the request headers of a health check. The values are literal text, because format commands describe
    a connection, and a check has none.
    """
    headers = []
    for index, option in enumerate(message.request_headers_to_add):
        with at("request_headers_to_add", index):
            only(option, "header")
            only(option.header, "key", "value")
            name, value = option.header.key.lower(), option.header.value
            if not _HEADER_NAME.fullmatch(name) or name == "host":
                raise ConfigError(f"cannot be added to a request: {name!r}", "header.key")
            if "%" in value:
                raise Unsupported("operators of format strings are not evaluated", "header.value")
            if not value.isascii() or not value.isprintable() or value != value.strip():
                raise ConfigError(f"cannot be written into a request: {value!r}", "header.value")
            headers.append((name, value))
    return tuple(headers)


def _statuses(message: core.HealthCheck.HttpHealthCheck, field: str) -> tuple[tuple[int, int], ...]:
    found = []
    for index, each in enumerate(getattr(message, field)):
        with at(field, index):
            if not 100 <= each.start < each.end <= 600:
                found_range = f"{each.start} to {each.end}"
                raise ConfigError(f"Invalid http status range: 100 <= start < end <= 600, not {found_range}")
            found.append((each.start, each.end))
    return tuple(found)


def compile_endpoint_check(message: endpoint.Endpoint) -> EndpointCheck | None:
    """Return the health check settings of an endpoint, or ``None`` if it has none.

    Raises:
        ConfigError: a setting is not supported. The error contains the field path.
    """
    if not message.HasField("health_check_config"):
        return None
    config = message.health_check_config
    with at("health_check_config"):
        only(config, "port_value", "hostname", "address", "disable_active_health_check")
        if config.port_value > 65535:
            raise constraint(config, "port_value", "value must be less than or equal to 65535")
        address = None
        if config.HasField("address"):
            with at("address"):
                if config.address.WhichOneof("address") != "socket_address":
                    raise Unsupported("only a socket address can be checked")
                with at("socket_address"):
                    address = socket_address(config.address.socket_address)
        made = EndpointCheck(
            address=address,
            port=config.port_value,
            host=config.hostname,
            disabled=config.disable_active_health_check,
        )
    return made if made != EndpointCheck() else None
