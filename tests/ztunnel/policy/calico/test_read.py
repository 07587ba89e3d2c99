"""Resources as people write them: what they become, and every fault at its place."""

import json
from contextlib import suppress
from ipaddress import ip_network

import pytest
from hypothesis import given
from hypothesis import strategies as st

from xds.model import calico as c
from ztunnel.policy.calico.read import read_object, read_resources
from ztunnel.policy.calico.resources import LAST, ApiPolicy, Resources
from ztunnel.runtime.formats.config_reader import Faults

HEAD = "apiVersion: projectcalico.org/v3\nkind: {kind}\nmetadata: {{name: p, namespace: shop}}\nspec: {spec}\n"


def read(text: str) -> Resources:
    return read_resources({"a.yaml": text})


def policy(spec: str, kind: str = "NetworkPolicy") -> ApiPolicy:
    [found] = read(HEAD.format(kind=kind, spec=spec)).policies.values()
    return found


def kubernetes(spec: str) -> ApiPolicy:
    head = "apiVersion: networking.k8s.io/v1\nkind: NetworkPolicy\nmetadata: {name: p, namespace: shop}\n"
    [found] = read(f"{head}spec: {spec}\n").policies.values()
    return found


@pytest.mark.parametrize(
    ("spec", "ingress", "egress"),
    [
        ("{}", True, False),
        ("{ingress: [{action: Allow}]}", True, False),
        ("{egress: [{action: Allow}]}", False, True),
        ("{ingress: [{action: Allow}], egress: [{action: Allow}]}", True, True),
        ("{types: [Egress]}", False, True),
        ("{types: [Ingress, Egress]}", True, True),
    ],
)
def test_directions_that_a_policy_governs(spec: str, ingress: bool, egress: bool) -> None:
    found = policy(spec)
    assert (found.ingress, found.egress) == (ingress, egress)


def test_a_policy_with_everything() -> None:
    found = policy(
        """
  tier: platform
  order: 10
  selector: role == 'db'
  serviceAccountSelector: team == 'storage'
  ingress:
  - action: Allow
    protocol: TCP
    notProtocol: 17
    ipVersion: 4
    source:
      nets: [10.0.0.7/8]
      notNets: ["fd00::/8"]
      selector: has(app)
      notSelector: quarantined == 'yes'
      namespaceSelector: global()
      serviceAccounts: {names: [web], selector: role == 'web'}
    destination: {ports: [5432, "6000:6100", metrics], notPorts: ["6001"]}
    http: {methods: [GET], paths: [{exact: /a}, {prefix: /b/}]}
    metadata: {annotations: {x: y}}
"""
    )
    assert (found.tier, found.order, found.selector) == ("platform", 10.0, "role == 'db'")
    [rule] = found.inbound
    assert (rule.action, rule.protocol, rule.not_protocol, rule.ip_version) == (c.Action.ALLOW, "TCP", 17, 4)
    assert rule.source.nets == (ip_network("10.0.0.0/8"),)
    assert rule.destination.ports == ((5432, 5432), (6000, 6100), "metrics")
    assert rule.destination.not_ports == ((6001, 6001),)
    assert rule.http == c.HttpMatch(("GET",), (c.PathMatch("/a", False), c.PathMatch("/b/", True)))


def rule(text: str) -> str:
    return f"{{ingress: [{{action: Allow, {text}}}]}}"


@pytest.mark.parametrize(
    ("spec", "fault"),
    [
        ("{selector: 'a =='}", "spec.selector: selector 'a =='"),
        ("{selector: global()}", "spec.selector: global() is for namespaceSelector"),
        ("{order: x}", "spec.order: must be a number"),
        ("{types: [Both]}", "spec.types: must be Ingress or Egress, not 'Both'"),
        ("{types: [Egress], ingress: [{action: Allow}]}", "spec.ingress: has rules, but types says"),
        ("{ingress: [{}]}", "spec.ingress[0].action: must be Allow, Deny, Log or Pass, not None"),
        ("{ingress: [{action: allow}]}", "spec.ingress[0].action: must be"),
        (rule("protocol: XTP"), "spec.ingress[0].protocol: must be TCP"),
        (rule("protocol: 256"), "spec.ingress[0].protocol: must be TCP"),
        (rule("ipVersion: 5"), "spec.ingress[0].ipVersion: must be 4 or 6"),
        (rule("protocol: ICMP, ipVersion: 6"), "ipVersion: must be 4 for ICMP"),
        (rule("icmp: {type: 8}"), "spec.ingress[0].icmp: needs protocol ICMP or ICMPv6"),
        (rule("protocol: TCP, notICMP: {type: 8}"), "spec.ingress[0].notICMP: needs protocol ICMP or ICMPv6"),
        (rule("protocol: ICMP, icmp: {code: 1}"), "spec.ingress[0].icmp.type: must be given beside a code"),
        (rule("protocol: ICMP, icmp: {type: 256}"), "spec.ingress[0].icmp.type: must be 0 to 255, not 256"),
        (rule("protocol: ICMP, icmp: {type: true}"), "spec.ingress[0].icmp.type: must be 0 to 255, not True"),
        (rule("protocol: ICMP, icmp: {type: 3, code: x}"), "spec.ingress[0].icmp.code: must be 0 to 255"),
        (rule("destination: {ports: [80]}"), "destination.ports: need protocol TCP"),
        (rule("protocol: TCP, destination: {ports: ['90:80']}"), "must be a port, a range"),
        (rule("protocol: TCP, destination: {ports: [65536]}"), "must be a port, a range"),
        (rule("source: {nets: [10.0.0.0/33]}"), "source.nets: must be networks"),
        (rule("source: {selektor: x}"), "source.selektor: unknown; known are"),
        ("{ingress: [{action: Deny, http: {methods: [GET]}}]}", "spec.ingress[0].http: is for rules that allow"),
        (rule("protocol: UDP, http: {methods: [GET]}"), "http: needs protocol TCP"),
        (rule("http: {paths: [{exact: x}]}"), "paths[0].exact: must begin with /"),
        (rule("http: {paths: [{exact: '/a?b'}]}"), "paths[0].exact: must begin with /"),
        (rule("http: {paths: [{}]}"), "paths[0]: must be either exact or prefix"),
        (rule("http: {paths: [{regex: /a}]}"), "paths[0].regex: unknown"),
        (rule("destination: {services: {name: a}, selector: all()}"), "cannot stand beside services"),
        (rule("protocol: TCP, destination: {services: {name: a}, ports: [1]}"), "services have their own ports"),
        ("{unknown: 1}", "spec.unknown: unknown; known are"),
    ],
)
def test_faults_have_their_place(spec: str, fault: str) -> None:
    with pytest.raises(Faults) as caught:
        policy(spec)
    assert all(line.startswith("a.yaml: NetworkPolicy shop/p: spec") for line in caught.value.faults)
    assert any(fault in line for line in caught.value.faults)


TWICE = "---\n".join(["kind: Namespace\napiVersion: v1\nmetadata: {name: a}\n"] * 2)


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("a: [", "a.yaml: not valid YAML"),
        ("- 1", "a.yaml: must be resources"),
        ("kind: Pod\napiVersion: v1\nmetadata: {}", "a.yaml: Pod: metadata.name is missing"),
        (
            "kind: Ingress\napiVersion: networking.k8s.io/v1\nmetadata: {name: a}",
            "makes no policy here; known are",
        ),
        (HEAD.format(kind="Tier", spec="{order: x}"), "Tier shop/p: spec.order: must be a number"),
        (HEAD.format(kind="Tier", spec="{defaultAction: Allow}"), "spec.defaultAction: must be one of Deny, Pass"),
        (
            HEAD.format(kind="Tier", spec="{order: 5}").replace("name: p", "name: default"),
            "always has order 1e+06",
        ),
        ("kind: Pod\napiVersion: v1\nmetadata: {name: a}\nstatus: {podIP: x}", "podIPs: must be IP addresses"),
        (TWICE, "Namespace a: is repeated"),
    ],
)
def test_faults_of_documents(text: str, fault: str) -> None:
    with pytest.raises(Faults) as caught:
        read(text)
    assert any(fault in line for line in caught.value.faults)


def test_all_faults_of_all_files_are_listed() -> None:
    spec = "{order: x, ingress: [{action: none}, {action: Allow, protocol: y}]}"
    with pytest.raises(Faults) as caught:
        read_resources({"a.yaml": HEAD.format(kind="NetworkPolicy", spec=spec), "b.yaml": "["})
    assert len(caught.value.faults) == 4


def test_lists_are_opened_and_what_has_no_part_in_policy_may_stand_there() -> None:
    found = read(
        """
apiVersion: v1
kind: List
items:
- {apiVersion: v1, kind: Namespace, metadata: {name: shop, labels: {env: prod}}}
- {apiVersion: projectcalico.org/v3, kind: FelixConfiguration, metadata: {name: default}, spec: {x: y}}
- {apiVersion: crd.projectcalico.org/v1, kind: GlobalNetworkSet, metadata: {name: s}, spec: {nets: [10.0.0.1]}}
"""
    )
    assert found.namespaces["shop"].labels == {"env": "prod"}
    assert found.network_sets["", "s"].nets == (ip_network("10.0.0.1/32"),)


@pytest.mark.parametrize("kind", ["NetworkPolicyList", "NamespaceList", "PodList"])
def test_items_of_a_typed_list_have_its_kind(kind: str) -> None:
    api = "networking.k8s.io/v1" if kind == "NetworkPolicyList" else "v1"
    text = f"{{apiVersion: {api}, kind: {kind}, items: [{{metadata: {{name: a}}}}, {{metadata: {{name: b}}}}]}}"
    found = read(text)
    assert len(found.policies) + len(found.namespaces) + len(found.pods) == 2


@pytest.mark.parametrize(("action", "count"), [("Set", 1), ("Learn", 1), ("Delete", 0), ("Ignore", 0)])
def test_staged_policies_that_delete_or_ignore_are_none(action: str, count: int) -> None:
    text = HEAD.format(kind="StagedNetworkPolicy", spec=f"{{stagedAction: {action}}}")
    assert len(read(text).policies) == count
    text = HEAD.format(kind="StagedKubernetesNetworkPolicy", spec=f"{{podSelector: {{}}, stagedAction: {action}}}")
    assert len(read(text).policies) == count


def test_a_pod_that_has_finished_has_no_addresses() -> None:
    text = "{apiVersion: v1, kind: Pod, metadata: {name: a}, status: {phase: %s, podIPs: [{ip: 10.0.0.1}]}}"
    assert [len(read(text % phase).pods["default", "a"].addresses) for phase in ("Running", "Succeeded")] == [1, 0]


def test_ports_of_init_containers_count() -> None:
    ports = (
        read(
            """
apiVersion: v1
kind: Pod
metadata: {name: a}
spec:
  initContainers: [{ports: [{name: metrics, containerPort: 9090}]}]
  containers: [{ports: [{containerPort: 80}, {name: dns, containerPort: 53, protocol: UDP}]}]
"""
        )
        .pods["default", "a"]
        .ports
    )
    assert {(port.name, port.protocol, port.port) for port in ports} == {
        ("metrics", "tcp", 9090),
        ("dns", "udp", 53),
    }


@pytest.mark.parametrize(
    ("spec", "rules"),
    [
        ("{podSelector: {}}", 0),
        ("{podSelector: {}, ingress: [{}]}", 1),
        ("{podSelector: {}, ingress: [{from: [], ports: []}]}", 1),
        ("{podSelector: {}, ingress: [{from: [{podSelector: {}}, {namespaceSelector: {}}]}]}", 2),
        ("{podSelector: {}, ingress: [{ports: [{port: 80}, {port: 81, protocol: UDP}]}]}", 2),
        ("{podSelector: {}, ingress: [{ports: [{port: 80, endPort: 90}, {port: http}]}]}", 1),
    ],
)
def test_kubernetes_rules_by_protocol_and_peer(spec: str, rules: int) -> None:
    found = kubernetes(spec)
    assert (found.ingress, found.egress, found.order, found.tier) == (True, False, 1000.0, "default")
    assert len(found.inbound) == rules
    assert all(each.action is c.Action.ALLOW for each in found.inbound)


def test_a_port_entry_without_a_port_is_every_port_of_its_protocol() -> None:
    [found] = kubernetes("{podSelector: {}, ingress: [{ports: [{}, {port: 80}]}]}").inbound
    assert (found.protocol, found.destination.ports) == ("TCP", ())


def test_kubernetes_selectors_in_calicos_language() -> None:
    found = kubernetes(
        "{podSelector: {matchLabels: {b: x, a: 'y'}, matchExpressions: [{key: k, operator: NotIn, values: [v]},"
        " {key: e, operator: Exists}, {key: 'n', operator: DoesNotExist}, {key: i, operator: In, values: ['']}]}}"
    )
    assert found.selector == (
        "projectcalico.org/orchestrator == 'k8s' && a == 'y' && b == 'x'"
        " && k not in {'v'} && has(e) && !has(n) && i in {''}"
    )


def test_label_without_value_is_the_empty_text() -> None:
    """API servers read null so."""
    assert kubernetes("{podSelector: {matchLabels: {app: }}}").selector.endswith("&& app == ''")
    assert read("{apiVersion: v1, kind: Pod, metadata: {name: a, labels: {app: }}}").pods[
        "default", "a"
    ].labels == {"app": ""}


def test_label_that_is_not_quoted_is_named() -> None:
    reading = read_object(
        {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": "n", "labels": {"a": True, "b": "c"}}}
    )
    assert reading.found.namespaces["n"].labels == {"a": "True", "b": "c"}
    assert [str(flaw) for flaw in reading.flaws] == [
        "Namespace n: metadata.labels.a: must be text, not True, so it counts as that text"
    ]


def test_kubernetes_blocks_and_their_exceptions() -> None:
    [found] = kubernetes(
        "{podSelector: {}, egress: [{to: [{ipBlock: {cidr: 10.0.0.0/8, except: [10.1.0.0/16]}}]}]}"
    ).outbound
    assert found.destination.nets == (ip_network("10.0.0.0/8"),)
    assert found.destination.not_nets == (ip_network("10.1.0.0/16"),)


def test_octets_of_kubernetes_blocks_have_leading_zeros() -> None:
    """API servers accept them as decimal numbers."""
    [found] = kubernetes(
        "{podSelector: {}, egress: [{to: [{ipBlock: {cidr: 010.000.0.0/08, except: [10.010.0.0/16]}}]}]}"
    ).outbound
    assert found.destination.nets == (ip_network("10.0.0.0/8"),)
    assert found.destination.not_nets == (ip_network("10.10.0.0/16"),)


@pytest.mark.parametrize(
    "spec",
    [
        "{podSelector: {}, ingress: [{from: [{}]}]}",
        "{podSelector: {}, ingress: [{from: [{ipBlock: {cidr: x}}]}]}",
        "{podSelector: {}, ingress: [{from: [{ipBlock: {cidr: 10.0.0.0/8}, podSelector: {}}]}]}",
        "{podSelector: {}, ingress: [{ports: [{port: 80, endPort: 79}]}]}",
        "{podSelector: {}, ingress: [{ports: [{port: http, endPort: 80}]}]}",
        "{podSelector: {}, ingress: [{ports: [{endPort: 80}]}]}",
        "{podSelector: {}, ingress: [{ports: [{port: 80, protocol: tcp}]}]}",
        "{podSelector: {matchLabels: {'a b': x}}}",
        "{podSelector: {matchLabels: {enabled: true}}}",
        "{podSelector: {matchLabels: {version: 1.10}}}",
        "{podSelector: {matchExpressions: [{key: a, operator: Is}]}}",
        "{podSelector: {}, policyTypes: [Both]}",
    ],
)
def test_kubernetes_faults(spec: str) -> None:
    with pytest.raises(Faults):
        kubernetes(spec)


def test_no_order_is_the_last() -> None:
    assert policy("{}").order == LAST


KEYS = ("ingress", "source", "nets", "ports", "http", "paths", "methods", "selector", "action", "from", "spec")
VALUES = st.recursive(
    st.sampled_from((None, True, -5, 70000, "", "x", "10.0.0.0/8", "80:90", "TCP")),
    lambda inner: st.one_of(
        st.lists(inner, max_size=2), st.dictionaries(st.sampled_from(KEYS), inner, max_size=3)
    ),
    max_leaves=12,
)


@given(VALUES, st.sampled_from(("NetworkPolicy", "Tier", "Profile", "NetworkSet", "GlobalNetworkPolicy")))
def test_any_document_is_read_or_refused(spec: object, kind: str) -> None:
    with suppress(Faults):
        read(HEAD.format(kind=kind, spec=json.dumps(spec)))
