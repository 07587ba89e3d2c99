"""``ztunnel handover``: shows whether a proxy's open connections can move to its next process, or moves them.

Exit status: 0; 2 if there is no answer, or no successor is waiting.
"""

import argparse
from collections.abc import Iterable
from typing import Any

from ztunnel.ask.inspect import kinds
from ztunnel.ask.inspect.fleet import gather, items_of
from ztunnel.ask.inspect.source import AskFailed, Pages, add_source, answer_limit_s, ask, failed
from ztunnel.runtime.console.output import Answer, emit


def add_arguments(subparsers: Any) -> None:
    """Add the command to ``argparse``'s sub-commands; ``args.run`` runs it."""
    text = "show whether open connections can move to the next proxy, or move them now"
    parser: argparse.ArgumentParser = subparsers.add_parser(
        "handover",
        help=text,
        description="Show whether a proxy's open connections can move to its successor, and how many have moved. "
        "With `now`, a proxy whose successor is waiting hands its connections over and ends.",
    )
    parser.add_argument("action", nargs="?", choices=("status", "now"), default="status", help="default: status")
    add_source(parser, across=True)
    parser.set_defaults(run=_run)


def _run(args: argparse.Namespace) -> int:
    def look(pages: Pages) -> Iterable[kinds.HandoverFact]:
        if args.action == "now":
            answer = ask(pages.name, "/handover", method="POST", limit_s=answer_limit_s(args))
            return [kinds.HandoverFact(name="answer", value=answer.strip())]
        return facts(pages.json("/handover"))

    try:
        found = gather(args, look)
    except AskFailed as error:
        return failed(args, str(error))
    answer = Answer(kind=kinds.HANDOVER, items=items_of(found), silent=found.silent, across=found.across)
    return emit(answer, args.output)


def facts(page: Any) -> list[kinds.HandoverFact]:
    """Return the rows of ``/handover``.

    Raises:
        AskFailed: the page has another form.
    """
    if not isinstance(page, dict) or not isinstance(page.get("connections"), dict):
        raise AskFailed("/handover is not what a proxy answers")
    rows = {
        "socket": page.get("socket"),
        "waits for a successor": "yes" if page.get("listening") else "no",
        "predecessor": page.get("predecessor"),
        "successor": page.get("successor"),
        "last": page.get("last"),
        **{f"connections {name}": count for name, count in page["connections"].items()},
    }
    return [kinds.HandoverFact(name=name, value=str(value)) for name, value in rows.items() if value]
