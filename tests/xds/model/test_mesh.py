"""The store: look-ups by value, and every index against a naive model under random changes."""

import ipaddress
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from tests.generated import examples
from xds.model.authorization import Action, AuthorizationPolicy, PolicyScope
from xds.model.mesh import Changes, Mesh
from xds.model.policy import Always, Never, PolicyList, Verdict
from xds.model.refused import RefusedResource
from xds.model.service import CidrAddress, HealthPolicy, LoadBalancing, Service, Visibility
from xds.model.workload import (
    Health,
    NamespacedHostname,
    NetworkAddress,
    NetworkMode,
    PolicyKey,
    Protocol,
    ServiceKey,
    Workload,
    WorkloadUid,
)

CART = ServiceKey("shop/cart.example")
ALLOW_ALL = LoadBalancing(health=HealthPolicy.ALLOW_ALL)


def workload(uid: str = "a//Pod/shop/cart", *hosts: str, **more: Any) -> Workload:
    return Workload(uid=WorkloadUid(uid), **({"namespace": "shop", "addresses": hosts} | more))


def behind(uid: str, *keys: str, **more: Any) -> Workload:
    return workload(uid, services={ServiceKey(key): {80: 8080} for key in keys or (CART,)}, **more)


def service(hostname: str = "cart.example", *vips: str, **more: Any) -> Service:
    values = {"name": hostname, "namespace": "shop", "vips": tuple(NetworkAddress("", vip) for vip in vips)}
    return Service(hostname=hostname, **(values | more))


def block(text: str, network: str = "") -> CidrAddress:
    return CidrAddress(network, ipaddress.ip_network(text))


def policy(name: str = "p", **more: Any) -> AuthorizationPolicy:
    values = {
        "namespace": "shop",
        "scope": PolicyScope.NAMESPACE,
        "action": Action.ALLOW,
        "condition": Never(),
    }
    return AuthorizationPolicy(name=name, **(values | more))


def mesh(*values: Workload | Service | AuthorizationPolicy, node: str = "") -> Mesh:
    made = Mesh(node=node)
    made.apply(values)
    return made


def names(rules: PolicyList) -> list[tuple[str, str]]:
    return [(policy.verdict.value, policy.name) for tier in rules.tiers for policy in tier.policies]


# Addresses


def test_the_same_address_is_something_else_in_another_network() -> None:
    here, there = workload("h", "10.0.0.1"), workload("t", "10.0.0.1", network="west")
    store = mesh(here, there)
    assert store.workload_at("", "10.0.0.1") is here
    assert store.workload_at("west", "10.0.0.1") is there
    assert store.workload_at("east", "10.0.0.1") is None


def test_host_network_workloads_have_no_address() -> None:
    store = mesh(workload("h", "10.0.0.1", network_mode=NetworkMode.HOST_NETWORK))
    assert store.workload_at("", "10.0.0.1") is None
    store.apply([workload("h", "10.0.0.1")])
    assert store.workload_at("", "10.0.0.1") is not None
    store.apply([workload("h", "10.0.0.1", network_mode=NetworkMode.HOST_NETWORK)])
    assert store.workload_at("", "10.0.0.1") is None


RANKED = [
    workload("a//Pod/shop/hbone", "10.0.0.1", protocol=Protocol.HBONE),
    workload("a//Pod/shop/plain", "10.0.0.1"),
    workload("entry/hbone", "10.0.0.1", protocol=Protocol.HBONE),
    workload("entry/plain", "10.0.0.1"),
]


@pytest.mark.parametrize("better", range(4))
@pytest.mark.parametrize("worse", range(4))
def test_of_workloads_that_share_an_address_the_most_specific_wins(better: int, worse: int) -> None:
    if better < worse:
        for values in ([RANKED[better], RANKED[worse]], [RANKED[worse], RANKED[better]]):
            assert mesh(*values).workload_at("", "10.0.0.1") is RANKED[better]


def test_of_equal_workloads_the_newest_has_the_address() -> None:
    old, new = workload("a//Pod/shop/old", "10.0.0.1"), workload("a//Pod/shop/new", "10.0.0.1")
    store = mesh(old, new)
    assert store.workload_at("", "10.0.0.1") is new
    store.apply([], ["a//Pod/shop/new"])
    assert store.workload_at("", "10.0.0.1") is old


def test_an_address_may_move_within_one_batch() -> None:
    store = mesh(workload("a", "10.0.0.1"), workload("b", "10.0.0.2"))
    store.apply([workload("a", "10.0.0.2"), workload("b", "10.0.0.1")])
    assert store.workload_at("", "10.0.0.1") == workload("b", "10.0.0.1")
    assert store.workload_at("", "10.0.0.2") == workload("a", "10.0.0.2")


def test_repeated_addresses_are_one() -> None:
    store = mesh(workload("a", "10.0.0.1", "10.0.0.1"))
    store.apply([], ["a"])
    assert store.workload_at("", "10.0.0.1") is None


# Services by address and name


def test_the_clients_own_namespace_wins_then_canonical_then_the_first() -> None:
    first, canonical, last = (
        service("x", "10.1.0.1", namespace=namespace, canonical=namespace in "cd") for namespace in "acd"
    )
    store = mesh(first, canonical, last)
    for found in (
        lambda namespace: store.service_at("", "10.1.0.1", namespace),
        lambda namespace: store.service_named("x", namespace),
    ):
        assert found("a") is first
        assert found("c") is canonical
        assert found("other") is last  # the last of several canonical services is chosen
        assert found(None) is last
    assert mesh(first, replace(first, namespace="b")).service_at("", "10.1.0.1", "other") is first


def test_a_preferred_namespace_comes_after_canonical() -> None:
    first, wished = service("x", namespace="a"), service("x", namespace="b")
    store = mesh(first, wished)
    assert store.service_named("x", "other", "b") is wished
    assert store.service_named("x", "other", "none") is first
    store.apply([replace(first, canonical=True)])
    assert store.service_named("x", "other", "b") == replace(first, canonical=True)


def test_a_service_invisible_to_the_client_is_not_found() -> None:
    hidden = service("x", "10.1.0.1", visibility=Visibility.NAMESPACE)
    store = mesh(hidden)
    assert store.service_at("", "10.1.0.1", "shop") is hidden
    assert store.service_at("", "10.1.0.1", "other") is None
    assert store.service_at("", "10.1.0.1") is hidden
    assert store.service_named("x", "other") is None
    assert store.service("shop/x") is hidden  # a search by namespace and name ignores visibility


def test_a_hidden_address_falls_through_to_a_block() -> None:
    around = service("around", cidr_vips=(block("10.1.0.0/16"),))
    store = mesh(service("x", "10.1.0.1", visibility=Visibility.NAMESPACE), around)
    assert store.service_at("", "10.1.0.1", "other") is around


@pytest.mark.parametrize(
    ("host", "client", "expected"),
    [
        ("10.1.2.3", "other", "long"),
        ("10.1.9.9", "other", "wide"),
        ("10.1.2.3", "mine", "mine"),  # own namespace before a longer prefix
        ("10.1.2.3", None, "long"),
        ("10.3.0.1", "other", "canonical"),
        ("192.0.2.1", "other", None),
        ("fd00::1", "other", "six"),
    ],
)
def test_blocks_rank_by_namespace_length_and_canonical(host: str, client: str | None, expected: str) -> None:
    store = mesh(
        service("wide", cidr_vips=(block("10.1.0.0/16"), block("10.3.0.0/24"))),
        service("long", cidr_vips=(block("10.1.2.0/24"),)),
        service("mine", namespace="mine", cidr_vips=(block("10.1.0.0/16"),)),
        service("canonical", canonical=True, cidr_vips=(block("10.3.0.0/24"),)),
        service("six", cidr_vips=(block("fd00::/8"),)),
        service("elsewhere", cidr_vips=(block("0.0.0.0/0", "west"),)),
    )
    found = store.service_at("", host, client)
    assert (found.hostname if found else None) == expected


def test_workloads_are_found_by_name_and_namespace() -> None:
    store = mesh(workload("a", hostname="db.example"))
    assert store.workload_named(NamespacedHostname("shop", "db.example")) is not None
    assert store.workload_named(NamespacedHostname("other", "db.example")) is None
    store.apply([workload("a", hostname="db2.example")])
    assert store.workload_named(NamespacedHostname("shop", "db.example")) is None


# Endpoints


def test_endpoints_wait_for_their_service() -> None:
    store = mesh(behind("a"))
    assert list(store.staged()) == [CART]
    assert not store.endpoints(CART)
    store.apply([service()])
    assert list(store.endpoints(CART)) == ["a"]
    assert store.staged() == {}
    store.apply([], [CART])
    assert list(store.staged()[CART]) == ["a"]
    store.apply([], ["a"])
    assert store.staged() == {}


def test_unhealthy_endpoints_come_back_when_their_service_wants_them() -> None:
    store = mesh(service(), behind("well"), behind("ill", status=Health.UNHEALTHY))
    assert list(store.endpoints(CART)) == ["well"]
    store.apply([service(load_balancing=ALLOW_ALL)])
    assert set(store.endpoints(CART)) == {"well", "ill"}
    store.apply([service()])
    assert list(store.endpoints(CART)) == ["well"]
    store.apply([behind("ill")])
    assert set(store.endpoints(CART)) == {"well", "ill"}


def test_unhealthy_endpoints_are_staged_too() -> None:
    store = mesh(behind("ill", status=Health.UNHEALTHY))
    assert list(store.staged()[CART]) == ["ill"]
    store.apply([service(load_balancing=ALLOW_ALL)])
    assert list(store.endpoints(CART)) == ["ill"]


# Policies


def test_policies_come_from_everywhere_the_namespace_and_the_workload() -> None:
    store = mesh(
        policy("everywhere", namespace="root", scope=PolicyScope.GLOBAL, action=Action.DENY),
        policy("here"),
        policy("elsewhere", namespace="other"),
        policy("named", scope=PolicyScope.WORKLOAD_SELECTOR, action=Action.DENY),
        policy("not named", scope=PolicyScope.WORKLOAD_SELECTOR),
    )
    found = store.policies_for(workload(authorization_policies=("shop/named", "shop/here")))
    assert names(found.enforced) == [
        ("deny", "root/everywhere"),
        ("deny", "shop/named"),
        ("allow", "shop/here"),
    ]
    assert found.enforced.end is Verdict.DENY
    assert names(store.policies_for(workload(namespace="third")).enforced) == [("deny", "root/everywhere")]
    assert store.policies_for(workload(namespace="third")).enforced.end is Verdict.ALLOW


def test_dry_run_policies_are_not_enforced() -> None:
    deny = policy("d", action=Action.DENY, dry_run=True)
    allow = policy("a", dry_run=True)
    found = mesh(deny, allow).policies_for(workload())
    assert found.enforced == PolicyList((), Verdict.ALLOW)
    assert (found.dry_run_deny, found.dry_run_allow) == ((deny,), (allow,))


def test_a_missing_policy_denies_every_connection() -> None:
    store = mesh()
    asking = workload(authorization_policies=("shop/late",))
    found = store.policies_for(asking)
    assert found.missing == ("shop/late",)
    assert names(found.enforced) == [("deny", "shop/late")]
    assert found.enforced.tiers[0].policies[0].condition == Always()
    store.apply([policy("late", scope=PolicyScope.WORKLOAD_SELECTOR)])
    found = store.policies_for(asking)
    assert (found.missing, names(found.enforced)) == ((), [("allow", "shop/late")])
    store.apply(removed_policies=["shop/late"])
    assert store.policies_for(asking).missing == ("shop/late",)


def test_only_what_a_changed_policy_concerns_is_collected_again() -> None:
    store = mesh(policy("a"), policy("b", namespace="other"))
    here, there = store.policies_for(workload()), store.policies_for(workload(namespace="other"))
    store.apply([policy("a", action=Action.DENY)])
    assert store.policies_for(workload()) is not here
    assert store.policies_for(workload(namespace="other")) is there
    store.apply([policy("g", scope=PolicyScope.GLOBAL)])
    assert store.policies_for(workload(namespace="other")) is not there


def test_a_policy_may_change_its_scope() -> None:
    store = mesh(policy("a"))
    assert names(store.policies_for(workload()).enforced)
    store.apply([policy("a", scope=PolicyScope.WORKLOAD_SELECTOR)])
    assert not names(store.policies_for(workload()).enforced)
    store.apply([policy("a", scope=PolicyScope.GLOBAL)])
    assert names(store.policies_for(workload(namespace="other")).enforced)
    store.apply(removed_policies=["shop/a"])
    assert not names(store.policies_for(workload(namespace="other")).enforced)


def test_workloads_of_a_namespace_share_their_tiers() -> None:
    store = mesh(policy("g", scope=PolicyScope.GLOBAL), policy("n"))
    store.apply([policy("s", scope=PolicyScope.WORKLOAD_SELECTOR)])
    one = store.policies_for(workload()).enforced
    other = store.policies_for(workload(authorization_policies=("shop/s",))).enforced
    assert one.tiers[0] is other.tiers[0]
    assert one.tiers[1] is other.tiers[1]


# Changes


def test_watchers_are_called_once_for_each_batch_with_changes() -> None:
    store = mesh()
    heard: list[Changes] = []
    stop = store.watch(heard.append)
    store.apply([service(), behind("a"), policy("p")])
    assert heard == [
        Changes(
            workloads={WorkloadUid("a")},
            services={CART},
            endpoints={CART: {WorkloadUid("a")}},
            policies={PolicyKey("shop/p")},
            local_identities_added=set(),
        )
    ]
    store.apply([service(), behind("a"), policy("p")], ["unknown", "ns/unknown"])
    store.apply(removed_policies=["shop/unknown"])
    assert len(heard) == 1  # nothing changed
    stop()
    stop()
    store.apply([], ["a"])
    assert len(heard) == 1


def test_identities_worth_a_certificate_are_local_tunnel_capable_and_counted() -> None:
    here = {"node": "n1", "protocol": Protocol.HBONE}
    store = Mesh(node="n1")
    changes = store.apply([workload("a", **here), workload("b", **here), workload("c", node="n2")])
    identity = workload().identity
    assert changes.local_identities_added == {identity}
    assert store.apply([workload("d", native_tunnel=True, **here)]).local_identities_added == set()
    assert store.apply([], ["a", "d"]).local_identities_removed == set()
    assert set(store.local_identities) == {identity}
    moved = store.apply([workload("e", **here)], ["b"])
    assert (moved.local_identities_added, moved.local_identities_removed) == (set(), set())
    assert store.apply([workload("e", node="n2", protocol=Protocol.HBONE)]).local_identities_removed == {identity}
    assert not store.local_identities


def test_a_pod_finds_its_workload_on_its_own_node_only() -> None:
    store = mesh(
        workload("a", name="cart", service_account="cart", node="n1"),
        workload("b", name="cart", service_account="cart", node="n2"),
        node="n2",
    )
    found = store.local_workload("cart", "shop", "cart")
    assert found is not None
    assert found.uid == "b"
    assert store.local_workload("cart", "shop", "other") is None
    store.apply([], ["b"])
    assert store.local_workload("cart", "shop", "cart") is None


# Refused resources


def test_a_refused_resource_replaces_no_readable_version() -> None:
    store = mesh(workload("w", "10.0.0.1"), service("cart.example", "10.1.0.1"))
    heard: list[Changes] = []
    store.watch(heard.append)
    moved = NetworkAddress("", "10.0.0.2")
    store.apply([RefusedResource("w", "unknown", (moved,)), RefusedResource(CART, "unknown", (moved,))])
    assert not heard
    assert store.refused_at("", "10.0.0.2") is None
    assert store.workload("w") is not None
    assert store.service(CART) is not None


def test_a_readable_version_takes_the_place_of_a_refused_one_and_is_removed_like_any_other() -> None:
    store = Mesh()
    refused = RefusedResource("w", "unknown", (NetworkAddress("", "10.0.0.1"),))
    assert store.apply([refused]).refused == {"w"}
    assert store.refused_at("", "10.0.0.1") is refused
    assert not store.apply([refused])
    version = store.version
    assert store.apply([workload("w", "10.0.0.1")]).refused == {"w"}
    assert store.version == version + 1
    assert store.refused("w") is None
    assert store.refused_at("", "10.0.0.1") is None
    store.apply((), ["w"])
    assert store.refused_at("", "10.0.0.1") is None


def test_the_addresses_of_a_refused_resource_are_free_once_it_is_removed() -> None:
    store = Mesh()
    refused = RefusedResource(CART, "unknown", (NetworkAddress("", "10.1.0.1"),), (block("10.2.0.0/16"),))
    store.apply([refused])
    assert store.refused_at("", "10.1.0.1") is store.refused_at("", "10.2.3.4") is refused
    assert store.apply((), [CART]).refused == {CART}
    assert store.refused_at("", "10.1.0.1") is store.refused_at("", "10.2.3.4") is None


def test_a_service_of_a_block_does_not_hide_a_refused_address() -> None:
    store = mesh(service("all.example", cidr_vips=(block("10.0.0.0/8"),)))
    store.apply([RefusedResource("w", "unknown", (NetworkAddress("", "10.0.0.1"),), (block("10.0.0.0/30"),))])
    assert store.refused_at("", "10.0.0.1") is not None
    assert store.refused_at("", "10.0.0.2") is None


# Everything at once, against a model

UIDS = ("c//Pod/shop/a", "c//Pod/shop/b", "entry/c")
HOSTS = ("10.0.0.1", "10.0.0.2", "fd00::1")
KEYS = ("shop/x", "shop/y", "other/x")
BLOCKS = ("10.0.0.0/8", "10.0.0.0/30", "fd00::/16")
POLICIES = ("shop/p", "shop/q", "other/p")

some_workloads = st.builds(
    lambda uid, hosts, keys, **more: workload(
        uid, *hosts, services={ServiceKey(key): {80: 8080} for key in keys}, **more
    ),
    st.sampled_from(UIDS),
    st.lists(st.sampled_from(HOSTS), max_size=2),
    st.sets(st.sampled_from(KEYS)),
    network=st.sampled_from(("", "west")),
    node=st.sampled_from(("n1", "n2")),
    protocol=st.sampled_from(Protocol),
    network_mode=st.sampled_from(NetworkMode),
    hostname=st.sampled_from(("", "db.example")),
    service_account=st.sampled_from(("s", "t")),
    status=st.sampled_from(Health),
    authorization_policies=st.lists(st.sampled_from(POLICIES), max_size=2, unique=True).map(tuple),
)
some_services = st.builds(
    lambda key, **more: service(key.partition("/")[2], namespace=key.partition("/")[0], **more),
    st.sampled_from(KEYS),
    vips=st.lists(st.sampled_from([NetworkAddress(n, h) for n in ("", "west") for h in HOSTS]), max_size=2).map(
        tuple
    ),
    cidr_vips=st.lists(st.sampled_from([block(b) for b in BLOCKS]), max_size=2).map(tuple),
    canonical=st.booleans(),
    visibility=st.sampled_from(Visibility),
    load_balancing=st.sampled_from((None, ALLOW_ALL)),
)
some_refused = st.builds(
    RefusedResource,
    st.sampled_from(UIDS + KEYS),
    st.sampled_from(("unknown protocol", "unknown mode")),
    st.lists(st.sampled_from([NetworkAddress(n, h) for n in ("", "west") for h in HOSTS]), max_size=2).map(tuple),
    st.lists(st.sampled_from([block(b, n) for n in ("", "west") for b in BLOCKS]), max_size=2).map(tuple),
)
some_policies = st.builds(
    lambda key, **more: policy(key.partition("/")[2], namespace=key.partition("/")[0], **more),
    st.sampled_from(POLICIES),
    scope=st.sampled_from(PolicyScope),
    action=st.sampled_from(Action),
    dry_run=st.booleans(),
)


class Naive(RuleBasedStateMachine):
    """Every answer of the store is the answer of a search through everything."""

    def __init__(self) -> None:
        super().__init__()
        self.mesh = Mesh(node="n1")
        self.workloads: dict[str, Workload] = {}
        self.services: dict[str, Service] = {}
        self.policies: dict[str, AuthorizationPolicy] = {}
        self.refused: dict[str, RefusedResource] = {}
        self.identities = set(self.mesh.local_identities)

    def heard(self, changes: Changes) -> None:
        self.identities |= changes.local_identities_added
        self.identities -= changes.local_identities_removed

    @rule(
        put=st.lists(st.one_of(some_workloads, some_services, some_refused), max_size=4),
        removed=st.sets(st.sampled_from(UIDS + KEYS)),
    )
    def change(self, put: list[Workload | Service | RefusedResource], removed: set[str]) -> None:
        for name in removed:
            self.workloads.pop(name, None)
            self.services.pop(name, None)
            self.refused.pop(name, None)
        for value in put:
            if isinstance(value, Workload):
                self.workloads[value.uid] = value
                self.refused.pop(value.uid, None)
            elif isinstance(value, Service):
                self.services[value.key] = value
                self.refused.pop(value.key, None)
            elif value.name not in self.workloads and value.name not in self.services:
                self.refused[value.name] = value
        self.heard(self.mesh.apply(put, removed))

    @rule(value=some_policies)
    def put_policy(self, value: AuthorizationPolicy) -> None:
        self.policies[value.key] = value
        self.mesh.apply([value])

    @rule(key=st.sampled_from(POLICIES))
    def remove_policy(self, key: str) -> None:
        self.policies.pop(key, None)
        self.mesh.apply(removed_policies=[key])

    @invariant()
    def everything_is_there(self) -> None:
        assert {value.uid: value for value in self.mesh.workloads()} == self.workloads
        assert {value.key: value for value in self.mesh.services()} == self.services
        assert {value.key: value for value in self.mesh.policies()} == self.policies
        assert {value.name: value for value in self.mesh.refused_resources()} == self.refused

    @invariant()
    def refused_addresses(self) -> None:
        for network in ("", "west"):
            for host in HOSTS:
                place = NetworkAddress(network, host)
                exact = [value for value in self.refused.values() if place in value.addresses]
                around = [
                    value
                    for value in self.refused.values()
                    if any(c.network == network and ipaddress.ip_address(host) in c.block for c in value.blocks)
                ]
                service = self.mesh.service_at(network, host)
                found = self.mesh.refused_at(network, host)
                if self.mesh.workload_at(network, host) or (service is not None and place in service.vips):
                    assert found is None
                else:
                    candidates = exact or ([] if service is not None else around)
                    assert (found in candidates) if candidates else found is None

    @invariant()
    def addresses(self) -> None:
        for network in ("", "west"):
            for host in HOSTS:
                owners = [
                    value
                    for value in self.workloads.values()
                    if value.network == network
                    and host in value.addresses
                    and value.network_mode is NetworkMode.STANDARD
                ]
                found = self.mesh.workload_at(network, host)
                assert (found in owners) if owners else found is None
                for client in (None, "shop", "third"):
                    self.virtual(network, host, client)

    def virtual(self, network: str, host: str, client: str | None) -> None:
        visible = [
            value
            for value in self.services.values()
            if client in (None, value.namespace) or value.visibility is Visibility.PUBLIC
        ]
        exact = [value for value in visible if NetworkAddress(network, host) in value.vips]
        around = [
            value
            for value in visible
            if any(c.network == network and ipaddress.ip_address(host) in c.block for c in value.cidr_vips)
        ]
        found = self.mesh.service_at(network, host, client)
        candidates = exact or around
        assert (found in candidates) if candidates else found is None
        if found is not None and any(value.namespace == client for value in candidates):
            assert found.namespace == client

    @invariant()
    def endpoints(self) -> None:
        for key in KEYS:
            behind_it = {uid: value for uid, value in self.workloads.items() if key in value.services}
            held = self.services.get(key)
            if held is None:
                assert set(self.mesh.staged().get(ServiceKey(key), {})) == set(behind_it)
                assert not self.mesh.endpoints(key)
                continue
            assert key not in self.mesh.staged()
            assert set(self.mesh.endpoints(key)) == {
                uid
                for uid, value in behind_it.items()
                if held.load_balancing is not None or value.status is Health.HEALTHY
            }

    @invariant()
    def pods_and_identities(self) -> None:
        local = [value for value in self.workloads.values() if value.node == "n1"]
        expected = {value.identity for value in local if value.protocol is Protocol.HBONE}
        assert set(self.mesh.local_identities) == expected == self.identities
        for account in ("s", "t"):
            found = self.mesh.local_workload("", "shop", account)
            owners = [value for value in local if value.service_account == account]
            assert (found in owners) if owners else found is None
        named = [value for value in self.workloads.values() if value.hostname]
        found = self.mesh.workload_named(NamespacedHostname("shop", "db.example"))
        assert (found in named) if named else found is None

    @invariant()
    def policies_apply(self) -> None:
        for value in self.workloads.values():
            found = self.mesh.policies_for(value)
            applying = {
                key: held
                for key, held in self.policies.items()
                if held.scope is PolicyScope.GLOBAL
                or (held.scope is PolicyScope.NAMESPACE and held.namespace == value.namespace)
                or key in value.authorization_policies
            }
            missing = set(value.authorization_policies) - set(self.policies)
            enforced = {key: held for key, held in applying.items() if not held.dry_run}
            assert set(found.missing) == missing
            listed = names(found.enforced)
            assert len(listed) == len(set(listed))
            assert set(listed) == _expected(enforced.items()) | {("deny", key) for key in missing}
            assert [verdict for verdict, _ in listed] == sorted((v for v, _ in listed), reverse=True)
            allows = any(held.action is Action.ALLOW for held in enforced.values())
            assert found.enforced.end is (Verdict.DENY if allows else Verdict.ALLOW)
            dry = {*found.dry_run_deny, *found.dry_run_allow}
            assert {held.key for held in dry} == applying.keys() - enforced.keys()


def _expected(policies: Iterable[tuple[str, AuthorizationPolicy]]) -> set[tuple[str, str]]:
    return {(held.action.value.lower(), key) for key, held in policies}


TestNaive = Naive.TestCase
TestNaive.settings = settings(max_examples=examples(40), stateful_step_count=15, deadline=None)
