"""Evaluates an endpoint's tiers rule by rule, and records why each rule matched or did not. Pure.

Explanations are made from this record. The verdict equals that of :mod:`ztunnel.policy.calico.evaluator`, which is
faster.
"""

from dataclasses import dataclass, field
from enum import StrEnum

from xds.model import calico as c
from ztunnel.policy.calico.clauses import connection_clauses, http_clause, unseen_http_clause
from ztunnel.policy.calico.evaluator import decided, denied, profile_id
from ztunnel.policy.calico.store import Store
from ztunnel.policy.calico.verdict import (
    PROFILE_TIER,
    Code,
    Facts,
    Identity,
    RuleRef,
    Undecidable,
    Verdict,
    with_unseen,
)


class Outcome(StrEnum):
    """The result of evaluating one rule, policy or tier."""

    NO_MATCH = "no match"
    LOGGED = "logs"
    ALLOWED = "allows"
    DENIED = "denies"
    PASSED = "passes"
    UNDECIDABLE = "cannot be evaluated"
    STAGED = "staged"


_OF_ACTION = {
    c.Action.ALLOW: Outcome.ALLOWED,
    c.Action.DENY: Outcome.DENIED,
    c.Action.PASS: Outcome.PASSED,
    c.Action.LOG: Outcome.LOGGED,
    c.Action.UNKNOWN: Outcome.UNDECIDABLE,
}


@dataclass(frozen=True, slots=True)
class Step:
    """The step that evaluated one rule. Index -1 stands for a policy as a whole, or for the end of a tier.

    Attributes:
        clause: the first failing clause of a rule that did not match, or the error, if any.
    """

    place: RuleRef
    outcome: Outcome
    clause: str = ""


@dataclass(slots=True)
class Walk:
    """The steps of an evaluation, up to the deciding step, and the verdict."""

    steps: list[Step] = field(default_factory=list)
    verdict: Verdict = field(default_factory=lambda: Verdict(Code.PERMISSION_DENIED))


def walk(
    store: Store,
    endpoint: c.Endpoint,
    flow: c.Flow,
    identities: tuple[Identity, Identity],
    direction: c.Direction = c.Direction.INGRESS,
    *,
    enforced: bool = True,
    connections_only: bool = False,
) -> Walk:
    """Evaluate an endpoint's policies for a flow, and return every step of the evaluation.

    Args:
        identities: the identities of source and destination, see
            :func:`~ztunnel.policy.calico.verdict.identity_of`.
        enforced: False also evaluates staged policies.
        connections_only: see :mod:`ztunnel.policy.calico.clauses`.
    """
    walking = _Walking(store, Facts(store, flow, *identities), direction, enforced, connections_only)
    try:
        verdict = with_unseen(walking.tiers(endpoint), walking.facts)
    except Undecidable as error:
        verdict = Verdict(error.code, str(error))
    return Walk(walking.steps, verdict)


@dataclass(slots=True)
class _Walking:
    """An evaluation in progress: its flow, and its steps so far."""

    store: Store
    facts: Facts
    direction: c.Direction
    enforced: bool
    connections_only: bool
    steps: list[Step] = field(default_factory=list)

    def tiers(self, endpoint: c.Endpoint) -> Verdict:
        """Return the verdict of the tiers, or else of the profiles.

        Raises:
            Undecidable: a rule is reached that cannot be evaluated.
        """
        for tier in endpoint.tiers:
            first = None
            rule = None
            for policy_id in tier.policies(self.direction):
                if self.enforced and policy_id.kind in c.STAGED_KINDS:
                    self.steps.append(Step(RuleRef(tier.name, policy_id, -1), Outcome.STAGED))
                    continue
                first = first or policy_id
                rule = self._policy(self.store.policies.get(policy_id), RuleRef(tier.name, policy_id, 0))
                if rule is not None:
                    break
            if first is None:
                continue
            if rule is None:
                end = RuleRef(tier.name, first, -1)
                self.steps.append(Step(end, Outcome.PASSED if tier.passes else Outcome.DENIED))
                if not tier.passes:
                    return denied(end)
            elif rule[1] is not c.Action.PASS:
                return decided(*rule)
        if not endpoint.profiles:
            return denied(RuleRef(PROFILE_TIER, None, -1))
        for name in endpoint.profiles:
            place = RuleRef(PROFILE_TIER, profile_id(name), 0)
            rule = self._policy(self.store.profiles.get(name), place)
            if rule is not None:
                return decided(*rule)
        return denied(RuleRef(PROFILE_TIER, profile_id(endpoint.profiles[0]), -1))

    def _policy(self, policy: c.Policy | None, place: RuleRef) -> tuple[RuleRef, c.Action] | None:
        """Return the place and the action of a policy's first matching rule whose action is not Log."""
        if policy is None:
            message = f"policy {place.policy} of tier {place.tier} is not in the store"
            self.steps.append(Step(RuleRef(place.tier, place.policy, -1), Outcome.UNDECIDABLE, message))
            raise Undecidable(Code.INTERNAL, message)
        for index, rule in enumerate(policy.rules(self.direction)):
            here = RuleRef(place.tier, place.policy, index)
            try:
                failed = self._failed(rule, policy.namespace, here)
            except Undecidable as error:
                self.steps.append(Step(here, Outcome.UNDECIDABLE, str(error)))
                if rule.action is c.Action.LOG:
                    continue
                raise
            if failed is not None:
                self.steps.append(Step(here, Outcome.NO_MATCH, failed))
                continue
            self.steps.append(Step(here, _OF_ACTION[rule.action]))
            if rule.action is not c.Action.LOG:
                return here, rule.action
        return None

    def _failed(self, rule: c.Rule, namespace: str, place: RuleRef) -> str | None:
        """Return the name of the first clause that fails, or None if all match.

        Raises:
            Undecidable: none fails and one cannot be evaluated.
        """
        undecidable = None
        for clause in connection_clauses(rule, namespace, connections_only=self.connections_only):
            try:
                if not clause.check(self.facts):
                    return clause.name
            except Undecidable as error:
                undecidable = error
        if undecidable is not None:
            raise undecidable
        if self.connections_only:
            unseen = unseen_http_clause(rule, place)
            return "http, which is not seen here" if unseen is not None and not unseen(self.facts) else None
        http = http_clause(rule)
        return "http" if http is not None and not http(self.facts) else None
