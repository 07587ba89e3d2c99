"""Connections that pods open: how they end, SOCKS5, and double tunnels."""

import asyncio
import contextlib
import errno
import os
import socket
from pathlib import Path
from typing import Any

import pytest

from hbone.aio.connection import Connection, connect
from hbone.aio.relay import ByteCounts, relay
from hbone.aio.requests import Request
from hbone.aio.socket import PlainSocket
from hbone.errors import ErrorCode
from tests.ztunnel.proxy.istio.outbound_case import (
    FAR,
    FAR_SIDE,
    GATEWAY,
    GATEWAY_HOST,
    POD,
    REMOTE,
    through_gateway,
)
from tests.ztunnel.proxy.istio.pods import (
    APP_PORT,
    CLIENT,
    ELSEWHERE,
    OTHER,
    ROOT,
    SERVER,
    VIP,
    Cluster,
    certificate,
    echo,
    endpoint,
    identity,
    pass_on,
    play,
    refusing,
    shop,
    workload,
)
from xds.model.address import SocketAddress
from ztunnel.proxy.identity.crl import RevocationLists
from ztunnel.proxy.istio.accounting.outcome import DRAINED
from ztunnel.proxy.istio.path import outbound
from ztunnel.proxy.istio.settings.config import OUTBOUND_PORT
from ztunnel.runtime.line_limit import BURST

# Ends of relays


def test_a_reset_of_the_client_reaches_the_far_side_as_an_ordinary_end(tmp_path: Path) -> None:
    async def body(cluster: Cluster) -> None:
        cluster.mesh.apply([REMOTE])
        await cluster.start(POD)
        cluster.peer("server", SERVER)
        client = cluster.dial(f"{SERVER}:{APP_PORT}")
        await client.send(b"hello")
        assert await client.read(5) == b"hello"
        client.reset()
        line = await cluster.line()
        assert "error" not in line
        assert cluster.closed() == {"-": 1}

    play(tmp_path, body)


def test_a_broken_tunnel_connection_is_an_error_of_the_peer(tmp_path: Path) -> None:
    async def body(cluster: Cluster) -> None:
        cluster.mesh.apply([REMOTE])
        await cluster.start(POD)
        peer = cluster.peer("server", SERVER)

        async def breaks(request: Request) -> None:
            request.accept()
            await asyncio.sleep(0.01)
            request.connection.abort("dies")

        peer.answer = breaks
        client = cluster.dial(f"{SERVER}:{APP_PORT}")
        assert await client.read_all() == b""
        assert (await cluster.line())["error"].startswith("receive: ")
        assert cluster.closed() == {"CONNECT": 1}

    play(tmp_path, body)


def test_a_connect_error_is_the_reset_of_the_application(tmp_path: Path) -> None:
    async def body(cluster: Cluster) -> None:
        cluster.mesh.apply([REMOTE])
        await cluster.start(POD)
        peer = cluster.peer("server", SERVER)

        async def resets(request: Request) -> None:
            tunnel = request.accept()
            await asyncio.sleep(0.01)
            request.connection.reset(tunnel, ErrorCode.CONNECT_ERROR)

        peer.answer = resets
        assert await cluster.dial(f"{SERVER}:{APP_PORT}").is_reset()
        assert "error" not in await cluster.line()

    play(tmp_path, body)


@pytest.mark.parametrize("host", [SERVER, VIP], ids=["waiting for a gate", "relaying"])
def test_stopping_the_pod_ends_its_connections(tmp_path: Path, host: str) -> None:
    async def body(cluster: Cluster) -> None:
        await cluster.start(POD)
        cluster.wire.gates[SocketAddress(SERVER, APP_PORT)] = asyncio.Event()
        cluster.application(VIP, APP_PORT, greeting=b"hi")
        client = cluster.dial(f"{host}:{APP_PORT}")
        if host == VIP:
            assert await client.read(2) == b"hi"
        else:
            await cluster.until(lambda: cluster.wire.dialled)
        await cluster.pods["client"].stop()
        await client.read_all()
        line = await cluster.line()
        assert line["error"] == DRAINED
        assert cluster.closed() == {"-": 1}

    play(tmp_path, body)


@pytest.mark.parametrize("gone", ["captured", "socks"])
def test_disconnected_client_leaves_no_connection(tmp_path: Path, gone: str) -> None:
    async def body(cluster: Cluster) -> None:
        await cluster.start(POD)
        if gone == "captured":
            client = cluster.sockets["client"].arrives(OUTBOUND_PORT, None, CLIENT)
        else:
            client = cluster.socks()
            await client.send(b"\x05")
            client.reset()
        await cluster.until(lambda: cluster.is_idle)
        if gone == "captured":
            assert await client.read_all() == b""
        assert cluster.lines() == []
        began_s = cluster.node.clock.monotonic()
        await cluster.pods["client"].drain(20.0)
        assert cluster.node.clock.monotonic() - began_s < 0.5, "it still counts as arriving"

    play(tmp_path, body)


# Cancelled before the first step: what a callback was given must not leak


@pytest.mark.parametrize("port", [15001, 15080, 15006, 15008])
def test_connection_closed_right_after_accept_leaves_no_entry(tmp_path: Path, port: int) -> None:
    async def body(cluster: Cluster) -> None:
        await cluster.start(POD)
        client = cluster.sockets["client"].arrives(port, SocketAddress(SERVER, 80), OTHER)
        await cluster.pods["client"].stop()
        assert await client.read_all() == b""
        assert cluster.is_idle

    play(tmp_path, body)


@pytest.mark.parametrize("port", [15001, 15080, 15006, 15008])
def test_connection_accepted_after_the_stop_leaves_no_entry(tmp_path: Path, port: int) -> None:
    async def body(cluster: Cluster) -> None:
        await cluster.start(POD)
        await cluster.pods["client"].stop()
        client = cluster.sockets["client"].arrives(port, SocketAddress(SERVER, 80), OTHER)
        assert await client.read_all() == b""
        assert cluster.is_idle

    play(tmp_path, body)


# SOCKS5


class Names:
    """A pod's names."""

    async def resolve(self, name: str, *, ipv6: bool) -> str | None:
        return SERVER if name == "server.example" else None

    def leave(self) -> None:
        """Nothing to do."""

    async def finish(self, limit_s: float) -> None:
        """Nothing to do."""

    async def close(self) -> None:
        """Nothing to do."""


def test_a_socks_client_dials_by_name(tmp_path: Path) -> None:
    async def body(cluster: Cluster) -> None:
        cluster.mesh.apply([REMOTE])
        await cluster.start(POD, dns=Names())
        cluster.peer("server", SERVER)
        client = cluster.socks()
        await client.send(b"\x05\x01\x00")
        assert await client.read(2) == b"\x05\x00"
        await client.send(b"\x05\x01\x00\x03\x0eserver.example" + APP_PORT.to_bytes(2, "big"))
        assert (await client.read(10))[:2] == b"\x05\x00"
        assert await client.ask() == b"ping"
        assert (await cluster.line())["dst.workload"] == "server"

    play(tmp_path, body)


def test_a_socks_client_without_names_is_refused(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async def body(cluster: Cluster) -> None:
        await cluster.start(POD)
        client = cluster.socks()
        source = SocketAddress.of(client.sock.getsockname())
        await client.send(b"\x05\x01\x00" + b"\x05\x01\x00\x03\x0eserver.example\x00\x50")
        assert await client.read_all() == b"\x05\x00" + b"\x05\x04\x00\x01" + bytes(6)
        assert cluster.lines() == []
        assert [record.getMessage() for record in caplog.records if "socks" in record.getMessage()] == [
            "failed to negotiate socks connection: no address of the requested name was found: 'server.example' "
            f"src.addr={source}"
        ]

    play(tmp_path, body)


def test_lines_about_refused_socks_clients_are_limited(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async def body(cluster: Cluster) -> None:
        await cluster.start(POD)
        for _ in range(2 * BURST):
            client = cluster.socks()
            await client.send(b"\x04\x01\x00")
            assert await client.read_all() == b"\x05\x07\x00\x01" + bytes(6)
        said = [record for record in caplog.records if "unsupported version 4" in record.getMessage()]
        assert BURST <= len(said) < 2 * BURST

    play(tmp_path, body)


# Double tunnels


def double(cluster: Cluster) -> None:
    far = endpoint("far-server", network=FAR, network_gateway=GATEWAY, node=ELSEWHERE)
    names = (identity("far-server"),)
    cluster.mesh.apply([shop(subject_alt_names=names), far, workload("gateway", GATEWAY_HOST, node=ELSEWHERE)])


@pytest.mark.parametrize("where", ["outer", "inner", "inner certificate", "silence"])
def test_a_double_tunnel_that_fails_closes_both(tmp_path: Path, where: str) -> None:
    async def body(cluster: Cluster) -> None:
        double(cluster)
        await cluster.start(POD)
        shown = certificate(identity("another")) if where == "inner certificate" else None
        inner = cluster.peer("far-server", "127.0.2.1", shown=shown)
        gateway = cluster.peer("gateway", GATEWAY_HOST)

        async def answer(request: Request) -> None:
            await pass_on(cluster, request.accept(), FAR_SIDE)

        async def never(request: Request) -> None:
            await asyncio.sleep(100)

        gateway.answer = refusing(503) if where == "outer" else answer
        if where == "inner":
            inner.answer = refusing(401)
        elif where == "silence":
            inner.answer = never
        assert await cluster.dial(f"{VIP}:80").ask() == b""
        line = await cluster.line()
        error = line["error"]
        if where == "outer":  # nobody knows more than the gateway
            assert (line["dst.workload"], line["dst.identity"]) == ("gateway", identity("gateway"))
            (series,) = cluster.node.metrics.series
            assert identity("gateway") in series.labels
            assert identity("far-server") not in series.labels
        expected = {
            "outer": "http status: 503 Service Unavailable",
            "inner": "http status: 401 Unauthorized",
            "inner certificate": "io error: identity verification error",
            "silence": "http status: the peer did not answer in time",
        }
        assert error.startswith(expected[where])

    play(tmp_path, body)


def test_graceful_close_of_a_double_tunnel_has_a_time_limit(tmp_path: Path) -> None:
    async def body(cluster: Cluster) -> None:
        double(cluster)
        await cluster.start(POD)
        gateway, inner = await through_gateway(cluster, far="far-server")
        hold = asyncio.Event()

        async def holds(request: Request) -> None:
            """A gateway that never ends its side."""
            sock = await cluster.wire.connect(FAR_SIDE, GATEWAY_HOST, None)
            end = PlainSocket(sock, cluster.node.poller)
            tunnel = request.accept()
            running = relay(tunnel, end, ByteCounts())
            await hold.wait()
            running.abort("over")
            end.close()

        async def ends(request: Request) -> None:
            await echo(request.accept())

        gateway.answer, inner.answer = holds, ends
        began_s = cluster.node.clock.monotonic()
        assert await cluster.dial(f"{VIP}:80").ask() == b"ping"
        await cluster.line()
        assert cluster.node.clock.monotonic() - began_s < 40
        hold.set()

    play(tmp_path, body)


def test_aborted_double_tunnel_is_not_closed_gracefully(tmp_path: Path) -> None:
    async def body(cluster: Cluster) -> None:
        double(cluster)
        await cluster.start(POD)
        await through_gateway(cluster, far="far-server")
        client = cluster.dial(f"{VIP}:80")
        await client.send(b"hello")
        assert await client.read(5) == b"hello"
        await cluster.pods["client"].stop()
        await client.read_all()
        assert (await cluster.line())["error"] == DRAINED

    play(tmp_path, body)


@pytest.mark.parametrize("established", [True, False])
def test_double_tunnel_ends_at_once_when_its_outer_tunnel_breaks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, established: bool
) -> None:
    """The inner connection must not wait for its handshake timeout, or for an answer to its next PING."""

    async def body(cluster: Cluster) -> None:
        double(cluster)
        await cluster.start(POD)
        gateway, _ = await through_gateway(cluster, far="far-server")
        silent = asyncio.Event()

        async def holds(request: Request) -> None:
            request.accept()
            await silent.wait()

        if not established:
            gateway.answer = holds
        client = cluster.dial(f"{VIP}:80")
        await client.send(b"hello")
        if established:
            assert await client.read(5) == b"hello"
        else:
            await cluster.until(lambda: gateway.requests and gateway.requests[0].answered)
        gateway.connections[0].abort("the gateway has crashed")
        with contextlib.suppress(ConnectionResetError):
            assert await client.read_all() == b""
        error = (await cluster.line())["error"]
        assert "timeout" not in error
        assert "timed out" not in error
        silent.set()

    play(tmp_path, body)


def test_a_revoked_far_side_ends_its_double_tunnel(tmp_path: Path) -> None:
    async def body(cluster: Cluster) -> None:
        double(cluster)
        await cluster.start(POD)
        _, inner = await through_gateway(cluster, far="far-server")
        client = cluster.dial(f"{VIP}:80")
        await client.send(b"hello")
        assert await client.read(5) == b"hello"
        cluster.revoke(RevocationLists.parse(ROOT.revoke(inner.shown.issued.chain[0])))
        await client.read_all()
        line = await cluster.line()
        assert line["error"] == "connection closed: peer certificate revoked by CRL"
        assert cluster.closed() == {"CERT_REVOKED": 1}
        assert cluster.node.metrics.crl_rejections["source"] == 1

    play(tmp_path, body)


def test_a_far_side_that_is_revoked_during_its_handshake_gets_no_double_tunnel(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def body(cluster: Cluster) -> None:
        double(cluster)
        await cluster.start(POD)
        _, inner = await through_gateway(cluster, far="far-server")

        async def revoked_meanwhile(*args: Any) -> Connection:
            connection = await connect(*args)
            cluster.revoke(RevocationLists.parse(ROOT.revoke(inner.shown.issued.chain[0])))
            return connection

        monkeypatch.setattr(outbound, "connect", revoked_meanwhile)
        assert await cluster.dial(f"{VIP}:80").ask() == b""
        assert (await cluster.line())["error"].endswith("certificate revoked during the handshake")
        assert inner.requests == []
        assert cluster.node.metrics.crl_rejections["source"] == 1

    play(tmp_path, body)


def test_a_revoked_peer_loses_its_connection(tmp_path: Path) -> None:
    async def body(cluster: Cluster) -> None:
        cluster.mesh.apply([REMOTE])
        await cluster.start(POD)
        peer = cluster.peer("server", SERVER)
        client = cluster.dial(f"{SERVER}:{APP_PORT}")
        await client.send(b"hello")
        assert await client.read(5) == b"hello"
        cluster.revoke(RevocationLists())
        cluster.revoke(RevocationLists.parse(ROOT.revoke(peer.shown.issued.chain[0])))
        await client.read_all()
        assert cluster.closed() == {"CERT_REVOKED": 1}
        await cluster.line()

    play(tmp_path, body)


def test_double_tunnel_that_runs_out_of_descriptors_closes_its_outer_tunnel(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def body(cluster: Cluster) -> None:
        double(cluster)
        await cluster.start(POD)
        gateway = cluster.peer("gateway", GATEWAY_HOST)

        async def hold(request: Request) -> None:
            tunnel = request.accept()
            while not tunnel.gone:
                await asyncio.sleep(0.1)

        gateway.answer = hold

        def full() -> tuple[socket.socket, socket.socket]:
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

        client = cluster.dial(f"{VIP}:80")
        monkeypatch.setattr(socket, "socketpair", full)
        assert await client.ask() == b""
        assert "Too many open files" in (await cluster.line())["error"]
        await cluster.until(lambda: not gateway.connections[0].open_streams)

    play(tmp_path, body)
