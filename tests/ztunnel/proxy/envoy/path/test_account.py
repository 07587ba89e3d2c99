"""Connections of Envoy's dialect in the flight recorder and in metrics, beside the same tests of an Istio mesh."""

import json
from collections.abc import Awaitable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from unittest import mock

import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families

from tests.ztunnel.proxy.envoy.harness import (
    CLIENT,
    SERVER,
    Harness,
    Identities,
    Json,
    Open,
    application,
    ask,
    chain,
    cluster,
    listener,
    rbac,
    run,
    tcp,
    tunnel,
)
from tests.ztunnel.proxy.flows import hubble_ui
from xds.model.address import SocketAddress
from xds.model.cluster import Endpoint
from xds.model.facts import ConnectionFacts
from ztunnel.proxy.dataplane.handshake_limiter import STALLED
from ztunnel.proxy.dataplane.live_table import UNJUDGED
from ztunnel.proxy.envoy.admin.commands import answer
from ztunnel.proxy.envoy.admin.metrics import page as metrics_page
from ztunnel.proxy.envoy.config.settings import Switches
from ztunnel.proxy.envoy.path.account import Account
from ztunnel.proxy.envoy.stream.outcome import (
    DRAINED,
    NOT_SERVED,
    POLICY_CHANGE,
    REVOKED,
    Denied,
    NoCluster,
    NoHealthyHost,
    Overflow,
    Refused,
    UpstreamFailed,
    reason_of_end,
)
from ztunnel.proxy.envoy.stream.stream_info import StreamInfo
from ztunnel.runtime.clock import SystemClock
from ztunnel.runtime.http.page import Page, PageRequest, Query


async def flows(harness: Harness, number: int, query: str = "") -> list[Json]:
    """Return the flows of the page, once so many connections have ended."""
    await harness.until(lambda: harness.proxy.account.ring.total >= number)
    request = PageRequest(method="GET", path="/flows", query=Query.parse(query), target=f"/flows?{query}")
    found = await cast(Awaitable[Page], answer(harness.proxy, mock.Mock(), mock.Mock(), request))
    assert found.status == 200
    return [json.loads(line)["flow"] for piece in cast(Any, found.body) for line in piece.splitlines()]


def test_a_plain_connection_and_one_that_fails(tmp_path: Path) -> None:
    async def body(harness: Harness) -> None:
        async with application(b"hello ") as port:
            await harness.published(listener(chain(tcp())), cluster(port))
            assert await ask(harness.port("l"), b"world") == b"hello world"
            (good,) = await flows(harness, 1)
        await harness.published(listener(chain(tcp("gone")), name="m"), cluster(port, name="gone"))
        assert await ask(harness.port("m")) == b""
        _, failed = await flows(harness, 2)
        assert await flows(harness, 2, "last=1") == [failed]
        assert (good["verdict"], good["traffic_direction"], good["event_type"]) == (
            "FORWARDED",
            "EGRESS",
            {"type": 4, "sub_type": 3},
        )
        assert "encrypted" not in good["IP"]
        assert good["l4"]["TCP"]["destination_port"] == port
        more = good["extensions"]["value"]
        assert (more["bytes_sent"], more["bytes_received"]) == (5, 11)
        assert 0 <= more["connect_seconds"] <= more["duration_seconds"]
        assert (failed["verdict"], failed["extensions"]["value"]["failure"]) == ("ERROR", "refused")
        assert failed["extensions"]["value"]["response_flags"] == "UF,URX"
        assert "Connection refused" in failed["Summary"]
        times = harness.proxy.account.times
        assert times.errors == {("source", "connect", "refused"): 1}
        assert times.connects["plain", "ok"].count == times.connects["plain", "failed"].count == 1
        assert times.lengths["source", "plain"].count == 2

    run(tmp_path, body)


def test_a_tunnel_has_an_entry_at_each_end(tmp_path: Path) -> None:
    async def body(harness: Harness) -> None:
        async with application(b"hi ") as port:
            trace_id = "0af7651916cd43dd8448eb211c80319c"
            header = {"key": "traceparent", "value": f"00-{trace_id}-b7ad6b7169203331-00"}
            tunneling = {"hostname": "app:80", "headers_to_add": [{"header": header}]}
            await tunnel(harness, port, Identities(), rbac(CLIENT), tunneling_config=tunneling)
            assert await ask(harness.port("l"), b"there") == b"hi there"
            found = {flow["traffic_direction"]: flow for flow in await flows(harness, 2)}
            for flow in found.values():
                assert (flow["verdict"], flow["auth_type"], flow["IP"]["encrypted"]) == (
                    "FORWARDED",
                    "SPIRE",
                    True,
                )
                more = flow["extensions"]["value"]
                assert (more["source_identity"], more["destination_identity"]) == (CLIENT, SERVER)
                assert flow["source"]["namespace"] == flow["destination"]["namespace"] == "a"
                assert flow["source"]["workloads"] == [{"name": "client", "kind": "ServiceAccount"}]
            out, there = found["EGRESS"], found["INGRESS"]
            assert out["event_type"] == {"type": 4, "sub_type": 11}
            assert out["extensions"]["value"]["hbone_address"] == f"127.0.0.1:{harness.port('inbound')}"
            assert there["l4"]["TCP"]["destination_port"] == port
            times = harness.proxy.account.times
            assert times.errors == {}
            assert times.lengths["source", "hbone"].count == times.lengths["destination", "hbone"].count == 1
            assert times.connects["hbone", "ok"].count == 1
            assert times.handshakes["client", "ok"].count == times.handshakes["server", "ok"].count == 1
            accept = "application/openmetrics-text"
            shown = metrics_page(harness.proxy, PageRequest(method="GET", path="/metrics", accept=accept))
            text = b"".join(piece for piece in cast(Any, shown.body)).decode()
            traced = {
                (sample.name, *(value for label, value in sorted(sample.labels.items()) if label != "le"))
                for family in text_string_to_metric_families(text)
                for sample in family.samples
                if sample.exemplar is not None and sample.exemplar.labels == {"trace_id": trace_id}
            }
            assert traced == {
                ("ztunnel_connect_seconds_bucket", "hbone", "ok"),
                ("ztunnel_connection_seconds_bucket", "hbone", "source"),
                ("ztunnel_connection_seconds_bucket", "hbone", "destination"),
                ("ztunnel_handshake_seconds_bucket", "ok", "client"),
                ("ztunnel_handshake_seconds_bucket", "ok", "server"),
            }
            assert {flow["trace_context"]["parent"]["trace_id"] for flow in found.values()} == {trace_id}
            assert {link[:2] for link in hubble_ui.check(found.values())} == {("client", "server")}

    run(tmp_path, body)


def test_a_denied_identity_is_one_entry_that_names_the_policy(tmp_path: Path) -> None:
    async def body(harness: Harness) -> None:
        async with application(b"secret") as port:
            judging = rbac("spiffe://td/ns/a/sa/client", "DENY")
            policies = judging["typed_config"]["rules"]["policies"]
            policies["ns[shop]-policy[no-client]-rule[0]"] = policies.pop("rule")
            await tunnel(harness, port, Identities(), judging)
            assert await ask(harness.port("l")) == b""
            found = await flows(harness, 2)
            (denied,) = [flow for flow in found if flow["verdict"] == "DROPPED"]
            assert denied["ingress_denied_by"] == [
                {"name": "no-client", "namespace": "shop", "kind": "AuthorizationPolicy"}
            ]
            assert (denied["drop_reason"], denied["traffic_direction"]) == (181, "INGRESS")
            assert denied["extensions"]["value"]["source_identity"] == CLIENT
            errors = harness.proxy.account.times.errors
            assert errors["destination", "early", "policy"] >= 1
            assert ("source", "connect", "http2") in errors

    run(tmp_path, body, switches=Switches(early_data=False))


def test_a_policy_that_comes_later(tmp_path: Path) -> None:
    async def body(harness: Harness) -> None:
        async with application() as port:
            await harness.published(listener(chain(rbac(None), tcp())), cluster(port))
            first = await Open.to(harness.port("l"))
            assert await first.say(b"a") == b"a"
            await harness.published(listener(chain(rbac(CLIENT), tcp())), cluster(port))
            assert await first.ended()
            await first.close()
            (cut,) = await flows(harness, 1)
            assert (cut["verdict"], cut["drop_reason"]) == ("DROPPED", 133)
            assert cut["l4"]["TCP"]["flags"] == {"RST": True}
            assert harness.proxy.account.times.errors == {("source", "relay", "policy_change"): 1}

    run(tmp_path, body)


def test_the_history_has_what_is_open_and_what_has_ended_once(tmp_path: Path) -> None:
    async def body(harness: Harness) -> None:
        account, connections = harness.proxy.account, harness.proxy.connections
        now_s = harness.proxy.clock.monotonic()

        async def sums() -> list[int]:
            nonlocal now_s
            now_s += 100.0
            await account.sample(connections)
            return [sum(column) for column in zip(*account.times.history.steps().rows, strict=True)]

        account._clock = cast(Any, SimpleNamespace(monotonic=lambda: now_s, wall=lambda: now_s))
        async with application() as port:
            await harness.published(listener(chain(tcp())), cluster(port))
            await sums()
            held = await Open.to(harness.port("l"))
            assert await held.say(b"world") == b"world"
            assert await ask(harness.port("l"), b"one") == b"one"
            await flows(harness, 1)
            assert await sums() == [2, 0, 0, 16]
            await held.close()
            await flows(harness, 2)
            assert await sums() == [2, 0, 0, 16]
        await harness.published(listener(chain(tcp("gone")), name="m"), cluster(port, name="gone"))
        assert await ask(harness.port("m")) == b""
        await flows(harness, 3)
        assert await sums() == [3, 1, 0, 16]

    run(tmp_path, body)


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (NoCluster(), "no_route"),
        (NoHealthyHost(), "no_endpoint"),
        (Overflow(), "limit"),
        (Denied("x"), "policy"),
        (Refused("x"), "other"),
        (UpstreamFailed("x", status=403), "peer_denied"),
        (UpstreamFailed("x", status=503), "peer_status"),
        (UpstreamFailed("x", timed_out=True), "timeout"),
    ],
)
def test_refusals_have_a_reason(error: Refused, reason: str) -> None:
    assert error.failure == reason


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (f"{POLICY_CHANGE}: x", "policy_change"),
        (REVOKED, "revoked"),
        (DRAINED, "drain"),
        (NOT_SERVED, "no_route"),
        (UNJUDGED, "internal"),
        (STALLED, "limit"),
        ("connection cut by addon a: x", "addon"),
        ("x", "other"),
    ],
)
def test_ends_on_purpose_have_a_reason(text: str, reason: str) -> None:
    assert reason_of_end(text) == reason


@pytest.mark.parametrize(
    ("tunnel", "destination"),
    [
        ({"tunnel_authority": "10.0.0.2:8080", "tunnelled": True}, ("10.0.0.2", 8080)),
        ({"tunnel_authority": "app:80", "tunnelled": True}, ("10.96.0.1", 80)),
        ({}, ("10.0.0.2", 15008)),
    ],
)
def test_the_destination_is_the_application_never_the_tunnels_port(tunnel: Json, destination: Any) -> None:
    source, there = SocketAddress("10.0.0.1", 4000), SocketAddress("10.0.0.2", 15008)
    facts = ConnectionFacts(source=source, direct_source=source, destination=SocketAddress("10.96.0.1", 80))
    info = StreamInfo(connection_id=1, facts=facts, started=0.0, started_at=0.0, **tunnel)
    info.endpoint, info.upstream_host = Endpoint(address=there), str(there)
    info.cluster_metadata = {"istio": {"services": [{"name": "app", "namespace": "shop"}]}}
    info.upstream_metadata = {"istio": {"workload": "app-v1;shop;app;v1;c1"}}
    account = Account(4, SystemClock(), "n1", "c1")
    owner = SimpleNamespace(ends_tunnels=False, model=SimpleNamespace(direction="outbound"))
    account.ended(cast(Any, SimpleNamespace(info=info, owner=owner, application=None, asked=None)))
    (entry,) = account.ring.entries()
    flow = account.shape(entry)["flow"]
    assert (flow["IP"]["destination"], flow["l4"]["TCP"]["destination_port"]) == destination
    assert flow["node_name"] == "c1/n1"
    assert flow["destination_service"] == {"name": "app", "namespace": "shop"}
    assert flow["destination"]["workloads"] == [{"name": "app-v1", "kind": "Deployment"}]
    assert flow["source"]["labels"] == ["reserved:world"]
