"""Regular expressions in RE2's syntax, matched by RE2 itself, like in Envoy.

RE2's time is linear in the length of the text. Python's ``re`` can take seconds for 26 characters, during which
the event loop stops. Its syntax also differs: to Python, ``[[:alpha:]]`` is a set of six characters and a bracket,
and ``\\w`` and ``\\d`` match letters and digits of any script.

The package ``google-re2`` is imported with the first expression (3 MiB, 5 ms): most configurations have none.
"""

from functools import lru_cache


class Re2Error(ValueError):
    """RE2 refuses the expression. The error text is RE2's, like in Envoy."""


class Pattern:
    """A compiled expression.

    Raises:
        Re2Error: the expression is invalid, or needs more memory than RE2's limit of 8 MiB.
    """

    __slots__ = ("_regexp",)

    def __init__(self, expression: str) -> None:
        import re2

        options = re2.Options()
        options.log_errors = False
        options.never_capture = True  # only whether a text matches is of interest; finding groups would be slower
        try:
            self._regexp = re2.compile(_utf8(expression), options)
        except re2.error as error:
            reason = error.args[0]
            raise Re2Error(reason.decode("utf-8", "replace") if isinstance(reason, bytes) else reason) from None

    def fullmatch(self, text: str) -> bool:
        """Return whether the expression matches the whole text."""
        return self._regexp.fullmatch(_utf8(text)) is not None

    def search(self, text: str) -> bool:
        """Return whether the expression matches a part of the text."""
        return self._regexp.search(_utf8(text)) is not None


@lru_cache(maxsize=4096)
def compiled(expression: str) -> Pattern:
    """Return the compiled pattern of an expression. Cached, because expressions recur in configurations.

    Raises:
        Re2Error: see :class:`Pattern`.
    """
    return Pattern(expression)


def _utf8(text: str) -> bytes:
    """Encode a text as UTF-8. Surrogates are encoded, too, and RE2 reads them as characters."""
    return text.encode("utf-8", "surrogatepass")
