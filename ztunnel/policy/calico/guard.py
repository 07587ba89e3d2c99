"""Decides by Calico's policies whether the tunnel proxy may carry a connection, and counts decisions. Pure.

Calico's tiers and profiles apply in addition to Istio's or Envoy's policies: all must allow a connection. Requests
are not evaluated (see :mod:`ztunnel.policy.calico.clauses`).

A source of Kubernetes' policies also sends its node's addresses (:data:`~xds.model.calico.NODE_ADDRESSES`). Then a
node and its pods can always reach each other, and a pod can reach itself, like in the kernel's table. A tunnel
whose outer source is the node does not count as a connection of the node: it carries a workload's identity, so
policies apply.

A pod unknown to the policies is denied, like Calico's drop for an interface without an endpoint, because its
policies have possibly not arrived. ``allow_unknown`` is for meshes only partly covered by the policies.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from xds.model import calico as c
from xds.model.address import SocketAddress
from ztunnel.policy.calico.evaluator import Evaluator
from ztunnel.policy.calico.store import Store
from ztunnel.policy.calico.verdict import Code, RuleRef, Verdict
from ztunnel.policy.ledger import TierPolicy, Use, Uses

#: The policy name for counting denials at the end of a tier.
END_OF_TIER: Final = "end of tier"
#: The tier name for counting decisions without a deciding rule.
NO_RULE: Final = "none"
#: The tier and policy name for the summed counts of evicted policies.
OTHERS: Final = TierPolicy("others", "others")


#: The values of the metrics' label ``result`` for each kind of decision.
RESULTS: Final = {
    Use.ALLOWED: "allowed",
    Use.DENIED: "denied",
    Use.WOULD_ALLOW: "staged allowed",
    Use.WOULD_DENY: "staged denied",
}


def note(uses: Uses[TierPolicy], verdict: Verdict, now_s: float, *, staged: bool = False) -> None:
    """Count a decision. ``staged`` is the decision that staged policies would have made."""
    rule = verdict.rule
    if rule is None:
        policy = TierPolicy(NO_RULE, verdict.code.name)
    else:
        policy = TierPolicy(rule.tier, END_OF_TIER if rule.index < 0 else str(rule.policy))
    if staged:
        use = Use.WOULD_ALLOW if verdict.allowed else Use.WOULD_DENY
    else:
        use = Use.ALLOWED if verdict.allowed else Use.DENIED
    uses.note(policy, use, now_s)


def results(uses: Uses[TierPolicy]) -> list[tuple[tuple[str, str, str], int]]:
    """Return the number of decisions by tier, policy and result, for metrics.

    Policies evicted from the table are counted together, so that the sum over all series never decreases.
    """
    tallies = [(policy, tally) for policy, tally, _ in uses]
    return [
        ((*policy, result), number)
        for policy, tally in (*tallies, (OTHERS, uses.others.tally))
        for use, result in RESULTS.items()
        if (number := tally[use])
    ]


@dataclass(frozen=True, slots=True)
class Decision:
    """The decision about a connection.

    Attributes:
        pending: whether the connection is denied because of a missing part that can still arrive.
        staged: what staged policies would have decided, if that differs; for a field of the access line.
    """

    verdict: Verdict
    pending: bool = False
    staged: str = ""

    @property
    def allowed(self) -> bool:
        return self.verdict.allowed

    @property
    def left(self) -> str:
        """The rule whose HTTP clause was left to a waypoint, and the waypoint. Empty if no clause was left."""
        return self.verdict.message if self.verdict.allowed else ""

    @property
    def fields(self) -> tuple[tuple[str, str], ...]:
        """The deciding rule, as fields of an access log line. Empty if no rule decided."""
        rule = self.verdict.rule
        if rule is None:
            return ()
        return (
            ("policy.tier", rule.tier),
            ("policy.name", str(rule.policy or "")),
            ("policy.rule", END_OF_TIER if rule.index < 0 else str(rule.index)),
        )


def connection(
    source: SocketAddress,
    destination: SocketAddress,
    source_principal: str,
    destination_principal: str,
    *,
    requests_left_to: str = "",
) -> c.Flow:
    """Return the facts of a TCP connection for policies. Principals are SPIFFE ids, empty for plain text."""
    return c.Flow(
        source_ip=source.host,
        source_port=source.port,
        destination_ip=destination.host,
        destination_port=destination.port,
        source_principal=source_principal,
        destination_principal=destination_principal,
        requests_left_to=requests_left_to,
    )


class Guard:
    """Decides about the connections of a node's pods.

    Args:
        evaluator: returns the current evaluator, which has the last complete store and ``connections_only``.
        wall_s: the wall clock, for counted decisions.
        uses: where decisions are counted.
        allow_unknown: see the module.
    """

    def __init__(
        self,
        evaluator: Callable[[], Evaluator],
        wall_s: Callable[[], float],
        *,
        uses: Uses[TierPolicy] | None = None,
        allow_unknown: bool = False,
    ) -> None:
        self.uses = uses if uses is not None else Uses[TierPolicy]()
        self._evaluator = evaluator
        self._wall_s = wall_s
        self._allow_unknown = allow_unknown

    def knows(self, address: str) -> bool:
        """Return whether the policies know an endpoint with this address."""
        return self._evaluator().store.endpoint_at(address) is not None

    def check(self, direction: c.Direction, flow: c.Flow, *, counted: bool = True) -> Decision:
        """Decide about a connection from or to a pod of this node.

        Args:
            direction: ingress applies the destination's policies, egress the source's.
            counted: whether the decision is counted. False for open connections that are evaluated again.
        """
        evaluator = self._evaluator()
        store = evaluator.store
        address = flow.destination_ip if direction is c.Direction.INGRESS else flow.source_ip
        endpoint = store.endpoint_at(address)
        staged = ""
        if endpoint is not None and store.in_sync and _always_allowed(store, direction, flow):
            verdict = Verdict(Code.OK)
        elif endpoint is not None:
            verdict = evaluator.check(endpoint, flow, direction)
            if store.in_sync and evaluator.has_staged(endpoint, direction):
                would = evaluator.check(endpoint, flow, direction, enforced=False)
                differs = would.allowed is not verdict.allowed
                if differs:
                    staged = _would(would)
                if counted and (differs or _is_of_staged(would.rule)):
                    note(self.uses, would, self._wall_s(), staged=True)
        elif not store.in_sync:
            verdict = Verdict(Code.UNAVAILABLE, "no policy has been received yet")
        elif self._allow_unknown:
            verdict = Verdict(Code.OK)
        else:
            verdict = Verdict(Code.PERMISSION_DENIED, f"the policies know no pod with the address {address}")
        if counted:
            note(self.uses, verdict, self._wall_s())
        return Decision(verdict, endpoint is None and not verdict.allowed, staged)


def _always_allowed(store: Store, direction: c.Direction, flow: c.Flow) -> bool:
    """Return whether policies do not apply, because the connection is between a pod and its node, or from a pod to
    itself (NetworkPolicy's documentation).
    """
    sets = store.ip_sets
    if c.NODE_ADDRESSES not in sets:
        return False
    if flow.source_ip == flow.destination_ip:
        return True
    if direction is c.Direction.EGRESS:
        return sets.holds(c.NODE_ADDRESSES, flow.destination_ip)
    # A connection with a principal came through a tunnel, so the node's address does not prove that the node
    # opened it.
    return not flow.source_principal and sets.holds(c.NODE_ADDRESSES, flow.source_ip)


def _is_of_staged(rule: RuleRef | None) -> bool:
    """Return whether the deciding rule is of a staged policy. The end of a tier belongs to no policy."""
    return rule is not None and rule.index >= 0 and rule.policy is not None and rule.policy.kind in c.STAGED_KINDS


def _would(verdict: Verdict) -> str:
    rule: RuleRef | None = verdict.rule
    if rule is None:
        return f"{verdict.code.name}: {verdict.message}"
    return f"{'allowed' if verdict.allowed else 'denied'} by {rule}"
