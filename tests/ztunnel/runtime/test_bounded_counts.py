"""Counts by labels are bounded, and the least recently counted is dropped."""

import pytest

from ztunnel.runtime import bounded_counts
from ztunnel.runtime.bounded_counts import BoundedCounts


def test_the_count_that_was_used_longest_ago_goes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bounded_counts, "MOST_COUNTS", 3)
    counts = BoundedCounts[str]()
    for labels in ("a", "b", "c", "a", "d"):
        counts.count(labels)
    assert counts == {"c": 1, "a": 2, "d": 1}
    counts.count("c", 5)
    assert list(counts.items()) == [("a", 2), ("d", 1), ("c", 6)]
