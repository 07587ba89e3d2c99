"""Reads ``traceparent`` (W3C trace context, 3.2). This module needs no library, so front ends can use it
cheaply.
"""

import re
from typing import Final, NamedTuple

#: Versions after 00 may add fields at the end. Version ff is invalid, and so are ids that consist of zeros.
_TRACEPARENT: Final = re.compile(
    rb"(?!ff)([0-9a-f]{2})-(?!0{32})([0-9a-f]{32})-(?!0{16})([0-9a-f]{16})-([0-9a-f]{2})(-.*)?"
)


class Trace(NamedTuple):
    """The content of a ``traceparent``.

    Attributes:
        trace_id: 128 bits.
        span_id: 64 bits, which identify the sender's span.
        flags: 8 bits.
    """

    trace_id: int
    span_id: int
    flags: int

    @property
    def sampled(self) -> bool:
        """Whether the sender has recorded its span, and asks the receivers to record theirs."""
        return bool(self.flags & 1)


def parse_traceparent(value: bytes) -> Trace | None:
    """Return the content of a ``traceparent``. None if it is empty or invalid, which means that there is no
    trace.
    """
    found = _TRACEPARENT.fullmatch(value)
    if found is None or (found[1] == b"00" and found[5] is not None):
        return None
    return Trace(int(found[2], 16), int(found[3], 16), int(found[4], 16))
