"""The servers of a whole proxy that runs the reference configuration."""

import json
import logging
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest

from tests.ztunnel.admin.harness import Answer, Client, Running, serve
from tests.ztunnel.admin.reference import (
    IDENTITY,
    SERVICE_CLUSTER,
    TUNNEL_CLUSTER,
    TUNNEL_LISTENER,
    Reference,
    rewrite,
    write_reference,
)
from tproxy.errors import PortTaken
from ztunnel.app import State

ADMIN = "type.googleapis.com/envoy.admin.v3."


@pytest.fixture
def reference(tmp_path: Path) -> Reference:
    return write_reference(tmp_path)


@pytest.fixture
def answers(reference: Reference) -> Callable[..., list[Answer]]:
    """Answers of one running proxy to several GETs."""

    def ask(*paths: str) -> list[Answer]:
        found: list[Answer] = []
        serve(reference, lambda running: found.extend(running.admin.get(path) for path in paths))
        return found

    return ask


def types_of(dump: Answer) -> list[str]:
    return [config["@type"].removeprefix(ADMIN) for config in dump.json["configs"]]


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


# /config_dump


def test_indices_of_the_dump(answers: Callable[..., list[Answer]]) -> None:
    plain, with_endpoints = answers("/config_dump", "/config_dump?include_eds")
    assert types_of(plain) == [
        "BootstrapConfigDump",
        "ClustersConfigDump",
        "ListenersConfigDump",
        "ScopedRoutesConfigDump",
        "RoutesConfigDump",
        "SecretsConfigDump",
    ]
    assert types_of(with_endpoints) == [
        *types_of(plain)[:2],
        "EndpointsConfigDump",
        *types_of(plain)[2:],
    ]
    assert plain.body.endswith(b"\n}\n")
    assert plain.text.splitlines()[1] == ' "configs": ['


def test_key_orders_of_the_dump(answers: Callable[..., list[Answer]]) -> None:
    (dump,) = answers("/config_dump?include_eds")
    clusters, endpoints, listeners = (config for config in dump.json["configs"][1:4])
    names = [entry["cluster"]["name"] for entry in clusters["dynamic_active_clusters"]]
    assert names == sorted(names)
    tunnel = clusters["dynamic_active_clusters"][names.index(TUNNEL_CLUSTER)]
    assert list(tunnel) == ["version_info", "cluster", "last_updated"]
    assert list(tunnel["cluster"]) == [
        *("@type", "name", "type", "connect_timeout", "lb_policy", "cleanup_interval"),
        *("transport_socket", "original_dst_lb_config", "typed_extension_protocol_options"),
    ]
    assert [entry["name"] for entry in listeners["dynamic_listeners"]] == [
        *("ztunnel_outbound", TUNNEL_LISTENER, "ztunnel_inbound", "ztunnel_inbound_plaintext"),
    ]
    outbound = listeners["dynamic_listeners"][0]["active_state"]["listener"]
    assert list(outbound) == [
        *("@type", "name", "address", "filter_chains", "use_original_dst", "listener_filters", "transparent"),
        *("socket_options", "access_log", "default_filter_chain", "filter_chain_matcher"),
    ]
    option = outbound["socket_options"][0]
    assert (option["level"], option["name"], option["int_value"]) == ("1", "2", "1")
    assert "state" not in option
    assert listeners["dynamic_listeners"][0]["active_state"]["last_updated"].endswith("Z")
    service = next(
        entry["endpoint_config"]
        for entry in endpoints["dynamic_endpoint_configs"]
        if entry["endpoint_config"]["cluster_name"] == SERVICE_CLUSTER
    )
    assert service["endpoints"][0]["lb_endpoints"][0] == {
        "endpoint": {
            "address": {
                "envoy_internal_address": {
                    "server_listener_name": TUNNEL_LISTENER,
                    "endpoint_id": "10.244.1.23:9080",
                }
            },
            "health_check_config": {},
        },
        "health_status": "HEALTHY",
        "metadata": {
            "filter_metadata": {
                "envoy.transport_socket_match": {"tunnel": "h2"},
                "tunnel": {"destination": "10.244.1.23:9080", "address": "10.244.1.23:15008"},
                "envoy.filters.listener.original_dst": {"local": "10.244.1.23:9080"},
            }
        },
        "load_balancing_weight": 1,
    }
    assert service["policy"] == {"overprovisioning_factor": 140}


def test_keys_are_redacted_and_certificates_are_not(reference: Reference) -> None:
    seen: list[Answer] = []
    serve(
        reference,
        lambda running: seen.extend(
            running.admin.get(path)
            for path in (
                "/config_dump",
                "/config_dump?resource=dynamic_active_secrets",
                "/config_dump?resource=dynamic_active_secrets&mask=secret.tls_certificate,name",
                "/config_dump?mask=dynamic_active_secrets",
            )
        ),
    )
    for answer in seen:
        assert answer.status in (200, 400)
        assert "PRIVATE KEY" not in answer.text
    dumped = seen[0].json["configs"][5]["dynamic_active_secrets"]
    assert [entry["name"] for entry in dumped] == [f"{IDENTITY}productpage", f"{IDENTITY}reviews", "ROOTCA"]
    certificate = dumped[0]["secret"]["tls_certificate"]
    assert certificate["private_key"] == {"inline_string": "[redacted]"}
    assert "BEGIN CERTIFICATE" in certificate["certificate_chain"]["inline_string"]
    assert "BEGIN CERTIFICATE" in dumped[2]["secret"]["validation_context"]["trusted_ca"]["inline_string"]


def test_parameters_select_and_combine(answers: Callable[..., list[Answer]]) -> None:
    elements, masked, by_name, combined, versions, nothing, routes = answers(
        "/config_dump?resource=dynamic_listeners",
        "/config_dump?resource=dynamic_active_clusters&mask=cluster.name",
        "/config_dump?name_regex=virtual_inbound.*",
        "/config_dump?include_eds&resource=dynamic_endpoint_configs&name_regex=virtual_inbound",
        "/config_dump?mask=version_info",
        "/config_dump?resource=static_clusters",
        "/config_dump?resource=static_route_configs",
    )
    assert {entry["@type"] for entry in elements.json["configs"]} == {
        ADMIN + "ListenersConfigDump.DynamicListener"
    }
    assert len(elements.json["configs"]) == 4
    assert list(masked.json["configs"][0]) == ["@type", "cluster"]
    assert list(masked.json["configs"][0]["cluster"]) == ["@type", "name"]
    found = [entry["cluster"]["name"] for entry in by_name.json["configs"][1]["dynamic_active_clusters"]]
    assert found == ["virtual_inbound", "virtual_inbound_hbone"]
    assert [entry["endpoint_config"]["cluster_name"] for entry in combined.json["configs"]] == ["virtual_inbound"]
    assert [(entry["@type"].removeprefix(ADMIN), entry["version_info"]) for entry in versions.json["configs"]] == [
        ("ClustersConfigDump", "1"),
        ("ListenersConfigDump", "1"),
    ]
    assert nothing.text == "{}\n"
    # Two inbound chains, the same route table inlined in both.
    assert [entry["route_config"]["name"] for entry in routes.json["configs"]] == ["local_route", "local_route"]


@pytest.mark.parametrize(
    ("query", "status", "text"),
    [
        ("resource=bogus", 404, "bogus not found in config dump"),
        ("resource=dynamic_endpoint_configs", 404, "dynamic_endpoint_configs not found in config dump"),
        (
            "resource=version_info",
            400,
            "version_info is not a repeated field. Use ?mask=version_info to get only this field",
        ),
        ("mask=bogus.x", 400, "FieldMask bogus.x could not be successfully applied to any configs."),
        (
            "mask=version_info,bogus",
            400,
            "FieldMask version_info,bogus could not be successfully applied to any configs.",
        ),
        (
            "resource=dynamic_active_clusters&mask=name",
            400,
            'FieldMask paths: "name"\n could not be successfully used.',
        ),
        ("name_regex=(", 400, "INVALID_ARGUMENT: Error while parsing name_regex from (: missing ): ("),
    ],
)
def test_errors_of_the_dump(answers: Callable[..., list[Answer]], query: str, status: int, text: str) -> None:
    (answer,) = answers(f"/config_dump?{query}")
    assert (answer.status, answer.text) == (status, text)
    assert dict(answer.headers)["content-type"] == "text/plain"


# States that are not "active"


def test_refused_listener_keeps_its_last_good_version_and_shows_the_error(reference: Reference) -> None:
    def check(running: Running) -> None:
        rewrite(
            reference.folder / "w2" / "lds.yaml",
            ('version_info: "1"', 'version_info: "2"'),
            (
                "stat_prefix: BlackHoleCluster, cluster: blackhole inbound plaintext",
                "cluster: blackhole inbound plaintext",
            ),
        )
        running.admin.until(lambda client: "error_state" in client.get("/config_dump").text)
        listeners = running.admin.get("/config_dump").json["configs"][2]
        entry = next(e for e in listeners["dynamic_listeners"] if e["name"] == "ztunnel_inbound_plaintext")
        assert list(entry) == ["name", "active_state", "error_state"]
        assert list(entry["error_state"]) == [
            "failed_configuration",
            "last_update_attempt",
            "details",
            "version_info",
        ]
        assert entry["active_state"]["version_info"] == "1"
        assert entry["error_state"]["version_info"] == "2"
        assert "StatPrefix" in entry["error_state"]["details"]
        assert listeners["version_info"] == "2"
        assert 'listener_manager.lds.version_text: "1"' in running.admin.get("/stats").text

    serve(reference, check)


def proxy_to(reference: Reference, port: int) -> None:
    """Make the plaintext listener carry what nobody intercepted to a local port."""
    rewrite(
        reference.folder / "w2" / "lds.yaml",
        ("- name: blackhole inbound plaintext\n", "- name: here\n"),
        (
            "stat_prefix: BlackHoleCluster, cluster: blackhole inbound plaintext",
            "stat_prefix: here, cluster: here",
        ),
    )
    address = f"{{address: {{socket_address: {{address: 127.0.0.1, port_value: {port}}}}}}}"
    assignment = f"{{cluster_name: here, endpoints: [{{lb_endpoints: [{{endpoint: {address}}}]}}]}}"
    cds = reference.folder / "w2" / "cds.yaml"
    cds.write_text(
        cds.read_text() + f'- {{"@type": *C, name: here, type: STATIC, load_assignment: {assignment}}}\n'
    )


def test_replaced_listener_is_shown_draining_while_it_has_connections(reference: Reference) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        proxy_to(reference, server.getsockname()[1])

        def entry(client: Client) -> dict[str, Any]:
            found = client.get("/config_dump", name_regex="ztunnel_inbound_plaintext").json["configs"][2]
            return cast(dict[str, Any], found["dynamic_listeners"][0])

        def check(running: Running) -> None:
            assert list(entry(running.admin)) == ["name", "active_state"]
            with socket.create_connection(("127.0.0.1", reference.ports[15006])):
                server.accept()[0].close()
                rewrite(
                    reference.folder / "w2" / "lds.yaml",
                    ('version_info: "1"', 'version_info: "2"'),
                    (
                        "  name: ztunnel_inbound_plaintext\n",
                        "  name: ztunnel_inbound_plaintext\n  listener_filters_timeout: 7s\n",
                    ),
                )
                running.admin.until(lambda client: "draining_state" in entry(client))
                during = entry(running.admin)
                assert list(during) == ["name", "active_state", "draining_state"]
                assert during["active_state"]["version_info"] == "2"
                assert during["draining_state"]["version_info"] == "1"
                assert "listener_filters_timeout" not in during["draining_state"]["listener"]
                listing = running.admin.get("/listeners").text.splitlines()
                assert f"ztunnel_inbound_plaintext::127.0.0.1:{reference.ports[15006]}" in listing
            running.admin.until(lambda client: "draining_state" not in entry(client))

        serve(reference, check, drain_s=60)


def test_awaited_cluster_is_warming_and_named_by_readiness(reference: Reference) -> None:
    eds = reference.folder / "w2" / "eds.yaml"
    rewrite(eds, (f"cluster_name: {SERVICE_CLUSTER}", "cluster_name: another"))

    def check(running: Running) -> None:
        ready = running.readiness.get("/healthz/ready")
        assert (ready.status, ready.text) == (500, f"not ready, pending: cluster {SERVICE_CLUSTER}\n")
        assert (running.admin.get("/ready").status, running.admin.get("/ready").text) == (
            503,
            "PRE_INITIALIZING\n",
        )
        clusters = running.admin.get("/config_dump").json["configs"][1]
        assert SERVICE_CLUSTER in [c["cluster"]["name"] for c in clusters["dynamic_warming_clusters"]]
        unready = running.admin.get("/init_dump").json["unready_targets_dumps"]
        assert f"Cluster {SERVICE_CLUSTER}" in unready[0]["target_names"]
        assert running.admin.get("/init_dump", mask="listener").text == "{}\n"

    serve(reference, check, until=State.PRE_INITIALIZING)


def test_missing_secret_is_warming(reference: Reference) -> None:
    (reference.folder / "certs" / "sds-ROOTCA.json").unlink()

    def check(running: Running) -> None:
        secrets = running.admin.get("/config_dump").json["configs"][-1]
        (entry,) = secrets["dynamic_warming_secrets"]
        assert list(entry) == ["name", "version_info", "last_updated", "secret"]
        assert (entry["name"], entry["version_info"]) == ("ROOTCA", "uninitialized")
        assert list(entry["secret"]) == ["@type", "name"]
        tunnels = running.admin.get("/explain", source="10.244.2.3", destination="10.244.1.23:80").json["hop"]
        tls = tunnels["clusters"][0]["endpoints"][0]["tls"]
        assert tls == {"verdict": "closed: secrets are missing", "awaits": [f"{IDENTITY}productpage", "ROOTCA"]}
        assert running.admin.get("/certs").json == {"certificates": []}

    serve(reference, check)


FILTER = "type.googleapis.com/envoy.extensions.filters.listener.original_dst.v3.OriginalDst"


def test_discovered_filters_and_routes_are_dumped_with_their_failures(reference: Reference) -> None:
    folder = reference.folder
    ecds, rds = folder / "ecds.yaml", folder / "rds.yaml"
    ecds.write_text(
        'version_info: "e1"\nresources:\n'
        '- {"@type": type.googleapis.com/envoy.config.core.v3.TypedExtensionConfig, name: found, '
        f'typed_config: {{"@type": {FILTER}}}}}\n'
    )
    rds.write_text(
        'version_info: "r1"\nresources:\n'
        '- {"@type": type.googleapis.com/envoy.config.route.v3.RouteConfiguration, name: table}\n'
    )
    lds = folder / "w2" / "lds.yaml"
    text = lds.read_text()
    begin, end = text.index("        route_config:\n"), text.index("        http_filters:\n")
    source = "{resource_api_version: V3, path_config_source: {path: %s}}"
    text = (
        text[:begin]
        + f"        rds: {{route_config_name: table, config_source: {source % rds}}}\n"
        + text[end:]
        + f"""\
- "@type": type.googleapis.com/envoy.config.listener.v3.Listener
  name: discovers
  internal_listener: {{}}
  listener_filters:
  - {{name: found, config_discovery: {{config_source: {source % ecds}, type_urls: [{FILTER}]}}}}
  filter_chains: [{{name: PassthroughFilterChain, filters: *ptfilters}}]
"""
    )
    lds.write_text(text)

    def check(running: Running) -> None:
        answer = running.admin.get("/config_dump?include_eds")
        assert types_of(answer)[1:4] == ["ClustersConfigDump", "EcdsConfigDump", "EndpointsConfigDump"]
        (found,) = running.admin.get("/config_dump?resource=ecds_filters").json["configs"]
        assert list(found) == ["@type", "version_info", "ecds_filter", "last_updated"]
        assert (found["version_info"], found["ecds_filter"]["name"]) == ("e1", "found")
        (table,) = running.admin.get("/config_dump?resource=dynamic_route_configs").json["configs"]
        assert list(table) == ["@type", "version_info", "route_config", "last_updated"]
        assert (table["version_info"], table["route_config"]["name"]) == ("r1", "table")
        rewrite(ecds, ("e1", "e2"), (FILTER, "type.googleapis.com/google.protobuf.Empty"))

        def refused(client: Client) -> bool:
            return "error_state" in client.get("/config_dump?resource=ecds_filters").text

        running.admin.until(refused)
        (found,) = running.admin.get("/config_dump?resource=ecds_filters").json["configs"]
        assert (found["version_info"], found["error_state"]["version_info"]) == ("e1", "e2")

    serve(reference, check)


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


def test_small_pages(answers: Callable[..., list[Answer]]) -> None:
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
    assert info.json["node"]["cluster"] == "ztunnel.istio-system"
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
        assert running.admin.post("/healthcheck/ok").status == 200
        assert running.admin.get("/ready").text == "LIVE\n"
        assert running.readiness.get("/other").status == 404
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
        assert "  ztunnel.app: debug\n" in running.admin.post("/logging", level="debug").text
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
    assert tunnel["tls"]["verifies"] == ["a trusted root", "uri prefix spiffe://cluster.local/"]
    assert (tunnel["leaves_from"], tunnel["mark"]) == ("10.244.2.3", 1234)
    assert passthrough.json["hop"]["clusters"][0]["cluster"] == "PassthroughCluster"
    assert passthrough.json["hop"]["clusters"][0]["endpoints"][0]["address"] == "1.2.3.4:80"
    assert inbound.json["hop"]["chain"] == "inbound_10.244.2.23"
    assert inbound.json["hop"]["policies"] == [
        {"allowed": True, "policy": "ns[default]-policy[reviews-viewer]-rule[0]"}
    ]
    assert inbound.json["hop"]["clusters"][0]["endpoints"][0]["address"] == "10.244.2.23:9080"
    assert denied.json["hop"]["verdict"] == "closed: rbac_access_denied_matched_policy[none]"
    assert (usage.status, unknown.status) == (400, 404)


def test_explaining_counts_nothing(reference: Reference) -> None:
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
        assert running.metrics.get("/").status == 404

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
