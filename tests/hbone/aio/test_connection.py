"""Connections in use: requests, resets, drain, keepalive, cancellation; over real sockets."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import random
import socket

import h2.config
import h2.connection
import h2.events
import pytest

from hbone import frames
from hbone.aio.connection import connect
from hbone.aio.connection_settings import ConnectionSettings, default_client
from hbone.aio.fiber import Fiber
from hbone.aio.relay import ByteCounts, relay
from hbone.aio.requests import Request
from hbone.aio.server import serve_connection
from hbone.aio.socket import PlainSocket
from hbone.aio.tunnel import Tunnel
from hbone.errors import ConnectRefused, ErrorCode, LocalProtocolError, TunnelBroken
from hbone.frames import frame
from hbone.settings import Http2Settings
from tests.hbone.aio.harness import (
    CONNECT,
    LOOPS,
    App,
    connected,
    contexts,
    polling,
    raw_client,
    request_frame,
    run,
    tcp_pair,
    until,
)


@pytest.mark.parametrize("loop", LOOPS)
def test_a_handshake_gives_peer_facts_and_a_connect_gives_a_tunnel(loop: str) -> None:
    async def main() -> None:
        with polling() as poller:
            async with connected(poller) as pair:
                for connection in (pair.client, pair.server):
                    facts = connection.facts
                    assert facts is not None
                    assert facts.uri_sans == ("spiffe://cluster.local/ns/a/sa/b",)
                    assert (facts.version, facts.alpn) == ("TLSv1.3", b"h2")
                    assert facts.cipher == "TLS_AES_128_GCM_SHA256"
                headers = (*CONNECT, (b"baggage", b"a=b"), (b"forwarded", b'for="1.2.3.4:5"'))
                opening = asyncio.get_running_loop().create_task(pair.client.open(headers))
                request = await pair.requests.get()
                assert request.head.authority == b"10.0.0.2:8080"
                assert request.head.headers == headers[2:]
                accepted = request.accept([(b"baggage", b"c=d")])
                opened = await opening
                assert opened.headers == ((b"baggage", b"c=d"),)
                with pytest.raises(LocalProtocolError):
                    request.accept()
                opened.close()
                accepted.close()

    run(main, loop)


def over(family: socket.AddressFamily) -> tuple[socket.socket, socket.socket]:
    if family == socket.AF_UNIX:
        ends = socket.socketpair()
    else:
        host = "127.0.0.1" if family == socket.AF_INET else "::1"
        with socket.create_server((host, 0), family=family) as listener:
            ends = socket.create_connection(listener.getsockname()[:2]), listener.accept()[0]
    for sock in ends:
        sock.setblocking(False)
    return ends


@pytest.mark.parametrize("family", [socket.AF_INET, socket.AF_INET6, socket.AF_UNIX])
def test_connections_run_over_any_stream_socket(family: socket.AddressFamily) -> None:
    async def main() -> None:
        near, far = over(family)
        name = near.getsockname()

        async def accept(request: Request) -> None:
            request.accept()

        with polling() as poller:
            async with asyncio.TaskGroup() as tasks:
                serving = serve_connection(far, contexts()[1], ConnectionSettings(), poller, accept)
                tasks.create_task(serving)
                client = await connect(near, contexts()[0], default_client(), poller)
                assert client.local_name == (("", 0) if family == socket.AF_UNIX else name[:2])
                (await client.open(CONNECT)).close()
                client.close()

    run(main)


def test_refusals_reach_the_client() -> None:
    async def main() -> None:
        async def refuse(request: Request) -> None:
            request.refuse(503, [(b"x", b"y")], b"no", ErrorCode.CONNECT_ERROR)

        with polling() as poller:
            async with connected(poller, on_request=refuse) as pair:
                with pytest.raises(ConnectRefused) as caught:
                    await pair.client.open(CONNECT)
                assert caught.value.status == 503
                assert caught.value.headers == ((b"x", b"y"),)
                assert pair.client.open_streams == 0

    run(main)


def test_an_unanswered_request_is_reset() -> None:
    async def main() -> None:
        async def forget(request: Request) -> None:
            return

        with polling() as poller:
            async with connected(poller, on_request=forget) as pair:
                with pytest.raises(TunnelBroken) as caught:
                    await pair.client.open(CONNECT)
                assert caught.value.code == ErrorCode.INTERNAL_ERROR

    run(main)


def test_data_before_the_answer_is_held_then_given_and_too_much_resets() -> None:
    async def main() -> None:
        with polling() as poller:
            large = ConnectionSettings(http2=Http2Settings(initial_window_bytes=1 << 20))
            async with connected(poller, server_settings=large) as pair:
                engine = pair.client.engine
                await until(lambda: engine.peer_settings_seen)
                for size in (10, 200_000):
                    stream_id = engine.open_stream(CONNECT)
                    assert engine.send_data(stream_id, bytes(size)) == size
                    poller.schedule_flush(pair.client)
                request = await pair.requests.get()
                near, inner = tcp_pair()
                with near, PlainSocket(inner, poller) as end, request.accept() as tunnel:
                    running = relay(tunnel, end, ByteCounts())
                    assert await App(near).read(10) == bytes(10)
                    running.abort("seen")
                second = await pair.requests.get()
                await until(lambda: second.gone)
                with pytest.raises(TunnelBroken):
                    second.accept()

    run(main)


@pytest.mark.parametrize("with_answer", [True, False])
def test_data_after_the_answer_is_held_until_somebody_takes_it(*, with_answer: bool) -> None:
    # A server that speaks first, and much: its window is the only limit.
    async def main() -> None:
        with polling() as poller:
            large = ConnectionSettings(http2=Http2Settings(initial_window_bytes=1 << 20))
            async with connected(poller, client_settings=large) as pair:
                opening = asyncio.get_running_loop().create_task(pair.client.open(CONNECT))
                request = await pair.requests.get()
                accepted = request.accept()
                if not with_answer:
                    await asyncio.wait([opening])
                assert pair.server.engine.send_data(accepted.stream_id, bytes(200_000)) == 200_000
                accepted.write_eof()
                poller.schedule_flush(pair.server)
                near, inner = tcp_pair()
                with near, PlainSocket(inner, poller) as end, await opening as opened:
                    async with asyncio.timeout(20):
                        await until(lambda: opened._early_bytes >= 200_000)
                    running = relay(opened, end, ByteCounts())
                    assert await App(near).read_all() == bytes(200_000)
                    running.abort("seen")
                accepted.close()

    run(main)


@pytest.mark.parametrize("code", [0, 5, 7, 8, 11])
@pytest.mark.parametrize("resetter", ["client", "server"])
def test_resets_end_the_relay_after_what_was_sent(code: int, resetter: str) -> None:
    async def main() -> None:
        with polling() as poller:
            async with connected(poller) as pair:
                opened, accepted = await pair.tunnel()
                mine, other = (opened, accepted) if resetter == "client" else (accepted, opened)
                near, inner = tcp_pair()
                app = App(near)
                with PlainSocket(inner, poller) as end:
                    running = relay(end, other, ByteCounts())
                    mine.connection.engine.send_data(mine.stream_id, b"last words")
                    mine.connection.reset(mine, code)
                    assert await app.read(10) == b"last words"
                    clean = code in (0, 8)
                    if clean:
                        assert await app.read_all() == b""
                        await app.send(b"swallowed")
                        app.eof()
                    result = await running
                    assert (result.error is None) == clean
                    if result.error is not None:
                        assert isinstance(result.error, TunnelBroken)
                        assert result.error.code == code
                    assert result.first is other
                if not clean:
                    with pytest.raises(ConnectionResetError):
                        await app.read_all()
                app.close()
                mine.close()
                other.close()

    run(main)


def test_many_tunnels_share_a_small_window_fairly() -> None:
    async def main() -> None:
        small = Http2Settings(connection_window_bytes=65_535, stream_window_bytes=65_535)
        server = ConnectionSettings(http2=small)
        with polling() as poller:
            async with connected(poller, server_settings=server) as pair, contextlib.AsyncExitStack() as stack:
                apps = []
                for _ in range(8):
                    opened, accepted = await pair.tunnel()
                    near, inner_near = tcp_pair()
                    inner_far, far = tcp_pair()
                    for end in (opened, accepted):
                        stack.enter_context(end)
                    left = stack.enter_context(PlainSocket(inner_near, poller))
                    right = stack.enter_context(PlainSocket(inner_far, poller))
                    relay(left, opened, ByteCounts())
                    relay(accepted, right, ByteCounts())
                    apps.append((App(near), App(far)))

                async def carry(a: App, b: App) -> None:
                    async def send() -> None:
                        await a.send(bytes(500_000))
                        a.eof()

                    async with asyncio.TaskGroup() as both:
                        both.create_task(send())
                        assert len(await b.read_all()) == 500_000
                    a.close()
                    b.close()

                async with asyncio.TaskGroup() as tasks:
                    for a, b in apps:
                        tasks.create_task(carry(a, b))

    run(main)


def test_idle_connections_hold_no_buffers() -> None:
    async def main() -> None:
        with polling() as poller:
            async with connected(poller) as pair:
                opened, accepted = await pair.tunnel()
                near, inner = tcp_pair()
                with near, PlainSocket(inner, poller) as end:
                    counts = ByteCounts()
                    running = relay(end, opened, counts)
                    near.send(bytes(1000))
                    await until(lambda: counts.sent)
                    for connection in (pair.client, pair.server):
                        await until(lambda at=connection: not (at.engine.output.borrows or at.link.blocked))
                    running.abort("seen")
                opened.close()
                accepted.close()
                gc.collect()

    run(main)


def test_h2_library_as_client_over_a_socket() -> None:
    """A foreign implementation end to end: request, data both ways, END_STREAM both ways."""

    async def main() -> None:
        async def echo(request: Request) -> None:
            near, inner = tcp_pair()

            async def answer() -> None:
                app = App(near)
                data = await app.read_all()
                await app.send(data.upper())
                app.close()

            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(answer())
                with PlainSocket(inner, poller) as end, request.accept() as tunnel:
                    await relay(tunnel, end, ByteCounts())

        with polling() as poller:
            near, far = tcp_pair()
            loop = asyncio.get_running_loop()
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(serve_connection(far, None, ConnectionSettings(), poller, echo))
                peer = h2.connection.H2Connection(h2.config.H2Configuration(client_side=True))
                peer.initiate_connection()
                peer.send_headers(1, CONNECT)
                await loop.sock_sendall(near, peer.data_to_send())
                got, ended, sent = b"", False, False
                while not ended:
                    for event in peer.receive_data(await loop.sock_recv(near, 65536)):
                        if isinstance(event, h2.events.ResponseReceived) and not sent:
                            sent = True
                            peer.send_data(1, b"shout", end_stream=True)
                        elif isinstance(event, h2.events.DataReceived):
                            got += event.data
                            peer.acknowledge_received_data(event.flow_controlled_length, 1)
                        elif isinstance(event, h2.events.StreamEnded):
                            ended = True
                    await loop.sock_sendall(near, peer.data_to_send())
                assert got == b"SHOUT"
                near.close()

    run(main)


def test_peers_with_small_frames_get_many_per_read() -> None:
    async def main() -> None:
        server = ConnectionSettings(http2=Http2Settings(max_frame_bytes=16_384))
        with polling() as poller:
            async with connected(poller, server_settings=server) as pair:
                opened, accepted = await pair.tunnel()
                near, inner_near = tcp_pair()
                inner_far, far = tcp_pair()
                data = random.Random(5).randbytes(5_000_000)
                with near, far, PlainSocket(inner_near, poller) as one, PlainSocket(inner_far, poller) as two:
                    relay(one, opened, ByteCounts())
                    relay(accepted, two, ByteCounts())
                    await until(lambda: pair.client.engine.peer_settings_seen)
                    assert opened.scatters
                    async with asyncio.TaskGroup() as tasks:
                        tasks.create_task(App(near).send(data))
                        assert await App(far).read(len(data)) == data
                opened.close()
                accepted.close()

    run(main)


@pytest.mark.parametrize("loop", LOOPS)
@pytest.mark.parametrize("reads", [1, 2])
def test_a_request_reset_in_the_same_read_leaves_no_tunnel(reads: int, loop: str) -> None:
    """If request and reset arrive in one read, the handler's fiber is cancelled before its first step; in two
    reads, while it waits.
    """

    async def main() -> None:
        handled: list[str] = []

        async def wait(request: Request) -> None:
            handled.append("begun")
            try:
                await asyncio.get_running_loop().create_future()
            finally:
                handled.append("ended")

        def alive() -> int:
            gc.collect()
            return sum(type(one) in (Request, Tunnel, Fiber) for one in gc.get_objects())

        with polling() as poller:
            async with raw_client(poller, wait) as peer:
                await peer.barrier()
                before = alive()
                for stream_id in range(1, 41, 2):
                    reset = frame(frames.RST_STREAM, 0, stream_id, frames.U32.pack(ErrorCode.CANCEL))
                    if reads == 1:
                        await peer.send(request_frame(stream_id) + reset)
                    else:
                        await peer.send(request_frame(stream_id))
                        await peer.barrier()
                        await peer.send(reset)
                await peer.barrier()
                assert sorted(handled) == ["begun"] * 20 + ["ended"] * 20
                assert alive() == before

    run(main, loop)


@pytest.mark.parametrize("loop", LOOPS)
def test_a_handler_that_answers_a_stream_that_is_gone_has_not_failed(
    loop: str, caplog: pytest.LogCaptureFixture
) -> None:
    async def main() -> None:
        gone: list[bool] = []

        async def accept(request: Request) -> None:
            gone.append(request.gone)
            request.accept()

        with polling() as poller:
            async with raw_client(poller, accept) as peer:
                reset = frame(frames.RST_STREAM, 0, 1, frames.U32.pack(ErrorCode.CANCEL))
                await peer.send(request_frame(1) + reset)
                await peer.barrier()
        assert gone == [True]

    run(main, loop)
    assert caplog.records == []
