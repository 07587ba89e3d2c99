"""What policies decided in Envoy's dialect: counts by policy, and the last denials by listener, chain and client.

Envoy's own counters are by filter, ``<stat prefix>.rbac.allowed``; one filter holds many policies. Here each
policy has its own, ``rbac.policy.<name>.<result>``, for Prometheus with the label ``policy``. A connection costs
two look-ups and one addition for each filter that it meets, and a denied one an entry in a bounded table.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Final, NamedTuple

from xds.model.facts import ConnectionFacts
from xds.model.policy import PolicyList
from ztunnel.policy.denials import Denials
from ztunnel.policy.reasons import reason
from ztunnel.proxy.envoy.stats.stats import Counter, Stats
from ztunnel.proxy.envoy.stream.stream_info import StreamInfo
from ztunnel.runtime.clock import Clock
from ztunnel.runtime.line_limit import LineLimit

log = logging.getLogger(__name__)

#: Policies that are counted one by one; others, under :data:`OTHERS`. As of Calico's.
MOST_POLICIES: Final = 1000
OTHERS: Final = "others"
#: Counted under when policies that allow exist and none of them matched, which no policy decided.
NONE_MATCHED: Final = "none"

ALLOWED, DENIED, ENDED = "allowed", "denied", "ended"
SHADOW_ALLOWED, SHADOW_DENIED = "shadow_allowed", "shadow_denied"


class DeniedBy(NamedTuple):
    """Who was denied what, and where.

    Attributes:
        listener, chain: that took the connection.
        source: the client's address.
        identity: that its certificate proved; empty for plain text.
        destination: of the connection; behind a tunnel, of the application where policies ask for its port.
        reason: the termination details of the access log, which name the policy.
    """

    listener: str
    chain: str
    source: str
    identity: str
    destination: str
    reason: str


class _Use:
    """The counters of one policy, made when they are first needed."""

    __slots__ = ("counters", "last_s")

    def __init__(self) -> None:
        self.counters: dict[str, Counter] = {}
        self.last_s = 0.0


class PolicyUse(NamedTuple):
    """The decisions of one policy.

    Attributes:
        counts: by result; those that never occurred are missing.
        last_s: the last one's time, in seconds of the wall clock.
    """

    policy: str
    counts: dict[str, int]
    last_s: float


class Decisions:
    """Counts decisions; iterates over those of each policy."""

    def __init__(self, stats: Stats, clock: Clock) -> None:
        self._stats = stats
        self._clock = clock
        self._uses: dict[str, _Use] = {}
        self.denials = Denials[DeniedBy]()

    def __iter__(self) -> Iterator[PolicyUse]:
        for policy, use in list(self._uses.items()):
            counts = {result: counter.value for result, counter in use.counters.items()}
            yield PolicyUse(policy, counts, use.last_s)

    def count(self, policy: str, result: str) -> None:
        """Count a decision of a policy; without a name, of none that matched."""
        policy = policy or NONE_MATCHED
        use = self._uses.get(policy)
        if use is None:
            if len(self._uses) >= MOST_POLICIES:
                policy = OTHERS
            use = self._uses.setdefault(policy, _Use())
        use.last_s = self._clock.wall()
        counter = use.counters.get(result)
        if counter is None:
            scope = self._stats.scope(f"rbac.policy.{policy}", family="rbac_policy", labels=(("policy", policy),))
            counter = use.counters[result] = scope.counter(result)
        counter.value += 1

    def line_limit(self) -> LineLimit:
        """Return a limit for the lines of :meth:`log_denial`."""
        return LineLimit(
            self._clock, lambda count: log.info("denials by policies have no line left_out=%d", count)
        )

    @staticmethod
    def log_denial(
        info: StreamInfo, facts: ConnectionFacts, rules: PolicyList, policy: str, *, live: bool
    ) -> None:
        """Write a line about a denial, for a connection that no access log is configured for.

        Args:
            info: the connection.
            facts: that were judged.
            rules: by which.
            policy: that denied; empty: none that allows matched.
            live: the connection was open, and a change ended it.
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
        """List a connection that was denied, or ended by a change.

        Args:
            info: the connection.
            facts: that were judged.
            details: why; see :class:`DeniedBy`.
        """
        where, who = (info.listener, info.chain), (facts.source.host, _identity(facts))
        pair = DeniedBy(*where, *who, str(facts.destination), details)
        self.denials.note(pair, str(facts.source), self._clock.wall())


def _identity(facts: ConnectionFacts) -> str:
    peer = facts.peer
    if peer is None:
        return ""
    return str(peer.identity) if peer.identity is not None else ",".join(peer.names)
