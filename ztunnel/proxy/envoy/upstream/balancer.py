"""Chooses the next host of a cluster. Pure.

:class:`Balancer` picks a priority level by its load, then (with locality weights) a locality, then a host by
the cluster's policy. Randomness and time are arguments, so a test can replay every choice.
"""

import heapq
import random
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

import xxhash

from xds.model.cluster import Balancing, LbPolicy, SlowStart
from xds.model.metadata import has_values
from ztunnel.proxy.envoy.upstream.host import Host, HostSet, PriorityLevel
from ztunnel.proxy.envoy.upstream.priorities import LevelLoad, spread


class Picker(Protocol):
    """A load-balancing policy for one fixed list of hosts."""

    def pick(self, hash_key: int | None, now: float) -> Host:
        """Return the next host. ``hash_key`` is the connection's hash, if the TCP proxy filter computes a hash."""


class Balancer:
    """Chooses hosts of one cluster. The owner calls :meth:`update` after every change of the host set.

    Attributes:
        panics: the number of choices that ignored health, because too few hosts were healthy.
    """

    __slots__ = ("_hashes", "_hosts", "_loads", "_pickers", "_rng", "_settings", "panics")

    def __init__(self, settings: Balancing, hosts: HostSet, rng: random.Random) -> None:
        self._settings = settings
        self._hashes = settings.policy in (LbPolicy.RING_HASH, LbPolicy.MAGLEV)
        self._hosts = hosts
        self._rng = rng
        self._loads: list[LevelLoad] | None = []
        self._pickers: dict[tuple[int, str, int], Picker] = {}
        self.panics = 0

    def update(self) -> None:
        """Use the hosts, weights and health as they are now."""
        self._loads = None
        self._pickers.clear()

    @property
    def _level_loads(self) -> list[LevelLoad]:
        """Return each priority level's share of the load.

        It is computed only when a host is chosen after an update, because most clusters of a big mesh are updated
        more often than used.
        """
        if self._loads is None:
            hosts = self._hosts
            self._loads = spread(
                hosts.levels,
                hosts.overprovisioning,
                self._settings.panic_threshold,
                weighted=hosts.weighted_health,
            )
        return self._loads

    @property
    def _fails_in_panic(self) -> bool:
        return self._settings.fail_in_panic and not self._hashes

    @property
    def panicking(self) -> bool:
        """Whether a priority level that gets load is in panic: it then ignores the health of its hosts."""
        return any(load.panic and load.healthy for load in self._level_loads)

    def choose(
        self,
        now: float,
        *,
        hash_key: int | None = None,
        avoid: frozenset[Host] = frozenset(),
    ) -> Host | None:
        """Return the host for a connection, or None if no host is usable.

        Args:
            now: monotonic seconds.
            hash_key: the connection's hash, for RING_HASH and MAGLEV. Without a hash, the choice is random.
            avoid: hosts of the connection's earlier attempts, chosen only if there is no other usable host.
        """
        level = self._choose_level(hash_key)
        if level is None:
            return None
        index, kind = level
        if kind == "hosts" and self._fails_in_panic:
            return None
        self.panics += kind == "hosts"
        picker = self._picker(index, kind)
        if picker is None:
            return None
        host = picker.pick(hash_key, now)
        if host in avoid:
            others = [other for other in self._drawn_from(index, kind) if other not in avoid]
            return self._rng.choice(others) if others else host
        return host

    def candidates(self) -> list[Host]:
        """Return all hosts that :meth:`choose` can return for the first attempt of a connection."""
        found: dict[Host, None] = {}
        for index, load in enumerate(self._level_loads):
            if load.panic and self._fails_in_panic:
                continue
            for kind, share in (("healthy", load.healthy), ("degraded", load.degraded)):
                if share:
                    found |= dict.fromkeys(self._drawn_from(index, "hosts" if load.panic else kind))
        return list(found)

    def _drawn_from(self, index: int, kind: str) -> Sequence[Host]:
        level = self._hosts.levels[index]
        weights = self._locality_weights(level, kind)
        if not any(weights):
            found: Sequence[Host] = getattr(level, kind)
            return found
        return [host for place, weight in enumerate(weights) if weight for host in _usable(level, place, kind)]

    def _choose_level(self, hash_key: int | None) -> tuple[int, str] | None:
        point = (hash_key if hash_key is not None else self._rng.getrandbits(32)) % 100
        loads = self._loads if self._loads is not None else self._level_loads
        for kind in ("healthy", "degraded"):
            for index, load in enumerate(loads):
                share = load.healthy if kind == "healthy" else load.degraded
                if point < share:
                    return index, "hosts" if load.panic else kind
                point -= share
        return None

    def _picker(self, index: int, kind: str) -> Picker | None:
        level = self._hosts.levels[index]
        # Equal hashes choose the same host. So one ring or table has the hosts of all localities.
        locality = -1 if self._hashes else self._choose_locality(level, kind)
        key = (index, kind, locality)
        picker = self._pickers.get(key)
        if picker is None:
            hosts: Sequence[Host] = getattr(level, kind) if locality < 0 else _usable(level, locality, kind)
            weights = [float(host.endpoint.weight) for host in hosts]
            if self._hashes and any(shares := self._locality_weights(level, kind)):
                hosts, weights = _shared_out(level, kind, shares)
            if not hosts:
                return None
            picker = self._pickers[key] = make_picker(self._settings, hosts, weights, self._rng)
        return picker

    def _choose_locality(self, level: PriorityLevel, kind: str) -> int:
        """Return the index of a random locality, or -1 if localities are ignored."""
        weights = self._locality_weights(level, kind)
        total = sum(weights)
        if total <= 0:
            return -1
        point = self._rng.random() * total
        for index, weight in enumerate(weights):
            if point < weight:
                return index
            point -= weight
        return len(weights) - 1

    def _locality_weights(self, level: PriorityLevel, kind: str) -> list[float]:
        """Return the effective weight of each locality: its weight, reduced by its share of unusable hosts. The
        list is empty if localities are ignored. This is also the case in panic, because the localities with most
        weight can be those without healthy hosts.

        Like in Envoy, both rules do not apply to RING_HASH and MAGLEV, where they would move many clients to other
        hosts: a locality has its whole weight while it has a usable host.
        """
        if not self._settings.locality_weighted or (kind == "hosts" and not self._hashes):
            return []
        weights = []
        for index, group in enumerate(level.groups):
            usable = len(_usable(level, index, kind))
            share = usable / len(group.hosts) * self._hosts.overprovisioning if group.hosts else 0.0
            weights.append(group.weight * (float(usable > 0) if self._hashes else min(1.0, share)))
        return weights


def in_subset(host: Host, subset: Mapping[str, object]) -> bool:
    """Return whether a host's ``envoy.lb`` metadata has every key of ``subset`` with an equal value."""
    return has_values(host.endpoint.metadata.get("envoy.lb", {}), subset)


def _usable(level: PriorityLevel, locality: int, kind: str) -> list[Host]:
    hosts = level.groups[locality].hosts
    if kind == "hosts":
        return hosts
    return [host for host in hosts if (host.healthy if kind == "healthy" else host.degraded)]


def _shared_out(level: PriorityLevel, kind: str, shares: Sequence[float]) -> tuple[list[Host], list[float]]:
    """Return the usable hosts of all localities with a share, and their weights. The weights of a locality's hosts
    divide the locality's share.
    """
    hosts: list[Host] = []
    weights: list[float] = []
    for locality, share in enumerate(shares):
        usable = _usable(level, locality, kind) if share else []
        total = sum(host.endpoint.weight for host in usable)
        hosts += usable
        weights += [share * host.endpoint.weight / total for host in usable]
    return hosts, weights


def make_picker(
    settings: Balancing, hosts: Sequence[Host], weights: Sequence[float], rng: random.Random
) -> Picker:
    """Return the picker that implements a load-balancing policy for a non-empty list of hosts.

    Args:
        settings: the policy.
        hosts: the hosts to choose from.
        weights: the weights of the hosts, for RING_HASH and MAGLEV.
        rng: chooses for policies that are random.
    """
    match settings.policy:
        case LbPolicy.RANDOM:
            return _Random(hosts, rng)
        case LbPolicy.RING_HASH:
            return _Ring(hosts, weights, settings.ring_size_min, settings.ring_size_max, rng)
        case LbPolicy.MAGLEV:
            return _Maglev(hosts, weights, settings.maglev_table_size, rng)
        case LbPolicy.LEAST_REQUEST:
            if _equal_weights(hosts) and not settings.slow_start.window_s:
                return _LeastRequest(hosts, settings.choice_count, rng)
            bias = settings.active_request_bias
            return _Weighted(hosts, settings.slow_start, rng, lambda host: (host.active + 1) ** bias)
        case _:
            if _equal_weights(hosts) and not settings.slow_start.window_s:
                return _RoundRobin(hosts, rng)
            return _Weighted(hosts, settings.slow_start, rng, lambda host: 1.0)


def _equal_weights(hosts: Sequence[Host]) -> bool:
    return len({host.endpoint.weight for host in hosts}) <= 1


class _RoundRobin:
    """Picks hosts round-robin from a random start, so that not all proxies choose the same host first."""

    def __init__(self, hosts: Sequence[Host], rng: random.Random) -> None:
        self._hosts = hosts
        self._next = rng.randrange(len(hosts))

    def pick(self, hash_key: int | None, now: float) -> Host:
        host = self._hosts[self._next]
        self._next = (self._next + 1) % len(self._hosts)
        return host


class _Random:
    def __init__(self, hosts: Sequence[Host], rng: random.Random) -> None:
        self._hosts = hosts
        self._rng = rng

    def pick(self, hash_key: int | None, now: float) -> Host:
        return self._rng.choice(self._hosts)


class _LeastRequest:
    """Picks the least busy of a few random hosts ("power of two choices")."""

    def __init__(self, hosts: Sequence[Host], choices: int, rng: random.Random) -> None:
        self._hosts = hosts
        self._choices = choices
        self._rng = rng

    def pick(self, hash_key: int | None, now: float) -> Host:
        return min((self._rng.choice(self._hosts) for _ in range(self._choices)), key=lambda host: host.active)


class _Weighted:
    """Picks the host with the earliest deadline. Each pick moves the host's deadline by ``cost / weight``."""

    def __init__(
        self, hosts: Sequence[Host], slow_start: SlowStart, rng: random.Random, cost: Callable[[Host], float]
    ) -> None:
        self._slow_start = slow_start
        self._cost = cost
        self._order = 0
        self._clock = 0.0
        self._heap: list[tuple[float, int, Host]] = []
        for host in hosts:
            self._push(host, rng.random(), 0.0)

    def _push(self, host: Host, share: float, now: float) -> None:
        self._order += 1
        deadline = self._clock + share * self._cost(host) / self._weight(host, now)
        heapq.heappush(self._heap, (deadline, self._order, host))

    def _weight(self, host: Host, now: float) -> float:
        weight = float(host.endpoint.weight)
        window = self._slow_start.window_s
        age = now - host.added_at
        if not window or age >= window:
            return weight
        floor = self._slow_start.min_weight_percent / 100
        grown: float = (max(age, 0.001) / window) ** (1 / self._slow_start.aggression)
        return weight * max(floor, grown)

    def pick(self, hash_key: int | None, now: float) -> Host:
        deadline, _, host = heapq.heappop(self._heap)
        self._clock = deadline
        self._push(host, 1.0, now)
        return host


class _Ring:
    """Picks by consistent hashing on a Ketama-like ring. The number of a host's points is proportional to its
    weight.
    """

    def __init__(
        self, hosts: Sequence[Host], weights: Sequence[float], smallest: int, largest: int, rng: random.Random
    ) -> None:
        self._rng = rng
        size = min(largest, max(smallest, len(hosts)))
        total = sum(weights)
        points: list[tuple[int, int]] = []
        for index, (host, weight) in enumerate(zip(hosts, weights, strict=True)):
            copies = max(1, round(size * weight / total))
            points.extend((xxhash.xxh64_intdigest(f"{host}_{copy}".encode()), index) for copy in range(copies))
        points.sort()
        self._hashes = [point for point, _ in points]
        self._owners = [hosts[index] for _, index in points]

    def pick(self, hash_key: int | None, now: float) -> Host:
        key = hash_key if hash_key is not None else self._rng.getrandbits(64)
        return self._owners[bisect_left(self._hashes, key) % len(self._owners)]


class _Maglev:
    """Picks by a Maglev table (Eisenbud et al., 2016): hosts fill slots in turn, each by its own permutation."""

    def __init__(self, hosts: Sequence[Host], weights: Sequence[float], size: int, rng: random.Random) -> None:
        self._rng = rng
        self._size = size
        heaviest = max(weights)
        offsets = [xxhash.xxh64_intdigest(str(host).encode(), 0) % size for host in hosts]
        skips = [xxhash.xxh64_intdigest(str(host).encode(), 1) % (size - 1) + 1 for host in hosts]
        positions, credit = [0] * len(hosts), [0.0] * len(hosts)
        table: list[Host | None] = [None] * size
        filled = 0
        while filled < size:
            for index, host in enumerate(hosts):
                credit[index] += weights[index] / heaviest
                if credit[index] < 1:
                    continue
                credit[index] -= 1
                slot = (offsets[index] + positions[index] * skips[index]) % size
                while table[slot] is not None:
                    positions[index] += 1
                    slot = (offsets[index] + positions[index] * skips[index]) % size
                table[slot] = host
                positions[index] += 1
                filled += 1
                if filled == size:
                    break
        self._table = [host for host in table if host is not None]

    def pick(self, hash_key: int | None, now: float) -> Host:
        key = hash_key if hash_key is not None else self._rng.getrandbits(64)
        return self._table[key % self._size]


def source_hash(host: str) -> int:
    """Return the hash of a client address in text form, for the hash policy ``source_ip``."""
    return xxhash.xxh64_intdigest(host.encode())
