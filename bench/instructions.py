"""``make bench-instructions``: the cost of a new connection in instructions and calls, independent of noise.

    python -m bench.instructions [--dialect istio|envoy] [--seconds S] [--json FILE] [--profiles FOLDER]

Environment: ``DIALECT``. Our pair of proxies runs twice: under callgrind, which counts the instructions of the
process outside the kernel, and under cProfile, which counts calls of functions, including C functions. It carries
new connections, 32 at once, then first connections to a peer, each after the end of the proxies' tunnel
connection, which is counted as well. Needs valgrind. The proxies' work without connections is measured for the
same time, and subtracted. ``--profiles`` keeps cProfile's statistics of each side, for ``python -m pstats``.
"""

import argparse
import cProfile
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import hbone
from bench.chain import Chain, Command, build_load, chain, in_pods, version
from bench.compare import OURS
from deploy.lab import become_root_of_own_namespaces

_BEGIN, _END = signal.SIGRTMIN + 1, signal.SIGRTMIN + 2
_SIDES = ("client's proxy", "server's proxy")
#: The wait after the signal that begins or ends counting, which is slow under callgrind.
_SETTLE_S = 1.0
#: The number of first connections to count.
_FIRST = 40
_CASES = ("new connections, 32 at once", "first connections to a peer")


def _profiled() -> None:
    """Run the ztunnel command in this process's arguments, and count its calls between two signals."""
    folder = Path(sys.argv.pop(1))
    profile = cProfile.Profile()

    def end(number: int, frame: FrameType | None) -> None:
        profile.disable()
        profile.create_stats()
        stats: dict[Any, Any] = profile.stats
        profile.dump_stats(folder / "profile")
        (folder / "calls").write_text(str(sum(entry[1] for entry in stats.values())))

    def begin(number: int, frame: FrameType | None) -> None:
        profile.clear()
        profile.enable()

    signal.signal(_BEGIN, begin)
    signal.signal(_END, end)
    from ztunnel.cli import main as ztunnel

    sys.argv[0] = "ztunnel"
    sys.exit(ztunnel())


def _instructions(folder: Path, made: Chain, work: Callable[[], int]) -> tuple[int, list[float]]:
    """Count instructions while ``work`` runs; return its number of connections, and the counts of both proxies."""
    for process in made.proxies:
        _control(process.pid, "-i", "on")
    time.sleep(_SETTLE_S)
    for process in made.proxies:
        _control(process.pid, "-z")
    connections = work()
    found = []
    for process in made.proxies:
        _control(process.pid, "-d")
        newest = max(folder.glob(f"callgrind.{process.pid}*"), key=lambda path: path.stat().st_mtime_ns)
        total = re.search(r"^(?:summary|totals): (\d+)", newest.read_text(), re.MULTILINE)
        assert total is not None, newest
        found.append(float(total[1]))
        _control(process.pid, "-i", "off")
    return connections, found


def _control(pid: int, *arguments: str) -> None:
    subprocess.run(
        ["callgrind_control", *arguments, str(pid)],
        check=True,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )


def _calls(folder: Path, made: Chain, work: Callable[[], int]) -> tuple[int, list[float]]:
    """Like :func:`_instructions`, for calls."""
    for process in made.proxies:
        process.send_signal(_BEGIN)
    time.sleep(_SETTLE_S)
    connections = work()
    found = []
    for name, process in zip(("a", "b"), made.proxies, strict=True):
        process.send_signal(_END)
        path = folder / name / "calls"
        while not path.exists():
            time.sleep(0.05)
        time.sleep(_SETTLE_S / 4)
        found.append(float(path.read_text()))
        path.unlink()
    return connections, found


def _measure(
    unit: str, load: Path, seconds: float, proxy: Command, profiles: Path | None = None
) -> list[list[float]]:
    """Return the count of each side for each of :data:`_CASES`."""
    with tempfile.TemporaryDirectory(prefix=f"bench-{unit}-") as text:
        folder = Path(text)

        def command(place: Path, name: str) -> list[str]:
            arguments = proxy(place, name)[1:]
            if unit == "calls":
                (folder / name).mkdir()
                return [sys.executable, "-m", "bench.instructions", "--profiled", str(folder / name), *arguments]
            return [
                *("valgrind", "--tool=callgrind", "--instr-atstart=no", "--quiet"),
                f"--callgrind-out-file={folder}/callgrind.%p",
                *(sys.executable, "-m", "ztunnel", *arguments),
            ]

        started = proxy if proxy is in_pods else command
        with chain("ours", load, started, "pod", command_in_pods=command) as made:
            made.run("crr", "32", "1")

            def connect() -> int:
                return int(made.run("crr", "32", str(seconds))["messages"])

            def rest() -> int:
                time.sleep(seconds)
                return 0

            def connect_first() -> int:
                for _ in range(_FIRST):
                    made.end_tunnels()
                    time.sleep(_SETTLE_S / 4)
                    made.ask_once()
                return _FIRST

            count = _instructions if unit == "instructions" else _calls
            _, idle = count(folder, made, rest)
            found = []
            for case, work in (("new", connect), ("first", connect_first)):
                found.append(count(folder, made, work))
                if profiles is not None and unit == "calls":
                    for name in ("a", "b"):
                        shutil.copy(folder / name / "profile", profiles / f"{case}-{name}")
    return [
        [(after - before) / connections for after, before in zip(busy, idle, strict=True)]
        for connections, busy in found
    ]


def main() -> int:
    """Count, and print a table."""
    if sys.argv[1:2] == ["--profiled"]:
        del sys.argv[1]
        _profiled()
    parser = argparse.ArgumentParser(prog="make bench-instructions", description=__doc__)
    parser.add_argument("--dialect", choices=tuple(OURS), default=os.environ.get("DIALECT", "istio"))
    parser.add_argument("--seconds", type=float, default=4.0)
    parser.add_argument("--profiles", type=Path)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    become_root_of_own_namespaces()
    with tempfile.TemporaryDirectory(prefix="bench-") as text:
        load = build_load(Path(text))
        found = {
            unit: _measure(unit, load, args.seconds, OURS[args.dialect], args.profiles)
            for unit in ("instructions", "calls")
        }
    for number, case in enumerate(_CASES):
        print(f"\n{version()}, {hbone.build()} build, {args.dialect} dialect: {case}, per connection\n")
        print(f"{'':16}{'instructions, thousand':>24}{'calls':>8}")
        for place, side in enumerate(_SIDES):
            counts = [found[unit][number][place] for unit in ("instructions", "calls")]
            print(f"{side:16}{counts[0] / 1000:>24.0f}{counts[1]:>8.0f}")
    if args.json:
        args.json.write_text(json.dumps({"build": hbone.build(), **found}) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
