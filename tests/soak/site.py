"""The mesh of a soak: two nodes with our proxies, mixed load, and everything that changes in a mesh, all the time.

Node ``w1`` is measured and stays; the proxy of ``w2`` is replaced by a successor beside it. Load that must not
fail goes from ``client`` to ``near`` (same node), to ``far`` (the other node) and to a service of both; what is
enrolled and removed, denied and repointed meanwhile are other pods, so that a failure of the load is ours.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import random
import signal
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

from deploy.lab import Place
from tests.netns.istio import AmbientMesh, NodeProxy, ask, eventually
from tests.netns.toys import app
from tproxy.aio.sockets import connect
from tproxy.errors import TproxyError
from ztunnel.proxy.istio.zds.pods import PodUid

NODES = {"w1": ["client", "near", "guest-a", "guest-b"], "w2": ["far", "denied"]}
VIP = "10.96.9.1"
#: Certificates are renewed at half of their lifetime, so each identity gets one rotation a minute.
ENV = {"SECRET_TTL": "120s", "TERMINATION_GRACE_PERIOD_SECONDS": "10"}
_BULK = b"x" * (256 * 1024)
#: Gauges and counters of the metrics page that are sampled, by their names in the table.
_PAGE = {
    "sockets": "ztunnel_sockets",
    "fibers": "ztunnel_fibers",
    "tasks": "ztunnel_tasks",
    "blocks": "ztunnel_allocated_blocks",
    "series": "ztunnel_metric_series",
    "late_s": "ztunnel_loop_late_seconds_total",
    "stalls": "ztunnel_loop_stalls_total",
    "restarts": "ztunnel_task_restarts_total",
}


class Site:
    """The mesh, its load and its changes, while entered by :func:`site`.

    Attributes:
        done: what was carried or changed, by kind.
        failures: what an application saw that it should not, with the seconds since the start.
    """

    def __init__(self, mesh: AmbientMesh, *, every_s: float) -> None:
        self.mesh = mesh
        self.every_s = every_s
        self.done: dict[str, int] = {}
        self.failures: list[str] = []
        self._began_s = time.monotonic()
        self._rng = random.Random(1)
        self._stop = asyncio.Event()

    def count(self, kind: str) -> None:
        self.done[kind] = self.done.get(kind, 0) + 1

    def failed(self, what: str, error: object) -> None:
        self.failures.append(f"{time.monotonic() - self._began_s:.1f} s {what}: {error!r}")

    def stop(self) -> None:
        """Let load and changes end after what they are doing."""
        self._stop.set()

    async def pause(self, seconds: float) -> bool:
        """Wait. Return False once the soak is over."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._stop.wait()
        return not self._stop.is_set()

    # Load

    def load(self) -> list[Callable[[], Awaitable[None]]]:
        """Return what runs side by side until :meth:`stop`."""
        client, near, far = (self.mesh.lab.pod(name) for name in ("client", "near", "far"))
        short = [
            lambda host=host, port=port: self._short(client, host, port)
            for host, port in ((near.ipv4, 8080), (far.ipv4, 8080), (VIP, 80), (far.ipv6, 8080))
        ]
        held = [lambda host=host: self._held(client, host) for host in (near.ipv4, far.ipv4)]
        return [*short, *held, lambda: self._short(far, near.ipv4, 8080), lambda: self._bulk(client, far.ipv4)]

    async def _short(self, place: Place, host: object, port: int) -> None:
        while await self.pause(0.05):
            try:
                answer = await ask(place, host, port)
                if not answer.endswith(b"hello world"):
                    self.failed(f"request to {host}:{port}", answer)
            except (OSError, TproxyError, TimeoutError) as error:
                self.failed(f"request to {host}:{port}", error)
            self.count("requests")

    async def _bulk(self, place: Place, host: object) -> None:
        while await self.pause(0.5):
            try:
                answer = await ask(place, host, 8080, _BULK, wait_s=30)
                if len(answer) < len(_BULK):
                    self.failed(f"bulk to {host}", f"{len(answer)} bytes came back")
            except (OSError, TproxyError, TimeoutError) as error:
                self.failed(f"bulk to {host}", error)
            self.count("bulk")

    async def _held(self, place: Place, host: object) -> None:
        """Keep connections for a while, a few words a second on each."""
        loop = asyncio.get_running_loop()
        while await self.pause(0.1):
            try:
                with await connect((str(host), 8080), netns=place.netns) as sock:
                    for _ in range(self._rng.randrange(5, 60)):
                        await loop.sock_sendall(sock, b"word\n")
                        heard = b""
                        async with asyncio.timeout(20):
                            while not heard.endswith(b"word\n"):
                                data = await loop.sock_recv(sock, 1000)
                                if not data:
                                    raise ConnectionResetError("ended")
                                heard += data
                        if not await self.pause(0.2):
                            break
            except (OSError, TproxyError, TimeoutError) as error:
                # A proxy that is replaced gives the open connections of its drain time to end, then ends them.
                if not self._replaced_lately():
                    self.failed(f"held to {host}", error)
            self.count("held")

    _replaced_at_s = -1000.0

    def _replaced_lately(self) -> bool:
        return time.monotonic() - self._replaced_at_s < 30

    # Changes

    def changes(self) -> list[Callable[[], Awaitable[None]]]:
        """Return the tasks that change the mesh until :meth:`stop`; ``every_s`` is the interval of the slow
        ones.
        """
        return [self._pods, self._policies, self._endpoints, self._control_plane, self._replacements]

    async def _pods(self) -> None:
        guests = [self.mesh.lab.pod(name) for name in ("guest-a", "guest-b")]
        agent = self.mesh.proxies["w1"].agent
        for guest in itertools.cycle(guests):
            if not await self.pause(self.every_s / 30):
                return
            await agent.remove(PodUid(f"uid-{guest.name}"), grace_s=0)
            await agent.enrol(self.mesh.described(guest))
            self.count("pods")

    async def _policies(self) -> None:
        for number in itertools.count():
            if not await self.pause(self.every_s / 20):
                return
            principal = f"cluster.local/ns/default/sa/denied-{number}"
            rule = {"action": "DENY", "rules": [{"from": {"principals": [principal]}}]}
            self.mesh.write_mesh(policies={f"deny-{number % 7}": rule})
            self.count("policies")

    async def _endpoints(self) -> None:
        for number in itertools.count():
            if not await self.pause(self.every_s / 15):
                return
            pods = (["near", "far"], ["near"], ["far"])[number % 3]
            self.mesh.write_mesh(services=services(pods, number))
            self.count("endpoints")

    async def _control_plane(self) -> None:
        while await self.pause(self.every_s):
            await self.mesh.stop_control_plane()
            await self.pause(self.every_s / 6)
            await self.mesh.start_control_plane()
            self.count("control plane")

    async def _replacements(self) -> None:
        worker = self.mesh.lab.worker("w2")
        for number in itertools.count():
            if not await self.pause(self.every_s * 1.5):
                return
            before = self.mesh.proxies["w2"]
            place = (worker.ztunnel, worker.place)[number % 2]
            process = self.mesh.start_proxy(worker, place)
            after = NodeProxy(place, self.mesh.folder, process, before.agent, before.pods)
            try:
                await eventually(after.ready, "the successor ready", 60)
            except AssertionError as error:  # the control plane can be down; the old one continues
                self.failed("replacement", error)
                process.send_signal(signal.SIGTERM)
                continue
            self._replaced_at_s = time.monotonic()
            self.mesh.proxies["w2"] = after
            before.process.send_signal(signal.SIGTERM)
            await eventually(lambda before=before: before.process.poll() is not None, "the old one gone", 60)
            self.count("replaced")

    # Measurements

    def sample(self) -> dict[str, float]:
        """Return the measured proxy's figures; some cost it a metrics page."""
        proxy = self.mesh.proxies["w1"]
        pid = proxy.process.pid
        status = dict(
            line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines() if ":" in line
        )
        found = {
            "rss_kib": float(status["VmRSS"].split()[0]),
            "threads": float(status["Threads"]),
            "descriptors": float(len(os.listdir(f"/proc/{pid}/fd"))),
        }
        page = proxy.get(15020, "/metrics")[1]
        values = dict.fromkeys(_PAGE.values(), 0.0)
        for line in page.splitlines():
            name, _, value = line.rpartition(" ")
            if name in values:
                values[name] = float(value)
        dump = proxy.dump()
        found |= {shown: values[name] for shown, name in _PAGE.items()}
        found["certificates"] = float(len(dump["certificates"]))
        found["workloads"] = float(len(dump["workloads"]))
        found["policies"] = float(len(dump["policies"]))
        found["page_kib"] = len(page) / 1024
        return found


def services(pods: list[str], number: int) -> dict[str, Any]:
    """Return one service of ``pods`` that the load uses, and one whose name changes."""
    return {
        "web": {"addresses": [VIP], "ports": {"http": {"port": 80, "target": 8080}}, "pods": pods},
        f"other-{number % 5}": {
            "addresses": [f"10.96.9.{10 + number % 5}"],
            "ports": {"http": {"port": 80, "target": 8080}},
            "pods": ["near"],
        },
    }


@contextlib.asynccontextmanager
async def site(folder: Path, *, every_s: float) -> AsyncIterator[Site]:
    """Build the mesh and start its applications; load and changes are the caller's to run."""
    captured = [name for names in NODES.values() for name in names]
    found = {"services": services(["near", "far"], 0)}
    mesh = AmbientMesh(NODES, folder, captured=captured, env=ENV, mesh=found, forks=False)
    async with mesh, contextlib.AsyncExitStack() as stack:
        for name in ("near", "far"):
            await stack.enter_async_context(app(mesh.lab.pod(name)))
        yield Site(mesh, every_s=every_s)
