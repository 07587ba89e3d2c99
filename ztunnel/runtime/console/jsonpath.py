"""Evaluates the commonly used part of kubectl's JSONPath templates. Pure.

A template is text with expressions in braces: ``{.items[*].name}``, ``{.items[0]['last-seen']}``, ``{..name}``,
``{.items[?(@.state=="Up")].pod}``, ``{range .items[*]}{.name}{"\\n"}{end}``. A missing key yields no value, as
with kubectl's ``--allow-missing-template-keys``, which is its default.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

_TOKEN: Final = re.compile(
    r"""(?P<deep>\.\.)(?P<deep_name>[\w-]+|\*)"""
    r"""|\.(?P<name>[\w/-]+|\*)"""
    r"""|\[\s*'(?P<quoted>[^']*)'\s*\]"""
    r"""|\[\s*(?P<index>-?\d{1,9}|\*)\s*\]"""
    r"""|\[\s*(?P<from>-?\d{0,9}):(?P<to>-?\d{0,9})\s*\]"""
    r"""|\[\?\(\s*@(?P<left>[^=!<>]*?)\s*(?:(?P<op>==|!=|<=|>=|<|>)\s*(?P<right>"[^"]*"|'[^']*'|[^\s)]+)\s*)?\)\]"""
)
_PARTS: Final = re.compile(r"\{((?:\"(?:[^\"\\]|\\.)*\"|[^{}\"])*)\}")


class BadTemplate(ValueError):
    """A template cannot be parsed; the text names the faulty part."""


@dataclass(slots=True)
class _Range:
    steps: Sequence[re.Match[str]]
    body: list[Any] = field(default_factory=list)


class Template:
    """A template, parsed once.

    Raises:
        BadTemplate: the template cannot be parsed.
    """

    def __init__(self, text: str) -> None:
        self._parts: list[Any] = []
        levels = [self._parts]
        end = 0
        for found in _PARTS.finditer(text):
            if found.start() > end:
                levels[-1].append(text[end : found.start()])
            end = found.end()
            inner = found[1].strip()
            if inner.startswith('"'):
                levels[-1].append(_literal(inner))
            elif inner.startswith("range "):
                entry = _Range(path(inner.removeprefix("range ").strip()))
                levels[-1].append(entry)
                levels.append(entry.body)
            elif inner == "end":
                if len(levels) == 1:
                    raise BadTemplate("{end} without {range}")
                levels.pop()
            else:
                levels[-1].append(path(inner))
        if len(levels) > 1:
            raise BadTemplate("{range} without {end}")
        rest = text[end:]
        if "{" in rest or "}" in rest:
            raise BadTemplate(f"a brace is not closed or not opened: {rest!r}")
        if rest:
            self._parts.append(rest)

    def render(self, value: object) -> str:
        """Return the template's text, filled with values from a JSON value."""
        return "".join(_rendered(self._parts, value))


def _rendered(parts: Sequence[Any], value: object) -> Iterator[str]:
    for part in parts:
        if isinstance(part, str):
            yield part
        elif isinstance(part, _Range):
            for each in select(part.steps, value):
                yield from _rendered(part.body, each)
        else:
            yield " ".join(map(shown, select(part, value)))


def _literal(text: str) -> str:
    try:
        return str(json.loads(text))
    except ValueError:
        raise BadTemplate(f"no quoted text: {text}") from None


def path(text: str) -> tuple[re.Match[str], ...]:
    """Return the steps of an expression such as ``.items[*].name``; ``$`` and ``@`` mean the value itself.

    Raises:
        BadTemplate: the text is not an expression.
    """
    rest = text.removeprefix("$").removeprefix("@")
    if rest and rest[0] not in ".[":
        rest = f".{rest}"
    steps: list[re.Match[str]] = []
    place = 0
    while place < len(rest):
        if rest[place:] == ".":
            break
        found = _TOKEN.match(rest, place)
        if found is None:
            raise BadTemplate(f"{text!r}: not understood from {rest[place:]!r}")
        steps.append(found)
        place = found.end()
    return tuple(steps)


def select(steps: Sequence[re.Match[str]], value: object) -> list[Any]:
    """Return the values that an expression selects from a JSON value."""
    found: list[Any] = [value]
    for step in steps:
        found = [each for one in found for each in _step(step, one)]
    return found


def _step(step: re.Match[str], value: Any) -> Iterator[Any]:
    if (name := step["name"] or step["quoted"]) is not None:
        if name == "*":
            yield from _children(value)
        elif isinstance(value, Mapping) and name in value:
            yield value[name]
    elif step["deep"]:
        yield from _deep(step["deep_name"], value)
    elif (index := step["index"]) is not None:
        if index == "*":
            yield from _children(value)
        elif isinstance(value, list) and -len(value) <= int(index) < len(value):
            yield value[int(index)]
    elif step["left"] is not None:
        yield from (each for each in _children(value) if _holds(step, each))
    elif isinstance(value, list):
        yield from value[int(step["from"] or 0) : int(step["to"]) if step["to"] else None]


def _children(value: Any) -> list[Any]:
    if isinstance(value, Mapping):
        return list(value.values())
    return value if isinstance(value, list) else []


def _deep(name: str, value: Any) -> Iterator[Any]:
    if isinstance(value, Mapping):
        for key, inner in value.items():
            if name in (key, "*"):
                yield inner
            yield from _deep(name, inner)
    elif isinstance(value, list):
        for inner in value:
            yield from _deep(name, inner)


def _holds(step: re.Match[str], value: Any) -> bool:
    found = select(path(step["left"]), value)
    if step["op"] is None:
        return bool(found)
    text = step["right"]
    right: Any = text[1:-1] if text[0] in "\"'" else _number(text)
    for left in found:
        try:
            if {
                "==": left == right,
                "!=": left != right,
                "<": step["op"] == "<" and left < right,
                "<=": step["op"] == "<=" and left <= right,
                ">": step["op"] == ">" and left > right,
                ">=": step["op"] == ">=" and left >= right,
            }[step["op"]]:
                return True
        except TypeError:
            continue  # a text and a number cannot be compared
    return False


def _number(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        raise BadTemplate(f"neither a number nor quoted text: {text}") from None


def shown(value: Any) -> str:
    """Return a value as kubectl prints it: text without quotes, other values as JSON."""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
