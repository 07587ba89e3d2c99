"""The resources that one node receives: the structure of 2022, read back by our own compiler."""

import os
from collections.abc import Iterator
from typing import Any

import pytest
from google.protobuf.json_format import MessageToDict

from tests.ztunnel.control_plane.meshes import BOOKINFO, mesh
from xds.dialects.envoy import Surroundings, compile_assignment, compile_cluster, compile_listener
from xds.dialects.envoy.listener_filters import compile_listener_filter
from xds.model import listener as model
from xds.model.address import SocketAddress
from xds.model.cluster import Cluster, LoadAssignment
from xds.model.facts import ConnectionFacts, PeerCertificate
from xds.model.listener import Listener
from xds.proto import registry
from xds.proto.envoy.config.cluster.v3.cluster_pb2 import Cluster as ClusterMessage
from xds.proto.envoy.config.core.v3.core_pb2 import TypedExtensionConfig
from xds.proto.envoy.config.endpoint.v3.endpoint_pb2 import ClusterLoadAssignment
from xds.proto.envoy.config.listener.v3.listener_pb2 import Listener as ListenerMessage
from xds.proto.pool import POOL
from ztunnel.control_plane.generate import Flavour, NodeConfig
from ztunnel.policy.engine import judge

SURROUNDINGS = Surroundings(read_file=lambda path: b"", environment=os.environ)
PRODUCTPAGE = "spiffe://cluster.local/ns/default/sa/bookinfo-productpage"
REVIEWS = "spiffe://cluster.local/ns/default/sa/bookinfo-reviews"
SERVICE = f"{PRODUCTPAGE}_to_http_reviews.default.svc.cluster.local_outbound_internal"

Compiled = dict[str, Any]


def compiled(node: str, flavour: Flavour = Flavour.ZTUNNEL, **changes: Any) -> Compiled:
    """Return all compiled resources of a node by name. Our own compiler must accept every message."""
    found: Compiled = {}
    for message in NodeConfig(mesh(**changes), node, flavour).messages():
        match message:
            case ListenerMessage():
                found[message.name] = compile_listener(message, SURROUNDINGS)
            case ClusterMessage():
                found[f"cluster {message.name}"] = compile_cluster(message, SURROUNDINGS)
            case ClusterLoadAssignment():
                found[f"eds {message.cluster_name}"] = compile_assignment(message)
            case TypedExtensionConfig():
                inner = registry.unpack(message.typed_config)
                found[f"ecds {message.name}"] = compile_listener_filter(inner, SURROUNDINGS)
    return found


def listener(node: str, name: str, **changes: Any) -> Listener:
    found = compiled(node, **changes)[name]
    assert isinstance(found, Listener)
    return found


def chain(found: Listener, source: str, destination: str, port: int) -> str:
    client = SocketAddress(source, 1)
    facts = ConnectionFacts(source=client, direct_source=client, destination=SocketAddress(destination, port))
    chosen = found.chain_for(facts)
    return chosen.name if chosen is not None else ""


@pytest.mark.parametrize("flavour", Flavour)
@pytest.mark.parametrize("node", BOOKINFO["nodes"])
def test_everything_compiles_for_both_flavours(node: str, flavour: Flavour) -> None:
    found = compiled(node, flavour)
    assert {"ztunnel_outbound", "ztunnel_inbound", "ztunnel_inbound_plaintext"} <= set(found)


@pytest.mark.parametrize(
    ("destination", "port", "expected"),
    [
        ("10.96.183.192", 9080, SERVICE),
        ("10.96.183.192", 1, "PassthroughFilterChain"),
        ("10.244.1.23", 5, f"fc-outbound_pod_tunnel_clus_{PRODUCTPAGE}"),
        ("10.244.2.23", 5, f"fc-outbound_pod_local_tunnel_clus_{PRODUCTPAGE}"),
        ("10.244.1.30", 5, "fc-PassthroughCluster-tcp"),
        ("9.9.9.9", 5, "PassthroughFilterChain"),
        ("10.244.2.5", 15001, ""),
    ],
)
def test_outbound_chains(destination: str, port: int, expected: str) -> None:
    assert chain(listener("worker2", "ztunnel_outbound"), "10.244.2.3", destination, port) == expected


def test_only_local_pods_are_sources() -> None:
    outbound = listener("worker", "ztunnel_outbound")
    assert chain(outbound, "10.244.2.3", "10.96.183.192", 9080) == "PassthroughFilterChain"


def test_registry_only_has_no_default_chain() -> None:
    assert listener("worker2", "ztunnel_outbound", outbound="REGISTRY_ONLY").default_chain is None


def test_a_node_without_mesh_pods_has_no_empty_level() -> None:
    found = listener("worker", "ztunnel_outbound", pods={}, services={}, policies={})
    assert chain(found, "10.244.2.3", "1.1.1.1", 1) == "PassthroughFilterChain"


def test_clusters_exist_for_every_identity_and_tunnels_for_local_ones() -> None:
    found = compiled("worker")
    assert f"cluster {SERVICE}" in found
    assert f"cluster outbound_tunnel_clus_{REVIEWS}" in found
    assert f"cluster outbound_tunnel_clus_{PRODUCTPAGE}" not in found
    passthrough = found["cluster PassthroughCluster"]
    assert isinstance(passthrough, Cluster)
    assert passthrough.connect_timeout_s == 10


@pytest.mark.parametrize("flavour", Flavour)
def test_endpoints_name_the_tunnel_and_its_capture_port(flavour: Flavour) -> None:
    assignment = compiled("worker2", flavour)[f"eds {SERVICE}"]
    assert isinstance(assignment, LoadAssignment)
    tunnels = [endpoint.metadata["tunnel"] for endpoint in assignment.endpoints]
    assert tunnels == [
        {"destination": "10.244.1.23:9080", "address": "10.244.1.23:15008"},
        {"destination": "10.244.2.23:9080", "address": "10.244.2.23:15088"},
        {"destination": "10.244.2.22:9080", "address": "10.244.2.22:15088"},
    ]
    stand_in = "envoy.filters.listener.original_dst" in assignment.endpoints[0].metadata
    assert stand_in is (flavour is Flavour.STOCK_ENVOY)


def test_a_pod_outside_the_mesh_is_a_plain_endpoint() -> None:
    services = {"legacy": {"addresses": ["10.96.0.9"], "ports": {"tcp": 80}, "pods": ["legacy"]}}
    name = f"eds {PRODUCTPAGE}_to_tcp_legacy.default.svc.cluster.local_outbound_internal"
    assignment = compiled("worker2", services=services)[name]
    assert str(assignment.endpoints[0].address) == "10.244.1.30:80"
    assert assignment.endpoints[0].metadata == {}


def test_waypoints_take_what_is_for_their_account() -> None:
    pods = {**BOOKINFO["pods"], "wp": {"node": "worker", "addresses": ["10.244.1.40"], "service_account": "wp"}}
    found = compiled("worker2", pods=pods, waypoints={"bookinfo-reviews": {"pods": ["wp"]}})
    outbound = found["ztunnel_outbound"]
    to_waypoint = f"{PRODUCTPAGE}_to_server_waypoint_proxy_{REVIEWS}"
    assert chain(outbound, "10.244.2.3", "10.96.183.192", 9080) == to_waypoint
    assert chain(outbound, "10.244.2.3", "10.244.1.23", 9080) == to_waypoint
    assert chain(outbound, "10.244.2.22", "10.244.1.30", 80) == f"_to_client_waypoint_proxy_{REVIEWS}"
    assert str(found[f"eds {to_waypoint}"].endpoints[0].address) == "10.244.1.40:15006"
    proxy = next(c for c in outbound.chains if c.name == to_waypoint).terminal
    assert isinstance(proxy, model.TcpProxy)
    assert proxy.tunneling is not None
    assert [header.name for header in proxy.tunneling.headers] == ["x-envoy-original-dst-host", "baggage"]
    inbound = next(c for c in found["ztunnel_inbound"].chains if c.name == "inbound_10.244.2.23")
    assert allows(inbound, "spiffe://cluster.local/ns/default/sa/bookinfo-reviews")
    assert not allows(inbound, PRODUCTPAGE)


def allows(chain: model.FilterChain, principal: str | None, source: str = "10.9.9.9") -> bool:
    client = SocketAddress(source, 1)
    facts = ConnectionFacts(
        source=client,
        direct_source=client,
        destination=SocketAddress("10.244.2.23", 15008),
        peer=PeerCertificate(uri_sans=(principal,)) if principal else None,
    )
    return all(judge(rbac.rules, facts).allowed for rbac in chain.rbac if rbac.rules is not None)


POLICIES: list[tuple[dict[str, Any], dict[str, bool]]] = [
    ({}, {"a/ns/n/sa/s": True, "": True}),
    ({"p": {"rules": []}}, {"a/ns/n/sa/s": False, "": False}),  # an ALLOW without rules never matches
    ({"p": {"rules": [{}]}}, {"a/ns/n/sa/s": True, "": True}),
    ({"p": {"rules": [{"from": {"principals": ["*"]}}]}}, {"a/ns/n/sa/s": True, "": False}),
    ({"p": {"rules": [{"from": {"principals": ["a/ns/n/*"]}}]}}, {"a/ns/n/sa/s": True, "a/ns/m/sa/s": False}),
    ({"p": {"rules": [{"from": {"principals": ["*/sa/s"]}}]}}, {"a/ns/n/sa/s": True, "a/ns/n/sa/t": False}),
    ({"p": {"rules": [{"from": {"namespaces": ["n"]}}]}}, {"a/ns/n/sa/s": True, "a/ns/nn/sa/s": False, "": False}),
    ({"p": {"rules": [{"from": {"not_principals": ["a/ns/n/sa/s"]}}]}}, {"a/ns/n/sa/s": False, "": True}),
    ({"p": {"action": "DENY", "rules": [{"from": {"namespaces": ["n"]}}]}}, {"a/ns/n/sa/s": False, "": True}),
    ({"p": {"action": "AUDIT", "rules": [{}]}}, {"a/ns/n/sa/s": True}),
    ({"p": {"dry_run": True, "rules": []}}, {"a/ns/n/sa/s": True}),
    ({"p": {"rules": [{"to": {"ports": [1]}}]}}, {"a/ns/n/sa/s": False}),
    ({"p": {"pods": ["reviews-v1"], "rules": []}}, {"a/ns/n/sa/s": True}),  # selects another pod
    ({"p": {"service_account": "bookinfo-reviews", "rules": []}}, {"a/ns/n/sa/s": False}),
    ({"p": {"rules": [{"from": {"ip_blocks": ["10.9.0.0/16"]}}]}}, {"": True}),
    ({"p": {"rules": [{"from": {"ip_blocks": ["10.8.0.0/16"]}}]}}, {"": False}),
    ({"p": {"action": "DENY", "rules": [{"from": {"ip_blocks": ["::ffff:10.9.0.0/112"]}}]}}, {"": False}),
]


@pytest.mark.parametrize(("policies", "verdicts"), POLICIES)
def test_generated_policies_decide_like_the_mesh_file(policies: dict[str, Any], verdicts: dict[str, bool]) -> None:
    inbound = listener("worker2", "ztunnel_inbound", policies=policies)
    reviews = next(c for c in inbound.chains if c.name == "inbound_10.244.2.23")
    found = {who: allows(reviews, f"spiffe://{who}" if who else None) for who in verdicts}
    assert found == verdicts


def test_policy_names_and_order_of_filters() -> None:
    policies = {
        "a": {"rules": [{}]},
        "d": {"action": "DENY", "rules": [{"to": {"ports": [1]}}]},
        "x": {"action": "AUDIT", "rules": [{}]},
        "dry": {"action": "DENY", "dry_run": True, "rules": [{}]},
    }
    inbound = listener("worker2", "ztunnel_inbound", policies=policies)
    rbac = inbound.chains[0].rbac
    assert [filter_.log_only for filter_ in rbac] == [True, False, False]
    deny, allow = rbac[1], rbac[2]
    assert deny.shadow is not None
    assert deny.shadow_prefix == "istio_dry_run_deny_"
    assert allow.rules is not None
    assert allow.rules.tiers[0].policies[0].name == "ns[default]-policy[a]-rule[0]"


def test_baggage_by_ecds() -> None:
    metadata = compiled("worker2")["ecds envoy.filters.listener.workload_metadata"]
    assert isinstance(metadata, model.WorkloadMetadata)
    assert metadata.baggage["10.244.2.3"] == (
        "k8s.cluster.name=Kubernetes,k8s.namespace.name=default,k8s.deployment.name=productpage,"
        "service.name=productpage,service.version=latest"
    )
    assert "10.244.1.23" not in metadata.baggage


def test_servers_are_verified_and_clients_must_show_a_certificate() -> None:
    found = compiled("worker2")
    inbound = found["ztunnel_inbound"].chains[0].tls
    assert inbound.require_peer_certificate
    upstream = found[f"cluster outbound_tunnel_clus_{PRODUCTPAGE}"].transport_socket
    for context in (inbound, upstream):
        assert context.validation_ref.name == "ROOTCA"
        assert context.validation.san_matches[0].match.value == "spiffe://cluster.local/"


def test_envoy_resumes_no_session() -> None:
    """It would look at no certificate then; our own proxy never resumes, so its compiler forgets these fields."""
    said = [
        MessageToDict(message, preserving_proto_field_name=True, descriptor_pool=POOL)
        for message in NodeConfig(mesh(), "worker2", Flavour.STOCK_ENVOY).messages()
    ]
    contexts = [context for message in said for context in _contexts(message)]
    kinds = {context["@type"].rpartition(".")[2] for context in contexts}
    assert kinds == {"UpstreamTlsContext", "DownstreamTlsContext"}
    for context in contexts:
        assert context.get("max_session_keys") == 0 or context.get("disable_stateless_session_resumption") is True


def _contexts(value: Any) -> Iterator[dict[str, Any]]:
    if isinstance(value, dict):
        if str(value.get("@type")).endswith("TlsContext"):
            yield value
        value = list(value.values())
    if isinstance(value, list):
        for part in value:
            yield from _contexts(part)
