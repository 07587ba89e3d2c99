"""The command ``ztunnel bug-report``.

Exit status: 0; 2 if a node did not answer, which the archive's index names, or if there is no archive.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import secrets
import tarfile
import time
from collections.abc import Mapping
from contextlib import ExitStack
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

from ztunnel import __version__
from ztunnel.ask.check.catalogue import CATALOGUE
from ztunnel.ask.check.command import answer_of
from ztunnel.ask.check.gather import ask_agents, gather_facts
from ztunnel.ask.check.rules.model import Facts, run
from ztunnel.ask.inspect.source import (
    ADDRESS,
    AskFailed,
    add_address,
    add_cluster,
    answer_limit_s,
    chose_one,
    failed,
)
from ztunnel.ask.report.collect import Bounds, Collected, collect
from ztunnel.ask.report.scrub import Redaction, names_in, names_in_text, names_of, reduced, scrub
from ztunnel.runtime.console.output import document
from ztunnel.runtime.console.terminal import complain
from ztunnel.runtime.settings import duration_s, plain_reason

_LIMIT: Final = "5m"
_MAX_BYTES: Final = 1 << 30


def add_arguments(subparsers: Any) -> None:
    """Add ``bug-report`` to ``argparse``'s sub-commands; ``args.run`` becomes :func:`run_command`."""
    command = subparsers.add_parser(
        "bug-report",
        help="write one archive for a ticket, from all nodes",
        description="Collect dumps, metrics twice, checks, flows, denials, logs now and before a restart, kernel "
        "facts, objects and versions from all nodes at once. The archive has no keys and no tokens; --redact also "
        "replaces names and addresses. Every reading command takes it by --file.",
    )
    command.add_argument(
        "archive", nargs="?", metavar="FILE", help="the archive (default ztunnel-report-TIME.tar.gz)"
    )
    where = command.add_argument_group("the proxies that are asked (default: all)").add_mutually_exclusive_group()
    where.add_argument("--node", metavar="NAME", help="collect from the proxy of this node only")
    where.add_argument("--pod", metavar="NAME.NAMESPACE", help="collect from this pod's proxy only")
    add_address(where, ADDRESS, "collect from this admin server only")
    command.add_argument(
        "--stats-address", default="", metavar="HOST:PORT", help="with --address: the server of the metrics page"
    )
    command.add_argument(
        "--quick", action="store_true", help="read metrics only once, and only a tenth of the logs"
    )
    command.add_argument(
        "--since",
        default="",
        metavar="DURATION",
        help="collect only log lines that are not older than this, such as 1h",
    )
    command.add_argument(
        "--limit", default=_LIMIT, metavar="DURATION", help=f"stop after this time (default {_LIMIT})"
    )
    command.add_argument("--redact", action="store_true", help="replace names and addresses")
    command.add_argument("--no-cluster", action="store_true", help="do not query the API server")
    add_cluster(command)
    command.set_defaults(run=run_command, file=None)


def run_command(args: argparse.Namespace) -> int:
    """Write the archive and return the exit status."""
    args.all_nodes = not chose_one(args)
    args.agents = ask_agents(args) if args.all_nodes else {}
    try:
        until_s = time.monotonic() + duration_s(args.limit)
        bounds = Bounds(until_s=until_s, since=args.since, quick=args.quick, answer_s=answer_limit_s(args))
    except ValueError as error:
        return failed(args, f"--limit {args.limit}: {error}")
    moment = datetime.now(UTC)
    path = Path(args.archive or f"ztunnel-report-{moment:%Y%m%d-%H%M%S}.tar.gz")
    try:
        with Writer(path, redact=args.redact) as writer:
            silent = write(args, bounds, writer)
    except AskFailed as error:
        return failed(args, str(error))
    except OSError as error:
        return failed(args, plain_reason(error))
    for node, reason in silent.items():
        complain(f"no answer from node {node}: {reason}")
    print(f"{path}: {writer.files} files of {len(writer.nodes)} nodes, {os.path.getsize(path)} bytes")
    return 2 if silent else 0


def write(args: argparse.Namespace, bounds: Bounds, writer: Writer) -> dict[str, str]:
    """Collect and write the archive. Return the nodes that did not answer, with the reason."""
    facts = gather_facts(args, before=False)
    cluster: Mapping[str, Any] = {
        kind: items for kind, items in facts.objects.items() if not isinstance(items, str)
    }
    writer.learn(facts, cluster)
    results = document(answer_of(run(CATALOGUE, facts), facts.silent))
    for kind, items in cluster.items():
        writer.add(f"objects/{kind}.json", json.dumps({"items": reduced(list(items))}, indent=1))
    writer.add("checks.json", json.dumps(results, indent=1))
    silent = collect(args, bounds, writer.node)
    writer.add(
        "index.json",
        json.dumps(
            {
                "time": f"{datetime.fromtimestamp(facts.now_s, UTC):%Y-%m-%dT%H:%M:%SZ}",
                "program": {"version": __version__},
                "kubernetes": facts.version,
                "clusterError": facts.cluster_error,
                "silent": [{"node": node, "reason": reason} for node, reason in silent.items()],
                "missing": writer.missing,
                "redacted": args.redact,
                "files": writer.sizes,
            },
            indent=1,
        ),
    )
    return silent


class Writer:
    """Writes an archive while entered. All content passes through :func:`~ztunnel.ask.report.scrub.scrub`.

    The file appears only when the archive is complete; until then, an earlier file of this name stays. After an
    exception, such as Ctrl-C or a full disk, no part of the archive is left. Output to a device or pipe is written
    directly.

    Attributes:
        files: number of files.
        nodes: nodes that have files.
        sizes: bytes by file.
        missing: missing files by node.
    """

    def __init__(self, path: Path, *, redact: bool) -> None:
        self._path = path.resolve()
        self._part: Path | None = None
        self._redact = redact
        self._redaction: Redaction | None = None
        self._folder = path.name.partition(".")[0]
        self._stack = ExitStack()
        self._tar: tarfile.TarFile | None = None
        self._total = 0
        self.files = 0
        self.nodes: list[str] = []
        self.sizes: dict[str, int] = {}
        self.missing: dict[str, list[str]] = {}

    def __enter__(self) -> Writer:
        if self._path.is_file() or not self._path.exists():
            self._part = self._path.with_name(f".{self._path.name}.{os.getpid()}.part")
        descriptor = os.open(self._part or self._path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        file = self._stack.enter_context(os.fdopen(descriptor, "wb"))
        self._tar = self._stack.enter_context(tarfile.open(fileobj=file, mode="w:gz"))
        return self

    def __exit__(self, kind: type[BaseException] | None, *exception: object) -> None:
        try:
            self._stack.close()
            if self._part is not None and kind is None:
                self._part.replace(self._path)
        finally:
            if self._part is not None:
                self._part.unlink(missing_ok=True)

    def learn(self, facts: Facts, objects: Mapping[str, Any]) -> None:
        """Add names that the redaction must replace."""
        if self._redact:
            names = {name for node in facts.nodes.values() for name in names_in(node.dump or {})}
            names |= {name for items in objects.values() for name in names_of(items)} | set(facts.nodes)
            self._redaction = Redaction(secrets.token_bytes(32), names)

    def node(self, name: str, found: Collected) -> None:
        """Add the files of a node."""
        if self._redaction is not None:
            for text in found.files.values():
                self._redaction.learn(names_in_text(text))
        shown = self._redaction.name(name) if self._redaction is not None else name
        shown = shown.replace("/", ".") or "node"
        self.nodes.append(shown)
        for path, text in found.files.items():
            self.add(f"nodes/{shown}/{path}", text)
        if found.missing:
            self.missing[shown] = found.missing

    def add(self, path: str, text: str) -> None:
        """Add a file. Beyond the archive's size limit, the index lists it as missing instead."""
        assert self._tar is not None
        text = scrub(text)
        if self._redaction is not None:
            text = self._redaction.page(text)
        data = text.encode()
        if self._total + len(data) > _MAX_BYTES and path != "index.json":
            self.missing.setdefault("", []).append(f"{path}: the archive is full")
            return
        self._total += len(data)
        entry = tarfile.TarInfo(f"{self._folder}/{path}")
        entry.size, entry.mtime, entry.mode = len(data), int(time.time()), 0o600
        self._tar.addfile(entry, io.BytesIO(data))
        self.files += 1
        self.sizes[path] = len(data)
