"""``make fuzz MINUTES=n [TARGET=a,b]``: fuzz each target for n minutes, two targets at a time.

Prints a line per target and exits with 1 if there was a finding: an exception that the module does not declare,
more than 100 ms of processor time for one input, or memory that grows by more than 64 MiB after the first 10,000
inputs (the fuzzer's own corpus takes a part of that). Inputs of findings are in ``.run/fuzz``. After a fix the
input is moved to ``tests/fuzz/corpus/<target>/``, where ``make test`` runs it.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tests.fuzz.targets import TARGETS

_FOLDER = Path(__file__).parents[2] / ".run" / "fuzz"
_GROWTH_MIB = 64.0
_COVERAGE = re.compile(r"cov: (\d+)")


def _fuzz(name: str, seconds: float) -> tuple[str, bool]:
    """Return the line of a target, and whether it is clean."""
    folder = _FOLDER / name
    command = [sys.executable, "-W", "ignore", "-m", "tests.fuzz.child", name, str(seconds), str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, errors="replace", check=False)
    figures = [line for line in done.stdout.splitlines() if line.startswith("{")]
    found = json.loads(figures[-1]) if figures else {}
    covered = _COVERAGE.findall(done.stderr)
    grew = found.get("growth_mib", 0.0) > _GROWTH_MIB
    clean = done.returncode == 0 and not grew
    verdict = "clean" if clean else "GROWS" if done.returncode == 0 else "FOUND"
    line = (
        f"{name:<15} {found.get('inputs', 0):>10,} inputs  {found.get('slowest_ms', 0):>6} ms slowest  "
        f"{found.get('growth_mib', 0):>6} MiB grown  {covered[-1] if covered else '-':>6} edges  {verdict}"
    )
    if done.returncode:
        line += "\n" + "\n".join(done.stderr.splitlines()[-40:])
    return line, clean


def main() -> int:
    parser = argparse.ArgumentParser(prog="make fuzz", description=__doc__)
    parser.add_argument("--minutes", type=float, default=1.0, help="of each target")
    parser.add_argument("--target", default="", help="names, separated by commas; all if empty")
    parser.add_argument("--jobs", type=int, default=2)
    options = parser.parse_args()
    names = [name for name in options.target.split(",") if name] or list(TARGETS)
    unknown = [name for name in names if name not in TARGETS]
    if unknown:
        print(f"no such target: {', '.join(unknown)}; there are {', '.join(TARGETS)}", file=sys.stderr)
        return 2
    clean = True
    with ThreadPoolExecutor(options.jobs) as pool:
        for line, was_clean in pool.map(lambda name: _fuzz(name, options.minutes * 60), names):
            print(line, flush=True)
            clean = clean and was_clean
    return 0 if clean else 1


if __name__ == "__main__":
    sys.exit(main())
