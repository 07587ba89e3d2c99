"""Splits long answers into parts that another process accepts. Pure."""

from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

_T = TypeVar("_T")


def split(
    items: Iterable[_T], size: Callable[[_T], int], *, most_items: int, most_size: int
) -> Iterator[tuple[_T, ...]]:
    """Split items into parts, in order. No part is empty.

    Args:
        items: the items, taken when a part is requested.
        size: returns the size of an item.
        most_items: the most items in one part.
        most_size: the largest sum of sizes in one part. A larger item is a part of its own.
    """
    part: list[_T] = []
    total = 0
    for item in items:
        own = size(item)
        if part and (len(part) >= most_items or total + own > most_size):
            yield tuple(part)
            part, total = [], 0
        part.append(item)
        total += own
    if part:
        yield tuple(part)
