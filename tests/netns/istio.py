"""An Istio mesh in network namespaces: nodes with our proxy and agent, the embedded control plane, applications.

The proxies are processes started as Istio's chart starts them, by their environment; agents and control plane run
in the test's loop. Applications are toys of the test, in the pods' namespaces.
"""

import asyncio
import contextlib
import errno
import json
import os
import re
import socket
import subprocess
import sys
import urllib.request
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import IO, Any

import yaml

from deploy.lab import Lab, Place, Worker
from tests.commands import Ztunnel
from tests.limits import WAIT_S
from tproxy.aio.sockets import connect
from ztunnel.control_plane.server import ControlPlane
from ztunnel.node.agent.description import PodDescription
from ztunnel.node.agent.node import NodeAgent
from ztunnel.proxy.istio.zds.pods import PodInfo, PodUid

ROOT = Path(__file__).parents[2]
#: Returns the content of a local file, for a mesh whose addresses are known.
Local = Callable[["AmbientMesh"], Mapping[str, Any]]
HELLO = b"hello world"


async def eventually(condition: Callable[[], Any], what: str, wait_s: float = WAIT_S) -> Any:
    """Poll a condition that other tasks change; return its first true value.

    A proxy's pages take its time and ours, so a poll waits as long as the one before took, or a tenth of the wait
    so far, up to 0.1 s.
    """
    time = asyncio.get_running_loop().time
    begin = time()
    while True:
        before = time()
        value = condition()
        if value:
            return value
        now = time()
        if now > begin + wait_s:
            raise AssertionError(f"not within {wait_s} s: {what}")
        await asyncio.sleep(min(0.1, max(0.02, now - before, (now - begin) / 10)))


class NodeProxy:
    """One running proxy, the agent of its node, and the pods it is for."""

    def __init__(
        self, place: Place, folder: Path, process: "subprocess.Popen[bytes]", agent: Any, pods: list[str]
    ) -> None:
        self.place = place
        self.process = process
        self.agent = agent
        self.pods = pods
        self.log_path = folder / f"{place.name}.log"

    def log(self) -> list[dict[str, Any]]:
        """Return every complete line so far. The last line can be incomplete and is then left out."""
        lines = self.log_path.read_text().rpartition("\n")[0].splitlines()
        return [json.loads(line) for line in lines if line.startswith("{")]

    def local_files(self) -> int:
        """Return how many contents of the local file have replaced the first one."""
        return sum(line["message"] == "local file applied" for line in self.log())

    def access(self, direction: str = "") -> list[dict[str, Any]]:
        """Access lines about ended connections."""
        found = [
            line for line in self.log() if line["scope"] == "access" and line["message"] != "connection opened"
        ]
        return [line for line in found if not direction or line["direction"] == direction]

    async def ended(self, direction: str, destination: str) -> dict[str, Any]:
        """Return the first access line about a connection to a workload."""
        return (await self.lines(direction, 1, dst_workload=destination))[0]

    async def lines(self, direction: str, count: int, **fields: object) -> list[dict[str, Any]]:
        """Access lines with these fields, ``dst_workload`` for ``dst.workload``, once there are as many."""
        wanted = {re.sub(r"^(src|dst)_", r"\1.", key): value for key, value in fields.items()}

        def found() -> list[dict[str, Any]] | None:
            lines = [
                line
                for line in self.access(direction)
                if all(line.get(key) == value for key, value in wanted.items())
            ]
            return lines if len(lines) >= count else None

        lines: list[dict[str, Any]] = await eventually(found, f"{count} {direction} access lines with {fields}")
        return lines

    async def failed(self, text: str, direction: str = "") -> dict[str, Any]:
        """The first access line whose error contains a text."""

        def found() -> list[dict[str, Any]]:
            return [line for line in self.access(direction) if text in line.get("error", "")]

        return dict((await eventually(found, f"{direction} access line with error {text!r}"))[0])

    def connections(self) -> list[dict[str, Any]]:
        """Those of all pods, as the dump shows them, each with its direction."""
        return [
            connection | {"direction": direction}
            for pod in self.dump()["workloadState"].values()
            for direction, listed in pod.get("connections", {}).items()
            for connection in listed
        ]

    def get(self, port: int, path: str, method: str = "GET") -> tuple[int, str]:
        """A page of the proxy; from inside its namespace."""

        def fetch() -> tuple[int, str]:
            request = urllib.request.Request(f"http://127.0.0.1:{port}{path}", method=method)
            try:
                with urllib.request.urlopen(request, timeout=5) as answer:
                    return answer.status, answer.read().decode()
            except urllib.error.HTTPError as error:
                return error.code, error.read().decode()

        return self.place.run(fetch)

    def ready(self) -> bool:
        """Return the answer of the readiness port."""
        try:
            return self.get(15021, "/healthz/ready")[0] == 200
        except OSError:
            return False

    def readiness(self) -> str:
        """Return the text of the readiness port. Empty while the port is closed."""
        try:
            return self.get(15021, "/healthz/ready")[1]
        except OSError:
            return ""

    def dump(self) -> Any:
        """``/config_dump``."""
        return json.loads(self.get(15000, "/config_dump")[1])

    def metric(self, name: str, **labels: str) -> float:
        """The sum of a metric's samples with these labels."""
        total = 0.0
        for line in self.get(15020, "/metrics")[1].splitlines():
            match = re.match(r"(\w+)(?:\{(.*)\})? (\S+)$", line)
            if match is None or match[1] != name:
                continue
            found = dict(re.findall(r'(\w+)="((?:[^"\\]|\\.)*)"', match[2] or ""))
            if all(found.get(key) == value for key, value in labels.items()):
                total += float(match[3])
        return total


class AmbientMesh:
    """Nodes, pods and a control plane, while entered.

    Args:
        nodes: pod names by node name.
        folder: for sockets, logs and the mesh file.
        mesh: the mesh file's content besides nodes and pods, whose addresses are known only here.
        pods: further fields of each pod in the mesh file.
        captured: pods that the agents enrol; all by default.
        env: further environment of the proxies; ``{node}`` stands for the node's name.
        local: the proxies get their mesh from a local file with this content, made once addresses are known, and
            only certificates from the control plane.
        dedicated: a proxy in each captured pod instead of one per node.
        resolv_conf: the proxies' ``/etc/resolv.conf``; the host's by default.
        agents: false if the test runs agents of its own, at ``<node>.zds`` in the folder.
        forks: false if each proxy starts an interpreter, because its start or memory is measured. By default it is
            forked from a process that has imported it, if it has no environment of the interpreter.
    """

    def __init__(
        self,
        nodes: Mapping[str, list[str]],
        folder: Path,
        *,
        mesh: Mapping[str, Any] | None = None,
        pods: Mapping[str, Mapping[str, Any]] | None = None,
        captured: list[str] | None = None,
        env: Mapping[str, str] | None = None,
        local: Local | None = None,
        dedicated: bool = False,
        resolv_conf: Callable[["AmbientMesh"], str] | None = None,
        agents: bool = True,
        forks: bool = True,
    ) -> None:
        self.lab = Lab(nodes)
        self.folder = folder
        self.mesh = dict(mesh or {})
        self.pods = dict(pods or {})
        self.captured = captured if captured is not None else [name for names in nodes.values() for name in names]
        self.env = dict(env or {})
        self.local = local
        self.dedicated = dedicated
        self.resolv_conf = resolv_conf
        self.agents = agents
        self.forks = forks
        self.proxies: dict[str, NodeProxy] = {}
        self.control_plane: ControlPlane | None = None
        self._stack = contextlib.AsyncExitStack()
        self._control_stack = contextlib.AsyncExitStack()

    async def __aenter__(self) -> "AmbientMesh":
        async with contextlib.AsyncExitStack() as stack:
            stack.enter_context(self.lab)
            self.write_mesh()
            if self.local is not None:
                self.write_local(self.local)
            await self.start_control_plane()
            stack.push_async_callback(self.stop_control_plane)
            for worker in self.lab.workers.values():
                await self._start(stack, worker)
            for proxy in self.proxies.values():
                await eventually(proxy.ready, f"{proxy.place.name} ready")
            self._stack = stack.pop_all()
        return self

    async def __aexit__(self, *exception: object) -> None:
        await self._stack.aclose()

    def called(self, pod: str) -> tuple[str, str]:
        """Return namespace and name of a pod of the lab, as the mesh knows it."""
        return "default", pod

    # The control plane

    def write_mesh(self, **changes: Any) -> None:
        """Write the mesh file; ``changes`` replace top-level keys."""
        self.mesh |= changes
        described = {
            "nodes": {name: {} for name in self.lab.workers},
            "pods": {
                "/".join(self.called(pod.name)): {
                    "node": worker.place.name,
                    "addresses": [str(address) for address in pod.addresses],
                    "mesh": pod.name in self.captured,
                    "service_account": pod.name,
                    **self.pods.get(pod.name, {}),
                }
                for worker in self.lab.workers.values()
                for pod in worker.pods.values()
            }
            | {
                f"istio-system/ztunnel-{name}": {
                    "node": name,
                    "addresses": [str(address) for address in worker.place.addresses],
                    "service_account": "ztunnel",
                    "workload": "ztunnel",
                }
                for name, worker in self.lab.workers.items()
            },
            **self.mesh,
        }
        path = self.folder / "mesh.yaml"
        new = path.with_suffix(".new")
        new.write_text(yaml.safe_dump(described))
        new.rename(path)

    async def change_local(self, local: Local) -> None:
        """Replace the local file by another content; return once it is current in every proxy."""
        current = {name: proxy.local_files() for name, proxy in self.proxies.items()}
        self.write_local(local)
        for name, proxy in self.proxies.items():
            await eventually(lambda: proxy.local_files() > current[name], f"the new local file current in {name}")  # noqa: B023  awaited before the next

    def write_local(self, local: Local) -> None:
        """Write the local file; running proxies follow it, each in its own time."""
        path = self.folder / "local.yaml"
        new = path.with_suffix(".new")
        new.write_text(yaml.safe_dump({"policies": [], "services": [], **local(self)}))
        new.rename(path)

    def workloads(self, **more: Mapping[str, Any]) -> list[dict[str, Any]]:
        """Return every pod as an entry of a local file, with further fields from ``more`` by name. Captured pods
        accept tunnels.

        A test serves the tunnels of other pods that accept them. These are on a node without a proxy: a proxy is
        ready only once it has the certificates of its node, and these it cannot get.
        """
        found = [
            {
                "uid": f"Kubernetes//Pod/default/{pod.name}",
                "name": pod.name,
                "namespace": "default",
                "serviceAccount": str(self.pods.get(pod.name, {}).get("service_account", pod.name)),
                "workloadIps": [str(address) for address in pod.addresses],
                "protocol": "HBONE" if pod.name in self.captured else "TCP",
                "workloadName": pod.name,
                "canonicalName": pod.name,
                "node": worker.place.name,
                "services": {},
                **more.get(pod.name, {}),
            }
            for worker in self.lab.workers.values()
            for pod in worker.pods.values()
        ]
        for entry in found:
            if entry["protocol"] == "HBONE" and entry["name"] not in self.captured:
                entry["node"] = "w0"
        return found

    async def start_control_plane(self) -> None:
        """Serve the mesh file."""
        plane = ControlPlane(self.folder / "mesh.yaml", [f"unix:{self.folder}/xds.sock"], self.folder / "ca")
        stack = contextlib.AsyncExitStack()
        group = await stack.enter_async_context(asyncio.TaskGroup())
        task = group.create_task(plane.run(), name="control plane")
        stack.callback(task.cancel)
        await plane.ready.wait()
        self.control_plane, self._control_stack = plane, stack

    async def stop_control_plane(self) -> None:
        """Be away."""
        await self._control_stack.aclose()

    # Nodes

    async def _start(self, stack: contextlib.AsyncExitStack, worker: Worker) -> None:
        name = worker.place.name
        if not self.agents:
            process = self.start_proxy(worker)
            self.proxies[name] = NodeProxy(worker.place, self.folder, process, None, list(worker.pods))
            return
        agent = await stack.enter_async_context(
            NodeAgent(self.folder / f"{name}.zds", grace_s=0.1, remove_on_exit=True)
        )
        captured = [pod for pod in worker.pods.values() if pod.name in self.captured]
        if self.dedicated:
            for pod in captured:
                # Only for the rules: no proxy answers the announcement.
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(2):
                        await agent.enrol(self.described(pod))
                env = {
                    "PROXY_MODE": "dedicated",
                    "PROXY_WORKLOAD_INFO": f"default/{pod.name}/{self.described(pod).info.service_account}",
                    "PACKET_MARK": "1337",
                }
                process = self.start_proxy(worker, pod, **env)
                self.proxies[pod.name] = NodeProxy(pod, self.folder, process, agent, [pod.name])
            return
        process = self.start_proxy(worker)
        self.proxies[name] = NodeProxy(worker.place, self.folder, process, agent, list(worker.pods))
        for pod in captured:
            await agent.enrol(self.described(pod))

    def start_proxy(
        self,
        worker: Worker,
        place: Place | None = None,
        *,
        stdout: IO[bytes] | None = None,
        prefix: Sequence[str] = (),
        program: Sequence[str] = (),
        **env: str,
    ) -> "subprocess.Popen[bytes]":
        """A proxy process, as Istio's chart starts it; by default in the node's namespace, its log in a file.

        ``prefix`` is a program that starts it, such as setpriv. ``program`` is ours by default.
        """
        name = worker.place.name
        place = place or worker.place
        xds = f"unix:{self.folder}/xds.sock"
        environment = {
            **{key: os.environ[key] for key in ("PATH", "HOME") if key in os.environ},
            "PYTHONPATH": str(ROOT),
            "XDS_ADDRESS": xds,
            "CA_ADDRESS": xds,
            "INPOD_UDS": f"{self.folder}/{name}.zds",
            "NODE_NAME": name,
            "POD_NAME": f"ztunnel-{name}",
            "POD_NAMESPACE": "istio-system",
            "SERVICE_ACCOUNT": "ztunnel",
            "INSTANCE_IP": str(worker.place.ipv4),
            "ISTIO_META_CLUSTER_ID": "Kubernetes",
            "ISTIO_META_DNS_CAPTURE": "false",
            "TERMINATION_GRACE_PERIOD_SECONDS": "30",
            "LOG_FORMAT": "json",
            "RUST_LOG": "info",
            **({"XDS_ADDRESS": "", "LOCAL_XDS_PATH": f"{self.folder}/local.yaml"} if self.local else {}),
            **{key: value.replace("{node}", name) for key, value in self.env.items()},
            **env,
        }
        # A forked process has the interpreter's flags and the preloaded libraries of the one that forks it.
        special = [name for name in environment.keys() - {"PYTHONPATH"} if name.startswith(("PYTHON", "LD_"))]
        replaced = prefix or program or special
        forks = self.forks and not replaced
        command = [*prefix, *(program or (sys.executable, "-m", "ztunnel")), "proxy", "ztunnel"]
        file = None
        if self.resolv_conf is not None:
            file = self.folder / "resolv.conf"
            file.write_text(self.resolv_conf(self))
        if file is not None and not forks:
            mounted = 'mount --bind "$0" /etc/resolv.conf && exec "$@"'
            command = ["unshare", "--mount", "sh", "-c", mounted, str(file), *command]
        output = (self.folder / f"{place.name}.log").open("ab")
        with output:
            outputs = {"stdout": stdout or output, "stderr": output}
            if forks:
                forked = partial(Ztunnel, resolv_conf=file)
                return place.popen(["proxy", "ztunnel"], start=forked, env=environment, **outputs)
            return place.popen(command, env=environment, stdin=subprocess.DEVNULL, **outputs)

    def described(self, pod: Place) -> PodDescription:
        """A pod as the agent announces it."""
        account = str(self.pods.get(pod.name, {}).get("service_account", pod.name))
        namespace, name = self.called(pod.name)
        info = PodInfo(name=name, namespace=namespace, service_account=account)
        return PodDescription(uid=PodUid(f"uid-{pod.name}"), info=info, netns=pod.netns.name)

    def node_of(self, pod: str) -> NodeProxy:
        """The proxy of a pod's node."""
        for proxy in self.proxies.values():
            if pod in proxy.pods:
                return proxy
        raise KeyError(pod)


async def ask(place: Place, host: object, port: int, payload: bytes = HELLO, wait_s: float = WAIT_S) -> bytes:
    """Connect from a pod, send, half-close, and return everything that comes back.

    Raises:
        OSError, TimeoutError: as the application would see it.
    """
    loop = asyncio.get_running_loop()
    async with asyncio.timeout(wait_s):
        sock = await connect((str(host), port), netns=place.netns)
        with sock:
            await loop.sock_sendall(sock, payload)
            try:
                sock.shutdown(socket.SHUT_WR)
            except OSError as error:
                # A reset came after the bytes were sent: reading raises it.
                if error.errno != errno.ENOTCONN:
                    raise
            received = b""
            while data := await loop.sock_recv(sock, 65536):
                received += data
            return received


async def refused(place: Place, host: object, port: int) -> bool:
    """Whether an application gets nothing: an end or a reset, for its bytes may have been on their way."""
    try:
        return await ask(place, host, port) == b""
    except OSError as error:
        if error.errno in (errno.ECONNRESET, errno.EPIPE, errno.ENOTCONN):
            return True
        raise


@contextlib.asynccontextmanager
async def mesh_of(
    *args: Any, kind: Callable[..., AmbientMesh] = AmbientMesh, **options: Any
) -> AsyncIterator[AmbientMesh]:
    """An :class:`AmbientMesh`, with the proxies' logs shown when the test fails."""
    harness = kind(*args, **options)
    try:
        async with harness:
            yield harness
    except BaseException:
        for path in sorted(harness.folder.glob("*.log")):
            print(f"--- {path.name}\n{path.read_text()[-6000:]}")
        raise
