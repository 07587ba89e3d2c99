"""A value of a wrong type or form is a problem of its own object. It never stops the reader, which also serves all
other objects of the node.
"""

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import yaml

from ztunnel.kube.objects import ObjectKey
from ztunnel.policy.calico.compile import compile_resources
from ztunnel.policy.calico.incremental import Compiler
from ztunnel.policy.calico.objects import PolicyObjects
from ztunnel.policy.netpol.table_builder import TableBuilder

OBJECTS = """
apiVersion: v1
kind: Namespace
metadata: {name: shop, labels: {env: prod}}
---
apiVersion: v1
kind: Node
metadata: {name: n1, labels: {env: prod}}
status: {addresses: [{type: InternalIP, address: 10.9.0.1}]}
---
apiVersion: v1
kind: Pod
metadata: {name: a, namespace: shop, uid: u, labels: {app: a}, creationTimestamp: "2026-11-27T00:00:00Z"}
spec:
  nodeName: n1
  serviceAccountName: a
  hostNetwork: false
  containers: [{ports: [{name: web, containerPort: 80, protocol: TCP}]}]
status: {phase: Running, podIP: 10.0.0.1, podIPs: [{ip: 10.0.0.1}, {ip: "fd00::1"}]}
---
apiVersion: v1
kind: Service
metadata: {name: s, namespace: shop}
spec: {selector: {app: a}, ports: [{port: 80, targetPort: web, protocol: TCP}]}
---
apiVersion: v1
kind: ServiceAccount
metadata: {name: a, namespace: shop, labels: {role: front}}
---
apiVersion: networking.k8s.io/v1
kind: NetworkPolicy
metadata: {name: p, namespace: shop}
spec:
  podSelector: {matchLabels: {app: a}, matchExpressions: [{key: app, operator: In, values: [a]}]}
  policyTypes: [Ingress]
  ingress:
  - from: [{ipBlock: {cidr: 10.0.0.0/8, except: [10.1.0.0/16]}}, {podSelector: {}, namespaceSelector: {}}]
    ports: [{protocol: TCP, port: 80, endPort: 90}, {port: web}]
---
apiVersion: policy.networking.k8s.io/v1alpha1
kind: AdminNetworkPolicy
metadata: {name: p}
spec:
  priority: 1
  subject: {namespaces: {}}
  ingress:
  - action: Pass
    from: [{pods: {podSelector: {}, namespaceSelector: {}}}]
    ports: [{portNumber: {protocol: TCP, port: 80}}, {portRange: {protocol: UDP, start: 1, end: 5}}]
---
apiVersion: policy.networking.k8s.io/v1alpha2
kind: ClusterNetworkPolicy
metadata: {name: p}
spec:
  tier: Admin
  priority: 1
  subject: {pods: {podSelector: {}, namespaceSelector: {}}}
  egress:
  - action: Accept
    to: [{networks: [10.0.0.0/8]}, {nodes: {}}, {namespaces: {matchLabels: {env: prod}}}]
    protocols: [{tcp: {destinationPort: {number: 80}}}, {udp: {destinationPort: {range: {start: 1, end: 5}}}}]
---
apiVersion: projectcalico.org/v3
kind: NetworkPolicy
metadata: {name: p, namespace: shop}
spec:
  tier: first
  order: 1
  selector: app == 'a'
  serviceAccountSelector: all()
  types: [Ingress]
  ingress:
  - action: Allow
    protocol: TCP
    ipVersion: 4
    http: {methods: [GET], paths: [{exact: /a}]}
    source:
      nets: [10.0.0.0/8]
      notNets: [10.1.0.0/16]
      selector: app == 'a'
      notSelector: has(b)
      namespaceSelector: all()
      serviceAccounts: {names: [a], selector: all()}
    destination: {ports: [80, "90:99", web], notPorts: [81]}
  - {action: Deny, protocol: ICMP, icmp: {type: 8, code: 0}}
  - {action: Pass, destination: {services: {name: s, namespace: shop}}}
---
apiVersion: projectcalico.org/v3
kind: Tier
metadata: {name: first}
spec: {order: 5, defaultAction: Pass}
---
apiVersion: projectcalico.org/v3
kind: Profile
metadata: {name: kns.shop}
spec: {ingress: [{action: Allow}], egress: [{action: Deny}], labelsToApply: {a: b}}
---
apiVersion: projectcalico.org/v3
kind: NetworkSet
metadata: {name: s, namespace: shop, labels: {a: b}}
spec: {nets: [192.0.2.0/24, "fd00::/8"]}
---
apiVersion: projectcalico.org/v3
kind: HostEndpoint
metadata: {name: h, labels: {a: b}}
spec:
  {node: n1, expectedIPs: [10.0.0.5], profiles: [kns.shop], ports: [{name: web, protocol: TCP, port: 80}]}
"""
BODIES: list[dict[str, Any]] = list(yaml.safe_load_all(OBJECTS))
ODD: tuple[Any, ...] = (None, -1, 10**400, "8" * 5000, "'\"", "a/b", [], [None], {"later": 1}, {"": ""}, {None: 1})


def key_of(body: dict[str, Any]) -> ObjectKey:
    calico = body["kind"] == "NetworkPolicy" and body["apiVersion"].startswith("projectcalico.org/")
    metadata = body["metadata"]
    namespace = str(metadata.get("namespace") or "")
    return ObjectKey(body["kind"] + (".projectcalico.org" if calico else ""), namespace, metadata["name"])


def places(value: Any, here: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yield the paths of all values in an object, without the object itself."""
    if here:
        yield here
    inside = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, each in inside:
        yield from places(each, (*here, key))


def replaced(body: dict[str, Any], place: tuple[Any, ...], value: Any) -> dict[str, Any]:
    made = copy.deepcopy(body)
    holder: Any = made
    for key in place[:-1]:
        holder = holder[key]
    holder[place[-1]] = copy.deepcopy(value)
    return made


@pytest.mark.parametrize("body", BODIES, ids=lambda body: str(key_of(body)))
def test_an_odd_value_anywhere_does_not_stop_the_reader(body: dict[str, Any]) -> None:
    objects, compiler, builder = PolicyObjects(), Compiler(), TableBuilder()
    compiler.apply(objects.changes({key_of(each): each for each in BODIES}))
    before = compile_resources(compiler.resources)
    key = key_of(body)
    for place in places(body):
        for value in ODD:
            # The key is the one by which the source knows the object, whatever its metadata have become.
            compiler.apply(objects.changes({key: None}))
            compiler.apply(objects.changes({key: replaced(body, place, value)}))
        builder.build(compiler.compiled, "n1", map(str, objects.problems.values()))
        compiler.apply(objects.changes({key: body}))
        assert not objects.problems, place
        assert compiler.compiled == before, place


def test_a_port_of_a_later_release_closes_only_its_rule() -> None:
    body = {
        "apiVersion": "policy.networking.k8s.io/v1alpha2",
        "kind": "ClusterNetworkPolicy",
        "metadata": {"name": "later"},
        "spec": {
            "tier": "Admin",
            "priority": 1,
            "subject": {"namespaces": {}},
            "ingress": [
                {
                    "action": "Accept",
                    "from": [{"namespaces": {}}],
                    "protocols": [{"tcp": {"destinationPort": {"list": [80, 81]}}}],
                },
                {"action": "Deny", "from": [{"namespaces": {}}]},
            ],
        },
    }
    objects = PolicyObjects()
    [(_, _, policy)] = objects.changes({key_of(body): body})
    assert [rule.action for rule in policy.inbound] == ["deny"]
    assert "destinationPort.list: unknown; known are number, range" in str(objects.problems[key_of(body)])


def test_a_policy_of_a_misspelt_group_does_not_take_the_place_of_another() -> None:
    [calico] = [body for body in BODIES if key_of(body).kind == "NetworkPolicy.projectcalico.org"]
    typo = {**calico, "apiVersion": "networking.k8s.io.v1/v1"}
    key = ObjectKey("NetworkPolicy.networking.k8s.io.v1", "shop", "p")
    objects, compiler = PolicyObjects(), Compiler()
    compiler.apply(objects.changes({key_of(calico): calico}))
    before = dict(compiler.compiled.policies)
    compiler.apply(objects.changes({key: typo}))
    assert before.items() < compiler.compiled.policies.items()
    compiler.apply(objects.changes({key: None}))
    assert compiler.compiled.policies == before
