"""Access loggers."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from xds.model.format_string import FormatString

JsonValue: TypeAlias = "FormatString | Mapping[str, JsonValue] | Sequence[JsonValue] | str | float | bool | None"


@dataclass(frozen=True, slots=True)
class JsonFormat:
    """One JSON object per line; values are format strings, nested objects or lists of such."""

    fields: Mapping[str, JsonValue]


@dataclass(frozen=True, slots=True)
class AccessLog:
    """Where a line goes and how it reads.

    Attributes:
        path: a file; ``/dev/stdout`` and ``/dev/stderr`` are the process's own.
        omit_empty: leave out JSON fields, print nothing instead of ``-`` in text.
    """

    path: str
    format: FormatString | JsonFormat
    omit_empty: bool = False
