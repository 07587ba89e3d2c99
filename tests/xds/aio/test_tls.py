"""TLS for calls: the result of every way in which the network can end the connection."""

import asyncio
import socket
import struct
from collections.abc import Callable

import pytest
import uvloop

from hbone.aio.poller import Poller
from hbone.aio.tls_socket import TlsSocket
from hbone.settings import Role
from hbone.tls_context import ClientCertificate, TlsContext, TlsSettings
from tests.hbone.certificates import Authority
from xds.aio.tls import Secured, Transport

ROOT = Authority()
LEAF = ROOT.issue(dns=["istiod"])


class Inner:
    """A connection above."""

    def __init__(self) -> None:
        self.transport: Transport | None = None
        self.ended: asyncio.Future[Exception | None] = asyncio.get_running_loop().create_future()

    def opened(self, transport: Transport) -> None:
        self.transport = transport

    def received(self, data: memoryview) -> None:
        pass

    def connection_lost(self, exc: Exception | None) -> None:
        self.ended.set_result(exc)

    def pause_writing(self) -> None:
        pass

    def resume_writing(self) -> None:
        pass


@pytest.mark.parametrize("how", ["reset", "end"])
@pytest.mark.parametrize("run", [uvloop.run, asyncio.run], ids=["uvloop", "asyncio"])
def test_a_lost_connection_is_reported_once_and_nothing_is_written_to_it(
    run: Callable[..., object], how: str
) -> None:
    """A control plane that is killed resets its connections: that is an ordinary reconnect, not a bug of ours."""

    async def main() -> None:
        loop = asyncio.get_running_loop()
        bugs: list[dict[str, object]] = []
        loop.set_exception_handler(lambda _, context: bugs.append(context))
        poller = Poller()
        with socket.create_server(("127.0.0.1", 0)) as server:
            near = socket.create_connection(server.getsockname())
            far, _ = server.accept()
        for sock in (near, far):
            sock.setblocking(False)
        settings = TlsSettings(
            certificate_chain_pem=LEAF.chain_pem,
            private_key_pem=LEAF.key_pem,
            client_certificate=ClientCertificate.NONE,
        )
        inner = Inner()
        context = TlsContext(Role.CLIENT, TlsSettings(trusted_ca_pem=ROOT.pem))
        peer = TlsSocket(far, TlsContext(Role.SERVER, settings), poller)
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(peer.establish())
            _, secured = await loop.create_connection(lambda: Secured(context, inner), sock=near)
            await secured.established
        if how == "reset":
            far.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        peer.close()
        lost = await asyncio.wait_for(inner.ended, 5)
        assert isinstance(lost, ConnectionResetError) or how == "end"
        await asyncio.sleep(0.01)
        assert inner.transport is not None
        inner.transport.write(b"too late")  # as a channel that closes because of the loss
        inner.transport.close()
        assert not bugs
        poller.close()

    run(main())
