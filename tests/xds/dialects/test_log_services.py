"""Loggers of access log services: what their settings mean, and what is refused, and where."""

import json
from typing import Any

import pytest

from tests.xds.dialects.walked import LOG_SERVICE
from xds.dialects.envoy.access_log import compile_access_logs
from xds.dialects.envoy.reading import Surroundings
from xds.errors import ConfigError
from xds.model.access_log import AnyAccessLog, FlagFilter, GrpcAccessLog, LogStream
from xds.proto.envoy.config.accesslog.v3.accesslog_pb2 import AccessLog
from xds.proto.json import parse_text

KINDS = "type.googleapis.com/envoy.extensions.access_loggers.grpc.v3"


def compiled(kind: str, common: dict[str, Any] | None, **more: Any) -> AnyAccessLog:
    config = {"@type": f"{KINDS}.{kind}GrpcAccessLogConfig", **more}
    if common is not None:
        config["common_config"] = common
    entry = {"name": "g", "filter": {"response_flag_filter": {"flags": ["UF"]}}, "typed_config": config}
    (log,) = compile_access_logs(
        [parse_text(json.dumps(entry), AccessLog).message], Surroundings(lambda path: b"", {})
    )
    return log


def test_settings() -> None:
    wanted = LogStream(cluster="als", log_name="l", http=False, flush_interval_s=2.0, buffer_bytes=100)
    assert compiled("Tcp", LOG_SERVICE) == GrpcAccessLog(stream=wanted, filter=FlagFilter(frozenset({"UF"})))


def test_settings_of_requests_and_what_is_not_said() -> None:
    common = {name: LOG_SERVICE[name] for name in ("log_name", "grpc_service")}
    log = compiled("Http", common, additional_request_headers_to_log=["X-Request-Id"])
    stream = LogStream(cluster="als", log_name="l", http=True, flush_interval_s=1.0, buffer_bytes=16384)
    assert log == GrpcAccessLog(
        stream=stream, request_headers=("x-request-id",), filter=FlagFilter(frozenset({"UF"}))
    )


@pytest.mark.parametrize(
    ("change", "place"),
    [
        ({"log_name": ""}, "log_name"),
        ({"grpc_service": None}, "grpc_service"),
        ({"grpc_service": {}}, "grpc_service.target_specifier"),
        ({"grpc_service": {"google_grpc": {"target_uri": "x:1"}}}, "grpc_service.target_specifier"),
        ({"grpc_service": {"envoy_grpc": {}}}, "grpc_service.envoy_grpc.cluster_name"),
        (
            {"grpc_service": {"envoy_grpc": {"cluster_name": "als"}, "timeout": "1s"}},
            "grpc_service.timeout",
        ),
        ({"transport_api_version": "V2"}, "transport_api_version"),
        ({"buffer_flush_interval": "0s"}, "buffer_flush_interval"),
        ({"filter_state_objects_to_log": ["x"]}, "filter_state_objects_to_log"),
        ({"grpc_stream_retry_policy": {}}, "grpc_stream_retry_policy"),
    ],
)
def test_what_is_not_obeyed_is_refused_by_name(change: dict[str, Any], place: str) -> None:
    common = {name: value for name, value in {**LOG_SERVICE, **change}.items() if value is not None}
    with pytest.raises(ConfigError) as caught:
        compiled("Tcp", common)
    assert caught.value.path == f"access_log[0].typed_config.common_config.{place}"


@pytest.mark.parametrize(
    "field", ["additional_response_headers_to_log", "additional_response_trailers_to_log", "common_config"]
)
def test_fields_of_the_logger_itself(field: str) -> None:
    common, more = (None, {}) if field == "common_config" else (LOG_SERVICE, {field: ["x"]})
    with pytest.raises(ConfigError) as caught:
        compiled("Http", common, **more)
    assert caught.value.path == f"access_log[0].typed_config.{field}"
