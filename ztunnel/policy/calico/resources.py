"""The resources of Calico and Kubernetes that policies are compiled from, as values. Pure.

:mod:`ztunnel.policy.calico.read` reads them from YAML. :mod:`ztunnel.policy.calico.compile` converts them to
PolicySync's objects.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from ipaddress import IPv4Address, IPv6Address
from typing import Final

from xds.model import calico as c
from xds.model.address import IpNetwork

#: The default clause of a rule: it matches all traffic.
NO_HTTP: Final = c.HttpMatch()
DEFAULT_TIER: Final = "default"
#: The predefined tiers: each tier's order, and whether flows without a matching rule pass to the next tier.
BUILT_IN_TIERS: Final = {
    "kube-admin": (1_000.0, True),
    DEFAULT_TIER: (1_000_000.0, False),
    "kube-baseline": (10_000_000.0, True),
}
LAST: Final = float("inf")
#: The labels that Calico gives objects of selectors, and the prefixes of labels that they inherit.
NAMESPACE_LABEL: Final = "projectcalico.org/namespace"
ACCOUNT_LABEL: Final = "projectcalico.org/serviceaccount"
ORCHESTRATOR_LABEL: Final = "projectcalico.org/orchestrator"
OF_NAMESPACE: Final = "pcns."
OF_ACCOUNT: Final = "pcsa."


def own_label(key: str) -> str:
    """Return the key of a label that users choose, as selectors of objects in namespaces see it.

    A key that Calico uses for a given or inherited label gets a slash in front, which no label has. Users who can
    create a pod choose its labels. In Calico a pod's label ``pcns.team`` replaces the label ``team`` of its
    namespace, so the pod could match rules about any namespace. The namespaceSelector of Kubernetes reads the
    labels of the Namespace only, and its podSelector those of the pod.
    """
    given = key in (NAMESPACE_LABEL, ACCOUNT_LABEL, ORCHESTRATOR_LABEL)
    return f"/{key}" if given or key.startswith((OF_NAMESPACE, OF_ACCOUNT)) else key


@dataclass(frozen=True, slots=True)
class Entity:
    """One side of a rule, as written; see :class:`~xds.model.calico.PeerMatch` for the meaning of the clauses.

    Attributes:
        ports: ranges, and names of ports.
        service: namespace and name of a Service. None if the rule names none.
        nodes: a selector of nodes, whose addresses match. None if the rule does not select nodes.
    """

    nets: tuple[IpNetwork, ...] = ()
    not_nets: tuple[IpNetwork, ...] = ()
    ports: tuple[tuple[int, int] | str, ...] = ()
    not_ports: tuple[tuple[int, int] | str, ...] = ()
    selector: str = ""
    not_selector: str = ""
    namespace_selector: str = ""
    account_names: tuple[str, ...] = ()
    account_selector: str = ""
    service: tuple[str, str] | None = None
    nodes: str | None = None


@dataclass(frozen=True, slots=True)
class ApiRule:
    """A rule as written."""

    action: c.Action
    source: Entity = Entity()
    destination: Entity = Entity()
    protocol: int | str | None = None
    not_protocol: int | str | None = None
    ip_version: int = 0
    http: c.HttpMatch = NO_HTTP
    icmp: c.IcmpMatch | None = None
    not_icmp: c.IcmpMatch | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ApiPolicy:
    """A policy of any kind. Kubernetes' policies are converted to this form.

    Attributes:
        order: inside its tier, lowest first.
        ingress, egress: whether it governs the direction, even with no rule.
        notes: rules that are stricter than written, because a part cannot be evaluated here.
    """

    id: c.PolicyId
    tier: str = DEFAULT_TIER
    order: float = LAST
    selector: str = ""
    namespace_selector: str = ""
    account_selector: str = ""
    ingress: bool = True
    egress: bool = False
    inbound: tuple[ApiRule, ...] = ()
    outbound: tuple[ApiRule, ...] = ()
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class ApiTier:
    """A tier of policies. ``order`` decides its place, lowest first."""

    name: str
    order: float
    passes: bool


@dataclass(frozen=True, slots=True)
class ApiProfile:
    """A profile: rules for its endpoints, and labels that they inherit."""

    name: str
    inbound: tuple[ApiRule, ...] = ()
    outbound: tuple[ApiRule, ...] = ()
    labels: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class NetworkSet:
    """Networks with labels, which selectors can select like endpoints. ``namespace`` is empty for a global set."""

    namespace: str
    name: str
    labels: Mapping[str, str]
    nets: tuple[IpNetwork, ...]


@dataclass(frozen=True, slots=True)
class NamedPort:
    """A container's port."""

    name: str
    protocol: str
    port: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Pod:
    """A pod.

    Attributes:
        uid: the name of its PolicySync socket. Empty without one.
        addresses: empty until the pod gets its first address, and again when it has finished.
        host_network: whether it uses the node's network. Such a pod is not an endpoint.
        captured: whether the mesh's node agent has redirected its traffic to the node's proxy.
        created: the creation time in the API server's form, which sorts as text. Empty if unknown.
        terminating: whether it is being deleted.
    """

    namespace: str
    name: str
    uid: str = ""
    labels: Mapping[str, str] = field(default_factory=dict)
    account: str = "default"
    node: str = ""
    addresses: tuple[IPv4Address | IPv6Address, ...] = ()
    ports: tuple[NamedPort, ...] = ()
    host_network: bool = False
    captured: bool = False
    created: str = ""
    terminating: bool = False

    @property
    def is_endpoint(self) -> bool:
        """Whether policies apply to the pod, if it owns its addresses."""
        return bool(self.addresses) and not self.host_network

    @property
    def claim(self) -> tuple[bool, str, str, str]:
        """A sort key for endpoints that have the same address. The endpoint with the greatest key owns the
        address.

        A pod that is being deleted, or an older one, has lost its address to another: its object may stay for days
        after its sandbox has ended, waiting for a finalizer.
        """
        return not self.terminating, self.created, self.namespace, self.name


@dataclass(frozen=True, slots=True)
class Labelled:
    """A namespace, or a service account in a namespace."""

    namespace: str
    name: str
    labels: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class HostEndpoint:
    """Interfaces of a node under Calico's policy. They are used only as targets of selectors, like a network set.

    Attributes:
        profiles: names of the profiles whose labels it inherits.
    """

    name: str
    labels: Mapping[str, str]
    addresses: tuple[IPv4Address | IPv6Address, ...]
    ports: tuple[NamedPort, ...]
    profiles: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Node:
    """A node, which rules of cluster-wide policies can select."""

    name: str
    labels: Mapping[str, str]
    addresses: tuple[IPv4Address | IPv6Address, ...]


@dataclass(frozen=True, slots=True)
class Service:
    """A Service: the pods that it selects, and its target ports. ``targets`` are numbers or names of ports."""

    namespace: str
    name: str
    selector: Mapping[str, str]
    targets: tuple[tuple[str, int | str], ...]


@dataclass(slots=True)
class Resources:
    """All resources that were read, by kind and key."""

    policies: dict[c.PolicyId, ApiPolicy] = field(default_factory=dict)
    tiers: dict[str, ApiTier] = field(default_factory=dict)
    profiles: dict[str, ApiProfile] = field(default_factory=dict)
    network_sets: dict[tuple[str, str], NetworkSet] = field(default_factory=dict)
    pods: dict[tuple[str, str], Pod] = field(default_factory=dict)
    namespaces: dict[str, Labelled] = field(default_factory=dict)
    accounts: dict[tuple[str, str], Labelled] = field(default_factory=dict)
    services: dict[tuple[str, str], Service] = field(default_factory=dict)
    nodes: dict[str, Node] = field(default_factory=dict)
    host_endpoints: dict[str, HostEndpoint] = field(default_factory=dict)
