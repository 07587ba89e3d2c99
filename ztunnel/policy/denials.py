"""The connections that policies denied or ended, by pair of those concerned: the last ones, counted. Pure."""

from collections.abc import Iterable, Iterator
from typing import Final, Generic, NamedTuple, TypeVar

#: Pairs that are kept. A stranger can make pairs, by ports for example: the one that was denied longest ago goes.
MOST_PAIRS: Final = 500

PairT = TypeVar("PairT")


class Denial(NamedTuple, Generic[PairT]):
    """How often a pair was denied.

    Attributes:
        pair: a front end's own words for who was denied what; hashable.
        times: connections.
        last_s: the last one's time, in seconds of the wall clock.
        address: the last one's source.
    """

    pair: PairT
    times: int
    last_s: float
    address: str


class Denials(Generic[PairT]):
    """Counts by pair, at most :data:`MOST_PAIRS`; iterates from the newest to the oldest."""

    def __init__(self) -> None:
        self._by_pair: dict[PairT, Denial[PairT]] = {}

    def __len__(self) -> int:
        return len(self._by_pair)

    def __iter__(self) -> Iterator[Denial[PairT]]:
        return reversed(list(self._by_pair.values()))

    def note(self, pair: PairT, address: str, now_s: float) -> None:
        """Count a connection."""
        known = self._by_pair.pop(pair, None)
        self._by_pair[pair] = Denial(pair, known.times + 1 if known else 1, now_s, address)
        if len(self._by_pair) > MOST_PAIRS:
            del self._by_pair[next(iter(self._by_pair))]

    def add(self, others: Iterable[Denial[PairT]]) -> None:
        """Add those of another process."""
        found = dict(self._by_pair)
        for other in others:
            known = found.get(other.pair)
            if known is not None:
                newer = max(known, other, key=lambda denial: denial.last_s)
                other = newer._replace(times=known.times + other.times)
            found[other.pair] = other
        newest = sorted(found.values(), key=lambda denial: denial.last_s)[-MOST_PAIRS:]
        self._by_pair = {denial.pair: denial for denial in newest}
