"""``python -m tests.interop``: print every table with what was seen; status 0 if all is as expected."""

import argparse
import sys
import time
import traceback
from collections.abc import Sequence
from typing import Any

from tests.interop.case import Case, Runner
from tests.interop.site import available
from tests.interop.tables import LOOPBACK, TABLES, Table

Seen = dict[tuple[str, Any], str]


def run_table(table: Table, only: Sequence[str]) -> Seen:
    """Run the cases of a table, with one site per column."""
    seen: Seen = {}
    cases = [case for case in table.cases if not only or case.number in only]
    for column in table.columns:
        mine = [case for case in cases if column in case.expected]
        if not mine:
            continue
        with table.site(column) as site:
            runner = Runner(site, mine, column)
            try:
                # Early cases come last: by then their waits are over.
                for case in sorted(mine, key=lambda case: case.early):
                    seen[case.number, column] = _run(runner, case)
            finally:
                runner.close()
    return seen


def _run(runner: Runner[Any], case: Case[Any]) -> str:
    try:
        return runner.run(case)
    except Exception as error:  # noqa: BLE001 - a row that cannot run is a failed row, the others still count
        traceback.print_exc()
        return f"{type(error).__name__}: {error}"


def print_table(table: Table, seen: Seen) -> int:
    """Print a table; return how many cells are not as expected."""
    failures = 0
    print(f"\n{table.title}\n\n| case | {' | '.join(table.headings)} |")
    print("|---" * (1 + len(table.columns)) + "|")
    for case in table.cases:
        cells = []
        for column in table.columns:
            found, expected = seen.get((case.number, column)), case.expected.get(column)
            if found is None or expected is None:
                cells.append("")
            elif found == expected:
                cells.append(found)
            else:
                failures += 1
                cells.append(f"**{found}** (expected {expected})")
        if any(cells):
            print(f"| {case.number} {case.stimulus} | {' | '.join(cells)} |")
    return failures


def main() -> int:
    """Run all tables; return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m tests.interop", description=__doc__)
    parser.add_argument("--table", help="only the table whose title begins so")
    parser.add_argument("case", nargs="*", help="only these numbers")
    args = parser.parse_args()
    reason = available()
    if reason is not None:
        print(f"cannot run: {reason}", file=sys.stderr)
        return 2
    begun, failures, count = time.monotonic(), 0, 0
    for table in (*LOOPBACK, *TABLES):
        if args.table and not table.title.startswith(args.table):
            continue
        seen = run_table(table, args.case)
        failures += print_table(table, seen)
        count += len(seen)
    print(f"\n{count} results, {failures} not as expected, {time.monotonic() - begun:.0f} s")
    return 1 if failures else 0


if __name__ == "__main__":
    raise SystemExit(main())
