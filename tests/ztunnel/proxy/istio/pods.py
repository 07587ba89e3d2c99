"""Pods of an Istio mesh in this process, without privileges: real proxies, TLS and sockets, on 127.0.0.0/8.

Only the edge of a pod is replaced (:class:`WiredSockets`): what its proxy listens on is called by the test, and
where it dials to is looked up in a :class:`Wire`. Addresses are of the loopback network, all of which is local, so
that sockets have the addresses that the mesh describes. Time passes as in ``virtual_time.py``.
"""

import asyncio
import contextlib
import errno
import json
import random
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import uvloop
from cryptography import x509

from hbone.aio.connection import Connection, connect
from hbone.aio.connection_settings import ConnectionSettings, default_client
from hbone.aio.poller import Poller
from hbone.aio.relay import ByteCounts, relay
from hbone.aio.requests import Request
from hbone.aio.server import serve_connection
from hbone.aio.socket import PlainSocket
from hbone.aio.tunnel import Tunnel
from hbone.settings import server_settings
from tests.hbone import virtual_time
from tests.hbone.certificates import Authority
from tests.limits import WAIT_S
from tests.ztunnel.proxy.istio.nodes import Lines
from tproxy.errors import ConnectFailed
from xds.model.address import SocketAddress
from xds.model.identity import SpiffeId
from xds.model.mesh import Mesh
from xds.model.service import Service
from xds.model.workload import NetworkAddress, Protocol, ServiceKey, Workload, WorkloadUid
from ztunnel.proxy.dataplane.life_table import Event
from ztunnel.proxy.dataplane.resolver import Answer, ResolveFailed, Resolver
from ztunnel.proxy.identity.crl import RevocationLists
from ztunnel.proxy.identity.csr import IdentityError, IssuedCertificate
from ztunnel.proxy.istio.accounting.metrics import Metrics
from ztunnel.proxy.istio.certificates.manager import TlsPolicy, WorkloadCertificate
from ztunnel.proxy.istio.environment import config_from
from ztunnel.proxy.istio.path.names import Names
from ztunnel.proxy.istio.path.node import Node
from ztunnel.proxy.istio.path.pod import Dns, PodProxy
from ztunnel.proxy.istio.path.pod_sockets import Accepted, Bound, PodSockets
from ztunnel.proxy.istio.settings.config import HBONE_PORT, OUTBOUND_PORT, PLAINTEXT_PORT, SOCKS_PORT, PodName
from ztunnel.runtime.accepting import Gate

NODE, ELSEWHERE = "w1", "w2"
ROOT = Authority()
CLIENT, SERVER, OTHER = "127.0.1.1", "127.0.1.2", "127.0.1.3"
VIP = "127.1.0.1"
APP_PORT = 8080
SHOP = ServiceKey("default/shop.example")


def workload(name: str, *hosts: str, node: str = NODE, **more: Any) -> Workload:
    """A pod of the mesh, of the node under test unless said otherwise."""
    values: dict[str, Any] = {"protocol": Protocol.HBONE, "service_account": name, "workload_name": name}
    return Workload(
        uid=WorkloadUid(f"Kubernetes//Pod/default/{name}"),
        name=name,
        namespace="default",
        addresses=hosts,
        node=node,
        **(values | more),
    )


def shop(**more: Any) -> Service:
    """The service ``shop`` at :data:`VIP`, port 80."""
    values: dict[str, Any] = {"vips": (NetworkAddress("", VIP),), "ports": {80: APP_PORT}}
    return Service(name="shop", namespace="default", hostname="shop.example", **(values | more))


def endpoint(
    name: str, *hosts: str, key: ServiceKey = SHOP, ports: Mapping[int, int] | None = None, **more: Any
) -> Workload:
    """A pod that is an endpoint of a service, ``shop`` unless said otherwise."""
    return workload(name, *hosts, services={key: {80: APP_PORT} if ports is None else ports}, **more)


def identity(name: str) -> str:
    """The identity of a workload of that name."""
    return f"spiffe://cluster.local/ns/default/sa/{name}"


def pair(near_host: str, far_host: str) -> tuple[socket.socket, socket.socket]:
    """Connected, non-blocking sockets with these addresses."""
    with socket.create_server((far_host, 0)) as listener:
        near = socket.create_connection(listener.getsockname(), source_address=(near_host, 0))
        far, _ = listener.accept()
    for sock in (near, far):
        sock.setblocking(False)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return near, far


class End:
    """A socket as an application has it."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self._loop = asyncio.get_running_loop()

    async def send(self, data: bytes) -> None:
        await self._loop.sock_sendall(self.sock, data)

    def eof(self) -> None:
        self.sock.shutdown(socket.SHUT_WR)

    async def read(self, size: int) -> bytes:
        """Read this number of bytes, or fewer at the end."""
        data = b""
        while len(data) < size and (more := await self._loop.sock_recv(self.sock, size - len(data))):
            data += more
        return data

    async def read_all(self) -> bytes:
        """Read to the end. Return nothing if the connection was reset."""
        data = b""
        with contextlib.suppress(ConnectionError):
            while more := await self._loop.sock_recv(self.sock, 65536):
                data += more
        return data

    async def is_reset(self) -> bool:
        """Wait for the end; whether it is a reset."""
        try:
            while await self._loop.sock_recv(self.sock, 65536):
                pass
        except ConnectionResetError:
            return True
        return False

    async def ask(self, data: bytes = b"ping") -> bytes:
        """Send, half-close, and read to the end."""
        with contextlib.suppress(OSError):
            await self.send(data)
            self.eof()
        return await self.read_all()

    def reset(self) -> None:
        self.sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
        self.sock.close()

    def close(self) -> None:
        self.sock.close()


class Application:
    """Echoes what each connection sends, after ``greeting``."""

    def __init__(self, tasks: asyncio.TaskGroup, greeting: bytes = b"") -> None:
        self.peers: list[str] = []
        self.ends: list[End] = []
        self.received = b""
        self.echoes = True
        self._tasks = tasks
        self._greeting = greeting
        self._running: list[asyncio.Task[None]] = []

    def accepted(self, sock: socket.socket, peer: tuple[str, int]) -> None:
        self.peers.append(peer[0])
        end = End(sock)
        self.ends.append(end)
        self._running.append(self._tasks.create_task(self._serve(end)))

    async def _serve(self, end: End) -> None:
        loop = asyncio.get_running_loop()
        with contextlib.suppress(OSError):
            await end.send(self._greeting)
            while data := await loop.sock_recv(end.sock, 65536):
                self.received += data
                if self.echoes:
                    await end.send(data)
            end.eof()

    def reset(self) -> None:
        """Reset every connection."""
        for task, end in zip(self._running, self.ends, strict=True):
            task.cancel()
            end.reset()

    def close(self) -> None:
        for end in self.ends:
            end.close()


@dataclass
class Wire:
    """The targets of dialled addresses.

    Attributes:
        handlers: the handler for connections to an address.
        errors: errors to raise instead of connecting.
        gates: held connections; dialling waits for the event.
        dialled: every dialled address with the requested source, in order.
        ends: the test's ends, closed with the cluster.
    """

    handlers: dict[SocketAddress, Accepted] = field(default_factory=dict)
    errors: dict[SocketAddress, Exception] = field(default_factory=dict)
    gates: dict[SocketAddress, asyncio.Event] = field(default_factory=dict)
    dialled: list[tuple[SocketAddress, str | None]] = field(default_factory=list)
    ends: list[End] = field(default_factory=list)

    async def connect(self, address: SocketAddress, own_host: str, source: str | None) -> socket.socket:
        self.dialled.append((address, source))
        gate = self.gates.get(address)
        if gate is not None:
            await gate.wait()
        if address in self.errors:
            raise self.errors[address]
        handler = self.handlers.get(address)
        if handler is None:
            raise ConnectFailed(address, ConnectionRefusedError(errno.ECONNREFUSED, "Connection refused"))
        near, far = pair(own_host if source is None else source, address.host)
        handler(far, near.getsockname()[:2])
        return near

    @property
    def addresses(self) -> list[str]:
        """Return the dialled addresses as text."""
        return [str(address) for address, _ in self.dialled]


class WiredSockets(PodSockets):
    """The sockets of one pod, on a wire instead of in a namespace."""

    def __init__(self, node: Node, wire: Wire, host: str) -> None:
        super().__init__(node, None)
        self.host = host
        self.accepted: dict[int, Accepted] = {}
        self._wire = wire
        self._destinations: dict[socket.socket, SocketAddress | None] = {}

    def listen(
        self, accepted: Mapping[int, Accepted], bound: Sequence[Bound] | None = None, *, gate: Gate | None = None
    ) -> None:
        self.accepted = dict(accepted)

    async def connect(
        self, address: SocketAddress, *, source: str | None = None, keepalive: bool = True
    ) -> socket.socket:
        return await self._wire.connect(address, self.host, source)

    def dial_now(self, address: SocketAddress, *, source: str | None = None) -> Coroutine[Any, Any, PlainSocket]:
        return self.dial(address, source=source)

    def original_destination(self, sock: socket.socket, source: SocketAddress) -> SocketAddress:
        found = self._destinations.pop(sock, None)
        if found is None:
            raise OSError(errno.ENOTCONN, "not connected")
        return found

    def arrives(self, port: int, destination: SocketAddress | None, source: str) -> End:
        """Have a connection accepted on a port; the client's end."""
        near, far = pair(source, self.host)
        self._destinations[far] = destination
        self.accepted[port](far, near.getsockname()[:2])
        self._wire.ends.append(End(near))
        return self._wire.ends[-1]


class HeldCertificates:
    """Certificates of this node's workloads, issued on request, or set by the test."""

    def __init__(self) -> None:
        self.held: dict[SpiffeId, WorkloadCertificate] = {}
        self.errors: dict[str, str] = {}
        self.lists: RevocationLists | None = None
        self._generation = 0

    def current(self, wanted: SpiffeId) -> WorkloadCertificate | None:
        return self.held.get(wanted)

    async def fetch(self, wanted: SpiffeId) -> WorkloadCertificate:
        await asyncio.sleep(0)
        if str(wanted) in self.errors:
            raise IdentityError(self.errors[str(wanted)])
        return self.held.get(wanted) or self.put(str(wanted))

    def at_once(self, wanted: SpiffeId) -> WorkloadCertificate | None:
        if str(wanted) in self.errors:
            raise IdentityError(self.errors[str(wanted)])
        return self.held.get(wanted)

    def states(self) -> dict[SpiffeId, WorkloadCertificate | str]:
        """Return what the real manager would."""
        failed = {SpiffeId.parse(name): f"Unavailable: {error}" for name, error in self.errors.items()}
        return {**self.held, **failed}

    def put(
        self, name: str, authority: Authority = ROOT, *, roots: Sequence[Authority] = (ROOT,), **more: Any
    ) -> WorkloadCertificate:
        """Have a certificate from now on."""
        made = certificate(name, authority, roots=roots, generation=self._generation, lists=self.lists, **more)
        self._generation += 1
        self.held[SpiffeId.parse(name)] = made
        return made


def certificate(
    name: str,
    authority: Authority = ROOT,
    *,
    roots: Sequence[Authority] = (ROOT,),
    generation: int = 0,
    lists: RevocationLists | None = None,
    **more: Any,
) -> WorkloadCertificate:
    """A workload's certificate, from an authority of the tests."""
    leaf = authority.issue(name, **more)
    roots_pem = b"".join(root.pem for root in roots)
    issued = IssuedCertificate(
        identity=SpiffeId.parse(name),
        chain=tuple(x509.load_pem_x509_certificates(leaf.chain_pem)),
        roots=tuple(x509.load_pem_x509_certificates(roots_pem)) if roots_pem else (),
        chain_pem=leaf.chain_pem,
        roots_pem=roots_pem,
        key_pem=leaf.key_pem,
    )
    return WorkloadCertificate(issued, generation, TlsPolicy(movable=True), lists)


class LoopClock:
    """The loop's time. The wall clock advances with it."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._began_s = self._loop.time()
        self._wall_s = datetime.now(UTC).timestamp()

    def monotonic(self) -> float:
        return self._loop.time()

    def wall(self) -> float:
        return self._wall_s + self._loop.time() - self._began_s


class Lookups(Resolver):
    """Resolves names from a dictionary; others fail."""

    def __init__(self) -> None:
        super().__init__()
        self.known: dict[str, tuple[str, ...]] = {}

    async def resolve(self, name: str, family: str) -> Answer:
        if name not in self.known:
            raise ResolveFailed(f"no such name: {name}")
        return Answer(self.known[name], 60.0)


class Revoked:
    """Revocation lists set by a test; see :class:`ztunnel.proxy.istio.certificates.manager.Revocations`."""

    def __init__(self) -> None:
        self.current = RevocationLists()

    def watch(self, changed: Callable[[], None]) -> None:
        """The test changes what follows itself."""


Answering = Callable[[Request], Awaitable[None]]


class Peer:
    """Another node's end of tunnels, with scripted answers.

    Attributes:
        requests: every CONNECT that arrived.
        connections: established ones.
        answer: handles a request; echoes unless replaced.
    """

    def __init__(self, poller: Poller, tasks: asyncio.TaskGroup, shown: WorkloadCertificate) -> None:
        self.requests: list[Request] = []
        self.connections: list[Connection] = []
        self.answer: Answering = self.echo
        self.settings = ConnectionSettings(http2=server_settings())
        self.shown = shown
        self._poller = poller
        self._tasks = tasks

    def accepted(self, sock: socket.socket, peer: tuple[str, int]) -> None:
        self._tasks.create_task(self._serve(sock))

    async def _serve(self, sock: socket.socket) -> None:
        with contextlib.suppress(Exception):  # of the handshake: the test looks at the other side
            await serve_connection(
                sock,
                self.shown.server_context(),
                self.settings,
                self._poller,
                self._requested,
                on_established=self.connections.append,
            )

    async def _requested(self, request: Request) -> None:
        self.requests.append(request)
        await self.answer(request)

    async def echo(self, request: Request) -> None:
        """Accept the request, and echo."""
        await echo(request.accept())

    def headers(self, number: int = -1) -> dict[str, str]:
        """Fields of a request, its authority included."""
        head = self.requests[number].head
        fields = {name.decode(): value.decode() for name, value in head.headers}
        return {":authority": (head.authority or b"").decode(), **fields}


def refusing(status: int) -> Answering:
    """Answers every request with a status."""

    async def answer(request: Request) -> None:
        request.refuse(status)

    return answer


async def pass_on(cluster: "Cluster", tunnel: Tunnel, to: SocketAddress) -> None:
    """Act as a gateway: relay a tunnel's bytes to an address and back."""
    end = PlainSocket(await cluster.wire.connect(to, "127.0.5.1", None), cluster.node.poller)
    try:
        await relay(tunnel, end, ByteCounts())
    finally:
        end.close()


async def echo(tunnel: Tunnel) -> None:
    """Echo through a tunnel until its end."""
    near, far = socket.socketpair()
    for sock in (near, far):
        sock.setblocking(False)

    async def application() -> None:
        loop = asyncio.get_running_loop()
        with contextlib.suppress(OSError):
            while data := await loop.sock_recv(near, 65536):
                await loop.sock_sendall(near, data)
            near.shutdown(socket.SHUT_WR)

    end = PlainSocket(far, tunnel.poller)
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(application())
        try:
            await relay(tunnel, end, ByteCounts())
        finally:
            end.close()
    near.close()


class Cluster:
    """One node's proxy and its environment.

    Attributes:
        node: with its mesh, metrics and clock.
        pods: running proxies by name.
        wire: the targets that they dial.
    """

    def __init__(
        self,
        node: Node,
        wire: Wire,
        lines: Lines,
        tasks: asyncio.TaskGroup,
        certificates: HeldCertificates,
        lookups: Lookups,
    ) -> None:
        self.node = node
        self.wire = wire
        self.tasks = tasks
        self.certificates = certificates
        self.lookups = lookups
        self.pods: dict[str, PodProxy] = {}
        self.sockets: dict[str, WiredSockets] = {}
        self.applications: list[Application] = []
        self._lines = lines

    @property
    def mesh(self) -> Mesh:
        """The node's."""
        return self.node.mesh

    async def start(self, *pods: Workload, described: bool = True, dns: Dns | None = None) -> None:
        """Start the proxies of pods of this node; they are reached on the wire as well."""
        if described:
            self.mesh.apply(pods)
        for each in pods:
            sockets = WiredSockets(self.node, self.wire, each.addresses[0])
            name = PodName(name=each.name, namespace=each.namespace, service_account=each.service_account)
            proxy = PodProxy(self.node, name, sockets, dns=dns)
            await proxy.start()
            self.pods[each.name], self.sockets[each.name] = proxy, sockets
            for host in each.addresses:
                self.wire.handlers[SocketAddress(host, HBONE_PORT)] = sockets.accepted[HBONE_PORT]

    def application(self, host: str, port: int = APP_PORT, greeting: bytes = b"") -> Application:
        """An application that echoes."""
        made = Application(self.tasks, greeting)
        self.applications.append(made)
        self.wire.handlers[SocketAddress(host, port)] = made.accepted
        return made

    def peer(self, name: str, host: str, port: int = HBONE_PORT, shown: WorkloadCertificate | None = None) -> Peer:
        """Another node's end for a workload, or a waypoint's or gateway's."""
        made = Peer(self.node.poller, self.tasks, shown or certificate(identity(name)))
        self.wire.handlers[SocketAddress(host, port)] = made.accepted
        return made

    def dial(self, destination: str, pod: str = "client") -> End:
        """What an application of a pod opens, captured."""
        sockets = self.sockets[pod]
        return sockets.arrives(OUTBOUND_PORT, SocketAddress.parse(destination), sockets.host)

    def socks(self, pod: str = "client") -> End:
        """A SOCKS client of a pod."""
        sockets = self.sockets[pod]
        return sockets.arrives(SOCKS_PORT, None, sockets.host)

    def plain(self, destination: str, pod: str = "server", source: str = "127.9.9.9") -> End:
        """A captured plain connection to a pod."""
        return self.sockets[pod].arrives(PLAINTEXT_PORT, SocketAddress.parse(destination), source)

    async def tunnels_to(
        self,
        pod: str,
        name: str = "client",
        source: str = CLIENT,
        shown: WorkloadCertificate | None = None,
        to: str | None = None,
    ) -> Connection:
        """A tunnel connection to a pod, from another node's proxy for a workload."""
        near = self.sockets[pod].arrives(HBONE_PORT, None, source).sock
        own = shown or certificate(identity(name))
        context = own.client_context((identity(to or pod),))
        return await connect(near, context, default_client(), self.node.poller)

    async def close(self) -> None:
        for proxy in self.pods.values():
            await proxy.stop()
        for application in self.applications:
            application.close()
        for end in self.wire.ends:
            end.close()

    def revoke(self, lists: RevocationLists) -> None:
        """Replace the revocation lists, as a changed file does."""
        if self.node.revocations is None:
            self.node.revocations = Revoked()
        self.node.revocations.current = lists  # type: ignore[misc]
        self.node.live.review(Event.REVOCATIONS)

    # What is seen

    async def until(self, ready: Callable[[], object]) -> None:
        """Wait until a condition holds."""
        pause_s = 0.001
        async with asyncio.timeout(WAIT_S):
            while not ready():
                await asyncio.sleep(pause_s)
                pause_s = min(pause_s * 2, 0.1)

    def texts(self) -> list[str]:
        """Every log line so far, as written."""
        return list(self._lines)

    def lines(self, scope: str = "access") -> list[dict[str, Any]]:
        """Log lines of a scope, so far."""
        return [line for text in self._lines if (line := json.loads(text))["scope"] == scope]

    async def line(self, number: int = 1) -> dict[str, Any]:
        """Wait until there are exactly this many access lines, and return the last one."""
        await self.until(lambda: len(self.lines()) >= number)
        lines = self.lines()
        assert len(lines) == number, lines
        return lines[-1]

    def closed(self, reporter: str = "source") -> dict[str, int]:
        """Connections that counted as closed, by response flags."""
        found: dict[str, int] = {}
        for series in self.node.metrics.series:
            if series.labels[0] == reporter:
                for flags, number in series.closed.items():
                    found[str(flags)] = found.get(str(flags), 0) + number
        return found

    def opened(self, reporter: str = "source") -> int:
        """Connections that counted as opened."""
        return sum(series.opened for series in self.node.metrics.series if series.labels[0] == reporter)

    @property
    def is_idle(self) -> bool:
        """Nothing is counted as open, and no table has an entry."""
        dumps = [each for proxy in self.pods.values() for each in proxy.dump().values()]
        return not any(dumps) and not any(self.node.metrics.sockets_open.values())


@contextlib.asynccontextmanager
async def cluster(folder: Path, env: Mapping[str, str] | None = None, **more: Any) -> AsyncIterator[Cluster]:
    """A node without pods; inside a running loop."""
    config = config_from(
        {"NODE_NAME": NODE, "LOG_FORMAT": "json", "UNSTABLE_ENABLE_SOCKS5": "true", **(env or {})},
        cpus=1,
        read_file=lambda path: None,
    )
    lines = Lines(folder, config.log_filter, json_lines=config.log_json)
    clock, certificates, lookups = LoopClock(), HeldCertificates(), Lookups()
    poller = Poller()
    node = Node(
        config=config,
        mesh=Mesh(node=config.node),
        certificates=certificates,
        poller=poller,
        clock=clock,
        metrics=Metrics(config.version_tag, config.metric_series),
        logs=lines.stream,
        names=Names(lookups, clock),
        rng=random.Random(1),
        **more,
    )
    try:
        async with asyncio.TaskGroup() as tasks:
            made = Cluster(node, Wire(), lines, tasks, certificates, lookups)
            try:
                yield made
                await made.close()
                await made.until(lambda: made.is_idle)
            finally:
                await made.close()
        assert poller.registered == 0, "a socket was left behind"
    finally:
        poller.close()
        lines.close()


#: For what meets no time limit, and runs on the loop of production as well.
LOOPS = ("virtual", "uvloop")


def play(
    folder: Path,
    body: Callable[[Cluster], Awaitable[None]],
    env: Mapping[str, str] | None = None,
    loop: str = "virtual",
    **more: Any,
) -> None:
    """Run ``body`` with a cluster: in virtual time, or on uvloop."""

    async def main() -> None:
        async with cluster(folder, env, **more) as made:
            await body(made)

    if loop == "uvloop":
        uvloop.run(main())
    else:
        virtual_time.run(main)
