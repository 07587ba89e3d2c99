"""``ztunnel explain``: how a proxy would handle a connection, or why it handled one as it did.

Exit status: 0 if every connection would be allowed; 1 if one would be refused; 2 if one has no answer.
"""

import argparse
import io
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

from ztunnel.ask.inspect.fleet import saved_proxy
from ztunnel.ask.inspect.outline import outline
from ztunnel.ask.inspect.seen import BadLine, Seen, line_of_flow, live, logged, told_of
from ztunnel.ask.inspect.source import (
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
from ztunnel.ask.inspect.tables import NotAMesh, is_envoy_dump, mesh_dump
from ztunnel.proxy.envoy.path.verdict import verdict_of
from ztunnel.runtime.console.arguments import add_flags
from ztunnel.runtime.console.output import API_VERSION, emit_object
from ztunnel.runtime.console.terminal import print_outline

if TYPE_CHECKING:
    from ztunnel.ask.inspect.saved import SavedMesh
    from ztunnel.ask.inspect.saved_envoy import SavedEnvoy

Answer = dict[str, Any]

_NOT_FOUND: Final = 404


def add_arguments(subparsers: Any) -> None:
    """Add ``explain`` to ``argparse``'s sub-commands; ``args.run`` becomes :func:`run`."""
    explain = subparsers.add_parser(
        "explain",
        help="explain what a proxy would do with a connection",
        usage="%(prog)s [OPTION...] (SOURCE DESTINATION | --connection CONNECTION | --log-line LINE | --flow ID)",
        description="Show what a running proxy would do with a connection: route, endpoints, tunnel, policies. "
        "For a live or logged connection, it shows the decision of the current configuration, and the route that "
        "the connection took. The exit status is 1 if a connection would be refused, and 2 without an answer.",
    )
    add_flags(
        explain,
        ("source", "SOURCE", "an address; in an Istio mesh also NAMESPACE/POD or a SPIFFE id", {"nargs": "?"}),
        ("destination", "DESTINATION",
         "ADDRESS:PORT; in an Istio mesh also SERVICE.NAMESPACE[:PORT] and NAMESPACE/POD:PORT", {"nargs": "?"}),
        ("--from", "SOURCE", "the same as SOURCE", {"dest": "given_source"}),
        ("--to", "DESTINATION", "the same as DESTINATION", {"dest": "given_destination"}),
        ("--connection", "SRC:PORT[-DST:PORT]",
         "a live connection, as shown by `ztunnel connections`; in Envoy's dialect also its id"),
        ("--log-line", "LINE", "a line of the access log; - reads lines from standard input"),
        ("--flow", "ID", "a flow's id, as shown by `ztunnel flows -o wide`, or its line of JSON"),
        ("--identity", "ID", "SPIFFE id that the client presents, if it is not the source's own"),
        ("--listener", "NAME", "the listener that accepts the connection (Envoy's dialect)"),
        ("--far", "HOST:PORT",
         "admin server of another node's proxy, which adds its verdict about tunnels that end there "
         "(Envoy's dialect; in an Istio mesh each proxy knows all policies); repeatable",
         {"action": "append", "default": []}),
    )  # fmt: skip
    add_source(explain, saved=True)
    explain.set_defaults(run=reaching(run))


def run(args: argparse.Namespace) -> int:
    """Print the answer to the question on the command line, and return the exit status."""
    words = [each for each in (args.source, args.destination) if each is not None]
    # Positional arguments, in order, give the values that no flag gives.
    args.source = args.given_source or (words.pop(0) if words else None)
    args.destination = args.given_destination or (words.pop(0) if words else None)
    ways = tuple(each is not None for each in (args.source, args.connection, args.log_line, args.flow))
    if words or sum(ways) != 1 or (args.source is None) != (args.destination is None):
        return failed(args, "give SOURCE and DESTINATION, or --connection, --log-line or --flow; see --help")
    if args.file == "-" and args.log_line == "-":
        return failed(args, "standard input is either --file or --log-line")
    try:
        asked = _Answers(args)
        if args.source is not None:
            answers = [asked.ask({"source": args.source, "destination": args.destination})]
        else:
            answers = list(_of_seen(args, asked))
    except AskFailed as error:
        return failed(args, str(error))
    except (TypeError, AttributeError, KeyError) as error:  # JSON of another shape
        return failed(args, f"{args.file or args.address}: not a page or dump of a proxy: {error}")
    if args.source is not None:
        _print(args, answers[0], answers)
    else:
        _print(args, answers, answers)
    if any("no_answer" in answer for answer in answers):
        return 2
    return 1 if any(map(_is_refusal, answers)) else 0


class _Answers:
    """Answers questions from a running proxy's ``/explain``, or from a dump: a saved one, or that of a proxy
    without this page.
    """

    def __init__(self, args: argparse.Namespace) -> None:
        self._address = args.address
        self._limit_s = answer_limit_s(args)
        self._file = args.file
        self._given = {"identity": args.identity, "listener": args.listener}
        self._far: Sequence[str] = args.far
        self._dump: Mapping[str, Any] = {}
        self._identity_at: Mapping[str, str] = {}
        self._saved: SavedMesh | SavedEnvoy | None = None
        self._pages: Pages | None = saved_proxy(args) if args.file is not None else None
        if self._pages is not None:
            self._read(self._pages.json("/config_dump"))

    def ask(self, question: Mapping[str, str]) -> Answer:
        """Return the answer to the parameters of ``/explain``.

        Raises:
            AskFailed: there is no answer. ``status`` is not 0 if another question could still get one.
        """
        asked = {**{name: value for name, value in self._given.items() if value}, **question}
        answer = self._near(asked)
        if "hop" in answer and self._far:
            for end in _tunnel_ends(answer["hop"]):
                self._ask_far(answer["source"], end)
            answer["verdict"] = verdict_of(answer["hop"])
        return answer

    def _near(self, asked: Mapping[str, str]) -> Answer:
        if self._saved is None:
            try:
                answer: Answer = ask_json(self._address, "/explain", asked, limit_s=self._limit_s)
            except AskFailed as error:
                if error.status != _NOT_FOUND or not self._has_no_page(error):
                    raise
            else:
                return answer
        assert self._saved is not None
        try:
            return self._saved.ask(asked)
        except ValueError as error:  # a BadQuestion; each dialect defines its own class
            raise AskFailed(str(error), status=400) from None

    def _ask_far(self, source: str, end: Answer) -> None:
        """Add the answer of the proxy that terminates a tunnel, on the node of the destination pod."""
        asked = {
            "source": source,
            "destination": end["tunnel"]["authority"],
            "identity": end["tls"]["identity"][0],
        }
        for address in self._far:
            told = ask_json(address, "/explain", asked, limit_s=self._limit_s)
            if "tls" in told.get("hop", {}):
                end["inbound"] = told["hop"]
                return

    def live(self, wanted: str) -> Iterator[Seen]:
        """Yield the live connections that the command line selects.

        Raises:
            AskFailed: the proxy has no table of connections.
        """
        if self._saved is None:
            try:
                return live(ask_json(self._address, "/connections", limit_s=self._limit_s), wanted)
            except AskFailed as error:
                if error.status != _NOT_FOUND or not self._has_no_page(error):
                    raise
        assert self._saved is not None
        page = page_or_none(self._pages, "/connections") if self._pages is not None else None
        if page is not None:
            return live(page, wanted, self._identity_at)
        if is_envoy_dump(self._dump):
            raise AskFailed(f"{self._file or self._address}: a dump of Envoy's dialect has no connections")
        return live(self._dump.get("workloadState") or {}, wanted, self._identity_at)

    def flow(self, wanted: str) -> str:
        """Return a flow in the form of an access line. ``wanted`` is the flow's id, or its line of JSON.

        Raises:
            AskFailed: the flight recorder does not have the flow, or the text is not a flow.
        """
        is_line = wanted.lstrip().startswith("{")
        if is_line:
            lines = [wanted]
        elif self._pages is not None:
            lines = self._pages.text("/flows").splitlines()
        else:
            lines = ask(self._address, "/flows", limit_s=self._limit_s).splitlines()
        for line in lines:
            try:
                flow = json.loads(line).get("flow") or {}
                if is_line or flow.get("uuid") == wanted:
                    return json.dumps(line_of_flow(flow))
            except (ValueError, AttributeError, KeyError, TypeError):
                continue
        raise AskFailed(f"no flow is {wanted[:60]}; `ztunnel flows -o wide` lists them")

    def _has_no_page(self, error: AskFailed) -> bool:
        """If the proxy has no ``/explain`` page (a Rust ztunnel or an Envoy), use its dump instead. Return whether
        the page is missing.

        Our proxy in Envoy's dialect also answers 404 if the requested listener does not exist.
        """
        dump = ask_json(self._address, "/config_dump", {"include_eds": ""}, limit_s=self._limit_s)
        if is_envoy_dump(dump) and "invalid path" not in str(error):
            return False
        self._read(dump)
        return True

    def _read(self, dump: Any) -> None:
        from xds.errors import ConfigError
        from ztunnel.runtime.clock import SystemClock

        name = self._file or self._address
        try:
            # Imported here, because each dialect takes long to import, and only answers from a dump need it.
            if is_envoy_dump(dump):
                from ztunnel.ask.inspect.saved_envoy import SavedEnvoy

                self._dump, self._saved = dump, SavedEnvoy(dump, SystemClock())
            else:
                from ztunnel.ask.inspect.saved import SavedMesh

                self._dump = mesh_dump(dump)
                self._saved = mesh = SavedMesh(self._dump, SystemClock().wall())
                self._identity_at = mesh.identity_at
        except (NotAMesh, ConfigError) as error:
            raise AskFailed(f"{name}: {error}") from None


def _tunnel_ends(hop: Mapping[str, Any]) -> Iterator[Answer]:
    """Yield the endpoints of tunnels whose far end has not been evaluated yet (Envoy's dialect)."""
    for cluster in hop.get("clusters") or ():
        for endpoint in cluster.get("endpoints") or ():
            if "hop" in endpoint:
                yield from _tunnel_ends(endpoint["hop"])
            elif "tunnel" in endpoint and "inbound" not in endpoint and (endpoint["tls"] or {}).get("identity"):
                yield endpoint


def _of_seen(args: argparse.Namespace, answers: _Answers) -> Iterator[Answer]:
    """Yield an answer for each selected connection.

    Raises:
        AskFailed: no connection is selected, or the proxy does not answer.
    """
    found = False
    is_live = args.connection is not None
    if args.flow is not None:
        args.log_line = answers.flow(args.flow)
    for seen in answers.live(args.connection) if is_live else _logged(args.log_line, args.identity or ""):
        found = True
        if isinstance(seen, str):
            yield {"no_answer": seen}
            continue
        try:
            yield told_of(seen, answers.ask(seen.asked))
        except AskFailed as error:
            if not error.status:
                raise
            yield {"seen": dict(seen.shown), "no_answer": str(error)}
    if not found:
        nothing = f"no live connection is {args.connection}; `ztunnel connections` lists them"
        raise AskFailed(nothing if is_live else "not a line of an access log")


def _logged(line: str, identity: str) -> Iterator[Seen | str]:
    """Yield the connections in access lines, each only once. For an unusable line, yield the reason as text."""
    asked: set[tuple[tuple[str, str], ...]] = set()
    if line == "-" and isinstance(sys.stdin, io.TextIOWrapper):
        sys.stdin.reconfigure(errors="backslashreplace")  # names in a log can have other bytes than UTF-8
    for each in sys.stdin if line == "-" else [line]:
        try:
            seen = logged(each, identity)
        except BadLine as error:
            yield f"{error}: {each.strip()}"
            continue
        if seen is None:
            continue
        # Lines with a difference only in the client's port ask the same question, because no policy depends on
        # that port.
        question = {**seen.asked, "source": seen.asked["source"].rpartition(":")[0]}
        key = (*sorted(question.items()), ("error", seen.shown.get("error", "")))
        if key not in asked:
            asked.add(key)
            yield seen


def _print(args: argparse.Namespace, whole: Answer | list[Answer], answers: list[Answer]) -> None:
    if args.output.for_people:
        for number, answer in enumerate(answers):
            print_outline(["", *outline(answer)] if number else outline(answer))
    elif isinstance(whole, list):
        emit_object({"apiVersion": API_VERSION, "kind": "ExplanationList", "items": whole}, args.output)
    else:
        emit_object({"apiVersion": API_VERSION, "kind": "Explanation", **whole}, args.output)


def _is_refusal(answer: Mapping[str, Any]) -> bool:
    """Return whether an answer has a verdict that is not "allowed"."""
    return not str(answer.get("verdict", "allowed")).startswith("allowed")
