"""Configuration with the same effect as in Envoy, observed from outside. Each was once accepted with another
meaning.
"""

import asyncio
import contextlib
import socket
from pathlib import Path
from typing import Any

import pytest

from tests.ports import free_port
from tests.ztunnel.proxy.envoy.harness import (
    Harness,
    Json,
    Open,
    T,
    access_log,
    application,
    ask,
    chain,
    cluster,
    connect_route,
    connection_manager,
    endpoint,
    listener,
    run,
    tcp,
)
from xds.errors import ConfigError
from xds.proto.envoy.config.bootstrap.v3.bootstrap_pb2 import Bootstrap
from xds.proto.json import parse_value
from ztunnel.proxy.dataplane.resolver import Answer, ResolveFailed, Resolver
from ztunnel.proxy.envoy.app import Proxy
from ztunnel.proxy.envoy.config.bootstrap import read_bootstrap
from ztunnel.proxy.envoy.config.settings import Settings
from ztunnel.runtime.tasks import errors_of


def test_drop_overloads_leave_connections_of_tcp_proxy_alone(tmp_path: Path) -> None:
    async def body(harness: Harness) -> None:
        async with application() as port:
            _, document = cluster(port)
            drop = {"category": "all", "drop_percentage": {"numerator": 100}}
            document["load_assignment"]["policy"] = {"drop_overloads": [drop]}
            await harness.published(listener(), ("cluster", document))
            await harness.until(lambda: harness.proxy.clusters.get("app"))
            assert await ask(harness.port("l")) == b"ping"

    run(tmp_path, body)


def inspected(kind: str, protocol: str) -> Json:
    """A listener whose chain for ``protocol`` leads to ``app``, and the rest to ``other``."""
    inspector = {"@type": f"{T}envoy.extensions.filters.listener.{kind}.v3.HttpInspector"}
    _, document = listener(
        chain(tcp(), filter_chain_match={"application_protocols": [protocol]}),
        chain(tcp("other"), name="rest"),
        listener_filters=[{"name": "i", "typed_config": inspector}],
    )
    return document


@pytest.mark.parametrize(
    ("request_line", "reply"),
    [
        (b"PROPFIND / HTTP/1.1", b"http"),
        (b"get / HTTP/1.1", b"http"),
        (b"M-SEARCH * HTTP/1.1", b"http"),
        (b"GET / HTTP/1.0", b"rest"),
        (b"G(T / HTTP/1.1", b"rest"),
        (b"SSH-2.0-x", b"rest"),
    ],
)
def test_any_token_is_a_method_to_the_http_inspector(tmp_path: Path, request_line: bytes, reply: bytes) -> None:
    async def body(harness: Harness) -> None:
        async with application(b"http") as http, application(b"rest") as rest:
            assert None is await harness.published(
                ("listener", inspected("http_inspector", "http/1.1")), cluster(http), cluster(rest, name="other")
            )
            await harness.until(lambda: harness.proxy.listeners.active)
            answer = await ask(harness.port("l"), request_line + b"\r\n\r\n")
            assert answer[:4] == reply

    run(tmp_path, body)


def test_connection_that_no_chain_matches_is_logged_with_its_reason(tmp_path: Path) -> None:
    async def body(harness: Harness) -> None:
        only = chain(tcp(), filter_chain_match={"destination_port": 9})
        logs = access_log(tmp_path)
        logs[0]["typed_config"]["log_format"]["json_format"]["why"] = "%RESPONSE_CODE_DETAILS%"
        await harness.published(listener(only, access_log=logs), cluster(1))
        await harness.until(lambda: harness.proxy.listeners.active)
        assert await ask(harness.port("l")) == b""
        (line,) = await harness.log()
        assert (line["flags"], line["why"]) == ("NR", "filter_chain_not_found")

    run(tmp_path, body)


@pytest.mark.parametrize("compatible", [False, True])
def test_ipv6_listener_takes_ipv4_only_with_ipv4_compat(tmp_path: Path, compatible: bool) -> None:
    async def body(harness: Harness) -> None:
        async with application() as port:
            address = {"socket_address": {"address": "::", "port_value": 0, "ipv4_compat": compatible}}
            await harness.published(listener(address=address), cluster(port))
            await harness.until(lambda: harness.proxy.listeners.active)
            if compatible:
                assert await ask(harness.port("l")) == b"ping"
            else:
                with pytest.raises(ConnectionRefusedError):
                    await ask(harness.port("l"))
            with socket.create_connection(("::1", harness.port("l")), 1):
                pass

    run(tmp_path, body)


def test_vanished_dns_name_removes_its_hosts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    state: dict[str, Any] = {"there": True}

    async def resolve(_: object, name: str, family: str) -> Answer:
        if name == "slow.test":
            await asyncio.sleep(0.2)
        if state["there"]:
            return Answer(("127.0.0.1",), 60.0)
        raise ResolveFailed("gone", absent=state["absent"])

    monkeypatch.setattr(Resolver, "resolve", resolve)

    def named(name: str, kind: str) -> tuple[str, Json]:
        _, document = cluster(1, name=kind, type=kind, dns_refresh_rate="0.01s")
        address = document["load_assignment"]["endpoints"][0]["lb_endpoints"][0]["endpoint"]["address"]
        address["socket_address"]["address"] = name
        return "cluster", document

    async def body(harness: Harness) -> None:
        def hosts(name: str) -> int:
            found = harness.proxy.clusters.get(name)
            return -1 if found is None else len(found.hosts.hosts)

        await harness.published(listener(), named("a.test", "STRICT_DNS"), named("a.test", "LOGICAL_DNS"))
        await harness.until(lambda: hosts("STRICT_DNS") == hosts("LOGICAL_DNS") == 1)
        state.update(there=False, absent=False)
        failed = harness.count("cluster.STRICT_DNS.update_failure")
        await harness.until(lambda: harness.count("cluster.STRICT_DNS.update_failure") > failed + 2)
        assert hosts("STRICT_DNS") == 1
        state["absent"] = True
        await harness.until(lambda: hosts("STRICT_DNS") == 0)
        assert hosts("LOGICAL_DNS") == 1
        state["there"] = True
        await harness.until(lambda: hosts("STRICT_DNS") == 1)

    run(tmp_path, body)


def test_entries_of_one_weighted_cluster_choose_their_own_subsets(tmp_path: Path) -> None:
    def entry(version: str) -> Json:
        return {"name": "app", "weight": 1, "metadata_match": {"filter_metadata": {"envoy.lb": {"v": version}}}}

    async def body(harness: Harness) -> None:
        async with application(b"1", echo=False) as one, application(b"2", echo=False) as two:
            hosts = [
                endpoint(port, metadata={"filter_metadata": {"envoy.lb": {"v": version}}})
                for port, version in ((one, "1"), (two, "2"))
            ]
            _, divided = cluster(lb_subset_config={"subset_selectors": [{"keys": ["v"]}]})
            divided["load_assignment"]["endpoints"] = [{"lb_endpoints": hosts}]
            proxy = tcp()
            del proxy["typed_config"]["cluster"]
            proxy["typed_config"]["weighted_clusters"] = {"clusters": [entry("1"), entry("2")]}
            assert await harness.published(listener(chain(proxy)), ("cluster", divided)) is None
            await harness.until(lambda: harness.proxy.listeners.active)
            assert {await ask(harness.port("l"), b"") for _ in range(40)} == {b"1", b"2"}

    run(tmp_path, body)


def test_remaining_breaker_limits_are_shown_if_tracked(tmp_path: Path) -> None:
    async def body(harness: Harness) -> None:
        async with application() as port:
            thresholds = [{"max_connections": 5, "track_remaining": True}, {"priority": "HIGH"}]
            await harness.published(listener(), cluster(port, circuit_breakers={"thresholds": thresholds}))
            await harness.until(lambda: harness.proxy.clusters.get("app"))
            assert harness.count("cluster.app.circuit_breakers.default.remaining_cx") == 5
            held = await Open.to(harness.port("l"))
            assert await held.say(b"x") == b"x"
            assert harness.count("cluster.app.circuit_breakers.default.remaining_cx") == 4
            await held.close()
            shown = {metric.name for metric in harness.proxy.stats}
            assert not any("high.remaining" in name for name in shown)

    run(tmp_path, body)


def test_route_that_passes_a_connect_on_is_refused_by_name(tmp_path: Path) -> None:
    async def body(harness: Harness) -> None:
        routes = connect_route("app", upgrade_configs=[])
        error = await harness.published(listener(chain(connection_manager({"route_config": routes}))), cluster(1))
        assert error is not None
        assert "upgrade_configs: this proxy terminates CONNECT" in error

    with contextlib.suppress(TimeoutError):
        run(tmp_path, body, listener(name="m"), cluster(1))


def test_static_listeners_with_one_address_are_refused(tmp_path: Path) -> None:

    _, document = listener()
    document["address"]["socket_address"]["port_value"] = free_port()
    static = {"listeners": [document, {**document, "name": "m"}], "clusters": [cluster(1)[1]]}
    bootstrap = parse_value({"node": {"id": "n"}, "static_resources": static}, Bootstrap).message
    settings = Settings(control_plane="", node="n", admin=None, readiness=None, metrics=None)

    async def main() -> None:
        await Proxy(settings, read_bootstrap(bootstrap)).run()

    with pytest.raises(ExceptionGroup) as caught:
        asyncio.run(main())
    (error,) = errors_of(caught.value)
    assert isinstance(error, ConfigError)
    assert "duplicate address" in str(error)


def test_proxy_header_hands_a_connection_over_with_use_original_dst(tmp_path: Path) -> None:
    async def body(harness: Harness) -> None:
        async with application() as port:
            kind = f"{T}envoy.extensions.filters.listener.proxy_protocol.v3.ProxyProtocol"
            proxied = [{"name": "p", "typed_config": {"@type": kind}}]
            named = {"socket_address": {"address": "10.1.0.1", "port_value": 10005}}
            assert None is await harness.published(
                listener(chain(tcp("nowhere")), use_original_dst=True, listener_filters=proxied),
                listener(name="m", address=named, bind_to_port=False),
                cluster(port),
            )
            await harness.until(lambda: len(harness.proxy.listeners.active) == 2)
            header = b"PROXY TCP4 192.0.2.1 10.1.0.1 1 10005\r\n"
            assert await ask(harness.port("l"), header + b"ping") == b"ping"
            elsewhere = b"PROXY TCP4 192.0.2.1 10.1.0.1 1 10006\r\n"
            assert await ask(harness.port("l"), elsewhere + b"ping") == b""

    run(tmp_path, body)
