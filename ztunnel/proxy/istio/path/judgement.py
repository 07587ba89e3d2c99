"""Evaluates a workload's policies, and formulates denials for access lines and ``ztunnel explain``."""

from typing import NamedTuple

from xds.model.facts import ConnectionFacts
from xds.model.mesh_policies import WorkloadPolicies
from ztunnel.policy.engine import judge
from ztunnel.proxy.dataplane.reasons import Reason


class Judgement(NamedTuple):
    """The result of evaluating a workload's policies for a connection.

    Attributes:
        policy: the deciding or missing policy. Empty if none decided.
        refusal: why the connection is refused, in the Rust ztunnel's words. Empty if it is allowed.
        reason: the metrics label for the refusal.
    """

    policy: str
    refusal: str
    reason: Reason = Reason.POLICY


def judgement(policies: WorkloadPolicies, facts: ConnectionFacts) -> Judgement:
    """Evaluate a workload's policies for a connection. While a policy that the workload names is missing, every
    connection that it could deny is refused.
    """
    missing = policies.missing_for(facts)
    if missing:
        return Judgement(missing[0], f"policy {missing[0]} has not arrived", Reason.POLICY_MISSING)
    decision = judge(policies.enforced, facts)
    if decision.allowed:
        return Judgement(decision.policy, "")
    if decision.policy:
        return Judgement(decision.policy, f"explicitly denied by: {decision.policy}")
    return Judgement("", "allow policies exist, but none allowed")
