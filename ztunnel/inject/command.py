"""``ztunnel inject -f FILE``, and ``ztunnel gate``."""

import argparse
import sys
from pathlib import Path
from typing import Any


def add_arguments(subparsers: Any) -> None:
    """Add ``inject`` and ``gate`` to ``argparse``'s sub-commands."""
    text = "add to the pods of a file what puts them into the mesh, and print the file"
    parser: argparse.ArgumentParser = subparsers.add_parser("inject", help=text, description=text)
    parser.add_argument(
        "-f",
        "--file",
        metavar="FILE",
        help="YAML of pods, workloads, lists and anything else; - is standard input",
    )
    parser.add_argument(
        "--config", type=Path, metavar="FILE", help="the injector's configuration; default: ambient"
    )
    parser.add_argument(
        "-n", "--namespace", default="default", metavar="NAME", help="of objects that name none (default default)"
    )
    parser.set_defaults(run=run)
    text = "wait until the mesh's listeners are in this pod; the first init container of an injected pod"
    gate: argparse.ArgumentParser = subparsers.add_parser("gate", help=text, description=text)
    gate.add_argument(
        "--timeout",
        type=float,
        default=60.0,
        metavar="SECONDS",
        help="then fail, and be started anew (default 60)",
    )
    gate.add_argument("--fail-open", action="store_true", help="after that time let the application start anyway")
    gate.set_defaults(run=run_gate)


def run_gate(args: argparse.Namespace) -> int:
    """Wait; the exit status."""
    from ztunnel.inject.gate import wait

    return wait(args.timeout, fail_open=args.fail_open)


def run(args: argparse.Namespace) -> int:
    """Print the injected documents; the exit status. Nothing is printed if any of them cannot be injected."""
    import yaml

    from ztunnel.inject.config import ConfigFaults, InjectConfig, parse_config
    from ztunnel.inject.manual import BadDocument, inject_documents
    from ztunnel.runtime.settings import plain_reason

    if args.file is None:
        print("ztunnel inject: needs -f FILE", file=sys.stderr)
        return 2
    notes: list[str] = []
    try:
        config = InjectConfig() if args.config is None else parse_config(args.config.read_text())
        source = sys.stdin.read() if args.file == "-" else Path(args.file).read_text()
        documents = list(inject_documents(yaml.safe_load_all(source), args.namespace, config, notes))
    except ConfigFaults as error:
        for fault in error.faults:
            print(f"ztunnel inject: {args.config}: {fault}", file=sys.stderr)
        return 1
    except yaml.YAMLError as error:
        print(f"ztunnel inject: {args.file}: {' '.join(str(error).split())}", file=sys.stderr)
        return 1
    except (BadDocument, OSError, UnicodeDecodeError) as error:
        reason = plain_reason(error) if isinstance(error, OSError) else f"{args.file}: {error}"
        print(f"ztunnel inject: {reason}", file=sys.stderr)
        return 1
    yaml.safe_dump_all(documents, sys.stdout, sort_keys=False, default_flow_style=False)
    for note in notes:
        print(note, file=sys.stderr)
    return 0
