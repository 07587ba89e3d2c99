"""Handshakes of tunnel connections: certificates that are refused, silent and greedy clients."""

import errno
import socket
from pathlib import Path

import pytest

from hbone.aio.connection import Connection
from hbone.errors import HboneError
from tests.hbone.certificates import Authority
from tests.ztunnel.proxy.istio.inbound_case import POD, closing, fields
from tests.ztunnel.proxy.istio.pods import CLIENT, ROOT, SERVER, Cluster, certificate, identity, play
from ztunnel.proxy.identity.crl import RevocationLists
from ztunnel.proxy.istio.certificates.manager import WorkloadCertificate
from ztunnel.proxy.istio.settings.config import HBONE_PORT

# Handshakes


async def shown_to_the_server(cluster: Cluster, shown: WorkloadCertificate) -> None:
    """Present a certificate. In TLS 1.3 the client learns the server's decision only after its handshake."""
    connection = await cluster.tunnels_to("server", shown=shown)
    await connection.open(fields())


@pytest.mark.parametrize(
    ("name", "authority", "text"),
    [
        ("spiffe://elsewhere/ns/default/sa/client", ROOT, "peer did not present the expected trustdomain"),
        (identity("client"), Authority("other"), "tls handshake error"),
    ],
    ids=["trust domain", "root"],
)
def test_a_client_with_a_wrong_certificate(tmp_path: Path, name: str, authority: Authority, text: str) -> None:
    async def body(cluster: Cluster) -> None:
        await cluster.start(POD)
        shown = certificate(name, authority, roots=(ROOT,))
        with pytest.raises(HboneError):
            await shown_to_the_server(cluster, shown)
        line = await cluster.line()
        assert (line["level"], line["direction"]) == ("warn", "inbound")
        assert line["error"].startswith("tls handshake error: ")
        assert text in line["error"]
        assert cluster.node.metrics.crl_rejections["destination"] == 0

    play(tmp_path, body)


def test_a_revoked_client_is_counted(tmp_path: Path) -> None:
    async def body(cluster: Cluster) -> None:
        shown = certificate(identity("client"))
        cluster.certificates.lists = RevocationLists.parse(ROOT.revoke(shown.issued.chain[0]))
        await cluster.start(POD)
        with pytest.raises(HboneError):
            await shown_to_the_server(cluster, shown)
        await cluster.line()
        assert cluster.node.metrics.crl_rejections["destination"] == 1

    play(tmp_path, body)


def test_silent_client_times_out(tmp_path: Path) -> None:
    async def body(cluster: Cluster) -> None:
        await cluster.start(POD)
        client = cluster.sockets["server"].arrives(HBONE_PORT, None, CLIENT)
        assert await client.read_all() == b""
        assert (await cluster.line())["error"].startswith("tls handshake error: ")

    play(tmp_path, body)


def test_client_closing_during_the_handshake_is_logged(tmp_path: Path) -> None:
    async def body(cluster: Cluster) -> None:
        await cluster.start(POD)
        client = cluster.sockets["server"].arrives(HBONE_PORT, None, CLIENT)
        await client.send(b"\x16\x03\x01")
        await cluster.until(lambda: not cluster.is_idle)
        client.reset()
        await cluster.until(lambda: cluster.is_idle)
        line = await cluster.line()
        assert line["src.addr"].startswith(CLIENT)
        assert line["error"].startswith("tls handshake error: ")
        assert "during the TLS handshake" in line["error"]

    play(tmp_path, body)


def test_silent_connections_are_limited_by_source(tmp_path: Path) -> None:
    async def body(cluster: Cluster) -> None:
        cluster.application(SERVER)
        await cluster.start(POD)
        most = cluster.node.half_open.limits.per_source
        for _ in range(most + 100):
            cluster.sockets["server"].arrives(HBONE_PORT, None, "127.0.9.9")
        assert len(cluster.node.half_open) == most
        assert cluster.node.half_open.rejected == 100
        connection = await cluster.tunnels_to("server")
        tunnel = await connection.open(fields())
        tunnel.close()
        connection.close()

    play(tmp_path, body)


def test_stopping_pod_closes_connections_without_a_handshake(tmp_path: Path) -> None:
    async def body(cluster: Cluster) -> None:
        await cluster.start(POD)
        client = cluster.sockets["server"].arrives(HBONE_PORT, None, CLIENT)
        await cluster.pods["server"].stop()
        assert await client.read_all() == b""
        assert cluster.lines() == []
        assert len(cluster.node.half_open) == 0

    play(tmp_path, body)


def test_peer_closed_for_abuse_is_counted_and_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async def body(cluster: Cluster, connection: Connection) -> None:
        for _ in range(connection.settings.http2.limits.control_burst + 100):
            connection.engine.ping(bytes(8))
        connection.flush()
        await cluster.until(lambda: cluster.node.metrics.closed_for_abuse)
        found = [record.getMessage() for record in caplog.records if "ended by a limit" in record.getMessage()]
        assert len(found) == 1
        assert f"src.identity={identity('client')} " in found[0]

    play(tmp_path, closing(body))


def test_handshake_errors_of_unknown_clients_are_rate_limited(tmp_path: Path) -> None:
    async def body(cluster: Cluster) -> None:
        await cluster.start(POD)
        for _ in range(200):
            client = cluster.sockets["server"].arrives(HBONE_PORT, None, CLIENT)
            await client.send(b"no TLS at all")
            await client.read_all()
        await cluster.until(lambda: cluster.is_idle and len(cluster.lines()) >= 50)
        assert len(cluster.lines()) < 150

    play(tmp_path, body)


def test_client_disconnected_before_accept_is_ignored(tmp_path: Path) -> None:
    class Gone(socket.socket):
        def getsockname(self) -> object:
            raise OSError(errno.ENOTCONN, "gone")

    async def body(cluster: Cluster) -> None:
        await cluster.start(POD)
        sock = Gone(socket.AF_INET, socket.SOCK_STREAM)
        cluster.sockets["server"].accepted[HBONE_PORT](sock, (CLIENT, 1))
        await cluster.until(lambda: sock.fileno() < 0)
        assert cluster.is_idle
        assert cluster.lines() == []

    play(tmp_path, body)


def test_handshake_fails_without_a_certificate(tmp_path: Path) -> None:
    async def body(cluster: Cluster) -> None:
        cluster.certificates.errors[identity("server")] = "the CA says no"
        await cluster.start(POD)
        client = cluster.sockets["server"].arrives(HBONE_PORT, None, CLIENT)
        await client.send(b"hello")  # a certificate is requested only when the client sends
        await client.read_all()
        assert (await cluster.line())["error"] == "signing error: the CA says no"

    play(tmp_path, body)


def test_a_pod_that_the_mesh_does_not_describe_takes_no_tunnels(tmp_path: Path) -> None:
    async def body(cluster: Cluster) -> None:
        await cluster.start(POD, described=False)
        client = cluster.sockets["server"].arrives(HBONE_PORT, None, CLIENT)
        await client.send(b"hello")
        await client.read_all()
        assert (await cluster.line())["error"].startswith("failed to fetch information about local workload")

    play(tmp_path, body)
