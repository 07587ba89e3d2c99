"""How connections end: drain, GOAWAY, silence, a lost network, cancellation; over real sockets."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator
from dataclasses import replace

import pytest

from hbone import frames
from hbone.aio.connection import Connection, connect
from hbone.aio.connection_settings import ConnectionSettings, default_client
from hbone.aio.poller import WRITABLE, Poller
from hbone.aio.relay import ByteCounts, relay
from hbone.aio.requests import Request
from hbone.aio.server import serve_connection
from hbone.aio.socket import PlainSocket
from hbone.errors import ConnectionBroken, ErrorCode, PeerSilent, TlsError, TunnelBroken, TunnelClosed
from hbone.settings import Role, client_settings
from hbone.tls import TlsSession
from hbone.tls_context import TlsContext
from tests.hbone.aio.harness import (
    CONNECT,
    LOOPS,
    App,
    RawPeer,
    connected,
    contexts,
    identity,
    polling,
    request_frame,
    run,
    tcp_pair,
    until,
)
from tests.hbone.certificates import Authority


@pytest.mark.pure
def test_close_codes_of_tunnels() -> None:
    async def main() -> None:
        with polling() as poller:
            async with connected(poller) as pair:
                seen: list[tuple[str, int]] = []
                for connection, name in ((pair.client, "client"), (pair.server, "server")):
                    reset = connection.engine.reset_stream

                    def spy(sid: int, code: int, reset=reset, name=name) -> None:  # type: ignore[no-untyped-def]
                        seen.append((name, code))
                        reset(sid, code)

                    connection.engine.reset_stream = spy  # type: ignore[method-assign]
                opened, accepted = await pair.tunnel()
                opened.close()  # open both ways
                await until(lambda: accepted.gone)
                accepted.close()
                opened, accepted = await pair.tunnel()
                accepted.write_eof()
                accepted.close()  # the server is done, the client is not
                await until(lambda: opened.gone)
                opened.close()
                assert seen == [("client", ErrorCode.CANCEL), ("server", ErrorCode.NO_ERROR)]

    run(main)


@pytest.mark.parametrize("tls", [True, False])
def test_drain_lets_streams_finish_then_closes(tls: bool) -> None:
    async def main() -> None:
        with polling() as poller:
            async with connected(poller, tls=tls) as pair:
                opened, accepted = await pair.tunnel()
                pair.server.drain()
                await until(lambda: not pair.client.accepts_streams)
                with pytest.raises(ConnectionBroken) as caught:
                    await pair.client.open(CONNECT)
                assert caught.value.unprocessed
                assert pair.server.error is None
                opened.write_eof()
                accepted.write_eof()
                await until(lambda: not pair.client.engine.open_streams)
                opened.close()
                accepted.close()
                await pair.server.wait_closed()
                assert isinstance(pair.server.error, TunnelClosed)
                await pair.client.wait_closed()

    run(main)


@pytest.mark.parametrize("loop", LOOPS)
def test_drained_connection_closes_after_the_last_bytes_of_its_streams_have_arrived(loop: str) -> None:
    """The client has ended its direction. The end of the response waits for a slow network."""

    async def main() -> None:
        near, inner = tcp_pair()
        relayed = asyncio.Event()

        async def serve(request: Request) -> None:
            with PlainSocket(inner, poller) as end, request.accept() as tunnel:
                await relay(tunnel, end, ByteCounts())
            relayed.set()

        large = replace(client_settings(), initial_window_bytes=1 << 20, stream_window_bytes=1 << 20)
        settings = replace(default_client(), http2=large)
        with polling() as poller, near:
            async with connected(poller, client_settings=settings, on_request=serve) as pair:
                with await pair.client.open(CONNECT) as tunnel:
                    ours, mine = tcp_pair()
                    with ours, PlainSocket(mine, poller) as client:
                        running = relay(client, tunnel, ByteCounts())
                        ours.shutdown(socket.SHUT_WR)
                        assert await App(near).read_all() == b""
                        pair.server.drain()
                        await until(lambda: pair.server.engine.goaway_sent)
                        pair.client.suspend()
                        pair.server.link.sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 16 * 1024)
                        pair.client.link.sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 16 * 1024)
                        sent = near.send(bytes(200_000))  # read together with the EOF
                        near.shutdown(socket.SHUT_WR)
                        await relayed.wait()
                        await until(lambda: pair.server.link.blocked or pair.server.error)
                        for _ in range(10):
                            await asyncio.sleep(0)
                        assert pair.server.error is None
                        pair.client.wake_up()
                        assert len(await App(ours).read_all()) == sent
                        assert (await running).error is None
                await pair.server.wait_closed()
                assert isinstance(pair.server.error, TunnelClosed)

    run(main, loop)


@contextlib.asynccontextmanager
async def draining(poller: Poller, grace_s: float) -> AsyncIterator[tuple[RawPeer, list[int]]]:
    """A peer that has answered the PING of a server that drains, and the streams that the server has accepted."""
    near, far = tcp_pair()
    accepted: list[int] = []

    async def accept(request: Request) -> None:
        with request.accept() as tunnel:
            accepted.append(tunnel.stream_id)

    settings = ConnectionSettings(drain_grace_s=grace_s)
    async with asyncio.TaskGroup() as tasks:
        serving = serve_connection(far, None, settings, poller, accept, on_established=Connection.drain)
        tasks.create_task(serving)
        with near:
            peer = RawPeer(near)
            await peer.send(frames.PREFACE + frames.frame(frames.SETTINGS, 0, 0))
            while frames.PING not in [kind for kind, *_ in peer.received]:
                assert await peer.read()
            ping = next(payload for kind, _, _, payload in peer.received if kind == frames.PING)
            await peer.settle(frames.frame(frames.PING, frames.ACK, 0, ping))
            yield peer, accepted


def goaways(peer: RawPeer) -> list[int]:
    return [frames.TWO_U32.unpack(payload)[0] for kind, _, _, payload in peer.received if kind == frames.GOAWAY]


@pytest.mark.parametrize("loop", LOOPS)
def test_a_request_that_was_under_way_after_the_pong_is_served(loop: str) -> None:
    """One thread of the client answers the PING, another has taken the connection for its request by then."""

    async def main() -> None:
        with polling() as poller:
            async with draining(poller, 60.0) as (peer, accepted):
                assert await peer.settle(request_frame(1))
                assert await peer.settle(request_frame(3))
                assert accepted == [1, 3]
                assert goaways(peer) == [2**31 - 1]

    run(main, loop)


@pytest.mark.parametrize("loop", LOOPS)
def test_the_final_goaway_covers_what_came_in_the_grace(loop: str) -> None:
    async def main() -> None:
        with polling() as poller:
            async with draining(poller, 0.5) as (peer, accepted):
                await peer.settle(request_frame(1))
                while await peer.read():
                    pass
                assert goaways(peer)[:2] == [2**31 - 1, 1]
                assert accepted == [1]

    run(main, loop)


def test_goaway_that_crosses_a_request_says_unprocessed() -> None:
    async def main() -> None:
        with polling() as poller:
            async with connected(poller) as pair:
                pair.server.engine.goaway()
                poller.schedule_flush(pair.server)
                with pytest.raises(TunnelBroken) as caught:
                    await pair.client.open(CONNECT)
                assert caught.value.unprocessed

    run(main)


def test_a_silent_peer_is_noticed() -> None:
    async def main() -> None:
        quick = ConnectionSettings(http2=client_settings(), ping_interval_s=0.05, ping_timeout_s=0.1)
        with polling() as poller:
            near, far = tcp_pair()
            connection = await connect(near, None, quick, poller)
            opening = asyncio.get_running_loop().create_task(connection.open(CONNECT))
            with far, pytest.raises(ConnectionBroken):
                await opening
            assert isinstance(connection.error, PeerSilent)

    run(main)


def test_pings_keep_an_idle_connection() -> None:
    async def main() -> None:
        client = ConnectionSettings(http2=client_settings(), ping_interval_s=0.02, ping_timeout_s=0.5)
        server = ConnectionSettings(ping_interval_s=0.02, ping_timeout_s=0.5)
        with polling() as poller:
            async with connected(poller, client_settings=client, server_settings=server) as pair:
                await asyncio.sleep(0.3)
                assert pair.client.error is None
                assert pair.server.error is None

    run(main)


@pytest.mark.parametrize("stage", range(6))
def test_cancelling_leaves_nothing_behind(stage: int) -> None:
    """Cancel after so many turns of the loop: in connect, handshake, open, relay."""

    async def main() -> None:
        async def accept(request: Request) -> None:
            near, inner = tcp_pair()
            with near, PlainSocket(inner, poller) as end, request.accept() as tunnel:
                await relay(tunnel, end, ByteCounts())

        async def use(client: Connection) -> None:
            near, inner = tcp_pair()
            with near, PlainSocket(inner, poller) as end, await client.open(CONNECT) as tunnel:
                near.send(b"x")
                await relay(end, tunnel, ByteCounts())

        with polling() as poller:
            async with connected(poller, on_request=accept) as pair:
                for turns in range(stage * 5, stage * 5 + 5):
                    task = asyncio.get_running_loop().create_task(use(pair.client))
                    for _ in range(turns):
                        await asyncio.sleep(0)
                    task.cancel()
                    with contextlib.suppress(asyncio.CancelledError):
                        await task
                    await until(lambda: not (pair.client.open_streams or pair.server.open_streams))
                assert pair.client.error is None
                assert pair.server.error is None

    run(main)


def test_lost_connection_breaks_tunnels_and_waiting_requests() -> None:
    async def main() -> None:
        with polling() as poller:
            async with connected(poller) as pair:
                opened, accepted = await pair.tunnel()
                waiting = asyncio.get_running_loop().create_task(pair.client.open(CONNECT))
                await pair.requests.get()
                near, inner = tcp_pair()
                with near, PlainSocket(inner, poller) as end:
                    running = relay(end, opened, ByteCounts())
                    pair.server.abort("pod deleted")
                    with pytest.raises(ConnectionBroken):
                        await waiting
                    assert isinstance((await running).error, ConnectionBroken)
                    end.close()
                    with pytest.raises(ConnectionResetError):
                        await App(near).read_all()
                opened.close()
                accepted.close()

    run(main)


def test_closing_fails_requests_that_wait_for_a_response() -> None:
    async def main() -> None:
        with polling() as poller:
            async with connected(poller) as pair:
                waiting = asyncio.get_running_loop().create_task(pair.client.open(CONNECT))
                await pair.requests.get()
                pair.client.close()
                async with asyncio.timeout(20):
                    with pytest.raises(ConnectionBroken, match="connection closed"):
                        await waiting

    run(main)


def test_a_close_notify_ends_the_connection_before_any_fin() -> None:
    async def main() -> None:
        with polling() as poller:
            async with connected(poller) as pair:
                await pair.tunnel()  # everything sent before has been read
                pair.client.flush()
                link = pair.client.link
                assert link.tls is not None
                link.tls.close()
                link.send_tls()
                poller.unregister(link.sock.fileno())  # from here on it neither sends nor closes
                async with asyncio.timeout(1.0):  # its keepalive would notice after 30 s
                    await pair.server.wait_closed()

    run(main)


def test_a_connection_without_a_request_is_closed() -> None:
    async def main() -> None:
        with polling() as poller:
            quick = ConnectionSettings(first_request_timeout_s=0.05)
            async with connected(poller, server_settings=quick) as pair:
                await pair.client.wait_closed()
                assert pair.client.engine.going_away
            slower = ConnectionSettings(first_request_timeout_s=1.0)  # a busy machine needs time for a request
            async with connected(poller, server_settings=slower) as pair:
                opened, accepted = await pair.tunnel()
                opened.close()
                accepted.close()
                await asyncio.sleep(1.1)
                assert pair.client.error is None

    run(main)


def test_what_was_received_in_full_is_delivered_after_the_connection_is_gone() -> None:
    async def main() -> None:
        near, inner = tcp_pair()
        results = []

        async def slow_application(request: Request) -> None:
            with PlainSocket(inner, poller) as end, request.accept() as tunnel:
                results.append(await relay(tunnel, end, ByteCounts()))

        with polling() as poller:
            async with connected(poller, on_request=slow_application) as pair:
                tunnel = await pair.client.open(CONNECT)
                data = bytes(8_000_000)
                sent = 0
                engine = pair.client.engine
                while sent < len(data):
                    count = engine.send_data(tunnel.stream_id, data[sent : sent + 100_000])
                    sent += count
                    if not count and not engine.output and tunnel.connection.error is None:
                        break  # the window is full: the application has not read
                    poller.schedule_flush(pair.client)
                    await asyncio.sleep(0.001)
                tunnel.write_eof()
                await until(lambda: not (pair.client.link.blocked or engine.output))
                await asyncio.sleep(0.05)
                pair.server.abort("gone")
                assert len(await App(near).read_all()) == sent
                near.close()
        assert len(results) == 1

    run(main)


@pytest.mark.parametrize("blocked", [False, True])
@pytest.mark.parametrize("loop", LOOPS)
def test_what_has_arrived_before_a_failed_write_is_read(loop: str, blocked: bool) -> None:
    """A peer can end a stream, send GOAWAY and go, while we are still sending on other streams. If the write fails
    first, the end of the response and the GOAWAY are still in the kernel.
    """

    async def main() -> None:
        near, far = tcp_pair()
        with polling() as poller:
            connection = await connect(near, None, default_client(), poller)
            peer = RawPeer(far)
            await peer.send(frames.frame(frames.SETTINGS, 0, 0))
            opening = asyncio.get_running_loop().create_task(connection.open(CONNECT))
            await peer.skip(len(frames.PREFACE))
            await peer.send(frames.frame(frames.HEADERS, frames.END_HEADERS, 1, b"\x88"))
            with await opening as tunnel:
                waiting = asyncio.get_running_loop().create_task(connection.open(CONNECT))
                await until(lambda: connection.engine.open_streams == 2 and not connection.engine.output)
                ours, mine = tcp_pair()
                with ours, PlainSocket(mine, poller) as client:
                    running = relay(client, tunnel, ByteCounts())
                    if blocked:
                        connection.link.send([bytes(16 << 20)])
                        assert connection.link.blocked
                    far.send(
                        frames.frame(frames.DATA, frames.END_STREAM, 1, b"the end")
                        + frames.frame(frames.GOAWAY, 0, 0, frames.TWO_U32.pack(1, ErrorCode.NO_ERROR))
                    )
                    App(far).reset()
                    if blocked:
                        connection.on_event(WRITABLE)
                    else:
                        connection.send_ping(bytes(8))
                        connection.flush()
                    assert await App(ours).read_all() == b"the end"
                    ours.shutdown(socket.SHUT_WR)
                    ended = await running
                    assert ended.error is None or isinstance(ended.error, TunnelBroken)
            with pytest.raises(TunnelBroken) as caught:
                await waiting
            assert caught.value.unprocessed
            await connection.wait_closed()
            assert "while sending" in str(connection.error)

    run(main, loop)


@pytest.mark.parametrize("loop", LOOPS)
def test_a_certificate_that_is_refused_is_named_although_a_write_fails_first(loop: str) -> None:
    """A TLS 1.3 server refuses our certificate after our side of the handshake, by an alert before its reset."""

    async def main() -> None:
        near, far = tcp_pair()
        stranger = TlsContext(Role.SERVER, replace(identity(), trusted_ca_pem=Authority().pem))
        tls, sealed = TlsSession(stranger), memoryview(bytearray(1 << 16))
        loop_ = asyncio.get_running_loop()

        async def handshake() -> None:
            while not tls.handshake():
                tls.receive(memoryview(await loop_.sock_recv(far, 1 << 16)))

        with polling() as poller:
            connecting = loop_.create_task(connect(near, contexts()[0], default_client(), poller))
            tls.receive(memoryview(await loop_.sock_recv(far, 1 << 16)))
            assert not tls.handshake()
            far.send(sealed[: tls.seal(b"", sealed)])
            connection = await connecting
            opening = loop_.create_task(connection.open(CONNECT))
            with pytest.raises(TlsError):
                await handshake()
            await until(lambda: connection.engine.open_streams and not connection.engine.output)
            far.send(sealed[: tls.seal(b"", sealed)])
            App(far).reset()
            connection.send_ping(bytes(8))
            connection.flush()
            with pytest.raises(TlsError) as caught:
                await opening
            assert caught.value.by_peer

    run(main, loop)
