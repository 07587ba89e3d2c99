"""The judge: a connection's facts against policy lists. Pure, and the only place that decides."""

import ipaddress
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import assert_never

from xds.model import policy as p
from xds.model.facts import ConnectionFacts


@dataclass(frozen=True, slots=True)
class Decision:
    """The verdict and the name of the policy that decided; an empty name when none matched."""

    allowed: bool
    policy: str = ""


def judge(rules: p.PolicyList, facts: ConnectionFacts) -> Decision:
    """Judge a connection by one list.

    Tiers are asked in order; inside a tier the first policy whose condition holds decides. ``PASS`` hands on
    to the next tier, the last one to the list's end verdict.
    """
    for tier in rules.tiers:
        verdict, name = tier.default, ""
        for policy in tier.policies:
            if holds(policy.condition, facts):
                verdict, name = policy.verdict, policy.name
                break
        if verdict is not p.Verdict.PASS:
            return Decision(verdict is p.Verdict.ALLOW, name)
    return Decision(rules.end is p.Verdict.ALLOW)


def judge_all(lists: Iterable[p.PolicyList], facts: ConnectionFacts) -> Decision:
    """Judge by several lists; all must allow, the first that does not is the answer."""
    decision = Decision(True)
    for rules in lists:
        decision = judge(rules, facts)
        if not decision.allowed:
            return decision
    return decision


def reads_port(rules: p.PolicyList) -> bool:
    """Whether any policy of a list depends on the destination port."""
    return any(_reads_port(policy.condition) for tier in rules.tiers for policy in tier.policies)


def _reads_port(condition: p.Condition) -> bool:
    match condition:
        case p.AllOf(conditions) | p.AnyOf(conditions):
            return any(_reads_port(inner) for inner in conditions)
        case p.Not(inner):
            return _reads_port(inner)
        case _:
            return isinstance(condition, p.DestinationPort)


def holds(condition: p.Condition, facts: ConnectionFacts) -> bool:
    """Whether a condition is true of the connection."""
    match condition:
        case p.Always():
            return True
        case p.Never():
            return False
        case p.AllOf(conditions):
            return all(holds(inner, facts) for inner in conditions)
        case p.AnyOf(conditions):
            return any(holds(inner, facts) for inner in conditions)
        case p.Not(inner):
            return not holds(inner, facts)
        case p.Authenticated(name):
            if facts.peer is None:
                return False
            return name is None or any(name.matches(text) for text in facts.peer.names)
        case p.SourceIp(network, direct):
            source = facts.direct_source if direct else facts.source
            return ipaddress.ip_address(source.host) in network
        case p.DestinationIp(network):
            return ipaddress.ip_address(facts.destination.host) in network
        case p.DestinationPort(start, end):
            return start <= facts.destination.port < end
        case p.ServerName(match):
            return match.matches(facts.server_name)
        case p.DynamicMetadata(namespace, path, match):
            value: object = facts.metadata.get(namespace)
            for step in path:
                value = value.get(step) if isinstance(value, Mapping) else None
            return isinstance(value, str) and match.matches(value)
        case _:
            assert_never(condition)
