"""Taps in Envoy's dialect: of the pod that dials, of the pod that is dialled, and of both at once."""

from __future__ import annotations

import asyncio
import os
import socket
import struct
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from tests.ztunnel.proxy.envoy.harness import (
    CLIENT,
    SERVER,
    Harness,
    Identities,
    Open,
    application,
    ask,
    cluster,
    listener,
    run,
    tunnel,
)
from tests.ztunnel.proxy.tap.reader import Capture
from tests.ztunnel.proxy.tap.tapping import Tapped
from ztunnel.proxy.envoy.admin import commands
from ztunnel.proxy.envoy.admin.server import AdminServer
from ztunnel.runtime.http.page import Page, PageRequest, text

pytestmark = pytest.mark.skipif(os.getuid() != 0, reason="NOT TESTED: taps are for root, and this is not")
BLOB = bytes(range(256)) * 3000
HERE = "127.0.0.1"


def tapped(folder: Path, body: Callable[[Harness, Path], Awaitable[None]], *resources: tuple[str, object]) -> None:
    path = folder / "tap.sock"

    async def with_socket(harness: Harness) -> None:
        await body(harness, path)

    run(folder, with_socket, *resources, tap_socket=str(path))  # type: ignore[arg-type]
    assert not path.exists()


async def begun(path: Path, **given: str) -> Tapped:
    made = await Tapped.ask(path, pod=HERE, **given)
    assert made.status == 200
    return made


async def ended(made: Tapped) -> Capture:
    made.stop()
    found = await made.rest()
    assert made.trailers["ztunnel-dropped"] == "0"
    return found


def comments(found: Capture) -> dict[str, list[str]]:
    """Return the comments of the first packets of each interface's connections, line by line."""
    return {
        found.interfaces[packet.interface].name: packet.comment.splitlines()
        for packet in found.packets
        if packet.flags == "S"
    }


def test_tap_captures_both_ends_of_a_tunnel(tmp_path: Path) -> None:
    async def body(harness: Harness, path: Path) -> None:
        async with application(b"hi ") as port:
            await tunnel(harness, port, Identities())
            tap = await begun(path)
            assert await ask(harness.port("l"), BLOB) == b"hi " + BLOB
            found = await ended(tap)

            # The application is dialled before the tunnel is accepted.
            (into, same), (out, both) = found.streams().items()
            assert both == same == (BLOB, b"hi " + BLOB)
            assert (out[1], into[1]) == ((HERE, harness.port("l")), (HERE, port))
            said = comments(found)
            who, route, wire = said["127.0.0.1 outbound"]
            assert who == f"{HERE}:{out[0][1]} -> {HERE}:{harness.port('l')} ({SERVER})"
            assert route == "listener l, cluster tunnel"
            assert wire.startswith(
                f"HBONE connection {HERE}:{into[0][1]} -> {HERE}:{harness.port('inbound')}, stream "
            )
            assert wire.endswith(", authority app:80")
            who, route, wire = said["127.0.0.1 inbound"]
            assert who == f"{HERE}:{into[0][1]} ({CLIENT}) -> {HERE}:{port} ({SERVER})"
            assert route == "listener inbound, filter chain one, cluster app"
            assert wire.endswith(", authority app:80")

    tapped(tmp_path, body)


@pytest.mark.parametrize(("peer", "names"), [(CLIENT, {"inbound"}), (SERVER, {"outbound"}), ("db", set())])
def test_tap_selects_connections_by_peer_identity(tmp_path: Path, peer: str, names: set[str]) -> None:
    async def body(harness: Harness, path: Path) -> None:
        async with application() as port:
            await tunnel(harness, port, Identities())
            tap = await begun(path, peer=peer)
            assert await ask(harness.port("l")) == b"ping"
            assert {name.split()[1] for name in comments(await ended(tap))} == names

    tapped(tmp_path, body)


def test_tap_captures_first_bytes_and_half_closes(tmp_path: Path) -> None:
    """A tunnel's connection that announces early data would get them with the CONNECT."""

    async def body(harness: Harness, path: Path) -> None:
        async with application() as port:
            await tunnel(harness, port, Identities())
            assert await ask(harness.port("l")) == b"ping"
            tap = await begun(path, port=str(harness.port("l")))
            assert await ask(harness.port("l"), b"first") == b"first"
            found = await ended(tap)
            assert list(found.streams().values()) == [(b"first", b"first")]
            fins = [packet.source == (HERE, harness.port("l")) for packet in found.packets if "F" in packet.flags]
            assert fins == [False, True], "the client's end, then the application's"

    tapped(tmp_path, body)


def test_a_plain_connection_between_two_tapped_ends(tmp_path: Path) -> None:
    async def body(harness: Harness, path: Path) -> None:
        async with application() as port:
            await harness.published(listener(), cluster(port))
            await harness.until(lambda: harness.proxy.listeners.active)
            tap = await begun(path)
            assert await ask(harness.port("l"), BLOB) == BLOB
            found = await ended(tap)
            assert list(found.streams().values()) == [(BLOB, BLOB)] * 2
            assert {lines[-1] for lines in comments(found).values()} == {
                f"plain TCP, no tunnel; to {HERE}:{port}",
                "plain TCP, no tunnel",
            }

    tapped(tmp_path, body)


def test_tap_captures_a_reset_of_the_application(tmp_path: Path) -> None:
    async def body(harness: Harness, path: Path) -> None:
        async def resets(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await reader.readexactly(4)
            linger = struct.pack("ii", 1, 0)
            writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
            writer.transport.abort()

        server = await asyncio.start_server(resets, HERE, 0)
        async with server:
            port = server.sockets[0].getsockname()[1]
            await tunnel(harness, port, Identities())
            tap = await begun(path)
            connection = await Open.to(harness.port("l"))
            assert await connection.say(b"ping") == b""
            await connection.close()
            await harness.until(lambda: len(harness.proxy.connections) <= 1)  # the one that brings tunnels
            found = await ended(tap)
            resets_of = [packet.source[1] for packet in found.packets if "R" in packet.flags]
            assert port in resets_of
            assert harness.port("l") in resets_of

    tapped(tmp_path, body)


def test_connections_older_than_a_tap_are_only_counted(tmp_path: Path) -> None:
    async def body(harness: Harness, path: Path) -> None:
        async with application() as port:
            await harness.published(listener(), cluster(port))
            await harness.until(lambda: harness.proxy.listeners.active)
            connection = await Open.to(harness.port("l"))
            assert await connection.say(b"before") == b"before"
            tap = await begun(path)
            assert tap.headers["ztunnel-open-connections"] == "1"
            assert await connection.say(b"during") == b"during"
            assert (await ended(tap)).packets == []
            assert await connection.say(b"after") == b"after"
            await connection.close()

    tapped(tmp_path, body)


def test_tap_of_a_pod_needs_its_address(tmp_path: Path) -> None:
    async def body(harness: Harness, path: Path) -> None:
        made = await Tapped.ask(path, pod="default/web")
        assert (made.status, await made.text()) == (
            404,
            "default/web: in Envoy's dialect a pod is named by its address",
        )

    tapped(tmp_path, body, listener(), cluster(1))


def test_proxy_without_the_setting_has_no_taps(tmp_path: Path) -> None:
    async def body(harness: Harness) -> None:
        assert harness.proxy.taps is None
        assert list(tmp_path.glob("*.sock")) == []

    run(tmp_path, body, listener(), cluster(1))


@pytest.mark.parametrize("permitted", [True, False])
def test_the_admin_server_gives_no_capture(tmp_path: Path, permitted: bool) -> None:
    path = str(tmp_path / "tap.sock") if permitted else ""

    async def body(harness: Harness) -> None:
        asked, admin = PageRequest(method="GET", path="/tap"), AdminServer(harness.proxy)
        page = commands.answer(harness.proxy, admin.drain, lambda _: text("no live page"), asked)
        assert isinstance(page, Page)
        assert page.status == 403
        assert "".join(str(piece) for piece in page.body) == (
            f"taps are for root, at the local socket {path}: ztunnel tap\n"
            if permitted
            else "taps are not permitted: ZTUNNEL_TAP_SOCKET names no socket\n"
        )

    run(tmp_path, body, listener(), cluster(1), tap_socket=path)
