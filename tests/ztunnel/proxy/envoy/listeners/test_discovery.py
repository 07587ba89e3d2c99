"""Routes and network filters that come by RDS and ECDS: their chains wait for them, and follow them ever after."""

import json
from pathlib import Path
from typing import Any

from tests.ztunnel.proxy.envoy.rig import (
    Json,
    Open,
    Rig,
    T,
    application,
    ask,
    chain,
    cluster,
    connect_route,
    connection_manager,
    listener,
    page,
    rbac,
    run,
    tcp,
)
from xds.model.address import SocketAddress
from xds.model.facts import ConnectionFacts
from ztunnel.ask.inspect.envoy_listeners import read_configuration
from ztunnel.policy.engine import judge
from ztunnel.proxy.envoy.path.explain import Question, explain

ADS = {"ads": {}, "resource_api_version": "V3"}


def by_rds(port: int) -> Json:
    routes = {"rds": {"route_config_name": "routes", "config_source": ADS}}
    return chain(connection_manager(routes), name="tunnels", filter_chain_match={"destination_port": port})


def routes(target: str) -> tuple[str, Json]:
    return "route", {"name": "routes", **connect_route(target)}


def test_unchanged_chain_follows_its_routes_after_a_listener_update(tmp_path: Path) -> None:
    async def body(rig: Rig) -> None:
        def routed() -> set[str]:
            (active,) = rig.proxy.listeners.active
            managers: list[Any] = [each.manager for each in active.live_chains if each.manager is not None]
            return {str(manager.routes) for manager in managers}

        rest = cluster(1), cluster(2, name="other")
        rig.publish(listener(by_rds(1), chain(tcp())), routes("app"), *rest)
        await rig.until(lambda: rig.proxy.listeners.active and "app" in str(routed()))
        rig.publish(listener(by_rds(1), chain(tcp("other"))), routes("app"), *rest)
        await rig.until(lambda: rig.count("listener_manager.listener_in_place_updated") == 1)
        rig.publish(listener(by_rds(1), chain(tcp("other"))), routes("other"), *rest)
        await rig.until(lambda: "other" in str(routed()))

    run(tmp_path, body)


# Network filters

RBAC = "envoy.extensions.filters.network.rbac.v3.RBAC"
LIMIT = "envoy.extensions.filters.network.connection_limit.v3.ConnectionLimit"
ALL, NOBODY = rbac(None)["typed_config"], rbac(None, "DENY")["typed_config"]


def awaited(**more: Any) -> Json:
    """The place of a filter that comes by ECDS."""
    discovery = {"config_source": ADS, "type_urls": [T + RBAC, T + LIMIT], **more}
    return {"name": "guard", "config_discovery": discovery}


def extension(config: Json) -> tuple[str, Json]:
    return "extension", {"name": "guard", "typed_config": config}


def limit(most: int) -> Json:
    return {"@type": T + LIMIT, "stat_prefix": "few", "max_connections": most}


def refusals(rig: Rig) -> list[str]:
    return [error for kind, error in rig.answers if kind == "TypedExtensionConfig" and error]


def test_listener_warms_until_its_ecds_filter_arrives_and_follows_versions(tmp_path: Path) -> None:
    async def body(rig: Rig) -> None:
        async with application() as port:
            rest = listener(chain(awaited(), tcp())), cluster(port)
            rig.publish(*rest)
            await rig.until(lambda: rig.proxy.listeners.warming)
            assert not rig.proxy.listeners.active
            rig.publish(*rest, extension(ALL))
            await rig.until(lambda: rig.proxy.listeners.active)
            assert await ask(rig.port("l")) == b"ping"
            rig.publish(*rest, extension(NOBODY))
            await rig.until(lambda: not is_allowed(rig))
            assert await ask(rig.port("l")) == b""
            rig.publish(*rest, extension(ALL))
            await rig.until(lambda: is_allowed(rig))
            assert await ask(rig.port("l")) == b"ping"
            assert "guard" in rig.proxy.listeners.extensions

    run(tmp_path, body)


def is_allowed(rig: Rig) -> bool:
    """Whether the filter that is in force allows anybody."""
    (active,) = rig.proxy.listeners.active
    (live,) = active.live_chains
    (found,) = live.rbac
    assert found.model.rules is not None
    here = SocketAddress("127.0.0.1", 1)
    return judge(found.model.rules, ConnectionFacts(source=here, direct_source=here, destination=here)).allowed


def test_a_connection_that_a_new_version_denies_is_ended(tmp_path: Path) -> None:
    async def body(rig: Rig) -> None:
        async with application() as port:
            rest = listener(chain(awaited(), tcp())), cluster(port)
            rig.publish(*rest, extension(ALL))
            await rig.until(lambda: rig.proxy.listeners.active)
            connection = await Open.to(rig.port("l"))
            assert await connection.say(b"one") == b"one"
            rig.publish(*rest, extension(NOBODY))
            assert await connection.ended()
            await connection.close()

    run(tmp_path, body)


def test_default_filter_configuration_serves_without_a_discovered_one(tmp_path: Path) -> None:
    async def body(rig: Rig) -> None:
        async with application() as port:
            default = awaited(default_config=NOBODY, apply_default_config_without_warming=True)
            rest = listener(chain(default, tcp())), cluster(port)
            rig.publish(*rest)
            await rig.until(lambda: rig.proxy.listeners.active)
            assert await ask(rig.port("l")) == b""
            question = "source=127.0.0.1&destination=127.0.0.1:1&listener=l"
            assert from_a_dump(rig) == json.loads(page(rig, "/explain", question))
            rig.publish(*rest, extension(ALL))
            await rig.until(lambda: is_allowed(rig))
            assert await ask(rig.port("l")) == b"ping"
            told = from_a_dump(rig)
            assert told == json.loads(page(rig, "/explain", question))
            judged = {"policy": "rule", "action": "allow", "holds": True, "because": "always"}
            assert told["hop"]["policies"] == [{"allowed": True, "policy": "rule", "judged": [judged]}]

    run(tmp_path, body)


def from_a_dump(rig: Rig) -> Json:
    """What is said of a connection from a dump, which has the filters from ECDS."""
    dump = json.loads(page(rig, "/config_dump", "include_eds"))
    configuration, _ = read_configuration(dump, rig.proxy.clock)
    address = SocketAddress("127.0.0.1", 0)
    question = Question(source=address, destination=SocketAddress("127.0.0.1", 1), listener="l")
    told: Json = json.loads(json.dumps(explain(question, configuration)))
    bound = rig.proxy.listeners.active[0].address_text  # the port that the kernel chose is in no dump
    return {**told, "hop": {**told["hop"], "address": bound}}


def test_connections_are_closed_while_a_filter_without_default_is_missing(tmp_path: Path) -> None:
    """The filter may be one that denies: nothing is served without it."""

    async def body(rig: Rig) -> None:
        async with application() as port:
            source = {**ADS, "initial_fetch_timeout": "0.2s"}
            rig.publish(listener(chain(awaited(config_source=source), tcp())), cluster(port))
            await rig.until(lambda: rig.proxy.listeners.active)
            assert await ask(rig.port("l")) == b""
            assert rig.count("listener.127.0.0.1_0.network_extension_config_missing") == 1
            told = json.loads(page(rig, "/explain", "source=127.0.0.1&destination=127.0.0.1:1&listener=l"))
            assert told["hop"]["verdict"] == "closed: the configuration of a filter has not arrived"
            assert told["hop"]["missing_filters"] == ["guard"]

    run(tmp_path, body)


def test_invalid_discovered_filter_is_refused_and_the_good_version_serves(tmp_path: Path) -> None:
    async def body(rig: Rig) -> None:
        async with application() as port:
            rest = listener(chain(awaited(type_urls=[]), tcp())), cluster(port)
            rig.publish(*rest, extension(ALL))
            await rig.until(lambda: rig.proxy.listeners.active)
            for bad, words in (
                (tcp()["typed_config"], "the terminal filter of a chain is configured inline only"),
                ({**NOBODY, "delay_deny": "1s"}, "delay_deny"),
            ):
                before = len(refusals(rig))
                rig.publish(*rest, extension(bad))
                await rig.until(lambda before=before: len(refusals(rig)) > before)  # type: ignore[misc]
                assert words in refusals(rig)[-1]
                assert await ask(rig.port("l")) == b"ping"
            assert rig.proxy.listeners.extensions["guard"].failure is not None

    run(tmp_path, body)


def test_a_limit_counts_on_through_an_update_of_the_listener(tmp_path: Path) -> None:
    async def body(rig: Rig) -> None:
        async with application() as port:
            other = chain(tcp(), name="other", filter_chain_match={"destination_port": 1})
            mine = chain(awaited(), tcp())
            rig.publish(listener(mine, other), cluster(port), extension(limit(1)))
            await rig.until(lambda: rig.proxy.listeners.active)
            connection = await Open.to(rig.port("l"))
            assert await connection.say(b"one") == b"one"
            other = chain(tcp(), name="other", filter_chain_match={"destination_port": 2})
            rig.publish(listener(mine, other), cluster(port), extension(limit(1)))
            await rig.until(lambda: rig.count("listener_manager.listener_in_place_updated") == 1)
            assert await ask(rig.port("l")) == b"", "the one place is taken"
            await connection.close()

    run(tmp_path, body)


def test_listener_with_a_refused_first_filter_opens_after_the_fetch_timeout(tmp_path: Path) -> None:
    """What is wrong with one filter or route table must not keep the proxy from its start for ever."""

    async def body(rig: Rig) -> None:
        async with application() as port:
            source = {**ADS, "initial_fetch_timeout": "0.2s"}
            filtered = listener(chain(awaited(config_source=source), tcp()))
            routed_by = {"rds": {"route_config_name": "routes", "config_source": source}}
            routed = listener(chain(connection_manager(routed_by)), name="r")
            bad_routes = ("route", {"name": "routes", "virtual_hosts": [{"name": "v"}]})
            rig.publish(filtered, routed, cluster(port), bad_routes, extension({**NOBODY, "delay_deny": "1s"}))
            await rig.until(lambda: len(rig.proxy.listeners.active) == 2)
            assert await ask(rig.port("l")) == b""
            rig.publish(filtered, routed, cluster(port), extension(ALL))
            await rig.until(lambda: rig.proxy.listeners.active[0].live_chains[0].rbac)
            assert await ask(rig.port("l")) == b"ping"

    run(tmp_path, body)
