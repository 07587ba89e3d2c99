"""Access loggers, as values."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import TypeAlias

from xds.model.format_string import FormatString

JsonValue: TypeAlias = "FormatString | Mapping[str, JsonValue] | Sequence[JsonValue] | str | float | bool | None"


@dataclass(frozen=True, slots=True)
class JsonFormat:
    """A format of one JSON object per line. Its values are format strings, nested objects, or lists of these."""

    fields: Mapping[str, JsonValue]


class Comparison(StrEnum):
    """How a filter compares a value of the connection with its own."""

    EQUAL = "EQ"
    AT_LEAST = "GE"
    AT_MOST = "LE"
    DIFFERENT = "NE"


@dataclass(frozen=True, slots=True)
class StatusFilter:
    """Selects lines by comparing the response code (0 if there is none) with ``value``."""

    comparison: Comparison
    value: int


@dataclass(frozen=True, slots=True)
class DurationFilter:
    """Selects lines by comparing the duration in whole milliseconds with ``value``."""

    comparison: Comparison
    value: int


@dataclass(frozen=True, slots=True)
class FlagFilter:
    """Selects lines with one of the response flags, or with any flag if none is named."""

    flags: frozenset[str]


@dataclass(frozen=True, slots=True)
class AllFilters:
    """Selects lines that every filter selects. Without filters it selects all."""

    filters: tuple["LogFilter", ...] = ()


@dataclass(frozen=True, slots=True)
class AnyFilter:
    """Selects lines that at least one filter selects."""

    filters: tuple["LogFilter", ...]


LogFilter: TypeAlias = StatusFilter | DurationFilter | FlagFilter | AllFilters | AnyFilter


@dataclass(frozen=True, slots=True)
class AccessLog:
    """An access logger that writes lines: its file and their format.

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
        flush_interval_s: the longest time that an entry waits before it is sent.
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
    """An access logger that sends entries: its stream, and the additional fields of an entry.

    Attributes:
        request_headers: names in lower case.
        filter: selects the connections that get an entry. None selects all.
    """

    stream: LogStream
    request_headers: tuple[str, ...] = ()
    filter: LogFilter | None = None


AnyAccessLog: TypeAlias = AccessLog | GrpcAccessLog
