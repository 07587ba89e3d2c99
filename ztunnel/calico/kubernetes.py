"""Reads Kubernetes' kinds that make policy: pods, namespaces, accounts, services, nodes, NetworkPolicy. Pure."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from ipaddress import IPv4Address, IPv6Address, ip_network
from typing import Any, Final, TypeAlias

from xds.model import calico as c
from xds.model.address import IpNetwork
from xds.model.selector import SelectorError, parse_selector
from ztunnel.calico.resources import (
    ApiPolicy,
    ApiRule,
    Entity,
    Labelled,
    NamedPort,
    Node,
    Pod,
    Resources,
    Service,
)
from ztunnel.runtime.config_reader import ConfigReader

MAX_NETS: Final = 256

Json: TypeAlias = Mapping[str, Any]
IpAddress: TypeAlias = IPv4Address | IPv6Address

#: The kinds that policies of Kubernetes' form have in ids.
_POLICY_KINDS: Final = {
    "NetworkPolicy": "KubernetesNetworkPolicy",
    "StagedKubernetesNetworkPolicy": "StagedKubernetesNetworkPolicy",
}
#: The annotation by which Istio's node agent, and ours, say that a pod is in the mesh.
_REDIRECTION: Final = "ambient.istio.io/redirection"
_NAMED_PORT: Final = re.compile(r"[A-Za-z0-9_.-]{1,128}")
_RANGE: Final = re.compile(r"([0-9]{1,5}):([0-9]{1,5})")


@dataclass(frozen=True, slots=True)
class Document:
    """A document whose kind is known."""

    kind: str
    name: str
    metadata: Json
    body: Json
    where: str


class KubernetesReader(ConfigReader):
    """Reads documents of one kind each into :attr:`found`.

    Attributes:
        found: what was read.
    """

    def __init__(self) -> None:
        super().__init__()
        self.found = Resources()

    def put(self, table: dict[Any, Any], key: Any, value: Any, where: str) -> None:
        """Add a resource to its table, or record that it is there twice."""
        if key in table:
            self.fault(where, "is there twice")
        table[key] = value

    def labels(self, metadata: Json, where: str) -> Mapping[str, str]:
        """Return the labels of a resource."""
        found = self.mapping(metadata.get("labels"), f"{where}: metadata.labels", None)
        return {str(key): str(value) for key, value in found.items()}

    def namespace_of(self, resource: Document) -> str:
        """Return the namespace of a resource, ``default`` if it names none."""
        value = resource.metadata.get("namespace", "default")
        return value if isinstance(value, str) and value else "default"

    def nets(self, entry: Json, key: str, where: str) -> tuple[IpNetwork, ...]:
        """Return a list of networks, host bits cleared."""
        texts = self.texts(entry, key, where)
        if len(texts) > MAX_NETS:
            self.fault(f"{where}.{key}", f"has more than {MAX_NETS} networks")
        found = []
        for text in texts:
            try:
                found.append(ip_network(text, strict=False))
            except ValueError:
                self.fault(f"{where}.{key}", f"must be networks, such as 10.0.0.0/8, not {text!r}")
        return tuple(found)

    def read_namespace(self, resource: Document) -> None:
        """Read a Namespace."""
        found = Labelled("", resource.name, self.labels(resource.metadata, resource.where))
        self.put(self.found.namespaces, resource.name, found, resource.where)

    def account(self, resource: Document) -> None:
        """Read a ServiceAccount."""
        namespace = self.namespace_of(resource)
        found = Labelled(namespace, resource.name, self.labels(resource.metadata, resource.where))
        self.put(self.found.accounts, (namespace, resource.name), found, resource.where)

    def pod(self, resource: Document) -> None:
        """Read a Pod. One that has finished has no addresses any more."""
        spec = self.mapping(resource.body.get("spec"), f"{resource.where}: spec", None)
        status = self.mapping(resource.body.get("status"), f"{resource.where}: status", None)
        annotations = self.mapping(resource.metadata.get("annotations"), f"{resource.where}: annotations", None)
        finished = status.get("phase") in ("Failed", "Succeeded")
        listed = [
            entry.get("ip")
            for entry in self.items(status, "podIPs", f"{resource.where}: status")
            if isinstance(entry, Mapping)
        ]
        texts = listed or [text for text in [status.get("podIP")] if text]
        addresses = self.addresses(texts, f"{resource.where}: status.podIPs") if texts and not finished else ()
        ports = []
        # Init containers that keep running (native sidecars) have ports as well.
        for key in ("containers", "initContainers"):
            for container in self.items(spec, key, f"{resource.where}: spec"):
                for port in container.get("ports") or () if isinstance(container, Mapping) else ():
                    if isinstance(port, Mapping) and port.get("name"):
                        number = self.port(port.get("containerPort"), f"{resource.where}: spec.{key}.ports")
                        ports.append(
                            NamedPort(str(port["name"]), str(port.get("protocol", "TCP")).lower(), number)
                        )
        pod = Pod(
            namespace=self.namespace_of(resource),
            name=resource.name,
            uid=str(resource.metadata.get("uid", "")),
            labels=self.labels(resource.metadata, resource.where),
            account=self.text(spec, "serviceAccountName", f"{resource.where}: spec", "default"),
            node=self.text(spec, "nodeName", f"{resource.where}: spec", ""),
            addresses=addresses,
            ports=tuple(ports),
            host_network=spec.get("hostNetwork") is True,
            captured=annotations.get(_REDIRECTION) == "enabled",
        )
        self.put(self.found.pods, (pod.namespace, pod.name), pod, resource.where)

    def node(self, resource: Document) -> None:
        """Read a Node: its labels, and those of its addresses that are IP addresses."""
        place = f"{resource.where}: status"
        status = self.mapping(resource.body.get("status"), place, None)
        found: list[IpAddress] = []
        for entry in self.items(status, "addresses", place):
            text = entry.get("address") if isinstance(entry, Mapping) else None
            if isinstance(entry, Mapping) and str(entry.get("type", "")).endswith("IP"):  # others are names
                found += self.addresses([text], f"{place}.addresses")
        node = Node(resource.name, self.labels(resource.metadata, resource.where), tuple(found))
        self.put(self.found.nodes, resource.name, node, resource.where)

    def service(self, resource: Document) -> None:
        """Read a Service."""
        where = f"{resource.where}: spec"
        spec = self.mapping(resource.body.get("spec"), where, None)
        selector = self.mapping(spec.get("selector"), f"{where}.selector", None)
        targets = []
        for port in self.items(spec, "ports", where):
            entry = self.mapping(port, f"{where}.ports", None)
            target = entry.get("targetPort", entry.get("port"))
            if not isinstance(target, int | str):
                self.fault(f"{where}.ports", f"needs port or targetPort, not {port!r}")
                continue
            targets.append((str(entry.get("protocol", "TCP")).lower(), target))
        found = Service(
            self.namespace_of(resource),
            resource.name,
            {str(key): str(value) for key, value in selector.items()},
            tuple(targets),
        )
        self.put(self.found.services, (found.namespace, found.name), found, resource.where)

    def network_policy(self, resource: Document) -> None:
        """Convert Kubernetes' NetworkPolicy: rules that allow, of order 1,000 in the tier ``default``."""
        where = f"{resource.where}: spec"
        spec = self.mapping(resource.body.get("spec"), where, ("podSelector", "policyTypes", "ingress", "egress"))
        types = self.texts(spec, "policyTypes", where)
        for value in types:
            if value not in ("Ingress", "Egress"):
                self.fault(f"{where}.policyTypes", f"must be Ingress or Egress, not {value!r}")
        inbound = self._rules(spec, "ingress", "from", where)
        outbound = self._rules(spec, "egress", "to", where)
        namespace = self.namespace_of(resource)
        policy = ApiPolicy(
            id=c.PolicyId(_POLICY_KINDS[resource.kind], namespace, resource.name),
            order=1000.0,
            selector=self.label_selector(spec.get("podSelector"), f"{where}.podSelector", pods=True),
            ingress="Ingress" in types or not types,
            egress="Egress" in types or (not types and bool(spec.get("egress"))),
            inbound=inbound,
            outbound=outbound,
        )
        self.put(self.found.policies, policy.id, policy, resource.where)

    def _rules(self, spec: Json, key: str, peers_key: str, where: str) -> tuple[ApiRule, ...]:
        rules: list[ApiRule] = []
        for index, item in enumerate(self.items(spec, key, where)):
            place = f"{where}.{key}[{index}]"
            entry = self.mapping(item, place, (peers_key, "ports"))
            peers = [
                self._peer(peer, f"{place}.{peers_key}[{number}]")
                for number, peer in enumerate(self.items(entry, peers_key, place))
            ]
            for protocol, ports in self._ports(entry, place):
                for peer in peers or [Entity()]:
                    source, destination = (peer, Entity()) if key == "ingress" else (Entity(), peer)
                    destination = with_ports(destination, ports)
                    rules.append(ApiRule(c.Action.ALLOW, source, destination, protocol))
        return tuple(rules)

    def _ports(self, entry: Json, where: str) -> list[tuple[str | None, tuple[tuple[int, int] | str, ...]]]:
        """Return protocols and their ports; no list at all means any."""
        items = self.items(entry, "ports", where)
        if not items:
            return [(None, ())]
        by_protocol: dict[str, list[tuple[int, int] | str] | None] = {}
        for index, item in enumerate(items):
            place = f"{where}.ports[{index}]"
            port = self.mapping(item, place, ("protocol", "port", "endPort"))
            protocol = self.choice(port, "protocol", place, ("TCP", "UDP", "SCTP"))
            first, end = port.get("port"), port.get("endPort")
            if first is None:
                if end is not None:
                    self.fault(f"{place}.endPort", "needs port")
                by_protocol[protocol] = None  # every port of the protocol, whatever else is listed
                continue
            found = read_port(first)
            if found is None or (
                end is not None and not (isinstance(found, tuple) and is_port(end) and end >= found[0])
            ):
                self.fault(place, f"must be a port or a name, and endPort no lower, not {first!r} to {end!r}")
                continue
            ports = by_protocol.setdefault(protocol, [])
            if ports is not None:
                ports.append((found[0], end) if isinstance(found, tuple) and end is not None else found)
        return [(protocol, tuple(ports or ())) for protocol, ports in sorted(by_protocol.items())]

    def _peer(self, item: object, where: str) -> Entity:
        peer = self.mapping(item, where, ("ipBlock", "podSelector", "namespaceSelector"))
        if not peer:
            self.fault(where, "must be ipBlock, podSelector or namespaceSelector")
        if "ipBlock" in peer:
            if len(peer) > 1:
                self.fault(where, "ipBlock stands alone")
            block = self.mapping(peer["ipBlock"], f"{where}.ipBlock", ("cidr", "except"))
            nets = self.nets({"cidr": [block.get("cidr") or ""]}, "cidr", f"{where}.ipBlock")
            return Entity(nets=nets, not_nets=self.nets(block, "except", f"{where}.ipBlock"))
        namespaces = peer.get("namespaceSelector")
        return Entity(
            selector=self.label_selector(peer.get("podSelector"), f"{where}.podSelector", pods=True),
            namespace_selector=""
            if namespaces is None
            else self.label_selector(namespaces, f"{where}.namespaceSelector", pods=False),
        )

    def label_selector(self, value: object, where: str, *, pods: bool) -> str:
        """Return a LabelSelector in Calico's language; of pods, with the term that makes them Kubernetes' own."""
        selector = self.mapping(value, where, ("matchLabels", "matchExpressions"))
        terms = ["projectcalico.org/orchestrator == 'k8s'"] if pods else []
        labels = self.mapping(selector.get("matchLabels"), f"{where}.matchLabels", None)
        terms += [f"{key} == '{labels[key]}'" for key in sorted(labels)]
        for index, item in enumerate(self.items(selector, "matchExpressions", where)):
            place = f"{where}.matchExpressions[{index}]"
            entry = self.mapping(item, place, ("key", "operator", "values"))
            key = self.text(entry, "key", place, "")
            values = self.texts(entry, "values", place) if entry.get("values") != [""] else ("",)
            operator = self.choice(entry, "operator", place, ("In", "NotIn", "Exists", "DoesNotExist"))
            listed = "{" + ", ".join(f"'{value}'" for value in values) + "}"
            terms.append(
                {
                    "In": f"{key} in {listed}",
                    "NotIn": f"{key} not in {listed}",
                    "Exists": f"has({key})",
                    "DoesNotExist": f"!has({key})",
                }[operator]
            )
        text = " && ".join(terms) or "all()"
        try:
            parse_selector(text)
        except SelectorError as error:
            self.fault(where, str(error))
        return text


def read_port(value: object) -> tuple[int, int] | str | None:
    """Read a port, a range ``first:last`` or the name of a port; None if it is none of them."""
    if is_port(value):
        assert isinstance(value, int)
        return value, value
    if not isinstance(value, str):
        return None
    if value.isascii() and value.isdigit():
        return read_port(int(value))
    if (found := _RANGE.fullmatch(value)) is not None:
        first, last = int(found[1]), int(found[2])
        return (first, last) if first <= last <= 65535 else None
    return value if _NAMED_PORT.fullmatch(value) else None


def is_port(value: object) -> bool:
    """Return whether a value is the number of a port."""
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 65536


def with_ports(entity: Entity, ports: tuple[tuple[int, int] | str, ...]) -> Entity:
    """Return a peer of Kubernetes' form with the ports of its rule."""
    return replace(entity, ports=ports)
