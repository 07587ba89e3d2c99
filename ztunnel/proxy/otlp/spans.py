"""Decides, at a connection's last access line, whether a span is exported for the connection, and builds the span.

A span is created only if the tunnel's ``traceparent`` has the sampled flag. For traces that begin in this proxy,
the operator configures which ones have it (``OTEL_TRACES_SAMPLER``).
"""

import random
from enum import Enum, auto
from typing import Final, NamedTuple

from ztunnel.proxy.otlp.line import Line
from ztunnel.proxy.otlp.trace import Trace

#: The messages of access lines that end a connection. Each connection has exactly one such line.
_ENDS: Final = frozenset({"connection complete", "connection failed"})


class Kind(Enum):
    """Which side of the request a span describes, in OpenTelemetry's words."""

    CLIENT = auto()
    SERVER = auto()


class Span(NamedTuple):
    """The span of an ended connection.

    Attributes:
        line: the final access line, with the span's identifier.
        trace: the span's trace. Its ``span_id`` is the parent of a server's span.
        kind: which side of the request the span describes.
        duration_s: the connection's duration in whole milliseconds, as in the line. 0 if it never opened.
    """

    line: Line
    trace: Trace
    kind: Kind
    duration_s: float


def span_of(line: Line, trace: Trace, rng: random.Random) -> Span | None:
    """Return the span of the connection that an access line ends, or None if it does not end one.

    Args:
        line: the access line of a connection with a sampled trace.
        trace: the trace.
        rng: generates the identifier of a server's span. A client's identifier is in its ``traceparent``.
    """
    if line.message not in _ENDS:
        return None
    fields = line.fields()
    kind = Kind.SERVER if fields.get("direction") == "inbound" else Kind.CLIENT
    span_id = trace.span_id if kind is Kind.CLIENT else rng.randrange(1, 2**64)
    duration = str(fields.get("duration", "0ms"))
    return Span(line._replace(span_id=span_id), trace, kind, int(duration.removesuffix("ms")) / 1000)
