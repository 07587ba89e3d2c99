"""The cost of policies: evaluating, memory, changes, and checks through the server (``make bench-authz``).

The store has the shape that Calico measured in a production cluster (:mod:`bench.authz_store`). Checks go to one
server process over its Unix socket, from a process of its own with 64 in flight: once with a policy of one rule,
and once with the big store, with answers kept and with each flow a new one. Calico's own figures for the same
store come from one core of a different machine: 17.5 ms an evaluation until July 2026, 3.7 ms then, 0.36 ms
proposed (projectcalico/calico#13267).

If Go is installed, a server of 30 lines on grpc-go that does not judge (``ext_authz_go``) is built and queried by
the same client, to measure the limit of the transport and of this client. Its figure is a ceiling, not a rival's.

Environment: ``QUICK=1`` (a tenth of the time), ``JSON=file``.
"""

import argparse
import asyncio
import contextlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from datetime import date
from ipaddress import ip_network
from pathlib import Path
from typing import Any

import grpc
import grpc.aio

from bench import authz_store
from bench.chain import version
from xds.aio.grpc_server import Context, GrpcServer, Route, read
from xds.dialects.calico.authorization import decode_response, encode_request
from xds.dialects.calico.policysync import encode
from xds.model import calico as c
from ztunnel.policy.authz.server import CHECK_METHODS
from ztunnel.policy.calico.evaluator import Evaluator
from ztunnel.policy.calico.follower import METHOD
from ztunnel.policy.calico.store import Store

IN_FLIGHT = 64
ONE = c.PolicyId("GlobalNetworkPolicy", "", "get-only")
SMALL = (
    c.PolicyUpdate(
        ONE,
        c.Policy("", (c.Rule(c.Action.ALLOW, c.PeerMatch(account_names=("web",)), http=c.HttpMatch(("GET",))),)),
    ),
    c.EndpointUpdate(
        authz_store.ENDPOINT, c.Endpoint("", (ip_network("10.9.0.1/32"),), (c.Tier("default", (ONE,)),))
    ),
    c.InSync(),
)


def main() -> None:
    """Run the measurements and print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--client", metavar="SOCKET", help=argparse.SUPPRESS)
    parser.add_argument("--vary", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--seconds", type=float, default=0.5 if os.environ.get("QUICK") else 5.0)
    args = parser.parse_args()
    if args.client:
        print(json.dumps(asyncio.run(_client(args.client, args.seconds, vary=args.vary))))
        return
    print(f"\n{date.today()}, {version()}\n")
    rows = [*_evaluation(args.seconds), *asyncio.run(_server(args.seconds)), *asyncio.run(_go(args.seconds))]
    for case, value, unit in rows:
        print(f"{case:<58} {value:>12,.1f} {unit}")
    if path := os.environ.get("JSON"):
        Path(path).write_text(
            json.dumps([{"case": case, "value": value, "unit": unit} for case, value, unit in rows])
        )


def _evaluation(seconds: float) -> Iterable[tuple[str, float, str]]:
    updates = list(authz_store.updates())
    before = _rss()
    began = time.perf_counter()
    evaluator = Evaluator(Store())
    for update in updates:
        evaluator.apply(update)
    applied = time.perf_counter() - began
    members = evaluator.store.ip_sets.members
    yield "snapshot applied", applied * 1e3, "ms"
    yield (
        "IP set member",
        (_rss() - before) / members,
        f"bytes ({members:,} in {len(evaluator.store.ip_sets):,} sets)",
    )
    began = time.perf_counter()
    evaluator.check(authz_store.ENDPOINT, authz_store.FLOW)
    yield "first evaluation, rules compiled", (time.perf_counter() - began) * 1e3, "ms"
    ports = iter(range(1 << 60))
    flow = authz_store.FLOW

    def new() -> None:
        evaluator.check(authz_store.ENDPOINT, replace(flow, destination_port=9_000 + next(ports) % 50_000))

    def kept() -> None:
        evaluator.check(authz_store.ENDPOINT, flow)

    delta = c.IpSetDelta("s:3707", ("10.1.2.3/32",), ("10.1.2.4/32",))
    policy = next(update for update in updates if isinstance(update, c.PolicyUpdate))
    for case, work in (
        ("evaluation, 20,000 rules, none matches", new),
        ("evaluation, answer kept", kept),
        ("change of an IP set of 54,566 members", lambda: evaluator.apply(delta)),
        ("change of a policy of 68 rules", lambda: evaluator.apply(policy)),
    ):
        yield case, _each(work, seconds) * 1e6, "us"


def _each(work: Callable[[], None], seconds: float) -> float:
    """Return the seconds of one call, the best of five rounds, because other work on the machine only adds
    time.
    """
    best = float("inf")
    for _ in range(5):
        count, began = 0, time.perf_counter()
        while (now := time.perf_counter()) - began < seconds / 5:
            work()
            count += 1
        best = min(best, (now - began) / count)
    return best


def _rss() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


async def _server(seconds: float) -> list[tuple[str, float, str]]:
    rows: list[tuple[str, float, str]] = []
    big = tuple(authz_store.updates())
    for name, snapshot, vary in (
        ("one rule", SMALL, False),
        ("20,000 rules, answers kept", big, False),
        ("20,000 rules, each flow new", big, True),
    ):
        with tempfile.TemporaryDirectory() as folder:
            felix = GrpcServer([f"unix:{folder}/felix"], route=_felix([encode(update) for update in snapshot]))
            async with felix:
                process = await asyncio.create_subprocess_exec(
                    *(sys.executable, "-m", "ztunnel", "authz", "serve"),
                    *("-l", f"{folder}/authz", "-d", f"{folder}/felix"),
                    stderr=subprocess.PIPE,
                )
                try:
                    assert process.stderr is not None
                    while b"in sync" not in await process.stderr.readline():
                        pass
                    found = await _asked(f"{folder}/authz", seconds, vary=vary)
                    rss = _rss_of(process.pid)
                finally:
                    process.kill()
                    await process.wait()
            rows += _rows(name, found, rss)
    return rows


async def _go(seconds: float) -> list[tuple[str, float, str]]:
    """Query a grpc-go server that admits every check. Return no figures if it cannot be built."""
    go = shutil.which("go") or shutil.which("go", path="/usr/local/go/bin")
    if go is None:
        print("no Go here: the ceiling of the transport is not measured")
        return []
    with tempfile.TemporaryDirectory() as folder:
        source = Path(__file__).with_name("ext_authz_go")
        build = [go, "build", "-mod=readonly", "-trimpath", "-o", f"{folder}/server", "."]
        made = subprocess.run(build, cwd=source, capture_output=True, text=True, check=False)
        if made.returncode:
            print(f"the ceiling of the transport is not measured: {made.stderr.strip().splitlines()[-1]}")
            return []
        process = await asyncio.create_subprocess_exec(
            f"{folder}/server", f"{folder}/authz", stderr=subprocess.PIPE
        )
        try:
            assert process.stderr is not None
            await process.stderr.readline()
            found = await _asked(f"{folder}/authz", seconds, vary=False)
            return _rows("grpc-go that judges nothing", found, _rss_of(process.pid))
        finally:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()


async def _asked(path: str, seconds: float, *, vary: bool) -> dict[str, float]:
    """Return the figures measured by a client process."""
    client = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "bench.authz", "--client", path),
        *("--seconds", str(seconds), *(["--vary"] if vary else [])),
        stdout=subprocess.PIPE,
    )
    out, _ = await client.communicate()
    found: dict[str, float] = json.loads(out)
    return found


def _rss_of(pid: int) -> float:
    status = Path(f"/proc/{pid}/status").read_text()
    return int(status.partition("VmRSS:")[2].split()[0]) / 1024


def _rows(name: str, found: dict[str, float], rss: float) -> list[tuple[str, float, str]]:
    return [
        (f"checks, {name}, {IN_FLIGHT} in flight", found["rate"], "/s"),
        ("  p50", found["p50"] * 1e3, "ms"),
        ("  p99", found["p99"] * 1e3, "ms"),
        ("  RSS of the server", rss, "MiB"),
    ]


def _felix(messages: list[bytes]) -> Route:
    """Return the RPC methods of a PolicySync server that sends one snapshot."""

    async def serve(context: Context) -> None:
        await read(context)
        for message in messages:
            await context.write(message)
        await asyncio.Event().wait()

    return lambda path: serve if path == METHOD else None


async def _client(path: str, seconds: float, *, vary: bool) -> dict[str, float]:
    taken: list[float] = []
    ports = iter(range(1 << 60))
    flow = replace(authz_store.FLOW, destination_ip="10.9.0.1", method="GET", path="/")
    message = encode_request(flow)
    async with grpc.aio.insecure_channel(f"unix:{path}") as channel:
        call: Any = channel.unary_unary(CHECK_METHODS[0])
        decode_response(await call(message))
        until = time.perf_counter() + seconds

        async def worker() -> None:
            while (began := time.perf_counter()) < until:
                port = 9_000 + next(ports) % 50_000
                await call(encode_request(replace(flow, destination_port=port)) if vary else message)
                taken.append(time.perf_counter() - began)

        await asyncio.gather(*(worker() for _ in range(IN_FLIGHT)))
    taken.sort()
    return {"rate": len(taken) / seconds, "p50": taken[len(taken) // 2], "p99": taken[len(taken) * 99 // 100]}


if __name__ == "__main__":
    main()
