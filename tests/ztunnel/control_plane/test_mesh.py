"""The mesh file: values, and the place of every fault."""

from typing import Any

import pytest
import yaml

from tests.ztunnel.control_plane.meshes import document, mesh
from xds.model.identity import SpiffeId
from ztunnel.control_plane.command import refuse_exposed
from ztunnel.control_plane.mesh import MeshFaults, parse_mesh


def test_defaults_and_namespaces() -> None:
    read = mesh(
        pods={
            "web": {"node": "worker", "addresses": ["::ffff:10.0.0.1"]},
            "shop/cart": {"node": "worker", "addresses": ["fd00::1"]},
        },
        services={
            "shop/cart": {"addresses": [], "ports": {"tcp": {"port": 80, "target": 8080}}, "pods": ["cart"]}
        },
        policies={},
    )
    web = read.pods["default/web"]
    assert (web.addresses, web.identity) == (("10.0.0.1",), SpiffeId("cluster.local", "default", "default"))
    assert web.mesh
    assert read.services[0].pods == ("shop/cart",)
    assert read.services[0].hostname == "cart.shop.svc.cluster.local"
    assert (read.services[0].ports[0].port, read.services[0].ports[0].target) == (80, 8080)


FAULTS: list[tuple[dict[str, Any], str]] = [
    ({"typo": 1}, "file.typo: unknown; known are trust_domain"),
    ({"nodes": []}, "nodes: must be a mapping"),
    ({"calico": {}}, "file.calico: must be a list"),
    ({"calico": ["x"]}, "calico[0]: must be a resource, not 'x'"),
    (
        {"calico": [{"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "p"}}]},
        "calico[0]: pods are those of the file",
    ),
    (
        {
            "calico": [
                {
                    "apiVersion": "projectcalico.org/v3",
                    "kind": "GlobalNetworkPolicy",
                    "metadata": {"name": "one"},
                    "spec": {"selector": "app ==", "ingress": [{"action": "Allow"}]},
                }
            ]
        },
        "calico[0]: GlobalNetworkPolicy one: spec.selector: ",
    ),
    (
        {"calico": [{"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": "shop"}}] * 2},
        "calico[1]: Namespace shop is repeated",
    ),
    (
        {"pods": {"p": {"node": "worker", "addresses": ["10.0.0.1"], "labels": []}}},
        "pods.p.labels: must be a mapping",
    ),
    (
        {"pods": {"p": {"node": "worker", "addresses": ["10.0.0.1"], "labels": {"enabled": True}}}},
        "pods.p.labels.enabled: must be text, not true",
    ),
    ({"trust_domain": "d\u00fcsseldorf"}, "trust_domain: not a workload identity"),
    ({"trust_domain": ""}, "trust_domain: not a workload identity"),
    (
        {"pods": {"caf\u00e9/p": {"node": "worker", "addresses": ["10.0.0.1"]}}},
        "pods.caf\u00e9/p: not a workload identity",
    ),
    ({"waypoints": {"a b": {}}}, "waypoints.a b: not a workload identity"),
    ({"outbound": "SOME"}, "outbound: must be one of ALLOW_ANY, REGISTRY_ONLY"),
    ({"pods": {"p": {"node": "mars", "addresses": ["10.0.0.1"]}}}, "pods.p.node: no such node: 'mars'"),
    ({"pods": {"p": {"node": "worker", "addresses": []}}}, "pods.p.addresses: a pod needs at least one address"),
    ({"pods": {"p": {"node": "worker", "addresses": ["x"]}}}, "pods.p.addresses: not an IP address: 'x'"),
    ({"pods": {"p": {"node": "worker", "addresses": "10.0.0.1"}}}, "pods.p.addresses: must be a list"),
    (
        {"pods": {"p": {"node": "worker", "addresses": ["10.0.0.1"], "mesh": "yes"}}},
        "pods.p.mesh: must be true or false",
    ),
    (
        {"pods": {"p": {"node": "worker", "addresses": ["10.0.0.1"], "service_account": "a_b"}}},
        "pods.p.service_account: must be letters, digits",
    ),
    (
        {"pods": {n: {"node": "worker", "addresses": ["10.0.0.1"]} for n in ("p", "q")}},
        "pods.q.addresses: 10.0.0.1 is also default/p's",
    ),
    (
        {"services": {n: {"addresses": ["10.9.0.1"], "ports": {"a": 1}} for n in ("s", "t")}},
        "services.t.addresses: 10.9.0.1 is also service default/s's",
    ),
    (
        {
            "pods": {"p": {"node": "worker", "addresses": ["fd00::1"]}},
            "services": {"s": {"addresses": ["fd00:0::1"], "ports": {"a": 1}}},
        },
        "services.s.addresses: fd00::1 is also default/p's",
    ),
    ({"services": {"s": {"ports": {"a": 80, "b": {"port": 80}}}}}, "services.s.ports.b: 80 is also the port a"),
    ({"services": {"s": {"ports": {}}}}, "services.s.ports: a service needs at least one port"),
    ({"services": {"s": {"ports": {"a_b": 1}}}}, "services.s.ports.a_b: must be letters"),
    ({"services": {"s": {"ports": {"a": 0}}}}, "services.s.ports.a: must be a port"),
    ({"services": {"s": {"ports": {"a": 1}, "pods": ["gone"]}}}, "services.s.pods: no such pod: gone"),
    ({"waypoints": {"w": {"pods": ["gone"]}}}, "waypoints.w.pods: no such pod: gone"),
    ({"services": {n: {"ports": {"a": 1}} for n in ("s", "default/s")}}, "default/s is repeated"),
    ({"policies": {"a..b": {}}}, "policies.a..b: two dots in a row"),
    ({"policies": {"p": {"action": "MAYBE"}}}, "policies.p.action: must be one of ALLOW, DENY, AUDIT"),
    ({"policies": {"p": {"rules": {}}}}, "policies.p.rules: must be a list"),
    ({"policies": {"p": {"rules": [{"when": 1}]}}}, "policies.p.rules[0].when: unknown"),
    (
        {"policies": {"p": {"rules": [{"from": {"ip_blocks": ["10.0.0.1/33"]}}]}}},
        "policies.p.rules[0].from.ip_blocks: must be networks, such as 10.0.0.0/8, not '10.0.0.1/33'",
    ),
    (
        {"policies": {"p": {"rules": [{"from": {"not_ip_blocks": [10]}}]}}},
        "policies.p.rules[0].from.not_ip_blocks: must be networks, such as 10.0.0.0/8, not 10",
    ),
    (
        {"policies": {"p": {"rules": [{"to": {"ports": ["http"]}}]}}},
        "policies.p.rules[0].to.ports: must be a port",
    ),
]


@pytest.mark.parametrize(("changes", "words"), FAULTS, ids=[words[:40] for _, words in FAULTS])
def test_every_fault_has_its_place(changes: dict[str, Any], words: str) -> None:
    base = {"nodes": {"worker": {}}, "pods": {}, "services": {}, "policies": {}}
    with pytest.raises(MeshFaults) as error:
        parse_mesh(yaml.safe_dump({**base, **changes}))
    assert words in str(error.value)


def test_faults_come_together() -> None:
    with pytest.raises(MeshFaults) as error:
        parse_mesh(yaml.safe_dump(document(outbound="x", pods={"p": {"node": "mars", "addresses": ["y"]}})))
    assert len(error.value.faults) > 3


def test_a_faulty_trust_domain_is_one_fault() -> None:
    with pytest.raises(MeshFaults) as error:
        parse_mesh(yaml.safe_dump(document(trust_domain="a b")))
    assert len(error.value.faults) == 1


@pytest.mark.parametrize(
    "text",
    [
        "[",
        "- list",
        "nodes: {a: {}}\nnodes: {}",
        '{"cluster": "\\ud800"}',
        f'{{"cluster": {"1" * 5000}}}',
        f"cluster: {'1' * 5000}",
        "outbound: !!bool x",
        "cluster: !!timestamp x",
        f"nodes: {'[' * 100_000}",
        f"nodes: {'{a: ' * 100_000}",
        "- " * 100_000,
        "? " * 100_000,
    ],
    ids=range(12),
)
def test_an_unreadable_file_is_refused(text: str) -> None:
    with pytest.raises(MeshFaults):
        parse_mesh(text)


@pytest.mark.parametrize(
    ("address", "refused"),
    [
        ("unix:/run/x", False),
        ("127.0.0.1:1", False),
        ("[::1]:1", False),
        ("localhost:1", False),
        ("0.0.0.0:1", True),
        ("10.0.0.1:1", True),
        ("host.example:1", True),
    ],
)
def test_private_keys_are_not_served_to_a_network(address: str, refused: bool) -> None:
    assert (refuse_exposed([address]) is not None) is refused
