"""The servers of a whole proxy that runs the reference configuration."""

import json
import logging
import socket
from collections.abc import Callable

import pytest

from tests.ztunnel.proxy.envoy.admin.harness import Answer, Running, serve
from tests.ztunnel.proxy.envoy.admin.reference import (
    IDENTITY,
    SERVICE_CLUSTER,
    TUNNEL_LISTENER,
    Reference,
    proxy_to,
)
from tproxy.errors import PortTaken
from ztunnel.proxy.envoy.config.state import State

# Headers and dispatch


def test_headers_and_errors_are_envoys(answers: Callable[..., list[Answer]]) -> None:
    ready, unknown, mutating, slash = answers("/ready", "/nope", "/quitquitquit", "/ready/")
    assert [name for name, _ in ready.headers] == [
        "content-type",
        "cache-control",
        "x-content-type-options",
        "date",
        "server",
        "transfer-encoding",
    ]
    assert dict(ready.headers)["content-type"] == "text/plain; charset=UTF-8"
    assert dict(ready.headers)["cache-control"] == "no-cache, max-age=0"
    assert dict(ready.headers)["server"] == "envoy"
    assert (ready.status, ready.text) == (200, "LIVE\n")
    assert unknown.status == 404
    assert unknown.text.startswith("invalid path. admin commands are:\n  /: Admin home page\n")
    assert (mutating.status, mutating.text) == (405, "Method GET not allowed, POST required.")
    assert slash.status == 200


def test_help_lists_paths_with_their_parameters(answers: Callable[..., list[Answer]]) -> None:
    shown, home = answers("/help", "/")
    lines = shown.text.splitlines()
    assert lines[0] == "admin commands are:"
    paths = [line.split(":")[0].strip() for line in lines[1:] if not line.startswith("      ")]
    assert paths == sorted(paths)
    assert "/drain_listeners (POST)" in paths
    assert "/config_dump" in paths
    assert any(line.startswith("      name_regex: ") for line in lines)
    assert home.text.startswith("<!DOCTYPE html>")
    assert "<form action='quitquitquit' method='post'" in home.text
    assert dict(home.headers)["content-type"] == "text/html; charset=UTF-8"


# Other pages


def test_listeners_clusters_and_certs(answers: Callable[..., list[Answer]], reference: Reference) -> None:
    lines, statuses, hosts, filtered, as_json, certs = answers(
        "/listeners",
        "/listeners?format=json",
        "/clusters",
        "/clusters?filter=^virtual",
        "/clusters?format=json",
        "/certs",
    )
    assert lines.text.splitlines() == [
        f"ztunnel_outbound::127.0.0.1:{reference.ports[15001]}",
        f"{TUNNEL_LISTENER}::envoy://{TUNNEL_LISTENER}/",
        f"ztunnel_inbound::127.0.0.1:{reference.ports[15008]}",
        f"ztunnel_inbound_plaintext::127.0.0.1:{reference.ports[15006]}",
    ]
    assert statuses.json["listener_statuses"][1] == {
        "name": TUNNEL_LISTENER,
        "local_address": {"envoy_internal_address": {"server_listener_name": TUNNEL_LISTENER}},
    }
    of_host = [
        line.split("::")[-2]
        for line in hosts.text.splitlines()
        if line.startswith(f"{SERVICE_CLUSTER}::envoy://{TUNNEL_LISTENER}/10.244.1.23:9080::")
    ]
    assert of_host == [
        *("cx_active", "cx_connect_fail", "cx_total", "rq_active", "rq_error", "rq_pending_active"),
        *("rq_success", "rq_timeout", "rq_total", "hostname", "health_flags", "weight", "region", "zone"),
        *("sub_zone", "canary", "priority", "success_rate", "local_origin_success_rate"),
    ]
    assert {line.split("::")[0] for line in filtered.text.splitlines()} == {
        "virtual_inbound",
        "virtual_inbound_hbone",
    }
    service = next(s for s in as_json.json["cluster_statuses"] if s["name"] == SERVICE_CLUSTER)
    assert list(service) == [
        *("name", "added_via_api", "host_statuses", "circuit_breakers", "observability_name"),
    ]
    assert list(service["host_statuses"][0]) == ["address", "stats", "health_status", "weight", "locality"]
    assert service["host_statuses"][0]["stats"][0] == {"name": "cx_connect_fail"}
    assert service["host_statuses"][0]["stats"][6] == {"type": "GAUGE", "name": "cx_active"}
    first = certs.json["certificates"][0]
    assert first["cert_chain"][0]["subject_alt_names"] == [{"uri": f"{IDENTITY}productpage"}]
    assert first["cert_chain"][0]["days_until_expiration"] == "30"
    assert first["ca_cert"][0]["subject_alt_names"] == []
    assert list(first["ca_cert"][0]) == [
        *("path", "serial_number", "subject_alt_names", "days_until_expiration", "valid_from", "expiration_time"),
    ]
    assert r"\u003cinline\u003e" in certs.text


@pytest.mark.parametrize(
    "target",
    ["/clusters?filter=", "/config_dump?name_regex=", "/stats?filter=", "/stats/prometheus?filter="],
)
def test_expression_of_an_admin_page_is_matched_by_re2(answers: Callable[..., list[Answer]], target: str) -> None:
    """Python's ``re`` takes longer than the tests' limit for hangs for the first, and accepts the second."""
    (slow, refused) = answers(f"{target}(.|..)%2b%40", f"{target}a(?%3da)")
    assert slow.status == 200
    assert refused.status == 400
    assert "re2" in refused.text or "invalid perl operator: (?=" in refused.text


def test_small_admin_pages_have_envoys_form(answers: Callable[..., list[Answer]]) -> None:
    runtime, contention, restart, memory, info, init, server = answers(
        "/runtime",
        "/contention",
        "/hot_restart_version",
        "/memory",
        "/server_info",
        "/init_dump",
        "/stats?filter=^server\\.",
    )
    assert runtime.text == '{\n "entries": {},\n "layers": []\n}\n'
    assert contention.text.startswith("Mutex contention tracing is not enabled.")
    assert restart.text == "disabled"
    assert int(memory.json["allocated"]) > 1_000_000
    assert list(info.json)[:6] == [
        *("version", "state", "uptime_current_epoch", "uptime_all_epochs", "hot_restart_version"),
        "command_line_options",
    ]
    assert info.json["state"] == "LIVE"
    assert info.json["command_line_options"]["mode"] == "Serve"
    assert info.json["command_line_options"]["base_id"] == "0"
    assert info.json["node"]["cluster"] == "ztunnel.proxy.istio-system"
    assert init.text == "{}\n"
    assert "server.days_until_first_cert_expiring: 9\n" in server.text
    assert "server.live: 1\n" in server.text


# What acts


def test_health_checks_can_be_failed_and_passed(reference: Reference) -> None:
    def check(running: Running) -> None:
        assert running.readiness.get("/healthz/ready").text == "ready\n"
        assert running.admin.post("/healthcheck/fail").text == "OK\n"
        assert (running.admin.get("/ready").status, running.admin.get("/ready").text) == (503, "DRAINING\n")
        assert running.readiness.get("/healthz/ready").text == "not ready, draining\n"
        assert running.readiness.get("/healthz/live").text == "live\n"
        assert running.admin.post("/healthcheck/ok").status == 200
        assert running.admin.get("/ready").text == "LIVE\n"
        other = running.readiness.get("/other")
        assert (other.status, other.text) == (404, "no such page; this port has /healthz/ready, /healthz/live\n")
        assert running.readiness.post("/healthz/ready").status == 405

    serve(reference, check)


def connects(port: int) -> bool:
    with socket.socket() as sock:
        return sock.connect_ex(("127.0.0.1", port)) == 0


def test_drained_listeners_refuse_and_are_still_listed(reference: Reference) -> None:
    def check(running: Running) -> None:
        assert connects(reference.ports[15006])
        before = running.admin.get("/listeners").text
        assert running.admin.post("/drain_listeners", inboundonly="").text == "OK\n"
        assert connects(reference.ports[15006])  # the reference states no direction
        assert running.admin.post("/drain_listeners", graceful="", skip_exit="").text == "OK\n"
        assert connects(reference.ports[15006])
        assert running.admin.post("/drain_listeners", graceful="").text == "OK\n"
        running.admin.until(lambda _: not connects(reference.ports[15006]))
        assert running.admin.get("/listeners").text == before
        assert "listener_manager.listener_stopped: 3\n" in running.admin.get("/stats").text
        assert running.admin.get("/ready").text == "LIVE\n"

    serve(reference, check)


def test_quitquitquit_answers_and_ends_the_process(reference: Reference) -> None:
    def check(running: Running) -> None:
        answer = running.admin.post("/quitquitquit")
        assert (answer.status, answer.text) == (200, "OK\n")

    proxy = serve(reference, check)
    assert proxy.state is State.DRAINING
    assert not connects(reference.admin)


def test_counters_can_be_reset_and_runtime_cannot_be_changed(reference: Reference) -> None:
    def check(running: Running) -> None:
        assert "listener_manager.listener_added: 4\n" in running.admin.get("/stats").text
        assert running.admin.post("/reset_counters").text == "OK\n"
        assert "listener_manager.listener_added: 0\n" in running.admin.get("/stats").text
        refused = running.admin.post("/runtime_modify", a="b")
        assert (refused.status, refused.text) == (503, "No admin layer specified")
        assert running.admin.post("/reopen_logs").text == "OK\n"

    serve(reference, check)


def test_logging_shows_and_changes_levels(reference: Reference) -> None:
    def check(running: Running) -> None:
        assert running.admin.post("/logging").text.startswith("active loggers:\n  hbone: ")
        assert "  ztunnel.proxy.envoy.app: debug\n" in running.admin.post("/logging", level="debug").text
        refused = running.admin.post("/logging", level="loud")
        assert refused.status == 400
        assert refused.text.startswith("error: unknown logger level\n\nusage: /logging?<name>=<level>")

    levels = {name: logging.getLogger(name).level for name in ("hbone", "tproxy", "xds", "ztunnel")}
    try:
        serve(reference, check)
    finally:
        for name, level in levels.items():
            logging.getLogger(name).setLevel(level)


# Connections


def test_explain_follows_a_pod_to_a_service(answers: Callable[..., list[Answer]]) -> None:
    service, passthrough, inbound, denied, usage, unknown = answers(
        "/explain?source=10.244.2.3&destination=10.96.183.192:9080",
        "/explain?source=10.244.2.99:5000&destination=1.2.3.4:80",
        f"/explain?source=10.244.2.3&destination=10.244.2.23:9080&identity={IDENTITY}productpage",
        f"/explain?source=10.244.2.3&destination=10.244.2.23:9080&identity={IDENTITY}ratings",
        "/explain?source=x",
        "/explain?source=10.244.2.3&destination=10.96.183.192:9080&listener=none",
    )
    hop = service.json["hop"]
    assert (hop["listener"], hop["chain"]) == ("ztunnel_outbound", SERVICE_CLUSTER)
    assert hop["chain_because"] == [
        "DestinationPortInput 9080 among 1: not found",
        "on no match: go on",
        "SourceIPInput 10.244.2.3 among 1: found",
        "DestinationIPInput 10.96.183.192 among 4: found",
        f"DestinationPortInput 9080 among 1: {SERVICE_CLUSTER}",
    ]
    (cluster,) = hop["clusters"]
    assert [endpoint["address"].rpartition("/")[2] for endpoint in cluster["endpoints"]] == [
        *("10.244.1.23:9080", "10.244.2.23:9080", "10.244.2.22:9080"),
    ]
    inner = cluster["endpoints"][0]["hop"]
    tunnel = inner["clusters"][0]["endpoints"][0]
    assert tunnel["tunnel"]["address"] == "10.244.1.23:15008"
    assert tunnel["tunnel"]["authority"] == "10.244.1.23:9080"
    assert tunnel["tls"]["identity"] == [f"{IDENTITY}productpage"]
    assert tunnel["tls"]["days_left"] > 0
    assert tunnel["tls"]["verifies"] == ["a trusted root", "uri prefix spiffe://cluster.local/"]
    assert (tunnel["leaves_from"], tunnel["mark"]) == ("10.244.2.3", 1234)
    assert passthrough.json["hop"]["clusters"][0]["cluster"] == "PassthroughCluster"
    assert passthrough.json["hop"]["clusters"][0]["endpoints"][0]["address"] == "1.2.3.4:80"
    assert inbound.json["hop"]["chain"] == "inbound_10.244.2.23"
    policy = {"policy": "ns[default]-policy[reviews-viewer]-rule[0]", "action": "allow"}
    because = f"a name of the peer is {IDENTITY}productpage"
    (filter_,) = inbound.json["hop"]["policies"]
    assert (filter_["allowed"], filter_["policy"]) == (True, policy["policy"])
    assert filter_["judged"] == [{**policy, "holds": True, "because": because}]
    (filter_,) = denied.json["hop"]["policies"]
    assert (filter_["allowed"], filter_["policy"]) == (False, None)
    because += f": no, it is {IDENTITY}ratings"
    assert filter_["judged"] == [{**policy, "holds": False, "because": because}]
    assert inbound.json["hop"]["clusters"][0]["endpoints"][0]["address"] == "10.244.2.23:9080"
    assert denied.json["hop"]["verdict"] == "closed: rbac_access_denied_matched_policy[none]"
    assert denied.json["verdict"] == "refused: closed: rbac_access_denied_matched_policy[none]"
    assert service.json["verdict"] == "allowed here; the proxy at the tunnel's far end also decides"
    assert "inbound" not in tunnel
    assert (passthrough.json["verdict"], inbound.json["verdict"]) == ("allowed", "allowed")
    local = cluster["endpoints"][1]["hop"]["clusters"][0]["endpoints"][0]
    assert local["inbound"]["chain"] == "inbound_10.244.2.23"
    assert local["inbound"]["policies"] == inbound.json["hop"]["policies"]
    assert (usage.status, unknown.status) == (400, 404)


def test_explain_changes_no_counter(reference: Reference) -> None:
    def check(running: Running) -> None:
        def counters() -> str:
            return running.admin.get("/stats", type="Counters").text

        before = counters()
        running.admin.get("/explain", source="10.244.2.3", destination="10.96.183.192:9080")
        running.admin.get("/explain", source="10.244.2.3", destination="10.244.2.23:9080", identity="spiffe://x")
        assert counters() == before

    serve(reference, check)


def test_live_connections_are_listed_with_their_decisions(reference: Reference) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        proxy_to(reference, port)

        def check(running: Running) -> None:
            assert running.admin.get("/connections").json == {"connections": []}
            with socket.create_connection(("127.0.0.1", reference.ports[15006])) as client:
                client.sendall(b"hello")
                accepted, _ = server.accept()
                with accepted:
                    assert accepted.recv(5) == b"hello"
                    (shown,) = running.admin.get("/connections").json["connections"]
                    host = f"here::127.0.0.1:{port}::cx_active::1"
                    assert host in running.admin.get("/clusters").text.splitlines()
                name = "{}:{}".format(*client.getsockname())
                assert shown["source"] == name
                assert (shown["listener"], shown["filter_chain"]) == ("ztunnel_inbound_plaintext", "here")
                assert (shown["cluster"], shown["upstream_host"]) == ("here", f"127.0.0.1:{port}")
                assert (shown["bytes_received"], shown["bytes_sent"]) == (5, 0)
            running.admin.until(lambda admin: admin.get("/connections").json == {"connections": []})

        serve(reference, check)


# Metrics and ports


def test_metrics_port_negotiates(reference: Reference) -> None:
    def check(running: Running) -> None:
        plain = running.metrics.get("/stats/prometheus")
        assert dict(plain.headers)["content-type"].startswith("text/plain; version=0.0.4")
        assert "envoy_listener_manager_listener_added 4.0\n" in plain.text
        accept = {"accept": "application/openmetrics-text; version=1.0.0"}
        openmetrics = running.metrics.ask("GET", "/metrics", {}, accept)
        assert dict(openmetrics.headers)["content-type"].startswith("application/openmetrics-text")
        assert openmetrics.text.endswith("\n# EOF\n")
        assert openmetrics.text.count("# EOF") == 1
        other = running.metrics.get("/")
        assert (other.status, other.text) == (404, "no such page; this port has /metrics, /stats/prometheus\n")

    serve(reference, check)


def test_taken_port_is_named(reference: Reference) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", reference.readiness))
        taken.listen()
        with pytest.raises(BaseExceptionGroup) as caught:
            serve(reference, lambda _: None)
    found: BaseException = caught.value
    while isinstance(found, BaseExceptionGroup):
        (found,) = found.exceptions
    assert isinstance(found, PortTaken)
    assert f"127.0.0.1:{reference.readiness}" in str(found)
    assert not connects(reference.admin)


def test_names_cannot_forge_lines(reference: Reference) -> None:
    name = "evil\nfake::1.2.3.4::cx_active::1\x1b[31m"
    cds = reference.folder / "w2" / "cds.yaml"
    cds.write_text(
        cds.read_text() + f'- {{"@type": *C, name: {json.dumps(name)}, type: STATIC, connect_timeout: 1s}}\n'
    )

    def check(running: Running) -> None:
        for path in ("/clusters", "/stats"):
            text = running.admin.get(path).text
            assert "evil" in text
            assert "\x1b" not in text
            assert not [line for line in text.splitlines() if line.startswith("fake")]
        prometheus = running.admin.get("/stats/prometheus").text
        assert not [line for line in prometheus.splitlines() if line.startswith("fake")]
        names = [
            status["name"] for status in running.admin.get("/clusters", format="json").json["cluster_statuses"]
        ]
        assert name in names

    serve(reference, check)
