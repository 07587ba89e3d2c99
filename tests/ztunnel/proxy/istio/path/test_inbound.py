"""Connections to pods, in tunnels and in plain text: refusals, and how the connections end."""

import asyncio
import errno
import os
import socket
from dataclasses import replace
from pathlib import Path

import pytest

from hbone.aio.connection import Connection
from hbone.errors import ConnectionBroken, TunnelBroken
from tests.ztunnel.proxy.istio.inbound_case import (
    ALLOW,
    APP,
    DENY,
    GATED,
    NEAR,
    POD,
    TunnelClient,
    closing,
    fields,
    refused,
)
from tests.ztunnel.proxy.istio.pages import traces
from tests.ztunnel.proxy.istio.pods import (
    APP_PORT,
    CLIENT,
    LOOPS,
    OTHER,
    ROOT,
    SERVER,
    Cluster,
    certificate,
    identity,
    play,
)
from tproxy.errors import ConnectTimedOut, KernelRefused
from xds.model.workload import ApplicationTunnel, AppProtocol
from ztunnel.proxy.identity.crl import RevocationLists
from ztunnel.proxy.istio.accounting.denials import Pair
from ztunnel.proxy.istio.accounting.outcome import DRAINED, POLICY_CHANGE, RECURSIVE_CALL, REVOKED
from ztunnel.proxy.istio.accounting.peer_baggage_labels import SETS_PER_PEER
from ztunnel.proxy.istio.settings.config import HBONE_PORT, PLAINTEXT_PORT

# Tunnels


@pytest.mark.parametrize("loop", LOOPS)
def test_a_tunnel_reaches_the_application(tmp_path: Path, loop: str) -> None:
    async def body(cluster: Cluster, connection: Connection) -> None:
        app = cluster.application(SERVER)
        trace = b"00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-00"
        tunnel = await connection.open(fields(f"{SERVER}:{APP_PORT}", (b"traceparent", trace)))
        assert dict(tunnel.headers)[b"baggage"].startswith(b"k8s.")
        tunnel_client = TunnelClient(cluster, tunnel)
        assert await tunnel_client.end.ask(b"x" * 100_000) == b"x" * 100_000
        line = await cluster.line()
        assert (line["direction"], line["bytes_recv"], line["bytes_sent"]) == ("inbound", 100_000, 100_000)
        assert (line["src.identity"], line["dst.identity"]) == (identity("client"), identity("server"))
        assert line["dst.hbone_addr"] == f"{SERVER}:{APP_PORT}"
        assert cluster.closed("destination") == {"-": 1}
        metrics = cluster.node.metrics
        for durations in (metrics.handshakes["server", "ok"], metrics.lengths["destination", "hbone"]):
            assert traces(durations) == [trace.decode()]
        assert len(app.peers) == 1
        assert cluster.wire.dialled == [(APP, None)]

    play(tmp_path, closing(body), loop=loop)


@pytest.mark.parametrize("loop", LOOPS)
def test_sidecar_dials_the_application_from_its_passthrough_source(tmp_path: Path, loop: str) -> None:
    async def body(cluster: Cluster, connection: Connection) -> None:
        cluster.application(SERVER)
        tunnel_client = TunnelClient(cluster, await connection.open(fields()))
        assert await tunnel_client.end.ask(b"tunnel") == b"tunnel"
        assert await cluster.plain(f"{SERVER}:{APP_PORT}").ask(b"plain") == b"plain"
        assert cluster.wire.dialled == [(APP, "127.0.0.6"), (APP, "127.0.0.6")]

    env = {"PROXY_MODE": "dedicated", "PROXY_WORKLOAD_INFO": "default/server/server", "ZTUNNEL_SIDECAR": "true"}
    play(tmp_path, closing(body), env, loop=loop)


def test_dump_shows_live_connections(tmp_path: Path) -> None:
    async def body(cluster: Cluster, connection: Connection) -> None:
        cluster.application(SERVER)
        for _ in range(2):
            tunnel_client = TunnelClient(
                cluster,
                await connection.open(fields(f"{SERVER}:{APP_PORT}", (b"forwarded", b"host=shop.example"))),
            )
            await tunnel_client.end.send(b"hello")
            assert await tunnel_client.end.read(5) == b"hello"
        (entry,) = cluster.pods["server"].dump()["inbound"]
        assert (entry["actualDst"], entry["originalDst"], entry["protocol"]) == (str(APP), "shop.example", "HBONE")
        tunnel_client.end.close()

    play(tmp_path, closing(body))


def test_labels_are_the_control_planes_over_those_of_the_peer(tmp_path: Path) -> None:
    """What the peer says of itself counts only where the mesh knows nothing, or a gateway is in between."""
    baggage = (b"baggage", b"k8s.namespace.name=far,k8s.deployment.name=caller,service.name=said")

    async def body(cluster: Cluster, connection: Connection) -> None:
        cluster.application(SERVER)
        for number, (header, name) in enumerate(
            [
                ((b"x", b"y"), "said"),
                ((b"x-forwarded-network", b"far"), "said"),
                ((b"x", b"y"), "client"),
                ((b"x-forwarded-network", b"far"), "client"),  # its own address, with its own certificate
            ],
            1,
        ):
            if number == 3:
                cluster.mesh.apply([NEAR])
            tunnel_client = TunnelClient(
                cluster, await connection.open(fields(f"{SERVER}:{APP_PORT}", baggage, header))
            )
            await tunnel_client.end.ask()
            assert (await cluster.line(number))["src.workload"] == name

    play(tmp_path, closing(body))


def test_baggage_of_a_peer_cannot_exhaust_metric_series(tmp_path: Path) -> None:
    async def body(cluster: Cluster, connection: Connection) -> None:
        cluster.application(SERVER)
        for number in range(2 * SETS_PER_PEER):
            said = (b"baggage", b"k8s.deployment.name=%d" % number)
            tunnel = await connection.open(fields(f"{SERVER}:{APP_PORT}", said, (b"x-forwarded-network", b"far")))
            await TunnelClient(cluster, tunnel).end.ask()
        await cluster.until(lambda: len(cluster.lines()) == 2 * SETS_PER_PEER)
        assert len(list(cluster.node.metrics.series)) == SETS_PER_PEER + 1
        assert cluster.node.baggage_labels.refused == SETS_PER_PEER

    play(tmp_path, closing(body))


def test_unknown_peer_without_baggage_has_only_its_principal(tmp_path: Path) -> None:
    async def body(cluster: Cluster, connection: Connection) -> None:
        cluster.application(SERVER)
        tunnel = await connection.open(fields(f"{SERVER}:{APP_PORT}", (b"baggage", b"service.name=said")))
        assert b"baggage" not in dict(tunnel.headers)
        await TunnelClient(cluster, tunnel).end.ask()
        line = await cluster.line()
        assert "src.workload" not in line
        assert line["src.identity"] == identity("client")

    play(tmp_path, closing(body), {"ENABLE_RESPONSE_BAGGAGE": "false"})


@pytest.mark.parametrize(
    ("request_fields", "status", "text"),
    [
        (
            ((b":method", b"GET"), (b":scheme", b"https"), (b":path", b"/"), (b":authority", b"x")),
            400,
            "expected method CONNECT, got GET",
        ),
        (fields(f"{OTHER}:80"), 400, f"ip mismatch: {SERVER} != {OTHER}"),
        (fields("nobody"), 400, "no valid authority pseudo header: nobody"),
        (fields("nobody.example:80"), 503, "no service or workload for hostname: nobody.example"),
        (fields(f"{SERVER}:{PLAINTEXT_PORT}"), 503, RECURSIVE_CALL),
    ],
    ids=["method", "other pod", "no port", "unknown name", "ourselves"],
)
def test_requests_that_are_denied_early(
    tmp_path: Path, request_fields: tuple[tuple[bytes, bytes], ...], status: int, text: str
) -> None:
    async def body(cluster: Cluster, connection: Connection) -> None:
        assert await refused(connection, *request_fields) == status
        line = await cluster.line()
        assert (line["level"], line["message"], line["error"]) == ("warn", "connection failed", text)
        assert cluster.opened("destination") == 0
        assert cluster.wire.dialled == []

    play(tmp_path, closing(body))


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (None, "connection failed: Connection refused (os error 111)"),
        (ConnectTimedOut((SERVER, APP_PORT), 10.0), "connection failed: deadline has elapsed"),
        (OSError(errno.EMFILE, os.strerror(errno.EMFILE)), "connection failed: Too many open files (os error 24)"),
        (KernelRefused("bind", errno.EACCES), "connection failed: "),
    ],
    ids=["refused", "timed out", "no files", "kernel"],
)
def test_an_application_that_cannot_be_reached(tmp_path: Path, error: Exception | None, text: str) -> None:
    async def body(cluster: Cluster, connection: Connection) -> None:
        if error is not None:
            cluster.wire.errors[APP] = error
        assert await refused(connection) == 503
        line = await cluster.line()
        assert (line["level"], line["message"]) == ("error", "connection complete")
        assert line["error"].startswith(text)
        assert cluster.closed("destination") == {"CONNECT": 1}

    play(tmp_path, closing(body))


def test_a_policy_that_denies_is_401(tmp_path: Path) -> None:
    async def body(cluster: Cluster, connection: Connection) -> None:
        cluster.mesh.apply([GATED, DENY])
        assert await refused(connection) == 401
        line = await cluster.line()
        assert line["error"] == "connection closed due to policy rejection: explicitly denied by: default/gate"
        assert cluster.closed("destination") == {"DENY": 1}
        assert cluster.wire.dialled == []
        (denial,) = cluster.node.metrics.ledger.denials
        assert denial.times == 1
        assert denial.address == line["src.addr"]
        assert denial.pair == Pair(
            "inbound",
            line["src.addr"].rpartition(":")[0],
            line["src.identity"],
            f"{line['dst.workload']}.default:{line['dst.hbone_addr'].rpartition(':')[2]}",
            line["error"],
        )

    play(tmp_path, closing(body))


def test_request_waits_for_a_late_policy(tmp_path: Path) -> None:
    async def body(cluster: Cluster, connection: Connection) -> None:
        cluster.application(SERVER)
        cluster.mesh.apply([GATED])
        opening = asyncio.ensure_future(connection.open(fields()))  # noqa: TID251  awaited below
        await cluster.until(lambda: cluster.pods["server"].dump()["inbound"])
        cluster.mesh.apply([ALLOW])
        await TunnelClient(cluster, await opening).end.ask()
        assert "error" not in await cluster.line()

    play(tmp_path, closing(body))


def test_request_is_denied_if_a_policy_does_not_arrive(tmp_path: Path) -> None:
    async def body(cluster: Cluster, connection: Connection) -> None:
        cluster.mesh.apply([GATED])
        began_s = cluster.node.clock.monotonic()
        assert await refused(connection) == 401
        assert 5 <= cluster.node.clock.monotonic() - began_s < 6
        assert (await cluster.line())["error"].endswith("policy default/gate has not arrived")

    play(tmp_path, closing(body))


def test_a_pod_that_the_mesh_has_lost_answers_503(tmp_path: Path) -> None:
    async def body(cluster: Cluster, connection: Connection) -> None:
        cluster.mesh.apply((), [POD.uid])
        assert await refused(connection) == 503
        assert (await cluster.line())["error"].startswith("failed to fetch information about local workload")

    play(tmp_path, closing(body))


def test_application_gets_its_proxy_header(tmp_path: Path) -> None:
    async def body(cluster: Cluster) -> None:
        waypoint = replace(POD, application_tunnel=ApplicationTunnel(AppProtocol.PROXY, 9000))
        await cluster.start(waypoint)
        app = cluster.application("127.0.0.1", 9000)
        app.echoes = False
        connection = await cluster.tunnels_to("server")
        tunnel_client = TunnelClient(cluster, await connection.open(fields("10.1.2.3:80")))
        await tunnel_client.end.ask(b"payload")
        await cluster.line()
        assert app.received.startswith(b"\r\n\r\n\x00\r\nQUIT\n\x21\x11")
        assert app.received.endswith(b"payload")
        assert bytes((10, 1, 2, 3)) in app.received
        assert identity("client").encode() in app.received
        connection.close()

    play(tmp_path, body, {"UNSTABLE_ENABLE_LOCALHOST_APP_TUNNEL": "true", "LOCALHOST_APP_TUNNEL": "true"})


def test_source_address_is_preserved_if_the_listener_is_transparent(tmp_path: Path) -> None:
    async def body(cluster: Cluster, connection: Connection) -> None:
        app = cluster.application(SERVER)
        cluster.sockets["server"].preserves_source[HBONE_PORT] = True
        await TunnelClient(cluster, await connection.open(fields())).end.ask()
        assert app.peers == [CLIENT]
        assert cluster.wire.dialled == [(APP, CLIENT)]

    play(tmp_path, closing(body))


# The client gives up


def test_a_client_that_gives_up_before_the_answer(tmp_path: Path) -> None:
    async def body(cluster: Cluster, connection: Connection) -> None:
        cluster.wire.gates[APP] = asyncio.Event()
        opening = asyncio.ensure_future(connection.open(fields()))  # noqa: TID251  cancelled below
        await cluster.until(lambda: cluster.wire.dialled)
        opening.cancel()
        line = await cluster.line()
        assert line["error"] == "h2 failed: the client gave up"
        assert cluster.closed("destination") == {"CONNECT": 1}

    play(tmp_path, closing(body))


def test_a_client_that_is_revoked_as_the_application_answers(tmp_path: Path) -> None:
    """Its connection closes in the very step in which the request would be accepted."""

    async def body(cluster: Cluster) -> None:
        await cluster.start(POD)
        shown = certificate(identity("client"))
        connection = await cluster.tunnels_to("server", shown=shown)

        def answers(sock: socket.socket, peer: tuple[str, int]) -> None:
            sock.close()
            cluster.revoke(RevocationLists.parse(ROOT.revoke(shown.issued.chain[0])))

        cluster.wire.handlers[APP] = answers
        with pytest.raises((TunnelBroken, ConnectionBroken)):
            await connection.open(fields())
        assert (await cluster.line())["error"] == REVOKED
        assert cluster.closed("destination") == {"CERT_REVOKED": 1}

    play(tmp_path, body)


def test_a_reset_of_the_application_is_a_connect_error(tmp_path: Path) -> None:
    async def body(cluster: Cluster, connection: Connection) -> None:
        app = cluster.application(SERVER)
        tunnel_client = TunnelClient(cluster, await connection.open(fields()))
        await tunnel_client.end.send(b"hello")
        assert await tunnel_client.end.read(5) == b"hello"
        app.reset()
        await tunnel_client.end.read_all()
        assert "error" not in await cluster.line()

    play(tmp_path, closing(body))


def test_a_broken_connection_is_the_clients_error(tmp_path: Path) -> None:
    async def body(cluster: Cluster, connection: Connection) -> None:
        cluster.application(SERVER)
        tunnel_client = TunnelClient(cluster, await connection.open(fields()))
        await tunnel_client.end.send(b"hello")
        assert await tunnel_client.end.read(5) == b"hello"
        connection.abort("gone")
        line = await cluster.line()
        assert line["error"].startswith("send: ")
        assert cluster.closed("destination") == {"CONNECT": 1}

    play(tmp_path, closing(body))


# Plain connections


@pytest.mark.parametrize("loop", LOOPS)
def test_a_plain_connection_reaches_the_application_without_identity(tmp_path: Path, loop: str) -> None:
    async def body(cluster: Cluster) -> None:
        await cluster.start(POD)
        cluster.mesh.apply([NEAR])
        app = cluster.application(SERVER)
        cluster.sockets["server"].preserves_source[PLAINTEXT_PORT] = True
        client = cluster.plain(str(APP), source=CLIENT)
        assert await client.ask() == b"ping"
        assert app.peers == [CLIENT]
        line = await cluster.line()
        assert (line["direction"], line["src.workload"]) == ("inbound", "client")
        assert "src.identity" not in line
        assert cluster.closed("destination") == {"-": 1}

    play(tmp_path, body, loop=loop)


@pytest.mark.parametrize(
    ("case", "error", "flags"),
    [
        ("policy", "connection closed due to policy rejection: explicitly denied by: default/gate", {"DENY": 1}),
        ("refused", "connection failed: Connection refused (os error 111)", {"CONNECT": 1}),
        ("ourselves", RECURSIVE_CALL, {}),
        ("unknown", "failed to fetch information about local workload: server.default (server)", {}),
    ],
)
def test_plain_connections_that_are_refused(tmp_path: Path, case: str, error: str, flags: dict[str, int]) -> None:
    async def body(cluster: Cluster) -> None:
        await cluster.start(POD, described=case != "unknown")
        if case == "policy":
            cluster.mesh.apply([GATED, DENY])
        port = PLAINTEXT_PORT if case == "ourselves" else APP_PORT
        assert await cluster.plain(f"{SERVER}:{port}").ask() == b""
        assert (await cluster.line())["error"] == error
        assert cluster.closed("destination") == flags

    play(tmp_path, body)


@pytest.mark.parametrize("case", ["policy", "stop", "stop while dialling"])
def test_plain_connections_that_are_ended(tmp_path: Path, case: str) -> None:
    async def body(cluster: Cluster) -> None:
        await cluster.start(POD)
        cluster.application(SERVER)
        if case == "stop while dialling":
            cluster.wire.gates[APP] = asyncio.Event()
        client = cluster.plain(str(APP))
        if case == "stop while dialling":
            await cluster.until(lambda: cluster.wire.dialled)
        else:
            await client.send(b"hello")
            assert await client.read(5) == b"hello"
        if case == "policy":
            cluster.mesh.apply([GATED, DENY])
        else:
            await cluster.pods["server"].stop()
        await client.read_all()
        assert (await cluster.line())["error"] == (POLICY_CHANGE if case == "policy" else DRAINED)
        assert cluster.closed("destination") == {"DENY" if case == "policy" else "-": 1}

    play(tmp_path, body)


def test_disconnected_plain_client_leaves_no_connection(tmp_path: Path) -> None:
    async def body(cluster: Cluster) -> None:
        await cluster.start(POD)
        client = cluster.sockets["server"].arrives(PLAINTEXT_PORT, None, OTHER)
        assert await client.read_all() == b""
        await cluster.until(lambda: cluster.is_idle)
        assert cluster.lines() == []

    play(tmp_path, body)


def test_a_reset_of_a_plain_client_is_ordinary(tmp_path: Path) -> None:
    async def body(cluster: Cluster) -> None:
        await cluster.start(POD)
        cluster.application(SERVER)
        client = cluster.plain(str(APP))
        await client.send(b"hello")
        assert await client.read(5) == b"hello"
        client.reset()
        assert "error" not in await cluster.line()

    play(tmp_path, body)
