"""Clients that never finish a handshake, and pods that take all descriptors: others are served."""

import asyncio
import contextlib
import socket
from pathlib import Path
from typing import Any

import pytest

from hbone.settings import Role
from hbone.tls import TlsSession, sealed_bytes
from hbone.tls_context import TlsContext, TlsSettings
from tests.ztunnel.proxy.envoy.harness import (
    WAIT_S,
    Harness,
    Identities,
    Open,
    access_log,
    application,
    ask,
    chain,
    cluster,
    listener,
    run,
    tcp,
    tls,
    tunnel,
)
from ztunnel.proxy.dataplane.handshake_limiter import STALLED, HalfOpenLimits
from ztunnel.proxy.envoy.admin import readiness
from ztunnel.proxy.envoy.listeners.connections import PodQuota
from ztunnel.runtime.descriptors import Descriptors
from ztunnel.runtime.http.page import Page, PageRequest

SERVER = "spiffe://td/ns/a/sa/server"
PART_OF_HELLO = b"\x16\x03\x01"


def silent(port: int, source: str) -> socket.socket:
    """A client that connects, and says no more than it must."""
    sock = socket.create_connection(("127.0.0.1", port), source_address=(source, 0))
    sock.sendall(PART_OF_HELLO)
    return sock


def test_silent_clients_are_limited_by_source(tmp_path: Path) -> None:
    async def body(harness: Harness) -> None:
        async with application() as port:
            harness.proxy.half_open.limits = HalfOpenLimits(per_source=4, per_pod=6)
            await tunnel(harness, port, Identities())
            to = harness.port("inbound")
            with contextlib.ExitStack() as stack:
                crowd = [stack.enter_context(silent(to, "127.0.9.9")) for _ in range(9)]
                await harness.until(lambda: harness.count("server.half_open_turned_away") == 5)
                assert len(harness.proxy.half_open) == 4
                # The oldest have gone.
                for sock in crowd[:5]:
                    sock.settimeout(WAIT_S)
                    with contextlib.suppress(ConnectionResetError):
                        assert sock.recv(1) == b""
                assert await ask(harness.port("l")) == b"ping", "another source has its tunnel"
                for number in range(4):
                    stack.enter_context(silent(to, f"127.0.9.{number + 1}"))
                await harness.until(lambda: harness.count("server.half_open_turned_away") == 7)
                assert len(harness.proxy.half_open) == 6
            await harness.until(lambda: len(harness.proxy.half_open) == 0)

    run(tmp_path, body)


def over_tls(folder: Path) -> Any:
    """A listener whose clients speak TLS to a TCP application."""
    return listener(
        chain(tcp(), transport_socket=tls(SERVER, server=True)), name="secured", access_log=access_log(folder)
    )


def test_the_reason_is_in_the_log(tmp_path: Path) -> None:
    async def body(harness: Harness) -> None:
        identities = Identities()
        harness.proxy.half_open.limits = HalfOpenLimits(per_source=1)
        await harness.published(over_tls(tmp_path), cluster(1), identities.secret(SERVER), identities.root())
        await harness.until(lambda: harness.proxy.listeners.active)
        with silent(harness.port("secured"), "127.0.0.1"), silent(harness.port("secured"), "127.0.0.1"):
            await harness.log(1)
        await harness.log(2)
        assert harness.count("listener.127.0.0.1_0.ssl.connection_error") == 2

    run(tmp_path, body)


def test_a_connection_that_ends_while_it_waits_leaves_nothing(tmp_path: Path) -> None:
    """A removed listener's drain finds it, too."""

    async def body(harness: Harness) -> None:
        identities = Identities()
        secrets = identities.secret(SERVER), identities.root()
        await harness.published(over_tls(tmp_path), cluster(1), *secrets)
        await harness.until(lambda: harness.proxy.listeners.active)
        with silent(harness.port("secured"), "127.0.0.1") as sock:
            await harness.until(lambda: len(harness.proxy.half_open) == 1)
            for connection in harness.proxy.connections:
                connection.end("because")
            await harness.until(lambda: len(harness.proxy.half_open) == 0)
            sock.settimeout(WAIT_S)
            with contextlib.suppress(ConnectionResetError):
                assert sock.recv(1) == b""
        (line,) = await harness.log()
        assert line["details"] == "because"

    run(tmp_path, body)


def test_stalled_handshake_is_closed_if_others_wait(tmp_path: Path) -> None:
    """A client sends its ClientHello and nothing else."""

    async def body(harness: Harness) -> None:
        async with application() as port:
            harness.proxy.half_open.limits = HalfOpenLimits(handshakes_per_pod=1, patience_s=0.05)
            identities = Identities()
            await harness.published(
                over_tls(tmp_path), cluster(port), identities.secret(SERVER), identities.root()
            )
            await harness.until(lambda: harness.proxy.listeners.active)
            hello = first_flight()
            stuck = socket.create_connection(("127.0.0.1", harness.port("secured")))
            stuck.sendall(hello)
            await harness.until(lambda: harness.proxy.half_open.handshakes == 1)
            second = socket.create_connection(("127.0.0.1", harness.port("secured")))
            second.sendall(hello)
            (line,) = await harness.log()
            assert line["details"] == STALLED.replace(" ", "_")
            await harness.until(lambda: harness.proxy.half_open.handshakes == 1)
            stuck.close()
            second.close()
            await harness.until(lambda: harness.proxy.half_open.handshakes == 0)

    run(tmp_path, body)


def first_flight() -> bytes:
    """The ClientHello of a client of ours."""
    session = TlsSession(TlsContext(Role.CLIENT, TlsSettings()))
    session.handshake()
    room = memoryview(bytearray(sealed_bytes(4096)))
    return bytes(room[: session.seal(b"", room)])


# Descriptors


def test_pod_at_its_connection_quota_is_not_admitted() -> None:
    in_use = 110
    descriptors = Descriptors(200, in_use=lambda: in_use)
    gate, quota = descriptors.share("the proxy", lambda: 0), PodQuota(descriptors)
    for _ in range(100):
        quota.enter("10.0.0.1")
    quota.enter("10.0.0.2")
    descriptors.note(150)
    assert gate.admits()
    assert quota.admits("10.0.0.1"), "there are enough"
    in_use = 200 - descriptors.reserve
    assert gate.admits()
    assert not quota.admits("10.0.0.1")
    assert quota.admits("10.0.0.2")
    assert quota.admits("10.0.0.3")
    in_use = 200 - descriptors.reserve // 2
    assert not gate.admits(), "the rest is for dials and pages"
    assert descriptors.short
    in_use = 110
    assert gate.admits()
    for _ in range(100):
        quota.leave("10.0.0.1")
    in_use = 200 - descriptors.reserve
    assert gate.admits()
    assert quota.admits("10.0.0.1")


def ready(harness: Harness) -> tuple[int, str]:
    page = readiness.page(harness.proxy, PageRequest(method="GET", path="/healthz/ready"))
    assert isinstance(page, Page)
    return page.status, "".join(map(str, page.body))


def test_pod_over_its_connection_quota_is_rejected_and_others_are_served(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def body(harness: Harness) -> None:
        async with application() as port:
            await harness.published(listener(), cluster(port))
            await harness.until(lambda: harness.proxy.listeners.active)
            to, descriptors = harness.port("l"), harness.proxy.descriptors
            greedy = [await Open.to(to) for _ in range(8)]
            for each in greedy:
                assert await each.say(b"one") == b"one"
            descriptors.limit, descriptors.reserve = 40, 32  # an equal share of two pods is four
            seen = 8
            monkeypatch.setattr(descriptors, "_in_use", lambda: seen)
            descriptors.note(39)
            turned_away = socket.create_connection(("127.0.0.1", to))
            turned_away.settimeout(WAIT_S)
            await harness.until(lambda: harness.count("listener.127.0.0.1_0.downstream_cx_overload_reject") == 1)
            assert turned_away.recv(1) == b""
            turned_away.close()
            with socket.create_connection(("127.0.0.1", to), source_address=("127.0.9.9", 0)) as other:
                other.settimeout(WAIT_S)
                other.sendall(b"ping")
                assert await asyncio.to_thread(other.recv, 4) == b"ping"
            assert await greedy[0].say(b"two") == b"two", "what was open goes on"
            assert ready(harness) == (200, "ready\n")
            seen = 39
            late = socket.create_connection(("127.0.0.1", to), source_address=("127.0.9.9", 0))
            await harness.until(lambda: descriptors.short)
            assert ready(harness) == (500, "not ready, pending: descriptors\n")
            seen = 1
            late.settimeout(WAIT_S)
            late.sendall(b"late")
            assert await asyncio.to_thread(late.recv, 4) == b"late", "it waited in the accept queue"
            late.close()
            for each in greedy:
                await each.close()

    run(tmp_path, body)
