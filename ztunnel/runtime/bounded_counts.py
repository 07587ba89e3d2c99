"""Counts events by labels that come and go with workloads and policies. The least recently used labels are
dropped. Pure.
"""

from collections.abc import Hashable
from typing import Final, TypeVar

LabelsT = TypeVar("LabelsT", bound=Hashable)

#: The number of label sets counted at a time in one family of metrics.
MOST_COUNTS: Final = 2_000


class BoundedCounts(dict[LabelsT, int]):
    """Counts by labels, in the order of their last use, at most :data:`MOST_COUNTS`."""

    def count(self, labels: LabelsT, by: int = 1) -> None:
        number = self.pop(labels, 0) + by
        if len(self) >= MOST_COUNTS:
            del self[next(iter(self))]
        self[labels] = number
