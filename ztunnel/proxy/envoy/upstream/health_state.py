"""Decides from the results of health checks whether a host is healthy, and when to probe it again. Pure.

Like in Envoy, a new host is unhealthy until its first check, and the result of this check applies at once. Later,
the health changes after a number of consecutive results (the threshold), or at once if the host itself answers
that it is unhealthy.
"""

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum

from xds.model.health_check import HealthCheck


class CheckResult(Enum):
    """The outcome of one health check."""

    PASSED = "passed"
    NO_ANSWER = "no answer"
    REFUSED = "refused"


@dataclass(slots=True)
class HealthState:
    """The state of one host's health checks.

    Attributes:
        failed: whether the host is unhealthy.
        first: whether no check has finished yet.
        in_a_row: the number of consecutive results that contradict ``failed``.
    """

    failed: bool = True
    first: bool = True
    in_a_row: int = 0

    def take(self, result: CheckResult, settings: HealthCheck) -> bool:
        """Apply a check's result. Return whether the host's health has changed."""
        passed = result is CheckResult.PASSED
        first, self.first = self.first, False
        if passed is not self.failed:  # the result agrees with the state
            self.in_a_row = 0
            return False
        self.in_a_row += 1
        if passed:
            enough = first or self.in_a_row >= settings.healthy_threshold
        else:
            enough = result is CheckResult.REFUSED or self.in_a_row >= settings.unhealthy_threshold
        if not enough:
            return False
        self.in_a_row = 0
        self.failed = not passed
        return True

    def wait_s(self, settings: HealthCheck, *, changed: bool, traffic: bool, chance: Callable[[], float]) -> float:
        """Return the time until the next check.

        Args:
            settings: the cluster's health check.
            changed: whether the last result changed the state.
            traffic: whether the cluster has ever had a connection.
            chance: uniform in [0, 1), for the jitter.
        """
        if not traffic:
            base = settings.no_traffic_s if self.failed else settings.no_traffic_healthy_s
        elif changed:
            base = settings.unhealthy_edge_s if self.failed else settings.healthy_edge_s
        else:
            base = settings.unhealthy_interval_s if self.failed else settings.interval_s
        return base + chance() * settings.jitter_s + chance() * settings.jitter_share * base
