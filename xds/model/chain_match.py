"""Chooses a filter chain by ``filter_chain_match``, without a matcher tree.

The criteria are applied one after the other. Each criterion keeps the chains with the most specific matching
value. A chain that is dropped once is never considered again. The order is Envoy's: destination port, destination
address, server name, transport protocol, application protocol, direct source address, source type, source address,
source port.
"""

import ipaddress
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from enum import Enum

from xds.model.address import IpNetwork
from xds.model.facts import ConnectionFacts
from xds.model.matcher import is_local, server_name_candidates


class SourceType(Enum):
    """The source type that ``filter_chain_match`` requires: this host, another host, or any."""

    ANY = 0
    SAME_IP_OR_LOOPBACK = 1
    EXTERNAL = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class ChainMatch:
    """The match criteria of one chain. An empty criterion always matches, with the lowest specificity."""

    destination_port: int | None = None
    destination: tuple[IpNetwork, ...] = ()
    server_names: tuple[str, ...] = ()
    transport_protocol: str = ""
    application_protocols: tuple[str, ...] = ()
    direct_source: tuple[IpNetwork, ...] = ()
    source_type: SourceType = SourceType.ANY
    source: tuple[IpNetwork, ...] = ()
    source_ports: tuple[int, ...] = ()


class ChainSelector:
    """The indexed chains of one listener. The cost of a choice does not grow with the number of per-pod chains.

    Chains are grouped by port, which is the first criterion. Within a group, chains that name single addresses are
    found in a dictionary. The other chains of a group are compared criterion by criterion.
    """

    __slots__ = ("_by_port", "_hosts", "_matches", "_only")

    def __init__(self, matches: Sequence[ChainMatch]) -> None:
        self._matches = tuple(matches)
        #: Whether there is only one chain, and it has no criteria. This is usual for internal listeners.
        self._only = self._matches == (ChainMatch(),)
        self._by_port: dict[int | None, _Group] = {}
        for index, match in enumerate(self._matches):
            self._by_port.setdefault(match.destination_port, _Group()).add(index, match)
        self._hosts = frozenset(
            str(net.network_address)
            for match in self._matches
            for net in match.destination
            if net.prefixlen == net.max_prefixlen
        )

    def names(self, host: str) -> bool:
        """Return whether any chain names this exact address as its destination."""
        return host in self._hosts

    def select(self, facts: ConnectionFacts) -> int | None:
        """Return the index of the chain that matches a connection most specifically, or ``None``. Of equal chains,
        the first wins.
        """
        if self._only:
            return 0
        group = self._by_port.get(facts.destination.port) or self._by_port.get(None)
        if group is None:
            return None
        only = group.sole.get(facts.destination.host)
        if only is not None:
            return only
        left = group.candidates(facts.destination.host)
        candidates = server_name_candidates(facts.server_name) if facts.server_name else []
        for rank in (
            lambda match: _longest(match.destination, facts.destination.host),
            lambda match: _server_name(match.server_names, candidates),
            lambda match: _exact(match.transport_protocol or None, facts.transport_protocol),
            lambda match: _preferred(match.application_protocols, facts.application_protocols),
            lambda match: _longest(match.direct_source, facts.direct_source.host),
            lambda match: _source_type(match.source_type, facts),
            lambda match: _longest(match.source, facts.source.host),
            lambda match: _overlap(match.source_ports, (facts.source.port,)),
        ):
            left = self._narrow(left, rank)
        return min(left, default=None)

    def _narrow(self, left: list[int], rank: Callable[[ChainMatch], int | None]) -> list[int]:
        """Return the candidate chains with the best rank by one criterion. A rank of ``None`` means no match."""
        ranked = [(index, rank(self._matches[index])) for index in left]
        best = max((value for _, value in ranked if value is not None), default=None)
        return [index for index, value in ranked if value is not None and value == best]


class _Group:
    """The chains of a listener that have the same destination port as criterion.

    ``sole`` maps addresses to their chain if no further criteria are needed: exactly one chain names the address,
    this chain has no other criterion, and no other chain can be as specific. A node's per-pod chains are of this
    kind.
    """

    __slots__ = ("_by_host", "_mixed", "_rest", "sole")

    def __init__(self) -> None:
        self._by_host: dict[str, list[int]] = {}
        self._rest: list[int] = []
        self._mixed = False
        self.sole: dict[str, int] = {}

    def add(self, index: int, match: ChainMatch) -> None:
        single = [net.prefixlen == net.max_prefixlen for net in match.destination]
        if single and all(single):
            plain = replace(match, destination=(), destination_port=None) == ChainMatch()
            for net in match.destination:
                host = str(net.network_address)
                there = self._by_host.setdefault(host, [])
                there.append(index)
                if plain and len(there) == 1 and not self._mixed:
                    self.sole[host] = index
                else:
                    self.sole.pop(host, None)
        else:
            self._rest.append(index)
            if any(single):
                self._mixed = True
                self.sole.clear()

    def candidates(self, host: str) -> list[int]:
        return self._by_host.get(host, []) + self._rest


def _exact(wanted: object | None, found: object) -> int | None:
    if wanted is None:
        return 0
    return 1 if wanted == found else None


def _overlap(wanted: Sequence[object], found: Sequence[object]) -> int | None:
    if not wanted:
        return 0
    return 1 if any(value in wanted for value in found) else None


def _preferred(wanted: Sequence[str], offered: Sequence[str]) -> int | None:
    """Rank a chain by the client's order of application protocols. The first protocol that a chain names wins."""
    if not wanted:
        return 0
    return max((len(offered) - place for place, name in enumerate(offered) if name in wanted), default=None)


def _longest(networks: tuple[IpNetwork, ...], host: str) -> int | None:
    """Return the prefix length + 1 of the longest network that contains ``host``; 0 if any address matches."""
    if not networks:
        return 0
    address = ipaddress.ip_address(host)
    lengths = [net.prefixlen + 1 for net in networks if net.version == address.version and address in net]
    return max(lengths, default=None)


def _server_name(wanted: tuple[str, ...], candidates: list[str]) -> int | None:
    if not wanted:
        return 0
    ranks = [len(candidates) - rank for rank, name in enumerate(candidates) if name in wanted]
    return max(ranks, default=None)


def _source_type(wanted: SourceType, facts: ConnectionFacts) -> int | None:
    if wanted is SourceType.ANY:
        return 0
    return 1 if is_local(facts) == (wanted is SourceType.SAME_IP_OR_LOOPBACK) else None
