"""Decides after a failed connection attempt whether to try another endpoint or to give up. Pure.

An attempt ends with an open upstream or an error. Until an upstream answers, the client's bytes stay in the
kernel, so that another endpoint can be tried. If the failed endpoint has possibly received bytes of the client, no
other endpoint is tried, because these bytes could be delivered twice. :attr:`Attempts.repeatable` decides this by
the error.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum
from typing import Final, Generic, TypeVar

#: No further endpoint is tried after this many seconds, because applications have their own timeouts.
RETRY_WINDOW_S: Final = 15.0

#: The longest wait for the answer to a CONNECT. Before answering, the tunnel's far end dials its application, with
#: a limit of ten seconds (in the Rust ztunnel and here). After this timeout no other endpoint is tried, because
#: the application has possibly received bytes that were sent along with the CONNECT. It is at least as long as the
#: retry window, so that a single slow endpoint gets no less time than a series of failing endpoints.
ANSWER_TIMEOUT_S: Final = 15.0

EndpointT = TypeVar("EndpointT")


class Reason(Enum):
    """The reasons for not making another attempt."""

    FINAL_ERROR = "the error must not be repeated elsewhere"
    NO_RETRIES = "no attempt is left"
    TIME_LIMIT = "the time for attempts is over"


@dataclass(frozen=True, slots=True)
class Again:
    """The decision to try another endpoint. ``failures`` is the number of failed attempts, for the back-off."""

    failures: int


@dataclass(frozen=True, slots=True)
class GiveUp:
    """The decision to give up and report the error."""

    reason: Reason


@dataclass(slots=True)
class Attempts(Generic[EndpointT]):
    """The attempts of one connection.

    Attributes:
        retries_left: the number of further attempts that are allowed.
        repeatable: whether another attempt can follow an error.
        until_s: the time limit for retries, on the caller's clock.
        avoid: the failed endpoints, which the next attempt should avoid.
        failures: the number of failed attempts.
    """

    retries_left: int
    repeatable: Callable[[Exception], bool]
    until_s: float = math.inf
    avoid: frozenset[EndpointT] = field(default_factory=frozenset)
    failures: int = 0

    def failed(self, error: Exception, now_s: float, endpoint: EndpointT | None = None) -> Again | GiveUp:
        """Decide what follows a failed attempt.

        Args:
            error: the failed attempt's error.
            now_s: the caller's clock.
            endpoint: the endpoint of this attempt, or ``None`` if no other endpoint can be tried.
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
