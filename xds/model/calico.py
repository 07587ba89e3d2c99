"""Calico's policy as PolicySync sends it: endpoints, tiers, policies, rules, IP sets, and their updates.

These are PolicySync's messages (package ``felix``) as values. A rule has every clause of Calico's API in compiled
form: pod selectors became IP sets, and rules carry the sets' ids. A rule matches if all its clauses match. An
empty clause always matches.
"""

from dataclasses import dataclass, field
from enum import Enum, StrEnum
from typing import Final, TypeAlias

from xds.model.address import IpNetwork

#: The kinds of staged policies. They are evaluated only on request, to report what they would decide.
STAGED_KINDS: Final = frozenset(
    {"StagedNetworkPolicy", "StagedGlobalNetworkPolicy", "StagedKubernetesNetworkPolicy"}
)

#: Names of the IP protocols that Calico knows, by number. Rules write other protocols as numbers.
PROTOCOLS: Final = {"icmp": 1, "tcp": 6, "udp": 17, "icmpv6": 58, "sctp": 132, "udplite": 136}
#: ICMP and ICMPv6, the protocols whose packets have a type and a code, by IP version.
ICMP_PROTOCOLS: Final = {4: 1, 6: 58}


class Direction(StrEnum):
    """The direction of a flow, as seen from the endpoint whose policies are evaluated."""

    INGRESS = "ingress"
    EGRESS = "egress"


class Action(StrEnum):
    """The action of a matching rule.

    Upper and lower case are equal in received texts. Felix writes ``next-tier`` for ``pass``.
    """

    ALLOW = "allow"
    DENY = "deny"
    LOG = "log"
    PASS = "pass"
    UNKNOWN = "unknown"

    @property
    def may_deny(self) -> bool:
        """Whether omitting a rule with this action could allow traffic that the rule is meant to stop.

        A rule that passes to the next tier prevents later rules of its tier from allowing the traffic.
        """
        return self in (Action.DENY, Action.PASS, Action.UNKNOWN)


@dataclass(frozen=True, slots=True)
class PolicyId:
    """The key of a policy.

    Before Calico 3.32, messages have no kind or namespace: ``kind`` is then empty, unless the name says that the
    policy is staged, and ``namespace`` has the tier's name.
    """

    kind: str
    namespace: str
    name: str

    def __str__(self) -> str:
        return "/".join(part for part in (self.kind, self.namespace, self.name) if part)


@dataclass(frozen=True, slots=True)
class EndpointId:
    """The key of a workload endpoint, for example ``k8s``, ``namespace/pod``, ``eth0``."""

    orchestrator: str
    workload: str
    endpoint: str

    def __str__(self) -> str:
        return f"{self.orchestrator}/{self.workload}/{self.endpoint}"


@dataclass(frozen=True, slots=True)
class PathMatch:
    """A path in an HTTP clause of a rule. With ``prefix``, all paths below it match, too.

    :mod:`ztunnel.policy.calico.http_path` compares it with a request's path.
    """

    path: str
    prefix: bool


@dataclass(frozen=True, slots=True)
class HttpMatch:
    """The HTTP clause of a rule: the request must have one of the methods (``*`` matches any) and one of the
    paths. An empty list matches any.
    """

    methods: tuple[str, ...] = ()
    paths: tuple[PathMatch, ...] = ()


@dataclass(frozen=True, slots=True)
class IcmpMatch:
    """An ICMP or ICMPv6 type and code. A code of None matches every code."""

    type: int
    code: int | None = None


@dataclass(frozen=True, slots=True)
class PeerMatch:
    """The clauses of a rule about one end of a flow: the source or the destination.

    Attributes:
        nets: the address must be in at least one of these networks. None marks a text that is not a network.
        ports: inclusive ranges. The port must be in one of these ranges or in a set of ``named_ports``.
        named_ports: ids of sets whose members are address, protocol and port.
        ip_sets: ids of sets that all contain the address.
        not_ip_sets: ids of sets without the address.
        ip_port_sets: ids of sets that all contain address, protocol and port; of destinations only.
        selector: the pod selector, which ``ip_sets`` realises; its presence confines the peer to a namespace.
        not_selector: a pod selector for excluded peers, which ``not_ip_sets`` realises.
        namespace_selector: selects the labels of the peer's namespace.
        account_names: names of service accounts; at least one must match.
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
    """One rule of a Calico policy or profile.

    Attributes:
        protocol: number or name. None matches any, and an unknown name matches no packet.
        not_protocol: number or name of an excluded protocol. An unknown name excludes no packet.
        ip_version: 4, 6, or 0 for both.
        icmp: ICMP packets of this type. Without a protocol, it applies to both IP versions.
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
    """A policy: rules for both directions. ``namespace`` is empty for a global policy."""

    namespace: str = ""
    inbound: tuple[Rule, ...] = ()
    outbound: tuple[Rule, ...] = ()

    def rules(self, direction: Direction) -> tuple[Rule, ...]:
        return self.inbound if direction is Direction.INGRESS else self.outbound


@dataclass(frozen=True, slots=True)
class Tier:
    """The policies of a tier that apply to an endpoint, in order.

    Attributes:
        passes: whether a flow that matches no rule goes to the next tier. Otherwise it is denied.
    """

    name: str
    ingress: tuple[PolicyId, ...] = ()
    egress: tuple[PolicyId, ...] = ()
    passes: bool = False

    def policies(self, direction: Direction) -> tuple[PolicyId, ...]:
        return self.ingress if direction is Direction.INGRESS else self.egress


@dataclass(frozen=True, slots=True)
class Endpoint:
    """A workload endpoint: its addresses, the tiers to evaluate, and the profiles to evaluate after the tiers."""

    name: str = ""
    addresses: tuple[IpNetwork, ...] = ()
    tiers: tuple[Tier, ...] = ()
    profiles: tuple[str, ...] = ()


class IpSetType(Enum):
    """The type of an IP set's members."""

    IP = 0
    IP_AND_PORT = 1
    NET = 2


#: The id of an IP set with the addresses of the node, which no rule names. If a policy source sends this set
#: (Felix does not), Kubernetes' rules apply, too: a pod and its node always reach each other, and a pod always
#: reaches itself.
NODE_ADDRESSES: Final = "ztunnel:node-addresses"


@dataclass(frozen=True, slots=True)
class IpSetUpdate:
    """Replaces an IP set. Members have the form ``10.0.0.1``, ``10.0.0.1,tcp:80`` or ``10.0.0.0/8``."""

    id: str
    type: IpSetType
    members: tuple[str, ...] = field(repr=False)


@dataclass(frozen=True, slots=True)
class IpSetDelta:
    """Changes the members of an IP set."""

    id: str
    added: tuple[str, ...] = field(repr=False)
    removed: tuple[str, ...] = field(repr=False)


@dataclass(frozen=True, slots=True)
class IpSetRemove:
    """Removes an IP set."""

    id: str


@dataclass(frozen=True, slots=True)
class PolicyUpdate:
    """Adds or replaces a policy, or removes it if ``policy`` is None."""

    id: PolicyId
    policy: Policy | None


@dataclass(frozen=True, slots=True)
class ProfileUpdate:
    """Adds or replaces a profile, or removes it if ``profile`` is None. A profile's rules have no namespace."""

    name: str
    profile: Policy | None


@dataclass(frozen=True, slots=True)
class EndpointUpdate:
    """Adds or replaces an endpoint, or removes it if ``endpoint`` is None."""

    id: EndpointId
    endpoint: Endpoint | None


@dataclass(frozen=True, slots=True)
class ServiceAccountUpdate:
    """Sets the labels of a service account, or removes it if ``labels`` is None."""

    namespace: str
    name: str
    labels: dict[str, str] | None


@dataclass(frozen=True, slots=True)
class NamespaceUpdate:
    """Sets the labels of a namespace, or removes it if ``labels`` is None."""

    name: str
    labels: dict[str, str] | None


@dataclass(frozen=True, slots=True)
class InSync:
    """The update after which all objects that existed at the beginning of the stream have been sent."""


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
    """One connection, or one request on a connection, whose policies are evaluated.

    Attributes:
        source_ip: the source's address as text. None if it has no address (a pipe) or an unreadable address.
        source_port: 0 if unknown.
        protocol: IP protocol number.
        icmp: type and code of an ICMP or ICMPv6 packet. None if they are unknown.
        source_principal: the peer's SPIFFE id. Empty for plain text.
        source_labels: labels sent with the request. Labels of the service account override them.
        method: the request's method. None means that there is no HTTP request, unlike an empty method.
        path: the request's raw path with its query. None means that there is no HTTP request.
        requests_left_to: the proxy, such as a waypoint, that applies the same policies to the requests of this
            connection. Empty if no such proxy is known.
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
    """A policy server's report about one flow in one interval.

    Attributes:
        protocol: number or name.
        policy: the policy that decided. A profile's id has the kind ``Profile``. None if no rule decided.
        index: the rule's index, -1 for the end of a tier.
        packets, octets: the counts since the last report; 0 if unknown.
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
        """The deciding rule as text, or the empty string if no rule decided."""
        if self.policy is None:
            return ""
        return f"{self.policy}|{'end of tier' if self.index < 0 else f'rule {self.index}'}"
