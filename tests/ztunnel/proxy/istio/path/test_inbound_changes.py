"""Live connections to a pod when policies, certificates or the pod itself change."""

import asyncio
from pathlib import Path

import pytest

from hbone.aio.connection import Connection
from hbone.errors import ConnectionBroken, ConnectRefused, TunnelBroken
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
from tests.ztunnel.proxy.istio.pods import LOOPS, ROOT, SERVER, Cluster, certificate, identity, play
from xds.model.authorization import Action
from ztunnel.proxy.identity.crl import RevocationLists
from ztunnel.proxy.istio.accounting.outcome import DRAINED, POLICY_CHANGE, REVOKED

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
