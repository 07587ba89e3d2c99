"""Fuzzes one target in this process until its time is over: ``python -m tests.fuzz.child TARGET SECONDS FOLDER``.

With atheris the search is guided by coverage, else the deterministic mutations run with a new seed each round. The
last line on standard output is a JSON object with the figures. A finding ends the process with status 1; its input
is in the folder, and the traceback on standard error.
"""

from __future__ import annotations

import json
import logging
import os
import sys
import time
from pathlib import Path
from typing import Any

SLOW_S = 0.1
_RSS_MIB = 1024


class Slow(Exception):
    """An input took more than 100 ms of processor time, three times in a row."""


def _rss_mib() -> float:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20


class _Run:
    """Counts what ran, and measures each input."""

    def __init__(self, target: Any, folder: Path) -> None:
        self._target = target
        self._folder = folder
        self._began_s = time.monotonic()
        self.inputs = 0
        self.slowest_s = 0.0
        self.rss_at_first = 0.0

    def __call__(self, data: bytes) -> None:
        self.inputs += 1
        if self.inputs == 10_000:  # caches of the interpreter and of the module are warm
            self.rss_at_first = _rss_mib()
        try:
            took_s = self._timed(data)
            if took_s > SLOW_S:
                took_s = min(took_s, self._timed(data), self._timed(data))
                if took_s > SLOW_S:
                    raise Slow(f"{took_s:.3f} s")
        except BaseException:
            self._folder.mkdir(parents=True, exist_ok=True)
            (self._folder / f"{self._target.name}-{self.inputs}").write_bytes(data)
            raise
        self.slowest_s = max(self.slowest_s, took_s)

    def _timed(self, data: bytes) -> float:
        began_s = time.thread_time()
        self._target.run(data)
        return time.thread_time() - began_s

    def figures(self) -> str:
        return json.dumps(
            {
                "inputs": self.inputs,
                "slowest_ms": round(self.slowest_s * 1000, 1),
                "rss_mib": round(_rss_mib(), 1),
                "growth_mib": round(_rss_mib() - self.rss_at_first, 1) if self.rss_at_first else 0.0,
                "seconds": round(time.monotonic() - self._began_s, 1),
            }
        )


def main(name: str, seconds: float, folder: Path) -> None:
    logging.disable(logging.CRITICAL)
    try:
        import atheris
    except ImportError:
        _blind(name, seconds, folder)
        return
    with atheris.instrument_imports(include=["hbone", "tproxy", "xds", "ztunnel"], enable_loader_override=False):
        from tests.fuzz.targets import TARGETS
    target = TARGETS[name]
    seeds = folder / f"corpus-{name}"
    seeds.mkdir(parents=True, exist_ok=True)
    for number, data in enumerate(target.corpus()):
        (seeds / f"seed-{number}").write_bytes(data)
    run = _Run(target, folder)

    def one(data: bytes) -> None:
        run(data)
        # libFuzzer ends the process itself, so the figures must be out before.
        if run.inputs % 5000 == 0:
            print(run.figures(), flush=True)

    options = [
        f"-max_total_time={max(1, int(seconds))}",
        f"-max_len={target.most_bytes}",
        f"-rss_limit_mb={_RSS_MIB}",
        f"-artifact_prefix={folder}/",
        "-timeout=10",  # seconds of one input: it hangs
        "-verbosity=1",
    ]
    atheris.Setup([sys.argv[0], *options, str(seeds)], one)
    atheris.Fuzz()


def _blind(name: str, seconds: float, folder: Path) -> None:
    from tests.fuzz.mutate import mutations
    from tests.fuzz.targets import TARGETS

    target = TARGETS[name]
    run, seed, ends_s = _Run(target, folder), 0, time.monotonic() + seconds
    while time.monotonic() < ends_s:
        seed += 1
        for data in mutations(target.corpus(), 2000, target.most_bytes, seed):
            run(data)
    print(run.figures(), flush=True)


if __name__ == "__main__":
    main(sys.argv[1], float(sys.argv[2]), Path(sys.argv[3]))
