"""Checks the health of each host in one cluster until the host leaves the cluster."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, Protocol

from xds.model.health_check import HealthCheck
from ztunnel.proxy.envoy.stats.stats import Scope
from ztunnel.proxy.envoy.upstream.health_state import CheckResult, HealthState
from ztunnel.proxy.envoy.upstream.host import Host
from ztunnel.runtime.latch import Latch
from ztunnel.runtime.tasks import Tasks

log = logging.getLogger(__name__)


class Probe(Protocol):
    """Checks a host once."""

    async def __call__(self, host: Host) -> CheckResult:
        """Probe a host within the check's time limit, and return the outcome. Never raises."""
        ...


class HealthChecker:
    """The health checks of one cluster.

    Args:
        settings: the cluster's health check.
        probe: probes a host.
        changed: called when a host has become healthy or unhealthy.
        passed: called with each host that has passed a check.
        has_traffic: whether the cluster has ever had a connection.
        chance: returns random numbers, uniform in [0, 1).
        scope: the scope of the cluster's statistics.

    Attributes:
        settled: set once each host of the first assignment has been checked.
    """

    def __init__(
        self,
        settings: HealthCheck,
        probe: Probe,
        *,
        name: str,
        changed: Callable[[Host], None],
        passed: Callable[[Host], None],
        has_traffic: Callable[[], bool],
        chance: Callable[[], float],
        scope: Scope,
    ) -> None:
        self._settings = settings
        self._probe = probe
        self._name = name
        self._changed = changed
        self._passed = passed
        self._has_traffic = has_traffic
        self._chance = chance
        self._checks: dict[Host, asyncio.Task[Any] | None] = {}
        self._tasks = Tasks(f"health checks of {name}")
        self._begun = False
        self._unchecked: set[Host] = set()
        self.settled = Latch()
        self._attempts = scope.counter("health_check.attempt")
        self._successes = scope.counter("health_check.success")
        self._failures = scope.counter("health_check.failure")
        self._no_answers = scope.counter("health_check.network_failure")
        scope.gauge("health_check.healthy", lambda: float(sum(not host.failed_check for host in self._checks)))

    def checks(self, host: Host) -> bool:
        """Return whether this object checks the health of a host."""
        return host in self._checks

    def follow(self, hosts: Iterable[Host]) -> None:
        """Replace the set of hosts to check. A new host is unhealthy until its first check."""
        wanted = {host for host in hosts if host.endpoint.check is None or not host.endpoint.check.disabled}
        for host in self._checks.keys() - wanted:
            task = self._checks.pop(host)
            if task is not None:
                task.cancel()
            host.failed_check = False
            self._unchecked.discard(host)
        for host in wanted - self._checks.keys():
            host.failed_check = True
            self._unchecked.add(host)
            self._checks[host] = self._started(host) if self._begun else None
        self._settle()

    def begin(self) -> None:
        """Start checking. Call it when the hosts and the secrets for probes are known."""
        self._begun = True
        for host in self._checks:
            self._checks[host] = self._started(host)
        self._settle()

    def _started(self, host: Host) -> asyncio.Task[Any]:
        return self._tasks.keep(partial(self._check_for_ever, host), str(host))

    def _settle(self) -> None:
        if self._begun and not self._unchecked:
            self.settled.set()

    async def _check_for_ever(self, host: Host) -> None:
        # This coroutine restarts after an internal error, so it begins with the host's current health.
        settings, state = self._settings, HealthState(failed=host.failed_check)
        if settings.initial_jitter_s:
            await asyncio.sleep(self._chance() * settings.initial_jitter_s)
        while True:
            self._attempts.value += 1
            result = await self._probe(host)
            if result is CheckResult.PASSED:
                self._successes.value += 1
            else:
                self._failures.value += 1
                self._no_answers.value += result is CheckResult.NO_ANSWER
            changed = state.take(result, settings)
            self._unchecked.discard(host)
            if changed:
                host.failed_check = state.failed
                word = "unhealthy" if state.failed else "healthy"
                log.info("cluster %s: host %s is %s: its check %s", self._name, host, word, result.value)
                self._changed(host)
            if result is CheckResult.PASSED:
                self._passed(host)
            self._settle()
            traffic = self._has_traffic()
            await asyncio.sleep(state.wait_s(settings, changed=changed, traffic=traffic, chance=self._chance))

    async def close(self) -> None:
        """Stop all checks; idempotent."""
        self._checks.clear()
        await self._tasks.close()
