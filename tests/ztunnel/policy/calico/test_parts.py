"""An object with an unusable part never admits more than any form that its author could have intended."""

import copy
from collections.abc import Mapping
from ipaddress import ip_address, ip_network
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from tests.generated import at_night, examples
from tproxy.packets import Interpreter, Packet
from xds.model import calico as c
from ztunnel.kube.objects import ObjectKey
from ztunnel.policy.calico.incremental import Compiler
from ztunnel.policy.calico.objects import PolicyObjects
from ztunnel.policy.netpol.table_builder import TableBuilder

Body = dict[str, Any]
CALICO, KUBERNETES = "projectcalico.org/v3", "networking.k8s.io/v1"


def item(kind: str, name: str, spec: Body, *, api: str = "v1", labels: Body | None = None, **more: Any) -> Body:
    metadata: Body = {"name": name, "labels": labels or {}}
    if kind in ("Pod", "NetworkPolicy", "NetworkSet"):
        metadata["namespace"] = "shop"
    return {"apiVersion": api, "kind": kind, "metadata": metadata, "spec": spec, **more}


def pod(name: str, address: str, **more: Any) -> Body:
    ports = [{"name": "http", "containerPort": 80}]
    spec = {"nodeName": "n1", "serviceAccountName": name, "containers": [{"ports": ports}]}
    status = {"phase": "Running", "podIPs": [{"ip": address}]}
    return item("Pod", name, spec, labels={"app": name}, status=status, **more)


BASE = [
    item("Namespace", "shop", {}, labels={"env": "prod"}),
    pod("a", "10.0.0.1"),
    pod("b", "10.0.0.2"),
    item("GlobalNetworkSet", "feed", {"nets": ["192.0.2.0/24"]}, api=CALICO, labels={"threat": "feed"}),
    item("Tier", "first", {"order": 1, "defaultAction": "Pass"}, api=CALICO),
]


class World:
    """A node's table of objects, and the reported faults."""

    def __init__(self, *bodies: Body) -> None:
        found: dict[ObjectKey, Any] = {}
        for body in bodies:
            metadata = body["metadata"]
            called = body["kind"]
            if called == "NetworkPolicy" and body["apiVersion"] == CALICO:
                called += ".projectcalico.org"
            found[ObjectKey(called, metadata.get("namespace", ""), metadata["name"])] = body
        self.objects = PolicyObjects()
        self.compiler = Compiler()
        self.compiler.apply(self.objects.changes(found))
        built = TableBuilder().build(self.compiler.compiled, "n1")
        self._table = Interpreter(built.table)

    def allowed(self) -> set[Packet]:
        return {packet for packet in PACKETS if self._table.judge(packet).accepted}

    def reached(self) -> set[str]:
        """Return the addresses that pod a reaches in any way."""
        return {str(packet.destination) for packet in self.allowed() if str(packet.source) == "10.0.0.1"}

    @property
    def said(self) -> str:
        return "\n".join(f"{key}: {problem}" for key, problem in self.objects.problems.items())


HOSTS = ("10.0.0.1", "10.0.0.2", "192.0.2.1", "198.51.100.1")
PACKETS = [
    Packet(
        source=ip_address(source),
        destination=ip_address(destination),
        protocol=protocol,
        source_port=40000,
        destination_port=port,
        icmp_type=8,
    )
    for source in HOSTS
    for destination in HOSTS
    if source != destination
    for protocol, port in ((6, 80), (6, 443), (17, 53), (1, 0))
]

#: For each clause of a side of Calico's rules: usable forms, and unusable ones. The good entries of a partly
#: faulty list stay active, so they are in every form that the list could have had.
SIDE: Mapping[str, tuple[list[Any], list[Any]]] = {
    "nets": (
        [["192.0.2.0/24"], ["10.0.0.0/8", "192.0.2.0/24"]],
        [["10.0.0.0/33"], ["192.0.2.0/24", "x"], [7], "x"],
    ),
    "notNets": (
        [["192.0.2.0/24"], ["10.0.0.0/8", "192.0.2.0/24"]],
        [["x"], ["192.0.2.0/24", "10.0.0.0/33"], {}],
    ),
    "selector": (["app == 'a'", "threat == 'feed'", "all()"], ["app =", 7, "global()"]),
    "notSelector": (["app == 'a'", "has(threat)"], ["app =", []]),
    "namespaceSelector": (["env == 'prod'", "global()"], ["env =", 1]),
    "serviceAccounts": (
        [{"names": ["a"]}, {"selector": "all()"}],
        [{"names": [1]}, {"selector": "x ="}, {"x": 1}, 7],
    ),
    "ports": ([[80], ["400:500", 53, 80]], [["90:80"], [80, 70000], "80", [None]]),
    "notPorts": ([[80], ["400:500", 53, 80]], [["90:80"], [80, 70000], "80"]),
}
WHOLE: Mapping[str, tuple[list[Any], list[Any]]] = {
    "protocol": (["TCP", "UDP", 17], ["XTP", 256, True, []]),
    "notProtocol": (["TCP", 17], ["XTP", 0]),
    "ipVersion": ([4, 6], [5, True, "4"]),
    "icmp": ([{"type": 8}, {"type": 3, "code": 1}], [{"type": 256}, {"code": 1}, {"typ": 8}, 8]),
    "notICMP": ([{"type": 8}], [{"type": "8"}, {"code": 0}]),
    "action": (["Allow", "Deny", "Pass", "Log"], ["allow", "Reject", None, 1]),
    "filter": ([None], [{"x": 1}]),
}
ACTIONS = st.sampled_from(("Allow", "Deny", "Pass", "Log"))


@st.composite
def calico_rules(draw: st.DrawFn) -> Body:
    rule: Body = {"action": draw(ACTIONS), "protocol": draw(st.sampled_from(("TCP", "TCP", "UDP", "ICMP")))}
    for side in ("source", "destination"):
        clause = draw(st.sampled_from((None, "nets", "notNets", "selector", "notSelector")))
        if clause is not None:
            rule[side] = {clause: draw(st.sampled_from(SIDE[clause][0]))}
    return rule


def put(rule: Body, where: tuple[str, ...], value: Any) -> Body:
    found = copy.deepcopy(rule)
    target = found
    for key in where[:-1]:
        target = target.setdefault(key, {})
    if value is None:
        target.pop(where[-1], None)
    else:
        target[where[-1]] = value
    return found


PLACES = [(side, clause) for side in ("source", "destination") for clause in SIDE] + [
    (clause,) for clause in WHOLE
]


@settings(max_examples=examples(300), deadline=None)
@given(
    st.lists(calico_rules(), min_size=1, max_size=3),
    st.sampled_from(PLACES),
    st.integers(0, 2),
    st.sampled_from(("default", "first")),
    st.data(),
)
def test_a_faulty_clause_lets_nothing_more_through(
    rules: list[Body], where: tuple[str, ...], which: int, tier: str, data: st.DataObject
) -> None:
    good, bad = (SIDE if len(where) == 2 else WHOLE)[where[-1]]
    at = which % len(rules)
    wrong, meant = data.draw(st.sampled_from(bad)), data.draw(st.sampled_from(good))

    def world(value: Any) -> World:
        changed = [*rules[:at], put(rules[at], where, value), *rules[at + 1 :]]
        spec = {"tier": tier, "selector": "app == 'a'", "types": ["Ingress", "Egress"]}
        return World(
            *BASE, item("GlobalNetworkPolicy", "p", spec | {"ingress": changed, "egress": changed}, api=CALICO)
        )

    faulty, whole = world(wrong), world(meant)
    assume(not whole.said)
    assert faulty.said
    assert faulty.allowed() <= whole.allowed()
    # Nothing else is touched.
    untouched = {packet for packet in PACKETS if "10.0.0.1" not in (str(packet.source), str(packet.destination))}
    assert untouched <= faulty.allowed()


PEERS: list[Body] = [
    {"podSelector": {"matchLabels": {"app": "b"}}},
    {"ipBlock": {"cidr": "192.0.2.0/24"}},
    {"ipBlock": {"cidr": "0.0.0.0/0", "except": ["10.0.0.0/8"]}},
    {"namespaceSelector": {}},
]
BAD_PEERS: list[Any] = [
    {},
    7,
    {"ipBlock": {"cidr": "10.0.0.0/33"}},
    {"ipBlock": {"cidr": "0.0.0.0/0", "except": ["x"]}},
    {"ipBlock": {"cidr": "10.0.0.0/8"}, "podSelector": {}},
    {"podSelector": {"matchExpressions": [{"key": "a", "operator": "Near"}]}},
    {"podSelector": {"matchLabels": {"a b": "x"}}},
    {"externalSelector": {}},
]
BAD_PORTS: list[Any] = [
    {"port": 70000}, {"port": 80, "protocol": "ICMP"}, {"port": "http", "endPort": 90}, {"endPort": 80}, 80,
    {"port": 80, "icmpType": 1},
]  # fmt: skip


@settings(max_examples=examples(200), deadline=None)
@given(
    st.lists(st.sampled_from(PEERS), max_size=2),
    st.lists(st.sampled_from(({"port": 80}, {"protocol": "UDP", "port": 53})), max_size=2),
    st.sampled_from([("from", bad, good) for bad in BAD_PEERS for good in PEERS]
                    + [("ports", bad, {"port": 443}) for bad in BAD_PORTS]),
)  # fmt: skip
def test_a_faulty_peer_or_port_of_kubernetes_lets_nothing_more_through(
    peers: list[Body], ports: list[Body], change: tuple[str, Any, Body]
) -> None:
    key, wrong, meant = change
    rule = {"from": peers, "ports": ports}

    def world(value: Any) -> World:
        spec = {"podSelector": {"matchLabels": {"app": "a"}}, "ingress": [rule | {key: [*rule[key], value]}]}
        return World(*BASE, item("NetworkPolicy", "p", spec, api=KUBERNETES))

    faulty = world(wrong)
    assert faulty.said.startswith("NetworkPolicy/shop/p: NetworkPolicy shop/p: spec.ingress[0]")
    assert faulty.allowed() <= world(meant).allowed()
    if rule[key]:  # the other members that the rule lists stay active
        spec = {"podSelector": {"matchLabels": {"app": "a"}}, "ingress": [rule]}
        assert faulty.allowed() == World(*BASE, item("NetworkPolicy", "p", spec, api=KUBERNETES)).allowed()


def feed(**changes: Any) -> Body:
    found = copy.deepcopy(BASE[3])
    found["spec"] |= changes
    return found


DENY_FEED = item(
    "GlobalNetworkPolicy",
    "block",
    {
        "selector": "all()",
        "types": ["Egress"],
        "egress": [
            {"action": "Deny", "destination": {"selector": "threat == 'feed'"}},
            {"action": "Deny", "destination": {"selector": "app == 'b'"}},
            {"action": "Deny", "destination": {"selector": "role == 'node'"}},
            {"action": "Allow"},
        ],
    },
    api=CALICO,
)


@pytest.mark.parametrize(
    "nets",
    [
        ["192.0.2.0/24", "10.0.0.0/33"],
        [None, "192.0.2.0/24"],
        ["192.0.2.0/255.255.255.0", "192.0.2.1"],
        ["fe80::1%eth0", "::ffff:192.0.2.0/120"],
    ],
)
def test_the_good_networks_of_a_set_stay_in_force(nets: list[Any]) -> None:
    world = World(*BASE[:3], feed(nets=nets, allowedEgressDomains=["x"]), DENY_FEED)
    assert not world.reached() & {"192.0.2.1", "10.0.0.2"}
    assert "GlobalNetworkSet feed: spec.nets: must be networks" in world.said
    assert "so it is not in the set" in world.said
    assert "spec.allowedEgressDomains: unknown" in world.said


def test_a_set_that_becomes_faulty_follows_its_good_networks() -> None:
    world = World(*BASE[:3], feed(nets=[]), DENY_FEED)
    key = ObjectKey("GlobalNetworkSet", "", "feed")
    world.compiler.apply(world.objects.changes({key: feed(nets=["198.51.100.0/24", "x"])}))
    [(_, members)] = [found for found in world.compiler.compiled.ip_sets.values() if "198.51.100.0/24" in found[1]]
    assert members == {"198.51.100.0/24"}


def changed_pod(**parts: Any) -> Body:
    body = pod("b", "10.0.0.2")
    for key, value in parts.items():
        body[key] = {**body[key], **value}
    return body


@pytest.mark.parametrize(
    ("body", "said"),
    [
        (changed_pod(status={"podIPs": [{"ip": "x"}, {"ip": "10.0.0.2"}]}), "status.podIPs"),
        (changed_pod(spec={"containers": [{"ports": [{"name": "http", "containerPort": 0}]}]}), "spec.containers"),
        (changed_pod(spec={"containers": [{"ports": 7}]}), ""),
        (changed_pod(spec={"containers": [7]}), ""),
        ({**pod("b", "10.0.0.2"), "extra": 1}, "extra"),
    ],
)
def test_a_pod_with_a_faulty_part_is_still_there(body: Body, said: str) -> None:
    world = World(BASE[0], BASE[1], body, DENY_FEED)
    assert "10.0.0.2" not in world.reached()
    assert said in world.said


def host(**changes: Any) -> Body:
    spec = {"node": "n9", "interfaceName": "eth0", "expectedIPs": ["198.51.100.1"]} | changes
    return item("HostEndpoint", "n9", spec, api=CALICO, labels={"role": "node"})


@pytest.mark.parametrize(
    "body",
    [
        host(),
        host(expectedIPs=["x", "198.51.100.1"]),
        host(ports=[{"name": "api", "port": 0, "protocol": "TCP"}]),
        host(tags=[]),
    ],
)
def test_rules_name_host_endpoints_by_their_labels(body: Body) -> None:
    world = World(*BASE, body, DENY_FEED)
    assert "198.51.100.1" not in world.reached()
    without = World(*BASE, DENY_FEED)
    assert "198.51.100.1" in without.reached()


def test_a_host_endpoint_has_the_labels_of_its_profiles() -> None:
    profile = item("Profile", "nodes", {"labelsToApply": {"role": "node"}}, api=CALICO)
    body = host(profiles=["nodes"])
    body["metadata"]["labels"] = {}
    key = ObjectKey("Profile", "", "nodes")
    world = World(*BASE, body, DENY_FEED, profile)
    sets = {member for _, members in world.compiler.compiled.ip_sets.values() for member in members}
    assert "198.51.100.1/32" in sets
    world.compiler.apply(world.objects.changes({key: None}))
    sets = {member for _, members in world.compiler.compiled.ip_sets.values() for member in members}
    assert "198.51.100.1/32" not in sets


@pytest.mark.parametrize("key", ["doNotTrack", "preDNAT"])
def test_a_policy_for_host_endpoints_touches_no_pod(key: str) -> None:
    spec = {"selector": "all()", key: True, "applyOnForward": True, "ingress": [{"action": "Deny"}]}
    world = World(*BASE, item("GlobalNetworkPolicy", "p", spec, api=CALICO))
    assert world.allowed() == set(PACKETS)
    assert not world.said


def test_a_policy_for_forwarded_traffic_is_for_pods_too() -> None:
    spec = {"selector": "app == 'a'", "applyOnForward": True, "ingress": [{"action": "Deny"}]}
    world = World(*BASE, item("GlobalNetworkPolicy", "p", spec, api=CALICO))
    assert not any(str(packet.destination) == "10.0.0.1" for packet in world.allowed())
    assert not world.said


def test_rules_of_a_direction_that_a_policy_does_not_govern_have_no_effect() -> None:
    spec = {
        "selector": "all()",
        "types": ["Egress"],
        "ingress": [{"action": "Deny"}],
        "egress": [{"action": "Allow"}],
    }
    world = World(*BASE, item("GlobalNetworkPolicy", "p", spec, api=CALICO))
    assert world.allowed() == set(PACKETS)
    assert "types says that the policy does not govern ingress, so they have no effect" in world.said


@pytest.mark.parametrize(("namespace", "kind"), [("", "NetworkPolicy"), ("shop", "GlobalNetworkPolicy")])
def test_a_service_is_of_the_policys_namespace_unless_it_says_another(namespace: str, kind: str) -> None:
    service = {"apiVersion": "v1", "kind": "Service", "metadata": {"name": "b", "namespace": "shop"},
               "spec": {"selector": {"app": "b"}, "ports": [{"port": 80}]}}  # fmt: skip
    named = {"name": "b"} | ({"namespace": namespace} if namespace else {})
    rules = [{"action": "Deny", "destination": {"services": named}}, {"action": "Allow"}]
    policy = item(kind, "p", {"selector": "app == 'a'", "types": ["Egress"], "egress": rules}, api=CALICO)
    world = World(*BASE, service, policy)
    assert not any(
        (str(packet.source), str(packet.destination), packet.destination_port) == ("10.0.0.1", "10.0.0.2", 80)
        for packet in world.allowed()
    )


def test_a_denial_of_a_service_without_a_name_denies_everything() -> None:
    rules = [{"action": "Deny", "destination": {"services": {"namespace": "shop"}}}, {"action": "Allow"}]
    policy = item("GlobalNetworkPolicy", "p", {"selector": "app == 'a'", "egress": rules}, api=CALICO)
    world = World(*BASE, policy)
    assert not any(str(packet.source) == "10.0.0.1" for packet in world.allowed())
    assert "services.name: is missing" in world.said


MANY = 5_000
NETWORKS = [f"10.{at >> 8}.{at & 255}.0/24" for at in range(MANY)]
NAMES = [f"x{at}" for at in range(MANY)]
LISTED = ",".join(f"'{name}'" for name in NAMES)
PATHS = [{"prefix": "/" + "x" * 5_000}] * 30


def outward(**destination: Any) -> Body:
    protocol = {"protocol": "TCP"} if "ports" in destination else {}
    return {"egress": [{"action": "Allow", "destination": destination} | protocol]}


@pytest.mark.parametrize(
    "spec",
    [
        {"egress": outward(ports=[80])["egress"] * MANY},
        outward(nets=NETWORKS),
        outward(notNets=NETWORKS),
        outward(ports=list(range(1, 2 * MANY, 2))),
        outward(selector=f"app in {{{LISTED}}}"),
        outward(serviceAccounts={"names": NAMES}),
        {"selector": " || ".join(f"app == '{name}'" for name in NAMES)},
        {"ingress": [{"action": "Allow", "http": {"methods": ["GET"] * 30, "paths": PATHS}}]},
    ],
)
def test_calicos_policies_have_no_largest_size(spec: Body) -> None:
    world = World(*BASE, item("GlobalNetworkPolicy", "p", spec, api=CALICO))
    assert not world.said


def expression(operator: str, *values: str) -> Body:
    return {
        "from": [
            {"podSelector": {"matchExpressions": [{"key": "app", "operator": operator, "values": [*values]}]}}
        ]
    }


@pytest.mark.parametrize(
    "rule",
    [
        {"from": [{"ipBlock": {"cidr": "10.0.0.0/8", "except": NETWORKS}}]},
        {"from": [{"ipBlock": {"cidr": network}} for network in NETWORKS]},
        {"ports": [{"port": port} for port in range(1, MANY)]},
        expression("In", *NAMES),
        expression("In", "", "b"),
        expression("NotIn", "it's", 'say "x"', "'\""),
        {"from": [{"podSelector": {"matchLabels": {"app": "it's"}}}]},
    ],
)
def test_what_the_api_server_accepts_of_kubernetes_policies_is_in_force(rule: Body) -> None:
    spec = {"podSelector": {"matchLabels": {"app": "a"}}, "ingress": [rule]}
    assert not World(*BASE, item("NetworkPolicy", "p", spec, api=KUBERNETES)).said


def test_many_faults_of_an_object_are_told_in_short() -> None:
    world = World(*BASE[:3], feed(nets=["x"] * MANY))
    assert len(world.said) < 2_000
    assert f"and {MANY - 8} more" in world.said


def test_a_set_of_100_000_networks_is_in_force() -> None:
    """By night, and 20,000 in other runs."""
    most = at_night(100_000, 20_000)
    nets = [f"198.{18 + (at >> 15)}.{at >> 8 & 127}.{at & 255}/32" for at in range(most)]
    assert len(set(nets)) == most
    world = World(*BASE[:3], feed(nets=[*nets, "192.0.2.0/24"]), DENY_FEED)
    assert not world.said
    [(kind, members)] = [found for found in world.compiler.compiled.ip_sets.values() if len(found[1]) > 1_000]
    assert (kind, len(members)) == (c.IpSetType.NET, most + 1)
    assert str(ip_network(nets[-1])) in members
    assert "192.0.2.1" not in world.reached()
