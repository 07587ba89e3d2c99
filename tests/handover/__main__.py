"""``make handover``: long connections of mixed kinds over several replacements of both nodes' proxies.

Exit status 1: an application saw something, or a connection stayed behind.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import tempfile
from pathlib import Path

from tests.handover.generations import Report, run


def quantile(values: list[float], part: float) -> float:
    """Return a quantile of values; 0 of none."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(len(ordered) * part))] if ordered else 0.0


def shown(report: Report) -> list[str]:
    """Return the lines of a report."""
    lines = [
        f"{each.node}: ended after {each.took_s:.2f} s, {each.given} connections given, {each.stayed} stayed, "
        "pause p50 {:.1f}, p99 {:.1f}, longest {:.1f} ms, ".format(*each.pauses_ms)
        + f"{each.rss_kib[0] >> 10} MiB before, {each.rss_kib[1] >> 10} MiB and {each.cpu_s:.1f} s of CPU after"
        for each in report.replacements
    ]
    outcome = report.outcome
    trips = outcome.round_trips_s
    lines.append(
        f"echoes: {len(trips)} round trips, p50 {quantile(trips, 0.5) * 1000:.1f} ms, "
        f"p99 {quantile(trips, 0.99) * 1000:.1f} ms, longest {max(trips, default=0.0) * 1000:.1f} ms"
    )
    done = ", ".join(f"{kind} {count}" for kind, count in sorted(outcome.done.items()))
    lines.append(f"connections that ended as they should: {done}; bulk moved {outcome.bytes >> 20} MiB")
    lines.append(f"broken, or with bytes lost or doubled: {len(outcome.failures)}")
    lines += [f"  {failure}" for failure in outcome.failures[:20]]
    return lines


def main() -> int:
    parser = argparse.ArgumentParser(prog="make handover")
    parser.add_argument("--connections", type=int, default=1000)
    parser.add_argument("--replacements", type=int, default=10)
    parser.add_argument("--pause", type=float, default=1.0, help="seconds between replacements")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        report = asyncio.run(
            run(
                Path(folder),
                connections=args.connections,
                replacements=args.replacements,
                pause_s=args.pause,
            )
        )
    print(*shown(report), sep="\n")
    stayed = sum(each.stayed for each in report.replacements)
    return 1 if report.outcome.failures or stayed or not report.outcome.done else 0


if __name__ == "__main__":
    sys.exit(main())
