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
        omit_empty: leave out JSON fields, print nothing instead of ``-`` in text.
        filter: which lines are written; None: all.
    """

    path: str
    format: FormatString | JsonFormat
    omit_empty: bool = False
    filter: LogFilter | None = None
