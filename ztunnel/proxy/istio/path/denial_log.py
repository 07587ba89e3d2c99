"""Writes a log line about each connection denied by policy, if access log lines are off.

Access logs are often off (``RUST_LOG=info,access=off``), and then denials would be invisible. The line has the
necessary facts: both workloads, the client's address and authenticated identity, the policy, and the deciding rule
with its clause. It is rate-limited per pod, so that a retrying client does not fill the disk. Finding the rule
costs one policy evaluation, which is done only for lines that are written.
"""

from __future__ import annotations

import logging

from xds.model.authorization import Action, AuthorizationPolicy
from xds.model.facts import ConnectionFacts
from xds.model.policy import AnyOf
from xds.model.workload import Workload
from ztunnel.policy.engine import holds
from ztunnel.policy.reasons import reason
from ztunnel.proxy.istio.path.node import Node
from ztunnel.runtime.line_limit import LineLimit

log = logging.getLogger(__name__)

_NONE = "-"
#: If no ALLOW policy matches, a line names at most this many ALLOW policies. The rest are only counted.
_MOST_NAMED = 4


class DenialLog:
    """Writes the log lines about one pod's denied connections."""

    def __init__(self, node: Node) -> None:
        self._node = node
        self._limit = LineLimit(
            node.clock, lambda count: log.info("log lines about denials were suppressed count=%d", count)
        )

    @property
    def wanted(self) -> bool:
        """Whether denials are logged here, because access lines are off, or ``AUTHZ_POLICY_INFO_LOGGING`` is set.

        In the Rust ztunnel, this variable makes each decision a line at level info.
        """
        node = self._node
        return node.logs.access_level > logging.ERROR or node.config.authz_info_logging

    def write(
        self, verb: str, workload: Workload | None, facts: ConnectionFacts, policy: str, rule: str | None = None
    ) -> None:
        """Write a line about a denial if such lines are enabled and the rate limit permits it.

        Args:
            verb: ``denied`` or ``ended``.
            workload: the destination workload, if it is known.
            facts: the connection's facts.
            policy: the deciding policy. Empty if no ALLOW policy matched.
            rule: the deciding rule in words. ``None`` for a policy of the mesh: its rule is looked up here.
        """
        if not (self.wanted and log.isEnabledFor(logging.INFO) and self._limit.admits()):
            return
        mesh, peer = self._node.mesh, facts.peer
        source = mesh.workload_at(self._node.config.network, facts.source.host)
        log.info(
            "connection %s by policy src.addr=%s src.workload=%s src.identity=%s dst.addr=%s dst.workload=%s "
            "policy=%s rule=%s",
            verb,
            facts.source,
            _called(source),
            (", ".join(peer.names) if peer is not None else "") or _NONE,
            facts.destination,
            _called(workload),
            policy or _NONE,
            rule if rule is not None else self._rule(workload, policy, facts),
        )

    def _rule(self, workload: Workload | None, name: str, facts: ConnectionFacts) -> str:
        mesh = self._node.mesh
        if name:
            policy = mesh.policy(name)
            return deciding_rule(policy, facts) if policy is not None else "the policy has not arrived"
        tiers = mesh.policies_for(workload).enforced.tiers if workload is not None else ()
        names = [judged.name for tier in tiers for judged in tier.policies]
        found = [policy for each in names if (policy := mesh.policy(each)) is not None]
        allows = [policy.key for policy in found if policy.action is Action.ALLOW]
        told = ", ".join(allows[:_MOST_NAMED])
        more = len(allows) - _MOST_NAMED
        return f"none of the ALLOW policies matches: {told}{f' and {more} more' if more > 0 else ''}"


def deciding_rule(policy: AuthorizationPolicy, facts: ConnectionFacts) -> str:
    """Name the first rule of a policy that matches a connection, with its position and the deciding clause."""
    condition = policy.condition
    # The compiled condition of a policy has one part per rule, unless the policy has only one rule or was not
    # fully understood when it was compiled.
    parts = condition.conditions if isinstance(condition, AnyOf) and len(policy.rules) > 1 else (condition,)
    if len(parts) == max(1, len(policy.rules)):
        for place, part in enumerate(parts):
            if holds(part, facts):
                return f"rules[{place}]: {reason(part, facts)}"
    return reason(condition, facts)


def _called(workload: Workload | None) -> str:
    return f"{workload.name}.{workload.namespace}" if workload is not None else _NONE
