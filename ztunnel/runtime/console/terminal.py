"""Prints the output of commands for people: plain into a pipe, and on a terminal with colour and in the terminal's
width.

The library rich draws on a terminal, and is only imported for one. It obeys ``NO_COLOR``, ``TERM`` and
``COLUMNS``. Text comes from control planes and peers: on a terminal its control characters are shown as escapes,
never sent.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final, TextIO

from ztunnel.runtime.console.text_table import aligned

if TYPE_CHECKING:
    from rich.console import Console, RenderableType
    from rich.table import Table
    from rich.text import Text

_GOOD, _BAD, _DOUBTFUL, _NAME, _HEADING = "green", "bold red", "yellow", "cyan", "bold"
#: The cell values, and the row names of ``status``, that are highlighted.
_STYLES: Final = (
    dict.fromkeys(("Healthy", "Available", "Up", "LIVE", "ok", "newly allowed"), _GOOD)
    | dict.fromkeys(("Unhealthy", "wrong", "missing", "newly refused", "denied", "no certificate"), _BAD)
    | dict.fromkeys(("not up", "policy not understood", "not accepted", "no healthy endpoint"), _BAD)
    | dict.fromkeys(("dry run", "not ready", "DRAINING", "PRE_INITIALIZING", "INITIALIZING"), _DOUBTFUL)
)
#: Columns whose numbers are highlighted unless they are zero.
_COUNTS_OF_REFUSALS: Final = ("DENIED",)
#: The first words of a verdict in an outline, and their colours.
_VERDICTS: Final = {"allowed": _GOOD, "refused": _BAD, "closed": _BAD, "not known": _DOUBTFUL}
_NO: Final = ("allowed", "holds")
_GAP: Final = 2
#: The least width for text in an outline, however deep it is.
_LEAST_WIDTH: Final = 20


def print_table(rows: Iterable[Sequence[str]], *, heading: bool = True, out: TextIO | None = None) -> None:
    """Print a table. A pipe gets its lines in the form of :func:`aligned`.

    Cells are folded between words if the terminal is too narrow. If the width is still too small, each row is
    printed as names and values below each other, so that addresses stay whole.

    Args:
        rows: the first one is the heading.
        heading: whether the first row is a heading. out: the output stream, by default standard output.
    """
    out = out if out is not None else sys.stdout
    listed = [tuple(row) for row in rows]
    if not listed or not out.isatty():
        print("\n".join(aligned(listed)), file=out)
        return
    console = _console(out)
    names = listed[0] if heading else ("",) * len(listed[0])
    table = _grid(len(names))
    if heading:
        table.add_row(*(_text(name, _HEADING) for name in names))
    for row in listed[1:] if heading else listed:
        table.add_row(*(_cell(name, cell) for name, cell in zip(names, row, strict=True)))
    if not heading or _narrowest(listed) <= console.width:
        _draw(console, table)
        return
    for number, row in enumerate(listed[1:]):
        record = _grid(2)
        for name, cell in zip(names, row, strict=True):
            record.add_row(_text(name, _HEADING), _cell(name, cell))
        if number:
            console.print()
        _draw(console, record)


def print_outline(lines: Iterable[str], *, out: TextIO | None = None) -> None:
    """Print the lines of an outline, ``name: value`` at any depth. A long line continues with a deeper
    indentation.
    """
    out = out if out is not None else sys.stdout
    if not out.isatty():
        print("\n".join(lines), file=out)
        return
    console = _console(out)
    for line in lines:
        entry = line.lstrip(" ").removeprefix("- ")
        before = line[: len(line) - len(entry)]
        width = max(_LEAST_WIDTH, console.width - len(before) - _GAP)
        for folded in _entry(entry).wrap(console, width, overflow="fold"):
            _draw(console, _text(before, "").append_text(folded))
            before = " " * (len(line) - len(entry) + _GAP)


@contextmanager
def progress(what: str, limit_s: float, *, out: TextIO | None = None) -> Iterator[Callable[[float, str], None]]:
    """Show the progress of a wait on a terminal. Yields a function that takes the elapsed seconds and a remark.

    Args:
        what: the name of the work.
        limit_s: the longest wait in seconds.
        out: the terminal. Standard error by default, because standard output has the answer.
    """
    out = out if out is not None else sys.stderr
    if not out.isatty():
        yield lambda seconds, remark: None
        return
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.fields[remark]}"),
    )
    with Progress(*columns, console=_console(out), transient=True) as shown:
        task = shown.add_task(what, total=limit_s, remark="")
        yield lambda seconds, remark: shown.update(task, completed=seconds, remark=remark)


def _console(out: TextIO) -> Console:
    from rich.console import Console

    return Console(file=out, force_terminal=True, highlight=False, markup=False, emoji=False)


def _draw(console: Console, drawn: RenderableType) -> None:
    """Print without the spaces that rich adds at the ends of lines, because a selection would copy them."""
    from rich.segment import Segment, Segments

    for line in console.render_lines(drawn, pad=False):
        while line and not line[-1].text.strip():
            line.pop()
        if line:
            last = line.pop()
            line.append(Segment(last.text.rstrip(), last.style))
        console.print(Segments([*line, Segment.line()]), end="")


def _narrowest(rows: Iterable[Sequence[str]]) -> int:
    """Return the smallest width that a table can have without breaking words."""
    longest = [[max(map(len, cell.split()), default=0) for cell in row] for row in rows]
    widths: list[int] = [max(column) for column in zip(*longest, strict=True)]
    return sum(widths) + _GAP * (len(widths) - 1)


def _grid(columns: int) -> Table:
    from rich.table import Table

    table = Table.grid(padding=(0, _GAP, 0, 0))
    for _ in range(columns):
        table.add_column(overflow="fold")
    return table


def _cell(name: str, cell: str) -> Text:
    style = _STYLES.get(cell, "")
    if cell.startswith(("Unavailable", "Unhealthy")):
        style = _BAD
    if name in _COUNTS_OF_REFUSALS and cell.partition(",")[0] not in ("0", "-"):
        style = _DOUBTFUL
    return _text(cell, style)


def _entry(text: str) -> Text:
    """Return a line of an outline with colours. A verdict's colour depends on its value."""
    name, colon, value = text.partition(": ")
    if not colon:
        return _text(text, _NAME if text.endswith(":") else "")
    style = next(
        (style for start, style in _VERDICTS.items() if name == "verdict" and value.startswith(start)), ""
    )
    if name in ("refused", "no answer"):
        style = _BAD
    elif name == "allowed by" or (name in _NO and value == "yes"):
        style = _GOOD
    elif name in _NO and value == "no":
        style = _DOUBTFUL
    return _text("", "").append_text(_text(f"{name}: ", _NAME)).append_text(_text(value, style))


def _text(text: str, style: str) -> Text:
    from rich.text import Text

    return Text(printable(text), style=style)


def print_text(text: str, *, end: str = "\n", out: TextIO | None = None, flush: bool = False) -> None:
    """Print text as it is into a pipe or file. On a terminal, escape control characters other than line breaks.

    Args:
        text: one or several lines.
        end: see :func:`print`.
        out: the output stream, by default standard output.
        flush: see :func:`print`.
    """
    out = out if out is not None else sys.stdout
    if out.isatty():
        text = "\n".join(map(printable, text.split("\n")))
    print(text, end=end, file=out, flush=flush)


def complain(text: str) -> None:
    """Print a line about an error to standard error. It is escaped like in :func:`print_text`, because reasons can
    come from any server.
    """
    print_text(text, out=sys.stderr)


def printable(text: str) -> str:
    """Return a text with escaped control characters, so that a terminal does not interpret them."""
    if text.isprintable():
        return text
    return "".join(each if each.isprintable() else repr(each)[1:-1] for each in text)
