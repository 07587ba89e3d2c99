"""The defects of Galaxy's policy controller, each as a test of the right behaviour; README.md has the whole
table.
"""

from ipaddress import ip_address, ip_network
from typing import Any

import pytest
import yaml

from tproxy.diff import table_steps
from tproxy.expressions import SCTP, TCP, UDP
from tproxy.operations import AddElements, DeleteElements
from tproxy.packets import Interpreter, Packet
from tproxy.resources import Table
from ztunnel.kube.objects import ObjectKey
from ztunnel.policy.calico.incremental import Compiler
from ztunnel.policy.calico.objects import PolicyObjects
from ztunnel.policy.netpol.table_builder import TableBuilder

ADDRESSES = {
    "x/a": ("10.1.0.1", "fd00:1::1"), "x/b": ("10.1.0.2", "fd00:1::2"), "x/host": ("192.168.0.1", "fd00:9::1"),
    "y/a": ("10.2.0.1", "fd00:2::1"), "y/b": ("10.2.0.2", "fd00:2::2"), "x/done": ("10.1.0.9", "fd00:1::9"),
}  # fmt: skip
A: dict[str, Any] = {"matchLabels": {"pod": "a"}}
B: dict[str, Any] = {"matchLabels": {"pod": "b"}}


class World:
    """Pods of namespaces x and y, all on this node."""

    def __init__(self) -> None:
        self.objects = PolicyObjects()
        self.compiler = Compiler()
        self.builder = TableBuilder()
        changes: dict[ObjectKey, Any] = {}
        for name in "xy":
            labels = {"ns": name}
            changes[ObjectKey("Namespace", "", name)] = {
                "apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name, "labels": labels}
            }  # fmt: skip
        for whose in ADDRESSES:
            changes.update([self.pod(whose)])
        self.change(changes)

    def pod(self, whose: str, port: int = 8080, **labels: str) -> tuple[ObjectKey, dict[str, Any]]:
        namespace, _, name = whose.partition("/")
        ports = [{"name": "web", "containerPort": port}]
        return ObjectKey("Pod", namespace, name), {
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": {"name": name, "namespace": namespace, "labels": {"pod": name, **labels}},
            "spec": {"nodeName": "n1", "hostNetwork": name == "host", "containers": [{"ports": ports}]},
            "status": {
                "phase": "Succeeded" if name == "done" else "Running",
                "podIPs": [{"ip": address} for address in ADDRESSES[whose]],
            },
        }

    def change(self, changes: dict[ObjectKey, Any]) -> Table:
        self.compiler.apply(self.objects.changes(changes))
        return self.table()

    def table(self) -> Table:
        return self.builder.build(self.compiler.compiled, "n1").table

    def policy(self, text: str, name: str = "p") -> Table:
        """Set a policy of namespace x from its spec in YAML."""
        body = {
            "apiVersion": "networking.k8s.io/v1",
            "kind": "NetworkPolicy",
            "metadata": {"name": name, "namespace": "x"},
            "spec": yaml.safe_load(text),
        }
        return self.change({ObjectKey("NetworkPolicy", "x", name): body})

    def reaches(self, source: str, destination: str, port: int = 80, protocol: int = TCP) -> bool:
        made = Interpreter(self.table())
        answers = {
            made.judge(
                Packet(
                    source=ip_address(ADDRESSES.get(source, (source, source))[version]),
                    destination=ip_address(ADDRESSES.get(destination, (destination, destination))[version]),
                    protocol=protocol,
                    destination_port=port,
                )
            ).accepted
            for version in ((0, 1) if source in ADDRESSES and destination in ADDRESSES else (0,))
        }
        [answer] = answers
        return answer


@pytest.fixture
def world() -> World:
    return World()


@pytest.mark.parametrize("rule", ["{}", "{from: []}", "{from: null}", "{ports: []}", "{from: [], ports: []}"])
def test_no_peers_means_any_peer(world: World, rule: str) -> None:
    world.policy(f"{{podSelector: {{}}, ingress: [{rule}]}}")
    assert world.reaches("y/a", "x/a")
    assert world.reaches("192.0.2.1", "x/a", 53, UDP)


def test_a_null_is_a_missing_field(world: World) -> None:
    world.policy("{podSelector: {}, ingress: [{from: [{podSelector: null}, {namespaceSelector: null}]}]}")
    assert not world.reaches("x/b", "x/a")
    [problem] = world.objects.problems.values()
    assert "spec.ingress[0].from[0]: must be ipBlock, podSelector or namespaceSelector" in str(problem)
    peer = "{ipBlock: null, podSelector: {matchLabels: {pod: b}}}"
    port = "{protocol: null, port: 80, endPort: null}"
    world.policy(f"{{podSelector: {{}}, ingress: [{{from: [{peer}], ports: [{port}]}}]}}")
    assert not world.objects.problems
    assert world.reaches("x/b", "x/a")
    assert not world.reaches("x/b", "x/a", 81)
    assert not world.reaches("x/b", "x/a", 80, UDP)


def test_a_namespace_has_the_label_of_its_name_in_files_too(world: World) -> None:
    for operator, has, lacks in (("In", "y/a", "x/b"), ("NotIn", "x/b", "y/a")):
        term = f"{{key: kubernetes.io/metadata.name, operator: {operator}, values: [y]}}"
        peer = f"{{namespaceSelector: {{matchExpressions: [{term}]}}}}"
        world.policy(f"{{podSelector: {{matchLabels: {{pod: a}}}}, ingress: [{{from: [{peer}]}}]}}")
        assert world.reaches(has, "x/a")
        assert not world.reaches(lacks, "x/a")


@pytest.mark.parametrize("rules", ["", ", ingress: []", ", ingress: null"])
def test_no_rules_means_nobody(world: World, rules: str) -> None:
    world.policy(f"{{podSelector: {{}}, policyTypes: [Ingress]{rules}}}")
    assert not world.reaches("y/a", "x/a")
    assert world.reaches("x/a", "y/a")


def test_pods_alone_are_those_of_the_own_namespace(world: World) -> None:
    world.policy("{podSelector: {matchLabels: {pod: a}}, ingress: [{from: [{podSelector: {}}]}]}")
    assert world.reaches("x/b", "x/a")
    assert not world.reaches("y/a", "x/a")


def test_pods_and_namespaces_are_an_intersection(world: World) -> None:
    peer = "{podSelector: {matchLabels: {pod: b}}, namespaceSelector: {matchLabels: {ns: y}}}"
    world.policy(f"{{podSelector: {{matchLabels: {{pod: a}}}}, ingress: [{{from: [{peer}]}}]}}")
    assert world.reaches("y/b", "x/a")
    assert not world.reaches("y/a", "x/a")
    assert not world.reaches("x/b", "x/a")


@pytest.mark.parametrize("label", ["pcns.ns", "pcns.projectcalico.org/name"])
def test_a_pods_own_labels_are_not_those_of_its_namespace(world: World, label: str) -> None:
    key = label.removeprefix("pcns.")
    namespaces = f"{{namespaceSelector: {{matchLabels: {{{key}: x}}}}}}"
    world.policy(f"{{podSelector: {{matchLabels: {{pod: a}}}}, ingress: [{{from: [{namespaces}]}}]}}")
    world.change(dict([world.pod("y/a", **{label: "x"})]))
    assert not world.reaches("y/a", "x/a")
    assert world.reaches("x/b", "x/a")
    # Nor does a label hide a namespace's label from a policy that selects by it.
    world.change(dict([world.pod("x/b", **{label: "y"})]))
    assert world.reaches("x/b", "x/a")


@pytest.mark.parametrize("label", ["pcns.ns", "pcsa.role", "projectcalico.org/namespace"])
def test_selectors_of_pods_read_such_a_label_of_the_pod(world: World, label: str) -> None:
    world.change(dict([world.pod("x/b", **{label: "y"})]))
    for operator, has in (("In", True), ("NotIn", False)):
        term = f"{{key: {label}, operator: {operator}, values: [y]}}"
        peer = f"{{podSelector: {{matchExpressions: [{term}]}}}}"
        world.policy(f"{{podSelector: {{matchLabels: {{pod: a}}}}, ingress: [{{from: [{peer}]}}]}}")
        assert world.reaches("x/b", "x/a") is has
    world.policy(f"{{podSelector: {{matchLabels: {{{label}: y}}}}}}")
    assert world.reaches("x/b", "x/a")
    assert not world.reaches("x/a", "x/b")
    service = {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": "s", "namespace": "x"},
        "spec": {"selector": {label: "y"}, "ports": [{"port": 80}]},
    }
    world.change({ObjectKey("Service", "x", "s"): service})
    policy = {
        "apiVersion": "projectcalico.org/v3",
        "kind": "NetworkPolicy",
        "metadata": {"name": "p", "namespace": "x"},
        "spec": {
            "selector": "pod == 'a'",
            "types": ["Egress"],
            "egress": [{"action": "Allow", "destination": {"services": {"name": "s", "namespace": "x"}}}],
        },
    }
    world.change({ObjectKey("NetworkPolicy", "x", "p"): None})
    world.change({ObjectKey("NetworkPolicy.projectcalico.org", "x", "p"): policy})
    assert world.reaches("x/a", "x/b")
    assert not world.reaches("x/a", "y/b")


def test_a_network_set_of_a_namespace_has_no_labels_of_pods_or_of_another_namespace(world: World) -> None:
    peer = "{namespaceSelector: {matchLabels: {ns: x}}}"
    world.policy(f"{{podSelector: {{matchLabels: {{pod: a}}}}, ingress: [{{from: [{peer}]}}]}}")
    labels = {"pcns.ns": "x", "projectcalico.org/orchestrator": "k8s"}
    for namespace in "xy":
        body = {
            "apiVersion": "projectcalico.org/v3",
            "kind": "NetworkSet",
            "metadata": {"name": "all", "namespace": namespace, "labels": labels},
            "spec": {"nets": ["0.0.0.0/0"]},
        }
        world.change({ObjectKey("NetworkSet", namespace, "all"): body})
        assert not world.reaches("192.0.2.1", "x/a")


def test_a_pod_names_no_service_account_by_a_label(world: World) -> None:
    body = {
        "apiVersion": "projectcalico.org/v3",
        "kind": "NetworkPolicy",
        "metadata": {"name": "p", "namespace": "x"},
        "spec": {
            "selector": "pod == 'a'",
            "ingress": [{"action": "Allow", "source": {"serviceAccounts": {"names": ["admin"]}}}],
        },
    }
    world.change({ObjectKey("NetworkPolicy.projectcalico.org", "x", "p"): body})
    key, pod = world.pod("x/b", **{"projectcalico.org/serviceaccount": "admin"})
    pod["spec"]["serviceAccountName"] = "b" * 63  # too long for the label that Calico gives
    world.change({key: pod})
    assert not world.reaches("x/b", "x/a")
    pod["spec"]["serviceAccountName"] = "admin"
    world.change({key: {**pod}})
    assert world.reaches("x/b", "x/a")


def test_both_ends_must_allow_on_one_node(world: World) -> None:
    world.policy("{podSelector: {matchLabels: {pod: a}}, policyTypes: [Egress], egress: [{}]}")
    assert world.reaches("x/a", "x/b")
    world.policy("{podSelector: {matchLabels: {pod: b}}, policyTypes: [Ingress]}", "q")
    assert not world.reaches("x/a", "x/b")


def test_names_of_ports_are_the_destinations(world: World) -> None:
    world.policy("{podSelector: {matchLabels: {pod: a}}, policyTypes: [Egress], egress: [{ports: [{port: web}]}]}")
    world.change(dict([world.pod("y/b", 9000)]))
    assert world.reaches("x/a", "y/a", 8080)
    assert world.reaches("x/a", "y/b", 9000)
    assert not world.reaches("x/a", "y/b", 8080)
    assert not world.reaches("x/a", "192.0.2.1", 8080)


def test_ranges_of_ports_include_both_ends(world: World) -> None:
    world.policy("{podSelector: {}, ingress: [{ports: [{port: 8000, endPort: 8010}]}]}")
    found = [port for port in (7999, 8000, 8005, 8010, 8011) if world.reaches("y/a", "x/a", port)]
    assert found == [8000, 8005, 8010]


def test_a_protocol_without_port_is_all_its_ports_and_no_other_protocol(world: World) -> None:
    world.policy("{podSelector: {}, ingress: [{ports: [{protocol: UDP}]}]}")
    assert world.reaches("y/a", "x/a", 1, UDP)
    assert not world.reaches("y/a", "x/a", 1, TCP)


def test_sctp_is_neither_tcp_nor_udp(world: World) -> None:
    world.policy("{podSelector: {}, ingress: [{ports: [{protocol: SCTP, port: 81}]}]}")
    assert [world.reaches("y/a", "x/a", 81, protocol) for protocol in (SCTP, TCP, UDP)] == [True, False, False]


def test_many_ports_are_a_set(world: World) -> None:
    ports = ", ".join(f"{{port: {number}}}" for number in range(1000, 1200, 2))
    world.policy(f"{{podSelector: {{}}, ingress: [{{ports: [{ports}]}}]}}")
    assert all(world.reaches("y/a", "x/a", number) == (number % 2 == 0) for number in range(1000, 1010))
    assert len([item for item in world.table().sets if item.name.startswith("p-")]) == 1


def test_many_blocks_are_a_set(world: World) -> None:
    """A rule for each block would make the table slow to apply, and open connections slow to evaluate."""
    block = "{{ipBlock: {{cidr: 192.0.{0}.0/25, except: [192.0.{0}.64/26]}}}}"
    blocks = ", ".join(block.format(number) for number in range(0, 200, 2))
    peers = f"{blocks}, {{ipBlock: {{cidr: 'fd00:2::/64'}}}}, {{podSelector: {{matchLabels: {{pod: b}}}}}}"
    ports = "[{port: 80}, {port: web, protocol: TCP}, {protocol: UDP}]"
    world.policy(f"{{podSelector: {{}}, ingress: [{{from: [{peers}], ports: {ports}}}]}}")
    for number in range(4):
        assert world.reaches(f"192.0.{number}.63", "x/a") == (number % 2 == 0)
        assert not world.reaches(f"192.0.{number}.64", "x/a")
    assert world.reaches("192.0.2.1", "x/a", 8080)
    assert world.reaches("192.0.2.1", "x/a", 53, UDP)
    assert not world.reaches("192.0.2.1", "x/a", 81)
    assert not world.reaches("198.51.100.1", "x/a", 53, UDP)
    assert world.reaches("x/b", "x/a")
    [rules] = [chain.rules for chain in world.table().chains if chain.name.startswith("in-")]
    assert len(rules) < 30
    assert {item.name[:2] for item in world.table().sets if item.name.startswith("n")} == {"n4", "n6"}
    assert len([item for item in world.table().sets if item.name.startswith("n")]) == 2
    assert "KubernetesNetworkPolicy/x/p ingress 0-100" in {rule.comment for rule in rules}


def test_blocks_without_any_address_allow_nothing(world: World) -> None:
    nothing = "{ipBlock: {cidr: 198.51.100.0/24, except: [198.51.100.0/24]}}"
    world.policy(f"{{podSelector: {{}}, ingress: [{{from: [{nothing}, {nothing}]}}]}}")
    assert not world.reaches("198.51.100.7", "x/a")
    assert not world.reaches("y/a", "x/a")


def test_every_address_is_a_network(world: World) -> None:
    world.policy("{podSelector: {}, ingress: [{from: [{ipBlock: {cidr: 0.0.0.0/0}}, {ipBlock: {cidr: '::/0'}}]}]}")
    assert world.reaches("y/a", "x/a")
    assert world.reaches("255.255.255.255", "x/a")
    assert world.reaches("0.0.0.0", "x/a")


def test_an_exception_cuts_its_own_block_only(world: World) -> None:
    wide = "{ipBlock: {cidr: 192.0.2.0/24, except: [192.0.2.64/26]}}"
    narrow = "{ipBlock: {cidr: 192.0.2.64/28}}"
    all_but_all = "{ipBlock: {cidr: 198.51.100.0/24, except: [198.51.100.0/24]}}"
    world.policy(f"{{podSelector: {{}}, ingress: [{{from: [{wide}, {narrow}, {all_but_all}]}}]}}")
    made = {last: world.reaches(f"192.0.2.{last}", "x/a") for last in (0, 63, 64, 79, 80, 127, 128, 255)}
    assert made == {0: True, 63: True, 64: True, 79: True, 80: False, 127: False, 128: True, 255: True}
    assert not world.reaches("198.51.100.7", "x/a")


def test_a_label_that_changes_leaves_the_old_sets_at_once(world: World) -> None:
    before = world.policy(
        "{podSelector: {matchLabels: {pod: a}}, ingress: [{from: [{podSelector: {matchLabels: {t: one}}}]}]}"
    )
    joined = world.change(dict([world.pod("x/b", t="one")]))
    assert world.reaches("x/b", "x/a")
    left = world.change(dict([world.pod("x/b", t="two")]))
    assert not world.reaches("x/b", "x/a")
    assert {type(step) for step in table_steps(before, joined)} == {AddElements}
    assert {type(step) for step in table_steps(joined, left)} == {DeleteElements}


def test_egress_rules_without_their_type_are_read(world: World) -> None:
    world.policy("{podSelector: {matchLabels: {pod: a}}, policyTypes: [Ingress], egress: [{to: []}]}")
    assert world.reaches("x/a", "y/a")
    assert not world.reaches("y/a", "x/a")


def test_a_pod_is_policed_as_soon_as_it_has_an_address(world: World) -> None:
    world.policy("{podSelector: {matchLabels: {pod: new}}}")
    key, body = world.pod("x/b")
    body["metadata"] |= {"name": "new", "labels": {"pod": "new"}}
    world.change({key: None, ObjectKey("Pod", "x", "new"): body})
    assert not world.reaches("y/a", "x/b")  # the address that was x/b's


def test_finished_pods_and_those_of_the_nodes_network_are_nobody(world: World) -> None:
    table = world.policy("{podSelector: {}, ingress: [{from: [{podSelector: {}}]}]}")
    keys = {element.key for item in table.sets for element in item.elements}
    for whose in ("x/done", "x/host"):
        assert not any(ip_address(address).packed in keys for address in ADDRESSES[whose])
    # The node's address is no peer, and its pods are policed by nobody.
    assert not world.reaches("x/host", "x/a")
    assert world.reaches("y/a", "x/host")
    blocks = "{ipBlock: {cidr: 192.168.0.1/32}}, {ipBlock: {cidr: 'fd00:9::1/128'}}"
    world.policy(f"{{podSelector: {{}}, ingress: [{{from: [{blocks}]}}]}}")
    assert world.reaches("x/host", "x/a")


def test_both_families_have_their_own_sets(world: World) -> None:
    table = world.policy("{podSelector: {}, ingress: [{from: [{podSelector: {}}]}]}")
    sizes = {item.name[:2]: len(item.elements) for item in table.sets if item.name[:2] in ("s4", "s6")}
    assert sizes == {"s4": 2, "s6": 2}


def test_ranges_without_what_is_cut_out() -> None:
    """The example of nftables' interval sets: a network without its exceptions is a set of ranges, not of
    networks.
    """
    from ztunnel.policy.netpol.intervals import ranges_of, without

    networks = ranges_of([ip_network("10.246.33.0/24")], 4)
    holes = ranges_of(
        [ip_network("10.246.33.13/32"), ip_network("10.246.33.10/32"), ip_network("10.246.33.12/32")], 4
    )
    start = int(ip_address("10.246.33.0"))
    found = [(first - start, last - start) for first, last in without(networks, holes)]
    assert found == [(0, 9), (11, 11), (14, 255)]
