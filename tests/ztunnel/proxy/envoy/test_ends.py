"""How connections end, as their log lines have it: flags, details, one line each. Measured beside Envoy in
``tests/interop/test_behaviour.py``."""

import asyncio
import contextlib
import socket
import struct
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import h2.config
import h2.connection
import h2.events
import pytest
from hyperframe.frame import GoAwayFrame

from tests.ztunnel.proxy.envoy.harness import (
    SERVER,
    WAIT_S,
    Harness,
    Identities,
    Json,
    access_log,
    application,
    chain,
    cluster,
    connect_route,
    connection_manager,
    http2,
    listener,
    run,
    tcp,
    tls,
)
from ztunnel.proxy.envoy.admin.server import AdminServer
from ztunnel.proxy.envoy.listeners.connections import LiveConnection
from ztunnel.proxy.envoy.path.tcp_proxy import TcpProxies


@contextlib.asynccontextmanager
async def resetting(*, after_eof: bool) -> AsyncIterator[int]:
    """An application that resets its connection when it has read something, or to the end."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await (reader.read() if after_eof else reader.read(1))
        sock = writer.get_extra_info("socket")
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        writer.transport.abort()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    try:
        yield server.sockets[0].getsockname()[1]
    finally:
        server.close()


class Tunnels:
    """A client of tunnels without TLS, by an HTTP/2 library of others."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self.writer = reader, writer
        self.http2 = h2.connection.H2Connection(h2.config.H2Configuration(header_encoding=None))
        self.http2.initiate_connection()
        self.events: list[h2.events.Event] = []

    @classmethod
    async def to(cls, port: int) -> "Tunnels":
        return cls(*await asyncio.open_connection("127.0.0.1", port))

    def connect(self, stream: int, *more: tuple[bytes, bytes]) -> None:
        self.http2.send_headers(stream, [(b":method", b"CONNECT"), (b":authority", b"x:1"), *more])
        self.send()

    def send(self) -> None:
        self.writer.write(self.http2.data_to_send())

    async def until(self, kind: type[h2.events.Event], stream: int) -> h2.events.Event:
        """The first event of a kind on a stream; fails if the connection ends before."""
        async with asyncio.timeout(WAIT_S):
            while True:
                for event in self.events:
                    if type(event) is kind and getattr(event, "stream_id", None) == stream:
                        return event
                data = await self._reader.read(65536)
                assert data, "the connection ended"
                self.events += self.http2.receive_data(data)
                self.send()

    async def terminated(self) -> None:
        """Wait for GOAWAY, after which h2 accepts no frame. Until then, answer the server's PING."""
        async with asyncio.timeout(WAIT_S):
            while True:
                head = await self._reader.readexactly(9)
                if head[3] == GoAwayFrame.type:
                    return
                body = await self._reader.readexactly(int.from_bytes(head[:3]))
                self.events += self.http2.receive_data(head + body)
                self.send()


def plain(folder: Path, **more: object) -> tuple[str, Json]:
    return listener(chain(tcp(access_log=access_log(folder), **more)))


def terminating(folder: Path) -> tuple[str, Json]:
    """A listener that ends tunnels without TLS, and logs requests and connections."""
    manager = connection_manager({"route_config": connect_route("app")})
    manager["typed_config"]["access_log"] = access_log(folder)
    return listener(chain(manager))


async def one_stream(harness: Harness, leave: Callable[[Tunnels], object]) -> list[Json]:
    """Carry a tunnel with bytes, and let the client leave in some way. Return the log when the connection is
    over.
    """
    client = await Tunnels.to(harness.port("l"))
    client.connect(1)
    await client.until(h2.events.ResponseReceived, 1)
    client.http2.send_data(1, b"hi")
    client.send()
    await client.until(h2.events.DataReceived, 1)
    leave(client)
    await harness.log()
    client.writer.close()
    await harness.until(lambda: not len(harness.proxy.datapath))
    harness.proxy.logs.writer.drain()
    return await harness.log()


@pytest.mark.parametrize("after_eof", [False, True])
def test_an_application_that_resets_is_an_upstream_reset(tmp_path: Path, after_eof: bool) -> None:
    """This also holds after an earlier half-close by the client, because the client has not failed."""

    async def body(harness: Harness) -> None:
        async with resetting(after_eof=after_eof) as port:
            await harness.published(plain(tmp_path), cluster(port))
            reader, writer = await asyncio.open_connection("127.0.0.1", harness.port("l"))
            writer.write(b"hi")
            if after_eof:
                writer.write_eof()
            with contextlib.suppress(ConnectionError):
                await asyncio.wait_for(reader.read(), WAIT_S)
            writer.close()
            (line,) = await harness.log()
            assert line["flags"] == "UR"
            assert harness.count("cluster.app.upstream_cx_destroy_remote_with_active_rq") == 1

    run(tmp_path, body)


def test_the_idle_timeout_runs_while_a_connect_waits_for_its_answer(tmp_path: Path) -> None:
    """No connect timeout of a cluster bounds that wait."""

    async def body(harness: Harness) -> None:
        async with silent() as port:
            waiting = plain(tmp_path, tunneling_config={"hostname": "x:1"}, idle_timeout="0.2s")
            await harness.published(waiting, cluster(port, typed_extension_protocol_options=http2()))
            reader, writer = await asyncio.open_connection("127.0.0.1", harness.port("l"))
            assert await asyncio.wait_for(reader.read(), WAIT_S) == b""
            writer.close()
            (line,) = await harness.log()
            assert (line["flags"], line["details"]) == ("UF", "tcp_session_idle_timeout")
            assert harness.count("tcp.p.idle_timeout") == 1

    run(tmp_path, body)


@pytest.mark.parametrize("opens", [False, True], ids=["while the upstream opens", "while it relays"])
def test_longest_duration_counts_from_the_start_of_the_connection(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, opens: bool
) -> None:
    """As in Envoy 1.40, a slow handshake and a slow upstream use part of the time."""
    limit_s = 100 * WAIT_S
    opening = TcpProxies.open_and_relay

    def aged(proxies: TcpProxies, connection: LiveConnection, *more: Any) -> Any:
        connection.info.started -= limit_s  # as if so much time had passed before
        return opening(proxies, connection, *more)

    monkeypatch.setattr(TcpProxies, "open_and_relay", aged)

    async def body(harness: Harness) -> None:
        async with silent() as port:
            more: Json = {} if opens else {"tunneling_config": {"hostname": "x:1"}}
            limited = plain(tmp_path, max_downstream_connection_duration=f"{limit_s}s", idle_timeout="0s", **more)
            await harness.published(limited, cluster(port, typed_extension_protocol_options=http2()))
            reader, writer = await asyncio.open_connection("127.0.0.1", harness.port("l"))
            assert await asyncio.wait_for(reader.read(), WAIT_S) == b""
            writer.close()
            (line,) = await harness.log()
            assert line["flags"] == ("DT" if opens else "UF,DT")
            assert line["details"] == "max_downstream_connection_duration"
            assert harness.count("tcp.p.max_downstream_connection_duration") == 1

    run(tmp_path, body)


def test_longest_duration_ends_a_connection_without_a_handshake(tmp_path: Path) -> None:
    """As in Envoy 1.40; the limit of a handshake is 10 s."""
    identities = Identities()
    log = access_log(tmp_path)
    limited = chain(
        tcp(max_downstream_connection_duration="0.2s", access_log=log),
        transport_socket=tls(SERVER, server=True),
    )

    async def body(harness: Harness) -> None:
        published = [listener(limited), cluster(1), identities.secret(SERVER), identities.root()]
        assert await harness.published(*published) is None
        await harness.until(lambda: harness.proxy.listeners.active)
        reader, writer = await asyncio.open_connection("127.0.0.1", harness.port("l"))
        assert await asyncio.wait_for(reader.read(), WAIT_S) == b""
        writer.close()
        (line,) = await harness.log()
        assert (line["flags"], line["details"]) == ("DT", "max_downstream_connection_duration")
        assert harness.count("tcp.p.max_downstream_connection_duration") == 1

    run(tmp_path, body)


@contextlib.asynccontextmanager
async def silent() -> AsyncIterator[int]:
    """A server that reads and says nothing."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError):
            await reader.read()
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    try:
        yield server.sockets[0].getsockname()[1]
    finally:
        server.close()


def test_a_tunnel_connection_has_no_line_of_its_own_in_the_requests_log(tmp_path: Path) -> None:
    async def body(harness: Harness) -> None:
        async with application() as port:
            await harness.published(terminating(tmp_path), cluster(port))
            lines = await one_stream(harness, lambda client: client.writer.close())
            assert [line["code"] for line in lines] == [200]

    run(tmp_path, body)


def reset(client: Tunnels) -> None:
    client.http2.reset_stream(1, 8)
    client.send()


@pytest.mark.parametrize(
    ("leave", "flag"), [(reset, "DR"), (lambda client: client.writer.close(), "DC")], ids=["resets", "disconnects"]
)
def test_client_reset_and_disconnect_have_their_flags(
    tmp_path: Path, leave: Callable[[Tunnels], object], flag: str
) -> None:
    async def body(harness: Harness) -> None:
        async with application() as port:
            await harness.published(terminating(tmp_path), cluster(port))
            assert [line["flags"] for line in await one_stream(harness, leave)] == [flag]

    run(tmp_path, body)


def test_the_names_of_an_upstream_over_tls_are_logged(tmp_path: Path) -> None:
    identities = Identities()
    name = [{"name": "f", "typed_config": access_log(tmp_path)[0]["typed_config"]}]
    name[0]["typed_config"]["log_format"]["json_format"] = {"san": "%UPSTREAM_PEER_URI_SAN%"}

    async def body(harness: Harness) -> None:
        async with application() as port:
            secrets = [identities.secret(SERVER), identities.root()]
            server = listener(chain(tcp("app"), transport_socket=tls(SERVER, server=True)), name="server")
            await harness.published(server, cluster(port), *secrets)
            await harness.until(lambda: harness.proxy.listeners.active)
            client = listener(chain(tcp("tls", access_log=name)))
            over_tls = cluster(harness.port("server"), name="tls", transport_socket=tls(SERVER, server=False))
            await harness.published(server, client, cluster(port), over_tls, *secrets)
            await harness.until(lambda: len(harness.proxy.listeners.active) == 2)
            reader, writer = await asyncio.open_connection("127.0.0.1", harness.port("l"))
            writer.write(b"hi")
            writer.write_eof()
            assert await asyncio.wait_for(reader.read(), WAIT_S) == b"hi"
            writer.close()
            (line,) = await harness.log()
            assert line["san"] == SERVER

    run(tmp_path, body)


@pytest.mark.parametrize("moment", ["before", "while it drains", "in the queue"])
def test_drained_listeners_ask_tunnel_connections_to_leave(tmp_path: Path, moment: str) -> None:
    """Connections that come during a graceful drain, or wait in the queue when the socket closes, are asked, too.
    Otherwise their peers would open tunnels here until the process ends.
    """

    async def body(harness: Harness) -> None:
        async with application() as port:
            await harness.published(terminating(tmp_path), cluster(port))
            admin, listening = AdminServer(harness.proxy), harness.port("l")
            if moment == "while it drains":
                admin.drain(inbound_only=False, graceful=True, skip_exit=False)
            sock = socket.create_connection(("127.0.0.1", listening), WAIT_S)
            if moment == "in the queue":
                admin.drain(inbound_only=False, graceful=False, skip_exit=False)
            client = Tunnels(*await asyncio.open_connection(sock=sock))
            client.connect(1)
            if moment == "before":
                await client.until(h2.events.ResponseReceived, 1)
                admin.drain(inbound_only=False, graceful=False, skip_exit=False)
            await client.terminated()
            client.writer.close()

    run(tmp_path, body)
