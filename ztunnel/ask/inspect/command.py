"""The commands that ask a running proxy through its admin server.

Exit status: 0; 1 of ``status`` when the control plane is not connected; 2 when there is no answer.
"""

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from typing import Any, Final

from xds.errors import ConfigError
from ztunnel.ask.inspect import audit, explain, tap
from ztunnel.ask.inspect.ages import for_people
from ztunnel.ask.inspect.completion import SCRIPTS
from ztunnel.ask.inspect.envoy_tables import ENVOY_TABLES, PARAMETERS, EnvoyTable
from ztunnel.ask.inspect.parts import NoSuchPart, part
from ztunnel.ask.inspect.source import (
    AskFailed,
    add_source,
    ask,
    ask_json,
    failed,
    reaching,
    read_json,
)
from ztunnel.ask.inspect.tables import (
    TABLES,
    NotAMesh,
    Row,
    is_envoy_dump,
    is_good,
    mesh_dump,
)
from ztunnel.ask.inspect.watch import watch
from ztunnel.runtime.clock import SystemClock
from ztunnel.runtime.console.arguments import some_seconds
from ztunnel.runtime.console.terminal import print_table

_NOT_FOUND: Final = 404
#: Between two looks of ``--watch``.
_LOOK_S: Final = 2.0


def add_arguments(subparsers: Any) -> None:
    """Add the commands to ``argparse``'s sub-commands; ``args.run`` runs one."""
    for name, kind in TABLES.items():
        table = subparsers.add_parser(
            name, help=kind.help, description=f"{kind.help.capitalize()} of a running proxy."
        )
        add_source(table)
        table.add_argument("-f", "--file", metavar="FILE", help="a saved config_dump instead; - is standard input")
        table.add_argument("-n", "--namespace", default="", metavar="NAME", help="only what belongs to it")
        if name == "connections":
            table.add_argument(
                "--watch",
                nargs="?",
                type=_interval_s,
                const=_LOOK_S,
                metavar="SECONDS",
                help=f"again and again, each {_LOOK_S:g} s: the table on a terminal, else what opens and closes",
            )
        table.set_defaults(run=reaching(_table))
    explain.add_arguments(subparsers)
    config = subparsers.add_parser(
        "config",
        help="print the configuration in force: all, a part, or entries of it",
        description="Print the config_dump of a running proxy as JSON, or a part: in an Istio mesh as services "
        "or config, in Envoy's dialect as listeners or clusters.",
    )
    config.add_argument("part", nargs="?", metavar="PART", help="without it everything is printed")
    config.add_argument(
        "entry", nargs="?", default="", metavar="NAME", help="only the part's entries of this name"
    )
    add_source(config)
    config.add_argument("-f", "--file", metavar="FILE", help="a saved config_dump instead; - is standard input")
    config.set_defaults(run=reaching(_config))
    log = subparsers.add_parser("log", help="show or set the level of a running proxy's log")
    log.add_argument("level", nargs="?", help="such as debug; without it the levels are shown")
    add_source(log)
    log.set_defaults(run=reaching(_log))
    completion = subparsers.add_parser(
        "completion",
        help="print what lets a shell complete command lines",
        description="Print a script for a shell: `source <(ztunnel completion bash)` in ~/.bashrc, the same in "
        "~/.zshrc, `ztunnel completion fish > ~/.config/fish/completions/ztunnel.fish`.",
    )
    completion.add_argument("shell", choices=SCRIPTS)
    completion.set_defaults(run=_completion)
    tap.add_arguments(subparsers)
    audit.add_arguments(subparsers)


def _table(args: argparse.Namespace) -> int:
    try:
        if getattr(args, "watch", None) is not None:
            if args.file is not None:
                return failed(args, "--watch asks a running proxy: not with --file")
            return watch(lambda: _rows(args), args.watch, as_json=args.json)
        rows = _rows(args)
    except AskFailed as error:
        return failed(args, str(error))
    except NotAMesh as error:
        return failed(args, f"{args.file or args.address}: {error}")
    except (TypeError, AttributeError, KeyError) as error:
        return failed(args, f"{args.file or args.address}: not a config_dump: {error}")
    if not args.json:
        print_table(for_people(rows), heading=args.command != "status")
    elif args.command == "status":
        print(json.dumps([{"name": name, "state": state} for name, state in rows], indent=2))
    else:
        heading, *others = rows
        names = [name.lower().replace(" ", "_") for name in heading]
        print(json.dumps([dict(zip(names, row, strict=True)) for row in others], indent=2))
    return 0 if args.command != "status" or is_good(rows) else 1


def _interval_s(text: str) -> float:
    """Read the argument of ``--watch``."""
    value = some_seconds(text)
    if value >= 86400:
        raise argparse.ArgumentTypeError(f"must be less than a day: {text!r}")
    return value


def _rows(args: argparse.Namespace) -> Sequence[Row]:
    """Return the rows of a table. A proxy in Envoy's dialect has some of them.

    Raises:
        AskFailed: there is no answer.
        NotAMesh: the answer has no such table.
    """
    if args.file is None and args.command == "connections":
        page = _page_or_none(args.address, "/connections")
        if page is not None:
            return _connections(args, page)
    found = read_json(args.file) if args.file is not None else ask_json(args.address, "/config_dump")
    table = ENVOY_TABLES.get(args.command)
    if table is not None and is_envoy_dump(found):
        _refuse_namespace(args)
        pages = _saved_pages(args, found) if args.file is not None else _asked_pages(args, table, found)
        return list(table.rows({"/config_dump": found, **pages}))
    return list(TABLES[args.command].rows(mesh_dump(found), args.namespace))


def _asked_pages(args: argparse.Namespace, table: EnvoyTable, dump: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the pages of a running proxy. If an Envoy lacks a page, its dump replaces the page."""
    try:
        pages = {path: ask_json(args.address, path, PARAMETERS.get(path)) for path in table.paths}
    except AskFailed as error:
        if error.status != _NOT_FOUND or args.command == "connections":
            raise
        return _saved_pages(args, dump)
    return pages | {path: _page_or_none(args.address, path) for path in table.optional}


def _saved_pages(args: argparse.Namespace, dump: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return what a dump of Envoy's dialect has for a table, and say what it has not.

    Raises:
        AskFailed: the file has no such part, or cannot be read.
    """
    from ztunnel.ask.inspect.saved_pages import SAVED_PAGES  # imports Envoy's messages, which take a while

    make = SAVED_PAGES.get(args.command)
    name = args.file or args.address
    if make is None:
        raise AskFailed(f"{name}: a dump of Envoy's dialect has no {args.command}: ask the running proxy")
    try:
        pages, lacks = make(dump, SystemClock())
    except ConfigError as error:
        raise AskFailed(f"{name}: {error}") from None
    for each in lacks:
        print(f"ztunnel {args.command}: not in the dump: {each}", file=sys.stderr)
    return pages


def _connections(args: argparse.Namespace, page: Any) -> Sequence[Row]:
    """Return the table of ``/connections``, without the rest of a dump, which can be large."""
    if not isinstance(page, Mapping):
        raise NotAMesh("/connections is not an object")
    if isinstance(page.get("connections"), list):
        _refuse_namespace(args)
        return list(ENVOY_TABLES["connections"].rows({"/connections": page}))
    return list(TABLES["connections"].rows({"workloadState": page}, args.namespace))


def _refuse_namespace(args: argparse.Namespace) -> None:
    if args.namespace:
        raise AskFailed(
            f"{args.file or args.address}: namespaces are of an Istio mesh; this proxy has Envoy's dialect"
        )


def _page_or_none(address: str, path: str) -> Any:
    """Return a page that only our proxies have; ``None`` of an Envoy."""
    try:
        return ask_json(address, path, PARAMETERS.get(path))
    except AskFailed as error:
        if error.status != _NOT_FOUND:
            raise
        return None


def _config(args: argparse.Namespace) -> int:
    try:
        found = read_json(args.file) if args.file is not None else ask_json(args.address, "/config_dump")
        if args.part is not None:
            found = part(found, args.part, args.entry)
    except AskFailed as error:
        return failed(args, str(error))
    except NoSuchPart as error:
        return failed(args, f"{args.file or args.address}: {error}")
    # A single value is for a shell, unless JSON is asked for.
    print(found if isinstance(found, str) and not args.json else json.dumps(found, indent=2))
    return 0


def _log(args: argparse.Namespace) -> int:
    try:
        page = ask(args.address, "/logging", {"level": args.level}, method="POST")
    except AskFailed as error:
        return failed(args, str(error))
    print(json.dumps({"levels": _levels(page)}, indent=2) if args.json else page, end="\n" if args.json else "")
    return 0


def _levels(page: str) -> Mapping[str, str]:
    """Return the levels of ``/logging``: of a filter by target, or in Envoy's dialect by logger."""
    _, current, text = page.partition("current log level is ")
    if current:
        clauses = [clause.rpartition("=") for clause in text.strip().split(",")]
        return {target or "default": level for target, _, level in clauses}
    lines = [line.strip().partition(": ") for line in page.splitlines()[1:]]
    return {logger: level for logger, _, level in lines if level}


def _completion(args: argparse.Namespace) -> int:
    print(SCRIPTS[args.shell], end="")
    return 0
