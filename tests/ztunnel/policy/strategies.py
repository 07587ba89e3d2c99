"""Hypothesis strategies for random policies, shared by tests of the evaluator and of the kernel's table."""

from typing import Any

from hypothesis import strategies as st


def some(values: tuple[Any, ...], most: int = 2) -> st.SearchStrategy[tuple[Any, ...]]:
    """Draw at most ``most`` different values, half of the time none."""
    return st.one_of(st.just(()), st.lists(st.sampled_from(values), max_size=most, unique=True).map(tuple))


def mostly(default: Any, other: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    """Draw the default twice as often as from another strategy."""
    return st.one_of(st.just(default), st.just(default), other)
