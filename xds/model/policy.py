"""Authorization policies of all sources in one form: lists of tiers, whose policies share one condition language.

Envoy's RBAC filters, Istio's policies, Kubernetes NetworkPolicy and Calico's tiers each compile to one
:class:`PolicyList`; all lists of a connection must allow it. ``ztunnel.policy.engine`` evaluates them.

Policies here have no unsupported parts. A dialect refuses a policy with such a part, or, if the resource must be
kept, replaces the condition by :class:`Never` in an allow and :class:`Always` in a deny.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from xds.model.address import IpNetwork
from xds.model.string_match import StringMatch


@dataclass(frozen=True, slots=True)
class Always:
    """The condition that is always true."""


@dataclass(frozen=True, slots=True)
class Never:
    """The condition that is never true."""


@dataclass(frozen=True, slots=True)
class AllOf:
    """True if all of the conditions are true, also if there are none."""

    conditions: tuple["Condition", ...]


@dataclass(frozen=True, slots=True)
class AnyOf:
    """True if at least one of the conditions is true."""

    conditions: tuple["Condition", ...]


@dataclass(frozen=True, slots=True)
class Not:
    """True if the given condition is false."""

    condition: "Condition"


@dataclass(frozen=True, slots=True)
class Authenticated:
    """The connection uses TLS and, if ``name`` is given, one of the peer's names matches it.

    Like in Envoy, this requires TLS but not a certificate. Names are tried in Envoy's order: each URI SAN, each
    DNS SAN, then the subject. The subject of a peer without a certificate is the empty string.
    """

    name: StringMatch | None = None


@dataclass(frozen=True, slots=True)
class PeerPrincipal:
    """The peer has a mesh identity and, if ``match`` is given, ``td/ns/N/sa/S`` (without ``spiffe://``) matches
    it.
    """

    match: StringMatch | None = None


@dataclass(frozen=True, slots=True)
class PeerNamespace:
    """The namespace of the peer's mesh identity matches. Without an identity, it is the empty string.

    Without ``match``, the condition is that the peer has an identity.
    """

    match: StringMatch | None = None


@dataclass(frozen=True, slots=True)
class PeerServiceAccount:
    """The peer's mesh identity has the given namespace and service account, in any trust domain."""

    namespace: str
    service_account: str


@dataclass(frozen=True, slots=True)
class SourceIp:
    """The peer's address is in ``network``. ``direct`` means the socket's peer, even if a PROXY header names
    another.
    """

    network: IpNetwork
    direct: bool = False


@dataclass(frozen=True, slots=True)
class DestinationIp:
    """The original destination's address is in ``network``."""

    network: IpNetwork


@dataclass(frozen=True, slots=True)
class DestinationPort:
    """The original destination's port is in ``[start, end)``."""

    start: int
    end: int


@dataclass(frozen=True, slots=True)
class ServerName:
    """The TLS server name requested by the client matches. A missing server name is the empty string."""

    match: StringMatch


@dataclass(frozen=True, slots=True)
class DynamicMetadata:
    """The string at ``path`` of the connection's dynamic metadata matches. A missing string never matches."""

    namespace: str
    path: tuple[str, ...]
    match: StringMatch


#: Attributes of a connection as CEL expressions read them, by root: ``{"source": {"port": 4711, ...}, ...}``.
Attributes = Mapping[str, Mapping[str, str | int | bool]]


@dataclass(frozen=True, slots=True)
class Expression:
    """A CEL expression evaluates to true. An error, for example a missing attribute, counts as false.

    Attributes:
        text: the expression in CEL's syntax, with each operation in parentheses. Equal texts are equal conditions.
        read: the attributes that the expression reads, for example ``connection.mtls``.
        evaluate: returns whether the expression is true for a connection's attributes.
    """

    text: str
    read: tuple[str, ...]
    evaluate: Callable[[Attributes], bool] = field(compare=False, repr=False)


Condition = (
    Always
    | Never
    | AllOf
    | AnyOf
    | Not
    | Authenticated
    | PeerPrincipal
    | PeerNamespace
    | PeerServiceAccount
    | SourceIp
    | DestinationIp
    | DestinationPort
    | ServerName
    | DynamicMetadata
    | Expression
)


class Verdict(StrEnum):
    """The result of a policy rule, of a tier's default, or of a policy list's end."""

    ALLOW = "allow"
    DENY = "deny"
    PASS = "pass"


@dataclass(frozen=True, slots=True)
class Policy:
    """A policy: if ``condition`` holds, the result is ``verdict``. Logs and denials print ``name``.

    Attributes:
        prepared: the policy engine's compiled form of the condition, stored here so that it lives as long as the
            policy.
    """

    name: str
    verdict: Verdict
    condition: Condition
    prepared: object = field(default=None, init=False, compare=False, repr=False)


@dataclass(frozen=True, slots=True)
class Tier:
    """A tier: policies in order. The first matching policy decides. Without a match, ``default`` decides.

    Attributes:
        prepared: see :class:`Policy`.
    """

    policies: tuple[Policy, ...]
    default: Verdict = Verdict.PASS
    prepared: object = field(default=None, init=False, compare=False, repr=False)


@dataclass(frozen=True, slots=True)
class PolicyList:
    """A policy list: tiers in order. If a tier passes, the next tier decides. If the last tier passes, ``end``
    decides.
    """

    tiers: tuple[Tier, ...]
    end: Verdict
