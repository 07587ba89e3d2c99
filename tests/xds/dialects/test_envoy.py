"""The compiler: what the reference configuration becomes, and the named error of everything it must refuse."""

from pathlib import Path
from typing import Any

import pytest
from google.protobuf.message import Message

from xds.dialects.envoy import (
    Surroundings,
    compile_assignment,
    compile_cluster,
    compile_listener,
    compile_route_table,
    compile_secret,
)
from xds.errors import ConfigError
from xds.model import listener as model
from xds.model.address import InternalAddress, SocketAddress
from xds.model.cluster import Discovery, InternalUpstream, RawBuffer
from xds.model.facts import ConnectionFacts
from xds.model.http import Route
from xds.model.tls import FileSource, SecretRef, TlsVersion
from xds.proto import registry
from xds.proto.envoy.config.cluster.v3.cluster_pb2 import Cluster
from xds.proto.envoy.config.endpoint.v3.endpoint_pb2 import ClusterLoadAssignment
from xds.proto.envoy.config.listener.v3.listener_pb2 import Listener
from xds.proto.envoy.config.route.v3.route_pb2 import RouteConfiguration
from xds.proto.envoy.extensions.transport_sockets.tls.v3.tls_pb2 import Secret
from xds.proto.envoy.service.discovery.v3.discovery_pb2 import DiscoveryResponse
from xds.proto.json import parse_text, parse_value

REFERENCE = Path(__file__).parents[2] / "data" / "reference"
T = "type.googleapis.com/"
PRODUCTPAGE = "spiffe://cluster.local/ns/default/sa/bookinfo-productpage"
SERVICE = f"{PRODUCTPAGE}_to_http_reviews.default.svc.cluster.local_outbound_internal"

SURROUNDINGS = Surroundings(read_file=lambda path: Path(path).read_bytes(), environment={"CERT": "pem"})


def resources(name: str) -> dict[str, Message]:
    parsed = parse_text((REFERENCE / name).read_text(), DiscoveryResponse)
    messages = [registry.unpack(body) for body in parsed.message.resources]
    return {getattr(m, "name", "") or m.cluster_name: m for m in messages}  # type: ignore[attr-defined]


def listener(name: str) -> model.Listener:
    message = resources("w2/lds.yaml")[name]
    assert isinstance(message, Listener)
    return compile_listener(message, SURROUNDINGS)


def connection(source: str, destination: str, port: int) -> ConnectionFacts:
    client = SocketAddress(source, 50000)
    return ConnectionFacts(source=client, direct_source=client, destination=SocketAddress(destination, port))


# The reference configuration


@pytest.mark.parametrize(
    ("source", "destination", "port", "chain"),
    [
        ("10.244.2.3", "10.96.183.192", 9080, SERVICE),
        ("10.244.2.3", "10.244.1.23", 1, f"fc-outbound_pod_tunnel_clus_{PRODUCTPAGE}"),
        ("10.244.2.3", "10.244.2.22", 1, f"fc-outbound_pod_local_tunnel_clus_{PRODUCTPAGE}"),
        ("10.244.2.3", "10.96.183.192", 1, "PassthroughFilterChain"),
        ("10.244.2.3", "1.1.1.1", 80, "PassthroughFilterChain"),
        ("10.244.2.99", "10.96.183.192", 9080, "PassthroughFilterChain"),
    ],
)
def test_outbound_chains_of_the_reference(source: str, destination: str, port: int, chain: str) -> None:
    found = listener("ztunnel_outbound").chain_for(connection(source, destination, port))
    assert found is not None
    assert found.name == chain


def test_an_action_that_names_no_chain_closes_and_does_not_fall_back() -> None:
    assert listener("ztunnel_outbound").chain_for(connection("10.244.2.3", "10.244.2.5", 15001)) is None


def test_inbound_chains_of_the_reference() -> None:
    inbound = listener("ztunnel_inbound")
    pod = inbound.chain_for(connection("10.244.1.9", "10.244.2.23", 15008))
    other = inbound.chain_for(connection("10.244.1.9", "10.244.2.99", 15008))
    assert pod is not None
    assert other is not None
    assert (pod.name, other.name) == ("inbound_10.244.2.23", "blackhole inbound")
    assert pod.tls is not None
    assert pod.tls.require_peer_certificate
    assert pod.tls.min_version is pod.tls.max_version is TlsVersion.TLS13
    assert pod.tls.alpn == ("h2",)
    assert pod.tls.certificate == SecretRef(
        "spiffe://cluster.local/ns/default/sa/bookinfo-reviews", FileSource("./certs/sds-bookinfo-reviews.json")
    )
    assert [match.match.value for match in (pod.tls.validation.san_matches if pod.tls.validation else ())] == [
        "spiffe://cluster.local/"
    ]


def test_sockets_of_the_reference() -> None:
    outbound = listener("ztunnel_outbound")
    assert outbound.addresses == (SocketAddress("0.0.0.0", 15001),)
    assert outbound.transparent
    assert outbound.use_original_dst
    assert outbound.socket_options == (model.SocketOption(1, 36, 1025, "prebind"),)
    assert [entry.filter for entry in outbound.listener_filters] == [model.OriginalDst(), model.OriginalSrc(1234)]


def test_the_internal_listener_tunnels_what_its_metadata_names() -> None:
    internal = listener(f"outbound_tunnel_lis_{PRODUCTPAGE}")
    assert internal.internal
    assert internal.addresses == ()
    proxy = internal.chains[0].terminal
    assert isinstance(proxy, model.TcpProxy)
    assert proxy.tunneling is not None
    # The colon form and the key list of 2022 are equivalent.
    assert proxy.tunneling.hostname == proxy.tunneling.headers[0].value


def test_clusters_of_the_reference() -> None:
    clusters = {
        name: compile_cluster(message, SURROUNDINGS)
        for name, message in resources("w2/cds.yaml").items()
        if isinstance(message, Cluster)
    }
    service = clusters[SERVICE]
    assert service.discovery is Discovery.EDS
    name, socket = service.transport_socket_for({"envoy.transport_socket_match": {"tunnel": "h2"}})
    assert name == "internal_upstream"
    assert isinstance(socket, InternalUpstream)
    assert socket.host[:2] == ("tunnel", "istio")
    assert service.transport_socket_for({}) == ("tlsMode-disabled", RawBuffer())
    tunnel = clusters[f"outbound_pod_tunnel_clus_{PRODUCTPAGE}"]
    assert tunnel.original_dst is not None
    assert tunnel.original_dst.port_override == 15008
    assert tunnel.connect_timeout_s == 2
    assert tunnel.cleanup_interval_s == 60
    assert tunnel.http2 is not None
    assert tunnel.http2.allow_connect
    assert clusters["virtual_inbound"].original_dst is not None
    assert clusters["virtual_inbound"].original_dst.use_http_header
    assert clusters["BlackHoleCluster"].assignment is not None


def test_endpoints_of_the_reference() -> None:
    message = resources("w2/eds.yaml")[SERVICE]
    assert isinstance(message, ClusterLoadAssignment)
    endpoints = compile_assignment(message).endpoints
    first = endpoints[0]
    assert first.address == InternalAddress(f"outbound_tunnel_lis_{PRODUCTPAGE}", "10.244.1.23:9080")
    assert first.key == f"envoy://outbound_tunnel_lis_{PRODUCTPAGE}/10.244.1.23:9080"
    assert first.metadata["tunnel"] == {"destination": "10.244.1.23:9080", "address": "10.244.1.23:15008"}


def test_chains_that_did_not_change_have_equal_content() -> None:
    before = listener("ztunnel_inbound")
    message = resources("w2/lds.yaml")["ztunnel_inbound"]
    assert isinstance(message, Listener)
    message.filter_chains[0].name = "renamed"
    after = compile_listener(message, SURROUNDINGS)
    assert after.content == before.content
    assert after.chains[0].content != before.chains[0].content
    assert after.chains[1].content == before.chains[1].content
    message.transparent.value = False
    assert compile_listener(message, SURROUNDINGS).content != before.content


# The forms of 2022


@pytest.mark.parametrize("wrapper", ["xds.type.v3.TypedStruct", "udpa.type.v1.TypedStruct"])
def test_set_dst_address_in_each_wrapper(wrapper: str) -> None:
    config = {"@type": T + wrapper, "type_url": T + "istio.set_internal_dst_address.v1.Config", "value": {}}
    assert listener_filter(config) == model.SetDstAddress()


def test_set_dst_address_typed_directly() -> None:
    assert listener_filter({"@type": T + "istio.set_internal_dst_address.v1.Config"}) == model.SetDstAddress()


def test_untyped_san_matchers_and_no_upstream_validation() -> None:
    message = cluster_document(transport_socket=tls({"tls_certificates": [], "alpn_protocols": ["h2"]}))
    compiled = compile_cluster(parse_value(message, Cluster).message, SURROUNDINGS)
    assert compiled.secret_refs == ()
    old = {"validation_context": {"match_subject_alt_names": [{"prefix": "spiffe://cluster.local/"}]}}
    compiled = compile_cluster(
        parse_value(cluster_document(transport_socket=tls(old)), Cluster).message, SURROUNDINGS
    )
    assert compiled.transport_socket.validation.san_matches[0].san_type == "any"  # type: ignore[union-attr]


def listener_filter(config: dict[str, Any]) -> model.ListenerFilter:
    document = listener_document(listener_filters=[{"name": "f", "typed_config": config}])
    return compile_listener(parse_value(document, Listener).message, SURROUNDINGS).listener_filters[0].filter


# Refusals, each with its place


def tcp(**more: Any) -> dict[str, Any]:
    config = {
        "@type": T + "envoy.extensions.filters.network.tcp_proxy.v3.TcpProxy",
        "stat_prefix": "s",
        "cluster": "c",
    }
    return {"name": "envoy.filters.network.tcp_proxy", "typed_config": {**config, **more}}


def reading_filter(kind: str, **config: Any) -> dict[str, Any]:
    return {"name": kind, "typed_config": {"@type": f"{T}envoy.extensions.filters.listener.{kind}", **config}}


def listener_document(*filters: Any, **more: Any) -> dict[str, Any]:
    chain = {"name": "one", "filters": list(filters) or [tcp()]}
    return {
        "name": "l",
        "address": {"socket_address": {"address": "0.0.0.0", "port_value": 1}},
        "filter_chains": [chain],
        **more,
    }


def cluster_document(**more: Any) -> dict[str, Any]:
    return {"name": "c", "type": "STATIC", **more}


def tls(common: dict[str, Any]) -> dict[str, Any]:
    kind = "envoy.extensions.transport_sockets.tls.v3.UpstreamTlsContext"
    return {"name": "tls", "typed_config": {"@type": T + kind, "common_tls_context": common}}


def downstream(common: dict[str, Any], **more: Any) -> dict[str, Any]:
    kind = "envoy.extensions.transport_sockets.tls.v3.DownstreamTlsContext"
    return {"name": "tls", "typed_config": {"@type": T + kind, "common_tls_context": common, **more}}


def rbac(permissions: Any, principals: Any = None, **more: Any) -> dict[str, Any]:
    policy = {"permissions": permissions, "principals": principals or [{"any": True}], **more}
    config = {
        "@type": T + "envoy.extensions.filters.network.rbac.v3.RBAC",
        "stat_prefix": "tcp.",
        "rules": {"policies": {"p": policy}},
    }
    return {"name": "rbac", "typed_config": config}


def tree(**more: Any) -> dict[str, Any]:
    kind = "envoy.extensions.matching.common_inputs.network.v3.DestinationPortInput"
    return {"matcher_tree": {"input": {"name": "port", "typed_config": {"@type": T + kind}}, **more}}


CERTIFICATE = {"certificate_chain": {"inline_string": "c"}, "private_key": {"inline_string": "k"}}
UNKNOWN = {
    "name": "set_dst_address",
    "typed_config": {"@type": T + "xds.type.v3.TypedStruct", "type_url": T + "no.such.Config"},
}

BAD_LISTENERS: list[tuple[dict[str, Any], str]] = [
    ({"address": {}}, "name: Proto constraint validation failed (ListenerValidationError.Name"),
    (
        listener_document() | {"filter_chains": []},
        "filter_chains: error adding listener 'l': no filter chains specified",
    ),
    (
        listener_document(tcp(stat_prefix="")),
        "filter_chains[0].filters[0].typed_config.stat_prefix: Proto constraint",
    ),
    (
        listener_document(tcp(stat_prefix="")),
        "(TcpProxyValidationError.StatPrefix: value length must be at least 1 characters)",
    ),
    (listener_document(tcp(cluster="")), "cluster: Proto constraint"),
    (listener_document(tcp(), tcp()), "filter_chains[0].filters[1]: a filter follows the terminal filter"),
    (listener_document(tcp(idle_timeout="-1s")), "idle_timeout: a duration must not be negative"),
    (listener_document(tcp(tunneling_config={"hostname": ""})), "tunneling_config.hostname: Proto constraint"),
    (
        listener_document(tcp(tunneling_config={"hostname": "%NOPE%"})),
        "hostname: format string: unknown command %NOPE%",
    ),
    (listener_document(tcp(tunneling_config={"hostname": "50%"})), "format string: '%' at offset 2"),
    (
        listener_document(
            tcp(tunneling_config={"hostname": "h", "headers_to_add": [{"header": {"key": ":path"}}]})
        ),
        "headers_to_add[0].header.key: :-prefixed or host headers may not be modified",
    ),
    *(
        (
            listener_document(tcp(tunneling_config={"hostname": "h", "headers_to_add": [option]})),
            f"tunneling_config.headers_to_add[0].{words}",
        )
        for option, words in (
            ({"header": {"key": "a", "value": "b\nc: d"}}, "header.value: Proto constraint"),
            ({"header": {"key": "a", "value": "b\r"}}, "header.value: Proto constraint"),
            (
                {"header": {"key": "a"}, "append": True, "append_action": "ADD_IF_ABSENT"},
                "append: Both append and append_action are set",
            ),
        )
    ),
    *(
        (listener_document(tcp(**{field: value})), f"typed_config.{words}")
        for field, value, words in (
            ("max_downstream_connection_duration", "0s", "max_downstream_connection_duration: Proto constraint"),
            ("max_downstream_connection_duration", "0.0009s", "max_downstream_connection_duration: Proto constra"),
            ("backoff_options", {}, "backoff_options.base_interval: Proto constraint"),
            ("backoff_options", {"base_interval": "0.0009s"}, "backoff_options.base_interval: Proto constraint"),
            (
                "backoff_options",
                {"base_interval": "1s", "max_interval": "0.5s"},
                "backoff_options.max_interval: max_backoff_interval must be greater or equal to base",
            ),
            ("hash_policy", [{"source_ip": {}}] * 2, "hash_policy: Proto constraint"),
        )
    ),
    *(
        (listener_document(tcp(tunneling_config={"hostname": text})), f"hostname: format string: {words}")
        for text, words in (
            ("%REQ(a?b?c)%", "More than 1 alternative header specified in token: a?b?c"),
            ("%FILTER_STATE(a:FOO)%", "Invalid filter state serialize type, only support PLAIN/TYPED/FIELD"),
            ("%FILTER_STATE(a:FIELD)%", "Invalid filter state serialize type, FIELD needs a name"),
            ("%FILTER_STATE(:PLAIN)%", "Invalid filter state configuration, key cannot be empty"),
            ("%GRPC_STATUS(x)%", "%GRPC_STATUS% only supports CAMEL_STRING, SNAKE_STRING or NUMBER, not x"),
        )
    ),
    (listener_document(tcp(on_demand={})), "on_demand: this proxy does not support this field"),
    *(
        (
            listener_document(
                filter_chains=[{"filters": [tcp()], "filter_chain_match": {"source_ports": [port]}}],
            ),
            "filter_chain_match.source_ports: Proto constraint",
        )
        for port in (0, 65536)
    ),
    (listener_document(socket_options=[{"level": 1, "name": 9}]), "socket_options[0].value: Proto constraint"),
    (
        listener_document(
            {
                "name": "hcm",
                "typed_config": {
                    "@type": T
                    + "envoy.extensions.filters.network.http_connection_manager.v3.HttpConnectionManager",
                    "stat_prefix": "h",
                    "server_name": "a\nb: c",
                },
            }
        ),
        "filters[0].typed_config.server_name: Proto constraint",
    ),
    (
        listener_document(address={"socket_address": {"address": "0.0.0.0"}}),
        "address.socket_address.port_specifier: Proto constraint",
    ),
    *(
        (listener_document(listener_filters=[reading]), f"listener_filters[0].typed_config.{words}")
        for reading, words in (
            (
                reading_filter("proxy_protocol.v3.ProxyProtocol", disallowed_versions=["V1", "V2"]),
                "disallowed_versions: all versions of the header are disallowed",
            ),
        )
    ),
    (
        listener_document(
            filter_chains=[
                {
                    "filters": [tcp()],
                    "transport_socket": downstream(
                        {
                            "tls_certificates": [CERTIFICATE],
                            "validation_context": {
                                "trusted_ca": {"inline_string": "c"},
                                "match_typed_subject_alt_names": [
                                    {"san_type": "OTHER_NAME", "matcher": {"exact": "a"}}
                                ],
                            },
                        }
                    ),
                }
            ]
        ),
        "match_typed_subject_alt_names[0].san_type: a name of another kind needs an oid",
    ),
    (listener_document(tcp(proxy_protocol_tlvs=[{}])), ""),
    (
        listener_document(listener_filters=[UNKNOWN]),
        "listener_filters[0].typed_config: Didn't find a registered implementation for 'set_dst_address' "
        "with type URL: 'no.such.Config'",
    ),
    (listener_document() | {"address": {"pipe": {"path": "/x"}}}, "address: listeners bind to IP addresses only"),
    (
        listener_document() | {"address": {"socket_address": {"address": "nowhere", "port_value": 1}}},
        "address.socket_address.address: malformed IP address: nowhere",
    ),
    (
        listener_document() | {"address": {"socket_address": {"address": "0.0.0.0", "port_value": 70000}}},
        "port_value: Proto constraint",
    ),
    (
        listener_document(filter_chain_matcher=tree(exact_match_map={"map": {}})),
        "exact_match_map.map: Proto constraint",
    ),
    (listener_document(filter_chain_matcher=tree()), "matcher_tree.tree_type: Proto constraint"),
    (listener_document(filter_chain_matcher={}), "filter_chain_matcher.matcher_type: Proto constraint"),
    (
        listener_document(
            filter_chains=[{"filters": [tcp()]}], filter_chain_matcher=tree(exact_match_map={"map": {}})
        ),
        "filter chain matcher requires a name",
    ),
    (
        listener_document(filter_chains=[{"filters": [tcp()]}, {"filters": [tcp()]}]),
        "multiple filter chains with overlapping matching rules are defined",
    ),
    (
        listener_document(
            filter_chains=[
                {"filters": [tcp()], "filter_chain_match": {"prefix_ranges": [{"address_prefix": "x"}]}},
            ]
        ),
        "filter_chains[0].filter_chain_match.prefix_ranges[0]: malformed CIDR x/0",
    ),
    (
        listener_document(filter_chains=[{"filters": [tcp()], "filter_chain_match": {"server_names": ["*a.b"]}}]),
        "partial wildcards are not supported",
    ),
    (listener_document(rbac([])), "policies['p'].permissions: Proto constraint"),
    (listener_document(rbac([{}]), tcp()), "rules.policies['p'].permissions[0].rule: Proto constraint"),
    (
        listener_document(rbac([{"any": True}], condition={}), tcp()),
        "policies['p'].condition.expr_kind: an expression is missing",
    ),
    (
        listener_document(rbac([{"any": True}], [{"filter_state": {"key": "x"}}]), tcp()),
        "principals[0].filter_state: this kind of principal is not supported",
    ),
    (
        listener_document(
            rbac([{"any": True}], [{"authenticated": {"principal_name": {"safe_regex": {"regex": "("}}}}])
        ),
        "invalid regex '('",
    ),
    (
        listener_document(
            rbac([{"any": True}], [{"authenticated": {"principal_name": {"safe_regex": {"regex": "(?=a)"}}}}])
        ),
        "invalid perl operator",
    ),
    (
        listener_document(filter_chains=[{"filters": [tcp()], "transport_socket": downstream({})}]),
        "No TLS certificates found for server context",
    ),
    (
        listener_document(
            filter_chains=[
                {
                    "filters": [tcp()],
                    "transport_socket": downstream(
                        {
                            "tls_certificates": [CERTIFICATE],
                            "tls_params": {"tls_minimum_protocol_version": "TLSv1_1"},
                        }
                    ),
                }
            ]
        ),
        "tls_params.tls_minimum_protocol_version: only TLSv1_2 and TLSv1_3 are supported",
    ),
    (
        listener_document(
            filter_chains=[
                {
                    "filters": [tcp()],
                    "transport_socket": downstream(
                        {
                            "tls_certificates": [CERTIFICATE],
                            "validation_context": {"trust_chain_verification": "ACCEPT_UNTRUSTED"},
                        }
                    ),
                }
            ]
        ),
        "trust_chain_verification: a chain that is not trusted is never accepted",
    ),
    (
        listener_document(
            filter_chains=[
                {
                    "filters": [tcp()],
                    "transport_socket": downstream(
                        {
                            "tls_certificates": [CERTIFICATE],
                            "tls_certificate_sds_secret_configs": [{"name": "s"}],
                        }
                    ),
                }
            ]
        ),
        "common_tls_context.tls_certificate_sds_secret_configs: beside tls_certificates, which Envoy uses alone",
    ),
    (
        listener_document({"name": "later", "config_discovery": {"type_urls": ["x"]}}, tcp()),
        "filters[0].config_discovery.config_source.config_source_specifier: ",
    ),
    (
        listener_document(
            {
                "name": "later",
                "config_discovery": {
                    "config_source": {"ads": {}},
                    "type_urls": ["x"],
                    "default_config": tcp()["typed_config"],
                },
            },
            tcp(),
        ),
        "config_discovery.default_config: the terminal filter of a chain is configured inline only",
    ),
    (
        listener_document({"name": "nothing"}, tcp()),
        "filters[0].config_type: ",
    ),
    (
        listener_document(
            filter_chains=[{"filters": [tcp()], "transport_socket": downstream({"tls_certificates": [{}]})}]
        ),
        "tls_certificates[0].certificate_chain: a certificate needs",
    ),
    (
        listener_document(
            {
                "name": "hcm",
                "typed_config": {
                    "@type": T
                    + "envoy.extensions.filters.network.http_connection_manager.v3.HttpConnectionManager",
                    "stat_prefix": "h",
                    "route_config": {},
                    "http_filters": [
                        {
                            "name": "ext_authz",
                            "typed_config": {"@type": T + "google.protobuf.StringValue", "value": "x"},
                        }
                    ],
                },
            }
        ),
        "http_filters[0].typed_config: no such HTTP filter",
    ),
]


@pytest.mark.parametrize(("document", "words"), BAD_LISTENERS, ids=[words[-40:] for _, words in BAD_LISTENERS])
def test_a_listener_is_refused_by_name_and_place(document: dict[str, Any], words: str) -> None:
    parsed = parse_value(document, Listener)
    if not words:  # a field nobody's message has: reported by the reader, see there
        assert parsed.unknown_fields
        return
    with pytest.raises(ConfigError) as refused:
        compile_listener(parsed.message, SURROUNDINGS)
    assert words in str(refused.value)


def _retried(cases: str) -> dict[str, Any]:
    upgrades = [{"upgrade_type": "CONNECT", "connect_config": {}}]
    policy = {"retry_on": cases, "num_retries": 2}
    action = {"cluster": "c", "upgrade_configs": upgrades, "retry_policy": policy}
    route = {"match": {"connect_matcher": {}}, "route": action}
    return {"virtual_hosts": [{"name": "a", "domains": ["*"], "routes": [route]}]}


def _posted() -> dict[str, Any]:
    table = _retried("")
    (upgrade,) = table["virtual_hosts"][0]["routes"][0]["route"]["upgrade_configs"]
    upgrade["connect_config"] = {"allow_post": True}
    return table


def _answering(match: dict[str, Any], status: int) -> dict[str, Any]:
    route = {"match": match, "direct_response": {"status": status}}
    return {"virtual_hosts": [{"name": "a", "domains": ["*"], "routes": [route]}]}


BAD_ROUTES: list[tuple[dict[str, Any], str]] = [
    ({"virtual_hosts": [{"domains": ["*"]}]}, "virtual_hosts[0].name: Proto constraint"),
    ({"virtual_hosts": [{"name": "v"}]}, "virtual_hosts[0].domains: Proto constraint"),
    (
        {"virtual_hosts": [{"name": "a", "domains": ["*"]}, {"name": "b", "domains": ["*"]}]},
        "virtual_hosts[1]: Only unique values for domains are permitted. Duplicate entry of domain *",
    ),
    (
        {"virtual_hosts": [{"name": "a", "domains": ["*"], "routes": [{"match": {"prefix": "/"}}]}]},
        "virtual_hosts[0].routes[0].action: Proto constraint",
    ),
    (
        {"virtual_hosts": [{"name": "a", "domains": ["*"], "routes": [{"match": {}, "route": {"cluster": "c"}}]}]},
        "routes[0].match.path_specifier: Proto constraint",
    ),
    *(
        (_answering(match, status), f"routes[0].{words}")
        for match, status, words in (
            ({"prefix": "/"}, 99, "direct_response.status: Proto constraint"),
            ({"prefix": "/"}, 600, "direct_response.status: Proto constraint"),
            ({"path_separated_prefix": "/a/"}, 200, "match.path_separated_prefix: Proto constraint"),
            ({"path_separated_prefix": "/a?b"}, 200, "match.path_separated_prefix: Proto constraint"),
            (
                {"prefix": "/", "headers": [{"name": "x", "prefix_match": ""}]},
                200,
                "match.headers[0].prefix_match: Proto constraint",
            ),
            (
                {"prefix": "/", "headers": [{"name": "x\n", "present_match": True}]},
                200,
                "match.headers[0].name: Proto constraint",
            ),
        )
    ),
    *(
        (
            _answering({"prefix": "/", "headers": [{"name": name, "present_match": True}]}, 200),
            f"match.headers[0].name: routes do not match {name}",
        )
        for name in (":scheme", ":protocol")
    ),
    (_posted(), "upgrade_configs[0].connect_config.allow_post: a request becomes a tunnel only by CONNECT here"),
    (_retried("connect-failure"), "routes[0].route.retry_policy.retry_on: this proxy does not retry requests"),
]


def test_a_retry_policy_that_says_no_case_is_taken() -> None:
    table = compile_route_table(parse_value(_retried(""), RouteConfiguration).message, SURROUNDINGS)
    assert table.virtual_hosts[0].routes[0].tunnel


def _route_of(match: dict[str, Any]) -> Route:
    table = compile_route_table(parse_value(_answering(match, 200), RouteConfiguration).message, SURROUNDINGS)
    return table.virtual_hosts[0].routes[0]


def test_a_path_separated_prefix_can_ignore_the_case() -> None:
    for sensitive, matches in ((False, True), (True, False)):
        path = _route_of({"path_separated_prefix": "/Ab", "case_sensitive": sensitive}).path
        assert path is not None
        assert path.matches("/aB/c") is matches
        assert not path.matches("/abc")


def test_an_empty_exact_match_of_a_header_matches_every_value() -> None:
    (found,) = _route_of({"prefix": "/", "headers": [{"name": "x", "exact_match": ""}]}).headers
    assert found.match is not None
    assert found.match.matches("a")
    assert found.match.matches("")


@pytest.mark.parametrize(("document", "words"), BAD_ROUTES, ids=[words[:40] for _, words in BAD_ROUTES])
def test_routes_are_refused_by_name_and_place(document: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError) as refused:
        compile_route_table(parse_value(document, RouteConfiguration).message, SURROUNDINGS)
    assert words in str(refused.value)


def _port_range(start: int, end: int) -> dict[str, Any]:
    return {"destination_port_range": {"start": start, "end": end}}


def _metadata_of(namespace: str, *path: str) -> dict[str, Any]:
    value = {"string_match": {"exact": "v"}}
    return {"metadata": {"filter": namespace, "path": [{"key": key} for key in path], "value": value}}


@pytest.mark.parametrize(
    ("rule", "words"),
    [
        (_port_range(5, 5), "destination_port_range: range start 5 cannot be greater or equal than range end 5"),
        (_port_range(9, 5), "destination_port_range: range start 9 cannot be greater or equal than range end 5"),
        (_port_range(-1, 5), "destination_port_range: range start -1 is out of bounds"),
        (_port_range(1, 65537), "destination_port_range: range end 65537 is out of bounds"),
        (_metadata_of("", "k"), "metadata.filter: Proto constraint"),
        (_metadata_of("f"), "metadata.path: Proto constraint"),
    ],
)
@pytest.mark.parametrize("inverted", [False, True])
def test_a_rule_that_can_never_match_is_refused(rule: dict[str, Any], words: str, inverted: bool) -> None:
    permission = {"not_rule": rule} if inverted else rule
    policy = {"permissions": [permission], "principals": [{"any": True}]}
    rules = {"action": "DENY", "policies": {"p": policy}}
    config = {"@type": T + "envoy.extensions.filters.network.rbac.v3.RBAC", "stat_prefix": "r", "rules": rules}
    document = listener_document({"name": "rbac", "typed_config": config}, tcp())
    with pytest.raises(ConfigError) as refused:
        compile_listener(parse_value(document, Listener).message, SURROUNDINGS)
    assert words in str(refused.value)


HEADER = {"header": {"name": "a", "present_match": True}}
PATH = {"url_path": {"path": {"exact": "/"}}}


@pytest.mark.parametrize("rule", [HEADER, PATH], ids=["header", "path"])
@pytest.mark.parametrize("inverted", [False, True])
def test_a_rule_about_a_request_is_refused_by_a_network_filter(rule: dict[str, Any], inverted: bool) -> None:
    """Its negation would let every connection in."""
    permission = {"not_rule": rule} if inverted else rule
    principal = {"not_id": rule} if inverted else rule
    for permissions, principals in (([permission], [{"any": True}]), ([{"any": True}], [principal])):
        policy = {"permissions": permissions, "principals": principals}
        config = {
            "@type": T + "envoy.extensions.filters.network.rbac.v3.RBAC",
            "stat_prefix": "r",
            "rules": {"policies": {"p": policy}},
        }
        document = listener_document({"name": "rbac", "typed_config": config}, tcp())
        with pytest.raises(ConfigError, match="not supported by RBAC network filter"):
            compile_listener(parse_value(document, Listener).message, SURROUNDINGS)


def test_a_field_number_without_a_name_is_refused() -> None:
    message = parse_value(listener_document(rbac([{"any": True}]), tcp()), Listener).message
    packed = message.filter_chains[0].filters[0].typed_config
    packed.value += b"\x9a\x06\x01x"  # field 99, three bytes
    with pytest.raises(ConfigError, match=r"filters\[0\].typed_config: unknown field number 99 of envoy.ext"):
        compile_listener(message, SURROUNDINGS)


def test_a_queue_for_fast_open_is_a_socket_option() -> None:
    message = parse_value(listener_document(tcp_fast_open_queue_length=5), Listener).message
    assert compile_listener(message, SURROUNDINGS).socket_options == (model.SocketOption(6, 23, 5, "bound"),)


def test_a_name_with_a_field_that_is_not_obeyed_is_no_name() -> None:
    """Where names are permitted, any text that is not an IP address is a name. Other fields are checked as for an
    address.
    """
    for more, words in (
        ({"resolver_name": "r"}, "resolver_name"),
        ({"protocol": "UDP"}, "only TCP"),
        ({"port_value": 70000}, "65535"),
    ):
        address = {"socket_address": {"address": "a.example", "port_value": 80, **more}}
        group = {"lb_endpoints": [{"endpoint": {"address": address}}]}
        document = {
            "name": "c",
            "type": "STRICT_DNS",
            "load_assignment": {"cluster_name": "c", "endpoints": [group]},
        }
        with pytest.raises(ConfigError, match=words):
            compile_cluster(parse_value(document, Cluster).message, SURROUNDINGS)


def test_a_body_beyond_the_limit_of_its_route_table_is_refused() -> None:
    """Envoy's limit is 4,096 bytes unless the table has its own."""

    def table(size: int, **more: Any) -> RouteConfiguration:
        route = {
            "match": {"prefix": "/"},
            "direct_response": {"status": 200, "body": {"inline_string": "x" * size}},
        }
        document = {"virtual_hosts": [{"name": "v", "domains": ["*"], "routes": [route]}], **more}
        return parse_value(document, RouteConfiguration).message

    compile_route_table(table(4096), SURROUNDINGS)
    compile_route_table(table(5000, max_direct_response_body_size_bytes=5000), SURROUNDINGS)
    with pytest.raises(
        ConfigError, match=r"direct_response.body: response body size is 4097 bytes; maximum is 4096"
    ):
        compile_route_table(table(4097), SURROUNDINGS)


# Secrets and data sources


def test_secrets_by_every_data_source(tmp_path: Path) -> None:
    (tmp_path / "key").write_bytes(b"key")
    document = {
        "name": "s",
        "tls_certificate": {
            "certificate_chain": {"environment_variable": "CERT"},
            "private_key": {"filename": str(tmp_path / "key")},
        },
    }
    secret = compile_secret(parse_value(document, Secret).message, SURROUNDINGS)
    assert (secret.chain_pem, secret.key_pem) == (b"pem", b"key")  # type: ignore[union-attr]
    assert "key" not in repr(secret).replace("key_pem", "")


@pytest.mark.parametrize(
    ("certificate", "words"),
    [
        ({"certificate_chain": {"filename": "/no/such"}, "private_key": {}}, "filename: cannot read /no/such"),
        ({"certificate_chain": {"filename": "a\0b"}, "private_key": {}}, "filename: cannot read 'a\\x00b'"),
        ({"certificate_chain": {"environment_variable": "NO"}, "private_key": {}}, "NO is not set"),
        ({"certificate_chain": {}, "private_key": {}}, "certificate_chain.specifier: Proto constraint"),
    ],
)
def test_unreadable_data_is_named(certificate: dict[str, Any], words: str) -> None:
    document = {"name": "s", "tls_certificate": certificate}
    with pytest.raises(ConfigError) as refused:
        compile_secret(parse_value(document, Secret).message, SURROUNDINGS)
    assert words in str(refused.value)


@pytest.mark.parametrize("source", [{"inline_bytes": "/w=="}, {"filename": "format"}])
def test_format_that_is_no_utf_8_is_named(source: dict[str, str]) -> None:
    path = f"{T}envoy.extensions.access_loggers.file.v3.FileAccessLog"
    logger = {"@type": path, "path": "/dev/null", "log_format": {"text_format_source": source}}
    document = listener_document(tcp(), access_log=[{"name": "file", "typed_config": logger}])
    surroundings = Surroundings(read_file=lambda _: b"%START_TIME% \xe4", environment={})
    with pytest.raises(ConfigError, match=r"access_log\[0\].*text_format_source: not UTF-8 at byte"):
        compile_listener(parse_value(document, Listener).message, surroundings)


def test_other_kinds_of_secrets_are_refused() -> None:
    with pytest.raises(ConfigError, match="generic_secret: only tls_certificate and validation_context"):
        compile_secret(parse_value({"name": "s", "generic_secret": {}}, Secret).message, SURROUNDINGS)


@pytest.mark.parametrize(
    ("given", "names"), [(["h2", "http/1.1"], ("h2", "http/1.1")), (["h2,http/1.1"], ("h2", "http/1.1")), ([], ())]
)
def test_protocols_may_stand_in_one_entry(given: list[str], names: tuple[str, ...]) -> None:
    compiled = compile_cluster(parse_value(with_protocols(given), Cluster).message, SURROUNDINGS)
    assert compiled.transport_socket.alpn == names  # type: ignore[union-attr]


@pytest.mark.parametrize("given", [["h2,"], ["x" * 256]])
def test_a_protocol_has_1_to_255_bytes(given: list[str]) -> None:
    with pytest.raises(ConfigError, match="alpn_protocols"):
        compile_cluster(parse_value(with_protocols(given), Cluster).message, SURROUNDINGS)


def with_protocols(given: list[str]) -> dict[str, Any]:
    return cluster_document(transport_socket=tls({"tls_certificates": [], "alpn_protocols": given}))
