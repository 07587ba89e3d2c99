"""Translates regular expressions from RE2's syntax to Python's ``re``, with RE2's meaning.

The two share most of their syntax and differ silently in the rest: ``[[:alpha:]]`` is a set of six characters and
a bracket to Python, ``\\w`` and ``\\d`` match letters and digits of any script, and RE2 rejects ``(?>...)`` and
``a++``. A policy whose expression matches more than its author intended can admit an attacker. So each construct
is parsed here, and unknown constructs are refused. Only full matches are needed, and greediness has no effect on
these.
"""

import re
from functools import lru_cache
from typing import Final, NoReturn

_POSIX: Final = {
    "alnum": "0-9A-Za-z",
    "alpha": "A-Za-z",
    "ascii": "\\x00-\\x7f",
    "blank": "\\t ",
    "cntrl": "\\x00-\\x1f\\x7f",
    "digit": "0-9",
    "graph": "!-~",
    "lower": "a-z",
    "print": " -~",
    "punct": "!-/:-@\\[-`{-~",
    "space": "\\t\\n\\x0b\\f\\r ",
    "upper": "A-Z",
    "word": "0-9A-Za-z_",
    "xdigit": "0-9A-Fa-f",
}
_COMPLEMENTS: Final = {  # in a set, a negated class must be spelled out
    "alnum": "\\x00-/:-@\\[-`{-\U0010ffff",
    "alpha": "\\x00-@\\[-`{-\U0010ffff",
    "ascii": "\\x80-\U0010ffff",
    "blank": "\\x00-\\x08\\x0a-\\x1f!-\U0010ffff",
    "cntrl": " -~\\x80-\U0010ffff",
    "digit": "\\x00-/:-\U0010ffff",
    "graph": "\\x00- \\x7f-\U0010ffff",
    "lower": "\\x00-`{-\U0010ffff",
    "print": "\\x00-\\x1f\\x7f-\U0010ffff",
    "punct": "\\x00- 0-9A-Za-z\\x7f-\U0010ffff",
    "space": "\\x00-\\x08\\x0e-\\x1f!-\U0010ffff",
    "upper": "\\x00-@\\[-\U0010ffff",
    "word": "\\x00-/:-@\\[-^`{-\U0010ffff",
    "xdigit": "\\x00-/:-@G-`g-\U0010ffff",
}
_PERL_SPACE: Final = "\\t\\n\\f\\r "
_PERL_NO_SPACE: Final = "\\x00-\\x08\\x0b\\x0e-\\x1f!-\U0010ffff"
_PERL: Final = {
    "d": _POSIX["digit"],
    "D": _COMPLEMENTS["digit"],
    "s": _PERL_SPACE,
    "S": _PERL_NO_SPACE,
    "w": _POSIX["word"],
    "W": _COMPLEMENTS["word"],
}
_CONTROLS: Final = {"a": 7, "f": 12, "t": 9, "n": 10, "r": 13, "v": 11}
_ANCHORS: Final = {"A": r"\A", "z": r"\Z", "b": r"(?a:\b)", "B": r"(?a:\B)"}
_REPEAT: Final = re.compile(r"\{([0-9]{1,4})(,([0-9]{1,4})?)?\}", re.ASCII)
_GROUP: Final = re.compile(r"\?(?:P?<([A-Za-z0-9_]+)>|([imsU]*)(?:-([imsU]+))?([:)]))", re.ASCII)
_MOST_REPEATS: Final = 1000


class Re2Error(ValueError):
    """RE2 refuses the expression, or it has a construct that we do not support."""


@lru_cache(maxsize=4096)
def compiled(pattern: str) -> re.Pattern[str]:
    """Return a pattern whose ``fullmatch`` gives the same results as RE2's ``FullMatch``.

    Raises:
        Re2Error: it is not an RE2 expression, or has classes by Unicode property.
    """
    return re.compile(_Parser(pattern).expression())


class _Parser:
    def __init__(self, pattern: str) -> None:
        self._pattern = pattern
        self._at = 0

    def expression(self) -> str:
        text = self._alternatives(frozenset())
        if self._at < len(self._pattern):
            self._refuse("unexpected )")
        return text

    def _refuse(self, reason: str) -> NoReturn:
        raise Re2Error(f"{reason} at {self._pattern[self._at : self._at + 10]!r}")

    def _next(self, what: str) -> str:
        if self._at >= len(self._pattern):
            raise Re2Error(what)
        self._at += 1
        return self._pattern[self._at - 1]

    def _alternatives(self, flags: frozenset[str]) -> str:
        """Parse alternatives up to the end or an unmatched ``)``; flags set inside apply up to there."""
        parts: list[str] = []
        quantified = True  # a quantifier needs an operand before it
        while self._at < len(self._pattern) and self._pattern[self._at] != ")":
            char = self._pattern[self._at]
            repeat = self._repeat()
            if repeat:
                if quantified:
                    self._refuse("no argument for repetition operator")
                parts[-1] += repeat
                quantified = True
                continue
            quantified = False
            self._at += 1
            if char == "|":
                parts.append("|")
                quantified = True
            elif char == "(":
                group = _GROUP.match(self._pattern, self._at)
                if self._pattern.startswith("?", self._at) and group is None:
                    self._refuse("invalid perl operator")
                inner = flags
                if group is not None:
                    self._at = group.end()
                    inner = (flags | frozenset(group[2] or "")) - frozenset(group[3] or "")
                    if group[4] == ")":
                        if not (group[2] or group[3]):
                            self._refuse("missing argument to repetition operator")
                        flags, quantified = inner, True
                        continue
                parts.append(f"(?:{self._alternatives(inner)})")
                if self._next("missing )") != ")":
                    self._refuse("missing )")
            else:
                parts.append(self._atom(char, flags))
                quantified = not parts[-1]  # an empty literal
        return "".join(parts)

    def _repeat(self) -> str:
        """Parse a quantifier, if one follows."""
        text = self._pattern[self._at]
        if text == "{":
            found = _REPEAT.match(self._pattern, self._at)
            if found is None:
                return ""
            least = int(found[1])
            most = least if found[2] is None else int(found[3] or least)
            if most < least or most > _MOST_REPEATS:
                self._refuse("bad repetition operator")
            text = found[0]
        elif text not in ("*", "+", "?"):
            return ""
        self._at += len(text)
        if self._pattern.startswith("?", self._at):  # lazy
            self._at += 1
        return text

    def _atom(self, char: str, flags: frozenset[str]) -> str:
        match char:
            case ".":
                return "(?s:.)" if "s" in flags else "[^\\n]"
            case "^":
                return "(?m:^)" if "m" in flags else "(?:\\A)"
            case "$":
                return "(?m:$)" if "m" in flags else "(?:\\Z)"
            case "[":
                text = self._set()
            case "\\":
                text = self._escape()
                if text == "":
                    return self._quoted(flags)
            case _:
                text = re.escape(char)
        return f"(?i:{text})" if "i" in flags else f"(?:{text})"

    def _quoted(self, flags: frozenset[str]) -> str:
        end = self._pattern.find(r"\E", self._at)
        literal = self._pattern[self._at :] if end < 0 else self._pattern[self._at : end]
        self._at = len(self._pattern) if end < 0 else end + 2
        ignored = "i" if "i" in flags else ""
        return "".join(f"(?{ignored}:{re.escape(char)})" for char in literal)

    def _escape(self) -> str:
        r"""Parse an escape outside a set; ``\Q`` returns an empty text."""
        char = self._pattern[self._at : self._at + 1]
        if char == "Q":
            self._at += 1
            return ""
        if char in _ANCHORS and char:
            self._at += 1
            return _ANCHORS[char]
        if char in _PERL and char:
            self._at += 1
            return f"[{_PERL[char]}]"
        return re.escape(chr(self._code()))

    def _code(self) -> int:
        """Parse an escaped character."""
        char = self._next("trailing \\")
        if char in _CONTROLS:
            return _CONTROLS[char]
        if char == "x":
            digits = re.compile(r"\{([0-9A-Fa-f]{1,6})\}|([0-9A-Fa-f]{2})").match(self._pattern, self._at)
            if digits is None or int(digits[1] or digits[2], 16) > 0x10FFFF:
                self._refuse("invalid escape sequence")
            self._at = digits.end()
            return int(digits[1] or digits[2], 16)
        if char == "0":
            octal = re.compile("[0-7]{0,2}").match(self._pattern, self._at)
            assert octal is not None
            self._at = octal.end()
            return int("0" + octal[0], 8)
        if char in ("p", "P"):
            self._refuse("classes by Unicode property are not supported")
        if char == "_" or (char.isascii() and char.isalnum()) or ord(char) > 0x7F:
            self._at -= 2
            self._refuse("invalid escape sequence")
        return ord(char)

    def _set(self) -> str:
        negated = self._pattern.startswith("^", self._at)
        self._at += negated
        items: list[str] = []
        first = True
        while first or not self._pattern.startswith("]", self._at):
            first = False
            items.append(self._item())
        self._at += 1
        return f"[{'^' if negated else ''}{''.join(items)}]"

    def _item(self) -> str:
        if self._at >= len(self._pattern):
            raise Re2Error("missing ]")
        named = re.compile(r"\[:(\^?)([a-z]*):\]").match(self._pattern, self._at)
        if named is not None:
            table = _COMPLEMENTS if named[1] else _POSIX
            if named[2] not in table:
                self._refuse("invalid character class range")
            self._at = named.end()
            return table[named[2]]
        if self._pattern[self._at] == "\\" and (perl := _PERL.get(self._pattern[self._at + 1 : self._at + 2])):
            self._at += 2
            return perl
        low = self._member()
        rest = self._pattern[self._at : self._at + 2]
        if len(rest) < 2 or rest[0] != "-" or rest[1] == "]":
            return re.escape(chr(low))
        self._at += 1
        high = self._member()
        if high < low:
            self._refuse("invalid character class range")
        return f"{re.escape(chr(low))}-{re.escape(chr(high))}"

    def _member(self) -> int:
        char = self._next("missing ]")
        return self._code() if char == "\\" else ord(char)
