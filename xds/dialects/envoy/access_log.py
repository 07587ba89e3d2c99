"""Access loggers to :mod:`xds.model.access_log`."""

from collections.abc import Iterable, Mapping
from functools import lru_cache
from typing import Any

from xds.dialects.envoy.reading import Surroundings, at, format_text, only, required, struct, unpack
from xds.errors import Unsupported
from xds.model.access_log import AccessLog, JsonFormat, JsonValue
from xds.model.format_string import FormatString, parse_format
from xds.proto.envoy.config.accesslog.v3 import accesslog_pb2 as config
from xds.proto.envoy.config.core.v3 import core_pb2 as core
from xds.proto.envoy.extensions.access_loggers.file.v3.file_pb2 import FileAccessLog
from xds.proto.envoy.extensions.access_loggers.stream.v3.stream_pb2 import StderrAccessLog, StdoutAccessLog
from xds.proto.well_known import Struct

#: Envoy's format when a logger names none.
DEFAULT_FORMAT = (
    '[%START_TIME%] "%REQ(:METHOD)% %REQ(X-ENVOY-ORIGINAL-PATH?:PATH)% %PROTOCOL%" %RESPONSE_CODE% '
    "%RESPONSE_FLAGS% %BYTES_RECEIVED% %BYTES_SENT% %DURATION% %RESP(X-ENVOY-UPSTREAM-SERVICE-TIME)% "
    '"%REQ(X-FORWARDED-FOR)%" "%REQ(USER-AGENT)%" "%REQ(X-REQUEST-ID)%" "%REQ(:AUTHORITY)%" '
    '"%UPSTREAM_HOST%"\n'
)


def compile_access_logs(messages: Iterable[config.AccessLog], surroundings: Surroundings) -> tuple[AccessLog, ...]:
    """Every logger of a list, in order."""
    loggers = []
    for index, message in enumerate(messages):
        with at("access_log", index):
            loggers.append(_access_log(message, surroundings))
    return tuple(loggers)


def _access_log(message: config.AccessLog, surroundings: Surroundings) -> AccessLog:
    only(message, "name", "typed_config")
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
        raise Unsupported(f"no such access logger: {logger.DESCRIPTOR.full_name}")


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
    return value  # type: ignore[no-any-return]  # what is left of a struct: number, bool or null
