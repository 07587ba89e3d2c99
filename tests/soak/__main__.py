"""``make soak MINUTES=n``: a mesh under load and constant change; prints slopes, and fails on one that grows.

What runs is described in :mod:`tests.soak.site`. The first third, ten minutes at most, is left out: caches
fill, and the allocator finds its size. Exit status 1: a figure grows (its 95 % interval lies above zero, and it
has gained more than its noise), an application saw a failure, the loop stood still, or a task had to be started
again.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from tests.soak.site import Site, site
from tests.soak.slopes import slope_of

#: The largest gain of a figure in a run that counts as noise, whatever its interval: the load can be higher at the
#: end. Of blocks the collector frees 10,000 young ones every half minute, and some thousand older ones every ten
#: minutes.
_NOISE = {
    "rss_kib": 1536.0,
    "threads": 1.0,
    "descriptors": 6.0,
    "sockets": 6.0,
    "fibers": 6.0,
    "tasks": 3.0,
    "blocks": 4000.0,
    "series": 6.0,
    "certificates": 0.5,
    "workloads": 0.5,
    "policies": 1.0,
    "page_kib": 12.0,
    "lag_ms": 5.0,
}
#: Caches with thousands of places (addresses with ports, label sets) are full only then.
_WARM_UP_S = 600.0
_SAMPLE_S = 2.0


class Run:
    """Samples of one soak."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self.series: dict[str, list[tuple[float, float]]] = {name: [] for name in _NOISE}
        self.stalls = self.restarts = 0.0
        self._last: tuple[float, float] | None = None

    def add(self, now_s: float, sample: dict[str, float]) -> None:
        """Add a sample. The loop's lag is the mean lateness of its ticks since the last sample."""
        self.stalls, self.restarts = sample.pop("stalls"), sample.pop("restarts")
        late_s = sample.pop("late_s")
        if self._last is not None:
            beats = max(1.0, (now_s - self._last[0]) * 2)
            sample["lag_ms"] = 1000 * (late_s - self._last[1]) / beats
        self._last = now_s, late_s
        if now_s >= min(_WARM_UP_S, self.seconds / 3):
            for name, value in sample.items():
                self.series[name].append((now_s, value))

    def report(self, of: Site) -> bool:
        """Print the table; return whether all is well."""
        well = True
        print(f"{'':<13}{'first':>11}{'last':>11}{'per hour':>12}{'+-':>10}{'gained':>10}")
        for name, samples in self.series.items():
            try:
                slope = slope_of(samples)
            except ValueError as error:
                print(f"{name:<13}{error}")
                well = False
                continue
            grows = slope.grows(_NOISE[name])
            well = well and not grows
            print(
                f"{name:<13}{slope.first:>11.1f}{slope.last:>11.1f}{slope.per_hour:>12.1f}{slope.margin:>10.1f}"
                f"{slope.added:>10.1f}{'  GROWS' if grows else ''}"
            )
        print("done: " + ", ".join(f"{count:,} {kind}" for kind, count in sorted(of.done.items())))
        print(f"failures: {len(of.failures)}; stalls of the loop: {self.stalls:g}; restarts: {self.restarts:g}")
        for failure in of.failures[:20]:
            print(f"  {failure}")
        return well and not of.failures and not self.stalls and not self.restarts


async def soak(minutes: float, folder: Path, *, every_s: float) -> tuple[Run, Site]:
    """Run for this number of minutes. Return the measurements and the results of the load."""
    run = Run(minutes * 60)
    async with site(folder, every_s=every_s) as of, asyncio.TaskGroup() as group:
        for work in (*of.load(), *of.changes()):
            group.create_task(_named(work))
        began_s = time.monotonic()
        shown_s = 0.0
        while (now_s := time.monotonic() - began_s) < run.seconds:
            sample: dict[str, Any] = await asyncio.to_thread(of.sample)
            run.add(now_s, sample)
            if now_s - shown_s >= 60:
                shown_s = now_s
                memory = f"rss {sample['rss_kib'] / 1024:.1f} MiB, {sample['blocks']:,.0f} blocks"
                print(f"{now_s / 60:4.0f} min  {memory}  {of.done}", flush=True)
            await asyncio.sleep(_SAMPLE_S)
        of.stop()
    return run, of


async def _named(work: Any) -> None:
    await work()


def main() -> int:
    parser = argparse.ArgumentParser(prog="make soak", description=__doc__)
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--every", type=float, default=60.0, help="seconds between absences of the control plane")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="soak-") as folder:
        run, of = asyncio.run(soak(options.minutes, Path(folder), every_s=options.every))
    return 0 if run.report(of) else 1


if __name__ == "__main__":
    sys.exit(main())
