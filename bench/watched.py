"""``make bench-watched``: the cost of an open live page, and of a tap on the client's pod.

Three equal pairs of our proxies in Envoy's dialect, running at the same time: one unobserved, one whose live pages
are followed on both nodes, and one whose client pod is tapped on its node. The cases come from ``make bench``,
interleaved. A ratio is to the first pair of the same round.
"""

import argparse
import contextlib
import os
import random
import statistics
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from bench.chain import Chain, build_load, chain, ours, version
from bench.compare import CASES
from deploy.lab import become_root_of_own_namespaces

_CASES = ("bulk up, 1", "rr, 1", "rr, 64", "crr, 32")
#: A program that reads an endless page, like a browser in the background.
_FOLLOWS = """
import urllib.request
with urllib.request.urlopen("http://127.0.0.1:15000/ui/events") as page:
    while page.read(65536):
        pass
"""
#: The longest duration of a tap, and so of the benchmark.
_TAP = ("--for", "900s", "--limit", "1GiB", "-w", "/dev/null")


def _tappable(folder: Path, name: str) -> list[str]:
    return [*ours(folder, name), "--tap-socket", str(folder / f"{name}.tap")]


@contextlib.contextmanager
def _plain(load: Path) -> Iterator[Chain]:
    with chain("plain", load, ours, "pod") as made:
        yield made


@contextlib.contextmanager
def _followed(load: Path) -> Iterator[Chain]:
    with chain("followed", load, ours, "pod") as made:
        for worker in made.lab.workers.values():
            worker.ztunnel.popen([sys.executable, "-c", _FOLLOWS])
        yield made


@contextlib.contextmanager
def _tapped(load: Path) -> Iterator[Chain]:
    folders: list[Path] = []

    def command(folder: Path, name: str) -> list[str]:
        folders.append(folder)
        return _tappable(folder, name)

    with chain("tapped", load, command, "pod") as made:
        node = next(name for name, worker in made.lab.workers.items() if "client" in worker.pods)
        words = [sys.executable, "-m", "ztunnel", "tap", str(made.lab.pod("client").ipv4)]
        made.lab.pod("client").popen([*words, "--socket", str(folders[0] / f"{node}.tap"), *_TAP])
        yield made


def main() -> int:
    """Run the comparison."""
    parser = argparse.ArgumentParser(prog="make bench-watched", description=__doc__)
    parser.add_argument("--rounds", type=int, default=int(os.environ.get("ROUNDS") or 5))
    parser.add_argument("--seconds", type=float, default=1.0)
    args = parser.parse_args()
    become_root_of_own_namespaces()
    cases = {name: case for name, case in CASES.items() if name in _CASES}
    found: dict[tuple[str, str], dict[str, list[float]]] = {}
    with contextlib.ExitStack() as stack:
        load = build_load(Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="bench-"))))
        chains = [stack.enter_context(begin(load)) for begin in (_plain, _followed, _tapped)]
        for number in range(args.rounds):
            for name in random.sample(list(cases), len(cases)):
                for made in random.sample(chains, len(chains)):
                    measured = cases[name].measure(made, args.seconds)
                    for row in cases[name].rows:
                        found.setdefault((name, row.name), {}).setdefault(made.name, []).append(measured[row.key])
            print(f"round {number + 1} of {args.rounds}", file=sys.stderr)
    print(f"\n{version()}, {args.rounds} rounds of {args.seconds:g} s\n")
    print(f"{'case':43} {'unit':>6} {'plain':>10} {'page open':>10} {'tapped':>10}")
    for name, case in cases.items():
        for row in case.rows:
            values = found[name, row.name]
            shown = [
                f"{statistics.median(pairs):>10.2f}" if pairs else f"{'-':>10}"
                for other in ("followed", "tapped")
                if (pairs := [a / b for a, b in zip(values[other], values["plain"], strict=True) if b]) is not None
            ]
            print(f"{row.name:43} {row.unit:>6} {statistics.median(values['plain']):>10,.1f} {' '.join(shown)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
