"""Attacks by a hostile peer of the tunnel port: nothing reaches an application, and other clients are not
affected.
"""

import asyncio
import contextlib
import socket
import ssl
from collections.abc import Awaitable, Callable
from pathlib import Path

import h2.config
import h2.connection
import h2.errors
import h2.events
import h2.exceptions
import pytest

from hbone.aio.connection import connect as tunnel_connection
from hbone.aio.connection_settings import default_client
from hbone.aio.poller import Poller
from hbone.aio.relay import ByteCounts, relay
from hbone.aio.socket import PlainSocket
from hbone.errors import ConnectRefused, HboneError
from hbone.settings import Role
from hbone.tls_context import TlsContext, TlsSettings, TlsVersion
from tests.hbone.certificates import Authority, Leaf
from tests.ztunnel.proxy.envoy.harness import (
    WAIT_S,
    Harness,
    Identities,
    Json,
    ask,
    chain,
    cluster,
    connect_route,
    connection_manager,
    listener,
    rbac,
    run,
    tls,
)
from ztunnel.proxy.envoy.config.settings import Switches

CLIENT, SERVER = "spiffe://td/ns/a/sa/client", "spiffe://td/ns/a/sa/server"
ODH = b"x-envoy-original-dst-host"


def serve(
    tmp_path: Path,
    body: Callable[[Harness, Identities, int, list[bytes]], Awaitable[None]],
    *filters: Json,
    switches: Switches = Switches(),  # noqa: B008  frozen
    handshake: str = "10s",
) -> None:
    """Run a tunnel listener in front of an application. ``body`` gets its port and the data received by the
    application.
    """

    async def main(harness: Harness) -> None:
        heard: list[bytes] = []

        async def hear(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            heard.append(b"")
            with contextlib.suppress(ConnectionError):
                while data := await reader.read(65536):
                    heard[-1] += data
                    writer.write(data)
            writer.close()

        server = await asyncio.start_server(hear, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        identities = Identities()
        end = chain(
            *filters,
            connection_manager({"route_config": connect_route("virtual_inbound")}),
            transport_socket=tls(SERVER, server=True),
            transport_socket_connect_timeout=handshake,
        )
        original = {"name": "virtual_inbound", "type": "ORIGINAL_DST", "lb_policy": "CLUSTER_PROVIDED"}
        original["original_dst_lb_config"] = {"use_http_header": True}  # type: ignore[assignment]
        await harness.published(
            listener(end, name="inbound"),
            listener(name="plain"),
            cluster(port),
            ("cluster", original),
            identities.secret(SERVER),
            identities.root(),
        )
        await harness.until(lambda: len(harness.proxy.listeners.active) == 2)
        try:
            await body(harness, identities, port, heard)
        finally:
            server.close()

    run(tmp_path, main, switches=switches)


def context(authority: Authority | None, leaf: Leaf | None, **more: object) -> TlsContext:
    """A client's context; without a leaf it shows no certificate."""
    settings = TlsSettings(
        certificate_chain_pem=leaf.chain_pem if leaf else None,
        private_key_pem=leaf.key_pem if leaf else None,
        trusted_ca_pem=authority.pem if authority else None,
        **more,  # type: ignore[arg-type]
    )
    return TlsContext(Role.CLIENT, settings)


async def request(harness: Harness, ctx: TlsContext, *headers: tuple[bytes, bytes], data: bytes = b"x") -> bytes:
    """Open one tunnel with a new client. Return the received bytes, or the status of the refusal."""
    sock = socket.socket()
    sock.setblocking(False)
    await asyncio.get_running_loop().sock_connect(sock, ("127.0.0.1", harness.port("inbound")))
    poller: Poller = harness.proxy.poller
    connection = await tunnel_connection(sock, ctx, default_client(), poller)
    try:
        tunnel = await asyncio.wait_for(connection.open([(b":method", b"CONNECT"), *headers]), WAIT_S)
        left, right = socket.socketpair()
        left.setblocking(False)
        right.settimeout(WAIT_S)
        with PlainSocket(left, poller) as end, tunnel:
            running = relay(end, tunnel, ByteCounts())
            right.sendall(data)
            right.shutdown(socket.SHUT_WR)
            received = await asyncio.get_running_loop().run_in_executor(None, _read_all, right)
            await running
        return received
    except ConnectRefused as refused:
        return b"%d" % refused.status
    finally:
        connection.close()


def _read_all(sock: socket.socket) -> bytes:
    with sock:
        parts = []
        while part := sock.recv(65536):
            parts.append(part)
        return b"".join(parts)


# Who is it


def test_only_a_proper_certificate_gets_a_byte_through(tmp_path: Path) -> None:
    async def body(harness: Harness, identities: Identities, port: int, heard: list[bytes]) -> None:
        good, foreign = identities.authority, Authority("foreign")
        middle = Authority("middle", good)
        cases: dict[str, tuple[Leaf | None, str]] = {
            "no certificate": (None, "fail_verify_no_cert"),
            "another root": (foreign.issue(CLIENT), "fail_verify_error"),
            "another root, the same name for it": (Authority().issue(CLIENT), "fail_verify_error"),
            "expired": (good.issue(CLIENT, from_day=-3, to_day=-1), "fail_verify_error"),
            "not yet valid": (good.issue(CLIENT, from_day=1, to_day=2), "fail_verify_error"),
            "another trust domain": (good.issue("spiffe://other/ns/a/sa/client"), "fail_verify_san"),
            "a trust domain that begins alike": (good.issue("spiffe://td.evil/ns/a/sa/client"), "fail_verify_san"),
            "no name at all": (good.issue(), "fail_verify_san"),
            "missing intermediate": (middle.issue(CLIENT, intermediates=False), "fail_verify_error"),
        }
        address = b"127.0.0.1:%d" % port
        own = ((b":authority", address), (ODH, address))
        for name, (leaf, counter) in cases.items():
            stat = f"listener.127.0.0.1_0.ssl.{counter}"
            before = harness.count(stat)
            with pytest.raises(HboneError):
                await request(harness, context(good, leaf), *own)
            await harness.until(lambda stat=stat, before=before: harness.count(stat) == before + 1)
            assert heard == [], name
        allowed = await request(harness, context(good, middle.issue(CLIENT)), *own, data=b"hello")
        assert allowed == b"hello"

    serve(tmp_path, body, rbac(CLIENT), switches=Switches(check_authority=False))


def test_an_older_protocol_is_refused(tmp_path: Path) -> None:
    async def body(harness: Harness, identities: Identities, port: int, heard: list[bytes]) -> None:
        leaf = identities.authority.issue(CLIENT)
        old = context(identities.authority, leaf, min_version=TlsVersion.TLS_1_2, max_version=TlsVersion.TLS_1_2)
        with pytest.raises(HboneError, match="version"):
            await request(harness, old, (b":authority", b"127.0.0.1:1"))
        assert harness.count("listener.127.0.0.1_0.ssl.connection_error") == 1

    serve(tmp_path, body)


# Where to


@pytest.mark.parametrize(
    ("authority", "header", "status"),
    [
        ("127.0.0.1:{port}", None, b"503"),  # the listener's own address is loopback: a call to ourselves
        ("10.0.0.9:{port}", None, b"400"),
        ("127.0.0.1:{port}", "10.0.0.9:{port}", b"400"),
        ("10.0.0.9:{port}", "127.0.0.1:{port}", b"400"),
        ("reviews:80", None, b"400"),
        ("[::ffff:10.0.0.9]:{port}", None, b"400"),
        ("user@127.0.0.1:{port}", None, b"400"),
        ("127.0.0.1.:{port}", None, b"400"),
        ("127.0.0.1:99999", None, b"400"),
        ("127.0.0.1", None, b"400"),
        ("2130706433:{port}", None, b"400"),
        ("127.0.0.1:{port}", "2130706433:{port}", b"400"),
    ],
)
def test_tunnel_can_reach_only_the_pod_of_its_connection(
    tmp_path: Path, authority: str, header: str | None, status: bytes
) -> None:
    async def body(harness: Harness, identities: Identities, port: int, heard: list[bytes]) -> None:
        client = context(identities.authority, identities.authority.issue(CLIENT))
        headers = [(b":authority", authority.format(port=port).encode())]
        if header is not None:
            headers.append((ODH, header.format(port=port).encode()))
        assert await request(harness, client, *headers) == status
        assert heard == []

    serve(tmp_path, body)


def test_data_before_the_answer_waits_for_the_verdict(tmp_path: Path) -> None:
    """Early DATA on a CONNECT that is refused is never forwarded."""

    async def body(harness: Harness, identities: Identities, port: int, heard: list[bytes]) -> None:
        attacker = await Attacker.to(harness, identities)
        stream = attacker.connect(b"10.0.0.9:%d" % port)
        attacker.h2.send_data(stream, b"early")
        events = await attacker.events_until(h2.events.StreamEnded)
        (answer,) = [event for event in events if isinstance(event, h2.events.ResponseReceived)]
        assert dict(answer.headers)[b":status"] == b"400"
        assert heard == []
        await attacker.close()

    serve(tmp_path, body)


# Floods


class Attacker:
    """A peer with a good certificate and bad manners, on h2 and the standard library's TLS."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer
        self.h2 = h2.connection.H2Connection(h2.config.H2Configuration(client_side=True, header_encoding=None))
        self.h2.initiate_connection()
        self.flush()

    @classmethod
    async def to(cls, harness: Harness, identities: Identities) -> "Attacker":
        leaf = identities.authority.issue(CLIENT)
        folder = harness.folder
        (folder / "chain").write_bytes(leaf.chain_pem)
        (folder / "key").write_bytes(leaf.key_pem)
        ctx = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        ctx.check_hostname, ctx.verify_mode = False, ssl.CERT_NONE
        ctx.load_cert_chain(folder / "chain", folder / "key")
        ctx.set_alpn_protocols(["h2"])
        return cls(*await asyncio.open_connection("127.0.0.1", harness.port("inbound"), ssl=ctx))

    def flush(self) -> None:
        self.writer.write(self.h2.data_to_send())

    def connect(self, authority: bytes) -> int:
        stream = self.h2.get_next_available_stream_id()
        self.h2.send_headers(stream, [(b":method", b"CONNECT"), (b":authority", authority)])
        return stream

    async def events_until(self, kind: type[h2.events.Event]) -> list[h2.events.Event]:
        """Send what is queued and read until an event of a kind, or the end."""
        found: list[h2.events.Event] = []
        async with asyncio.timeout(WAIT_S):
            while not any(isinstance(event, kind) for event in found):
                self.flush()
                data = await self.reader.read(65536)
                if not data:
                    break
                found += self.h2.receive_data(data)
        return found

    async def cut_off(self) -> int | None:
        """Read to the end; the error code of the GOAWAY."""
        code: int | None = None
        with contextlib.suppress(ConnectionError, ssl.SSLError):
            async with asyncio.timeout(WAIT_S):
                while data := await self.reader.read(65536):
                    with contextlib.suppress(h2.exceptions.ProtocolError):
                        for event in self.h2.receive_data(data):
                            if isinstance(event, h2.events.ConnectionTerminated):
                                code = int(event.error_code)
        return code

    async def close(self) -> None:
        self.writer.close()
        with contextlib.suppress(ConnectionError, ssl.SSLError):
            await self.writer.wait_closed()


def frame(kind: int, flags: int, stream: int, payload: bytes = b"") -> bytes:
    """One HTTP/2 frame."""
    return len(payload).to_bytes(3, "big") + bytes([kind, flags]) + stream.to_bytes(4, "big") + payload


def rapid_reset(attacker: Attacker, port: int) -> bytes:
    wire = b""
    for _ in range(2000):
        stream = attacker.connect(b"10.0.0.9:1")
        attacker.h2.reset_stream(stream, h2.errors.ErrorCodes.CANCEL)
        wire += attacker.h2.data_to_send()
    return wire


FLOODS: dict[str, Callable[[Attacker, int], bytes]] = {
    "rapid reset": rapid_reset,
    "PING": lambda *_: frame(6, 0, 0, b"12345678") * 20_000,
    "SETTINGS": lambda *_: frame(4, 0, 0) * 20_000,
    "PRIORITY": lambda *_: frame(2, 0, 1, b"\0\0\0\0\1") * 20_000,
    "CONTINUATION": lambda *_: frame(1, 0, 1, b"") + frame(9, 0, 1, b"\x40\x01a\x01b" * 100) * 2000,
    "unknown frames": lambda *_: frame(0x42, 0, 0, b"x") * 20_000,
    "WINDOW_UPDATE": lambda *_: frame(8, 0, 0, b"\0\0\0\1") * 20_000,
}


@pytest.mark.parametrize("flood", FLOODS)
def test_frame_flood_ends_only_its_own_connection(tmp_path: Path, flood: str) -> None:
    async def body(harness: Harness, identities: Identities, port: int, heard: list[bytes]) -> None:
        attacker = await Attacker.to(harness, identities)
        await attacker.events_until(h2.events.RemoteSettingsChanged)
        wire = FLOODS[flood](attacker, port)
        bystander = asyncio.get_running_loop().create_task(_bystander(harness))
        with contextlib.suppress(ConnectionError):
            for start in range(0, len(wire), 16384):
                attacker.writer.write(wire[start : start + 16384])
                await attacker.writer.drain()
        code = await attacker.cut_off()
        assert code in (h2.errors.ErrorCodes.ENHANCE_YOUR_CALM, h2.errors.ErrorCodes.COMPRESSION_ERROR, None)
        await attacker.close()
        assert await bystander == [b"ping"] * 20
        await harness.until(lambda: harness.count("http.inbound.downstream_cx_active") == 0)
        assert harness.count("http.inbound.downstream_cx_protocol_error") == 1

    serve(tmp_path, body)


async def _bystander(harness: Harness) -> list[bytes]:
    return [await ask(harness.port("plain")) for _ in range(20)]


def test_connection_without_a_handshake_is_closed(tmp_path: Path) -> None:
    async def body(harness: Harness, identities: Identities, port: int, heard: list[bytes]) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", harness.port("inbound"))
        writer.write(b"\x16")
        with contextlib.suppress(ConnectionResetError):  # its byte has been looked at and not read
            assert await asyncio.wait_for(reader.read(), WAIT_S) == b""
        writer.close()
        await harness.until(lambda: harness.count("listener.127.0.0.1_0.downstream_cx_active") == 0)

    serve(tmp_path, body, handshake="0.3s")


@pytest.mark.parametrize(
    "garbage", [b"GET / HTTP/1.1\r\n\r\n", b"\x00" * 100, b"\x16\x03\x01\x00\x05\x01\x00\x00\x01\x00"]
)
def test_garbage_instead_of_a_handshake_is_refused(tmp_path: Path, garbage: bytes) -> None:
    async def body(harness: Harness, identities: Identities, port: int, heard: list[bytes]) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", harness.port("inbound"))
        writer.write(garbage)
        writer.write_eof()
        with contextlib.suppress(ConnectionError):
            await asyncio.wait_for(reader.read(), WAIT_S)
        writer.close()
        await harness.until(lambda: harness.count("listener.127.0.0.1_0.downstream_cx_active") == 0)
        assert await ask(harness.port("plain")) == b"ping"
        assert heard == [b"ping"]

    serve(tmp_path, body)
