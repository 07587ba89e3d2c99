"""Policies' decisions in Envoy's dialect: counts by policy, and the last denials by listener, chain and client.

Envoy's own counters (``<stat prefix>.rbac.allowed``) are per filter, and one filter can have many policies. Here
each policy has its own counter, ``rbac.policy.<name>.<result>``, for Prometheus with the label ``policy``. The
ledger counts decisions, and each page creates the counters from the ledger.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from functools import partial
from typing import Final, NamedTuple

from xds.model.facts import ConnectionFacts
from xds.model.policy import PolicyList
from ztunnel.policy.calico.guard import results
from ztunnel.policy.ledger import Ledger, TierPolicy, Use, Uses
from ztunnel.policy.reasons import reason
from ztunnel.proxy.envoy.stats.stats import Counter, Stats, labelled
from ztunnel.proxy.envoy.stream.stream_info import StreamInfo
from ztunnel.runtime.clock import Clock
from ztunnel.runtime.line_limit import LineLimit

log = logging.getLogger(__name__)

#: Denials because no ALLOW policy matched are counted under this name, because no single policy made the decision.
NONE_MATCHED: Final = "none"
#: The names that pages give to the results of policy decisions.
RESULTS: Final = {
    Use.ALLOWED: "allowed",
    Use.DENIED: "denied",
    Use.ENDED: "ended",
    Use.WOULD_ALLOW: "shadow_allowed",
    Use.WOULD_DENY: "shadow_denied",
}


class DeniedBy(NamedTuple):
    """A denied client, and the listener and filter chain that denied it.

    Attributes:
        listener, chain: the connection's filter chain.
        source: the client's address.
        identity: the identity proven by the client's certificate. Empty for plain text.
        destination: the connection's destination, or the tunnel's application if policies read its port.
        reason: the termination details of the access log, which name the policy.
    """

    listener: str
    chain: str
    source: str
    identity: str
    destination: str
    reason: str


class Decisions:
    """Records policy decisions in the ledger, and makes pages show the ledger's counts as statistics."""

    def __init__(self, stats: Stats, clock: Clock) -> None:
        self._clock = clock
        self.ledger = Ledger[DeniedBy]()
        stats.show(partial(_of_filters, self.ledger.own), self.ledger.own.clear)
        stats.show(partial(_of_tiers, self.ledger.calico), self.ledger.calico.clear)

    def count(self, policy: str, use: Use) -> None:
        """Count a policy's decision. An empty name means that no policy matched."""
        self.ledger.own.note(policy or NONE_MATCHED, use, self._clock.wall())

    def line_limit(self) -> LineLimit:
        """Return a new rate limit for the log lines of :meth:`log_denial`."""
        return LineLimit(
            self._clock, lambda count: log.info("log lines about denials were suppressed count=%d", count)
        )

    @staticmethod
    def log_denial(
        info: StreamInfo, facts: ConnectionFacts, rules: PolicyList, policy: str, *, live: bool
    ) -> None:
        """Write a log line about a denial. Used for connections without a configured access log.

        Args:
            info: the connection.
            facts: the facts that the policies evaluated.
            rules: the deciding filter's rules.
            policy: the denying policy. Empty if no allowing policy matched.
            live: whether the connection was open and a policy change ended it.
        """
        policies = [each for tier in rules.tiers for each in tier.policies]
        found = next((each for each in policies if policy and each.name == policy), None)
        rule = reason(found.condition, facts) if found is not None else f"none of {len(policies)} policies matches"
        log.info(
            "connection %s by policy src=%s identity=%s dst=%s listener=%s chain=%s policy=%s rule=%s",
            "ended" if live else "denied",
            facts.source,
            _identity(facts) or "-",
            facts.destination,
            info.listener,
            info.chain or "-",
            policy or NONE_MATCHED,
            rule,
        )

    def denied(self, info: StreamInfo, facts: ConnectionFacts, details: str) -> None:
        """Record a connection that was denied, or ended by a policy change.

        Args:
            info: the connection.
            facts: the facts that the policies evaluated.
            details: the reason; see :class:`DeniedBy`.
        """
        where, who = (info.listener, info.chain), (facts.source.host, _identity(facts))
        pair = DeniedBy(*where, *who, str(facts.destination), details)
        self.ledger.denials.note(pair, str(facts.source), self._clock.wall())


def _of_filters(uses: Uses[str]) -> Iterator[Counter]:
    for policy, tally, _ in uses:
        for use, result in RESULTS.items():
            if tally[use]:
                prefix, labels = f"rbac.policy.{policy}", (("policy", policy),)
                yield labelled(prefix, result, tally[use], "rbac_policy", labels)


def _of_tiers(uses: Uses[TierPolicy]) -> Iterator[Counter]:
    for key, number in results(uses):
        labels = tuple(zip(("tier", "policy", "result"), key, strict=True))
        yield labelled(f"policy.{'.'.join(key)}", "decisions", number, "policy", labels)


def _identity(facts: ConnectionFacts) -> str:
    peer = facts.peer
    if peer is None:
        return ""
    return str(peer.identity) if peer.identity is not None else ",".join(peer.names)
