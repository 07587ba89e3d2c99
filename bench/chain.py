"""Builds the chains to measure: load client, proxy, mTLS tunnel, proxy, load server, each in its own namespace.

All chains of a run exist at the same time, so that other work of the machine affects them alike.
"""

import contextlib
import json
import os
import resource
import shutil
import socket
import struct
import subprocess
import sys
import sysconfig
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from deploy.lab import Lab, Place
from tproxy.aio.kernel import BlockingKernel
from tproxy.aio.netlink import NetlinkSocket
from tproxy.aio.netns import Netns
from tproxy.node import HOST, OWNERSHIP, ZTUNNEL, node
from tproxy.render.nftables import DUMP, REQUEST
from tproxy.wire import Message

VIP = "10.96.0.10"
PORT = 9080
HBONE_PORT = 15008
_MESSAGE_BYTES = 1024
#: The longest time that a client holds idle connections.
_IDLE_S = 600
#: ``linux/sock_diag.h``, ``linux/inet_diag.h``, ``linux/tcp.h``.
_SOCK_DIAG = 4
_BY_FAMILY = 20
_DESTROY = 21
_ESTABLISHED = 1
_IDENTITY_BYTES = 48
_HERE = Path(__file__).resolve().parent
_ROOT = _HERE.parent
#: The port of the control plane in an Istio mesh: istiod's for TLS.
_XDS_PORT = 15012
_BIN = Path(sys.executable).parent
_TICKS = os.sysconf("SC_CLK_TCK")

#: A proxy's command line, by the chain's folder (with ``xds.sock``) and the node's name.
Command = Callable[[Path, str], list[str]]


@dataclass(slots=True)
class Usage:
    """A proxy's CPU seconds so far, the seconds in the kernel, and its current resident bytes."""

    cpu_s: float
    kernel_s: float
    rss: int


@dataclass(slots=True)
class Chain:
    """One chain.

    Attributes:
        name: its name in tables.
        proxies: the two processes, the client's node first. Empty for the chain without proxies.
        target: the address dialled by clients.
        pairs: the pairs of a client pod and a server pod.
        server: the load generator's process in the first server pod.
    """

    name: str
    lab: Lab
    load: Path
    proxies: list["subprocess.Popen[Any]"] = field(default_factory=list)
    target: str = ""
    pairs: int = 1
    server: "subprocess.Popen[Any] | None" = None

    def run(self, *arguments: str) -> dict[str, Any]:
        """Run the load once from the client's pod, and return its JSON result."""
        kind, *rest = arguments
        command = [str(self.load), kind, self.target, str(PORT), *rest]
        process = self.lab.pod("client").popen(command, stdout=subprocess.PIPE)
        output, _ = process.communicate(timeout=120)
        if process.returncode:
            raise RuntimeError(f"{self.name}: {' '.join(command)} failed with {process.returncode}")
        result: dict[str, Any] = json.loads(output.splitlines()[-1])
        return result

    @contextlib.contextmanager
    def idling(self, connections: int) -> Iterator[None]:
        """Hold this number of idle connections, spread over the pairs of pods; each has carried one message."""
        clients = list(self.lab.workers["a"].pods)[: self.pairs]
        processes = []
        try:
            for number, client in enumerate(clients):
                count = connections // self.pairs + (number < connections % self.pairs)
                target = str(self.lab.pod(_numbered("server", number)).ipv4) if self.pairs > 1 else self.target
                command = [str(self.load), "idle", target, str(PORT), str(count), str(_IDLE_S)]
                processes.append(self.lab.pod(client).popen(command, stdout=subprocess.PIPE))
            for process in processes:
                assert process.stdout is not None
                if not process.stdout.readline().startswith(b'{"idle"'):
                    raise RuntimeError(f"{self.name}: {connections} connections were not all open in {_IDLE_S} s")
            yield
        finally:
            for process in processes:
                process.kill()
                process.wait()

    def end_tunnels(self) -> int:
        """Reset the connections that carry tunnels, as a network failure would, and return their number."""
        client = self.lab.workers["a"]
        places = (client.ztunnel, *client.pods.values())
        return sum(_end_connections(place.netns, HBONE_PORT) for place in places) if self.proxies else 0

    def ask_once(self) -> float:
        """Return the seconds that one request takes, on its own connection."""

        def ask() -> float:
            message, left = b"E" + bytes(_MESSAGE_BYTES), _MESSAGE_BYTES
            began = time.perf_counter()
            with socket.create_connection((self.target, PORT), timeout=5) as sock:
                sock.sendall(message)
                while left and (data := sock.recv(left)):
                    left -= len(data)
            if left:
                raise RuntimeError(f"{self.name}: the connection ended before its answer")
            return time.perf_counter() - began

        return float(self.lab.pod("client").run(ask))

    @contextlib.contextmanager
    def apart(self, one_way_us: int) -> Iterator[None]:
        """Delay frames between the two nodes."""
        with self.lab.unplugged() as (fabric, ports):
            with fabric.entered():
                wire = subprocess.Popen([self.load, "wire", *ports, str(one_way_us)], stdout=subprocess.PIPE)
            try:
                assert wire.stdout is not None
                if not wire.stdout.readline():
                    raise RuntimeError(f"{self.name}: the wire did not start")
                yield
            finally:
                wire.kill()
                wire.wait()

    def usage(self) -> list[Usage]:
        """Return the usage of each proxy, its workers included."""
        return [_usage_of_all(process.pid) for process in self.proxies]

    def load_s(self) -> float:
        """Return the CPU seconds of the server so far, and of all ended clients of any chain."""
        assert self.server is not None
        clients = resource.getrusage(resource.RUSAGE_CHILDREN)
        return _usage(self.server.pid).cpu_s + clients.ru_utime + clients.ru_stime


def _end_connections(netns: Netns, port: int) -> int:
    """End every established connection to a port (SOCK_DESTROY of sock_diag(7)); the peers see a reset."""
    header = struct.Struct("=BBBBI")  # inet_diag_req_v2, before the socket's identity
    ended = 0
    with NetlinkSocket(_SOCK_DIAG, netns) as link:
        for family in (socket.AF_INET, socket.AF_INET6):
            wanted = header.pack(family, socket.IPPROTO_TCP, 0, 0, 1 << _ESTABLISHED)
            for found in link.dump(Message(_BY_FAMILY, REQUEST | DUMP, wanted + bytes(_IDENTITY_BYTES))):
                identity = found[4 : 4 + _IDENTITY_BYTES]
                if int.from_bytes(identity[2:4], "big") == port:
                    link.request(Message(_DESTROY, REQUEST, wanted + identity))
                    ended += 1
    return ended


def _usage_of_all(pid: int) -> Usage:
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    each = [_usage(pid), *(_usage(int(child)) for child in children)]
    return Usage(
        sum(usage.cpu_s for usage in each), sum(usage.kernel_s for usage in each), sum(usage.rss for usage in each)
    )


def _usage(pid: int) -> Usage:
    stat = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    user, kernel = int(stat[11]) / _TICKS, int(stat[12]) / _TICKS
    return Usage(user + kernel, kernel, pages * os.sysconf("SC_PAGE_SIZE"))


def build_load(folder: Path) -> Path:
    """Compile the load generator."""
    compiler = os.environ.get("CC") or shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        raise RuntimeError("the benches need a C compiler (cc) for their load generator")
    target = folder / "load"
    subprocess.run([compiler, "-O2", "-o", str(target), str(_HERE / "load.c")], check=True)
    return target


def _numbered(pod: str, number: int) -> str:
    return f"{pod}-{number}" if number else pod


def _account(pod: str) -> str:
    return pod.partition("-")[0]


def _mesh(lab: Lab) -> str:
    pods = {}
    for name, worker in lab.workers.items():
        for pod, place in worker.pods.items():
            pods[pod] = {
                "node": name,
                "addresses": [str(place.ipv4)],
                "service_account": _account(pod),
            }
    return json.dumps(
        {
            "nodes": {name: {} for name in lab.workers},
            "pods": pods,
            "services": {"server": {"addresses": [VIP], "ports": {"tcp": PORT}, "pods": ["server"]}},
            "policies": {
                "client-only": {
                    "service_account": "server",
                    "rules": [{"from": {"principals": ["cluster.local/ns/default/sa/client"]}}],
                }
            },
        }
    )


def _envoy_bootstrap(folder: Path, name: str) -> Path:
    document = {
        "node": {
            "id": f"sidecar~0.0.0.0~ztunnel-{name}.istio-system~istio-system.svc.cluster.local",
            "cluster": "ztunnel.proxy.istio-system",
            "metadata": {"GENERATOR": "ztunnel-envoy", "AMBIENT_TYPE": "ztunnel", "NODE_NAME": name},
        },
        "admin": {"address": {"socket_address": {"address": "127.0.0.1", "port_value": 15000}}},
        "bootstrap_extensions": [
            {
                "name": "envoy.bootstrap.internal_listener",
                "typed_config": {
                    "@type": "type.googleapis.com/envoy.extensions.bootstrap.internal_listener.v3.InternalListener"
                },
            }
        ],
        "static_resources": {
            "clusters": [
                {
                    "name": "xds-grpc",
                    "type": "STATIC",
                    "typed_extension_protocol_options": {
                        "envoy.extensions.upstreams.http.v3.HttpProtocolOptions": {
                            "@type": "type.googleapis.com/envoy.extensions.upstreams.http.v3.HttpProtocolOptions",
                            "explicit_http_config": {"http2_protocol_options": {}},
                        }
                    },
                    "load_assignment": {
                        "cluster_name": "xds-grpc",
                        "endpoints": [
                            {
                                "lb_endpoints": [
                                    {"endpoint": {"address": {"pipe": {"path": str(folder / "xds.sock")}}}}
                                ]
                            }
                        ],
                    },
                }
            ]
        },
        "dynamic_resources": {
            "lds_config": {"ads": {}, "resource_api_version": "V3"},
            "cds_config": {"ads": {}, "resource_api_version": "V3"},
            "ads_config": {
                "api_type": "GRPC",
                "transport_api_version": "V3",
                "set_node_on_first_message_only": True,
                "grpc_services": [{"envoy_grpc": {"cluster_name": "xds-grpc"}}],
            },
        },
    }
    path = folder / f"envoy-{name}.json"
    path.write_text(json.dumps(document))
    return path


def ours(folder: Path, name: str) -> list[str]:
    """Return the command of our proxy."""
    return [
        str(_BIN / "ztunnel"),
        "proxy",
        *("--control-plane", f"unix:{folder / 'xds.sock'}"),
        *("--node", name),
        *os.environ.get("ZTUNNEL_BENCH_FLAGS", "").split(),
    ]


def in_pods(folder: Path, name: str) -> list[str]:
    """Return the command of our proxy in an Istio mesh, which its environment configures."""
    return [str(_BIN / "ztunnel"), "proxy"]


def ztunnel_of(path: str) -> Command:
    """Return the command of any program that takes the environment of Istio's ztunnel, as ``command_in_pods``."""

    def command(folder: Path, name: str) -> list[str]:
        return [path, "proxy", "ztunnel"]

    return command


def envoy(folder: Path, name: str) -> list[str]:
    """Return the command of Envoy with two workers."""
    bootstrap = _envoy_bootstrap(folder, name)
    return [
        *(str(_BIN / "envoy"), "-c", str(bootstrap)),
        # Envoy's hot restart uses shared memory with one name in every namespace, so one of two Envoys that start
        # at once can crash.
        "--disable-hot-restart",
        *("--concurrency", "2", "--log-level", "error"),
    ]


def rival(folder: Path, name: str) -> list[str]:
    """Return the command of ``RIVAL_CMD`` with ``{node}`` and ``{xds}`` filled in."""
    text = os.environ["RIVAL_CMD"].format(node=name, xds=f"unix:{folder / 'xds.sock'}")
    return ["sh", "-c", f"exec {text}"]


def _quick_ports(place: Place) -> None:
    """Let the kernel reuse ports of closed connections at once, for many short connections from one address."""
    with place.netns.entered():
        ipv4 = Path("/proc/sys/net/ipv4")
        (ipv4 / "ip_local_port_range").write_text("1024 65535")
        (ipv4 / "tcp_tw_reuse").write_text("1")


@contextlib.contextmanager
def chain(
    name: str,
    load: Path,
    command: Command | None,
    target: str,
    *,
    one_node: bool = False,
    pairs: int = 1,
    settings: Mapping[str, str] | None = None,
    command_in_pods: Command | None = None,
) -> Iterator[Chain]:
    """Start a chain while entered; without ``command`` client and server are connected directly.

    Args:
        name: its name in tables.
        load: the load generator.
        command: the proxies' command line. :func:`in_pods` selects an Istio mesh.
        target: ``pod`` (tunnel straight from the capture listener) or ``service`` (by the service's address).
        one_node: client and server are on the same node and use the same proxy.
        pairs: the number of pairs, each a client pod and a server pod.
        settings: further environment variables of our proxies, in an Istio mesh.
        command_in_pods: the command to run in an Istio mesh instead of our proxy's.
    """
    clients = [_numbered("client", number) for number in range(pairs)]
    servers = [_numbered("server", number) for number in range(pairs)]
    with (
        tempfile.TemporaryDirectory(prefix=f"bench-{name}-") as text,
        Lab({"a": [*clients, *servers]} if one_node else {"a": clients, "b": servers}) as lab,
    ):
        folder = Path(text)
        made = Chain(name, lab, load, pairs=pairs)
        for worker in lab.workers.values():
            _quick_ports(worker.ztunnel)
            for pod in worker.pods.values():
                _quick_ports(pod)
        made.server, *_ = [lab.pod(server).popen([str(load), "serve", str(PORT)]) for server in servers]
        made.target = str(lab.pod("server").ipv4)
        if command is not None:
            made.target = VIP if target == "service" else made.target
            _start(made, folder, command, settings or {}, command_in_pods or in_pods)
        _wait(made)
        yield made


def _start(
    made: Chain,
    folder: Path,
    command: Command,
    settings: Mapping[str, str],
    command_in_pods: Command,
) -> None:
    (folder / "mesh.json").write_text(_mesh(made.lab))
    environment = {**os.environ, "PYTHONPATH": str(_ROOT)}
    environment.pop("ZTUNNEL_BENCH_FLAGS", None)  # the proxy refuses unknown variables with its prefix
    log = (folder / "log").open("wb")
    plane = [
        *(str(_BIN / "ztunnel"), "control-plane", str(folder / "mesh.json")),
        *("--listen", f"unix:{folder / 'xds.sock'}"),
        *("--access-log", str(folder / "access.log")),
    ]
    place = next(iter(made.lab.workers.values())).place
    istiod = f"{place.ipv4}:{_XDS_PORT}"
    if command is in_pods:
        plane += ["--listen", istiod, "--tls-host", str(place.ipv4), "--ca-dir", str(folder / "ca")]
    place.popen(plane, stdout=log, stderr=log, env=environment)
    deadline = time.monotonic() + 20
    while not (folder / "xds.sock").exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    if command is in_pods:
        environment |= {
            **settings,
            **dict.fromkeys(("XDS_ADDRESS", "CA_ADDRESS"), f"https://{istiod}"),
            **dict.fromkeys(("XDS_ROOT_CA", "CA_ROOT_CA"), str(folder / "ca" / "root-cert.pem")),
        }
        _start_in_pods(made, folder, environment, log, command_in_pods)
        log.close()
        return
    if command is rival:  # it can be another checkout of this project, which must not import this one
        environment.pop("PYTHONPATH")
    for name, worker in made.lab.workers.items():
        netns = {ZTUNNEL: worker.ztunnel.netns, HOST: worker.place.netns}
        with contextlib.closing(BlockingKernel(netns, OWNERSHIP)) as kernel:
            kernel.apply(node(worker.wanted()))
        process = worker.ztunnel.popen(command(folder, name), stdout=log, stderr=log, env=environment)
        made.proxies.append(process)
    log.close()


def _start_in_pods(
    made: Chain,
    folder: Path,
    environment: dict[str, str],
    log: IO[bytes],
    command: Command,
) -> None:
    """Start an agent and a proxy per node, in the node's own namespace. Return when every pod is captured."""
    for name, worker in made.lab.workers.items():
        pods = {
            pod: {"netns": place.netns.name, "service_account": _account(pod)}
            for pod, place in worker.pods.items()
        }
        described = folder / f"{name}-pods.json"
        described.write_text(json.dumps({"pods": pods}))
        zds = folder / f"{name}.zds"
        agent = [str(_BIN / "ztunnel"), "agent", "--socket", str(zds), "--state", str(described)]
        worker.place.popen(agent, stdout=log, stderr=log, env=environment)
        addresses = {
            "AUTH_TOKEN": str(_token(folder, name)),
            "INPOD_UDS": str(zds),
            "NODE_NAME": name,
            "POD_NAME": f"ztunnel-{name}",
            "POD_NAMESPACE": "istio-system",
            "SERVICE_ACCOUNT": "ztunnel",
        }
        flags = dict(flag.split("=", 1) for flag in os.environ.get("ZTUNNEL_BENCH_FLAGS", "").split())
        output = (folder / f"{name}-access.log").open("wb")
        process = worker.place.popen(
            command(folder, name), stdout=output, stderr=log, env={**environment, **addresses, **flags}
        )
        output.close()
        made.proxies.append(process)
    for worker in made.lab.workers.values():
        wanted = f"workload_manager_active_proxy_count {len(worker.pods)}\n"
        deadline = time.monotonic() + 20
        while wanted not in worker.place.run(_metrics) and time.monotonic() < deadline:
            time.sleep(0.1)


def _token(folder: Path, node: str) -> Path:
    """Make a file with the bearer token of a node's proxy."""
    plane = [str(_BIN / "ztunnel"), "control-plane", str(folder / "mesh.json")]
    command = [*plane, "--ca-dir", str(folder / "ca"), "--token", node]
    path = folder / f"{node}.token"
    # Istio's ztunnel sends the file's content unchanged, and a line break is not valid in a header value.
    path.write_bytes(subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout.strip())
    return path


def _metrics() -> str:
    with contextlib.suppress(OSError), urllib.request.urlopen("http://127.0.0.1:15020/metrics", timeout=5) as page:
        return str(page.read().decode())
    return ""


def _wait(made: Chain, limit_s: float = 120.0) -> None:
    """Wait until a request through the chain succeeds."""
    deadline = time.monotonic() + limit_s
    while True:
        with contextlib.suppress(RuntimeError, subprocess.TimeoutExpired):
            result = made.run("rr", "1", "0.1")
            if result["messages"] and not result["failures"]:
                return
        if time.monotonic() > deadline:
            raise RuntimeError(f"{made.name}: no request passed within {limit_s:g} s")
        time.sleep(0.2)


def version() -> str:
    """Return the names of the machine and the interpreter, for the table's heading."""
    kernel = os.uname()
    python = sys.version.split()[0]
    release, platform = kernel.release.split("-")[0], sysconfig.get_platform()
    return f"{os.cpu_count()} cores, Linux {release}, Python {python} ({platform})"
