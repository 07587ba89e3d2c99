"""Finds a parser's sub-commands; ``argparse`` has no public API for this."""

from argparse import ArgumentParser
from collections.abc import Mapping


def subcommands(parser: ArgumentParser) -> Mapping[str, ArgumentParser]:
    """Return the parsers of a command's sub-commands by name, or an empty mapping without any."""
    return next((action.choices for action in parser._actions if isinstance(action.choices, dict)), {})
