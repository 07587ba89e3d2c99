"""Finds policies in a dump that never decide. Pure.

istiod delivers HTTP and JWT attributes to no node proxy. A rule with only such attributes arrives as an empty
match, which never matches (istio/istio#61126): a DENY of this kind has no effect, but looks like protection.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

EMPTY_MATCH: Final = (
    "its rules have only attributes of HTTP or JWT, which arrive as an empty match and are not enforced here; "
    "attach it to a waypoint"
)
NEVER: Final = (
    "its principals begin with spiffe://, which never matches; write TRUST-DOMAIN/ns/NAMESPACE/sa/ACCOUNT"
)
NO_RULES: Final = "it has no rules"


def without_effect(policy: Mapping[str, Any]) -> str:
    """Return why a policy never matches. Empty if it can match.

    Also empty for an ALLOW policy: if it never matches, it refuses all connections.

    Args:
        policy: an entry of ``policies`` in a dump, ours or the Rust ztunnel's.
    """
    if str(policy.get("action")).lower() == "allow":
        return ""
    rules = policy.get("rules")
    if not isinstance(rules, list):
        return ""
    reasons = [_never(rule) for rule in rules]
    if not reasons:
        return NO_RULES
    return reasons[0] if all(reasons) else ""


def _never(rule: Any) -> str:
    """Return why a rule cannot match: none of the matches in one of its clauses can be true. Empty if it can
    match.
    """
    for clause in rule if isinstance(rule, list) else ():
        matches = clause if isinstance(clause, list) else ()
        reasons = [_impossible(match) for match in matches if isinstance(match, Mapping)]
        if reasons and all(reasons):
            return reasons[0]
    return ""


def _impossible(match: Mapping[str, Any]) -> str:
    if not any(match.values()):
        return EMPTY_MATCH
    principals = match.get("principals")
    if isinstance(principals, list) and principals and all(_has_scheme(each) for each in principals):
        return NEVER
    return ""


def _has_scheme(principal: Any) -> bool:
    values = principal.values() if isinstance(principal, Mapping) else [principal]
    return any("spiffe://" in str(value) for value in values)
