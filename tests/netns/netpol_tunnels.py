"""The pods of :mod:`tests.netns.netpol_harness` in a mesh: every TCP connection of a pod passes through our
proxies.

Each node has a proxy that follows ``ztunnel netpol run --policy-sync``, and a table that lets tunnels through.
Both ends of a connection are captured pods, except where a probe names a node.
"""

import asyncio
import contextlib
import errno
import json
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from deploy.lab import Place, Worker
from tests.netns.istio import AmbientMesh
from tests.netns.netpol_harness import NODES, WAIT_S, WATCH_S, Cluster, Probe
from xds.model import calico as c
from ztunnel.kube.objects import ObjectKey
from ztunnel.policy.calico.compile import Compiled
from ztunnel.policy.netpol.controller import local_addresses
from ztunnel.policy.netpol.table_builder import local_endpoints
from ztunnel.policy.policysync.server import NODE_STREAMS, PolicySyncServer
from ztunnel.policy.policysync.view import excerpt


class _Mesh(AmbientMesh):
    """Pods by their names in the cluster, and a PolicySync socket for each node."""

    def called(self, pod: str) -> tuple[str, str]:
        namespace, _, name = pod.partition("-")
        return namespace, name

    def start_proxy(
        self, worker: Worker, place: Place | None = None, *, stdout: IO[bytes] | None = None, **env: str
    ) -> "subprocess.Popen[bytes]":
        env["POLICY_SYNC"] = f"{self.folder}/{worker.place.name}.policy"
        return super().start_proxy(worker, place, stdout=stdout, **env)


class TunnelledCluster(Cluster):
    """A :class:`Cluster` whose TCP connections are tunnelled.

    Its servers are in a separate event loop, which runs while the test waits.
    """

    tunnels = True

    def __init__(self) -> None:
        super().__init__()
        self._loop = asyncio.new_event_loop()
        self._stop = asyncio.Event()
        self._ready = asyncio.Event()
        self._servers: dict[str, PolicySyncServer] = {}
        self._markers: list[str] = []

    # Life

    def _enter_lab(self, stack: contextlib.ExitStack) -> None:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="netpol-")))
        self.mesh = _Mesh(NODES, folder)
        self.lab = self.mesh.lab
        stack.callback(self._loop.close)
        living = self._loop.create_task(self._live(), name="mesh")
        stack.callback(self._end, living)
        waiting = self._loop.create_task(self._ready.wait(), name="mesh is ready")
        self._loop.run_until_complete(asyncio.wait((living, waiting), return_when=asyncio.FIRST_COMPLETED))
        if living.done():
            living.result()

    async def _live(self) -> None:
        async with contextlib.AsyncExitStack() as stack:
            for node in NODES:
                server = self._servers[node] = await stack.enter_async_context(PolicySyncServer())
                path = f"{self.mesh.folder}/{node}.policy"
                await server.open(path, lambda found: found.endpoints, streams=NODE_STREAMS)
                server.publish(Compiled())  # proxies are ready once they have policies
            await stack.enter_async_context(self.mesh)
            self._ready.set()
            await self._stop.wait()

    def _end(self, living: "asyncio.Task[None]") -> None:
        self._stop.set()
        self._loop.run_until_complete(asyncio.wait([living]))
        living.result()

    def until(self, check: Callable[[], bool]) -> None:
        """Wait for a condition that proxies change."""
        deadline = time.monotonic() + WAIT_S
        while not check():
            assert time.monotonic() < deadline
            self._pause()

    def _pause(self) -> None:
        self._loop.run_until_complete(asyncio.sleep(0.003))

    # Objects

    def _pod(self, pod: str, node: str, labels: dict[str, str]) -> dict[str, Any]:
        body = super()._pod(pod, node, labels)
        body["metadata"]["annotations"] = {"ambient.istio.io/redirection": "enabled"}
        body["spec"]["serviceAccountName"] = pod
        return body

    def apply(self, objects: dict[ObjectKey, Any]) -> int:
        """See :meth:`Cluster.apply`; returns when the proxies, too, obey."""
        steps = super().apply(objects)
        # Namespaces are sent to a client last, so a new namespace there means that everything else has arrived.
        self._markers.append(f"marker-{len(self._markers)}")
        for node in self.nodes:
            found = excerpt(self.compiler.compiled, local_endpoints(self.compiler.compiled, node.name))
            ours = frozenset(map(str, local_addresses(node.place.netns)))
            found.ip_sets[c.NODE_ADDRESSES] = (c.IpSetType.IP, ours)
            wanted = len(found.namespaces) + len(self._markers)
            found.namespaces.update((marker, {}) for marker in self._markers)
            self._servers[node.name].publish(found)
            self._loop.run_until_complete(self._told(node.name, wanted))
        return steps

    async def _told(self, node: str, namespaces: int) -> None:
        proxy = self.mesh.proxies[node]
        async with asyncio.timeout(WAIT_S):
            while True:
                if json.loads(proxy.get(15000, "/policies")[1])["store"]["namespaces"] == namespaces:
                    return
                await asyncio.sleep(0.005)

    # Connections

    def wrong(self, wanted: list[Probe]) -> list[str]:
        """Return the probes with an unexpected result.

        A proxy accepts before anything has been judged. So a TCP connection counts as allowed when its first bytes
        have arrived at the pod, and as denied when it was closed or reset, or nothing arrived at all.
        """
        found = super().wrong([probe for probe in wanted if probe.protocol != "tcp"])
        with contextlib.ExitStack() as stack:
            attempts = [
                _Attempt(
                    probe, version, stack.enter_context(self._started(probe, version)), f"{number:8}".encode()
                )
                for number, (probe, version) in enumerate(
                    (probe, version) for probe in wanted if probe.protocol == "tcp" for version in (4, 6)
                )
            ]
            arrivals = _Arrivals([sock for (_, _, protocol), sock in self.listeners.items() if protocol == "tcp"])
            stack.callback(arrivals.close)
            deadline = time.monotonic() + WAIT_S
            while (left := [each for each in attempts if each.allowed is None]) and time.monotonic() < deadline:
                self._pause()
                arrivals.read()
                for attempt in left:
                    attempt.look(arrivals.numbers)
                if not any(each.probe.allowed or each.sent for each in left):
                    # The kernel drops the packets of these, and no answer will come.
                    deadline = min(deadline, time.monotonic() + WATCH_S)
        for attempt in attempts:
            if attempt.allowed is None and attempt.sent:
                found.append(f"{attempt.probe} IPv{attempt.version} has no answer")
            elif bool(attempt.allowed) != attempt.probe.allowed:
                found.append(f"{attempt.probe} IPv{attempt.version}")
        return found


@dataclass(slots=True)
class _Attempt:
    """A TCP connection in progress.

    Attributes:
        number: its first bytes, by which the far end identifies it.
        sent: it was accepted, by a proxy or the pod.
        allowed: None while the result is unknown.
    """

    probe: Probe
    version: int
    sock: socket.socket
    number: bytes
    sent: bool = False
    allowed: bool | None = None

    def look(self, arrived: set[bytes]) -> None:
        """Find out how it goes."""
        if self.number in arrived:
            self.allowed = True
            return
        try:
            if not self.sent:
                self.sent = self.sock.send(self.number) == len(self.number)
            if self.sock.recv(1) == b"":
                self.allowed = False
        except BlockingIOError:
            pass
        except OSError as error:
            if error.errno != errno.ENOTCONN:
                self.allowed = False


class _Arrivals:
    """Records what arrives at the pods."""

    def __init__(self, listeners: list[socket.socket]) -> None:
        self._listeners = listeners
        self._accepted: list[socket.socket] = []
        self.numbers: set[bytes] = set()

    def read(self) -> None:
        for listener in self._listeners:
            with contextlib.suppress(BlockingIOError):
                while True:
                    sock, _ = listener.accept()
                    sock.setblocking(False)
                    self._accepted.append(sock)
        for sock in self._accepted:
            with contextlib.suppress(OSError):
                self.numbers.add(sock.recv(64))

    def close(self) -> None:
        for sock in self._accepted:
            sock.close()
