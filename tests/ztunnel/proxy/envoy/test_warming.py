"""Nothing waits for another thing's warming: each test has a part that never arrives, without a limit."""

import asyncio
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.ztunnel.proxy.envoy.rig import (
    Json,
    Rig,
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

    async def body(rig: Rig) -> None:
        async with application(b"1") as one, application(b"2") as two, application(b"3") as three:
            rest = listener(), cluster(2, name="other")
            rig.publish(*rest, cluster(one))
            await rig.until(lambda: rig.proxy.listeners.active and rig.proxy.clusters.get("app"))
            assert await ask(rig.port("l"), b"") == b"1"
            rig.publish(listener(), stuck, cluster(two))
            await rig.until(lambda: [each.model.name for each in rig.proxy.clusters.warming] == ["aaa-stuck"])
            await rig.until(lambda: rig.proxy.clusters.get("other") is None)  # removals do not wait, either
            assert await ask(rig.port("l"), b"") == b"2"
            rig.publish(listener(), stuck, cluster(three))
            await rig.until(lambda: rig.count("cluster_manager.cluster_modified") == 2)
            assert await ask(rig.port("l"), b"") == b"3"
            rig.publish(listener(), cluster(one))
            await rig.until(lambda: rig.count("cluster_manager.cluster_modified") == 3)
            await rig.until(lambda: not rig.proxy.clusters.warming)
            assert await ask(rig.port("l"), b"") == b"1"

    run(tmp_path, body)


def test_old_version_serves_while_the_new_one_never_warms_and_a_third_replaces_both(tmp_path: Path) -> None:
    async def body(rig: Rig) -> None:
        async with application(b"1") as one, application(b"3") as three:
            assert await rig.published(listener(), cluster(one)) is None
            rig.publish(listener(), by_eds("app"))
            await rig.until(lambda: rig.proxy.clusters.warming)
            assert await ask(rig.port("l"), b"") == b"1"
            rig.publish(listener(), cluster(three))
            await rig.until(lambda: not rig.proxy.clusters.warming)
            assert await ask(rig.port("l"), b"") == b"3"

    run(tmp_path, body)


def test_ack_of_clusters_waits_until_they_are_warm(tmp_path: Path) -> None:
    async def body(rig: Rig) -> None:
        def answers() -> int:
            return sum(kind == "Cluster" for kind, _ in rig.answers)

        assert await rig.published(listener(), cluster(1)) is None
        before = answers()
        rig.publish(listener(), cluster(1), by_eds("late"))
        await rig.until(lambda: rig.proxy.clusters.warming)
        assert answers() == before
        rig.publish(*rig.resources, ("endpoints", {"cluster_name": "late"}))
        await rig.until(lambda: rig.proxy.clusters.get("late"))
        await rig.until(lambda: answers() == before + 1)

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
    async def body(rig: Rig) -> None:
        async with application(b"1") as one, application(b"2") as two:
            waiting = listener(stuck(), name="aaa-stuck")
            clusters = cluster(one), cluster(two, name="two")
            assert await rig.published(listener(), *clusters) is None
            assert await rig.published(waiting, listener(chain(tcp("two"))), *clusters) is None
            await rig.until(lambda: rig.count("listener_manager.listener_in_place_updated") == 1)
            assert await ask(rig.port("l"), b"") == b"2"
            assert await rig.published(waiting, listener(name="m"), *clusters) is None
            await rig.until(lambda: [each.name for each in rig.proxy.listeners.active] == ["m"])
            assert await ask(rig.port("m"), b"") == b"1"
            assert await rig.published(listener(name="m"), *clusters) is None
            assert not rig.proxy.listeners.warming

    run(tmp_path, body)
