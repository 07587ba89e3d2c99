"""The output of every command that queries something: typed items of a kind, printed in kubectl's forms.

A command returns an :class:`Answer`. This module prints it as
``-o table|wide|json|yaml|name|jsonpath=...| custom-columns=...`` and returns the exit status: 0 if all is well, 1
if the answer is bad, 2 if a node or cluster did not answer. JSON lists are ``{"apiVersion", "kind", "items"}``.
Numbers are numbers, times RFC 3339 in UTC, durations seconds; ``docs/schemas`` has a JSON schema for each kind.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final, Generic, TextIO, TypeVar

import msgspec

from ztunnel.runtime.console import jsonpath
from ztunnel.runtime.console.terminal import complain, print_table, print_text

API_VERSION: Final = "ztunnel/v1"
FINE: Final = 0
BAD: Final = 1
NO_ANSWER: Final = 2

_NONE: Final = "-"
FORMS: Final = ("table", "wide", "json", "yaml", "name")
_USAGE: Final = "table, wide, json, yaml, name, jsonpath=TEMPLATE or custom-columns=HEADING:.path,..."


class Item(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """An item of a list. Its fields define the JSON schema of its kind.

    Attributes:
        node: the node whose proxy or agent answered; ``None`` if only one was asked.
    """

    node: str | None = None


T = TypeVar("T", bound=Item)


@dataclass(frozen=True, slots=True)
class Column(Generic[T]):
    """A column of a table.

    Attributes:
        heading: in upper case.
        cell: the name of a field, or a function of the item that returns a text or a value for :func:`shown`.
        wide: whether the column appears only with ``-o wide``.
    """

    heading: str
    cell: str | Callable[[T], object]
    wide: bool = False

    def text(self, item: T) -> str:
        value = getattr(item, self.cell) if isinstance(self.cell, str) else self.cell(item)
        return shown(value)


@dataclass(frozen=True, slots=True)
class Kind(Generic[T]):
    """A kind of items.

    Attributes:
        name: such as ``Connection``; lists are of the kind ``ConnectionList``.
        several: the plural, for the sentence about an empty list.
        item: the type of the items.
        columns: the table's columns.
        identity: returns the part of ``-o name`` after the kind.
        heading: whether the table has a heading.
        rows: yields one item per row, for items that need several rows.
        volatile: fields that change only because time passes. ``--watch`` ignores these changes.
    """

    name: str
    several: str
    item: type[T]
    columns: tuple[Column[T], ...]
    identity: Callable[[T], str]
    heading: bool = True
    rows: Callable[[T], Iterable[T]] | None = None
    volatile: tuple[str, ...] = ()


class Silent(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """A node that did not answer."""

    node: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer(Generic[T]):
    """The result of a command.

    Attributes:
        kind: the items' kind.
        items: in the order of printing.
        silent: nodes that did not answer.
        across: whether several nodes were asked. Then the table has a column NODE.
        bad: whether the exit status is 1.
        notes: lines below a table, for people.
        summary: the content of the notes for programs, beside the items.
    """

    kind: Kind[T]
    items: Sequence[T]
    silent: Sequence[Silent] = ()
    across: bool = False
    bad: bool = False
    notes: Sequence[str] = ()
    summary: Mapping[str, Any] | None = None

    @property
    def status(self) -> int:
        return NO_ANSWER if self.silent else BAD if self.bad else FINE


@dataclass(frozen=True, slots=True)
class Format:
    """The value of ``-o``.

    Attributes:
        form: one of :data:`FORMS`, ``jsonpath`` or ``custom-columns``.
        template: the template of ``jsonpath``.
        columns: the headings and expressions of ``custom-columns``.
        sort: the value of ``--sort-by``, an expression that is evaluated on each item.
    """

    form: str = "table"
    template: jsonpath.Template | None = None
    columns: tuple[tuple[str, Any], ...] = field(default=())
    sort: tuple[Any, ...] | None = None

    @property
    def for_people(self) -> bool:
        """Whether the output is for people: a table, not JSON or YAML."""
        return self.form in ("table", "wide")

    @property
    def is_json(self) -> bool:
        return self.form == "json"


TABLE: Final = Format()
JSON: Final = Format("json")


def parse_format(text: str) -> Format:
    """Parse the value of ``-o``.

    Raises:
        argparse.ArgumentTypeError: the form is unknown.
    """
    form, equals, rest = text.partition("=")
    if text in FORMS:
        return Format(text)
    try:
        if form == "jsonpath" and equals:
            template = rest if "{" in rest else f"{{{rest}}}"
            return Format("jsonpath", template=jsonpath.Template(template))
        if form == "custom-columns" and rest:
            return Format("custom-columns", columns=tuple(map(_custom_column, rest.split(","))))
    except jsonpath.BadTemplate as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    raise argparse.ArgumentTypeError(f"must be {_USAGE}: {text!r}")


def _custom_column(text: str) -> tuple[str, Any]:
    heading, colon, expression = text.partition(":")
    if not colon or not heading or not expression:
        raise jsonpath.BadTemplate(f"custom-columns: must be HEADING:.path: {text!r}")
    return heading, jsonpath.path(expression.strip("{}"))


def add_output(parser: argparse.ArgumentParser, forms: tuple[str, ...] = ()) -> None:
    """Add ``-o`` and ``--json`` to a command that prints an :class:`Answer`.

    Args:
        parser: the command's parser.
        forms: further forms, which the command prints itself.
    """

    class Output(argparse.Action):
        """The action of ``-o``. It sets the form, and keeps the order that ``--sort-by`` has set."""

        def __call__(self, parser: Any, namespace: Any, values: Any, option_string: str | None = None) -> None:
            namespace.output = replace(values or JSON, sort=namespace.output.sort)

    class SortBy(argparse.Action):
        """The action of ``--sort-by``. It sets the order, and keeps the form that ``-o`` has set."""

        def __call__(self, parser: Any, namespace: Any, values: Any, option_string: str | None = None) -> None:
            try:
                steps = jsonpath.path(str(values).strip("{}"))
            except jsonpath.BadTemplate as error:
                parser.error(f"argument --sort-by: {error}")
            namespace.output = replace(namespace.output, sort=steps)

    def form(text: str) -> Format:
        return Format(text) if text in forms else parse_format(text)

    usage = ", ".join([*forms, _USAGE])
    parser.add_argument(
        *("-o", "--output"),
        action=Output,
        type=form,
        default=TABLE,
        metavar="FORM",
        help=f"{usage} (default table)",
    )
    parser.add_argument("--json", action=Output, nargs=0, dest="output", help="the same as -o json")
    parser.add_argument(
        "--sort-by",
        action=SortBy,
        metavar=".PATH",
        default=argparse.SUPPRESS,
        help="sort by this field of -o json, like kubectl",
    )


def shown(value: object) -> str:
    """Return an item's value as the text of a table cell."""
    if value is None or value in ("", [], (), {}):
        return _NONE
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, Mapping):
        return ", ".join(f"{number} {name}" for name, number in value.items())
    if isinstance(value, list | tuple):
        return ", ".join(map(str, value))
    return f"{value:g}" if isinstance(value, float) else str(value)


def table(answer: Answer[T], *, wide: bool = False) -> list[tuple[str, ...]]:
    """Return the rows of a table, the heading first if its kind has one."""
    kind = answer.kind
    columns = [column for column in kind.columns if wide or not column.wide]
    if answer.across:
        columns.insert(0, Column("NODE", "node"))
    rows = [tuple(column.heading for column in columns)] if kind.heading else []
    for item in answer.items:
        several = kind.rows(item) if kind.rows is not None else (item,)
        rows += [tuple(column.text(each) for column in columns) for each in several]
    return rows


def document(answer: Answer[Any]) -> dict[str, Any]:
    """Return an answer as a JSON value."""
    found = {
        "apiVersion": API_VERSION,
        "kind": f"{answer.kind.name}List",
        **({"silent": answer.silent} if answer.silent else {}),
        **({"summary": answer.summary} if answer.summary is not None else {}),
        "items": answer.items,
    }
    plain: dict[str, Any] = msgspec.json.decode(msgspec.json.encode(found))
    return plain


def schema(kind: Kind[Any]) -> dict[str, Any]:
    """Return the JSON schema (2020-12) of a kind's list."""
    (item, _), definitions = msgspec.json.schema_components([kind.item, Silent], ref_template="#/$defs/{name}")
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": f"{kind.name}List",
        "type": "object",
        "properties": {
            "apiVersion": {"const": API_VERSION},
            "kind": {"const": f"{kind.name}List"},
            "silent": {"type": "array", "items": {"$ref": "#/$defs/Silent"}},
            "summary": {"type": "object"},
            "items": {"type": "array", "items": item},
        },
        "required": ["apiVersion", "kind", "items"],
        "$defs": _plain(definitions),
    }


def _plain(value: Any) -> Any:
    """Return a schema without descriptions and defaults. Every key is required, because the output always has all
    keys.
    """
    if isinstance(value, Mapping):
        plain = {key: _plain(inner) for key, inner in value.items() if not (key in _OURS and _is_text(inner))}
        if isinstance(plain.get("properties"), dict):
            plain["required"] = list(plain["properties"])
        return plain
    return [_plain(each) for each in value] if isinstance(value, list) else value


def ordered(items: Sequence[T], steps: Sequence[Any]) -> list[T]:
    """Return items sorted by the value of an expression: numbers before texts, items without a value last."""

    def key(item: T) -> tuple[int, float, str]:
        found = jsonpath.select(steps, msgspec.json.decode(msgspec.json.encode(item)))
        value = found[0] if found else None
        if value is None:
            return 2, 0.0, ""
        is_number = isinstance(value, int | float)
        return (0, float(value), "") if is_number else (1, 0.0, jsonpath.shown(value))

    return sorted(items, key=key)


_OURS: Final = ("description", "default", "title")


def _is_text(value: Any) -> bool:
    return not isinstance(value, Mapping)


def emit(answer: Answer[T], form: Format, out: TextIO | None = None) -> int:
    """Print an answer and return the exit status. Nodes without an answer are named on standard error."""
    out = out if out is not None else sys.stdout
    if form.sort is not None:
        answer = replace(answer, items=ordered(answer.items, form.sort))
    for line in _lines(answer, form, out):
        print_text(line, out=out)
    if form.form != "json":
        for silent in answer.silent:
            complain(f"no answer from node {silent.node}: {silent.reason}")
    return answer.status


def _lines(answer: Answer[T], form: Format, out: TextIO) -> Iterator[str]:
    if form.for_people:
        if answer.items:
            print_table(table(answer, wide=form.form == "wide"), heading=answer.kind.heading, out=out)
        elif not (answer.silent or answer.notes):
            yield f"No {answer.kind.several} found."
        yield from answer.notes
    elif form.form == "name":
        kind = answer.kind
        for item in answer.items:
            yield f"{kind.name.lower()}/{kind.identity(item)}"
    elif form.form == "custom-columns":
        print_table(_custom(answer, form), out=out)
    else:
        yield from rendered(document(answer), form)


def _custom(answer: Answer[Any], form: Format) -> list[tuple[str, ...]]:
    rows = [tuple(heading for heading, _ in form.columns)]
    for item in document(answer)["items"]:
        found = (jsonpath.select(steps, item) for _, steps in form.columns)
        rows.append(tuple(",".join(map(_of_column, values)) or "<none>" for values in found))
    return rows


def _of_column(value: Any) -> str:
    return "<none>" if value is None else jsonpath.shown(value)


def rendered(value: Any, form: Format) -> Iterator[str]:
    """Yield the lines of a JSON value in a form for programs, such as ``json`` or ``yaml``."""
    if form.form == "jsonpath":
        assert form.template is not None
        yield form.template.render(value)
    elif form.form == "yaml":
        import yaml  # imported here, because only this form needs it

        yield yaml.safe_dump(value, sort_keys=False, allow_unicode=True, width=1000).rstrip("\n")
    else:
        yield msgspec.json.format(msgspec.json.encode(value), indent=2).decode()


def emit_object(value: Any, form: Format, out: TextIO | None = None) -> None:
    """Print a value that is not a list of items, such as a part of a dump: as JSON, as YAML or by a JSONPath."""
    for line in rendered(value, form if form.form in ("yaml", "jsonpath") else JSON):
        print_text(line, out=out)
