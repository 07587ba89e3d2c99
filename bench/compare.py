"""``make bench``: compares our pair of proxies with a pair of Envoys, in one interleaved run.

    python -m bench.compare [--quick] [--json FILE] [--rounds N] [--seconds S] [--only CASE] [--target pod|service]

Environment: ``QUICK=1``, ``ROUNDS=n``, ``JSON=file``, ``DIALECT``, and for a third pair ``RIVAL=istio:PATH`` (a
program that takes the environment of Istio's ztunnel, with TLS and a token for the control plane) or ``RIVAL_CMD``
(a command with ``{node}`` and ``{xds}``).
"""

import argparse
import contextlib
import datetime
import json
import os
import random
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import hbone
from bench.chain import Chain, Command, build_load, chain, envoy, in_pods, ours, rival, version, ztunnel_of
from deploy.lab import become_root_of_own_namespaces

#: The share of steal time above which a round is repeated: the hypervisor ran other guests meanwhile.
_STEAL_LIMIT = 0.05
_RETRIES = 2
#: Time for proxies to notice that their connections have ended.
_SETTLE_S = 0.01
#: A round trip between nodes of neighbouring zones.
_ONE_WAY_US = 500
_MESSAGE_BYTES = 1024


def _run(
    made: Chain, kind: str, connections: int, seconds: float, *more: str
) -> tuple[dict[str, Any], dict[str, float]]:
    """Run the load once, with the further arguments ``more``, and return its report with the processor time.

    ``cpu`` is the proxies' seconds, ``kernel`` their seconds in the kernel, ``load`` the load's, and ``idle`` the
    percentage of all processors.
    """
    before, load_s, (_, idle, total) = made.usage(), made.load_s(), _processors()
    result = made.run(kind, str(connections), str(seconds), *more)
    load_s, after = made.load_s() - load_s, _processors()
    used = list(zip(before, made.usage(), strict=True))
    return result, {
        "cpu": sum(b.cpu_s - a.cpu_s for a, b in used),
        "kernel": sum(b.kernel_s - a.kernel_s for a, b in used),
        "load": load_s,
        "idle": 100 * (after[1] - idle) / max(1, after[2] - total),
    }


def _bulk(kind: str, connections: int) -> Callable[[Chain, float], dict[str, float]]:
    def measure(made: Chain, seconds: float) -> dict[str, float]:
        result, spent = _run(made, kind, connections, seconds)
        gib = result["bytes"] / 2**30
        per_gib = {name: spent[name] / gib if gib else 0.0 for name in ("cpu", "kernel", "load")}
        return {"rate": result["bytes"] / result["seconds"] / 1e6, "idle": spent["idle"], **per_gib}

    return measure


def _requests(
    kind: str, connections: int, *more: str, least_s: float = 0.0
) -> Callable[[Chain, float], dict[str, float]]:
    def measure(made: Chain, seconds: float) -> dict[str, float]:
        result, spent = _run(made, kind, connections, max(seconds, least_s), *more)
        if result["failures"]:
            raise RuntimeError(f"{made.name}: {result['failures']} of {result['messages']} failed")
        each = {name: 1e6 * spent[name] / max(1, result["messages"]) for name in ("cpu", "kernel", "load")}
        return {
            "rate": result["messages"] / result["seconds"],
            "p50": result["p50_us"],
            "p99": result["p99_us"],
            "idle": spent["idle"],
            **each,
        }

    return measure


def _first(made: Chain, seconds: float) -> dict[str, float]:
    """Measure requests on new connections, each after the connections between the proxies were ended."""
    before, samples = made.usage(), []
    for _ in range(int(20 * seconds)):
        if not made.end_tunnels() and made.proxies:
            raise RuntimeError(f"{made.name}: no connection between the proxies was found to be ended")
        time.sleep(_SETTLE_S)
        samples.append(made.ask_once())
    cpu = sum(b.cpu_s - a.cpu_s for a, b in zip(before, made.usage(), strict=True))
    return {"p50": 1e6 * statistics.median(samples), "cpu": 1e6 * cpu / len(samples)}


def _apart(measure: Callable[[Chain, float], dict[str, float]]) -> Callable[[Chain, float], dict[str, float]]:
    def measure_apart(made: Chain, seconds: float) -> dict[str, float]:
        with made.apart(_ONE_WAY_US):
            return measure(made, seconds)

    return measure_apart


@dataclass(frozen=True, slots=True)
class Row:
    """One line of the table.

    Attributes:
        name: the case.
        unit: the unit of its numbers.
        key: the number's key in the measurement.
        more: whether a larger number is better.
        target: the ratio ours:Envoy to reach, a minimum if more is better, otherwise a maximum.
        compiled: the target of the compiled build, if it differs.
    """

    name: str
    unit: str
    key: str = ""
    more: bool = False
    target: float | None = None
    compiled: float | None = None

    @property
    def goal(self) -> float | None:
        """Return the target of the measured build."""
        compiled = self.compiled is not None and hbone.build() == "compiled"
        return self.compiled if compiled else self.target

    def met(self, ratio: float) -> bool:
        """Return whether a ratio reaches the target. Without a target: whether ours is no worse."""
        target = 1.0 if self.goal is None else self.goal
        return ratio >= target if self.more else ratio <= target


@dataclass(frozen=True, slots=True)
class Case:
    """A measurement of a chain, and the rows that it fills. With ``one_node`` it runs on the chains of one
    node.
    """

    measure: Callable[[Chain, float], dict[str, float]]
    rows: tuple[Row, ...]
    one_node: bool = False


class _Aims(NamedTuple):
    """The targets of a rate: the pure build's, then the compiled build's."""

    cpu: float | None = None
    p50: float | None = None
    compiled_cpu: float | None = None
    compiled_p50: float | None = None


_NO_AIMS = _Aims()
#: Requests per second, and the number of connections that carry them.
_RATES = ((100, 1), (1000, 1), (1000, 10), (5000, 10), (5000, 100))
_PACED = {(100, 1): _Aims(1.15, 1.1, 1.05, 1.0), (1000, 10): _Aims(1.15, 1.1, 0.95, 1.0)}
#: The targets of bulk transfers, by number of connections.
_BULK = {1: 1.1, 64: 1.1}
_BULK_COMPILED = {1: 1.2, 64: 1.25}


def _paced(rate: int, connections: int) -> Case:
    """Return a case with a load like users': requests at a fixed rate over open connections."""
    name = f"{rate:,}/s over {connections} conn"
    aims = _PACED.get((rate, connections), _NO_AIMS)
    return Case(
        # Processor time is counted in ticks of 10 ms: 400 requests take some 20 ticks.
        _requests("paced", connections, str(_MESSAGE_BYTES), str(rate), least_s=400 / rate),
        (
            Row(f"{name}, CPU per request", "us", "cpu", target=aims.cpu, compiled=aims.compiled_cpu),
            Row(f"  its p50, {name}", "us", "p50", target=aims.p50, compiled=aims.compiled_p50),
            Row(f"  its p99, {name}", "us", "p99"),
            Row(f"  cores idle meanwhile, {name}", "%", "idle"),
        ),
    )


CASES: dict[str, Case] = {
    **{
        f"bulk {direction}, {n}": Case(
            _bulk(direction, n),
            (
                Row(
                    f"bulk {direction}, {n} conn",
                    "MB/s",
                    "rate",
                    more=True,
                    target=_BULK.get(n),
                    compiled=_BULK_COMPILED.get(n),
                ),
                Row(f"  its CPU, {direction}, {n} conn", "s/GiB", "cpu", target=0.8, compiled=0.7),
                Row(f"  of it in the kernel, {direction}, {n} conn", "s/GiB", "kernel"),
                Row(f"  of the load beside it, {direction}, {n} conn", "s/GiB", "load"),
                Row(f"  cores idle meanwhile, {direction}, {n} conn", "%", "idle"),
            ),
        )
        for n in (1, 8, 64)
        for direction in ("up", "down")
    },
    "crr, 32": Case(
        _requests("crr", 32),
        (
            Row("new connections, 32 at once", "/s", "rate", more=True, target=1.0, compiled=1.25),
            Row("  their CPU", "us", "cpu"),
            Row("  of it in the kernel", "us", "kernel"),
            Row("  of the load beside it", "us", "load"),
            Row("  cores idle meanwhile", "%", "idle"),
        ),
    ),
    "crr, 1": Case(
        _requests("crr", 1),
        (
            Row("new connection, 1 at a time, p50", "us", "p50", target=0.9, compiled=0.7),
            Row("  its CPU, 1 at a time", "us", "cpu"),
            Row("  of it in the kernel, 1 at a time", "us", "kernel"),
            Row("  of the load beside it, 1 at a time", "us", "load"),
            Row("  cores idle meanwhile, 1 at a time", "%", "idle"),
        ),
    ),
    "first": Case(
        _first,
        (
            Row("first connection to a peer, p50", "us", "p50", target=1.2, compiled=1.0),
            Row("  its CPU, first to a peer", "us", "cpu"),
        ),
    ),
    "crr, apart": Case(
        _apart(_requests("crr", 1)),
        (Row("new connection, nodes 1 ms apart, p50", "us", "p50"),),
    ),
    "first, apart": Case(
        _apart(_first),
        (Row("first connection, nodes 1 ms apart, p50", "us", "p50"),),
    ),
    **{
        f"rr, {n}": Case(
            _requests("rr", n),
            (
                Row(
                    f"request/response 1 KiB, {n} conn",
                    "/s",
                    "rate",
                    more=True,
                    target=1.15 if n == 64 else None,
                    compiled=1.4 if n == 64 else None,
                ),
                Row(
                    f"  its p50, {n} conn",
                    "us",
                    "p50",
                    target=0.65 if n == 1 else None,
                    compiled=0.4 if n == 1 else None,
                ),
                Row(
                    f"  its p99, {n} conn",
                    "us",
                    "p99",
                    target=0.7 if n == 1 else None,
                    compiled=0.55 if n == 1 else None,
                ),
                Row(f"  its CPU, {n} conn", "us", "cpu"),
                Row(f"  of it in the kernel, {n} conn", "us", "kernel"),
                Row(f"  of the load beside it, {n} conn", "us", "load"),
                Row(f"  cores idle meanwhile, {n} conn", "%", "idle"),
            ),
        )
        for n in (1, 64)
    },
    **{f"rate {rate}, {n}": _paced(rate, n) for rate, n in _RATES},
    **{
        f"node-local bulk {direction}": Case(
            _bulk(direction, 1),
            (
                Row(f"node-local bulk {direction}, 1 conn", "MB/s", "rate", more=True, target=2.5),
                Row(f"  its CPU, node-local {direction}", "s/GiB", "cpu", target=0.8),
            ),
            one_node=True,
        )
        for direction in ("up", "down")
    },
}
#: Our proxy, by the dialect its control plane speaks.
OURS = {"envoy": ours, "istio": in_pods}
_REST = Row("RSS at rest, per proxy", "MiB", target=0.65)
_IDLE = Row("RSS per 1,000 idle connections, both", "MiB", target=1.0)
_STILL = Row("CPU of an idle proxy", "%")
_STILL_S = 5.0


@dataclass(slots=True)
class Table:
    """Samples by row and chain."""

    samples: dict[str, dict[str, list[float]]] = field(default_factory=dict)
    rows: dict[str, Row] = field(default_factory=dict)

    def add(self, row: Row, chain_name: str, value: float) -> None:
        """Add one sample."""
        self.rows[row.name] = row
        self.samples.setdefault(row.name, {}).setdefault(chain_name, []).append(value)

    def records(self) -> list[dict[str, Any]]:
        """Return medians, paired ratios and their spread, one record per row."""
        records = []
        for name, row in self.rows.items():
            by_chain = self.samples[name]
            record: dict[str, Any] = {
                "case": name.strip(),
                "unit": row.unit,
                "more_is_better": row.more,
                "build": hbone.build(),
            }
            for chain_name, values in by_chain.items():
                record[{"envoy": "rival"}.get(chain_name, chain_name)] = round(statistics.median(values), 3)
            for other, prefix in (("third", "third_"), ("envoy", "")):
                if pairs := [
                    a / b for a, b in zip(by_chain.get("ours", ()), by_chain.get(other, ()), strict=False) if b
                ]:
                    record[f"{prefix}ratio"] = round(statistics.median(pairs), 3)
                    record[f"{prefix}spread"] = [round(min(pairs), 3), round(max(pairs), 3)]
            if "ratio" in record and row.goal is not None:
                record["target"] = row.goal
                record["met"] = row.met(record["ratio"])
            records.append(record)
        return records


def _processors() -> tuple[int, int, int]:
    """Return the time of all processors so far, in ticks: stolen, idle, all."""
    values = [int(value) for value in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:]]
    return values[7], values[3] + values[4], sum(values)


def _at_rest(chains: list[Chain], table: Table) -> None:
    """Measure resident memory, the memory of idle connections, and processor time while they are held.

    1,000 are held in quick runs, too: with fewer, pages that are touched once would count several times.
    """
    for made in chains:
        if not made.proxies:
            continue
        at_start = sum(usage.rss for usage in made.usage())
        table.add(_REST, made.name, at_start / 2**20 / len(made.proxies))
        with made.idling(1000):
            loaded = sum(usage.rss for usage in made.usage())
            before_s = sum(usage.cpu_s for usage in made.usage())
            time.sleep(_STILL_S)
            used_s = sum(usage.cpu_s for usage in made.usage()) - before_s
        table.add(_STILL, made.name, 100 * used_s / _STILL_S / len(made.proxies))
        table.add(_IDLE, made.name, (loaded - at_start) / 2**20)


def _print(records: list[dict[str, Any]], heading: str) -> None:
    print(f"\n{heading}\n")
    extra = [key for key in ("direct", "third") if any(key in record for record in records)]
    third = "third" in extra
    print(
        f"{'case':43} {'unit':>6} {'ours':>10} {'envoy':>10} {'ours:envoy':>11}  {'spread':10} {'target':>7}"
        + f" {'':6}"
        + "".join(f"{k:>10}" for k in extra)
        + f" {'ours:third':>11}  spread" * third
    )
    for record in records:
        spread = record.get("spread")
        shown = f"{spread[0]:.2f}-{spread[1]:.2f}" if spread else ""
        ratio = f"{record['ratio']:.2f}" if "ratio" in record else "-"
        if "ratio" in record and (record["ratio"] >= 1) == record["more_is_better"]:
            ratio += " *"
        target = verdict = ""
        if "target" in record:
            target = f"{'>=' if record['more_is_better'] else '<='}{record['target']:.2f}"
            verdict = "met" if record["met"] else "missed"
        numbers = [f"{record[key]:>10,.1f}" if key in record else f"{'-':>10}" for key in ("ours", "rival")]
        rest = "".join(f"{record.get(key, 0):>10,.1f}" for key in extra)
        if "third_ratio" in record:
            low, high = record["third_spread"]
            rest += f" {record['third_ratio']:>11.2f}  {low:.2f}-{high:.2f}"
        print(
            f"{record['case']:43} {record['unit']:>6} {' '.join(numbers)} {ratio:>11}  {shown:10} {target:>7} "
            f"{verdict:6}{rest}".rstrip()
        )
    print("\n* ours is the better one. Medians; ratio and spread of pairs from the same round.")


class _Third(NamedTuple):
    """The commands of the third pair, as arguments of :func:`chain`."""

    command: Command
    command_in_pods: Command | None = None


def _third(parser: argparse.ArgumentParser) -> _Third | None:
    """Return the commands named by ``RIVAL`` or ``RIVAL_CMD``. If one is invalid, end the program with an
    error.
    """
    if text := os.environ.get("RIVAL"):
        protocol, _, path = text.partition(":")
        if protocol != "istio":
            parser.error(
                f"RIVAL={text}: it is istio:PATH, of a program that takes the environment of Istio's ztunnel"
            )
        if shutil.which(path) is None:
            parser.error(f"RIVAL={text}: {path or 'the path'} is no program")
        return _Third(in_pods, ztunnel_of(os.path.abspath(path)))
    return _Third(rival) if os.environ.get("RIVAL_CMD") else None


def main() -> int:
    """Run the comparison."""
    parser = argparse.ArgumentParser(prog="make bench", description=__doc__)
    parser.add_argument("--quick", action="store_true", default=bool(os.environ.get("QUICK")))
    parser.add_argument("--json", type=Path, default=os.environ.get("JSON") or None)
    parser.add_argument("--rounds", type=int, default=os.environ.get("ROUNDS") or None)
    parser.add_argument("--seconds", type=float)
    parser.add_argument("--only", action="append", help="a part of a case's name; repeatable")
    parser.add_argument("--target", choices=("pod", "service"), default="pod")
    parser.add_argument("--dialect", choices=tuple(OURS), default=os.environ.get("DIALECT", "envoy"))
    args = parser.parse_args()
    third = _third(parser)
    if third is not None and third.command is in_pods:
        args.dialect = "istio"
    rounds = args.rounds or (3 if args.quick else 7)
    seconds = args.seconds or (1.0 if args.quick else 2.0)
    become_root_of_own_namespaces()
    cases = {n: c for n, c in CASES.items() if not args.only or any(part in n for part in args.only)}
    elsewhere = any(case.one_node for case in cases.values())
    table = Table()
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="bench-")))
        load = build_load(folder)
        print("starting the chains", file=sys.stderr)
        chains = [
            stack.enter_context(chain("ours", load, OURS[args.dialect], args.target)),
            stack.enter_context(chain("envoy", load, envoy, args.target)),
            stack.enter_context(chain("direct", load, None, args.target)),
        ]
        # Envoy reaches a pod of its own node by the service's address only. By the pod's address its tunnel to
        # itself keeps the client's address and never arrives.
        local = [
            stack.enter_context(chain(name, load, command, "service", one_node=True))
            for name, command in (("ours", OURS[args.dialect]), ("envoy", envoy))
            if elsewhere
        ]
        if third is not None:
            made = chain("third", load, third.command, args.target, command_in_pods=third.command_in_pods)
            chains.append(stack.enter_context(made))
        if not args.only or "rest" in args.only:
            _at_rest(chains, table)
        for number in range(rounds):
            order = list(cases)
            random.shuffle(order)
            for name in order:
                _round(name, cases[name], local if cases[name].one_node else chains, seconds, table)
            print(f"round {number + 1} of {rounds}", file=sys.stderr)
    records = table.records()
    now = datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d")
    build = f"{hbone.build()} build, {args.dialect} dialect"
    _print(records, f"{now}, {version()}, {build}, target {args.target}, {rounds} rounds of {seconds:g} s")
    if args.json:
        args.json.write_text(json.dumps(records, indent=1) + "\n")
    return 0


def _round(
    name: str,
    case: Case,
    chains: list[Chain],
    seconds: float,
    table: Table,
) -> None:
    """Run one case on every chain, in random order. Repeat it if the hypervisor ran other guests meanwhile."""
    found: dict[str, dict[str, float]] = {}
    for attempt in range(_RETRIES + 1):
        stolen, _, total = _processors()
        found = {made.name: case.measure(made, seconds) for made in random.sample(chains, len(chains))}
        after = _processors()
        if (after[0] - stolen) / max(1, after[2] - total) < _STEAL_LIMIT:
            break
        print(f"{name}: the machine was stolen, attempt {attempt + 1}", file=sys.stderr)
    for row in case.rows:
        for chain_name, values in found.items():
            table.add(row, chain_name, values[row.key])


if __name__ == "__main__":
    sys.exit(main())
