"""The command ``ztunnel flows``.

Exit status: 0; 2 if a proxy does not answer or the command line is wrong.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Final

import msgspec

from ztunnel.ask.flows.model import FLOW, VERDICTS, BadFilter, Filter, Flow, Test, chosen, make, read
from ztunnel.ask.inspect.ages import time_ns
from ztunnel.ask.inspect.fleet import Found, gather, gather_by_node
from ztunnel.ask.inspect.source import AskFailed, Pages, add_source, failed
from ztunnel.ask.inspect.watch import check_form
from ztunnel.runtime.console.arguments import whole_number
from ztunnel.runtime.console.output import Answer, Format, emit, table
from ztunnel.runtime.console.terminal import complain, print_text
from ztunnel.runtime.settings import duration_s

#: The default number of flows, as in ``hubble observe``.
_LAST: Final = 20
#: Seconds between two requests of ``--follow``.
_AGAIN_S: Final = 1.0
#: A time in nanoseconds that is later than any flow's.
_NEVER_NS: Final = 1 << 63
JSONPB: Final = "jsonpb"


def add_arguments(subparsers: Any) -> None:
    """Add ``flows`` to ``argparse``'s sub-commands; ``args.run`` becomes :func:`run`."""
    flows = subparsers.add_parser(
        "flows",
        help="list the last connections that ended, were refused or failed, and follow new ones",
        description="Show the connections in the flight recorders of proxies, or with -f connections that end "
        "from now on. Filters of one kind are alternatives; filters of different kinds must all match; --not "
        "negates the next filter. To use Hubble's filters, run `ztunnel flows -o jsonpb | hubble observe "
        "--input-file -`.",
    )
    add_source(flows, across=True, saved=True, short_file=None, own_pod=True, forms=(JSONPB,))
    flows.add_argument(
        "--last", type=whole_number, metavar="N", help=f"show the last N flows of each proxy (default {_LAST})"
    )
    flows.add_argument(
        "--since", metavar="WHEN", help="connections that ended at or after this time: 5m (ago), or RFC 3339"
    )
    flows.add_argument("--until", metavar="WHEN", help="connections that ended at or before this time")
    flows.add_argument(
        "-f", "--follow", "-w", "--watch", action="store_true", help="print connections as they end"
    )
    flows.add_argument(
        "--why",
        action="store_true",
        help="for refused connections, query the proxy for the clause that decides now",
    )
    flows.add_argument(
        "-n", "--namespace", default="", metavar="NAME", help="show flows with client or server in this namespace"
    )
    filters = flows.add_argument_group(
        "filters: POD is NAMESPACE/PREFIX, an address or block, or a SPIFFE id with *"
    )
    for name, metavar, text in (
        ("from", "POD", "the client"),
        ("to", "POD", "the server"),
        ("pod", "POD", "client or server"),
        ("identity", "ID", "the SPIFFE id of client or server"),
        ("verdict", "VERDICT", ", ".join(VERDICTS).lower()),
        ("port", "PORT", "the port of client or server"),
        ("service", "NAMESPACE/PREFIX", "the service that was called"),
        ("direction", "WAY", "inbound or outbound: reported by the server's or the client's proxy"),
        ("trace", "ID", "the trace id of a traceparent"),
    ):
        filters.add_argument(f"--{name}", action=_Add, metavar=metavar, help=text, dest="filters")
    filters.add_argument("--plain", action=_Add, nargs=0, help="connections without mTLS", dest="filters")
    filters.add_argument("--encrypted", action=_Add, nargs=0, help="connections with mTLS", dest="filters")
    filters.add_argument("--not", action=_Not, nargs=0, help="negate the next filter", dest="filters")
    flows.set_defaults(run=run, filters=[])


class _Add(argparse.Action):
    """Adds a filter from the command line. A preceding ``--not`` negates it."""

    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: Any = None) -> None:
        filters: list[Filter | None] = list(namespace.filters or [])
        negated = bool(filters) and filters[-1] is None
        if negated:
            filters.pop()
        try:
            filters.append(make(str(option_string).lstrip("-"), values or "", negated=negated))
        except BadFilter as error:
            parser.error(str(error))
        namespace.filters = filters


class _Not(argparse.Action):
    """Marks the next filter as negated."""

    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: Any = None) -> None:
        namespace.filters = [*(namespace.filters or []), None]


@dataclass(frozen=True, slots=True)
class Wanted:
    """The flows that a command line selects: a test for flows, two time limits in nanoseconds, and the number per
    proxy.
    """

    test: Test
    since_ns: int
    until_ns: int
    last: int | None


def run(args: argparse.Namespace) -> int:
    """Print flows, and return the exit status."""
    try:
        wanted = _wanted(args, time.time())
        if args.follow:
            if args.file is not None:
                return failed(args, "--follow asks a running proxy: not with --file")
            return follow(args, wanted)
        found = gather(
            args, lambda pages: _explained(pages, look(pages, wanted)) if args.why else look(pages, wanted)
        )
    except (AskFailed, BadFilter) as error:
        return failed(args, str(error))
    lines = _merged(found)
    if args.output.form == JSONPB:
        for _, line in lines:
            print(json.dumps(line))
        return 2 if found.silent else 0
    items = [flow for flow, _ in lines]
    return emit(Answer(kind=FLOW, items=items, silent=found.silent, across=found.across), args.output)


def _wanted(args: argparse.Namespace, now_s: float) -> Wanted:
    filters: list[Filter] = list(args.filters)
    if any(each is None for each in filters):
        raise BadFilter("--not: no filter follows")
    if args.namespace:
        filters.append(make("namespace", args.namespace))
    since_ns, until_ns = (
        moment_ns(text, now_s, name) for text, name in ((args.since, "since"), (args.until, "until"))
    )
    unbounded = args.since is not None or args.until is not None
    last = args.last if args.last is not None else None if unbounded else _LAST
    return Wanted(chosen(filters), since_ns or 0, _NEVER_NS if until_ns is None else until_ns, last)


def moment_ns(text: str | None, now_s: float, name: str) -> int | None:
    """Parse a time: ``5m`` (ago) or RFC 3339. Return it in nanoseconds.

    Raises:
        BadFilter: it is neither.
    """
    if text is None:
        return None
    try:
        return max(0, int((now_s - duration_s(text)) * 1e9))
    except ValueError:
        pass
    try:
        return max(0, int(datetime.fromisoformat(text).timestamp() * 1e9))
    except ValueError:
        raise BadFilter(f"--{name}: neither a duration such as 5m nor a time: {text!r}") from None


Line = tuple[Flow, Mapping[str, Any]]


def look(pages: Pages, wanted: Wanted) -> list[Line]:
    """Return the selected flows of one proxy, the oldest first.

    Raises:
        AskFailed: it does not answer, or has no flight recorder.
    """
    found = _lines_of(pages, wanted, {"after": str(wanted.since_ns)} if wanted.since_ns else None)
    return found if wanted.last is None else found[-wanted.last :] if wanted.last else []


def _lines_of(pages: Pages, wanted: Wanted, parameters: Mapping[str, str | None] | None) -> list[Line]:
    try:
        page = pages.text("/flows", parameters)
    except AskFailed as error:
        if error.status == 404:
            raise AskFailed(f"{pages.name}: it has no flight recorder (/flows)", 404) from None
        raise
    return list(_read(page, wanted, pages.name))


def _read(page: str, wanted: Wanted, name: str) -> Iterator[Line]:
    for text in page.splitlines():
        try:
            line = json.loads(text)
            flow = read(line)
            moment = time_ns(flow.time) if flow is not None else 0
            lost = flow is None and (line.get("lost_events") or {}).get("num_events_lost")
        except (ValueError, TypeError, AttributeError):
            raise AskFailed(f"{name}: /flows has a line that is no flow") from None
        if flow is None:
            if lost:
                print(f"{name}: flows were overwritten before they were read", file=sys.stderr)
        elif wanted.since_ns < moment <= wanted.until_ns and wanted.test(flow):
            yield flow, line


def _explained(pages: Pages, lines: list[Line]) -> list[Line]:
    """To each refused inbound flow, add the clause of the current policies that decides it.

    Flows with the same source, destination and identity share one ``/explain`` request.
    """
    answers: dict[tuple[str, str, str], str | None] = {}

    def clause(flow: Flow) -> str | None:
        identity = flow.source_identity if flow.encrypted and flow.source_identity else ""
        key = (flow.source, f"{flow.destination}:{flow.destination_port}", identity)
        if key not in answers:
            asked = {"source": key[0], "destination": key[1], "direction": "inbound", **_given(identity=identity)}
            try:
                answers[key] = clause_of(pages.json("/explain", asked))
            except AskFailed:
                answers[key] = None
        return answers[key]

    refused = ("DROPPED",)
    return [
        (msgspec.structs.replace(flow, clause=clause(flow)), line)
        if flow.verdict in refused and flow.direction == "inbound"
        else (flow, line)
        for flow, line in lines
    ]


def _given(**values: str) -> dict[str, str]:
    return {name: value for name, value in values.items() if value}


def clause_of(answer: Any) -> str | None:
    """Return the policy clause that causes a refusal: the matching DENY clause, or why no ALLOW policy matches.
    None if the current policies do not refuse the connection.
    """
    inbound = answer.get("inbound") or {} if isinstance(answer, Mapping) else {}
    policies = (inbound.get("policies") or ()) if inbound.get("refused") else ()
    denies = [each for each in policies if each.get("action") == "Deny" and each.get("holds")]
    for each in denies or [each for each in policies if each.get("action") == "Allow" and not each.get("holds")]:
        return f"{each.get('policy')}: {each.get('because')}"
    return None


def _merged(found: Found[list[Line]]) -> list[Line]:
    lines = [
        (msgspec.structs.replace(flow, node=node) if found.across else flow, line)
        for node, of_node in found.by_node.items()
        for flow, line in of_node
    ]
    return sorted(lines, key=lambda each: each[0].time)


def follow(args: argparse.Namespace, wanted: Wanted) -> int:
    """Print flows as they end, until Ctrl-C. Retries a proxy that does not answer."""
    check_form(args.output, JSONPB)
    printer = _Printer(args.output)
    start_ns = wanted.since_ns or int(time.time() * 1e9)
    newest: dict[str, int] = {}  # by node: clocks differ, and a quiet node must not repeat the flows of others
    failure = ""
    first = True

    def fresh(node: str, pages: Pages) -> list[Line]:
        if first and not wanted.since_ns:
            # The clock of this machine can differ from the node's: new flows are those after the newest one.
            newest[node] = max(
                (time_ns(flow.time) for flow, _ in _lines_of(pages, _EVERY, {"last": "1"})), default=0
            )
            return []
        # Also request the flows that the filters hide. Otherwise each request would return them again, and the
        # proxy would report flows as overwritten that were already read.
        lines = look(pages, Wanted(_any_flow, newest.get(node, start_ns), wanted.until_ns, None))
        if lines:
            newest[node] = max(time_ns(flow.time) for flow, _ in lines)
        chosen = [each for each in lines if wanted.test(each[0])]
        return _explained(pages, chosen) if args.why else chosen

    try:
        while True:
            try:
                found = gather_by_node(args, fresh)
            except AskFailed as error:
                if first or error.status == 404:
                    raise
                reason, found = str(error), Found({})
            else:
                reason = "; ".join(f"node {each.node}: {each.reason}" for each in found.silent)
            first = False
            if reason and reason != failure:
                complain(f"ztunnel flows: {reason}; waiting")
            failure = reason
            printer.show(_merged(found), across=found.across)
            time.sleep(_AGAIN_S)
    except (KeyboardInterrupt, BrokenPipeError):
        return 0


def _any_flow(flow: Flow) -> bool:
    return True


_EVERY: Final = Wanted(_any_flow, 0, _NEVER_NS, None)


class _Printer:
    """Prints flows as lines of a table. Columns become wider when needed, and never narrower."""

    def __init__(self, form: Format) -> None:
        self._form = form
        self._widths: list[int] = []

    def show(self, lines: Sequence[Line], *, across: bool) -> None:
        if not lines:
            return
        if self._form.form == JSONPB:
            for _, line in lines:
                print(json.dumps(line), flush=True)
            return
        if not self._form.for_people:
            for flow, _ in lines:
                print_text(msgspec.json.encode(flow).decode(), flush=True)
            return
        answer = Answer(kind=FLOW, items=[flow for flow, _ in lines], across=across)
        rows = table(answer, wide=self._form.form == "wide")
        shown = rows if not self._widths else rows[1:]
        before = self._widths or [0] * len(rows[0])
        self._widths = [max(width, *(len(row[place]) for row in rows)) for place, width in enumerate(before)]
        for row in shown:
            cells = (cell.ljust(width) for cell, width in zip(row, self._widths, strict=True))
            print_text("  ".join(cells).rstrip(), flush=True)
