"""The waits before a client connects to its control plane again, and the reasons why a stream ended.

These classes only compute the waits. ``xds/aio/client.py`` waits.
"""

from dataclasses import dataclass
from enum import StrEnum


class StreamEnd(StrEnum):
    """Why an xDS stream ended, in the words of the metrics."""

    CONNECTION_ERROR = "ConnectionError"
    RECONNECT = "Reconnect"
    ERROR = "Error"
    COMPLETE = "Complete"


#: Parts of status texts that gRPC's Go and C servers, and proxies in between, produce when they close a connection
#: on purpose.
_GOODBYES = (
    "transport is closing",
    "received prior goaway",
    "goaway received",
    "socket closed",
    "connection reset",
)


def stream_end(status: str, details: str, *, answered: bool) -> StreamEnd:
    """Return why a stream ended, from its gRPC status.

    Args:
        status: the status in capitals, such as ``UNAVAILABLE``.
        details: the text of the status.
        answered: whether the stream had received a message.
    """
    if status == "OK":
        return StreamEnd.COMPLETE
    if status in ("UNKNOWN", "CANCELLED", "DEADLINE_EXCEEDED"):
        return StreamEnd.RECONNECT
    if status == "UNAVAILABLE":
        if not answered:
            return StreamEnd.CONNECTION_ERROR
        if any(goodbye in details.lower() for goodbye in _GOODBYES):
            return StreamEnd.RECONNECT
    return StreamEnd.ERROR


@dataclass(slots=True)
class JitteredBackoff:
    """Envoy's jittered exponential back-off: a random wait below a ceiling, which doubles up to a maximum."""

    base_s: float = 0.5
    max_s: float = 30.0
    _ceiling_s: float = 0.0

    def next(self, random: float) -> float:
        """Return the next wait in seconds for a random number from [0, 1)."""
        self._ceiling_s = min(max(self._ceiling_s * 2, self.base_s), self.max_s)
        return self._ceiling_s * random

    def reset(self) -> None:
        """Reset the ceiling to the base, because a stream has worked."""
        self._ceiling_s = 0.0

    def ended(self, end: StreamEnd) -> None:
        """Leave the wait unchanged: here only :meth:`reset` affects the next wait, not the end of a stream."""


@dataclass(slots=True)
class DoublingBackoff(JitteredBackoff):
    """Waits that double while streams fail, like in the Rust ztunnel. Only the orderly end of a stream resets the
    wait.

    The only difference is the wait after an orderly end: the shortest wait here, none in the Rust ztunnel. So a
    server that ends every stream at once does not cause a busy loop.
    """

    base_s: float = 0.01
    max_s: float = 15.0
    _wait_s: float = 0.01

    def next(self, random: float) -> float:
        """Return the next wait in seconds."""
        return self._wait_s

    def reset(self) -> None:
        """Leave the wait unchanged: a stream that first worked and then failed still counts as a failure."""

    def ended(self, end: StreamEnd) -> None:
        """Double the wait, or after an orderly end reset it."""
        if end in (StreamEnd.RECONNECT, StreamEnd.COMPLETE):
            self._wait_s = self.base_s
        else:
            self._wait_s = min(self._wait_s * 2, self.max_s)
