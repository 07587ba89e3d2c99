"""``ztunnel audit``: the node agent's comparison of each pod with its expected state.

Exit status: 0 without findings, 1 with findings (after a repair: remaining ones), 2 without an answer.
"""

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from typing import Any, Final

from ztunnel.ask.inspect.source import (
    AskFailed,
    add_source,
    ask,
    reaching,
)
from ztunnel.runtime.console.terminal import print_outline, print_table

ADDRESS: Final = "127.0.0.1:15014"
#: A comparison reads the dump of the node's proxies. A repair waits for the steps that it has started.
_LIMIT_S: Final = 60.0
_CHECKS: Final = ("label", "annotation", "rules", "listeners", "workload", "certificate")


def add_arguments(subparsers: Any) -> None:
    """Add the command to ``argparse``'s sub-commands; ``args.run`` runs it."""
    audit = subparsers.add_parser(
        "audit",
        help="compare each pod of the node with what it should be",
        description="Ask the node agent to compare each pod of its node now: labels, annotation, rules in its "
        "namespace, listeners, the workload as the control plane describes it, certificate.",
    )
    add_source(audit, of_agent=ADDRESS)
    audit.add_argument(
        "--repair",
        action="store_true",
        help="have the agent put right what is its own: enrolment, annotation, rules, listeners",
    )
    audit.set_defaults(run=reaching(_run, agent=True))


def _run(args: argparse.Namespace) -> int:
    try:
        text = ask(args.address, "/audit", method="POST" if args.repair else "GET", limit_s=_LIMIT_S)
        answer = json.loads(text)
        table, lines = list(_table(answer)), list(_lines(answer))
        wrong = any(each["findings"] for each in answer["pods"])
    except AskFailed as error:
        said = str(error).replace("a proxy's admin server", "the node agent (ztunnel agent --kube --metrics PORT)")
        print(f"ztunnel audit: {said}", file=sys.stderr)
        return 2
    except (ValueError, TypeError, KeyError):
        print(f"ztunnel audit: {args.address}: the answer is no audit; is a node agent there?", file=sys.stderr)
        return 2
    if args.json:
        print(text.rstrip())
    else:
        print_table(table)
        print_outline(lines)
    return 1 if wrong else 0


def _table(answer: Any) -> Iterator[Sequence[str]]:
    """Yield a row per pod, after the heading."""
    yield ("POD", "IN THE MESH", *(name.upper() for name in _CHECKS))
    for pod in answer["pods"]:
        wanted = f"{'yes' if pod['wanted'] else 'no'}, {pod['because']}"
        yield (pod["pod"], wanted, *(_cell(pod, name) for name in _CHECKS))


def _lines(answer: Any) -> Iterator[str]:
    """Yield what was repaired, each difference, and a line that sums up."""
    pods = answer["pods"]
    yield ""
    for each in answer["repaired"]:
        yield f"repaired: {each['pod']}: {each['reason']}: {each['text']}"
    number, repairable = 0, 0
    for pod in pods:
        for finding in pod["findings"]:
            number += 1
            repairable += finding["repairable"]
            yield f"{pod['pod']}: {finding['check']}: {finding['text']} ({finding['reason']})"
    if not answer["proxies"]:
        yield "no proxy of this node has answered: workloads and certificates are not known"
    hint = f", {repairable} of them for --repair" if repairable else ""
    yield f"{len(pods)} pods of node {answer['node']}, {number or 'no'} differences{hint}"


def _cell(pod: Any, check: str) -> str:
    """Return an answer; of the annotation its value, which says more."""
    answer: str = pod["checks"][check]
    if check == "annotation" and answer != "-":
        return f"{pod['annotation'] or 'none'}{', wrong' if answer == 'wrong' else ''}"
    return answer
