"""Compiles access loggers to :mod:`xds.model.access_log`."""

from collections.abc import Iterable, Mapping
from dataclasses import replace
from functools import lru_cache
from typing import Any

from xds.dialects.envoy.reading import (
    Surroundings,
    at,
    constraint,
    format_text,
    grpc_cluster,
    only,
    only_v3,
    required,
    seconds,
    struct,
    unpack,
    wrapped,
)
from xds.errors import ConfigError, Unsupported
from xds.model.access_log import (
    AccessLog,
    AllFilters,
    AnyAccessLog,
    AnyFilter,
    Comparison,
    DurationFilter,
    FlagFilter,
    GrpcAccessLog,
    JsonFormat,
    JsonValue,
    LogFilter,
    LogStream,
    StatusFilter,
)
from xds.model.format_string import FormatString, parse_format
from xds.proto.envoy.config.accesslog.v3 import accesslog_pb2 as config
from xds.proto.envoy.config.core.v3 import core_pb2 as core
from xds.proto.envoy.extensions.access_loggers.file.v3.file_pb2 import FileAccessLog
from xds.proto.envoy.extensions.access_loggers.grpc.v3 import als_pb2 as als
from xds.proto.envoy.extensions.access_loggers.stream.v3.stream_pb2 import StderrAccessLog, StdoutAccessLog
from xds.proto.well_known import Struct

#: Envoy's default format, for loggers that configure no format.
DEFAULT_FORMAT = (
    '[%START_TIME%] "%REQ(:METHOD)% %REQ(X-ENVOY-ORIGINAL-PATH?:PATH)% %PROTOCOL%" %RESPONSE_CODE% '
    "%RESPONSE_FLAGS% %BYTES_RECEIVED% %BYTES_SENT% %DURATION% %RESP(X-ENVOY-UPSTREAM-SERVICE-TIME)% "
    '"%REQ(X-FORWARDED-FOR)%" "%REQ(USER-AGENT)%" "%REQ(X-REQUEST-ID)%" "%REQ(:AUTHORITY)%" '
    '"%UPSTREAM_HOST%"\n'
)
#: Envoy's names of response flags, for filters. They include flags that this proxy never sets.
_FLAGS = frozenset(
    {
        "LH",
        "UH",
        "UT",
        "LR",
        "UR",
        "UF",
        "UC",
        "UO",
        "NR",
        "DI",
        "FI",
        "RL",
        "UAEX",
        "RLSE",
        "DC",
        "URX",
        "SI",
        "IH",
    }
    | {"DPE", "UMSDR", "RFCF", "NFCF", "DT", "UPE", "NC", "OM", "DF", "DO", "DR", "UDO"}
)
_OPS = frozenset(config.ComparisonFilter.Op.values())


def compile_access_logs(
    messages: Iterable[config.AccessLog], surroundings: Surroundings
) -> tuple[AnyAccessLog, ...]:
    """Compile every access logger of a list, in order."""
    loggers = []
    for index, message in enumerate(messages):
        with at("access_log", index):
            loggers.append(_access_log(message, surroundings))
    return tuple(loggers)


def _access_log(message: config.AccessLog, surroundings: Surroundings) -> AnyAccessLog:
    if not message.HasField("filter"):
        return _logger(message, surroundings)
    with at("filter"):
        chosen = _filter(message.filter)
    return replace(_logger(message, surroundings), filter=chosen)


def _filter(message: config.AccessLogFilter) -> LogFilter:
    """Compile an access log filter.

    Raises:
        Unsupported: the filter needs sampling, traces or extensions, which this proxy does not have.
    """
    kind = message.WhichOneof("filter_specifier")
    if kind is None:
        raise constraint(message, "filter_specifier", "value is required")
    with at(kind):
        match kind:
            case "status_code_filter":
                return StatusFilter(*_comparison(message.status_code_filter))
            case "duration_filter":
                return DurationFilter(*_comparison(message.duration_filter))
            case "not_health_check_filter":
                return AllFilters()  # a proxy that reads no requests cannot recognize health checks
            case "and_filter":
                return AllFilters(_filters(message.and_filter))
            case "or_filter":
                return AnyFilter(_filters(message.or_filter))
            case "response_flag_filter":
                return FlagFilter(_flags(message.response_flag_filter))
            case _:
                raise Unsupported("this proxy does not support this field")


def _comparison(message: config.StatusCodeFilter | config.DurationFilter) -> tuple[Comparison, int]:
    if not message.HasField("comparison"):
        raise constraint(message, "comparison", "value is required")
    comparison = message.comparison
    with at("comparison"):
        # This proxy has no runtime configuration, so a runtime key always has its default value.
        if comparison.HasField("value"):
            with at("value"):
                required(comparison.value, "runtime_key")
        name = config.ComparisonFilter.Op.Name(comparison.op) if comparison.op in _OPS else ""
        if not name:
            raise constraint(comparison, "op", "value must be one of the defined enum values")
        return Comparison(name), comparison.value.default_value


def _filters(message: config.AndFilter | config.OrFilter) -> tuple[LogFilter, ...]:
    if len(message.filters) < 2:
        raise constraint(message, "filters", "value must contain at least 2 item(s)")
    filters = []
    for index, entry in enumerate(message.filters):
        with at("filters", index):
            filters.append(_filter(entry))
    return tuple(filters)


def _flags(message: config.ResponseFlagFilter) -> frozenset[str]:
    for index, flag in enumerate(message.flags):
        if flag not in _FLAGS:
            raise ConfigError(f"no such response flag: {flag!r}", f"flags[{index}]")
    return frozenset(message.flags)


def _logger(message: config.AccessLog, surroundings: Surroundings) -> AnyAccessLog:
    only(message, "name", "typed_config", "filter")
    with at("typed_config"):
        logger = unpack(message.typed_config, message.name)
        if isinstance(logger, FileAccessLog):
            return _file(logger, surroundings)
        if isinstance(logger, StdoutAccessLog | StderrAccessLog):
            path = "/dev/stdout" if isinstance(logger, StdoutAccessLog) else "/dev/stderr"
            if not logger.HasField("log_format"):
                return AccessLog(path, parse_format(DEFAULT_FORMAT))
            with at("log_format"):
                return _substitution(path, logger.log_format, surroundings)
        if isinstance(logger, als.TcpGrpcAccessLogConfig):
            return GrpcAccessLog(stream=_stream(logger, http=False))
        if isinstance(logger, als.HttpGrpcAccessLogConfig):
            only(logger, "common_config", "additional_request_headers_to_log")  # answers are this proxy's own
            wanted = tuple(map(str.lower, logger.additional_request_headers_to_log))
            return GrpcAccessLog(stream=_stream(logger, http=True), request_headers=wanted)
        raise Unsupported(f"no such access logger: {logger.DESCRIPTOR.full_name}")


def _stream(logger: als.TcpGrpcAccessLogConfig | als.HttpGrpcAccessLogConfig, *, http: bool) -> LogStream:
    if not logger.HasField("common_config"):
        raise constraint(logger, "common_config", "value is required")
    common = logger.common_config
    with at("common_config"):
        only(
            common,
            "log_name",
            "grpc_service",
            "transport_api_version",
            "buffer_flush_interval",
            "buffer_size_bytes",
        )
        required(common, "log_name")
        only_v3(common, "transport_api_version")
        if not common.HasField("grpc_service"):
            raise constraint(common, "grpc_service", "value is required")
        with at("grpc_service"):
            cluster = grpc_cluster(common.grpc_service)
        interval_s = seconds(common, "buffer_flush_interval", 1.0)
        if interval_s <= 0:
            raise constraint(common, "buffer_flush_interval", "value must be greater than 0s")
        return LogStream(
            cluster=cluster,
            log_name=common.log_name,
            http=http,
            flush_interval_s=interval_s,
            buffer_bytes=wrapped(common, "buffer_size_bytes", 16384),
        )


def _file(logger: FileAccessLog, surroundings: Surroundings) -> AccessLog:
    required(logger, "path")
    kind = logger.WhichOneof("access_log_format")
    if kind is None:
        return AccessLog(logger.path, parse_format(DEFAULT_FORMAT))
    with at(kind):
        if kind == "format":
            return AccessLog(logger.path, parse_format(logger.format))
        if kind == "log_format":
            return _substitution(logger.path, logger.log_format, surroundings)
        return AccessLog(logger.path, _json(getattr(logger, kind)))


def _substitution(path: str, message: core.SubstitutionFormatString, surroundings: Surroundings) -> AccessLog:
    only(message, "text_format", "text_format_source", "json_format", "omit_empty_values", "content_type")
    if message.WhichOneof("format") == "json_format":
        with at("json_format"):
            return AccessLog(path, _json(message.json_format), message.omit_empty_values)
    return AccessLog(path, format_text(message, surroundings), message.omit_empty_values)


def _json(message: Struct) -> JsonFormat:
    return _json_of(message.SerializeToString(deterministic=True))


@lru_cache(maxsize=256)
def _json_of(packed: bytes) -> JsonFormat:
    message = Struct.FromString(packed)
    return JsonFormat({key: _json_value(value) for key, value in struct(message).items()})


def _json_value(value: Any) -> JsonValue:
    if isinstance(value, str):
        parsed: FormatString = parse_format(value)
        return parsed
    if isinstance(value, Mapping):
        return {key: _json_value(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [_json_value(inner) for inner in value]
    return value  # type: ignore[no-any-return]  # the other types of a value: number, bool, null
