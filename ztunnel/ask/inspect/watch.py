"""``ztunnel connections --watch``: the table again and again on a terminal, its changes elsewhere.

A terminal is redrawn. A pipe gets the existing rows and then immediately a line for each added (``+``) or removed
(``-``) row; with ``--json`` a line of JSON each. Connections that opened and closed between two reads are missed.
"""

from __future__ import annotations

import json
import shutil
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Final, TextIO

from ztunnel.ask.inspect.ages import AGE, for_people
from ztunnel.ask.inspect.source import AskFailed
from ztunnel.ask.inspect.tables import Row
from ztunnel.runtime.console.terminal import printable
from ztunnel.runtime.console.text_table import aligned

_CLEAR: Final = "\x1b[H\x1b[2J\x1b[3J"
_WORDS: Final = {" ": "open", "+": "opened", "-": "closed"}

Change = tuple[str, Row]


def changes(heading: Row, before: Sequence[Row], after: Sequence[Row]) -> Iterator[Change]:
    """Yield the removed rows with ``-``, then the added ones with ``+``.

    Equal rows count: a dump can have two equal connections. In Envoy's dialect the id distinguishes connections,
    whose other columns fill while they are established.
    """
    if "ID" in heading:
        columns = [heading.index("ID")]
    else:
        columns = [place for place, name in enumerate(heading) if name != AGE]  # which changes

    def key(row: Row) -> Row:
        return tuple(row[place] for place in columns)

    for sign, rows, others in (("-", before, after), ("+", after, before)):
        known = Counter(map(key, others))
        for row in rows:
            known[key(row)] -= 1
            if known[key(row)] < 0:
                yield sign, row


class _Lines:
    """Prints changes as lines, in columns that only grow."""

    def __init__(self, out: TextIO, *, as_json: bool) -> None:
        self._out = out
        self._as_json = as_json
        self._widths: list[int] = []

    def show(self, heading: Row, found: Sequence[Change]) -> None:
        if self._as_json:
            names = [name.lower().replace(" ", "_") for name in heading]
            for sign, row in found:
                print(json.dumps({"change": _WORDS[sign], **dict(zip(names, row, strict=True))}), file=self._out)
        else:
            if not self._widths:
                found = [(" ", heading), *found]
                self._widths = [0] * len(heading)
            for _, row in found:
                self._widths = [max(width, len(cell)) for width, cell in zip(self._widths, row, strict=True)]
            for sign, row in found:
                cells = (cell.ljust(width) for cell, width in zip(row, self._widths, strict=True))
                print(f"{sign} {'  '.join(cells)}".rstrip(), file=self._out)
        self._out.flush()


class _Screen:
    """Draws the whole table on a terminal."""

    def __init__(self, out: TextIO, interval_s: float) -> None:
        self._out = out
        self._interval_s = interval_s

    def show(self, rows: Sequence[Row]) -> None:
        size = shutil.get_terminal_size()
        now = time.strftime("%H:%M:%S")
        first = f"{now}, {len(rows) - 1} connections, every {self._interval_s:g} s; Ctrl-C ends"
        lines = [first, "", *aligned(rows)]
        if len(lines) > size.lines - 1:
            left_out = len(lines) - (size.lines - 2)
            lines = [*lines[: size.lines - 2], f"and {left_out} more"]
        print(_CLEAR + "\n".join(printable(line)[: size.columns] for line in lines), file=self._out, flush=True)


def watch(
    look: Callable[[], Sequence[Row]],
    interval_s: float,
    *,
    as_json: bool,
    out: TextIO | None = None,
    pause: Callable[[float], None] = time.sleep,
) -> int:
    """Show a table until Ctrl-C or until its reader closes. Return the exit status.

    If a proxy stops answering, the command waits for it, because the proxy can be in replacement.

    Args:
        look: returns the rows, the heading first.
        interval_s: between two looks.
        as_json: print lines of JSON.
        out: where to; standard output.
        pause: waits.

    Raises:
        AskFailed: there is no answer to the first look.
    """
    out = out if out is not None else sys.stdout
    screen = None if as_json or not out.isatty() else _Screen(out, interval_s)
    lines = _Lines(out, as_json=as_json)
    before: Sequence[Row] | None = None
    failure = ""
    try:
        while True:
            try:
                rows = look() if as_json else list(for_people(look()))
            except AskFailed as error:
                if before is None:
                    raise
                if str(error) != failure:  # once, not at each look
                    failure = str(error)
                    print(f"ztunnel connections: {failure}; waiting", file=sys.stderr)
            else:
                failure = ""
                if screen is not None:
                    screen.show(rows)
                elif before is None:
                    lines.show(rows[0], [(" ", row) for row in rows[1:]])
                else:
                    lines.show(rows[0], list(changes(rows[0], before[1:], rows[1:])))
                before = rows
            pause(interval_s)
    except (KeyboardInterrupt, BrokenPipeError):
        return 0
