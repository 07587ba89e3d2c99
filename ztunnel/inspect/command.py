"""The commands that ask a running proxy through its admin server.

Exit status: 0; 1 where ``explain`` says that a connection would be refused; 2 when there is no answer.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from typing import Any, Final

from ztunnel.inspect.completion import SCRIPTS
from ztunnel.inspect.outline import outline
from ztunnel.inspect.source import AskFailed, ask, ask_json, read_json
from ztunnel.inspect.tables import ENVOY_PAGES, TABLES, NotAMesh, Row, is_envoy_dump, mesh_dump
from ztunnel.runtime.text_table import aligned

ADDRESS: Final = "127.0.0.1:15000"


def add_arguments(subparsers: Any) -> None:
    """Add the commands to ``argparse``'s sub-commands; ``args.run`` runs one."""
    for name, kind in TABLES.items():
        table = subparsers.add_parser(
            name, help=kind.help, description=f"{kind.help.capitalize()} of a running proxy."
        )
        _add_source(table)
        table.add_argument("-f", "--file", metavar="FILE", help="a saved config_dump instead; - is standard input")
        table.add_argument("-n", "--namespace", default="", metavar="NAME", help="only what belongs to it")
        table.set_defaults(run=_table)
    explain = subparsers.add_parser(
        "explain",
        help="say what would become of a connection, and why",
        description="Ask a running proxy what would become of a connection: route, endpoints, tunnel, policies.",
    )
    explain.add_argument("source", metavar="SOURCE", help="an address; in an Istio mesh also NAMESPACE/POD")
    explain.add_argument(
        "destination",
        metavar="DESTINATION",
        help="ADDRESS:PORT; in an Istio mesh also SERVICE.NAMESPACE:PORT and NAMESPACE/POD:PORT",
    )
    explain.add_argument(
        "--identity", metavar="ID", help="SPIFFE id that the client shows, if not the source's own"
    )
    explain.add_argument("--listener", metavar="NAME", help="that accepts it (Envoy's dialect)")
    _add_source(explain)
    explain.set_defaults(run=_explain)
    log = subparsers.add_parser("log", help="show or set the level of a running proxy's log")
    log.add_argument("level", nargs="?", help="such as debug; without it the levels are shown")
    log.add_argument(
        "--address", default=ADDRESS, metavar="HOST:PORT", help=f"of the admin server (default {ADDRESS})"
    )
    log.set_defaults(run=_log)
    completion = subparsers.add_parser(
        "completion",
        help="print what lets a shell complete command lines",
        description="Print a script for a shell: `source <(ztunnel completion bash)` in ~/.bashrc, the same in "
        "~/.zshrc, `ztunnel completion fish > ~/.config/fish/completions/ztunnel.fish`.",
    )
    completion.add_argument("shell", choices=SCRIPTS)
    completion.set_defaults(run=_completion)


def _add_source(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--address",
        default=ADDRESS,
        metavar="HOST:PORT",
        help=f"of the proxy's admin server (default {ADDRESS})",
    )
    parser.add_argument("--json", action="store_true", help="print JSON")


def _table(args: argparse.Namespace) -> int:
    try:
        rows = _rows(args)
    except AskFailed as error:
        return _failed(args, str(error))
    except NotAMesh as error:
        return _failed(args, f"{args.file or args.address}: {error}")
    except (TypeError, AttributeError, KeyError) as error:
        return _failed(args, f"{args.file or args.address}: not a config_dump: {error}")
    if not args.json:
        print("\n".join(aligned(rows)))
    elif args.command == "status":
        print(json.dumps([{"name": name, "state": state} for name, state in rows], indent=2))
    else:
        heading, *others = rows
        names = [name.lower().replace(" ", "_") for name in heading]
        print(json.dumps([dict(zip(names, row, strict=True)) for row in others], indent=2))
    return 0


def _rows(args: argparse.Namespace) -> Sequence[Row]:
    """Return the rows of a table; a proxy in Envoy's dialect has some of them.

    Raises:
        AskFailed: there is no answer.
        NotAMesh: the answer has no such table.
    """
    found = read_json(args.file) if args.file is not None else ask_json(args.address, "/config_dump")
    page = ENVOY_PAGES.get(args.command)
    if args.file is None and page is not None and is_envoy_dump(found):
        return list(page.rows(ask_json(args.address, page.path)))
    return list(TABLES[args.command].rows(mesh_dump(found), args.namespace))


def _explain(args: argparse.Namespace) -> int:
    asked = {name: getattr(args, name) for name in ("source", "destination", "identity", "listener")}
    try:
        answer = ask_json(args.address, "/explain", asked)
    except AskFailed as error:
        return _failed(args, str(error))
    print(json.dumps(answer, indent=2) if args.json else "\n".join(outline(answer)))
    return 1 if _is_refusal(answer) else 0


def _is_refusal(answer: Any) -> bool:
    """Return whether an answer has a verdict that is not "allowed"; in Envoy's dialect the first hop has it."""
    verdict = answer.get("verdict") or answer.get("hop", {}).get("verdict", "allowed")
    return not verdict.startswith("allowed")


def _log(args: argparse.Namespace) -> int:
    try:
        print(ask(args.address, "/logging", {"level": args.level}, method="POST"), end="")
    except AskFailed as error:
        return _failed(args, str(error))
    return 0


def _completion(args: argparse.Namespace) -> int:
    print(SCRIPTS[args.shell], end="")
    return 0


def _failed(args: argparse.Namespace, reason: str) -> int:
    print(f"ztunnel {args.command}: {reason}", file=sys.stderr)
    return 2
