"""Who is next, policy by policy."""

import random
from collections import Counter
from dataclasses import replace

import pytest

from xds.model.address import SocketAddress
from xds.model.cluster import (
    Balancing,
    Cluster,
    Discovery,
    Endpoint,
    Health,
    LbPolicy,
    LoadAssignment,
    Locality,
    LocalityGroup,
    RawBuffer,
    SlowStart,
    TransportSocketMatch,
)
from xds.model.metadata import value_key
from ztunnel.proxy.envoy.upstream.balancer import Balancer, in_subset, source_hash
from ztunnel.proxy.envoy.upstream.host import Host, HostSet


def endpoint(number: int, weight: int = 1, health: Health = Health.HEALTHY, **metadata: object) -> Endpoint:
    return Endpoint(
        address=SocketAddress(f"10.0.0.{number}", 80),
        weight=weight,
        health=health,
        metadata={"envoy.lb": metadata} if metadata else {},
    )


def hosts_of(*groups: LocalityGroup, now: float = 0.0) -> HostSet:
    hosts = HostSet()
    hosts.assign(LoadAssignment(cluster_name="c", groups=groups), now)
    return hosts


def group(*endpoints: Endpoint, weight: int = 0, zone: str = "", priority: int = 0) -> LocalityGroup:
    return LocalityGroup(locality=Locality(zone=zone), priority=priority, weight=weight, endpoints=endpoints)


def balancer(hosts: HostSet, seed: int = 1, **settings: object) -> Balancer:
    made = Balancer(Balancing(**settings), hosts, random.Random(seed))  # type: ignore[arg-type]
    made.update()
    return made


def picks(made: Balancer, count: int, **arguments: object) -> list[str]:
    chosen = [made.choose(0.0, **arguments) for _ in range(count)]  # type: ignore[arg-type]
    assert all(chosen)
    return [str(host) for host in chosen]


def test_round_robin_starts_at_a_random_host() -> None:
    hosts = hosts_of(group(*(endpoint(n) for n in range(3))))
    runs = [picks(balancer(hosts, seed), 6) for seed in range(20)]
    assert all(run[:3] == run[3:] and len(set(run[:3])) == 3 for run in runs)
    assert len({run[0] for run in runs}) > 1


def test_weighted_round_robin_follows_weights() -> None:
    made = balancer(hosts_of(group(endpoint(1, 3), endpoint(2, 1))))
    assert Counter(picks(made, 400)) == {"10.0.0.1:80": 300, "10.0.0.2:80": 100}


def test_least_request_prefers_the_idle_host() -> None:
    hosts = hosts_of(group(*(endpoint(n) for n in range(4))))
    for host in hosts.hosts[1:]:
        host.cx_active = 10
    made = balancer(hosts, policy=LbPolicy.LEAST_REQUEST, choice_count=16)
    assert Counter(picks(made, 50)).most_common(1)[0] == ("10.0.0.0:80", 50)


def test_weighted_least_request_counts_work_against_weight() -> None:
    hosts = hosts_of(group(endpoint(1, 2), endpoint(2, 1)))
    hosts.hosts[0].rq_active = 7
    made = balancer(hosts, policy=LbPolicy.LEAST_REQUEST)
    found = Counter(picks(made, 300))
    assert found["10.0.0.2:80"] > 3 * found["10.0.0.1:80"]


@pytest.mark.parametrize("policy", [LbPolicy.RING_HASH, LbPolicy.MAGLEV])
def test_hashing_is_stable_and_moves_little_when_a_host_leaves(policy: LbPolicy) -> None:
    settings = {"policy": policy, "ring_size_min": 1024, "maglev_table_size": 1009}
    keys = [source_hash(f"10.1.0.{n}") for n in range(200)]
    four = balancer(hosts_of(group(*(endpoint(n) for n in range(4)))), **settings)
    three = balancer(hosts_of(group(*(endpoint(n) for n in range(3)))), **settings)
    before = [str(four.choose(0.0, hash_key=key)) for key in keys]
    assert before == [str(four.choose(0.0, hash_key=key)) for key in keys]
    assert len(set(before)) == 4
    moved = sum(
        1
        for key, old in zip(keys, before, strict=True)
        if old != "10.0.0.3:80" and str(three.choose(0.0, hash_key=key)) != old
    )
    assert moved < len(keys) / 4


def test_hashing_follows_weights() -> None:
    for policy in (LbPolicy.RING_HASH, LbPolicy.MAGLEV):
        made = balancer(hosts_of(group(endpoint(1, 3), endpoint(2, 1))), policy=policy, maglev_table_size=1009)
        found = Counter(str(made.choose(0.0, hash_key=source_hash(str(n)))) for n in range(2000))
        assert 0.65 < found["10.0.0.1:80"] / 2000 < 0.85


def test_unusable_hosts_are_passed_over_until_panic() -> None:
    bad = [endpoint(n, health=h) for n, h in enumerate((Health.UNHEALTHY, Health.DRAINING, Health.TIMEOUT))]
    some = hosts_of(group(*bad, *(endpoint(n) for n in range(3, 9))))
    assert {name[:8] for name in picks(balancer(some), 30)} == {f"10.0.0.{n}" for n in range(3, 9)}
    none = hosts_of(group(*bad))
    panicking = balancer(none)
    assert panicking.panicking
    assert len(set(picks(panicking, 9))) == 3
    assert panicking.panics == 9
    assert balancer(none, panic_threshold=0.0).choose(0.0) is None


def test_a_cluster_can_fail_in_panic() -> None:
    level = (endpoint(1), endpoint(2, health=Health.UNHEALTHY), endpoint(3, health=Health.UNHEALTHY))
    made = balancer(hosts_of(group(*level)), fail_in_panic=True)
    assert made.choose(0.0) is None
    assert (made.panics, made.candidates()) == (0, [])
    usable = balancer(hosts_of(group(*level, endpoint(4))), fail_in_panic=True)
    assert set(picks(usable, 20)) == {"10.0.0.1:80", "10.0.0.4:80"}
    by_hash = balancer(hosts_of(group(*level)), fail_in_panic=True, policy=LbPolicy.RING_HASH)
    assert len(set(picks(by_hash, 100))) == 3


def test_balancer_without_hosts_returns_none() -> None:
    assert balancer(HostSet()).choose(0.0) is None


def test_avoided_host_is_chosen_only_if_no_other_is_left() -> None:
    hosts = hosts_of(group(endpoint(1), endpoint(2)))
    one, two = hosts.hosts
    made = balancer(hosts)
    assert {str(made.choose(0.0, avoid=frozenset({one}))) for _ in range(8)} == {str(two)}
    assert made.choose(0.0, avoid=frozenset({one, two})) in (one, two)


def test_locality_weights_divide_the_load() -> None:
    hosts = hosts_of(group(endpoint(1), weight=3, zone="a"), group(endpoint(2), weight=1, zone="b"))
    found = Counter(picks(balancer(hosts, locality_weighted=True), 2000))
    assert 0.7 < found["10.0.0.1:80"] / 2000 < 0.8


@pytest.mark.parametrize("weight", [0, 1])
def test_locality_weights_do_not_apply_in_panic(weight: int) -> None:
    sick = (endpoint(1, health=Health.UNHEALTHY), endpoint(2, health=Health.UNHEALTHY))
    hosts = hosts_of(group(*sick, weight=99, zone="a"), group(endpoint(3), weight=weight, zone="b"))
    made = balancer(hosts, locality_weighted=True)
    assert Counter(picks(made, 300)) == dict.fromkeys(("10.0.0.1:80", "10.0.0.2:80", "10.0.0.3:80"), 100)
    assert [str(host) for host in made.candidates()] == ["10.0.0.1:80", "10.0.0.2:80", "10.0.0.3:80"]


@pytest.mark.parametrize("policy", [LbPolicy.RING_HASH, LbPolicy.MAGLEV])
def test_equal_hashes_choose_one_host_of_all_weighted_localities(policy: LbPolicy) -> None:
    localities = [group(endpoint(n), weight=1, zone=str(n)) for n in range(4)]
    made = balancer(hosts_of(*localities), policy=policy, locality_weighted=True)
    for key in range(50):
        assert len(set(picks(made, 20, hash_key=source_hash(f"10.1.0.{key}")))) == 1
    assert len(set(picks(made, 200))) == 4


@pytest.mark.parametrize("policy", [LbPolicy.RING_HASH, LbPolicy.MAGLEV])
def test_hashing_divides_a_locality_weight_by_the_weights_of_its_hosts(policy: LbPolicy) -> None:
    first = group(endpoint(1, 3), endpoint(2, 1), weight=1, zone="a")
    rest = (group(endpoint(3), weight=1, zone="b"), group(endpoint(4), zone="c"))
    made = balancer(hosts_of(first, *rest), policy=policy, locality_weighted=True, maglev_table_size=1009)
    found = Counter(picks(made, 4000))
    assert found.keys() == {"10.0.0.1:80", "10.0.0.2:80", "10.0.0.3:80"}
    for host, share in (("10.0.0.1:80", 0.375), ("10.0.0.2:80", 0.125), ("10.0.0.3:80", 0.5)):
        assert found[host] / 4000 == pytest.approx(share, abs=0.1)


def test_a_repeated_attempt_does_not_use_a_locality_without_weight() -> None:
    hosts = hosts_of(group(endpoint(1), endpoint(2), weight=1, zone="a"), group(endpoint(3), weight=0, zone="b"))
    one, two, _ = hosts.hosts
    made = balancer(hosts, locality_weighted=True)
    assert {str(made.choose(0.0, avoid=frozenset({one}))) for _ in range(50)} == {str(two)}
    assert {made.choose(0.0, avoid=frozenset({one, two})) for _ in range(50)} == {one, two}


def test_a_new_host_starts_slowly() -> None:
    hosts = hosts_of(group(endpoint(1)), now=-100.0)
    hosts.assign(LoadAssignment(cluster_name="c", groups=(group(endpoint(1), endpoint(2)),)), 0.0)
    made = balancer(hosts, slow_start=SlowStart(window_s=60.0))
    early = Counter(str(made.choose(1.0)) for _ in range(400))
    late = Counter(str(made.choose(100.0)) for _ in range(400))
    assert early["10.0.0.2:80"] < 60
    assert 180 < late["10.0.0.2:80"] < 220


def test_a_change_of_members_counts_once_for_each_priority() -> None:
    hosts = HostSet()
    first, second = group(endpoint(1), endpoint(2)), group(endpoint(3), priority=1)
    for groups, changes in (
        ((first,), 1),
        ((first,), 1),
        ((group(endpoint(2, weight=5), endpoint(1)),), 1),  # the same, in another order
        ((first, second), 2),
        ((group(endpoint(1)), group(endpoint(2), endpoint(3), priority=1)), 4),
        ((), 6),
    ):
        hosts.assign(LoadAssignment(cluster_name="c", groups=groups), 0.0)
        assert hosts.changes == changes


def test_hosts_survive_updates_that_leave_their_address() -> None:
    hosts = hosts_of(group(endpoint(1), endpoint(2)))
    kept = hosts.get(SocketAddress("10.0.0.1", 80))
    assert kept is not None
    kept.cx_total = 7
    gone = hosts.assign(
        LoadAssignment(cluster_name="c", groups=(group(endpoint(1, health=Health.UNHEALTHY)),)), 1.0
    )
    assert hosts.get(SocketAddress("10.0.0.1", 80)) is kept
    assert (kept.cx_total, kept.flags) == (7, "/failed_eds_health")
    assert [str(host) for host in gone] == ["10.0.0.2:80"]


@pytest.mark.parametrize("one", [True, 1.0, "1", None, [1.0], {"a": 1.0}])
@pytest.mark.parametrize("other", [True, 1.0, "1", None, [1.0], {"a": 1.0}, [True], {"a": True}])
def test_metadata_is_equal_by_protobufs_rules(one: object, other: object) -> None:
    equal = (type(one), str(one)) == (type(other), str(other))
    host = Host(replace(endpoint(1), metadata={"envoy.lb": {"v": one}}))
    assert in_subset(host, {"v": other}) is equal
    tls = TransportSocketMatch("m", {"v": other}, RawBuffer())
    found, _ = Cluster(name="c", discovery=Discovery.STATIC, socket_matches=(tls,)).transport_socket_for(
        {"envoy.transport_socket_match": {"v": one}}
    )
    assert (found == "m") is equal
    assert (value_key(one) == value_key(other)) is equal
    assert len({value_key(one), value_key(other)}) == (1 if equal else 2)


def test_subsets_are_hosts_with_equal_metadata() -> None:
    host = Host(endpoint(1, version="v1", stage="prod"))
    assert in_subset(host, {"version": "v1"})
    assert not in_subset(host, {"version": "v1", "stage": "test"})
    hosts = hosts_of(group(endpoint(1, version="v1"), endpoint(2, version="v2")))
    part = hosts.filtered(lambda each: in_subset(each, {"version": "v2"}))
    assert [str(each) for each in part.hosts] == ["10.0.0.2:80"]
    assert part.hosts[0] is hosts.hosts[1]
