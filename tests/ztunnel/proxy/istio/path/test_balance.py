"""Candidates, ranks and draws: the tables of endpoint selection, and the structures against naive ones."""

import random
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from tests.generated import examples
from xds.model.mesh import Mesh
from xds.model.service import BalancerMode, LoadBalancing, Scope, Service
from xds.model.workload import (
    ApplicationTunnel,
    AppProtocol,
    GatewayAddress,
    Locality,
    NetworkAddress,
    ServiceKey,
    Workload,
    WorkloadUid,
)
from ztunnel.proxy.istio.path.balance import Weighted, narrowed, pick, question_of, rank_of

KEY = ServiceKey("shop/cart")
CLIENT = Workload(
    uid=WorkloadUid("client"),
    namespace="shop",
    network="here",
    node="n1",
    cluster_id="c1",
    locality=Locality("r", "z", "s"),
)


def service(mode: BalancerMode = BalancerMode.STANDARD, *preferences: Scope, **ports: int) -> Service:
    return Service(
        name="cart",
        namespace="shop",
        hostname="cart",
        ports={int(port[1:]): target for port, target in ports.items()} or {80: 8080},
        load_balancing=LoadBalancing(preferences, mode),
    )


def endpoint(uid: str = "a", *, ports: dict[int, int] | None = None, **more: Any) -> Workload:
    values: dict[str, Any] = {"namespace": "shop", "network": "here", "addresses": ("10.0.0.1",)}
    return Workload(
        uid=WorkloadUid(uid), services={KEY: {80: 8080} if ports is None else ports}, **(values | more)
    )


def mesh(*values: Workload | Service) -> Mesh:
    made = Mesh()
    made.apply(values)
    return made


def found(store: Mesh, port: int = 80, *, waypoint: bool = False, avoid: tuple[str, ...] = ()) -> set[str]:
    """Everybody who may be picked."""
    held = store.service(KEY)
    assert held is not None
    question = question_of(held, port, CLIENT, waypoint=waypoint, by_name=False)
    random_ = random.Random(1)
    picked = {pick(store, question, random_.randrange, {WorkloadUid(uid) for uid in avoid}) for _ in range(60)}
    return {uid for uid in picked if uid is not None}


# Step 1: candidates

GATEWAY = GatewayAddress(NetworkAddress("west", "192.0.2.1"), 15008)


@pytest.mark.parametrize(
    ("held", "workload", "port", "waypoint", "kept"),
    [
        (service(), endpoint(), 80, False, True),
        (service(), endpoint(), 81, False, False),
        (service(), endpoint(), 81, True, False),
        (service(), endpoint(application_tunnel=ApplicationTunnel(AppProtocol.NONE)), 81, True, True),
        (service(), endpoint(application_tunnel=ApplicationTunnel(AppProtocol.NONE)), 81, False, False),
        (service(p80=0), endpoint(), 80, False, True),
        (service(p80=0), endpoint(ports={}), 80, False, False),
        (service(p80=0), endpoint(ports={}), 80, True, True),
        (service(), endpoint(ports={}), 80, False, True),
        (service(), endpoint(addresses=()), 80, False, False),
        (service(), endpoint(addresses=(), hostname="db"), 80, False, True),
        (service(), endpoint(addresses=(), network_gateway=GATEWAY), 80, False, False),
        (service(), endpoint(addresses=(), network_gateway=GATEWAY, network="west"), 80, False, True),
        (service(), endpoint(addresses=(), network="west"), 80, False, False),
        (service(), endpoint(capacity=0), 80, False, False),
    ],
)
def test_candidate_endpoints_of_a_service(
    held: Service, workload: Workload, port: int, waypoint: bool, kept: bool
) -> None:
    assert (found(mesh(held, workload), port, waypoint=waypoint) == {"a"}) is kept


# Step 2: ranks

EXAMPLE = (Scope.NETWORK, Scope.REGION, Scope.ZONE)


@pytest.mark.parametrize(
    ("preferences", "network", "region", "zone", "rank"),
    [
        (EXAMPLE, "here", "r", "z", 5),
        (EXAMPLE, "here", "r", "-", 4),
        (EXAMPLE, "here", "-", "z", 3),
        (EXAMPLE, "here", "-", "-", 3),
        (EXAMPLE, "west", "r", "z", 2),
        (EXAMPLE, "west", "r", "-", 1),
        (EXAMPLE, "west", "-", "z", 0),
        (EXAMPLE, "west", "-", "-", 0),
        (
            (Scope.REGION, Scope.NETWORK, Scope.ZONE),
            "west",
            "r",
            "z",
            1,
        ),  # a network that does not lead ends the count
        ((Scope.REGION, Scope.NETWORK, Scope.ZONE), "here", "r", "z", 3),
        ((), "west", "-", "-", 0),
    ],
)
def test_rank_counts_equal_leading_scopes(
    preferences: tuple[Scope, ...], network: str, region: str, zone: str, rank: int
) -> None:
    question = question_of(service(BalancerMode.FAILOVER, *preferences), 80, CLIENT, waypoint=False, by_name=False)
    assert rank_of(question, endpoint(network=network, locality=Locality(region, zone))) == rank


@pytest.mark.parametrize(
    ("scope", "same", "other"),
    [
        (Scope.REGION, {"locality": Locality("r")}, {"locality": Locality("x")}),
        (Scope.ZONE, {"locality": Locality("x", "z")}, {"locality": Locality("r", "x")}),
        (Scope.SUBZONE, {"locality": Locality("", "", "s")}, {"locality": Locality("r", "z", "x")}),
        (Scope.NODE, {"node": "n1"}, {"node": "n2"}),
        (Scope.CLUSTER, {"cluster_id": "c1"}, {"cluster_id": "c2"}),
        (Scope.NETWORK, {"network": "here"}, {"network": "west"}),
    ],
)
@pytest.mark.parametrize("mode", [BalancerMode.STRICT, BalancerMode.FAILOVER])
def test_scopes_compare_endpoint_and_client(
    scope: Scope, same: dict[str, Any], other: dict[str, Any], mode: BalancerMode
) -> None:
    near, far = endpoint("near", **same), endpoint("far", **other)
    assert found(mesh(service(mode, scope), near, far)) == {"near"}
    assert found(mesh(service(mode, scope), far)) == ({"far"} if mode is BalancerMode.FAILOVER else set())
    assert found(mesh(service(BalancerMode.STANDARD, scope), near, far)) == {"near", "far"}


def test_unknown_scopes_are_equal() -> None:
    client = Workload(uid=WorkloadUid("c"), namespace="n")
    question = question_of(service(BalancerMode.STRICT, Scope.REGION), 80, client, waypoint=False, by_name=False)
    assert rank_of(question, endpoint()) == 1


def test_a_passthrough_service_reached_by_name_is_like_failover() -> None:
    held = service(BalancerMode.PASSTHROUGH, Scope.REGION)
    near, far = endpoint("near", locality=Locality("r")), endpoint("far")
    question = question_of(held, 80, CLIENT, waypoint=True, by_name=True)
    store = mesh(held, near, far)
    assert {pick(store, question, random.Random(seed).randrange) for seed in range(9)} == {"near"}


# Step 3: the draw


def test_draws_follow_capacity() -> None:
    store = mesh(service(), endpoint("a", capacity=1), endpoint("b", capacity=3), endpoint("c", capacity=0))
    question = question_of(service(), 80, CLIENT, waypoint=False, by_name=False)
    counts = Counter(pick(store, question, lambda n, seed=seed: seed % n) for seed in range(400))  # type: ignore[misc]
    assert counts == {"a": 100, "b": 300}


def test_failed_endpoints_are_avoided_if_others_exist() -> None:
    held = service(BalancerMode.FAILOVER, Scope.REGION)
    near, far = endpoint("near", locality=Locality("r")), endpoint("far")
    assert found(mesh(held, near, far), avoid=("near",)) == {"far"}
    assert found(mesh(held, near, far), avoid=("near", "far")) == {"near"}
    others = [endpoint(f"e{number}") for number in range(50)]
    assert found(mesh(service(), *others), avoid=tuple(f"e{number}" for number in range(49))) == {"e49"}


def test_candidates_follow_mesh_changes() -> None:
    store = mesh(service(), endpoint("a"))
    assert found(store) == {"a"}
    store.apply([endpoint("b")])
    assert found(store) == {"a", "b"}
    store.apply([endpoint("b", capacity=0)], ["a"])
    assert found(store) == set()
    store.apply([endpoint("b")])
    assert found(store) == {"b"}
    store.apply([service(p81=1)])
    assert found(store) == set()
    assert found(store, 81) == {"b"}
    store.apply([], [KEY])
    store.apply([service()])
    assert found(store) == {"b"}


class Naive(RuleBasedStateMachine):
    """The tree of sums against a dictionary."""

    def __init__(self) -> None:
        super().__init__()
        self.tree = Weighted()
        self.weights: dict[str, int] = {}

    names = st.sampled_from([f"n{number}" for number in range(12)])

    @rule(name=names, weight=st.integers(1, 9))
    def put(self, name: str, weight: int) -> None:
        self.tree.put(WorkloadUid(name), weight)
        self.weights[name] = weight

    @precondition(lambda self: self.weights)
    @rule(data=st.data())
    def remove(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.weights)))
        self.tree.remove(WorkloadUid(name))
        del self.weights[name]

    @invariant()
    def draws_are_by_weight(self) -> None:
        total = sum(self.weights.values())
        assert self.tree.total == total
        assert len(self.tree) == len(self.weights)
        assert dict(self.tree) == self.weights
        assert Counter(self.tree.draw(_always(number)) for number in range(total)) == self.weights

    @rule()
    def made_at_once(self) -> None:
        self.tree = Weighted.of({WorkloadUid(name): weight for name, weight in self.weights.items()})


def _always(number: int) -> Callable[[int], int]:
    return lambda _: number


TestNaive = Naive.TestCase
TestNaive.settings = settings(max_examples=examples(40), stateful_step_count=40, deadline=None)


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 2)), max_size=30))
def test_candidates_after_changes_equal_new_candidates(changes: list[tuple[int, int]]) -> None:
    """Endpoints are added, changed and removed. The candidates are those of a new mesh with the last state."""
    last: dict[str, Workload] = {}
    store = mesh(service(BalancerMode.FAILOVER, Scope.REGION))
    for number, kind in changes:
        uid = f"e{number}"
        if kind == 2:
            last.pop(uid, None)
            store.apply([], [uid])
        else:
            last[uid] = endpoint(uid, locality=Locality("r" if kind else "x"))
            store.apply([last[uid]])
        assert found(store) == found(mesh(service(BalancerMode.FAILOVER, Scope.REGION), *last.values()))


@given(
    st.dictionaries(
        st.sampled_from("abcdef").map(WorkloadUid),
        st.dictionaries(st.sampled_from(("app", "version")), st.sampled_from("xy")),
    ),
    st.lists(st.frozensets(st.tuples(st.sampled_from(("app", "version")), st.sampled_from("xyz")), min_size=1)),
)
def test_preferences_leave_only_candidates_and_each_narrows(
    candidates: dict[WorkloadUid, dict[str, str]], prefer: list[frozenset[tuple[str, str]]]
) -> None:
    left = narrowed(prefer, candidates)
    assert left <= candidates.keys()
    fitting = [uid for uid in candidates if all(labels <= candidates[uid].items() for labels in prefer)]
    if fitting and prefer:
        assert left == set(fitting)
    if not any(labels <= each.items() for labels in prefer for each in candidates.values()):
        assert not left
