"""An access line on its way to the collector. This module needs no library, so front ends can create lines
cheaply.
"""

from collections.abc import Iterable, Mapping
from typing import NamedTuple, Protocol

from ztunnel.proxy.otlp.trace import Trace

Field = tuple[str, str | int]


class SharedFields(Protocol):
    """Fields that many lines share, such as :class:`ztunnel.proxy.istio.accounting.line_rendering.Recurring`."""

    @property
    def fields(self) -> tuple[Field, ...]:
        """Names and values."""


class Line(NamedTuple):
    """An access line.

    Attributes:
        time_s: wall clock.
        level: ``trace`` to ``error``.
        message: the text of the line without its fields.
        parts: the fields. Another thread reads them once, so they must not change.
        trace: the trace named by the tunnel's ``traceparent``, if any.
        span_id: the span that this proxy created for the connection. 0 if it created none.
    """

    time_s: float
    level: str
    message: str
    parts: Iterable[Field | SharedFields]
    trace: Trace | None
    span_id: int = 0

    def fields(self) -> Mapping[str, str | int]:
        """Return all fields."""
        found: dict[str, str | int] = {}
        for part in self.parts:
            if isinstance(part, tuple):
                found[part[0]] = part[1]
            else:
                found.update(part.fields)
        return found
