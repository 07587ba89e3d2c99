"""PROXY headers that a cluster's transport socket sends, by their bytes."""

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from tests.xds.dialects.walked import SURROUNDINGS
from tests.ztunnel.proxy.envoy.harness import (
    CLIENT,
    SERVER,
    Harness,
    Identities,
    Json,
    Open,
    T,
    application,
    ask,
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
from xds.dialects.envoy import compile_cluster, compile_listener
from xds.errors import ConfigError
from xds.model.address import SocketAddress
from xds.proto.envoy.config.cluster.v3.cluster_pb2 import Cluster
from xds.proto.envoy.config.listener.v3.listener_pb2 import Listener
from xds.proto.json import parse_value
from ztunnel.proxy.dataplane.proxy_protocol import (
    LOCAL_HEADER,
    SIGNATURE_2,
    ProxyHeader,
    header_of_version,
    parse_header,
)

_SOCKETS = f"{T}envoy.extensions.transport_sockets"
_FILTERS = f"{T}envoy.extensions.filters.listener"
RAW: Json = {"name": "raw", "typed_config": {"@type": f"{_SOCKETS}.raw_buffer.v3.RawBuffer"}}
READS_HEADER: Json = {"name": "p", "typed_config": {"@type": f"{_FILTERS}.proxy_protocol.v3.ProxyProtocol"}}


def with_header(version: str = "V1", inner: Json = RAW) -> Json:
    kind = f"{_SOCKETS}.proxy_protocol.v3.ProxyProtocolUpstreamTransport"
    return {
        "name": "proxy",
        "typed_config": {"@type": kind, "config": {"version": version}, "transport_socket": inner},
    }


def internal(inner: Json = RAW) -> Json:
    kind = f"{_SOCKETS}.internal_upstream.v3.InternalUpstreamTransport"
    return {"name": "internal", "typed_config": {"@type": kind, "transport_socket": inner}}


def to(address: Json, name: str = "app", **more: object) -> tuple[str, Json]:
    hosts = [{"lb_endpoints": [{"endpoint": {"address": address}}]}]
    assignment = {"cluster_name": name, "endpoints": hosts}
    return "cluster", {"name": name, "type": "STATIC", "load_assignment": assignment, **more}


def pipe(path: Path) -> Json:
    return {"pipe": {"path": str(path)}}


@asynccontextmanager
async def pipe_application(path: Path) -> AsyncIterator[list[bytes]]:
    """An application that echoes on a Unix socket; yields the pieces that it reads."""
    seen: list[bytes] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError):
            while data := await reader.read(4096):
                seen.append(data)
                writer.write(data)
            await writer.drain()
            writer.close()

    server = await asyncio.start_unix_server(serve, path)
    try:
        yield seen
    finally:
        server.close()


async def echoed(host: str, port: int) -> tuple[int, bytes]:
    """Send something. Return the client's port, and the bytes received by the application."""
    reader, writer = await asyncio.open_connection(host, port)
    own = writer.get_extra_info("sockname")[1]
    writer.write(b"ping")
    writer.write_eof()
    seen = await asyncio.wait_for(reader.read(), 10)
    writer.close()
    return own, seen


def line(family: str, host: str, source: int, destination: int) -> bytes:
    return f"PROXY {family} {host} {host} {source} {destination}\r\n".encode()


def binary(host: str, source: int, destination: int) -> bytes:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    packed = socket.inet_pton(family, host)
    ports = source.to_bytes(2, "big") + destination.to_bytes(2, "big")
    body = packed * 2 + ports
    kind = 0x21 if ":" in host else 0x11
    return SIGNATURE_2 + bytes((0x21, kind)) + len(body).to_bytes(2, "big") + body


@pytest.mark.parametrize("leads_to", ["tcp", "pipe"])
@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
@pytest.mark.parametrize("version", ["V1", "V2"])
def test_header_names_the_downstreams_addresses(tmp_path: Path, version: str, host: str, leads_to: str) -> None:
    async def body(harness: Harness) -> None:
        async with application() as port, pipe_application(tmp_path / "app"):
            socket_ = {"transport_socket": with_header(version)}
            address = {"socket_address": {"address": host, "port_value": 0}}
            target = cluster(port, **socket_) if leads_to == "tcp" else to(pipe(tmp_path / "app"), **socket_)
            await harness.published(listener(address=address), target)
            listening = harness.port("l")
            own, seen = await echoed(host, listening)
            family = "TCP6" if ":" in host else "TCP4"
            header = line(family, host, own, listening) if version == "V1" else binary(host, own, listening)
            assert seen == header + b"ping"

    run(tmp_path, body)


def test_header_is_sent_before_the_client_has_sent_anything(tmp_path: Path) -> None:
    async def body(harness: Harness) -> None:
        async with application() as port:
            await harness.published(listener(), cluster(port, transport_socket=with_header()))
            reader, writer = await asyncio.open_connection("127.0.0.1", harness.port("l"))
            own = writer.get_extra_info("sockname")[1]
            seen = await asyncio.wait_for(reader.readline(), 10)
            assert seen == line("TCP4", "127.0.0.1", own, harness.port("l"))
            writer.close()

    run(tmp_path, body)


def test_believed_header_of_a_client_is_passed_on(tmp_path: Path) -> None:
    async def body(harness: Harness) -> None:
        async with application() as port:
            await harness.published(
                listener(listener_filters=[READS_HEADER]), cluster(port, transport_socket=with_header())
            )
            header = b"PROXY TCP4 192.0.2.1 192.0.2.2 1000 2000\r\n"
            assert await ask(harness.port("l"), header + b"ping") == header + b"ping"

    run(tmp_path, body)


def test_tunnels_of_different_clients_share_no_connection_with_a_header(tmp_path: Path) -> None:
    """The header precedes TLS, so that a connection for tunnels has the addresses of one client."""

    async def body(harness: Harness) -> None:
        identities = Identities()
        secrets = [identities.secret(CLIENT), identities.secret(SERVER), identities.root()]
        async with application() as port:
            managed = chain(
                connection_manager({"route_config": connect_route("app")}),
                transport_socket=tls(SERVER, server=True),
            )
            end = listener(managed, name="inbound", listener_filters=[READS_HEADER])
            passes_on = cluster(port, transport_socket=with_header())
            await harness.published(end, passes_on, *secrets)
            await harness.until(lambda: harness.proxy.listeners.active)
            begins = listener(chain(tcp("tunnel", tunneling_config={"hostname": "app:80"})))
            secured = with_header("V2", tls(CLIENT, server=False))
            options = http2()
            tunnelled = cluster(
                harness.port("inbound"),
                name="tunnel",
                transport_socket=secured,
                typed_extension_protocol_options=options,
            )
            await harness.published(end, begins, passes_on, tunnelled, *secrets)
            await harness.until(lambda: len(harness.proxy.listeners.active) == 2)
            for _ in range(2):
                own, seen = await echoed("127.0.0.1", harness.port("l"))
                # The tunnel's end believed the header and says the same in its own.
                assert seen == line("TCP4", "127.0.0.1", own, harness.port("l")) + b"ping"
            assert harness.count("cluster.tunnel.upstream_cx_total") == 2

    run(tmp_path, body)


@pytest.mark.parametrize("order", ["header around", "header inside"])
def test_header_of_an_internal_upstream_travels_inside_the_tunnel(tmp_path: Path, order: str) -> None:
    async def body(harness: Harness) -> None:
        identities = Identities()
        secrets = [identities.secret(CLIENT), identities.secret(SERVER), identities.root()]
        async with application() as port:
            managed = chain(
                connection_manager({"route_config": connect_route("app")}),
                transport_socket=tls(SERVER, server=True),
            )
            end = listener(managed, name="inbound")
            await harness.published(end, cluster(port), *secrets)
            await harness.until(lambda: harness.proxy.listeners.active)
            carries = tcp("tunnel", tunneling_config={"hostname": "app:80"})
            originate = {"name": "originate", "internal_listener": {}, "filter_chains": [chain(carries)]}
            wrapped = with_header("V1", internal()) if order == "header around" else internal(with_header("V1"))
            there = {"envoy_internal_address": {"server_listener_name": "originate"}}
            tunnelled = cluster(
                harness.port("inbound"),
                name="tunnel",
                transport_socket=tls(CLIENT, server=False),
                typed_extension_protocol_options=http2(),
            )
            await harness.published(
                end,
                listener(chain(tcp("enter"))),
                ("listener", originate),
                to(there, "enter", transport_socket=wrapped),
                tunnelled,
                cluster(port),
                *secrets,
            )
            await harness.until(lambda: len(harness.proxy.listeners.active) == 3)
            for _ in range(2):  # the second connection could have sent early data with its CONNECT
                own, seen = await echoed("127.0.0.1", harness.port("l"))
                assert seen == line("TCP4", "127.0.0.1", own, harness.port("l")) + b"ping"

    run(tmp_path, body)


@pytest.mark.parametrize("version", ["V1", "V2"])
def test_health_check_has_the_header_of_a_connection_without_client(tmp_path: Path, version: str) -> None:
    headers: list[bytes] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        headers.append(await reader.read(4096))
        own, peer = (writer.get_extra_info(name)[1] for name in ("sockname", "peername"))
        wanted = LOCAL_HEADER if version == "V2" else line("TCP4", "127.0.0.1", peer, own)
        writer.write(b"\x01" if headers[-1].startswith(wanted) else b"\x02")
        await writer.drain()
        writer.close()

    async def body(harness: Harness) -> None:
        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        check = {"timeout": "2s", "interval": "60s", "unhealthy_threshold": 1, "healthy_threshold": 1}
        tcp_check = {"send": {"text": "00"}, "receive": [{"text": "01"}]}
        port = server.sockets[0].getsockname()[1]
        checked = cluster(
            port,
            transport_socket=with_header(version),
            health_checks=[{**check, "tcp_health_check": tcp_check}],
        )
        await harness.published(listener(), checked)
        await harness.until(lambda: headers)
        await harness.until(lambda: harness.count("cluster.app.health_check.success") == 1)
        server.close()

    run(tmp_path, body)


def test_connection_to_a_pipe_has_the_clusters_tls(tmp_path: Path) -> None:
    """Such a connection was once in plain text, whatever the transport socket was."""

    async def body(harness: Harness) -> None:
        identities = Identities()
        async with pipe_application(tmp_path / "app") as seen:
            target = to(pipe(tmp_path / "app"), transport_socket=tls(CLIENT, server=False))
            await harness.published(listener(), target, identities.secret(CLIENT), identities.root())
            assert await ask(harness.port("l")) == b""
            assert b"".join(seen)[:1] == b"\x16"  # a TLS handshake

    run(tmp_path, body)


def test_connection_to_an_internal_listener_never_drops_the_clusters_tls(tmp_path: Path) -> None:
    async def body(harness: Harness) -> None:
        identities = Identities()
        async with application() as port:
            inner = {"name": "inner", "internal_listener": {}, "filter_chains": [chain(tcp("app"))]}
            there = {"envoy_internal_address": {"server_listener_name": "inner"}}
            enter = to(there, "enter", transport_socket=internal(tls(CLIENT, server=False)))
            await harness.published(
                listener(chain(tcp("enter"))),
                ("listener", inner),
                enter,
                cluster(port),
                identities.secret(CLIENT),
                identities.root(),
            )
            await harness.until(lambda: len(harness.proxy.listeners.active) == 2)
            assert await ask(harness.port("l")) == b""

    run(tmp_path, body)


def test_tunnel_to_a_pipe_is_refused(tmp_path: Path) -> None:
    """It once sent the client's bytes without a CONNECT."""

    async def body(harness: Harness) -> None:
        async with pipe_application(tmp_path / "app") as seen:
            target = to(pipe(tmp_path / "app"), typed_extension_protocol_options=http2())
            await harness.published(listener(chain(tcp(tunneling_config={"hostname": "a:1"}))), target)
            connection = await Open.to(harness.port("l"))
            assert await connection.say(b"ping") == b""
            await connection.close()
            assert seen == []

    run(tmp_path, body)


@pytest.mark.parametrize("version", [1, 2])
def test_addresses_of_two_families_are_left_out(version: int) -> None:
    header = header_of_version(version, SocketAddress("192.0.2.1", 1), SocketAddress("2001:db8::1", 2))
    assert parse_header(header) == ProxyHeader(version, len(header))
    assert parse_header(LOCAL_HEADER) == ProxyHeader(2, len(LOCAL_HEADER))


@pytest.mark.parametrize(
    ("transport_socket", "reason"),
    [
        (with_header(inner=with_header()), "a second PROXY header is not sent"),
        (with_header("V3"), "version"),
        ({"name": "p", "typed_config": {"@type": with_header()["typed_config"]["@type"]}}, "transport_socket"),
    ],
)
def test_header_that_cannot_be_sent_is_refused_by_name(transport_socket: Json, reason: str) -> None:
    _, document = cluster(1, transport_socket=transport_socket)
    with pytest.raises(ConfigError, match=reason):
        compile_cluster(parse_value(document, Cluster).message, SURROUNDINGS)


@pytest.mark.parametrize("field", ["pass_through_tlvs", "added_tlvs"])
def test_tlvs_are_refused_by_name(tmp_path: Path, field: str) -> None:
    socket_ = with_header("V2")
    socket_["typed_config"]["config"][field] = [] if field == "added_tlvs" else {}
    parsed = parse_value(cluster(1, transport_socket=socket_)[1], Cluster)
    assert [each.path.rpartition(".")[2] for each in parsed.unknown_fields] == [field]


def test_check_by_grpc_behind_a_header_is_refused() -> None:
    check = {"timeout": "1s", "interval": "1s", "unhealthy_threshold": 1, "healthy_threshold": 1}
    _, document = cluster(1, transport_socket=with_header(), health_checks=[{**check, "grpc_health_check": {}}])
    with pytest.raises(ConfigError, match="a check by gRPC sends no PROXY header"):
        compile_cluster(parse_value(document, Cluster).message, SURROUNDINGS)


def test_internal_listener_that_would_read_a_header_is_refused() -> None:
    document = {"name": "i", "internal_listener": {}, "listener_filters": [READS_HEADER]}
    with pytest.raises(ConfigError, match="an internal listener passes no bytes to listener filters"):
        compile_listener(parse_value({**document, "filter_chains": [chain()]}, Listener).message, SURROUNDINGS)
