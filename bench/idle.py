"""``make bench-idle``: what idle connections cost, and what is left of it when they are gone.

    python -m bench.idle [--most N]

Each connection has carried one message. A proxy has one descriptor for each, so the limit of open files bounds how
many can be held here; the proxies inherit the limit this runs with. Memory is that of both proxies of the chain.
"""

import argparse
import resource
import tempfile
import time
from datetime import UTC, datetime
from pathlib import Path

import hbone
from bench.chain import Chain, build_load, chain, ours, version
from tproxy.aio.lab import become_root_of_own_namespaces

_WANTED = 100_000
#: Descriptors a proxy needs besides.
_OTHERS = 1000
#: The collector, the allocator's trim and the relays' ends have had their time.
_CALM_S = 5.0
_FREED = 0.2


def main() -> int:
    """Run and print."""
    parser = argparse.ArgumentParser(prog="make bench-idle", description=__doc__)
    parser.add_argument("--most", type=int, default=_WANTED)
    args = parser.parse_args()
    become_root_of_own_namespaces()
    limit = _raise_limit()
    most = min(args.most, limit - _OTHERS)
    steps = [count for count in (1000, 5000, 10_000, 50_000) if count < most] + [most]
    with tempfile.TemporaryDirectory() as name:
        load = build_load(Path(name))
        with chain("ours", load, ours, "pod") as made:
            print(f"{datetime.now(UTC):%Y-%m-%d}, {version()}, {hbone.build()} build, open files {limit:,}\n")
            _warm_up(made)
            at_rest = _resident(made)
            print(f"{'idle connections':>18} {'MiB, both':>10} {'KiB each':>10}")
            print(f"{0:>18,} {at_rest / 2**20:>10.1f}")
            for count in steps:
                with made.idling(count):
                    loaded = _resident(made)
                print(f"{count:>18,} {loaded / 2**20:>10.1f} {(loaded - at_rest) / 2**10 / count:>10.2f}")
            time.sleep(_CALM_S)
            after = _resident(made)
            verdict = "met" if after <= at_rest * (1 + _FREED) else "missed"
            print(
                f"{'all gone':>18} {after / 2**20:>10.1f}   {after / at_rest:.2f} of before (<= 1.20: {verdict})"
            )
    if most < args.most:
        print(f"\n{args.most:,} need a limit of {args.most + _OTHERS:,} open files; here it is {limit:,}.")
    return 0


def _raise_limit() -> int:
    """The most open files this process, and so its children, may have."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = max(hard, _WANTED + _OTHERS)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, wanted))
    except (OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        return hard
    return wanted


def _warm_up(made: Chain) -> None:
    """Everything that the first connections load is there."""
    made.run("crr", "32", "2")


def _resident(made: Chain) -> int:
    return sum(usage.rss for usage in made.usage())


if __name__ == "__main__":
    raise SystemExit(main())
