"""Routes of pods' connections: every row of the route table, and requests on demand."""

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest

from hbone.aio.requests import Request
from tests.ztunnel.proxy.istio.outbound_case import (
    BY_ADDRESS,
    FAR,
    GATEWAY,
    GATEWAY_HOST,
    POD,
    REMOTE,
    WAYPOINT_HOST,
    WAYPOINT_KEY,
    through_gateway,
    waypoint,
)
from tests.ztunnel.proxy.istio.pages import traces
from tests.ztunnel.proxy.istio.pods import (
    APP_PORT,
    CLIENT,
    ELSEWHERE,
    LOOPS,
    OTHER,
    SERVER,
    VIP,
    Cluster,
    echo,
    endpoint,
    identity,
    play,
    shop,
    workload,
)
from xds.model.service import BalancerMode, LoadBalancing, Service
from xds.model.workload import GatewayAddress, NamespacedHostname, NetworkAddress, Protocol, Workload
from ztunnel.proxy.istio.path.answered_keys import VALID_S

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
def test_row_5_unknown_destination_passes_through(tmp_path: Path, service: Service | None) -> None:
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
        said = b"k8s.namespace.name=shop,k8s.deployment.name=far-server-v1,service.name=far-server"

        async def describing_itself(request: Request) -> None:
            await echo(request.accept(((b"baggage", said),)))

        inner.answer = describing_itself
        client = cluster.dial(f"{VIP}:80")
        await client.send(b"hello")
        assert await client.read(5) == b"hello"
        (entry,) = cluster.pods["client"].dump()["outbound"]
        assert (entry["protocol"], entry["originalDst"]) == ("DOUBLEHBONE", f"{VIP}:80")
        assert await client.ask(b"last") == b"last"
        assert gateway.headers()[":authority"] == inner.headers()[":authority"] == "shop.example:80"
        line = await cluster.line()
        assert (line["dst.identity"], line["dst.workload"]) == (identity("far-server"), "far-server-v1")
        # The far side can distinguish this end from an aborted connection.
        (far_end,) = inner.connections
        await cluster.until(lambda: far_end.error is not None)
        assert far_end.link.tls is not None
        assert far_end.link.tls.peer_closed

    play(tmp_path, body, loop=loop)


def test_row_6_without_a_gateway_is_refused(tmp_path: Path) -> None:
    async def body(cluster: Cluster) -> None:
        gone = GatewayAddress(NetworkAddress("", "127.0.6.6"), 15008)
        cluster.mesh.apply([shop(), endpoint("far-server", network=FAR, network_gateway=gone, node=ELSEWHERE)])
        await cluster.start(POD)
        assert await cluster.dial(f"{VIP}:80").ask() == b""
        assert (await cluster.line())["error"] == "unknown network gateway: /127.0.6.6 not found"
        assert cluster.opened() == 0

    play(tmp_path, body)


@pytest.mark.parametrize("recently_failed", [False, True], ids=["", "others_failed_recently"])
def test_row_6_endpoint_without_a_gateway_takes_no_connection_from_others(
    tmp_path: Path, *, recently_failed: bool
) -> None:
    async def body(cluster: Cluster) -> None:
        near = endpoint("server", SERVER, node=ELSEWHERE)
        far = [endpoint(f"far-{number}", network=FAR) for number in (1, 2, 3)]
        cluster.mesh.apply([shop(), near, *(replace(each, addresses=("192.0.2.1",)) for each in far)])
        await cluster.start(POD)
        cluster.peer("server", SERVER)
        for _ in range(10):
            if recently_failed:
                cluster.node.failed_endpoints.add(near.uid, cluster.node.clock.monotonic())
            assert await cluster.dial(f"{VIP}:80").ask() == b"ping"
        cluster.mesh.apply(removed=[near.uid])
        assert await cluster.dial(f"{VIP}:80").ask() == b""
        error = (await cluster.line(11))["error"]
        assert error.startswith("no valid routing destination for workload: far-")

    play(tmp_path, body)


def test_row_7_workload_with_a_waypoint_of_another_network_is_refused(tmp_path: Path) -> None:
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


def test_row_7_unknown_waypoint_is_never_bypassed(tmp_path: Path) -> None:
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
        metrics, sent = cluster.node.metrics, [peer.headers(number)["traceparent"] for number in (0, 1)]
        # The handshake was for the first of the two tunnels.
        assert traces(metrics.handshakes["client", "ok"]) == sent[:1]
        for durations in (metrics.connects["hbone", "ok"], metrics.lengths["source", "hbone"]):
            assert traces(durations)
            assert not set(traces(durations)) - set(sent)

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


@pytest.mark.parametrize("others", [(OTHER,), (OTHER, "fd00::7")])
def test_next_attempt_uses_another_address_of_the_name(tmp_path: Path, others: tuple[str, ...]) -> None:
    async def body(cluster: Cluster) -> None:
        cluster.mesh.apply([shop(), endpoint("server", node=ELSEWHERE, hostname="server.example")])
        await cluster.start(POD)
        cluster.lookups.known["server.example"] = (*others, SERVER)  # nothing listens at the others
        cluster.node.rng.choice = lambda addresses: addresses[0]  # type: ignore[method-assign, assignment]
        cluster.peer("server", SERVER)
        assert await cluster.dial(f"{VIP}:80").ask() == b"ping"
        assert cluster.wire.addresses == [f"{OTHER}:15008", f"{SERVER}:15008"]

    play(tmp_path, body)


@pytest.mark.parametrize("known", [(OTHER,), (OTHER, "127.0.1.4"), (OTHER, "127.0.1.4", "127.0.1.5", "127.0.1.6")])
def test_addresses_of_a_name_are_tried_within_the_limit_of_attempts(
    tmp_path: Path, known: tuple[str, ...]
) -> None:
    async def body(cluster: Cluster) -> None:
        cluster.mesh.apply([shop(), endpoint("server", node=ELSEWHERE, hostname="server.example")])
        await cluster.start(POD)
        cluster.lookups.known["server.example"] = known
        assert await cluster.dial(f"{VIP}:80").ask() == b""
        assert len(set(cluster.wire.addresses)) == len(cluster.wire.addresses) == min(len(known), 3)
        assert "Connection refused" in (await cluster.line())["error"]

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


def test_unknown_destination_is_requested_once(tmp_path: Path) -> None:
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


def test_an_address_is_requested_again_for_a_pod_that_got_it_later(tmp_path: Path) -> None:
    """The control plane pushes the new pod to proxies that have requested the pod, not its address."""
    clusters: list[Cluster] = []
    there: list[Workload] = []

    async def ask(key: str) -> None:
        clusters[0].mesh.apply(there)

    async def body(cluster: Cluster) -> None:
        clusters.append(cluster)
        await cluster.start(POD)
        cluster.application(SERVER)
        cluster.peer("server", SERVER)
        assert await cluster.dial(f"{SERVER}:{APP_PORT}").ask() == b"ping"
        assert "dst.workload" not in await cluster.line(1), "passed through: there is no such pod yet"
        there.append(REMOTE)
        await asyncio.sleep(VALID_S)  # virtual time
        assert await cluster.dial(f"{SERVER}:{APP_PORT}").ask() == b"ping"
        assert (await cluster.line(2))["dst.workload"] == "server"

    play(tmp_path, body, ask=ask)


def test_on_demand_answer_decides_the_route(tmp_path: Path) -> None:
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


def test_unanswered_on_demand_request_does_not_pass_through(tmp_path: Path) -> None:
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


def test_on_demand_requests_per_connection_are_limited(tmp_path: Path) -> None:
    """A mesh in which each unknown key leads to another one must not cause endless requests."""
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
