"""The proxy as a whole on loopback: tunnels from one of its listeners to another, and their certificates."""

import asyncio
import math
from pathlib import Path
from typing import Any

import pytest

from tests.limits import WAIT_S
from tests.ztunnel.proxy.envoy.harness import (
    CLIENT,
    SERVER,
    Harness,
    Identities,
    Json,
    Open,
    access_log,
    application,
    ask,
    chain,
    cluster,
    connect_route,
    http2,
    inbound,
    listener,
    outbound_cluster,
    rbac,
    run,
    tcp,
    tls,
    tunnel,
)
from xds.proto.envoy.config.bootstrap.v3.bootstrap_pb2 import Bootstrap
from xds.proto.envoy.config.cluster.v3.cluster_pb2 import Cluster
from xds.proto.json import parse_value
from ztunnel.proxy.envoy.config.settings import Switches
from ztunnel.proxy.envoy.path.connect import Connector
from ztunnel.proxy.envoy.path.tunnel_pools import TunnelPools


async def limited(harness: Harness, everything: list[tuple[str, Json]], **limits: Any) -> None:
    """Publish it again, with limits of the tunnels' connections in the options of their cluster."""
    await with_options(harness, everything, http2(common_http_protocol_options=limits))


async def with_options(harness: Harness, everything: list[tuple[str, Json]], options: Json) -> None:
    """Publish it again, with other options of the cluster of tunnels."""
    kind, document = outbound_cluster(harness.port("inbound"))
    changed = (kind, {**document, "typed_extension_protocol_options": options})
    harness.publish(*(entry for entry in everything if entry[1].get("name") != "tunnel"), changed)
    await harness.until(lambda: harness.count("cluster_manager.cluster_modified") == 1)


def test_a_tunnel_end_to_end(tmp_path: Path) -> None:
    async def body(harness: Harness) -> None:
        async with application(b"hi ") as port:
            await tunnel(harness, port, Identities(), rbac(CLIENT), access_log=access_log(tmp_path))
            assert await ask(harness.port("l"), b"there") == b"hi there"
            assert await ask(harness.port("l"), b"x" * 1_000_000) == b"hi " + b"x" * 1_000_000
            assert harness.count("cluster.tunnel.upstream_rq_total") == 2
            assert harness.count("cluster.tunnel.ssl.handshake") == 1  # one connection carried both
            assert harness.count("cluster.tunnel.upstream_cx_total") == 1
            assert harness.count("cluster.tunnel.upstream_cx_http2_total") == 1
            assert harness.count("http.inbound.downstream_rq_completed") == 2
            assert harness.count("http.inbound.downstream_cx_ssl_active") == 1
            assert harness.count("http.inbound.downstream_rq_2xx") == 2

    run(tmp_path, body)


@pytest.mark.parametrize(("idle", "timeout_s"), [("0.2s", 0.2), ("0s", math.inf), (None, 3600)])
def test_idle_tunnel_connection_ends_at_the_idle_timeout_of_its_cluster(
    tmp_path: Path, idle: str | None, timeout_s: float
) -> None:
    """0 is never, and Envoy's default an hour."""

    async def body(harness: Harness) -> None:
        async with application(b"hi ") as port:
            everything = await tunnel(harness, port, Identities())
            if idle is not None:
                await limited(harness, everything, idle_timeout=idle)
            assert await ask(harness.port("l"), b"there") == b"hi there"
            (pool,) = harness.proxy.connector.tunnels.pools.values()
            assert pool.settings.idle_timeout_s == timeout_s
            prefix = "cluster.tunnel.upstream_cx_"
            if timeout_s < 1:
                await harness.until(lambda: not pool.statistics.connections)
                await harness.until(lambda: harness.count(prefix + "destroy_local") == 1)
                assert harness.count(prefix + "destroy") == harness.count(prefix + "total") == 1
                assert harness.count(prefix + "destroy_with_active_rq") == harness.count(prefix + "active") == 0
            else:
                assert pool.statistics.connections == harness.count(prefix + "active") == 1

    run(tmp_path, body)


def test_tunnel_connection_obeys_the_stream_limits_of_its_cluster(tmp_path: Path) -> None:
    async def body(harness: Harness) -> None:
        async with application(b"hi ") as port:
            everything = await tunnel(harness, port, Identities())
            await limited(harness, everything, max_requests_per_connection=2)
            for _ in range(5):
                assert await ask(harness.port("l"), b"there") == b"hi there"
            assert harness.count("cluster.tunnel.ssl.handshake") == 3

    run(tmp_path, body)


@pytest.mark.parametrize(("most", "connections"), [(1, 4), (2, 2), (4, 1)])
def test_a_tunnel_connection_carries_at_most_max_concurrent_streams(
    tmp_path: Path, most: int, connections: int
) -> None:
    async def body(harness: Harness) -> None:
        async with application() as port:
            everything = await tunnel(harness, port, Identities())
            options = {"http2_protocol_options": {"allow_connect": True, "max_concurrent_streams": most}}
            await with_options(harness, everything, http2(explicit_http_config=options))
            clients = []
            for _ in range(4):
                client = await Open.to(harness.port("l"))
                assert await client.say(b"ping") == b"ping"
                clients.append(client)
            assert harness.count("cluster.tunnel.ssl.handshake") == connections
            for client in clients:
                await client.close()

    run(tmp_path, body)


@pytest.mark.parametrize(("size", "answer"), [(100, b"hi there"), (1100, b"")])
def test_connection_manager_limits_the_size_of_request_heads(tmp_path: Path, size: int, answer: bytes) -> None:
    async def body(harness: Harness) -> None:
        async with application(b"hi ") as port:
            everything = await tunnel(harness, port, Identities())
            name, document = inbound({"route_config": connect_route("app")})
            document["filter_chains"][0]["filters"][-1]["typed_config"]["max_request_headers_kb"] = 1
            rest = [entry for entry in everything if entry[1].get("name") not in ("inbound", "l")]
            more = [{"header": {"key": "x", "value": "v" * size}}]
            filters = tcp("tunnel", tunneling_config={"hostname": "app:80", "headers_to_add": more})
            harness.publish(*rest, (name, document), listener(chain(filters)))
            await harness.until(lambda: harness.count("listener_manager.listener_in_place_updated") >= 1)
            await harness.until(lambda: harness.count("listener_manager.total_listeners_draining") == 0)
            assert await ask(harness.port("l"), b"there") == answer
            assert harness.count("http.inbound.downstream_rq_total") == bool(answer)

    run(tmp_path, body)


def test_denied_identity_sends_no_byte_through(tmp_path: Path) -> None:
    async def body(harness: Harness) -> None:
        async with application(b"secret") as port:
            log = access_log(tmp_path)
            await tunnel(harness, port, Identities(), rbac("spiffe://td/ns/a/sa/else"), access_log=log)
            assert await ask(harness.port("l")) == b""
            assert harness.count("tcp.rbac.denied") == 1
            assert harness.count("cluster.app.upstream_cx_total") == 0
            (line,) = await harness.log()
            assert line["flags"] == "UF,URX"

    # An attempt that first bytes went along with is final, and whether they do depends on when they come.
    run(tmp_path, body, switches=Switches(early_data=False))


@pytest.mark.parametrize("ports", [True, False])
def test_port_policies_judge_the_application_unless_envoy_compat(tmp_path: Path, ports: bool) -> None:
    async def body(harness: Harness) -> None:
        async with application() as port:
            await tunnel(harness, port, Identities(), rbac(CLIENT), deny_port(port))
            answer = await ask(harness.port("l"))
            if ports:
                assert answer == b""
                assert harness.count("cluster.app.upstream_cx_total") == 0
                assert harness.count("http.inbound.downstream_rq_4xx") == 1
            else:
                assert answer == b"ping"  # Envoy compares with the tunnel's own port

    run(tmp_path, body, switches=Switches(judge_ports=ports, check_authority=False))


def deny_port(port: int) -> Json:
    """An RBAC filter that denies one destination port."""
    filter_ = rbac(None, "DENY")
    policy = filter_["typed_config"]["rules"]["policies"]["rule"]
    policy["permissions"] = [{"destination_port": port}]
    return filter_


def test_rotation_serves_new_connections_and_leaves_live_tunnels(tmp_path: Path) -> None:
    async def body(harness: Harness) -> None:
        async with application() as port:
            identities = Identities()
            everything = await tunnel(harness, port, identities)
            first = await Open.to(harness.port("l"))
            assert await first.say(b"a") == b"a"
            kept = [entry for entry in everything if entry[1]["name"] not in (CLIENT, SERVER)]
            updates = "cluster.tunnel.client_ssl_socket_factory.ssl_context_update_by_sds"
            before = harness.count(updates)
            harness.publish(*kept, identities.secret(CLIENT), identities.secret(SERVER))
            await harness.until(lambda: harness.count(updates) == before + 1)
            assert await ask(harness.port("l")) == b"ping"
            assert harness.count("cluster.tunnel.ssl.handshake") == 2
            assert await first.say(b"b") == b"b"
            await first.close()

    run(tmp_path, body)


def test_broken_secret_is_refused_and_the_last_good_version_serves(tmp_path: Path) -> None:
    async def body(harness: Harness) -> None:
        async with application() as port:
            everything = await tunnel(harness, port, Identities())
            kept = [entry for entry in everything if entry[1]["name"] != SERVER]
            certificate = {"certificate_chain": {"inline_string": "x"}, "private_key": {"inline_string": "s3cret"}}
            harness.publish(*kept, ("secret", {"name": SERVER, "tls_certificate": certificate}))
            await harness.until(lambda: any(error for kind, error in harness.answers if kind == "Secret"))
            error = next(error for kind, error in harness.answers if kind == "Secret" and error)
            assert "certificate_chain: no certificate in PEM" in error
            assert "s3cret" not in error
            assert await ask(harness.port("l")) == b"ping"

    run(tmp_path, body)


def test_a_server_of_another_trust_domain_is_refused(tmp_path: Path) -> None:
    async def body(harness: Harness) -> None:
        async with application() as port:
            identities = Identities()
            everything = await tunnel(harness, port, identities, access_log=access_log(tmp_path))
            foreign = identities.authority.issue("spiffe://other/ns/a/sa/server")
            secret = {
                "name": SERVER,
                "tls_certificate": {
                    "certificate_chain": {"inline_string": foreign.chain_pem.decode()},
                    "private_key": {"inline_string": foreign.key_pem.decode()},
                },
            }
            updates = "listener.127.0.0.1_0.server_ssl_socket_factory.ssl_context_update_by_sds"
            before = harness.count(updates)
            harness.publish(*[e for e in everything if e[1]["name"] != SERVER], ("secret", secret))
            await harness.until(lambda: harness.count(updates) > before)
            assert await ask(harness.port("l")) == b""
            (line,) = await harness.log()
            assert "SAN_matcher" in line["failure"]

    run(tmp_path, body)


def test_routes_come_by_rds(tmp_path: Path) -> None:
    async def body(harness: Harness) -> None:
        async with application() as port:
            identities = Identities()
            secrets = [identities.secret(CLIENT), identities.secret(SERVER), identities.root()]
            end = inbound({"rds": {"route_config_name": "routes", "config_source": {"ads": {}}}})
            routes = ("route", connect_route("app"))
            await harness.published(end, cluster(port), routes, *secrets)
            await harness.until(lambda: harness.proxy.listeners.active)
            tunnelling = tcp("tunnel", tunneling_config={"hostname": "app:80"})
            rest = [
                listener(chain(tunnelling)),
                cluster(port),
                outbound_cluster(harness.port("inbound")),
                *secrets,
            ]
            await harness.published(end, routes, *rest)
            await harness.until(lambda: len(harness.proxy.listeners.active) == 2)
            assert await ask(harness.port("l")) == b"ping"
            harness.publish(end, ("route", {"name": "routes"}), *rest)
            await harness.until(lambda: sum(kind == "RouteConfiguration" for kind, _ in harness.answers) >= 2)
            assert await ask(harness.port("l")) == b""
            assert harness.count("http.inbound.no_route") == 1

    run(tmp_path, body)


def test_secrets_over_a_stream_of_their_own(tmp_path: Path) -> None:
    """``api_config_source`` to a static cluster on a Unix socket, as a node agent serves SDS."""

    def extend(bootstrap: Bootstrap) -> None:
        address = {"pipe": {"path": f"{tmp_path}/xds"}}
        assignment = {
            "cluster_name": "sds-grpc",
            "endpoints": [{"lb_endpoints": [{"endpoint": {"address": address}}]}],
        }
        document = {"name": "sds-grpc", "type": "STATIC", "load_assignment": assignment}
        bootstrap.static_resources.clusters.append(parse_value(document, Cluster).message)

    source = {
        "api_config_source": {"api_type": "GRPC", "grpc_services": [{"envoy_grpc": {"cluster_name": "sds-grpc"}}]}
    }

    async def body(harness: Harness) -> None:
        async with application() as port:
            identities = Identities()
            served = chain(tcp(), transport_socket=tls(SERVER, server=True, source=source))
            dialling = cluster(1, name="c", transport_socket=tls(CLIENT, server=False, source=source))
            secrets = [identities.secret(CLIENT), identities.secret(SERVER), identities.root()]
            await harness.published(listener(served, name="inbound"), cluster(port), dialling, *secrets)
            await harness.until(lambda: harness.proxy.listeners.active)
            dialling = cluster(
                harness.port("inbound"), name="c", transport_socket=tls(CLIENT, server=False, source=source)
            )
            await harness.published(
                listener(served, name="inbound"), listener(chain(tcp("c"))), cluster(port), dialling, *secrets
            )
            await harness.until(lambda: len(harness.proxy.listeners.active) == 2)
            await harness.until(lambda: harness.count("cluster_manager.warming_clusters") == 0)
            assert await ask(harness.port("l"), b"over TLS without HTTP/2") == b"over TLS without HTTP/2"

    run(tmp_path, body, extend=extend)


class Held:
    """Holds the first call of a coroutine function for ever; later calls run."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, owner: type, name: str) -> None:
        self.reached = asyncio.Event()
        self.release = asyncio.Event()
        called = getattr(owner, name)

        async def call(*arguments: Any) -> Any:
            if not self.reached.is_set():
                self.reached.set()
                await self.release.wait()
            return await called(*arguments)

        monkeypatch.setattr(owner, name, call)


@pytest.mark.parametrize("removed", [False, True], ids=["replaced", "removed"])
def test_tunnel_that_waits_for_its_connection_continues_at_a_new_version_of_its_cluster(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, removed: bool
) -> None:
    """A new version of the cluster drains the pool of the old one, which must not fail connections."""

    async def body(harness: Harness) -> None:
        async with application() as port:
            everything = await tunnel(harness, port, Identities(), access_log=access_log(tmp_path))
            held = Held(monkeypatch, TunnelPools, "_dial_tunnel")
            opened = await Open.to(harness.port("l"))
            opened.write(b"there")
            await asyncio.wait_for(held.reached.wait(), WAIT_S)
            if removed:
                harness.publish(*(entry for entry in everything if entry[1].get("name") != "tunnel"))
                assert await opened.ended()
                assert (await harness.log())[0]["flags"] == "NC"
            else:
                await limited(harness, everything, idle_timeout="5s")
                assert await opened.read(5) == b"there"
                assert harness.count("cluster.tunnel.upstream_cx_connect_fail") == 0
            await opened.close()

    run(tmp_path, body)


def test_attempts_after_a_change_use_the_new_version_of_the_cluster(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in Envoy. A retired cluster would also keep the pool that such an attempt opened."""

    async def body(harness: Harness) -> None:
        async with application() as port:
            everything = await tunnel(harness, port, Identities(), max_connect_attempts=2)
            kind, document = outbound_cluster(1)  # nothing listens there
            changed = [entry for entry in everything if entry[1].get("name") != "tunnel"]
            harness.publish(*changed, (kind, document))
            await harness.until(lambda: harness.count("cluster_manager.cluster_modified") == 1)
            held = Held(monkeypatch, Connector, "_back_off")
            opened = await Open.to(harness.port("l"))
            opened.write(b"there")
            await asyncio.wait_for(held.reached.wait(), WAIT_S)
            harness.publish(*everything)
            await harness.until(lambda: harness.count("cluster_manager.cluster_modified") == 2)
            held.release.set()
            assert await opened.read(5) == b"there"
            clusters = harness.proxy.clusters
            assert [clusters.get(each.model.name) for each in harness.proxy.connector.tunnels.pools] == [
                clusters.get("tunnel")
            ]
            await opened.close()

    run(tmp_path, body)
