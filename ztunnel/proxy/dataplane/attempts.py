"""How often a connection is tried, as a value: an attempt failed, so try again or give up. Pure.

An attempt ends with an upstream or an error. Before the upstream has answered, the client's bytes are in the
kernel, and another endpoint can be tried. What must never be tried again is an attempt whose peer may have got
bytes of the client, because they would be delivered twice: :attr:`Attempts.repeatable` judges the error.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum
from typing import Final, Generic, TypeVar

#: No further endpoint is tried after this time: applications have a patience of their own.
RETRY_WINDOW_S: Final = 15.0

#: How long a peer may take to answer a CONNECT. It dials its application first, for which it has ten seconds
#: (Rust ztunnel's and our own limit). An answer that is late ends the attempts, whatever the window says: the
#: application may have got bytes that went along with the CONNECT. Not shorter than the window, so
#: that a single slow peer is not given up earlier than a row of failing ones.
ANSWER_TIMEOUT_S: Final = 15.0

EndpointT = TypeVar("EndpointT")


class Reason(Enum):
    """Why no further attempt is made."""

    FINAL_ERROR = "the error must not be repeated elsewhere"
    NO_RETRIES = "no attempt is left"
    TIME_LIMIT = "the time for attempts is over"


@dataclass(frozen=True, slots=True)
class Again:
    """Try again; ``failures`` attempts have failed, from which a caller that backs off takes the pause."""

    failures: int


@dataclass(frozen=True, slots=True)
class GiveUp:
    """Report the error."""

    reason: Reason


@dataclass(slots=True)
class Attempts(Generic[EndpointT]):
    """The attempts of one connection.

    Attributes:
        retries_left: how many attempts may follow the first.
        repeatable: whether an error may be answered by another attempt.
        until_s: on the caller's clock; later failures are not followed by another attempt.
        avoid: endpoints that have failed; the next attempt should take others.
        failures: attempts that have failed.
    """

    retries_left: int
    repeatable: Callable[[Exception], bool]
    until_s: float = math.inf
    avoid: frozenset[EndpointT] = field(default_factory=frozenset)
    failures: int = 0

    def failed(self, error: Exception, now_s: float, endpoint: EndpointT | None = None) -> Again | GiveUp:
        """Decide what follows a failed attempt.

        Args:
            error: what it failed with.
            now_s: the caller's clock.
            endpoint: what was tried; ``None`` when nothing else could be.
        """
        self.failures += 1
        if endpoint is None or not self.repeatable(error):
            return GiveUp(Reason.FINAL_ERROR)
        self.avoid |= {endpoint}
        if self.retries_left <= 0:
            return GiveUp(Reason.NO_RETRIES)
        if now_s > self.until_s:
            return GiveUp(Reason.TIME_LIMIT)
        self.retries_left -= 1
        return Again(self.failures)
