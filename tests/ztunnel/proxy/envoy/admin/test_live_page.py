"""What the live page shows in Envoy's dialect, and that the admin server answers for it."""

import http.client
import json
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast
from unittest import mock

import pytest

from tests.ztunnel.proxy.envoy.admin.harness import Running, serve
from tests.ztunnel.proxy.envoy.admin.reference import Reference
from xds.model.address import SocketAddress
from xds.model.cluster import Endpoint
from xds.model.facts import ConnectionFacts
from ztunnel.policy.ledger import Ledger
from ztunnel.proxy.dataplane.reasons import Reason
from ztunnel.proxy.envoy.admin import live_page
from ztunnel.proxy.envoy.admin.live_page import Traffic
from ztunnel.proxy.envoy.config.settings import settings_from
from ztunnel.proxy.envoy.listeners.connections import Connections, LiveConnection, PodQuota
from ztunnel.proxy.envoy.stream.stream_info import Flag, StreamInfo, TlsFacts
from ztunnel.proxy.envoy.telemetry.decisions import DeniedBy
from ztunnel.proxy.ui import setting
from ztunnel.runtime.clock import SystemClock
from ztunnel.runtime.descriptors import Descriptors
from ztunnel.runtime.settings import SettingsError

CLIENT, SERVER = "spiffe://d/ns/shop/sa/client", "spiffe://d/ns/shop/sa/server"


def test_the_page_and_its_data_are_served(reference: Reference) -> None:
    def check(running: Running) -> None:
        page, slash, data = (running.admin.get(path) for path in ("/ui", "/ui/", "/ui/data"))
        assert [page.status, slash.status, data.status] == [200, 200, 200]
        assert "content-security-policy" in dict(page.headers)
        shown = data.json
        assert (shown["facts"]["dialect"], shown["facts"]["ready"]) == ("envoy", True)
        assert shown["facts"]["totals"]["clusters"] == len(running.proxy.clusters.active)
        in_use = {
            name["uri"]
            for each in running.admin.get("/certs").json["certificates"]
            for own in each["cert_chain"]
            for name in own["subject_alt_names"]
        }
        assert {each["identity"] for each in shown["certificates"]["shown"]} == in_use
        assert running.admin.ask("GET", "/ui", {}, {"Host": "evil.example"}).status == 403
        assert running.admin.post("/ui").status == 405
        assert "/ui: " in running.admin.get("/help").text

    serve(reference, check)


def test_events_are_streamed_and_connections_are_watched_meanwhile(reference: Reference) -> None:
    def check(running: Running) -> None:
        connection = http.client.HTTPConnection("127.0.0.1", running.admin.port, timeout=10)
        connection.request("GET", "/ui/events")
        answer = connection.getresponse()
        while not (line := answer.readline()).startswith(b"data: "):
            assert line
        assert json.loads(line.removeprefix(b"data: "))["facts"]["counted_since_s"] > 0
        assert running.proxy.connections.on_close is not None
        connection.close()
        answer.close()
        running.admin.until(lambda client: running.proxy.connections.on_close is None)

    serve(reference, check)


# What is counted


def traffic() -> Traffic:
    clock = SimpleNamespace(wall=lambda: 5.0)
    connections = SimpleNamespace(on_close=None)
    decisions = SimpleNamespace(ledger=Ledger[DeniedBy]())
    proxy = SimpleNamespace(clock=clock, connections=connections, decisions=decisions)
    return Traffic(cast(Any, proxy))


def info(**changes: Any) -> StreamInfo:
    source = SocketAddress("10.0.0.1", 4000)
    facts = ConnectionFacts(source=source, direct_source=source, destination=SocketAddress("10.96.0.1", 80))
    found = StreamInfo(connection_id=1, facts=facts, started=0.0, started_at=0.0, listener="outbound")
    for name, value in changes.items():
        setattr(found, name, value)
    if "upstream_host" in changes and not found.upstream_host.startswith("envoy:"):
        found.endpoint = Endpoint(address=SocketAddress.parse(found.upstream_host))
    return found


def live(hop: StreamInfo, *inner: StreamInfo) -> LiveConnection:
    last = hop
    for each in inner:
        last.behind = last = each
    return LiveConnection(
        Connections(PodQuota(Descriptors(100))), hop, mock.Mock(), SystemClock(), None, "10.0.0.1", lambda: None
    )


def test_a_tunnel_is_between_the_client_and_the_host_behind_its_hops() -> None:
    counted = traffic()
    counted.begin()
    through = live(
        info(upstream_host="envoy://tunnels/10.0.0.2:80", bytes_received=3, bytes_sent=4),
        info(upstream_host="10.0.0.2:15008", upstream_uri_sans=(SERVER,), upstream_own_uri_sans=(CLIENT,)),
    )
    ends = counted.ends(through)
    assert ends == ("10.0.0.1", "10.0.0.2", "10.96.0.1:80", "", "source", "mTLS")
    assert counted.identities == {"10.0.0.1": CLIENT, "10.0.0.2": SERVER}
    counted._ended(through)
    counts = counted.at(ends)
    assert (counts.opened, counts.failed, counts.denied, counts.sent, counts.received) == (1, 0, 0, 3, 4)
    counted.end()
    assert counted.counts == counted.identities == {}


def test_tunnels_within_the_node_and_from_outside_have_both_identities() -> None:
    tls = TlsFacts(peer_uri_sans=(CLIENT,), local_uri_sans=(SERVER,))
    joined = live(info(upstream_host="10.0.0.2:15088"), info(tls=tls, upstream_host="10.0.0.2:80"))
    assert traffic().ends(joined) == ("10.0.0.1", "10.0.0.2", "10.96.0.1:80", "", "source", "mTLS")
    arrived = live(info(tls=tls))
    assert traffic().ends(arrived) == ("10.0.0.1", "10.96.0.1", "", "", "destination", "mTLS")
    plain = live(info(upstream_host="10.0.0.3:80", connected=True))
    assert traffic().ends(plain) == ("10.0.0.1", "10.0.0.3", "10.96.0.1:80", "", "source", "plain")


def test_what_never_connected_was_not_plain_text() -> None:
    nowhere = live(info(upstream_host="10.0.0.3:80"))
    assert traffic().ends(nowhere).security == "none"
    counted = traffic()
    refused = live(info(upstream_host="10.0.0.2:15008", upstream_own_uri_sans=(CLIENT,)))
    assert counted.ends(refused) == ("10.0.0.1", "10.0.0.2", "10.96.0.1:80", "", "source", "mTLS")
    assert counted.identities == {"10.0.0.1": CLIENT}


def test_a_service_has_the_name_that_its_clusters_metadata_gives() -> None:
    named = info(upstream_host="10.0.0.2:80", connected=True)
    named.cluster_metadata = {"istio": {"services": [{"name": "web", "namespace": "shop"}]}}
    assert traffic().ends(live(named)) == ("10.0.0.1", "10.0.0.2", "web.shop", "shop", "source", "plain")


def test_failures_and_denials_are_told_apart() -> None:
    counted = traffic()
    for reason in ("rbac_access_denied_matched_policy[x]", "calico_access_denied", ""):
        counted._ended(live(info(termination_details=reason, flags={Flag.NO_ROUTE})))
    counted._ended(live(info(flags={Flag.UPSTREAM_CONNECT_FAILURE}, failure=Reason.PEER_DENIED)))
    (counts,) = counted.counts.values()
    assert (counts.opened, counts.failed, counts.denied, counts.refused) == (4, 4, 2, 1)


def test_what_is_denied_where_a_tunnel_ends_within_the_node_is_counted() -> None:
    """Such a tunnel has no connection at its end. With plain text the connection itself is counted."""
    counted = traffic()
    denials = counted._proxy.decisions.ledger.denials
    by = DeniedBy(
        "inbound", "one", "10.0.0.1", CLIENT, "10.0.0.2:15008", "rbac_access_denied_matched_policy[none]"
    )
    denials.note(by, "10.0.0.1:1", 1.0)
    counted.add_denied()
    assert counted.counts == {}, "nothing is counted yet"
    counted.begin()
    for pair in (by, by, by._replace(destination="10.0.0.2:80"), by._replace(identity="")):
        denials.note(pair, "10.0.0.1:2", 2.0)
    for _ in range(2):  # as for two events
        counted.add_denied()
    ((ends, counts),) = counted.counts.items()
    assert (ends.source, ends.destination, ends.reporter) == ("10.0.0.1", "10.0.0.2", "destination")
    assert (counts.opened, counts.failed, counts.denied) == (3, 3, 3)
    counted.end()
    counted.begin()
    counted.add_denied()
    assert counted.counts == {}


def test_pairs_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live_page, "_MOST_FLOWS", 3)
    counted = traffic()
    for number in range(9):
        facts = replace(info().facts, source=SocketAddress(f"10.0.1.{number}", 1))
        counted._ended(live(info(facts=facts, tls=TlsFacts(peer_uri_sans=(f"spiffe://d/{number}",)))))
    assert sorted(each.opened for each in counted.counts.values()) == [1, 1, 1, 6]
    assert len(counted.identities) <= 6


def test_the_setting_is_a_flag_and_a_variable() -> None:
    env = {"ZTUNNEL_CONTROL_PLANE": "unix:/x", "NODE_NAME": "n"}
    assert settings_from({}, env).ui is None
    assert settings_from({}, {**env, setting.VARIABLE: "true"}).ui is True
    assert settings_from({"ui": "false"}, {**env, setting.VARIABLE: "true"}).ui is False
    with pytest.raises(SettingsError, match="--ui=maybe: must be true, false or auto"):
        settings_from({"ui": "maybe"}, env)
