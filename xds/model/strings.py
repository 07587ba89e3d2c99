"""String matchers (``envoy.type.matcher.v3.StringMatcher`` and its xds twin)."""

import re
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class StringMatch:
    """One predicate on a string; exactly one of the kinds below.

    Attributes:
        kind: ``exact``, ``prefix``, ``suffix``, ``contains`` or ``regex`` (full match, as RE2's FullMatch).
        value: what to compare with; already lower-cased when ``ignore_case``.
    """

    kind: str
    value: str
    ignore_case: bool = False
    _regex: "re.Pattern[str] | None" = field(default=None, compare=False, repr=False)

    def __post_init__(self) -> None:
        if self.kind == "regex":
            object.__setattr__(self, "_regex", re.compile(self.value))

    def matches(self, text: str) -> bool:
        """Whether ``text`` satisfies the predicate."""
        if self.kind == "regex":
            assert self._regex is not None
            return self._regex.fullmatch(text) is not None
        if self.ignore_case:
            text = text.lower()
        if self.kind == "exact":
            return text == self.value
        if self.kind == "prefix":
            return text.startswith(self.value)
        if self.kind == "suffix":
            return text.endswith(self.value)
        return self.value in text
