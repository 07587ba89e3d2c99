"""String matchers (``envoy.type.matcher.v3.StringMatcher``, and the equal type of xds)."""

from dataclasses import dataclass, field

from xds.model import re2

_LOWER = {ord("A") + place: ord("a") + place for place in range(26)}


def ascii_lower(text: str) -> str:
    """Return ``text`` with A to Z in lower case; Envoy ignores the case of these letters only."""
    return text.lower() if text.isascii() else text.translate(_LOWER)


@dataclass(frozen=True, slots=True)
class StringMatch:
    """One condition on a string.

    Attributes:
        kind: ``exact``, ``prefix``, ``suffix``, ``contains`` or ``regex`` (full match, as RE2's FullMatch).
        value: the text to compare with. With ``ignore_case``, it is already lower case (:func:`ascii_lower`).
    """

    kind: str
    value: str
    ignore_case: bool = False
    _regex: re2.Pattern | None = field(default=None, compare=False, repr=False)

    def __post_init__(self) -> None:
        if self.kind == "regex":
            object.__setattr__(self, "_regex", re2.compiled(self.value))

    def matches(self, text: str) -> bool:
        """Return whether ``text`` satisfies the predicate."""
        if self.kind == "regex":
            assert self._regex is not None
            return self._regex.fullmatch(text)
        if self.ignore_case:
            text = ascii_lower(text)
        if self.kind == "exact":
            return text == self.value
        if self.kind == "prefix":
            return text.startswith(self.value)
        if self.kind == "suffix":
            return text.endswith(self.value)
        return self.value in text
