"""How much tests do in each run, and how much with ``EXAMPLES=all``, which ``make nightly`` sets.

Property tests generate a quarter of their examples, and tests of large numbers use smaller ones.
"""

import os


def every_example() -> bool:
    """Return whether this is a nightly run."""
    return os.environ.get("EXAMPLES") == "all"


def examples(number: int) -> int:
    """Return how many of a test's ``number`` of examples this run generates."""
    return number if every_example() else max(20, number // 4)


def at_night(number: int, otherwise: int) -> int:
    """Return a nightly run's number, or the one of other runs."""
    return number if every_example() else otherwise
