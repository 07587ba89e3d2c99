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
    """Every condition holds; true when empty."""

    conditions: tuple["Condition", ...]


@dataclass(frozen=True, slots=True)
class AnyOf:
    """At least one condition holds; false when empty."""

    conditions: tuple["Condition", ...]


@dataclass(frozen=True, slots=True)
class Not:
    """The condition does not hold."""

    condition: "Condition"


@dataclass(frozen=True, slots=True)
class Authenticated:
    """The connection uses TLS; with ``name``, one of the peer's names matches.

    Like in Envoy, this requires TLS but not a certificate. Names are tried in Envoy's order: each URI SAN, each
    DNS SAN, then the subject. The subject of a peer without a certificate is the empty string.
    """

    name: StringMatch | None = None


@dataclass(frozen=True, slots=True)
class PeerPrincipal:
    """The peer has a mesh identity; with ``match``, its ``td/ns/N/sa/S`` (no ``spiffe://``) matches."""

    match: StringMatch | None = None


@dataclass(frozen=True, slots=True)
class PeerNamespace:
    """The namespace of the peer's mesh identity matches; without an identity it is the empty string.

    Without ``match``: the peer has an identity, and so a namespace.
    """

    match: StringMatch | None = None


@dataclass(frozen=True, slots=True)
class PeerServiceAccount:
    """The peer's mesh identity has this namespace and service account, in any trust domain."""

    namespace: str
    service_account: str


@dataclass(frozen=True, slots=True)
class SourceIp:
    """The peer's address is in ``network``; ``direct`` looks past a PROXY header at the socket's peer."""

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
    """A CEL expression evaluates to true. An error, for example a missing attribute, is no match.

    Attributes:
        text: the expression in CEL's syntax, with each operation in parentheses. Equal texts are equal conditions.
        read: the attributes that it reads, ``connection.mtls``.
        evaluate: whether it is true of a connection's attributes.
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
    """The result of a rule, of a tier's default, or of a list's end."""

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
    """Policies in order; the first match decides. Without a match, ``default`` decides.

    Attributes:
        prepared: see :class:`Policy`.
    """

    policies: tuple[Policy, ...]
    default: Verdict = Verdict.PASS
    prepared: object = field(default=None, init=False, compare=False, repr=False)


@dataclass(frozen=True, slots=True)
class PolicyList:
    """Tiers in order. A tier that passes is followed by the next tier, and the last one by ``end``."""

    tiers: tuple[Tier, ...]
    end: Verdict
