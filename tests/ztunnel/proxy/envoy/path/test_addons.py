"""Addons and the connections of Envoy's dialect: the facts passed to hooks, and the effect of each verdict."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.ztunnel.proxy.envoy.harness import (
    CLIENT,
    SERVER,
    Harness,
    Identities,
    Open,
    access_log,
    application,
    ask,
    chain,
    cluster,
    listener,
    page,
    run,
    tcp,
    tunnel,
)
from tests.ztunnel.proxy.istio.path.test_addons import Scripted
from ztunnel.addons import Addon, Cut, Deny, Direction, Facts, Prefer, Verdict, Workload
from ztunnel.addons import Path as Way
from ztunnel.proxy.addons.host import AddonHost
from ztunnel.proxy.addons.load import load_class
from ztunnel.proxy.addons.process import AddonProcess
from ztunnel.proxy.addons.settings import AddonSettings
from ztunnel.proxy.envoy.config.settings import settings_from
from ztunnel.proxy.envoy.path.addons import METADATA, StreamAddons
from ztunnel.proxy.envoy.stream.workloads import host_workload
from ztunnel.runtime.settings import SettingsError


def scripted(harness: Harness) -> Scripted:
    """Have an addon in the proxy."""
    process = AddonProcess(AddonSettings())
    process.host = AddonHost([load_class(Scripted, {})])
    harness.proxy.addons = process
    harness.proxy.connections.addons = StreamAddons(process.host, harness.proxy.decisions)
    instance = process.host.addons[0].loaded.instance
    assert isinstance(instance, Scripted)
    return instance


def log_of(folder: Path) -> dict[str, Any]:
    log = access_log(folder)
    form = {"details": "%CONNECTION_TERMINATION_DETAILS%", "addon": f"%DYNAMIC_METADATA({METADATA}:name)%"}
    log[0]["typed_config"]["log_format"] = {"json_format": form}
    return log


async def line(harness: Harness) -> dict[str, Any]:
    path = harness.folder / "log"
    await harness.until(lambda: path.exists() and path.read_text())
    found: dict[str, Any] = json.loads(path.read_text().splitlines()[-1])
    return found


def test_addon_hooks_of_a_plain_connection(tmp_path: Path) -> None:
    async def body(harness: Harness) -> None:
        addon = scripted(harness)
        async with application() as port:
            await harness.published(listener(chain(tcp(access_log=log_of(tmp_path)))), cluster(port))
            assert await ask(harness.port("l")) == b"ping"
            await harness.until(lambda: len(addon.said) == 3)
            assert addon.names() == ["connecting", "opened", "closed"]
            facts = addon.said[0][1]
            assert (facts.dialect, facts.direction, facts.path) == ("envoy", Direction.OUTBOUND, Way.DIRECT)
            assert (facts.source_address, facts.destination_port) == ("127.0.0.1", harness.port("l"))
            assert (facts.endpoint, facts.service) == (f"127.0.0.1:{port}", "app")
            record = addon.said[2][1]
            assert (record.bytes_sent, record.bytes_received, record.reason) == (4, 4, "")
            assert (await line(harness))["addon"] is None

    run(tmp_path, body)


def test_a_denied_connection_has_details_metadata_and_a_denial(tmp_path: Path) -> None:
    async def body(harness: Harness) -> None:
        addon = scripted(harness)
        addon.connect = lambda facts: Deny("not today")
        async with application() as port:
            await harness.published(listener(chain(tcp(access_log=log_of(tmp_path)))), cluster(port))
            assert await ask(harness.port("l")) == b""
            found = await line(harness)
            assert found["details"] == "connection_refused_by_addon_scripted:_not_today"
            assert found["addon"] == "scripted"
            await harness.until(lambda: len(addon.said) == 2)
            assert addon.names() == ["connecting", "refused"]
            assert addon.said[1][1].addon == "scripted"
            denials = json.loads(page(harness, "/denials"))
            assert denials[0]["reason"] == "connection refused by addon scripted: not today"
            (entry,) = json.loads(page(harness, "/addons"))
            assert (entry["name"], entry["denials"]) == ("scripted", 1)

    run(tmp_path, body)


def test_a_preference_narrows_the_hosts(tmp_path: Path) -> None:
    async def body(harness: Harness) -> None:
        addon = scripted(harness)
        addon.connect = lambda facts: Prefer({"version": "v2"})
        async with application() as one, application() as two:
            document = cluster(one)
            name, found = document
            endpoints = found["load_assignment"]["endpoints"][0]["lb_endpoints"]
            other = json.loads(json.dumps(endpoints[0]))
            other["endpoint"]["address"]["socket_address"]["port_value"] = two
            other["metadata"] = {"filter_metadata": {"istio": {"workload": "b;ns;app;v2;c"}}}
            endpoints.append(other)
            await harness.published(listener(chain(tcp(access_log=log_of(tmp_path)))), (name, found))
            for _ in range(4):
                assert await ask(harness.port("l")) == b"ping"
            await harness.until(lambda: addon.names().count("closed") == 4)
            opened = [facts for name, facts in addon.said if name == "opened"]
            assert {facts.endpoint for facts in opened} == {f"127.0.0.1:{two}"}
            assert opened[0].destination == Workload("b", "ns", cluster="c", labels=opened[0].destination.labels)

    run(tmp_path, body)


def test_a_connection_is_cut(tmp_path: Path) -> None:
    async def body(harness: Harness) -> None:
        addon = scripted(harness)
        addon.connect = lambda facts: Cut("chaos", after_bytes=8)
        async with application() as port:
            await harness.published(listener(chain(tcp(access_log=log_of(tmp_path)))), cluster(port))
            client = await Open.to(harness.port("l"))
            assert await client.say(b"ping") == b"ping"
            assert (await line(harness))["details"] == "connection_cut_by_addon_scripted:_chaos"
            await client.close()

    run(tmp_path, body)


def test_addon_can_deny_a_tunnel_at_its_end(tmp_path: Path) -> None:
    async def body(harness: Harness) -> None:
        addon = scripted(harness)
        addon.accept = lambda facts: Deny("no tunnels")
        async with application() as port:
            await tunnel(harness, port, Identities())
            assert await ask(harness.port("l")) == b""
            await harness.until(lambda: addon.names().count("refused") == 2)
            accepted = next(facts for name, facts in addon.said if name == "accepting")
            assert (accepted.direction, accepted.path) == (Direction.INBOUND, Way.TUNNEL)
            assert (accepted.source_identity, accepted.destination_identity) == (CLIENT, SERVER)
            assert (accepted.source.namespace, accepted.source.service_account) == ("a", "client")
            assert accepted.destination_port == port

    run(tmp_path, body)


def test_inbound_listener_calls_the_accepting_hook(tmp_path: Path) -> None:
    async def body(harness: Harness) -> None:
        addon = scripted(harness)
        async with application() as port:
            await harness.published(listener(chain(tcp()), traffic_direction="INBOUND"), cluster(port))
            assert await ask(harness.port("l")) == b"ping"
            await harness.until(lambda: len(addon.said) == 3)
            assert addon.names() == ["accepting", "opened", "closed"]

    run(tmp_path, body)


def test_endpoints_are_described_by_metadata() -> None:
    found = host_workload({"envoy.lb": {"version": "v3", "canary": True}, "istio": {"workload": "w;n;a;v1;c"}})
    assert found == Workload("w", "n", cluster="c", labels=found.labels)
    assert dict(found.labels) == {"app": "a", "version": "v3"}
    assert host_workload({}) == Workload(labels=host_workload({}).labels)


def test_settings_have_addons_and_their_options(tmp_path: Path) -> None:
    options = tmp_path / "o.yaml"
    options.write_text("gate: {rate: 2}\n")
    env = {"ZTUNNEL_ADDONS": "gate.py", "ZTUNNEL_ADDON_OPTIONS": str(options)}
    flags = {"control_plane": "x:1", "node": "n"}
    found = settings_from(flags, env).addons
    assert found is not None
    assert found.options["gate"]["rate"].value == 2
    with pytest.raises(SettingsError, match="ZTUNNEL_ADDONS: addon /etc/passwd"):
        settings_from(flags, {"ZTUNNEL_ADDONS": "/etc/passwd"})
    with pytest.raises(SettingsError, match="no such file"):
        settings_from(flags, {**env, "ZTUNNEL_ADDON_OPTIONS": "/nowhere"})


class Gate(Addon):
    def connecting(self, facts: Facts) -> Verdict | None:
        return Deny("closed") if facts.endpoint.endswith(facts.service) else Prefer({"version": "v2"})

    def accepting(self, facts: Facts) -> Deny | None:
        return Deny("closed")


@pytest.mark.parametrize(
    ("direction", "verdict", "says"),
    [
        ("OUTBOUND", "allowed", "prefer endpoints with version=v2"),
        ("INBOUND", "refused: closed: refused by addon gate", "deny: closed"),
    ],
)
def test_explanation_has_the_predicted_verdicts_of_addons(
    tmp_path: Path, direction: str, verdict: str, says: str
) -> None:
    async def body(harness: Harness) -> None:
        host = AddonHost([load_class(Gate, {})])
        harness.proxy.connections.addons = StreamAddons(host, harness.proxy.decisions)
        async with application() as port:
            await harness.published(listener(chain(tcp()), traffic_direction=direction), cluster(port))
            question = "source=127.0.0.1&destination=127.0.0.1:1&listener=l"
            answer = json.loads(page(harness, "/explain", question))
            assert answer["verdict"] == verdict
            (endpoint,) = answer["hop"]["clusters"][0]["endpoints"]
            assert endpoint["addons"] == [{"addon": "gate", "says": says}]
            assert not any(counts.calls for counts in host.counts())

    run(tmp_path, body)
