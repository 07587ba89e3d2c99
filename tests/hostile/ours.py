"""The tunnel server under attack, as a process of its own, so that its memory and its processor time are its own.

``python -m tests.hostile.ours '{"folder": ..., "ports": {...}, "limits": {...}}'`` prints the port that it listens
on. A CONNECT to ``NAME:1`` goes to the application of that name; any other is refused with 503.
"""

from __future__ import annotations

import asyncio
import json
import socket
import sys
from pathlib import Path

import uvloop

from hbone.aio.connection import ConnectionSettings
from hbone.aio.poller import Poller
from hbone.aio.relay import ByteCounts, relay
from hbone.aio.server import Request, serve_connection
from hbone.aio.socket import PlainSocket
from hbone.errors import HboneError
from hbone.limits import Limits
from hbone.settings import Http2Settings, Role
from hbone.tls_context import TlsContext, TlsSettings
from tests.hostile.target import SERVER


async def serve(folder: Path, ports: dict[str, int], limits: Limits) -> None:
    """Serve until standard input ends."""
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

    async def on_request(request: Request) -> None:
        name = (request.head.authority or b"").decode().partition(":")[0]
        if name not in ports:
            request.refuse(503)
            return
        sock = socket.socket()
        sock.setblocking(False)
        await loop.sock_connect(sock, ("127.0.0.1", ports[name]))
        with PlainSocket(sock, poller, fresh=True) as application, request.accept() as tunnel:
            await relay(tunnel, application, ByteCounts())

    async def handle(sock: socket.socket) -> None:
        try:
            await serve_connection(sock, context, settings, poller, on_request)
        except HboneError:
            pass  # a handshake that failed: one declared error, and anything else is a traceback

    listener = socket.create_server(("127.0.0.1", 0), backlog=4096)
    listener.setblocking(False)
    print(listener.getsockname()[1], flush=True)
    ended = loop.run_in_executor(None, sys.stdin.read)
    async with asyncio.TaskGroup() as tasks:

        async def accept() -> None:
            while True:
                sock, _ = await loop.sock_accept(listener)
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                tasks.create_task(handle(sock))

        accepting = tasks.create_task(accept())
        await ended
        accepting.cancel()
        sys.exit(0)


def main() -> None:
    """Read the arguments and serve."""
    given = json.loads(sys.argv[1])
    uvloop.run(serve(Path(given["folder"]), given["ports"], Limits(**given["limits"])))


if __name__ == "__main__":
    main()
