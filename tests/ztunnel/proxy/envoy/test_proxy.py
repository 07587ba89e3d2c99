"""The proxy as a whole on loopback: traffic, updates, refusals, drain."""

import asyncio
import socket
from pathlib import Path

import pytest

from tests.limits import WAIT_S
from tests.ports import free_port
from tests.ztunnel.proxy.envoy.harness import (
    CLIENT,
    Harness,
    Identities,
    Json,
    Open,
    T,
    access_log,
    application,
    ask,
    chain,
    cluster,
    endpoint,
    listener,
    rbac,
    run,
    tcp,
    tls,
)
from xds.proto.envoy.config.bootstrap.v3.bootstrap_pb2 import Bootstrap
from xds.proto.envoy.config.core.v3.core_pb2 import ApiConfigSource
from ztunnel.proxy.envoy.config.settings import Switches
from ztunnel.proxy.envoy.stats.stats import Histogram
from ztunnel.runtime.accepting import ListeningSocket


def test_bytes_pass_and_are_counted_and_logged(tmp_path: Path) -> None:
    async def body(harness: Harness) -> None:
        async with application(b"hello ") as port:
            await harness.published(listener(chain(tcp(access_log=access_log(tmp_path)))), cluster(port))
            assert await ask(harness.port("l"), b"world") == b"hello world"
            (line,) = await harness.log()
            assert (line["received"], line["sent"], line["cluster"], line["chain"]) == (5, 11, "app", "one")
            assert harness.count("tcp.p.downstream_cx_rx_bytes_total") == 5
            assert harness.count("cluster.app.upstream_cx_total") == 1
            await harness.until(lambda: harness.count("cluster.app.upstream_cx_active") == 0)

    run(tmp_path, body)


def ends(harness: Harness, name: str) -> dict[str, float]:
    """The counters of a cluster's ended connections that are not 0, and what its histograms counted."""
    prefix = f"cluster.{name}.upstream_cx_"
    found = {}
    for metric in harness.proxy.stats:
        value = metric.count if isinstance(metric, Histogram) else metric.value
        if metric.name.startswith(prefix) and metric.name.removeprefix(prefix).startswith(WHOLE) and value:
            found[metric.name.removeprefix(prefix)] = value
    return found


WHOLE = ("destroy", "connect_ms", "length_ms", "active")
REMOTE = {"destroy": 1, "destroy_remote": 1, "connect_ms": 1, "length_ms": 1}
LOCAL = {"destroy": 1, "destroy_local": 1, "connect_ms": 1, "length_ms": 1}
OF_USE = {"destroy_with_active_rq": 1}
LOCAL_OF_USE = LOCAL | OF_USE | {"destroy_local_with_active_rq": 1}
REMOTE_OF_USE = REMOTE | OF_USE | {"destroy_remote_with_active_rq": 1}


@pytest.mark.parametrize(
    ("how", "expected"),
    [("client first", REMOTE_OF_USE), ("client resets", LOCAL_OF_USE), ("idle", LOCAL_OF_USE)],
)
def test_upstream_counters_tell_which_side_ended_a_connection(
    tmp_path: Path, how: str, expected: dict[str, float]
) -> None:
    async def body(harness: Harness) -> None:
        async with application() as port:
            await harness.published(
                listener(chain(tcp(idle_timeout="0.2s" if how == "idle" else "60s"))), cluster(port)
            )
            client = await Open.to(harness.port("l"))
            assert await client.say(b"a") == b"a"
            assert ends(harness, "app") == {"active": 1, "connect_ms": 1}
            match how:
                case "client first":
                    await client.close()
                case "client resets":
                    client.reset()
            await harness.until(lambda: harness.count("cluster.app.upstream_cx_destroy"))
            assert ends(harness, "app") == expected
            await client.close()

    run(tmp_path, body)


def test_a_connection_that_is_not_made_is_counted_too(tmp_path: Path) -> None:
    async def body(harness: Harness) -> None:
        assert await ask(harness.port("l")) == b""
        assert harness.count("cluster.app.upstream_cx_total") == 1
        assert ends(harness, "app") == {"destroy": 1, "destroy_remote": 1, "length_ms": 1}
        assert harness.count("cluster.app.upstream_cx_connect_attempts_exceeded") == 1

    run(tmp_path, body, listener(), cluster(1))


@pytest.mark.parametrize(
    ("resources", "flags"),
    [
        ((listener(chain(tcp("gone"))), cluster()), "NC"),
        ((listener(), cluster()), "UH"),
        ((listener(), cluster(1)), "UF,URX"),
    ],
)
def test_unreachable_upstream_closes_with_its_response_flag(
    tmp_path: Path, resources: tuple[tuple[str, Json], ...], flags: str
) -> None:
    kind, document = resources[0]
    document["filter_chains"][0]["filters"][0]["typed_config"]["access_log"] = access_log(tmp_path)

    async def body(harness: Harness) -> None:
        assert await ask(harness.port("l")) == b""
        (line,) = await harness.log()
        assert line["flags"] == flags

    run(tmp_path, body, (kind, document), *resources[1:])


def test_retry_uses_another_endpoint(tmp_path: Path) -> None:
    async def body(harness: Harness) -> None:
        async with application() as port:
            await harness.published(listener(chain(tcp(max_connect_attempts=2))), cluster(1, port))
            assert [await ask(harness.port("l")) for _ in range(4)] == [b"ping"] * 4
            assert harness.count("cluster.app.upstream_cx_connect_fail") > 0

    run(tmp_path, body)


def test_a_full_breaker_refuses(tmp_path: Path) -> None:
    breaker = {"circuit_breakers": {"thresholds": [{"max_connections": 1}]}}

    async def body(harness: Harness) -> None:
        async with application() as port:
            log = access_log(tmp_path)
            await harness.published(listener(chain(tcp(access_log=log))), cluster(port, **breaker))
            first = await Open.to(harness.port("l"))
            assert await first.say(b"a") == b"a"
            assert await ask(harness.port("l")) == b""
            (line,) = await harness.log()
            assert line["flags"] == "UO"
            assert await first.say(b"b") == b"b"
            await first.close()
            await harness.until(lambda: harness.count("cluster.app.upstream_cx_active") == 0)
            assert await ask(harness.port("l")) == b"ping"

    run(tmp_path, body)


def test_a_burst_waits_for_connections_up_to_the_breakers_limit(tmp_path: Path) -> None:
    breaker = {"circuit_breakers": {"thresholds": [{"max_pending_requests": 0}]}}

    async def body(harness: Harness) -> None:
        async with application() as port:
            await harness.published(
                listener(chain(tcp(access_log=access_log(tmp_path)))), cluster(port, **breaker)
            )
            assert await ask(harness.port("l")) == b""
            (line,) = await harness.log()
            assert line["flags"] == "UO"
            assert harness.count("cluster.app.upstream_rq_pending_overflow") == 1

    run(tmp_path, body)


def internal_cluster(name: str, leads_to: str) -> tuple[str, Json]:
    """Return a cluster of one internal listener that passes allowed metadata to it."""
    kind = f"{T}envoy.extensions.transport_sockets"
    raw = {"name": "raw", "typed_config": {"@type": f"{kind}.raw_buffer.v3.RawBuffer"}}
    socket = {"@type": f"{kind}.internal_upstream.v3.InternalUpstreamTransport", "transport_socket": raw}
    there = {"endpoint": {"address": {"envoy_internal_address": {"server_listener_name": leads_to}}}}
    assignment = {"cluster_name": name, "endpoints": [{"lb_endpoints": [there]}]}
    passing = {"transport_socket": {"name": "internal", "typed_config": socket}}
    return "cluster", {"name": name, "type": "STATIC", "load_assignment": assignment, **passing}


@pytest.mark.parametrize(
    ("limit", "flags", "counted"),
    [
        ({"idle_timeout": "0.2s"}, "-", "idle_timeout"),
        ({"max_downstream_connection_duration": "0.2s"}, "DT", "max_downstream_connection_duration"),
    ],
    ids=["idle", "duration"],
)
def test_time_limits_of_an_internal_listeners_filter_end_the_connection(
    tmp_path: Path, limit: Json, flags: str, counted: str
) -> None:
    """As in Envoy 1.40, which counts them for that filter and marks only its hop with DT."""
    log = access_log(tmp_path)

    async def body(harness: Harness) -> None:
        async with application() as port:
            front = listener(chain(tcp("to-inner", access_log=log, idle_timeout="0s", stat_prefix="front")))
            _, inner = listener(chain(tcp(access_log=log, stat_prefix="inner", **limit)), name="inner")
            del inner["address"]
            inner |= {"internal_listener": {}}
            clusters = internal_cluster("to-inner", "inner"), cluster(port)
            assert await harness.published(front, ("listener", inner), *clusters) is None
            await harness.until(lambda: len(harness.proxy.listeners.active) == 2)
            client = await Open.to(harness.port("l"))
            assert await client.ended()
            await client.close()
            lines = await harness.log(2)
            assert {line["cluster"]: line["flags"] for line in lines} == {"to-inner": "-", "app": flags}
            assert harness.count(f"tcp.inner.{counted}") == 1
            assert harness.count(f"tcp.front.{counted}") == 0

    run(tmp_path, body)


def test_filter_state_passes_internal_connections_as_shared(tmp_path: Path) -> None:
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

    async def body(harness: Harness) -> None:
        async with application() as port:
            await harness.published(
                listener(chain(sets, tcp("to-first", access_log=logged("l")))),
                inside("first", "to-second"),
                inside("second", "app"),
                internal_cluster("to-first", "first"),
                internal_cluster("to-second", "second"),
                cluster(port),
            )
            assert await ask(harness.port("l")) == b"ping"
            lines = {line.pop("at"): line for line in await harness.log(3)}
            assert lines == {
                "l": {"NONE": "none", "ONCE": "once", "TRANSITIVE": "transitive"},
                "first": {"NONE": None, "ONCE": "once", "TRANSITIVE": "transitive"},
                "second": {"NONE": None, "ONCE": None, "TRANSITIVE": "transitive"},
            }

    run(tmp_path, body)


def test_a_missing_part_of_filter_state_is_a_dash_unless_omitted(tmp_path: Path) -> None:
    """Like in Envoy, whose format strings print ``-`` for missing values."""
    values = [
        {
            "object_key": key,
            "format_string": {"text_format": "a%DYNAMIC_METADATA(x:y)%b", "omit_empty_values": omit},
        }
        for key, omit in (("dash", False), ("omitted", True))
    ]
    config = T + "envoy.extensions.filters.network.set_filter_state.v3.Config"
    sets = {"name": "state", "typed_config": {"@type": config, "on_new_connection": values}}
    (log,) = access_log(tmp_path)
    fields = {key: f"%FILTER_STATE({key}:PLAIN)%" for key in ("dash", "omitted")}
    log["typed_config"]["log_format"] = {"json_format": fields}

    async def body(harness: Harness) -> None:
        async with application() as port:
            await harness.published(listener(chain(sets, tcp(access_log=[log]))), cluster(port))
            assert await ask(harness.port("l")) == b"ping"
            assert await harness.log(1) == [{"dash": "a-b", "omitted": "ab"}]

    run(tmp_path, body)


def test_failing_hosts_are_ejected(tmp_path: Path) -> None:
    outlier = {"outlier_detection": {"consecutive_5xx": 2, "max_ejection_percent": 50}}

    async def body(harness: Harness) -> None:
        async with application() as port:
            await harness.published(listener(), cluster(1, port, **outlier))
            for _ in range(8):
                await ask(harness.port("l"))
            assert [await ask(harness.port("l")) for _ in range(6)] == [b"ping"] * 6

    run(tmp_path, body)


def test_an_idle_connection_ends(tmp_path: Path) -> None:
    async def body(harness: Harness) -> None:
        async with application() as port:
            filters = tcp(idle_timeout="0.2s", access_log=access_log(tmp_path))
            await harness.published(listener(chain(filters)), cluster(port))
            connection = await Open.to(harness.port("l"))
            assert await connection.say(b"a") == b"a"
            assert await connection.ended()
            await connection.close()
            (line,) = await harness.log()
            assert line["details"] == "tcp_session_idle_timeout"
            assert harness.count("tcp.p.idle_timeout") == 1

    run(tmp_path, body)


def test_dns_names_of_endpoints_are_resolved(tmp_path: Path) -> None:
    async def body(harness: Harness) -> None:
        async with application() as port:
            address = {"socket_address": {"address": "localhost", "port_value": port}}
            assignment = {
                "cluster_name": "app",
                "endpoints": [{"lb_endpoints": [{"endpoint": {"address": address}}]}],
            }
            document = {"name": "app", "type": "STRICT_DNS", "load_assignment": assignment}
            await harness.published(listener(), ("cluster", document))
            assert await ask(harness.port("l")) == b"ping"

    run(tmp_path, body)


# Updates


def test_a_change_of_chains_keeps_connections_of_unchanged_ones(tmp_path: Path) -> None:
    ours = {"filter_chain_match": {"source_prefix_ranges": [{"address_prefix": "127.0.0.0", "prefix_len": 8}]}}

    async def body(harness: Harness) -> None:
        async with application() as port:
            await harness.published(listener(chain(**ours)), cluster(port))
            first, before = await Open.to(harness.port("l")), harness.port("l")
            assert await first.say(b"a") == b"a"
            other = {"name": "two", "filters": [tcp()]}
            await harness.published(listener(chain(**ours), other), cluster(port))
            await harness.until(lambda: harness.count("listener_manager.listener_in_place_updated") == 1)
            assert harness.count("listener_manager.listener_modified") == 1  # both count, like in Envoy
            assert harness.port("l") == before
            assert await first.say(b"b") == b"b"
            await asyncio.sleep(1.2)  # past the drain time: it was not draining
            assert await first.say(b"c") == b"c"
            await first.close()

    run(tmp_path, body)


def test_any_other_change_makes_a_new_listener_and_drains_the_old(tmp_path: Path) -> None:
    async def body(harness: Harness) -> None:
        async with application() as port:
            await harness.published(listener(), cluster(port))
            first = await Open.to(harness.port("l"))
            assert await first.say(b"a") == b"a"
            await harness.published(listener(listener_filters_timeout="3s"), cluster(port))
            await harness.until(lambda: harness.count("listener_manager.listener_modified") == 1)
            assert harness.count("listener_manager.total_listeners_draining") == 1
            assert await first.say(b"b") == b"b"
            assert await ask(harness.port("l")) == b"ping"
            assert await first.ended()  # the drain time is over
            await first.close()
            await harness.until(lambda: harness.count("listener_manager.total_listeners_draining") == 0)

    run(tmp_path, body)


@pytest.mark.parametrize(
    ("prefix", "scope"), [("tcp.", "tcp.rbac.istio_dry_run_deny_."), ("mesh", "mesh.rbac.istio_dry_run_deny_.")]
)
def test_shadow_rules_are_counted_and_not_enforced(tmp_path: Path, prefix: str, scope: str) -> None:
    async def body(harness: Harness) -> None:
        async with application() as port:
            judging = rbac(None, "DENY")
            config = judging["typed_config"]
            config["shadow_rules"] = config.pop("rules")
            config |= {"stat_prefix": prefix, "shadow_rules_stat_prefix": "istio_dry_run_deny_"}
            await harness.published(listener(chain(judging, tcp())), cluster(port))
            assert await ask(harness.port("l")) == b"ping"
            assert harness.count(scope + "shadow_denied") == 1
            assert harness.count(scope + "shadow_allowed") == 0
            config["shadow_rules"]["action"] = "ALLOW"
            await harness.published(listener(chain(judging, tcp())), cluster(port))
            assert await ask(harness.port("l")) == b"ping"
            assert harness.count(scope + "shadow_allowed") == 1

    run(tmp_path, body)


def test_a_policy_that_no_longer_allows_cuts_live_connections(tmp_path: Path) -> None:
    async def body(harness: Harness) -> None:
        async with application() as port:
            log = access_log(tmp_path)
            await harness.published(listener(chain(rbac(None), tcp(access_log=log))), cluster(port))
            first = await Open.to(harness.port("l"))
            assert await first.say(b"a") == b"a"
            await harness.published(listener(chain(rbac(CLIENT), tcp(access_log=log))), cluster(port))
            assert await first.ended()
            await first.close()
            assert await ask(harness.port("l")) == b""
            lines = await harness.log(2)
            assert "policy_change:_rbac_access_denied_matched_policy[none]" in lines[0]["details"]
            assert lines[1]["details"] == "rbac_access_denied_matched_policy[none]"
            assert harness.count("tcp.rbac.denied") >= 1

    run(tmp_path, body)


def test_refused_listener_leaves_its_last_good_version_and_other_listeners(tmp_path: Path) -> None:
    async def body(harness: Harness) -> None:
        async with application() as port:
            assert await harness.published(listener(), cluster(port)) is None
            bad = listener(chain(tcp(on_demand={})))
            error = await harness.published(bad, listener(name="second"), cluster(port))
            assert error is not None
            assert error.startswith(
                "Error adding/updating listener(s) l: filter_chains[0].filters[0].typed_config.on_demand:"
            )
            await harness.until(lambda: any(found.name == "second" for found in harness.proxy.listeners.active))
            assert await ask(harness.port("l")) == b"ping"
            assert await ask(harness.port("second")) == b"ping"
            assert harness.proxy.listeners.failures["l"].details in error
            assert await harness.published(listener(), cluster(port)) is None
            assert harness.proxy.listeners.failures == {}

    run(tmp_path, body)


def test_refused_cluster_leaves_its_last_good_version(tmp_path: Path) -> None:
    async def body(harness: Harness) -> None:
        async with application() as port:
            await harness.published(listener(), cluster(port))
            harness.publish(listener(), cluster(port, connect_timeout="0s"))
            await harness.until(lambda: any(error for kind, error in harness.answers if kind == "Cluster"))
            error = next(error for kind, error in harness.answers if kind == "Cluster" and error)
            assert error.startswith("Error adding/updating cluster(s) app: connect_timeout: Proto constraint")
            assert await ask(harness.port("l")) == b"ping"

    run(tmp_path, body)


def test_a_removed_listener_stops_at_once_and_drains(tmp_path: Path) -> None:
    async def body(harness: Harness) -> None:
        async with application() as port:
            await harness.published(listener(), listener(name="other"), cluster(port))
            number = harness.port("l")
            first = await Open.to(number)
            assert await first.say(b"a") == b"a"
            await harness.published(listener(name="other"), cluster(port))
            with pytest.raises(ConnectionRefusedError):
                await ask(number)
            assert await first.say(b"b") == b"b"
            await first.close()

    run(tmp_path, body)


def test_metrics_of_a_listener_stay_until_its_last_version_has_drained(tmp_path: Path) -> None:
    kind = "envoy.extensions.filters.network.connection_limit.v3.ConnectionLimit"
    limit = {
        "name": "limit",
        "typed_config": {"@type": T + kind, "stat_prefix": "most", "max_connections": 9},
    }
    kind = "envoy.extensions.transport_sockets.tls.v3.DownstreamTlsContext"
    nothing = {"inline_string": "no PEM"}
    certificates = [{"certificate_chain": nothing, "private_key": nothing}]
    bad_tls = {"@type": T + kind, "common_tls_context": {"tls_certificates": certificates}}
    own = ("tcp.p.", "tcp.rbac.", "listener.127.0.0.1_", "connection_limit.most.")

    def shown(harness: Harness) -> set[str]:
        return {metric.name for metric in harness.proxy.stats if metric.name.startswith(own)}

    async def body(harness: Harness) -> None:
        async with application() as port:
            address = {"socket_address": {"address": "127.0.0.1", "port_value": free_port()}}
            every = listener(chain(rbac(CLIENT, "DENY"), limit, tcp()), address=address)
            await harness.published(every, cluster(port))
            assert await ask(harness.port("l")) == b"ping"
            everything = shown(harness)
            assert {name.split(".")[0] for name in everything} == {"tcp", "listener", "connection_limit"}
            # In place, then as a new listener without a policy, then refused. All share the metrics.
            rest = {name for name in everything if not name.startswith("tcp.rbac.")}
            bad = {"name": "tls", "typed_config": bad_tls}
            for version, left in (
                (
                    listener(chain(rbac(CLIENT, "DENY"), limit, tcp(idle_timeout="9s")), address=address),
                    everything,
                ),
                (listener(chain(limit, tcp()), address=address, listener_filters_timeout="3s"), rest),
                (listener(chain(limit, tcp(), transport_socket=bad), address=address), rest),
            ):
                await harness.published(version, cluster(port))
                assert await ask(harness.port("l")) == b"ping"
                await harness.until(lambda left=left: shown(harness) == left)  # type: ignore[misc]
            assert harness.count("tcp.p.downstream_cx_total") == 4
            first = await Open.to(harness.port("l"))
            assert await first.say(b"a") == b"a"
            await harness.published(cluster(port))
            assert harness.count("tcp.p.downstream_cx_total") == 5
            assert await first.ended()
            await first.close()
            await harness.until(lambda: shown(harness) == set())

    run(tmp_path, body)


@pytest.mark.parametrize("delta", [False, True])
def test_listener_takes_the_address_of_one_that_the_same_update_removes(tmp_path: Path, delta: bool) -> None:
    async def body(harness: Harness) -> None:
        async with application() as port:
            address = {"socket_address": {"address": "127.0.0.1", "port_value": free_port()}}
            assert await harness.published(listener(address=address), cluster(port)) is None
            assert await ask(harness.port("l")) == b"ping"
            assert await harness.published(listener(name="m", address=address), cluster(port)) is None
            await harness.until(lambda: [each.name for each in harness.proxy.listeners.active] == ["m"])
            assert await ask(harness.port("m")) == b"ping"
            assert harness.count("listener_manager.listener_create_failure") == 0

    def extend(bootstrap: Bootstrap) -> None:
        if delta:
            bootstrap.dynamic_resources.ads_config.api_type = ApiConfigSource.DELTA_GRPC

    run(tmp_path, body, extend=extend)


def test_listener_takes_the_address_that_another_leaves_in_the_same_update(tmp_path: Path) -> None:
    async def body(harness: Harness) -> None:
        async with application(b"1") as one, application(b"2") as two:
            clusters = cluster(one), cluster(two, name="two")
            old, new = [{"socket_address": {"address": "127.0.0.1", "port_value": free_port()}} for _ in range(2)]
            assert await harness.published(listener(name="a", address=old), *clusters) is None
            moved = listener(name="a", address=new), listener(chain(tcp("two")), name="b", address=old)
            assert await harness.published(*moved, *clusters) is None
            await harness.until(lambda: [each.name for each in harness.proxy.listeners.active] == ["a", "b"])
            assert await ask(new["socket_address"]["port_value"], b"") == b"1"
            assert await ask(old["socket_address"]["port_value"], b"") == b"2"

    run(tmp_path, body)


def test_changed_cluster_serves_new_connections_and_old_ones_continue(tmp_path: Path) -> None:
    async def body(harness: Harness) -> None:
        async with application(b"1") as one, application(b"2") as two:
            await harness.published(listener(), cluster(one))
            first = await Open.to(harness.port("l"))
            assert await first.say(b"a") == b"1"
            harness.publish(listener(), cluster(two))
            await harness.until(lambda: harness.count("cluster_manager.cluster_modified") == 1)
            await harness.until(lambda: harness.count("cluster_manager.warming_clusters") == 0)
            assert await ask(harness.port("l"), b"") == b"2"
            assert await first.say(b"b") == b"a"
            await first.close()

    run(tmp_path, body)


def test_endpoints_arrive_and_change_over_eds(tmp_path: Path) -> None:
    def endpoints(port: int) -> tuple[str, Json]:
        return "endpoints", {"cluster_name": "app", "endpoints": [{"lb_endpoints": [endpoint(port)]}]}

    document = {"name": "app", "type": "EDS", "eds_cluster_config": {"eds_config": {"ads": {}}}}

    async def body(harness: Harness) -> None:
        async with application(b"1") as one, application(b"2") as two:
            await harness.published(listener(), ("cluster", document), endpoints(one))
            assert await ask(harness.port("l"), b"") == b"1"
            harness.publish(listener(), ("cluster", document), endpoints(two))
            await harness.until(lambda: harness.count("cluster.app.update_success") == 2)
            assert await ask(harness.port("l"), b"") == b"2"
            harness.publish(
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
            await harness.until(lambda: harness.count("cluster.app.update_rejected") == 1)
            assert await ask(harness.port("l"), b"") == b"2"

    run(tmp_path, body)


def test_cluster_without_eds_shows_no_earlier_update_counts(tmp_path: Path) -> None:
    document = {"name": "app", "type": "EDS", "eds_cluster_config": {"eds_config": {"ads": {}}}}

    async def body(harness: Harness) -> None:
        async with application() as port:
            hosts = {"cluster_name": "app", "endpoints": [{"lb_endpoints": [endpoint(port)]}]}
            for step in range(3):
                discovered = step != 1
                entries = [("cluster", document), ("endpoints", hosts)] if discovered else [cluster(port)]
                harness.publish(listener(), *entries)
                await harness.until(lambda n=step: harness.count("cluster_manager.cluster_modified") == n)  # type: ignore[misc]
                await harness.until(lambda n=discovered: (harness.count("cluster.app.update_success") > 0) == n)  # type: ignore[misc]
                names = [metric.name for metric in harness.proxy.stats]
                assert len(names) == len(set(names))
                assert ("cluster.app.update_time" in names) == discovered

    run(tmp_path, body)


def test_traffic_continues_while_the_control_plane_is_unreachable(tmp_path: Path) -> None:
    async def body(harness: Harness) -> None:
        async with application() as port:
            await harness.published(listener(), cluster(port))
            await harness.server.__aexit__(None, None, None)
            await harness.until(lambda: harness.count("control_plane.connected_state") == 0)
            assert await ask(harness.port("l")) == b"ping"
            (tmp_path / "xds").unlink(missing_ok=True)
            await harness.server.__aenter__()
            before = len(harness.answers)
            await harness.until(lambda: len(harness.answers) > before)
            assert await ask(harness.port("l")) == b"ping"

    run(tmp_path, body)


# Listener filters


def test_an_extension_that_has_not_arrived_closes(tmp_path: Path) -> None:
    kind = T + "istio.telemetry.workloadmetadata.v1.WorkloadMetadataResources"
    discovery = {"config_source": {"ads": {}, "initial_fetch_timeout": "0.2s"}, "type_urls": [kind]}
    filters = [{"name": "meta", "config_discovery": discovery}]

    async def body(harness: Harness) -> None:
        async with application() as port:
            await harness.published(listener(listener_filters=filters), cluster(port))
            await harness.until(lambda: harness.proxy.listeners.active)
            assert await ask(harness.port("l")) == b""
            assert harness.count("listener.127.0.0.1_0.extension_config_missing") == 1
            extension = {"name": "meta", "typed_config": {"@type": kind}}
            harness.publish(listener(listener_filters=filters), cluster(port), ("extension", extension))
            await harness.until(lambda: harness.proxy.listeners.extensions)
            assert await ask(harness.port("l")) == b"ping"

    run(tmp_path, body)


def test_proxy_header_sets_the_source_if_the_filter_is_configured(tmp_path: Path) -> None:
    kind = T + "envoy.extensions.filters.listener.proxy_protocol.v3.ProxyProtocol"
    filters = [{"name": "pp", "typed_config": {"@type": kind}}]
    match = {"filter_chain_match": {"source_prefix_ranges": [{"address_prefix": "10.0.0.1", "prefix_len": 32}]}}

    async def body(harness: Harness) -> None:
        async with application() as port:
            await harness.published(listener(chain(**match), listener_filters=filters), cluster(port))
            assert await ask(harness.port("l"), b"PROXY TCP4 10.0.0.1 10.0.0.2 1 2\r\nping") == b"ping"
            assert await ask(harness.port("l"), b"PROXY TCP4 10.0.0.9 10.0.0.2 1 2\r\nping") == b""
            assert await ask(harness.port("l"), b"ping, and a bit more, to be sure") == b""

    run(tmp_path, body)


def test_listener_filter_times_out_for_a_silent_client(tmp_path: Path) -> None:
    kind = T + "envoy.extensions.filters.listener.tls_inspector.v3.TlsInspector"
    filters = [{"name": "tls", "typed_config": {"@type": kind}}]

    async def body(harness: Harness) -> None:
        async with application() as port:
            plain = chain(filter_chain_match={"transport_protocol": "raw_buffer"})
            await harness.published(
                listener(plain, listener_filters=filters, listener_filters_timeout="0.2s"), cluster(port)
            )
            assert await ask(harness.port("l"), b"no TLS at all") == b"no TLS at all"
            silent = await Open.to(harness.port("l"))
            assert await silent.ended()
            await silent.close()
            assert harness.count("listener.127.0.0.1_0.downstream_pre_cx_timeout") == 1

    run(tmp_path, body)


# The end


def test_shutting_down_refuses_new_and_finishes_old(tmp_path: Path) -> None:
    async def body(harness: Harness) -> None:
        async with application() as port:
            await harness.published(listener(), cluster(port))
            number = harness.port("l")
            first = await Open.to(number)
            assert await first.say(b"a") == b"a"
            harness.proxy.shut_down()
            await harness.until(lambda: harness.count("listener_manager.listener_stopped") == 1)
            with pytest.raises(ConnectionRefusedError):
                await ask(number)
            assert await first.say(b"b") == b"b"
            await first.close()

    run(tmp_path, body)


def test_listener_on_a_taken_port_is_refused_by_name(tmp_path: Path) -> None:
    async def body(harness: Harness) -> None:
        async with application() as port:
            kind, document = listener(name="taken", enable_reuse_port=False)
            document["address"]["socket_address"]["port_value"] = port
            error = await harness.published((kind, document), listener(), cluster(port))
            assert error is not None
            assert f"127.0.0.1:{port}" in error.replace(" port ", ":")
            await harness.until(lambda: harness.proxy.listeners.active)
            assert await ask(harness.port("l")) == b"ping"

    run(tmp_path, body)


def test_port_of_a_listener_with_other_socket_options_is_never_closed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The new version's socket listens before the old one's closes, and no queued connection is reset."""
    closing = ListeningSocket.close

    async def body(harness: Harness) -> None:
        async with application() as port:
            _, first = listener()
            first["address"]["socket_address"]["port_value"] = at = free_port()
            assert await harness.published(("listener", first), cluster(port)) is None
            await harness.until(lambda: harness.proxy.listeners.active)
            queued = await Open.to(at)
            done = asyncio.Event()

            def close(sock: ListeningSocket) -> None:
                closing(sock)
                # The loop is here, so that only a listening socket can take this connection.
                with socket.create_connection(("127.0.0.1", at)):
                    done.set()

            monkeypatch.setattr(ListeningSocket, "close", close)
            assert await harness.published(("listener", {**first, "freebind": True}), cluster(port)) is None
            await asyncio.wait_for(done.wait(), WAIT_S)
            monkeypatch.setattr(ListeningSocket, "close", closing)
            assert await queued.say(b"hi") == b"hi"
            assert await ask(at) == b"ping"
            await queued.close()

    run(tmp_path, body)


def test_strict_tls_subscribes_to_the_root(tmp_path: Path) -> None:
    """An upstream context of 2022 verifies no server. Ours requests ROOTCA, unless it must follow the
    configuration.
    """
    socket = tls(CLIENT, server=False)
    del socket["typed_config"]["common_tls_context"]["combined_validation_context"]

    def names(harness: Harness) -> set[str]:
        return {handle.ref.name for handle in harness.proxy.secrets.dynamic}

    async def strict(harness: Harness) -> None:
        assert names(harness) == {CLIENT, "ROOTCA"}

    async def obedient(harness: Harness) -> None:
        assert names(harness) == {CLIENT}

    identities = Identities()
    resources = (cluster(1, transport_socket=socket), identities.secret(CLIENT), identities.root(), listener())
    run(tmp_path, strict, *resources)
    (tmp_path / "xds").unlink(missing_ok=True)
    run(tmp_path, obedient, *resources, switches=Switches(strict_tls=False))
