"""Connections to a warm peer: carried by steps, and left to a coroutine when something goes wrong."""

from __future__ import annotations

import asyncio
import contextlib
import re
import socket
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from hbone.aio.connection import Connection
from hbone.aio.requests import Request
from hbone.errors import ErrorCode, HboneError, TunnelBroken
from tests.ztunnel.proxy.istio.inbound_case import APP, fields
from tests.ztunnel.proxy.istio.outbound_case import POD, REMOTE, waypoint
from tests.ztunnel.proxy.istio.pods import (
    APP_PORT,
    CLIENT,
    ELSEWHERE,
    LOOPS,
    OTHER,
    SERVER,
    VIP,
    Answering,
    Cluster,
    End,
    Peer,
    certificate,
    endpoint,
    identity,
    pair,
    play,
    refusing,
    shop,
    workload,
)
from xds.model.address import SocketAddress
from xds.model.workload import GatewayAddress, NetworkAddress
from ztunnel.proxy.dataplane.attempts import ANSWER_TIMEOUT_S
from ztunnel.proxy.dataplane.life_table import State
from ztunnel.proxy.istio.accounting.outcome import DRAINED
from ztunnel.proxy.istio.path.inbound import Inbound
from ztunnel.proxy.istio.path.outbound import Outbound
from ztunnel.proxy.istio.path.planned import PlannedConnection
from ztunnel.proxy.istio.path.planned_request import PlannedRequest
from ztunnel.proxy.istio.path.plans import Plan
from ztunnel.proxy.istio.path.pod_sockets import PodSockets
from ztunnel.proxy.istio.settings.config import OUTBOUND_PORT

DESTINATION = f"{SERVER}:{APP_PORT}"


@pytest.fixture
def taken(monkeypatch: pytest.MonkeyPatch) -> dict[type, int]:
    return steps_taken(monkeypatch)


def steps_taken(monkeypatch: pytest.MonkeyPatch) -> dict[type, int]:
    """How many connections each kind of steps has begun. Only classes that are never compiled are replaced."""
    counts: dict[type, int] = {PlannedConnection: 0, PlannedRequest: 0}
    serve_soon = Outbound.serve_soon

    def accepted(self: Outbound, sock: socket.SocketType, peer: tuple[str, int]) -> None:
        counts[PlannedConnection] += 1
        super(Outbound, self).accepted(sock, peer)

    def by_coroutine(self: Outbound, *given: Any) -> None:
        counts[PlannedConnection] -= 1
        serve_soon(self, *given)

    def take(self: Inbound, peer: Any, request: Request) -> PlannedRequest | None:
        taken = super(Inbound, self).take(peer, request)
        counts[PlannedRequest] += taken is not None
        return taken

    monkeypatch.setattr(Outbound, "accepted", accepted, raising=False)
    monkeypatch.setattr(Outbound, "serve_soon", by_coroutine)
    monkeypatch.setattr(Inbound, "take", take, raising=False)
    return counts


async def warm(cluster: Cluster, destination: str = DESTINATION) -> None:
    """Have one connection, so that the next finds its tunnel connection open."""
    assert await cluster.dial(destination).ask() == b"ping"
    await cluster.until(cluster.lines)
    await cluster.until(lambda: not len(cluster.node.live) or cluster.is_idle)


async def remote(cluster: Cluster) -> Peer:
    """A pod, and a warm peer on another node."""
    await cluster.start(POD)
    cluster.mesh.apply([REMOTE])
    peer = cluster.peer("server", SERVER)
    await warm(cluster)
    return peer


class Late:
    """A peer that answers when it is told to."""

    def __init__(self, peer: Peer, then: Answering | None = None) -> None:
        self._gate = asyncio.Event()
        self._then = then or peer.echo
        peer.answer = self._answer

    async def _answer(self, request: Request) -> None:
        await self._gate.wait()
        await self._then(request)

    def go(self) -> None:
        self._gate.set()


async def held(cluster: Cluster, peer: Peer, then: Answering | None = None) -> tuple[End, Late]:
    """A connection that waits for its answer."""
    late, before = Late(peer, then), len(peer.requests)
    client = cluster.dial(DESTINATION)
    await cluster.until(lambda: len(peer.requests) > before)
    assert [life.state for life in cluster.pods["client"].connections.outbound] == [State.DIALING]
    return client, late


# What both ways of carrying a connection show


@pytest.mark.parametrize("loop", LOOPS)
@pytest.mark.parametrize("log_format", ["json", "plain"])
def test_steps_and_coroutine_show_the_same(
    tmp_path: Path, loop: str, log_format: str, taken: dict[type, int]
) -> None:
    async def body(cluster: Cluster) -> None:
        await cluster.start(POD)
        cluster.mesh.apply([REMOTE])
        peer = cluster.peer("server", SERVER)
        for _ in range(2):
            assert await cluster.dial(DESTINATION).ask() == b"ping"
        assert taken[PlannedConnection] == 1
        await cluster.until(lambda: len(_complete(cluster)) == 2)
        first, second = _complete(cluster)
        assert _constant(first) == _constant(second)
        one, other = peer.headers(0), peer.headers(1)
        assert list(one) == list(other)
        assert [name for name in one if one[name] != other[name]] == ["forwarded", "traceparent"]
        assert cluster.closed() == {"-": 2}
        assert cluster.opened() == 2
        assert len({series.labels for series in cluster.node.metrics.series}) == 1

    play(tmp_path, body, {"LOG_FORMAT": log_format}, loop=loop)


def _complete(cluster: Cluster) -> list[str]:
    return [text for text in cluster.texts() if "connection complete" in text]


def _constant(line: str) -> str:
    """A line without what differs for each connection: times, and the source's port."""
    return re.sub(r"\d+-\d+-\d+T[\d:.]+Z|(?<=127\.0\.1\.1:)\d+|\d+ms", "*", line)


@pytest.mark.parametrize("loop", LOOPS)
def test_requests_by_steps_and_by_coroutine_show_the_same(
    tmp_path: Path, loop: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    by_steps = [True, False]
    taken: list[bool] = []

    def take(self: Inbound, peer: Any, request: Request) -> PlannedRequest | None:
        planned = super(Inbound, self).take(peer, request) if by_steps.pop(0) else None
        taken.append(planned is not None)
        return planned

    async def body(cluster: Cluster) -> None:
        await cluster.start(workload("server", SERVER))
        cluster.mesh.apply([workload("client", CLIENT, node=ELSEWHERE)])
        cluster.application(SERVER)
        connection = await cluster.tunnels_to("server")
        for count in (1, 2):
            tunnel = await connection.open(fields())
            assert dict(tunnel.headers)
            tunnel.close()
            await cluster.until(lambda count=count: len(cluster.lines()) == count)
        assert taken == [True, False]
        first, second = _complete(cluster)
        assert _constant(first) == _constant(second)
        connection.close()
        assert len(list(cluster.node.metrics.series)) == 1

    monkeypatch.setattr(Inbound, "take", take, raising=False)
    play(tmp_path, body, loop=loop)


# Which connections have a plan


def test_a_service_draws_its_endpoint_for_each_connection(tmp_path: Path, taken: dict[type, int]) -> None:
    async def body(cluster: Cluster) -> None:
        second = endpoint("second", OTHER, node=ELSEWHERE)
        cluster.mesh.apply([shop(), endpoint("server", SERVER, node=ELSEWHERE), second])
        await cluster.start(POD)
        peers = [cluster.peer("server", SERVER), cluster.peer("second", OTHER)]
        for _ in range(40):
            assert await cluster.dial(f"{VIP}:80").ask() == b"ping"
        assert [len(peer.connections) for peer in peers] == [1, 1]
        counts = [len(peer.requests) for peer in peers]
        assert sum(counts) == 40
        assert min(counts) > 8
        assert taken[PlannedConnection] == 38
        assert peers[0].headers()["forwarded"].endswith("host=shop.example")

    play(tmp_path, body)


def test_a_waypoint_has_a_plan(tmp_path: Path, taken: dict[type, int]) -> None:
    async def body(cluster: Cluster) -> None:
        gateway = GatewayAddress(NetworkAddress("", "127.0.1.8"), 15008)
        cluster.mesh.apply([waypoint(), workload("server", SERVER, node=ELSEWHERE, waypoint=gateway)])
        await cluster.start(POD)
        peer = cluster.peer("waypoint", "127.0.1.8")
        for _ in range(3):
            assert await cluster.dial(DESTINATION).ask() == b"ping"
        assert taken[PlannedConnection] == 2
        assert peer.headers()[":authority"] == DESTINATION

    play(tmp_path, body)


@pytest.mark.parametrize("why", ["debug", "another node's certificate is gone"])
def test_connection_without_a_plan_uses_the_coroutine(tmp_path: Path, why: str, taken: dict[type, int]) -> None:
    async def body(cluster: Cluster) -> None:
        await remote(cluster)
        if why == "debug":
            cluster.node.logs.change("access=debug")
        else:
            cluster.certificates.held.clear()
        await cluster.dial(DESTINATION).ask()
        assert taken[PlannedConnection] == 0

    play(tmp_path, body)


def test_plans_follow_the_mesh(tmp_path: Path, taken: dict[type, int]) -> None:
    async def body(cluster: Cluster) -> None:
        peer = await remote(cluster)
        assert await cluster.dial(DESTINATION).ask() == b"ping"
        assert "service.name" not in peer.headers()["baggage"]
        cluster.mesh.apply([workload("client", CLIENT, canonical_name="named")])
        assert await cluster.dial(DESTINATION).ask() == b"ping"
        assert "service.name=named" in peer.headers()["baggage"]
        cluster.mesh.apply((), [REMOTE.uid])  # now it is outside the mesh, and gets plain TCP
        application = cluster.application(SERVER)
        assert await cluster.dial(DESTINATION).ask() == b"ping"
        assert application.received == b"ping"
        assert taken[PlannedConnection] == 2

    play(tmp_path, body)


def test_a_renewed_certificate_opens_a_new_tunnel_connection(tmp_path: Path, taken: dict[type, int]) -> None:
    async def body(cluster: Cluster) -> None:
        peer = await remote(cluster)
        cluster.certificates.put(identity("client"))
        assert await cluster.dial(DESTINATION).ask() == b"ping"
        assert (len(peer.connections), taken[PlannedConnection]) == (2, 0)
        assert await cluster.dial(DESTINATION).ask() == b"ping"
        assert (len(peer.connections), taken[PlannedConnection]) == (2, 1)

    play(tmp_path, body)


def test_expired_metric_series_is_recreated(tmp_path: Path) -> None:
    async def body(cluster: Cluster) -> None:
        await remote(cluster)
        assert await cluster.dial(DESTINATION).ask() == b"ping"
        metrics = cluster.node.metrics
        metrics._gone.update(metrics.series)
        assert metrics.expire(cluster.node.clock.monotonic() + 10_000) == 1
        assert not metrics.series
        assert await cluster.dial(DESTINATION).ask() == b"ping"
        await cluster.until(lambda: cluster.closed() == {"-": 1})

    play(tmp_path, body)


# What goes wrong before the answer


@pytest.mark.parametrize(
    ("answer", "text", "tries"),
    [
        (refusing(401), "http status: 401 Unauthorized", 1),
        (refusing(503), "http status: 503 Service Unavailable", 2),
    ],
    ids=["401", "503"],
)
def test_refused_planned_attempt_counts_as_one_attempt(
    tmp_path: Path, answer: Answering, text: str, tries: int, taken: dict[type, int]
) -> None:
    async def body(cluster: Cluster) -> None:
        second = endpoint("second", OTHER, node=ELSEWHERE)
        cluster.mesh.apply([shop(), endpoint("server", SERVER, node=ELSEWHERE), second])
        await cluster.start(POD)
        peers = [cluster.peer("server", SERVER), cluster.peer("second", OTHER)]
        while not all(peer.connections for peer in peers):
            assert await cluster.dial(f"{VIP}:80").ask() == b"ping"
        before = sum(len(peer.requests) for peer in peers)
        for peer in peers:
            peer.answer = answer
        opened = cluster.opened()
        begun = taken[PlannedConnection]
        assert await cluster.dial(f"{VIP}:80").ask() == b""
        assert taken[PlannedConnection] == begun + 1
        await cluster.until(lambda: cluster.lines()[-1].get("error"))
        assert cluster.lines()[-1]["error"] == text
        assert sum(len(peer.requests) for peer in peers) == before + tries
        assert cluster.node.metrics.connect_retries == tries - 1
        assert cluster.opened() == opened + 1
        assert cluster.closed()["CONNECT"] == 1
        assert len({series.labels for series in cluster.node.metrics.series}) == len(peers)

    play(tmp_path, body)


def test_a_refusal_leaves_the_bytes_for_the_next_endpoint(tmp_path: Path) -> None:
    async def body(cluster: Cluster) -> None:
        second = endpoint("second", OTHER, node=ELSEWHERE)
        cluster.mesh.apply([shop(), endpoint("server", SERVER, node=ELSEWHERE), second])
        await cluster.start(POD)
        peers = [cluster.peer("server", SERVER), cluster.peer("second", OTHER)]
        while not all(peer.connections for peer in peers):
            assert await cluster.dial(f"{VIP}:80").ask() == b"ping"
        peers[0].answer = refusing(503)
        for _ in range(4):
            assert await cluster.dial(f"{VIP}:80").ask() == b"ping"
        assert all("error" not in line for line in cluster.lines())

    play(tmp_path, body)


def test_a_request_that_was_not_processed_is_repeated(tmp_path: Path) -> None:
    async def body(cluster: Cluster) -> None:
        peer = await remote(cluster)

        async def refuses_once(request: Request) -> None:
            peer.answer = peer.echo
            request.reset(ErrorCode.REFUSED_STREAM)

        peer.answer = refuses_once
        assert await cluster.dial(DESTINATION).ask() == b"ping"
        assert len(peer.requests) == 3
        assert cluster.node.metrics.connect_retries == 0
        assert len(cluster.node.failed_endpoints) == 0
        await cluster.until(lambda: len(cluster.lines()) == 2)

    play(tmp_path, body)


def test_a_request_that_was_not_processed_is_routed_again_after_a_change_of_the_mesh(tmp_path: Path) -> None:
    async def body(cluster: Cluster) -> None:
        peer = await remote(cluster)
        other = cluster.peer("other", OTHER)

        async def refuses_once(request: Request) -> None:
            # While the request waits, the workload gets a waypoint.
            cluster.mesh.apply(
                [
                    replace(REMOTE, waypoint=GatewayAddress(NetworkAddress("", OTHER), 15008)),
                    workload("other", OTHER, node=ELSEWHERE),
                ]
            )
            peer.answer = peer.echo
            request.reset(ErrorCode.REFUSED_STREAM)

        peer.answer = refuses_once
        assert await cluster.dial(DESTINATION).ask() == b"ping"
        assert (len(peer.requests), len(other.requests)) == (2, 1)
        assert cluster.node.metrics.connect_retries == 0
        assert len(cluster.node.failed_endpoints) == 0
        await cluster.until(lambda: len(cluster.lines()) == 2)
        assert cluster.lines()[-1]["dst.addr"] == f"{OTHER}:15008"

    play(tmp_path, body)


def test_planned_connection_has_an_answer_timeout(tmp_path: Path) -> None:
    async def body(cluster: Cluster) -> None:
        peer = await remote(cluster)
        client, _ = await held(cluster, peer)
        began_s = cluster.node.clock.monotonic()
        assert await client.read_all() == b""
        assert ANSWER_TIMEOUT_S <= cluster.node.clock.monotonic() - began_s < ANSWER_TIMEOUT_S * 2
        await cluster.until(lambda: len(cluster.lines()) == 2)
        assert cluster.lines()[-1]["error"] == "http status: the peer did not answer in time"

    play(tmp_path, body)


@pytest.mark.parametrize("how", ["the connection breaks", "goaway"])
def test_a_connection_that_ends_before_the_answer(tmp_path: Path, how: str) -> None:
    async def body(cluster: Cluster) -> None:
        peer = await remote(cluster)
        client, _ = await held(cluster, peer)
        peer.answer = peer.echo
        connection: Connection = peer.connections[0]
        if how == "goaway":
            connection.close()
        else:
            connection.abort("gone")
        await client.ask()
        await cluster.until(lambda: len(cluster.lines()) == 2)
        assert cluster.is_idle

    play(tmp_path, body)


@pytest.mark.parametrize("loop", LOOPS)
@pytest.mark.parametrize("answered", [True, False])
def test_stopping_pod_ends_a_planned_connection_before_its_answer(
    tmp_path: Path, loop: str, answered: bool
) -> None:
    async def body(cluster: Cluster) -> None:
        peer = await remote(cluster)
        client, late = await held(cluster, peer)
        if answered:
            late.go()
        await cluster.pods["client"].stop()
        assert not cluster.pods["client"].open_connections
        assert not any(cluster.node.metrics.sockets_open.values())
        await client.read_all()
        await cluster.until(lambda: len(cluster.lines()) == 2)
        assert cluster.lines()[-1]["error"] == DRAINED
        late.go()

    play(tmp_path, body, loop=loop)


def test_end_wins_over_an_answer_in_the_same_loop_iteration(tmp_path: Path) -> None:
    async def body(cluster: Cluster) -> None:
        peer = await remote(cluster)
        client, late = await held(cluster, peer)
        (entry,) = cluster.pods["client"].connections.outbound
        assert isinstance(entry, PlannedConnection)
        entry._answered(entry._tunnel, None)
        entry.end("because")
        assert await client.read_all() == b""
        await cluster.until(lambda: len(cluster.lines()) == 2)
        assert cluster.lines()[-1]["error"] == "because"
        late.go()

    play(tmp_path, body)


def test_error_in_a_step_ends_only_its_connection(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def body(cluster: Cluster) -> None:
        peer = await remote(cluster)
        client, late = await held(cluster, peer)

        def fails(self: PlannedConnection, tunnel: object) -> None:
            raise RuntimeError("a bug")

        with monkeypatch.context() as patch:
            patch.setattr(PlannedConnection, "_relay", fails)
            late.go()
            assert await client.read_all() == b""
            await cluster.until(lambda: len(cluster.lines()) == 2)
        assert "a bug" in cluster.lines()[-1]["error"]
        assert await cluster.dial(DESTINATION).ask() == b"ping"

    play(tmp_path, body)


def test_error_at_the_start_leaves_no_connection(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def body(cluster: Cluster) -> None:
        await remote(cluster)

        def fails(self: Plan, *_: object) -> None:
            raise RuntimeError("a bug")

        with monkeypatch.context() as patch:
            patch.setattr(Plan, "request", fails)
            near, far = pair(CLIENT, SERVER)
            sockets = cluster.sockets["client"]
            patch.setattr(sockets, "original_destination", lambda *_: SocketAddress.parse(DESTINATION))
            with near, pytest.raises(RuntimeError):  # the listener logs it, and goes on
                sockets.accepted[OUTBOUND_PORT](far, near.getsockname()[:2])
            assert cluster.pods["client"]._tunnels.pool.statistics.streams == 0
        await cluster.until(lambda: len(cluster.lines()) == 2)
        assert "a bug" in cluster.lines()[-1]["error"]
        assert cluster.is_idle

    play(tmp_path, body)


# Requests


def test_error_in_a_planned_request_leaves_no_connection(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def body(cluster: Cluster) -> None:
        await _server(cluster)
        cluster.mesh.apply([workload("client", CLIENT, node=ELSEWHERE)])
        cluster.application(SERVER)
        connection = await cluster.tunnels_to("server")

        def fails(self: PodSockets, *_: object, **__: object) -> None:
            raise RuntimeError("a bug")

        with monkeypatch.context() as patch:
            patch.setattr(type(cluster.sockets["server"]), "dial_now", fails)
            with pytest.raises(TunnelBroken):
                await connection.open(fields())
        await cluster.until(cluster.lines)
        assert "a bug" in cluster.lines()[-1]["error"]
        tunnel = await connection.open(fields())
        tunnel.close()
        connection.close()

    play(tmp_path, body)


async def _opened(connection: Connection) -> None:
    with contextlib.suppress(HboneError):
        await connection.open(fields())


def _server(cluster: Cluster) -> Any:
    return cluster.start(workload("server", SERVER))


@pytest.mark.parametrize("how", ["refused", "gone", "stopped"])
def test_planned_request_with_an_unreachable_application(tmp_path: Path, how: str, taken: dict[type, int]) -> None:
    async def body(cluster: Cluster) -> None:
        await _server(cluster)
        cluster.mesh.apply([workload("client", CLIENT, node=ELSEWHERE)])
        gate = asyncio.Event()
        if how != "refused":
            cluster.application(SERVER)
            cluster.wire.gates[APP] = gate
        connection = await cluster.tunnels_to("server", shown=certificate(identity("client")))
        opening = cluster.tasks.create_task(_opened(connection))
        await cluster.until(lambda: cluster.wire.dialled)
        if how == "gone":
            opening.cancel()
        elif how == "stopped":
            await cluster.pods["server"].stop()
        await asyncio.wait([opening])
        await cluster.until(cluster.lines)
        assert taken[PlannedRequest] == 1
        wanted = {
            "refused": "connection failed: Connection refused (os error 111)",
            "gone": "h2 failed: the client gave up",
            "stopped": DRAINED,
        }
        assert cluster.lines()[-1]["error"] == wanted[how]
        connection.close()
        gate.set()

    play(tmp_path, body)
