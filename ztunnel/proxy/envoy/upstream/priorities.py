"""Computes the spread of load over priority levels and localities, in whole percent, like Envoy."""

from collections.abc import Sequence
from dataclasses import dataclass

from ztunnel.proxy.envoy.upstream.host import Host, PriorityLevel


@dataclass(frozen=True, slots=True)
class LevelLoad:
    """The share of connections that a priority level gets, in percent. With ``panic``, unhealthy hosts are chosen,
    too.
    """

    healthy: int
    degraded: int
    panic: bool


def spread(
    levels: Sequence[PriorityLevel], overprovisioning: float, panic_threshold: float, *, weighted: bool = False
) -> list[LevelLoad]:
    """Return the load of each priority level.

    A level takes ``usable / all * overprovisioning`` of the remaining load, first for healthy hosts on all levels,
    then for degraded hosts. If all levels together cannot take 100 %, each level whose usable share is below
    ``panic_threshold`` percent panics. If every level panics, the load is proportional to the number of hosts.
    With ``weighted``, usable hosts count by weight, but panic depends on their number.
    """
    size = _weight if weighted else len
    healthy = [_availability(size(level.healthy), size(level.hosts), overprovisioning) for level in levels]
    degraded = [_availability(size(level.degraded), size(level.hosts), overprovisioning) for level in levels]
    total = min(100, sum(healthy) + sum(degraded))
    panic = [total < 100 and _in_panic(level, panic_threshold) for level in levels]
    if levels and all(panic):
        return _by_host_count(levels)
    if total == 0:
        return [LevelLoad(0, 0, False) for _ in levels]
    left = 100
    loads = []
    for shares in (healthy, degraded):
        taken = []
        for share in shares:
            load = min(left, share * 100 // total)
            left -= load
            taken.append(load)
        loads.append(taken)
    if left:  # the first level with any load also gets the rounding remainder
        for taken in loads:
            first = next((index for index, load in enumerate(taken) if load), None)
            if first is not None:
                taken[first] += left
                break
    return [LevelLoad(h, d, p) for h, d, p in zip(*loads, panic, strict=True)]


def _weight(hosts: Sequence[Host]) -> int:
    return sum(host.endpoint.weight for host in hosts)


def _availability(usable: int, hosts: int, overprovisioning: float) -> int:
    return min(100, int(100 * usable / hosts * overprovisioning)) if hosts else 0


def _in_panic(level: PriorityLevel, threshold: float) -> bool:
    if not level.hosts:
        return threshold > 0
    return 100 * (len(level.healthy) + len(level.degraded)) / len(level.hosts) < threshold


def _by_host_count(levels: Sequence[PriorityLevel]) -> list[LevelLoad]:
    count = sum(len(level.hosts) for level in levels)
    if count == 0:
        return [LevelLoad(0, 0, True) for _ in levels]
    loads = [len(level.hosts) * 100 // count for level in levels]
    first = next(index for index, level in enumerate(levels) if level.hosts)
    loads[first] += 100 - sum(loads)
    return [LevelLoad(load, 0, True) for load in loads]
