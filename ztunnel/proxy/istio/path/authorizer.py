"""Decides by the workload's policies whether to accept a connection. Decisions of dry-run policies are only
counted and logged.
"""

import asyncio
import logging
from typing import Final

from xds.model.facts import ConnectionFacts
from xds.model.mesh import Changes
from xds.model.mesh_policies import WorkloadPolicies
from xds.model.policy import Verdict as PolicyVerdict
from xds.model.workload import PolicyKey, Workload
from ztunnel.policy.engine import holds, judge
from ztunnel.policy.ledger import Use
from ztunnel.proxy.dataplane.life_table import Verdict
from ztunnel.proxy.dataplane.reasons import Reason
from ztunnel.proxy.istio.accounting.access_record import Record
from ztunnel.proxy.istio.accounting.metrics import DECISIONS, NONE_MATCHED
from ztunnel.proxy.istio.accounting.outcome import POLICY_CHANGE
from ztunnel.proxy.istio.path.denial_log import DenialLog
from ztunnel.proxy.istio.path.judgement import Judgement, judgement
from ztunnel.proxy.istio.path.node import Node

log = logging.getLogger(__name__)

#: How long to wait for missing policies that a workload names. Control planes send them shortly after the
#: workload.
POLICY_GRACE_S: Final = 5.0


_ALLOWED = Judgement("", "")


class Denied(Exception):
    """The connection is not allowed. The text names the policy, or states that no policy allows it.

    Attributes:
        fields: further fields for the access log line.
        policy: the denying or missing policy. Empty if no policy allows it.
        reason: the label of the failure.
    """

    def __init__(
        self,
        text: str,
        fields: tuple[tuple[str, str], ...] = (),
        policy: str = "",
        reason: Reason = Reason.POLICY,
    ) -> None:
        super().__init__(text)
        self.fields = fields
        self.policy = policy
        self.reason = reason


class Authorizer:
    """Checks connections to workloads of this node against their policies."""

    def __init__(self, node: Node) -> None:
        self._node = node
        self._policies: WorkloadPolicies | None = None
        self._missing: dict[PolicyKey, float] = {}
        self.lines = DenialLog(node)
        self._level = logging.INFO if node.config.authz_info_logging else logging.DEBUG

    async def authorize(
        self, workload: Workload, facts: ConnectionFacts, record: Record, grace_s: float = POLICY_GRACE_S
    ) -> None:
        """Check a new connection. Returns when it is allowed.

        While a policy named by the workload is missing that could deny the connection, the connection waits,
        because control planes announce a workload before its policy. If the policy does not arrive in time, the
        connection is denied.

        Args:
            workload: the destination of the connection.
            facts: the facts that policies evaluate.
            record: receives the verdict of dry-run policies.
            grace_s: how long to wait for missing policies.

        Raises:
            Denied: the connection is not allowed.
        """
        policies = self._current(workload)
        if policies.missing_for(facts):
            with self._node.waiting("policy"):
                policies = await self._complete(workload, policies, facts, grace_s)
        self._report_dry_run(policies, facts, record)
        found = self._refusal(workload, policies, facts, Use.DENIED)
        if found.refusal:
            raise Denied(found.refusal, policy=found.policy, reason=found.reason)

    def plan(self, workload: Workload, facts: ConnectionFacts) -> str | None:
        """Make one decision for all connections with equal facts. The result is valid until the mesh changes.

        Returns:
            If the connections are allowed, the name of the allowing policy, or an empty string if no policy
            applies. The caller then calls :meth:`note_allowed` for each connection. ``None``: the caller calls
            :meth:`authorize` for each connection, because it is refused, must wait, or must be reported or logged.
        """
        policies = self._node.mesh.policies_for(workload)
        if policies.missing or policies.dry_run_deny or policies.dry_run_allow or log.isEnabledFor(self._level):
            return None
        if not policies.enforced.tiers:
            return ""
        found = judgement(policies, facts)
        return None if found.refusal else found.policy

    def note_allowed(self, policy: str) -> None:
        """Count a connection that is allowed by a policy, as returned by :meth:`plan`."""
        if policy:
            self._note(policy, Use.ALLOWED)

    def changed(self, workload: Workload) -> bool:
        """Update the workload's policies after a change of the mesh. Return whether they differ, so that open
        connections must be checked again.
        """
        policies = self._node.mesh.policies_for(workload)
        if policies is self._policies:
            return False
        self._policies = policies
        # The grace period of a missing policy starts when the policy is first missed, and later changes do not
        # prolong it.
        until_s = self._node.poller.loop.time() + POLICY_GRACE_S
        self._missing = {key: self._missing.get(key, until_s) for key in policies.missing}
        return True

    def verdict(self, workload: Workload, facts: ConnectionFacts) -> Verdict:
        """Check an accepted connection again.

        While a policy named by the workload is missing, only a matching DENY policy ends the connection, because
        the missing policy might allow it. After the grace period the connection is denied.
        """
        policies = self._node.mesh.policies_for(workload)
        until_s = min((self._missing.get(key, 0.0) for key in policies.missing_for(facts)), default=0.0)
        if self._node.poller.loop.time() < until_s:
            decision = judge(policies.arrived, facts)
            if decision.allowed or not decision.policy:
                return Verdict(until_s=until_s)
            self._count(workload, facts, Use.ENDED, decision.policy)
            return Verdict(POLICY_CHANGE)
        return Verdict(POLICY_CHANGE if self._refusal(workload, policies, facts, Use.ENDED).refusal else "")

    def _refusal(
        self, workload: Workload, policies: WorkloadPolicies, facts: ConnectionFacts, refused: Use
    ) -> Judgement:
        """Evaluate the policies for a connection. A refusal is counted under ``refused``. For a new connection,
        the policy that allows it is counted, too.
        """
        if not policies.missing and not policies.enforced.tiers:
            return _ALLOWED  # for most connections no policy applies, and nothing is recorded
        found = judgement(policies, facts)
        policy, refusal = found.policy, found.refusal
        if refusal:
            self._count(workload, facts, refused, policy)
        elif policy and refused is Use.DENIED:
            self._note(policy, Use.ALLOWED)
        if not policies.missing and log.isEnabledFor(self._level):
            if refusal:
                text = "deny policy match" if policy else "no allow policies matched"
            else:
                text = "allow policy match" if policy else "no allow policies, allow"
            log.log(self._level, "%s policy=%s", text, policy)
        return found

    def _count(self, workload: Workload, facts: ConnectionFacts, refused: Use, policy: str) -> None:
        self._note(policy or NONE_MATCHED, refused)
        self.lines.write(DECISIONS[refused], workload, facts, policy)

    def _note(self, policy: str, use: Use) -> None:
        node = self._node
        node.metrics.ledger.own.note(policy, use, node.clock.wall())

    def _report_dry_run(self, policies: WorkloadPolicies, facts: ConnectionFacts, record: Record) -> None:
        matched = False
        for policy in policies.dry_run_deny:
            if holds(policy.condition, facts):
                log.log(self._level, "dry-run: deny policy match policy=%s", policy.key)
                self._note(policy.key, Use.WOULD_DENY)
                record.dry_run = f"denied by {policy.key}"
        for policy in policies.dry_run_allow:
            if holds(policy.condition, facts):
                matched = True
                log.log(self._level, "dry-run: allow policy match policy=%s", policy.key)
                self._note(policy.key, Use.WOULD_ALLOW)
        # Beside an enforced ALLOW policy, a further one can only allow more. (As in the Rust ztunnel.)
        has_enforced_allow = policies.enforced.end is PolicyVerdict.DENY
        if policies.dry_run_allow and not matched and not has_enforced_allow:
            log.log(self._level, "dry-run: no allow policies match")
            for policy in policies.dry_run_allow:
                self._note(policy.key, Use.WOULD_NOT_ALLOW)
            record.dry_run = record.dry_run or "none of the allow policies matches"

    def _current(self, workload: Workload) -> WorkloadPolicies:
        """Return the policies of the workload's current version. The caller can have waited since it looked the
        workload up, and the list of policies is part of a version.
        """
        mesh = self._node.mesh
        return mesh.policies_for(mesh.workload(workload.uid) or workload)

    async def _complete(
        self, workload: Workload, policies: WorkloadPolicies, facts: ConnectionFacts, grace_s: float
    ) -> WorkloadPolicies:
        """Wait until no policy is missing that could deny the connection, at most ``grace_s`` seconds. Return the
        workload's policies.
        """
        mesh = self._node.mesh
        arrived = asyncio.Event()

        def changed(changes: Changes) -> None:
            if changes.policies or workload.uid in changes.workloads:
                arrived.set()

        stop = mesh.watch(changed)
        try:
            async with asyncio.timeout(grace_s):
                while policies.missing_for(facts):
                    await arrived.wait()
                    arrived.clear()
                    policies = self._current(workload)
        except TimeoutError:
            pass
        finally:
            stop()
        return policies
