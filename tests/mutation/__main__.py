"""``make mutants COUNT=n``: puts small faults into the modules that decide, and counts those that no test detects.

For nightly runs: COUNT faults per module, drawn with a fixed seed, 0 for all of them. A mutant is detected when a
test of the module fails, or when its tests take ten times as long as without it. Some mutants are equivalent to
the original (a buffer's size, ``<=`` for a bound that cannot be met), so 100 % cannot be reached. The score should
rise.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import random
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tests.mutation.mutants import places

#: The modules, each with its tests.
TARGETS = {
    "ztunnel.policy.engine": ["tests/ztunnel/policy", "tests/xds/dialects/istio/test_authorization.py"],
    "hbone.flow": ["tests/hbone/test_flow.py", "tests/hbone/test_work.py"],
    "hbone.tunnel_headers": ["tests/hbone/test_tunnel_headers.py"],
    "ztunnel.proxy.dataplane.proxy_protocol": ["tests/ztunnel/proxy/dataplane/test_proxy_protocol.py"],
    "ztunnel.proxy.istio.path.inbound_target": ["tests/ztunnel/proxy/istio/path/test_inbound_target.py"],
    "ztunnel.proxy.identity.peer": ["tests/ztunnel/proxy/identity/test_peer.py"],
}


def _run(module: str, number: int, tests: list[str], limit_s: float | None) -> bool:
    """Return whether the tests pass."""
    with tempfile.TemporaryDirectory() as folder:
        try:
            done = subprocess.run(
                [sys.executable, "-m", "tests.mutation.child", module, str(number), *tests],
                env={**os.environ, "HYPOTHESIS_STORAGE_DIRECTORY": folder},
                capture_output=True,
                timeout=limit_s,
                check=False,
            )
        except subprocess.TimeoutExpired:
            return False
    return done.returncode == 0


def _score(module: str, count: int, jobs: int) -> tuple[int, int, list[str]]:
    """Return noticed mutants, all that were tried, and what the others change."""
    spec = importlib.util.find_spec(module)
    assert spec is not None
    assert spec.origin is not None
    known = places(Path(spec.origin).read_text())
    chosen = random.Random(1).sample(range(len(known)), min(count or len(known), len(known)))
    tests = TARGETS[module]
    began_s = time.monotonic()
    if not _run(module, -1, tests, None):
        raise SystemExit(f"{module}: its tests fail as they are")
    limit_s = 10 * (time.monotonic() - began_s)
    with ThreadPoolExecutor(jobs) as pool:
        passed = list(pool.map(lambda number: _run(module, number, tests, limit_s), chosen))
    left = sorted(number for number, survived in zip(chosen, passed, strict=True) if survived)
    return len(chosen) - len(left), len(chosen), [known[number] for number in left]


def main() -> int:
    parser = argparse.ArgumentParser(prog="make mutants", description=__doc__)
    parser.add_argument("--count", type=int, default=20)
    parser.add_argument("--module", default="")
    parser.add_argument("--jobs", type=int, default=2)
    options = parser.parse_args()
    noticed = tried = 0
    for module in filter(None, options.module.split(",")) if options.module else TARGETS:
        found, of, left = _score(module, options.count, options.jobs)
        noticed, tried = noticed + found, tried + of
        print(f"{module:<34} {found:>4} of {of:<4} noticed", flush=True)
        for each in left:
            print(f"    not noticed: {each}", flush=True)
    print(f"score {100 * noticed / tried:.0f} % of {tried}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
