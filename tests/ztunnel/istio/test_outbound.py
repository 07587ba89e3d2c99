"""Connections that pods open, from accept to access line: every row of the route table, every error, every end."""

import asyncio
import errno
from dataclasses import replace
from pathlib import Path

import pytest

from hbone.aio.relay import ByteCounts, relay
from hbone.aio.server import Request
from hbone.aio.socket import PlainSocket
from hbone.errors import ErrorCode
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
    Answering,
    Cluster,
    Peer,
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
from tproxy.errors import ConnectFailed, ConnectTimedOut
from xds.model.address import SocketAddress
from xds.model.service import BalancerMode, LoadBalancing, Service
from xds.model.workload import (
    GatewayAddress,
    NamespacedHostname,
    NetworkAddress,
    Protocol,
    ServiceKey,
    Workload,
    WorkloadUid,
)
from ztunnel.identity.crl import RevocationLists
from ztunnel.istio.config import OUTBOUND_PORT
from ztunnel.istio.outcome import DRAINED, RECURSIVE_CALL

POD = workload("client", CLIENT)
REMOTE = workload("server", SERVER, node=ELSEWHERE)
REMOTE_ADDRESS = SocketAddress(SERVER, 15008)
WAYPOINT_HOST, GATEWAY_HOST = "127.0.1.8", "127.0.1.9"
WAYPOINT_KEY = ServiceKey("default/waypoint.example")
GATEWAY = GatewayAddress(NetworkAddress("", GATEWAY_HOST), 15008)
FAR, FAR_SIDE = "far", SocketAddress("127.0.2.1", 15008)


def waypoint(**more: object) -> Workload:
    """A waypoint at an address of its own."""
    return workload("waypoint", WAYPOINT_HOST, node=ELSEWHERE, **more)


BY_ADDRESS = GatewayAddress(NetworkAddress("", WAYPOINT_HOST), 15008)


# The route table, row by row


def test_row_1_a_service_with_a_waypoint_goes_there(tmp_path: Path) -> None:
    async def body(cluster: Cluster) -> None:
        cluster.mesh.apply([shop(waypoint=BY_ADDRESS), waypoint(), endpoint("server", SERVER, node=ELSEWHERE)])
        await cluster.start(POD)
        peer = cluster.peer("waypoint", WAYPOINT_HOST)
        assert await cluster.dial(f"{VIP}:80").ask() == b"ping"
        assert peer.headers()[":authority"] == f"{VIP}:80"
        assert peer.headers()["forwarded"].endswith(";host=shop.example")
        line = await cluster.line()
        assert (line["dst.addr"], line["dst.hbone_addr"]) == (f"{WAYPOINT_HOST}:15008", f"{VIP}:80")
        assert (line["dst.workload"], line["dst.service"]) == ("waypoint", "shop.example")
        assert cluster.closed() == {"-": 1}

    play(tmp_path, body)


def remote_waypoint_service(**more: object) -> list[Workload | Service]:
    """A waypoint of another network, behind its gateway, with two endpoints of its own service."""
    key = WAYPOINT_KEY
    service = Service(
        name="waypoint",
        namespace="default",
        hostname="waypoint.example",
        vips=(NetworkAddress("", "127.1.0.8"),),
        ports={15008: 15008},
    )
    far = endpoint("waypoint", key=key, ports={15008: 15008}, network=FAR, network_gateway=GATEWAY, node=ELSEWHERE)
    return [service, far, workload("gateway", GATEWAY_HOST, node=ELSEWHERE)]


async def through_gateway(cluster: Cluster, *, far: str) -> tuple[Peer, Peer]:
    """A gateway that passes inner tunnels on to the far side, and the far side."""
    inner = cluster.peer(far, "127.0.2.1")
    gateway = cluster.peer("gateway", GATEWAY_HOST)

    async def answer(request: Request) -> None:
        await pass_on(cluster, request.accept(), FAR_SIDE)

    gateway.answer = answer
    return gateway, inner


def test_row_2_a_waypoint_of_another_network_is_behind_two_tunnels(tmp_path: Path) -> None:
    async def body(cluster: Cluster) -> None:
        by_name = GatewayAddress(NamespacedHostname("default", "waypoint.example"), 15008)
        names = (identity("waypoint"),)
        cluster.mesh.apply(remote_waypoint_service())
        key_service = cluster.mesh.service(str(WAYPOINT_KEY))
        assert key_service is not None
        cluster.mesh.apply([replace(key_service, subject_alt_names=names)])
        cluster.mesh.apply([shop(waypoint=by_name, subject_alt_names=names), endpoint("server", SERVER)])
        await cluster.start(POD)
        gateway, inner = await through_gateway(cluster, far="waypoint")
        assert await cluster.dial(f"{VIP}:80").ask(b"x" * 100_000) == b"x" * 100_000
        assert gateway.headers()[":authority"] == inner.headers()[":authority"] == "shop.example:80"
        assert "x-forwarded-network" in inner.headers()
        assert "x-forwarded-network" not in gateway.headers()
        line = await cluster.line()
        assert line["dst.identity"] == identity("waypoint")
        assert cluster.closed() == {"-": 1}

    play(tmp_path, body)


def test_row_3_a_captured_waypoint_that_dials_its_service_has_decided(tmp_path: Path) -> None:
    async def body(cluster: Cluster) -> None:
        own = workload("client", CLIENT)
        service = shop(waypoint=GatewayAddress(NetworkAddress("", CLIENT), 15008))
        cluster.mesh.apply([service, endpoint("server", SERVER, node=ELSEWHERE)])
        await cluster.start(own)
        peer = cluster.peer("server", SERVER)
        assert await cluster.dial(f"{VIP}:80").ask() == b"ping"
        assert peer.headers()[":authority"] == f"{SERVER}:{APP_PORT}"

    play(tmp_path, body)


def test_row_4_a_service_without_endpoints_is_down(tmp_path: Path) -> None:
    async def body(cluster: Cluster) -> None:
        cluster.mesh.apply([shop()])
        await cluster.start(POD)
        assert await cluster.dial(f"{VIP}:80").ask() == b""
        line = await cluster.line()
        assert (line["level"], line["message"]) == ("warn", "connection failed")
        assert line["error"] == f"no healthy upstream: {VIP}:80"
        assert cluster.opened() == 0

    play(tmp_path, body)


@pytest.mark.parametrize("service", [None, shop(load_balancing=LoadBalancing(mode=BalancerMode.PASSTHROUGH))])
def test_row_5_what_is_none_of_ours_passes_through(tmp_path: Path, service: Service | None) -> None:
    async def body(cluster: Cluster) -> None:
        cluster.mesh.apply([service] if service is not None else [])
        await cluster.start(POD)
        app = cluster.application(VIP, 80)
        assert await cluster.dial(f"{VIP}:80").ask() == b"ping"
        assert app.peers == [CLIENT]
        line = await cluster.line()
        assert (line["dst.addr"], line["bytes_sent"], line["bytes_recv"]) == (f"{VIP}:80", 4, 4)
        assert "dst.hbone_addr" not in line
        assert "dst.workload" not in line

    play(tmp_path, body)


@pytest.mark.parametrize("loop", LOOPS)
def test_row_6_another_network_is_reached_through_its_gateway(tmp_path: Path, loop: str) -> None:
    async def body(cluster: Cluster) -> None:
        far = endpoint("far-server", network=FAR, network_gateway=GATEWAY, node=ELSEWHERE)
        names = (identity("far-server"),)
        cluster.mesh.apply([shop(subject_alt_names=names), far, workload("gateway", GATEWAY_HOST, node=ELSEWHERE)])
        await cluster.start(POD)
        gateway, inner = await through_gateway(cluster, far="far-server")
        client = cluster.dial(f"{VIP}:80")
        await client.send(b"hello")
        assert await client.read(5) == b"hello"
        (entry,) = cluster.pods["client"].dump()["outbound"]
        assert (entry["protocol"], entry["originalDst"]) == ("DOUBLEHBONE", f"{VIP}:80")
        assert await client.ask(b"last") == b"last"
        assert gateway.headers()[":authority"] == inner.headers()[":authority"] == "shop.example:80"
        assert (await cluster.line())["dst.identity"] == identity("far-server")
        # The far side can tell this end from one that was cut off.
        (far_end,) = inner.connections
        await cluster.until(lambda: far_end.error is not None)
        assert far_end.link.tls is not None
        assert far_end.link.tls.peer_closed

    play(tmp_path, body, loop=loop)


def test_row_6_without_a_gateway_there_is_no_way(tmp_path: Path) -> None:
    async def body(cluster: Cluster) -> None:
        gone = GatewayAddress(NetworkAddress("", "127.0.6.6"), 15008)
        cluster.mesh.apply([shop(), endpoint("far-server", network=FAR, network_gateway=gone, node=ELSEWHERE)])
        await cluster.start(POD)
        assert await cluster.dial(f"{VIP}:80").ask() == b""
        assert (await cluster.line())["error"] == "unknown network gateway: /127.0.6.6 not found"
        assert cluster.opened() == 0

    play(tmp_path, body)


def test_row_7_a_workloads_waypoint_of_another_network_is_no_way(tmp_path: Path) -> None:
    """A gateway can be asked for a service only, and none was dialled."""

    async def body(cluster: Cluster) -> None:
        by_name = GatewayAddress(NamespacedHostname("default", "waypoint.example"), 15008)
        cluster.mesh.apply([*remote_waypoint_service(), workload("server", SERVER, waypoint=by_name)])
        await cluster.start(POD)
        assert await cluster.dial(f"{SERVER}:80").ask() == b""
        assert (await cluster.line())["error"] == f"no service for target address: {SERVER}:80"

    play(tmp_path, body)


def test_row_7_a_workload_with_a_waypoint_is_behind_it(tmp_path: Path) -> None:
    async def body(cluster: Cluster) -> None:
        cluster.mesh.apply([waypoint(), workload("server", SERVER, waypoint=BY_ADDRESS, node=ELSEWHERE)])
        await cluster.start(POD)
        peer = cluster.peer("waypoint", WAYPOINT_HOST)
        assert await cluster.dial(f"{SERVER}:{APP_PORT}").ask() == b"ping"
        assert peer.headers()[":authority"] == f"{SERVER}:{APP_PORT}"
        assert "host=" not in peer.headers()["forwarded"]

    play(tmp_path, body)


def test_row_7_an_unknown_waypoint_is_no_detour_around_it(tmp_path: Path) -> None:
    async def body(cluster: Cluster) -> None:
        cluster.mesh.apply([workload("server", SERVER, waypoint=BY_ADDRESS, node=ELSEWHERE)])
        await cluster.start(POD)
        assert await cluster.dial(f"{SERVER}:{APP_PORT}").ask() == b""
        assert (await cluster.line())["error"] == f"unknown waypoint: waypoint /{WAYPOINT_HOST} not found"
        assert cluster.wire.dialled == []

    play(tmp_path, body)


def test_row_8_a_workload_outside_the_mesh_gets_plain_tcp(tmp_path: Path) -> None:
    async def body(cluster: Cluster) -> None:
        cluster.mesh.apply([workload("server", SERVER, protocol=Protocol.TCP, node=ELSEWHERE)])
        await cluster.start(POD)
        cluster.application(SERVER)
        assert await cluster.dial(f"{SERVER}:{APP_PORT}").ask() == b"ping"
        line = await cluster.line()
        assert line["dst.workload"] == "server"
        assert "dst.identity" not in line

    play(tmp_path, body)


@pytest.mark.parametrize("loop", LOOPS)
def test_row_9_a_workload_of_the_mesh_gets_a_tunnel(tmp_path: Path, loop: str) -> None:
    async def body(cluster: Cluster) -> None:
        cluster.mesh.apply([shop(), endpoint("server", SERVER, node=ELSEWHERE)])
        await cluster.start(POD)
        peer = cluster.peer("server", SERVER)
        assert await cluster.dial(f"{VIP}:80").ask(b"x" * 300_000) == b"x" * 300_000
        assert await cluster.dial(f"{VIP}:80").ask() == b"ping"
        assert len(peer.connections) == 1, "tunnels share"
        headers = peer.headers(0)
        assert headers[":authority"] == f"{SERVER}:{APP_PORT}"
        assert headers["forwarded"].startswith(f'for="{CLIENT}:')
        assert "k8s.deployment.name=client" in headers["baggage"]
        assert len(headers["traceparent"]) == 55
        line = await cluster.line(2)
        assert (line["src.identity"], line["dst.identity"]) == (identity("client"), identity("server"))
        assert (line["direction"], line["bytes_sent"], line["bytes_recv"]) == ("outbound", 4, 4)
        assert cluster.closed() == {"-": 2}

    play(tmp_path, body, loop=loop)


def test_a_name_is_resolved_and_counted(tmp_path: Path) -> None:
    async def body(cluster: Cluster) -> None:
        named = endpoint("server", node=ELSEWHERE, hostname="server.example")
        cluster.mesh.apply([shop(), named])
        await cluster.start(POD)
        cluster.lookups.known["server.example"] = ("fd00::7", SERVER)
        peer = cluster.peer("server", SERVER)
        assert await cluster.dial(f"{VIP}:80").ask() == b"ping"
        assert peer.headers()[":authority"] == f"{SERVER}:{APP_PORT}"
        ((labels, count),) = cluster.node.metrics.on_demand_dns.items()
        assert (identity("client") in labels, count) == (True, 1)

    play(tmp_path, body)


@pytest.mark.parametrize(
    ("known", "error"),
    [
        ({}, "dns lookup: no such name: server.example"),
        ({"server.example": ()}, "no ip addresses were resolved for workload: Kubernetes//Pod/default/server"),
    ],
    ids=["unknown", "empty"],
)
def test_a_name_without_addresses_is_denied(tmp_path: Path, known: dict[str, tuple[str, ...]], error: str) -> None:
    async def body(cluster: Cluster) -> None:
        cluster.mesh.apply([shop(), endpoint("server", node=ELSEWHERE, hostname="server.example")])
        await cluster.start(POD)
        cluster.lookups.known |= known
        assert await cluster.dial(f"{VIP}:80").ask() == b""
        assert (await cluster.line())["error"] == error
        assert cluster.opened() == 0

    play(tmp_path, body)


# On demand


def test_what_is_unknown_is_asked_for_once(tmp_path: Path) -> None:
    asked: list[str] = []

    async def ask(key: str) -> None:
        asked.append(key)

    async def body(cluster: Cluster) -> None:
        await cluster.start(POD)
        cluster.application(SERVER)
        for _ in range(2):
            assert await cluster.dial(f"{SERVER}:{APP_PORT}").ask() == b"ping"
        assert asked == [f"/{SERVER}"]

    play(tmp_path, body, ask=ask)


def test_an_answer_that_brings_the_workload_decides(tmp_path: Path) -> None:
    clusters: list[Cluster] = []

    async def ask(key: str) -> None:
        clusters[0].mesh.apply([REMOTE])

    async def body(cluster: Cluster) -> None:
        clusters.append(cluster)
        await cluster.start(POD)
        cluster.peer("server", SERVER)
        assert await cluster.dial(f"{SERVER}:{APP_PORT}").ask() == b"ping"
        assert (await cluster.line())["dst.workload"] == "server"

    play(tmp_path, body, ask=ask)


def test_a_control_plane_that_does_not_answer_is_no_passthrough(tmp_path: Path) -> None:
    async def ask(key: str) -> None:
        raise TimeoutError

    async def body(cluster: Cluster) -> None:
        await cluster.start(POD)
        cluster.application(SERVER)
        for number in (1, 2):  # and it is asked again
            assert await cluster.dial(f"{SERVER}:{APP_PORT}").ask() == b""
            error = (await cluster.line(number))["error"]
            assert error == f"the control plane did not answer about /{SERVER} in time"
        assert cluster.wire.dialled == []

    play(tmp_path, body, ask=ask)


def test_questions_end(tmp_path: Path) -> None:
    """A mesh that points from one unknown to the next is no reason to ask for ever."""
    clusters: list[Cluster] = []

    async def ask(key: str) -> None:
        number = int(key.rpartition(".")[2]) + 1
        gateway = GatewayAddress(NetworkAddress("", f"127.0.3.{number}"), 15008)
        clusters[0].mesh.apply([shop(waypoint=gateway)])

    async def body(cluster: Cluster) -> None:
        clusters.append(cluster)
        cluster.mesh.apply([shop(waypoint=GatewayAddress(NetworkAddress("", "127.0.3.1"), 15008))])
        await cluster.start(POD)
        assert await cluster.dial(f"{VIP}:80").ask() == b""
        assert (await cluster.line())["error"] == f"no valid routing destination for workload: {VIP}:80"

    play(tmp_path, body, ask=ask)


# Early denials


def test_a_call_to_the_proxy_itself_is_denied(tmp_path: Path) -> None:
    async def body(cluster: Cluster) -> None:
        await cluster.start(POD)
        assert await cluster.dial(f"{CLIENT}:{OUTBOUND_PORT}").ask() == b""
        assert (await cluster.line())["error"] == RECURSIVE_CALL
        assert cluster.wire.dialled == []

    play(tmp_path, body)


def test_a_pod_that_the_mesh_does_not_describe_waits_then_is_denied(tmp_path: Path) -> None:
    async def body(cluster: Cluster) -> None:
        await cluster.start(POD, described=False)
        began_s = cluster.node.clock.monotonic()
        assert await cluster.dial(f"{SERVER}:80").ask() == b""
        assert 5 <= cluster.node.clock.monotonic() - began_s < 6
        line = await cluster.line()
        assert line["error"] == "failed to fetch information about local workload: client.default (client)"

    play(tmp_path, body)


def test_a_pod_that_is_described_meanwhile_is_served(tmp_path: Path) -> None:
    async def body(cluster: Cluster) -> None:
        await cluster.start(POD, described=False)
        cluster.application(SERVER)
        client = cluster.dial(f"{SERVER}:{APP_PORT}")
        await cluster.until(lambda: cluster.pods["client"].dump()["outbound"])
        cluster.mesh.apply([workload("unrelated", OTHER)])
        cluster.mesh.apply([POD])
        assert await client.ask() == b"ping"
        assert (await cluster.line())["src.workload"] == "client"

    play(tmp_path, body)


# Errors of dialling: what line and flags each gives, and whether another endpoint is tried


TARGET = (SERVER, 15008)


@pytest.mark.parametrize(
    ("error", "text", "flags", "retried"),
    [
        (
            ConnectFailed(TARGET, ConnectionRefusedError(errno.ECONNREFUSED, "x")),
            "io error: Connection refused (os error 111)",
            "CONNECT",
            True,
        ),
        (
            ConnectTimedOut(TARGET, 10.0),
            "connection timed out, maybe a NetworkPolicy is blocking HBONE port 15008: deadline has elapsed",
            "NETWORK_POLICY",
            True,
        ),
        (OSError(errno.EMFILE, "x"), "io error: Too many open files (os error 24)", "CONNECT", False),
    ],
    ids=["refused", "timed out", "ours"],
)
def test_errors_of_dialling(tmp_path: Path, error: Exception, text: str, flags: str, retried: bool) -> None:
    async def body(cluster: Cluster) -> None:
        second = endpoint("second", OTHER, node=ELSEWHERE)
        cluster.mesh.apply([shop(), endpoint("server", SERVER, node=ELSEWHERE), second])
        await cluster.start(POD)
        for host in (SERVER, OTHER):
            cluster.wire.errors[SocketAddress(host, 15008)] = error
        assert await cluster.dial(f"{VIP}:80").ask() == b""
        line = await cluster.line()
        assert (line["level"], line["error"]) == ("error", text)
        assert cluster.closed() == {flags: 1}
        assert len(cluster.wire.dialled) == (2 if retried else 1)
        assert cluster.node.metrics.connect_retries == (1 if retried else 0)
        assert len(cluster.node.failed_endpoints) == (2 if retried else 0)

    play(tmp_path, body)


@pytest.mark.parametrize(
    ("answer", "text", "retried"),
    [
        (refusing(401), "http status: 401 Unauthorized", False),
        (refusing(400), "http status: 400 Bad Request", False),
        (refusing(503), "http status: 503 Service Unavailable", True),
    ],
    ids=["401", "400", "503"],
)
def test_answers_other_than_200(tmp_path: Path, answer: Answering, text: str, retried: bool) -> None:
    async def body(cluster: Cluster) -> None:
        second = endpoint("second", OTHER, node=ELSEWHERE)
        cluster.mesh.apply([shop(), endpoint("server", SERVER, node=ELSEWHERE), second])
        await cluster.start(POD)
        peers = [cluster.peer("server", SERVER), cluster.peer("second", OTHER)]
        for peer in peers:
            peer.answer = answer
        assert await cluster.dial(f"{VIP}:80").ask() == b""
        assert (await cluster.line())["error"] == text
        assert sum(len(peer.requests) for peer in peers) == (2 if retried else 1)
        assert cluster.closed() == {"CONNECT": 1}

    play(tmp_path, body)


def test_the_next_endpoint_gets_the_bytes(tmp_path: Path) -> None:
    async def body(cluster: Cluster) -> None:
        good = endpoint("good", OTHER, node=ELSEWHERE)
        cluster.mesh.apply([shop(), endpoint("server", SERVER, node=ELSEWHERE), good])
        await cluster.start(POD)
        cluster.peer("server", SERVER).answer = refusing(503)
        cluster.peer("good", OTHER)
        for number in range(1, 9):
            assert await cluster.dial(f"{VIP}:80").ask() == b"ping"
            assert (await cluster.line(number))["dst.workload"] == "good"
        assert cluster.node.metrics.connect_retries == 1, "once, then all pass it over"
        assert cluster.closed() == {"-": 8}
        await asyncio.sleep(10)
        assert WorkloadUid("Kubernetes//Pod/default/server") not in cluster.node.failed_endpoints.current(
            cluster.node.clock.monotonic()
        )

    play(tmp_path, body)


def test_without_retries_a_draw_is_a_draw(tmp_path: Path) -> None:
    async def body(cluster: Cluster) -> None:
        second = endpoint("second", OTHER, node=ELSEWHERE)
        cluster.mesh.apply([shop(), endpoint("server", SERVER, node=ELSEWHERE), second])
        await cluster.start(POD)
        assert await cluster.dial(f"{VIP}:80").ask() == b""
        assert len(cluster.wire.dialled) == 1
        assert len(cluster.node.failed_endpoints) == 0
        await cluster.line()

    play(tmp_path, body, {"ZTUNNEL_CONNECT_RETRIES": "0"})


def test_the_only_endpoint_is_tried_once(tmp_path: Path) -> None:
    async def body(cluster: Cluster) -> None:
        cluster.mesh.apply([shop(), endpoint("server", SERVER, node=ELSEWHERE)])
        await cluster.start(POD)
        assert await cluster.dial(f"{VIP}:80").ask() == b""
        assert cluster.wire.addresses == [f"{SERVER}:15008"]
        assert (await cluster.line())["error"] == "io error: Connection refused (os error 111)"
        cluster.peer("server", SERVER)
        assert await cluster.dial(f"{VIP}:80").ask() == b"ping", "there is no other, so it is tried all the same"

    play(tmp_path, body)


def test_an_endpoint_that_goes_meanwhile_leaves_its_own_error(tmp_path: Path) -> None:
    async def body(cluster: Cluster) -> None:
        cluster.mesh.apply([shop(), endpoint("server", SERVER, node=ELSEWHERE)])
        await cluster.start(POD)
        peer = cluster.peer("server", SERVER)

        async def gone(request: Request) -> None:
            cluster.mesh.apply((), [WorkloadUid("Kubernetes//Pod/default/server")])
            request.refuse(503)

        peer.answer = gone
        assert await cluster.dial(f"{VIP}:80").ask() == b""
        line = await cluster.line()
        assert (line["message"], line["error"]) == ("connection complete", "http status: 503 Service Unavailable")

    play(tmp_path, body)


def test_attempts_end_with_the_time_window(tmp_path: Path) -> None:
    """Each of two endpoints takes eight seconds to fail: the third attempt would begin after 16."""

    async def body(cluster: Cluster) -> None:
        hosts = ["127.0.4.1", "127.0.4.2", "127.0.4.3"]
        cluster.mesh.apply([shop(), *(endpoint(f"e{host}", host, node=ELSEWHERE) for host in hosts)])
        await cluster.start(POD)

        async def slowly(request: Request) -> None:
            await asyncio.sleep(8)
            request.refuse(503)

        peers = [cluster.peer(f"e{host}", host) for host in hosts]
        for peer in peers:
            peer.answer = slowly
        assert await cluster.dial(f"{VIP}:80").ask() == b""
        assert sum(len(peer.requests) for peer in peers) == 2

    play(tmp_path, body, {"ZTUNNEL_CONNECT_RETRIES": "5"})


def test_an_answer_that_is_late_is_not_tried_elsewhere(tmp_path: Path) -> None:
    """The application may have got first bytes, so they must not go to another one."""

    async def body(cluster: Cluster) -> None:
        second = endpoint("second", OTHER, node=ELSEWHERE)
        cluster.mesh.apply([shop(), endpoint("server", SERVER, node=ELSEWHERE), second])
        await cluster.start(POD)
        peers = [cluster.peer("server", SERVER), cluster.peer("second", OTHER)]

        async def never(request: Request) -> None:
            await asyncio.sleep(100)

        for peer in peers:
            peer.answer = never
        began_s = cluster.node.clock.monotonic()
        assert await cluster.dial(f"{VIP}:80").ask() == b""
        assert 15 <= cluster.node.clock.monotonic() - began_s < 16
        assert (await cluster.line())["error"] == "http status: the peer did not answer in time"
        assert sum(len(peer.requests) for peer in peers) == 1

    play(tmp_path, body)


def test_early_data_that_was_perhaps_delivered_is_not_sent_twice(tmp_path: Path) -> None:
    """The peer announces that it holds first bytes, gets them with the CONNECT, and its connection breaks."""

    async def body(cluster: Cluster) -> None:
        second = endpoint("second", OTHER, node=ELSEWHERE)
        cluster.mesh.apply([shop(), endpoint("server", SERVER, node=ELSEWHERE), second])
        await cluster.start(POD)
        peers = [cluster.peer("server", SERVER), cluster.peer("second", OTHER)]

        async def breaks(request: Request) -> None:
            await asyncio.sleep(0.01)
            request.connection.abort("the node dies")

        for peer in peers:
            peer.answer = breaks
            peer.settings = replace(peer.settings, http2=replace(peer.settings.http2, early_data=True))
        client = cluster.dial(f"{VIP}:80")
        await client.send(b"order one")
        assert await client.read_all() == b""
        assert "h2 failed" in (await cluster.line())["error"]
        assert sum(len(peer.requests) for peer in peers) == 1
        assert cluster.closed() == {"H2_HANDSHAKE_FAILURE": 1}

    play(tmp_path, body)


def test_early_data_that_was_refused_stays_for_the_next(tmp_path: Path) -> None:
    async def body(cluster: Cluster) -> None:
        good = endpoint("good", OTHER, node=ELSEWHERE)
        cluster.mesh.apply([shop(), endpoint("server", SERVER, node=ELSEWHERE), good])
        await cluster.start(POD)
        refuses = cluster.peer("server", SERVER)
        accepts = cluster.peer("good", OTHER)
        refuses.answer = refusing(503)
        for peer in (refuses, accepts):
            peer.settings = replace(peer.settings, http2=replace(peer.settings.http2, early_data=True))
        for _ in range(3):
            client = cluster.dial(f"{VIP}:80")
            await client.send(b"order one")
            assert await client.read(9) == b"order one"
            assert await client.ask(b", two") == b", two"

    play(tmp_path, body)


@pytest.mark.parametrize(
    ("shown", "text"),
    [
        (certificate(identity("another")), "identity verification error: peer did not present the expected SAN"),
        (certificate(identity("server"), Authority("other")), ""),
        (certificate(identity("server"), from_day=-2, to_day=-1), ""),
    ],
    ids=["name", "root", "expired"],
)
def test_a_peer_with_a_wrong_certificate_gets_no_bytes(tmp_path: Path, shown: object, text: str) -> None:
    async def body(cluster: Cluster) -> None:
        cluster.mesh.apply([REMOTE])
        await cluster.start(POD)
        peer = cluster.peer("server", SERVER, shown=shown)  # type: ignore[arg-type]
        assert await cluster.dial(f"{SERVER}:{APP_PORT}").ask() == b""
        assert peer.requests == []
        line = await cluster.line()
        assert line["error"].startswith("io error: ")
        assert text in line["error"]
        assert cluster.closed() == {"CONNECT": 1}

    play(tmp_path, body)


def test_a_revoked_peer_is_counted(tmp_path: Path) -> None:
    async def body(cluster: Cluster) -> None:
        shown = certificate(identity("server"))
        cluster.certificates.lists = RevocationLists.parse(ROOT.revoke(shown.issued.chain[0]))
        cluster.mesh.apply([REMOTE])
        await cluster.start(POD)
        cluster.peer("server", SERVER, shown=shown)
        assert await cluster.dial(f"{SERVER}:{APP_PORT}").ask() == b""
        assert (await cluster.line())["error"] == "io error: certificate revoked by a revocation list"
        assert cluster.node.metrics.crl_rejections["source"] == 1

    play(tmp_path, body)


def test_without_a_certificate_there_is_no_tunnel(tmp_path: Path) -> None:
    async def body(cluster: Cluster) -> None:
        cluster.certificates.errors[identity("client")] = "the CA says no"
        cluster.mesh.apply([REMOTE])
        await cluster.start(POD)
        assert await cluster.dial(f"{SERVER}:{APP_PORT}").ask() == b""
        assert (await cluster.line())["error"] == "identity error: the CA says no"
        assert cluster.closed() == {"IDENTITY_ERROR": 1}
        assert cluster.wire.dialled == []

    play(tmp_path, body)


def test_a_context_that_cannot_be_made_opens_no_socket(tmp_path: Path) -> None:
    """A key that OpenSSL refuses, say: the socket that was dialled for it leaked."""

    async def body(cluster: Cluster) -> None:
        cluster.mesh.apply([REMOTE])
        await cluster.start(POD)
        cluster.peer("server", SERVER)
        good = cluster.certificates.put(identity("client"))
        broken = replace(good.issued, key_pem=b"no key")
        made = type(good)(broken, good.generation, good._policy)
        cluster.certificates.held[broken.identity] = made
        assert await cluster.dial(f"{SERVER}:{APP_PORT}").ask() == b""
        assert cluster.wire.dialled == []

    play(tmp_path, body)


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
def test_stopping_the_pod_ends_what_runs(tmp_path: Path, host: str) -> None:
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
def test_a_client_that_is_gone_leaves_nothing(tmp_path: Path, gone: str) -> None:
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
def test_a_connection_that_ends_before_it_begins_leaves_nothing(tmp_path: Path, port: int) -> None:
    async def body(cluster: Cluster) -> None:
        await cluster.start(POD)
        client = cluster.sockets["client"].arrives(port, SocketAddress(SERVER, 80), OTHER)
        await cluster.pods["client"].stop()
        assert await client.read_all() == b""
        assert cluster.is_idle

    play(tmp_path, body)


@pytest.mark.parametrize("port", [15001, 15080, 15006, 15008])
def test_a_connection_that_is_accepted_after_the_end_leaves_nothing(tmp_path: Path, port: int) -> None:
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


def test_a_socks_client_without_names_is_refused(tmp_path: Path) -> None:
    async def body(cluster: Cluster) -> None:
        await cluster.start(POD)
        client = cluster.socks()
        await client.send(b"\x05\x01\x00" + b"\x05\x01\x00\x03\x0eserver.example\x00\x50")
        assert await client.read_all() == b"\x05\x00" + b"\x05\x04\x00\x01" + bytes(6)
        assert cluster.lines() == []

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
        error = (await cluster.line())["error"]
        expected = {
            "outer": "http status: 503 Service Unavailable",
            "inner": "http status: 401 Unauthorized",
            "inner certificate": "io error: identity verification error",
            "silence": "http status: the peer did not answer in time",
        }
        assert error.startswith(expected[where])

    play(tmp_path, body)


def test_the_last_words_of_a_double_tunnel_have_limited_time(tmp_path: Path) -> None:
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


def test_a_double_tunnel_that_is_ended_has_no_last_words(tmp_path: Path) -> None:
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


def test_a_revoked_far_side_ends_its_double_tunnel(tmp_path: Path) -> None:
    async def body(cluster: Cluster) -> None:
        double(cluster)
        await cluster.start(POD)
        _, inner = await through_gateway(cluster, far="far-server")
        client = cluster.dial(f"{VIP}:80")
        await client.send(b"hello")
        assert await client.read(5) == b"hello"
        cluster.pods["client"].end_revoked(RevocationLists.parse(ROOT.revoke(inner.shown.issued.chain[0])))
        await client.read_all()
        line = await cluster.line()
        assert line["error"] == "connection closed: peer certificate revoked by CRL"
        assert cluster.closed() == {"CERT_REVOKED": 1}
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
        cluster.pods["client"].end_revoked(RevocationLists())
        cluster.pods["client"].end_revoked(RevocationLists.parse(ROOT.revoke(peer.shown.issued.chain[0])))
        await client.read_all()
        assert cluster.closed() == {"CERT_REVOKED": 1}
        await cluster.line()

    play(tmp_path, body)
