"""An access line on its way to the collector. No library is needed for one, so that a front end can make it."""

from collections.abc import Iterable, Mapping
from typing import NamedTuple, Protocol

Field = tuple[str, str | int]


class SharedFields(Protocol):
    """Fields that many lines have in common, such as :class:`ztunnel.istio.logs.Recurring`."""

    @property
    def fields(self) -> tuple[Field, ...]:
        """Names and values."""


class Line(NamedTuple):
    """Attributes:
    time_s: wall clock.
    level: ``trace`` to ``error``.
    message: without fields.
    parts: fields; read once, by another thread, and not changed any more.
    trace: the value of ``traceparent`` that came or went with the connection's tunnel; empty: none.
    """

    time_s: float
    level: str
    message: str
    parts: Iterable[Field | SharedFields]
    trace: bytes

    def fields(self) -> Mapping[str, str | int]:
        """Return all fields."""
        found: dict[str, str | int] = {}
        for part in self.parts:
            if isinstance(part, tuple):
                found[part[0]] = part[1]
            else:
                found.update(part.fields)
        return found
