"""Explained results equal real ones: random meshes and policies, real proxies and sockets."""

import ipaddress
import json
import tempfile
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, NamedTuple

from hypothesis import given, settings
from hypothesis import strategies as st

from hbone.errors import HboneError
from tests.ztunnel.proxy.istio.inbound_case import TunnelClient, fields
from tests.ztunnel.proxy.istio.pods import (
    APP_PORT,
    CLIENT,
    SHOP,
    VIP,
    Cluster,
    certificate,
    identity,
    pass_on,
    play,
    shop,
    workload,
)
from xds.model.address import SocketAddress
from xds.model.authorization import Action, AuthorizationPolicy, PolicyScope
from xds.model.policy import (
    AllOf,
    Always,
    AnyOf,
    Condition,
    DestinationPort,
    Not,
    PeerNamespace,
    PeerPrincipal,
    PeerServiceAccount,
    SourceIp,
)
from xds.model.service import BalancerMode, LoadBalancing, Scope, Service, WeightedWaypoint
from xds.model.string_match import StringMatch
from xds.model.workload import (
    ApplicationTunnel,
    AppProtocol,
    GatewayAddress,
    Health,
    Locality,
    NetworkAddress,
    PolicyKey,
    Protocol,
    Workload,
)
from ztunnel.proxy.istio.path.explain import Answer, Surroundings, explain, question

Json = dict[str, Any]

OUTSIDE, PLAIN_CLIENT = "127.9.9.9", "127.0.1.9"
WAYPOINTS = {"wp1": "127.0.3.1", "wp2": "127.0.3.2"}
GATEWAYS = {"gw1": "127.0.4.1", "gw2": "127.0.4.2"}
#: Where gateways pass tunnels on to; it shows the identity of ``s``.
FAR = SocketAddress("127.0.6.1", 15008)
HOSTS = [f"127.0.2.{number}" for number in range(1, 5)]
REMOTE, SECURE, DENIED_PORT = "remote", 8443, 15001
DIALS = 3
#: The message of an access line of a connection that never counted as opened.
EARLY = "connection failed"


def named(name: str) -> GatewayAddress:
    """A waypoint or gateway by the address of its workload."""
    return GatewayAddress(NetworkAddress("", (WAYPOINTS | GATEWAYS)[name]), 15008)


# Meshes

_conditions: st.SearchStrategy[Condition] = st.recursive(
    st.sampled_from(
        [
            Always(),
            PeerNamespace(StringMatch("exact", "default")),
            PeerNamespace(),
            PeerPrincipal(),
            PeerServiceAccount("default", "client"),
            PeerServiceAccount("default", "other"),
            SourceIp(ipaddress.ip_network("127.0.1.0/24")),
            SourceIp(ipaddress.ip_network("127.9.0.0/16")),
            DestinationPort(APP_PORT, APP_PORT + 1),
            DestinationPort(SECURE, SECURE + 1),
        ]
    ),
    lambda inner: st.one_of(
        st.builds(Not, inner),
        st.builds(AllOf, st.tuples(inner, inner)),
        st.builds(AnyOf, st.tuples(inner, inner)),
    ),
    max_leaves=3,
)
_policies = st.builds(
    lambda name, namespace, scope, action, condition, dry_run: AuthorizationPolicy(
        name=name,
        namespace=namespace,
        scope=scope,
        action=action,
        condition=condition,
        dry_run=dry_run,
    ),
    st.sampled_from("abcd"),
    st.sampled_from(["default", "default", "other"]),
    st.sampled_from(PolicyScope),
    st.sampled_from(Action),
    _conditions,
    st.sampled_from([False, False, False, True]),
)
_localities = st.sampled_from([Locality(), Locality("r"), Locality("s")])
_named_policies = st.sampled_from([(), (), (PolicyKey("default/a"),), (PolicyKey("default/missing"),)])


class Mesh(NamedTuple):
    """A random mesh."""

    service: Service
    client: Workload
    servers: list[Workload]
    policies: list[AuthorizationPolicy]
    failed: list[bool]
    shortcut: bool


@st.composite
def _servers(draw: st.DrawFn, number: int) -> Workload:
    remote = draw(st.sampled_from([False, False, False, True]))
    more: Json = {}
    if remote:
        gateway = draw(st.sampled_from([None, named("gw1"), named("gw2")]))
        more |= {"network": REMOTE, "network_gateway": gateway}
    return workload(
        f"s{number}",
        HOSTS[number - 1],
        protocol=draw(st.sampled_from([Protocol.HBONE, Protocol.HBONE, Protocol.TCP])),
        services=draw(
            st.sampled_from([{SHOP: {80: APP_PORT}}] * 3 + [{SHOP: {81: APP_PORT}}, {SHOP: {80: DENIED_PORT}}, {}])
        ),
        service_account=draw(st.sampled_from(["s", "client"])),
        trust_domain=draw(st.sampled_from(["cluster.local"] * 5 + ["elsewhere.local"])),
        status=draw(st.sampled_from([Health.HEALTHY, Health.HEALTHY, Health.UNHEALTHY])),
        capacity=draw(st.sampled_from([1, 1, 3, 0])),
        locality=draw(_localities),
        waypoint=draw(st.sampled_from([None, None, None, named("wp1")])),
        authorization_policies=draw(_named_policies),
        **more,
    )


@st.composite
def meshes(draw: st.DrawFn) -> Mesh:
    weighted = st.tuples(
        *(st.builds(WeightedWaypoint, st.just(named(name)), st.integers(0, 2)) for name in WAYPOINTS)
    )
    service = shop(
        ports={80: draw(st.sampled_from([APP_PORT, APP_PORT, 0]))},
        load_balancing=draw(
            st.builds(LoadBalancing, st.sampled_from([(), (Scope.REGION,)]), st.sampled_from(BalancerMode))
        ),
        waypoint=draw(st.sampled_from([None, None, None, named("wp1")])),
        weighted_waypoints=draw(st.one_of(st.just(()), st.just(()), weighted)),
        subject_alt_names=draw(st.sampled_from([(), (identity("s"),), ("no identity",)])),
    )
    servers = [draw(_servers(number)) for number in range(1, 1 + draw(st.integers(0, 4)))]
    return Mesh(
        service=service,
        client=workload("client", CLIENT, locality=draw(_localities)),
        servers=servers,
        policies=draw(st.lists(_policies, max_size=3, unique_by=lambda each: each.key)),
        failed=draw(st.lists(st.booleans(), min_size=len(servers), max_size=len(servers))),
        shortcut=draw(st.booleans()),
    )


# Playing them


def within(mesh: Mesh, body: Callable[[Cluster], Awaitable[None]]) -> None:
    """Run ``body`` on the mesh: every server of this network has a proxy, every gateway and waypoint passes on."""

    async def started(cluster: Cluster) -> None:
        cluster.mesh.apply([mesh.service, *mesh.policies])
        await cluster.start(mesh.client)
        for host in HOSTS:
            for port in (APP_PORT, SECURE, DENIED_PORT):
                cluster.application(host, port)
        for each in mesh.servers:
            if each.network or each.protocol is not Protocol.HBONE:
                cluster.mesh.apply([each])
            else:
                await cluster.start(each)
        for name, host in (WAYPOINTS | GATEWAYS).items():
            cluster.mesh.apply([workload(name, host, native_tunnel=True)])
            peer = cluster.peer(name, host)
            if name in GATEWAYS:
                peer.answer = lambda request: pass_on(cluster, request.accept(), FAR)
        cluster.peer("s", FAR.host)
        await body(cluster)

    with tempfile.TemporaryDirectory() as folder:
        play(Path(folder), started, {"ZTUNNEL_NODE_LOCAL_SHORTCUT": str(mesh.shortcut).lower()})


def around(cluster: Cluster) -> Surroundings:
    """Return the state of the node that the admin server passes to explain."""
    node = cluster.node
    return Surroundings(
        mesh=node.mesh,
        network=node.config.network,
        illegal_ports=node.config.illegal_ports,
        avoided=node.failed_endpoints.current(node.clock.monotonic()),
    )


def asked(cluster: Cluster, source: str, destination: str, identity: str = "", **more: Any) -> Answer:
    there = around(cluster)
    return explain(question(source, destination, identity, there, **more), there)


def refusal_of(way: Answer) -> str:
    return str(way.get("refused") or way.get("inbound", {}).get("refused") or "")


def ways_of(answer: Answer, line: Json) -> list[Answer]:
    """The ways that an access line may have taken: one, unless gateways lead to several workloads."""
    host = line["dst.addr"].rpartition(":")[0]
    return [way for way in answer["ways"] if way.get("target", "").rpartition(":")[0] == host]


async def opened(cluster: Cluster, destination: str) -> tuple[bool, Json, list[Json]]:
    """Dial from the client's pod. Return whether it worked, its access line, and those of the far end."""
    before = len(cluster.lines())
    worked = await cluster.dial(destination).ask() == b"ping"

    def lines() -> list[Json]:
        return cluster.lines()[before:]

    await cluster.until(lambda: any(line["direction"] == "outbound" for line in lines()))
    # The far end writes its own line when its connection is over.
    await cluster.until(lambda: not any(each for pod in cluster.pods.values() for each in pod.dump().values()))
    (own,) = [line for line in lines() if line["direction"] == "outbound"]
    return worked, own, [line for line in lines() if line["direction"] == "inbound"]


async def compared(cluster: Cluster, destination: str) -> None:
    """Ask, connect, compare."""
    answer = asked(cluster, CLIENT, destination)
    worked, line, far = await opened(cluster, destination)
    shown = json.dumps([answer, line, far], indent=1)
    verdict = answer["verdict"]
    if not answer.get("ways"):
        assert (worked, f"refused: {line.get('error')}") == (False, verdict), shown
        return
    ways = ways_of(answer, line)
    last_resorts = [each["workload"] for each in answer.get("left_out", ()) if "if no other" in each["because"]]
    if not ways and any(uid.endswith(f"/{line.get('dst.workload')}") for uid in last_resorts):
        # An endpoint was tried nevertheless, because the chosen one does not lead to the application.
        assert any(refusal_of(way).startswith("503") for way in answer["ways"]), shown
        return
    if verdict == "allowed":
        assert worked, shown
    elif " of " not in verdict:
        assert not worked, shown
    if any("target" not in way and way["refused"] == line.get("error") for way in answer["ways"]):
        assert not worked, shown
        return
    assert ways, shown
    assert len(ways) == 1 or all("gateway" in way for way in ways), shown
    for way in ways:
        refused = refusal_of(way)
        assert worked is not bool(refused), shown
        assert way.get("authority") == line.get("dst.hbone_addr"), shown
        if "gateway" in way:
            continue
        assert way.get("workload", "").rpartition("/")[2] == line.get("dst.workload", ""), shown
        if "authority" in way:
            assert line["src.identity"] == answer["source"]["identity"], shown
            assert line["dst.identity"] in way["peer_must_be"], shown
        if refused:
            # Requests that are no way to the application are answered with a status, which only answers show.
            text = refused.partition(": ")[2] if refused[:3].isdigit() else refused
            assert any(text in each["error"] for each in far), shown


@settings(max_examples=80)
@given(meshes(), st.sampled_from([VIP, VIP, VIP, "127.0.2.1", "127.0.2.2", "127.8.8.8"]))
def test_outbound_connection_behaves_as_explain_predicts(mesh: Mesh, host: str) -> None:
    async def body(cluster: Cluster) -> None:
        cluster.application("127.8.8.8", 80)
        cluster.application(VIP, 80)
        for each, failed in zip(mesh.servers, mesh.failed, strict=True):
            if failed:
                cluster.node.failed_endpoints.add(each.uid, cluster.node.clock.monotonic())
        for _ in range(DIALS):
            await compared(cluster, f"{host}:{80 if not host.startswith('127.0.2') else APP_PORT}")

    within(mesh, body)


#: Clients outside this node: address, and the identity that they present; empty: plain text.
_clients = st.sampled_from(
    [
        (OUTSIDE, ""),
        (PLAIN_CLIENT, ""),
        (CLIENT, identity("client")),
        (CLIENT, identity("other")),
        (OUTSIDE, identity("client")),
        (CLIENT, "spiffe://elsewhere.local/ns/default/sa/client"),
    ]
)
_tunnels_of_applications = st.sampled_from(
    [
        None,
        None,
        ApplicationTunnel(AppProtocol.NONE, SECURE),
        ApplicationTunnel(AppProtocol.PROXY, SECURE),
    ]
)


async def arrived(cluster: Cluster, source: str, shown: str, destination: str) -> bool:
    """Come to the server's pod; whether the application answers."""
    if not shown:
        return await cluster.plain(destination, "s1", source).ask() == b"ping"
    try:
        connection = await cluster.tunnels_to("s1", source=source, shown=certificate(shown), to="s")
    except HboneError:
        return False
    try:
        tunnel = await connection.open(fields(destination))
    except HboneError:
        return False
    else:
        return (await TunnelClient(cluster, tunnel).end.ask()).endswith(b"ping")
    finally:
        connection.close()


@settings(max_examples=80)
@given(
    st.lists(_policies, max_size=4, unique_by=lambda each: each.key),
    _named_policies,
    _tunnels_of_applications,
    st.lists(
        st.tuples(_clients, st.sampled_from([APP_PORT, APP_PORT, SECURE, DENIED_PORT])), min_size=1, max_size=4
    ),
)
def test_inbound_connection_behaves_as_explain_predicts(
    policies: list[AuthorizationPolicy],
    named_policies: tuple[PolicyKey, ...],
    tunnel: ApplicationTunnel | None,
    clients: list[tuple[tuple[str, str], int]],
) -> None:
    server = workload(
        "s1", HOSTS[0], service_account="s", authorization_policies=named_policies, application_tunnel=tunnel
    )
    mesh = Mesh(shop(), workload("client", CLIENT), [server], policies, [False], shortcut=True)

    async def body(cluster: Cluster) -> None:
        cluster.mesh.apply([workload("outside", PLAIN_CLIENT, protocol=Protocol.TCP)])
        cluster.application("127.0.0.1", SECURE)  # where tunnels with a PROXY header go
        for (source, shown), port in clients:
            destination = f"{HOSTS[0]}:{port}"
            answer = asked(cluster, source, destination, shown, inbound=bool(shown))
            before = len(cluster.lines())
            worked = await arrived(cluster, source, shown, destination)
            await cluster.until(lambda before=before: len(cluster.lines()) > before)  # type: ignore[misc]
            (line,) = cluster.lines()[before:]
            told = json.dumps([answer, line], indent=1)
            (way,) = answer.get("ways", [{"inbound": answer.get("inbound", {})}])
            assert worked is (answer["verdict"] == "allowed") is (not refusal_of(way)), told
            if not worked:
                text = refusal_of(way)
                assert (text.partition(": ")[2] if text[:3].isdigit() else text) in line["error"], told
            assert line.get("src.identity") == answer["source"]["identity"] or line["message"] == EARLY, told

    within(mesh, body)
