"""Access loggers, as values."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import TypeAlias

from xds.model.format_string import FormatString

JsonValue: TypeAlias = "FormatString | Mapping[str, JsonValue] | Sequence[JsonValue] | str | float | bool | None"


@dataclass(frozen=True, slots=True)
class JsonFormat:
    """A format of one JSON object per line. The object's values are format strings, nested objects, or lists of
    these.
    """

    fields: Mapping[str, JsonValue]


class Comparison(StrEnum):
    """How an access log filter compares a connection's value with the filter's value."""

    EQUAL = "EQ"
    AT_LEAST = "GE"
    AT_MOST = "LE"
    DIFFERENT = "NE"


@dataclass(frozen=True, slots=True)
class StatusFilter:
    """Selects access log lines by comparing the response code (0 if there is none) with ``value``."""

    comparison: Comparison
    value: int


@dataclass(frozen=True, slots=True)
class DurationFilter:
    """Selects access log lines by comparing the duration in whole milliseconds with ``value``."""

    comparison: Comparison
    value: int


@dataclass(frozen=True, slots=True)
class FlagFilter:
    """Selects access log lines with one of the named response flags. If no flag is named, any flag selects the
    line.
    """

    flags: frozenset[str]


@dataclass(frozen=True, slots=True)
class AllFilters:
    """Selects access log lines that all of the filters select. Without filters, it selects all lines."""

    filters: tuple["LogFilter", ...] = ()


@dataclass(frozen=True, slots=True)
class AnyFilter:
    """Selects access log lines that at least one of the filters selects."""

    filters: tuple["LogFilter", ...]


LogFilter: TypeAlias = StatusFilter | DurationFilter | FlagFilter | AllFilters | AnyFilter


@dataclass(frozen=True, slots=True)
class AccessLog:
    """An access logger that writes lines: its file and their format.

    Attributes:
        path: a file. ``/dev/stdout`` and ``/dev/stderr`` mean the streams of this process.
        omit_empty: whether to leave out empty JSON fields, and to print an empty text instead of ``-``.
        filter: selects the lines to write. None writes all.
    """

    path: str
    format: FormatString | JsonFormat
    omit_empty: bool = False
    filter: LogFilter | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class LogStream:
    """The settings of a stream to an access log service. Loggers with equal settings share one stream.

    Attributes:
        cluster: a static cluster of the bootstrap.
        http: whether the entries describe HTTP requests instead of TCP connections.
        flush_interval_s: the longest time that an unsent entry waits.
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
    """An access logger that sends entries to a service: its stream, and additional fields for each entry.

    Attributes:
        request_headers: the lower-case names of request headers to include.
        filter: selects the connections that get an entry. None selects all.
    """

    stream: LogStream
    request_headers: tuple[str, ...] = ()
    filter: LogFilter | None = None


AnyAccessLog: TypeAlias = AccessLog | GrpcAccessLog
