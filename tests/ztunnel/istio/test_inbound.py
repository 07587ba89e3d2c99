"""Connections that come to pods: tunnels, joined ones, plain ones; every refusal, error and change of policy."""

import asyncio
import errno
import os
import socket
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from hbone.aio.connection import Connection
from hbone.aio.relay import ByteCounts, relay
from hbone.aio.socket import PlainSocket
from hbone.aio.tunnel import Tunnel
from hbone.errors import ConnectionBroken, ConnectRefused, HboneError, TunnelBroken
from tests.hbone.certificates import Authority
from tests.ztunnel.istio.pods import (
    APP_PORT,
    CLIENT,
    ELSEWHERE,
    LOOPS,
    OTHER,
    ROOT,
    SERVER,
    VIP,
    Cluster,
    End,
    Revoked,
    certificate,
    endpoint,
    identity,
    play,
    shop,
    workload,
)
from tproxy.errors import ConnectTimedOut, KernelRefused
from xds.model.address import SocketAddress
from xds.model.authorization import Action, AuthorizationPolicy, PolicyScope
from xds.model.policy import Always, Condition, Never
from xds.model.workload import ApplicationTunnel, AppProtocol, PolicyKey, WorkloadUid
from ztunnel.identity.crl import RevocationLists
from ztunnel.istio.baggage_labels import SETS_PER_PEER
from ztunnel.istio.certificates.manager import WorkloadCertificate
from ztunnel.istio.config import HBONE_PORT, PLAINTEXT_PORT
from ztunnel.istio.outcome import DRAINED, POLICY_CHANGE, RECURSIVE_CALL, REVOKED

POD, NEAR = workload("server", SERVER), workload("client", CLIENT)
APP = SocketAddress(SERVER, APP_PORT)
GATED = replace(POD, authorization_policies=(PolicyKey("default/gate"),))


_ALWAYS = Always()


def policy(
    name: str = "gate", action: Action = Action.DENY, condition: Condition = _ALWAYS
) -> AuthorizationPolicy:
    scope = PolicyScope.WORKLOAD_SELECTOR if name == "gate" else PolicyScope.GLOBAL
    return AuthorizationPolicy(name=name, namespace="default", scope=scope, action=action, condition=condition)


DENY, ALLOW, NEVER = policy(), policy(action=Action.ALLOW), policy(condition=Never())


def fields(
    authority: str = f"{SERVER}:{APP_PORT}", *more: tuple[bytes, bytes], method: bytes = b"CONNECT"
) -> tuple[tuple[bytes, bytes], ...]:
    return ((b":method", method), (b":authority", authority.encode()), *more)


class Through:
    """An application at the client's end of a tunnel."""

    def __init__(self, cluster: Cluster, tunnel: Tunnel) -> None:
        near, far = socket.socketpair()
        for sock in (near, far):
            sock.setblocking(False)
        self.end = End(near)
        cluster.wire.ends.append(self.end)
        self.tunnel = tunnel
        self._far = far
        cluster.tasks.create_task(self._carry(cluster))

    async def _carry(self, cluster: Cluster) -> None:
        end = PlainSocket(self._far, cluster.node.poller)
        try:
            await relay(end, self.tunnel, ByteCounts())
        finally:
            end.close()
            self.tunnel.close()


async def refused(connection: Connection, *request: tuple[bytes, bytes]) -> int:
    """The status of a request that is refused."""
    with pytest.raises(ConnectRefused) as error:
        await connection.open(request or fields())
    return error.value.status


def closing(body: Callable[[Cluster, Connection], Awaitable[None]]) -> Callable[[Cluster], Awaitable[None]]:
    """A server pod, and a tunnel connection to it that is closed at the end."""

    async def with_connection(cluster: Cluster) -> None:
        await cluster.start(POD)
        connection = await cluster.tunnels_to("server")
        try:
            await body(cluster, connection)
        finally:
            connection.close()

    return with_connection


# Tunnels


@pytest.mark.parametrize("loop", LOOPS)
def test_a_tunnel_reaches_the_application(tmp_path: Path, loop: str) -> None:
    async def body(cluster: Cluster, connection: Connection) -> None:
        app = cluster.application(SERVER)
        tunnel = await connection.open(fields())
        assert dict(tunnel.headers)[b"baggage"].startswith(b"k8s.")
        through = Through(cluster, tunnel)
        assert await through.end.ask(b"x" * 100_000) == b"x" * 100_000
        line = await cluster.line()
        assert (line["direction"], line["bytes_recv"], line["bytes_sent"]) == ("inbound", 100_000, 100_000)
        assert (line["src.identity"], line["dst.identity"]) == (identity("client"), identity("server"))
        assert line["dst.hbone_addr"] == f"{SERVER}:{APP_PORT}"
        assert cluster.closed("destination") == {"-": 1}
        assert len(app.peers) == 1
        assert cluster.wire.dialled == [(APP, None)]

    play(tmp_path, closing(body), loop=loop)


def test_the_dump_shows_what_runs(tmp_path: Path) -> None:
    async def body(cluster: Cluster, connection: Connection) -> None:
        cluster.application(SERVER)
        for _ in range(2):
            through = Through(
                cluster,
                await connection.open(fields(f"{SERVER}:{APP_PORT}", (b"forwarded", b"host=shop.example"))),
            )
            await through.end.send(b"hello")
            assert await through.end.read(5) == b"hello"
        (entry,) = cluster.pods["server"].dump()["inbound"]
        assert (entry["actualDst"], entry["originalDst"], entry["protocol"]) == (str(APP), "shop.example", "HBONE")
        through.end.close()

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
            through = Through(cluster, await connection.open(fields(f"{SERVER}:{APP_PORT}", baggage, header)))
            await through.end.ask()
            assert (await cluster.line(number))["src.workload"] == name

    play(tmp_path, closing(body))


def test_a_peer_cannot_fill_the_page_of_metrics(tmp_path: Path) -> None:
    async def body(cluster: Cluster, connection: Connection) -> None:
        cluster.application(SERVER)
        for number in range(2 * SETS_PER_PEER):
            said = (b"baggage", b"k8s.deployment.name=%d" % number)
            tunnel = await connection.open(fields(f"{SERVER}:{APP_PORT}", said, (b"x-forwarded-network", b"far")))
            await Through(cluster, tunnel).end.ask()
        await cluster.until(lambda: len(cluster.lines()) == 2 * SETS_PER_PEER)
        assert len(list(cluster.node.metrics.series)) == SETS_PER_PEER + 1
        assert cluster.node.baggage_labels.refused == SETS_PER_PEER

    play(tmp_path, closing(body))


def test_without_baggage_a_peer_is_its_principal(tmp_path: Path) -> None:
    async def body(cluster: Cluster, connection: Connection) -> None:
        cluster.application(SERVER)
        tunnel = await connection.open(fields(f"{SERVER}:{APP_PORT}", (b"baggage", b"service.name=said")))
        assert b"baggage" not in dict(tunnel.headers)
        await Through(cluster, tunnel).end.ask()
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
        (OSError(errno.EMFILE, os.strerror(errno.EMFILE)), "connection failed: [Errno 24] Too many open files"),
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

    play(tmp_path, closing(body))


def test_a_policy_that_is_late_is_waited_for(tmp_path: Path) -> None:
    async def body(cluster: Cluster, connection: Connection) -> None:
        cluster.application(SERVER)
        cluster.mesh.apply([GATED])
        opening = asyncio.ensure_future(connection.open(fields()))  # noqa: TID251  awaited below
        await cluster.until(lambda: cluster.pods["server"].dump()["inbound"])
        cluster.mesh.apply([ALLOW])
        await Through(cluster, await opening).end.ask()
        assert "error" not in await cluster.line()

    play(tmp_path, closing(body))


def test_a_policy_that_does_not_come_allows_nothing(tmp_path: Path) -> None:
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


def test_the_application_gets_the_header_that_it_wants(tmp_path: Path) -> None:
    async def body(cluster: Cluster) -> None:
        waypoint = replace(POD, application_tunnel=ApplicationTunnel(AppProtocol.PROXY, 9000))
        await cluster.start(waypoint)
        app = cluster.application("127.0.0.1", 9000)
        app.echoes = False
        connection = await cluster.tunnels_to("server")
        through = Through(cluster, await connection.open(fields("10.1.2.3:80")))
        await through.end.ask(b"payload")
        await cluster.line()
        assert app.received.startswith(b"\r\n\r\n\x00\r\nQUIT\n\x21\x11")
        assert app.received.endswith(b"payload")
        assert bytes((10, 1, 2, 3)) in app.received
        assert identity("client").encode() in app.received
        connection.close()

    play(tmp_path, body, {"UNSTABLE_ENABLE_LOCALHOST_APP_TUNNEL": "true", "LOCALHOST_APP_TUNNEL": "true"})


def test_the_clients_address_is_kept_where_the_listener_can(tmp_path: Path) -> None:
    async def body(cluster: Cluster, connection: Connection) -> None:
        app = cluster.application(SERVER)
        cluster.sockets["server"].preserves_source[HBONE_PORT] = True
        await Through(cluster, await connection.open(fields())).end.ask()
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
            cluster.pods["server"].end_revoked(RevocationLists.parse(ROOT.revoke(shown.issued.chain[0])))

        cluster.wire.handlers[APP] = answers
        with pytest.raises((TunnelBroken, ConnectionBroken)):
            await connection.open(fields())
        assert (await cluster.line())["error"] == REVOKED
        assert cluster.closed("destination") == {"CERT_REVOKED": 1}

    play(tmp_path, body)


def test_a_reset_of_the_application_is_a_connect_error(tmp_path: Path) -> None:
    async def body(cluster: Cluster, connection: Connection) -> None:
        app = cluster.application(SERVER)
        through = Through(cluster, await connection.open(fields()))
        await through.end.send(b"hello")
        assert await through.end.read(5) == b"hello"
        app.reset()
        await through.end.read_all()
        assert "error" not in await cluster.line()

    play(tmp_path, closing(body))


def test_a_broken_connection_is_the_clients_error(tmp_path: Path) -> None:
    async def body(cluster: Cluster, connection: Connection) -> None:
        cluster.application(SERVER)
        through = Through(cluster, await connection.open(fields()))
        await through.end.send(b"hello")
        assert await through.end.read(5) == b"hello"
        connection.abort("gone")
        line = await cluster.line()
        assert line["error"].startswith("send: ")
        assert cluster.closed("destination") == {"CONNECT": 1}

    play(tmp_path, closing(body))


# Handshakes


async def shown_to_the_server(cluster: Cluster, shown: WorkloadCertificate) -> None:
    """Show a certificate; in TLS 1.3 the client hears what the server thinks of it only after its handshake."""
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


def test_a_client_that_says_nothing(tmp_path: Path) -> None:
    async def body(cluster: Cluster) -> None:
        await cluster.start(POD)
        client = cluster.sockets["server"].arrives(HBONE_PORT, None, CLIENT)
        assert await client.read_all() == b""
        assert (await cluster.line())["error"].startswith("tls handshake error: ")

    play(tmp_path, body)


def test_a_client_that_hangs_up_in_the_handshake_is_a_line(tmp_path: Path) -> None:
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


def test_silent_connections_are_bounded_and_leave_others_room(tmp_path: Path) -> None:
    async def body(cluster: Cluster) -> None:
        cluster.application(SERVER)
        await cluster.start(POD)
        most = cluster.node.half_open.limits.per_source
        for _ in range(most + 100):
            cluster.sockets["server"].arrives(HBONE_PORT, None, "127.0.9.9")
        assert len(cluster.node.half_open) == most
        assert cluster.node.half_open.turned_away == 100
        connection = await cluster.tunnels_to("server")
        tunnel = await connection.open(fields())
        tunnel.close()
        connection.close()

    play(tmp_path, body)


def test_a_pod_that_stops_ends_what_has_not_begun_its_handshake(tmp_path: Path) -> None:
    async def body(cluster: Cluster) -> None:
        await cluster.start(POD)
        client = cluster.sockets["server"].arrives(HBONE_PORT, None, CLIENT)
        await cluster.pods["server"].stop()
        assert await client.read_all() == b""
        assert cluster.lines() == []
        assert len(cluster.node.half_open) == 0

    play(tmp_path, body)


def test_a_peer_that_goes_too_far_is_counted_and_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async def body(cluster: Cluster, connection: Connection) -> None:
        for _ in range(connection.settings.http2.limits.control_burst + 100):
            connection.engine.ping(bytes(8))
        connection.flush()
        await cluster.until(lambda: cluster.node.metrics.calmed)
        found = [record.getMessage() for record in caplog.records if "ended by a limit" in record.getMessage()]
        assert len(found) == 1
        assert f"src.identity={identity('client')} " in found[0]

    play(tmp_path, closing(body))


def test_strangers_cause_a_bounded_number_of_lines(tmp_path: Path) -> None:
    async def body(cluster: Cluster) -> None:
        await cluster.start(POD)
        for _ in range(200):
            client = cluster.sockets["server"].arrives(HBONE_PORT, None, CLIENT)
            await client.send(b"no TLS at all")
            await client.read_all()
        await cluster.until(lambda: cluster.is_idle and len(cluster.lines()) >= 50)
        assert len(cluster.lines()) < 150

    play(tmp_path, body)


def test_a_client_that_is_gone_before_it_is_looked_at(tmp_path: Path) -> None:
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


def test_without_a_certificate_there_is_no_handshake(tmp_path: Path) -> None:
    async def body(cluster: Cluster) -> None:
        cluster.certificates.errors[identity("server")] = "the CA says no"
        await cluster.start(POD)
        client = cluster.sockets["server"].arrives(HBONE_PORT, None, CLIENT)
        await client.send(b"hello")  # a certificate is for those that speak
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


# Change


@pytest.mark.parametrize("loop", LOOPS)
@pytest.mark.parametrize("reason", ["policy", "stop"])
def test_a_verdict_while_the_application_is_dialled(tmp_path: Path, reason: str, loop: str) -> None:
    """A policy says 401, which must not be tried elsewhere; any other end does not."""

    async def body(cluster: Cluster, connection: Connection) -> None:
        cluster.wire.gates[APP] = asyncio.Event()
        opening = asyncio.ensure_future(connection.open(fields()))  # noqa: TID251  awaited below
        await cluster.until(lambda: cluster.wire.dialled)
        if reason == "policy":
            cluster.mesh.apply([GATED, DENY])
            with pytest.raises(ConnectRefused) as refusal:
                await opening
            assert refusal.value.status == 401
        else:
            await cluster.pods["server"].stop()
            with pytest.raises((TunnelBroken, ConnectionBroken)):
                await opening
        line = await cluster.line()
        assert line["error"] == {"policy": POLICY_CHANGE, "stop": DRAINED}[reason]
        assert cluster.closed("destination") == {{"policy": "DENY", "stop": "-"}[reason]: 1}

    play(tmp_path, closing(body), loop=loop)


def test_live_connections_are_judged_again(tmp_path: Path) -> None:
    async def body(cluster: Cluster, connection: Connection) -> None:
        cluster.application(SERVER)
        through = Through(cluster, await connection.open(fields()))
        await through.end.send(b"hello")
        assert await through.end.read(5) == b"hello"
        cluster.mesh.apply([GATED, NEVER])
        await through.end.send(b"still")
        assert await through.end.read(5) == b"still"
        cluster.mesh.apply([DENY])
        assert await through.end.read_all() == b""
        assert (await cluster.line())["error"] == POLICY_CHANGE
        assert cluster.closed("destination") == {"DENY": 1}

    play(tmp_path, closing(body))


@pytest.mark.parametrize("comes", [True, False], ids=["in time", "never"])
def test_what_runs_has_its_grace_while_a_policy_is_late(tmp_path: Path, comes: bool) -> None:
    async def body(cluster: Cluster, connection: Connection) -> None:
        cluster.application(SERVER)
        through = Through(cluster, await connection.open(fields()))
        await through.end.send(b"hello")
        assert await through.end.read(5) == b"hello"
        cluster.mesh.apply([GATED])
        await asyncio.sleep(4)
        await through.end.send(b"still")
        assert await through.end.read(5) == b"still"
        if comes:
            cluster.mesh.apply([ALLOW])
            await asyncio.sleep(4)
            assert await through.end.ask(b"after") == b"after"
            assert "error" not in await cluster.line()
        else:
            await asyncio.sleep(2)
            assert await through.end.read_all() == b""
            assert (await cluster.line())["error"] == POLICY_CHANGE

    play(tmp_path, closing(body))


def test_a_revoked_client_loses_its_tunnels(tmp_path: Path) -> None:
    async def body(cluster: Cluster) -> None:
        await cluster.start(POD)
        cluster.application(SERVER)
        shown = certificate(identity("client"))
        connection = await cluster.tunnels_to("server", shown=shown)
        through = Through(cluster, await connection.open(fields()))
        await through.end.send(b"hello")
        assert await through.end.read(5) == b"hello"
        cluster.pods["server"].end_revoked(
            RevocationLists.parse(ROOT.revoke(certificate(identity("client")).issued.chain[0]))
        )
        await through.end.send(b"still")
        assert await through.end.read(5) == b"still"
        cluster.pods["server"].end_revoked(RevocationLists.parse(ROOT.revoke(shown.issued.chain[0])))
        await through.end.read_all()
        assert (await cluster.line())["error"] == REVOKED
        assert cluster.closed("destination") == {"CERT_REVOKED": 1}
        assert cluster.node.metrics.crl_rejections["destination"] == 1
        connection.close()

    play(tmp_path, body)


# Drain


def test_a_drain_says_goodaway_and_waits(tmp_path: Path) -> None:
    async def body(cluster: Cluster, connection: Connection) -> None:
        cluster.application(SERVER)
        through = Through(cluster, await connection.open(fields()))
        await through.end.send(b"hello")
        assert await through.end.read(5) == b"hello"
        draining = asyncio.ensure_future(cluster.pods["server"].drain(20.0))  # noqa: TID251  awaited below
        await cluster.until(lambda: connection.engine.going_away)
        await asyncio.sleep(5)
        assert not draining.done()
        assert await through.end.ask(b"last") == b"last"
        await draining
        assert "error" not in await cluster.line()

    play(tmp_path, closing(body))


def test_a_drain_ends_what_is_left_at_its_deadline(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async def body(cluster: Cluster, connection: Connection) -> None:
        cluster.application(SERVER)
        through = Through(cluster, await connection.open(fields()))
        await through.end.send(b"hello")
        assert await through.end.read(5) == b"hello"
        began_s = cluster.node.clock.monotonic()
        await cluster.pods["server"].drain(20.0)
        assert 20 <= cluster.node.clock.monotonic() - began_s < 21
        await through.end.read_all()
        assert (await cluster.line())["error"] == DRAINED
        assert "drain duration expired with pending connections" in caplog.text

    play(tmp_path, closing(body))


def test_idle_tunnel_connections_do_not_hold_up_a_drain(tmp_path: Path) -> None:
    async def body(cluster: Cluster, connection: Connection) -> None:
        began_s = cluster.node.clock.monotonic()
        await cluster.pods["server"].drain(20.0)
        assert cluster.node.clock.monotonic() - began_s < 2

    play(tmp_path, closing(body))


def test_a_handshake_under_way_becomes_a_tunnel_that_hears_goaway(tmp_path: Path) -> None:
    async def body(cluster: Cluster) -> None:
        await cluster.start(POD)
        cluster.application(SERVER)
        draining: list[asyncio.Future[None]] = []
        fetch = cluster.certificates.fetch

        async def slowly(wanted: object) -> object:
            if not draining and str(wanted) == identity("server"):
                draining.append(asyncio.ensure_future(cluster.pods["server"].drain(20.0)))  # noqa: TID251
                await asyncio.sleep(0.5)
            return await fetch(wanted)  # type: ignore[arg-type]

        cluster.certificates.fetch = slowly  # type: ignore[assignment,method-assign]  # a slow authority
        connection = await cluster.tunnels_to("server")
        await cluster.until(lambda: connection.engine.going_away or connection.error is not None)
        assert connection.engine.going_away
        await draining[0]
        connection.close()

    play(tmp_path, body)


# Joined tunnels


async def both(cluster: Cluster) -> None:
    await cluster.start(POD, NEAR)
    cluster.application(SERVER)


@pytest.mark.parametrize("loop", LOOPS)
def test_a_tunnel_within_the_node_is_joined(tmp_path: Path, loop: str) -> None:
    async def body(cluster: Cluster) -> None:
        await both(cluster)
        cluster.mesh.apply([shop(), replace(POD, services=endpoint("x").services)])
        client = cluster.dial(f"{VIP}:80")
        await client.send(b"hello")
        assert await client.read(5) == b"hello"
        assert cluster.pods["client"].dump()["outbound"]
        assert cluster.pods["server"].dump()["inbound"]
        assert await client.ask(b"x" * 50_000) == b"x" * 50_000
        assert cluster.wire.dialled == [(APP, None)], "no tunnel connection"
        await cluster.line(2)
        inner, outer = sorted(cluster.lines(), key=lambda line: line["direction"])
        assert (inner["direction"], outer["direction"]) == ("inbound", "outbound")
        for line in (inner, outer):
            assert (line["src.identity"], line["dst.identity"]) == (identity("client"), identity("server"))
            assert line["dst.service"] == "shop.example"
            assert line["dst.hbone_addr"] == f"{SERVER}:{APP_PORT}"
        assert (inner["bytes_recv"], outer["bytes_sent"]) == (50_005, 50_005)
        assert cluster.closed("source") == cluster.closed("destination") == {"-": 1}

    play(tmp_path, body, loop=loop)


def test_the_switch_sends_it_over_the_wire(tmp_path: Path) -> None:
    async def body(cluster: Cluster) -> None:
        await both(cluster)
        assert await cluster.dial(f"{SERVER}:{APP_PORT}").ask() == b"ping"
        assert cluster.wire.addresses == [f"{SERVER}:15008", str(APP)]
        await cluster.line(2)

    play(tmp_path, body, {"ZTUNNEL_NODE_LOCAL_SHORTCUT": "false"})


BAD_CERTIFICATES: dict[str, tuple[str, dict[str, Any]]] = {
    "expired client": ("client", {"from_day": -2, "to_day": -1}),
    "expired server": ("server", {"from_day": -2, "to_day": -1}),
    "client of the future": ("client", {"from_day": 1, "to_day": 2}),
    "client of another root": ("client", {"authority": Authority("other"), "roots": (Authority("other"),)}),
    "server that trusts other roots": ("server", {"roots": (Authority("other"),)}),
    "server of another root": ("server", {"authority": Authority("other")}),
}


@pytest.mark.parametrize("case", BAD_CERTIFICATES)
def test_a_handshake_that_would_fail_is_not_joined(tmp_path: Path, case: str) -> None:
    """It goes over the wire, where it fails with the right alert."""
    name, how = BAD_CERTIFICATES[case]

    async def body(cluster: Cluster) -> None:
        cluster.certificates.put(identity(name), **how)
        await both(cluster)
        assert await cluster.dial(f"{SERVER}:{APP_PORT}").ask() == b""
        assert cluster.wire.addresses == [f"{SERVER}:15008"], "the application was never dialled"
        await cluster.until(lambda: cluster.closed())
        assert cluster.opened("destination") == 0

    play(tmp_path, body)


def test_a_certificate_ends_joins_with_its_last_second(tmp_path: Path) -> None:
    async def body(cluster: Cluster) -> None:
        made = cluster.certificates.put(identity("client"), to_day=60 / 86400)
        await both(cluster)
        left_s = made.issued.not_after.timestamp() - cluster.node.clock.wall()
        await asyncio.sleep(left_s - 1.5)
        assert await cluster.dial(f"{SERVER}:{APP_PORT}").ask() == b"ping"
        assert cluster.wire.addresses == [str(APP)]
        await asyncio.sleep(3)
        await cluster.dial(f"{SERVER}:{APP_PORT}").ask()
        assert cluster.wire.addresses[1] == f"{SERVER}:15008"
        await cluster.until(lambda: len(cluster.lines()) >= 3)

    play(tmp_path, body)


def test_a_revoked_pod_is_not_joined(tmp_path: Path) -> None:
    async def body(cluster: Cluster) -> None:
        own = certificate(identity("client"))
        cluster.certificates.lists = RevocationLists.parse(ROOT.revoke(own.issued.chain[0]))
        made = type(own)(own.issued, 7, own._policy, cluster.certificates.lists)
        cluster.certificates.held[own.issued.identity] = made
        await both(cluster)
        assert await cluster.dial(f"{SERVER}:{APP_PORT}").ask() == b""
        assert cluster.wire.addresses == [f"{SERVER}:15008"]

    play(tmp_path, body, revocations=Revoked())


@pytest.mark.parametrize("which", ["client", "server"])
def test_a_joined_pod_that_is_revoked_ends(tmp_path: Path, which: str) -> None:
    async def body(cluster: Cluster) -> None:
        await both(cluster)
        client = cluster.dial(f"{SERVER}:{APP_PORT}")
        await client.send(b"hello")
        assert await client.read(5) == b"hello"
        found = next(each for key, each in cluster.certificates.held.items() if str(key) == identity(which))
        lists = RevocationLists.parse(ROOT.revoke(found.issued.chain[0]))
        for pod in cluster.pods.values():
            pod.end_revoked(lists)
        await client.read_all()
        await cluster.line(2)
        assert REVOKED in [line.get("error") for line in cluster.lines()]
        reporter = {"client": "destination", "server": "source"}[which]
        assert cluster.node.metrics.crl_rejections[reporter] == 1
        assert cluster.closed(reporter) == {"CERT_REVOKED": 1}

    play(tmp_path, body)


@pytest.mark.parametrize(
    ("what", "error", "flags"),
    [
        ("policy", "http status: 401 Unauthorized", {"DENY": 1}),
        ("refused", "http status: 503 Service Unavailable", {"CONNECT": 1}),
        ("ourselves", "http status: 503 Service Unavailable", {}),
    ],
)
def test_a_joined_tunnel_is_refused_as_on_the_wire(
    tmp_path: Path, what: str, error: str, flags: dict[str, int]
) -> None:
    async def body(cluster: Cluster) -> None:
        await cluster.start(POD, NEAR)
        port = PLAINTEXT_PORT if what == "ourselves" else APP_PORT
        cluster.mesh.apply(
            [shop(ports={80: port}), replace(POD, services=endpoint("x", ports={80: port}).services)]
        )
        if what == "policy":
            cluster.mesh.apply([replace(GATED, services=endpoint("x").services), DENY])
        assert await cluster.dial(f"{VIP}:80").ask() == b""
        await cluster.line(2)
        outer = next(line for line in cluster.lines() if line["direction"] == "outbound")
        assert outer["error"] == error
        assert cluster.closed("destination") == flags
        assert cluster.closed("source") == {"CONNECT": 1}

    play(tmp_path, body)


def test_a_policy_that_changes_while_a_joined_application_is_dialled_is_401(tmp_path: Path) -> None:
    """The task belongs to the outbound half: it must go on with the answer, not die, and not try elsewhere."""

    async def body(cluster: Cluster) -> None:
        await both(cluster)
        cluster.wire.gates[APP] = asyncio.Event()
        client = cluster.dial(f"{SERVER}:{APP_PORT}")
        await cluster.until(lambda: cluster.wire.dialled)
        cluster.mesh.apply([GATED, DENY])
        assert await client.ask() == b""
        await cluster.line(2)
        errors = {line["direction"]: line["error"] for line in cluster.lines()}
        assert errors == {"inbound": POLICY_CHANGE, "outbound": "http status: 401 Unauthorized"}
        assert cluster.wire.dialled == [(APP, None)]
        assert (cluster.closed("destination"), cluster.closed("source")) == ({"DENY": 1}, {"CONNECT": 1})

    play(tmp_path, body)


def test_a_pod_that_stops_while_it_dials_for_a_join_ends_it(tmp_path: Path) -> None:
    async def body(cluster: Cluster) -> None:
        await both(cluster)
        cluster.wire.gates[APP] = asyncio.Event()
        client = cluster.dial(f"{SERVER}:{APP_PORT}")
        await cluster.until(lambda: cluster.wire.dialled)
        await cluster.pods["server"].stop()
        assert await client.ask() == b""
        await cluster.line(2)
        assert {line["error"] for line in cluster.lines()} == {DRAINED}

    play(tmp_path, body)


@pytest.mark.parametrize("half", ["client", "server", "policy"])
def test_either_half_of_a_joined_tunnel_ends_both(tmp_path: Path, half: str) -> None:
    async def body(cluster: Cluster) -> None:
        await both(cluster)
        client = cluster.dial(f"{SERVER}:{APP_PORT}")
        await client.send(b"hello")
        assert await client.read(5) == b"hello"
        if half == "policy":
            cluster.mesh.apply([GATED, DENY])
        else:
            await cluster.pods[half].stop()
        await client.read_all()
        await cluster.line(2)
        errors = {line["direction"]: line.get("error") for line in cluster.lines()}
        if half == "client":
            assert errors["outbound"] == DRAINED
        else:
            # Over the wire the client's side sees CANCEL, an ordinary end.
            assert errors == {"inbound": POLICY_CHANGE if half == "policy" else DRAINED, "outbound": None}

    play(tmp_path, body)


def test_a_pod_that_has_stopped_is_not_joined(tmp_path: Path) -> None:
    """It stops between the look-up and the certificate: what is registered then would never be ended."""

    async def body(cluster: Cluster) -> None:
        await both(cluster)
        fetch = cluster.certificates.fetch

        async def stopping(wanted: object) -> object:
            found = await fetch(wanted)  # type: ignore[arg-type]
            if str(wanted) == identity("server"):
                await cluster.pods["server"].stop()
            return found

        cluster.certificates.fetch = stopping  # type: ignore[assignment,method-assign]  # the moment that matters
        cluster.wire.handlers.pop(SocketAddress(SERVER, HBONE_PORT))
        assert await cluster.dial(f"{SERVER}:{APP_PORT}").ask() == b""
        assert cluster.wire.addresses == [f"{SERVER}:15008"]
        assert (await cluster.line())["error"] == "io error: Connection refused (os error 111)"

    play(tmp_path, body)


def test_a_join_refused_by_one_endpoint_is_tried_at_another(tmp_path: Path) -> None:
    async def body(cluster: Cluster) -> None:
        here = replace(POD, services=endpoint("x").services)
        await cluster.start(here, NEAR)
        cluster.mesh.apply([shop(), endpoint("good", OTHER, node=ELSEWHERE)])
        cluster.peer("good", OTHER)
        for _ in range(4):
            assert await cluster.dial(f"{VIP}:80").ask() == b"ping"
        await cluster.until(lambda: cluster.closed() == {"-": 4})
        assert cluster.node.metrics.connect_retries <= 1

    play(tmp_path, body)


def test_a_stopped_pod_is_unregistered_and_a_successor_is_not(tmp_path: Path) -> None:
    async def body(cluster: Cluster) -> None:
        await both(cluster)
        first = cluster.pods["server"]
        await cluster.start(POD)
        await first.stop()
        assert len(cluster.node.pods) == 2
        assert await cluster.dial(f"{SERVER}:{APP_PORT}").ask() == b"ping"
        await cluster.line(2)

    play(tmp_path, body)


def test_a_pod_without_an_address_of_that_family_is_not_joined(tmp_path: Path) -> None:
    """The application would see an address of another pod, or of none."""

    async def body(cluster: Cluster) -> None:
        await both(cluster)
        await cluster.start(replace(NEAR, uid=WorkloadUid("six"), name="six", addresses=(OTHER,)))
        cluster.mesh.apply([replace(NEAR, uid=WorkloadUid("six"), name="six", addresses=("fd00::6",))])
        assert await cluster.dial(f"{SERVER}:{APP_PORT}", pod="six").ask() == b"ping"
        assert cluster.wire.addresses == [f"{SERVER}:15008", str(APP)]
        await cluster.line(2)

    play(tmp_path, body)


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


def test_a_plain_client_that_is_gone_leaves_nothing(tmp_path: Path) -> None:
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
