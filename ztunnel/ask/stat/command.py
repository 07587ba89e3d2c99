"""The commands ``ztunnel stat``, ``top`` and ``edges``.

Exit status: 0; 1 if ``edges --fail-on plain`` finds an unencrypted pair; 2 if a proxy does not answer.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Mapping
from typing import Any, Final, NamedTuple, TypeVar

from ztunnel.ask.inspect.ages import time_ns
from ztunnel.ask.inspect.fleet import Found, gather, gather_by_node
from ztunnel.ask.inspect.source import AskFailed, Pages, add_source, failed, query_all_by_default
from ztunnel.ask.inspect.watch import add_watch, watch
from ztunnel.ask.stat.graph import dot
from ztunnel.ask.stat.traffic import (
    EDGE,
    STAT,
    Counted,
    CountedFlow,
    Edge,
    NodeReadings,
    PairKey,
    Reading,
    edges,
    flow_of,
    pairs,
    plain_because,
    reading,
    stats,
)
from ztunnel.runtime.console.output import Answer, Silent, emit
from ztunnel.runtime.console.terminal import complain, print_text
from ztunnel.runtime.settings import duration_s

#: The default number of seconds between two readings, also of the readings in an archive.
_WINDOW: Final = "10s"
_ARCHIVED_S: Final = 10.0
#: The least number of seconds between two tables of ``top``.
_LEAST_S: Final = 1.0
_NOT_FOUND: Final = 404
DOT: Final = "dot"
T = TypeVar("T")


def add_arguments(subparsers: Any) -> None:
    """Add the commands to ``argparse``'s sub-commands; ``args.run`` runs one."""
    for name, text in (
        ("stat", "show connections, failures, denials, bytes and times by workload"),
        ("top", "show stat, redrawn continuously"),
        ("edges", "show pairs of workloads with connections, and whether they use mTLS"),
    ):
        command = subparsers.add_parser(
            name,
            help=text,
            description=f"{text[0].upper()}{text[1:]}. The figures are from two readings of all metrics, and "
            "from the flight recorders; Prometheus is not needed.",
        )
        add_source(command, across=True, all_by_default=True, saved=True, forms=(DOT,) if name == "edges" else ())
        command.add_argument(
            "-n",
            "--namespace",
            default="",
            metavar="NAME",
            help="show pairs with client or server in this namespace",
        )
        command.add_argument(
            *("-t", "--window"),
            default=_WINDOW,
            metavar="DURATION",
            help=f"time between the two readings (default {_WINDOW})",
        )
        command.add_argument(
            "--total", action="store_true", help="show totals since the proxies started, from one reading"
        )
        if name == "edges":
            command.add_argument("--fail-on", choices=("plain",), help="exit with 1 if a pair is not encrypted")
        else:
            command.add_argument(
                "--by",
                choices=("destination", "source"),
                default="destination",
                help="list clients (source) or servers (destination)",
            )
        if name == "stat":
            add_watch(command)
        command.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Measure the traffic, print it, and return the exit status."""
    query_all_by_default(args)
    try:
        window_s = duration_s(args.window)
    except ValueError as error:
        return failed(args, f"--window {args.window}: {error}")
    try:
        if args.command == "top":
            measured_s = 0.0 if args.total else window_s  # the time that each table takes
            return watch(
                lambda: _answer(args, window_s),
                max(_LEAST_S, measured_s),
                args.output,
                command=args.command,
                pause=lambda seconds: time.sleep(max(0.0, seconds - measured_s)),
            )
        if getattr(args, "watch", None) is not None:
            return watch(lambda: _answer(args, window_s), args.watch, args.output, command=args.command)
        answer = _answer(args, window_s)
        if args.output.form != DOT:
            return emit(answer, args.output)
        print_text("\n".join(dot(answer.items)))
        for silent in answer.silent:
            complain(f"no answer from node {silent.node}: {silent.reason}")
        return answer.status
    except AskFailed as error:
        return failed(args, str(error))


def _answer(args: argparse.Namespace, window_s: float) -> Answer[Any]:
    found, window_s, silent = measured(args, window_s)
    if args.namespace:
        found = {key: each for key, each in found.items() if args.namespace in (key.source[0], key.destination[0])}
    if args.command != "edges":
        return Answer(kind=STAT, items=list(stats(found, window_s, by=args.by)), silent=silent)
    plain = any(not key.secured for key in found)
    items: list[Edge] = list(edges(found, window_s, _why(args) if plain else lambda key: ""))
    summary = {
        "pairs": len(items),
        "plain": sum(1 for each in items if each.security == "plain"),
        "windowSeconds": window_s,
    }
    notes = ["", f"{summary['pairs']} pairs, {summary['plain']} of them plain"] if items else []
    bad = args.fail_on == "plain" and bool(summary["plain"])
    return Answer(kind=EDGE, items=items, silent=silent, bad=bad, notes=notes, summary=summary)


def measured(args: argparse.Namespace, window_s: float) -> tuple[dict[PairKey, Counted], float, list[Silent]]:
    """Return traffic by pair, the window in seconds, and silent nodes.

    Raises:
        AskFailed: no proxy answers.
    """
    if args.file is not None:
        return _of_archive(args)
    began_s = time.time()
    if args.total:
        totals = gather(args, lambda pages: NodeReadings(before={}, after=_metrics(pages), flows=_flows(pages, 0)))
        return pairs(totals.by_node.values()), 0.0, list(totals.silent)
    # The clock of this machine can differ from a node's: the window's flows are those after its newest one.
    first: Found[tuple[Reading, int]] = gather(args, lambda pages: (_metrics(pages), _newest_ns(pages)))
    time.sleep(max(0.0, window_s - (time.time() - began_s)))

    def later(node: str, pages: Pages) -> tuple[Reading, list[CountedFlow]]:
        before = first.by_node.get(node)
        return _metrics(pages), _flows(pages, before[1]) if before is not None else []

    second = gather_by_node(args, later)
    both = [
        NodeReadings(before=first.by_node[node][0], after=after, flows=flows)
        for node, (after, flows) in second.by_node.items()
        if node in first.by_node
    ]
    silent = {each.node: each for each in (*first.silent, *second.silent)}
    return pairs(both), round(time.time() - began_s, 1), list(silent.values())


def _of_archive(args: argparse.Namespace) -> tuple[dict[PairKey, Counted], float, list[Silent]]:
    """Return the traffic in an archive like :func:`measured`: between its two readings, or the totals if no node
    has a second reading (``bug-report --quick``).
    """
    archived = gather(args, _archived)
    several = any(each.before is not None for each in archived.by_node.values())
    if args.total or not several:
        totals = [
            NodeReadings(before={}, after=each.after, flows=each.flows) for each in archived.by_node.values()
        ]
        return pairs(totals), 0.0, list(archived.silent)
    both = [
        NodeReadings(before=each.before, after=each.after, flows=each.flows)
        for each in archived.by_node.values()
        if each.before is not None
    ]
    once = [
        Silent(node=node, reason="the archive has one reading of its metrics; --total shows it")
        for node, each in archived.by_node.items()
        if each.before is None
    ]
    return pairs(both), _ARCHIVED_S, [*archived.silent, *once]


class _Archived(NamedTuple):
    """The readings of one node in an archive. ``before`` is ``None`` if there is only one."""

    before: Reading | None
    after: Reading
    flows: list[CountedFlow]


def _archived(pages: Pages) -> _Archived:
    first, flows = reading(pages.text("/metrics")), _flows(pages, 0)
    try:
        return _Archived(first, reading(pages.text("/metrics_later")), flows)
    except AskFailed:
        return _Archived(None, first, flows)


def _metrics(pages: Pages) -> Reading:
    try:
        return reading(pages.text("/metrics"))
    except AskFailed as error:
        if error.status == _NOT_FOUND:
            raise AskFailed(
                f"{pages.name}: its admin server has no /metrics: not a proxy of an Istio mesh of this project",
                _NOT_FOUND,
            ) from None
        raise


def _flows(pages: Pages, after_ns: int) -> list[CountedFlow]:
    return _read_flows(pages, {"after": str(after_ns)} if after_ns else None, flow_of)


def _newest_ns(pages: Pages) -> int:
    """Return the time of a proxy's newest flow; 0 if it has none."""
    return max(_read_flows(pages, {"last": "1"}, lambda line: time_ns(str(line["flow"]["time"]))), default=0)


def _read_flows(
    pages: Pages, parameters: Mapping[str, str | None] | None, read: Callable[[Mapping[str, Any]], T]
) -> list[T]:
    try:
        page = pages.text("/flows", parameters)
    except AskFailed as error:
        if error.status == _NOT_FOUND:
            return []
        raise
    try:
        lines = [json.loads(line) for line in page.splitlines()]
        return [read(line) for line in lines if isinstance(line.get("flow"), Mapping)]
    except (ValueError, TypeError, AttributeError, KeyError):
        raise AskFailed(f"{pages.name}: /flows has a line that is no flow") from None


def _why(args: argparse.Namespace) -> Callable[[PairKey], str]:
    """Return a function that explains why a pair uses plain text, from the mesh of one proxy."""
    try:
        found = gather(args, lambda pages: plain_because(_workloads(pages)))
    except AskFailed:  # the traffic is known all the same
        return lambda key: ""
    return next(iter(found.by_node.values()), lambda key: "")


def _workloads(pages: Pages) -> Mapping[str, Any]:
    dump = pages.json("/config_dump")
    return {"workloads": dump.get("workloads")} if isinstance(dump, Mapping) else {}
