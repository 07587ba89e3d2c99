"""Long answers in parts."""

import itertools

from hypothesis import given
from hypothesis import strategies as st

from ztunnel.runtime.parts import split


@given(
    st.lists(st.integers(min_value=0, max_value=30)),
    st.integers(min_value=1, max_value=5),
    st.integers(min_value=0, max_value=20),
)
def test_parts_are_within_both_limits_and_as_few_as_possible(sizes: list[int], items: int, most: int) -> None:
    parts = list(split(sizes, lambda size: size, most_items=items, most_size=most))
    assert [size for part in parts for size in part] == sizes
    for part in parts:
        assert 0 < len(part) <= items
        assert sum(part) <= most or len(part) == 1
    for part, following in itertools.pairwise(parts):
        assert len(part) == items or sum(part) + following[0] > most
