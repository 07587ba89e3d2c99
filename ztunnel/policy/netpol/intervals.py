"""Arithmetic of address ranges: unions and differences of networks, as disjoint intervals. Pure."""

from collections.abc import Iterable, Iterator
from typing import TypeAlias

from xds.model.address import IpNetwork

#: The first and the last address of a range, both inclusive.
Interval: TypeAlias = tuple[int, int]


def ranges_of(networks: Iterable[IpNetwork], version: int) -> list[Interval]:
    """Return the networks of one IP version as sorted intervals that neither overlap nor touch."""
    return merged(
        (int(network.network_address), int(network.broadcast_address))
        for network in networks
        if network.version == version
    )


def merged(intervals: Iterable[Interval]) -> list[Interval]:
    """Return the union of intervals, sorted. Adjacent intervals are joined."""
    found: list[Interval] = []
    for first, last in sorted(intervals):
        if found and first <= found[-1][1] + 1:
            found[-1] = (found[-1][0], max(found[-1][1], last))
        else:
            found.append((first, last))
    return found


def without(intervals: Iterable[Interval], holes: Iterable[Interval]) -> Iterator[Interval]:
    """Yield the parts of sorted disjoint intervals that are outside sorted disjoint holes."""
    cuts = list(holes)
    for first, last in intervals:
        start = first
        for hole_first, hole_last in cuts:
            if hole_last < start:
                continue
            if hole_first > last:
                break
            if hole_first > start:
                yield start, hole_first - 1
            start = hole_last + 1
        if start <= last:
            yield start, last
