"""The proxy under attack, as a separate process, so that its memory and its processor time can be measured.

``python -m tests.hostile.ours '{"folder": ..., "ports": {...}, "limits": {...}}'`` prints the ports that it
listens on, as JSON: tunnels of two pods, names, pages. It has the parts of a proxy that are reachable for
strangers.

A CONNECT to ``NAME:1`` goes to the application of that name; any other is refused with 503. ``/healthz/ready`` is
readiness, and ``/push`` acts as a control plane that sends 20,000 services.
"""

from __future__ import annotations

import asyncio
import json
import random
import socket
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path

import uvloop

from bench.scale_istio import service_message
from hbone.aio.connection import Connection
from hbone.aio.connection_settings import ConnectionSettings
from hbone.aio.fiber import Fiber
from hbone.aio.poller import Poller
from hbone.aio.relay import ByteCounts, relay
from hbone.aio.requests import Request
from hbone.aio.server import serve_connection
from hbone.aio.socket import PlainSocket
from hbone.errors import HboneError
from hbone.limits import Limits
from hbone.settings import Http2Settings, Role
from hbone.tls_context import TlsContext, TlsSettings
from tests.hostile.target import SERVER
from xds.model.address import SocketAddress
from xds.model.mesh import Mesh
from xds.model.service import Service
from xds.model.workload import NetworkAddress, Workload, WorkloadUid
from xds.protocol.resource import Resource, Update
from xds.protocol.types import ADDRESS
from ztunnel.proxy.dataplane.handshake_limiter import HalfOpen, HalfOpenLimits, PendingHandshake
from ztunnel.proxy.istio.dns.answer import DnsSettings
from ztunnel.proxy.istio.dns.forwarder import Forwarder
from ztunnel.proxy.istio.dns.hosts import Hosts
from ztunnel.proxy.istio.dns.server import DnsServer
from ztunnel.proxy.istio.xds.mesh_feed import MeshFeed
from ztunnel.runtime import heap
from ztunnel.runtime.accepting import ListeningSocket
from ztunnel.runtime.clock import SystemClock
from ztunnel.runtime.descriptors import Descriptors, limit_of_process, raise_limit
from ztunnel.runtime.http.page import Page, PageRequest, text
from ztunnel.runtime.http.server import PageServer
from ztunnel.runtime.tasks import Tasks

HOST = "127.0.0.1"
_SERVICES = 20_000
_CLIENT = Workload(uid=WorkloadUid("u"), name="client", namespace="shop", addresses=(HOST,))
_CART = Service(
    name="cart",
    namespace="shop",
    hostname="cart.shop.svc.cluster.local",
    vips=(NetworkAddress("", "10.9.0.1"),),
    ports={80: 80},
)


class Pod:
    """One pod's tunnels: its listener, its limiter, its share of descriptors."""

    def __init__(
        self,
        name: str,
        context: TlsContext,
        settings: ConnectionSettings,
        half_open: HalfOpen,
        descriptors: Descriptors,
        on_request: Callable[[Request], Awaitable[None]],
    ) -> None:
        self._tasks = Tasks(name)
        self._serve_args = context, settings, half_open.poller, on_request
        self._poller = half_open.poller
        limiter = half_open.limiter(self._begin, lambda pending, reason: None)
        sock = socket.socket()
        sock.setblocking(False)
        sock.bind((HOST, 0))
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.port: int = sock.getsockname()[1]
        share = descriptors.share(name, lambda: len(limiter) + 2 * len(self._tasks))
        listening = ListeningSocket(sock, SocketAddress(HOST, self.port), 4096, self._poller, gate=share)
        listening.start(limiter.enter)

    def _begin(self, pending: PendingHandshake) -> Fiber:
        return self._tasks.run(self._poller, self._serve(pending), "tunnels")

    async def _serve(self, pending: PendingHandshake) -> None:
        served: list[Connection] = []

        def established(connection: Connection) -> None:
            pending.proved()
            served.append(connection)

        try:
            await serve_connection(pending.sock, *self._serve_args, on_established=established)
        except HboneError:
            pass  # a handshake that failed: one declared error, and anything else is a traceback
        finally:
            if served and served[0].ended_by_limit:
                pending.offended()
            pending.ended()


async def serve(folder: Path, ports: dict[str, int], limits: Limits) -> None:
    """Serve until standard input ends."""
    raise_limit()
    loop = asyncio.get_running_loop()
    poller = Poller()
    context = TlsContext(
        Role.SERVER,
        TlsSettings(
            certificate_chain_pem=(folder / f"{SERVER}.pem").read_bytes(),
            private_key_pem=(folder / f"{SERVER}.key").read_bytes(),
            trusted_ca_pem=(folder / "root.pem").read_bytes(),
        ),
    )
    settings = ConnectionSettings(http2=Http2Settings(limits=limits))
    half_open = HalfOpen(poller, HalfOpenLimits.of_descriptors(limit_of_process()))
    descriptors = Descriptors(limit_of_process(), half_open.shed)

    async def on_request(request: Request) -> None:
        name = (request.head.authority or b"").decode().partition(":")[0]
        if name not in ports:
            request.refuse(503)
            return
        sock = socket.socket()
        sock.setblocking(False)
        await loop.sock_connect(sock, (HOST, ports[name]))
        with PlainSocket(sock, poller, fresh=True) as application, request.accept() as tunnel:
            await relay(tunnel, application, ByteCounts())

    attacked, other = (
        Pod(name, context, settings, half_open, descriptors, on_request) for name in ("attacked", "other")
    )
    mesh = Mesh()
    mesh.apply([_CLIENT, _CART])
    feed, services = MeshFeed(mesh), _services()
    heap.settle()  # as the proxy does once it has started
    pushes = Tasks("pushes")

    def pages(request: PageRequest) -> Page:
        if request.path == "/push" and not len(pushes):
            pushes.start(feed.receive_addresses(Update(type_url=ADDRESS, version="", resources=services)), "push")
        return text("not ready\n", 503) if descriptors.short else text("ready\n")

    async def client() -> Workload:
        return _CLIENT

    names = DnsServer(
        mesh, client, DnsSettings(), Hosts(), Forwarder(_no_socket), lambda report: None, rng=random.Random(1)
    )
    udp = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    udp.bind((HOST, 0))
    names.start([udp], [])
    async with PageServer("pages", SocketAddress(HOST, 0), pages, SystemClock()) as served:
        found = {"port": attacked.port, "bystander_port": other.port}
        print(
            json.dumps(found | {"dns_port": udp.getsockname()[1], "pages_port": served.address.port}), flush=True
        )
        await loop.run_in_executor(None, sys.stdin.read)
        sys.exit(0)


def _services() -> tuple[Resource, ...]:
    return tuple(
        Resource(name=message.name, version=message.version, body=message.resource)
        for message in (service_message(number) for number in range(_SERVICES))
    )


def _no_socket(family: socket.AddressFamily, kind: socket.SocketKind) -> socket.socket:
    raise OSError("there are no name servers")


def main() -> None:
    """Read the arguments and serve."""
    given = json.loads(sys.argv[1])
    uvloop.run(serve(Path(given["folder"]), given["ports"], Limits(**given["limits"])))


if __name__ == "__main__":
    main()
