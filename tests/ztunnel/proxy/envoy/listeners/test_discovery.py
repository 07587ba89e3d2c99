"""Routes and network filters that come by RDS and ECDS: their chains wait for them, and follow them ever after."""

import json
from pathlib import Path
from typing import Any

from tests.ztunnel.proxy.envoy.harness import (
    Harness,
    Json,
    Open,
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
    async def body(harness: Harness) -> None:
        def routed() -> set[str]:
            (active,) = harness.proxy.listeners.active
            managers: list[Any] = [each.manager for each in active.live_chains if each.manager is not None]
            return {str(manager.routes) for manager in managers}

        rest = cluster(1), cluster(2, name="other")
        harness.publish(listener(by_rds(1), chain(tcp())), routes("app"), *rest)
        await harness.until(lambda: harness.proxy.listeners.active and "app" in str(routed()))
        harness.publish(listener(by_rds(1), chain(tcp("other"))), routes("app"), *rest)
        await harness.until(lambda: harness.count("listener_manager.listener_in_place_updated") == 1)
        harness.publish(listener(by_rds(1), chain(tcp("other"))), routes("other"), *rest)
        await harness.until(lambda: "other" in str(routed()))

    run(tmp_path, body)


# Network filters

RBAC = "envoy.extensions.filters.network.rbac.v3.RBAC"
LIMIT = "envoy.extensions.filters.network.connection_limit.v3.ConnectionLimit"
ALL, NOBODY = rbac(None)["typed_config"], rbac(None, "DENY")["typed_config"]


def awaited(**more: Any) -> Json:
    """Return the placeholder of a filter that is discovered by ECDS."""
    discovery = {"config_source": ADS, "type_urls": [T + RBAC, T + LIMIT], **more}
    return {"name": "guard", "config_discovery": discovery}


def extension(config: Json) -> tuple[str, Json]:
    return "extension", {"name": "guard", "typed_config": config}


def limit(most: int) -> Json:
    return {"@type": T + LIMIT, "stat_prefix": "few", "max_connections": most}


def refusals(harness: Harness) -> list[str]:
    return [error for kind, error in harness.answers if kind == "TypedExtensionConfig" and error]


def test_listener_warms_until_its_ecds_filter_arrives_and_follows_versions(tmp_path: Path) -> None:
    async def body(harness: Harness) -> None:
        async with application() as port:
            rest = listener(chain(awaited(), tcp())), cluster(port)
            harness.publish(*rest)
            await harness.until(lambda: harness.proxy.listeners.warming)
            assert not harness.proxy.listeners.active
            harness.publish(*rest, extension(ALL))
            await harness.until(lambda: harness.proxy.listeners.active)
            assert await ask(harness.port("l")) == b"ping"
            harness.publish(*rest, extension(NOBODY))
            await harness.until(lambda: not is_allowed(harness))
            assert await ask(harness.port("l")) == b""
            harness.publish(*rest, extension(ALL))
            await harness.until(lambda: is_allowed(harness))
            assert await ask(harness.port("l")) == b"ping"
            assert "guard" in harness.proxy.listeners.extensions

    run(tmp_path, body)


def is_allowed(harness: Harness) -> bool:
    """Return whether the filter in force allows any client."""
    (active,) = harness.proxy.listeners.active
    (live,) = active.live_chains
    (found,) = live.rbac
    assert found.model.rules is not None
    here = SocketAddress("127.0.0.1", 1)
    return judge(found.model.rules, ConnectionFacts(source=here, direct_source=here, destination=here)).allowed


def test_a_connection_that_a_new_version_denies_is_ended(tmp_path: Path) -> None:
    async def body(harness: Harness) -> None:
        async with application() as port:
            rest = listener(chain(awaited(), tcp())), cluster(port)
            harness.publish(*rest, extension(ALL))
            await harness.until(lambda: harness.proxy.listeners.active)
            connection = await Open.to(harness.port("l"))
            assert await connection.say(b"one") == b"one"
            harness.publish(*rest, extension(NOBODY))
            assert await connection.ended()
            await connection.close()

    run(tmp_path, body)


def test_default_filter_configuration_serves_without_a_discovered_one(tmp_path: Path) -> None:
    async def body(harness: Harness) -> None:
        async with application() as port:
            default = awaited(default_config=NOBODY, apply_default_config_without_warming=True)
            rest = listener(chain(default, tcp())), cluster(port)
            harness.publish(*rest)
            await harness.until(lambda: harness.proxy.listeners.active)
            assert await ask(harness.port("l")) == b""
            question = "source=127.0.0.1&destination=127.0.0.1:1&listener=l"
            assert from_a_dump(harness) == json.loads(page(harness, "/explain", question))
            harness.publish(*rest, extension(ALL))
            await harness.until(lambda: is_allowed(harness))
            assert await ask(harness.port("l")) == b"ping"
            told = from_a_dump(harness)
            assert told == json.loads(page(harness, "/explain", question))
            judged = {"policy": "rule", "action": "allow", "holds": True, "because": "always"}
            assert told["hop"]["policies"] == [{"allowed": True, "policy": "rule", "judged": [judged]}]

    run(tmp_path, body)


def from_a_dump(harness: Harness) -> Json:
    """Return what explain answers about a connection from a dump, which has the filters from ECDS."""
    dump = json.loads(page(harness, "/config_dump", "include_eds"))
    configuration, _ = read_configuration(dump, harness.proxy.clock)
    address = SocketAddress("127.0.0.1", 0)
    question = Question(source=address, destination=SocketAddress("127.0.0.1", 1), listener="l")
    told: Json = json.loads(json.dumps(explain(question, configuration)))
    bound = harness.proxy.listeners.active[0].address_text  # the port that the kernel chose is in no dump
    return {**told, "hop": {**told["hop"], "address": bound}}


def test_connections_are_closed_while_a_filter_without_default_is_missing(tmp_path: Path) -> None:
    """The missing filter might deny, so nothing is served without it."""

    async def body(harness: Harness) -> None:
        async with application() as port:
            source = {**ADS, "initial_fetch_timeout": "0.2s"}
            harness.publish(listener(chain(awaited(config_source=source), tcp())), cluster(port))
            await harness.until(lambda: harness.proxy.listeners.active)
            assert await ask(harness.port("l")) == b""
            assert harness.count("listener.127.0.0.1_0.network_extension_config_missing") == 1
            told = json.loads(page(harness, "/explain", "source=127.0.0.1&destination=127.0.0.1:1&listener=l"))
            assert told["hop"]["verdict"] == "closed: the configuration of a filter has not arrived"
            assert told["hop"]["missing_filters"] == ["guard"]

    run(tmp_path, body)


def test_invalid_discovered_filter_is_refused_and_the_good_version_serves(tmp_path: Path) -> None:
    async def body(harness: Harness) -> None:
        async with application() as port:
            rest = listener(chain(awaited(type_urls=[]), tcp())), cluster(port)
            harness.publish(*rest, extension(ALL))
            await harness.until(lambda: harness.proxy.listeners.active)
            for bad, words in (
                (tcp()["typed_config"], "the terminal filter of a chain is configured inline only"),
                ({**NOBODY, "delay_deny": "1s"}, "delay_deny"),
            ):
                before = len(refusals(harness))
                harness.publish(*rest, extension(bad))
                await harness.until(lambda before=before: len(refusals(harness)) > before)  # type: ignore[misc]
                assert words in refusals(harness)[-1]
                assert await ask(harness.port("l")) == b"ping"
            assert harness.proxy.listeners.extensions["guard"].failure is not None

    run(tmp_path, body)


def test_a_limit_counts_on_through_an_update_of_the_listener(tmp_path: Path) -> None:
    async def body(harness: Harness) -> None:
        async with application() as port:
            other = chain(tcp(), name="other", filter_chain_match={"destination_port": 1})
            mine = chain(awaited(), tcp())
            harness.publish(listener(mine, other), cluster(port), extension(limit(1)))
            await harness.until(lambda: harness.proxy.listeners.active)
            connection = await Open.to(harness.port("l"))
            assert await connection.say(b"one") == b"one"
            other = chain(tcp(), name="other", filter_chain_match={"destination_port": 2})
            harness.publish(listener(mine, other), cluster(port), extension(limit(1)))
            await harness.until(lambda: harness.count("listener_manager.listener_in_place_updated") == 1)
            assert await ask(harness.port("l")) == b"", "the one place is taken"
            await connection.close()

    run(tmp_path, body)


def test_listener_with_a_refused_first_filter_opens_after_the_fetch_timeout(tmp_path: Path) -> None:
    """A fault in one filter or route table must not delay the proxy's start for ever."""

    async def body(harness: Harness) -> None:
        async with application() as port:
            source = {**ADS, "initial_fetch_timeout": "0.2s"}
            filtered = listener(chain(awaited(config_source=source), tcp()))
            routed_by = {"rds": {"route_config_name": "routes", "config_source": source}}
            routed = listener(chain(connection_manager(routed_by)), name="r")
            bad_routes = ("route", {"name": "routes", "virtual_hosts": [{"name": "v"}]})
            harness.publish(filtered, routed, cluster(port), bad_routes, extension({**NOBODY, "delay_deny": "1s"}))
            await harness.until(lambda: len(harness.proxy.listeners.active) == 2)
            assert await ask(harness.port("l")) == b""
            harness.publish(filtered, routed, cluster(port), extension(ALL))
            await harness.until(lambda: harness.proxy.listeners.active[0].live_chains[0].rbac)
            assert await ask(harness.port("l")) == b"ping"

    run(tmp_path, body)
