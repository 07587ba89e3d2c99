"""``make bench-idle``: measures the memory of idle connections, and how much remains when they have ended.

    python -m bench.idle [--most N]

Each connection has carried one message. A proxy has one descriptor for each connection, so the limit of open files
bounds the number per process. The proxies inherit this program's limit. Workers hold more connections than one
process per node can. With workers the Istio front end runs, with a pair of pods for each worker. Memory is the sum
of all processes of both proxies.
"""

import argparse
import contextlib
import resource
import tempfile
import time
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

import hbone
from bench.chain import Chain, build_load, chain, in_pods, ours, version
from deploy.lab import become_root_of_own_namespaces

_WANTED = 100_000
#: Descriptors that a proxy needs for other purposes.
_OTHERS = 1000
#: The fraction of the limit that is used per worker, because workers' shares differ, and each hundred connections
#: need one tunnel connection as well.
_SHARE = 0.85
#: After this time the pool has closed spare connections, and memory was trimmed (``ztunnel/runtime/heap.py``).
_CALM_S = 60.0
_FREED = 0.2


def main() -> int:
    """Run the measurement and print it."""
    parser = argparse.ArgumentParser(prog="make bench-idle", description=__doc__)
    parser.add_argument("--most", type=int, default=_WANTED)
    args = parser.parse_args()
    become_root_of_own_namespaces()
    limit = _raise_limit()
    alone = min(args.most, limit - _OTHERS)
    print(f"{datetime.now(UTC):%Y-%m-%d}, {version()}, {hbone.build()} build, open files {limit:,}")
    with tempfile.TemporaryDirectory() as name:
        load = build_load(Path(name))
        with chain("ours", load, ours, "pod") as made:
            _measure(made, [*(count for count in (1000, 5000, 10_000, 50_000) if count < alone), alone])
        if alone < args.most:
            with _with_workers(load, args.most, limit) as made:
                _measure(made, [alone, args.most])
    return 0


@contextlib.contextmanager
def _with_workers(load: Path, most: int, limit: int) -> Iterator[Chain]:
    workers = -(-most // int(limit * _SHARE))
    with chain(
        "ours", load, in_pods, "pod", pairs=workers, settings={"ZTUNNEL_WORKER_THREADS": str(workers)}
    ) as made:
        print(f"\nIstio front end, {workers} workers per node, {workers} pairs of pods")
        yield made


def _measure(made: Chain, steps: list[int]) -> None:
    _warm_up(made)
    at_rest = _resident(made)
    print(f"\n{'idle connections':>18} {'MiB, both':>10} {'KiB each':>10}")
    print(f"{0:>18,} {at_rest / 2**20:>10.1f}")
    for count in steps:
        with made.idling(count):
            loaded = _resident(made)
        print(f"{count:>18,} {loaded / 2**20:>10.1f} {(loaded - at_rest) / 2**10 / count:>10.2f}", flush=True)
    time.sleep(_CALM_S)
    after = _resident(made)
    verdict = "met" if after <= at_rest * (1 + _FREED) else "missed"
    print(
        f"{'gone for a minute':>18} {after / 2**20:>10.1f}   {after / at_rest:.2f} of before (<= 1.20: {verdict})"
    )


def _raise_limit() -> int:
    """Raise this process's limit of open files, which its children inherit, to the maximum, and return it."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = max(hard, _WANTED + _OTHERS)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, wanted))
    except (OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        return hard
    return wanted


def _warm_up(made: Chain) -> None:
    """Open connections to make the proxies finish their imports and create all objects that the first connections
    need.
    """
    made.run("crr", "32", "2")


def _resident(made: Chain) -> int:
    return sum(usage.rss for usage in made.usage())


if __name__ == "__main__":
    raise SystemExit(main())
