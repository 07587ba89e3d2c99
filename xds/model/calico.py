"""Calico's policy as PolicySync tells it: endpoints, tiers, policies, rules, IP sets, and what changes them.

These are PolicySync's messages (package ``felix``) as values. A rule has every clause that Calico's API has,
already compiled: selectors of pods became IP sets, of which rules carry the ids. All clauses of a rule must hold;
an empty one holds always.
"""

from dataclasses import dataclass, field
from enum import Enum, StrEnum
from typing import Final, TypeAlias

from xds.model.address import IpNetwork

#: Kinds whose policies are evaluated on request only: they say what they would do.
STAGED_KINDS: Final = frozenset(
    {"StagedNetworkPolicy", "StagedGlobalNetworkPolicy", "StagedKubernetesNetworkPolicy"}
)

#: Names of IP protocols in rules, by number. Calico knows these; others are written as numbers.
PROTOCOLS: Final = {"icmp": 1, "tcp": 6, "udp": 17, "icmpv6": 58, "sctp": 132, "udplite": 136}
#: The protocols whose packets have a type and a code, by IP version.
ICMP_PROTOCOLS: Final = {4: 1, 6: 58}


class Direction(StrEnum):
    """Seen from the endpoint whose policies are evaluated."""

    INGRESS = "ingress"
    EGRESS = "egress"


class Action(StrEnum):
    """What a rule that matches does.

    Texts of the wire are read in any case; ``next-tier`` is Felix's for ``pass``.
    """

    ALLOW = "allow"
    DENY = "deny"
    LOG = "log"
    PASS = "pass"
    UNKNOWN = "unknown"

    @property
    def may_deny(self) -> bool:
        """Whether leaving the rule out could let something through that it means to stop.

        A rule that passes keeps the rest of its tier from allowing.
        """
        return self in (Action.DENY, Action.PASS, Action.UNKNOWN)


@dataclass(frozen=True, slots=True)
class PolicyId:
    """The key of a policy.

    In the form before Calico 3.32 ``kind`` is empty and ``namespace`` has the tier's name.
    """

    kind: str
    namespace: str
    name: str

    def __str__(self) -> str:
        return "/".join(part for part in (self.kind, self.namespace, self.name) if part)


@dataclass(frozen=True, slots=True)
class EndpointId:
    """The key of an endpoint: ``k8s``, ``namespace/pod``, ``eth0``."""

    orchestrator: str
    workload: str
    endpoint: str

    def __str__(self) -> str:
        return f"{self.orchestrator}/{self.workload}/{self.endpoint}"


@dataclass(frozen=True, slots=True)
class PathMatch:
    """A path of an HTTP clause, or with ``prefix`` everything at and below it.

    See :mod:`ztunnel.calico.http_path`.
    """

    path: str
    prefix: bool


@dataclass(frozen=True, slots=True)
class HttpMatch:
    """One of the methods (exact, ``*`` is any) and one of the paths; an empty list is satisfied."""

    methods: tuple[str, ...] = ()
    paths: tuple[PathMatch, ...] = ()


@dataclass(frozen=True, slots=True)
class IcmpMatch:
    """A type of ICMP or ICMPv6, and a code of it; None is every code."""

    type: int
    code: int | None = None


@dataclass(frozen=True, slots=True)
class PeerMatch:
    """The clauses of a rule about one of the two ends, its source or its destination.

    Attributes:
        nets: networks, one of which has the address; None stands for a text that is no network.
        ports: inclusive ranges, one of which has the port, unless one of ``named_ports`` has it.
        named_ports: ids of sets of address, protocol and port.
        ip_sets: ids of sets that all contain the address.
        not_ip_sets: ids of sets of which none contains it.
        ip_port_sets: ids of sets that all contain address, protocol and port; of destinations only.
        selector: the pod selector, which ``ip_sets`` realises; its presence confines the peer to a namespace.
        not_selector: like it, realised by ``not_ip_sets``.
        namespace_selector: selects the labels of the peer's namespace.
        account_names: names of service accounts; one of them.
        account_selector: selects the labels of the peer and its service account.
    """

    nets: tuple[IpNetwork | None, ...] = ()
    not_nets: tuple[IpNetwork | None, ...] = ()
    ports: tuple[tuple[int, int], ...] = ()
    not_ports: tuple[tuple[int, int], ...] = ()
    named_ports: tuple[str, ...] = ()
    not_named_ports: tuple[str, ...] = ()
    ip_sets: tuple[str, ...] = ()
    not_ip_sets: tuple[str, ...] = ()
    ip_port_sets: tuple[str, ...] = ()
    selector: str = ""
    not_selector: str = ""
    namespace_selector: str = ""
    account_names: tuple[str, ...] = ()
    account_selector: str = ""


@dataclass(frozen=True, slots=True)
class Rule:
    """One rule.

    Attributes:
        protocol: number or name, None for any; a name that is unknown matches nothing.
        not_protocol: the same, negated: an unknown name excludes nothing.
        ip_version: 4, 6, or 0 for both.
        icmp: ICMP packets of this type; without a protocol, those of either IP version.
        not_icmp: packets of the rule's protocol, except this type of ICMP.
    """

    action: Action
    source: PeerMatch = PeerMatch()
    destination: PeerMatch = PeerMatch()
    protocol: int | str | None = None
    not_protocol: int | str | None = None
    ip_version: int = 0
    http: HttpMatch = HttpMatch()
    icmp: IcmpMatch | None = None
    not_icmp: IcmpMatch | None = None


@dataclass(frozen=True, slots=True)
class Policy:
    """Rules for both directions; ``namespace`` is empty for a global policy."""

    namespace: str = ""
    inbound: tuple[Rule, ...] = ()
    outbound: tuple[Rule, ...] = ()

    def rules(self, direction: Direction) -> tuple[Rule, ...]:
        """Return the rules of one direction."""
        return self.inbound if direction is Direction.INGRESS else self.outbound


@dataclass(frozen=True, slots=True)
class Tier:
    """The policies of a tier that apply to an endpoint, in order.

    Attributes:
        passes: a flow that no rule decides goes on to the next tier. Otherwise it is denied.
    """

    name: str
    ingress: tuple[PolicyId, ...] = ()
    egress: tuple[PolicyId, ...] = ()
    passes: bool = False

    def policies(self, direction: Direction) -> tuple[PolicyId, ...]:
        """Return the policies of one direction."""
        return self.ingress if direction is Direction.INGRESS else self.egress


@dataclass(frozen=True, slots=True)
class Endpoint:
    """A workload's endpoint: its addresses and what is evaluated for it, tiers first, then profiles."""

    name: str = ""
    addresses: tuple[IpNetwork, ...] = ()
    tiers: tuple[Tier, ...] = ()
    profiles: tuple[str, ...] = ()


class IpSetType(Enum):
    """What the members of an IP set are."""

    IP = 0
    IP_AND_PORT = 1
    NET = 2


#: An IP set that no rule names: the addresses of the node itself. A source that sends it has Kubernetes' rules
#: beside its policies: a pod and its own node always reach each other, and so does a pod itself. Felix sends none.
NODE_ADDRESSES: Final = "ztunnel:node-addresses"


@dataclass(frozen=True, slots=True)
class IpSetUpdate:
    """Replaces a set. Members: ``10.0.0.1``; ``10.0.0.1,tcp:80``; ``10.0.0.0/8``."""

    id: str
    type: IpSetType
    members: tuple[str, ...] = field(repr=False)


@dataclass(frozen=True, slots=True)
class IpSetDelta:
    """Changes the members of a set."""

    id: str
    added: tuple[str, ...] = field(repr=False)
    removed: tuple[str, ...] = field(repr=False)


@dataclass(frozen=True, slots=True)
class IpSetRemove:
    """Removes a set."""

    id: str


@dataclass(frozen=True, slots=True)
class PolicyUpdate:
    """Adds or replaces a policy; None removes it."""

    id: PolicyId
    policy: Policy | None


@dataclass(frozen=True, slots=True)
class ProfileUpdate:
    """Adds or replaces a profile, whose rules have no namespace; None removes it."""

    name: str
    profile: Policy | None


@dataclass(frozen=True, slots=True)
class EndpointUpdate:
    """Adds or replaces an endpoint; None removes it."""

    id: EndpointId
    endpoint: Endpoint | None


@dataclass(frozen=True, slots=True)
class ServiceAccountUpdate:
    """Sets the labels of a service account; None removes it."""

    namespace: str
    name: str
    labels: dict[str, str] | None


@dataclass(frozen=True, slots=True)
class NamespaceUpdate:
    """Sets the labels of a namespace; None removes it."""

    name: str
    labels: dict[str, str] | None


@dataclass(frozen=True, slots=True)
class InSync:
    """Everything that existed when the stream began has been sent."""


Update: TypeAlias = (
    IpSetUpdate
    | IpSetDelta
    | IpSetRemove
    | PolicyUpdate
    | ProfileUpdate
    | EndpointUpdate
    | ServiceAccountUpdate
    | NamespaceUpdate
    | InSync
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Flow:
    """What is evaluated: one connection, or one request of it.

    Attributes:
        source_ip: text of the source's address; None if it has none (a pipe) or an unreadable one.
        source_port: 0 if unknown.
        protocol: IP protocol number.
        icmp: type and code of a packet of ICMP or ICMPv6; None if they are not known.
        source_principal: the peer's SPIFFE id; empty for plain text.
        source_labels: labels that came with the request; those of the service account override them.
        method: of the request; None if there is no HTTP, which is not the empty method.
        path: of the request, raw, with its query; None likewise.
        requests_left_to: who judges the requests of this connection by the same policies, such as a waypoint in
            front of which it is judged; empty if nobody is known to.
    """

    source_ip: str | None = None
    destination_ip: str | None = None
    source_port: int = 0
    destination_port: int = 0
    protocol: int = 6
    icmp: tuple[int, int] | None = None
    source_principal: str = ""
    destination_principal: str = ""
    source_labels: tuple[tuple[str, str], ...] = ()
    destination_labels: tuple[tuple[str, str], ...] = ()
    method: str | None = None
    path: str | None = None
    requests_left_to: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class FlowReport:
    """What a policy server reports of one flow in one interval.

    Attributes:
        protocol: number or name.
        policy: that decided; a profile's id has the kind ``Profile``; None if no rule did.
        index: of the rule, -1 for the end of a tier.
        packets, octets: since the last report; 0 where they are not known.
    """

    source_ip: str
    destination_ip: str
    source_port: int
    destination_port: int
    protocol: int | str
    allowed: bool
    policy: PolicyId | None = None
    index: int = -1
    packets: int = 0
    octets: int = 0

    @property
    def rule(self) -> str:
        """The rule as text; empty if no rule decided."""
        if self.policy is None:
            return ""
        return f"{self.policy}|{'end of tier' if self.index < 0 else f'rule {self.index}'}"
