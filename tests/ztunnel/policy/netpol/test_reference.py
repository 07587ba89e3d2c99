"""The table of random NetworkPolicies equals a second, direct reading of the API's documentation.

The reference below reads the objects as they are written (k8s.io/api/networking/v1). It shares no code with the
compiler, whose selectors, sets and chains it therefore checks as a whole, over changes of all objects.
"""

import copy
import random
from collections.abc import Iterator
from ipaddress import ip_address, ip_network
from itertools import product
from typing import Any, Final, TypeAlias

import pytest

from tests.generated import examples
from tproxy.expressions import SCTP, TCP, UDP
from tproxy.packets import Interpreter, Packet
from tproxy.resources import Table
from ztunnel.kube.objects import ObjectKey
from ztunnel.policy.calico.incremental import Compiler
from ztunnel.policy.calico.objects import PolicyObjects
from ztunnel.policy.netpol.table_builder import TableBuilder

Body: TypeAlias = dict[str, Any]
#: Namespace and name.
Key: TypeAlias = tuple[str, str]

NAMESPACES: Final = ("x", "y", "z")
#: Some keys look like words of Calico's selector language, or like labels that Calico's pods inherit.
KEYS: Final = ("app", "env", "in", "a.b/c", "pcns.env")
VALUES: Final = ("", "a", "b")
PROTOCOLS: Final = {"TCP": TCP, "UDP": UDP, "SCTP": SCTP}
PORTS: Final = (80, 81, 8080)
BLOCKS: Final = (
    ("0.0.0.0/0", ("10.0.0.0/30", "10.0.0.4/32")),
    ("10.0.0.0/29", ("10.0.0.2/32", "10.0.0.3/32")),
    ("255.255.255.255/32", ()),
    ("::/0", ("fd00::/126",)),
    ("fd00::/125", ("fd00::2/128", "fd00::4/127")),
)
OUTSIDE: Final = ("192.0.2.1", "10.0.0.6", "255.255.255.255", "fd00::7")


class Author:
    """Writes random objects."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)

    def maybe(self, share: float) -> bool:
        return self.random.random() < share

    def labels(self) -> dict[str, str]:
        return {key: self.random.choice(VALUES) for key in KEYS if self.maybe(0.5)}

    def selector(self) -> Body:
        made: Body = {}
        if self.maybe(0.4):
            made["matchLabels"] = {self.random.choice(KEYS): self.random.choice(VALUES)}
        if self.maybe(0.5):
            made["matchExpressions"] = [self.expression() for _ in range(self.random.randint(1, 2))]
        return made

    def expression(self) -> Body:
        operator = self.random.choice(("In", "NotIn", "Exists", "DoesNotExist"))
        made: Body = {"key": self.random.choice(KEYS), "operator": operator}
        if operator in ("In", "NotIn"):
            made["values"] = self.random.sample(VALUES, self.random.randint(1, 2))
        return made

    def peer(self) -> Body:
        if self.maybe(0.35):
            cidr, holes = self.random.choice(BLOCKS)
            return {"ipBlock": {"cidr": cidr, "except": [hole for hole in holes if self.maybe(0.5)]}}
        made: Body = {}
        if self.maybe(0.6):
            made["podSelector"] = self.selector()
        if not made or self.maybe(0.5):
            made["namespaceSelector"] = self.selector()
        return made

    def port(self) -> Body:
        made: Body = {"protocol": self.random.choice(tuple(PROTOCOLS))} if self.maybe(0.7) else {}
        kind = self.random.choice(("all", "number", "range", "name"))
        if kind == "number":
            made["port"] = self.random.choice(PORTS)
        elif kind == "range":
            made |= {"port": 80, "endPort": self.random.choice((80, 81, 9000))}
        elif kind == "name":
            made["port"] = self.random.choice(("web", "dns"))
        return made

    def rules(self, peers_key: str) -> list[Body]:
        made: list[Body] = [{} for _ in range(self.random.randint(0, 3))]
        for rule in made:
            if self.maybe(0.7):
                rule[peers_key] = [self.peer() for _ in range(self.random.randint(0, 3))]
            if self.maybe(0.6):
                rule["ports"] = [self.port() for _ in range(self.random.randint(0, 3))]
        return made

    def policy(self) -> Body:
        spec: Body = {"podSelector": self.selector()}
        if self.maybe(0.7):
            spec["policyTypes"] = self.random.choice((["Ingress"], ["Egress"], ["Ingress", "Egress"]))
        if self.maybe(0.7):
            spec["ingress"] = self.rules("from")
        if self.maybe(0.6):
            spec["egress"] = self.rules("to")
        return spec

    def pod(self, key: Key, number: int) -> Body:
        named = self.random.sample((("web", "TCP"), ("web", "UDP"), ("dns", "UDP"), ("dns", "SCTP")), 2)
        ports = [
            {"name": name, "protocol": protocol, "containerPort": self.random.choice(PORTS)}
            for name, protocol in named
        ]
        addresses = [f"10.0.0.{number}", f"fd00::{number}"][self.random.choice((slice(2), slice(2), slice(1)))]
        return {
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": {"name": key[1], "namespace": key[0], "labels": self.labels()},
            "spec": {"nodeName": self.random.choice(("n1", "n1", "n2")), "containers": [{"ports": ports}]},
            "status": {
                "phase": "Succeeded" if self.maybe(0.1) else "Running",
                "podIPs": [{"ip": address} for address in addresses],
            },
        }


class Reference:
    """The objects, and what the API's documentation says about a connection."""

    def __init__(self) -> None:
        self.namespaces: dict[str, dict[str, str]] = {}
        self.pods: dict[Key, Body] = {}
        self.policies: dict[Key, Body] = {}

    def ends(self) -> Iterator[tuple[Key | None, str]]:
        """Yield all addresses, with the pods that have them."""
        taken = set()
        for key, pod in self.pods.items():
            if pod["status"]["phase"] == "Running":
                taken |= {each["ip"] for each in pod["status"]["podIPs"]}
                yield from ((key, each["ip"]) for each in pod["status"]["podIPs"])
        yield from ((None, address) for address in OUTSIDE if address not in taken)

    def allows(
        self, source: tuple[Key | None, str], destination: tuple[Key | None, str], protocol: str, port: int
    ) -> bool:
        """Return whether the policies of node n1 allow a connection."""
        if source[0] == destination[0]:
            return True
        ways = (("Egress", "to", source, destination), ("Ingress", "from", destination, source))
        return all(
            own[0] is None
            or self.pods[own[0]]["spec"]["nodeName"] != "n1"
            or self._allows(way, peers_key, own[0], other, (protocol, port, destination[0]))
            for way, peers_key, own, other in ways
        )

    def _allows(
        self, way: str, peers_key: str, own: Key, other: tuple[Key | None, str], to: tuple[str, int, Key | None]
    ) -> bool:
        isolated = False
        for (namespace, _), spec in self.policies.items():
            types = spec.get("policyTypes") or ["Ingress", *(["Egress"] if spec.get("egress") else [])]
            if way not in types or namespace != own[0]:
                continue
            if not selects(spec["podSelector"], self.pods[own]["metadata"]["labels"]):
                continue
            isolated = True
            for rule in spec.get(way.lower()) or ():
                peers, ports = rule.get(peers_key), rule.get("ports")
                from_peer = not peers or any(self._is_peer(peer, namespace, other) for peer in peers)
                if from_peer and (not ports or any(self._is_port(each, *to) for each in ports)):
                    return True
        return not isolated

    def _is_peer(self, peer: Body, namespace: str, other: tuple[Key | None, str]) -> bool:
        key, address = other
        if "ipBlock" in peer:
            block = peer["ipBlock"]
            holes = [hole for hole in block["except"] if ip_address(address) in ip_network(hole)]
            return ip_address(address) in ip_network(block["cidr"]) and not holes
        if key is None:
            return False
        if "namespaceSelector" in peer:
            if not selects(peer["namespaceSelector"], self.namespaces[key[0]]):
                return False
        elif key[0] != namespace:
            return False
        return selects(peer.get("podSelector", {}), self.pods[key]["metadata"]["labels"])

    def _is_port(self, wanted: Body, protocol: str, port: int, destination: Key | None) -> bool:
        if wanted.get("protocol", "TCP") != protocol:
            return False
        first = wanted.get("port")
        if isinstance(first, str):
            pod = self.pods[destination] if destination is not None else None
            named = pod["spec"]["containers"][0]["ports"] if pod is not None else ()
            return {"name": first, "protocol": protocol, "containerPort": port} in named
        return first is None or first <= port <= wanted.get("endPort", first)


def selects(selector: Body, labels: dict[str, str]) -> bool:
    """Return whether a LabelSelector selects an object with these labels."""
    for term in selector.get("matchExpressions", ()):
        value, operator = labels.get(term["key"]), term["operator"]
        listed = value is not None and value in term.get("values", ())
        if not {
            "In": listed, "NotIn": not listed, "Exists": value is not None, "DoesNotExist": value is None
        }[operator]:  # fmt: skip
            return False
    return all(labels.get(key) == value for key, value in selector.get("matchLabels", {}).items())


def changed(author: Author, state: Reference) -> dict[ObjectKey, Body | None]:
    """Change some objects in the reference, and return them as an API server's."""
    made: dict[ObjectKey, Body | None] = {}
    for name in NAMESPACES:
        if name not in state.namespaces or author.maybe(0.2):
            state.namespaces[name] = author.labels()
            metadata: Body = {"name": name, "labels": state.namespaces[name]}
            made[ObjectKey("Namespace", "", name)] = {
                "apiVersion": "v1", "kind": "Namespace", "metadata": metadata
            }  # fmt: skip
    for number in range(1, 6):
        key = NAMESPACES[number % 3], f"p{number}"
        if key not in state.pods or author.maybe(0.3):
            state.pods[key] = author.pod(key, number)
            made[ObjectKey("Pod", *key)] = state.pods[key]
    for number in range(3):
        key = author.random.choice(NAMESPACES), f"p{number}"
        if author.maybe(0.6):
            state.policies[key] = author.policy()
            made[ObjectKey("NetworkPolicy", *key)] = {
                "apiVersion": "networking.k8s.io/v1",
                "kind": "NetworkPolicy",
                "metadata": {"namespace": key[0], "name": key[1]},
                "spec": state.policies[key],
            }
        elif state.policies.pop(key, None) is not None:
            made[ObjectKey("NetworkPolicy", *key)] = None
    return copy.deepcopy(made)


def differences(author: Author, state: Reference, table: Table) -> Iterator[str]:
    made = Interpreter(table)
    for source, destination in product(state.ends(), repeat=2):
        ends = ip_address(source[1]), ip_address(destination[1])
        if ends[0].version != ends[1].version or (source[0] is None and destination[0] is None):
            continue
        for protocol, port in author.random.sample(tuple(product(PROTOCOLS, (*PORTS, 85))), 3):
            packet = Packet(
                source=ends[0], destination=ends[1], protocol=PROTOCOLS[protocol], destination_port=port
            )
            wanted = state.allows(source, destination, protocol, port)
            if made.judge(packet).accepted is not wanted:
                yield f"{source} to {destination}, {protocol} {port}: {'allowed' if wanted else 'denied'}"


@pytest.mark.parametrize("seed", range(examples(100)))
def test_the_table_does_what_the_api_says(seed: int) -> None:
    author, state = Author(seed), Reference()
    objects, compiler, builder = PolicyObjects(), Compiler(), TableBuilder()
    for _ in range(3):
        compiler.apply(objects.changes(changed(author, state)))
        assert not objects.problems
        table = builder.build(compiler.compiled, "n1").table
        assert list(differences(author, state, table)) == [], (state.namespaces, state.pods, state.policies)
