"""Parses command-line values for ``argparse``, with error messages in plain words instead of Python's."""

import argparse
import math
from collections.abc import Mapping
from typing import Any, Final

#: The longest duration, a hundred years. Clocks, certificates and timers can add it to the current time without
#: overflow.
_LONGEST_S: Final = 100 * 365 * 86400.0

#: The names of a flag separated by spaces, its metavar, its help, and further options of ``add_argument``. An
#: empty metavar makes the flag a switch; with None, ``argparse`` chooses one.
Flag = tuple[str, str | None, str | None] | tuple[str, str | None, str | None, Mapping[str, Any]]


def add_flags(parser: argparse._ActionsContainer, *flags: Flag) -> None:
    """Add flags to a parser, or to a group in a parser."""
    for names, metavar, text, *rest in flags:
        options: dict[str, Any] = {"action": "store_true"} if metavar == "" else {"metavar": metavar}
        for more in rest:
            options |= more
        parser.add_argument(*names.split(), help=text, **options)


def seconds(text: str) -> float:
    """Parse seconds that are not negative.

    Raises:
        argparse.ArgumentTypeError: the text is not a number of seconds.
    """
    value = _number(text)
    if not 0 <= value <= _LONGEST_S:
        raise argparse.ArgumentTypeError(f"must be a number of seconds, at most a hundred years: {text!r}")
    return value


def some_seconds(text: str) -> float:
    """Parse positive seconds.

    Raises:
        argparse.ArgumentTypeError: the text is not a positive number of seconds.
    """
    value = seconds(text)
    if not value:
        raise argparse.ArgumentTypeError(f"must be more than 0 seconds: {text!r}")
    return value


def port(text: str) -> int:
    """Parse a port, 1 to 65535.

    Raises:
        argparse.ArgumentTypeError: the text is not a port.
    """
    value = whole_number(text)
    if not 1 <= value <= 65535:
        raise argparse.ArgumentTypeError(f"must be a port, 1 to 65535: {text!r}")
    return value


def port_or_any(text: str) -> int:
    """Parse a port, or 0 to let the kernel choose one.

    Raises:
        argparse.ArgumentTypeError: the text is not a port.
    """
    return 0 if text == "0" else port(text)


def whole_number(text: str) -> int:
    """Parse a whole number that is not negative.

    Raises:
        argparse.ArgumentTypeError: the text is not such a number, or has too many digits.
    """
    if not (text.isascii() and text.isdigit() and len(text) <= 18):
        raise argparse.ArgumentTypeError(f"must be a whole number, not negative: {text!r}")
    return int(text)


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return math.nan
