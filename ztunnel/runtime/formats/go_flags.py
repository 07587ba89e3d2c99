"""Parses a command line like ``pflag``, the parser of Go's cobra commands. Pure.

``--name=value``, ``--name value``, ``-n value``, ``-nvalue``, ``-n=value`` and switches joined as ``-abc``. A
switch takes a value only after ``=``. Any word can be a value, even if it begins with a dash. Words that are not
flags are permitted anywhere. If a flag is repeated, its last value counts.
"""

import argparse
import functools
from collections.abc import Mapping, Sequence
from typing import Any


class BadArguments(ValueError):
    """The command line is invalid; the text names the argument."""


def parse(
    arguments: Sequence[str], flags: Mapping[str, bool], shorthands: Mapping[str, str]
) -> tuple[list[tuple[str, str]], list[str]]:
    """Return the flags that are given, with their values, and the other words.

    Args:
        arguments: the command line after the name of the command.
        flags: whether each flag, by name, is a switch. A switch without a value is ``true``.
        shorthands: the names of flags by their single letters.

    Raises:
        BadArguments: a flag is unknown, or lacks its value.
    """
    given: list[tuple[str, str]] = []
    others: list[str] = []
    left = list(reversed(arguments))
    while left:
        word = left.pop()
        if word == "--":
            others += reversed(left)
            break
        if word.startswith("--"):
            name, equals, value = word[2:].partition("=")
            if not name or name.startswith("-"):
                raise BadArguments(f"bad flag syntax: {word}")
            if name not in flags:
                raise BadArguments(f"unknown flag: --{name}")
            if not equals:
                value = _value(flags[name], left, f"--{name}")
            given.append((name, value))
        elif word.startswith("-") and word != "-":
            given += _short(word, left, flags, shorthands)
        else:
            others.append(word)
    return given, others


def _short(
    word: str, left: list[str], flags: Mapping[str, bool], shorthands: Mapping[str, str]
) -> list[tuple[str, str]]:
    """Read ``-abc``: several switches. The last letter can be a flag with a value."""
    given = []
    letters = word[1:]
    while letters:
        letter, letters = letters[0], letters[1:]
        if letter not in shorthands:
            raise BadArguments(f"unknown shorthand flag: {letter!r} in {word}")
        name = shorthands[letter]
        if len(letters) > 1 and letters.startswith("="):
            value, letters = letters[1:], ""
        elif flags[name]:
            value = "true"
        elif letters:
            value, letters = letters, ""
        else:
            value = _value(False, left, f"{letter!r} in {word}")
        given.append((name, value))
    return given


def _value(switch: bool, left: list[str], shown: str) -> str:
    if switch:
        return "true"
    if not left:
        raise BadArguments(f"flag needs an argument: {shown}")
    return left.pop()


def read_as_go(parser: argparse.ArgumentParser) -> None:
    """Make a parser read its command line by these rules.

    Its options need a long name, and those with ``nargs="?"`` are switches. Words that are not flags are ignored.
    """
    read = parser.parse_known_args

    @functools.wraps(read)
    def known(args: Sequence[str] | None = None, namespace: Any = None) -> Any:
        flags: dict[str, bool] = {}
        shorthands: dict[str, str] = {}
        for action in parser._actions:
            names = [name[2:] for name in action.option_strings if name.startswith("--")]
            flags |= dict.fromkeys(names, action.nargs in ("?", 0))
            shorthands |= {name[1]: names[0] for name in action.option_strings if not name.startswith("--")}
        try:
            given, _ = parse(list(args or ()), flags, shorthands)
        except BadArguments as error:
            parser.error(str(error))
        return read([f"--{name}" if name == "help" else f"--{name}={value}" for name, value in given], namespace)

    parser.parse_known_args = known  # type: ignore[assignment,method-assign]  # the sub-commands' parsers have one class
