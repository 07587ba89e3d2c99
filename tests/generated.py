"""How many examples property tests generate: a quarter in each run, all of them with ``EXAMPLES=all``.

``make nightly`` sets that.
"""

import os


def every_example() -> bool:
    """Return whether this is a nightly run."""
    return os.environ.get("EXAMPLES") == "all"


def examples(number: int) -> int:
    """Return how many of a test's ``number`` of examples this run generates."""
    return number if every_example() else max(20, number // 4)
