"""Makes ``/help`` and the home page from the table of commands."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass
from html import escape

from ztunnel.proxy.envoy.admin.inspected import Asked
from ztunnel.runtime.http.page import Page


@dataclass(frozen=True, slots=True)
class Parameter:
    """A query parameter of an admin page. A ``flag`` is a parameter without a value."""

    name: str
    text: str
    flag: bool = False


@dataclass(frozen=True, slots=True)
class Command:
    """An admin page: its path, help text, handler and parameters. A command that ``mutates`` requires POST."""

    path: str
    text: str
    answer: Callable[[Asked], Page | Awaitable[Page]]
    mutates: bool = False
    parameters: tuple[Parameter, ...] = ()


def help_text(commands: Iterable[Command]) -> str:
    """Return the text of ``/help``, which lists all commands."""
    lines = ["admin commands are:\n"]
    for command in commands:
        lines.append(f"  {command.path}{' (POST)' if command.mutates else ''}: {command.text}\n")
        lines.extend(f"      {parameter.name}: {parameter.text}\n" for parameter in command.parameters)
    return "".join(lines)


_HEAD = """\
<!DOCTYPE html>
<html lang='en'>
<head>
  <meta charset='UTF-8'>
  <title>ztunnel admin</title>
  <style>
    body { font-family: sans-serif; }
    table { border-collapse: collapse; }
    td { padding: 4px 8px; text-align: left; vertical-align: top; }
    tr.command { border-top: 1px solid #ccc; background: #f4f4f4; }
    td.option { padding-left: 24px; }
    form { margin: 0; }
  </style>
</head>
<body>
  <table>
    <thead><tr><th>Command</th><th>Description</th></tr></thead>
    <tbody>
"""
_TAIL = """\
    </tbody>
  </table>
</body>
</html>
"""


def home_page(commands: Iterable[Command]) -> str:
    """Return the home page: a link for each page, and a button for each mutating command."""
    rows = [_rows(command) for command in commands if command.path != "/"]
    return _HEAD + "".join(rows) + _TAIL


def _rows(command: Command) -> str:
    path = escape(command.path.removeprefix("/"), quote=True)
    method = "post" if command.mutates else "get"
    rows = [
        f"<tr class='command'><td><form action='{path}' method='{method}' id='{path}'>"
        f"<button>{path}</button></form></td><td>{escape(command.text)}</td></tr>\n"
    ]
    for parameter in command.parameters:
        name = escape(parameter.name, quote=True)
        kind = "checkbox" if parameter.flag else "text"
        identifier = f"{path}-{name}"
        rows.append(
            f"<tr><td class='option'><input type='{kind}' name='{name}' id='{identifier}' form='{path}'></td>"
            f"<td><label for='{identifier}'>{name}: {escape(parameter.text)}</label></td></tr>\n"
        )
    return "".join(rows)
