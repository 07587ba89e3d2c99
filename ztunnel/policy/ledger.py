"""Counts the decisions of one process about connections: by policy, and the last denials by pair. Pure.

Each part that decides has a table in the ledger. Pages and metrics have their own names for each :class:`Use`:

=======================  ============================  ==============================================
table                    policy                        who notes
=======================  ============================  ==============================================
:attr:`Ledger.own`       its name                      AuthorizationPolicies of an Istio mesh; the
                                                       RBAC filters of Envoy's dialect
:attr:`Ledger.calico`    tier and name                 Calico's policies, beside either; the policy
                                                       server
:attr:`Ledger.early`     the direction                 connections refused before a policy is asked
:attr:`Ledger.denials`   a pair instead of a policy    each denial or end of a connection
=======================  ============================  ==============================================

Every table is bounded; the entry with the oldest decision is evicted. :meth:`Ledger.add` sums processes.
"""

from collections.abc import Iterable, Iterator
from enum import IntEnum
from operator import add
from typing import Final, Generic, NamedTuple, TypeVar

#: The most policies in one table. It is limited, because a mesh adds and removes policies over time.
MOST_POLICIES: Final = 10_000
#: The most pairs that are kept, because an unauthenticated client can create any number, for example by ports.
MOST_PAIRS: Final = 500

PolicyT = TypeVar("PolicyT")
PairT = TypeVar("PairT")


class Use(IntEnum):
    """The effect of a decision. Its value is its index in a :class:`Tally`."""

    ALLOWED = 0
    DENIED = 1
    ENDED = 2
    """A live connection was ended when it was evaluated again after a change."""
    WOULD_ALLOW = 3
    """The decision of a policy that is not enforced: dry-run, shadow or staged."""
    WOULD_DENY = 4
    WOULD_NOT_ALLOW = 5
    """ALLOW policies are in dry run, and none of them matched."""
    REFUSED_EARLY = 6
    """The connection ended before it counted as opened."""


class Tally(NamedTuple):
    """The numbers of decisions, one per :class:`Use`. The use's value is the index."""

    allowed: int = 0
    denied: int = 0
    ended: int = 0
    would_allow: int = 0
    would_deny: int = 0
    would_not_allow: int = 0
    refused_early: int = 0


class PolicyUse(NamedTuple, Generic[PolicyT]):
    """The decisions of one policy.

    Attributes:
        last_s: when the last decision was made, in seconds of the wall clock.
    """

    policy: PolicyT
    tally: Tally
    last_s: float


class UsesCopy(NamedTuple, Generic[PolicyT]):
    """The entries of :class:`Uses` as plain values, to send to another process. ``others`` sums the evicted
    entries.
    """

    uses: tuple[PolicyUse[PolicyT], ...]
    others: PolicyUse[str]


class _Counted:
    __slots__ = ("counts", "last_s")

    def __init__(self) -> None:
        self.counts = [0] * len(Use)
        self.last_s = 0.0

    def add(self, counts: Iterable[int], last_s: float) -> None:
        self.counts = list(map(add, self.counts, counts))
        self.last_s = max(self.last_s, last_s)


class Uses(Generic[PolicyT]):
    """The decisions of each policy, for at most :data:`MOST_POLICIES`. Iterates from the oldest to the newest."""

    def __init__(self) -> None:
        self._by_policy: dict[PolicyT, _Counted] = {}
        self._others = _Counted()

    def __len__(self) -> int:
        return len(self._by_policy)

    def __iter__(self) -> Iterator[PolicyUse[PolicyT]]:
        for policy, counted in list(self._by_policy.items()):
            yield PolicyUse(policy, Tally(*counted.counts), counted.last_s)

    def get(self, policy: PolicyT) -> PolicyUse[PolicyT] | None:
        """Return the decisions of a policy, or None if it has not decided or was evicted."""
        counted = self._by_policy.get(policy)
        return PolicyUse(policy, Tally(*counted.counts), counted.last_s) if counted is not None else None

    @property
    def others(self) -> PolicyUse[str]:
        """The sum of evicted policies' decisions. A policy that decides again after its eviction starts at
        zero.
        """
        return PolicyUse("others", Tally(*self._others.counts), self._others.last_s)

    def note(self, policy: PolicyT, use: Use, now_s: float) -> None:
        """Count one decision."""
        counted = self._by_policy.pop(policy, None)
        if counted is None:
            counted = _Counted()
            self._make_room(MOST_POLICIES - 1)
        counted.counts[use] += 1
        counted.last_s = now_s
        self._by_policy[policy] = counted

    def copy(self) -> UsesCopy[PolicyT]:
        """Return all entries."""
        return UsesCopy(tuple(self), self.others)

    def add(self, copy: UsesCopy[PolicyT]) -> None:
        """Add the entries of another process's table."""
        for policy, tally, last_s in copy.uses:
            self._by_policy.setdefault(policy, _Counted()).add(tally, last_s)
        self._others.add(copy.others.tally, copy.others.last_s)
        self._by_policy = dict(sorted(self._by_policy.items(), key=lambda entry: entry[1].last_s))
        self._make_room(MOST_POLICIES)

    def clear(self) -> None:
        """Remove all entries."""
        self._by_policy.clear()
        self._others = _Counted()

    def _make_room(self, most: int) -> None:
        while len(self._by_policy) > most:
            oldest = self._by_policy.pop(next(iter(self._by_policy)))
            self._others.add(oldest.counts, oldest.last_s)


class Denial(NamedTuple, Generic[PairT]):
    """How often a pair was denied.

    Attributes:
        pair: the denied client and destination, as a hashable value of the front end.
        times: number of connections.
        last_s: when the last one was denied, in seconds of the wall clock.
        address: the source address of the last one.
    """

    pair: PairT
    times: int
    last_s: float
    address: str


class Denials(Generic[PairT]):
    """How often each pair was denied, for at most :data:`MOST_PAIRS`. Iterates from the newest to the oldest."""

    def __init__(self) -> None:
        self._by_pair: dict[PairT, Denial[PairT]] = {}

    def __len__(self) -> int:
        return len(self._by_pair)

    def __iter__(self) -> Iterator[Denial[PairT]]:
        return reversed(list(self._by_pair.values()))

    def note(self, pair: PairT, address: str, now_s: float) -> None:
        """Count a denied connection."""
        known = self._by_pair.pop(pair, None)
        self._by_pair[pair] = Denial(pair, known.times + 1 if known else 1, now_s, address)
        if len(self._by_pair) > MOST_PAIRS:
            del self._by_pair[next(iter(self._by_pair))]

    def add(self, others: Iterable[Denial[PairT]]) -> None:
        """Add the denials counted by another process."""
        found = dict(self._by_pair)
        for other in others:
            known = found.get(other.pair)
            if known is not None:
                newer = max(known, other, key=lambda denial: denial.last_s)
                other = newer._replace(times=known.times + other.times)
            found[other.pair] = other
        newest = sorted(found.values(), key=lambda denial: denial.last_s)[-MOST_PAIRS:]
        self._by_pair = {denial.pair: denial for denial in newest}


class TierPolicy(NamedTuple):
    """A policy in one of Calico's tiers, or the end of the tier."""

    tier: str
    policy: str


class LedgerCopy(NamedTuple, Generic[PairT]):
    """A ledger's entries as plain values, to send to another process."""

    own: UsesCopy[str]
    calico: UsesCopy[TierPolicy]
    early: UsesCopy[str]
    denials: tuple[Denial[PairT], ...]


class Ledger(Generic[PairT]):
    """The decisions of one process, in several tables; see the module."""

    def __init__(self) -> None:
        self.own = Uses[str]()
        self.calico = Uses[TierPolicy]()
        self.early = Uses[str]()
        self.denials = Denials[PairT]()

    def copy(self) -> LedgerCopy[PairT]:
        """Return all entries."""
        return LedgerCopy(self.own.copy(), self.calico.copy(), self.early.copy(), tuple(self.denials))

    def add(self, copy: LedgerCopy[PairT]) -> None:
        """Add the entries of another process's ledger."""
        self.own.add(copy.own)
        self.calico.add(copy.calico)
        self.early.add(copy.early)
        self.denials.add(copy.denials)
