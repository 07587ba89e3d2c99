"""Caches routing decisions as plans, which all of a pod's connections to one destination share, per version of the
mesh.

A plan is a decision of :func:`~ztunnel.proxy.istio.path.route.route_for` for a tunnel, together with derived
values: the CONNECT, the pool's key, the log fields and the metric series. Choosing an endpoint is not part of a
plan. The plans of a destination form a small tree: each node is a load-balancing choice, each branch an endpoint
that can be chosen, each leaf a plan. Each connection walks the tree with its own random choices.

A plan depends only on the mesh and the pod's own workload, and every change of the mesh drops all trees. Decisions
are then made again, and a plan is reused if its decision comes out equal. Facts that change independently of the
mesh (certificates, endpoints to avoid, pods of this node) are looked up for each connection.

There is no plan for decisions that wait or differ per connection: a name to resolve, a plain connection, a double
tunnel, or a service with several waypoints.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Iterator
from typing import Final

from hbone.sender import field, fields
from hbone.tunnel_headers import format_forwarded, format_traceparent
from xds.model.address import SocketAddress, is_loopback
from xds.model.workload import WorkloadUid
from ztunnel.proxy.istio.accounting.access_record import Described, Direction, Record
from ztunnel.proxy.istio.accounting.workload_labels import WorkloadLabels
from ztunnel.proxy.istio.certificates.manager import WorkloadCertificate
from ztunnel.proxy.istio.path.balance import Candidates, Question, candidates_for
from ztunnel.proxy.istio.path.node import Node, PodKey
from ztunnel.proxy.istio.path.pod_context import PodContext
from ztunnel.proxy.istio.path.pod_tunnels import TunnelKey, tunnel_key
from ztunnel.proxy.istio.path.route import (
    Client,
    Direct,
    DoubleTunnel,
    Missing,
    Route,
    RouteRefused,
    Tunnel,
    route_for,
)
from ztunnel.proxy.istio.settings.config import HBONE_PORT

#: The largest number of cached trees (one per destination) and of plans, per pod.
_MOST: Final = 4096
#: Below this number of cached plans, plans that can no longer be used are not searched for.
_LEAST_PRUNED: Final = 64
#: The number of recent destinations per pod that :meth:`Plans.reachable` remembers.
_MOST_USED: Final = 64


class Plan:
    """The values shared by all connections that open the same tunnel.

    Attributes:
        route: the routing decision, whose target is an address.
        labels: the pod's labels.
        original: the dialled address as text, for the config dump.
        described: the attributes that the connections' records have in common.
        here: the key of the destination pod, for a node-local tunnel. ``None`` if it cannot be on this node.
    """

    __slots__ = ("_block", "_host", "_key", "described", "here", "labels", "original", "route", "target")

    def __init__(
        self, route: Tunnel, target: SocketAddress, labels: WorkloadLabels, destination: SocketAddress, node: Node
    ) -> None:
        self.route = route
        self.target = target
        self.labels = labels
        self.original = str(destination)
        workload, service = route.workload, route.service
        can_be_local = node.config.node_local_shortcut and target.port == HBONE_PORT
        self.here: PodKey | None = None
        if can_be_local and target.host in workload.addresses:
            self.here = (workload.namespace, workload.name, workload.service_account)
        sample = Record(node, Direction.OUTBOUND, destination, destination)
        sample.source_workload = labels.workload
        enter_route(sample, route, target, labels, node)
        self.described = Described(sample)
        self._host = service.hostname if service is not None else None
        self._key: TunnelKey | None = None
        self._block = fields(
            (
                (b":method", b"CONNECT"),
                (b":authority", route.authority.encode()),
                (b"baggage", labels.baggage),
            )
        )

    def key(self, certificate: WorkloadCertificate) -> TunnelKey:
        """Return the connection pool's key for this tunnel. It includes the pod's current certificate."""
        key = self._key
        if key is None or key.credentials is not certificate or key.generation != certificate.generation:
            key = self._key = tunnel_key(self.target, self.route.identities, certificate)
        return key

    def request(self, source: SocketAddress, noise: int, sampled_below: int) -> tuple[bytes, bytes]:
        """Return the header block of a CONNECT, fields in the Rust ztunnel's order, and its ``traceparent``.

        Args:
            source: the client's address.
            noise, sampled_below: see :func:`hbone.tunnel_headers.format_traceparent`.
        """
        trace = format_traceparent(noise, sampled_below)
        forwarded = field(b"forwarded", format_forwarded(str(source), self._host))
        return self._block + forwarded + field(b"traceparent", trace), trace


class _Drawn:
    """An inner node of a destination's tree: a load-balancing choice, with a branch for each endpoint chosen so
    far.
    """

    __slots__ = ("branches", "candidates")

    def __init__(self, candidates: Candidates) -> None:
        self.candidates = candidates
        self.branches: dict[WorkloadUid | None, _Tree] = {}


class _NoPlan:
    """A leaf of a destination's tree, for connections that cannot be planned."""


_NO_PLAN: Final = _NoPlan()
_Tree = Plan | _Drawn | _NoPlan


class _Weighted(Exception):
    """The decision depends on a random choice among waypoints, so it cannot be planned."""


def _draws_no_waypoint(total: int) -> int:
    raise _Weighted


class Plans:
    """The plans of one pod's connections.

    Args:
        pod: the shared state of the pod.
        illegal_ports: the proxy's own ports in the pod.
    """

    def __init__(self, pod: PodContext, illegal_ports: Collection[int]) -> None:
        self._pod = pod
        self._node = pod.node
        self._illegal_ports = illegal_ports
        self._version = -1
        self._labels: WorkloadLabels | None = None
        self._trees: dict[tuple[str, SocketAddress], _Tree] = {}
        #: The pod's most recent destinations, for :meth:`reachable`.
        self._used: OrderedDict[tuple[str, SocketAddress], None] = OrderedDict()
        self._made: dict[tuple[SocketAddress, SocketAddress, str], Plan] = {}
        self._prune_at = _LEAST_PRUNED

    def plan(self, host: str, destination: SocketAddress) -> Plan | None:
        """Choose endpoints for a connection and return its plan, or ``None`` if the connection has to be routed on
        its own.

        Args:
            host: the client's address.
            destination: the dialled address.
        """
        node = self._node
        labels = self._pod.local.known()
        if labels is None:
            return None
        self._follow(labels)
        tree = self._trees.get((host, destination))
        drawn: list[WorkloadUid | None] = []
        while type(tree) is _Drawn:
            avoid = node.failed_endpoints.current(node.clock.monotonic())
            uid = tree.candidates.pick(node.mesh, node.rng.randrange, avoid)
            drawn.append(uid)
            tree = tree.branches.get(uid)
        if tree is None:
            tree = self._decide(host, destination, labels, drawn)
            self._used[host, destination] = None
            self._used.move_to_end((host, destination))
            if len(self._used) > _MOST_USED:
                self._used.popitem(last=False)
        return tree if type(tree) is Plan else None

    def _follow(self, labels: WorkloadLabels) -> None:
        """Drop the cached trees of all destinations if the mesh or the pod's workload has changed since they were
        made.
        """
        version = self._node.mesh.version
        if version != self._version or labels is not self._labels:
            self._version, self._labels = version, labels
            self._trees.clear()

    def reachable(self) -> Iterator[Plan]:
        """Yield a plan for each endpoint that new connections to the pod's recent destinations can reach.

        If a decision chooses twice (with a waypoint), only one result of the second choice is used.
        """
        for host, destination in list(self._used):
            version = self._node.mesh.version
            for uid in self._endpoints(host, destination):
                labels = self._pod.local.known()
                # The mesh can change while the caller waits between two plans. The list of endpoints is then
                # stale.
                if labels is None or self._node.mesh.version != version:
                    break
                self._follow(labels)
                tree = self._decide(host, destination, labels, [] if uid is None else [uid])
                if type(tree) is Plan:
                    yield tree

    def _endpoints(self, host: str, destination: SocketAddress) -> list[WorkloadUid | None]:
        """Return the endpoints among which a destination's first load-balancing choice is made, or ``[None]``
        without a choice.
        """
        labels = self._pod.local.known()
        if labels is None:
            return []
        self._follow(labels)
        self._decide(host, destination, labels, [])
        root = self._trees.get((host, destination))
        return [*root.candidates.best(self._node.mesh)] if type(root) is _Drawn else [None]

    def _decide(
        self, host: str, destination: SocketAddress, labels: WorkloadLabels, drawn: list[WorkloadUid | None]
    ) -> _Tree:
        """Route a connection to a destination, and add the decision to the destination's tree.

        Args:
            host: the client's address.
            destination: the dialled address.
            labels: the pod's labels.
            drawn: the endpoints already chosen on the way from the tree's root. Endpoints chosen here are added.
        """
        node = self._node
        asked: list[tuple[Question, WorkloadUid | None]] = []

        def draw(question: Question) -> WorkloadUid | None:
            place = len(asked)
            if place < len(drawn):
                uid = drawn[place]
            else:
                avoid = node.failed_endpoints.current(node.clock.monotonic())
                uid = candidates_for(node.mesh, question).pick(node.mesh, node.rng.randrange, avoid)
            asked.append((question, uid))
            return uid

        client = Client(workload=labels.workload, host=host, network=node.config.network)
        known = node.asked.__contains__ if node.ask is not None else None
        leaf: Plan | _NoPlan = _NO_PLAN
        if not (destination.port in self._illegal_ports and is_loopback(destination.host)):
            try:
                route = route_for(client, destination, node.mesh, _draws_no_waypoint, known=known, draw=draw)
            except (RouteRefused, _Weighted):
                pass
            except Missing:
                return _NO_PLAN  # not stored, because the answer can arrive without a change of the mesh
            else:
                leaf = self._plan_of(route, destination, labels)
        self._enter((host, destination), asked, leaf)
        return leaf

    def _plan_of(self, route: Route, destination: SocketAddress, labels: WorkloadLabels) -> Plan | _NoPlan:
        if not isinstance(route, Tunnel) or not isinstance(route.target, SocketAddress):
            return _NO_PLAN
        key = (destination, route.target, route.authority)
        made = self._made.get(key)
        if made is None or made.labels is not labels or not _same(made.route, route):
            if len(self._made) >= min(self._prune_at, _MOST):
                self._prune()
            made = self._made[key] = Plan(route, route.target, labels, destination, self._node)
        return made

    def _prune(self) -> None:
        """Drop the plans that can no longer be used, because the mesh has other versions of their workload or
        service. Without this, a pod would keep plans for endpoints that ended weeks ago.
        """
        mesh = self._node.mesh
        kept = {}
        for key, plan in self._made.items():
            workload, service = plan.route.workload, plan.route.service
            is_current = mesh.workload(workload.uid) is workload
            if is_current and (service is None or mesh.service(service.key) is service):
                kept[key] = plan
        self._made = kept if len(kept) < _MOST else {}
        self._prune_at = max(_LEAST_PRUNED, 2 * len(self._made))

    def _enter(
        self,
        key: tuple[str, SocketAddress],
        asked: list[tuple[Question, WorkloadUid | None]],
        leaf: Plan | _NoPlan,
    ) -> None:
        if len(self._trees) >= _MOST:
            self._trees.clear()
        if not asked:
            self._trees[key] = leaf
            return
        tree = self._trees.get(key)
        if type(tree) is not _Drawn:
            tree = self._trees[key] = _Drawn(candidates_for(self._node.mesh, asked[0][0]))
        for (question, _), (_, uid) in zip(asked[1:], asked, strict=False):
            below = tree.branches.get(uid)
            if type(below) is not _Drawn:
                below = tree.branches[uid] = _Drawn(candidates_for(self._node.mesh, question))
            tree = below
        tree.branches[asked[-1][1]] = leaf


def _same(one: Tunnel, other: Tunnel) -> bool:
    """Return whether two decisions with the same target and authority are equal in all other respects, such as the
    workload.
    """
    return (
        one.workload is other.workload
        and one.service is other.service
        and one.identities == other.identities
        and one.waypoint == other.waypoint
    )


def enter_route(record: Record, route: Route, target: SocketAddress, labels: WorkloadLabels, node: Node) -> None:
    """Write a routing decision to a record, replacing the values of a previous attempt.

    For a double tunnel only the gateway is written, because the endpoint is unknown until the far side answers.
    The control plane names a workload behind the gateway, but that workload represents the whole remote network,
    and its identity is not authenticated.

    Args:
        record: the connection's record.
        route: the decision.
        target: the address of the decision's target.
        labels: the dialling pod's labels.
        node: the shared state of the node's pods.
    """
    workload = route.gateway if isinstance(route, DoubleTunnel) else route.workload
    record.described = None
    record.destination = target
    record.service = route.service
    record.destination_workload = workload
    record.hbone_authority = "" if isinstance(route, Direct) else route.authority
    record.secured = not isinstance(route, Direct)
    if workload is not None:
        # As in the Rust ztunnel, the destination's principal is recorded even before a handshake has proven it.
        there = node.labels_of(workload)
        record.destination_labels, record.destination_identity = there.secured, there.identity
    if record.secured:
        record.source_identity = labels.identity
        record.source_labels = labels.secured
