"""Access loggers."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import TypeAlias

from xds.model.format_string import FormatString

JsonValue: TypeAlias = "FormatString | Mapping[str, JsonValue] | Sequence[JsonValue] | str | float | bool | None"


@dataclass(frozen=True, slots=True)
class JsonFormat:
    """One JSON object per line; values are format strings, nested objects or lists of such."""

    fields: Mapping[str, JsonValue]


class Comparison(StrEnum):
    """How a filter compares what it reads with its value."""

    EQUAL = "EQ"
    AT_LEAST = "GE"
    AT_MOST = "LE"
    DIFFERENT = "NE"


@dataclass(frozen=True, slots=True)
class StatusFilter:
    """The response code, 0 if there is none, compares so with ``value``."""

    comparison: Comparison
    value: int


@dataclass(frozen=True, slots=True)
class DurationFilter:
    """The duration in whole milliseconds compares so with ``value``; never, while there is none."""

    comparison: Comparison
    value: int


@dataclass(frozen=True, slots=True)
class FlagFilter:
    """One of the response flags is set; any flag, if none is named."""

    flags: frozenset[str]


@dataclass(frozen=True, slots=True)
class AllFilters:
    """Every filter lets the line through; also when there is none."""

    filters: tuple["LogFilter", ...] = ()


@dataclass(frozen=True, slots=True)
class AnyFilter:
    """At least one filter lets the line through."""

    filters: tuple["LogFilter", ...]


LogFilter: TypeAlias = StatusFilter | DurationFilter | FlagFilter | AllFilters | AnyFilter


@dataclass(frozen=True, slots=True)
class AccessLog:
    """Where a line goes and how it reads.

    Attributes:
        path: a file; ``/dev/stdout`` and ``/dev/stderr`` are the process's own.
        omit_empty: leave out empty JSON fields, and print an empty text instead of ``-``.
        filter: selects the lines to write. None writes all.
    """

    path: str
    format: FormatString | JsonFormat
    omit_empty: bool = False
    filter: LogFilter | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class LogStream:
    """A stream of entries to an access log service; loggers with equal ones share it.

    Attributes:
        cluster: a static cluster of the bootstrap.
        http: the entries describe requests, not TCP connections.
        flush_interval_s: the longest that an entry waits.
        buffer_bytes: entries are sent when they reach this size. While they cannot be sent, at most this many
            bytes are kept.
    """

    cluster: str
    log_name: str
    http: bool
    flush_interval_s: float = 1.0
    buffer_bytes: int = 16384


@dataclass(frozen=True, slots=True, kw_only=True)
class GrpcAccessLog:
    """Where an entry goes, and what it holds besides the facts that all have.

    Attributes:
        request_headers: names in lower case.
        filter: selects the connections that get an entry. None selects all.
    """

    stream: LogStream
    request_headers: tuple[str, ...] = ()
    filter: LogFilter | None = None


AnyAccessLog: TypeAlias = AccessLog | GrpcAccessLog
