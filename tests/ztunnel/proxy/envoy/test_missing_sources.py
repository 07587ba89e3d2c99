"""Listeners and clusters that name a source which the proxy does not have: refused by name, the others serve."""

import asyncio
import json
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.ztunnel.proxy.envoy.harness import (
    SERVER,
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
    tls,
)
from xds.dialects.envoy.reading import ConfigError
from xds.model.tls import AdsSource, FileSource, GrpcSource
from xds.proto import registry
from xds.proto.envoy.config.bootstrap.v3.bootstrap_pb2 import Bootstrap
from xds.proto.envoy.config.listener.v3.listener_pb2 import Listener
from xds.proto.json import parse_value
from ztunnel.cli import main as command
from ztunnel.proxy.envoy.config.settings import Switches
from ztunnel.proxy.envoy.config.sources import Sources
from ztunnel.runtime.tasks import errors_of

NOWHERE: Json = {
    "api_config_source": {"api_type": "GRPC", "grpc_services": [{"envoy_grpc": {"cluster_name": "gone"}}]}
}
ADS: Json = {"ads": {}}
WHY = {
    "gone": "no static cluster 'gone' with one endpoint",
    "ads": "the configuration requests ADS, but the bootstrap has no ads_config",
}


def by_rds(source: Json) -> tuple[str, Json]:
    routes = {"rds": {"route_config_name": "routes", "config_source": source}}
    return listener(chain(connection_manager(routes)), name="bad")


def by_ecds(source: Json) -> tuple[str, Json]:
    kind = T + "istio.telemetry.workloadmetadata.v1.WorkloadMetadataResources"
    discovery = {"config_source": source, "type_urls": [kind]}
    return listener(name="bad", listener_filters=[{"name": "meta", "config_discovery": discovery}])


def by_sds(source: Json) -> tuple[str, Json]:
    return listener(chain(transport_socket=tls(SERVER, server=True, source=source)), name="bad")


Wants = Callable[[Json], tuple[str, Json]]
WANTS = pytest.mark.parametrize("wants", [by_rds, by_ecds, by_sds], ids=["rds", "ecds", "sds"])


async def refused(harness: Harness, *resources: tuple[str, Json]) -> str:
    """Publish, and return the error of the answer that has one. An earlier answer can still arrive."""
    before = len(harness.answers)
    harness.publish(*resources)
    await harness.until(lambda: any(error for _, error in harness.answers[before:]))
    return next(error for _, error in harness.answers[before:] if error)


@WANTS
def test_listener_with_a_source_of_an_unknown_cluster_is_refused(wants: Wants, tmp_path: Path) -> None:
    async def body(harness: Harness) -> None:
        async with application(b"here") as port:
            error = await refused(harness, listener(), cluster(port), wants(NOWHERE))
            assert f"bad: {WHY['gone']}" in error
            await harness.until(lambda: harness.proxy.listeners.active and harness.proxy.clusters.get("app"))
            assert await ask(harness.port("l"), b"") == b"here"
            assert harness.proxy.listeners.warming == []
            assert harness.proxy.listeners.failures["bad"].details.startswith(WHY["gone"])
            # The name is free: a good version of it serves.
            harness.publish(listener(), cluster(port), listener(name="bad"))
            await harness.until(lambda: len(harness.proxy.listeners.active) == 2)
            assert await ask(harness.port("bad"), b"") == b"here"
            # A bad version leaves the good one unchanged.
            await refused(harness, listener(), cluster(port), wants(NOWHERE))
            assert await ask(harness.port("bad"), b"") == b"here"

    run(tmp_path, body)


@WANTS
def test_start_with_a_listener_of_an_unknown_source(wants: Wants, tmp_path: Path) -> None:
    """It kept the whole proxy from starting: warming had failed in a task of its own."""

    async def body(harness: Harness) -> None:
        assert [each.name for each in harness.proxy.listeners.active] == ["l"]
        assert await ask(harness.port("l"), b"x") == b""

    run(tmp_path, body, listener(), cluster(), wants(NOWHERE))


@WANTS
def test_ads_without_an_aggregated_stream(
    wants: Wants, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    documents = [listener()[1], wants(ADS)[1]]
    resources = [{"@type": registry.type_url(Listener), **document} for document in documents]
    (tmp_path / "lds.json").write_text(json.dumps({"resources": resources}))

    def extend(bootstrap: Bootstrap) -> None:
        bootstrap.dynamic_resources.Clear()
        bootstrap.dynamic_resources.lds_config.path_config_source.path = str(tmp_path / "lds.json")

    async def body(harness: Harness) -> None:
        assert [each.name for each in harness.proxy.listeners.active] == ["l"]
        assert harness.proxy.listeners.failures["bad"].details == WHY["ads"]

    run(tmp_path, body, extend=extend)
    bootstrap = {"dynamic_resources": {"lds_config": {"path_config_source": {"path": str(tmp_path / "lds.json")}}}}
    (tmp_path / "bootstrap.json").write_text(json.dumps(bootstrap))
    assert command(["proxy", "--bootstrap", str(tmp_path / "bootstrap.json"), "--validate"]) == 1
    assert f"lds.json: resources[1] (bad): {WHY['ads']}" in capsys.readouterr().out


@WANTS
def test_validate_finds_an_unknown_cluster(
    wants: Wants, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    bootstrap = {"static_resources": {"listeners": [listener()[1], wants(NOWHERE)[1]]}}
    (tmp_path / "bootstrap.json").write_text(json.dumps(bootstrap))
    assert command(["proxy", "--bootstrap", str(tmp_path / "bootstrap.json"), "--validate"]) == 1
    (fault,) = [line for line in capsys.readouterr().out.splitlines() if "bad" in line]
    assert f"(bad): {WHY['gone']}" in fault


@pytest.mark.parametrize("source", [NOWHERE, ADS], ids=["gone", "ads"])
@pytest.mark.parametrize("by", ["eds", "sds"])
def test_cluster_with_a_source_of_an_unknown_cluster_is_refused(
    source: Json, by: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    bad = cluster(name="bad", transport_socket=tls(SERVER, server=False, source=source))
    if by == "eds":
        bad = "cluster", {"name": "bad", "type": "EDS", "eds_cluster_config": {"eds_config": source}}
    bootstrap = {"static_resources": {"clusters": [cluster()[1], bad[1]]}}
    (tmp_path / "bootstrap.json").write_text(json.dumps(bootstrap))
    assert command(["proxy", "--bootstrap", str(tmp_path / "bootstrap.json"), "--validate"]) == 1
    assert f"(bad): {WHY['gone' if source is NOWHERE else 'ads']}" in capsys.readouterr().out
    if source is ADS:
        return

    async def body(harness: Harness) -> None:
        async with application(b"here") as port:
            await refused(harness, listener(), cluster(port), bad)
            await harness.until(lambda: harness.proxy.listeners.active and harness.proxy.clusters.get("app"))
            assert harness.proxy.clusters.failures["bad"].details.startswith(WHY["gone"])
            assert await ask(harness.port("l"), b"") == b"here"
            # Twice: a secret that could not be requested must not count as one that will arrive.
            again = bad[0], {**bad[1], "connect_timeout": "7s"}
            await refused(harness, listener(), cluster(port), again)

    run(tmp_path, body)


@pytest.mark.parametrize("kind", ["cds_config", "lds_config"])
@pytest.mark.parametrize("source", [NOWHERE, ADS], ids=["gone", "ads"])
def test_a_bootstrap_whose_own_discovery_has_no_source(
    kind: str, source: Json, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "bootstrap.json"
    path.write_text(json.dumps({"dynamic_resources": {kind: source}}))
    for flags in (["--validate"], []):
        assert command(["proxy", "--bootstrap", str(path), *flags]) != 0
        shown = "".join(capsys.readouterr())
        assert f"dynamic_resources.{kind}: {WHY['gone' if source is NOWHERE else 'ads']}" in shown


def test_static_listeners_end_the_start_in_words(tmp_path: Path) -> None:
    """The error is reported like any other fault of a static resource."""

    def extend(bootstrap: Bootstrap) -> None:
        bootstrap.static_resources.listeners.append(parse_value(by_sds(NOWHERE)[1], Listener).message)

    async def main() -> None:
        harness = Harness(tmp_path, Switches(), extend)
        async with harness.server:
            await harness.proxy.run()

    with pytest.raises(BaseExceptionGroup) as caught:
        asyncio.run(main())
    (error,) = errors_of(caught.value)
    assert isinstance(error, ConfigError)
    assert WHY["gone"] in str(error)


def test_a_bug_in_warming_blocks_neither_start_nor_others(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The bug has to be planted: none is known."""
    from ztunnel.proxy.envoy.listeners.listener import LiveListener

    settled = LiveListener.settled

    async def broken(self: LiveListener) -> None:
        if self.name == "bad":
            raise KeyError("oops")
        await settled(self)

    monkeypatch.setattr(LiveListener, "settled", broken)

    async def body(harness: Harness) -> None:
        assert [each.name for each in harness.proxy.listeners.active] == ["l"]
        assert harness.proxy.listeners.warming == []
        assert "KeyError" in harness.proxy.listeners.failures["bad"].details

    run(tmp_path, body, listener(), cluster(), listener(name="bad"))
    assert any(record.exc_info and "bad" in record.getMessage() for record in caplog.records)


def test_a_source_is_checked_without_opening_a_file() -> None:
    opened: list[FileSource] = []

    def open_file(source: FileSource) -> object:
        opened.append(source)
        return object()

    def open_stream(source: GrpcSource) -> object:
        raise ConfigError(f"no static cluster '{source.cluster}'")

    sources = Sources(None, open_file, open_stream)  # type: ignore[arg-type]
    sources.check(FileSource("/x", ""))
    assert opened == []
    with pytest.raises(ConfigError, match="no static cluster 'gone'"):
        sources.check(GrpcSource("gone", False))
    with pytest.raises(ConfigError, match="no ads_config"):
        sources.check(AdsSource())
