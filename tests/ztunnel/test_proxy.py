"""The proxy as a whole on loopback: traffic, updates, refusals, rotation, drain."""

import asyncio
import math
import time
from pathlib import Path
from typing import Any

import pytest

from tests.ztunnel.rig import (
    Identities,
    Json,
    Open,
    Rig,
    T,
    access_log,
    application,
    ask,
    chain,
    cluster,
    connect_route,
    connection_manager,
    endpoint,
    http2,
    listener,
    rbac,
    run,
    tcp,
    tls,
)
from xds.proto.envoy.config.bootstrap.v3.bootstrap_pb2 import Bootstrap
from xds.proto.envoy.config.cluster.v3.cluster_pb2 import Cluster
from xds.proto.json import parse_value
from ztunnel.config import Switches

CLIENT, SERVER = "spiffe://td/ns/a/sa/client", "spiffe://td/ns/a/sa/server"


def test_bytes_pass_and_are_counted_and_logged(tmp_path: Path) -> None:
    async def body(rig: Rig) -> None:
        async with application(b"hello ") as port:
            await rig.published(listener(chain(tcp(access_log=access_log(tmp_path)))), cluster(port))
            assert await ask(rig.port("l"), b"world") == b"hello world"
            (line,) = await rig.log()
            assert (line["received"], line["sent"], line["cluster"], line["chain"]) == (5, 11, "app", "one")
            assert rig.count("tcp.p.downstream_cx_rx_bytes_total") == 5
            assert rig.count("cluster.app.upstream_cx_total") == 1
            await rig.until(lambda: rig.count("cluster.app.upstream_cx_active") == 0)

    run(tmp_path, body)


@pytest.mark.parametrize(
    ("resources", "flags"),
    [
        ((listener(chain(tcp("gone"))), cluster()), "NC"),
        ((listener(), cluster()), "UH"),
        ((listener(), cluster(1)), "UF,URX"),
    ],
)
def test_what_cannot_be_reached_is_closed_with_its_flag(
    tmp_path: Path, resources: tuple[tuple[str, Json], ...], flags: str
) -> None:
    kind, document = resources[0]
    document["filter_chains"][0]["filters"][0]["typed_config"]["access_log"] = access_log(tmp_path)

    async def body(rig: Rig) -> None:
        assert await ask(rig.port("l")) == b""
        (line,) = await rig.log()
        assert line["flags"] == flags

    run(tmp_path, body, (kind, document), *resources[1:])


def test_another_attempt_goes_to_another_endpoint(tmp_path: Path) -> None:
    async def body(rig: Rig) -> None:
        async with application() as port:
            await rig.published(listener(chain(tcp(max_connect_attempts=2))), cluster(1, port))
            assert [await ask(rig.port("l")) for _ in range(4)] == [b"ping"] * 4
            assert rig.count("cluster.app.upstream_cx_connect_fail") > 0

    run(tmp_path, body)


def test_a_full_breaker_refuses(tmp_path: Path) -> None:
    breaker = {"circuit_breakers": {"thresholds": [{"max_connections": 1}]}}

    async def body(rig: Rig) -> None:
        async with application() as port:
            log = access_log(tmp_path)
            await rig.published(listener(chain(tcp(access_log=log))), cluster(port, **breaker))
            first = await Open.to(rig.port("l"))
            assert await first.say(b"a") == b"a"
            assert await ask(rig.port("l")) == b""
            (line,) = await rig.log()
            assert line["flags"] == "UO"
            assert await first.say(b"b") == b"b"
            await first.close()
            await rig.until(lambda: rig.count("cluster.app.upstream_cx_active") == 0)
            assert await ask(rig.port("l")) == b"ping"

    run(tmp_path, body)


def test_a_burst_waits_for_connections_up_to_the_breakers_limit(tmp_path: Path) -> None:
    breaker = {"circuit_breakers": {"thresholds": [{"max_pending_requests": 0}]}}

    async def body(rig: Rig) -> None:
        async with application() as port:
            await rig.published(listener(chain(tcp(access_log=access_log(tmp_path)))), cluster(port, **breaker))
            assert await ask(rig.port("l")) == b""
            (line,) = await rig.log()
            assert line["flags"] == "UO"
            assert rig.count("cluster.app.upstream_rq_pending_overflow") == 1

    run(tmp_path, body)


def internal_cluster(name: str, leads_to: str) -> tuple[str, Json]:
    """A cluster of one internal listener, to which it passes on what may be."""
    kind = f"{T}envoy.extensions.transport_sockets"
    raw = {"name": "raw", "typed_config": {"@type": f"{kind}.raw_buffer.v3.RawBuffer"}}
    socket = {"@type": f"{kind}.internal_upstream.v3.InternalUpstreamTransport", "transport_socket": raw}
    there = {"endpoint": {"address": {"envoy_internal_address": {"server_listener_name": leads_to}}}}
    assignment = {"cluster_name": name, "endpoints": [{"lb_endpoints": [there]}]}
    passing = {"transport_socket": {"name": "internal", "typed_config": socket}}
    return "cluster", {"name": name, "type": "STATIC", "load_assignment": assignment, **passing}


def test_filter_state_goes_on_as_far_as_it_is_shared(tmp_path: Path) -> None:
    """ONCE through one internal connection, TRANSITIVE through all, NONE through none (Envoy's StreamSharing)."""
    kinds = ("NONE", "ONCE", "TRANSITIVE")
    values = [
        {"object_key": kind, "shared_with_upstream": kind, "format_string": {"text_format": kind.lower()}}
        for kind in kinds
    ]
    config = T + "envoy.extensions.filters.network.set_filter_state.v3.Config"
    sets = {"name": "state", "typed_config": {"@type": config, "on_new_connection": values}}

    def logged(name: str) -> list[Json]:
        (log,) = access_log(tmp_path)
        fields = {kind: f"%FILTER_STATE({kind}:PLAIN)%" for kind in kinds}
        log["typed_config"]["log_format"] = {"json_format": {"at": name, **fields}}
        return [log]

    def inside(name: str, leads_to: str) -> tuple[str, Json]:
        kind, document = listener(chain(tcp(leads_to, access_log=logged(name))), name=name, internal_listener={})
        del document["address"]
        return kind, document

    async def body(rig: Rig) -> None:
        async with application() as port:
            await rig.published(
                listener(chain(sets, tcp("to-first", access_log=logged("l")))),
                inside("first", "to-second"),
                inside("second", "app"),
                internal_cluster("to-first", "first"),
                internal_cluster("to-second", "second"),
                cluster(port),
            )
            assert await ask(rig.port("l")) == b"ping"
            lines = {line.pop("at"): line for line in await rig.log(3)}
            assert lines == {
                "l": {"NONE": "none", "ONCE": "once", "TRANSITIVE": "transitive"},
                "first": {"NONE": None, "ONCE": "once", "TRANSITIVE": "transitive"},
                "second": {"NONE": None, "ONCE": None, "TRANSITIVE": "transitive"},
            }

    run(tmp_path, body)


def test_failing_hosts_are_ejected(tmp_path: Path) -> None:
    outlier = {"outlier_detection": {"consecutive_5xx": 2, "max_ejection_percent": 50}}

    async def body(rig: Rig) -> None:
        async with application() as port:
            await rig.published(listener(), cluster(1, port, **outlier))
            for _ in range(8):
                await ask(rig.port("l"))
            assert [await ask(rig.port("l")) for _ in range(6)] == [b"ping"] * 6

    run(tmp_path, body)


def test_an_idle_connection_ends(tmp_path: Path) -> None:
    async def body(rig: Rig) -> None:
        async with application() as port:
            filters = tcp(idle_timeout="0.2s", access_log=access_log(tmp_path))
            await rig.published(listener(chain(filters)), cluster(port))
            connection = await Open.to(rig.port("l"))
            assert await connection.say(b"a") == b"a"
            assert await connection.ended()
            await connection.close()
            (line,) = await rig.log()
            assert line["details"] == "tcp_session_idle_timeout"
            assert rig.count("tcp.p.idle_timeout") == 1

    run(tmp_path, body)


def test_names_resolve(tmp_path: Path) -> None:
    async def body(rig: Rig) -> None:
        async with application() as port:
            address = {"socket_address": {"address": "localhost", "port_value": port}}
            assignment = {
                "cluster_name": "app",
                "endpoints": [{"lb_endpoints": [{"endpoint": {"address": address}}]}],
            }
            document = {"name": "app", "type": "STRICT_DNS", "load_assignment": assignment}
            await rig.published(listener(), ("cluster", document))
            assert await ask(rig.port("l")) == b"ping"

    run(tmp_path, body)


# Updates


def test_a_change_of_chains_keeps_connections_of_unchanged_ones(tmp_path: Path) -> None:
    ours = {"filter_chain_match": {"source_prefix_ranges": [{"address_prefix": "127.0.0.0", "prefix_len": 8}]}}

    async def body(rig: Rig) -> None:
        async with application() as port:
            await rig.published(listener(chain(**ours)), cluster(port))
            first, before = await Open.to(rig.port("l")), rig.port("l")
            assert await first.say(b"a") == b"a"
            other = {"name": "two", "filters": [tcp()]}
            await rig.published(listener(chain(**ours), other), cluster(port))
            await rig.until(lambda: rig.count("listener_manager.listener_in_place_updated") == 1)
            assert rig.port("l") == before
            assert await first.say(b"b") == b"b"
            await asyncio.sleep(1.2)  # past the drain time: it was not draining
            assert await first.say(b"c") == b"c"
            await first.close()

    run(tmp_path, body)


def test_any_other_change_makes_a_new_listener_and_drains_the_old(tmp_path: Path) -> None:
    async def body(rig: Rig) -> None:
        async with application() as port:
            await rig.published(listener(), cluster(port))
            first = await Open.to(rig.port("l"))
            assert await first.say(b"a") == b"a"
            await rig.published(listener(listener_filters_timeout="3s"), cluster(port))
            await rig.until(lambda: rig.count("listener_manager.listener_modified") == 1)
            assert rig.count("listener_manager.total_listeners_draining") == 1
            assert await first.say(b"b") == b"b"
            assert await ask(rig.port("l")) == b"ping"
            assert await first.ended()  # the drain time is over
            await first.close()
            await rig.until(lambda: rig.count("listener_manager.total_listeners_draining") == 0)

    run(tmp_path, body)


@pytest.mark.parametrize(
    ("prefix", "scope"), [("tcp.", "tcp.rbac.istio_dry_run_deny_."), ("mesh", "mesh.rbac.istio_dry_run_deny_.")]
)
def test_shadow_rules_are_counted_and_not_enforced(tmp_path: Path, prefix: str, scope: str) -> None:
    async def body(rig: Rig) -> None:
        async with application() as port:
            judging = rbac(None, "DENY")
            config = judging["typed_config"]
            config["shadow_rules"] = config.pop("rules")
            config |= {"stat_prefix": prefix, "shadow_rules_stat_prefix": "istio_dry_run_deny_"}
            await rig.published(listener(chain(judging, tcp())), cluster(port))
            assert await ask(rig.port("l")) == b"ping"
            assert rig.count(scope + "shadow_denied") == 1
            assert rig.count(scope + "shadow_allowed") == 0
            config["shadow_rules"]["action"] = "ALLOW"
            await rig.published(listener(chain(judging, tcp())), cluster(port))
            assert await ask(rig.port("l")) == b"ping"
            assert rig.count(scope + "shadow_allowed") == 1

    run(tmp_path, body)


def test_a_policy_that_no_longer_allows_cuts_live_connections(tmp_path: Path) -> None:
    async def body(rig: Rig) -> None:
        async with application() as port:
            log = access_log(tmp_path)
            await rig.published(listener(chain(rbac(None), tcp(access_log=log))), cluster(port))
            first = await Open.to(rig.port("l"))
            assert await first.say(b"a") == b"a"
            began = time.monotonic()
            await rig.published(listener(chain(rbac(CLIENT), tcp(access_log=log))), cluster(port))
            assert await first.ended()
            assert time.monotonic() - began < 0.9  # not by the end of the drain
            await first.close()
            assert await ask(rig.port("l")) == b""
            lines = await rig.log(2)
            assert "policy_change:_rbac_access_denied_matched_policy[none]" in lines[0]["details"]
            assert lines[1]["details"] == "rbac_access_denied_matched_policy[none]"
            assert rig.count("tcp.rbac.denied") >= 1

    run(tmp_path, body)


def test_a_refused_listener_leaves_the_last_good_one_and_its_neighbours(tmp_path: Path) -> None:
    async def body(rig: Rig) -> None:
        async with application() as port:
            assert await rig.published(listener(), cluster(port)) is None
            bad = listener(chain(tcp(on_demand={})))
            error = await rig.published(bad, listener(name="second"), cluster(port))
            assert error is not None
            assert error.startswith(
                "Error adding/updating listener(s) l: filter_chains[0].filters[0].typed_config.on_demand:"
            )
            await rig.until(lambda: any(found.name == "second" for found in rig.proxy.listeners.active))
            assert await ask(rig.port("l")) == b"ping"
            assert await ask(rig.port("second")) == b"ping"
            assert rig.proxy.listeners.failures["l"].details in error
            assert await rig.published(listener(), cluster(port)) is None
            assert rig.proxy.listeners.failures == {}

    run(tmp_path, body)


def test_a_refused_cluster_leaves_the_last_good_one(tmp_path: Path) -> None:
    async def body(rig: Rig) -> None:
        async with application() as port:
            await rig.published(listener(), cluster(port))
            rig.publish(listener(), cluster(port, connect_timeout="0s"))
            await rig.until(lambda: any(error for kind, error in rig.answers if kind == "Cluster"))
            error = next(error for kind, error in rig.answers if kind == "Cluster" and error)
            assert error.startswith("Error adding/updating cluster(s) app: connect_timeout: Proto constraint")
            assert await ask(rig.port("l")) == b"ping"

    run(tmp_path, body)


def test_a_removed_listener_stops_at_once_and_drains(tmp_path: Path) -> None:
    async def body(rig: Rig) -> None:
        async with application() as port:
            await rig.published(listener(), listener(name="other"), cluster(port))
            number = rig.port("l")
            first = await Open.to(number)
            assert await first.say(b"a") == b"a"
            await rig.published(listener(name="other"), cluster(port))
            with pytest.raises(ConnectionRefusedError):
                await ask(number)
            assert await first.say(b"b") == b"b"
            await first.close()

    run(tmp_path, body)


def test_a_changed_cluster_takes_new_connections_and_leaves_old_ones(tmp_path: Path) -> None:
    async def body(rig: Rig) -> None:
        async with application(b"1") as one, application(b"2") as two:
            await rig.published(listener(), cluster(one))
            first = await Open.to(rig.port("l"))
            assert await first.say(b"a") == b"1"
            rig.publish(listener(), cluster(two))
            await rig.until(lambda: rig.count("cluster_manager.cluster_modified") == 1)
            await rig.until(lambda: rig.count("cluster_manager.warming_clusters") == 0)
            assert await ask(rig.port("l"), b"") == b"2"
            assert await first.say(b"b") == b"a"
            await first.close()

    run(tmp_path, body)


def test_endpoints_arrive_and_change_over_eds(tmp_path: Path) -> None:
    def endpoints(port: int) -> tuple[str, Json]:
        return "endpoints", {"cluster_name": "app", "endpoints": [{"lb_endpoints": [endpoint(port)]}]}

    document = {"name": "app", "type": "EDS", "eds_cluster_config": {"eds_config": {"ads": {}}}}

    async def body(rig: Rig) -> None:
        async with application(b"1") as one, application(b"2") as two:
            await rig.published(listener(), ("cluster", document), endpoints(one))
            assert await ask(rig.port("l"), b"") == b"1"
            rig.publish(listener(), ("cluster", document), endpoints(two))
            await rig.until(lambda: rig.count("cluster.app.update_success") == 2)
            assert await ask(rig.port("l"), b"") == b"2"
            rig.publish(
                listener(),
                ("cluster", document),
                (
                    "endpoints",
                    {
                        "cluster_name": "app",
                        "endpoints": [{"lb_endpoints": [endpoint(two, load_balancing_weight=0)]}],
                    },
                ),
            )
            await rig.until(lambda: rig.count("cluster.app.update_rejected") == 1)
            assert await ask(rig.port("l"), b"") == b"2"

    run(tmp_path, body)


def test_traffic_goes_on_while_the_control_plane_is_away(tmp_path: Path) -> None:
    async def body(rig: Rig) -> None:
        async with application() as port:
            await rig.published(listener(), cluster(port))
            await rig.server.__aexit__(None, None, None)
            await rig.until(lambda: rig.count("control_plane.connected_state") == 0)
            assert await ask(rig.port("l")) == b"ping"
            (tmp_path / "xds").unlink(missing_ok=True)
            await rig.server.__aenter__()
            before = len(rig.answers)
            await rig.until(lambda: len(rig.answers) > before)
            assert await ask(rig.port("l")) == b"ping"

    run(tmp_path, body)


# Tunnels, certificates


def inbound(target: Json, *filters: Json) -> tuple[str, Json]:
    """A listener that ends tunnels for identity SERVER."""
    return listener(
        chain(*filters, connection_manager(target), transport_socket=tls(SERVER, server=True)), name="inbound"
    )


def outbound_cluster(port: int) -> tuple[str, Json]:
    more: dict[str, Any] = {
        "transport_socket": tls(CLIENT, server=False),
        "typed_extension_protocol_options": http2(),
    }
    return cluster(port, name="tunnel", **more)


async def tunnel(
    rig: Rig, port: int, identities: Identities, *filters: Json, **log: Any
) -> list[tuple[str, Json]]:
    """Both ends of a tunnel in one proxy, with SERVER's policy ``filters``; published."""
    secrets = [identities.secret(CLIENT), identities.secret(SERVER), identities.root()]
    end = inbound({"route_config": connect_route("app")}, *filters)
    await rig.published(end, cluster(port), *secrets)
    await rig.until(lambda: rig.proxy.listeners.active)
    tunnelling = tcp("tunnel", tunneling_config={"hostname": "app:80"}, **log)
    everything = [
        end,
        listener(chain(tunnelling)),
        cluster(port),
        outbound_cluster(rig.port("inbound")),
        *secrets,
    ]
    await rig.published(*everything)
    await rig.until(lambda: len(rig.proxy.listeners.active) == 2)
    return everything


def test_a_tunnel_end_to_end(tmp_path: Path) -> None:
    async def body(rig: Rig) -> None:
        async with application(b"hi ") as port:
            await tunnel(rig, port, Identities(), rbac(CLIENT), access_log=access_log(tmp_path))
            assert await ask(rig.port("l"), b"there") == b"hi there"
            assert await ask(rig.port("l"), b"x" * 1_000_000) == b"hi " + b"x" * 1_000_000
            assert rig.count("cluster.tunnel.upstream_rq_total") == 2
            assert rig.count("cluster.tunnel.ssl.handshake") == 1  # one connection carried both
            assert rig.count("http.inbound.downstream_rq_2xx") == 2

    run(tmp_path, body)


@pytest.mark.parametrize(("idle", "timeout_s"), [("0.2s", 0.2), ("0s", math.inf), (None, 3600)])
def test_a_tunnel_connection_without_streams_ends_when_its_cluster_says(
    tmp_path: Path, idle: str | None, timeout_s: float
) -> None:
    """0 is never, and Envoy's default an hour."""

    async def body(rig: Rig) -> None:
        async with application(b"hi ") as port:
            everything = await tunnel(rig, port, Identities())
            name, document = outbound_cluster(rig.port("inbound"))
            options = http2(common_http_protocol_options={"idle_timeout": idle}) if idle else http2()
            changed = (name, {**document, "typed_extension_protocol_options": options})
            rest = [entry for entry in everything if entry[1].get("name") != "tunnel"]
            rig.publish(*rest, changed)
            await rig.until(lambda: idle is None or rig.count("cluster_manager.cluster_modified") == 1)
            assert await ask(rig.port("l"), b"there") == b"hi there"
            (pool,) = rig.proxy.connector.pools.values()
            assert pool.settings.idle_timeout_s == timeout_s
            if timeout_s < 1:
                await rig.until(lambda: not pool.statistics.connections)
            else:
                assert pool.statistics.connections == 1

    run(tmp_path, body)


def test_a_tunnel_connection_carries_what_its_cluster_allows(tmp_path: Path) -> None:
    async def body(rig: Rig) -> None:
        async with application(b"hi ") as port:
            everything = await tunnel(rig, port, Identities())
            name, document = outbound_cluster(rig.port("inbound"))
            options = http2(common_http_protocol_options={"max_requests_per_connection": 2})
            changed = (name, {**document, "typed_extension_protocol_options": options})
            rest = [entry for entry in everything if entry[1].get("name") != "tunnel"]
            rig.publish(*rest, changed)
            await rig.until(lambda: rig.count("cluster_manager.cluster_modified") == 1)
            for _ in range(5):
                assert await ask(rig.port("l"), b"there") == b"hi there"
            assert rig.count("cluster.tunnel.ssl.handshake") == 3

    run(tmp_path, body)


def test_a_manager_may_allow_shorter_heads(tmp_path: Path) -> None:
    async def body(rig: Rig) -> None:
        async with application(b"hi ") as port:
            everything = await tunnel(rig, port, Identities())
            name, document = inbound({"route_config": connect_route("app")})
            document["filter_chains"][0]["filters"][-1]["typed_config"]["max_request_headers_kb"] = 1
            rest = [entry for entry in everything if entry[1].get("name") not in ("inbound", "l")]
            long = [{"header": {"key": "x", "value": "v" * 1100}}]
            filters = tcp("tunnel", tunneling_config={"hostname": "app:80", "headers_to_add": long})
            rig.publish(*rest, (name, document), listener(chain(filters)))
            await rig.until(lambda: rig.count("listener_manager.listener_in_place_updated") >= 1)
            await rig.until(lambda: rig.count("listener_manager.total_listeners_draining") == 0)
            assert await ask(rig.port("l"), b"there") == b""
            assert rig.count("http.inbound.downstream_rq_total") == 0

    run(tmp_path, body)


def test_an_identity_that_is_not_allowed_gets_no_byte_through(tmp_path: Path) -> None:
    async def body(rig: Rig) -> None:
        async with application(b"secret") as port:
            log = access_log(tmp_path)
            await tunnel(rig, port, Identities(), rbac("spiffe://td/ns/a/sa/else"), access_log=log)
            assert await ask(rig.port("l")) == b""
            assert rig.count("tcp.rbac.denied") == 1
            assert rig.count("cluster.app.upstream_cx_total") == 0
            (line,) = await rig.log()
            assert line["flags"] == "UF,URX"

    run(tmp_path, body)


@pytest.mark.parametrize("ports", [True, False])
def test_a_denied_port_is_the_applications_unless_told_to_do_as_envoy(tmp_path: Path, ports: bool) -> None:
    async def body(rig: Rig) -> None:
        async with application() as port:
            await tunnel(rig, port, Identities(), rbac(CLIENT), deny_port(port))
            answer = await ask(rig.port("l"))
            if ports:
                assert answer == b""
                assert rig.count("cluster.app.upstream_cx_total") == 0
                assert rig.count("http.inbound.downstream_rq_4xx") == 1
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
    async def body(rig: Rig) -> None:
        async with application() as port:
            identities = Identities()
            everything = await tunnel(rig, port, identities)
            first = await Open.to(rig.port("l"))
            assert await first.say(b"a") == b"a"
            kept = [entry for entry in everything if entry[1]["name"] not in (CLIENT, SERVER)]
            updates = "cluster.tunnel.client_ssl_socket_factory.ssl_context_update_by_sds"
            before = rig.count(updates)
            rig.publish(*kept, identities.secret(CLIENT), identities.secret(SERVER))
            await rig.until(lambda: rig.count(updates) == before + 1)
            assert await ask(rig.port("l")) == b"ping"
            assert rig.count("cluster.tunnel.ssl.handshake") == 2
            assert await first.say(b"b") == b"b"
            await first.close()

    run(tmp_path, body)


def test_a_broken_secret_is_refused_and_the_last_good_one_serves(tmp_path: Path) -> None:
    async def body(rig: Rig) -> None:
        async with application() as port:
            everything = await tunnel(rig, port, Identities())
            kept = [entry for entry in everything if entry[1]["name"] != SERVER]
            certificate = {"certificate_chain": {"inline_string": "x"}, "private_key": {"inline_string": "s3cret"}}
            rig.publish(*kept, ("secret", {"name": SERVER, "tls_certificate": certificate}))
            await rig.until(lambda: any(error for kind, error in rig.answers if kind == "Secret"))
            error = next(error for kind, error in rig.answers if kind == "Secret" and error)
            assert "certificate_chain: no certificate in PEM" in error
            assert "s3cret" not in error
            assert await ask(rig.port("l")) == b"ping"

    run(tmp_path, body)


def test_a_server_of_another_trust_domain_is_refused(tmp_path: Path) -> None:
    async def body(rig: Rig) -> None:
        async with application() as port:
            identities = Identities()
            everything = await tunnel(rig, port, identities, access_log=access_log(tmp_path))
            foreign = identities.authority.issue("spiffe://other/ns/a/sa/server")
            secret = {
                "name": SERVER,
                "tls_certificate": {
                    "certificate_chain": {"inline_string": foreign.chain_pem.decode()},
                    "private_key": {"inline_string": foreign.key_pem.decode()},
                },
            }
            updates = "listener.127.0.0.1_0.server_ssl_socket_factory.ssl_context_update_by_sds"
            before = rig.count(updates)
            rig.publish(*[e for e in everything if e[1]["name"] != SERVER], ("secret", secret))
            await rig.until(lambda: rig.count(updates) > before)
            assert await ask(rig.port("l")) == b""
            (line,) = await rig.log()
            assert "SAN_matcher" in line["failure"]

    run(tmp_path, body)


def test_routes_come_by_rds(tmp_path: Path) -> None:
    async def body(rig: Rig) -> None:
        async with application() as port:
            identities = Identities()
            secrets = [identities.secret(CLIENT), identities.secret(SERVER), identities.root()]
            end = inbound({"rds": {"route_config_name": "routes", "config_source": {"ads": {}}}})
            routes = ("route", connect_route("app"))
            await rig.published(end, cluster(port), routes, *secrets)
            await rig.until(lambda: rig.proxy.listeners.active)
            tunnelling = tcp("tunnel", tunneling_config={"hostname": "app:80"})
            rest = [listener(chain(tunnelling)), cluster(port), outbound_cluster(rig.port("inbound")), *secrets]
            await rig.published(end, routes, *rest)
            await rig.until(lambda: len(rig.proxy.listeners.active) == 2)
            assert await ask(rig.port("l")) == b"ping"
            rig.publish(end, ("route", {"name": "routes"}), *rest)
            await rig.until(lambda: sum(kind == "RouteConfiguration" for kind, _ in rig.answers) >= 2)
            assert await ask(rig.port("l")) == b""
            assert rig.count("http.inbound.no_route") == 1

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

    async def body(rig: Rig) -> None:
        async with application() as port:
            identities = Identities()
            served = chain(tcp(), transport_socket=tls(SERVER, server=True, source=source))
            dialling = cluster(1, name="c", transport_socket=tls(CLIENT, server=False, source=source))
            secrets = [identities.secret(CLIENT), identities.secret(SERVER), identities.root()]
            await rig.published(listener(served, name="inbound"), cluster(port), dialling, *secrets)
            await rig.until(lambda: rig.proxy.listeners.active)
            dialling = cluster(
                rig.port("inbound"), name="c", transport_socket=tls(CLIENT, server=False, source=source)
            )
            await rig.published(
                listener(served, name="inbound"), listener(chain(tcp("c"))), cluster(port), dialling, *secrets
            )
            await rig.until(lambda: len(rig.proxy.listeners.active) == 2)
            await rig.until(lambda: rig.count("cluster_manager.warming_clusters") == 0)
            assert await ask(rig.port("l"), b"over TLS without HTTP/2") == b"over TLS without HTTP/2"

    run(tmp_path, body, extend=extend)


# Listener filters


def test_an_extension_that_has_not_arrived_closes(tmp_path: Path) -> None:
    kind = T + "istio.telemetry.workloadmetadata.v1.WorkloadMetadataResources"
    discovery = {"config_source": {"ads": {}, "initial_fetch_timeout": "0.2s"}, "type_urls": [kind]}
    filters = [{"name": "meta", "config_discovery": discovery}]

    async def body(rig: Rig) -> None:
        async with application() as port:
            await rig.published(listener(listener_filters=filters), cluster(port))
            await rig.until(lambda: rig.proxy.listeners.active)
            assert await ask(rig.port("l")) == b""
            assert rig.count("listener.127.0.0.1_0.extension_config_missing") == 1
            extension = {"name": "meta", "typed_config": {"@type": kind}}
            rig.publish(listener(listener_filters=filters), cluster(port), ("extension", extension))
            await rig.until(lambda: rig.proxy.listeners.extensions)
            assert await ask(rig.port("l")) == b"ping"

    run(tmp_path, body)


def test_a_proxy_header_is_believed_where_it_is_demanded(tmp_path: Path) -> None:
    kind = T + "envoy.extensions.filters.listener.proxy_protocol.v3.ProxyProtocol"
    filters = [{"name": "pp", "typed_config": {"@type": kind}}]
    match = {"filter_chain_match": {"source_prefix_ranges": [{"address_prefix": "10.0.0.1", "prefix_len": 32}]}}

    async def body(rig: Rig) -> None:
        async with application() as port:
            await rig.published(listener(chain(**match), listener_filters=filters), cluster(port))
            assert await ask(rig.port("l"), b"PROXY TCP4 10.0.0.1 10.0.0.2 1 2\r\nping") == b"ping"
            assert await ask(rig.port("l"), b"PROXY TCP4 10.0.0.9 10.0.0.2 1 2\r\nping") == b""
            assert await ask(rig.port("l"), b"ping, and a bit more, to be sure") == b""

    run(tmp_path, body)


def test_a_silent_client_does_not_hold_a_listener_filter_for_ever(tmp_path: Path) -> None:
    kind = T + "envoy.extensions.filters.listener.tls_inspector.v3.TlsInspector"
    filters = [{"name": "tls", "typed_config": {"@type": kind}}]

    async def body(rig: Rig) -> None:
        async with application() as port:
            plain = chain(filter_chain_match={"transport_protocol": "raw_buffer"})
            await rig.published(
                listener(plain, listener_filters=filters, listener_filters_timeout="0.2s"), cluster(port)
            )
            assert await ask(rig.port("l"), b"no TLS at all") == b"no TLS at all"
            silent = await Open.to(rig.port("l"))
            assert await silent.ended()
            await silent.close()
            assert rig.count("listener.127.0.0.1_0.downstream_pre_cx_timeout") == 1

    run(tmp_path, body)


# The end


def test_shutting_down_refuses_new_and_finishes_old(tmp_path: Path) -> None:
    async def body(rig: Rig) -> None:
        async with application() as port:
            await rig.published(listener(), cluster(port))
            number = rig.port("l")
            first = await Open.to(number)
            assert await first.say(b"a") == b"a"
            rig.proxy.shut_down()
            await rig.until(lambda: rig.count("listener_manager.listener_stopped") == 1)
            with pytest.raises(ConnectionRefusedError):
                await ask(number)
            assert await first.say(b"b") == b"b"
            await first.close()

    run(tmp_path, body)


def test_a_taken_port_is_a_refusal_that_names_it(tmp_path: Path) -> None:
    async def body(rig: Rig) -> None:
        async with application() as port:
            kind, document = listener(name="taken", enable_reuse_port=False)
            document["address"]["socket_address"]["port_value"] = port
            error = await rig.published((kind, document), listener(), cluster(port))
            assert error is not None
            assert f"127.0.0.1:{port}" in error.replace(" port ", ":")
            await rig.until(lambda: rig.proxy.listeners.active)
            assert await ask(rig.port("l")) == b"ping"

    run(tmp_path, body)


def test_the_switch_for_verification_asks_for_the_root(tmp_path: Path) -> None:
    """A 2022 upstream context verifies nobody; ours asks for ROOTCA unless told to obey."""
    socket = tls(CLIENT, server=False)
    del socket["typed_config"]["common_tls_context"]["combined_validation_context"]

    def names(rig: Rig) -> set[str]:
        return {handle.ref.name for handle in rig.proxy.secrets.dynamic}

    async def strict(rig: Rig) -> None:
        assert names(rig) == {CLIENT, "ROOTCA"}

    async def obedient(rig: Rig) -> None:
        assert names(rig) == {CLIENT}

    identities = Identities()
    resources = (cluster(1, transport_socket=socket), identities.secret(CLIENT), identities.root(), listener())
    run(tmp_path, strict, *resources)
    (tmp_path / "xds").unlink(missing_ok=True)
    run(tmp_path, obedient, *resources, switches=Switches(strict_tls=False))
