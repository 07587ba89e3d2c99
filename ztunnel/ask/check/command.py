"""The command ``ztunnel check``.

Exit status: 0 without errors; 1 if there is an error, or with ``--fail-on warning`` a warning; 2 if a node does
not answer or the command line is wrong.
"""

from __future__ import annotations

import argparse
import time
from collections import Counter
from collections.abc import Sequence
from typing import Any, Final

from ztunnel.ask.check.catalogue import UnknownCheck, chosen
from ztunnel.ask.check.gather import ask_agents, gather_facts
from ztunnel.ask.check.rules.model import CHECK_RESULT, Check, CheckResult, run
from ztunnel.ask.inspect.source import AskFailed, add_source, chose_one, failed
from ztunnel.runtime.console.output import Answer, Silent, emit
from ztunnel.runtime.settings import duration_s

#: Seconds between two attempts with ``--wait``.
_AGAIN_S: Final = 5.0


def add_arguments(subparsers: Any) -> None:
    """Add ``check`` to ``argparse``'s sub-commands; ``args.run`` becomes :func:`run_command`."""
    command = subparsers.add_parser(
        "check",
        help="check the cluster for problems, before and after installation",
        description="Check access, deployment, kernels, network, certificates, configuration and policies on all "
        "nodes. Each finding has a cause and a remedy; docs/check.md explains the ids.",
    )
    add_source(command, across=True, all_by_default=True, saved=True)
    command.add_argument("--pre", action="store_true", help="run only the checks that work before installation")
    command.add_argument("--only", default="", metavar="ID,...", help="run only these checks or categories")
    command.add_argument("--skip", default="", metavar="ID,...", help="skip these checks or categories")
    command.add_argument("--wait", metavar="DURATION", help="repeat until the status is 0, at most this long")
    command.add_argument(
        "--fail-on",
        choices=("error", "warning"),
        default="error",
        help="the least severity for exit status 1 (error)",
    )
    command.add_argument("--no-cluster", action="store_true", help="query the proxy only, not the API server")
    command.add_argument("--list", action="store_true", help="list the checks instead of running them")
    command.set_defaults(run=run_command)


def run_command(args: argparse.Namespace) -> int:
    """Run the checks, print their results and return the exit status."""
    try:
        checks = chosen(_names(args.only), _names(args.skip), before=args.pre)
        until_s = time.monotonic() + (duration_s(args.wait) if args.wait else 0.0)
    except (UnknownCheck, ValueError) as error:
        return failed(args, str(error))
    if args.list:
        results = [
            CheckResult(
                id=check.id,
                category=check.category,
                severity="skipped",
                fact=check.asks,
                remedy=check.remedy,
                reference=f"docs/check.md#{check.id.lower()}",
            )
            for check in checks
        ]
        return emit(Answer(kind=CHECK_RESULT, items=results), args.output)
    # Without flags, all nodes are checked.
    args.all_nodes = args.all_nodes or not (chose_one(args) or args.no_cluster)
    while True:
        try:
            answer = checked(args, checks)
        except AskFailed as error:
            return failed(args, str(error))
        if answer.status == 0 or time.monotonic() + _AGAIN_S > until_s:
            return emit(answer, args.output)
        time.sleep(_AGAIN_S)


def _names(text: str) -> list[str]:
    return [each.strip() for each in text.split(",") if each.strip()]


def checked(args: argparse.Namespace, checks: Sequence[Check]) -> Answer[CheckResult]:
    """Gather facts and run the checks on them.

    Raises:
        AskFailed: ``--file`` cannot be read.
    """
    args.agents = {} if args.pre or args.file is not None or not args.all_nodes else ask_agents(args)
    facts = gather_facts(args, before=args.pre)
    return answer_of(run(checks, facts), facts.silent, fail_on=args.fail_on)


def answer_of(results: Sequence[CheckResult], silent: Any = (), *, fail_on: str = "error") -> Answer[CheckResult]:
    """Return the results as an answer whose summary is one sentence."""
    counted = Counter(result.severity for result in results)
    bad = counted["error"] > 0 or (fail_on == "warning" and counted["warning"] > 0)
    ids = len({result.id for result in results})
    sentence = (
        f"{ids} checks: {_several(counted['error'], 'error')}, {_several(counted['warning'], 'warning')}, "
        f"{counted['ok']} ok, {counted['skipped']} skipped"
    )
    return Answer(
        kind=CHECK_RESULT,
        items=results,
        silent=[Silent(node=node, reason=reason) for node, reason in dict(silent).items()],
        bad=bad,
        notes=["", sentence],
        summary={"checks": ids, **{name: counted[name] for name in ("error", "warning", "ok", "skipped")}},
    )


def _several(number: int, name: str) -> str:
    return f"{number} {name}{'' if number == 1 else 's'}"
