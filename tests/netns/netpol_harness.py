"""Pods a, b, c in namespaces x, y, z on two nodes, policies in the nodes' kernels, and real connections.

Where the kernel has no SCTP sockets, an association is its first packet, sent and received raw.
"""

import contextlib
import itertools
import select
import socket
import struct
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from ipaddress import ip_interface
from typing import Any, Self

from deploy.lab import Lab, Place
from tests.limits import WAIT_S
from tests.netns.netpol_scenarios import SCENARIOS, Step
from tproxy.aio.table import BlockingTable
from ztunnel.kube.objects import ObjectKey
from ztunnel.policy.calico.incremental import Compiler
from ztunnel.policy.calico.objects import PolicyObjects
from ztunnel.policy.netpol.controller import end_connections
from ztunnel.policy.netpol.table_builder import TABLE, Built, TableBuilder

NODES = {"w1": ["x-a", "x-b", "x-c", "y-a"], "w2": ["y-b", "y-c", "z-a", "z-b", "z-c"]}
PORTS = (80, 81)
SCTP = 132
PROTOCOLS = {
    "tcp": (socket.SOCK_STREAM, socket.IPPROTO_TCP),
    "udp": (socket.SOCK_DGRAM, socket.IPPROTO_UDP),
    "sctp": (socket.SOCK_STREAM, SCTP),
}
#: What an allowed connection may take before the test fails, and how long one that must not succeed is watched
#: after all others have.
WATCH_S = 0.03
RESEND_S = 0.25
#: How long a ping is waited for: an allowed one is answered at once, by the kernel.
PING_S = 1.0


def has_sctp() -> bool:
    """Return whether the kernel has SCTP sockets."""
    with contextlib.suppress(OSError):
        socket.socket(socket.AF_INET, socket.SOCK_STREAM, SCTP).close()
        return True
    return False


def sctp_init(source_port: int, destination_port: int) -> bytes:
    """Return the packet that opens an association (RFC 9260, 3.1 and 3.3.2)."""
    ports = struct.pack("!HHI", source_port, destination_port, 0)
    chunk = struct.pack("!BBHIIHHI", 1, 0, 20, 1, 65536, 1, 1, 1)
    return ports + struct.pack("<I", _crc32c(ports + bytes(4) + chunk)) + chunk


def _crc32c(data: bytes) -> int:
    value = 0xFFFFFFFF
    for byte in data:
        value ^= byte
        for _ in range(8):
            value = value >> 1 ^ (0x82F63B78 if value & 1 else 0)
    return value ^ 0xFFFFFFFF


@dataclass(frozen=True, slots=True)
class Probe:
    """One connection that must succeed or fail, in both families."""

    source: str
    destination: str
    port: int
    protocol: str
    allowed: bool

    def __str__(self) -> str:
        return f"{'+' if self.allowed else '-'}{self.source}>{self.destination}:{self.port}/{self.protocol}"


def probes(text: str) -> list[Probe]:
    """Read ``+x/b>x/a:80 -y/b>x/a:81/udp``: who, to whom, and whether it may."""
    found = []
    for word in text.split():
        ends, _, rest = word[1:].partition(":")
        source, _, destination = ends.partition(">")
        port, _, protocol = rest.partition("/")
        found.append(Probe(source, destination, int(port), protocol or "tcp", word[0] == "+"))
    return found


@dataclass(slots=True)
class _Node:
    name: str
    place: Place
    table: BlockingTable
    builder: TableBuilder
    built: Built | None = None


class Cluster:
    """The lab with a table per node; ``with Cluster() as cluster``.

    Attributes:
        tunnels: the tables let tunnels of captured pods through.
        through: returns the objects of a step in the form in which an API server returns them.
    """

    tunnels = False
    through: Callable[[dict[ObjectKey, Any]], dict[ObjectKey, Any]] | None = None

    def __init__(self) -> None:
        self._stack = contextlib.ExitStack()
        self.lab = Lab(NODES)
        self.objects = PolicyObjects()
        self.compiler = Compiler()
        self.nodes: list[_Node] = []
        self._sctp = has_sctp()
        self._source_ports = itertools.count(20_000)
        self.listeners: dict[tuple[str, int, str], socket.socket] = {}
        self._raw: dict[socket.socket, int] = {}
        self._ports_seen: dict[int, set[tuple[int, ...]]] = {}
        self._datagrams: dict[int, set[tuple[bytes, str, int]]] = {}

    def __enter__(self) -> Self:
        self._enter_lab(self._stack)
        for name in NODES:
            place = self.lab.worker(name).place
            table = self._stack.enter_context(contextlib.closing(BlockingTable(TABLE, place.netns)))
            self.nodes.append(_Node(name, place, table, TableBuilder(tunnels=self.tunnels)))
        for pod in (pod for pods in NODES.values() for pod in pods):
            for protocol, port in itertools.product(PROTOCOLS, PORTS):
                if protocol != "sctp" or self._sctp:
                    self._listen(pod, port, protocol)
            for family, version in ((socket.AF_INET, 4), (socket.AF_INET6, 6)) if not self._sctp else ():
                raw = self.listeners[pod, version, "sctp"] = self.lab.pod(pod).socket(
                    family, socket.SOCK_RAW, SCTP
                )
                raw.setblocking(False)
        return self

    def _enter_lab(self, stack: contextlib.ExitStack) -> None:
        stack.enter_context(self.lab)

    def __exit__(self, *exc: object) -> None:
        for sock in self.listeners.values():
            sock.close()
        self._stack.close()

    def _listen(self, pod: str, port: int, protocol: str) -> None:
        kind, number = PROTOCOLS[protocol]
        sock = self.lab.pod(pod).socket(socket.AF_INET6, kind, number)
        sock.setblocking(False)
        sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        sock.bind(("::", port))
        if protocol != "udp":
            sock.listen(64)
        self.listeners[pod, port, protocol] = sock

    # Objects

    def base(self) -> dict[ObjectKey, Any]:
        """Return the namespaces and pods, as an API server has them."""
        found: dict[ObjectKey, Any] = {}
        for name in "xyz":
            labels = {"kubernetes.io/metadata.name": name, "ns": name}
            found[ObjectKey("Namespace", "", name)] = {
                "apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name, "labels": labels}
            }  # fmt: skip
        for node, pods in NODES.items():
            for pod in pods:
                namespace, _, name = pod.partition("-")
                found[ObjectKey("Pod", namespace, name)] = self._pod(pod, node, {"pod": name})
        return found

    def _pod(self, pod: str, node: str, labels: dict[str, str]) -> dict[str, Any]:
        namespace, _, name = pod.partition("-")
        place = self.lab.pod(pod)
        ports = [
            {"name": f"serve-{port}-{protocol}", "containerPort": port, "protocol": protocol.upper()}
            for port in PORTS
            for protocol in PROTOCOLS
        ]
        return {
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": {"name": name, "namespace": namespace, "uid": pod, "labels": labels},
            "spec": {"nodeName": node, "containers": [{"name": "serve", "ports": ports}]},
            "status": {"phase": "Running", "podIPs": [{"ip": str(address)} for address in place.addresses]},
        }

    def step(self, step: Step) -> dict[ObjectKey, Any]:
        """Return all objects of one step of a scenario."""
        found = self.base()
        for whose, labels in step.labels.items():
            namespace, _, name = whose.partition("/")
            key = ObjectKey("Pod", namespace, name) if name else ObjectKey("Namespace", "", namespace)
            body = found[key]
            found[key] = {**body, "metadata": {**body["metadata"], "labels": body["metadata"]["labels"] | labels}}
        for called, spec in step.policies.items():
            namespace, _, name = called.partition("/")
            if not namespace:
                found[ObjectKey("ClusterNetworkPolicy", "", name)] = {
                    "apiVersion": "policy.networking.k8s.io/v1alpha2",
                    "kind": "ClusterNetworkPolicy",
                    "metadata": {"name": name},
                    "spec": self._filled(spec, of_cluster=True),
                }
                continue
            found[ObjectKey("NetworkPolicy", namespace, name)] = {
                "apiVersion": "networking.k8s.io/v1",
                "kind": "NetworkPolicy",
                "metadata": {"name": name, "namespace": namespace},
                "spec": self._filled(spec),
            }
        return found

    def _filled(self, spec: Any, *, of_cluster: bool = False) -> dict[str, Any]:
        """Return a spec with the addresses that it names: ``{y/a}``, or all of y/c's node but one."""
        filled = dict(spec)
        for key, peers in (("ingress", "from"), ("egress", "to")):
            if key in spec:
                filled[key] = [
                    {**rule, peers: self._peers(rule[peers], of_cluster=of_cluster)} if peers in rule else rule
                    for rule in spec[key]
                ]
        return filled

    def _peers(self, peers: list[Any], *, of_cluster: bool) -> list[Any]:
        found = [block for peer in peers for block in self._blocks(peer)]
        if not of_cluster:
            return found
        return [{"networks": [peer["ipBlock"]["cidr"]]} if "ipBlock" in peer else peer for peer in found]

    def _blocks(self, peer: Any) -> list[Any]:
        if not isinstance(peer, str):
            return [peer]
        wanted, _, without = peer.partition(" but ")
        blocks = []
        for version in (4, 6):
            if "*" in wanted:
                place = ip_interface(f"{self.address('y/c', version)}/{24 if version == 4 else 64}")
                block: dict[str, Any] = {"cidr": str(place.network)}
            else:
                block = {"cidr": _host(self.address(wanted.strip("{}"), version))}
            if without:
                block["except"] = [_host(self.address(without.strip("{}"), version))]
            blocks.append({"ipBlock": block})
        return blocks

    def apply(self, objects: dict[ObjectKey, Any]) -> int:
        """Make these the only objects, and return how many steps the nodes took."""
        if self.through is not None:
            objects = self.through(objects)
        gone = dict.fromkeys(self.objects.known() - objects.keys())
        self.compiler.apply(self.objects.changes({**gone, **objects}))
        steps = 0
        for node in self.nodes:
            node.built = node.builder.build(self.compiler.compiled, node.name)
            steps += len(node.table.apply(node.built.table))
        return steps

    def end_connections(self) -> int:
        """Judge established connections again, on both nodes."""
        return sum(len(end_connections(node.built, node.place.netns)) for node in self.nodes if node.built)

    # Connections

    @contextlib.contextmanager
    def pinging(self, source: str, version: int) -> Iterator[Callable[..., bool]]:
        """Yield a function that pings an address, all times as one flow, and returns whether it answers."""
        family, protocol = ((socket.AF_INET, 1), (socket.AF_INET6, 58))[version == 6]
        request, reply = ((8, 0), (128, 129))[version == 6]
        with self.place(source).socket(family, socket.SOCK_RAW, protocol) as sock:

            def ping(destination: str, *, number: int) -> bool:
                body = struct.pack("!HH", 0x5A54, number)
                # Over IPv6 the kernel fills the checksum in.
                total = (request << 8) + 0x5A54 + number
                checksum = ~((total & 0xFFFF) + (total >> 16)) & 0xFFFF
                target = self.address(destination, version)
                deadline = time.monotonic() + PING_S
                while (left := deadline - time.monotonic()) > 0:
                    sock.sendto(struct.pack("!BBH", request, 0, checksum) + body, (target, 0))
                    while select.select([sock], [], [], min(left, RESEND_S))[0]:
                        packet = sock.recv(2048)
                        found = packet[20:] if version == 4 else packet
                        if found[0] == reply and found[4:8] == body:
                            return True
                return False

            yield ping

    def address(self, end: str, version: int) -> str:
        """Return the address of ``x/a``, or of a node, ``w1``."""
        if "/" in end:
            return str(self.lab.pod(end.replace("/", "-")).address(version))
        return str(self.lab.worker(end).place.address(version))

    def place(self, end: str) -> Place:
        return self.lab.pod(end.replace("/", "-")) if "/" in end else self.lab.worker(end).place

    def wrong(self, wanted: list[Probe]) -> list[str]:
        """Return the probes that did not do as they should."""
        for sock in self.listeners.values():
            self.drain(sock)
        running: list[tuple[Probe, int, socket.socket]] = []
        with contextlib.ExitStack() as stack:
            for probe in wanted:
                for version in (4, 6):
                    sock = stack.enter_context(self._started(probe, version))
                    running.append((probe, version, sock))
            succeeded = self._succeeded([item for item in running if item[0].allowed], WAIT_S)
            succeeded += self._succeeded([item for item in running if not item[0].allowed], WATCH_S)
        return [
            f"{probe} IPv{version}"
            for probe, version, sock in running
            if ((probe, version, sock) in succeeded) != probe.allowed
        ]

    def _started(self, probe: Probe, version: int) -> socket.socket:
        family = socket.AF_INET if version == 4 else socket.AF_INET6
        if probe.protocol == "sctp" and not self._sctp:
            raw = self.place(probe.source).socket(family, socket.SOCK_RAW, SCTP)
            self._raw[raw] = next(self._source_ports)
            self._send(probe, version, raw)
            return raw
        sock = self.place(probe.source).socket(family, *PROTOCOLS[probe.protocol])
        sock.setblocking(False)
        sock.connect_ex((self.address(probe.destination, version), probe.port))
        if probe.protocol == "udp":
            self._send(probe, version, sock)
        return sock

    def _send(self, probe: Probe, version: int, sock: socket.socket) -> None:
        """Send the datagram of a probe, or its raw packet."""
        if sock in self._raw:
            packet = sctp_init(self._raw[sock], probe.port)
            sock.sendto(packet, (self.address(probe.destination, version), 0))
        else:
            sock.send(str(sock.getsockname()[1]).encode())

    def _succeeded(
        self, running: list[tuple[Probe, int, socket.socket]], limit_s: float
    ) -> list[tuple[Probe, int, socket.socket]]:
        """Return those that succeed in time."""
        deadline = time.monotonic() + limit_s
        again = time.monotonic() + RESEND_S
        waiting, found = list(running), []
        while waiting:
            left: list[tuple[Probe, int, socket.socket]] = []
            for item in waiting:
                (found if self._arrived(*item) else left).append(item)
            waiting = left
            if not waiting or time.monotonic() >= deadline:
                break
            if time.monotonic() >= again:
                # A busy machine may drop a datagram on its way, as any network may.
                again = time.monotonic() + RESEND_S
                for probe, version, sock in waiting:
                    if probe.protocol == "udp" or sock in self._raw:
                        self._send(probe, version, sock)
            self._pause()
        return found

    def _pause(self) -> None:
        """Let the world go on for a moment."""
        select.select([], [], [], 0.003)

    def _arrived(self, probe: Probe, version: int, sock: socket.socket) -> bool:
        if sock in self._raw:
            listener = self.listeners[probe.destination.replace("/", "-"), version, "sctp"]
            ports = self._ports_seen.setdefault(listener.fileno(), set())
            with contextlib.suppress(BlockingIOError):
                while True:
                    packet = listener.recv(2048)
                    ports.add(struct.unpack_from("!HH", packet, 20 if version == 4 else 0))
            return (self._raw[sock], probe.port) in ports
        if probe.protocol != "udp":
            return not sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR) and _connected(sock)
        listener = self.listeners[probe.destination.replace("/", "-"), probe.port, "udp"]
        seen = self._datagrams.setdefault(listener.fileno(), set())
        with contextlib.suppress(BlockingIOError):
            while True:
                data, peer = listener.recvfrom(64)
                seen.add((data, peer[0].removeprefix("::ffff:"), peer[1]))
        address, port = sock.getsockname()[:2]
        return (str(port).encode(), address, port) in seen

    def opened(self, source: str, destination: str, port: int, version: int) -> socket.socket:
        """Return a connected blocking socket; the caller closes it."""
        family = socket.AF_INET if version == 4 else socket.AF_INET6
        sock = self.place(source).socket(family, socket.SOCK_STREAM)
        sock.settimeout(WAIT_S)
        sock.connect((self.address(destination, version), port))
        return sock

    def accepted(self, pod: str, port: int) -> socket.socket:
        """Return the connection that waits at a pod's port."""
        listener = self.listeners[pod.replace("/", "-"), port, "tcp"]
        select.select([listener], [], [], WAIT_S)
        sock, _ = listener.accept()
        sock.settimeout(WAIT_S)
        return sock

    def hears(self, sock: socket.socket) -> bytes:
        """Return what arrives at a socket in time."""
        return sock.recv(64)

    def silent(self, sock: socket.socket) -> bool:
        """Return whether nothing arrives at a socket for a moment."""
        return not select.select([sock], [], [], 10 * WATCH_S)[0]

    def drain(self, sock: socket.socket) -> None:
        """Discard what waits at a listener."""
        self._datagrams.clear()
        with contextlib.suppress(BlockingIOError):
            while True:
                if sock.type in (socket.SOCK_DGRAM, socket.SOCK_RAW):
                    sock.recv(2048)
                else:
                    sock.accept()[0].close()


def _host(address: str) -> str:
    return f"{address}/{32 if '.' in address else 128}"


def _connected(sock: socket.socket) -> bool:
    try:
        sock.getpeername()
    except OSError:
        return False
    return True


def outcome(cluster: Cluster, name: str) -> list[str]:
    """Run one scenario and return what was not as expected, each with its step."""
    wrong = []
    for number, step in enumerate(SCENARIOS[name], start=1):
        cluster.apply(cluster.step(step))
        wrong += [f"step {number}: {text}" for text in cluster.wrong(probes(step.probes))]
    return wrong
