"""Chooses the endpoint of a service for a connection: a weighted random choice among the best-ranked candidates.

Checking every endpoint for each connection would be slow. Instead, :class:`Candidates` holds the usable
endpoints per service, port and kind of client, grouped by rank. The weights of each rank are in a binary indexed
tree, so a random choice takes time logarithmic in the number of endpoints. Candidates are created on first use, so
a service that is never dialled has no cost. The mesh's change notifications update the candidates, in time
proportional to the number of changed endpoints.
"""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from enum import Enum, auto
from typing import NamedTuple, Self, assert_never
from weakref import WeakKeyDictionary

from xds.model.mesh import Changes, Mesh
from xds.model.mesh_index import Endpoint
from xds.model.service import BalancerMode, LoadBalancing, Scope, Service
from xds.model.workload import ServiceKey, Workload, WorkloadUid
from ztunnel.proxy.istio.path.addon_labels import addon_labels

#: Returns a uniformly random integer from 0 up to, but not including, its argument. In production:
#: ``random.randrange``.
Choose = Callable[[int], int]

#: A preference for endpoints that have all of these labels, which are named as in ``addon_labels.py``.
Labels = frozenset[tuple[str, str]]

#: The default load balancing: no preference between endpoints.
_ANY_ENDPOINT = LoadBalancing()

#: Endpoints are drawn at random up to this many times, until the result is not an avoided one. Only then are the
#: avoided endpoints removed one by one. If they have half of the weight, one choice in 256 gets that far.
_DRAWS = 8

#: Per candidate set, the matching endpoints of this many preferences are cached.
_PREFERENCES = 16

#: The largest number of cached candidate sets. Only a mesh whose pods dial every service reaches it.
_KEPT = 16384


class Question(NamedTuple):
    """The key of a candidate set: the facts that decide which endpoints are candidates, and how they rank.

    Attributes:
        service: the service.
        port: the service's port.
        network: the client's network.
        waypoint: whether the service is a waypoint, whose endpoints need not have the port if they accept tunnels.
        preferences: the scopes (such as region, zone) where an endpoint should be equal to the client, widest
            first.
        client: the client's value for each of these scopes.
        strict: whether an endpoint must match the client in every scope.
    """

    service: ServiceKey
    port: int
    network: str
    waypoint: bool
    preferences: tuple[Scope, ...] = ()
    client: tuple[str, ...] = ()
    strict: bool = False


class LeftOut(Enum):
    """Why an endpoint of a service is not a candidate for a client."""

    UNHEALTHY = auto()
    UNKNOWN = auto()
    NO_WEIGHT = auto()
    NO_PORT = auto()
    NO_ADDRESS = auto()
    OTHER_SCOPE = auto()
    FAILED = auto()

    def because(self, question: Question) -> str:
        """Return the reason in words, for ``ztunnel explain``."""
        match self:
            case LeftOut.UNHEALTHY:
                return "unhealthy"
            case LeftOut.UNKNOWN:
                return "its workload is not known"
            case LeftOut.NO_WEIGHT:
                return "its weight is 0"
            case LeftOut.NO_PORT:
                return f"it does not serve port {question.port}"
            case LeftOut.NO_ADDRESS:
                return "it has no address"
            case LeftOut.OTHER_SCOPE:
                return f"the service wants the client's own {', '.join(question.preferences).lower()}"
            case LeftOut.FAILED:
                return "it failed recently: taken only if no other is left"
            case _:
                assert_never(self)


def question_of(service: Service, port: int, client: Workload, *, waypoint: bool, by_name: bool) -> Question:
    """Return the key for choosing an endpoint. ``by_name`` is whether the client dialled the service's name, not
    an address.
    """
    balancing = service.load_balancing or _ANY_ENDPOINT
    ranks = balancing.mode in (BalancerMode.STRICT, BalancerMode.FAILOVER)
    if balancing.mode is BalancerMode.PASSTHROUGH and by_name:
        ranks = True  # unlike an address, a name cannot be passed through
    preferences = balancing.preferences if ranks else ()
    return Question(
        service=service.key,
        port=port,
        network=client.network,
        waypoint=waypoint,
        preferences=preferences,
        client=tuple([scope_of(client, scope) for scope in preferences]),
        strict=balancing.mode is BalancerMode.STRICT,
    )


def scope_of(workload: Workload, scope: Scope) -> str:
    """Return a workload's value for a scope, such as its zone. An unknown value is the empty string, so two
    unknown values are equal.
    """
    match scope:
        case Scope.REGION:
            return workload.locality.region
        case Scope.ZONE:
            return workload.locality.zone
        case Scope.SUBZONE:
            return workload.locality.subzone
        case Scope.NODE:
            return workload.node
        case Scope.CLUSTER:
            return workload.cluster_id
        case Scope.NETWORK:
            return workload.network


def rank_of(question: Question, workload: Workload) -> int | None:
    """Return how well an endpoint matches a client (higher is better), or None if it must not be used.

    The rank is the number of leading scopes where both are equal. If the first scope is the network, an equal
    network has the same weight as all scopes together, and a different one does not end the count. With network,
    region, zone the ranks are: all equal 5, network and region 4, network 3, region and zone in another network 2,
    region 1, none 0.
    """
    preferences = question.preferences
    rank = extra = 0
    for scope, wanted in zip(preferences, question.client, strict=True):
        hit = scope_of(workload, scope) == wanted
        if scope is Scope.NETWORK and preferences[0] is Scope.NETWORK:
            if not hit:
                continue
            extra = len(preferences) - 1
        if not hit:
            break
        rank += 1
    if question.strict and rank != len(preferences):
        return None
    return rank + extra


def _misfit(question: Question, service: Service, endpoint: Endpoint, workload: Workload) -> LeftOut | None:
    """Return why an endpoint cannot serve the requested port for this client, or None if it can."""
    if question.port not in service.ports:
        if not question.waypoint or workload.application_tunnel is None:
            return LeftOut.NO_PORT
    elif not question.waypoint and service.ports[question.port] == 0 and question.port not in endpoint.ports:
        return LeftOut.NO_PORT  # a named port that this endpoint does not have
    if workload.addresses or workload.hostname:
        return None
    behind_gateway = workload.network != question.network and workload.network_gateway is not None
    return None if behind_gateway else LeftOut.NO_ADDRESS


class Weighted:
    """A weighted random choice among names, kept in a binary indexed tree. Adding, removing and choosing a name
    take logarithmic time.
    """

    def __init__(self) -> None:
        self._names: list[WorkloadUid] = []
        self._weights: list[int] = []
        self._places: dict[WorkloadUid, int] = {}
        self._sums: list[int] = [0]  # nodes are numbered from 1
        self.total = 0

    def __len__(self) -> int:
        return len(self._names)

    def __iter__(self) -> Iterator[tuple[WorkloadUid, int]]:
        return zip(self._names, self._weights, strict=True)

    def put(self, name: WorkloadUid, weight: int) -> None:
        """Add a name or change its weight."""
        place = self._places.get(name)
        if place is not None:
            self._add(place, weight - self._weights[place])
            return
        self._places[name] = len(self._names)
        self._names.append(name)
        self._weights.append(0)
        number = len(self._names)
        # A new node of the binary indexed tree starts with the sum of the earlier nodes that it covers.
        covered, start = 0, number - (number & -number)
        below = number - 1
        while below > start:
            covered += self._sums[below]
            below -= below & -below
        self._sums.append(covered)
        self._add(number - 1, weight)

    @classmethod
    def of(cls, weights: Mapping[WorkloadUid, int]) -> Self:
        """Build the tree from all weights, in linear time."""
        made = cls()
        made._names = list(weights)
        made._weights = list(weights.values())
        made._places = {name: place for place, name in enumerate(made._names)}
        made.total = sum(made._weights)
        sums = made._sums = [0, *made._weights]
        for number in range(1, len(sums)):
            above = number + (number & -number)
            if above < len(sums):
                sums[above] += sums[number]
        return made

    def remove(self, name: WorkloadUid) -> None:
        """Remove a name, which must be in the tree. The last name takes its place."""
        place = self._places.pop(name)
        last = len(self._names) - 1
        weight = self._weights[last]
        self._add(last, -weight)
        if place != last:
            self._add(place, weight - self._weights[place])
            self._names[place] = self._names[last]
            self._places[self._names[place]] = place
        self._names.pop()
        self._weights.pop()
        self._sums.pop()

    def _add(self, place: int, difference: int) -> None:
        self._weights[place] += difference
        self.total += difference
        number = place + 1
        while number < len(self._sums):
            self._sums[number] += difference
            number += number & -number

    def draw(self, choose: Choose) -> WorkloadUid:
        """Return a random name with probability proportional to its weight. The total must be positive."""
        left = choose(self.total)
        place = 0
        step = 1 << (len(self._names).bit_length() - 1)
        while step:
            further = place + step
            if further <= len(self._names) and self._sums[further] <= left:
                place = further
                left -= self._sums[further]
            step >>= 1
        return self._names[place]


class Candidates:
    """A candidate set: the usable endpoints for one question, grouped by rank."""

    def __init__(self, question: Question) -> None:
        self.question = question
        self._ranks: dict[int, Weighted] = {}
        self._rank_of: dict[WorkloadUid, int] = {}
        self._changed: set[WorkloadUid] | None = None
        """The endpoints to check again before the next choice. None means all endpoints."""
        self._preferred: dict[tuple[Labels, ...], Weighted | None] = {}

    def touch(self, uids: Collection[WorkloadUid] | None) -> None:
        """Mark endpoints as changed, so that they are checked again before the next choice. None marks all."""
        if uids is None:
            self._changed = None
        elif self._changed is not None:
            self._changed.update(uids)

    def pick(
        self, mesh: Mesh, choose: Choose, avoid: Collection[WorkloadUid], prefer: tuple[Labels, ...] = ()
    ) -> WorkloadUid | None:
        """Choose a random endpoint of the best rank, by weight. Return None if there are no candidates.

        Endpoints in ``avoid`` are chosen only if no rank has any other endpoint. With ``prefer``, the best rank
        that has preferred endpoints is used. If no rank has any, ``prefer`` is ignored.
        """
        if self._changed is None or self._changed:
            self._follow(mesh)
            self._preferred.clear()
        if prefer:
            preferred = self._with_labels(mesh, prefer)
            picked = _draw_but(preferred, choose, avoid) if preferred is not None else None
            if picked is not None:
                return picked
        best = sorted(self._ranks, reverse=True) if len(self._ranks) > 1 else list(self._ranks)
        if not best:
            return None
        if not avoid:
            return self._ranks[best[0]].draw(choose)
        for rank in best:
            picked = _draw_but(self._ranks[rank], choose, avoid)
            if picked is not None:
                return picked
        return self._ranks[best[0]].draw(choose)

    def best(self, mesh: Mesh) -> list[WorkloadUid]:
        """Return the endpoints of the best rank. :meth:`pick` chooses among these endpoints."""
        if self._changed is None or self._changed:
            self._follow(mesh)
            self._preferred.clear()
        return [uid for uid, _ in self._ranks[max(self._ranks)]] if self._ranks else []

    def _with_labels(self, mesh: Mesh, prefer: tuple[Labels, ...]) -> Weighted | None:
        """Return the preferred endpoints of the best rank that has preferred ones; see :func:`narrowed`."""
        if prefer not in self._preferred:
            if len(self._preferred) >= _PREFERENCES:
                self._preferred.clear()
            self._preferred[prefer] = None
            for rank in sorted(self._ranks, reverse=True):
                labels = {
                    uid: addon_labels(workload)
                    for uid, _ in self._ranks[rank]
                    if (workload := mesh.workload(uid)) is not None
                }
                left = narrowed(prefer, labels)
                if left:
                    weights = {uid: weight for uid, weight in self._ranks[rank] if uid in left}
                    self._preferred[prefer] = Weighted.of(weights)
                    break
        return self._preferred[prefer]

    def _follow(self, mesh: Mesh) -> None:
        service = mesh.service(self.question.service)
        endpoints = mesh.endpoints(self.question.service)
        if self._changed is None:
            self._start(mesh, service, endpoints)
        for uid in self._changed or ():
            workload, rank = self._ranked(mesh, service, endpoints.get(uid))
            before = self._rank_of.get(uid)
            if before is not None and before != rank:
                self._leave(uid, before)
            if isinstance(rank, int) and workload is not None:
                self._rank_of[uid] = rank
                self._ranks.setdefault(rank, Weighted()).put(uid, workload.capacity)
        self._changed = set()

    def _start(self, mesh: Mesh, service: Service | None, endpoints: Mapping[WorkloadUid, Endpoint]) -> None:
        self._rank_of.clear()
        weights: dict[int, dict[WorkloadUid, int]] = {}
        for uid, endpoint in endpoints.items():
            workload, rank = self._ranked(mesh, service, endpoint)
            if isinstance(rank, int) and workload is not None:
                self._rank_of[uid] = rank
                weights.setdefault(rank, {})[uid] = workload.capacity
        self._ranks = {rank: Weighted.of(each) for rank, each in weights.items()}

    def _ranked(
        self, mesh: Mesh, service: Service | None, endpoint: Endpoint | None
    ) -> tuple[Workload | None, int | LeftOut]:
        """Return an endpoint's workload, and its rank or the reason why it is not a candidate.

        Args:
            mesh: the current mesh.
            service: the service's current version, or None if it was removed.
            endpoint: the endpoint, or None if it must not get connections, for example because it is unhealthy.
        """
        if service is None or endpoint is None:
            return None, LeftOut.UNHEALTHY
        workload = mesh.workload(endpoint.uid)
        if workload is None:
            return None, LeftOut.UNKNOWN
        if not workload.capacity:
            return workload, LeftOut.NO_WEIGHT
        misfit = _misfit(self.question, service, endpoint, workload)
        if misfit is not None:
            return workload, misfit
        rank = rank_of(self.question, workload)
        return workload, LeftOut.OTHER_SCOPE if rank is None else rank

    def left_out(self, mesh: Mesh, avoid: Collection[WorkloadUid]) -> Iterator[tuple[WorkloadUid, LeftOut]]:
        """Yield each endpoint of the service that :meth:`pick` never chooses, with the reason."""
        key = self.question.service
        service, serving = mesh.service(key), mesh.endpoints(key)
        ranked = {uid: self._ranked(mesh, service, serving.get(uid))[1] for uid in mesh.all_endpoints(key)}
        another = any(isinstance(rank, int) and uid not in avoid for uid, rank in ranked.items())
        for uid, rank in ranked.items():
            if isinstance(rank, LeftOut):
                yield uid, rank
            elif another and uid in avoid:
                yield uid, LeftOut.FAILED

    def _leave(self, uid: WorkloadUid, rank: int) -> None:
        del self._rank_of[uid]
        self._ranks[rank].remove(uid)
        if not self._ranks[rank]:
            del self._ranks[rank]


def narrowed(
    prefer: Sequence[Labels], candidates: Mapping[WorkloadUid, Mapping[str, str]]
) -> frozenset[WorkloadUid]:
    """Return the preferred candidates, or an empty set if no preference fits any candidate.

    Each preference narrows the remaining candidates. A preference that fits no remaining candidate has no effect.

    Args:
        prefer: the preferences, in order.
        candidates: endpoints, with their labels.
    """
    left: frozenset[WorkloadUid] = frozenset()
    for labels in prefer:
        fitting = frozenset(uid for uid in left or candidates if labels <= candidates[uid].items())
        left = fitting or left
    return left


def _draw_but(among: Weighted, choose: Choose, avoid: Collection[WorkloadUid]) -> WorkloadUid | None:
    for _ in range(_DRAWS):
        picked = among.draw(choose)
        if picked not in avoid:
            return picked
    left = Weighted.of({name: weight for name, weight in among if name not in avoid})
    return left.draw(choose) if left.total else None


class _Balancer:
    """The cached candidate sets of one mesh."""

    def __init__(self) -> None:
        self._kept: dict[Question, Candidates] = {}
        self._by_service: dict[ServiceKey, list[Candidates]] = {}

    def candidates(self, question: Question) -> Candidates:
        found = self._kept.get(question)
        if found is None:
            if len(self._kept) >= _KEPT:
                self._kept.clear()
                self._by_service.clear()
            found = self._kept[question] = Candidates(question)
            self._by_service.setdefault(question.service, []).append(found)
        return found

    def changed(self, changes: Changes) -> None:
        for key, uids in changes.endpoints.items():
            for candidates in self._by_service.get(key, ()):
                candidates.touch(uids)
        for key in changes.services:
            # A candidate set's key contains properties of the service. The keys of a changed service are never
            # looked up again, so their candidate sets are dropped.
            for candidates in self._by_service.pop(key, ()):
                self._kept.pop(candidates.question, None)


_BALANCERS: "WeakKeyDictionary[Mesh, _Balancer]" = WeakKeyDictionary()


def candidates_for(mesh: Mesh, question: Question) -> Candidates:
    """Return the candidate set for a question. It follows changes of endpoints. If the service itself changes, a
    new set is created.
    """
    balancer = _BALANCERS.get(mesh)
    if balancer is None:
        balancer = _BALANCERS[mesh] = _Balancer()
        mesh.watch(balancer.changed)
    return balancer.candidates(question)


def pick(
    mesh: Mesh,
    question: Question,
    choose: Choose,
    avoid: Collection[WorkloadUid] = (),
    prefer: tuple[Labels, ...] = (),
) -> WorkloadUid | None:
    """Return the endpoint for a connection, or None if the service has none.

    Args:
        mesh: the current mesh.
        question: the service and the facts about the client.
        choose: see :data:`Choose`.
        avoid, prefer: see :meth:`Candidates.pick`.
    """
    return candidates_for(mesh, question).pick(mesh, choose, avoid, prefer)
