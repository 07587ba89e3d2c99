"""The dump of a whole proxy that runs the reference configuration: what is in it, and the states it shows."""

import socket
from collections.abc import Callable
from typing import Any, cast

import pytest

from tests.ztunnel.proxy.envoy.admin.harness import Answer, Client, Running, serve
from tests.ztunnel.proxy.envoy.admin.reference import (
    IDENTITY,
    SERVICE_CLUSTER,
    TUNNEL_CLUSTER,
    TUNNEL_LISTENER,
    Reference,
    proxy_to,
    rewrite,
)
from ztunnel.proxy.envoy.config.state import State

ADMIN = "type.googleapis.com/envoy.admin.v3."


def types_of(dump: Answer) -> list[str]:
    return [config["@type"].removeprefix(ADMIN) for config in dump.json["configs"]]


# What is in it


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
    name = f"cluster_name: {SERVICE_CLUSTER}"
    rewrite(eds, (name, f"{name}\n  policy: {{overprovisioning_factor: 0}}"))  # refused

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


def test_missing_secret_is_dumped_as_warming(reference: Reference) -> None:
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
