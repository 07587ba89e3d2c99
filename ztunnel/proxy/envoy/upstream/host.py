"""Upstream hosts, and a cluster's hosts by priority and locality."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import zip_longest

from xds.model.address import EndpointAddress
from xds.model.cluster import Endpoint, Health, LoadAssignment, Locality


@dataclass(slots=True, eq=False)
class Host:
    """An endpoint with its state in this process.

    EDS updates that do not change the address keep this object. So counters, ejection and slow start continue. The
    counters are named as in ``/clusters``.
    """

    endpoint: Endpoint
    added_at: float = 0.0
    cx_active: int = 0
    cx_connect_fail: int = 0
    cx_total: int = 0
    rq_active: int = 0
    rq_success: int = 0
    rq_total: int = 0
    ejected: bool = False
    failed_check: bool = False
    """Whether the cluster's health checks consider the host unhealthy."""
    leaving: bool = False
    """Whether discovery has removed the host, which stays as long as it passes its health checks."""

    @property
    def active(self) -> int:
        """The number of open connections and streams. Least-request balancing compares hosts by this number."""
        return self.cx_active + self.rq_active

    @property
    def healthy(self) -> bool:
        """Whether the host is healthy according to discovery and health checks, and not ejected."""
        return not (self.ejected or self.failed_check) and self.endpoint.health in (Health.HEALTHY, Health.UNKNOWN)

    @property
    def degraded(self) -> bool:
        """Whether the host is degraded: used only if too few hosts are healthy."""
        return not (self.ejected or self.failed_check) and self.endpoint.health is Health.DEGRADED

    @property
    def flags(self) -> str:
        """The text of ``health_flags`` in the page ``/clusters``."""
        flags = []
        if self.failed_check:
            flags.append("/failed_active_hc")
        if self.ejected:
            flags.append("/failed_outlier_check")
        if self.endpoint.health in (Health.UNHEALTHY, Health.DRAINING, Health.TIMEOUT):
            flags.append("/failed_eds_health")
        elif self.endpoint.health is Health.DEGRADED:
            flags.append("/degraded_eds_health")
        if self.leaving:
            flags.append("/pending_dynamic_removal")
        return "".join(flags) or "healthy"

    def __str__(self) -> str:
        return self.endpoint.key


@dataclass(slots=True)
class HostGroup:
    """The hosts of one locality at one priority level. ``weight`` 0 means that no weight is set."""

    locality: Locality
    weight: int
    hosts: list[Host]


@dataclass(slots=True)
class PriorityLevel:
    """The hosts of one priority level, grouped by locality and by health."""

    groups: list[HostGroup]
    hosts: Sequence[Host] = ()
    healthy: Sequence[Host] = ()
    degraded: Sequence[Host] = ()

    def refresh(self) -> None:
        """Group the hosts by health again. Called after each change of health or ejection."""
        hosts = (
            self.groups[0].hosts if len(self.groups) == 1 else [h for group in self.groups for h in group.hosts]
        )
        healthy = [host for host in hosts if host.healthy]
        self.hosts = hosts
        # If every host is healthy, which is usual, ``hosts`` and ``healthy`` are the same list, to save memory.
        self.healthy = hosts if len(healthy) == len(hosts) else healthy
        self.degraded = [h for h in hosts if h.degraded] if len(healthy) < len(hosts) else ()


class HostSet:
    """The hosts of a cluster by priority.

    Attributes:
        changes: how often hosts were added or removed (``membership_change``), including ORIGINAL_DST hosts.
    """

    __slots__ = ("_by_address", "changes", "levels", "overprovisioning", "weighted_health")

    def __init__(self) -> None:
        self.levels: list[PriorityLevel] = []
        self.overprovisioning = 1.4
        self.weighted_health = False
        self.changes = 0
        self._by_address: dict[EndpointAddress, Host] = {}

    def __len__(self) -> int:
        return len(self._by_address)

    @property
    def hosts(self) -> Sequence[Host]:
        """All hosts, in configured order."""
        return list(self._by_address.values())

    def get(self, address: EndpointAddress) -> Host | None:
        """Return the host at an address, or None."""
        return self._by_address.get(address)

    def assign(self, assignment: LoadAssignment, now: float) -> list[Host]:
        """Replace the hosts by the endpoints of ``assignment``, and return the removed hosts.

        If an address occurs before and after, its host object stays, with a new endpoint (health, weight,
        metadata).
        """
        old = self._by_address
        self._by_address = {}
        top = max((group.priority for group in assignment.groups), default=-1)
        levels = [PriorityLevel([]) for _ in range(top + 1)]
        for group in assignment.groups:
            hosts: list[Host] = []
            for endpoint in group.endpoints:
                if endpoint.address in self._by_address:
                    continue
                host = old.get(endpoint.address)
                if host is None:
                    host = Host(endpoint, added_at=now)
                else:
                    host.endpoint = endpoint
                self._by_address[endpoint.address] = host
                hosts.append(host)
            levels[group.priority].groups.append(HostGroup(group.locality, group.weight, hosts))
        for before, after in zip_longest(self.levels, levels):
            self.changes += _members(before) != _members(after)
        self.levels = levels
        self.overprovisioning = assignment.overprovisioning_factor / 100
        self.weighted_health = assignment.weighted_priority_health
        self.refresh()
        return [host for address, host in old.items() if address not in self._by_address]

    def filtered(self, keep: Callable[[Host], bool]) -> "HostSet":
        """Return a copy of the host set, reduced to the hosts that ``keep`` accepts."""
        part = HostSet()
        part.overprovisioning = self.overprovisioning
        part.weighted_health = self.weighted_health
        part._by_address = {address: host for address, host in self._by_address.items() if keep(host)}
        part.levels = [
            PriorityLevel(
                [
                    HostGroup(group.locality, group.weight, [h for h in group.hosts if keep(h)])
                    for group in level.groups
                ]
            )
            for level in self.levels
        ]
        part.refresh()
        return part

    def refresh(self) -> None:
        """Group the hosts of every priority level by health again."""
        for level in self.levels:
            level.refresh()

    @property
    def healthy_count(self) -> int:
        """The number of healthy hosts in this set."""
        return sum(len(level.healthy) for level in self.levels)

    @property
    def degraded_count(self) -> int:
        """The number of degraded hosts in this set."""
        return sum(len(level.degraded) for level in self.levels)


def _members(level: PriorityLevel | None) -> set[Host]:
    return set() if level is None else {host for group in level.groups for host in group.hosts}
