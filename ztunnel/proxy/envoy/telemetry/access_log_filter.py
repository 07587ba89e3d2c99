"""Access log filters: functions that decide from the facts of a finished hop whether to log it. Pure."""

import operator
from collections.abc import Callable
from typing import TypeAlias, assert_never

from xds.model.access_log import (
    AllFilters,
    AnyFilter,
    Comparison,
    DurationFilter,
    FlagFilter,
    LogFilter,
    StatusFilter,
)
from ztunnel.proxy.envoy.stream.stream_info import StreamInfo

#: Returns whether a logger writes a line about a finished hop.
Chooses: TypeAlias = Callable[[StreamInfo], bool]

_COMPARE: dict[Comparison, Callable[[int, int], bool]] = {
    Comparison.EQUAL: operator.eq,
    Comparison.AT_LEAST: operator.ge,
    Comparison.AT_MOST: operator.le,
    Comparison.DIFFERENT: operator.ne,
}


def chooser(wanted: LogFilter) -> Chooses:
    """Return the function for a configured filter. Each logger makes its function once."""
    match wanted:
        case StatusFilter(comparison, value):
            compare = _COMPARE[comparison]
            return lambda info: compare(info.response_code, value)
        case DurationFilter(comparison, value):
            compare = _COMPARE[comparison]
            return lambda info: info.duration_s is not None and compare(int(info.duration_s * 1000), value)
        case FlagFilter(flags):
            return lambda info: not flags.isdisjoint(info.flags) if flags else bool(info.flags)
        case AllFilters(filters):
            every = tuple(map(chooser, filters))
            return lambda info: all(each(info) for each in every)
        case AnyFilter(filters):
            some = tuple(map(chooser, filters))
            return lambda info: any(each(info) for each in some)
        case _:
            assert_never(wanted)
