"""The decision of network-policy-api and Kubernetes about one connection, read literally from the objects: slow
and simple.

Admin policies by priority, then NetworkPolicy, which decides for a pod that it isolates, then baseline policies,
then allowed. The labels used by the tests below are the only ones; a peer is a pod, a node, or an address outside.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from ipaddress import ip_address, ip_network
from typing import Any

Body = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class End:
    """One end of a connection. ``pod`` is false for a node and for an address outside of the cluster."""

    address: str
    pod: bool = False
    name: str = ""
    namespace: str = ""
    labels: Mapping[str, str] = field(default_factory=dict)
    namespace_labels: Mapping[str, str] = field(default_factory=dict)
    node_labels: Mapping[str, str] | None = None
    ports: Mapping[str, tuple[str, int]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Connection:
    source: End
    destination: End
    protocol: str
    port: int


def selects(selector: Body, labels: Mapping[str, str]) -> bool:
    for key, value in selector.get("matchLabels", {}).items():
        if labels.get(key) != value:
            return False
    for term in selector.get("matchExpressions", ()):
        has, value = term["key"] in labels, labels.get(term["key"])
        match term["operator"]:
            case "In" if value not in term["values"]:
                return False
            case "NotIn" if value in term["values"]:
                return False
            case "Exists" if not has:
                return False
            case "DoesNotExist" if has:
                return False
    return True


def in_namespaced(pods: Body, end: End) -> bool:
    """Return whether an end is selected by ``pods``: two selectors of namespaces and pods. An empty one selects
    all.
    """
    return (
        end.pod
        and selects(pods.get("namespaceSelector", {}), end.namespace_labels)
        and selects(pods.get("podSelector", {}), end.labels)
    )


def in_subject(subject: Body, end: End) -> bool:
    if "pods" in subject:
        return in_namespaced(subject["pods"], end)
    return end.pod and selects(subject["namespaces"], end.namespace_labels)


def is_cluster_peer(peer: Body, end: End) -> bool:
    if "networks" in peer:
        return any(
            ip_address(end.address) in ip_network(text)
            for text in peer["networks"]
            if ip_network(text).version == ip_address(end.address).version
        )
    if "nodes" in peer:
        return end.node_labels is not None and selects(peer["nodes"], end.node_labels)
    return in_subject(peer, end)


def is_cluster_port(way: Body, connection: Connection) -> bool:
    [(kind, value)] = way.items()
    match kind:
        case "namedPort" | "destinationNamedPort":
            return connection.destination.ports.get(value) == (connection.protocol, connection.port)
        case "portNumber":
            return (value.get("protocol", "TCP"), value["port"]) == (connection.protocol, connection.port)
        case "portRange":
            return (
                value.get("protocol", "TCP") == connection.protocol
                and value["start"] <= connection.port <= value["end"]
            )
    if kind.upper() != connection.protocol:
        return False
    port = value.get("destinationPort")
    if port is None:
        return True
    if "number" in port:
        return bool(port["number"] == connection.port)
    return bool(port["range"]["start"] <= connection.port <= port["range"]["end"])


def cluster_rules(policies: list[Body], direction: str, subject: End) -> Iterator[Body]:
    """The rules of policies that select a pod, in order."""
    for policy in sorted(policies, key=lambda body: body["spec"].get("priority", 2000)):
        if in_subject(policy["spec"]["subject"], subject):
            yield from policy["spec"].get(direction, ())


def tier(policies: list[Body], direction: str, subject: End, peer: End, connection: Connection) -> bool | None:
    """Return whether the tier allows the connection; None if no rule decided, or one passed on."""
    for rule in cluster_rules(policies, direction, subject):
        peers = rule["from" if direction == "ingress" else "to"]
        ports = rule.get("ports") or rule.get("protocols")
        if not any(is_cluster_peer(each, peer) for each in peers):
            continue
        if ports is not None and not any(is_cluster_port(each, connection) for each in ports):
            continue
        return None if rule["action"] == "Pass" else rule["action"] != "Deny"
    return None


def network_policies(
    policies: list[Body], direction: str, subject: End, peer: End, connection: Connection
) -> bool | None:
    """Return whether the policies allow the connection; None if none isolates the pod."""
    isolated = False
    for policy in policies:
        spec = policy["spec"]
        if policy["metadata"]["namespace"] != subject.namespace or not selects(
            spec["podSelector"], subject.labels
        ):
            continue
        if direction.title() not in spec["policyTypes"]:
            continue
        isolated = True
        for rule in spec.get(direction, ()):
            peers = rule.get("from" if direction == "ingress" else "to")
            ports = rule.get("ports")
            if (not peers or any(in_namespaced(each, peer) for each in peers)) and (
                not ports or any((each["protocol"], each["port"]) == (connection.protocol, connection.port)
                                 for each in ports)
            ):  # fmt: skip
                return True
    return False if isolated else None


def allowed(objects: list[Body], connection: Connection) -> bool:
    of = {kind: [body for body in objects if body["kind"] == kind] for kind in {body["kind"] for body in objects}}
    clusters = of.get("ClusterNetworkPolicy", [])
    admin = of.get("AdminNetworkPolicy", []) + [body for body in clusters if body["spec"]["tier"] == "Admin"]
    baseline = [body for body in clusters if body["spec"]["tier"] == "Baseline"]
    baseline += of.get("BaselineAdminNetworkPolicy", [])
    ends = {"egress": connection.source, "ingress": connection.destination}
    for direction, subject in ends.items():
        if not subject.pod:
            continue
        peer = connection.destination if direction == "egress" else connection.source
        answers = (
            lambda s=subject, p=peer, d=direction: tier(admin, d, s, p, connection),
            lambda s=subject, p=peer, d=direction: network_policies(
                of.get("NetworkPolicy", []), d, s, p, connection
            ),
            lambda s=subject, p=peer, d=direction: tier(baseline, d, s, p, connection),
        )
        if next((answer for ask in answers if (answer := ask()) is not None), True) is False:
            return False
    return True
