"""Compiling change by change gives what compiling everything at once gives, and touches little."""

from dataclasses import replace
from ipaddress import ip_address, ip_network
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.generated import examples
from tests.ztunnel.policy.calico.cluster import PODS, local_policy
from xds.model import calico as c
from ztunnel.policy.calico.compile import compile_resources, endpoint_id
from ztunnel.policy.calico.explain import UnknownParty
from ztunnel.policy.calico.incremental import Compiler, differences
from ztunnel.policy.calico.read import read_resources
from ztunnel.policy.calico.resources import (
    ApiPolicy,
    ApiProfile,
    ApiRule,
    ApiTier,
    Entity,
    HostEndpoint,
    Labelled,
    NamedPort,
    NetworkSet,
    Node,
    Pod,
    Resources,
    Service,
)
from ztunnel.policy.netpol.table_builder import TableBuilder
from ztunnel.policy.policysync.explain import evaluator_of, party

NAMESPACES = ("x", "y")
LABELS = st.dictionaries(st.sampled_from(("app", "role")), st.sampled_from(("a", "b")), max_size=2)
SELECTORS = st.sampled_from(
    (
        "", "all()", "app == 'a'", "app != 'a'", "has(role)", "!has(role)", "app in {'a', 'b'}",
        "app not in {'a'}",
        "app == 'a' && role == 'b'", "app == 'a' || role == 'b'", "app contains 'a'", "app == 'a' || all()",
    )
)  # fmt: skip
NAMESPACE_SELECTORS = st.sampled_from(("", "all()", "app == 'a'", "global()", "projectcalico.org/name == 'x'"))
ENTITIES = st.builds(
    Entity,
    nets=st.sampled_from(((), (ip_network("10.0.0.0/8"),))),
    ports=st.sampled_from(((), ((80, 80),), ("http",), ("http", (1, 2)))),
    selector=SELECTORS,
    not_selector=st.sampled_from(("", "", "role == 'b'")),
    namespace_selector=NAMESPACE_SELECTORS,
    account_names=st.sampled_from(((), ("sa",))),
    account_selector=st.sampled_from(("", "", "app == 'a'")),
    service=st.sampled_from((None, None, ("x", "web"), ("y", "web"))),
    nodes=st.sampled_from((None, None, "all()", "app == 'a'", "!has(role)")),
)
RULES = st.builds(
    ApiRule,
    action=st.sampled_from((c.Action.ALLOW, c.Action.DENY)),
    source=ENTITIES,
    destination=ENTITIES,
    protocol=st.sampled_from((None, "TCP", 17)),
)
IDS = st.builds(
    c.PolicyId, st.just("NetworkPolicy"), st.sampled_from(("", *NAMESPACES)), st.sampled_from(("one", "two"))
)


@st.composite
def policies(draw: st.DrawFn) -> ApiPolicy:
    return ApiPolicy(
        id=draw(IDS),
        tier=draw(st.sampled_from(("default", "first", "unknown"))),
        order=draw(st.sampled_from((1.0, 2.0))),
        selector=draw(SELECTORS),
        namespace_selector=draw(st.sampled_from(("", "app == 'a'"))),
        account_selector=draw(st.sampled_from(("", "app == 'a'"))),
        ingress=draw(st.booleans()),
        egress=draw(st.booleans()),
        inbound=tuple(draw(st.lists(RULES, max_size=2))),
        outbound=tuple(draw(st.lists(RULES, max_size=1))),
    )


PORTS = st.sampled_from(((), (NamedPort("http", "tcp", 8080),), (NamedPort("http", "udp", 53),)))
PODS_OF = st.builds(
    Pod,
    namespace=st.sampled_from(NAMESPACES),
    name=st.sampled_from(("p", "q", "r")),
    uid=st.sampled_from(("", "u1", "u2", "u3")),
    labels=LABELS,
    account=st.sampled_from(("default", "sa")),
    node=st.sampled_from(("n1", "n2")),
    addresses=st.sampled_from(
        ((), (ip_address("10.0.0.1"),), (ip_address("10.0.0.2"), ip_address("fd00::2")), (ip_address("10.0.0.3"),))
    ),
    ports=PORTS,
    host_network=st.sampled_from((False, False, True)),
    captured=st.booleans(),
    created=st.sampled_from(("", "2025-11-03T09:00:00Z", "2025-11-03T09:00:01Z")),
    terminating=st.booleans(),
)
SERVICES = st.builds(
    Service,
    namespace=st.sampled_from(NAMESPACES),
    name=st.just("web"),
    selector=st.sampled_from(({}, {"app": "a"})),
    targets=st.sampled_from(((), (("tcp", "http"), ("udp", 53)))),
)
NODES = st.builds(
    Node,
    name=st.sampled_from(("n1", "n2")),
    labels=LABELS,
    addresses=st.sampled_from(
        ((), (ip_address("192.168.0.1"),), (ip_address("192.168.0.2"), ip_address("fd00::9")))
    ),
)
SETS = st.builds(
    NetworkSet,
    namespace=st.sampled_from(("", *NAMESPACES)),
    name=st.just("nets"),
    labels=LABELS,
    nets=st.sampled_from(((), (ip_network("192.0.2.0/24"),))),
)


HOSTS = st.builds(
    HostEndpoint,
    name=st.sampled_from(("h1", "h2")),
    labels=LABELS,
    addresses=st.sampled_from(((), (ip_address("192.168.0.1"), ip_address("fd00::8")))),
    ports=PORTS,
    profiles=st.sampled_from(((), ("mine",), ("mine", "kns.x"))),
)


@st.composite
def worlds(draw: st.DrawFn) -> Resources:
    found = Resources()
    for policy in draw(st.lists(policies(), max_size=4)):
        found.policies[policy.id] = policy
    for pod in draw(st.lists(PODS_OF, max_size=5)):
        if pod.uid not in {other.uid for other in found.pods.values()} or not pod.uid:
            found.pods[pod.namespace, pod.name] = pod
    for name in draw(st.sets(st.sampled_from(("first", "default")))):
        found.tiers[name] = ApiTier(name, draw(st.sampled_from((1.0, 5.0))), draw(st.booleans()))
    for name in draw(st.sets(st.sampled_from(NAMESPACES))):
        found.namespaces[name] = Labelled("", name, draw(LABELS))
        found.accounts[name, "sa"] = Labelled(name, "sa", draw(LABELS))
    for service in draw(st.lists(SERVICES, max_size=2)):
        found.services[service.namespace, service.name] = service
    for node in draw(st.lists(NODES, max_size=2)):
        found.nodes[node.name] = node
    for host in draw(st.lists(HOSTS, max_size=2)):
        found.host_endpoints[host.name] = host
    for item in draw(st.lists(SETS, max_size=2)):
        found.network_sets[item.namespace, item.name] = item
    for name in draw(st.sets(st.sampled_from(("kns.x", "ksa.x.sa", "mine")))):
        rules = tuple(draw(st.lists(RULES, max_size=1)))
        found.profiles[name] = ApiProfile(name, rules, (), draw(LABELS))
    return found


@settings(max_examples=examples(150), deadline=None)
@given(st.lists(worlds(), min_size=1, max_size=4))
def test_after_every_change_it_is_as_if_compiled_at_once(history: list[Resources]) -> None:
    compiler = Compiler()
    for wanted in history:
        before = _copied(compiler.compiled)
        delta = compiler.apply(differences(compiler.resources, wanted))
        assert compiler.resources == wanted
        whole = compile_resources(wanted)
        assert compiler.compiled == whole
        for table, changed in (
            ("ip_sets", delta.ip_sets),
            ("policies", delta.policies),
            ("profiles", delta.profiles),
            ("endpoints", delta.endpoints),
            ("accounts", delta.accounts),
            ("namespaces", delta.namespaces),
        ):
            old, new = before[table], getattr(whole, table)
            assert {key for key in old.keys() | new.keys() if old.get(key) != new.get(key)} <= changed, table
    compiler.apply(differences(compiler.resources, Resources()))
    assert compiler.compiled == compile_resources(Resources())
    assert not compiler._watches
    assert not compiler._by_term
    assert not compiler._things._by_term


@settings(max_examples=examples(150), deadline=None)
@given(worlds())
def test_an_address_is_that_of_one_pod_and_everything_says_so_alike(found: Resources) -> None:
    made = compile_resources(found)
    held = [net.network_address for endpoint in made.endpoints.values() for net in endpoint.addresses]
    claimed = {address for pod in found.pods.values() if pod.is_endpoint for address in pod.addresses}
    assert sorted(map(str, held)) == sorted(map(str, claimed))
    tables = {node: TableBuilder().build(made, node).table for node in ("n1", "n2")}
    for address in claimed:
        pods = [pod for pod in found.pods.values() if pod.is_endpoint and address in pod.addresses]
        wanted = max(pods, key=lambda pod: pod.claim)
        where = endpoint_id(wanted)
        assert party(str(address), found, "td").endpoint == where
        assert party(where.workload, found, "td").endpoint == where
        assert evaluator_of(made).store.endpoint_at(str(address)) == where
        for node, table in tables.items():
            comments = {
                element.comment
                for item in table.sets
                if item.name.startswith(("ingress", "egress"))
                for element in item.elements
                if element.key == address.packed
            }
            assert comments <= ({where.workload} if node == wanted.node else set())


def test_the_newer_pod_has_the_address() -> None:
    old = Pod(namespace="x", name="z", addresses=(ip_address("10.0.0.1"),), created="2025-11-03T09:00:00Z")
    new = replace(old, name="a", created="2025-11-03T09:00:01Z")
    for ending, holder in ((False, "x/a"), (True, "x/z")):
        pods = {("x", "z"): old, ("x", "a"): replace(new, terminating=ending)}
        [found] = compile_resources(Resources(pods=pods)).endpoints
        assert found.workload == holder
    with pytest.raises(UnknownParty, match=r"x/z has lost its address 10\.0\.0\.1 to x/a"):
        party("x/z", Resources(pods={("x", "z"): old, ("x", "a"): new}), "td")


def _copied(compiled: Any) -> dict[str, dict[Any, Any]]:
    return {name: dict(getattr(compiled, name)) for name in type(compiled).__slots__ if name != "captured"}


def test_objects_unrelated_to_a_changed_pod_stay_identical() -> None:
    rules = (
        "{action: Allow, source: {selector: app == 'frontend'}}, {action: Allow, source: {selector: none == 'x'}}"
    )
    text = PODS + local_policy("one", f"{{selector: app == 'backend', ingress: [{rules}]}}")
    compiler = Compiler()
    compiler.apply(differences(Resources(), read_resources({"a.yaml": text})))
    sets = dict(compiler.compiled.ip_sets)
    policies = dict(compiler.compiled.policies)
    front = compiler.resources.pods["shop", "front"]
    delta = compiler.apply([("pods", ("shop", "front"), replace(front, addresses=front.addresses[:1]))])
    [changed] = delta.ip_sets
    assert not delta.policies
    assert len(delta.endpoints) == 1
    assert all(compiler.compiled.ip_sets[key] is value for key, value in sets.items() if key != changed)
    assert all(compiler.compiled.policies[key] is value for key, value in policies.items())
    assert not compiler.apply([("pods", ("shop", "front"), compiler.resources.pods["shop", "front"])])
