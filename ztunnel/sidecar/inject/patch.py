"""Computes the difference of two JSON documents as a JSON patch (RFC 6902). Pure.

The patch turns the first document into the second. It changes no other parts, because the API server applies it to
a pod that other webhooks can change before or after.
"""

from collections.abc import Iterator, Mapping
from typing import Any, TypeAlias

Operation: TypeAlias = dict[str, Any]


def diff(before: Any, after: Any, path: str = "") -> list[Operation]:
    """Return the operations that turn one JSON value into another. Empty if they are equal."""
    return list(_diff(before, after, path))


def pointer(*parts: str | int) -> str:
    """Return a JSON pointer made from its parts. ``~`` is written ``~0``, and ``/`` is written ``~1`` (RFC 6901,
    3).
    """
    return "".join(f"/{str(part).replace('~', '~0').replace('/', '~1')}" for part in parts)


def _diff(before: Any, after: Any, path: str) -> Iterator[Operation]:
    if isinstance(before, Mapping) and isinstance(after, Mapping):
        for key in before:
            if key not in after:
                yield {"op": "remove", "path": path + pointer(key)}
        for key, value in after.items():
            if key not in before:
                yield {"op": "add", "path": path + pointer(key), "value": value}
            else:
                yield from _diff(before[key], value, path + pointer(key))
    elif isinstance(before, list) and isinstance(after, list):
        yield from _diff_lists(before, after, path)
    elif not same(before, after):
        yield {"op": "replace", "path": path, "value": after}


def _diff_lists(before: list[Any], after: list[Any], path: str) -> Iterator[Operation]:
    """Change only the elements between the common start and the common end of both lists. So a container inserted
    before other containers becomes one ``add``, without replacing the later containers.
    """
    shorter = min(len(before), len(after))
    head = next((at for at in range(shorter) if not same(before[at], after[at])), shorter)
    tail = next((at for at in range(shorter - head) if not same(before[-1 - at], after[-1 - at])), shorter - head)
    old, new = before[head : len(before) - tail], after[head : len(after) - tail]
    if len(old) == len(new):
        for at, (was, becomes) in enumerate(zip(old, new, strict=True), head):
            yield from _diff(was, becomes, path + pointer(at))
        return
    # Elements are removed from the end, so that the indexes of later removals stay valid.
    for at in reversed(range(head, head + len(old))):
        yield {"op": "remove", "path": path + pointer(at)}
    for at, value in enumerate(new, head):
        yield {"op": "add", "path": path + pointer(at), "value": value}


def same(one: Any, other: Any) -> bool:
    """Return whether two JSON values are equal. For Python, True equals 1; in JSON they differ."""
    if isinstance(one, bool) or isinstance(other, bool):
        return one is other
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        return one.keys() == other.keys() and all(same(value, other[key]) for key, value in one.items())
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(same, one, other))
    return bool(one == other)
