"""The results of an evaluation, and the facts about a flow that clauses read. Pure."""

from dataclasses import dataclass
from enum import IntEnum
from typing import Final

from xds.model import calico as c
from xds.model.identity import SpiffeId
from xds.model.selector import Labels
from ztunnel.policy.calico.http_path import normal_path
from ztunnel.policy.calico.ip_sets import IpSets
from ztunnel.policy.calico.store import Store

#: The greatest length of a SPIFFE id (SPIFFE-ID, 2.3).
_LONGEST: Final = 2048

#: The tier name under which decisions of profiles are reported.
PROFILE_TIER: Final = "__PROFILE__"


class Code(IntEnum):
    """gRPC's status codes used in ``ext_authz`` answers."""

    OK = 0
    INVALID_ARGUMENT = 3
    PERMISSION_DENIED = 7
    INTERNAL = 13
    UNAVAILABLE = 14


@dataclass(frozen=True, slots=True)
class RuleRef:
    """The rule that decided, by its tier, policy and index.

    Attributes:
        policy: a profile's id has the kind ``Profile`` and its name.
        index: -1 for the end of the tier, whose first policy is then named.
    """

    tier: str
    policy: c.PolicyId | None
    index: int

    def __str__(self) -> str:
        place = "end of tier" if self.index < 0 else f"rule {self.index}"
        return f"{self.tier}|{self.policy or 'none'}|{place}"


@dataclass(frozen=True, slots=True)
class Verdict:
    """The result of evaluating one flow; only ``Code.OK`` allows it.

    Attributes:
        message: the reason for codes other than OK: the rule, or the missing part. For OK it is empty, or names
            the rule whose HTTP clause was left to a waypoint, and the waypoint.
        rule: the rule that decided, or None if no rule could.
    """

    code: Code
    message: str = ""
    rule: RuleRef | None = None

    @property
    def allowed(self) -> bool:
        """Whether the flow is allowed."""
        return self.code is Code.OK


class Undecidable(Exception):
    """The evaluation of a flow reached a rule that cannot be evaluated. The answer has the status :attr:`code`.

    Attributes:
        code: the gRPC status code to answer with.
    """

    def __init__(self, code: Code, message: str) -> None:
        super().__init__(message)
        self.code = code


@dataclass(frozen=True, slots=True)
class Identity:
    """The namespace and service account in a principal. Both are empty for plain text."""

    namespace: str = ""
    account: str = ""


def identity_of(principal: str, trust_domains: frozenset[str]) -> Identity | None:
    """Parse the identity in a principal. None if the principal is malformed or its trust domain is not listed.

    Args:
        principal: a SPIFFE id in Istio's form. Empty for plain text.
        trust_domains: the accepted trust domains. Empty accepts all, like Calico.
    """
    if not principal:
        return Identity()
    if len(principal) > _LONGEST:
        return None
    try:
        found = SpiffeId.parse(principal)
    except ValueError:
        return None
    if trust_domains and found.trust_domain not in trust_domains:
        return None
    return Identity(found.namespace, found.service_account)


class Peer:
    """One end of a flow, with its data from the store. Each part of the data is looked up when it is first
    read.
    """

    __slots__ = (
        "_labels",
        "_port_sets",
        "_request_labels",
        "_sets",
        "_store",
        "address",
        "identity",
        "port",
        "protocol",
    )

    def __init__(
        self,
        store: Store,
        address: str | None,
        port: int,
        protocol: int,
        identity: Identity,
        request_labels: tuple[tuple[str, str], ...],
    ) -> None:
        self.address = address
        self.port = port
        self.protocol = protocol
        self.identity = identity
        self._store = store
        self._request_labels = request_labels
        self._sets: frozenset[str] | None = None
        self._port_sets: frozenset[str] | None = None
        self._labels: Labels | None = None

    @property
    def sets(self) -> frozenset[str]:
        """The IP sets that contain the peer's address."""
        found = self._sets
        if found is None:
            found = self._sets = self._store.ip_sets.containing(self.address)
        return found

    @property
    def port_sets(self) -> frozenset[str]:
        """The IP sets that contain the peer's address, protocol and port."""
        found = self._port_sets
        if found is None:
            found = self._port_sets = self._store.ip_sets.containing_port(self.address, self.protocol, self.port)
        return found

    @property
    def labels(self) -> Labels:
        """The labels of the request. The service account's labels override them."""
        found = self._labels
        if found is None:
            account = self._store.labels_of_account(self.identity.namespace, self.identity.account)
            found = self._labels = {**dict(self._request_labels), **account} if self._request_labels else account
        return found

    @property
    def namespace_labels(self) -> Labels:
        return self._store.labels_of_namespace(self.identity.namespace)


class Facts:
    """The facts about one flow that clauses read.

    Attributes:
        read_http: whether a clause has read method or path. If so, the answer is only valid for this request.
        unseen: the first rule that would allow some requests of this connection, if only the connection is
            evaluated.
        left_to: the waypoint that evaluates the requests of this connection. Empty if none is known.
        left: the rule that matched because its HTTP clause is left to the waypoint ``left_to``.
    """

    __slots__ = (
        "_path",
        "destination",
        "icmp",
        "ip_sets",
        "left",
        "left_to",
        "method",
        "path",
        "protocol",
        "read_http",
        "source",
        "unseen",
    )

    def __init__(self, store: Store, flow: c.Flow, source: Identity, destination: Identity) -> None:
        protocol = flow.protocol
        self.ip_sets: IpSets = store.ip_sets
        self.protocol = protocol
        self.icmp = flow.icmp
        self.source = Peer(store, flow.source_ip, flow.source_port, protocol, source, flow.source_labels)
        self.destination = Peer(
            store, flow.destination_ip, flow.destination_port, protocol, destination, flow.destination_labels
        )
        self.method = flow.method
        self.path = flow.path
        self.read_http = False
        self.unseen: RuleRef | None = None
        self.left_to = flow.requests_left_to
        self.left: RuleRef | None = None
        self._path: bytes | bool | None = False  # False: not yet computed

    @property
    def normal_path(self) -> bytes | None:
        """Return the normal form of the request's path. None if it has none."""
        if self._path is False:
            self._path = normal_path(self.path or "")
        assert not isinstance(self._path, bool)
        return self._path


def with_unseen(verdict: Verdict, facts: Facts) -> Verdict:
    """Return a verdict whose message also names the rule whose HTTP clause was not evaluated, if there is one.

    Called last for connections. The message shows whether a policy is about requests, or does not match this
    client at all. For an allowed connection it names the proxy that evaluates the requests.
    """
    if facts.left is not None and verdict.allowed:
        return Verdict(verdict.code, f"{facts.left} is about HTTP, left to {facts.left_to}", verdict.rule)
    if facts.unseen is None or verdict.code is not Code.PERMISSION_DENIED:
        return verdict
    reason = f"{verdict.message}; {facts.unseen} allows HTTP requests, which are not seen here"
    return Verdict(verdict.code, reason, verdict.rule)
