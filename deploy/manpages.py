"""Writes a manual page for the program and one for each command: ``python -m deploy.manpages FOLDER``.

The text is generated from the argument parsers, like ``--help``, so that no page differs from its command.
"""

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path

from ztunnel import __version__
from ztunnel.cli import GROUPS, _parser
from ztunnel.runtime.console.subcommands import subcommands

_STATUS = "0 fine; 1 the answer is bad, or the change failed; 2 no answer, or a wrong command line."


def pages() -> dict[str, str]:
    """Return the text of each page by the name of its file."""
    parser = _parser(["help"])
    found = {"ztunnel.1": _program(parser)}
    for name, command in subcommands(parser).items():
        found[f"ztunnel-{name}.1"] = _command(f"ztunnel-{name}", command)
    return found


def _program(parser: argparse.ArgumentParser) -> str:
    explained = {
        each.dest: each.help or ""
        for action in parser._actions
        if isinstance(action, argparse._SubParsersAction)
        for each in action._choices_actions
    }
    lines = [*_head("ztunnel", str(parser.description)), ".SH SYNOPSIS", ".B ztunnel", r"\fICOMMAND\fR ..."]
    for title, names in GROUPS.items():
        lines.append(f".SH {title.upper()}")
        for name in names:
            lines += [".TP", rf".BR ztunnel\-{_text(name)} (1)", _text(explained.get(name, ""))]
    return _joined([*lines, ".SH EXIT STATUS", _text(_STATUS)])


def _command(name: str, parser: argparse.ArgumentParser) -> str:
    usage = " ".join(parser.format_usage().removeprefix("usage: ").split())
    lines = [*_head(name, parser.description or ""), ".SH SYNOPSIS", _text(usage)]
    lines += [".SH DESCRIPTION", _text(parser.description or "")]
    for group in parser._action_groups:
        shown = [action for action in group._group_actions if action.help is not argparse.SUPPRESS]
        if shown:
            lines.append(f".SH {_text(group.title or 'options').upper()}")
            lines += [line for action in shown for line in _action(action, parser)]
    return _joined([*lines, ".SH EXIT STATUS", _text(_STATUS), ".SH SEE ALSO", ".BR ztunnel (1)"])


def _action(action: argparse.Action, parser: argparse.ArgumentParser) -> Iterator[str]:
    if isinstance(action, argparse._SubParsersAction):
        for each in action._choices_actions:
            yield from (".TP", rf"\fB{_text(each.dest)}\fR", _text(each.help or ""))
        return
    metavar = action.metavar if isinstance(action.metavar, str) else None
    value = metavar or (action.dest.upper() if action.nargs != 0 and action.option_strings else "")
    names = ", ".join(rf"\fB{_text(name)}\fR" for name in action.option_strings)
    italic = rf"\fI{_text(value or action.dest)}\fR"
    shown = f"{names} {italic}" if names and value else names or italic
    text = parser._get_formatter()._expand_help(action) if action.help else ""
    yield from (".TP", shown, _text(text))


def _head(name: str, text: str) -> list[str]:
    version = _text(__version__)
    first = text.partition(".")[0]
    return [
        f'.TH {name.upper()} 1 "" "ztunnel {version}" "ztunnel"',
        ".SH NAME",
        rf"{_text(name)} \- {_text(first)}",
    ]


def _text(text: str) -> str:
    """Escape the backslashes, dashes and leading dots of a text, so that they are printed literally."""
    shown = " ".join(text.split()).replace("\\", r"\e").replace("-", r"\-")
    return rf"\&{shown}" if shown.startswith((".", "'")) else shown


def _joined(lines: list[str]) -> str:
    return "\n".join(lines) + "\n"


def main() -> int:
    """Write the pages and return the exit status."""
    if len(sys.argv) != 2:
        print("usage: python -m deploy.manpages FOLDER", file=sys.stderr)
        return 2
    folder = Path(sys.argv[1])
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in pages().items():
        (folder / name).write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
