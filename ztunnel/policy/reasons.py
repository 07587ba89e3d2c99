"""Describes in words why a condition of a policy is true or false for a connection. Pure.

The words are for people; :mod:`ztunnel.policy.engine` decides.
"""

from typing import Final, assert_never

from xds.model import policy as p
from xds.model.facts import ConnectionFacts
from xds.model.string_match import StringMatch
from ztunnel.policy.engine import attributes, holds

#: The most failed alternatives that are listed one by one. Of more, only the number is given.
_MOST_NAMED: Final = 3
_COMPARED = {
    "exact": "is {}",
    "prefix": "begins with {}",
    "suffix": "ends with {}",
    "contains": "contains {}",
    "regex": "matches {}",
}


def reason(condition: p.Condition, facts: ConnectionFacts) -> str:
    """Return the part of a condition that decides whether it holds, with the connection's value."""
    if isinstance(condition, p.AnyOf | p.AllOf):
        return _of_parts(condition, facts)
    if isinstance(condition, p.Not):
        return f"not ({reason(condition.condition, facts)})"
    said = describe(condition)
    value = _value(condition, facts)
    if holds(condition, facts):
        return said
    return f"{said}: no, it is {value}" if value else f"{said}: no"


def _of_parts(condition: p.AnyOf | p.AllOf, facts: ConnectionFacts) -> str:
    parts = condition.conditions
    # a true part decides an AnyOf, and a false part decides an AllOf
    decisive = isinstance(condition, p.AnyOf)
    for part in parts:
        if holds(part, facts) is decisive:
            return reason(part, facts)
    if decisive and len(parts) > _MOST_NAMED:
        return f"none of {len(parts)} alternatives holds"
    told = [text for part in parts if (text := reason(part, facts)) != "always"]
    return (" or " if decisive else " and ").join(told) or ("no alternatives" if decisive else "always")


def describe(condition: p.Condition) -> str:
    """Return a condition as a text in words."""
    match condition:
        case p.Always():
            return "always"
        case p.Never():
            return "never"
        case p.AllOf(conditions):
            return " and ".join(map(_inner, conditions)) or "always"
        case p.AnyOf(conditions):
            return " or ".join(map(_inner, conditions)) or "never"
        case p.Not(inner):
            return f"not {_inner(inner)}"
        case p.Authenticated(name):
            return "the connection uses TLS" if name is None else f"a name of the peer {_matches(name)}"
        case p.PeerPrincipal(match):
            return "the peer has an identity" if match is None else f"the peer's identity {_matches(match)}"
        case p.PeerNamespace(match):
            return "the peer has a namespace" if match is None else f"the peer's namespace {_matches(match)}"
        case p.PeerServiceAccount(namespace, service_account):
            return f"the peer's service account is {namespace}/{service_account}"
        case p.SourceIp(network, direct):
            return f"the {'socket' if direct else 'source'} address is in {network}"
        case p.DestinationIp(network):
            return f"the destination address is in {network}"
        case p.DestinationPort(start, end):
            return f"the port is {start}" if end == start + 1 else f"the port is {start} to {end - 1}"
        case p.ServerName(match):
            return f"the server name {_matches(match)}"
        case p.DynamicMetadata(namespace, path, match):
            return f"metadata {'.'.join((namespace, *path))} {_matches(match)}"
        case p.Expression():
            return f"the expression {condition.text} is true"
        case _:
            assert_never(condition)


def _inner(condition: p.Condition) -> str:
    text = describe(condition)
    return f"({text})" if isinstance(condition, p.AllOf | p.AnyOf) and len(condition.conditions) > 1 else text


def _matches(match: StringMatch) -> str:
    return _COMPARED[match.kind].format(match.value or '""') + (", in any case" if match.ignore_case else "")


def _value(condition: p.Condition, facts: ConnectionFacts) -> str:
    """Return the connection's value that a condition tests, as text. Empty if there is none."""
    peer = facts.peer
    match condition:
        case p.PeerPrincipal() | p.PeerNamespace() | p.PeerServiceAccount() if peer is None:
            return "without an identity"
        case p.Authenticated():
            certificate = facts.certificate
            if certificate is None:
                return "without TLS"
            return ", ".join(filter(None, certificate.principals)) or "without a certificate"
        case p.PeerPrincipal():
            return (peer.principal if peer is not None else "") or "without an identity"
        case p.PeerNamespace() | p.PeerServiceAccount():
            identity = peer.identity if peer is not None else None
            if identity is None:
                return "without an identity"
            name = f"{identity.namespace}/{identity.service_account}"
            return identity.namespace if isinstance(condition, p.PeerNamespace) else name
        case p.SourceIp(direct=direct):
            return facts.direct_source.host if direct else facts.source.host
        case p.DestinationIp():
            return facts.destination.host
        case p.DestinationPort():
            return str(facts.destination.port)
        case p.ServerName():
            return facts.server_name or "empty"
        case p.Expression():
            known = attributes(facts)
            roots = (name.partition(".") for name in condition.read)
            return ", ".join(f"{root}.{name} {known[root].get(name, 'missing')}" for root, _, name in roots)
        case _:
            return ""
