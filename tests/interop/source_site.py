"""The applications, files and clusters that the scenarios of :mod:`tests.interop.sources` use."""

from __future__ import annotations

import contextlib
import json
import socket
import threading
from concurrent import futures
from pathlib import Path
from typing import Any

import grpc
import h2.connection
import h2.events

from tests.interop import beside, scenario_clusters
from tests.interop.loopback import application, tunnels_then
from tests.interop.scenario_clusters import CHECK
from tests.ports import free_port
from tests.ztunnel.proxy.envoy.harness import Json, T, chain, cluster, endpoint, http2, tcp


def _web(status: int) -> Any:
    def serve(sock: socket.socket) -> None:
        while sock.recv(65536):
            sock.sendall(b"HTTP/1.1 %d X\r\ncontent-length: 0\r\n\r\n" % status)

    return serve


def _tells_headers(http: h2.connection.H2Connection, event: h2.events.Event, _: socket.socket) -> None:
    if isinstance(event, h2.events.RequestReceived):
        added = [(name.decode(), value.decode()) for name, value in event.headers if name.startswith(b"x-")]
        own = [each for each in added if len(each[0]) == len("x-a")]
        http.send_data(event.stream_id, " ".join(map("=".join, own)).encode(), end_stream=True)


def _mute(sock: socket.socket) -> None:
    while sock.recv(4096):
        pass


def _health(stack: contextlib.ExitStack, serving: int) -> int:
    """Answer gRPC's health checks for the service ``shop``; the port."""

    def check(wire: bytes, _: object) -> bytes:
        return bytes((8, serving if wire == b"\x0a\x04shop" else 2))

    handler = grpc.method_handlers_generic_handler(
        "grpc.health.v1.Health", {"Check": grpc.unary_unary_rpc_method_handler(check)}
    )
    server = grpc.server(futures.ThreadPoolExecutor(1))
    server.add_generic_rpc_handlers((handler,))
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    stack.callback(lambda: server.stop(0).wait())
    return port


def _at_a_path(path: Path, stack: contextlib.ExitStack) -> None:
    server = stack.enter_context(socket.socket(socket.AF_UNIX))
    server.bind(str(path))
    server.listen()

    def accept() -> None:
        with contextlib.suppress(OSError):
            while True:
                with server.accept()[0] as sock:
                    if sock.recv(64):
                        sock.sendall(b"unix")

    threading.Thread(target=accept, daemon=True).start()
    stack.callback(server.shutdown, socket.SHUT_RDWR)


def applications(stack: contextlib.ExitStack, folder: Path) -> dict[str, int]:
    """Start the applications like ``scenario_clusters.applications``, and the other servers of these scenarios."""
    _at_a_path(folder / "unix", stack)
    more = {
        "mute": application(_mute, stack),
        "tunnels": application(tunnels_then(_tells_headers), stack),
        "good": application(_web(201), stack),
        "bad": application(_web(202), stack),
        "serving": _health(stack, 1),
        "not serving": _health(stack, 2),
    }
    apps = scenario_clusters.applications(stack, folder) | more
    (folder / "ports.json").write_text(json.dumps(apps))
    return apps


_OPTIONS = "envoy.extensions.upstreams.http.v3.HttpProtocolOptions"


def _of_files(apps: dict[str, int], folder: Path) -> list[Json]:
    """Clusters whose endpoints are discovered."""
    kind = f"{T}envoy.config.endpoint.v3.ClusterLoadAssignment"
    address = endpoint(apps["one"])["endpoint"]
    named = {"endpoint_name": "n"}

    def assigned(name: str, *hosts: Json, **more: Any) -> Json:
        return {"@type": kind, "cluster_name": name, "endpoints": [{"lb_endpoints": list(hosts)}], **more}

    def discovered(name: str, source: Json, **more: Any) -> Json:
        return {"name": name, "type": "EDS", "eds_cluster_config": {"eds_config": source, **more}}

    by_path = from_file(folder, "by-path", assigned("path", endpoint(apps["one"])))["path_config_source"]["path"]
    late = {"resource_api_version": "V3", "initial_fetch_timeout": "0.3s"}
    api = {
        "api_type": "GRPC",
        "transport_api_version": "V3",
        "set_node_on_first_message_only": True,
        "grpc_services": [{"envoy_grpc": {"cluster_name": "control"}}],
    }
    return [
        discovered("path", {"path": by_path, "resource_api_version": "V3"}),
        discovered(
            "service_name", from_file(folder, "by-name", assigned("s", endpoint(apps["one"]))), service_name="s"
        ),
        discovered(
            "named endpoint",
            from_file(folder, "named", assigned("named endpoint", named, named_endpoints={"n": address})),
        ),
        discovered("ADS", {"ads": {}, **late}),
        discovered("no control plane", {"api_config_source": api, **late}),
        {**cluster(free_port(), name="control")[1], "typed_extension_protocol_options": http2()},
    ]


def _checked(name: str, apps: dict[str, int], ports: tuple[str, str], **check: Any) -> Json:
    """A cluster of two hosts, of which the second fails its checks."""
    _, found = cluster(
        name=name,
        # A busy machine can take a second for a check, and one late answer would decide.
        health_checks=[{**CHECK, "timeout": "4s", "unhealthy_threshold": 1, **check}],
        common_lb_config=beside.NO_PANIC,
        **({"typed_extension_protocol_options": http2()} if "grpc_health_check" in check else {}),
    )
    hosts = []
    for app, port in zip(("one", "two"), ports, strict=True):
        host = endpoint(apps[app])
        host["endpoint"]["health_check_config"] = {"port_value": apps[port]}
        hosts.append(host)
    found["load_assignment"]["endpoints"] = [{"lb_endpoints": hosts}]
    return found


def bootstrap(apps: dict[str, int], folder: Path) -> Json:
    """The bootstrap but for the scenarios' listeners."""
    plain_apps = ("one", "two", "three", "echo", "mute")
    _, unix = cluster(name="unix")
    unix["load_assignment"]["endpoints"] = [
        {"lb_endpoints": [{"endpoint": {"address": {"pipe": {"path": str(folder / "unix")}}}}]}
    ]
    _, half = cluster(apps["one"], name="dropping half")
    share = {"category": "all", "drop_percentage": {"numerator": 1_000_000, "denominator": "MILLION"}}
    half["load_assignment"]["policy"] = {"drop_overloads": [share]}
    original = {"type": "ORIGINAL_DST", "lb_policy": "CLUSTER_PROVIDED"}
    key = {"key": "k", "path": [{"key": "p"}]}
    passing = f"{T}envoy.extensions.transport_sockets.internal_upstream.v3.InternalUpstreamTransport"
    raw = {
        "name": "raw",
        "typed_config": {"@type": f"{T}envoy.extensions.transport_sockets.raw_buffer.v3.RawBuffer"},
    }
    passes = {
        "@type": passing,
        "passthrough_metadata": [{"name": "its.name", "kind": {"cluster": {}}}],
        "transport_socket": raw,
    }
    _, inside = cluster(
        name="inside",
        transport_socket={"name": "i", "typed_config": passes},
        metadata={"filter_metadata": {"its.name": {"k": "v"}}},
    )
    inner = {"envoy_internal_address": {"server_listener_name": "inner"}}
    inside["load_assignment"]["endpoints"] = [{"lb_endpoints": [{"endpoint": {"address": inner}}]}]
    secured = f"{T}envoy.extensions.transport_sockets.tls.v3.UpstreamTlsContext"
    alpn = {
        "transport_socket": {"name": "tls", "typed_config": {"@type": secured}},
        "typed_extension_protocol_options": {_OPTIONS: {"@type": f"{T}{_OPTIONS}", "auto_config": {}}},
    }
    server = {"socket_address": {"address": "127.0.0.1", "port_value": apps["dns"]}}
    resolves = {"dns_resolver_options": {"no_default_search_domain": True}, "rotate_nameservers": True}
    http = {
        "path": "/h",
        "host": "h.example",
        "method": "HEAD",
        "codec_client_type": "HTTP1",
        "expected_statuses": [{"start": 201, "end": 202}],
    }
    internal = {"@type": f"{T}envoy.extensions.bootstrap.internal_listener.v3.InternalListener"}
    return {
        "node": {
            "id": "n",
            "cluster": "c",
            "metadata": {"a": "b"},
            "dynamic_parameters": {"x": {"params": {"a": "b"}}},
            "user_agent_name": "u",
            "user_agent_build_version": {"version": {"major_number": 1}},
            "extensions": [{"name": "e"}],
            "client_features": ["f"],
            "listening_addresses": [{"socket_address": {"address": "127.0.0.1", "port_value": 1}}],
        },
        "bootstrap_extensions": [{"name": "internal", "typed_config": internal}],
        "dynamic_resources": {
            "ads_config": {
                "api_type": "GRPC",
                "transport_api_version": "V3",
                "grpc_services": [{"envoy_grpc": {"cluster_name": "control"}}],
            }
        },
        "static_resources": {
            "listeners": [{"name": "inner", "internal_listener": {}, "filter_chains": [chain(tcp("one"))]}],
            "clusters": [
                *(cluster(apps[name], name=name)[1] for name in plain_apps),
                {**cluster(apps["tunnels"], name="tunnels")[1], "typed_extension_protocol_options": http2()},
                cluster(free_port(), name="refusing")[1],
                {"name": "by header", **original, "original_dst_lb_config": {"use_http_header": True}},
                {
                    "name": "by other header",
                    **original,
                    "original_dst_lb_config": {"use_http_header": True, "http_header_name": "x-to"},
                },
                {"name": "by metadata", **original, "original_dst_lb_config": {"metadata_key": key}},
                *_of_files(apps, folder),
                _checked("checked by HTTP", apps, ("good", "bad"), http_health_check=http),
                _checked(
                    "checked by gRPC",
                    apps,
                    ("serving", "not serving"),
                    grpc_health_check={"service_name": "shop"},
                ),
                *(unix, half, inside),
                cluster(apps["one"], name="ALPN decides", **alpn)[1],
                scenario_clusters.resolving(
                    "rotates",
                    apps["one"],
                    "udp.test",
                    typed_dns_resolver_config=scenario_clusters.cares(server, **resolves),
                ),
                scenario_clusters.resolving(
                    "resolvers as fallback",
                    apps["one"],
                    "localhost",
                    typed_dns_resolver_config=scenario_clusters.cares(server, use_resolvers_as_fallback=True),
                ),
            ],
        },
    }


def from_file(folder: Path, name: str, *resources: Json) -> Json:
    """Write resources to a file of the folder, and return the source of configuration that reads it."""
    path = folder / f"{name}.xds.json"
    path.write_text(json.dumps({"version_info": "1", "resources": list(resources)}))
    return {
        "path_config_source": {"path": str(path), "watched_directory": {"path": str(folder)}},
        "resource_api_version": "V3",
    }
