"""AdminNetworkPolicy, BaselineAdminNetworkPolicy and ClusterNetworkPolicy: their meaning, and what is refused."""

from ipaddress import ip_address
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.generated import examples
from tests.ztunnel.policy.policysync.cluster_literal import Connection, End, allowed
from tproxy.packets import Interpreter, Packet
from ztunnel.kube.objects import ObjectKey
from ztunnel.policy.calico.incremental import Compiler
from ztunnel.policy.calico.objects import PolicyObjects
from ztunnel.policy.calico.resources import ApiPolicy
from ztunnel.policy.netpol.explain import explained
from ztunnel.policy.netpol.table_builder import TableBuilder

GROUP = "policy.networking.k8s.io"
VERSIONS = {
    "ClusterNetworkPolicy": f"{GROUP}/v1alpha2",
    "AdminNetworkPolicy": f"{GROUP}/v1alpha1",
    "BaselineAdminNetworkPolicy": f"{GROUP}/v1alpha1",
    "NetworkPolicy": "networking.k8s.io/v1",
}
NUMBERS = {"TCP": 6, "UDP": 17, "SCTP": 132}
NAMESPACES = {name: {"ns": name, "kubernetes.io/metadata.name": name} for name in "xy"}
NAMED = {"web": ("TCP", 80), "dns": ("UDP", 81)}
PODS = [
    End(f"10.0.{number}.1", True, name, namespace, {"pod": name}, NAMESPACES[namespace], ports=NAMED)
    for number, (namespace, name) in enumerate((("x", "a"), ("x", "b"), ("y", "a"), ("y", "b")))
]
NODES = [
    End("192.168.0.1", name="n1", node_labels={"role": "edge"}),
    End("192.168.0.2", name="n2", node_labels={}),
]
OUTSIDE = End("203.0.113.7")


def body(kind: str, name: str, spec: Any, namespace: str = "") -> dict[str, Any]:
    metadata = {"name": name, **({"namespace": namespace} if namespace else {})}
    return {"apiVersion": VERSIONS[kind], "kind": kind, "metadata": metadata, "spec": spec}


def key_of(found: dict[str, Any]) -> ObjectKey:
    return ObjectKey(found["kind"], found["metadata"].get("namespace", ""), found["metadata"]["name"])


def world() -> dict[ObjectKey, Any]:
    found: list[dict[str, Any]] = []
    for name, labels in NAMESPACES.items():
        found.append({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name, "labels": labels}})
    for pod in PODS:
        ports = [{"name": name, "protocol": way, "containerPort": port} for name, (way, port) in NAMED.items()]
        metadata = {"name": pod.name, "namespace": pod.namespace, "labels": dict(pod.labels)}
        spec = {"nodeName": "n1" if pod.name == "a" else "n2", "containers": [{"ports": ports}]}
        status = {"phase": "Running", "podIPs": [{"ip": pod.address}]}
        found.append({"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": spec, "status": status})
    for node in NODES:
        addresses = [{"type": "Hostname", "address": node.name}, {"type": "InternalIP", "address": node.address}]
        metadata = {"name": node.name, "labels": dict(node.node_labels or {})}
        found.append(
            {"apiVersion": "v1", "kind": "Node", "metadata": metadata, "status": {"addresses": addresses}}
        )
    return {key_of(each): each for each in found}


class Tables:
    """The tables of both nodes for some policies."""

    def __init__(self, *policies: dict[str, Any], nodes: bool = True) -> None:
        self.objects = PolicyObjects(nodes=nodes)
        self.compiler = Compiler()
        self.compiler.apply(self.objects.changes(world() | {key_of(each): each for each in policies}))
        self.tables = [TableBuilder().build(self.compiler.compiled, node).table for node in ("n1", "n2")]

    def allow(self, connection: Connection) -> bool:
        packet = Packet(
            source=ip_address(connection.source.address),
            destination=ip_address(connection.destination.address),
            protocol=NUMBERS[connection.protocol],
            destination_port=connection.port,
        )
        return all(Interpreter(table).judge(packet).accepted for table in self.tables)


# Random ones

LABELS = st.sampled_from(
    [
        {},
        {"matchLabels": {"pod": "a"}},
        {"matchExpressions": [{"key": "pod", "operator": "NotIn", "values": ["a"]}]},
        {"matchExpressions": [{"key": "role", "operator": "DoesNotExist"}]},
    ]
)
SPACES = st.sampled_from(
    [{}, {"matchLabels": {"ns": "x"}}, {"matchExpressions": [{"key": "ns", "operator": "In", "values": ["y"]}]}]
)
BOTH = st.fixed_dictionaries({"podSelector": LABELS, "namespaceSelector": SPACES})
SUBJECTS = st.one_of(
    st.builds(lambda value: {"namespaces": value}, SPACES), st.builds(lambda v: {"pods": v}, BOTH)
)
NETWORKS = st.lists(
    st.sampled_from(["10.0.0.0/16", "10.0.1.1/32", "0.0.0.0/0", "203.0.113.0/24", "::/0"]),
    min_size=1,
    max_size=2,
    unique=True,
)
OUTWARD = st.one_of(
    SUBJECTS,
    st.builds(lambda value: {"networks": value}, NETWORKS),
    st.sampled_from(
        [
            {"nodes": {}},
            {"nodes": {"matchLabels": {"role": "edge"}}},
            {"nodes": {"matchExpressions": [{"key": "role", "operator": "DoesNotExist"}]}},
        ]
    ),
)
PROTOCOLS = st.sampled_from(["TCP", "UDP", "SCTP"])
NUMBERED_1 = st.one_of(
    st.builds(lambda p, n: {"portNumber": {"protocol": p, "port": n}}, PROTOCOLS, st.sampled_from([80, 81])),
    st.builds(lambda p: {"portRange": {"protocol": p, "start": 80, "end": 81}}, PROTOCOLS),
)
PORTS_2 = st.sampled_from(
    [{}, {"destinationPort": {"number": 80}}, {"destinationPort": {"range": {"start": 81, "end": 90}}}]
)
NUMBERED_2 = st.builds(lambda p, port: {p.lower(): port}, PROTOCOLS, PORTS_2)


@st.composite
def rules(draw: st.DrawFn, kind: str, direction: str) -> list[dict[str, Any]]:
    found = []
    actions = ["Accept" if kind == "ClusterNetworkPolicy" else "Allow", "Deny"]
    if kind != "BaselineAdminNetworkPolicy":
        actions.append("Pass")
    for _ in range(draw(st.integers(0, 3))):
        peers = draw(st.lists(SUBJECTS if direction == "ingress" else OUTWARD, min_size=1, max_size=2))
        rule: dict[str, Any] = {"action": draw(st.sampled_from(actions))}
        rule["from" if direction == "ingress" else "to"] = peers
        name = st.sampled_from(sorted(NAMED)).map
        if kind == "ClusterNetworkPolicy":
            ports, field = st.one_of(NUMBERED_2, name(lambda n: {"destinationNamedPort": n})), "protocols"
        else:
            ports, field = st.one_of(NUMBERED_1, name(lambda n: {"namedPort": n})), "ports"
        if any("networks" in peer or "nodes" in peer for peer in peers):
            ports = NUMBERED_2 if kind == "ClusterNetworkPolicy" else NUMBERED_1
        if draw(st.booleans()):
            rule[field] = draw(st.lists(ports, min_size=1, max_size=2))
        found.append(rule)
    return found


@st.composite
def policies(draw: st.DrawFn) -> list[dict[str, Any]]:
    found = []
    # No two policies of one tier have the same priority, because the API does not define their order.
    priorities = draw(st.permutations(range(4)))
    for number in range(draw(st.integers(0, 3))):
        kind = draw(st.sampled_from(["ClusterNetworkPolicy", "ClusterNetworkPolicy", "AdminNetworkPolicy"]))
        spec = {"priority": priorities[number], "subject": draw(SUBJECTS)}
        if kind == "ClusterNetworkPolicy":
            spec["tier"] = draw(st.sampled_from(["Admin", "Baseline"]))
        spec |= {way: draw(rules(kind, way)) for way in ("ingress", "egress")}
        found.append(body(kind, f"p{number}", spec))
    if draw(st.booleans()):
        kind = "BaselineAdminNetworkPolicy"
        spec = {"subject": draw(SUBJECTS), **{way: draw(rules(kind, way)) for way in ("ingress", "egress")}}
        found.append(body(kind, "default", spec))
    for number in range(draw(st.integers(0, 2))):
        port = {"protocol": "TCP", "port": 80}
        rule = draw(
            st.sampled_from([{}, {"from": [{"namespaceSelector": {}}], "ports": [port]}, {"ports": [port]}])
        )
        spec = {
            "podSelector": draw(LABELS),
            "policyTypes": draw(st.sampled_from([["Ingress"], ["Egress"], ["Ingress", "Egress"]])),
            "ingress": [rule],
            "egress": [{("to" if key == "from" else key): value for key, value in rule.items()}],
        }
        found.append(body("NetworkPolicy", f"n{number}", spec, draw(st.sampled_from("xy"))))
    return found


CONNECTIONS = st.builds(
    Connection,
    st.sampled_from([*PODS, OUTSIDE]),
    st.sampled_from([*PODS, *NODES, OUTSIDE]),
    PROTOCOLS,
    st.sampled_from([80, 81, 82]),
)


@settings(max_examples=examples(250), deadline=None)
@given(policies(), st.lists(CONNECTIONS, min_size=4, max_size=12))
def test_the_table_decides_as_the_api_says(found: list[dict[str, Any]], tried: list[Connection]) -> None:
    made = Tables(*found)
    assert not made.objects.problems
    for connection in tried:
        if connection.source.address != connection.destination.address:
            assert made.allow(connection) == allowed(found, connection), connection


# One by one


def cluster(text: str, name: str = "p", kind: str = "ClusterNetworkPolicy") -> dict[str, Any]:
    return body(kind, name, yaml.safe_load(text))


XA, XB, YA, _ = PODS
DENY_X = "{tier: Admin, priority: 5, subject: {namespaces: {matchLabels: {ns: x}}}, ingress: [{action: Deny, from: [{namespaces: {}}]}]}"  # noqa: E501


def test_an_admin_denial_is_before_what_a_namespace_allows() -> None:
    allow = body("NetworkPolicy", "n", {"podSelector": {}, "policyTypes": ["Ingress"], "ingress": [{}]}, "x")
    tcp = Connection(YA, XA, "TCP", 80)
    assert Tables(allow).allow(tcp)
    assert not Tables(allow, cluster(DENY_X)).allow(tcp)
    passing = cluster(DENY_X.replace("Deny", "Pass").replace("5", "4"), "q")
    assert Tables(allow, cluster(DENY_X), passing).allow(tcp)


def test_a_baseline_is_for_pods_that_no_network_policy_isolates() -> None:
    baseline = cluster(DENY_X.replace("Admin", "Baseline"))
    one = body("NetworkPolicy", "n", {"podSelector": {"matchLabels": {"pod": "a"}}, "ingress": [{}]}, "x")
    made = Tables(baseline, one)
    assert made.allow(Connection(YA, XA, "TCP", 80))
    assert not made.allow(Connection(YA, XB, "TCP", 80))


def test_explain_names_tier_and_policy() -> None:
    made = Tables(cluster(DENY_X, "guard"))
    answer, lines = explained(made.compiler.resources, made.compiler.compiled, "y/a", "x/a", "80", "tcp")
    text = "\n".join(lines)
    assert not answer
    assert "tier kube-admin" in text
    assert "KubernetesClusterNetworkPolicy/guard" in text


RULE = "tier: Admin, priority: 1, subject: {namespaces: {}}"
DENIES = "ingress: [{action: Deny, from: [{namespaces: {}}]}]"


@pytest.mark.parametrize(
    ("rule", "reaches", "said"),
    [
        ("{action: Accept, to: [{domainNames: [a.example]}]}", True, "egress[0].to[0].domainNames: names"),
        ("{action: Deny, to: [{domainNames: [a.example]}]}", False, "egress[0].to[0].domainNames: names"),
        ("{action: Pass, to: [{galaxies: {}}]}", False, "egress[0].to[0].galaxies: no kind of peer"),
        ("{action: Pass, to: [{}]}", False, "egress[0].to[0]: no kind of peer"),
    ],
)
def test_a_peer_that_is_not_known_fails_closed_and_is_named(rule: str, reaches: bool, said: str) -> None:
    made = Tables(cluster(f"{{{RULE}, egress: [{rule}]}}"))
    assert made.allow(Connection(XA, YA, "TCP", 80)) is reaches
    [problem] = made.objects.problems.values()
    assert said in str(problem)


def test_an_allow_of_a_name_lets_nothing_through_that_is_denied_after_it() -> None:
    accept = "{action: Accept, to: [{domainNames: [a.example]}, {networks: [203.0.113.0/24]}]}"
    deny = "{action: Deny, to: [{networks: [0.0.0.0/0]}]}"
    made = Tables(cluster(f"{{{RULE}, egress: [{accept}, {deny}]}}"))
    assert made.allow(Connection(XA, OUTSIDE, "TCP", 80))
    assert not made.allow(Connection(XA, YA, "TCP", 80))


@pytest.mark.parametrize(("action", "reaches"), [("Accept", False), ("Deny", False), ("Pass", False)])
def test_rules_about_nodes_fail_closed_where_nodes_are_not_followed(action: str, reaches: bool) -> None:
    rules = f"[{{action: {action}, to: [{{nodes: {{}}}}]}}, {{action: Deny, to: [{{networks: [0.0.0.0/0]}}]}}]"
    policy = cluster(f"{{{RULE}, egress: {rules}}}")
    made = Tables(policy, nodes=False)
    assert made.allow(Connection(XA, NODES[1], "TCP", 80)) is reaches
    assert "--node-peers" in str(made.objects.problems[key_of(policy)])
    followed = Tables(policy)
    assert followed.allow(Connection(XA, NODES[1], "TCP", 80)) is (action != "Deny")
    assert not followed.objects.problems


@pytest.mark.parametrize(
    ("kind", "spec", "said"),
    [
        ("ClusterNetworkPolicy", f"{{priority: 1, subject: {{namespaces: {{}}}}, {DENIES}}}", "spec.tier"),
        ("ClusterNetworkPolicy", f"{{tier: Admin, subject: {{namespaces: {{}}}}, {DENIES}}}", "spec.priority"),
        ("AdminNetworkPolicy", f"{{priority: 1001, subject: {{namespaces: {{}}}}, {DENIES}}}", "spec.priority"),
        ("AdminNetworkPolicy", f"{{priority: 1, subject: {{}}, {DENIES}}}", "spec.subject: must be either"),
        (
            "AdminNetworkPolicy",
            f"{{priority: 1, subject: {{namespaces: {{}}, pods: {{}}}}, {DENIES}}}",
            "spec.subject: must be either",
        ),
        ("BaselineAdminNetworkPolicy", "{priority: 1, subject: {namespaces: {}}}", "spec.priority: unknown"),
        (
            "BaselineAdminNetworkPolicy",
            "{subject: {namespaces: {}}, ingress: [{action: Pass, from: [{namespaces: {}}]}]}",
            "spec.ingress[0].action",
        ),
        (
            "ClusterNetworkPolicy",
            f"{{{RULE}, ingress: [{{action: Allow, from: [{{namespaces: {{}}}}]}}]}}",
            "action",
        ),
        ("ClusterNetworkPolicy", f"{{{RULE}, ingress: [{{from: [{{namespaces: {{}}}}]}}]}}", "ingress[0].action"),
        ("ClusterNetworkPolicy", f"{{{RULE}, ingress: [{{action: Deny, from: []}}]}}", "ingress[0].from"),
        ("ClusterNetworkPolicy", f"{{{RULE}, ingress: [{{action: Deny}}]}}", "ingress[0].from"),
        (
            "ClusterNetworkPolicy",
            f"{{{RULE}, egress: [{{action: Deny, to: [{{networks: [here]}}]}}]}}",
            "egress[0].to[0].networks",
        ),
        (
            "ClusterNetworkPolicy",
            f"{{{RULE}, egress: [{{action: Deny, to: [{{namespaces: {{}}}}], protocols: []}}]}}",
            "egress[0].protocols",
        ),
        (
            "ClusterNetworkPolicy",
            f"{{{RULE}, egress: [{{action: Deny, to: [{{namespaces: {{}}}}], "
            "ports: [{portNumber: {port: 1}}]}]}",
            "egress[0].ports: unknown",
        ),
        (
            "ClusterNetworkPolicy",
            f"{{{RULE}, egress: [{{action: Deny, to: [{{namespaces: {{}}}}], "
            "protocols: [{tcp: {destinationPort: {range: {start: 9, end: 1}}}}]}]}",
            "egress[0].protocols[0].tcp.destinationPort.range: must be a port, or two in order, not 9 to 1",
        ),
        (
            "ClusterNetworkPolicy",
            f"{{{RULE}, egress: [{{action: Deny, to: [{{nodes: {{}}}}], "
            "protocols: [{destinationNamedPort: web}]}]}",
            "names of ports are those of pods",
        ),
        (
            "AdminNetworkPolicy",
            "{priority: 1, subject: {namespaces: {}}, egress: [{action: Deny, to: [{namespaces: {}}], "
            "ports: [{portNumber: {protocol: ICMP, port: 80}}]}]}",
            "egress[0].ports[0].portNumber.protocol",
        ),
        (
            "AdminNetworkPolicy",
            "{priority: 1, subject: {namespaces: {matchExpressions: [{key: a, operator: Near}]}}, " + DENIES + "}",
            "spec.subject.namespaces.matchExpressions[0].operator",
        ),
    ],
)
def test_a_faulty_cluster_policy_is_named_and_closes_the_selected_pods(kind: str, spec: str, said: str) -> None:
    policy = cluster(spec, "p", kind)
    made = Tables(policy)
    assert said in str(made.objects.problems[key_of(policy)])
    [closing] = made.compiler.resources.policies.values()
    assert isinstance(closing, ApiPolicy)
    assert closing.id.kind == f"Kubernetes{kind}"
    assert not made.allow(Connection(YA, XA, "TCP", 80))


def test_a_faulty_cluster_policy_closes_only_its_subject() -> None:
    made = Tables(cluster(DENY_X.replace("priority: 5", "priority: 5000").replace("ns: x", "ns: y")))
    assert made.allow(Connection(OUTSIDE, XA, "TCP", 80))
    assert not made.allow(Connection(OUTSIDE, YA, "TCP", 80))
