"""Calico's selector language: parses, prints canonically, identifies and evaluates expressions over labels.

``app == 'db' && has(owner)`` selects the objects with these labels. The same language selects endpoints,
namespaces and service accounts. Spaces and tabs separate tokens. Strings have no escapes. ``&&`` binds tighter
than ``||``.
"""

import base64
import hashlib
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Final, TypeAlias, assert_never

from xds.errors import XdsError

#: The nesting limit of parentheses, so that hostile texts do not reach Python's recursion limit. People nest at
#: most three levels.
MAX_DEPTH: Final = 64

Labels: TypeAlias = Mapping[str, str]


class SelectorError(XdsError):
    """A text is not a selector.

    Attributes:
        selector: the text.
        at: the index of the first character that cannot be parsed.
    """

    def __init__(self, selector: str, at: int, expected: str) -> None:
        super().__init__(selector, at, expected)
        self.selector = selector
        self.at = at
        self.expected = expected

    def __str__(self) -> str:
        return f"selector {self.selector!r}, character {self.at + 1}: expected {self.expected}"


@dataclass(frozen=True, slots=True)
class All:
    """Selects every object."""


@dataclass(frozen=True, slots=True)
class Global:
    """``global()``: selects the objects that have no namespace. Labels do not show this, so an evaluation of
    labels returns true.
    """


@dataclass(frozen=True, slots=True)
class Has:
    """The label exists, with any value."""

    label: str


@dataclass(frozen=True, slots=True)
class Compare:
    """A comparison of a label's value with a string. ``operator`` is spelled as in the canonical text.

    A missing label differs from every string (``!=``). Every other comparison with a missing label is false.
    """

    label: str
    operator: str
    value: str


@dataclass(frozen=True, slots=True)
class In:
    """The label exists and its value is in the list. With ``negated``, the opposite is true."""

    label: str
    values: tuple[str, ...]
    negated: bool


@dataclass(frozen=True, slots=True)
class Not:
    """True if the operand is false. The operand is never itself a negation."""

    operand: "Node"


@dataclass(frozen=True, slots=True)
class And:
    """True if all operands are true. There are at least two."""

    operands: tuple["Node", ...]


@dataclass(frozen=True, slots=True)
class Or:
    """True if at least one operand is true. There are at least two operands."""

    operands: tuple["Node", ...]


Node: TypeAlias = All | Global | Has | Compare | In | Not | And | Or

_COMPARISONS: Final[Mapping[str, Callable[[str | None, str], bool]]] = {
    "==": lambda found, value: found == value,
    "!=": lambda found, value: found != value,
    "contains": lambda found, value: found is not None and value in found,
    "starts with": lambda found, value: found is not None and found.startswith(value),
    "ends with": lambda found, value: found is not None and found.endswith(value),
}


@dataclass(frozen=True, slots=True)
class Selector:
    """A parsed selector. Selectors are equal if their canonical texts are equal."""

    root: Node

    def matches(self, labels: Labels) -> bool:
        return _matches(self.root, labels)

    def __str__(self) -> str:
        """Return the canonical text, which parses to an equal selector."""
        return _text(self.root)

    @property
    def identity(self) -> str:
        """The id of the IP set with the objects that this selector selects. Like in Calico, it is computed from
        the canonical text.
        """
        return hashed_id("s:", str(self))

    def prefixed(self, prefix: str) -> "Selector":
        """Return the selector with a prefix before every label name, such as ``pcns.`` for labels of
        namespaces.
        """
        return Selector(_prefixed(self.root, prefix))


def hashed_id(kind: str, text: str) -> str:
    """Return Calico's id of a text: ``kind`` and the unpadded URL-safe base64 of SHA-224 over both."""
    digest = hashlib.sha224((kind + text).encode()).digest()
    return kind + base64.urlsafe_b64encode(digest).rstrip(b"=").decode()


@lru_cache(maxsize=4096)  # a few texts recur in thousands of rules
def parse_selector(text: str) -> Selector:
    """Parse a selector. An empty text selects all, like ``all()``.

    Raises:
        SelectorError: the text is not a selector, or has more than :data:`MAX_DEPTH` parentheses inside one
            another.
    """
    if not text.strip(" \t"):
        return Selector(All())
    return Selector(_Parser(text).whole())


_SPACE = re.compile(r"[ \t]*")
_LABEL = re.compile(r"[A-Za-z0-9_./-]+")
_HAS = re.compile(r"has\([ \t]*([A-Za-z0-9_./-]+)[ \t]*\)")
_WORD = re.compile(r"(all|global)\([ \t]*\)")
_STRING = re.compile(r'"([^"]*)"|\'([^\']*)\'')
# A word operator must be followed by a character that labels cannot have: "a inside" is not a comparison with
# "in".
_OPERATOR = re.compile(
    r"(==|!=)|(?:(contains)|(starts[ \t]*with)|(ends[ \t]*with)|(not[ \t]*in)|(in))(?![A-Za-z0-9_./-])"
)
_OPERATORS: Final = ("", "", "contains", "starts with", "ends with", "not in", "in")


class _Parser:
    """A recursive descent parser, with one method per grammar rule. Each method moves ``at`` behind the text that
    it has read.
    """

    def __init__(self, text: str) -> None:
        self.text = text
        self.at = 0
        self.depth = 0

    def whole(self) -> Node:
        node = self.either()
        if self.at < len(self.text):
            raise self.error("&&, || or the end")
        return node

    def either(self) -> Node:
        operands = [self.both()]
        while self.skip("||"):
            operands.append(self.both())
        return operands[0] if len(operands) == 1 else Or(tuple(operands))

    def both(self) -> Node:
        operands = [self.term()]
        while self.skip("&&"):
            operands.append(self.term())
        return operands[0] if len(operands) == 1 else And(tuple(operands))

    def term(self) -> Node:
        negated = False
        while self.skip("!"):
            negated = not negated
        if self.skip("("):
            node = self.group()
        elif found := _WORD.match(self.text, self.at):
            self.at = found.end()
            node = All() if found[1] == "all" else Global()
        elif found := _HAS.match(self.text, self.at):
            self.at = found.end()
            node = Has(found[1])
        else:
            node = self.comparison()
        self.space()
        if not negated:
            return node
        return node.operand if isinstance(node, Not) else Not(node)

    def group(self) -> Node:
        self.depth += 1
        if self.depth > MAX_DEPTH:
            raise self.error(f"at most {MAX_DEPTH} parentheses inside one another")
        node = self.either()
        if not self.skip(")"):
            raise self.error(")")
        self.depth -= 1
        return node

    def comparison(self) -> Node:
        label = _LABEL.match(self.text, self.at)
        if label is None:
            raise self.error("a label, has(...), all(), global(), ! or (")
        self.at = label.end()
        self.space()
        found = _OPERATOR.match(self.text, self.at)
        if found is None:
            raise self.error("==, !=, in, not in, contains, starts with or ends with")
        self.at = found.end()
        operator = found[1] or _OPERATORS[found.lastindex or 0]
        if operator in ("in", "not in"):
            return In(label[0], self.strings(), operator == "not in")
        return Compare(label[0], operator, self.string())

    def strings(self) -> tuple[str, ...]:
        if not self.skip("{"):
            raise self.error("{")
        values: set[str] = set()
        more = True
        while not self.skip("}"):
            if not more:
                raise self.error(", or }")
            values.add(self.string())
            more = self.skip(",")
        return tuple(sorted(values))

    def string(self) -> str:
        self.space()
        found = _STRING.match(self.text, self.at)
        if found is None:
            raise self.error("a string in quotes")
        self.at = found.end()
        return found[1] if found[1] is not None else found[2]

    def skip(self, token: str) -> bool:
        """If ``token`` comes next, skip it with the space around it, and return true."""
        self.space()
        if not self.text.startswith(token, self.at):
            return False
        self.at += len(token)
        self.space()
        return True

    def space(self) -> None:
        found = _SPACE.match(self.text, self.at)
        self.at = found.end() if found is not None else self.at

    def error(self, expected: str) -> SelectorError:
        return SelectorError(self.text, self.at, expected)


def _matches(node: Node, labels: Labels) -> bool:
    match node:
        case All() | Global():
            return True
        case Has():
            return node.label in labels
        case Compare():
            return _COMPARISONS[node.operator](labels.get(node.label), node.value)
        case In():
            return (labels.get(node.label) in node.values) is not node.negated
        case Not():
            return not _matches(node.operand, labels)
        case And():
            return all(_matches(operand, labels) for operand in node.operands)
        case Or():
            return any(_matches(operand, labels) for operand in node.operands)
        case _:
            assert_never(node)


def _text(node: Node) -> str:
    match node:
        case All():
            return "all()"
        case Global():
            return "global()"
        case Has():
            return f"has({node.label})"
        case Compare():
            return f"{node.label} {node.operator} {_quoted(node.value)}"
        case In():
            return f"{node.label} {'not in' if node.negated else 'in'} {{{', '.join(map(_quoted, node.values))}}}"
        case Not():
            return f"!{_text(node.operand)}"
        case And():
            return f"({' && '.join(map(_text, node.operands))})"
        case Or():
            return f"({' || '.join(map(_text, node.operands))})"
        case _:
            assert_never(node)


def _quoted(value: str) -> str:
    return f"'{value}'" if '"' in value else f'"{value}"'


def _prefixed(node: Node, prefix: str) -> Node:
    match node:
        case All() | Global():
            return node
        case Has():
            return Has(prefix + node.label)
        case Compare():
            return Compare(prefix + node.label, node.operator, node.value)
        case In():
            return In(prefix + node.label, node.values, node.negated)
        case Not():
            return Not(_prefixed(node.operand, prefix))
        case And():
            return And(tuple(_prefixed(operand, prefix) for operand in node.operands))
        case Or():
            return Or(tuple(_prefixed(operand, prefix) for operand in node.operands))
        case _:
            assert_never(node)
