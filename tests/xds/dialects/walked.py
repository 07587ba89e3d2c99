"""Valid resources that hold every kind of message that this dialect reads."""

from typing import Any

from tests.hbone.certificates import Authority
from tests.xds.dialects.field_walk import Compile
from xds.dialects.envoy import (
    Surroundings,
    compile_assignment,
    compile_cluster,
    compile_listener,
    compile_route_table,
    compile_secret,
)
from xds.proto.envoy.config.bootstrap.v3.bootstrap_pb2 import Bootstrap
from xds.proto.envoy.config.cluster.v3.cluster_pb2 import Cluster
from xds.proto.envoy.config.endpoint.v3.endpoint_pb2 import ClusterLoadAssignment
from xds.proto.envoy.config.listener.v3.listener_pb2 import Listener
from xds.proto.envoy.config.route.v3.route_pb2 import RouteConfiguration
from xds.proto.envoy.extensions.transport_sockets.tls.v3.tls_pb2 import Secret
from xds.proto.json import parse_value
from ztunnel.proxy.envoy.config.bootstrap import read_bootstrap

T = "type.googleapis.com/"
SURROUNDINGS = Surroundings(read_file=lambda path: b"", environment={})
_ROOT = Authority()
_LEAF = _ROOT.issue("spiffe://td/ns/a/sa/b")


def typed(kind: str, **fields: Any) -> dict[str, Any]:
    return {"name": kind.rpartition(".")[2], "typed_config": {"@type": T + kind, **fields}}


def socket(port: int = 80, host: str = "127.0.0.1") -> dict[str, Any]:
    return {"socket_address": {"address": host, "port_value": port}}


def inline(text: bytes) -> dict[str, Any]:
    return {"inline_string": text.decode()}


ADS = {"ads": {}, "resource_api_version": "V3"}
BY_GRPC = {
    "api_config_source": {
        "api_type": "GRPC",
        "transport_api_version": "V3",
        "grpc_services": [{"envoy_grpc": {"cluster_name": "xds-grpc"}}],
    }
}
BY_FILE = {"path_config_source": {"path": "/x", "watched_directory": {"path": "/"}}, "initial_fetch_timeout": "1s"}
CIDR = {"address_prefix": "10.0.0.0", "prefix_len": 8}
REGEX = {"google_re2": {}, "regex": "a+"}
FORMAT = {"text_format_source": {"inline_string": "%START_TIME%"}}
LOG_SERVICE = {
    "log_name": "l",
    "transport_api_version": "V3",
    "grpc_service": {"envoy_grpc": {"cluster_name": "als"}},
    "buffer_flush_interval": "2s",
    "buffer_size_bytes": 100,
}
LOGS = [
    typed("envoy.extensions.access_loggers.file.v3.FileAccessLog", path="/dev/null", log_format=FORMAT),
    typed("envoy.extensions.access_loggers.stream.v3.StdoutAccessLog", log_format={"json_format": {"a": "b"}}),
    typed("envoy.extensions.access_loggers.stream.v3.StderrAccessLog", log_format={"text_format": "x"}),
    typed("envoy.extensions.access_loggers.grpc.v3.TcpGrpcAccessLogConfig", common_config=LOG_SERVICE),
    typed(
        "envoy.extensions.access_loggers.grpc.v3.HttpGrpcAccessLogConfig",
        common_config=LOG_SERVICE,
        additional_request_headers_to_log=["x"],
    ),
]
COMPARED = {"comparison": {"op": "GE", "value": {"default_value": 500, "runtime_key": "k"}}}
NO_CHECK: dict[str, Any] = {"not_health_check_filter": {}}
FAILED = {"response_flag_filter": {"flags": ["UF"]}}
FILTERED = [
    {**typed("envoy.extensions.access_loggers.stream.v3.StdoutAccessLog"), "filter": chosen}
    for chosen in (
        {"status_code_filter": COMPARED},
        {"duration_filter": COMPARED},
        {"and_filter": {"filters": [NO_CHECK, FAILED]}},
        {"or_filter": {"filters": [NO_CHECK, FAILED]}},
    )
]
CERTIFICATE = {
    "certificate_chain": inline(_LEAF.chain_pem),
    "private_key": inline(_LEAF.key_pem),
    "password": {"inline_bytes": "cGFzcw=="},
}
VALIDATION = {
    "trusted_ca": inline(_ROOT.pem),
    "crl": inline(_ROOT.revoke()),
    "verify_certificate_hash": ["a" * 64],
    "match_typed_subject_alt_names": [{"san_type": "URI", "matcher": {"safe_regex": REGEX}}],
    "match_subject_alt_names": [{"prefix": "spiffe://"}],
}
SDS = {"name": "s", "sds_config": BY_GRPC}
TLS = {
    "tls_params": {"tls_minimum_protocol_version": "TLSv1_2", "cipher_suites": ["A"], "ecdh_curves": ["X25519"]},
    "tls_certificates": [CERTIFICATE],
    "combined_validation_context": {
        "default_validation_context": VALIDATION,
        "validation_context_sds_secret_config": {"name": "r", "sds_config": BY_FILE},
    },
    "alpn_protocols": ["h2"],
    "key_log": {"path": "/dev/null"},
}
TLS_BY_SDS = {"tls_certificate_sds_secret_configs": [SDS], "validation_context_sds_secret_config": SDS}
SERVER_TLS = typed(
    "envoy.extensions.transport_sockets.tls.v3.DownstreamTlsContext",
    common_tls_context=TLS,
    session_ticket_keys={"keys": [{"inline_string": "k"}]},
)
CLIENT_TLS = typed("envoy.extensions.transport_sockets.tls.v3.UpstreamTlsContext", common_tls_context=TLS_BY_SDS)
RAW = typed("envoy.extensions.transport_sockets.raw_buffer.v3.RawBuffer")
WITH_HEADER = typed(
    "envoy.extensions.transport_sockets.proxy_protocol.v3.ProxyProtocolUpstreamTransport",
    config={"version": "V1"},
    transport_socket=RAW,
)
STRUCT = {"filter_metadata": {"envoy.lb": {"a": "b"}}}
HEADERS = [{"header": {"key": "baggage", "value": "x"}, "append_action": "ADD_IF_ABSENT"}]
BOTH_METADATA = {
    "filter": "f",
    "path": [{"key": "k"}],
    "value": {"string_match": {"exact": "v"}},
}
PORT = {"select_expr": {"operand": {"ident_expr": {"name": "source"}}, "field": "port"}}
CONDITION = {
    "call_expr": {
        "function": "@in",
        "args": [PORT, {"list_expr": {"elements": [{"const_expr": {"int64_value": 1}}]}}],
    }
}
RBAC = typed(
    "envoy.extensions.filters.network.rbac.v3.RBAC",
    stat_prefix="r",
    rules={
        "policies": {
            "p": {
                "permissions": [
                    {
                        "and_rules": {
                            "rules": [
                                {"or_rules": {"rules": [{"any": True}]}},
                                {"not_rule": {"destination_port_range": {"start": 1, "end": 2}}},
                                {"destination_ip": CIDR},
                                {"requested_server_name": {"exact": "a", "ignore_case": True}},
                                {"metadata": BOTH_METADATA},
                            ]
                        }
                    }
                ],
                "principals": [
                    {
                        "and_ids": {
                            "ids": [
                                {"or_ids": {"ids": [{"any": True}]}},
                                {"authenticated": {"principal_name": {"suffix": "b"}}},
                                {"direct_remote_ip": CIDR},
                            ]
                        }
                    }
                ],
                "condition": CONDITION,
            }
        }
    },
)
STATE = typed(
    "envoy.extensions.filters.network.set_filter_state.v3.Config",
    on_new_connection=[{"object_key": "k", "format_string": {"text_format": "x"}}],
)
TCP = typed(
    "envoy.extensions.filters.network.tcp_proxy.v3.TcpProxy",
    stat_prefix="t",
    weighted_clusters={"clusters": [{"name": "c", "weight": 1, "metadata_match": STRUCT}]},
    tunneling_config={"hostname": "h:1", "headers_to_add": HEADERS},
    hash_policy=[{"source_ip": {}}],
    backoff_options={"base_interval": "1s", "max_interval": "2s"},
    access_log=[*LOGS, *FILTERED],
)
CONNECT = [{"upgrade_type": "CONNECT", "connect_config": {"allow_post": False}}]
ROUTES = {
    "name": "r",
    "virtual_hosts": [
        {
            "name": "v",
            "domains": ["*"],
            "routes": [
                {
                    "match": {
                        "connect_matcher": {},
                        "headers": [{"name": "a", "string_match": {"contains": "part"}}],
                    },
                    "route": {
                        "weighted_clusters": {"clusters": [{"name": "c", "weight": 1}]},
                        "upgrade_configs": CONNECT,
                        "retry_policy": {"num_retries": 2},
                    },
                    "decorator": {"operation": "o"},
                    "metadata": STRUCT,
                },
                {
                    "match": {"safe_regex": REGEX, "case_sensitive": True},
                    "direct_response": {"status": 404, "body": {"inline_string": "not found"}},
                },
            ],
        }
    ],
}
ROUTER = typed("envoy.extensions.filters.http.router.v3.Router", dynamic_stats=True)
HTTP2 = {"allow_connect": True, "connection_keepalive": {"interval": "1s", "timeout": "1s"}}


def manager(**routes: Any) -> dict[str, Any]:
    return typed(
        "envoy.extensions.filters.network.http_connection_manager.v3.HttpConnectionManager",
        stat_prefix="h",
        http_filters=[ROUTER],
        http_protocol_options={"accept_http_10": False},
        http2_protocol_options=HTTP2,
        common_http_protocol_options={"idle_timeout": "1s"},
        set_current_client_cert_details={"uri": True},
        upgrade_configs=[{"upgrade_type": "CONNECT"}],
        access_log=LOGS,
        **routes,
    )


NETWORK = "envoy.extensions.matching.common_inputs.network.v3."


def named_chain(name: str) -> dict[str, Any]:
    return {"action": {"name": name, "typed_config": {"@type": T + "google.protobuf.StringValue", "value": name}}}


def listed(predicate: dict[str, Any]) -> dict[str, Any]:
    return {"predicate": predicate, "on_match": named_chain("a")}


PORT = {"name": "port", "typed_config": {"@type": T + NETWORK + "DestinationPortInput"}}
SOURCE = {"name": "source", "typed_config": {"@type": T + NETWORK + "SourceIPInput"}}
SERVER_NAME = {"name": "sni", "typed_config": {"@type": T + NETWORK + "ServerNameInput"}}
STATE_INPUT = {"name": "state", "typed_config": {"@type": T + NETWORK + "FilterStateInput", "key": "k"}}
METADATA_INPUT = {
    "name": "metadata",
    "typed_config": {"@type": T + NETWORK + "DynamicMetadataInput", "filter": "f", "path": [{"key": "k"}]},
}
A = {"exact": "a"}
SINGLE = {"single_predicate": {"input": PORT, "value_match": {"safe_regex": {"google_re2": {}, "regex": "a"}}}}
IPS = {
    "name": "ip",
    "typed_config": {
        "@type": T + "xds.type.matcher.v3.IPMatcher",
        "range_matchers": [{"ranges": [CIDR], "on_match": named_chain("a")}],
    },
}
NAMES = {
    "name": "sni",
    "typed_config": {
        "@type": T + "xds.type.matcher.v3.ServerNameMatcher",
        "domain_matchers": [{"domains": ["a"], "on_match": named_chain("a")}],
    },
}
MATCHER = {
    "matcher_tree": {
        "input": PORT,
        "exact_match_map": {
            "map": {
                "1": {"matcher": {"matcher_tree": {"input": SOURCE, "custom_match": IPS}}},
                "2": {"matcher": {"matcher_tree": {"input": SERVER_NAME, "custom_match": NAMES}}},
                "3": {
                    "matcher": {
                        "matcher_list": {
                            "matchers": [
                                listed(SINGLE),
                                listed({"or_matcher": {"predicate": [SINGLE, SINGLE]}}),
                                listed({"not_matcher": SINGLE}),
                                listed({"single_predicate": {"input": STATE_INPUT, "value_match": A}}),
                                listed({"single_predicate": {"input": METADATA_INPUT, "value_match": A}}),
                            ]
                        }
                    }
                },
            }
        },
    },
    "on_no_match": named_chain("b"),
}
FILTERS = "envoy.extensions.filters.listener."
LISTENER_FILTERS = [
    typed(FILTERS + "original_dst.v3.OriginalDst"),
    typed(FILTERS + "original_src.v3.OriginalSrc", mark=1),
    {
        **typed(FILTERS + "tls_inspector.v3.TlsInspector"),
        "filter_disabled": {
            "or_match": {"rules": [{"any_match": True}, {"destination_port_range": {"start": 1, "end": 2}}]}
        },
    },
    typed(FILTERS + "http_inspector.v3.HttpInspector"),
    typed(FILTERS + "proxy_protocol.v3.ProxyProtocol", allow_requests_without_proxy_protocol=True),
    typed("istio.set_internal_dst_address.v1.Config"),
    {"name": "w", "config_discovery": {"config_source": ADS, "type_urls": ["x.Y"]}},
]
ON = {"default_value": True, "runtime_key": "k"}
LIMITS = [
    typed(
        "envoy.extensions.filters.network.connection_limit.v3.ConnectionLimit",
        stat_prefix="c",
        max_connections=2,
        runtime_enabled=ON,
    ),
    typed(
        "envoy.extensions.filters.network.local_ratelimit.v3.LocalRateLimit",
        stat_prefix="l",
        token_bucket={"max_tokens": 2, "tokens_per_fill": 2, "fill_interval": "1s"},
        runtime_enabled=ON,
    ),
]
LISTENER = {
    "name": "l",
    "address": socket(),
    "additional_addresses": [{"address": socket(81)}],
    "filter_chains": [
        {
            "name": "a",
            "filters": [*LIMITS, RBAC, STATE, TCP],
            "transport_socket": SERVER_TLS,
            "metadata": STRUCT,
            "filter_chain_match": {"prefix_ranges": [CIDR], "transport_protocol": "tls"},
        },
        {"name": "b", "filters": [manager(route_config=ROUTES)], "transport_socket": RAW},
    ],
    "default_filter_chain": {"filters": [manager(rds={"route_config_name": "r", "config_source": BY_FILE})]},
    "listener_filters": LISTENER_FILTERS,
    "socket_options": [{"level": 1, "name": 2, "int_value": 3, "type": {"stream": {}}}],
    "deprecated_v1": {"bind_to_port": True},
    "connection_balance_config": {"exact_balance": {}},
    "metadata": STRUCT,
    "access_log": LOGS,
}
ENDPOINTS = {
    "cluster_name": "c",
    "named_endpoints": {"n": {"address": socket()}},
    "endpoints": [
        {
            "locality": {"region": "r", "zone": "z", "sub_zone": "s"},
            "metadata": STRUCT,
            "lb_endpoints": [
                {"endpoint": {"address": socket(), "health_check_config": {"port_value": 1}}, "metadata": STRUCT},
                {"endpoint": {"address": {"pipe": {"path": "/x"}}}},
                {"endpoint": {"address": {"envoy_internal_address": {"server_listener_name": "l"}}}},
                {"endpoint_name": "n"},
            ],
        }
    ],
    "policy": {"drop_overloads": [{"category": "c", "drop_percentage": {"numerator": 1}}]},
}
OPTIONS = "envoy.extensions.upstreams.http.v3.HttpProtocolOptions"
LB = {"slow_start_config": {"slow_start_window": "1s", "aggression": {"default_value": 1}}}
WEIGHTED = {"locality_lb_config": {"locality_weighted_lb_config": {}}}
SLOW = {
    "slow_start_config": {
        "slow_start_window": "1s",
        "aggression": {"default_value": 2, "runtime_key": "k"},
        "min_weight_percent": {"value": 5},
    }
}
BALANCED = {
    kind: {"typed_extension_config": typed(f"envoy.extensions.load_balancing_policies.{kind}", **config)}
    for kind, config in {
        "round_robin.v3.RoundRobin": SLOW | WEIGHTED,
        "least_request.v3.LeastRequest": {"active_request_bias": {"default_value": 2, "runtime_key": "k"}}
        | SLOW
        | WEIGHTED,
        "random.v3.Random": WEIGHTED,
        "ring_hash.v3.RingHash": {"minimum_ring_size": 8, "maximum_ring_size": 9},
        "maglev.v3.Maglev": {"table_size": 101},
    }.items()
}
CHECKED = {"timeout": "1s", "interval": "2s", "unhealthy_threshold": 2, "healthy_threshold": 3}
STATUSES = [{"start": 200, "end": 300}]
CHECKS = [
    {
        **CHECKED,
        "http_health_check": {
            "path": "/",
            "request_headers_to_add": [{"header": {"key": "a", "value": "b"}}],
            "expected_statuses": STATUSES,
            "retriable_statuses": STATUSES,
        },
    },
    {**CHECKED, "tcp_health_check": {"send": {"text": "00"}, "receive": [{"text": "01"}]}},
    {**CHECKED, "grpc_health_check": {"service_name": "s"}},
]
CLUSTER = {
    "name": "c",
    "type": "STRICT_DNS",
    "load_assignment": {
        "cluster_name": "c",
        "endpoints": [{"lb_endpoints": [{"endpoint": {"address": socket(80, "a.example")}}]}],
    },
    "transport_socket": CLIENT_TLS,
    "transport_socket_matches": [
        {
            "name": "m",
            "match": {"a": "b"},
            "transport_socket": typed(
                "envoy.extensions.transport_sockets.internal_upstream.v3.InternalUpstreamTransport",
                passthrough_metadata=[
                    {"name": "tunnel", "kind": {"host": {}}},
                    {"name": "istio", "kind": {"cluster": {}}},
                ],
                transport_socket=RAW,
            ),
        },
        {"name": "p", "match": {"c": "d"}, "transport_socket": WITH_HEADER},
    ],
    "circuit_breakers": {"thresholds": [{"max_connections": 1}]},
    "common_lb_config": {"healthy_panic_threshold": {"value": 1}, "locality_weighted_lb_config": {}},
    "least_request_lb_config": {"choice_count": 2, "active_request_bias": {"default_value": 1}, **LB},
    "lb_policy": "LEAST_REQUEST",
    "outlier_detection": {"interval": "1s"},
    "upstream_connection_options": {"tcp_keepalive": {"keepalive_time": 1}},
    "upstream_bind_config": {"source_address": {"address": "127.0.0.1", "port_value": 0}},
    "common_http_protocol_options": {"idle_timeout": "1s"},
    "http_protocol_options": {"accept_http_10": False},
    "lb_subset_config": {"subset_selectors": [{"keys": ["a"]}]},
    "dns_resolution_config": {"resolvers": [socket(53)], "dns_resolver_options": {}},
    "dns_failure_refresh_rate": {"base_interval": "1s", "max_interval": "2s"},
    "typed_extension_protocol_options": {
        OPTIONS: {
            "@type": T + OPTIONS,
            "explicit_http_config": {"http2_protocol_options": HTTP2},
            "common_http_protocol_options": {"idle_timeout": "1s"},
        }
    },
    "metadata": STRUCT,
}
RESOLVERS = "envoy.extensions.network.dns_resolver."
CARES = typed(
    RESOLVERS + "cares.v3.CaresDnsResolverConfig",
    resolvers=[socket(53)],
    dns_resolver_options={},
    query_tries=2,
    query_timeout_seconds=3,
)
GETADDRINFO = typed(RESOLVERS + "getaddrinfo.v3.GetAddrInfoDnsResolverConfig")
ORIGINAL = {
    "name": "o",
    "type": "ORIGINAL_DST",
    "lb_policy": "CLUSTER_PROVIDED",
    "original_dst_lb_config": {"use_http_header": True, "metadata_key": {"key": "k", "path": [{"key": "p"}]}},
    "typed_extension_protocol_options": {
        OPTIONS: {"@type": T + OPTIONS, "auto_config": {"http2_protocol_options": HTTP2}}
    },
}
BY_EDS = {
    "name": "e",
    "type": "EDS",
    "eds_cluster_config": {"eds_config": BY_GRPC, "service_name": "s"},
    "round_robin_lb_config": LB,
    "common_lb_config": {"zone_aware_lb_config": {"min_cluster_size": 1, "fail_traffic_on_panic": True}},
    "typed_extension_protocol_options": {
        OPTIONS: {"@type": T + OPTIONS, "use_downstream_protocol_config": {"http2_protocol_options": HTTP2}}
    },
}
BOOTSTRAP = {
    "dns_resolution_config": {"resolvers": [socket(53)], "dns_resolver_options": {}},
    "node": {"id": "n", "locality": {"zone": "z"}},
    "admin": {
        "address": socket(),
        "allow_paths": [{"exact": "/ready"}],
        "access_log": [typed("envoy.extensions.access_loggers.file.v3.FileAccessLog", path="/dev/null")],
    },
    "bootstrap_extensions": [typed("envoy.extensions.bootstrap.internal_listener.v3.InternalListener")],
    "layered_runtime": {"layers": [{"name": "s", "static_layer": {"re2.max_program_size.error_level": 1}}]},
    "dynamic_resources": {
        "ads_config": BY_GRPC["api_config_source"],
        "lds_config": ADS,
        "cds_config": BY_FILE,
    },
    "static_resources": {
        "clusters": [
            {
                "name": "xds-grpc",
                "load_assignment": {
                    "cluster_name": "x",
                    "endpoints": [{"lb_endpoints": [{"endpoint": {"address": socket()}}]}],
                },
            }
        ]
    },
}


def _with(compile_it: Any) -> Compile:
    return lambda message: compile_it(message, SURROUNDINGS)


def _bootstrap(message: Any) -> object:
    """What is static is compiled at the start of the proxy, not by the reader of the bootstrap."""
    clusters = [compile_cluster(cluster, SURROUNDINGS) for cluster in message.static_resources.clusters]
    return read_bootstrap(message), message.node.SerializeToString(deterministic=True), clusters


def _listener(**more: Any) -> Any:
    return parse_value({**LISTENER, **more}, Listener).message


RESOURCES: dict[str, tuple[Any, Compile]] = {
    "listener": (_listener(), _with(compile_listener)),
    "listener with matcher": (_listener(filter_chain_matcher=MATCHER), _with(compile_listener)),
    "cluster": (parse_value(CLUSTER, Cluster).message, _with(compile_cluster)),
    **{
        f"cluster with {kind}": (
            parse_value({"name": "b", "load_balancing_policy": {"policies": [policy]}}, Cluster).message,
            _with(compile_cluster),
        )
        for kind, policy in BALANCED.items()
    },
    **{
        f"cluster with {next(reversed(check))}": (
            parse_value({"name": "h", "health_checks": [check]}, Cluster).message,
            _with(compile_cluster),
        )
        for check in CHECKS
    },
    **{
        f"cluster resolved by {kind}": (
            parse_value({"name": "d", "typed_dns_resolver_config": config}, Cluster).message,
            _with(compile_cluster),
        )
        for kind, config in {"cares": CARES, "getaddrinfo": GETADDRINFO}.items()
    },
    "cluster resolved by dns_resolvers": (
        parse_value({"name": "d", "dns_resolvers": [socket(53)]}, Cluster).message,
        _with(compile_cluster),
    ),
    "original destination": (parse_value(ORIGINAL, Cluster).message, _with(compile_cluster)),
    "eds cluster": (parse_value(BY_EDS, Cluster).message, _with(compile_cluster)),
    "endpoints": (parse_value(ENDPOINTS, ClusterLoadAssignment).message, lambda m: compile_assignment(m)),  # type: ignore[arg-type]
    "routes": (parse_value(ROUTES, RouteConfiguration).message, _with(compile_route_table)),
    "certificate": (
        parse_value({"name": "s", "tls_certificate": CERTIFICATE}, Secret).message,
        _with(compile_secret),
    ),
    "roots": (parse_value({"name": "s", "validation_context": VALIDATION}, Secret).message, _with(compile_secret)),
    "bootstrap": (parse_value(BOOTSTRAP, Bootstrap).message, _bootstrap),
}
