"""HBONE ends other than our proxy: waypoints, gateways, and clients that can send anything.

They can have any identity, because the mesh's own authority signs their certificates.
"""

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Self

from cryptography import x509

from deploy.lab import Place
from hbone.aio.connection import Connection, connect
from hbone.aio.connection_settings import ConnectionSettings, default_client
from hbone.aio.poller import Poller
from hbone.aio.relay import ByteCounts, relay
from hbone.aio.requests import Request
from hbone.aio.server import serve_connection
from hbone.aio.socket import PlainSocket
from hbone.aio.tunnel import Tunnel
from hbone.errors import ConnectRefused, HboneError
from hbone.events import Header
from tproxy.aio import sockets
from xds.model.identity import SpiffeId
from ztunnel.proxy.identity import authority as ca
from ztunnel.proxy.istio.certificates.manager import IssuedCertificate, TlsPolicy, WorkloadCertificate
from ztunnel.runtime.tasks import Tasks

HBONE_PORT = 15008
#: One tunnel a server accepted: its socket, and what the CONNECT named.
Handler = Callable[[socket.socket, str], Awaitable[None]]


async def copy_back(sock: socket.socket, first: bytes = b"") -> None:
    """Say ``first``, then return every byte until the end."""
    loop = asyncio.get_running_loop()
    await loop.sock_sendall(sock, first)
    while data := await loop.sock_recv(sock, 65536):
        await loop.sock_sendall(sock, data)


def greeting(first: bytes) -> Handler:
    """Return a handler that sends ``first``, then echoes."""

    async def handle(sock: socket.socket, authority: str) -> None:
        await copy_back(sock, first)

    return handle


class HboneEnds:
    """Creates HBONE ends. Leaving ``async with`` closes them all.

    Args:
        folder: the mesh's folder, with its authority.

    Attributes:
        requests: the requests that servers received, in order.
        serials: the serial numbers of each account's last certificate.
    """

    def __init__(self, folder: Path) -> None:
        self._authority = ca.CertificateAuthority.open(folder / "ca", "cluster.local", ca.now())
        self._poller: Poller | None = None
        self._tasks = Tasks("hbone ends")
        self.requests: list[Request] = []
        self.serials: dict[str, int] = {}

    async def __aenter__(self) -> Self:
        self._poller = Poller()
        return self

    async def __aexit__(self, *exception: object) -> None:
        await self._tasks.close()
        self.poller.close()

    @property
    def poller(self) -> Poller:
        assert self._poller is not None
        return self._poller

    def certificate(self, account: str, trust_domain: str = "cluster.local") -> WorkloadCertificate:
        """A certificate of a service account in namespace ``default``."""
        identity = SpiffeId(trust_domain, "default", account)
        signed = self._authority.issue(identity, ca.now(), ca.timedelta(hours=1))
        chain = x509.load_pem_x509_certificates(signed.chain_pem)
        self.serials[account] = chain[0].serial_number
        roots = self._authority.root_pem
        issued = IssuedCertificate(
            identity=identity,
            chain=tuple(chain[:1]),
            roots=tuple(chain[1:]),
            chain_pem=signed.chain_pem.removesuffix(roots),
            roots_pem=roots,
            key_pem=signed.key_pem,
        )
        return WorkloadCertificate(issued, 0, TlsPolicy())

    # Servers

    @contextlib.asynccontextmanager
    async def serving(
        self,
        place: Place,
        account: str,
        handler: Handler,
        *,
        port: int = HBONE_PORT,
        status: int = 200,
        headers: tuple[Header, ...] = (),
        settings: ConnectionSettings | None = None,
        crashes: Callable[[], bool] = lambda: False,
    ) -> AsyncIterator[None]:
        """Serve in a place, as a service account. With another ``status`` it refuses every tunnel.

        While it ``crashes``, its connections end at each request.
        """
        certificate = self.certificate(account)

        async def on_request(request: Request) -> None:
            self.requests.append(request)
            if crashes():
                request.connection.abort("crash")
                return
            if status != 200:
                request.refuse(status)
                return
            authority = (request.head.authority or b"").decode()
            await self._handle(request.accept(headers), handler, authority)

        async with self._accepting(sockets.listen("::", port, netns=place.netns)) as accepted:
            serving = self._serve(accepted, certificate, on_request, settings or ConnectionSettings())
            self._tasks.start(serving, f"server {place.name}")
            yield

    @contextlib.asynccontextmanager
    async def _accepting(self, listener: socket.socket) -> AsyncIterator["asyncio.Queue[socket.socket]"]:
        loop, accepted = asyncio.get_running_loop(), asyncio.Queue[socket.socket](100)

        async def accept() -> None:
            while True:
                sock, _ = await loop.sock_accept(listener)
                sock.setblocking(False)
                await accepted.put(sock)

        with listener:
            task = self._tasks.start(accept(), "accept")
            try:
                yield accepted
            finally:
                task.cancel()
                await asyncio.wait([task])

    async def _serve(
        self,
        accepted: "asyncio.Queue[socket.socket]",
        certificate: WorkloadCertificate,
        on_request: Callable[[Request], Awaitable[None]],
        settings: ConnectionSettings,
    ) -> None:
        while True:
            self._tasks.start(self._one(await accepted.get(), certificate, on_request, settings), "connection")

    async def _one(
        self,
        sock: socket.socket,
        certificate: WorkloadCertificate,
        on_request: Callable[[Request], Awaitable[None]],
        settings: ConnectionSettings,
    ) -> None:
        with contextlib.suppress(HboneError):
            await serve_connection(sock, certificate.server_context(), settings, self.poller, on_request)

    async def _handle(self, tunnel: Tunnel, handler: Handler, authority: str) -> None:
        sock, carried = self._socket_of(tunnel)
        with sock, contextlib.suppress(OSError):
            await handler(sock, authority)
        await carried  # the tunnel ends with the request, so what was written must have left

    def _socket_of(self, tunnel: Tunnel) -> tuple[socket.socket, "asyncio.Task[None]"]:
        """Yield a tunnel as an ordinary socket, so that handlers need not distinguish them, and carry its
        bytes.
        """
        near, far = socket.socketpair()
        for sock in (near, far):
            sock.setblocking(False)
        carrier = PlainSocket(far, self.poller)
        running = relay(carrier, tunnel, ByteCounts())

        async def carry() -> None:
            try:
                await running
            finally:
                carrier.close()
                tunnel.close()

        return near, self._tasks.start(carry(), "carry")

    def gateway(self, account: str, *, headers: tuple[Header, ...] = (), first: bytes = b"") -> Handler:
        """A handler for the outer tunnels of double HBONE: speaks TLS and HTTP/2 within, as ``account``."""
        certificate = self.certificate(account)

        async def on_request(request: Request) -> None:
            self.requests.append(request)
            await self._handle(request.accept(headers), greeting(first), "")

        async def handle(sock: socket.socket, authority: str) -> None:
            await self._one(sock.dup(), certificate, on_request, ConnectionSettings())

        return handle

    # Clients

    @contextlib.asynccontextmanager
    async def connection(
        self,
        place: Place,
        host: object,
        account: str,
        *,
        expect: str = "",
        trust_domain: str = "cluster.local",
        port: int = HBONE_PORT,
        connected: Callable[[], Awaitable[None]] | None = None,
    ) -> AsyncIterator[Connection]:
        """A connection from a place to a pod, as a service account.

        Args:
            expect: the service account the server must be.
            connected: awaited between TCP and TLS.

        Raises:
            HboneError, TproxyError: as :func:`hbone.aio.connection.connect`.
        """
        sock = await sockets.connect((str(host), port), netns=place.netns, timeout_s=5)
        expected = str(SpiffeId("cluster.local", "default", expect))
        context = self.certificate(account, trust_domain).client_context((expected,))
        if connected is not None:
            await connected()
        made = await connect(sock, context, default_client(), self.poller)
        try:
            yield made
        finally:
            made.close()

    async def status(self, connection: Connection, authority: str, *more: Header) -> int:
        """Return the status of the answer to a CONNECT."""
        try:
            tunnel = await connection.open(connect_to(authority, *more))
        except ConnectRefused as refused:
            return refused.status
        tunnel.close()
        return 200

    async def tunnel(self, connection: Connection, authority: str, *more: Header) -> socket.socket:
        """A tunnel, as a socket."""
        return self._socket_of(await connection.open(connect_to(authority, *more)))[0]


def connect_to(authority: str, *more: Header) -> tuple[Header, ...]:
    """The fields of a CONNECT."""
    return ((b":method", b"CONNECT"), (b":authority", authority.encode()), *more)
