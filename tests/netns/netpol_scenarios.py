"""The scenarios of Kubernetes' end-to-end tests of NetworkPolicy, as policies and probes.

A scenario is a list of steps. Each has policies by name (``x/name``, ``/name`` of the cluster) and probes, and may
change labels of pods and namespaces. ``selectors`` below are short forms of what a policy's author writes.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

Spec = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Step:
    """The active policies, and the traffic that they allow.

    Attributes:
        labels: labels of pods (``x/a``) and namespaces (``x``), in addition to their own.
    """

    policies: Mapping[str, Spec]
    probes: str
    labels: Mapping[str, Mapping[str, str]] = field(default_factory=dict)


def pods(*names: str) -> dict[str, Any]:
    if not names:
        return {}
    if len(names) == 1:
        return {"matchLabels": {"pod": names[0]}}
    return {"matchExpressions": [{"key": "pod", "operator": "In", "values": list(names)}]}


def spaces(*names: str) -> dict[str, Any]:
    return {"matchLabels": {"ns": names[0]}} if names else {}


def key(name: str, operator: str, *values: str) -> dict[str, Any]:
    return {
        "matchExpressions": [{"key": name, "operator": operator, **({"values": list(values)} if values else {})}]
    }


def ingress(selector: dict[str, Any], *rules: Spec) -> Spec:
    return {"podSelector": selector, "policyTypes": ["Ingress"], "ingress": list(rules)}


def egress(selector: dict[str, Any], *rules: Spec) -> Spec:
    return {"podSelector": selector, "policyTypes": ["Egress"], "egress": list(rules)}


def sources(*peers: Spec, ports: Sequence[Spec] = ()) -> Spec:
    return {"from": list(peers), **({"ports": list(ports)} if ports else {})}


def targets(*peers: Spec, ports: Sequence[Spec] = ()) -> Spec:
    return {"to": list(peers), **({"ports": list(ports)} if ports else {})}


def of_pods(*names: str) -> Spec:
    return {"podSelector": pods(*names)}


def of_spaces(*names: str) -> Spec:
    return {"namespaceSelector": spaces(*names)}


def port(number: int | str, protocol: str = "TCP", **more: int) -> Spec:
    return {"port": number, "protocol": protocol, **more}


def admin(priority: int, subject: Spec, tier: str = "Admin", **rules: Sequence[Spec]) -> Spec:
    return {"tier": tier, "priority": priority, "subject": {"namespaces": subject}, **rules}


def rule(action: str, of_namespaces: Spec, *protocols: Spec, side: str = "from") -> Spec:
    found = {"action": action, side: [{"namespaces": of_namespaces}]}
    return found | ({"protocols": list(protocols)} if protocols else {})


def tcp(number: int) -> Spec:
    return {"tcp": {"destinationPort": {"number": number}}}


A = pods("a")
NOT_X = key("ns", "NotIn", "x")
DENY_IN, DENY_OUT = ingress({}), egress({})
ALL = {"x/all": {"podSelector": {}, "policyTypes": ["Ingress", "Egress"]}}
METADATA = "kubernetes.io/metadata.name"

#: Addresses are filled in by the harness: ``{y/a}`` is that pod's IPv4 and IPv6 address, each as a host network.
SCENARIOS: dict[str, tuple[Step, ...]] = {
    "1 default-deny-ingress": (
        Step({"x/deny": DENY_IN}, "-y/a>x/a:80 -x/b>x/a:80 -z/c>x/c:81 +y/a>y/b:80 +x/a>y/a:81 +x/a>z/a:80"),
    ),
    "2 default-deny-all": (Step(ALL, "-y/a>x/a:80 -x/a>y/a:80 -x/b>x/a:81 +y/b>z/a:80"),),
    "3 only pod b of the own namespace": (
        Step({"x/p": ingress(A, sources(of_pods("b")))}, "+x/b>x/a:80 -y/b>x/a:80 -x/c>x/a:80 +y/b>x/b:80"),
    ),
    "4 deny all and allow all to a": (
        Step({"x/deny": DENY_IN, "x/p": ingress(A, {})}, "+y/a>x/a:80 +x/c>x/a:81 -x/c>x/b:80 -z/a>x/b:81"),
    ),
    "5 from all namespaces": (
        Step({"x/p": ingress(A, sources(of_spaces()))}, "+y/a>x/a:80 +z/b>x/a:81 +x/b>x/a:80 +x/c>x/a:80"),
    ),
    "6 only from namespace y": (
        Step({"x/p": ingress(A, sources(of_spaces("y")))}, "+y/a>x/a:80 +y/c>x/a:81 -x/b>x/a:80 -z/a>x/a:80"),
    ),
    "7 pods by expression": (
        Step(
            {"x/p": ingress(A, sources({"podSelector": key("pod", "In", "b")}))},
            "+x/b>x/a:80 -y/b>x/a:80 -x/c>x/a:81",
        ),
    ),
    "8 namespaces by expression": (
        Step(
            {"x/p": ingress(A, sources({"namespaceSelector": key("ns", "In", "y")}))},
            "+y/a>x/a:80 -x/b>x/a:80 -z/a>x/a:80",
        ),
    ),
    "9 pods or namespaces": (
        Step(
            {"x/p": ingress(A, sources(of_pods("b"), {"namespaceSelector": NOT_X}))},
            "+y/a>x/a:80 +z/c>x/a:80 +x/b>x/a:80 -x/c>x/a:80",
        ),
    ),
    "10 pods and namespaces": (
        Step(
            {"x/p": ingress(A, sources({"podSelector": pods("b"), "namespaceSelector": NOT_X}))},
            "+y/b>x/a:80 +z/b>x/a:80 -x/b>x/a:80 -y/a>x/a:80",
        ),
    ),
    "11 several values": (
        Step(
            {"x/p": ingress(A, sources({"podSelector": pods("b", "c"), "namespaceSelector": NOT_X}))},
            "+y/b>x/a:80 +y/c>x/a:80 -x/b>x/a:80 -y/a>x/a:80",
        ),
    ),
    "12 several rules": (
        Step(
            {"x/p": ingress(A, sources(of_pods("b")), sources(of_spaces("y")))},
            "+x/b>x/a:80 +y/a>x/a:80 -x/c>x/a:80 -z/a>x/a:80",
        ),
    ),
    "13 exactly y/a": (
        Step(
            {"x/p": ingress(A, sources({"podSelector": A, "namespaceSelector": spaces("y")}))},
            "+y/a>x/a:80 -y/b>x/a:80 -z/a>x/a:80",
        ),
    ),
    "14 one port from y": (
        Step(
            {"x/p": ingress(A, sources(of_spaces("y"), ports=[port(81)]))},
            "+y/a>x/a:81 -y/a>x/a:80 -x/b>x/a:81 -z/a>x/a:81 -y/a>x/a:81/udp",
        ),
    ),
    "15 stacked policies": (
        Step({"x/p": ingress(A, sources(of_spaces("y"), ports=[port(81)]))}, "+y/a>x/a:81 -y/a>x/a:80"),
        Step(
            {
                "x/p": ingress(A, sources(of_spaces("y"), ports=[port(81)])),
                "x/q": ingress(A, sources(of_spaces("y"), ports=[port(80)])),
            },
            "+y/a>x/a:81 +y/a>x/a:80 -z/a>x/a:80",
        ),
    ),
    "16 allow all": (Step({"x/p": ingress(A, {})}, "+y/a>x/a:80 +x/b>x/a:81 +z/a>x/a:80/udp"),),
    "17 named port": (
        Step({"x/p": ingress(A, sources(ports=[port("serve-81-tcp")]))}, "+y/a>x/a:81 -y/a>x/a:80 +x/b>x/a:81"),
    ),
    "18 named port from one namespace": (
        Step(
            {"x/p": ingress(A, sources(of_spaces("x"), ports=[port("serve-80-tcp")]))},
            "+x/b>x/a:80 -y/b>x/a:80 -x/b>x/a:81",
        ),
    ),
    "19 named port on the way out": (
        Step({"x/p": egress(A, targets(ports=[port("serve-80-tcp")]))}, "+x/a>y/a:80 -x/a>y/a:81 +x/a>x/b:80"),
    ),
    "20 allow all becomes deny": (
        Step({"x/p": ingress({}, {})}, "+y/a>x/a:80"),
        Step({"x/p": ingress({})}, "-y/a>x/a:80 -x/b>x/a:80"),
    ),
    "21 a namespace gains its label": (
        Step({"x/p": ingress(A, sources({"namespaceSelector": {"matchLabels": {"t": "1"}}}))}, "-y/a>x/a:80"),
        Step(
            {"x/p": ingress(A, sources({"namespaceSelector": {"matchLabels": {"t": "1"}}}))},
            "+y/a>x/a:80 -z/a>x/a:80",
            {"y": {"t": "1"}},
        ),
    ),
    "22 a client gains its label": (
        Step({"x/p": ingress(A, sources({"podSelector": {"matchLabels": {"t": "1"}}}))}, "-x/b>x/a:80"),
        Step(
            {"x/p": ingress(A, sources({"podSelector": {"matchLabels": {"t": "1"}}}))},
            "+x/b>x/a:80 -x/c>x/a:80",
            {"x/b": {"t": "1"}},
        ),
        Step({"x/p": ingress(A, sources({"podSelector": {"matchLabels": {"t": "1"}}}))}, "-x/b>x/a:80"),
    ),
    "23 only the own namespace": (
        Step({"x/p": ingress({}, sources(of_pods()))}, "+x/b>x/a:80 +x/c>x/b:81 -y/a>x/a:80 -z/b>x/c:80"),
    ),
    "24 a target gains its label": (
        Step({"x/p": ingress({"matchLabels": {"t": "1"}})}, "+y/a>x/a:80"),
        Step({"x/p": ingress({"matchLabels": {"t": "1"}})}, "-y/a>x/a:80 +y/a>x/b:80", {"x/a": {"t": "1"}}),
    ),
    "25 no egress of a pod": (Step({"x/p": egress(A)}, "-x/a>y/a:80 -x/a>x/b:80 +x/b>y/a:80 +y/a>x/a:80"),),
    "26 no egress of a namespace": (Step({"x/p": DENY_OUT}, "-x/a>y/a:80 -x/b>x/c:80 -x/c>z/a:81 +y/a>x/a:80"),),
    "27 both directions": (
        Step(
            {"x/i": ingress(A, sources(of_spaces("y"))), "x/e": egress(A, targets(of_spaces("z")))},
            "+y/a>x/a:80 -z/a>x/a:80 +x/a>z/a:80 -x/a>y/a:80",
        ),
    ),
    "28 the client's deny beats the server's allow": (
        Step({"x/e": egress(A), "y/i": ingress(A, {})}, "-x/a>y/a:80 +x/b>y/a:80"),
    ),
    "29 egress to y/a": (
        Step(
            {"x/p": egress(A, targets({"podSelector": A, "namespaceSelector": spaces("y")}))},
            "+x/a>y/a:80 -x/a>y/b:80 -x/a>z/a:80",
        ),
    ),
    "30 any port of TCP": (
        Step({"x/p": ingress(A, sources(ports=[{"protocol": "TCP"}]))}, "+y/a>x/a:80 +y/a>x/a:81 -y/a>x/a:80/udp"),
    ),
    "31 allow all beside a restriction, in": (
        Step({"x/p": ingress(A, sources(of_pods("b"))), "x/all": ingress({}, {})}, "+y/a>x/a:80 +z/a>x/a:81"),
    ),
    "32 allow all beside a restriction, out": (
        Step({"x/p": egress(A, targets(of_pods("b"))), "x/all": egress({}, {})}, "+x/a>y/a:80 +x/a>z/a:81"),
    ),
    "33 policies deleted": (
        Step(ALL, "-y/a>x/a:80 -x/a>y/a:80"),
        Step({}, "+y/a>x/a:80 +x/a>y/a:80 +x/b>x/a:81"),
    ),
    "34 egress to one address": (
        Step({"x/p": egress(A, targets("{y/a}"))}, "+x/a>y/a:80 -x/a>y/b:80 -x/a>x/b:80"),
    ),
    "35 a network with exceptions": (
        Step({"x/p": egress(A, targets("{y/*} but {y/b}"))}, "+x/a>y/c:80 -x/a>y/b:80"),
    ),
    "36 an exception that another policy allows": (
        Step({"x/p": egress(A, targets("{y/*} but {y/b}"))}, "-x/a>y/b:80"),
        Step(
            {"x/p": egress(A, targets("{y/*} but {y/b}")), "x/q": egress(A, targets("{y/b}"))},
            "+x/a>y/b:80 +x/a>y/c:80 -x/a>x/b:80",
        ),
    ),
    "37 directions are independent": (
        Step(
            {"x/i": ingress(A), "x/e": egress(A, targets(of_pods("b")))},
            "+x/a>x/b:80 -x/b>x/a:80 -x/a>x/c:80",
        ),
    ),
    "38 SCTP's port does not open TCP's": (
        Step(
            {"x/p": ingress(A, sources(ports=[port(81, "SCTP")]))},
            "-y/a>x/a:81 -y/a>x/a:81/udp +y/a>x/a:81/sctp",
        ),
    ),
    "39 a policy of SCTP isolates": (
        Step({"x/p": ingress(A, sources(ports=[port(80, "SCTP")]))}, "-y/a>x/a:80 -y/a>x/a:81 -y/a>x/a:81/sctp"),
    ),
    "40 UDP's rule and a TCP client": (
        Step({"x/p": ingress(A, sources(ports=[port(81, "UDP")]))}, "-y/a>x/a:81 +y/a>x/a:81/udp"),
    ),
    "41 a namespace by its name": (
        Step(
            {"x/p": ingress(A, sources({"namespaceSelector": {"matchLabels": {METADATA: "y"}}}))},
            "+y/a>x/a:80 -z/a>x/a:80",
        ),
    ),
    "42 egress to all but a namespace": (
        Step(
            {"x/p": egress(A, targets({"namespaceSelector": key(METADATA, "NotIn", "y")}))},
            "-x/a>y/a:80 +x/a>z/a:80 +x/a>x/b:80",
        ),
    ),
    "43-48 UDP and SCTP": (
        Step({"x/deny": DENY_IN}, "-y/a>x/a:80/udp -y/a>x/a:80/sctp +y/a>y/b:80/udp +y/a>y/b:80/sctp"),
        Step(
            {"x/p": ingress(A, sources(of_spaces("y"), ports=[port(81, "UDP"), port(81, "SCTP")]))},
            "+y/a>x/a:81/udp -y/a>x/a:80/udp -z/a>x/a:81/udp +y/a>x/a:81/sctp -y/a>x/a:80/sctp -y/a>x/a:81",
        ),
        Step(
            {"x/p": ingress(A, sources({"podSelector": A, "namespaceSelector": spaces("y")}))},
            "+y/a>x/a:80/udp -y/b>x/a:80/udp +y/a>x/a:80/sctp -y/b>x/a:80/sctp",
        ),
    ),
    "50 endPort": (
        Step({"x/p": ingress(A, sources(ports=[port(80, endPort=81)]))}, "+y/a>x/a:80 +y/a>x/a:81"),
        Step({"x/p": ingress(A, sources(ports=[port(79, endPort=80)]))}, "+y/a>x/a:80 -y/a>x/a:81"),
        # Refused by the API; from anywhere else it closes.
        Step({"x/q": ingress(A, sources(ports=[port("serve-80-tcp", endPort=81)]))}, "-y/a>x/a:80 -y/a>x/a:81"),
    ),
    "51 empty lists": (
        Step({"x/p": {"podSelector": A, "ingress": []}}, "-y/a>x/a:80 +x/a>y/a:80"),
        Step({"x/p": {"podSelector": A, "policyTypes": ["Ingress"]}}, "-y/a>x/a:80"),
        Step({"x/p": ingress(A, {"from": [], "ports": []})}, "+y/a>x/a:80 +z/a>x/a:81/udp"),
        Step({"x/p": ingress(A, sources(ports=[{}]))}, "+y/a>x/a:80 +y/a>x/a:81 -y/a>x/a:80/udp"),
    ),
    "52 the node and the pod itself": (
        Step(ALL, "+w1>x/a:80 +x/a>x/a:80 +w1>x/b:81/udp -w2>x/a:80"),
    ),
    # Rules of network-policy-api. An object outside namespaces is a ClusterNetworkPolicy.
    "53 an admin's denial beats a namespace's allow": (
        Step(
            {"x/p": ingress({}, {}), "/deny": admin(1, spaces("x"), ingress=[rule("Deny", spaces("y"))])},
            "-y/a>x/a:80 +z/a>x/a:80 -y/a>x/a:80/udp +x/a>y/a:80",
        ),
        Step(
            {
                "x/p": ingress({}, {}),
                "/deny": admin(1, spaces("x"), ingress=[rule("Deny", spaces("y"))]),
                "/first": admin(0, spaces("x"), ingress=[rule("Pass", spaces("y"), tcp(80))]),
            },
            "+y/a>x/a:80 -y/a>x/a:81 +z/a>x/a:81",
        ),
    ),
    "54 an admin's accept beats a namespace's denial": (
        Step(
            {"x/deny": DENY_IN, "/allow": admin(1, spaces("x"), ingress=[rule("Accept", spaces("z"), tcp(81))])},
            "+z/a>x/a:81 -z/a>x/a:80 -y/a>x/a:81 -z/a>x/a:81/udp",
        ),
    ),
    "55 a baseline is for pods that no namespace's policy isolates": (
        Step({"/base": admin(1, spaces("x"), "Baseline", ingress=[rule("Deny", {})])}, "-y/a>x/a:80 -x/b>x/a:80"),
        Step(
            {
                "/base": admin(1, spaces("x"), "Baseline", ingress=[rule("Deny", {})]),
                "x/p": ingress(A, sources(of_spaces("y"))),
            },
            "+y/a>x/a:80 -z/a>x/a:80 -y/a>x/b:80",
        ),
    ),
    "56 egress to networks and named ports": (
        Step(
            {
                "/out": admin(
                    1,
                    spaces("x"),
                    egress=[
                        {"action": "Accept", "to": ["{y/a}"], "protocols": [tcp(80)]},
                        rule("Accept", spaces("z"), {"destinationNamedPort": "serve-81-tcp"}, side="to"),
                        rule("Deny", {}, side="to"),
                    ],
                )
            },
            "+x/a>y/a:80 -x/a>y/a:81 -x/a>y/b:80 +x/b>z/a:81 -x/b>z/a:80 -x/b>z/a:81/udp +y/a>x/a:80",
        ),
    ),
}  # fmt: skip
