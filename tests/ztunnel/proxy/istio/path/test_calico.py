"""Connections of pods where Calico's policies are in force beside those of the mesh."""

import asyncio
from collections.abc import Awaitable, Callable
from ipaddress import ip_network
from pathlib import Path

import pytest

from hbone.aio.connection import Connection
from tests.ztunnel.proxy.istio.inbound_case import (
    ALLOW,
    APP,
    DENY,
    GATED,
    NEAR,
    POD,
    TunnelClient,
    fields,
    refused,
)
from tests.ztunnel.proxy.istio.outbound_case import BY_ADDRESS, WAYPOINT_HOST, waypoint
from tests.ztunnel.proxy.istio.pods import (
    APP_PORT,
    CLIENT,
    ELSEWHERE,
    LOOPS,
    OTHER,
    SERVER,
    Cluster,
    LoopClock,
    WiredSockets,
    endpoint,
    identity,
    play,
    shop,
    workload,
)
from xds.model import calico as c
from ztunnel.policy.calico.evaluator import Evaluator
from ztunnel.policy.calico.guard import results
from ztunnel.policy.calico.live import GRACE_S, LivePolicies
from ztunnel.policy.calico.settings import waypoints
from ztunnel.policy.calico.store import Store
from ztunnel.proxy.istio.accounting.outcome import POLICY_CHANGE
from ztunnel.proxy.istio.path.calico import CalicoInbound, CalicoOutbound
from ztunnel.proxy.istio.path.inbound import Inbound
from ztunnel.proxy.istio.path.outbound import Outbound
from ztunnel.proxy.istio.path.pod import PodProxy
from ztunnel.proxy.istio.settings.config import PodName

REJECTED = "connection closed due to policy rejection: "
IN, OUT = c.PolicyId("GlobalNetworkPolicy", "", "in"), c.PolicyId("GlobalNetworkPolicy", "", "out")
STAGED = c.PolicyId("StagedGlobalNetworkPolicy", "", "soon")
PERMIT, FORBID = c.Rule(c.Action.ALLOW), c.Rule(c.Action.DENY)
PODS = {"client": CLIENT, "server": SERVER}


def inbound(*rules: c.Rule, of: c.PolicyId = IN) -> c.Update:
    return c.PolicyUpdate(of, c.Policy("", rules, ()))


def outbound(*rules: c.Rule) -> c.Update:
    return c.PolicyUpdate(OUT, c.Policy("", (), rules))


def pod(name: str) -> c.Update:
    tier = c.Tier("default", (STAGED, IN), (OUT,))
    return c.EndpointUpdate(
        c.EndpointId("k8s", f"default/{name}", "eth0"), c.Endpoint("", (ip_network(PODS[name]),), (tier,))
    )


class Handed:
    """A source of policies that the test changes."""

    in_sync, error, name, age_s = True, "", "test", 0.0

    def __init__(self, changed: Callable[[], None]) -> None:
        self.evaluator = Evaluator(Store(), connections_only=True)
        self._changed = changed

    def apply(self, *updates: c.Update) -> None:
        for update in updates:
            self.evaluator.apply(update)
        self._changed()

    async def run(self) -> None:
        """The test does what is to be done."""


class CalicoCluster(Cluster):
    """A cluster with policies, which both pods have: everything is permitted at first."""

    handed: Handed
    policies: LivePolicies


def run(
    folder: Path,
    body: Callable[[CalicoCluster], Awaitable[None]],
    loop: str = "virtual",
    *,
    http_waypoints: str = "",
) -> None:
    async def with_policies(made: Cluster) -> None:
        policies = LivePolicies(Handed, LoopClock(), http_waypoints=waypoints(http_waypoints))
        made.node.policies = policies
        made.__class__ = CalicoCluster
        assert isinstance(made, CalicoCluster)
        assert isinstance(policies.source, Handed)
        made.handed, made.policies = policies.source, policies
        made.handed.apply(
            inbound(PERMIT),
            inbound(of=STAGED),
            outbound(PERMIT),
            pod("client"),
            pod("server"),
            c.InSync(),
        )
        reviewing = made.tasks.create_task(policies.run())
        try:
            await body(made)
        finally:
            reviewing.cancel()

    play(folder, with_policies, loop=loop)


async def tunnel_to_server(made: CalicoCluster) -> Connection:
    await made.start(POD)
    made.application(SERVER)
    return await made.tunnels_to("server")


def test_pod_without_calico_policies_has_plain_paths(tmp_path: Path) -> None:
    async def body(made: Cluster) -> None:
        await made.start(POD)
        proxy = made.pods["server"]
        assert type(proxy._inbound) is Inbound
        assert type(proxy._outbound) is Outbound

    play(tmp_path, body)


@pytest.mark.parametrize("loop", LOOPS)
def test_calico_policy_judges_a_tunnel_by_certificate_and_port(tmp_path: Path, loop: str) -> None:
    by_account = c.Rule(
        c.Action.ALLOW,
        source=c.PeerMatch(account_names=("client",)),
        destination=c.PeerMatch(ports=((APP_PORT, APP_PORT),)),
    )

    async def body(made: CalicoCluster) -> None:
        made.handed.apply(inbound(by_account))
        connection = await tunnel_to_server(made)
        try:
            tunnel_client = TunnelClient(made, await connection.open(fields()))
            assert await tunnel_client.end.ask() == b"ping"
            await made.line()
            assert await refused(connection, *fields(f"{SERVER}:9999")) == 401
            line = await made.line(2)
            assert (line["policy.tier"], line["policy.name"], line["policy.rule"]) == (
                "default",
                "GlobalNetworkPolicy/in",
                "end of tier",
            )
            assert line["error"] == f"{REJECTED}denied by default|GlobalNetworkPolicy/in|end of tier"
        finally:
            connection.close()
        other = await made.tunnels_to("server", "somebody")
        try:
            assert await refused(other) == 401
        finally:
            other.close()
        assert made.wire.dialled == [(APP, None)]
        assert made.closed("destination") == {"-": 1, "DENY": 2}
        assert dict(results(made.policies.guard.uses)) == {
            ("default", "GlobalNetworkPolicy/in", "allowed"): 1,
            ("default", "end of tier", "denied"): 2,
        }

    run(tmp_path, body, loop)


def test_requests_of_a_client_in_the_mesh_are_judged_by_calico_policies(tmp_path: Path) -> None:
    """Without Calico's policies such requests have a plan, and no coroutine that would judge them."""

    async def body(made: CalicoCluster) -> None:
        made.mesh.apply([workload("client", CLIENT, node=ELSEWHERE)])
        connection = await tunnel_to_server(made)
        try:
            made.handed.apply(inbound(c.Rule(c.Action.DENY)))
            for _ in range(2):
                assert await refused(connection) == 401
        finally:
            connection.close()
        assert made.wire.dialled == []
        assert made.closed("destination") == {"DENY": 2}

    run(tmp_path, body)


def test_http_rule_allows_no_connection_and_is_logged(tmp_path: Path) -> None:
    async def body(made: CalicoCluster) -> None:
        made.handed.apply(inbound(c.Rule(c.Action.ALLOW, http=c.HttpMatch(methods=("GET",)))))
        connection = await tunnel_to_server(made)
        try:
            assert await refused(connection) == 401
        finally:
            connection.close()
        assert (await made.line())["error"].endswith("rule 0 allows HTTP requests, which are not seen here")

    run(tmp_path, body)


def test_plain_connections_are_judged_by_address_and_have_no_identity(tmp_path: Path) -> None:
    by_account = c.Rule(c.Action.ALLOW, source=c.PeerMatch(account_names=("client",)))
    by_address = c.Rule(c.Action.ALLOW, source=c.PeerMatch(nets=(ip_network("127.9.9.9"),)))

    async def body(made: CalicoCluster) -> None:
        await made.start(POD)
        made.application(SERVER)
        made.handed.apply(inbound(by_account))
        assert await made.plain(f"{SERVER}:{APP_PORT}").ask() == b""
        assert (await made.line())["policy.name"] == "GlobalNetworkPolicy/in"
        made.handed.apply(inbound(by_account, by_address))
        assert await made.plain(f"{SERVER}:{APP_PORT}").ask() == b"ping"
        await made.line(2)

    run(tmp_path, body)


@pytest.mark.parametrize("mesh_allows", [True, False])
@pytest.mark.parametrize("calico_allows", [True, False])
def test_mesh_and_calico_policies_must_both_allow(tmp_path: Path, mesh_allows: bool, calico_allows: bool) -> None:
    async def body(made: CalicoCluster) -> None:
        made.handed.apply(inbound(PERMIT if calico_allows else FORBID))
        connection = await tunnel_to_server(made)
        made.mesh.apply([GATED, ALLOW if mesh_allows else DENY])
        try:
            if mesh_allows and calico_allows:
                assert await TunnelClient(made, await connection.open(fields())).end.ask() == b"ping"
            else:
                assert await refused(connection) == 401
        finally:
            connection.close()

    run(tmp_path, body)


def test_live_connections_end_when_policies_change(tmp_path: Path) -> None:
    async def body(made: CalicoCluster) -> None:
        connection = await tunnel_to_server(made)
        try:
            tunnel_client = TunnelClient(made, await connection.open(fields()))
            await tunnel_client.end.send(b"hello")
            assert await tunnel_client.end.read(5) == b"hello"
            made.handed.apply(inbound(PERMIT, FORBID))
            changes = made.policies.changes
            await made.until(lambda: made.policies.changes > changes)
            await tunnel_client.end.send(b"still")
            assert await tunnel_client.end.read(5) == b"still"
            made.handed.apply(inbound(FORBID))
            assert await tunnel_client.end.read_all() == b""
            assert (await made.line())["error"] == POLICY_CHANGE
        finally:
            connection.close()

    run(tmp_path, body)


def test_a_change_while_a_policy_of_the_mesh_is_awaited_is_not_missed(tmp_path: Path) -> None:
    async def body(made: CalicoCluster) -> None:
        connection = await tunnel_to_server(made)
        made.mesh.apply([GATED])  # names a policy that is not there
        opening = made.tasks.create_task(refused(connection))
        await made.until(lambda: len(made.policies.guard.uses) > 0)
        made.handed.apply(inbound(FORBID))
        made.mesh.apply([ALLOW])
        try:
            assert await opening == 401
        finally:
            connection.close()
        assert (await made.line())["policy.rule"] == "0"

    run(tmp_path, body)


@pytest.mark.parametrize("plain", [False, True])
def test_policy_of_the_mesh_that_arrives_while_calico_policies_are_awaited_applies(
    tmp_path: Path, plain: bool
) -> None:
    async def body(made: CalicoCluster) -> None:
        connection = await tunnel_to_server(made)
        made.handed.apply(c.EndpointUpdate(c.EndpointId("k8s", "default/server", "eth0"), None))
        client = made.plain(f"{SERVER}:{APP_PORT}") if plain else None
        opening = made.tasks.create_task(refused(connection)) if not plain else None
        await made.until(lambda: made.policies._waiting)
        made.mesh.apply([GATED, DENY])
        made.handed.apply(pod("server"))
        if client is not None:
            assert await client.ask() == b""
        if opening is not None:
            assert await opening == 401
        assert (await made.line())["error"] == f"{REJECTED}explicitly denied by: default/gate"
        connection.close()

    run(tmp_path, body)


def test_pod_unknown_to_calico_policies_waits_and_is_denied(tmp_path: Path) -> None:
    async def body(made: CalicoCluster) -> None:
        made.handed.apply(c.EndpointUpdate(c.EndpointId("k8s", "default/server", "eth0"), None))
        connection = await tunnel_to_server(made)
        try:
            began_s = made.node.clock.monotonic()
            assert await refused(connection) == 401
            assert made.node.clock.monotonic() - began_s >= GRACE_S
            line = await made.line()
            assert line["error"] == f"{REJECTED}the policies know no pod with the address {SERVER}"
            opening = made.tasks.create_task(connection.open(fields()))
            await asyncio.sleep(GRACE_S / 2)
            assert not opening.done()
            made.handed.apply(pod("server"))
            (await opening).close()
        finally:
            connection.close()

    run(tmp_path, body)


def test_staged_policies_are_a_field_and_a_count(tmp_path: Path) -> None:
    async def body(made: CalicoCluster) -> None:
        made.handed.apply(inbound(FORBID, of=STAGED))
        connection = await tunnel_to_server(made)
        try:
            assert await TunnelClient(made, await connection.open(fields())).end.ask() == b"ping"
        finally:
            connection.close()
        line = await made.line()
        assert line["policy.dry_run"] == f"denied by default|{STAGED}|rule 0"
        assert dict(results(made.policies.guard.uses))["default", str(STAGED), "staged denied"] == 1

    run(tmp_path, body)


# Outbound

TO_APP = c.Rule(
    c.Action.ALLOW,
    destination=c.PeerMatch(nets=(ip_network(OTHER),), ports=((APP_PORT, APP_PORT),), account_names=("server",)),
)


def test_the_endpoint_that_is_drawn_is_judged_with_the_ports_of_the_application(tmp_path: Path) -> None:
    async def body(made: CalicoCluster) -> None:
        await made.start(NEAR)
        made.mesh.apply([shop(), endpoint("server", OTHER, node=ELSEWHERE)])
        peer = made.peer("server", OTHER)
        made.handed.apply(outbound(TO_APP))
        assert await made.dial("127.1.0.1:80").ask() == b"ping"
        assert len(peer.requests) == 1
        await made.line()
        made.handed.apply(outbound(c.Rule(c.Action.DENY, destination=c.PeerMatch(ports=((8080, 8080),))), PERMIT))
        assert await made.dial("127.1.0.1:80").ask() == b""
        line = await made.line(2)
        assert (line["policy.name"], line["policy.rule"]) == ("GlobalNetworkPolicy/out", "0")
        assert line["error"] == f"{REJECTED}denied by default|GlobalNetworkPolicy/out|rule 0"
        assert len(peer.requests) == 1
        assert made.closed() == {"-": 1, "DENY": 1}

    run(tmp_path, body)


ABOUT_HTTP = c.Rule(c.Action.ALLOW, http=c.HttpMatch(("GET",)))


@pytest.mark.parametrize("known", [True, False])
def test_http_rule_allows_a_connection_to_a_waypoint_that_judges_requests(tmp_path: Path, known: bool) -> None:
    """In front of it, and only there, a rule that allows by HTTP allows a connection; the line names both."""

    async def body(made: CalicoCluster) -> None:
        await made.start(NEAR)
        made.mesh.apply([shop(waypoint=BY_ADDRESS), endpoint("server", SERVER, node=ELSEWHERE), waypoint()])
        made.peer("waypoint", WAYPOINT_HOST)
        made.handed.apply(outbound(ABOUT_HTTP))
        assert await made.dial("127.1.0.1:80").ask() == (b"ping" if known else b"")
        line = await made.line()
        if not known:
            assert (
                "default|GlobalNetworkPolicy/out|rule 0 allows HTTP requests, which are not seen" in line["error"]
            )
            return
        said = "default|GlobalNetworkPolicy/out|rule 0 is about HTTP, left to waypoint default/waypoint"
        assert line["policy.http"] == said
        # Elsewhere the rule allows nothing, also after an answer about the waypoint has been kept.
        made.mesh.apply([shop(), endpoint("server", OTHER, node=ELSEWHERE)])
        made.peer("server", OTHER)
        assert await made.dial("127.1.0.1:80").ask() == b""
        assert "allows HTTP requests" in (await made.line(2))["error"]

    run(tmp_path, body, http_waypoints="default/waypoint" if known else "default/other")


def test_plain_destinations_have_no_identity(tmp_path: Path) -> None:
    async def body(made: CalicoCluster) -> None:
        await made.start(NEAR)
        made.application(OTHER)
        made.handed.apply(outbound(TO_APP))
        assert await made.dial(f"{OTHER}:{APP_PORT}").ask() == b""
        await made.line()
        assert made.wire.dialled == []

    run(tmp_path, body)


@pytest.mark.parametrize("joined", [True, False])
def test_both_ends_close_when_policy_no_longer_allows_the_client(tmp_path: Path, joined: bool) -> None:
    async def body(made: CalicoCluster) -> None:
        await made.start(NEAR, *([POD] if joined else []))
        if joined:
            made.application(SERVER)
        else:
            made.mesh.apply([workload("server", SERVER, node=ELSEWHERE)])
            made.peer("server", SERVER)
        client = made.dial(f"{SERVER}:{APP_PORT}")
        await client.send(b"hello")
        assert await client.read(5) == b"hello"
        made.handed.apply(outbound(FORBID))
        assert await client.read_all() == b""
        await made.until(lambda: len(made.lines()) == (2 if joined else 1))
        line = next(line for line in made.lines() if line["direction"] == "outbound")
        assert line["error"] == POLICY_CHANGE

    run(tmp_path, body)


def test_a_joined_tunnel_is_judged_at_both_ends(tmp_path: Path) -> None:
    async def body(made: CalicoCluster) -> None:
        await made.start(NEAR, POD)
        made.application(SERVER)
        made.handed.apply(inbound(c.Rule(c.Action.ALLOW, source=c.PeerMatch(account_names=("client",)))))
        assert await made.dial(f"{SERVER}:{APP_PORT}").ask() == b"ping"
        await made.line(2)
        made.handed.apply(inbound(FORBID))
        assert await made.dial(f"{SERVER}:{APP_PORT}").ask() == b""
        await made.line(4)
        assert {line["src.identity"] for line in made.lines()} == {identity("client")}
        assert made.closed("destination") == {"-": 1, "DENY": 1}

    run(tmp_path, body)


def test_denials_have_their_own_lines_without_access_lines(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def body(made: CalicoCluster) -> None:
        made.node.logs.change("access=off")
        await made.start(NEAR, POD)
        made.application(SERVER)
        client = made.dial(f"{SERVER}:{APP_PORT}")
        await client.send(b"ping")
        assert await client.read(4) == b"ping"
        made.handed.apply(inbound(FORBID))
        assert await client.read_all() == b""  # ended at both ends
        assert await made.dial(f"{SERVER}:{APP_PORT}").ask() == b""
        made.handed.apply(inbound(PERMIT), outbound(FORBID))
        assert await made.dial(f"{SERVER}:{APP_PORT}").ask() == b""

    with caplog.at_level("INFO", "ztunnel.proxy.istio.path.denial_log"):
        run(tmp_path, body)
    said = [each.getMessage() for each in caplog.records if each.name == "ztunnel.proxy.istio.path.denial_log"]
    told = [[line.split()[1], line.partition(" policy=")[2]] for line in said]
    rule = "rule=0"
    assert told == [
        ["ended", f"default|GlobalNetworkPolicy/in {rule}"],
        ["denied", f"default|GlobalNetworkPolicy/in {rule}"],
        ["denied", f"default|GlobalNetworkPolicy/out {rule}"],
    ]
    assert "src.workload=client.default src.identity=spiffe://" in said[1]
    assert said[2].endswith(f"dst.workload=server.default policy=default|GlobalNetworkPolicy/out {rule}")


def test_ended_pods_are_not_reviewed(tmp_path: Path) -> None:
    async def body(made: CalicoCluster) -> None:
        name = PodName(name="p", namespace="default", service_account="p")
        proxy = PodProxy(made.node, name, WiredSockets(made.node, made.wire, SERVER))
        assert type(proxy._inbound) is CalicoInbound
        assert type(proxy._outbound) is CalicoOutbound
        assert len(made.policies._reviews) == 2
        await proxy.stop()
        assert made.policies._reviews == {}

    run(tmp_path, body)
