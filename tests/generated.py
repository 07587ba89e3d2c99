"""The amount of work that tests do in each run, and with ``EXAMPLES=all``, which ``make nightly`` sets.

Property tests generate a tenth of their examples, tests of large numbers use smaller ones, some variants of
expensive tests are left out, and forked commands end without clearing their modules (``tests/commands.py``).
"""

import os
from typing import TypeVar

T = TypeVar("T")


def every_example() -> bool:
    """Return whether this is a nightly run."""
    return os.environ.get("EXAMPLES") == "all"


def examples(number: int) -> int:
    """Return how many of a test's ``number`` of examples this run generates."""
    return number if every_example() else max(10, number // 10)


def at_night(value: T, otherwise: T) -> T:
    """Return the value of a nightly run, or of other runs."""
    return value if every_example() else otherwise
