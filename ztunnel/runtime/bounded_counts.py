"""Counts events by labels that come and go with workloads and policies, and drops the least recently used labels.
Pure.
"""

from collections.abc import Hashable
from typing import Final, TypeVar

LabelsT = TypeVar("LabelsT", bound=Hashable)

#: The most label sets that one family of metrics counts at the same time.
MOST_COUNTS: Final = 2_000


class BoundedCounts(dict[LabelsT, int]):
    """The count of each label set, in the order of last use, for at most :data:`MOST_COUNTS` sets."""

    def count(self, labels: LabelsT, by: int = 1) -> None:
        number = self.pop(labels, 0) + by
        if len(self) >= MOST_COUNTS:
            del self[next(iter(self))]
        self[labels] = number
