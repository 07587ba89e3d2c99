"""Calico's selector language read literally: a list of tokens, then one function per rule of the grammar.

A token is made of the characters alone, except that a word after a label is an operator. Spaces and tabs may
stand between tokens, between the two words of an operator, and in the parentheses of ``has``, ``all``, ``global``.
"""

import string
from collections.abc import Callable, Mapping
from typing import TypeAlias

Predicate: TypeAlias = Callable[[Mapping[str, str]], bool]
Token: TypeAlias = tuple[str, str]

_LABEL = frozenset(string.ascii_letters + string.digits + "_./-")
_SIGNS = ("==", "!=", "&&", "||", "(", ")", "{", "}", ",", "!")
_OPERATORS = (("contains",), ("starts", "with"), ("ends", "with"), ("not", "in"), ("in",))


class NoSelector(Exception):
    """The text is none."""


def read(text: str) -> Predicate:
    """Return the meaning of a selector.

    Raises:
        NoSelector: the text is none.
    """
    tokens = [*_tokens(text), ("end", "")]
    if len(tokens) == 1:
        return lambda labels: True
    found = _Grammar(tokens)
    meaning = found.either()
    found.take("end")
    return meaning


def _tokens(text: str) -> list[Token]:
    tokens: list[Token] = []
    rest = text.lstrip(" \t")
    while rest:
        token, rest = _next(rest, after_label=bool(tokens) and tokens[-1][0] == "label")
        tokens.append(token)
        rest = rest.lstrip(" \t")
    return tokens


def _next(rest: str, *, after_label: bool) -> tuple[Token, str]:
    if rest[0] in "'\"":
        value, quote, rest_of = rest[1:].partition(rest[0])
        if not quote:
            raise NoSelector(rest)
        return ("string", value), rest_of
    for sign in _SIGNS:
        if rest.startswith(sign):
            return (sign, ""), rest[len(sign) :]
    if after_label:
        for words in _OPERATORS:
            left: str | None = rest
            for word in words:
                left = (
                    left.lstrip(" \t").removeprefix(word) if left and left.lstrip(" \t").startswith(word) else None
                )
            if left is not None:
                return (" ".join(words), ""), left
        raise NoSelector(rest)
    for word in ("has", "all", "global"):
        if rest.startswith(f"{word}("):
            label, inside = _word(rest[len(word) + 1 :].lstrip(" \t"))
            inside = inside.lstrip(" \t")
            if not inside.startswith(")") or bool(label) is not (word == "has"):
                raise NoSelector(rest)
            return (word, label), inside[1:]
    label, left_over = _word(rest)
    if not label:
        raise NoSelector(rest)
    return ("label", label), left_over


def _word(text: str) -> tuple[str, str]:
    end = next((at for at, char in enumerate(text) if char not in _LABEL), len(text))
    return text[:end], text[end:]


class _Grammar:
    def __init__(self, tokens: list[Token]) -> None:
        self._tokens = tokens

    def take(self, kind: str) -> str:
        if self._tokens[0][0] != kind:
            raise NoSelector(self._tokens)
        return self._tokens.pop(0)[1]

    def has(self, kind: str) -> bool:
        if self._tokens[0][0] != kind:
            return False
        self._tokens.pop(0)
        return True

    def either(self) -> Predicate:
        terms = [self.both()]
        while self.has("||"):
            terms.append(self.both())
        return lambda labels: any(term(labels) for term in terms)

    def both(self) -> Predicate:
        terms = [self.term()]
        while self.has("&&"):
            terms.append(self.term())
        return lambda labels: all(term(labels) for term in terms)

    def term(self) -> Predicate:
        negated = False
        while self.has("!"):
            negated = not negated
        meaning = self.positive()
        return (lambda labels: not meaning(labels)) if negated else meaning

    def positive(self) -> Predicate:
        if self.has("("):
            inside = self.either()
            self.take(")")
            return inside
        kind, label = self._tokens.pop(0)
        if kind in ("all", "global"):
            return lambda labels: True
        if kind == "has":
            return lambda labels: label in labels
        if kind != "label":
            raise NoSelector(kind)
        operator = self._tokens.pop(0)[0]
        if operator in ("in", "not in"):
            values = self.values()
            return lambda labels: (labels.get(label) in values) is (operator == "in")
        compare = {
            "==": lambda found, value: found == value,
            "!=": lambda found, value: found != value,
            "contains": lambda found, value: found is not None and value in found,
            "starts with": lambda found, value: found is not None and found.startswith(value),
            "ends with": lambda found, value: found is not None and found.endswith(value),
        }.get(operator)
        if compare is None:
            raise NoSelector(operator)
        wanted = self.take("string")
        return lambda labels: compare(labels.get(label), wanted)

    def values(self) -> set[str]:
        self.take("{")
        found: set[str] = set()
        while self._tokens[0][0] == "string":
            found.add(self.take("string"))
            if not self.has(","):
                break
        self.take("}")
        return found
