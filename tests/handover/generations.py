"""A mesh whose proxies are replaced one after the other under long connections; and what that cost."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from deploy.lab import Place, Worker
from tests.handover import harness
from tests.handover.traffic import KINDS, Outcome, client, paced, serving, short_connections
from tests.netns.istio import ROOT, AmbientMesh, NodeProxy, eventually, mesh_of

NODES = {"w1": ["client", "near"], "w2": ["far", "outside"]}
CAPTURED = ["client", "near", "far"]
#: Where another program serves, if one is given.
RIVAL_NODE = "w2"
#: A tunnel between nodes in both directions, one within a node, plain text from outside and to outside.
PAIRS = (("client", "far"), ("far", "near"), ("client", "near"), ("outside", "near"), ("client", "outside"))
#: Between which grpcio, wsproto and psql speak.
PROGRAM_PAIRS = PAIRS[:3]
_HZ = os.sysconf("SC_CLK_TCK")


@dataclass(slots=True)
class Replacement:
    """One hand-over, from the signal to the old process's end.

    Attributes:
        took_s: how long that was.
        given, stayed: connections, by the old process's line.
        why: reasons of those that stayed, by the same.
        pauses_ms: median, 99th percentile and longest pause of a unit, by the same.
        rss_kib, descriptors: of the old process before, and of the new one after.
        cpu_s: that the new process has used by then.
        builds: ``pure`` or ``compiled``, of either.
    """

    node: str
    took_s: float
    given: int
    stayed: int
    pauses_ms: tuple[float, float, float]
    rss_kib: tuple[int, int]
    descriptors: tuple[int, int]
    cpu_s: float
    builds: tuple[str, str]
    why: str = ""


@dataclass(slots=True)
class Report:
    """The results of a run, with the round trips of echoes that ended during hand-overs, and of those between."""

    outcome: Outcome = field(default_factory=Outcome)
    replacements: list[Replacement] = field(default_factory=list)
    during_s: list[float] = field(default_factory=list)
    between_s: list[float] = field(default_factory=list)


class BesideRival(AmbientMesh):
    """A mesh in which another program serves the second node, with the environment of Istio's ztunnel.

    That program needs TLS and a token for its control plane, so it gets a second control plane with the same mesh
    file and authority.
    """

    def __init__(self, rival: str, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.rival = rival

    def start_proxy(self, worker: Worker, place: Place | None = None, **more: Any) -> subprocess.Popen[bytes]:
        node = worker.place
        if node.name != RIVAL_NODE:
            return super().start_proxy(worker, place, **more)
        address, ca = f"{node.ipv4}:15012", self.folder / "ca"
        plane = [
            sys.executable,
            "-m",
            "ztunnel",
            "control-plane",
            str(self.folder / "mesh.yaml"),
            "--ca-dir",
            str(ca),
        ]
        token = self.folder / "token"
        # Istio's ztunnel sends the file as it is: a line's end in it makes no header value.
        said = subprocess.run([*plane, "--token", node.name], cwd=ROOT, check=True, stdout=subprocess.PIPE)
        token.write_bytes(said.stdout.strip())
        node.popen([*plane, "--listen", address, "--tls-host", str(node.ipv4)], cwd=ROOT)
        secured = {
            **dict.fromkeys(("XDS_ADDRESS", "CA_ADDRESS"), f"https://{address}"),
            **dict.fromkeys(("XDS_ROOT_CA", "CA_ROOT_CA"), str(ca / "root-cert.pem")),
            "AUTH_TOKEN": str(token),
        }
        return super().start_proxy(worker, place, program=[self.rival], **secured, **more)


@contextlib.asynccontextmanager
async def running(folder: Path, rival: str = "", **env: str) -> AsyncIterator[AmbientMesh]:
    """Yield the mesh, with a folder per node in which generations meet. ``rival`` is another program for one
    node.
    """
    for node in NODES:
        (folder / f"handover-{node}").mkdir()
    env = {"ZTUNNEL_HANDOVER_DIR": f"{folder}/handover-{{node}}", "ZTUNNEL_WORKER_THREADS": "1", **env}
    kind = partial(BesideRival, rival) if rival else AmbientMesh
    async with mesh_of(NODES, folder, captured=CAPTURED, env=env, kind=kind, forks=False) as mesh:
        yield mesh


async def started(mesh: AmbientMesh, node: str, **env: str) -> NodeProxy:
    """Start the next generation of a node's proxy beside the old one. Its log is a separate file."""
    worker, before = mesh.lab.worker(node), mesh.proxies[node]
    place = worker.ztunnel if before.place is worker.place else worker.place
    count = len(list(mesh.folder.glob(f"{node}-*.log")))
    path = mesh.folder / f"{node}-{count}.log"
    with path.open("wb") as output:
        process = mesh.start_proxy(worker, place, stdout=output, **env)
    proxy = NodeProxy(place, mesh.folder, process, before.agent, before.pods)
    proxy.log_path = path
    await eventually(proxy.ready, "the next generation ready")
    return proxy


async def replaced(mesh: AmbientMesh, node: str, **env: str) -> NodeProxy:
    """Replace a node's proxy. Return the old one, which was requested to end."""
    proxy, before = await started(mesh, node, **env), mesh.proxies[node]
    await eventually(lambda: said(proxy, "waiting for the connections of a predecessor"), "they have met")
    before.process.send_signal(signal.SIGTERM)
    mesh.proxies[node] = proxy
    return before


def said(proxy: NodeProxy, text: str) -> list[str]:
    """Messages of a log with a text."""
    return [str(line["message"]) for line in proxy.log() if text in str(line.get("message"))]


async def measured(mesh: AmbientMesh, node: str, limit_s: float, **env: str) -> Replacement:
    """Replace a node's proxy, and wait until the old process has ended, at most ``limit_s``."""
    loop = asyncio.get_running_loop()
    pid, build_before = mesh.proxies[node].process.pid, _build(mesh.proxies[node])
    before_kib, before_count = rss_kib(pid), descriptors(pid)
    before = await replaced(mesh, node, **env)
    began_s = loop.time()
    await eventually(lambda: before.process.poll() is not None, "the old process has ended", limit_s)
    took_s = loop.time() - began_s
    (line,) = [each for each in before.log() if "connections handed over" in str(each.get("message"))][:1] or [{}]
    text = " ".join(f"{key}={value}" for key, value in line.items())
    found = {
        key: float(match[1]) if (match := re.search(rf"\b{key}=([\d.]+)", text)) else -1.0
        for key in ("given", "stayed", "pause_p50", "pause_p99", "longest_pause")
    }
    pid = mesh.proxies[node].process.pid
    return Replacement(
        node=node,
        took_s=took_s,
        given=int(found["given"]),
        stayed=int(found["stayed"]),
        pauses_ms=(found["pause_p50"], found["pause_p99"], found["longest_pause"]),
        rss_kib=(before_kib, rss_kib(pid)),
        descriptors=(before_count, descriptors(pid)),
        cpu_s=cpu_s(pid),
        builds=(build_before, _build(mesh.proxies[node])),
        why=reasons(text),
    )


def reasons(line: str) -> str:
    """Return why connections stayed, by the line of a process that has given the others."""
    found = re.search(r"stayed=\d+ \((.*?)\)", line)
    return found[1] if found is not None else ""


async def run(
    folder: Path,
    *,
    connections: int,
    replacements: int,
    pause_s: float,
    sessions: int = 0,
    builds: Sequence[str] = (),
    rival: str = "",
) -> Report:
    """Hold connections of every kind over every pair of pods, and replace proxies in turn meanwhile.

    Args:
        folder: for logs and sockets.
        connections: the number of connections, without sessions of psql.
        replacements: the number of replacements, of the two nodes in turn.
        pause_s: the time between two replacements.
        sessions: the number of psql sessions from one node to the other.
        builds: source trees that the generations run from, in turn; by default this one.
        rival: a program that serves one node and is not replaced; only the other node's proxy is.
    """
    report = Report()
    outcome = report.outcome
    pace_s = paced(connections)
    limit_s = 60.0 + connections / 100
    others = connections // (len(KINDS) + 2) // len(PROGRAM_PAIRS)
    replaced_nodes = [node for node in NODES if not rival or node != RIVAL_NODE]
    async with running(folder, rival) as mesh, contextlib.AsyncExitStack() as stack:
        for name in ("near", "far", "outside"):
            await stack.enter_async_context(serving(mesh.lab.pod(name), outcome))
            await harness.serve(mesh.lab.pod(name))
        if sessions:
            await stack.enter_async_context(harness.postgres(mesh.lab.pod("far")))
        async with asyncio.TaskGroup() as group, contextlib.AsyncExitStack() as programs:
            for one, other in PROGRAM_PAIRS:
                place, host = mesh.lab.pod(one), mesh.lab.pod(other).ipv4
                wanted = sessions if (one, other) == PROGRAM_PAIRS[0] else 0
                await programs.enter_async_context(harness.using(place, host, others, wanted, outcome))
            for number in range(connections - 2 * others * len(PROGRAM_PAIRS)):
                one, other = PAIRS[number % len(PAIRS)]
                kind = KINDS[number // len(PAIRS) % len(KINDS)]
                place, host = mesh.lab.pod(one), mesh.lab.pod(other).ipv4
                group.create_task(client(place, host, kind, outcome, pace_s))
                if not number % 20:
                    await asyncio.sleep(0.1)
            for one, other in PAIRS[:3]:
                place, host = mesh.lab.pod(one), mesh.lab.pod(other).ipv4
                group.create_task(short_connections(place, host, outcome))
            await asyncio.sleep(1.0)
            outcome.round_trips_s.clear()  # of the time in which connections were opened
            for number in range(replacements):
                node = replaced_nodes[number % len(replaced_nodes)]
                tree = builds[number // len(NODES) % len(builds)] if builds else None
                build = {"PYTHONPATH": tree, "PYTHONSAFEPATH": "1"} if tree else {}
                report.replacements.append(await measured(mesh, node, limit_s, **build))
                report.during_s += drained(outcome.round_trips_s)
                await asyncio.sleep(pause_s)
                report.between_s += drained(outcome.round_trips_s)
            if rival:
                outcome.failures += _complaints(mesh)
            outcome.stop.set()
    return report


def _complaints(mesh: AmbientMesh) -> list[str]:
    """Return what another program has logged of connections that failed."""
    return [
        f"{RIVAL_NODE} logged {line.get('error')}"
        for line in mesh.proxies[RIVAL_NODE].log()
        if line.get("error") and "connection" in str(line.get("message"))
    ]


def drained(values: list[float]) -> list[float]:
    """Return values, and empty their list."""
    found = values.copy()
    values.clear()
    return found


def _build(proxy: NodeProxy) -> str:
    return str(proxy.dump()["version"]["buildProfile"])


def descriptors(pid: int) -> int:
    """Return the number of a process's open descriptors."""
    return len(list(Path(f"/proc/{pid}/fd").iterdir()))


def rss_kib(pid: int) -> int:
    """Return a process's resident memory."""
    match = re.search(r"VmRSS:\s+(\d+)", Path(f"/proc/{pid}/status").read_text())
    return int(match[1]) if match else 0


def cpu_s(pid: int) -> float:
    """Return the processor time that a process has used."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / _HZ
