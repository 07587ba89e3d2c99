"""The command ``ztunnel limits``: prints the limits of an Istio mesh's proxy with their current values.

The values are those of the command's own environment, descriptors and memory. If two values share a row, the first
is a burst and the second a rate per second. Exit status: 0, or 1 with unusable settings, each on a line of
standard error.
"""

import argparse
import json
import os
import sys
from collections.abc import Iterable
from dataclasses import asdict
from typing import Any

from ztunnel.ask.limits.table import COLUMNS, Limit, limits
from ztunnel.proxy.istio.command import check
from ztunnel.runtime.console.terminal import print_table
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
    command.add_argument("--format", choices=("table", "markdown", "json"), default="table")
    command.add_argument(
        "--json",
        action="store_const",
        const="json",
        dest="format",
        help="print JSON, as --format json: a line each",
    )
    command.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Print the limits and return the exit status."""
    try:
        config = check(os.environ, "")
    except SettingsError as error:
        for fault in error.faults:
            print(f"Error: {fault}", file=sys.stderr)
        return 1
    found = limits(config, descriptors=limit_of_process(), memory_bytes=memory_limit_bytes())
    if args.format == "table":
        print_table([COLUMNS, *(tuple(cell.replace("`", "") for cell in limit.cells) for limit in found)])
    else:
        print("\n".join(printed(found, args.format)))
    return 0


def printed(found: Iterable[Limit], form: str) -> Iterable[str]:
    """Yield the lines of the limits: ``markdown``, or ``json``, which is one line each."""
    if form == "json":
        for limit in found:
            yield json.dumps(asdict(limit))
        return
    yield f"| {' | '.join(COLUMNS)} |"
    yield "|---" * len(COLUMNS) + "|"
    for limit in found:
        yield f"| {' | '.join(limit.cells)} |"
