"""The mesh file has nodes, pods, services, waypoints and policies.

::

    trust_domain: cluster.local           # default
    cluster: Kubernetes                   # name in baggage
    outbound: ALLOW_ANY                   # or REGISTRY_ONLY
    nodes:
      worker-1: {}
    pods:
      productpage:                        # a name, or namespace/name
        node: worker-1
        addresses: [10.244.1.3, "fd00:10:244:1::3"]
        service_account: bookinfo-productpage      # default: default
        mesh: true                        # false: known, but outside the mesh
        hbone: false                      # true: terminates tunnels itself
        workload: productpage             # for baggage; default: the pod's name
        version: v1
        labels: {app: productpage}        # for the selectors of calico's policies
    services:
      reviews:
        addresses: [10.96.183.192]
        ports: {http: 9080, metrics: {port: 80, target: 8080}}
        pods: [reviews-v1, reviews-v2]
    waypoints:
      bookinfo-reviews: {pods: [reviews-waypoint]}     # the waypoint of this service account
    policies:
      reviews-viewer:
        action: ALLOW                     # ALLOW, DENY, AUDIT
        service_account: bookinfo-reviews # or pods: [...]; without both: every pod of the namespace
        dry_run: false
        rules:
        - from:
            principals: [cluster.local/ns/default/sa/bookinfo-productpage]
            namespaces: [default]
            ip_blocks: [10.244.0.0/16]
            not_principals: []            # exceptions from the lists above
            not_namespaces: []
            not_ip_blocks: []
          to: {ports: [9080], not_ports: []}
    calico:                               # Calico's resources, served with --policy-sync
    - apiVersion: projectcalico.org/v3
      kind: GlobalNetworkPolicy
      metadata: {name: reviews}
      spec: {selector: app == 'reviews', ingress: [{action: Allow, source: {selector: app == 'productpage'}}]}

Names without a namespace are in ``default``. All faults are reported together, each with its place.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from xds.model.address import IpNetwork, canonical, parse_network
from xds.model.identity import SpiffeId
from ztunnel.policy.calico.read import read_object
from ztunnel.policy.calico.resources import Resources
from ztunnel.runtime.formats.config_reader import ConfigReader, Faults
from ztunnel.runtime.formats.file_kinds import FileKind, explained


class MeshFaults(Faults):
    """The mesh file cannot be used; the error lists its faults."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pod:
    """One pod. ``uid`` is derived from the name, because the file has no uids."""

    name: str
    namespace: str
    node: str
    addresses: tuple[str, ...]
    identity: SpiffeId
    mesh: bool
    hbone: bool
    workload: str
    version: str
    labels: Mapping[str, str] = field(default_factory=dict)

    @property
    def key(self) -> str:
        """``namespace/name``."""
        return f"{self.namespace}/{self.name}"


@dataclass(frozen=True, slots=True)
class ServicePort:
    """One port of a service; ``name`` becomes part of cluster names."""

    name: str
    port: int
    target: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Service:
    """One service; without addresses it is headless."""

    name: str
    namespace: str
    addresses: tuple[str, ...]
    ports: tuple[ServicePort, ...]
    pods: tuple[str, ...]

    @property
    def hostname(self) -> str:
        """The service's host name in the mesh."""
        return f"{self.name}.{self.namespace}.svc.cluster.local"


@dataclass(frozen=True, slots=True, kw_only=True)
class Waypoint:
    """A waypoint: the layer 7 proxy of one service account."""

    identity: SpiffeId
    pods: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyRule:
    """The sources and destinations of one rule. An empty list matches any. Lists with ``not_`` are exceptions."""

    principals: tuple[str, ...] = ()
    not_principals: tuple[str, ...] = ()
    namespaces: tuple[str, ...] = ()
    not_namespaces: tuple[str, ...] = ()
    ip_blocks: tuple[IpNetwork, ...] = ()
    not_ip_blocks: tuple[IpNetwork, ...] = ()
    ports: tuple[int, ...] = ()
    not_ports: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """An authorization policy and the pods that it applies to."""

    name: str
    namespace: str
    action: str
    dry_run: bool
    service_account: str
    pods: tuple[str, ...]
    rules: tuple[PolicyRule, ...]

    def selects(self, pod: Pod) -> bool:
        """Return whether the policy applies to a pod."""
        if pod.namespace != self.namespace:
            return False
        if self.pods:
            return pod.key in self.pods
        return not self.service_account or self.service_account == pod.identity.service_account


@dataclass(frozen=True, slots=True, kw_only=True)
class Mesh:
    """The content of a mesh file."""

    trust_domain: str
    cluster: str
    registry_only: bool
    nodes: tuple[str, ...]
    pods: Mapping[str, Pod]
    services: tuple[Service, ...]
    waypoints: tuple[Waypoint, ...]
    policies: tuple[Policy, ...]
    calico: Resources = field(default_factory=Resources)

    def on(self, node: str) -> list[Pod]:
        """Return the pods of a node that are in the mesh."""
        return [pod for pod in self.pods.values() if pod.node == node and pod.mesh]


def parse_mesh(text: str) -> Mesh:
    """Read a mesh file.

    Raises:
        MeshFaults: with every fault.
    """
    reader = _Reader()
    mesh = reader.mesh(reader.document(text, _KEYS))
    if reader.faults:
        raise MeshFaults(explained(reader.faults, text, FileKind.MESH))
    return mesh


_KEYS = ("trust_domain", "cluster", "outbound", "nodes", "pods", "services", "waypoints", "policies", "calico")


class _Reader(ConfigReader):
    def mesh(self, top: Mapping[str, Any]) -> Mesh:
        domain = self.trust_domain(top)
        nodes = tuple(self.mapping(top.get("nodes"), "nodes", None))
        for section in ("pods", "services", "waypoints", "policies"):
            self.unique_names(top.get(section), section)
        pods = {}
        for name, value in self.mapping(top.get("pods"), "pods", None).items():
            pod = self.pod(str(name), value, domain, nodes)
            if pod is not None:
                pods[pod.key] = pod
        services = [
            self.service(str(name), value, pods)
            for name, value in self.mapping(top.get("services"), "services", None).items()
        ]
        self.unique_addresses(pods.values(), services)
        waypoints = [
            self.waypoint(str(name), value, domain, pods)
            for name, value in self.mapping(top.get("waypoints"), "waypoints", None).items()
        ]
        policies = [
            self.policy(str(name), value, pods)
            for name, value in self.mapping(top.get("policies"), "policies", None).items()
        ]
        outbound = self.choice(top, "outbound", "", ("ALLOW_ANY", "REGISTRY_ONLY"))
        return Mesh(
            trust_domain=domain,
            cluster=self.text(top, "cluster", "", "Kubernetes"),
            registry_only=outbound == "REGISTRY_ONLY",
            nodes=nodes,
            pods=pods,
            services=tuple(services),
            waypoints=tuple(waypoints),
            policies=tuple(policies),
            calico=self.calico(top),
        )

    def trust_domain(self, top: Mapping[str, Any]) -> str:
        faults = len(self.faults)
        domain = self.text(top, "trust_domain", "", "cluster.local")
        self.identity(SpiffeId(domain, "default", "default"), "trust_domain")
        return domain if len(self.faults) == faults else "cluster.local"

    def identity(self, identity: SpiffeId, place: str) -> SpiffeId:
        """Return an identity, if proxies can read it in a certificate."""
        try:
            SpiffeId.parse(str(identity))
        except ValueError as error:
            self.fault(place, str(error))
        return identity

    def calico(self, top: Mapping[str, Any]) -> Resources:
        """Read the section ``calico``: policies, and labels of namespaces and accounts. Pods are taken from the
        rest of the file.
        """
        found = Resources()
        for index, document in enumerate(self.items(top, "calico", "file")):
            place = f"calico[{index}]"
            if not isinstance(document, Mapping):
                self.fault(place, f"must be a resource, not {document!r}")
                continue
            if document.get("kind") == "Pod":
                self.fault(place, "pods are those of the file, with their labels")
                continue
            read = read_object(document)
            for fault in (*read.faults, *(flaw.fault for flaw in read.flaws)):
                self.fault(place, fault)
            for part in fields(Resources):
                table = getattr(found, part.name)
                for key, value in getattr(read.found, part.name).items():
                    if key in table:
                        self.fault(place, f"{document.get('kind')} {key} is repeated")
                    table[key] = value
        return found

    def pod(self, name: str, value: object, domain: str, nodes: tuple[str, ...]) -> Pod | None:
        place = f"pods.{name}"
        known = ("node", "addresses", "service_account", "mesh", "hbone", "workload", "version", "labels")
        entry = self.mapping(value, place, known)
        namespace, short = _split(name)
        node = self.text(entry, "node", place, "")
        if node not in nodes:
            self.fault(f"{place}.node", f"no such node: {node!r}")
        addresses = self.canonical_addresses(entry, place)
        if not addresses:
            self.fault(f"{place}.addresses", "a pod needs at least one address")
        account = self.text(entry, "service_account", place, "default")
        self.plain_name(account, f"{place}.service_account")
        return Pod(
            name=short,
            namespace=namespace,
            node=node,
            addresses=addresses,
            identity=self.identity(SpiffeId(domain, namespace, account), place),
            mesh=self.flag(entry, "mesh", place, default=True),
            hbone=self.flag(entry, "hbone", place, default=False),
            workload=self.text(entry, "workload", place, short),
            version=self.text(entry, "version", place, "latest"),
            labels=self.labels(entry, place),
        )

    def labels(self, entry: Mapping[str, Any], place: str) -> dict[str, str]:
        labels = self.mapping(entry.get("labels"), f"{place}.labels", None)
        return {str(key): self.text(labels, key, f"{place}.labels", "") for key in labels}

    def unique_names(self, section: object, place: str) -> None:
        seen = set()
        for name in section if isinstance(section, Mapping) else ():
            key = _split(str(name))
            if key in seen:
                self.fault(f"{place}.{name}", f"{'/'.join(key)} is repeated")
            seen.add(key)

    def unique_addresses(self, pods: Iterable[Pod], services: Iterable[Service]) -> None:
        """Report addresses with two owners: connections to them would silently go to one of the two."""
        owners: dict[str, str] = {}
        places = [("pods", "", pod) for pod in pods] + [("services", "service ", each) for each in services]
        for section, kind, owner in places:
            for address in owner.addresses:
                if address in owners:
                    self.fault(f"{section}.{owner.name}.addresses", f"{address} is also {owners[address]}'s")
                owners[address] = f"{kind}{owner.namespace}/{owner.name}"

    def service(self, name: str, value: object, pods: Mapping[str, Pod]) -> Service:
        place = f"services.{name}"
        entry = self.mapping(value, place, ("addresses", "ports", "pods"))
        namespace, short = _split(name)
        ports: list[ServicePort] = []
        faults = len(self.faults)
        for port_name, port in self.mapping(entry.get("ports"), f"{place}.ports", None).items():
            where = f"{place}.ports.{port_name}"
            self.plain_name(str(port_name), where)
            if isinstance(port, Mapping):
                both = self.mapping(port, where, ("port", "target"))
                number = self.port(both.get("port"), f"{where}.port")
                target = self.port(both.get("target", number), f"{where}.target")
            else:
                number = target = self.port(port, where)
            # A faulty number was replaced by 1, which is no second fault.
            other = next((each.name for each in ports if each.port == number), None)
            if other is not None and len(self.faults) == faults:
                self.fault(where, f"{number} is also the port {other}")
            ports.append(ServicePort(str(port_name), number, target))
        if not ports:
            self.fault(f"{place}.ports", "a service needs at least one port")
        return Service(
            name=short,
            namespace=namespace,
            addresses=self.canonical_addresses(entry, place),
            ports=tuple(ports),
            pods=self.pod_names(entry, place, namespace, pods),
        )

    def waypoint(self, name: str, value: object, domain: str, pods: Mapping[str, Pod]) -> Waypoint:
        place = f"waypoints.{name}"
        entry = self.mapping(value, place, ("pods",))
        namespace, account = _split(name)
        return Waypoint(
            identity=self.identity(SpiffeId(domain, namespace, account), place),
            pods=self.pod_names(entry, place, namespace, pods),
        )

    def policy(self, name: str, value: object, pods: Mapping[str, Pod]) -> Policy:
        place = f"policies.{name}"
        entry = self.mapping(value, place, ("action", "service_account", "pods", "dry_run", "rules"))
        namespace, short = _split(name)
        if ".." in short:
            self.fault(place, "two dots in a row are for names made up for waypoints")
        rules = []
        listed = entry.get("rules", [])
        if not isinstance(listed, list):
            self.fault(f"{place}.rules", "must be a list")
            listed = []
        for index, rule in enumerate(listed):
            rules.append(self.rule(rule, f"{place}.rules[{index}]"))
        return Policy(
            name=short,
            namespace=namespace,
            action=self.choice(entry, "action", place, ("ALLOW", "DENY", "AUDIT")),
            dry_run=self.flag(entry, "dry_run", place, default=False),
            service_account=self.text(entry, "service_account", place, ""),
            pods=self.pod_names(entry, place, namespace, pods),
            rules=tuple(rules),
        )

    def rule(self, value: object, place: str) -> PolicyRule:
        entry = self.mapping(value, place, ("from", "to"))
        source_keys = (
            "principals",
            "not_principals",
            "namespaces",
            "not_namespaces",
            "ip_blocks",
            "not_ip_blocks",
        )
        source_place, target_place = f"{place}.from", f"{place}.to"
        source = self.mapping(entry.get("from"), source_place, source_keys)
        target = self.mapping(entry.get("to"), target_place, ("ports", "not_ports"))
        return PolicyRule(
            principals=self.texts(source, "principals", source_place),
            not_principals=self.texts(source, "not_principals", source_place),
            namespaces=self.texts(source, "namespaces", source_place),
            not_namespaces=self.texts(source, "not_namespaces", source_place),
            ip_blocks=self.networks(source, "ip_blocks", source_place),
            not_ip_blocks=self.networks(source, "not_ip_blocks", source_place),
            ports=self.ports(target, "ports", target_place),
            not_ports=self.ports(target, "not_ports", target_place),
        )

    def ports(self, entry: Mapping[str, Any], key: str, place: str) -> tuple[int, ...]:
        return tuple(self.port(value, f"{place}.{key}") for value in self.items(entry, key, place))

    def canonical_addresses(self, entry: Mapping[str, Any], place: str) -> tuple[str, ...]:
        found = []
        for value in self.items(entry, "addresses", place):
            try:
                found.append(canonical(str(value)))
            except ValueError:
                self.fault(f"{place}.addresses", f"not an IP address: {value!r}")
        return tuple(found)

    def networks(self, entry: Mapping[str, Any], key: str, place: str) -> tuple[IpNetwork, ...]:
        found: list[IpNetwork] = []
        for value in self.items(entry, key, place):
            network = parse_network(value) if isinstance(value, str) else None
            if network is None:
                self.fault(f"{place}.{key}", f"must be networks, such as 10.0.0.0/8, not {value!r}")
            else:
                found.append(network)
        return tuple(found)

    def pod_names(
        self, entry: Mapping[str, Any], place: str, namespace: str, pods: Mapping[str, Pod]
    ) -> tuple[str, ...]:
        keys = []
        for name in self.texts(entry, "pods", place):
            key = name if "/" in name else f"{namespace}/{name}"
            if key not in pods:
                self.fault(f"{place}.pods", f"no such pod: {name}")
            keys.append(key)
        return tuple(keys)


def _split(name: str) -> tuple[str, str]:
    """Return namespace and name of ``namespace/name`` or ``name``."""
    namespace, slash, short = name.partition("/")
    return (namespace, short) if slash else ("default", name)
