"""``--watch``: redraws a table on a terminal; elsewhere it prints the changes.

A pipe gets the existing items, then a line for each item that is added (``+``) or removed (``-``). With
``-o json`` each line is an object. Connections that open and close between two reads are missed;
``ztunnel flows -f`` shows them, too.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any, Final, TextIO

import msgspec

from ztunnel.ask.inspect.source import AskFailed
from ztunnel.runtime.console.arguments import some_seconds
from ztunnel.runtime.console.output import Answer, Format, Item, Kind, ordered, table
from ztunnel.runtime.console.terminal import complain, printable
from ztunnel.runtime.console.text_table import aligned

_CLEAR: Final = "\x1b[H\x1b[2J\x1b[3J"
_WORDS: Final = {" ": "open", "+": "opened", "-": "closed"}

#: Seconds between two reads of the table.
_LOOK_S: Final = 2.0

Change = tuple[str, Any]


def add_watch(parser: argparse.ArgumentParser) -> None:
    """Add ``--watch``."""
    parser.add_argument(
        *("-w", "--watch"),
        nargs="?",
        type=_interval_s,
        const=_LOOK_S,
        metavar="SECONDS",
        help=f"repeat every {_LOOK_S:g} s: redraw on a terminal, else print added and removed items",
    )


def _interval_s(text: str) -> float:
    """Parse the interval of ``--watch`` in seconds."""
    value = some_seconds(text)
    if value >= 86400:
        raise argparse.ArgumentTypeError(f"must be less than a day: {text!r}")
    return value


def check_form(form: Format, *others: str) -> None:
    """Check that output in a form can be repeated: ``table``, ``wide``, ``json``, or one of ``others``.

    Raises:
        AskFailed: it cannot.
    """
    forms = ("table", "wide", "json", *others)
    if form.form not in forms:
        raise AskFailed(f"-o {form.form} does not repeat: without -w and -f, or as one of {', '.join(forms)}")


def changes(
    kind: Kind[Any], before: Sequence[Item], after: Sequence[Item], *, ignored: Sequence[str] = ()
) -> Iterator[Change]:
    """Yield the removed items with ``-``, then the added ones with ``+``.

    Equal items are counted, because a dump can have two equal connections. Fields that change only because time
    passes are not compared. In Envoy's dialect, further fields of a connection change while it is being
    established.

    Args:
        kind: the items' kind.
        before: the earlier items.
        after: the later items.
        ignored: further fields that are not compared.
    """
    not_compared = {*kind.volatile, *ignored}

    def key(item: Item) -> bytes:
        fields = msgspec.structs.asdict(item)
        return msgspec.msgpack.encode([value for name, value in fields.items() if name not in not_compared])

    for sign, items, others in (("-", before, after), ("+", after, before)):
        known = Counter(map(key, others))
        for item in items:
            known[key(item)] -= 1
            if known[key(item)] < 0:
                yield sign, item


class _Lines:
    """Prints changed items as lines of a table. Columns become wider when needed, and never narrower."""

    def __init__(self, out: TextIO, form: Format) -> None:
        self._out = out
        self._form = form
        self._widths: list[int] = []

    def show(self, answer: Answer[Any], found: Sequence[Change]) -> None:
        if self._form.is_json:
            for sign, item in found:
                line = {"change": _WORDS[sign], **msgspec.to_builtins(item)}
                print(msgspec.json.encode(line).decode(), file=self._out)
            self._out.flush()
            return
        wide = self._form.form == "wide"
        heading, *_ = table(replace(answer, items=()), wide=wide) or [()]
        rows: list[tuple[str, tuple[str, ...]]] = []
        if not self._widths:
            rows.append((" ", heading))
            self._widths = [0] * len(heading)
        for sign, item in found:
            rows += [(sign, row) for row in table(replace(answer, items=[item]), wide=wide)[1:]]
        for _, row in rows:
            self._widths = [max(width, len(cell)) for width, cell in zip(self._widths, row, strict=True)]
        for sign, row in rows:
            cells = (cell.ljust(width) for cell, width in zip(row, self._widths, strict=True))
            print(f"{sign} {'  '.join(cells)}".rstrip(), file=self._out)
        self._out.flush()


class _Screen:
    """Draws the whole table on a terminal."""

    def __init__(self, out: TextIO, form: Format, interval_s: float) -> None:
        self._out = out
        self._form = form
        self._interval_s = interval_s

    def show(self, answer: Answer[Any]) -> None:
        size = shutil.get_terminal_size()
        now = time.strftime("%H:%M:%SZ", time.gmtime())
        counted = f"{len(answer.items)} {answer.kind.several}"
        first = f"{now}, {counted}, every {self._interval_s:g} s; Ctrl-C ends"
        lines = [first, "", *aligned(table(answer, wide=self._form.form == "wide"))]
        if len(lines) > size.lines - 1:
            left_out = len(lines) - (size.lines - 2)
            lines = [*lines[: size.lines - 2], f"and {left_out} more"]
        print(_CLEAR + "\n".join(printable(line)[: size.columns] for line in lines), file=self._out, flush=True)


def watch(
    look: Callable[[], Answer[Any]],
    interval_s: float,
    form: Format,
    *,
    command: str,
    out: TextIO | None = None,
    pause: Callable[[float], None] = time.sleep,
) -> int:
    """Show a table until Ctrl-C or until its reader closes. Return the exit status.

    If a proxy stops answering, the command waits, because a successor can be replacing it. Meanwhile the items of
    that node stay as they were.

    Args:
        look: returns the current items.
        interval_s: the time between two reads.
        form: the value of ``-o``; with ``json`` each line is an object.
        command: the command's name in messages.
        out: the output; by default standard output.
        pause: waits for the given seconds.

    Raises:
        AskFailed: the first read has no answer, or the form cannot be repeated.
    """
    check_form(form)
    out = out if out is not None else sys.stdout
    screen = None if form.is_json or not out.isatty() else _Screen(out, form, interval_s)
    lines = _Lines(out, form)
    before: Sequence[Item] | None = None
    incomplete = False
    failure = ""
    try:
        while True:
            try:
                answer = look()
            except AskFailed as error:
                if before is None:
                    raise
                reason = str(error)
            else:
                reason = "; ".join(f"node {each.node}: {each.reason}" for each in answer.silent)
                items = [*answer.items, *_of_silent(answer, before or ())]
                if form.sort is not None:
                    items = ordered(items, form.sort)
                answer = replace(answer, items=items)
                if screen is not None:
                    screen.show(answer)
                elif before is None:
                    lines.show(answer, [(" ", item) for item in items])
                else:
                    # Which nodes report an item is not known while a node is silent.
                    ignored = ("seen_by",) if incomplete or answer.silent else ()
                    lines.show(answer, list(changes(answer.kind, before, items, ignored=ignored)))
                before, incomplete = items, bool(answer.silent)
            if reason and reason != failure:  # report it once, not at each read
                complain(f"ztunnel {command}: {reason}; waiting")
            failure = reason
            pause(interval_s)
    except (KeyboardInterrupt, BrokenPipeError):
        return 0


def _of_silent(answer: Answer[Any], before: Sequence[Item]) -> list[Item]:
    """Return the earlier items that only silent nodes have reported."""
    silent = {each.node for each in answer.silent}
    reporters = ((item, getattr(item, "seen_by", None) or (item.node,)) for item in before)
    return [item for item, nodes in reporters if silent.issuperset(nodes)] if silent else []
