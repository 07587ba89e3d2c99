"""Live connections to a pod when policies, certificates or the pod itself change."""

import asyncio
import socket
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from hbone import frames
from hbone.aio.connection import Connection, connect
from hbone.aio.connection_settings import default_client
from hbone.errors import ConnectionBroken, ConnectRefused, TunnelBroken
from hbone.settings import client_settings
from tests.limits import WAIT_S
from tests.ztunnel.proxy.istio.inbound_case import (
    ALLOW,
    APP,
    DENY,
    GATED,
    NEVER,
    POD,
    TunnelClient,
    closing,
    fields,
    policy,
)
from tests.ztunnel.proxy.istio.pods import CLIENT, LOOPS, ROOT, SERVER, Cluster, End, certificate, identity, play
from xds.model.authorization import Action
from ztunnel.proxy.identity.crl import RevocationLists
from ztunnel.proxy.istio.accounting.outcome import DRAINED, POLICY_CHANGE, REVOKED
from ztunnel.proxy.istio.path import connections
from ztunnel.proxy.istio.settings.config import HBONE_PORT

# Change


@pytest.mark.parametrize("loop", LOOPS)
@pytest.mark.parametrize("reason", ["policy", "stop"])
def test_a_verdict_while_the_application_is_dialled(tmp_path: Path, reason: str, loop: str) -> None:
    """A policy is answered with 401, after which the client tries no other endpoint. Other ends get another
    status.
    """

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
        tunnel_client = TunnelClient(cluster, await connection.open(fields()))
        await tunnel_client.end.send(b"hello")
        assert await tunnel_client.end.read(5) == b"hello"
        cluster.mesh.apply([GATED, NEVER])
        await tunnel_client.end.send(b"still")
        assert await tunnel_client.end.read(5) == b"still"
        cluster.mesh.apply([DENY])
        assert await tunnel_client.end.read_all() == b""
        assert (await cluster.line())["error"] == POLICY_CHANGE
        assert cluster.closed("destination") == {"DENY": 1}

    play(tmp_path, closing(body))


@pytest.mark.parametrize("comes", [True, False], ids=["in time", "never"])
def test_live_connection_has_a_grace_period_while_a_policy_is_missing(tmp_path: Path, comes: bool) -> None:
    async def body(cluster: Cluster, connection: Connection) -> None:
        cluster.application(SERVER)
        tunnel_client = TunnelClient(cluster, await connection.open(fields()))
        await tunnel_client.end.send(b"hello")
        assert await tunnel_client.end.read(5) == b"hello"
        cluster.mesh.apply([GATED])
        await asyncio.sleep(4)
        await tunnel_client.end.send(b"still")
        assert await tunnel_client.end.read(5) == b"still"
        if comes:
            cluster.mesh.apply([ALLOW])
            await asyncio.sleep(4)
            assert await tunnel_client.end.ask(b"after") == b"after"
            assert "error" not in await cluster.line()
        else:
            await asyncio.sleep(2)
            assert await tunnel_client.end.read_all() == b""
            assert (await cluster.line())["error"] == POLICY_CHANGE

    play(tmp_path, closing(body))


def test_a_revoked_client_loses_its_tunnels(tmp_path: Path) -> None:
    async def body(cluster: Cluster) -> None:
        await cluster.start(POD)
        cluster.application(SERVER)
        shown = certificate(identity("client"))
        connection = await cluster.tunnels_to("server", shown=shown)
        tunnel_client = TunnelClient(cluster, await connection.open(fields()))
        await tunnel_client.end.send(b"hello")
        assert await tunnel_client.end.read(5) == b"hello"
        cluster.revoke(RevocationLists.parse(ROOT.revoke(certificate(identity("client")).issued.chain[0])))
        await tunnel_client.end.send(b"still")
        assert await tunnel_client.end.read(5) == b"still"
        cluster.revoke(RevocationLists.parse(ROOT.revoke(shown.issued.chain[0])))
        await tunnel_client.end.read_all()
        assert (await cluster.line())["error"] == REVOKED
        assert cluster.closed("destination") == {"CERT_REVOKED": 1}
        assert cluster.node.metrics.crl_rejections["destination"] == 1
        connection.close()

    play(tmp_path, body)


def test_revoked_client_without_a_tunnel_is_logged(tmp_path: Path) -> None:
    """Its connection ends although no tunnel's line would say so."""

    async def body(cluster: Cluster) -> None:
        await cluster.start(POD)
        shown = certificate(identity("client"))
        connection = await cluster.tunnels_to("server", shown=shown)
        await cluster.until(lambda: len(cluster.pods["server"].connections.carriers) == 1)
        await asyncio.sleep(0.05)  # the end of the handshake, on its side
        cluster.revoke(RevocationLists.parse(ROOT.revoke(shown.issued.chain[0])))
        await cluster.until(lambda: connection.error is not None)
        assert (await cluster.line())["error"] == REVOKED
        assert cluster.node.metrics.crl_rejections["destination"] == 1

    play(tmp_path, body)


# Drain


def test_drain_sends_goaway_and_waits_for_tunnels(tmp_path: Path) -> None:
    async def body(cluster: Cluster, connection: Connection) -> None:
        cluster.application(SERVER)
        tunnel_client = TunnelClient(cluster, await connection.open(fields()))
        await tunnel_client.end.send(b"hello")
        assert await tunnel_client.end.read(5) == b"hello"
        draining = asyncio.ensure_future(cluster.pods["server"].drain(20.0))  # noqa: TID251  awaited below
        await cluster.until(lambda: connection.engine.going_away)
        await asyncio.sleep(5)
        assert not draining.done()
        assert await tunnel_client.end.ask(b"last") == b"last"
        await draining
        assert "error" not in await cluster.line()

    play(tmp_path, closing(body))


def test_drain_waits_for_the_last_bytes_of_ended_tunnels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The client has ended its direction, and the end of the response waits for a slow network."""
    monkeypatch.setattr(connections, "_GOODBYE_S", 0.01)  # afterwards only tunnels are waited for
    monkeypatch.setattr(connections, "_STALLED_S", WAIT_S)

    async def body(cluster: Cluster) -> None:
        await cluster.start(POD)
        applications: list[socket.socket] = []
        cluster.wire.handlers[APP] = lambda sock, _: applications.append(sock)
        dial = cluster.wire.connect

        async def with_room(*target: Any) -> socket.socket:
            sock = await dial(*target)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 256 * 1024)
            return sock

        cluster.wire.connect = with_room  # type: ignore[method-assign]
        context = certificate(identity("client")).client_context((identity("server"),))
        large = replace(client_settings(), initial_window_bytes=1 << 20, stream_window_bytes=1 << 20)
        near = cluster.sockets["server"].arrives(HBONE_PORT, None, CLIENT).sock
        connection = await connect(near, context, replace(default_client(), http2=large), cluster.node.poller)
        tunnel_client = TunnelClient(cluster, await connection.open(fields()))
        tunnel_client.end.eof()
        application = End(applications[0])
        cluster.wire.ends.append(application)
        assert await application.read_all() == b""
        draining = asyncio.ensure_future(cluster.pods["server"].drain(WAIT_S))  # noqa: TID251  awaited below
        (carrier,) = cluster.pods["server"].connections.carriers
        assert carrier.connection is not None
        await cluster.until(lambda: connection.engine.going_away)
        link = carrier.connection.link
        connection.suspend()
        link.sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 16 * 1024)
        near.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 16 * 1024)
        application.sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 256 * 1024)
        sent = application.sock.send(bytes(200_000))  # read together with the EOF
        application.eof()
        await cluster.line()
        await cluster.until(lambda: link.blocked or draining.done())
        for _ in range(10):
            await asyncio.sleep(0)
        assert not draining.done()
        connection.wake_up()
        assert len(await tunnel_client.end.read_all()) == sent
        await draining

    play(tmp_path, body, loop="uvloop")


def test_drain_does_not_wait_for_the_last_bytes_of_a_peer_that_takes_none(tmp_path: Path) -> None:
    async def body(cluster: Cluster, connection: Connection) -> None:
        cluster.application(SERVER)
        tunnel_client = TunnelClient(cluster, await connection.open(fields()))
        assert await tunnel_client.end.ask() == b"ping"
        (carrier,) = cluster.pods["server"].connections.carriers
        assert carrier.connection is not None
        connection.suspend()
        connection.link.sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1)
        for _ in range(1000):
            carrier.connection.engine.output.append(frames.frame(frames.PING, 0, 0, bytes(8)) * 1000)
            carrier.connection.flush()
        assert carrier.connection.link.blocked
        began_s = cluster.node.clock.monotonic()
        await cluster.pods["server"].drain(60.0)
        assert cluster.node.clock.monotonic() - began_s < 10
        connection.wake_up()

    play(tmp_path, closing(body))


def test_drain_ends_remaining_tunnels_at_its_deadline(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async def body(cluster: Cluster, connection: Connection) -> None:
        cluster.application(SERVER)
        tunnel_client = TunnelClient(cluster, await connection.open(fields()))
        await tunnel_client.end.send(b"hello")
        assert await tunnel_client.end.read(5) == b"hello"
        began_s = cluster.node.clock.monotonic()
        await cluster.pods["server"].drain(20.0)
        assert 20 <= cluster.node.clock.monotonic() - began_s < 21
        await tunnel_client.end.read_all()
        assert (await cluster.line())["error"] == DRAINED
        assert "drain duration expired with pending connections" in caplog.text

    play(tmp_path, closing(body))


def test_idle_tunnel_connections_do_not_delay_a_drain(tmp_path: Path) -> None:
    async def body(cluster: Cluster, connection: Connection) -> None:
        began_s = cluster.node.clock.monotonic()
        await cluster.pods["server"].drain(20.0)
        assert cluster.node.clock.monotonic() - began_s < 2

    play(tmp_path, closing(body))


def test_running_handshake_completes_and_gets_goaway_in_a_drain(tmp_path: Path) -> None:
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


# Policies that are late


def test_grace_period_of_a_missing_policy_is_not_prolonged(tmp_path: Path) -> None:
    async def body(cluster: Cluster, connection: Connection) -> None:
        cluster.application(SERVER)
        tunnel_client = TunnelClient(cluster, await connection.open(fields()))
        await tunnel_client.end.send(b"hello")
        assert await tunnel_client.end.read(5) == b"hello"
        began_s = cluster.node.clock.monotonic()
        cluster.mesh.apply([GATED])
        for number in range(2):
            await asyncio.sleep(4)
            cluster.mesh.apply([policy(f"other{number}", Action.ALLOW)])
        await tunnel_client.end.read_all()
        assert (await cluster.line())["error"] == POLICY_CHANGE
        assert cluster.node.clock.monotonic() - began_s < 9

    play(tmp_path, closing(body))


def test_a_deny_that_has_arrived_does_not_wait_for_a_missing_policy(tmp_path: Path) -> None:
    async def body(cluster: Cluster, connection: Connection) -> None:
        cluster.application(SERVER)
        tunnel_client = TunnelClient(cluster, await connection.open(fields()))
        await tunnel_client.end.send(b"hello")
        assert await tunnel_client.end.read(5) == b"hello"
        cluster.mesh.apply([GATED])
        began_s = cluster.node.clock.monotonic()
        cluster.mesh.apply([policy("everybody", Action.DENY)])
        await tunnel_client.end.read_all()
        assert (await cluster.line())["error"] == POLICY_CHANGE
        assert cluster.node.clock.monotonic() - began_s < 1

    play(tmp_path, closing(body))
