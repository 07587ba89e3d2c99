"""The commands that query proxies through their admin servers: tables, parts of the configuration, log levels.

Exit status: 0; 1 if ``status`` reports an error; 2 if there is no answer, or a node does not answer.
"""

import argparse
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from xds.errors import ConfigError
from ztunnel.ask.inspect import audit, explain, handover, kinds, nodes, tap
from ztunnel.ask.inspect.completion import SCRIPTS
from ztunnel.ask.inspect.envoy_tables import ENVOY_TABLES, PARAMETERS, EnvoyTable
from ztunnel.ask.inspect.fleet import Found, gather, items_of, saved_proxy, selected_pods
from ztunnel.ask.inspect.parts import NoSuchPart, part
from ztunnel.ask.inspect.source import (
    NOT_FOUND,
    AskFailed,
    Pages,
    add_source,
    answer_limit_s,
    ask,
    ask_json,
    failed,
    page_or_none,
    reaching,
)
from ztunnel.ask.inspect.tables import TABLES, NotAMesh, denials, is_envoy_dump, mesh_dump
from ztunnel.ask.inspect.watch import add_watch, watch
from ztunnel.runtime.clock import SystemClock
from ztunnel.runtime.console.output import Answer, Kind, Silent, emit, emit_object
from ztunnel.runtime.console.terminal import complain, print_text


def add_arguments(subparsers: Any) -> None:
    """Add the commands to ``argparse``'s sub-commands; ``args.run`` runs one."""
    for name, kind in TABLES.items():
        table = subparsers.add_parser(
            name,
            help=kind.help,
            description=f"{kind.help.capitalize()}, of one running proxy or with -A of all.",
        )
        add_source(table, across=True, saved=True)
        add_filters(table)
        add_watch(table)
        table.set_defaults(run=_table)
    nodes.add_arguments(subparsers)
    explain.add_arguments(subparsers)
    config = subparsers.add_parser(
        "config",
        help="print the active configuration: all, a part, or some entries",
        description="Print the config_dump of a running proxy as JSON, or one part of it, such as services or "
        "config in an Istio mesh, or listeners or clusters in Envoy's dialect.",
    )
    config.add_argument("part", nargs="?", metavar="PART", help="the part to print; without it, the whole dump")
    config.add_argument(
        "entry", nargs="?", default="", metavar="NAME", help="print only the entries with this name"
    )
    add_source(config, saved=True)
    config.set_defaults(run=reaching(_config))
    log = subparsers.add_parser("log", help="show or set the level of a running proxy's log")
    log.add_argument("level", nargs="?", help="the level to set, such as debug; without it, the levels are shown")
    add_source(log, across=True)
    log.set_defaults(run=_log)
    completion = subparsers.add_parser(
        "completion",
        help="print a script for a shell's completion",
        description="Print a script that makes TAB complete this command. Put `source <(ztunnel completion bash)` "
        "into ~/.bashrc, or the same with zsh into ~/.zshrc; for fish run "
        "`ztunnel completion fish > ~/.config/fish/completions/ztunnel.fish`.",
    )
    completion.add_argument("shell", choices=SCRIPTS)
    completion.set_defaults(run=_completion)
    tap.add_arguments(subparsers)
    handover.add_arguments(subparsers)
    audit.add_arguments(subparsers)


def add_filters(parser: argparse.ArgumentParser) -> None:
    """Add the flags that choose what a table shows."""
    parser.add_argument("-n", "--namespace", default="", metavar="NAME", help="show only items of this namespace")
    parser.add_argument(
        *("-l", "--selector"),
        default="",
        metavar="LABELS",
        help="show only pods with these labels (read through kubectl), their proxies and connections",
    )


def _table(args: argparse.Namespace) -> int:
    try:
        if args.watch is not None:
            if args.file is not None:
                return failed(args, "--watch asks a running proxy: not with --file")
            return watch(lambda: _answer(args), args.watch, args.output, command=args.command)
        return emit(_answer(args), args.output)
    except AskFailed as error:
        return failed(args, str(error))


def _answer(args: argparse.Namespace) -> Answer[Any]:
    """Return the items of a table.

    Raises:
        AskFailed: there is no answer.
    """
    wanted = selected_pods(args) if args.command == "connections" else None

    def look(pages: Pages) -> tuple[Kind[Any], list[Any]]:
        try:
            return _looked(args, pages)
        except NotAMesh as error:
            raise AskFailed(f"{pages.name}: {error}") from None
        except (TypeError, AttributeError, KeyError) as error:
            raise AskFailed(f"{pages.name}: not a config_dump: {error}") from None

    found = gather(args, look)
    kind = next((kind for kind, _ in found.by_node.values()), TABLES[args.command].kind)
    of_kind = {node: items for node, (other, items) in found.by_node.items() if other is kind}
    silent = [
        *found.silent,
        *(
            Silent(node=node, reason=f"its table is one of {other.name}, not of {kind.name}: query it alone")
            for node, (other, _) in found.by_node.items()
            if other is not kind
        ),
    ]
    if kind in (kinds.WORKLOAD, kinds.SERVICE) and found.across:
        items, across = merged(of_kind), False
    else:
        items, across = items_of(Found(of_kind, found.silent, found.across)), found.across
    if wanted is not None and kind is kinds.CONNECTION:
        items = [item for item in items if (item.namespace, item.pod) in wanted]
    bad = any(isinstance(item, kinds.Fact) and item.severity == "error" for item in items)
    return Answer(kind=kind, items=items, silent=silent, across=across, bad=bad)


def merged(by_node: Mapping[str, Sequence[Any]]) -> list[Any]:
    """Merge the proxies' items about the mesh. If only some nodes report an item, it lists these nodes."""
    seen: dict[bytes, tuple[Any, list[str]]] = {}
    for node, items in by_node.items():
        for item in items:
            seen.setdefault(msgspec.msgpack.encode(item), (item, []))[1].append(node)
    return [
        item if len(nodes) == len(by_node) else msgspec.structs.replace(item, seen_by=tuple(nodes))
        for item, nodes in seen.values()
    ]


def _looked(args: argparse.Namespace, pages: Pages) -> tuple[Kind[Any], list[Any]]:
    """Return the items of one proxy, and their kind. In Envoy's dialect, only some tables exist.

    Raises:
        AskFailed: there is no answer.
        NotAMesh: the answer has no such table.
    """
    if args.command in ("connections", "denials"):
        page = page_or_none(pages, f"/{args.command}", PARAMETERS.get(f"/{args.command}"))
        if page is not None:
            return _of_page(args, pages, page)
    found = pages.json("/config_dump")
    table = ENVOY_TABLES.get(args.command)
    if table is not None and is_envoy_dump(found):
        _refuse_namespace(args, pages)
        needed = _pages_of(args, pages, table, found)
        return table.kind, list(table.items({"/config_dump": found, **needed}))
    return TABLES[args.command].kind, list(TABLES[args.command].items(mesh_dump(found), args.namespace))


def _pages_of(
    args: argparse.Namespace, pages: Pages, table: EnvoyTable, dump: Mapping[str, Any]
) -> Mapping[str, Any]:
    """Return the pages of a running proxy, or of an archive. If an Envoy or a file lacks a page, use the dump."""
    try:
        needed = {path: pages.json(path, PARAMETERS.get(path)) for path in table.paths}
    except AskFailed as error:
        if error.status != NOT_FOUND or (args.command in ("connections", "denials") and not pages.saved):
            raise
        return _saved_pages(args, pages, dump)
    return needed | {path: page_or_none(pages, path, PARAMETERS.get(path)) for path in table.optional}


def _saved_pages(args: argparse.Namespace, pages: Pages, dump: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the table's items from a dump of Envoy's dialect, and report what the dump lacks.

    Raises:
        AskFailed: the file has no such part, or cannot be read.
    """
    from ztunnel.ask.inspect.saved_pages import SAVED_PAGES  # imports Envoy's messages, which take a while

    make = SAVED_PAGES.get(args.command)
    if make is None:
        raise AskFailed(f"{pages.name}: a dump of Envoy's dialect has no {args.command}: ask the running proxy")
    try:
        made, lacks = make(dump, SystemClock())
    except ConfigError as error:
        raise AskFailed(f"{pages.name}: {error}") from None
    for each in lacks:
        complain(f"ztunnel {args.command}: not in the dump: {each}")
    return made


def _of_page(args: argparse.Namespace, pages: Pages, page: Any) -> tuple[Kind[Any], list[Any]]:
    """Return a table from ``/connections`` or ``/denials`` alone, because a whole dump can be large."""
    if args.command == "denials":
        if not isinstance(page, list):
            raise NotAMesh("/denials is not a list")
        return kinds.DENIAL, list(denials(page, args.namespace))
    if not isinstance(page, Mapping):
        raise NotAMesh("/connections is not an object")
    if isinstance(page.get("connections"), list):
        _refuse_namespace(args, pages)
        return kinds.ENVOY_CONNECTION, list(ENVOY_TABLES["connections"].items({"/connections": page}))
    return kinds.CONNECTION, list(TABLES["connections"].items({"workloadState": page}, args.namespace))


def _refuse_namespace(args: argparse.Namespace, pages: Pages) -> None:
    if args.namespace:
        raise AskFailed(f"{pages.name}: namespaces are of an Istio mesh; this proxy has Envoy's dialect")


def _config(args: argparse.Namespace) -> int:
    try:
        if args.file is not None:
            found = saved_proxy(args).json("/config_dump")
            found = part(found, args.part, args.entry) if args.part is not None else found
        else:
            found = _asked(args.address, args.part, args.entry, answer_limit_s(args))
    except AskFailed as error:
        return failed(args, str(error))
    except NoSuchPart as error:
        return failed(args, f"{args.file or args.address}: {error}")
    # Print a single value without quotes, for use in shells, unless an output format is requested.
    if isinstance(found, str) and args.output.for_people:
        print_text(found)
    else:
        emit_object(found, args.output)
    return 0


def _asked(address: str, key: str | None, entry: str, limit_s: float) -> Any:
    """Return a part of a running proxy's dump. Our proxy sends only that part; other proxies send the whole dump.

    Raises:
        AskFailed, NoSuchPart: there is no answer, or no entry of that name.
    """
    if key is None:
        return ask_json(address, "/config_dump", limit_s=limit_s)
    try:
        wanted = {"part": key, **({"name": entry} if entry else {})}
        return part(ask_json(address, "/config_dump", wanted, limit_s=limit_s), key, entry)
    except (NoSuchPart, AskFailed) as error:
        if isinstance(error, AskFailed) and error.status != NOT_FOUND:
            raise
    # The error lists the existing entries.
    return part(ask_json(address, "/config_dump", limit_s=limit_s), key, entry)


def _log(args: argparse.Namespace) -> int:
    def look(pages: Pages) -> str:
        return ask(pages.name, "/logging", {"level": args.level}, method="POST", limit_s=answer_limit_s(args))

    try:
        found = gather(args, look)
    except AskFailed as error:
        return failed(args, str(error))
    if args.output.for_people and not found.across:
        print_text("".join(found.by_node.values()), end="")
        return 0
    levels = {
        node: [kinds.LogLevel(target=target, level=level) for target, level in _levels(page).items()]
        for node, page in found.by_node.items()
    }
    items = items_of(Found(levels, found.silent, found.across))
    return emit(Answer(kind=kinds.LOG_LEVEL, items=items, silent=found.silent, across=found.across), args.output)


def _levels(page: str) -> Mapping[str, str]:
    """Return the log levels that ``/logging`` shows: by target of the log filter, or in Envoy's dialect by
    logger.
    """
    _, current, text = page.partition("current log level is ")
    if current:
        clauses = [clause.rpartition("=") for clause in text.strip().split(",")]
        return {target or "default": level for target, _, level in clauses}
    lines = [line.strip().partition(": ") for line in page.splitlines()[1:]]
    return {logger: level for logger, _, level in lines if level}


def _completion(args: argparse.Namespace) -> int:
    print(SCRIPTS[args.shell], end="")
    return 0
