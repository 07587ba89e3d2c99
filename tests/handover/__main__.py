"""``make handover``: long connections of mixed kinds over several replacements of both nodes' proxies.

Exit status 1: an application saw something, or a connection stayed behind.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from pathlib import Path
from statistics import linear_regression

import uvloop

from tests.handover import envoy
from tests.handover.generations import Report, run
from tests.handover.harness import missing_of_postgres
from tests.netns.istio import ROOT


def quantile(values: list[float], part: float) -> float:
    """Return a quantile of values; 0 of none."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(len(ordered) * part))] if ordered else 0.0


def slopes(report: Report) -> list[str]:
    """Return how memory and descriptors of each node's processes grew per replacement, by least squares."""
    lines = []
    for node in sorted({each.node for each in report.replacements}):
        seen = [each for each in report.replacements if each.node == node]
        if len(seen) > 2:
            kib = linear_regression(range(len(seen)), [each.rss_kib[1] for each in seen]).slope
            count = linear_regression(range(len(seen)), [each.descriptors[1] for each in seen]).slope
            lines.append(f"{node}: {kib:+.1f} KiB and {count:+.2f} descriptors per replacement")
    return lines


def shown(report: Report) -> list[str]:
    """Return the lines of a report."""
    lines = [
        f"{each.node}, {' to '.join(each.builds)}: ended after {each.took_s:.2f} s, "
        f"{each.given} connections given, {each.stayed} stayed{f' ({each.why})' if each.why else ''}, "
        "pause p50 {:.1f}, p99 {:.1f}, longest {:.1f} ms, ".format(*each.pauses_ms)
        + f"{each.rss_kib[0] >> 10} MiB and {each.descriptors[0]} descriptors before, "
        f"{each.rss_kib[1] >> 10} MiB, {each.descriptors[1]} descriptors and {each.cpu_s:.1f} s of CPU after"
        for each in report.replacements
    ]
    outcome = report.outcome
    for when, trips in (("in hand-overs", report.during_s), ("between", report.between_s)):
        lines.append(
            f"echoes {when}: {len(trips)} round trips, p50 {quantile(trips, 0.5) * 1000:.1f} ms, "
            f"p99 {quantile(trips, 0.99) * 1000:.1f} ms, longest {max(trips, default=0.0) * 1000:.1f} ms"
        )
    done = ", ".join(f"{kind} {count}" for kind, count in sorted(outcome.done.items()))
    lines.append(f"connections that ended as they should: {done}; bulk moved {outcome.bytes >> 20} MiB")
    lines.append(f"broken, or with bytes lost or doubled: {len(outcome.failures)}")
    lines += slopes(report)
    lines += [f"  {failure}" for failure in outcome.failures[:20]]
    return lines


def main() -> int:
    parser = argparse.ArgumentParser(prog="make handover")
    parser.add_argument("--connections", type=int, default=1000)
    parser.add_argument("--replacements", type=int, default=10)
    parser.add_argument("--pause", type=float, default=1.0, help="seconds between replacements")
    parser.add_argument("--sessions", type=int, default=10, help="of psql")
    parser.add_argument(
        "--other", type=Path, help="another source tree; generations run from it and from this one"
    )
    parser.add_argument("--dialect", choices=("istio", "envoy"), default="istio")
    parser.add_argument(
        "--far", choices=("ours", "envoy"), default="ours", help="of Envoy's dialect: the other node's proxy"
    )
    parser.add_argument("--rival", default="", help="istio:PATH of a program that serves one node, and stays")
    args = parser.parse_args()
    scheme, _, rival = args.rival.partition(":")
    if args.rival and (scheme != "istio" or not os.access(rival, os.X_OK)):
        parser.error(
            f"--rival {args.rival}: it is istio:PATH, of a program that takes the environment of Istio's ztunnel"
        )
    if args.dialect == "envoy":
        return _result(_of_envoy(args))
    if args.sessions and (missing := missing_of_postgres()):
        print(f"NOT TESTED: PostgreSQL; this machine has no {missing} (Debian: apt install postgresql)")
        args.sessions = 0
    with tempfile.TemporaryDirectory() as folder:
        report = uvloop.run(
            run(
                Path(folder),
                connections=args.connections,
                replacements=args.replacements,
                pause_s=args.pause,
                sessions=args.sessions,
                rival=rival,
                builds=[f"{args.other.resolve()}:{ROOT}", str(ROOT)] if args.other else [],
            )
        )
    return _result(report)


def _of_envoy(args: argparse.Namespace) -> Report:
    with tempfile.TemporaryDirectory() as folder:
        return uvloop.run(
            envoy.run(
                Path(folder),
                connections=args.connections,
                replacements=args.replacements,
                pause_s=args.pause,
                far_envoy=args.far == "envoy",
            )
        )


def _result(report: Report) -> int:
    print(*shown(report), sep="\n")
    stayed = sum(each.stayed for each in report.replacements)
    return 1 if report.outcome.failures or stayed or not report.outcome.done else 0


if __name__ == "__main__":
    sys.exit(main())
