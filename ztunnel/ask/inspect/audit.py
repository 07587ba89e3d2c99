"""``ztunnel audit``: the node agent's comparison of each pod with its expected state.

Exit status: 0 without findings, 1 with findings (after a repair: remaining ones), 2 if an agent does not answer.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from functools import partial
from typing import Any, Final

import msgspec

from ztunnel.ask.inspect.fleet import Found, gather, items_of
from ztunnel.ask.inspect.source import AskFailed, Pages, add_source, ask, failed
from ztunnel.runtime.console.output import Answer, Column, Item, Kind, emit

ADDRESS: Final = "127.0.0.1:15014"
#: A time limit for slow answers: a comparison reads the node's proxies' dumps, and a repair waits for its steps.
_LIMIT_S: Final = 60.0
_CHECKS: Final = ("label", "annotation", "rules", "listeners", "workload", "certificate")


def add_arguments(subparsers: Any) -> None:
    """Add the command to ``argparse``'s sub-commands; ``args.run`` runs it."""
    audit = subparsers.add_parser(
        "audit",
        help="compare each pod of the node with its expected state",
        description="Make the node agent compare each pod of its node now: labels, annotation, rules in its "
        "network namespace, listeners, certificate, and the workload that the control plane describes.",
    )
    add_source(audit, of_agent=ADDRESS, across=True)
    audit.add_argument(
        "--repair",
        action="store_true",
        help="make the agent repair enrolment, annotations, rules and listeners",
    )
    audit.set_defaults(run=_run)


def _cell(item: PodAudit, check: str) -> str:
    """Return the table cell for one check of a pod: its result, or for the annotation the annotation's value."""
    answer = item.checks.get(check, "-")
    if check == "annotation" and answer != "-":
        return f"{item.annotation or 'none'}{', wrong' if answer == 'wrong' else ''}"
    return answer


class AuditFinding(msgspec.Struct, frozen=True, kw_only=True):
    """A difference between a pod and its expected state. ``repairable``: ``--repair`` can correct it."""

    check: str
    reason: str
    text: str
    repairable: bool


class PodAudit(Item, frozen=True, kw_only=True):
    """A pod, compared with its expected state. ``checks`` has the result of each check: ok, wrong, ``-`` or
    ``?``."""

    pod: str
    wanted: bool
    because: str
    annotation: str | None = None
    uid: str | None = None
    phase: str | None = None
    checks: dict[str, str]
    findings: tuple[AuditFinding, ...] = ()


POD_AUDIT: Final = Kind(
    name="PodAudit", several="pods", item=PodAudit, identity=lambda item: item.pod,
    columns=(
        Column("POD", "pod"),
        Column("IN THE MESH", lambda item: f"{'yes' if item.wanted else 'no'}, {item.because}"),
        *(Column(name.upper(), partial(_cell, check=name)) for name in _CHECKS),
    ),
)  # fmt: skip


def _run(args: argparse.Namespace) -> int:
    def look(pages: Pages) -> Any:
        method = "POST" if args.repair else "GET"
        try:
            answer = json.loads(ask(pages.name, "/audit", method=method, limit_s=args.request_timeout or _LIMIT_S))
            return list(_items(answer)), list(_lines(answer)), answer["repaired"]
        except (ValueError, TypeError, KeyError, msgspec.ValidationError):
            raise AskFailed(f"{pages.name}: the answer is no audit; is a node agent there?") from None

    try:
        found = gather(args, look, agent=True)
    except AskFailed as error:
        said = str(error).replace("a proxy's admin server", "the node agent (ztunnel agent --kube --metrics PORT)")
        return failed(args, said)
    items = items_of(Found({n: each for n, (each, _, _) in found.by_node.items()}, found.silent, found.across))
    answer = Answer(
        kind=POD_AUDIT,
        items=items,
        silent=found.silent,
        across=found.across,
        bad=any(item.findings for item in items),
        summary={"repaired": [each for _, _, repaired in found.by_node.values() for each in repaired]},
        notes=["", *(line for _, lines, _ in found.by_node.values() for line in lines)],
    )
    return emit(answer, args.output)


def _items(answer: Any) -> Iterator[PodAudit]:
    for pod in answer["pods"]:
        yield msgspec.convert(pod, PodAudit, strict=False)


def _lines(answer: Any) -> Iterator[str]:
    """Yield lines about repairs, about each difference, and a summary."""
    pods = answer["pods"]
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
