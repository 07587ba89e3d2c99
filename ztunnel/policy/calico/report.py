"""The active policies as JSON for a page: tiers and policies with their counts, and their age. Pure."""

import json
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from typing import Any

from xds.model import calico as c
from ztunnel.policy.calico.guard import END_OF_TIER, NO_RULE, RESULTS
from ztunnel.policy.calico.store import Store
from ztunnel.policy.calico.verdict import PROFILE_TIER
from ztunnel.policy.ledger import PolicyUse, TierPolicy, Uses


def in_force(store: Store, state: Mapping[str, Any], uses: Uses[TierPolicy]) -> Iterator[str]:
    """Yield one JSON document in pieces, one per tier.

    Args:
        state: the source's state, see :func:`state_of`.
        uses: the decisions, possibly summed over several processes.
    """
    yield '{\n"source": ' + json.dumps(state)
    sets = store.ip_sets
    sizes = {
        "complete": store.in_sync,
        "policies": len(store.policies),
        "profiles": len(store.profiles),
        "endpoints": len(store.endpoints),
        "namespaces": len(store.namespaces),
        "ip_sets": len(sets),
        "ip_set_members": sets.members,
        "ip_sets_unreadable": [set_id for set_id, _ in sets.broken()],
    }
    yield ',\n"store": ' + json.dumps(sizes)
    yield ',\n"tiers": ['
    separator = "\n"
    for tier, policies in _tiers(store).items():
        shown = [_policy(store, tier, policy, number, uses) for policy, number in policies.items()]
        end = _counted(uses.get(TierPolicy(tier, END_OF_TIER)))
        yield separator + json.dumps({"tier": tier, "policies": shown, "end_of_tier": end})
        separator = ",\n"
    yield '\n],\n"without_a_rule": ' + json.dumps(
        {use.policy.policy: _counted(use) for use in uses if use.policy.tier == NO_RULE}
    )
    yield ',\n"others": ' + json.dumps(_counted(uses.others)) + "\n}\n"


def state_of(name: str, error: str, age_s: float, *, in_sync: bool) -> dict[str, Any]:
    """Return the state of a policy source: whether its policies are current, or else for how long and why they are
    stale.
    """
    return {"name": name, "in_sync": in_sync, "stale_s": round(age_s, 1), "error": error}


def _tiers(store: Store) -> dict[str, dict[c.PolicyId, int]]:
    """Return the policies of each tier in order, with the number of endpoints that each policy applies to."""
    found: dict[str, dict[c.PolicyId, int]] = {}
    for endpoint in store.endpoints.values():
        for tier in endpoint.tiers:
            policies = found.setdefault(tier.name, {})
            for policy in dict.fromkeys((*tier.ingress, *tier.egress)):
                policies[policy] = policies.get(policy, 0) + 1
        for name in endpoint.profiles:
            profiles = found.setdefault(PROFILE_TIER, {})
            profile = c.PolicyId("Profile", "", name)
            profiles[profile] = profiles.get(profile, 0) + 1
    if PROFILE_TIER in found:  # profiles come after every tier
        found[PROFILE_TIER] = found.pop(PROFILE_TIER)
    return found


def _policy(
    store: Store, tier: str, policy_id: c.PolicyId, endpoints: int, uses: Uses[TierPolicy]
) -> dict[str, Any]:
    is_profile = tier == PROFILE_TIER
    policy = store.profiles.get(policy_id.name) if is_profile else store.policies.get(policy_id)
    rules = None if policy is None else {"ingress": len(policy.inbound), "egress": len(policy.outbound)}
    return {
        "policy": str(policy_id),
        "staged": policy_id.kind in c.STAGED_KINDS,
        "missing": policy is None,
        "endpoints": endpoints,
        "rules": rules,
        **_counted(uses.get(TierPolicy(tier, str(policy_id)))),
    }


def _counted(use: PolicyUse[Any] | None) -> dict[str, Any]:
    counts = {
        result.replace(" ", "_"): number
        for each, result in RESULTS.items()
        if (number := use.tally[each] if use is not None else 0) or not result.startswith("staged")
    }
    last_s = use.last_s if use is not None else 0.0
    return {
        **counts,
        "last_used": datetime.fromtimestamp(last_s, UTC).isoformat() if any(counts.values()) else None,
    }
