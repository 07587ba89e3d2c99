"""Formats plain values (JSON) as an indented outline for people. Pure."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any


def outline(value: object, indent: int = 0) -> Iterator[str]:
    """Yield a value's outline as lines: names with their values, indented. List items begin with a dash."""
    before = " " * indent
    if isinstance(value, Mapping):
        for key, inner in value.items():
            if _is_short(inner):
                yield f"{before}{_words(key)}: {_short(inner)}"
            else:
                yield f"{before}{_words(key)}:"
                yield from outline(inner, indent + 2)
    elif isinstance(value, Sequence) and not isinstance(value, str):
        for inner in value:
            first, *rest = outline(inner, indent + 2)
            yield f"{before}- {first[indent + 2 :]}"
            yield from rest
    else:
        yield before + _short(value)


def _is_short(value: object) -> bool:
    if isinstance(value, Mapping):
        return not value
    if isinstance(value, Sequence) and not isinstance(value, str):
        return all(isinstance(each, str) and " " not in each for each in value)
    return True


def _short(value: Any) -> str:
    if value is None or value in ("", [], {}):
        return "none"
    if isinstance(value, bool):
        return "yes" if value else "no"
    return ", ".join(value) if isinstance(value, list) else str(value)


def _words(key: str) -> str:
    return key.replace("_", " ")
