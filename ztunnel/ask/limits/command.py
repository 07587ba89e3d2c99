"""The command ``ztunnel limits``: prints the limits of an Istio mesh's proxy with their current values.

The values come from the command's own environment, descriptors and memory. If two values share a row, the first
is a burst and the second a rate per second. Exit status: 0, or 2 with unusable settings, each on a line of
standard error.
"""

import argparse
import os
import sys
from collections.abc import Iterable
from typing import Any, Final

from ztunnel.ask.limits.table import COLUMNS, Limit, limits
from ztunnel.proxy.istio.command import check
from ztunnel.runtime.console.output import Answer, Column, Item, Kind, add_output, emit
from ztunnel.runtime.descriptors import limit_of_process
from ztunnel.runtime.memory import memory_limit_bytes
from ztunnel.runtime.settings import SettingsError


def add_arguments(subparsers: Any) -> None:
    """Add ``limits`` to ``argparse``'s sub-commands; ``args.run`` becomes :func:`run`."""
    command = subparsers.add_parser(
        "limits",
        help="print every limit on peers, pods and strangers",
        description="Print every limit, with its value here, its variable, its metric and what happens beyond it.",
    )
    add_output(command)
    command.add_argument("--markdown", action="store_true", help="print the table of docs/reliability.md")
    command.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Print the limits and return the exit status."""
    try:
        config = check(os.environ, "")
    except SettingsError as error:
        for fault in error.faults:
            print(f"Error: {fault}", file=sys.stderr)
        return 2
    found = limits(config, descriptors=limit_of_process(), memory_bytes=memory_limit_bytes())
    if args.markdown:
        print("\n".join(markdown(found)))
        return 0
    return emit(Answer(kind=LIMIT, items=list(map(_item, found))), args.output)


class LimitItem(Item, frozen=True, kw_only=True):
    """A limit. Two values are a burst and a rate per second; ``told`` is the message that the peer gets."""

    name: str
    value: list[float]
    unit: str
    variable: str | None = None
    metric: str | None = None
    beyond: str
    told: str


def _item(limit: Limit) -> LimitItem:
    return LimitItem(
        name=limit.name.replace("`", ""),
        value=list(limit.value),
        unit=limit.unit,
        variable=limit.variable.replace("`", "") or None,
        metric=limit.metric.replace("`", "") or None,
        beyond=limit.beyond.replace("`", ""),
        told=limit.told.replace("`", ""),
    )


LIMIT: Final = Kind(
    name="Limit", several="limits", item=LimitItem, identity=lambda item: item.name.replace(" ", "-"),
    columns=(
        Column("LIMIT", "name"),
        Column("VALUE", lambda item: "; ".join(f"{each:,.10g}" for each in item.value)),
        Column("UNIT", "unit"),
        Column("VARIABLE", "variable"),
        Column("METRIC", "metric"),
        Column("BEYOND IT", "beyond"),
        Column("THE PEER IS TOLD", "told"),
    ),
)  # fmt: skip


def markdown(found: Iterable[Limit]) -> Iterable[str]:
    """Yield the lines of the table in Markdown."""
    yield f"| {' | '.join(COLUMNS)} |"
    yield "|---" * len(COLUMNS) + "|"
    for limit in found:
        yield f"| {' | '.join(limit.cells)} |"
