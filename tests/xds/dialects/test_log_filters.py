"""Filters of access loggers: what is refused, and where."""

import json
from typing import Any

import pytest

from xds.dialects.envoy.access_log import compile_access_logs
from xds.dialects.envoy.reading import Surroundings
from xds.errors import ConfigError
from xds.model.access_log import (
    AllFilters,
    AnyFilter,
    Comparison,
    DurationFilter,
    FlagFilter,
    LogFilter,
    StatusFilter,
)
from xds.proto.envoy.config.accesslog.v3.accesslog_pb2 import AccessLog
from xds.proto.json import parse_text

FILE = "type.googleapis.com/envoy.extensions.access_loggers.file.v3.FileAccessLog"
VALUE = {"default_value": 7, "runtime_key": "x"}


def compiled(chosen: dict[str, Any]) -> LogFilter | None:
    entry = {"name": "f", "filter": chosen, "typed_config": {"@type": FILE, "path": "/x"}}
    (log,) = compile_access_logs(
        [parse_text(json.dumps(entry), AccessLog).message], Surroundings(lambda path: b"", {})
    )
    return log.filter


@pytest.mark.parametrize(
    ("chosen", "wanted"),
    [
        (
            {"status_code_filter": {"comparison": {"op": "LE", "value": VALUE}}},
            StatusFilter(Comparison.AT_MOST, 7),
        ),
        ({"duration_filter": {"comparison": {"value": VALUE}}}, DurationFilter(Comparison.EQUAL, 7)),
        ({"response_flag_filter": {"flags": ["UF", "DC"]}}, FlagFilter(frozenset({"UF", "DC"}))),
        ({"not_health_check_filter": {}}, AllFilters()),
        (
            {"or_filter": {"filters": [{"response_flag_filter": {}}, {"not_health_check_filter": {}}]}},
            AnyFilter((FlagFilter(frozenset()), AllFilters())),
        ),
    ],
)
def test_a_filter_means_what_it_says(chosen: dict[str, Any], wanted: LogFilter) -> None:
    assert compiled(chosen) == wanted


@pytest.mark.parametrize(
    ("chosen", "place"),
    [
        ({}, "filter.filter_specifier"),
        ({"traceable_filter": {}}, "filter.traceable_filter"),
        ({"runtime_filter": {"runtime_key": "x"}}, "filter.runtime_filter"),
        ({"extension_filter": {"name": "x"}}, "filter.extension_filter"),
        ({"status_code_filter": {}}, "filter.status_code_filter.comparison"),
        ({"status_code_filter": {"comparison": {"op": 9, "value": VALUE}}}, "comparison.op"),
        ({"duration_filter": {"comparison": {"value": {"default_value": 1}}}}, "comparison.value.runtime_key"),
        ({"response_flag_filter": {"flags": ["UF", "XX"]}}, "response_flag_filter.flags[1]"),
        ({"and_filter": {"filters": [{"not_health_check_filter": {}}]}}, "and_filter.filters"),
        (
            {"or_filter": {"filters": [{"not_health_check_filter": {}}, {}]}},
            "or_filter.filters[1].filter_specifier",
        ),
    ],
)
def test_what_is_not_supported_is_refused_by_name(chosen: dict[str, Any], place: str) -> None:
    with pytest.raises(ConfigError) as caught:
        compiled(chosen)
    assert caught.value.path.endswith(place)
    assert caught.value.path.startswith("access_log[0].")
