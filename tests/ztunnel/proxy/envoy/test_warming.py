"""No part waits for another one's warming: each test has a part that never arrives, without a time limit."""

import asyncio
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.ztunnel.proxy.envoy.harness import (
    Harness,
    Json,
    T,
    application,
    ask,
    chain,
    cluster,
    connection_manager,
    listener,
    run,
    tcp,
)
from ztunnel.proxy.dataplane.resolver import Resolver

ADS = {"ads": {}, "resource_api_version": "V3", "initial_fetch_timeout": "0s"}
SECRET = {"name": "never", "sds_config": ADS}
RBAC = "envoy.extensions.filters.network.rbac.v3.RBAC"
TLS = "envoy.extensions.transport_sockets.tls.v3."


def by_eds(name: str) -> tuple[str, Json]:
    return "cluster", {"name": name, "type": "EDS", "eds_cluster_config": {"eds_config": ADS}}


def with_secret(name: str) -> tuple[str, Json]:
    context = {"common_tls_context": {"validation_context_sds_secret_config": SECRET}}
    return cluster(
        1,
        name=name,
        transport_socket={"name": "tls", "typed_config": {"@type": f"{T}{TLS}UpstreamTlsContext", **context}},
    )


def by_dns(name: str) -> tuple[str, Json]:
    _, document = cluster(1, name=name)
    address = document["load_assignment"]["endpoints"][0]["lb_endpoints"][0]["endpoint"]["address"]
    address["socket_address"]["address"] = "never.example"
    return "cluster", {**document, "type": "STRICT_DNS"}


NEVER_WARM = {"endpoints": by_eds, "secret": with_secret, "name": by_dns}


@pytest.fixture
def silent_dns(monkeypatch: pytest.MonkeyPatch) -> None:
    """A name server that never answers."""

    async def resolve(*_: object) -> None:
        await asyncio.Event().wait()

    monkeypatch.setattr(Resolver, "resolve", resolve)


@pytest.mark.usefixtures("silent_dns")
@pytest.mark.parametrize("kind", NEVER_WARM)
def test_cluster_that_never_warms_delays_no_other_cluster_and_no_later_update(tmp_path: Path, kind: str) -> None:
    stuck = NEVER_WARM[kind]("aaa-stuck")

    async def body(harness: Harness) -> None:
        async with application(b"1") as one, application(b"2") as two, application(b"3") as three:
            rest = listener(), cluster(2, name="other")
            harness.publish(*rest, cluster(one))
            await harness.until(lambda: harness.proxy.listeners.active and harness.proxy.clusters.get("app"))
            assert await ask(harness.port("l"), b"") == b"1"
            harness.publish(listener(), stuck, cluster(two))
            await harness.until(
                lambda: [each.model.name for each in harness.proxy.clusters.warming] == ["aaa-stuck"]
            )
            await harness.until(
                lambda: harness.proxy.clusters.get("other") is None
            )  # removals do not wait, either
            assert await ask(harness.port("l"), b"") == b"2"
            harness.publish(listener(), stuck, cluster(three))
            await harness.until(lambda: harness.count("cluster_manager.cluster_modified") == 2)
            assert await ask(harness.port("l"), b"") == b"3"
            harness.publish(listener(), cluster(one))
            await harness.until(lambda: harness.count("cluster_manager.cluster_modified") == 3)
            await harness.until(lambda: not harness.proxy.clusters.warming)
            assert await ask(harness.port("l"), b"") == b"1"

    run(tmp_path, body)


def test_old_version_serves_while_the_new_one_never_warms_and_a_third_replaces_both(tmp_path: Path) -> None:
    async def body(harness: Harness) -> None:
        async with application(b"1") as one, application(b"3") as three, application(b"3") as four:
            assert await harness.published(listener(), cluster(one)) is None
            harness.publish(listener(), by_eds("app"))
            await harness.until(lambda: harness.proxy.clusters.warming)
            assert await ask(harness.port("l"), b"") == b"1"
            assert harness.count("cluster.app.membership_healthy") == 1  # the hosts in use
            assert harness.count("cluster.app.warming_state") == 1
            harness.publish(listener(), cluster(three, four))
            await harness.until(lambda: not harness.proxy.clusters.warming)
            assert await ask(harness.port("l"), b"") == b"3"
            assert harness.count("cluster.app.membership_healthy") == 2
            assert harness.count("cluster.app.warming_state") == 0

    run(tmp_path, body)


def test_ack_of_clusters_waits_until_they_are_warm(tmp_path: Path) -> None:
    async def body(harness: Harness) -> None:
        def answers() -> int:
            return sum(kind == "Cluster" for kind, _ in harness.answers)

        assert await harness.published(listener(), cluster(1)) is None
        before = answers()
        harness.publish(listener(), cluster(1), by_eds("late"))
        await harness.until(lambda: harness.proxy.clusters.warming)
        assert answers() == before
        harness.publish(*harness.resources, ("endpoints", {"cluster_name": "late"}))
        await harness.until(lambda: harness.proxy.clusters.get("late"))
        await harness.until(lambda: answers() == before + 1)

    run(tmp_path, body)


def test_a_file_without_endpoints_ends_the_wait_for_them(tmp_path: Path) -> None:
    """Like in Envoy. A start would otherwise last until the time limit of the first fetch, 15 s by default."""
    path = tmp_path / "eds.json"
    path.write_text('{"version_info": "1", "resources": []}')
    source = {**ADS, "path_config_source": {"path": str(path)}}
    del source["ads"]
    document = {"name": "app", "type": "EDS", "eds_cluster_config": {"eds_config": source}}

    async def body(harness: Harness) -> None:
        assert await harness.published(listener(), ("cluster", document)) is None
        assert await ask(harness.port("l")) == b""
        assert harness.count("cluster.app.upstream_cx_none_healthy") == 1

    run(tmp_path, body)


def by_rds() -> Json:
    routes = {"rds": {"route_config_name": "never", "config_source": ADS}}
    return chain(connection_manager(routes))


def by_ecds() -> Json:
    discovery = {"config_source": ADS, "type_urls": [T + RBAC]}
    return chain({"name": "guard", "config_discovery": discovery}, tcp())


def by_sds() -> Json:
    context = {"common_tls_context": {"tls_certificate_sds_secret_configs": [SECRET]}}
    socket = {"name": "tls", "typed_config": {"@type": f"{T}{TLS}DownstreamTlsContext", **context}}
    return chain(tcp(), transport_socket=socket)


@pytest.mark.parametrize("stuck", [by_rds, by_ecds, by_sds])
def test_listener_that_never_warms_delays_no_other_listener_and_no_later_update(
    tmp_path: Path, stuck: Callable[[], Json]
) -> None:
    async def body(harness: Harness) -> None:
        async with application(b"1") as one, application(b"2") as two:
            waiting = listener(stuck(), name="aaa-stuck")
            clusters = cluster(one), cluster(two, name="two")
            assert await harness.published(listener(), *clusters) is None
            assert await harness.published(waiting, listener(chain(tcp("two"))), *clusters) is None
            await harness.until(lambda: harness.count("listener_manager.listener_in_place_updated") == 1)
            assert await ask(harness.port("l"), b"") == b"2"
            assert await harness.published(waiting, listener(name="m"), *clusters) is None
            await harness.until(lambda: [each.name for each in harness.proxy.listeners.active] == ["m"])
            assert await ask(harness.port("m"), b"") == b"1"
            assert await harness.published(listener(name="m"), *clusters) is None
            assert not harness.proxy.listeners.warming

    run(tmp_path, body)
