"""Clusters and endpoints: what they become, and the named error of what must be refused."""

from typing import Any

import pytest
import yaml

from tests.xds.dialects.test_envoy import SURROUNDINGS, T, cluster_document
from xds.dialects.envoy import compile_assignment, compile_cluster
from xds.errors import ConfigError
from xds.model.cluster import LbPolicy
from xds.proto.envoy.config.cluster.v3.cluster_pb2 import Cluster
from xds.proto.envoy.config.endpoint.v3.endpoint_pb2 import ClusterLoadAssignment
from xds.proto.json import parse_value
from ztunnel.proxy.envoy.upstream.host import HostSet
from ztunnel.proxy.envoy.upstream.priorities import spread


def by_policy(kind: str, **config: Any) -> dict[str, Any]:
    url = f"{T}envoy.extensions.load_balancing_policies.{kind}"
    return {"policies": [{"typed_extension_config": {"name": kind, "typed_config": {"@type": url, **config}}}]}


CHECKED = {"timeout": "1s", "interval": "1s", "unhealthy_threshold": 1, "healthy_threshold": 1}
TCP_CHECK = {**CHECKED, "tcp_health_check": {}}
NAMED = {"endpoint": {"address": {"socket_address": {"address": "a.example", "port_value": 1}}}}
ORIGINAL = {"type": "ORIGINAL_DST", "lb_policy": "CLUSTER_PROVIDED"}
BAD_CLUSTERS: list[tuple[dict[str, Any], str]] = [
    ({"type": "STATIC"}, "name: Proto constraint"),
    (
        {"name": "c", "type": "ORIGINAL_DST"},
        "cluster: LB policy ROUND_ROBIN is not valid for Cluster type ORIGINAL_DST. "
        "Only 'CLUSTER_PROVIDED' is allowed with cluster type 'ORIGINAL_DST'",
    ),
    (cluster_document(lb_policy="CLUSTER_PROVIDED"), "cannot be combined with cluster type STATIC"),
    ({"name": "c", "type": "EDS"}, "eds_cluster_config.eds_config.config_source_specifier: Proto constraint"),
    (cluster_document(connect_timeout="0s"), "connect_timeout: Proto constraint"),
    (
        cluster_document(outlier_detection={"base_ejection_time": "60s", "max_ejection_time": "30s"}),
        "outlier_detection.max_ejection_time: outlier detector's max_ejection_time cannot be smaller than",
    ),
    *(
        (
            cluster_document(common_lb_config={"healthy_panic_threshold": {"value": value}}),
            "common_lb_config.healthy_panic_threshold.value: Proto constraint",
        )
        for value in (101, -1)
    ),
    (cluster_document(dns_refresh_rate="0.001s"), "dns_refresh_rate: Proto constraint"),
    *(
        (
            cluster_document(http2_protocol_options={"connection_keepalive": keepalive}),
            f"http2_protocol_options.connection_keepalive.{field}: Proto constraint",
        )
        for keepalive, field in (
            ({"interval": "1s"}, "timeout"),
            ({"interval": "0s", "timeout": "1s"}, "interval"),
            ({"interval": "1s", "timeout": "0s"}, "timeout"),
        )
    ),
    (
        cluster_document(eds_cluster_config={"service_name": "s"}),
        "eds_cluster_config: eds_cluster_config set in a non-EDS cluster",
    ),
    *(
        (
            cluster_document(load_assignment={"cluster_name": "c", "policy": {"drop_overloads": [share]}}),
            f"load_assignment.policy.drop_overloads[0].{words}",
        )
        for share, words in (
            ({"drop_percentage": {}}, "category: Proto constraint"),
            (
                {"category": "a", "drop_percentage": {"numerator": 101}},
                "drop_percentage: the drop ratio 1.01 is above 1",
            ),
        )
    ),
    (
        cluster_document(
            type="LOGICAL_DNS",
            load_assignment={"cluster_name": "c", "endpoints": [{"lb_endpoints": [NAMED]}, {"priority": 1}]},
        ),
        "load_assignment: LOGICAL_DNS clusters must have a single locality_lb_endpoint and a single lb_endpoint",
    ),
    (
        cluster_document(**ORIGINAL, lb_subset_config={"subset_selectors": [{"keys": ["a"]}]}),
        "lb_subset_config: cluster: LB policy CLUSTER_PROVIDED cannot be combined with lb_subset_config",
    ),
    (
        cluster_document(**ORIGINAL, original_dst_lb_config={"metadata_key": {"key": "k"}}),
        "original_dst_lb_config.metadata_key.path: Proto constraint",
    ),
    (cluster_document(health_checks=[{"timeout": "1s"}]), "health_checks[0].interval: Proto constraint"),
    (
        cluster_document(health_checks=[TCP_CHECK, TCP_CHECK]),
        "health_checks: Multiple health checks not supported",
    ),
    (
        cluster_document(health_checks=[{**TCP_CHECK, "timeout": "0s"}]),
        "health_checks[0].timeout: Proto constraint",
    ),
    (
        cluster_document(health_checks=[{**TCP_CHECK, "healthy_threshold": None}]),
        "health_checks[0].healthy_threshold: Pr",
    ),
    (cluster_document(health_checks=[CHECKED]), "health_checks[0].health_checker: Proto constraint"),
    (
        cluster_document(health_checks=[{**CHECKED, "tcp_health_check": {"send": {"text": "xy"}}}]),
        "health_checks[0].tcp_health_check.send.text: invalid hex string 'xy'",
    ),
    (
        cluster_document(health_checks=[{**CHECKED, "http_health_check": {"path": ""}}]),
        "health_checks[0].http_health_check.path: Proto constraint",
    ),
    *(
        (
            cluster_document(health_checks=[{**CHECKED, "http_health_check": {"path": "/", **more}}]),
            f"health_checks[0].http_health_check.{words}",
        )
        for more, words in (
            ({"method": "CONNECT"}, "method: Proto constraint"),
            ({"codec_client_type": "HTTP2"}, "codec_client_type: checks are requests of HTTP/1.1"),
            *(
                ({"request_headers_to_add": [{"header": header}]}, f"request_headers_to_add[0].header.{why}")
                for header, why in (
                    ({"key": ":path", "value": "/"}, "key: cannot be added to a request"),
                    ({"key": "Host", "value": "a"}, "key: cannot be added to a request"),
                    ({"key": "a", "value": "b\r\nc: d"}, "value: cannot be written into a request"),
                    ({"key": "a", "value": "%UPSTREAM_HOST%"}, "value: operators of format strings"),
                )
            ),
        )
    ),
    (
        cluster_document(health_checks=[{**CHECKED, "http_health_check": {"path": "/ x"}}]),
        "health_checks[0].http_health_check.path: cannot be written into a request: '/ x'",
    ),
    (
        cluster_document(
            health_checks=[{**CHECKED, "http_health_check": {"path": "/", "expected_statuses": [{"start": 99}]}}]
        ),
        "health_checks[0].http_health_check.expected_statuses[0]: Invalid http status range",
    ),
    (
        cluster_document(type="ORIGINAL_DST", lb_policy="CLUSTER_PROVIDED", health_checks=[TCP_CHECK]),
        "health_checks: an ORIGINAL_DST cluster has no endpoints to check",
    ),
    (
        cluster_document(lb_policy="LOAD_BALANCING_POLICY_CONFIG"),
        "lb_policy: cluster: field load_balancing_policy need",
    ),
    (
        cluster_document(load_balancing_policy={"policies": []}),
        "load_balancing_policy: cluster: didn't find a registered load balancer factory",
    ),
    (
        cluster_document(load_balancing_policy={"policies": [{"typed_extension_config": {"name": "own.policy"}}]}),
        "a registered load balancer factory with names from own.policy",
    ),
    (
        cluster_document(load_balancing_policy=by_policy("ring_hash.v3.RingHash", hash_function="MURMUR_HASH_2")),
        "load_balancing_policy.policies[0].typed_extension_config.typed_config.hash_function: rings are made",
    ),
    (
        cluster_document(
            load_balancing_policy=by_policy("ring_hash.v3.RingHash", minimum_ring_size=9, maximum_ring_size=8)
        ),
        "typed_config.minimum_ring_size: ring hash: minimum_ring_size (9) > maximum_ring_size (8)",
    ),
    (
        cluster_document(load_balancing_policy=by_policy("maglev.v3.Maglev", table_size=65536)),
        "typed_config.table_size: The table size of maglev must be prime number",
    ),
    (
        cluster_document(load_balancing_policy=by_policy("cluster_provided.v3.ClusterProvided")),
        "lb_policy: cluster: LB policy CLUSTER_PROVIDED cannot be combined with cluster type STATIC",
    ),
    (
        cluster_document(
            load_balancing_policy=by_policy("random.v3.Random"),
            common_lb_config={"locality_weighted_lb_config": {}},
        ),
        "load_balancing_policy: localities are weighted by the policy's own locality_lb_config",
    ),
    (
        cluster_document(transport_socket={"name": "x", "typed_config": {"@type": T + "no.such.Socket"}}),
        "no.such.Socket",
    ),
    (
        cluster_document(close_connections_on_host_health_failure=True),
        "close_connections_on_host_health_failure: this proxy does not support",
    ),
    (
        cluster_document(connection_pool_per_downstream_connection=True),
        "connection_pool_per_downstream_connection: this proxy does not support",
    ),
    (
        cluster_document(common_http_protocol_options={"max_connection_duration": "1s"}),
        "common_http_protocol_options.max_connection_duration: this proxy does not support",
    ),
    (
        cluster_document(dns_failure_refresh_rate={"max_interval": "1s"}),
        "dns_failure_refresh_rate.base_interval: Proto constraint",
    ),
    (
        cluster_document(dns_failure_refresh_rate={"base_interval": "2s", "max_interval": "1s"}),
        "dns_failure_refresh_rate: must have max_interval greater",
    ),
    (cluster_document(least_request_lb_config={"choice_count": 1}), "choice_count: Proto constraint"),
    ({"name": "c", "type": "STRICT_DNS"}, "load_assignment: a STRICT_DNS cluster needs a load_assignment"),
    (
        {
            "name": "c",
            "type": "ORIGINAL_DST",
            "lb_policy": "CLUSTER_PROVIDED",
            "original_dst_lb_config": {"http_header_name": "x"},
        },
        "use_http_header is false",
    ),
    (cluster_document(outlier_detection={"max_ejection_percent": 101}), "max_ejection_percent: Proto constraint"),
    (
        cluster_document(
            typed_extension_protocol_options={"x": {"@type": T + "google.protobuf.StringValue", "value": "y"}}
        ),
        "typed_extension_protocol_options['x']: Didn't find a registered",
    ),
]


WEIGHTED = {"locality_lb_config": {"locality_weighted_lb_config": {}}}
SLOW = {"slow_start_config": {"slow_start_window": "5s", "aggression": {"default_value": 2.0, "runtime_key": "k"}}}


@pytest.mark.parametrize(
    ("kind", "config", "expected"),
    [
        ("round_robin.v3.RoundRobin", {**SLOW, **WEIGHTED}, {"locality_weighted": True}),
        ("least_request.v3.LeastRequest", {"choice_count": 3}, {"policy": "LEAST_REQUEST", "choice_count": 3}),
        ("random.v3.Random", WEIGHTED, {"policy": "RANDOM", "locality_weighted": True}),
        ("ring_hash.v3.RingHash", {"minimum_ring_size": 8}, {"policy": "RING_HASH", "ring_size_min": 8}),
        ("maglev.v3.Maglev", {"table_size": 101}, {"policy": "MAGLEV", "maglev_table_size": 101}),
    ],
)
def test_a_policy_extension(kind: str, config: dict[str, Any], expected: dict[str, Any]) -> None:
    common = {"healthy_panic_threshold": {"value": 7}}
    document = cluster_document(
        lb_policy="LOAD_BALANCING_POLICY_CONFIG",
        load_balancing_policy=by_policy(kind, **config),
        common_lb_config=common,
    )
    balancing = compile_cluster(parse_value(document, Cluster).message, SURROUNDINGS).balancing
    found = {name: getattr(balancing, name) for name in expected}
    assert {**found, "panic": balancing.panic_threshold} == {**expected, "panic": 7}
    assert balancing.slow_start.window_s == (5 if SLOW.items() <= config.items() else 0)


def test_the_first_policy_of_a_known_type_is_taken() -> None:
    message = parse_value(cluster_document(load_balancing_policy=by_policy("random.v3.Random")), Cluster).message
    policies = message.load_balancing_policy.policies
    policies.insert(0, type(policies[0])())
    policies[0].typed_extension_config.typed_config.type_url = f"{T}own.Policy"
    assert compile_cluster(message, SURROUNDINGS).balancing.policy == "RANDOM"


@pytest.mark.parametrize(("document", "words"), BAD_CLUSTERS, ids=[words[:40] for _, words in BAD_CLUSTERS])
def test_a_cluster_is_refused_by_name_and_place(document: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError) as refused:
        compile_cluster(parse_value(document, Cluster).message, SURROUNDINGS)
    assert words in str(refused.value)


def endpoint(**more: Any) -> dict[str, Any]:
    return {"endpoint": {"address": {"socket_address": {"address": "10.0.0.1", "port_value": 1}}}, **more}


BAD_ENDPOINTS: list[tuple[dict[str, Any], str]] = [
    ({}, "cluster_name: Proto constraint"),
    (
        {"cluster_name": "c", "endpoints": [{"lb_endpoints": [endpoint(load_balancing_weight=0)]}]},
        "endpoints[0].lb_endpoints[0].load_balancing_weight: Proto constraint",
    ),
    (
        {"cluster_name": "c", "endpoints": [{"lb_endpoints": [{"endpoint": {}}]}]},
        "endpoints[0].lb_endpoints[0].endpoint.address: an endpoint without address",
    ),
    (
        {
            "cluster_name": "c",
            "endpoints": [
                {
                    "lb_endpoints": [
                        {"endpoint": {"address": {"socket_address": {"address": "name", "port_value": 1}}}}
                    ]
                }
            ],
        },
        "malformed IP address: name",
    ),
]


@pytest.mark.parametrize(("document", "words"), BAD_ENDPOINTS, ids=[words[:40] for _, words in BAD_ENDPOINTS])
def test_endpoints_are_refused_by_name_and_place(document: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError) as refused:
        compile_assignment(parse_value(document, ClusterLoadAssignment).message)
    assert words in str(refused.value)


def test_priorities_may_have_gaps() -> None:
    """A level without endpoints has no load, as in Envoy."""
    groups = [{"priority": 3, "lb_endpoints": [{"endpoint": {"address": {"pipe": {"path": "/x"}}}}]}]
    message = parse_value({"cluster_name": "c", "endpoints": groups}, ClusterLoadAssignment).message
    hosts = HostSet()
    hosts.assign(compile_assignment(message), 0.0)
    loads = spread(hosts.levels, 1.4, 50.0)
    assert [load.healthy for load in loads] == [0, 0, 0, 100]


@pytest.mark.parametrize("fails", [False, True])
def test_failing_in_panic_is_read(fails: bool) -> None:
    common = {"zone_aware_lb_config": {"fail_traffic_on_panic": fails}}
    message = parse_value({"name": "c", "common_lb_config": common}, Cluster).message
    assert compile_cluster(message, SURROUNDINGS).balancing.fail_in_panic is fails


@pytest.mark.parametrize(("base_s", "longest_s"), [(30, 300), (600, 600)])
def test_an_ejection_is_at_most_as_long_as_the_base_time_or_five_minutes(base_s: int, longest_s: int) -> None:
    message = parse_value(
        {"name": "c", "outlier_detection": {"base_ejection_time": f"{base_s}s"}}, Cluster
    ).message
    outlier = compile_cluster(message, SURROUNDINGS).outlier
    assert outlier is not None
    assert outlier.max_ejection_time_s == longest_s


def test_the_first_thresholds_of_a_priority_apply() -> None:
    thresholds = [{"max_connections": 1}, {"priority": "HIGH", "max_connections": 2}, {"max_connections": 3}]
    message = parse_value({"name": "c", "circuit_breakers": {"thresholds": thresholds}}, Cluster).message
    limits = compile_cluster(message, SURROUNDINGS).breakers
    assert [each.max_connections for each in limits] == [1, 2]


def test_balancing_settings_are_read() -> None:
    document = yaml.safe_load("""
        name: c
        type: STATIC
        lb_policy: LEAST_REQUEST
        least_request_lb_config: {choice_count: 3, active_request_bias: {default_value: 2.0}}
        common_lb_config: {healthy_panic_threshold: {value: 10}, locality_weighted_lb_config: {}}
        circuit_breakers: {thresholds: [{max_connections: 7}, {priority: HIGH, max_requests: 9}]}
        outlier_detection: {consecutive_5xx: 2, base_ejection_time: 1.5s}
        """)
    compiled = compile_cluster(parse_value(document, Cluster).message, SURROUNDINGS)
    assert compiled.balancing.policy is LbPolicy.LEAST_REQUEST
    assert (compiled.balancing.choice_count, compiled.balancing.active_request_bias) == (3, 2.0)
    assert compiled.balancing.panic_threshold == 10
    assert compiled.balancing.locality_weighted
    assert (compiled.breakers[0].max_connections, compiled.breakers[1].max_requests) == (7, 9)
    assert compiled.outlier is not None
    assert (compiled.outlier.consecutive_5xx, compiled.outlier.base_ejection_time_s) == (2, 1.5)
