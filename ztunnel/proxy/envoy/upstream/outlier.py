"""Outlier detection: ejects failing hosts for some seconds. Pure; time is an argument.

Results are counted as by Envoy's TCP proxy, also with ``tunneling_config``. Each failure to open a connection or a
tunnel, including a CONNECT whose answer is not 200, has a local origin. Without
``split_external_local_origin_errors`` it counts as a 503, thus as a 5xx and as a gateway failure. With it, these
failures and rates have a local origin only, and ``consecutive_5xx`` and ``consecutive_gateway_failure`` have no
effect. Envoy 1.40 was seen to count so for answers with 403, 500 and 503, resets, and closed connections; only its
HTTP router reports failures of external origin. A success resets the numbers of consecutive failures.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum

from xds.model.cluster import OutlierDetection
from ztunnel.proxy.envoy.upstream.host import Host


class Result(Enum):
    """The outcome of an attempt to open a connection or a tunnel."""

    SUCCESS = "success"
    FAILURE = "failure"


@dataclass(slots=True)
class _Monitor:
    consecutive_5xx: int = 0
    consecutive_gateway: int = 0
    consecutive_local: int = 0
    requests: int = 0
    successes: int = 0
    ejections: int = 0
    ejected_until: float = 0.0


class OutlierDetector:
    """Outlier detection for one cluster: counts failures of its hosts, and ejects hosts.

    Args:
        settings: thresholds.
        changed: called after a host's ``ejected`` flag changed, to recompute balancing.
        chance: returns random numbers, uniform in [0, 100), for enforcement percentages.
    """

    def __init__(
        self, settings: OutlierDetection, changed: Callable[[], None], chance: Callable[[], float]
    ) -> None:
        self._settings = settings
        self._changed = changed
        self._chance = chance
        self._monitors: dict[Host, _Monitor] = {}
        self.ejections_active = 0
        self.ejections_overflow = 0

    def forget(self, host: Host) -> None:
        """Drop the state of a host that has left the cluster. Idempotent."""
        if self._monitors.pop(host, None) is not None and host.ejected:
            self.ejections_active -= 1

    def report(self, host: Host, result: Result, hosts: Sequence[Host], now: float) -> None:
        """Record the outcome of an attempt to connect to ``host``. ``hosts`` are all hosts of the cluster."""
        settings = self._settings
        monitor = self._monitors.setdefault(host, _Monitor())
        monitor.requests += 1
        if result is Result.SUCCESS:
            monitor.successes += 1
            monitor.consecutive_5xx = monitor.consecutive_gateway = monitor.consecutive_local = 0
            return
        if settings.split_external_local_origin_errors:
            monitor.consecutive_local += 1
            if monitor.consecutive_local >= settings.consecutive_local_origin_failure:
                monitor.consecutive_local = 0
                self._eject(host, settings.enforcing_consecutive_local_origin_failure, hosts, now)
            return
        monitor.consecutive_5xx += 1
        monitor.consecutive_gateway += 1
        if monitor.consecutive_gateway >= settings.consecutive_gateway_failure:
            monitor.consecutive_gateway = 0
            self._eject(host, settings.enforcing_consecutive_gateway_failure, hosts, now)
        if monitor.consecutive_5xx >= settings.consecutive_5xx:
            monitor.consecutive_5xx = 0
            self._eject(host, settings.enforcing_consecutive_5xx, hosts, now)

    def tick(self, hosts: Sequence[Host], now: float) -> None:
        """Readmit hosts whose ejection has ended, evaluate success rates, and begin a new interval. Called every
        ``interval_s``.
        """
        returned = False
        for host, monitor in self._monitors.items():
            if host.ejected and now >= monitor.ejected_until:
                host.ejected = False
                self.ejections_active -= 1
                returned = True
            elif (
                not host.ejected and monitor.ejections and now >= monitor.ejected_until + self._settings.interval_s
            ):
                monitor.ejections -= 1
        if returned:
            self._changed()
        self._judge_success_rates(hosts, now)
        self._judge_failure_percentages(hosts, now)
        for monitor in self._monitors.values():
            monitor.requests = monitor.successes = 0

    def passed_check(self, host: Host) -> None:
        """Readmit an ejected host that has passed a health check, if configured."""
        monitor = self._monitors.get(host)
        if self._settings.uneject_on_check and monitor is not None and host.ejected:
            host.ejected = False
            self.ejections_active -= 1
            monitor.consecutive_5xx = monitor.consecutive_gateway = monitor.consecutive_local = 0
            self._changed()

    def _judge_success_rates(self, hosts: Sequence[Host], now: float) -> None:
        settings = self._settings
        split = settings.split_external_local_origin_errors
        enforcing = settings.enforcing_local_origin_success_rate if split else settings.enforcing_success_rate
        if not enforcing:
            return
        rates = self._rates(settings.success_rate_request_volume)
        if len(rates) < settings.success_rate_minimum_hosts:
            return
        mean = sum(rates.values()) / len(rates)
        deviation = (sum((rate - mean) ** 2 for rate in rates.values()) / len(rates)) ** 0.5
        threshold = mean - deviation * settings.success_rate_stdev_factor / 1000
        for host, rate in rates.items():
            if rate < threshold:
                self._eject(host, enforcing, hosts, now)

    def _judge_failure_percentages(self, hosts: Sequence[Host], now: float) -> None:
        settings = self._settings
        enforcing = settings.enforcing_failure_percentage
        if settings.split_external_local_origin_errors:
            enforcing = settings.enforcing_failure_percentage_local_origin
        if not enforcing:
            return
        rates = self._rates(settings.failure_percentage_request_volume)
        if len(rates) < settings.failure_percentage_minimum_hosts:
            return
        for host, rate in rates.items():
            if 100 - rate >= settings.failure_percentage_threshold:
                self._eject(host, enforcing, hosts, now)

    def _rates(self, volume: int) -> dict[Host, float]:
        return {
            host: 100 * monitor.successes / monitor.requests
            for host, monitor in self._monitors.items()
            if monitor.requests >= volume and not host.ejected
        }

    def _eject(self, host: Host, enforcing: int, hosts: Sequence[Host], now: float) -> None:
        settings = self._settings
        if host.ejected or self._chance() >= enforcing:
            return
        share = 100 * (self.ejections_active + 1) / max(1, len(hosts))
        first_allowed = settings.always_eject_one_host and self.ejections_active == 0
        if share > settings.max_ejection_percent and not first_allowed:
            self.ejections_overflow += 1
            return
        monitor = self._monitors[host]
        monitor.ejections += 1
        duration = min(settings.base_ejection_time_s * monitor.ejections, settings.max_ejection_time_s)
        monitor.ejected_until = now + duration + settings.max_ejection_jitter_s * self._chance() / 100
        host.ejected = True
        self.ejections_active += 1
        self._changed()
