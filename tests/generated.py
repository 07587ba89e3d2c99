"""How many examples property tests generate: a quarter in each run, all of them with ``EXAMPLES=all``.

``make nightly`` sets that.
"""

import os

_ALL = os.environ.get("EXAMPLES") == "all"


def examples(number: int) -> int:
    """Return how many of a test's ``number`` of examples this run generates."""
    return number if _ALL else max(20, number // 4)
