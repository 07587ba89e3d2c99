"""Taps of pods in an Istio mesh: a capture has the bytes of their connections, and has no other effect."""

from __future__ import annotations

import asyncio
import re
import socket
from pathlib import Path

import pytest

from tests.ztunnel.proxy.istio.inbound_case import APP, DENY, GATED, NEAR, TunnelClient, fields
from tests.ztunnel.proxy.istio.inbound_case import POD as SERVER_POD
from tests.ztunnel.proxy.istio.outbound_case import POD, REMOTE, through_gateway
from tests.ztunnel.proxy.istio.path.test_outbound import double
from tests.ztunnel.proxy.istio.pods import (
    APP_PORT,
    CLIENT,
    LOOPS,
    SERVER,
    VIP,
    Cluster,
    endpoint,
    identity,
    play,
    shop,
)
from tests.ztunnel.proxy.tap.reader import Capture, Packet, read
from ztunnel.proxy.istio.accounting.outcome import POLICY_CHANGE
from ztunnel.proxy.tap import pcapng
from ztunnel.proxy.tap.request import TapRequest
from ztunnel.proxy.tap.taps import Taps

HEAD = pcapng.section("test") + pcapng.interface("outbound") + pcapng.interface("inbound")
BLOB = bytes(range(256)) * 1500


class Tap:
    """A tap of one pod, whose packets wait in a socket."""

    def __init__(self, cluster: Cluster, pod: str, **given: str) -> None:
        node = cluster.node
        node.taps = taps = node.taps or Taps(node.clock)
        self._near, far = socket.socketpair()
        for sock in (self._near, far):
            sock.setblocking(False)
        request = TapRequest.parse({"pod": f"default/{pod}", **given})
        self._carrying = cluster.tasks.create_task(taps.carry(request, far))

    @classmethod
    async def begun(cls, cluster: Cluster, pod: str, **given: str) -> Tap:
        made = cls(cluster, pod, **given)
        await asyncio.sleep(0)
        assert cluster.node.taps is not None
        assert cluster.node.taps.of(f"default/{pod}") is not None
        return made

    async def end(self) -> Capture:
        """End it, and read what there was."""
        self._near.shutdown(socket.SHUT_WR)
        loop, data = asyncio.get_running_loop(), b""
        while more := await loop.sock_recv(self._near, 1 << 20):
            data += more
        self._near.close()
        totals = await self._carrying
        found = read(HEAD + data)
        assert (totals.packets, totals.dropped) == (len(found.packets), 0)
        return found


def notes(found: Capture) -> list[str]:
    """Return the comments of each connection's first packet."""
    return [packet.comment for packet in found.packets if packet.flags == "S"]


def ends(found: Capture) -> list[tuple[tuple[str, int], str]]:
    """Return which side ended, and how."""
    return [(packet.source, "RST" if "R" in packet.flags else "FIN") for packet in found.packets if is_end(packet)]


def is_end(packet: Packet) -> bool:
    return bool({"F", "R"} & set(packet.flags))


@pytest.mark.parametrize("loop", LOOPS)
@pytest.mark.parametrize("peer", ["", "shop", "default/server", SERVER, VIP, identity("server")])
def test_a_tunnel_to_another_node(tmp_path: Path, loop: str, peer: str) -> None:
    async def body(cluster: Cluster) -> None:
        cluster.mesh.apply([shop(), endpoint("server", SERVER, node="w2")])
        await cluster.start(POD)
        cluster.peer("server", SERVER)
        tap = await Tap.begun(cluster, "client", peer=peer)
        client = cluster.dial(f"{VIP}:80")
        source = client.sock.getsockname()
        assert await client.ask(BLOB) == BLOB
        await cluster.line()
        found = await tap.end()

        assert found.streams() == {(source, (VIP, 80)): (BLOB, BLOB)}
        assert ends(found) == [(source, "FIN"), ((VIP, 80), "FIN")]
        assert {packet.interface for packet in found.packets} == {0}
        who, service, wire = notes(found)[0].splitlines()
        assert who == f"default/client ({identity('client')}) -> default/server ({identity('server')})"
        assert service == "service default/shop.example"
        assert wire.startswith("HBONE connection 127.0.")
        assert wire.endswith(f" -> {SERVER}:15008, stream 1, authority {SERVER}:{APP_PORT}")

    play(tmp_path, body, loop=loop)


@pytest.mark.parametrize("given", [{"port": "443"}, {"peer": "db"}, {"peer": CLIENT}])
def test_unmatched_connections_are_not_captured(tmp_path: Path, given: dict[str, str]) -> None:
    async def body(cluster: Cluster) -> None:
        cluster.mesh.apply([REMOTE])
        await cluster.start(POD)
        cluster.peer("server", SERVER)
        tap = await Tap.begun(cluster, "client", **given)
        assert await cluster.dial(f"{SERVER}:{APP_PORT}").ask() == b"ping"
        await cluster.line()
        assert (await tap.end()).packets == []

    play(tmp_path, body)


def test_connections_before_and_after_a_tap_are_not_captured(tmp_path: Path) -> None:
    async def body(cluster: Cluster) -> None:
        cluster.mesh.apply([REMOTE])
        await cluster.start(POD)
        cluster.peer("server", SERVER)
        old = cluster.dial(f"{SERVER}:{APP_PORT}")
        await old.send(b"one")
        assert await old.read(3) == b"one"
        tap = await Tap.begun(cluster, "client")
        new = cluster.dial(f"{SERVER}:{APP_PORT}")
        for each in (old, new):
            await each.send(b"two")
            assert await each.read(3) == b"two"
        found = await tap.end()
        assert [sent for sent, _ in found.streams().values()] == [b"two"]
        # The new connection continues without the tap.
        assert await new.ask(BLOB) == BLOB
        assert await old.ask(BLOB) == BLOB

    play(tmp_path, body)


def test_tap_captures_first_bytes_sent_with_the_connect(tmp_path: Path) -> None:
    async def body(cluster: Cluster) -> None:
        cluster.mesh.apply([REMOTE])
        await cluster.start(POD)
        cluster.peer("server", SERVER)
        first = cluster.dial(f"{SERVER}:{APP_PORT}")
        assert await first.ask() == b"ping"  # from now on the peer's announcement is known
        tap = await Tap.begun(cluster, "client")
        assert await cluster.dial(f"{SERVER}:{APP_PORT}").ask(b"early") == b"early"
        found = await tap.end()
        assert list(found.streams().values()) == [(b"early", b"early")]

    play(tmp_path, body)


def test_resets_of_either_side(tmp_path: Path) -> None:
    async def body(cluster: Cluster) -> None:
        await cluster.start(SERVER_POD)
        application = cluster.application(SERVER)
        connection = await cluster.tunnels_to("server")
        tap = await Tap.begun(cluster, "server")
        end = TunnelClient(cluster, await connection.open(fields())).end
        await end.send(b"ping")
        assert await end.read(4) == b"ping"
        application.reset()
        await cluster.line()
        found = await tap.end()
        assert list(found.streams().values()) == [(b"ping", b"ping")]
        assert ends(found) == [((SERVER, APP_PORT), "RST")]
        connection.close()

    play(tmp_path, body)


def test_half_close_is_captured_in_order(tmp_path: Path) -> None:
    async def body(cluster: Cluster) -> None:
        cluster.mesh.apply([REMOTE])
        await cluster.start(POD)
        cluster.peer("server", SERVER)
        tap = await Tap.begun(cluster, "client")
        client = cluster.dial(f"{SERVER}:{APP_PORT}")
        source = client.sock.getsockname()
        await client.send(b"question")
        assert await client.read(8) == b"question"
        client.eof()
        assert await client.read_all() == b""
        found = await tap.end()
        assert ends(found) == [(source, "FIN"), ((SERVER, APP_PORT), "FIN")]

    play(tmp_path, body)


@pytest.mark.parametrize("loop", LOOPS)
def test_tap_captures_a_tunnel_to_the_pod(tmp_path: Path, loop: str) -> None:
    async def body(cluster: Cluster) -> None:
        cluster.mesh.apply([NEAR])
        await cluster.start(SERVER_POD)
        cluster.application(SERVER)
        connection = await cluster.tunnels_to("server")
        tap = await Tap.begun(cluster, "server", peer="default/client", port=str(APP_PORT))
        assert await TunnelClient(cluster, await connection.open(fields())).end.ask(BLOB) == BLOB
        await cluster.line()
        found = await tap.end()
        ((client, server), both), *_ = found.streams().items()
        assert (client[0], server, both) == (CLIENT, tuple(APP), (BLOB, BLOB))
        assert {packet.interface for packet in found.packets} == {1}
        assert all(packet.inbound == (packet.source == client) for packet in found.packets)
        who, wire = notes(found)[0].splitlines()
        assert who == f"default/client ({identity('client')}) -> default/server ({identity('server')})"
        host, port = connection.local_name
        # The stream's client has the address of the connection that carries it: the pod's own is not known here.
        assert client == (host, port)
        assert re.fullmatch(rf"HBONE connection {host}:{port} -> {SERVER}:\d+, stream 1, authority {APP}", wire)
        connection.close()

    play(tmp_path, body, loop=loop)


def test_streams_of_one_tunnel_connection_are_connections_of_their_own(tmp_path: Path) -> None:
    async def body(cluster: Cluster) -> None:
        await cluster.start(SERVER_POD)
        cluster.application(SERVER)
        connection = await cluster.tunnels_to("server")
        host, port = connection.local_name
        tap = await Tap.begun(cluster, "server")
        told = [(b"forwarded", f'for="{address}"'.encode()) for address in (f"{host}:7", "10.9.9.9:8", "nonsense")]
        through = [
            TunnelClient(cluster, await connection.open(fields(f"{SERVER}:{APP_PORT}", each))).end
            for each in (*told, (b"x-other", b""))
        ]
        for number, end in enumerate(through):
            await end.send(b"%d" % number)
            assert await end.read(1) == b"%d" % number
        found = await tap.end()
        assert found.streams() == {
            ((host, client), tuple(APP)): (b"%d" % number, b"%d" % number)
            for number, client in enumerate((7, port, port + 1, port + 2))
        }
        assert f"port {port + 1} replaces {port}" in notes(found)[2]
        connection.close()

    play(tmp_path, body)


def test_plain_connections_to_the_pod(tmp_path: Path) -> None:
    async def body(cluster: Cluster) -> None:
        await cluster.start(SERVER_POD)
        cluster.application(SERVER)
        tap = await Tap.begun(cluster, "server")
        client = cluster.plain(f"{SERVER}:{APP_PORT}")
        source = client.sock.getsockname()
        assert await client.ask(BLOB) == BLOB
        await cluster.line()
        found = await tap.end()
        assert found.streams() == {(source, tuple(APP)): (BLOB, BLOB)}
        assert "plain TCP, no tunnel; from 127.9.9.9:" in notes(found)[0]

    play(tmp_path, body)


@pytest.mark.parametrize("tapped", [("client",), ("server",), ("client", "server")])
def test_tap_captures_a_node_local_tunnel(tmp_path: Path, tapped: tuple[str, ...]) -> None:
    """Such a tunnel has one relay. Either of its two pods can be tapped, or both."""

    async def body(cluster: Cluster) -> None:
        await cluster.start(SERVER_POD, NEAR)
        cluster.application(SERVER)
        taps = [await Tap.begun(cluster, name) for name in tapped]
        client = cluster.dial(f"{SERVER}:{APP_PORT}")
        assert await client.ask(BLOB) == BLOB
        await cluster.line(2)
        for name, tap in zip(tapped, taps, strict=True):
            found = await tap.end()
            assert list(found.streams().values()) == [(BLOB, BLOB)]
            assert {packet.interface for packet in found.packets} == {0 if name == "client" else 1}
            assert "node-local tunnel, nothing sent over the network" in notes(found)[0]

    play(tmp_path, body)


def test_tap_captures_a_double_tunnel(tmp_path: Path) -> None:
    async def body(cluster: Cluster) -> None:
        double(cluster)
        await cluster.start(POD)
        await through_gateway(cluster, far="far-server")
        tap = await Tap.begun(cluster, "client")
        client = cluster.dial(f"{VIP}:80")
        assert await client.ask() == b"ping"
        await cluster.line()
        found = await tap.end()
        assert list(found.streams().values()) == [(b"ping", b"ping")]
        assert identity("far-server") in notes(found)[0]

    play(tmp_path, body)


def test_a_connection_that_a_policy_ends_ends_in_the_capture(tmp_path: Path) -> None:
    async def body(cluster: Cluster) -> None:
        await cluster.start(SERVER_POD)
        cluster.application(SERVER)
        connection = await cluster.tunnels_to("server")
        tap = await Tap.begun(cluster, "server")
        end = TunnelClient(cluster, await connection.open(fields())).end
        await end.send(b"ping")
        assert await end.read(4) == b"ping"
        cluster.mesh.apply([GATED, DENY])
        line = await cluster.line()
        assert POLICY_CHANGE in line["error"]
        found = await tap.end()
        fin = next(packet for packet in found.packets if is_end(packet))
        assert fin.comment == "closed by the proxy; its access log has the reason"
        connection.close()

    play(tmp_path, body)
