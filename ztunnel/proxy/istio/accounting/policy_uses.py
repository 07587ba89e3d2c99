"""How often each authorization policy decided, and when last. Pure."""

from collections.abc import Iterable, Iterator
from enum import Enum
from typing import Final, NamedTuple

#: Policies that are counted. Those of a mesh come and go: the one that decided longest ago goes.
MOST_POLICIES: Final = 10_000
#: Counted under when ALLOW policies exist and none of them matched, which no policy decided.
NONE_MATCHED: Final = "-"


class Use(Enum):
    """What a decision did; the value is its label on the metrics page."""

    ALLOWED = "allowed"
    DENIED = "denied"
    ENDED = "ended"
    """A live connection was judged again after a change, and ended."""


class PolicyUse(NamedTuple):
    """The decisions of one policy.

    Attributes:
        policy: ``NAMESPACE/NAME``, or :data:`NONE_MATCHED`.
        allowed: new connections.
        denied: new connections.
        ended: live connections that it does not allow any more.
        last_s: the last decision's time, in seconds of the wall clock.
    """

    policy: str
    allowed: int
    denied: int
    ended: int
    last_s: float

    def number(self, use: Use) -> int:
        """Return one of the three counts."""
        return (self.allowed, self.denied, self.ended)[_PLACES[use]]


_PLACES: Final = {use: place for place, use in enumerate(Use)}


class PolicyUses:
    """Counts by policy, at most :data:`MOST_POLICIES`."""

    def __init__(self) -> None:
        self._by_policy: dict[str, tuple[list[int], float]] = {}

    def __len__(self) -> int:
        return len(self._by_policy)

    def __iter__(self) -> Iterator[PolicyUse]:
        for policy, ((allowed, denied, ended), last_s) in list(self._by_policy.items()):
            yield PolicyUse(policy, allowed, denied, ended, last_s)

    def note(self, policy: str, use: Use, now_s: float) -> None:
        """Count one decision."""
        counts, _ = self._by_policy.pop(policy, ([0] * len(Use), 0.0))
        counts[_PLACES[use]] += 1
        self._by_policy[policy] = counts, now_s
        if len(self._by_policy) > MOST_POLICIES:
            del self._by_policy[next(iter(self._by_policy))]

    def add(self, others: Iterable[PolicyUse]) -> None:
        """Add those of another process."""
        found = {use.policy: use for use in self}
        for other in others:
            known = found.get(other.policy)
            if known is not None:
                other = PolicyUse(
                    other.policy,
                    known.allowed + other.allowed,
                    known.denied + other.denied,
                    known.ended + other.ended,
                    max(known.last_s, other.last_s),
                )
            found[other.policy] = other
        newest = sorted(found.values(), key=lambda use: use.last_s)[-MOST_POLICIES:]
        self._by_policy = {use.policy: ([use.allowed, use.denied, use.ended], use.last_s) for use in newest}
