"""What a bootstrap says is obeyed or refused by name, and every fault of a file is listed at once."""

import asyncio
import http.client
import json
from pathlib import Path
from typing import Any

import pytest

from tests.ports import free_port
from tests.ztunnel.proxy.envoy.harness import Harness, cluster, listener, run
from xds.errors import ConfigError
from xds.proto.envoy.config.bootstrap.v3.bootstrap_pb2 import Bootstrap
from xds.proto.json import parse_value
from ztunnel.cli import main as command
from ztunnel.proxy.envoy.config.bootstrap import read_bootstrap

T = "type.googleapis.com/"
FILE_LOG = T + "envoy.extensions.access_loggers.file.v3.FileAccessLog"
NOT = "this proxy does not support this field"


def bootstrap(document: dict[str, Any]) -> Bootstrap:
    parsed = parse_value(document, Bootstrap)
    assert parsed.unknown_fields == ()
    return parsed.message


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"overload_manager": {"refresh_interval": "1s"}}, f"overload_manager: {NOT}"),
    ({"stats_sinks": [{"name": "s"}]}, f"stats_sinks: {NOT}"),
    ({"stats_config": {"use_all_default_tags": False}}, f"stats_config: {NOT}"),
    ({"cluster_manager": {"local_cluster_name": "c"}}, f"cluster_manager: {NOT}"),
    ({"header_prefix": "x-acme"}, f"header_prefix: {NOT}"),
    ({"default_config_source": {"ads": {}}}, f"default_config_source: {NOT}"),
    ({"admin": {"socket_options": [{"level": 1}]}}, f"admin.socket_options: {NOT}"),
    ({"admin": {"access_log_path": "/var/log/admin"}}, "admin.access_log_path: requests to the admin server are"),
    (
        {"admin": {"access_log": [{"name": "f", "typed_config": {"@type": FILE_LOG, "path": "/dev/stdout"}}]}},
        "admin.access_log[0]: requests to the admin server are",
    ),
    ({"admin": {"allow_paths": [{}]}}, "admin.allow_paths[0].match_pattern: Proto constraint"),
    (
        {"layered_runtime": {"layers": [{"name": "d", "disk_layer": {"symlink_root": "/x"}}]}},
        "layered_runtime.layers[0].disk_layer: ",
    ),
    (
        {
            "layered_runtime": {
                "layers": [{"name": "s", "static_layer": {"overload": {"global_downstream_max_connections": 5}}}]
            }
        },
        'layered_runtime.layers[0].static_layer["overload.global_downstream_max_connections"]: this proxy',
    ),
    (
        {"layered_runtime": {"layers": [{"name": "s", "static_layer": {"upstream.healthy_panic_threshold": 1}}]}},
        'static_layer["upstream.healthy_panic_threshold"]: this proxy',
    ),
    (
        {"bootstrap_extensions": [{"name": "w", "typed_config": {"@type": FILE_LOG, "path": "x"}}]},
        "bootstrap_extensions[0].typed_config: Didn't find a registered implementation",
    ),
    (
        {"static_resources": {"clusters": [{"name": "a"}, {"name": "b"}, {"name": "a"}]}},
        "static_resources.clusters[2].name: cluster manager: duplicate cluster 'a'",
    ),
]


@pytest.mark.parametrize(("document", "words"), REFUSED, ids=[words[:40] for _, words in REFUSED])
def test_unsupported_bootstrap_field_is_refused_by_name(document: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError) as refused:
        read_bootstrap(bootstrap(document))
    assert words in str(refused.value)


@pytest.mark.parametrize(
    "document",
    [
        {"stats_flush_interval": "5s"},
        {"admin": {"access_log_path": "/dev/null", "profile_path": "/tmp/p", "ignore_global_conn_limit": True}},
        {"admin": {"access_log": [{"name": "f", "typed_config": {"@type": FILE_LOG, "path": "/dev/null"}}]}},
        {
            "layered_runtime": {
                "layers": [
                    {
                        "name": "s",
                        "static_layer": {
                            "envoy": {"reloadable_features": {"x": False}},
                            "envoy.deprecated_features:envoy.config.x": True,
                            "re2.max_program_size.error_level": 32768,
                            "overload.global_downstream_max_connections": 2147483647,
                        },
                    },
                    {"name": "a", "admin_layer": {}},
                ]
            }
        },
    ],
)
def test_bootstrap_fields_without_effect_are_accepted(document: dict[str, Any]) -> None:
    read_bootstrap(bootstrap(document))


def test_admin_path_outside_allow_paths_has_no_effect(tmp_path: Path) -> None:
    """As Envoy: the target counts as sent, with its query."""

    port = free_port()

    def extend(message: Bootstrap) -> None:
        message.admin.address.socket_address.address = "127.0.0.1"
        message.admin.address.socket_address.port_value = port
        message.admin.allow_paths.add(exact="/ready")
        message.admin.allow_paths.add(prefix="/stats")

    def ask(method: str, target: str) -> tuple[int, str]:
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
        connection.request(method, target)
        response = connection.getresponse()
        answer = response.status, response.read().decode()
        connection.close()
        return answer

    async def body(harness: Harness) -> None:
        for method, target, status in (
            ("GET", "/ready", 200),
            ("GET", "/stats?filter=server.live", 200),
            ("GET", "/ready?x", 403),
            ("GET", "/clusters", 403),
            ("POST", "/quitquitquit", 403),
            ("POST", "/%71uitquitquit", 403),
            ("POST", "/stats/../quitquitquit", 404),
        ):
            found = await asyncio.to_thread(ask, method, target)
            assert found[0] == status, (target, found)
            if status == 403:
                assert found[1].strip() == f"request to path {target} not allowed"

    run(tmp_path, body, listener(), cluster(1), extend=extend)


def test_every_fault_is_listed_with_its_place(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, lds = tmp_path / "bootstrap.json", tmp_path / "lds.json"
    kind = T + "envoy.config.listener.v3.Listener"
    bad = {"address": {"socket_address": {"address": "127.0.0.1", "port_value": "x"}}, "tcp_backlog_size": "y"}
    lds.write_text(
        json.dumps(
            {
                "resources": [
                    {"@type": kind, **listener(name="a")[1], **bad},
                    {"@type": kind, **listener(name="b")[1], "filter_chains": []},
                    {"@type": kind, **listener(name="c")[1], "fcds_config": {}, "colour": 1},
                ]
            }
        )
    )
    path.write_text(
        json.dumps(
            {
                "node": {"id": 5},
                "watchdog": {},
                "typo": 1,
                "stats_sinks": [{"name": "s"}],
                "admin": {
                    "allow_paths": [{}],
                    "address": {"socket_address": {"address": "here", "port_value": 1}},
                },
                "static_resources": {
                    "listeners": [
                        {**listener(name="a")[1], "traffic_direction": "SIDEWAYS", "tcp_backlog_size": -1},
                        {**listener(name="b")[1], "listener_filters": [{"name": "x"}]},
                    ],
                    "clusters": [{"name": ""}, {"name": "c", "type": "ORIGINAL_DST"}, {"name": "c"}],
                },
                "dynamic_resources": {"lds_config": {"path": str(lds)}, "cds_config": {"ads": {}}},
            }
        )
    )
    assert command(["proxy", "--bootstrap", str(path), "--validate"]) == 1
    lines = capsys.readouterr().out.splitlines()
    expected = [
        f"{path}: node.id: expected a string",
        f"{path}: watchdog: {NOT}",
        f"{path}: typo: no such field",
        f"{path}: stats_sinks: {NOT}",
        f"{path}: admin.allow_paths[0].match_pattern: ",
        f"{path}: admin.address.socket_address.address: malformed IP address",
        f"{path}: static_resources.listeners[0].traffic_direction: expected one of",
        f"{path}: static_resources.listeners[0].tcp_backlog_size: expected an integer",
        f"{path}: static_resources.listeners[1] (b): listener_filters[0].config_type: ",
        f"{path}: static_resources.clusters[0]: name: ",
        f"{path}: static_resources.clusters[1] (c): cluster: LB policy",
        f"{path}: static_resources.clusters[2].name: cluster manager: duplicate cluster 'c'",
        f"{path}: dynamic_resources.cds_config: the configuration requests ADS",
        f"{lds}: resources[0].address.socket_address.port_value: expected an integer",
        f"{lds}: resources[0].tcp_backlog_size: expected an integer",
        f"{lds}: resources[1] (b): filter_chains: ",
        f"{lds}: resources[2].fcds_config: {NOT}",
        f"{lds}: resources[2].colour: no such field",
    ]
    for words in expected:
        assert len([line for line in lines if line.startswith(words)]) == 1, (words, lines)
    assert len(lines) == len(expected), lines
