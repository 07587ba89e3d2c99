"""How connections begin: the first frames, refused handshakes, and the resources released after a failed
handshake.
"""

from __future__ import annotations

import asyncio
import errno
import socket
from collections import Counter
from dataclasses import replace

import pytest

import hbone
from hbone.aio import poller as poller_module
from hbone.aio.connection import Connection, connect
from hbone.aio.connection_settings import ConnectionSettings, default_client
from hbone.aio.poller import Poller
from hbone.aio.requests import Request
from hbone.aio.server import serve_connection
from hbone.aio.tls_socket import TlsSocket
from hbone.aio.tunnel import Tunnel
from hbone.errors import ConnectionBroken, PeerSilent, RemoteProtocolError, TlsError, TlsReason
from hbone.settings import Http2Settings, Role
from hbone.tls import TlsSession
from hbone.tls_context import TlsContext
from tests.hbone.aio.harness import CONNECT, LOOPS, WAIT_S, contexts, identity, polling, run, tcp_pair, until


def test_settings_come_with_the_end_of_the_handshake() -> None:
    """SETTINGS leave in one write with the end of TLS's handshake. Two writes would wake the client twice."""

    async def main() -> None:
        near, far = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)  # a read is a write of the other side
        for sock in (near, far):
            sock.setblocking(False)
        loop = asyncio.get_running_loop()
        tls, sealed, plain = TlsSession(contexts()[0]), bytearray(65536), bytearray(65536)

        async def ignore(_: Request) -> None: ...

        with polling() as poller, near:
            serving = loop.create_task(serve_connection(far, contexts()[1], ConnectionSettings(), poller, ignore))
            while not tls.handshake():
                await loop.sock_sendall(near, sealed[: tls.seal(b"", memoryview(sealed))])
                tls.receive(memoryview(await loop.sock_recv(near, 65536)))
            await loop.sock_sendall(near, sealed[: tls.seal(b"", memoryview(sealed))])
            tls.receive(memoryview(await loop.sock_recv(near, 65536)))
            assert tls.read_into(memoryview(plain)) > 9
            assert plain[3] == 0x04  # the type of a SETTINGS frame
            serving.cancel()
            await asyncio.wait([serving])

    run(main)


def test_a_client_that_closes_with_the_end_of_its_handshake_is_not_kept() -> None:
    """A client can wait for our close_notify before it sends its FIN (RFC 8446, 6.1)."""

    async def main() -> None:
        near, far = tcp_pair()
        loop = asyncio.get_running_loop()
        tls, sealed = TlsSession(contexts()[0]), bytearray(65536)

        async def ignore(_: Request) -> None: ...

        with polling() as poller, near:
            serving = loop.create_task(serve_connection(far, contexts()[1], ConnectionSettings(), poller, ignore))
            while not tls.handshake():
                await loop.sock_sendall(near, sealed[: tls.seal(b"", memoryview(sealed))])
                tls.receive(memoryview(await loop.sock_recv(near, 65536)))
            tls.close()
            await loop.sock_sendall(near, sealed[: tls.seal(b"", memoryview(sealed))])
            await asyncio.wait_for(serving, WAIT_S)

    run(main)


def test_a_client_hello_that_has_arrived_is_read_without_an_event() -> None:
    """The listener has seen the ClientHello, so waiting for the poller to report it again would waste an iteration
    of the loop.
    """

    async def main() -> None:
        near, far = tcp_pair()
        client, room = TlsSession(contexts()[0]), memoryview(bytearray(65536))
        client.handshake()
        near.send(room[: client.seal(b"", room)])
        with polling() as poller, near:
            server = Connection(Role.SERVER, far, contexts()[1], ConnectionSettings(), poller)
            establishing = server.establish()
            establishing.send(None)  # up to its first wait, without an iteration of the loop
            client.receive(memoryview(bytearray(near.recv(65536))))
            assert client.handshake()
            establishing.close()
            server.abort("the test ends")

    run(main)


def test_slow_handshakes_end_in_time() -> None:
    async def main() -> None:
        slow = ConnectionSettings(handshake_timeout_s=0.05)
        with polling() as poller:
            near, far = tcp_pair()

            async def never(request: Request) -> None:
                raise AssertionError

            with near, pytest.raises(PeerSilent):
                await serve_connection(far, contexts()[1], slow, poller, never)

    run(main)


@pytest.mark.parametrize("early_data", [False, True])
def test_a_client_of_a_draining_server_gets_settings_then_goaway(*, early_data: bool) -> None:
    # SETTINGS come first (RFC 9113, 3.4), then GOAWAY. Requests that the client sent before it received the GOAWAY
    # are served.
    settings = ConnectionSettings(http2=Http2Settings(early_data=early_data))

    async def main() -> None:
        near, far = tcp_pair()

        async def accept(request: Request) -> None:
            accepted.append(request.accept())

        accepted: list[Tunnel] = []
        with polling() as poller:
            async with asyncio.TaskGroup() as tasks:
                serving = serve_connection(
                    far, contexts()[1], settings, poller, accept, on_established=Connection.drain
                )
                tasks.create_task(serving)
                client = await connect(near, contexts()[0], default_client(), poller)
                opened = await client.open(CONNECT)
                async with asyncio.timeout(20):
                    await until(lambda: client.engine.going_away)
                assert client.error is None
                opened.close()
                accepted[0].close()
                async with asyncio.timeout(20):
                    await client.wait_closed()

    run(main)


@pytest.mark.parametrize("early_data", [False, True])
def test_the_established_hook_can_close_without_a_frame(*, early_data: bool) -> None:
    """But, where early data is announced, the SETTINGS that do so."""

    class Denied(Exception):
        pass

    async def main() -> None:
        def deny(connection: Connection) -> None:
            assert connection.facts is not None
            raise Denied

        async def never(request: Request) -> None:
            raise AssertionError

        async def serve(sock: object) -> None:
            with pytest.raises(Denied):
                await serve_connection(
                    sock,  # type: ignore[arg-type]
                    contexts()[1],
                    ConnectionSettings(http2=Http2Settings(early_data=early_data)),
                    poller,
                    never,
                    on_established=deny,
                )

        with polling() as poller:
            near, far = tcp_pair()
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(serve(far))
                client = await connect(near, contexts()[0], default_client(), poller)
                await client.wait_closed()
            assert isinstance(client.error, ConnectionBroken)
            assert client.engine.peer_settings_seen == early_data

    run(main)


def test_not_http2_after_tls_is_refused() -> None:
    async def main() -> None:
        async def never(request: Request) -> None:
            raise AssertionError

        servers: asyncio.Queue[Connection] = asyncio.Queue()
        with polling() as poller:
            near, far = tcp_pair()
            with near:
                async with asyncio.TaskGroup() as tasks:
                    serving = serve_connection(
                        far, None, ConnectionSettings(), poller, never, on_established=servers.put_nowait
                    )
                    tasks.create_task(serving)
                    near.send(b"GET / HTTP/1.1\r\n\r\n")
                server = servers.get_nowait()
                assert isinstance(server.error, RemoteProtocolError)

    run(main)


@pytest.mark.parametrize("turns", range(12))
def test_cancelling_a_handshake_closes_its_socket(turns: int) -> None:
    async def main() -> None:
        with polling() as poller:
            near, far = tcp_pair()
            with far:
                task = asyncio.get_running_loop().create_task(
                    connect(near, contexts()[0], default_client(), poller)
                )
                for _ in range(turns):
                    await asyncio.sleep(0)
                task.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await task
                if turns:
                    assert near.fileno() == -1
                else:
                    near.close()

    run(main)


def test_peer_that_speaks_no_tls() -> None:
    async def main() -> None:
        with polling() as poller:
            near, far = tcp_pair()
            far.send(b"HTTP/1.1 400 Bad Request\r\n\r\n")
            with far, pytest.raises(TlsError) as caught:
                await connect(near, contexts()[0], default_client(), poller)
            assert caught.value.reason is TlsReason.VERSION

    run(main)


def test_settings_follow_the_handshake_where_they_cannot_come_with_it() -> None:
    async def main() -> None:
        retrying = TlsContext(Role.SERVER, replace(identity(), groups=("secp384r1",)))  # sends a HelloRetryRequest
        settings = ConnectionSettings(http2=Http2Settings(early_data=True))
        near, far = tcp_pair()

        async def accept(request: Request) -> None:
            request.accept().close()

        with polling() as poller:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(serve_connection(far, retrying, settings, poller, accept))
                client = await connect(near, contexts()[0], default_client(), poller)
                assert not client.engine.peer_settings_seen
                (await client.open(CONNECT)).close()
                assert client.engine.peer_settings_seen
                client.close()

    run(main)


class ResetMeanwhile(socket.socket):
    """A socket that returns received bytes, and reports a reset when it sends."""

    def send(self, *_: object) -> int:
        raise ConnectionResetError(errno.ECONNRESET, "reset")


@pytest.mark.parametrize("loop", LOOPS)
@pytest.mark.parametrize("early_data", [False, True])
@pytest.mark.parametrize("kind", ["tunnel", "tls"])
def test_a_reset_during_the_handshake_is_one_declared_error(kind: str, loop: str, *, early_data: bool) -> None:
    """It comes between the ClientHello and our answer, as that of a port scanner or a killed client does."""

    async def main() -> None:
        near, far = tcp_pair()
        far = ResetMeanwhile(fileno=far.detach())
        settings = ConnectionSettings(http2=Http2Settings(early_data=early_data))

        async def never(request: Request) -> None:
            raise AssertionError

        tls, sealed = TlsSession(contexts()[0]), bytearray(65536)
        tls.handshake()
        with polling() as poller, near:
            near.send(sealed[: tls.seal(b"", memoryview(sealed))])
            if kind == "tunnel":
                with pytest.raises(ConnectionBroken, match="during the TLS handshake"):
                    await serve_connection(far, contexts()[1], settings, poller, never)
            else:
                end = TlsSocket(far, contexts()[1], poller)
                with pytest.raises(ConnectionBroken, match="during the TLS handshake"):
                    await end.establish()

    run(main, loop)


@pytest.mark.skipif(hbone.build() != "pure", reason="mypyc has copied the constant that is replaced")
def test_handshakes_that_come_together_leave_each_turn_to_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """A turn has one step for an event, and one from the line, whose share of a turn is cut to nothing here."""
    monkeypatch.setattr(poller_module, "REQUEUED_S", 0.0)
    count = 20

    async def main() -> None:
        judged: list[float] = []

        def judge(_: object) -> None:
            judged.append(poller.now_s)

        context = TlsContext(Role.SERVER, replace(contexts()[1].settings, verify=judge))
        with polling() as poller:
            async with asyncio.TaskGroup() as tasks:
                for _ in range(count):
                    near, far = tcp_pair()
                    tasks.create_task(serve_connection(far, context, ConnectionSettings(), poller, ignore))
                    tasks.create_task(connect_and_close(near, poller))
        assert len(judged) == count
        assert max(Counter(judged).values()) <= 2

    async def ignore(_: Request) -> None: ...

    async def connect_and_close(near: socket.socket, poller: Poller) -> None:
        (await connect(near, contexts()[0], default_client(), poller)).close()

    run(main)
